/* SPDX-License-Identifier: MIT */
/*
 * test_build.c - summaries against the float64 reference's (tests/golden), on every path the
 * machine has.
 *
 * A code may differ by one, where a value lies between two, and few do; a direction's sign may
 * differ where two coefficients are equally large. Where eigenvalues repeat the directions are
 * anybody's: there the residual is checked, which is not.
 */
#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../common/run.h"
#include "../common/golden.h"

static const enum lk_cpu_path paths[] = {LK_CPU_PORTABLE, LK_CPU_AVX2, LK_CPU_AVX512};
#define PATHS 3

static bool open_path(int i) {
    return lk_cpu_open(paths[i]) == 0; /* -ENOTSUP: not on this machine */
}

static void build_all(const struct lk_pool_view *pool) {
    for (uint64_t j = 0; j < pool->pages; j++)
        lk_cpu_build(pool, 0, j, 0, golden_scratch());
    for (uint64_t u = 0; u < pool->pages / LK_QUAD_PAGES; u++)
        lk_cpu_build_super(pool, 0, u, 0, golden_scratch());
}

/* ---- against the reference ---- */

struct tally {
    uint32_t codes, different;
};

/* Codes of both, the second times sign. */
static void compare_codes(const int8_t *got, const int8_t *want, int sign, uint32_t count,
                          const char *what, struct tally *tally) {
    for (uint32_t i = 0; i < count; i++) {
        int off = abs(got[i] - sign * want[i]);
        ck_assert_msg(off <= 1, "%s code %u is %d, not %d", what, i, got[i], sign * want[i]);
        tally->codes++;
        tally->different += off != 0;
    }
}

/* One step of bf16 apart at the most. */
static void compare_scales(float got, float want, const char *what) {
    ck_assert_msg(fabs((double)got - (double)want) <= fmax((double)want * 0x1p-7, 0x1p-133),
                  "%s scale is %g, not %g", what, (double)got, (double)want);
    ck_assert_msg((got == 0) == (want == 0), "%s scale is %g, not %g", what, (double)got,
                  (double)want);
}

static int sign_between(const int8_t *a, const int8_t *b, uint32_t count) {
    int sum = 0;
    for (uint32_t i = 0; i < count; i++)
        sum += a[i] * b[i];
    return sum < 0 ? -1 : 1;
}

/* Whether two coefficients are as large as any, so that the sign of the direction is a toss-up. */
static bool sign_is_open(const int8_t *c, uint32_t count) {
    int high = 0, low = 0;
    for (uint32_t i = 0; i < count; i++) {
        high = c[i] > high ? c[i] : high;
        low = c[i] < low ? c[i] : low;
    }
    return abs(high + low) <= 1;
}

static void compare(const struct golden_summary *got, const struct golden_summary *want, uint32_t d,
                    const char *name) {
    struct tally tally = {0, 0};

    for (uint32_t j = 0; j < want->count; j++) {
        compare_codes(got->centroid + j * d, want->centroid + j * d, 1, d, name, &tally);
        compare_scales(got->centroid_scale[j], want->centroid_scale[j], name);
        for (uint32_t i = 0; i < want->rank; i++) {
            size_t at = (size_t)j * want->rank + i;
            const int8_t *c = want->coeffs + at * want->tokens;
            int sign = sign_between(got->coeffs + at * want->tokens, c, want->tokens);
            ck_assert_msg(sign == 1 || sign_is_open(c, want->tokens),
                          "%s: direction %u of page %u is turned", name, i, j);
            compare_codes(got->coeffs + at * want->tokens, c, sign, want->tokens, name, &tally);
            compare_codes(got->basis + at * d, want->basis + at * d, sign, d, name, &tally);
            compare_scales(got->scales[at], want->scales[at], name);
        }
    }
    ck_assert_msg(tally.different * 300 <= tally.codes, "%s: %u of %u codes differ", name,
                  tally.different, tally.codes);
}

START_TEST(test_golden) {
    struct golden *g = golden_open(golden_names[_i]);

    for (int p = 0; p < PATHS; p++) {
        if (!open_path(p))
            continue;
        struct lk_pool_view pool = golden_pool(&g->geometry, g->pages);
        golden_fill(&pool, g->keys, g->pages);
        build_all(&pool);
        struct golden_summary page = golden_read(&pool, false), super = golden_read(&pool, true);
        compare(&page, &g->page, g->geometry.head_dim, g->name);
        compare(&super, &g->super, g->geometry.head_dim, g->name);
        golden_summary_free(&page);
        golden_summary_free(&super);
        golden_pool_free(&pool);
    }
    golden_close(g);
}
END_TEST

/* ---- keys made here ---- */

struct keys {
    struct lk_geometry geometry;
    float *k; /* [8][tokens][d] */
    uint32_t per_page;
};

#define PAGES 8

static struct keys keys_open(uint32_t d, uint32_t tokens, uint32_t rank) {
    struct keys k = {.geometry = {.layers = 1,
                                  .kv_heads = 1,
                                  .group = 1,
                                  .head_dim = d,
                                  .page_tokens = tokens,
                                  .rank = rank,
                                  .dtype = LK_FP32},
                     .per_page = tokens * d};
    uint32_t state = 12345;

    k.k = malloc((size_t)PAGES * k.per_page * 4);
    for (uint32_t i = 0; i < PAGES * k.per_page; i++) {
        state = state * 1664525 + 1013904223;
        k.k[i] = (float)(int32_t)state * 0x1p-30f;
    }
    return k;
}

static struct lk_pool_view keys_build(const struct keys *k) {
    struct lk_pool_view pool = golden_pool(&k->geometry, PAGES);
    golden_fill(&pool, (const uint8_t *)k->k, PAGES);
    build_all(&pool);
    return pool;
}

/* The squared distance of the summary's keys from the true ones, over the pages' total spread. */
static double residual(const struct keys *k, const struct lk_pool_view *pool, uint32_t page,
                       double *ret_spread) {
    uint32_t d = k->geometry.head_dim, tokens = k->geometry.page_tokens;
    struct golden_summary s = golden_read(pool, false);
    double *turned = malloc(tokens * d * sizeof *turned), off = 0, spread = 0;
    struct lk_geometry all = k->geometry;

    all.group = tokens; /* rotates keys as if they were queries */
    golden_rotate(&all, (const uint8_t *)(k->k + (size_t)page * k->per_page), turned);
    for (uint32_t c = 0; c < d; c++) {
        double mean = 0;
        for (uint32_t t = 0; t < tokens; t++)
            mean += turned[t * d + c] / tokens;
        for (uint32_t t = 0; t < tokens; t++) {
            double x = (double)s.centroid_scale[page] * s.centroid[page * d + c];
            for (uint32_t i = 0; i < s.rank; i++) {
                size_t at = (size_t)page * s.rank + i;
                x += (double)s.scales[at] * s.basis[at * d + c] * s.coeffs[at * tokens + t];
            }
            off += (x - turned[t * d + c]) * (x - turned[t * d + c]);
            spread += (mean - turned[t * d + c]) * (mean - turned[t * d + c]);
        }
    }
    golden_summary_free(&s);
    free(turned);
    *ret_spread = spread;
    return off;
}

/* Equal eigenvalues: `distinct` orthogonal keys of equal length, each as often. The first `rank` of
 * distinct - 1 equal directions take their share, whichever they are. */
START_TEST(test_repeated_eigenvalues) {
    static const uint32_t cases[][3] = {
        {16, 16, 8}, {16, 8, 8}, {64, 4, 8}, {32, 32, 2}, {64, 64, 16}};

    for (int p = 0; p < PATHS; p++)
        for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
            uint32_t tokens = cases[n][0], distinct = cases[n][1], rank = cases[n][2];
            struct keys k = keys_open(128, tokens, rank);
            if (!open_path(p)) {
                free(k.k);
                continue;
            }
            memset(k.k, 0, (size_t)PAGES * k.per_page * 4);
            for (uint32_t j = 0; j < PAGES; j++)
                for (uint32_t t = 0; t < tokens; t++)
                    k.k[j * k.per_page + t * 128 + t % distinct + j] = 3;
            struct lk_pool_view pool = keys_build(&k);
            uint32_t taken = rank < distinct - 1 ? rank : distinct - 1;
            for (uint32_t j = 0; j < PAGES; j++) {
                double spread, off = residual(&k, &pool, j, &spread);
                double want = spread * (1 - (double)taken / (distinct - 1));
                ck_assert_msg(off < want + 0.03 * spread, "residual %g of %g, not %g", off, spread,
                              want);
            }
            golden_pool_free(&pool);
            free(k.k);
        }
}
END_TEST

/* Eigenvalues that nearly repeat, from far apart to closer than floats can tell. */
START_TEST(test_near_eigenvalues) {
    for (int p = 0; p < PATHS; p++)
        for (int e = 1; e < 12; e++) {
            struct keys k = keys_open(64, 16, 4);
            if (!open_path(p)) {
                free(k.k);
                continue;
            }
            memset(k.k, 0, (size_t)PAGES * k.per_page * 4);
            for (uint32_t j = 0; j < PAGES; j++)
                for (uint32_t t = 0; t < 16; t++)
                    for (uint32_t i = 0; i < 4; i++)
                        k.k[j * k.per_page + t * 64 + 7 * i + j] =
                            (float)((t >> i & 1 ? 1 : -1) * (1 + i * pow(10, -e)));
            struct lk_pool_view pool = keys_build(&k);
            for (uint32_t j = 0; j < PAGES; j++) {
                double spread, off = residual(&k, &pool, j, &spread);
                ck_assert_msg(off < 0.03 * spread, "10^-%d: residual %g of %g", e, off, spread);
            }
            golden_pool_free(&pool);
            free(k.k);
        }
}
END_TEST

/* Keys of two directions, the second `weak` as strong, about a constant: how many scales are not
 * 0. */
static int live_directions(float constant, float strong, float weak) {
    struct keys k = keys_open(128, 16, 4);
    int live = 0;

    memset(k.k, 0, (size_t)PAGES * k.per_page * 4);
    for (uint32_t t = 0; t < PAGES * 16; t++) {
        k.k[t * 128 + 3] = constant;
        k.k[t * 128 + 40] = t & 1 ? strong : -strong;
        k.k[t * 128 + 90] = (t & 2 ? strong : -strong) * weak;
    }
    struct lk_pool_view pool = keys_build(&k);
    struct golden_summary s = golden_read(&pool, false);
    for (uint32_t i = 0; i < s.rank; i++)
        live += s.scales[i] != 0;
    golden_summary_free(&s);
    golden_pool_free(&pool);
    free(k.k);
    return live;
}

/* Directions up to a thousandth of the first are none; nor is any where keys differ by a
 * millionth. */
START_TEST(test_dead_directions) {
    for (int p = 0; p < PATHS; p++) {
        if (!open_path(p))
            continue;
        ck_assert_int_eq(live_directions(0, 1, 0.5f), 2);
        ck_assert_int_eq(live_directions(0, 1, 1.02e-3f), 2);
        ck_assert_int_eq(live_directions(0, 1, 0.98e-3f), 1);
        ck_assert_int_eq(live_directions(0, 1, 1e-5f), 1);
        ck_assert_int_eq(live_directions(1, 1.02e-6f, 0.5f), 2);
        ck_assert_int_eq(live_directions(1, 0.98e-6f, 0.5f), 0);
        ck_assert_int_eq(live_directions(1, 0, 0), 0);
    }
}
END_TEST

static bool same_record(const struct lk_pool_view *a, const struct lk_pool_view *b, uint64_t page) {
    return !memcmp(lk_page_coarse(a, 0, page, 0), lk_page_coarse(b, 0, page, 0),
                   a->layout.coarse_bytes) &&
           !memcmp(lk_page_fine(a, 0, page, 0), lk_page_fine(b, 0, page, 0), a->layout.fine_bytes);
}

/* Every scale finite, whatever the keys were. */
static void check_finite(const struct lk_pool_view *pool) {
    for (int super = 0; super < 2; super++) {
        struct golden_summary s = golden_read(pool, super);
        for (uint32_t j = 0; j < s.count; j++) {
            ck_assert(isfinite(s.centroid_scale[j]) && s.centroid_scale[j] >= 0);
            for (uint32_t i = 0; i < s.rank; i++)
                ck_assert(isfinite(s.scales[j * s.rank + i]) && s.scales[j * s.rank + i] >= 0);
        }
        golden_summary_free(&s);
    }
}

START_TEST(test_poison) {
    static const float poison[] = {NAN, INFINITY, -INFINITY};

    for (int p = 0; p < PATHS; p++) {
        if (!open_path(p))
            continue;
        struct keys k = keys_open(96, 16, 8);
        struct lk_pool_view clean = keys_build(&k);
        for (int n = 0; n < 3; n++)
            k.k[2 * k.per_page + (5 + n) * 96 + 31] = poison[n];
        for (uint32_t i = 0; i < k.per_page; i++) /* all of a page */
            k.k[5 * k.per_page + i] = poison[i % 3];
        struct lk_pool_view pool = keys_build(&k);
        for (uint64_t j = 0; j < PAGES; j++)
            ck_assert_msg(same_record(&clean, &pool, j) == (j != 2 && j != 5), "page %lu",
                          (unsigned long)j);
        check_finite(&pool);
        golden_pool_free(&clean);
        golden_pool_free(&pool);
        free(k.k);
    }
}
END_TEST

/* The largest and the smallest floats, alone and together. */
START_TEST(test_extremes) {
    static const float size[] = {3.4e38f, 1e38f, 1e-38f, 1e-45f, 1e30f, 1, 0, -3.4e38f};

    for (int p = 0; p < PATHS; p++)
        for (uint32_t d = 64; d <= 256; d *= 4) {
            if (!open_path(p))
                continue;
            struct keys k = keys_open(d, d == 64 ? 16 : 64, 8);
            for (uint32_t j = 0; j < PAGES; j++)
                for (uint32_t i = 0; i < k.per_page; i++)
                    k.k[j * k.per_page + i] *= 0.5f * size[(i % 7 == 0 ? j + 1 : j) % 8];
            struct lk_pool_view pool = keys_build(&k);
            check_finite(&pool);
            golden_pool_free(&pool);
            free(k.k);
        }
}
END_TEST

/* A record is a function of its keys: not of where it lies, what was there or what lies beside
 * it. */
START_TEST(test_determinism) {
    for (int p = 0; p < PATHS; p++) {
        if (!open_path(p))
            continue;
        struct keys k = keys_open(112, 8, 4);
        memcpy(k.k + 6 * k.per_page, k.k + 1 * k.per_page, k.per_page * 4);
        struct lk_pool_view pool = keys_build(&k), again = keys_build(&k);
        memset(again.coarse, 0, PAGES * again.layout.coarse_stride);
        memset(again.fine, 0, PAGES * again.layout.fine_stride);
        build_all(&again);
        for (uint64_t j = 0; j < PAGES; j++)
            ck_assert(same_record(&pool, &again, j));
        ck_assert(!memcmp(lk_page_coarse(&pool, 0, 1, 0), lk_page_coarse(&pool, 0, 6, 0),
                          pool.layout.coarse_bytes));
        ck_assert(!memcmp(lk_page_fine(&pool, 0, 1, 0), lk_page_fine(&pool, 0, 6, 0),
                          pool.layout.fine_bytes));
        golden_pool_free(&pool);
        golden_pool_free(&again);
        free(k.k);
    }
}
END_TEST

/* Several layers and heads: each record from its own keys. */
START_TEST(test_layers_and_heads) {
    struct keys k = keys_open(64, 8, 2);
    struct lk_geometry g = k.geometry;
    struct lk_pool_view one = golden_pool(&g, PAGES), pool;

    lk_cpu_open(LK_CPU_BEST);
    golden_fill(&one, (const uint8_t *)k.k, PAGES);
    build_all(&one);
    g.layers = 2;
    g.kv_heads = 3;
    pool = golden_pool(&g, 6 * 4); /* room for 2 layers of 4 pages with 3 heads */
    pool.pages = 4;
    for (uint32_t layer = 0; layer < 2; layer++)
        for (uint32_t page = 0; page < 4; page++)
            for (uint32_t head = 0; head < 3; head++) {
                uint32_t from = (layer * 3 + page + head) % PAGES;
                memcpy(lk_page_keys(&pool, layer, page, head), k.k + from * k.per_page,
                       k.per_page * 4);
                lk_cpu_build(&pool, layer, page, head, golden_scratch());
                ck_assert(!memcmp(lk_page_coarse(&pool, layer, page, head),
                                  lk_page_coarse(&one, 0, from, 0), one.layout.coarse_bytes));
            }
    golden_pool_free(&pool);
    golden_pool_free(&one);
    free(k.k);
}
END_TEST

/* ---- centroids ---- */

#define MANY 8192

/* Rotated mean of a page of k [8][128]. */
static void mean_of(const float *k, double *ret) {
    double mean[128] = {0};
    for (uint32_t i = 0; i < 8 * 128; i++)
        mean[i % 128] += (double)k[i] / 8;
    for (uint32_t c = 0; c < 128; c++) {
        ret[c] = 0;
        for (uint32_t i = 0; i < 128; i++)
            ret[c] += __builtin_popcount(c & i) % 2 ? -mean[i] : mean[i];
        ret[c] /= sqrt(128);
    }
}

/* -> codes of the pages that are not the mean over the scale, nearest. */
static uint32_t codes_off(const struct golden_summary *s, const double *mean) {
    uint32_t off = 0;
    for (uint32_t i = 0; i < MANY * 128; i++)
        off += s->centroid[i] != lrint(mean[i] / (double)s->centroid_scale[i / 128]);
    return off;
}

START_TEST(test_centroids) { /* float32 puts some on the wrong side of a tie */
    struct lk_geometry g = {1, 1, 1, 128, 8, 2, LK_FP32};
    struct lk_pool_view pool = golden_pool(&g, MANY);
    double *mean = malloc(MANY * 128 * sizeof *mean);
    uint32_t state = 1;

    for (uint32_t j = 0; j < MANY; j++) {
        float *k = (float *)(void *)lk_page_keys(&pool, 0, j, 0);
        for (uint32_t i = 0; i < 8 * 128; i++) {
            state = state * 1664525 + 1013904223;
            k[i] = (float)(int32_t)state * 0x1p-30f + (i % 128 == 5 ? 7 : 0);
        }
        mean_of(k, mean + (size_t)j * 128);
    }
    for (int p = 0; p < PATHS; p++) {
        if (!open_path(p))
            continue;
        build_all(&pool);
        struct golden_summary s = golden_read(&pool, false);
        uint32_t off = codes_off(&s, mean);
        ck_assert_uint_eq(off, 0);
        golden_summary_free(&s);
    }
    golden_pool_free(&pool);
    free(mean);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("build");
    TCase *tc = tcase_create("build");
    int cases = 0;

    while (golden_names[cases])
        cases++;
    tcase_add_loop_test(tc, test_golden, 0, cases);
    tcase_add_test(tc, test_repeated_eigenvalues);
    tcase_add_test(tc, test_near_eigenvalues);
    tcase_add_test(tc, test_dead_directions);
    tcase_add_test(tc, test_poison);
    tcase_add_test(tc, test_extremes);
    tcase_add_test(tc, test_determinism);
    tcase_add_test(tc, test_layers_and_heads);
    tcase_add_test(tc, test_centroids);
    tcase_set_timeout(tc, 60);
    suite_add_tcase(suite, tc);
    return run_suite(suite);
}
