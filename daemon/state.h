/* SPDX-License-Identifier: MIT */
/*
 * state.h - all that the intake thread owns, for the files that make up intake.
 *
 *   intake.c    opening, closing, what other threads ask
 *   thread.c    the loop: tick, spin, sleep; commands of other threads
 *   take.c      ring -> checked submission
 *   object.c    submissions that need no batch
 *   step.c      rows of sequences: APPEND, DECODE, ATTEND
 *   table.c     rows and lists of leases: WRITE, ATTEND_TABLE, COPY_PAGES
 *   finish.c    marks of batches -> completions
 *   fence.c     fences of clients on the GPU
 *
 * Idea: one thread, no locks. A submission runs when it is the head of its channel's queue; it says
 * whether it has started for good, or must wait for a batch to come or to end.
 */
#ifndef LK_STATE_H
#define LK_STATE_H

#include <pthread.h>

#include "batch.h"
#include "intake.h"
#include "lease.h"
#include "sequence.h"

struct lk_call { /* another thread's question, carried out between two ticks */
    void (*run)(struct lk_intake *intake, void *argument);
    void *argument;
};

struct lk_intake {
    struct lk_config config; /* limits are the newest, all else as at start */
    struct lk_engine *engine;
    enum lk_device device;
    uint64_t boot_epoch, workspace_bytes;
    struct lk_ledger ledger;
    struct lk_pool pool[LK_POOLS_MAX];
    struct lk_pool_shape shape[LK_POOLS_MAX];
    uint32_t pools;

    /* Objects by handle: all sequences, then all leases. */
    struct lk_sequence *sequence;
    struct lk_sequence_layer *layer;
    struct lk_lease *lease;
    uint64_t *written; /* of the leases */
    uint32_t sequence_count, lease_count;
    struct lk_sequence *spare_sequence[LK_POOLS_MAX];
    struct lk_lease *spare_lease[LK_POOLS_MAX];

    struct lk_channel channel[LK_CHANNELS_MAX];
    uint32_t active[LK_CHANNELS_MAX]; /* those in use, in the order they are served */
    uint32_t channels, first;         /* `first` moves on every tick */
    struct lk_user user[LK_CHANNELS_MAX];

    struct lk_work work[LK_BATCHES_IN_FLIGHT];
    struct lk_work *filling;      /* of this tick, or NULL */
    uint32_t in_flight, unfenced; /* batches: not done, and of them those not fenced */
    uint64_t batch_serial, submission_serial;

    struct lk_lease_undo *undo; /* [LK_ROW_TOKENS_MAX] */

    uint32_t fences_waited;    /* heads of queues that wait for one */
    struct lk_signal *signals; /* [LK_SIGNALS_MAX], to be raised when this tick has launched */
    uint32_t signal_count;

    uint64_t chores; /* entries of lists and tables handled in this tick */
    bool unfinished; /* there are more: the next tick follows at once */

    /* Tables of leases take memory as they are filled: after each `every` bytes it is looked
     * whether more than `spare` is left. */
    struct {
        uint64_t taken, every, spare;
    } tables;

    bool draining;
    uint64_t now_ns; /* the last look at the clock: a microsecond or less ago */
    uint64_t heartbeat_ns;
    uint64_t ticks, batches, rows, rows_exact, rows_sparse, refusals, submissions;
    uint64_t score_bytes, select_bytes, attend_bytes, dense_bytes;

    /* thread.c */
    pthread_t thread;
    bool running;       /* the thread is; belongs to whoever starts and stops it */
    int epoll, command; /* `command`: an eventfd */
    pthread_mutex_t call_lock;
    pthread_cond_t called;
    struct lk_call *call; /* atomic */
    bool stop;            /* atomic */
    uint64_t alive_ns;    /* atomic: now_ns for other threads */
};

/* What became of the head of a queue. */
enum lk_run {
    LK_RUN_STARTED, /* it left the queue */
    LK_RUN_WAIT,    /* nothing more can be done for it before a batch is launched or passes a mark,
                       or in this tick */
    LK_RUN_TURN,    /* it has had its turn; more can be done */
};

/* ---- intake.c ---- */
/* Sequence or lease by a client's handle -> the reason it is none of the channel's. pool: what the
 * submission names, or UINT32_MAX. */
enum lk_reason lk_find_sequence(struct lk_intake *intake, const struct lk_channel *channel,
                                uint64_t handle, uint32_t pool, struct lk_sequence **ret,
                                struct lk_refusal *ret_refusal);
enum lk_reason lk_find_lease(struct lk_intake *intake, const struct lk_channel *channel,
                             uint64_t handle, uint32_t pool, struct lk_lease **ret,
                             struct lk_refusal *ret_refusal);
void lk_release_sequence(struct lk_intake *intake, struct lk_sequence *sequence);
/* -> false: not all of it in this tick; it can only be released any more. Nothing in flight. */
bool lk_release_lease(struct lk_intake *intake, struct lk_lease *lease);
/* Everything agrees with everything: ledger, pools, accounts. For tests, as a command of theirs.
 * -> 0, -EINVAL with the finding in why. */
int lk_intake_check(struct lk_intake *intake, char *why, size_t why_bytes);

/* ---- thread.c ---- */
uint64_t lk_intake_now_ns(void); /* CLOCK_MONOTONIC */
void lk_intake_call(struct lk_intake *intake, void (*run)(struct lk_intake *, void *),
                    void *argument);
/* Puts a channel's bell among what wakes intake, and takes it out. */
int lk_watch_bell(struct lk_intake *intake, struct lk_channel *channel);
void lk_unwatch_bell(struct lk_intake *intake, struct lk_channel *channel);

/* ---- take.c ---- */
/* Takes from the ring what there is, at most LK_TAKE_PER_TURN. -> whether there was anything. */
bool lk_take(struct lk_intake *intake, struct lk_channel *channel);

/* ---- the head of a queue ---- */
/* The batch being filled, or NULL: too many are in flight. */
struct lk_work *lk_filling(struct lk_intake *intake);
/* A new item of the batch for a submission's row or list (there is room: lk_work_full). */
struct lk_item *lk_work_item(struct lk_work *work, struct lk_submission *submission);
static inline bool lk_work_full(const struct lk_work *work) {
    return work->item_count == LK_BATCH_ITEMS;
}
/* What is not `refusal` itself: row and channel's counters. The head leaves the queue, answered. */
enum lk_run lk_refuse(struct lk_intake *intake, struct lk_submission *submission,
                      const struct lk_refusal *refusal);
/* The head leaves the queue: answered with value, or running in batches. */
enum lk_run lk_answer(struct lk_intake *intake, struct lk_submission *submission, uint64_t value);
enum lk_run lk_started(struct lk_intake *intake, struct lk_submission *submission);

/* A submission that runs no more is answered, its fence raised. */
void lk_submission_over(struct lk_intake *intake, struct lk_submission *submission, uint64_t value);

enum lk_run lk_run_object(struct lk_intake *intake, struct lk_submission *submission);
enum lk_run lk_run_rows(struct lk_intake *intake, struct lk_submission *submission);
enum lk_run lk_run_write(struct lk_intake *intake, struct lk_submission *submission);
enum lk_run lk_run_attend_table(struct lk_intake *intake, struct lk_submission *submission);
enum lk_run lk_run_tables(struct lk_intake *intake, struct lk_submission *submission);
enum lk_run lk_run_copy_pages(struct lk_intake *intake, struct lk_submission *submission);
enum lk_run lk_run_invalidate(struct lk_intake *intake, struct lk_submission *submission);

/* Entries of a list or table are about to be handled -> false: not in this tick. */
static inline bool lk_chore(struct lk_intake *intake, uint64_t entries) {
    if (intake->chores >= LK_CHORES_PER_TICK) {
        intake->unfinished = true;
        return false;
    }
    intake->chores += entries;
    return true;
}

/* ---- step.c ---- */
/* A row as kernels take it, from a checked descriptor; length: tokens the last query attends. */
void lk_fill_row(const struct lk_submission *submission, uint32_t index, const struct lk_pool *pool,
                 uint64_t length, struct lk_row *ret);
/* Could that row ever run? */
enum lk_reason lk_row_too_large(const struct lk_intake *intake, const struct lk_row *row,
                                struct lk_refusal *ret);
/* The part of a row that goes into one batch: from its token `from` on -> its tokens. A row of one
 * token, or that only appends, is one part. */
uint32_t lk_row_part(enum lk_device device, const struct lk_row *whole, uint32_t from,
                     struct lk_row *ret);
/* Places the next part of the submission's next row. -> false: not in this batch. */
typedef bool lk_place_fn(struct lk_intake *intake, struct lk_work *work,
                         struct lk_submission *submission);
/* Places what remains of a step's rows -> STARTED: all; else why not. */
enum lk_run lk_place_rows(struct lk_intake *intake, struct lk_submission *submission,
                          lk_place_fn *place_next);
/* A part of `tokens` is placed as `item`: on to the next part, or row. */
void lk_row_placed(struct lk_submission *submission, struct lk_item *item, uint32_t tokens);
/* Room in the batch for a row; takes it -> the row's place, or NULL: not in this batch. */
struct lk_row *lk_place_row(const struct lk_intake *intake, struct lk_work *work,
                            const struct lk_row *row);

/* An offset of q, k, v, out or lse, in the arena or the device arena, as an address. */
static inline uint8_t *lk_payload(const struct lk_channel *channel, uint64_t offset) {
    return offset >= LK_DEVICE_BASE ? channel->device + (offset - LK_DEVICE_BASE)
                                    : channel->open.arena + offset;
}

/* ---- fence.c ---- */
/* The head waits for a fence (again) -> true: no more. */
bool lk_fence_passed(struct lk_intake *intake, struct lk_submission *submission);
/* Looks at all fences that heads wait for -> one was reached, or its time is over. */
bool lk_fences_look(struct lk_intake *intake);
/* The channel goes. */
void lk_fence_forget(struct lk_intake *intake, const struct lk_channel *channel);
/* The submission's last part was placed in the batch being filled, which raises its fence. */
void lk_fence_with_batch(struct lk_intake *intake, struct lk_submission *submission);
/* The submission is over: its fence is raised unless a batch has. */
void lk_fence_signal(struct lk_intake *intake, struct lk_submission *submission);
/* At the end of a tick: raises what lk_fence_signal() collected. */
void lk_fences_raise(struct lk_intake *intake);

/* ---- finish.c ---- */
/* Ends the process with the engine's reason: no result can be trusted any more. */
_Noreturn void lk_device_broken(const struct lk_intake *intake);
/* Takes all marks that were passed -> whether there was one. */
bool lk_finish_batches(struct lk_intake *intake);
/* Frees a removed channel of which nothing is in flight -> true: it is gone. */
bool lk_reap(struct lk_intake *intake, struct lk_channel *channel);

#endif
