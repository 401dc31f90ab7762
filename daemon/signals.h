/* SPDX-License-Identifier: MIT */
/*
 * signals.h - what signals mean to the process, from main's first line on.
 *
 *   held -> let_go   (help, version, a check: as the process was started)
 *        -> leaving  (the configuration is read, maybe from a pipe nobody writes to) -> held
 *
 * Held: SIGTERM, SIGINT and SIGHUP stay pending until the control thread takes them, or who starts
 * the daemon reads them from a descriptor; SIGPIPE, SIGUSR1 and SIGXFSZ end nothing. So a reload
 * that is asked for too early follows READY. Leaving: SIGTERM and SIGINT end the process with code
 * 0, since nothing is taken yet; SIGHUP stays pending. Main thread, before there is any other:
 * threads inherit it.
 */
#ifndef LK_SIGNALS_H
#define LK_SIGNALS_H

#include <stdbool.h>
#include <stdint.h>

void lk_signals_hold(void);
void lk_signals_let_go(void); /* after the first lk_signals_hold() */
void lk_signals_leaving(void);
/* A descriptor that can be read while signals are held: to stop, and to reload if `reload`. -> -1:
 * errno. */
int lk_signals_open(bool reload, int flags);

struct lk_signals {
    uint32_t stops; /* how many there were, two counted at most at a time */
    int stop;       /* the last one's number */
    bool reload;
};
/* Adds those held to *to, which are held no more. What asks to stop is taken first, however many
 * reloads are asked for. */
void lk_signals_take(struct lk_signals *to);

#endif
