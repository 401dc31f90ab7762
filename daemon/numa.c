/* SPDX-License-Identifier: MIT */
/*
 * numa.c - see numa.h.
 *
 * Memory is preferred on the node, not strictly bound: a node that runs full then costs speed,
 * which lk_numa_share() shows, and not the daemon's life.
 */
#include "numa.h"

#include <errno.h>
#include <numa.h>
#include <numaif.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define SAMPLES 1024

/* Processors this process may use, at most LK_CPUS_MAX, those of the node only if node >= 0. ->
 * count */
static uint32_t usable_cpus(int32_t node, cpu_set_t *ret_set, int *ret_cpus) {
    struct bitmask *of_node = NULL;
    cpu_set_t allowed;
    uint32_t count = 0;
    CPU_ZERO(ret_set);
    if (sched_getaffinity(0, sizeof(allowed), &allowed))
        return 0;
    if (node >= 0) {
        of_node = numa_allocate_cpumask();
        if (!of_node || numa_node_to_cpus(node, of_node))
            goto out;
    }
    for (int cpu = 0; cpu < CPU_SETSIZE && count < LK_CPUS_MAX; cpu++) {
        if (!CPU_ISSET(cpu, &allowed) ||
            (of_node && !numa_bitmask_isbitset(of_node, (unsigned)cpu)))
            continue;
        CPU_SET(cpu, ret_set);
        ret_cpus[count++] = cpu;
    }
out:
    if (of_node)
        numa_free_cpumask(of_node);
    return count;
}

static int prefer_memory(int32_t node) {
    unsigned long mask[1024 / (8 * sizeof(unsigned long))] = {0};
    unsigned bits = 8 * sizeof(unsigned long);
    mask[(unsigned)node / bits] = 1UL << ((unsigned)node % bits);
    return set_mempolicy(MPOL_PREFERRED, mask, 1024) ? -errno : 0;
}

/* why: NULL where it is bound */
static void add_words(struct lk_placement *placement, const char *what, int32_t node,
                      const char *why) {
    size_t length = strlen(placement->words);
    char *end = placement->words + length;
    size_t room = sizeof(placement->words) - length;
    if (why)
        snprintf(end, room, "%s%s could not be bound to node %d: %s", length ? "; " : "", what,
                 node, why);
    else
        snprintf(end, room, "%s%s bound to node %d", length ? "; " : "", what, node);
}

/* What the kernel calls an invalid argument is a node that is not among those with memory, or not
 * among those of the process's cpuset. */
static void bind_node(struct lk_placement *placement, int32_t node) {
    cpu_set_t set;
    int cpus[LK_CPUS_MAX];
    const char *why = NULL;
    if (usable_cpus(node, &set, cpus) == 0)
        why = "none of its processors may be used";
    else if (sched_setaffinity(0, sizeof(set), &set))
        why = strerror(errno);
    placement->threads_bound = !why;
    add_words(placement, "threads", node, why);
    int rc = prefer_memory(node);
    placement->memory_bound = !rc;
    add_words(placement, "memory", node,
              rc == -EINVAL ? "it has none, or none that may be used"
              : rc          ? strerror(-rc)
                            : NULL);
}

void lk_numa_place(const struct lk_config *config, struct lk_placement *ret) {
    cpu_set_t set;
    *ret = (struct lk_placement){.node = config->numa_node, .words = ""};
    if (ret->node < 0)
        snprintf(ret->words, sizeof(ret->words), "no binding asked for");
    else if (numa_available() < 0)
        snprintf(ret->words, sizeof(ret->words),
                 "nothing bound to node %d: the kernel offers no NUMA", ret->node);
    else if (ret->node > numa_max_node())
        snprintf(ret->words, sizeof(ret->words),
                 "nothing bound to node %d: the highest node here is %d", ret->node,
                 numa_max_node());
    else
        bind_node(ret, ret->node);
    uint32_t count = usable_cpus(-1, &set, ret->cpus);
    ret->threads = config->threads ? config->threads : count ? count : 1;
    ret->pinned = ret->threads_bound && ret->threads <= count;
}

int lk_numa_share(const void *memory, uint64_t bytes, int32_t node) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), pages = bytes / page;
    uint64_t count = pages < SAMPLES ? pages : SAMPLES, here = 0;
    void *addresses[SAMPLES];
    int nodes[SAMPLES];
    for (uint64_t i = 0; i < count; i++) {
        addresses[i] = (char *)memory + i * (pages / count) * page;
        (void)*(
            volatile const char *)addresses[i]; /* enters the page into our table, which is asked */
    }
    if (!count || move_pages(0, count, addresses, NULL, nodes, 0))
        return -1;
    for (uint64_t i = 0; i < count; i++)
        here += nodes[i] == node;
    return (int)(here * 100 / count);
}
