/* SPDX-License-Identifier: MIT */
/*
 * access.h - who may connect, and who may administer.
 *
 * Root, the daemon's own user and members of one group may connect; root and the daemon's user may
 * also drain, resume and reload. The kernel's word about the peer is taken (SO_PEERCRED,
 * SO_PEERGROUPS: what the process held when it connected), so that no user database, which may be
 * slow or away, is asked while clients wait.
 */
#ifndef LK_ACCESS_H
#define LK_ACCESS_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct lk_access {
    uid_t owner;
    bool has_group; /* false: the configuration names none, or it does not exist */
    gid_t group;
    char group_name[32];
};

struct lk_identity {
    pid_t pid;
    uid_t uid;
    gid_t gid;
};

/* Looks the group up; may block: at the start, and at a reload. */
void lk_access_open(const char *group, struct lk_access *ret);
/* "root, uid 998 and members of group locks" -> text */
const char *lk_access_describe(const struct lk_access *access, char *text, size_t bytes);
/* -> 0 and who it is; -EACCES with a sentence in why, ret filled as well. */
int lk_access_check(const struct lk_access *access, int socket, struct lk_identity *ret, char *why,
                    size_t why_bytes);
bool lk_access_admin(const struct lk_access *access, uid_t uid);

#endif
