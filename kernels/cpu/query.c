/* SPDX-License-Identifier: MIT */
/*
 * query.c - prepares a group's queries for scoring (query.h says in which form).
 *
 * One form and one code for all paths: integer products are then equal whatever computes them.
 * Client memory is read once, into a private copy. Pure, any thread.
 */
#include "query.h"
#include "element.h"
#include "hadamard.h"

size_t lk_cpu_query_bytes(const struct lk_geometry *geometry) {
    size_t heads = (geometry->group + LK_QUERY_BLOCK - 1) / LK_QUERY_BLOCK * LK_QUERY_BLOCK;
    return sizeof(struct lk_query) +
           heads * lk_query_head_bytes(lk_query_padded(geometry->head_dim));
}

/* -> the power of two that brings x's largest element into [1, 2), or 0 if some are not finite. */
static float load(uint32_t dtype, const uint8_t *from, uint32_t head_dim, float *x) {
    lanes top = {0}, bad = {0};

    for (uint32_t i = 0; i < head_dim; i += LANES) {
        lanes v = element_load(dtype, from, i);
        bad += v * 0; /* NaN if v is not finite */
        top = lanes_max(top, lanes_abs(v));
        lanes_store(x + i, v);
    }
    if (lanes_sum(bad) != 0)
        return 0;
    float largest = lanes_largest(top);
    int exponent = largest > 0 ? -ilogbf(largest) : 0;
    return ldexpf(1, exponent > 126 ? 126 : exponent < -126 ? -126 : exponent);
}

/* Digits of the codes in the three orders. */
static void spread(struct lk_query *q, uint32_t g, uint32_t head_dim, const int16_t *code) {
    int16_t *words = (int16_t *)lk_query_words(q, g);
    int8_t *plain[2] = {(int8_t *)lk_query_plain(q, g, 0), (int8_t *)lk_query_plain(q, g, 1)};
    int8_t *pairs[2] = {(int8_t *)lk_query_pairs(q, g, 0), (int8_t *)lk_query_pairs(q, g, 1)};

    for (uint32_t i = 0; i < head_dim; i++) {
        int8_t low = (int8_t)(uint8_t)(code[i] & 0xff);
        int8_t digit[2] = {(int8_t)((code[i] - low) / 256), low};
        uint32_t chunk = i / 64, eight = i % 64 / 8, high = i % 8 / 4, byte = i % 4;
        uint32_t at = chunk * 128 + high * 64 + eight * 8 + byte;

        words[i] = code[i];
        for (int n = 0; n < 2; n++) {
            plain[n][i] = digit[n];
            pairs[n][at] = pairs[n][at + 4] = digit[n];
        }
    }
}

static void prepare_head(struct lk_query *q, uint32_t g, uint32_t dtype, const uint8_t *from,
                         uint32_t head_dim, float sm_scale) {
    float x[LK_HEAD_DIM_MAX];
    int16_t code[LK_HEAD_DIM_MAX] = {0};
    float near_one = load(dtype, from, head_dim, x), largest = 0;
    int32_t sum = 0;

    q->factor[g] = near_one == 0 ? NAN : 0;
    q->sum[g] = 0;
    if (near_one == 0)
        return;
    for (uint32_t i = 0; i < head_dim; i++)
        x[i] *= near_one;
    hadamard_rotate(x, head_dim);
    for (uint32_t i = 0; i < head_dim; i++)
        largest = fmaxf(largest, fabsf(x[i]));
    if (largest == 0)
        return;
    for (uint32_t i = 0; i < head_dim; i++) {
        code[i] = (int16_t)lrintf(x[i] / largest * LK_QUERY_MAX);
        sum += code[i];
    }
    q->factor[g] = (float)((double)sm_scale * largest / LK_QUERY_MAX / near_one);
    q->sum[g] = sum;
    spread(q, g, head_dim, code);
}

void lk_cpu_prepare(const struct lk_row *row, uint32_t head, struct lk_query *ret) {
    const struct lk_geometry *g = &row->pool->geometry;
    size_t bytes = (size_t)g->head_dim * row->pool->layout.element_bytes;
    const uint8_t *from = (const uint8_t *)row->q + (size_t)head * g->group * bytes;

    memset(ret, 0, lk_cpu_query_bytes(g));
    ret->padded = lk_query_padded(g->head_dim);
    for (uint32_t i = 0; i < g->group; i++)
        prepare_head(ret, i, g->dtype, from + i * bytes, g->head_dim, row->sm_scale);
}
