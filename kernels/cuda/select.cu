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
 *
 * Parts, one after the other: select_span.cuh, select_cut.cuh, select_kept.cuh, select_sample.cuh,
 * and here what is written, the kernel and its launch.
 */
#include "select_sample.cuh"

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
