/* SPDX-License-Identifier: MIT */
/*
 * access.c - see access.h. Control thread.
 */
#include "access.h"

#include <errno.h>
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

void lk_access_open(const char *group, struct lk_access *ret) {
    const struct group *entry = *group ? getgrnam(group) : NULL;
    *ret = (struct lk_access){.owner = geteuid(), .has_group = entry != NULL};
    if (entry)
        ret->group = entry->gr_gid;
    snprintf(ret->group_name, sizeof(ret->group_name), "%s", group);
}

const char *lk_access_describe(const struct lk_access *access, char *text, size_t bytes) {
    char owner[32] = "", group[64] = "";
    if (access->owner != 0)
        snprintf(owner, sizeof(owner), "%s uid %u", access->has_group ? "," : " and",
                 access->owner);
    if (access->has_group)
        snprintf(group, sizeof(group), " and members of group %s", access->group_name);
    snprintf(text, bytes, "root%s%s", owner, group);
    return text;
}

bool lk_access_admin(const struct lk_access *access, uid_t uid) {
    return uid == 0 || uid == access->owner;
}

/* Whether the peer held the group among its supplementary ones. */
static bool in_supplementary(int socket, gid_t group) {
    socklen_t bytes = 0;
    bool found = false;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, NULL, &bytes) == 0 || errno != ERANGE)
        return false; /* none, or a kernel that cannot say */
    gid_t *groups = malloc(bytes);
    if (groups && getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups, &bytes) == 0)
        for (size_t i = 0; i < bytes / sizeof(*groups) && !found; i++)
            found = groups[i] == group;
    free(groups);
    return found;
}

/* What an administrator can do for who was refused. */
static void say_remedy(const struct lk_access *access, char *text, size_t bytes) {
    const char *group = access->group_name;
    if (access->has_group)
        snprintf(text, bytes, ": usermod -aG %s USER, then log in anew", group);
    else if (*group)
        snprintf(text, bytes,
                 "; group %s does not exist: create it (systemd-sysusers, or groupadd %s), then "
                 "locksctl reload",
                 group, group);
    else
        snprintf(text, bytes, "; name a group in daemon.group, then locksctl reload");
}

int lk_access_check(const struct lk_access *access, int socket, struct lk_identity *ret, char *why,
                    size_t why_bytes) {
    struct ucred peer;
    char who[128];
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &(socklen_t){sizeof(peer)})) {
        *ret = (struct lk_identity){0, (uid_t)-1, (gid_t)-1};
        snprintf(why, why_bytes, "the kernel does not say who connects: %s", strerror(errno));
        return -EACCES;
    }
    *ret = (struct lk_identity){peer.pid, peer.uid, peer.gid};
    if (lk_access_admin(access, peer.uid))
        return 0;
    if (access->has_group && (peer.gid == access->group || in_supplementary(socket, access->group)))
        return 0;
    int length = snprintf(why, why_bytes, "uid %u may not connect: only %s may", peer.uid,
                          lk_access_describe(access, who, sizeof(who)));
    say_remedy(access, why + length, why_bytes - (size_t)length);
    return -EACCES;
}
