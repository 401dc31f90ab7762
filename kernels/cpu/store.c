/* SPDX-License-Identifier: MIT */
/*
 * store.c - puts keys and values where pages say they belong, and copies pages.
 *
 * Idea: a page holds one KV head's keys, then its values, token by token; a task is one KV head, so
 * that tasks write disjoint bytes. Rows append by position, writes go by slot, copies take whatever
 * a page has, its summaries included.
 * Invariants: client memory is read once and only as payload; slots are the daemon's own copy and
 * already checked; 64-bit offsets throughout.
 * Any thread. Does not decide who may write where, and does not summarise.
 */
#include <string.h>

#include "cpu.h"

struct tokens { /* where the client's rows of one head lie */
    const uint8_t *k, *v;
    size_t step, bytes; /* between tokens; of one token and head */
};

static struct tokens tokens_of(const struct lk_pool_view *pool, uint32_t head, const void *k,
                               const void *v) {
    size_t bytes = (size_t)pool->geometry.head_dim * pool->layout.element_bytes;
    return (struct tokens){.k = (const uint8_t *)k + head * bytes,
                           .v = (const uint8_t *)v + head * bytes,
                           .step = pool->geometry.kv_heads * bytes,
                           .bytes = bytes};
}

static void put(const struct lk_pool_view *pool, uint32_t layer, uint64_t page, uint32_t head,
                uint64_t offset, const struct tokens *from, uint64_t token) {
    memcpy(lk_page_keys(pool, layer, page, head) + offset * from->bytes,
           from->k + token * from->step, from->bytes);
    memcpy(lk_page_values(pool, layer, page, head) + offset * from->bytes,
           from->v + token * from->step, from->bytes);
}

void lk_cpu_append(const struct lk_row *row, uint32_t head) {
    const struct lk_pool_view *pool = row->pool;
    uint32_t page_tokens = pool->geometry.page_tokens;
    struct tokens from = tokens_of(pool, head, row->k, row->v);
    uint64_t first = row->length - row->append;

    for (uint64_t i = 0; i < row->append; i++) {
        uint64_t at = first + i;
        put(pool, row->layer, lk_row_page(row, at / page_tokens), head, at % page_tokens, &from, i);
    }
}

void lk_cpu_write(const struct lk_write *write, uint32_t head) {
    const struct lk_pool_view *pool = write->pool;
    uint32_t page_tokens = pool->geometry.page_tokens;
    struct tokens from = tokens_of(pool, head, write->k, write->v);

    for (uint64_t i = 0; i < write->tokens; i++) {
        uint64_t slot = write->slots[i];
        if (slot != UINT64_MAX)
            put(pool, write->layer, slot / page_tokens, head, slot % page_tokens, &from, i);
    }
}

void lk_cpu_copy(const struct lk_copy *copy, uint32_t head) {
    const struct lk_pool_view *pool = copy->pool;
    const struct lk_layout *layout = &pool->layout;
    uint32_t layer = copy->layer;

    memcpy(lk_page_keys(pool, layer, copy->to, head), lk_page_keys(pool, layer, copy->from, head),
           layout->head_bytes);
    memcpy(lk_page_coarse(pool, layer, copy->to, head),
           lk_page_coarse(pool, layer, copy->from, head), layout->coarse_stride);
    memcpy(lk_page_fine(pool, layer, copy->to, head), lk_page_fine(pool, layer, copy->from, head),
           layout->fine_stride);
    if (copy->quad)
        memcpy(lk_quad_super(pool, layer, copy->to / LK_QUAD_PAGES, head),
               lk_quad_super(pool, layer, copy->from / LK_QUAD_PAGES, head), layout->super_stride);
}
