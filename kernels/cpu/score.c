/* SPDX-License-Identifier: MIT */
/*
 * score.c - feeds pages of a row, a list or superpages to the chosen path, a batch at a time.
 *
 * A path is told the next batch with each, so that it can ask for its records in time.
 * Any thread. Does not know the newest page: it is scored exactly, elsewhere.
 */
#include "dispatch.h"
#include "score.h"

/* Records of one head, by page or quad. */
struct plane {
    const uint8_t *base;
    uint32_t stride;
};

struct feed {
    const struct lk_row *row;
    struct lk_score_shape shape;
    struct plane first, fine; /* fine: of the superpages' scan the same as first, and not read */
    const uint32_t *list;     /* or NULL: the range that begins at `begin` */
    uint64_t begin;
    uint32_t quad; /* log2 of an item's pages: 0, or 2 of a superpage */
    lk_score_fn *score;
};

static lk_score_fn *path(void) {
#ifdef __x86_64__
    switch (lk_cpu_path()) {
    case LK_CPU_AVX512:
        return lk_score_avx512;
    case LK_CPU_AVX2:
        return lk_score_avx2;
    default:
        break;
    }
#endif
    return lk_score_portable;
}

static struct feed feed_of(const struct lk_row *row, uint32_t head, uint32_t rank, bool super) {
    const struct lk_pool_view *pool = row->pool;
    const struct lk_geometry *g = &pool->geometry;
    const struct lk_layout *layout = &pool->layout;
    struct feed f = {.row = row, .quad = super ? 2 : 0, .score = path()};

    f.shape.first = super ? lk_record_super(g) : lk_record_coarse(g);
    f.shape.fine = lk_record_fine(g);
    f.shape.fine.directions = rank - LK_COARSE_RANK;
    f.shape.group = g->group;
    f.first =
        super ? (struct plane){lk_quad_super(pool, row->layer, 0, head), layout->super_stride}
              : (struct plane){lk_page_coarse(pool, row->layer, 0, head), layout->coarse_stride};
    f.fine = super ? f.first
                   : (struct plane){lk_page_fine(pool, row->layer, 0, head), layout->fine_stride};
    return f;
}

static void name_records(const struct feed *f, uint64_t from, uint32_t items,
                         struct lk_score_batch *batch) {
    const struct plane first = f->first, fine = f->fine;
    const uint32_t *list = f->list ? f->list + from : NULL;
    const uint32_t quad = f->quad, shift = f->row->table_shift, *table = f->row->table;
    const uint64_t begin = f->begin + from, mask = (UINT64_C(1) << shift) - 1;
    uint32_t i;

    for (i = 0; i < items; i++) { /* lk_row_page() of an item's first page */
        uint64_t j = (list ? list[i] : begin + i) << quad;
        uint64_t at = (((uint64_t)table[j >> shift] << shift) + (j & mask)) >> quad;
        batch->first[i] = first.base + at * first.stride;
        batch->fine[i] = fine.base + at * fine.stride;
    }
    for (; i < LK_SCORE_BATCH; i++) {
        batch->first[i] = batch->first[items - 1];
        batch->fine[i] = batch->fine[items - 1];
    }
}

/* Listed records lie apart: asking for the first line of each, all at once, has the addresses of
 * their pages looked up together, long before the rest is asked for page by page. */
static void touch(const struct lk_score_batch *batch) {
    for (uint32_t i = 0; i < LK_SCORE_BATCH; i++) {
        __builtin_prefetch(batch->first[i], 0, 2);
        __builtin_prefetch(batch->fine[i], 0, 2);
    }
}

static void put(const struct feed *f, uint64_t from, uint32_t items, const float *result,
                float *scores, uint64_t stride) {
    for (uint32_t g = 0; g < f->shape.group; g++) {
        const float *row = result + g * LK_SCORE_BATCH;
        float *to = scores + g * stride;
        if (f->list)
            for (uint32_t i = 0; i < items; i++)
                to[f->list[from + i]] = row[i];
        else if (items == LK_SCORE_BATCH)
            memcpy(to + f->begin + from, row, LK_SCORE_BATCH * sizeof(*row));
        else
            memcpy(to + f->begin + from, row, items * sizeof(*row));
    }
}

static uint32_t batch_at(uint64_t i, uint64_t count) {
    return count - i < LK_SCORE_BATCH ? (uint32_t)(count - i) : LK_SCORE_BATCH;
}

static void score(const struct feed *f, const struct lk_query *query, uint64_t count, float *scores,
                  uint64_t stride) {
    float result[LK_GROUP_MAX * LK_SCORE_BATCH];
    struct lk_score_batch batch[2];

    if (count)
        name_records(f, 0, batch_at(0, count), &batch[0]);
    for (uint64_t i = 0, n = 0; i < count; i += LK_SCORE_BATCH, n ^= 1) {
        uint32_t pages = batch_at(i, count);
        uint64_t next = i + pages;
        if (next < count)
            name_records(f, next, batch_at(next, count), &batch[n ^ 1]);
        if (next < count && f->list)
            touch(&batch[n ^ 1]);
        f->score(&f->shape, query, &batch[n], &batch[next < count ? n ^ 1 : n], pages, result);
        put(f, i, pages, result, scores, stride);
    }
}

void lk_cpu_score(const struct lk_row *row, uint32_t head, const struct lk_query *query,
                  uint32_t rank, uint64_t first, uint64_t count, float *scores, uint64_t stride) {
    struct feed f = feed_of(row, head, rank, false);
    f.begin = first;
    score(&f, query, count, scores, stride);
}

void lk_cpu_score_list(const struct lk_row *row, uint32_t head, const struct lk_query *query,
                       uint32_t rank, const uint32_t *pages, uint64_t count, float *scores,
                       uint64_t stride) {
    struct feed f = feed_of(row, head, rank, false);
    f.list = pages;
    score(&f, query, count, scores, stride);
}

void lk_cpu_score_super(const struct lk_row *row, uint32_t head, const struct lk_query *query,
                        uint64_t first, uint64_t count, float *scores, uint64_t stride) {
    struct feed f = feed_of(row, head, LK_COARSE_RANK, true);
    f.begin = first;
    score(&f, query, count, scores, stride);
}
