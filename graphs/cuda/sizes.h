/* SPDX-License-Identifier: MIT */
/*
 * sizes.h - what a row takes on the device, in bytes, and which geometries it takes. Pure; any
 * thread.
 *
 * A row's part of the workspace holds, in this order: its block table, its queries, the keys and
 * values it appends (all three brought there by the feed, see feed.h), then what its kernels use.
 */
#ifndef LK_CUDA_SIZES_H
#define LK_CUDA_SIZES_H

#include "../backend.h"

#define LK_CUDA_ALIGN UINT64_C(128)
/* Keys and values of longer appends are read where the client has them: once, by the kernel that
 * stores them. */
#define LK_CUDA_FEED_TOKENS 64

struct lk_cuda_share {                       /* offsets from the row's part */
    uint64_t table, q, k, v, rest;           /* rest: of what kernels use, and so all that is fed */
    uint64_t entries;                        /* of the table */
    uint64_t table_bytes, q_bytes, kv_bytes; /* multiples of 16; kv_bytes 0: not fed */
};

struct lk_cuda_share lk_cuda_share_of(const struct lk_row *row);

/* -> 0, or -ENOTSUP with a sentence: a pool of the geometry cannot lie on `gpu`, its number and
 * name. A block of shared memory: `least` bytes are needed, `lent` there. */
int lk_cuda_geometry_refused(const struct lk_geometry *geometry, const char *gpu, uint32_t least,
                             uint32_t lent, char *why, size_t why_bytes);

#endif
