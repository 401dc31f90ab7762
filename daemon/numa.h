/* SPDX-License-Identifier: MIT */
/*
 * numa.h - where threads and memory sit.
 *
 * With daemon.numa_node set, the calling thread is bound to the node's processors and its memory
 * policy to the node, before any other thread or memory exists: both are inherited. What the kernel
 * does not grant is put into words, for the log and for locksctl status; it never stops the daemon.
 */
#ifndef LK_NUMA_H
#define LK_NUMA_H

#include "config.h"

struct lk_placement {
    int32_t node;     /* -1: no binding was asked for */
    uint32_t threads; /* workers, the default resolved */
    bool pinned;      /* worker i belongs on cpus[i] */
    int cpus[LK_CPUS_MAX];
    bool threads_bound, memory_bound;
    char words[256]; /* "threads and memory bound to node 0", or what was refused and why */
};

/* Main thread, before the engine is opened. */
void lk_numa_place(const struct lk_config *config, struct lk_placement *ret);
/* Which share of `bytes` mapped, populated bytes lies on the node, by a sample: in percent; -1:
 * unknown. */
int lk_numa_share(const void *memory, uint64_t bytes, int32_t node);

#endif
