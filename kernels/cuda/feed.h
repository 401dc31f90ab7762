/* SPDX-License-Identifier: MIT */
/*
 * feed.h - what brings a batch to the device and says how far it is: the first and the last kernel
 * of a step.
 *
 * Idea: the host writes down, in memory the device reads, which bytes are to be copied where: the
 * block tables, and from the clients' arenas queries, keys and values. One kernel copies them all,
 * whatever their number; it crosses the bus twice, for the list and for the bytes. The descriptor
 * block lies at a place that is known beforehand and crosses the bus beside the list. As soon as it
 * is there the next kernel may start, and read that block before it waits for this one to end: the
 * block's bytes are in the second cache by then, where kernels that started early look for them.
 * The last kernel of a step raises the fences of clients on the GPU and then stores a number into a
 * word of host memory, once everything before it can be seen; the host polls the word.
 *
 * Invariants: pieces are aligned to 16 bytes, as is their length; pieces do not overlap. A feed is
 * not changed until its mark was seen.
 */
#ifndef LK_CUDA_FEED_H
#define LK_CUDA_FEED_H

#include <stdint.h>

#include "cuda.h"
#include "fence.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LK_CUDA_PIECES_MAX  4096
#define LK_CUDA_PIECE_BYTES 4096 /* a vector a thread, all on their way at once */

struct lk_cuda_piece {
    const void *from;
    void *to;
    uint64_t bytes;
};

struct lk_cuda_marks { /* device memory: what the mark of the step that runs does */
    uint64_t serial;
    uint32_t signals, reserved;
    struct lk_cuda_signal signal[LK_CUDA_SIGNALS_MAX];
};

struct lk_cuda_feed { /* memory of the host, read by the device */
    uint64_t serial;  /* what the mark of this step stores; 0: it stores nothing */
    uint32_t pieces;
    uint32_t signals; /* raised by the mark; a piece brings them */
    struct lk_cuda_piece piece[LK_CUDA_PIECES_MAX];
};

struct lk_cuda_bring {
    const struct lk_cuda_feed *feed;
    const void *from;     /* host memory: what comes first, whatever the feed says */
    void *to;             /* device memory */
    uint64_t first_bytes; /* a multiple of 16 */
    struct lk_cuda_marks *marks;
    struct lk_cuda_clock *clock;
    uint32_t blocks; /* for the feed's pieces, at least 1 */
};
/* Copies first_bytes and all pieces; leaves feed->serial and feed->signals in *marks (device
 * memory) and the time in clock->at[LK_CUDA_AT_FEED]. Kernels after it on the stream may read what
 * came first, past the first cache, before they wait; all else when they have waited. Stream is a
 * cudaStream_t. -> 0 or a cudaError_t. */
int lk_cuda_bring(const struct lk_cuda_bring *bring, void *stream);
/* After all that ran before on the stream: raises the fences of *marks (device memory), then stores
 * its serial into *word (host memory) unless it is 0. The time goes to clock->at[LK_CUDA_AT_FENCE]
 * before that word. */
int lk_cuda_mark(const struct lk_cuda_marks *marks, uint64_t *word, struct lk_cuda_clock *clock,
                 void *stream);
/* The same for a number known now, at LK_CUDA_AT_DONE; clock may be NULL. */
int lk_cuda_mark_now(uint64_t serial, uint64_t *word, struct lk_cuda_clock *clock, void *stream);

#ifdef LK_TEST_HOOKS
int lk_cuda_fault(void *stream); /* hooks.cu: a kernel that faults */
#endif

#ifdef __cplusplus
}
#endif
#endif
