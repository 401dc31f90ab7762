/* SPDX-License-Identifier: MIT */
/*
 * team.cuh - blocks that work on one KV head together: a cluster, which reads and writes each
 * other's shared memory, or a single block.
 *
 * Idea: the blocks of a team lie along x of the grid, one team a grid row; their number is
 * gridDim.x. With one block every call is a block's own, so code for devices without clusters is
 * the same code.
 *
 * Invariants: all threads of all blocks of a team call the barriers, and no block leaves while
 * another may still reach its memory. A barrier orders all memory accesses of the team, global ones
 * as well.
 */
#ifndef LK_CUDA_TEAM_CUH
#define LK_CUDA_TEAM_CUH

#include "device.cuh"

#define LK_TEAM_MOST 16 /* clusters of more than 8 blocks must be asked for */

__device__ __forceinline__ uint32_t team_size() {
    return gridDim.x;
}
__device__ __forceinline__ uint32_t team_rank() {
    return blockIdx.x;
}

__device__ __forceinline__ void team_arrive() {
#if __CUDA_ARCH__ >= 900
    if (team_size() > 1)
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
/* The same after __syncthreads(): one warp's arrival orders what all have written. */
__device__ __forceinline__ void team_arrive_synced() {
#if __CUDA_ARCH__ >= 900
    if (team_size() == 1)
        return;
    if (threadIdx.x / 32 == blockDim.x / 32 - 1)
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    else
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void team_wait() {
#if __CUDA_ARCH__ >= 900
    if (team_size() > 1) {
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        return;
    }
#endif
    __syncthreads();
}
__device__ __forceinline__ void team_barrier() {
    team_arrive();
    team_wait();
}

/* Address in block `rank`'s shared memory of what lies at `own` in this block's. */
__device__ __forceinline__ uint32_t team_address(const void *own, uint32_t rank) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(own);
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
#endif
    return address;
}

#if __CUDA_ARCH__ >= 900
#define LK_TEAM_SPACE "shared::cluster"
#else
#define LK_TEAM_SPACE "shared"
#endif

__device__ __forceinline__ void team_put(uint32_t address, uint32_t x) {
    asm volatile("st." LK_TEAM_SPACE ".u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ uint32_t team_add(uint32_t address, uint32_t x) {
    uint32_t before;
    asm volatile("atom." LK_TEAM_SPACE ".add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "r"(address), "r"(x)
                 : "memory");
    return before;
}
__device__ __forceinline__ void team_or(uint32_t address, uint32_t x) {
    asm volatile("red." LK_TEAM_SPACE ".or.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

/* ---- numbers sent by the copy engine's way: no barrier of the team, and no fence ---- */

/* By one thread, before a team barrier, ordered or not: `here` can be waited for. */
__device__ __forceinline__ void team_open(uint64_t *here) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;\n"
        "fence.mbarrier_init.release.cluster;" ::"r"((uint32_t)__cvta_generic_to_shared(here))
        : "memory");
#endif
}

/* By one thread, once: how many bytes come in all, before or after the first do. */
__device__ __forceinline__ void team_expect(uint64_t *here, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(here)),
                 "r"(bytes)
                 : "memory");
#endif
}

/* To block `rank`'s memory, at the place of `to` in this block's. */
__device__ __forceinline__ void team_send(void *to, uint4 x, uint64_t *here, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
    if (team_size() == 1) { /* no cluster: such stores are not allowed */
        *(uint4 *)to = x;
        return;
    }
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], "
                 "{%1,%2,%3,%4}, [%5];" ::"r"(team_address(to, rank)),
                 "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(team_address(here, rank))
                 : "memory");
#else
    *(uint4 *)to = x;
#endif
}

/* The same of a word. */
__device__ __forceinline__ void team_send_word(void *to, uint32_t x, uint64_t *here,
                                               uint32_t rank) {
#if __CUDA_ARCH__ >= 900
    if (team_size() == 1) {
        *(uint32_t *)to = x;
        return;
    }
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
            team_address(to, rank)),
        "r"(x), "r"(team_address(here, rank))
        : "memory");
#else
    *(uint32_t *)to = x;
#endif
}

/* The same of a word that is added to the one there. In a team of several. */
__device__ __forceinline__ void team_send_sum(uint32_t *to, uint32_t x, uint64_t *here,
                                              uint32_t rank) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add"
                 ".u32 [%0], %1, [%2];" ::"r"(team_address(to, rank)),
                 "r"(x), "r"(team_address(here, rank))
                 : "memory");
#endif
}

/* All threads; a warp goes on when everything is here. */
__device__ __forceinline__ void team_receive(uint64_t *here) {
#if __CUDA_ARCH__ >= 900
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(here);
    uint32_t done = 0;
    while (team_size() > 1 && !done)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, "
                     "[%1], 0; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(address)
                     : "memory");
#endif
    if (team_size() == 1)
        __syncthreads();
}

#endif
