/* SPDX-License-Identifier: MIT */
/*
 * pool.h - the pages of one geometry: which quads are free, and who gets the next.
 *
 * Idea: the unit is the quad, four aligned pages of all layers under one id. Sixteen quads are an
 * extent; a table that grows is given the quad after its last one as long as its extent has it, and
 * otherwise an extent that nobody has touched, so that a scan streams. Free quads are bits,
 * computed from the ledger's references, which alone are the truth.
 *
 * Promises: whoever is about to take quads one by one says how many first; `free - promised` is
 * what others may be promised. So a submission that starts can finish.
 *
 * Invariants: a quad's bit is set if and only if its references are 0 (lk_pool_check). A quad is
 * given up only by whom no batch in flight serves (sequence.h, lease.h: in_flight), so it may be
 * taken again at once.
 *
 * Thread: intake. What it does not do: no quotas (channel.h), no tables.
 */
#ifndef LK_POOL_H
#define LK_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../graphs/engine.h"
#include "ledger.h"

struct lk_pool {
    struct lk_pool_view view; /* memory, the engine's; first, so that it leads back here */
    const struct lk_pool_config *config;
    uint32_t index;
    int fd; /* of the memory, the engine's */
    uint64_t max_tokens, memory_bytes;
    uint64_t nested_above; /* tokens, where the scan is `auto` */
    struct lk_ledger_view ledger;
    uint64_t quads, free, promised;
    uint32_t sequences, leases; /* live */
    uint64_t leased_pages;
    /* Free quads: a mask of each extent, and of 64 extents which are whole, which have some. */
    uint32_t extents;
    uint16_t *extent;
    uint64_t *whole, *some;
    uint16_t last_mask; /* of the last extent, which may be short */
    /* Of leases: what marks and superpages will be once all that is launched is done. */
    uint8_t *marks, *supers;
    /* By page: the batch that last copied from it, to it (lease.c). */
    uint64_t *copied_from, *copied_to;
};

/* Opens on memory and ledger section. -> 0, -ENOMEM. */
int lk_pool_open(struct lk_pool *pool);
void lk_pool_close(struct lk_pool *pool);

/* The pool of a view that a batch names. */
static inline struct lk_pool *lk_pool_of(const struct lk_pool_view *view) {
    return (struct lk_pool *)(uintptr_t)view;
}
_Static_assert(offsetof(struct lk_pool, view) == 0, "a view leads back to its pool");

static inline uint64_t lk_pool_available(const struct lk_pool *pool) {
    return pool->free - pool->promised;
}
/* Takes a free quad (there is one: promised before), best the one after `last` (LK_LEDGER_NONE:
 * none), with one reference. */
uint32_t lk_pool_take(struct lk_pool *pool, uint32_t last);
void lk_pool_hold(struct lk_pool *pool, uint32_t quad);
/* Gives a reference back -> true: it was the last, the quad is free. */
bool lk_pool_drop(struct lk_pool *pool, uint32_t quad);

/* Tokens of a quad. */
static inline uint64_t lk_pool_quad_tokens(const struct lk_pool *pool) {
    return (uint64_t)pool->view.geometry.page_tokens * LK_QUAD_PAGES;
}
/* Marks by layer and page, superpages by layer and quad. */
static inline uint64_t lk_pool_page_at(const struct lk_pool *pool, uint32_t layer, uint64_t page) {
    return layer * pool->view.pages + page;
}
static inline uint64_t lk_pool_quad_at(const struct lk_pool *pool, uint32_t layer, uint64_t quad) {
    return layer * pool->quads + quad;
}

/* Free bits against references. -> 0, or -EINVAL with the finding in why. */
int lk_pool_check(const struct lk_pool *pool, char *why, size_t why_bytes);

#endif
