/* SPDX-License-Identifier: MIT */
/*
 * select_sample.cuh - the sample of the pages not kept: strata, the pages that their points hit,
 * and what place each has among the picks. See select.cu.
 */
#ifndef LK_CUDA_SELECT_SAMPLE_CUH
#define LK_CUDA_SELECT_SAMPLE_CUH

#include "select_kept.cuh"

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

#endif
