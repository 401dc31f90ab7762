/* SPDX-License-Identifier: MIT */
/*
 * sentry.h - keeps a watch (kernels/cuda/fence.h) on the device while fences are waited for.
 *
 * Idea: a watch lives for a time and is launched again as long as something is waited for. In the
 * first milliseconds of a wait, and where processes run on the GPU side by side (MPS), two watches
 * stand in the stream, one behind the other, so that there is no gap: what reaches its value is
 * known a microsecond or two later. After that, and where processes take turns - there a watch
 * that stayed would keep the GPU from the client it waits for -, a watch looks once, and there is a
 * pause before the next. So a fence that is never reached costs others next to nothing.
 *
 * A watch that stays also raises words, where nothing is in flight that they would have to come
 * after; else, and where no watch can be counted on, the engine's stream does.
 *
 * Invariant: a word is not looked at nor raised any more once the sentry has settled after it was
 * forgotten.
 *
 * Thread: whoever owns the engine, but for lk_cuda_sentry_settle(): any. Does not know whose a word
 * is nor when its time is over.
 */
#ifndef LK_CUDA_SENTRY_H
#define LK_CUDA_SENTRY_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>

#include "../../kernels/cuda/fence.h"

struct lk_cuda_sentry {
    struct lk_cuda_watch *watch; /* pinned host memory */
    cudaStream_t stream;
    bool stays;                      /* MPS: a watch may */
    uint64_t launched;               /* watches */
    uint64_t launched_ns;            /* the last of them */
    uint64_t tickets;                /* given out */
    uint64_t ticket[LK_CUDA_PLACES]; /* 0: the place is free */
    uint64_t raises;                 /* entries of the watch's queue */
    uint64_t stream_raises;          /* batches launched when the stream last raised words */
    bool on_stream;                  /* it may not have done so yet */
    uint32_t armed;                  /* places */
    uint64_t armed_ns;               /* the last of them */
};

/* -> 0 or -errno with a sentence in why. close() undoes what there is. */
int lk_cuda_sentry_open(struct lk_cuda_sentry *sentry, bool mps, char *why, size_t why_bytes);
void lk_cuda_sentry_close(struct lk_cuda_sentry *sentry);
/* Waits until watches launched so far have ended, and what was launched on the engine's stream,
 * which raises words as well: giving memory back does not wait for kernels. -> 0 or a cudaError_t.
 */
int lk_cuda_sentry_settle(const struct lk_cuda_sentry *sentry, cudaStream_t raiser);
/* A word is about to be reached, more likely than not: rather spin. */
bool lk_cuda_sentry_hot(const struct lk_cuda_sentry *sentry);

#endif
