/* SPDX-License-Identifier: MIT */
/*
 * test_select.c - shares, kept pages and the sample against plain definitions, on every path.
 */
#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../common/run.h"
#include "../../kernels/cpu/attend.h"
#include "../../kernels/cpu/select.h"
#include "../common/bed.h"

static const enum lk_cpu_path paths[] = {LK_CPU_PORTABLE, LK_CPU_AVX2, LK_CPU_AVX512};

static bool open_path(int i) {
    return lk_cpu_open(paths[i]) == 0; /* -ENOTSUP: not on this machine */
}

/* Of a processor: how long others have it is not this thread's fault. */
static double seconds(void) {
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double *shares_of(uint64_t count, double spread, uint64_t seed) {
    double *share = malloc(count * sizeof *share);

    for (uint64_t j = 0; j < count; j++) {
        double s = exp(spread * bed_normal(&seed)) / (double)count;
        share[j] = s < 1 ? s : 1;
    }
    return share;
}

/* All pages compete. */
struct all {
    struct lk_field field;
    float *rounded, *scratch;
};

static struct all all_of(const double *share, uint64_t count) {
    struct all all = {.rounded = malloc(count * 4), .scratch = malloc(count * 4)};

    for (uint64_t j = 0; j < count; j++)
        all.rounded[j] = (float)share[j];
    all.field = (struct lk_field){share, all.rounded, NULL, 0, count, all.scratch};
    return all;
}

static void all_free(struct all *all) {
    free(all->rounded);
    free(all->scratch);
}

/* ---- shares ---- */

static void check_share(uint32_t group, uint64_t count, double scale) {
    uint64_t stride = count + 3, seed = count * group;
    float *scores = malloc(group * stride * 4), *rounded = malloc(group * stride * 4);
    double *want = calloc(count, sizeof *want), *share = malloc(count * sizeof *share);

    for (uint64_t i = 0; i < group * stride; i++)
        scores[i] = (float)(scale * bed_normal(&seed));
    for (uint32_t g = 0; g < group; g++) {
        double top = -1e300, sum = 0;
        for (uint64_t j = 0; j < count; j++)
            top = fmax(top, (double)scores[g * stride + j]);
        for (uint64_t j = 0; j < count; j++)
            sum += exp((double)scores[g * stride + j] - top);
        for (uint64_t j = 0; j < count; j++)
            want[j] += exp((double)scores[g * stride + j] - top) / sum / group;
    }
    lk_share(scores, stride, group, count, LK_SHARE_FLOOR, share, rounded);
    for (uint64_t j = 0; j < count; j++) {
        ck_assert_double_lt(fabs(share[j] - want[j]), 1e-5 * want[j] + 1e-30);
        ck_assert_float_eq(rounded[j], (float)share[j]);
        if (want[j] < 0.99e-30)
            ck_assert_double_eq(share[j], 0);
    }
    free(scores);
    free(rounded);
    free(share);
    free(want);
}

START_TEST(shares) {
    if (!open_path(_i))
        return;
    for (uint64_t count = 1; count <= 70; count++)
        check_share(1 + count % 32, count, 3);
    check_share(4, 8192, 5);
    check_share(32, 1000, 30);
    check_share(1, 5000, 200);
}
END_TEST

START_TEST(equal_scores) { /* have equal shares wherever they stand, beside one of another score */
    enum { COUNT = 70, STRIDE = 80 };
    float scores[LK_GROUP_MAX * STRIDE], rounded[LK_GROUP_MAX * STRIDE];
    double share[COUNT];
    uint64_t seed = 11;
    if (!open_path(_i))
        return;
    for (uint32_t group = 1; group <= LK_GROUP_MAX; group++)
        for (uint64_t count = 2; count <= COUNT; count++) {
            for (uint32_t g = 0; g < group; g++) {
                float score = (float)(3 * bed_normal(&seed));
                for (uint64_t j = 0; j < count; j++)
                    scores[g * STRIDE + j] = score;
                scores[g * STRIDE + count - 1] = (float)(3 * bed_normal(&seed));
            }
            lk_share(scores, STRIDE, group, count, LK_SHARE_FLOOR, share, rounded);
            for (uint64_t j = 1; j + 1 < count; j++)
                ck_assert_double_eq(share[j], share[0]);
        }
}
END_TEST

START_TEST(shares_of_what_is_no_number) {
    float scores[64], rounded[64], scratch[64];
    double share[64];
    if (!open_path(_i))
        return;
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int b = 0; b < 3; b++)
        for (int all = 0; all < 2; all++) {
            for (int j = 0; j < 64; j++)
                scores[j] = all || j == 20 ? bad[b] : (float)j / 64;
            lk_share(scores, 64, 1, 64, LK_SHARE_FLOOR, share, rounded);
            for (int j = 0; j < 64; j++)
                ck_assert(share[j] >= 0 && share[j] <= 1);
            uint32_t index[8];
            struct lk_field field = {share, rounded, NULL, 0, 64, scratch};
            ck_assert_uint_eq(lk_select_best(&field, 8, index), 8);
            for (int i = 1; i < 8; i++)
                ck_assert_uint_lt(index[i - 1], index[i]);
            ck_assert_uint_lt(index[7], 64);
        }
}
END_TEST

/* ---- the best ---- */

static const double *sorted_by;
static int better(const void *a, const void *b) {
    uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;

    if (sorted_by[i] != sorted_by[j])
        return sorted_by[i] > sorted_by[j] ? -1 : 1;
    return i < j ? -1 : 1;
}

static void check_best(const double *share, uint64_t count, uint64_t need) {
    uint32_t *order = malloc(count * 4), *index = malloc((need + 1) * 4);
    uint8_t *in = calloc(count, 1);

    for (uint64_t j = 0; j < count; j++)
        order[j] = (uint32_t)j;
    sorted_by = share;
    qsort(order, count, sizeof *order, better);
    struct all all = all_of(share, count);
    uint64_t found = lk_select_best(&all.field, need, index);
    ck_assert_uint_eq(found, need < count ? need : count);
    for (uint64_t i = 0; i < found; i++) {
        in[order[i]] = 1;
        ck_assert(i == 0 || index[i - 1] < index[i]);
    }
    for (uint64_t i = 0; i < found; i++)
        ck_assert(in[index[i]]);
    all_free(&all);
    free(order);
    free(index);
    free(in);
}

START_TEST(best) {
    if (!open_path(_i))
        return;
    for (uint64_t count = 1; count < 100; count += 7)
        for (uint64_t need = 0; need <= count + 1; need++) {
            double *share = shares_of(count, 3, count + need);
            check_best(share, count, need);
            free(share);
        }
    for (uint64_t need = 1; need < 5000; need = need * 3 + 1) {
        double *share = shares_of(5003, 4, need);
        check_best(share, 5003, need);
        for (uint64_t j = 0; j < 5003; j++) /* few distinct values: many ties */
            share[j] = ldexp(1, -(int)(j * j % 7) - 3);
        check_best(share, 5003, need);
        for (uint64_t j = 0; j < 5003; j++) /* differ in a float's last bit; some are 0 */
            share[j] = j % 3 ? (double)nextafterf(0.25f, j % 2 ? 1 : 0) : 0;
        check_best(share, 5003, need);
        for (uint64_t j = 0; j < 5003; j++) /* differ in less than floats do, about a few of them */
            share[j] = ldexp(1 + 1e-9 * (double)(j * j % 13), -(int)(j % 3) - 3) - 2e-9 * (j % 2);
        check_best(share, 5003, need);
        for (uint64_t j = 0; j < 5003; j++) /* just so many stand far above all others */
            share[j] = (double)(j % 97 + 1) * (j * 37 % 5003 < need ? 1e-3 : 1e-10);
        check_best(share, 5003, need);
        free(share);
    }
}
END_TEST

START_TEST(heads_of_one_page_each) { /* shares differ by what each head leaves to all others */
    enum { GROUP = 8, COUNT = 100 };
    float scores[GROUP * COUNT], rounded[GROUP * COUNT], scratch[COUNT];
    double share[COUNT];
    uint32_t index[GROUP];
    if (!open_path(_i))
        return;
    for (uint32_t g = 0; g < GROUP; g++)
        for (uint32_t j = 0; j < COUNT; j++)
            scores[g * COUNT + j] = j == 10 * g + 7 ? 18 + (float)g / 2 : 0;
    lk_share(scores, COUNT, GROUP, COUNT, LK_SHARE_FLOOR, share, rounded);
    struct lk_field field = {share, rounded, NULL, 0, COUNT, scratch};
    for (uint32_t need = 1; need <= GROUP; need++) { /* the later page has more */
        ck_assert_uint_eq(lk_select_best(&field, need, index), need);
        for (uint32_t i = 0; i < need; i++)
            ck_assert_uint_eq(index[i], 10 * (GROUP - need + i) + 7);
    }
}
END_TEST

START_TEST(many_equal_scores) { /* 131,072: right, and in linear time */
    if (!open_path(_i))
        return;
    uint64_t count = 131072;
    float *scores = malloc(count * 4), *scratch = malloc(count * 4);
    double *share = malloc(count * sizeof *share);
    struct lk_field field = {share, scores, NULL, 0, count, scratch};
    uint32_t *index = malloc(count * 4), kept[64], page[64];
    uint64_t *sums = malloc((count / LK_SAMPLE_BLOCK + 1) * 8);
    float weight[64];

    for (uint64_t j = 0; j < count; j++)
        scores[j] = 3.25f;
    double began = seconds();
    lk_share(scores, count, 1, count, LK_SHARE_FLOOR, share, scores);
    for (uint64_t need = 1; need <= count; need *= 8) {
        ck_assert_uint_eq(lk_select_best(&field, need, index), need);
        for (uint64_t i = 0; i < need; i++)
            if (index[i] != i) /* an assertion writes to a file even if true */
                ck_abort_msg("%u at %lu of %lu", index[i], (unsigned long)i, (unsigned long)need);
    }
    for (uint32_t i = 0; i < 64; i++)
        kept[i] = i;
    ck_assert_uint_eq(lk_sample(share, count, kept, 64, 64, sums, page, weight), 64);
    for (int i = 0; i < 64; i++) {
        ck_assert_uint_eq(page[i], 64 + (2 * (uint64_t)i + 1) * (count - 64) / 128);
        ck_assert_float_eq_tol(weight[i], (float)(count - 64) / 64, 0.01f);
    }
    struct lk_rank *rank = malloc(30000 * sizeof *rank);
    ck_assert_uint_eq(lk_select_mass(&field, index, 30000, 0, 0.1, 4, rank),
                      13108); /* 0.1 of 131,072, rounded up */
    ck_assert_double_lt(seconds() - began, 2);
    free(rank);
    free(scores);
    free(scratch);
    free(share);
    free(index);
    free(sums);
}
END_TEST

START_TEST(mass_target) {
    if (!open_path(_i))
        return;
    double share[] = {0.1, 0.3, 0.05, 0.2, 0.2 + 1e-12, 0.01};
    struct all all = all_of(share, 6);
    const struct {
        double sum, target;
        uint64_t least, want;
        uint32_t index[6];
    } cases[] = {
        {0, 0.25, 0, 1, {1}},
        {0, 0.35, 0, 2, {1, 4}},
        {0, 0.6, 0, 3, {1, 3, 4}},
        {0.5, 0.4, 0, 0, {0}},
        {0.5, 0.4, 2, 2, {1, 4}},
        {0, 9, 0, 6, {0, 1, 2, 3, 4, 5}},
        {0, 0.1, 9, 6, {0, 1, 2, 3, 4, 5}},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        uint32_t index[] = {0, 1, 2, 3, 4, 5};
        struct lk_rank scratch[6];
        ck_assert_uint_eq(lk_select_mass(&all.field, index, 6, cases[c].sum, cases[c].target,
                                         cases[c].least, scratch),
                          cases[c].want);
        for (uint64_t i = 0; i < cases[c].want; i++)
            ck_assert_uint_eq(index[i], cases[c].index[i]);
    }
    all_free(&all);
}
END_TEST

START_TEST(forced_pages) {
    const struct {
        uint64_t k;
        uint32_t sink, recent;
        uint64_t want_sink, want_tail;
    } cases[] = {
        {1, 1, 1, 0, 1}, {2, 1, 1, 1, 1},     {2, 1, 5, 1, 1}, {3, 1, 5, 1, 2},   {8, 1, 1, 1, 1},
        {8, 0, 0, 0, 1}, {8, 100, 100, 7, 1}, {8, 3, 2, 3, 2}, {8, 0, 100, 0, 8},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        struct lk_forced f = lk_select_forced(cases[c].k, cases[c].sink, cases[c].recent);
        ck_assert_uint_eq(f.sink, cases[c].want_sink);
        ck_assert_uint_eq(f.tail, cases[c].want_tail);
    }
}
END_TEST

/* ---- the sample, by its definition ---- */

static void check_sample(const double *share, uint64_t pages, uint64_t keep, uint32_t count,
                         uint64_t seed) {
    typedef unsigned __int128 u128;
    uint8_t *in = calloc(pages, 1);
    uint32_t *kept = malloc(pages * 4), *page = malloc(count * 4), found = 0;
    float *weight = malloc(count * 4);
    uint64_t *sums = malloc((pages / LK_SAMPLE_BLOCK + 1) * 8), kept_count = 0, F = 0, at = 0;
    u128 run = 0;

    for (uint64_t i = 0; i < keep; i++, seed = seed * 6364136223846793005U + 1)
        in[(seed >> 33) % pages] = 1;
    for (uint64_t j = 0; j < pages; j++)
        if (in[j])
            kept[kept_count++] = (uint32_t)j;
        else
            F += (uint64_t)(share[j] * 0x1p32) + 1;
    uint64_t L = pages - kept_count;
    uint64_t taken = lk_sample(share, pages, kept, kept_count, count, sums, page, weight);
    u128 T = (u128)20 * L * F;
    for (uint64_t j = 0; j < pages; j++) {
        if (in[j])
            continue;
        u128 W = (u128)19 * L * ((uint64_t)(share[j] * 0x1p32) + 1) + F;
        uint32_t hits = L <= count;
        run += W;
        for (; L > count && found < count && found * (T / count) + T / (2 * count) < run; found++)
            hits++;
        if (!hits)
            continue;
        ck_assert_uint_lt(at, taken);
        ck_assert_uint_eq(page[at], j);
        double want = L <= count ? 1 : hits * ((double)T / (count * (double)W));
        ck_assert_double_lt(fabs((double)weight[at++] / want - 1), 1e-6);
    }
    ck_assert_uint_eq(at, taken);
    free(in);
    free(kept);
    free(page);
    free(weight);
    free(sums);
}

START_TEST(sample) {
    if (!open_path(_i))
        return;
    for (uint64_t pages = 1; pages < 300; pages += 13)
        for (uint32_t count = 1; count < 80; count = count * 2 + 1) {
            double *share = shares_of(pages, 2, pages + count);
            check_sample(share, pages, pages / 3, count, pages);
            check_sample(share, pages, 0, count, pages);
            free(share);
        }
    double *share = shares_of(70000, 6, 5);
    check_sample(share, 70000, 64, 64, 1);
    check_sample(share, 70000, 200, 1000, 2);
    for (uint64_t j = 0; j < 70000; j++) /* nothing, and one page that has it all */
        share[j] = j == 40000;
    check_sample(share, 70000, 10, 64, 3);
    memset(share, 0, 70000 * sizeof *share);
    check_sample(share, 70000, 10, 64, 4);
    free(share);
}
END_TEST

START_TEST(sample_of_very_many) { /* T beyond 64 bits: 2^25 pages, shares that sum to more than 1 */
    if (!open_path(_i))
        return;
    uint64_t pages = UINT64_C(1) << 25;
    double *share = malloc(pages * sizeof *share);
    for (uint64_t j = 0; j < pages; j++)
        share[j] = 1e-6;
    check_sample(share, pages, 64, 64, 9);
    free(share);
}
END_TEST

START_TEST(fractions) { /* the paths agree on every share's fraction, 0 and 1 too */
    double x[4096];
    uint64_t seed = 3;
    if (!open_path(_i))
        return;
    for (int i = 0; i < 4096; i++)
        x[i] = i % 50 ? exp(-fabs(4 * bed_normal(&seed))) : i / 50 % 2;
    for (uint64_t n = 0; n <= 4096; n = n < 80 ? n + 1 : n + 251) {
        uint64_t want = 0;
        for (uint64_t i = 0; i < n; i++)
            want += (uint64_t)(x[i] * 0x1p32);
        ck_assert_uint_eq(lk_vector_get()->fractions(x, n), want);
    }
}
END_TEST

int main(void) {
    Suite *suite = suite_create("select");
    TCase *all = tcase_create("all paths");

    tcase_set_timeout(all, 120);
    tcase_add_loop_test(all, shares, 0, 3);
    tcase_add_loop_test(all, equal_scores, 0, 3);
    tcase_add_loop_test(all, shares_of_what_is_no_number, 0, 3);
    tcase_add_loop_test(all, best, 0, 3);
    tcase_add_loop_test(all, heads_of_one_page_each, 0, 3);
    tcase_add_loop_test(all, many_equal_scores, 0, 3);
    tcase_add_loop_test(all, mass_target, 0, 3);
    tcase_add_test(all, forced_pages);
    tcase_add_loop_test(all, sample, 0, 3);
    tcase_add_loop_test(all, sample_of_very_many, 0, 3);
    tcase_add_loop_test(all, fractions, 0, 3);
    suite_add_tcase(suite, all);
    return run_suite(suite);
}
