/* SPDX-License-Identifier: MIT */
/*
 * lanes.h - the vectors of whatever the including file is compiled for: 4, 8 or 16 floats.
 *
 * Idea: arithmetic is written once with the compiler's vector types and compiled once a path; only
 * what the types cannot say (fused multiply-add, the widening of fp16) asks for the instruction
 * set. Loads and stores need no alignment. Head dimensions are multiples of LANES. Everything is
 * static: code compiled for one path never serves another.
 */
#ifndef LK_CPU_LANES_H
#define LK_CPU_LANES_H

#include <string.h>

#include "cpu.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#define LK_INLINE static inline __attribute__((always_inline, unused))

/* Before a loop whose accumulators must stay in registers. */
#define LK_UNROLL _Pragma("GCC unroll 16")

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t ilanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t ulanes __attribute__((vector_size(4 * LANES)));
typedef double wide __attribute__((vector_size(4 * LANES))); /* half as many doubles */
typedef int64_t iwide __attribute__((vector_size(4 * LANES)));
typedef float half_lanes __attribute__((vector_size(2 * LANES)));
#define WIDE (LANES / 2)

LK_INLINE lanes lanes_load(const float *from) {
    lanes x;
    memcpy(&x, from, sizeof(x));
    return x;
}
LK_INLINE void lanes_store(float *to, lanes x) {
    memcpy(to, &x, sizeof(x));
}
LK_INLINE lanes lanes_set(float x) {
    return x - (lanes){0};
}
LK_INLINE wide wide_load(const double *from) {
    wide x;
    memcpy(&x, from, sizeof(x));
    return x;
}
LK_INLINE void wide_store(double *to, wide x) {
    memcpy(to, &x, sizeof(x));
}
LK_INLINE wide wide_set(double x) {
    return x - (wide){0};
}
/* Both by intrinsics: of a whole vector the compiler makes two halves. */
LK_INLINE wide wide_widen(half_lanes x) {
#if defined(__AVX512F__)
    return (wide)_mm512_cvtps_pd((__m256)x);
#elif defined(__AVX2__)
    return (wide)_mm256_cvtps_pd((__m128)x);
#else
    return __builtin_convertvector(x, wide);
#endif
}
LK_INLINE half_lanes wide_round(wide x) {
#if defined(__AVX512F__)
    return (half_lanes)_mm512_cvtpd_ps((__m512d)x);
#elif defined(__AVX2__)
    return (half_lanes)_mm256_cvtpd_ps((__m256d)x);
#else
    return __builtin_convertvector(x, half_lanes);
#endif
}
LK_INLINE wide wide_of(const float *from) {
    half_lanes part;
    memcpy(&part, from, sizeof(part));
    return wide_widen(part);
}

/* a * b + c */
LK_INLINE lanes lanes_fma(lanes a, lanes b, lanes c) {
#if defined(__AVX512F__)
    return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
LK_INLINE wide wide_fma(wide a, wide b, wide c) {
#if defined(__AVX512F__)
    return (wide)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
    return (wide)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
    return a * b + c;
#endif
}

LK_INLINE lanes lanes_abs(lanes x) {
    return (lanes)((ilanes)x & 0x7fffffff);
}
/* Where either is NaN: b. */
LK_INLINE lanes lanes_max(lanes a, lanes b) {
    ilanes more = a > b;
    return (lanes)(((ilanes)a & more) | ((ilanes)b & ~more));
}
/* Nearest integer, ties to even; |x| < 2^22. */
LK_INLINE lanes lanes_round(lanes x) {
    return (x + 0x1.8p23f) - 0x1.8p23f;
}

/* Lane i takes lane i ^ distance. */
#if LANES == 16
LK_INLINE lanes lanes_swap1(lanes x) {
    return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
}
LK_INLINE lanes lanes_swap2(lanes x) {
    return __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
}
LK_INLINE lanes lanes_swap4(lanes x) {
    return __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
}
LK_INLINE lanes lanes_swap8(lanes x) {
    return __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
}
#elif LANES == 8
LK_INLINE lanes lanes_swap1(lanes x) {
    return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
}
LK_INLINE lanes lanes_swap2(lanes x) {
    return __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5);
}
LK_INLINE lanes lanes_swap4(lanes x) {
    return __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
}
#else
LK_INLINE lanes lanes_swap1(lanes x) {
    return __builtin_shufflevector(x, x, 1, 0, 3, 2);
}
LK_INLINE lanes lanes_swap2(lanes x) {
    return __builtin_shufflevector(x, x, 2, 3, 0, 1);
}
#endif

LK_INLINE lanes lanes_swap(lanes x, int distance) {
#if LANES > 8
    if (distance == 8)
        return lanes_swap8(x);
#endif
#if LANES > 4
    if (distance == 4)
        return lanes_swap4(x);
#endif
    return distance == 2 ? lanes_swap2(x) : lanes_swap1(x);
}

LK_INLINE wide wide_swap(wide x, int distance) {
    return (wide)lanes_swap((lanes)x, 2 * distance);
}

LK_INLINE float lanes_sum(lanes x) {
    LK_UNROLL
    for (int distance = LANES / 2; distance; distance /= 2)
        x += lanes_swap(x, distance);
    return x[0];
}
LK_INLINE float lanes_largest(lanes x) {
    LK_UNROLL
    for (int distance = LANES / 2; distance; distance /= 2)
        x = lanes_max(x, lanes_swap(x, distance));
    return x[0];
}

#endif
