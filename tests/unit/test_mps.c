/* SPDX-License-Identifier: MIT */
/*
 * test_mps.c - what is said of MPS, by what there is at its control pipe.
 */
#include <check.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "../common/run.h"
#include "../../daemon/mps.h"

static char folder[] = "/tmp/mps-test-XXXXXX", control[64];

static void setup(void) {
    ck_assert_ptr_nonnull(mkdtemp(folder));
    snprintf(control, sizeof(control), "%s/control", folder);
    setenv("CUDA_MPS_PIPE_DIRECTORY", folder, 1);
}
static void teardown(void) {
    unlink(control);
    rmdir(folder);
}

static void expect(bool active, const char *words) {
    char text[LK_MPS_WORDS];
    ck_assert_msg(strncmp(lk_mps_words(active, text), words, strlen(words)) == 0, "%s", text);
    ck_assert_uint_lt(strlen(text), LK_MPS_WORDS - 1);
    ck_assert_int_eq(!active, strstr(text, "milliseconds there and back") != NULL);
}

START_TEST(a_socket) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    expect(false, "there is no MPS:");
    expect(true, "clients and daemon run on the GPU side by side");
    memcpy(address.sun_path, control, strlen(control));
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    ck_assert_int_eq(listen(fd, 1), 0);
    expect(false, "MPS runs but locksd is older");
    close(fd); /* the file stays */
    expect(false, "there is no MPS:");
}
END_TEST

START_TEST(a_pipe) {
    ck_assert_int_eq(mkfifo(control, 0600), 0);
    expect(false, "there is no MPS:");
    int fd = open(control, O_RDONLY | O_NONBLOCK);
    ck_assert_int_ge(fd, 0);
    expect(false, "MPS runs but locksd is older");
    close(fd);
    expect(false, "there is no MPS:");
}
END_TEST

START_TEST(any_file) {
    close(open(control, O_CREAT | O_WRONLY, 0600));
    expect(false, "there is no MPS:");
}
END_TEST

int main(void) {
    Suite *suite = suite_create("mps");
    TCase *tc = tcase_create("all");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, a_socket);
    tcase_add_test(tc, a_pipe);
    tcase_add_test(tc, any_file);
    suite_add_tcase(suite, tc);
    return run_suite(suite);
}
