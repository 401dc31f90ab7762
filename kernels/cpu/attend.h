/* SPDX-License-Identifier: MIT */
/*
 * attend.h - exact attention of a few queries over pages, and the vector loops beneath it.
 *
 * Problem: keys and values are read once, at the speed of memory, and serve every query. Idea: a
 * tile is up to 64 queries: of some tokens and some KV heads. It walks its pages in order and
 * within a page its heads, as they lie in memory, so that a machine's own prefetcher sees one
 * stream; for four queries at a time a page of a head is three loops: `dot` (logits), `soften`
 * (running softmax) and `gather` (weights times values). Each converts a key or value once for the
 * four.
 *
 * Logits are held in base 2: a query is scaled by sm_scale * log2(e) when it is loaded, and a
 * page's weight enters as log2(weight) added to its logits. Results are natural.
 *
 * Invariants
 *   - Tokens beyond a page's count are never read, whatever they hold.
 *   - An accumulator's bits depend on the queries, the pages and their order, on nothing else.
 *   - A state that saw no token has peak -inf, mass 0, values 0; merging it changes nothing.
 *
 * Any thread; nothing here allocates. Does not choose pages (select.h) nor split work (rows.c).
 */
#ifndef LK_CPU_ATTEND_H
#define LK_CPU_ATTEND_H

#include "cpu.h"

#define LK_TILE_QUERIES  64 /* share a walk: their floats are 64 KiB of stack at d 256 */
#define LK_CHUNK_QUERIES 4  /* share a conversion: their accumulators fit registers */
#define LK_LOGITS_STRIDE 80 /* of a query: a page, and a vector that may be written past its end */

struct lk_block {               /* a page of one KV head, as far as it is seen */
    const uint8_t *key, *value; /* [tokens][head_dim] */
    const uint8_t *next;        /* what is read after the values: asked for beside them */
    uint32_t tokens;            /* 1..LK_PAGE_TOKENS_MAX */
    float bias;                 /* added to the logits */
};

/* to[i] = the sum over g of scale[g] * from[g * stride + i], in float64; below floor, or no number:
 * 0; above 1: 1. ret: the same rounded; may be the first row of `from`. */
struct lk_powers {
    const float *from;
    uint64_t stride, count;
    uint32_t group;
    const double *scale; /* [group] */
    double floor;
};

/*
 * The loops of one path. head_dim is a multiple of 16. Arrays by dtype are indexed by enum
 * lk_element. Queries and accumulators lie in an order of the path's and the dtype's own: from
 * bf16, each run of two vectors is split into its even and then its odd elements, so that a 32-bit
 * load of two bf16 becomes two floats by a shift and a mask.
 */
struct lk_vector {
    /* A vector of head_dim elements, scaled, into the path's order; accumulators back from it. */
    void (*load)(uint32_t dtype, const uint8_t *from, uint32_t head_dim, float scale, float *to);
    void (*restore)(uint32_t dtype, uint32_t head_dim, float *values);
    /* logits[i * LK_LOGITS_STRIDE + t] = q_i . key_t */
    void (*dot[4])(const struct lk_block *block, const float *q, uint32_t queries,
                   uint32_t head_dim, float *logits);
    /* Logits to weights 2^(logit - peak), in place; peak and mass brought up to date; decay: what
     * the accumulators so far must be multiplied by. These three have room for LK_CHUNK_QUERIES. */
    void (*soften)(const struct lk_block *block, uint32_t queries, float *logits, float *peak,
                   float *mass, float *decay);
    /* acc[i][:] = decay_i * acc[i][:] + sum over t of weights_i,t * value_t */
    void (*gather[4])(const struct lk_block *block, const float *weights, uint32_t queries,
                      uint32_t head_dim, const float *decay, float *acc);
    /* The largest element; -inf of none. */
    float (*largest)(const float *x, uint64_t count);
    /* to[i] = exp(from[i] - peak), to == from allowed -> their sum, added in float64. */
    double (*exp_sum)(float *to, const float *from, uint64_t count, float peak);
    /* to[i] += scale * from[i] */
    void (*add_scaled)(float *to, const float *from, uint64_t count, float scale);
    /* See struct lk_powers. An element's bits do not depend on its place. */
    void (*shares)(const struct lk_powers *powers, double *to, float *ret);
    /* to[4i..4i+3] = from[i] / 4, below floor: 0. */
    void (*spread)(double *to, const double *from, uint64_t count, double floor);
    /* Sum of floor(2^32 x), x in [0, 1]; count at most 4096. */
    uint64_t (*fractions)(const double *x, uint64_t count);
    /* ret[w] = the largest of x[w], x[w + width], ..; width a multiple of 16, at most count. */
    void (*columns)(const float *x, uint64_t count, uint32_t width, float *ret);
    /* Those of x at or above bound, in order, to `to` -> how many; UINT64_MAX: more than room - 16.
     * */
    uint64_t (*pick)(const float *x, uint64_t count, float bound, float *to, uint64_t room);
    /* How many of x are at or above bound. */
    uint64_t (*at_least)(const float *x, uint64_t count, float bound);
    /* Indices, ascending, of x above cut and of the first `ties` equal to it -> how many; that they
     * are no more than room is the caller's to know. */
    uint64_t (*emit)(const float *x, uint64_t count, float cut, uint64_t ties, uint32_t *ret,
                     uint64_t room);
};

/* The path's loops. */
const struct lk_vector *lk_vector_get(void);
extern const struct lk_vector lk_vector_portable, lk_vector_avx2, lk_vector_avx512;

/* What a split attends: pages first..first+count-1 of the row, or of `list`. */
struct lk_span {
    const uint32_t *list; /* pages of the row, or NULL: all */
    const float *weight;  /* of each listed page, or NULL: 1 */
    uint64_t first, count;
};

/* State of a query: values are not normalised. Natural order; peak in base 2. */
struct lk_partial {
    float peak, mass;
};

struct lk_tile {            /* heads * tokens * group <= LK_TILE_QUERIES */
    uint32_t head, heads;   /* KV heads */
    uint32_t token, tokens; /* of the row's queries */
};

/*
 * A tile's queries over a span; each sees only tokens up to its own position. A span with a list is
 * for rows of one token. partial [heads][tokens][group], values [heads][tokens][group][head_dim].
 */
void lk_attend(const struct lk_row *row, const struct lk_tile *tile, const struct lk_span *span,
               struct lk_partial *partial, float *values);

/* scores[g * stride] = exact ln mass of page `page` of the row for the group's queries of token 0.
 * */
void lk_attend_score(const struct lk_row *row, uint32_t head, uint64_t page, float *scores,
                     uint64_t stride);

/* Merge `count` states of one query, `stride` states apart, in order -> its output, and the log
 * mass. No state, or all empty: 0 and -inf. */
float lk_attend_merge(const struct lk_partial *partial, const float *values, uint32_t count,
                      uint32_t stride, uint32_t head_dim, float *ret_out);
/* The log mass alone. */
float lk_attend_lse(const struct lk_partial *partial, uint32_t count, uint32_t stride);

#endif
