/* SPDX-License-Identifier: MIT */
/*
 * rig.h - a pool with rows on a GPU, and the time its kernels take there.
 *
 * Idea: a pool has several layers and step i of a chain runs on layer i, so that by the time a
 * layer comes again its bytes have left the cache. A chain is captured as one graph, as the daemon
 * captures a step, replayed, and timed by events on the device; medians of the rounds. Between
 * whole steps of a chain every edge is a full one: a step's time is then that of a step alone. A
 * stage repeated keeps the edges it has in a step.
 *
 * Before each measurement, that of the read ceiling too, the cache is filled with other bytes by
 * plain loads, as a model's weights fill it. Bytes that kernels ask to go first then pass through
 * a small part of it; with all of it to themselves they are read up to 5 % slower (RESULTS.md).
 *
 *     gpu open -> (rig open -> plan -> time ...)* -> gpu close
 *
 * Invariants: rows of one rig have one length and are full to it; each lies in pages of its own, in
 * extents of 64 in any order; nothing is measured before pages are summarised.
 *
 * One thread. Functions -> 0 or an exit code of sysexits.h with a sentence in gpu->why; a close
 * takes what a failed open left.
 */
#ifndef BENCH_RIG_H
#define BENCH_RIG_H

#include <cuda_runtime_api.h>

#include "../../../kernels/cuda/cuda.h"

#define RIG_BUDGET     2048 /* tokens */
#define RIG_CHAIN_MAX  64   /* launches of a graph; and layers of a pool */
#define RIG_TOKENS_MAX 16   /* of a row */

struct rig_gpu {
    uint32_t rounds, processors;
    uint64_t cache_bytes, memory_bytes;
    double ceiling; /* bytes a second of plain reading, measured */
    cudaStream_t stream;
    void *foreign; /* cache_bytes that no kernel of ours reads */
    uint32_t *sum; /* a word that reading wants */
    cudaEvent_t begun, ended;
    float *normal; /* on the device: see keys.h */
    char name[256], *why;
    size_t why_bytes;
};

/* EX_UNAVAILABLE: no such GPU, or none that answers. Measures the ceiling. */
int rig_gpu_open(uint32_t number, uint32_t rounds, char *why, size_t why_bytes,
                 struct rig_gpu *ret);
void rig_gpu_close(struct rig_gpu *gpu);

struct rig_shape {
    uint32_t kv_heads, group, page_tokens, rows;
    uint64_t tokens;       /* of a row */
    uint32_t scans;        /* bit 1 << enum lk_scan_mode: those that will be planned */
    uint32_t layers;       /* at least; more are taken if the cache asks for them */
    bool layers_are_exact; /* not one more */
};

struct rig {
    struct rig_gpu *gpu;
    struct rig_shape shape;
    struct lk_pool_view pool;
    uint64_t row_pages, needed_bytes, free_bytes; /* for one layer; on the device before */
    uint32_t *tables, *sync;
    uint64_t *pages, *quads; /* lists of all, for building */
    uint8_t *io, *workspace;
    struct lk_cuda_batch *blocks; /* on the device, [layers] */
    struct lk_cuda_batch *host;
    struct lk_row *rows;
    uint32_t scan; /* planned; 0: exact */
    uint32_t tokens;
};

/* Takes memory, fills pages, summarises them. EX_OSERR and needed_bytes > free_bytes: it does not
 * fit. */
int rig_open(struct rig_gpu *gpu, const struct rig_shape *shape, struct rig *ret);
void rig_close(struct rig *rig);

/* The step to be measured: rows of `tokens` queries by a scan mode, or exact (0). */
int rig_plan(struct rig *rig, uint32_t scan, uint32_t tokens);

enum rig_part { RIG_WHOLE, RIG_SCAN, RIG_PRUNE, RIG_RESCAN, RIG_SELECT, RIG_ATTEND, RIG_PARTS };
/* Logical bytes of a part of the planned step: records of the first pass, keys and values of the
 * attended tokens; 0 where there is no such figure. */
double rig_bytes(const struct rig *rig, enum rig_part part);
/* Median microseconds. A stage works on what a whole step left. */
int rig_time(struct rig *rig, enum rig_part part, double *ret_us);
/* Of summarising all pages, or all superpages, once. */
int rig_time_build(struct rig *rig, bool quads, double *ret_us);

#endif
