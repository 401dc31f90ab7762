/* SPDX-License-Identifier: MIT */
/*
 * private.h - a locksd of one's own, for the length of a tool's run.
 *
 * The daemon is $LOCKSD, else `locksd` beside the running program, else ../sbin/locksd from there,
 * else the one in $PATH. It runs without a configuration file, with a socket in a fresh folder
 * under $XDG_RUNTIME_DIR (else /tmp), and says by sd_notify when it is ready. It dies with the
 * tool: stopped in order, killed by the tool's signal handlers, or by the kernel (parent-death
 * signal) if the tool is killed. Its words are kept and shown only if it fails.
 *
 *     start -> ready | why it failed -> ... -> stop
 *
 * One at a time in a process; the thread that starts it must outlive it.
 */
#ifndef LK_PRIVATE_H
#define LK_PRIVATE_H

#include <stddef.h>
#include <sys/types.h>

#define LK_PRIVATE_PATH_BYTES 108 /* sun_path */
#define LK_PRIVATE_SETS_MAX   32

struct lk_private {
    pid_t pid;
    char folder[64], socket[LK_PRIVATE_PATH_BYTES];
};

/* sets: `count` of "SECTION.KEY=VALUE", after the tool's own (no group, no draining). -> 0 with
 * ret->socket accepting clients, or -errno with a sentence in why, the daemon's own words in it. */
int lk_private_start(const char *const *sets, size_t count, unsigned timeout_s,
                     struct lk_private *ret, char *why, size_t why_bytes);
void lk_private_stop(struct lk_private *daemon);

#endif
