/* SPDX-License-Identifier: MIT */
/*
 * keys.h - pages to measure with: cheap, deterministic, and as uneven as a model's.
 *
 * Idea: a table of normal numbers, read at two random offsets a token: one the page shares (keys of
 * neighbours are alike), one of its own. Pages differ in scale, log-normally: a few stand out, so
 * that shares are heavy-tailed and choosing is as hard as it is. Any number of threads, one page
 * each.
 */
#ifndef BENCH_KEYS_H
#define BENCH_KEYS_H

#include "../../kernels/kernels.h"

#define BENCH_TABLE 65536 /* numbers; and a key's worth behind, so that no offset runs over */

struct bench_keys {
    float normal[BENCH_TABLE + LK_HEAD_DIM_MAX];
};

void bench_keys_make(struct bench_keys *ret);
/* Keys and values of one page and KV head, bf16. */
void bench_keys_page(const struct bench_keys *keys, const struct lk_pool_view *pool, uint64_t page,
                     uint32_t head);
/* bf16 queries. */
void bench_keys_query(const struct bench_keys *keys, uint16_t *q, uint32_t count);

#endif
