/* SPDX-License-Identifier: MIT */
/*
 * deadly.h - signals that end a tool, and before which it puts away what must not stay behind.
 *
 * Handlers form a chain: each puts away its own, sets what was there before it, and raises the
 * signal again. Ignored ones stay ignored, as under nohup.
 */
#ifndef LK_DEADLY_H
#define LK_DEADLY_H

#include <signal.h>

/* Besides what people and service managers send: a reader that is gone, limits of the shell, and a
 * mapped file that was cut short. */
static const int lk_deadly[] = {SIGHUP,  SIGINT, SIGQUIT, SIGTERM,
                                SIGPIPE, SIGBUS, SIGXCPU, SIGXFSZ};
#define LK_DEADLY (sizeof(lk_deadly) / sizeof(*lk_deadly))

#endif
