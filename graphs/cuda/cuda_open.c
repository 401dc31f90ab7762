/* SPDX-License-Identifier: MIT */
/*
 * cuda_open.c - a GPU's engine: opening, pools, clients' memory, closing. See cuda_engine.c.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "cuda_engine.h"
#include "memory.h"
#include "sizes.h"

/* Pages and superpages that writes sealed and rows closed. */
#define BUILD_ENTRIES (4 * LK_BATCH_BUILDS_MAX)

/* ---- memory of clients ---- */

static int cuda_map(struct lk_engine *base, void *at, uint64_t bytes, char *why, size_t why_bytes) {
    struct cuda_engine *engine = lk_cuda_engine_of(base);
    int error = lk_cuda_choose(engine);

    if (!error)
        error = (int)cudaHostRegister(at, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (!error)
        return 0;
    snprintf(why, why_bytes, "the GPU cannot be given an arena of %llu MiB: %s",
             (unsigned long long)(bytes >> 20), cudaGetErrorString((cudaError_t)error));
    cudaGetLastError(); /* it is told */
    return -ENOMEM;
}

static void cuda_unmap(struct lk_engine *base, void *at) {
    if (lk_cuda_choose(lk_cuda_engine_of(base)) || cudaHostUnregister(at))
        cudaGetLastError(); /* it was not known: nothing to forget */
}

/* What the client sees is cleared memory: lk_cuda_memory_open() waits for that. */
static int cuda_arena_open(struct lk_engine *base, uint64_t bytes, struct lk_engine_arena *ret,
                           char *why, size_t why_bytes) {
    struct cuda_engine *engine = lk_cuda_engine_of(base);
    struct lk_cuda_memory memory;

    if (lk_cuda_choose(engine)) {
        snprintf(why, why_bytes, "GPU %d: %s", engine->gpu, cudaGetErrorString(cudaGetLastError()));
        return -EIO;
    }
    int error = lk_cuda_memory_open(engine->gpu, bytes, &memory, why, why_bytes);
    if (error)
        return error;
    *ret = (struct lk_engine_arena){.at = memory.at,
                                    .bytes = memory.bytes,
                                    .handle = memory.handle,
                                    .fd = memory.fd,
                                    .gpu = (uint32_t)engine->gpu};
    memcpy(ret->uuid, engine->uuid, sizeof ret->uuid);
    return 0;
}

static void cuda_arena_close(struct lk_engine *base, struct lk_engine_arena *arena) {
    struct cuda_engine *engine = lk_cuda_engine_of(base);
    struct lk_cuda_memory memory = {arena->at, arena->bytes, arena->handle, arena->fd};

    if (lk_cuda_choose(engine) || lk_cuda_sentry_settle(&engine->sentry, engine->stream))
        cudaGetLastError(); /* a broken engine says so itself */
    lk_cuda_memory_close(&memory);
    *arena = (struct lk_engine_arena){.fd = -1};
}

static bool cuda_mps(const struct lk_engine *base) {
    return ((const struct cuda_engine *)base)->mps;
}

/* ---- pools ---- */

static int open_lanes(struct cuda_engine *engine, struct cuda_pool *pool, char *why,
                      size_t why_bytes) {
    struct lk_cuda_lane_options options = {.pool = &pool->view,
                                           .sync = pool->sync,
                                           .word = &engine->words->fenced,
                                           .processors = engine->processors,
                                           .stream = engine->stream};
    int error = 0;

    for (uint32_t i = 0; i < LK_BATCHES_AHEAD && !error; i++)
        error = lk_cuda_lane_open(&options, &pool->lane[i], why, why_bytes);
    if (!error)
        error = cudaStreamSynchronize(engine->stream) ? -EIO : 0;
    return error;
}

static uint64_t free_bytes(void) {
    size_t left = 0, all = 0;

    cudaMemGetInfo(&left, &all);
    return left;
}

static void describe(struct cuda_engine *engine) {
    snprintf(engine->text, sizeof engine->text,
             "cuda %s, %u graphs captured in %.0f ms, they take %.0f MiB", engine->name,
             engine->pools * LK_BATCHES_AHEAD * LK_LANE_VARIANTS * LK_LANE_BUCKETS,
             (double)engine->capture_ns * 1e-6, (double)engine->capture_bytes / (1 << 20));
}

static int cuda_pool_open(struct lk_engine *base, const struct lk_geometry *geometry,
                          uint64_t pages, struct lk_pool_view *ret, int *ret_fd, char *why,
                          size_t why_bytes) {
    struct cuda_engine *engine = lk_cuda_engine_of(base);
    struct cuda_pool *pool = &engine->pool[engine->pools];

    if (lk_pool_refused(engine->pools, pages, why, why_bytes))
        return -EINVAL;
    int error = lk_cuda_engine_holds((uint32_t)engine->gpu, geometry, why, why_bytes);
    if (error)
        return error;
    if (lk_cuda_choose(engine))
        return lk_cuda_broken(engine, "choosing the GPU", "it is gone");
    pool->view = (struct lk_pool_view){.geometry = *geometry, .pages = pages};
    lk_cuda_layout(geometry, &pool->view.layout);
    struct lk_parts parts = lk_pool_parts(geometry, &pool->view.layout, pages);
    error = lk_cuda_memory_open((int)engine->gpu, parts.bytes, &pool->memory, why, why_bytes);
    if (error)
        return error;
    engine->pools++;
    lk_pool_place(&pool->view, &parts, pool->memory.at);
    uint64_t words = (uint64_t)lk_cuda_sync_words(geometry, LK_BATCH_ROWS_MAX, 1) +
                     lk_cuda_sync_words(geometry, 1, LK_BATCH_TOKENS_MAX);
    uint64_t begun = lk_engine_now_ns(), had = free_bytes();
    pool->sync = lk_cuda_device_alloc(words * sizeof *pool->sync, why, why_bytes);
    error = pool->sync ? open_lanes(engine, pool, why, why_bytes) : -ENOMEM;
    if (error)
        return error;
    engine->capture_ns += lk_engine_now_ns() - begun;
    engine->capture_bytes += had - free_bytes();
    describe(engine);
    *ret = pool->view;
    *ret_fd = pool->memory.fd;
    return 0;
}

/* ---- open, close ---- */

static void close_slots(struct cuda_engine *engine) {
    for (uint32_t i = 0; i < LK_BATCHES_IN_FLIGHT; i++) {
        struct cuda_slot *slot = &engine->slot[i];
        lk_cuda_host_free(slot->builds);
        if (slot->fence)
            cudaEventDestroy(slot->fence);
        if (slot->built)
            cudaEventDestroy(slot->built);
        if (slot->builder)
            cudaStreamDestroy(slot->builder);
    }
    for (uint32_t i = 0; i < LK_BATCHES_AHEAD; i++) {
        struct cuda_desk *desk = &engine->desk[i];
        lk_cuda_device_free(desk->workspace);
        lk_cuda_host_free(desk->tables);
        lk_cuda_host_free(desk->slots);
        lk_cuda_host_free(desk->copies);
    }
}

static void cuda_close(struct lk_engine *base) {
    struct cuda_engine *engine = lk_cuda_engine_of(base);

    if (engine->waking) {
        __atomic_store_n(&engine->stop, true, __ATOMIC_RELEASE);
        sem_post(&engine->wake);
        pthread_join(engine->waker, NULL);
    }
    lk_cuda_choose(engine);
    if (engine->stream)
        cudaStreamSynchronize(engine->stream);
    for (uint32_t i = 0; i < LK_BATCHES_IN_FLIGHT; i++)
        if (engine->slot[i].builder)
            cudaStreamSynchronize(engine->slot[i].builder);
    lk_cuda_sentry_close(&engine->sentry);
    for (uint32_t p = 0; p < engine->pools; p++) {
        for (uint32_t i = 0; i < LK_BATCHES_AHEAD; i++)
            lk_cuda_lane_close(&engine->pool[p].lane[i]);
        lk_cuda_device_free(engine->pool[p].sync);
        lk_cuda_memory_close(&engine->pool[p].memory);
    }
    close_slots(engine);
    lk_cuda_host_free(engine->words);
    if (engine->stream)
        cudaStreamDestroy(engine->stream);
    if (engine->event >= 0)
        close(engine->event);
    sem_destroy(&engine->wake);
    free(engine);
}

static const char *cuda_describe(const struct lk_engine *base) {
    return ((const struct cuda_engine *)base)->text;
}

static const struct lk_backend cuda_backend = {
    .device = LK_DEVICE_CUDA,
    .close = cuda_close,
    .describe = cuda_describe,
    .pool_open = cuda_pool_open,
    .map = cuda_map,
    .unmap = cuda_unmap,
    .arena_open = cuda_arena_open,
    .arena_close = cuda_arena_close,
    .mps = cuda_mps,
    .signal = lk_cuda_raise,
    .fence_reached = lk_cuda_fence_reached,
    .fence_forget = lk_cuda_fence_forget,
    .launch = lk_cuda_launch,
    .poll = lk_cuda_poll,
    .trouble = lk_cuda_trouble,
    .hot = lk_cuda_hot,
    .fd = lk_cuda_fd,
    .sleep = lk_cuda_sleep,
};

/* Can it serve, and what is it? */
static int look_at(uint32_t gpu, struct cudaDeviceProp *ret, char *why, size_t why_bytes) {
    int count = 0, registers = 0;
    cudaError_t error = cudaGetDeviceCount(&count);

    if (!error && (uint32_t)count <= gpu) {
        snprintf(why, why_bytes, "there is no GPU number %u, there are %d", gpu, count);
        return -ENODEV;
    }
    if (!error)
        error = cudaGetDeviceProperties(ret, (int)gpu);
    if (!error)
        error = cudaDeviceGetAttribute(&registers, cudaDevAttrCanUseHostPointerForRegisteredMem,
                                       (int)gpu);
    if (error) {
        snprintf(why, why_bytes, "no GPU: %s", cudaGetErrorString(error));
        cudaGetLastError(); /* it is told */
        return -ENODEV;
    }
    if (ret->major < 8) {
        snprintf(why, why_bytes, "GPU %u, %s, has compute capability %d.%d, 8.0 is needed", gpu,
                 ret->name, ret->major, ret->minor);
        return -ENOTSUP;
    }
    if (!registers) {
        snprintf(why, why_bytes, "GPU %u, %s, cannot read host memory at the host's addresses", gpu,
                 ret->name);
        return -ENOTSUP;
    }
    return 0;
}

int lk_cuda_engine_usable(uint32_t gpu, char *why, size_t why_bytes) {
    struct cudaDeviceProp properties;

    return look_at(gpu, &properties, why, why_bytes);
}

int lk_cuda_engine_holds(uint32_t gpu, const struct lk_geometry *geometry, char *why,
                         size_t why_bytes) {
    struct cudaDeviceProp properties;
    char name[128];
    int error = look_at(gpu, &properties, why, why_bytes);

    if (error)
        return error;
    snprintf(name, sizeof name, "GPU %u, %.63s", gpu, properties.name);
    return lk_cuda_geometry_refused(geometry, name, lk_cuda_shared_least(geometry),
                                    (uint32_t)properties.sharedMemPerBlockOptin, why, why_bytes);
}

static int open_slots(struct cuda_engine *engine, char *why, size_t why_bytes) {
    uint64_t tables = engine->workspace_bytes; /* a row's table is part of its workspace */

    for (uint32_t i = 0; i < LK_BATCHES_AHEAD; i++) {
        struct cuda_desk *desk = &engine->desk[i];
        desk->workspace = lk_cuda_device_alloc(engine->workspace_bytes, why, why_bytes);
        if (desk->workspace)
            desk->tables = lk_cuda_host_alloc(tables, why, why_bytes);
        if (desk->tables)
            desk->slots =
                lk_cuda_host_alloc(LK_BATCH_SLOTS_MAX * sizeof *desk->slots, why, why_bytes);
        if (desk->slots)
            desk->copies =
                lk_cuda_host_alloc(LK_BATCH_COPIES_MAX * sizeof *desk->copies, why, why_bytes);
        if (!desk->copies)
            return -ENOMEM;
    }
    for (uint32_t i = 0; i < LK_BATCHES_IN_FLIGHT; i++) {
        uint64_t bytes = BUILD_ENTRIES * sizeof *engine->slot[i].builds;
        engine->slot[i].builds = lk_cuda_host_alloc(bytes, why, why_bytes);
        if (!engine->slot[i].builds)
            return -ENOMEM;
    }
    return 0;
}

static cudaError_t open_streams(struct cuda_engine *engine) {
    int low = 0, high = 0;
    cudaError_t error = cudaDeviceGetStreamPriorityRange(&low, &high);

    if (!error)
        error = cudaStreamCreateWithPriority(&engine->stream, cudaStreamNonBlocking, high);
    for (uint32_t i = 0; i < LK_BATCHES_IN_FLIGHT && !error; i++) {
        struct cuda_slot *slot = &engine->slot[i];
        error = cudaStreamCreateWithPriority(&slot->builder, cudaStreamNonBlocking, low);
        if (!error)
            error = cudaEventCreateWithFlags(&slot->fence, cudaEventDisableTiming);
        if (!error)
            error = cudaEventCreateWithFlags(&slot->built, cudaEventDisableTiming);
    }
    return error;
}

static int open_parts(struct cuda_engine *engine, char *why, size_t why_bytes) {
    cudaError_t error = open_streams(engine);

    engine->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (error || engine->event < 0) {
        snprintf(why, why_bytes, "no streams or eventfd for the engine: %s",
                 error ? cudaGetErrorString(error) : strerror(errno));
        return -EIO;
    }
    engine->words = lk_cuda_host_alloc(sizeof *engine->words, why, why_bytes);
    if (!engine->words)
        return -ENOMEM;
    int rc = open_slots(engine, why, why_bytes);
    if (!rc)
        rc = lk_cuda_sentry_open(&engine->sentry, engine->mps, why, why_bytes);
    if (rc)
        return rc;
    rc = pthread_create(&engine->waker, NULL, lk_cuda_run_waker, engine);
    engine->waking = rc == 0;
    if (rc)
        snprintf(why, why_bytes, "cannot start the engine's thread: %s", strerror(rc));
    return -rc;
}

/* Whether this process's contexts on the GPU go through MPS. A driver that does not know the
 * question knows no MPS either that could be asked for. */
static bool shared(int gpu) {
    int mps = 0;

    if (cudaDeviceGetAttribute(&mps, cudaDevAttrMpsEnabled, gpu))
        cudaGetLastError();
    return mps != 0;
}

int lk_cuda_engine_open(const struct lk_engine_options *options, struct lk_engine **ret, char *why,
                        size_t why_bytes) {
    struct cudaDeviceProp properties;
    int error = look_at(options->gpu, &properties, why, why_bytes);

    if (error)
        return error;
    struct cuda_engine *engine = calloc(1, sizeof *engine);
    if (!engine) {
        snprintf(why, why_bytes, "no memory for the engine, %zu bytes", sizeof *engine);
        return -ENOMEM;
    }
    engine->base.backend = &cuda_backend;
    engine->event = -1;
    engine->gpu = (int)options->gpu;
    engine->workspace_bytes = options->workspace_bytes;
    sem_init(&engine->wake, 0, 0);
    memcpy(engine->uuid, &properties.uuid, sizeof engine->uuid);
    engine->mps = shared(engine->gpu);
    snprintf(engine->name, sizeof engine->name, "%.63s", properties.name);
    engine->processors = (uint32_t)properties.multiProcessorCount;
    if (lk_cuda_choose(engine)) {
        snprintf(why, why_bytes, "GPU %d: %s", engine->gpu, cudaGetErrorString(cudaGetLastError()));
        error = -EIO;
    }
    if (!error)
        error = open_parts(engine, why, why_bytes);
    describe(engine);
    if (error) {
        cuda_close(&engine->base);
        return error;
    }
    *ret = &engine->base;
    return 0;
}
