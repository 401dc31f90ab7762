/* SPDX-License-Identifier: MIT */
/*
 * sequence.h - one block table for all layers of a pool, and a length per layer.
 *
 * Idea: two lengths a layer. The ledger's is what stands: results were published. `planned` also
 * counts what is in batches; rows state positions against it, so that layers and steps follow each
 * other without waiting. A table only grows at its end while rows of it are in flight, so rows
 * point into the ledger's table. What changes entries - fork, truncate, free, copy on write - waits
 * until nothing of the sequence is in flight (in_flight == 0), and then planned equals what stands.
 *
 * Copy on write. A fork shares every quad, the incomplete one too. Whoever appends into a quad with
 * more than one reference gets a copy of all layers' pages in it first (lk_sequence_copy); the old
 * quad keeps a reference until the copy is done, so a sharer that appends meanwhile copies as well,
 * and nobody writes into what is being read.
 *
 * Invariants: quads = what the longest planned length needs, once a step's rows are all placed;
 * a quad is in a table once; marks of the pages an append touches are lowered at launch.
 *
 * Thread: intake. What it does not do: no quotas, no waiting (step.c, object.c).
 */
#ifndef LK_SEQUENCE_H
#define LK_SEQUENCE_H

#include "channel.h"
#include "pool.h"

struct lk_sequence_layer {
    uint64_t planned;      /* tokens, those of rows in flight included */
    uint64_t check_serial; /* submission that checked its rows last, and where they would end */
    uint64_t check_length;
    uint64_t batch_serial; /* batch that appends at this layer, last */
};

struct lk_sequence {
    struct lk_pool *pool;
    struct lk_channel *channel;       /* NULL: the slot is free */
    struct lk_sequence *next, **link; /* of the channel's, or of the pool's free ones */
    struct lk_ledger_sequence *slot;
    uint64_t *lengths; /* the ledger's, [layers] */
    uint32_t *table;   /* the ledger's */
    struct lk_sequence_layer *layer;
    uint32_t index;        /* in the pool's section */
    uint32_t handle;       /* low half of its handle: index over all sequences and leases, + 1 */
    uint32_t in_flight;    /* rows and copies in batches not yet DONE */
    uint64_t check_serial; /* as a layer's: quads that the checked rows take in all */
    uint64_t check_quads, copy_first, copy_end;
};

static inline uint64_t lk_sequence_handle(const struct lk_sequence *sequence) {
    return (sequence->slot->state & ~UINT64_C(0xffffffff)) | sequence->handle;
}

/* Makes a free slot an empty sequence of the channel. */
void lk_sequence_create(struct lk_sequence *sequence, struct lk_channel *channel);
/* The same, sharing all quads and lengths of a parent that has nothing in flight. */
void lk_sequence_fork(struct lk_sequence *sequence, const struct lk_sequence *parent);
/* Cuts every layer to at most length tokens. Nothing in flight. */
void lk_sequence_truncate(struct lk_sequence *sequence, uint64_t length);
/* Gives all quads back; the handle is stale from here on. Nothing in flight. */
void lk_sequence_free(struct lk_sequence *sequence);
/* The longest layer. */
uint64_t lk_sequence_longest(const struct lk_sequence *sequence);

/* Shared quads among table entries first..stop-1 -> how many; *ret_first: the first of them. */
uint32_t lk_sequence_shared(const struct lk_sequence *sequence, uint64_t first, uint64_t stop,
                            uint64_t *ret_first);
/* Quads that one more append, of tokens position..end-1, makes a submission need: for growth and
 * for copies of what is shared now. Rows of a submission have the same serial and are asked in
 * order. */
uint64_t lk_sequence_need(struct lk_sequence *sequence, uint64_t serial, uint64_t position,
                          uint64_t end);
/* Table entry `at` gets a quad of its own, while no rows are in flight; appends what is to be
 * copied at `copies` -> how many (at most layers * LK_QUAD_PAGES, at least 1). The old quad's
 * reference stays until lk_sequence_copied(). */
uint32_t lk_sequence_copy(struct lk_sequence *sequence, uint64_t at, struct lk_copy *copies,
                          uint32_t *ret_quad);
/* The copy into `quad` is done. -> true: the old quad is free now. */
bool lk_sequence_copied(struct lk_pool *pool, uint32_t quad);
/* The table reaches `end` tokens; quads come from what was promised -> how many were taken. */
uint32_t lk_sequence_grow(struct lk_sequence *sequence, uint64_t end);
/* An append of a layer's tokens up to `end` is about to be launched: pages it touches are not
 * summarised any more, planned grows. */
void lk_sequence_append(struct lk_sequence *sequence, uint32_t layer, uint64_t end);
/* The pages that append closed -> how many; fills builds. */
uint32_t lk_sequence_builds(const struct lk_sequence *sequence, uint32_t layer, uint64_t position,
                            uint64_t end, struct lk_build *builds);
/* A build of a sequence's page is done: its marks are raised. */
void lk_sequence_built(const struct lk_build *build);

#endif
