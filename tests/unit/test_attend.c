/* SPDX-License-Identifier: MIT */
/*
 * test_attend.c - exact attention against double precision: every dtype, head dimension, group and
 * page, on every path; lists with weights; merging; what must not be read.
 */
#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../common/run.h"
#include "../../kernels/cpu/attend.h"
#include "../common/bed.h"

#define HEAD_DIM_MAX 256

static const enum lk_cpu_path paths[] = {LK_CPU_PORTABLE, LK_CPU_AVX2, LK_CPU_AVX512};
static const uint32_t dims[] = {64, 80, 96, 112, 128, 192, 256};

static bool open_path(int i) {
    return lk_cpu_open(paths[i]) == 0; /* -ENOTSUP: not on this machine */
}

/* Largest error of a query's output, relative to its largest channel. */
static double error_of(const float *out, const double *want, uint32_t head_dim) {
    double worst = 0, size = 1e-30;

    for (uint32_t x = 0; x < head_dim; x++) {
        double e = fabs((double)out[x] - want[x]);
        worst = e > worst || e != e ? e : worst;
        size = fabs(want[x]) > size ? fabs(want[x]) : size;
    }
    return worst / size;
}

static void check_exact(struct bed *bed) {
    const struct lk_geometry *g = &bed->pool.geometry;
    uint32_t heads = g->kv_heads * g->group;
    double want[HEAD_DIM_MAX];

    bed_run(&bed->row, 0xff);
    for (uint32_t t = 0; t < bed->row.tokens; t++)
        for (uint32_t h = 0; h < heads; h++) {
            uint64_t sight = bed->row.length + t + 1 - bed->row.tokens;
            double lse = bed_attend(bed, t, h, sight, NULL, want);
            size_t at = (size_t)t * heads + h;
            ck_assert_double_lt(error_of(bed->out + at * g->head_dim, want, g->head_dim), 2e-5);
            ck_assert_double_lt(fabs((double)bed->lse[at] - lse), 2e-5 * (1 + fabs(lse)));
        }
}

START_TEST(every_geometry) {
    if (!open_path(_i))
        return;
    for (uint32_t dtype = LK_BF16; dtype <= LK_FP32; dtype++)
        for (uint32_t d = 0; d < 7; d++)
            for (uint32_t b = 8; b <= 64; b *= 2) {
                struct lk_geometry g = {2, 2, 1 + (d * 5 + b) % 9, dims[d], b, 2, dtype};
                struct bed *bed = bed_open(&g, 3 * b + 1 + d * 7 % b, 1);
                check_exact(bed);
                bed_close(bed);
            }
}
END_TEST

START_TEST(every_group) {
    if (!open_path(_i))
        return;
    for (uint32_t group = 1; group <= LK_GROUP_MAX; group++) {
        struct lk_geometry g = {1, 1, group, 64, 16, 2, LK_BF16};
        struct bed *bed = bed_open(&g, 70, 1);
        check_exact(bed);
        bed_close(bed);
    }
}
END_TEST

START_TEST(every_length) { /* multiples of the page and of a vector, and their neighbours */
    if (!open_path(_i))
        return;
    for (uint64_t n = 1; n <= 150; n++) {
        struct lk_geometry g = {1, 1, 3, 80, 16, 2, LK_FP16};
        struct bed *bed = bed_open(&g, n, 2);
        check_exact(bed);
        bed_close(bed);
    }
}
END_TEST

START_TEST(several_spans) {
    if (!open_path(_i))
        return;
    struct lk_geometry g = {1, 2, 4, 128, 16, 2, LK_BF16};
    struct bed *bed = bed_open(&g, 5000, 1);
    ck_assert_uint_gt(lk_cpu_attend_tasks(&bed->row), 2);
    check_exact(bed);
    bed_close(bed);
}
END_TEST

START_TEST(extreme_keys) {
    static const double scales[] = {1e-41, 1e-30, 1e3, 1e15, 1e30};
    if (!open_path(_i))
        return;
    for (size_t s = 0; s < sizeof scales / sizeof *scales; s++) {
        struct lk_geometry g = {1, 1, 4, 64, 16, 2, LK_BF16};
        struct bed *bed = bed_open(&g, 100, scales[s]);
        double want[HEAD_DIM_MAX];
        bed_run(&bed->row, 0);
        for (uint32_t h = 0; h < 4; h++) {
            bed_attend(bed, 0, h, 100, NULL, want);
            ck_assert_double_lt(error_of(bed->out + h * 64, want, 64), 1e-3);
        }
        bed_close(bed);
    }
}
END_TEST

START_TEST(constant_channels) { /* 600 in two channels: large logits that are nearly equal */
    if (!open_path(_i))
        return;
    struct lk_geometry g = {1, 1, 2, 128, 16, 2, LK_BF16};
    struct bed *bed = bed_open(&g, 200, 1);
    double want[HEAD_DIM_MAX];
    for (uint64_t t = 0; t < 200; t++) {
        bed_set(bed, 0, t, 0, 5, 600);
        bed_set(bed, 0, t, 0, 77, 600);
    }
    bed_run(&bed->row, 0);
    for (uint32_t h = 0; h < 2; h++) {
        bed_attend(bed, 0, h, 200, NULL, want);
        ck_assert_double_lt(error_of(bed->out + h * 128, want, 128), 1e-3);
    }
    bed_close(bed);
}
END_TEST

START_TEST(listed_pages_with_weights) {
    if (!open_path(_i))
        return;
    struct lk_geometry g = {1, 2, 5, 96, 8, 2, LK_FP32};
    struct bed *bed = bed_open(&g, 8 * 40 - 3, 1);
    uint32_t list[] = {0, 3, 4, 9, 17, 18, 19, 20, 21, 22, 23, 30, 39};
    float weight[] = {1, 2.5f, 1, 0.25f, 1, 1, 7, 1, 1, 1, 1e-4f, 1, 3};
    double by_page[40] = {0}, want[HEAD_DIM_MAX];
    struct lk_partial partial[5];
    float values[5 * 96];
    for (int i = 0; i < 13; i++)
        by_page[list[i]] = (double)weight[i];
    for (uint32_t head = 0; head < 2; head++) {
        struct lk_span span = {list, weight, 0, 13};
        struct lk_tile tile = {.head = head, .heads = 1, .tokens = 1};
        lk_attend(&bed->row, &tile, &span, partial, values);
        for (uint32_t i = 0; i < 5; i++) {
            float out[96], lse = lk_attend_merge(partial + i, values + i * 96, 1, 5, 96, out);
            double ref = bed_attend(bed, 0, head * 5 + i, bed->tokens, by_page, want);
            ck_assert_double_lt(error_of(out, want, 96), 2e-5);
            ck_assert_double_lt(fabs((double)lse - ref), 2e-5);
            ck_assert_float_eq(lse, lk_attend_lse(partial + i, 1, 5));
        }
    }
    bed_close(bed);
}
END_TEST

START_TEST(merging_parts) {
    if (!open_path(_i))
        return;
    struct lk_geometry g = {1, 1, 1, 64, 16, 2, LK_FP32};
    struct bed *bed = bed_open(&g, 160, 4);
    struct lk_partial partial[4];
    float values[4 * 64], out[64], whole[64];
    struct lk_span part[] = {{.first = 0, .count = 3},
                             {.first = 3, .count = 0},
                             {.first = 3, .count = 6},
                             {.first = 9, .count = 1}};
    struct lk_tile tile = {.heads = 1, .tokens = 1};
    for (int i = 0; i < 4; i++)
        lk_attend(&bed->row, &tile, &part[i], partial + i, values + i * 64);
    float lse = lk_attend_merge(partial, values, 4, 1, 64, out);
    struct lk_span all = {.first = 0, .count = 10};
    lk_attend(&bed->row, &tile, &all, partial, values);
    ck_assert_float_lt(fabsf(lk_attend_merge(partial, values, 1, 1, 64, whole) - lse), 1e-5f);
    for (int x = 0; x < 64; x++)
        ck_assert_float_lt(fabsf(out[x] - whole[x]), 1e-5f);
    bed_close(bed);
}
END_TEST

START_TEST(merging_nothing) { /* no part, two empty parts: 0 and -inf, no NaN */
    struct lk_partial empty[2] = {{-INFINITY, 0}, {-INFINITY, 0}};
    float values[2 * 64] = {0}, out[64];
    if (!open_path(_i))
        return;
    for (uint32_t count = 0; count <= 2; count++) {
        memset(out, 0xff, sizeof out);
        ck_assert(lk_attend_merge(empty, values, count, 1, 64, out) == -INFINITY);
        ck_assert(lk_attend_lse(empty, count, 1) == -INFINITY);
        for (int x = 0; x < 64; x++)
            ck_assert_float_eq(out[x], 0);
    }
}
END_TEST

START_TEST(newest_page_score) {
    if (!open_path(_i))
        return;
    for (uint64_t n = 33; n <= 48; n++) {
        struct lk_geometry g = {1, 1, 6, 64, 16, 2, LK_BF16};
        struct bed *bed = bed_open(&g, n, 1);
        double weight[3] = {0, 0, 1}, unused[HEAD_DIM_MAX];
        float scores[6 * 4];
        lk_attend_score(&bed->row, 0, 2, scores, 4);
        for (uint32_t h = 0; h < 6; h++)
            ck_assert_double_lt(
                fabs((double)scores[4 * h] - bed_attend(bed, 0, h, n, weight, unused)), 1e-5);
        bed_close(bed);
    }
}
END_TEST

START_TEST(zero_length_row) {
    if (!open_path(_i))
        return;
    struct lk_geometry g = {1, 2, 4, 128, 16, 8, LK_BF16};
    struct bed *bed = bed_open(&g, 0, 1);
    float out[8 * 128], lse[8];
    memset(out, 0xff, sizeof out);
    bed->row.out = out;
    bed->row.lse = lse;
    for (uint32_t exact = 0; exact < 2; exact++) {
        bed->row.exact = exact;
        bed_run(&bed->row, 0xff);
        for (size_t i = 0; i < 8 * 128; i++)
            ck_assert_float_eq(out[i], 0);
        for (int i = 0; i < 8; i++)
            ck_assert(lse[i] == -INFINITY);
        ck_assert_uint_eq(bed->result[0].kept, 0);
        ck_assert_uint_eq(bed->result[0].flags, LK_OUT_EXACT);
    }
    bed_close(bed);
}
END_TEST

START_TEST(
    poison_beyond_the_length) { /* the bed poisons every byte it does not set, V alone below */
    if (!open_path(_i))
        return;
    struct lk_geometry g = {2, 2, 4, 128, 16, 2, LK_BF16};
    struct bed *bed = bed_open(&g, 100, 1);
    for (uint32_t c = 0; c < 128; c++)
        for (uint64_t t = 90; t < 100; t++)
            bed_set(bed, 1, t, 0, c, (double)(c % 2 ? INFINITY : NAN));
    bed->row.length = 90; /* cut: what lies beyond is stale */
    check_exact(bed);
    bed_close(bed);
}
END_TEST

/* One that says something in its low bits, which only an fp32 can: integers made of it overflow. */
static double crammed_nan(void) {
    float nan;

    memcpy(&nan, &(uint32_t){0x7fc000ca}, sizeof nan);
    return (double)nan;
}

START_TEST(bad_values_spoil_their_head_only) {
    if (!open_path(_i))
        return;
    for (uint32_t dtype = LK_BF16; dtype <= LK_FP32; dtype++) {
        struct lk_geometry g = {1, 2, 4, 64, 16, 2, dtype};
        struct bed *bed = bed_open(&g, 100, 1);
        double want[HEAD_DIM_MAX];
        bed_set(bed, 0, 20, 0, 3, dtype == LK_FP32 ? crammed_nan() : (double)NAN);
        bed_set(bed, 0, 21, 0, 3, (double)INFINITY);
        bed_set(bed, 1, 50, 0, 7, (double)-INFINITY);
        bed_run(&bed->row, 0);
        ck_assert(bed->out[0] != bed->out[0]);
        for (uint32_t h = 4; h < 8; h++) {
            bed_attend(bed, 0, h, 100, NULL, want);
            ck_assert_double_lt(error_of(bed->out + h * 64, want, 64), 2e-5);
        }
        bed_close(bed);
    }
}
END_TEST

int main(void) {
    Suite *suite = suite_create("attend");
    TCase *all = tcase_create("all paths");

    tcase_set_timeout(all, 120);
    tcase_add_loop_test(all, every_geometry, 0, 3);
    tcase_add_loop_test(all, every_group, 0, 3);
    tcase_add_loop_test(all, every_length, 0, 3);
    tcase_add_loop_test(all, several_spans, 0, 3);
    tcase_add_loop_test(all, extreme_keys, 0, 3);
    tcase_add_loop_test(all, constant_channels, 0, 3);
    tcase_add_loop_test(all, listed_pages_with_weights, 0, 3);
    tcase_add_loop_test(all, merging_parts, 0, 3);
    tcase_add_loop_test(all, merging_nothing, 0, 3);
    tcase_add_loop_test(all, newest_page_score, 0, 3);
    tcase_add_loop_test(all, zero_length_row, 0, 3);
    tcase_add_loop_test(all, poison_beyond_the_length, 0, 3);
    tcase_add_loop_test(all, bad_values_spoil_their_head_only, 0, 3);
    suite_add_tcase(suite, all);
    return run_suite(suite);
}
