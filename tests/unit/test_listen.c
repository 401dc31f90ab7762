/* SPDX-License-Identifier: MIT */
/*
 * test_listen.c - the daemon's socket: whoever finds its path finds it listening, whatever others
 * have left there.
 */
#include <check.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "../common/run.h"
#include "../../daemon/listen.h"

static char folder[64], path[80], beside[80];
static struct lk_listener listener;
static char why[512];
static int listened, fails;

static int dial(const char *where) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", where);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    ck_assert_int_ge(fd, 0);
    int rc = connect(fd, (struct sockaddr *)&address, sizeof(address)) ? -errno : 0;
    close(fd);
    return rc;
}

/* In place of the C library's: the path must not be there yet. */
int listen(int fd, int backlog) {
    listened++;
    ck_assert_int_eq(dial(path), -ENOENT);
    if (fails) {
        errno = EOPNOTSUPP;
        return -1;
    }
    return (int)syscall(SYS_listen, fd, backlog);
}

/* What a daemon leaves that was killed, or one that lives: a socket of its. */
static int bind_there(const char *where, bool lives) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", where);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    if (lives)
        ck_assert_int_eq((int)syscall(SYS_listen, fd, 1), 0);
    else
        close(fd);
    return fd;
}

static void expect_empty(void) {
    ck_assert_int_eq(rmdir(folder), 0); /* only an empty one goes */
    ck_assert_int_eq(mkdir(folder, 0700), 0);
}

static void setup(void) {
    snprintf(folder, sizeof(folder), "/tmp/locksd-listen-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(folder));
    snprintf(path, sizeof(path), "%s/socket", folder);
    snprintf(beside, sizeof(beside), "%s/socke~", folder);
}

static void teardown(void) {
    unlink(path);
    unlink(beside);
    rmdir(folder);
}

START_TEST(whoever_finds_it_is_heard) {
    struct stat file;
    ck_assert_int_eq(lk_listener_open(path, &listener, why, sizeof(why)), 0);
    ck_assert_int_eq(listened, 1);
    ck_assert_int_eq(dial(path), 0);
    ck_assert_int_eq(stat(path, &file), 0);
    ck_assert_uint_eq(file.st_mode & 0777, 0666);
    ck_assert_int_eq(access(beside, F_OK), -1);
    lk_listener_close(&listener);
    expect_empty();
}
END_TEST

START_TEST(what_the_killed_leave_is_replaced) {
    bind_there(path, false);
    bind_there(beside, false);
    ck_assert_int_eq(lk_listener_open(path, &listener, why, sizeof(why)), 0);
    ck_assert_int_eq(dial(path), 0);
    lk_listener_close(&listener);
    expect_empty();
}
END_TEST

START_TEST(what_is_others_stays) {
    for (int i = 0; i < 2; i++) {
        const char *where = i ? beside : path;
        int fd = bind_there(where, true);
        ck_assert_int_eq(lk_listener_open(path, &listener, why, sizeof(why)), -EADDRINUSE);
        ck_assert_ptr_nonnull(strstr(why, where));
        ck_assert_int_eq(dial(where), 0);
        close(fd);
        ck_assert_int_eq(unlink(where), 0);
        expect_empty();
    }
}
END_TEST

START_TEST(nothing_is_left_of_a_start_that_fails) {
    fails = 1;
    ck_assert_int_eq(lk_listener_open(path, &listener, why, sizeof(why)), -EOPNOTSUPP);
    ck_assert_ptr_nonnull(strstr(why, "cannot listen there: Operation not supported"));
    expect_empty();
}
END_TEST

START_TEST(the_longest_path) {
    char longest[108];
    size_t length = (size_t)snprintf(longest, sizeof(longest), "%s/", folder);
    memset(longest + length, 'a', sizeof(longest) - 1 - length);
    longest[sizeof(longest) - 1] = 0;
    ck_assert_int_eq(lk_listener_open(longest, &listener, why, sizeof(why)), 0);
    ck_assert_int_eq(dial(longest), 0);
    lk_listener_close(&listener);
    expect_empty();
}
END_TEST

/* Who passes a socket badly would otherwise find a daemon that listens elsewhere. */
START_TEST(what_is_passed_badly_is_refused) {
    static const char *const bad[] = {"two", "-1", "1"}; /* 3 is closed */
    char pid[16];
    snprintf(pid, sizeof(pid), "%d", getpid());
    close(3);
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        setenv("LISTEN_PID", pid, 1);
        setenv("LISTEN_FDS", bad[i], 1);
        ck_assert_int_lt(lk_listener_open(path, &listener, why, sizeof(why)), 0);
        ck_assert_ptr_nonnull(strstr(why, "no socket can be taken from LISTEN_FDS="));
        ck_assert_ptr_nonnull(strstr(why, bad[i]));
        expect_empty();
    }
}
END_TEST

int main(void) {
    Suite *suite = suite_create("listen");
    TCase *tcase = tcase_create("all");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, whoever_finds_it_is_heard);
    tcase_add_test(tcase, what_the_killed_leave_is_replaced);
    tcase_add_test(tcase, what_is_others_stays);
    tcase_add_test(tcase, nothing_is_left_of_a_start_that_fails);
    tcase_add_test(tcase, the_longest_path);
    tcase_add_test(tcase, what_is_passed_badly_is_refused);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
