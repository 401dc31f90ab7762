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

#define TOP_BIT 29   /* of a share's, which is at most 1 */
#define FILTER  4096 /* floats that a cut may hold beside the shares */

static inline float float_of(uint32_t bits) {
    float share;

    memcpy(&share, &bits, 4);
    return share;
}

void lk_share(const float *scores, uint64_t stride, uint32_t group, uint64_t count, double floor,
              double *share, float *powers) {
    const struct lk_vector *vector = lk_vector_get();
    double scale[LK_GROUP_MAX];

    for (uint32_t g = 0; g < group; g++) {
        const float *from = scores + g * stride;
        float *to = powers + g * stride;
        scale[g] = 1 / (vector->exp_sum(to, from, count, vector->largest(from, count)) * group);
    }
    const struct lk_powers all = {powers, stride, count, group, scale, floor};
    vector->shares(&all, share, powers); /* at most 1, though rounding may have gone above */
}

/* Where the best so many end: those above `bits`, and the first `ties` of the `equal` equal to it.
 */
struct cut {
    uint32_t bits;
    uint64_t ties, equal;
};

/* Of all: by bisection of the bits, one a round; ends sooner where a bound parts just so many. */
static struct cut bisect(const float *share, uint64_t count, uint64_t need) {
    const struct lk_vector *vector = lk_vector_get();
    struct cut cut = {0};
    uint64_t above = 0, from = count; /* better than cut; at least as good */

    for (uint32_t bit = 1u << TOP_BIT; bit; bit >>= 1) {
        uint64_t found = vector->at_least(share, count, float_of(cut.bits | bit));
        if (found == need)
            return (struct cut){.bits = (cut.bits | bit) - 1};
        if (found < need) {
            above = found;
        } else {
            from = found;
            cut.bits |= bit;
        }
    }
    cut.ties = need - above;
    cut.equal = from - above;
    return cut;
}

/* The need-th best of the columns' maxima is no better than the need-th best of all: what lies
 * below it need not be counted. */
static struct cut cut_of(const float *share, uint64_t count, uint64_t need) {
    const struct lk_vector *vector = lk_vector_get();
    float some[FILTER];
    uint64_t width = (2 * need + 63) / 64 * 64;

    if (width > FILTER || 2 * width > count)
        return bisect(share, count, need);
    vector->columns(share, count, (uint32_t)width, some);
    struct cut bound = bisect(some, width, need);
    uint64_t left = vector->pick(share, count, float_of(bound.bits), some, FILTER);
    if (left == need) /* any bound below parts these from nothing, but might let others in */
        return (struct cut){.bits = bound.bits - 1};
    return left == UINT64_MAX ? bisect(share, count, need) : bisect(some, left, need);
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
        return lk_vector_get()->emit(share, field->count, float_of(cut.bits), cut.ties, ret_index,
                                     need);
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
