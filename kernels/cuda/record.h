/* SPDX-License-Identifier: MIT */
/*
 * record.h - the inside of a summary record on the device, shared by build, scan and tests.
 *
 * Idea: bytes lie in the order in which lanes of a tensor-core fragment want them, so that a scan
 * copies a record to shared memory as it is and every lane finds its operands with one wide load.
 * A record has `directions` directions of d channels over T tokens:
 *
 *     basis     4 bits  [directions][d / 2 bytes]  value + 8; place: lk_basis_place()
 *     centroid  s8      [d]                        coarse and super records; lk_centroid_place()
 *     coeffs    u8      [directions / 2][2 T]      value + 128; lk_coeff_place()
 *     scales    bf16    [centroid?][directions]    the centroid's first where there is one
 *
 * Coarse: directions 0, 1 over B tokens. Fine: the others. Super: 0, 1 over 4 B tokens. A dead
 * direction has basis 8, coefficients 128 and scale 0. Every byte is written, padding with 0.
 */
#ifndef LK_CUDA_RECORD_H
#define LK_CUDA_RECORD_H

#include "../kernels.h"

#ifdef __CUDACC__
#define LK_BOTH __host__ __device__
#else
#define LK_BOTH
#endif

struct lk_record {
    uint32_t basis, centroid, coeffs, scales, bytes, stride; /* offsets; centroid 0: none */
    uint32_t head_dim, tokens, directions;
};

static inline LK_BOTH struct lk_record lk_record_make(uint32_t d, uint32_t tokens,
                                                      uint32_t directions, bool centroid) {
    struct lk_record r;

    r.basis = 0;
    r.centroid = centroid ? directions * d / 2 : 0;
    r.coeffs = directions * d / 2 + (centroid ? d : 0);
    r.scales = r.coeffs + directions * tokens;
    r.bytes = r.scales + 2 * (directions + (centroid ? 1 : 0));
    r.stride = directions ? (r.bytes + 15) / 16 * 16 : 0;
    r.head_dim = d;
    r.tokens = tokens;
    r.directions = directions;
    return r;
}
static inline LK_BOTH struct lk_record lk_record_coarse(const struct lk_geometry *g) {
    return lk_record_make(g->head_dim, g->page_tokens, LK_COARSE_RANK, true);
}
static inline LK_BOTH struct lk_record lk_record_fine(const struct lk_geometry *g) {
    return lk_record_make(g->head_dim, g->page_tokens, g->rank - LK_COARSE_RANK, false);
}
static inline LK_BOTH struct lk_record lk_record_super(const struct lk_geometry *g) {
    return lk_record_make(g->head_dim, LK_QUAD_PAGES * g->page_tokens, LK_COARSE_RANK, true);
}

/* Half-byte of channel c within a direction: byte = place / 2, high half if odd. */
static inline LK_BOTH uint32_t lk_basis_place(uint32_t d, uint32_t c) {
    uint32_t t = c / 32, high = c % 32 / 16, quad = c % 16 / 4, i = c % 4;

    return d % 32 ? c : 2 * (quad * (d / 8) + 4 * t + i) + high;
}
/* The channels of byte y: low half, high half. */
static inline LK_BOTH uint32_t lk_basis_channel(uint32_t d, uint32_t y, uint32_t high) {
    uint32_t quad = y / (d / 8), in = y % (d / 8);

    return d % 32 ? 2 * y + high : in / 4 * 32 + 16 * high + 4 * quad + in % 4;
}
static inline LK_BOTH uint32_t lk_centroid_place(uint32_t d, uint32_t c) {
    uint32_t t = c / 32, half = c % 32 / 16, quad = c % 16 / 4, i = c % 4;

    return d % 32 ? c : quad * (d / 4) + 8 * t + 4 * half + i;
}
/* Byte of (direction, token) within the coefficients. */
static inline LK_BOTH uint32_t lk_coeff_place(uint32_t tokens, uint32_t direction, uint32_t t) {
    uint32_t in = tokens < 16 ? 2 * t : t / 16 * 32 + t % 8 * 4 + t % 16 / 8 * 2;

    return direction / 2 * 2 * tokens + in + direction % 2;
}

#endif
