/* SPDX-License-Identifier: MIT */
/*
 * listen.c - see listen.h. Main thread, at start and stop.
 */
#include "listen.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include "../shm_protocol/wire.h"
#include "guard.h"

#define ELSEWHERE         "name another socket (--socket PATH, or socket in [daemon])"
#define BACKLOG           128
#define TURNED_AWAY_MAX   1024 /* who knocks on and on does not keep the daemon */
#define FOLDER_LOCK_TRIES 100  /* of 10 ms: another daemon's look-and-bind takes less than one */

static int take_passed(int count, struct lk_listener *ret, char *why, size_t bytes) {
    struct sockaddr_un address = {0};
    socklen_t length = sizeof(address);
    int fd = SD_LISTEN_FDS_START;
    if (count != 1) {
        snprintf(why, bytes, "systemd passed %d sockets, locksd takes one", count);
        return -EINVAL;
    }
    if (sd_is_socket(fd, AF_UNIX, SOCK_SEQPACKET, 1) <= 0) {
        snprintf(why, bytes,
                 "the socket systemd passed is no listening Unix socket of sequential packets: use "
                 "ListenSequentialPacket=");
        return -EINVAL;
    }
    if (fcntl(fd, F_SETFL, O_NONBLOCK) || getsockname(fd, (struct sockaddr *)&address, &length)) {
        int rc = -errno;
        snprintf(why, bytes, "the socket systemd passed: %s", strerror(-rc));
        return rc;
    }
    *ret = (struct lk_listener){.fd = fd, .passed = true};
    memcpy(ret->path, address.sun_path, sizeof(ret->path) - 1);
    return 0;
}

/* Locks the folder of the socket. -> descriptor or -errno. */
static int lock_folder(const char *path, char *why, size_t bytes) {
    char copy[LK_PATH_BYTES];
    snprintf(copy, sizeof(copy), "%s", path);
    const char *folder = dirname(copy);
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        int rc = -errno;
        snprintf(why, bytes,
                 "%s: the folder of the socket cannot be opened: %s; create it, or " ELSEWHERE,
                 folder, strerror(-rc));
        return rc;
    }
    for (int i = 0; i < FOLDER_LOCK_TRIES; i++) {
        if (flock(fd, LOCK_EX | LOCK_NB) == 0)
            return fd;
        poll(NULL, 0, 10);
    }
    close(fd);
    snprintf(why, bytes, "%s: somebody else holds a lock on the folder of the socket; " ELSEWHERE,
             folder);
    return -EBUSY;
}

/* Makes the path free: removes a socket that nobody listens at. */
static int clear_path(const struct sockaddr_un *address, char *why, size_t bytes) {
    struct stat file;
    if (lstat(address->sun_path, &file))
        return errno == ENOENT ? 0 : -errno;
    if (!S_ISSOCK(file.st_mode)) {
        snprintf(why, bytes,
                 "%s exists and is no socket: it is left alone; remove it, or " ELSEWHERE,
                 address->sun_path);
        return -EEXIST;
    }
    int probe = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (probe < 0)
        return -errno;
    int rc = connect(probe, (const struct sockaddr *)address, sizeof(*address)) ? errno : 0;
    close(probe);
    if (rc == ECONNREFUSED || rc == ENOENT)
        return unlink(address->sun_path) && errno != ENOENT ? -errno : 0;
    snprintf(why, bytes,
             "%s: somebody listens there already%s%s; stop it (systemctl stop locksd.socket "
             "locksd.service), or " ELSEWHERE,
             address->sun_path, rc == 0 || rc == EAGAIN ? ", a running locksd it seems" : ": ",
             rc == 0 || rc == EAGAIN ? "" : strerror(rc));
    return -EADDRINUSE;
}

/* A name beside the path, no longer than it. */
static struct sockaddr_un name_beside(const struct sockaddr_un *address) {
    struct sockaddr_un beside = *address;
    char *last = beside.sun_path + strlen(beside.sun_path) - 1;
    *last = *last == '~' ? '-' : '~';
    return beside;
}

/* Everybody may knock: access.c decides, and says why not. Who finds the path is heard: it gets its
 * name when the socket listens. */
static int listen_at(int fd, const struct sockaddr_un *address, const struct sockaddr_un *beside) {
    if (bind(fd, (const struct sockaddr *)beside, sizeof(*beside)))
        return -errno;
    if (chmod(beside->sun_path, 0666) == 0 && listen(fd, BACKLOG) == 0 &&
        rename(beside->sun_path, address->sun_path) == 0)
        return 0;
    int rc = -errno;
    unlink(beside->sun_path);
    return rc;
}

/* Takes the path under the folder's lock. */
static int take_path(int fd, const char *path, char *why, size_t bytes) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    const struct sockaddr_un beside = name_beside(&address);
    int folder = lock_folder(path, why, bytes);
    if (folder < 0)
        return folder;
    *why = 0;
    int rc = clear_path(&address, why, bytes);
    if (!rc)
        rc = clear_path(&beside, why, bytes); /* of one that was killed there */
    if (!rc)
        rc = listen_at(fd, &address, &beside);
    if (rc && !*why)
        snprintf(why, bytes, "%s: cannot listen there: %s; %s" ELSEWHERE, path, strerror(-rc),
                 rc == -EACCES || rc == -EPERM ? "start as a user who may write in its folder, or "
                                               : "");
    close(folder);
    return rc;
}

int lk_listener_open(const char *path, struct lk_listener *ret, char *why, size_t why_bytes) {
    struct stat file;
    const char *said = getenv("LISTEN_FDS");
    char listen_fds[32];
    snprintf(listen_fds, sizeof(listen_fds), "%s", said ? said : ""); /* the next call unsets it */
    int passed = sd_listen_fds(1);
    if (passed > 0)
        return take_passed(passed, ret, why, why_bytes);
    if (passed < 0) {
        snprintf(why, why_bytes, "no socket can be taken from LISTEN_FDS=%s: %s", listen_fds,
                 strerror(-passed));
        return passed;
    }
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        int rc = -errno;
        snprintf(why, why_bytes, "cannot make a socket: %s", strerror(-rc));
        return rc;
    }
    int rc = take_path(fd, path, why, why_bytes);
    if (!rc && stat(path, &file)) {
        rc = -errno;
        snprintf(why, why_bytes, "%s: gone after it was made: %s", path, strerror(-rc));
    }
    if (rc) {
        close(fd);
        return rc;
    }
    *ret = (struct lk_listener){.fd = fd, .device = file.st_dev, .inode = file.st_ino};
    snprintf(ret->path, sizeof(ret->path), "%s", path);
    return 0;
}

void lk_listener_close(struct lk_listener *listener) {
    struct stat file;
    if (!listener->passed && stat(listener->path, &file) == 0 && file.st_dev == listener->device &&
        file.st_ino == listener->inode)
        unlink(listener->path);
    lk_guard_close(listener->fd); /* with it who waited, and what they had sent */
    listener->fd = -1;
}

static void turn_away(int fd) {
    char hello[LK_WIRE_BYTES_MAX];
    struct lk_refused refused = {
        .error = -ECONNREFUSED, .major = LK_ABI_MAJOR, .minor = LK_ABI_MINOR};
    lk_wire_head(&refused.head, LK_MSG_REFUSED, sizeof(refused));
    snprintf(refused.reason, sizeof(refused.reason), "locksd cannot start: its log says why");
    lk_guard_begin();
    (void)!recv(fd, hello, sizeof(hello), MSG_DONTWAIT); /* left unread it voids the answer */
    lk_guard_end();
    lk_wire_send(fd, &refused.head, NULL, 0);
    lk_guard_close(fd);
}

void lk_listener_turn_away(const struct lk_listener *listener) {
    int fd = listener ? listener->fd : SD_LISTEN_FDS_START;
    bool passed = listener
                      ? listener->passed
                      : sd_listen_fds(0) == 1 && sd_is_socket(fd, AF_UNIX, SOCK_SEQPACKET, 1) > 0 &&
                            fcntl(fd, F_SETFL, O_NONBLOCK) == 0;
    for (int i = 0; passed && i < TURNED_AWAY_MAX; i++) {
        int peer = accept4(fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (peer < 0)
            return;
        turn_away(peer);
    }
}
