/* SPDX-License-Identifier: MIT */
/*
 * keys.h - pages to measure with: cheap, deterministic, and as uneven as a model's.
 *
 * Idea: a table of normal numbers, read at two random offsets a token: one the page shares (keys of
 * neighbours are alike), one of its own. Pages differ in scale, log-normally: a few stand out, so
 * that shares are heavy-tailed and choosing is as hard as it is. Any number of threads, one page
 * each. The formulas are here, inline, for host and device alike.
 */
#ifndef BENCH_KEYS_H
#define BENCH_KEYS_H

#include <math.h>

#include "../../kernels/kernels.h"

#define BENCH_TABLE   65536 /* numbers; and a key's worth behind, so that no offset runs over */
#define BENCH_NORMALS (BENCH_TABLE + LK_HEAD_DIM_MAX)
#define BENCH_OWN     0.6F /* of a token's own part, beside the page's */
#define BENCH_SPREAD  0.5F /* of the logarithm of pages' scales */
#define BENCH_QUERY   1.5F

#ifdef __CUDACC__
#define BENCH_INLINE static __host__ __device__ inline
#else
#define BENCH_INLINE static inline
#endif

struct bench_keys {
    float normal[BENCH_NORMALS];
};

struct bench_page { /* one page's keys and values of one KV head */
    uint64_t seed;
    const float *shared; /* [head_dim] */
    float scale;
};

BENCH_INLINE uint64_t bench_mix(uint64_t x) { /* splitmix64 */
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

/* normal: [BENCH_NORMALS]. number: of the page and head among all. */
BENCH_INLINE struct bench_page bench_page_of(const float *normal, uint64_t number) {
    struct bench_page page;
    page.seed = bench_mix(number);
    page.shared = normal + page.seed % BENCH_TABLE;
    page.scale = expf(BENCH_SPREAD * normal[(page.seed >> 20) % BENCH_TABLE]);
    return page;
}

/* A token's own numbers, [head_dim]: i counts keys, then values. */
BENCH_INLINE const float *bench_own(const float *normal, const struct bench_page *page,
                                    uint32_t i) {
    return normal + bench_mix(page->seed + i) % BENCH_TABLE;
}

BENCH_INLINE float bench_key(const struct bench_page *page, const float *own, uint32_t c) {
    return page->scale * (page->shared[c] + BENCH_OWN * own[c]);
}

BENCH_INLINE float bench_query(const float *normal, uint64_t i) {
    return BENCH_QUERY * normal[bench_mix(i) % BENCH_TABLE];
}

void bench_keys_make(struct bench_keys *ret);
/* Keys and values of one page and KV head, bf16. */
void bench_keys_page(const struct bench_keys *keys, const struct lk_pool_view *pool, uint64_t page,
                     uint32_t head);
/* One token of a page, [head_dim]: its key (i below page_tokens), or its value (above). */
void bench_keys_token(const struct bench_keys *keys, const struct bench_page *page, uint32_t i,
                      uint32_t head_dim, bool key, uint16_t *ret);
/* bf16 queries. */
void bench_keys_query(const struct bench_keys *keys, uint16_t *q, uint32_t count);

#endif
