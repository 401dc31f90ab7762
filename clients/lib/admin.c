/* SPDX-License-Identifier: MIT */
/*
 * admin.c - one question of an administrator, answered with JSON text.
 */
#include "internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../shm_protocol/printable.h"
#include "../../shm_protocol/wire.h"

#define JSON_BYTES_MAX (UINT64_C(64) << 20) /* far above any status */
#define LIMIT_NS       (LK_CLIENT_NS_A_MS * LK_CLIENT_LIMIT_MS)

/* The memfd's text as a string. */
static int read_text(int fd, uint64_t bytes, char **ret, char *why, size_t why_bytes) {
    if (fd < 0) {
        snprintf(why, why_bytes, "the daemon's answer comes without its text");
        return -EPROTO;
    }
    if (bytes > JSON_BYTES_MAX) {
        snprintf(why, why_bytes, "the daemon's answer has %llu bytes, at most %llu are read",
                 (unsigned long long)bytes, (unsigned long long)JSON_BYTES_MAX);
        return -EPROTO;
    }
    char *text = malloc(bytes + 1);
    if (!text) {
        snprintf(why, why_bytes, "out of memory");
        return -ENOMEM;
    }
    uint64_t at = 0;
    ssize_t got = 1;
    while (at < bytes && got > 0) {
        got = pread(fd, text + at, bytes - at, (off_t)at);
        at += got > 0 ? (uint64_t)got : 0;
    }
    if (at < bytes) {
        free(text);
        snprintf(why, why_bytes, "the daemon's answer ends after %llu of %llu bytes",
                 (unsigned long long)at, (unsigned long long)bytes);
        return -EPROTO;
    }
    text[bytes] = '\0';
    *ret = text;
    return 0;
}

static int ask(int socket, const char *verb, char **ret, char *why, size_t why_bytes) {
    struct lk_msg_admin question = {0};
    struct lk_msg_admin_reply reply;
    int fd = -1;
    if (strlen(verb) >= sizeof(question.verb)) {
        snprintf(why, why_bytes, "a verb has at most %zu bytes, this has %zu",
                 sizeof(question.verb) - 1, strlen(verb));
        return -EINVAL;
    }
    memcpy(question.verb, verb, strlen(verb));
    lk_wire_head(&question.head, LK_MSG_ADMIN, sizeof(question));
    int r = lk_wire_send(socket, &question.head, NULL, 0);
    if (r && r != -EPIPE) {
        snprintf(why, why_bytes, "cannot ask the daemon: %s", strerror(-r));
        return r;
    }
    r = lk_client_answer(socket, LIMIT_NS, LK_MSG_ADMIN_REPLY, &reply.head, sizeof(reply), &fd, 1,
                         why, why_bytes);
    if (r)
        return r;
    if (reply.error) {
        reply.reason[sizeof(reply.reason) - 1] = '\0';
        snprintf(why, why_bytes, "%s", lk_printable(reply.reason, ""));
        r = lk_client_error(reply.error);
    } else {
        r = read_text(fd, reply.bytes, ret, why, why_bytes);
    }
    if (fd >= 0)
        close(fd);
    return r;
}

int locks_admin(const char *socket, const char *verb, char **ret_json, char *why,
                size_t why_bytes) {
    char text[LK_CLIENT_ERROR_BYTES] = "";
    int fd = lk_client_dial(socket, LIMIT_NS, text, sizeof(text));
    int r = fd < 0 ? fd : ask(fd, verb, ret_json, text, sizeof(text));
    if (fd >= 0)
        close(fd);
    if (r && why)
        snprintf(why, why_bytes, "%s", text);
    return r;
}
