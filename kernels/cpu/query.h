/* SPDX-License-Identifier: MIT */
/*
 * query.h - a group's queries as the scoring loops want them.
 *
 * A query is rotated and quantised to 16 bits against its own largest element: digits high and low,
 * code = 256 * high + low, both int8. Its integer product with a page's codes is exact in 32 bits on
 * every path: 255 * 32639 * 256 < 2^31 is the largest sum there is.
 *
 * Each head has the same codes in three orders, padded with zeros to whole 64-byte lines:
 *   words  int16 [d]          the codes, natural order
 *   plain  int8 [2][d]        high, then low digits, natural order: for the centroid
 *   pairs  int8 [2][d/64][2][64]   digits, chunk of 64 channels, then the channels that lie low and high
 *                             in bytes of a pair (record.h); each four channels twice, once a direction
 *
 * Heads are padded to a multiple of LK_QUERY_BLOCK with zeros. A query that is not finite has zero
 * codes and a NaN factor: its scores are NaN and nobody else's.
 */
#ifndef LK_CPU_QUERY_H
#define LK_CPU_QUERY_H

#include "cpu.h"

#define LK_QUERY_BLOCK 4     /* heads scored together */
#define LK_QUERY_MAX   32639 /* 127 * 256 + 127 */

struct lk_query {
    float factor[LK_GROUP_MAX]; /* sm_scale * what one unit of the code is worth; 0 in padding */
    int32_t sum[LK_GROUP_MAX];  /* of the codes: undoes the bias of stored codes */
    uint32_t padded;            /* head_dim rounded up to 64 */
    uint8_t pad[60];
    uint8_t heads[]; /* [group rounded up to LK_QUERY_BLOCK][lk_query_head_bytes()] */
};
_Static_assert(LK_GROUP_MAX % LK_QUERY_BLOCK == 0, "padding heads need a place");
_Static_assert(sizeof(struct lk_query) % 64 == 0, "digits begin on a line");

static inline uint32_t lk_query_padded(uint32_t head_dim) {
    return (head_dim + 63) / 64 * 64;
}
static inline uint32_t lk_query_head_bytes(uint32_t padded) {
    return 8 * padded; /* words 2, plain 2, pairs 4 */
}
static inline const int16_t *lk_query_words(const struct lk_query *q, uint32_t g) {
    return (const int16_t *)(q->heads + (size_t)g * lk_query_head_bytes(q->padded));
}
/* digit 0: high, 1: low */
static inline const int8_t *lk_query_plain(const struct lk_query *q, uint32_t g, uint32_t digit) {
    return (const int8_t *)(q->heads + (size_t)g * lk_query_head_bytes(q->padded) +
                            (2 + digit) * (size_t)q->padded);
}
static inline const int8_t *lk_query_pairs(const struct lk_query *q, uint32_t g, uint32_t digit) {
    return (const int8_t *)(q->heads + (size_t)g * lk_query_head_bytes(q->padded) +
                            (4 + 2 * digit) * (size_t)q->padded);
}

#endif
