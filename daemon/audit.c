/* SPDX-License-Identifier: MIT */
/*
 * audit.c - lk_ledger_check(): does the ledger agree with itself? See ledger.h.
 *
 * It counts what tables and notes of copies name and compares with what quads say. Tests call it
 * after every step; it allocates its counts.
 */
#include "ledger.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

struct audit {
    struct lk_ledger_view view;
    uint32_t pool;
    bool idle;
    uint32_t *named; /* [quads] by tables and notes */
    uint8_t *leased; /* [quads] */
    uint32_t *last;  /* [quads] the sequence that named it last, + 1 */
    char *why;
    size_t why_bytes;
};

__attribute__((format(printf, 2, 3))) static bool wrong(const struct audit *a, const char *format,
                                                        ...) {
    int at = snprintf(a->why, a->why_bytes, "ledger, pool %u: ", a->pool);
    if (at > 0 && (size_t)at < a->why_bytes) {
        va_list list;
        va_start(list, format);
        vsnprintf(a->why + at, a->why_bytes - (size_t)at, format, list);
        va_end(list);
    }
    return false;
}

static uint8_t mark_of(const struct audit *a, uint32_t layer, uint64_t page) {
    return a->view.marks[layer * a->view.shape.pages + page];
}
static uint8_t super_of(const struct audit *a, uint32_t layer, uint64_t quad) {
    return a->view.supers[layer * a->view.quad_count + quad];
}

/* ---- sequences ---- */

static bool table_right(struct audit *a, uint32_t index) {
    const uint32_t *table = a->view.tables + (uint64_t)index * a->view.shape.table_quads;
    uint32_t quads = a->view.sequences[index].quads;
    if (quads > a->view.shape.table_quads)
        return wrong(a, "sequence %u has %u quads, its table %u", index, quads,
                     a->view.shape.table_quads);
    for (uint32_t i = 0; i < quads; i++) {
        if (table[i] >= a->view.quad_count)
            return wrong(a, "sequence %u names quad %u of %llu", index, table[i],
                         (unsigned long long)a->view.quad_count);
        if (a->last[table[i]] == index + 1)
            return wrong(a, "sequence %u names quad %u twice", index, table[i]);
        a->last[table[i]] = index + 1;
        a->named[table[i]]++;
    }
    return true;
}

static bool summaries_right(const struct audit *a, uint32_t index, uint32_t layer,
                            uint64_t length) {
    const uint32_t *table = a->view.tables + (uint64_t)index * a->view.shape.table_quads;
    uint64_t complete = length / a->view.shape.page_tokens;
    for (uint64_t j = 0; j < complete; j++) {
        uint64_t quad = table[j / LK_QUAD_PAGES], page = quad * LK_QUAD_PAGES + j % LK_QUAD_PAGES;
        if (mark_of(a, layer, page) != a->view.shape.page_tokens)
            return wrong(a, "sequence %u, layer %u: complete page %llu is not summarised", index,
                         layer, (unsigned long long)j);
        if (j % LK_QUAD_PAGES == LK_QUAD_PAGES - 1 && !super_of(a, layer, quad))
            return wrong(a, "sequence %u, layer %u: complete superpage %llu is not summarised",
                         index, layer, (unsigned long long)(j / LK_QUAD_PAGES));
    }
    return true;
}

static bool sequence_right(struct audit *a, uint32_t index) {
    const struct lk_ledger_shape *shape = &a->view.shape;
    const struct lk_ledger_sequence *slot = &a->view.sequences[index];
    uint64_t quad_tokens = (uint64_t)shape->page_tokens * LK_QUAD_PAGES, longest = 0;
    if (!lk_ledger_live(slot->state))
        return true;
    if (!table_right(a, index))
        return false;
    for (uint32_t l = 0; l < shape->layers; l++) {
        uint64_t length = a->view.lengths[(uint64_t)index * shape->layers + l];
        if (length > slot->quads * quad_tokens)
            return wrong(a, "sequence %u, layer %u: %llu tokens in %u quads", index, l,
                         (unsigned long long)length, slot->quads);
        longest = length > longest ? length : longest;
        if (a->idle && !summaries_right(a, index, l, length))
            return false;
    }
    if (a->idle && slot->quads != (longest + quad_tokens - 1) / quad_tokens)
        return wrong(a, "sequence %u holds %u quads for %llu tokens", index, slot->quads,
                     (unsigned long long)longest);
    return true;
}

/* ---- leases ---- */

static bool leased_quad_right(const struct audit *a, uint32_t index, uint32_t quad) {
    for (uint32_t l = 0; l < a->view.shape.layers; l++) {
        uint32_t full = 0;
        for (uint32_t i = 0; i < LK_QUAD_PAGES; i++) {
            uint8_t mark = mark_of(a, l, (uint64_t)quad * LK_QUAD_PAGES + i);
            if (mark > a->view.shape.page_tokens)
                return wrong(a, "lease %u, layer %u: a page is marked %u", index, l, mark);
            full += mark == a->view.shape.page_tokens;
        }
        if (super_of(a, l, quad) && full != LK_QUAD_PAGES)
            return wrong(a, "lease %u, layer %u: quad %u is summarised with %u full pages", index,
                         l, quad, full);
    }
    return true;
}

static bool lease_right(struct audit *a, uint32_t index) {
    const struct lk_ledger_lease *slot = &a->view.leases[index];
    const uint32_t *table = a->view.lease_tables + index * a->view.quad_count;
    if (!lk_ledger_live(slot->state))
        return true;
    if (slot->quads > a->view.quad_count ||
        slot->quads != (slot->pages + LK_QUAD_PAGES - 1) / LK_QUAD_PAGES)
        return wrong(a, "lease %u has %llu pages in %u quads", index,
                     (unsigned long long)slot->pages, slot->quads);
    for (uint32_t i = 0; i < slot->quads; i++) {
        if (table[i] >= a->view.quad_count)
            return wrong(a, "lease %u names quad %u", index, table[i]);
        if (a->leased[table[i]])
            return wrong(a, "quad %u is leased twice", table[i]);
        a->leased[table[i]] = 1;
        a->named[table[i]]++;
        if (!leased_quad_right(a, index, table[i]))
            return false;
    }
    return true;
}

/* ---- quads ---- */

static uint32_t named_at(const struct audit *a, uint32_t index, uint32_t entry) {
    const struct lk_ledger_sequence *slot = &a->view.sequences[index];
    bool there = lk_ledger_live(slot->state) && entry < slot->quads;
    return there ? a->view.tables[(uint64_t)index * a->view.shape.table_quads + entry]
                 : LK_LEDGER_NONE;
}

static bool note_right(struct audit *a, uint32_t quad) {
    const struct lk_ledger_quad *q = &a->view.quads[quad];
    if (q->copy_from == LK_LEDGER_NONE)
        return true;
    if (a->idle)
        return wrong(a, "quad %u still waits for its copy of %u", quad, q->copy_from);
    if (q->copy_from >= a->view.quad_count || q->copy_sequence >= a->view.shape.max_sequences ||
        q->copy_index >= a->view.shape.table_quads)
        return wrong(a, "quad %u has a note of quad %u, sequence %u, entry %u", quad, q->copy_from,
                     q->copy_sequence, q->copy_index);
    if (named_at(a, q->copy_sequence, q->copy_index) != quad)
        return wrong(a, "quad %u is to be entry %u of sequence %u, which does not name it", quad,
                     q->copy_index, q->copy_sequence);
    a->named[q->copy_from]++;
    return true;
}

static bool quad_right(const struct audit *a, uint32_t quad) {
    uint32_t references = a->view.quads[quad].references;
    if (references != a->named[quad])
        return wrong(a, "quad %u counts %u references, there are %u", quad, references,
                     a->named[quad]);
    if (a->leased[quad] && references != 1)
        return wrong(a, "quad %u is leased and has %u references", quad, references);
    return true;
}

static bool pool_right(struct audit *a) {
    for (uint32_t i = 0; i < a->view.shape.max_sequences; i++)
        if (!sequence_right(a, i))
            return false;
    for (uint32_t i = 0; i < a->view.shape.max_leases; i++)
        if (!lease_right(a, i))
            return false;
    for (uint32_t i = 0; i < a->view.quad_count; i++)
        if (!note_right(a, i))
            return false;
    for (uint32_t i = 0; i < a->view.quad_count; i++)
        if (!quad_right(a, i))
            return false;
    return true;
}

static int check_pool(struct audit *a) {
    int rc = -ENOMEM;
    a->named = calloc(a->view.quad_count, sizeof(*a->named));
    a->last = calloc(a->view.quad_count, sizeof(*a->last));
    a->leased = calloc(a->view.quad_count, sizeof(*a->leased));
    if (a->named && a->last && a->leased)
        rc = pool_right(a) ? 0 : -EINVAL;
    free(a->named);
    free(a->last);
    free(a->leased);
    return rc;
}

int lk_ledger_check(const struct lk_ledger *ledger, bool idle, char *why, size_t why_bytes) {
    const struct lk_ledger_head *head = ledger->head;
    int rc = 0;
    if (head->magic != LK_LEDGER_MAGIC || head->version != LK_LEDGER_VERSION ||
        head->pools > LK_POOLS_MAX) {
        snprintf(why, why_bytes, "not a ledger of version %u", LK_LEDGER_VERSION);
        return -EINVAL;
    }
    for (uint32_t i = 0; i < head->pools && !rc; i++) {
        struct audit audit = {.view = lk_ledger_view(ledger, i),
                              .pool = i,
                              .idle = idle,
                              .why = why,
                              .why_bytes = why_bytes};
        rc = check_pool(&audit);
    }
    return rc;
}
