/* SPDX-License-Identifier: MIT */
/*
 * test_cuda_plan.c - which rows the GPU's kernels take, and how much they take for them: the part
 * of that backend which runs on the host. What is refused here ends the daemon: it must have
 * refused before, by name.
 */
#include <check.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "../common/run.h"
#include "../../graphs/cuda/sizes.h"
#include "../../graphs/engine.h"
#include "../../kernels/cuda/cuda.h"
#include "../../kernels/cuda/state.h"

static struct lk_pool_view pool = {.geometry = {.layers = 1,
                                                .kv_heads = 8,
                                                .group = 4,
                                                .head_dim = 128,
                                                .page_tokens = 16,
                                                .rank = 8,
                                                .dtype = LK_BF16}};

static struct lk_row row_of(uint64_t length, uint32_t tokens, uint32_t budget_pages, bool exact) {
    return (struct lk_row){.pool = &pool,
                           .length = length,
                           .tokens = tokens,
                           .append = tokens,
                           .table_shift = 2,
                           .budget_pages = budget_pages,
                           .budget_tokens = UINT64_C(16) * budget_pages,
                           .scan = LK_FULL,
                           .recent_pages = 1,
                           .exact = exact};
}

static int fill(struct lk_row row) {
    struct lk_cuda_batch *batch = calloc(1, sizeof(*batch));
    ck_assert_ptr_nonnull(batch);
    int rc = lk_cuda_fill(&row, 1, batch);
    free(batch);
    return rc;
}

START_TEST(division_is_exact) {
    const uint32_t by[] = {1,   2,   3,    5,     7,       8,         13,
                           132, 212, 1023, 65536, 1 << 24, INT32_MAX, UINT32_MAX};
    const uint32_t x[] = {0, 1, 2, 1000003, 1 << 30, INT32_MAX, 1U << 31, UINT32_MAX};

    for (size_t i = 0; i < sizeof(by) / sizeof(*by); i++) {
        uint32_t inverse = lk_cuda_inverse(by[i]);
        for (size_t k = 0; k < sizeof(x) / sizeof(*x); k++) {
            uint32_t edge = x[k] / by[i] * by[i]; /* and its neighbours */
            ck_assert_uint_eq(lk_cuda_divide(x[k], by[i], inverse), x[k] / by[i]);
            ck_assert_uint_eq(lk_cuda_divide(edge, by[i], inverse), x[k] / by[i]);
            if (edge)
                ck_assert_uint_eq(lk_cuda_divide(edge - 1, by[i], inverse), (edge - 1) / by[i]);
        }
    }
    ck_assert_uint_eq(lk_cuda_inverse(0), 0);
}
END_TEST

/* A budget above what is selected from is no fault of a row that is attended whole. */
START_TEST(a_budget_counts_where_a_row_is_scored) {
    struct lk_row appends = row_of(512, 0, 0, false);
    uint32_t most = lk_engine_budget_pages(LK_DEVICE_CUDA);
    struct lk_row both = row_of(1 << 20, 1, most, false);
    appends.append = 512;
    ck_assert_int_eq(fill(appends), 0);
    ck_assert_int_eq(fill(row_of(100, 1, 1 << 26, true)), 0);
    ck_assert_int_eq(fill(row_of(1 << 20, 1, most, false)), 0);
    ck_assert_int_eq(fill(row_of(1 << 20, 1, most + 1, false)), -EINVAL);
    ck_assert_int_eq(fill(row_of(1 << 20, 1, 0, false)), -EINVAL);
    ck_assert_int_eq(fill(row_of(1 << 20, 2, most, false)), -EINVAL);
    both.append = 2;
    ck_assert_int_eq(fill(both), -EINVAL);
    ck_assert_int_eq(fill(row_of(1 << 20, 16, 1 << 26, true)), 0);
}
END_TEST

START_TEST(rows_are_no_longer_than_kernels_count) {
    uint64_t longest = UINT64_C(16) * lk_engine_row_pages(LK_DEVICE_CUDA);
    ck_assert_int_eq(fill(row_of(longest, 1, 128, false)), 0);
    ck_assert_int_eq(fill(row_of(longest + 1, 1, 128, false)), -EINVAL);
}
END_TEST

/* Partial results do not grow with queries times length: a row of the largest allowed fits. */
START_TEST(workspace_is_bounded) {
    for (uint32_t tokens = 1; tokens <= 65536; tokens *= 4)
        for (uint64_t length = tokens; length <= 1 << 20; length *= 8) {
            struct lk_row row = row_of(length, tokens, 128, true);
            uint64_t queries = (uint64_t)tokens * 8 * 4 * 128 * 2, bytes;
            bytes = lk_engine_row_workspace(LK_DEVICE_CUDA, &row);
            ck_assert_msg(bytes <= queries + (UINT64_C(32) << 20), "%u tokens at %lu: %lu bytes",
                          tokens, (unsigned long)length, (unsigned long)bytes);
        }
}
END_TEST

START_TEST(a_pool_that_cannot_lie_there_is_told_why) {
    struct lk_geometry g = pool.geometry;
    char why[256] = "";
    ck_assert_int_eq(lk_cuda_geometry_refused(&g, "GPU 1, X", 102400, 102400, why, 256), 0);
    ck_assert_int_eq(lk_cuda_geometry_refused(&g, "GPU 1, X", 102401, 102400, why, 256), -ENOTSUP);
    ck_assert_str_eq(why, "GPU 1, X, lends a block 100 KiB of shared memory, head_dim 128 with "
                          "page_tokens 16 and rank 8 needs 101");
    g.dtype = LK_FP32;
    ck_assert_int_eq(lk_cuda_geometry_refused(&g, "GPU 1, X", 0, 102400, why, 256), -ENOTSUP);
    ck_assert_msg(strstr(why, "fp32") != NULL, "%s", why);
}
END_TEST

/* What select and prune are told of a row, worked out here. */
START_TEST(a_cut_fits_the_budget) {
    struct lk_row row = row_of(1 << 20, 1, 128, false);
    struct lk_cuda_batch *batch = calloc(1, sizeof(*batch));
    ck_assert_ptr_nonnull(batch);
    const struct lk_cuda_cut *cut = batch->row[0].cut;
    row.sampled = 64;
    row.sink_pages = 1;
    ck_assert_int_eq(lk_cuda_fill(&row, 1, batch), 0);
    ck_assert_uint_eq(cut[0].units, 1 << 16);
    ck_assert_uint_eq(cut[0].k, 64);
    ck_assert_uint_eq(cut[0].sampled, 64);
    ck_assert_uint_eq(cut[0].sink, 1);
    ck_assert_uint_eq(cut[0].tail, 1);
    ck_assert_uint_eq(cut[1].step, 0);
    row.scan = LK_TREE;
    row.budget_pages = 2; /* the sample gives way, then the sink: the newest page stays */
    ck_assert_int_eq(lk_cuda_fill(&row, 1, batch), 0);
    ck_assert_uint_eq(cut[0].k, 2);
    ck_assert_uint_eq(cut[0].sampled, 0);
    ck_assert_uint_eq(cut[1].step, 4);
    ck_assert_uint_eq(cut[1].units, ((1 << 16) - 1) / 4);
    ck_assert_uint_eq(cut[1].k, 8);
    ck_assert_uint_eq(cut[1].after, 3);
    row.budget_pages = 1;
    ck_assert_int_eq(lk_cuda_fill(&row, 1, batch), 0);
    ck_assert_uint_eq(cut[0].k, 1);
    ck_assert_uint_eq(cut[0].sink, 0);
    ck_assert_uint_eq(cut[0].tail, 1);
    row.exact = true;
    ck_assert_int_eq(lk_cuda_fill(&row, 1, batch), 0);
    ck_assert_uint_eq(cut[0].step, 0);
    free(batch);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("cuda plan");
    TCase *tcase = tcase_create("rows");
    lk_cuda_layout(&pool.geometry, &pool.layout);
    tcase_add_test(tcase, division_is_exact);
    tcase_add_test(tcase, a_budget_counts_where_a_row_is_scored);
    tcase_add_test(tcase, rows_are_no_longer_than_kernels_count);
    tcase_add_test(tcase, workspace_is_bounded);
    tcase_add_test(tcase, a_cut_fits_the_budget);
    tcase_add_test(tcase, a_pool_that_cannot_lie_there_is_told_why);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
