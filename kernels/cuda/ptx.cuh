/* SPDX-License-Identifier: MIT */
/*
 * ptx.cuh - instructions that CUDA C++ has no name for, and what differs between devices.
 *
 * Idea: all inline assembly and all questions about the architecture of kernels that compute are
 * here and in team.cuh; the kernels themselves are plain C++. So tests can put other bodies in the
 * place of these and run the kernels without a device (tests/cuda/emulator).
 *
 * Where an instruction is of compute capability 9.0, older devices do the same by what they have,
 * or nothing where it was a hint. Addresses in shared memory are 32 bits, as
 * __cvta_generic_to_shared() gives them.
 */
#ifndef LK_CUDA_PTX_CUH
#define LK_CUDA_PTX_CUH

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdint.h>

/* The block's dynamic shared memory. */
#define SHARED_BYTES(name, alignment)                                                              \
    extern __shared__ __align__(alignment)                                                         \
    uint8_t name[]

/* What the second cache gives up first, as createpolicy says it. Records, and keys and values that
 * are read once a step, go before all else: they would push out the kernels' code, which then comes
 * late, a kernel at a time. */
#define LK_EVICT_FIRST 0x12f0000000000000ull
#define LK_EVICT_USUAL 0x10f0000000000000ull /* as without a hint; "normal", 0x16f, is slower */

/* ---- programmatic dependent launch: a kernel may start before the one it reads from ends ---- */

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* ---- registers of a thread: said by all warps of four that begin at a multiple of four ---- */

template <int N> __device__ __forceinline__ void lower_registers() {
#if __CUDA_ARCH__ >= 900
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}
template <int N> __device__ __forceinline__ void raise_registers() {
#if __CUDA_ARCH__ >= 900
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

/* ---- copies to shared memory that run beside the arithmetic; groups are a thread's own ---- */

__device__ __forceinline__ void copy_async(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
/* The same of what is read once a step, by those lanes of a warp that want it. With a predicate of
 * its own: else CUDA 13.0 holds a part of `to` that lanes have in common in the same register as a
 * half of the hint, and devices then met an illegal instruction. */
__device__ __forceinline__ void copy_once(bool wanted, uint32_t to, const void *from) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %0, 0; "
        "@p cp.async.cg.shared.global.L2::cache_hint [%1], [%2], 16, %3;}" ::"r"((uint32_t)wanted),
        "r"(to), "l"(from), "l"(LK_EVICT_FIRST)
        : "memory");
#else
    if (wanted)
        copy_async(to, from);
#endif
}
__device__ __forceinline__ void copy_word(uint32_t *to, const uint32_t *from) {
    asm volatile(
        "cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((uint32_t)__cvta_generic_to_shared(to)),
        "l"(from)
        : "memory");
}
__device__ __forceinline__ void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* ---- tensor cores. m16n8: lane = 4 r + c holds rows r and r + 8, columns 2c and 2c + 1 ---- */

__device__ __forceinline__ void mma_u8s8(int d[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},"
                 "{%8,%9},{%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_s8s8(int d[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},"
                 "{%8,%9},{%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_f16_k8(float d[4], uint32_t a0, uint32_t a1, uint32_t b0) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},"
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(b0));
}
template <bool BF16>
__device__ __forceinline__ void mma_k16(float d[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                        uint32_t a3, uint32_t b0, uint32_t b1) {
    if constexpr (BF16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},"
                     "{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},"
                     "{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
/* m8n8k4: lane 4 r + c holds of A row r, column c, of B row c, column r, of D row r, columns 2c and
 * 2c + 1. */
__device__ __forceinline__ void mma_f64(double d[2], double a, double b) {
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1},{%2},{%3},{%0,%1};"
                 : "+d"(d[0]), "+d"(d[1])
                 : "d"(a), "d"(b));
}
/* 8 x 8 of 16 bits: lane 4 r + c gives row r, columns 2c, 2c + 1 and takes column r, rows 2c, 2c +
 * 1. */
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
/* Four 8 x 8 of 16 bits in shared memory: lane i says where row i % 8 of number i / 8 is, and takes
 * of each row r, columns 2c, 2c + 1 (transposed: column r, rows 2c, 2c + 1). */
__device__ __forceinline__ void load_matrices(uint32_t x[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t x[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

/* ---- products by four warps, the first of which is a multiple of four ----
 *
 * m64: rows 16 i to 16 i + 15 of A and D are warp i's, held as those of m16n8. B lies in shared
 * memory in rows of 64 numbers, chunks permuted (boxes.cuh), eight rows together. All four warps
 * call, in the same order: wide_begin(), products, wide_end(); until then A and D are in use. */

/* Do this device's warps have them? */
__device__ __forceinline__ constexpr bool wide_products() {
#if __CUDA_ARCH__ >= 900
    return true;
#else
    return false;
#endif
}
/* Says where B is: each eight rows `step` bytes after the eight before. */
__device__ __forceinline__ uint64_t wide_matrix(uint32_t address, uint32_t step) {
    return (uint64_t)1 << 62 | (uint64_t)(step >> 4) << 32 | 1 << 16 | (address & 0x3ffff) >> 4;
}
/* `bytes` on; a multiple of 16. */
__device__ __forceinline__ uint64_t wide_offset(uint64_t b, uint32_t bytes) {
    return b + (bytes >> 4);
}
__device__ __forceinline__ void wide_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wide_end() {
#if __CUDA_ARCH__ >= 900
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
}
#define LK_FLOATS(row) "+f"(d[row][0]), "+f"(d[row][1]), "+f"(d[row][2]), "+f"(d[row][3])
#define LK_WIDE_16(type)                                                                           \
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type                       \
                 " {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9,%10,%11},%12,1,1,1,0;"                         \
                 : LK_FLOATS(0), LK_FLOATS(1)                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define LK_WIDE_64(type)                                                                           \
    asm volatile(                                                                                  \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                \
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"         \
        "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},{%32,%33,%34,%35},%36,1,1,1,1;"                  \
        : LK_FLOATS(0), LK_FLOATS(1), LK_FLOATS(2), LK_FLOATS(3), LK_FLOATS(4), LK_FLOATS(5),      \
          LK_FLOATS(6), LK_FLOATS(7)                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
/* D[64][16] += A[64][16] x B's rows as columns, numbers 0 to 15 of each. */
template <bool BF16>
__device__ __forceinline__ void wide_rows(float d[2][4], const uint32_t a[4], uint64_t b) {
#if __CUDA_ARCH__ >= 900
    if constexpr (BF16)
        LK_WIDE_16("bf16");
    else
        LK_WIDE_16("f16");
#endif
}
/* D[64][64] += A[64][16] x B[16][64]. */
template <bool BF16>
__device__ __forceinline__ void wide_columns(float d[8][4], const uint32_t a[4], uint64_t b) {
#if __CUDA_ARCH__ >= 900
    if constexpr (BF16)
        LK_WIDE_64("bf16");
    else
        LK_WIDE_64("f16");
#endif
}

/* ---- hints ---- */

/* The line to L2; nothing is read, so that it may be written still. */
__device__ __forceinline__ void prefetch_line(const void *at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}
__device__ __forceinline__ void prefetch_bytes(const void *at, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes));
#endif
}

/* ---- numbers, and the device's clock ---- */

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ uint64_t device_ns(void) {
    uint64_t x;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(x));
    return x;
}

/* -> the word before; what others wrote before they added is seen. */
__device__ __forceinline__ uint32_t add_in_order(uint32_t *word, uint32_t x) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(word), "r"(x)
                 : "memory");
    return before;
}

/* Who sees it sees what was written, or seen, before. */
__device__ __forceinline__ void store_after(uint32_t *word, uint32_t x) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(x) : "memory");
}
/* What others wrote before they wrote the word, or added to it, is seen. */
__device__ __forceinline__ uint32_t load_in_order(const uint32_t *word) {
    uint32_t x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(word) : "memory");
    return x;
}

/* ---- barriers in shared memory, by their addresses there ---- */

/* A phase ends when `arrivals` have come, and the bytes they spoke of. */
__device__ __forceinline__ void bar_init(uint32_t bar, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void bar_arrive(uint32_t bar) {
    asm volatile("{.reg .b64 t; mbarrier.arrive.shared::cta.b64 t, [%0];}" ::"r"(bar) : "memory");
}
/* Has the phase ended? */
__device__ __forceinline__ bool bar_test(uint32_t bar, uint32_t parity) {
    uint32_t done;

    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; "
                 "selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return done;
}
__device__ __forceinline__ void bar_wait(uint32_t bar, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    uint32_t done;

    do
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(bar), "r"(parity)
                     : "memory");
    while (!done);
#else
    while (!bar_test(bar, parity))
        ;
#endif
}
/* By who arrives: `bytes` are on their way. */
__device__ __forceinline__ void bar_expect(uint32_t bar, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
#endif
}
/* After the copies that bar_expect() spoke of were started: old devices' copies count nothing. */
__device__ __forceinline__ void bar_copies_started(uint32_t bar) {
#if __CUDA_ARCH__ < 900
    copy_commit();
    copy_wait<0>();
    bar_arrive(bar);
#endif
}
/* By who made barriers: the copy engine sees them. */
__device__ __forceinline__ void bar_inits_done() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
/* `threads` of the block meet, the first ones; the others do not. */
__device__ __forceinline__ void bar_some(uint32_t threads) {
    asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}

/* `bytes` that are read once a step to shared memory, counted by the barrier. The copy engine takes
 * them. */
__device__ __forceinline__ void start_copy(uint32_t to, const uint8_t *from, uint32_t bytes,
                                           uint32_t bar) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar), "l"(LK_EVICT_FIRST)
                 : "memory");
#else
    for (uint32_t i = 0; i < bytes; i += 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i), "l"(from + i)
                     : "memory");
#endif
}

#endif
