/* SPDX-License-Identifier: MIT */
/*
 * pingpong.h - what the protocol costs: an empty step through the daemon beside the least that two
 * processes can do.
 *
 * Idea: an empty step (DECODE of no rows) moves a tail, a 64-byte entry, a 64-byte descriptor and a
 * 64-byte completion, and comes back. The *bare* exchange moves just these lines between this
 * process and a forked one, with no ring, no checks and no daemon. Both spin. Rounds of the two
 * alternate in one run, so that whatever else the machine does meets both alike; the ratio of their
 * medians is the figure to look at.
 *
 * Invariants: while one exchange is measured the other's partner sleeps. This thread is pinned to
 * one processor and the forked process to another for the time of the call; the affinity is put
 * back.
 * What it does not do: no output. With fewer than two processors there is nothing to measure
 * (-ENOTSUP).
 */
#ifndef LK_PINGPONG_H
#define LK_PINGPONG_H

#include <stddef.h>
#include <stdint.h>

#include "../locks.h"

struct lk_pingpong_side {
    uint64_t p50_ns, p99_ns, min_ns;
};

struct lk_pingpong_result {
    struct lk_pingpong_side bare, step;
    double ratio; /* step.p50 / bare.p50 */
};

/* rounds (1..1000) of exchanges (1..100000) each, after one round to warm up. locks: a connection
 * with nothing in flight and a long spin_us. -> 0 or -errno with a sentence in why. */
int lk_pingpong_measure(struct locks *locks, uint32_t pool, uint32_t rounds, uint32_t exchanges,
                        struct lk_pingpong_result *ret, char *why, size_t why_bytes);

#endif
