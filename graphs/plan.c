/* SPDX-License-Identifier: MIT */
/*
 * plan.c - the stages of a batch on the CPU. See plan.h; the order is kernels.h's.
 *
 * Two kinds of stage: over items (copies, writes, builds, a row's appended tokens), where a task is
 * an item and a KV head; and over rows, where each row says how many tasks it has.
 * Invariant: tasks of a stage touch disjoint memory, so any worker may run any of them at any time.
 */
#include "plan.h"

#include <errno.h>
#include <stdlib.h>

#include "../kernels/cpu/cpu.h"

struct stage {
    enum lk_phase phase;
    /* Over items: how many, whose pool, what to do. */
    uint32_t (*items)(const struct lk_batch *batch);
    const struct lk_pool_view *(*pool)(const struct lk_batch *batch, uint32_t item);
    void (*run_item)(const struct lk_batch *batch, uint32_t item, uint32_t head,
                     struct lk_scratch *scratch);
    /* Over rows. */
    uint32_t (*tasks)(const struct lk_row *row);
    void (*run_row)(struct lk_row *row, uint32_t task);
};

static uint32_t copies(const struct lk_batch *batch) {
    return batch->copy_count;
}
static const struct lk_pool_view *copy_pool(const struct lk_batch *batch, uint32_t item) {
    return batch->copies[item].pool;
}
static void copy(const struct lk_batch *batch, uint32_t item, uint32_t head,
                 struct lk_scratch *scratch) {
    (void)scratch;
    lk_cpu_copy(&batch->copies[item], head);
}

static uint32_t writes(const struct lk_batch *batch) {
    return batch->write_count;
}
static const struct lk_pool_view *write_pool(const struct lk_batch *batch, uint32_t item) {
    return batch->writes[item].pool;
}
static void write_item(const struct lk_batch *batch, uint32_t item, uint32_t head,
                       struct lk_scratch *scratch) {
    (void)scratch;
    lk_cpu_write(&batch->writes[item], head);
}

static uint32_t appends(const struct lk_batch *batch) {
    for (uint32_t i = 0; i < batch->row_count; i++)
        if (batch->rows[i].append)
            return batch->row_count;
    return 0;
}
static const struct lk_pool_view *append_pool(const struct lk_batch *batch, uint32_t item) {
    return batch->rows[item].pool;
}
static void append(const struct lk_batch *batch, uint32_t item, uint32_t head,
                   struct lk_scratch *scratch) {
    (void)scratch;
    if (batch->rows[item].append)
        lk_cpu_append(&batch->rows[item], head);
}

static void build(const struct lk_build *build, uint32_t head, struct lk_scratch *scratch) {
    lk_cpu_build(build->pool, build->layer, build->page, head, scratch);
    if (build->quad)
        lk_cpu_build_super(build->pool, build->layer, build->page / LK_QUAD_PAGES, head, scratch);
}

static uint32_t builds_before(const struct lk_batch *batch) {
    return batch->build_before_count;
}
static const struct lk_pool_view *before_pool(const struct lk_batch *batch, uint32_t item) {
    return batch->builds_before[item].pool;
}
static void build_before(const struct lk_batch *batch, uint32_t item, uint32_t head,
                         struct lk_scratch *scratch) {
    build(&batch->builds_before[item], head, scratch);
}

static uint32_t builds_after(const struct lk_batch *batch) {
    return batch->build_after_count;
}
static const struct lk_pool_view *after_pool(const struct lk_batch *batch, uint32_t item) {
    return batch->builds_after[item].pool;
}
static void build_after(const struct lk_batch *batch, uint32_t item, uint32_t head,
                        struct lk_scratch *scratch) {
    build(&batch->builds_after[item], head, scratch);
}

#define ITEMS(of, items_, pool_, run_)                                                             \
    { .phase = (of), .items = (items_), .pool = (pool_), .run_item = (run_) }
#define ROWS(of, name)                                                                             \
    { .phase = (of), .tasks = lk_cpu_##name##_tasks, .run_row = lk_cpu_##name##_task }

static const struct stage stages[] = {
    ITEMS(LK_PHASE_COPY, copies, copy_pool, copy),
    ITEMS(LK_PHASE_APPEND, writes, write_pool, write_item),
    ITEMS(LK_PHASE_APPEND, appends, append_pool, append),
    ITEMS(LK_PHASE_BUILD, builds_before, before_pool, build_before),
    ROWS(LK_PHASE_SCORE, prepare),
    ROWS(LK_PHASE_SCORE, scan),
    ROWS(LK_PHASE_SELECT, prune),
    ROWS(LK_PHASE_SCORE, rescan),
    ROWS(LK_PHASE_SELECT, select),
    ROWS(LK_PHASE_ATTEND, attend),
    ROWS(LK_PHASE_ATTEND, merge),
    /* the fence */
    ITEMS(LK_PHASE_BUILD, builds_after, after_pool, build_after),
};
#define STAGES (sizeof stages / sizeof *stages)

uint32_t lk_plan_stages(void) {
    return STAGES;
}

uint32_t lk_plan_fence(void) {
    return STAGES - 1;
}

enum lk_phase lk_plan_phase(uint32_t stage) {
    return stages[stage].phase;
}

int lk_plan_open(struct lk_plan *plan, uint32_t bucket) {
    uint32_t *first = calloc(bucket + 1, sizeof *first);

    if (!first)
        return -ENOMEM;
    *plan = (struct lk_plan){.bucket = bucket, .first = first};
    return 0;
}

void lk_plan_close(struct lk_plan *plan) {
    free(plan->first);
    plan->first = NULL;
}

static uint32_t layout_items(struct lk_plan *plan, const struct stage *s,
                             const struct lk_batch *batch) {
    uint32_t items = s->items(batch);

    plan->heads = 0;
    for (uint32_t i = 0; i < items; i++) {
        uint32_t heads = s->pool(batch, i)->geometry.kv_heads;
        plan->heads = heads > plan->heads ? heads : plan->heads;
    }
    return items * plan->heads;
}

static uint32_t layout_rows(struct lk_plan *plan, const struct stage *s,
                            const struct lk_batch *batch) {
    uint32_t tasks = 0;

    for (uint32_t i = 0; i < batch->row_count; i++) {
        plan->first[i] = tasks;
        tasks += s->tasks(&batch->rows[i]);
    }
    plan->first[batch->row_count] = tasks;
    return tasks;
}

uint32_t lk_plan_layout(struct lk_plan *plan, uint32_t stage, const struct lk_batch *batch) {
    const struct stage *s = &stages[stage];

    return s->items ? layout_items(plan, s, batch) : layout_rows(plan, s, batch);
}

/* The row that task `task` belongs to: the last one that begins no later. */
static uint32_t row_of(const struct lk_plan *plan, uint32_t rows, uint32_t task) {
    uint32_t low = 0, high = rows;

    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (plan->first[middle] <= task)
            low = middle;
        else
            high = middle;
    }
    return low;
}

void lk_plan_run(const struct lk_plan *plan, uint32_t stage, const struct lk_batch *batch,
                 uint32_t task, struct lk_scratch *scratch) {
    const struct stage *s = &stages[stage];

    if (s->items) {
        uint32_t item = task / plan->heads, head = task % plan->heads;
        if (head < s->pool(batch, item)->geometry.kv_heads)
            s->run_item(batch, item, head, scratch);
        return;
    }
    uint32_t row = row_of(plan, batch->row_count, task);
    s->run_row(&batch->rows[row], task - plan->first[row]);
}
