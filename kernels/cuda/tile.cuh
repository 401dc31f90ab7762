/* SPDX-License-Identifier: MIT */
/*
 * tile.cuh - the score of eight records by a warp, from shared memory and queries in registers.
 *
 * On tensor cores, with 16 directions of 16 / R pages as the rows of A:
 *   1. basis (u8 from 4 bits, biased by 8) x queries (s8, hi and lo in columns 2g, 2g + 1) -> i32
 *   2. projections, scaled, in fp16 hi and lo; transposed 8 x 8 they are B of step 3
 *   3. coefficients (fp16 from u8) x projections -> f32 logits less the centroid's; column sums of
 *   2^x
 * hi + lo carry 22 bits of a projection; a query has 16 bits. Sums start at 0, since the mean of a
 * page's differences is 0 and so some logit is not below the centroid's; where a sum exceeds 2^100,
 * the tile is done again with a maximum for each page.
 *
 * Everything is for one warp; no state.
 */
#ifndef LK_CUDA_TILE_CUH
#define LK_CUDA_TILE_CUH

#include "device.cuh"

#define TILE            8
#define SUM_MOST        1.267650600e30f
#define MAGIC           0x4B400000 /* as float 12582912 + x for small integers x */
#define PROJECTION_MOST 65000.f

/* ---- queries ---- */

/* This lane's fragments and scales of four queries: column n of B is query n / 2, part n % 2. */
template <int D> struct query {
    uint32_t b[D / 16];
    int start_hi, start_lo; /* -8 x the sum of the parts: the basis' bias, for query lane % 4 */
    float scale;            /* of query lane % 4, logits in base 2 */
};

/* Four queries in shared memory, in the order of fragments. */
template <int D> struct four_queries {
    uint32_t b[D / 64][32][4];
    int4 start[4]; /* hi, lo, scale */
};

template <int D>
__device__ __forceinline__ void load_query(const struct four_queries<D> *from,
                                           struct query<D> *ret) {
    const uint32_t lane = threadIdx.x % 32;
    const int4 start = from->start[lane % 4];

#pragma unroll
    for (int i = 0; i < D / 64; i++) {
        uint4 w = *(const uint4 *)from->b[i][lane];
        ret->b[4 * i] = w.x, ret->b[4 * i + 1] = w.y;
        ret->b[4 * i + 2] = w.z, ret->b[4 * i + 3] = w.w;
    }
    ret->start_hi = start.x;
    ret->start_lo = start.y;
    ret->scale = __int_as_float(start.z);
}

/* hi and lo sums -> one number, in units of 1; both with MAGIC added. */
__device__ __forceinline__ float join(int hi, int lo) {
    return fmaf(__int_as_float(hi) - 12582912.f, 256.f, __int_as_float(lo) - 12582912.f);
}

/* ---- a tile ---- */

struct records {
    uint32_t coarse_stride, fine_stride; /* also their strides in shared memory */
    uint32_t centroid, coarse_coeffs, coarse_scales, fine_coeffs, fine_scales, tokens;
};

/* The same as numbers known to the compiler. */
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

/* Projections of 16 directions, rows lane / 4 and + 8 of A, on query lane % 4. `first` and `by`:
 * page of local page p of this step is first + p * by. */
template <int D, int R>
__device__ __forceinline__ void load_basis(const struct records &rec, const uint8_t *coarse,
                                           const uint8_t *fine, uint32_t first, uint32_t by,
                                           uint32_t w[2][D / 32], float scale[2]) {
    const uint32_t lane = threadIdx.x % 32, r = lane >> 2, c = lane & 3;

#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t row = 8 * h + r, page = first + row / R * by, dir = row % R;
        const uint32_t d = dir < 2 ? dir : dir - 2;
        const uint8_t *at =
            dir < 2 ? coarse + page * rec.coarse_stride : fine + page * rec.fine_stride;
        load_words<D / 32>(w[h], at + d * (D / 2) + c * (D / 8));
        scale[h] = bf16_float(
            *(const uint16_t *)(at + (dir < 2 ? rec.coarse_scales + 2 : rec.fine_scales) + 2 * d));
    }
}

template <int D>
__device__ __forceinline__ void project(const uint32_t w[2][D / 32], const float scale[2],
                                        const struct query<D> &q, float x[2]) {
    int acc[4] = {q.start_hi, q.start_lo, q.start_hi, q.start_lo};

    /* Low halves of two words, then, the sums times 16, their high halves in place. */
#pragma unroll
    for (int t = 0; t < D / 32; t += 2)
        mma_u8s8(acc, w[0][t] & 0x0f0f0f0fu, w[1][t] & 0x0f0f0f0fu, w[0][t + 1] & 0x0f0f0f0fu,
                 w[1][t + 1] & 0x0f0f0f0fu, q.b[2 * t], q.b[2 * t + 2]);
#pragma unroll
    for (int i = 0; i < 4; i++)
        acc[i] = acc[i] * 16 + MAGIC;
#pragma unroll
    for (int t = 0; t < D / 32; t += 2)
        mma_u8s8(acc, w[0][t] & 0xf0f0f0f0u, w[1][t] & 0xf0f0f0f0u, w[0][t + 1] & 0xf0f0f0f0u,
                 w[1][t + 1] & 0xf0f0f0f0u, q.b[2 * t + 1], q.b[2 * t + 3]);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        x[h] = join(acc[2 * h], acc[2 * h + 1]) * (q.scale * 0.0625f * scale[h]);
        x[h] = fminf(fmaxf(x[h], -PROJECTION_MOST), PROJECTION_MOST);
    }
}

/* x[0], x[1] of rows lane / 4 and + 8 -> transposed, the two in columns 2g, 2g + 1: hi and lo. */
__device__ __forceinline__ void split_projections(const float x[2], uint32_t *hi, uint32_t *lo) {
    __half2 high = __floats2half2_rn(x[0], x[1]);
    float2 back = __half22float2(high);

    *hi = transpose_8x8(bits_of(high));
    *lo = transpose_8x8(bits_of(__floats2half2_rn(x[0] - back.x, x[1] - back.y)));
}

/* Four bytes of two tokens -> fragments of A: each token's two coefficients. */
__device__ __forceinline__ void unpack_coeffs(uint32_t w, uint32_t *a0, uint32_t *a1) {
    const __half2 bias = __half2half2(__ushort_as_half(0x6480)); /* 1024 + 128 */
    uint32_t x = __byte_perm(w, 0x64646464u, 0x4140), y = __byte_perm(w, 0x64646464u, 0x4342);

    *a0 = bits_of(__hsub2(*(__half2 *)&x, bias));
    *a1 = bits_of(__hsub2(*(__half2 *)&y, bias));
}

/* Coefficients of tokens lane / 4 and + 8 of tile m, directions of pair k. */
__device__ __forceinline__ void load_coeffs(const struct records &rec, const uint8_t *coarse,
                                            const uint8_t *fine, uint32_t pair, uint32_t m,
                                            bool live, uint32_t *a0, uint32_t *a1) {
    const uint32_t r = threadIdx.x % 32 / 4;
    const uint8_t *at = pair == 0 ? coarse + rec.coarse_coeffs
                                  : fine + rec.fine_coeffs + (pair - 1) * 2 * rec.tokens;
    uint32_t w = 0x80808080u;

    if (live)
        w = rec.tokens < 16 ? *(const uint16_t *)(at + 2 * r) | 0x80800000u
                            : *(const uint32_t *)(at + 32 * m + 4 * r);
    unpack_coeffs(w, a0, a1);
}

/* Logits of tokens lane / 4 and + 8 of tile m, less the centroid's, query lane % 4, from local page
 * p of a step: z[0], z[1]. */
template <int R>
__device__ __forceinline__ void page_logits(const uint32_t a[4], uint32_t hi, uint32_t lo,
                                            uint32_t p, float z[2]) {
    float y[4] = {0, 0, 0, 0};

    if (R == 16) { /* hi, lo: directions 0-7 and 8-15, the parts in columns 2g, 2g + 1 */
        mma_k16<false>(y, a[0], a[1], a[2], a[3], hi, lo);
        z[0] = y[0] + y[1];
        z[1] = y[2] + y[3];
    } else { /* columns 2g: rows 0-7 of the step, 2g + 1: rows 8-15 */
        mma_k16<false>(y, a[0], a[1], a[0], a[1], hi, lo);
        z[0] = p * R >= 8 ? y[1] : y[0];
        z[1] = p * R >= 8 ? y[3] : y[2];
    }
}

template <int R>
__device__ __forceinline__ void page_coeffs(const struct records &rec, const uint8_t *coarse,
                                            const uint8_t *fine, uint32_t p, uint32_t m,
                                            uint32_t a[4]) {
    const uint32_t c = threadIdx.x & 3;

    if (R == 16) {
        load_coeffs(rec, coarse, fine, c, m, true, &a[0], &a[1]);
        load_coeffs(rec, coarse, fine, c + 4, m, true, &a[2], &a[3]);
    } else if (R == 8) {
        load_coeffs(rec, coarse, fine, c, m, true, &a[0], &a[1]);
    } else if (R == 4) {
        load_coeffs(rec, coarse, fine, c & 1, m, c >> 1 == (p & 1), &a[0], &a[1]);
    } else {
        load_coeffs(rec, coarse, fine, 0, m, c == (p & 3), &a[0], &a[1]);
    }
}

/* B of step 3 for 16 directions. */
template <int R>
__device__ __forceinline__ void make_b(const float x[2], uint32_t *hi, uint32_t *lo) {
    if (R == 16) {
        uint32_t *b[2] = {hi, lo};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float high = __half2float(__float2half_rn(x[h]));
            *b[h] = transpose_8x8(bits_of(__floats2half2_rn(high, x[h] - high)));
        }
    } else {
        split_projections(x, hi, lo);
    }
}

/* Centroid's logit of page lane / 4, query lane % 4. */
template <int D>
__device__ __forceinline__ void load_centroid(const struct records &rec, const uint8_t *coarse,
                                              uint32_t mu[D / 16], float *scale) {
    const uint32_t lane = threadIdx.x % 32;
    const uint8_t *at = coarse + (lane >> 2) * rec.coarse_stride;

    load_words<D / 16>(mu, at + rec.centroid + (lane & 3) * (D / 4));
    *scale = bf16_float(*(const uint16_t *)(at + rec.coarse_scales));
}
template <int D>
__device__ __forceinline__ float centroid_logit(const uint32_t mu[D / 16], float scale,
                                                const struct query<D> &q) {
    int acc[4] = {MAGIC, MAGIC, 0, 0};
#pragma unroll
    for (int t = 0; t < D / 32; t++)
        mma_s8s8(acc, mu[2 * t], 0, mu[2 * t + 1], 0, q.b[2 * t], q.b[2 * t + 1]);
    return join(acc[0], acc[1]) * (q.scale * scale);
}

/* Halve the values by a shuffle: lanes with the bit keep the upper ones. */
template <int N> __device__ __forceinline__ void fold(float *x, uint32_t bit) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const bool up = threadIdx.x & bit;
        float send = up ? x[i] : x[i + N / 2], keep = up ? x[i + N / 2] : x[i];
        x[i] = keep + __shfl_xor_sync(LK_FULL_WARP, send, bit);
    }
}

/* Rank 2: four pages at a step of 8 k: pages l and l + 4, hi and lo of each, on the four pairs of
 * k. -> sum[j]: page lane / 4, query lane % 4. */
template <int D, int NG, int T>
__device__ __forceinline__ void sum_pairs(const struct records &rec, const uint8_t *coarse,
                                          const struct query<D> *q, float *ret) {
    const uint32_t lane = threadIdx.x % 32, r = lane >> 2, c = lane & 3, own = c ^ (r & 1);
    uint32_t w[2][D / 32], b[NG][4];
    float scale[2], sum[NG][TILE];

    load_basis<D, 2>(rec, coarse, coarse, 0, 1, w, scale);
#pragma unroll
    for (int j = 0; j < NG; j++) {
        uint32_t hi, lo;
        float x[2];
        project<D>(w, scale, q[j], x);
        split_projections(x, &hi, &lo);
        hi = __shfl_sync(LK_FULL_WARP, hi, lane ^ (r & 1));
        lo = __shfl_sync(LK_FULL_WARP, lo, lane ^ (r & 1) ^ 2);
#pragma unroll
        for (int l = 0; l < 4; l++)
            b[j][l] = own == l ? hi : own == (l ^ 2) ? lo : 0;
#pragma unroll
        for (int l = 0; l < TILE; l++)
            sum[j][l] = 0;
    }
#pragma unroll 1
    for (int m = 0; m < (T + 15) / 16; m++)
#pragma unroll
        for (int l = 0; l < 4; l++) {
            const uint8_t *at =
                coarse + (l + 4 * ((c ^ l) & 1)) * rec.coarse_stride + rec.coarse_coeffs;
            uint32_t a0, a1;
            unpack_coeffs(T < 16 ? *(const uint16_t *)(at + 2 * r) | 0x80800000u
                                 : *(const uint32_t *)(at + 32 * m + 4 * r),
                          &a0, &a1);
#pragma unroll
            for (int j = 0; j < NG; j++) {
                float z[4] = {0, 0, 0, 0};
                mma_f16_k8(z, a0, a1, b[j][l]);
                sum[j][l] += exp2_fast(z[0]);
                sum[j][l + 4] += exp2_fast(z[1]);
                if (T >= 16) {
                    sum[j][l] += exp2_fast(z[2]);
                    sum[j][l + 4] += exp2_fast(z[3]);
                }
            }
        }
#pragma unroll
    for (int j = 0; j < NG; j++) {
        fold<8>(sum[j], 16);
        fold<4>(sum[j], 8);
        fold<2>(sum[j], 4);
        ret[j] = sum[j][0];
    }
}

/* Rank 4 and more: half a tile at a time, its even pages, then its odd ones. */
template <int D, int R, int NG, int T>
__device__ __forceinline__ void sum_halves(const struct records &rec, const uint8_t *coarse,
                                           const uint8_t *fine, const struct query<D> *q,
                                           float *ret) {
    constexpr int PAGES = 16 / R; /* of a step */

#pragma unroll 1
    for (uint32_t half = 0; half < 2; half++) {
        float sum[NG][4];
#pragma unroll
        for (int s = 0; s < R / 4; s++) {
            uint32_t w[2][D / 32], hi[NG], lo[NG];
            float scale[2], x[2];
            load_basis<D, R>(rec, coarse, fine, 2 * s * PAGES + half, 2, w, scale);
#pragma unroll
            for (int j = 0; j < NG; j++) {
                project<D>(w, scale, q[j], x);
                make_b<R>(x, &hi[j], &lo[j]);
            }
#pragma unroll
            for (int p = 0; p < PAGES; p++) {
                const uint32_t page = 2 * (s * PAGES + p) + half;
                uint32_t a[4];
                page_coeffs<R>(rec, coarse + page * rec.coarse_stride,
                               fine + page * rec.fine_stride, p, 0, a);
#pragma unroll
                for (int j = 0; j < NG; j++) {
                    float z[2];
                    page_logits<R>(a, hi[j], lo[j], p, z);
                    sum[j][s * PAGES + p] = exp2_fast(z[0]) + (T < 16 ? 0.f : exp2_fast(z[1]));
                }
            }
        }
#pragma unroll
        for (int j = 0; j < NG; j++) {
            fold<4>(sum[j], 16);
            fold<2>(sum[j], 8);
            float x = sum[j][0] + __shfl_xor_sync(LK_FULL_WARP, sum[j][0], 4);
            ret[j] = (threadIdx.x >> 2 & 1) == half ? x : ret[j];
        }
    }
}

/* score[j]: page lane / 4 of the tile, query 4 j + lane % 4. -> false: a sum is out of range. */
template <int D, int R, int NG, int T>
__device__ __forceinline__ bool score_tile(const uint8_t *coarse, const struct query<D> *q,
                                           float *score) {
    constexpr struct records rec = fixed_records<D, R, T>();
    uint32_t mu[D / 16];
    float sum[NG], scale;
    bool fine = true;

    if constexpr (R == 2)
        sum_pairs<D, NG, T>(rec, coarse, q, sum);
    else
        sum_halves<D, R, NG, T>(rec, coarse, coarse + TILE * rec.coarse_stride, q, sum);
    load_centroid<D>(rec, coarse, mu, &scale);
#pragma unroll
    for (int j = 0; j < NG; j++) {
        score[j] = centroid_logit<D>(mu, scale, q[j]) + log2_fast(sum[j]);
        fine &= sum[j] < SUM_MOST;
    }
    return __all_sync(LK_FULL_WARP, fine);
}

/* The same for any record and four queries, each page's sum about its own maximum. */
template <int D, int R>
__device__ __noinline__ float score_careful(const struct records rec, const uint8_t *coarse,
                                            const struct four_queries<D> *queries) {
    constexpr int PAGES = 16 / R;
    const uint8_t *fine = coarse + TILE * rec.coarse_stride;
    const uint32_t r = threadIdx.x % 32 / 4, tiles = (rec.tokens + 15) / 16;
    const float second = rec.tokens < 16 ? 0.f : 1.f;
    struct query<D> q;
    uint32_t mu[D / 16];
    float mu_scale, own = 0;

    load_query<D>(queries, &q);
#pragma unroll 1
    for (uint32_t s = 0; s < R / 2; s++) {
        uint32_t w[2][D / 32], hi, lo;
        float scale[2], x[2];
        load_basis<D, R>(rec, coarse, fine, s * PAGES, 1, w, scale);
        project<D>(w, scale, q, x);
        make_b<R>(x, &hi, &lo);
#pragma unroll 1
        for (uint32_t p = 0; p < PAGES; p++) {
            const uint32_t page = s * PAGES + p;
            float top = 0, sum = 0;
            for (int round = 0; round < 2; round++) {
                for (uint32_t m = 0; m < tiles; m++) {
                    uint32_t a[4];
                    float z[2];
                    page_coeffs<R>(rec, coarse + page * rec.coarse_stride,
                                   fine + page * rec.fine_stride, p, m, a);
                    page_logits<R>(a, hi, lo, p, z);
                    if (round == 0)
                        top = fmaxf(top, fmaxf(z[0], z[1]));
                    else
                        sum += exp2_fast(z[0] - top) + second * exp2_fast(z[1] - top);
                }
                for (int o = 4; round == 0 && o < 32; o <<= 1)
                    top = fmaxf(top, __shfl_xor_sync(LK_FULL_WARP, top, o));
            }
            for (int o = 4; o < 32; o <<= 1)
                sum += __shfl_xor_sync(LK_FULL_WARP, sum, o);
            own = r == page ? top + log2_fast(sum) : own;
        }
    }
    load_centroid<D>(rec, coarse, mu, &mu_scale);
    return centroid_logit<D>(mu, mu_scale, q) + own;
}

#endif
