/* SPDX-License-Identifier: MIT */
/*
 * object.c - submissions that need no batch: sequences and leases come, change and go. See state.h.
 *
 * What changes a table that rows may be reading waits until nothing of it is in flight. Tables are
 * chores: only so many entries are handled in a tick.
 */
#include "state.h"

#include "assert.h"

/* ---- sequences ---- */

/* A free slot of the pool, or why there is none. */
static struct lk_sequence *new_sequence(struct lk_intake *intake, struct lk_channel *channel,
                                        uint32_t pool, struct lk_refusal *ret) {
    const struct lk_pool *p = &intake->pool[pool];
    struct lk_sequence *sequence = intake->spare_sequence[pool];
    *ret = (struct lk_refusal){.row = LK_ROW_WHOLE};
    if (intake->draining)
        lk_found(ret, LK_REASON_DRAINING, 0, 0);
    else if (channel->sequence_count >= channel->limits.max_sequences)
        lk_found(ret, LK_REASON_SEQUENCES_QUOTA, channel->sequence_count + 1,
                 channel->limits.max_sequences);
    else if (!sequence)
        lk_found(ret, LK_REASON_SEQUENCES_POOL, p->sequences + 1, p->config->max_sequences);
    if (ret->reason)
        return NULL;
    intake->spare_sequence[pool] = sequence->next;
    return sequence;
}

static enum lk_run run_create(struct lk_intake *intake, struct lk_submission *s) {
    struct lk_refusal refusal;
    struct lk_sequence *sequence = new_sequence(intake, s->channel, s->desc->object.pool, &refusal);
    if (!sequence)
        return lk_refuse(intake, s, &refusal);
    lk_sequence_create(sequence, s->channel);
    return lk_answer(intake, s, lk_sequence_handle(sequence));
}

/* The sequence of FORK, TRUNCATE, FREE once it may be changed, else NULL: what to return. */
static enum lk_run idle_sequence(struct lk_intake *intake, struct lk_submission *s,
                                 struct lk_sequence **ret) {
    struct lk_refusal refusal;
    if (lk_find_sequence(intake, s->channel, s->desc->object.handle, UINT32_MAX, ret, &refusal)) {
        *ret = NULL;
        return lk_refuse(intake, s, &refusal);
    }
    if ((*ret)->in_flight == 0 && lk_chore(intake, (*ret)->slot->quads))
        return LK_RUN_STARTED;
    *ret = NULL;
    return LK_RUN_WAIT;
}

static enum lk_run run_fork(struct lk_intake *intake, struct lk_submission *s) {
    struct lk_sequence *parent, *child;
    struct lk_refusal refusal;
    enum lk_run run = idle_sequence(intake, s, &parent);
    if (!parent)
        return run;
    child = new_sequence(intake, s->channel, parent->pool->index, &refusal);
    if (!child)
        return lk_refuse(intake, s, &refusal);
    lk_sequence_fork(child, parent);
    return lk_answer(intake, s, lk_sequence_handle(child));
}

static enum lk_run run_truncate(struct lk_intake *intake, struct lk_submission *s) {
    struct lk_sequence *sequence;
    struct lk_refusal refusal;
    uint64_t length = s->desc->object.length;
    enum lk_run run = idle_sequence(intake, s, &sequence);
    if (!sequence)
        return run;
    if (length > lk_sequence_longest(sequence)) {
        lk_found(&refusal, LK_REASON_TRUNCATE, length, lk_sequence_longest(sequence));
        return lk_refuse(intake, s, &refusal);
    }
    lk_sequence_truncate(sequence, length);
    return lk_answer(intake, s, 0);
}

static enum lk_run run_free(struct lk_intake *intake, struct lk_submission *s) {
    struct lk_sequence *sequence;
    enum lk_run run = idle_sequence(intake, s, &sequence);
    if (!sequence)
        return run;
    lk_release_sequence(intake, sequence);
    return lk_answer(intake, s, 0);
}

/* ---- leases ---- */

static enum lk_reason lease_unfit(const struct lk_intake *intake, const struct lk_submission *s,
                                  struct lk_refusal *ret) {
    const struct lk_channel *channel = s->channel;
    const struct lk_object_desc *desc = &s->desc->object;
    const struct lk_pool *pool = &intake->pool[desc->pool];
    *ret = (struct lk_refusal){.row = LK_ROW_WHOLE};
    if (intake->draining)
        lk_found(ret, LK_REASON_DRAINING, 0, 0);
    else if (channel->lease_count >= channel->limits.max_leases)
        lk_found(ret, LK_REASON_LEASES_QUOTA, channel->lease_count + 1, channel->limits.max_leases);
    else if (!intake->spare_lease[desc->pool])
        lk_found(ret, LK_REASON_LEASES_POOL, pool->leases + 1, LK_LEASES_MAX);
    else if (desc->length > pool->view.pages)
        lk_found(ret, LK_REASON_PAGES_FREE, desc->length, lk_pool_available(pool) * LK_QUAD_PAGES);
    return (enum lk_reason)ret->reason;
}

static enum lk_run run_open(struct lk_intake *intake, struct lk_submission *s) {
    const struct lk_object_desc *desc = &s->desc->object;
    struct lk_pool *pool = &intake->pool[desc->pool];
    uint64_t quads = (desc->length + LK_QUAD_PAGES - 1) / LK_QUAD_PAGES;
    struct lk_refusal refusal;
    if (lease_unfit(intake, s, &refusal) ||
        lk_channel_over_quota(s->channel, pool, quads, &refusal))
        return lk_refuse(intake, s, &refusal);
    if (!lk_chore(intake, quads))
        return LK_RUN_WAIT;
    struct lk_lease *lease = intake->spare_lease[desc->pool];
    int rc = lk_lease_open(lease, s->channel, desc->length);
    if (rc) {
        lk_found(&refusal, LK_REASON_MEMORY, lk_lease_bytes(lease), 0);
        return lk_refuse(intake, s, &refusal);
    }
    intake->spare_lease[desc->pool] = lease->spare;
    lk_channel_charge(s->channel, pool, (int64_t)quads);
    return lk_answer(intake, s, lk_lease_handle(lease));
}

static enum lk_run run_close(struct lk_intake *intake, struct lk_submission *s) {
    struct lk_refusal refusal;
    struct lk_lease *lease;
    if (lk_find_lease(intake, s->channel, s->desc->object.handle, UINT32_MAX, &lease, &refusal))
        return lk_refuse(intake, s, &refusal);
    if (lease->in_flight || !lk_release_lease(intake, lease))
        return LK_RUN_WAIT;
    return lk_answer(intake, s, 0);
}

enum lk_run lk_run_object(struct lk_intake *intake, struct lk_submission *s) {
    switch (s->op) {
    case LK_OP_SEQUENCE_CREATE:
        return run_create(intake, s);
    case LK_OP_SEQUENCE_FORK:
        return run_fork(intake, s);
    case LK_OP_SEQUENCE_TRUNCATE:
        return run_truncate(intake, s);
    case LK_OP_SEQUENCE_FREE:
        return run_free(intake, s);
    case LK_OP_LEASE_OPEN:
        return run_open(intake, s);
    case LK_OP_LEASE_CLOSE:
        return run_close(intake, s);
    default:
        LK_ASSERT(s->op == LK_OP_BARRIER);
        return s->channel->running ? LK_RUN_WAIT : lk_answer(intake, s, 0);
    }
}
