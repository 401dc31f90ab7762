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
 * Cut: the k-th largest word by three digits of 11, 11 and 8 bits, from the top, until a bin is
 * kept whole: counted in the block, added up by the block that owns the bins, read by all. Where
 * equal words straddle the cut, the lower pages are kept.
 *
 * Sample: weights of the pages not kept, summed by 32 pages, then over the span, then over the
 * team, give each stratum's point its span; a warp finds the point's 32 pages and the page.
 *
 * A span too long for shared memory has its words in the row's workspace.
 */
#include "clock.cuh"
#include "device.cuh"
#include "team.cuh"

#define THREADS       512
#define WARPS         (THREADS / 32)
#define BINS          2048
#define ROUNDS        3
#define PER           (BINS / THREADS)
#define GROUPS_SHARED (LK_CUDA_SPAN_PAGES / 32)
#define HITS_SHARED   LK_CUDA_SPAN_HITS
#define SHARE         0x3fffffff /* the bits of a word that are the share */
#define SURE          0x40000000
#define NEVER         ((int32_t)0x80000000)
#define SHARE_FLOOR   1e-30f
#define MARK          0x80000000u
#define NO_PAGE       0xffffffffu
#define FETCH_MOST    (24u << 20) /* bytes of pages worth fetching to L2 ahead of attend */

struct select_args {
    struct lk_pool_view pool;
    const struct lk_cuda_batch *batch;
    struct lk_cuda_clock *clock; /* may be NULL */
};

struct hit {
    uint32_t
        page; /* NO_PAGE: none, or the page of the hit before. In a workspace other spans' too */
    float bias;
};

/* The pages (or, pruning superpages: units of four pages) of a block, and whatever is needed of its
 * row: the way to a row's descriptor is long and would be gone at every turn. In shared memory. */
struct span {
    uint32_t head, group, stride;
    uint32_t units, base, count;  /* of the row; first and number of the span's */
    uint32_t groups, per;         /* groups of 32 units; groups of an entry, a thread's own */
    uint32_t k, sampled;          /* to keep; to sample */
    uint32_t sink, tail;          /* kept whatever their share */
    uint32_t step;                /* pages of a unit */
    uint32_t fetch, shift, layer; /* fetch pages to L2; of the table */
    uint32_t parts_count, listed_most, after; /* after: pages after the last superpage */
    float mass_target;
    float *scores; /* of the head, as all below */
    const float2 *newest, *parts;
    uint32_t *shares, *rescan;
    struct lk_cuda_pick *picks;
    struct lk_cuda_head *found;
    struct lk_page_weight *list;
    const uint32_t *table;
    int32_t *words;
    uint32_t *kept, *taken, *place; /* masks of a group; picks before it */
    uint64_t *weight;               /* of a group's pages that are not kept */
    struct hit *hits;               /* by stratum */
};

struct cut {
    int32_t word;  /* words above are kept */
    uint32_t ties; /* and so many that equal it */
};

struct shared {
    alignas(16) uint32_t bins[BINS];
    alignas(16) uint32_t total[ROUNDS][BINS / 2]; /* of the team, this block's bins */
    uint4 peers[3][LK_TEAM_MOST];
    union {
        struct hit hits[HITS_SHARED];
        int32_t list[LK_CUDA_BUDGET_PAGES_MAX];
    };
    int32_t words[LK_CUDA_SPAN_PAGES];
    uint64_t weight[GROUPS_SHARED], entry_weight[THREADS], warp_weight[WARPS];
    uint32_t kept[GROUPS_SHARED], taken[GROUPS_SHARED], place[GROUPS_SHARED];
    uint32_t entry_left[THREADS], warp_count[WARPS];
    float lse[LK_GROUP_MAX + 4]; /* read by fours */
    float2 part[LK_GROUP_MAX];
    uint32_t bin, above, inside, listed;
    uint4 agreed;
    alignas(8) uint64_t arrived[3]; /* barriers: the peers' numbers are there */
    struct span span;
    struct lk_cuda_row row;
};

/* ---- the span ---- */

/* Words and the like of a span that shared memory cannot hold. */
__device__ __forceinline__ void use_workspace(struct span *p, const struct lk_cuda_row *r) {
    const uint32_t pages = (r->pages + 31) / 32 * 32, first = p->base / 32, groups = pages / 32;
    uint8_t *at = r->workspace + r->spill + p->head * lk_cuda_spill_bytes(pages, r->sampled);

    p->weight = (uint64_t *)at + first;
    at += groups * 8ull;
    p->hits = (struct hit *)at;
    at += r->sampled * 8ull;
    p->words = (int32_t *)at + p->base;
    at += pages * 4ull;
    p->kept = (uint32_t *)at + first;
    p->taken = p->kept + groups;
    p->place = p->taken + groups;
}

template <bool PRUNE>
__device__ __forceinline__ void find_memory(struct span *p, const struct lk_cuda_row *r) {
    const bool second = !PRUNE && r->list_max; /* a second pass left its parts */

    p->scores = row_scores(r, p->head, p->stride);
    p->newest = row_parts(r, p->head, p->stride);
    p->parts = p->newest + (second ? 1 + r->chunks : 1) * (uint64_t)p->stride;
    p->parts_count = second ? r->rescan_tiles + r->rest_chunks : r->chunks;
    p->shares =
        (uint32_t *)(r->workspace + r->shares) + (uint64_t)p->head * r->segments * r->segment_pages;
    p->rescan = row_rescan(r, p->head);
    p->picks = row_picks(r, p->head);
    p->found = row_head(r, p->head);
    p->list = r->list ? r->list + (uint64_t)p->head * r->list_pages : NULL;
    p->listed_most = r->list_pages;
    p->table = r->table;
    p->shift = r->table_shift;
    p->layer = r->layer;
}

/* By one thread. */
template <bool PRUNE>
__device__ __forceinline__ void make_span(const struct select_args &a, struct shared *s,
                                          const struct lk_cuda_row *r, uint32_t head) {
    struct span p = {};
    uint32_t most;

    p.head = head;
    p.group = a.pool.geometry.group;
    p.stride = group_stride(p.group);
    p.step = PRUNE && r->scan == LK_TREE ? 4 : 1;
    p.units = PRUNE ? r->units : r->pages;
    if (PRUNE) {
        p.k = r->prune_units;
        p.after = p.step == 4 ? r->complete % 4 : 0;
    } else {
        p.sampled = min(r->sampled, r->budget_pages > 2 ? r->budget_pages - 2 : 0);
        p.k = r->budget_pages - p.sampled;
        p.sink = min(r->sink_pages, p.k - 1);
        p.tail = 1 + min(r->recent_pages ? r->recent_pages - 1 : 0, p.k - 1 - p.sink);
        p.fetch = (uint64_t)__ldcg(&a.batch->rows) * a.pool.geometry.kv_heads * r->budget_pages *
                      a.pool.layout.head_bytes <=
                  FETCH_MOST;
        p.mass_target = r->mass_target;
    }
    most = ((p.units + team_size() - 1) / team_size() + 31) / 32 * 32;
    p.base = min(most * team_rank(), p.units);
    p.count = min(most, p.units - p.base);
    p.groups = (p.count + 31) / 32;
    p.per = (p.groups + THREADS - 1) / THREADS;
    p.words = s->words;
    p.kept = s->kept;
    p.taken = s->taken;
    p.place = s->place;
    p.weight = s->weight;
    p.hits = s->hits;
    find_memory<PRUNE>(&p, r);
    if (most > LK_CUDA_SPAN_PAGES || p.sampled > LK_CUDA_SPAN_HITS)
        use_workspace(&p, r);
    s->span = p;
}

__device__ __forceinline__ uint32_t find_physical(const struct span &p, uint32_t page) {
    return (p.table[page >> p.shift] << p.shift) + (page & ((1u << p.shift) - 1));
}

/* floor(2^32 share) + 1, by the share's own exponent. */
__device__ __forceinline__ uint64_t weight_of(int32_t word) {
    const uint32_t bits = (uint32_t)word & SHARE, mantissa = (bits & 0x7fffff) | 0x800000;
    const int shift = (int)(bits >> 23) - 118;
    return (shift >= 0 ? (uint64_t)mantissa << shift : shift > -24 ? mantissa >> -shift : 0) + 1;
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

/* ---- sums ---- */

__device__ __forceinline__ float2 warp_merge(float2 x) {
    const float peak = warp_max(x.x), base = peak == -INFINITY ? 0.f : peak;
    return make_float2(peak, warp_sum(x.y * exp2_fast(x.x - base)));
}

/* log2 of the sum over all pages, by query head: from the parts that the last pass left. */
__device__ __forceinline__ void sum_parts(const struct span &p, struct shared *s) {
    const uint32_t lane = threadIdx.x % 32, warp = warp_index();
    const uint32_t count = p.parts_count, stride = p.stride;
    const uint32_t share = p.group < WARPS ? WARPS / p.group : 1; /* warps a query head */

#pragma unroll 1
    for (uint32_t item = warp; item < p.group * share; item += WARPS) {
        const uint32_t g = item / share, own = item % share * 32 + lane;
        float2 sum = own == 0 ? __ldcg(&p.newest[g]) : make_float2(-INFINITY, 0.f);
#pragma unroll 1
        for (uint32_t i = own; i < count; i += 128 * share) {
            float2 v[4];
            float peak = sum.x, base;
#pragma unroll
            for (int x = 0; x < 4; x++) {
                v[x] = i + 32 * share * x < count
                           ? __ldcg(&p.parts[(uint64_t)(i + 32 * share * x) * stride + g])
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
    if (threadIdx.x < p.group) {
        float2 sum = s->part[threadIdx.x * share];
        for (uint32_t i = 1; i < share; i++)
            sum = merge_parts(sum, s->part[threadIdx.x * share + i]);
        s->lse[threadIdx.x] = sum.x + log2_fast(sum.y);
    }
    __syncthreads();
}

/* Sum over a warp of numbers below 2^58, in three parts that 32 bits hold. */
__device__ __forceinline__ uint64_t warp_add(uint64_t x) {
    const uint32_t mask = (1u << 26) - 1;
    const uint64_t low = __reduce_add_sync(LK_FULL_WARP, (uint32_t)x & mask);
    const uint64_t middle = __reduce_add_sync(LK_FULL_WARP, (uint32_t)(x >> 26) & mask);
    return low + (middle << 26) +
           ((uint64_t)__reduce_add_sync(LK_FULL_WARP, (uint32_t)(x >> 52)) << 52);
}

/* Sum of the warp's x up to this lane's. */
template <class T> __device__ __forceinline__ T warp_scan(T x) {
    const uint32_t lane = threadIdx.x % 32;

#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        T y = __shfl_up_sync(LK_FULL_WARP, x, o);
        x += lane >= o ? y : 0;
    }
    return x;
}

/* Inclusive sums over the block's threads; the two side by side. */
__device__ __forceinline__ void block_scan(struct shared *s, uint64_t *weight, uint32_t *count) {
    const uint32_t lane = threadIdx.x % 32, warp = warp_index();
    uint64_t w = *weight;
    uint32_t c = *count;

#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        uint64_t x = __shfl_up_sync(LK_FULL_WARP, w, o);
        uint32_t y = __shfl_up_sync(LK_FULL_WARP, c, o);
        w += lane >= o ? x : 0;
        c += lane >= o ? y : 0;
    }
    if (lane == 31) {
        s->warp_weight[warp] = w;
        s->warp_count[warp] = c;
    }
    __syncthreads();
    *weight = w + warp_add(lane < warp ? s->warp_weight[lane] : 0);
    *count = c + __reduce_add_sync(LK_FULL_WARP, lane < warp ? s->warp_count[lane] : 0);
}

/* The same of counts alone. */
__device__ __forceinline__ uint32_t block_count(struct shared *s, uint32_t count) {
    const uint32_t lane = threadIdx.x % 32, warp = warp_index();

    count = warp_scan(count);
    if (lane == 31)
        s->warp_count[warp] = count;
    __syncthreads();
    return count + __reduce_add_sync(LK_FULL_WARP, lane < warp ? s->warp_count[lane] : 0);
}

struct tally {
    uint64_t weight;
    uint32_t left, kept; /* or whatever is counted */
};

/* Add what all blocks of the team give, each by its last thread -> those of lower rank; *all: the
 * team's. Each slot once. `meanwhile` runs while the others are waited for. */
template <class F>
__device__ __forceinline__ struct tally
team_sum(struct shared *s, uint32_t slot, const struct tally &own, struct tally *all, F meanwhile) {
    const uint32_t lane = threadIdx.x % 32;
    uint4 x = make_uint4((uint32_t)own.weight, (uint32_t)(own.weight >> 32), own.left, own.kept);
    struct tally in = {};

    if (threadIdx.x / 32 == WARPS - 1) {
        x.x = __shfl_sync(LK_FULL_WARP, x.x, 31);
        x.y = __shfl_sync(LK_FULL_WARP, x.y, 31);
        x.z = __shfl_sync(LK_FULL_WARP, x.z, 31);
        x.w = __shfl_sync(LK_FULL_WARP, x.w, 31);
        if (lane < team_size())
            team_send(&s->peers[slot][team_rank()], x, &s->arrived[slot], lane);
    }
    meanwhile();
    team_receive(&s->arrived[slot]);
    if (lane < team_size()) {
        x = s->peers[slot][lane];
        in = {(uint64_t)x.y << 32 | x.x, x.z, x.w};
    }
    *all = {warp_add(in.weight), __reduce_add_sync(LK_FULL_WARP, in.left),
            __reduce_add_sync(LK_FULL_WARP, in.kept)};
    if (lane >= team_rank())
        in = {};
    return {warp_add(in.weight), __reduce_add_sync(LK_FULL_WARP, in.left),
            __reduce_add_sync(LK_FULL_WARP, in.kept)};
}

/* ---- shares ---- */

/* Four scores of four units, THREADS apart. */
__device__ __forceinline__ void load_scores(const struct span &p, uint32_t i, uint32_t g,
                                            float4 v[4]) {
    const uint32_t step = p.step * p.stride, count = p.count;
    const float *from = p.scores + (uint64_t)p.base * step + g;

#pragma unroll
    for (int x = 0; x < 4; x++)
        if (i + x * THREADS < count)
            v[x] = __ldcg((const float4 *)(from + (uint64_t)(i + x * THREADS) * step));
}

__device__ __forceinline__ bool is_forced(const struct span &p, uint32_t page) {
    return page < p.sink || page + p.tail >= p.units;
}

/* A unit's word, and its first digit's bin. */
template <bool PRUNE>
__device__ __forceinline__ void store_word(struct shared *s, int32_t *to, float share,
                                           bool competes, bool forced) {
    int32_t word = share >= SHARE_FLOOR ? (int32_t)__float_as_uint(fminf(share, 1.5f)) : 0;

    if (!PRUNE)
        word |= forced ? SURE : competes ? 0 : NEVER;
    *to = word;
    if (word >> 30 == 0)
        atomicAdd(&s->bins[word >> 19], 1u);
}

template <bool PRUNE>
__device__ __forceinline__ void make_words(const struct span &p, struct shared *s) {
    const uint32_t count = p.count, group = p.group, base = p.base, sink = p.sink;
    const uint32_t tail = p.units - p.tail;
    const float lift = p.step == 4 ? 2.f : 0.f, mean = 1.f / group;
    int32_t *words = p.words;
    uint32_t i = threadIdx.x, g = 0;
    float sum[4] = {0, 0, 0, 0};
    bool competes[4];
    float4 next[4];

    load_scores(p, i, 0, next);
    sum_parts(p, s);
#pragma unroll 1
    while (i < count) {
        const uint32_t at = i, first = g;
        const float l0 = s->lse[g] - lift, l1 = s->lse[g + 1] - lift;
        const float l2 = s->lse[g + 2] - lift, l3 = s->lse[g + 3] - lift;
        float4 v[4];
#pragma unroll
        for (int x = 0; x < 4; x++)
            v[x] = next[x];
        g += 4;
        if (g >= group) {
            g = 0;
            i += 4 * THREADS;
        }
        load_scores(p, i, g, next);
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const uint32_t j = at + x * THREADS;
            if (j >= count)
                break;
            if (first == 0) {
                competes[x] = __float_as_uint(v[x].x) & 1;
                sum[x] = 0;
            }
            sum[x] += exp2_fast(v[x].x - l0);
            sum[x] += first + 1 < group ? exp2_fast(v[x].y - l1) : 0.f;
            sum[x] += first + 2 < group ? exp2_fast(v[x].z - l2) : 0.f;
            sum[x] += first + 3 < group ? exp2_fast(v[x].w - l3) : 0.f;
            if (g == 0)
                store_word<PRUNE>(s, &words[j], sum[x] * mean, competes[x],
                                  base + j < sink || base + j >= tail);
        }
    }
}

/* ---- the cut ---- */

/* Bins counted in this block -> of the team, for this thread's PER from `at` on. */
__device__ __forceinline__ void add_bins(struct shared *s, uint32_t round, uint32_t at,
                                         uint32_t x[PER]) {
    const uint32_t slice = BINS / team_size();

#pragma unroll
    for (int i = 0; i < PER; i += 4) {
        uint4 *own = (uint4 *)&s->bins[at + i], v = *own;
        *own = make_uint4(0, 0, 0, 0);
        x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
    }
    if (team_size() == 1)
        return;
    const uint32_t address = team_address(&s->total[round][at % slice], at / slice);
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (x[i])
            team_count(address + 4 * i, x[i]);
    team_barrier();
#pragma unroll
    for (int i = 0; i < PER; i += 4) {
        const uint4 v = team_load(address + 4 * i);
        x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
    }
}

/* The bin in which the need-th from the top lies: s->bin, s->above, s->inside. -> words in all. */
__device__ __forceinline__ uint32_t find_bin(struct shared *s, const uint32_t x[PER], uint32_t at,
                                             uint32_t need) {
    const uint32_t lane = threadIdx.x % 32, warp = warp_index();
    uint32_t sum = 0, scan, before, total;

#pragma unroll
    for (int i = 0; i < PER; i++)
        sum += x[i];
    scan = warp_scan(sum);
    if (lane == 31)
        s->warp_count[warp] = scan;
    __syncthreads();
    const uint32_t y = lane < WARPS ? s->warp_count[lane] : 0;
    total = __reduce_add_sync(LK_FULL_WARP, y);
    before = __reduce_add_sync(LK_FULL_WARP, lane < warp ? y : 0) + scan - sum;
    if (before < need && before + sum >= need) {
#pragma unroll
        for (int i = PER - 1; i >= 0; i--) {
            if (before < need && before + x[i] >= need) {
                s->bin = at + i;
                s->above = before;
                s->inside = x[i];
            }
            before += x[i];
        }
    }
    __syncthreads();
    return total;
}

/* The cut that leaves the best k of the team's words but the sure ones. `filled`: the first digit
 * is counted. */
__device__ __forceinline__ struct cut find_cut(const struct span &p, struct shared *s, uint32_t k,
                                               bool filled) {
    const uint32_t at = PER * (THREADS - 1 - threadIdx.x); /* from the top */
    uint32_t need = k, prefix = 0, upper = 30;

    if (k == 0) {
        __syncthreads();
        return {SHARE, 0};
    }
#pragma unroll 1
    for (uint32_t round = 0; round < ROUNDS; round++) {
        const uint32_t shift = round == 0 ? 19 : round == 1 ? 8 : 0, bits = upper - shift;
        if (round || !filled)
#pragma unroll 4
            for (uint32_t i = threadIdx.x; i < p.count; i += THREADS) {
                int32_t w = p.words[i];
                if ((uint32_t)w >> upper == prefix)
                    atomicAdd(&s->bins[(uint32_t)w >> shift & ((1u << bits) - 1)], 1u);
            }
        __syncthreads();
        uint32_t x[PER];
        add_bins(s, round, at, x);
        const uint32_t total = find_bin(s, x, at, need);
        if (round == 0 && total <= k)
            return {-1, 0};
        prefix = prefix << bits | s->bin;
        need -= s->above;
        if (s->inside == need)
            return {(int32_t)(prefix << shift) - 1, 0};
        upper = shift;
    }
    return {(int32_t)prefix, need};
}

/* Place of a group's first taken page among the block's: p.place. -> this thread's last, inclusive
 * of its own groups. */
__device__ __forceinline__ uint32_t place_groups(const struct span &p, struct shared *s) {
    const uint32_t first = min(p.groups, threadIdx.x * p.per), last = min(p.groups, first + p.per);
    uint32_t own = 0, count, at;

#pragma unroll 1
    for (uint32_t g = first; g < last; g++)
        own += __popc(p.taken[g]);
    count = block_count(s, own);
    at = count - own;
#pragma unroll 1
    for (uint32_t g = first; g < last; g++) {
        p.place[g] = at;
        at += __popc(p.taken[g]);
    }
    return count;
}

/* Mark the first cut.ties of the pages whose word is the cut. */
static __device__ __noinline__ void mark_ties(const struct span &p, struct shared *s,
                                              struct cut cut) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t before = 0;

    for (uint32_t g = warp_index(); g < p.groups; g += WARPS) {
        uint32_t i = 32 * g + lane;
        uint32_t equal = __ballot_sync(LK_FULL_WARP, i < p.count && p.words[i] == cut.word);
        if (lane == 0)
            p.taken[g] = equal;
    }
    __syncthreads();
    const uint32_t count = place_groups(p, s);
    if (threadIdx.x == THREADS - 1)
        for (uint32_t i = 0; i < team_size(); i++)
            team_store(team_address(&s->peers[0][team_rank()], i), make_uint4(count, 0, 0, 0));
    team_barrier();
    for (uint32_t i = 0; i < team_rank(); i++)
        before += s->peers[0][i].x;
    for (uint32_t g = warp_index(); g < p.groups; g += WARPS) {
        uint32_t equal = p.taken[g], below = equal & ((1u << lane) - 1);
        if (equal >> lane & 1 && before + p.place[g] + __popc(below) < cut.ties)
            p.words[32 * g + lane] |= SURE;
    }
    __syncthreads();
}

__device__ __forceinline__ struct cut cut_pages(const struct span &p, struct shared *s, uint32_t k,
                                                bool filled) {
    const struct cut cut = find_cut(p, s, k, filled);
    if (cut.ties)
        mark_ties(p, s, cut);
    return cut;
}

/* ---- a mass target ---- */

__device__ __forceinline__ uint64_t fixed_share(uint32_t bits) { /* in 2^-60 */
    return (uint64_t)((double)__uint_as_float(bits & SHARE) * 1152921504606846976.);
}

static __device__ __noinline__ uint64_t block_sum(struct shared *s, uint64_t x) {
#pragma unroll
    for (int o = 16; o; o >>= 1)
        x += __shfl_xor_sync(LK_FULL_WARP, x, o);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        s->warp_weight[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (int i = 0; i < WARPS; i++)
        x += s->warp_weight[i];
    return x;
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
        return block_sum(s, x);
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
    return (uint32_t)block_sum(s, count) + extra;
}

/* Cut again where the mass target needs fewer pages. */
static __device__ __noinline__ struct cut apply_target(const struct span &p, struct shared *s,
                                                       struct cut cut) {
    const uint32_t list = team_address(s->list, 0), listed = team_address(&s->listed, 0);

    for (uint32_t i = threadIdx.x; i < p.count; i += THREADS) {
        int32_t w = p.words[i];
        if (w <= cut.word)
            continue;
        if (!is_forced(p, p.base + i))
            p.words[i] = w &= SHARE;
        uint32_t at = team_add(listed, 1);
        if (at < LK_CUDA_BUDGET_PAGES_MAX)
            team_put(list + 4 * at, (uint32_t)w);
    }
    team_barrier();
    if (team_rank() == 0) {
        const uint32_t k = max(count_for_target(p, s), (uint32_t)LK_MASS_PAGES_MIN);
        if (threadIdx.x == 0)
            s->agreed = make_uint4(min(k, p.k), 0, 0, 0);
    }
    for (uint32_t i = threadIdx.x; i < ROUNDS * BINS / 2; i += THREADS)
        s->total[i / (BINS / 2)][i % (BINS / 2)] = 0;
    team_barrier();
    return cut_pages(p, s, team_load(team_address(&s->agreed, 0)).x - p.sink - p.tail, false);
}

/* ---- the sample ---- */

struct sums {                      /* of pages not kept; pages kept */
    struct tally before, own, all; /* in lower spans, in this, in the row */
};

/* Masks of the kept pages; weights of the others. */
__device__ __forceinline__ void mark_kept(const struct span &p, struct cut cut) {
    const uint32_t lane = threadIdx.x % 32, groups = p.groups, count = p.count;
    const int32_t *words = p.words;
    uint32_t *kept_masks = p.kept, *taken_masks = p.taken;
    uint64_t *weights = p.weight;
    const bool sampled = p.sampled;

#pragma unroll 2
    for (uint32_t g = warp_index(); g < groups; g += WARPS) {
        const uint32_t i = 32 * g + lane;
        const int32_t w = i < count ? words[i] : NEVER;
        const bool kept = w > cut.word;
        const uint32_t mask = __ballot_sync(LK_FULL_WARP, kept);

        if (sampled) {
            const uint64_t x = i < count && !kept ? weight_of(w) : 0;
            const uint32_t low = __reduce_add_sync(LK_FULL_WARP, (uint32_t)(x & 0xffffff));
            const uint32_t high = __reduce_add_sync(LK_FULL_WARP, (uint32_t)(x >> 24));
            if (lane == 0)
                weights[g] = ((uint64_t)high << 24) + low;
        }
        if (lane == 0)
            kept_masks[g] = taken_masks[g] = mask;
    }
    __syncthreads();
}

/* Set the kept pages out for L2. */
__device__ __forceinline__ void fetch_kept(const struct select_args &a, const struct span &p) {
    const uint32_t lane = threadIdx.x % 32;

#pragma unroll 1
    for (uint32_t g = warp_index(); p.fetch && g < p.groups; g += WARPS)
        if (p.kept[g] >> lane & 1)
            fetch_page(a, p, find_physical(p, p.base + 32 * g + lane));
}

__device__ __forceinline__ struct sums sum_weights(const struct select_args &a,
                                                   const struct span &p, struct shared *s) {
    const uint32_t first = min(p.groups, threadIdx.x * p.per), last = min(p.groups, first + p.per);
    struct sums r;
    uint64_t weight = 0;
    uint32_t left = min(p.count, 32 * last) - min(p.count, 32 * first);

#pragma unroll 1
    for (uint32_t g = first; g < last; g++) {
        weight += p.weight[g];
        left -= __popc(p.kept[g]);
    }
    block_scan(s, &weight, &left);
    s->entry_weight[threadIdx.x] = weight;
    s->entry_left[threadIdx.x] = left;
    r.before = team_sum(s, 1, {weight, left, p.count - left}, &r.all, [&] { fetch_kept(a, p); });
    r.own = {s->entry_weight[THREADS - 1], s->entry_left[THREADS - 1], 0};
    return r;
}

struct strata {
    uint64_t by_share, by_page, total, step, start;
    uint32_t count;
};

__device__ __forceinline__ struct strata make_strata(const struct span &p, const struct sums &u) {
    struct strata t;
    const uint64_t left = u.all.left;

    if (left <= p.sampled) /* every page, weight 1 */
        t = {0, 1, left, 0, 0, u.all.left};
    else
        t = {19 * left, u.all.weight, 20 * left * u.all.weight, 0, 0, p.sampled};
    if (t.count & (t.count - 1))
        t.step = t.total / t.count;
    else
        t.step = t.total >> (31 - __clz(t.count));
    t.start = t.step / 2;
    return t;
}

/* A warp looks for stratum i's point among the span's pages; `lo`: the running sum before them. */
__device__ __forceinline__ void find_hit(const struct span &p, const struct shared *s,
                                         const struct strata &t, uint32_t i, uint64_t lo) {
    constexpr uint32_t EACH = THREADS / 32; /* entries, looked at by a lane each */
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t point = i * t.step + t.start;
    auto upto = [&](uint32_t e) {
        return lo + t.by_share * s->entry_weight[e] + t.by_page * s->entry_left[e];
    };
    uint32_t over = __ballot_sync(LK_FULL_WARP, upto(EACH * lane + EACH - 1) > point);
    uint32_t entry = over ? EACH * (__ffs(over) - 1) : 0;

    over = __ballot_sync(LK_FULL_WARP, lane < EACH && upto(entry + lane % EACH) > point);
    entry += over ? __ffs(over) - 1 : 0;
    uint64_t run = entry ? upto(entry - 1) : lo;
#pragma unroll 1
    for (uint32_t g = entry * p.per; g < min(p.groups, (entry + 1) * p.per); g++) {
        const uint32_t page = 32 * g + lane;
        uint64_t own = 0;
        if (page < p.count && !(p.kept[g] >> lane & 1))
            own = t.by_share * weight_of(p.words[page]) + t.by_page;
        const uint64_t sum = warp_scan(own) + run;
        over = __ballot_sync(LK_FULL_WARP, sum > point);
        if (!over) {
            run = __shfl_sync(LK_FULL_WARP, sum, 31);
            continue;
        }
        if (lane == __ffs(over) - 1 && (i == 0 || point - t.step < sum - own)) { /* its first hit */
            uint32_t hits = 1;
            while (i + hits < t.count && point + hits * t.step < sum)
                hits++;
            const float expected = __ull2float_rn(own) * t.count;
            const float weight = __fdividef((float)hits * __ull2float_rn(t.total), expected);
            p.hits[i] = {p.base + page, t.by_share ? log2f(weight) : 0.f};
            atomicOr(&p.taken[g], 1u << lane);
        }
        return;
    }
}

/* In a workspace, where each block of the team clears all: what others write comes later. */
__device__ __forceinline__ void clear_hits(const struct span &p, const struct shared *s) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < p.sampled; i += THREADS)
        p.hits[i].page = NO_PAGE;
    if (p.hits != s->hits)
        __threadfence();
}

/* The strata whose points lie in the span, by warps: p.hits, p.taken. */
__device__ __forceinline__ void draw(const struct span &p, const struct shared *s,
                                     const struct sums &u, const struct strata &t) {
    const uint64_t lo = t.by_share * u.before.weight + t.by_page * u.before.left;
    const uint64_t hi = lo + t.by_share * u.own.weight + t.by_page * u.own.left;

#pragma unroll 1
    for (uint32_t i = warp_index(); i < t.count; i += WARPS) {
        const uint64_t point = i * t.step + t.start;
        if (point >= lo && point < hi)
            find_hit(p, s, t, i, lo);
    }
    __syncthreads();
}

/* ---- results ---- */

/* `at` of the team's picks. */
__device__ __forceinline__ void write_pick(const struct select_args &a, const struct span &p,
                                           uint32_t at, uint32_t page, float bias, bool kept) {
    const uint32_t physical = find_physical(p, page);

    /* struct lk_cuda_pick in one store */
    *(uint4 *)&p.picks[at] = make_uint4(page, physical, __float_as_uint(bias), kept);
    if (!kept)
        fetch_page(a, p, physical);
    if (p.list && at < p.listed_most)
        p.list[at] = {page, kept ? 1.f : exp2f(bias)};
}

/* `before`: picks of lower spans. */
__device__ __forceinline__ void write_picks(const struct select_args &a, const struct span &p,
                                            uint32_t before, uint32_t strata) {
    const uint32_t lane = threadIdx.x % 32, below = (1u << lane) - 1;

#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < strata; i += THREADS) {
        const struct hit h = p.hits[i];
        const uint32_t page = h.page - p.base, g = page / 32;
        if (page < p.count)
            write_pick(a, p, before + p.place[g] + __popc(p.taken[g] & ((1u << page % 32) - 1)),
                       h.page, h.bias, false);
    }
    const uint32_t groups = p.groups, count = p.count;
    const uint32_t *masks = p.kept;
    const int32_t *words = p.words;
    uint32_t *shares = p.shares + p.base;
#pragma unroll 2
    for (uint32_t g = warp_index(); g < groups; g += WARPS) {
        const uint32_t i = 32 * g + lane;
        const bool kept = masks[g] >> lane & 1;
        if (i < count)
            shares[i] = ((uint32_t)words[i] & SHARE) | (kept ? MARK : 0);
        if (kept)
            write_pick(a, p, before + p.place[g] + __popc(p.taken[g] & below), p.base + i, 0.f,
                       true);
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

/* Pruning: list the kept units' pages and tag them as competing. */
__device__ __forceinline__ void write_list(const struct span &p, uint32_t before, uint32_t kept) {
    const uint32_t lane = threadIdx.x % 32, below = (1u << lane) - 1;

#pragma unroll 1
    for (uint32_t g = warp_index(); g < p.groups; g += WARPS) {
        if (!(p.kept[g] >> lane & 1))
            continue;
        const uint32_t at = before + p.place[g] + __popc(p.kept[g] & below);
        const uint32_t unit = p.base + 32 * g + lane;
#pragma unroll 1
        for (uint32_t x = 0; x < p.step; x++) {
            p.rescan[at * p.step + x] = unit * p.step + x;
            atomicOr((uint32_t *)(p.scores + (uint64_t)(unit * p.step + x) * p.stride), 1u);
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
        const float *scores = p.scores + g;
        float2 sum = make_float2(-INFINITY, 0.f);
        float rest;
        auto add = [&](uint32_t page) {
            sum = merge_parts(sum, make_float2(__ldcg(&scores[(uint64_t)page * p.stride]), 1.f));
        };

        for (uint32_t i = threadIdx.x; i < kept; i += THREADS)
            add(__ldcg(&p.picks[i].page));
        sum = block_merge(s, sum);
        rest = 1.f - exp2_fast(sum.x - s->lse[g]) * sum.y;
        sum = make_float2(s->lse[g], rest);
        if (rest <= 1e-5f) {
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

template <bool PRUNE>
__global__ void __launch_bounds__(THREADS, 2)
    select_kernel(const __grid_constant__ struct select_args a) {
    SHARED_BYTES(memory, 16);
    struct shared *s = (struct shared *)memory;
    const uint32_t row = blockIdx.z;
    const struct lk_cuda_row *r = &a.batch->row[row];
    const struct span &p = s->span;
    struct strata t = {};
    struct tally all;
    uint32_t kept = 0;

    let_next_start();
    if (row >= __ldcg(&a.batch->rows) || !__ldcg(&r->scan) || (PRUNE && !__ldcg(&r->list_max))) {
        wait_for_previous();
        note_time(a.clock, PRUNE ? LK_CUDA_AT_PRUNE : LK_CUDA_AT_SELECT);
        return;
    }
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < (sizeof s->bins + sizeof s->total) / 16; i += THREADS)
        ((uint4 *)memory)[i] = make_uint4(0, 0, 0, 0); /* bins and totals come first */
    if (warp_index() == 0)
        load_row(a.batch, row, &s->row);
    if (threadIdx.x == 0) {
        s->listed = 0;
        make_span<PRUNE>(a, s, &s->row, blockIdx.y);
        team_expect(&s->arrived[1]);
        team_expect(&s->arrived[2]);
    }
    __syncthreads();
    team_arrive();
    fetch_table(p);
    if (p.mass_target <= 0)
        clear_hits(p, s);
    wait_for_previous();
    note_time(a.clock, PRUNE ? LK_CUDA_AT_PRUNE : LK_CUDA_AT_SELECT);
    make_words<PRUNE>(p, s);
    team_wait();
    struct cut cut = cut_pages(p, s, p.k - p.sink - p.tail, true);
    if (!PRUNE && p.mass_target > 0) {
        cut = apply_target(p, s, cut);
        clear_hits(p, s);
    }
    mark_kept(p, cut);
    if (PRUNE || p.sampled)
        team_arrive_unordered();
    if (!PRUNE && p.sampled) {
        const struct sums u = sum_weights(a, p, s);
        t = make_strata(p, u);
        kept = u.all.kept;
        draw(p, s, u, t);
    }
    const uint32_t own = place_groups(p, s);
    const struct tally before = team_sum(s, 2, {0, own, 0}, &all, [] {});
    if (PRUNE) {
        write_list(p, before.left, all.left);
    } else {
        if (!p.sampled)
            kept = all.left;
        write_picks(a, p, before.left, t.count);
        if (team_rank() == 0)
            end_picks(p, kept, all.left);
    }
    if (PRUNE || p.sampled)
        team_wait(); /* nobody needs this block's memory now */
    else
        estimate_rest(p, s, kept);
}

/* ---- launcher ---- */

/* Blocks of a team: a power of two, as many as have a multiprocessor each. Two on one take longer
 * than half as many with twice the pages. */
static uint32_t choose_team(const struct lk_cuda_step *step) {
    const uint32_t teams = step->pool.geometry.kv_heads * step->bucket;
    struct cudaFuncAttributes attributes;
    uint32_t size = LK_TEAM_MOST;

    if (cudaFuncGetAttributes(&attributes, select_kernel<false>) || attributes.ptxVersion < 90)
        return 1;
    while (size > 1 && size * teams > step->processors)
        size /= 2;
    return size;
}

template <bool PRUNE> static int launch_select(const struct lk_cuda_step *step, void *stream) {
    struct select_args a = {step->pool, step->batch, step->clock};
    const uint32_t team = choose_team(step);
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attributes[2] = {};

    cudaFuncSetAttribute(select_kernel<PRUNE>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         sizeof(struct shared));
    if (team > 8)
        cudaFuncSetAttribute(select_kernel<PRUNE>, cudaFuncAttributeNonPortableClusterSizeAllowed,
                             1);
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {team, 1, 1};
    config.gridDim = dim3(team, step->pool.geometry.kv_heads, step->bucket);
    config.blockDim = THREADS;
    config.dynamicSmemBytes = sizeof(struct shared);
    config.stream = (cudaStream_t)stream;
    config.attrs = attributes;
    config.numAttrs = team > 1 ? 2 : 1;
    return (int)cudaLaunchKernelEx(&config, select_kernel<PRUNE>, a);
}

int lk_cuda_prune(const struct lk_cuda_step *step, void *stream) {
    return launch_select<true>(step, stream);
}

int lk_cuda_select(const struct lk_cuda_step *step, void *stream) {
    return launch_select<false>(step, stream);
}
