/* SPDX-License-Identifier: MIT */
/*
 * test_device.c - a device that breaks in the middle of a step.
 *
 * A daemon built with LK_TEST_HOOKS (`make O=build/hooks HOOKS=1 all`) faults on the GPU when a row
 * asks for a scale of LK_TEST_BREAK. Then: it ends with its exit code and a reason, and no client
 * gets an answer with status 0 for what was in flight, neither who broke it nor who was beside.
 * $LOCKSD_HOOKS names that daemon. Needs a GPU; exit 77 without.
 */
#include <check.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>
#include <unistd.h>

#include "../../graphs/backend.h"
#include "../common/rig.h"
#include "locks.h"

#define ROW_TOKENS 40
#define HEADS      2 /* query heads of the rig's pool */
#define DIM        64

struct client {
    struct locks *locks;
    locks_handle sequence;
    uint16_t *q, *kv;
    float *out;
};

static void open_client(const struct rig *rig, struct client *c) {
    struct locks_options options = {
        .size = sizeof(options), .socket = rig->socket, .arena_bytes = 1 << 20};
    ck_assert_msg(locks_connect(&options, &c->locks) == 0, "%s", locks_error(NULL));
    c->q = locks_alloc(c->locks, ROW_TOKENS * HEADS * DIM * sizeof(*c->q));
    c->kv = locks_alloc(c->locks, ROW_TOKENS * DIM * sizeof(*c->kv));
    c->out = locks_alloc(c->locks, ROW_TOKENS * HEADS * DIM * sizeof(*c->out));
    ck_assert(c->q && c->kv && c->out);
    for (int i = 0; i < ROW_TOKENS * DIM; i++)
        c->kv[i] = (uint16_t)(0x3f00 + i % 128); /* 0.5 .. 1 in bf16 */
    for (int i = 0; i < ROW_TOKENS * HEADS * DIM; i++)
        c->q[i] = 0x3f80;
    ck_assert_int_eq(locks_sequence_create(c->locks, 0, &c->sequence), 0);
}

static struct locks_row row_of(const struct client *c, uint64_t position, uint32_t tokens) {
    return (struct locks_row){.sequence = c->sequence,
                              .position = position,
                              .tokens = tokens,
                              .q = c->q,
                              .k = c->kv,
                              .v = c->kv,
                              .out = c->out};
}

START_TEST(ends_with_a_reason_and_no_wrong_answer) {
    struct locks_step step = {0}, breaking = {.sm_scale = LK_TEST_BREAK};
    struct locks_completion done;
    struct client breaker, beside;
    struct rig rig;
    rig_start(&rig, "[daemon]\ndevice = cuda\n");
    open_client(&rig, &breaker);
    open_client(&rig, &beside);
    struct locks_row rows[] = {row_of(&breaker, 0, ROW_TOKENS), row_of(&beside, 0, ROW_TOKENS)};
    ck_assert_int_eq(locks_decode(breaker.locks, &step, &rows[0], 1), 0);
    ck_assert_int_eq(locks_decode(beside.locks, &step, &rows[1], 1), 0);
    ck_assert(beside.out[0] > 0.4f && beside.out[0] < 1.1f);
    rows[0].position = rows[1].position = ROW_TOKENS;
    ck_assert_int_eq(locks_submit(breaker.locks, LK_OP_DECODE, &breaking, &rows[0], 1, 1), 0);
    ck_assert_int_eq(locks_wait(breaker.locks, 20000, &done), -ECONNRESET);
    /* Too late for an answer, whether it came into the broken batch or after it. */
    int rc = locks_submit(beside.locks, LK_OP_DECODE, &step, &rows[1], 1, 1);
    ck_assert(rc == -ECONNRESET || (rc == 0 && locks_wait(beside.locks, 20000, &done) < 0));
    ck_assert_int_eq(rig_wait(&rig, 20), EX_SOFTWARE);
    ck_assert_msg(strstr(rig_log(&rig), "the device is broken and the daemon ends") != NULL, "%s",
                  rig_log(&rig));
    locks_close(breaker.locks);
    locks_close(beside.locks);
    rig_close(&rig);
}
END_TEST

/* And who asks has lost nothing by it. */
START_TEST(pages_of_the_gpu_are_not_mapped) {
    struct locks_step step = {0};
    struct client client;
    struct rig rig;
    const void *pages;
    uint64_t layer_bytes, page_bytes;
    rig_start(&rig, "[daemon]\ndevice = cuda\n");
    open_client(&rig, &client);
    ck_assert_int_eq(locks_pool_map(client.locks, 0, &pages, &layer_bytes, &page_bytes), -ENOTSUP);
    ck_assert_ptr_nonnull(strstr(locks_error(client.locks), "memory of the GPU"));
    struct locks_row row = row_of(&client, 0, ROW_TOKENS);
    ck_assert_int_eq(locks_decode(client.locks, &step, &row, 1), 0);
    locks_close(client.locks);
    ck_assert_int_eq(rig_stop(&rig), EX_OK);
    rig_close(&rig);
}
END_TEST

int main(void) {
    const char *hooks = getenv("LOCKSD_HOOKS");
    char why[256] = "";
    if (lk_cuda_engine_usable(0, why, sizeof(why))) {
        printf("test_device: skipped: %s\n", why);
        return 77;
    }
    if (!hooks || access(hooks, X_OK)) {
        printf("test_device: skipped: $LOCKSD_HOOKS names no daemon built with HOOKS=1\n");
        return 77;
    }
    setenv("LOCKSD", hooks, 1);
    Suite *suite = suite_create("device");
    TCase *tcase = tcase_create("broken");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, ends_with_a_reason_and_no_wrong_answer);
    tcase_add_test(tcase, pages_of_the_gpu_are_not_mapped);
    suite_add_tcase(suite, tcase);
    SRunner *runner = srunner_create(suite);
    srunner_set_fork_status(runner, CK_NOFORK);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed != 0;
}
