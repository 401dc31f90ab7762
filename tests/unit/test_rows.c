/* SPDX-License-Identifier: MIT */
/*
 * test_rows.c - whole rows: what a sparse row keeps, samples and reports against the definition of
 * DESIGN section 1, given the kernels' own scores; exact rows of one and several tokens; what must
 * not be read.
 */
#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "../common/run.h"
#include "../common/bed.h"

#define HEAD_DIM_MAX 256

static const enum lk_cpu_path paths[] = {LK_CPU_PORTABLE, LK_CPU_AVX2, LK_CPU_AVX512};

static bool open_path(int i) {
    return lk_cpu_open(paths[i]) == 0; /* -ENOTSUP: not on this machine */
}

static double log_sum(const double *x, uint64_t count, uint64_t step) {
    double top = (double)-INFINITY, sum = 0;

    for (uint64_t i = 0; i < count; i++)
        top = fmax(top, x[i * step]);
    if (top == (double)-INFINITY)
        return top;
    for (uint64_t i = 0; i < count; i++)
        sum += exp(x[i * step] - top);
    return top + log(sum);
}

/* ---- the reference of a sparse row and head ---- */

struct wanted {
    uint64_t pages;
    double *score;  /* [group][pages], last estimates */
    double *share;  /* [pages] */
    uint8_t *last;  /* [pages] competes for being kept */
    uint8_t *kept;  /* [pages] */
    double *weight; /* [pages] of the sample; 0: not in it */
};

static void shares(struct wanted *w, uint32_t group) {
    memset(w->share, 0, w->pages * sizeof *w->share);
    for (uint32_t g = 0; g < group; g++) {
        double all = log_sum(w->score + g * w->pages, w->pages, 1);
        for (uint64_t j = 0; j < w->pages; j++)
            w->share[j] += exp(w->score[g * w->pages + j] - all) / group;
    }
    for (uint64_t j = 0; j < w->pages; j++)
        w->share[j] = w->share[j] < 1e-30 ? 0 : w->share[j];
}

/* The best `need` of key[0..count), lower index first among equals, into in. */
static void mark_best(const double *key, uint64_t count, uint64_t need, uint8_t *in) {
    memset(in, 0, count);
    for (uint64_t n = 0; n < need && n < count; n++) {
        uint64_t best = count;
        for (uint64_t j = 0; j < count; j++)
            if (!in[j] && (best == count || key[j] > key[best]))
                best = j;
        in[best] = 1;
    }
}

static void to_double(const float *from, double *to, uint64_t count) {
    for (uint64_t i = 0; i < count; i++)
        to[i] = (double)from[i];
}

static void score_pages(const struct bed *bed, uint32_t head, struct wanted *w) {
    const struct lk_row *row = &bed->row;
    const struct lk_geometry *g = &bed->pool.geometry;
    uint64_t P = w->pages, full = P - 1, quads = full / 4, N = row->budget_pages;
    struct lk_query *query = aligned_alloc(64, lk_cpu_query_bytes(g));
    float *s = calloc(g->group * P, 4);
    double *unused = calloc(g->head_dim, 8), *only = calloc(P, 8);
    uint8_t *in = calloc(P, 1);

    lk_cpu_prepare(row, head, query);
    only[full] = 1;
    for (uint32_t i = 0; i < g->group; i++)
        w->score[i * P + full] = bed_attend(bed, 0, head * g->group + i, row->length, only, unused);
    lk_cpu_score(row, head, query, row->scan == LK_FULL ? g->rank : LK_COARSE_RANK, 0, full, s, P);
    for (uint32_t i = 0; i < g->group; i++)
        to_double(s + i * P, w->score + i * P, full);
    memset(w->last, 1, P);
    if (row->scan == LK_NESTED) {
        shares(w, g->group);
        mark_best(w->share, full, 8 * N, w->last);
    } else if (row->scan == LK_TREE) {
        double *quad = calloc(quads + 1, 8);
        lk_cpu_score_super(row, head, query, 0, quads, s, P);
        for (uint32_t i = 0; i < g->group; i++)
            for (uint64_t j = 0; j < full; j++)
                w->score[i * P + j] =
                    j / 4 < quads ? (double)s[i * P + j / 4] - log(4) : (double)-INFINITY;
        shares(w, g->group);
        for (uint64_t j = 0; j < 4 * quads; j++)
            quad[j / 4] += w->share[j];
        mark_best(quad, quads, 16 * N / 4, in);
        for (uint64_t j = 0; j < full; j++)
            w->last[j] = j / 4 < quads ? in[j / 4] : 1;
        free(quad);
    }
    if (row->scan == LK_NESTED || row->scan == LK_TREE) {
        lk_cpu_score(row, head, query, g->rank, 0, full, s, P);
        for (uint32_t i = 0; i < g->group; i++)
            for (uint64_t j = 0; j < full; j++)
                if (w->last[j])
                    w->score[i * P + j] = (double)s[i * P + j];
    }
    shares(w, g->group);
    free(query);
    free(s);
    free(unused);
    free(only);
    free(in);
}

static void keep_pages(const struct lk_row *row, struct wanted *w, uint64_t k) {
    uint64_t count = 0, P = w->pages;
    double sum = 0;
#define KEEP(j)                                                                                    \
    do {                                                                                           \
        if (count < k && !w->kept[j]) {                                                            \
            w->kept[j] = 1;                                                                        \
            sum += w->share[j];                                                                    \
            count++;                                                                               \
        }                                                                                          \
    } while (0)
    KEEP(P - 1);
    for (uint64_t j = 0; j < row->sink_pages && count < k; j++)
        KEEP(j);
    for (uint64_t j = 1; j < row->recent_pages && count < k; j++)
        KEEP(P - 1 - j);
    while (count < k && !(row->mass_target > 0 && count >= 4 && sum >= (double)row->mass_target)) {
        uint64_t best = P;
        for (uint64_t j = 0; j < P; j++)
            if (w->last[j] && !w->kept[j] && (best == P || w->share[j] > w->share[best]))
                best = j;
        if (best == P)
            break;
        KEEP(best);
    }
#undef KEEP
}

static void sample_pages(struct wanted *w, uint64_t m) {
    uint64_t L = 0, F = 0, met = 0;
    unsigned __int128 run = 0, T;

    for (uint64_t j = 0; j < w->pages; j++)
        if (!w->kept[j]) {
            L++;
            F += (uint64_t)(w->share[j] * 0x1p32) + 1;
        }
    T = (unsigned __int128)20 * L * F;
    for (uint64_t j = 0; j < w->pages && m; j++) {
        if (w->kept[j])
            continue;
        unsigned __int128 W =
            (unsigned __int128)19 * L * ((uint64_t)(w->share[j] * 0x1p32) + 1) + F;
        uint64_t hits = 0;
        run += W;
        for (; met < m && met * (T / m) + T / (2 * m) < run; met++)
            hits++;
        w->weight[j] = L <= m ? 1 : (double)hits * ((double)T / ((double)m * (double)W));
    }
}

/* What the row reports of its head, against the definition. */
static void check_head(struct bed *bed, uint32_t head) {
    const struct lk_geometry *g = &bed->pool.geometry;
    struct lk_row *row = &bed->row;
    uint64_t P = (row->length + g->page_tokens - 1) / g->page_tokens, N = row->budget_pages;
    uint64_t m = row->sampled < (N > 2 ? N - 2 : 0) ? row->sampled : N > 2 ? N - 2 : 0;
    struct wanted w = {.pages = P,
                       .score = calloc(g->group * P, 8),
                       .share = calloc(P, 8),
                       .last = calloc(P, 1),
                       .kept = calloc(P, 1),
                       .weight = calloc(P, 8)};
    const struct lk_head_out *r = &bed->result[head];
    const struct lk_page_weight *list = bed->list + head * row->list_pages;
    double *all = calloc(P, 8), *kept = calloc(P, 8), want[HEAD_DIM_MAX];
    uint64_t same = 0, wanted = 0, kept_same = 0, kept_wanted = 0;

    score_pages(bed, head, &w);
    keep_pages(row, &w, N - m);
    sample_pages(&w, m);
    ck_assert_uint_le(r->kept + r->sampled, N);
    for (uint32_t i = 0; i < r->kept + r->sampled; i++) {
        uint32_t j = list[i].page;
        ck_assert(j < P && (i == 0 || list[i - 1].page < j));
        all[j] = (double)list[i].weight;
        kept[j] = w.kept[j];
        kept_same += w.kept[j] && list[i].weight == 1;
        if (w.weight[j] > 0 && fabs(all[j] / w.weight[j] - 1) < 1e-3)
            same++;
    }
    for (uint64_t j = 0; j < P; j++) {
        wanted += w.weight[j] > 0;
        kept_wanted += w.kept[j];
    }
    ck_assert_uint_eq(kept_same, r->kept);
    ck_assert_uint_eq(kept_wanted, r->kept);
    ck_assert_uint_ge(20 * same,
                      19 * wanted); /* a pointer beside an edge may fall on either page */
    double mass = 0;
    for (uint32_t i = 0; i < g->group; i++) {
        uint32_t h = head * g->group + i;
        double Lk = bed_attend(bed, 0, h, row->length, kept, want);
        double L = bed_attend(bed, 0, h, row->length, all, want), rest[4096];
        uint64_t left = 0;
        for (uint32_t x = 0; x < g->head_dim; x++)
            ck_assert_double_lt(fabs((double)bed->out[h * g->head_dim + x] - want[x]), 3e-5);
        ck_assert_double_lt(fabs((double)bed->lse[h] - L), 3e-5);
        for (uint64_t j = 0; j < P; j++)
            if (!w.kept[j])
                rest[left++] = w.score[i * P + j];
        mass += m ? exp(Lk - L) : 1 / (1 + exp(log_sum(rest, left, 1) - Lk));
    }
    ck_assert_double_lt(fabs((double)r->mass - mass / g->group), 1e-4);
    ck_assert_uint_eq(r->flags, m ? 0 : LK_OUT_ESTIMATED);
    free(w.score);
    free(w.share);
    free(w.last);
    free(w.kept);
    free(w.weight);
    free(all);
    free(kept);
}

static void check_sparse(struct bed *bed) {
    const struct lk_geometry *g = &bed->pool.geometry;
    size_t floats = (size_t)g->kv_heads * g->group * g->head_dim;
    float *again = malloc(floats * 4);

    bed->row.exact = 0;
    bed->row.budget_tokens = (uint64_t)bed->row.budget_pages * g->page_tokens;
    bed_run(&bed->row, 0xff);
    memcpy(again, bed->out, floats * 4);
    bed_run(&bed->row, 0); /* nothing depends on what the workspace held */
    ck_assert_mem_eq(again, bed->out, floats * 4);
    for (uint32_t h = 0; h < g->kv_heads; h++)
        check_head(bed, h);
    free(again);
}

START_TEST(sparse_rows) {
    static const uint32_t scans[] = {LK_FULL, LK_COARSE, LK_NESTED, LK_TREE};
    static const struct {
        uint32_t budget, sampled, sink, recent;
        float mass;
    } how[] = {{1, 9, 1, 1, 0},  {2, 9, 1, 1, 0},    {3, 1, 1, 1, 0},    {4, 0, 1, 1, 0},
               {8, 0, 1, 1, 0},  {8, 4, 1, 1, 0},    {8, 100, 1, 1, 0},  {16, 0, 3, 4, 0},
               {16, 3, 0, 0, 0}, {16, 0, 1, 1, .5f}, {16, 4, 1, 2, .9f}, {16, 0, 40, 40, 0},
               {64, 32, 1, 1, 0}};
    if (!open_path(_i))
        return;
    struct lk_geometry g = {2, 2, 3, 64, 8, 8, LK_BF16};
    struct bed *bed = bed_open(&g, 8 * 301 + 5, 1);
    for (int s = 0; s < 4; s++)
        for (size_t i = 0; i < sizeof how / sizeof *how; i++) {
            bed->row.scan = scans[s];
            bed->row.budget_pages = how[i].budget;
            bed->row.sampled = how[i].sampled;
            bed->row.sink_pages = how[i].sink;
            bed->row.recent_pages = how[i].recent;
            bed->row.mass_target = how[i].mass;
            check_sparse(bed);
        }
    bed_close(bed);
}
END_TEST

START_TEST(sparse_geometries) {
    static const struct lk_geometry of[] = {{1, 1, 1, 128, 16, 8, LK_FP16},
                                            {1, 2, 4, 80, 16, 4, LK_BF16},
                                            {1, 1, 9, 64, 8, 8, LK_BF16},
                                            {1, 3, 2, 96, 32, 16, LK_FP32},
                                            {1, 1, 5, 192, 64, 2, LK_BF16}};
    static const uint32_t scans[] = {LK_FULL, LK_NESTED, LK_TREE};
    if (!open_path(_i))
        return;
    for (size_t i = 0; i < sizeof of / sizeof *of; i++)
        for (int s = 0; s < 3; s++) {
            struct bed *bed =
                bed_open(&of[i], of[i].page_tokens * 85, 1); /* a multiple of the page */
            bed->row.scan = scans[s];
            bed->row.budget_pages = 5;
            bed->row.sampled = s;
            check_sparse(bed);
            bed_close(bed);
        }
}
END_TEST

START_TEST(sparse_lengths) { /* superpages come and go at the end */
    if (!open_path(_i))
        return;
    struct lk_geometry g = {1, 1, 2, 64, 8, 8, LK_BF16};
    for (uint64_t n = 8 * 40; n <= 8 * 46; n += 3) {
        struct bed *bed = bed_open(&g, n, 2);
        bed->row.scan = LK_TREE;
        bed->row.budget_pages = 2;
        check_sparse(bed);
        bed_close(bed);
    }
}
END_TEST

START_TEST(equal_keys) { /* all shares equal: the lower page wins */
    if (!open_path(_i))
        return;
    struct lk_geometry g = {1, 1, 2, 64, 8, 4, LK_FP32};
    struct bed *bed = bed_open(&g, 8 * 50, 0);
    bed->row.exact = 0;
    bed->row.budget_pages = 6;
    bed->row.budget_tokens = 48;
    bed_run(&bed->row, 0xff);
    ck_assert_uint_eq(bed->result[0].kept, 6);
    for (uint32_t i = 0; i < 5; i++)
        ck_assert_uint_eq(bed->list[i].page, i);
    ck_assert_uint_eq(bed->list[5].page, 49);
    bed_close(bed);
}
END_TEST

/* ---- exact rows ---- */

START_TEST(budget_and_length) { /* larger, equal, one page less */
    if (!open_path(_i))
        return;
    struct lk_geometry g = {1, 2, 2, 64, 16, 4, LK_BF16};
    struct bed *bed = bed_open(&g, 16 * 20, 1);
    for (uint32_t budget = 19; budget <= 21; budget++) {
        bed->row.exact = 0;
        bed->row.budget_pages = budget;
        bed->row.budget_tokens = budget * 16;
        bed_run(&bed->row, 0xff);
        bool exact = budget >= 20;
        ck_assert_uint_eq(bed->result[1].flags, exact ? LK_OUT_EXACT : LK_OUT_ESTIMATED);
        ck_assert_uint_eq(bed->result[1].kept, exact ? 20 : 19);
        ck_assert_uint_eq(bed->result[1].sampled, 0);
        ck_assert(!exact || bed->result[1].mass == 1);
        ck_assert_uint_eq(bed->row.attend_bytes, (exact ? 320 : 304) * 2 * 2 * 64 * 2);
        for (uint32_t i = 0; exact && i < 20; i++) {
            ck_assert_uint_eq(bed->list[20 + i].page, i);
            ck_assert_float_eq(bed->list[20 + i].weight, 1);
        }
    }
    bed->row.exact = 1; /* below dense_below */
    bed->row.budget_pages = 2;
    bed->row.budget_tokens = 32;
    bed_run(&bed->row, 0xff);
    ck_assert_uint_eq(bed->result[0].flags, LK_OUT_EXACT);
    ck_assert_uint_eq(bed->row.score_bytes + bed->row.select_bytes, 0);
    bed_close(bed);
}
END_TEST

static void check_tokens(struct bed *bed, uint32_t tokens, double tolerance) {
    const struct lk_geometry *g = &bed->pool.geometry;
    uint32_t heads = g->kv_heads * g->group;
    double want[HEAD_DIM_MAX];

    bed->row.tokens = tokens;
    bed_run(&bed->row, 0xff);
    for (uint32_t t = 0; t < tokens; t += 1 + tokens / 20)
        for (uint32_t h = 0; h < heads; h++) {
            uint64_t sight = bed->row.length + t + 1 - tokens;
            double lse = bed_attend(bed, t, h, sight, NULL, want);
            const float *out = bed->out + ((size_t)t * heads + h) * g->head_dim;
            ck_assert_double_lt(fabs((double)bed->lse[(size_t)t * heads + h] - lse), tolerance);
            for (uint32_t x = 0; x < g->head_dim; x++)
                ck_assert_double_lt(fabs((double)out[x] - want[x]), tolerance);
        }
    ck_assert_uint_eq(bed->result[0].flags, LK_OUT_EXACT);
}

START_TEST(rows_of_several_tokens) {
    static const uint32_t tokens[] = {1, 2, 5, 17, 64, 70};
    static const uint32_t groups[] = {1, 3, 4, 7, 32};
    if (!open_path(_i))
        return;
    for (int i = 0; i < 5; i++) {
        struct lk_geometry g = {1, 2, groups[i], 64, 16, 2, LK_BF16};
        struct bed *bed = bed_open(&g, 233, 1);
        for (int t = 0; t < 6; t++)
            check_tokens(bed, tokens[t], 3e-5);
        check_tokens(bed, 233, 3e-5); /* a whole sequence at once */
        bed_close(bed);
    }
}
END_TEST

START_TEST(several_tokens_of_a_long_row) { /* tiles and spans both */
    if (!open_path(_i))
        return;
    struct lk_geometry g = {1, 2, 4, 128, 16, 2, LK_BF16};
    struct bed *bed = bed_open(&g, 3001, 1);
    check_tokens(bed, 4, 3e-5);
    check_tokens(bed, 40, 3e-5);
    bed_close(bed);
}
END_TEST

START_TEST(
    later_tokens_do_not_reach_back) { /* a bad value spoils the queries that see it, no other */
    if (!open_path(_i))
        return;
    struct lk_geometry g = {1, 1, 2, 64, 16, 2, LK_BF16};
    struct bed *bed = bed_open(&g, 100, 1);
    bed_set(bed, 1, 90, 0, 5, (double)NAN); /* V alone */
    bed_set(bed, 0, 95, 0, 5, (double)NAN);
    bed->row.tokens = 40; /* queries of tokens 60..99 */
    bed_run(&bed->row, 0xff);
    for (uint32_t t = 0; t < 40; t++) {
        float x = bed->out[(size_t)t * 128 + 5];
        ck_assert((x != x) == (t >= 30));
        x = bed->out[(size_t)t * 128 + 6];
        ck_assert((x != x) == (t >= 35));
    }
    bed_close(bed);
}
END_TEST

START_TEST(rows_longer_than_their_tokens) { /* more queries than tokens: the first see nothing */
    if (!open_path(_i))
        return;
    struct lk_geometry g = {1, 1, 1, 64, 16, 2, LK_BF16};
    struct bed *bed = bed_open(&g, 8, 1);
    bed->row.length = 3;
    bed->row.tokens = 5;
    bed_run(&bed->row, 0xff);
    for (int t = 0; t < 2; t++) {
        ck_assert(bed->lse[t] == -INFINITY);
        for (int x = 0; x < 64; x++)
            ck_assert_float_eq(bed->out[t * 64 + x], 0);
    }
    ck_assert(isfinite(bed->lse[2]));
    bed_close(bed);
}
END_TEST

START_TEST(
    all_of_the_mass) { /* of shares of which one is nearly 1, and the rest not nearly 1e-16 */
    if (!open_path(_i))
        return;
    struct lk_geometry g = {1, 2, 1, 64, 16, 8, LK_FP32};
    for (int sampled = 0; sampled <= 2; sampled += 2) {
        struct bed *bed = bed_open(&g, 16 * 60 + 5, 20);
        bed->row.scan = LK_FULL;
        bed->row.budget_pages = 12;
        bed->row.sampled = (uint32_t)sampled;
        bed->row.mass_target = 1;
        check_sparse(bed);
        bed_close(bed);
    }
}
END_TEST

/* ---- estimates that are far off ---- */

START_TEST(
    a_kept_page_estimated_much_too_high) { /* what is not kept counts beside it all the same */
    static const uint32_t scans[] = {LK_FULL, LK_COARSE, LK_NESTED, LK_TREE};
    if (!open_path(_i))
        return;
    struct lk_geometry g = {1, 2, 4, 64, 8, 8, LK_BF16};
    static const uint32_t hidden[] = {5, 23, 40};
    for (int s = 0; s < 4; s++) {
        struct bed *bed = bed_open(&g, 8 * 300 + 3, 1);
        for (uint32_t i = 0; i < 3 * g.kv_heads * g.group; i++) { /* channels no query sees */
            uint32_t at = i / 3 * g.head_dim + hidden[i % 3];
            bed->dq[at] = 0;
            bed_store(g.dtype, bed->q + 2 * at, 0);
        }
        for (uint32_t i = 0; i < 18; i++)
            bed_set(bed, 0, 100 + 300 * (i / 3), i / 3 % 2, hidden[i % 3],
                    bed_round(g.dtype, 20000.0 / (1 + i % 3)));
        bed_build(bed);
        bed->row.scan = scans[s];
        bed->row.budget_pages = 8;
        bed->row.sampled = 0;
        check_sparse(bed);
        bed_close(bed);
    }
}
END_TEST

/* ---- what must not be read ---- */

/* Overwrite a page's keys, values or both with NaN; summaries stay. */
static void poison_page(struct bed *bed, uint64_t page, bool values_only) {
    const struct lk_geometry *g = &bed->pool.geometry;
    uint64_t bytes = bed->pool.layout.head_bytes / 2, at = lk_row_page(&bed->row, page);

    for (uint32_t h = 0; h < g->kv_heads; h++) {
        memset(lk_page_values(&bed->pool, bed->row.layer, at, h), 0xff, bytes);
        if (!values_only)
            memset(lk_page_keys(&bed->pool, bed->row.layer, at, h), 0xff, bytes);
    }
}

START_TEST(unselected_pages_are_not_read) {
    static const uint32_t scans[] = {LK_FULL, LK_COARSE, LK_NESTED, LK_TREE};
    if (!open_path(_i))
        return;
    for (int s = 0; s < 4; s++) {
        struct lk_geometry g = {1, 1, 4, 64, 16, 8, LK_BF16};
        struct bed *bed = bed_open(&g, 16 * 200 + 3, 1);
        float before[256];
        uint8_t used[201] = {0};
        bed->row.exact = 0;
        bed->row.scan = scans[s];
        bed->row.budget_pages = 10;
        bed->row.budget_tokens = 160;
        bed->row.sampled = 5;
        bed_run(&bed->row, 0xff);
        memcpy(before, bed->out, sizeof before);
        for (uint32_t i = 0; i < bed->result[0].kept + bed->result[0].sampled; i++)
            used[bed->list[i].page] = 1;
        for (uint32_t j = 0; j < 201; j++)
            if (!used[j])
                poison_page(bed, j, j % 2);
        bed_run(&bed->row, 0);
        ck_assert_mem_eq(before, bed->out, sizeof before);
        bed_close(bed);
    }
}
END_TEST

START_TEST(bad_keys_in_a_sparse_row) { /* the loops end, indices stay in range, other heads stay */
    static const uint32_t scans[] = {LK_FULL, LK_COARSE, LK_NESTED, LK_TREE};
    static const double bad[] = {(double)NAN, (double)INFINITY, (double)-INFINITY, 3e38};
    if (!open_path(_i))
        return;
    struct lk_geometry g = {1, 2, 2, 64, 8, 8, LK_BF16};
    for (int s = 0; s < 4; s++)
        for (int b = 0; b < 4; b++) {
            struct bed *bed = bed_open(&g, 8 * 300, 1);
            float before[128];
            bed->row.exact = 0;
            bed->row.scan = scans[s];
            bed->row.budget_pages = 12;
            bed->row.budget_tokens = 96;
            bed->row.sampled = 4;
            bed->row.mass_target = b % 2 ? 0.9f : 0;
            bed_run(&bed->row, 0xff);
            memcpy(before, bed->out + 128, sizeof before);
            for (uint32_t c = 0; c < 64; c++)
                bed_set(bed, 0, 1000 + c % 2, 0, c, bad[b]);
            bed_build(bed);
            bed_run(&bed->row, 0xff);
            ck_assert_mem_eq(before, bed->out + 128, sizeof before);
            uint32_t count = bed->result[0].kept + bed->result[0].sampled;
            ck_assert_uint_le(count, 12);
            for (uint32_t i = 0; i < count; i++)
                ck_assert(bed->list[i].page < 300 &&
                          (i == 0 || bed->list[i - 1].page < bed->list[i].page));
            ck_assert(bed->result[0].mass >= 0 && bed->result[0].mass <= 1.0001f);
            bed_close(bed);
        }
}
END_TEST

START_TEST(bad_query) {
    if (!open_path(_i))
        return;
    struct lk_geometry g = {1, 2, 2, 64, 8, 8, LK_BF16};
    struct bed *bed = bed_open(&g, 8 * 300, 1);
    float before[128];
    bed->row.exact = 0;
    bed->row.budget_pages = 12;
    bed->row.budget_tokens = 96;
    bed->row.sampled = 4;
    bed_run(&bed->row, 0xff);
    memcpy(before, bed->out + 128, sizeof before);
    bed_store(LK_BF16, bed->q + 2 * 7, (double)NAN);
    bed_store(LK_BF16, bed->q + 2 * 80, (double)INFINITY);
    bed_run(&bed->row, 0xff);
    ck_assert_mem_eq(before, bed->out + 128, sizeof before);
    ck_assert(bed->out[0] != bed->out[0]);
    ck_assert(bed->result[0].mass >= 0);
    bed_close(bed);
}
END_TEST

START_TEST(short_list) { /* no more entries than there is room; the count is true */
    struct lk_geometry g = {1, 2, 2, 64, 8, 8, LK_BF16};
    struct bed *bed = bed_open(&g, 8 * 60, 1);
    struct lk_page_weight list[8];
    memset(list, 0xee, sizeof list);
    bed->row.list = list;
    bed->row.list_pages = 3;
    for (uint32_t exact = 0; exact < 2; exact++) {
        bed->row.exact = exact;
        bed->row.budget_pages = 12;
        bed->row.budget_tokens = 96;
        bed_run(&bed->row, 0xff);
        ck_assert_uint_eq(bed->result[1].kept, exact ? 60 : 12);
        ck_assert_uint_eq(list[5].weight == 1, 1);
        ck_assert_uint_eq(list[6].page, 0xeeeeeeee);
    }
    bed->row.list = NULL;
    bed->row.result = NULL;
    bed->row.lse = NULL;
    bed->row.exact = 0;
    bed_run(&bed->row, 0xff);
    bed_close(bed);
}
END_TEST

/* ---- the store ---- */

START_TEST(
    offsets_beyond_32_bits) { /* a pool of 20 GiB of addresses, of which a few pages are touched */
    struct lk_geometry g = {1, 8, 1, 256, 64, 2, LK_BF16};
    struct bed *bed = bed_open(&g, 130, 1);
    struct lk_pool_view *pool = &bed->pool;
    uint64_t pages = 40000, kv = pages * pool->layout.page_bytes;
    uint64_t coarse = pages * g.kv_heads * pool->layout.coarse_stride;
    uint64_t super = pages / 4 * g.kv_heads * pool->layout.super_stride;
    size_t bytes = kv + coarse + super;
    uint8_t *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return; /* no room for the addresses here */
    *pool = (struct lk_pool_view){.geometry = g, .layout = pool->layout, .pages = pages};
    pool->kv = at;
    pool->coarse = at + kv;
    pool->fine = pool->super = at + kv + coarse;
    uint32_t far[] = {39001, 16385, 39999};
    bed->row.table = far;
    bed->row.table_shift = 0;
    ck_assert_uint_gt(far[1] * (pool->layout.page_bytes / 2), UINT64_C(1) << 32);
    bed->row.append = 130;
    for (uint32_t h = 0; h < 8; h++)
        lk_cpu_append(&bed->row, h);
    bed->row.append = 0;
    double want[HEAD_DIM_MAX];
    bed_run(&bed->row, 0xff);
    for (uint32_t h = 0; h < 8; h++) {
        bed_attend(bed, 0, h, 130, NULL, want);
        for (uint32_t x = 0; x < 256; x++)
            ck_assert_double_lt(fabs((double)bed->out[h * 256 + x] - want[x]), 3e-5);
    }
    munmap(at, bytes);
    bed_close(bed);
}
END_TEST

START_TEST(write_and_copy) {
    struct lk_geometry g = {2, 2, 1, 64, 8, 8, LK_FP16};
    struct bed *bed = bed_open(&g, 8 * 12, 1);
    struct lk_pool_view *pool = &bed->pool;
    uint64_t a = lk_row_page(&bed->row, 4), spare = 4 * (uint64_t)bed->table[3];
    uint64_t slots[] = {spare * 8 + 7, UINT64_MAX, spare * 8, (spare + 1) * 8 + 3};
    struct lk_write write = {pool, 1, 4, bed->k, bed->v, slots};
    for (uint32_t h = 0; h < 2; h++) {
        const uint8_t *untouched = lk_page_keys(pool, 1, spare, h) + 128;
        lk_cpu_write(&write, h);
        ck_assert_mem_eq(lk_page_keys(pool, 1, spare, h) + 7 * 128, bed->k + h * 128, 128);
        ck_assert_mem_eq(lk_page_values(pool, 1, spare, h), bed->v + (4 + h) * 128, 128);
        ck_assert_mem_eq(lk_page_keys(pool, 1, spare + 1, h) + 3 * 128, bed->k + (6 + h) * 128,
                         128);
        ck_assert_uint_eq(*untouched, 0xff);
        struct lk_copy copy = {pool, 1, 1, a, spare};
        lk_cpu_copy(&copy, h);
        ck_assert_mem_eq(lk_page_keys(pool, 1, spare, h), lk_page_keys(pool, 1, a, h),
                         pool->layout.head_bytes);
        ck_assert_mem_eq(lk_page_coarse(pool, 1, spare, h), lk_page_coarse(pool, 1, a, h),
                         pool->layout.coarse_stride);
        ck_assert_mem_eq(lk_page_fine(pool, 1, spare, h), lk_page_fine(pool, 1, a, h),
                         pool->layout.fine_stride);
        ck_assert_mem_eq(lk_quad_super(pool, 1, spare / 4, h), lk_quad_super(pool, 1, a / 4, h),
                         pool->layout.super_stride);
    }
    bed_close(bed);
}
END_TEST

START_TEST(append_only_rows) {
    struct lk_geometry g = {1, 2, 1, 64, 8, 8, LK_FP16};
    struct bed *bed = bed_open(&g, 20, 1);
    bed->row.tokens = 0;
    bed->row.out = NULL;
    bed->row.result = NULL;
    bed_run(&bed->row, 0xff);
    ck_assert_uint_eq(lk_cpu_row_workspace_bytes(&bed->row), 0);
    bed_close(bed);
}
END_TEST

static Suite *make_suite(void) {
    Suite *suite = suite_create("rows");
    TCase *all = tcase_create("all paths");

    tcase_set_timeout(all, 240);
    tcase_add_loop_test(all, sparse_rows, 0, 3);
    tcase_add_loop_test(all, sparse_geometries, 0, 3);
    tcase_add_loop_test(all, sparse_lengths, 0, 3);
    tcase_add_loop_test(all, equal_keys, 0, 3);
    tcase_add_loop_test(all, budget_and_length, 0, 3);
    tcase_add_loop_test(all, rows_of_several_tokens, 0, 3);
    tcase_add_loop_test(all, several_tokens_of_a_long_row, 0, 3);
    tcase_add_loop_test(all, later_tokens_do_not_reach_back, 0, 3);
    tcase_add_loop_test(all, rows_longer_than_their_tokens, 0, 3);
    tcase_add_loop_test(all, all_of_the_mass, 0, 3);
    tcase_add_loop_test(all, a_kept_page_estimated_much_too_high, 0, 3);
    tcase_add_loop_test(all, unselected_pages_are_not_read, 0, 3);
    tcase_add_loop_test(all, bad_keys_in_a_sparse_row, 0, 3);
    tcase_add_loop_test(all, bad_query, 0, 3);
    tcase_add_test(all, short_list);
    tcase_add_test(all, offsets_beyond_32_bits);
    tcase_add_test(all, write_and_copy);
    tcase_add_test(all, append_only_rows);
    suite_add_tcase(suite, all);
    return suite;
}

int main(void) {
    return run_suite(make_suite());
}
