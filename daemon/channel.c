/* SPDX-License-Identifier: MIT */
/*
 * channel.c - queue, completions and charges of one client. See channel.h.
 */
#include "channel.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "../shm_protocol/atomics.h"
#include "assert.h"

int lk_channel_alloc(struct lk_channel *channel) {
    size_t bytes = LK_QUEUE_SUBMISSIONS * sizeof(*channel->objects);
    channel->objects = aligned_alloc(LK_LINE, bytes);
    channel->large = aligned_alloc(LK_LINE, LK_QUEUE_LARGE * LK_DESCRIPTOR_BYTES_MAX);
    if (channel->objects && channel->large)
        return 0;
    lk_channel_unalloc(channel);
    return -ENOMEM;
}

void lk_channel_unalloc(struct lk_channel *channel) {
    free(channel->objects);
    free(channel->large);
    channel->objects = NULL;
    channel->large = NULL;
}

void lk_channel_open(struct lk_channel *channel, const struct lk_channel_open *open,
                     struct lk_user *user, const struct lk_channel_limits *limits) {
    struct lk_submission *objects = channel->objects;
    uint8_t *large = channel->large;
    memset(channel, 0, sizeof(*channel));
    channel->open = *open;
    channel->objects = objects;
    channel->large = large;
    channel->user = user;
    channel->limits = *limits;
    channel->tail = &channel->head;
    for (uint32_t i = 0; i < LK_QUEUE_SUBMISSIONS; i++) {
        objects[i].next = channel->spare;
        channel->spare = &objects[i];
    }
    lk_ring_daemon_init(&channel->ring, open->submission, open->completion, open->sq_entries,
                        open->cq_entries, open->submission_bytes);
    channel->state = LK_CHANNEL_OPEN;
}

/* ---- queue ---- */

/* -> a large descriptor's index, -1: none is needed, -2: none is left. */
static int32_t choose_large(const struct lk_channel *channel, uint32_t desc_bytes) {
    if (desc_bytes <= LK_INLINE_BYTES)
        return -1;
    for (int32_t i = 0; i < LK_QUEUE_LARGE; i++)
        if (!(channel->large_used >> i & 1))
            return i;
    return -2;
}

struct lk_submission *lk_channel_object(struct lk_channel *channel, uint32_t desc_bytes) {
    struct lk_submission *s = channel->spare;
    int32_t large = choose_large(channel, desc_bytes);
    if (!s || large == -2)
        return NULL;
    channel->spare = s->next;
    memset(s, 0, offsetof(struct lk_submission, result));
    s->result = (struct lk_step_result){0};
    s->channel = channel;
    s->desc_bytes = desc_bytes;
    s->large = large;
    s->desc = (union lk_descriptor *)s->inside;
    if (large >= 0) {
        channel->large_used |= 1U << large;
        s->desc = (union lk_descriptor *)(channel->large + (size_t)large * LK_DESCRIPTOR_BYTES_MAX);
    }
    return s;
}

static void free_object(struct lk_channel *channel, struct lk_submission *s) {
    if (s->large >= 0)
        channel->large_used &= ~(1U << s->large);
    s->next = channel->spare;
    channel->spare = s;
    channel->stalled = false;
}

void lk_channel_enqueue(struct lk_channel *channel, struct lk_submission *submission) {
    submission->next = NULL;
    *channel->tail = submission;
    channel->tail = &submission->next;
    channel->queued++;
}

void lk_channel_dequeue(struct lk_channel *channel) {
    struct lk_submission *s = channel->head;
    channel->head = s->next;
    if (!channel->head)
        channel->tail = &channel->head;
    channel->queued--;
    channel->running++;
}

void lk_channel_drop_queue(struct lk_channel *channel) {
    while (channel->head) {
        struct lk_submission *s = channel->head;
        lk_channel_dequeue(channel);
        lk_channel_release(s);
        s->waits = false;
        if (s->placed == 0)
            lk_channel_finish(channel, s, 0, 0);
    }
}

/* ---- completions ---- */

void lk_channel_publish(struct lk_channel *channel, const struct lk_cqe *cqe) {
    lk_ring_daemon_publish(&channel->ring, cqe);
    lk_store_release64(&channel->open.completion->fence[0], channel->ring.cq_tail);
    channel->published = true;
    channel->completions++;
    channel->refusals += cqe->status != 0;
}

static void write_timing(const struct lk_channel *channel, const struct lk_submission *s) {
    if (lk_op_is_step(s->op) && s->desc->step.timing != LK_NONE)
        memcpy(channel->open.arena + s->desc->step.timing, &s->result, sizeof(s->result));
}

static void answer(struct lk_channel *channel, const struct lk_submission *s, uint64_t value,
                   uint64_t now_ns) {
    const struct lk_refusal *refusal = &s->refusal;
    bool refused = refusal->reason != LK_REASON_NONE;
    struct lk_cqe cqe = {
        .user_data = s->user_data,
        .value = refused ? refusal->value : value,
        .limit = refused ? refusal->limit : 0,
        .status = lk_reason_errno(refusal->reason),
        .reason = refusal->reason,
        .op = s->op,
        .row = refused ? refusal->row : LK_ROW_WHOLE,
        .rows = s->done,
        .total_ns = now_ns - s->taken_ns,
        .bytes = s->result.score_bytes + s->result.select_bytes + s->result.attend_bytes,
    };
    if (!refused)
        write_timing(channel, s);
    lk_channel_publish(channel, &cqe);
}

void lk_channel_finish(struct lk_channel *channel, struct lk_submission *submission, uint64_t value,
                       uint64_t now_ns) {
    LK_ASSERT(channel->running > 0 && submission->placed == 0 && submission->promised == 0);
    if (channel->state != LK_CHANNEL_LEAVING)
        answer(channel, submission, value, now_ns);
    channel->running--;
    free_object(channel, submission);
}

/* ---- charges ---- */

void lk_channel_charge(struct lk_channel *channel, const struct lk_pool *pool, int64_t quads) {
    channel->quads[pool->index] += (uint64_t)quads;
    channel->user->quads[pool->index] += (uint64_t)quads;
}

uint64_t lk_channel_quads(const struct lk_channel *channel) {
    uint64_t quads = 0;
    for (uint32_t i = 0; i < LK_POOLS_MAX; i++)
        quads += channel->quads[i];
    return quads;
}

enum lk_reason lk_channel_over_quota(const struct lk_channel *channel, const struct lk_pool *pool,
                                     uint64_t quads, struct lk_refusal *ret) {
    const struct lk_channel_limits *limits = &channel->limits;
    uint64_t mine = (channel->quads[pool->index] + quads) * LK_QUAD_PAGES;
    uint64_t users = (channel->user->quads[pool->index] + quads) * LK_QUAD_PAGES;
    if (quads == 0)
        return LK_REASON_NONE;
    if (limits->max_pages && mine > limits->max_pages)
        return lk_found(ret, LK_REASON_PAGES_QUOTA, mine, limits->max_pages);
    if (limits->max_pages_per_uid && users > limits->max_pages_per_uid)
        return lk_found(ret, LK_REASON_PAGES_UID, users, limits->max_pages_per_uid);
    if (quads > lk_pool_available(pool))
        return lk_found(ret, LK_REASON_PAGES_FREE, quads * LK_QUAD_PAGES,
                        lk_pool_available(pool) * LK_QUAD_PAGES);
    return LK_REASON_NONE;
}

void lk_channel_promise(struct lk_submission *submission, struct lk_pool *pool, uint64_t quads) {
    submission->pool = pool;
    submission->promised = quads;
    pool->promised += quads;
    lk_channel_charge(submission->channel, pool, (int64_t)quads);
}

void lk_channel_release(struct lk_submission *submission) {
    if (submission->promised == 0)
        return;
    submission->pool->promised -= submission->promised;
    lk_channel_charge(submission->channel, submission->pool, -(int64_t)submission->promised);
    submission->promised = 0;
}
