/* SPDX-License-Identifier: MIT */
/*
 * test_intake.c - the intake thread with clients in the same process: order, fairness, refusals,
 * quotas, hostile rings, comings and goings. Clean under ThreadSanitizer.
 */
#include <check.h>
#include <sched.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "../common/run.h"
#include "../../shm_protocol/atomics.h"
#include "../common/inlet.h"

#define WHOLE LK_ROW_WHOLE
#define WIDTH 256 /* values of a token's queries, and outputs */

static struct inlet inlet;
static struct inlet_client client;
static struct lk_config config;
static uint64_t ids[4096];
static struct inlet_step step;

static void open_with(const struct lk_config *c) {
    inlet_open(&inlet, c);
    ck_assert_int_eq(inlet_connect(&inlet, &client, 1, 64, 0), 0);
    inlet_count(ids, 4096, 1);
}
static void setup(void) {
    inlet_config(&config, 512);
    open_with(&config);
}
static void teardown(void) {
    inlet_check_idle(&inlet);
    inlet_disconnect(&client);
    ck_assert_uint_eq(inlet_status(&inlet).pool[0].pages_used, 0);
    inlet_close(&inlet);
}
static void reopen(void) {
    teardown();
    open_with(&config);
}

static bool agrees(uint64_t query, const float *out, uint64_t count) {
    return inlet_error(&inlet, query, out, ids, count, 0) < inlet_tolerance(&inlet);
}

static struct lk_cqe run_step(struct inlet_client *c, uint16_t op) {
    return inlet_do(c, op, &step, inlet_step_bytes(&step));
}

/* An APPEND of `tokens` at `position`. */
static struct lk_cqe append(struct inlet_client *c, uint64_t handle, uint32_t layer,
                            uint64_t position, uint32_t tokens) {
    inlet_step(&step);
    inlet_give_kv(c, inlet_row(&step, handle, layer, position, tokens), ids + position % 2048);
    return run_step(c, LK_OP_APPEND);
}

/* ---- steps ---- */

START_TEST(an_empty_step_is_answered) {
    inlet_step(&step);
    struct lk_step_result *timing = inlet_alloc(&client, sizeof(*timing));
    memset(timing, 0xff, sizeof(*timing));
    step.step.timing = inlet_offset(&client, timing);
    for (uint64_t i = 1; i < 200; i++) {
        struct lk_cqe cqe = run_step(&client, LK_OP_DECODE);
        inlet_must(cqe);
        ck_assert_uint_eq(cqe.fence, i);
        ck_assert_uint_eq(cqe.rows, 0);
    }
    ck_assert_uint_eq(timing->batch_rows, 0);
    ck_assert_uint_eq(inlet_status(&inlet).batches, 0);
}
END_TEST

START_TEST(results_are_told) {
    uint64_t a = inlet_create(&client);
    inlet_must(append(&client, a, 0, 0, 999));
    inlet_step(&step);
    struct lk_row_desc *row = inlet_row(&step, a, 0, 999, 1);
    inlet_give_kv(&client, row, ids + 999);
    inlet_give_q(&client, row, 1);
    struct lk_head_result *result = inlet_alloc(&client, 2 * sizeof(*result));
    struct lk_step_result *timing = inlet_alloc(&client, sizeof(*timing));
    step.step.results = inlet_offset(&client, result);
    step.step.timing = inlet_offset(&client, timing);
    step.step.budget = 16 * 10;
    step.step.sampled = 4;
    struct lk_cqe cqe = run_step(&client, LK_OP_DECODE);
    inlet_must(cqe);
    ck_assert_uint_eq(cqe.rows, 1);
    ck_assert_uint_eq(cqe.bytes, timing->score_bytes + timing->select_bytes + timing->attend_bytes);
    ck_assert_uint_eq(timing->dense_bytes, 1000 * 2 * 2 * 64 * inlet_element(&inlet));
    ck_assert_uint_eq(timing->batch_rows, 1);
    ck_assert_uint_gt(timing->attend_ns, 0);
    ck_assert_uint_ge(cqe.total_ns, timing->queue_ns);
    for (uint32_t h = 0; h < 2; h++) {
        ck_assert_uint_eq(result[h].kept, 6);
        ck_assert_uint_le(result[h].sampled, 4);
        ck_assert_uint_eq(result[h].flags, 0);
    }
    struct lk_intake_status status = inlet_status(&inlet);
    ck_assert_uint_eq(status.rows, 2);
    ck_assert_uint_eq(status.rows_sparse, 1);
    ck_assert_uint_eq(status.dense_bytes, timing->dense_bytes);
    ck_assert_uint_eq(status.pool[0].pages_used, 64);
    ck_assert_uint_eq(status.sequences, 1);
}
END_TEST

/* Rows of 1 to 256 sequences, of no token to many: each as if alone. */
START_TEST(ragged_batches) {
    config.pool[0].max_sequences = LK_ROWS_MAX;
    inlet_pool(&config, config.pool[0].geometry, 8192);
    reopen();
    static uint64_t handle[LK_ROWS_MAX];
    static float alone[LK_ROWS_MAX][WIDTH];
    for (uint32_t i = 0; i < LK_ROWS_MAX; i++) {
        inlet_reset(&client);
        handle[i] = inlet_create(&client);
        if (i % 50)
            inlet_must(append(&client, handle[i], 1, 0, i));
        inlet_step(&step);
        const float *out =
            inlet_give_q(&client, inlet_row(&step, handle[i], 1, i % 50 ? i : 0, 1), i);
        inlet_must(run_step(&client, LK_OP_ATTEND));
        memcpy(alone[i], out, sizeof(alone[i]));
    }
    for (uint32_t rows = 1; rows <= LK_ROWS_MAX; rows += rows < 4 ? 1 : 63) {
        const float *out[LK_ROWS_MAX];
        inlet_reset(&client);
        inlet_step(&step);
        for (uint32_t i = 0; i < rows; i++) {
            struct lk_row_desc *row = inlet_row(&step, handle[i], 1, i % 50 ? i : 0, 1);
            out[i] = inlet_give_q(&client, row, i);
        }
        struct lk_cqe cqe = run_step(&client, LK_OP_ATTEND);
        inlet_must(cqe);
        ck_assert_uint_eq(cqe.rows, rows);
        for (uint32_t i = 0; i < rows; i++)
            ck_assert_mem_eq(out[i], alone[i], sizeof(alone[i]));
    }
    for (uint32_t c = 0; c < WIDTH; c++)
        ck_assert(alone[0][c] == 0);
}
END_TEST

/* A layer several times in a step, each row after the other. */
START_TEST(rows_of_a_layer_follow_each_other) {
    uint64_t a = inlet_create(&client);
    const float *out[20];
    inlet_step(&step);
    step.step.dense_below = 10000;
    for (uint32_t i = 0; i < 20; i++) {
        struct lk_row_desc *row = inlet_row(&step, a, 0, i * UINT64_C(7), 7);
        inlet_give_kv(&client, row, ids + i * 7);
        out[i] = inlet_give_q(&client, row, 100 * i);
    }
    struct lk_cqe cqe = run_step(&client, LK_OP_DECODE);
    inlet_must(cqe);
    ck_assert_uint_eq(cqe.rows, 20);
    for (uint32_t i = 0; i < 20; i++)
        ck_assert(agrees(100 * i, out[i], i * 7 + 1));
}
END_TEST

/* Of a row, and of a chain, beside which others are served: they take many times theirs. */
#ifdef __SANITIZE_THREAD__
#define ROW_TOKENS  2400
#define CHAIN_PAGES 1000
#else
#define ROW_TOKENS  4000
#define CHAIN_PAGES 3000
#endif

/* A row of many tokens goes in parts: exact at every token, told as one row, and a neighbour's
 * steps run in between. */
START_TEST(long_rows_let_others_through) {
    const uint32_t tokens = ROW_TOKENS;
    uint64_t steps = 0;
    struct inlet_client other;
    struct lk_cqe cqe;
    ck_assert_int_eq(inlet_connect(&inlet, &other, 1, 64, 0), 0);
    uint64_t a = inlet_create(&client), b = inlet_create(&other);
    inlet_append(&other, b, 0, 0, ids, 20);
    inlet_step(&step);
    struct lk_head_result *result = inlet_alloc(&client, 2 * sizeof(*result));
    struct lk_row_desc *row = inlet_row(&step, a, 0, 0, tokens);
    step.step.results = inlet_offset(&client, result);
    inlet_give_kv(&client, row, ids);
    const float *out = inlet_give_q(&client, row, 1);
    ck_assert(inlet_submit(&client, LK_OP_DECODE, &step, inlet_step_bytes(&step), 9));
    for (; !inlet_poll(&client, 0, &cqe); steps++) {
        inlet_reset(&other);
        inlet_step(&step);
        inlet_give_q(&other, inlet_row(&step, b, 0, 20, 1), 5);
        inlet_must(run_step(&other, LK_OP_ATTEND));
    }
    inlet_must(cqe);
    ck_assert_uint_eq(cqe.rows, 1);
    ck_assert_uint_eq(result[0].flags, LK_HEAD_EXACT);
    ck_assert_uint_gt(steps, 2);
    ck_assert_uint_eq(inlet_status(&inlet).rows, 2 + steps);
    for (uint32_t i = 0; i < tokens; i += i < 300 ? 1 : 37)
        ck_assert(agrees(1 + i, out + i * WIDTH, i + 1));
    inlet_disconnect(&other);
}
END_TEST

/* Copies of a chain (0 to 1, 1 to 2, ...) run one after the other, a batch each: others' lists and
 * steps run in between. */
START_TEST(chains_let_others_through) {
    uint64_t lists = 0;
    struct inlet_client other;
    struct lk_cqe cqe;
    inlet_config(&config, 4096);
    reopen();
    ck_assert_int_eq(inlet_connect(&inlet, &other, 2, 64, 0), 0);
    uint64_t sequence = inlet_create(&other);
    inlet_append(&other, sequence, 0, 0, ids, 20);
    struct lk_object_desc chain = {.handle = inlet_lease(&client, CHAIN_PAGES),
                                   .count = CHAIN_PAGES - 1};
    struct lk_object_desc pair = {.handle = inlet_lease(&other, 8), .count = 1};
    int64_t *slots = inlet_alloc(&client, 16 * sizeof(*slots)); /* page 0 has something to copy */
    for (int i = 0; i < 16; i++)
        slots[i] = i;
    inlet_step(&step);
    for (uint32_t l = 0; l < 2; l++) {
        struct lk_row_desc *row = inlet_row(&step, chain.handle, l, 0, 16);
        inlet_give_kv(&client, row, ids);
        row->slots = inlet_offset(&client, slots);
    }
    inlet_must(run_step(&client, LK_OP_WRITE));
    uint32_t *links = inlet_alloc(&client, sizeof(uint32_t[2]) * chain.count);
    for (uint32_t i = 0; i < 2 * chain.count; i++)
        links[i] = (i + 1) / 2;
    chain.list = inlet_offset(&client, links);
    uint32_t *words = inlet_alloc(&other, sizeof(uint32_t[2]));
    words[0] = 0, words[1] = 1;
    pair.list = inlet_offset(&other, words);
    uint64_t kept = other.used;
    ck_assert(inlet_submit(&client, LK_OP_COPY_PAGES, &chain, sizeof(chain), 1));
    for (; !inlet_poll(&client, 0, &cqe); lists++) {
        inlet_must(inlet_do(&other, LK_OP_COPY_PAGES, &pair, sizeof(pair)));
        other.used = kept;
        inlet_step(&step);
        inlet_give_q(&other, inlet_row(&step, sequence, 0, 20, 1), 5);
        inlet_must(run_step(&other, LK_OP_ATTEND));
    }
    inlet_must(cqe);
    ck_assert_uint_gt(lists, 20);
    inlet_disconnect(&other);
}
END_TEST

/* Fills the words, submits, and spoils them when some batches have been launched. This thread may
 * be held up until all were, and then has spoiled nothing: it tries again. */
static struct lk_cqe spoil(uint16_t op, const void *desc, uint32_t bytes, uint32_t *word,
                           const uint32_t *good, uint32_t count, uint32_t bad) {
    struct lk_cqe cqe = {0};
    for (int tries = 0; tries < 50 && cqe.reason == LK_REASON_NONE; tries++) {
        memcpy(word, good, count * sizeof(*word));
        uint64_t batches = inlet_status(&inlet).batches;
        ck_assert(inlet_submit(&client, op, desc, bytes, 1));
        while (inlet_status(&inlet).batches < batches + 5)
            sched_yield();
        for (uint32_t i = 0; i < count; i++)
            __atomic_store_n(&word[i], bad, __ATOMIC_RELAXED);
        cqe = inlet_wait(&client);
    }
    return cqe;
}

/* Lists and slots are read twice: what became nonsense meanwhile is refused, and harms nobody. */
START_TEST(lists_that_change_under_way) {
    enum { PAGES = 200, SLOTS = 64 };
    uint64_t lease = inlet_lease(&client, PAGES);
    uint32_t *links = inlet_alloc(&client, sizeof(uint32_t[2]) * (PAGES - 1));
    int64_t *slots = inlet_alloc(&client, SLOTS * sizeof(*slots)), good[SLOTS];
    for (int i = 0; i < SLOTS; i++)
        good[i] = i % 16;
    inlet_step(&step);
    for (int i = 0; i < 256; i++) { /* of one layer: a batch each */
        struct lk_row_desc *row = inlet_row(&step, lease, 0, 0, SLOTS);
        if (i == 0)
            inlet_give_kv(&client, row, ids);
        row->k = step.row[0].k;
        row->v = step.row[0].v;
        row->slots = inlet_offset(&client, slots);
    }
    struct lk_cqe cqe = spoil(LK_OP_WRITE, &step, inlet_step_bytes(&step), (uint32_t *)slots,
                              (uint32_t *)good, 2 * SLOTS, INT32_MAX);
    ck_assert_uint_eq(cqe.reason, LK_REASON_SLOT);
    ck_assert_uint_eq(cqe.rows, cqe.row);
    ck_assert_uint_ge(cqe.rows, 3);
    struct lk_object_desc chain = {
        .handle = lease, .list = inlet_offset(&client, links), .count = PAGES - 1};
    uint32_t in_order[2 * (PAGES - 1)];
    for (uint32_t i = 0; i < 2 * chain.count; i++)
        in_order[i] = (i + 1) / 2;
    cqe = spoil(LK_OP_COPY_PAGES, &chain, sizeof(chain), links, in_order, 2 * chain.count,
                UINT32_MAX);
    inlet_refused(cqe, LK_REASON_TABLE_PAGE, UINT32_MAX, PAGES, LK_ROW_WHOLE);
}
END_TEST

/* A tick handles a bounded number of entries of lists and tables: whoever else has work is served
 * in between. */
START_TEST(long_lists_let_others_through) {
    enum { LISTS = 16, PAGES = 256 };
    struct {
        struct lk_tables_desc head;
        struct lk_table_desc table[LK_ROWS_MAX];
    } tables = {.head = {.rows = LK_ROWS_MAX}};
    uint64_t lease = tables.head.handle = inlet_lease(&client, PAGES);
    uint32_t *list = inlet_alloc(&client, LK_LIST_MAX * sizeof(*list));
    struct lk_object_desc o = {
        .handle = lease, .list = inlet_offset(&client, list), .count = LK_LIST_MAX};
    for (uint32_t i = 0; i < LK_LIST_MAX; i++)
        list[i] = i % PAGES;
    uint64_t ticks = inlet_status(&inlet).ticks;
    for (uint32_t i = 0; i < LISTS; i++)
        ck_assert(inlet_submit(&client, LK_OP_INVALIDATE, &o, sizeof(o), i));
    for (uint32_t i = 0; i < LISTS; i++)
        inlet_must(inlet_wait(&client));
    uint64_t entries = 2 * LISTS * (uint64_t)LK_LIST_MAX; /* at two layers */
    ck_assert_uint_ge(inlet_status(&inlet).ticks - ticks, entries / LK_CHORES_PER_TICK);
    for (uint32_t i = 0; i < LK_ROWS_MAX; i++)
        tables.table[i] =
            (struct lk_table_desc){.table = o.list, .length = PAGES * 16, .pages = PAGES};
    ticks = inlet_status(&inlet).ticks;
    inlet_must(inlet_do(&client, LK_OP_TABLES, &tables, sizeof(tables)));
    entries = LK_ROWS_MAX * PAGES;
    ck_assert_uint_ge(inlet_status(&inlet).ticks - ticks, entries / LK_CHORES_PER_TICK);
}
END_TEST

/* A lease's tables are unmapped by pieces, a bounded number in a tick: all that could be mapped of
 * this one are 9 KiB a page and more. */
START_TEST(a_large_lease_goes_in_pieces) {
    enum { PAGES = 32768 };
    static const struct lk_geometry small = {
        .layers = 1, .kv_heads = 1, .group = 1, .head_dim = 64, .page_tokens = 8, .rank = 2};
    struct inlet_client other;
    inlet_pool(&config, small, PAGES);
    reopen();
    uint64_t lease = inlet_lease(&client, PAGES), ticks = inlet_status(&inlet).ticks;
    inlet_object(&client, LK_OP_LEASE_CLOSE, lease, 0);
    uint64_t pieces = PAGES * UINT64_C(9216) / LK_LEASE_PIECE_BYTES;
    ck_assert_uint_ge(inlet_status(&inlet).ticks - ticks,
                      (pieces - 1) * LK_LEASE_PIECE_CHORES / LK_CHORES_PER_TICK);
    ck_assert_int_eq(inlet_connect(&inlet, &other, 2, 64, 0), 0); /* goes in the middle */
    struct lk_object_desc o = {.handle = inlet_lease(&other, PAGES)};
    ck_assert(inlet_submit(&other, LK_OP_LEASE_CLOSE, &o, sizeof(o), 0));
    inlet_disconnect(&other);
}
END_TEST

/* Pages that a row closes are summarised before the next row of the layer is scored, in whatever
 * batches they run. */
START_TEST(rows_of_a_step_see_summaries) {
    uint64_t whole = inlet_create(&client), parts = inlet_create(&client);
    struct lk_head_result *result = inlet_alloc(&client, 4 * sizeof(*result));
    struct lk_head_result *again = inlet_alloc(&client, 2 * sizeof(*result));
    struct lk_row_desc last;
    inlet_must(append(&client, whole, 0, 0, 500));
    inlet_must(append(&client, parts, 0, 0, 500));
    inlet_step(&step);
    step.step.budget = 4 * 16;
    step.step.results = inlet_offset(&client, result);
    for (uint32_t i = 0; i < 2; i++) {
        struct lk_row_desc *row = inlet_row(&step, whole, 0, i ? 700 : 500, i ? 1 : 200);
        inlet_give_kv(&client, row, ids + row->position);
        inlet_give_q(&client, row, 8000);
        last = *row;
    }
    inlet_must(run_step(&client, LK_OP_DECODE));
    inlet_must(append(&client, parts, 0, 500, 200));
    inlet_check_idle(&inlet);
    inlet_step(&step);
    step.step.budget = 4 * 16;
    step.step.results = inlet_offset(&client, again);
    last.handle = parts;
    *inlet_row(&step, parts, 0, 0, 0) = last;
    inlet_must(run_step(&client, LK_OP_DECODE));
    ck_assert_uint_eq(again[0].flags, LK_HEAD_ESTIMATED); /* its mass comes from all summaries */
    ck_assert_mem_eq(again, result + 2, 2 * sizeof(*result));
}
END_TEST

/* ---- refusals ---- */

START_TEST(positions_are_refused) {
    uint64_t a = inlet_create(&client);
    inlet_must(append(&client, a, 0, 0, 40));
    inlet_refused(append(&client, a, 0, 41, 1), LK_REASON_POSITION, 41, 40, 0);
    inlet_refused(append(&client, a, 0, 30, 11), LK_REASON_POSITION, 30, 40, 0);
    inlet_refused(append(&client, a, 0, 30, 10), LK_REASON_REPLAYED, 30, 40, 0);
    inlet_refused(append(&client, a, 0, UINT64_MAX - 5, 10), LK_REASON_POSITION, UINT64_MAX - 5, 40,
                  0);
    inlet_step(&step);
    inlet_give_q(&client, inlet_row(&step, a, 0, 39, 1), 0);
    inlet_refused(run_step(&client, LK_OP_ATTEND), LK_REASON_POSITION, 39, 40, 0);
    inlet_refused(inlet_object(&client, LK_OP_SEQUENCE_TRUNCATE, a, 41), LK_REASON_TRUNCATE, 41, 40,
                  WHOLE);
    inlet_must(append(&client, a, 0, 40, 1));
}
END_TEST

/* Two rows of a step at one position: nothing of it was done before, so none may be told so. */
START_TEST(a_row_that_repeats_another_is_no_replay) {
    uint64_t a = inlet_create(&client), b = inlet_create(&client);
    inlet_must(append(&client, a, 0, 0, 40));
    for (uint32_t at = 40; at < 43; at++) {
        inlet_step(&step);
        inlet_give_kv(&client, inlet_row(&step, b, 0, 0, 1), ids);
        inlet_give_kv(&client, inlet_row(&step, a, 0, 40, 3), ids + 40);
        inlet_give_kv(&client, inlet_row(&step, a, 0, at, 1), ids + at);
        inlet_refused(run_step(&client, LK_OP_APPEND), LK_REASON_ROW_REPEATS, at, 1, 2);
    }
    ck_assert_int_eq(lk_reason_errno(LK_REASON_ROW_REPEATS), -EINVAL);
    inlet_step(&step);
    inlet_give_kv(&client, inlet_row(&step, a, 0, 40, 3), ids + 40);
    inlet_give_kv(&client, inlet_row(&step, a, 0, 38, 2), ids + 38); /* done before, and stands */
    inlet_refused(run_step(&client, LK_OP_APPEND), LK_REASON_REPLAYED, 38, 40, 1);
    inlet_must(append(&client, a, 0, 40, 3)); /* nothing was appended */
}
END_TEST

START_TEST(one_bad_row_refuses_the_step) {
    uint64_t a = inlet_create(&client), b = inlet_create(&client);
    inlet_step(&step);
    inlet_give_kv(&client, inlet_row(&step, a, 0, 0, 5), ids);
    inlet_give_kv(&client, inlet_row(&step, b, 0, 1, 5), ids);
    inlet_refused(run_step(&client, LK_OP_APPEND), LK_REASON_POSITION, 1, 0, 1);
    inlet_must(append(&client, a, 0, 0, 5)); /* nothing was appended */
    step.row[1].position = 0;
    step.row[1].k = client.memory.sizes.arena_bytes - 64;
    inlet_step(&step);
    inlet_give_kv(&client, inlet_row(&step, a, 0, 5, 5), ids);
    inlet_row(&step, b, 0, 0, 5)->k = client.memory.sizes.arena_bytes - 64;
    inlet_refused(run_step(&client, LK_OP_APPEND), LK_REASON_K_RANGE,
                  client.memory.sizes.arena_bytes - 64, client.memory.sizes.arena_bytes, 1);
}
END_TEST

START_TEST(handles_are_refused) {
    uint64_t a = inlet_create(&client), lease = inlet_lease(&client, 4);
    struct inlet_client other;
    ck_assert_int_eq(inlet_connect(&inlet, &other, 1, 64, 0), 0);
    inlet_refused(append(&other, a, 0, 0, 1), LK_REASON_HANDLE_STALE, a, 0, 0);
    inlet_refused(append(&client, lease, 0, 0, 1), LK_REASON_HANDLE_KIND, lease, 0, 0);
    inlet_refused(inlet_object(&client, LK_OP_LEASE_CLOSE, a, 0), LK_REASON_HANDLE_KIND, a, 0,
                  WHOLE);
    inlet_refused(inlet_object(&client, LK_OP_SEQUENCE_FREE, 0, 0), LK_REASON_HANDLE_NONE, 0, 0,
                  WHOLE);
    inlet_refused(inlet_object(&client, LK_OP_SEQUENCE_FREE, UINT64_MAX, 0), LK_REASON_HANDLE_STALE,
                  UINT64_MAX, 0, WHOLE);
    inlet_free(&client, a);
    uint64_t next = a + (UINT64_C(1) << 32);
    inlet_refused(inlet_object(&client, LK_OP_SEQUENCE_FREE, a, 0), LK_REASON_HANDLE_STALE, a, next,
                  WHOLE);
    ck_assert_uint_eq(inlet_create(&client), next); /* the slot again, the generation new */
    inlet_disconnect(&other);
}
END_TEST

START_TEST(pools_do_not_mix) {
    config.pools = 2;
    config.pool[1] = config.pool[0];
    strcpy(config.pool[1].name, "second");
    config.pool[1].geometry.layers = 1;
    reopen();
    struct lk_object_desc desc = {.pool = 1};
    struct lk_cqe cqe = inlet_do(&client, LK_OP_SEQUENCE_CREATE, &desc, sizeof(desc));
    inlet_must(cqe);
    inlet_refused(append(&client, cqe.value, 0, 0, 1), LK_REASON_HANDLE_POOL, 1, 0, 0);
    inlet_step(&step);
    step.step.pool = 1;
    inlet_give_kv(&client, inlet_row(&step, cqe.value, 0, 0, 30), ids);
    inlet_must(run_step(&client, LK_OP_APPEND));
    desc.pool = 2;
    inlet_refused(inlet_do(&client, LK_OP_SEQUENCE_CREATE, &desc, sizeof(desc)), LK_REASON_POOL, 2,
                  2, WHOLE);
}
END_TEST

START_TEST(quotas_are_kept) {
    config.max_sequences = 3;
    config.max_leases = 1;
    config.max_pages = 24;
    config.max_pages_per_uid = 40;
    config.pool[0].max_sequences = 5;
    reopen();
    struct inlet_client same, other;
    ck_assert_int_eq(inlet_connect(&inlet, &same, 1, 64, 0), 0);
    ck_assert_int_eq(inlet_connect(&inlet, &other, 2, 64, 0), 0);
    uint64_t a = inlet_create(&client);
    inlet_create(&client);
    inlet_fork(&client, a);
    inlet_refused(inlet_object(&client, LK_OP_SEQUENCE_CREATE, 0, 0), LK_REASON_SEQUENCES_QUOTA, 4,
                  3, WHOLE);
    uint64_t b = inlet_create(&same);
    inlet_create(&other);
    inlet_refused(inlet_object(&other, LK_OP_SEQUENCE_CREATE, 0, 0), LK_REASON_SEQUENCES_POOL, 6, 5,
                  WHOLE);
    inlet_must(append(&client, a, 0, 0, 6 * 64));
    inlet_refused(append(&client, a, 0, 6 * 64, 1), LK_REASON_PAGES_QUOTA, 28, 24, WHOLE);
    inlet_refused(append(&same, b, 0, 0, 5 * 64), LK_REASON_PAGES_UID, 44, 40, WHOLE);
    inlet_must(append(&same, b, 0, 0, 4 * 64));
    inlet_lease(&other, 24);
    inlet_refused(inlet_object(&other, LK_OP_LEASE_OPEN, 0, 1), LK_REASON_LEASES_QUOTA, 2, 1,
                  WHOLE);
    inlet_free(&client, a); /* its fork was made before it had pages */
    inlet_must(append(&same, b, 0, 4 * 64, 2 * 64));
    inlet_disconnect(&same);
    inlet_disconnect(&other);
}
END_TEST

/* A pool has so many leases, whoever holds them: who asks for one more is told of that limit. */
START_TEST(leases_of_a_pool_run_out) {
    inlet_config(&config, 2048);
    config.max_leases = 1024;
    reopen();
    for (int i = 0; i < LK_LEASES_MAX; i++)
        inlet_lease(&client, 1);
    inlet_refused(inlet_object(&client, LK_OP_LEASE_OPEN, 0, 1), LK_REASON_LEASES_POOL,
                  LK_LEASES_MAX + 1, LK_LEASES_MAX, WHOLE);
}
END_TEST

/* A quota is one of each pool: what is held in one leaves the other's. */
START_TEST(quotas_are_of_a_pool) {
    config.pools = 2;
    config.pool[1] = config.pool[0];
    strcpy(config.pool[1].name, "second");
    config.max_pages = 24;
    config.max_pages_per_uid = 40;
    reopen();
    struct inlet_client same;
    struct lk_object_desc desc = {.length = 24};
    ck_assert_int_eq(inlet_connect(&inlet, &same, 1, 64, 0), 0);
    for (desc.pool = 0; desc.pool < 2; desc.pool++) {
        inlet_must(inlet_do(&client, LK_OP_LEASE_OPEN, &desc, sizeof(desc)));
        inlet_refused(inlet_do(&client, LK_OP_LEASE_OPEN, &desc, sizeof(desc)),
                      LK_REASON_PAGES_QUOTA, 48, 24, WHOLE);
        inlet_refused(inlet_do(&same, LK_OP_LEASE_OPEN, &desc, sizeof(desc)), LK_REASON_PAGES_UID,
                      48, 40, WHOLE);
    }
    inlet_check(&inlet);
    inlet_disconnect(&same);
}
END_TEST

static uint64_t quota_told(uint64_t max_pages, uint64_t max_pages_per_uid) {
    struct lk_msg_pool pool;
    config.max_pages = max_pages;
    config.max_pages_per_uid = max_pages_per_uid;
    lk_intake_limits(inlet.intake, &config);
    ck_assert_int_eq(lk_intake_pool(inlet.intake, 0, &pool, NULL), 0);
    return pool.pages_quota;
}

/* New limits hold for who is connected, too: beyond them one keeps what one has and gets no more.
 * What is told of them is what holds. */
START_TEST(limits_change_under_clients) {
    uint64_t a = inlet_create(&client);
    inlet_create(&client);
    inlet_must(append(&client, a, 0, 0, 6 * 64));
    config.max_sequences = 1;
    config.max_leases = 0;
    ck_assert_uint_eq(quota_told(0, 0), 512);
    ck_assert_uint_eq(quota_told(0, 40), 40);
    ck_assert_uint_eq(quota_told(1000, 1000), 512);
    ck_assert_uint_eq(quota_told(12, 40), 12);
    inlet_refused(inlet_object(&client, LK_OP_SEQUENCE_CREATE, 0, 0), LK_REASON_SEQUENCES_QUOTA, 3,
                  1, WHOLE);
    inlet_refused(inlet_object(&client, LK_OP_LEASE_OPEN, 0, 1), LK_REASON_LEASES_QUOTA, 1, 0,
                  WHOLE);
    inlet_refused(append(&client, a, 0, 6 * 64, 1), LK_REASON_PAGES_QUOTA, 28, 12, WHOLE);
    inlet_must(append(&client, a, 1, 0, 6 * 64)); /* takes none */
    inlet_must(inlet_object(&client, LK_OP_SEQUENCE_TRUNCATE, a, 64));
    inlet_must(append(&client, a, 0, 64, 2 * 64));
    ck_assert_uint_eq(quota_told(0, 0), 512);
    inlet_must(append(&client, a, 0, 3 * 64, 6 * 64));
    inlet_check(&inlet);
}
END_TEST

/* What a row takes of the workspace on the form's device. */
static uint64_t row_bytes(uint64_t length, uint32_t append, uint32_t queries) {
    struct lk_pool_view view = {.geometry = config.pool[0].geometry, .pages = 512};
    struct lk_row row = {.pool = &view,
                         .tokens = queries,
                         .length = length,
                         .table_shift = 2,
                         .append = append,
                         .budget_pages = 64,
                         .budget_tokens = 64 * 16,
                         .sampled = 0,
                         .sink_pages = LK_SINK_PAGES_DEFAULT,
                         .recent_pages = LK_RECENT_PAGES_DEFAULT,
                         .scan = LK_FULL};
    return lk_engine_row_workspace(config.resolved, &row);
}

START_TEST(lengths_and_rows_have_limits) {
    uint64_t room = 2000; /* for appends, not for the last row */
    room = room > row_bytes(100, 100, 0) ? room : row_bytes(100, 100, 0);
    room = room > row_bytes(4096, 8, 0) ? room : row_bytes(4096, 8, 0);
    config.pool[0].max_tokens = 100;
    config.workspace_bytes = room;
    reopen();
    uint64_t a = inlet_create(&client);
    inlet_refused(append(&client, a, 0, 0, 101), LK_REASON_LENGTH_MAX, 101, 100, 0);
    inlet_must(append(&client, a, 0, 0, 100));
    config.max_row_tokens = 8;
    config.pool[0].max_tokens = 0;
    reopen();
    a = inlet_create(&client);
    inlet_refused(append(&client, a, 0, 0, 9), LK_REASON_TOKENS_MANY, 9, 8, 0);
    for (uint32_t i = 0; i < 512; i++) {
        inlet_reset(&client);
        inlet_must(append(&client, a, 0, i * UINT64_C(8), 8));
    }
    inlet_step(&step);
    step.step.budget = 64 * 16;
    step.step.sampled = 0;
    inlet_give_q(&client, inlet_row(&step, a, 0, 4096, 1), 0);
    ck_assert_uint_gt(row_bytes(4096, 0, 1), room);
    inlet_refused(run_step(&client, LK_OP_ATTEND), LK_REASON_WORKSPACE, row_bytes(4096, 0, 1), room,
                  0);
}
END_TEST

/* A long row goes in parts, and a part may take workspace where the whole would take none. */
START_TEST(a_row_whose_part_fits_no_batch_is_refused) {
    const uint32_t tokens = 4000;
    config.workspace_bytes = 1;
    reopen();
    uint64_t a = inlet_create(&client);
    if (config.resolved == LK_DEVICE_CUDA)
        return; /* there the whole brings its inputs along and takes more than a part */
    ck_assert_uint_eq(row_bytes(tokens, tokens, tokens), 0);
    inlet_step(&step);
    inlet_give_q(&client, inlet_row(&step, a, 0, 0, tokens), 1);
    inlet_give_kv(&client, &step.row[0], ids);
    ck_assert_int_eq(run_step(&client, LK_OP_DECODE).reason, LK_REASON_WORKSPACE);
}
END_TEST

START_TEST(draining_makes_nothing_new) {
    uint64_t a = inlet_create(&client);
    lk_intake_drain(inlet.intake, true);
    ck_assert(inlet_status(&inlet).draining);
    inlet_refused(inlet_object(&client, LK_OP_SEQUENCE_CREATE, 0, 0), LK_REASON_DRAINING, 0, 0,
                  WHOLE);
    inlet_refused(inlet_object(&client, LK_OP_SEQUENCE_FORK, a, 0), LK_REASON_DRAINING, 0, 0,
                  WHOLE);
    inlet_refused(inlet_object(&client, LK_OP_LEASE_OPEN, 0, 4), LK_REASON_DRAINING, 0, 0, WHOLE);
    inlet_must(append(&client, a, 0, 0, 10)); /* what is there goes on */
    lk_intake_drain(inlet.intake, false);
    inlet_create(&client);
}
END_TEST

/* ---- order ---- */

START_TEST(a_barrier_waits_for_all_before) {
    uint64_t a = inlet_create(&client), b = inlet_create(&client);
    inlet_must(append(&client, a, 0, 0, 2000));
    for (uint32_t round = 0; round < 20; round++) {
        inlet_reset(&client);
        for (uint32_t i = 0; i < 10; i++) {
            inlet_step(&step);
            step.step.dense_below = 10000;
            inlet_give_q(&client, inlet_row(&step, i % 2 ? a : b, 0, i % 2 ? 2000 : 0, 1), i);
            ck_assert(inlet_submit(&client, LK_OP_ATTEND, &step, inlet_step_bytes(&step), i));
        }
        ck_assert(inlet_submit(&client, LK_OP_BARRIER, NULL, 0, 100));
        ck_assert(inlet_submit(&client, LK_OP_BARRIER, NULL, 0, 101));
        for (uint32_t i = 0; i < 10; i++)
            ck_assert_uint_lt(inlet_wait(&client).user_data, 10);
        ck_assert_uint_eq(inlet_wait(&client).user_data, 100);
        ck_assert_uint_eq(inlet_wait(&client).user_data, 101);
    }
}
END_TEST

/* ---- rings ---- */

START_TEST(indices_wrap) {
    static const uint64_t first[] = {(UINT64_C(1) << 32) - 3, (UINT64_C(1) << 63) - 3};
    for (uint32_t f = 0; f < 2; f++) {
        struct inlet_client c;
        ck_assert_int_eq(inlet_connect(&inlet, &c, 1, 4, first[f]), 0);
        uint64_t a = inlet_create(&c);
        for (uint32_t i = 0; i < 20; i++) {
            inlet_reset(&c);
            inlet_must(append(&c, a, 0, i, 1));
        }
        inlet_disconnect(&c);
    }
}
END_TEST

/* A client that does not read is pushed back, loses nothing, and holds nobody up. */
START_TEST(a_client_that_does_not_read) {
    struct inlet_client deaf;
    ck_assert_int_eq(inlet_connect(&inlet, &deaf, 2, 4, 0), 0);
    uint64_t a = inlet_create(&client), submitted = 0;
    inlet_step(&step);
    for (uint32_t i = 0, idle = 0; idle < 100 && i < 300000; i++) {
        if (inlet_submit(&deaf, LK_OP_DECODE, &step, inlet_step_bytes(&step), submitted)) {
            submitted++;
            idle = 0;
        } else {
            idle += submitted >= 4 + 8;
            usleep(100);
        }
    }
    ck_assert_uint_eq(submitted, 4 + 8); /* a completion ring answered, a submission ring waiting */
    for (uint32_t i = 0; i < 50; i++)
        inlet_must(append(&client, a, 0, i, 1));
    for (uint64_t i = 0; i < submitted; i++)
        ck_assert_uint_eq(inlet_wait(&deaf).user_data, i);
    inlet_disconnect(&deaf);
}
END_TEST

static bool is_cut(uint32_t id) {
    struct lk_channel_status channels[8];
    uint32_t count = lk_intake_channels(inlet.intake, channels, 8);
    for (uint32_t i = 0; i < count; i++)
        if (channels[i].id == id)
            return channels[i].cut;
    ck_abort_msg("no such channel");
}

START_TEST(a_ring_that_lies_is_cut) {
    static const int64_t lies[] = {100, INT64_MIN, -1};
    for (uint32_t i = 0; i < 4; i++) {
        struct inlet_client liar;
        ck_assert_int_eq(inlet_connect(&inlet, &liar, 2, 8, 0), 0);
        uint64_t handle = inlet_create(&liar), end = lk_intake_now_ns() + 60000000000u;
        struct lk_submission_head *head = liar.memory.submission;
        if (i < 3)
            lk_store_release64(&head->sq_tail, liar.ring.sq_tail + (uint64_t)lies[i]);
        else { /* cq_head beyond what was published, seen when room is short */
            lk_store_release64(&head->cq_head, liar.ring.cq_head + 1000);
            lk_store_release64(&head->sq_tail, liar.ring.sq_tail + 8);
        }
        while (i < 3 && !is_cut(liar.id) && lk_intake_now_ns() < end) {
            lk_bell_ring(liar.memory.client_fds[LK_FD_BELL]);
            inlet_free(&client, inlet_create(&client)); /* others are served */
        }
        ck_assert(i == 3 || is_cut(liar.id));
        ck_assert_uint_ne(handle, 0);
        inlet_disconnect(&liar);
    }
}
END_TEST

/* Entries and descriptors of random bytes: each answered, none believed. */
START_TEST(garbage_is_answered) {
    uint64_t seed = 11, a = inlet_create(&client);
    inlet_must(append(&client, a, 0, 0, 100));
    for (uint32_t i = 0; i < 3000; i++) {
        struct lk_sqe *sqe;
        void *desc;
        uint32_t bytes = 8 * (uint32_t)(inlet_random(&seed) % 60);
        ck_assert_int_eq(lk_ring_client_reserve(&client.ring, bytes, &sqe, &desc), 0);
        for (uint32_t at = 0; at < bytes; at += 8) {
            uint64_t word = inlet_random(&seed) >> inlet_random(&seed) % 64;
            memcpy((uint8_t *)desc + at, &word, 8);
        }
        if (i % 3 == 0 && bytes >= 8)
            memcpy(desc, &a, 8);
        sqe->op = (uint16_t)(inlet_random(&seed) % (LK_OP_COUNT + 1));
        sqe->user_data = i;
        if (i % 5 == 0)
            sqe->desc = inlet_random(&seed) >> inlet_random(&seed) % 64;
        if (i % 7 == 0)
            sqe->desc_bytes = (uint32_t)(inlet_random(&seed) >> inlet_random(&seed) % 64);
        lk_ring_client_publish(&client.ring);
        if (lk_ring_client_must_wake(&client.ring))
            lk_bell_ring(client.memory.client_fds[LK_FD_BELL]);
        ck_assert_uint_eq(inlet_wait(&client).user_data, i);
    }
    inlet_check_idle(&inlet);
}
END_TEST

/* ---- comings and goings ---- */

/* Clients that go with work queued and in flight: all comes back, the others' results stay. */
START_TEST(clients_go_at_any_point) {
    uint64_t a = inlet_create(&client), seed = 3;
    inlet_must(append(&client, a, 0, 0, 300));
    uint64_t used = inlet_status(&inlet).pool[0].pages_used;
    for (uint32_t round = 0; round < 100; round++) {
        struct inlet_client c;
        ck_assert_int_eq(inlet_connect(&inlet, &c, 2, 64, 0), 0);
        uint64_t b = inlet_create(&c), lease = inlet_lease(&c, 9), at = 0;
        for (uint64_t n = inlet_random(&seed) % 40; n > 0; n--) {
            struct lk_object_desc desc = {.handle = b};
            inlet_step(&step);
            uint32_t tokens = 1 + (uint32_t)(inlet_random(&seed) % 30);
            struct lk_row_desc *row = inlet_row(&step, b, 0, at, tokens);
            inlet_give_kv(&c, row, ids);
            inlet_give_q(&c, row, at);
            at += tokens;
            ck_assert(inlet_submit(&c, LK_OP_DECODE, &step, inlet_step_bytes(&step), 0));
            if (n % 5 == 0)
                ck_assert(inlet_submit(&c, LK_OP_SEQUENCE_FORK, &desc, sizeof(desc), 0));
        }
        ck_assert_uint_ne(lease, 0);
        usleep((uint32_t)(inlet_random(&seed) % 500));
        inlet_disconnect(&c);
        inlet_check(&inlet);
        ck_assert_uint_eq(inlet_status(&inlet).pool[0].pages_used, used);
    }
    ck_assert_uint_eq(inlet_status(&inlet).channels, 1);
    inlet_must(append(&client, a, 0, 300, 1));
}
END_TEST

START_TEST(connections_have_limits) {
    config.max_channels = 3;
    config.max_channels_per_uid = 2;
    reopen();
    struct inlet_client same, more, other;
    ck_assert_int_eq(inlet_connect(&inlet, &same, 1, 64, 0), 0);
    ck_assert_int_eq(inlet_connect(&inlet, &more, 1, 64, 0), -EDQUOT);
    ck_assert_int_eq(inlet_connect(&inlet, &other, 2, 64, 0), 0);
    ck_assert_int_eq(inlet_connect(&inlet, &more, 3, 64, 0), -EDQUOT);
    config.max_channels = 4;
    lk_intake_limits(inlet.intake, &config);
    ck_assert_int_eq(inlet_connect(&inlet, &more, 3, 64, 0), 0);
    inlet_disconnect(&same);
    inlet_disconnect(&other);
    inlet_disconnect(&more);
}
END_TEST

/* What a client leaves is given back in pieces, a tick each, and others are served between. */
START_TEST(a_legacy_is_taken_in_pieces) {
    config.max_sequences = config.pool[0].max_sequences = 3000;
    reopen();
    struct inlet_client heir;
    uint64_t a = inlet_create(&client);
    for (uint64_t at = 0; at < 64 * 120; at += 64 * 30)
        inlet_must(append(&client, a, 0, at, 64 * 30));
    for (int i = 0; i < 2999; i++) /* each of 120 quads */
        inlet_fork(&client, a);
    ck_assert_int_eq(inlet_connect(&inlet, &heir, 1, 64, 0), 0);
    uint64_t ticks = inlet_status(&inlet).ticks;
    inlet_disconnect(&client);
    ck_assert_uint_ge(inlet_status(&inlet).ticks, ticks + 3000 * 120 / LK_CHORES_PER_TICK);
    ck_assert_uint_eq(inlet_status(&inlet).pool[0].pages_used, 0);
    ck_assert_uint_eq(inlet_status(&inlet).sequences, 0);
    inlet_check(&inlet);
    client = heir;
}
END_TEST

/* The rows of a submission are checked over several ticks where they are many and long. */
START_TEST(long_rows_are_checked_in_pieces) {
    config.max_sequences = config.pool[0].max_sequences = LK_ROWS_MAX;
    config.max_row_tokens = 8192;
    reopen();
    inlet_step(&step);
    for (uint32_t i = 0; i < LK_ROWS_MAX; i++) {
        struct lk_row_desc *row = inlet_row(&step, inlet_create(&client), 0, 0, 8192);
        row->k = row->v = 0;
    }
    uint64_t ticks = inlet_status(&inlet).ticks;
    inlet_refused(run_step(&client, LK_OP_APPEND), LK_REASON_PAGES_FREE, 256 * 512, 512, WHOLE);
    ck_assert_uint_ge(inlet_status(&inlet).ticks, ticks + LK_ROWS_MAX * 513 / LK_CHORES_PER_TICK);
    step.step.rows = 1;
    inlet_must(run_step(&client, LK_OP_APPEND));
}
END_TEST

START_TEST(pools_are_described) {
    struct lk_msg_pool pool;
    int fd = -1;
    ck_assert_int_eq(lk_intake_pool(inlet.intake, 0, &pool, &fd), 0);
    ck_assert_uint_eq(pool.pages, 512);
    ck_assert_uint_eq(pool.max_tokens, 512 * 16);
    ck_assert_uint_eq(pool.pages_free, 512);
    ck_assert_str_eq(pool.name, "default");
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(lk_intake_pool(inlet.intake, 1, &pool, NULL), -ENOENT);
}
END_TEST

/* ---- several clients at once ---- */

#define CLIENTS 4

struct worker {
    uint64_t seed;
    float last[WIDTH];
};

static void *work(void *argument) {
    struct worker *w = argument;
    static _Thread_local struct inlet_step mine;
    struct inlet_client c;
    uint64_t tokens[600], at = 0;
    inlet_count(tokens, 600, w->seed * 1000);
    ck_assert_int_eq(inlet_connect(&inlet, &c, 1, 16, 0), 0);
    uint64_t handle = inlet_create(&c), seed = w->seed;
    while (at < 600) {
        inlet_reset(&c);
        uint32_t n = 1 + (uint32_t)(inlet_random(&seed) % 9);
        n = n < 600 - at ? n : (uint32_t)(600 - at);
        inlet_step(&mine);
        for (uint32_t l = 0; l < 2; l++) {
            struct lk_row_desc *row = inlet_row(&mine, handle, l, at, n);
            inlet_give_kv(&c, row, tokens + at);
            inlet_give_q(&c, row, at);
        }
        mine.step.budget = 64;
        mine.step.sampled = 1;
        inlet_must(inlet_do(&c, LK_OP_DECODE, &mine, inlet_step_bytes(&mine)));
        at += n;
    }
    inlet_step(&mine);
    mine.step.budget = 64;
    const float *out = inlet_give_q(&c, inlet_row(&mine, handle, 1, at, 1), 77);
    inlet_must(inlet_do(&c, LK_OP_ATTEND, &mine, inlet_step_bytes(&mine)));
    memcpy(w->last, out, sizeof(w->last));
    inlet_disconnect(&c);
    return NULL;
}

static void crowd(uint32_t spin_us) {
    struct worker alone[CLIENTS], together[CLIENTS];
    pthread_t thread[CLIENTS];
    config.spin_us = spin_us;
    reopen();
    for (uint32_t i = 0; i < CLIENTS; i++) {
        alone[i].seed = together[i].seed = i + 1;
        work(&alone[i]);
    }
    for (uint32_t i = 0; i < CLIENTS; i++)
        ck_assert_int_eq(pthread_create(&thread[i], NULL, work, &together[i]), 0);
    for (uint32_t i = 0; i < 20; i++) {
        inlet_check(&inlet);
        usleep(500);
    }
    for (uint32_t i = 0; i < CLIENTS; i++)
        pthread_join(thread[i], NULL);
    for (uint32_t i = 0; i < CLIENTS; i++)
        ck_assert_mem_eq(alone[i].last, together[i].last, sizeof(alone[i].last));
}

START_TEST(neighbours_change_no_bit) {
    crowd(20);
}
END_TEST
START_TEST(neighbours_change_no_bit_asleep) {
    crowd(0);
}
END_TEST

START_TEST(idle_thread_sleeps_and_wakes) {
    struct lk_completion_head *head = client.memory.completion;
    for (uint32_t ms = 0; !lk_load_relaxed32(&head->sleeping) && ms < 30000; ms++)
        usleep(1000);
    ck_assert_uint_eq(lk_load_relaxed32(&head->sleeping), 1);
    uint64_t before = lk_intake_heartbeat(inlet.intake);
    inlet_create(&client);
    ck_assert_uint_gt(lk_intake_heartbeat(inlet.intake), before);
    ck_assert_uint_gt(lk_load_relaxed64(&head->heartbeat_ns), 0);
}
END_TEST

START_TEST(a_sleeping_client_is_woken) {
    uint64_t a = inlet_create(&client);
    struct pollfd bell = {.fd = client.memory.client_fds[LK_FD_BELL], .events = POLLIN};
    for (uint32_t i = 0; i < 200; i++) {
        inlet_step(&step);
        if (i % 2)
            inlet_give_q(&client, inlet_row(&step, a, 0, 0, 1), 0);
        ck_assert(inlet_submit(&client, LK_OP_ATTEND, &step, inlet_step_bytes(&step), i));
        if (!lk_ring_client_arm(&client.ring)) {
            ck_assert_int_eq(poll(&bell, 1, 60000), 1);
            lk_bell_drain(bell.fd);
            lk_ring_client_disarm(&client.ring);
        }
        ck_assert_uint_eq(inlet_wait(&client).user_data, i);
    }
}
END_TEST

int main(void) {
    Suite *suite = suite_create("intake");
    TCase *tcase = tcase_create("all");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_set_timeout(tcase, 90);
    tcase_add_test(tcase, an_empty_step_is_answered);
    tcase_add_test(tcase, results_are_told);
    tcase_add_test(tcase, ragged_batches);
    tcase_add_test(tcase, rows_of_a_layer_follow_each_other);
    tcase_add_test(tcase, long_rows_let_others_through);
    tcase_add_test(tcase, long_lists_let_others_through);
    tcase_add_test(tcase, a_large_lease_goes_in_pieces);
    tcase_add_test(tcase, chains_let_others_through);
    tcase_add_test(tcase, lists_that_change_under_way);
    tcase_add_test(tcase, rows_of_a_step_see_summaries);
    tcase_add_test(tcase, positions_are_refused);
    tcase_add_test(tcase, a_row_that_repeats_another_is_no_replay);
    tcase_add_test(tcase, one_bad_row_refuses_the_step);
    tcase_add_test(tcase, handles_are_refused);
    tcase_add_test(tcase, pools_do_not_mix);
    tcase_add_test(tcase, quotas_are_kept);
    tcase_add_test(tcase, leases_of_a_pool_run_out);
    tcase_add_test(tcase, quotas_are_of_a_pool);
    tcase_add_test(tcase, limits_change_under_clients);
    tcase_add_test(tcase, lengths_and_rows_have_limits);
    tcase_add_test(tcase, a_row_whose_part_fits_no_batch_is_refused);
    tcase_add_test(tcase, draining_makes_nothing_new);
    tcase_add_test(tcase, a_barrier_waits_for_all_before);
    tcase_add_test(tcase, indices_wrap);
    tcase_add_test(tcase, a_client_that_does_not_read);
    tcase_add_test(tcase, a_ring_that_lies_is_cut);
    tcase_add_test(tcase, garbage_is_answered);
    tcase_add_test(tcase, clients_go_at_any_point);
    tcase_add_test(tcase, connections_have_limits);
    tcase_add_test(tcase, a_legacy_is_taken_in_pieces);
    tcase_add_test(tcase, long_rows_are_checked_in_pieces);
    tcase_add_test(tcase, pools_are_described);
    tcase_add_test(tcase, neighbours_change_no_bit);
    tcase_add_test(tcase, neighbours_change_no_bit_asleep);
    tcase_add_test(tcase, idle_thread_sleeps_and_wakes);
    tcase_add_test(tcase, a_sleeping_client_is_woken);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
