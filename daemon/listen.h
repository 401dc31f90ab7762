/* SPDX-License-Identifier: MIT */
/*
 * listen.h - the listening socket: passed by systemd, or made here.
 *
 * A socket file left by a dead daemon is replaced; one that somebody answers at is not. Two daemons
 * that start at once are told apart by a lock on the folder, held while one looks, removes and
 * binds.
 */
#ifndef LK_LISTEN_H
#define LK_LISTEN_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "config.h"

struct lk_listener {
    int fd;
    bool passed; /* systemd's: neither made nor removed here */
    char path[LK_PATH_BYTES];
    dev_t device; /* of the file made: another's is not removed */
    ino_t inode;
};

/* Listens, non-blocking; nobody is accepted yet. -> 0, or -errno with a sentence in why:
 * -EADDRINUSE somebody listens there already, -EBUSY another daemon that starts holds the folder's
 * lock, -EEXIST the path is no socket, -EINVAL systemd passed something else. */
int lk_listener_open(const char *path, struct lk_listener *ret, char *why, size_t why_bytes);
void lk_listener_close(struct lk_listener *listener);

/* Refuses all who wait at the socket that systemd passed, if it did; NULL: it was not opened yet.
 * For a start that fails and would fail again: whoever waits on makes systemd start the daemon over
 * and over. */
void lk_listener_turn_away(const struct lk_listener *listener);

#endif
