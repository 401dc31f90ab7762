/* SPDX-License-Identifier: MIT */
/*
 * cuda_runtime.h - what the kernels and their tests use of CUDA, for a host that has none: device
 * memory is the host's, a launch returns when the grid has run.
 *
 * Only what is used is here; the compiler says what is missing.
 */
#ifndef LK_EMULATOR_CUDA_RUNTIME_H
#define LK_EMULATOR_CUDA_RUNTIME_H

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "threads.h"

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(x) alignas(x)

#define threadIdx (emulated::running->index)
#define blockIdx  (emulated::running->block->index)

/* ---- vectors ---- */

struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct dim3 : uint3 {
    dim3(uint32_t a = 1, uint32_t b = 1, uint32_t c = 1) : uint3{a, b, c} {
    }
};

static inline uint2 make_uint2(uint32_t x, uint32_t y) {
    return {x, y};
}
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    return {x, y, z, w};
}
static inline int4 make_int4(int x, int y, int z, int w) {
    return {x, y, z, w};
}
static inline float2 make_float2(float x, float y) {
    return {x, y};
}
static inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}

/* ---- arithmetic ---- */

template <class A, class B> static inline typename std::common_type<A, B>::type min(A a, B b) {
    using both = typename std::common_type<A, B>::type;
    return (both)b < (both)a ? (both)b : (both)a;
}
template <class A, class B> static inline typename std::common_type<A, B>::type max(A a, B b) {
    using both = typename std::common_type<A, B>::type;
    return (both)a < (both)b ? (both)b : (both)a;
}

template <class To, class From> static inline To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
static inline uint32_t __float_as_uint(float x) {
    return bits_as<uint32_t>(x);
}
static inline int __float_as_int(float x) {
    return bits_as<int>(x);
}
static inline float __uint_as_float(uint32_t x) {
    return bits_as<float>(x);
}
static inline float __int_as_float(int x) {
    return bits_as<float>(x);
}
static inline int __float2int_rn(float x) {
    return (int)nearbyintf(x);
}
static inline float __ull2float_rn(uint64_t x) {
    return (float)x;
}
static inline float __fmul_rn(float x, float y) {
    return x * y;
}
/* What an approximate instruction may give for `exact`: up to two units in the last place beside
 * it, by what it is made of. */
static inline float nearly(float exact, float of) {
    const int beside = (int)(bits_as<uint32_t>(of) * 2654435761u >> 16) % 5 - 2;
    return std::isnormal(exact) ? bits_as<float>(bits_as<int>(exact) + beside) : exact;
}
static inline bool is_power(float x) {
    return std::isnormal(x) && !(bits_as<uint32_t>(x) & 0x7fffff);
}
static inline float __fdividef(float a, float b) {
    return is_power(b) ? a / b : nearly(a / b, b);
}
static inline float rsqrtf(float x) {
    return 1 / sqrtf(x);
}
static inline double rsqrt(double x) {
    return 1 / sqrt(x);
}
static inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
    return max(a & 0xffff0000, b & 0xffff0000) | max(a & 0xffff, b & 0xffff);
}
static inline int __popc(uint32_t x) {
    return __builtin_popcount(x);
}
static inline int __clz(uint32_t x) {
    return x ? __builtin_clz(x) : 32;
}
static inline int __ffs(uint32_t x) {
    return __builtin_ffs((int)x);
}
static inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t both = (uint64_t)b << 32 | a;
    uint32_t y = 0;
    for (int i = 0; i < 4; i++)
        y |= (uint32_t)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return y;
}

/* ---- memory ---- */

template <class T> static inline T __ldcg(const T *at) {
    return *at;
}
template <class T> static inline T __ldg(const T *at) {
    return *at;
}
template <class T> static inline void __stcg(T *at, T x) {
    *at = x;
}
template <class T> static inline T atomicCAS(T *at, T old, T x) {
    emulated::let_others_run(); /* between a look and this */
    const T before = *at;
    if (before == old)
        *at = x;
    return before;
}
template <class T> static inline T atomicExch(T *at, T x) {
    const T before = *at;
    *at = x;
    return before;
}
template <class T> static inline T atomicAdd(T *at, T x) {
    T before = *at;
    *at += x;
    return before;
}
static inline uint32_t atomicOr(uint32_t *at, uint32_t x) {
    uint32_t before = *at;
    *at |= x;
    return before;
}
static inline void __threadfence(void) {
}
static inline void __threadfence_system(void) {
}
/* Addresses in shared memory are offsets in a block's; whose, is in the upper bits. */
#define EMULATED_RANK_SHIFT 24
static inline uint32_t shared_address(const void *at, uint32_t rank) {
    return (uint32_t)((const uint8_t *)at - emulated::shared_of(emulated::running->block->rank)) |
           rank << EMULATED_RANK_SHIFT;
}
static inline uint32_t __cvta_generic_to_shared(const void *at) {
    return shared_address(at, emulated::running->block->rank);
}

/* ---- meetings ---- */

static inline void __syncthreads(void) {
    emulated::meet_block();
}
static inline void __syncwarp(void) {
    emulated::meet_warp({});
}

template <class T> static inline struct emulated::packet packet_of(T x) {
    struct emulated::packet p = {};
    static_assert(sizeof x <= sizeof p, "fits");
    memcpy(&p, &x, sizeof x);
    return p;
}
template <class T> static inline T value_of(const struct emulated::packet &p) {
    T x;
    memcpy(&x, &p, sizeof x);
    return x;
}
template <class T> static inline T __shfl_sync(uint32_t, T x, int lane) {
    return value_of<T>(emulated::meet_warp(packet_of(x))[lane & 31]);
}
template <class T> static inline T __shfl_xor_sync(uint32_t, T x, int with) {
    return value_of<T>(emulated::meet_warp(packet_of(x))[(threadIdx.x ^ (uint32_t)with) & 31]);
}
template <class T> static inline T __shfl_up_sync(uint32_t, T x, uint32_t by) {
    const uint32_t lane = threadIdx.x % 32;
    return value_of<T>(emulated::meet_warp(packet_of(x))[lane >= by ? lane - by : lane]);
}
static inline uint32_t __ballot_sync(uint32_t, bool x) {
    const struct emulated::packet *p = emulated::meet_warp(packet_of((uint32_t)x));
    uint32_t all = 0;
    for (int i = 0; i < 32; i++)
        all |= p[i].w[0] << i;
    return all;
}
static inline int __any_sync(uint32_t, bool x) {
    return __ballot_sync(0, x) != 0;
}
static inline int __all_sync(uint32_t, bool x) {
    return __ballot_sync(0, x) == UINT32_MAX;
}
template <class T, class F> static inline T reduce(T x, F join) {
    const struct emulated::packet *p = emulated::meet_warp(packet_of(x));
    T y = value_of<T>(p[0]);
    for (int i = 1; i < 32; i++)
        y = join(y, value_of<T>(p[i]));
    return y;
}
template <class T> static inline T __reduce_add_sync(uint32_t, T x) {
    return reduce(x, [](T a, T b) { return a + b; });
}
template <class T> static inline T __reduce_or_sync(uint32_t, T x) {
    return reduce(x, [](T a, T b) { return a | b; });
}
template <class T> static inline T __reduce_max_sync(uint32_t, T x) {
    return reduce(x, [](T a, T b) { return a < b ? b : a; });
}
template <class T> static inline T __reduce_min_sync(uint32_t, T x) {
    return reduce(x, [](T a, T b) { return b < a ? b : a; });
}

/* ---- the runtime ---- */

enum cudaError_t {
    cudaSuccess,
    cudaErrorInvalidValue,
    cudaErrorMemoryAllocation,
    cudaErrorInvalidConfiguration = 9
};
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost };
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize,
    cudaFuncAttributePreferredSharedMemoryCarveout,
    cudaFuncAttributeNonPortableClusterSizeAllowed
};
enum { cudaSharedmemCarveoutMaxShared = 100 };
enum cudaLaunchAttributeID {
    cudaLaunchAttributeProgrammaticStreamSerialization,
    cudaLaunchAttributeClusterDimension
};
typedef struct emulated_stream *cudaStream_t;
struct cudaDeviceProp {
    int multiProcessorCount;
};
struct cudaFuncAttributes {
    int ptxVersion;
};
struct cudaLaunchAttribute {
    enum cudaLaunchAttributeID id;
    struct {
        int programmaticStreamSerializationAllowed;
        struct uint3 clusterDim;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    struct cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};

static inline const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaSuccess                 ? "no error"
           : error == cudaErrorMemoryAllocation ? "no memory"
                                                : "a kernel cannot be launched so";
}
static inline cudaError_t cudaGetLastError(void) {
    return cudaSuccess;
}
static inline cudaError_t cudaGetDeviceCount(int *ret) {
    *ret = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); /* as compiled */
    return cudaSuccess;
}
static inline cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *ret, int) {
    const char *text = getenv("LK_EMULATED_PROCESSORS");
    ret->multiProcessorCount = text ? atoi(text) : 132;
    return cudaSuccess;
}
static inline cudaError_t cudaGetDevice(int *ret) {
    *ret = 0;
    return cudaSuccess;
}
static inline cudaError_t cudaDeviceGetAttribute(int *ret, enum cudaDeviceAttr, int) {
    *ret = (int)emulated::shared_most();
    return cudaSuccess;
}
template <class F>
static inline cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *ret, F *) {
    ret->ptxVersion = emulated::arch() / 10;
    return cudaSuccess;
}
template <class F>
static inline cudaError_t cudaFuncSetAttribute(F *kernel, enum cudaFuncAttribute what, size_t x) {
    return what != cudaFuncAttributeMaxDynamicSharedMemorySize ||
                   emulated::allow_shared((const void *)kernel, (uint32_t)x)
               ? cudaSuccess
               : cudaErrorInvalidValue;
}
template <class F>
static inline cudaError_t cudaOccupancyMaxActiveClusters(int *ret, F *,
                                                         const cudaLaunchConfig_t *config) {
    *ret = (int)(132 / config->attrs[config->numAttrs - 1].val.clusterDim.x);
    return cudaSuccess;
}
template <class T> static inline cudaError_t cudaMalloc(T **ret, size_t bytes) {
    *ret = (T *)aligned_alloc(256, (bytes + 255) / 256 * 256);
    return *ret ? cudaSuccess : cudaErrorMemoryAllocation;
}
static inline cudaError_t cudaFree(void *at) {
    free(at);
    return cudaSuccess;
}
static inline cudaError_t cudaMemset(void *at, int x, size_t bytes) {
    memset(at, x, bytes);
    return cudaSuccess;
}
static inline cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
    memcpy(to, from, bytes);
    return cudaSuccess;
}
static inline cudaError_t cudaDeviceSynchronize(void) {
    return cudaSuccess;
}
template <class... P, class... A>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(P...),
                                             A... args) {
    struct emulated::grid grid = {config->gridDim, config->blockDim, 1,
                                  (uint32_t)config->dynamicSmemBytes};
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
            grid.team = config->attrs[i].val.clusterDim.x;
    if (!emulated::may_share((const void *)kernel, grid.shared_bytes))
        return cudaErrorInvalidValue;
    emulated::run_grid(&grid, [&] { kernel(args...); });
    return cudaSuccess;
}

#endif
