/* SPDX-License-Identifier: MIT */
/*
 * engine.h - a device and the pipelines prepared for it. The daemon sees this and nothing below it.
 *
 * An engine owns the device's threads, the pools' memory and the workspaces. A batch is filled by
 * the daemon and launched; at most LK_BATCHES_IN_FLIGHT are in flight, they run in order. A batch
 * passes two marks:
 *
 *     LAUNCHED --results written--> FENCED --pages it closed are summarised--> DONE
 *
 * Results may be published at FENCED; memory the batch names may be reused at DONE. A batch
 * launched later sees everything an earlier one did, its builds included.
 *
 * One thread calls all functions here (the intake thread), except where noted.
 */
#ifndef LK_ENGINE_H
#define LK_ENGINE_H

#include "../kernels/kernels.h"

#define LK_BATCH_ROWS_MAX    256 /* the largest rows bucket */
#define LK_BATCHES_IN_FLIGHT 2   /* one runs, one waits: the device never idles between them */

struct lk_engine;

struct lk_engine_options {
    uint32_t threads; /* CPU workers, at least 1 */
    const int *cpus;  /* [threads] to pin worker i to, or NULL */
    uint32_t spin_us; /* workers spin so long for the next task before they sleep */
    uint64_t
        workspace_bytes; /* of each batch in flight; rows are admitted to a batch while they fit */
    uint32_t cpu_path;   /* enum lk_cpu_path; 0: best */
};

/* -> 0 or -errno with a sentence in why. Takes all memory it will ever use but pools'. */
int lk_engine_open(const struct lk_engine_options *options, struct lk_engine **ret, char *why,
                   size_t why_bytes);
void lk_engine_close(struct lk_engine *engine);
const char *lk_engine_describe(const struct lk_engine *engine); /* "cpu avx512, 2 threads" */

/* A pool's memory: one memfd (kv, coarse, fine, super in this order, each part page aligned),
 * populated, on huge pages where the kernel lends them. ret_fd stays the engine's; valid until
 * lk_engine_close(). bytes of `pages` pages: lk_engine_pool_bytes() (engine may be NULL before
 * there is one). -ENOMEM with the sizes in why.
 */
uint64_t lk_engine_pool_bytes(const struct lk_engine *engine, const struct lk_geometry *geometry,
                              uint64_t pages);
int lk_engine_pool_open(struct lk_engine *engine, const struct lk_geometry *geometry,
                        uint64_t pages, struct lk_pool_view *ret, int *ret_fd, char *why,
                        size_t why_bytes);

/* Bytes of workspace a row takes in a batch; a function of the row alone. A row that exceeds the
 * whole workspace can never run: the daemon sizes workspaces by its largest row, before there is an
 * engine (then NULL), from the pool's geometry alone. */
uint64_t lk_engine_row_workspace(const struct lk_engine *engine, const struct lk_row *row);

enum lk_phase {
    LK_PHASE_COPY,
    LK_PHASE_APPEND,
    LK_PHASE_SCORE,
    LK_PHASE_SELECT,
    LK_PHASE_ATTEND,
    LK_PHASE_BUILD,
    LK_PHASES
};

/* Filled by the daemon; arrays stay the daemon's and unchanged until DONE, but for what stages
 * write in rows. */
struct lk_batch {
    struct lk_row *rows; /* workspace pointers are set by the engine */
    uint32_t row_count;
    const struct lk_copy *copies;
    uint32_t copy_count;
    const struct lk_write *writes;
    uint32_t write_count;
    const struct lk_build *builds_before; /* pages sealed by writes: before any row is scored */
    uint32_t build_before_count;
    const struct lk_build *builds_after; /* pages closed by rows: after the fence */
    uint32_t build_after_count;
    void *owner; /* the daemon's */
    /* Written by the engine. */
    uint32_t bucket;              /* rows bucket it ran as: 1, 2, 4 .. 256 */
    uint64_t phase_ns[LK_PHASES]; /* complete at FENCED, but for BUILD: at DONE */
};

/* -EAGAIN: two are in flight. */
int lk_engine_launch(struct lk_engine *engine, struct lk_batch *batch);

enum lk_mark { LK_MARK_NONE, LK_MARK_FENCED, LK_MARK_DONE };
/* The next mark some batch has passed, in order; NONE: nothing new. Never blocks. */
enum lk_mark lk_engine_poll(struct lk_engine *engine, struct lk_batch **ret);
/* An eventfd that becomes readable whenever a mark may have been passed while the caller slept.
 * Protocol: lk_engine_sleep(true), poll once more, sleep on it, lk_engine_sleep(false) (which also
 * drains it). */
int lk_engine_fd(const struct lk_engine *engine);
void lk_engine_sleep(struct lk_engine *engine, bool sleeping);

#endif
