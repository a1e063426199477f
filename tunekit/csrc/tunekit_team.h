/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tunekit's thread team for C and C++: one per process, for every family. docs/team.md says how it behaves.
 *
 * An op is up to six stages; a stage is a function and a number of chunks. Every chunk runs exactly once, on the
 * caller or on a worker, and a stage begins when all chunks of the one before it have ended. What a stage writes is
 * seen by the next stage and by the caller afterwards. Chunks must not throw, longjmp or call Python, and must not
 * depend on which lane runs them; a chunk may call the team again, and that op runs inline.
 *
 * The table is `team` of tunekit_q8.h's, or the address in the capsule `tunekit._core.team`.
 */
#ifndef TUNEKIT_TEAM_H
#define TUNEKIT_TEAM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    TK_TEAM_ABI = 1,
    TK_TEAM_STAGES = 6,  /* of an op, at most */
    TK_TEAM_LANES = 256  /* the caller and the workers, at most */
};

typedef struct {
    void (*run)(void *context, int32_t chunk); /* chunk is in [0, chunks) */
    void (*begin)(void *context);              /* NULL, or called by each lane before its first chunk of the stage */
    void *context;
    int32_t chunks; /* 0 and more */
} tk_stage;

/* What the capsule `tunekit._core.team` points to. `abi` changes when something is taken away; a table of a newer
 * tunekit is longer, and `size` tells. */
typedef struct {
    uint32_t abi;
    uint32_t size;
    /*
     * Runs an op and returns when it is done: the number of lanes that were invited, 1 where it ran inline, or -1 (and
     * nothing ran) where count is not 1 to 6, a stage has no function, or chunks is negative. lanes: how many the
     * work is worth, of lanes(). wake: 1 where the work is worth waking parked workers, of worth_waking(). Each lane
     * runs in the floating-point environment of the kernels (nearest, no flush to zero), and the caller's comes back.
     */
    int32_t (*run)(const tk_stage *stages, int32_t count, int32_t lanes, int32_t wake);
    int32_t (*live)(void); /* lanes that an op may have now; a system call */
    /* clamp(work / target, 1, min(live, cap)); work in multiply-accumulates; cap 0 is none */
    int32_t (*lanes)(int64_t work, int64_t target, int32_t live, int32_t cap);
    /* Into how many chunks `units` are cut: at most lanes * oversplit, none smaller than grain; see shape.h. */
    int32_t (*chunks)(int64_t units, int64_t grain, int32_t lanes, int32_t oversplit, int fill);
    /* Where part i of near-equal parts begins; part i ends where i + 1 begins. */
    int64_t (*part)(int64_t total, int64_t parts, int64_t i);
    int64_t (*target)(void); /* target_chunk_work of this box's profile: the `target` of lanes() */
    int32_t (*worth_waking)(int64_t work, int64_t enough);
    int64_t (*enough)(void); /* wake_work of this box's profile: the `enough` of worth_waking() */
    int32_t (*cap)(int32_t one_token); /* gemv_lane_cap, or with 0 batch_lane_cap, of this box's profile */
} tk_team_api;

#ifdef __cplusplus
}
#endif

#endif
