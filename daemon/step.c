/* SPDX-License-Identifier: MIT */
/*
 * step.c - rows of sequences: APPEND, DECODE, ATTEND. See state.h.
 *
 * A step is checked as a whole before any of it is placed: handles, positions (each row against the
 * layer's planned length, and against the rows of the same step before it), quotas. Then quads are
 * promised and it cannot fail. Rows are placed one after the other, in one batch if they fit: a
 * sequence's layer once a batch, so that a batch's stages need no order among rows. A row of many
 * tokens goes in parts, one a batch: others' decode steps run in between.
 */
#include "state.h"

#include <math.h>

#include "assert.h"

/* ---- what the kernels are told ---- */

static uint32_t scan_of(const struct lk_step_desc *step, const struct lk_pool *pool,
                        uint64_t length) {
    uint32_t scan = step->scan != LK_SCAN_AUTO ? step->scan : pool->config->scan;
    if (scan == LK_SCAN_AUTO)
        scan = length > pool->nested_above ? LK_SCAN_NESTED : LK_SCAN_FULL;
    return scan;
}
_Static_assert((int)LK_SCAN_FULL == LK_FULL && (int)LK_SCAN_COARSE == LK_COARSE &&
                   (int)LK_SCAN_NESTED == LK_NESTED && (int)LK_SCAN_TREE == LK_TREE,
               "the wire's scan modes are the kernels'");
_Static_assert(sizeof(struct lk_head_result) == sizeof(struct lk_head_out) &&
                   sizeof(struct lk_page_entry) == sizeof(struct lk_page_weight),
               "kernels write results where the client reads them");

static void fill_selection(const struct lk_step_desc *step, const struct lk_pool *pool,
                           struct lk_row *row) {
    const struct lk_geometry *g = &pool->view.geometry;
    uint32_t budget = step->budget ? step->budget : pool->config->budget;
    row->budget_tokens = budget;
    row->budget_pages = budget / g->page_tokens;
    if (step->sampled >= 0)
        row->sampled = (uint32_t)step->sampled;
    else
        row->sampled = row->budget_pages >= LK_AUTO_SAMPLED_PAGES ? row->budget_pages / 2 : 0;
    row->sink_pages = step->sink_pages;
    row->recent_pages = step->recent_pages;
    row->scan = scan_of(step, pool, row->length);
    row->exact = row->tokens > 1 || row->length <= budget || row->length < step->dense_below;
    row->mass_target = step->mass_target < 1 ? step->mass_target : 0; /* 1: all the budget holds */
    row->sm_scale = step->sm_scale != 0 ? step->sm_scale : 1.0f / sqrtf((float)g->head_dim);
}

static void fill_outputs(const struct lk_submission *s, uint32_t index, const struct lk_pool *pool,
                         struct lk_row *row) {
    const struct lk_row_desc *desc = lk_step_rows(&s->desc->step) + index;
    uint8_t *arena = s->channel->open.arena;
    uint64_t results = s->desc->step.results;
    row->q = lk_payload(s->channel, desc->q);
    row->out = (float *)lk_payload(s->channel, desc->out);
    row->lse = desc->lse == LK_NONE ? NULL : (float *)lk_payload(s->channel, desc->lse);
    row->list = desc->list == LK_NONE ? NULL : (struct lk_page_weight *)(arena + desc->list);
    row->list_pages = row->list ? desc->list_pages : 0;
    if (results != LK_NONE)
        row->result = (struct lk_head_out *)(arena + results) +
                      (uint64_t)index * pool->view.geometry.kv_heads;
}

void lk_fill_row(const struct lk_submission *s, uint32_t index, const struct lk_pool *pool,
                 uint64_t length, struct lk_row *ret) {
    const struct lk_row_desc *desc = lk_step_rows(&s->desc->step) + index;
    bool appends = s->op == LK_OP_APPEND || s->op == LK_OP_DECODE;
    *ret = (struct lk_row){.pool = &pool->view, .layer = desc->layer, .length = length};
    ret->table_shift = s->op == LK_OP_ATTEND_TABLE ? 0 : 2;
    if (appends) {
        ret->append = desc->tokens;
        ret->k = lk_payload(s->channel, desc->k);
        ret->v = lk_payload(s->channel, desc->v);
    }
    if (s->op == LK_OP_APPEND)
        return;
    ret->tokens = desc->tokens;
    fill_outputs(s, index, pool, ret);
    fill_selection(&s->desc->step, pool, ret);
}

/* The most that any part takes: it is not the whole's, nor the longest part's, of needs. */
static uint64_t row_workspace(enum lk_device device, const struct lk_row *row) {
    struct lk_row part;
    if (row->tokens <= 1)
        return lk_engine_row_workspace(device, row);
    uint64_t most = 0;
    for (uint32_t from = 0; from < row->tokens;) {
        from += lk_row_part(device, row, from, &part);
        uint64_t bytes = lk_engine_row_workspace(device, &part);
        most = bytes > most ? bytes : most;
    }
    return most;
}

enum lk_reason lk_row_too_large(const struct lk_intake *intake, const struct lk_row *row,
                                struct lk_refusal *ret) {
    uint64_t page_tokens = row->pool->geometry.page_tokens;
    uint64_t budget = (uint64_t)lk_engine_budget_pages(intake->device) * page_tokens;
    uint64_t longest = (uint64_t)lk_engine_row_pages(intake->device) * page_tokens;
    if (!row->exact && row->tokens && row->budget_tokens > budget)
        return lk_found(ret, LK_REASON_BUDGET_DEVICE, row->budget_tokens, budget);
    if (row->length > longest)
        return lk_found(ret, LK_REASON_LENGTH_DEVICE, row->length, longest);
    uint64_t bytes = row_workspace(intake->device, row);
    if (bytes > intake->workspace_bytes)
        return lk_found(ret, LK_REASON_WORKSPACE, bytes, intake->workspace_bytes);
    return LK_REASON_NONE;
}

/* Products that a row of several tokens makes for each of its queries at `length` tokens. */
static uint64_t query_products(const struct lk_row *row, uint64_t length) {
    const struct lk_geometry *g = &row->pool->geometry;
    return length * g->kv_heads * g->group * g->head_dim;
}

static uint64_t batch_products(enum lk_device device) {
    return LK_BATCH_PRODUCTS * lk_engine_part_factor(device);
}

/* Where a part ends depends on the row alone, and so do the bits of its results. */
static uint32_t part_tokens(enum lk_device device, const struct lk_row *whole, uint32_t from) {
    uint64_t left = whole->tokens - from, length = whole->length - left + 1;
    uint64_t tokens = batch_products(device) / query_products(whole, length);
    if (tokens > length) /* its last query sees no more than twice what its first does */
        tokens = length;
    if (tokens < LK_PART_TOKENS_MIN)
        tokens = LK_PART_TOKENS_MIN;
    return (uint32_t)(tokens < left ? tokens : left);
}

uint32_t lk_row_part(enum lk_device device, const struct lk_row *whole, uint32_t from,
                     struct lk_row *ret) {
    const struct lk_geometry *g = &whole->pool->geometry;
    uint64_t key = (uint64_t)g->kv_heads * g->head_dim * whole->pool->layout.element_bytes;
    uint64_t heads = (uint64_t)g->kv_heads * g->group;
    *ret = *whole;
    if (whole->tokens <= 1)
        return whole->tokens ? whole->tokens : whole->append;
    LK_ASSERT(whole->tokens <= whole->length);
    uint32_t tokens = part_tokens(device, whole, from);
    ret->length = whole->length - whole->tokens + from + tokens;
    ret->tokens = tokens;
    ret->q = (const uint8_t *)whole->q + from * key * g->group;
    ret->out = whole->out + from * heads * g->head_dim;
    ret->lse = whole->lse ? whole->lse + from * heads : NULL;
    if (whole->append) {
        ret->append = tokens;
        ret->k = (const uint8_t *)whole->k + from * key;
        ret->v = (const uint8_t *)whole->v + from * key;
    }
    return tokens;
}

struct lk_row *lk_place_row(const struct lk_intake *intake, struct lk_work *work,
                            const struct lk_row *row) {
    uint64_t bytes = lk_engine_row_workspace(intake->device, row);
    uint64_t tokens = row->tokens > row->append ? row->tokens : row->append;
    uint64_t products = row->tokens > 1 ? row->tokens * query_products(row, row->length) : 0;
    if (work->batch.row_count >= intake->config.batch_rows || lk_work_full(work) ||
        bytes > intake->workspace_bytes - work->workspace_used ||
        (work->tokens && work->tokens + tokens > LK_BATCH_TOKENS) ||
        (work->products && products && work->products + products > batch_products(intake->device)))
        return NULL;
    struct lk_row *place = &work->rows[work->batch.row_count++];
    *place = *row;
    work->workspace_used += bytes;
    work->tokens += tokens;
    work->products += products;
    return place;
}

/* ---- check ---- */

/* Does an earlier row of the step append at the row's position? *ret_row: which. */
static bool repeats_row(const struct lk_step_desc *step, uint32_t index, uint32_t *ret_row) {
    const struct lk_row_desc *rows = lk_step_rows(step), *desc = rows + index;
    for (uint32_t i = 0; i < index; i++)
        if (rows[i].handle == desc->handle && rows[i].layer == desc->layer &&
            desc->position >= rows[i].position &&
            desc->position - rows[i].position < rows[i].tokens) {
            *ret_row = i;
            return true;
        }
    return false;
}

/* A row goes on where the layer ends: `stands` tokens, and after the rows of the step before it
 * `length`. Only what stands was done before. */
static enum lk_reason position_invalid(const struct lk_submission *s, uint32_t index,
                                       uint64_t stands, uint64_t length, struct lk_refusal *ret) {
    const struct lk_row_desc *desc = lk_step_rows(&s->desc->step) + index;
    uint32_t row;
    if (desc->position == length)
        return LK_REASON_NONE;
    if (s->op == LK_OP_ATTEND)
        return lk_found(ret, LK_REASON_POSITION, desc->position, length);
    if (desc->position < stands && desc->tokens <= stands - desc->position)
        return lk_found(ret, LK_REASON_REPLAYED, desc->position, stands);
    if (repeats_row(&s->desc->step, index, &row))
        return lk_found(ret, LK_REASON_ROW_REPEATS, desc->position, row);
    return lk_found(ret, LK_REASON_POSITION, desc->position, length);
}

static enum lk_reason row_unfit(struct lk_intake *intake, const struct lk_submission *s,
                                uint32_t index, uint64_t *need, struct lk_refusal *ret) {
    const struct lk_step_desc *step = &s->desc->step;
    const struct lk_row_desc *desc = lk_step_rows(step) + index;
    struct lk_sequence *sequence;
    struct lk_row row;
    enum lk_reason reason =
        lk_find_sequence(intake, s->channel, desc->handle, step->pool, &sequence, ret);
    if (reason)
        return reason;
    struct lk_sequence_layer *layer = &sequence->layer[desc->layer];
    uint64_t length = layer->check_serial == s->serial ? layer->check_length : layer->planned;
    uint64_t end = length + (s->op == LK_OP_ATTEND ? 0 : desc->tokens);
    reason = position_invalid(s, index, layer->planned, length, ret);
    if (reason)
        return reason;
    if (end > sequence->pool->max_tokens)
        return lk_found(ret, LK_REASON_LENGTH_MAX, end, sequence->pool->max_tokens);
    layer->check_serial = s->serial;
    layer->check_length = end;
    if (end > length)
        *need += lk_sequence_need(sequence, s->serial, length, end);
    intake->chores += desc->tokens / LK_PART_TOKENS_MIN; /* a look at each part */
    lk_fill_row(s, index, sequence->pool, end, &row);
    return lk_row_too_large(intake, &row, ret);
}

/* Nothing that rows are checked against changes while the submission is the head of its queue. ->
 * WAIT: more are to be checked in the next tick; STARTED: it is refused. */
static enum lk_run check_rows(struct lk_intake *intake, struct lk_submission *s) {
    const struct lk_step_desc *step = &s->desc->step;
    struct lk_pool *pool = &intake->pool[step->pool];
    struct lk_refusal refusal;
    if (s->checked == 0)
        s->serial = ++intake->submission_serial;
    for (; s->checked < step->rows; s->checked++) {
        if (!lk_chore(intake, 1))
            return LK_RUN_WAIT;
        if (row_unfit(intake, s, s->checked, &s->need, &refusal)) {
            refusal.row = s->checked;
            return lk_refuse(intake, s, &refusal);
        }
    }
    if (lk_channel_over_quota(s->channel, pool, s->need, &refusal))
        return lk_refuse(intake, s, &refusal);
    lk_channel_promise(s, pool, s->need);
    s->started = true;
    return LK_RUN_TURN;
}

/* ---- place ---- */

/* Quads come out of what was promised; they stay charged. */
static void use_promise(struct lk_submission *s, uint32_t quads) {
    LK_ASSERT(quads <= s->promised);
    s->promised -= quads;
    s->pool->promised -= quads;
}

/* Gives the row's shared quads copies of their own. -> false: more remain than this batch can copy,
 * or the table is in use. */
static bool copy_shared(struct lk_work *work, struct lk_submission *s, struct lk_sequence *sequence,
                        uint64_t position, uint64_t end) {
    uint64_t tokens = lk_pool_quad_tokens(sequence->pool), at = 0;
    uint64_t stop = (end + tokens - 1) / tokens;
    uint32_t most = sequence->pool->view.geometry.layers * LK_QUAD_PAGES;
    if (!lk_sequence_shared(sequence, position / tokens, stop, &at))
        return true;
    if (sequence->in_flight)
        return false;
    do {
        if (work->batch.copy_count + most > LK_BATCH_COPIES)
            return false;
        struct lk_batch_copy *shared = &work->shared[work->shared_count++];
        work->batch.copy_count +=
            lk_sequence_copy(sequence, at, work->copies + work->batch.copy_count, &shared->quad);
        shared->sequence = sequence;
        sequence->in_flight++;
        sequence->channel->held++;
        use_promise(s, 1);
    } while (lk_sequence_shared(sequence, position / tokens, stop, &at));
    return true;
}

/* What ends the placing of an append: table, lengths, builds. */
static void commit_append(struct lk_work *work, struct lk_submission *s,
                          struct lk_sequence *sequence, const struct lk_row *row) {
    uint64_t end = row->length;
    use_promise(s, lk_sequence_grow(sequence, end));
    lk_sequence_append(sequence, row->layer, end);
    work->batch.build_after_count += lk_sequence_builds(
        sequence, row->layer, end - row->append, end, work->after + work->batch.build_after_count);
}

/* Places the next part of the submission's next row. */
static bool place(struct lk_intake *intake, struct lk_work *work, struct lk_submission *s) {
    const struct lk_row_desc *desc = lk_step_rows(&s->desc->step) + s->next_row;
    uint64_t end = desc->position + (s->op == LK_OP_ATTEND ? 0 : desc->tokens);
    struct lk_sequence *sequence;
    struct lk_refusal refusal;
    struct lk_row whole, row;
    enum lk_reason reason =
        lk_find_sequence(intake, s->channel, desc->handle, s->desc->step.pool, &sequence, &refusal);
    LK_ASSERT(reason == LK_REASON_NONE);
    lk_fill_row(s, s->next_row, sequence->pool, end, &whole);
    uint32_t tokens = lk_row_part(intake->device, &whole, s->next_token, &row);
    struct lk_sequence_layer *layer = &sequence->layer[desc->layer];
    uint64_t closes = row.append / sequence->pool->view.geometry.page_tokens + 1;
    if (layer->batch_serial == work->serial ||
        work->batch.build_after_count + closes > LK_BATCH_BUILDS)
        return false;
    if (row.append && !copy_shared(work, s, sequence, row.length - row.append, row.length))
        return false;
    row.table = sequence->table;
    struct lk_row *placed = lk_place_row(intake, work, &row);
    if (!placed)
        return false;
    if (row.append)
        commit_append(work, s, sequence, placed);
    layer->batch_serial = work->serial;
    sequence->in_flight++;
    struct lk_item *item = lk_work_item(work, s);
    item->sequence = sequence;
    item->row = placed;
    lk_row_placed(s, item, tokens);
    return true;
}

void lk_row_placed(struct lk_submission *s, struct lk_item *item, uint32_t tokens) {
    s->next_token += tokens;
    item->part = s->next_token < lk_step_rows(&s->desc->step)[s->next_row].tokens;
    if (!item->part) {
        s->next_row++;
        s->next_token = 0;
    }
}

enum lk_run lk_place_rows(struct lk_intake *intake, struct lk_submission *s,
                          lk_place_fn *place_next) {
    struct lk_work *work = lk_filling(intake);
    if (!work)
        return LK_RUN_WAIT;
    while (s->next_row < s->desc->step.rows) {
        if (!lk_channel_has_turn(s->channel))
            return LK_RUN_TURN;
        if (!place_next(intake, work, s))
            return LK_RUN_WAIT;
    }
    return LK_RUN_STARTED;
}

enum lk_run lk_run_rows(struct lk_intake *intake, struct lk_submission *s) {
    enum lk_run run = s->started ? LK_RUN_TURN : check_rows(intake, s);
    if (run != LK_RUN_TURN)
        return run;
    if (s->desc->step.rows == 0)
        return lk_answer(intake, s, 0);
    run = lk_place_rows(intake, s, place);
    if (run != LK_RUN_STARTED)
        return run;
    lk_channel_release(s);
    return lk_started(intake, s);
}
