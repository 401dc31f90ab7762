/* SPDX-License-Identifier: MIT */
/*
 * score_portable.c - scoring in plain C, for any machine.
 *
 * A page's codes are unpacked once and multiplied with each head's 16-bit codes in turn.
 * Any thread. Written to be read; the other paths do the same in vectors.
 */
#include <math.h>

#include "score.h"

#define TOKENS_MAX (LK_QUAD_PAGES * LK_PAGE_TOKENS_MAX)

/* A page as the loops want it: codes without bias, the directions of both records in order. */
struct page {
    int16_t centroid[LK_HEAD_DIM_MAX];
    int16_t basis[LK_RANK_MAX][LK_HEAD_DIM_MAX];
    const int8_t *coeff[LK_RANK_MAX];
    float centroid_scale, scale[LK_RANK_MAX];
    uint32_t directions;
};

static void unpack_record(const struct lk_record *r, const uint8_t *from, struct page *page) {
    const uint8_t *pairs = from + lk_record_pairs(r), *scales = from + lk_record_scales(r);
    const int8_t *coeffs = (const int8_t *)from + lk_record_coeffs(r);

    if (r->centroid) {
        page->centroid_scale = lk_record_scale(scales, 0);
        for (uint32_t c = 0; c < r->head_dim; c++)
            page->centroid[c] = (int16_t)(from[c] - LK_CENTROID_BIAS);
    }
    for (uint32_t i = 0; i < r->directions; i++) {
        const uint8_t *pair = pairs + i / 2 * r->head_dim;
        int16_t *basis = page->basis[page->directions];
        for (uint32_t c = 0; c < r->head_dim; c++) {
            uint8_t byte = pair[(c / 8 * 2 + i % 2) * 4 + c % 4];
            basis[c] = (int16_t)((c % 8 < 4 ? byte & 15 : byte >> 4) - LK_BASIS_BIAS);
        }
        page->coeff[page->directions] = coeffs + i * r->tokens;
        page->scale[page->directions++] = lk_record_scale(scales, i + r->centroid);
    }
}

/* of a query's code or low digits with a page's codes */
static float product(const struct lk_query *q, uint32_t g, enum lk_query_digit digit,
                     const int16_t *b, uint32_t head_dim) {
    const int16_t *a = lk_query_words(q, g, digit);
    int32_t sum = 0;
    for (uint32_t c = 0; c < head_dim; c++)
        sum += a[c] * b[c];
    return (float)sum;
}

static float clip(float x) { /* a NaN stays one */
    return x > LK_SCORE_MOST ? LK_SCORE_MOST : x < -LK_SCORE_MOST ? -LK_SCORE_MOST : x;
}

static float score_page(const struct page *page, const struct lk_record *shape,
                        const struct lk_query *q, uint32_t g) {
    float x[TOKENS_MAX] = {0}, most = -INFINITY, sum = 0;
    uint32_t d = shape->head_dim;
    float unit = lk_score_unit(page->centroid_scale, q->factor[g]);
    float mu = product(q, g, LK_DIGIT_MIDDLE, page->centroid, d);

    if (unit >= LK_SCORE_LOW_UNIT)
        mu += product(q, g, LK_DIGIT_LOW, page->centroid, d) / 256;
    mu = clip(mu * unit);
    for (uint32_t i = 0; i < page->directions; i++) {
        float p = clip(product(q, g, LK_DIGIT_MIDDLE, page->basis[i], d) *
                       lk_score_unit(page->scale[i], q->factor[g]));
        for (uint32_t t = 0; t < shape->tokens; t++)
            x[t] += p * page->coeff[i][t];
    }
    for (uint32_t t = 0; t < shape->tokens; t++)
        most = x[t] > most ? x[t] : most;
    for (uint32_t t = 0; t < shape->tokens; t++)
        sum += expf(x[t] - most);
    return mu + (most + logf(sum));
}

void lk_score_portable(const struct lk_score_shape *shape, const struct lk_query *query,
                       const struct lk_score_batch *batch, const struct lk_score_batch *next,
                       uint32_t pages, float *ret) {
    (void)next;
    for (uint32_t j = 0; j < pages; j++) {
        struct page page;
        page.directions = 0;
        page.centroid_scale = 0;
        unpack_record(&shape->first, batch->first[j], &page);
        if (shape->fine.directions)
            unpack_record(&shape->fine, batch->fine[j], &page);
        for (uint32_t g = 0; g < shape->group; g++)
            ret[g * LK_SCORE_BATCH + j] = score_page(&page, &shape->first, query, g);
    }
}
