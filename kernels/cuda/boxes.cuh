/* SPDX-License-Identifier: MIT */
/*
 * boxes.cuh - rectangles of 16-bit numbers that are copied to shared memory beside the arithmetic.
 *
 * Idea: the numbers lie as [blocks][rows][channels]. A box is some rows of a block. In shared
 * memory it is [columns][rows], a column BOX_CHANNELS of the channels; there its rows follow each
 * other, 128 bytes each, and the 16-byte chunks of row i are permuted by i % 8, so that no eight
 * rows that are read at once meet in a bank. Devices of compute capability 9.0 have an engine for
 * it, told by a tensor map; older ones do the same by copies of 16 bytes.
 *
 * One thread starts the boxes that a barrier waits for: expect_boxes(), start_box() for each,
 * boxes_started(). They are one arrival.
 */
#ifndef LK_CUDA_BOXES_CUH
#define LK_CUDA_BOXES_CUH

#include <cudaTypedefs.h>

#include "ptx.cuh"

#define BOX_CHANNELS 64
#define BOX_ROW      (2 * BOX_CHANNELS) /* bytes */
#define BOX_ALIGN    1024               /* of its place in shared memory */

struct boxes {
    CUtensorMap map; /* not set where the device has no such engine */
    const uint8_t *base;
    uint32_t row_bytes, block_rows, box_rows;
};

/* [blocks][rows][channels] at `base`, channels a multiple of BOX_CHANNELS, in boxes of `box_rows`.
 * -> 0 or a cudaError_t */
static inline int make_boxes(const void *base, uint32_t channels, uint32_t rows, uint64_t blocks,
                             uint32_t box_rows, struct boxes *ret) {
    const uint32_t columns = channels / BOX_CHANNELS;
    const cuuint64_t dims[4] = {BOX_CHANNELS, rows, columns, blocks};
    const cuuint64_t strides[3] = {2ull * channels, BOX_ROW, 2ull * channels * rows};
    const cuuint32_t box[4] = {BOX_CHANNELS, box_rows, columns, 1}, step[4] = {1, 1, 1, 1};
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    void *entry = NULL;
    int device = 0, major = 0, error;

    ret->base = (const uint8_t *)base;
    ret->row_bytes = 2 * channels;
    ret->block_rows = rows;
    ret->box_rows = box_rows;
    error = cudaGetDevice(&device);
    if (!error)
        error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error || major < 9)
        return error;
    error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                             cudaEnableDefault, &found);
    if (error || found != cudaDriverEntryPointSuccess)
        return error ? error : (int)cudaErrorNotSupported;
    return (int)((PFN_cuTensorMapEncodeTiled_v12000)entry)(
        &ret->map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, (void *)base, dims, strides, box, step,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

/* Long before the first box: the engine reads the map. */
__device__ __forceinline__ void prefetch_boxes(const struct boxes &b) {
#if __CUDA_ARCH__ >= 900
    asm volatile("prefetch.tensormap [%0];" ::"l"(&b.map) : "memory");
#endif
}

/* `bytes` are on their way; 0: none. */
__device__ __forceinline__ void expect_boxes(uint32_t bar, uint32_t bytes) {
    bar_expect(bar, bytes);
}

/* The box of a block's rows from `row` on, to `to`. `priority`: LK_EVICT_... */
__device__ __forceinline__ void start_box(const struct boxes &b, uint32_t to, uint32_t row,
                                          uint32_t block, uint32_t bar, uint64_t priority) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier"
        "::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2,%3,%2,%4}], [%5], %6;" ::"r"(to),
        "l"(&b.map), "r"(0), "r"(row), "r"(block), "r"(bar), "l"(priority)
        : "memory");
#else
    const uint8_t *from = b.base + ((uint64_t)block * b.block_rows + row) * b.row_bytes;
    const uint32_t chunks = b.row_bytes / 16;

    for (uint32_t i = 0; i < chunks * b.box_rows; i++) {
        const uint32_t in = i / chunks, chunk = i % chunks, column = chunk / 8;
        copy_async(to + (column * b.box_rows + in) * BOX_ROW + 16 * (chunk % 8 ^ in % 8),
                   from + (uint64_t)in * b.row_bytes + 16 * chunk);
    }
#endif
}

__device__ __forceinline__ void boxes_started(uint32_t bar) {
#if __CUDA_ARCH__ < 900
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
#endif
}

#endif
