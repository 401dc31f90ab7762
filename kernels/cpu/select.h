/* SPDX-License-Identifier: MIT */
/*
 * select.h - from scores to shares, from shares to kept and sampled pages (DESIGN section 1).
 *
 * Idea: a share rounded to a float in [0, 1] is ordered totally by its bits as an integer. The best
 * of n are found by bisecting those bits: what lies above a bound is counted, at most 30 times,
 * mostly over the few that can be the best; one more pass in page order emits them. Shares
 * themselves are float64: where several heads have one page each, those pages' shares differ by
 * what the heads leave to all others, and floats by nothing. Where floats tie at the cut, a second
 * round goes by what rounding left over. Work is linear however many shares are equal. A share that
 * is no number counts as 0, so that every comparison holds and every loop ends.
 *
 * Sampling is in integers: f = floor(2^32 share) + 1, weights W = 19 L f + F, total T = 20 L F.
 * With up to 2^32 pages, L F < 2^66 and T < 2^71: 128 bits. Sums over blocks of 64 pages find the
 * block of each stratum, a walk within the block its page.
 *
 * Any thread; nothing here allocates. Does not read keys or summaries.
 */
#ifndef LK_CPU_SELECT_H
#define LK_CPU_SELECT_H

#include "cpu.h"

#define LK_SHARE_FLOOR  1e-30 /* smaller is 0 */
#define LK_SAMPLE_BLOCK 64    /* pages whose weights are summed together */

/* share[j] = mean over the group of softmax_j(scores[g][:count]); below `floor`, or no number: 0.
 * powers [group][stride]: its first row becomes the shares as floats, the others are scratch; may
 * be the scores themselves, which are lost then. */
void lk_share(const float *scores, uint64_t stride, uint32_t group, uint64_t count, double floor,
              double *share, float *powers);

/* The pages that compete: page[0..count), or all from `first` on. */
struct lk_field {
    const double *share;  /* by page */
    const float *rounded; /* [count] */
    const uint32_t *page; /* or NULL */
    uint64_t first, count;
    float *scratch; /* [count] */
};
/* The best `need`, as indices into the field, ascending -> how many: min(need, count). */
uint64_t lk_select_best(const struct lk_field *field, uint64_t need, uint32_t *ret_index);

struct lk_rank {
    double share;
    uint32_t index;
};
/* Shorten `index` [count] (ascending, from lk_select_best) to the best few whose shares bring `sum`
 * to `target`, but to no fewer than `least`; still ascending. scratch [count]. -> how many remain.
 * */
uint64_t lk_select_mass(const struct lk_field *field, uint32_t *index, uint64_t count, double sum,
                        double target, uint64_t least, struct lk_rank *scratch);

/* Pages kept whatever their share: the first `sink` and the last `tail`, the newest included. */
struct lk_forced {
    uint64_t sink, tail;
};
/* For k >= 1 pages kept of more than k. */
struct lk_forced lk_select_forced(uint64_t k, uint32_t sink_pages, uint32_t recent_pages);

/*
 * Sample `count` >= 1 of the pages that are not in kept [kept_count] (ascending). share [pages];
 * sums [pages / LK_SAMPLE_BLOCK + 1] is scratch. ret_page and ret_weight [count], ascending.
 * -> distinct pages sampled.
 */
uint64_t lk_sample(const double *share, uint64_t pages, const uint32_t *kept, uint64_t kept_count,
                   uint32_t count, uint64_t *sums, uint32_t *ret_page, float *ret_weight);

#endif
