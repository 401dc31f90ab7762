/* SPDX-License-Identifier: MIT */
/*
 * finish.c - what follows from a batch's marks. See state.h.
 *
 * FENCED: results stand, so lengths and marks of the ledger rise, then completions go out. DONE:
 * nothing names the batch's pages any more, so summaries count, references of copied quads go back
 * and what waited for its sequence or lease may go on. BROKEN: the process ends at once. What it
 * did not answer stays unanswered: clients see their connection close, and never a wrong result.
 */
#include "state.h"

#include <sysexits.h>
#include <unistd.h>

#include "assert.h"
#include "log.h"
#include "notify.h"

/* ---- FENCED ---- */

static void add_times(struct lk_submission *s, const struct lk_work *work) {
    const uint64_t *phase = work->batch.phase_ns;
    struct lk_step_result *r = &s->result;
    if (s->batch_serial == work->serial)
        return;
    if (s->batch_serial == 0)
        r->queue_ns = work->launched_ns - s->taken_ns;
    s->batch_serial = work->serial;
    r->append_ns += phase[LK_PHASE_COPY] + phase[LK_PHASE_APPEND];
    r->score_ns += phase[LK_PHASE_SCORE];
    r->select_ns += phase[LK_PHASE_SELECT];
    r->attend_ns += phase[LK_PHASE_ATTEND];
    r->batch_rows = work->batch.row_count;
    r->batch_bucket = work->batch.bucket;
}

static void add_row(struct lk_intake *intake, struct lk_submission *s, const struct lk_item *item) {
    const struct lk_row *row = item->row;
    const struct lk_geometry *g = &row->pool->geometry;
    struct lk_step_result *r = &s->result;
    intake->rows += !item->part;
    if (row->tokens == 0)
        return;
    uint64_t dense = row->length * g->kv_heads * 2 * g->head_dim * row->pool->layout.element_bytes;
    r->score_bytes += row->score_bytes;
    r->select_bytes += row->select_bytes;
    r->attend_bytes += row->attend_bytes;
    r->dense_bytes += dense;
    intake->score_bytes += row->score_bytes;
    intake->select_bytes += row->select_bytes;
    intake->attend_bytes += row->attend_bytes;
    intake->dense_bytes += dense;
    intake->rows_exact += row->exact && !item->part;
    intake->rows_sparse += !row->exact;
}

static void fence_lease(const struct lk_work *work, const struct lk_item *item) {
    if (item->write)
        lk_lease_written(item->lease->pool, item->write);
    for (uint32_t i = 0; i < item->copies; i++)
        lk_lease_copied(item->lease->pool, &work->copies[item->copy + i]);
    if (!item->row)
        item->lease->unfenced--;
}

static void fence_item(struct lk_intake *intake, const struct lk_work *work, struct lk_item *item) {
    struct lk_submission *s = item->submission;
    if (item->sequence && item->row->append && !item->part)
        item->sequence->lengths[item->row->layer] = item->row->length;
    if (item->lease)
        fence_lease(work, item);
    if (item->row)
        add_row(intake, s, item);
    add_times(s, work);
    s->placed--;
    s->done += (item->row || item->write) && !item->part;
    if (s->placed == 0 && !s->waits)
        lk_submission_over(intake, s, 0);
    item->submission = NULL;
}

static void fence(struct lk_intake *intake, struct lk_work *work) {
    intake->now_ns = lk_intake_now_ns();
    intake->unfenced--;
    for (uint32_t i = 0; i < work->item_count; i++)
        fence_item(intake, work, &work->items[i]);
}

/* ---- DONE ---- */

static void let_go(struct lk_item *item) {
    item->channel->held--;
    if (item->sequence)
        item->sequence->in_flight--;
    if (!item->lease)
        return;
    item->lease->in_flight--;
    if (item->row)
        lk_lease_set(item->lease, item->set)->in_flight--;
}

static void done(struct lk_intake *intake, struct lk_work *work) {
    for (uint32_t i = 0; i < work->batch.build_after_count; i++)
        lk_sequence_built(&work->after[i]);
    for (uint32_t i = 0; i < work->shared_count; i++) {
        struct lk_sequence *sequence = work->shared[i].sequence;
        if (lk_sequence_copied(sequence->pool, work->shared[i].quad))
            lk_channel_charge(sequence->channel, sequence->pool, -1);
        sequence->in_flight--;
        sequence->channel->held--;
    }
    for (uint32_t i = 0; i < work->item_count; i++)
        let_go(&work->items[i]);
    work->in_flight = false;
    intake->in_flight--;
}

void lk_device_broken(const struct lk_intake *intake) {
    const char *trouble = lk_engine_trouble(intake->engine);
    lk_log(LK_LOG_ERROR, "the device is broken and the daemon ends (batches unanswered: %u): %s",
           intake->in_flight, trouble);
    lk_notify_broken(trouble);
    _exit(EX_SOFTWARE);
}

bool lk_finish_batches(struct lk_intake *intake) {
    struct lk_batch *batch;
    enum lk_mark mark;
    bool any = false;
    while (intake->in_flight && (mark = lk_engine_poll(intake->engine, &batch)) != LK_MARK_NONE) {
        if (mark == LK_MARK_BROKEN)
            lk_device_broken(intake);
        if (mark == LK_MARK_FENCED)
            fence(intake, batch->owner);
        else
            done(intake, batch->owner);
        any = true;
    }
    return any;
}

/* ---- channels that go ---- */

bool lk_reap(struct lk_intake *intake, struct lk_channel *channel) {
    if (channel->state != LK_CHANNEL_LEAVING || channel->held || channel->running)
        return false;
    while (channel->sequences && lk_chore(intake, channel->sequences->slot->quads))
        lk_release_sequence(intake, channel->sequences);
    while (channel->leases && lk_release_lease(intake, channel->leases))
        ;
    if (channel->sequences || channel->leases)
        return false;
    LK_ASSERT(lk_channel_quads(channel) == 0 && channel->queued == 0);
    channel->user->channels--;
    channel->state = LK_CHANNEL_FREE;
    return true;
}
