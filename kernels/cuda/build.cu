/* SPDX-License-Identifier: MIT */
/*
 * build.cu - summaries of complete pages of 32 and 64 tokens, and of superpages of as many (DESIGN
 * section 1, "Build"); smaller ones are built by build_pages.cu, larger ones by build_super.cu.
 *
 * Idea: the Gram matrix of the differences does not change under rotation, so keys stay as they are
 * and only the mean and the directions found are rotated. A page's keys become differences from its
 * first key, as floats in shared memory, then from their mean.
 *
 * Geometry: a page is the work of a warp. A lane holds a column of the Gram matrix in registers, at
 * 64 tokens two. One-sided Jacobi rotations make the columns of A V orthogonal: in round m lane l
 * meets lane l ^ m, so that every pair meets once a sweep with no data moved but by shuffles.
 * Columns end as eigenvalue x eigenvector.
 *
 * Of superpages only two directions are wanted. Those of 64 tokens: 32 steps of Lanczos, every
 * vector orthogonal to all before, then rotations on the 32 x 32 tridiagonal matrix. Smaller ones
 * are built as pages are.
 *
 * Keys are scaled by a power of two where their differences are far from 1. Every byte of a record
 * is written. Nothing here is on a step's critical path.
 */
#include "build_warp.cuh"

#define PAGES_MOST   8      /* of a block */
#define NEGLIGIBLE   1e-15f /* squared eigenvalue, relative to the largest */
#define REFINED_MOST 32     /* tokens of a page whose eigenvectors are refined */
#define GAP_LEAST    1e-6f  /* between eigenvalues, relative: closer ones stay as they are */
#define NO_WEIGHT    1e-13f /* squared eigenvalue, relative: far below what is kept, 1e-12 */
#define TURN_MOST    0.05f  /* a correction by more is none of the first order */
#define STEPS        32     /* of Lanczos */

/* Shared memory of one page. */
struct page_memory {
    float *x;      /* [n + 1][d + 4] differences, then in their place directions; last the mean */
    float *u;      /* [rank][n] coefficients, unit length */
    float *value;  /* [16] eigenvalues */
    float *gram;   /* [n][n] the Gram matrix, then [n][n] its eigenvectors as columns; of 64 tokens:
                      [STEPS][n] Lanczos vectors */
    uint8_t *code; /* the records, in the place of these two */
};

__host__ __device__ __forceinline__ uint32_t gram_floats(uint32_t n) {
    return n <= REFINED_MOST ? 2 * n * n : STEPS * n;
}

__host__ __device__ __forceinline__ uint32_t page_bytes(uint32_t n, uint32_t d, uint32_t rank,
                                                        uint32_t record) {
    const uint32_t last = gram_floats(n) * 4 > record ? gram_floats(n) * 4 : record;

    return ((n + 1) * (d + 4) + rank * n + LK_RANK_MAX) * 4 + last;
}

/* Differences from the mean to m.x, mean to its last row. -> max |K|; ret_unit: what differences
 * were multiplied by. */
template <int N>
__device__ float load_page(const struct build_args &a, const struct page_memory &m,
                           const struct build_job &job, uint32_t l, float *ret_unit) {
    const struct lk_geometry *g = &a.pool.geometry;
    const uint32_t d = g->head_dim, chunks = d / 8, stride = d + 4;
    const bool bf16 = g->dtype == LK_BF16;
    const uint64_t page = a.super ? LK_QUAD_PAGES * job.id : job.id;
    const uint16_t *origin =
        (const uint16_t *)lk_page_keys_device(a.pool, job.layer, page, job.head);
    float largest = 0, spread = 0, unit = 1.f;

    for (uint32_t i = l; i < N * chunks; i += 32) {
        uint32_t t = i / chunks, c = i % chunks * 8;
        const uint16_t *keys = (const uint16_t *)lk_page_keys_device(
            a.pool, job.layer, page + t / g->page_tokens, job.head);
        uint4 w = __ldcg((const uint4 *)(keys + t % g->page_tokens * d + c)),
              o = *(const uint4 *)(origin + c);
        const uint16_t *k = (const uint16_t *)&w, *k0 = (const uint16_t *)&o;
        float x[8];
#pragma unroll
        for (int e = 0; e < 8; e++) {
            float key = element(k[e], bf16);
            x[e] = key - element(k0[e], bf16);
            largest = fmaxf(largest, fabsf(key));
            spread = fmaxf(spread, fabsf(x[e]));
        }
        float4 *to = (float4 *)&m.x[t * stride + c];
        to[0] = make_float4(x[0], x[1], x[2], x[3]);
        to[1] = make_float4(x[4], x[5], x[6], x[7]);
    }
    largest = warp_max(largest);
    spread = warp_max(spread);
    if (spread > 0 && (spread > 1048576.f || spread < 1.f / 1048576.f))
        unit = exp2f(-(float)max(-126, min(126, ilogbf(spread))));
    __syncwarp();
    for (uint32_t c = l; c < d; c += 32) {
        float mean = 0;
#pragma unroll
        for (int t = 0; t < N; t++)
            mean += m.x[t * stride + c] * unit;
        mean /= N;
#pragma unroll
        for (int t = 0; t < N; t++)
            m.x[t * stride + c] = m.x[t * stride + c] * unit - mean;
        m.x[N * stride + c] = mean / unit + element(origin[c], bf16);
    }
    __syncwarp();
    *ret_unit = unit;
    return largest;
}

/* Rotations in float32 leave eigenvectors some 1e-6 off, and where eigenvalues are close 1e-4: the
 * codes of a direction then differ from the reference's. One step of perturbation theory in float64
 * against the Gram matrix itself repairs that. Column l of eigenvalue x eigenvector in col; those
 * of no weight become 0. */
template <int N>
__device__ void refine(const struct page_memory &m, uint32_t l, float norm, float col[N]) {
    const float most = warp_max(norm), unit = norm > NO_WEIGHT * most ? rsqrtf(norm) : 0.f;
    const float value = norm * unit; /* the eigenvalue */
    float *vectors = m.gram + N * N, change[N];
    double product[N], length = 0;

#pragma unroll
    for (int t = 0; t < N; t++) {
        col[t] *= unit;
        vectors[t * N + l] = col[t];
        change[t] = 0;
    }
    __syncwarp();
#pragma unroll
    for (int t = 0; t < N; t++) {
        product[t] = 0;
#pragma unroll
        for (int k = 0; k < N; k++)
            product[t] = fma((double)m.gram[t * N + k], (double)col[k], product[t]);
    }
#pragma unroll 1
    for (uint32_t i = 0; i < N; i++) {
        float gap = value - __shfl_sync(LK_FULL_WARP, value, i);
        double cross = 0, overlap = 0;
#pragma unroll
        for (int t = 0; t < N; t++) {
            double v = vectors[t * N + i];
            cross = fma(v, product[t], cross);
            overlap = fma(v, (double)col[t], overlap);
        }
        float turn = (float)(cross - (double)value * overlap) / gap;
        if (i == l || !(fabsf(gap) > GAP_LEAST * sqrtf(most)) || !(fabsf(turn) < TURN_MOST))
            continue;
#pragma unroll
        for (int t = 0; t < N; t++)
            change[t] = fmaf(turn, vectors[t * N + i], change[t]);
    }
#pragma unroll
    for (int t = 0; t < N; t++) {
        product[t] = (double)col[t] + (double)change[t];
        length = fma(product[t], product[t], length);
    }
    length = length > 0 ? (double)value * rsqrt(length) : 0;
#pragma unroll
    for (int t = 0; t < N; t++)
        col[t] = (float)(product[t] * length);
    __syncwarp();
}

/* One-sided Jacobi on column l of each lane. */
template <int N> __device__ __forceinline__ void turn_columns(uint32_t l, float col[N]) {
    for (int sweep = 0; sweep < SWEEPS_MOST; sweep++) {
        bool moved = false;
        float own = 0;
#pragma unroll
        for (int t = 0; t < N; t++)
            own = fmaf(col[t], col[t], own);
        const float floor = warp_max(own) * NEGLIGIBLE;
#pragma unroll 1
        for (uint32_t to = 1; to < N; to++) {
            const bool first = !(l & 1u << (31 - __clz(to))); /* the lower lane of the pair */
            float other[N], part[4] = {0, 0, 0, 0}, c, s;
#pragma unroll
            for (int t = 0; t < N; t++) {
                other[t] = __shfl_xor_sync(LK_FULL_WARP, col[t], to);
                part[t % 4] = fmaf(col[t], other[t], part[t % 4]);
            }
            const float product = (part[0] + part[1]) + (part[2] + part[3]);
            const float theirs = __shfl_xor_sync(LK_FULL_WARP, own, to);
            moved |=
                find_rotation(first ? own : theirs, first ? theirs : own, product, floor, &c, &s);
            s = first ? -s : s;
            own = fmaxf(fmaf(s / c, product, own), 0.f);
#pragma unroll
            for (int t = 0; t < N; t++)
                col[t] = fmaf(c, col[t], s * other[t]);
        }
        if (!__any_sync(LK_FULL_WARP, moved))
            break;
    }
}

/* The same where a lane has columns l and l + 32. */
template <int N> __device__ __forceinline__ void turn_pairs(uint32_t l, float col[2][N]) {
    constexpr int COLUMNS = 2;

    for (int sweep = 0; sweep < SWEEPS_MOST; sweep++) {
        bool moved = false;
        float norm[COLUMNS], floor = 0;
#pragma unroll
        for (int x = 0; x < COLUMNS; x++) {
            norm[x] = 0;
#pragma unroll
            for (int t = 0; t < N; t++)
                norm[x] = fmaf(col[x][t], col[x][t], norm[x]);
            floor = fmaxf(floor, norm[x]);
        }
        floor = warp_max(floor) * NEGLIGIBLE;
#pragma unroll 1
        for (uint32_t round = 1; round < N; round++) {
            const uint32_t to = round % 32;
            const bool cross = COLUMNS == 2 && round >= 32;
            float c[COLUMNS], s[COLUMNS];
#pragma unroll
            for (int x = 0; x < COLUMNS; x++) {
                float own = 0, product = 0;
#pragma unroll
                for (int t = 0; t < N; t++) {
                    float send = cross ? col[COLUMNS - 1 - x][t] : col[x][t];
                    product = fmaf(col[x][t], __shfl_xor_sync(LK_FULL_WARP, send, to), product);
                    own = fmaf(col[x][t], col[x][t], own);
                }
                norm[x] = own;
                c[x] = product;
            }
#pragma unroll
            for (int x = 0; x < COLUMNS; x++) {
                float send = cross ? norm[COLUMNS - 1 - x] : norm[x];
                float other = __shfl_xor_sync(LK_FULL_WARP, send, to);
                /* the first of the pair is the lower lane, or the lower column */
                bool first = cross ? x == 0 : !(l & 1u << (31 - __clz(to)));
                float product = c[x];
                moved |= find_rotation(first ? norm[x] : other, first ? other : norm[x], product,
                                       floor, &c[x], &s[x]);
                s[x] = first ? -s[x] : s[x];
            }
#pragma unroll
            for (int t = 0; t < N; t++) {
                float old[COLUMNS], other[COLUMNS];
#pragma unroll
                for (int x = 0; x < COLUMNS; x++)
                    old[x] = col[x][t];
#pragma unroll
                for (int x = 0; x < COLUMNS; x++)
                    other[x] =
                        __shfl_xor_sync(LK_FULL_WARP, cross ? old[COLUMNS - 1 - x] : old[x], to);
#pragma unroll
                for (int x = 0; x < COLUMNS; x++)
                    col[x][t] = fmaf(c[x], old[x], s[x] * other[x]);
            }
        }
        if (!__any_sync(LK_FULL_WARP, moved))
            break;
    }
}

/* Columns l (and l + 32) of the Gram matrix. */
template <int N, int COLUMNS>
__device__ __forceinline__ void find_gram(const struct page_memory &m, uint32_t d, uint32_t l,
                                          float col[COLUMNS][N]) {
    const uint32_t stride = d + 4;

#pragma unroll
    for (int x = 0; x < COLUMNS; x++)
#pragma unroll
        for (int t = 0; t < N; t++)
            col[x][t] = 0;
    for (uint32_t c = 0; c < d; c += 4) {
        float4 own[COLUMNS];
#pragma unroll
        for (int x = 0; x < COLUMNS; x++)
            own[x] = *(const float4 *)&m.x[(l + 32 * x) * stride + c];
#pragma unroll
        for (int t = 0; t < N; t++) {
            float4 o = *(const float4 *)&m.x[t * stride + c];
#pragma unroll
            for (int x = 0; x < COLUMNS; x++)
                col[x][t] =
                    fmaf(o.x, own[x].x,
                         fmaf(o.y, own[x].y, fmaf(o.z, own[x].z, fmaf(o.w, own[x].w, col[x][t]))));
        }
    }
}

/* Columns of the Gram matrix -> of eigenvalue x eigenvector. */
template <int N, int COLUMNS>
__device__ void diagonalise(const struct page_memory &m, uint32_t l, float col[COLUMNS][N]) {
    if constexpr (N <= REFINED_MOST)
#pragma unroll
        for (int t = 0; t < N; t++)
            m.gram[t * N + l] = col[0][t];
    if constexpr (COLUMNS == 1)
        turn_columns<N>(l, col[0]);
    else
        turn_pairs<N>(l, col);
    if constexpr (N <= REFINED_MOST) {
        float norm = 0;
#pragma unroll
        for (int t = 0; t < N; t++)
            norm = fmaf(col[0][t], col[0][t], norm);
        refine<N>(m, l, norm, col[0]);
    }
}

/* Unit eigenvectors of the largest `rank` eigenvalues to m.u, in descending order. */
template <int N, int COLUMNS>
__device__ void keep_best(const struct page_memory &m, uint32_t rank, uint32_t l,
                          const float col[COLUMNS][N]) {
    float norm[COLUMNS];
    uint32_t place[COLUMNS];

#pragma unroll
    for (int x = 0; x < COLUMNS; x++) {
        norm[x] = 0;
        place[x] = 0;
#pragma unroll
        for (int t = 0; t < N; t++)
            norm[x] = fmaf(col[x][t], col[x][t], norm[x]);
    }
    for (uint32_t o = 0; o < 32; o++)
#pragma unroll
        for (int y = 0; y < COLUMNS; y++) {
            float other = __shfl_sync(LK_FULL_WARP, norm[y], o);
#pragma unroll
            for (int x = 0; x < COLUMNS; x++)
                place[x] += other > norm[x] || (other == norm[x] && o + 32 * y < l + 32 * x);
        }
#pragma unroll
    for (int x = 0; x < COLUMNS; x++) {
        float top = 0, sign = 1.f, unit = norm[x] > 0 ? rsqrtf(norm[x]) : 0.f;
        if (place[x] >= rank)
            continue;
#pragma unroll
        for (int t = 0; t < N; t++)
            if (fabsf(col[x][t]) > top) {
                top = fabsf(col[x][t]);
                sign = copysignf(1.f, col[x][t]);
            }
        m.value[place[x]] = sqrtf(norm[x]);
#pragma unroll
        for (int t = 0; t < N; t++)
            m.u[place[x] * N + t] = col[x][t] * unit * sign;
    }
    __syncwarp();
}

/* ---- the two leading eigenvectors of 64 x 64 ---- */

/* w, two values a lane, made orthogonal to the first `count` vectors of q; eight at a time. */
template <int N>
__device__ __forceinline__ void orthogonalise(const float *q, uint32_t count, uint32_t l,
                                              float w[2]) {
    for (uint32_t first = 0; first < count; first += 8) {
        float x[8][2], part[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const bool in = first + i < count;
            x[i][0] = in ? q[(first + i) * N + l] : 0.f;
            x[i][1] = in ? q[(first + i) * N + l + 32] : 0.f;
            part[i] = fmaf(x[i][0], w[0], x[i][1] * w[1]);
        }
#pragma unroll
        for (int half = 4, bit = 16; half; half /= 2, bit /= 2)
#pragma unroll
            for (int i = 0; i < half; i++) {
                const bool up = l & bit;
                const float send = up ? part[i] : part[i + half],
                            keep = up ? part[i + half] : part[i];
                part[i] = keep + __shfl_xor_sync(LK_FULL_WARP, send, bit);
            }
        part[0] += __shfl_xor_sync(LK_FULL_WARP, part[0], 2);
        part[0] += __shfl_xor_sync(LK_FULL_WARP, part[0], 1);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float dot = __shfl_sync(LK_FULL_WARP, part[0], 4 * i);
            w[0] = fmaf(-dot, x[i][0], w[0]);
            w[1] = fmaf(-dot, x[i][1], w[1]);
        }
    }
}

/* A vector of no pattern, about of unit length. */
template <int N>
__device__ __forceinline__ void seed_vector(uint32_t seed, uint32_t l, float w[2]) {
#pragma unroll
    for (int x = 0; x < 2; x++) {
        uint32_t hash = (l + 32 * x + 1) * 2654435761u + seed * 2246822519u;
        hash = (hash ^ hash >> 15) * 3266489917u;
        w[x] = (hash ^ hash >> 13) & 1 ? rsqrtf((float)N) : -rsqrtf((float)N);
    }
}

/* STEPS steps of Lanczos, every vector orthogonal to all before (twice over) -> column l of the
 * tridiagonal matrix. Where the vectors found span an invariant space it goes on from a new one. */
template <int N>
__device__ __forceinline__ void tridiagonalise(float *q, uint32_t l, const float col[2][N],
                                               float t[STEPS]) {
    float w[2], size = 0, alpha = 0, beta = 0;

#pragma unroll
    for (int i = 0; i < N; i++)
        size = fmaxf(size, fmaxf(fabsf(col[0][i]), fabsf(col[1][i])));
    size = warp_max(size);
    seed_vector<N>(0, l, w);
#pragma unroll 1
    for (uint32_t j = 0; j < STEPS; j++) {
        float y[2] = {0, 0}, norm;
        bool fresh = false;
        q[j * N + l] = w[0];
        q[j * N + l + 32] = w[1];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const float4 v = *(const float4 *)&q[j * N + i];
#pragma unroll
            for (int x = 0; x < 2; x++)
                y[x] = fmaf(v.x, col[x][i],
                            fmaf(v.y, col[x][i + 1],
                                 fmaf(v.z, col[x][i + 2], fmaf(v.w, col[x][i + 3], y[x]))));
        }
        norm = warp_sum(fmaf(w[0], y[0], w[1] * y[1]));
        alpha = l == j ? norm : alpha;
        w[0] = y[0];
        w[1] = y[1];
        for (;;) {
            orthogonalise<N>(q, j + 1, l, w);
            orthogonalise<N>(q, j + 1, l, w);
            norm = sqrtf(warp_sum(fmaf(w[0], w[0], w[1] * w[1])));
            if (fresh || norm > 3e-6f * size)
                break;
            fresh = true;
            seed_vector<N>(j + 1, l, w);
        }
        beta = l == j ? (fresh ? 0.f : norm) : beta;
        w[0] *= 1.f / norm;
        w[1] *= 1.f / norm;
    }
    const float before = __shfl_up_sync(LK_FULL_WARP, beta, 1);
#pragma unroll
    for (int i = 0; i < STEPS; i++)
        t[i] = i == l ? alpha : i == l + 1 ? beta : i + 1 == l ? before : 0.f;
}

/* Unit eigenvectors of the two largest eigenvalues to m.u; columns l, l + 32 of the matrix. */
template <int N>
__device__ __forceinline__ void keep_leading(const struct page_memory &m, uint32_t l,
                                             const float col[2][N]) {
    float t[1][STEPS], u[2][2] = {};

    tridiagonalise<N>(m.gram, l, col, t[0]);
    turn_columns<STEPS>(l, t[0]);
    keep_best<STEPS, 1>(m, 2, l, t);
#pragma unroll 4
    for (uint32_t j = 0; j < STEPS; j++)
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int x = 0; x < 2; x++)
                u[k][x] = fmaf(m.u[k * STEPS + j], m.gram[j * N + l + 32 * x], u[k][x]);
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const float length = warp_sum(fmaf(u[k][0], u[k][0], u[k][1] * u[k][1]));
        const float unit = length > 0 ? rsqrtf(length) : 0.f;
        float top = fabsf(u[k][1]) > fabsf(u[k][0]) ? u[k][1] : u[k][0];
        uint32_t at = fabsf(u[k][1]) > fabsf(u[k][0]) ? l + 32 : l;
        for (int o = 16; o; o >>= 1) {
            const float other = __shfl_xor_sync(LK_FULL_WARP, top, o);
            const uint32_t there = __shfl_xor_sync(LK_FULL_WARP, at, o);
            if (fabsf(other) > fabsf(top) || (fabsf(other) == fabsf(top) && there < at))
                top = other, at = there;
        }
#pragma unroll
        for (int x = 0; x < 2; x++)
            m.u[k * N + l + 32 * x] = u[k][x] * copysignf(unit, top);
    }
    __syncwarp();
}

/* Directions v = differences^T u to rows 0.. of m.x, whose differences are no longer needed then;
 * their lengths. RANK: the largest rank it serves. */
template <int N, int RANK>
__device__ __forceinline__ void find_directions(const struct page_memory &m, uint32_t d,
                                                uint32_t rank, uint32_t l, float length[RANK]) {
    const uint32_t stride = d + 4;

#pragma unroll
    for (int i = 0; i < RANK; i++)
        length[i] = 0;
    for (uint32_t c = l; c < d; c += 32) {
        float sum[RANK];
#pragma unroll
        for (int i = 0; i < RANK; i++)
            sum[i] = 0;
#pragma unroll 2
        for (int t = 0; t < N; t += 4) {
            float x[4];
#pragma unroll
            for (int y = 0; y < 4; y++)
                x[y] = m.x[(t + y) * stride + c];
#pragma unroll
            for (int i = 0; i < RANK; i++)
                if (i < rank) {
                    float4 u = *(const float4 *)&m.u[i * N + t];
                    sum[i] =
                        fmaf(u.x, x[0], fmaf(u.y, x[1], fmaf(u.z, x[2], fmaf(u.w, x[3], sum[i]))));
                }
        }
#pragma unroll
        for (int i = 0; i < RANK; i++)
            if (i < rank) {
                m.x[i * stride + c] = sum[i];
                length[i] = fmaf(sum[i], sum[i], length[i]);
            }
    }
#pragma unroll
    for (int i = 0; i < RANK; i++)
        length[i] = sqrtf(warp_sum(length[i]));
    __syncwarp();
}

/* A page's records in m.code, one after the other. `unit`: what differences were multiplied by;
 * dead: they are none beside the keys. */
template <int N, int RANK>
__device__ __forceinline__ void
write_records(const struct page_memory &m, const struct lk_record &coarse,
              const struct lk_record &fine, uint32_t bytes, uint32_t rank, bool dead, float unit,
              const float length[RANK], uint32_t l) {
    const uint32_t d = coarse.head_dim, stride = d + 4;

    for (uint32_t i = 0; i <= rank; i++)
        rotate(m.x + (i < rank ? i : N) * stride, d, l);
    for (uint32_t i = l * 4; i < bytes; i += 32 * 4)
        *(uint32_t *)(m.code + i) = 0;
    __syncwarp();
    write_centroid(m.code, coarse, m.x + N * stride, l);
#pragma unroll
    for (int i = 0; i < RANK; i++) {
        if (i >= rank)
            break;
        const bool live = !dead && m.value[i] > 1e-6f * m.value[0];
        for (uint32_t c = l; c < d; c += 32)
            m.x[i * stride + c] *= live ? 1.f / length[i] : 0.f;
        __syncwarp();
        write_direction(i < 2 ? m.code : m.code + coarse.stride, i < 2 ? coarse : fine,
                        i < 2 ? i : i - 2, m.x + i * stride, m.u + i * N,
                        live ? length[i] / unit : 0.f, l);
    }
    __syncwarp();
}

__device__ __forceinline__ void copy_record(uint8_t *to, const uint8_t *from, uint32_t bytes,
                                            uint32_t l) {
    for (uint32_t i = l * 16; i < bytes; i += 32 * 16)
        *(uint4 *)(to + i) = *(const uint4 *)(from + i);
}

template <int N, int RANK>
__global__ void __launch_bounds__(256, 1)
    build_kernel(const __grid_constant__ struct build_args a, uint32_t bytes) {
    constexpr int COLUMNS = N / 32;
    SHARED_BYTES(memory, 16);
    const struct lk_geometry *g = &a.pool.geometry;
    const uint32_t l = threadIdx.x % 32, local = threadIdx.x / 32, d = g->head_dim,
                   rank = a.super ? LK_COARSE_RANK : g->rank, block_warps = blockDim.x / 32;
    const uint64_t tasks = (uint64_t)a.count * g->kv_heads;
    const struct lk_record coarse = a.super ? lk_record_super(g) : lk_record_coarse(g);
    const struct lk_record fine = lk_record_fine(g);
    struct page_memory m;

    m.x = (float *)(memory + (uint64_t)local * bytes);
    m.u = m.x + (N + 1) * (d + 4);
    m.value = m.u + rank * N;
    m.gram = m.value + LK_RANK_MAX;
    m.code = (uint8_t *)m.gram;
    wait_for_previous();
    for (uint64_t task = blockIdx.x * block_warps + local; task < tasks;
         task += gridDim.x * block_warps) {
        const struct build_job job = job_of(a, task);
        float unit, length[RANK], col[COLUMNS][N];
        const float largest = load_page<N>(a, m, job, l, &unit);

        find_gram<N, COLUMNS>(m, d, l, col);
        if constexpr (N == 64 && RANK == LK_COARSE_RANK) {
            keep_leading<N>(m, l, col);
        } else {
            diagonalise<N, COLUMNS>(m, l, col);
            keep_best<N, COLUMNS>(m, rank, l, col);
        }
        find_directions<N, RANK>(m, d, rank, l, length);
        const bool dead = length[0] / unit <= 1e-6f * largest * sqrtf((float)d * N);
        write_records<N, RANK>(m, coarse, fine, coarse.stride + (a.super ? 0 : fine.stride), rank,
                               dead, unit, length, l);
        copy_record(a.super ? super_of(a, job, coarse) : coarse_of(a, job, coarse), m.code,
                    coarse.stride, l);
        if (!a.super)
            copy_record(fine_of(a, job, fine), m.code + coarse.stride, fine.stride, l);
        __syncwarp();
    }
}

/* ---- launchers ---- */

/* A part: a page and its warp. `n`: its tokens. */
static struct lk_shared shared_of(const struct lk_geometry &g, uint32_t n, uint32_t super) {
    const uint32_t rank = super ? LK_COARSE_RANK : g.rank,
                   record = super ? lk_record_super(&g).stride
                                  : lk_record_coarse(&g).stride + lk_record_fine(&g).stride;

    return {0, page_bytes(n, g.head_dim, rank, record), PAGES_MOST};
}

template <int N, int RANK> static int launch_rank(const struct build_args &a, void *stream) {
    const struct lk_shared s = shared_of(a.pool.geometry, N, a.super);
    const uint64_t tasks = (uint64_t)a.count * a.pool.geometry.kv_heads;
    uint32_t warps;
    int error = take_shared(build_kernel<N, RANK>, s, &warps);

    if (error)
        return error;
    const uint64_t blocks = (tasks + warps - 1) / warps;
    return launch(build_kernel<N, RANK>, dim3(blocks < 2048 ? blocks : 2048), 32 * warps,
                  warps * s.each, stream, a, s.each);
}

template <int N> static int launch_build(const struct build_args &a, void *stream) {
    constexpr int MOST = N < LK_RANK_MAX ? 8 : LK_RANK_MAX;
    const uint32_t rank = a.super ? LK_COARSE_RANK : a.pool.geometry.rank;

    return rank <= 2   ? launch_rank<N, 2>(a, stream)
           : rank <= 8 ? launch_rank<N, 8>(a, stream)
                       : launch_rank<N, MOST>(a, stream);
}

static int build(const struct lk_cuda_build *b, uint32_t super, void *stream) {
    const struct build_args a = {b->pool, b->list, b->count, super};

    if (!b->count)
        return 0;
    switch ((super ? LK_QUAD_PAGES : 1) * b->pool.geometry.page_tokens) {
    case 8:
    case 16:
        return lk_cuda_build_small(b, stream);
    case 32:
        return launch_build<32>(a, stream);
    case 64:
        return launch_build<64>(a, stream);
    }
    return lk_cuda_build_super(b, stream);
}

int lk_cuda_build_pages(const struct lk_cuda_build *b, void *stream) {
    return build(b, 0, stream);
}

int lk_cuda_build_supers(const struct lk_cuda_build *b, void *stream) {
    return build(b, 1, stream);
}

static uint32_t least_of(const struct lk_geometry *g, uint32_t super) {
    const uint32_t n = (super ? LK_QUAD_PAGES : 1) * g->page_tokens;

    return n <= 16   ? lk_cuda_build_small_least()
           : n <= 64 ? shared_least(shared_of(*g, n, super))
                     : lk_cuda_build_super_least(g);
}

uint32_t lk_cuda_build_least(const struct lk_geometry *g) {
    return max(least_of(g, 0), least_of(g, 1));
}
