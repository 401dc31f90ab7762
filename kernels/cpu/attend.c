/* SPDX-License-Identifier: MIT */
/*
 * attend.c - walks pages and merges what splits saw; the arithmetic is the path's.
 *
 * Idea: a tile's queries are loaded once as floats, then every page of every head of the tile is
 * taken through dot, soften and gather for four queries at a time. On the diagonal of a row of
 * several tokens, a query gets a block of its own, cut where its sight ends: a later token's key or
 * value is not read at all, so what it holds cannot spoil an earlier one.
 *
 * Measured: walking one head's pages (8 KiB of every 64) a core reads 16 GB/s with or without
 * asking ahead, its miss buffers being the limit; walking all heads of a page in order, 27 to 33.
 * Invariants: as attend.h. Any thread.
 */
#include <math.h>
#include <string.h>

#include "attend.h"
#include "dispatch.h"

#define LOG2E 1.44269504088896341f
#define LN2   0.69314718055994531f

struct walk { /* of a tile */
    const struct lk_row *row;
    const struct lk_vector *vector;
    struct lk_tile tile;
    uint32_t queries, group, head_dim, page_tokens, dtype; /* queries: of a head */
    uint64_t end;                                          /* tokens the last query sees */
    struct lk_partial *partial;
    float *values;
    float q[LK_TILE_QUERIES * LK_HEAD_DIM_MAX];
};

const struct lk_vector *lk_vector_get(void) {
    static const struct lk_vector *const by_path[LK_CPU_PATHS] = {
        [LK_CPU_PORTABLE] = &lk_vector_portable,
        [LK_CPU_AVX2] = &lk_vector_avx2,
        [LK_CPU_AVX512] = &lk_vector_avx512,
    };
    return by_path[lk_cpu_path()];
}

/* Tokens that query token `token` of the row sees: causal, its own included. */
static uint64_t sight(const struct lk_row *row, uint32_t token) {
    uint64_t upto = row->length + token + 1;

    return upto > row->tokens ? upto - row->tokens : 0;
}

static void walk_open(struct walk *walk, const struct lk_row *row, const struct lk_tile *tile) {
    const struct lk_geometry *g = &row->pool->geometry;
    size_t bytes = (size_t)g->head_dim * row->pool->layout.element_bytes;

    walk->row = row;
    walk->vector = lk_vector_get();
    walk->tile = *tile;
    walk->queries = tile->tokens * g->group;
    walk->group = g->group;
    walk->head_dim = g->head_dim;
    walk->page_tokens = g->page_tokens;
    walk->dtype = g->dtype;
    walk->end = sight(row, tile->token + tile->tokens - 1);
    float *to = walk->q;
    for (uint32_t h = tile->head; h < tile->head + tile->heads; h++)
        for (uint32_t i = 0; i < walk->queries; i++, to += g->head_dim) {
            size_t token = tile->token + i / g->group;
            size_t at = (token * g->kv_heads + h) * g->group + i % g->group;
            walk->vector->load(g->dtype, (const uint8_t *)row->q + at * bytes, g->head_dim,
                               row->sm_scale * LOG2E, to);
        }
}

/* Queries first..first+count-1 of the tile, of one head. */
static void attend_queries(struct walk *walk, const struct lk_block *block, uint32_t first,
                           uint32_t count) {
    _Alignas(64) float logits[LK_CHUNK_QUERIES * LK_LOGITS_STRIDE];
    float decay[LK_CHUNK_QUERIES], peak[LK_CHUNK_QUERIES] = {0}, mass[LK_CHUNK_QUERIES] = {0};
    struct lk_partial *partial = walk->partial + first;

    for (uint32_t i = 0; i < count; i++) {
        peak[i] = partial[i].peak;
        mass[i] = partial[i].mass;
    }
    walk->vector->dot[walk->dtype](block, walk->q + (size_t)first * walk->head_dim, count,
                                   walk->head_dim, logits);
    walk->vector->soften(block, count, logits, peak, mass, decay);
    walk->vector->gather[walk->dtype](block, logits, count, walk->head_dim, decay,
                                      walk->values + (size_t)first * walk->head_dim);
    for (uint32_t i = 0; i < count; i++)
        partial[i] = (struct lk_partial){peak[i], mass[i]};
}

/* A block on the diagonal, begun at token `start` of the row: each query to its own end. */
static void attend_diagonal(struct walk *walk, const struct lk_block *block, uint64_t start,
                            uint32_t first, uint32_t count) {
    for (uint32_t i = first; i < first + count; i++) {
        uint64_t upto = sight(walk->row, walk->tile.token + i % walk->queries / walk->group);
        struct lk_block cut = *block;
        if (upto <= start)
            continue;
        if (upto - start < cut.tokens)
            cut.tokens = (uint32_t)(upto - start);
        attend_queries(walk, &cut, i, 1);
    }
}

/* All queries of the tile's head-th head. */
static void attend_head(struct walk *walk, struct lk_block *block, uint64_t start, uint32_t head) {
    for (uint32_t i = 0; i < walk->queries; i += LK_CHUNK_QUERIES) {
        uint32_t left = walk->queries - i, first = head * walk->queries + i;
        uint32_t count = left < LK_CHUNK_QUERIES ? left : LK_CHUNK_QUERIES;
        if (start + block->tokens <= sight(walk->row, walk->tile.token + i / walk->group))
            attend_queries(walk, block, first, count);
        else
            attend_diagonal(walk, block, start, first, count);
        block->next = block->value; /* asked for once */
    }
}

/* Where page i of the span lies, for the tile's first head; NULL after the last. */
static const uint8_t *page_at(const struct walk *walk, const struct lk_span *span, uint64_t i) {
    uint64_t page = i;

    if (i >= span->first + span->count)
        return NULL;
    if (span->list)
        page = span->list[i];
    return lk_page_keys(walk->row->pool, walk->row->layer, lk_row_page(walk->row, page),
                        walk->tile.head);
}

static void attend_page(struct walk *walk, const struct lk_span *span, uint64_t i) {
    uint64_t bytes = walk->row->pool->layout.head_bytes;
    uint64_t start = (span->list ? span->list[i] : i) * walk->page_tokens;
    const uint8_t *at = page_at(walk, span, i), *after = page_at(walk, span, i + 1);
    float bias = span->weight ? log2f(span->weight[i]) : 0;

    if (start >= walk->end)
        return;
    uint64_t left = walk->end - start;
    uint32_t tokens = left < walk->page_tokens ? (uint32_t)left : walk->page_tokens;
    for (uint32_t h = 0; h < walk->tile.heads; h++, at += bytes) {
        bool last = h + 1 == walk->tile.heads;
        struct lk_block block = {.key = at,
                                 .value = at + bytes / 2,
                                 .next = !last   ? at + bytes
                                         : after ? after
                                                 : at + bytes / 2,
                                 .tokens = tokens,
                                 .bias = bias};
        attend_head(walk, &block, start, h);
    }
}

void lk_attend(const struct lk_row *row, const struct lk_tile *tile, const struct lk_span *span,
               struct lk_partial *partial, float *values) {
    struct walk walk;

    walk_open(&walk, row, tile);
    walk.partial = partial;
    walk.values = values;
    for (uint32_t i = 0; i < tile->heads * walk.queries; i++)
        partial[i] = (struct lk_partial){-INFINITY, 0};
    memset(values, 0, (size_t)tile->heads * walk.queries * walk.head_dim * sizeof *values);
    for (uint64_t i = span->first; i < span->first + span->count; i++)
        attend_page(&walk, span, i);
    for (uint32_t i = 0; i < tile->heads * walk.queries; i++)
        walk.vector->restore(walk.dtype, walk.head_dim, values + (size_t)i * walk.head_dim);
}

/* Of a total in base 2; 0 is -inf, no number stays one. */
static float natural(float top, float mass) {
    return mass == 0 ? -INFINITY : LN2 * (top + log2f(mass));
}

void lk_attend_score(const struct lk_row *row, uint32_t head, uint64_t page, float *scores,
                     uint64_t stride) {
    _Alignas(64) float logits[LK_CHUNK_QUERIES * LK_LOGITS_STRIDE];
    struct lk_tile tile = {.head = head, .heads = 1, .tokens = 1};
    struct lk_span span = {.first = page, .count = 1};
    struct walk walk;

    walk_open(&walk, row, &tile);
    const uint8_t *at = page_at(&walk, &span, page);
    struct lk_block block = {.key = at, .value = at, .next = at};
    block.tokens = (uint32_t)(walk.end - page * walk.page_tokens);
    for (uint32_t i = 0; i < walk.queries; i += LK_CHUNK_QUERIES) {
        uint32_t left = walk.queries - i;
        uint32_t count = left < LK_CHUNK_QUERIES ? left : LK_CHUNK_QUERIES;
        float peak[LK_CHUNK_QUERIES], mass[LK_CHUNK_QUERIES] = {0}, decay[LK_CHUNK_QUERIES];
        for (uint32_t x = 0; x < LK_CHUNK_QUERIES; x++)
            peak[x] = -INFINITY;
        walk.vector->dot[walk.dtype](&block, walk.q + (size_t)i * walk.head_dim, count,
                                     walk.head_dim, logits);
        walk.vector->soften(&block, count, logits, peak, mass, decay);
        for (uint32_t x = 0; x < count; x++)
            scores[(i + x) * stride] = natural(peak[x], mass[x]);
    }
}

static float highest(const struct lk_partial *partial, uint32_t count, uint32_t stride) {
    float top = -INFINITY;

    for (size_t i = 0; i < count; i++)
        top = partial[i * stride].peak > top ? partial[i * stride].peak : top;
    return top == -INFINITY ? 0 : top;
}

float lk_attend_lse(const struct lk_partial *partial, uint32_t count, uint32_t stride) {
    float top = highest(partial, count, stride), mass = 0;

    for (size_t i = 0; i < count; i++)
        mass += exp2f(partial[i * stride].peak - top) * partial[i * stride].mass;
    return natural(top, mass);
}

float lk_attend_merge(const struct lk_partial *partial, const float *values, uint32_t count,
                      uint32_t stride, uint32_t head_dim, float *ret_out) {
    const struct lk_vector *vector = lk_vector_get();
    float top = highest(partial, count, stride), mass = 0, sum[LK_HEAD_DIM_MAX] = {0};

    for (size_t i = 0; i < count; i++) {
        const struct lk_partial *part = &partial[i * stride];
        float factor = exp2f(part->peak - top);
        mass += factor * part->mass;
        vector->add_scaled(sum, values + i * stride * head_dim, head_dim, factor);
    }
    for (uint32_t x = 0; x < head_dim; x++)
        sum[x] = mass == 0 ? 0 : sum[x] / mass;
    memcpy(ret_out, sum, head_dim * sizeof *sum);
    return natural(top, mass);
}
