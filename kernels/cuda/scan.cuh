/* SPDX-License-Identifier: MIT */
/*
 * scan.cuh - what the passes over summaries share: tasks, queries, scores, sums.
 *
 * Words: a set is (row, KV head, up to eight queries); a tile is eight records that a warp scores
 * together; a task is a set's chunk of tiles, or one tile of its list, or some of the pages that
 * the list left out. A score goes to its page's place, a task's sum to its slot.
 *
 * Everything is for one warp unless its name or its comment says otherwise.
 */
#ifndef LK_CUDA_SCAN_CUH
#define LK_CUDA_SCAN_CUH

#include "clock.cuh"
#include "tile.cuh"

#define INTERLEAVE 16 /* chunks that take turns at the tiles of their range */
#define WINDOW     8  /* heads whose queries a block holds */

/* What every warp of a block reads of the batch at first, in shared memory: the way there is long,
 * and each look would depend on the one before. */
struct held_batch {
    uint32_t rows, tasks, heads; /* tasks of the stage, and of LK_CUDA_HEADS */
    uint32_t first[LK_CUDA_ROWS_MAX];
    struct lk_cuda_row row; /* the first one */
};

struct scan_args {
    struct lk_pool_view pool;
    const struct lk_cuda_batch *batch;
    int stage;         /* LK_CUDA_RANK, _COARSE or _RESCAN */
    uint32_t heads;    /* 1: append and newest page too */
    uint32_t scanners; /* warps of a block that score */
    uint32_t tile_bytes;
    /* Sets of a row, passes over a KV head's queries, blocks; and what divides by them. */
    uint32_t sets, sets_inverse, passes, passes_inverse, blocks_inverse;
    struct records pages; /* at the stage's rank; what differs of superpages: */
    uint32_t super_stride, super_scales, super_tokens;
    struct lk_cuda_clock *clock;   /* may be NULL */
    const struct held_batch *held; /* set by the kernel */
};

/* For a stage by a grid of as many blocks as there are multiprocessors. */
static inline struct scan_args make_args(const struct lk_cuda_step *step, int stage,
                                         uint32_t rank) {
    struct scan_args a = {step->pool, step->batch, stage};
    const struct lk_record coarse = lk_record_coarse(&a.pool.geometry),
                           fine = lk_record_fine(&a.pool.geometry),
                           super = lk_record_super(&a.pool.geometry);

    a.passes = (a.pool.geometry.group + 7) / 8;
    a.passes_inverse = lk_cuda_inverse(a.passes);
    a.sets = a.pool.geometry.kv_heads * a.passes;
    a.sets_inverse = lk_cuda_inverse(a.sets);
    a.blocks_inverse = lk_cuda_inverse(step->processors);
    a.pages = {coarse.stride,   rank > LK_COARSE_RANK ? fine.stride : 0,
               coarse.centroid, coarse.coeffs,
               coarse.scales,   fine.coeffs,
               fine.scales,     coarse.tokens};
    a.super_stride = super.stride;
    a.super_scales = super.scales;
    a.super_tokens = super.tokens;
    return a;
}

/* The kernel for any head dimension, of either pass; and what its blocks need. */
int lk_cuda_launch_plain(struct scan_args a, uint32_t rank, uint32_t processors, void *stream);
uint32_t lk_cuda_plain_least(const struct lk_geometry *geometry, uint32_t rank);

/* ---- tasks ---- */

struct cursor {
    const struct lk_cuda_row *r;
    uint32_t task, set, head, pass, slot; /* set: row, head and pass in one number */
    uint32_t tile, end, step, units;      /* tiles of the task; units of the row, or listed */
    bool super;
};

/* A row's tasks of a set, and what divides by them. */
struct chunks {
    uint32_t count, inverse;
};

__device__ __forceinline__ struct chunks row_chunks(const struct lk_cuda_row *r, int stage) {
    if (stage == LK_CUDA_RESCAN)
        return {r->rescan_tiles, r->tiles_inverse};
    if (stage == LK_CUDA_REST)
        return {r->rest_chunks, r->rest_inverse};
    return {r->chunks, r->chunks_inverse};
}

/* The block's run of `total` tasks, begin .. end - 1. */
__device__ __forceinline__ void find_tasks(const struct scan_args &a, uint32_t total,
                                           uint32_t *begin, uint32_t *end) {
    find_run(total, lk_cuda_divide(total, gridDim.x, a.blocks_inverse), begin, end);
}

/* Fill it, by the block, which meets after it. */
__device__ __forceinline__ void hold_batch(const struct lk_cuda_batch *b, int stage,
                                           struct held_batch *ret) {
    constexpr uint32_t WORDS = LK_CUDA_ROW_WORDS;

    for (uint32_t i = threadIdx.x; i < LK_CUDA_ROWS_MAX + WORDS; i += blockDim.x)
        if (i < WORDS)
            ((uint32_t *)&ret->row)[i] = __ldcg((const uint32_t *)&b->row[0] + i);
        else
            ret->first[i - WORDS] = __ldcg(&b->first[stage][i - WORDS]);
    if (threadIdx.x == 0) {
        ret->rows = __ldcg(&b->rows);
        ret->tasks = __ldcg(&b->tasks[stage]);
        ret->heads = __ldcg(&b->tasks[LK_CUDA_HEADS]);
    }
    __syncthreads();
}

__device__ __forceinline__ const struct lk_cuda_row *row_at(const struct scan_args &a,
                                                            uint32_t row) {
    return row ? &a.batch->row[row] : &a.held->row;
}

/* The row of a lane's task: the last whose first task is not after it. */
__device__ __forceinline__ uint32_t row_of(const uint32_t *first, uint32_t rows, uint32_t task) {
    uint32_t low = 0, high = rows;

    while (high - low > 1) {
        const uint32_t mid = (low + high) / 2;
        if (first[mid] <= task)
            low = mid;
        else
            high = mid;
    }
    return low;
}

/* Set of a task. */
__device__ __forceinline__ uint32_t set_of(const struct scan_args &a, uint32_t task) {
    const uint32_t row = row_of(a.held->first, a.held->rows, task);
    const struct chunks chunks = row_chunks(row_at(a, row), a.stage);

    return row * a.sets + lk_cuda_divide(task - a.held->first[row], chunks.count, chunks.inverse);
}

/* First task of a stage whose set is `set` or a later one. */
__device__ __forceinline__ uint32_t first_of_set(const struct scan_args &a, uint32_t set) {
    const struct held_batch *h = a.held;
    const uint32_t row = lk_cuda_divide(set, a.sets, a.sets_inverse);

    if (row >= h->rows)
        return UINT32_MAX;
    uint32_t first = h->first[row], next = row + 1 < h->rows ? h->first[row + 1] : h->tasks;
    return next == first ? first
                         : first + (set - row * a.sets) * row_chunks(row_at(a, row), a.stage).count;
}

/* Row, KV head and pass of a set. */
struct owner {
    uint32_t row, head, pass;
};

/* Of set `in` of a row. */
__device__ __forceinline__ struct owner owner_in(const struct scan_args &a, uint32_t row,
                                                 uint32_t in) {
    const uint32_t head = lk_cuda_divide(in, a.passes, a.passes_inverse);

    return {row, head, in - head * a.passes};
}

__device__ __forceinline__ struct owner owner_of(const struct scan_args &a, uint32_t set) {
    const uint32_t row = lk_cuda_divide(set, a.sets, a.sets_inverse);

    return owner_in(a, row, set - row * a.sets);
}

/* Fill row, head, pass and set of c->task, of which row's `first` is the first -> chunk. */
__device__ __forceinline__ uint32_t split_task(const struct scan_args &a, int stage, uint32_t row,
                                               uint32_t first, struct cursor *c) {
    const uint32_t task = c->task - first;

    c->r = row_at(a, row);
    const struct chunks chunks = row_chunks(c->r, stage);
    const uint32_t in = lk_cuda_divide(task, chunks.count, chunks.inverse);
    const struct owner o = owner_in(a, row, in);
    c->set = row * a.sets + in;
    c->head = o.head;
    c->pass = o.pass;
    return task - in * chunks.count;
}

/* The same of a task of the block's stage. */
__device__ __forceinline__ uint32_t split_held(const struct scan_args &a, struct cursor *c) {
    const uint32_t row = row_of(a.held->first, a.held->rows, c->task);

    return split_task(a, a.stage, row, a.held->first[row], c);
}

/* Fill the cursor from c->task, a task of the first pass, if it is before `last`. By lane. */
__device__ __forceinline__ void find_task(const struct scan_args &a, uint32_t last,
                                          struct cursor *c) {
    if (c->task >= last)
        return;
    const uint32_t chunk = split_held(a, c);
    const uint32_t each = c->r->chunk_units / TILE, tiles = (c->r->units + TILE - 1) / TILE,
                   range = chunk / INTERLEAVE * INTERLEAVE;

    c->slot = 1 + chunk;
    c->super = c->r->scan == LK_TREE;
    c->units = c->r->units;
    c->step = min((uint32_t)INTERLEAVE, c->r->chunks - range);
    c->tile = range * each + chunk - range;
    c->end = min(tiles, (range + INTERLEAVE) * each);
}

/* ---- queries ---- */

/* A lane's share of a query as it is: channels 32 i + lane. */
template <int D> struct raw_query { uint16_t x[D / 32]; };

/* Of query g of a set, by a warp; 0 where the group has no such query. */
template <int D>
__device__ __forceinline__ struct raw_query<D> load_raw(const struct scan_args &a,
                                                        const struct owner &o, uint32_t g) {
    const uint32_t lane = threadIdx.x % 32, group = a.pool.geometry.group;
    const uint32_t at = o.pass * 8 + g;
    const uint16_t *q = (const uint16_t *)row_at(a, o.row)->q + ((uint64_t)o.head * group + at) * D;
    struct raw_query<D> ret;

#pragma unroll
    for (int i = 0; i < D / 32; i++)
        ret.x[i] = at < group ? q[32 * i + lane] : 0;
    return ret;
}

/* One query of a set, rotated, by a warp. */
template <int D>
__device__ __forceinline__ void prepare_query(const struct scan_args &a, const struct owner &o,
                                              uint32_t g, const struct raw_query<D> &raw,
                                              struct four_queries<D> *ret) {
    const uint32_t lane = threadIdx.x % 32;
    const struct lk_cuda_row *r = row_at(a, o.row);
    const bool bf16 = a.pool.geometry.dtype == LK_BF16;
    constexpr int N = D / 32;
    float x[N], peak = 0, unit;
    int hi_sum = 0, lo_sum = 0;

#pragma unroll
    for (int i = 0; i < N; i++) /* normalised first: sums of huge queries stay in a float's range */
        x[i] = element(raw.x[i], bf16) * rsqrtf((float)D);
    warp_hadamard<D, N>(x);
#pragma unroll
    for (int i = 0; i < N; i++)
        peak = fmaxf(peak, fabsf(x[i]));
    peak = __uint_as_float(__reduce_max_sync(LK_FULL_WARP, __float_as_uint(peak)));
    unit = peak > 1e-33f ? 32512.f / peak : 0.f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        int v = max(-32512, min(32512, __float2int_rn(x[i] * unit))), hi = (v + 128) >> 8;
        int word = 2 * i + lane / 16, to = g % 4 * 8 + lane % 16 / 4;
        int8_t *high = (int8_t *)&ret->b[word / 4][to][word % 4];
        high[lane % 4] = (int8_t)hi;
        high[4 * 16 + lane % 4] = (int8_t)(v - 256 * hi); /* the next column */
        hi_sum += hi;
        lo_sum += v - 256 * hi;
    }
    hi_sum = __reduce_add_sync(LK_FULL_WARP, hi_sum);
    lo_sum = __reduce_add_sync(LK_FULL_WARP, lo_sum);
    if (lane == 0) {
        float scale = peak > 1e-33f ? peak / 32512.f * r->sm_scale * LK_LOG2E : 0.f;
        ret->start[g % 4] = make_int4(-8 * hi_sum, -8 * lo_sum, __float_as_int(scale), 0);
    }
}

/* ---- writing ---- */

/* Where the scores of a row and head go. */
struct place {
    float *scores;
    float2 *parts;
    uint32_t last; /* 1: a score's page competes for being kept */
    bool super;
};

__device__ __forceinline__ struct place place_of(const struct scan_args &a,
                                                 const struct lk_cuda_row *r, uint32_t head) {
    const uint32_t stride = group_stride(a.pool.geometry.group);
    struct place p = {row_scores(r, head, stride), row_parts(r, head, stride)};

    p.super = r->scan == LK_TREE && a.stage != LK_CUDA_RESCAN;
    p.last = a.stage == LK_CUDA_RESCAN || r->scan == LK_FULL || r->scan == LK_COARSE;
    return p;
}

/* As it is added to the sum: head 0's with a lowest bit of 0, as it is stored but for the tag. */
__device__ __forceinline__ float even_score(uint32_t q, float score) {
    return __uint_as_float(__float_as_uint(score) & (q == 0 ? ~1u : ~0u));
}

/* A score's bits: the lowest of head 0's says whether the page competes. */
__device__ __forceinline__ float score_bits(const struct place &p, uint32_t q, float score) {
    const uint32_t bits = __float_as_uint(p.super ? score - 2.f : score);

    return __uint_as_float(q == 0 ? (bits & ~1u) | p.last : bits);
}

/* Scores of a tile: the lane's is of unit lane / 4 and query `q`. A superpage's four pages get one
 * each, and then lane i writes page i. */
__device__ __forceinline__ void store_scores(const struct scan_args &a, const struct place &p,
                                             uint32_t unit, bool live, uint32_t q, float score) {
    const uint32_t group = a.pool.geometry.group, stride = group_stride(group);
    const uint32_t lane = threadIdx.x % 32, from = lane & 28;

    score = score_bits(p, q, score);
    if (!p.super) {
        if (live && q < group)
            p.scores[(uint64_t)unit * stride + q] = score;
        return;
    }
    float4 four;
    four.x = __shfl_sync(LK_FULL_WARP, score, from);
    four.y = __shfl_sync(LK_FULL_WARP, score, from + 1);
    four.z = __shfl_sync(LK_FULL_WARP, score, from + 2);
    four.w = __shfl_sync(LK_FULL_WARP, score, from + 3);
    if (live && (q & ~3u) < stride)
        *(float4 *)(p.scores + (uint64_t)(4 * unit + (lane & 3)) * stride + (q & ~3u)) = four;
}

/* Sum over the pages of a task: lanes of a query, then to the task's slot. */
__device__ __forceinline__ void store_part(const struct scan_args &a, const struct place &p,
                                           uint32_t slot, uint32_t q, float2 part) {
    const uint32_t stride = group_stride(a.pool.geometry.group);

#pragma unroll
    for (int o = 4; o < 32; o <<= 1) {
        float2 other = make_float2(__shfl_xor_sync(LK_FULL_WARP, part.x, o),
                                   __shfl_xor_sync(LK_FULL_WARP, part.y, o));
        part = merge_parts(part, other);
    }
    if (threadIdx.x % 32 < 4 && q < stride)
        p.parts[slot * stride + q] = part;
}

/* ---- pages that the second pass did not list ---- */

/* Four queries' scores of pages j, j + 32, j + 64, j + 96 as far as they are below last. The loads
 * run together: nothing here looks at what they bring. */
struct four_pages {
    float4 s[4];
    uint32_t mark[4]; /* the pages' words of head 0, where `s` has not got them */
};

__device__ __forceinline__ struct four_pages load_pages(const float *scores, uint32_t stride,
                                                        uint32_t first, uint32_t j, uint32_t last) {
    struct four_pages p;

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float *at = scores + (uint64_t)min(j + 32 * i, last - 1) * stride;
        p.s[i] = __ldcg((const float4 *)(at + first));
        p.mark[i] = first ? __float_as_uint(__ldcg(at)) : 0;
    }
    return p;
}

/* Add those of the four that are left. */
__device__ __forceinline__ void add_pages(const struct four_pages &p, const bool left[4],
                                          float2 part[4]) {
#pragma unroll
    for (int y = 0; y < 4; y++) {
        float x[4], peak = part[y].x, sum = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = y == 0 ? p.s[i].x : y == 1 ? p.s[i].y : y == 2 ? p.s[i].z : p.s[i].w;
            if (!left[i])
                x[i] = -INFINITY;
            peak = fmaxf(peak, x[i]);
        }
        if (peak == -INFINITY)
            continue;
#pragma unroll
        for (int i = 0; i < 4; i++)
            sum += exp2_fast(x[i] - peak);
        part[y] = make_float2(peak, fmaf(part[y].y, exp2_fast(part[y].x - peak), sum));
    }
}

/* Four queries' parts of pages j, j + 32, .. below last that the second pass did not score. The
 * next four pages are on their way while four are added. */
__device__ __forceinline__ void sum_pages(const float *scores, uint32_t stride, uint32_t first,
                                          uint32_t j, uint32_t last, float2 part[4]) {
    struct four_pages p = load_pages(scores, stride, first, j, last);

    for (; j < last; j += 128) {
        struct four_pages next = p;
        bool left[4];

        if (j + 128 < last)
            next = load_pages(scores, stride, first, j + 128, last);
#pragma unroll
        for (int i = 0; i < 4; i++)
            left[i] = j + 32 * i < last && !((first ? p.mark[i] : __float_as_uint(p.s[i].x)) & 1);
        add_pages(p, left, part);
        p = next;
    }
}

__device__ __forceinline__ float2 exchange_part(float2 part, uint32_t with) {
    return make_float2(__shfl_xor_sync(LK_FULL_WARP, part.x, with),
                       __shfl_xor_sync(LK_FULL_WARP, part.y, with));
}

/* Parts of N queries, halved: lanes with the bit keep the upper ones. The lower lane's part comes
 * first in a sum. */
template <int N> __device__ __forceinline__ void fold_parts(float2 *part, uint32_t bit) {
    const bool up = threadIdx.x & bit;

#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const float2 keep = up ? part[i + N / 2] : part[i],
                     other = exchange_part(up ? part[i] : part[i + N / 2], bit);
        part[i] = merge_parts(up ? other : keep, up ? keep : other);
    }
}

/* A task of the rest: its pages' sums, to its slot. */
__device__ __forceinline__ void sum_rest(const struct scan_args &a, uint32_t task) {
    const uint32_t lane = threadIdx.x % 32, stride = group_stride(a.pool.geometry.group);
    struct cursor c;

    c.task = task;
    const uint32_t *firsts = a.batch->first[LK_CUDA_REST], row = row_of(firsts, a.held->rows, task);
    const uint32_t chunk = split_task(a, LK_CUDA_REST, row, row ? firsts[row] : 0, &c),
                   from = chunk * c.r->rest_pages,
                   last = min(from + c.r->rest_pages, c.r->complete);
    float2 *const to =
        row_parts(c.r, c.head, stride) + (1 + c.r->chunks + c.r->rescan_tiles + chunk) * stride;
    for (uint32_t q = c.pass * 8; q < min(c.pass * 8 + 8, stride); q += 4) {
        float2 part[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            part[i] = make_float2(-INFINITY, 0.f);
        sum_pages(row_scores(c.r, c.head, stride), stride, q, from + lane, last, part);
        fold_parts<4>(part, 16);
        fold_parts<2>(part, 8);
#pragma unroll
        for (int o = 4; o; o >>= 1)
            part[0] = merge_parts(part[0], exchange_part(part[0], o));
        if ((lane & 7) == lane / 8) /* of those that hold query lane / 8: which one has its bits */
            to[q + lane / 8] = part[0];
    }
}

/* ---- records ---- */

__device__ __forceinline__ struct records records_of(const struct scan_args &a, bool super) {
    struct records r = a.pages;

    r.coarse_stride = super ? a.super_stride : r.coarse_stride;
    r.coarse_scales = super ? a.super_scales : r.coarse_scales;
    r.tokens = super ? a.super_tokens : r.tokens;
    return r;
}

/* score_tile() for the record sizes that have their own code, else or where a sum is out of range
 * the careful way. */
template <int D, int R, int NG>
__device__ __forceinline__ void score_records(const struct records &rec, const uint8_t *tile,
                                              const struct query<D> *q,
                                              const struct four_queries<D> *queries, float *score) {
    bool done = false;

    if (rec.tokens == 16)
        done = score_tile<D, R, NG, 16>(tile, q, score);
    else if (R < 16 && D <= 128 && rec.tokens == 8)
        done = score_tile < D, R < 16 ? R : 2, NG, 8 > (tile, q, score);
    else if (R == 2 && D <= 128 && rec.tokens == 64)
        done = score_tile<D, 2, NG, 64>(tile, q, score);
    else if (R == 2 && D <= 128 && rec.tokens == 32)
        done = score_tile<D, 2, NG, 32>(tile, q, score);
    for (int j = 0; !done && j < NG; j++)
        score[j] = score_careful<D, R>(rec, tile, &queries[j]);
}

/* ---- the warps of a block that score, and the queries they share ---- */

/* The scanning warps of a block meet; the others do not. */
__device__ __forceinline__ void meet(uint32_t warps) {
    bar_some(32 * warps);
}

/* Bring what a block reads first closer; nothing is read, so that it may be written still. */
__device__ __forceinline__ void prefetch_batch(const struct lk_cuda_batch *b, int stage) {
    if (threadIdx.x < 4)
        prefetch_line(threadIdx.x == 0   ? (const uint8_t *)b
                      : threadIdx.x == 1 ? (const uint8_t *)b->first[stage]
                                         : (const uint8_t *)&b->row[0] + (threadIdx.x - 2) * 128);
}

/* The sets whose queries the block holds. Its scoring warps move on together. */
struct window {
    uint32_t base, held, next; /* first set, sets (0: none yet); first task beyond them */
    uint32_t final, end;       /* of the block: last set, end of its tasks */
};

template <int NG> constexpr uint32_t window_sets = WINDOW / NG;

__device__ __forceinline__ bool in_window(const struct window &w, uint32_t set) {
    return set - w.base < w.held;
}

/* Of tasks begin .. end - 1; holds none yet. */
__device__ __forceinline__ struct window open_window(const struct scan_args &a, uint32_t begin,
                                                     uint32_t end) {
    const uint32_t edge = set_of(a, threadIdx.x % 32 ? end - 1 : begin);

    return {__shfl_sync(LK_FULL_WARP, edge, 0), 0, begin, __shfl_sync(LK_FULL_WARP, edge, 1), end};
}

/* Query i of a window: who has its set -> is there such a query? */
template <int NG>
__device__ __forceinline__ bool find_query(const struct scan_args &a, const struct window &w,
                                           uint32_t i, struct owner *ret) {
    const uint32_t set = w.base + i / (4 * NG);

    if (i >= window_sets<NG> * 4 * NG || set > w.final)
        return false;
    *ret = owner_of(a, set);
    return row_at(a, ret->row)->scan;
}

/* The warp's first query of a window, for prepare_queries(). */
template <int D, int NG>
__device__ __forceinline__ struct raw_query<D> load_first(const struct scan_args &a,
                                                          const struct window &w) {
    const uint32_t i = warp_index();
    struct owner o;

    return find_query<NG>(a, w, i, &o) ? load_raw<D>(a, o, i % (4 * NG)) : raw_query<D>{};
}

/* Rotated queries of a window's sets, by the block's scoring warps in turn, which meet. `raw`: the
 * warp's first. */
template <int D, int NG>
__device__ __forceinline__ void prepare_queries(const struct scan_args &a, const struct window &w,
                                                struct raw_query<D> raw,
                                                struct four_queries<D> *ret) {
    for (uint32_t i = warp_index(); i < window_sets<NG> * 4 * NG; i += a.scanners) {
        struct owner o;
        if (!find_query<NG>(a, w, i, &o))
            continue;
        if (i >= a.scanners)
            raw = load_raw<D>(a, o, i % (4 * NG));
        prepare_query<D>(a, o, i % (4 * NG), raw, &ret[i / 4]);
    }
    meet(a.scanners);
}

/* Move on until the window holds `set` -> false: there is no such set. `first`: load_first() of the
 * window as it was opened. */
template <int D, int NG>
__device__ __forceinline__ bool reach_set(const struct scan_args &a, uint32_t set, struct window *w,
                                          struct raw_query<D> first,
                                          struct four_queries<D> *queries) {
    constexpr uint32_t SETS = window_sets<NG>;

    while (!in_window(*w, set)) {
        if (w->next >= w->end)
            return false;
        if (w->held) {
            meet(a.scanners);
            w->base = set_of(a, w->next);
            first = load_first<D, NG>(a, *w);
        }
        w->held = SETS;
        w->next = w->base + SETS > w->final ? w->end : first_of_set(a, w->base + SETS);
        prepare_queries<D, NG>(a, *w, first, queries);
    }
    return true;
}

/* ---- which kernel, of either pass ---- */

template <int N> struct number { static constexpr int value = N; };

template <int D, class F>
static int for_rank(uint32_t rank, const struct lk_geometry &g, const F &fast) {
    auto by_group = [&](auto r) {
        return g.group <= 4 ? fast(number<D>(), r, number<1>()) : fast(number<D>(), r, number<2>());
    };

    switch (rank) {
    case 2:
        return by_group(number<2>());
    case 4:
        return by_group(number<4>());
    case 8:
        return by_group(number<8>());
    default:
        return by_group(number<16>());
    }
}

/* fast(d, rank, blocks of four query heads), numbers, for the sizes that kernels are made for, else
 * plain(). */
template <class F, class P>
static int for_sizes(const struct lk_geometry &g, uint32_t rank, const F &fast, const P &plain) {
    switch (g.head_dim) {
    case 64:
        return for_rank<64>(rank, g, fast);
    case 128:
        return for_rank<128>(rank, g, fast);
    case 256:
        return for_rank<256>(rank, g, fast);
    default:
        return plain();
    }
}

#endif
