/* SPDX-License-Identifier: MIT */
/*
 * socket.c - questions and answers on the daemon's socket.
 */
#include "internal.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "../../shm_protocol/printable.h"
#include "../../shm_protocol/wire.h"

static const char *hint(int error) {
    switch (error) {
    case ENOENT:
    case ECONNREFUSED:
        return " (is locksd running?)";
    case EACCES:
        return " (the owner of the daemon and the members of its group may connect)";
    default:
        return "";
    }
}

/* A signal's handler does not end the attempt, nor does it prolong it. */
static int dial(int fd, const struct sockaddr_un *address, uint64_t limit_ns) {
    uint64_t deadline = lk_client_deadline(limit_ns);
    struct timeval patience = {.tv_sec = (time_t)(limit_ns / UINT64_C(1000000000)),
                               .tv_usec = (suseconds_t)(limit_ns / 1000 % 1000000)};
    if (limit_ns != LK_CLIENT_FOREVER &&
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience)))
        return -errno;
    while (connect(fd, (const struct sockaddr *)address, sizeof(*address))) {
        if (errno == EAGAIN)
            return -ETIMEDOUT;
        if (errno != EINTR)
            return -errno;
        if (lk_client_deadline(0) >= deadline)
            return -ETIMEDOUT;
    }
    return 0;
}

int lk_client_dial(const char *path, uint64_t limit_ns, char *why, size_t why_bytes) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (!path && (!(path = getenv("LOCKSD_SOCKET")) || !*path)) /* empty is as good as unset */
        path = LK_SOCKET_PATH;
    if (!*path || strlen(path) >= sizeof(address.sun_path)) {
        snprintf(why, why_bytes, "the socket's path has %zu bytes, it may have 1 to %zu: %s",
                 strlen(path), sizeof(address.sun_path) - 1, path);
        return -EINVAL;
    }
    memcpy(address.sun_path, path, strlen(path));
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    int r = fd < 0 ? -errno : dial(fd, &address, limit_ns);
    if (!r)
        return fd;
    if (r == -ETIMEDOUT)
        snprintf(
            why, why_bytes,
            "cannot connect to %s: as many wait there as may, and the daemon took none of them "
            "for %" PRIu64 " ms",
            path, limit_ns / LK_CLIENT_NS_A_MS);
    else
        snprintf(why, why_bytes, "cannot connect to %s: %s%s", path, strerror(-r), hint(-r));
    if (fd >= 0)
        close(fd);
    return r;
}

/* Nothing but the refusal's own words reach the user, so they are made a string here. */
static int refused(struct lk_refused *refused, char *why, size_t why_bytes) {
    refused->reason[sizeof(refused->reason) - 1] = '\0';
    snprintf(why, why_bytes, "%s", lk_printable(refused->reason, ""));
    return lk_client_error(refused->error);
}

static const char *name_of_answer(uint16_t type) {
    switch (type) {
    case LK_MSG_WELCOME:
        return "the greeting";
    case LK_MSG_POOL:
        return "the question for a pool";
    case LK_MSG_POOL_MAPPED:
        return "the question for a pool's pages";
    case LK_MSG_DEVICE_ARENA_MADE:
        return "the question for a device arena";
    default:
        return "the question";
    }
}

/* Until there is something to read, or the other side has hung up. */
static int await(int socket, uint64_t limit_ns) {
    struct pollfd fd = {.fd = socket, .events = POLLIN};
    uint64_t deadline = lk_client_deadline(limit_ns);
    while (!lk_client_poll(&fd, 1, deadline))
        if (lk_client_deadline(0) >= deadline)
            return -ETIMEDOUT;
    return 0;
}

int lk_client_answer(int socket, uint64_t limit_ns, uint16_t type, struct lk_message *ret,
                     size_t bytes, int *ret_fds, size_t fds, char *why, size_t why_bytes) {
    union {
        struct lk_message head;
        struct lk_refused refused;
        uint8_t bytes[LK_WIRE_BYTES_MAX];
    } packet;
    int received[LK_WIRE_FDS_MAX];
    if (await(socket, limit_ns)) {
        snprintf(why, why_bytes, "the daemon did not answer %s within %" PRIu64 " ms",
                 name_of_answer(type), limit_ns / LK_CLIENT_NS_A_MS);
        return -ETIMEDOUT;
    }
    int r = lk_wire_receive(socket, &packet.head, sizeof(packet), received, fds, why, why_bytes);
    if (r == -ECONNRESET) /* said where words of ours were left unread: what it sent is behind it */
        r = lk_wire_receive(socket, &packet.head, sizeof(packet), received, fds, why, why_bytes);
    if (r == -ECONNRESET || r == -EPIPE) {
        snprintf(why, why_bytes, "the daemon is gone: it closed the connection");
        return -ECONNRESET;
    }
    if (r)
        return r;
    if (packet.head.type == type && packet.head.bytes == bytes) {
        memcpy(ret, packet.bytes, bytes);
        for (size_t i = 0; i < fds; i++)
            ret_fds[i] = received[i];
        return 0;
    }
    for (size_t i = 0; i < fds; i++)
        if (received[i] >= 0)
            close(received[i]);
    if (packet.head.type == LK_MSG_REFUSED && packet.head.bytes == sizeof(packet.refused))
        return refused(&packet.refused, why, why_bytes);
    snprintf(why, why_bytes, "the daemon answered with message %u of %u bytes, not %u of %zu",
             packet.head.type, packet.head.bytes, type, bytes);
    return -EPROTO;
}

/* Takes the answer that is owed to a question nobody asks any more. A device arena is kept: the
 * daemon gives one to a connection. Other descriptors are not even opened. */
static int settle(struct locks *l) {
    union {
        struct lk_message head;
        struct lk_msg_device_arena_made made;
        uint8_t bytes[LK_WIRE_BYTES_MAX];
    } late;
    bool kept = l->owed.type == LK_MSG_DEVICE_ARENA_MADE;
    int fd = -1;
    int r = lk_client_answer(l->socket, l->limit_ns, l->owed.type, &late.head, l->owed.bytes, &fd,
                             kept, l->error, sizeof(l->error));
    if (r == -ETIMEDOUT || r == -ECONNRESET || r == -EMFILE)
        return r;
    l->owed.question.head.bytes = 0;
    if (fd >= 0) {
        l->made = late.made;
        l->made_fd = fd;
    }
    return 0; /* a refusal was an answer as well */
}

/* Sends it, unless it is the one whose answer is owed. */
static int put_question(struct locks *l, const struct lk_message *question, uint16_t type,
                        size_t bytes) {
    union lk_question *owed = &l->owed.question;
    int r = 0;
    if (owed->head.bytes == question->bytes && !memcmp(owed, question, question->bytes))
        return 0;
    if (owed->head.bytes)
        r = settle(l);
    if (r)
        return r;
    r = lk_wire_send(l->socket, question, NULL, 0);
    if (r && r != -EPIPE && r != -ECONNRESET)
        return lk_client_fail(l, r, "cannot ask the daemon: %s", strerror(-r));
    memcpy(owed, question, question->bytes);
    l->owed.type = type;
    l->owed.bytes = bytes;
    return r ? -ECONNRESET : 0;
}

int lk_client_ask(struct locks *locks, const struct lk_message *question, uint16_t type,
                  struct lk_message *ret, size_t bytes, int *ret_fd) {
    if (locks->dead)
        return lk_client_gone(locks);
    int r = put_question(locks, question, type, bytes);
    if (r == -ECONNRESET)
        return lk_client_gone(locks);
    if (r)
        return r;
    r = lk_client_answer(locks->socket, locks->limit_ns, type, ret, bytes, ret_fd, ret_fd ? 1 : 0,
                         locks->error, sizeof(locks->error));
    if (r == -ECONNRESET)
        locks->dead = true;
    if (r != -ETIMEDOUT && r != -EMFILE)
        locks->owed.question.head.bytes = 0;
    return r;
}
