/* SPDX-License-Identifier: MIT */
/*
 * engine.h - a device and the pipelines prepared for it. The daemon sees this and nothing below it.
 *
 * An engine owns the device's threads, the pools' memory and the workspaces. A batch is filled by
 * the daemon and launched; at most LK_BATCHES_IN_FLIGHT are not DONE, of them LK_BATCHES_AHEAD not
 * FENCED, and they run in order. A batch passes two marks:
 *
 *     LAUNCHED --results written--> FENCED --pages it closed are summarised--> DONE
 *
 * Results may be published at FENCED; memory the batch names may be reused at DONE. A batch
 * launched later sees everything an earlier one did, its builds included. FENCED marks come in the
 * order of launches, and so do DONE marks; a batch may be FENCED before an earlier one is DONE.
 *
 * One thread calls all functions here (the intake thread), except where noted.
 *
 * Two devices stand behind it, chosen when it is opened: the CPU, and CUDA where the binary was
 * built with it. A row's k, v, q, outputs and lists lie in memory made known by lk_engine_map(), or
 * all but the lists in memory of lk_engine_arena_open(); tables and slots are the daemon's own and
 * may change once their batch is launched only as kernels.h says.
 */
#ifndef LK_ENGINE_H
#define LK_ENGINE_H

#include "../kernels/kernels.h"

#define LK_BATCH_ROWS_MAX    256 /* the largest rows bucket */
#define LK_BATCHES_AHEAD     2   /* one runs, one waits: the device never idles between them */
#define LK_BATCHES_IN_FLIGHT 4   /* and pages that those before them closed are summarised */
/* What else a batch may hold at most. */
#define LK_BATCH_COPIES_MAX  16384
#define LK_BATCH_SLOTS_MAX   65536                                      /* of all its writes */
#define LK_BATCH_BUILDS_MAX  (LK_BATCH_SLOTS_MAX + LK_BATCH_COPIES_MAX) /* before, and after */
#define LK_BATCH_TOKENS_MAX  65536 /* of all its rows of several tokens */
#define LK_BATCH_SIGNALS_MAX 1024
#define LK_FENCE_PLACES      256 /* words that can be watched at once */

struct lk_engine;

enum lk_device {
    LK_DEVICE_AUTO = 0, /* counts as the CPU until lk_engine_choose() has decided */
    LK_DEVICE_CPU,
    LK_DEVICE_CUDA
};

/* Does GPU number `gpu` answer, and can pools of these geometries lie there? 0, or -errno with a
 * sentence in why; -ENOTSUP: not with this binary, or not a geometry for a GPU. Any thread. */
int lk_engine_gpu_serves(uint32_t gpu, const struct lk_geometry *geometries, uint32_t count,
                         char *why, size_t why_bytes);
/* Whether this machine has the instructions of a path (enum lk_cpu_path). Any thread. */
bool lk_engine_cpu_serves(uint32_t cpu_path);
/* What `wanted` means on this machine for pools of these geometries: AUTO is CUDA where the binary
 * has its kernels, GPU number `gpu` answers and every pool can lie there. Where AUTO is the CPU
 * although the binary has kernels, why says what stood against it; otherwise it is empty. Any
 * thread, before lk_engine_open(). */
enum lk_device lk_engine_choose(enum lk_device wanted, uint32_t gpu,
                                const struct lk_geometry *geometries, uint32_t count, char *why,
                                size_t why_bytes);

struct lk_engine_options {
    enum lk_device device;
    uint32_t gpu;             /* CUDA: its number */
    uint32_t threads;         /* CPU workers, at least 1 */
    const int *cpus;          /* [threads] to pin worker i to, or NULL */
    uint32_t spin_us;         /* workers spin so long for the next task before they sleep */
    uint64_t workspace_bytes; /* of each of LK_BATCHES_AHEAD; a batch takes rows while they fit */
    uint32_t cpu_path;        /* enum lk_cpu_path; 0: best */
};

/* -> 0 or -errno with a sentence in why. Takes all memory it will ever use but pools'. */
int lk_engine_open(const struct lk_engine_options *options, struct lk_engine **ret, char *why,
                   size_t why_bytes);
void lk_engine_close(struct lk_engine *engine);
const char *lk_engine_describe(const struct lk_engine *engine); /* "cpu avx512, 2 threads" */

enum lk_device lk_engine_device(const struct lk_engine *engine); /* CPU or CUDA */

/* A pool's memory: one allocation (kv, coarse, fine, super in this order, each part page aligned).
 * CPU: a memfd, populated, on huge pages where the kernel lends them. CUDA: device memory, ret_fd
 * its shareable handle (cuMemImportFromShareableHandle). ret_fd stays the engine's; valid until
 * lk_engine_close(). -ENOMEM with the sizes in why, -ENOTSUP a geometry the device cannot hold.
 */
uint64_t lk_engine_pool_bytes(enum lk_device device, const struct lk_geometry *geometry,
                              uint64_t pages);
int lk_engine_pool_open(struct lk_engine *engine, const struct lk_geometry *geometry,
                        uint64_t pages, struct lk_pool_view *ret, int *ret_fd, char *why,
                        size_t why_bytes);

/* Bytes of workspace a row takes in a batch; a function of the row alone. A row that exceeds the
 * whole workspace can never run: the daemon sizes workspaces by its largest row, before there is an
 * engine, from the pool's geometry alone. */
uint64_t lk_engine_row_workspace(enum lk_device device, const struct lk_row *row);
/* Pages that a sparse row's budget may have at most on the device, and any row. */
uint32_t lk_engine_budget_pages(enum lk_device device);
uint32_t lk_engine_row_pages(enum lk_device device);
/* How much faster than the CPU the device multiplies, roughly: how much longer the parts may be in
 * which long rows run. */
uint32_t lk_engine_part_factor(enum lk_device device);

/* Makes memory that rows will point into (a client's arena) known to the device, and forgets it:
 * nothing in flight names it any more. at: page aligned, mapped and populated. Any thread. -> 0 or
 * -errno with a sentence in why. */
int lk_engine_map(struct lk_engine *engine, void *at, uint64_t bytes, char *why, size_t why_bytes);
void lk_engine_unmap(struct lk_engine *engine, void *at);

/* ---- clients on the GPU ---- */

/* Memory of the device for a client, cleared; fd is its shareable handle, the arena's. */
struct lk_engine_arena {
    uint8_t *at; /* the device's address */
    uint64_t bytes, handle;
    int fd;
    uint32_t gpu;
    uint8_t uuid[16];
};
/* -> 0; -ENOTSUP: the device is the CPU; -ENOMEM, -EIO; with a sentence in why. bytes are rounded
 * up to what the device allocates in. Any thread. */
int lk_engine_arena_open(struct lk_engine *engine, uint64_t bytes, struct lk_engine_arena *ret,
                         char *why, size_t why_bytes);
/* Nothing in flight or watched names it any more. Any thread. */
void lk_engine_arena_close(struct lk_engine *engine, struct lk_engine_arena *arena);
/* Whether processes on the device run side by side (CUDA MPS) and not by turns. Any thread. */
bool lk_engine_mps(const struct lk_engine *engine);

/* A word of a client's arena that is raised to a value, and never lowered. */
struct lk_signal {
    uint64_t *word;
    uint64_t value;
};
/* Raises words after everything launched so far. -> 0 or -EIO. */
int lk_engine_signal(struct lk_engine *engine, const struct lk_signal *signals, uint32_t count);
/* Whether the word has reached the value, as far as is known; does not wait. The first call for a
 * place begins to watch, and later ones keep watching: ask often. True ends it, and so does
 * _forget(). held (on false): what the word held when it was last seen. */
bool lk_engine_fence_reached(struct lk_engine *engine, uint32_t place, const uint64_t *word,
                             uint64_t value, uint64_t *ret_held);
void lk_engine_fence_forget(struct lk_engine *engine, uint32_t place);

/* ---- batches ---- */

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
    const struct lk_signal *signals; /* raised when results are there, before FENCED is seen */
    uint32_t signal_count;
    void *owner; /* the daemon's */
    /* Written by the engine. */
    uint32_t bucket;              /* rows bucket it ran as: 1, 2, 4 .. 256 */
    uint64_t phase_ns[LK_PHASES]; /* complete at FENCED, but for BUILD: at DONE */
    uint64_t fenced_ns;           /* CLOCK_MONOTONIC when results were found complete */
};

/* -EAGAIN: as many are in flight as may be. -EINVAL: more rows than a batch may have. -ENOSPC: the
 * rows do not fit the workspace. -EIO: the device is broken, see lk_engine_trouble(). */
int lk_engine_launch(struct lk_engine *engine, struct lk_batch *batch);

enum lk_mark { LK_MARK_NONE, LK_MARK_FENCED, LK_MARK_DONE, LK_MARK_BROKEN };
/* The next mark some batch has passed; NONE: nothing new. BROKEN: the device failed, no
 * result that was not fenced yet can be trusted, nothing will ever run again; ret is not written.
 * Never blocks. */
enum lk_mark lk_engine_poll(struct lk_engine *engine, struct lk_batch **ret);
/* What broke, as a sentence. */
const char *lk_engine_trouble(const struct lk_engine *engine);
/* Marks are about to come from a device that cannot wake a sleeper at once: rather spin. */
bool lk_engine_hot(const struct lk_engine *engine);
/* An eventfd that becomes readable whenever a mark may have been passed while the caller slept.
 * Protocol: lk_engine_sleep(true), poll once more, sleep on it, lk_engine_sleep(false) (which also
 * drains it). */
int lk_engine_fd(const struct lk_engine *engine);
void lk_engine_sleep(struct lk_engine *engine, bool sleeping);

#endif
