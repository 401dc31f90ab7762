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

/* All that can be said of a start before anything is taken; warnings go to the log. -> 0; EX_CONFIG
 * or, where the machine would have to be another, EX_OSERR, with a sentence in why. Decides what
 * device `auto` is: config->resolved. */
int lk_start_check(struct lk_config *config, const struct lk_origins *origins, char *why,
                   size_t why_bytes);
/* Checks, then takes. Main thread, signals blocked. -> 0 and intake runs; an exit code with a
 * sentence in why, ret holds what there is; LK_START_STOPPED: SIGTERM or SIGINT came first, and the
 * caller can only exit, for the thread is still at it. */
int lk_start(struct lk_config *config, const struct lk_origins *origins, struct lk_started *ret,
             char *why, size_t why_bytes);

#endif
