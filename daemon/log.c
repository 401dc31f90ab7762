/* SPDX-License-Identifier: MIT */
/*
 * log.c - see log.h. State is three atomics and the peers' allowance, which a mutex guards.
 */
#include "log.h"

#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../shm_protocol/printable.h"

#define PATIENCE_MS 1000

static atomic_bool to_journal;
static atomic_uint threshold = LK_LOG_INFO;
static atomic_bool stalled; /* whoever reads the lines has stopped */

static struct {
    pthread_mutex_t lock;
    time_t second;
    uint32_t said, withheld;
} peers = {.lock = PTHREAD_MUTEX_INITIALIZER};

void lk_log_open(bool journal) {
    atomic_store(&to_journal, journal);
}

void lk_log_level(uint32_t level) {
    atomic_store(&threshold, level);
}

/* Whether a line can be written without waiting longer than a reader may take. One that has not
 * read in time is not waited for again until it does: the line is lost. */
static bool is_read(void) {
    struct pollfd reader = {.fd = STDERR_FILENO, .events = POLLOUT};
    bool read = poll(&reader, 1, atomic_load(&stalled) ? 0 : PATIENCE_MS) != 0;
    atomic_store(&stalled, !read);
    return read;
}

static void say(enum lk_log_level level, const char *format, va_list list) {
    static const char *const journal[] = {"<3>", "<4>", "<6>", "<7>"};
    static const char *const people[] = {"locksd: error: ", "locksd: warning: ", "", "debug: "};
    char line[LK_LOG_BYTES];
    if (level > atomic_load(&threshold))
        return;
    size_t length = (size_t)snprintf(line, sizeof(line), "%s",
                                     atomic_load(&to_journal) ? journal[level] : people[level]);
    vsnprintf(line + length, sizeof(line) - length - 1, format, list);
    length = strlen(lk_printable(line, ""));
    line[length++] = '\n';
    if (!is_read() || write(STDERR_FILENO, line, length) < 0)
        return; /* nobody reads: there is nobody to tell */
}

void lk_log(enum lk_log_level level, const char *format, ...) {
    va_list list;
    va_start(list, format);
    say(level, format, list);
    va_end(list);
}

/* Whether a peer may have a line now; *ret_withheld: lines it was denied in an earlier second. */
static bool peer_may_speak(uint32_t *ret_withheld) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *ret_withheld = 0;
    pthread_mutex_lock(&peers.lock);
    if (now.tv_sec != peers.second) {
        *ret_withheld = peers.withheld;
        peers.second = now.tv_sec;
        peers.said = peers.withheld = 0;
    }
    bool may = peers.said < LK_LOG_PEER_PER_SECOND;
    peers.said += may;
    peers.withheld += !may;
    pthread_mutex_unlock(&peers.lock);
    return may;
}

void lk_log_peer(enum lk_log_level level, const char *format, ...) {
    uint32_t withheld;
    va_list list;
    if (level > atomic_load(&threshold) || !peer_may_speak(&withheld))
        return;
    if (withheld)
        lk_log(LK_LOG_WARNING, "lines about clients left out: %u", withheld);
    va_start(list, format);
    say(level, format, list);
    va_end(list);
}
