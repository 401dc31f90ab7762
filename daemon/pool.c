/* SPDX-License-Identifier: MIT */
/*
 * pool.c - free quads of a pool. See pool.h.
 */
#include "pool.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "assert.h"
#include "limits.h"

#define FULL_MASK UINT16_C(0xffff)
_Static_assert(LK_EXTENT_QUADS == 16, "an extent is a 16-bit mask");

static uint16_t whole_mask(const struct lk_pool *pool, uint32_t extent) {
    return extent + 1 == pool->extents ? pool->last_mask : FULL_MASK;
}

static void put_bit(uint64_t *words, uint32_t bit, bool set) {
    uint64_t one = UINT64_C(1) << bit % 64;
    words[bit / 64] = set ? words[bit / 64] | one : words[bit / 64] & ~one;
}

static void set_extent(struct lk_pool *pool, uint32_t extent, uint16_t mask) {
    pool->extent[extent] = mask;
    put_bit(pool->whole, extent, mask == whole_mask(pool, extent));
    put_bit(pool->some, extent, mask != 0);
}

int lk_pool_open(struct lk_pool *pool) {
    const struct lk_ledger_shape *shape = &pool->ledger.shape;
    pool->quads = shape->pages / LK_QUAD_PAGES;
    pool->extents = (uint32_t)((pool->quads + LK_EXTENT_QUADS - 1) / LK_EXTENT_QUADS);
    uint32_t words = (pool->extents + 63) / 64, rest = pool->quads % LK_EXTENT_QUADS;
    pool->last_mask = rest ? (uint16_t)((1U << rest) - 1) : FULL_MASK;
    pool->extent = calloc(pool->extents, sizeof(*pool->extent));
    pool->whole = calloc(words, sizeof(*pool->whole));
    pool->some = calloc(words, sizeof(*pool->some));
    pool->marks = calloc(shape->layers, shape->pages);
    pool->supers = calloc(shape->layers, pool->quads);
    pool->copied_from = calloc(shape->pages, sizeof(*pool->copied_from));
    pool->copied_to = calloc(shape->pages, sizeof(*pool->copied_to));
    if (!pool->extent || !pool->whole || !pool->some || !pool->marks || !pool->supers ||
        !pool->copied_from || !pool->copied_to) {
        lk_pool_close(pool);
        return -ENOMEM;
    }
    for (uint64_t quad = 0; quad < pool->quads; quad++)
        if (pool->ledger.quads[quad].references == 0) {
            pool->extent[quad / LK_EXTENT_QUADS] |= (uint16_t)(1U << quad % LK_EXTENT_QUADS);
            pool->free++;
        }
    for (uint32_t extent = 0; extent < pool->extents; extent++)
        set_extent(pool, extent, pool->extent[extent]);
    return 0;
}

void lk_pool_close(struct lk_pool *pool) {
    free(pool->extent);
    free(pool->whole);
    free(pool->some);
    free(pool->marks);
    free(pool->supers);
    free(pool->copied_from);
    free(pool->copied_to);
    pool->extent = NULL;
    pool->whole = pool->some = pool->copied_from = pool->copied_to = NULL;
    pool->marks = pool->supers = NULL;
}

/* First extent whose bit is set -> false: none. */
static bool first_set(const uint64_t *words, uint32_t extents, uint32_t *ret) {
    for (uint32_t i = 0; i < (extents + 63) / 64; i++)
        if (words[i]) {
            *ret = i * 64 + (uint32_t)__builtin_ctzll(words[i]);
            return true;
        }
    return false;
}

static bool is_free(const struct lk_pool *pool, uint64_t quad) {
    return quad < pool->quads && pool->extent[quad / LK_EXTENT_QUADS] >> quad % LK_EXTENT_QUADS & 1;
}

/* The next quad of the same extent, else of the next extent if nobody has touched that. */
static bool follows(const struct lk_pool *pool, uint32_t last, uint32_t *ret) {
    uint64_t next = (uint64_t)last + 1;
    if (last == LK_LEDGER_NONE || !is_free(pool, next))
        return false;
    uint32_t extent = (uint32_t)(next / LK_EXTENT_QUADS);
    if (next % LK_EXTENT_QUADS == 0 && pool->extent[extent] != whole_mask(pool, extent))
        return false;
    *ret = (uint32_t)next;
    return true;
}

static uint32_t choose(const struct lk_pool *pool, uint32_t last) {
    uint32_t quad, extent;
    if (follows(pool, last, &quad))
        return quad;
    bool found = first_set(pool->whole, pool->extents, &extent) ||
                 first_set(pool->some, pool->extents, &extent);
    LK_ASSERT(found);
    return extent * LK_EXTENT_QUADS + (uint32_t)__builtin_ctz(pool->extent[extent]);
}

uint32_t lk_pool_take(struct lk_pool *pool, uint32_t last) {
    LK_ASSERT(pool->free > 0);
    uint32_t quad = choose(pool, last), extent = quad / LK_EXTENT_QUADS;
    LK_ASSERT(pool->ledger.quads[quad].references == 0);
    set_extent(pool, extent, pool->extent[extent] & (uint16_t) ~(1U << quad % LK_EXTENT_QUADS));
    pool->ledger.quads[quad].references = 1;
    pool->free--;
    return quad;
}

void lk_pool_hold(struct lk_pool *pool, uint32_t quad) {
    LK_ASSERT(pool->ledger.quads[quad].references > 0);
    pool->ledger.quads[quad].references++;
}

bool lk_pool_drop(struct lk_pool *pool, uint32_t quad) {
    struct lk_ledger_quad *q = &pool->ledger.quads[quad];
    uint32_t extent = quad / LK_EXTENT_QUADS;
    LK_ASSERT(q->references > 0);
    if (q->references > 1) {
        q->references--;
        return false;
    }
    q->generation++;
    q->references = 0;
    set_extent(pool, extent, pool->extent[extent] | (uint16_t)(1U << quad % LK_EXTENT_QUADS));
    pool->free++;
    return true;
}

int lk_pool_check(const struct lk_pool *pool, char *why, size_t why_bytes) {
    uint64_t free = 0;
    for (uint64_t quad = 0; quad < pool->quads; quad++) {
        bool bit = is_free(pool, quad);
        free += bit;
        if (bit != (pool->ledger.quads[quad].references == 0)) {
            snprintf(why, why_bytes, "pool %u: quad %llu is %s and has %u references", pool->index,
                     (unsigned long long)quad, bit ? "free" : "taken",
                     pool->ledger.quads[quad].references);
            return -EINVAL;
        }
    }
    if (free != pool->free || pool->promised > pool->free) {
        snprintf(why, why_bytes, "pool %u: %llu quads are free, %llu counted, %llu promised",
                 pool->index, (unsigned long long)free, (unsigned long long)pool->free,
                 (unsigned long long)pool->promised);
        return -EINVAL;
    }
    return 0;
}
