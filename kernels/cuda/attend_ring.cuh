/* SPDX-License-Identifier: MIT */
/*
 * attend_ring.cuh - the tiles of a block's jobs, in shared memory before they are read.
 *
 * Idea: some warps walk over the jobs of the block's tasks and over all their tiles in order, each
 * of FETCHERS taking its own, and start the copies of each as soon as a slot of the ring is free;
 * so the memory is busy while the others merge a slice or turn to another job. Tile n lies in slot
 * n % slots. One warp starts a tile each 0.4 us, a multiprocessor's share of the memory's rate is
 * one in 0.24 us.
 *
 * A slot: one box or two (boxes.cuh), keys and values of two octets. A box holds a page's keys and
 * values where a page has 8 or 16 tokens, else 16 tokens of either; so octet y of the keys lies at
 * y * octet_step(), the values at + values_step(), a further 64 channels at + column_step().
 *
 * Invariants: who reads a slot waits until it is full, each time, and says when it is done with it,
 * all readers together WARPS times. A slot is filled by one warp and, of a slice, read by the same
 * ones each time: so nobody is a whole round ahead of a slot, where parities would mean something
 * else. A job stays until all warps are done with it.
 */
#ifndef LK_CUDA_ATTEND_RING_CUH
#define LK_CUDA_ATTEND_RING_CUH

#include "attend.cuh"
#include "boxes.cuh"

#define FETCHERS 4  /* warps that fetch */
#define SLOTS    16 /* at most; a multiple of WARPS and FETCHERS */
#define JOBS     2  /* at a time: one is read, the next one fetched */
#define BATCH    16 /* tiles looked up at once */

struct ring_args {
    struct attend_args attend;
    struct boxes boxes; /* of the pool's keys and values */
    uint32_t slots;
};

struct note { /* an octet in its slot */
    int position;
    float bias;
    uint32_t kept, there; /* tokens there are */
};

struct ring {
    uint64_t full[SLOTS], empty[SLOTS], job_full[JOBS], job_empty[JOBS];
    struct note notes[SLOTS][2];
    struct job job[JOBS];
    struct held_row row;
};

/* Where a walk over the tiles is. */
struct place {
    uint32_t slot, parity;
};

__device__ __forceinline__ struct place next_place(struct place p, uint32_t by, uint32_t slots) {
    for (p.slot += by; p.slot >= slots; p.slot -= slots)
        p.parity ^= 1;
    return p;
}

/* Tiles before slice `slice`. */
__device__ __forceinline__ uint32_t slice_end(const struct job &j, uint32_t slice) {
    return min(j.tiles, slice * j.slice_tiles);
}

__device__ __forceinline__ uint32_t bar_address(const uint64_t *bar) {
    return (uint32_t)__cvta_generic_to_shared(bar);
}

/* A warp arrives by as many lanes as it has to, after it met. compute-sanitizer's racecheck holds
 * that against the other lanes; for it (make racecheck) every lane arrives for itself. */
#ifdef LK_RACECHECK
#define ARRIVALS 32
#else
#define ARRIVALS 1
#endif

/* By the warp, `times` of at most 32. */
__device__ __forceinline__ void bar_arrive_times(uint32_t bar, uint32_t times) {
    for (uint32_t i = 0; ARRIVALS > 1 && i < times; i++)
        bar_arrive(bar);
    if (ARRIVALS == 1 && threadIdx.x % 32 < times)
        bar_arrive(bar);
}

/* By one thread, before the block meets. */
__device__ __forceinline__ void init_ring(struct ring *r, uint32_t slots) {
#pragma unroll 1
    for (uint32_t i = 0; i < slots; i++) {
        bar_init(bar_address(&r->full[i]), 1);
        bar_init(bar_address(&r->empty[i]), ARRIVALS * WARPS);
    }
#pragma unroll
    for (uint32_t i = 0; i < JOBS; i++) {
        bar_init(bar_address(&r->job_full[i]), ARRIVALS);
        bar_init(bar_address(&r->job_empty[i]), ARRIVALS * (WARPS + FETCHERS));
    }
    bar_inits_done();
}

/* ---- reading ---- */

/* Rows of a box: 32 of a page of 16 tokens, else 16, and a slot has two boxes. */
static __host__ __device__ __forceinline__ uint32_t box_rows(uint32_t token_shift) {
    return token_shift == 4 ? 32 : 16;
}
template <int D> __device__ __forceinline__ uint32_t octet_step(const struct job &j) {
    return j.token_shift == 3 ? 32 * D : 8 * BOX_ROW;
}
template <int D> __device__ __forceinline__ uint32_t values_step(const struct job &j) {
    return j.token_shift == 3 ? 8 * BOX_ROW : j.token_shift == 4 ? 16 * BOX_ROW : 32 * D;
}
__device__ __forceinline__ uint32_t column_step(const struct job &j) {
    return box_rows(j.token_shift) * BOX_ROW;
}

__device__ __forceinline__ void wait_full(const struct ring *r, const struct place &p) {
    bar_wait(bar_address(&r->full[p.slot]), p.parity);
}

/* By a warp that has read a slot; all its readers together say it WARPS times. */
__device__ __forceinline__ void leave_slot(const struct ring *r, const struct place &p,
                                           uint32_t times) {
    __syncwarp();
    bar_arrive_times(bar_address(&r->empty[p.slot]), times);
}

/* ---- fetching ---- */

/* Find job `turn`, by a warp, always the same. */
static __device__ __forceinline__ void prepare_job(const struct attend_args &a,
                                                   const struct row_starts &starts, struct ring *r,
                                                   uint32_t turn, uint32_t task) {
    const struct job j = find_job(a, starts, &r->row, turn > 0, task);

    if (threadIdx.x % 32 == 0)
        r->job[turn % JOBS] = j;
    __syncwarp();
}

/* A tile's boxes: at rows of two blocks. */
struct tile_boxes {
    bool wanted[2];
    uint32_t block[2], row[2];
};

/* Octets y of a tile, which are in blocks block[y] if they are there, from token `in` on. */
__device__ __forceinline__ struct tile_boxes find_boxes(const struct job &j, const struct note n[2],
                                                        const uint32_t block[2], uint32_t in) {
    const bool each = j.token_shift == 3, first = n[0].there, second = n[1].there;

    return {{first, each ? second : first && j.token_shift > 4},
            {block[0], each ? block[1] : block[0]},
            {in, each ? 0 : in + (1u << j.token_shift)}};
}

/* A tile to `slot`, the address of number `place`: by one thread, which knows both octets. */
template <int D>
__device__ __forceinline__ void fill_slot(const struct ring_args &a, struct ring *r,
                                          const struct note n[2], const struct tile_boxes &t,
                                          bool once, uint32_t place, uint32_t slot) {
    const uint32_t bar = bar_address(&r->full[place]);
    const uint64_t priority = once ? LK_EVICT_FIRST : LK_EVICT_USUAL;

    r->notes[place][0] = n[0];
    r->notes[place][1] = n[1];
    expect_boxes(bar, (t.wanted[0] + t.wanted[1]) * a.boxes.box_rows * (2 * D));
    if (t.wanted[0])
        start_box(a.boxes, slot, t.row[0], t.block[0], bar, priority);
    if (t.wanted[1])
        start_box(a.boxes, slot + 32 * D, t.row[1], t.block[1], bar, priority);
    boxes_started(bar);
}

/* Of a job's tiles from `tile` to `end` those that are this warp's. `at`: the place of the first of
 * all, then the one after the last. `wait`: for the kernel before, first of all. */
template <int D>
__device__ __forceinline__ void fetch_tiles(const struct ring_args &a, struct ring *r,
                                            uint32_t slots, const struct job j, bool wait,
                                            uint32_t tile, uint32_t end, struct place *at) {
    const uint32_t lane = threadIdx.x % 32, half = lane % 2, mine = lane / 2;
    const uint32_t skipped = (warp_index() - at->slot) % FETCHERS;
    struct place p = next_place(*at, skipped, a.slots);

    *at = next_place(*at, end - tile, a.slots);
    tile += skipped;
    if (wait)
        wait_for_previous();
    struct octet next = look_up(j, tile + FETCHERS * mine, end, half);
#pragma unroll 1
    for (; tile < end; tile += FETCHERS * BATCH) {
        const struct octet h = next;
        const int position = octet_position(j, h);
        const uint32_t own = position == NEVER ? 0 : min(8u, j.length - position);
        const uint32_t at_own = own ? (uint32_t)octet_block(a.attend, j, h) : 0;
        const struct note n[2] = {
            {position, h.bias, h.kept, own},
            {__shfl_xor_sync(LK_FULL_WARP, position, 1), __shfl_xor_sync(LK_FULL_WARP, h.bias, 1),
             __shfl_xor_sync(LK_FULL_WARP, h.kept, 1), __shfl_xor_sync(LK_FULL_WARP, own, 1)}};
        const uint32_t block[2] = {at_own, __shfl_xor_sync(LK_FULL_WARP, at_own, 1)};
        const struct tile_boxes boxes = find_boxes(j, n, block, h.in);

        next = look_up(j, tile + FETCHERS * (BATCH + mine), end, half);
#pragma unroll 1
        for (uint32_t i = 0; i < BATCH && tile + FETCHERS * i < end; i++) {
            bar_wait(bar_address(&r->empty[p.slot]), p.parity ^ 1);
            __syncwarp(); /* or a late lane would look when the slot is full and empty again */
            if (lane == 2 * i)
                fill_slot<D>(a, r, n, boxes, j.once, p.slot, slots + p.slot * (64 * D));
            p = next_place(p, FETCHERS, a.slots);
        }
    }
}

/* By the warps that fetch, WARPS and on: all tiles of tasks `task` to `last`; the first job is
 * there, and nothing before it was waited for. `slots`: the ring's address. */
template <int D>
__device__ __forceinline__ void fetch_run(const struct ring_args &a,
                                          const struct row_starts &starts, struct ring *r,
                                          uint32_t slots, uint32_t task, uint32_t last) {
    struct place at = {0, 0};

#pragma unroll 1
    for (uint32_t turn = 0; task < last; turn++) {
        const uint32_t own = turn % JOBS;
        const struct job &j = r->job[own];

        if (warp_index() == WARPS) {
            bar_wait(bar_address(&r->job_empty[own]), turn / JOBS % 2 ^ 1);
            if (turn > 0)
                prepare_job(a.attend, starts, r, turn, task);
            bar_arrive_times(bar_address(&r->job_full[own]), 1);
        }
        bar_wait(bar_address(&r->job_full[own]), turn / JOBS % 2);
        const uint32_t begin = task - j.first, end = min(last - j.first, j.slices);
        fetch_tiles<D>(a, r, slots, j, turn == 0, slice_end(j, begin), slice_end(j, end), &at);
        task += end - begin;
        __syncwarp();
        bar_arrive_times(bar_address(&r->job_empty[own]), 1);
    }
}

#endif
