/* SPDX-License-Identifier: MIT */
/*
 * fill.cu - see fill.h.
 */
#include "fill.h"

#define THREADS 256
#define BLOCKS  8192
#define FLIGHT  8 /* loads of 16 bytes in flight a thread: two or more saturate with 2048 threads */

static __device__ __forceinline__ uint16_t bf16(float value) {
    return (uint16_t)(__float_as_uint(value) >> 16);
}

/* One warp a token's key or value: 32 lanes walk its channels. */
static __global__ void fill_pages(struct lk_pool_view p, const float *normal) {
    uint32_t d = p.geometry.head_dim, b = p.geometry.page_tokens, heads = p.geometry.kv_heads;
    uint64_t count = p.geometry.layers * p.pages * heads * 2 * b, lane = threadIdx.x % 32,
             warps = (uint64_t)gridDim.x * THREADS / 32;

    for (uint64_t w = ((uint64_t)blockIdx.x * THREADS + threadIdx.x) / 32; w < count; w += warps) {
        struct bench_page page = bench_page_of(normal, w / (2 * b));
        uint32_t i = (uint32_t)(w % (2 * b));
        const float *own = bench_own(normal, &page, i);
        uint16_t *to = (uint16_t *)p.kv + w * d;

        for (uint32_t c = lane; c < d; c += 32)
            to[c] = bf16(i < b ? bench_key(&page, own, c) : own[c]);
    }
}

static __global__ void fill_queries(uint16_t *to, uint64_t count, const float *normal) {
    for (uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x; i < count;
         i += (uint64_t)gridDim.x * THREADS)
        to[i] = bf16(bench_query(normal, i));
}

static __global__ void fill_list(uint64_t *list, uint64_t count, uint64_t units) {
    for (uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x; i < count;
         i += (uint64_t)gridDim.x * THREADS)
        list[i] = i / units << 48 | i % units;
}

/* ONCE: by loads whose bytes leave the cache first. */
template <bool ONCE>
static __global__ void read_all(const uint4 *from, uint64_t count, uint32_t *sum) {
    uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    uint32_t x = 0;

    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += FLIGHT * step) {
        uint4 v[FLIGHT];
#pragma unroll
        for (int k = 0; k < FLIGHT; k++)
            v[k] = i + k * step >= count ? make_uint4(0, 0, 0, 0)
                   : ONCE                ? __ldcs(from + i + k * step)
                                         : __ldcg(from + i + k * step);
#pragma unroll
        for (int k = 0; k < FLIGHT; k++)
            x ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (x == 0x12345678)
        *sum = x;
}

int bench_fill_pages(const struct lk_pool_view *pool, const float *normal, void *stream) {
    fill_pages<<<BLOCKS, THREADS, 0, (cudaStream_t)stream>>>(*pool, normal);
    return (int)cudaGetLastError();
}

int bench_fill_queries(uint16_t *to, uint64_t count, const float *normal, void *stream) {
    fill_queries<<<BLOCKS, THREADS, 0, (cudaStream_t)stream>>>(to, count, normal);
    return (int)cudaGetLastError();
}

int bench_fill_list(uint64_t *list, uint32_t layers, uint64_t units, void *stream) {
    fill_list<<<BLOCKS, THREADS, 0, (cudaStream_t)stream>>>(list, layers * units, units);
    return (int)cudaGetLastError();
}

int bench_read_all(const void *from, uint64_t bytes, uint32_t blocks, bool once, uint32_t *sum,
                   void *stream) {
    auto *kernel = once ? read_all<true> : read_all<false>;

    kernel<<<blocks, 512, 0, (cudaStream_t)stream>>>((const uint4 *)from, bytes / 16, sum);
    return (int)cudaGetLastError();
}
