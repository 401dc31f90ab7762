/* SPDX-License-Identifier: MIT */
/*
 * select_kept.cuh - what the cut leaves: masks of the pages kept, weights of all others, summed
 * over the team; and again where a mass target needs fewer pages. See select.cu.
 */
#ifndef LK_CUDA_SELECT_KEPT_CUH
#define LK_CUDA_SELECT_KEPT_CUH

#include "select_cut.cuh"

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

#endif
