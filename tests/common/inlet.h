/* SPDX-License-Identifier: MIT */
/*
 * inlet.h - an engine, an intake and clients of it in one process, for tests of the daemon's
 * inside.
 *
 * Clients have real segments and rings but no socket. What is expected to work and does not ends
 * the test program (Check's assertions). A client belongs to one thread; several may run at once.
 *
 * The same tests run in several forms, chosen by the environment:
 *
 *   LOCKSD_TEST_DEVICE   cpu (default), or cuda: GPU 0
 *   LOCKSD_TEST_DTYPE    of the pools: fp32 (default) or bf16; on a GPU always bf16
 *
 * All keys, values and queries are multiples of 1/128 between -1 and 1, exact in every element
 * type: what is expected is the same in all forms. Outputs are float32 in all.
 */
#ifndef INLET_H
#define INLET_H

#include "../../daemon/state.h"
#include "../../shm_protocol/segment.h"

struct inlet {
    struct lk_config config;
    struct lk_engine *engine;
    struct lk_intake *intake;
    uint32_t last_id;
    uint32_t released; /* atomic: channels that intake let go */
};

struct inlet_client {
    struct inlet *inlet;
    uint32_t id;
    struct lk_channel_memory memory;
    struct lk_ring_client ring;
    uint64_t used; /* of the arena */
};

/* The form's device; one pool "default" of the form's element type: 2 layers, 2 KV heads x group 2,
 * d 64, B 16, rank 4, `pages` pages. */
void inlet_config(struct lk_config *config, uint64_t pages);
/* Gives the first pool this geometry, but for the element type, which is the form's. */
void inlet_pool(struct lk_config *config, struct lk_geometry geometry, uint64_t pages);
/* Whether the case (or part of one) makes no sense on a GPU; then says so, and why. */
bool inlet_skips(const struct inlet *inlet, const char *what, const char *why);
void inlet_open(struct inlet *inlet, const struct lk_config *config);
void inlet_close(struct inlet *inlet);
/* The ledger and everything beside it agree, between two ticks. */
void inlet_check(struct inlet *inlet);
/* The same once nothing is in flight any more: summaries too. */
void inlet_check_idle(struct inlet *inlet);
struct lk_intake_status inlet_status(struct inlet *inlet);

/* -> 0 or what intake said. */
int inlet_connect(struct inlet *inlet, struct inlet_client *client, uid_t uid, uint32_t sq_entries,
                  uint64_t first_index);
/* As when the client dies; returns when the channel is released. */
void inlet_disconnect(struct inlet_client *client);

/* Arena memory, taken in a row and given back all at once. */
void *inlet_alloc(struct inlet_client *client, uint64_t bytes);
uint64_t inlet_offset(const struct inlet_client *client, const void *memory);
static inline void inlet_reset(struct inlet_client *client) {
    client->used = 0;
}

/* -> false: the ring is full. */
bool inlet_submit(struct inlet_client *client, uint16_t op, const void *desc, uint32_t bytes,
                  uint64_t user_data);
/* -> false: none within `seconds`. */
bool inlet_poll(struct inlet_client *client, double seconds, struct lk_cqe *ret);
struct lk_cqe inlet_wait(struct inlet_client *client);
/* Submits and waits for its completion; nothing else may be in flight. */
struct lk_cqe inlet_do(struct inlet_client *client, uint16_t op, const void *desc, uint32_t bytes);

/* ---- shapes of submissions ---- */
struct inlet_step {
    struct lk_step_desc step;
    struct lk_row_desc row[LK_ROWS_MAX];
};
/* No rows, the defaults, no results. */
void inlet_step(struct inlet_step *step);
static inline uint32_t inlet_step_bytes(const struct inlet_step *step) {
    return (uint32_t)(sizeof(struct lk_step_desc) + step->step.rows * sizeof(struct lk_row_desc));
}
/* Adds a row that names nothing in the arena yet. */
struct lk_row_desc *inlet_row(struct inlet_step *step, uint64_t handle, uint32_t layer,
                              uint64_t position, uint32_t tokens);
struct lk_cqe inlet_object(struct inlet_client *client, uint16_t op, uint64_t handle,
                           uint64_t length);
/* Those that must succeed. */
uint64_t inlet_create(struct inlet_client *client);
uint64_t inlet_fork(struct inlet_client *client, uint64_t handle);
void inlet_truncate(struct inlet_client *client, uint64_t handle, uint64_t length);
void inlet_free(struct inlet_client *client, uint64_t handle);
uint64_t inlet_lease(struct inlet_client *client, uint64_t pages);

/* Bit by bit, padding included. */
bool inlet_same(const void *a, const void *b, size_t bytes);

/* ---- tokens ---- */
/* Keys (v: 0), values (1), queries (2) of token `id`, made from the number alone. */
void inlet_fill(float *to, uint64_t id, int v, uint32_t layer, uint64_t count);
uint64_t inlet_random(uint64_t *state);
/* Bytes of an element of the first pool. */
uint32_t inlet_element(const struct inlet *inlet);
/* What inlet_fill() makes of one token, as `count` elements of the first pool. */
void inlet_store(const struct inlet *inlet, void *to, uint64_t id, int v, uint32_t layer,
                 uint64_t count);
/* Keys and values of tokens `ids` for a row; queries first_id.. and outputs (filled with ones, so
 * that what is not written shows) -> the outputs. */
void inlet_give_kv(struct inlet_client *client, struct lk_row_desc *row, const uint64_t *ids);
float *inlet_give_q(struct inlet_client *client, struct lk_row_desc *row, uint64_t first_id);
/* ids[i] = first + i */
void inlet_count(uint64_t *ids, uint64_t count, uint64_t first);
/* Appends tokens `ids` at `position` in one row; must succeed. */
void inlet_append(struct inlet_client *client, uint64_t handle, uint32_t layer, uint64_t position,
                  const uint64_t *ids, uint32_t count);
/* Fails the test unless the submission succeeded, resp. was refused for the reason. */
void inlet_must(struct lk_cqe cqe);
void inlet_refused(struct lk_cqe cqe, enum lk_reason reason, uint64_t value, uint64_t limit,
                   uint32_t row);
/* Query `query` against exact attention over tokens `ids`, in double; the worst over all heads.
 * CPU: max |out - exact|. CUDA: ||out - exact|| / ||exact||, as tests/cuda/scene.h measures. */
double inlet_error(const struct inlet *inlet, uint64_t query, const float *out, const uint64_t *ids,
                   uint64_t count, uint32_t layer);
/* What that may be at most. */
double inlet_tolerance(const struct inlet *inlet);

#endif
