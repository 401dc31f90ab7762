/* SPDX-License-Identifier: MIT */
/*
 * peer.c - see peer.h.
 */
#include "peer.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/sockios.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../shm_protocol/printable.h"
#include "../shm_protocol/validate.h"
#include "../shm_protocol/wire.h"
#include "admin.h"
#include "guard.h"
#include "log.h"
#include "server.h"

#define MESSAGES_PER_TURN 8 /* then the others' turn */
#define SECOND_NS         UINT64_C(1000000000)

/* Of memory, no client's: with the last page taken the kernel ends the daemon at its next. */
#define SPARE_BYTES (UINT64_C(32) << 20)

union message {
    struct lk_message head;
    struct lk_hello hello;
    struct lk_msg_pool_get pool_get;
    struct lk_msg_pool_map pool_map;
    struct lk_msg_device_arena device_arena;
    struct lk_msg_admin admin;
};

static const struct lk_channel_memory no_memory = {.bell = -1, .client_fds = {-1, -1, -1, -1}};

static const char *peer_words(const struct lk_peer *peer, char text[96]) {
    snprintf(text, 96, "%s%spid %d, uid %u", peer->name, *peer->name ? ", " : "", peer->who.pid,
             peer->who.uid);
    return text;
}

/* Between parts of what takes long with a large arena. */
static void feed_watchdog(struct lk_server *server) {
    lk_notify_feed(&server->notify, lk_now_ns(), server->intake);
}

/* ---- ends ---- */

/* Whether descriptors lie in the peer's socket. */
static bool has_unread(struct lk_peer *peer) {
    int bytes;
    if (peer->unread && ioctl(peer->fd, SIOCOUTQ, &bytes) == 0 && bytes == 0)
        peer->unread = 0;
    return peer->unread > 0;
}

/* The conversation is over -> whether the socket is closed: kept, it tells when its place is
 * free. */
static bool close_socket(struct lk_server *server, struct lk_peer *peer) {
    if (has_unread(peer)) {
        epoll_ctl(server->epoll, EPOLL_CTL_DEL, peer->fd, NULL);
        shutdown(peer->fd, SHUT_RDWR);
        return false;
    }
    lk_guard_close(peer->fd); /* leaves the epoll by itself */
    peer->fd = -1;
    return true;
}

static void forget(struct lk_server *server, struct lk_peer *peer) {
    bool closed = peer->fd < 0 || close_socket(server, peer);
    feed_watchdog(server);
    if (peer->memory.arena)
        lk_intake_channel_forget(server->intake, peer->memory.arena);
    if (peer->device.at)
        lk_intake_device_arena_close(server->intake, &peer->device);
    lk_guard_begin();
    lk_channel_memory_destroy(&peer->memory); /* its bell with what was sent there */
    lk_guard_end();
    peer->deadline_ns = lk_now_ns() + LK_UNREAD_LOOK_SECONDS * SECOND_NS;
    peer->state = closed ? LK_PEER_FREE : LK_PEER_UNREAD_YET;
}

void lk_peer_hang_up(struct lk_server *server, struct lk_peer *peer) {
    char words[96];
    if (peer->state != LK_PEER_OPEN) {
        forget(server, peer);
        return;
    }
    close_socket(server, peer);
    peer->state = LK_PEER_LEAVING;
    lk_log_peer(LK_LOG_INFO, "client %u is gone (%s)", peer->channel, peer_words(peer, words));
    lk_intake_channel_remove(server->intake, peer->channel);
    lk_server_status_changed(server);
}

void lk_peer_released(struct lk_server *server, struct lk_peer *peer) {
    if (peer->state == LK_PEER_OPEN)
        lk_peer_hang_up(server, peer);
    forget(server, peer);
}

static void send_refusal(int fd, int error, const char *why) {
    struct lk_refused refused = {.error = error, .major = LK_ABI_MAJOR, .minor = LK_ABI_MINOR};
    lk_wire_head(&refused.head, LK_MSG_REFUSED, sizeof(refused));
    snprintf(refused.reason, sizeof(refused.reason), "%s", why);
    lk_wire_send(fd, &refused.head, NULL, 0); /* who cannot read it does without */
}

static uint32_t count_refused(const struct lk_server *server) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < LK_PEERS_MAX; i++)
        count += server->peer[i].state == LK_PEER_REFUSED;
    return count;
}

/* Says why and ends the conversation. */
static void refuse(struct lk_server *server, struct lk_peer *peer, int error, const char *why) {
    char words[96];
    lk_log_peer(LK_LOG_WARNING, "refused %s: %s", peer_words(peer, words), why);
    send_refusal(peer->fd, error, why);
    if (peer->state == LK_PEER_OPEN || count_refused(server) >= LK_PEERS_REFUSED) {
        lk_peer_hang_up(server, peer);
        return;
    }
    struct epoll_event event = {.events = EPOLLRDHUP, .data.u32 = (uint32_t)(peer - server->peer)};
    epoll_ctl(server->epoll, EPOLL_CTL_MOD, peer->fd, &event); /* what else it says stays unread */
    shutdown(peer->fd, SHUT_WR); /* it reads the sentence, then the end */
    peer->state = LK_PEER_REFUSED;
    peer->deadline_ns = lk_now_ns() + LK_REFUSED_SECONDS * SECOND_NS;
}

static bool has_event(const struct lk_peer *peer, short events) {
    struct pollfd fd = {.fd = peer->fd, .events = POLLIN};
    return poll(&fd, 1, 0) > 0 && (fd.revents & events);
}

/* Whether the peer has closed its end: what it asked for before that, it waits for no more. A half
 * that it shut down is no end. */
static bool has_left(const struct lk_peer *peer) {
    return has_event(peer, POLLHUP | POLLERR);
}

void lk_peer_expire(struct lk_server *server, struct lk_peer *peer) {
    char why[128];
    if (peer->state == LK_PEER_GREETING) {
        if (has_event(peer, POLLIN)) /* words that came while nobody looked: served next */
            return;
        snprintf(why, sizeof(why), "nothing was said for %d seconds", LK_GREETING_SECONDS);
        refuse(server, peer, -ETIMEDOUT, why);
    } else {
        forget(server, peer);
    }
}

/* ---- accepting ---- */

static int too_many(const struct lk_server *server, const struct lk_identity *who, char *why,
                    size_t bytes) {
    const struct lk_config *config = &server->config;
    bool admin = lk_access_admin(&server->access, who->uid);
    uint32_t all = 0, own = 0;
    for (uint32_t i = 0; i < LK_PEERS_MAX; i++) {
        bool held =
            server->peer[i].state != LK_PEER_FREE && server->peer[i].state != LK_PEER_REFUSED;
        all += held;
        own += held && server->peer[i].who.uid == who->uid;
    }
    if (!admin && own >= config->max_channels_per_uid + LK_PEERS_UID) {
        snprintf(why, bytes,
                 "uid %u has %u connections: limits.max_channels_per_uid is %u, and %u more to ask",
                 who->uid, own, config->max_channels_per_uid, LK_PEERS_UID);
        return -EDQUOT;
    }
    if (all >= config->max_channels + LK_PEERS_ASKING + (admin ? LK_PEERS_ADMIN : 0)) {
        snprintf(why, bytes,
                 "there are %u connections: limits.max_channels is %u, and no more may ask", all,
                 config->max_channels);
        return -EUSERS;
    }
    return 0;
}

void lk_peer_accept(struct lk_server *server, int fd) {
    struct lk_peer *peer = server->peer, *end = peer + LK_PEERS_MAX;
    struct lk_identity who;
    char why[LK_REASON_BYTES];
    int rc = lk_access_check(&server->access, fd, &who, why, sizeof(why));
    if (!rc)
        rc = too_many(server, &who, why, sizeof(why));
    while (peer < end && peer->state != LK_PEER_FREE)
        peer++;
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP,
                                .data.u32 = (uint32_t)(peer - server->peer)};
    if (peer == end || epoll_ctl(server->epoll, EPOLL_CTL_ADD, fd, &event)) {
        send_refusal(fd, rc ? rc : -EUSERS, rc ? why : "there is no room for one more connection");
        lk_guard_close(fd);
        return;
    }
    *peer =
        (struct lk_peer){.state = LK_PEER_GREETING, .fd = fd, .who = who, .since_ns = lk_now_ns()};
    peer->memory = no_memory;
    peer->deadline_ns = peer->since_ns + LK_GREETING_SECONDS * SECOND_NS;
    if (rc)
        refuse(server, peer, rc, why);
}

/* ---- hello ---- */

static int channel_limits(const struct lk_server *server, const struct lk_peer *peer, char *why,
                          size_t bytes) {
    const struct lk_config *config = &server->config;
    uint32_t all = lk_server_channels(server), own = 0;
    for (uint32_t i = 0; i < LK_PEERS_MAX; i++)
        own +=
            (server->peer[i].state == LK_PEER_OPEN || server->peer[i].state == LK_PEER_LEAVING) &&
            server->peer[i].who.uid == peer->who.uid;
    if (server->stopping) {
        snprintf(why, bytes, "the daemon is stopping");
        return -ESHUTDOWN;
    }
    if (all >= config->max_channels) {
        snprintf(why, bytes, "there %s %u client%s: limits.max_channels is %u",
                 all == 1 ? "is" : "are", all, all == 1 ? "" : "s", config->max_channels);
        return -EUSERS;
    }
    if (own >= config->max_channels_per_uid) {
        snprintf(why, bytes, "uid %u has %u client%s: limits.max_channels_per_uid is %u",
                 peer->who.uid, own, own == 1 ? "" : "s", config->max_channels_per_uid);
        return -EDQUOT;
    }
    return 0;
}

struct making {
    struct lk_server *server;
    const struct lk_peer *peer;
};

/* A large arena is made for seconds, in which a stop or the client's end may come. */
static bool go_on_making(void *context) {
    const struct making *making = context;
    feed_watchdog(making->server);
    return !has_left(making->peer) && !lk_server_must_stop(making->server);
}

/* Makes the channel's memory, if the machine has it. */
static int make_memory(struct lk_server *server, const struct lk_peer *peer,
                       const struct lk_hello *hello, struct lk_channel_memory *ret, char *why,
                       size_t bytes) {
    struct making making = {server, peer};
    const struct lk_turn turn = {go_on_making, &making};
    struct lk_segment_sizes sizes;
    uint64_t arena = hello->arena_bytes, available = lk_memory_available();
    char want[16], have[16];
    if (!arena) /* the default, as far as the limit allows it */
        arena = server->config.max_arena_bytes < LK_ARENA_BYTES_DEFAULT
                    ? server->config.max_arena_bytes
                    : LK_ARENA_BYTES_DEFAULT;
    int rc = lk_segment_sizes(hello->sq_entries, arena, &sizes, why, bytes);
    if (rc)
        return rc;
    available = available > SPARE_BYTES ? available - SPARE_BYTES : 0;
    if (sizes.arena_bytes + sizes.submission_bytes + sizes.completion_bytes > available) {
        snprintf(why, bytes, "an arena of %s was asked for, %s of memory are available",
                 lk_memory_text(sizes.arena_bytes, want), lk_memory_text(available, have));
        return -ENOMEM;
    }
    server->arena_made = sizes.arena_bytes > LK_PIECE_BYTES;
    rc = lk_channel_memory_create(hello->sq_entries, arena, server->boot_epoch, 0, &turn, ret, why,
                                  bytes);
    if (rc == -ECANCELED) {
        bool gone = has_left(peer);
        snprintf(why, bytes, gone ? "the client is gone" : "the daemon is stopping");
        rc = gone ? rc : -ESHUTDOWN;
    }
    if (rc == -EMFILE) /* the client would look for it with itself */
        snprintf(why, bytes,
                 "the daemon has as many files open as it may (its ulimit -n, LimitNOFILE= of "
                 "systemd)");
    return rc;
}

static int add_channel(struct lk_server *server, struct lk_peer *peer, char *why, size_t bytes) {
    const struct lk_channel_memory *memory = &peer->memory;
    struct lk_channel_open open = {
        .id = server->last_channel + 1,
        .uid = peer->who.uid,
        .pid = peer->who.pid,
        .sq_entries = memory->sizes.sq_entries,
        .cq_entries = memory->sizes.cq_entries,
        .submission = memory->submission,
        .completion = memory->completion,
        .arena = memory->arena,
        .submission_bytes = memory->sizes.submission_bytes,
        .arena_bytes = memory->sizes.arena_bytes,
        .bell = memory->bell,
        .released = lk_server_released,
        .owner = server,
    };
    memcpy(open.name, peer->name, sizeof(open.name));
    feed_watchdog(server);
    int rc = lk_intake_channel_add(server->intake, &open, why, bytes);
    if (!rc)
        peer->channel = server->last_channel = open.id;
    return rc;
}

/* Names go to terminals and into JSON. */
static void take_name(struct lk_peer *peer, const char *name) {
    for (size_t i = 0; i < LK_NAME_BYTES - 1 && name[i]; i++)
        peer->name[i] = name[i] < ' ' || name[i] > '~' ? '?' : name[i];
}

static int send_welcome(struct lk_server *server, struct lk_peer *peer, uint16_t minor) {
    const struct lk_segment_sizes *sizes = &peer->memory.sizes;
    struct lk_welcome welcome = {
        .major = LK_ABI_MAJOR,
        .minor = minor,
        .min_minor = LK_ABI_MIN_MINOR,
        .pools = (uint16_t)server->config.pools,
        .channel = peer->channel,
        .sq_entries = sizes->sq_entries,
        .cq_entries = sizes->cq_entries,
        .descriptor_bytes = sizes->descriptor_bytes,
        .submission_bytes = sizes->submission_bytes,
        .completion_bytes = sizes->completion_bytes,
        .arena_bytes = sizes->arena_bytes,
        .boot_epoch = server->boot_epoch,
    };
    lk_wire_head(&welcome.head, LK_MSG_WELCOME, sizeof(welcome));
    peer->unread += LK_WELCOME_FDS;
    int rc = lk_wire_send(peer->fd, &welcome.head, peer->memory.client_fds, LK_WELCOME_FDS);
    lk_channel_memory_sent(&peer->memory);
    return rc;
}

static void greet(struct lk_server *server, struct lk_peer *peer, const struct lk_hello *hello) {
    char why[LK_REASON_BYTES] = "", words[96], arena[16];
    uint16_t minor;
    int rc = lk_hello_invalid(hello, server->config.max_arena_bytes, &minor, why, sizeof(why));
    take_name(peer, hello->name);
    if (!rc)
        rc = channel_limits(server, peer, why, sizeof(why));
    if (!rc)
        rc = make_memory(server, peer, hello, &peer->memory, why, sizeof(why));
    if (!rc)
        rc = add_channel(server, peer, why, sizeof(why));
    if (rc) {
        refuse(server, peer, rc, why);
        return;
    }
    peer->state = LK_PEER_OPEN;
    server->served++;
    lk_log_peer(LK_LOG_INFO, "client %u has come (%s), ring of %u, arena of %s", peer->channel,
                peer_words(peer, words), peer->memory.sizes.sq_entries,
                lk_memory_text(peer->memory.sizes.arena_bytes, arena));
    if (send_welcome(server, peer, minor))
        lk_peer_hang_up(server, peer);
    else
        lk_server_status_changed(server);
}

/* ---- questions ---- */

/* Whether one more descriptor may wait for it. */
static bool may_send(struct lk_peer *peer) {
    return !has_unread(peer) || peer->unread < LK_PEER_UNREAD;
}

/* Sends an answer, or hangs up on who does not read. */
static void answer(struct lk_server *server, struct lk_peer *peer, const struct lk_message *message,
                   int fd) {
    if ((fd >= 0 && !may_send(peer)) || lk_wire_send(peer->fd, message, &fd, fd >= 0))
        lk_peer_hang_up(server, peer);
    else
        peer->unread += fd >= 0;
}

/* "No" is an answer, not the end. */
static void answer_refused(struct lk_server *server, struct lk_peer *peer, int error,
                           const char *why) {
    struct lk_refused refused = {.error = error, .major = LK_ABI_MAJOR, .minor = LK_ABI_MINOR};
    lk_wire_head(&refused.head, LK_MSG_REFUSED, sizeof(refused));
    snprintf(refused.reason, sizeof(refused.reason), "%s", why); /* no byte behind its end */
    answer(server, peer, &refused.head, -1);
}

static void answer_no_pool(struct lk_server *server, struct lk_peer *peer, const char *name,
                           uint32_t index) {
    char why[LK_REASON_BYTES];
    int length = name ? snprintf(why, sizeof(why), "there is no pool '%.*s': there are",
                                 LK_NAME_BYTES - 1, name)
                      : snprintf(why, sizeof(why), "there is no pool %u: there are %u", index,
                                 server->config.pools);
    for (uint32_t i = 0; name && i < server->config.pools && (size_t)length < sizeof(why); i++)
        length += snprintf(why + length, sizeof(why) - (size_t)length, "%s %s", i ? "," : "",
                           server->config.pool[i].name);
    answer_refused(server, peer, -ESRCH, why);
}

static void tell_pool(struct lk_server *server, struct lk_peer *peer,
                      const struct lk_msg_pool_get *ask) {
    struct lk_msg_pool pool;
    uint32_t index = ask->index;
    bool by_name = index == LK_POOL_BY_NAME;
    if (by_name)
        for (index = 0; index < server->config.pools; index++)
            if (strncmp(server->config.pool[index].name, ask->name, LK_NAME_BYTES) == 0)
                break;
    if (lk_intake_pool(server->intake, index, &pool, NULL)) {
        answer_no_pool(server, peer, by_name ? ask->name : NULL, index);
        return;
    }
    lk_wire_head(&pool.head, LK_MSG_POOL, sizeof(pool));
    answer(server, peer, &pool.head, -1);
}

/* A second opening of the pool's memory, for reading: descriptor or -errno. The mode keeps other
 * users from opening it for writing. */
static int open_read_only(int fd) {
    char path[64];
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    int copy = fchmod(fd, 0600) ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    return copy < 0 ? -errno : copy;
}

static void map_pool(struct lk_server *server, struct lk_peer *peer,
                     const struct lk_msg_pool_map *ask) {
    struct lk_msg_pool pool;
    int memory;
    if (lk_intake_pool(server->intake, ask->index, &pool, &memory)) {
        answer_no_pool(server, peer, NULL, ask->index);
        return;
    }
    if (server->config.resolved == LK_DEVICE_CUDA) {
        answer_refused(server, peer, -ENOTSUP,
                       "the pool's pages are memory of the GPU: a client cannot map them");
        return;
    }
    uint64_t element = pool.dtype == LK_DTYPE_FP32 ? 4 : 2;
    uint64_t page = 2 * (uint64_t)pool.kv_heads * pool.page_tokens * pool.head_dim * element;
    struct lk_msg_pool_mapped mapped = {
        .index = ask->index,
        .page_bytes = page,
        .layer_bytes = page * pool.pages,
        .bytes = page * pool.pages * pool.layers,
    };
    lk_wire_head(&mapped.head, LK_MSG_POOL_MAPPED, sizeof(mapped));
    int fd = open_read_only(memory);
    if (fd < 0) {
        answer_refused(server, peer, fd,
                       "the pool's memory cannot be opened for reading: is /proc mounted?");
        return;
    }
    answer(server, peer, &mapped.head, fd);
    close(fd);
}

/* -> 0, or -errno with a sentence in why. */
static int device_arena_invalid(const struct lk_server *server, const struct lk_peer *peer,
                                uint64_t wanted, char *why, size_t bytes) {
    const uint64_t fences = LK_DEVICE_FENCES * LK_DEVICE_FENCE_STRIDE;
    uint64_t most = server->config.max_device_arena_bytes;
    if (peer->device.at) {
        snprintf(why, bytes, "the connection has a device arena, of %" PRIu64 " bytes: one is all",
                 peer->device.bytes);
        return -EBUSY;
    }
    if (wanted <= fences) {
        snprintf(why, bytes, "a device arena of %" PRIu64 " bytes: its fences alone take %" PRIu64,
                 wanted, fences);
        return -EINVAL;
    }
    if (wanted > most) {
        snprintf(why, bytes,
                 "a device arena of %" PRIu64 " bytes is more than limits.max_device_arena, "
                 "%" PRIu64,
                 wanted, most);
        return -EDQUOT;
    }
    return 0;
}

static void make_device_arena(struct lk_server *server, struct lk_peer *peer,
                              const struct lk_msg_device_arena *ask) {
    char why[LK_REASON_BYTES] = "", words[96], size[16];
    int rc = device_arena_invalid(server, peer, ask->bytes, why, sizeof(why));
    if (!rc)
        rc = lk_intake_device_arena_open(server->intake, peer->channel, ask->bytes, &peer->device,
                                         why, sizeof(why));
    if (rc) {
        answer_refused(server, peer, rc, why);
        return;
    }
    struct lk_msg_device_arena_made made = {.bytes = peer->device.bytes,
                                            .gpu = peer->device.gpu,
                                            .fences = LK_DEVICE_FENCES,
                                            .fence_stride = LK_DEVICE_FENCE_STRIDE};
    memcpy(made.uuid, peer->device.uuid, sizeof(made.uuid));
    lk_wire_head(&made.head, LK_MSG_DEVICE_ARENA_MADE, sizeof(made));
    lk_log_peer(LK_LOG_INFO, "client %u (%s) has a device arena of %s", peer->channel,
                peer_words(peer, words), lk_memory_text(peer->device.bytes, size));
    answer(server, peer, &made.head, peer->device.fd);
}

static void carry_out(struct lk_server *server, struct lk_peer *peer,
                      const struct lk_msg_admin *ask) {
    struct lk_msg_admin_reply reply;
    int fd;
    peer->deadline_ns = lk_now_ns() + LK_GREETING_SECONDS * SECOND_NS;
    lk_admin_answer(server, &peer->who, ask, &reply, &fd);
    answer(server, peer, &reply.head, fd);
    if (fd >= 0)
        close(fd);
}

/* ---- messages ---- */

/* Nobody is told what came of it, so nothing is done: whoever gave up waiting for a daemon that was
 * stopped finds it as it was. */
static void drop(struct lk_server *server, struct lk_peer *peer, const union message *message) {
    char words[96], verb[LK_NAME_BYTES] = "";
    if (message->head.type == LK_MSG_ADMIN && message->head.bytes == sizeof(message->admin)) {
        snprintf(verb, sizeof(verb), "%.*s", LK_NAME_BYTES - 1, message->admin.verb);
        lk_log_peer(LK_LOG_INFO, "%s is not carried out: who asked is gone (%s)",
                    lk_printable(verb, ""), peer_words(peer, words));
    }
    lk_peer_hang_up(server, peer);
}

static void dispatch(struct lk_server *server, struct lk_peer *peer, const union message *message) {
    const struct lk_message *head = &message->head;
    char why[LK_REASON_BYTES];
    bool open = peer->state == LK_PEER_OPEN;
    if (!open && head->type == LK_MSG_HELLO && head->bytes == sizeof(message->hello))
        greet(server, peer, &message->hello);
    else if (open && head->type == LK_MSG_POOL_GET && head->bytes == sizeof(message->pool_get))
        tell_pool(server, peer, &message->pool_get);
    else if (open && head->type == LK_MSG_POOL_MAP && head->bytes == sizeof(message->pool_map))
        map_pool(server, peer, &message->pool_map);
    else if (open && head->type == LK_MSG_DEVICE_ARENA &&
             head->bytes == sizeof(message->device_arena))
        make_device_arena(server, peer, &message->device_arena);
    else if (head->type == LK_MSG_ADMIN && head->bytes == sizeof(message->admin))
        carry_out(server, peer, &message->admin);
    else {
        snprintf(why, sizeof(why), "a message of type %u and %u bytes is not expected %s the hello",
                 head->type, head->bytes, open ? "after" : "before");
        refuse(server, peer, -EPROTO, why);
    }
}

/* What it says next is a hello. */
static bool greets(const struct lk_peer *peer) {
    struct lk_message head;
    return peer->state == LK_PEER_GREETING &&
           recv(peer->fd, &head, sizeof(head), MSG_PEEK | MSG_DONTWAIT) == sizeof(head) &&
           head.type == LK_MSG_HELLO;
}

void lk_peer_serve(struct lk_server *server, struct lk_peer *peer) {
    union message message;
    char why[LK_REASON_BYTES] = "";
    if (server->arena_made && greets(peer)) /* next round, so that questions do not wait for all */
        return;
    if (peer->state == LK_PEER_REFUSED) /* only a hang-up is waited for */
        forget(server, peer);
    for (int i = 0; i < MESSAGES_PER_TURN; i++) {
        if (peer->state != LK_PEER_GREETING && peer->state != LK_PEER_OPEN)
            return;
        lk_guard_begin();
        int rc =
            lk_wire_receive(peer->fd, &message.head, sizeof(message), NULL, 0, why, sizeof(why));
        lk_guard_end();
        if (rc == -EAGAIN)
            return;
        if (rc == -EPROTO)
            refuse(server, peer, rc, why);
        else if (rc)
            lk_peer_hang_up(server, peer);
        else if (has_left(peer))
            drop(server, peer, &message);
        else
            dispatch(server, peer, &message);
    }
}
