/* SPDX-License-Identifier: MIT */
/*
 * feed.cu - see feed.h.
 */
#include "device.cuh"
#include "clock.cuh"
#include "feed.h"
#include "fence.cuh"

#define THREADS 256

/* The block's share of what lies at a known place, a vector a thread. Only then may the next kernel
 * start. */
__device__ void bring_first(const struct lk_cuda_bring &a) {
    const uint32_t x = blockIdx.x * THREADS + threadIdx.x;
    const bool mine = x < a.first_bytes / 16;

    wait_for_previous();
    note_time(a.clock, LK_CUDA_AT_FEED);
    if (mine)
        ((uint4 *)a.to)[x] = ((const uint4 *)a.from)[x];
    __threadfence();
    __syncthreads();
    let_next_start();
}

/* Both vectors of a thread are on their way at once. */
__device__ void bring_piece(const struct lk_cuda_piece &piece) {
    const uint4 *const from = (const uint4 *)piece.from;
    uint4 *const to = (uint4 *)piece.to;
    const uint64_t vectors = piece.bytes / 16;

    for (uint64_t x = threadIdx.x; x < vectors; x += 2 * THREADS) {
        const bool two = x + THREADS < vectors;
        const uint4 u = from[x], v = two ? from[x + THREADS] : u;
        to[x] = u;
        if (two)
            to[x + THREADS] = v;
    }
}

__device__ void bring_pieces(const struct lk_cuda_bring &a, uint32_t block, uint32_t blocks) {
    /* Of host memory: all that a block needs to begin is asked for at once. */
    const uint64_t number = a.feed->serial;
    const uint32_t pieces = a.feed->pieces, signals = a.feed->signals;
    struct lk_cuda_piece piece = a.feed->piece[block];

    let_next_start();
    wait_for_previous();
    if (block == 0 && threadIdx.x == 0) {
        a.marks->serial = number;
        a.marks->signals = signals;
    }
    for (uint32_t i = block; i < pieces; i += blocks) {
        if (i != block)
            piece = a.feed->piece[i];
        bring_piece(piece);
    }
}

__host__ __device__ static uint32_t first_blocks(const struct lk_cuda_bring &a) {
    return (uint32_t)((a.first_bytes / 16 + THREADS - 1) / THREADS);
}

__global__ void __launch_bounds__(THREADS)
    bring_kernel(const __grid_constant__ struct lk_cuda_bring a) {
    const uint32_t first = first_blocks(a);

    if (blockIdx.x < first)
        bring_first(a);
    else
        bring_pieces(a, blockIdx.x - first, gridDim.x - first);
}

/* What was done before is seen by whoever sees the number. */
__device__ void store_mark(uint64_t number, uint64_t *word) {
    if (number == 0)
        return;
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(number) : "memory");
}

/* Fences first: what is stored to the host's memory would delay them by a crossing of the bus. */
__global__ void mark_kernel(const struct lk_cuda_marks *marks, uint64_t *word,
                            struct lk_cuda_clock *clock) {
    wait_for_previous();
    for (uint32_t i = threadIdx.x; i < marks->signals; i += blockDim.x)
        raise_fence(marks->signal[i]);
    __syncwarp();
    note_time(clock, LK_CUDA_AT_FENCE);
    if (threadIdx.x == 0)
        store_mark(marks->serial, word);
}

__global__ void mark_now_kernel(uint64_t serial, uint64_t *word, struct lk_cuda_clock *clock) {
    wait_for_previous();
    note_time(clock, LK_CUDA_AT_DONE);
    store_mark(serial, word);
}

int lk_cuda_bring(const struct lk_cuda_bring *bring, void *stream) {
    return launch(bring_kernel, dim3(first_blocks(*bring) + bring->blocks), THREADS, 0, stream,
                  *bring);
}

int lk_cuda_mark(const struct lk_cuda_marks *marks, uint64_t *word, struct lk_cuda_clock *clock,
                 void *stream) {
    return launch(mark_kernel, dim3(1), 32, 0, stream, marks, word, clock);
}

int lk_cuda_mark_now(uint64_t serial, uint64_t *word, struct lk_cuda_clock *clock, void *stream) {
    return launch(mark_now_kernel, dim3(1), 1, 0, stream, serial, word, clock);
}
