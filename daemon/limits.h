/* SPDX-License-Identifier: MIT */
/*
 * limits.h - how much of everything intake keeps, each with its reason and tied to its neighbours.
 *
 * Intake allocates when it opens and never after, so all that a client can make it hold has a bound
 * here or in the configuration. What is here is not for operators: raising one changes memory and
 * latency, never what is possible.
 */
#ifndef LK_LIMITS_H
#define LK_LIMITS_H

#include "../graphs/engine.h"
#include "../shm_protocol/validate.h"
#include "config.h"

/* 64 pages: a sequence's scan streams through 64 records of a plane before it may jump. */
#define LK_EXTENT_QUADS 16

/* Entries of lists and tables that are handled in a tick, before its batch is launched: some tenths
 * of a millisecond. The rest waits for the next one. */
#define LK_CHORES_PER_TICK 32768

/* What is unmapped of a lease at once: 0.1 ms where all of it was used; and of a tick's chores it
 * is an eighth. */
#define LK_LEASE_PIECE_BYTES  (UINT64_C(1) << 20)
#define LK_LEASE_PIECE_CHORES (LK_CHORES_PER_TICK / 8)

/* Submissions of a channel out of its ring and not yet answered: what two batches and the next one
 * can use of a client that sends a layer at a time. The rest waits in the ring. */
#define LK_QUEUE_SUBMISSIONS 32
/* Descriptors up to ten rows lie in the submission; of longer ones a channel may have so many. */
#define LK_INLINE_BYTES 1024
#define LK_QUEUE_LARGE  2

/* Of one channel before the next has its turn. */
#define LK_TAKE_PER_TURN 8
#define LK_ROWS_PER_TURN 32

/* Of a batch. A row that appends or writes more than the batch has left waits for the next one; an
 * empty batch takes any row. */
#define LK_BATCH_COPIES LK_BATCH_COPIES_MAX
#define LK_BATCH_TOKENS 16384 /* of rows of several tokens: bounds how long others wait */
/* Products of a query and a key's channel in rows of several tokens, times the device's part
 * factor: some 20 ms on two cores, for which a decode step beside them may have to wait. Longer
 * rows go in parts, one a batch. */
#define LK_BATCH_PRODUCTS  (UINT64_C(1) << 28)
#define LK_PART_TOKENS_MIN 16 /* a page's keys are read for so many queries at least */
#define LK_BATCH_SLOTS     LK_BATCH_SLOTS_MAX
#define LK_BATCH_BUILDS    LK_BATCH_BUILDS_MAX /* every token seals a page */
#define LK_BATCH_WRITES    LK_BATCH_ROWS_MAX
#define LK_BATCH_ITEMS     (2 * LK_BATCH_ROWS_MAX + 64) /* rows, writes, lists that wait for it */

/* Fences to be raised in a tick beside those that batches raise: of each submission at most one. */
#define LK_SIGNALS_MAX (LK_CHANNELS_MAX * (LK_QUEUE_SUBMISSIONS + LK_TAKE_PER_TURN))
/* A sleeping intake looks so often at fences that are waited for. */
#define LK_FENCE_LOOK_MS 1

/* Leases of a pool, all clients' together. */
#define LK_LEASES_MAX 256

/* A heartbeat in every channel's segment so often while awake. */
#define LK_HEARTBEAT_NS UINT64_C(100000000)

/* Above so many tokens `auto` scans nested: below, the second pass costs more than it saves. One
 * row's step on an H200, nested to full: 48 to 36 us at 128K tokens, 69 to 75 at 512K. */
#define LK_AUTO_NESTED_TOKENS     32768
#define LK_AUTO_NESTED_TOKENS_GPU 524288

_Static_assert(sizeof(struct lk_step_desc) + 10 * sizeof(struct lk_row_desc) == LK_INLINE_BYTES,
               "ten rows lie in the submission");
_Static_assert(LK_BATCH_COPIES >= 1024 * LK_QUAD_PAGES,
               "a quad's pages of all layers (config.c: at most 1024) fit a batch");
_Static_assert(LK_ROWS_MAX <= LK_BATCH_ROWS_MAX, "a submission's rows fit a batch");
_Static_assert(LK_BATCH_ITEMS <= LK_BATCH_SIGNALS_MAX, "every item's submission may signal");
_Static_assert(LK_CHANNELS_MAX <= LK_FENCE_PLACES, "every channel's head may wait for a fence");
_Static_assert(LK_ROW_TOKENS_MAX <= LK_BATCH_SLOTS, "a row's slots fit a batch");
_Static_assert(LK_ROW_TOKENS_MAX <= LK_BATCH_TOKENS_MAX && LK_BATCH_TOKENS <= LK_BATCH_TOKENS_MAX,
               "rows of several tokens are as many as the engine expects");

/* Workspace of each batch ahead: as configured, or twice what the largest row takes that the
 * configuration allows. */
uint64_t lk_workspace_bytes(const struct lk_config *config);
/* Tokens that a sequence of the pool may have. */
uint64_t lk_pool_max_tokens(const struct lk_pool_config *config, uint64_t pages);
/* NULL if its memory holds four pages, else the reason. */
const char *lk_pool_invalid(enum lk_device device, const struct lk_pool_config *config, char *text,
                            size_t bytes);
/* Pages that fit into the pool's memory: whole extents, or whole quads where there is no extent. */
uint64_t lk_pool_fitting_pages(enum lk_device device, const struct lk_pool_config *config);

#endif
