/* SPDX-License-Identifier: MIT */
/*
 * locks_device.cuh - fences of a device arena inside kernels. See locks.h, "clients on the GPU".
 *
 * A fence is a 64-bit word that only rises. One thread of a kernel signals, or waits:
 *
 *     producer: all threads write q, k, v; __syncthreads(); thread 0: locks_fence_signal(word, i)
 *     daemon:   a submission waits for that value, reads q, k, v, writes out, raises another word
 *     consumer: thread 0: locks_fence_wait(other, i, limit_ns); __syncthreads(); all read out
 *
 * Order, for what lies in the device arena: a signal is a release and a wait an acquire at the
 * scope of the GPU, so what was written before the signal is seen after the wait; __syncthreads()
 * carries that to the block. A grid of many blocks signals from the last of them, or from the next
 * kernel.
 *
 * A kernel that waits holds its place on the GPU until it is served: submit before it is launched,
 * and leave room for the daemon's kernels. A refused submission raises its fence as well; a daemon
 * that dies raises none, hence the limit.
 */
#ifndef LOCKS_DEVICE_CUH
#define LOCKS_DEVICE_CUH

#include <stdint.h>

/* Fence number `number` (1 is the first, as in locks_fences) of the device arena mapped at
 * `arena`. */
__host__ __device__ inline uint64_t *locks_fence(void *arena, uint32_t number,
                                                 uint32_t fence_stride) {
    return (uint64_t *)((uint8_t *)arena + (uint64_t)(number - 1) * fence_stride);
}

/* Raises the word to value; never lowers it. One thread. */
__device__ inline void locks_fence_signal(uint64_t *word, uint64_t value) {
    __threadfence(); /* what other threads wrote before __syncthreads() goes along */
    asm volatile("red.release.gpu.global.max.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

/* Until the word has reached value, or limit_ns are over; 0: no limit. -> whether it has. One
 * thread. */
__device__ inline bool locks_fence_wait(const uint64_t *word, uint64_t value, uint64_t limit_ns) {
    uint64_t held, begun, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
    for (;;) {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(held) : "l"(word) : "memory");
        if (held >= value)
            return true;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        if (limit_ns && now - begun > limit_ns)
            return false;
    }
}

#endif
