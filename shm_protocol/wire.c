/* SPDX-License-Identifier: MIT */
/*
 * wire.c - one message over a SOCK_SEQPACKET socket, with descriptors. See wire.h for the contract.
 */
#include "wire.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Room for more descriptors than are wanted, so that surplus ones arrive and can be closed by
 * us. */
union control {
    struct cmsghdr head;
    char bytes[CMSG_SPACE(sizeof(int) * LK_WIRE_FDS_MAX)];
};

void lk_wire_head(struct lk_message *head, uint16_t type, size_t bytes) {
    head->magic = LK_ABI_MAGIC;
    head->type = type;
    head->bytes = (uint16_t)bytes;
}

int lk_wire_send(int socket, const struct lk_message *message, const int *fds, size_t count) {
    union control control;
    struct iovec part = {.iov_base = (void *)message, .iov_len = message->bytes};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};
    if (count > LK_WIRE_FDS_MAX)
        return -EINVAL;
    if (count) {
        memset(&control, 0, sizeof(control));
        packet.msg_control = control.bytes;
        packet.msg_controllen = CMSG_SPACE(sizeof(int) * count);
        struct cmsghdr *c = CMSG_FIRSTHDR(&packet);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * count);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * count);
    }
    ssize_t sent;
    do
        sent = sendmsg(socket, &packet, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? -errno : 0;
}

static int refuse(char *why, size_t why_bytes, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static int refuse(char *why, size_t why_bytes, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(why, why_bytes, format, args);
    va_end(args);
    return -EPROTO;
}

/* Descriptors of a received packet -> how many there are in all. */
static size_t collect(struct msghdr *packet, int fds[LK_WIRE_FDS_MAX]) {
    size_t count = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(packet); c; c = CMSG_NXTHDR(packet, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t here = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < here && count < LK_WIRE_FDS_MAX; i++)
            memcpy(&fds[count++], CMSG_DATA(c) + i * sizeof(int), sizeof(int));
    }
    return count;
}

static int check(const struct lk_message *message, size_t got, int flags, size_t fds,
                 size_t fds_max, size_t room, char *why, size_t why_bytes) {
    if (flags & MSG_TRUNC)
        return refuse(why, why_bytes,
                      "a message of more than %zu bytes was sent where at most "
                      "that many are expected",
                      room);
    if (got < sizeof(*message))
        return refuse(why, why_bytes, "a message of %zu bytes is shorter than its head, %zu bytes",
                      got, sizeof(*message));
    if (message->magic != LK_ABI_MAGIC)
        return refuse(why, why_bytes,
                      "the other side does not speak this protocol: its first word "
                      "is 0x%08x, not 0x%08x",
                      message->magic, LK_ABI_MAGIC);
    if (message->bytes != got)
        return refuse(why, why_bytes, "a message says that it has %u bytes and has %zu",
                      message->bytes, got);
    if ((flags & MSG_CTRUNC) && fds_max && fds <= fds_max) {
        refuse(
            why, why_bytes,
            "descriptors that came could not be taken: this process has as many files open as it "
            "may (ulimit -n)");
        return -EMFILE;
    }
    if ((flags & MSG_CTRUNC) || fds > fds_max)
        return refuse(why, why_bytes,
                      "a message carries more than %zu descriptors, as many as are expected",
                      fds_max);
    return 0;
}

/* The packet that was looked at; its descriptors were opened then. */
static void drop(int socket) {
    char byte;
    (void)!recv(socket, &byte, sizeof(byte), MSG_DONTWAIT);
}

int lk_wire_receive(int socket, struct lk_message *ret, size_t room, int *ret_fds, size_t fds_max,
                    char *why, size_t why_bytes) {
    union control control;
    int fds[LK_WIRE_FDS_MAX];
    struct iovec part = {.iov_base = ret, .iov_len = room};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};
    if (fds_max) { /* else they are dropped unseen: to close one may wait for its maker */
        packet.msg_control = control.bytes;
        packet.msg_controllen = sizeof(control.bytes);
    }
    ssize_t got;
    memset(ret, 0, room);
    do /* what cannot be taken whole is only looked at: descriptors left out would be lost */
        got = recvmsg(socket, &packet, MSG_CMSG_CLOEXEC | (fds_max ? MSG_PEEK : 0));
    while (got < 0 && errno == EINTR);
    if (got < 0)
        return -errno;
    size_t count = collect(&packet, fds);
    int r = got == 0
                ? -ECONNRESET
                : check(ret, (size_t)got, packet.msg_flags, count, fds_max, room, why, why_bytes);
    if (got > 0 && fds_max && r != -EMFILE)
        drop(socket);
    if (r) {
        for (size_t i = 0; i < count; i++)
            close(fds[i]);
        return r;
    }
    for (size_t i = 0; i < fds_max; i++)
        ret_fds[i] = i < count ? fds[i] : -1;
    return 0;
}
