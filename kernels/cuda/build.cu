/* SPDX-License-Identifier: MIT */
/*
 * build.cu - summaries of complete pages of 32 and 64 tokens, and of superpages (DESIGN section 1,
 * "Build"); smaller pages are built by build_pages.cu.
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
 * are built as pages are; larger ones by orthogonal iteration on eight vectors, a block each, keys
 * kept as 16 bits in shared memory.
 *
 * Keys are scaled by a power of two where their differences are far from 1. Every byte of a record
 * is written. Nothing here is on a step's critical path.
 */
#include "build.cuh"

#define SWEEPS_MOST   16
#define PAGES_MOST    8      /* of a block */
#define ORTHOGONAL    1e-6f  /* cosine at which two columns count as orthogonal */
#define NEGLIGIBLE    1e-15f /* squared eigenvalue, relative to the largest */
#define SUPER_THREADS 256
#define REFINED_MOST  32     /* tokens of a page whose eigenvectors are refined */
#define GAP_LEAST     1e-6f  /* between eigenvalues, relative: closer ones stay as they are */
#define NO_WEIGHT     1e-13f /* squared eigenvalue, relative: far below what is kept, 1e-12 */
#define TURN_MOST     0.05f  /* a correction by more is none of the first order */
#define VECTORS       8
#define STEPS         32 /* of Lanczos */
#define ROUNDS_MOST   48

struct build_args {
    struct lk_pool_view pool;
    const uint64_t *list;
    uint32_t count, super;
};

/* Rotation for one-sided Jacobi: columns a and b with squared norms and product -> c, s. */
__device__ __forceinline__ bool find_rotation(float aa, float bb, float ab, float floor, float *c,
                                              float *s) {
    *c = 1.f;
    *s = 0.f;
    if (fminf(aa, bb) <= floor || fabsf(ab) <= ORTHOGONAL * sqrtf(aa) * sqrtf(bb))
        return false;
    float zeta = (bb - aa) / (2.f * ab);
    float t = copysignf(1.f, zeta) / (fabsf(zeta) + sqrtf(fmaf(zeta, zeta, 1.f)));
    *c = rsqrtf(fmaf(t, t, 1.f));
    *s = *c * t;
    return true;
}

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

/* Of LANES lanes beside each other. */
template <int LANES> __device__ __forceinline__ float group_max(float x) {
#pragma unroll
    for (int o = LANES / 2; o; o >>= 1)
        x = fmaxf(x, __shfl_xor_sync(LK_FULL_WARP, x, o));
    return x;
}

/* Rotate v [d] by the block-diagonal Hadamard matrix: four values at a time, two levels at once. */
__device__ __forceinline__ void rotate(float *v, uint32_t d, uint32_t l) {
    const uint32_t block = d & -d;
    const float norm = rsqrtf((float)block);
    uint32_t o = 1;

    for (; 4 * o <= block; o *= 4) {
        const float scale = 4 * o == block ? norm : 1.f;
        __syncwarp();
        for (uint32_t i = l; i < d / 4; i += 32) {
            float *at = v + ((i & ~(o - 1)) << 2 | (i & (o - 1)));
            const float a = at[0], b = at[o], c = at[2 * o], e = at[3 * o];
            at[0] = ((a + b) + (c + e)) * scale;
            at[o] = ((a - b) + (c - e)) * scale;
            at[2 * o] = ((a + b) - (c + e)) * scale;
            at[3 * o] = ((a - b) - (c - e)) * scale;
        }
    }
    __syncwarp();
    for (uint32_t i = l; o < block && i < d / 2; i += 32) {
        float *at = v + ((i & ~(o - 1)) << 1 | (i & (o - 1)));
        const float a = at[0], b = at[o];
        at[0] = (a + b) * norm;
        at[o] = (a - b) * norm;
    }
    __syncwarp();
}

/* Differences from the mean to m.x, mean to its last row. -> max |K|; ret_unit: what differences
 * were multiplied by. */
template <int N>
__device__ float load_page(const struct build_args &a, const struct page_memory &m, uint32_t layer,
                           uint64_t page, uint32_t head, uint32_t l, float *ret_unit) {
    const struct lk_geometry *g = &a.pool.geometry;
    const uint32_t d = g->head_dim, chunks = d / 8, stride = d + 4;
    const bool bf16 = g->dtype == LK_BF16;
    const uint16_t *origin = (const uint16_t *)lk_page_keys_device(a.pool, layer, page, head);
    float largest = 0, spread = 0, unit = 1.f;

    for (uint32_t i = l; i < N * chunks; i += 32) {
        uint32_t t = i / chunks, c = i % chunks * 8;
        const uint16_t *keys =
            (const uint16_t *)lk_page_keys_device(a.pool, layer, page + t / g->page_tokens, head);
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

/* One direction: v [d] of unit length and rotated, coefficients u * length -> codes and scale. */
__device__ void write_direction(uint8_t *record, const struct lk_record &r, uint32_t slot,
                                const float *v, const float *u, float length, uint32_t l) {
    float v_most = 0, u_most = 0, b, scale, step;
    const uint32_t d = r.head_dim, n = r.tokens;

    for (uint32_t c = l; c < d; c += 32)
        v_most = fmaxf(v_most, fabsf(v[c]));
    for (uint32_t t = l; t < n; t += 32)
        u_most = fmaxf(u_most, fabsf(u[t]));
    v_most = warp_max(v_most);
    u_most = warp_max(u_most) * length;
    b = length > 0 ? v_most / 7.f : 0.f;
    uint16_t bits = b > 0 ? bf16_up(u_most / 127.f * b) : 0;
    scale = bf16_float(bits);
    step = b > 0 ? scale / b : 0.f;
    const float times = 1.f / b, unit = length / step;
    for (uint32_t y = l; y < d / 2; y += 32) {
        int low = 8, high = 8;
        if (b > 0) {
            low += max(-7, min(7, __float2int_rn(v[lk_basis_channel(d, y, 0)] * times)));
            high += max(-7, min(7, __float2int_rn(v[lk_basis_channel(d, y, 1)] * times)));
        }
        record[r.basis + slot * d / 2 + y] = (uint8_t)(low | high << 4);
    }
    for (uint32_t t = l; t < n; t += 32) {
        int code = step > 0 ? max(-127, min(127, __float2int_rn(u[t] * unit))) : 0;
        record[r.coeffs + lk_coeff_place(n, slot, t)] = (uint8_t)(code + 128);
    }
    if (l == 0)
        *(uint16_t *)(record + r.scales + 2 * (slot + (r.centroid ? 1 : 0))) = bits;
}

__device__ void write_centroid(uint8_t *record, const struct lk_record &r, const float *mean,
                               uint32_t l) {
    float most = 0, scale;

    for (uint32_t c = l; c < r.head_dim; c += 32)
        most = fmaxf(most, fabsf(mean[c]));
    uint16_t bits = bf16_up(warp_max(most) / 127.f);
    scale = bf16_float(bits);
    for (uint32_t c = l; c < r.head_dim; c += 32) {
        int code = scale > 0 ? max(-127, min(127, __float2int_rn(mean[c] / scale))) : 0;
        record[r.centroid + lk_centroid_place(r.head_dim, c)] = (uint8_t)code;
    }
    if (l == 0)
        *(uint16_t *)(record + r.scales) = bits;
}

/* RANK: the largest rank it serves. */
template <int N, int RANK>
__global__ void __launch_bounds__(256, 1)
    build_kernel(const __grid_constant__ struct build_args a, uint32_t bytes) {
    constexpr int COLUMNS = N / 32;
    SHARED_BYTES(memory, 16);
    const struct lk_geometry *g = &a.pool.geometry;
    const uint32_t l = threadIdx.x % 32, d = g->head_dim, stride = d + 4,
                   rank = a.super ? LK_COARSE_RANK : g->rank;
    const uint32_t warps = gridDim.x * (blockDim.x / 32), local = threadIdx.x / 32;
    const uint32_t warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const uint64_t tasks = (uint64_t)a.count * g->kv_heads;
    const struct lk_record coarse = a.super ? lk_record_super(g) : lk_record_coarse(g);
    const struct lk_record fine = lk_record_fine(g);
    struct page_memory m;

    m.x = (float *)(memory + (uint64_t)local * bytes);
    m.u = m.x + (N + 1) * stride;
    m.value = m.u + rank * N;
    m.gram = m.value + LK_RANK_MAX;
    m.code = (uint8_t *)m.gram;
    wait_for_previous();
    for (uint64_t task = warp; task < tasks; task += warps) {
        const uint64_t item = a.list[task / g->kv_heads], id = item & 0xffffffffffffull;
        const uint32_t layer = (uint32_t)(item >> 48), head = (uint32_t)(task % g->kv_heads);
        const uint64_t plane = (uint64_t)layer * g->kv_heads + head;
        float unit, length[RANK], col[COLUMNS][N];
        float largest = load_page<N>(a, m, layer, a.super ? 4 * id : id, head, l, &unit);

        find_gram<N, COLUMNS>(m, d, l, col);
        if constexpr (N == 64 && RANK == LK_COARSE_RANK) {
            keep_leading<N>(m, l, col);
        } else {
            diagonalise<N, COLUMNS>(m, l, col);
            keep_best<N, COLUMNS>(m, rank, l, col);
        }
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
                        sum[i] = fmaf(u.x, x[0],
                                      fmaf(u.y, x[1], fmaf(u.z, x[2], fmaf(u.w, x[3], sum[i]))));
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
        const bool dead = length[0] / unit <= 1e-6f * largest * sqrtf((float)d * N);
        __syncwarp();
        for (uint32_t i = 0; i <= rank; i++)
            rotate(m.x + (i < rank ? i : N) * stride, d, l);
        for (uint32_t i = l * 4; i < coarse.stride + (a.super ? 0 : fine.stride); i += 32 * 4)
            *(uint32_t *)(m.code + i) = 0;
        __syncwarp();
        write_centroid(m.code, coarse, m.x + N * stride, l);
#pragma unroll
        for (int i = 0; i < RANK; i++) {
            if (i >= rank)
                break;
            bool live = !dead && m.value[i] > 1e-6f * m.value[0];
            for (uint32_t c = l; c < d; c += 32)
                m.x[i * stride + c] *= live ? 1.f / length[i] : 0.f;
            __syncwarp();
            write_direction(i < 2 ? m.code : m.code + coarse.stride, i < 2 ? coarse : fine,
                            i < 2 ? i : i - 2, m.x + i * stride, m.u + i * N,
                            live ? length[i] / unit : 0.f, l);
        }
        __syncwarp();
        uint8_t *to = a.super ? a.pool.super + (plane * (a.pool.pages / 4) + id) * coarse.stride
                              : a.pool.coarse + (plane * a.pool.pages + id) * coarse.stride;
        for (uint32_t i = l * 16; i < coarse.stride; i += 32 * 16)
            *(uint4 *)(to + i) = *(uint4 *)(m.code + i);
        to = a.pool.fine + (plane * a.pool.pages + id) * fine.stride;
        for (uint32_t i = l * 16; !a.super && i < fine.stride; i += 32 * 16)
            *(uint4 *)(to + i) = *(uint4 *)(m.code + coarse.stride + i);
        __syncwarp();
    }
}

/* ---- superpages of more than 64 tokens ---- */

struct super_memory {
    float shift[LK_HEAD_DIM_MAX];             /* the mean */
    float x[LK_HEAD_DIM_MAX][VECTORS];        /* orthonormal */
    float t[4 * LK_PAGE_TOKENS_MAX][VECTORS]; /* differences x vectors */
    float y[LK_HEAD_DIM_MAX][VECTORS];
    float small[VECTORS][VECTORS], turn[VECTORS][VECTORS];
    float v[LK_COARSE_RANK + 1][LK_HEAD_DIM_MAX], u[LK_COARSE_RANK][4 * LK_PAGE_TOKENS_MAX];
    float warp[SUPER_THREADS / 32];
    float change, length[2];
    uint32_t code[(LK_HEAD_DIM_MAX * 2 + 8 * LK_PAGE_TOKENS_MAX * 2 + 16) / 4];
    uint16_t keys[1]; /* [n][d + 2] */
};

__device__ float block_max(struct super_memory *m, float x) {
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        m->warp[threadIdx.x / 32] = x;
    __syncthreads();
    for (int i = 0; i < SUPER_THREADS / 32; i++)
        x = fmaxf(x, m->warp[i]);
    return x;
}

/* Eigenvectors of the symmetric m->small: columns of m->turn, eigenvalue x vector, descending. */
__device__ void small_eigen(struct super_memory *m) {
    __syncthreads();
    if (threadIdx.x < 32) {
        const uint32_t l = threadIdx.x % VECTORS;
        float col[1][VECTORS], floor = 0, norm = 0;
        uint32_t place = 0;
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            col[0][i] = m->small[i][l];
        for (int sweep = 0; sweep < SWEEPS_MOST; sweep++) {
            bool moved = false;
            for (uint32_t to = 1; to < VECTORS; to++) {
                float other[VECTORS], own = 0, product = 0, c, s;
                bool first = !(l & (1u << (31 - __clz(to))));
#pragma unroll
                for (int i = 0; i < VECTORS; i++) {
                    other[i] = __shfl_xor_sync(LK_FULL_WARP, col[0][i], to);
                    own = fmaf(col[0][i], col[0][i], own);
                    product = fmaf(col[0][i], other[i], product);
                }
                floor = fmaxf(floor, own);
                float theirs = __shfl_xor_sync(LK_FULL_WARP, own, to);
                moved |= find_rotation(first ? own : theirs, first ? theirs : own, product,
                                       group_max<VECTORS>(floor) * 1e-14f, &c, &s);
                s = first ? -s : s;
#pragma unroll
                for (int i = 0; i < VECTORS; i++)
                    col[0][i] = fmaf(c, col[0][i], s * other[i]);
            }
            if (!__any_sync(LK_FULL_WARP, moved))
                break;
        }
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            norm = fmaf(col[0][i], col[0][i], norm);
        for (uint32_t o = 0; o < VECTORS; o++) {
            float other = __shfl_sync(LK_FULL_WARP, norm, o);
            place += other > norm || (other == norm && o < l);
        }
        if (threadIdx.x < VECTORS)
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
                m->turn[i][place] = col[0][i];
    }
    __syncthreads();
}

__global__ void __launch_bounds__(SUPER_THREADS)
    build_large(const __grid_constant__ struct build_args a) {
    SHARED_BYTES(memory, 16);
    struct super_memory *m = (struct super_memory *)memory;
    const struct lk_geometry *g = &a.pool.geometry;
    const uint32_t d = g->head_dim, n = 4 * g->page_tokens, stride = d + 2, tid = threadIdx.x;
    const bool bf16 = g->dtype == LK_BF16;
    const struct lk_record record = lk_record_super(g);

    wait_for_previous();
    for (uint64_t task = blockIdx.x; task < (uint64_t)a.count * g->kv_heads; task += gridDim.x) {
        const uint64_t item = a.list[task / g->kv_heads], id = item & 0xffffffffffffull;
        const uint32_t layer = (uint32_t)(item >> 48), head = (uint32_t)(task % g->kv_heads);
        float largest = 0, spread = 0, unit = 1.f;
        auto diff = [&](uint32_t t, uint32_t c) {
            return (element(m->keys[t * stride + c], bf16) - m->shift[c]) * unit;
        };

        __syncthreads();
        for (uint32_t i = tid; i < n * d; i += SUPER_THREADS) {
            uint32_t t = i / d, c = i % d;
            const uint16_t *keys = (const uint16_t *)lk_page_keys_device(
                a.pool, layer, 4 * id + t / g->page_tokens, head);
            uint16_t k = keys[t % g->page_tokens * d + c];
            m->keys[t * stride + c] = k;
            largest = fmaxf(largest, fabsf(element(k, bf16)));
        }
        largest = block_max(m, largest);
        for (uint32_t c = tid; c < d; c += SUPER_THREADS) {
            float origin = element(m->keys[c], bf16), sum = 0;
            for (uint32_t t = 1; t < n; t++) {
                float x = element(m->keys[t * stride + c], bf16) - origin;
                sum += x / n;
                spread = fmaxf(spread, fabsf(x));
            }
            m->shift[c] = origin + sum;
            for (int k = 0; k < VECTORS; k++) { /* signs of no pattern */
                uint32_t hash = (c * VECTORS + k + 1) * 2654435761u;
                m->x[c][k] = (hash ^ hash >> 15) * 2246822519u >> 31 ? 1.f : -1.f;
            }
        }
        spread = block_max(m, spread);
        if (spread > 0 && (spread > 1024.f || spread < 1.f / 1024.f))
            unit = exp2f(-(float)max(-126, min(126, ilogbf(spread))));
        for (int round = 0; round < ROUNDS_MOST; round++) {
            __syncthreads();
            for (uint32_t o = tid; o < n * VECTORS; o += SUPER_THREADS) {
                uint32_t t = o / VECTORS, k = o % VECTORS;
                float sum = 0;
                for (uint32_t c = 0; c < d; c++)
                    sum = fmaf(diff(t, c), m->x[c][k], sum);
                m->t[t][k] = sum;
            }
            __syncthreads();
            if (tid < VECTORS * VECTORS) { /* vectors that stand for the largest first */
                float sum = 0;
                for (uint32_t t = 0; t < n; t++)
                    sum = fmaf(m->t[t][tid / VECTORS], m->t[t][tid % VECTORS], sum);
                m->small[tid / VECTORS][tid % VECTORS] = sum;
            }
            small_eigen(m);
            for (uint32_t i = tid; i < n + d; i += SUPER_THREADS) {
                float *row = i < n ? m->t[i] : m->x[i - n], old[VECTORS];
                for (int k = 0; k < VECTORS; k++)
                    old[k] = row[k];
                for (int k = 0; k < VECTORS; k++) {
                    float sum = 0, norm = 0;
                    for (int j = 0; j < VECTORS; j++) {
                        sum = fmaf(old[j], m->turn[j][k], sum);
                        norm = fmaf(m->turn[j][k], m->turn[j][k], norm);
                    }
                    row[k] = norm > 0 ? sum * rsqrtf(norm) : 0.f;
                }
            }
            __syncthreads();
            for (uint32_t o = tid; o < d * VECTORS; o += SUPER_THREADS) {
                uint32_t c = o / VECTORS, k = o % VECTORS;
                float sum = 0;
                for (uint32_t t = 0; t < n; t++)
                    sum = fmaf(diff(t, c), m->t[t][k], sum);
                m->y[c][k] = sum;
            }
            __syncthreads();
            if (tid < VECTORS * VECTORS) {
                float sum = 0;
                for (uint32_t c = 0; c < d; c++)
                    sum = fmaf(m->y[c][tid / VECTORS], m->y[c][tid % VECTORS], sum);
                m->small[tid / VECTORS][tid % VECTORS] = sum;
            }
            __syncthreads();
            /* Orthonormal again, by Gram-Schmidt on the small matrix's factor, largest first. */
            if (tid == 0) {
                float l[VECTORS][VECTORS], norm0 = m->small[0][0];
                for (int i = 0; i < VECTORS; i++)
                    for (int j = 0; j <= i; j++) {
                        float s = m->small[i][j];
                        for (int k = 0; k < j; k++)
                            s -= l[i][k] * l[j][k];
                        if (i == j)
                            l[i][i] =
                                s > 1e-6f * m->small[i][i] && s > 1e-30f * norm0 ? sqrtf(s) : 0.f;
                        else
                            l[i][j] = l[j][j] > 0 ? s / l[j][j] : 0.f;
                    }
                for (int i = 0; i < VECTORS; i++)
                    for (int j = 0; j < VECTORS; j++)
                        m->turn[i][j] = j <= i ? l[i][j] : 0.f;
            }
            __syncthreads();
            float change = 0;
            for (uint32_t c = tid; c < d; c += SUPER_THREADS) {
                float next[VECTORS];
                for (int i = 0; i < VECTORS; i++) { /* rows of L^-1 y */
                    float s = m->y[c][i];
                    for (int k = 0; k < i; k++)
                        s -= m->turn[i][k] * next[k];
                    next[i] = m->turn[i][i] > 0 ? s / m->turn[i][i] : 0.f;
                }
                for (int i = 0; i < 2; i++)
                    change = fmaxf(change, fabsf(next[i] - m->x[c][i]));
                for (int i = 0; i < VECTORS; i++)
                    m->x[c][i] = next[i];
            }
            if (block_max(m, change) < 1e-5f)
                break;
        }
        __syncthreads();
        for (uint32_t o = tid; o < n * 2; o += SUPER_THREADS) {
            float sum = 0;
            for (uint32_t c = 0; c < d; c++)
                sum = fmaf(diff(o / 2, c), m->x[c][o % 2], sum);
            m->u[o % 2][o / 2] = sum;
        }
        for (uint32_t i = tid; i < record.stride / 4; i += SUPER_THREADS)
            m->code[i] = 0;
        for (uint32_t c = tid; c < d; c += SUPER_THREADS) {
            m->v[0][c] = m->x[c][0];
            m->v[1][c] = m->x[c][1];
            m->v[2][c] = m->shift[c];
        }
        __syncthreads();
        if (tid < 32) {
            float length[2], sign[2];
            for (int i = 0; i < 2; i++) {
                float sum = 0, top = 0;
                for (uint32_t t = tid; t < n; t += 32) {
                    sum = fmaf(m->u[i][t], m->u[i][t], sum);
                    top = fabsf(m->u[i][t]) > fabsf(top) ? m->u[i][t] : top;
                }
                for (int o = 16; o; o >>= 1) {
                    float other = __shfl_xor_sync(LK_FULL_WARP, top, o);
                    top = fabsf(other) > fabsf(top) || (fabsf(other) == fabsf(top) && tid & o)
                              ? other
                              : top;
                }
                length[i] = sqrtf(warp_sum(sum));
                sign[i] = copysignf(1.f, __shfl_sync(LK_FULL_WARP, top, 0));
            }
            for (int i = 0; i <= LK_COARSE_RANK; i++)
                rotate(m->v[i], d, tid);
            write_centroid((uint8_t *)m->code, record, m->v[2], tid);
            bool dead = length[0] / unit <= 1e-6f * largest * sqrtf((float)d * n);
            for (int i = 0; i < 2; i++) {
                bool live = !dead && length[i] > 1e-3f * length[0];
                float whole = live ? sign[i] / length[i] : 0.f;
                for (uint32_t c = tid; c < d; c += 32)
                    m->v[i][c] = live ? m->v[i][c] * sign[i] : 0.f;
                for (uint32_t t = tid; t < n; t += 32)
                    m->u[i][t] *= whole;
                __syncwarp();
                write_direction((uint8_t *)m->code, record, i, m->v[i], m->u[i],
                                live ? length[i] / unit : 0.f, tid);
            }
        }
        __syncthreads();
        uint8_t *to =
            a.pool.super +
            (((uint64_t)layer * g->kv_heads + head) * (a.pool.pages / 4) + id) * record.stride;
        for (uint32_t i = tid; i < record.stride / 4; i += SUPER_THREADS)
            ((uint32_t *)to)[i] = m->code[i];
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

static uint32_t large_bytes(const struct lk_geometry &g) {
    return sizeof(struct super_memory) + LK_QUAD_PAGES * g.page_tokens * (g.head_dim + 2) * 2;
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
    const uint32_t rank = a.super ? LK_COARSE_RANK : a.pool.geometry.rank;

    return rank <= 2   ? launch_rank<N, 2>(a, stream)
           : rank <= 8 ? launch_rank<N, 8>(a, stream)
                       : launch_rank < N,
           N < LK_RANK_MAX ? 8 : LK_RANK_MAX > (a, stream);
}

static int launch_large(const struct build_args &a, void *stream) {
    const uint32_t tasks = a.count * a.pool.geometry.kv_heads, bytes = large_bytes(a.pool.geometry);
    int error = take_bytes(build_large, bytes);

    return error ? error
                 : launch(build_large, dim3(tasks < 1056 ? tasks : 1056), SUPER_THREADS, bytes,
                          stream, a);
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
    return launch_large(a, stream);
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
                     : large_bytes(*g);
}

uint32_t lk_cuda_build_least(const struct lk_geometry *g) {
    return max(least_of(g, 0), least_of(g, 1));
}
