/* SPDX-License-Identifier: MIT */
/*
 * attend_portable.c - the vector loops of attend.h in plain C, for any machine.
 *
 * Idea: a key or value becomes floats once and serves the chunk's queries; sums run in eight lanes,
 * which a compiler may turn into vectors. No pairing: elements stay in natural order.
 * Any thread. Does not prefetch: machines that gain from it have a path of their own.
 */
#include <math.h>
#include <string.h>

#include "attend.h"

#define LANES 8

float lk_half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, body = h & 0x7fff, bits;
    float f;

    if (body >= 0x7c00) { /* inf, NaN */
        bits = sign | 0x7f800000 | (body & 0x3ff) << 13;
    } else if (body >= 0x400) {
        bits = sign | ((body << 13) + 0x38000000);
    } else { /* denormal: a multiple of 2^-24 */
        f = (float)body * 0x1p-24f;
        return sign ? -f : f;
    }
    memcpy(&f, &bits, 4);
    return f;
}

static inline void load(uint32_t dtype, const uint8_t *from, uint32_t head_dim, float *to) {
    for (uint32_t i = 0; i < head_dim; i++) {
        if (dtype == LK_FP32) {
            memcpy(&to[i], from + 4 * (size_t)i, 4);
            continue;
        }
        uint16_t h;
        memcpy(&h, from + 2 * (size_t)i, 2);
        if (dtype == LK_FP16) {
            to[i] = lk_half_to_float(h);
        } else {
            uint32_t bits = (uint32_t)h << 16;
            memcpy(&to[i], &bits, 4);
        }
    }
}

static inline size_t element_bytes(uint32_t dtype) {
    return dtype == LK_FP32 ? 4 : 2;
}

static float product(const float *a, const float *b, uint32_t head_dim) {
    float lane[LANES] = {0}, total = 0;

    for (uint32_t i = 0; i < head_dim; i += LANES)
        for (uint32_t l = 0; l < LANES; l++)
            lane[l] += a[i + l] * b[i + l];
    for (uint32_t l = 0; l < LANES; l++)
        total += lane[l];
    return total;
}

static inline void dot(uint32_t dtype, const struct lk_block *block, const float *q,
                       uint32_t queries, uint32_t head_dim, float *logits) {
    float key[LK_HEAD_DIM_MAX];
    uint32_t at = 0;

    for (uint32_t p = 0; p < block->pages; p++)
        for (uint32_t t = 0; t < block->count[p]; t++, at++) {
            load(dtype, block->key[p] + t * head_dim * element_bytes(dtype), head_dim, key);
            for (uint32_t i = 0; i < queries; i++)
                logits[i * LK_BLOCK_STRIDE + at] = product(q + i * head_dim, key, head_dim);
        }
}

static inline void gather(uint32_t dtype, const struct lk_block *block, const float *weights,
                          uint32_t queries, uint32_t head_dim, const float *decay, float *acc) {
    float value[LK_HEAD_DIM_MAX];
    uint32_t at = 0;

    for (uint32_t i = 0; i < queries; i++)
        for (uint32_t x = 0; x < head_dim; x++)
            acc[i * head_dim + x] *= decay[i];
    for (uint32_t p = 0; p < block->pages; p++)
        for (uint32_t t = 0; t < block->count[p]; t++, at++) {
            load(dtype, block->value[p] + t * head_dim * element_bytes(dtype), head_dim, value);
            for (uint32_t i = 0; i < queries; i++)
                lk_vector_portable.add_scaled(acc + i * head_dim, value, head_dim,
                                              weights[i * LK_BLOCK_STRIDE + at]);
        }
}

#define OF_DTYPE(name, dtype)                                                                      \
    static void dot_##name(const struct lk_block *block, const float *q, uint32_t queries,         \
                           uint32_t head_dim, float *logits) {                                     \
        dot(dtype, block, q, queries, head_dim, logits);                                           \
    }                                                                                              \
    static void gather_##name(const struct lk_block *block, const float *weights,                  \
                              uint32_t queries, uint32_t head_dim, const float *decay,             \
                              float *acc) {                                                        \
        gather(dtype, block, weights, queries, head_dim, decay, acc);                              \
    }
OF_DTYPE(bf16, LK_BF16)
OF_DTYPE(fp16, LK_FP16)
OF_DTYPE(fp32, LK_FP32)

static void soften(const struct lk_block *block, uint32_t queries, float *logits, float *peak,
                   float *mass, float *decay) {
    for (uint32_t i = 0; i < queries; i++) {
        float *x = logits + i * LK_BLOCK_STRIDE, top = peak[i], total = 0;

        for (uint32_t t = 0; t < block->tokens; t++) {
            x[t] += block->bias ? block->bias[t] : 0;
            top = x[t] > top ? x[t] : top;
        }
        float base = top == -INFINITY ? 0 : top; /* nothing finite yet: keep -inf - base at -inf */
        for (uint32_t t = 0; t < block->tokens; t++) {
            x[t] = exp2f(x[t] - base);
            total += x[t];
        }
        decay[i] = exp2f(peak[i] - base);
        mass[i] = mass[i] * decay[i] + total;
        peak[i] = top;
    }
}

static float largest(const float *x, uint64_t count) {
    float top = -INFINITY;

    for (uint64_t i = 0; i < count; i++)
        top = x[i] > top ? x[i] : top;
    return top;
}

static double exp_sum(float *to, const float *from, uint64_t count, float peak) {
    double total = 0;

    for (uint64_t i = 0; i < count; i++) {
        to[i] = expf(from[i] - peak);
        total += (double)to[i];
    }
    return total;
}

static double sum(const float *x, uint64_t count) {
    double lane[LANES] = {0}, total = 0;

    for (uint64_t i = 0; i < count; i++)
        lane[i % LANES] += (double)x[i];
    for (uint32_t l = 0; l < LANES; l++)
        total += lane[l];
    return total;
}

static void add_scaled(float *to, const float *from, uint64_t count, float scale) {
    for (uint64_t i = 0; i < count; i++)
        to[i] += scale * from[i];
}

const struct lk_vector lk_vector_portable = {
    .pair = 0,
    .dot = {[LK_BF16] = dot_bf16, [LK_FP16] = dot_fp16, [LK_FP32] = dot_fp32},
    .soften = soften,
    .gather = {[LK_BF16] = gather_bf16, [LK_FP16] = gather_fp16, [LK_FP32] = gather_fp32},
    .largest = largest,
    .exp_sum = exp_sum,
    .sum = sum,
    .add_scaled = add_scaled,
};
