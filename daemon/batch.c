/* SPDX-License-Identifier: MIT */
/*
 * batch.c - memory of a batch. See batch.h.
 */
#include "batch.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "assert.h"

int lk_work_alloc(struct lk_work *work) {
    work->rows = calloc(LK_BATCH_ROWS_MAX, sizeof(*work->rows));
    work->copies = calloc(LK_BATCH_COPIES, sizeof(*work->copies));
    work->writes = calloc(LK_BATCH_WRITES, sizeof(*work->writes));
    work->before = calloc(LK_BATCH_BUILDS, sizeof(*work->before));
    work->after = calloc(LK_BATCH_BUILDS, sizeof(*work->after));
    work->slots = calloc(LK_BATCH_SLOTS, sizeof(*work->slots));
    work->items = calloc(LK_BATCH_ITEMS, sizeof(*work->items));
    work->shared = calloc(LK_BATCH_COPIES, sizeof(*work->shared));
    work->signals = calloc(LK_BATCH_SIGNALS_MAX, sizeof(*work->signals));
    if (work->rows && work->copies && work->writes && work->before && work->after && work->slots &&
        work->items && work->shared && work->signals)
        return 0;
    lk_work_unalloc(work);
    return -ENOMEM;
}

void lk_work_unalloc(struct lk_work *work) {
    free(work->rows);
    free(work->copies);
    free(work->writes);
    free(work->before);
    free(work->after);
    free(work->slots);
    free(work->items);
    free(work->shared);
    free(work->signals);
    memset(work, 0, sizeof(*work));
}

void lk_work_reset(struct lk_work *work, uint64_t serial) {
    LK_ASSERT(!work->in_flight);
    work->batch = (struct lk_batch){.rows = work->rows,
                                    .copies = work->copies,
                                    .writes = work->writes,
                                    .builds_before = work->before,
                                    .builds_after = work->after,
                                    .signals = work->signals,
                                    .owner = work};
    work->serial = serial;
    work->item_count = work->shared_count = 0;
    work->tokens = work->products = work->slots_used = work->workspace_used = 0;
}
