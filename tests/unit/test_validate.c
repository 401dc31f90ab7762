/* SPDX-License-Identifier: MIT */
/*
 * test_validate.c - every refusal the wire's functions can find, one change away from a good
 * submission; every sentence; and descriptors of random bytes, which may be refused or not but
 * never do harm.
 */
#include <check.h>
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "../common/run.h"
#include "../../shm_protocol/validate.h"

#define ARENA (UINT64_C(1) << 20)
#define AREA  65536
#define ROWS  2

static const struct lk_pool_shape shapes[2] = {
    {.layers = 4, .kv_heads = 2, .group = 4, .head_dim = 64, .page_tokens = 16, .element_bytes = 2},
    {.layers = 1,
     .kv_heads = 8,
     .group = 32,
     .head_dim = 256,
     .page_tokens = 64,
     .element_bytes = 4},
};
static const struct lk_bounds bounds = {
    .pools = shapes, .pool_count = 2, .max_row_tokens = 512, .arena_bytes = ARENA};

/* A step of two good rows, to be spoilt. */
struct step {
    struct lk_step_desc head;
    struct lk_row_desc rows[ROWS];
};

static struct step good_step(uint16_t op) {
    struct step s = {.head = {.rows = ROWS,
                              .sampled = -1,
                              .recent_pages = 1,
                              .sink_pages = 1,
                              .results = 0,
                              .timing = 4096}};
    for (int i = 0; i < ROWS; i++)
        s.rows[i] = (struct lk_row_desc){.handle = 7,
                                         .layer = 3,
                                         .tokens = 1,
                                         .q = 64,
                                         .k = 8192,
                                         .v = 16384,
                                         .out = 32768,
                                         .lse = LK_NONE,
                                         .list = LK_NONE,
                                         .slots = 65536};
    if (op != LK_OP_WRITE && op != LK_OP_ATTEND_TABLE)
        s.rows[0].position = s.rows[1].position = 100;
    return s;
}

static const uint16_t step_ops[] = {LK_OP_APPEND, LK_OP_DECODE, LK_OP_ATTEND, LK_OP_WRITE,
                                    LK_OP_ATTEND_TABLE};

static enum lk_reason check_step(uint16_t op, const struct step *s, struct lk_refusal *ret) {
    return lk_step_invalid(op, &s->head, sizeof(*s), &bounds, ret);
}

#define DEVICE (UINT64_C(1) << 16)
#define FENCES ((uint64_t)LK_DEVICE_FENCES * LK_DEVICE_FENCE_STRIDE)
static const struct lk_bounds device_bounds = {.pools = shapes,
                                               .pool_count = 2,
                                               .max_row_tokens = 512,
                                               .arena_bytes = ARENA,
                                               .device_bytes = DEVICE};

static enum lk_reason check_device(uint16_t op, const struct step *s, struct lk_refusal *ret) {
    return lk_step_invalid(op, &s->head, sizeof(*s), &device_bounds, ret);
}

/* Refused for row 1. */
static void expect_device(uint16_t op, const struct step *s, enum lk_reason want, uint64_t value,
                          uint64_t limit) {
    struct lk_refusal f = {0};
    ck_assert_uint_eq(check_device(op, s, &f), want);
    ck_assert_uint_eq(f.reason, want);
    ck_assert_uint_eq(f.row, 1);
    ck_assert_uint_eq(f.value, value);
    ck_assert_uint_eq(f.limit, limit);
}

#define EXPECT(op, change, want, want_row, want_value, want_limit)                                 \
    do {                                                                                           \
        struct lk_refusal f = {0};                                                                 \
        struct step s = good_step(op);                                                             \
        change;                                                                                    \
        ck_assert_uint_eq(check_step(op, &s, &f), want);                                           \
        ck_assert_uint_eq(f.reason, want);                                                         \
        ck_assert_uint_eq(f.row, want_row);                                                        \
        ck_assert_uint_eq(f.value, want_value);                                                    \
        ck_assert_uint_eq(f.limit, want_limit);                                                    \
    } while (0)

START_TEST(good_steps_pass) {
    struct lk_refusal f;
    for (size_t i = 0; i < sizeof(step_ops) / sizeof(step_ops[0]); i++) {
        struct step s = good_step(step_ops[i]);
        ck_assert_uint_eq(check_step(step_ops[i], &s, &f), LK_REASON_NONE);
        s.head.rows = 0;
        ck_assert_uint_eq(lk_step_invalid(step_ops[i], &s.head, sizeof(s.head), &bounds, &f),
                          LK_REASON_NONE);
    }
    struct step s = good_step(LK_OP_DECODE);
    s.head = (struct lk_step_desc){.rows = ROWS,
                                   .budget = 16,
                                   .sampled = 0,
                                   .mass_target = 1,
                                   .sm_scale = 0.5f,
                                   .scan = LK_SCAN_TREE,
                                   .recent_pages = 9,
                                   .results = LK_NONE,
                                   .timing = ARENA - 128};
    s.rows[0].lse = ARENA - 64; /* 8 floats: to the last line */
    s.rows[1].list = 0;
    s.rows[1].list_pages = 1000;
    ck_assert_uint_eq(check_step(LK_OP_DECODE, &s, &f), LK_REASON_NONE);
}
END_TEST

START_TEST(step_refusals) {
    uint32_t nan_bits;
    float nan = NAN;
    memcpy(&nan_bits, &nan, 4);
    const uint32_t all = LK_ROW_WHOLE;
    EXPECT(LK_OP_DECODE, s.head.rows = 257, LK_REASON_ROWS, all, 257, 256);
    EXPECT(LK_OP_DECODE, s.head.rows = 1, LK_REASON_DESC_BYTES, all, 256, 160);
    EXPECT(LK_OP_DECODE, s.head.reserved = 3, LK_REASON_RESERVED, all, 3, 0);
    EXPECT(LK_OP_DECODE, s.head.reserved2 = 5, LK_REASON_RESERVED, all, 5, 0);
    EXPECT(LK_OP_DECODE, s.head.pool = 2, LK_REASON_POOL, all, 2, 2);
    EXPECT(LK_OP_DECODE, s.head.budget = 15, LK_REASON_BUDGET, all, 15, 16);
    EXPECT(LK_OP_DECODE, s.head.sampled = -2, LK_REASON_SAMPLED, all, (uint64_t)-2, 0);
    EXPECT(LK_OP_DECODE, s.head.mass_target = NAN, LK_REASON_MASS_TARGET, all, nan_bits, 1);
    EXPECT(LK_OP_DECODE, s.head.mass_target = -1, LK_REASON_MASS_TARGET, all, 0xbf800000, 1);
    EXPECT(LK_OP_DECODE, s.head.mass_target = 2, LK_REASON_MASS_TARGET, all, 0x40000000, 1);
    EXPECT(LK_OP_DECODE, s.head.sm_scale = INFINITY, LK_REASON_SM_SCALE, all, 0x7f800000, 0);
    EXPECT(LK_OP_DECODE, s.head.sm_scale = NAN, LK_REASON_SM_SCALE, all, nan_bits, 0);
    EXPECT(LK_OP_DECODE, s.head.scan = 5, LK_REASON_SCAN, all, 5, 4);
    EXPECT(LK_OP_DECODE, s.head.sink_pages = UINT32_MAX, LK_REASON_SINK_PAGES, all, UINT32_MAX,
           LK_FIXED_PAGES_MAX);
    EXPECT(LK_OP_DECODE, s.head.recent_pages = 0, LK_REASON_RECENT_PAGES, all, 0,
           LK_FIXED_PAGES_MAX);
    EXPECT(LK_OP_DECODE, s.head.recent_pages = 1u << 25, LK_REASON_RECENT_PAGES, all, 1u << 25,
           LK_FIXED_PAGES_MAX);
    EXPECT(LK_OP_DECODE, s.head.results = ARENA - 1, LK_REASON_RESULTS_RANGE, all, ARENA - 1,
           ARENA);
    EXPECT(LK_OP_DECODE, s.head.results = 8, LK_REASON_RESULTS_ALIGN, all, 8, 64);
    EXPECT(LK_OP_APPEND, s.head.timing = ARENA - 64, LK_REASON_TIMING_RANGE, all, ARENA - 64,
           ARENA);
    EXPECT(LK_OP_APPEND, s.head.timing = 4, LK_REASON_TIMING_ALIGN, all, 4, 64);
}
END_TEST

START_TEST(row_refusals) {
    EXPECT(LK_OP_DECODE, s.rows[1].reserved = 9, LK_REASON_RESERVED, 1, 9, 0);
    EXPECT(LK_OP_DECODE, s.rows[0].handle = 0, LK_REASON_HANDLE_NONE, 0, 0, 0);
    EXPECT(LK_OP_DECODE, s.rows[1].layer = 4, LK_REASON_LAYER, 1, 4, 4);
    EXPECT(LK_OP_APPEND, s.rows[1].tokens = 0, LK_REASON_TOKENS_ZERO, 1, 0, 1);
    EXPECT(LK_OP_APPEND, s.rows[1].tokens = 513, LK_REASON_TOKENS_MANY, 1, 513, 512);
    EXPECT(LK_OP_ATTEND, s.rows[0].tokens = 2, LK_REASON_TOKENS_ONE, 0, 2, 1);
    EXPECT(LK_OP_WRITE, s.rows[0].position = 1, LK_REASON_TABLE_POSITION, 0, 1, 0);
    EXPECT(LK_OP_ATTEND_TABLE, s.rows[1].position = 2, LK_REASON_TABLE_POSITION, 1, 2, 0);
    EXPECT(LK_OP_ATTEND_TABLE, s.rows[1].table_set = 8, LK_REASON_TABLE_SET, 1, 8, 8);
    EXPECT(LK_OP_DECODE, s.rows[1].list = 0, LK_REASON_LIST_PAGES, 1, 0, 1);
}
END_TEST

/* Each area: one byte too far, the largest offset there is, and one off its alignment. */
#define EXPECT_AREA(op, field, code, bytes)                                                        \
    do {                                                                                           \
        uint64_t last = ARENA - (bytes) + 1;                                                       \
        EXPECT(op, s.rows[1].field = last, LK_REASON_##code##_RANGE, 1, last, ARENA);              \
        EXPECT(op, s.rows[1].field = LK_DEVICE_BASE - 1, LK_REASON_##code##_RANGE, 1,              \
               LK_DEVICE_BASE - 1, ARENA);                                                         \
        EXPECT(op, s.rows[1].field = 32, LK_REASON_##code##_ALIGN, 1, 32, 64);                     \
    } while (0)

START_TEST(areas) {
    EXPECT_AREA(LK_OP_APPEND, k, K, 256);
    EXPECT_AREA(LK_OP_DECODE, v, V, 256);
    EXPECT_AREA(LK_OP_DECODE, q, Q, 1024);
    EXPECT_AREA(LK_OP_ATTEND, out, OUT, 2048);
    EXPECT_AREA(LK_OP_ATTEND_TABLE, lse, LSE, 32);
    EXPECT_AREA(LK_OP_WRITE, slots, SLOTS, 8);
    EXPECT(LK_OP_DECODE, (s.rows[0].list = 0, s.rows[0].list_pages = UINT32_MAX),
           LK_REASON_LIST_RANGE, 0, 0, ARENA);
    EXPECT(LK_OP_DECODE, (s.rows[0].list = 8, s.rows[0].list_pages = 1), LK_REASON_LIST_ALIGN, 0, 8,
           64);
    EXPECT(LK_OP_DECODE, s.rows[1].q = LK_NONE, LK_REASON_Q_DEVICE, 1, LK_NONE - LK_DEVICE_BASE, 0);
    EXPECT(LK_OP_WRITE, s.rows[1].slots = UINT64_MAX - 1, LK_REASON_SLOTS_RANGE, 1, UINT64_MAX - 1,
           ARENA);
}
END_TEST

/* The same in the device arena, and at the edges of what it is: one byte too far, among the fences,
 * off the alignment, and where there is no device arena. */
#define EXPECT_DEVICE(op, field, code, bytes)                                                      \
    do {                                                                                           \
        struct lk_refusal none = {0};                                                              \
        struct step d = good_step(op);                                                             \
        const uint64_t whole = LK_DEVICE_BASE + DEVICE, first = LK_DEVICE_BASE + FENCES;           \
        d.rows[1].field = first;                                                                   \
        ck_assert_uint_eq(check_device(op, &d, &none), LK_REASON_NONE);                            \
        d.rows[1].field = whole - ((bytes) + 63) / 64 * 64;                                        \
        ck_assert_uint_eq(check_device(op, &d, &none), LK_REASON_NONE);                            \
        d.rows[1].field = whole - (bytes) + 1;                                                     \
        expect_device(op, &d, LK_REASON_##code##_DEVICE, DEVICE - (bytes) + 1, DEVICE);            \
        d.rows[1].field = UINT64_MAX - 1;                                                          \
        expect_device(op, &d, LK_REASON_##code##_DEVICE, UINT64_MAX - 1 - LK_DEVICE_BASE, DEVICE); \
        d.rows[1].field = first - 64;                                                              \
        expect_device(op, &d, LK_REASON_DEVICE_PAYLOAD, FENCES - 64, FENCES);                      \
        d.rows[1].field = first + 32;                                                              \
        expect_device(op, &d, LK_REASON_##code##_ALIGN, first + 32, 64);                           \
        d.rows[1].field = LK_DEVICE_BASE - 64;                                                     \
        expect_device(op, &d, LK_REASON_##code##_RANGE, LK_DEVICE_BASE - 64, ARENA);               \
        EXPECT(op, s.rows[1].field = first, LK_REASON_##code##_DEVICE, 1, FENCES, 0);              \
    } while (0)

START_TEST(device_areas) {
    EXPECT_DEVICE(LK_OP_APPEND, k, K, 256);
    EXPECT_DEVICE(LK_OP_WRITE, v, V, 256);
    EXPECT_DEVICE(LK_OP_DECODE, q, Q, 1024);
    EXPECT_DEVICE(LK_OP_ATTEND, out, OUT, 2048);
    EXPECT_DEVICE(LK_OP_ATTEND_TABLE, lse, LSE, 32);
    struct lk_refusal f = {0};
    /* The rest may not lie there. */
    struct step s = good_step(LK_OP_WRITE);
    s.rows[1].slots = LK_DEVICE_BASE + FENCES;
    expect_device(LK_OP_WRITE, &s, LK_REASON_SLOTS_RANGE, s.rows[1].slots, ARENA);
    s = good_step(LK_OP_DECODE);
    s.rows[1].list = LK_DEVICE_BASE + FENCES;
    s.rows[1].list_pages = 1;
    expect_device(LK_OP_DECODE, &s, LK_REASON_LIST_RANGE, s.rows[1].list, ARENA);
    s = good_step(LK_OP_DECODE);
    s.head.results = LK_DEVICE_BASE + FENCES;
    ck_assert_uint_eq(check_device(LK_OP_DECODE, &s, &f), LK_REASON_RESULTS_RANGE);
    s.head.results = LK_NONE;
    s.head.timing = LK_DEVICE_BASE + FENCES;
    ck_assert_uint_eq(check_device(LK_OP_DECODE, &s, &f), LK_REASON_TIMING_RANGE);
}
END_TEST

static void expect_fences(const struct lk_bounds *with, uint32_t wait, uint32_t signal,
                          enum lk_reason want, uint64_t value, uint64_t limit) {
    struct lk_refusal f = {0};
    struct lk_sqe sqe = {.op = LK_OP_DECODE, .wait_fence = wait, .signal_fence = signal};
    ck_assert_uint_eq(lk_fences_invalid(&sqe, with, &f), want);
    ck_assert_uint_eq(f.reason, want);
    ck_assert_uint_eq(f.value, value);
    ck_assert_uint_eq(f.limit, limit);
}

START_TEST(fences) {
    expect_fences(&bounds, 0, 0, LK_REASON_NONE, 0, 0);
    expect_fences(&bounds, 1, 0, LK_REASON_FENCE_NONE, 1, 0);
    expect_fences(&bounds, 0, 3, LK_REASON_FENCE_NONE, 3, 0);
    expect_fences(&device_bounds, LK_DEVICE_FENCES, 1, LK_REASON_NONE, 0, 0);
    expect_fences(&device_bounds, LK_DEVICE_FENCES + 1, 1, LK_REASON_FENCE_NONE,
                  LK_DEVICE_FENCES + 1, LK_DEVICE_FENCES);
    expect_fences(&device_bounds, 1, UINT32_MAX, LK_REASON_FENCE_NONE, UINT32_MAX,
                  LK_DEVICE_FENCES);
}
END_TEST

START_TEST(unused_fields_are_not_looked_at) {
    struct lk_refusal f;
    struct step s = good_step(LK_OP_APPEND);
    s.rows[0].q = s.rows[0].out = s.rows[0].lse = s.rows[0].slots = 1;
    s.head.budget = 1;
    s.head.recent_pages = 0;
    ck_assert_uint_eq(check_step(LK_OP_APPEND, &s, &f), LK_REASON_NONE);
    s = good_step(LK_OP_ATTEND);
    s.rows[0].k = s.rows[0].v = 1;
    ck_assert_uint_eq(check_step(LK_OP_ATTEND, &s, &f), LK_REASON_NONE);
}
END_TEST

static void expect_sqe(struct lk_sqe sqe, enum lk_reason want, uint64_t value, uint64_t limit) {
    struct lk_refusal f = {0};
    ck_assert_uint_eq(lk_sqe_invalid(&sqe, AREA, &f), want);
    ck_assert_uint_eq(f.value, value);
    ck_assert_uint_eq(f.limit, limit);
}

START_TEST(entries) {
    const uint16_t op = LK_OP_DECODE;
    expect_sqe((struct lk_sqe){.op = LK_OP_BARRIER}, LK_REASON_NONE, 0, 0);
    expect_sqe((struct lk_sqe){.op = op, .desc_bytes = 64, .desc = AREA - 64}, LK_REASON_NONE, 0,
               0);
    expect_sqe((struct lk_sqe){.op = op, .desc_bytes = 64 + 96 * 256}, LK_REASON_NONE, 0, 0);
    expect_sqe((struct lk_sqe){.op = 0}, LK_REASON_OP, 0, LK_OP_COUNT - 1);
    expect_sqe((struct lk_sqe){.op = LK_OP_COUNT}, LK_REASON_OP, LK_OP_COUNT, LK_OP_COUNT - 1);
    expect_sqe((struct lk_sqe){.op = op, .reserved = 1, .desc_bytes = 64}, LK_REASON_RESERVED, 1,
               0);
    expect_sqe((struct lk_sqe){.op = op, .reserved2[1] = 2, .desc_bytes = 64}, LK_REASON_RESERVED,
               2, 0);
    expect_sqe((struct lk_sqe){.op = op, .wait_value = 7, .desc_bytes = 64}, LK_REASON_RESERVED, 7,
               0);
    expect_sqe((struct lk_sqe){.op = op, .signal_value = 8, .desc_bytes = 64}, LK_REASON_RESERVED,
               8, 0);
    expect_sqe((struct lk_sqe){.op = op,
                               .wait_fence = 1,
                               .wait_value = 7,
                               .signal_fence = 2,
                               .signal_value = 8,
                               .desc_bytes = 64},
               LK_REASON_NONE, 0, 0);
    expect_sqe((struct lk_sqe){.op = op, .desc_bytes = 63}, LK_REASON_DESC_BYTES, 63, 64);
    expect_sqe((struct lk_sqe){.op = op, .desc_bytes = 200}, LK_REASON_DESC_BYTES, 200, 160);
    expect_sqe((struct lk_sqe){.op = op, .desc_bytes = 64 + 96 * 257}, LK_REASON_ROWS, 257, 256);
    expect_sqe((struct lk_sqe){.op = op, .desc_bytes = UINT32_MAX}, LK_REASON_ROWS,
               (UINT32_MAX - 64) / 96, 256);
    expect_sqe((struct lk_sqe){.op = LK_OP_BARRIER, .desc_bytes = 8}, LK_REASON_DESC_BYTES, 8, 0);
    expect_sqe((struct lk_sqe){.op = LK_OP_SEQUENCE_FREE, .desc_bytes = 40}, LK_REASON_DESC_BYTES,
               40, 32);
    expect_sqe((struct lk_sqe){.op = LK_OP_TABLES, .desc_bytes = 16 + 24 * 257}, LK_REASON_ROWS,
               257, 256);
    expect_sqe((struct lk_sqe){.op = op, .desc_bytes = 64, .desc = 4}, LK_REASON_DESC_OFFSET, 4, 8);
    expect_sqe((struct lk_sqe){.op = op, .desc_bytes = 64, .desc = AREA - 56}, LK_REASON_DESC_RANGE,
               AREA - 56, AREA);
    expect_sqe((struct lk_sqe){.op = op, .desc_bytes = 64, .desc = UINT64_MAX - 7},
               LK_REASON_DESC_RANGE, UINT64_MAX - 7, AREA);
}
END_TEST

static void expect_object(uint16_t op, struct lk_object_desc o, enum lk_reason want, uint64_t value,
                          uint64_t limit) {
    struct lk_refusal f = {0};
    ck_assert_uint_eq(lk_object_invalid(op, &o, sizeof(o), &bounds, &f), want);
    ck_assert_uint_eq(f.value, value);
    ck_assert_uint_eq(f.limit, limit);
}

START_TEST(objects) {
    struct lk_object_desc none = {0}, some = {.handle = 5, .length = 9};
    struct lk_refusal f;
    ck_assert_uint_eq(lk_object_invalid(LK_OP_SEQUENCE_FREE, &some, 40, &bounds, &f),
                      LK_REASON_DESC_BYTES);
    expect_object(LK_OP_SEQUENCE_CREATE, none, LK_REASON_NONE, 0, 0);
    expect_object(LK_OP_SEQUENCE_CREATE, (struct lk_object_desc){.pool = 2}, LK_REASON_POOL, 2, 2);
    expect_object(LK_OP_LEASE_OPEN, none, LK_REASON_LEASE_EMPTY, 0, 1);
    expect_object(LK_OP_LEASE_OPEN, (struct lk_object_desc){.pool = 9}, LK_REASON_POOL, 9, 2);
    for (int op = LK_OP_SEQUENCE_FORK; op <= LK_OP_SEQUENCE_FREE; op++) {
        expect_object((uint16_t)op, some, LK_REASON_NONE, 0, 0);
        expect_object((uint16_t)op, none, LK_REASON_HANDLE_NONE, 0, 0);
    }
    expect_object(LK_OP_COPY_PAGES, (struct lk_object_desc){.handle = 1, .count = LK_LIST_MAX + 1},
                  LK_REASON_COUNT, LK_LIST_MAX + 1, LK_LIST_MAX);
    expect_object(LK_OP_COPY_PAGES,
                  (struct lk_object_desc){.handle = 1, .count = 9, .list = ARENA - 64},
                  LK_REASON_LIST_RANGE, ARENA - 64, ARENA);
    expect_object(LK_OP_INVALIDATE,
                  (struct lk_object_desc){.handle = 1, .count = 16, .list = ARENA - 64},
                  LK_REASON_NONE, 0, 0);
    expect_object(LK_OP_INVALIDATE, (struct lk_object_desc){.handle = 1, .count = 1, .list = 4},
                  LK_REASON_LIST_ALIGN, 4, 64);
}
END_TEST

START_TEST(tables) {
    struct {
        struct lk_tables_desc head;
        struct lk_table_desc rows[2];
    } t, good = {{.handle = 3, .set = 7, .rows = 2}, {{0, 33, 3, 0}, {64, 0, 0, 0}}};
    struct lk_refusal f;
#define EXPECT_TABLE(change, want, want_row, want_value, want_limit)                               \
    t = good;                                                                                      \
    change;                                                                                        \
    ck_assert_uint_eq(lk_tables_invalid(&t.head, sizeof(t), &bounds, 16, &f), want);               \
    ck_assert_uint_eq(f.row, want_row);                                                            \
    ck_assert_uint_eq(f.value, want_value);                                                        \
    ck_assert_uint_eq(f.limit, want_limit)
    t = good;
    ck_assert_uint_eq(lk_tables_invalid(&t.head, sizeof(t), &bounds, 16, &f), LK_REASON_NONE);
    EXPECT_TABLE(t.head.rows = 300, LK_REASON_ROWS, LK_ROW_WHOLE, 300, 256);
    EXPECT_TABLE(t.head.rows = 1, LK_REASON_DESC_BYTES, LK_ROW_WHOLE, 64, 40);
    EXPECT_TABLE(t.head.handle = 0, LK_REASON_HANDLE_NONE, LK_ROW_WHOLE, 0, 0);
    EXPECT_TABLE(t.head.set = 8, LK_REASON_TABLE_SET, LK_ROW_WHOLE, 8, 8);
    EXPECT_TABLE(t.rows[1].reserved = 1, LK_REASON_RESERVED, 1, 1, 0);
    EXPECT_TABLE(t.rows[0].length = 32, LK_REASON_TABLE_LENGTH, 0, 3, 2);
    EXPECT_TABLE(t.rows[0].length = UINT64_MAX, LK_REASON_TABLE_LENGTH, 0, 3, UINT64_C(1) << 60);
    EXPECT_TABLE(t.rows[0].table = ARENA - 8, LK_REASON_TABLE_RANGE, 0, ARENA - 8, ARENA);
    EXPECT_TABLE(t.rows[0].table = 4, LK_REASON_TABLE_ALIGN, 0, 4, 64);
}
END_TEST

START_TEST(every_reason_has_words) {
    char text[LK_REASON_BYTES];
    for (uint16_t r = 0; r < (uint16_t)LK_REASONS; r++) {
        ck_assert_msg(strcmp(lk_reason_name(r), "unknown") != 0, "reason %u has no name", r);
        ck_assert_msg(r == 0 || lk_reason_errno(r) < 0, "reason %u has no errno", r);
        lk_reason_text(r, UINT64_MAX, UINT64_MAX, 255, text, sizeof(text));
        ck_assert_msg(strlen(text) > 10, "reason %u has no sentence", r);
        ck_assert_msg(strlen(text) < sizeof(text) - 1, "reason %u is cut: %s", r, text);
        ck_assert_msg(!strpbrk(text, "{}"), "reason %u: %s", r, text);
        for (uint16_t other = 0; other < r; other++)
            ck_assert_str_ne(lk_reason_name(r), lk_reason_name(other));
    }
}
END_TEST

START_TEST(numbers_and_nouns_agree) {
    static const char *const plurals[] = {"1 tokens", "1 pages",   "1 bytes",  "1 rows",
                                          "1 slots",  "1 queries", "1 entries"};
    char text[LK_REASON_BYTES];
    for (uint16_t r = 0; r < (uint16_t)LK_REASONS; r++) {
        lk_reason_text(r, 1, 1, LK_ROW_WHOLE, text, sizeof(text));
        for (size_t i = 0; i < sizeof(plurals) / sizeof(*plurals); i++)
            ck_assert_msg(!strstr(text, plurals[i]), "reason %u: %s", r, text);
    }
    ck_assert_str_eq(lk_reason_text(LK_REASON_COUNT, 1, 2, LK_ROW_WHOLE, text, sizeof(text)),
                     "a list of 1 entry is longer than 2");
    ck_assert_str_eq(lk_reason_text(LK_REASON_COUNT, 21, 2, LK_ROW_WHOLE, text, sizeof(text)),
                     "a list of 21 entries is longer than 2");
    ck_assert_str_eq(lk_reason_text(LK_REASON_TABLE_TOKENS, 2, 1, 0, text, sizeof(text)),
                     "row 0: 2 queries in a row whose table has 1 token");
}
END_TEST

START_TEST(sentences_name_value_and_limit) {
    char text[LK_REASON_BYTES];
    float f = -0.5f;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    ck_assert_str_eq(lk_reason_text(LK_REASON_POSITION, 17, 16, 3, text, sizeof(text)),
                     "row 3: position 17 is not the layer's length, 16");
    ck_assert_str_eq(lk_reason_text(LK_REASON_BUDGET, 8, 16, LK_ROW_WHOLE, text, sizeof(text)),
                     "a budget of 8 tokens is smaller than a page, 16 tokens");
    ck_assert_str_eq(
        lk_reason_text(LK_REASON_MASS_TARGET, bits, 1, LK_ROW_WHOLE, text, sizeof(text)),
        "mass_target -0.5 is not between 0 (none) and 1");
    lk_reason_text(LK_REASON_SAMPLED, (uint64_t)-2, 0, LK_ROW_WHOLE, text, sizeof(text));
    ck_assert_ptr_nonnull(strstr(text, "-2 sampled"));
    lk_reason_text(LK_REASON_HANDLE_STALE, 0xabc, 0, 0, text, sizeof(text));
    ck_assert_ptr_nonnull(strstr(text, "handle 0xabc "));
    lk_reason_text(60000, 4, 5, LK_ROW_WHOLE, text, sizeof(text)); /* a newer daemon's */
    ck_assert_ptr_nonnull(strstr(text, "value 4, limit 5"));
    ck_assert_int_eq(lk_reason_errno(60000), -EINVAL);
    for (size_t room = 1; room < 60; room++) { /* never beyond the room given */
        memset(text, 'x', sizeof(text));
        lk_reason_text(LK_REASON_POSITION, UINT64_MAX, UINT64_MAX, 255, text, room);
        ck_assert_uint_lt(strlen(text), room);
        ck_assert_int_eq(text[room], 'x');
    }
}
END_TEST

START_TEST(hello) {
    char why[LK_REASON_BYTES] = "";
    uint16_t minor = 99;
    struct lk_hello good = {.head = {LK_ABI_MAGIC, LK_MSG_HELLO, sizeof(good)},
                            .major = LK_ABI_MAJOR,
                            .minor = LK_ABI_MINOR + 5,
                            .name = "me"};
    struct lk_hello h = good;
    ck_assert_int_eq(lk_hello_invalid(&h, ARENA, &minor, why, sizeof(why)), 0);
    ck_assert_uint_eq(minor, LK_ABI_MINOR);
    h.major = 7;
    ck_assert_int_eq(lk_hello_invalid(&h, ARENA, &minor, why, sizeof(why)), -EPROTO);
    ck_assert_msg(strstr(why, "7.") && strstr(why, "1.1"), "%s", why);
    h = good;
    h.min_minor = LK_ABI_MINOR + 1;
    ck_assert_int_eq(lk_hello_invalid(&h, ARENA, &minor, why, sizeof(why)), -EPROTO);
    h = good;
    h.head.bytes = 60;
    ck_assert_int_eq(lk_hello_invalid(&h, ARENA, &minor, why, sizeof(why)), -EPROTO);
    h = good;
    h.reserved2 = 1;
    ck_assert_int_eq(lk_hello_invalid(&h, ARENA, &minor, why, sizeof(why)), -EINVAL);
    h = good;
    memset(h.name, 'a', sizeof(h.name));
    ck_assert_int_eq(lk_hello_invalid(&h, ARENA, &minor, why, sizeof(why)), -EINVAL);
    h = good;
    h.arena_bytes = ARENA + 1;
    ck_assert_int_eq(lk_hello_invalid(&h, ARENA, &minor, why, sizeof(why)), -EDQUOT);
    ck_assert_msg(strstr(why, "1048577") && strstr(why, "1048576"), "%s", why);
    struct lk_welcome w = {.head = {LK_ABI_MAGIC, LK_MSG_WELCOME, sizeof(w)}, .major = 2};
    ck_assert_int_eq(lk_welcome_invalid(&w, why, sizeof(why)), -EPROTO);
    ck_assert_msg(strstr(why, "daemon speaks protocol version 2.0"), "%s", why);
}
END_TEST

/* ---- random bytes ---- */

static uint64_t state = 0x9e3779b97f4a7c15;
static uint64_t draw(void) {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

/* Where the device arena begins and ends, or nearly. */
static uint64_t draw_edge(void) {
    static const uint64_t edges[] = {0, FENCES, DEVICE, DEVICE - 64, UINT64_MAX, FENCES - 64};
    return edges[draw() % 6];
}

/* Small numbers, edges and anything. */
static uint64_t draw_field(void) {
    static const uint64_t edges[] = {
        0, 1, 63, 64, ARENA, ARENA - 64, UINT32_MAX, LK_NONE, UINT64_C(1) << 63, UINT64_MAX - 63};
    uint64_t kind = draw() % 5;
    if (kind == 0)
        return draw();
    if (kind == 4) /* about the device arena */
        return LK_DEVICE_BASE + (draw() % 4 ? draw() % (2 * DEVICE / 64) * 64 : draw_edge());
    return kind == 1 ? edges[draw() % 10] : draw() % 512 * (kind == 2 ? 1 : 64);
}

/* What a valid row names must lie inside the arena: computed here in 128 bits. */
static bool inside(uint64_t offset, unsigned __int128 bytes) {
    return (unsigned __int128)offset + bytes <= ARENA;
}
/* Or behind the fences of the device arena. */
static bool inside_either(uint64_t offset, unsigned __int128 bytes) {
    return inside(offset, bytes) || (offset >= LK_DEVICE_BASE + FENCES &&
                                     (unsigned __int128)offset + bytes <= LK_DEVICE_BASE + DEVICE);
}

static void check_accepted(uint16_t op, const struct lk_step_desc *s,
                           bool (*payload)(uint64_t, unsigned __int128)) {
    const struct lk_pool_shape *p = &shapes[s->pool];
    const struct lk_row_desc *rows = lk_step_rows(s);
    for (uint32_t i = 0; i < s->rows; i++) {
        unsigned __int128 kv =
            (unsigned __int128)rows[i].tokens * p->kv_heads * p->head_dim * p->element_bytes;
        if ((op == LK_OP_APPEND || op == LK_OP_DECODE || op == LK_OP_WRITE) &&
            (!payload(rows[i].k, kv) || !payload(rows[i].v, kv)))
            ck_abort_msg("keys or values outside were accepted");
        if ((op == LK_OP_DECODE || op == LK_OP_ATTEND || op == LK_OP_ATTEND_TABLE) &&
            (!payload(rows[i].q, kv * p->group) ||
             (rows[i].list != LK_NONE &&
              !inside(rows[i].list, (unsigned __int128)rows[i].list_pages * p->kv_heads * 8))))
            ck_abort_msg("queries or a list outside were accepted");
    }
}

START_TEST(random_descriptors) {
    uint32_t accepted = 0, accepted_device = 0;
    struct lk_refusal f;
    char text[LK_REASON_BYTES];
    for (int n = 0; n < 200000; n++) {
        uint32_t rows = (uint32_t)(draw() % 3), bytes = 64 + 96 * rows;
        uint64_t *words = calloc(1, bytes); /* exact size: ASan sees a byte too many */
        for (uint32_t i = 0; i < bytes / 8; i++)
            words[i] = draw_field();
        struct lk_step_desc *s = (struct lk_step_desc *)words;
        uint16_t op = step_ops[draw() % 5];
        if (draw() % 8) { /* mostly a plausible head, so that rows are reached */
            struct step good = good_step(op);
            *s = good.head;
            s->rows = rows;
            s->pool = draw() % 2;
            for (uint32_t i = 0; i < rows; i++) {
                struct lk_row_desc *r = (struct lk_row_desc *)(s + 1) + i;
                r->reserved = 0;
                r->layer %= shapes[s->pool].layers + (draw() % 16 == 0);
                r->tokens %= 64;
                if (op == LK_OP_WRITE || op == LK_OP_ATTEND_TABLE)
                    r->position = 0;
            }
        }
        if (lk_step_invalid(op, s, bytes, &bounds, &f)) {
            lk_reason_text(f.reason, f.value, f.limit, f.row, text, sizeof(text));
        } else {
            accepted += rows > 0;
            check_accepted(op, s, inside);
        }
        if (!lk_step_invalid(op, s, bytes, &device_bounds, &f)) {
            accepted_device += rows > 0 && (lk_step_rows(s)->q >= LK_DEVICE_BASE ||
                                            lk_step_rows(s)->k >= LK_DEVICE_BASE);
            check_accepted(op, s, inside_either);
        }
        (void)lk_sqe_invalid((const struct lk_sqe *)words, AREA, &f);
        (void)lk_object_invalid((uint16_t)(1 + draw() % 14), (const struct lk_object_desc *)words,
                                32, &bounds, &f);
        if (rows)
            (void)lk_tables_invalid((const struct lk_tables_desc *)words, 16 + 24 * (rows + 1),
                                    &bounds, 16, &f);
        free(words);
    }
    ck_assert_uint_gt(accepted, 100);
    ck_assert_uint_gt(accepted_device, 100);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("validate");
    TCase *tc = tcase_create("all");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, good_steps_pass);
    tcase_add_test(tc, step_refusals);
    tcase_add_test(tc, row_refusals);
    tcase_add_test(tc, areas);
    tcase_add_test(tc, device_areas);
    tcase_add_test(tc, fences);
    tcase_add_test(tc, unused_fields_are_not_looked_at);
    tcase_add_test(tc, entries);
    tcase_add_test(tc, objects);
    tcase_add_test(tc, tables);
    tcase_add_test(tc, every_reason_has_words);
    tcase_add_test(tc, numbers_and_nouns_agree);
    tcase_add_test(tc, sentences_name_value_and_limit);
    tcase_add_test(tc, hello);
    tcase_add_test(tc, random_descriptors);
    suite_add_tcase(suite, tc);
    return run_suite(suite);
}
