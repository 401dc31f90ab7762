/* SPDX-License-Identifier: MIT */
/*
 * select.cu - from scores to shares, from shares to kept pages and the sample (DESIGN section 1);
 * and, as `prune`, the pages or superpages that a second pass scores again.
 *
 * Geometry: 16 blocks a (row, KV head). Each turns segments of the row's pages into shares and
 * keeps a segment's best k as candidates, in page order; the last block to arrive takes the best k
 * of those and draws the sample. Segments are cut by the row's own length.
 *
 * Keys: a share is a float in [0, 2), so its bits order it: key = bits + 1, 0 for a page that does
 * not compete, KEY_FORCED for sink, newest and recent pages. The cut among n keys is found by a
 * histogram of the upper 11 bits; the few that share the cut's bin are ranked; many that do (equal
 * scores) are told apart by two more histograms. Equal keys: pages are emitted in page order, so
 * the lower wins.
 *
 * Sample: sums of floor(2^32 share) + 1 over 32 pages, made with the shares, less the kept pages'
 * own; their running sums find a stratum's 32 pages, a walk its page. Integers throughout.
 */
#include "device.cuh"

#define THREADS     512
#define WARPS       (THREADS / 32)
#define BLOCKS      16
#define BINS        2048
#define MEMBERS     256
#define KEY_FORCED  0x3fffffffu
#define KEYS_MOST   4096
#define ENTRIES     2048
#define SHARE_FLOOR 1e-30f
#define MARK        0x80000000u

struct select_args {
    struct lk_pool_view pool;
    const struct lk_cuda_batch *batch;
    uint32_t *sync;
    uint32_t prune;
};

struct shared {
    uint32_t keys[KEYS_MOST]; /* of a segment; later: pages of the sample */
    uint32_t hist[BINS];      /* later: pages up to and with an entry */
    union {
        uint64_t prefix[ENTRIES];   /* weights up to and with an entry */
        uint32_t values[KEYS_MOST]; /* shares of kept pages; indices emitted */
    };
    uint32_t kept[KEYS_MOST];
    uint32_t hits[KEYS_MOST];
    float sample_bias[KEYS_MOST];
    alignas(16) uint32_t members[MEMBERS];
    uint64_t warp_sum[WARPS];
    uint32_t warp_count[2][WARPS];
    float lse[LK_GROUP_MAX];
    float2 part[LK_GROUP_MAX];
    uint32_t bin, above, count, last;
    uint32_t cut, ties;
};

struct cut {
    uint32_t key, ties; /* keys above; and the first `ties` equal */
};

/* ---- block-wide steps ---- */

/* Inclusive sum over the block's threads -> the thread's own. `slot` is one of two scratch rows. */
__device__ __noinline__ uint32_t block_prefix(struct shared *s, uint32_t x, uint32_t slot,
                                              uint32_t *ret_total) {
    const uint32_t lane = threadIdx.x % 32, warp = warp_index();
    uint32_t sum = x, before = 0, total = 0;

    for (int o = 1; o < 32; o <<= 1) {
        uint32_t y = __shfl_up_sync(LK_FULL_WARP, sum, o);
        sum += lane >= o ? y : 0;
    }
    if (lane == 31)
        s->warp_count[slot][warp] = sum;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        uint32_t y = s->warp_count[slot][w];
        before += w < warp ? y : 0;
        total += y;
    }
    *ret_total = total;
    return before + sum;
}

/* Highest bin with which the bins from the top hold at least k: s->bin, s->above. -> keys in
 * all. */
__device__ __noinline__ uint32_t find_bin(struct shared *s, uint32_t k) {
    constexpr int PER = BINS / THREADS;
    uint32_t own[PER], sum = 0, total, before;

#pragma unroll
    for (int i = 0; i < PER; i++) {
        own[i] = s->hist[BINS - 1 - (threadIdx.x * PER + i)];
        sum += own[i];
    }
    before = block_prefix(s, sum, 0, &total) - sum;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        if (before < k && before + own[i] >= k) {
            s->bin = BINS - 1 - (threadIdx.x * PER + i);
            s->above = before;
        }
        before += own[i];
    }
    __syncthreads();
    return total;
}

/* Keys lie in shared memory or in memory that other blocks wrote: read past L1. */
__device__ __forceinline__ uint32_t key_at(const uint32_t *keys, uint32_t i) {
    return *(const volatile uint32_t *)&keys[i];
}

__device__ __noinline__ void fill_bins(struct shared *s, uint32_t n, const uint32_t *keys,
                                       uint32_t shift, uint32_t mask, uint32_t prefix_shift,
                                       uint32_t prefix) {
    for (uint32_t i = threadIdx.x; i < BINS; i += THREADS)
        s->hist[i] = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
        uint32_t x = key_at(keys, i);
        if (x && (prefix_shift == 32 || x >> prefix_shift == prefix))
            atomicAdd(&s->hist[x >> shift & mask], 1u);
    }
    __syncthreads();
}

/* The cut that leaves the best k of n keys; all that are not 0 where there are no more. */
__device__ __noinline__ struct cut find_cut(struct shared *s, uint32_t n, uint32_t k,
                                            const uint32_t *keys) {
    uint32_t top, middle, need, inside;

    fill_bins(s, n, keys, 19, BINS - 1, 32, 0);
    if (threadIdx.x == 0)
        s->count = 0;
    if (find_bin(s, k) <= k)
        return {0, 0};
    top = s->bin;
    need = k - s->above;
    inside = s->hist[top];
    __syncthreads();
    if (inside <= MEMBERS) {
        for (uint32_t i = threadIdx.x; i < MEMBERS; i += THREADS)
            if (i >= inside)
                s->members[i] = 0;
        for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
            uint32_t x = key_at(keys, i);
            if (x && x >> 19 == top)
                s->members[atomicAdd(&s->count, 1u)] = x;
        }
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < inside; i += THREADS) {
            uint32_t x = s->members[i], more = 0, equal = 0;
#pragma unroll 4
            for (uint32_t j = 0; j < inside; j += 4) {
                uint4 y = *(const uint4 *)&s->members[j];
                more += (y.x > x) + (y.y > x) + (y.z > x) + (y.w > x);
                equal += (y.x == x) + (y.y == x) + (y.z == x) + (y.w == x);
            }
            if (more < need && need <= more + equal) {
                s->cut = x;
                s->ties = need - more;
            }
        }
    } else {
        fill_bins(s, n, keys, 8, BINS - 1, 19, top);
        find_bin(s, need);
        middle = s->bin;
        need -= s->above;
        __syncthreads();
        fill_bins(s, n, keys, 0, 255, 8, top << 11 | middle);
        find_bin(s, need);
        if (threadIdx.x == 0) {
            s->cut = (top << 11 | middle) << 8 | s->bin;
            s->ties = need - s->above;
        }
    }
    __syncthreads();
    return {s->cut, s->ties};
}

/* Indices of the items within the cut, in order -> how many. */
__device__ __noinline__ uint32_t emit(struct shared *s, uint32_t n, const uint32_t *keys,
                                      struct cut cut, uint32_t *ret) {
    const uint32_t lane = threadIdx.x % 32, warp = warp_index(), below = (1u << lane) - 1;
    const uint32_t span = (n + THREADS - 1) / THREADS * 32, first = warp * span;
    const uint32_t last = min(n, first + span);
    uint32_t more = 0, equal = 0, total_more = 0, total_equal = 0, all_more, all_equal;

    for (uint32_t i = first + lane; i < last + lane; i += 32) {
        uint32_t x = i < last ? key_at(keys, i) : 0;
        total_more += __popc(__ballot_sync(LK_FULL_WARP, x > cut.key));
        total_equal += __popc(__ballot_sync(LK_FULL_WARP, x && x == cut.key));
    }
    more = block_prefix(s, lane == 31 ? total_more : 0, 0, &all_more);
    equal = block_prefix(s, lane == 31 ? total_equal : 0, 1, &all_equal);
    more = __shfl_sync(LK_FULL_WARP, more, 31) - total_more;
    equal = __shfl_sync(LK_FULL_WARP, equal, 31) - total_equal;
#pragma unroll 1
    for (uint32_t i = first + lane; i < last + lane; i += 32) {
        uint32_t x = i < last ? key_at(keys, i) : 0;
        uint32_t m = __ballot_sync(LK_FULL_WARP, x > cut.key);
        uint32_t e = __ballot_sync(LK_FULL_WARP, x && x == cut.key);
        uint32_t equal_before = equal + __popc(e & below);
        if (x > cut.key || (x && x == cut.key && equal_before < cut.ties))
            ret[more + __popc(m & below) + min(equal_before, cut.ties)] = i;
        more += __popc(m);
        equal += __popc(e);
    }
    __syncthreads();
    return all_more + min(all_equal, cut.ties);
}

/* ---- a segment ---- */

struct plan {
    const struct lk_cuda_row *r;
    uint32_t head, group, stride;
    uint32_t units, segment, segments, most; /* most: candidates of a segment */
    uint32_t k, sampled;                     /* to keep; to sample */
    uint32_t sink, tail;                     /* pages kept whatever their share */
    uint32_t step;                           /* pages a unit: 4 where superpages are pruned */
};

__device__ struct plan make_plan(const struct select_args &a, const struct lk_cuda_row *r,
                                 uint32_t head) {
    struct plan p = {};

    p.r = r;
    p.head = head;
    p.group = a.pool.geometry.group;
    p.stride = group_stride(p.group);
    p.step = 1;
    if (a.prune) {
        p.units = r->units;
        p.segment = r->prune_segment;
        p.segments = r->prune_segments;
        p.k = r->prune_units;
        p.most = min(r->prune_units, p.segment);
        p.step = r->scan == LK_TREE ? 4 : 1;
        return p;
    }
    p.units = r->pages;
    p.segment = r->segment_pages;
    p.segments = r->segments;
    p.sampled = min(r->sampled, r->budget_pages > 2 ? r->budget_pages - 2 : 0);
    p.k = r->budget_pages - p.sampled;
    p.most = min(r->budget_pages, p.segment);
    p.sink = min(r->sink_pages, p.k - 1);
    p.tail = 1 + min(r->recent_pages ? r->recent_pages - 1 : 0, p.k - 1 - p.sink);
    return p;
}

__device__ __forceinline__ uint32_t *row_shares(const struct plan &p) {
    return (uint32_t *)(p.r->workspace + p.r->shares) +
           (uint64_t)p.head * p.r->segments * p.r->segment_pages;
}
__device__ __forceinline__ uint64_t *row_sums(const struct plan &p) {
    return (uint64_t *)(p.r->workspace + p.r->sums) +
           (uint64_t)p.head * p.r->segments * p.r->segment_pages / 32;
}
__device__ __forceinline__ uint32_t *row_candidates(const struct plan &p) {
    return (uint32_t *)(p.r->workspace + p.r->candidates) +
           (uint64_t)p.head * 2 * p.segments * p.most;
}

/* log2 of the sum over all pages, by query head: from the parts that the last pass left. */
__device__ void sum_parts(const struct select_args &a, const struct plan &p, struct shared *s) {
    const uint32_t lane = threadIdx.x % 32, warp = warp_index();
    const bool second = !a.prune && p.r->list_max;
    const uint32_t first = second ? 1 + p.r->chunks : 1;
    const uint32_t count = second ? p.r->rescan_tiles + p.r->rest_chunks : p.r->chunks;
    const float2 *parts = row_parts(p.r, p.head, p.stride);

    const uint32_t share = p.group < WARPS ? WARPS / p.group : 1; /* warps a query head */

    for (uint32_t item = warp; item < p.group * share; item += WARPS) {
        const uint32_t g = item / share, own = item % share * 32 + lane;
        float2 sum = own == 0 ? __ldcg(&parts[g]) : make_float2(-INFINITY, 0.f);
        for (uint32_t i = own; i < count; i += 128 * share) {
            float2 v[4];
#pragma unroll
            for (int x = 0; x < 4; x++)
                v[x] = i + 32 * share * x < count
                           ? __ldcg(&parts[(uint64_t)(first + i + 32 * share * x) * p.stride + g])
                           : make_float2(-INFINITY, 0.f);
            sum = merge_parts(merge_parts(sum, merge_parts(v[0], v[1])), merge_parts(v[2], v[3]));
        }
#pragma unroll
        for (int o = 16; o; o >>= 1)
            sum = merge_parts(sum, make_float2(__shfl_xor_sync(LK_FULL_WARP, sum.x, o),
                                               __shfl_xor_sync(LK_FULL_WARP, sum.y, o)));
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

__device__ __forceinline__ uint64_t weight_of(uint32_t share) {
    return (uint64_t)(__uint_as_float(share) * 4294967296.f) + 1;
}

/* Shares of a segment to s->keys, and to memory for the sample. */
__device__ void make_keys(const struct select_args &a, const struct plan &p, struct shared *s,
                          uint32_t base, uint32_t n) {
    const float lift = p.step == 4 ? 2.f : 0.f, mean = 1.f / p.group;
    const float *scores = row_scores(p.r, p.head, p.stride);

#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < (n + 31) / 32 * 32; i += THREADS) {
        uint32_t share = 0, key = 0, j = base + i;
        uint64_t weight = 0;
        if (i < n) {
            const float4 *at = (const float4 *)(scores + (uint64_t)j * p.step * p.stride);
            float sum = 0;
            bool competes = false;
            for (uint32_t g = 0; g < p.group; g += 4) {
                float4 v = __ldcg(at + g / 4);
                if (g == 0)
                    competes = __float_as_uint(v.x) & 1;
                sum += exp2_fast(v.x + lift - s->lse[g]);
                sum += g + 1 < p.group ? exp2_fast(v.y + lift - s->lse[g + 1]) : 0.f;
                sum += g + 2 < p.group ? exp2_fast(v.z + lift - s->lse[g + 2]) : 0.f;
                sum += g + 3 < p.group ? exp2_fast(v.w + lift - s->lse[g + 3]) : 0.f;
            }
            sum *= mean;
            share = sum >= SHARE_FLOOR ? __float_as_uint(fminf(sum, 1.5f)) : 0;
            weight = weight_of(share);
            key = a.prune || competes ? share + 1 : 0;
            if (!a.prune && (j < p.sink || j + p.tail >= p.units))
                key = KEY_FORCED;
            s->keys[i] = key;
            if (!a.prune)
                __stcg(&row_shares(p)[j], share);
        }
        if (p.sampled) {
            uint32_t low = __reduce_add_sync(LK_FULL_WARP, (uint32_t)(weight & 0xffffff));
            uint32_t high = __reduce_add_sync(LK_FULL_WARP, (uint32_t)(weight >> 24));
            if (threadIdx.x % 32 == 0)
                __stcg(&row_sums(p)[j / 32], ((uint64_t)high << 24) + low);
        }
    }
    __syncthreads();
}

__device__ void run_segment(const struct select_args &a, const struct plan &p, struct shared *s,
                            uint32_t segment) {
    const uint32_t base = segment * p.segment, n = min(p.segment, p.units - base);
    uint32_t *keys = row_candidates(p) + segment * p.most, *pages = keys + p.segments * p.most;
    uint32_t count;

    make_keys(a, p, s, base, n);
    struct cut cut = find_cut(s, n, min(p.k, p.most), s->keys);
    count = emit(s, n, s->keys, cut, s->hits);
    for (uint32_t i = threadIdx.x; i < p.most; i += THREADS) {
        __stcg(&keys[i], i < count ? s->keys[s->hits[i]] : 0u);
        if (i < count)
            __stcg(&pages[i], base + s->hits[i]);
    }
    __syncthreads();
}

/* ---- the last block ---- */

__device__ void finish_prune(const struct plan &p, struct shared *s, uint32_t items) {
    const uint32_t *keys = row_candidates(p), *pages = keys + items;
    uint32_t *list = row_rescan(p.r, p.head), count;
    float *scores = row_scores(p.r, p.head, p.stride);
    uint32_t *chosen = row_shares(p); /* not in use before select */
    struct cut cut = find_cut(s, items, p.k, keys);

    count = emit(s, items, keys, cut, chosen);
    for (uint32_t at = threadIdx.x; at < count; at += THREADS) {
        uint32_t unit = __ldcg(&pages[chosen[at]]);
        for (uint32_t x = 0; x < p.step; x++) {
            uint32_t page = unit * p.step + x;
            uint32_t *tag = (uint32_t *)(scores + (uint64_t)page * p.stride);
            list[at * p.step + x] = page;
            *tag = __ldcg(tag) | 1;
        }
    }
    uint32_t tail = p.step == 4 ? p.r->complete % 4 : 0;
    if (threadIdx.x < tail) {
        uint32_t page = p.r->complete - tail + threadIdx.x;
        list[count * p.step + threadIdx.x] = page;
        *(uint32_t *)(scores + (uint64_t)page * p.stride) = 1;
    }
    if (threadIdx.x == 0)
        row_head(p.r, p.head)->listed = count * p.step + tail;
}

/* Drop what a mass target does not need: s->kept shrinks -> pages left. */
__device__ uint32_t apply_target(const struct plan &p, struct shared *s, uint32_t kept) {
    const float target = p.r->mass_target;
    auto forced = [&](uint32_t page) { return page < p.sink || page + p.tail >= p.units; };

    for (uint32_t i = threadIdx.x; i < kept; i += THREADS)
        s->values[i] = __ldcg(&row_shares(p)[s->kept[i]]);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < kept; i += THREADS) {
        uint32_t before = 0;
        double sum = 0;
        for (uint32_t j = 0; j < kept; j++) {
            bool first = forced(s->kept[j]) || s->values[j] > s->values[i] ||
                         (s->values[j] == s->values[i] && j < i);
            if (first && j != i) {
                before++;
                sum += __uint_as_float(s->values[j]);
            }
        }
        s->hits[i] = forced(s->kept[i]) || before < LK_MASS_PAGES_MIN || sum < target;
        s->keys[i] = s->kept[i];
    }
    __syncthreads();
    kept = emit(s, kept, s->hits, {0, 0}, s->values);
    for (uint32_t i = threadIdx.x; i < kept; i += THREADS)
        s->kept[i] = s->keys[s->values[i]];
    __syncthreads();
    return kept;
}

/* Running sums over entries of `per` x 32 pages, kept pages left out: s->prefix, s->hist. */
__device__ void sum_entries(const struct plan &p, struct shared *s, uint32_t kept, uint32_t per,
                            uint32_t entries) {
    constexpr int EACH = ENTRIES / THREADS;
    const uint32_t lane = threadIdx.x % 32, warp = warp_index();
    const uint64_t *sums = row_sums(p);
    uint64_t own[EACH], sum = 0, before = 0;
    uint32_t count[EACH], pages = 0, total;

    for (uint32_t e = threadIdx.x; e < ENTRIES; e += THREADS) {
        uint64_t x = 0;
        for (uint32_t i = e * per; e < entries && i < (e + 1) * per && i * 32 < p.units; i++)
            x += __ldcg(&sums[i]);
        s->prefix[e] = x;
        s->hist[e] = e < entries ? min(per * 32, p.units - e * per * 32) : 0;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < kept; i += THREADS) {
        uint32_t page = s->kept[i], *share = &row_shares(p)[page], bits = __ldcg(share);
        atomicAdd((unsigned long long *)&s->prefix[page / 32 / per],
                  (unsigned long long)-(long long)weight_of(bits));
        atomicSub(&s->hist[page / 32 / per], 1u);
        __stcg(share, bits | MARK);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        sum += own[i] = s->prefix[threadIdx.x * EACH + i];
        pages += count[i] = s->hist[threadIdx.x * EACH + i];
    }
    uint64_t scan = sum;
    for (int o = 1; o < 32; o <<= 1) {
        uint64_t y = __shfl_up_sync(LK_FULL_WARP, scan, o);
        scan += lane >= o ? y : 0;
    }
    if (lane == 31)
        s->warp_sum[warp] = scan;
    uint32_t pages_before = block_prefix(s, pages, 0, &total) - pages;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        before += w < warp ? s->warp_sum[w] : 0;
    before += scan - sum;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        s->prefix[threadIdx.x * EACH + i] = before += own[i];
        s->hist[threadIdx.x * EACH + i] = pages_before += count[i];
    }
    __syncthreads();
}

/* Sample p.sampled of the pages not kept: pages to s->keys, log2 weights to s->sample_bias -> how
 * many. */
__device__ uint32_t draw(const struct plan &p, struct shared *s, uint32_t kept) {
    const uint32_t sums = (p.units + 31) / 32, per = (sums + ENTRIES - 1) / ENTRIES;
    const uint32_t entries = (sums + per - 1) / per;
    const uint32_t *shares = row_shares(p);
    uint64_t by_share, by_page, total, all;
    uint32_t left, strata = p.sampled;

    sum_entries(p, s, kept, per, entries);
    all = s->prefix[ENTRIES - 1];
    left = s->hist[ENTRIES - 1];
    if (left <= strata) { /* every page, weight 1 */
        strata = left;
        by_share = 0;
        by_page = 1;
        total = left;
    } else {
        by_share = 19 * (uint64_t)left;
        by_page = all;
        total = 20 * (uint64_t)left * all;
    }
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t step = total / strata, start = total / (2 * (uint64_t)strata);
    auto upto = [&](uint32_t e) { return by_share * s->prefix[e] + by_page * s->hist[e]; };

    for (uint32_t base = warp_index(); base < strata; base += 4 * WARPS) { /* a warp a stratum */
        uint32_t entry[4], bits[4];
#pragma unroll
        for (int x = 0; x < 4; x++) {
            uint64_t point = (base + WARPS * x) * step + start;
            uint32_t above = __ballot_sync(LK_FULL_WARP, upto(64 * lane + 63) > point), low, high;
            entry[x] = above ? 64 * (__ffs(above) - 1) : 0;
            low = __ballot_sync(LK_FULL_WARP, upto(entry[x] + lane) > point);
            high = __ballot_sync(LK_FULL_WARP, upto(entry[x] + 32 + lane) > point);
            entry[x] =
                low ? entry[x] + __ffs(low) - 1 : entry[x] + 32 + (high ? __ffs(high) - 1 : 0);
            uint32_t page = entry[x] * per * 32 + lane;
            bits[x] = page < p.units ? __ldcg(&shares[page]) : MARK;
        }
#pragma unroll
        for (int x = 0; x < 4; x++) {
            uint64_t point = (base + WARPS * x) * step + start,
                     run = entry[x] ? upto(entry[x] - 1) : 0;
            uint32_t first = entry[x] * per * 32, hit = p.units - 1;
            for (uint32_t i = 0; i < per; i++, first += 32) {
                if (i)
                    bits[x] = first + lane < p.units ? __ldcg(&shares[first + lane]) : MARK;
                uint64_t sum = bits[x] & MARK ? 0 : by_share * weight_of(bits[x]) + by_page;
#pragma unroll
                for (int o = 1; o < 32; o <<= 1) {
                    uint64_t y = __shfl_up_sync(LK_FULL_WARP, sum, o);
                    sum += lane >= o ? y : 0;
                }
                uint32_t over = __ballot_sync(LK_FULL_WARP, run + sum > point);
                if (over) {
                    hit = first + __ffs(over) - 1;
                    break;
                }
                run += __shfl_sync(LK_FULL_WARP, sum, 31);
            }
            if (lane == 0 && base + WARPS * x < strata)
                s->hits[base + WARPS * x] = hit;
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < strata; i += THREADS)
        s->keys[i] = i == 0 || s->hits[i] != s->hits[i - 1];
    __syncthreads();
    const uint32_t drawn = emit(s, strata, s->keys, {0, 0}, s->values);
    for (uint32_t at = threadIdx.x; at < drawn; at += THREADS) {
        uint32_t i = s->values[at], hits = (at + 1 < drawn ? s->values[at + 1] : strata) - i;
        uint64_t own = by_share * weight_of(__ldcg(&shares[s->hits[i]])) + by_page;
        s->keys[at] = s->hits[i];
        s->sample_bias[at] =
            by_share ? (float)log2((double)hits * (double)total / ((double)strata * (double)own))
                     : 0.f;
    }
    __syncthreads();
    return drawn;
}

__device__ __forceinline__ uint32_t count_below(const uint32_t *pages, uint32_t n, uint32_t page) {
    uint32_t low = 0;
    while (low < n) {
        uint32_t middle = (low + n) / 2;
        if (pages[middle] < page)
            low = middle + 1;
        else
            n = middle;
    }
    return low;
}

__device__ void write_pick(const struct plan &p, uint32_t at, uint32_t page, float bias,
                           uint32_t kept) {
    /* struct lk_cuda_pick in one store */
    *(uint4 *)&row_picks(p.r, p.head)[at] =
        make_uint4(page, physical_page(p.r, page), __float_as_uint(bias), kept);
    if (p.r->list && at < p.r->list_pages)
        p.r->list[(uint64_t)p.head * p.r->list_pages + at] = {page, kept ? 1.f : exp2f(bias)};
}

/* log2 mass of the pages not kept, by query head: what the kept leave of 1; where they leave too
 * little for a float to tell, summed over all the others. */
__device__ __noinline__ void estimate_rest(const struct plan &p, struct shared *s, uint32_t kept) {
    const uint32_t lane = threadIdx.x % 32, warp = warp_index();
    const float *scores = row_scores(p.r, p.head, p.stride);
    float *rest = row_head(p.r, p.head)->rest;

    for (uint32_t g = warp; g < p.group; g += WARPS) {
        float sum = 0;
        for (uint32_t i = lane; i < kept; i += 32)
            sum += exp2_fast(__ldcg(&scores[(uint64_t)s->kept[i] * p.stride + g]) - s->lse[g]);
        sum = 1.f - warp_sum(sum);
        s->part[g].x = sum;
        if (lane == 0)
            rest[g] = log2_fast(sum) + s->lse[g];
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t g = 0; g < p.group; g++) {
        float2 sum = make_float2(-INFINITY, 0.f);
        if (s->part[g].x > 1e-5f)
            continue;
        for (uint32_t j = threadIdx.x; j < p.units; j += THREADS) {
            uint32_t at = count_below(s->kept, kept, j);
            if (at == kept || s->kept[at] != j)
                sum =
                    merge_parts(sum, make_float2(__ldcg(&scores[(uint64_t)j * p.stride + g]), 1.f));
        }
        for (int o = 16; o; o >>= 1)
            sum = merge_parts(sum, make_float2(__shfl_xor_sync(LK_FULL_WARP, sum.x, o),
                                               __shfl_xor_sync(LK_FULL_WARP, sum.y, o)));
        if (lane == 0)
            ((float2 *)s->members)[warp] = sum;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int w = 1; w < WARPS; w++)
                sum = merge_parts(sum, ((float2 *)s->members)[w]);
            rest[g] = sum.x + log2_fast(sum.y);
        }
        __syncthreads();
    }
}

__device__ void finish_select(const struct plan &p, struct shared *s, uint32_t items) {
    const uint32_t *keys = row_candidates(p), *pages = keys + items;
    uint32_t kept, drawn = 0;
    struct cut cut;

    if (items <= KEYS_MOST) {
        for (uint32_t i = threadIdx.x; i < items; i += THREADS)
            s->keys[i] = __ldcg(&keys[i]);
        keys = s->keys;
        __syncthreads();
    }
    cut = find_cut(s, items, p.k, keys);
    kept = emit(s, items, keys, cut, s->hits);
    for (uint32_t i = threadIdx.x; i < kept; i += THREADS)
        s->kept[i] = __ldcg(&pages[s->hits[i]]);
    __syncthreads();
    if (p.r->mass_target > 0)
        kept = apply_target(p, s, kept);
    if (p.sampled)
        drawn = draw(p, s, kept);
    else
        estimate_rest(p, s, kept);
    for (uint32_t i = threadIdx.x; i < kept; i += THREADS)
        write_pick(p, i + count_below(s->keys, drawn, s->kept[i]), s->kept[i], 0.f, 1);
    for (uint32_t i = threadIdx.x; i < drawn; i += THREADS)
        write_pick(p, i + count_below(s->kept, kept, s->keys[i]), s->keys[i], s->sample_bias[i], 0);
    if (threadIdx.x == 0) {
        struct lk_cuda_head *h = row_head(p.r, p.head);
        h->kept = kept;
        h->sampled = drawn;
    }
}

__global__ void __launch_bounds__(THREADS)
    select_kernel(const __grid_constant__ struct select_args a) {
    extern __shared__ __align__(16) uint8_t memory[];
    struct shared *s = (struct shared *)memory;
    const uint32_t head = blockIdx.y, row = blockIdx.z;
    const struct lk_cuda_row *r = &a.batch->row[row];

    let_next_start();
    if (row >= a.batch->rows || !r->scan || (a.prune && !r->list_max)) {
        wait_for_previous();
        return;
    }
    const struct plan p = make_plan(a, r, head);
    const uint32_t blocks = min(p.segments, BLOCKS);
    wait_for_previous();
    if (blockIdx.x >= blocks)
        return;
    sum_parts(a, p, s);
    for (uint32_t segment = blockIdx.x; segment < p.segments; segment += blocks)
        run_segment(a, p, s, segment);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t *word = &a.sync[row * a.pool.geometry.kv_heads + head];
        s->last = atomicAdd(word, 1u) == blocks - 1;
        if (s->last)
            *word = 0;
    }
    __syncthreads();
    if (!s->last)
        return;
    __threadfence();
    if (a.prune)
        finish_prune(p, s, p.segments * p.most);
    else
        finish_select(p, s, p.segments * p.most);
}

static int launch_select(const struct lk_cuda_step *step, uint32_t prune, void *stream) {
    struct select_args a = {step->pool, step->batch, step->sync, prune};

    cudaFuncSetAttribute(select_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         sizeof(struct shared));
    return launch(select_kernel, dim3(BLOCKS, step->pool.geometry.kv_heads, step->bucket), THREADS,
                  sizeof(struct shared), stream, a);
}

int lk_cuda_prune(const struct lk_cuda_step *step, void *stream) {
    return launch_select(step, 1, stream);
}

int lk_cuda_select(const struct lk_cuda_step *step, void *stream) {
    return launch_select(step, 0, stream);
}
