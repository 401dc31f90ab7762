/* SPDX-License-Identifier: MIT */
/*
 * build_warp.cuh - what pages of 32 tokens and more are built with, whether a warp or a block has
 * one: jobs, plane rotations, the Hadamard rotation, and the codes of a record. What has a lane l
 * is run by one whole warp.
 */
#ifndef LK_CUDA_BUILD_WARP_CUH
#define LK_CUDA_BUILD_WARP_CUH

#include "build.cuh"

#define SWEEPS_MOST 16
#define ORTHOGONAL  1e-6f /* cosine at which two columns count as orthogonal */

struct build_args {
    struct lk_pool_view pool;
    const uint64_t *list;
    uint32_t count, super;
};

/* One page or quad of the list, and a KV head. */
struct build_job {
    uint64_t id;
    uint32_t layer, head;
};

__device__ __forceinline__ struct build_job job_of(const struct build_args &a, uint64_t task) {
    const uint32_t heads = a.pool.geometry.kv_heads;
    const uint64_t item = a.list[task / heads];
    return {item & 0xffffffffffffull, (uint32_t)(item >> 48), (uint32_t)(task % heads)};
}

/* Where its records lie. */
__device__ __forceinline__ uint64_t plane_of(const struct build_args &a,
                                             const struct build_job &job) {
    return (uint64_t)job.layer * a.pool.geometry.kv_heads + job.head;
}
__device__ __forceinline__ uint8_t *
coarse_of(const struct build_args &a, const struct build_job &job, const struct lk_record &r) {
    return a.pool.coarse + (plane_of(a, job) * a.pool.pages + job.id) * r.stride;
}
__device__ __forceinline__ uint8_t *fine_of(const struct build_args &a, const struct build_job &job,
                                            const struct lk_record &r) {
    return a.pool.fine + (plane_of(a, job) * a.pool.pages + job.id) * r.stride;
}
__device__ __forceinline__ uint8_t *
super_of(const struct build_args &a, const struct build_job &job, const struct lk_record &r) {
    return a.pool.super + (plane_of(a, job) * (a.pool.pages / LK_QUAD_PAGES) + job.id) * r.stride;
}

/* Rotation for one-sided Jacobi: columns a and b with squared norms and product -> c, s. */
__device__ __forceinline__ bool find_rotation(float aa, float bb, float ab, float floor, float *c,
                                              float *s) {
    *c = 1.f;
    *s = 0.f;
    if (fminf(aa, bb) <= floor || fabsf(ab) <= ORTHOGONAL * sqrtf(aa) * sqrtf(bb))
        return false;
    float zeta = (bb - aa) / (2.f * ab);
    float t = copysignf(1.f, zeta) / (fabsf(zeta) + sqrtf(fmaf(zeta, zeta, 1.f)));
    *c = rsqrtf(fmaf(t, t, 1.f));
    *s = *c * t;
    return true;
}

/* Rotate v [d] by the block-diagonal Hadamard matrix: four values at a time, two levels at once. */
__device__ __forceinline__ void rotate(float *v, uint32_t d, uint32_t l) {
    const uint32_t block = d & -d;
    const float norm = rsqrtf((float)block);
    uint32_t o = 1;

    for (; 4 * o <= block; o *= 4) {
        const float scale = 4 * o == block ? norm : 1.f;
        __syncwarp();
        for (uint32_t i = l; i < d / 4; i += 32) {
            float *at = v + ((i & ~(o - 1)) << 2 | (i & (o - 1)));
            const float a = at[0], b = at[o], c = at[2 * o], e = at[3 * o];
            at[0] = ((a + b) + (c + e)) * scale;
            at[o] = ((a - b) + (c - e)) * scale;
            at[2 * o] = ((a + b) - (c + e)) * scale;
            at[3 * o] = ((a - b) - (c - e)) * scale;
        }
    }
    __syncwarp();
    for (uint32_t i = l; o < block && i < d / 2; i += 32) {
        float *at = v + ((i & ~(o - 1)) << 1 | (i & (o - 1)));
        const float a = at[0], b = at[o];
        at[0] = (a + b) * norm;
        at[o] = (a - b) * norm;
    }
    __syncwarp();
}

/* One direction: v [d] of unit length and rotated, coefficients u * length -> codes and scale. */
static __device__ void write_direction(uint8_t *record, const struct lk_record &r, uint32_t slot,
                                       const float *v, const float *u, float length, uint32_t l) {
    float v_most = 0, u_most = 0, b, scale, step;
    const uint32_t d = r.head_dim, n = r.tokens;

    for (uint32_t c = l; c < d; c += 32)
        v_most = fmaxf(v_most, fabsf(v[c]));
    for (uint32_t t = l; t < n; t += 32)
        u_most = fmaxf(u_most, fabsf(u[t]));
    v_most = warp_max(v_most);
    u_most = warp_max(u_most) * length;
    b = length > 0 ? v_most / 7.f : 0.f;
    uint16_t bits = b > 0 ? bf16_up(u_most / 127.f * b) : 0;
    scale = bf16_float(bits);
    step = b > 0 ? scale / b : 0.f;
    const float times = 1.f / b, unit = length / step;
    for (uint32_t y = l; y < d / 2; y += 32) {
        int low = 8, high = 8;
        if (b > 0) {
            low += max(-7, min(7, __float2int_rn(v[lk_basis_channel(d, y, 0)] * times)));
            high += max(-7, min(7, __float2int_rn(v[lk_basis_channel(d, y, 1)] * times)));
        }
        record[r.basis + slot * d / 2 + y] = (uint8_t)(low | high << 4);
    }
    for (uint32_t t = l; t < n; t += 32) {
        int code = step > 0 ? max(-127, min(127, __float2int_rn(u[t] * unit))) : 0;
        record[r.coeffs + lk_coeff_place(n, slot, t)] = (uint8_t)(code + 128);
    }
    if (l == 0)
        *(uint16_t *)(record + r.scales + 2 * (slot + (r.centroid ? 1 : 0))) = bits;
}

static __device__ void write_centroid(uint8_t *record, const struct lk_record &r, const float *mean,
                                      uint32_t l) {
    float most = 0, scale;

    for (uint32_t c = l; c < r.head_dim; c += 32)
        most = fmaxf(most, fabsf(mean[c]));
    uint16_t bits = bf16_up(warp_max(most) / 127.f);
    scale = bf16_float(bits);
    for (uint32_t c = l; c < r.head_dim; c += 32) {
        int code = scale > 0 ? max(-127, min(127, __float2int_rn(mean[c] / scale))) : 0;
        record[r.centroid + lk_centroid_place(r.head_dim, c)] = (uint8_t)code;
    }
    if (l == 0)
        *(uint16_t *)(record + r.scales) = bits;
}

#endif
