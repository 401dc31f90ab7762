/* SPDX-License-Identifier: MIT */
/*
 * socket.c - questions and answers on the daemon's socket.
 */
#include "internal.h"

#include <errno.h>
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

int lk_client_dial(const char *path, char *why, size_t why_bytes) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval patience = {.tv_sec = LK_CLIENT_REPLY_SECONDS};
    if (!path && (!(path = getenv("LOCKSD_SOCKET")) || !*path)) /* empty is as good as unset */
        path = LK_SOCKET_PATH;
    if (!*path || strlen(path) >= sizeof(address.sun_path)) {
        snprintf(why, why_bytes, "the socket's path has %zu bytes, it may have 1 to %zu: %s",
                 strlen(path), sizeof(address.sun_path) - 1, path);
        return -EINVAL;
    }
    memcpy(address.sun_path, path, strlen(path));
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)) ||
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience)) ||
        connect(fd, (struct sockaddr *)&address, sizeof(address))) {
        int r = -errno;
        snprintf(why, why_bytes, "cannot connect to %s: %s%s", path, strerror(-r), hint(-r));
        if (fd >= 0)
            close(fd);
        return r;
    }
    return fd;
}

/* Nothing but the refusal's own words reach the user, so they are made a string here. */
static int refused(struct lk_refused *refused, char *why, size_t why_bytes) {
    refused->reason[sizeof(refused->reason) - 1] = '\0';
    snprintf(why, why_bytes, "%s", lk_printable(refused->reason, ""));
    return lk_client_error(refused->error);
}

int lk_client_answer(int socket, uint16_t type, struct lk_message *ret, size_t bytes, int *ret_fds,
                     size_t fds, char *why, size_t why_bytes) {
    union {
        struct lk_message head;
        struct lk_refused refused;
        uint8_t bytes[LK_WIRE_BYTES_MAX];
    } packet;
    int received[LK_WIRE_FDS_MAX];
    int r = lk_wire_receive(socket, &packet.head, sizeof(packet), received, fds, why, why_bytes);
    if (r == -EAGAIN) {
        snprintf(why, why_bytes, "the daemon did not answer within %d seconds",
                 LK_CLIENT_REPLY_SECONDS);
        return -ETIMEDOUT;
    }
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

int lk_client_ask(struct locks *locks, const struct lk_message *question, uint16_t type,
                  struct lk_message *ret, size_t bytes, int *ret_fd) {
    if (locks->dead)
        return lk_client_gone(locks);
    int r = lk_wire_send(locks->socket, question, NULL, 0);
    if (r == -EPIPE || r == -ECONNRESET)
        return lk_client_gone(locks);
    if (r)
        return lk_client_fail(locks, r, "cannot ask the daemon: %s", strerror(-r));
    r = lk_client_answer(locks->socket, type, ret, bytes, ret_fd, ret_fd ? 1 : 0, locks->error,
                         sizeof(locks->error));
    if (r == -ECONNRESET)
        locks->dead = true;
    return r;
}
