/* SPDX-License-Identifier: MIT */
/*
 * test_fence.c - device arenas and fences in the daemon, on a device that is not there: the CPU's
 * engine, whose "memory of the device" is the test's own and whose fences are looked at and raised
 * in place. What a GPU does is tests/cuda/test_client.cu's matter.
 */
#include <check.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../common/run.h"
#include "../../graphs/backend.h"
#include "../../shm_protocol/atomics.h"
#include "../common/inlet.h"

#define WHOLE   LK_ROW_WHOLE
#define PAYLOAD ((uint64_t)LK_DEVICE_FENCES * LK_DEVICE_FENCE_STRIDE)
#define BYTES   (UINT64_C(1) << 20)
#define WIDTH   256 /* values of a token's queries, and outputs */

static struct inlet inlet;
static struct inlet_client client, other;
static struct lk_engine_arena arena;
static struct lk_config config;
static struct inlet_step step;
static uint64_t ids[256];

/* ---- the device ---- */

static const struct lk_backend *cpu;
static uint64_t asked; /* atomic: looks at fences */

static int open_arena(struct lk_engine *engine, uint64_t bytes, struct lk_engine_arena *ret,
                      char *why, size_t why_bytes) {
    (void)engine, (void)why, (void)why_bytes;
    *ret = (struct lk_engine_arena){.at = aligned_alloc(4096, bytes), .bytes = bytes, .fd = -1};
    ck_assert_ptr_nonnull(ret->at);
    memset(ret->at, 0, bytes);
    return 0;
}
static void close_arena(struct lk_engine *engine, struct lk_engine_arena *a) {
    (void)engine;
    free(a->at);
    *a = (struct lk_engine_arena){.fd = -1};
}
static int raise_all(struct lk_engine *engine, const struct lk_signal *signals, uint32_t count) {
    (void)engine;
    for (uint32_t i = 0; i < count; i++)
        if (lk_load_acquire64(signals[i].word) < signals[i].value)
            lk_store_release64(signals[i].word, signals[i].value);
    return 0;
}
static bool reached(struct lk_engine *engine, uint32_t place, const uint64_t *word, uint64_t value,
                    uint64_t *ret_held) {
    (void)engine, (void)place;
    __atomic_add_fetch(&asked, 1, __ATOMIC_RELAXED);
    *ret_held = lk_load_acquire64(word);
    return *ret_held >= value;
}
static void forget(struct lk_engine *engine, uint32_t place) {
    (void)engine, (void)place;
}
static enum lk_mark poll_marks(struct lk_engine *engine, struct lk_batch **ret) {
    enum lk_mark mark = cpu->poll(engine, ret);
    if (mark == LK_MARK_FENCED)
        raise_all(engine, (*ret)->signals, (*ret)->signal_count);
    return mark;
}

static void replace_device(struct lk_intake *intake, void *argument) {
    static struct lk_backend device;
    (void)argument;
    cpu = intake->engine->backend;
    device = *cpu;
    device.arena_open = open_arena;
    device.arena_close = close_arena;
    device.signal = raise_all;
    device.fence_reached = reached;
    device.fence_forget = forget;
    device.poll = poll_marks;
    intake->engine->backend = &device;
}

/* ---- the clients ---- */

static void setup(void) {
    char why[256] = "";
    inlet_config(&config, 512);
    config.fence_ms = 60000; /* nothing below is too slow for it */
    inlet_open(&inlet, &config);
    lk_intake_call(inlet.intake, replace_device, NULL);
    ck_assert_int_eq(inlet_connect(&inlet, &client, 1, 64, 0), 0);
    ck_assert_int_eq(inlet_connect(&inlet, &other, 2, 64, 0), 0);
    ck_assert_int_eq(
        lk_intake_device_arena_open(inlet.intake, client.id, BYTES, &arena, why, sizeof(why)), 0);
    inlet_count(ids, 256, 1);
}
static void leave(struct inlet_client *c) {
    inlet_disconnect(c);
    if (c == &client)
        lk_intake_device_arena_close(inlet.intake, &arena);
}
static void teardown(void) {
    leave(&client);
    inlet_disconnect(&other);
    inlet_close(&inlet);
}

static uint64_t *word(uint32_t fence) {
    return (uint64_t *)(arena.at + (uint64_t)(fence - 1) * LK_DEVICE_FENCE_STRIDE);
}
static uint64_t held(uint32_t fence) {
    return lk_load_acquire64(word(fence));
}
static void raise_to(uint32_t fence, uint64_t value) {
    lk_store_release64(word(fence), value);
}
/* Within half a minute. */
static void expect_raised(uint32_t fence, uint64_t value) {
    for (int i = 0; i < 300000 && held(fence) < value; i++)
        usleep(100);
    ck_assert_uint_eq(held(fence), value);
}

struct fences {
    uint32_t wait, signal;
    uint64_t wait_value, signal_value;
};
static void submit(struct inlet_client *c, uint16_t op, const void *desc, uint32_t bytes,
                   uint64_t user_data, struct fences f) {
    struct lk_sqe *sqe;
    void *to;
    ck_assert_int_eq(lk_ring_client_reserve(&c->ring, bytes, &sqe, &to), 0);
    sqe->op = op;
    sqe->user_data = user_data;
    sqe->wait_fence = f.wait;
    sqe->wait_value = f.wait_value;
    sqe->signal_fence = f.signal;
    sqe->signal_value = f.signal_value;
    if (bytes)
        memcpy(to, desc, bytes);
    lk_ring_client_publish(&c->ring);
    if (lk_ring_client_must_wake(&c->ring))
        lk_bell_ring(c->memory.client_fds[LK_FD_BELL]);
}
static void submit_barrier(struct inlet_client *c, uint64_t user_data, struct fences f) {
    submit(c, LK_OP_BARRIER, NULL, 0, user_data, f);
}
static void expect_nothing(struct inlet_client *c, double seconds) {
    struct lk_cqe cqe;
    ck_assert(!inlet_poll(c, seconds, &cqe));
}
static struct lk_cqe next(struct inlet_client *c, uint64_t user_data) {
    struct lk_cqe cqe = inlet_wait(c);
    ck_assert_uint_eq(cqe.user_data, user_data);
    return cqe;
}

/* A DECODE of one token with everything in the arena. */
static void make_decode(struct inlet_client *c, uint64_t sequence, uint64_t position,
                        float **ret_out) {
    inlet_reset(c);
    inlet_step(&step);
    struct lk_row_desc *row = inlet_row(&step, sequence, 0, position, 1);
    inlet_give_kv(c, row, ids + position);
    *ret_out = inlet_give_q(c, row, 1000 + position);
}

/* ---- device arenas ---- */

/* An offset of the row moves to the device arena, with what lies there. */
static void move(uint64_t *offset, uint64_t *at, uint64_t bytes) {
    memcpy(arena.at + *at, client.memory.arena + *offset, bytes);
    *offset = LK_DEVICE_BASE + *at;
    *at += (bytes + 63) / 64 * 64;
}

START_TEST(the_same_bits_through_the_device_arena) {
    uint64_t element = inlet_element(&inlet);
    float *out, there[WIDTH], here[WIDTH];
    uint64_t first = inlet_create(&client), second = inlet_create(&client);
    for (uint64_t position = 0; position < 40; position++) {
        make_decode(&client, first, position, &out);
        inlet_must(inlet_do(&client, LK_OP_DECODE, &step, inlet_step_bytes(&step)));
        memcpy(here, out, sizeof(here));
        make_decode(&client, second, position, &out);
        uint64_t at = PAYLOAD;
        struct lk_row_desc *row = &step.row[0];
        move(&row->k, &at, WIDTH / 2 * element);
        move(&row->v, &at, WIDTH / 2 * element);
        move(&row->q, &at, WIDTH * element);
        uint64_t out_at = at;
        move(&row->out, &at, WIDTH * sizeof(float));
        row->lse = LK_DEVICE_BASE + at;
        memset(client.memory.arena, 0xff, client.used); /* nothing is read there */
        inlet_must(inlet_do(&client, LK_OP_DECODE, &step, inlet_step_bytes(&step)));
        memcpy(there, arena.at + out_at, sizeof(there));
        ck_assert(inlet_same(here, there, sizeof(here)));
        ck_assert(*(const float *)(arena.at + at) != 0);
    }
}
END_TEST

START_TEST(another_has_none) {
    char why[256] = "";
    struct lk_engine_arena none;
    float *out;
    uint64_t sequence = inlet_create(&other);
    make_decode(&other, sequence, 0, &out);
    step.row[0].q = LK_DEVICE_BASE + PAYLOAD;
    inlet_refused(inlet_do(&other, LK_OP_DECODE, &step, inlet_step_bytes(&step)),
                  LK_REASON_Q_DEVICE, PAYLOAD, 0, 0);
    submit_barrier(&other, 1, (struct fences){.wait = 1, .wait_value = 1});
    inlet_refused(next(&other, 1), LK_REASON_FENCE_NONE, 1, 0, WHOLE);
    submit_barrier(&other, 2, (struct fences){.signal = 2, .signal_value = 1});
    inlet_refused(next(&other, 2), LK_REASON_FENCE_NONE, 2, 0, WHOLE);
    submit_barrier(&client, 3, (struct fences){.signal = LK_DEVICE_FENCES + 1});
    inlet_refused(next(&client, 3), LK_REASON_FENCE_NONE, LK_DEVICE_FENCES + 1, LK_DEVICE_FENCES,
                  WHOLE);
    ck_assert_int_eq(
        lk_intake_device_arena_open(inlet.intake, 12345, BYTES, &none, why, sizeof(why)), -ESRCH);
}
END_TEST

START_TEST(the_cpu_has_none) {
    struct lk_engine_options options = {.threads = 1, .workspace_bytes = 1 << 20};
    struct lk_engine_arena none;
    struct lk_engine *engine;
    char why[256] = "";
    ck_assert_int_eq(lk_engine_open(&options, &engine, why, sizeof(why)), 0);
    ck_assert_int_eq(lk_engine_arena_open(engine, BYTES, &none, why, sizeof(why)), -ENOTSUP);
    ck_assert_ptr_nonnull(strstr(why, "1048576 bytes"));
    ck_assert_ptr_nonnull(strstr(why, "CPU"));
    ck_assert(!lk_engine_mps(engine));
    lk_engine_close(engine);
}
END_TEST

/* ---- fences ---- */

START_TEST(a_wait_holds_its_own_channel_alone) {
    float *out;
    uint64_t mine = inlet_create(&client), theirs = inlet_create(&other);
    make_decode(&client, mine, 0, &out);
    submit(&client, LK_OP_DECODE, &step, inlet_step_bytes(&step), 1, (struct fences){1, 2, 5, 9});
    submit_barrier(&client, 2, (struct fences){0});
    for (uint64_t position = 0; position < 20; position++) {
        make_decode(&other, theirs, position, &out);
        inlet_must(inlet_do(&other, LK_OP_DECODE, &step, inlet_step_bytes(&step)));
    }
    raise_to(1, 4);
    expect_nothing(&client, 0.02);
    ck_assert_uint_eq(held(2), 0);
    raise_to(1, 6); /* beyond is reached */
    inlet_must(next(&client, 1));
    ck_assert_uint_eq(held(2), 9); /* before its completion */
    inlet_must(next(&client, 2));
}
END_TEST

START_TEST(reached_before_is_no_wait) {
    raise_to(3, 7);
    for (uint64_t i = 0; i < 100; i++) {
        submit_barrier(&client, i, (struct fences){3, 4, 7, i + 1});
        inlet_must(next(&client, i));
        expect_raised(4, i + 1);
    }
    inlet_step(&step); /* of no rows: not answered past the fence */
    submit(&client, LK_OP_DECODE, &step, inlet_step_bytes(&step), 1, (struct fences){3, 0, 8, 0});
    expect_nothing(&client, 0.02);
    raise_to(3, 8);
    inlet_must(next(&client, 1));
}
END_TEST

START_TEST(a_stuck_fence_is_refused_in_time) {
    float *out;
    uint64_t mine = inlet_create(&client), theirs = inlet_create(&other), position = 0;
    struct lk_cqe cqe;
    config.fence_ms = 200;
    lk_intake_limits(inlet.intake, &config);
    raise_to(1, 3);
    make_decode(&client, mine, 0, &out);
    uint64_t begun = lk_intake_now_ns();
    submit(&client, LK_OP_DECODE, &step, inlet_step_bytes(&step), 1, (struct fences){1, 2, 5, 9});
    submit_barrier(&client, 2, (struct fences){0});
    while (!inlet_poll(&client, 0, &cqe)) {
        make_decode(&other, theirs, position++, &out);
        inlet_must(inlet_do(&other, LK_OP_DECODE, &step, inlet_step_bytes(&step)));
        if (position == 200) {
            position = 0;
            inlet_truncate(&other, theirs, 0);
        }
    }
    uint64_t took = lk_intake_now_ns() - begun;
    ck_assert_uint_eq(cqe.user_data, 1);
    inlet_refused(cqe, LK_REASON_FENCE, 3, 5, WHOLE);
    ck_assert_int_eq(cqe.status, -ETIMEDOUT);
    ck_assert_uint_ge(took, UINT64_C(200000000));
    ck_assert_uint_lt(took, UINT64_C(30000000000));
    expect_raised(2, 9); /* its kernels do not wait for ever */
    inlet_must(next(&client, 2));
    make_decode(&client, mine, 0, &out); /* nothing was appended */
    inlet_must(inlet_do(&client, LK_OP_DECODE, &step, inlet_step_bytes(&step)));
}
END_TEST

START_TEST(a_sleeping_daemon_looks_now_and_then) {
    submit_barrier(&client, 1, (struct fences){.wait = 1, .wait_value = 1});
    expect_nothing(&client, 0.01);
    uint64_t before = __atomic_load_n(&asked, __ATOMIC_RELAXED), looks = 0, ms = 0;
    uint64_t begun = lk_intake_now_ns();
    while (ms < 100 || (looks < 10 && ms < 30000)) {
        expect_nothing(&client, 0.01);
        looks = __atomic_load_n(&asked, __ATOMIC_RELAXED) - before;
        ms = (lk_intake_now_ns() - begun) / 1000000;
    }
    ck_assert_uint_ge(looks, 10);
    ck_assert_uint_lt(looks, 10 * ms); /* one a millisecond */
    raise_to(1, 1);
    inlet_must(next(&client, 1));
    before = __atomic_load_n(&asked, __ATOMIC_RELAXED);
    expect_nothing(&client, 0.05);
    ck_assert_uint_eq(__atomic_load_n(&asked, __ATOMIC_RELAXED), before);
}
END_TEST

START_TEST(whatever_is_wrong_signals_too) {
    float *out;
    uint64_t sequence = inlet_create(&client);
    make_decode(&client, sequence, 0, &out);
    step.row[0].layer = 77; /* wrong by itself: not waited for either */
    submit(&client, LK_OP_DECODE, &step, inlet_step_bytes(&step), 1, (struct fences){1, 2, 5, 1});
    inlet_refused(next(&client, 1), LK_REASON_LAYER, 77, 2, 0);
    expect_raised(2, 1);
    make_decode(&client, sequence, 3, &out); /* in its place */
    submit(&client, LK_OP_DECODE, &step, inlet_step_bytes(&step), 2, (struct fences){0, 2, 0, 2});
    inlet_refused(next(&client, 2), LK_REASON_POSITION, 3, 0, 0);
    expect_raised(2, 2);
    submit(&client, 999, NULL, 0, 3, (struct fences){0, 2, 0, 3}); /* no operation at all */
    ck_assert_int_eq(next(&client, 3).reason, LK_REASON_OP);
    expect_raised(2, 3);
}
END_TEST

START_TEST(signals_only_rise) {
    submit_barrier(&client, 1, (struct fences){0, 5, 0, 100});
    submit_barrier(&client, 2, (struct fences){0, 5, 0, 50});
    inlet_must(next(&client, 1));
    inlet_must(next(&client, 2));
    expect_raised(5, 100);
    usleep(1000);
    ck_assert_uint_eq(held(5), 100);
}
END_TEST

START_TEST(who_waits_may_leave) {
    struct lk_cqe cqe;
    char why[256];
    submit_barrier(&client, 1, (struct fences){1, 2, 5, 9});
    expect_nothing(&client, 0.01);
    leave(&client);
    ck_assert_int_eq(inlet_connect(&inlet, &client, 1, 64, 0), 0);
    ck_assert_int_eq(
        lk_intake_device_arena_open(inlet.intake, client.id, BYTES, &arena, why, sizeof(why)), 0);
    submit_barrier(&client, 2, (struct fences){1, 2, 1, 1});
    ck_assert(!inlet_poll(&client, 0.01, &cqe));
    raise_to(1, 1);
    inlet_must(next(&client, 2));
}
END_TEST

int main(void) {
    const char *device = getenv("LOCKSD_TEST_DEVICE");
    if (device && strcmp(device, "cuda") == 0) {
        printf("a GPU is no device that is not there: see tests/cuda/test_client.cu\n");
        return 77;
    }
    Suite *suite = suite_create("fence");
    TCase *tc = tcase_create("all");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, the_same_bits_through_the_device_arena);
    tcase_add_test(tc, another_has_none);
    tcase_add_test(tc, the_cpu_has_none);
    tcase_add_test(tc, a_wait_holds_its_own_channel_alone);
    tcase_add_test(tc, reached_before_is_no_wait);
    tcase_add_test(tc, a_stuck_fence_is_refused_in_time);
    tcase_add_test(tc, a_sleeping_daemon_looks_now_and_then);
    tcase_add_test(tc, whatever_is_wrong_signals_too);
    tcase_add_test(tc, signals_only_rise);
    tcase_add_test(tc, who_waits_may_leave);
    suite_add_tcase(suite, tc);
    return run_suite(suite);
}
