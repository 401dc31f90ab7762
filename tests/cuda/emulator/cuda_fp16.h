/* SPDX-License-Identifier: MIT */
/* cuda_fp16.h - CUDA's 16-bit float as the host's compiler has it. See cuda_runtime.h. */
#ifndef LK_EMULATOR_CUDA_FP16_H
#define LK_EMULATOR_CUDA_FP16_H

#include "cuda_runtime.h"

typedef _Float16 __half;
struct __half2 {
    __half x, y;
};

static inline __half __float2half_rn(float x) {
    return (__half)x;
}
static inline __half __float2half(float x) {
    return (__half)x;
}
static inline float __half2float(__half x) {
    return (float)x;
}
static inline __half __ushort_as_half(uint16_t x) {
    return bits_as<__half>(x);
}
static inline __half2 __half2half2(__half x) {
    return {x, x};
}
static inline __half2 __floats2half2_rn(float x, float y) {
    return {(__half)x, (__half)y};
}
static inline float2 __half22float2(__half2 x) {
    return {(float)x.x, (float)x.y};
}
static inline __half2 __hsub2(__half2 x, __half2 y) {
    return {(__half)(x.x - y.x), (__half)(x.y - y.y)};
}

#endif
