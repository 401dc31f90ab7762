/* SPDX-License-Identifier: MIT */
/*
 * notify.h - what systemd is told: ready, status, reloading, stopping, and that the daemon is
 * alive.
 *
 * The watchdog is fed by the control thread, but only while the intake thread ticks: its heartbeat
 * must have advanced since the last feeding. An idle intake sleeps; it is then woken by a question,
 * and must answer. A receiver that does not read is waited for two seconds at most. All calls are
 * nothing without $NOTIFY_SOCKET. Control thread.
 */
#ifndef LK_NOTIFY_H
#define LK_NOTIFY_H

#include <stdint.h>

#include "intake.h"

struct lk_notify {
    uint64_t interval_ns; /* between feedings; 0: no watchdog */
    uint64_t next_ns;     /* CLOCK_MONOTONIC */
    uint64_t heartbeat;   /* of intake, when last fed */
};

void lk_notify_open(struct lk_notify *ret);
/* Not ready yet: do not give up for so many seconds. */
void lk_notify_starting(const char *status, uint64_t extend_seconds);
void lk_notify_ready(const char *status);
void lk_notify_status(const char *status);
void lk_notify_reloading(void); /* lk_notify_ready() ends it */
void lk_notify_stopping(const char *status, uint64_t at_most_seconds);
/* The process ends at once, for this reason. Any thread. */
void lk_notify_broken(const char *why);
/* Feeds the watchdog if it is time and intake lives. -> next_ns, UINT64_MAX without a watchdog. */
uint64_t lk_notify_feed(struct lk_notify *notify, uint64_t now_ns, struct lk_intake *intake);

#endif
