/* SPDX-License-Identifier: MIT */
/*
 * attend.cu - exact attention over picked pages, or over all of them; split over blocks, merged.
 *
 * Geometry: a task is (row, KV head, up to 64 queries, slice of the row's tokens); blocks of eight
 * warps take tasks in turn. Tokens come in tiles of 16. Where a KV head has eight queries or fewer,
 * each warp takes every eighth tile of the slice; where it has more, warps that hold different
 * queries read the same tile together, once from memory and then from L1.
 *
 * A tile, on tensor cores, straight from memory to fragments (no shared memory): keys are A (16
 * tokens x 16 channels, channels permuted alike in keys and queries), queries B: logits [16
 * tokens][8 queries]; softmax over the tokens of a column; weights, transposed 8 x 8, are B and
 * values, tokens paired by byte permutes, A of out [channels][8 queries]. Weights are carried in
 * two 16-bit parts.
 *
 * Merging: a block's warps through shared memory, a row's slices by the last block to finish one of
 * them; both in a fixed order. The number of slices depends on the row alone.
 *
 * Edge cases: tokens beyond the length (or a query's own position) get weight 0 by selection, and
 * their values are replaced by 0; no token: out 0, LSE -inf.
 */
#include "device.cuh"

#define WARPS   8
#define THREADS (32 * WARPS)
#define QUERIES 8
#define NEVER   0x7fffffff

struct attend_args {
    struct lk_pool_view pool;
    const struct lk_cuda_batch *batch;
    uint32_t *sync;
};

struct task {
    const struct lk_cuda_row *r;
    uint32_t head, group, slice;
    uint32_t query_first, queries; /* of the block, within tokens x group */
    uint32_t tile_first, tile_last;
    uint32_t entries;                 /* picked pages */
    const struct lk_cuda_pick *picks; /* NULL: all pages in order */
    const uint8_t *base;              /* keys of the KV head in page 0 of the layer */
    const uint32_t *table;
    uint32_t shift, length; /* of the table; tokens */
    uint32_t token_shift;   /* of a page */
};

/* Eight tokens of one page. */
struct octet {
    const uint16_t *keys, *values;
    int position; /* of its first token; NEVER: no tokens, any bytes of the pool */
    float bias;
    bool kept;
};

__device__ __forceinline__ struct task find_task(const struct attend_args &a, uint32_t index) {
    const struct lk_geometry *g = &a.pool.geometry;
    uint32_t row = find_row(a.batch, LK_CUDA_ATTEND, index), most;
    struct task t;

    t.r = &a.batch->row[row];
    index -= a.batch->first[LK_CUDA_ATTEND][row];
    t.slice = index % t.r->slices;
    t.group = index / t.r->slices % t.r->query_groups;
    t.head = index / t.r->slices / t.r->query_groups;
    most = t.r->query_warps * QUERIES;
    t.query_first = t.group * most;
    t.queries = min(most, t.r->tokens * g->group - t.query_first);
    t.tile_first = t.slice * t.r->slice_tiles;
    t.tile_last = min(t.r->tiles, t.tile_first + t.r->slice_tiles);
    t.picks = NULL;
    t.entries = 0;
    t.base = lk_page_keys_device(a.pool, t.r->layer, 0, t.head);
    t.table = t.r->table;
    t.shift = t.r->table_shift;
    t.length = (uint32_t)t.r->length;
    t.token_shift = 31 - __clz(g->page_tokens);
    if (t.r->scan) {
        const struct lk_cuda_head *h = row_head(t.r, t.head);
        t.picks = row_picks(t.r, t.head);
        t.entries = __ldcg(&h->kept) + __ldcg(&h->sampled);
        t.tile_last = min(t.tile_last, (t.entries * g->page_tokens + 15) / 16);
    }
    return t;
}

__device__ __forceinline__ struct octet find_octet(const struct attend_args &a,
                                                   const struct task &t, uint32_t token) {
    const uint32_t b = 1u << t.token_shift, d = a.pool.geometry.head_dim, in = token & (b - 1);
    const uint16_t *any = (const uint16_t *)a.pool.kv;
    struct octet h = {any, any, NEVER, 0.f, true};
    uint32_t entry = token >> t.token_shift, physical;

    if (t.picks) {
        if (entry >= t.entries)
            return h;
        uint4 v = __ldcg((const uint4 *)&t.picks[entry]);
        entry = v.x;
        physical = v.y;
        h.bias = __uint_as_float(v.z);
        h.kept = v.w;
    } else {
        if (token >= t.length)
            return h;
        physical = (__ldg(&t.table[entry >> t.shift]) << t.shift) + (entry & ((1u << t.shift) - 1));
    }
    if (entry * b + in >= t.length) /* the newest page's unwritten end */
        return h;
    h.position = entry * b + in;
    h.keys = (const uint16_t *)(t.base + physical * a.pool.layout.page_bytes) + in * d;
    h.values = h.keys + (uint64_t)b * d;
    return h;
}

/* A query's address, and how many tokens it sees. */
__device__ __forceinline__ const uint16_t *find_query(const struct attend_args &a,
                                                      const struct task &t, uint32_t x) {
    const struct lk_geometry *g = &a.pool.geometry;
    uint32_t token = x / g->group;

    return (const uint16_t *)t.r->q +
           (((uint64_t)token * g->kv_heads + t.head) * g->group + x % g->group) * g->head_dim;
}
__device__ __forceinline__ int query_limit(const struct attend_args &a, const struct task &t,
                                           uint32_t x) {
    return (int)(t.r->length - t.r->tokens + 1 + x / a.pool.geometry.group);
}

/* ---- merging ---- */

struct merge_memory {
    struct lk_cuda_stat stat[WARPS][QUERIES];
    float mass[WARPS * QUERIES];
    uint32_t last;
    alignas(16) float out[4]; /* [warp][query][d + 4] */
};

__device__ __forceinline__ float *warp_out(struct merge_memory *s, uint32_t warp, uint32_t query,
                                           uint32_t d) {
    return s->out + ((uint64_t)warp * QUERIES + query) * (d + 4);
}

__device__ __forceinline__ float shrink(float from, float to) { /* 2^(from - to), empty: 0 */
    return from == -INFINITY ? 0.f : exp2_fast(from - to);
}

__device__ __forceinline__ uint8_t *partial_of(const struct attend_args &a, const struct task &t,
                                               uint32_t slice, uint32_t most) {
    uint64_t bytes = (uint64_t)most * (a.pool.geometry.head_dim * 4 + sizeof(struct lk_cuda_stat));
    return t.r->workspace + t.r->partials +
           (((uint64_t)t.head * t.r->query_groups + t.group) * t.r->slices + slice) * bytes;
}

/* Write a query's results; `state`: all its tokens. */
__device__ __noinline__ void finish_query(const struct attend_args &a, const struct task t,
                                          struct merge_memory *s, uint32_t q,
                                          const struct lk_cuda_stat &state) {
    const struct lk_geometry *g = &a.pool.geometry;
    uint32_t x = t.query_first + q;
    float mass = 1.f, lse = state.mass > 0 ? state.peak + log2f(state.mass) : -INFINITY;

    if (t.r->lse)
        t.r->lse[((uint64_t)(x / g->group) * g->kv_heads + t.head) * g->group + x % g->group] =
            lse * LK_LN2;
    if (t.r->scan) {
        const struct lk_cuda_head *h = row_head(t.r, t.head);
        if (__ldcg(&h->sampled))
            mass = state.kept / state.mass;
        else
            mass = 1.f / (1.f + exp2f(__ldcg(&h->rest[x % g->group]) - lse));
    }
    s->mass[q] = mass;
}

__device__ __forceinline__ float *query_out(const struct attend_args &a, const struct task &t,
                                            uint32_t q) {
    const struct lk_geometry *g = &a.pool.geometry;
    uint32_t x = t.query_first + q;

    return t.r->out +
           (((uint64_t)(x / g->group) * g->kv_heads + t.head) * g->group + x % g->group) *
               g->head_dim;
}

__device__ __forceinline__ void store_query(const struct attend_args &a, const struct task &t,
                                            uint32_t q, const float4 sum[2], float scale) {
    const uint32_t lane = threadIdx.x % 32;
    float *out = query_out(a, t, q);

#pragma unroll
    for (int x = 0; x < 2; x++)
        if (128 * x + 4 * lane < a.pool.geometry.head_dim)
            *(float4 *)&out[128 * x + 4 * lane] =
                make_float4(sum[x].x * scale, sum[x].y * scale, sum[x].z * scale, sum[x].w * scale);
}

/* After s->mass is complete. */
__device__ __noinline__ void finish_head(const struct attend_args &a, const struct task t,
                                         struct merge_memory *s) {
    if (!t.r->result || t.group != 0)
        return;
    struct lk_head_out out = {t.r->pages, 0, 1.f, LK_OUT_EXACT};
    if (t.r->scan) {
        const struct lk_cuda_head *h = row_head(t.r, t.head);
        float sum = 0;
        for (uint32_t i = 0; i < a.pool.geometry.group; i++)
            sum += s->mass[i];
        out.kept = __ldcg(&h->kept);
        out.sampled = __ldcg(&h->sampled);
        out.mass = sum / a.pool.geometry.group;
        out.flags = out.sampled ? 0 : LK_OUT_ESTIMATED;
    }
    t.r->result[t.head] = out;
}

__device__ __forceinline__ void list_all(const struct task &t) {
    if (t.r->scan || !t.r->list || t.slice || t.group)
        return;
    for (uint32_t i = threadIdx.x; i < min(t.r->pages, t.r->list_pages); i += THREADS)
        t.r->list[(uint64_t)t.head * t.r->list_pages + i] = {i, 1.f};
}

/* Merge the slices of a group of queries; a warp a query. */
__device__ __noinline__ void merge_slices(const struct attend_args &a, const struct task t,
                                          struct merge_memory *s, uint32_t most) {
    const uint32_t d = a.pool.geometry.head_dim, slices = t.r->slices, lane = threadIdx.x % 32;
    const uint64_t step = (uint64_t)most * (d * 4 + sizeof(struct lk_cuda_stat));
    const uint8_t *first = partial_of(a, t, 0, most);

#pragma unroll 1
    for (uint32_t q = warp_index(); q < t.queries; q += WARPS) {
        struct lk_cuda_stat all = {-INFINITY, 0.f, 0.f, 0.f};
        const uint8_t *stat = first + most * d * 4 + q * sizeof(struct lk_cuda_stat);
        float4 sum[2] = {};
#pragma unroll 1
        for (uint32_t i = lane; i < slices; i += 32)
            all.peak = fmaxf(all.peak, __ldcg((const float *)(stat + i * step)));
        all.peak = warp_max(all.peak);
#pragma unroll 1
        for (uint32_t base = 0; base < slices; base += 32) {
            float4 v = make_float4(-INFINITY, 0.f, 0.f, 0.f);
            if (base + lane < slices)
                v = __ldcg((const float4 *)(stat + (base + lane) * step));
            float f = shrink(v.x, all.peak);
            all.mass = fmaf(v.y, f, all.mass);
            all.kept = fmaf(v.z, f, all.kept);
#pragma unroll 8
            for (uint32_t i = 0; i < min(32u, slices - base); i++) {
                float g = __shfl_sync(LK_FULL_WARP, f, i);
#pragma unroll
                for (int x = 0; x < 2; x++)
                    if (128 * x + 4 * lane < d) {
                        float4 o = __ldcg((const float4 *)(first + (base + i) * step +
                                                           (q * d + 128 * x + 4 * lane) * 4));
                        sum[x].x = fmaf(o.x, g, sum[x].x);
                        sum[x].y = fmaf(o.y, g, sum[x].y);
                        sum[x].z = fmaf(o.z, g, sum[x].z);
                        sum[x].w = fmaf(o.w, g, sum[x].w);
                    }
            }
        }
        all.mass = warp_sum(all.mass);
        all.kept = warp_sum(all.kept);
        store_query(a, t, q, sum, all.mass > 0 ? 1.f / all.mass : 0.f);
        if (lane == 0)
            finish_query(a, t, s, q, all);
    }
    __syncthreads();
}

/* Merge the warps that held the same queries, a warp a query: to the output, or to the slice's
 * partial. */
__device__ __noinline__ void merge_warps(const struct attend_args &a, const struct task t,
                                         struct merge_memory *s, uint32_t most, uint8_t *partial) {
    const uint32_t d = a.pool.geometry.head_dim, shared_by = t.r->query_warps,
                   lane = threadIdx.x % 32;
    const uint32_t parts = WARPS / shared_by;

    __syncthreads();
#pragma unroll 1
    for (uint32_t q = warp_index(); q < t.queries; q += WARPS) {
        struct lk_cuda_stat v = {-INFINITY, 0.f, 0.f, 0.f}, all = v;
        const uint32_t w = q / QUERIES, in = q % QUERIES;
        float4 sum[2] = {};
        if (lane < parts)
            v = s->stat[w + lane * shared_by][in];
        all.peak = warp_max(v.peak);
        float f = shrink(v.peak, all.peak);
        all.mass = warp_sum(v.mass * f);
        all.kept = warp_sum(v.kept * f);
#pragma unroll 4
        for (uint32_t i = 0; i < parts; i++) {
            float g = __shfl_sync(LK_FULL_WARP, f, i);
#pragma unroll
            for (int x = 0; x < 2; x++)
                if (128 * x + 4 * lane < d) {
                    float4 o =
                        *(float4 *)&warp_out(s, w + i * shared_by, in, d)[128 * x + 4 * lane];
                    sum[x].x = fmaf(o.x, g, sum[x].x);
                    sum[x].y = fmaf(o.y, g, sum[x].y);
                    sum[x].z = fmaf(o.z, g, sum[x].z);
                    sum[x].w = fmaf(o.w, g, sum[x].w);
                }
        }
        if (partial) {
            for (int x = 0; x < 2; x++)
                if (128 * x + 4 * lane < d)
                    __stcg((float4 *)(partial + (q * d + 128 * x + 4 * lane) * 4), sum[x]);
            if (lane == 0)
                __stcg((float4 *)(partial + most * d * 4) + q,
                       make_float4(all.peak, all.mass, all.kept, 0.f));
        } else {
            store_query(a, t, q, sum, all.mass > 0 ? 1.f / all.mass : 0.f);
            if (lane == 0)
                finish_query(a, t, s, q, all);
        }
    }
    __syncthreads();
}

/* Warps have left their state in shared memory: merge them, and the row's slices if this was the
 * last. */
__device__ __forceinline__ void finish_task(const struct attend_args &a, const struct task &t,
                                            struct merge_memory *s) {
    const uint32_t most = t.r->query_warps * QUERIES;
    const bool whole = t.r->slices == 1;

    merge_warps(a, t, s, most, whole ? NULL : partial_of(a, t, t.slice, most));
    list_all(t);
    if (whole) {
        if (threadIdx.x == 0)
            finish_head(a, t, s);
        __syncthreads();
        return;
    }
    if (threadIdx.x == 0) {
        __threadfence();
        uint32_t *word = &a.sync[LK_CUDA_ROWS_MAX * a.pool.geometry.kv_heads + t.r->group_first +
                                 t.head * t.r->query_groups + t.group];
        s->last = atomicAdd(word, 1u) == t.r->slices - 1;
        if (s->last)
            *word = 0;
    }
    __syncthreads();
    if (!s->last)
        return;
    __threadfence();
    merge_slices(a, t, s, most);
    if (threadIdx.x == 0)
        finish_head(a, t, s);
    __syncthreads();
}

/* ---- tensor cores ---- */

template <int D, bool BF16>
__global__ void __launch_bounds__(THREADS, D <= 128 ? 2 : 1)
    attend_kernel(const __grid_constant__ struct attend_args a) {
    extern __shared__ __align__(16) uint8_t memory[];
    struct merge_memory *s = (struct merge_memory *)memory;
    const uint32_t lane = threadIdx.x % 32, warp = warp_index(), r = lane >> 2, c = lane & 3;

    let_next_start();
    wait_for_previous();
    for (uint32_t index = blockIdx.x; index < a.batch->tasks[LK_CUDA_ATTEND]; index += gridDim.x) {
        const struct task t = find_task(a, index);
        const uint32_t shared_by = t.r->query_warps, parts = WARPS / shared_by;
        const uint32_t first_query = (warp % shared_by) * QUERIES; /* of the block's */
        const float scale = t.r->sm_scale * LK_LOG2E;
        uint4 q[D / 32];
        float o[D / 16][4], peak[2] = {-INFINITY, -INFINITY}, mass[2] = {0, 0}, kept[2] = {0, 0};
        int limit[2];

#pragma unroll
        for (int i = 0; i < D / 32; i++)
            q[i] = first_query + r < t.queries
                       ? *(const uint4 *)(find_query(a, t, t.query_first + first_query + r) +
                                          32 * i + 8 * c)
                       : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int x = 0; x < 2; x++)
            limit[x] = query_limit(a, t, t.query_first + first_query + 2 * c + x);
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
        uint32_t tile = t.tile_first + warp / shared_by;
        struct octet next[2] = {find_octet(a, t, 16 * tile), find_octet(a, t, 16 * tile + 8)};
        if (first_query < t.queries)
            for (; tile < t.tile_last; tile += parts) {
                const struct octet h[2] = {next[0], next[1]};
                uint4 k[D / 32][2], v[D / 64][2][2];
                float z[4] = {0, 0, 0, 0};

#pragma unroll
                for (int x = 0; x < 2; x++)
#pragma unroll
                    for (int i = 0; i < D / 32; i++)
                        k[i][x] = __ldg((const uint4 *)(h[x].keys + r * D + 32 * i + 8 * c));
#pragma unroll
                for (int x = 0; x < 2; x++)
#pragma unroll
                    for (int i = 0; i < D / 64; i++)
#pragma unroll
                        for (int y = 0; y < 2; y++)
                            v[i][x][y] = __ldg(
                                (const uint4 *)(h[x].values + (2 * c + y) * D + 64 * i + 8 * r));
                if (tile + parts < t.tile_last) { /* its loads run beside this tile's */
                    next[0] = find_octet(a, t, 16 * (tile + parts));
                    next[1] = find_octet(a, t, 16 * (tile + parts) + 8);
                }
#pragma unroll
                for (int i = 0; i < D / 32; i++) {
                    mma_k16<BF16>(z, k[i][0].x, k[i][1].x, k[i][0].y, k[i][1].y, q[i].x, q[i].y);
                    mma_k16<BF16>(z, k[i][0].z, k[i][1].z, k[i][0].w, k[i][1].w, q[i].z, q[i].w);
                }
                float top[2], base[2], fade[2];
#pragma unroll
                for (int x = 0; x < 2; x++) { /* queries 2c + x; tokens r of each half */
#pragma unroll
                    for (int y = 0; y < 2; y++) {
                        bool in = h[y].position != NEVER && h[y].position + (int)r < limit[x];
                        z[2 * y + x] = in ? z[2 * y + x] * scale + h[y].bias : -INFINITY;
                    }
                    top[x] = fmaxf(z[x], z[2 + x]);
                    top[x] = fmaxf(top[x], __shfl_xor_sync(LK_FULL_WARP, top[x], 4));
                    top[x] = fmaxf(top[x], __shfl_xor_sync(LK_FULL_WARP, top[x], 8));
                    top[x] = fmaxf(top[x], __shfl_xor_sync(LK_FULL_WARP, top[x], 16));
                    top[x] = fmaxf(top[x], peak[x]);
                    base[x] = top[x] == -INFINITY ? 0.f : top[x];
                    fade[x] = shrink(peak[x], base[x]);
                    peak[x] = top[x];
#pragma unroll
                    for (int y = 0; y < 2; y++)
                        z[2 * y + x] = exp2_fast(z[2 * y + x] - base[x]);
                    mass[x] = mass[x] * fade[x] + z[x] + z[2 + x];
                    kept[x] =
                        kept[x] * fade[x] + (h[0].kept ? z[x] : 0.f) + (h[1].kept ? z[2 + x] : 0.f);
                }
#pragma unroll
                for (int i = 0; i < D / 16; i++) {
                    o[i][0] *= fade[0];
                    o[i][2] *= fade[0];
                    o[i][1] *= fade[1];
                    o[i][3] *= fade[1];
                }
                uint32_t p[2][2]; /* [half][high, low] */
#pragma unroll
                for (int y = 0; y < 2; y++) {
                    uint32_t high = pack_pair<BF16>(z[2 * y], z[2 * y + 1]);
                    float2 f = unpack_pair<BF16>(high);
                    p[y][0] = transpose_8x8(high);
                    p[y][1] = transpose_8x8(pack_pair<BF16>(z[2 * y] - f.x, z[2 * y + 1] - f.y));
                    int left = h[y].position == NEVER ? 0 : (int)t.length - h[y].position;
                    if (left < 8) {
#pragma unroll
                        for (int i = 0; i < D / 64; i++)
#pragma unroll
                            for (int x = 0; x < 2; x++)
                                if ((int)(2 * c + x) >= left)
                                    v[i][y][x] = make_uint4(0, 0, 0, 0);
                    }
                }
#pragma unroll
                for (int i = 0; i < D / 64; i++) {
                    const uint32_t *w00 = (const uint32_t *)&v[i][0][0],
                                   *w01 = (const uint32_t *)&v[i][0][1];
                    const uint32_t *w10 = (const uint32_t *)&v[i][1][0],
                                   *w11 = (const uint32_t *)&v[i][1][1];
#pragma unroll
                    for (int x = 0; x < 4; x++) {
                        uint32_t a0 = __byte_perm(w00[x], w01[x], 0x5410),
                                 a1 = __byte_perm(w00[x], w01[x], 0x7632);
                        uint32_t a2 = __byte_perm(w10[x], w11[x], 0x5410),
                                 a3 = __byte_perm(w10[x], w11[x], 0x7632);
                        mma_k16<BF16>(o[4 * i + x], a0, a1, a2, a3, p[0][0], p[1][0]);
                        mma_k16<BF16>(o[4 * i + x], a0, a1, a2, a3, p[0][1], p[1][1]);
                    }
                }
            }
#pragma unroll
        for (int x = 0; x < 2; x++) {
#pragma unroll
            for (int b = 4; b < 32; b <<= 1) {
                mass[x] += __shfl_xor_sync(LK_FULL_WARP, mass[x], b);
                kept[x] += __shfl_xor_sync(LK_FULL_WARP, kept[x], b);
            }
            if (r == 0)
                s->stat[warp][2 * c + x] = {peak[x], mass[x], kept[x], 0.f};
            if (first_query + 2 * c + x < t.queries) {
                float *to = warp_out(s, warp, 2 * c + x, D);
#pragma unroll
                for (int i = 0; i < D / 16; i++)
                    *(float2 *)&to[64 * (i / 4) + 8 * r + 2 * (i % 4)] =
                        make_float2(o[i][x], o[i][2 + x]);
            }
        }
        finish_task(a, t, s);
    }
}

/* ---- any head dimension ---- */

#define CHANNELS (LK_HEAD_DIM_MAX / 32)

__global__ void __launch_bounds__(THREADS)
    attend_plain(const __grid_constant__ struct attend_args a) {
    extern __shared__ __align__(16) uint8_t memory[];
    struct merge_memory *s = (struct merge_memory *)memory;
    const uint32_t lane = threadIdx.x % 32, warp = warp_index(), d = a.pool.geometry.head_dim;
    const bool bf16 = a.pool.geometry.dtype == LK_BF16;

    let_next_start();
    wait_for_previous();
    for (uint32_t index = blockIdx.x; index < a.batch->tasks[LK_CUDA_ATTEND]; index += gridDim.x) {
        const struct task t = find_task(a, index);
        const uint32_t shared_by = t.r->query_warps, parts = WARPS / shared_by;
        const uint32_t first_query = (warp % shared_by) * QUERIES;

        for (uint32_t x = 0; x < QUERIES; x++) {
            const uint32_t own = first_query + x;
            const uint16_t *q = find_query(a, t, t.query_first + own);
            const int limit = query_limit(a, t, t.query_first + own);
            float o[CHANNELS], peak = -INFINITY, mass = 0, kept = 0;
#pragma unroll
            for (int i = 0; i < CHANNELS; i++)
                o[i] = 0;
            if (own < t.queries)
                for (uint32_t tile = t.tile_first + warp / shared_by; tile < t.tile_last;
                     tile += parts)
                    for (int y = 0; y < 2; y++) {
                        const struct octet h = find_octet(a, t, 16 * tile + 8 * y);
                        for (int i = 0; h.position != NEVER && i < 8 && h.position + i < limit;
                             i++) {
                            float z = 0;
                            for (uint32_t ch = lane; ch < d; ch += 32)
                                z = fmaf(element(q[ch], bf16), element(h.keys[i * d + ch], bf16),
                                         z);
                            z = warp_sum(z) * (t.r->sm_scale * LK_LOG2E) + h.bias;
                            float top = fmaxf(peak, z), base = top == -INFINITY ? 0.f : top;
                            float fade = shrink(peak, base), p = exp2_fast(z - base);
                            mass = mass * fade + p;
                            kept = kept * fade + (h.kept ? p : 0.f);
#pragma unroll
                            for (int j = 0; j < CHANNELS; j++)
                                if (lane + 32 * j < d)
                                    o[j] = fmaf(p, element(h.values[i * d + lane + 32 * j], bf16),
                                                o[j] * fade);
                            peak = top;
                        }
                    }
            if (lane == 0)
                s->stat[warp][x] = {peak, mass, kept, 0.f};
#pragma unroll
            for (int j = 0; j < CHANNELS; j++)
                if (lane + 32 * j < d)
                    warp_out(s, warp, x, d)[lane + 32 * j] = o[j];
        }
        finish_task(a, t, s);
    }
}

/* ---- launcher ---- */

static uint32_t shared_bytes(uint32_t d) {
    return sizeof(struct merge_memory) + 4 * WARPS * QUERIES * (d + 4);
}

template <int D, bool BF16>
static int launch_fast(const struct lk_cuda_step *step, const struct attend_args &a, void *stream) {
    cudaFuncSetAttribute(attend_kernel<D, BF16>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         shared_bytes(D));
    return launch(attend_kernel<D, BF16>, dim3(step->processors * (D <= 128 ? 2 : 1)), THREADS,
                  shared_bytes(D), stream, a);
}

template <int D>
static int launch_type(const struct lk_cuda_step *step, const struct attend_args &a, void *stream) {
    return step->pool.geometry.dtype == LK_BF16 ? launch_fast<D, true>(step, a, stream)
                                                : launch_fast<D, false>(step, a, stream);
}

int lk_cuda_attend(const struct lk_cuda_step *step, void *stream) {
    struct attend_args a = {step->pool, step->batch, step->sync};
    uint32_t d = step->pool.geometry.head_dim;

    switch (d) {
    case 64:
        return launch_type<64>(step, a, stream);
    case 128:
        return launch_type<128>(step, a, stream);
    case 256:
        return launch_type<256>(step, a, stream);
    default:
        cudaFuncSetAttribute(attend_plain, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             shared_bytes(d));
        return launch(attend_plain, dim3(2 * step->processors), THREADS, shared_bytes(d), stream,
                      a);
    }
}
