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

/* x modulo 256, in -128..127 */
static int32_t lowest_digit(int32_t x) {
    return ((x + 128) & 255) - 128;
}

/* The digits of channel i in the three orders. */
static void place(uint8_t *head, uint32_t padded, uint32_t i, int32_t fine) {
    int32_t low = lowest_digit(fine), code = (fine - low) / 256;
    int32_t middle = lowest_digit(code), high = (code - middle) / 256;
    int16_t *words = (int16_t *)head;
    int8_t *plain = (int8_t *)head + 4 * (size_t)padded;
    int8_t *pairs = (int8_t *)head + 7 * (size_t)padded;
    uint32_t at = i / 64 * 128 + i % 8 / 4 * 64 + i % 64 / 8 * 8 + i % 4;

    words[i] = (int16_t)code;
    words[padded + i] = (int16_t)low;
    plain[i] = (int8_t)high;
    plain[padded + i] = (int8_t)middle;
    plain[2 * padded + i] = (int8_t)low;
    pairs[at] = pairs[at + 4] = (int8_t)high;
    pairs[2 * padded + at] = pairs[2 * padded + at + 4] = (int8_t)middle;
}

static void prepare_head(struct lk_query *q, uint32_t g, uint32_t dtype, const uint8_t *from,
                         uint32_t head_dim, float sm_scale) {
    float x[LK_HEAD_DIM_MAX];
    float prescale = load(dtype, from, head_dim, x), largest = 0;
    uint8_t *head = q->heads + (size_t)g * lk_query_head_bytes(q->padded);

    q->factor[g] = prescale == 0 ? NAN : 0;
    if (prescale == 0)
        return;
    for (uint32_t i = 0; i < head_dim; i++)
        x[i] *= prescale;
    hadamard_rotate(x, head_dim);
    for (uint32_t i = 0; i < head_dim; i++)
        largest = fmaxf(largest, fabsf(x[i]));
    if (largest == 0)
        return;
    for (uint32_t i = 0; i < head_dim; i++) {
        int32_t fine = (int32_t)lrintf(x[i] / largest * (256 * LK_QUERY_MAX));
        place(head, q->padded, i, fine);
        q->code_sum[g] += lk_query_words(q, g, LK_DIGIT_MIDDLE)[i];
        q->low_sum[g] += lk_query_words(q, g, LK_DIGIT_LOW)[i];
    }
    q->factor[g] = (float)((double)sm_scale * largest / LK_QUERY_MAX / prescale);
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
