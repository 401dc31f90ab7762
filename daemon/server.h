/* SPDX-License-Identifier: MIT */
/*
 * server.h - the control thread: socket, signals, watchdog, reload, drain and stop.
 *
 * It waits in one epoll for the listening socket, the peers, signals and word from intake that a
 * channel's memory is free. It owns the configuration in force. Everything it asks of pools and
 * channels goes through intake.h. Only the main thread touches the struct, but for `released`,
 * which intake fills.
 */
#ifndef LK_SERVER_H
#define LK_SERVER_H

#include <jansson.h>
#include <pthread.h>
#include <time.h>

#include "access.h"
#include "intake.h"
#include "listen.h"
#include "memory.h"
#include "notify.h"
#include "numa.h"
#include "options.h"
#include "peer.h"
#include "signals.h"

#define LK_PEERS_MAX (LK_CHANNELS_MAX + LK_PEERS_ASKING + LK_PEERS_ADMIN + LK_PEERS_REFUSED)

struct lk_server {
    /* Set by main, constant. */
    const struct lk_options *options;
    struct lk_intake *intake;
    const char *engine; /* lk_engine_describe() */
    const struct lk_placement *placement;
    const struct lk_memory_report *memory;
    struct lk_listener listener;

    struct lk_config config; /* in force */
    struct lk_access access;
    struct lk_notify notify;
    uint64_t boot_epoch, started_ns;
    uint64_t served; /* channels there have been */
    uint32_t last_channel;
    bool draining; /* by verb, or because it stops */
    bool stopping;
    bool arena_made;    /* a large one, in this round of events: it took long */
    uint64_t stop_ns;   /* stopping: not later than */
    uint64_t resume_ns; /* accepting is suspended until then; 0: it is not */
    uint64_t status_ns; /* systemd gets no new status before: clients come and go as they like */
    bool status_stale;
    struct lk_signals asked; /* not obeyed yet */
    int epoll, signals, released_event;
    struct {
        pthread_mutex_t lock;
        uint32_t count;
        uint32_t id[LK_PEERS_MAX];
    } released; /* channels intake is done with */
    struct lk_peer peer[LK_PEERS_MAX];
};

static inline uint64_t lk_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* The constant part is set; the listener is handed over; signals are held (signals.h). -> 0, or
 * -errno with a sentence in why. */
int lk_server_open(struct lk_server *server, char *why, size_t why_bytes);
/* Until a signal ends it: 0. */
int lk_server_run(struct lk_server *server);
/* After lk_intake_stop(): gives back what peers still hold. */
void lk_server_close(struct lk_server *server);

/* Whether a signal asked for a stop, obeyed or not yet: for what takes long. */
bool lk_server_must_stop(struct lk_server *server);

/* For verbs (admin.c). */
void lk_server_drain(struct lk_server *server, bool drain);
/* Reads the configuration again. taken, restart: arrays, to which are added the names of keys that
 * are in force now, and that need a restart. -> 0, or -errno with a sentence in why; then all stays
 * as it was. */
int lk_server_reload(struct lk_server *server, json_t *taken, json_t *restart, char *why,
                     size_t why_bytes);
/* How many peers have a channel, living or leaving. */
uint32_t lk_server_channels(const struct lk_server *server);
/* Something that systemd's status line says has changed. */
void lk_server_status_changed(struct lk_server *server);
/* lk_channel_open.released: intake thread. */
void lk_server_released(void *owner, uint32_t id);

#endif
