// SPDX-License-Identifier: Apache-2.0
/*
 * The team. The protocol, which tests/test_team_model.py explores in every interleaving:
 *
 * - An op has a number. A claim word holds the number of its op and the next chunk; a lane takes a chunk by raising
 *   it with compare-and-swap, so a lane that is late, with the stages of an older op in its hands, fails.
 * - To publish, the owner of `busy` first closes the words (the new number, no chunk left), then writes the stages,
 *   then opens the words, then stores the number that workers watch. Whoever read a stage of the new op therefore
 *   sees its word closed or open, never an old one.
 * - A done word holds the number and how many chunks have ended. The op is over when the last stage's is full; from
 *   then on no lane holds a chunk, and everything may be written again. A lane that is still on its way out holds
 *   nothing but numbers that no longer fit, and nobody waits for it.
 * - A worker parks by setting its bit, then looking at the number again; a publisher stores the number, then looks
 *   at the bits. One of them sees the other. Who clears a bit owes its worker exactly one token; a worker whose bit
 *   is gone waits for the token. A woken worker wakes two more, so that a publisher pays for two wakes, not for all.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* affinity, names of threads */
#endif
#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fpenv.h"
#include "shape.h"

enum {
    WORKERS = TK_TEAM_LANES - 1,
    WORDS = TK_TEAM_LANES / 64,
    STACK = 1 << 20,     /* bytes of a worker's stack, thread-local storage of other libraries included */
    LOOK = 64,           /* rounds of spinning between looks at the clock */
    WAKES = 2,           /* sleepers that a publisher and each woken worker wake */
    MASK_BYTES = 1024,   /* affinity masks of up to 8192 CPUs */
    MASK_NS = 10000000,  /* age at which the workers' CPUs are compared with the caller's */
    IN_A_ROW_NS = 200000, /* from the start of one small op to the next, at most, in a row of them */
    ASIDE_NS = 4000000,  /* at least, between two steps aside of one worker */
    AGAIN_NS = 1000000000 /* after a worker could not be made */
};

#define CLOSED UINT32_MAX

typedef void run_fn(void *, int32_t);
typedef void begin_fn(void *);

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int token; /* under the lock */
    pthread_t thread;
} worker;

static struct {
    /* What spinning workers watch, and read next. */
    _Alignas(64) _Atomic uint32_t number;
    _Atomic int32_t admitted, count, cpu; /* cpu: the caller's, or -1 */
    /* What lanes write, close together: a line for each word would only move more lines. */
    struct {
        _Atomic uint64_t claim, done;
    } _Alignas(64) words[TK_TEAM_STAGES];
    struct {
        _Atomic(run_fn *) run;
        _Atomic(begin_fn *) begin;
        _Atomic(void *) context;
        _Atomic int32_t chunks;
    } _Alignas(64) stages[TK_TEAM_STAGES];
    _Alignas(64) _Atomic uint64_t asleep[WORDS]; /* a bit a rank: parked, and nobody is waking it */
    _Alignas(64) _Atomic int32_t busy;
    /* Of the small ops in a row: their work together, and when the last one began. A lost update costs a wake. */
    _Alignas(64) _Atomic int64_t small;
    _Atomic uint64_t began;
    /* The owner of `busy` writes these. */
    _Atomic int32_t made;
    uint64_t again, looked;
    unsigned char mask[MASK_BYTES];
    _Atomic uint32_t masks; /* changes of the mask so far */
    _Atomic int32_t stale;  /* a worker may have put back a mask from before a change */
    uint64_t published; /* when, for the counters */
    _Atomic uint64_t first, last;
} team;

static worker workers[WORKERS];

static struct {
    _Atomic int32_t ceiling, worker_limit, rank_gate, spin_us, join_poll, profile, pretend;
} settings = {0, -1, 1, 2000, 2000, 0, 0};

static struct {
    _Atomic uint64_t ops, solo, busy, chunks, own_chunks, publish_ns, serve_ns, join_ns, reacted, first_ns, last_ns;
} counts;

#define LOAD(object) atomic_load_explicit(&(object), memory_order_relaxed)
#define READ(object) atomic_load_explicit(&(object), memory_order_acquire)
#define STORE(object, value) atomic_store_explicit(&(object), (value), memory_order_relaxed)
#define WRITE(object, value) atomic_store_explicit(&(object), (value), memory_order_release)
#define COUNT(object, n) atomic_fetch_add_explicit(&(object), (uint64_t)(n), memory_order_relaxed)

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" : : : "memory"); /* `yield` does nothing on most cores */
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

/* One round of waiting for another lane, which may have lost its CPU to somebody: then ours may be what it needs. */
static void wait_round(int32_t *rounds)
{
    if (*rounds < LOAD(settings.join_poll)) {
        ++*rounds;
        relax();
    } else {
        sched_yield();
    }
}

/* ---- CPUs ---------------------------------------------------------------------------------------------------- */

/* The CPUs that this thread may use, into mask; 0 where the system does not say. */
static int read_mask(unsigned char *mask)
{
#if defined(__linux__)
    memset(mask, 0, MASK_BYTES);
    return sched_getaffinity(0, MASK_BYTES, (cpu_set_t *)(void *)mask) == 0;
#else
    (void)mask;
    return 0;
#endif
}

static int32_t cpus(void)
{
    _Alignas(unsigned long) unsigned char mask[MASK_BYTES];
    if (read_mask(mask)) {
        const unsigned long *part = (const unsigned long *)(const void *)mask;
        int32_t n = 0;
        for (size_t i = 0; i < MASK_BYTES / sizeof *part; i++)
            n += __builtin_popcountl(part[i]);
        return n;
    }
    const long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > TK_TEAM_LANES ? TK_TEAM_LANES : (int32_t)n;
}

int32_t tk_team_live(void)
{
    const int32_t ceiling = LOAD(settings.ceiling), limit = LOAD(settings.worker_limit);
    int32_t lanes = TK_TEAM_LANES;
    if (ceiling > 0 && ceiling < lanes)
        lanes = ceiling;
    if (limit >= 0 && limit < lanes)
        lanes = limit + 1 < lanes ? limit + 1 : lanes;
    if (lanes > 1) {
        const int32_t pretend = LOAD(settings.pretend), there = pretend > 0 ? pretend : cpus();
        if (there < lanes)
            lanes = there;
    }
    return lanes > 1 ? lanes : 1;
}

/* Workers run where the caller may run: they follow when its CPUs change. */
static void follow_caller(uint64_t time)
{
    if (time - team.looked < MASK_NS)
        return;
    team.looked = time;
#if defined(__linux__)
    _Alignas(unsigned long) unsigned char mask[MASK_BYTES];
    const int stale = atomic_exchange(&team.stale, 0);
    if (!read_mask(mask) || (memcmp(mask, team.mask, MASK_BYTES) == 0 && !stale))
        return;
    memcpy(team.mask, mask, MASK_BYTES);
    atomic_fetch_add(&team.masks, 1);
    for (int32_t i = 0; i < LOAD(team.made); i++)
        pthread_setaffinity_np(workers[i].thread, MASK_BYTES, (const cpu_set_t *)(const void *)mask);
#endif
}

/* The CPU that this thread is on, or -1. */
static int32_t own_cpu(void)
{
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

/*
 * Leave the caller's CPU. The kernel wakes a thread where it ran last, and sees nothing to balance in two threads that
 * take turns on one CPU while another one idles: a worker that once got there would stay, and come to each op when the
 * caller is nearly through. It forbids itself that CPU for a moment, if it may use another.
 */
static void step_aside(int32_t cpu)
{
#if defined(__linux__)
    _Alignas(unsigned long) unsigned char mask[MASK_BYTES], others[MASK_BYTES];
    const uint32_t masks = atomic_load(&team.masks);
    if (cpu >= 8 * MASK_BYTES || !read_mask(mask))
        return;
    memcpy(others, mask, MASK_BYTES);
    CPU_CLR_S((size_t)cpu, MASK_BYTES, (cpu_set_t *)(void *)others);
    if (CPU_COUNT_S(MASK_BYTES, (cpu_set_t *)(void *)others) == 0)
        return;
    if (sched_setaffinity(0, MASK_BYTES, (cpu_set_t *)(void *)others) == 0)
        sched_setaffinity(0, MASK_BYTES, (cpu_set_t *)(void *)mask);
    if (atomic_load(&team.masks) != masks)
        atomic_store(&team.stale, 1); /* follow_caller looks again */
#else
    (void)cpu;
#endif
}

/* ---- claim, done --------------------------------------------------------------------------------------------- */

/* The next chunk of a stage, or -1: none is left, or the op is over. */
static int32_t claim(int32_t stage, uint32_t number, int32_t chunks)
{
    uint64_t word = LOAD(team.words[stage].claim);
    for (;;) {
        const uint32_t next = (uint32_t)word;
        if (word >> 32 != number || next >= (uint32_t)chunks)
            return -1;
        if (atomic_compare_exchange_weak_explicit(
                &team.words[stage].claim, &word, word + 1, memory_order_acq_rel, memory_order_relaxed))
            return (int32_t)next;
    }
}

/* Wait until a stage is done; 0 where its op is over. */
static int wait_done(int32_t stage, uint32_t number, int32_t chunks)
{
    int32_t rounds = 0;
    for (;;) {
        const uint64_t word = READ(team.words[stage].done);
        if (word >> 32 != number)
            return 0;
        if ((uint32_t)word == (uint32_t)chunks)
            return 1;
        wait_round(&rounds);
    }
}

static void reaction(void)
{
    const uint64_t after = now() - team.published;
    uint64_t seen = LOAD(team.first);
    while (after < seen && !atomic_compare_exchange_weak(&team.first, &seen, after)) {
    }
    seen = LOAD(team.last);
    while (after > seen && !atomic_compare_exchange_weak(&team.last, &seen, after)) {
    }
}

/* Take chunks of all stages until none is left; how many were taken. */
static int32_t serve(uint32_t number, int worker)
{
    const tk_fpenv before = tk_fpenv_enter();
    const int32_t count = READ(team.count);
    int32_t total = 0, last = 0;
    for (int32_t s = 0; s < count; s++) {
        if (s > 0 && !wait_done(s - 1, number, last))
            break;
        run_fn *const run = READ(team.stages[s].run);
        begin_fn *const begin = READ(team.stages[s].begin);
        void *const context = READ(team.stages[s].context);
        last = READ(team.stages[s].chunks);
        int32_t mine = 0;
        for (int32_t chunk = claim(s, number, last); chunk >= 0; chunk = claim(s, number, last)) {
            if (mine++ == 0) {
                if (worker && total == 0 && LOAD(settings.profile))
                    reaction();
                if (begin != NULL)
                    begin(context);
            }
            run(context, chunk);
        }
        if (mine > 0) {
            total += mine;
            atomic_fetch_add_explicit(&team.words[s].done, (uint64_t)mine, memory_order_acq_rel);
        }
    }
    tk_fpenv_leave(before);
    return total;
}

/* ---- park, wake ---------------------------------------------------------------------------------------------- */

/* Wake at most `most` sleepers of the ranks below `ranks`. */
static void wake(int32_t ranks, int32_t most)
{
    for (int32_t i = 0; i * 64 < ranks && most > 0; i++) {
        const int32_t here = ranks - i * 64;
        uint64_t bits = atomic_load(&team.asleep[i]) & (here >= 64 ? UINT64_MAX : (UINT64_C(1) << here) - 1);
        for (; bits != 0 && most > 0; bits &= bits - 1) {
            const uint64_t bit = bits & (~bits + 1);
            if (!(atomic_fetch_and(&team.asleep[i], ~bit) & bit))
                continue; /* somebody else has taken it */
            worker *const sleeper = &workers[i * 64 + __builtin_ctzll(bit)];
            pthread_mutex_lock(&sleeper->lock);
            sleeper->token = 1;
            pthread_cond_signal(&sleeper->wake);
            pthread_mutex_unlock(&sleeper->lock);
            most--;
        }
    }
}

/* Whether one of the workers of the ranks below `ranks` is made and does not sleep. */
static int somebody_is_awake(int32_t ranks)
{
    const int32_t made = LOAD(team.made), most = ranks < made ? ranks : made;
    for (int32_t i = 0; i * 64 < most; i++) {
        const int32_t here = most - i * 64;
        const uint64_t all = here >= 64 ? UINT64_MAX : (UINT64_C(1) << here) - 1;
        if (~LOAD(team.asleep[i]) & all)
            return 1;
    }
    return 0;
}

int32_t tk_team_worth_waking(int64_t work, int64_t enough)
{
    if (work >= enough)
        return 1;
    const uint64_t time = now();
    const int in_a_row = time - LOAD(team.began) < IN_A_ROW_NS;
    const int64_t sum = (in_a_row ? LOAD(team.small) : 0) + work;
    STORE(team.began, time);
    STORE(team.small, sum >= enough ? 0 : sum);
    return sum >= enough;
}

/* Sleep until there is an op that this worker has not seen; 1 where somebody woke it. */
static int park(int32_t rank, uint32_t seen)
{
    const uint64_t bit = UINT64_C(1) << (rank % 64);
    worker *const own = &workers[rank];
    atomic_fetch_or(&team.asleep[rank / 64], bit);
    if (atomic_load(&team.number) != seen && (atomic_fetch_and(&team.asleep[rank / 64], ~bit) & bit))
        return 0;
    pthread_mutex_lock(&own->lock);
    while (!own->token)
        pthread_cond_wait(&own->wake, &own->lock);
    own->token = 0;
    pthread_mutex_unlock(&own->lock);
    return 1;
}

static int dormant(int32_t rank)
{
    const int32_t limit = LOAD(settings.worker_limit);
    return limit >= 0 && rank >= limit;
}

static void *work(void *start)
{
    const int32_t rank = (int32_t)((worker *)start - workers);
    /* 0 is before the first op: the one that this worker was made for is new to it. */
    uint32_t seen = 0;
    uint64_t since = now(), aside = 0;
    for (uint32_t round = 0;; round++) {
        const uint32_t number = READ(team.number);
        if (number != seen) {
            seen = number;
            if (rank < READ(team.admitted)) {
                const int32_t cpu = own_cpu();
                if (cpu >= 0 && cpu == LOAD(team.cpu) && now() - aside > ASIDE_NS) {
                    step_aside(cpu);
                    aside = now();
                }
                serve(number, 1);
                since = now();
                continue;
            }
        }
        /* An op that does not invite this worker does not keep it awake, either. */
        if (round % LOOK == 0 && (dormant(rank) || now() - since > (uint64_t)LOAD(settings.spin_us) * 1000u)) {
            if (park(rank, seen) && rank < READ(team.admitted))
                wake(READ(team.admitted), WAKES);
            since = now();
            continue;
        }
        relax();
    }
    return NULL;
}

/* Make workers until there are `want`, or no more can be made. The caller owns `busy`. */
static void make(int32_t want, uint64_t time)
{
    int32_t made = LOAD(team.made);
    if (made >= want || time < team.again)
        return;
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0)
        return;
    pthread_attr_setstacksize(&attributes, STACK);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    /* Workers inherit the mask: signals are for the application's own threads, faults for whoever faults. */
    sigset_t blocked, before;
    sigfillset(&blocked);
    static const int synchronous[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
    for (size_t i = 0; i < sizeof synchronous / sizeof synchronous[0]; i++)
        sigdelset(&blocked, synchronous[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    for (; made < want; made++) {
        worker *const own = &workers[made];
        pthread_mutex_init(&own->lock, NULL);
        pthread_cond_init(&own->wake, NULL);
        own->token = 0;
        if (pthread_create(&own->thread, &attributes, work, own) != 0) {
            team.again = time + AGAIN_NS;
            break;
        }
#if defined(__linux__)
        pthread_setname_np(own->thread, "tunekit");
#endif
        WRITE(team.made, made + 1);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

/* ---- run ----------------------------------------------------------------------------------------------------- */

static int32_t run_inline(const tk_stage *stages, int32_t count)
{
    const tk_fpenv before = tk_fpenv_enter();
    for (int32_t s = 0; s < count; s++) {
        if (stages[s].chunks > 0 && stages[s].begin != NULL)
            stages[s].begin(stages[s].context);
        for (int32_t chunk = 0; chunk < stages[s].chunks; chunk++)
            stages[s].run(stages[s].context, chunk);
    }
    tk_fpenv_leave(before);
    return 1;
}

/* Close, write, open, announce. */
static uint32_t publish(const tk_stage *stages, int32_t count, int32_t admitted)
{
    const uint32_t number = LOAD(team.number) + 1;
    for (int32_t s = 0; s < TK_TEAM_STAGES; s++) {
        STORE(team.words[s].claim, (uint64_t)number << 32 | CLOSED);
        STORE(team.words[s].done, (uint64_t)number << 32);
    }
    for (int32_t s = 0; s < count; s++) {
        WRITE(team.stages[s].run, stages[s].run);
        WRITE(team.stages[s].begin, stages[s].begin);
        WRITE(team.stages[s].context, stages[s].context);
        WRITE(team.stages[s].chunks, stages[s].chunks);
    }
    WRITE(team.count, count);
    WRITE(team.admitted, admitted);
    for (int32_t s = 0; s < count; s++)
        WRITE(team.words[s].claim, (uint64_t)number << 32);
    atomic_store(&team.number, number);
    return number;
}

int32_t tk_team_run(const tk_stage *stages, int32_t count, int32_t lanes, int32_t awaken)
{
    if (count < 1 || count > TK_TEAM_STAGES)
        return -1;
    int32_t widest = 0;
    for (int32_t s = 0; s < count; s++) {
        if (stages[s].run == NULL || stages[s].chunks < 0)
            return -1;
        widest = stages[s].chunks > widest ? stages[s].chunks : widest;
    }
    const int profile = LOAD(settings.profile);
    if (lanes <= 1 || widest <= 1 || LOAD(settings.worker_limit) == 0 || (!awaken && !somebody_is_awake(lanes - 1))) {
        if (profile)
            COUNT(counts.solo, 1);
        return run_inline(stages, count);
    }
    if (atomic_exchange_explicit(&team.busy, 1, memory_order_acquire) != 0) {
        if (profile)
            COUNT(counts.busy, 1);
        return run_inline(stages, count);
    }
    const uint64_t called = now();
    int32_t want = tk_admitted(WORKERS, lanes, widest, 1);
    const int32_t limit = LOAD(settings.worker_limit);
    if (limit >= 0 && limit < want)
        want = limit;
    make(want, called);
    follow_caller(called);
    int32_t there = LOAD(team.made);
    if (limit >= 0 && limit < there)
        there = limit;
    const int32_t admitted = tk_admitted(there, lanes, widest, LOAD(settings.rank_gate));
    if (profile) {
        team.published = called;
        STORE(team.first, UINT64_MAX);
        STORE(team.last, 0);
    }
    STORE(team.cpu, own_cpu());
    const uint32_t number = publish(stages, count, admitted);
    if (awaken)
        wake(admitted, WAKES);
    const uint64_t begun = profile ? now() : 0;
    const int32_t own = serve(number, 0);
    const uint64_t served = profile ? now() : 0;
    wait_done(count - 1, number, stages[count - 1].chunks);
    if (profile) {
        uint64_t chunks = 0;
        for (int32_t s = 0; s < count; s++)
            chunks += (uint64_t)stages[s].chunks;
        COUNT(counts.ops, 1);
        COUNT(counts.chunks, chunks);
        COUNT(counts.own_chunks, own);
        COUNT(counts.publish_ns, begun - called);
        COUNT(counts.serve_ns, served - begun);
        COUNT(counts.join_ns, now() - served);
        if (LOAD(team.last) != 0) {
            COUNT(counts.reacted, 1);
            COUNT(counts.first_ns, LOAD(team.first));
            COUNT(counts.last_ns, LOAD(team.last));
        }
    }
    atomic_store_explicit(&team.busy, 0, memory_order_release);
    return admitted + 1;
}

/* ---- settings, counters, fork -------------------------------------------------------------------------------- */

tk_team_settings tk_team_get(void)
{
    return (tk_team_settings){LOAD(settings.ceiling), LOAD(settings.worker_limit), LOAD(settings.rank_gate),
        LOAD(settings.spin_us), LOAD(settings.join_poll), LOAD(settings.profile), LOAD(settings.pretend)};
}

void tk_team_set(const tk_team_settings *wanted)
{
    STORE(settings.ceiling, wanted->ceiling);
    STORE(settings.worker_limit, wanted->worker_limit);
    STORE(settings.rank_gate, wanted->rank_gate);
    STORE(settings.spin_us, wanted->spin_us);
    STORE(settings.join_poll, wanted->join_poll);
    STORE(settings.profile, wanted->profile);
    STORE(settings.pretend, wanted->pretend);
}

void tk_team_counted(tk_team_counts *found, int reset)
{
#define TAKE(field) found->field = reset ? atomic_exchange(&counts.field, 0) : LOAD(counts.field)
    TAKE(ops);
    TAKE(solo);
    TAKE(busy);
    TAKE(chunks);
    TAKE(own_chunks);
    TAKE(publish_ns);
    TAKE(serve_ns);
    TAKE(join_ns);
    TAKE(reacted);
    TAKE(first_ns);
    TAKE(last_ns);
#undef TAKE
}

void tk_team_workers(int32_t *made, int32_t *parked)
{
    *made = LOAD(team.made);
    *parked = 0;
    for (int32_t i = 0; i < WORDS; i++)
        *parked += __builtin_popcountll(LOAD(team.asleep[i]));
}

/* The child has one thread: no workers, nobody in the team, no debts. */
static void after_fork(void)
{
    STORE(team.number, 0);
    STORE(team.admitted, 0);
    STORE(team.count, 0);
    for (int32_t s = 0; s < TK_TEAM_STAGES; s++) {
        STORE(team.words[s].claim, CLOSED);
        STORE(team.words[s].done, 0);
    }
    for (int32_t i = 0; i < WORDS; i++)
        STORE(team.asleep[i], 0);
    STORE(team.made, 0);
    team.again = team.looked = 0;
    STORE(team.small, 0);
    tk_team_counts parents;
    tk_team_counted(&parents, 1);
    memset(team.mask, 0, sizeof team.mask);
    STORE(team.busy, 0);
}

void tk_team_load(void)
{
    static atomic_int loaded;
    if (!atomic_exchange(&loaded, 1))
        pthread_atfork(NULL, NULL, after_fork);
}
