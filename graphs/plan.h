/* SPDX-License-Identifier: MIT */
/*
 * plan.h - the pipeline as a value: what a batch of a rows bucket runs, prepared ahead of time.
 *
 * Idea: the stages and their order never change; what a stage does with a row it reads from the
 * row. A plan is that list and the buffers a replay fills: for a stage over rows, where each row's
 * tasks begin. A task's number names (row, its task) or (item, KV head). A stage without tasks is
 * passed over.
 *
 * Invariants: the number and the meaning of a row's tasks depend on that row alone
 * (kernels/cpu/cpu.h). One plan is replayed at a time by whoever advances the batch; its tasks only
 * read it.
 */
#ifndef LK_PLAN_H
#define LK_PLAN_H

#include "engine.h"

struct lk_scratch;

#define LK_PLAN_BUCKETS 9 /* 1, 2, 4 .. LK_BATCH_ROWS_MAX */

struct lk_plan {
    uint32_t bucket; /* rows it has room for */
    uint32_t heads;  /* of the open stage over items: tasks an item has */
    uint32_t *first; /* [bucket + 1] of the open stage over rows */
};

/* -> 0, -ENOMEM. */
int lk_plan_open(struct lk_plan *plan, uint32_t bucket);
void lk_plan_close(struct lk_plan *plan);

/* Stages are numbered 0..lk_plan_stages()-1 in their order; results stand before lk_plan_fence().
 * */
uint32_t lk_plan_stages(void);
uint32_t lk_plan_fence(void);
enum lk_phase lk_plan_phase(uint32_t stage);
/* Lay out a stage for a batch -> its tasks. */
uint32_t lk_plan_layout(struct lk_plan *plan, uint32_t stage, const struct lk_batch *batch);
/* scratch: the worker's own, see kernels/cpu/cpu.h. */
void lk_plan_run(const struct lk_plan *plan, uint32_t stage, const struct lk_batch *batch,
                 uint32_t task, struct lk_scratch *scratch);

#endif
