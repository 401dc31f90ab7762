/* SPDX-License-Identifier: MIT */
/*
 * score.h - the variants of scoring, one a path; score.c chooses and feeds them.
 *
 * The problem: 786 bytes a page are read, and 18 x 64 products a head made of them, at the speed of
 * memory. Idea: a variant scores a batch of pages named by pointers to their records; where the
 * pages come from (a range, a list, superpages) and where results go is the feeder's concern.
 *
 * For a query of codes q (query.h) and a page:
 *
 *     mu    = centroid scale * factor * (q . centroid)       with the low digits where they count
 *     p_i   = scale_i * factor * (q . basis_i)              integer products, exact on all paths
 *     x_t   = sum over i of p_i * coeff_ti
 *     score = mu + ln sum over t of exp(x_t)
 *
 * mu, p_i and x_t are kept finite by clipping at LK_SCORE_MOST, unless the query is not a number.
 *
 * Invariant: a page's score depends on its record and the query alone, bit by bit, wherever in a
 * batch it stands. Between paths scores differ by at most 1e-4 + 2e-6 * (|mu| + max |x_t|).
 */
#ifndef LK_CPU_SCORE_H
#define LK_CPU_SCORE_H

#include <float.h>

#include "query.h"
#include "record.h"

#define LK_SCORE_BATCH 16    /* pages; logarithms fill a vector, records and query fit L1 */
#define LK_SCORE_MOST  1e28f /* times 2^23, sums of LK_RANK_MAX * 127 are still finite */
/* What a unit of mu must be worth for the query's low digits to be taken into account: below it
 * they move a score by 4e-4 where every code is at its most, typically by 1e-4. */
#define LK_SCORE_LOW_UNIT 1e-6f

/* What a unit of a record's code times one of the query's is worth. Finite, so that times 0 it is
 * 0; a NaN stays one. Both factors may be as large and as small as floats get: nothing else may be
 * multiplied into either before. */
static inline float lk_score_unit(float scale, float factor) {
    float unit = scale * factor;
    return unit > FLT_MAX ? FLT_MAX : unit;
}

struct lk_score_shape {
    struct lk_record first; /* coarse or super */
    struct lk_record fine;  /* directions 0: not read */
    uint32_t group;
};

/* Records of the batch. Places past the last page repeat it. */
struct lk_score_batch {
    const uint8_t *first[LK_SCORE_BATCH], *fine[LK_SCORE_BATCH];
};

/*
 * pages: 1..LK_SCORE_BATCH; next: the batch that follows, to be asked for meanwhile, a page at a
 * time: all at once they would fill the queue to memory and hold up the work. ret [group rounded up
 * to LK_QUERY_BLOCK][LK_SCORE_BATCH].
 */
typedef void lk_score_fn(const struct lk_score_shape *shape, const struct lk_query *query,
                         const struct lk_score_batch *batch, const struct lk_score_batch *next,
                         uint32_t pages, float *ret);

lk_score_fn lk_score_portable, lk_score_avx2, lk_score_avx512;

#endif
