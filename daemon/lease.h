/* SPDX-License-Identifier: MIT */
/*
 * lease.h - pages whose ids the client hands out itself, and the tables it names them by.
 *
 * Idea: ids 0..pages-1 of a lease lie in quads of the pool, id i in quad i / 4 at i % 4, so aligned
 * fours of ids are superpages. A page has a mark for each layer: the tokens written, where
 * page_tokens means sealed and summarised. Two copies of the marks: `planned` (lk_pool.marks) is as
 * things will be when all that is launched is done, and decides what may be written and attended;
 * the ledger's is lowered when a write is placed and raised when it is fenced, so that after a
 * crash it promises no more than there is.
 *
 * A table set is a step's block tables, copied out of the arena once, as physical pages; rows in
 * flight point into it. It is replaced when none does, by one that was built beside it: a refused
 * one leaves it as it was.
 *
 * Order inside a batch is copy < write < attend, the engine's; whoever comes too late for a batch
 * takes the next one (lk_lease_may). Writes and copies of a lease are unfenced in one batch at
 * most.
 *
 * Thread: intake. What it does not do: no quotas, no waiting (table.c, object.c).
 */
#ifndef LK_LEASE_H
#define LK_LEASE_H

#include "channel.h"
#include "pool.h"

enum lk_lease_stage { LK_STAGE_COPY, LK_STAGE_WRITE, LK_STAGE_ATTEND };

/* Places for table sets: of each, and one where a new one is built before it replaces its
 * predecessor. */
#define LK_LEASE_PLACES (LK_TABLE_SETS + 1)

struct lk_lease_table {
    uint64_t length;
    uint32_t pages;
    uint32_t aligned; /* its superpages are the pool's */
};

struct lk_lease_set {
    uint32_t rows;
    uint32_t in_flight; /* rows that point into it */
    struct lk_lease_table table[LK_ROWS_MAX];
};

struct lk_lease {
    struct lk_pool *pool;
    struct lk_channel *channel;    /* NULL: the slot is free */
    struct lk_lease *next, **link; /* of the channel */
    struct lk_lease *spare;        /* the next free one of the pool */
    struct lk_ledger_lease *slot;
    uint32_t *table; /* the ledger's: quads */
    uint32_t index, handle;
    uint64_t pages;
    uint32_t in_flight;    /* rows, writes and lists in batches not yet DONE */
    uint32_t unfenced;     /* writes and lists of copies */
    uint64_t batch_serial; /* batch it last had part in, and how far in it */
    enum lk_lease_stage stage;
    bool copies_built;        /* copies of that batch have superpages summarised */
    uint64_t unfenced_serial; /* batch of the unfenced */
    uint64_t *written;        /* by layer: batch that writes there, last */
    uint32_t *entries; /* [LK_LEASE_PLACES][LK_ROWS_MAX][pages] physical pages, mapped lazily */
    uint64_t mapped;   /* bytes that are left of what is mapped lazily */
    uint64_t *trial;   /* [layers][pages] by id: mark as a submission would leave it, and its serial
                          above it; mapped lazily */
    struct lk_lease_set set[LK_LEASE_PLACES]; /* by place */
    uint32_t place[LK_LEASE_PLACES];          /* of each set; the last: the spare one */
};

static inline uint64_t lk_lease_handle(const struct lk_lease *lease) {
    return (lease->slot->state & ~UINT64_C(0xffffffff)) | lease->handle;
}

/* Makes a free slot a lease of the channel with `pages` empty pages; quads were promised. The only
 * memory taken after start is here: address space for the sets, which fills as tables are sent, at
 * most 9 KiB a page of the lease, and for trials of writes, 8 bytes a page and layer. -> 0,
 * -ENOMEM. */
int lk_lease_open(struct lk_lease *lease, struct lk_channel *channel, uint64_t pages);
/* Of that address space, once it was asked for. */
uint64_t lk_lease_bytes(const struct lk_lease *lease);
/* Gives back a piece of that address space, from its end: the lease can only be closed any more.
 * Nothing in flight. -> whether none is left. */
bool lk_lease_unmap_piece(struct lk_lease *lease);
/* Gives all back. Nothing in flight. */
void lk_lease_close(struct lk_lease *lease);
/* After channel and daemon are gone. */
void lk_lease_unmap(struct lk_lease *lease);

/* May the stage be placed in batch `serial` -> and notes it. layer: of a write. */
bool lk_lease_may(const struct lk_lease *lease, uint64_t serial, enum lk_lease_stage stage,
                  uint32_t layer);
void lk_lease_placed(struct lk_lease *lease, uint64_t serial, enum lk_lease_stage stage,
                     uint32_t layer);

/* ---- tables ---- */
static inline struct lk_lease_set *lk_lease_set(struct lk_lease *lease, uint32_t set) {
    return &lease->set[lease->place[set]];
}
static inline const struct lk_lease_table *lk_lease_row(const struct lk_lease *lease,
                                                        const struct lk_row_desc *desc) {
    return &lease->set[lease->place[desc->table_set]].table[desc->table_row];
}
/* A set is replaced in two steps: its tables are copied row by row to a spare place, ids being read
 * from the arena once; then the places change. Refused, or never ended: every set is as it was. */
enum lk_reason lk_lease_copy_table(struct lk_lease *lease, uint32_t row,
                                   const struct lk_table_desc *desc, const uint8_t *arena,
                                   struct lk_refusal *ret);
/* Nothing of the set is in flight; `rows` are copied. */
void lk_lease_replace(struct lk_lease *lease, uint32_t set, uint32_t rows);
const uint32_t *lk_lease_table(const struct lk_lease *lease, uint32_t set, uint32_t row);
/* May a row attend that table at a layer? */
enum lk_reason lk_lease_unfit(const struct lk_lease *lease, const struct lk_row_desc *desc,
                              struct lk_refusal *ret);
/* Has every superpage of the table a summary at the layer? */
bool lk_lease_has_supers(const struct lk_lease *lease, const struct lk_row_desc *desc);

/* ---- writes ---- */
struct lk_lease_undo {
    uint64_t at;
    uint8_t mark;
};
/* Would the write be refused, behind those that submission `serial` has tried before it? Changes
 * nothing. */
enum lk_reason lk_lease_write_invalid(struct lk_lease *lease, uint64_t serial, uint32_t layer,
                                      const int64_t *client, uint32_t tokens,
                                      struct lk_refusal *ret);
/* Reads `tokens` slots at client once; ret_slots gets physical ones. Refused: nothing has changed.
 * Else planned marks are as after the write, the ledger's are lowered. undo: room for tokens. */
enum lk_reason lk_lease_write(struct lk_lease *lease, uint32_t layer, const int64_t *client,
                              uint32_t tokens, uint64_t *ret_slots, struct lk_lease_undo *undo,
                              struct lk_refusal *ret);
/* What that write sealed -> how many, at most `tokens`. */
uint32_t lk_lease_builds(struct lk_lease *lease, uint32_t layer, const uint64_t *slots,
                         uint32_t tokens, struct lk_build *builds);
/* The write is fenced: the ledger's marks are raised. */
void lk_lease_written(struct lk_pool *pool, const struct lk_write *write);

/* ---- lists ---- */
struct lk_pair { /* of a COPY_PAGES: the client's ids */
    uint32_t from, to;
};
/* Ids of the lease, and not the same. */
enum lk_reason lk_lease_pair_invalid(const struct lk_lease *lease, struct lk_pair pair,
                                     struct lk_refusal *ret);
/* That, and no page is written twice by submission `serial`, whose pairs are asked for one after
 * the other; meanwhile the lease has no copies in the batch that is being filled. */
enum lk_reason lk_lease_copy_invalid(struct lk_lease *lease, uint64_t serial, struct lk_pair pair,
                                     struct lk_refusal *ret);
/* May the pair be copied in batch `serial`, which has parallel copies? */
bool lk_lease_may_copy(const struct lk_lease *lease, uint64_t serial, struct lk_pair pair);
/* Copies a page at all layers -> copies added (at most layers). */
uint32_t lk_lease_copy(struct lk_lease *lease, uint64_t serial, struct lk_pair pair,
                       struct lk_copy *copies);
/* Superpages that copies made complete -> builds added (at most count). */
uint32_t lk_lease_copy_builds(struct lk_lease *lease, const struct lk_copy *copies, uint32_t count,
                              struct lk_build *builds);
/* The copy is fenced. */
void lk_lease_copied(struct lk_pool *pool, const struct lk_copy *copy);
/* The page is empty at all layers. */
void lk_lease_invalidate(struct lk_lease *lease, uint32_t page);

#endif
