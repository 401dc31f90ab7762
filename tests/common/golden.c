/* SPDX-License-Identifier: MIT */
/*
 * golden.c - reads golden cases and records, and scores by the definition. See golden.h.
 */
#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "golden.h"

const char *const golden_names[] = {"d64",           "d80",           "d96",       "d112",
                                    "d128",          "d192",          "d256",      "b8r2",
                                    "b8r8",          "b16r2",         "b16r4",     "b16r16",
                                    "b32r8",         "b32r16",        "b64r4",     "b64r8",
                                    "b64r16",        "fp16",          "fp32",      "constant-bf16",
                                    "constant-fp16", "huge-bf16",     "huge-fp32", "denormal-bf16",
                                    "denormal-fp32", "denormal-fp16", "equal",     "two",
                                    "five",          "zero",          NULL};

/* ---- files ---- */

static uint8_t *read_file(const char *name, size_t *ret_bytes) {
    char path[128];
    FILE *f;

    snprintf(path, sizeof path, "tests/golden/%s.bin", name);
    f = fopen(path, "rb");
    ck_assert_msg(f != NULL, "no %s", path);
    fseek(f, 0, SEEK_END);
    *ret_bytes = (size_t)ftell(f);
    rewind(f);
    uint8_t *data = malloc(*ret_bytes);
    ck_assert_uint_eq(fread(data, 1, *ret_bytes, f), *ret_bytes);
    fclose(f);
    return data;
}

static void *take(const uint8_t **at, size_t bytes) {
    void *copy = malloc(bytes);
    memcpy(copy, *at, bytes);
    *at += bytes;
    return copy;
}

static struct golden_summary take_summary(const uint8_t **at, uint32_t count, uint32_t tokens,
                                          uint32_t rank, uint32_t d) {
    struct golden_summary s = {.count = count, .tokens = tokens, .rank = rank};

    s.centroid = take(at, (size_t)count * d);
    s.centroid_scale = take(at, (size_t)count * 4);
    s.basis = take(at, (size_t)count * rank * d);
    s.coeffs = take(at, (size_t)count * rank * tokens);
    s.scales = take(at, (size_t)count * rank * 4);
    return s;
}

struct golden *golden_open(const char *name) {
    struct golden *g = calloc(1, sizeof *g);
    uint32_t head[6];
    size_t bytes;

    g->name = name;
    g->data = read_file(name, &bytes);
    memcpy(head, g->data, sizeof head);
    g->geometry = (struct lk_geometry){.layers = 1,
                                       .kv_heads = 1,
                                       .group = head[3],
                                       .head_dim = head[0],
                                       .page_tokens = head[1],
                                       .rank = head[2],
                                       .dtype = head[4]};
    g->pages = head[5];
    uint32_t d = head[0], tokens = head[1], element = head[4] == LK_FP32 ? 4 : 2;
    g->keys = g->data + sizeof head;
    g->q = g->keys + (size_t)g->pages * tokens * d * element;
    const uint8_t *at = g->q + (size_t)head[3] * d * element;
    g->page = take_summary(&at, g->pages, tokens, head[2], d);
    g->super =
        take_summary(&at, g->pages / LK_QUAD_PAGES, LK_QUAD_PAGES * tokens, LK_COARSE_RANK, d);
    g->score = take(&at, (size_t)head[3] * g->pages * 4);
    g->coarse_score = take(&at, (size_t)head[3] * g->pages * 4);
    g->super_score = take(&at, (size_t)head[3] * g->pages / LK_QUAD_PAGES * 4);
    ck_assert_ptr_eq(at, g->data + bytes);
    return g;
}

void golden_close(struct golden *g) {
    golden_summary_free(&g->page);
    golden_summary_free(&g->super);
    free(g->score);
    free(g->coarse_score);
    free(g->super_score);
    free(g->data);
    free(g);
}

void golden_summary_free(struct golden_summary *s) {
    free(s->centroid);
    free(s->centroid_scale);
    free(s->basis);
    free(s->coeffs);
    free(s->scales);
}

/* ---- pools ---- */

struct lk_pool_view golden_pool(const struct lk_geometry *geometry, uint32_t pages) {
    struct lk_pool_view p = {.geometry = *geometry, .pages = pages};
    struct lk_layout *l = &p.layout;

    lk_cpu_layout(geometry, l);
    p.kv = malloc(pages * l->page_bytes);
    p.coarse = malloc((size_t)pages * l->coarse_stride);
    p.fine = malloc((size_t)pages * l->fine_stride + 1); /* none at rank 2 */
    p.super = malloc((size_t)pages / LK_QUAD_PAGES * l->super_stride);
    memset(p.kv, 0xff, pages * l->page_bytes);
    memset(p.coarse, 0xff, (size_t)pages * l->coarse_stride);
    memset(p.fine, 0xff, (size_t)pages * l->fine_stride);
    memset(p.super, 0xff, (size_t)pages / LK_QUAD_PAGES * l->super_stride);
    return p;
}

void golden_pool_free(struct lk_pool_view *pool) {
    free(pool->kv);
    free(pool->coarse);
    free(pool->fine);
    free(pool->super);
}

struct lk_scratch *golden_scratch(void) {
    static struct lk_scratch *scratch; /* for the program's life */
    if (!scratch)
        scratch = aligned_alloc(64, lk_cpu_scratch_bytes());
    ck_assert_ptr_nonnull(scratch);
    return scratch;
}

void golden_fill(struct lk_pool_view *pool, const uint8_t *keys, uint32_t pages) {
    size_t bytes = pool->layout.head_bytes / 2;
    for (uint32_t j = 0; j < pages; j++)
        memcpy(lk_page_keys(pool, 0, j, 0), keys + j * bytes, bytes);
}

/* ---- records ---- */

static float bf16(const uint8_t *at) {
    uint32_t bits = (uint32_t)at[1] << 24 | (uint32_t)at[0] << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Directions first.. of page j from a record without its centroid; -> past its scales */
static void read_directions(struct golden_summary *s, uint32_t d, uint32_t j, uint32_t first,
                            uint32_t count, const uint8_t *pairs, const uint8_t *scales) {
    const uint8_t *coeffs = pairs + count * d / 2;

    for (uint32_t i = 0; i < count; i++) {
        uint32_t to = j * s->rank + first + i;
        for (uint32_t c = 0; c < d; c++) {
            uint8_t byte = pairs[i / 2 * d + c / 8 * 8 + i % 2 * 4 + c % 4];
            s->basis[(size_t)to * d + c] = (int8_t)((c % 8 < 4 ? byte & 15 : byte >> 4) - 8);
        }
        memcpy(s->coeffs + (size_t)to * s->tokens, coeffs + i * s->tokens, s->tokens);
        s->scales[to] = bf16(scales + 2 * i);
    }
}

static void read_record(struct golden_summary *s, uint32_t d, uint32_t j, const uint8_t *first,
                        const uint8_t *fine) {
    uint32_t rest = s->rank - LK_COARSE_RANK;
    const uint8_t *scales = first + 2 * d + LK_COARSE_RANK * s->tokens;

    for (uint32_t c = 0; c < d; c++)
        s->centroid[j * d + c] = (int8_t)(first[c] - 128);
    s->centroid_scale[j] = bf16(scales);
    read_directions(s, d, j, 0, LK_COARSE_RANK, first + d, scales + 2);
    if (rest)
        read_directions(s, d, j, LK_COARSE_RANK, rest, fine, fine + rest * (d / 2 + s->tokens));
}

struct golden_summary golden_read(const struct lk_pool_view *pool, bool super) {
    const struct lk_geometry *g = &pool->geometry;
    uint32_t d = g->head_dim;
    struct golden_summary s = {.count =
                                   (uint32_t)(super ? pool->pages / LK_QUAD_PAGES : pool->pages),
                               .tokens = super ? LK_QUAD_PAGES * g->page_tokens : g->page_tokens,
                               .rank = super ? LK_COARSE_RANK : g->rank};

    s.centroid = malloc((size_t)s.count * d);
    s.centroid_scale = malloc((size_t)s.count * 4);
    s.basis = malloc((size_t)s.count * s.rank * d);
    s.coeffs = malloc((size_t)s.count * s.rank * s.tokens);
    s.scales = malloc((size_t)s.count * s.rank * 4);
    for (uint32_t j = 0; j < s.count; j++)
        read_record(&s, d, j, super ? lk_quad_super(pool, 0, j, 0) : lk_page_coarse(pool, 0, j, 0),
                    super ? NULL : lk_page_fine(pool, 0, j, 0));
    return s;
}

/* ---- the definition ---- */

static double element(uint32_t dtype, const uint8_t *from, size_t i) {
    uint16_t h;
    float f;

    if (dtype == LK_FP32) {
        memcpy(&f, from + 4 * i, 4);
        return f;
    }
    if (dtype == LK_BF16)
        return bf16(from + 2 * i);
    memcpy(&h, from + 2 * i, 2);
    int exponent = h >> 10 & 31, body = h & 1023;
    double x = exponent == 31  ? (body ? NAN : INFINITY)
               : exponent == 0 ? ldexp(body, -24)
                               : ldexp(1024 + body, exponent - 25);
    return h & 0x8000 ? -x : x;
}

void golden_rotate(const struct lk_geometry *geometry, const uint8_t *q, double *ret) {
    uint32_t d = geometry->head_dim, block = d & -d;

    for (uint32_t g = 0; g < geometry->group; g++)
        for (uint32_t c = 0; c < d; c++) {
            double sum = 0;
            for (uint32_t k = 0; k < block; k++) {
                double x = element(geometry->dtype, q, (size_t)g * d + c / block * block + k);
                sum += __builtin_popcount(c % block & k) % 2 ? -x : x;
            }
            ret[g * d + c] = sum / sqrt(block);
        }
}

double golden_score(const struct golden_summary *summary, uint32_t head_dim, uint32_t j,
                    uint32_t rank, const double *q, double sm_scale, double *ret_range) {
    const struct golden_summary *s = summary;
    const uint32_t d = head_dim;
    double x[4 * LK_PAGE_TOKENS_MAX] = {0}, mu = 0, top = -INFINITY, widest = 0, sum = 0;

    for (uint32_t c = 0; c < d; c++)
        mu += q[c] * s->centroid[j * d + c];
    mu *= (double)s->centroid_scale[j] * sm_scale;
    for (uint32_t i = 0; i < rank; i++) {
        size_t at = (size_t)j * s->rank + i;
        double p = 0;
        for (uint32_t c = 0; c < d; c++)
            p += q[c] * s->basis[at * d + c];
        for (uint32_t t = 0; t < s->tokens; t++)
            x[t] += p * s->scales[at] * sm_scale * s->coeffs[at * s->tokens + t];
    }
    for (uint32_t t = 0; t < s->tokens; t++) {
        top = fmax(top, x[t]);
        widest = fmax(widest, fabs(x[t]));
    }
    for (uint32_t t = 0; t < s->tokens; t++)
        sum += exp(x[t] - top);
    *ret_range = fabs(mu) + widest;
    return mu + top + log(sum);
}
