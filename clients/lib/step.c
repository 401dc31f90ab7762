/* SPDX-License-Identifier: MIT */
/*
 * step.c - steps: what the application says, as descriptors, checked before the daemon sees them.
 *
 * The descriptor is written straight into the ring's area and checked there: the daemon does not
 * write to it, and nothing is published before it is found good.
 */
#include "internal.h"

#include <errno.h>

/* A pointer that may be NULL. */
static int offset_or_none(struct locks *l, const void *pointer, const char *what, uint32_t row,
                          uint64_t *ret) {
    *ret = LK_NONE;
    return pointer ? lk_client_offset(l, pointer, what, row, ret) : 0;
}

/* -1 is the wire's default, 0 is none; here it is the other way round, so that a zeroed step is the
 * default. */
static int32_t wire_sampled(int32_t sampled) {
    if (sampled == 0)
        return -1;
    return sampled == LOCKS_SAMPLED_NONE ? 0 : sampled;
}

static bool takes_queries(uint16_t op) {
    return op == LK_OP_DECODE || op == LK_OP_ATTEND || op == LK_OP_ATTEND_TABLE;
}

/* Values that do not travel as they are: refused here, in the caller's terms. */
static int check_translated(struct locks *l, uint16_t op, const struct locks_step *s) {
    if (s->reserved)
        return lk_client_fail(l, -EINVAL, "locks_step.reserved is %u, not 0", s->reserved);
    if (takes_queries(op) && s->sampled < 0 && s->sampled != LOCKS_SAMPLED_NONE)
        return lk_client_fail(l, -EINVAL,
                              "%s: locks_step.sampled is %d; it may be a number of pages, 0 (the "
                              "default) or LOCKS_SAMPLED_NONE, %d",
                              lk_client_op_name(op), s->sampled, LOCKS_SAMPLED_NONE);
    if (takes_queries(op) && s->scan > UINT16_MAX)
        return lk_client_fail(l, -EINVAL, "%s: scan mode %u is unknown, modes are 0 to %d",
                              lk_client_op_name(op), s->scan, LK_SCAN_TREE);
    return 0;
}

static int fill_head(struct locks *l, uint16_t op, const struct locks_step *s, uint32_t rows,
                     struct lk_step_desc *ret) {
    int r = check_translated(l, op, s);
    if (r)
        return r;
    *ret = (struct lk_step_desc){
        .pool = s->pool,
        .rows = rows,
        .budget = s->budget,
        .sampled = wire_sampled(s->sampled),
        .mass_target = s->mass_target,
        .sm_scale = s->sm_scale,
        .scan = (uint16_t)s->scan,
        .dense_below = s->dense_below,
        .sink_pages = s->sink_pages == 0               ? LK_SINK_PAGES_DEFAULT
                      : s->sink_pages == LOCKS_NO_SINK ? 0
                                                       : s->sink_pages,
        .recent_pages = s->recent_pages ? s->recent_pages : LK_RECENT_PAGES_DEFAULT,
        .results = LK_NONE,
        .timing = LK_NONE,
    };
    r = offset_or_none(l, s->results, "results", LK_ROW_WHOLE, &ret->results);
    return r ? r : offset_or_none(l, s->timing, "timing", LK_ROW_WHOLE, &ret->timing);
}

/* Pointers an operation does not use are not looked at; those it needs may not be NULL. */
static int fill_pointers(struct locks *l, uint16_t op, const struct locks_row *row, uint32_t i,
                         struct lk_row_desc *ret) {
    bool kv = op == LK_OP_APPEND || op == LK_OP_DECODE || op == LK_OP_WRITE;
    int r = 0;
    if (kv && (r = lk_client_payload(l, row->k, "k", i, &ret->k)))
        return r;
    if (kv && (r = lk_client_payload(l, row->v, "v", i, &ret->v)))
        return r;
    if (op == LK_OP_WRITE && (r = lk_client_offset(l, row->slots, "slots", i, &ret->slots)))
        return r;
    if (!takes_queries(op))
        return 0;
    if ((r = lk_client_payload(l, row->q, "q", i, &ret->q)))
        return r;
    if ((r = lk_client_payload(l, row->out, "out", i, &ret->out)))
        return r;
    ret->lse = LK_NONE;
    if (row->lse && (r = lk_client_payload(l, row->lse, "lse", i, &ret->lse)))
        return r;
    return offset_or_none(l, row->list, "list", i, &ret->list);
}

static int fill_rows(struct locks *l, uint16_t op, const struct locks_row *rows, uint32_t count,
                     struct lk_row_desc *ret) {
    for (uint32_t i = 0; i < count; i++) {
        ret[i] = (struct lk_row_desc){.handle = rows[i].sequence,
                                      .position = rows[i].position,
                                      .layer = rows[i].layer,
                                      .tokens = rows[i].tokens,
                                      .lse = LK_NONE,
                                      .list = LK_NONE,
                                      .list_pages = rows[i].list_pages,
                                      .table_set = rows[i].table_set,
                                      .table_row = rows[i].table_row};
        int r = fill_pointers(l, op, &rows[i], i, &ret[i]);
        if (r)
            return r;
    }
    return 0;
}

static int fill(struct locks *l, uint16_t op, const struct locks_step *step,
                const struct locks_row *rows, uint32_t count, uint32_t bytes,
                struct lk_step_desc *ret) {
    struct lk_refusal refusal;
    int r = fill_head(l, op, step, count, ret);
    if (!r)
        r = fill_rows(l, op, rows, count, (struct lk_row_desc *)(ret + 1));
    if (!r && lk_step_invalid(op, ret, bytes, &l->bounds, &refusal))
        r = lk_client_refused(l, op, &refusal);
    return r;
}

static int fill_fences(struct locks *l, uint16_t op, const struct locks_fences *f,
                       struct lk_sqe *sqe) {
    struct lk_refusal refusal;
    sqe->wait_fence = f->wait_fence;
    sqe->wait_value = f->wait_value;
    sqe->signal_fence = f->signal_fence;
    sqe->signal_value = f->signal_value;
    if (lk_fences_invalid(sqe, &l->bounds, &refusal))
        return lk_client_refused(l, op, &refusal);
    if ((!f->wait_fence && f->wait_value) || (!f->signal_fence && f->signal_value))
        return lk_client_fail(
            l, -EINVAL, "%s: a fence has a value, %llu, and no number", lk_client_op_name(op),
            (unsigned long long)(f->wait_fence ? f->signal_value : f->wait_value));
    return 0;
}

static int submit(struct locks *l, uint16_t op, const struct locks_step *step,
                  const struct locks_row *rows, uint32_t count, const struct locks_fences *fences,
                  uint64_t user_data, bool wait, uint32_t *ret_flight) {
    struct lk_step_desc *desc;
    if (!lk_op_is_step(op))
        return lk_client_fail(l, -EINVAL, "operation %u has no rows, it cannot be submitted so",
                              op);
    if (!step || (count && !rows))
        return lk_client_fail(l, -EINVAL, "%s: the step or its rows are NULL",
                              lk_client_op_name(op));
    if (count > LK_ROWS_MAX)
        return lk_client_refused(
            l, op, &(struct lk_refusal){LK_REASON_ROWS, LK_ROW_WHOLE, count, LK_ROWS_MAX});
    uint32_t bytes = (uint32_t)(sizeof(*desc) + count * sizeof(struct lk_row_desc));
    int r = lk_client_reserve(l, op, bytes, user_data, wait, (void **)&desc, ret_flight);
    if (r)
        return r;
    r = fill(l, op, step, rows, count, bytes, desc);
    if (!r && fences)
        r = fill_fences(l, op, fences, l->entry);
    if (r)
        lk_client_abandon(l, *ret_flight);
    else
        lk_client_publish(l);
    return r;
}

int locks_submit(struct locks *locks, uint16_t op, const struct locks_step *step,
                 const struct locks_row *rows, uint32_t count, uint64_t user_data) {
    uint32_t flight = 0;
    return submit(locks, op, step, rows, count, NULL, user_data, false, &flight);
}

int locks_submit_fenced(struct locks *locks, uint16_t op, const struct locks_step *step,
                        const struct locks_row *rows, uint32_t count,
                        const struct locks_fences *fences, uint64_t user_data) {
    uint32_t flight = 0;
    return submit(locks, op, step, rows, count, fences, user_data, false, &flight);
}

static int run(struct locks *l, uint16_t op, const struct locks_step *step,
               const struct locks_row *rows, uint32_t count) {
    uint32_t flight = 0;
    int r = submit(l, op, step, rows, count, NULL, 0, true, &flight);
    return r ? r : lk_client_complete(l, flight, NULL);
}

int locks_append(struct locks *locks, const struct locks_step *step, const struct locks_row *rows,
                 uint32_t count) {
    return run(locks, LK_OP_APPEND, step, rows, count);
}

int locks_decode(struct locks *locks, const struct locks_step *step, const struct locks_row *rows,
                 uint32_t count) {
    return run(locks, LK_OP_DECODE, step, rows, count);
}

int locks_attend(struct locks *locks, const struct locks_step *step, const struct locks_row *rows,
                 uint32_t count) {
    return run(locks, LK_OP_ATTEND, step, rows, count);
}

int locks_write(struct locks *locks, const struct locks_step *step, const struct locks_row *rows,
                uint32_t count) {
    return run(locks, LK_OP_WRITE, step, rows, count);
}

int locks_attend_table(struct locks *locks, const struct locks_step *step,
                       const struct locks_row *rows, uint32_t count) {
    return run(locks, LK_OP_ATTEND_TABLE, step, rows, count);
}
