/* SPDX-License-Identifier: MIT */
/*
 * keys.c - see keys.h.
 */
#include "keys.h"

#include <string.h>

static uint16_t bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return (uint16_t)(bits >> 16);
}

void bench_keys_make(struct bench_keys *ret) {
    for (uint32_t i = 0; i < BENCH_TABLE; i += 2) { /* Box and Muller */
        double u = ((double)(bench_mix(i) >> 11) + 1) * 0x1p-53,
               w = (double)(bench_mix(i + 1) >> 11) * 0x1p-53;
        double radius = sqrt(-2 * log(u));
        ret->normal[i] = (float)(radius * cos(2 * M_PI * w));
        ret->normal[i + 1] = (float)(radius * sin(2 * M_PI * w));
    }
    memcpy(ret->normal + BENCH_TABLE, ret->normal, LK_HEAD_DIM_MAX * sizeof(*ret->normal));
}

void bench_keys_token(const struct bench_keys *keys, const struct bench_page *page, uint32_t i,
                      uint32_t head_dim, bool key, uint16_t *ret) {
    const float *own = bench_own(keys->normal, page, i);
    for (uint32_t c = 0; c < head_dim; c++)
        ret[c] = bf16(key ? bench_key(page, own, c) : own[c]);
}

void bench_keys_page(const struct bench_keys *keys, const struct lk_pool_view *pool, uint64_t page,
                     uint32_t head) {
    uint32_t d = pool->geometry.head_dim, b = pool->geometry.page_tokens;
    struct bench_page made = bench_page_of(keys->normal, page * pool->geometry.kv_heads + head);
    for (uint32_t i = 0; i < 2 * b; i++)
        bench_keys_token(keys, &made, i, d, i < b,
                         (uint16_t *)lk_page_keys(pool, 0, page, head) + (uint64_t)i * d);
}

void bench_keys_query(const struct bench_keys *keys, uint16_t *q, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        q[i] = bf16(bench_query(keys->normal, i));
}
