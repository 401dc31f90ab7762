/* SPDX-License-Identifier: MIT */
/*
 * intake.h - the thread that owns pools, sequences, leases and channels' rings, and so needs no
 * locks.
 *
 * It polls the rings fairly, validates and admits submissions, groups ready rows into a batch,
 * launches it on the engine and publishes completions. Everything else in the daemon speaks to it
 * by lk_intake_call(): a command is posted by another thread, carried out between two ticks, and
 * answered in place.
 */
#ifndef LK_INTAKE_H
#define LK_INTAKE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "../graphs/engine.h"
#include "../shm_protocol/locks_abi.h"
#include "config.h"

struct lk_intake;

/* One client's segments as the control thread made them (shm_protocol/segment.h), handed to intake.
 */
struct lk_channel_open {
    uint32_t id; /* chosen by control, unique for the boot */
    uid_t uid;
    pid_t pid;
    char name[LK_NAME_BYTES];
    uint32_t sq_entries, cq_entries;
    struct lk_submission_head *submission; /* mapped; read and written as the ABI says */
    struct lk_completion_head *completion;
    uint8_t *arena;
    uint64_t submission_bytes, arena_bytes;
    int bell; /* wakes either side: lk_bell_ring(), lk_bell_drain() of shm_protocol/ring.h */
    /* Called on the intake thread when nothing of the channel is in flight any more and its pages
     * are back: the segments may be unmapped, descriptors closed. */
    void (*released)(void *owner, uint32_t id);
    void *owner;
};

struct lk_pool_status {
    char name[LK_NAME_BYTES];
    struct lk_geometry geometry;
    /* A page is free or used: free is what can still be had (lk_msg_pool.pages_free), used is held
     * or promised. pages_leased, as clients asked for them, are among the used: a lease takes whole
     * fours. */
    uint64_t pages, pages_free, pages_used, pages_leased;
    uint64_t memory_bytes, bytes_per_token; /* the latter over all layers, summaries included */
    uint32_t sequences;
    uint64_t capacity_tokens, max_tokens;
};

struct lk_channel_status {
    uint32_t id;
    pid_t pid;
    uid_t uid;
    char name[LK_NAME_BYTES];
    uint64_t submissions, completions, refusals;
    uint32_t queued, in_flight, sequences, leases;
    uint64_t pages;
    bool cut; /* its ring's indices lied: nothing more is taken of it */
};

struct lk_intake_status {
    uint64_t boot_epoch, ticks, batches, rows, rows_exact, rows_sparse, refusals, submissions;
    uint64_t score_bytes, select_bytes, attend_bytes, dense_bytes;
    uint32_t channels, sequences, leases, batches_in_flight;
    bool draining;
    uint32_t pools;
    struct lk_pool_status pool[LK_POOLS_MAX];
};

/* Opens the pools on the engine and the ledger. -> 0 or -errno, sentence in why. */
int lk_intake_open(const struct lk_config *config, struct lk_engine *engine, struct lk_intake **ret,
                   char *why, size_t why_bytes);
int lk_intake_start(struct lk_intake *intake); /* the thread. -> 0 or -errno */
/* Stops taking submissions, finishes what is in flight, ends the thread. */
void lk_intake_stop(struct lk_intake *intake);
void lk_intake_close(struct lk_intake *intake);

/* Calls from other threads; block until carried out (microseconds; on a GPU adding a channel takes
 * some tenths of a second a GiB of arena, which only the caller waits for).
 *
 * -> 0; -EDQUOT: too many channels, of all or of the user; another -errno of the bell or the
 * device's mapping; a sentence in why, and nothing of `open` is kept. */
int lk_intake_channel_add(struct lk_intake *intake, const struct lk_channel_open *open, char *why,
                          size_t why_bytes);
/* The client is gone: take no more of it, free all when the device is done, then `released`. Also
 * for a living client that must go. */
void lk_intake_channel_remove(struct lk_intake *intake, uint32_t id);
/* After `released`, before the arena is unmapped: the device forgets it. Also of a channel that was
 * never added. */
void lk_intake_channel_forget(struct lk_intake *intake, uint8_t *arena);
/* Memory of the device for the channel, at most once in its life. -> 0 or -errno, sentence in
 * why. On a GPU it takes milliseconds, which only the caller waits for. */
int lk_intake_device_arena_open(struct lk_intake *intake, uint32_t id, uint64_t bytes,
                                struct lk_engine_arena *ret, char *why, size_t why_bytes);
/* After `released`. */
void lk_intake_device_arena_close(struct lk_intake *intake, struct lk_engine_arena *arena);
/* Whether processes on the device run side by side (MPS). Any thread, no blocking. */
bool lk_intake_mps(const struct lk_intake *intake);
void lk_intake_drain(struct lk_intake *intake,
                     bool drain); /* draining: SEQUENCE_CREATE and LEASE_OPEN are refused */
/* Takes the reloadable keys, for who is connected as well. */
void lk_intake_limits(struct lk_intake *intake, const struct lk_config *config);
void lk_intake_status(struct lk_intake *intake, struct lk_intake_status *ret);
/* Up to count channels -> number there are. */
uint32_t lk_intake_channels(struct lk_intake *intake, struct lk_channel_status *ret,
                            uint32_t count);
/* Pool by index as a client may see it. -ENOENT. ret_fd (may be NULL): the pool's memfd,
 * still the engine's. */
int lk_intake_pool(struct lk_intake *intake, uint32_t index, struct lk_msg_pool *ret, int *ret_fd);
/* CLOCK_MONOTONIC ns of the last tick, for the watchdog; any thread, no blocking. */
uint64_t lk_intake_heartbeat(const struct lk_intake *intake);

#endif
