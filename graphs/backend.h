/* SPDX-License-Identifier: MIT */
/*
 * backend.h - what a device gives to engine.c: the functions of engine.h, by device.
 *
 * Idea: a backend's own struct begins with struct lk_engine, whose only member says which functions
 * serve it. Sizes are asked for before there is an engine and so have no struct.
 */
#ifndef LK_BACKEND_H
#define LK_BACKEND_H

#include "clock.h"
#include "engine.h"

struct lk_backend {
    enum lk_device device;
    void (*close)(struct lk_engine *engine);
    const char *(*describe)(const struct lk_engine *engine);
    int (*pool_open)(struct lk_engine *engine, const struct lk_geometry *geometry, uint64_t pages,
                     struct lk_pool_view *ret, int *ret_fd, char *why, size_t why_bytes);
    int (*map)(struct lk_engine *engine, void *at, uint64_t bytes, char *why, size_t why_bytes);
    void (*unmap)(struct lk_engine *engine, void *at);
    /* Clients on the GPU; the CPU has none of these. */
    int (*arena_open)(struct lk_engine *engine, uint64_t bytes, struct lk_engine_arena *ret,
                      char *why, size_t why_bytes);
    void (*arena_close)(struct lk_engine *engine, struct lk_engine_arena *arena);
    bool (*mps)(const struct lk_engine *engine);
    int (*signal)(struct lk_engine *engine, const struct lk_signal *signals, uint32_t count);
    bool (*fence_reached)(struct lk_engine *engine, uint32_t place, const uint64_t *word,
                          uint64_t value, uint64_t *ret_held);
    void (*fence_forget)(struct lk_engine *engine, uint32_t place);
    int (*launch)(struct lk_engine *engine, struct lk_batch *batch);
    enum lk_mark (*poll)(struct lk_engine *engine, struct lk_batch **ret);
    const char *(*trouble)(const struct lk_engine *engine);
    bool (*hot)(const struct lk_engine *engine);
    int (*fd)(const struct lk_engine *engine);
    void (*sleep)(struct lk_engine *engine, bool sleeping);
};

struct lk_engine {
    const struct lk_backend *backend;
};

struct lk_parts { /* offsets of a pool's parts, and the whole */
    uint64_t kv, coarse, fine, super, bytes;
};
/* The one layout of a pool's memory, whatever the device. */
struct lk_parts lk_pool_parts(const struct lk_geometry *geometry, const struct lk_layout *layout,
                              uint64_t pages);
static inline void lk_pool_place(struct lk_pool_view *view, const struct lk_parts *parts,
                                 uint8_t *at) {
    view->kv = at + parts->kv;
    view->coarse = at + parts->coarse;
    view->fine = at + parts->fine;
    view->super = at + parts->super;
}
/* Prepares a batch for launch: its bucket, no time or bytes yet, each row's part of the workspace
 * at `at`. -> 0, -EINVAL: too many rows, -ENOSPC: they do not fit `room` bytes. */
int lk_batch_admit(enum lk_device device, uint8_t *at, uint64_t room, struct lk_batch *batch);
/* -EINVAL with a sentence: not so many pages, or too many pools. */
int lk_pool_refused(uint32_t pools, uint64_t pages, char *why, size_t why_bytes);
/* Builds with LK_TEST_HOOKS: a row with this sm_scale makes the GPU fault. */
#define LK_TEST_BREAK       0x1p-120f
#define LK_ENGINE_POOLS_MAX 64 /* far above what a daemon configures */

static inline uint32_t lk_bucket_of(uint32_t rows) {
    uint32_t bucket = 1;

    while (bucket < rows)
        bucket *= 2;
    return bucket;
}

/* ---- CPU ---- */
int lk_cpu_engine_open(const struct lk_engine_options *options, struct lk_engine **ret, char *why,
                       size_t why_bytes);
uint64_t lk_cpu_engine_row_workspace(const struct lk_row *row);

/* ---- CUDA: cuda/, or cuda/absent.c where the binary is built without ---- */
/* Can GPU number `gpu` serve? -> 0, or -errno with a sentence. Opens no context. */
int lk_cuda_engine_usable(uint32_t gpu, char *why, size_t why_bytes);
/* Of one that can. -> 0; -ENOTSUP: a pool of the geometry cannot lie there. Opens no context. */
int lk_cuda_engine_holds(uint32_t gpu, const struct lk_geometry *geometry, char *why,
                         size_t why_bytes);
int lk_cuda_engine_open(const struct lk_engine_options *options, struct lk_engine **ret, char *why,
                        size_t why_bytes);
uint64_t lk_cuda_engine_row_workspace(const struct lk_row *row);

#endif
