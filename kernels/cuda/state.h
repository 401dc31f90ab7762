/* SPDX-License-Identifier: MIT */
/*
 * state.h - what stages leave in a row's workspace for later ones; shared by plan.c and the
 * kernels.
 *
 *   scores     f32 [kv_head][page][group stride]  log2 of a page's estimated mass, by query head.
 *              The lowest bit of head 0's says that the page competes for being kept (scored last,
 *              at the rank of the scan's last pass)
 *   parts      {max, sum} [kv_head][slot][group stride]  of 2^score: slot 0 the newest page, then
 *              chunks of the first pass, listed tiles and the other pages of the second
 *   shares     u32 [kv_head][page]     bits of the share; bit 31: kept
 *   spill      bytes [kv_head][lk_cuda_spill_bytes()]  of select, where its blocks' shared memory
 *              is too small for the row
 *   counts     lk_cuda_head [kv_head]
 *   rescan     u32 [kv_head][list]     pages of the second pass
 *   picks      lk_cuda_pick [kv_head][budget], ascending by page
 *   partials   per task of attend: f32 [query][d], then lk_cuda_stat [query]
 */
#ifndef LK_CUDA_STATE_H
#define LK_CUDA_STATE_H

#include <stdint.h>

#include "record.h"

#define LK_CUDA_NO_PAGE 0x7fffffff

struct lk_cuda_pick {
    uint32_t page, physical; /* LK_CUDA_NO_PAGE: none, after the last */
    float bias;              /* log2 of the weight */
    uint32_t kept;           /* 0: sampled */
};

struct lk_cuda_head { /* a multiple of 16 bytes */
    uint32_t kept, sampled, listed, reserved;
    float
        rest[32]; /* log2 mass of the pages not kept, from scores; used where nothing is sampled */
};

struct lk_cuda_stat {
    float peak, mass, kept; /* log2 maximum; sums of 2^(logit - peak), of all and of kept pages */
    float reserved;
};

#define LK_CUDA_SPAN_PAGES 8192 /* pages that a block of select holds in shared memory */
#define LK_CUDA_SPAN_HITS  2048 /* and pages of the sample */

/* A warp of select reads the words of so many pages at once. Where spans lie in the workspace, one
 * behind the other, each is a multiple of it. */
#define LK_CUDA_WARP_PAGES 128
static inline LK_BOTH uint32_t lk_cuda_spill_pages(uint32_t pages) {
    return (pages + LK_CUDA_WARP_PAGES - 1) / LK_CUDA_WARP_PAGES * LK_CUDA_WARP_PAGES;
}
/* What select keeps of so many pages of a head, of lk_cuda_spill_pages(), while it runs. */
static inline LK_BOTH uint64_t lk_cuda_spill_bytes(uint64_t pages, uint64_t sampled) {
    return (pages * 4 + pages / 32 * 20 + sampled * 8 + 15) / 16 * 16;
}

/* x / by, by a multiplication: a device has no instruction that divides. */
static inline LK_BOTH uint32_t lk_cuda_inverse(uint32_t by) {
    return by ? UINT32_MAX / by : 0;
}
static inline LK_BOTH uint32_t lk_cuda_divide(uint32_t x, uint32_t by, uint32_t inverse) {
    const uint32_t q = (uint32_t)((uint64_t)x * inverse >> 32); /* or one less */
    return q + (x - q * by >= by);
}

/* Query heads of a row of scores: whole vectors of 4, then of 8. */
static inline uint32_t lk_cuda_group_stride(uint32_t group) {
    return group <= 4 ? 4 : (group + 7) / 8 * 8;
}

#endif
