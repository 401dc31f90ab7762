/* SPDX-License-Identifier: MIT */
/*
 * sequence.c - tables and lengths of sequences. See sequence.h; the order of stores is ledger.h's.
 */
#include "sequence.h"

#include <string.h>

#include "assert.h"

static uint64_t quotient_up(uint64_t a, uint64_t b) {
    return (a + b - 1) / b;
}

static uint32_t layers_of(const struct lk_sequence *s) {
    return s->pool->view.geometry.layers;
}

/* The compiler may not move ledger stores across. */
static void order(void) {
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

/* ---- life ---- */

static void take_slot(struct lk_sequence *s, struct lk_channel *channel) {
    s->channel = channel;
    s->slot->channel = channel->open.id;
    s->slot->uid = channel->open.uid;
    s->slot->quads = 0;
    s->next = channel->sequences;
    s->link = &channel->sequences;
    if (s->next)
        s->next->link = &s->next;
    channel->sequences = s;
    channel->sequence_count++;
    s->pool->sequences++;
    s->in_flight = 0;
    s->check_serial = 0;
}

static void set_lengths(struct lk_sequence *s, const uint64_t *lengths) {
    for (uint32_t l = 0; l < layers_of(s); l++) {
        s->lengths[l] = lengths ? lengths[l] : 0;
        s->layer[l] = (struct lk_sequence_layer){.planned = s->lengths[l]};
    }
}

void lk_sequence_create(struct lk_sequence *s, struct lk_channel *channel) {
    take_slot(s, channel);
    set_lengths(s, NULL);
    lk_ledger_set_live(&s->slot->state);
}

void lk_sequence_fork(struct lk_sequence *s, const struct lk_sequence *parent) {
    LK_ASSERT(parent->in_flight == 0);
    take_slot(s, parent->channel);
    for (uint32_t i = 0; i < parent->slot->quads; i++) {
        lk_pool_hold(s->pool, parent->table[i]);
        s->table[i] = parent->table[i];
    }
    set_lengths(s, parent->lengths);
    s->slot->quads = parent->slot->quads;
    lk_ledger_set_live(&s->slot->state);
}

static void drop_quads(struct lk_sequence *s, uint32_t from, uint32_t to) {
    for (uint32_t i = from; i < to; i++)
        if (lk_pool_drop(s->pool, s->table[i]))
            lk_channel_charge(s->channel, s->pool, -1);
}

void lk_sequence_truncate(struct lk_sequence *s, uint64_t length) {
    LK_ASSERT(s->in_flight == 0);
    for (uint32_t l = 0; l < layers_of(s); l++)
        if (s->lengths[l] > length)
            s->lengths[l] = s->layer[l].planned = length;
    uint32_t had = s->slot->quads;
    uint32_t keep = (uint32_t)quotient_up(lk_sequence_longest(s), lk_pool_quad_tokens(s->pool));
    order();
    s->slot->quads = keep;
    order();
    drop_quads(s, keep, had);
}

void lk_sequence_free(struct lk_sequence *s) {
    LK_ASSERT(s->in_flight == 0);
    lk_ledger_set_free(&s->slot->state);
    order();
    drop_quads(s, 0, s->slot->quads);
    *s->link = s->next;
    if (s->next)
        s->next->link = s->link;
    s->channel->sequence_count--;
    s->pool->sequences--;
    s->channel = NULL;
}

uint64_t lk_sequence_longest(const struct lk_sequence *s) {
    uint64_t longest = 0;
    for (uint32_t l = 0; l < layers_of(s); l++)
        longest = s->layer[l].planned > longest ? s->layer[l].planned : longest;
    return longest;
}

/* ---- append ---- */

uint32_t lk_sequence_shared(const struct lk_sequence *s, uint64_t first, uint64_t stop,
                            uint64_t *ret_first) {
    uint32_t count = 0;
    for (uint64_t i = first; i < stop && i < s->slot->quads; i++)
        if (s->pool->ledger.quads[s->table[i]].references > 1) {
            *ret_first = count ? *ret_first : i;
            count++;
        }
    return count;
}

/* Copies are counted once for each entry between the first and the last that any row touches: never
 * too few. */
uint64_t lk_sequence_need(struct lk_sequence *s, uint64_t serial, uint64_t position, uint64_t end) {
    uint64_t tokens = lk_pool_quad_tokens(s->pool), unused;
    uint64_t first = position / tokens, stop = quotient_up(end, tokens), need = 0;
    if (s->check_serial != serial) {
        s->check_serial = serial;
        s->check_quads = s->slot->quads;
        s->copy_first = s->copy_end = first;
    }
    if (first < s->copy_first) {
        need += lk_sequence_shared(s, first, s->copy_first, &unused);
        s->copy_first = first;
    }
    if (stop > s->copy_end) {
        need += lk_sequence_shared(s, s->copy_end, stop, &unused);
        s->copy_end = stop;
    }
    if (stop > s->check_quads) {
        need += stop - s->check_quads;
        s->check_quads = stop;
    }
    return need;
}

/* The layer's pages in entry `at`, and their marks, which the new quad gets with them. */
static uint32_t copy_layer(struct lk_sequence *s, uint32_t layer, uint64_t at, uint32_t from,
                           uint32_t to, struct lk_copy *copies) {
    struct lk_pool *pool = s->pool;
    uint32_t page_tokens = pool->view.geometry.page_tokens;
    uint64_t first = at * lk_pool_quad_tokens(pool), length = s->layer[layer].planned;
    uint64_t tokens = length > first ? length - first : 0;
    uint64_t pages = quotient_up(tokens, page_tokens);
    pages = pages < LK_QUAD_PAGES ? pages : LK_QUAD_PAGES;
    uint32_t super = tokens >= lk_pool_quad_tokens(pool);
    for (uint32_t i = 0; i < LK_QUAD_PAGES; i++) {
        uint64_t page = (uint64_t)to * LK_QUAD_PAGES + i;
        pool->ledger.marks[lk_pool_page_at(pool, layer, page)] =
            tokens / page_tokens > i ? (uint8_t)page_tokens : 0;
        if (i < pages)
            copies[i] = (struct lk_copy){.pool = &pool->view,
                                         .layer = layer,
                                         .quad = super && i == 0,
                                         .from = (uint64_t)from * LK_QUAD_PAGES + i,
                                         .to = page};
    }
    pool->ledger.supers[lk_pool_quad_at(pool, layer, to)] = (uint8_t)super;
    return (uint32_t)pages;
}

uint32_t lk_sequence_copy(struct lk_sequence *s, uint64_t at, struct lk_copy *copies,
                          uint32_t *ret_quad) {
    LK_ASSERT(at < s->slot->quads);
    struct lk_pool *pool = s->pool;
    uint32_t from = s->table[at], count = 0;
    uint32_t to = lk_pool_take(pool, at ? s->table[at - 1] : LK_LEDGER_NONE);
    struct lk_ledger_quad *note = &pool->ledger.quads[to];
    for (uint32_t l = 0; l < layers_of(s); l++)
        count += copy_layer(s, l, at, from, to, copies + count);
    note->copy_sequence = s->index;
    note->copy_index = (uint32_t)at;
    order();
    note->copy_from = from;
    order();
    s->table[at] = to;
    *ret_quad = to;
    return count;
}

bool lk_sequence_copied(struct lk_pool *pool, uint32_t quad) {
    struct lk_ledger_quad *note = &pool->ledger.quads[quad];
    uint32_t from = note->copy_from;
    LK_ASSERT(from != LK_LEDGER_NONE);
    note->copy_from = LK_LEDGER_NONE;
    order();
    return lk_pool_drop(pool, from);
}

uint32_t lk_sequence_grow(struct lk_sequence *s, uint64_t end) {
    uint32_t had = s->slot->quads;
    uint32_t need = (uint32_t)quotient_up(end, lk_pool_quad_tokens(s->pool));
    LK_ASSERT(need <= s->pool->ledger.shape.table_quads);
    if (need <= had)
        return 0;
    for (uint32_t i = had; i < need; i++)
        s->table[i] = lk_pool_take(s->pool, i ? s->table[i - 1] : LK_LEDGER_NONE);
    order();
    s->slot->quads = need;
    return need - had;
}

static uint64_t physical(const struct lk_sequence *s, uint64_t page) {
    return (uint64_t)s->table[page / LK_QUAD_PAGES] * LK_QUAD_PAGES + page % LK_QUAD_PAGES;
}

void lk_sequence_append(struct lk_sequence *s, uint32_t layer, uint64_t end) {
    struct lk_pool *pool = s->pool;
    uint32_t page_tokens = pool->view.geometry.page_tokens;
    for (uint64_t j = s->layer[layer].planned / page_tokens; j * page_tokens < end; j++) {
        uint64_t page = physical(s, j);
        pool->ledger.marks[lk_pool_page_at(pool, layer, page)] = 0;
        pool->ledger.supers[lk_pool_quad_at(pool, layer, page / LK_QUAD_PAGES)] = 0;
    }
    s->layer[layer].planned = end;
}

uint32_t lk_sequence_builds(const struct lk_sequence *s, uint32_t layer, uint64_t position,
                            uint64_t end, struct lk_build *builds) {
    uint32_t page_tokens = s->pool->view.geometry.page_tokens, count = 0;
    for (uint64_t j = position / page_tokens; j < end / page_tokens; j++)
        builds[count++] = (struct lk_build){.pool = &s->pool->view,
                                            .layer = layer,
                                            .quad = j % LK_QUAD_PAGES == LK_QUAD_PAGES - 1,
                                            .page = physical(s, j)};
    return count;
}

void lk_sequence_built(const struct lk_build *build) {
    struct lk_pool *pool = lk_pool_of(build->pool);
    pool->ledger.marks[lk_pool_page_at(pool, build->layer, build->page)] =
        (uint8_t)pool->view.geometry.page_tokens;
    if (build->quad)
        pool->ledger.supers[lk_pool_quad_at(pool, build->layer, build->page / LK_QUAD_PAGES)] = 1;
}
