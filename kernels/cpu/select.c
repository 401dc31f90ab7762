/* SPDX-License-Identifier: MIT */
/*
 * select.c - shares, and the best of them. See select.h.
 *
 * Invariants: results depend on the shares alone; ties go to the lower index; linear time.
 * Any thread.
 */
#include <string.h>

#include "attend.h"
#include "select.h"

#define BINS       1024 /* ten bits a level: the top one's hold the exponent */
#define FILTER     4096 /* floats that a cut may hold beside the shares */
#define HISTOGRAMS 2    /* equal shares in a row would wait for each other's count */

static inline uint32_t bits_of(float share) {
    uint32_t bits;

    memcpy(&bits, &share, 4);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float share;

    memcpy(&share, &bits, 4);
    return share;
}

void lk_share(const float *scores, uint64_t stride, uint32_t group, uint64_t count, double floor,
              double *share, float *rounded) {
    const struct lk_vector *vector = lk_vector_get();

    memset(share, 0, count * sizeof *share);
    for (uint32_t g = 0; g < group; g++) {
        const float *from = scores + g * stride;
        double sum = vector->exp_sum(rounded, from, count, vector->largest(from, count));
        vector->add_wide(share, rounded, count, 1 / (sum * group));
    }
    vector->clip(share, count, floor, rounded); /* at 1 too: rounding may have gone above */
}

/* Where the best so many end: those above `bits`, and the first `ties` of the `equal` equal to it.
 */
struct cut {
    uint32_t bits;
    uint64_t ties, equal;
};

/* Of hist (bins counted from the top) the bin in which the need-th lies; need becomes its place
 * there, ret_here how many lie there. */
static uint32_t find_bin(uint32_t hist[HISTOGRAMS][BINS], uint64_t *need, uint64_t *ret_here) {
    for (uint32_t bin = BINS - 1;; bin--) {
        uint64_t here = 0;
        for (uint32_t h = 0; h < HISTOGRAMS; h++)
            here += hist[h][bin];
        *ret_here = here;
        if (*need <= here || bin == 0)
            return bin;
        *need -= here;
    }
}

/* The bits of the need-th best, of all. */
static struct cut radix_cut(const float *share, uint64_t count, uint64_t need) {
    uint32_t hist[HISTOGRAMS][BINS], prefix = 0;
    uint64_t here;

    for (uint32_t shift = 20;; shift -= 10) { /* bits 29..20 (share <= 1), 19..10, 9..0 */
        memset(hist, 0, sizeof hist);
        for (uint64_t j = 0; j < count; j++) {
            uint32_t bits = bits_of(share[j]);
            if (shift == 20 || bits >> (shift + 10) == prefix)
                hist[j % HISTOGRAMS][bits >> shift & (BINS - 1)]++;
        }
        prefix = prefix << 10 | find_bin(hist, &need, &here);
        if (shift == 0)
            return (struct cut){.bits = prefix, .ties = need, .equal = here};
    }
}

/* The need-th best of the columns' maxima is no better than the need-th best of all: what lies
 * below it need not be counted. */
static struct cut cut_of(const float *share, uint64_t count, uint64_t need) {
    const struct lk_vector *vector = lk_vector_get();
    float some[FILTER];
    uint64_t width = (2 * need + 63) / 64 * 64;

    if (width > FILTER || 2 * width > count)
        return radix_cut(share, count, need);
    vector->columns(share, count, (uint32_t)width, some);
    struct cut bound = radix_cut(some, width, need);
    uint64_t above = vector->pick(share, count, float_of(bound.bits), some, FILTER);
    return above == UINT64_MAX ? radix_cut(share, count, need) : radix_cut(some, above, need);
}

static double share_of(const struct lk_field *field, uint64_t i) {
    return field->share[field->page ? field->page[i] : field->first + i];
}

/* Those equal to the cut, by what rounding left over: at most a part in 2^24 of the cut, so that
 * they lie within 0.25..0.75; those above it 1, those below 0. */
static void part_ties(const struct lk_field *field, float cut) {
    double scale = 0x1p22 / (double)cut;

    for (uint64_t i = 0; i < field->count; i++) {
        float x = field->rounded[i];
        double over = (share_of(field, i) - (double)cut) * scale;
        field->scratch[i] = x > cut ? 1 : x == cut ? (float)(0.5 + over) : 0;
    }
}

uint64_t lk_select_best(const struct lk_field *field, uint64_t need, uint32_t *ret_index) {
    const float *share = field->rounded;

    if (need == 0)
        return 0;
    if (need < field->count) {
        struct cut cut = cut_of(share, field->count, need);
        if (cut.ties < cut.equal && cut.bits != 0) {
            part_ties(field, float_of(cut.bits));
            share = field->scratch;
            cut = cut_of(share, field->count, need);
        }
        return lk_vector_get()->emit(share, field->count, float_of(cut.bits), cut.ties, ret_index);
    }
    for (uint64_t j = 0; j < field->count; j++)
        ret_index[j] = (uint32_t)j;
    return field->count;
}

/* Better shares first; the lower page among equals. */
static bool before(const struct lk_rank *a, const struct lk_rank *b) {
    return a->share != b->share ? a->share > b->share : a->index < b->index;
}

/* Heap sort: in place, no recursion, the same time for any input. */
static void sort(struct lk_rank *key, uint64_t count) {
    for (uint64_t start = count / 2, end = count; end > 1;) {
        struct lk_rank held;
        uint64_t at;
        if (start > 0) {
            held = key[--start];
        } else {
            held = key[--end];
            key[end] = key[0];
        }
        for (at = start; 2 * at + 1 < end;) {
            uint64_t child = 2 * at + 1;
            child += child + 1 < end && before(&key[child], &key[child + 1]);
            if (!before(&held, &key[child]))
                break;
            key[at] = key[child];
            at = child;
        }
        key[at] = held;
    }
}

uint64_t lk_select_mass(const struct lk_field *field, uint32_t *index, uint64_t count, double sum,
                        double target, uint64_t least, struct lk_rank *scratch) {
    uint64_t taken = 0, kept = 0;

    for (uint64_t i = 0; i < count; i++)
        scratch[i] = (struct lk_rank){share_of(field, index[i]), index[i]};
    sort(scratch, count);
    while (taken < count && (taken < least || !(sum >= target)))
        sum += scratch[taken++].share;
    for (uint64_t i = 0; taken && i < count; i++) {
        struct lk_rank rank = {share_of(field, index[i]), index[i]};
        if (!before(&scratch[taken - 1], &rank))
            index[kept++] = index[i];
    }
    return kept;
}

struct lk_forced lk_select_forced(uint64_t k, uint32_t sink_pages, uint32_t recent_pages) {
    struct lk_forced forced = {.sink = sink_pages, .tail = 1};
    uint64_t recent = recent_pages ? recent_pages - 1 : 0;

    if (forced.sink > k - 1)
        forced.sink = k - 1;
    forced.tail += recent < k - 1 - forced.sink ? recent : k - 1 - forced.sink;
    return forced;
}
