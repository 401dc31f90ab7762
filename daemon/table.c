/* SPDX-License-Identifier: MIT */
/*
 * table.c - what is done with leases: TABLES, WRITE, ATTEND_TABLE, COPY_PAGES, INVALIDATE. See
 * state.h.
 *
 * All are checked as a whole before any part is placed: refused, they have changed nothing. Slots
 * of a WRITE are too many to hold at once. They are read for the check, and once more, and checked
 * once more, when their row is placed: a client that changes them between may have rows written and
 * a later one refused; `rows` of the completion says how many. Lists are read twice as well.
 */
#include "state.h"

#include <string.h>

#include "assert.h"
#include "memory.h"

/* ---- tables ---- */

/* Whether the machine has memory for `bytes` more of tables. */
static bool tables_fit(struct lk_intake *intake, uint64_t bytes) {
    intake->tables.taken += bytes;
    if (intake->tables.taken <= intake->tables.every)
        return true;
    bool fit = lk_memory_available() > intake->tables.spare;
    if (fit)
        intake->tables.taken = 0;
    return fit;
}

enum lk_run lk_run_tables(struct lk_intake *intake, struct lk_submission *s) {
    const struct lk_tables_desc *desc = &s->desc->tables;
    struct lk_bounds bounds = {.arena_bytes = s->channel->open.arena_bytes};
    struct lk_refusal refusal;
    struct lk_lease *lease;
    if (desc->handle == 0) { /* as any zero handle, before it is looked up */
        lk_found(&refusal, LK_REASON_HANDLE_NONE, 0, 0);
        return lk_refuse(intake, s, &refusal);
    }
    if (lk_find_lease(intake, s->channel, desc->handle, UINT32_MAX, &lease, &refusal) ||
        lk_tables_invalid(desc, s->desc_bytes, &bounds, lease->pool->view.geometry.page_tokens,
                          &refusal))
        return lk_refuse(intake, s, &refusal);
    if (lk_lease_set(lease, desc->set)->in_flight)
        return LK_RUN_WAIT;
    for (uint32_t i; (i = s->next_row) < desc->rows; s->next_row++) {
        const struct lk_table_desc *table = &lk_tables_rows(desc)[i];
        if (!lk_chore(intake, table->pages))
            return LK_RUN_WAIT;
        if (!tables_fit(intake, table->pages * sizeof(uint32_t)))
            lk_found(&refusal, LK_REASON_TABLE_MEMORY, table->pages * sizeof(uint32_t), 0);
        else if (!lk_lease_copy_table(lease, i, table, s->channel->open.arena, &refusal))
            continue;
        refusal.row = i;
        return lk_refuse(intake, s, &refusal);
    }
    lk_lease_replace(lease, desc->set, desc->rows);
    return lk_answer(intake, s, 0);
}

/* ---- attend ---- */

static void fill_table_row(const struct lk_submission *s, uint32_t index,
                           const struct lk_lease *lease, struct lk_row *ret) {
    const struct lk_row_desc *desc = lk_step_rows(&s->desc->step) + index;
    uint64_t length = lk_lease_row(lease, desc)->length;
    lk_fill_row(s, index, lease->pool, length, ret);
    ret->table = lk_lease_table(lease, desc->table_set, desc->table_row);
    if (!ret->exact && ret->scan == LK_TREE && !lk_lease_has_supers(lease, desc))
        ret->scan = LK_NESTED;
}

static enum lk_reason attend_unfit(struct lk_intake *intake, const struct lk_submission *s,
                                   uint32_t index, struct lk_refusal *ret) {
    const struct lk_row_desc *desc = lk_step_rows(&s->desc->step) + index;
    struct lk_lease *lease;
    struct lk_row row;
    enum lk_reason reason =
        lk_find_lease(intake, s->channel, desc->handle, s->desc->step.pool, &lease, ret);
    if (!reason)
        reason = lk_lease_unfit(lease, desc, ret);
    if (reason)
        return reason;
    intake->chores += lk_lease_row(lease, desc)->pages;
    fill_table_row(s, index, lease, &row);
    return lk_row_too_large(intake, &row, ret);
}

/* Nothing that rows are checked against changes while the submission is the head of its queue. ->
 * WAIT: more are to be checked in the next tick; STARTED: it is refused. */
static enum lk_run check_rows(struct lk_intake *intake, struct lk_submission *s,
                              enum lk_reason unfit(struct lk_intake *intake,
                                                   const struct lk_submission *s, uint32_t index,
                                                   struct lk_refusal *ret)) {
    struct lk_refusal refusal;
    for (; s->checked < s->desc->step.rows; s->checked++) {
        if (!lk_chore(intake, 1))
            return LK_RUN_WAIT;
        if (unfit(intake, s, s->checked, &refusal)) {
            refusal.row = s->checked;
            return lk_refuse(intake, s, &refusal);
        }
    }
    s->started = true;
    return LK_RUN_TURN;
}

/* Places the next part of the submission's next row. */
static bool place_attend(struct lk_intake *intake, struct lk_work *work, struct lk_submission *s) {
    const struct lk_row_desc *desc = lk_step_rows(&s->desc->step) + s->next_row;
    struct lk_refusal refusal;
    struct lk_lease *lease;
    struct lk_row whole, row;
    enum lk_reason reason =
        lk_find_lease(intake, s->channel, desc->handle, s->desc->step.pool, &lease, &refusal);
    LK_ASSERT(reason == LK_REASON_NONE);
    if (!lk_lease_may(lease, work->serial, LK_STAGE_ATTEND, desc->layer))
        return false;
    fill_table_row(s, s->next_row, lease, &whole);
    uint32_t tokens = lk_row_part(intake->device, &whole, s->next_token, &row);
    struct lk_row *placed = lk_place_row(intake, work, &row);
    if (!placed)
        return false;
    lk_lease_placed(lease, work->serial, LK_STAGE_ATTEND, desc->layer);
    lk_lease_set(lease, desc->table_set)->in_flight++;
    struct lk_item *item = lk_work_item(work, s);
    item->lease = lease;
    item->row = placed;
    item->set = desc->table_set;
    lk_row_placed(s, item, tokens);
    return true;
}

enum lk_run lk_run_attend_table(struct lk_intake *intake, struct lk_submission *s) {
    enum lk_run run = s->started ? LK_RUN_TURN : check_rows(intake, s, attend_unfit);
    if (run != LK_RUN_TURN)
        return run;
    if (s->desc->step.rows == 0)
        return lk_answer(intake, s, 0);
    run = lk_place_rows(intake, s, place_attend);
    if (run != LK_RUN_STARTED)
        return run;
    return lk_started(intake, s);
}

/* ---- write ---- */

static bool write_fits(const struct lk_work *work, uint32_t tokens) {
    return !lk_work_full(work) && work->batch.write_count < LK_BATCH_WRITES &&
           work->slots_used + tokens <= LK_BATCH_SLOTS &&
           work->batch.build_before_count + tokens <= LK_BATCH_BUILDS;
}

/* -> false: not in this batch. ret->reason: it is refused. */
static bool place_write(struct lk_intake *intake, struct lk_work *work, struct lk_submission *s,
                        uint32_t index, struct lk_refusal *ret) {
    const struct lk_row_desc *desc = lk_step_rows(&s->desc->step) + index;
    uint8_t *arena = s->channel->open.arena;
    uint64_t *slots = work->slots + work->slots_used;
    struct lk_lease *lease;
    if (lk_find_lease(intake, s->channel, desc->handle, s->desc->step.pool, &lease, ret))
        return true;
    if (!write_fits(work, desc->tokens) ||
        !lk_lease_may(lease, work->serial, LK_STAGE_WRITE, desc->layer))
        return false;
    if (lk_lease_write(lease, desc->layer, (const int64_t *)(arena + desc->slots), desc->tokens,
                       slots, intake->undo, ret))
        return true;
    lk_lease_placed(lease, work->serial, LK_STAGE_WRITE, desc->layer);
    struct lk_write *write = &work->writes[work->batch.write_count++];
    *write = (struct lk_write){.pool = &lease->pool->view,
                               .layer = desc->layer,
                               .tokens = desc->tokens,
                               .k = lk_payload(s->channel, desc->k),
                               .v = lk_payload(s->channel, desc->v),
                               .slots = slots};
    work->slots_used += desc->tokens;
    work->batch.build_before_count += lk_lease_builds(
        lease, desc->layer, slots, desc->tokens, work->before + work->batch.build_before_count);
    struct lk_item *item = lk_work_item(work, s);
    item->lease = lease;
    item->write = write;
    return true;
}

static enum lk_reason write_unfit(struct lk_intake *intake, const struct lk_submission *s,
                                  uint32_t index, struct lk_refusal *ret) {
    const struct lk_row_desc *desc = lk_step_rows(&s->desc->step) + index;
    const int64_t *slots = (const int64_t *)(s->channel->open.arena + desc->slots);
    struct lk_lease *lease;
    intake->chores += desc->tokens;
    enum lk_reason reason =
        lk_find_lease(intake, s->channel, desc->handle, s->desc->step.pool, &lease, ret);
    return reason ? reason
                  : lk_lease_write_invalid(lease, s->serial, desc->layer, slots, desc->tokens, ret);
}

static enum lk_run check_write(struct lk_intake *intake, struct lk_submission *s) {
    if (s->checked == 0)
        s->serial = ++intake->submission_serial;
    if (s->desc->step.rows == 1)
        s->checked = 1; /* a lone row is checked when it is placed */
    return check_rows(intake, s, write_unfit);
}

enum lk_run lk_run_write(struct lk_intake *intake, struct lk_submission *s) {
    uint32_t rows = s->desc->step.rows;
    struct lk_refusal refusal = {0};
    enum lk_run run = s->started ? LK_RUN_TURN : check_write(intake, s);
    if (run != LK_RUN_TURN)
        return run;
    if (rows == 0)
        return lk_answer(intake, s, 0);
    struct lk_work *work = lk_filling(intake);
    if (!work)
        return LK_RUN_WAIT;
    for (; s->next_row < rows; s->next_row++) {
        if (!lk_channel_has_turn(s->channel))
            return LK_RUN_TURN;
        if (!place_write(intake, work, s, s->next_row, &refusal))
            return LK_RUN_WAIT;
        if (refusal.reason) {
            refusal.row = s->next_row;
            return lk_refuse(intake, s, &refusal);
        }
    }
    return lk_started(intake, s);
}

/* ---- lists ---- */

/* Ids are read when they are checked, and again when their turn comes: a chain of copies takes a
 * batch for each pair, and nobody waits for room to hold its list. */
static struct lk_pair read_pair(const struct lk_submission *s, uint32_t index) {
    const uint32_t *list = (const uint32_t *)(s->channel->open.arena + s->desc->object.list);
    return (struct lk_pair){__atomic_load_n(&list[(size_t)2 * index], __ATOMIC_RELAXED),
                            __atomic_load_n(&list[(size_t)2 * index + 1], __ATOMIC_RELAXED)};
}

/* As check_rows(). The lease has no copies in the batch that is being filled. */
static enum lk_run check_copies(struct lk_intake *intake, struct lk_submission *s,
                                struct lk_lease *lease) {
    struct lk_refusal refusal;
    if (s->checked == 0)
        s->serial = ++intake->submission_serial;
    for (; s->checked < s->desc->object.count; s->checked++) {
        if (!lk_chore(intake, 1))
            return LK_RUN_WAIT;
        if (lk_lease_copy_invalid(lease, s->serial, read_pair(s, s->checked), &refusal))
            return lk_refuse(intake, s, &refusal);
    }
    s->started = true;
    return LK_RUN_TURN;
}

/* As many pairs as fit. -> WAIT: there are more; STARTED: all are placed; TURN: the client has
 * changed its list, and the rest of it is refused. */
static enum lk_run place_pairs(struct lk_intake *intake, struct lk_work *work,
                               struct lk_submission *s, struct lk_lease *lease,
                               struct lk_refusal *ret) {
    uint32_t layers = lease->pool->view.geometry.layers;
    for (; s->next_row < s->desc->object.count; s->next_row++) {
        struct lk_pair pair = read_pair(s, s->next_row);
        if (lk_lease_pair_invalid(lease, pair, ret))
            return LK_RUN_TURN;
        if (work->batch.copy_count + layers > LK_BATCH_COPIES ||
            !lk_lease_may_copy(lease, work->serial, pair) || !lk_chore(intake, layers))
            return LK_RUN_WAIT;
        work->batch.copy_count +=
            lk_lease_copy(lease, work->serial, pair, work->copies + work->batch.copy_count);
    }
    return LK_RUN_STARTED;
}

static enum lk_run place_copies(struct lk_intake *intake, struct lk_work *work,
                                struct lk_submission *s, struct lk_lease *lease) {
    uint32_t first = work->batch.copy_count;
    struct lk_refusal refusal;
    lk_lease_placed(lease, work->serial, LK_STAGE_COPY, 0);
    enum lk_run run = place_pairs(intake, work, s, lease, &refusal);
    struct lk_item *item = lk_work_item(work, s);
    item->lease = lease;
    item->copy = first;
    item->copies = work->batch.copy_count - first;
    work->batch.build_before_count += lk_lease_copy_builds(
        lease, work->copies + first, item->copies, work->before + work->batch.build_before_count);
    if (run == LK_RUN_TURN)
        return lk_refuse(intake, s, &refusal);
    return run == LK_RUN_STARTED ? lk_started(intake, s) : run;
}

enum lk_run lk_run_copy_pages(struct lk_intake *intake, struct lk_submission *s) {
    const struct lk_object_desc *desc = &s->desc->object;
    struct lk_refusal refusal;
    struct lk_lease *lease;
    if (lk_find_lease(intake, s->channel, desc->handle, UINT32_MAX, &lease, &refusal))
        return lk_refuse(intake, s, &refusal);
    struct lk_work *work = lk_filling(intake);
    if (!work || lk_work_full(work) ||
        work->batch.build_before_count + LK_BATCH_COPIES > LK_BATCH_BUILDS ||
        work->batch.copy_count + lease->pool->view.geometry.layers > LK_BATCH_COPIES ||
        !lk_lease_may(lease, work->serial, LK_STAGE_COPY, 0))
        return LK_RUN_WAIT;
    enum lk_run run = s->started ? LK_RUN_TURN : check_copies(intake, s, lease);
    if (run != LK_RUN_TURN)
        return run;
    if (!lk_chore(intake, 0)) /* or a batch with nothing in it would be launched */
        return LK_RUN_WAIT;
    return place_copies(intake, work, s, lease);
}

/* Ids are read again when their turn comes: whoever changes them meanwhile has others of its own
 * pages invalidated, or none. */
enum lk_run lk_run_invalidate(struct lk_intake *intake, struct lk_submission *s) {
    const struct lk_object_desc *desc = &s->desc->object;
    const uint32_t *ids = (const uint32_t *)(s->channel->open.arena + desc->list);
    struct lk_refusal refusal;
    struct lk_lease *lease;
    if (lk_find_lease(intake, s->channel, desc->handle, UINT32_MAX, &lease, &refusal))
        return lk_refuse(intake, s, &refusal);
    if (!s->started && !lk_chore(intake, desc->count))
        return LK_RUN_WAIT;
    for (uint32_t i = 0; i < desc->count && !s->started; i++) {
        uint32_t id = __atomic_load_n(&ids[i], __ATOMIC_RELAXED);
        if (id >= lease->pages) {
            lk_found(&refusal, LK_REASON_TABLE_PAGE, id, lease->pages);
            return lk_refuse(intake, s, &refusal);
        }
    }
    s->started = true;
    for (; s->next_row < desc->count; s->next_row++) {
        uint32_t id = __atomic_load_n(&ids[s->next_row], __ATOMIC_RELAXED);
        if (!lk_chore(intake, lease->pool->view.geometry.layers))
            return LK_RUN_WAIT;
        if (id < lease->pages)
            lk_lease_invalidate(lease, id);
    }
    return lk_answer(intake, s, 0);
}
