/* SPDX-License-Identifier: MIT */
/*
 * test_numa.c - where threads and memory are put, and what is said of it. What takes several nodes
 * is left out where there is one.
 */
#include <check.h>
#include <numa.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "../common/run.h"
#include "../../daemon/numa.h"

#define BYTES (UINT64_C(4) << 20)

static struct lk_placement place(int32_t node, uint32_t threads) {
    static struct lk_config config;
    struct lk_placement placement;
    config.numa_node = node;
    config.threads = threads;
    lk_numa_place(&config, &placement);
    return placement;
}

static void assert_says(const struct lk_placement *placement, const char *words) {
    ck_assert_msg(strstr(placement->words, words) != NULL, "'%s' lacks '%s'", placement->words,
                  words);
}

START_TEST(nothing_asked) {
    cpu_set_t before, after;
    sched_getaffinity(0, sizeof(before), &before);
    struct lk_placement placement = place(-1, 0);
    sched_getaffinity(0, sizeof(after), &after);
    ck_assert(CPU_EQUAL(&before, &after));
    ck_assert_uint_eq(placement.threads, (uint32_t)CPU_COUNT(&before));
    ck_assert(!placement.threads_bound && !placement.memory_bound && !placement.pinned);
    ck_assert_str_eq(placement.words, "no binding asked for");
}
END_TEST

START_TEST(a_node_that_is_not_there) {
    struct lk_placement placement = place(1023, 3);
    ck_assert_uint_eq(placement.threads, 3);
    ck_assert(!placement.threads_bound && !placement.memory_bound && !placement.pinned);
    assert_says(&placement, "nothing bound to node 1023: the ");
}
END_TEST

/* Memory that is populated afterwards lies there; more threads than processors are not pinned. */
START_TEST(each_node) {
    int node = _i;
    if (numa_available() < 0 || node > numa_max_node())
        return;
    struct lk_placement placement = place(node, 0);
    if (placement.threads_bound) {
        ck_assert(placement.pinned);
        ck_assert_int_ge(sched_getcpu(), 0);
        ck_assert_int_eq(numa_node_of_cpu(sched_getcpu()), node);
        for (uint32_t i = 0; i < placement.threads; i++)
            ck_assert_int_eq(numa_node_of_cpu(placement.cpus[i]), node);
        ck_assert(!place(node, placement.threads + 1).pinned);
    } else {
        assert_says(&placement, "threads could not be bound to node ");
    }
    if (!placement.memory_bound) {
        assert_says(&placement, "memory could not be bound to node ");
        return;
    }
    void *memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ck_assert_ptr_ne(memory, MAP_FAILED);
    memset(memory, 1, BYTES);
    int share = lk_numa_share(memory, BYTES, node);
    ck_assert_msg(share == -1 || share > 50, "%d %% on node %d", share, node);
    if (share >= 0)
        ck_assert_int_eq(lk_numa_share(memory, BYTES, 1023), 0);
    munmap(memory, BYTES);
}
END_TEST

/* Kept to the processors of the first node, the last one has none that may be used. */
START_TEST(processors_of_another_node) {
    int last = numa_available() < 0 ? 0 : numa_max_node();
    if (!last || !place(0, 0).threads_bound)
        return;
    struct lk_placement placement = place(last, 0);
    ck_assert(!placement.threads_bound && !placement.pinned);
    assert_says(&placement, "threads could not be bound to node ");
    assert_says(&placement, ": none of its processors may be used");
}
END_TEST

int main(void) {
    Suite *suite = suite_create("numa");
    TCase *tests = tcase_create("numa");
    tcase_add_test(tests, nothing_asked);
    tcase_add_test(tests, a_node_that_is_not_there);
    tcase_add_loop_test(tests, each_node, 0, 8);
    tcase_add_test(tests, processors_of_another_node);
    suite_add_tcase(suite, tests);
    return run_suite(suite);
}
