/* SPDX-License-Identifier: MIT */
/*
 * admin.h - verbs asked over the socket, answered with JSON: status, clients, pools, drain, resume,
 * reload.
 *
 * Whoever may connect may look; only root and the daemon's user may change. The text goes through a
 * sealed memfd, for it may be longer than a message. Control thread.
 */
#ifndef LK_ADMIN_H
#define LK_ADMIN_H

#include "server.h"

/* Carries the verb out and fills the reply, whose error and reason say what was wrong. *ret_fd: the
 * text, the caller's to close; -1 on error. */
void lk_admin_answer(struct lk_server *server, const struct lk_identity *who,
                     const struct lk_msg_admin *ask, struct lk_msg_admin_reply *ret, int *ret_fd);

#endif
