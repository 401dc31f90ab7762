/* SPDX-License-Identifier: MIT */
/*
 * test_memory.c - what control groups leave, on a tree of files as the kernel shows it.
 */
#include <check.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "../../daemon/memory.h"
#include "../common/run.h"

#define MIB (UINT64_C(1) << 20)

static char root[32];

__attribute__((format(printf, 2, 3))) static void put(const char *name, const char *format, ...) {
    char path[256];
    va_list list;
    snprintf(path, sizeof(path), "%s/%s", root, name);
    FILE *file = fopen(path, "w");
    ck_assert_ptr_nonnull(file);
    va_start(list, format);
    vfprintf(file, format, list);
    va_end(list);
    ck_assert_int_eq(fclose(file), 0);
}

static void make(const char *name) {
    char path[256];
    snprintf(path, sizeof(path), "%s/%s", root, name);
    ck_assert_int_eq(mkdir(path, 0700), 0);
}

static uint64_t left(const char *list) {
    char path[256];
    put("list", "%s", list);
    snprintf(path, sizeof(path), "%s/list", root);
    return lk_memory_groups_left(path, root);
}

static void open_tree(void) {
    snprintf(root, sizeof(root), "/tmp/locksd-memory.XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(root));
    make("a");
    make("a/b");
    make("memory");
    make("memory/c");
}

static void close_tree(void) {
    char command[64];
    snprintf(command, sizeof(command), "rm -r %s", root);
    ck_assert_int_eq(system(command), 0);
}

START_TEST(no_limit_is_none) {
    ck_assert_uint_eq(left(""), UINT64_MAX);
    ck_assert_uint_eq(left("0::/\n"), UINT64_MAX);
    ck_assert_uint_eq(left("0::/none/there\n"), UINT64_MAX);
    put("a/memory.max", "max\n");
    put("a/memory.current", "%" PRIu64 "\n", 7 * MIB);
    ck_assert_uint_eq(left("0::/a\n"), UINT64_MAX);
    ck_assert_uint_eq(lk_memory_groups_left("/none", root), UINT64_MAX);
}
END_TEST

/* What is used already cannot be had again: clients' memory is charged to the daemon's group. */
START_TEST(what_is_used_is_not_left) {
    put("a/b/memory.max", "%" PRIu64 "\n", 100 * MIB);
    ck_assert_uint_eq(left("0::/a/b\n"), 100 * MIB);
    put("a/b/memory.current", "%" PRIu64 "\n", 70 * MIB);
    ck_assert_uint_eq(left("0::/a/b\n"), 30 * MIB);
    put("a/b/memory.stat", "anon 1\nfile %" PRIu64 "\ninactive_file %" PRIu64 "\nactive_file 5\n",
        60 * MIB, 20 * MIB - 5); /* shared memory counts as file, and does not go away */
    ck_assert_uint_eq(left("0::/a/b\n"), 50 * MIB);
    put("a/b/memory.current", "%" PRIu64 "\n", 130 * MIB); /* the limit was lowered */
    ck_assert_uint_eq(left("0::/a/b\n"), 0);
}
END_TEST

START_TEST(the_tightest_group_counts) {
    put("a/b/memory.max", "%" PRIu64 "\n", 100 * MIB);
    put("a/b/memory.current", "%" PRIu64 "\n", 10 * MIB);
    put("a/memory.max", "%" PRIu64 "\n", 200 * MIB);
    put("a/memory.current", "%" PRIu64 "\n", 160 * MIB); /* by a neighbour */
    ck_assert_uint_eq(left("0::/a/b\n"), 40 * MIB);
    put("memory.max", "%" PRIu64 "\n", 30 * MIB); /* of a container */
    ck_assert_uint_eq(left("0::/a/b\n"), 30 * MIB);
    ck_assert_uint_eq(left("0::/\n"), 30 * MIB);
}
END_TEST

START_TEST(the_first_version_counts) {
    const char *list = "5:cpu,cpuacct:/c\n4:memory:/c\n1:name=systemd:/c\n0::/c\n";
    put("memory/memory.limit_in_bytes", "9223372036854771712\n");
    put("memory/memory.usage_in_bytes", "%" PRIu64 "\n", 900 * MIB);
    put("memory/c/memory.limit_in_bytes", "%" PRIu64 "\n", 100 * MIB);
    put("memory/c/memory.usage_in_bytes", "%" PRIu64 "\n", 90 * MIB);
    put("memory/c/memory.stat", "inactive_file 1\ntotal_inactive_file %" PRIu64 "\n", 50 * MIB);
    ck_assert_uint_eq(left(list), 60 * MIB);
}
END_TEST

/* Not only pools and workspaces: sequences of many layers take more than a small pool. */
START_TEST(accounts_are_wanted_too) {
    struct lk_config config = {.pools = 1, .resolved = LK_DEVICE_CPU};
    struct lk_pool_config *pool = &config.pool[0];
    pool->geometry = (struct lk_geometry){128, 1, 1, 64, 16, 8, LK_BF16};
    pool->memory_bytes = 20 * MIB;
    pool->max_sequences = 1;
    uint64_t few = lk_memory_wanted(&config);
    ck_assert_uint_gt(few, 20 * MIB);
    pool->max_sequences = 65536;
    ck_assert_uint_ge(lk_memory_wanted(&config), few + 65535 * (128 * 40 + 100));
}
END_TEST

int main(void) {
    Suite *suite = suite_create("memory");
    TCase *all = tcase_create("all");
    tcase_add_checked_fixture(all, open_tree, close_tree);
    tcase_add_test(all, no_limit_is_none);
    tcase_add_test(all, what_is_used_is_not_left);
    tcase_add_test(all, the_tightest_group_counts);
    tcase_add_test(all, the_first_version_counts);
    tcase_add_test(all, accounts_are_wanted_too);
    suite_add_tcase(suite, all);
    return run_suite(suite);
}
