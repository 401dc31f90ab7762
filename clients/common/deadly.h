/* SPDX-License-Identifier: MIT */
/*
 * deadly.h - signals that end a tool, and before which it puts away what must not stay behind.
 *
 * Handlers form a chain: each puts away its own and passes the signal on to what was there before
 * it. Ignored signals stay ignored, as under nohup.
 */
#ifndef LK_DEADLY_H
#define LK_DEADLY_H

#include <signal.h>

#define LK_DEADLY 8
extern const int lk_deadly[LK_DEADLY];

struct lk_deadly_link {
    struct sigaction before[LK_DEADLY];
};

/* `handler`, which ends by passing on, before all that is there; again: no change. */
void lk_deadly_install(struct lk_deadly_link *link, void (*handler)(int));
void lk_deadly_remove(const struct lk_deadly_link *link);
/* Async-signal-safe. The signal is delivered when the handler returns. */
void lk_deadly_pass_on(const struct lk_deadly_link *link, int signal);

#endif
