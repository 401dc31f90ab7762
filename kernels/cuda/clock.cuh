/* SPDX-License-Identifier: MIT */
/*
 * clock.cuh - when a kernel of a step began, told to the host.
 *
 * One thread of the grid stores the device's clock once its predecessor has ended: the difference
 * to the next kernel's is what the kernel took in its chain.
 */
#ifndef LK_CUDA_CLOCK_CUH
#define LK_CUDA_CLOCK_CUH

#include "cuda.h"
#include "ptx.cuh"

/* After wait_for_previous(). clock: NULL: nobody asks. */
__device__ __forceinline__ void note_time(struct lk_cuda_clock *clock, int at) {
    if (clock && threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0)
        clock->at[at] = device_ns();
}

#endif
