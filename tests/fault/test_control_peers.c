/* SPDX-License-Identifier: MIT */
/*
 * test_control_peers.c - who knocks at the daemon's socket: garbage, wrong versions, floods, silent
 * and slow peers, strangers. After each the daemon still serves, holds no descriptor more than
 * before, and has said why.
 */
#include <check.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <jansson.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sysexits.h>
#include <unistd.h>

#include "../common/run.h"
#include "../../shm_protocol/wire.h"
#include "../common/rig.h"
#include "locks.h"

static struct rig rig;

static void assert_has(const char *text, const char *words) {
    ck_assert_msg(strstr(text, words) != NULL, "'%s' lacks '%s'", text, words);
}

static int try_connect(struct locks **ret) {
    struct locks_options options = {
        .size = sizeof(options), .socket = rig.socket, .arena_bytes = 65536};
    return locks_connect(&options, ret);
}

static void assert_serves(void) {
    struct locks *client;
    ck_assert_msg(try_connect(&client) == 0, "%s", locks_error(NULL));
    locks_close(client);
}

static int open_descriptors(void) {
    char path[64];
    int count = 0;
    snprintf(path, sizeof(path), "/proc/%d/fd", rig.pid);
    DIR *folder = opendir(path);
    ck_assert_ptr_nonnull(folder);
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

/* Whether the daemon's control thread waits: not for a processor, but for something to do. */
static bool is_asleep(void) {
    char path[64], text[512], *name_end = NULL;
    snprintf(path, sizeof(path), "/proc/%d/stat", rig.pid);
    FILE *file = fopen(path, "r");
    ck_assert_ptr_nonnull(file);
    if (fgets(text, sizeof(text), file))
        name_end = strrchr(text, ')');
    fclose(file);
    ck_assert_ptr_nonnull(name_end);
    return name_end[2] == 'S';
}

/* Of a daemon at rest: it says that it is ready, and then closes the socket that it said so by. */
static int settled_descriptors(void) {
    int count = -1;
    for (int same = 0; same < 10; same++) {
        rig_sleep(0.01);
        int now = open_descriptors();
        if (now != count || !is_asleep())
            same = 0;
        count = now;
    }
    return count;
}

/* No more than before, once things have settled. */
static void assert_descriptors(int before) {
    for (double end = rig_now() + RIG_PATIENCE; open_descriptors() > before && rig_now() < end;)
        rig_sleep(0.01);
    ck_assert_int_le(open_descriptors(), before);
}

static void start(void) {
    rig_start(&rig, NULL);
}

static void stop(void) {
    ck_assert_int_eq(rig_stop(&rig), EX_OK);
    rig_close(&rig);
}

/* The refusal a peer gets, after which the daemon hangs up. */
static struct lk_refused read_refusal(int fd) {
    struct lk_refused refused;
    char why[256] = "", more;
    int rc = lk_wire_receive(fd, &refused.head, sizeof(refused), NULL, 0, why, sizeof(why));
    ck_assert_msg(rc == 0, "no refusal: %d %s", rc, why);
    ck_assert_int_eq(refused.head.type, LK_MSG_REFUSED);
    ck_assert_int_lt(refused.error, 0);
    ck_assert_int_le(recv(fd, &more, 1, 0), 0);
    return refused;
}

static struct lk_hello good_hello(void) {
    struct lk_hello hello = {.major = LK_ABI_MAJOR, .minor = LK_ABI_MINOR, .name = "peer"};
    lk_wire_head(&hello.head, LK_MSG_HELLO, sizeof(hello));
    return hello;
}

#define WELCOME_FDS 8 /* room for more than come */

/* ret_fds: what came with it, then -1. */
static void read_welcome(int fd, int ret_fds[WELCOME_FDS]) {
    union {
        struct lk_message head;
        struct lk_welcome welcome;
    } answer;
    char why[256];
    ck_assert_int_eq(
        lk_wire_receive(fd, &answer.head, sizeof(answer), ret_fds, WELCOME_FDS, why, sizeof(why)),
        0);
    ck_assert_int_eq(answer.head.type, LK_MSG_WELCOME);
}

/* A connection that is welcomed; ret_fds as above. */
static int join(int ret_fds[WELCOME_FDS]) {
    struct lk_hello hello = good_hello();
    int fd = rig_connect(&rig);
    ck_assert_int_eq(lk_wire_send(fd, &hello.head, NULL, 0), 0);
    read_welcome(fd, ret_fds);
    return fd;
}

static void close_all(const int fds[WELCOME_FDS]) {
    for (int i = 0; i < WELCOME_FDS; i++)
        if (fds[i] >= 0)
            close(fds[i]);
}

/* ---- garbage ---- */

static size_t make_noise(char *at) {
    memset(at, 0x5a, 64);
    return 64;
}
static size_t make_short(char *at) {
    memset(at, 0, 3);
    return 3;
}
static size_t make_huge(char *at) {
    struct lk_hello hello = good_hello();
    memset(at, 0, 4096);
    memcpy(at, &hello, sizeof(hello));
    return 4096;
}
static size_t make_truncated(char *at) {
    struct lk_hello hello = good_hello();
    memcpy(at, &hello, 40);
    return 40;
}
static size_t make_short_hello(char *at) {
    struct lk_hello hello = good_hello();
    lk_wire_head(&hello.head, LK_MSG_HELLO, 40);
    memcpy(at, &hello, 40);
    return 40;
}
static size_t make_unknown(char *at) {
    struct lk_message message;
    lk_wire_head(&message, 777, sizeof(message));
    memcpy(at, &message, sizeof(message));
    return sizeof(message);
}
static size_t make_question(char *at) {
    struct lk_msg_pool_get get = {.index = 0};
    lk_wire_head(&get.head, LK_MSG_POOL_GET, sizeof(get));
    memcpy(at, &get, sizeof(get));
    return sizeof(get);
}
static size_t make_major(char *at) {
    struct lk_hello hello = good_hello();
    hello.major = 9;
    memcpy(at, &hello, sizeof(hello));
    return sizeof(hello);
}
static size_t make_minor(char *at) {
    struct lk_hello hello = good_hello();
    hello.minor = hello.min_minor = LK_ABI_MINOR + 7;
    memcpy(at, &hello, sizeof(hello));
    return sizeof(hello);
}
static size_t make_reserved(char *at) {
    struct lk_hello hello = good_hello();
    hello.reserved2 = 1;
    memcpy(at, &hello, sizeof(hello));
    return sizeof(hello);
}
static size_t make_arena(char *at) {
    struct lk_hello hello = good_hello();
    hello.arena_bytes = UINT64_C(1) << 39;
    memcpy(at, &hello, sizeof(hello));
    return sizeof(hello);
}
static size_t make_entries(char *at) {
    struct lk_hello hello = good_hello();
    hello.sq_entries = 48;
    memcpy(at, &hello, sizeof(hello));
    return sizeof(hello);
}

static const struct {
    size_t (*make)(char *at);
    const char *words, *more; /* both in the sentence */
} garbage[] = {
    {make_noise, "0x5a5a5a5a", "does not speak this protocol"},
    {make_short, "3 bytes", "shorter than its head"},
    {make_huge, "more than", "bytes"},
    {make_truncated, "says that it has 64 bytes", "has 40"},
    {make_short_hello, "type 1 and 40 bytes", "not expected before the hello"},
    {make_unknown, "type 777", "not expected before the hello"},
    {make_question, "type 4", "not expected before the hello"},
    {make_major, "9", "1"},
    {make_minor, "1.8", "1.0"},
    {make_reserved, "reserved", ""},
    {make_arena, "549755813888", "16777216"},
    {make_entries, "48", "power of two"},
};

START_TEST(refuses_garbage_in_a_sentence) {
    char packet[4096];
    int before = settled_descriptors(), fd = rig_connect(&rig);
    size_t bytes = garbage[_i].make(packet);
    ck_assert_int_eq(send(fd, packet, bytes, MSG_NOSIGNAL), (ssize_t)bytes);
    struct lk_refused refused = read_refusal(fd);
    assert_has(refused.reason, garbage[_i].words);
    assert_has(refused.reason, garbage[_i].more);
    ck_assert_int_eq(refused.major, LK_ABI_MAJOR);
    close(fd);
    assert_descriptors(before);
    assert_serves();
}
END_TEST

START_TEST(names_both_versions) {
    struct lk_hello hello = good_hello();
    char other[16], ours[16];
    int fd = rig_connect(&rig);
    hello.major = 923;
    send(fd, &hello, sizeof(hello), MSG_NOSIGNAL);
    struct lk_refused refused = read_refusal(fd);
    snprintf(other, sizeof(other), "%d.%d", 923, LK_ABI_MINOR);
    snprintf(ours, sizeof(ours), "%d.%d", LK_ABI_MAJOR, LK_ABI_MINOR);
    assert_has(refused.reason, other);
    assert_has(refused.reason, ours);
    ck_assert_int_eq(refused.error, -EPROTO);
    close(fd);
}
END_TEST

START_TEST(closes_descriptors_it_did_not_ask_for) {
    struct lk_hello hello = good_hello();
    int before = settled_descriptors(), fd = rig_connect(&rig), passed[8];
    for (int i = 0; i < 8; i++)
        passed[i] = STDIN_FILENO;
    ck_assert_int_eq(lk_wire_send(fd, &hello.head, passed, 8), 0);
    struct lk_refused refused = read_refusal(fd);
    assert_has(refused.reason, "descriptors");
    close(fd);
    assert_descriptors(before);
    assert_serves();
}
END_TEST

/* A TCP socket that cannot send what it has, and waits a minute for that when it is closed; the
 * other end stays open in *ret_peer. */
static int make_lingering(int *ret_peer) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t bytes = sizeof(address);
    static char text[65536];
    int listener = socket(AF_INET, SOCK_STREAM, 0), fd = socket(AF_INET, SOCK_STREAM, 0);
    ck_assert_int_eq(bind(listener, (struct sockaddr *)&address, bytes), 0);
    ck_assert_int_eq(listen(listener, 1), 0);
    ck_assert_int_eq(getsockname(listener, (struct sockaddr *)&address, &bytes), 0);
    ck_assert_int_eq(connect(fd, (struct sockaddr *)&address, bytes), 0);
    *ret_peer = accept(listener, NULL, NULL);
    ck_assert_int_ge(*ret_peer, 0);
    close(listener);
    while (send(fd, text, sizeof(text), MSG_DONTWAIT) > 0)
        ;
    struct linger linger = {.l_onoff = 1, .l_linger = 60};
    ck_assert_int_eq(setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger)), 0);
    return fd;
}

/* Sends one to `fd`, the last reference with it, and looks whether anybody is held up. */
static void send_lingering(int fd) {
    struct lk_message message;
    int status, peer, lingering = make_lingering(&peer);
    lk_wire_head(&message, 777, sizeof(message));
    kill(rig.pid, SIGSTOP); /* else it may drop its reference first, and ours is the last */
    ck_assert_int_eq(waitpid(rig.pid, &status, WUNTRACED), rig.pid);
    ck_assert_int_eq(lk_wire_send(fd, &message, &lingering, 1), 0);
    close(lingering);
    kill(rig.pid, SIGCONT);
    double begun = rig_now();
    assert_serves();
    ck_assert_msg(rig_now() - begun < RIG_PATIENCE, "held up for %.1f s", rig_now() - begun);
    close(peer);
}

START_TEST(lingering_sockets_hold_nobody_up) {
    int before = settled_descriptors(), fds[WELCOME_FDS], fd = join(fds);
    send_lingering(fds[3]); /* the bell */
    send_lingering(fds[3]); /* not heard any more: dropped when the channel goes */
    send_lingering(fd);
    read_refusal(fd);
    assert_serves();
    close_all(fds);
    close(fd);
    fd = rig_connect(&rig);
    ck_assert_int_eq(send(fd, "", 1, MSG_NOSIGNAL), 1);
    read_refusal(fd);
    send_lingering(fd); /* never received */
    close(fd);
    assert_descriptors(before);
    assert_serves();
}
END_TEST

START_TEST(refuses_nonsense_after_the_hello) {
    struct lk_hello hello = good_hello();
    int before = settled_descriptors(), fds[WELCOME_FDS], fd = join(fds);
    close_all(fds);
    ck_assert_int_eq(lk_wire_send(fd, &hello.head, NULL, 0), 0); /* twice */
    struct lk_refused refused = read_refusal(fd);
    assert_has(refused.reason, "not expected after the hello");
    close(fd);
    assert_descriptors(before);
    assert_serves();
}
END_TEST

/* ---- floods ---- */

/* What a device arena of `bytes` is answered: a refusal, after which the connection serves. */
static struct lk_refused ask_device_arena(int fd, uint64_t bytes) {
    struct lk_msg_device_arena ask = {.bytes = bytes};
    struct lk_msg_pool_get get = {.index = 0};
    union {
        struct lk_message head;
        struct lk_refused refused;
        struct lk_msg_pool pool;
    } answer;
    char why[256] = "";
    lk_wire_head(&ask.head, LK_MSG_DEVICE_ARENA, sizeof(ask));
    lk_wire_head(&get.head, LK_MSG_POOL_GET, sizeof(get));
    ck_assert_int_eq(lk_wire_send(fd, &ask.head, NULL, 0), 0);
    ck_assert_int_eq(lk_wire_receive(fd, &answer.head, sizeof(answer), NULL, 0, why, sizeof(why)),
                     0);
    ck_assert_int_eq(answer.head.type, LK_MSG_REFUSED);
    struct lk_refused refused = answer.refused;
    ck_assert_int_eq(lk_wire_send(fd, &get.head, NULL, 0), 0);
    ck_assert_int_eq(lk_wire_receive(fd, &answer.head, sizeof(answer), NULL, 0, why, sizeof(why)),
                     0);
    ck_assert_int_eq(answer.head.type, LK_MSG_POOL);
    return refused;
}

START_TEST(a_device_arena_is_refused_on_the_cpu) {
    int before = settled_descriptors(), fds[WELCOME_FDS], fd = join(fds);
    close_all(fds);
    struct lk_refused refused = ask_device_arena(fd, 1 << 20);
    ck_assert_int_eq(refused.error, -ENOTSUP);
    assert_has(refused.reason, "1048576 bytes");
    assert_has(refused.reason, "runs on the CPU");
    refused = ask_device_arena(fd, (256 << 20) + 1);
    ck_assert_int_eq(refused.error, -EDQUOT);
    assert_has(refused.reason, "268435457");
    assert_has(refused.reason, "limits.max_device_arena, 268435456");
    refused = ask_device_arena(fd, 8192);
    ck_assert_int_eq(refused.error, -EINVAL);
    assert_has(refused.reason, "fences alone take 8192");
    close(fd);
    assert_descriptors(before);
    assert_serves();
}
END_TEST

START_TEST(a_client_too_many_is_told_the_limit) {
    struct locks *clients[4], *fifth;
    for (int i = 0; i < 4; i++)
        ck_assert_int_eq(try_connect(&clients[i]), 0);
    ck_assert_int_eq(try_connect(&fifth), -EUSERS);
    assert_has(locks_error(NULL), "there are 4 clients: limits.max_channels is 4");
    locks_close(clients[2]);
    int rc = -EUSERS; /* until the old one's pages are back */
    for (double end = rig_now() + RIG_PATIENCE; rc && rig_now() < end; rig_sleep(0.01))
        rc = try_connect(&clients[2]);
    ck_assert_int_eq(rc, 0);
    for (int i = 0; i < 4; i++)
        locks_close(clients[i]);
}
END_TEST

/* Who says nothing for 5 seconds is told that instead, and counts for nothing. -> whether it is
 * told that it is one too many. */
static bool is_told_the_limit(int fd) {
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    struct lk_refused refused;
    char why[256];
    if (poll(&wait, 1, 0) != 1 ||
        lk_wire_receive(fd, &refused.head, sizeof(refused), NULL, 0, why, sizeof(why)) ||
        refused.error == -ETIMEDOUT)
        return false;
    assert_has(refused.reason, "limits.max_channels is 4");
    return true;
}

START_TEST(half_open_connections_have_a_limit) {
    enum { FLOOD = 200 };
    int before = settled_descriptors(), fds[FLOOD], told = 0;
    double end = rig_now() + RIG_PATIENCE;
    struct locks *client;
    struct locks_pool pool;
    ck_assert_int_eq(try_connect(&client), 0);
    for (int i = 0; i < FLOOD; i++)
        fds[i] = rig_connect(&rig);
    for (; told < FLOOD - 60 && rig_now() < end; rig_sleep(0.01))
        for (int i = 0; i < FLOOD; i++)
            told += is_told_the_limit(fds[i]);
    ck_assert_int_ge(told, FLOOD - 60);
    ck_assert_int_eq(locks_pool(client, NULL, &pool), 0); /* who is in is served */
    for (int i = 0; i < FLOOD; i++)
        close(fds[i]);
    locks_close(client);
    assert_descriptors(before);
    assert_serves();
}
END_TEST

START_TEST(a_silent_peer_is_hung_up_on) {
    double begun = rig_now();
    int fd = rig_connect(&rig);
    struct lk_refused refused = read_refusal(fd);
    ck_assert_int_eq(refused.error, -ETIMEDOUT);
    assert_has(refused.reason, "nothing was said for 5 seconds");
    ck_assert(rig_now() - begun > 4);
    close(fd);
    assert_serves();
}
END_TEST

/* Nor is who spoke while the daemon was stopped silent. */
START_TEST(words_not_read_in_time_are_no_silence) {
    struct lk_hello hello = good_hello();
    int status, fds[WELCOME_FDS], fd = rig_connect(&rig);
    assert_serves(); /* so that one is accepted */
    kill(rig.pid, SIGSTOP);
    ck_assert_int_eq(waitpid(rig.pid, &status, WUNTRACED), rig.pid);
    ck_assert_int_eq(lk_wire_send(fd, &hello.head, NULL, 0), 0);
    usleep(5200000);
    kill(rig.pid, SIGCONT);
    read_welcome(fd, fds);
    close_all(fds);
    close(fd);
}
END_TEST

START_TEST(a_peer_that_does_not_read_is_hung_up_on) {
    struct lk_msg_admin ask = {.verb = "status"};
    int before = settled_descriptors(), fd = rig_connect(&rig), sent = 0;
    double end = rig_now() + RIG_PATIENCE;
    lk_wire_head(&ask.head, LK_MSG_ADMIN, sizeof(ask));
    while (rig_now() < end && send(fd, &ask, sizeof(ask), MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) {
        sent++;
        if (sent % 50 == 0)
            assert_serves(); /* the others do not wait for it */
    }
    ck_assert_int_gt(sent, 10);
    assert_serves();
    for (double later = rig_now() + RIG_PATIENCE; rig_now() < later;) {
        if (send(fd, &ask, sizeof(ask), MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && errno == EPIPE)
            break;
        rig_sleep(0.01);
    }
    ck_assert_int_eq(send(fd, &ask, sizeof(ask), MSG_NOSIGNAL | MSG_DONTWAIT), -1);
    ck_assert_int_eq(errno, EPIPE);
    close(fd);
    assert_descriptors(before);
}
END_TEST

/* Descriptors in sockets that nobody reads count against the daemon's limit of open files. */
START_TEST(descriptors_left_unread_have_a_limit) {
    struct lk_msg_pool_map ask = {.index = 0};
    struct lk_hello hello = good_hello();
    union {
        struct lk_message head;
        struct lk_welcome welcome;
        struct lk_msg_pool_mapped mapped;
    } answer;
    char why[256];
    int before = settled_descriptors(), fd = rig_connect(&rig), fds[8], got = 0;
    lk_wire_head(&ask.head, LK_MSG_POOL_MAP, sizeof(ask));
    ck_assert_int_eq(lk_wire_send(fd, &hello.head, NULL, 0), 0);
    for (int i = 0; i < 100 && send(fd, &ask, sizeof(ask), MSG_NOSIGNAL) > 0; i++)
        ;
    double end = rig_now() + RIG_PATIENCE;
    while (rig_now() < end && send(fd, &ask, sizeof(ask), MSG_NOSIGNAL) > 0)
        rig_sleep(0.01); /* until it is hung up on */
    assert_serves();
    ck_assert_int_gt(open_descriptors(), before); /* what it has not read keeps its place */
    while (lk_wire_receive(fd, &answer.head, sizeof(answer), fds, 8, why, sizeof(why)) == 0)
        for (int i = 0; i < 8; i++)
            if (fds[i] >= 0) {
                got++;
                close(fds[i]);
            }
    ck_assert_int_gt(got, 4);
    ck_assert_int_le(got, 16);
    assert_descriptors(before);
    close(fd);
    fd = rig_connect(&rig); /* and one that leaves at once */
    strcpy(hello.name, "leaver");
    ck_assert_int_eq(lk_wire_send(fd, &hello.head, NULL, 0), 0);
    ck_assert_int_eq(shutdown(fd, SHUT_WR), 0);
    ck_assert(rig_logs(&rig, "is gone (leaver", RIG_PATIENCE));
    ck_assert_int_gt(settled_descriptors(), before);
    close(fd);
    assert_descriptors(before);
    assert_serves();
}
END_TEST

/* Lets the daemon open so many files more. The limit is one of their numbers. */
static void leave_descriptors(int more) {
    char path[64], file[64];
    struct rlimit limit = {0, 4096};
    for (; more > 0; limit.rlim_cur++) {
        snprintf(path, sizeof(path), "/proc/%d/fd/%d", rig.pid, (int)limit.rlim_cur);
        more -= readlink(path, file, sizeof(file)) < 0;
    }
    ck_assert_int_eq(prlimit(rig.pid, RLIMIT_NOFILE, &limit, NULL), 0);
}

/* It says whose files there are too many of, and serves again once it may. */
START_TEST(out_of_descriptors) {
    struct locks *client;
    int before = settled_descriptors();
    for (int more = 1; more <= 6; more++) { /* the connection, and what is made for it but one */
        leave_descriptors(more);
        ck_assert_int_eq(try_connect(&client), -EMFILE);
        assert_has(locks_error(NULL), "the daemon has as many files open as it may");
        assert_descriptors(before);
    }
    leave_descriptors(64);
    assert_serves();
    assert_descriptors(before);
}
END_TEST

/* ---- strangers ---- */

/* Runs f in a child that is uid 65534 with the groups; its exit code. */
static int as_stranger(gid_t primary, gid_t supplementary, int (*f)(void)) {
    int status;
    pid_t pid = fork();
    if (pid == 0) {
        if (setgroups(1, &supplementary) || setgid(primary) || setuid(65534))
            _exit(100);
        _exit(f());
    }
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int expect_refusal(void) {
    struct locks *client;
    if (try_connect(&client) != -EACCES)
        return 1;
    return strstr(locks_error(NULL), "uid 65534 may not connect: only root and members of group "
                                     "daemon may: usermod -aG daemon USER, then log in anew")
               ? 0
               : 2;
}

static int expect_no_group(void) {
    struct locks *client;
    if (try_connect(&client) != -EACCES)
        return 1;
    return strstr(locks_error(NULL),
                  "only root may; group latecomers does not exist: create it ") &&
                   strstr(locks_error(NULL), ", then locksctl reload")
               ? 0
               : 2;
}

static int expect_service(void) {
    char why[512], *text;
    struct locks *client;
    if (try_connect(&client))
        return 1;
    locks_close(client);
    if (locks_admin(rig.socket, "pools", &text, why, sizeof(why)))
        return 2;
    free(text);
    if (locks_admin(rig.socket, "drain", &text, why, sizeof(why)) != -EPERM)
        return 3;
    return strstr(why, "drain is for root and uid 0: uid 65534 may not") ? 0 : 4;
}

/* The pool's pages can be read by a client, and not written, whatever it tries. */
static int expect_read_only(void) {
    const void *pages;
    uint64_t layer, page;
    struct locks *client;
    if (try_connect(&client))
        return 1;
    if (locks_pool_map(client, 0, &pages, &layer, &page) || page != 2 * 16 * 64 * 2)
        return 2;
    if (mprotect((void *)pages, page, PROT_READ | PROT_WRITE) == 0)
        return 3;
    locks_close(client);
    return 0;
}

START_TEST(strangers_need_the_group) {
    gid_t member = getgrnam("daemon")->gr_gid;
    rig_start(&rig, "[daemon]\ngroup = daemon\n");
    chmod(rig.folder, 0755);
    ck_assert_int_eq(as_stranger(65534, 65534, expect_refusal), 0);
    ck_assert_int_eq(as_stranger(member, 65534, expect_service), 0);
    ck_assert_int_eq(as_stranger(65534, member, expect_service), 0);
    ck_assert_int_eq(as_stranger(65534, member, expect_read_only), 0);
    assert_has(rig_log(&rig), "root and members of group daemon may connect");
    assert_has(rig_log(&rig), "uid 65534 may not connect");
    stop();
}
END_TEST

/* A copy of /etc/group in its place, for this process and its children. -> false: not allowed. */
static bool own_groups(void) {
    char command[256];
    snprintf(command, sizeof(command), "cp /etc/group %s/group", rig.folder);
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
        return false;
    ck_assert_int_eq(system(command), 0);
    snprintf(command, sizeof(command), "%s/group", rig.folder);
    ck_assert_int_eq(mount(command, "/etc/group", NULL, MS_BIND, NULL), 0);
    return true;
}

/* The group comes while the daemon runs, and goes: a reload sees it. */
START_TEST(a_reload_looks_the_group_up_again) {
    char why[512] = "", *text;
    rig_open(&rig, "[daemon]\ngroup = latecomers\n");
    if (!own_groups()) {
        printf("skipped: no mount namespace may be made here\n");
        rig_close(&rig);
        return;
    }
    chmod(rig.folder, 0755);
    rig_launch(&rig, NULL);
    ck_assert_msg(rig_hears(&rig, "READY=1", RIG_PATIENCE), "%s", rig_log(&rig));
    ck_assert_int_eq(as_stranger(4242, 65534, expect_no_group), 0);
    FILE *groups = fopen("/etc/group", "a");
    fputs("latecomers:x:4242:\n", groups);
    fclose(groups);
    ck_assert_msg(locks_admin(rig.socket, "reload", &text, why, sizeof(why)) == 0, "%s", why);
    json_t *reply = json_loads(text, 0, NULL);
    free(text);
    ck_assert_str_eq(json_string_value(json_array_get(json_object_get(reply, "taken"), 0)),
                     "daemon.group");
    json_decref(reply);
    assert_has(rig_log(&rig), "reload: root and members of group latecomers may connect from now");
    ck_assert_int_eq(as_stranger(65534, 4242, expect_service), 0);
    rig_configure(&rig, "[daemon]\ngroup = daemon\n");
    kill(rig.pid, SIGHUP);
    ck_assert(rig_logs(&rig, "reload: root and members of group daemon may connect from now",
                       RIG_PATIENCE));
    ck_assert_int_eq(as_stranger(65534, 4242, expect_refusal), 0);
    stop();
}
END_TEST

/* ---- questions ---- */

START_TEST(answers_about_pools) {
    struct locks *client;
    struct locks_pool pool;
    ck_assert_int_eq(try_connect(&client), 0);
    ck_assert_int_eq(locks_pool_count(client), 1);
    ck_assert_int_eq(locks_pool(client, "default", &pool), 0);
    ck_assert_uint_eq(pool.head_dim, 64);
    ck_assert_str_eq(pool.name, "default");
    ck_assert_int_eq(locks_pool(client, "other", &pool), -ESRCH);
    assert_has(locks_error(client), "there is no pool 'other': there are default");
    ck_assert_int_eq(locks_pool(client, "default", &pool), 0); /* it was an answer, not the end */
    locks_close(client);
}
END_TEST

START_TEST(an_unknown_verb_is_named) {
    char why[512] = "", *text;
    ck_assert_int_eq(locks_admin(rig.socket, "explode", &text, why, sizeof(why)), -EINVAL);
    assert_has(why, "there is no verb 'explode': there are status, clients");
}
END_TEST

static bool is_draining(void) {
    char *text, why[256];
    int rc = locks_admin(rig.socket, "status", &text, why, sizeof(why));
    ck_assert_msg(rc == 0, "status: %s", why);
    bool draining = strstr(text, "\"draining\": true") != NULL;
    free(text);
    return draining;
}

/* Who gave up waiting for a daemon that was stopped is not obeyed when it goes on; who only has no
 * more to say is. */
START_TEST(a_verb_of_one_who_left_is_not_carried_out) {
    struct lk_msg_admin ask = {.verb = "drain"};
    struct lk_msg_admin_reply reply;
    char why[256];
    int status, left = rig_connect(&rig), fds[WELCOME_FDS], client = join(fds);
    lk_wire_head(&ask.head, LK_MSG_ADMIN, sizeof(ask));
    kill(rig.pid, SIGSTOP);
    ck_assert_int_eq(waitpid(rig.pid, &status, WUNTRACED), rig.pid);
    ck_assert_int_eq(lk_wire_send(left, &ask.head, NULL, 0), 0);
    close(left);
    ck_assert_int_eq(lk_wire_send(client, &ask.head, NULL, 0), 0);
    close(client);
    int late = rig_connect(&rig); /* accepted when it goes on */
    ck_assert_int_eq(lk_wire_send(late, &ask.head, NULL, 0), 0);
    close(late);
    kill(rig.pid, SIGCONT);
    ck_assert(rig_logs(&rig, "drain is not carried out: who asked is gone", RIG_PATIENCE));
    ck_assert(!is_draining());
    assert_serves();
    ck_assert(!is_draining());
    close_all(fds);
    int waits = rig_connect(&rig), fd;
    ck_assert_int_eq(lk_wire_send(waits, &ask.head, NULL, 0), 0);
    ck_assert_int_eq(shutdown(waits, SHUT_WR), 0);
    ck_assert_int_eq(lk_wire_receive(waits, &reply.head, sizeof(reply), &fd, 1, why, sizeof(why)),
                     0);
    ck_assert_int_eq(reply.error, 0);
    close(fd);
    close(waits);
    ck_assert(is_draining());
}
END_TEST

/* A name with control characters reaches neither terminals nor JSON as it is. */
START_TEST(names_are_made_harmless) {
    char why[512], *text;
    struct locks_options options = {
        .size = sizeof(options), .socket = rig.socket, .arena_bytes = 65536};
    struct locks *client;
    options.name = "\033[2Jevil\xff";
    ck_assert_int_eq(locks_connect(&options, &client), 0);
    ck_assert_int_eq(locks_admin(rig.socket, "clients", &text, why, sizeof(why)), 0);
    assert_has(text, "\"name\": \"?[2Jevil?\"");
    free(text);
    locks_close(client);
}
END_TEST

/* ---- what takes long ---- */

/* Whether one of the daemon's descriptors is of a memory by this name. */
static bool has_memory(const char *name) {
    char path[300], link[300];
    bool found = false;
    snprintf(path, sizeof(path), "/proc/%d/fd", rig.pid);
    DIR *folder = opendir(path);
    ck_assert_ptr_nonnull(folder);
    for (struct dirent *entry; !found && (entry = readdir(folder)) != NULL;) {
        ssize_t length = readlinkat(dirfd(folder), entry->d_name, link, sizeof(link) - 1);
        link[length > 0 ? length : 0] = 0;
        found = strstr(link, name) != NULL;
    }
    closedir(folder);
    return found;
}

/* A daemon that makes a client's arena, which takes some hundred milliseconds. -> the client's
 * socket */
static int ask_for_large_arena(void) {
    struct lk_hello hello = good_hello();
    rig_start(&rig, "[limits]\nmax_arena = 1G\n");
    int fd = rig_connect(&rig);
    hello.arena_bytes = UINT64_C(1) << 30;
    ck_assert_int_eq(lk_wire_send(fd, &hello.head, NULL, 0), 0);
    for (double end = rig_now() + RIG_PATIENCE; !has_memory("locksd-arena") && rig_now() < end;)
        rig_sleep(0.001);
    return fd;
}

START_TEST(an_arena_of_one_who_left_is_given_up) {
    close(ask_for_large_arena());
    ck_assert(rig_logs(&rig, "the client is gone", RIG_PATIENCE));
    stop();
}
END_TEST

START_TEST(a_stop_waits_for_no_arena) {
    int fd = ask_for_large_arena();
    kill(rig.pid, SIGTERM);
    struct lk_refused refused = read_refusal(fd);
    ck_assert_int_eq(refused.error, -ESHUTDOWN);
    ck_assert_str_eq(refused.reason, "the daemon is stopping");
    ck_assert_int_eq(rig_wait(&rig, RIG_PATIENCE), EX_OK);
    close(fd);
    rig_close(&rig);
}
END_TEST

/* Who has to be told of reloads does not read. */
static void deafen_notices(void) {
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    snprintf(to.sun_path, sizeof(to.sun_path), "%s/notify", rig.folder);
    ck_assert_int_eq(connect(fd, (struct sockaddr *)&to, sizeof(to)), 0);
    while (send(fd, "", 1, 0) == 1)
        continue;
    ck_assert_int_eq(errno, EAGAIN);
    close(fd);
}

START_TEST(reloads_keep_no_stop_waiting) {
    int status;
    start();
    deafen_notices();
    for (int i = 0; i < 3; i++) {
        kill(rig.pid, SIGHUP);
        rig_sleep(0.1);
    }
    kill(rig.pid, SIGTERM);
    pid_t ended = 0; /* rig_wait() would read */
    for (double end = rig_now() + 7; !ended && rig_now() < end; rig_sleep(0.01))
        ended = waitpid(rig.pid, &status, WNOHANG); /* waits 2 s once, not for each notice */
    ck_assert_int_eq(ended, rig.pid);
    ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == EX_OK);
    rig.pid = 0;
    rig_close(&rig);
}
END_TEST

/* ---- a hung intake ---- */

/* The daemon's intake thread: neither the main one nor a worker. */
static pid_t find_intake(void) {
    char path[300], name[32];
    pid_t found = 0;
    snprintf(path, sizeof(path), "/proc/%d/task", rig.pid);
    DIR *folder = opendir(path);
    ck_assert_ptr_nonnull(folder);
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        pid_t thread = (pid_t)strtol(entry->d_name, NULL, 10);
        snprintf(path, sizeof(path), "/proc/%d/task/%s/comm", rig.pid, entry->d_name);
        FILE *file = thread > 0 && thread != rig.pid ? fopen(path, "r") : NULL;
        if (!file)
            continue;
        if (fgets(name, sizeof(name), file) && !strstr(name, "worker"))
            found = thread;
        fclose(file);
    }
    closedir(folder);
    return found;
}

START_TEST(a_hung_intake_starves_the_watchdog) {
    setenv("WATCHDOG_USEC", "300000", 1);
    rig_start(&rig, NULL);
    ck_assert(rig_hears(&rig, "WATCHDOG=1", RIG_PATIENCE));
    pid_t intake = find_intake();
    ck_assert_int_gt(intake, 0);
    ck_assert_int_eq(ptrace(PTRACE_SEIZE, intake, NULL, NULL), 0);
    ck_assert_int_eq(ptrace(PTRACE_INTERRUPT, intake, NULL, NULL), 0);
    ck_assert_int_eq(waitpid(intake, NULL, __WALL), intake);
    for (int fed = 0; rig_hears(&rig, "WATCHDOG=1", 1.5); fed++) /* the last, and one under way */
        ck_assert_int_lt(fed, 3);
    ck_assert_int_eq(ptrace(PTRACE_DETACH, intake, NULL, NULL), 0);
    ck_assert(rig_hears(&rig, "WATCHDOG=1", RIG_PATIENCE));
    stop();
}
END_TEST

int main(void) {
    Suite *suite = suite_create("control peers");
    TCase *peers = tcase_create("peers"), *others = tcase_create("others");
    tcase_set_timeout(peers, 120);
    tcase_set_timeout(others, 120);
    tcase_add_checked_fixture(peers, start, stop);
    tcase_add_loop_test(peers, refuses_garbage_in_a_sentence, 0,
                        sizeof(garbage) / sizeof(*garbage));
    tcase_add_test(peers, names_both_versions);
    tcase_add_test(peers, out_of_descriptors);
    tcase_add_test(peers, closes_descriptors_it_did_not_ask_for);
    tcase_add_test(peers, lingering_sockets_hold_nobody_up);
    tcase_add_test(peers, refuses_nonsense_after_the_hello);
    tcase_add_test(peers, a_device_arena_is_refused_on_the_cpu);
    tcase_add_test(peers, a_client_too_many_is_told_the_limit);
    tcase_add_test(peers, half_open_connections_have_a_limit);
    tcase_add_test(peers, a_silent_peer_is_hung_up_on);
    tcase_add_test(peers, words_not_read_in_time_are_no_silence);
    tcase_add_test(peers, a_peer_that_does_not_read_is_hung_up_on);
    tcase_add_test(peers, descriptors_left_unread_have_a_limit);
    tcase_add_test(peers, answers_about_pools);
    tcase_add_test(peers, an_unknown_verb_is_named);
    tcase_add_test(peers, a_verb_of_one_who_left_is_not_carried_out);
    tcase_add_test(peers, names_are_made_harmless);
    if (geteuid() == 0) /* others cannot become strangers */
        tcase_add_test(others, strangers_need_the_group);
    tcase_add_test(others, a_reload_looks_the_group_up_again);
    tcase_add_test(others, an_arena_of_one_who_left_is_given_up);
    tcase_add_test(others, a_stop_waits_for_no_arena);
    tcase_add_test(others, reloads_keep_no_stop_waiting);
    tcase_add_test(others, a_hung_intake_starves_the_watchdog);
    suite_add_tcase(suite, peers);
    suite_add_tcase(suite, others);
    return run_suite(suite);
}
