/* SPDX-License-Identifier: MIT */
/*
 * start.h - takes everything the daemon lives on: placement, engine, pools, intake.
 *
 * Pools are taken in full, which takes minutes for hundreds of GiB. It is done on a thread of its
 * own, so that the main thread can meanwhile hear a signal and keep systemd patient.
 */
#ifndef LK_START_H
#define LK_START_H

#include "config.h"
#include "intake.h"
#include "memory.h"
#include "numa.h"

struct lk_started {
    struct lk_placement placement;
    struct lk_memory_report memory;
    struct lk_engine *engine; /* NULL as far as it did not come */
    struct lk_intake *intake;
};

#define LK_START_STOPPED (-1)

/* Main thread, signals blocked. -> 0 and intake runs; an exit code with a sentence in why, ret
 * holds what there is; LK_START_STOPPED: SIGTERM or SIGINT came first, and the caller can only
 * exit, for the thread is still at it. Decides what device `auto` is: config->resolved. */
int lk_start(struct lk_config *config, struct lk_started *ret, char *why, size_t why_bytes);

#endif
