/* SPDX-License-Identifier: MIT */
/*
 * fence.cuh - raising a fence. See fence.h.
 */
#ifndef LK_CUDA_FENCE_CUH
#define LK_CUDA_FENCE_CUH

#include "fence.h"

/* What the thread has seen done is seen by whoever sees the word raised. */
__device__ __forceinline__ void raise_fence(const struct lk_cuda_signal &signal) {
    asm volatile("red.release.gpu.global.max.u64 [%0], %1;" ::"l"(signal.word), "l"(signal.value)
                 : "memory");
}

#endif
