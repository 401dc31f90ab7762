/* SPDX-License-Identifier: MIT */
/*
 * notify.c - see notify.h.
 */
#include "notify.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <systemd/sd-daemon.h>
#include <time.h>
#include <unistd.h>

#define FEEDINGS_PER_TIMEOUT 3 /* systemd asks for two at least */
#define NOTICE_BYTES         512

/* How long a receiver that does not read is waited for: a state's change must arrive, what is said
 * again soon need not. */
#define STATE_MS 2000
#define NEWS_MS  50

/* sd_notify() waits for ever where the receiver does not read, and takes who waits with it. Who let
 * us wait is not waited for again until it has read. */
__attribute__((format(printf, 2, 3))) static void tell(unsigned patience_ms, const char *format,
                                                       ...) {
    static _Atomic bool deaf;
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    struct timeval patience = {patience_ms / 1000, patience_ms % 1000 * 1000};
    char text[NOTICE_BYTES];
    size_t length = path ? strlen(path) : 0;
    if (length < 2 || length >= sizeof(to.sun_path))
        return;
    memcpy(to.sun_path, path, length);
    if (*path == '@') /* of the abstract namespace */
        *to.sun_path = '\0';
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return;
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
    ssize_t sent = sendto(fd, text, strlen(text), MSG_NOSIGNAL | (deaf ? MSG_DONTWAIT : 0),
                          (const struct sockaddr *)&to,
                          (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length));
    if (sent >= 0 || (errno != EAGAIN && errno != EINTR))
        deaf = false;
    else if (patience_ms == STATE_MS) /* news alone are no trial */
        deaf = true;
    close(fd);
}

void lk_notify_open(struct lk_notify *ret) {
    uint64_t timeout_us = 0;
    *ret = (struct lk_notify){0};
    if (sd_watchdog_enabled(0, &timeout_us) > 0)
        ret->interval_ns = timeout_us * 1000 / FEEDINGS_PER_TIMEOUT;
}

void lk_notify_starting(const char *status, uint64_t extend_seconds) {
    tell(STATE_MS, "EXTEND_TIMEOUT_USEC=%" PRIu64 "\nSTATUS=%s", extend_seconds * 1000000, status);
}

void lk_notify_ready(const char *status) {
    tell(STATE_MS, "READY=1\nSTATUS=%s", status);
}

void lk_notify_status(const char *status) {
    tell(NEWS_MS, "STATUS=%s", status);
}

void lk_notify_reloading(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    tell(STATE_MS, "RELOADING=1\nMONOTONIC_USEC=%" PRIu64,
         (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000);
}

void lk_notify_stopping(const char *status, uint64_t at_most_seconds) {
    tell(STATE_MS, "STOPPING=1\nEXTEND_TIMEOUT_USEC=%" PRIu64 "\nSTATUS=%s",
         at_most_seconds * 1000000, status);
}

void lk_notify_broken(const char *why) {
    tell(STATE_MS, "STATUS=%s\nERRNO=%d", why, EIO);
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
        tell(NEWS_MS, "WATCHDOG=1");
    notify->heartbeat = heartbeat;
    return notify->next_ns;
}
