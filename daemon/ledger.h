/* SPDX-License-Identifier: MIT */
/*
 * ledger.h - who owns which page, in one memfd of fixed layout that outlives the process.
 *
 * Idea: everything that must survive the daemon's death lies here as plain integers: no pointers,
 * offsets computed from the configuration alone. What can be computed again (free lists, lengths
 * of work in flight, quotas) is not here. So a new daemon could map the memfd, call
 * lk_ledger_check(), repair what a crash may leave (below) and serve on; this one starts anew.
 *
 *   lk_ledger_head, then of each pool:
 *     quads         lk_ledger_quad [quads]               references, generation, copy on its way
 *     sequences     lk_ledger_sequence [max_sequences]   generation and state, owner
 *     lengths       u64 [max_sequences][layers]          tokens whose results stand
 *     tables        u32 [max_sequences][table_quads]     quads in token order
 *     leases        lk_ledger_lease [max_leases]
 *     lease_tables  u32 [max_leases][quads]              quad of the lease's pages 4i..4i+3
 *     marks         u8 [layers][pages]     a lease's page: tokens written, and page_tokens means
 *                                          summarised; a sequence's: page_tokens if summarised
 *     supers        u8 [layers][quads]     1: the superpage is summarised
 *
 * A crash between two stores. Every mutation is ordered so that the ledger only errs on one side:
 *   - A quad's reference is counted before a table names it, and given back after no table does:
 *     references may be too many, never too few. Repair: count the tables.
 *   - A sequence or lease is filled in before its state says live (one 64-bit store with its
 *     generation) and is dead before its quads go. Repair: none, or the first.
 *   - `quads` of a slot grows after its entries are written and shrinks before they are given up.
 *   - A length grows when results stand (FENCED), before the completion is published: a step the
 *     daemon died in has not happened, and its position will be accepted again.
 *   - Marks are lowered before a batch that spoils a page is launched, raised when it is done: a
 *     mark may be too low, never too high. Repair of sequences: summarise complete pages that are
 *     not marked.
 *   - Copy on write: the new quad notes old quad, sequence and index before the table names it and
 *     forgets them when the copy is done; until then the old quad's reference stays. Repair: where
 *     a note stands and the table names the new quad, the table gets the old one back; then the
 *     note goes.
 *
 * Thread: intake. Workers read the tables of rows in flight, entries that do not change meanwhile.
 * What it does not do: decide anything (pool.h, sequence.h, lease.h).
 */
#ifndef LK_LEDGER_H
#define LK_LEDGER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "config.h"

#define LK_LEDGER_MAGIC   UINT64_C(0x726567646c736b6c) /* "lksldger" */
#define LK_LEDGER_VERSION 1
#define LK_LEDGER_NONE    UINT32_MAX
#define LK_LEDGER_LIVE    1 /* low half of a state; 0: free. The high half is the generation */

struct lk_ledger_shape { /* of a pool: all its section follows from this */
    uint32_t layers, page_tokens;
    uint64_t pages; /* multiple of LK_QUAD_PAGES */
    uint32_t max_sequences, table_quads, max_leases;
    uint32_t reserved;
};

struct lk_ledger_section {
    struct lk_ledger_shape shape;
    uint64_t quads_at, sequences_at, lengths_at, tables_at, leases_at, lease_tables_at, marks_at,
        supers_at; /* offsets from the head */
};

struct lk_ledger_head {
    uint64_t magic;
    uint32_t version, pools;
    uint64_t bytes; /* of the whole */
    uint64_t boot_epoch;
    struct lk_ledger_section section[LK_POOLS_MAX];
};

struct lk_ledger_quad {
    uint32_t references; /* of live tables, and of copies on their way from it; 0: free */
    uint32_t generation; /* counts how often it was freed */
    uint32_t copy_from;  /* LK_LEDGER_NONE, or the quad whose copy this is to become */
    uint32_t copy_sequence, copy_index; /* ... for this entry of this sequence's table */
    uint32_t reserved[3];
};

struct lk_ledger_sequence {
    uint64_t state;
    uint32_t channel, uid;
    uint32_t quads; /* entries of its table */
    uint32_t reserved;
};

struct lk_ledger_lease {
    uint64_t state;
    uint32_t channel, uid;
    uint64_t pages;
    uint32_t quads;
    uint32_t reserved;
};

/* A pool's part, as pointers. */
struct lk_ledger_view {
    struct lk_ledger_shape shape;
    uint64_t quad_count;
    struct lk_ledger_quad *quads;
    struct lk_ledger_sequence *sequences;
    uint64_t *lengths;
    uint32_t *tables;
    struct lk_ledger_lease *leases;
    uint32_t *lease_tables;
    uint8_t *marks, *supers;
};

struct lk_ledger {
    struct lk_ledger_head *head;
    int fd;
};

/* A fresh ledger: nothing owned. Tables lie sparse in the memfd and take memory as sequences grow,
 * four bytes a quad; all else is taken now. -> 0 or -errno, sentence in why. */
int lk_ledger_open(const struct lk_ledger_shape *shapes, uint32_t pools, uint64_t boot_epoch,
                   struct lk_ledger *ret, char *why, size_t why_bytes);
void lk_ledger_close(struct lk_ledger *ledger);
struct lk_ledger_view lk_ledger_view(const struct lk_ledger *ledger, uint32_t pool);

/* The next state of a slot: live or free; freeing counts the generation. One store. */
void lk_ledger_set_live(uint64_t *state);
void lk_ledger_set_free(uint64_t *state);
static inline bool lk_ledger_live(uint64_t state) {
    return (uint32_t)state == LK_LEDGER_LIVE;
}
static inline uint32_t lk_ledger_generation(uint64_t state) {
    return (uint32_t)(state >> 32);
}

/* Whether all that the ledger says is consistent: references equal what tables name, no quad in two
 * leases or in a lease and a sequence, lengths inside tables, marks no higher than may be. idle:
 * nothing is in flight, then also: no copy on its way, tables no longer than lengths, every
 * complete page of a sequence summarised. -> 0, or -EINVAL with the first finding in why; -ENOMEM.
 */
int lk_ledger_check(const struct lk_ledger *ledger, bool idle, char *why, size_t why_bytes);

#endif
