/* SPDX-License-Identifier: MIT */
/*
 * server.c - see server.h: the loop, what wakes it, and how it ends.
 *
 * The loop sleeps until the nearest deadline (a silent peer's, the watchdog's, the stop's), so that
 * an idle daemon does nothing. New connections are accepted after the peers of a round are served:
 * a slot freed in a round is not taken in it, and an event of the old peer cannot meet the new one.
 */
#include "server.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "log.h"
#include "report.h"
#include "signals.h"

#define ACCEPTS_PER_TURN 16
#define EVENTS           64
#define SECOND_NS        UINT64_C(1000000000)
#define STOP_LOOK_NS     (SECOND_NS / 20) /* a draining stop looks so often whether work is done */

/* In the epoll beside the peers' indices. */
enum { OF_LISTENER = LK_PEERS_MAX, OF_SIGNALS, OF_RELEASED };

/* ---- open and close ---- */

static int watch(struct lk_server *server, int fd, uint32_t index) {
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = index};
    return epoll_ctl(server->epoll, EPOLL_CTL_ADD, fd, &event);
}

int lk_server_open(struct lk_server *server, char *why, size_t why_bytes) {
    struct lk_intake_status status;
    pthread_mutex_init(&server->released.lock, NULL);
    for (uint32_t i = 0; i < LK_PEERS_MAX; i++)
        server->peer[i].fd = -1;
    server->epoll = epoll_create1(EPOLL_CLOEXEC);
    server->signals = lk_signals_open(true, SFD_CLOEXEC | SFD_NONBLOCK);
    server->released_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (server->epoll < 0 || server->signals < 0 || server->released_event < 0 ||
        watch(server, server->listener.fd, OF_LISTENER) ||
        watch(server, server->signals, OF_SIGNALS) ||
        watch(server, server->released_event, OF_RELEASED)) {
        int rc = -errno;
        snprintf(why, why_bytes, "cannot set up the control thread: %s", strerror(-rc));
        return rc;
    }
    lk_access_open(server->config.group, &server->access);
    lk_notify_open(&server->notify);
    lk_intake_status(server->intake, &status);
    server->boot_epoch = status.boot_epoch;
    return 0;
}

void lk_server_close(struct lk_server *server) {
    for (uint32_t i = 0; i < LK_PEERS_MAX; i++)
        if (server->peer[i].state == LK_PEER_LEAVING)
            lk_peer_released(server, &server->peer[i]);
    int fds[] = {server->epoll, server->signals, server->released_event};
    for (size_t i = 0; i < sizeof(fds) / sizeof(*fds); i++)
        if (fds[i] >= 0)
            close(fds[i]);
    pthread_mutex_destroy(&server->released.lock);
}

/* ---- what intake lets go ---- */

void lk_server_released(void *owner, uint32_t id) {
    struct lk_server *server = owner;
    pthread_mutex_lock(&server->released.lock);
    server->released.id[server->released.count++] = id; /* at most one for each peer */
    pthread_mutex_unlock(&server->released.lock);
    eventfd_write(server->released_event, 1);
}

static void take_released(struct lk_server *server) {
    uint32_t ids[LK_PEERS_MAX], count;
    eventfd_t ignored;
    eventfd_read(server->released_event, &ignored);
    pthread_mutex_lock(&server->released.lock);
    count = server->released.count;
    memcpy(ids, server->released.id, count * sizeof(*ids));
    server->released.count = 0;
    pthread_mutex_unlock(&server->released.lock);
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t p = 0; p < LK_PEERS_MAX; p++) {
            struct lk_peer *peer = &server->peer[p];
            if ((peer->state == LK_PEER_OPEN || peer->state == LK_PEER_LEAVING) &&
                peer->channel == ids[i])
                lk_peer_released(server, peer);
        }
    lk_server_status_changed(server);
}

uint32_t lk_server_channels(const struct lk_server *server) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < LK_PEERS_MAX; i++)
        count += server->peer[i].state == LK_PEER_OPEN || server->peer[i].state == LK_PEER_LEAVING;
    return count;
}

static const char *status_words(const struct lk_server *server, char text[96]) {
    const char *what = server->stopping ? "stopping" : server->draining ? "draining" : "serving";
    uint32_t clients = lk_server_channels(server);
    snprintf(text, 96, "%s, %u client%s, %u pool%s", what, clients, clients == 1 ? "" : "s",
             server->config.pools, server->config.pools == 1 ? "" : "s");
    return text;
}

void lk_server_status_changed(struct lk_server *server) {
    server->status_stale = true;
}

static void tell_status(struct lk_server *server, uint64_t now) {
    char words[96];
    lk_notify_status(status_words(server, words));
    server->status_stale = false;
    server->status_ns = now + SECOND_NS;
}

/* ---- accepting ---- */

static void suspend_accepting(struct lk_server *server) {
    lk_log_peer(LK_LOG_WARNING, "no connection can be accepted for a second: %s", strerror(errno));
    epoll_ctl(server->epoll, EPOLL_CTL_DEL, server->listener.fd, NULL);
    server->resume_ns = lk_now_ns() + SECOND_NS;
}

static void accept_peers(struct lk_server *server) {
    for (int i = 0; i < ACCEPTS_PER_TURN; i++) {
        int fd = accept4(server->listener.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0) {
            lk_peer_accept(server, fd);
        } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            suspend_accepting(server); /* it would wake us again and again */
            return;
        } else if (errno != EINTR && errno != ECONNABORTED) {
            return;
        }
    }
}

/* ---- signals, reload, drain, stop ---- */

/* What the log says has happened: who reads it may count on it. */
static void take_drain(struct lk_server *server, bool drain) {
    server->draining = drain;
    lk_intake_drain(server->intake, drain);
}

void lk_server_drain(struct lk_server *server, bool drain) {
    bool was = server->draining;
    take_drain(server, drain);
    if (was != drain)
        lk_log(LK_LOG_INFO, drain ? "draining: no new sequences and leases" : "resumed");
    lk_server_status_changed(server);
}

struct changes {
    json_t *taken, *restart;
};

static void note_change(void *context, const char *key, bool taken) {
    const struct changes *changes = context;
    json_array_append_new(taken ? changes->taken : changes->restart, json_string(key));
}

static void log_changes(const struct changes *changes) {
    for (size_t i = 0; i < json_array_size(changes->restart); i++)
        lk_log(LK_LOG_WARNING, "reload: %s differs in the file, and is taken only by a restart",
               json_string_value(json_array_get(changes->restart, i)));
    for (size_t i = 0; i < json_array_size(changes->taken); i++)
        lk_log(LK_LOG_INFO, "reload: %s is changed",
               json_string_value(json_array_get(changes->taken, i)));
}

/* The group may have come, gone or changed its number, whatever the file says. */
static void reload_access(struct lk_server *server, json_t *taken) {
    struct lk_access old = server->access, *now = &server->access;
    char who[128];
    lk_access_open(server->config.group, now);
    bool renamed = strcmp(old.group_name, now->group_name) != 0; /* noted as a key */
    bool changed = old.has_group != now->has_group || old.group != now->group;
    if (*now->group_name && !now->has_group)
        lk_report_missing(now, server->placement);
    if (changed)
        lk_log(LK_LOG_INFO, "reload: %s may connect from now on",
               lk_access_describe(now, who, sizeof(who)));
    if (changed && !renamed)
        json_array_append_new(taken, json_string("daemon.group"));
}

/* To read a pipe or a terminal again waits for who writes there, and everybody for us. /dev/null is
 * a file without lines; why there is none is said by who opens it. */
static int reread_refused(const char *path, char *why, size_t bytes) {
    struct stat file;
    if (stat(path, &file) || S_ISREG(file.st_mode) ||
        (S_ISCHR(file.st_mode) && file.st_rdev == makedev(1, 3)))
        return 0;
    snprintf(why, bytes, "%s: is no regular file: it is read at the start alone", path);
    return -EINVAL;
}

int lk_server_reload(struct lk_server *server, json_t *taken, json_t *restart, char *why,
                     size_t why_bytes) {
    struct changes changes = {taken, restart};
    struct lk_config fresh;
    struct lk_origins origins;
    lk_notify_reloading();
    int rc = reread_refused(server->options->config, why, why_bytes);
    if (!rc)
        rc = lk_options_config(server->options, &fresh, &origins, why, why_bytes);
    if (rc) {
        lk_log(LK_LOG_ERROR, "reload: all stays as it was: %s", why);
        rc = rc == -ENOMEM ? rc : -EINVAL; /* whatever kept the daemon from reading it */
    } else {
        lk_config_reload(&server->config, &fresh, note_change, &changes);
        lk_log_level(server->config.log_level);
        lk_intake_limits(server->intake, &server->config);
        log_changes(&changes);
        reload_access(server, taken);
        lk_log(LK_LOG_INFO, "reloaded %s", server->options->config);
    }
    char words[96];
    lk_notify_ready(status_words(server, words));
    return rc;
}

static void begin_stop(struct lk_server *server, const char *signal_name) {
    char words[96];
    uint64_t wait = server->config.drain_seconds;
    server->stopping = true;
    server->stop_ns = lk_now_ns() + wait * SECOND_NS;
    take_drain(server, true);
    lk_notify_stopping(status_words(server, words), wait + 5);
    uint32_t clients = lk_server_channels(server);
    if (clients)
        lk_log(LK_LOG_INFO, "%s: stopping; waiting up to %u s for the work of %u client%s",
               signal_name, server->config.drain_seconds, clients, clients == 1 ? "" : "s");
    else
        lk_log(LK_LOG_INFO, "%s: stopping", signal_name);
}

bool lk_server_must_stop(struct lk_server *server) {
    lk_signals_take(&server->asked);
    return server->stopping || server->asked.stops;
}

static void reload_quietly(struct lk_server *server) { /* nobody is told but the log */
    json_t *taken = json_array(), *restart = json_array();
    char why[1024];
    lk_server_reload(server, taken, restart, why, sizeof(why));
    json_decref(taken);
    json_decref(restart);
}

/* What asks to stop goes first; then one reload, whatever number was asked for. */
static void obey_signals(struct lk_server *server) {
    lk_signals_take(&server->asked);
    for (; server->asked.stops; server->asked.stops--) {
        if (!server->stopping) {
            begin_stop(server, server->asked.stop == SIGINT ? "SIGINT" : "SIGTERM");
        } else if (server->stop_ns) {
            lk_log(LK_LOG_INFO, "a second signal: stopping at once");
            server->stop_ns = 0;
        }
    }
    if (server->asked.reload && server->stopping)
        lk_log(LK_LOG_INFO, "SIGHUP: nothing is read again, the daemon is stopping");
    else if (server->asked.reload)
        reload_quietly(server);
    server->asked.reload = false;
}

/* Whether clients still have something to lose: pages, or work queued or in flight. */
static bool clients_at_work(const struct lk_server *server) {
    static struct lk_channel_status channels[LK_CHANNELS_MAX];
    struct lk_intake_status status;
    lk_intake_status(server->intake, &status);
    if (status.sequences || status.leases || status.batches_in_flight)
        return true;
    uint32_t count = lk_intake_channels(server->intake, channels, LK_CHANNELS_MAX);
    for (uint32_t i = 0; i < count && i < LK_CHANNELS_MAX; i++)
        if (channels[i].queued || channels[i].in_flight)
            return true;
    return false;
}

static bool stop_now(const struct lk_server *server) {
    if (!server->stopping)
        return false;
    if (lk_now_ns() >= server->stop_ns) {
        if (server->stop_ns && lk_server_channels(server))
            lk_log(LK_LOG_WARNING, "clients cut off: %u", lk_server_channels(server));
        return true;
    }
    return !lk_server_channels(server) || !clients_at_work(server);
}

/* ---- the loop ---- */

static uint64_t earlier(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static bool waits(const struct lk_peer *peer) { /* for its deadline */
    return peer->state == LK_PEER_GREETING || peer->state == LK_PEER_REFUSED ||
           peer->state == LK_PEER_UNREAD_YET;
}

/* Does what is due. -> when something is due next */
static uint64_t keep_time(struct lk_server *server) {
    uint64_t now = lk_now_ns(), next = lk_notify_feed(&server->notify, now, server->intake);
    if (server->resume_ns && now >= server->resume_ns) {
        server->resume_ns = 0;
        watch(server, server->listener.fd, OF_LISTENER);
    }
    if (server->resume_ns)
        next = earlier(next, server->resume_ns);
    if (server->stopping)
        next = earlier(next, now + STOP_LOOK_NS);
    if (server->status_stale && now >= server->status_ns)
        tell_status(server, now);
    if (server->status_stale)
        next = earlier(next, server->status_ns);
    for (uint32_t i = 0; i < LK_PEERS_MAX; i++) {
        struct lk_peer *peer = &server->peer[i];
        if (waits(peer) && now >= peer->deadline_ns)
            lk_peer_expire(server, peer);
        if (waits(peer))
            next = earlier(next, peer->deadline_ns);
    }
    return next;
}

static int timeout_ms(uint64_t next) {
    uint64_t now = lk_now_ns();
    if (next == UINT64_MAX)
        return -1;
    uint64_t ms = next > now ? (next - now + 999999) / 1000000 : 0;
    return ms > 1000000 ? 1000000 : (int)ms;
}

/* A hello may take seconds: what is due is not left until all that came with it are served. */
static void serve_events(struct lk_server *server, const struct epoll_event *events, int count) {
    bool knocked = false;
    server->arena_made = false;
    for (int i = 0; i < count; i++) {
        uint32_t index = events[i].data.u32;
        obey_signals(server);
        if (i > 0)
            keep_time(server);
        if (index < LK_PEERS_MAX)
            lk_peer_serve(server, &server->peer[index]);
        else if (index == OF_LISTENER)
            knocked = true;
        else if (index == OF_RELEASED)
            take_released(server);
    }
    obey_signals(server); /* what came meanwhile wakes nobody any more */
    if (knocked)
        accept_peers(server);
}

int lk_server_run(struct lk_server *server) {
    struct epoll_event events[EVENTS];
    char words[96];
    server->started_ns = lk_now_ns();
    lk_notify_ready(status_words(server, words));
    while (!stop_now(server)) {
        int count = epoll_wait(server->epoll, events, EVENTS, timeout_ms(keep_time(server)));
        if (count < 0 && errno != EINTR)
            return -errno;
        serve_events(server, events, count < 0 ? 0 : count);
    }
    for (uint32_t i = 0; i < LK_PEERS_MAX; i++)
        if (server->peer[i].state != LK_PEER_FREE && server->peer[i].state != LK_PEER_LEAVING)
            lk_peer_hang_up(server, &server->peer[i]);
    return 0;
}
