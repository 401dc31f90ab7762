/* SPDX-License-Identifier: MIT */
/*
 * cpu.c - one row of a long context through an engine in this process: bandwidth of the full scan
 * and of dense attention against plain reading by as many threads, and sparse steps against dense
 * ones.
 *
 * Every round measures reading, dense, full, nested and tree once, in this order; medians are
 * taken, and of ratios the median of the rounds' ratios.
 */
#include "bench.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

#include "../../graphs/engine.h"
#include "../common/measure.h"
#include "../common/parallel.h"
#include "../common/progress.h"
#include "keys.h"

#define HEAD_DIM        128
#define PAGE_TOKENS     16
#define RANK            8
#define BUDGET          2048
#define SPIN_US         200                  /* between a step's stages workers stay awake */
#define READ_BYTES      (UINT64_C(1) << 30)  /* at most, of a round of plain reading */
#define CHUNK_BYTES     (UINT64_C(4) << 20)  /* a task of it */
#define FILL_PAGES      64                   /* a task of filling: one extent */
#define BUILD_PAGES     1024                 /* of a batch */
#define WORKSPACE_BYTES (UINT64_C(64) << 20) /* one row takes a few megabytes at 1M tokens */
#define TREE_CONTEXT    1048576              /* where the tree has its target */
#define GB              1e9

enum work { READ, DENSE, FULL, NESTED, TREE, WORKS };

struct bed {
    struct bench *bench;
    struct lk_engine *engine;
    struct lk_pool_view pool;
    struct bench_keys keys;
    struct lk_row row;
    uint32_t *table; /* quads in order */
    uint16_t *q;     /* [heads][d] */
    float *out;
    _Atomic uint64_t sum; /* of plain reading, so that it is not left out */
    double phases[WORKS][LK_PHASES][BENCH_ROUNDS_MAX];                       /* milliseconds */
    double seconds[WORKS][BENCH_ROUNDS_MAX], rates[WORKS][BENCH_ROUNDS_MAX]; /* bytes a second */
};

/* ---- batches ---- */

/* Launches and sleeps until done: this thread takes no processor from the workers. -> seconds
 * until the results were complete, as who finished them saw it: the waking of this thread, some
 * 0.1 ms, is nothing that a daemon which spins would wait for. */
static double run_batch(struct bed *bed, struct lk_batch *batch) {
    uint64_t begun = lk_clock_ns();
    struct lk_batch *passed;
    lk_engine_launch(bed->engine, batch);
    for (enum lk_mark mark = LK_MARK_NONE; mark != LK_MARK_DONE;) {
        struct pollfd fd = {.fd = lk_engine_fd(bed->engine), .events = POLLIN};
        lk_engine_sleep(bed->engine, true);
        mark = lk_engine_poll(bed->engine, &passed);
        if (mark == LK_MARK_NONE)
            poll(&fd, 1, -1);
        lk_engine_sleep(bed->engine, false);
    }
    return (double)(batch->fenced_ns - begun) * 1e-9;
}

/* ---- memory ---- */

static uint64_t available_bytes(void) {
    char line[128];
    unsigned long long kib = 0;
    FILE *file = fopen("/proc/meminfo", "re");
    while (file && fgets(line, sizeof(line), file))
        if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1)
            break;
    if (file)
        fclose(file);
    return kib ? (uint64_t)kib * 1024 : UINT64_MAX;
}

static int open_pool(struct bed *bed) {
    struct bench *bench = bed->bench;
    struct lk_geometry geometry = {.layers = 1,
                                   .kv_heads = bench->kv_heads,
                                   .group = bench->group,
                                   .head_dim = HEAD_DIM,
                                   .page_tokens = PAGE_TOKENS,
                                   .rank = RANK,
                                   .dtype = LK_BF16};
    uint64_t quad = LK_QUAD_PAGES * PAGE_TOKENS;
    uint64_t pages = (bench->context + quad - 1) / quad * LK_QUAD_PAGES;
    uint64_t bytes = lk_engine_pool_bytes(LK_DEVICE_CPU, &geometry, pages);
    char needed[LK_WORD_BYTES], there[LK_WORD_BYTES];
    int fd;
    if (bytes > available_bytes()) {
        snprintf(bench->why, sizeof(bench->why),
                 "%" PRIu64 " tokens x %u KV head%s take %s of memory, %s are available: "
                 "choose a smaller --context or fewer --kv-heads",
                 bench->context, bench->kv_heads, lk_plural(bench->kv_heads),
                 lk_bytes_word((double)bytes, needed),
                 lk_bytes_word((double)available_bytes(), there));
        return EX_OSERR;
    }
    int rc = lk_engine_pool_open(bed->engine, &geometry, pages, &bed->pool, &fd, bench->why,
                                 sizeof(bench->why));
    return rc == -ENOMEM ? EX_OSERR : rc ? EX_SOFTWARE : 0;
}

static void fill_pages(void *context, uint64_t task, unsigned thread) {
    struct bed *bed = context;
    uint64_t end = (task + 1) * FILL_PAGES;
    (void)thread;
    for (uint64_t page = task * FILL_PAGES; page < end && page < bed->pool.pages; page++)
        for (uint32_t head = 0; head < bed->bench->kv_heads; head++)
            bench_keys_page(&bed->keys, &bed->pool, page, head);
}

static void build_pages(struct bed *bed) {
    static struct lk_build builds[BUILD_PAGES];
    struct lk_progress progress;
    lk_progress_begin(&progress, "building summaries", bed->pool.pages);
    for (uint64_t first = 0; first < bed->pool.pages; first += BUILD_PAGES) {
        struct lk_batch batch = {.builds_after = builds};
        for (uint64_t page = first; page < first + BUILD_PAGES && page < bed->pool.pages; page++)
            builds[batch.build_after_count++] = (struct lk_build){
                .pool = &bed->pool,
                .page = page,
                .quad = page % LK_QUAD_PAGES == LK_QUAD_PAGES - 1}; /* the last closes it */
        run_batch(bed, &batch);
        lk_progress_at(&progress, first + batch.build_after_count);
    }
    lk_progress_end(&progress, true);
}

static int make_row(struct bed *bed) {
    const struct bench *bench = bed->bench;
    uint32_t heads = bench->kv_heads * bench->group;
    uint64_t quads = bed->pool.pages / LK_QUAD_PAGES;
    bed->table = malloc(quads * sizeof(*bed->table)); /* NOLINT(*UnixAPI): a pool has pages */
    bed->q = malloc((size_t)heads * HEAD_DIM * sizeof(*bed->q));
    bed->out = malloc((size_t)heads * HEAD_DIM * sizeof(*bed->out));
    if (!bed->table || !bed->q || !bed->out) {
        snprintf(bed->bench->why, sizeof(bed->bench->why), "no memory for a row");
        return EX_OSERR;
    }
    for (uint64_t i = 0; i < quads; i++)
        bed->table[i] = (uint32_t)i;
    bench_keys_query(&bed->keys, bed->q, heads * HEAD_DIM);
    bed->row = (struct lk_row){.pool = &bed->pool,
                               .tokens = 1,
                               .length = bench->context,
                               .table = bed->table,
                               .table_shift = 2,
                               .q = bed->q,
                               .out = bed->out,
                               .budget_pages = BUDGET / PAGE_TOKENS,
                               .budget_tokens = BUDGET,
                               .sampled = BUDGET / PAGE_TOKENS / 2,
                               .sink_pages = 1,
                               .recent_pages = 1,
                               .sm_scale = 0.08838834764831845F}; /* 1/sqrt(128) */
    return 0;
}

/* ---- works ---- */

static void read_chunk(void *context, uint64_t task, unsigned thread) {
    typedef uint64_t vec __attribute__((vector_size(16)));
    struct bed *bed = context;
    const vec *at = (const vec *)(bed->pool.kv + task * CHUNK_BYTES);
    vec sum[8] = {{0}};
    (void)thread;
    for (uint64_t i = 0; i < CHUNK_BYTES / sizeof(vec); i += 8)
        for (int k = 0; k < 8; k++)
            sum[k] += at[i + (uint64_t)k];
    for (int k = 1; k < 8; k++)
        sum[0] += sum[k];
    bed->sum += sum[0][0] + sum[0][1];
}

static void read_plain(struct bed *bed, uint32_t round) {
    uint64_t bytes = bed->pool.pages * bed->pool.layout.page_bytes;
    uint64_t chunks = (bytes < READ_BYTES ? bytes : READ_BYTES) / CHUNK_BYTES;
    uint64_t begun = lk_clock_ns();
    lk_parallel_run(bed->bench->threads, chunks, read_chunk, bed);
    bed->seconds[READ][round] = (double)(lk_clock_ns() - begun) * 1e-9;
    bed->rates[READ][round] = (double)(chunks * CHUNK_BYTES) / bed->seconds[READ][round];
}

static void step(struct bed *bed, enum work work, uint32_t round) {
    static const uint32_t scans[WORKS] = {
        [DENSE] = LK_FULL, [FULL] = LK_FULL, [NESTED] = LK_NESTED, [TREE] = LK_TREE};
    struct lk_row row = bed->row;
    struct lk_batch batch = {.rows = &row, .row_count = 1};
    row.scan = scans[work];
    row.exact = work == DENSE;
    bed->seconds[work][round] = run_batch(bed, &batch);
    for (int i = 0; i < LK_PHASES; i++)
        bed->phases[work][i][round] = (double)batch.phase_ns[i] * 1e-6;
    uint64_t bytes = work == DENSE ? row.attend_bytes : row.score_bytes;
    uint64_t ns = batch.phase_ns[work == DENSE ? LK_PHASE_ATTEND : LK_PHASE_SCORE];
    bed->rates[work][round] = ns ? (double)bytes / ((double)ns * 1e-9) : 0;
}

static void measure(struct bed *bed) {
    struct lk_progress progress;
    for (enum work work = DENSE; work < WORKS; work++) /* once to warm up */
        step(bed, work, 0);
    lk_progress_begin(&progress, "measuring", bed->bench->rounds);
    for (uint32_t round = 0; round < bed->bench->rounds; round++) {
        read_plain(bed, round);
        for (enum work work = DENSE; work < WORKS; work++)
            step(bed, work, round);
        lk_progress_at(&progress, round + 1);
    }
    lk_progress_end(&progress, true);
}

/* ---- figures ---- */

static double median(const double *values, uint32_t count) {
    double sorted[BENCH_ROUNDS_MAX];
    memcpy(sorted, values, count * sizeof(*values));
    return lk_percentile(sorted, count, 50);
}

/* Median over rounds of above / below. */
static double ratio(const double *above, const double *below, uint32_t count) {
    double ratios[BENCH_ROUNDS_MAX];
    for (uint32_t i = 0; i < count; i++)
        ratios[i] = above[i] / below[i];
    return lk_percentile(ratios, count, 50);
}

static void add_bandwidth(struct bed *bed, enum work work, const char *key, const char *what,
                          double target) {
    uint32_t rounds = bed->bench->rounds;
    double percent = 100 * ratio(bed->rates[work], bed->rates[READ], rounds);
    struct bench_figure *figure =
        bench_add(bed->bench, key, what, percent, "% of reading", AT_LEAST, target);
    snprintf(figure->note, sizeof(figure->note), "%.1f GB/s",
             median(bed->rates[work], rounds) / GB);
}

static void add_step(struct bed *bed, enum work work, const char *key, const char *what,
                     double target) {
    uint32_t rounds = bed->bench->rounds;
    struct bench_figure *figure =
        bench_add(bed->bench, key, what, ratio(bed->seconds[DENSE], bed->seconds[work], rounds),
                  "x dense", target > 0 ? AT_LEAST : NO_TARGET, target);
    snprintf(figure->note, sizeof(figure->note), "%.2f ms: score %.2f, select %.2f, attend %.2f",
             1e3 * median(bed->seconds[work], rounds),
             median(bed->phases[work][LK_PHASE_SCORE], rounds),
             median(bed->phases[work][LK_PHASE_SELECT], rounds),
             median(bed->phases[work][LK_PHASE_ATTEND], rounds));
}

static void add_figures(struct bed *bed) {
    struct bench *bench = bed->bench;
    bench_add(bench, "read_gb_s", "plain reading", median(bed->rates[READ], bench->rounds) / GB,
              "GB/s", NO_TARGET, 0);
    add_bandwidth(bed, FULL, "score_percent", "score, full scan", 50);
    add_bandwidth(bed, DENSE, "dense_percent", "dense attention", 70);
    bench_add(bench, "dense_ms", "dense step", 1e3 * median(bed->seconds[DENSE], bench->rounds),
              "ms", NO_TARGET, 0);
    add_step(bed, FULL, "full_x", "sparse step, full scan", 5.5);
    add_step(bed, NESTED, "nested_x", "sparse step, nested", 8);
    add_step(bed, TREE, "tree_x", "sparse step, tree", bench->context >= TREE_CONTEXT ? 30 : 0);
}

static int run(struct bed *bed) {
    struct bench *bench = bed->bench;
    int rc = open_pool(bed);
    if (rc)
        return rc;
    struct lk_progress progress;
    lk_progress_begin(&progress, "filling pages", 1);
    bench_keys_make(&bed->keys);
    lk_parallel_run(bench->threads, (bed->pool.pages + FILL_PAGES - 1) / FILL_PAGES, fill_pages,
                    bed);
    lk_progress_end(&progress, true);
    build_pages(bed);
    rc = make_row(bed);
    if (rc)
        return rc;
    measure(bed);
    add_figures(bed);
    return 0;
}

int bench_cpu(struct bench *bench) {
    static struct bed bed;
    struct lk_engine_options options = {
        .threads = bench->threads, .spin_us = SPIN_US, .workspace_bytes = WORKSPACE_BYTES};
    int rc = bench_build(bench);
    if (rc)
        return rc;
    bed.bench = bench;
    if (lk_engine_open(&options, &bed.engine, bench->why, sizeof(bench->why)))
        return EX_OSERR;
    snprintf(bench->head, sizeof(bench->head),
             "%s: one row of %" PRIu64
             " tokens, %u KV head%s x group %u, d %d, pages of %d, rank %d, "
             "bf16, budget %d (%d pages sampled), %u round%s",
             lk_engine_describe(bed.engine), bench->context, bench->kv_heads,
             lk_plural(bench->kv_heads), bench->group, HEAD_DIM, PAGE_TOKENS, RANK, BUDGET,
             BUDGET / PAGE_TOKENS / 2, bench->rounds, lk_plural(bench->rounds));
    rc = run(&bed);
    free(bed.table);
    free(bed.q);
    free(bed.out);
    lk_engine_close(bed.engine);
    return rc;
}
