/* SPDX-License-Identifier: MIT */
/*
 * query.h - a group's queries as the scoring loops want them.
 *
 * A query is rotated and quantised to 24 bits against its own largest element: three digits, each
 * int8,
 *
 *     element = factor * (code + low / 256),   code = 256 * high + middle
 *
 * Directions are multiplied by the code alone, 16 bits. The centroid takes the low digit too: keys
 * with a large constant in a channel would otherwise cost some thousandths of a nat, the same for
 * all pages but not for the newest, which is scored exactly. Integer products are exact in 32 bits
 * on every path: 255 * 32639 * 256 < 2^31 is the largest sum there is.
 *
 * Each head has its digits in three orders, padded with zeros to whole 64-byte lines:
 *   words  int16 [2][d]       code and low, natural order
 *   plain  int8 [3][d]        high, middle, low, natural order: for the centroid
 *   pairs  int8 [2][d/64][2][64]   high and middle; chunk of 64 channels, then those that lie
 *                             low and those that lie high in a pair's bytes
 *                             (record.h); each four channels twice, once a direction
 *
 * Heads are padded to a multiple of LK_QUERY_BLOCK with zeros. A query that is not finite has zero
 * codes and a NaN factor: its scores are NaN and nobody else's.
 */
#ifndef LK_CPU_QUERY_H
#define LK_CPU_QUERY_H

#include "cpu.h"

#define LK_QUERY_BLOCK 4     /* heads scored together */
#define LK_QUERY_MAX   32639 /* 127 * 256 + 127 */

enum lk_query_digit { LK_DIGIT_HIGH, LK_DIGIT_MIDDLE, LK_DIGIT_LOW };

struct lk_query {
    float factor[LK_GROUP_MAX];     /* sm_scale times what one unit of the code is worth */
    int32_t code_sum[LK_GROUP_MAX]; /* of the codes: undoes the bias of stored codes */
    int32_t low_sum[LK_GROUP_MAX];  /* of the low digits */
    uint32_t padded;                /* head_dim rounded up to 64 */
    uint8_t pad[60];
    uint8_t heads[]; /* [group rounded up to LK_QUERY_BLOCK][lk_query_head_bytes()] */
};
_Static_assert(LK_GROUP_MAX % LK_QUERY_BLOCK == 0, "padding heads need a place");
_Static_assert(sizeof(struct lk_query) % 64 == 0, "digits begin on a line");

static inline uint32_t lk_query_padded(uint32_t head_dim) {
    return (head_dim + 63) / 64 * 64;
}
static inline uint32_t lk_query_head_bytes(uint32_t padded) {
    return (4 + 3 + 4) * padded; /* words, plain, pairs */
}
/* Of the heads that begin at `heads`; with a `padded` that the compiler knows, steps are constants.
 */
static inline const uint8_t *lk_query_head_at(const uint8_t *heads, uint32_t padded, uint32_t g) {
    return heads + (size_t)g * lk_query_head_bytes(padded);
}
/* digit MIDDLE: the code, LOW: the low digit */
static inline const int16_t *lk_query_words_at(const uint8_t *heads, uint32_t padded, uint32_t g,
                                               enum lk_query_digit digit) {
    return (const int16_t *)lk_query_head_at(heads, padded, g) +
           (digit == LK_DIGIT_LOW ? padded : 0);
}
static inline const int8_t *lk_query_pairs_at(const uint8_t *heads, uint32_t padded, uint32_t g,
                                              enum lk_query_digit digit) {
    return (const int8_t *)lk_query_head_at(heads, padded, g) + (7 + 2 * (size_t)digit) * padded;
}
static inline const uint8_t *lk_query_head(const struct lk_query *q, uint32_t g) {
    return lk_query_head_at(q->heads, q->padded, g);
}
static inline const int16_t *lk_query_words(const struct lk_query *q, uint32_t g,
                                            enum lk_query_digit digit) {
    return lk_query_words_at(q->heads, q->padded, g, digit);
}
static inline const int8_t *lk_query_plain(const struct lk_query *q, uint32_t g,
                                           enum lk_query_digit digit) {
    return (const int8_t *)lk_query_head(q, g) + (4 + (size_t)digit) * q->padded;
}
static inline const int8_t *lk_query_pairs(const struct lk_query *q, uint32_t g,
                                           enum lk_query_digit digit) {
    return lk_query_pairs_at(q->heads, q->padded, g, digit);
}

#endif
