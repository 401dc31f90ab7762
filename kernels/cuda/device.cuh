/* SPDX-License-Identifier: MIT */
/*
 * device.cuh - what the kernels share: element types, addresses, finding a task's row, launching.
 *
 * Everything is for one warp unless its name says block. No kernel, no state.
 */
#ifndef LK_CUDA_DEVICE_CUH
#define LK_CUDA_DEVICE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cuda.h"
#include "ptx.cuh"
#include "record.h"
#include "state.h"

#define LK_FULL_WARP 0xffffffffu
#define LK_LOG2E     1.4426950408889634f
#define LK_LN2       0.6931471805599453f

__device__ __forceinline__ uint32_t group_stride(uint32_t group) {
    return group <= 4 ? 4 : (group + 7) / 8 * 8;
}

/* The warp's number, known to the compiler to be the same in all its lanes: loops over it do not
 * diverge. */
__device__ __forceinline__ uint32_t warp_index(void) {
    return __shfl_sync(LK_FULL_WARP, threadIdx.x / 32, 0);
}

/* ---- numbers ---- */

__device__ __forceinline__ uint32_t bits_of(__half2 h) {
    return *(uint32_t *)&h;
}
__device__ __forceinline__ float bf16_float(uint16_t x) {
    return __uint_as_float((uint32_t)x << 16);
}
__device__ __forceinline__ float element(uint16_t x, bool bf16) {
    return bf16 ? bf16_float(x) : __half2float(__ushort_as_half(x));
}
template <bool BF16> __device__ __forceinline__ uint32_t pack_pair(float low, float high) {
    if constexpr (BF16) {
        __nv_bfloat162 h = __floats2bfloat162_rn(low, high);
        return *(uint32_t *)&h;
    } else {
        __half2 h = __floats2half2_rn(low, high);
        return *(uint32_t *)&h;
    }
}
template <bool BF16> __device__ __forceinline__ float2 unpack_pair(uint32_t x) {
    if constexpr (BF16)
        return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
    else
        return __half22float2(*(__half2 *)&x);
}

/* Sums of 2^x as {maximum, sum}: empty is {-inf, 0}. Merging empty parts gives no NaN. */
__device__ __forceinline__ float2 merge_parts(float2 a, float2 b) {
    float peak = fmaxf(a.x, b.x);
    if (peak == -INFINITY)
        return make_float2(peak, 0.f);
    return make_float2(peak, a.y * exp2_fast(a.x - peak) + b.y * exp2_fast(b.x - peak));
}

__device__ __forceinline__ float warp_max(float x) {
    for (int o = 16; o; o >>= 1)
        x = fmaxf(x, __shfl_xor_sync(LK_FULL_WARP, x, o));
    return x;
}
__device__ __forceinline__ float warp_sum(float x) {
    for (int o = 16; o; o >>= 1)
        x += __shfl_xor_sync(LK_FULL_WARP, x, o);
    return x;
}

/* Of the lane: channels 32 i + lane. Each BLOCK of them times its Hadamard matrix of +-1. */
template <uint32_t BLOCK, int N> __device__ __forceinline__ void warp_hadamard(float x[N]) {
    const uint32_t lane = threadIdx.x % 32;

#pragma unroll
    for (uint32_t o = 1; o < 32 && o < BLOCK; o <<= 1)
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float y = __shfl_xor_sync(LK_FULL_WARP, x[i], o);
            x[i] = lane & o ? y - x[i] : x[i] + y;
        }
#pragma unroll
    for (uint32_t o = 1; 32 * o < BLOCK; o <<= 1)
#pragma unroll
        for (int i = 0; i < N; i++)
            if (!(i & o)) {
                const float y = x[i + o];
                x[i + o] = x[i] - y;
                x[i] += y;
            }
}

/* ---- rows ---- */

/* Of a batch's stage: how many rows, and the first task of each lane's row. For find_row(), but
 * read beside what its caller waits for. */
struct row_starts {
    uint32_t rows, first;
};

__device__ __forceinline__ struct row_starts load_starts(const struct lk_cuda_batch *b, int stage) {
    return {__ldcg(&b->rows), __ldcg(&b->first[stage][threadIdx.x % 32])};
}

/* The row whose tasks hold `task`, the last whose first task is not after it; and that task. By a
 * warp. */
__device__ __forceinline__ uint32_t find_row(const struct lk_cuda_batch *b, int stage,
                                             const struct row_starts &starts, uint32_t task,
                                             uint32_t *ret_first) {
    const uint32_t lane = threadIdx.x % 32, rows = starts.rows;
    uint32_t count = __popc(__ballot_sync(LK_FULL_WARP, lane < rows && starts.first <= task));

    *ret_first = __shfl_sync(LK_FULL_WARP, starts.first, count - 1);
#pragma unroll 1
    for (uint32_t i = 32; i < rows; i += 32) {
        const bool in = i + lane < rows && __ldcg(&b->first[stage][i + lane]) <= task;
        count += __popc(__ballot_sync(LK_FULL_WARP, in));
    }
    if (count > 32)
        *ret_first = __ldcg(&b->first[stage][count - 1]);
    return count - 1;
}

/* The block's run of `total` tasks, `each` (total / gridDim.x) and of the first blocks one more:
 * begin .. end - 1. Neighbours, since most are of one KV head. */
__device__ __forceinline__ void find_run(uint32_t total, uint32_t each, uint32_t *begin,
                                         uint32_t *end) {
    const uint32_t more = total - each * gridDim.x;

    *begin = blockIdx.x * each + min(blockIdx.x, more);
    *end = *begin + each + (blockIdx.x < more);
}

/* Words of a row's descriptor but those for select. */
#define LK_CUDA_ROW_WORDS (offsetof(struct lk_cuda_row, head_bytes) / 4)

/* A row's descriptor, past L1, which may hold one of an earlier step. */
__device__ __forceinline__ void load_row(const struct lk_cuda_batch *b, uint32_t row,
                                         struct lk_cuda_row *ret) {
    for (uint32_t i = threadIdx.x % 32; i < LK_CUDA_ROW_WORDS; i += 32)
        ((uint32_t *)ret)[i] = __ldcg((const uint32_t *)&b->row[row] + i);
    __syncwarp();
}

__device__ __forceinline__ uint32_t physical_page(const struct lk_cuda_row *r, uint32_t page) {
    return (r->table[page >> r->table_shift] << r->table_shift) +
           (page & ((1u << r->table_shift) - 1));
}

__device__ __forceinline__ uint32_t part_slots(const struct lk_cuda_row *r) {
    return 1 + r->chunks + r->rescan_tiles + r->rest_chunks;
}
__device__ __forceinline__ float *row_scores(const struct lk_cuda_row *r, uint32_t head,
                                             uint32_t stride) {
    return (float *)(r->workspace + r->scores) + (uint64_t)head * r->pages * stride;
}
__device__ __forceinline__ float2 *row_parts(const struct lk_cuda_row *r, uint32_t head,
                                             uint32_t stride) {
    return (float2 *)(r->workspace + r->parts) + (uint64_t)head * part_slots(r) * stride;
}
__device__ __forceinline__ struct lk_cuda_head *row_head(const struct lk_cuda_row *r,
                                                         uint32_t head) {
    return (struct lk_cuda_head *)(r->workspace + r->counts) + head;
}
__device__ __forceinline__ uint32_t *row_rescan(const struct lk_cuda_row *r, uint32_t head) {
    return (uint32_t *)(r->workspace + r->rescan) + (uint64_t)head * (r->list_max + 8);
}
__device__ __forceinline__ struct lk_cuda_pick *row_picks(const struct lk_cuda_row *r,
                                                          uint32_t head) {
    return (struct lk_cuda_pick *)(r->workspace + r->picks) + (uint64_t)head * r->budget_pages;
}

/* kernels.h has the arithmetic for C; here the pool is a kernel's argument. */
__device__ __forceinline__ uint8_t *
lk_page_keys_device(const struct lk_pool_view &p, uint32_t layer, uint64_t page, uint32_t head) {
    return p.kv + ((uint64_t)layer * p.pages + page) * p.layout.page_bytes +
           head * p.layout.head_bytes;
}

/* ---- launch ---- */

/* Shared memory of a kernel's block, in bytes: `fixed`, and `each` for every one of its parts (a
 * warp that scores, slots, a page), of which it has at least one and `most` at most. More parts are
 * faster and change no result but the last bits of rows of many queries (attend.cu). */
struct lk_shared {
    uint32_t fixed, each, most;
};

static inline uint32_t shared_least(const struct lk_shared &s) {
    return s.fixed + s.each;
}

/* The parts that a block can have on the current device, and the leave to use them. -> 0, or a
 * cudaError_t: cudaErrorInvalidConfiguration where not even one fits. */
template <class Kernel>
static int take_shared(Kernel *kernel, const struct lk_shared &s, uint32_t *ret_parts) {
    int device = 0, lent = 0, error = (int)cudaGetDevice(&device);

    if (!error)
        error = (int)cudaDeviceGetAttribute(&lent, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error)
        return error;
    if (shared_least(s) > (uint32_t)lent)
        return (int)cudaErrorInvalidConfiguration;
    *ret_parts = min(s.most, ((uint32_t)lent - s.fixed) / s.each);
    return (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, lent);
}

/* The same of a kernel whose blocks all take so many bytes. */
template <class Kernel> static int take_bytes(Kernel *kernel, uint32_t bytes) {
    uint32_t one;

    return take_shared(kernel, {0, bytes, 1}, &one);
}

/* What blocks of each part of the backend need at least; cuda.h has the largest of all. */
uint32_t lk_cuda_scan_least(const struct lk_geometry *geometry);
uint32_t lk_cuda_rescan_least(const struct lk_geometry *geometry);
uint32_t lk_cuda_select_least(void);
uint32_t lk_cuda_attend_least(const struct lk_geometry *geometry);
uint32_t lk_cuda_build_least(const struct lk_geometry *geometry);

template <class... P, class... A>
static int launch(void (*kernel)(P...), dim3 grid, uint32_t threads, uint32_t shared, void *stream,
                  A... args) {
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute chained = {};

    chained.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    chained.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared;
    config.stream = (cudaStream_t)stream;
    config.attrs = &chained;
    config.numAttrs = 1;
    return (int)cudaLaunchKernelEx(&config, kernel, P(args)...);
}

#endif
