/* SPDX-License-Identifier: MIT */
/*
 * test_geometry.c - what is refused, in which words, and the bytes of what is not.
 */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "../common/run.h"
#include "../../kernels/cpu/cpu.h"

static const struct lk_geometry usual = {.layers = 32,
                                         .kv_heads = 8,
                                         .group = 4,
                                         .head_dim = 128,
                                         .page_tokens = 16,
                                         .rank = 8,
                                         .dtype = LK_BF16};

static void refused(struct lk_geometry g, const char *want) {
    char text[200] = "";
    const char *why = lk_geometry_invalid(&g, text, sizeof text);
    ck_assert_ptr_nonnull(why);
    ck_assert_str_eq(why, want);
}

START_TEST(test_refusals) {
    struct lk_geometry g;
#define WITH(field, value, want)                                                                   \
    g = usual;                                                                                     \
    g.field = value;                                                                               \
    refused(g, want)
    WITH(layers, 0, "layers is 0; it may be 1 to 1024");
    WITH(layers, 1025, "layers is 1025; it may be 1 to 1024");
    WITH(kv_heads, 0, "kv_heads is 0; it may be 1 to 256");
    WITH(kv_heads, UINT32_MAX, "kv_heads is 4294967295; it may be 1 to 256");
    WITH(group, 0, "group is 0; it may be 1 to 32");
    WITH(group, 33, "group is 33; it may be 1 to 32");
    WITH(head_dim, 72, "head_dim is 72; it may be 64, 80, 96, 112, 128, 192 or 256");
    WITH(head_dim, 0, "head_dim is 0; it may be 64, 80, 96, 112, 128, 192 or 256");
    WITH(page_tokens, 24, "page_tokens is 24; it may be 8, 16, 32 or 64");
    WITH(rank, 3, "rank is 3; it may be 2, 4, 8 or 16");
    WITH(dtype, 0, "dtype is 0; it may be 1 (bf16), 2 (fp16) or 3 (fp32)");
    WITH(dtype, 4, "dtype is 4; it may be 1 (bf16), 2 (fp16) or 3 (fp32)");
    g = usual;
    g.page_tokens = 8;
    g.rank = 16;
    refused(g, "rank is 16; with page_tokens 8 it may be 2, 4 or 8");
#undef WITH
}
END_TEST

START_TEST(test_all_supported) {
    static const uint32_t dims[] = {64, 80, 96, 112, 128, 192, 256};
    char text[200];
    int count = 0;

    for (int d = 0; d < 7; d++)
        for (uint32_t tokens = 8; tokens <= 64; tokens *= 2)
            for (uint32_t rank = 2; rank <= 16 && rank <= tokens; rank *= 2)
                for (uint32_t dtype = LK_BF16; dtype <= LK_FP32; dtype++)
                    for (uint32_t group = 1; group <= 32; group++) {
                        struct lk_geometry g = usual;
                        g.head_dim = dims[d];
                        g.page_tokens = tokens;
                        g.rank = rank;
                        g.dtype = dtype;
                        g.group = group;
                        ck_assert_ptr_null(lk_geometry_invalid(&g, text, sizeof text));
                        count++;
                    }
    ck_assert_int_eq(count, 7 * 15 * 3 * 32);
}
END_TEST

START_TEST(test_bytes) {
    struct lk_geometry g = usual;
    struct lk_layout l;

    lk_cpu_layout(&g, &l);
    ck_assert_uint_eq(l.coarse_bytes, 294);
    ck_assert_uint_eq(l.fine_bytes, 492);
    ck_assert_uint_eq(l.super_bytes, 390);
    ck_assert_uint_eq(l.element_bytes, 2);
    ck_assert_uint_eq(l.head_bytes, 2 * 16 * 128 * 2);
    ck_assert_uint_eq(l.page_bytes, 8 * l.head_bytes);
    g.rank = 2;
    g.dtype = LK_FP32;
    lk_cpu_layout(&g, &l);
    ck_assert_uint_eq(l.coarse_bytes, 294);
    ck_assert_uint_eq(l.fine_bytes, 0);
    ck_assert_uint_eq(l.fine_stride, 0);
    ck_assert_uint_eq(l.head_bytes, 2 * 16 * 128 * 4);
}
END_TEST

START_TEST(test_strides) {
    for (uint32_t tokens = 8; tokens <= 64; tokens *= 2) {
        struct lk_geometry g = usual;
        struct lk_layout l;
        g.page_tokens = tokens;
        lk_cpu_layout(&g, &l);
        ck_assert(l.coarse_stride >= l.coarse_bytes && l.coarse_stride < l.coarse_bytes + 8);
        ck_assert(l.fine_stride >= l.fine_bytes && l.fine_stride < l.fine_bytes + 8);
        ck_assert(l.super_stride >= l.super_bytes && l.super_stride < l.super_bytes + 8);
        ck_assert_uint_eq(l.coarse_stride % 8 + l.fine_stride % 8 + l.super_stride % 8, 0);
    }
}
END_TEST

START_TEST(test_path_names) {
    ck_assert_int_eq(lk_cpu_open(LK_CPU_PORTABLE), 0);
    ck_assert_str_eq(lk_cpu_path_name(lk_cpu_path()), "portable");
    ck_assert_int_lt(lk_cpu_open((enum lk_cpu_path)99), 0);
    ck_assert_str_eq(lk_cpu_path_name(lk_cpu_path()), "portable");
    ck_assert_int_eq(lk_cpu_open(LK_CPU_BEST), 0);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("geometry");
    TCase *tc = tcase_create("geometry");

    tcase_add_test(tc, test_refusals);
    tcase_add_test(tc, test_all_supported);
    tcase_add_test(tc, test_bytes);
    tcase_add_test(tc, test_strides);
    tcase_add_test(tc, test_path_names);
    suite_add_tcase(suite, tc);
    return run_suite(suite);
}
