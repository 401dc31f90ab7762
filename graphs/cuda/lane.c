/* SPDX-License-Identifier: MIT */
/*
 * lane.c - see lane.h.
 */
#include "lane.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "memory.h"

#define BIT(mode) (1U << (mode))

_Static_assert(sizeof(struct lk_signal) == sizeof(struct lk_cuda_signal) &&
                   LK_BATCH_SIGNALS_MAX <= LK_CUDA_SIGNALS_MAX,
               "a batch's signals are the mark's");
_Static_assert(sizeof(struct lk_cuda_batch) % 16 == 0, "the feed brings whole vectors of it");

static const uint32_t scans_of[LK_LANE_VARIANTS] = {
    0,
    BIT(LK_FULL),
    BIT(LK_COARSE),
    BIT(LK_NESTED) | BIT(LK_TREE),
    BIT(LK_FULL) | BIT(LK_COARSE) | BIT(LK_NESTED) | BIT(LK_TREE),
};

static int refuse(cudaError_t error, const char *step, char *why, size_t why_bytes) {
    if (!error)
        return 0;
    snprintf(why, why_bytes, "%s: %s", step, cudaGetErrorString(error));
    cudaGetLastError(); /* it is told */
    return error == cudaErrorMemoryAllocation ? -ENOMEM : -EIO;
}

/* ---- capture ---- */

static uint32_t feed_blocks(uint32_t bucket) {
    return bucket < 32 ? 4 + 8 * bucket : 264;
}

static cudaError_t record(const struct lk_cuda_lane_options *o, const struct lk_cuda_lane *lane,
                          const struct lk_cuda_step *step, cudaGraph_t *ret) {
    const uint64_t block =
        offsetof(struct lk_cuda_batch, row) + step->bucket * sizeof *lane->block->row;
    const struct lk_cuda_bring bring = {.feed = lane->feed,
                                        .from = lane->block,
                                        .to = lane->device,
                                        .first_bytes = (block + 15) / 16 * 16,
                                        .marks = lane->marks,
                                        .clock = lane->clock,
                                        .blocks = feed_blocks(step->bucket)};
    cudaError_t error = cudaStreamBeginCapture(o->stream, cudaStreamCaptureModeThreadLocal);

    if (error)
        return error;
    error = (cudaError_t)lk_cuda_bring(&bring, o->stream);
    if (!error)
        error = (cudaError_t)lk_cuda_run(step, o->stream);
    if (!error)
        error = (cudaError_t)lk_cuda_mark(lane->marks, o->word, lane->clock, o->stream);
    cudaError_t ended = cudaStreamEndCapture(o->stream, ret);
    return error ? error : ended;
}

static cudaError_t capture(const struct lk_cuda_lane_options *o, const struct lk_cuda_lane *lane,
                           uint32_t scans, uint32_t bucket, cudaGraphExec_t *ret) {
    struct lk_cuda_step step = {.pool = *o->pool,
                                .batch = lane->device,
                                .sync = o->sync,
                                .clock = lane->clock,
                                .bucket = bucket,
                                .scans = scans,
                                .processors = o->processors};
    cudaGraph_t graph = NULL;
    cudaError_t error = record(o, lane, &step, &graph);

    if (!error)
        error = cudaGraphInstantiate(ret, graph, 0);
    if (!error)
        error = cudaGraphUpload(*ret, o->stream);
    if (graph)
        cudaGraphDestroy(graph);
    return error;
}

/* ---- open, close ---- */

static int take_memory(const struct lk_cuda_lane_options *o, struct lk_cuda_lane *lane, char *why,
                       size_t why_bytes) {
    uint64_t results = (uint64_t)LK_BATCH_ROWS_MAX * o->pool->geometry.kv_heads;

    lane->feed = lk_cuda_host_alloc(sizeof *lane->feed, why, why_bytes);
    if (lane->feed)
        lane->clock = lk_cuda_host_alloc(sizeof *lane->clock, why, why_bytes);
    if (lane->clock)
        lane->block = lk_cuda_host_alloc(sizeof *lane->block, why, why_bytes);
    if (lane->block)
        lane->signals =
            lk_cuda_host_alloc(LK_CUDA_SIGNALS_MAX * sizeof *lane->signals, why, why_bytes);
    if (lane->signals)
        lane->results = lk_cuda_host_alloc(results * sizeof *lane->results, why, why_bytes);
    if (lane->results)
        lane->device = lk_cuda_device_alloc(sizeof *lane->device, why, why_bytes);
    if (lane->device)
        lane->marks = lk_cuda_device_alloc(sizeof *lane->marks, why, why_bytes);
    return lane->marks ? 0 : -ENOMEM;
}

int lk_cuda_lane_open(const struct lk_cuda_lane_options *options, struct lk_cuda_lane *lane,
                      char *why, size_t why_bytes) {
    int error = take_memory(options, lane, why, why_bytes);

    for (int v = 0; v < LK_LANE_VARIANTS && !error; v++)
        for (uint32_t b = 0; b < LK_LANE_BUCKETS && !error; b++)
            error = refuse(capture(options, lane, scans_of[v], 1U << b, &lane->graph[v][b]),
                           "capture of a step", why, why_bytes);
    return error;
}

void lk_cuda_lane_close(struct lk_cuda_lane *lane) {
    for (int v = 0; v < LK_LANE_VARIANTS; v++)
        for (uint32_t b = 0; b < LK_LANE_BUCKETS; b++)
            if (lane->graph[v][b])
                cudaGraphExecDestroy(lane->graph[v][b]);
    lk_cuda_device_free(lane->marks);
    lk_cuda_device_free(lane->device);
    lk_cuda_host_free(lane->results);
    lk_cuda_host_free(lane->signals);
    lk_cuda_host_free(lane->block);
    lk_cuda_host_free(lane->clock);
    lk_cuda_host_free(lane->feed);
}

/* ---- use ---- */

cudaGraphExec_t lk_cuda_lane_graph(const struct lk_cuda_lane *lane) {
    uint32_t scans = 0, variant = 0;

    for (uint32_t i = 0; i < lane->count; i++)
        if (lane->block->row[i].scan)
            scans |= BIT(lane->block->row[i].scan);
    while (scans & ~scans_of[variant])
        variant++;
    return lane->graph[variant][__builtin_ctz(lk_bucket_of(lane->count))];
}

void lk_cuda_lane_feed_begin(struct lk_cuda_lane *lane, uint64_t serial, uint64_t total_bytes) {
    uint64_t even = total_bytes / (LK_CUDA_PIECES_MAX / 2) / 16 * 16;

    lane->feed->serial = serial;
    lane->feed->pieces = 0;
    lane->feed->signals = 0;
    *lane->clock = (struct lk_cuda_clock){.at = {0}};
    lane->piece_bytes = even > LK_CUDA_PIECE_BYTES ? even : LK_CUDA_PIECE_BYTES;
}

void lk_cuda_lane_signals(struct lk_cuda_lane *lane, const struct lk_signal *signals,
                          uint32_t count) {
    lane->feed->signals = count;
    memcpy(lane->signals, signals, count * sizeof *signals);
    lk_cuda_lane_feed(lane, lane->signals, lane->marks->signal, count * sizeof *signals);
}

void lk_cuda_lane_feed(struct lk_cuda_lane *lane, const void *from, void *to, uint64_t bytes) {
    for (uint64_t at = 0; at < bytes; at += lane->piece_bytes) {
        uint64_t left = bytes - at;
        lane->feed->piece[lane->feed->pieces++] =
            (struct lk_cuda_piece){(const uint8_t *)from + at, (uint8_t *)to + at,
                                   left < lane->piece_bytes ? left : lane->piece_bytes};
    }
}
