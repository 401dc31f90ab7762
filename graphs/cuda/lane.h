/* SPDX-License-Identifier: MIT */
/*
 * lane.h - the captured graphs of a pool, for one of the places in flight.
 *
 * Idea: a graph is feed -> append, scan, prune, rescan, select, attend -> mark. It bakes in the
 * pool, the addresses of this lane's feed, descriptor block and results, and how many rows it can
 * hold (a bucket); all else is read when it is replayed. There is one for each bucket and each set
 * of scan modes worth having apart: exact rows skip scoring, a full scan skips the second pass.
 *
 * Kernels read the descriptor block before they wait for their predecessor: the feed lets the scan
 * start when that block is there (feed.h), and so all that follow.
 *
 * Thread: whoever owns the engine. Does not launch (cuda_engine.c) nor own the pool.
 */
#ifndef LK_CUDA_LANE_H
#define LK_CUDA_LANE_H

#include <cuda_runtime_api.h>

#include "../../kernels/cuda/cuda.h"
#include "../../kernels/cuda/feed.h"
#include "../backend.h"

#define LK_LANE_BUCKETS  9 /* 1, 2, 4 .. LK_BATCH_ROWS_MAX */
#define LK_LANE_VARIANTS 5 /* exact; full; coarse; nested and tree; any */

struct lk_cuda_lane {
    struct lk_cuda_feed *feed;      /* pinned host memory, as the next four */
    struct lk_cuda_clock *clock;    /* of the step that runs */
    struct lk_cuda_batch *block;    /* filled by the host */
    struct lk_cuda_signal *signals; /* [LK_CUDA_SIGNALS_MAX], of the step that runs */
    struct lk_head_out *results;    /* [LK_BATCH_ROWS_MAX][kv_heads], written by the device */
    struct lk_cuda_batch *device;
    struct lk_cuda_marks *marks;           /* device: of the step that runs */
    uint32_t index[LK_BATCH_ROWS_MAX];     /* of the block's rows in the batch */
    struct lk_row rows[LK_BATCH_ROWS_MAX]; /* the same with the device's pointers */
    uint32_t count;
    uint64_t row_bytes;   /* that the rows' feed will bring at most */
    uint64_t piece_bytes; /* of the feed that is being written */
    cudaGraphExec_t graph[LK_LANE_VARIANTS][LK_LANE_BUCKETS];
};

struct lk_cuda_lane_options {
    const struct lk_pool_view *pool; /* device pointers */
    uint32_t *sync; /* lk_cuda_sync_words() words, shared: one step runs at a time */
    uint64_t *word; /* host: where marks go */
    uint32_t processors;
    cudaStream_t stream; /* to capture on */
};

/* Takes memory and captures all graphs. -> 0 or -errno with a sentence in why; close() undoes what
 * there is. */
int lk_cuda_lane_open(const struct lk_cuda_lane_options *options, struct lk_cuda_lane *lane,
                      char *why, size_t why_bytes);
void lk_cuda_lane_close(struct lk_cuda_lane *lane);

/* The graph for the rows in lane->rows. */
cudaGraphExec_t lk_cuda_lane_graph(const struct lk_cuda_lane *lane);
/* Fences that the step's mark raises. */
void lk_cuda_lane_signals(struct lk_cuda_lane *lane, const struct lk_signal *signals,
                          uint32_t count);
/* Notes pieces for the feed, cut so that its blocks share the work. */
void lk_cuda_lane_feed_begin(struct lk_cuda_lane *lane, uint64_t serial, uint64_t total_bytes);
void lk_cuda_lane_feed(struct lk_cuda_lane *lane, const void *from, void *to, uint64_t bytes);

#endif
