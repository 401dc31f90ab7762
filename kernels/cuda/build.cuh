/* SPDX-License-Identifier: MIT */
/*
 * build.cuh - what the ways of building summaries share.
 */
#ifndef LK_CUDA_BUILD_CUH
#define LK_CUDA_BUILD_CUH

#include "device.cuh"

/* Smallest bf16 not below x >= 0, as bits. */
__device__ __forceinline__ uint16_t bf16_up(float x) {
    return (uint16_t)((__float_as_uint(x) + 0xffff) >> 16);
}

/* lk_cuda_build_pages() of pages of 8 and 16 tokens. */
int lk_cuda_build_small(const struct lk_cuda_build *build, void *stream);
uint32_t lk_cuda_build_small_least(void);

/* lk_cuda_build_supers() of superpages of more than 64 tokens. */
int lk_cuda_build_super(const struct lk_cuda_build *build, void *stream);
uint32_t lk_cuda_build_super_least(const struct lk_geometry *g);

#endif
