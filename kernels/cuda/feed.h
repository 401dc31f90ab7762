/* SPDX-License-Identifier: MIT */
/*
 * feed.h - what brings a batch to the device and says how far it is: the first and the last kernel
 * of a step.
 *
 * Idea: the host writes down, in memory the device reads, which bytes are to be copied where: the
 * descriptor block, block tables, and from the clients' arenas queries, keys and values. One kernel
 * copies them all, whatever their number; it crosses the bus twice, for the list and for the bytes.
 * The last kernel of a step stores a number into a word of host memory once everything before it
 * can be seen there; the host polls the word.
 *
 * Invariants: pieces are aligned to 16 bytes, as is their length; pieces do not overlap. A feed is
 * not changed until its mark was seen.
 */
#ifndef LK_CUDA_FEED_H
#define LK_CUDA_FEED_H

#include <stdint.h>

#include "cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LK_CUDA_PIECES_MAX  4096
#define LK_CUDA_PIECE_BYTES 8192 /* a block's share of a small batch */

struct lk_cuda_piece {
    const void *from;
    void *to;
    uint64_t bytes;
};

struct lk_cuda_feed { /* memory of the host, read by the device */
    uint64_t serial;  /* what the mark of this step stores; 0: it stores nothing */
    uint32_t pieces, reserved;
    struct lk_cuda_piece piece[LK_CUDA_PIECES_MAX];
};

/* Copies all pieces; leaves feed->serial in *serial (device memory) and the time in
 * clock->at[LK_CUDA_AT_FEED]. blocks: of the grid. Stream is a cudaStream_t. -> 0 or a cudaError_t.
 */
int lk_cuda_bring(const struct lk_cuda_feed *feed, uint64_t *serial, struct lk_cuda_clock *clock,
                  uint32_t blocks, void *stream);
/* Stores *serial (device memory) into *word (host memory) unless it is 0, after all that ran before
 * on the stream; the time goes to clock->at[LK_CUDA_AT_FENCE] first. */
int lk_cuda_mark(const uint64_t *serial, uint64_t *word, struct lk_cuda_clock *clock, void *stream);
/* The same for a number known now, at LK_CUDA_AT_DONE; clock may be NULL. */
int lk_cuda_mark_now(uint64_t serial, uint64_t *word, struct lk_cuda_clock *clock, void *stream);

#ifdef LK_TEST_HOOKS
int lk_cuda_fault(void *stream); /* hooks.cu: a kernel that faults */
#endif

#ifdef __cplusplus
}
#endif
#endif
