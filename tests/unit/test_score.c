/* SPDX-License-Identifier: MIT */
/*
 * test_score.c - scores against their definition in double precision and against the reference's,
 * on every path the machine has.
 *
 * The chain: the reference's scores equal the definition on the reference's codes; a path's scores
 * equal the definition on the records it read, within what 16 bits of a query allow; paths equal
 * each other more closely, and a path equals itself bit by bit wherever a page is scored.
 */
#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "../common/run.h"
#include "../common/golden.h"

static const enum lk_cpu_path paths[] = {LK_CPU_PORTABLE, LK_CPU_AVX2, LK_CPU_AVX512};
#define PATHS 3

static bool open_path(int i) {
    return lk_cpu_open(paths[i]) == 0; /* -ENOTSUP: not on this machine */
}

/* Equal bit by bit, NaN included. */
static bool same(float a, float b) {
    uint32_t x, y;
    memcpy(&x, &a, 4);
    memcpy(&y, &b, 4);
    return x == y;
}

static struct lk_query *query_open(const struct lk_geometry *g) {
    return aligned_alloc(64, lk_cpu_query_bytes(g));
}

/* A row over all pages of a pool, in order. */
struct bench {
    struct lk_pool_view pool;
    struct lk_row row;
    struct lk_query *query;
    uint32_t *table;
    uint32_t pages;
};

static struct bench bench_open(struct lk_pool_view pool, const void *q) {
    struct bench b = {.pool = pool, .pages = (uint32_t)pool.pages};

    b.table = malloc(b.pages * sizeof *b.table);
    for (uint32_t j = 0; j < b.pages; j++)
        b.table[j] = j;
    b.row = (struct lk_row){.tokens = 1,
                            .length = (uint64_t)b.pages * pool.geometry.page_tokens + 1,
                            .table = b.table,
                            .q = q,
                            .sm_scale = (float)(1 / sqrt(pool.geometry.head_dim))};
    b.query = query_open(&pool.geometry);
    return b;
}

/* The row points into the bench, which has its place only now. */
static void bench_prepare(struct bench *b) {
    b->row.pool = &b->pool;
    lk_cpu_prepare(&b->row, 0, b->query);
}

static void bench_close(struct bench *b) {
    free(b->table);
    free(b->query);
}

/* ---- against the reference ---- */

static bool same_codes(const struct golden_summary *a, const struct golden_summary *b, uint32_t d) {
    size_t n = (size_t)a->count * a->rank;
    return !memcmp(a->centroid, b->centroid, (size_t)a->count * d) &&
           !memcmp(a->basis, b->basis, n * d) && !memcmp(a->coeffs, b->coeffs, n * a->tokens) &&
           !memcmp(a->centroid_scale, b->centroid_scale, a->count * 4) &&
           !memcmp(a->scales, b->scales, n * 4);
}

/* got [group][stride] and the reference's want [group][count]. */
static void compare(const struct golden *g, const struct golden_summary *own,
                    const struct golden_summary *theirs, uint32_t rank, const float *got,
                    uint32_t stride, const float *want) {
    uint32_t d = g->geometry.head_dim;
    double q[LK_GROUP_MAX * LK_HEAD_DIM_MAX], range, sm = 1 / sqrt(d);
    bool equal = same_codes(own, theirs, d);

    golden_rotate(&g->geometry, g->q, q);
    for (uint32_t h = 0; h < g->geometry.group; h++)
        for (uint32_t j = 0; j < own->count; j++) {
            double ref = golden_score(theirs, d, j, rank, q + h * d, sm, &range);
            double mine = golden_score(own, d, j, rank, q + h * d, sm, &range);
            double score = got[h * stride + j];
            ck_assert_msg(fabs(ref - want[h * own->count + j]) < 1e-5 * (1 + range),
                          "reference: %g, %g", ref, want[h * own->count + j]);
            ck_assert_msg(fabs(score - mine) < 1e-3, "%s: page %u head %u rank %u: %g, not %g",
                          g->name, j, h, rank, score, mine);
            ck_assert(!equal || fabs(score - ref) < 1e-3);
        }
}

START_TEST(test_golden) {
    struct golden *g = golden_open(golden_names[_i]);
    uint32_t n = g->pages, quads = n / LK_QUAD_PAGES;
    float score[LK_GROUP_MAX * 8];

    for (int p = 0; p < PATHS; p++) {
        if (!open_path(p))
            continue;
        struct bench b = bench_open(golden_pool(&g->geometry, n), g->q);
        golden_fill(&b.pool, g->keys, n);
        for (uint32_t j = 0; j < n; j++)
            lk_cpu_build(&b.pool, 0, j, 0, golden_scratch());
        for (uint32_t u = 0; u < quads; u++)
            lk_cpu_build_super(&b.pool, 0, u, 0, golden_scratch());
        struct golden_summary page = golden_read(&b.pool, false),
                              super = golden_read(&b.pool, true);
        bench_prepare(&b);
        lk_cpu_score(&b.row, 0, b.query, g->geometry.rank, 0, n, score, 8);
        compare(g, &page, &g->page, g->geometry.rank, score, 8, g->score);
        lk_cpu_score(&b.row, 0, b.query, LK_COARSE_RANK, 0, n, score, 8);
        compare(g, &page, &g->page, LK_COARSE_RANK, score, 8, g->coarse_score);
        lk_cpu_score_super(&b.row, 0, b.query, 0, quads, score, 8);
        compare(g, &super, &g->super, LK_COARSE_RANK, score, 8, g->super_score);
        golden_summary_free(&page);
        golden_summary_free(&super);
        golden_pool_free(&b.pool);
        bench_close(&b);
    }
    golden_close(g);
}
END_TEST

/* ---- random pools ---- */

static uint32_t next(uint32_t *state) {
    return *state = *state * 1664525 + 1013904223;
}

static float deviate(uint32_t *state) { /* near enough to normal */
    float sum = 0;
    for (int i = 0; i < 4; i++)
        sum += (float)(int32_t)next(state) * 0x1p-31f;
    return sum;
}

/* fp32 keys of the size `large` that drift, so that pages differ; queries of the size `loud`. */
struct random {
    struct bench bench;
    float *keys, *q;
};

static struct random random_open(uint32_t d, uint32_t tokens, uint32_t rank, uint32_t group,
                                 uint32_t pages, float large, float loud) {
    struct lk_geometry g = {.layers = 1,
                            .kv_heads = 1,
                            .group = group,
                            .head_dim = d,
                            .page_tokens = tokens,
                            .rank = rank,
                            .dtype = LK_FP32};
    uint32_t state = d * tokens + rank * group;
    struct random r = {.keys = malloc((size_t)pages * tokens * d * 4), .q = malloc(group * d * 4)};

    for (uint32_t c = 0; c < d; c++) {
        float drift = 0;
        for (uint32_t t = 0; t < pages * tokens; t++) {
            drift = 0.98f * drift + 0.3f * deviate(&state);
            r.keys[t * d + c] = large * (drift + deviate(&state));
        }
    }
    for (uint32_t i = 0; i < group * d; i++)
        r.q[i] = loud * deviate(&state);
    r.bench = bench_open(golden_pool(&g, pages), r.q);
    golden_fill(&r.bench.pool, (const uint8_t *)r.keys, pages);
    lk_cpu_open(LK_CPU_PORTABLE); /* one set of records for all paths */
    for (uint32_t j = 0; j < pages; j++)
        lk_cpu_build(&r.bench.pool, 0, j, 0, golden_scratch());
    for (uint32_t u = 0; u < pages / LK_QUAD_PAGES; u++)
        lk_cpu_build_super(&r.bench.pool, 0, u, 0, golden_scratch());
    return r;
}

static void random_close(struct random *r) {
    golden_pool_free(&r->bench.pool);
    bench_close(&r->bench);
    free(r->keys);
    free(r->q);
}

#define STRIDE    100
#define UNTOUCHED (-7777.0f)

static void clear(float *scores) {
    for (int i = 0; i < LK_GROUP_MAX * STRIDE; i++)
        scores[i] = UNTOUCHED;
}

/* scores holds the wanted bits at `page` of each head, and nothing elsewhere but for `count` of
 * them */
static void check_bits(const float *scores, const float *all, uint32_t group, const uint32_t *page,
                       uint32_t count) {
    uint32_t found = 0;
    for (uint32_t g = 0; g < group; g++)
        for (uint32_t i = 0; i < count; i++) {
            uint32_t at = g * STRIDE + page[i];
            ck_assert_msg(same(scores[at], all[at]), "head %u page %u: %a, not %a", g, page[i],
                          (double)scores[at], (double)all[at]);
        }
    for (int i = 0; i < LK_GROUP_MAX * STRIDE; i++)
        found += scores[i] != UNTOUCHED;
    ck_assert_uint_eq(found, group * count);
}

/* Ranges and lists of every length give a page the same bits, and write nothing else. */
static void check_places(struct bench *b, uint32_t rank, const float *all) {
    float scores[LK_GROUP_MAX * STRIDE];
    uint32_t group = b->pool.geometry.group, state = rank, page[STRIDE];

    for (uint32_t count = 0; count <= b->pages; count += count < 20 ? 1 : 9) {
        uint32_t first = (b->pages - count) / 2;
        for (uint32_t i = 0; i < count; i++)
            page[i] = first + i;
        clear(scores);
        lk_cpu_score(&b->row, 0, b->query, rank, first, count, scores, STRIDE);
        check_bits(scores, all, group, page, count);
    }
    for (int round = 0; round < 12; round++) {
        uint32_t count = 0;
        for (uint32_t j = 0; j < b->pages; j++)
            if (next(&state) >> 16 & 1 << round % 4)
                page[count++] = j;
        clear(scores);
        lk_cpu_score_list(&b->row, 0, b->query, rank, page, count, scores, STRIDE);
        check_bits(scores, all, group, page, count);
    }
}

static void check_super_places(struct bench *b, const float *all) {
    float scores[LK_GROUP_MAX * STRIDE];
    uint32_t quads = b->pages / LK_QUAD_PAGES, page[STRIDE];

    for (uint32_t count = 0; count <= quads; count++) {
        for (uint32_t i = 0; i < count; i++)
            page[i] = quads - count + i;
        clear(scores);
        lk_cpu_score_super(&b->row, 0, b->query, quads - count, count, scores, STRIDE);
        check_bits(scores, all, b->pool.geometry.group, page, count);
    }
}

/* Against the definition on the stored codes, which is the same for all paths. */
static void check_close(const struct bench *b, const struct golden_summary *s, uint32_t rank,
                        const double *q, const float *all, const float *first_path) {
    uint32_t d = b->pool.geometry.head_dim;
    for (uint32_t g = 0; g < b->pool.geometry.group; g++)
        for (uint32_t j = 0; j < s->count; j++) {
            double range, want = golden_score(s, d, j, rank, q + g * d, 1 / sqrt(d), &range);
            double got = all[g * STRIDE + j], first = first_path[g * STRIDE + j];
            ck_assert_msg(fabs(got - want) < 1e-3 + 1e-4 * range, "head %u page %u: %g, not %g", g,
                          j, got, want);
            ck_assert_msg(fabs(got - first) < 1e-4 + 2e-6 * range,
                          "head %u page %u: %g, portable %g", g, j, got, first);
        }
}

static void check_sizes(uint32_t d, uint32_t tokens, uint32_t rank, uint32_t group, float large,
                        float loud) {
    const uint32_t pages = 84; /* 21 quads */
    struct random r = random_open(d, tokens, rank, group, pages, large, loud);
    struct bench *b = &r.bench;
    struct golden_summary page = golden_read(&b->pool, false), super = golden_read(&b->pool, true);
    static float all[3][LK_GROUP_MAX * STRIDE], portable[3][LK_GROUP_MAX * STRIDE];
    double q[LK_GROUP_MAX * LK_HEAD_DIM_MAX];

    golden_rotate(&b->pool.geometry, (const uint8_t *)r.q, q);
    for (int p = 0; p < PATHS; p++) {
        if (!open_path(p))
            continue;
        bench_prepare(b);
        lk_cpu_score(&b->row, 0, b->query, rank, 0, pages, all[0], STRIDE);
        lk_cpu_score(&b->row, 0, b->query, LK_COARSE_RANK, 0, pages, all[1], STRIDE);
        lk_cpu_score_super(&b->row, 0, b->query, 0, pages / LK_QUAD_PAGES, all[2], STRIDE);
        if (p == 0)
            memcpy(portable, all, sizeof all);
        check_close(b, &page, rank, q, all[0], portable[0]);
        check_close(b, &page, LK_COARSE_RANK, q, all[1], portable[1]);
        check_close(b, &super, LK_COARSE_RANK, q, all[2], portable[2]);
        check_places(b, rank, all[0]);
        check_places(b, LK_COARSE_RANK, all[1]);
        check_super_places(b, all[2]);
    }
    golden_summary_free(&page);
    golden_summary_free(&super);
    random_close(&r);
}

static void check_all(uint32_t d, uint32_t tokens, uint32_t rank, uint32_t group, float loud) {
    check_sizes(d, tokens, rank, group, 1, loud);
}

static const uint32_t dims[] = {64, 80, 96, 112, 128, 192, 256};

START_TEST(test_head_dims) {
    check_all(dims[_i], 16, 8, 4, 1);
    check_all(dims[_i], 8, 4, 3, 2);
}
END_TEST

START_TEST(test_pages_and_ranks) {
    uint32_t tokens = 8U << _i;
    for (uint32_t rank = 2; rank <= 16 && rank <= tokens; rank *= 2)
        check_all(64, tokens, rank, rank == 8 ? 1 : 2, 3);
}
END_TEST

START_TEST(test_groups) {
    static const uint32_t groups[] = {1, 2, 3, 4, 5, 6, 7, 8, 13, 32};
    check_all(_i % 2 ? 64 : 128, 16, 8, groups[_i], 1);
}
END_TEST

/* Exponents of hundreds and thousands: sums that no float holds without their maximum. */
START_TEST(test_loud) {
    check_all(128, 16, 8, 4, 300);
    check_all(80, 8, 8, 1, 1000);
    check_all(64, 64, 16, 5, 100);
    check_all(192, 32, 2, 2, 3000);
}
END_TEST

/* Keys and queries at the ends of what floats hold, their products of an ordinary size: no part of
 * a product may leave the range on the way. */
START_TEST(test_far_sizes) {
    check_sizes(64, 16, 8, 3, 5e-39f, 2e37f); /* keys are not normal */
    check_sizes(128, 16, 2, 4, 5e-39f, 4e37f);
    check_sizes(64, 16, 8, 4, 1e36f, 1e-36f);
    check_sizes(80, 8, 4, 4, 1e36f, 1e-34f); /* and loud */
}
END_TEST

START_TEST(test_silent) {
    for (int p = 0; p < PATHS; p++) {
        if (!open_path(p))
            continue;
        struct random r = random_open(96, 32, 4, 6, 8, 1, 0);
        float scores[LK_GROUP_MAX * STRIDE];
        open_path(p);
        bench_prepare(&r.bench);
        lk_cpu_score(&r.bench.row, 0, r.bench.query, 4, 0, 8, scores, STRIDE);
        for (uint32_t g = 0; g < 6; g++)
            for (uint32_t j = 0; j < 8; j++)
                ck_assert_double_lt(fabs((double)scores[g * STRIDE + j] - log(32)), 1e-4);
        random_close(&r);
    }
}
END_TEST

/* A query that is no number spoils its own head's scores. */
START_TEST(test_poison) {
    for (int p = 0; p < PATHS; p++) {
        if (!open_path(p))
            continue;
        struct random r = random_open(128, 16, 8, 6, 20, 1, 1);
        float clean[LK_GROUP_MAX * STRIDE], scores[LK_GROUP_MAX * STRIDE];
        open_path(p);
        bench_prepare(&r.bench);
        lk_cpu_score(&r.bench.row, 0, r.bench.query, 8, 0, 20, clean, STRIDE);
        r.q[1 * 128 + 5] = NAN;
        r.q[4 * 128 + 127] = INFINITY;
        bench_prepare(&r.bench);
        lk_cpu_score(&r.bench.row, 0, r.bench.query, 8, 0, 20, scores, STRIDE);
        for (uint32_t g = 0; g < 6; g++)
            for (uint32_t j = 0; j < 20; j++) {
                float got = scores[g * STRIDE + j];
                if (g == 1 || g == 4)
                    ck_assert(isnan(got));
                else
                    ck_assert(same(got, clean[g * STRIDE + j]));
            }
        random_close(&r);
    }
}
END_TEST

/* Products that no float holds still give finite scores, in order where there is one. */
START_TEST(test_beyond_floats) {
    for (int p = 0; p < PATHS; p++) {
        if (!open_path(p))
            continue;
        struct random r = random_open(64, 16, 8, 4, 20, 1, 1);
        float scores[LK_GROUP_MAX * STRIDE];
        for (uint32_t i = 0; i < 20 * 16 * 64; i++)
            r.keys[i] *= 1e37f;
        for (uint32_t i = 0; i < 4 * 64; i++)
            r.q[i] *= 1e37f;
        golden_fill(&r.bench.pool, (const uint8_t *)r.keys, 20);
        open_path(p);
        for (uint32_t j = 0; j < 20; j++)
            lk_cpu_build(&r.bench.pool, 0, j, 0, golden_scratch());
        bench_prepare(&r.bench);
        lk_cpu_score(&r.bench.row, 0, r.bench.query, 8, 0, 20, scores, STRIDE);
        for (uint32_t g = 0; g < 4; g++)
            for (uint32_t j = 0; j < 20; j++)
                ck_assert(isfinite(scores[g * STRIDE + j]));
        random_close(&r);
    }
}
END_TEST

/* Keys across the query, both so large that no float holds the worth of their codes' units. */
START_TEST(test_across) {
    for (int p = 0; p < PATHS; p++) {
        if (!open_path(p))
            continue;
        struct random r = random_open(64, 16, 4, 4, 8, 1, 0);
        float scores[LK_GROUP_MAX * STRIDE];
        for (uint32_t i = 0; i < 8 * 16; i++)
            for (uint32_t c = 0; c < 64; c++)
                r.keys[i * 64 + c] = c == 1 ? 1e38f : 0;
        for (uint32_t g = 0; g < 4; g++)
            r.q[g * 64] = 1e38f;
        golden_fill(&r.bench.pool, (const uint8_t *)r.keys, 8);
        open_path(p);
        for (uint32_t j = 0; j < 8; j++)
            lk_cpu_build(&r.bench.pool, 0, j, 0, golden_scratch());
        bench_prepare(&r.bench);
        lk_cpu_score(&r.bench.row, 0, r.bench.query, 4, 0, 8, scores, STRIDE);
        for (uint32_t g = 0; g < 4; g++)
            for (uint32_t j = 0; j < 8; j++)
                ck_assert_double_lt(fabs((double)scores[g * STRIDE + j] - log(16)), 1e-4);
        random_close(&r);
    }
}
END_TEST

/* Tables of quads, scattered and reused, and records farther than 2^32 bytes apart. */
START_TEST(test_far_pages) {
    struct random r = random_open(128, 16, 8, 2, 8, 1, 1);
    struct lk_pool_view near = r.bench.pool, far = near;
    uint32_t table[] = {0, 0, 1};
    float want[LK_GROUP_MAX * STRIDE], got[LK_GROUP_MAX * STRIDE];

    far.pages = 10000000;
    size_t coarse = far.pages * far.layout.coarse_stride, fine = far.pages * far.layout.fine_stride;
    far.coarse = mmap(NULL, coarse, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    far.fine = mmap(NULL, fine, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                    -1, 0);
    ck_assert(far.coarse != MAP_FAILED && far.fine != MAP_FAILED);
    table[1] = (uint32_t)(far.pages / 4 - 1);
    ck_assert_uint_gt(4 * (uint64_t)table[1] * far.layout.fine_stride, UINT64_C(1) << 32);
    for (uint32_t j = 0; j < 12; j++) {
        uint64_t to = 4 * (uint64_t)table[j / 4] + j % 4;
        memcpy(lk_page_coarse(&far, 0, to, 0), lk_page_coarse(&near, 0, j % 8, 0),
               near.layout.coarse_bytes);
        memcpy(lk_page_fine(&far, 0, to, 0), lk_page_fine(&near, 0, j % 8, 0),
               near.layout.fine_bytes);
    }
    for (int p = 0; p < PATHS; p++) {
        if (!open_path(p))
            continue;
        bench_prepare(&r.bench);
        lk_cpu_score(&r.bench.row, 0, r.bench.query, 8, 0, 8, want, STRIDE);
        struct lk_row row = r.bench.row;
        row.pool = &far;
        row.table = table;
        row.table_shift = 2;
        row.length = 12 * 16 + 1;
        lk_cpu_score(&row, 0, r.bench.query, 8, 0, 12, got, STRIDE);
        for (uint32_t g = 0; g < 2; g++)
            for (uint32_t j = 0; j < 12; j++)
                ck_assert(same(got[g * STRIDE + j], want[g * STRIDE + j % 8]));
    }
    munmap(far.coarse, coarse);
    munmap(far.fine, fine);
    random_close(&r);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("score");
    TCase *tc = tcase_create("score");
    int cases = 0;

    while (golden_names[cases])
        cases++;
    tcase_add_loop_test(tc, test_golden, 0, cases);
    tcase_add_loop_test(tc, test_head_dims, 0, 7);
    tcase_add_loop_test(tc, test_pages_and_ranks, 0, 4);
    tcase_add_loop_test(tc, test_groups, 0, 10);
    tcase_add_test(tc, test_loud);
    tcase_add_test(tc, test_far_sizes);
    tcase_add_test(tc, test_silent);
    tcase_add_test(tc, test_poison);
    tcase_add_test(tc, test_beyond_floats);
    tcase_add_test(tc, test_across);
    tcase_add_test(tc, test_far_pages);
    tcase_set_timeout(tc, 60);
    suite_add_tcase(suite, tc);
    return run_suite(suite);
}
