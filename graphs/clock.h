/* SPDX-License-Identifier: MIT */
/*
 * clock.h - the time that engines and workers go by: CLOCK_MONOTONIC in nanoseconds. Any thread.
 */
#ifndef LK_GRAPHS_CLOCK_H
#define LK_GRAPHS_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline uint64_t lk_engine_now_ns(void) {
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

#endif
