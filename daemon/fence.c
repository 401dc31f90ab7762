/* SPDX-License-Identifier: MIT */
/*
 * fence.c - fences of clients on the GPU: waits before a submission starts, signals when it is
 * over. See state.h.
 *
 * Only the head of a queue waits, so a channel has one place among those the engine watches. Its
 * clock begins when it is watched, and a head whose time is over is refused: neither the daemon nor
 * another channel ever waits for a client.
 *
 * A signal goes with the batch that holds the submission's last part. What has none - refusals, and
 * what needs no batch - is raised behind everything that this tick has launched: so behind all that
 * its channel started before it.
 */
#include "state.h"

#include "assert.h"

static uint64_t *word_of(const struct lk_channel *channel, uint32_t fence) {
    return (uint64_t *)(channel->device + (uint64_t)(fence - 1) * LK_DEVICE_FENCE_STRIDE);
}

static uint32_t place_of(const struct lk_intake *intake, const struct lk_channel *channel) {
    return (uint32_t)(channel - intake->channel);
}

static bool reached(struct lk_intake *intake, struct lk_submission *s, uint64_t *ret_held) {
    return lk_engine_fence_reached(intake->engine, place_of(intake, s->channel),
                                   word_of(s->channel, s->wait_fence), s->wait_value, ret_held);
}

/* ---- waits ---- */

bool lk_fence_passed(struct lk_intake *intake, struct lk_submission *s) {
    uint64_t held;
    if (s->watched_ns)
        return false; /* lk_fences_look() tells */
    if (reached(intake, s, &held)) {
        s->wait_fence = 0;
        return true;
    }
    s->watched_ns = lk_intake_now_ns();
    intake->fences_waited++;
    return false;
}

static void end_wait(struct lk_intake *intake, struct lk_submission *s) {
    s->wait_fence = 0;
    s->watched_ns = 0;
    intake->fences_waited--;
}

/* -> the wait is over, one way or the other. */
static bool look(struct lk_intake *intake, struct lk_submission *s) {
    uint64_t held, limit_ns = (uint64_t)intake->config.fence_ms * 1000000;
    if (reached(intake, s, &held)) {
        end_wait(intake, s);
        return true;
    }
    if (intake->now_ns < s->watched_ns + limit_ns)
        return false;
    lk_found(&s->refusal, LK_REASON_FENCE, held, s->wait_value);
    lk_fence_forget(intake, s->channel);
    return true;
}

bool lk_fences_look(struct lk_intake *intake) {
    bool over = false;
    for (uint32_t i = 0; i < intake->channels; i++) {
        struct lk_submission *head = intake->channel[intake->active[i]].head;
        if (head && head->watched_ns)
            over |= look(intake, head);
    }
    return over;
}

void lk_fence_forget(struct lk_intake *intake, const struct lk_channel *channel) {
    if (!channel->head || !channel->head->watched_ns)
        return;
    lk_engine_fence_forget(intake->engine, place_of(intake, channel));
    end_wait(intake, channel->head);
}

/* ---- signals ---- */

static struct lk_signal signal_of(const struct lk_submission *s) {
    return (struct lk_signal){word_of(s->channel, s->signal_fence), s->signal_value};
}

void lk_fence_with_batch(struct lk_intake *intake, struct lk_submission *s) {
    struct lk_work *work = intake->filling;
    LK_ASSERT(work && s->placed && work->batch.signal_count < LK_BATCH_SIGNALS_MAX);
    work->signals[work->batch.signal_count++] = signal_of(s);
    s->signalled = true;
}

void lk_fence_signal(struct lk_intake *intake, struct lk_submission *s) {
    if (s->signalled || s->channel->state == LK_CHANNEL_LEAVING)
        return;
    LK_ASSERT(intake->signal_count < LK_SIGNALS_MAX);
    intake->signals[intake->signal_count++] = signal_of(s);
}

void lk_fences_raise(struct lk_intake *intake) {
    uint32_t count = intake->signal_count;
    intake->signal_count = 0;
    if (count && lk_engine_signal(intake->engine, intake->signals, count))
        lk_device_broken(intake);
}
