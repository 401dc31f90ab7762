/* SPDX-License-Identifier: MIT */
/*
 * hooks.cu - what only tests compile: a kernel that faults, as one with a bug would.
 */
#ifdef LK_TEST_HOOKS
#include "device.cuh"
#include "feed.h"

__global__ void fault_kernel(uint32_t *nowhere) {
    wait_for_previous();
    *nowhere = 1;
}

int lk_cuda_fault(void *stream) {
    return launch(fault_kernel, dim3(1), 1, 0, stream, (uint32_t *)16);
}
#endif
