/* SPDX-License-Identifier: MIT */
/*
 * test_engine.c - batches: order, marks, memory, sleeping; and that a row's bits depend on neither
 * the number of threads nor its neighbours.
 */
#include <check.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "../common/run.h"
#include "../../graphs/engine.h"
#include "../../graphs/workers.h"
#include "../../kernels/cpu/cpu.h"

#define LENGTH_MAX 3000
#define SEQUENCES  8

static struct lk_engine *open_engine(uint32_t threads, uint32_t spin_us) {
    struct lk_engine_options options = {
        .threads = threads, .spin_us = spin_us, .workspace_bytes = 64 << 20};
    struct lk_engine *engine;
    char why[256];

    ck_assert_msg(lk_engine_open(&options, &engine, why, sizeof why) == 0, "%s", why);
    return engine;
}

/* Sleep until the next mark. */
static enum lk_mark next_mark(struct lk_engine *engine, struct lk_batch **ret) {
    for (;;) {
        enum lk_mark mark = lk_engine_poll(engine, ret);
        if (mark != LK_MARK_NONE)
            return mark;
        lk_engine_sleep(engine, true);
        mark = lk_engine_poll(engine, ret);
        if (mark == LK_MARK_NONE) {
            struct pollfd ready = {.fd = lk_engine_fd(engine), .events = POLLIN};
            ck_assert_int_eq(poll(&ready, 1, 20000), 1); /* a lost wake-up shows here */
        }
        lk_engine_sleep(engine, false);
        if (mark != LK_MARK_NONE)
            return mark;
    }
}

static void finish(struct lk_engine *engine, struct lk_batch *batch) {
    struct lk_batch *passed;

    ck_assert_int_eq(lk_engine_launch(engine, batch), 0);
    ck_assert_int_eq(next_mark(engine, &passed), LK_MARK_FENCED);
    ck_assert_ptr_eq(passed, batch);
    ck_assert_int_eq(next_mark(engine, &passed), LK_MARK_DONE);
    ck_assert_ptr_eq(passed, batch);
}

/* ---- a pool with sequences of known tokens ---- */

static const struct lk_geometry geometry = {1, 2, 3, 64, 8, 8, LK_BF16};

struct world {
    struct lk_engine *engine;
    struct lk_pool_view pool;
    uint16_t *tokens; /* [LENGTH_MAX][kv_heads][head_dim], of sequence s shifted by s */
    uint32_t table[SEQUENCES][LENGTH_MAX / 32 + 2];
    uint64_t length[SEQUENCES];
};

static uint16_t noise(uint64_t *state) {
    *state = *state * UINT64_C(6364136223846793005) + 1442695040888963407U;
    float f = (float)((int)(*state >> 48) - 32768) / 12000;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (uint16_t)(bits >> 16);
}

static struct lk_row row_of(struct world *w, uint32_t s, uint64_t length) {
    return (struct lk_row){.pool = &w->pool,
                           .length = length,
                           .table = w->table[s],
                           .table_shift = 2,
                           .q = w->tokens + s * 64,
                           .k = w->tokens + s * 128,
                           .v = w->tokens + s * 128 + 999,
                           .budget_pages = 16,
                           .budget_tokens = 128,
                           .sampled = 4,
                           .sink_pages = 1,
                           .recent_pages = 1,
                           .scan = LK_FULL,
                           .sm_scale = 0.125f};
}

static struct world *open_world(uint32_t threads, uint32_t spin_us) {
    struct world *w = calloc(1, sizeof *w);
    uint64_t seed = 1, pages = SEQUENCES * (LENGTH_MAX / 8 + 8);
    char why[256];
    int fd;

    w->engine = open_engine(threads, spin_us);
    ck_assert_int_eq(lk_engine_pool_open(w->engine, &geometry, (pages + 3) / 4 * 4, &w->pool, &fd,
                                         why, sizeof why),
                     0);
    size_t count = (LENGTH_MAX + 64) * 128;
    w->tokens = malloc(count * 2);
    for (size_t i = 0; i < count; i++)
        w->tokens[i] = noise(&seed);
    struct lk_build *builds = calloc(pages, sizeof *builds);
    struct lk_row rows[SEQUENCES];
    struct lk_batch batch = {.rows = rows, .row_count = SEQUENCES, .builds_after = builds};
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        w->length[s] = LENGTH_MAX - 217 * s;
        for (uint32_t i = 0; i < LENGTH_MAX / 32 + 2; i++)
            w->table[s][i] = i * SEQUENCES + s;
        rows[s] = row_of(w, s, w->length[s]);
        rows[s].append = (uint32_t)w->length[s];
        for (uint64_t j = 0; j < w->length[s] / 8; j++)
            builds[batch.build_after_count++] =
                (struct lk_build){&w->pool, 0, j % 4 == 3, lk_row_page(&rows[s], j)};
    }
    finish(w->engine, &batch);
    free(builds);
    return w;
}

static void close_world(struct world *w) {
    lk_engine_close(w->engine);
    free(w->tokens);
    free(w);
}

struct answer { /* of a row of at most 4 tokens */
    float out[4 * 6 * 64], lse[4 * 6];
    struct lk_head_out result[2];
    struct lk_page_weight list[2 * 32];
};

/* Row i of a made-up mixture: sequences, lengths, scans, exact ones, several tokens, none at all.
 * */
static struct lk_row mixed_row(struct world *w, uint32_t i, struct answer *answer) {
    uint32_t s = i * 5 % SEQUENCES;
    struct lk_row row = row_of(w, s, w->length[s] - i * 7 % 500);

    row.scan = LK_FULL + i % 4;
    row.tokens = i % 11 == 3 ? 2 + i % 3 : 1;
    row.exact = i % 5 == 2;
    if (i % 13 == 7)
        row.length = i % 130;
    memset(answer, 0, sizeof *answer);
    row.out = answer->out;
    row.lse = answer->lse;
    row.result = answer->result;
    row.list = answer->list;
    row.list_pages = 32;
    return row;
}

#define MIXED 256

static void run_mixed(struct world *w, uint32_t at_once, struct answer *answers) {
    static struct lk_row rows[MIXED];

    for (uint32_t i = 0; i < MIXED; i += at_once) {
        struct lk_batch batch = {.rows = rows};
        for (; batch.row_count < at_once && i + batch.row_count < MIXED; batch.row_count++)
            rows[batch.row_count] =
                mixed_row(w, i + batch.row_count, &answers[i + batch.row_count]);
        finish(w->engine, &batch);
    }
}

#ifdef __SANITIZE_THREAD__ /* takes ten times as long */
#define MORE_THREADS 3
#else
#define MORE_THREADS 1
#endif

START_TEST(bits_do_not_depend_on_company) {
    struct answer *alone = calloc(MIXED, sizeof *alone), *now = calloc(MIXED, sizeof *now);
    static const uint32_t at_once[] = {256, 100, 7, 2};

    for (uint32_t threads = 1; threads <= 4; threads += MORE_THREADS) {
        struct world *w = open_world(threads, threads % 2 ? 0 : 50);
        if (threads == 1)
            run_mixed(w, 1, alone);
        for (uint32_t a = 0; a < 4; a++) {
            run_mixed(w, at_once[a], now);
            for (uint32_t i = 0; i < MIXED; i++)
                ck_assert_msg(memcmp(&alone[i], &now[i], sizeof *now) == 0,
                              "row %u differs: %u threads, %u rows at once", i, threads,
                              at_once[a]);
        }
        close_world(w);
    }
    ck_assert_uint_eq(alone[2].result[0].flags, LK_OUT_EXACT);
    ck_assert_uint_eq(alone[0].result[0].sampled > 0, 1);
    free(alone);
    free(now);
}
END_TEST

/* ---- order and marks ---- */

START_TEST(batches_in_flight) {
    struct world *w = open_world(2, 20);
    struct answer answers[4];
    struct lk_row rows[4];
    struct lk_batch batch[4], *passed;

    for (int i = 0; i < 4; i++) {
        rows[i] = mixed_row(w, 1, &answers[i]);
        batch[i] = (struct lk_batch){.rows = &rows[i], .row_count = 1};
    }
    for (int round = 0; round < 300; round++) {
        ck_assert_int_eq(lk_engine_launch(w->engine, &batch[0]), 0);
        ck_assert_int_eq(lk_engine_launch(w->engine, &batch[1]), 0);
        ck_assert_int_eq(lk_engine_launch(w->engine, &batch[2]), -EAGAIN);
        for (int i = 0; i < 2; i++) {
            ck_assert_int_eq(next_mark(w->engine, &passed), LK_MARK_FENCED);
            ck_assert_ptr_eq(passed, &batch[i]);
            if (i == 0) { /* not DONE yet, but not ahead either */
                ck_assert_int_eq(lk_engine_launch(w->engine, &batch[2]), 0);
                ck_assert_int_eq(lk_engine_launch(w->engine, &batch[3]), -EAGAIN);
            }
            ck_assert_int_eq(next_mark(w->engine, &passed), LK_MARK_DONE);
            ck_assert_ptr_eq(passed, &batch[i]);
            if (i == 0) /* nor does DONE make room where two are not FENCED */
                ck_assert_int_eq(lk_engine_launch(w->engine, &batch[3]), -EAGAIN);
        }
        ck_assert_int_eq(next_mark(w->engine, &passed), LK_MARK_FENCED);
        ck_assert_int_eq(next_mark(w->engine, &passed), LK_MARK_DONE);
        ck_assert_ptr_eq(passed, &batch[2]);
        ck_assert_int_eq(lk_engine_poll(w->engine, &passed), LK_MARK_NONE);
        ck_assert_mem_eq(&answers[0], &answers[2], sizeof answers[0]);
    }
    ck_assert_uint_eq(batch[0].bucket, 1);
    close_world(w);
}
END_TEST

START_TEST(empty_batches) {
    struct lk_engine *engine = open_engine(1, 0);
    struct lk_batch batch[2] = {{0}};

    for (int i = 0; i < 100; i++) {
        finish(engine, &batch[0]);
        finish(engine, &batch[1]);
    }
    ck_assert_str_eq(strchr(lk_engine_describe(engine), ','), ", 1 thread");
    lk_engine_close(engine);
}
END_TEST

START_TEST(phases_and_buckets) {
    static const uint32_t want[][2] = {{1, 1}, {2, 2}, {3, 4}, {5, 8}, {65, 128}, {256, 256}};
    struct world *w = open_world(2, 50);
    static struct answer answers[256];
    static struct lk_row rows[257];

    for (int c = 0; c < 6; c++) {
        struct lk_batch batch = {.rows = rows, .row_count = want[c][0]};
        for (uint32_t i = 0; i < want[c][0]; i++)
            rows[i] = mixed_row(w, 8, &answers[i]);
        finish(w->engine, &batch);
        ck_assert_uint_eq(batch.bucket, want[c][1]);
        ck_assert_uint_gt(batch.phase_ns[LK_PHASE_SCORE], 0);
        ck_assert_uint_gt(batch.phase_ns[LK_PHASE_SELECT], 0);
        ck_assert_uint_gt(batch.phase_ns[LK_PHASE_ATTEND], 0);
        ck_assert_uint_eq(batch.phase_ns[LK_PHASE_BUILD], 0);
        ck_assert_uint_gt(rows[0].score_bytes, 0);
        ck_assert_uint_gt(rows[0].attend_bytes, 0);
    }
    struct lk_batch batch = {.rows = rows, .row_count = 257};
    ck_assert_int_eq(lk_engine_launch(w->engine, &batch), -EINVAL);
    close_world(w);
}
END_TEST

START_TEST(workspace_is_bounded) {
    struct world *w = open_world(1, 0);
    static struct answer answers[256];
    static struct lk_row rows[256];
    struct lk_batch batch = {.rows = rows, .row_count = 2};

    rows[0] = mixed_row(w, 1, &answers[0]);
    rows[1] = rows[0];
    rows[1].length = UINT64_C(1) << 30; /* never run */
    ck_assert_uint_gt(lk_engine_row_workspace(lk_engine_device(w->engine), &rows[1]), UINT64_C(64)
                                                                                          << 20);
    ck_assert_int_eq(lk_engine_launch(w->engine, &batch), -ENOSPC);
    for (uint32_t i = 0; i < 256; i++) {
        rows[i] = mixed_row(w, i, &answers[i]);
        ck_assert_uint_eq(lk_engine_row_workspace(lk_engine_device(w->engine), &rows[i]) % 64, 0);
    }
    batch.row_count = 256; /* nothing was launched: the slot is free */
    finish(w->engine, &batch);
    for (uint32_t i = 1; i < 256; i++)
        ck_assert(rows[i - 1].workspace +
                      lk_engine_row_workspace(lk_engine_device(w->engine), &rows[i - 1]) <=
                  rows[i].workspace);
    close_world(w);
}
END_TEST

/* Copies, writes, builds of what writes sealed, then rows; builds of what rows closed are seen by
 * the next. */
START_TEST(stages_in_order) {
    struct world *w = open_world(3, 0);
    struct answer first, second;
    uint64_t spare = w->pool.pages - 8, from = w->table[0][0] * 4;
    uint32_t table[80];
    struct lk_copy copies[4];
    struct lk_build builds[80];
    uint64_t slots[8 * 76];
    struct lk_write write = {&w->pool, 0, 8 * 76, w->tokens, w->tokens + 999, slots};

    for (uint32_t i = 0; i < 4; i++)
        copies[i] = (struct lk_copy){&w->pool, 0, i == 0, from + i, spare + i};
    for (uint32_t i = 0; i < 8 * 76; i++) /* pages 4.. of the row: sequence 7's, taken over */
        slots[i] = (w->table[7][i / 32] * 4 + i / 8 % 4) * 8 + i % 8;
    for (uint32_t i = 0; i < 4; i++)
        table[i] = (uint32_t)spare + i;
    for (uint32_t i = 0; i < 76; i++) {
        table[4 + i] = w->table[7][i / 4] * 4 + i % 4;
        builds[i] = (struct lk_build){&w->pool, 0, i % 4 == 3, table[4 + i]};
    }
    struct lk_row row = row_of(w, 0, 80 * 8);
    row.table = table;
    row.table_shift = 0;
    row.tokens = 1;
    row.scan = LK_TREE;
    row.budget_pages = 4;
    row.budget_tokens = 32;
    row.sampled = 0;
    row.out = first.out;
    row.lse = first.lse;
    row.result = first.result;
    struct lk_batch batch = {.rows = &row,
                             .row_count = 1,
                             .copies = copies,
                             .copy_count = 4,
                             .writes = &write,
                             .write_count = 1,
                             .builds_before = builds,
                             .build_before_count = 76};
    finish(w->engine, &batch);
    for (int p = 0; p < LK_PHASES; p++)
        ck_assert_uint_gt(batch.phase_ns[p] + (p == LK_PHASE_COPY), 0);
    row.out = second.out; /* all is in place: the same again without the rest */
    row.lse = second.lse;
    row.result = second.result;
    struct lk_batch again = {.rows = &row, .row_count = 1};
    finish(w->engine, &again);
    ck_assert_mem_eq(first.out, second.out, 6 * 64 * 4);
    ck_assert_uint_eq(first.result[0].kept, 4);
    close_world(w);
}
END_TEST

/* A row closes page 79 of sequence 1 in one batch; the next, launched at once, scores it. */
START_TEST(builds_are_seen_by_the_next_batch) {
    struct world *w = open_world(2, 0);
    struct answer first, second;
    struct lk_build after[1];
    struct lk_row closes = row_of(w, 1, 80 * 8), scores = row_of(w, 1, 80 * 8 + 1);
    closes.append = 8;
    scores.append = 1;
    scores.tokens = 1;
    scores.out = first.out;
    after[0] = (struct lk_build){&w->pool, 0, 1, lk_row_page(&closes, 79)};
    memset(lk_page_coarse(&w->pool, 0, after[0].page, 0), 0xff, w->pool.layout.coarse_stride);
    memset(lk_page_coarse(&w->pool, 0, after[0].page, 1), 0xff, w->pool.layout.coarse_stride);
    struct lk_batch b1 = {
        .rows = &closes, .row_count = 1, .builds_after = after, .build_after_count = 1};
    struct lk_batch b2 = {.rows = &scores, .row_count = 1}, *passed;
    ck_assert_int_eq(lk_engine_launch(w->engine, &b1), 0);
    ck_assert_int_eq(lk_engine_launch(w->engine, &b2), 0);
    for (int i = 0; i < 4; i++)
        next_mark(w->engine, &passed);
    ck_assert_uint_gt(b1.phase_ns[LK_PHASE_BUILD], 0);
    scores.append = 0;
    scores.out = second.out;
    finish(w->engine, &b2);
    ck_assert_mem_eq(first.out, second.out, 6 * 64 * 4);
    close_world(w);
}
END_TEST

START_TEST(results_before_builds) { /* FENCED is seen while builds that follow still run */
    struct world *w = open_world(1, 0);
    static struct lk_build builds[3000];
    enum lk_mark mark = LK_MARK_DONE;
    struct answer answer;
    struct lk_row row = mixed_row(w, 1, &answer);
    struct lk_batch batch = {.rows = &row, .row_count = 1, .builds_after = builds}, *passed;

    for (uint32_t i = 0; i < 3000; i++)
        builds[batch.build_after_count++] = (struct lk_build){&w->pool, 0, 0, i % w->pool.pages};
    for (int i = 0; i < 10 && mark == LK_MARK_DONE; i++) { /* until not held up for all of them */
        ck_assert_int_eq(lk_engine_launch(w->engine, &batch), 0);
        ck_assert_int_eq(next_mark(w->engine, &passed), LK_MARK_FENCED);
        ck_assert_uint_gt(answer.result[0].kept, 0);
        mark = lk_engine_poll(w->engine, &passed);
        if (mark == LK_MARK_NONE)
            ck_assert_int_eq(next_mark(w->engine, &passed), LK_MARK_DONE);
    }
    ck_assert_int_eq(mark, LK_MARK_NONE); /* milliseconds of them */
    close_world(w);
}
END_TEST

START_TEST(idle_costs_nothing) {
    struct world *w = open_world(4, 100);
    struct timespec before, after, pause = {.tv_nsec = 300000000};
    long used = LONG_MAX;

    for (int i = 0; i < 20 && used >= 10000000; i++) {
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL); /* they fall asleep */
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
        nanosleep(&pause, NULL);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
        used = (after.tv_sec - before.tv_sec) * 1000000000 + after.tv_nsec - before.tv_nsec;
    }
    ck_assert_int_lt(used, 10000000);
    close_world(w);
}
END_TEST

/* ---- workers ---- */

#define STAGES  60000
#define WORKERS 5

struct stages { /* each of 1 to 5 tiny tasks; `done` counts them and opens the next */
    struct lk_workers *workers;
    _Atomic uint32_t ran;
    uint32_t stage, wrong;
    _Atomic bool over;
};

static void count_task(void *context, uint32_t worker, uint32_t task) {
    struct stages *s = context;

    /* A task that is not of this stage shows, and so does a worker that there is not. */
    s->ran += 1 + 1000 * (task >= 1 + s->stage % 5 || worker >= WORKERS);
}

static void next_stage(void *context) {
    struct stages *s = context;

    s->wrong += s->ran != 1 + s->stage % 5;
    s->ran = 0;
    if (++s->stage == STAGES)
        s->over = true;
    else
        lk_workers_publish(s->workers, 1 + s->stage % 5);
}

START_TEST(stages_end_once) {
    struct stages s = {0};
    struct lk_workers_options options = {.threads = WORKERS,
                                         .spin_us = (uint32_t)_i,
                                         .run = count_task,
                                         .done = next_stage,
                                         .context = &s};

    ck_assert_int_eq(lk_workers_open(&options, &s.workers), 0);
    lk_workers_publish(s.workers, 1);
    for (int i = 0; i < 100000 && !s.over; i++)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    ck_assert(s.over);
    lk_workers_close(s.workers);
    ck_assert_uint_eq(s.stage, STAGES);
    ck_assert_uint_eq(s.wrong, 0);
}
END_TEST

/* ---- memory ---- */

START_TEST(pool_memory) {
    struct lk_engine *engine = open_engine(1, 0);
    struct lk_geometry g = {3, 2, 4, 128, 16, 8, LK_FP16};
    struct lk_pool_view p;
    uint64_t bytes = lk_engine_pool_bytes(lk_engine_device(engine), &g, 64);
    char why[256] = "";
    int fd;

    ck_assert_int_eq(lk_engine_pool_open(engine, &g, 64, &p, &fd, why, sizeof why), 0);
    const uint8_t *part[] = {p.kv, p.coarse, p.fine, p.super};
    for (int i = 0; i < 4; i++)
        ck_assert_uint_eq((uintptr_t)part[i] % 4096, 0);
    ck_assert(p.kv < p.coarse && p.coarse < p.fine && p.fine < p.super);
    ck_assert_ptr_eq(p.kv, lk_page_keys(&p, 0, 0, 0));
    ck_assert(lk_page_values(&p, 2, 63, 1) + p.layout.head_bytes / 2 <= p.coarse);
    ck_assert(lk_page_coarse(&p, 2, 63, 1) + p.layout.coarse_stride <= p.fine);
    ck_assert(lk_page_fine(&p, 2, 63, 1) + p.layout.fine_stride <= p.super);
    ck_assert(lk_quad_super(&p, 2, 15, 1) + p.layout.super_stride <= p.kv + bytes);
    ck_assert_int_eq(lseek(fd, 0, SEEK_END), (off_t)bytes);
    ck_assert_int_lt(ftruncate(fd, 0), 0); /* sealed */
    lk_page_keys(&p, 1, 5, 1)[3] = 77;
    uint8_t *seen = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    ck_assert_ptr_ne(seen, MAP_FAILED);
    ck_assert_uint_eq(seen[lk_page_keys(&p, 1, 5, 1) - p.kv + 3], 77);
    munmap(seen, bytes);
    lk_engine_close(engine);
}
END_TEST

START_TEST(refusals) {
    struct lk_engine *engine = open_engine(1, 0), *none = NULL;
    struct lk_engine_options options = {.threads = 0, .workspace_bytes = 1 << 20};
    struct lk_geometry g = {1, 8, 4, 128, 16, 8, LK_BF16};
    struct lk_pool_view p;
    char why[256] = "";
    int fd = -7;

    ck_assert_int_eq(lk_engine_pool_open(engine, &g, UINT64_C(1) << 32, &p, &fd, why, sizeof why),
                     -ENOMEM);
    ck_assert_ptr_nonnull(strstr(why, "MiB available"));
    ck_assert_int_eq(fd, -7);
    ck_assert_int_eq(lk_engine_pool_open(engine, &g, 6, &p, &fd, why, sizeof why), -EINVAL);
    lk_engine_close(engine);
    ck_assert_int_eq(lk_engine_open(&options, &none, why, sizeof why), -EINVAL);
    options.threads = 1;
    options.cpu_path = 99;
    ck_assert_int_eq(lk_engine_open(&options, &none, why, sizeof why), -EINVAL);
    options.cpu_path = LK_CPU_PORTABLE;
    options.workspace_bytes = UINT64_C(1) << 50;
    ck_assert_int_eq(lk_engine_open(&options, &none, why, sizeof why), -ENOMEM);
    ck_assert_ptr_null(none);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("engine");
    TCase *all = tcase_create("engine");

    tcase_set_timeout(all, 240);
    tcase_add_test(all, bits_do_not_depend_on_company);
    tcase_add_test(all, batches_in_flight);
    tcase_add_test(all, empty_batches);
    tcase_add_test(all, phases_and_buckets);
    tcase_add_test(all, workspace_is_bounded);
    tcase_add_test(all, stages_in_order);
    tcase_add_test(all, builds_are_seen_by_the_next_batch);
    tcase_add_test(all, results_before_builds);
    tcase_add_test(all, idle_costs_nothing);
    tcase_add_loop_test(all, stages_end_once, 0, 2);
    tcase_add_test(all, pool_memory);
    tcase_add_test(all, refusals);
    suite_add_tcase(suite, all);
    return run_suite(suite);
}
