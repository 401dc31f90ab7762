/* SPDX-License-Identifier: MIT */
/*
 * plan.c - how a row is cut into tasks and where its intermediate values lie. Host only, no device.
 *
 * Idea: every count here is a function of the row and the geometry, so that a row's sums have one
 * order wherever it runs; the batch only says at which task each row starts.
 *
 * Any thread; allocates nothing.
 */
#include "cuda.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "record.h"
#include "state.h"

#define TILE_UNITS  8          /* pages or superpages a warp scores together */
#define TILE_TOKENS 16         /* rows of a tensor-core tile */
#define BLOCK_WARPS 8          /* of attend */
#define CHUNKS      (132 * 12) /* of a row: one a scoring warp (scan.cu) of 132 multiprocessors */
#define CHUNKS_LOW  (132 * 16) /* at rank 2 */
#define SLICES      128 /* of all heads of a row: about one a multiprocessor of a large device */
#define SLICE_TILES 16  /* at least, if there are several */
#define REST_PAGES  128 /* that a warp sums up at once */
#define FETCH_MOST  (24u << 20) /* bytes of pages worth fetching to L2 ahead of attend */

static uint32_t div_up(uint32_t a, uint32_t b) {
    return (a + b - 1) / b;
}

static uint32_t clamp(uint32_t x, uint32_t low, uint32_t high) {
    return x < low ? low : x > high ? high : x;
}

static uint32_t least(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

void lk_cuda_layout(const struct lk_geometry *geometry, struct lk_layout *ret) {
    struct lk_record coarse = lk_record_coarse(geometry), fine = lk_record_fine(geometry),
                     super = lk_record_super(geometry);

    memset(ret, 0, sizeof *ret);
    ret->element_bytes = 2;
    ret->coarse_bytes = coarse.bytes;
    ret->fine_bytes = fine.bytes;
    ret->super_bytes = super.bytes;
    ret->coarse_stride = coarse.stride;
    ret->fine_stride = fine.stride;
    ret->super_stride = super.stride;
    ret->head_bytes = (uint64_t)2 * geometry->page_tokens * geometry->head_dim * 2;
    ret->page_bytes = geometry->kv_heads * ret->head_bytes;
}

/* First pass: at most `cap` chunks a head, so that select can reduce their sums in one go. */
static void plan_scan(const struct lk_geometry *g, struct lk_cuda_row *r) {
    bool low = r->scan != LK_FULL || g->rank == LK_COARSE_RANK;
    uint32_t cap = clamp((low ? CHUNKS_LOW : CHUNKS) / g->kv_heads, 64, 1024);

    if (!r->scan)
        return;
    r->units = r->scan == LK_TREE ? r->complete / LK_QUAD_PAGES : r->complete;
    r->chunk_units = TILE_UNITS * clamp(div_up(div_up(r->units, TILE_UNITS), cap), 1, UINT32_MAX);
    r->chunks = div_up(r->units, r->chunk_units);
    r->chunks_inverse = lk_cuda_inverse(r->chunks);
    r->segment_pages = 128;
    r->segments = div_up(r->pages, r->segment_pages);
    if (r->scan != LK_NESTED && r->scan != LK_TREE)
        return;
    if (r->scan == LK_TREE) {
        r->prune_units = least(r->units, LK_TREE_BUDGETS * r->budget_pages / LK_QUAD_PAGES);
        r->list_max = LK_QUAD_PAGES * r->prune_units + r->complete % LK_QUAD_PAGES;
    } else {
        r->prune_units = least(r->units, LK_NESTED_BUDGETS * r->budget_pages);
        r->list_max = r->prune_units;
    }
    r->rescan_tiles = div_up(r->list_max, TILE_UNITS);
    r->rest_pages = REST_PAGES * clamp(div_up(r->complete, cap * REST_PAGES), 1, UINT32_MAX);
    r->rest_chunks = div_up(r->complete, r->rest_pages);
    r->tiles_inverse = lk_cuda_inverse(r->rescan_tiles);
    r->rest_inverse = lk_cuda_inverse(r->rest_chunks);
}

static void plan_attend(const struct lk_geometry *g, struct lk_cuda_row *r) {
    uint32_t query_bands = div_up(r->tokens * g->group, 8), cap;
    uint64_t tokens = r->scan ? (uint64_t)r->budget_pages * g->page_tokens : r->length;

    r->bands = 1;
    while (r->bands < BLOCK_WARPS && r->bands < query_bands)
        r->bands *= 2;
    r->query_groups = div_up(query_bands, r->bands);
    /* Many queries fill the device by themselves; partial results of slices are bounded. */
    cap =
        clamp(clamp(SLICES / g->kv_heads, 16, 128) / clamp(r->query_groups, 1, UINT32_MAX), 1, 128);
    r->tiles = (uint32_t)((tokens + TILE_TOKENS - 1) / TILE_TOKENS);
    r->slices = clamp(div_up(r->tiles, SLICE_TILES), 1, cap);
    r->slice_tiles = clamp(div_up(r->tiles, r->slices), 1, UINT32_MAX);
    r->slices = clamp(div_up(r->tiles, r->slice_tiles), 1, UINT32_MAX);
}

/* Of k shares the least is at most 1 / k. -> bits of the power of two above that, but not above
 * twice as much. */
static uint32_t likely_share(uint32_t k) {
    const float share = 2.f / (float)clamp(k, 1, UINT32_MAX);
    uint32_t bits;

    memcpy(&bits, &share, sizeof bits);
    return bits & 0x7f800000;
}

static void plan_cut(const struct lk_row *row, struct lk_cuda_row *r) {
    const struct lk_geometry *g = &row->pool->geometry;
    uint32_t stride = lk_cuda_group_stride(g->group), budget = r->budget_pages;
    uint64_t fetched = g->kv_heads * budget * row->pool->layout.head_bytes;
    struct lk_cuda_cut *c = &r->cut[0];

    if (!r->scan)
        return;
    c->units = r->pages;
    c->step = 1;
    c->sampled = least(r->sampled, budget > 2 ? budget - 2 : 0);
    c->k = budget - c->sampled;
    c->sink = least(r->sink_pages, c->k - 1);
    c->tail = 1 + least(r->recent_pages ? r->recent_pages - 1 : 0, c->k - 1 - c->sink);
    c->likely = likely_share(c->k - c->sink - c->tail);
    c->parts = r->list_max ? r->rescan_tiles + r->rest_chunks : r->chunks;
    c->skip = (r->list_max ? 1 + r->chunks : 1) * stride; /* a second pass left its own */
    c->layer = r->layer;
    c->shift = r->table_shift;
    c->listed_most = r->list_pages;
    c->fetch_rows = fetched ? (uint32_t)(FETCH_MOST / fetched) : 0;
    c->mass_target = r->mass_target;
    if (!r->list_max)
        return;
    r->cut[1] = *c;
    c = &r->cut[1];
    c->units = r->units;
    c->step = r->scan == LK_TREE ? LK_QUAD_PAGES : 1;
    c->sampled = c->sink = c->tail = 0;
    c->k = r->prune_units;
    c->likely = likely_share(c->k);
    c->parts = r->chunks;
    c->skip = stride;
    c->after = r->scan == LK_TREE ? r->complete % LK_QUAD_PAGES : 0;
    c->mass_target = 0;
}

/* Lay the row's intermediate values out -> bytes. */
static uint64_t plan_memory(const struct lk_geometry *g, struct lk_cuda_row *r) {
    uint64_t at = 0, heads = g->kv_heads, group = lk_cuda_group_stride(g->group);
    uint64_t padded = lk_cuda_spill_pages(r->pages);
    bool spills = r->pages > LK_CUDA_SPAN_PAGES || r->sampled > LK_CUDA_SPAN_HITS;
    uint64_t slots = 1 + (uint64_t)r->chunks + r->rescan_tiles + r->rest_chunks;
    const size_t first = offsetof(struct lk_cuda_row, scores);
    _Static_assert(offsetof(struct lk_cuda_row, head_bytes) ==
                       offsetof(struct lk_cuda_row, scores) + 8 * LK_CUDA_OFFSETS,
                   "one after the other");

#define LAY(field, each)                                                                           \
    do {                                                                                           \
        r->field = at;                                                                             \
        r->head_bytes[(offsetof(struct lk_cuda_row, field) - first) / 8] = (uint32_t)(each);       \
        at += (heads * (each) + 127) / 128 * 128;                                                  \
    } while (0)
    if (r->scan) {
        LAY(scores, (uint64_t)r->pages * group * 4);
        LAY(shares, (uint64_t)r->segments * r->segment_pages * 4);
        LAY(parts, slots * group * 8);
        if (spills)
            LAY(spill, lk_cuda_spill_bytes(padded, r->sampled));
        LAY(counts, sizeof(struct lk_cuda_head));
        LAY(rescan, ((uint64_t)r->list_max + 8) * 4);
        LAY(picks, (uint64_t)r->budget_pages * sizeof(struct lk_cuda_pick));
    }
    if (r->slices > 1)
        LAY(partials, (uint64_t)r->query_groups * r->slices * r->bands * 8 *
                          (g->head_dim * 4 + sizeof(struct lk_cuda_stat)));
#undef LAY
    return at;
}

static uint64_t plan_row(const struct lk_row *row, struct lk_cuda_row *r) {
    const struct lk_geometry *g = &row->pool->geometry;

    memset(r, 0, sizeof *r);
    r->q = row->q;
    r->k = row->k;
    r->v = row->v;
    r->out = row->out;
    r->lse = row->lse;
    r->list = row->list;
    r->result = row->result;
    r->table = row->table;
    r->workspace = row->workspace;
    r->length = row->length;
    r->layer = row->layer;
    r->tokens = row->tokens;
    r->append = row->append;
    r->table_shift = row->table_shift;
    r->list_pages = row->list_pages;
    r->budget_pages = row->budget_pages;
    r->sampled = row->sampled;
    r->sink_pages = row->sink_pages;
    r->recent_pages = row->recent_pages;
    r->mass_target = row->mass_target;
    r->sm_scale = row->sm_scale;
    r->pages = (uint32_t)lk_row_pages(row);
    r->complete = (uint32_t)lk_row_complete(row);
    if (!row->exact && row->tokens == 1 && r->pages > row->budget_pages)
        r->scan = row->scan;
    plan_scan(g, r);
    plan_attend(g, r);
    plan_cut(row, r);
    return plan_memory(g, r);
}

uint64_t lk_cuda_row_workspace_bytes(const struct lk_row *row) {
    struct lk_cuda_row r;

    return plan_row(row, &r);
}

uint32_t lk_cuda_sync_words(const struct lk_geometry *geometry, uint32_t rows, uint32_t tokens) {
    uint32_t groups = clamp(div_up(tokens * geometry->group, 64), 1, UINT32_MAX);

    return rows * geometry->kv_heads * groups * LK_CUDA_SYNC;
}

/* A budget counts only where a row is scored. */
static bool row_fits(const struct lk_row *row) {
    bool scored = row->tokens && !row->exact;

    return lk_row_pages(row) <= LK_CUDA_PAGES_MAX && row->append <= row->length &&
           (!scored || (row->tokens == 1 && row->append <= 1 && row->budget_pages >= 1 &&
                        row->budget_pages <= LK_CUDA_BUDGET_PAGES_MAX));
}

int lk_cuda_fill(const struct lk_row *rows, uint32_t count, struct lk_cuda_batch *ret) {
    uint32_t groups = 0;

    if (count > LK_CUDA_ROWS_MAX)
        return -EINVAL;
    for (uint32_t i = 0; i < count; i++)
        if (!row_fits(&rows[i]))
            return -EINVAL;
    ret->rows = count;
    memset(ret->tasks, 0, sizeof ret->tasks);
    for (uint32_t i = 0; i < count; i++) {
        struct lk_cuda_row *r = &ret->row[i];
        const struct lk_geometry *g = &rows[i].pool->geometry;
        uint32_t passes = g->kv_heads * div_up(g->group, 8), task[LK_CUDA_STAGES] = {0};

        plan_row(&rows[i], r);
        r->group_first = groups;
        task[LK_CUDA_HEADS] = g->kv_heads * clamp(div_up(r->append, LK_CUDA_APPEND), 1, UINT32_MAX);
        if (r->scan)
            task[r->scan == LK_FULL ? LK_CUDA_RANK : LK_CUDA_COARSE] = passes * r->chunks;
        if (r->list_max) {
            task[LK_CUDA_RESCAN] = passes * r->rescan_tiles;
            task[LK_CUDA_REST] = passes * r->rest_chunks;
        }
        if (r->tokens) {
            task[LK_CUDA_ATTEND] = g->kv_heads * r->query_groups * r->slices;
            groups += g->kv_heads * r->query_groups;
        }
        for (int s = 0; s < LK_CUDA_STAGES; s++) {
            ret->first[s][i] = ret->tasks[s];
            ret->tasks[s] += task[s];
        }
    }
    return 0;
}
