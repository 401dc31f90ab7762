/* SPDX-License-Identifier: MIT */
/*
 * sentry.c - see sentry.h.
 */
#include "cuda_engine.h"

#include <errno.h>
#include <stdio.h>

#define HOT_NS  UINT64_C(5000000) /* of a wait: longer than a layer of most models takes */
#define LIFE_NS UINT64_C(50000)   /* of a watch: what a step may find in its way */
#define LOOK_NS UINT64_C(50000)   /* between two watches that look once */
#define COLD_NS UINT64_C(500000)  /* the same for a wait that is no longer hot */
#define DEEP    2                 /* watches in the stream at once */

_Static_assert(LK_FENCE_PLACES <= LK_CUDA_PLACES, "the watch has all places");

int lk_cuda_sentry_open(struct lk_cuda_sentry *sentry, bool mps, char *why, size_t why_bytes) {
    sentry->stays = mps;
    if (cudaStreamCreateWithFlags(&sentry->stream, cudaStreamNonBlocking)) {
        snprintf(why, why_bytes, "no stream for the fences' watch: %s",
                 cudaGetErrorString(cudaGetLastError()));
        return -EIO;
    }
    sentry->watch = lk_cuda_host_alloc(sizeof *sentry->watch, why, why_bytes);
    return sentry->watch ? 0 : -ENOMEM;
}

void lk_cuda_sentry_close(struct lk_cuda_sentry *sentry) {
    if (sentry->stream) {
        cudaStreamSynchronize(sentry->stream);
        cudaStreamDestroy(sentry->stream);
    }
    lk_cuda_host_free(sentry->watch);
}

/* Waits for what is on a stream by now. */
static cudaError_t wait_for(cudaStream_t stream) {
    cudaEvent_t event;
    cudaError_t error =
        cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync);

    if (error)
        return error;
    error = cudaEventRecord(event, stream);
    if (!error)
        error = cudaEventSynchronize(event);
    cudaEventDestroy(event);
    return error;
}

int lk_cuda_sentry_settle(const struct lk_cuda_sentry *sentry, cudaStream_t raiser) {
    cudaError_t error = wait_for(sentry->stream);

    return (int)(error ? error : wait_for(raiser));
}

bool lk_cuda_sentry_hot(const struct lk_cuda_sentry *sentry) {
    return sentry->armed && lk_engine_now_ns() - sentry->armed_ns < HOT_NS;
}

/* Launches a watch if it is time for one. */
static void keep(struct cuda_engine *engine) {
    struct lk_cuda_sentry *sentry = &engine->sentry;
    uint64_t ended = __atomic_load_n(&sentry->watch->ended, __ATOMIC_ACQUIRE);
    uint64_t there = sentry->launched - ended, now = lk_engine_now_ns();
    bool hot = now - sentry->armed_ns < HOT_NS, stays = hot && sentry->stays;

    if (engine->broken || there >= (stays ? DEEP : 1))
        return;
    if (!stays && now - sentry->launched_ns < (hot ? LOOK_NS : COLD_NS))
        return;
    int error = lk_cuda_choose(engine);
    if (!error)
        error =
            lk_cuda_watch(sentry->watch, ++sentry->launched, stays ? LIFE_NS : 0, sentry->stream);
    sentry->launched_ns = now;
    lk_cuda_check(engine, error, "watching fences");
}

/* The number comes last. */
static void write_entry(struct lk_cuda_entry *at, uint64_t number, const uint64_t *word,
                        uint64_t value) {
    uint64_t address = (uintptr_t)word, check = lk_cuda_entry_check(number, address, value);

    __atomic_store_n(&at->word, address, __ATOMIC_RELAXED);
    __atomic_store_n(&at->value, value, __ATOMIC_RELAXED);
    __atomic_store_n(&at->check, check, __ATOMIC_RELAXED);
    __atomic_store_n(&at->number, number, __ATOMIC_RELEASE);
}

static void write_place(struct lk_cuda_sentry *sentry, uint32_t place, const uint64_t *word,
                        uint64_t value, uint64_t ticket) {
    struct lk_cuda_watch *watch = sentry->watch;

    write_entry(&watch->place[place], ticket, word, value);
    __atomic_store_n(&watch->ticket[place], ticket, __ATOMIC_RELEASE);
    sentry->ticket[place] = ticket;
}

/* Tells the watch that is there. */
static void tell(struct lk_cuda_sentry *sentry, uint32_t place) {
    uint64_t changes = sentry->watch->version / LK_CUDA_PLACES + 1;

    __atomic_store_n(&sentry->watch->version, changes * LK_CUDA_PLACES + place, __ATOMIC_RELEASE);
}

void lk_cuda_fence_forget(struct lk_engine *base, uint32_t place) {
    struct lk_cuda_sentry *sentry = &lk_cuda_engine_of(base)->sentry;

    if (!sentry->ticket[place])
        return;
    write_place(sentry, place, NULL, 0, 0);
    tell(sentry, place);
    sentry->armed--;
}

bool lk_cuda_fence_reached(struct lk_engine *base, uint32_t place, const uint64_t *word,
                           uint64_t value, uint64_t *ret_held) {
    struct cuda_engine *engine = lk_cuda_engine_of(base);
    struct lk_cuda_sentry *sentry = &engine->sentry;
    struct lk_cuda_watch *watch = sentry->watch;

    if (!sentry->ticket[place]) {
        write_place(sentry, place, word, value, ++sentry->tickets);
        tell(sentry, place);
        sentry->armed++;
        sentry->armed_ns = lk_engine_now_ns();
    } else if (__atomic_load_n(&watch->reached[place], __ATOMIC_ACQUIRE) == sentry->ticket[place]) {
        write_place(sentry, place, NULL, 0, 0); /* the watch has left it by itself */
        sentry->armed--;
        return true;
    }
    *ret_held = __atomic_load_n(&watch->held[place], __ATOMIC_RELAXED);
    keep(engine);
    return false;
}

/* ---- raising ---- */

/* Nothing is in flight that words to be raised must come after. */
static bool quiet(struct cuda_engine *engine) {
    struct lk_cuda_sentry *sentry = &engine->sentry;

    if (engine->fenced != engine->launched)
        return false;
    if (sentry->on_stream && engine->fenced <= sentry->stream_raises)
        sentry->on_stream = cudaStreamQuery(engine->stream) != cudaSuccess;
    else
        sentry->on_stream = false;
    return !sentry->on_stream;
}

/* Asks a watch -> false: none can be counted on. */
static bool raise_by_watch(struct lk_cuda_sentry *sentry, const struct lk_signal *signals,
                           uint32_t count) {
    struct lk_cuda_watch *watch = sentry->watch;
    uint64_t raised = __atomic_load_n(&watch->raised, __ATOMIC_ACQUIRE);

    if (!sentry->stays || count > LK_CUDA_RAISES - (sentry->raises - raised) ||
        __atomic_load_n(&watch->ending, __ATOMIC_ACQUIRE) >= sentry->launched)
        return false;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t number = ++sentry->raises;
        write_entry(&watch->raise[number % LK_CUDA_RAISES], number, signals[i].word,
                    signals[i].value);
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(&watch->ending, __ATOMIC_ACQUIRE) < sentry->launched)
        return true;
    for (uint64_t number = sentry->raises - count + 1; number <= sentry->raises; number++)
        write_entry(&watch->raise[number % LK_CUDA_RAISES], number, NULL, 0);
    return false;
}

int lk_cuda_raise_in_turn(struct cuda_engine *engine, const struct lk_signal *signals,
                          uint32_t count) {
    struct lk_cuda_sentry *sentry = &engine->sentry;

    if (!count)
        return 0;
    sentry->on_stream = true;
    sentry->stream_raises = engine->launched;
    return lk_cuda_check(
        engine, lk_cuda_signal((const struct lk_cuda_signal *)signals, count, engine->stream),
        "raising fences");
}

int lk_cuda_raise(struct lk_engine *base, const struct lk_signal *signals, uint32_t count) {
    struct cuda_engine *engine = lk_cuda_engine_of(base);

    if (!engine->broken && quiet(engine) && raise_by_watch(&engine->sentry, signals, count))
        return 0;
    int error = lk_cuda_check(engine, lk_cuda_choose(engine), "choosing the GPU");
    return error ? error : lk_cuda_raise_in_turn(engine, signals, count);
}
