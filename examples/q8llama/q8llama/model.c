// SPDX-License-Identifier: Apache-2.0
#include "model.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

void *aligned_zeros(int64_t bytes)
{
    void *p = NULL;
    return bytes > 0 && posix_memalign(&p, 64, (size_t)bytes) == 0 ? memset(p, 0, (size_t)bytes) : NULL;
}

/*
 * What is read for every token, weights, keys and values: on huge pages where the kernel gives them. On small ones a
 * core walks the page tables every 4 KiB, and from memory it then reads up to half as fast.
 */
static void *huge(int64_t bytes)
{
    enum { PAGE = 2 << 20 };
    void *p = NULL;
    if (bytes <= 0 || posix_memalign(&p, PAGE, (size_t)(bytes + PAGE - 1) / PAGE * PAGE) != 0)
        return NULL;
#ifdef MADV_HUGEPAGE
    madvise(p, (size_t)(bytes + PAGE - 1) / PAGE * PAGE, MADV_HUGEPAGE); /* a kernel without them gives small ones */
#endif
    return p;
}

void *room_for(room **last, int64_t bytes)
{
    enum { CHUNK = 16 << 20, LINE = 64 };
    const int64_t size = (bytes + LINE - 1) / LINE * LINE;
    if (*last == NULL || (*last)->size - (*last)->used < size) {
        room *const next = malloc(sizeof *next);
        const int64_t whole = size > CHUNK ? size : CHUNK;
        if (next == NULL)
            return NULL;
        *next = (room){.before = *last, .size = whole, .at = huge(whole)};
        if (next->at == NULL) {
            free(next);
            return NULL;
        }
        *last = next;
    }
    void *const p = memset((*last)->at + (*last)->used, 0, (size_t)size);
    (*last)->used += size;
    return p;
}

static void room_free(room *last)
{
    while (last != NULL) {
        room *const before = last->before;
        free(last->at);
        free(last);
        last = before;
    }
}

static int64_t most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t parts_of(int64_t n, int64_t size)
{
    return (n + size - 1) / size;
}

static int64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static tunekit_q8_region times(const matrix *m, float *y, int64_t ldy, int64_t tokens)
{
    return (tunekit_q8_region){.w = m->w, .ws = m->ws, .ws_f16 = m->ws_f16, .nib = m->nib, .e = m->e, .y = y, .ldy = ldy, .N = m->N, .t0 = 0, .t1 = tokens};
}

static const matrix *head_of(const model *m)
{
    return m->head.N > 0 ? &m->head : &m->embedding;
}

/* ---- angles: sine and cosine by fdlibm's polynomials, so that no libm decides a bit ---------------- */

static void turn(double angle, float *cosine, float *sine)
{
    /* Less than 2^20 quarter turns: each product with a part of pi / 2 is exact. */
    const int64_t n = (int64_t)(angle * 0.63661977236758134308 + 0.5);
    const double a = angle - (double)n * 1.57079632673412561417e+00;
    const double r = (a - (double)n * 6.07710050630396597660e-11) - (double)n * 2.02226624879595063154e-21;
    const double z = r * r;
    const double s = r + r * z * (-1.66666666666666324348e-01 + z * (8.33333333332248946124e-03 + z * (-1.98412698298579493134e-04
        + z * (2.75573137070700676789e-06 + z * (-2.50507602534068634195e-08 + z * 1.58969099521155010221e-10)))));
    const double c = 1.0 - 0.5 * z + z * z * (4.16666666666666019037e-02 + z * (-1.38888888888741095749e-03
        + z * (2.48015872894767294178e-05 + z * (-2.75573143513906633035e-07 + z * (2.08757232129817482790e-09
        + z * -1.13596475577881948265e-11)))));
    const double of[4] = {c, -s, -c, s}; /* the cosine n quarter turns on; the sine is one behind */
    *cosine = (float)of[n & 3];
    *sine = (float)of[(n + 3) & 3];
}

static void turn_all(void *context, int32_t chunk)
{
    session *const s = context;
    const int64_t half = s->m->hd / 2;
    (void)chunk;
    for (int64_t p = 0; p < s->capacity; p++)
        for (int64_t i = 0; i < half; i++)
            turn((double)p * s->m->turns[i], s->cosines + p * half + i, s->sines + p * half + i);
}

/* ---- a session ------------------------------------------------------------------------------------- */

static int64_t slices_of(int64_t count)
{
    return parts_of(count, SLICE);
}

static int64_t widest(const model *m)
{
    return most(most(m->d, m->qd), m->ff);
}

enum { BLOCK_TOKENS = 8 }; /* of a prompt, whose queries are one unit of attention */

/* As many lanes as an op of this session may have, each with its own memory. */
static int lanes_ready(session *s, int32_t count)
{
    const model *const m = s->m;
    for (; s->ready < count; s->ready++) {
        lane *const l = &s->lanes[s->ready];
        const int64_t rows = BLOCK_TOKENS * m->group;
        if (l->row == NULL)
            l->row = aligned_zeros(widest(m) * 4);
        if (l->acts == NULL)
            l->acts = aligned_zeros(most(most(m->q8->acts_bytes(1, m->d), m->q8->acts_bytes(1, m->qd)), m->q8->acts_bytes(1, m->ff)));
        if (l->acc == NULL)
            l->acc = aligned_zeros(rows * (2 * m->hd + 4) * 4);
        if (l->row == NULL || l->acts == NULL || l->acc == NULL)
            return -1;
        l->part = l->acc + rows * m->hd;
        l->ml = l->part + rows * m->hd;
        l->pml = l->ml + rows * 2;
    }
    return 0;
}

int session_init(session *s, const model *m, int64_t capacity)
{
    const int64_t half = m->hd / 2, all = parts_of(most(capacity, 1), SLICE) * SLICE;
    memset(s, 0, sizeof *s);
    atomic_flag_clear(&s->busy);
    s->m = m;
    s->capacity = all;
    s->batch = least(all, BATCH);
    const int64_t cache = m->layers * m->kv_heads * all * m->hd * 4, b = s->batch * 4;
    s->cosines = aligned_zeros(all * half * 4);
    s->sines = aligned_zeros(all * half * 4);
    s->k = huge(cache); /* not cleared: slices that are not reached are not there, and nothing of them is used */
    s->v = huge(cache);
    s->x = aligned_zeros(b * m->d);
    s->norm = aligned_zeros(b * m->d);
    s->out = aligned_zeros(b * m->d);
    s->logits_in = aligned_zeros(b * m->d);
    s->q = aligned_zeros(b * m->qd * 2);
    s->nk = aligned_zeros(b * m->kvd);
    s->nv = aligned_zeros(b * m->kvd);
    s->gate = aligned_zeros(b * m->ff);
    s->up = aligned_zeros(b * m->ff);
    s->acc = aligned_zeros(slices_of(all) * m->qd * 4);
    s->ml = aligned_zeros(slices_of(all) * m->heads * 2 * 4);
    if (!s->cosines || !s->sines || !s->k || !s->v || !s->x || !s->norm || !s->out || !s->logits_in || !s->q || !s->nk
        || !s->nv || !s->gate || !s->up || !s->acc || !s->ml || lanes_ready(s, 1) != 0) {
        session_free(s);
        return -1;
    }
    const tk_stage angles = {turn_all, NULL, s, 1}; /* a stage of the team's, for its floating-point environment */
    return m->q8->team->run(&angles, 1, 1, 0) < 0 ? -1 : 0;
}

void session_free(session *s)
{
    void *const own[] = {s->cosines, s->sines, s->k, s->v, s->x, s->norm, s->out, s->logits_in, s->q, s->nk, s->nv, s->gate, s->up, s->acc, s->ml};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        free(own[i]);
    for (int32_t i = 0; i < TK_TEAM_LANES; i++) {
        free(s->lanes[i].row);
        free(s->lanes[i].acts);
        free(s->lanes[i].acc);
    }
    memset(s, 0, sizeof *s);
}

void model_free(model *m)
{
    for (int64_t i = 0; m->layer != NULL && i < m->layers; i++)
        for (int j = 0; j < NORMS; j++)
            free(m->layer[i].norm[j]);
    room_free(m->planes);
    free(m->last_norm);
    free(m->layer);
    free(m->turns);
    free(m);
}

/* Where the keys and values of a key-value head and a slice begin. A slice of all layers comes before the next. */
static int64_t cache_at(const session *s, int64_t layer, int64_t kvh, int64_t slice)
{
    return ((slice * s->m->layers + layer) * s->m->kv_heads + kvh) * SLICE * s->m->hd;
}

/* ---- one pass: what its stages share -------------------------------------------------------------- */

enum { STAGES = 5 };

typedef struct {
    session *s;
    const layer *l;
    const matrix *head;
    int64_t layer, tokens, position;
    int64_t slices, unit_slices; /* decode: of the context, and how many of them are one unit of attention */
    int32_t chunks[STAGES];
    float *more; /* what is added to x before a norm, or NULL */
    const float *weights;
    float *to;
    float *logits;
    _Atomic int32_t next[STAGES]; /* lanes that have begun a stage */
    _Atomic int failed;
} pass;

static __thread lane *mine;

/* A lane's own memory: no two lanes of a stage get the same. */
static lane *take(pass *p, int stage)
{
    const int32_t number = atomic_fetch_add(&p->next[stage], 1);
    mine = &p->s->lanes[number];
    return mine;
}

/* Runs stages as one op, or, while profiling, one by one. */
static void run(session *s, const tk_stage *stages, int32_t count, const int *what, int64_t work, int single)
{
    const tk_team_api *const team = s->m->q8->team;
    const int32_t lanes = team->lanes(work, team->target(), s->ready, team->cap(single));
    const int32_t wake = lanes > 1 && team->worth_waking(work, team->enough());
    s->rendezvous += count;
    if (!s->profile) {
        s->ops++;
        team->run(stages, count, lanes, wake);
        return;
    }
    for (int32_t i = 0; i < count; i++) {
        const int64_t from = clock_ns();
        team->run(stages + i, 1, lanes, wake);
        s->ops++;
        s->ns[what[i]] += clock_ns() - from;
    }
}

static int products(session *s, const tunekit_q8_region *all, int32_t count, const float *x, int64_t tokens, int64_t K, int what)
{
    const int64_t from = s->profile ? clock_ns() : 0;
    const int status = s->m->q8->regions(all, count, x, tokens, K);
    s->ops++;
    s->rendezvous += 2;
    if (s->profile)
        s->ns[what] += clock_ns() - from;
    return status;
}

/* The new keys and values of a token into the cache of a head; the key is turned on the way. */
static void remember(const session *s, int64_t layer, int64_t kvh, int64_t position, float *k, const float *v)
{
    const model *const m = s->m;
    const int64_t half = m->hd / 2, at = cache_at(s, layer, kvh, position / SLICE), j = position % SLICE;
    m->ops->rope(k, s->cosines + position * half, s->sines + position * half, 1, (int32_t)m->hd);
    float *const tile = s->k + at + j / TILE * TILE * m->hd + j % TILE;
    for (int64_t d = 0; d < m->hd; d++)
        tile[d * TILE] = k[d];
    memcpy(s->v + at + j * m->hd, v, (size_t)m->hd * sizeof *v);
}

/* ---- one token: five stages a layer ---------------------------------------------------------------- */

/* Units [u0, u1) of chunk c, of all units of several matrices in a row. */
static void pieces(pass *p, const matrix *const *all, float *const *y, int count, const void *acts, int32_t chunk, int32_t chunks)
{
    const tunekit_q8_api *const q8 = p->s->m->q8;
    int64_t total = 0, base = 0;
    for (int i = 0; i < count; i++)
        total += q8->units(all[i]->N);
    const int64_t u0 = q8->team->part(total, chunks, chunk), u1 = q8->team->part(total, chunks, chunk + 1);
    for (int i = 0; i < count; i++) {
        const int64_t own = q8->units(all[i]->N), lo = most(u0 - base, 0), hi = least(u1 - base, own);
        const tunekit_q8_region r = times(all[i], y[i], all[i]->N, 1);
        if (lo < hi && q8->piece(&r, acts, 1, 0, 1, lo, hi, all[i]->K) != TUNEKIT_Q8_OK)
            p->failed = 1;
        base += own;
    }
}

/* Rows of a chunk of one matrix. */
static void rows_of(const pass *p, const matrix *m, int32_t chunk, int32_t chunks, int64_t *n0, int64_t *n1)
{
    const tunekit_q8_api *const q8 = p->s->m->q8;
    const int64_t units = q8->units(m->N);
    *n0 = least(q8->team->part(units, chunks, chunk) * q8->unit_rows, m->N);
    *n1 = least(q8->team->part(units, chunks, chunk + 1) * q8->unit_rows, m->N);
}

static void quantised(pass *p, lane *l, const float *x, int64_t K)
{
    const tunekit_q8_api *const q8 = p->s->m->q8;
    q8->acts(l->acts, x, 1, 0, 1, K);
    q8->begin(NULL);
}

/* Every lane makes the quantised activations for itself: that is cheaper than to wait for one that makes them for all. */
static void qkv_begin(void *context)
{
    pass *const p = context;
    const model *const m = p->s->m;
    lane *const l = take(p, 0);
    m->ops->rmsnorm(l->row, p->s->x, p->l->norm[ATTN_NORM], (int32_t)m->d, m->eps);
    quantised(p, l, l->row, m->d);
}

static void qkv(void *context, int32_t chunk)
{
    pass *const p = context;
    session *const s = p->s;
    const matrix *const all[] = {&p->l->m[ATTN_Q], &p->l->m[ATTN_K], &p->l->m[ATTN_V]};
    float *const y[] = {s->q, s->nk, s->nv};
    pieces(p, all, y, 3, mine->acts, chunk, p->chunks[0]);
}

static void attend_begin(void *context)
{
    take(context, 1);
}

/* One key-value head, some slices of the context: every key and value is read once for all its queries. */
static void attend_one(void *context, int32_t chunk)
{
    pass *const p = context;
    session *const s = p->s;
    const model *const m = s->m;
    const int64_t half = m->hd / 2, rows = m->group, units = parts_of(p->slices, p->unit_slices);
    const int64_t kvh = chunk / units, first = chunk % units * p->unit_slices, last = least(first + p->unit_slices, p->slices);
    if (last == p->slices) /* the one unit that sees the new key puts it there */
        remember(s, p->layer, kvh, p->position, s->nk + kvh * m->hd, s->nv + kvh * m->hd);
    /* The lane's copy of the queries: other units turn theirs. */
    memcpy(mine->row, s->q + kvh * rows * m->hd, (size_t)(rows * m->hd) * sizeof(float));
    m->ops->rope(mine->row, s->cosines + p->position * half, s->sines + p->position * half, (int32_t)rows, (int32_t)m->hd);
    for (int64_t slice = first; slice < last; slice++) {
        const int64_t at = cache_at(s, p->layer, kvh, slice), here = p->position - slice * SLICE;
        m->ops->attend(s->acc + (slice * m->kv_heads + kvh) * rows * m->hd, s->ml + (slice * m->kv_heads + kvh) * rows * 2, mine->row,
            s->k + at, s->v + at, rows * m->hd, (int32_t)rows, (int32_t)rows, here, 0, least(here + 1, SLICE), (int32_t)m->hd, m->scale);
    }
}

/* The slices of every head, put together in order. */
static void out_begin(void *context)
{
    pass *const p = context;
    const session *const s = p->s;
    const model *const m = s->m;
    const int64_t rows = m->group;
    lane *const l = take(p, 2);
    for (int64_t kvh = 0; kvh < m->kv_heads; kvh++) {
        const float *acc = s->acc + kvh * rows * m->hd, *ml = s->ml + kvh * rows * 2;
        if (p->slices > 1) {
            memcpy(l->acc, acc, (size_t)(rows * m->hd) * sizeof(float));
            memcpy(l->ml, ml, (size_t)(rows * 2) * sizeof(float));
            for (int64_t i = 1; i < p->slices; i++)
                m->ops->merge(l->acc, l->ml, acc + i * m->qd, ml + i * m->heads * 2, (int32_t)rows, (int32_t)m->hd);
            acc = l->acc;
            ml = l->ml;
        }
        m->ops->finish(l->row + kvh * rows * m->hd, acc, ml, rows * m->hd, (int32_t)rows, (int32_t)rows, (int32_t)m->hd);
    }
    quantised(p, l, l->row, m->qd);
}

/* A product whose result is added to x. */
static void residual(pass *p, const matrix *w, int32_t chunk, int32_t chunks)
{
    session *const s = p->s;
    float *const y[] = {s->out};
    int64_t n0, n1;
    pieces(p, &w, y, 1, mine->acts, chunk, chunks);
    rows_of(p, w, chunk, chunks, &n0, &n1);
    s->m->ops->accumulate(s->x + n0, s->out + n0, (int32_t)(n1 - n0));
}

static void out(void *context, int32_t chunk)
{
    pass *const p = context;
    residual(p, &p->l->m[ATTN_OUT], chunk, p->chunks[2]);
}

static void gate_begin(void *context)
{
    pass *const p = context;
    const model *const m = p->s->m;
    lane *const l = take(p, 3);
    m->ops->rmsnorm(l->row, p->s->x, p->l->norm[FFN_NORM], (int32_t)m->d, m->eps);
    quantised(p, l, l->row, m->d);
}

static void gate_up(void *context, int32_t chunk)
{
    pass *const p = context;
    session *const s = p->s;
    const matrix *const gate = &p->l->m[FFN_GATE], *const up = &p->l->m[FFN_UP];
    int64_t n0, n1;
    pieces(p, &gate, &s->gate, 1, mine->acts, chunk, p->chunks[3]);
    pieces(p, &up, &s->up, 1, mine->acts, chunk, p->chunks[3]);
    rows_of(p, gate, chunk, p->chunks[3], &n0, &n1);
    /* Into the second row of the gates: there is room for a batch, and this is one token. */
    s->m->ops->swiglu(s->gate + s->m->ff + n0, s->gate + n0, s->up + n0, (int32_t)(n1 - n0));
}

static void down_begin(void *context)
{
    pass *const p = context;
    quantised(p, take(p, 4), p->s->gate + p->s->m->ff, p->s->m->ff);
}

static void down(void *context, int32_t chunk)
{
    pass *const p = context;
    residual(p, &p->l->m[FFN_DOWN], chunk, p->chunks[4]);
}

static void head_begin(void *context)
{
    pass *const p = context;
    const model *const m = p->s->m;
    lane *const l = take(p, 0);
    m->ops->rmsnorm(l->row, p->s->x, m->last_norm, (int32_t)m->d, m->eps);
    quantised(p, l, l->row, m->d);
}

static void head(void *context, int32_t chunk)
{
    pass *const p = context;
    pieces(p, &p->head, &p->logits, 1, mine->acts, chunk, p->chunks[0]);
}

/* Chunks of a product with one token. */
static int32_t chunks_of(const session *s, int64_t N, int32_t lanes)
{
    const tunekit_q8_api *const q8 = s->m->q8;
    return q8->team->chunks(q8->units(N), parts_of(64, q8->unit_rows), lanes, 1, 1);
}

static int one_token(session *s, float *logits)
{
    static const int what[STAGES] = {P_QKV, P_ATTEND, P_OUT, P_GATE_UP, P_DOWN};
    const model *const m = s->m;
    const int32_t lanes = s->ready;
    pass p = {.s = s, .tokens = 1, .position = s->position, .slices = slices_of(s->position + 1)};
    p.unit_slices = s->plain ? p.slices : 1;
    p.chunks[0] = chunks_of(s, m->qd + 2 * m->kvd, lanes);
    p.chunks[1] = (int32_t)(m->kv_heads * parts_of(p.slices, p.unit_slices));
    p.chunks[2] = p.chunks[4] = chunks_of(s, m->d, lanes);
    p.chunks[3] = chunks_of(s, m->ff, lanes);
    const int64_t macs = m->d * (2 * m->qd + 2 * m->kvd + 3 * m->ff) + 2 * (s->position + 1) * m->qd;
    const tk_stage stages[STAGES] = {
        {qkv, qkv_begin, &p, p.chunks[0]},
        {attend_one, attend_begin, &p, p.chunks[1]},
        {out, out_begin, &p, p.chunks[2]},
        {gate_up, gate_begin, &p, p.chunks[3]},
        {down, down_begin, &p, p.chunks[4]},
    };
    for (p.layer = 0; p.layer < m->layers; p.layer++) {
        p.l = &m->layer[p.layer];
        for (int i = 0; i < STAGES; i++)
            p.next[i] = 0;
        run(s, stages, STAGES, what, macs, 1);
    }
    if (logits != NULL) {
        p.logits = logits;
        p.head = head_of(m);
        p.next[0] = 0;
        p.chunks[0] = chunks_of(s, p.head->N, lanes);
        const tk_stage stage = {head, head_begin, &p, p.chunks[0]};
        const int last[] = {P_HEAD};
        run(s, &stage, 1, last, p.head->N * m->d, 1);
    }
    return p.failed ? -1 : 0;
}

/* ---- a batch of a prompt --------------------------------------------------------------------------- */

static void tokens_of(const pass *p, int32_t chunk, int64_t *t0, int64_t *t1)
{
    const tk_team_api *const team = p->s->m->q8->team;
    *t0 = team->part(p->tokens, p->chunks[0], chunk);
    *t1 = team->part(p->tokens, p->chunks[0], chunk + 1);
}

static void add_norm(void *context, int32_t chunk)
{
    pass *const p = context;
    const model *const m = p->s->m;
    int64_t t0, t1;
    tokens_of(p, chunk, &t0, &t1);
    for (int64_t t = t0; t < t1; t++) {
        float *const x = p->s->x + t * m->d;
        if (p->more != NULL)
            m->ops->accumulate(x, p->more + t * m->d, (int32_t)m->d);
        if (p->to != NULL)
            m->ops->rmsnorm(p->to + t * m->d, x, p->weights, (int32_t)m->d, m->eps);
    }
}

static void turn_and_keep(void *context, int32_t chunk)
{
    pass *const p = context;
    session *const s = p->s;
    const model *const m = s->m;
    const int64_t half = m->hd / 2;
    int64_t t0, t1;
    tokens_of(p, chunk, &t0, &t1);
    for (int64_t t = t0; t < t1; t++) {
        const int64_t at = p->position + t;
        m->ops->rope(s->q + t * m->qd, s->cosines + at * half, s->sines + at * half, (int32_t)m->heads, (int32_t)m->hd);
        for (int64_t kvh = 0; kvh < m->kv_heads; kvh++)
            remember(s, p->layer, kvh, at, s->nk + t * m->kvd + kvh * m->hd, s->nv + t * m->kvd + kvh * m->hd);
    }
}

/* A few tokens' queries of one key-value head, slice after slice; those with most keys first. */
static void attend_block(void *context, int32_t chunk)
{
    pass *const p = context;
    session *const s = p->s;
    const model *const m = s->m;
    const int64_t blocks = parts_of(p->tokens, BLOCK_TOKENS), kvh = chunk % m->kv_heads;
    const int64_t t0 = (blocks - 1 - chunk / m->kv_heads) * BLOCK_TOKENS, t1 = least(t0 + BLOCK_TOKENS, p->tokens);
    const int64_t first = p->position + t0, end = p->position + t1;
    const int32_t rows = (int32_t)((t1 - t0) * m->group), group = (int32_t)m->group, hd = (int32_t)m->hd;
    const float *const q = s->q + t0 * m->qd + kvh * m->group * m->hd;
    for (int64_t j0 = 0; j0 < end; j0 += SLICE) {
        float *const acc = j0 == 0 ? mine->acc : mine->part, *const ml = j0 == 0 ? mine->ml : mine->pml;
        const int64_t at = cache_at(s, p->layer, kvh, j0 / SLICE);
        m->ops->attend(acc, ml, q, s->k + at, s->v + at, m->qd, group, rows, first - j0, 0, least(end - j0, SLICE), hd, m->scale);
        if (j0 > 0)
            m->ops->merge(mine->acc, mine->ml, acc, ml, rows, hd);
    }
    m->ops->finish(s->q + s->batch * m->qd + t0 * m->qd + kvh * m->group * m->hd, mine->acc, mine->ml, m->qd, group, rows, hd);
}

static void gated(void *context, int32_t chunk)
{
    pass *const p = context;
    const session *const s = p->s;
    int64_t t0, t1;
    tokens_of(p, chunk, &t0, &t1);
    /* In place of the ups, a token at a time by way of the lane's own row. */
    for (int64_t t = t0; t < t1; t++) {
        float *const u = s->up + t * s->m->ff;
        s->m->ops->swiglu(mine->row, s->gate + t * s->m->ff, u, (int32_t)s->m->ff);
        memcpy(u, mine->row, (size_t)s->m->ff * sizeof *u);
    }
}

static void alone_begin(void *context)
{
    take(context, 0);
}

static void stage(pass *p, void (*f)(void *, int32_t), int32_t chunks, int what, int64_t work)
{
    const tk_stage one = {f, alone_begin, p, chunks};
    p->next[0] = 0;
    run(p->s, &one, 1, &what, work, 0);
}

static int batch(session *s, int64_t tokens, float *logits, int all)
{
    const model *const m = s->m;
    const int64_t T = tokens;
    int status = 0;
    pass p = {.s = s, .tokens = T, .position = s->position};
    p.chunks[0] = (int32_t)least(T, s->ready > 1 ? (int64_t)s->ready * 4 : 1);
    const int64_t attended = T * (s->position + T) * m->qd; /* about */
    for (p.layer = 0; p.layer < m->layers && status == 0; p.layer++) {
        const layer *const l = p.l = &m->layer[p.layer];
        p.to = s->norm;
        p.more = p.layer > 0 ? s->out : NULL;
        p.weights = l->norm[ATTN_NORM];
        stage(&p, add_norm, p.chunks[0], P_NORM, T * m->d * 8);
        const tunekit_q8_region qkv_of[] = {
            times(&l->m[ATTN_Q], s->q, m->qd, T), times(&l->m[ATTN_K], s->nk, m->kvd, T), times(&l->m[ATTN_V], s->nv, m->kvd, T)};
        status |= products(s, qkv_of, 3, s->norm, T, m->d, P_QKV);
        stage(&p, turn_and_keep, p.chunks[0], P_ROPE, T * m->qd * 8);
        stage(&p, attend_block, (int32_t)(parts_of(T, BLOCK_TOKENS) * m->kv_heads), P_ATTEND, attended);
        const tunekit_q8_region out_of = times(&l->m[ATTN_OUT], s->out, m->d, T);
        status |= products(s, &out_of, 1, s->q + s->batch * m->qd, T, m->qd, P_OUT);
        p.more = s->out;
        p.weights = l->norm[FFN_NORM];
        stage(&p, add_norm, p.chunks[0], P_NORM, T * m->d * 8);
        const tunekit_q8_region gate_of[] = {times(&l->m[FFN_GATE], s->gate, m->ff, T), times(&l->m[FFN_UP], s->up, m->ff, T)};
        status |= products(s, gate_of, 2, s->norm, T, m->d, P_GATE_UP);
        stage(&p, gated, p.chunks[0], P_SWIGLU, T * m->ff * 16);
        const tunekit_q8_region down_of = times(&l->m[FFN_DOWN], s->out, m->d, T);
        status |= products(s, &down_of, 1, s->up, T, m->ff, P_DOWN);
    }
    p.more = s->out;
    p.to = logits != NULL ? s->logits_in : NULL;
    p.weights = m->last_norm;
    stage(&p, add_norm, p.chunks[0], P_NORM, T * m->d * 8);
    if (logits != NULL && status == 0) {
        const matrix *const h = head_of(m);
        const int64_t from = all ? 0 : T - 1;
        const tunekit_q8_region head_rows = times(h, logits, h->N, T - from);
        status = products(s, &head_rows, 1, s->logits_in + from * m->d, T - from, m->d, P_HEAD);
    }
    return status | p.failed;
}

int forward(session *s, const int32_t *tokens, int64_t count, float *logits, int all)
{
    const model *const m = s->m;
    const int32_t lanes = m->q8->team->live();
    if (lanes_ready(s, (int32_t)least(lanes, TK_TEAM_LANES)) != 0)
        return -1;
    const int32_t made = s->ready;
    s->ready = (int32_t)least(lanes, made); /* lanes of this call */
    int status = 0;
    for (int64_t at = 0; at < count && status == 0;) {
        const int64_t T = least(count - at, s->batch), last = at + T == count;
        const int64_t from = s->profile ? clock_ns() : 0;
        for (int64_t t = 0; t < T; t++) {
            const tunekit_q8_region r = times(&m->embedding, NULL, 0, 0);
            m->q8->row(s->x + t * m->d, &r, tokens[at + t], m->d);
        }
        if (s->profile)
            s->ns[P_EMBED] += clock_ns() - from;
        float *const to = logits == NULL ? NULL : all ? logits + at * m->vocab : last ? logits : NULL;
        status = T == 1 ? one_token(s, to) : batch(s, T, to, all);
        s->position += T;
        at += T;
    }
    s->ready = made;
    return status == 0 ? 0 : -1;
}
