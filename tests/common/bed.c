/* SPDX-License-Identifier: MIT */
/*
 * bed.c - see bed.h. Conversions are the tests' own.
 */
#include "bed.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "golden.h"

static uint64_t bits(uint64_t *state) {
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

double bed_normal(uint64_t *state) {
    double sum = 0;

    for (int i = 0; i < 12; i++)
        sum += (double)(bits(state) >> 11) * 0x1p-53;
    return sum - 6;
}

static void *must(void *p) {
    if (!p)
        abort();
    return p;
}

static void *zeroed(uint64_t count, size_t size) {
    return must(calloc(count ? count : 1, size));
}

double bed_round(uint32_t dtype, double x) {
    float f = (float)x;
    uint32_t b;

    if (dtype == LK_FP32 || f != f)
        return (double)f;
    if (dtype == LK_BF16) {
        memcpy(&b, &f, 4);
        b = (b + 0x7fff + (b >> 16 & 1)) & 0xffff0000;
        memcpy(&f, &b, 4);
        return (double)f;
    }
    if (f == 0 || isinf(f))
        return (double)f;
    int exponent = ilogb((double)f) < -14 ? -14 : ilogb((double)f);
    double unit = ldexp(1, exponent - 10), rounded = rint((double)f / unit) * unit;
    return fabs(rounded) > 65504 ? copysign((double)INFINITY, rounded) : rounded;
}

static uint16_t half(double x) {
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    double a = fabs(x);

    if (x != x)
        return 0x7e00;
    if (isinf(x))
        return sign | 0x7c00;
    if (a < 0x1p-14)
        return (uint16_t)(sign | (uint16_t)(a * 0x1p24));
    int exponent = ilogb(a);
    return (uint16_t)(sign | (exponent + 15) << 10 | ((int)ldexp(a, 10 - exponent) - 1024));
}

void bed_store(uint32_t dtype, void *at, double value) {
    float f = (float)value;
    uint16_t h = half(value);
    uint32_t b;

    memcpy(&b, &f, 4);
    if (dtype == LK_FP32)
        memcpy(at, &f, 4);
    else if (dtype == LK_FP16)
        memcpy(at, &h, 2);
    else
        memcpy(at, (uint8_t *)&b + 2, 2);
}

static void fill(uint32_t dtype, uint8_t *at, double *copy, uint64_t count, double scale,
                 uint64_t seed) {
    uint32_t bytes = dtype == LK_FP32 ? 4 : 2;

    for (uint64_t i = 0; i < count; i++) {
        copy[i] = bed_round(dtype, scale * bed_normal(&seed));
        bed_store(dtype, at + i * bytes, copy[i]);
    }
}

static void make_pool(struct bed *bed, const struct lk_geometry *g) {
    struct lk_pool_view *pool = &bed->pool;
    uint64_t quads = (bed->pages + 3) / 4 + 3, heads = (uint64_t)g->layers * g->kv_heads;

    pool->geometry = *g;
    lk_cpu_layout(g, &pool->layout);
    pool->pages = 4 * quads;
    size_t kv = g->layers * pool->pages * pool->layout.page_bytes;
    size_t coarse = heads * pool->pages * pool->layout.coarse_stride;
    size_t fine = heads * pool->pages * pool->layout.fine_stride;
    size_t super = heads * quads * pool->layout.super_stride;
    size_t all = (kv + coarse + fine + super + 4 * 64 + 63) / 64 * 64;
    bed->memory = must(aligned_alloc(64, all));
    memset(bed->memory, 0xff, all);
    pool->kv = bed->memory;
    pool->coarse = pool->kv + (kv + 63) / 64 * 64;
    pool->fine = pool->coarse + (coarse + 63) / 64 * 64;
    pool->super = pool->fine + (fine + 63) / 64 * 64;
    bed->table = zeroed(quads, sizeof *bed->table);
    for (uint64_t i = 0; i < quads; i++)
        bed->table[i] = (uint32_t)i;
    uint64_t seed = 7;
    for (uint64_t i = quads - 1; i > 0; i--) {
        uint64_t j = bits(&seed) % (i + 1);
        uint32_t t = bed->table[i];
        bed->table[i] = bed->table[j];
        bed->table[j] = t;
    }
}

static void make_row(struct bed *bed) {
    const struct lk_geometry *g = &bed->pool.geometry;
    uint64_t heads = (uint64_t)g->kv_heads * g->group, tokens = bed->tokens ? bed->tokens : 1;

    bed->out = zeroed(tokens * heads * g->head_dim, sizeof *bed->out);
    bed->lse = zeroed(tokens * heads, sizeof *bed->lse);
    bed->result = zeroed(g->kv_heads, sizeof *bed->result);
    bed->list = zeroed(g->kv_heads * (bed->pages + 1), sizeof *bed->list);
    bed->row = (struct lk_row){.pool = &bed->pool,
                               .layer = g->layers - 1,
                               .tokens = 1,
                               .length = bed->tokens,
                               .table = bed->table,
                               .table_shift = 2,
                               .q = bed->q,
                               .k = bed->k,
                               .v = bed->v,
                               .out = bed->out,
                               .lse = bed->lse,
                               .list = bed->list,
                               .list_pages = (uint32_t)bed->pages,
                               .result = bed->result,
                               .budget_pages = (uint32_t)bed->pages + 1,
                               .budget_tokens = bed->tokens,
                               .sink_pages = 1,
                               .recent_pages = 1,
                               .scan = LK_FULL,
                               .exact = 1,
                               .sm_scale = 1 / sqrtf((float)g->head_dim)};
}

struct bed *bed_open(const struct lk_geometry *g, uint64_t tokens, double scale) {
    struct bed *bed = zeroed(1, sizeof *bed);
    uint64_t kv = tokens * g->kv_heads * g->head_dim, q = (tokens ? kv : g->kv_heads * g->head_dim);

    q *= g->group;
    bed->tokens = tokens;
    bed->pages = (tokens + g->page_tokens - 1) / g->page_tokens;
    make_pool(bed, g);
    bed->k = zeroed(kv, 4);
    bed->v = zeroed(kv, 4);
    bed->q = zeroed(q, 4);
    bed->dk = zeroed(kv, sizeof(double));
    bed->dv = zeroed(kv, sizeof(double));
    bed->dq = zeroed(q, sizeof(double));
    fill(g->dtype, bed->k, bed->dk, kv, scale, 1);
    fill(g->dtype, bed->v, bed->dv, kv, 1, 2);
    fill(g->dtype, bed->q, bed->dq, q, 1, 3);
    make_row(bed);
    struct lk_row append = bed->row;
    append.append = (uint32_t)tokens;
    for (uint32_t h = 0; h < g->kv_heads; h++)
        lk_cpu_append(&append, h);
    bed_build(bed);
    return bed;
}

void bed_close(struct bed *bed) {
    void *all[] = {bed->memory, bed->table, bed->k,   bed->v,   bed->q,      bed->dk,
                   bed->dv,     bed->dq,    bed->out, bed->lse, bed->result, bed->list};

    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    free(bed);
}

void bed_set(struct bed *bed, int v, uint64_t token, uint32_t head, uint32_t channel, double x) {
    const struct lk_geometry *g = &bed->pool.geometry;
    uint64_t page = lk_row_page(&bed->row, token / g->page_tokens);
    uint8_t *at = v ? lk_page_values(&bed->pool, bed->row.layer, page, head)
                    : lk_page_keys(&bed->pool, bed->row.layer, page, head);
    size_t i = (token * g->kv_heads + head) * g->head_dim + channel;

    (v ? bed->dv : bed->dk)[i] = bed_round(g->dtype, x);
    bed_store(g->dtype, (v ? bed->v : bed->k) + i * bed->pool.layout.element_bytes,
              bed_round(g->dtype, x));
    at += (token % g->page_tokens * g->head_dim + channel) * bed->pool.layout.element_bytes;
    bed_store(g->dtype, at, bed_round(g->dtype, x));
}

void bed_build(struct bed *bed) {
    uint64_t complete = bed->tokens / bed->pool.geometry.page_tokens;

    for (uint32_t h = 0; h < bed->pool.geometry.kv_heads; h++) {
        for (uint64_t j = 0; j < complete; j++)
            lk_cpu_build(&bed->pool, bed->row.layer, lk_row_page(&bed->row, j), h,
                         golden_scratch());
        for (uint64_t u = 0; u < complete / 4; u++)
            lk_cpu_build_super(&bed->pool, bed->row.layer, bed->table[u], h, golden_scratch());
    }
}

void bed_run(struct lk_row *row, uint8_t fill_byte) {
    static const struct {
        uint32_t (*tasks)(const struct lk_row *);
        void (*run)(struct lk_row *, uint32_t);
    } stages[] = {
        {lk_cpu_prepare_tasks, lk_cpu_prepare_task}, {lk_cpu_scan_tasks, lk_cpu_scan_task},
        {lk_cpu_prune_tasks, lk_cpu_prune_task},     {lk_cpu_rescan_tasks, lk_cpu_rescan_task},
        {lk_cpu_select_tasks, lk_cpu_select_task},   {lk_cpu_attend_tasks, lk_cpu_attend_task},
        {lk_cpu_merge_tasks, lk_cpu_merge_task},
    };
    size_t bytes = lk_cpu_row_workspace_bytes(row);
    uint8_t *space = must(aligned_alloc(64, (bytes + 64) / 64 * 64));

    memset(space, fill_byte, bytes);
    row->workspace = space;
    row->score_bytes = row->select_bytes = row->attend_bytes = 0;
    for (size_t s = 0; s < sizeof stages / sizeof *stages; s++)
        for (uint32_t t = stages[s].tasks(row); t-- > 0;) /* any order is right */
            stages[s].run(row, t);
    row->workspace = NULL;
    free(space);
}

double bed_attend(const struct bed *bed, uint32_t token, uint32_t h, uint64_t sight,
                  const double *weight, double *ret_out) {
    const struct lk_geometry *g = &bed->pool.geometry;
    uint32_t d = g->head_dim, head = h / g->group;
    const double *q = bed->dq + ((size_t)token * g->kv_heads * g->group + h) * d;
    double *z = zeroed(sight, sizeof *z), top = (double)-INFINITY, mass = 0;

    memset(ret_out, 0, d * sizeof *ret_out);
    for (uint64_t t = 0; t < sight; t++) {
        const double *k = bed->dk + (t * g->kv_heads + head) * d;
        for (uint32_t x = 0; x < d; x++)
            z[t] += q[x] * k[x];
        z[t] *= (double)bed->row.sm_scale;
        if (weight)
            z[t] = weight[t / g->page_tokens] > 0 ? z[t] + log(weight[t / g->page_tokens])
                                                  : (double)-INFINITY;
        top = z[t] > top ? z[t] : top;
    }
    for (uint64_t t = 0; t < sight; t++) {
        double w = z[t] > (double)-INFINITY ? exp(z[t] - top) : 0;
        mass += w;
        for (uint32_t x = 0; x < d && w > 0; x++)
            ret_out[x] += w * bed->dv[(t * g->kv_heads + head) * d + x];
    }
    for (uint32_t x = 0; x < d && mass > 0; x++)
        ret_out[x] /= mass;
    free(z);
    return mass > 0 ? top + log(mass) : (double)-INFINITY;
}
