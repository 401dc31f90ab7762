/* SPDX-License-Identifier: MIT */
/*
 * test_served.c - what the tools believe to be served is what the daemon takes.
 */
#include <check.h>
#include <stdbool.h>

#include "../common/run.h"
#include "../../clients/common/served.h"
#include "../../kernels/kernels.h"

START_TEST(as_the_daemon) {
    struct lk_geometry g = {1, 1, 1, 64, 64, 2, LK_BF16};
    uint32_t *const value[LK_SERVED_PARTS] = {
        [LK_SERVED_KV_HEADS] = &g.kv_heads, [LK_SERVED_GROUP] = &g.group,
        [LK_SERVED_HEAD_DIM] = &g.head_dim, [LK_SERVED_PAGE_TOKENS] = &g.page_tokens,
        [LK_SERVED_RANK] = &g.rank,
    };
    char text[256];
    uint32_t good = *value[_i];
    for (uint32_t i = 0; i <= 1100; i++) {
        *value[_i] = i;
        bool taken = !lk_geometry_invalid(&g, text, sizeof(text));
        bool believed = !lk_not_served((enum lk_served_part)_i, i);
        ck_assert_msg(taken == believed, "part %d, value %u: %s", _i, i, text);
    }
    *value[_i] = good;
    ck_assert_ptr_nonnull(lk_not_served((enum lk_served_part)_i, (UINT64_C(1) << 32) + good));
}
END_TEST

int main(void) {
    Suite *suite = suite_create("served");
    TCase *tests = tcase_create("geometries");
    tcase_add_loop_test(tests, as_the_daemon, 0, LK_SERVED_PARTS);
    suite_add_tcase(suite, tests);
    return run_suite(suite);
}
