/* SPDX-License-Identifier: MIT */
/*
 * threads.h - a grid's threads as fibers of one host thread: where they meet, and what they share.
 *
 * Idea: the blocks of a team (a cluster; else one block, or $LK_EMULATED_TOGETHER) run together,
 * teams one after the other. A fiber runs until it must wait; whom it lets run next is the order of
 * arrival, or drawn from $LK_EMULATED_SEED, which shows what only one order hides. Where nobody can
 * run, the program ends and says so.
 *
 * What a device copies in the background is done as late as may be: the target is poisoned when the
 * copy starts and filled when somebody waits for it, so that whoever reads without waiting reads
 * nonsense.
 *
 * $LK_EMULATED_ARCH is 900 (default) or 800: what the device can do; $LK_EMULATED_PROCESSORS how
 * many multiprocessors it has (132): few give each block much to do; $LK_EMULATED_SHARED how much
 * shared memory a block may have, in KiB (as the first devices of the architecture: 227 or 163). A
 * kernel gets more than 48 KiB only once it was allowed to. $LK_EMULATED_TOGETHER blocks (1) run
 * together where there are no clusters. One host thread; x86-64.
 */
#ifndef LK_EMULATOR_THREADS_H
#define LK_EMULATOR_THREADS_H

#include <cstdint>
#include <functional>
#include <vector>

struct uint3 { /* as CUDA's */
    uint32_t x, y, z;
};

extern struct uint3 gridDim, blockDim;

namespace emulated {

struct packet { /* what a lane brings to a meeting of its warp */
    uint32_t w[6];
};

struct fiber;
using fibers = std::vector<fiber *>;

struct meeting {
    uint32_t arrived;
    fibers waiting;
};

struct warp {
    struct meeting meeting;
    struct packet in[32], out[32]; /* brought; and of the last complete meeting */
};

struct late_copy {
    uint8_t *to;
    const uint8_t *from; /* NULL: `value` */
    uint32_t bytes, group;
    uint64_t *barrier; /* told of the bytes; NULL: nobody */
    uint8_t value[16];
    bool adds; /* a word */
};

struct block {
    struct uint3 index;
    uint32_t rank, live;
    std::vector<uint8_t> memory;
    uint8_t *shared; /* aligned, within memory */
    std::vector<struct warp> warps;
    struct meeting all, some;
};

struct fiber {
    void *stack_at; /* while it does not run */
    struct uint3 index;
    struct block *block;
    struct warp *warp;
    uint32_t group;     /* of its own copies that it is collecting */
    uint64_t team_turn; /* of the team's meeting it arrived at last */
    std::vector<struct late_copy> copies;
};

extern struct fiber *running;

struct grid {
    struct uint3 blocks, threads;
    uint32_t team; /* blocks along x that run together */
    uint32_t shared_bytes;
};
/* Runs `body` in every thread. */
void run_grid(const struct grid *grid, const std::function<void()> &body);

int arch(void);

/* Bytes of shared memory: that a block may have; and of which kernel, -> it cannot. */
uint32_t shared_most(void);
bool allow_shared(const void *kernel, uint32_t bytes);
bool may_share(const void *kernel, uint32_t bytes);

/* Lets others run; to be called where a device's thread would look again and again. */
void let_others_run(void);
/* All lanes of the warp. -> the 32 packets */
const struct packet *meet_warp(const struct packet &mine);
void meet_block(void);
void meet_some(uint32_t threads);
/* The team's meeting in two halves. */
void arrive_team(void);
void wait_team(void);
uint8_t *shared_of(uint32_t rank); /* of a block of the team */

/* Copies of a thread's own, in groups. */
void copy_late(void *to, const void *from, uint32_t bytes);
void close_group(void);
void wait_groups(uint32_t most); /* until at most so many groups are under way */

/* Copies that a barrier counts. from NULL: value [16]. */
void send_late(uint8_t *to, const uint8_t *from, const void *value, uint32_t bytes,
               uint64_t *barrier);
void add_late(uint8_t *to, uint32_t x, uint64_t *barrier);

/* Barriers in shared memory, eight bytes each. */
void barrier_init(uint64_t *at, uint32_t arrivals);
void barrier_arrive(uint64_t *at);
void barrier_expect(uint64_t *at, uint32_t bytes);
bool barrier_passed(uint64_t *at, uint32_t parity); /* if not, others were let run */

} // namespace emulated

#endif
