/* SPDX-License-Identifier: MIT */
/* cuda_bf16.h - bfloat16 by its bits, rounded to nearest even. See cuda_runtime.h. */
#ifndef LK_EMULATOR_CUDA_BF16_H
#define LK_EMULATOR_CUDA_BF16_H

#include "cuda_runtime.h"

struct __nv_bfloat16 {
    uint16_t bits;
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

static inline __nv_bfloat16 __float2bfloat16(float x) {
    const uint32_t u = __float_as_uint(x);
    if (x != x)
        return {0x7fff};
    return {(uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__float2bfloat16(x), __float2bfloat16(y)};
}

#endif
