/* SPDX-License-Identifier: MIT */
/*
 * select_cut.cuh - shares from scores, and the word at which the best so many end: as a bracket of
 * few words first, then the word itself. See select.cu.
 */
#ifndef LK_CUDA_SELECT_CUT_CUH
#define LK_CUDA_SELECT_CUT_CUH

#include "select_span.cuh"

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

#endif
