/* SPDX-License-Identifier: MIT */
/*
 * record.h - the inside of a summary record, shared by those who write it (build) and read it
 * (score).
 *
 * A record holds `directions` directions of d channels over `tokens` tokens, in this order:
 *
 *     centroid   u8 [d]                          value + 128; coarse and super records only
 *     pairs      u8 [directions / 2][d / 8][2][4]  basis codes of directions 2p and 2p + 1
 *     coeffs     i8 [directions][tokens]         -127..127
 *     scales     bf16 [1 + directions]           the centroid's (where there is one), then one a
 *                                                direction: product of basis and coefficient scale
 *
 * A basis code is 4 bits, value + 8, 1..15. For each eight channels and direction there are four
 * bytes: byte j holds channel j low and channel j + 4 high. A 512-bit load is thus two directions
 * of 64 channels, and the same query operand serves every pair.
 *
 * A dead direction has codes 8, coefficients 0 and scale 0. Every byte of a record is written.
 * Invariant: offsets are even, so that scales are aligned.
 */
#ifndef LK_CPU_RECORD_H
#define LK_CPU_RECORD_H

#include <string.h>

#include "cpu.h"

#define LK_RECORD_ALIGN  8 /* of strides: a scan streams what it needs and little else */
#define LK_BASIS_BIAS    8
#define LK_CENTROID_BIAS 128

struct lk_record {
    uint32_t head_dim, tokens, directions;
    bool centroid;
};

static inline uint32_t lk_record_pairs(const struct lk_record *r) {
    return r->centroid ? r->head_dim : 0;
}
static inline uint32_t lk_record_coeffs(const struct lk_record *r) {
    return lk_record_pairs(r) + r->directions * r->head_dim / 2;
}
static inline uint32_t lk_record_scales(const struct lk_record *r) {
    return lk_record_coeffs(r) + r->directions * r->tokens;
}
static inline uint32_t lk_record_bytes(const struct lk_record *r) {
    return lk_record_scales(r) + 2 * (r->directions + r->centroid);
}

static inline struct lk_record lk_record_coarse(const struct lk_geometry *g) {
    return (struct lk_record){g->head_dim, g->page_tokens, LK_COARSE_RANK, true};
}
static inline struct lk_record lk_record_fine(const struct lk_geometry *g) {
    return (struct lk_record){g->head_dim, g->page_tokens, g->rank - LK_COARSE_RANK, false};
}
static inline struct lk_record lk_record_super(const struct lk_geometry *g) {
    return (struct lk_record){g->head_dim, LK_QUAD_PAGES * g->page_tokens, LK_COARSE_RANK, true};
}

/* Scale i of a record, the centroid's first where there is one. */
static inline float lk_record_scale(const uint8_t *scales, uint32_t i) {
    uint16_t h;
    uint32_t bits;
    float f;

    memcpy(&h, scales + 2 * i, 2);
    bits = (uint32_t)h << 16;
    memcpy(&f, &bits, 4);
    return f;
}

#endif
