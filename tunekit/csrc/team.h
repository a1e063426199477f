/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The thread team: one per process, for every family, in C without Python.
 *
 * An op is up to six stages; a stage is a function and a number of chunks. Every chunk runs exactly once, on the
 * caller or on a worker, and a stage begins when all chunks of the one before it have ended. What a stage writes is
 * seen by the next stage and by the caller afterwards. Chunks must not throw, longjmp or call Python, and must not
 * depend on which lane runs them; a chunk may call the team again, and that op runs inline.
 *
 * Workers are made when an op first wants them, never at load; a worker that cannot be made means fewer lanes. They
 * spin for a while after an op that they took part in and then park, block all signals but the synchronous ones,
 * and are never joined. After a fork the child begins without workers.
 */
#ifndef TK_TEAM_H
#define TK_TEAM_H

#include <stdint.h>

#include "tunekit_team.h" /* stages, and the table that other packages get */

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Run an op and return when it is done: the number of lanes that were invited, 1 where it ran inline, or -1 (and
 * nothing ran) where count is not 1 to 6, a stage has no function, or chunks is negative.
 *
 * lanes: how many the work is worth (see tk_lanes of shape.h). 1 or less runs inline and writes no shared word, as
 * does an op of one chunk a stage. An op that finds the team busy with another one runs inline, too.
 * wake: 1 where the work is worth waking parked workers, which costs the caller microseconds; with 0 the op goes to
 * those that are awake, and runs inline where nobody is.
 * Each lane runs in the floating-point environment of fpenv.h, and the caller's comes back.
 */
int32_t tk_team_run(const tk_stage *stages, int32_t count, int32_t lanes, int32_t wake);

/*
 * Whether an op is worth waking parked workers: its work reaches `enough`, or does so together with the ops right
 * before it. Many small products in a row are worth what one large product is, and the first of them pay for no wake.
 * To be asked only of an op that is worth more than one lane, and once; the answer is what tk_team_run takes as wake.
 */
int32_t tk_team_worth_waking(int64_t work, int64_t enough);

/* Lanes that an op may have now: CPUs that this thread may run on, less what limits there are; 1 and more. */
int32_t tk_team_live(void);

/* How the team behaves; set with the team idle, or accept that an op under way keeps the old values. */
typedef struct {
    int32_t ceiling;      /* lanes at most, whatever CPUs there are (a quota, TUNEKIT_THREADS); 0: no limit */
    int32_t worker_limit; /* workers at most that take part, from now on; below 0: no limit; 0: the caller alone */
    int32_t rank_gate;    /* 1: an op invites no more workers than have a chunk to get; 0: all there are */
    int32_t spin_us;      /* microseconds that a worker watches for the next op before it parks */
    int32_t join_poll;    /* rounds that a lane polls for others to end before it yields its CPU between rounds */
    int32_t profile;      /* 1: count and time, see tk_team_counts */
    int32_t pretend;      /* more than 0: CPUs that there are said to be, for tests of more lanes than a machine has */
} tk_team_settings;

tk_team_settings tk_team_get(void);
void tk_team_set(const tk_team_settings *settings);

/* Sums since the start or the last reset, counted while `profile` is 1. Nanoseconds. */
typedef struct {
    uint64_t ops;         /* that were published */
    uint64_t solo;        /* that ran inline because one lane was enough, or nobody was awake */
    uint64_t busy;        /* that ran inline because the team was not free */
    uint64_t chunks;      /* of published ops */
    uint64_t own_chunks;  /* of these, run by the caller */
    uint64_t publish_ns;  /* from the call to the first chunk of the caller, wakes included */
    uint64_t serve_ns;    /* the caller's chunks, and its waits between stages */
    uint64_t join_ns;     /* the caller's wait for the last chunks of others */
    uint64_t reacted;     /* ops in which a worker got a chunk ... */
    uint64_t first_ns;    /* ... and after how long the first of them did, */
    uint64_t last_ns;     /* ... and the last of them */
} tk_team_counts;

void tk_team_counted(tk_team_counts *counts, int reset);

/* Workers made so far, and parked now. */
void tk_team_workers(int32_t *made, int32_t *parked);

/* Registers the fork handler; called once, when the core is loaded. */
void tk_team_load(void);

#ifdef __cplusplus
}
#endif

#endif
