/* SPDX-License-Identifier: MIT */
/*
 * store.cu - keys and values by slot, copies of pages, and the whole step's order of launches.
 *
 * Appending the rows of a step is part of the scan (scan.cu); what is here serves tables and forks.
 */
#include "device.cuh"

__global__ void __launch_bounds__(256)
    write_kernel(const __grid_constant__ struct lk_pool_view pool, uint32_t layer, uint32_t tokens,
                 const uint4 *k, const uint4 *v, const uint64_t *slots) {
    const struct lk_geometry *g = &pool.geometry;
    const uint32_t vectors = g->head_dim * 2 / 16, lane = threadIdx.x % 32;

    wait_for_previous();
    for (uint64_t task = blockIdx.x * 8 + threadIdx.x / 32; task < (uint64_t)tokens * g->kv_heads;
         task += gridDim.x * 8) {
        uint64_t slot = slots[task / g->kv_heads], at;
        uint32_t head = (uint32_t)(task % g->kv_heads);
        uint4 *keys;

        if (slot == UINT64_MAX)
            continue;
        keys = (uint4 *)lk_page_keys_device(pool, layer, slot / g->page_tokens, head);
        at = slot % g->page_tokens * vectors;
        for (uint32_t x = lane; x < vectors; x += 32) {
            keys[at + x] = k[task * vectors + x];
            keys[(uint64_t)g->page_tokens * vectors + at + x] = v[task * vectors + x];
        }
    }
}

int lk_cuda_write(const struct lk_write *write, void *stream) {
    const struct lk_pool_view *pool = write->pool;
    uint32_t warps = write->tokens * pool->geometry.kv_heads, blocks = (warps + 7) / 8;

    if (!warps)
        return 0;
    return launch(write_kernel, dim3(blocks < 4096 ? blocks : 4096), 256, 0, stream, *pool,
                  write->layer, write->tokens, (const uint4 *)write->k, (const uint4 *)write->v,
                  write->slots);
}

__device__ void copy_bytes(uint8_t *to, const uint8_t *from, uint64_t bytes) {
    for (uint64_t i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16)
        *(uint4 *)(to + i) = *(const uint4 *)(from + i);
}

/* A block a copy and KV head. */
__global__ void __launch_bounds__(256)
    copy_kernel(const __grid_constant__ struct lk_pool_view p,
                const struct lk_cuda_copy_item *items) {
    const struct lk_cuda_copy_item item = items[blockIdx.x];
    const uint64_t head = blockIdx.y, plane = (uint64_t)item.layer * p.geometry.kv_heads + head;
    const uint64_t from = item.from, to = item.to;
    const struct lk_layout *l = &p.layout;

    wait_for_previous();
    copy_bytes(lk_page_keys_device(p, item.layer, to, head),
               lk_page_keys_device(p, item.layer, from, head), l->head_bytes);
    copy_bytes(p.coarse + (plane * p.pages + to) * l->coarse_stride,
               p.coarse + (plane * p.pages + from) * l->coarse_stride, l->coarse_stride);
    copy_bytes(p.fine + (plane * p.pages + to) * l->fine_stride,
               p.fine + (plane * p.pages + from) * l->fine_stride, l->fine_stride);
    if (item.quad)
        copy_bytes(p.super + (plane * (p.pages / 4) + to / 4) * l->super_stride,
                   p.super + (plane * (p.pages / 4) + from / 4) * l->super_stride, l->super_stride);
}

int lk_cuda_copy(const struct lk_pool_view *pool, const struct lk_cuda_copy_item *items,
                 uint32_t count, void *stream) {
    if (!count)
        return 0;
    return launch(copy_kernel, dim3(count, pool->geometry.kv_heads), 256, 0, stream, *pool, items);
}

int lk_cuda_run(const struct lk_cuda_step *step, void *stream) {
    bool twice = step->scans & (1u << LK_NESTED | 1u << LK_TREE);
    int error = lk_cuda_scan(step, stream);

    if (!error && twice)
        error = lk_cuda_prune(step, stream);
    if (!error && twice)
        error = lk_cuda_rescan(step, stream);
    if (!error && step->scans)
        error = lk_cuda_select(step, stream);
    return error ? error : lk_cuda_attend(step, stream);
}

uint32_t lk_cuda_shared_least(const struct lk_geometry *g) {
    return max(max(max(lk_cuda_scan_least(g), lk_cuda_rescan_least(g)),
                   max(lk_cuda_select_least(), lk_cuda_attend_least(g))),
               lk_cuda_build_least(g));
}
