/* SPDX-License-Identifier: Apache-2.0 */
/* What an op costs: this package's team, OpenMP's (libgomp) and a pool on condition variables, in turns in one
 * process. team_overhead LANES; prints JSON, nanoseconds an op. benchmarks/team.py builds and runs it. */
#define _GNU_SOURCE
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "team.h"

static int lanes;
static volatile int sink;

static void nothing(void *context, int32_t chunk)
{
    (void)context;
    (void)chunk;
}

/* A chunk that ends only when every lane has one: the round trip in which all take part. (A team may finish an empty
 * op before the others have come; OpenMP's threads always meet.) */
static atomic_int here;

static void meet(void *context, int32_t chunk)
{
    (void)context;
    (void)chunk;
    atomic_fetch_add(&here, 1);
    for (int i = 0; atomic_load(&here) < lanes; i++)
        if (i > 10000)
            sched_yield();
}

static void (*body)(void *, int32_t) = nothing;

/* ---- the pool that one writes first: a mutex, two conditions, a counter of chunks ---- */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t go, done;
    unsigned op;
    int next, chunks, left;
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0, 0};

static void pool_serve(void)
{
    while (pool.next < pool.chunks) {
        const int chunk = pool.next++;
        pthread_mutex_unlock(&pool.lock);
        body(NULL, chunk);
        pthread_mutex_lock(&pool.lock);
        if (--pool.left == 0)
            pthread_cond_signal(&pool.done);
    }
}

static void *pool_worker(void *unused)
{
    (void)unused;
    unsigned seen = 0;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.op == seen)
            pthread_cond_wait(&pool.go, &pool.lock);
        seen = pool.op;
        pool_serve();
    }
    return NULL;
}

/* ---- candidates ---- */

static void by_team(int chunks)
{
    const tk_stage stage = {body, NULL, NULL, chunks};
    tk_team_run(&stage, 1, lanes, 1);
}

static void by_openmp(int chunks)
{
#pragma omp parallel for num_threads(lanes) schedule(dynamic, 1)
    for (int i = 0; i < chunks; i++)
        body(NULL, i);
}

static void by_openmp_static(int chunks)
{
#pragma omp parallel for num_threads(lanes) schedule(static)
    for (int i = 0; i < chunks; i++)
        body(NULL, i);
}

static void by_pool(int chunks)
{
    pthread_mutex_lock(&pool.lock);
    pool.next = 0;
    pool.chunks = pool.left = chunks;
    pool.op++;
    pthread_cond_broadcast(&pool.go);
    pool_serve();
    while (pool.left > 0)
        pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

static void by_team_inline(int chunks)
{
    const tk_stage stage = {nothing, NULL, NULL, chunks};
    tk_team_run(&stage, 1, 1, 1);
}

static void by_openmp_inline(int chunks)
{
#pragma omp parallel for num_threads(1)
    for (int i = 0; i < chunks; i++)
        body(NULL, i);
}

static void by_loop(int chunks)
{
    for (int i = 0; i < chunks; i++)
        sink = i;
}

static void meeting(void (*run)(int))
{
    atomic_store(&here, 0);
    body = meet;
    run(lanes);
    body = nothing;
}

static void team_meets(int chunks)
{
    (void)chunks;
    meeting(by_team);
}

static void openmp_meets(int chunks)
{
    (void)chunks;
    meeting(by_openmp_static);
}

static void pool_meets(int chunks)
{
    (void)chunks;
    meeting(by_pool);
}

static const struct {
    const char *name;
    void (*run)(int chunks);
    int repeats, parked; /* parked: whether it is also measured after a pause */
} candidates[] = {
    {"team", by_team, 2000, 1},
    {"openmp", by_openmp, 300, 1},
    {"openmp static", by_openmp_static, 300, 1},
    {"pool", by_pool, 200, 1},
    {"team, all meet", team_meets, 300, 1},
    {"openmp, all meet", openmp_meets, 300, 1},
    {"pool, all meet", pool_meets, 100, 1},
    {"team inline", by_team_inline, 20000, 0},
    {"openmp inline", by_openmp_inline, 20000, 0},
    {"loop", by_loop, 20000, 0},
};
enum { CANDIDATES = sizeof candidates / sizeof candidates[0], ROUNDS = 15, PAUSES = 30 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print(int *first, const char *name, const char *how, int chunks, double *samples, int n)
{
    qsort(samples, (size_t)n, sizeof *samples, ascending);
    printf("%s\n {\"who\": \"%s\", \"how\": \"%s\", \"chunks\": %d, \"best\": %.1f, \"median\": %.1f}", *first ? "" : ",",
        name, how, chunks, samples[0], samples[n / 2]);
    *first = 0;
}

int main(int argc, char **argv)
{
    lanes = argc > 1 ? atoi(argv[1]) : 2;
    tk_team_load();
    pthread_t thread;
    for (int i = 1; i < lanes; i++)
        if (pthread_create(&thread, NULL, pool_worker, NULL) != 0)
            return 1;
    const int sizes[] = {lanes, 4 * lanes, 32 * lanes};
    int first = 1;
    printf("[");
    for (int s = 0; s < 3; s++) {
        static double samples[CANDIDATES][ROUNDS];
        for (int round = -1; round < ROUNDS; round++) {
            for (int c = 0; c < CANDIDATES; c++) {
                candidates[c].run(sizes[s]);
                const double start = now();
                for (int i = 0; i < candidates[c].repeats; i++)
                    candidates[c].run(sizes[s]);
                if (round >= 0)
                    samples[c][round] = (now() - start) / candidates[c].repeats;
                /* A spinning team must not take the CPU from the next candidate: all of them are asleep by then. */
                usleep(4000);
            }
        }
        for (int c = 0; c < CANDIDATES; c++)
            print(&first, candidates[c].name, "back to back", sizes[s], samples[c], ROUNDS);
    }
    static double pauses[CANDIDATES][PAUSES];
    for (int i = 0; i < PAUSES; i++)
        for (int c = 0; c < CANDIDATES; c++)
            if (candidates[c].parked) {
                usleep(5000);
                const double start = now();
                candidates[c].run(lanes);
                pauses[c][i] = now() - start;
            }
    for (int c = 0; c < CANDIDATES; c++)
        if (candidates[c].parked)
            print(&first, candidates[c].name, "after a pause", lanes, pauses[c], PAUSES);
    printf("\n]\n");
    return 0;
}
