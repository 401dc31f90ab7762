/* SPDX-License-Identifier: MIT */
/*
 * feed.cu - see feed.h.
 */
#include "device.cuh"
#include "clock.cuh"
#include "feed.h"
#include "fence.cuh"

#define THREADS 256

__global__ void __launch_bounds__(THREADS)
    bring_kernel(const struct lk_cuda_feed *feed, struct lk_cuda_marks *marks,
                 struct lk_cuda_clock *clock) {
    /* Of host memory: all that a block needs to begin is asked for at once. */
    const uint64_t number = feed->serial;
    const uint32_t pieces = feed->pieces, signals = feed->signals;
    struct lk_cuda_piece piece = feed->piece[blockIdx.x];

    wait_for_previous();
    note_time(clock, LK_CUDA_AT_FEED);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        marks->serial = number;
        marks->signals = signals;
    }
    for (uint32_t i = blockIdx.x; i < pieces; i += gridDim.x) {
        if (i != blockIdx.x)
            piece = feed->piece[i];
        const uint4 *from = (const uint4 *)piece.from;
        uint4 *to = (uint4 *)piece.to;
#pragma unroll 2
        for (uint64_t x = threadIdx.x; x < piece.bytes / 16; x += THREADS)
            to[x] = from[x];
    }
}

__device__ void store_mark(uint64_t number, uint64_t *word) {
    if (number == 0)
        return;
    __threadfence_system();
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

int lk_cuda_bring(const struct lk_cuda_feed *feed, struct lk_cuda_marks *marks,
                  struct lk_cuda_clock *clock, uint32_t blocks, void *stream) {
    return launch(bring_kernel, dim3(blocks), THREADS, 0, stream, feed, marks, clock);
}

int lk_cuda_mark(const struct lk_cuda_marks *marks, uint64_t *word, struct lk_cuda_clock *clock,
                 void *stream) {
    return launch(mark_kernel, dim3(1), 32, 0, stream, marks, word, clock);
}

int lk_cuda_mark_now(uint64_t serial, uint64_t *word, struct lk_cuda_clock *clock, void *stream) {
    return launch(mark_now_kernel, dim3(1), 1, 0, stream, serial, word, clock);
}
