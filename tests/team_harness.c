/* SPDX-License-Identifier: Apache-2.0 */
/* Runs the thread team without Python, so that sanitizers see all of it: team_harness MODE [ROUNDS]. Prints "ok". */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "team.h"

#define CHECK(what) \
    do { \
        if (!(what)) { \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what); \
            exit(1); \
        } \
    } while (0)

/* Stands in for pthread_create in team.c (the build defines the name): fails after so many. */
static atomic_int creations = 1 << 20;

int harness_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument)
{
#undef pthread_create
    if (atomic_fetch_sub(&creations, 1) <= 0)
        return 11; /* EAGAIN */
    return pthread_create(thread, attributes, start, argument);
}

enum { MOST = 300 };

typedef struct {
    int32_t stage, chunks, before_chunks;
    int ran[MOST]; /* plain: two lanes on one chunk, or a join that is too early, are races that a sanitizer names */
    const int *before;
    atomic_int begun;
    int *sum;
} part;

static void run(void *context, int32_t chunk)
{
    part *const p = context;
    CHECK(chunk >= 0 && chunk < p->chunks);
    for (int32_t i = 0; i < p->before_chunks; i++)
        CHECK(p->before[i] == 1);
    CHECK(atomic_load(&p->begun) > 0);
    p->ran[chunk]++;
}

static void begin(void *context)
{
    atomic_fetch_add(&((part *)context)->begun, 1);
}

static unsigned dice(unsigned *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void one_op(unsigned *state)
{
    static const int32_t sizes[] = {0, 1, 2, 3, 8, 17, MOST};
    part *const parts = calloc(TK_TEAM_STAGES, sizeof *parts);
    tk_stage stages[TK_TEAM_STAGES];
    const int32_t count = 1 + (int32_t)(dice(state) % TK_TEAM_STAGES);
    for (int32_t s = 0; s < count; s++) {
        parts[s].chunks = sizes[dice(state) % 7];
        if (s > 0) {
            parts[s].before = parts[s - 1].ran;
            parts[s].before_chunks = parts[s - 1].chunks;
        }
        stages[s] = (tk_stage){run, begin, &parts[s], parts[s].chunks};
    }
    const int32_t lanes = (int32_t)(dice(state) % 6);
    const int32_t got = tk_team_run(stages, count, lanes, (int32_t)(dice(state) % 4 > 0));
    CHECK(got >= 1 && got <= TK_TEAM_LANES);
    for (int32_t s = 0; s < count; s++) {
        for (int32_t i = 0; i < parts[s].chunks; i++)
            CHECK(parts[s].ran[i] == 1);
        CHECK(atomic_load(&parts[s].begun) <= got && (atomic_load(&parts[s].begun) > 0) == (parts[s].chunks > 0));
    }
    free(parts); /* no lane may touch it any more */
}

static int rounds = 2000;

static void *ops(void *seed)
{
    unsigned state = (unsigned)(uintptr_t)seed;
    for (int i = 0; i < rounds; i++)
        one_op(&state);
    return NULL;
}

static void set(int32_t limit, int32_t gate, int32_t spin)
{
    tk_team_settings s = tk_team_get();
    s.worker_limit = limit;
    s.rank_gate = gate;
    s.spin_us = spin;
    s.profile = 1;
    tk_team_set(&s);
}

static atomic_int stop;

static void *change(void *unused)
{
    (void)unused;
    unsigned state = 7;
    while (!atomic_load(&stop)) {
        set((int32_t)(dice(&state) % 5) - 1, (int32_t)(dice(&state) % 2), (int32_t)(dice(&state) % 3) * 100);
        sched_yield();
    }
    set(-1, 1, 2000);
    return NULL;
}

static void ops_of(int threads)
{
    pthread_t thread[8];
    for (int i = 0; i < threads; i++)
        CHECK(pthread_create(&thread[i], NULL, ops, (void *)(uintptr_t)(i + 1)) == 0);
    for (int i = 0; i < threads; i++)
        pthread_join(thread[i], NULL);
}

static void nested(void *context, int32_t chunk)
{
    (void)chunk;
    unsigned state = 3;
    one_op(&state);
    atomic_fetch_add((atomic_int *)context, 1);
}

static void mask_of_lane(void *context, int32_t chunk)
{
    sigset_t mask;
    pthread_sigmask(SIG_BLOCK, NULL, &mask);
    /* Workers block what a process may be sent, and no fault. */
    if (!pthread_equal(pthread_self(), *(pthread_t *)context))
        CHECK(sigismember(&mask, SIGTERM) && sigismember(&mask, SIGINT) && sigismember(&mask, SIGPROF) &&
              !sigismember(&mask, SIGSEGV) && !sigismember(&mask, SIGILL) && !sigismember(&mask, SIGFPE) &&
              !sigismember(&mask, SIGBUS));
    (void)chunk;
    usleep(200);
}

static int forked_child_works(void)
{
    unsigned state = 99;
    for (int i = 0; i < 50; i++)
        one_op(&state);
    int32_t made, parked;
    tk_team_workers(&made, &parked);
    return made > 0; /* its own workers */
}

typedef struct {
    pthread_t caller;
    atomic_int of_caller, of_others;
} shares;

static void slow_caller(void *context, int32_t chunk)
{
    shares *const s = context;
    (void)chunk;
    const int caller = pthread_equal(pthread_self(), s->caller);
    atomic_fetch_add(caller ? &s->of_caller : &s->of_others, 1);
    usleep(caller ? 50000 : 1000);
}

int main(int argc, char **argv)
{
    const char *const mode = argc > 1 ? argv[1] : "";
    if (argc > 2)
        rounds = atoi(argv[2]);
    tk_team_load();
    unsigned state = 1;
    if (strcmp(mode, "one") == 0) {
        ops((void *)(uintptr_t)5);
    } else if (strcmp(mode, "many") == 0) {
        ops_of(4);
        tk_team_counts c;
        tk_team_counted(&c, 0);
        CHECK(c.ops == 0); /* the switch is off */
    } else if (strcmp(mode, "limits") == 0) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, change, NULL) == 0);
        ops_of(2);
        atomic_store(&stop, 1);
        pthread_join(thread, NULL);
        tk_team_counts c;
        tk_team_counted(&c, 1);
        CHECK(c.ops > 0 && c.solo > 0 && c.chunks >= c.own_chunks && c.reacted <= c.ops && c.first_ns <= c.last_ns);
        tk_team_counted(&c, 0);
        CHECK(c.ops == 0);
    } else if (strcmp(mode, "parking") == 0) {
        set(-1, 1, 0); /* park at once: every op has sleepers to wake */
        for (int i = 0; i < rounds; i++) {
            one_op(&state);
            if (i % 8 == 0)
                usleep(100);
        }
    } else if (strcmp(mode, "nested") == 0) {
        atomic_int done = 0;
        const tk_stage stage = {nested, NULL, &done, 8};
        for (int i = 0; i < rounds; i++)
            CHECK(tk_team_run(&stage, 1, 3, 1) >= 1);
        CHECK(done == 8 * rounds);
    } else if (strcmp(mode, "none") == 0 || strcmp(mode, "few") == 0) {
        atomic_store(&creations, strcmp(mode, "few") == 0);
        ops((void *)(uintptr_t)5);
        int32_t made, parked;
        tk_team_workers(&made, &parked);
        CHECK(made == (strcmp(mode, "few") == 0));
    } else if (strcmp(mode, "signals") == 0) {
        pthread_t self = pthread_self();
        const tk_stage stage = {mask_of_lane, NULL, &self, 16};
        for (int i = 0; i < 20; i++)
            tk_team_run(&stage, 1, 4, 1);
        int32_t made, parked;
        tk_team_workers(&made, &parked);
        CHECK(made == 3);
        sigset_t mine;
        pthread_sigmask(SIG_BLOCK, NULL, &mine);
        CHECK(!sigismember(&mine, SIGTERM));
    } else if (strcmp(mode, "slow") == 0) {
        /* A lane that is fifty times as slow gets few of the chunks. */
        shares s = {.caller = pthread_self()};
        const tk_stage stage = {slow_caller, NULL, &s, 60};
        tk_team_run(&stage, 1, 3, 1);
        CHECK(s.of_caller + s.of_others == 60 && s.of_caller < 20);
    } else if (strcmp(mode, "fork") == 0) {
        for (int i = 0; i < rounds; i++) {
            const int first = i % 2; /* before and after the parent's first use, and between its ops */
            if (!first)
                one_op(&state);
            const pid_t child = fork();
            if (child == 0)
                _exit(forked_child_works() ? 0 : 1);
            one_op(&state);
            int status = 0;
            CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        }
    } else if (strcmp(mode, "forks") == 0) {
        /* Others multiply while this thread forks: the child must not find a lock that nobody holds any more. */
        pthread_t thread[2];
        for (int i = 0; i < 2; i++)
            CHECK(pthread_create(&thread[i], NULL, ops, (void *)(uintptr_t)(i + 1)) == 0);
        for (int i = 0; i < 60; i++) {
            const pid_t child = fork();
            if (child == 0)
                _exit(forked_child_works() ? 0 : 1);
            int status = 0;
            CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        }
        for (int i = 0; i < 2; i++)
            pthread_join(thread[i], NULL);
    } else if (strcmp(mode, "bad") == 0) {
        tk_stage stage = {run, NULL, NULL, -1};
        CHECK(tk_team_run(&stage, 1, 2, 1) == -1);
        CHECK(tk_team_run(&stage, 0, 2, 1) == -1 && tk_team_run(&stage, TK_TEAM_STAGES + 1, 2, 1) == -1);
        stage = (tk_stage){NULL, NULL, NULL, 1};
        CHECK(tk_team_run(&stage, 1, 2, 1) == -1);
        int32_t made, parked;
        tk_team_workers(&made, &parked);
        CHECK(made == 0); /* nothing was started for it */
        stage = (tk_stage){run, NULL, NULL, 0};
        CHECK(tk_team_run(&stage, 1, 2, 1) == 1);
    } else if (strcmp(mode, "idle") == 0) {
        /* CPU time of three seconds after the last op, in microseconds. */
        set(-1, 1, 2000);
        for (int i = 0; i < 100; i++)
            one_op(&state);
        int32_t made, parked;
        tk_team_workers(&made, &parked);
        CHECK(made > 0);
        sleep(3);
        tk_team_workers(&made, &parked);
        CHECK(parked == made);
        struct timespec before, after;
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
        sleep(1);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
        printf("%lld ", (long long)(after.tv_sec - before.tv_sec) * 1000000 + (after.tv_nsec - before.tv_nsec) / 1000);
    } else {
        fprintf(stderr, "no such mode\n");
        return 2;
    }
    printf("ok\n");
    return 0;
}
