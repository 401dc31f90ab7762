/* SPDX-License-Identifier: MIT */
/*
 * attend.c - walks pages in blocks and merges what splits saw; the arithmetic is the path's.
 *
 * Idea: queries of a tile are loaded once as floats, then every block of up to 64 tokens is taken
 * through dot, soften and gather for four queries at a time. On the diagonal of a row of several
 * tokens, a query gets a block of its own, cut where its sight ends: a later token's key or value is
 * not read at all, so what it holds cannot spoil an earlier one.
 * Invariants: as attend.h. Any thread.
 */
#include <math.h>
#include <string.h>

#include "attend.h"
#include "dispatch.h"
#include "element.h"

#define LOG2E 1.44269504088896341f
#define LN2   0.69314718055994531f

struct tile { /* queries of a few tokens of one KV head */
    const struct lk_row *row;
    const struct lk_vector *vector;
    uint32_t head, token, queries, group, head_dim, page_tokens, dtype;
    uint64_t end; /* tokens the last query sees */
    struct lk_partial *partial;
    float *values;
    float q[LK_TILE_QUERIES * LK_HEAD_DIM_MAX];
};

/* Where element i of a vector of head_dim lies in a paired order (attend.h). */
static inline uint32_t place(uint32_t pair, uint32_t head_dim, uint32_t i) {
    if (!pair || i >= head_dim - head_dim % (2 * pair))
        return i;
    uint32_t in = i % (2 * pair);
    return i - in + (in & 1) * pair + in / 2;
}

const struct lk_vector *lk_vector_get(void) {
    static const struct lk_vector *const by_path[LK_CPU_PATHS] = {
        [LK_CPU_PORTABLE] = &lk_vector_portable,
        [LK_CPU_AVX2] = &lk_vector_avx2,
        [LK_CPU_AVX512] = &lk_vector_avx512,
    };
    return by_path[lk_cpu_path()];
}

static uint32_t pair_of(const struct lk_vector *vector, uint32_t dtype) {
    return dtype == LK_BF16 ? vector->pair : 0;
}

/* Tokens that query token `token` of the row sees: causal, its own included. */
static uint64_t sight(const struct lk_row *row, uint32_t token) {
    uint64_t upto = row->length + token + 1;

    return upto > row->tokens ? upto - row->tokens : 0;
}

static void tile_open(struct tile *tile, const struct lk_row *row, uint32_t head, uint32_t token,
                      uint32_t tokens) {
    const struct lk_geometry *g = &row->pool->geometry;
    float scale = row->sm_scale * LOG2E;

    tile->row = row;
    tile->vector = lk_vector_get();
    tile->head = head;
    tile->token = token;
    tile->group = g->group;
    tile->queries = tokens * g->group;
    tile->head_dim = g->head_dim;
    tile->page_tokens = g->page_tokens;
    tile->dtype = g->dtype;
    tile->end = sight(row, token + tokens - 1);
    uint32_t pair = pair_of(tile->vector, g->dtype);
    for (uint32_t i = 0; i < tile->queries; i++) {
        size_t at = (size_t)(token + i / g->group) * g->kv_heads * g->group + head * g->group +
                    i % g->group;
        const uint8_t *from =
            (const uint8_t *)row->q + at * g->head_dim * row->pool->layout.element_bytes;
        for (uint32_t x = 0; x < g->head_dim; x += LANES) {
            lanes some = element_load(g->dtype, from, x) * scale; /* read once */
            for (uint32_t l = 0; l < LANES; l++)
                tile->q[i * g->head_dim + place(pair, g->head_dim, x + l)] = some[l];
        }
    }
}

/* Pages from..from+LK_BLOCK_TOKENS/page_tokens of the span, as far as there are any. */
static void block_fill(const struct tile *tile, const struct lk_span *span, uint64_t from,
                       struct lk_block *block) {
    const struct lk_row *row = tile->row;
    uint64_t end = span->first + span->count;

    memset(block, 0, sizeof *block);
    for (uint64_t i = from; i < end && block->pages < LK_BLOCK_TOKENS / tile->page_tokens; i++) {
        uint64_t page = span->list ? span->list[i] : i, first = page * tile->page_tokens;
        if (first >= tile->end)
            break;
        uint64_t left = tile->end - first, physical = lk_row_page(row, page);
        uint32_t p = block->pages++;
        block->count[p] = left < tile->page_tokens ? (uint32_t)left : tile->page_tokens;
        block->tokens += block->count[p];
        block->key[p] = lk_page_keys(row->pool, row->layer, physical, tile->head);
        block->value[p] = lk_page_values(row->pool, row->layer, physical, tile->head);
    }
}

/* Let the loops ask for `next` while they compute `block`. */
static void block_chain(struct lk_block *block, const struct lk_block *next) {
    for (uint32_t p = 0; p < block->pages && p < next->pages; p++) {
        block->next_key[p] = next->key[p];
        block->next_value[p] = next->value[p];
    }
}

static void block_bias(const struct lk_block *block, const float *weight, uint64_t from,
                       float *ret_bias) {
    uint32_t at = 0;

    for (uint32_t p = 0; p < block->pages; p++) {
        float bias = log2f(weight[from + p]);
        for (uint32_t t = 0; t < block->count[p]; t++)
            ret_bias[at++] = bias;
    }
}

static void block_cut(struct lk_block *block, uint64_t tokens) {
    uint32_t kept = 0, pages = 0;

    for (; pages < block->pages && kept < tokens; pages++) {
        if (block->count[pages] > tokens - kept)
            block->count[pages] = (uint32_t)(tokens - kept);
        kept += block->count[pages];
    }
    block->pages = pages;
    block->tokens = kept;
}

static void attend_queries(struct tile *tile, const struct lk_block *block, uint32_t first,
                           uint32_t queries) {
    _Alignas(64) float logits[LK_CHUNK_QUERIES * LK_BLOCK_STRIDE];
    float decay[LK_CHUNK_QUERIES], peak[LK_CHUNK_QUERIES], mass[LK_CHUNK_QUERIES];
    struct lk_partial *partial = tile->partial + first;

    for (uint32_t i = 0; i < queries; i++) {
        peak[i] = partial[i].peak;
        mass[i] = partial[i].mass;
    }
    tile->vector->dot[tile->dtype](block, tile->q + (size_t)first * tile->head_dim, queries,
                                   tile->head_dim, logits);
    tile->vector->soften(block, queries, logits, peak, mass, decay);
    tile->vector->gather[tile->dtype](block, logits, queries, tile->head_dim, decay,
                                      tile->values + (size_t)first * tile->head_dim);
    for (uint32_t i = 0; i < queries; i++)
        partial[i] = (struct lk_partial){peak[i], mass[i]};
}

/* A block that begins at token `start` of the row, on the diagonal: each query to its own end. */
static void attend_diagonal(struct tile *tile, const struct lk_block *block, uint64_t start,
                            uint32_t first, uint32_t queries) {
    for (uint32_t i = first; i < first + queries; i++) {
        uint64_t upto = sight(tile->row, tile->token + i / tile->group);
        if (upto <= start)
            continue;
        struct lk_block cut = *block;
        block_cut(&cut, upto - start);
        attend_queries(tile, &cut, i, 1);
    }
}

static void attend_block(struct tile *tile, struct lk_block *block, uint64_t start, bool list) {
    for (uint32_t i = 0; i < tile->queries; i += LK_CHUNK_QUERIES) {
        uint32_t queries =
            tile->queries - i < LK_CHUNK_QUERIES ? tile->queries - i : LK_CHUNK_QUERIES;
        uint64_t upto = sight(tile->row, tile->token + i / tile->group);
        if (list || start + block->tokens <= upto)
            attend_queries(tile, block, i, queries);
        else
            attend_diagonal(tile, block, start, i, queries);
        memset(block->next_key, 0, sizeof block->next_key); /* asked for once */
        memset(block->next_value, 0, sizeof block->next_value);
    }
}

static void unpair(struct tile *tile) {
    uint32_t pair = pair_of(tile->vector, tile->dtype), head_dim = tile->head_dim;
    float natural[LK_HEAD_DIM_MAX];

    for (uint32_t i = 0; pair && i < tile->queries; i++) {
        float *values = tile->values + (size_t)i * head_dim;
        for (uint32_t x = 0; x < head_dim; x++)
            natural[x] = values[place(pair, head_dim, x)];
        memcpy(values, natural, head_dim * sizeof *values);
    }
}

void lk_attend(const struct lk_row *row, uint32_t head, uint32_t token, uint32_t tokens,
               const struct lk_span *span, struct lk_partial *partial, float *values) {
    struct tile tile;
    struct lk_block block[2];
    float bias[LK_BLOCK_TOKENS];

    tile_open(&tile, row, head, token, tokens);
    tile.partial = partial;
    tile.values = values;
    for (uint32_t i = 0; i < tile.queries; i++)
        partial[i] = (struct lk_partial){-INFINITY, 0};
    memset(values, 0, (size_t)tile.queries * tile.head_dim * sizeof *values);

    uint64_t from = span->first;
    block_fill(&tile, span, from, &block[0]);
    for (uint32_t turn = 0; block[turn].pages; turn ^= 1) {
        struct lk_block *now = &block[turn], *next = &block[turn ^ 1];
        block_fill(&tile, span, from + now->pages, next);
        block_chain(now, next);
        if (span->weight) {
            block_bias(now, span->weight, from, bias);
            now->bias = bias;
        }
        attend_block(&tile, now, from * tile.page_tokens, span->list != NULL);
        from += now->pages;
    }
    unpair(&tile);
}

void lk_attend_score(const struct lk_row *row, uint32_t head, uint64_t page, float *scores,
                     uint64_t stride) {
    _Alignas(64) float logits[LK_CHUNK_QUERIES * LK_BLOCK_STRIDE];
    struct lk_span span = {.first = page, .count = 1};
    struct tile tile;
    struct lk_block block;

    tile_open(&tile, row, head, 0, 1);
    block_fill(&tile, &span, page, &block);
    for (uint32_t i = 0; i < tile.queries; i += LK_CHUNK_QUERIES) {
        uint32_t queries =
            tile.queries - i < LK_CHUNK_QUERIES ? tile.queries - i : LK_CHUNK_QUERIES;
        float peak[LK_CHUNK_QUERIES], mass[LK_CHUNK_QUERIES] = {0}, decay[LK_CHUNK_QUERIES];
        for (uint32_t x = 0; x < queries; x++)
            peak[x] = -INFINITY;
        tile.vector->dot[tile.dtype](&block, tile.q + (size_t)i * tile.head_dim, queries,
                                     tile.head_dim, logits);
        tile.vector->soften(&block, queries, logits, peak, mass, decay);
        for (uint32_t x = 0; x < queries; x++)
            scores[(i + x) * stride] = LN2 * (peak[x] + log2f(mass[x]));
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
    return LN2 * (top + log2f(mass));
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
    return LN2 * (top + log2f(mass));
}
