/* SPDX-License-Identifier: MIT */
/*
 * batch.h - a batch being filled or in flight, and what stands behind each of its parts.
 *
 * Idea: there are as many as may be in flight, with all arrays they can ever need. At most one is
 * being filled; it is launched in the same tick. Each row, write and list has an item that says
 * whose it is and what becomes true when it is fenced or done.
 *
 * Invariants: whatever a batch names - quads by a sequence or lease, table sets, segments of a
 * channel - is counted as in flight there from placing to DONE.
 *
 * Thread: intake; workers read and write the batch from launch to DONE. What it does not do: decide
 * who gets in (step.c, table.c).
 */
#ifndef LK_DAEMON_BATCH_H
#define LK_DAEMON_BATCH_H

#include "channel.h"

struct lk_item {
    struct lk_submission *submission; /* until FENCED */
    struct lk_channel *channel;
    struct lk_sequence *sequence; /* or NULL */
    struct lk_lease *lease;       /* or NULL */
    struct lk_row *row;           /* of the batch, or NULL */
    struct lk_write *write;       /* of the batch, or NULL */
    uint32_t copy, copies;        /* lease's copies in the batch */
    uint32_t set;                 /* table set of a row, LK_TABLE_SETS: none */
    bool part;                    /* of a row, and more of it follows in later batches */
};

struct lk_batch_copy { /* of a sequence's quad, on write */
    struct lk_sequence *sequence;
    uint32_t quad;
};

struct lk_work {
    struct lk_batch batch;
    uint64_t serial; /* of all batches, from 1 */
    bool in_flight;
    uint64_t launched_ns;
    struct lk_row *rows;
    struct lk_copy *copies;
    struct lk_write *writes;
    struct lk_build *before, *after;
    uint64_t *slots;
    struct lk_item *items;
    struct lk_batch_copy *shared;
    struct lk_signal *signals; /* of submissions whose last part is in the batch */
    uint32_t item_count, shared_count;
    uint64_t tokens, products, slots_used, workspace_used;
};

/* -> 0, -ENOMEM. */
int lk_work_alloc(struct lk_work *work);
void lk_work_unalloc(struct lk_work *work);
/* Empty, to be filled as batch number `serial`. */
void lk_work_reset(struct lk_work *work, uint64_t serial);
static inline bool lk_work_empty(const struct lk_work *work) {
    return work->item_count == 0 && work->shared_count == 0;
}

#endif
