/* SPDX-License-Identifier: MIT */
/*
 * sample.c - stratified sample of the pages that are not kept, in integers. See select.h.
 *
 * Idea: the running sum of W over the pages left, in page order, is met by equally spaced points.
 * W = 19 L f + F is linear in f, so a block's sum follows from the sum of its f and its pages.
 * Invariants: points ascend, so one pass over blocks serves all; kept pages weigh nothing.
 * Any thread.
 */
#include "attend.h"
#include "select.h"

typedef unsigned __int128 u128;

struct left { /* the pages left, walked in page order */
    const double *share;
    uint64_t pages;
    const uint32_t *kept;
    uint64_t kept_count;
    uint64_t L, F;
};

static inline uint64_t fraction(double share) {
    return (uint64_t)(share * 0x1p32) + 1; /* exact: a power of two, and share <= 1 */
}

static u128 weight_of(const struct left *left, uint64_t f_sum, uint64_t pages) {
    return (u128)19 * left->L * f_sum + (u128)left->F * pages;
}

/* sums[b]: f of block b's pages, kept ones taken out again. -> their sum. */
static uint64_t sum_blocks(const struct left *left, uint64_t *sums) {
    const struct lk_vector *vector = lk_vector_get();
    uint64_t blocks = (left->pages + LK_SAMPLE_BLOCK - 1) / LK_SAMPLE_BLOCK, total = 0;

    for (uint64_t b = 0; b < blocks; b++) {
        uint64_t first = b * LK_SAMPLE_BLOCK, count = left->pages - first;
        count = count < LK_SAMPLE_BLOCK ? count : LK_SAMPLE_BLOCK;
        sums[b] = vector->fractions(left->share + first, count) + count;
    }
    for (uint64_t i = 0; i < left->kept_count; i++)
        sums[left->kept[i] / LK_SAMPLE_BLOCK] -= fraction(left->share[left->kept[i]]);
    for (uint64_t b = 0; b < blocks; b++)
        total += sums[b];
    return total;
}

/* All that is left, each standing for itself. */
static uint64_t take_all(const struct left *left, uint32_t *ret_page, float *ret_weight) {
    uint64_t kept = 0, taken = 0;

    for (uint64_t j = 0; j < left->pages; j++) {
        if (kept < left->kept_count && left->kept[kept] == j) {
            kept++;
            continue;
        }
        ret_page[taken] = (uint32_t)j;
        ret_weight[taken++] = 1;
    }
    return taken;
}

struct strata { /* points not met yet */
    u128 step, next;
    uint32_t count, met;
};

/* Points below `upto` -> how many; they are met. */
static uint32_t meet(struct strata *strata, u128 upto) {
    uint32_t hits = 0;

    while (strata->met < strata->count && strata->next < upto) {
        strata->next += strata->step;
        strata->met++;
        hits++;
    }
    return hits;
}

uint64_t lk_sample(const double *share, uint64_t pages, const uint32_t *kept, uint64_t kept_count,
                   uint32_t count, uint64_t *sums, uint32_t *ret_page, float *ret_weight) {
    struct left left = {share, pages, kept, kept_count, .L = pages - kept_count};
    uint64_t taken = 0, k = 0;
    u128 run = 0;

    if (left.L <= count)
        return take_all(&left, ret_page, ret_weight);
    left.F = sum_blocks(&left, sums);
    u128 total = (u128)20 * left.L * left.F;
    struct strata strata = {
        .step = total / count, .next = total / (2 * (u128)count), .count = count};
    for (uint64_t j = 0; j < pages && strata.met < count; j += LK_SAMPLE_BLOCK) {
        uint64_t end = j + LK_SAMPLE_BLOCK < pages ? j + LK_SAMPLE_BLOCK : pages, k_end = k;
        while (k_end < kept_count && kept[k_end] < end)
            k_end++;
        u128 after = run + weight_of(&left, sums[j / LK_SAMPLE_BLOCK], end - j - (k_end - k));
        for (uint64_t i = j; i < end && strata.met < count && strata.next < after; i++) {
            if (k < k_end && kept[k] == i) {
                k++;
                continue;
            }
            u128 weight = weight_of(&left, fraction(share[i]), 1);
            run += weight;
            uint32_t hits = meet(&strata, run);
            if (hits) {
                ret_page[taken] = (uint32_t)i;
                ret_weight[taken++] =
                    (float)(hits * ((double)total / ((double)count * (double)weight)));
            }
        }
        run = after;
        k = k_end;
    }
    return taken;
}
