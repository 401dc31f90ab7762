/* SPDX-License-Identifier: MIT */
/*
 * scan.cu - scores: every page, or superpage, from its summary; the newest page from its keys.
 *
 * Formula: s = log2 sum over tokens of 2^(sm_scale log2e (q.mu + sum_i c_ti q.v_i)), for each query
 * head.
 *
 * Geometry: one block a multiprocessor, warps independent of each other. A warp takes a task (row,
 * KV head, eight queries, chunk), eight pages at a time; their records travel to the warp's own
 * ring in shared memory while it computes the eight before. The ring runs on from task to task.
 *
 * A tile of eight pages, on tensor cores, with 16 directions of 16 / R pages as the rows of A:
 *   1. basis (u8 from 4 bits, biased by 8) x queries (s8, hi and lo in columns 2g, 2g + 1) -> i32
 *   2. projections, scaled, as fp16 hi and lo side by side; transposed 8 x 8 they are B of step 3
 *   3. coefficients (fp16 from u8) x projections -> f32 logits less the centroid's; column sums of
 *   2^x
 * hi + lo carry 22 bits of a projection; a query has 16 bits. Sums start at 0, since the mean of a
 * page's differences is 0 and so some logit is not below the centroid's; where one lies more than
 * 2^100 above, the tile is done again with a maximum for each page.
 *
 * A graph bakes in nothing but the batch's address. Shared memory: [warp][stage] tiles, then [warp]
 * query bytes; see ring_bytes().
 */
#include "device.cuh"

#ifndef LK_SCAN_WARPS
#define LK_SCAN_WARPS 16
#endif
#ifndef LK_SCAN_STAGES
#define LK_SCAN_STAGES 2
#endif
#define SHARED_MOST     (226 * 1024)
#define BARRIER_BYTES   1024
#define TILE            8
#define PEAK_MOST       100.f
#define MAGIC           0x4B400000 /* as float 12582912 + x for small integers x */
#define PROJECTION_MOST 65000.f

struct scan_args {
    struct lk_pool_view pool;
    const struct lk_cuda_batch *batch;
    int stage;      /* LK_CUDA_RANK, _COARSE or _RESCAN */
    uint32_t heads; /* 1: append and newest page too */
};

/* ---- tasks ---- */

struct cursor {
    const struct lk_cuda_row *r;
    uint32_t task, head, pass, slot;
    uint32_t first, count, tile; /* units of the task, and the tile at hand */
    bool super, listed;
};

/* A task of the second pass that sums what was not listed instead of scoring. */
__device__ __forceinline__ bool is_rest(const struct lk_cuda_row *r, uint32_t chunk) {
    return chunk >= r->rescan_tiles;
}

__device__ __forceinline__ uint32_t split_task(const struct scan_args &a, uint32_t task,
                                               struct cursor *c) {
    uint32_t row = find_row(a.batch, a.stage, task), chunks, chunk;
    uint32_t passes = (a.pool.geometry.group + 7) / 8;

    c->r = &a.batch->row[row];
    chunks = a.stage == LK_CUDA_RESCAN ? c->r->rescan_tiles + c->r->rest_chunks : c->r->chunks;
    task -= a.batch->first[a.stage][row];
    chunk = task % chunks;
    c->pass = task / chunks % passes;
    c->head = task / chunks / passes;
    return chunk;
}

/* Move to the first task from c->task on, in steps, that has something to score. */
__device__ __forceinline__ void find_task(const struct scan_args &a, uint32_t step,
                                          struct cursor *c) {
    uint32_t stride = group_stride(a.pool.geometry.group), lane = threadIdx.x % 32;

    for (; c->task < a.batch->tasks[a.stage]; c->task += step) {
        uint32_t chunk = split_task(a, c->task, c);
        c->tile = 0;
        c->listed = a.stage == LK_CUDA_RESCAN;
        if (c->listed) {
            if (is_rest(c->r, chunk))
                continue;
            uint32_t listed = __ldcg(&row_head(c->r, c->head)->listed);
            c->slot = 1 + c->r->chunks + chunk;
            c->super = false;
            c->first = chunk * TILE;
            c->count = c->first < listed ? min(listed - c->first, TILE) : 0;
            if (c->count)
                return;
            uint32_t q = c->pass * 8 + lane;
            if (lane < 8 && q < stride)
                row_parts(c->r, c->head, stride)[c->slot * stride + q] =
                    make_float2(-INFINITY, 0.f);
        } else {
            c->slot = 1 + chunk;
            c->super = c->r->scan == LK_TREE;
            c->first = chunk * c->r->chunk_units;
            c->count = min(c->r->chunk_units, c->r->units - c->first);
            return;
        }
    }
}

/* Index of unit `i` of the tile within the row; those past the end repeat the last. */
__device__ __forceinline__ uint32_t tile_unit(const struct cursor &c, uint32_t i) {
    uint32_t u = c.first + min(c.tile * TILE + i, c.count - 1);
    return c.listed ? __ldcg(&row_rescan(c.r, c.head)[u]) : u;
}

__device__ __forceinline__ uint32_t tile_record(const struct cursor &c, uint32_t i) {
    uint32_t u = tile_unit(c, i);
    if (!c.super)
        return physical_page(c.r, u);
    return c.r->table_shift == 2 ? __ldg(&c.r->table[u]) : __ldg(&c.r->table[4 * u]) / 4;
}

/* ---- queries ---- */

/* This lane's fragments and scales of four queries: column n of B is query n / 2, part n % 2. */
template <int D> struct query {
    uint32_t b[D / 32][2];
    int start_hi, start_lo; /* -8 x the sum of the parts: the basis' bias, for query lane % 4 */
    float scale;            /* of query lane % 4, logits in base 2 */
};

template <int D>
__device__ __forceinline__ void load_query(const struct scan_args &a, const struct cursor &c,
                                           uint32_t first, int8_t *bytes, struct query<D> *ret) {
    const uint32_t lane = threadIdx.x % 32, group = a.pool.geometry.group;
    const bool bf16 = a.pool.geometry.dtype == LK_BF16;
    const float norm = rsqrtf((float)D);
    constexpr int N = D / 32;

    float x[4][N];

#pragma unroll
    for (int g = 0; g < 4; g++) {
        const uint16_t *q = (const uint16_t *)c.r->q + ((uint64_t)c.head * group + first + g) * D;
#pragma unroll
        for (int i = 0; i < N; i++)
            x[g][i] = first + g < group ? element(__ldg(q + 32 * i + lane), bf16) : 0.f;
    }
    __syncwarp();
#pragma unroll
    for (int o = 1; o < 32; o <<= 1)
#pragma unroll
        for (int i = 0; i < 4 * N; i++) {
            float *at = &x[i / N][i % N], y = __shfl_xor_sync(LK_FULL_WARP, *at, o);
            *at = lane & o ? y - *at : *at + y;
        }
#pragma unroll
    for (int g = 0; g < 4; g++) {
        float peak = 0, unit;
        int hi_sum = 0, lo_sum = 0;
#pragma unroll
        for (int o = 1; o < N; o <<= 1)
#pragma unroll
            for (int i = 0; i < N; i++)
                if (!(i & o)) {
                    float y = x[g][i + o];
                    x[g][i + o] = x[g][i] - y;
                    x[g][i] += y;
                }
#pragma unroll
        for (int i = 0; i < N; i++)
            peak = fmaxf(peak, fabsf(x[g][i]));
        peak = __uint_as_float(__reduce_max_sync(LK_FULL_WARP, __float_as_uint(peak)));
        unit = peak > 1e-30f ? 32512.f / peak : 0.f;
#pragma unroll
        for (int i = 0; i < N; i++) {
            int v = max(-32512, min(32512, __float2int_rn(x[g][i] * unit))), hi = (v + 128) >> 8;
            bytes[(2 * g) * D + 32 * i + lane] = (int8_t)hi;
            bytes[(2 * g + 1) * D + 32 * i + lane] = (int8_t)(v - 256 * hi);
            hi_sum += hi;
            lo_sum += v - 256 * hi;
        }
        hi_sum = __reduce_add_sync(LK_FULL_WARP, hi_sum);
        lo_sum = __reduce_add_sync(LK_FULL_WARP, lo_sum);
        if ((lane & 3) == g) {
            ret->start_hi = MAGIC - 8 * hi_sum;
            ret->start_lo = MAGIC - 8 * lo_sum;
            ret->scale = peak > 1e-30f ? peak / 32512.f * norm * c.r->sm_scale * LK_LOG2E : 0.f;
        }
    }
    __syncwarp();
#pragma unroll
    for (int t = 0; t < N; t++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            ret->b[t][h] =
                *(const uint32_t *)&bytes[(lane >> 2) * D + 32 * t + 16 * h + 4 * (lane & 3)];
    __syncwarp();
}

/* hi and lo sums -> one number, in units of 1. */
__device__ __forceinline__ float join(int hi, int lo) {
    return fmaf(__int_as_float(hi) - 12582912.f, 256.f, __int_as_float(lo) - 12582912.f);
}

/* ---- a tile ---- */

struct records {
    uint32_t coarse_stride, fine_stride; /* also their strides in shared memory */
    uint32_t centroid, coarse_coeffs, coarse_scales, fine_coeffs, fine_scales, tokens;
};

/* The same as numbers known to the compiler, which then unrolls a tile's pages. */
template <int D, int R, int T> __device__ __forceinline__ constexpr struct records fixed_records() {
    struct records r = {};

    r.centroid = D;
    r.coarse_coeffs = 2 * D;
    r.coarse_scales = 2 * D + 2 * T;
    r.coarse_stride = (2 * D + 2 * T + 6 + 15) / 16 * 16;
    r.fine_coeffs = (R - 2) * D / 2;
    r.fine_scales = r.fine_coeffs + (R - 2) * T;
    r.fine_stride = R > 2 ? (r.fine_scales + 2 * (R - 2) + 15) / 16 * 16 : 0;
    r.tokens = T;
    return r;
}

template <int N> __device__ __forceinline__ void load_words(uint32_t *w, const uint8_t *from) {
    if constexpr (N == 2) {
        uint2 x = *(const uint2 *)from;
        w[0] = x.x, w[1] = x.y;
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            uint4 x = *(const uint4 *)(from + 4 * i);
            w[i] = x.x, w[i + 1] = x.y, w[i + 2] = x.z, w[i + 3] = x.w;
        }
    }
}

/* Fragments of the page's coefficients: tokens lane / 4 and + 8 of tile m, directions of pair k. */
__device__ __forceinline__ void load_coeffs(const struct records &rec, const uint8_t *coarse,
                                            const uint8_t *fine, uint32_t pair, uint32_t m,
                                            bool live, uint32_t *a0, uint32_t *a1) {
    const uint32_t r = threadIdx.x % 32 / 4;
    const uint8_t *at = pair == 0 ? coarse + rec.coarse_coeffs
                                  : fine + rec.fine_coeffs + (pair - 1) * 2 * rec.tokens;
    const __half2 bias = __half2half2(__ushort_as_half(0x6480)); /* 1024 + 128 */
    uint32_t w = 0x80808080u;

    if (live)
        w = rec.tokens < 16 ? *(const uint16_t *)(at + 2 * r) | 0x80800000u
                            : *(const uint32_t *)(at + 32 * m + 4 * r);
    uint32_t x = __byte_perm(w, 0x64646464u, 0x4140), y = __byte_perm(w, 0x64646464u, 0x4342);
    *a0 = bits_of(__hsub2(*(__half2 *)&x, bias));
    *a1 = bits_of(__hsub2(*(__half2 *)&y, bias));
}

/* Sum of the eight pages' columns over the lanes of a query: lane 4 r + c ends with page r. */
__device__ __forceinline__ float gather_pages(const float *sum) {
    const uint32_t lane = threadIdx.x;
    float e[4], f[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float send = lane & 16 ? sum[i] : sum[i + 4], keep = lane & 16 ? sum[i + 4] : sum[i];
        e[i] = keep + __shfl_xor_sync(LK_FULL_WARP, send, 16);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float send = lane & 8 ? e[i] : e[i + 2], keep = lane & 8 ? e[i + 2] : e[i];
        f[i] = keep + __shfl_xor_sync(LK_FULL_WARP, send, 8);
    }
    float send = lane & 4 ? f[0] : f[1], keep = lane & 4 ? f[1] : f[0];
    return keep + __shfl_xor_sync(LK_FULL_WARP, send, 4);
}

/* score[j]: page lane / 4 of the tile, query 4 j + lane % 4. -> the largest logit less its
 * centroid.
 * T: tokens of a record, 0: as rec says. */
template <int D, int R, int NG, int T>
__device__ __forceinline__ float score_tile(const struct records &rec, const uint8_t *coarse,
                                            const struct query<D> *q, bool careful, float *score) {
    constexpr int W = D / 32, PAGES = 16 / R, UNROLL = T < 16 ? 1 : T / 16;
    const uint8_t *fine = coarse + TILE * rec.coarse_stride;
    const uint32_t lane = threadIdx.x % 32, r = lane >> 2, c = lane & 3;
    float sum[NG][TILE], shift[NG], peak = -INFINITY;

#pragma unroll
    for (int j = 0; j < NG; j++)
        shift[j] = 0;
#pragma unroll
    for (int s = 0; s < R / 2; s++) {
        uint32_t w[2][W], b[NG][2];
        float scale[2];
#pragma unroll
        for (int h = 0; h < 2; h++) { /* rows r and r + 8: pages and directions */
            uint32_t row = 16 * s + 8 * h + r, page = row / R, dir = row % R;
            const uint8_t *rp =
                dir < 2 ? coarse + page * rec.coarse_stride : fine + page * rec.fine_stride;
            uint32_t d = dir < 2 ? dir : dir - 2;
            load_words<W>(w[h], rp + d * (D / 2) + c * (D / 8));
            scale[h] = bf16_float(
                *(const uint16_t *)(rp + (dir < 2 ? rec.coarse_scales + 2 : rec.fine_scales) +
                                    2 * d));
        }
#pragma unroll
        for (int j = 0; j < NG; j++) {
            int acc[4] = {q[j].start_hi, q[j].start_lo, q[j].start_hi, q[j].start_lo};
#pragma unroll
            for (int t = 0; t < W; t++)
                mma_u8s8(acc, w[0][t] & 0x0f0f0f0fu, w[1][t] & 0x0f0f0f0fu,
                         (w[0][t] >> 4) & 0x0f0f0f0fu, (w[1][t] >> 4) & 0x0f0f0f0fu, q[j].b[t][0],
                         q[j].b[t][1]);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float x = join(acc[2 * h], acc[2 * h + 1]) * (q[j].scale * scale[h]);
                x = fminf(fmaxf(x, -PROJECTION_MOST), PROJECTION_MOST);
                float high = __half2float(__float2half_rn(x));
                b[j][h] = transpose_8x8(bits_of(__floats2half2_rn(high, x - high)));
            }
        }
#pragma unroll
        for (int l = 0; l < (PAGES ? PAGES : 1); l++) {
            const int p = s * 16 / R + l;
            const uint8_t *pc = coarse + p * rec.coarse_stride, *pf = fine + p * rec.fine_stride;
            const uint32_t tiles = T ? UNROLL : rec.tokens < 16 ? 1 : rec.tokens / 16;
            const float second = rec.tokens < 16 ? 0.f : 1.f;
            float top[NG];
#pragma unroll
            for (int j = 0; j < NG; j++)
                sum[j][p] = 0, top[j] = 0;
            for (int round = careful ? 0 : 1; round < 2; round++) {
#pragma unroll UNROLL
                for (uint32_t m = 0; m < tiles; m++) {
                    uint32_t a0, a1, a2 = 0, a3 = 0;
                    if (R == 16) {
                        load_coeffs(rec, pc, pf, c, m, true, &a0, &a1);
                        load_coeffs(rec, pc, pf, c + 4, m, true, &a2, &a3);
                    } else if (R == 8) {
                        load_coeffs(rec, pc, pf, c, m, true, &a0, &a1);
                    } else if (R == 4) {
                        load_coeffs(rec, pc, pf, c & 1, m, c >> 1 == (l & 1), &a0, &a1);
                    } else {
                        load_coeffs(rec, pc, pf, 0, m, c == (l & 3), &a0, &a1);
                    }
#pragma unroll
                    for (int j = 0; j < NG; j++) {
                        float z[4] = {0, 0, 0, 0};
                        if (R == 16)
                            mma_k16<false>(z, a0, a1, a2, a3, b[j][0], b[j][1]);
                        else
                            mma_f16_k8(z, a0, a1, b[j][R == 8 ? l : R == 4 ? l / 2 : l / 4]);
                        float x = z[0] + z[1], y = z[2] + z[3];
                        if (round == 0) {
                            top[j] = fmaxf(top[j], fmaxf(x, y));
                        } else {
                            peak = fmaxf(peak, fmaxf(x, y));
                            sum[j][p] += exp2_fast(x - top[j]) + second * exp2_fast(y - top[j]);
                        }
                    }
                }
                if (round == 0) {
#pragma unroll
                    for (int j = 0; j < NG; j++) {
                        for (int o = 4; o < 32; o <<= 1)
                            top[j] = fmaxf(top[j], __shfl_xor_sync(LK_FULL_WARP, top[j], o));
                        shift[j] = r == p ? top[j] : shift[j];
                    }
                }
            }
        }
    }
    uint32_t mu[D / 16];
    load_words<D / 16>(mu, coarse + r * rec.coarse_stride + rec.centroid + c * (D / 4));
    float mu_scale =
        bf16_float(*(const uint16_t *)(coarse + r * rec.coarse_stride + rec.coarse_scales));
#pragma unroll
    for (int j = 0; j < NG; j++) {
        int acc[4] = {MAGIC, MAGIC, 0, 0};
#pragma unroll
        for (int t = 0; t < W; t++)
            mma_s8s8(acc, mu[2 * t], 0, mu[2 * t + 1], 0, q[j].b[t][0], q[j].b[t][1]);
        score[j] = join(acc[0], acc[1]) * (q[j].scale * mu_scale) + shift[j] +
                   log2_fast(gather_pages(sum[j]));
    }
    return peak;
}

/* ---- writing ---- */

/* The lane's score of query `q`; page lane / 4 of the tile. */
__device__ __forceinline__ void store_score(const struct scan_args &a, const struct cursor &c,
                                            uint32_t unit, uint32_t q, float score) {
    uint32_t stride = group_stride(a.pool.geometry.group);
    bool last = c.listed || c.r->scan == LK_FULL || c.r->scan == LK_COARSE;
    uint32_t bits = __float_as_uint(c.super ? score - 2.f : score);
    float *to = row_scores(c.r, c.head, stride) + (uint64_t)unit * (c.super ? 4 : 1) * stride + q;

    if (q == 0)
        bits = (bits & ~1u) | (last ? 1 : 0);
    *to = __uint_as_float(bits);
    if (c.super)
        for (int i = 1; i < 4; i++)
            to[i * stride] = __uint_as_float(bits);
}

/* Sum over the pages of a task: lanes of a query, then to the task's slot. */
__device__ __forceinline__ void store_part(const struct scan_args &a, const struct cursor &c,
                                           uint32_t q, float2 part) {
    uint32_t stride = group_stride(a.pool.geometry.group);

    for (int o = 4; o < 32; o <<= 1) {
        float2 other = make_float2(__shfl_xor_sync(LK_FULL_WARP, part.x, o),
                                   __shfl_xor_sync(LK_FULL_WARP, part.y, o));
        part = merge_parts(part, other);
    }
    if (threadIdx.x % 32 < 4)
        row_parts(c.r, c.head, stride)[c.slot * stride + q] = part;
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

/* Exact, by a lane a token, four queries at a time; their bytes in `scratch`. */
__device__ void score_newest(const struct scan_args &a, const struct lk_cuda_row *r, uint32_t head,
                             uint16_t *scratch) {
    const struct lk_geometry *g = &a.pool.geometry;
    const uint32_t lane = threadIdx.x % 32, d = g->head_dim, stride = group_stride(g->group);
    const uint32_t page = r->pages - 1;
    const uint32_t tokens = (uint32_t)(r->length - (uint64_t)page * g->page_tokens);
    const uint16_t *keys =
        (const uint16_t *)lk_page_keys_device(a.pool, r->layer, physical_page(r, page), head);
    const bool bf16 = g->dtype == LK_BF16;

    for (uint32_t first = 0; first < g->group; first += 4) {
        const uint32_t count = min(4u, g->group - first);
        const uint16_t *q = (const uint16_t *)r->q + ((uint64_t)head * g->group + first) * d;
        float2 part[4];

        __syncwarp();
        for (uint32_t i = lane; i < 4 * d; i += 32)
            scratch[i] = i < count * d ? q[i] : 0;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++)
            part[i] = make_float2(-INFINITY, 0.f);
        for (uint32_t t = lane; t < tokens; t += 32) {
            float x[4] = {0, 0, 0, 0};
            const uint4 *k = (const uint4 *)(keys + (uint64_t)t * d);
#pragma unroll 8
            for (uint32_t i = 0; i < d; i += 8) {
                const uint4 w = k[i / 8];
                const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
                for (int y = 0; y < 4; y++) {
                    const uint4 v = *(const uint4 *)&scratch[y * d + i];
                    const uint32_t other[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int e = 0; e < 8; e++)
                        x[y] = fmaf(element((uint16_t)(words[e / 2] >> (e % 2 * 16)), bf16),
                                    element((uint16_t)(other[e / 2] >> (e % 2 * 16)), bf16), x[y]);
                }
            }
#pragma unroll
            for (int y = 0; y < 4; y++)
                part[y] = merge_parts(part[y], make_float2(x[y] * r->sm_scale * LK_LOG2E, 1.f));
        }
#pragma unroll
        for (int y = 0; y < 4; y++) {
            for (int o = 16; o; o >>= 1) {
                float2 other = make_float2(__shfl_xor_sync(LK_FULL_WARP, part[y].x, o),
                                           __shfl_xor_sync(LK_FULL_WARP, part[y].y, o));
                part[y] = merge_parts(part[y], other);
            }
            if (lane == y && y < count) {
                uint32_t bits = __float_as_uint(part[y].x + log2_fast(part[y].y));
                if (first + y == 0)
                    bits |= 1;
                row_scores(r, head, stride)[(uint64_t)page * stride + first + y] =
                    __uint_as_float(bits);
                row_parts(r, head, stride)[first + y] = part[y];
            }
        }
    }
}

__device__ __forceinline__ void run_heads(const struct scan_args &a, uint32_t warp, uint32_t warps,
                                          uint16_t *scratch) {
    const uint32_t heads = a.pool.geometry.kv_heads;

    /* From the far end: the last warps have the fewest chunks. */
    for (uint32_t task = warps - 1 - warp; task < a.batch->tasks[LK_CUDA_HEADS]; task += warps) {
        uint32_t row = find_row(a.batch, LK_CUDA_HEADS, task);
        const struct lk_cuda_row *r = &a.batch->row[row];
        uint32_t t = task - a.batch->first[LK_CUDA_HEADS][row];

        append_tokens(a, r, t % heads, t / heads);
        if (r->scan && t / heads == 0)
            score_newest(a, r, t % heads, scratch);
    }
}

/* ---- pages that the second pass did not list ---- */

__device__ __forceinline__ void run_rest(const struct scan_args &a, uint32_t warp, uint32_t warps) {
    const uint32_t lane = threadIdx.x % 32, stride = group_stride(a.pool.geometry.group);

    for (uint32_t task = warp; task < a.batch->tasks[LK_CUDA_RESCAN]; task += warps) {
        struct cursor c;
        uint32_t chunk = split_task(a, task, &c), first, last, queries;
        float2 part[8];

        if (!is_rest(c.r, chunk))
            continue;
        first = (chunk - c.r->rescan_tiles) * c.r->rest_pages;
        last = min(first + c.r->rest_pages, c.r->complete);
        queries = min(8u, a.pool.geometry.group - c.pass * 8);
        for (int i = 0; i < 8; i++)
            part[i] = make_float2(-INFINITY, 0.f);
        for (uint32_t j = first + lane; j < last; j += 32) {
            const float *s = row_scores(c.r, c.head, stride) + (uint64_t)j * stride;
            if (__float_as_uint(__ldcg(s)) & 1)
                continue;
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (i < queries)
                    part[i] = merge_parts(part[i], make_float2(__ldcg(&s[c.pass * 8 + i]), 1.f));
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            for (int o = 16; o; o >>= 1) {
                float2 other = make_float2(__shfl_xor_sync(LK_FULL_WARP, part[i].x, o),
                                           __shfl_xor_sync(LK_FULL_WARP, part[i].y, o));
                part[i] = merge_parts(part[i], other);
            }
            if (lane == 0 && i < queries)
                row_parts(c.r, c.head,
                          stride)[(1 + c.r->chunks + chunk) * stride + c.pass * 8 + i] = part[i];
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

/* score_tile() for the record sizes that are worth their own code; -> false: none of these. */
template <int D, int R, int NG>
__device__ __forceinline__ bool score_fixed(uint32_t tokens, const uint8_t *tile,
                                            const struct query<D> *q, float *score, float *peak) {
    if (tokens == 16)
        *peak = score_tile<D, R, NG, 16>(fixed_records<D, R, 16>(), tile, q, false, score);
    else if (R < 16 && D <= 128 && tokens == 8)
        *peak = score_tile < D, R < 16 ? R : 2, NG,
        8 > (fixed_records < D, R < 16 ? R : 2, 8 > (), tile, q, false, score);
    else if (R == 2 && D <= 128 && tokens == 64)
        *peak = score_tile<D, 2, NG, 64>(fixed_records<D, 2, 64>(), tile, q, false, score);
    else if (R == 2 && D <= 128 && tokens == 32)
        *peak = score_tile<D, 2, NG, 32>(fixed_records<D, 2, 32>(), tile, q, false, score);
    else
        return false;
    return true;
}

/* Start the copies of the tile's records; ids: lane i < 8 has the i-th record's index in its plane.
 * Four pages of a quad lie together and travel together. On sm_90 the copy engine takes them, so
 * that the warp goes on at once; `bar` counts their bytes. */
__device__ __forceinline__ void fetch_tile(const struct scan_args &a, const struct cursor &c,
                                           const struct records &rec, uint32_t ids, uint8_t *to,
                                           uint64_t *bar) {
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t plane = (uint64_t)c.r->layer * a.pool.geometry.kv_heads + c.head;
    const uint8_t *coarse = c.super ? a.pool.super + plane * (a.pool.pages / 4) * rec.coarse_stride
                                    : a.pool.coarse + plane * a.pool.pages * rec.coarse_stride;
    const uint8_t *fine = a.pool.fine + plane * a.pool.pages * rec.fine_stride;

#if __CUDA_ARCH__ >= 900
    const bool quads = !c.super && !c.listed && c.r->table_shift == 2;
    const uint32_t pieces = quads ? 2 : TILE, pages = TILE / pieces, piece = lane & (pieces - 1);
    const bool second = lane >= pieces;
    uint64_t id = __shfl_sync(LK_FULL_WARP, ids, piece * pages);
    uint32_t stride = second ? rec.fine_stride : rec.coarse_stride,
             address = (uint32_t)__cvta_generic_to_shared(bar);

    if (quads)
        id &= ~3ull;
    if (lane == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address),
                     "r"(TILE * (rec.coarse_stride + rec.fine_stride))
                     : "memory");
    if (lane < (rec.fine_stride ? 2 : 1) * pieces)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
                     "[%1], %2, [%3];" ::"r"((uint32_t)__cvta_generic_to_shared(
                         to + (second ? TILE * rec.coarse_stride : 0) + piece * pages * stride)),
                     "l"((second ? fine : coarse) + id * stride), "r"(pages * stride), "r"(address)
                     : "memory");
#else
    const uint32_t x = lane * 16;
    uint8_t *const to_fine = to + TILE * rec.coarse_stride;

    for (int p = 0; p < TILE; p++) {
        uint64_t id = __shfl_sync(LK_FULL_WARP, ids, p);
        for (uint32_t y = x; y < rec.coarse_stride; y += 512)
            copy_async(to + p * rec.coarse_stride + y, coarse + id * rec.coarse_stride + y);
        for (uint32_t y = x; y < rec.fine_stride; y += 512)
            copy_async(to_fine + p * rec.fine_stride + y, fine + id * rec.fine_stride + y);
    }
#endif
}

__device__ __forceinline__ void prepare_barriers(uint64_t *bar, uint32_t count) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 < count)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(
                         (uint32_t)__cvta_generic_to_shared(bar + threadIdx.x % 32))
                     : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    __syncwarp();
}

/* The tile fetched STAGES fetches ago has arrived. */
template <int STAGES> __device__ __forceinline__ void wait_tile(uint64_t *bar, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    uint32_t done, address = (uint32_t)__cvta_generic_to_shared(bar);

    do
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(address), "r"(parity)
                     : "memory");
    while (!done);
#else
    copy_wait<STAGES - 1>();
#endif
    __syncwarp();
}

template <int D, int R, int NG, int STAGES>
__global__ void __launch_bounds__(512, 1)
    scan_kernel(const __grid_constant__ struct scan_args a, uint32_t tile_bytes) {
    extern __shared__ __align__(128) uint8_t shared[];
    const uint32_t lane = threadIdx.x % 32, in_block = warp_index();
    const uint32_t warps = gridDim.x * (blockDim.x / 32);
    const uint32_t warp =
        in_block * gridDim.x + blockIdx.x; /* neighbours on different processors */
    uint64_t *bar = (uint64_t *)shared + in_block * STAGES;
    uint8_t *ring = shared + BARRIER_BYTES + in_block * STAGES * tile_bytes;
    int8_t *bytes = (int8_t *)(shared + BARRIER_BYTES + blockDim.x / 32 * STAGES * tile_bytes +
                               in_block * 8 * D);
    struct cursor in = {}, out = {};
    struct records rec = records_of(a, false, R);
    struct query<D> q[NG];
    uint32_t stage = 0, parity = 0, ids = 0, total;
    float2 part[NG];

    let_next_start();
    prepare_barriers(bar, STAGES);
    total = a.batch->tasks[a.stage];
    in.task = warp;
    if (a.stage == LK_CUDA_RESCAN)
        wait_for_previous();
    find_task(a, warps, &in);
    out = in;
    if (in.task < total)
        ids = tile_record(in, lane & 7);
    wait_for_previous();
    auto advance = [&](struct cursor &c) {
        if (++c.tile * TILE < c.count)
            return;
        c.task += warps;
        find_task(a, warps, &c);
    };
    auto fetch = [&](uint32_t s) {
        if (in.task < total) {
            if (R == LK_COARSE_RANK)
                rec = records_of(a, in.super, R);
            fetch_tile(a, in, rec, ids, ring + s * tile_bytes, bar + s);
            advance(in);
            if (in.task < total)
                ids = tile_record(in, lane & 7);
        }
        copy_commit();
    };
#pragma unroll
    for (int s = 0; s < STAGES; s++)
        fetch(s);
    while (out.task < total) {
        float score[NG];
        uint32_t unit = tile_unit(out, lane >> 2);
        bool live = out.tile * TILE + (lane >> 2) < out.count;
        if (out.tile == 0) {
#pragma unroll
            for (int j = 0; j < NG; j++) {
                load_query<D>(a, out, out.pass * 8 + 4 * j, bytes, &q[j]);
                part[j] = make_float2(-INFINITY, 0.f);
            }
        }
        wait_tile<STAGES>(bar + stage, parity);
        if (R == LK_COARSE_RANK)
            rec = records_of(a, out.super, R);
        float peak = INFINITY;
        const uint8_t *at = ring + stage * tile_bytes;
        if (!score_fixed<D, R, NG>(rec.tokens, at, q, score, &peak) ||
            __any_sync(LK_FULL_WARP, peak > PEAK_MOST))
            score_tile<D, R, NG, 0>(rec, at, q, true, score);
        __syncwarp();
        fetch(stage);
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
#pragma unroll
        for (int j = 0; j < NG; j++) {
            uint32_t query = out.pass * 8 + 4 * j + (lane & 3);
            if (live) {
                if (query < a.pool.geometry.group)
                    store_score(a, out, unit, query, score[j]);
                part[j] = merge_parts(part[j], make_float2(score[j], 1.f));
            }
            if ((out.tile + 1) * TILE >= out.count)
                store_part(a, out, query, part[j]);
        }
        advance(out);
    }
    copy_wait<0>();
    if (a.heads)
        run_heads(a, warp, warps, (uint16_t *)bytes);
    if (a.stage == LK_CUDA_RESCAN)
        run_rest(a, warp, warps);
}

/* Any head dimension: a warp a page, from the record's bytes; queries rotated in shared memory. */
__global__ void __launch_bounds__(256)
    scan_plain(const __grid_constant__ struct scan_args a, uint32_t rank, uint32_t warp_bytes) {
    extern __shared__ __align__(128) uint8_t shared[];
    const struct lk_geometry *g = &a.pool.geometry;
    const uint32_t lane = threadIdx.x % 32, d = g->head_dim, block = d & -d;
    const uint32_t warps = gridDim.x * (blockDim.x / 32);
    const uint32_t warp = warp_index() * gridDim.x + blockIdx.x;
    const uint32_t stride = group_stride(g->group);
    float *q = (float *)(shared + threadIdx.x / 32 * warp_bytes), *projection = q + 8 * d;
    struct cursor c = {};

    let_next_start();
    wait_for_previous();
    for (c.task = warp, find_task(a, warps, &c); c.task < a.batch->tasks[a.stage];
         c.task += warps, find_task(a, warps, &c)) {
        const struct records rec = records_of(a, c.super, rank);
        const uint64_t plane = (uint64_t)c.r->layer * g->kv_heads + c.head;
        const uint32_t queries = min(8u, g->group - c.pass * 8);
        float2 part = make_float2(-INFINITY, 0.f); /* of query lane % 8, tokens of its lanes */

        __syncwarp();
        for (uint32_t i = lane; i < 8 * d; i += 32)
            q[i] = i < queries * d
                       ? element(((const uint16_t *)
                                      c.r->q)[((uint64_t)c.head * g->group + c.pass * 8) * d + i],
                                 g->dtype == LK_BF16)
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
        for (uint32_t i = 0; i < c.count; i++) {
            c.tile = i / TILE;
            uint32_t unit = tile_unit(c, i % TILE), id = tile_record(c, i % TILE);
            const uint8_t *coarse =
                c.super ? a.pool.super + (plane * (a.pool.pages / 4) + id) * rec.coarse_stride
                        : a.pool.coarse + (plane * a.pool.pages + id) * rec.coarse_stride;
            const uint8_t *fine = a.pool.fine + (plane * a.pool.pages + id) * rec.fine_stride;
            const float unit_scale = rsqrtf((float)block) * c.r->sm_scale * LK_LOG2E;

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
            if (lane < queries)
                store_score(a, c, unit, c.pass * 8 + lane, score);
            part = merge_parts(part, make_float2(score, 1.f));
            __syncwarp();
        }
        if (lane < 8 && c.pass * 8 + lane < stride)
            row_parts(c.r, c.head, stride)[c.slot * stride + c.pass * 8 + lane] = part;
    }
    if (a.heads)
        run_heads(a, warp, warps, (uint16_t *)q);
    if (a.stage == LK_CUDA_RESCAN)
        run_rest(a, warp, warps);
}

/* ---- launchers ---- */

template <int D, int R, int NG>
static int launch_fast(const struct scan_args &a, uint32_t processors, void *stream) {
    constexpr int STAGES = R == 2 ? 2 * LK_SCAN_STAGES : LK_SCAN_STAGES;
    const struct lk_geometry *g = &a.pool.geometry;
    struct lk_record coarse = lk_record_coarse(g), fine = lk_record_fine(g),
                     super = lk_record_super(g);
    uint32_t tile = 8 * (R == 2 ? (super.stride > coarse.stride ? super.stride : coarse.stride)
                                : coarse.stride + fine.stride);
    uint32_t per_warp = STAGES * tile + 8 * D, warps = (SHARED_MOST - BARRIER_BYTES) / per_warp;

    if (warps > LK_SCAN_WARPS)
        warps = LK_SCAN_WARPS;
    cudaFuncSetAttribute(scan_kernel<D, R, NG, STAGES>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         SHARED_MOST);
    return launch(scan_kernel<D, R, NG, STAGES>, dim3(processors), 32 * warps,
                  BARRIER_BYTES + warps * per_warp, stream, a, tile);
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

static int launch_scan(const struct lk_cuda_step *step, int stage, bool heads, void *stream) {
    struct scan_args a = {step->pool, step->batch, stage, heads};
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
