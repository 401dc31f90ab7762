/* SPDX-License-Identifier: MIT */
/*
 * notify.c - see notify.h.
 */
#include "notify.h"

#include <errno.h>
#include <inttypes.h>
#include <systemd/sd-daemon.h>
#include <time.h>

#define FEEDINGS_PER_TIMEOUT 3 /* systemd asks for two at least */

void lk_notify_open(struct lk_notify *ret) {
    uint64_t timeout_us = 0;
    *ret = (struct lk_notify){0};
    if (sd_watchdog_enabled(0, &timeout_us) > 0)
        ret->interval_ns = timeout_us * 1000 / FEEDINGS_PER_TIMEOUT;
}

void lk_notify_starting(const char *status, uint64_t extend_seconds) {
    sd_notifyf(0, "EXTEND_TIMEOUT_USEC=%" PRIu64 "\nSTATUS=%s", extend_seconds * 1000000, status);
}

void lk_notify_ready(const char *status) {
    sd_notifyf(0, "READY=1\nSTATUS=%s", status);
}

void lk_notify_status(const char *status) {
    sd_notifyf(0, "STATUS=%s", status);
}

void lk_notify_reloading(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    sd_notifyf(0, "RELOADING=1\nMONOTONIC_USEC=%" PRIu64,
               (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000);
}

void lk_notify_stopping(const char *status, uint64_t at_most_seconds) {
    sd_notifyf(0, "STOPPING=1\nEXTEND_TIMEOUT_USEC=%" PRIu64 "\nSTATUS=%s",
               at_most_seconds * 1000000, status);
}

void lk_notify_broken(const char *why) {
    sd_notifyf(0, "STATUS=%s\nERRNO=%d", why, EIO);
}

uint64_t lk_notify_feed(struct lk_notify *notify, uint64_t now_ns, struct lk_intake *intake) {
    struct lk_intake_status status;
    if (!notify->interval_ns)
        return UINT64_MAX;
    if (now_ns < notify->next_ns)
        return notify->next_ns;
    notify->next_ns = now_ns + notify->interval_ns;
    if (lk_intake_heartbeat(intake) == notify->heartbeat)
        lk_intake_status(intake, &status);
    uint64_t heartbeat = lk_intake_heartbeat(intake);
    if (heartbeat != notify->heartbeat)
        sd_notify(0, "WATCHDOG=1");
    notify->heartbeat = heartbeat;
    return notify->next_ns;
}
