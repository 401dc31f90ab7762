/* SPDX-License-Identifier: MIT */
/*
 * take.c - from the ring into the queue: copy, check the copy. See channel.h, state.h.
 *
 * An entry and its descriptor are read once each. What is wrong by itself is answered here; what is
 * wrong in the daemon's present state when the submission's turn has come.
 */
#include "state.h"

#include <string.h>

#include "../shm_protocol/validate.h"

static struct lk_bounds bounds_of(const struct lk_intake *intake,
                                  const struct lk_channel *channel) {
    return (struct lk_bounds){.pools = intake->shape,
                              .pool_count = intake->pools,
                              .max_row_tokens = intake->config.max_row_tokens,
                              .arena_bytes = channel->open.arena_bytes,
                              .device_bytes = channel->device_bytes};
}

static enum lk_reason desc_invalid(const struct lk_intake *intake, const struct lk_submission *s,
                                   struct lk_refusal *ret) {
    struct lk_bounds bounds = bounds_of(intake, s->channel);
    if (lk_op_is_step(s->op))
        return lk_step_invalid(s->op, &s->desc->step, s->desc_bytes, &bounds, ret);
    if (s->op == LK_OP_TABLES || s->op == LK_OP_BARRIER)
        return LK_REASON_NONE; /* tables: once the lease, and so the page's size, is known */
    return lk_object_invalid(s->op, &s->desc->object, s->desc_bytes, &bounds, ret);
}

/* A step of no rows with nothing before it is answered on the spot: what a client pays for asking.
 * -> false: it is not that, or is wrong, and goes the way of all others. */
static bool answer_empty(struct lk_intake *intake, struct lk_channel *channel,
                         const struct lk_sqe *sqe) {
    struct lk_bounds bounds = bounds_of(intake, channel);
    struct lk_step_result zero = {0};
    struct lk_step_desc step;
    struct lk_refusal refusal;
    if (channel->queued || sqe->wait_fence || sqe->signal_fence ||
        sqe->desc_bytes != sizeof(step) || !lk_op_is_step(sqe->op))
        return false;
    lk_ring_daemon_copy_desc(&channel->ring, sqe, &step);
    if (lk_step_invalid(sqe->op, &step, sizeof(step), &bounds, &refusal))
        return false;
    lk_ring_daemon_release(&channel->ring, 1);
    if (step.timing != LK_NONE)
        memcpy(channel->open.arena + step.timing, &zero, sizeof(zero));
    struct lk_cqe cqe = {.user_data = sqe->user_data, .op = sqe->op, .row = LK_ROW_WHOLE};
    lk_channel_publish(channel, &cqe);
    return true;
}

static void count_submission(struct lk_intake *intake, struct lk_channel *channel) {
    channel->submissions++;
    intake->submissions++;
}

/* Those of a wrong entry too: its client's kernels may wait for them. */
static void take_fences(struct lk_submission *s, const struct lk_sqe *sqe) {
    s->wait_fence = sqe->wait_fence;
    s->wait_value = sqe->wait_value;
    s->signal_fence = sqe->signal_fence;
    s->signal_value = sqe->signal_value;
}

/* One entry -> false: no object is free. */
static bool take_one(struct lk_intake *intake, struct lk_channel *channel) {
    struct lk_refusal refusal;
    struct lk_sqe sqe;
    lk_ring_daemon_copy_sqe(&channel->ring, 0, &sqe);
    struct lk_bounds bounds = bounds_of(intake, channel);
    bool fences = lk_fences_invalid(&sqe, &bounds, &refusal) == LK_REASON_NONE;
    bool wrong = !fences || lk_sqe_invalid(&sqe, channel->ring.desc_bytes, &refusal);
    if (!wrong && answer_empty(intake, channel, &sqe)) {
        count_submission(intake, channel);
        return true;
    }
    struct lk_submission *s = lk_channel_object(channel, wrong ? 0 : sqe.desc_bytes);
    if (!s) {
        channel->stalled = true;
        return false;
    }
    s->user_data = sqe.user_data;
    s->op = sqe.op;
    s->waits = true;
    s->taken_ns = intake->now_ns;
    if (fences)
        take_fences(s, &sqe);
    if (!wrong && s->desc_bytes)
        lk_ring_daemon_copy_desc(&channel->ring, &sqe, s->desc);
    lk_ring_daemon_release(&channel->ring, 1);
    count_submission(intake, channel);
    lk_channel_enqueue(channel, s);
    if (wrong || desc_invalid(intake, s, &refusal))
        s->refusal = refusal;
    return true;
}

bool lk_take(struct lk_intake *intake, struct lk_channel *channel) {
    uint32_t count;
    if (channel->state != LK_CHANNEL_OPEN)
        return false;
    if (lk_ring_daemon_peek(&channel->ring, &count)) {
        channel->state = LK_CHANNEL_CUT;
        lk_unwatch_bell(intake, channel);
        return false;
    }
    if (count == 0)
        return false;
    count = count < LK_TAKE_PER_TURN ? count : LK_TAKE_PER_TURN;
    uint32_t taken = 0;
    while (taken < count && take_one(intake, channel))
        taken++;
    return taken > 0;
}
