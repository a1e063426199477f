/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The forward pass of a llama-like model: C that calls tunekit's products and team, and q8llama's own tuned family.
 *
 * Everything that computes is the business of one of the two families, whose rows all give the same bits, and every
 * operation treats a token by itself, in one order. So logits depend on the tokens alone: not on the row, the number
 * of lanes, how a prompt is cut into batches, or whether a token came in a prompt or by itself.
 */
#ifndef Q8LLAMA_MODEL_H
#define Q8LLAMA_MODEL_H

#include <Python.h> /* first: it sets feature macros */

#include <stdatomic.h>
#include <stdint.h>

#include <q8llama_kernels.h>
#include <tunekit_q8.h>

enum { ATTN_Q, ATTN_K, ATTN_V, ATTN_OUT, FFN_GATE, FFN_UP, FFN_DOWN, MATRICES };
enum { ATTN_NORM, FFN_NORM, NORMS };
enum { TILE = 16, SLICE = 256, BATCH = 512 };

typedef struct {
    int8_t *w; /* planes of tunekit: Q8 ... */
    float *ws;        /* with scales of float32 ... */
    uint16_t *ws_f16; /* ... or of float16 */
    uint8_t *nib, *e; /* ... or MXFP4 */
    int64_t N, K;
} matrix;

typedef struct {
    matrix m[MATRICES];
    float *norm[NORMS];
} layer;

/* Memory on huge pages, handed out in pieces that go all at once. */
typedef struct room {
    struct room *before;
    int64_t size, used;
    uint8_t *at;
} room;

typedef struct {
    const tunekit_q8_api *q8;
    const q8llama_kernels_api *ops;
    int64_t layers, d, heads, kv_heads, group, hd, ff, vocab, qd, kvd;
    float eps, scale;
    double *turns; /* hd / 2: radians a position */
    layer *layer;
    matrix embedding, head; /* head.N is 0 where the embedding is the head */
    float *last_norm;
    room *planes; /* of all matrices */
} model;

/* What a stage is timed as. */
enum { P_EMBED, P_NORM, P_QKV, P_ROPE, P_ATTEND, P_OUT, P_GATE_UP, P_SWIGLU, P_DOWN, P_HEAD, PARTS };

/* What one of the lanes needs for itself. */
typedef struct {
    float *row;   /* values of a token, of any of its widths */
    void *acts;   /* the same, quantised and prepared */
    float *acc, *part, *ml, *pml; /* attention of a block of queries */
} lane;

typedef struct {
    const model *m;
    int64_t capacity, position, batch;
    float *cosines, *sines; /* capacity x hd / 2 */
    float *k, *v;           /* slices x layers x kv_heads x SLICE x hd, k in tiles of 16 positions */
    float *x, *norm, *q, *nk, *nv, *out, *gate, *up, *logits_in; /* batch x width */
    float *acc, *ml;        /* decode: kv_heads x slices x group x hd; and x 2 */
    lane lanes[TK_TEAM_LANES];
    int32_t ready;          /* lanes that have been made */
    int32_t plain;          /* decode: a key-value head is one unit, whatever the context */
    int32_t profile;
    atomic_flag busy;       /* set while a thread feeds it */
    int64_t ns[PARTS], ops, rendezvous; /* of everything since they were last asked for */
} session;

/* All return 0, or -1 where memory ran out. */
int session_init(session *s, const model *m, int64_t capacity);
void session_free(session *s);
/* Feeds tokens; logits: vocab floats for the last, or for each of them, or NULL. Room for them is the caller's care. */
int forward(session *s, const int32_t *tokens, int64_t count, float *logits, int all);
void model_free(model *m);
void *aligned_zeros(int64_t bytes); /* NULL for 0 and for no memory */
void *room_for(room **last, int64_t bytes); /* zeros that last as long as the room: NULL for no memory */

#endif
