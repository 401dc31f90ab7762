/* SPDX-License-Identifier: MIT */
/*
 * select.cu - from scores to shares, from shares to kept pages and the sample (DESIGN section 1);
 * and, as `prune`, the pages or superpages that a second pass scores again.
 *
 * Idea: a team of blocks (team.cuh) a (row, KV head). Each block holds a span of the row's pages in
 * its shared memory to the end; what the team must agree on is small: a histogram, counts, the
 * weight left in each span. Everything after the shares is integers, so that neither the number of
 * blocks nor any order of arrival shows in a result.
 *
 * Words: a page's share is a float in [0, 2), so its bits order it. SURE is set for sink, newest
 * and recent pages, and for those that equal the cut and are kept; NEVER for a page that does not
 * compete. As signed numbers, words above the cut are kept.
 *
 * Cut: the k-th largest word lies in a range of words, at first one where it is likely. Each block
 * counts its words in 128 bins of the range and adds the counts to every block's; the bin with the
 * k-th is the next range. That ends when a bin is kept whole or has few words: these, and what the
 * rest of a span sums up to, are sent to all, and every block finds the cut and what the others
 * keep by itself. Where equal words straddle the cut, pages are kept by what rounding left over,
 * then the lower ones; prune lists the lower ones.
 *
 * Sample: weights of the pages not kept, summed by 32 pages (a group), by a warp's groups (a run),
 * over the span, then over the team, give each stratum's point its span; eight lanes find its run,
 * group and page, 64 points a block at once, or a warp, which has less to do for a point, where
 * there are few. Unless a page may be hit twice, the points also say how many picks lower spans
 * have.
 *
 * What all warps need they work out each by itself: that costs less than a barrier.
 *
 * A span too long for shared memory has its words in the row's workspace.
 */
#include "clock.cuh"
#include "device.cuh"
#include "team.cuh"

#define THREADS     512
#define WARPS       (THREADS / 32)
#define BINS        128
#define ROUNDS      6     /* ranges of words: the first, or all others; then 7 bits less each */
#define FIRST_SHIFT 20    /* the first range's bins: an eighth of a power of two */
#define CUTS        2     /* found by a block at most: again for a mass target */
#define FEW         32    /* words that are sent to all: one a lane */
#define SPAN_LONG   32768 /* units held by a block alone on a multiprocessor, not by two */
#define FOURS_BITS  2u /* a warp's lanes have four words each in runs of so many groups or more */
#define HITS_SHARED LK_CUDA_SPAN_HITS
#define SHARE       0x3fffffff /* the bits of a word that are the share */
#define SURE        0x40000000
#define NEVER       ((int32_t)0x80000000)
#define SHARE_FLOOR 1e-30f
#define MARK        0x80000000u
#define NO_PAGE     0xffffffffu
#define TIE_MIDDLE  30
#define REST_LEAST  1e-3f /* what 1 less the kept is known of to a part in 2,000 */

struct select_args {
    struct lk_pool_view pool;
    const struct lk_cuda_batch *batch;
    struct lk_cuda_clock *clock; /* may be NULL */
    uint32_t team_inverse;       /* lk_cuda_inverse() of its size */
};

struct hit {
    uint32_t page; /* NO_PAGE: that of the hit before */
    float bias;
};

/* Where a span's values are: shared memory, or the row's workspace. */
struct view {
    int32_t *words;
    uint32_t *kept, *taken; /* masks of a group; taken: kept or hit */
    uint64_t *weight;       /* of a group's pages that are not kept */
    struct hit *hits;       /* by stratum; a warp keeps its first itself */
};

/* The pages (or, pruning superpages: units of four pages) of a block, and whatever is needed of its
 * row: the way to a row's descriptor is long and would be gone at every turn. In shared memory. */
struct span : lk_cuda_cut {
    uint32_t head, group, stride;
    uint32_t base, count;      /* first of its units, and their number */
    uint32_t groups, run_bits; /* groups of 32 units; log2 of those in a run */
    bool live, spills, fetch;  /* something to do; `spill` has the words; fetch pages to L2 */
    union {                    /* of the head, in the order of the row's offsets */
        uint8_t *place[LK_CUDA_OFFSETS];
        struct {
            float *scores;
            uint32_t *shares;
            const float2 *newest; /* and the parts behind it */
            uint8_t *spilled;
            struct lk_cuda_head *found;
            uint32_t *rescan;
            struct lk_cuda_pick *picks;
            void *partials;
        };
    };
    struct lk_page_weight *list;
    const uint32_t *table;
    struct view spill;
};

struct cut {
    int32_t word;  /* words above are kept */
    uint32_t ties; /* and so many that equal it */
};

/* Words above `high` are kept, those below `low` are not; of the `inside` ones between, `need`. */
struct bracket {
    int32_t high, low;
    uint32_t need, inside;
};

struct tally {
    uint64_t weight;
    uint32_t left, kept;
};
struct sums {                      /* of pages not kept; pages kept */
    struct tally before, own, all; /* in lower spans, in this, in the row */
    uint32_t most;                 /* no share of the row's pages that are not kept is larger */
};

struct shared {
    alignas(16) uint32_t bins[ROUNDS][BINS], all_bins[ROUNDS][BINS]; /* zero at first, with */
    uint32_t run_hits[WARPS];                                        /* pages hit, by run */
    uint4 peers[LK_TEAM_MOST];           /* of each block: weight, kept and few, most */
    uint32_t few[LK_TEAM_MOST][FEW + 4]; /* the blocks' words inside the bracket */
    alignas(16) uint32_t inside[FEW];    /* this block's */
    uint2 inside_at[FEW];                /* the page in the span, and its run */
    int32_t all_few[FEW + 4];            /* of the team, read by fours */
    uint32_t few_rank[FEW];              /* and from which block */
    uint32_t equal[LK_TEAM_MOST];
    alignas(16) uint32_t taken_by[LK_TEAM_MOST][WARPS]; /* pages hit */
    union {
        struct hit hits[HITS_SHARED];
        int32_t list[LK_CUDA_BUDGET_PAGES_MAX];
    };
    uint64_t run_weight[WARPS]; /* of the pages not kept; how many are kept; the largest share */
    uint32_t run_kept[WARPS], run_most[WARPS];
    uint64_t warp_weight[WARPS];
    /* Where words are equal: */
    double warp_sum[WARPS], part_sum[LK_TEAM_MOST][LK_GROUP_MAX], exact[LK_GROUP_MAX];
    uint32_t ones, zeros; /* bits that are so in what is left over of any of them */
    uint32_t warp_count[WARPS];
    alignas(16) float2 heads[WARPS][LK_GROUP_MAX + 4]; /* a warp's own; read by fours */
    float2 part[LK_GROUP_MAX];
    uint32_t listed, few_own[2 * CUTS];
    uint32_t agreed; /* pages to keep for the mass target */
    /* barriers: all_bins are here; peers and few, again where words are equal; taken_by */
    alignas(8) uint64_t bins_here[CUTS][ROUNDS], sums_here[2 * CUTS], places_here;
    struct sums sums; /* after a mass target */
    struct span span;
};
/* Behind it: so many units' words, their groups' sums and marks. */
template <uint32_t UNITS> struct held {
    alignas(16) int32_t words[UNITS];
    uint64_t weight[UNITS / 32];
    uint32_t kept[UNITS / 32], taken[UNITS / 32];
};
static_assert(LK_GROUP_MAX <= 32 && FEW <= 32, "a query head, and a word, a lane");
static_assert(WARPS == 16, "two runs for each of eight lanes");
static_assert(LK_CUDA_WARP_PAGES == 4 * 32, "four words a lane");

/* ---- the span ---- */

/* Words and the like of a span that shared memory cannot hold. */
__device__ __forceinline__ struct view use_workspace(const struct span &p) {
    const uint32_t pages = lk_cuda_spill_pages(p.units), first = p.base / 32;
    const uint32_t groups = pages / 32;
    uint8_t *at = p.spilled;
    struct view v;

    v.words = (int32_t *)at + p.base;
    at += pages * 4ull;
    v.weight = (uint64_t *)at + first;
    at += groups * 8ull;
    v.hits = (struct hit *)at;
    at += p.sampled * 8ull;
    v.kept = (uint32_t *)at + first;
    v.taken = v.kept + groups;
    return v;
}

/* HELD: units that shared memory has room for; 0: the span spills. */
template <uint32_t HELD> __device__ __forceinline__ struct view view_of(struct shared *s) {
    if constexpr (HELD == 0) {
        return s->span.spill;
    } else {
        struct held<HELD> *const h = (struct held<HELD> *)(s + 1);
        return {h->words, h->kept, h->taken, h->weight, s->hits};
    }
}

/* By one warp: all that it needs is on its way at once, a word or a pointer a lane. */
template <bool PRUNE, uint32_t HELD>
__device__ __forceinline__ void make_span(const struct select_args &a, struct span *p) {
    constexpr uint32_t words = sizeof(struct lk_cuda_cut) / 4;
    const uint32_t lane = threadIdx.x % 32, head = blockIdx.y;
    const struct lk_cuda_row *r = &a.batch->row[blockIdx.z];
    const struct lk_cuda_cut *cut = &r->cut[PRUNE];
    static_assert(words + LK_CUDA_OFFSETS + 2 <= 32, "a lane each");
    const bool is_word = lane < words, is_place = lane - words < LK_CUDA_OFFSETS;
    const uint32_t i = is_place ? lane - words : 0;

    const uint32_t rows = __ldcg(&a.batch->rows), units = __ldcg(&cut->units);
    const uint32_t fetch_rows = __ldcg(&cut->fetch_rows), sampled = __ldcg(&cut->sampled);
    const uint32_t step = __ldcg(&cut->step), listed_most = __ldcg(&cut->listed_most);
    const uint32_t word = __ldcg((const uint32_t *)cut + (is_word ? lane : 0));
    const uint32_t each = __ldcg(&r->head_bytes[i]);
    const uint64_t offset = __ldcg((const uint64_t *)&r->scores + i);
    uint8_t *const workspace = (uint8_t *)__ldcg((const uint64_t *)&r->workspace);
    const uint64_t list = __ldcg((const uint64_t *)&r->list);
    const uint64_t table = __ldcg((const uint64_t *)&r->table);

    const uint32_t size = team_size();
    const uint32_t even = lk_cuda_divide(units + size - 1, size, a.team_inverse);
    const bool spills = even > HELD || sampled > LK_CUDA_SPAN_HITS;
    const uint32_t most = spills ? lk_cuda_spill_pages(even) : (even + 31) / 32 * 32;
    const uint32_t base = min(most * team_rank(), units), count = min(most, units - base);
    const uint32_t groups = (count + 31) / 32;
    uint32_t run_bits = groups > WARPS ? 32 - __clz((groups - 1) / WARPS) : 0;

    if (PRUNE)
        run_bits = max(run_bits, FOURS_BITS);
    if (is_word)
        ((uint32_t *)p)[lane] = word;
    if (is_place)
        p->place[i] = workspace + offset + (uint64_t)head * each;
    if (lane == words + LK_CUDA_OFFSETS) {
        p->list = list ? (struct lk_page_weight *)list + (uint64_t)head * listed_most : NULL;
        p->table = (const uint32_t *)table;
    }
    if (lane == 31) {
        p->head = head;
        p->group = a.pool.geometry.group;
        p->stride = group_stride(p->group);
        p->base = base;
        p->count = count;
        p->groups = groups;
        p->run_bits = run_bits;
        p->live = blockIdx.z < rows && step;
        p->spills = spills;
        p->fetch = rows <= fetch_rows;
    }
    __syncwarp();
    if (spills && lane == 0)
        p->spill = use_workspace(*p);
}

/* floor(2^32 share) + 1. Multiplying by a power of two is exact. */
__device__ __forceinline__ uint64_t weight_of(int32_t word) {
    return (uint64_t)(__uint_as_float((uint32_t)word & SHARE) * 4294967296.f) + 1;
}

/* Whatever is read of the table later lies in L2 by then. */
__device__ __forceinline__ void fetch_table(const struct span &p) {
    const uint32_t entries = p.count * p.step >> p.shift;
    const uint32_t *from = p.table + (p.base * p.step >> p.shift);

#pragma unroll 1
    for (uint32_t i = 32 * threadIdx.x; i < entries; i += 32 * THREADS)
        prefetch_line(from + i);
}

__device__ __forceinline__ void fetch_page(const struct select_args &a, const struct span &p,
                                           uint32_t physical) {
    if (p.fetch)
        prefetch_bytes(lk_page_keys_device(a.pool, p.layer, physical, p.head),
                       (uint32_t)a.pool.layout.head_bytes);
}

/* ---- sums: all roundings are named, for the kernel's forms to have the same bits ---- */

/* warp_max() by one instruction: integers that order as the floats do. */
__device__ __forceinline__ float warp_peak(float x) {
    auto turn = [](int32_t bits) { return bits ^ (bits >> 31 & INT32_MAX); };
    return __int_as_float(turn(__reduce_max_sync(LK_FULL_WARP, turn(__float_as_int(x)))));
}

__device__ __forceinline__ float2 warp_merge(float2 x) {
    const float peak = warp_peak(x.x), base = peak == -INFINITY ? 0.f : peak;
    return make_float2(peak, warp_sum(__fmul_rn(x.y, exp2_fast(x.x - base))));
}

/* 1 / x for x >= 1, to the last bit or nearly so; without a branch, behind which a warp's lanes
 * would count as parted. */
__device__ __forceinline__ float inverse_of(float x) {
    const float y = __fdividef(1.f, x);
    return fmaf(y, fmaf(-x, y, 1.f), y);
}

/* By query head, from the parts that the last pass left: the largest score, and what 2^(score less
 * that) is multiplied by to be the head's part of a share. Not the sum's logarithm: where one page
 * has nearly all, that would round away what the others have. */
__device__ __forceinline__ void sum_parts(const struct span &p, struct shared *s) {
    const uint32_t lane = threadIdx.x % 32, warp = warp_index();
    const uint32_t count = p.parts, stride = p.stride;
    const float2 *newest = p.newest, *parts = newest + p.skip;
    const uint32_t bits = p.group > 8 ? 0 : p.group > 4 ? 1 : p.group > 2 ? 2 : 3;
    const uint32_t share = 1u << bits, items = p.group << bits; /* warps a query head; at most 32 */

#pragma unroll 1
    for (uint32_t item = warp; item < items; item += WARPS) {
        const uint32_t g = item >> bits, own = (item & (share - 1)) * 32 + lane;
        float2 sum = own == 0 ? __ldcg(&newest[g]) : make_float2(-INFINITY, 0.f);
#pragma unroll 1
        for (uint32_t i = own; i < count; i += 128 * share) {
            float2 v[4];
            float peak = sum.x, base;
#pragma unroll
            for (int x = 0; x < 4; x++) {
                v[x] = i + 32 * share * x < count
                           ? __ldcg(&parts[(i + 32 * share * x) * stride + g])
                           : make_float2(-INFINITY, 0.f);
            }
#pragma unroll
            for (int x = 0; x < 4; x++)
                peak = fmaxf(peak, v[x].x);
            base = peak == -INFINITY ? 0.f : peak;
            sum.y *= exp2_fast(sum.x - base);
#pragma unroll
            for (int x = 0; x < 4; x++)
                sum.y = fmaf(v[x].y, exp2_fast(v[x].x - base), sum.y);
            sum.x = peak;
        }
        sum = warp_merge(sum);
        if (lane == 0)
            s->part[item] = sum;
    }
    __syncthreads();
    float2 sum = lane < items ? s->part[lane] : make_float2(-INFINITY, 0.f);
    for (uint32_t o = 1; o < share; o <<= 1) {
        const float2 other = make_float2(__shfl_xor_sync(LK_FULL_WARP, sum.x, o),
                                         __shfl_xor_sync(LK_FULL_WARP, sum.y, o));
        const float peak = fmaxf(sum.x, other.x), base = peak == -INFINITY ? 0.f : peak;
        sum.y = fmaf(sum.y, exp2_fast(sum.x - base), __fmul_rn(other.y, exp2_fast(other.x - base)));
        sum.x = peak;
    }
    if (lane < items && lane % share == 0)
        s->heads[warp][lane >> bits] =
            make_float2(sum.x, inverse_of(__fmul_rn(sum.y, (float)p.group)));
    __syncwarp();
}

/* Sum over a warp modulo 2^64, in three parts that 32 bits hold. */
__device__ __forceinline__ uint64_t warp_add(uint64_t x) {
    const uint32_t mask = (1u << 26) - 1;
    const uint64_t low = __reduce_add_sync(LK_FULL_WARP, (uint32_t)x & mask);
    const uint64_t middle = __reduce_add_sync(LK_FULL_WARP, (uint32_t)(x >> 26) & mask);
    return low + (middle << 26) +
           ((uint64_t)__reduce_add_sync(LK_FULL_WARP, (uint32_t)(x >> 52)) << 52);
}

/* Of each LANES lanes: the sum of x up to this lane's. */
template <uint32_t LANES, class T> __device__ __forceinline__ T scan_lanes(T x) {
    const uint32_t lane = threadIdx.x % LANES;

#pragma unroll
    for (uint32_t o = 1; o < LANES; o <<= 1) {
        T y = __shfl_up_sync(LK_FULL_WARP, x, o);
        x += lane >= o ? y : 0;
    }
    return x;
}

/* Of each LANES lanes: the sum; the votes; the x of one of them. */
template <uint32_t LANES, class T> __device__ __forceinline__ T sum_lanes(T x) {
#pragma unroll
    for (uint32_t o = 1; o < LANES; o <<= 1)
        x += __shfl_xor_sync(LK_FULL_WARP, x, o);
    return x;
}
template <uint32_t LANES> __device__ __forceinline__ uint32_t ballot_lanes(bool x) {
    const uint32_t all = __ballot_sync(LK_FULL_WARP, x);
    return LANES == 32 ? all : all >> threadIdx.x % 32 / LANES * LANES & ((1ull << LANES) - 1);
}
template <uint32_t LANES, class T> __device__ __forceinline__ T from_lane(T x, uint32_t who) {
    return __shfl_sync(LK_FULL_WARP, x, threadIdx.x % 32 / LANES * LANES + who);
}

/* ---- shares ---- */

/* Head 0's without the bit that tags it. */
__device__ __forceinline__ float score_of(float tagged) {
    return __uint_as_float(__float_as_uint(tagged) & ~1u);
}
/* Query head g's of a unit, whose scores lie at `unit`. */
__device__ __forceinline__ float read_score(const float *unit, uint32_t g) {
    const float x = __ldcg(&unit[g]);
    return g ? x : score_of(x);
}

/* Four scores of up to two units, THREADS apart. */
__device__ __forceinline__ void load_scores(const float *from, uint32_t step, uint32_t i,
                                            uint32_t count, float4 v[2]) {
#pragma unroll
    for (int x = 0; x < 2; x++) {
        const uint32_t j = i + x * THREADS;
        if (j >= count)
            break;
        v[x] = __ldcg((const float4 *)(from + j * step));
    }
}

__device__ __forceinline__ bool is_forced(const struct span &p, uint32_t page) {
    return page < p.sink || page + p.tail >= p.units;
}

/* Least word of the first range. */
__device__ __forceinline__ int32_t first_low(const struct span &p) {
    return (int32_t)p.likely - (BINS << FIRST_SHIFT);
}

/* A unit's word, and its bin. `competes`: by its lowest bit. */
template <bool PRUNE>
__device__ __forceinline__ void store_word(struct shared *s, int32_t *to, int32_t low, float share,
                                           uint32_t competes, bool forced) {
    int32_t word = share >= SHARE_FLOOR ? (int32_t)__float_as_uint(fminf(share, 1.5f)) : 0;

    if (!PRUNE)
        word |= forced ? SURE : (int32_t)(~competes << 31);
    *to = word;
    if (word >= low && word <= SHARE)
        atomicAdd(&s->bins[0][min((word - low) >> FIRST_SHIFT, BINS - 1)], 1u);
}

/* Begins when the scores are there. */
template <bool PRUNE>
__device__ __forceinline__ void make_words(const struct span &p, struct shared *s, int32_t *words,
                                           struct lk_cuda_clock *clock) {
    const uint32_t count = p.count, group = p.group, base = p.base, sink = p.sink;
    const uint32_t tail = p.units - p.tail, step = p.step * p.stride;
    const float lift = PRUNE && p.step == 4 ? 2.f : 0.f;
    const float *from = p.scores + (uint64_t)base * step;
    const float2 *heads = s->heads[warp_index()];
    const int32_t low = first_low(p);
    uint32_t i = threadIdx.x, g = 0;
    float sum[2] = {0, 0};
    uint32_t competes[2];
    float4 next[2];

    wait_for_previous();
    note_time(clock, PRUNE ? LK_CUDA_AT_PRUNE : LK_CUDA_AT_SELECT);
    load_scores(from, step, i, count, next);
    fetch_table(p);
    sum_parts(p, s);
#pragma unroll 1
    while (i < count) {
        const uint32_t at = i, first = g;
        const float4 a = *(const float4 *)&heads[g], b = *(const float4 *)&heads[g + 2];
        float4 v[2];
#pragma unroll
        for (int x = 0; x < 2; x++)
            v[x] = next[x];
        g += 4;
        if (g >= group) {
            g = 0;
            i += 2 * THREADS;
        }
        load_scores(from + g, step, i, count, next);
#pragma unroll
        for (int x = 0; x < 2; x++) {
            const uint32_t j = at + x * THREADS;
            if (j >= count)
                break;
            if (first == 0) {
                competes[x] = __float_as_uint(v[x].x);
                v[x].x = score_of(v[x].x);
                sum[x] = 0;
            }
            sum[x] = fmaf(exp2_fast(v[x].x - (a.x - lift)), a.y, sum[x]);
            if (first + 1 < group)
                sum[x] = fmaf(exp2_fast(v[x].y - (a.z - lift)), a.w, sum[x]);
            if (first + 2 < group)
                sum[x] = fmaf(exp2_fast(v[x].z - (b.x - lift)), b.y, sum[x]);
            if (first + 3 < group)
                sum[x] = fmaf(exp2_fast(v[x].w - (b.z - lift)), b.w, sum[x]);
            if (g == 0)
                store_word<PRUNE>(s, &words[j], low, sum[x], competes[x],
                                  base + j < sink || base + j >= tail);
        }
    }
    if (threadIdx.x < -count % LK_CUDA_WARP_PAGES)
        words[count + threadIdx.x] = NEVER;
}

/* ---- the cut ---- */

__device__ __forceinline__ void clear_counts(struct shared *s, uint32_t first, uint32_t threads) {
    constexpr uint32_t bytes = sizeof s->bins + sizeof s->all_bins + sizeof s->run_hits;

#pragma unroll 1
    for (uint32_t i = first; i < bytes / 16; i += threads)
        ((uint4 *)s)[i] = make_uint4(0, 0, 0, 0);
}

struct bin {
    uint32_t number, above, inside; /* words in higher bins, in this */
    uint32_t all;
};

/* The team's counts of a round from its blocks'. -> where they are. */
__device__ __forceinline__ const uint32_t *add_counts(struct shared *s, uint32_t round,
                                                      uint64_t *here) {
    const uint32_t bin = threadIdx.x % BINS;

    __syncthreads();
    if (team_size() == 1)
        return s->bins[round];
    const uint32_t own = s->bins[round][bin];
#pragma unroll 1
    for (uint32_t rank = threadIdx.x / BINS; rank < team_size(); rank += THREADS / BINS)
        team_send_sum(&s->all_bins[round][bin], own, here, rank);
    team_receive(here);
    return s->all_bins[round];
}

/* The bin in which the need-th word from the top lies; none: .all < need. Each warp by itself. */
__device__ __forceinline__ struct bin find_bin(const uint32_t *counts, uint32_t need) {
    static_assert(BINS == 4 * 32, "four a lane");
    const uint32_t lane = threadIdx.x % 32;
    const uint4 x = *(const uint4 *)&counts[BINS - 4 - 4 * lane];
    const uint32_t upto = scan_lanes<32>(x.x + x.y + x.z + x.w);
    const uint32_t over = __ballot_sync(LK_FULL_WARP, upto >= need);
    struct bin own = {BINS - 4 - 4 * lane, upto - x.x, x.x, 0}, r;

    if (own.above >= need)
        own = {own.number + 1, own.above - x.y, x.y, 0};
    if (own.above >= need)
        own = {own.number + 1, own.above - x.z, x.z, 0};
    if (own.above >= need)
        own = {own.number + 1, own.above - x.w, x.w, 0};
    const uint32_t who = over ? __ffs(over) - 1 : 31;
    r.number = __shfl_sync(LK_FULL_WARP, own.number, who);
    r.above = __shfl_sync(LK_FULL_WARP, own.above, who);
    r.inside = __shfl_sync(LK_FULL_WARP, own.inside, who);
    r.all = __shfl_sync(LK_FULL_WARP, upto, 31);
    return r;
}

__device__ __forceinline__ struct bracket bracket_of(int32_t word) {
    return {word, word + 1, 0, 0};
}

/* Words from low to high, by bins 1 << shift wide. */
__device__ __forceinline__ void count_words(uint32_t *bins, const int32_t *words, uint32_t count,
                                            int32_t low, int32_t high, uint32_t shift) {
    auto add = [&](int32_t w) {
        if (w >= low && w <= high)
            atomicAdd(&bins[min((w - low) >> shift, BINS - 1)], 1u);
    };

#pragma unroll 2
    for (uint32_t i = 4 * threadIdx.x; i < count; i += 4 * THREADS) {
        const int4 x = *(const int4 *)&words[i];
        add(x.x), add(x.y), add(x.z), add(x.w);
    }
}

/* The bracket of the cut that leaves the best k of the team's words but the sure ones. More than
 * FEW inside: they are equal. nth: 0: the first range is counted. */
__device__ __forceinline__ struct bracket find_bracket(const struct span &p, struct shared *s,
                                                       const int32_t *words, uint32_t k,
                                                       uint32_t nth) {
    int32_t low = first_low(p), high = SHARE;
    uint32_t need = k, shift = FIRST_SHIFT;

    if (k == 0)
        return bracket_of(SHARE);
#pragma unroll 1
    for (uint32_t round = 0;; round++) {
        if (round || nth)
            count_words(s->bins[round], words, p.count, low, high, shift);
        const struct bin f = find_bin(add_counts(s, round, &s->bins_here[nth][round]), need);
        if (f.all < need) {
            if (round) /* nothing else competes */
                return bracket_of(-1);
            need -= f.all;
            high = low - 1;
            low = 0;
        } else {
            need -= f.above;
            low += (int32_t)(f.number << shift);
            if (round || f.number < BINS - 1) /* the first range's last bin has all above */
                high = min(high, low + (int32_t)(1u << shift) - 1);
            if (f.inside == need)
                return bracket_of(low - 1);
            if (f.inside <= FEW || low == high)
                return {high, low, need, f.inside};
        }
        shift = max(25 - __clz(high - low), 0); /* 7 bits of those in which it may differ */
    }
}

/* Bits of the masks of the first `groups` groups. Each warp by itself. */
__device__ __forceinline__ uint32_t count_masks(const uint32_t *masks, uint32_t groups) {
    uint32_t own = 0;

#pragma unroll 1
    for (uint32_t g = threadIdx.x % 32; g < groups; g += 32)
        own += __popc(masks[g]);
    return __reduce_add_sync(LK_FULL_WARP, own);
}

/* Groups from first up to end: the warp's run; its part of all, where runs are few. */
struct run {
    uint32_t first, end;
};
__device__ __forceinline__ struct run part_of(const struct span &p) {
    const uint32_t most = (p.groups + WARPS - 1) / WARPS;
    const uint32_t first = min(p.groups, warp_index() * most);
    return {first, min(p.groups, first + most)};
}
__device__ __forceinline__ struct run run_of(const struct span &p) {
    const uint32_t first = min(p.groups, warp_index() << p.run_bits);
    return {first, min(p.groups, first + (1u << p.run_bits))};
}

/* Of all threads' x, in one order. `warps`: room for a number a warp. */
template <class T> static __device__ __noinline__ T block_sum(T *warps, T x) {
#pragma unroll
    for (int o = 16; o; o >>= 1)
        x += __shfl_xor_sync(LK_FULL_WARP, x, o);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (int i = 0; i < WARPS; i++)
        x += warps[i];
    return x;
}

/* ---- ties at the cut: rare, so small rather than fast ---- */

/* The team's sum of words, one a thread. */
__device__ __forceinline__ uint32_t team_total(struct shared *s, uint32_t x) {
    const uint32_t own = block_sum(s->warp_count, x);

    if (threadIdx.x < team_size())
        team_put(team_address(&s->equal[team_rank()], threadIdx.x), own);
    team_barrier();
    x = 0;
    for (uint32_t i = 0; i < team_size(); i++)
        x += s->equal[i];
    team_barrier();
    return x;
}

/* s->exact: by query head, what 2^(score - peak) is multiplied by, in float64. Units are summed in
 * parts that the row alone decides, and these in one order, for the team's size not to show. */
__device__ __forceinline__ void weigh_heads(const struct span &p, struct shared *s) {
    const uint32_t units = p.units - 1;
    const uint32_t each = max((units + LK_TEAM_MOST - 1) / LK_TEAM_MOST, (uint32_t)THREADS);
    const uint32_t parts = (units + each - 1) / each;

#pragma unroll 1
    for (uint32_t part = team_rank(); part < parts; part += team_size())
#pragma unroll 1
        for (uint32_t g = 0; g < p.group; g++) {
            const float peak = s->heads[0][g].x;
            const uint32_t end = min(units, (part + 1) * each);
            double sum = 0;
#pragma unroll 4
            for (uint32_t i = part * each + threadIdx.x; i < end; i += THREADS)
                sum += (double)exp2_fast(read_score(p.scores + (uint64_t)i * p.stride, g) - peak);
            sum = block_sum(s->warp_sum, sum);
            if (threadIdx.x < team_size()) {
                const uint32_t to = team_address(&s->part_sum[part][g], threadIdx.x);
                const uint2 bits = *(const uint2 *)&sum;
                team_put(to, bits.x);
                team_put(to + 4, bits.y);
            }
        }
    team_barrier();
    if (threadIdx.x < p.group) {
        const uint32_t g = threadIdx.x;
        const float2 newest = __ldcg(&p.newest[g]);
        double sum = 0;
        for (uint32_t part = 0; part < parts; part++)
            sum += s->part_sum[part][g];
        sum += (double)newest.y * (double)exp2_fast(newest.x - s->heads[0][g].x);
        s->exact[g] = 1 / (sum * p.group);
    }
    __syncthreads();
}

/* What rounding to the float `share` left over of a unit's share, to 2^-50 of it: 2^TIE_MIDDLE if
 * nothing, and rounded, for units alike not to be told apart by float64's own noise. Units' float
 * shares are off by a few of their last bits. */
__device__ __forceinline__ uint32_t left_over(const struct span &p, const struct shared *s,
                                              uint32_t i, float share) {
    const float *from = p.scores + (uint64_t)(p.base + i) * p.stride;
    double sum = 0;

    for (uint32_t g = 0; g < p.group; g++)
        sum += (double)exp2_fast(read_score(from, g) - s->heads[0][g].x) * s->exact[g];
    sum = (sum / (double)share - 1) * 0x1p50 + (double)(1u << TIE_MIDDLE) + 0.5;
    return (uint32_t)fmin(fmax(sum, 0.), (double)UINT32_MAX);
}

/* Of the units whose word is the cut: *least: what is left over of the last that is marked; -> how
 * many of those with just that are. What is left over goes to p.shares, which is not needed yet. */
__device__ __forceinline__ uint32_t rank_ties(const struct span &p, struct shared *s,
                                              const int32_t *words, struct cut cut,
                                              uint32_t *least) {
    uint32_t *const over = p.shares + p.base;
    uint32_t low, above = 0; /* so many are above all that low may become */
    uint32_t ones = 0, zeros = 0;

    weigh_heads(p, s);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < p.count; i += THREADS)
        if (words[i] == cut.word) {
            const uint32_t left = left_over(p, s, i, __uint_as_float((uint32_t)cut.word));
            over[i] = left;
            ones |= left;
            zeros |= ~left;
        }
    ones = __reduce_or_sync(LK_FULL_WARP, ones);
    zeros = __reduce_or_sync(LK_FULL_WARP, zeros);
    if (threadIdx.x % 32 < team_size()) {
        team_or(team_address(&s->ones, threadIdx.x % 32), ones);
        team_or(team_address(&s->zeros, threadIdx.x % 32), zeros);
    }
    team_barrier();
    const uint32_t differ = s->ones & s->zeros;
    low = s->ones & ~differ; /* alike pages differ in nothing */
#pragma unroll 1
    for (uint32_t bit, bits = differ; bits; bits -= bit) {
        uint32_t own = 0;
        bit = 1u << (31 - __clz(bits));
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i < p.count; i += THREADS)
            own += words[i] == cut.word && over[i] >= (low | bit);
        const uint32_t all = team_total(s, own);
        if (all >= cut.ties)
            low |= bit;
        else
            above = all;
    }
    *least = low;
    return cut.ties - above;
}

/* Mark the best cut.ties of the units whose word is the cut: by what rounding left over, where it
 * is pages that are kept, then the first. */
template <bool PRUNE, uint32_t HELD>
static __device__ __noinline__ void mark_ties(const struct span &p, struct shared *s,
                                              struct cut cut) {
    const struct view v = view_of<HELD>(s);
    const uint32_t lane = threadIdx.x % 32;
    const struct run own = run_of(p);
    const uint32_t *over = p.shares + p.base;
    const bool ranked = !PRUNE && cut.word;
    uint32_t least = 0;

    if (ranked)
        cut.ties = rank_ties(p, s, v.words, cut, &least);
    for (uint32_t g = own.first; g < own.end; g++) {
        const uint32_t i = 32 * g + lane;
        const bool tied = i < p.count && v.words[i] == cut.word;
        const uint32_t left = tied && ranked ? over[i] : 0;
        const uint32_t equal = __ballot_sync(LK_FULL_WARP, tied && left == least);
        if (left > least)
            v.words[i] |= SURE;
        if (lane == 0)
            v.taken[g] = equal;
    }
    __syncthreads();
    const uint32_t all = count_masks(v.taken, p.groups);
    uint32_t at = count_masks(v.taken, own.first);
    if (threadIdx.x < team_size())
        team_put(team_address(&s->equal[team_rank()], threadIdx.x), all);
    team_barrier();
    for (uint32_t i = 0; i < team_rank(); i++)
        at += s->equal[i];
    for (uint32_t g = own.first; g < own.end; g++) {
        const uint32_t equal = v.taken[g], below = equal & ((1u << lane) - 1);
        if (equal >> lane & 1 && at + __popc(below) < cut.ties)
            v.words[32 * g + lane] |= SURE;
        at += __popc(equal);
    }
    __syncthreads();
}

/* ---- what the cut leaves ---- */

/* A lane's words, and its units' shares. */
template <uint32_t EACH>
__device__ __forceinline__ void load_words(const int32_t *from, int32_t to[EACH]) {
    if constexpr (EACH == 4) {
        const int4 w = *(const int4 *)from;
        to[0] = w.x, to[1] = w.y, to[2] = w.z, to[3] = w.w;
    } else {
        to[0] = *from;
    }
}
template <uint32_t EACH>
__device__ __forceinline__ void store_shares(uint32_t *to, const int32_t word[EACH],
                                             uint32_t kept) {
    auto share = [&](uint32_t x) { return ((uint32_t)word[x] & SHARE) | kept >> x << 31; };

    if constexpr (EACH == 4)
        *(uint4 *)to = make_uint4(share(0), share(1), share(2), share(3));
    else
        *to = share(0);
}

/* Which of a lane's words, of unit i and those after it in the warp's run, are above the bracket:
 * bits; those inside it are listed. */
template <uint32_t EACH>
__device__ __forceinline__ uint32_t sort_words(struct shared *s, const struct bracket &b,
                                               const int32_t word[EACH], uint32_t i, uint32_t run,
                                               uint32_t *few) {
    uint32_t kept = 0;

#pragma unroll
    for (uint32_t x = 0; x < EACH; x++) {
        if (word[x] > b.high) {
            kept |= 1u << x;
        } else if (word[x] >= b.low) {
            const uint32_t at = atomicAdd(few, 1u);
            s->inside[at] = word[x];
            s->inside_at[at] = make_uint2(i + x, run);
        }
    }
    return kept;
}

/* mark_kept() by EACH words a lane. */
template <bool PRUNE, uint32_t EACH>
__device__ __forceinline__ void mark_words(const struct span &p, struct shared *s,
                                           const struct view &v, const struct bracket &b,
                                           uint32_t *few) {
    constexpr uint32_t lanes = 32 / EACH; /* that have a group */
    const uint32_t lane = threadIdx.x % 32, warp = warp_index(), count = p.count;
    const struct run own = run_of(p);
    uint32_t most = 0, kept_count = 0;
    uint64_t weight = 0;
    uint32_t *shares = PRUNE ? NULL : p.shares + p.base;
    const bool sampled = p.sampled;

#pragma unroll 1
    for (uint32_t g = own.first; g < own.end; g += EACH) {
        const uint32_t i = 32 * g + EACH * lane, to = g + lane / lanes;
        int32_t word[EACH], peak = NEVER;
        uint32_t kept = 0, mask = 0;

        load_words<EACH>(&v.words[i], word);
#pragma unroll
        for (uint32_t x = 0; x < EACH; x++)
            peak = max(peak, word[x]);
        if (__any_sync(LK_FULL_WARP, peak >= b.low)) {
            kept = sort_words<EACH>(s, b, word, i, warp, few);
            mask = EACH == 1 ? __ballot_sync(LK_FULL_WARP, kept)
                             : sum_lanes<lanes>(kept << EACH * (lane % lanes));
            kept_count += __popc(kept);
        }
        if (sampled) {
            uint64_t sum = 0; /* less those of words beyond the span, 1 each */
#pragma unroll
            for (uint32_t x = 0; x < EACH; x++)
                if (!(kept >> x & 1)) {
                    sum += weight_of(word[x]);
                    most = max(most, (uint32_t)word[x] & SHARE);
                }
            sum -= min(max(i + EACH, count) - count, EACH);
            weight += sum;
            sum = EACH == 1 ? warp_add(sum) : sum_lanes<lanes>(sum);
            if (lane % lanes == 0)
                v.weight[to] = sum;
        }
        if (!PRUNE && i < count)
            store_shares<EACH>(&shares[i], word, kept);
        if (lane % lanes == 0)
            v.kept[to] = v.taken[to] = mask;
    }
    weight = warp_add(weight);
    most = __reduce_max_sync(LK_FULL_WARP, most);
    kept_count = __reduce_add_sync(LK_FULL_WARP, kept_count);
    if (lane == 0) {
        s->run_weight[warp] = weight;
        s->run_kept[warp] = kept_count;
        s->run_most[warp] = most;
    }
    __syncthreads();
}

/* Masks of the kept pages; weights of the others, those inside the bracket with them, which are
 * listed, *few; by run, what there is of them. And the shares are written. */
template <bool PRUNE>
__device__ __forceinline__ void mark_kept(const struct span &p, struct shared *s,
                                          const struct view &v, const struct bracket &b,
                                          uint32_t *few) {
    if (!PRUNE && p.run_bits < FOURS_BITS) /* a lane has a word or two in all */
        mark_words<PRUNE, 1>(p, s, v, b, few);
    else
        mark_words<PRUNE, 4>(p, s, v, b, few);
}

/* What mark_kept() found -> to all blocks of the team: s->peers, s->few. */
__device__ __forceinline__ void send_sums(struct shared *s, uint32_t inside, uint32_t few,
                                          uint64_t *here) {
    const uint32_t lane = threadIdx.x % 32, warp = warp_index(), quads = (inside + 3) / 4;

    if (threadIdx.x == 0)
        team_expect(here, team_size() * 16 * (1 + quads));
#pragma unroll 1
    for (uint32_t rank = warp; rank < team_size(); rank += WARPS) {
        const bool in = lane < WARPS;
        const uint64_t weight = warp_add(in ? s->run_weight[lane] : 0);
        const uint32_t kept = __reduce_add_sync(LK_FULL_WARP, in ? s->run_kept[lane] : 0);
        const uint32_t most = __reduce_max_sync(LK_FULL_WARP, in ? s->run_most[lane] : 0);
        if (lane == 0)
            team_send(&s->peers[team_rank()],
                      make_uint4((uint32_t)weight, (uint32_t)(weight >> 32), kept << 8 | few, most),
                      here, rank);
        if (lane < quads)
            team_send(&s->few[team_rank()][4 * lane], *(const uint4 *)&s->inside[4 * lane], here,
                      rank);
    }
    team_receive(here);
}

/* The blocks' words inside the bracket, by rank: s->all_few, filled up to fours. */
__device__ __forceinline__ void gather_few(struct shared *s, uint32_t inside, uint32_t few) {
    const uint32_t lane = threadIdx.x % 32, warp = warp_index();

#pragma unroll 1
    for (uint32_t rank = warp; rank < team_size(); rank += WARPS) {
        const uint32_t first = __reduce_add_sync(LK_FULL_WARP, lane < rank ? few : 0);
        const uint32_t own = __shfl_sync(LK_FULL_WARP, few, rank);
        if (lane < own) {
            s->all_few[first + lane] = (int32_t)s->few[rank][lane];
            s->few_rank[first + lane] = rank;
        }
    }
    if (threadIdx.x < 4)
        s->all_few[inside + threadIdx.x] = -1;
    __syncthreads();
}

/* Each warp by itself. */
__device__ __forceinline__ struct cut choose_cut(const struct shared *s, const struct bracket &b) {
    const uint32_t lane = threadIdx.x % 32;
    const int32_t own = lane < b.inside ? s->all_few[lane] : -1;
    uint32_t least = (b.inside + 3) / 4 * 4; /* words that are not below own */

#pragma unroll 2
    for (uint32_t i = 0; i < b.inside; i += 4) {
        const int4 v = *(const int4 *)&s->all_few[i];
        least -= (uint32_t)(v.x - own) >> 31;
        least -= (uint32_t)(v.y - own) >> 31;
        least -= (uint32_t)(v.z - own) >> 31;
        least -= (uint32_t)(v.w - own) >> 31;
    }
    const bool kept = lane < b.inside && least <= b.need;
    const int32_t word = __reduce_max_sync(LK_FULL_WARP, kept ? -1 : own);
    return {word, b.need - __popc(__ballot_sync(LK_FULL_WARP, kept))};
}

/* Sums over the spans: what their blocks sent, less the kept ones of those inside. */
__device__ __forceinline__ struct sums add_sums(const struct span &p, const struct shared *s,
                                                const struct bracket &b, int32_t cut) {
    const uint32_t lane = threadIdx.x % 32, rank = team_rank();
    const uint4 x = lane < team_size() ? s->peers[lane] : make_uint4(0, 0, 0, 0);
    const int32_t word = lane < b.inside ? s->all_few[lane] : -1;
    const bool kept = lane < b.inside && word > cut;
    const uint32_t from = kept ? s->few_rank[lane] : LK_TEAM_MOST;
    const uint64_t weight = (uint64_t)x.y << 32 | x.x, less = kept ? weight_of(word) : 0;
    struct sums r = {};
    auto add = [&](struct tally *to, bool peer, bool of_word) {
        to->kept = __reduce_add_sync(LK_FULL_WARP, peer ? x.z >> 8 : 0) +
                   __popc(__ballot_sync(LK_FULL_WARP, kept && of_word));
        if (p.sampled)
            to->weight = warp_add((peer ? weight : 0) - (of_word ? less : 0));
    };

    add(&r.all, true, true);
    add(&r.own, lane == rank, from == rank);
    add(&r.before, lane < rank, from < rank);
    r.all.left = p.units - r.all.kept;
    r.before.left = p.base - r.before.kept;
    r.own.left = p.count - r.own.kept;
    if (p.sampled)
        r.most = __reduce_max_sync(LK_FULL_WARP, x.w);
    return r;
}

/* Now it is known which of the span's pages inside the bracket are kept. */
template <bool PRUNE>
__device__ __forceinline__ void settle_kept(const struct span &p, struct shared *s,
                                            const struct view &v, int32_t cut) {
    const uint32_t few = s->peers[team_rank()].z & 255;

    if (threadIdx.x < few && (int32_t)s->inside[threadIdx.x] > cut) {
        const uint32_t at = s->inside_at[threadIdx.x].x, run = s->inside_at[threadIdx.x].y;
        const uint32_t word = s->inside[threadIdx.x], bit = 1u << at % 32;
        atomicOr(&v.kept[at / 32], bit);
        atomicOr(&v.taken[at / 32], bit);
        atomicAdd(&s->run_kept[run], 1u);
        if (!PRUNE)
            p.shares[p.base + at] = word | MARK;
        if (p.sampled) {
            const unsigned long long less = 0ull - weight_of((int32_t)word);
            atomicAdd((unsigned long long *)&v.weight[at / 32], less);
            atomicAdd((unsigned long long *)&s->run_weight[run], less);
        }
    }
}

/* Keep the best k but the sure ones: masks and weights of the span's pages, and their sums. The
 * block's nth cut. */
template <bool PRUNE, uint32_t HELD>
__device__ __forceinline__ struct cut cut_pages(const struct span &p, struct shared *s, uint32_t k,
                                                uint32_t nth, struct sums *sums) {
    const struct view v = view_of<HELD>(s);
    struct bracket b = find_bracket(p, s, v.words, k, nth);
    struct cut cut = {b.high, 0};
    const uint32_t lane = threadIdx.x % 32;

    if (b.inside > FEW) {
        mark_ties<PRUNE, HELD>(p, s, {b.high, b.need});
        b = bracket_of(b.high);
    }
#pragma unroll 1
    for (uint32_t use = 2 * nth;; use++) {
        mark_kept<PRUNE>(p, s, v, b, &s->few_own[use]);
        send_sums(s, b.inside, s->few_own[use], &s->sums_here[use]);
        if (!b.inside)
            break;
        gather_few(s, b.inside, lane < team_size() ? s->peers[lane].z & 255 : 0);
        cut = choose_cut(s, b);
        if (!cut.ties)
            break;
        mark_ties<PRUNE, HELD>(p, s, cut);
        cut.ties = 0;
        b = bracket_of(cut.word);
    }
    if (b.inside)
        settle_kept<PRUNE>(p, s, v, cut.word);
    *sums = add_sums(p, s, b, cut.word);
    __syncthreads();
    return cut;
}

/* ---- a mass target ---- */

__device__ __forceinline__ uint64_t fixed_share(uint32_t bits) { /* in 2^-60 */
    return (uint64_t)((double)__uint_as_float(bits & SHARE) * 1152921504606846976.);
}

/* How many of the pages kept, best first and forced ones before, reach the target. By the block
 * that holds the others' words in s->list, forced ones as SURE. */
__device__ uint32_t count_for_target(const struct span &p, struct shared *s) {
    const uint64_t target = (uint64_t)((double)p.mass_target * 1152921504606846976.);
    const uint32_t listed = s->listed;
    uint32_t word = 0, count = 0, extra = 0;
    auto sum_from = [&](uint32_t least) {
        uint64_t x = 0;
        for (uint32_t i = threadIdx.x; i < listed; i += THREADS)
            x += (uint32_t)s->list[i] >= least ? fixed_share((uint32_t)s->list[i]) : 0;
        return block_sum(s->warp_weight, x);
    };

    if (sum_from(0) < target)
        return listed;
    for (uint32_t bit = SURE; bit; bit >>= 1) /* the largest word from which it is reached */
        if (sum_from(word | bit) >= target)
            word |= bit;
    if (word >= SURE)
        return p.sink + p.tail;
    const uint64_t above = sum_from(word + 1);
    for (uint32_t i = threadIdx.x; i < listed; i += THREADS)
        count += (uint32_t)s->list[i] > word;
    if (fixed_share(word))
        extra = (uint32_t)((target - above + fixed_share(word) - 1) / fixed_share(word));
    return block_sum(s->warp_count, count) + extra;
}

/* Cut again where the mass target needs fewer pages. */
template <uint32_t HELD>
static __device__ __noinline__ void apply_target(const struct span &p, struct shared *s,
                                                 struct cut cut) {
    const uint32_t list = team_address(s->list, 0), listed = team_address(&s->listed, 0);
    int32_t *words = view_of<HELD>(s).words;

    for (uint32_t i = threadIdx.x; i < p.count; i += THREADS) {
        int32_t w = words[i];
        if (w <= cut.word)
            continue;
        if (!is_forced(p, p.base + i))
            words[i] = w &= SHARE;
        uint32_t at = team_add(listed, 1);
        if (at < LK_CUDA_BUDGET_PAGES_MAX)
            team_put(list + 4 * at, (uint32_t)w);
    }
    team_barrier();
    if (team_rank() == 0) {
        const uint32_t k = max(count_for_target(p, s), (uint32_t)LK_MASS_PAGES_MIN);
        if (threadIdx.x < team_size()) /* told, not asked for: this block might have left */
            team_put(team_address(&s->agreed, threadIdx.x), min(k, p.k));
    }
    clear_counts(s, threadIdx.x, THREADS);
    team_barrier();
    struct sums sums;
    cut_pages<false, HELD>(p, s, s->agreed - p.sink - p.tail, 1, &sums);
    if (threadIdx.x == 0)
        s->sums = sums;
    __syncthreads();
}

/* ---- the sample ---- */

struct strata {
    uint64_t by_page, total, step, start;
    uint32_t by_share, count;
    bool apart; /* no page is hit twice */
};

__device__ __forceinline__ struct strata make_strata(const struct span &p, const struct sums &u) {
    struct strata t;
    const uint32_t left = u.all.left;

    if (left <= p.sampled) /* every page, weight 1 */
        t = {1, left, 0, 0, 0, left, true};
    else
        t = {u.all.weight, 20ull * left * u.all.weight, 0, 0, 19 * left, p.sampled, false};
    if (t.count & (t.count - 1))
        t.step = t.total / t.count;
    else
        t.step = t.total >> (31 - __clz(t.count));
    t.start = t.step / 2;
    t.apart |= t.by_share * weight_of((int32_t)u.most) + t.by_page <= t.step;
    return t;
}

/* The strata whose points lie in the span, from first up to end. */
struct drawn {
    uint32_t first, end;
};

__device__ __forceinline__ struct drawn find_strata(const struct sums &u, const struct strata &t) {
    const uint64_t lo = t.by_share * u.before.weight + t.by_page * u.before.left;
    const uint64_t hi = lo + t.by_share * u.own.weight + t.by_page * u.own.left;
    struct drawn r = {0, 0};

#pragma unroll 1
    for (uint32_t first = 0; first < t.count; first += 32) {
        const uint32_t i = first + threadIdx.x % 32;
        const uint64_t point = i * t.step + t.start;
        r.first += __popc(__ballot_sync(LK_FULL_WARP, i < t.count && point < lo));
        r.end += __popc(__ballot_sync(LK_FULL_WARP, i < t.count && point < hi));
    }
    return r;
}

/* Of run lane % WARPS: its sum, and the row's up to its end. */
struct milestone {
    uint64_t own, upto;
};

__device__ __forceinline__ struct milestone sum_runs(const struct span &p, const struct shared *s,
                                                     const struct strata &t,
                                                     const struct tally &lower) {
    const uint32_t run = threadIdx.x % WARPS, each = 32u << p.run_bits;
    const uint32_t units = min(p.count, (run + 1) * each) - min(p.count, run * each);
    const uint64_t own = t.by_share * s->run_weight[run] + t.by_page * (units - s->run_kept[run]);

    return {own, scan_lanes<WARPS>(own) + t.by_share * lower.weight + t.by_page * lower.left};
}

/* A page of the sample. */
struct found {
    uint32_t unit, entry; /* in the span; of the block table */
    float bias;
    bool mine; /* the page is the lane's; of no lane: that of the hit before */
};

/* LANES lanes look for stratum i's point among the span's pages: v.taken, s->run_hits. `wanted`:
 * there is one. */
template <uint32_t LANES>
__device__ __forceinline__ struct found
find_hit(const struct span &p, struct shared *s, const struct view &v, const struct strata &t,
         const struct milestone &m, uint32_t i, bool wanted) {
    constexpr uint32_t each = 32 / LANES; /* units of a group, a lane */
    const uint32_t lane = threadIdx.x % LANES;
    const uint64_t point = i * t.step + t.start;
    uint32_t over = 0;
#pragma unroll
    for (uint32_t run = 0; run < WARPS; run += LANES) {
        const uint64_t upto = __shfl_sync(LK_FULL_WARP, m.upto, run + lane);
        over |= ballot_lanes<LANES>(upto > point) << run;
    }
    const uint32_t run = wanted ? __ffs(over) - 1 : 0;
    uint64_t sum = __shfl_sync(LK_FULL_WARP, m.upto - m.own, run), own, upto;
    uint32_t g = run << p.run_bits;
    const uint32_t end = min(p.groups, g + (1u << p.run_bits));

#pragma unroll 1
    for (bool done = !wanted; !__all_sync(LK_FULL_WARP, done);) {
        own = 0;
        if (g + lane < end)
            own = t.by_share * v.weight[g + lane] +
                  t.by_page * (min(32u, p.count - 32 * (g + lane)) - __popc(v.kept[g + lane]));
        upto = scan_lanes<LANES>(own) + sum;
        over = ballot_lanes<LANES>(upto > point);
        const uint32_t who = over ? __ffs(over) - 1 : LANES - 1;
        const uint64_t before = from_lane<LANES>(over ? upto - own : upto, who);
        if (!done) {
            sum = before;
            g += over ? who : LANES;
            done = over;
        }
    }
    struct found r = {32 * g + each * lane, 0, 0, false};
    const uint32_t kept = v.kept[g] >> each * lane;
    uint64_t weight[each];
    own = 0;
#pragma unroll
    for (uint32_t x = 0; x < each; x++) {
        const bool counts = !(kept >> x & 1) && r.unit + x < p.count;
        weight[x] = counts ? t.by_share * weight_of(v.words[r.unit + x]) + t.by_page : 0;
        own += weight[x];
    }
    upto = scan_lanes<LANES>(own) + sum;
    over = ballot_lanes<LANES>(upto > point);
    sum = upto - own;
    own = weight[0];
#pragma unroll
    for (uint32_t x = 1; x < each; x++)
        if (sum + own <= point) {
            sum += own;
            own = weight[x];
            r.unit = 32 * g + each * lane + x;
        }
    if (!wanted || lane != __ffs(over) - 1 || (i && point - t.step >= sum))
        return r;
    r.entry = p.table[(p.base + r.unit) >> p.shift];
    uint32_t hits = 1;
    while (i + hits < t.count && point + hits * t.step < sum + own)
        hits++;
    const float expected = __ull2float_rn(own) * t.count;
    const float hit = __fdividef((float)hits * __ull2float_rn(t.total), expected);
    r.bias = t.by_share ? log2f(hit) : 0.f;
    r.mine = true;
    atomicOr(&v.taken[g], 1u << r.unit % 32);
    atomicAdd(&s->run_hits[run], 1u);
    return r;
}

/* The stratum of the lane's LANES: the block has at_once<LANES> from `first` at once. */
template <uint32_t LANES> constexpr uint32_t at_once = THREADS / LANES;
template <uint32_t LANES>
__device__ __forceinline__ uint32_t stratum_of(uint32_t first, uint32_t warp) {
    return first + warp + threadIdx.x % 32 / LANES * WARPS;
}

/* -> the first of the lane's LANES; the others are v.hits. *pages: of the warp. */
template <uint32_t LANES>
__device__ __forceinline__ struct found
find_hits(const struct span &p, struct shared *s, const struct view &v, const struct strata &t,
          const struct milestone &m, const struct drawn &d, uint32_t *pages) {
    const uint32_t warp = warp_index();
    struct found r = {};

#pragma unroll 1
    for (uint32_t first = d.first; first + warp < d.end; first += at_once<LANES>) {
        const uint32_t i = stratum_of<LANES>(first, warp);
        const struct found h = find_hit<LANES>(p, s, v, t, m, i, i < d.end);
        const bool any = ballot_lanes<LANES>(h.mine);
        *pages += __popc(__ballot_sync(LK_FULL_WARP, h.mine));
        if (first == d.first)
            r = h;
        else if (i < d.end && (any ? h.mine : threadIdx.x % LANES == 0))
            v.hits[i] = {any ? p.base + h.unit : NO_PAGE, h.bias};
    }
    return r;
}

/* -> the first of the lane's eight, or of the warp; the others are v.hits. Where a page may be hit
 * twice, all blocks are told how many the warp has. */
__device__ __forceinline__ struct found draw(const struct span &p, struct shared *s,
                                             const struct view &v, const struct tally &lower,
                                             const struct strata &t, const struct drawn &d) {
    const uint32_t lane = threadIdx.x % 32, warp = warp_index();
    struct found r = {};
    uint32_t pages = 0;

    if (d.first + warp < d.end) {
        const struct milestone m = sum_runs(p, s, t, lower);
        r = d.end - d.first <= WARPS ? find_hits<32>(p, s, v, t, m, d, &pages)
                                     : find_hits<8>(p, s, v, t, m, d, &pages);
    }
    if (!t.apart && lane < team_size())
        team_send_word(&s->taken_by[team_rank()][warp], pages, &s->places_here, lane);
    __syncthreads();
    return r;
}

/* Picks of lower spans, and of the row. */
struct places {
    uint32_t before, all;
};

/* All threads. */
__device__ __forceinline__ struct places add_places(struct shared *s, const struct sums &u,
                                                    const struct strata &t, const struct drawn &d) {
    const uint32_t lane = threadIdx.x % 32, before = u.before.kept, all = u.all.kept;

    if (t.apart)
        return {before + d.first, all + t.count};
    team_receive(&s->places_here);
    uint32_t pages = 0;
    if (lane < team_size())
#pragma unroll
        for (int i = 0; i < WARPS; i += 4) {
            const uint4 x = *(const uint4 *)&s->taken_by[lane][i];
            pages += x.x + x.y + x.z + x.w;
        }
    return {before + __reduce_add_sync(LK_FULL_WARP, lane < team_rank() ? pages : 0),
            all + __reduce_add_sync(LK_FULL_WARP, pages)};
}

/* ---- results ---- */

/* `at` of the team's picks. `entry`: of the block table. */
__device__ __forceinline__ void write_pick(const struct select_args &a, const struct span &p,
                                           uint32_t at, uint32_t page, uint32_t entry, float bias,
                                           bool kept) {
    const uint32_t physical = (entry << p.shift) + (page & ((1u << p.shift) - 1));

    /* struct lk_cuda_pick in one store */
    *(uint4 *)&p.picks[at] = make_uint4(page, physical, __float_as_uint(bias), kept);
    fetch_page(a, p, physical);
    if (p.list && at < p.listed_most)
        p.list[at] = {page, kept ? 1.f : exp2f(bias)};
}

/* Which of up to 32 groups of the warp's run, from `first`, have a kept page. */
__device__ __forceinline__ uint32_t kept_groups(const struct view &v, const struct run &own,
                                                uint32_t first) {
    const uint32_t g = first + threadIdx.x % 32;
    return __ballot_sync(LK_FULL_WARP, g < own.end && v.kept[g]);
}

/* The block table's entry of the lane's kept page in the first of these groups: read long before it
 * is needed. */
__device__ __forceinline__ uint32_t early_entry(const struct span &p, const struct view &v,
                                                const struct run &own, uint32_t groups) {
    const uint32_t lane = threadIdx.x % 32, g = own.first + __ffs(groups) - 1;
    const bool any = groups && v.kept[g] >> lane & 1;
    return any ? p.table[(p.base + 32 * g + lane) >> p.shift] : 0;
}

/* Picks of the span in runs before run lane % WARPS. */
__device__ __forceinline__ uint32_t count_runs(const struct shared *s) {
    const uint32_t run = threadIdx.x % WARPS, own = s->run_kept[run] + s->run_hits[run];
    return scan_lanes<WARPS>(own) - own;
}

/* Picks of the span before a unit, which eight lanes have in common but for the last bits: which of
 * its group's. `runs`: count_runs(). */
__device__ __forceinline__ uint32_t count_before(const struct span &p, const struct view &v,
                                                 uint32_t runs, uint32_t unit) {
    const uint32_t g = unit / 32, run = g >> p.run_bits;
    const uint32_t before = __shfl_sync(LK_FULL_WARP, runs, run);
    uint32_t own = 0;

#pragma unroll 1
    for (uint32_t i = (run << p.run_bits) + threadIdx.x % 8; i < g; i += 8)
        own += __popc(v.taken[i]);
    const uint32_t below = (1u << unit % 32) - 1;
    return before + sum_lanes<8>(own) + (below ? __popc(v.taken[g] & below) : 0);
}

/* The sample's. `before`: picks of lower spans. */
__device__ __forceinline__ void write_hits(const struct select_args &a, const struct span &p,
                                           const struct view &v, const struct found &first,
                                           const struct drawn &d, uint32_t before, uint32_t runs) {
    const uint32_t warp = warp_index();

    if (__any_sync(LK_FULL_WARP, first.mine)) {
        const uint32_t place = before + count_before(p, v, runs, first.unit);
        if (first.mine)
            write_pick(a, p, place, p.base + first.unit, first.entry, first.bias, false);
    }
#pragma unroll 1
    for (uint32_t from = d.first + at_once<8>; from + warp < d.end; from += at_once<8>) {
        const uint32_t i = stratum_of<8>(from, warp);
        const struct hit h = i < d.end ? v.hits[i] : hit{NO_PAGE, 0};
        const bool any = h.page != NO_PAGE;
        const uint32_t place = before + count_before(p, v, runs, any ? h.page - p.base : 0);
        if (any && threadIdx.x % 8 == 0)
            write_pick(a, p, place, h.page, p.table[h.page >> p.shift], h.bias, false);
    }
}

/* Those of kept pages. `at`: picks before the run; `entry`: early_entry() of the first groups that
 * have any, if they are among the run's first 32. */
__device__ __forceinline__ void write_kept(const struct select_args &a, const struct span &p,
                                           const struct view &v, const struct run &own, uint32_t at,
                                           const uint32_t entry[2]) {
    const uint32_t lane = threadIdx.x % 32, below = (1u << lane) - 1;
    uint32_t nth = 0;

#pragma unroll 1
    for (uint32_t first = own.first; first < own.end; first += 32, nth = 2) {
        const uint32_t taken = first + lane < own.end ? __popc(v.taken[first + lane]) : 0;
#pragma unroll 1
        for (uint32_t some = kept_groups(v, own, first); some; some &= some - 1, nth++) {
            const uint32_t who = __ffs(some) - 1, g = first + who, page = p.base + 32 * g + lane;
            const uint32_t to = at + __reduce_add_sync(LK_FULL_WARP, lane < who ? taken : 0);
            if (v.kept[g] >> lane & 1)
                write_pick(a, p, to + __popc(v.taken[g] & below), page,
                           nth == 0   ? entry[0]
                           : nth == 1 ? entry[1]
                                      : p.table[page >> p.shift],
                           0.f, true);
        }
        if (first + 32 < own.end)
            at += __reduce_add_sync(LK_FULL_WARP, taken);
    }
}

/* There are `count` picks, `kept` of them not sampled; the others of the budget are none. */
__device__ __forceinline__ void end_picks(const struct span &p, uint32_t kept, uint32_t count) {
#pragma unroll 1
    for (uint32_t i = count + threadIdx.x; i < p.k + p.sampled; i += THREADS)
        *(uint4 *)&p.picks[i] = make_uint4(LK_CUDA_NO_PAGE, 0, 0, 0);
    if (threadIdx.x == 0) {
        p.found->kept = kept;
        p.found->sampled = count - kept;
    }
}

/* Pruning: list the kept units' pages and tag them as competing. `at`: those before the run. */
__device__ __forceinline__ void write_list(const struct span &p, const struct view &v,
                                           const struct run &own, uint32_t at, uint32_t kept) {
    const uint32_t lane = threadIdx.x % 32, below = (1u << lane) - 1;
    const uint32_t step = p.step, stride = p.stride, base = p.base + lane;
    uint32_t *const list = p.rescan, *const scores = (uint32_t *)p.scores;

#pragma unroll 2
    for (uint32_t g = own.first; g < own.end; g++) {
        const uint32_t mask = v.kept[g], page = (base + 32 * g) * step;
        const uint32_t to = (at + __popc(mask & below)) * step;
        at += __popc(mask);
        if (!(mask >> lane & 1))
            continue;
#pragma unroll 1
        for (uint32_t x = 0; x < step; x++) {
            list[to + x] = page + x;
            atomicOr(scores + (uint64_t)(page + x) * stride, 1u);
        }
    }
    if (team_rank() == 0 && threadIdx.x < p.after) {
        const uint32_t page = p.units * p.step + threadIdx.x;
        p.rescan[kept * p.step + threadIdx.x] = page;
        *(uint32_t *)(p.scores + (uint64_t)page * p.stride) = 1;
    }
    if (team_rank() == 0 && threadIdx.x == 0)
        p.found->listed = kept * p.step + p.after;
}

__device__ __forceinline__ float2 block_merge(struct shared *s, float2 x) {
    x = warp_merge(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        s->part[threadIdx.x / 32] = x;
    __syncthreads();
    x = s->part[0];
    for (int i = 1; i < WARPS; i++)
        x = merge_parts(x, s->part[i]);
    return x;
}

/* log2 mass of the pages not kept, by query head: what the kept leave of 1; where they leave too
 * little for a float to tell, summed over all the others. */
static __device__ __noinline__ void estimate_rest(const struct span &p, struct shared *s,
                                                  uint32_t kept) {
    team_barrier();
    for (uint32_t g = team_rank(); g < p.group; g += team_size()) {
        float2 sum = make_float2(-INFINITY, 0.f);
        float rest;
        auto add = [&](uint32_t page) {
            const float score = read_score(p.scores + (uint64_t)page * p.stride, g);
            sum = merge_parts(sum, make_float2(score, 1.f));
        };

        for (uint32_t i = threadIdx.x; i < kept; i += THREADS)
            add(__ldcg(&p.picks[i].page));
        sum = block_merge(s, sum);
        const float peak = s->heads[0][g].x, inverse = s->heads[0][g].y * (float)p.group;
        rest = fmaf(-exp2_fast(sum.x - peak) * sum.y, inverse, 1.f);
        sum = make_float2(peak, __fdividef(rest, inverse));
        if (rest <= REST_LEAST) {
            sum = make_float2(-INFINITY, 0.f);
            for (uint32_t j = threadIdx.x; j < p.units; j += THREADS)
                if (!(__ldcg(&p.shares[j]) & MARK))
                    add(j);
            sum = block_merge(s, sum);
        }
        if (threadIdx.x == 0)
            p.found->rest[g] = sum.x + log2_fast(sum.y);
    }
}

/* ---- kernel ---- */

/* Open them, and say what will be sent; the sums' size is not known yet. i: of the threads that do
 * it. */
__device__ __forceinline__ void open_barriers(struct shared *s, uint32_t i) {
    constexpr uint32_t rounds = CUTS * ROUNDS;
    const uint32_t size = team_size();

    if (i < rounds) {
        team_open(&s->bins_here[0][i]);
        team_expect(&s->bins_here[0][i], size * sizeof s->bins[0]);
    } else if (i < rounds + 2 * CUTS) {
        team_open(&s->sums_here[i - rounds]);
        s->few_own[i - rounds] = 0;
    } else if (i == rounds + 2 * CUTS) {
        team_open(&s->places_here);
        team_expect(&s->places_here, size * sizeof s->taken_by[0]);
        s->listed = s->ones = s->zeros = 0;
    }
}

/* The span and cleared counts -> whether there is anything to do. */
template <bool PRUNE, uint32_t HELD>
__device__ __forceinline__ bool prepare(const struct select_args &a, struct shared *s) {
    if (threadIdx.x < 32) {
        make_span<PRUNE, HELD>(a, &s->span);
    } else {
        open_barriers(s, threadIdx.x - 32);
        clear_counts(s, threadIdx.x - 32, THREADS - 32);
    }
    __syncthreads();
    return s->span.live;
}

template <bool PRUNE, uint32_t HELD>
__device__ __forceinline__ void select_pages(const struct select_args &a, struct shared *s) {
    const struct span &p = s->span;
    const struct view v = view_of<HELD>(s);
    const struct run own = part_of(p);
    struct strata t = {};
    struct drawn d = {};
    struct found first = {};
    struct sums u;

    make_words<PRUNE>(p, s, v.words, a.clock);
    team_wait(); /* all blocks run and have opened their barriers */
    const struct cut cut = cut_pages<PRUNE, HELD>(p, s, p.k - p.sink - p.tail, 0, &u);
    if (PRUNE) {
        write_list(p, v, own, u.before.kept + count_before(p, v, count_runs(s), 32 * own.first),
                   u.all.kept);
        return;
    }
    if (p.mass_target > 0) {
        apply_target<HELD>(p, s, cut);
        u = s->sums;
    }
    const uint32_t some = kept_groups(v, own, own.first);
    const uint32_t entry[2] = {early_entry(p, v, own, some),
                               early_entry(p, v, own, some & (some - 1))};
    t.apart = true;
    if (p.sampled) {
        t = make_strata(p, u);
        d = find_strata(u, t);
        first = draw(p, s, v, u.before, t, d);
    }
    const struct places at = add_places(s, u, t, d);
    const uint32_t runs = count_runs(s);
    write_hits(a, p, v, first, d, at.before, runs);
    write_kept(a, p, v, own, at.before + count_before(p, v, runs, 32 * own.first), entry);
    if (team_rank() == 0)
        end_picks(p, u.all.kept, at.all);
    if (!p.sampled)
        estimate_rest(p, s, u.all.kept);
}

template <int BLOCKS> constexpr uint32_t held_units = BLOCKS == 1 ? SPAN_LONG : LK_CUDA_SPAN_PAGES;

/* BLOCKS: on a multiprocessor. */
template <bool PRUNE, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    select_kernel(const __grid_constant__ struct select_args a) {
    constexpr uint32_t HELD = held_units<BLOCKS>;
    SHARED_BYTES(memory, 16);
    struct shared *s = (struct shared *)memory;

    let_next_start();
    if (!prepare<PRUNE, HELD>(a, s)) {
        wait_for_previous();
        note_time(a.clock, PRUNE ? LK_CUDA_AT_PRUNE : LK_CUDA_AT_SELECT);
        return;
    }
    team_arrive_synced();
    if (s->span.spills)
        select_pages<PRUNE, 0>(a, s);
    else
        select_pages<PRUNE, HELD>(a, s);
}

/* ---- launcher ---- */

/* Of a block. */
template <int BLOCKS> constexpr uint32_t shared_bytes(void) {
    return sizeof(struct shared) + sizeof(struct held<held_units<BLOCKS>>);
}

static void configure(const struct lk_cuda_step *step, uint32_t team, uint32_t bytes, void *stream,
                      cudaLaunchAttribute attributes[2], cudaLaunchConfig_t *ret) {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {team, 1, 1};
    ret->gridDim = dim3(team, step->pool.geometry.kv_heads, step->bucket);
    ret->blockDim = THREADS;
    ret->dynamicSmemBytes = bytes;
    ret->stream = (cudaStream_t)stream;
    ret->attrs = attributes;
    ret->numAttrs = team > 1 ? 2 : 1;
}

/* Blocks of a team: as many as let all teams run at once, a block a multiprocessor: two on one take
 * longer than half as many with twice the pages. */
template <class Kernel>
static uint32_t choose_team(const struct lk_cuda_step *step, Kernel *kernel, uint32_t bytes,
                            void *stream) {
    const uint32_t teams = step->pool.geometry.kv_heads * step->bucket;
    struct cudaFuncAttributes attributes;
    uint32_t size = LK_TEAM_MOST;

    if (cudaFuncGetAttributes(&attributes, kernel) || attributes.ptxVersion < 90)
        return 1;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    for (; size > 1; size--) {
        cudaLaunchConfig_t config = {};
        cudaLaunchAttribute launch[2] = {};
        int fit = 0;
        if (size * teams > step->processors)
            continue;
        configure(step, size, bytes, stream, launch, &config);
        if (!cudaOccupancyMaxActiveClusters(&fit, kernel, &config) && (uint32_t)fit >= teams)
            break;
    }
    cudaGetLastError(); /* sizes that no device has */
    return size;
}

template <bool PRUNE, int BLOCKS>
static int launch_select(const struct lk_cuda_step *step, void *stream) {
    constexpr uint32_t bytes = shared_bytes<BLOCKS>();
    auto *kernel = select_kernel<PRUNE, BLOCKS>;
    struct select_args a = {step->pool, step->batch, step->clock, 0};
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attributes[2] = {};
    int error = take_bytes(kernel, bytes);

    if (error)
        return error;
    const uint32_t team = choose_team(step, kernel, bytes, stream);
    a.team_inverse = lk_cuda_inverse(team);
    configure(step, team, bytes, stream, attributes, &config);
    return (int)cudaLaunchKernelEx(&config, kernel, a);
}

/* A block that could have a multiprocessor for itself, if the device lends what it then wants. */
template <bool PRUNE> static int launch_fitting(const struct lk_cuda_step *step, void *stream) {
    int error = (int)cudaErrorInvalidConfiguration;

    if (step->pool.geometry.kv_heads * step->bucket <= step->processors)
        error = launch_select<PRUNE, 1>(step, stream);
    return error == (int)cudaErrorInvalidConfiguration ? launch_select<PRUNE, 2>(step, stream)
                                                       : error;
}

int lk_cuda_prune(const struct lk_cuda_step *step, void *stream) {
    return launch_fitting<true>(step, stream);
}

int lk_cuda_select(const struct lk_cuda_step *step, void *stream) {
    return launch_fitting<false>(step, stream);
}

uint32_t lk_cuda_select_least(void) {
    return shared_bytes<2>();
}
