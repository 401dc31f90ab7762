/* SPDX-License-Identifier: MIT */
/*
 * hadamard.h - the rotation that spreads outlier channels before anything is quantised.
 *
 * x <- x.H, with H the normalised Hadamard matrix of size d, block diagonal of the largest
 * power-of-two blocks that divide d (96 = 3 x 32). H is symmetric and its own inverse, so that keys
 * and queries rotated alike keep their products.
 *
 * Idea: log2(block) rounds of butterflies; the rounds within a vector are lane swaps with a sign.
 * Invariant: d is a multiple of 16, so no block is smaller than a vector.
 * Pure, any thread; compiled for the path of the including file.
 */
#ifndef LK_CPU_HADAMARD_H
#define LK_CPU_HADAMARD_H

#include <math.h>

#include "lanes.h"

LK_INLINE uint32_t hadamard_block(uint32_t head_dim) {
    return head_dim & -head_dim;
}

/* +1 where bit `distance` of the lane is clear, else -1, times scale. */
LK_INLINE lanes hadamard_signs(int distance, float scale) {
    lanes sign = {0};
    for (int i = 0; i < LANES; i++)
        sign[i] = i & distance ? -scale : scale;
    return sign;
}

LK_INLINE lanes hadamard_within(lanes x, float scale) {
    x = lanes_swap(x, 1) + x * hadamard_signs(1, 1);
    x = lanes_swap(x, 2) + x * hadamard_signs(2, 1);
#if LANES > 4
    x = lanes_swap(x, 4) + x * hadamard_signs(4, 1);
#endif
#if LANES > 8
    x = lanes_swap(x, 8) + x * hadamard_signs(8, 1);
#endif
    return x * scale;
}

/* x [head_dim], in place. */
LK_INLINE void hadamard_rotate(float *x, uint32_t head_dim) {
    uint32_t block = hadamard_block(head_dim);
    float scale = 1 / sqrtf((float)block);

    for (uint32_t i = 0; i < head_dim; i += LANES)
        lanes_store(x + i, hadamard_within(lanes_load(x + i), scale));
    for (uint32_t half = LANES; half < block; half *= 2)
        for (uint32_t i = 0; i < head_dim; i += LANES) {
            if (i & half)
                continue;
            lanes a = lanes_load(x + i), b = lanes_load(x + i + half);
            lanes_store(x + i, a + b);
            lanes_store(x + i + half, a - b);
        }
}

/* The same in double precision, for a mean whose channels differ by orders of magnitude. */
LK_INLINE void hadamard_rotate_wide(double *x, uint32_t head_dim) {
    uint32_t block = hadamard_block(head_dim);
    double scale = 1 / sqrt((double)block);

    for (uint32_t i = 0; i < head_dim; i += WIDE) {
        wide v = wide_load(x + i) * scale;
        LK_UNROLL
        for (int distance = 1; distance < WIDE; distance *= 2) {
            wide sign = {0};
            for (int l = 0; l < WIDE; l++)
                sign[l] = l & distance ? -1 : 1;
            v = wide_swap(v, distance) + v * sign;
        }
        wide_store(x + i, v);
    }
    for (uint32_t half = WIDE; half < block; half *= 2)
        for (uint32_t i = 0; i < head_dim; i += WIDE) {
            if (i & half)
                continue;
            wide a = wide_load(x + i), b = wide_load(x + i + half);
            wide_store(x + i, a + b);
            wide_store(x + i + half, a - b);
        }
}

#endif
