/* SPDX-License-Identifier: MIT */
/*
 * boxes.cuh - rectangles of 16-bit numbers that are copied to shared memory beside the arithmetic.
 *
 * Idea: the numbers lie as [blocks][rows][channels]. A box is BOX_CHANNELS of some rows; in shared
 * memory its rows follow each other, 128 bytes each, and the 16-byte chunks of row i are permuted
 * by i % 8, so that no eight rows that are read at once meet in a bank. Devices of compute
 * capability 9.0 have an engine for it, told by a tensor map; older ones do the same by copies of
 * 16 bytes.
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

/* [blocks][rows][channels] at `base`, in boxes of `box_rows`. -> 0 or a cudaError_t */
static inline int make_boxes(const void *base, uint32_t channels, uint32_t rows, uint64_t blocks,
                             uint32_t box_rows, struct boxes *ret) {
    const cuuint64_t dims[3] = {channels, rows, blocks};
    const cuuint64_t strides[2] = {2ull * channels, 2ull * channels * rows};
    const cuuint32_t box[3] = {BOX_CHANNELS, box_rows, 1}, step[3] = {1, 1, 1};
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
        &ret->map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, (void *)base, dims, strides, box, step,
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

/* The box at (channel, row) of a block, to `to`. */
__device__ __forceinline__ void start_box(const struct boxes &b, uint32_t to, uint32_t channel,
                                          uint32_t row, uint32_t block, uint32_t bar) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier"
                 "::complete_tx::bytes [%0], [%1, {%2,%3,%4}], [%5];" ::"r"(to),
                 "l"(&b.map), "r"(channel), "r"(row), "r"(block), "r"(bar)
                 : "memory");
#else
    const uint8_t *from =
        b.base + ((uint64_t)block * b.block_rows + row) * b.row_bytes + 2 * channel;

    for (uint32_t i = 0; i < 8 * b.box_rows; i++) {
        const uint32_t in = i / 8, chunk = i % 8;
        copy_async(to + in * BOX_ROW + 16 * (chunk ^ in % 8),
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
