/* SPDX-License-Identifier: MIT */
/*
 * test_pool.c - which quad is given next, and sizes that follow from a configuration, on either
 * device: sizes need no GPU.
 */
#include <check.h>
#include <errno.h>
#include <string.h>

#include "../common/run.h"
#include "../../daemon/limits.h"
#include "../../daemon/pool.h"

#define PAGES (64 * 5 + 12) /* five extents and three quads */

static struct lk_ledger ledger;
static struct lk_pool pool;
static char why[512];

static void open_pool(void) {
    struct lk_ledger_shape shape = {.layers = 2,
                                    .page_tokens = 16,
                                    .pages = PAGES,
                                    .max_sequences = 1,
                                    .table_quads = 4,
                                    .max_leases = 1};
    ck_assert_int_eq(lk_ledger_open(&shape, 1, 1, &ledger, why, sizeof(why)), 0);
    pool = (struct lk_pool){.ledger = lk_ledger_view(&ledger, 0)};
    ck_assert_int_eq(lk_pool_open(&pool), 0);
}

static void close_pool(void) {
    ck_assert_msg(lk_pool_check(&pool, why, sizeof(why)) == 0, "%s", why);
    lk_pool_close(&pool);
    lk_ledger_close(&ledger);
}

START_TEST(a_table_streams_through_extents) {
    uint32_t last = LK_LEDGER_NONE;
    for (uint32_t i = 0; i < 40; i++) {
        uint32_t quad = lk_pool_take(&pool, last);
        ck_assert_uint_eq(quad, i); /* whole extents follow each other */
        last = quad;
    }
}
END_TEST

START_TEST(tables_do_not_mix_in_an_extent) {
    uint32_t a = lk_pool_take(&pool, LK_LEDGER_NONE), b = lk_pool_take(&pool, LK_LEDGER_NONE);
    ck_assert_uint_ne(a / LK_EXTENT_QUADS, b / LK_EXTENT_QUADS);
    for (uint32_t i = 1; i < LK_EXTENT_QUADS; i++) {
        uint32_t next_a = lk_pool_take(&pool, a), next_b = lk_pool_take(&pool, b);
        ck_assert_uint_eq(next_a, a + 1);
        ck_assert_uint_eq(next_b, b + 1);
        a = next_a;
        b = next_b;
    }
    /* The extent after a's is b's: a goes where nobody is. */
    ck_assert_uint_eq(lk_pool_take(&pool, a), 2 * LK_EXTENT_QUADS);
}
END_TEST

START_TEST(every_quad_is_given_once) {
    bool given[PAGES / 4] = {false};
    for (uint32_t i = 0; i < PAGES / 4; i++) {
        uint32_t quad = lk_pool_take(&pool, LK_LEDGER_NONE);
        ck_assert_uint_lt(quad, PAGES / 4);
        ck_assert(!given[quad]);
        given[quad] = true;
    }
    ck_assert_uint_eq(lk_pool_available(&pool), 0);
    ck_assert(lk_pool_drop(&pool, 33));
    ck_assert_uint_eq(lk_pool_take(&pool, 5), 33);
}
END_TEST

START_TEST(references_keep_a_quad) {
    uint32_t quad = lk_pool_take(&pool, LK_LEDGER_NONE);
    uint32_t generation = pool.ledger.quads[quad].generation;
    lk_pool_hold(&pool, quad);
    ck_assert(!lk_pool_drop(&pool, quad));
    ck_assert_uint_eq(pool.ledger.quads[quad].generation, generation);
    ck_assert(lk_pool_drop(&pool, quad));
    ck_assert_uint_eq(pool.ledger.quads[quad].generation, generation + 1);
}
END_TEST

START_TEST(free_bits_come_from_references) {
    for (uint32_t i = 0; i < 20; i++)
        lk_pool_take(&pool, LK_LEDGER_NONE);
    uint64_t free = pool.free;
    lk_pool_close(&pool);
    pool.free = 0;
    ck_assert_int_eq(lk_pool_open(&pool), 0); /* as after a restart */
    ck_assert_uint_eq(pool.free, free);
}
END_TEST

START_TEST(check_sees_what_is_wrong) {
    uint32_t quad = lk_pool_take(&pool, LK_LEDGER_NONE);
    pool.ledger.quads[quad].references = 0;
    ck_assert_int_eq(lk_pool_check(&pool, why, sizeof(why)), -EINVAL);
    pool.ledger.quads[quad].references = 1;
    pool.promised = pool.free + 1;
    ck_assert_int_eq(lk_pool_check(&pool, why, sizeof(why)), -EINVAL);
    pool.promised = 0;
}
END_TEST

START_TEST(sizes_follow_from_the_configuration) { /* of device _i */
    enum lk_device device = (enum lk_device)_i;
    struct lk_config config;
    lk_config_defaults(&config);
    config.pools = 1;
    struct lk_pool_config *p = &config.pool[0];
    p->geometry = (struct lk_geometry){.layers = 2,
                                       .kv_heads = 2,
                                       .group = 4,
                                       .head_dim = 64,
                                       .page_tokens = 16,
                                       .rank = 8,
                                       .dtype = LK_BF16};
    p->memory_bytes = 10 << 20;
    uint64_t pages = lk_pool_fitting_pages(device, p);
    ck_assert_uint_eq(pages % 64, 0);
    ck_assert_uint_le(lk_engine_pool_bytes(device, &p->geometry, pages), p->memory_bytes);
    ck_assert_uint_gt(lk_engine_pool_bytes(device, &p->geometry, pages + 64), p->memory_bytes);
    p->memory_bytes = lk_engine_pool_bytes(device, &p->geometry, 12);
    ck_assert_uint_eq(lk_pool_fitting_pages(device, p), 12);
    p->memory_bytes = lk_engine_pool_bytes(device, &p->geometry, 4) - 1;
    ck_assert_uint_eq(lk_pool_fitting_pages(device, p), 0);
    ck_assert_uint_eq(lk_pool_max_tokens(p, 12), 192);
    p->max_tokens = 100;
    ck_assert_uint_eq(lk_pool_max_tokens(p, 12), 100);
    config.workspace_bytes = 12345;
    ck_assert_uint_eq(lk_workspace_bytes(&config), 12345);
}
END_TEST

/* 2^30 pages of this geometry take 2^64 bytes, and what is left of that is less than the memory. */
START_TEST(sizes_do_not_overflow) {
    struct lk_pool_config p = {.memory_bytes = UINT64_C(64) << 40,
                               .geometry = {.layers = 1014,
                                            .kv_heads = 255,
                                            .group = 1,
                                            .head_dim = 256,
                                            .page_tokens = 64,
                                            .rank = 2,
                                            .dtype = LK_BF16}};
    uint64_t page_bytes = UINT64_C(1014) * 255 * 256 * 64 * 4;
    ck_assert_uint_le(lk_pool_fitting_pages(LK_DEVICE_CPU, &p), p.memory_bytes / page_bytes);
    ck_assert_uint_ge(lk_pool_fitting_pages(LK_DEVICE_CPU, &p), p.memory_bytes / page_bytes / 2);
}
END_TEST

/* Twice the largest row, to a sixteenth: any row of any budget, sample and scan may run. */
START_TEST(workspace_holds_any_row) { /* on device _i */
    enum lk_device device = (enum lk_device)_i;
    struct lk_config config;
    lk_config_defaults(&config);
    config.resolved = device;
    config.pools = 1;
    config.pool[0].geometry = (struct lk_geometry){.layers = 1,
                                                   .kv_heads = 8,
                                                   .group = 4,
                                                   .head_dim = 128,
                                                   .page_tokens = 16,
                                                   .rank = 8,
                                                   .dtype = LK_BF16};
    config.pool[0].memory_bytes = UINT64_C(1) << 30;
    uint64_t workspace = lk_workspace_bytes(&config);
    struct lk_pool_view view = {.geometry = config.pool[0].geometry};
    view.pages = lk_pool_fitting_pages(device, &config.pool[0]);
    uint64_t state = 9, most_pages = lk_engine_budget_pages(device);
    most_pages = most_pages < view.pages ? most_pages : view.pages;

    for (uint32_t i = 0; i < 20000; i++) {
        state = state * UINT64_C(6364136223846793005) + 1;
        struct lk_row row = {.pool = &view, .table_shift = 2, .recent_pages = 1};
        row.length = 1 + (state >> 20) % (view.pages * 16);
        row.budget_pages = 1 + (uint32_t)((state >> 8) % most_pages) / (1 + i % 50);
        row.budget_tokens = row.budget_pages * UINT64_C(16);
        row.sampled = (uint32_t)(state >> 40) % (row.budget_pages + 1);
        row.scan = LK_FULL + i % 4;
        row.exact = i % 3 == 0;
        row.tokens = row.exact ? 1 + (uint32_t)(state >> 30) % config.max_row_tokens : 1;
        if (row.tokens > row.length)
            row.tokens = (uint32_t)row.length;
        row.append = i % 2 * row.tokens;
        ck_assert_msg(lk_engine_row_workspace(device, &row) <= workspace / 2 + workspace / 32,
                      "length %lu budget %u sampled %u scan %u tokens %u: %lu of %lu",
                      (unsigned long)row.length, row.budget_pages, row.sampled, row.scan,
                      row.tokens, (unsigned long)lk_engine_row_workspace(device, &row),
                      (unsigned long)workspace);
    }
}
END_TEST

int main(void) {
    Suite *suite = suite_create("pool");
    TCase *tcase = tcase_create("all");
    tcase_add_checked_fixture(tcase, open_pool, close_pool);
    tcase_add_test(tcase, a_table_streams_through_extents);
    tcase_add_test(tcase, tables_do_not_mix_in_an_extent);
    tcase_add_test(tcase, every_quad_is_given_once);
    tcase_add_test(tcase, references_keep_a_quad);
    tcase_add_test(tcase, free_bits_come_from_references);
    tcase_add_test(tcase, check_sees_what_is_wrong);
    tcase_add_loop_test(tcase, sizes_follow_from_the_configuration, LK_DEVICE_CPU,
                        LK_DEVICE_CUDA + 1);
    tcase_add_test(tcase, sizes_do_not_overflow);
    tcase_add_loop_test(tcase, workspace_holds_any_row, LK_DEVICE_CPU, LK_DEVICE_CUDA + 1);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
