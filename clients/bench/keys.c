/* SPDX-License-Identifier: MIT */
/*
 * keys.c - see keys.h.
 */
#include "keys.h"

#include <math.h>
#include <string.h>

#define OWN    0.6F /* of a token's own part, beside the page's */
#define SPREAD 0.5F /* of the logarithm of pages' scales */
#define QUERY  1.5F

static uint64_t mix(uint64_t x) { /* splitmix64 */
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static uint16_t bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return (uint16_t)(bits >> 16);
}

void bench_keys_make(struct bench_keys *ret) {
    for (uint32_t i = 0; i < BENCH_TABLE; i += 2) { /* Box and Muller */
        double u = ((double)(mix(i) >> 11) + 1) * 0x1p-53, w = (double)(mix(i + 1) >> 11) * 0x1p-53;
        double radius = sqrt(-2 * log(u));
        ret->normal[i] = (float)(radius * cos(2 * M_PI * w));
        ret->normal[i + 1] = (float)(radius * sin(2 * M_PI * w));
    }
    memcpy(ret->normal + BENCH_TABLE, ret->normal, LK_HEAD_DIM_MAX * sizeof(*ret->normal));
}

void bench_keys_page(const struct bench_keys *keys, const struct lk_pool_view *pool, uint64_t page,
                     uint32_t head) {
    uint32_t d = pool->geometry.head_dim, b = pool->geometry.page_tokens;
    uint64_t seed = mix(page * pool->geometry.kv_heads + head);
    const float *shared = keys->normal + seed % BENCH_TABLE;
    float scale = expf(SPREAD * keys->normal[(seed >> 20) % BENCH_TABLE]);
    for (uint32_t i = 0; i < 2 * b; i++) { /* keys, then values */
        uint16_t *row = (uint16_t *)lk_page_keys(pool, 0, page, head) + (uint64_t)i * d;
        const float *own = keys->normal + mix(seed + i) % BENCH_TABLE;
        for (uint32_t c = 0; c < d; c++)
            row[c] = bf16(i < b ? scale * (shared[c] + OWN * own[c]) : own[c]);
    }
}

void bench_keys_query(const struct bench_keys *keys, uint16_t *q, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        q[i] = bf16(QUERY * keys->normal[mix(i) % BENCH_TABLE]);
}
