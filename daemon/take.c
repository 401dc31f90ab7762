/* SPDX-License-Identifier: MIT */
/*
 * take.c - from the ring into the queue: copy, check the copy. See channel.h, state.h.
 *
 * An entry and its descriptor are read once each. What is wrong by itself is answered here; what is
 * wrong in the daemon's present state when the submission's turn has come.
 */
#include "state.h"

#include "../shm_protocol/validate.h"

static bool is_step(uint16_t op) {
    return op == LK_OP_APPEND || op == LK_OP_DECODE || op == LK_OP_ATTEND || op == LK_OP_WRITE ||
           op == LK_OP_ATTEND_TABLE;
}

static enum lk_reason desc_invalid(const struct lk_intake *intake, const struct lk_submission *s,
                                   struct lk_refusal *ret) {
    struct lk_bounds bounds = {.pools = intake->shape,
                               .pool_count = intake->pools,
                               .max_row_tokens = intake->config.max_row_tokens,
                               .arena_bytes = s->channel->open.arena_bytes};
    if (is_step(s->op))
        return lk_step_invalid(s->op, &s->desc->step, s->desc_bytes, &bounds, ret);
    if (s->op == LK_OP_TABLES || s->op == LK_OP_BARRIER)
        return LK_REASON_NONE; /* tables: once the lease, and so the page's size, is known */
    return lk_object_invalid(s->op, &s->desc->object, s->desc_bytes, &bounds, ret);
}

/* One entry -> false: no object is free. */
static bool take_one(struct lk_intake *intake, struct lk_channel *channel) {
    struct lk_refusal refusal;
    struct lk_sqe sqe;
    lk_ring_daemon_copy_sqe(&channel->ring, 0, &sqe);
    bool wrong = lk_sqe_invalid(&sqe, channel->ring.desc_bytes, &refusal) != LK_REASON_NONE;
    struct lk_submission *s = lk_channel_object(channel, wrong ? 0 : sqe.desc_bytes);
    if (!s) {
        channel->stalled = true;
        return false;
    }
    s->user_data = sqe.user_data;
    s->op = sqe.op;
    s->waits = true;
    s->taken_ns = intake->now_ns;
    if (!wrong && s->desc_bytes)
        lk_ring_daemon_copy_desc(&channel->ring, &sqe, s->desc);
    lk_ring_daemon_release(&channel->ring, 1);
    channel->submissions++;
    intake->submissions++;
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
    intake->now_ns = lk_intake_now_ns();
    count = count < LK_TAKE_PER_TURN ? count : LK_TAKE_PER_TURN;
    uint32_t taken = 0;
    while (taken < count && take_one(intake, channel))
        taken++;
    return taken > 0;
}
