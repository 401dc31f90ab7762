/* SPDX-License-Identifier: MIT */
/*
 * cpu_engine.c - batches in flight on the CPU: their order, their marks, their memory.
 *
 * Idea: there is no thread that drives a batch. Whoever finishes the last task of a stage advances
 * the batch: it lays out and publishes the next stage that has tasks, passes the fence, and after
 * the last stage starts the batch that waits. A launch that finds the engine idle does the same
 * from the caller's thread. `queued` decides between the two: it counts batches launched and not
 * yet done, and whoever takes it from 0, or leaves it above 0, starts the next.
 *
 *     launch: slot filled, queued += 1 -- was 0 --> start ---> advance ... advance
 *                                                     ^                       |
 *                                                     +---- still above 0 ----+ DONE, queued -= 1
 *
 * Marks are a count: each batch passes two, in order, so mark i belongs to the i/2-th batch
 * launched. Pair: M1 marks added to, then `sleeping` loaded (worker) against M2 `sleeping` stored,
 * then marks loaded (caller), in one total order: one of the two sees the other.
 *
 * Invariants: a batch is not touched after its DONE; phase_ns is complete at FENCED but for
 * LK_PHASE_BUILD, which is written just before DONE.
 */
#include "backend.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "../kernels/cpu/cpu.h"
#include "memory.h"
#include "plan.h"
#include "workers.h"

#define MARKS 2  /* of a batch: FENCED, DONE */
#define ALIGN 64 /* of rows' workspaces */

struct run { /* the batch that runs; belongs to whoever advances it */
    struct lk_batch *batch;
    struct lk_plan *plan;
    uint32_t stage;
    uint64_t since_ns, build_ns;
};

struct cpu_engine {
    struct lk_engine base; /* first: leads back here */
    struct lk_workers *workers;
    uint8_t *scratch; /* one after the other, a worker each */
    struct lk_batch *slot[LK_BATCHES_IN_FLIGHT];
    _Atomic uint32_t queued;
    _Atomic uint64_t marks;
    _Atomic bool sleeping;
    uint64_t launched, seen; /* batches; marks. The caller's */
    uint64_t started;        /* batches; of whoever starts one */
    struct run run;
    int event;
    struct lk_plan plan[LK_PLAN_BUCKETS];
    struct lk_memory workspace[LK_BATCHES_AHEAD];
    struct lk_memory pool[LK_ENGINE_POOLS_MAX];
    uint32_t pools;
    char text[64];
};

static struct cpu_engine *of(struct lk_engine *base) {
    return (struct cpu_engine *)base;
}

/* ---- advancing: on whichever thread holds the run ---- */

static void pass_mark(struct cpu_engine *engine) {
    uint64_t one = 1;

    atomic_fetch_add(&engine->marks, 1); /* M1 */
    if (atomic_load(&engine->sleeping) && write(engine->event, &one, sizeof one) < 0)
        return; /* EAGAIN: the counter is full, so the descriptor is readable already */
}

static void start(struct cpu_engine *engine) {
    struct run *run = &engine->run;

    run->batch = engine->slot[engine->started++ % LK_BATCHES_IN_FLIGHT];
    run->plan = &engine->plan[0];
    while (run->plan->bucket < run->batch->bucket)
        run->plan++;
    run->stage = 0;
    run->build_ns = 0;
}

static void clock_stage(struct run *run) {
    enum lk_phase phase = lk_plan_phase(run->stage);
    uint64_t spent = lk_engine_now_ns() - run->since_ns;

    if (phase == LK_PHASE_BUILD)
        run->build_ns += spent;
    else
        run->batch->phase_ns[phase] += spent;
}

/* Publish the next stage that has tasks -> true; false: the batch has none left. */
static bool publish_next(struct cpu_engine *engine) {
    struct run *run = &engine->run;

    for (; run->stage < lk_plan_stages(); run->stage++) {
        run->since_ns = lk_engine_now_ns();
        if (run->stage == lk_plan_fence()) {
            run->batch->fenced_ns = run->since_ns;
            pass_mark(engine);
        }
        uint32_t tasks = lk_plan_layout(run->plan, run->stage, run->batch);
        if (tasks) {
            lk_workers_publish(engine->workers, tasks);
            return true;
        }
    }
    return false;
}

static void advance(struct cpu_engine *engine) {
    while (!publish_next(engine)) {
        engine->run.batch->phase_ns[LK_PHASE_BUILD] = engine->run.build_ns;
        pass_mark(engine);
        if (atomic_fetch_sub(&engine->queued, 1) == 1)
            return;
        start(engine);
    }
}

static void stage_done(void *context) {
    struct cpu_engine *engine = context;

    clock_stage(&engine->run);
    engine->run.stage++;
    advance(engine);
}

static void run_task(void *context, uint32_t worker, uint32_t task) {
    const struct cpu_engine *engine = context;
    const struct run *run = &engine->run;
    uint8_t *scratch = engine->scratch + worker * lk_cpu_scratch_bytes();

    lk_plan_run(run->plan, run->stage, run->batch, task, (struct lk_scratch *)scratch);
}

/* ---- batches: the caller's thread ---- */

uint64_t lk_cpu_engine_row_workspace(const struct lk_row *row) {
    return (lk_cpu_row_workspace_bytes(row) + ALIGN - 1) / ALIGN * ALIGN;
}

static int cpu_launch(struct lk_engine *base, struct lk_batch *batch) {
    struct cpu_engine *engine = of(base);
    const struct lk_memory *room = &engine->workspace[engine->launched % LK_BATCHES_AHEAD];
    uint64_t fenced = (engine->seen + MARKS - 1) / MARKS, done = engine->seen / MARKS;

    if (engine->launched - fenced >= LK_BATCHES_AHEAD ||
        engine->launched - done >= LK_BATCHES_IN_FLIGHT)
        return -EAGAIN;
    int error = lk_batch_admit(LK_DEVICE_CPU, room->at, room->bytes, batch);
    if (error)
        return error;
    engine->slot[engine->launched++ % LK_BATCHES_IN_FLIGHT] = batch;
    if (atomic_fetch_add(&engine->queued, 1) == 0) {
        start(engine);
        advance(engine);
    }
    return 0;
}

static enum lk_mark cpu_poll(struct lk_engine *base, struct lk_batch **ret) {
    struct cpu_engine *engine = of(base);

    if (engine->seen == atomic_load(&engine->marks))
        return LK_MARK_NONE;
    *ret = engine->slot[engine->seen / MARKS % LK_BATCHES_IN_FLIGHT];
    return engine->seen++ % MARKS ? LK_MARK_DONE : LK_MARK_FENCED;
}

static int cpu_fd(const struct lk_engine *base) {
    return ((const struct cpu_engine *)base)->event;
}

static void cpu_sleep(struct lk_engine *base, bool sleeping) {
    struct cpu_engine *engine = of(base);
    uint64_t drained;

    atomic_store(&engine->sleeping, sleeping); /* M2 */
    if (!sleeping && read(engine->event, &drained, sizeof drained) < 0)
        return; /* EAGAIN: nothing to drain */
}

/* ---- opening ---- */

static int open_workers(struct cpu_engine *engine, const struct lk_engine_options *options,
                        char *why, size_t why_bytes) {
    struct lk_workers_options workers = {.threads = options->threads,
                                         .spin_us = options->spin_us,
                                         .cpus = options->cpus,
                                         .run = run_task,
                                         .done = stage_done,
                                         .context = engine};
    engine->scratch = aligned_alloc(ALIGN, options->threads * lk_cpu_scratch_bytes());
    int error = engine->scratch ? lk_workers_open(&workers, &engine->workers) : -ENOMEM;

    if (error)
        snprintf(why, why_bytes, "cannot start worker threads (%u): %s%s", options->threads,
                 strerror(-error),
                 error == -EAGAIN ? ": a limit on threads or memory (ulimit -u or -v, TasksMax= of "
                                    "systemd)"
                                  : "");
    return error;
}

static int open_parts(struct cpu_engine *engine, const struct lk_engine_options *options, char *why,
                      size_t why_bytes) {
    int error = 0;

    for (uint32_t i = 0; i < LK_PLAN_BUCKETS && !error; i++)
        error = lk_plan_open(&engine->plan[i], 1U << i);
    engine->event = error ? -1 : eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (engine->event < 0) {
        error = error ? error : -errno;
        snprintf(why, why_bytes, "no plans or eventfd for the engine: %s", strerror(-error));
        return error;
    }
    for (uint32_t i = 0; i < LK_BATCHES_AHEAD && !error; i++)
        error =
            lk_memory_open(NULL, options->workspace_bytes, &engine->workspace[i], why, why_bytes);
    return error ? error : open_workers(engine, options, why, why_bytes);
}

static void cpu_close(struct lk_engine *base) {
    struct cpu_engine *engine = of(base);

    lk_workers_close(engine->workers);
    free(engine->scratch);
    for (uint32_t i = 0; i < engine->pools; i++)
        lk_memory_close(&engine->pool[i]);
    for (uint32_t i = 0; i < LK_BATCHES_AHEAD; i++)
        lk_memory_close(&engine->workspace[i]);
    for (uint32_t i = 0; i < LK_PLAN_BUCKETS; i++)
        lk_plan_close(&engine->plan[i]);
    if (engine->event >= 0)
        close(engine->event);
    free(engine);
}

static const char *cpu_describe(const struct lk_engine *base) {
    return ((const struct cpu_engine *)base)->text;
}

/* ---- pools ---- */

static int cpu_pool_open(struct lk_engine *base, const struct lk_geometry *geometry, uint64_t pages,
                         struct lk_pool_view *ret, int *ret_fd, char *why, size_t why_bytes) {
    struct lk_pool_view view = {.geometry = *geometry, .pages = pages};
    struct cpu_engine *engine = of(base);

    if (lk_pool_refused(engine->pools, pages, why, why_bytes))
        return -EINVAL;
    lk_cpu_layout(geometry, &view.layout);
    struct lk_parts parts = lk_pool_parts(geometry, &view.layout, pages);
    struct lk_memory *memory = &engine->pool[engine->pools];
    int error = lk_memory_open("locksd-pool", parts.bytes, memory, why, why_bytes);
    if (error)
        return error;
    engine->pools++;
    lk_pool_place(&view, &parts, memory->at);
    *ret = view;
    *ret_fd = memory->fd;
    return 0;
}

static const struct lk_backend cpu_backend = {
    .device = LK_DEVICE_CPU,
    .close = cpu_close,
    .describe = cpu_describe,
    .pool_open = cpu_pool_open,
    .launch = cpu_launch,
    .poll = cpu_poll,
    .fd = cpu_fd,
    .sleep = cpu_sleep,
};

int lk_cpu_engine_open(const struct lk_engine_options *options, struct lk_engine **ret, char *why,
                       size_t why_bytes) {
    int error = lk_cpu_open((enum lk_cpu_path)options->cpu_path);

    if (error) {
        snprintf(why, why_bytes, "cpu_path %s: this machine lacks its instructions",
                 lk_cpu_path_name((enum lk_cpu_path)options->cpu_path));
        return error;
    }
    struct cpu_engine *engine = calloc(1, sizeof *engine);
    if (!engine) {
        snprintf(why, why_bytes, "no memory for the engine, %zu bytes", sizeof *engine);
        return -ENOMEM;
    }
    engine->base.backend = &cpu_backend;
    engine->event = -1;
    error = open_parts(engine, options, why, why_bytes);
    if (error) {
        cpu_close(&engine->base);
        return error;
    }
    snprintf(engine->text, sizeof engine->text, "cpu %s, %u thread%s",
             lk_cpu_path_name(lk_cpu_path()), options->threads, options->threads == 1 ? "" : "s");
    *ret = &engine->base;
    return 0;
}
