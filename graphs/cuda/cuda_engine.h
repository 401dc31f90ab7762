/* SPDX-License-Identifier: MIT */
/*
 * cuda_engine.h - the state of a GPU's engine, for the files that make it up.
 *
 *   cuda_engine.c   batches: launch, poll, sleep
 *   cuda_open.c     opening, pools, clients' memory, closing
 *   sentry.c        fences of clients on the GPU
 */
#ifndef LK_CUDA_ENGINE_H
#define LK_CUDA_ENGINE_H

#include <pthread.h>
#include <semaphore.h>

#include "lane.h"
#include "memory.h"
#include "sentry.h"

#define LAYER_WORDS 16 /* of 64 layers: kernels/geometry.c allows 1024 */

struct cuda_words { /* host memory, written by the device: numbers of batches */
    uint64_t fenced, done[LK_BATCHES_IN_FLIGHT];
    struct lk_cuda_clock clock[LK_BATCHES_IN_FLIGHT]; /* of builds after a batch */
};

struct cuda_slot { /* a batch that is not DONE */
    struct lk_batch *batch;
    uint64_t serial; /* of all batches, from 1 */
    uint64_t launched_ns;
    bool builds_after;
    cudaStream_t builder;           /* of its builds after the fence, with lower priority */
    cudaEvent_t fence, built;       /* results are there; summaries are */
    uint64_t building[LAYER_WORDS]; /* layers that they write, where builds_after */
    uint64_t fence_ns;              /* of the device's clock; 0: not known */
    uint64_t *builds;               /* pinned host memory: layer << 48 | page or quad */
};

struct cuda_desk {               /* what a batch needs until it is FENCED */
    uint8_t *workspace;          /* device */
    struct lk_cuda_clock *clock; /* of the step that stores the mark; NULL: there are no rows */
    /* Pinned host memory: */
    uint8_t *tables; /* block tables of the rows, one after the other */
    uint64_t tables_used;
    uint64_t *slots;                  /* of writes */
    struct lk_cuda_copy_item *copies; /* lists of copies, a pool at a time */
};

struct cuda_pool {
    struct lk_pool_view view; /* device pointers, as the daemon's view has them */
    struct lk_cuda_memory memory;
    uint32_t *sync;
    struct lk_cuda_lane lane[LK_BATCHES_AHEAD];
};

struct cuda_engine {
    struct lk_engine base; /* first: leads back here */
    int gpu;
    uint32_t processors;
    uint64_t workspace_bytes; /* of a desk */
    cudaStream_t stream;      /* of batches */
    struct cuda_words *words;
    struct cuda_slot slot[LK_BATCHES_IN_FLIGHT]; /* a batch's are by its number */
    struct cuda_desk desk[LK_BATCHES_AHEAD];     /* and so are its desk and lanes */
    uint64_t launched, fenced, finished;         /* batches; marks that were told */
    uint64_t checked_ns;
    bool broken;
    char trouble[256];
    /* sleep */
    int event;
    pthread_t waker;
    bool waking; /* the thread runs */
    sem_t wake;
    bool stop, sleeping; /* atomic */
    uint64_t seen_marks; /* atomic: as the sleeper saw them, see marks_of() */
    struct cuda_pool pool[LK_ENGINE_POOLS_MAX];
    uint32_t pools;
    struct lk_cuda_sentry sentry;
    bool mps; /* processes share the GPU side by side */
    uint8_t uuid[16];
    uint64_t capture_ns, capture_bytes;
    char name[64], text[192];
};

static inline struct cuda_engine *lk_cuda_engine_of(struct lk_engine *base) {
    return (struct cuda_engine *)base;
}

/* Notes what broke; the first stands. -> -EIO. */
int lk_cuda_broken(struct cuda_engine *engine, const char *step, const char *words);
/* The same of what is no 0 of a cudaError_t. */
int lk_cuda_check(struct cuda_engine *engine, int error, const char *step);
/* Makes the engine's GPU the calling thread's. -> 0 or a cudaError_t. */
int lk_cuda_choose(const struct cuda_engine *engine);
void *lk_cuda_run_waker(void *context); /* a struct cuda_engine: the thread that wakes sleepers */

int lk_cuda_launch(struct lk_engine *base, struct lk_batch *batch);
enum lk_mark lk_cuda_poll(struct lk_engine *base, struct lk_batch **ret);
const char *lk_cuda_trouble(const struct lk_engine *base);
bool lk_cuda_hot(const struct lk_engine *base);
int lk_cuda_fd(const struct lk_engine *base);
void lk_cuda_sleep(struct lk_engine *base, bool sleeping);

int lk_cuda_raise(struct lk_engine *base, const struct lk_signal *signals, uint32_t count);
/* The same on the engine's stream, after all that is there by now. */
int lk_cuda_raise_in_turn(struct cuda_engine *engine, const struct lk_signal *signals,
                          uint32_t count);
bool lk_cuda_fence_reached(struct lk_engine *base, uint32_t place, const uint64_t *word,
                           uint64_t value, uint64_t *ret_held);
void lk_cuda_fence_forget(struct lk_engine *base, uint32_t place);

#endif
