/* SPDX-License-Identifier: MIT */
/*
 * scan.cu - scores: every page, or superpage, from its summary; the newest page from its keys.
 *
 * Formula: s = log2 sum over tokens of 2^(sm_scale log2e (q.mu + sum_i c_ti q.v_i)), for each query
 * head.
 *
 * Geometry: one block a multiprocessor. A block takes a run of consecutive tasks (row, KV head,
 * eight queries, chunk), most often of one head, and its scoring warps take them in turn. A chunk
 * is every sixteenth tile of eight pages, so that neighbours stream neighbouring records. Fetching
 * warps, a lane a scoring warp, look tiles up and have the copy engine bring their records to a
 * ring of that warp's own in shared memory, which runs on from task to task; the block's queries
 * are rotated and quantised once, while the first records are on their way. The other warps append,
 * score newest pages, and sum what a second pass does not list.
 *
 * The scoring loop reads nothing but shared memory: with the memory saturated a single read of a
 * table or a spilled register takes as long as a tile.
 *
 * A graph bakes in nothing but the batch's address. Shared memory: barriers, notes of tiles,
 * queries of WINDOW heads, [warp][stage] tiles.
 */
#include "clock.cuh"
#include "tile.cuh"

#include <limits.h>

/* Warps of a block in all, and stages of a ring: at rank 2 records are short and it takes more
 * warps to score as fast as they come. */
#define BLOCK_WARPS(R) ((R) == 2 ? 20 : 16)
#define STAGES_OF(R)   ((R) == 2 ? 3 : 2)
#define SHARED_MOST    (226 * 1024)
#define BARRIER_BYTES  1024
#define INTERLEAVE     16 /* chunks that take turns at the tiles of their range */
#define WINDOW         8  /* heads whose queries a block holds */
#define IDLE_MOST      64 /* looks of the fetching warp at its barriers */
#define REST_WARPS     4
#define NOTES          8                     /* tiles told to a warp at most */

struct scan_args {
    struct lk_pool_view pool;
    const struct lk_cuda_batch *batch;
    int stage;         /* LK_CUDA_RANK, _COARSE or _RESCAN */
    uint32_t heads;    /* 1: append and newest page too */
    uint32_t scanners; /* warps of a block that score */
    uint32_t fetchers; /* and that fetch for them */
    uint32_t tile_bytes;
    struct lk_cuda_clock *clock; /* may be NULL */
};

/* ---- tasks ---- */

struct cursor {
    const struct lk_cuda_row *r;
    uint32_t task, set, head, pass, slot; /* set: row, head and pass in one number */
    uint32_t tile, end, step, units;      /* tiles of the task; units of the row, or listed */
    bool super, listed;
};

__device__ __forceinline__ uint32_t row_sets(const struct lk_geometry *g) {
    return g->kv_heads * ((g->group + 7) / 8);
}

__device__ __forceinline__ uint32_t row_chunks(const struct lk_cuda_row *r, int stage) {
    return stage == LK_CUDA_RESCAN ? r->rescan_tiles
           : stage == LK_CUDA_REST ? r->rest_chunks
                                   : r->chunks;
}

/* The row of a lane's task: the last whose first task is not after it. */
__device__ __forceinline__ uint32_t row_of(const struct lk_cuda_batch *b, int stage,
                                           uint32_t task) {
    uint32_t low = 0, high = b->rows;

    while (high - low > 1) {
        const uint32_t mid = (low + high) / 2;
        if (b->first[stage][mid] <= task)
            low = mid;
        else
            high = mid;
    }
    return low;
}

/* Set of a task. */
__device__ __noinline__ uint32_t set_of(const struct lk_cuda_batch *b, int stage, uint32_t sets,
                                        uint32_t task) {
    const uint32_t row = row_of(b, stage, task);

    return row * sets + (task - b->first[stage][row]) / row_chunks(&b->row[row], stage);
}

/* First task of a stage whose set is `set` or a later one. */
__device__ __forceinline__ uint32_t first_of_set(const struct lk_cuda_batch *b, int stage,
                                                 uint32_t sets, uint32_t set) {
    const uint32_t row = set / sets;

    if (row >= b->rows)
        return UINT32_MAX;
    uint32_t first = b->first[stage][row],
             next = row + 1 < b->rows ? b->first[stage][row + 1] : b->tasks[stage];
    return next == first ? first : first + set % sets * row_chunks(&b->row[row], stage);
}

/* Fill row, head, pass and set of c->task -> chunk. */
__device__ __forceinline__ uint32_t split_task(const struct scan_args &a, int stage,
                                               struct cursor *c) {
    const uint32_t row = row_of(a.batch, stage, c->task);
    const uint32_t passes = (a.pool.geometry.group + 7) / 8;
    const uint32_t task = c->task - a.batch->first[stage][row];

    c->r = &a.batch->row[row];
    const uint32_t chunks = row_chunks(c->r, stage), in = task / chunks;
    c->set = row * row_sets(&a.pool.geometry) + in;
    c->pass = in % passes;
    c->head = in / passes;
    return task - in * chunks;
}

/* Move to the first task from c->task on, in steps, that has something to score. By lane. */
__device__ __forceinline__ void find_task(const struct scan_args &a, uint32_t last,
                                          struct cursor *c) {
    const uint32_t stride = group_stride(a.pool.geometry.group);

    for (; c->task < last; c->task += a.scanners) {
        uint32_t chunk = split_task(a, a.stage, c);
        c->listed = a.stage == LK_CUDA_RESCAN;
        if (!c->listed) {
            uint32_t each = c->r->chunk_units / TILE, tiles = (c->r->units + TILE - 1) / TILE,
                     range = chunk / INTERLEAVE * INTERLEAVE;
            c->slot = 1 + chunk;
            c->super = c->r->scan == LK_TREE;
            c->units = c->r->units;
            c->step = min((uint32_t)INTERLEAVE, c->r->chunks - range);
            c->tile = range * each + chunk - range;
            c->end = min(tiles, (range + INTERLEAVE) * each);
            return;
        }
        c->units = __ldcg(&row_head(c->r, c->head)->listed);
        c->slot = 1 + c->r->chunks + chunk;
        c->super = false;
        c->step = 1;
        c->tile = chunk;
        c->end = chunk + 1;
        if (chunk * TILE < c->units)
            return;
        for (uint32_t q = c->pass * 8; q < min(c->pass * 8 + 8, stride); q++)
            row_parts(c->r, c->head, stride)[c->slot * stride + q] = make_float2(-INFINITY, 0.f);
    }
}

/* ---- queries ---- */

/* One query of a set, by a warp; a zero one where the group has no such query. */
template <int D>
__device__ __forceinline__ void prepare_query(const struct scan_args &a, uint32_t set, uint32_t g,
                                              struct four_queries<D> *ret) {
    const uint32_t lane = threadIdx.x % 32, group = a.pool.geometry.group;
    const uint32_t sets = row_sets(&a.pool.geometry);
    const uint32_t passes = (group + 7) / 8, in = set % sets;
    const struct lk_cuda_row *r = &a.batch->row[set / sets];
    const bool bf16 = a.pool.geometry.dtype == LK_BF16;
    const uint32_t head = in / passes, at = in % passes * 8 + g;
    const uint16_t *q = (const uint16_t *)r->q + ((uint64_t)head * group + at) * D;
    constexpr int N = D / 32;
    float x[N], peak = 0, unit;
    int hi_sum = 0, lo_sum = 0;

#pragma unroll
    for (int i = 0; i < N; i++) /* normalised first: sums of huge queries stay in a float's range */
        x[i] = at < group ? element(q[32 * i + lane], bf16) * rsqrtf((float)D) : 0.f;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1)
#pragma unroll
        for (int i = 0; i < N; i++) {
            float y = __shfl_xor_sync(LK_FULL_WARP, x[i], o);
            x[i] = lane & o ? y - x[i] : x[i] + y;
        }
#pragma unroll
    for (int o = 1; o < N; o <<= 1)
#pragma unroll
        for (int i = 0; i < N; i++)
            if (!(i & o)) {
                float y = x[i + o];
                x[i + o] = x[i] - y;
                x[i] += y;
            }
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

/* ---- append, and the newest page ---- */

__device__ void append_tokens(const struct scan_args &a, const struct lk_cuda_row *r, uint32_t head,
                              uint32_t piece) {
    const struct lk_geometry *g = &a.pool.geometry;
    const uint32_t lane = threadIdx.x % 32, vectors = g->head_dim * 2 / 16;
    const uint32_t last = min(r->append, (piece + 1) * 16);

    for (uint32_t i = piece * 16; i < last; i++) {
        uint64_t at = r->length - r->append + i;
        uint32_t page = physical_page(r, (uint32_t)(at / g->page_tokens));
        uint64_t from = ((uint64_t)i * g->kv_heads + head) * vectors;
        uint64_t to = at % g->page_tokens * vectors;
        uint4 *keys = (uint4 *)lk_page_keys_device(a.pool, r->layer, page, head);
        uint4 *values = keys + (uint64_t)g->page_tokens * vectors;

        for (uint32_t x = lane; x < 2 * vectors; x += 32) {
            bool value = x >= vectors;
            uint32_t e = value ? x - vectors : x;
            (value ? values : keys)[to + e] = ((const uint4 *)(value ? r->v : r->k))[from + e];
        }
    }
    __syncwarp();
}

/* Exact, on tensor cores: 16 tokens x 8 queries. k is permuted alike in keys and queries, so that a
 * lane reads four channels at once. */
__device__ void score_newest(const struct scan_args &a, const struct lk_cuda_row *r,
                             uint32_t head) {
    const struct lk_geometry *g = &a.pool.geometry;
    const uint32_t lane = threadIdx.x % 32, d = g->head_dim, stride = group_stride(g->group);
    const uint32_t page = r->pages - 1, row = lane >> 2, c = lane & 3;
    const uint32_t tokens = (uint32_t)(r->length - (uint64_t)page * g->page_tokens);
    const uint16_t *keys =
        (const uint16_t *)lk_page_keys_device(a.pool, r->layer, physical_page(r, page), head);
    const uint16_t *queries = (const uint16_t *)r->q + (uint64_t)head * g->group * d;
    const float scale = r->sm_scale * LK_LOG2E;

    for (uint32_t first = 0; first < g->group; first += 8) {
        const uint16_t *q = queries + min(first + row, g->group - 1) * d + 4 * c;
        float2 part[2] = {make_float2(-INFINITY, 0.f), make_float2(-INFINITY, 0.f)};

        for (uint32_t base = 0; base < tokens; base += 16) {
            const uint16_t *k = keys + min(base + row, tokens - 1) * d + 4 * c,
                           *k8 = keys + min(base + row + 8, tokens - 1) * d + 4 * c;
            float z[4] = {0, 0, 0, 0};
#pragma unroll 4
            for (uint32_t t = 0; t < d; t += 16) {
                const uint2 x = *(const uint2 *)(k + t), y = *(const uint2 *)(k8 + t),
                            v = *(const uint2 *)(q + t);
                if (g->dtype == LK_BF16)
                    mma_k16<true>(z, x.x, y.x, x.y, y.y, v.x, v.y);
                else
                    mma_k16<false>(z, x.x, y.x, x.y, y.y, v.x, v.y);
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (base + row + i / 2 * 8 < tokens)
                    part[i % 2] = merge_parts(part[i % 2], make_float2(z[i] * scale, 1.f));
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t query = first + 2 * c + i;
#pragma unroll
            for (int o = 4; o < 32; o <<= 1)
                part[i] =
                    merge_parts(part[i], make_float2(__shfl_xor_sync(LK_FULL_WARP, part[i].x, o),
                                                     __shfl_xor_sync(LK_FULL_WARP, part[i].y, o)));
            if (row == 0 && query < g->group) {
                uint32_t bits = __float_as_uint(part[i].x + log2_fast(part[i].y));
                bits |= query == 0 ? 1 : 0;
                row_scores(r, head, stride)[(uint64_t)page * stride + query] =
                    __uint_as_float(bits);
                row_parts(r, head, stride)[query] = part[i];
            }
        }
    }
}

/* Tasks of heads for one warp of `warps`. */
__device__ __forceinline__ void run_heads(const struct scan_args &a, uint32_t warp,
                                          uint32_t warps) {
    const uint32_t heads = a.pool.geometry.kv_heads;

    for (uint32_t task = warp; task < a.batch->tasks[LK_CUDA_HEADS]; task += warps) {
        uint32_t row = find_row(a.batch, LK_CUDA_HEADS, task);
        const struct lk_cuda_row *r = &a.batch->row[row];
        uint32_t t = task - a.batch->first[LK_CUDA_HEADS][row];

        append_tokens(a, r, t % heads, t / heads);
        if (r->scan && t / heads == 0)
            score_newest(a, r, t % heads);
    }
}

/* ---- pages that the second pass did not list ---- */

/* Four queries' parts of pages j, j + 32, .. below last that the second pass did not score. Pages
 * are taken four at a time: their loads run together. */
__device__ __forceinline__ void sum_rest(const float *scores, uint32_t stride, uint32_t first,
                                         uint32_t j, uint32_t last, float2 part[4]) {
    for (; j < last; j += 128) {
        float4 s[4];
        uint32_t mark[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *at = scores + (uint64_t)min(j + 32 * i, last - 1) * stride;
            s[i] = __ldcg((const float4 *)(at + first));
            mark[i] = first ? __float_as_uint(__ldcg(at)) : __float_as_uint(s[i].x);
        }
#pragma unroll
        for (int y = 0; y < 4; y++) {
            float x[4], peak = part[y].x, sum = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                x[i] = y == 0 ? s[i].x : y == 1 ? s[i].y : y == 2 ? s[i].z : s[i].w;
                if (mark[i] & 1 || j + 32 * i >= last)
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
}

/* Tasks of the rest for one warp of `warps`. */
__device__ __forceinline__ void run_rest(const struct scan_args &a, uint32_t warp, uint32_t warps) {
    const uint32_t lane = threadIdx.x % 32, stride = group_stride(a.pool.geometry.group);

    struct cursor c;
    for (c.task = warp; c.task < a.batch->tasks[LK_CUDA_REST]; c.task += warps) {
        const uint32_t chunk = split_task(a, LK_CUDA_REST, &c), from = chunk * c.r->rest_pages;
        const uint32_t last = min(from + c.r->rest_pages, c.r->complete);

        for (uint32_t q = c.pass * 8; q < min(c.pass * 8 + 8, stride); q += 4) {
            float2 part[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                part[i] = make_float2(-INFINITY, 0.f);
            sum_rest(row_scores(c.r, c.head, stride), stride, q, from + lane, last, part);
#pragma unroll
            for (int i = 0; i < 4; i++)
                for (int o = 16; o; o >>= 1) {
                    float2 other = make_float2(__shfl_xor_sync(LK_FULL_WARP, part[i].x, o),
                                               __shfl_xor_sync(LK_FULL_WARP, part[i].y, o));
                    part[i] = merge_parts(part[i], other);
                }
            float2 *to = row_parts(c.r, c.head, stride) +
                         (1 + c.r->chunks + c.r->rescan_tiles + chunk) * stride + q;
            if (lane < 4)
                to[lane] = lane == 0   ? part[0]
                           : lane == 1 ? part[1]
                           : lane == 2 ? part[2]
                                       : part[3];
        }
    }
}

/* ---- kernels ---- */

__device__ __forceinline__ struct records records_of(const struct scan_args &a, bool super,
                                                     int rank) {
    const struct lk_geometry *g = &a.pool.geometry;
    struct lk_record coarse = super ? lk_record_super(g) : lk_record_coarse(g),
                     fine = lk_record_fine(g);
    struct records r;

    r.coarse_stride = coarse.stride;
    r.fine_stride = rank > LK_COARSE_RANK ? fine.stride : 0;
    r.centroid = coarse.centroid;
    r.coarse_coeffs = coarse.coeffs;
    r.coarse_scales = coarse.scales;
    r.fine_coeffs = fine.coeffs;
    r.fine_scales = fine.scales;
    r.tokens = coarse.tokens;
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

/* ---- the warp that fetches ---- */

/* A tile, told to the warp that scores it. Block table and list are read several tiles before
 * records are asked for, since under load a read takes as long as a tile. */
struct tile_note {
    uint32_t entry[TILE]; /* of the block table: of quads two, else one a record */
    uint32_t page[TILE];  /* of a second pass */
    const struct lk_cuda_row *r;
    uint32_t set, tile, units, slot;
    uint16_t head, pass;
    uint8_t super, listed, shift, last; /* last: of its task */
};

/* Note the cursor's tile; starts reading its entries, or its list. By lane, as all that follows. */
__device__ __forceinline__ void note_tile(const struct cursor &c, struct tile_note *to) {
    const uint32_t shift = c.r->table_shift, most = c.units - 1, first = c.tile * TILE;

    to->r = c.r;
    to->set = c.set;
    to->tile = c.tile;
    to->units = c.units;
    to->slot = c.slot;
    to->head = (uint16_t)c.head;
    to->pass = (uint16_t)c.pass;
    to->super = c.super;
    to->listed = c.listed;
    to->shift = (uint8_t)shift;
    to->last = c.tile + c.step >= c.end;
    if (!c.listed && !c.super && shift == 2) {
        copy_word(&to->entry[0], &c.r->table[min(first, most) >> 2]);
        copy_word(&to->entry[1], &c.r->table[min(first + 4, most) >> 2]);
        return;
    }
    const uint32_t *from = c.listed ? row_rescan(c.r, c.head) : c.r->table;
    uint32_t *at = c.listed ? to->page : to->entry;
    const uint32_t times = c.super && shift == 0 ? 4 : 1;
#pragma unroll
    for (uint32_t i = 0; i < TILE; i++)
        copy_word(at + i, from + times * min(first + i, most));
}

/* The list has come: read the entries of its pages. */
__device__ __forceinline__ void resolve_tile(struct tile_note *n) {
#pragma unroll
    for (uint32_t i = 0; i < TILE; i++)
        copy_word(&n->entry[i], &n->r->table[n->page[i] >> n->shift]);
}

/* Start the copies of `count` records from index `id` on, to places `at` .. of the tile. */
__device__ __forceinline__ void copy_records(const struct records &rec, const uint8_t *coarse,
                                             const uint8_t *fine, uint64_t id, uint32_t at,
                                             uint32_t count, uint32_t to, uint32_t bar) {
    start_copy(to + at * rec.coarse_stride, coarse + id * rec.coarse_stride,
               count * rec.coarse_stride, bar);
    if (rec.fine_stride)
        start_copy(to + TILE * rec.coarse_stride + at * rec.fine_stride,
                   fine + id * rec.fine_stride, count * rec.fine_stride, bar);
}

/* Start the copies of the tile's records: those that follow each other in one. */
__device__ __forceinline__ void fetch_tile(const struct scan_args &a, const struct tile_note *n,
                                           const struct records &rec, uint32_t to, uint32_t bar) {
    const uint64_t plane = (uint64_t)n->r->layer * a.pool.geometry.kv_heads + n->head;
    const uint8_t *coarse = n->super ? a.pool.super + plane * (a.pool.pages / 4) * rec.coarse_stride
                                     : a.pool.coarse + plane * a.pool.pages * rec.coarse_stride;
    const uint8_t *fine = a.pool.fine + plane * a.pool.pages * rec.fine_stride;
    const bool quads = !n->super && !n->listed && n->shift == 2;

    bar_expect(bar, TILE * (rec.coarse_stride + rec.fine_stride));
    if (quads) {
        const uint32_t x = n->entry[0], y = n->entry[1];
        copy_records(rec, coarse, fine, 4ull * x, 0, y == x + 1 ? 8 : 4, to, bar);
        if (y != x + 1)
            copy_records(rec, coarse, fine, 4ull * y, 4, 4, to, bar);
    } else {
        for (uint32_t i = 0, run; i < TILE; i += run) {
            auto record = [&](uint32_t k) {
                return n->listed ? (n->entry[k] << n->shift) + (n->page[k] & ((1u << n->shift) - 1))
                       : n->super ? n->entry[k] >> (2 - n->shift)
                                  : n->entry[k];
            };
            const uint32_t id = record(i);
            for (run = 1; i + run < TILE && record(i + run) == id + run; run++)
                ;
            copy_records(rec, coarse, fine, id, i, run, to, bar);
        }
    }
    bar_copies_started(bar);
}

/* Lane i of fetching warp f fetches for scanning warp f + fetchers x i: of tasks begin .. end - 1
 * every scanners-th. None is
 * let run ahead of the slowest by more than two tiles, so that all end together; but where nothing
 * moves (a warp waits for the others to need other queries) whoever can does. */
template <int D, int R, int STAGES>
__device__ __forceinline__ void fetch_tasks(const struct scan_args &a, uint32_t begin, uint32_t end,
                                            uint32_t fetcher, uint32_t ring, uint32_t bars,
                                            struct tile_note *notes) {
    const uint32_t warp = fetcher + threadIdx.x % 32 * a.fetchers;
    const uint32_t full = bars + warp * 2 * STAGES * 8, empty = full + STAGES * 8;
    /* Tiles between reading the block table and asking for records; and of a list, which is read
     * AHEAD tiles before and its pages' entries LISTED. A turn waits for what was asked for
     * AHEAD - LISTED turns before, so the entries have come if that is no more than LISTED. */
    constexpr int AHEAD = NOTES - STAGES, LISTED = (AHEAD + 1) / 2;
    static_assert(AHEAD - LISTED <= LISTED, "entries of a list's pages may be read too early");
    uint32_t stage = 0, parity = 1, idle = 0;
    int n = warp < a.scanners ? -AHEAD : INT_MAX;
    struct records rec = records_of(a, false, R);
    struct cursor c = {};

    ring += warp * STAGES * a.tile_bytes;
    notes += warp * NOTES;
    c.task = begin + warp;
    if (warp < a.scanners)
        find_task(a, end, &c);
    for (;;) {
        const int slowest = __reduce_min_sync(LK_FULL_WARP, n);
        if (slowest == INT_MAX)
            return;
        /* The phase before the first counts as ended: a stage is empty at first. */
        const bool ready = n != INT_MAX && (n < 0 || bar_test(empty + stage * 8, parity)),
                   go = ready && (n <= slowest + 2 || idle > IDLE_MOST);
        idle = __any_sync(LK_FULL_WARP, go) ? 0 : idle + 1;
        if (!go)
            continue;
        struct tile_note *note = &notes[(n + AHEAD) % NOTES];
        if (c.task < end) {
            note_tile(c, note);
            c.tile += c.step;
            if (c.tile >= c.end) {
                c.task += a.scanners;
                find_task(a, end, &c);
            }
        } else {
            note->set = UINT32_MAX;
        }
        note = &notes[(n + LISTED) % NOTES];
        if (a.stage == LK_CUDA_RESCAN && n + LISTED >= 0 && note->set != UINT32_MAX)
            resolve_tile(note);
        copy_commit();
        if (n >= 0) {
            note = &notes[n % NOTES];
            if (note->set == UINT32_MAX) {
                bar_arrive(full + stage * 8);
                n = INT_MAX - 1;
            } else {
                if (R == LK_COARSE_RANK)
                    rec = records_of(a, note->super, R);
                fetch_tile(a, note, rec, ring + stage * a.tile_bytes, full + stage * 8);
            }
            if (++stage == STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
        if (a.stage == LK_CUDA_RESCAN)
            copy_wait<AHEAD - LISTED - 1>();
        else
            copy_wait<AHEAD - 1>();
        n++;
    }
}

/* ---- the warps that score ---- */

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

/* Rotated queries of the sets base .. last of this block's tasks, as many as there is room for. */
template <int D, int NG, int SETS>
__device__ __forceinline__ void prepare_queries(const struct scan_args &a, uint32_t base,
                                                uint32_t last, struct four_queries<D> *ret) {
    const uint32_t sets = row_sets(&a.pool.geometry);

    for (uint32_t i = warp_index(); i < SETS * NG * 4; i += a.scanners) {
        const uint32_t set = base + i / (4 * NG), g = i % (4 * NG);
        if (set <= last && a.batch->row[set / sets].scan)
            prepare_query<D>(a, set, g, &ret[i / 4]);
    }
    meet(a.scanners);
}

/* Score the block's tasks begin .. end - 1, as they come through the ring. */
template <int D, int R, int NG, int STAGES>
__device__ __forceinline__ void
score_tasks(const struct scan_args &a, uint32_t begin, uint32_t end, const uint8_t *ring,
            uint32_t full, const struct tile_note *notes, struct four_queries<D> *queries) {
    constexpr int SETS = WINDOW / NG;
    const uint32_t sets = row_sets(&a.pool.geometry), lane = threadIdx.x % 32;
    const uint32_t edge = set_of(a.batch, a.stage, sets, lane ? end - 1 : begin);
    const uint32_t final = __shfl_sync(LK_FULL_WARP, edge, 1);
    struct records rec = records_of(a, false, R);
    struct query<D> q[NG];
    struct place place = {};
    float2 part[NG];
    uint32_t next = begin, base = 0, held = 0, set = UINT32_MAX, n = 0, stage = 0, parity = 0;

    for (uint32_t to = 0;;) {
        while (to - base >= held) {
            if (next >= end)
                return;
            if (held)
                meet(a.scanners);
            if (held)
                base = set_of(a.batch, a.stage, sets, next);
            else
                to = base = __shfl_sync(LK_FULL_WARP, edge, 0);
            next = base + SETS > final ? end : first_of_set(a.batch, a.stage, sets, base + SETS);
            held = SETS;
            prepare_queries<D, NG, SETS>(a, base, final, queries);
        }
        bar_wait(full + stage * 8, parity);
        __syncwarp();
        const struct tile_note *note = &notes[n % NOTES];
        to = note->set;
        if (to - base >= held)
            continue;
        if (to != set) {
            set = to;
            place = place_of(a, note->r, note->head);
#pragma unroll
            for (int j = 0; j < NG; j++) {
                load_query<D>(&queries[(set - base) * NG + j], &q[j]);
                part[j] = make_float2(-INFINITY, 0.f);
            }
        }
        const uint32_t at = note->tile * TILE + (lane >> 2), slot = note->slot;
        const bool live = at < note->units, last = note->last;
        const uint32_t unit = note->listed ? note->page[lane >> 2] : at,
                       query = note->pass * 8 + (lane & 3);
        float score[NG];

        if (R == LK_COARSE_RANK)
            rec = records_of(a, place.super, R);
        score_records<D, R, NG>(rec, ring + stage * a.tile_bytes, q, &queries[(set - base) * NG],
                                score);
        __syncwarp();
        if (lane == 0)
            bar_arrive(full + (STAGES + stage) * 8);
        n++;
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
#pragma unroll
        for (int j = 0; j < NG; j++) {
            store_scores(a, place, unit, live, query + 4 * j, score[j]);
            if (live)
                part[j] = merge_parts(part[j], make_float2(score[j], 1.f));
            if (last) {
                store_part(a, place, slot, query + 4 * j, part[j]);
                part[j] = make_float2(-INFINITY, 0.f);
            }
        }
    }
}

/* Warps: those that score, those that fetch, then the others. */
template <int D, int R, int NG, int STAGES>
__global__ void __launch_bounds__(32 * BLOCK_WARPS(R), 1)
    scan_kernel(const __grid_constant__ struct scan_args a) {
    SHARED_BYTES(shared, 128);
    const uint32_t warp = warp_index(), workers = a.scanners + a.fetchers,
                   others = blockDim.x / 32 - workers;
    struct tile_note *const notes = (struct tile_note *)(shared + BARRIER_BYTES);
    struct four_queries<D> *const queries = (struct four_queries<D> *)(notes + a.scanners * NOTES);
    uint8_t *const rings = (uint8_t *)(queries + WINDOW);
    const uint32_t bars = (uint32_t)__cvta_generic_to_shared(shared);

    let_next_start();
    prefetch_batch(a.batch, a.stage);
    if (warp == a.scanners) {
        for (uint32_t i = threadIdx.x % 32; i < a.scanners * 2 * STAGES; i += 32)
            bar_init(bars + i * 8);
        bar_inits_done();
    }
    __syncthreads();
    wait_for_previous();
    note_time(a.clock, a.stage == LK_CUDA_RESCAN ? LK_CUDA_AT_RESCAN : LK_CUDA_AT_SCAN);
    if (warp >= workers) { /* consecutive tasks on different processors */
        const uint32_t i = warp - workers;
        if (a.heads)
            run_heads(a, blockIdx.x + i * gridDim.x, others * gridDim.x);
        if (a.stage == LK_CUDA_RESCAN)
            run_rest(a, blockIdx.x + i * gridDim.x, others * gridDim.x);
        return;
    }
    const uint64_t total = a.batch->tasks[a.stage];
    const uint32_t begin = (uint32_t)(blockIdx.x * total / gridDim.x),
                   end = (uint32_t)((blockIdx.x + 1) * total / gridDim.x);
    if (begin == end)
        return;
    if (warp >= a.scanners)
        fetch_tasks<D, R, STAGES>(a, begin, end, warp - a.scanners,
                                  (uint32_t)__cvta_generic_to_shared(rings), bars, notes);
    else
        score_tasks<D, R, NG, STAGES>(a, begin, end, rings + warp * STAGES * a.tile_bytes,
                                      bars + warp * 2 * STAGES * 8, notes + warp * NOTES, queries);
}

/* Any head dimension: a warp a page, from the record's bytes; queries rotated in shared memory. */
__global__ void __launch_bounds__(256)
    scan_plain(const __grid_constant__ struct scan_args a, uint32_t rank, uint32_t warp_bytes) {
    SHARED_BYTES(shared, 128);
    const struct lk_geometry *g = &a.pool.geometry;
    const uint32_t lane = threadIdx.x % 32, d = g->head_dim, block = d & -d;
    const uint32_t warps = gridDim.x * (blockDim.x / 32);
    const uint32_t warp = warp_index() * gridDim.x + blockIdx.x;
    const uint32_t stride = group_stride(g->group);
    float *q = (float *)(shared + threadIdx.x / 32 * warp_bytes), *projection = q + 8 * d;
    struct cursor c = {};

    let_next_start();
    wait_for_previous();
    note_time(a.clock, a.stage == LK_CUDA_RESCAN ? LK_CUDA_AT_RESCAN : LK_CUDA_AT_SCAN);
    const uint32_t last = a.batch->tasks[a.stage];
    for (c.task = warp, find_task(a, last, &c); c.task < last;
         c.task += warps, find_task(a, last, &c)) {
        const struct records rec = records_of(a, c.super, rank);
        const uint64_t plane = (uint64_t)c.r->layer * g->kv_heads + c.head;
        const uint32_t queries = min(8u, g->group - c.pass * 8);
        const struct place place = place_of(a, c.r, c.head);
        float2 part = make_float2(-INFINITY, 0.f); /* of query lane % 8, tokens of its lanes */

        __syncwarp();
        for (uint32_t i = lane; i < 8 * d; i += 32)
            q[i] = i < queries * d
                       ? element(((const uint16_t *)
                                      c.r->q)[((uint64_t)c.head * g->group + c.pass * 8) * d + i],
                                 g->dtype == LK_BF16) *
                             rsqrtf((float)block)
                       : 0.f;
        __syncwarp();
        for (uint32_t o = 1; o < block; o <<= 1) {
            for (uint32_t i = lane; i < 4 * d; i += 32) {
                uint32_t x = i / o * 2 * o + i % o;
                float u = q[x], v = q[x + o];
                q[x] = u + v;
                q[x + o] = u - v;
            }
            __syncwarp();
        }
        for (uint32_t n = 0;; n++) {
            const uint32_t i = n % TILE;
            c.tile += n && i == 0 ? c.step : 0;
            if (c.tile >= c.end || c.tile * TILE + i >= c.units)
                break;
            const uint32_t at = c.tile * TILE + i;
            const uint32_t unit = c.listed ? __ldcg(&row_rescan(c.r, c.head)[at]) : at;
            const uint32_t id = !c.super                ? physical_page(c.r, unit)
                                : c.r->table_shift == 2 ? c.r->table[unit]
                                                        : c.r->table[4 * unit] / LK_QUAD_PAGES;
            const uint8_t *coarse =
                c.super ? a.pool.super + (plane * (a.pool.pages / 4) + id) * rec.coarse_stride
                        : a.pool.coarse + (plane * a.pool.pages + id) * rec.coarse_stride;
            const uint8_t *fine = a.pool.fine + (plane * a.pool.pages + id) * rec.fine_stride;
            const float unit_scale = c.r->sm_scale * LK_LOG2E;

            for (uint32_t dir = 0; dir <= rank; dir++) { /* the last: the centroid */
                float dot[8] = {0, 0, 0, 0, 0, 0, 0, 0}, scale;
                const uint8_t *at = dir < 2 ? coarse + dir * d / 2 : fine + (dir - 2) * d / 2;
                if (dir == rank)
                    scale = bf16_float(*(const uint16_t *)(coarse + rec.coarse_scales));
                else
                    scale = bf16_float(
                        *(const uint16_t *)(dir < 2 ? coarse + rec.coarse_scales + 2 + 2 * dir
                                                    : fine + rec.fine_scales + 2 * (dir - 2)));
                for (uint32_t ch = lane; ch < d; ch += 32) {
                    uint32_t place = lk_basis_place(d, ch);
                    float v = dir == rank
                                  ? (float)(int8_t)coarse[rec.centroid + lk_centroid_place(d, ch)]
                                  : (float)(at[place / 2] >> (place % 2 * 4) & 15) - 8.f;
                    for (int x = 0; x < 8; x++)
                        dot[x] = fmaf(v, q[x * d + ch], dot[x]);
                }
                for (int x = 0; x < 8; x++) {
                    float s = warp_sum(dot[x]) * (scale * unit_scale);
                    if (lane == x)
                        projection[dir * 8 + x] = s;
                }
            }
            __syncwarp();
            const uint32_t x = lane % 8;
            float2 own = make_float2(-INFINITY, 0.f);
            for (uint32_t t = lane / 8; t < rec.tokens; t += 4) {
                float z = projection[rank * 8 + x];
                for (uint32_t dir = 0; dir < rank; dir++) {
                    const uint8_t *at =
                        dir < 2 ? coarse + rec.coarse_coeffs + lk_coeff_place(rec.tokens, dir, t)
                                : fine + rec.fine_coeffs + lk_coeff_place(rec.tokens, dir - 2, t);
                    z = fmaf((float)*at - 128.f, projection[dir * 8 + x], z);
                }
                own = merge_parts(own, make_float2(z, 1.f));
            }
            for (int o = 8; o < 32; o <<= 1)
                own = merge_parts(own, make_float2(__shfl_xor_sync(LK_FULL_WARP, own.x, o),
                                                   __shfl_xor_sync(LK_FULL_WARP, own.y, o)));
            float score = own.x + log2_fast(own.y);
            for (uint32_t x = 0; lane < queries && x < (c.super ? 4 : 1); x++)
                place.scores[(uint64_t)(c.super ? 4 * unit + x : unit) * stride + c.pass * 8 +
                             lane] = score_bits(place, c.pass * 8 + lane, score);
            part = merge_parts(part, make_float2(score, 1.f));
            __syncwarp();
        }
        if (lane < 8 && c.pass * 8 + lane < stride)
            row_parts(c.r, c.head, stride)[c.slot * stride + c.pass * 8 + lane] = part;
    }
    if (a.heads) /* from the far end: the last warps have the fewest chunks */
        run_heads(a, warps - 1 - warp, warps);
    if (a.stage == LK_CUDA_RESCAN)
        run_rest(a, warps - 1 - warp, warps);
}

/* ---- launchers ---- */

template <int D, int R, int NG>
static int launch_fast(struct scan_args a, uint32_t processors, void *stream) {
    constexpr int STAGES = STAGES_OF(R);
    const struct lk_geometry *g = &a.pool.geometry;
    struct lk_record coarse = lk_record_coarse(g), fine = lk_record_fine(g),
                     super = lk_record_super(g);
    const bool rest = a.stage == LK_CUDA_RESCAN;
    const uint32_t others = rest ? REST_WARPS : 1;
    const uint32_t fixed = BARRIER_BYTES + WINDOW * sizeof(struct four_queries<D>);

    a.fetchers = rest ? 4 : 2; /* pages of a list are copied one by one */
    a.tile_bytes = 8 * (R == 2 ? (super.stride > coarse.stride ? super.stride : coarse.stride)
                               : coarse.stride + fine.stride);
    const uint32_t each = STAGES * a.tile_bytes + NOTES * sizeof(struct tile_note);
    a.scanners = (SHARED_MOST - fixed) / each;
    if (a.scanners > BLOCK_WARPS(R) - a.fetchers - others)
        a.scanners = BLOCK_WARPS(R) - a.fetchers - others;
    cudaFuncSetAttribute(scan_kernel<D, R, NG, STAGES>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         SHARED_MOST);
    return launch(scan_kernel<D, R, NG, STAGES>, dim3(processors),
                  32 * (a.scanners + a.fetchers + others), fixed + a.scanners * each, stream, a);
}

template <int D, int R>
static int launch_group(const struct scan_args &a, uint32_t processors, void *stream) {
    return a.pool.geometry.group <= 4 ? launch_fast<D, R, 1>(a, processors, stream)
                                      : launch_fast<D, R, 2>(a, processors, stream);
}

template <int D>
static int launch_rank(const struct scan_args &a, uint32_t rank, uint32_t processors,
                       void *stream) {
    switch (rank) {
    case 2:
        return launch_group<D, 2>(a, processors, stream);
    case 4:
        return launch_group<D, 4>(a, processors, stream);
    case 8:
        return launch_group<D, 8>(a, processors, stream);
    default:
        return launch_group<D, 16>(a, processors, stream);
    }
}

/* first: of the step's scans: it appends, scores newest pages and notes the time. */
static int launch_scan(const struct lk_cuda_step *step, int stage, bool first, void *stream) {
    struct scan_args a = {step->pool, step->batch, stage, first, 0, 0, 0,
                          first || stage == LK_CUDA_RESCAN ? step->clock : NULL};
    uint32_t rank = stage == LK_CUDA_COARSE ? LK_COARSE_RANK : step->pool.geometry.rank;
    uint32_t d = step->pool.geometry.head_dim, bytes = (8 * d + 8 * (rank + 1)) * 4;

    switch (d) {
    case 64:
        return launch_rank<64>(a, rank, step->processors, stream);
    case 128:
        return launch_rank<128>(a, rank, step->processors, stream);
    case 256:
        return launch_rank<256>(a, rank, step->processors, stream);
    default:
        a.scanners = 2 * step->processors * 8;
        cudaFuncSetAttribute(scan_plain, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_MOST);
        return launch(scan_plain, dim3(2 * step->processors), 256, 8 * bytes, stream, a, rank,
                      bytes);
    }
}

int lk_cuda_scan(const struct lk_cuda_step *step, void *stream) {
    bool rank = step->scans >> LK_FULL & 1 || !step->scans;
    int error = 0;

    if (rank)
        error = launch_scan(step, LK_CUDA_RANK, true, stream);
    if (!error && step->scans & (1u << LK_COARSE | 1u << LK_NESTED | 1u << LK_TREE))
        error = launch_scan(step, LK_CUDA_COARSE, !rank, stream);
    return error;
}

int lk_cuda_rescan(const struct lk_cuda_step *step, void *stream) {
    return launch_scan(step, LK_CUDA_RESCAN, false, stream);
}
