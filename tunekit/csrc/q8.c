// SPDX-License-Identifier: Apache-2.0
#include "q8.h"

#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "fpenv.h"
#include "shape.h"
#include "team.h"

/* ---- scratch: two blocks a thread, which grow and are freed when the thread ends ------------------ */

enum { SHARED, LANE, BLOCKS }; /* what all lanes of its op read; what it needs as one of the lanes */

typedef struct {
    void *memory[BLOCKS];
    size_t size[BLOCKS];
} scratch;

static pthread_key_t scratch_key;
static int scratch_ready;

static void scratch_free(void *p)
{
    scratch *own = p;
    for (int i = 0; i < BLOCKS; i++)
        free(own->memory[i]);
    free(own);
}

void tk_q8_load(void)
{
    if (!scratch_ready)
        scratch_ready = pthread_key_create(&scratch_key, scratch_free) == 0;
}

/* At least size bytes on a 64-byte boundary, contents unspecified; NULL where there is no memory. */
static uint8_t *scratch_get(int which, size_t size)
{
    if (!scratch_ready)
        return NULL;
    scratch *own = pthread_getspecific(scratch_key);
    if (own == NULL) {
        own = calloc(1, sizeof *own);
        if (own == NULL)
            return NULL;
        if (pthread_setspecific(scratch_key, own) != 0) {
            free(own);
            return NULL;
        }
    }
    if (own->size[which] < size) {
        /* Freed first: the old contents are of no use, and both at once could be too much. */
        free(own->memory[which]);
        own->memory[which] = NULL;
        own->size[which] = 0;
        /* A quarter more, so that slowly growing products do not allocate each time. */
        const size_t want = size <= SIZE_MAX - size / 4 ? size + size / 4 : size;
        if (posix_memalign(&own->memory[which], 64, want) == 0) {
            own->size[which] = want;
        } else if (posix_memalign(&own->memory[which], 64, size) == 0) {
            own->size[which] = size;
        } else {
            own->memory[which] = NULL;
            return NULL;
        }
    }
    return own->memory[which];
}

/* ---- the traversal ------------------------------------------------------------------------------ */

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t round_up_64(int64_t n)
{
    return n + (-n & 63);
}

static int64_t parts_of(int64_t n, int64_t size)
{
    return n / size + (n % size > 0);
}

enum {
    OP_BYTES = 32 * 1024 * 1024, /* prepared tokens that meet the weights in one op */
    /*
     * Weights that meet all tokens of a block before the next ones: some groups, in the second cache. A tile then
     * keeps its tokens in the first one for all of them. (Zen 3, 64 tokens: 3 % more than with one group at a time
     * at 2048x512, 5 % at 2048x2048, 4 to 9 % at 2048x8192.)
     */
    STEP_BYTES = 128 * 1024,
    MX4_FEW = 4                  /* tokens up to which it does not pay to expand MXFP4 weights */
};

/* One op: some tokens of a product, prepared, against all regions. */
typedef struct {
    const tk_q8_row *row;
    const tk_q8_region *regions;
    int32_t count, nb;
    const float *x; /* NULL where q and s are given */
    const int8_t *q;
    const float *s;
    int8_t *own_q;
    float *own_s;
    uint8_t *xa;
    int64_t first, tokens; /* of the product */
    int64_t block;         /* tokens whose prepared form stays near */
    int64_t near;          /* groups that stay near while the tokens of a block pass */
    int64_t room;          /* bytes of a group's MXFP4 weights, expanded; 0 where the row's tile looks them up */
    int64_t cost;          /* of all units: a unit costs its region's tokens, or 1 where all regions have all tokens */
    int alike;
    int32_t act_chunks;
    tk_grid grid;
    _Atomic int failed;
} op;

/*
 * Groups [g, g + ng) of a region against a block of prepared tokens [t0, t0 + tokens), written at y with row distance
 * ldy. The tiles are near-equal (64 tokens in tiles of at most 5: twelve of 5 and one of 4): a tile of full width and
 * a sliver cost more than two of nearly half each.
 */
static void groups_of(const op *o, const tk_q8_region *m, float *y, int64_t ldy, int64_t g, int64_t t0,
    int64_t tokens, int32_t ng)
{
    const tk_q8_row *const row = o->row;
    const int64_t scales = (int64_t)row->mr * o->nb;
    const int mx4 = m->w == NULL;
    const int8_t *const w = mx4 ? NULL : m->w + g * scales * 32;
    const float *const ws = mx4 || m->ws == NULL ? NULL : m->ws + g * scales;
    const uint16_t *const ws_f16 = mx4 || m->ws != NULL ? NULL : m->ws_f16 + g * scales;
    const uint8_t *const nib = mx4 ? m->nib + g * scales * 16 : NULL, *const e = mx4 ? m->e + g * scales : NULL;
    if (tokens == 1 || (mx4 && o->room > 0 && tokens <= MX4_FEW)) {
        for (int64_t t = 0; t < tokens; t++) {
            if (mx4)
                row->mx4_gemv(y + t * ldy, nib, e, o->xa, o->tokens, t0 + t, o->nb, ng);
            else if (ws != NULL)
                row->gemv(y, w, ws, o->xa, o->tokens, t0, o->nb, ng);
            else
                row->gemv_f16(y, w, ws_f16, o->xa, o->tokens, t0, o->nb, ng);
        }
        return;
    }
    /* The lane's own block begins with room for the expanded weights of `near` groups. */
    uint8_t *const room = mx4 ? scratch_get(LANE, 0) : NULL;
    if (mx4 && o->room > 0)
        row->mx4_expand(room, nib, e, o->nb, ng);
    const int64_t count = parts_of(tokens, row->tokstep);
    const int64_t width = tokens / count, wider = tokens % count;
    int64_t t = 0;
    for (int64_t i = 0; i < count; i++) {
        const int32_t nt = (int32_t)(width + (i < wider));
        if (mx4)
            row->mx4_tile(y + t * ldy, ldy, nib, e, room, o->xa, o->tokens, t0 + t, nt, o->nb, ng);
        else if (ws != NULL)
            row->tile(y + t * ldy, ldy, w, ws, o->xa, o->tokens, t0 + t, nt, o->nb, ng);
        else
            row->tile_f16(y + t * ldy, ldy, w, ws_f16, o->xa, o->tokens, t0 + t, nt, o->nb, ng);
        t += nt;
    }
}

/* Each output and its bias: one more addition, after the fold. */
static void add_bias(const tk_q8_region *m, float *y, int64_t n0, int64_t n1, int64_t tokens)
{
    if (m->bias == NULL)
        return;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t n = n0; n < n1; n++)
            y[t * m->ldy + n] += m->bias[n];
}

/* Units [u0, u1) of a region against tokens [t0, t1) of the op; y is the region's row of token t0. */
static void rectangle(const op *o, const tk_q8_region *m, float *y, int64_t u0, int64_t u1, int64_t t0, int64_t t1,
    float *edge)
{
    const int64_t mr = o->row->mr, each = o->row->groups;
    const int64_t groups = m->N / mr, rest = m->N % mr;
    const int64_t g0 = u0 * each, g1 = least(u1 * each, groups);
    const int tail = rest > 0 && u1 * each > groups;
    const int64_t blocks = parts_of(t1 - t0, o->block);
    for (int64_t i = 0; i < blocks; i++) {
        const int64_t begin = tk_part(t1 - t0, blocks, i), tokens = tk_part(t1 - t0, blocks, i + 1) - begin;
        float *const to = y + begin * m->ldy;
        /* One tile a block: all the groups in one call, if nothing has to be expanded for it. */
        const int one = tokens <= (m->w != NULL || o->room == 0 ? o->row->tokstep : 1);
        const int64_t step = least(one ? most(g1 - g0, 1) : o->near, INT32_MAX);
        for (int64_t g = g0; g < g1; g += step)
            groups_of(o, m, to + g * mr, m->ldy, g, t0 + begin, tokens, (int32_t)least(step, g1 - g));
        if (tail) {
            groups_of(o, m, edge, mr, groups, t0 + begin, tokens, 1);
            for (int64_t t = 0; t < tokens; t++)
                memcpy(to + t * m->ldy + groups * mr, edge + t * mr, (size_t)rest * sizeof(float));
        }
        add_bias(m, to, g0 * mr, tail ? m->N : g1 * mr, tokens);
    }
}

static int64_t units_of(const op *o, const tk_q8_region *m)
{
    return parts_of(parts_of(m->N, o->row->mr), o->row->groups);
}

/* The tokens of an op that a region has, relative to the op; how many. */
static int64_t tokens_of(const op *o, const tk_q8_region *m, int64_t *begin)
{
    *begin = most(m->t0 - o->first, 0);
    return most(least(m->t1 - o->first, o->tokens) - *begin, 0);
}

/* Where the row cell i begins: units before it, all regions in a row, cut to equal cost. */
static int64_t cut(const op *o, int64_t i)
{
    const int64_t target = tk_part(o->cost, o->grid.rows, i);
    int64_t units = 0, cost = 0, begin;
    for (int32_t r = 0; r < o->count; r++) {
        const int64_t own = units_of(o, &o->regions[r]);
        const int64_t each = o->alike ? 1 : tokens_of(o, &o->regions[r], &begin);
        if (cost + own * each >= target)
            return units + (each > 0 ? parts_of(target - cost, each) : 0);
        cost += own * each;
        units += own;
    }
    return units;
}

/* A lane's own block: expanded weights | the outputs of a last group that is not whole, at *edge. */
static int lane_room(const op *o, float **edge)
{
    int mx4 = 0;
    for (int32_t r = 0; r < o->count; r++)
        mx4 |= o->regions[r].w == NULL;
    const int64_t before = mx4 ? round_up_64(o->near * o->room) : 0;
    uint8_t *const room = scratch_get(LANE, (size_t)(before + o->block * o->row->mr * (int64_t)sizeof(float)));
    *edge = room != NULL ? (float *)(void *)(room + before) : NULL;
    return room != NULL;
}

static void cell(void *context, int32_t chunk)
{
    op *const o = context;
    const int64_t row_cell = chunk % o->grid.rows, token_cell = chunk / o->grid.rows;
    float *edge;
    if (!lane_room(o, &edge)) {
        o->failed = 1;
        return;
    }
    const int64_t u0 = cut(o, row_cell), u1 = row_cell + 1 < o->grid.rows ? cut(o, row_cell + 1) : INT64_MAX;
    /* Token cells are whole tiles. */
    const int64_t step = o->row->tokstep, steps = parts_of(o->tokens, step);
    const int64_t a = tk_part(steps, o->grid.tokens, token_cell) * step;
    const int64_t b = least(tk_part(steps, o->grid.tokens, token_cell + 1) * step, o->tokens);
    int64_t base = 0;
    for (int32_t r = 0; r < o->count; r++) {
        const tk_q8_region *const m = &o->regions[r];
        const int64_t own = units_of(o, m), lo = most(u0 - base, 0), hi = least(u1 - base, own);
        int64_t begin;
        const int64_t tokens = tokens_of(o, m, &begin), t0 = most(a, begin), t1 = least(b, begin + tokens);
        if (lo < hi && t0 < t1)
            rectangle(o, m, m->y + (o->first + t0) * m->ldy, lo, hi, t0, t1, edge);
        base += own;
    }
}

/* Quantise and prepare a part of the op's tokens. */
static void act(void *context, int32_t chunk)
{
    op *const o = context;
    const int64_t t0 = tk_part(o->tokens, o->act_chunks, chunk), t1 = tk_part(o->tokens, o->act_chunks, chunk + 1);
    const int64_t K = (int64_t)o->nb * 32;
    if (o->x != NULL) {
        o->row->quantize(o->own_q, o->own_s, o->x + o->first * K, t0, t1, o->nb);
        o->row->prepare(o->xa, o->own_q, o->own_s, o->tokens, t0, t1, o->nb);
    } else {
        o->row->prepare(o->xa, o->q + o->first * K, o->s + o->first * o->nb, o->tokens, t0, t1, o->nb);
    }
}

static void configure(void *context)
{
    ((op *)context)->row->amx_cfg();
}

/* Shape one op for its lanes and run it. */
static int run(op *o, const tk_q8_profile *p)
{
    const int64_t K = (int64_t)o->nb * 32;
    int64_t work = 0, units = 0, begin;
    int single = 1;
    o->cost = 0;
    o->alike = 1;
    for (int32_t r = 0; r < o->count; r++) {
        const tk_q8_region *const m = &o->regions[r];
        const int64_t tokens = tokens_of(o, m, &begin), own = units_of(o, m);
        work += tokens * m->N * K;
        o->cost += tokens * own;
        units += tokens > 0 ? own : 0;
        single &= tokens <= 1;
        o->alike &= tokens == o->tokens;
    }
    if (o->cost == 0)
        return 0;
    if (o->alike)
        o->cost = units;
    /* Asking which CPUs there are is a system call, and small products need not know. */
    const int32_t live = work / 2 >= p->target_chunk_work ? tk_team_live() : 1;
    const int32_t lanes = tk_lanes(work, p->target_chunk_work, live, single ? p->gemv_lane_cap : p->batch_lane_cap);
    const int64_t unit_rows = (int64_t)o->row->mr * o->row->groups;
    const int64_t grain = single ? p->matmul_min_chunk_rows_gemv : p->matmul_min_chunk_rows;
    const int32_t oversplit = single ? p->q8_gemv_chunks_per_job : p->q8_batch_chunks_per_job;
    const int32_t chunks = tk_chunks(units, parts_of(grain, unit_rows), lanes, oversplit, single && p->gemv_wave_fill);
    const tk_grid one = {chunks, 1};
    /* `lanes` chunks pass the claim word while one runs: so much work keeps it from being what they wait for. */
    const int64_t cells = work / most(most(p->target_chunk_work, 1) / 8 * lanes, 1);
    const int64_t tiles = parts_of(o->tokens, o->row->tokstep);
    o->grid = o->alike ? tk_cells(chunks, o->tokens, tiles, lanes, oversplit, p->batch_grid_2d, cells) : one;
    o->act_chunks = lanes > 1 ? (int32_t)most(1, least(least(o->tokens, (int64_t)lanes * 2),
                                                    o->tokens * K / most(p->act_threshold, 1)))
                              : 1;
    tk_stage stages[2] = {{act, NULL, o, o->act_chunks}, {cell, configure, o, o->grid.rows * o->grid.tokens}};
    const int32_t wake = lanes > 1 && tk_team_worth_waking(work, p->wake_work);
    if (o->act_chunks > 1) {
        tk_team_run(stages, 2, lanes, wake);
    } else {
        /* Not worth a rendezvous of its own. */
        const tk_fpenv caller = tk_fpenv_enter();
        act(o, 0);
        tk_fpenv_leave(caller);
        tk_team_run(stages + 1, 1, lanes, wake);
    }
    return o->failed ? -1 : 0;
}

tk_q8_profile tk_q8_box = {
    .target_chunk_work = 1000000,
    .wake_work = 2000000,
    .q8_l2_budget = 4 * 1024 * 1024,
    .act_threshold = 16384, /* some microseconds, many times what a stage costs */
    .q8_token_block = 128,
    .matmul_min_chunk_rows = 16,
    .matmul_min_chunk_rows_gemv = 64,
    .q8_batch_chunks_per_job = 4,
    .q8_gemv_chunks_per_job = 1,
    .gemv_wave_fill = 1,
    .batch_grid_2d = 2, /* what benchmarks/simulate.py finds: never worse, and a fifth better where rows starve lanes */
};

/* What of an op follows from its row, K and the box: how many groups and tokens stay near. Returns bytes a token. */
static int64_t near_of(op *o, const tk_q8_profile *p)
{
    const int64_t few = most(STEP_BYTES / ((int64_t)o->row->mr * o->nb * 32), 1);
    o->near = parts_of(few, o->row->groups) * o->row->groups;
    o->room = o->row->mx4_room != NULL ? o->row->mx4_room(o->nb) : 0;
    /* Asked of a whole block: a prepared form may have a least size, whatever the tokens. */
    const int64_t each = most(o->row->acts_bytes(128, o->nb) / 128, 1);
    o->block = tk_token_block(p->q8_token_block, p->q8_l2_budget, each);
    return each;
}

int tk_q8_piece(const tk_q8_row *row, const tk_q8_region *region, const uint8_t *xa, int64_t T, int64_t t0,
    int64_t t1, int64_t u0, int64_t u1, int32_t nb)
{
    op o = {.row = row, .regions = region, .count = 1, .nb = nb, .xa = (uint8_t *)(uintptr_t)xa, .tokens = T};
    float *edge;
    near_of(&o, &tk_q8_box);
    if (!lane_room(&o, &edge))
        return -1;
    rectangle(&o, region, region->y + t0 * region->ldy, u0, least(u1, units_of(&o, region)), t0, t1, edge);
    return 0;
}

int tk_q8_regions(const tk_q8_row *row, const tk_q8_region *regions, int32_t count, const float *x, const int8_t *q,
    const float *s, int64_t T, int64_t K)
{
    if (T <= 0)
        return 0;
    if (K <= 0) {
        for (int32_t r = 0; r < count; r++)
            for (int64_t t = regions[r].t0; t < regions[r].t1; t++)
                for (int64_t n = 0; n < regions[r].N; n++)
                    regions[r].y[t * regions[r].ldy + n] = regions[r].bias != NULL ? regions[r].bias[n] : 0.0f;
        return 0;
    }
    const tk_q8_profile p = tk_q8_box;
    const int64_t nb64 = K / 32;
    op o = {.row = row, .regions = regions, .count = count, .nb = (int32_t)nb64, .x = x, .q = q, .s = s};
    const int64_t each = near_of(&o, &p);
    int64_t work = 0;
    for (int32_t r = 0; r < count; r++)
        work += (regions[r].t1 - regions[r].t0) * regions[r].N * K;
    /* One lane prepares a block while it is near; more lanes share what they all prepared. */
    const int64_t room = OP_BYTES / (each + K);
    const int64_t widest = work / 2 >= p.target_chunk_work ? most(room, o.block) : o.block;
    const int64_t ops = parts_of(T, widest), longest = parts_of(T, ops);

    /* xa | codes | scales, on 64-byte boundaries */
    const int64_t xa_bytes = round_up_64(row->acts_bytes(longest, o.nb));
    const int64_t q_bytes = x != NULL ? round_up_64(longest * K) : 0;
    const int64_t s_bytes = x != NULL ? round_up_64(longest * nb64 * (int64_t)sizeof(float)) : 0;
    const int64_t bytes = xa_bytes + q_bytes + s_bytes;
    if ((uint64_t)bytes > SIZE_MAX)
        return -1;
    o.xa = scratch_get(SHARED, (size_t)bytes);
    if (o.xa == NULL)
        return -1;
    o.own_q = (int8_t *)(o.xa + xa_bytes);
    o.own_s = (float *)(void *)(o.xa + xa_bytes + q_bytes);
    for (int64_t i = 0; i < ops; i++) {
        o.first = tk_part(T, ops, i);
        o.tokens = tk_part(T, ops, i + 1) - o.first;
        if (run(&o, &p) != 0)
            return -1;
    }
    return 0;
}

int tk_q8_matmul(const tk_q8_row *row, const tk_q8_region *planes, float *y, const float *x, const int8_t *q,
    const float *s, int64_t T, int64_t N, int64_t K)
{
    tk_q8_region m = *planes;
    m.bias = NULL;
    m.y = y;
    m.ldy = m.N = N;
    m.t0 = 0;
    m.t1 = T;
    return tk_q8_regions(row, &m, 1, x, q, s, T, K);
}

typedef struct {
    const tk_q8_row *row;
    int8_t *q;
    float *s;
    const float *x;
    int64_t T;
    int32_t nb, chunks;
} quantising;

static void quantise_part(void *context, int32_t chunk)
{
    const quantising *const o = context;
    o->row->quantize(o->q, o->s, o->x, tk_part(o->T, o->chunks, chunk), tk_part(o->T, o->chunks, chunk + 1), o->nb);
}

void tk_q8_quantize(const tk_q8_row *row, int8_t *q, float *s, const float *x, int64_t T, int64_t K)
{
    if (T <= 0 || K <= 0)
        return;
    const int64_t target = tk_q8_box.act_threshold, work = T * K;
    const int32_t lanes = tk_lanes(work, target, work / 2 >= target ? tk_team_live() : 1, 0);
    quantising o = {row, q, s, x, T, (int32_t)(K / 32), tk_chunks(T, 1, lanes, 1, 0)};
    const tk_stage stage = {quantise_part, NULL, &o, o.chunks};
    tk_team_run(&stage, 1, lanes, work >= target * 8);
}

/* ---- Python ------------------------------------------------------------------------------------- */

static const char row_capsule[] = TK_Q8_ROW_CAPSULE;

static void row_free(PyObject *capsule)
{
    PyMem_Free(PyCapsule_GetPointer(capsule, row_capsule));
}

static int wrong_count(const char *name, Py_ssize_t nargs, Py_ssize_t want)
{
    if (nargs == want)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, want, nargs);
    return 1;
}

/* An int64 from a Python int; -1 and an exception where it is none. Negative values are errors. */
static int64_t size_of(PyObject *value, const char *what)
{
    const long long n = PyLong_AsLongLong(value);
    if (n == -1 && PyErr_Occurred())
        return -1;
    if (n < 0) {
        PyErr_Format(PyExc_ValueError, "%s is negative", what);
        return -1;
    }
    return n;
}

PyObject *tk_q8_py_row(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    static const char *const names[] = {"tile", "gemv", "acts_bytes", "prepare", "quantize", "amx_cfg",
        "tile_f16", "gemv_f16", "mx4_gemv", "mx4_room", "mx4_expand", "mx4_tile"};
    enum { FIRST = 8, NUMBERS = 3, MX4 = 4 }; /* addresses, numbers, and more addresses that may be left out */
    (void)self;
    const int mx4 = nargs == FIRST + NUMBERS + MX4;
    if (!mx4 && wrong_count("q8_row", nargs, FIRST + NUMBERS))
        return NULL;
    uintptr_t address[FIRST + MX4] = {0};
    for (int i = 0; i < FIRST + (mx4 ? MX4 : 0); i++) {
        address[i] = (uintptr_t)PyLong_AsVoidPtr(args[i < FIRST ? i : i + NUMBERS]);
        if (address[i] == 0) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_ValueError, "q8_row: the address of %s is 0", names[i]);
            return NULL;
        }
    }
    const int64_t mr = size_of(args[FIRST], "mr");
    if (mr < 0)
        return NULL;
    const int64_t tokstep = size_of(args[FIRST + 1], "tokstep");
    if (tokstep < 0)
        return NULL;
    const int64_t together = size_of(args[FIRST + 2], "groups");
    if (together < 0)
        return NULL;
    if (together < 1 || together > TK_Q8_GROUPS_MAX) {
        PyErr_SetString(PyExc_ValueError, "q8_row: groups is between 1 and 16");
        return NULL;
    }
    if (mr < 1 || mr > TK_Q8_MR_MAX || tokstep < 1 || tokstep > TK_Q8_TOKSTEP_MAX) {
        PyErr_SetString(PyExc_ValueError, "q8_row: mr and tokstep are between 1 and 64");
        return NULL;
    }
    tk_q8_row *row = PyMem_Malloc(sizeof *row);
    if (row == NULL)
        return PyErr_NoMemory();
    row->tile = (tk_q8_tile_fn *)address[0];
    row->gemv = (tk_q8_gemv_fn *)address[1];
    row->acts_bytes = (tk_q8_acts_bytes_fn *)address[2];
    row->prepare = (tk_q8_prepare_fn *)address[3];
    row->quantize = (tk_q8_quantize_fn *)address[4];
    row->mr = (int32_t)mr;
    row->tokstep = (int32_t)tokstep;
    row->amx_cfg = (tk_q8_amx_cfg_fn *)address[5];
    row->tile_f16 = (tk_q8_tile_f16_fn *)address[6];
    row->gemv_f16 = (tk_q8_gemv_f16_fn *)address[7];
    row->groups = (int32_t)together;
    row->mx4_gemv = (tk_q8_mx4_gemv_fn *)address[FIRST];
    row->mx4_room = (tk_q8_mx4_room_fn *)address[FIRST + 1];
    row->mx4_expand = (tk_q8_mx4_expand_fn *)address[FIRST + 2];
    row->mx4_tile = (tk_q8_mx4_tile_fn *)address[FIRST + 3];
    PyObject *capsule = PyCapsule_New(row, row_capsule, row_free);
    if (capsule == NULL)
        PyMem_Free(row);
    return capsule;
}

enum { HALF_OR_FLOAT = 's' }; /* scales of weights */

/* What is asked of one buffer argument. */
typedef struct {
    const char *name;
    char format;     /* 'f', 'b' or 'B', as in the struct module; HALF_OR_FLOAT: 'e' or 'f' */
    int writable;
    int64_t count;   /* elements, exactly; negative where the number does not fit */
} wanted;

/* The format of one element, whatever byte order mark precedes it. Native order is what NumPy gives. */
static int format_is(const char *format, char want)
{
    if (format == NULL)
        return 0;
    if (*format == '@' || *format == '=')
        format++;
    return format[0] == want && format[1] == '\0';
}

/* Takes count buffers, or none and an exception (0, -1). */
static int take(Py_buffer *views, PyObject *const *objects, const wanted *want, int count)
{
    int i = 0;
    for (; i < count; i++) {
        const wanted *const w = want + i;
        if (PyObject_GetBuffer(objects[i], views + i,
                PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (w->writable ? PyBUF_WRITABLE : 0)) != 0)
            break;
        const int scales = w->format == HALF_OR_FLOAT, halves = scales && format_is(views[i].format, 'e');
        const int64_t item = halves ? 2 : scales || w->format == 'f' ? (int64_t)sizeof(float) : 1;
        const int64_t bytes = tk_times(w->count, item);
        if (!halves && !format_is(views[i].format, scales ? 'f' : w->format)) {
            PyErr_Format(PyExc_TypeError, "%s holds %s, not %s", w->name,
                views[i].format != NULL ? views[i].format : "bytes",
                scales ? "float32 or float16" : w->format == 'f' ? "float32" : w->format == 'b' ? "int8" : "uint8");
        } else if (bytes < 0 || bytes > PY_SSIZE_T_MAX) {
            PyErr_Format(PyExc_ValueError, "%s: a buffer of this shape does not fit into memory", w->name);
        } else if (views[i].len != (Py_ssize_t)bytes) {
            PyErr_Format(PyExc_ValueError, "%s holds %zd bytes, not %zd", w->name, views[i].len, (Py_ssize_t)bytes);
        } else if (bytes > 0 && (uintptr_t)views[i].buf % (uintptr_t)item != 0) {
            PyErr_Format(PyExc_ValueError, "%s is not aligned to its elements", w->name);
        } else {
            continue;
        }
        i++; /* this one was taken too */
        break;
    }
    if (i == count && !PyErr_Occurred())
        return 0;
    while (i-- > 0)
        PyBuffer_Release(views + i);
    return -1;
}

static void give_back(Py_buffer *views, int count)
{
    for (int i = 0; i < count; i++)
        PyBuffer_Release(views + i);
}

/* Does the output meet an input? The kernels may then read what they have already written. */
static int overlaps(const Py_buffer *out, const Py_buffer *in)
{
    const uintptr_t a = (uintptr_t)out->buf, b = (uintptr_t)in->buf;
    return out->len > 0 && in->len > 0 && a < b + (uintptr_t)in->len && b < a + (uintptr_t)out->len;
}

static int outputs_apart(const Py_buffer *views, const wanted *want, int count)
{
    for (int i = 0; i < count; i++) {
        for (int j = 0; j < count; j++) {
            if (i != j && want[i].writable && overlaps(views + i, views + j)) {
                PyErr_Format(PyExc_ValueError, "%s overlaps %s", want[i].name, want[j].name);
                return 0;
            }
        }
    }
    return 1;
}

/* The two planes of a matrix as they were asked for: codes and scales of either type, or nibbles and exponents. */
static tk_q8_region planes_of(const Py_buffer *views, int mx4)
{
    const void *const first = views[0].buf, *const second = views[1].buf;
    if (mx4)
        return (tk_q8_region){.nib = first, .e = second};
    return format_is(views[1].format, 'e') ? (tk_q8_region){.w = first, .ws_f16 = second}
                                           : (tk_q8_region){.w = first, .ws = second};
}

static int k_is_whole(int64_t K)
{
    if (K % 32 == 0 && K / 32 <= INT32_MAX)
        return 1;
    PyErr_SetString(PyExc_ValueError, K % 32 != 0 ? "K is not a multiple of 32" : "K is too large");
    return 0;
}

static PyObject *matmul(const char *name, PyObject *const *args, Py_ssize_t nargs, int acts, int mx4)
{
    enum { Y, X, Q = X, S };
    const int planes = acts ? 3 : 2, count = planes + 2; /* the planes follow the activations */
    if (wrong_count(name, nargs, 1 + count + 3))
        return NULL;
    const tk_q8_row *const row = PyCapsule_GetPointer(args[0], row_capsule);
    if (row == NULL)
        return NULL;
    if (mx4 && row->mx4_gemv == NULL) {
        PyErr_Format(PyExc_ValueError, "%s: the row was made without its functions for MXFP4", name);
        return NULL;
    }
    const int64_t T = size_of(args[count + 1], "T");
    if (T < 0)
        return NULL;
    const int64_t N = size_of(args[count + 2], "N");
    if (N < 0)
        return NULL;
    const int64_t K = size_of(args[count + 3], "K");
    if (K < 0 || !k_is_whole(K))
        return NULL;
    const int64_t nb = K / 32, groups = N / row->mr + (N % row->mr > 0), rows = tk_times(groups, row->mr);
    wanted want[5] = {
        {"y", 'f', 1, tk_times(T, N)},
        {"x", 'f', 0, tk_times(T, K)},
        {"w", 'b', 0, tk_times(rows, K)},
        {"ws", HALF_OR_FLOAT, 0, tk_times(rows, nb)},
    };
    if (mx4) {
        want[2] = (wanted){"nib", 'B', 0, tk_times(rows, K / 2)};
        want[3] = (wanted){"e", 'B', 0, tk_times(rows, nb)};
    }
    if (acts) {
        want[4] = want[3];
        want[3] = want[2];
        want[Q] = (wanted){"q", 'b', 0, tk_times(T, K)};
        want[S] = (wanted){"s", 'f', 0, tk_times(T, nb)};
    }
    Py_buffer views[5];
    if (take(views, args + 1, want, count) != 0)
        return NULL;
    int status = 1;
    if (outputs_apart(views, want, count)) {
        const float *const x = acts ? NULL : views[X].buf, *const s = acts ? views[S].buf : NULL;
        const int8_t *const q = acts ? views[Q].buf : NULL;
        const tk_q8_region m = planes_of(views + planes, mx4);
        Py_BEGIN_ALLOW_THREADS
        status = tk_q8_matmul(row, &m, views[Y].buf, x, q, s, T, N, K);
        Py_END_ALLOW_THREADS
    }
    give_back(views, count);
    if (status > 0)
        return NULL;
    if (status < 0)
        return PyErr_NoMemory();
    Py_INCREF(Py_None);
    return Py_None;
}

PyObject *tk_q8_py_matmul(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    return matmul("q8_matmul", args, nargs, 0, 0);
}

PyObject *tk_q8_py_matmul_acts(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    return matmul("q8_matmul_acts", args, nargs, 1, 0);
}

PyObject *tk_q8_py_mx4_matmul(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    return matmul("q8_mx4_matmul", args, nargs, 0, 1);
}

PyObject *tk_q8_py_mx4_matmul_acts(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    return matmul("q8_mx4_matmul_acts", args, nargs, 1, 1);
}

/* A matrix that met its row: all that a product needs but the activations and the place of the result. */
typedef struct {
    const tk_q8_row *row;
    PyObject *row_capsule; /* kept, as the planes are */
    Py_buffer planes[2];
    tk_q8_region m; /* the planes, as a product takes them */
    int64_t N, K;
} prepared;

static const char prepared_capsule[] = "tunekit._core.q8_prepared";

static void prepared_free(PyObject *capsule)
{
    prepared *const p = PyCapsule_GetPointer(capsule, prepared_capsule);
    give_back(p->planes, 2);
    Py_DECREF(p->row_capsule);
    PyMem_Free(p);
}

PyObject *tk_q8_py_prepared(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (wrong_count("q8_prepared", nargs, 6))
        return NULL;
    const tk_q8_row *const row = PyCapsule_GetPointer(args[0], row_capsule);
    if (row == NULL)
        return NULL;
    const int64_t N = size_of(args[3], "N");
    const int64_t K = N < 0 ? -1 : size_of(args[4], "K");
    const int mx4 = K < 0 || !k_is_whole(K) ? -1 : PyObject_IsTrue(args[5]);
    if (mx4 < 0)
        return NULL;
    if (mx4 && row->mx4_gemv == NULL) {
        PyErr_SetString(PyExc_ValueError, "q8_prepared: the row was made without its functions for MXFP4");
        return NULL;
    }
    const int64_t groups = N / row->mr + (N % row->mr > 0), rows = tk_times(groups, row->mr);
    const wanted want[2] = {
        {mx4 ? "nib" : "w", mx4 ? 'B' : 'b', 0, tk_times(rows, mx4 ? K / 2 : K)},
        {mx4 ? "e" : "ws", mx4 ? 'B' : HALF_OR_FLOAT, 0, tk_times(rows, K / 32)},
    };
    prepared *const p = PyMem_Malloc(sizeof *p);
    if (p == NULL)
        return PyErr_NoMemory();
    if (take(p->planes, args + 1, want, 2) != 0) {
        PyMem_Free(p);
        return NULL;
    }
    p->row = row;
    p->row_capsule = args[0];
    p->N = N;
    p->K = K;
    p->m = planes_of(p->planes, mx4);
    Py_INCREF(args[0]);
    PyObject *const capsule = PyCapsule_New(p, prepared_capsule, prepared_free);
    if (capsule == NULL) {
        give_back(p->planes, 2);
        Py_DECREF(args[0]);
        PyMem_Free(p);
    }
    return capsule;
}

/* float32 of shape (T, width) or (width,), native, C-contiguous and aligned: T, or -1. */
static int64_t tokens_in(const Py_buffer *view, int64_t width)
{
    const int whole = format_is(view->format, 'f') && (view->ndim == 1 || view->ndim == 2)
        && view->shape[view->ndim - 1] == width && (uintptr_t)view->buf % sizeof(float) == 0;
    return !whole ? -1 : view->ndim == 2 ? view->shape[0] : 1;
}

PyObject *tk_q8_py_product(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (wrong_count("q8_product", nargs, 3))
        return NULL;
    const prepared *const p = PyCapsule_GetPointer(args[0], prepared_capsule);
    if (p == NULL)
        return NULL;
    Py_buffer x, y;
    if (PyObject_GetBuffer(args[1], &x, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    if (PyObject_GetBuffer(args[2], &y, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE) != 0) {
        PyErr_Clear();
        PyBuffer_Release(&x);
        Py_RETURN_FALSE;
    }
    const int64_t T = tokens_in(&x, p->K);
    int status = 1; /* not run */
    if (T > 0 && p->N > 0 && p->K > 0 && x.ndim == y.ndim && tokens_in(&y, p->N) == T && !overlaps(&y, &x)) {
        Py_BEGIN_ALLOW_THREADS
        status = tk_q8_matmul(p->row, &p->m, y.buf, x.buf, NULL, NULL, T, p->N, p->K);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&y);
    PyBuffer_Release(&x);
    if (status < 0)
        return PyErr_NoMemory();
    return PyBool_FromLong(status == 0);
}

PyObject *tk_q8_py_quantize(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (wrong_count("q8_quantize", nargs, 6))
        return NULL;
    const tk_q8_row *const row = PyCapsule_GetPointer(args[0], row_capsule);
    if (row == NULL)
        return NULL;
    const int64_t T = size_of(args[4], "T");
    if (T < 0)
        return NULL;
    const int64_t K = size_of(args[5], "K");
    if (K < 0 || !k_is_whole(K))
        return NULL;
    const wanted want[3] = {
        {"q", 'b', 1, tk_times(T, K)},
        {"s", 'f', 1, tk_times(T, K / 32)},
        {"x", 'f', 0, tk_times(T, K)},
    };
    Py_buffer views[3];
    if (take(views, args + 1, want, 3) != 0)
        return NULL;
    const int apart = outputs_apart(views, want, 3);
    if (apart) {
        Py_BEGIN_ALLOW_THREADS
        tk_q8_quantize(row, views[0].buf, views[1].buf, views[2].buf, T, K);
        Py_END_ALLOW_THREADS
    }
    give_back(views, 3);
    if (!apart)
        return NULL;
    Py_INCREF(Py_None);
    return Py_None;
}

/* None is NULL; else the item. */
static PyObject *given(PyObject *item)
{
    return item == Py_None ? NULL : item;
}

/* The three or four buffers of one region, taken; 0, or -1 and an exception with none of them taken. */
static int region_of(
    const tk_q8_row *row, PyObject *item, int64_t T, int64_t K, tk_q8_region *region, Py_buffer *views, int *taken)
{
    enum { Y, FIRST, SECOND, BIAS, ROWS, T0, T1, MX4, FIELDS };
    if (!PyTuple_Check(item) || PyTuple_Size(item) != FIELDS) {
        PyErr_SetString(PyExc_TypeError, "q8_regions: a region is (y, first, second, bias, N, t0, t1, mx4)");
        return -1;
    }
    PyObject *field[FIELDS];
    for (int i = 0; i < FIELDS; i++)
        field[i] = PyTuple_GetItem(item, i);
    const int mx4 = PyObject_IsTrue(field[MX4]);
    const int64_t N = mx4 < 0 ? -1 : size_of(field[ROWS], "N");
    const int64_t t0 = N < 0 ? -1 : size_of(field[T0], "t0");
    const int64_t t1 = t0 < 0 ? -1 : size_of(field[T1], "t1");
    if (t1 < 0)
        return -1;
    if (t0 > t1 || t1 > T) {
        PyErr_SetString(PyExc_ValueError, "q8_regions: tokens are 0 <= t0 <= t1 <= T");
        return -1;
    }
    if (mx4 && row->mx4_gemv == NULL) {
        PyErr_SetString(PyExc_ValueError, "q8_regions: the row was made without its functions for MXFP4");
        return -1;
    }
    const int64_t nb = K / 32, groups = N / row->mr + (N % row->mr > 0), rows = tk_times(groups, row->mr);
    const wanted want[4] = {
        {"y", 'f', 1, tk_times(T, N)},
        {mx4 ? "nib" : "w", mx4 ? 'B' : 'b', 0, tk_times(rows, mx4 ? K / 2 : K)},
        {mx4 ? "e" : "ws", mx4 ? 'B' : HALF_OR_FLOAT, 0, tk_times(rows, nb)},
        {"bias", 'f', 0, N},
    };
    PyObject *const bias = given(field[BIAS]);
    PyObject *const objects[4] = {field[Y], field[FIRST], field[SECOND], bias};
    const int count = bias != NULL ? 4 : 3;
    if (take(views, objects, want, count) != 0)
        return -1;
    *taken = count;
    if (!outputs_apart(views, want, count))
        return -1;
    *region = planes_of(views + 1, mx4);
    region->y = views[0].buf;
    region->ldy = region->N = N;
    region->t0 = t0;
    region->t1 = t1;
    region->bias = bias != NULL ? views[3].buf : NULL;
    return 0;
}

/* Two regions may write one buffer where their tokens are apart. */
static int regions_apart(const tk_q8_region *regions, const Py_buffer *views, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        for (Py_ssize_t j = 0; j < count; j++) {
            const Py_buffer *const out = views + 4 * i;
            const int shares = i != j && overlaps(out, views + 4 * j);
            const tk_q8_region *const a = regions + i, *const b = regions + j;
            if (shares && (a->y != b->y || a->N != b->N || (a->t0 < b->t1 && b->t0 < a->t1 && a->t0 < a->t1 && b->t0 < b->t1))) {
                PyErr_SetString(PyExc_ValueError, "q8_regions: two regions write the same memory");
                return 0;
            }
            for (int k = 1; i != j && k < 4; k++) {
                if (views[4 * j + k].obj != NULL && overlaps(out, views + 4 * j + k)) {
                    PyErr_SetString(PyExc_ValueError, "q8_regions: an output overlaps an input");
                    return 0;
                }
            }
        }
    }
    return 1;
}

PyObject *tk_q8_py_regions(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (wrong_count("q8_regions", nargs, 7))
        return NULL;
    const tk_q8_row *const row = PyCapsule_GetPointer(args[0], row_capsule);
    if (row == NULL)
        return NULL;
    const int64_t T = size_of(args[4], "T");
    if (T < 0)
        return NULL;
    const int64_t K = size_of(args[5], "K");
    if (K < 0 || !k_is_whole(K))
        return NULL;
    if (!PyTuple_Check(args[6])) {
        PyErr_SetString(PyExc_TypeError, "q8_regions: regions is a tuple");
        return NULL;
    }
    const Py_ssize_t count = PyTuple_Size(args[6]);
    if (count > INT32_MAX / 8) {
        PyErr_SetString(PyExc_ValueError, "q8_regions: too many regions");
        return NULL;
    }
    PyObject *const x = given(args[1]);
    PyObject *const inputs[2] = {x != NULL ? x : args[2], args[3]};
    const wanted of_x[1] = {{"x", 'f', 0, tk_times(T, K)}};
    const wanted of_acts[2] = {{"q", 'b', 0, tk_times(T, K)}, {"s", 'f', 0, tk_times(T, K / 32)}};
    const int input_count = x != NULL ? 1 : 2;
    Py_buffer input[2];
    if (take(input, inputs, x != NULL ? of_x : of_acts, input_count) != 0)
        return NULL;
    tk_q8_region *const regions = calloc((size_t)count + 1, sizeof *regions);
    Py_buffer *const views = calloc((size_t)count * 4 + 1, sizeof *views);
    int status = 1;
    if (regions == NULL || views == NULL) {
        status = -1;
    } else {
        Py_ssize_t i = 0;
        for (; i < count; i++) {
            int taken = 0;
            if (region_of(row, PyTuple_GetItem(args[6], i), T, K, regions + i, views + 4 * i, &taken) != 0)
                break;
            int clear = 1;
            for (int k = 0; k < input_count; k++)
                clear &= !overlaps(views + 4 * i, input + k);
            if (!clear) {
                PyErr_SetString(PyExc_ValueError, "q8_regions: an output overlaps the activations");
                break;
            }
        }
        if (i == count && regions_apart(regions, views, count)) {
            const float *const from = x != NULL ? input[0].buf : NULL, *const s = x != NULL ? NULL : input[1].buf;
            const int8_t *const q = x != NULL ? NULL : input[0].buf;
            Py_BEGIN_ALLOW_THREADS
            status = tk_q8_regions(row, regions, (int32_t)count, from, q, s, T, K);
            Py_END_ALLOW_THREADS
        }
        for (Py_ssize_t k = 0; k < count * 4; k++) {
            if (views[k].obj != NULL)
                PyBuffer_Release(views + k);
        }
    }
    free(regions);
    free(views);
    give_back(input, input_count);
    if (status > 0)
        return NULL;
    if (status < 0)
        return PyErr_NoMemory();
    Py_INCREF(Py_None);
    return Py_None;
}
