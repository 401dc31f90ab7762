/* SPDX-License-Identifier: MIT */
/*
 * engine.c - which device serves, and what is the same for all of them. See engine.h, backend.h.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "../kernels/cpu/cpu.h"
#include "../kernels/cuda/cuda.h"
#include "backend.h"

/* On a GPU a part of 2^34 products takes some milliseconds, as 2^28 do on two CPU cores. */
#define CUDA_PART_FACTOR 64

/* ---- choice ---- */

int lk_engine_gpu_serves(uint32_t gpu, const struct lk_geometry *geometries, uint32_t count,
                         char *why, size_t why_bytes) {
    int error = lk_cuda_engine_usable(gpu, why, why_bytes);
    for (uint32_t i = 0; i < count && !error; i++)
        error = lk_cuda_engine_holds(gpu, &geometries[i], why, why_bytes);
    return error;
}

bool lk_engine_cpu_serves(uint32_t cpu_path) {
    return lk_cpu_has((enum lk_cpu_path)cpu_path);
}

enum lk_device lk_engine_choose(enum lk_device wanted, uint32_t gpu,
                                const struct lk_geometry *geometries, uint32_t count, char *why,
                                size_t why_bytes) {
    why[0] = 0;
    if (wanted != LK_DEVICE_AUTO)
        return wanted;
    return lk_engine_gpu_serves(gpu, geometries, count, why, why_bytes) ? LK_DEVICE_CPU
                                                                        : LK_DEVICE_CUDA;
}

int lk_engine_open(const struct lk_engine_options *options, struct lk_engine **ret, char *why,
                   size_t why_bytes) {
    if (options->device == LK_DEVICE_CUDA)
        return lk_cuda_engine_open(options, ret, why, why_bytes);
    return lk_cpu_engine_open(options, ret, why, why_bytes);
}

/* ---- sizes ---- */

static uint64_t reserve(uint64_t *bytes, uint64_t count, uint64_t size) {
    uint64_t at = *bytes, page = 4096;

    *bytes += (count * size + page - 1) / page * page;
    return at;
}

struct lk_parts lk_pool_parts(const struct lk_geometry *g, const struct lk_layout *layout,
                              uint64_t pages) {
    uint64_t heads = (uint64_t)g->layers * g->kv_heads;
    struct lk_parts p = {0};

    p.kv = reserve(&p.bytes, g->layers * pages, layout->page_bytes);
    p.coarse = reserve(&p.bytes, heads * pages, layout->coarse_stride);
    p.fine = reserve(&p.bytes, heads * pages, layout->fine_stride);
    p.super = reserve(&p.bytes, heads * (pages / LK_QUAD_PAGES), layout->super_stride);
    return p;
}

int lk_pool_refused(uint32_t pools, uint64_t pages, char *why, size_t why_bytes) {
    if (pools < LK_ENGINE_POOLS_MAX && pages && pages % LK_QUAD_PAGES == 0)
        return 0;
    snprintf(why, why_bytes, "pool %u (at most %d) of %llu pages (a multiple of %d)", pools + 1,
             LK_ENGINE_POOLS_MAX, (unsigned long long)pages, LK_QUAD_PAGES);
    return -EINVAL;
}

uint64_t lk_engine_pool_bytes(enum lk_device device, const struct lk_geometry *geometry,
                              uint64_t pages) {
    struct lk_layout layout;

    if (device == LK_DEVICE_CUDA)
        lk_cuda_layout(geometry, &layout);
    else
        lk_cpu_layout(geometry, &layout);
    return lk_pool_parts(geometry, &layout, pages).bytes;
}

uint64_t lk_engine_row_workspace(enum lk_device device, const struct lk_row *row) {
    return device == LK_DEVICE_CUDA ? lk_cuda_engine_row_workspace(row)
                                    : lk_cpu_engine_row_workspace(row);
}

uint32_t lk_engine_budget_pages(enum lk_device device) {
    return device == LK_DEVICE_CUDA ? LK_CUDA_BUDGET_PAGES_MAX : UINT32_MAX;
}

uint32_t lk_engine_row_pages(enum lk_device device) {
    return device == LK_DEVICE_CUDA ? LK_CUDA_PAGES_MAX : UINT32_MAX;
}

uint32_t lk_engine_part_factor(enum lk_device device) {
    return device == LK_DEVICE_CUDA ? CUDA_PART_FACTOR : 1;
}

/* ---- batches ---- */

int lk_batch_admit(enum lk_device device, uint8_t *at, uint64_t room, struct lk_batch *batch) {
    uint64_t used = 0;

    if (batch->row_count > LK_BATCH_ROWS_MAX)
        return -EINVAL;
    for (uint32_t i = 0; i < batch->row_count; i++) {
        struct lk_row *row = &batch->rows[i];
        uint64_t bytes = lk_engine_row_workspace(device, row);
        if (bytes > room - used)
            return -ENOSPC;
        row->workspace = at + used;
        used += bytes;
        row->score_bytes = row->select_bytes = row->attend_bytes = 0;
    }
    batch->bucket = lk_bucket_of(batch->row_count);
    memset(batch->phase_ns, 0, sizeof batch->phase_ns);
    return 0;
}

/* ---- by device ---- */

void lk_engine_close(struct lk_engine *engine) {
    if (engine)
        engine->backend->close(engine);
}

enum lk_device lk_engine_device(const struct lk_engine *engine) {
    return engine->backend->device;
}

const char *lk_engine_describe(const struct lk_engine *engine) {
    return engine->backend->describe(engine);
}

int lk_engine_pool_open(struct lk_engine *engine, const struct lk_geometry *geometry,
                        uint64_t pages, struct lk_pool_view *ret, int *ret_fd, char *why,
                        size_t why_bytes) {
    return engine->backend->pool_open(engine, geometry, pages, ret, ret_fd, why, why_bytes);
}

int lk_engine_map(struct lk_engine *engine, void *at, uint64_t bytes, char *why, size_t why_bytes) {
    return engine->backend->map ? engine->backend->map(engine, at, bytes, why, why_bytes) : 0;
}

void lk_engine_unmap(struct lk_engine *engine, void *at) {
    if (engine->backend->unmap)
        engine->backend->unmap(engine, at);
}

int lk_engine_arena_open(struct lk_engine *engine, uint64_t bytes, struct lk_engine_arena *ret,
                         char *why, size_t why_bytes) {
    if (engine->backend->arena_open)
        return engine->backend->arena_open(engine, bytes, ret, why, why_bytes);
    snprintf(why, why_bytes,
             "a device arena of %llu bytes was asked for: this daemon runs on the CPU",
             (unsigned long long)bytes);
    return -ENOTSUP;
}

void lk_engine_arena_close(struct lk_engine *engine, struct lk_engine_arena *arena) {
    engine->backend->arena_close(engine, arena);
}

bool lk_engine_mps(const struct lk_engine *engine) {
    return engine->backend->mps && engine->backend->mps(engine);
}

int lk_engine_signal(struct lk_engine *engine, const struct lk_signal *signals, uint32_t count) {
    return engine->backend->signal(engine, signals, count);
}

bool lk_engine_fence_reached(struct lk_engine *engine, uint32_t place, const uint64_t *word,
                             uint64_t value, uint64_t *ret_held) {
    return engine->backend->fence_reached(engine, place, word, value, ret_held);
}

void lk_engine_fence_forget(struct lk_engine *engine, uint32_t place) {
    engine->backend->fence_forget(engine, place);
}

int lk_engine_launch(struct lk_engine *engine, struct lk_batch *batch) {
    return engine->backend->launch(engine, batch);
}

enum lk_mark lk_engine_poll(struct lk_engine *engine, struct lk_batch **ret) {
    return engine->backend->poll(engine, ret);
}

const char *lk_engine_trouble(const struct lk_engine *engine) {
    return engine->backend->trouble ? engine->backend->trouble(engine) : "";
}

bool lk_engine_hot(const struct lk_engine *engine) {
    return engine->backend->hot && engine->backend->hot(engine);
}

int lk_engine_fd(const struct lk_engine *engine) {
    return engine->backend->fd(engine);
}

void lk_engine_sleep(struct lk_engine *engine, bool sleeping) {
    engine->backend->sleep(engine, sleeping);
}
