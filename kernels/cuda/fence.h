/* SPDX-License-Identifier: MIT */
/*
 * fence.h - words of device memory that clients on the GPU and the daemon hand over by.
 *
 * Idea: a client's kernel raises a word when its inputs are there, the daemon raises another when
 * outputs are. The daemon's host must know of the first before it launches a step: a small kernel,
 * the watch, looks at the words it is told of and says in host memory which have reached their
 * value. It ends by itself after a time, at once if there is nothing to watch, and is launched
 * again while something is: a kernel that never ended would hold up whoever gives memory back.
 * While it is there it also raises words that the host asks for: a launch takes twice as long.
 *
 * What is watched is a table in host memory. The host writes a place's entry, then its ticket once
 * more where tickets lie close to each other, then raises `version`, which says which place it was;
 * the device looks at `version` in every round. A ticket is never used twice, so an answer to an
 * old one is known as such. What is to be raised is a queue in host memory. An entry of either is
 * whole when its check is right: the device reads all of it in one go, since each way to the host's
 * memory takes a microsecond.
 *
 * A watch that is about to end says so in `ending` and looks into the queue once more; who reads
 * there, after having written an entry, that the last watch is about to end, must not count on it.
 * Raising twice does no harm.
 *
 * Order: the device reads a word relaxed, and passes a fence before it tells; the host launches the
 * step after it was told, and a launch sees what was seen before it. Words are raised with release
 * at the scope of the GPU: clients run there too, and its L2 is where both see them.
 */
#ifndef LK_CUDA_FENCE_H
#define LK_CUDA_FENCE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LK_CUDA_SIGNALS_MAX 1024 /* of a step */
#define LK_CUDA_PLACES      256

struct lk_cuda_signal {
    uint64_t *word; /* device memory */
    uint64_t value;
};

/* Raises words after all that ran before on the stream. Stream is a cudaStream_t. -> 0 or a
 * cudaError_t. */
int lk_cuda_signal(const struct lk_cuda_signal *signals, uint32_t count, void *stream);

#define LK_CUDA_RAISES 64 /* places of the queue */

struct lk_cuda_entry { /* one sector of memory */
    uint64_t number; /* of the table: a ticket, 0: nothing is watched. Of the queue: from 1; entry n
                          lies at n % LK_CUDA_RAISES */
    uint64_t word;   /* address; 0: there is nothing to do */
    uint64_t value;
    uint64_t check; /* lk_cuda_entry_check() */
};
#ifdef __CUDACC__
__host__ __device__
#endif
    static inline uint64_t
    lk_cuda_entry_check(uint64_t number, uint64_t word, uint64_t value) {
    return number * UINT64_C(0x9e3779b97f4a7c15) ^ word * 3 ^ value;
}

struct lk_cuda_watch { /* memory of the host that the device reads and writes, cleared before */
    /* the host's */
    uint64_t version, pad0[15]; /* changes * LK_CUDA_PLACES + the place of the last */
    uint64_t ticket[LK_CUDA_PLACES];
    struct lk_cuda_entry place[LK_CUDA_PLACES];
    struct lk_cuda_entry raise[LK_CUDA_RAISES];
    /* the device's */
    uint64_t ended, ending;           /* number of the last watch that has, that is about to */
    uint64_t raised, pad1[13];        /* number of the last entry */
    uint64_t reached[LK_CUDA_PLACES]; /* a ticket whose word has reached its value */
    uint64_t held[LK_CUDA_PLACES];    /* what the word held when it was last seen to change */
};

/* Watches for life_ns at most, 0: looks once; then stores `number` into watch->ended. */
int lk_cuda_watch(struct lk_cuda_watch *watch, uint64_t number, uint64_t life_ns, void *stream);

#ifdef __cplusplus
}
#endif
#endif
