/* SPDX-License-Identifier: MIT */
/*
 * build_pages.cu - summaries of complete pages of 8 and 16 tokens (DESIGN section 1, "Build").
 *
 * Idea: what an eigenproblem of 16 x 16 costs is mostly that lanes wait for each other. So a block
 * takes up to 32 pages and works in three phases:
 *   - a page a warp: the Gram matrix, on tensor cores
 *   - a page a lane: Householder to tridiagonal form, then implicit QL; no lane needs another. All
 *     warps have the same pages: each finds all eigenvalues, and turns four rows of the columns
 *   - a page a warp: directions on tensor cores, rotation, codes, records
 * The keys are read twice; they are a small part of the time.
 *
 * Tokens are first turned by a Walsh matrix, +-1 x a power of two: one product of 16 bits. Its row
 * 0 is the mean; without it the differences from the mean are left, and the Gram matrix has one row
 * less. Nothing cancels: a constant offset of a channel is in row 0 alone.
 *
 * Exactness: matrix, reflections and the recurrence of QL are float64, as what they are off by is
 * divided by the gap between eigenvalues. Eigenvectors are float32. Directions are sums of the keys
 * themselves, coefficients in three parts of 16 bits; the power of two that keeps their squares in
 * range comes from the matrix.
 *
 * Fragments: lane 4 r + c holds of tokens r and r + 8 the channels 16 j + 4 c + {0..3}; transposed,
 * of the channels 16 j + 4 (r / 2) + 2 x + r % 2 (x 0, 1) the tokens 2 c, 2 c + 1 and those + 8.
 * The Gram matrix is a sum over channels, in any order.
 *
 * Invariants: a page's bytes depend on its keys alone, not on its lane nor on others of its warp.
 * Pages of 8 tokens are pages of 16 whose other tokens are 0. Every byte of a record is written.
 */
#include "build.cuh"

#define TOKENS      16
#define PAGES       32 /* of a block */
#define WARPS       4
#define SWEEPS_MOST 128
#define NEGLIGIBLE  1e-12 /* off the diagonal, relative to the two values beside */
#define NOTHING     1e-15 /* the same, relative to the matrix */
#define NO_TAIL     1e-28 /* squared length of what a reflection removes, likewise */
#define BLOCKS      1056  /* at least, where there are as many pages */

/* What a warp makes of a page: the mean, then the records one after the other. */
#define IMAGE_BYTES (4 * LK_HEAD_DIM_MAX + 2624)

/* Shared memory. Rows and columns are of turned tokens; there is no row 0. */
struct batch_memory {
    union {
        double gram[TOKENS * (TOKENS - 1) / 2][PAGES + 1]; /* at_gram(); then a reflection's vector
                                                              in its row */
        uint8_t image[WARPS][IMAGE_BYTES];
    };
    float4 column[TOKENS][TOKENS / 4][PAGES]; /* eigenvectors, rows by four; place: at_column() */
    double value[TOKENS][PAGES];              /* the diagonal */
    double beside[TOKENS][PAGES];             /* of rows i and i + 1 */
    float unit[PAGES];                        /* what directions are multiplied by */
    float largest[PAGES];                     /* max |K| */
    uint64_t order[PAGES];                    /* columns by eigenvalue, descending, 4 bits each */
    uint32_t live[PAGES];                     /* bit i: direction i is not far below the first */
};

/* Row i >= column j >= 1 of the Gram matrix. */
__device__ __forceinline__ double *at_gram(struct batch_memory *m, uint32_t i, uint32_t j,
                                           uint32_t page) {
    return &m->gram[i * (i - 1) / 2 + j - 1][page];
}
__device__ __forceinline__ float4 *at_column(struct batch_memory *m, uint32_t column, uint32_t four,
                                             uint32_t page) {
    return &m->column[column][four][page ^ four]; /* so that a page's words lie in several banks */
}
__device__ __forceinline__ void get_column(struct batch_memory *m, uint32_t column, uint32_t page,
                                           float ret[TOKENS]) {
#pragma unroll
    for (int i = 0; i < TOKENS / 4; i++)
        *(float4 *)&ret[4 * i] = *at_column(m, column, i, page);
}
__device__ __forceinline__ void put_column(struct batch_memory *m, uint32_t column, uint32_t page,
                                           const float x[TOKENS]) {
#pragma unroll
    for (int i = 0; i < TOKENS / 4; i++)
        *at_column(m, column, i, page) = *(const float4 *)&x[4 * i];
}

/* Four sums beside each other: an addition takes four cycles. */
__device__ __forceinline__ float dot(const float a[TOKENS], const float b[TOKENS]) {
    float part[4] = {0, 0, 0, 0};

#pragma unroll
    for (int i = 0; i < TOKENS; i++)
        part[i % 4] = fmaf(a[i], b[i], part[i % 4]);
    return (part[0] + part[1]) + (part[2] + part[3]);
}

/* ---- keys ---- */

template <int D> struct keys {
    uint32_t w[2][D / 8]; /* [token r or r + 8][2 j + half of the four channels] */
};

template <int D>
__device__ __forceinline__ void load_keys(const struct lk_cuda_build &a, uint64_t task,
                                          struct keys<D> *k) {
    const struct lk_geometry *g = &a.pool.geometry;
    const uint64_t item = a.list[task / g->kv_heads];
    const uint32_t r = threadIdx.x % 32 / 4, c = threadIdx.x % 4,
                   head = (uint32_t)(task % g->kv_heads);
    const uint8_t *from =
        lk_page_keys_device(a.pool, (uint32_t)(item >> 48), item & 0xffffffffffffull, head) +
        2 * (r * D + 4 * c);

#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < D / 16; j++) {
            uint2 x = {0, 0};
            if (h == 0 || g->page_tokens == TOKENS)
                x = __ldcg((const uint2 *)(from + 2 * (8 * h * D + 16 * j)));
            k->w[h][2 * j] = x.x;
            k->w[h][2 * j + 1] = x.y;
        }
}

/* The Walsh matrix / 16 as first operand: rows r and r + 8, tokens 2 c and 2 c + 1, then those + 8.
 */
template <bool BF16> __device__ __forceinline__ void walsh(uint32_t tokens, uint32_t ret[4]) {
    const uint32_t r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t row = r + i % 2 * 8, token = 2 * c + i / 2 * 8;
        const float size = row < tokens ? 1.f / 16 : 0.f;
        ret[i] = pack_pair<BF16>(__popc(row & token) % 2 ? -size : size,
                                 __popc(row & (token + 1)) % 2 ? -size : size);
    }
}

/* ---- first phase: the Gram matrix ---- */

template <int D, bool BF16>
__device__ __forceinline__ void find_gram(struct batch_memory *m, const struct keys<D> &k,
                                          const uint32_t turn[4], uint32_t tokens, uint32_t page) {
    const uint32_t r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    double sum[2][3][2] = {};
    uint32_t largest = 0;

#pragma unroll
    for (int i = 0; i < D / 8; i++) {
        float x[4] = {0, 0, 0, 0};
        largest = __vmaxu2(largest, __vmaxu2(k.w[0][i] & 0x7fff7fff, k.w[1][i] & 0x7fff7fff));
        mma_k16<BF16>(x, turn[0], turn[1], turn[2], turn[3], transpose_8x8(k.w[0][i]),
                      transpose_8x8(k.w[1][i]));
#pragma unroll
        for (int y = 0; y < 2; y++) {
            const double low = x[y], high = x[2 + y];
            mma_f64(sum[y][0], low, low);
            mma_f64(sum[y][1], high, low);
            mma_f64(sum[y][2], high, high);
        }
    }
#pragma unroll
    for (int t = 0; t < 3; t++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const uint32_t row = r + (t ? 8 : 0), column = 2 * c + e + (t == 2 ? 8 : 0);
            if (column && column <= row)
                *at_gram(m, row, column, page) = sum[0][t][e] + sum[1][t][e];
        }
    largest = __reduce_max_sync(LK_FULL_WARP, max(largest >> 16, largest & 0xffff));
    if (threadIdx.x % 32 == 0)
        m->largest[page] = element((uint16_t)largest, BF16);
}

/* ---- second phase: a lane's own matrix ---- */

/* The largest value of the diagonal to 1..4; the power of two that does it to a direction. */
__device__ __forceinline__ void scale_gram(struct batch_memory *m, uint32_t n, uint32_t page) {
    double most = 0;

    for (uint32_t i = 1; i < n; i++)
        most = fmax(most, *at_gram(m, i, i, page));
    const int by = most > 0 ? -ilogb(most) / 2 : 0;
    const double scale = exp2((double)(2 * by));
    for (uint32_t i = 0; i < n * (n - 1) / 2; i++)
        m->gram[i][page] *= scale;
    m->unit[page] = by < -20 || by > 20 ? exp2f((float)max(-126, min(126, by))) : 1.f;
}

/* Row k by a reflection to nothing but beside[k - 1]; the rows before it as they are then. The
 * vector stays in row k, what its products are divided by in the place of the diagonal. */
__device__ __forceinline__ void reflect(struct batch_memory *m, uint32_t k, uint32_t page) {
    double v[TOKENS], p[TOKENS], tail = 0, last = 0, half = 0;

    v[0] = 0;
#pragma unroll
    for (int i = 1; i < TOKENS; i++) {
        v[i] = i < k ? *at_gram(m, k, i, page) : 0.;
        last = i + 1 == k ? v[i] : last;
        tail = i + 1 < k ? fma(v[i], v[i], tail) : tail;
        p[i] = 0;
    }
    const bool any = tail > NO_TAIL;
    const double length = copysign(sqrt(fma(last, last, tail)), last);
    const double factor = any ? 1 / fma(length, last, fma(last, last, tail)) : 0.;
    m->value[k][page] = *at_gram(m, k, k, page);
    m->beside[k - 1][page] = any ? -length : last;
    *at_gram(m, k, k, page) = factor;
    *at_gram(m, k, k - 1, page) = last + length;
#pragma unroll
    for (int i = 1; i < TOKENS; i++)
        v[i] = i + 1 == k ? last + length : v[i];
    if (!any)
        return;
#pragma unroll
    for (int i = 1; i < TOKENS - 1; i++)
        if (i < k)
#pragma unroll
            for (int j = 1; j <= i; j++) {
                const double x = *at_gram(m, i, j, page);
                p[i] = fma(x, v[j], p[i]);
                p[j] = i == j ? p[j] : fma(x, v[i], p[j]);
            }
#pragma unroll
    for (int i = 1; i < TOKENS; i++) {
        p[i] *= factor;
        half = fma(v[i], p[i], half);
    }
    half *= .5 * factor;
#pragma unroll
    for (int i = 1; i < TOKENS; i++)
        p[i] = fma(-half, v[i], p[i]);
#pragma unroll
    for (int i = 1; i < TOKENS - 1; i++)
        if (i < k)
#pragma unroll
            for (int j = 1; j <= i; j++) {
                double *at = at_gram(m, i, j, page);
                *at = fma(-v[i], p[j], fma(-p[i], v[j], *at));
            }
}

/* The product of all reflections, column by column: a warp has every WARPS-th. */
__device__ __forceinline__ void unfold(struct batch_memory *m, uint32_t n, uint32_t page,
                                       uint32_t warp) {
#pragma unroll 1
    for (uint32_t k = 1; k < n; k++) {
        float v[TOKENS], unit[TOKENS];
        const float factor = k > 1 ? (float)*at_gram(m, k, k, page) : 0.f;
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            v[t] = t > 0 && t < k ? (float)*at_gram(m, k, t, page) : 0.f;
            unit[t] = t == k ? 1.f : 0.f;
        }
        if (k % WARPS == warp)
            put_column(m, k, page, unit);
#pragma unroll 1
        for (uint32_t j = warp ? warp : WARPS; j < k; j += WARPS) {
            float x[TOKENS];
            get_column(m, j, page, x);
            const float turn = -factor * dot(x, v);
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
                x[t] = fmaf(turn, v[t], x[t]);
            put_column(m, j, page, x);
        }
    }
}

struct tridiagonal {
    double d[TOKENS], e[TOKENS]; /* the diagonal; beside it, of rows i and i + 1 */
};

/* Bit i: values i and i + 1 are not apart yet. */
__device__ __forceinline__ uint32_t find_open(const struct tridiagonal &t, uint32_t n) {
    uint32_t open = 0;

#pragma unroll
    for (int i = 1; i < TOKENS - 1; i++) {
        const double e = fabs(t.e[i]);
        if (i + 1 < n && e > NEGLIGIBLE * (fabs(t.d[i]) + fabs(t.d[i + 1])) && e > NOTHING)
            open |= 1u << i;
    }
    return open;
}

/* One sweep of implicit QL over rows first..last; four rows of the columns turned along. */
__device__ __forceinline__ void sweep(struct batch_memory *m, struct tridiagonal *t, int first,
                                      int last, uint32_t page, uint32_t four) {
    double top = 0, after = 0, next = 0, above = 0, s = 1, c = 1, less = 0;
    float4 high = *at_column(m, last, four, page);
    bool stop = false;

#pragma unroll
    for (int i = 1; i < TOKENS; i++) {
        top = i == first ? t->d[i] : top;
        after = i == first + 1 ? t->d[i] : after;
        next = i == first ? t->e[i] : next;
        above = i == last ? t->d[i] : above;
    }
    const double ratio = (after - top) / (2 * next);
    double g = above - top + next / (ratio + copysign(sqrt(fma(ratio, ratio, 1.)), ratio));
#pragma unroll
    for (int i = TOKENS - 2; i > 0; i--) {
        if (i >= last || i < first || stop)
            continue;
        const double f = s * t->e[i], b = c * t->e[i], square = fma(f, f, g * g);
        stop = !(square > 0);
        if (stop) { /* apart already */
            t->d[i + 1] = above - less;
            t->e[i + 1] = 0;
            *at_column(m, i + 1, four, page) = high;
            continue;
        }
        const float4 low = *at_column(m, i, four, page);
        const double inverse = rsqrt(square);
        t->e[i + 1] = i + 1 == last ? 0. : square * inverse;
        s = f * inverse;
        c = g * inverse;
        g = above - less;
        above = t->d[i];
        const double r = fma(above - g, s, 2 * c * b);
        less = s * r;
        t->d[i + 1] = g + less;
        g = fma(c, r, -b);
        const float x = (float)s, y = (float)c;
        *at_column(m, i + 1, four, page) =
            make_float4(fmaf(x, low.x, y * high.x), fmaf(x, low.y, y * high.y),
                        fmaf(x, low.z, y * high.z), fmaf(x, low.w, y * high.w));
        high = make_float4(fmaf(y, low.x, -x * high.x), fmaf(y, low.y, -x * high.y),
                           fmaf(y, low.z, -x * high.z), fmaf(y, low.w, -x * high.w));
        if (i == first) {
            t->d[i] = above - less;
            t->e[i] = g;
            *at_column(m, i, four, page) = high;
        }
    }
}

/* Columns by eigenvalue, and which directions live. */
__device__ __forceinline__ void put_order(struct batch_memory *m, const struct tridiagonal &t,
                                          uint32_t n, uint32_t page) {
    uint64_t order = 0;
    double most = t.d[1];
    uint32_t place[TOKENS], live = 0;

#pragma unroll
    for (int i = 1; i < TOKENS; i++) {
        most = i < n ? fmax(most, t.d[i]) : most;
        place[i] = i - 1;
    }
#pragma unroll
    for (int i = 2; i < TOKENS; i++)
#pragma unroll
        for (int j = 1; j < i; j++)
            if (i < n && t.d[i] > t.d[j]) {
                place[i]--;
                place[j]++;
            }
#pragma unroll
    for (int i = 1; i < TOKENS; i++)
        if (i < n) {
            order |= (uint64_t)i << 4 * place[i];
            live |= (t.d[i] > 1e-6 * most ? 1u : 0u) << place[i];
        }
    m->order[page] = order;
    m->live[page] = live;
}

/* The Gram matrix -> eigenvectors as columns, and their order. Of a page's lanes in all warps each
 * finds eigenvalues for itself. */
__device__ __noinline__ void diagonalise(struct batch_memory *m, uint32_t n, uint32_t count) {
    const uint32_t page = threadIdx.x % 32, warp = threadIdx.x / 32;
    struct tridiagonal t;

    if (warp == 0 && page < count) {
        scale_gram(m, n, page);
#pragma unroll 1
        for (uint32_t k = n - 1; k > 1; k--)
            reflect(m, k, page);
        m->value[1][page] = *at_gram(m, 1, 1, page);
    }
    __syncthreads();
    if (page < count)
        unfold(m, n, page, warp);
    __syncthreads();
    if (page >= count)
        return;
#pragma unroll
    for (int i = 1; i < TOKENS; i++) {
        t.d[i] = i < n ? m->value[i][page] : 0.;
        t.e[i] = i + 1 < n ? m->beside[i][page] : 0.;
    }
#pragma unroll 1
    for (int sweeps = 0; sweeps < SWEEPS_MOST; sweeps++) {
        const uint32_t open = find_open(t, n);
        if (!open)
            break;
        const int first = __ffs(open) - 1;
        sweep(m, &t, first, first + __ffs(~(open >> first)) - 1, page, warp);
    }
    if (warp == 0)
        put_order(m, t, n, page);
}

/* ---- third phase: directions and records ---- */

/* The record images of a page, and what they need. */
struct images {
    float *mean; /* [d] */
    uint8_t *coarse, *fine;
    struct lk_record coarse_record, fine_record;
};

__device__ __forceinline__ uint8_t *basis_of(const struct images &o, uint32_t i) {
    return i < LK_COARSE_RANK
               ? o.coarse + o.coarse_record.basis + i * o.coarse_record.head_dim / 2
               : o.fine + o.fine_record.basis + (i - LK_COARSE_RANK) * o.coarse_record.head_dim / 2;
}
__device__ __forceinline__ uint8_t *coeffs_of(const struct images &o, uint32_t i) {
    return i < LK_COARSE_RANK ? o.coarse + o.coarse_record.coeffs
                              : o.fine + o.fine_record.coeffs +
                                    (i - LK_COARSE_RANK) / 2 * 2 * o.fine_record.tokens;
}
__device__ __forceinline__ uint8_t *scale_of(const struct images &o, uint32_t i) {
    return i < LK_COARSE_RANK ? o.coarse + o.coarse_record.scales + 2 * (i + 1)
                              : o.fine + o.fine_record.scales + 2 * (i - LK_COARSE_RANK);
}

/* Of words a and b, whose other halves the lane beside has: the whole of a on even rows, of b on
 * odd ones. Even rows have the lower parts. */
__device__ __forceinline__ uint32_t join(uint32_t a, uint32_t b, uint32_t shift) {
    const bool odd = threadIdx.x & 4;
    const uint32_t other = __shfl_xor_sync(LK_FULL_WARP, odd ? a : b, 4);

    return odd ? other | b << shift : a | other << shift;
}

/* The mean, rotated, to the coarse record. */
template <int D> __device__ __forceinline__ void write_centroid(const struct images &o) {
    constexpr uint32_t BLOCK = D & -D;
    constexpr int MANY = (D + 31) / 32;
    const uint32_t lane = threadIdx.x % 32;
    float v[MANY], most = 0;

#pragma unroll
    for (int i = 0; i < MANY; i++)
        v[i] = lane + 32 * i < D ? o.mean[lane + 32 * i] : 0.f;
    warp_hadamard<BLOCK, MANY>(v);
#pragma unroll
    for (int i = 0; i < MANY; i++) {
        v[i] *= rsqrtf((float)BLOCK);
        most = fmaxf(most, fabsf(v[i]));
    }
    const uint16_t bits = bf16_up(warp_max(most) / 127.f);
    const float scale = bf16_float(bits);
#pragma unroll
    for (int i = 0; i < MANY; i++)
        if (lane + 32 * i < D) {
            const int code = scale > 0 ? max(-127, min(127, __float2int_rn(v[i] / scale))) : 0;
            o.coarse[o.coarse_record.centroid + lk_centroid_place(D, lane + 32 * i)] =
                (uint8_t)code;
        }
    if (lane == 0)
        *(uint16_t *)(o.coarse + o.coarse_record.scales) = bits;
}

/* v[j][x][e]: directions 2 c + e, channels of the transposed fragment; rotated in place, but for
 * the factor. */
template <int D> __device__ __forceinline__ void rotate(float v[D / 16][4]) {
    constexpr uint32_t BLOCK = D & -D;

#pragma unroll
    for (int j = 0; j < D / 16; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float a = v[j][e], b = v[j][2 + e];
            v[j][e] = a + b;
            v[j][2 + e] = a - b;
        }
#pragma unroll
        for (uint32_t bit = 4; bit < 32; bit *= 2)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float other = __shfl_xor_sync(LK_FULL_WARP, v[j][i], bit);
                v[j][i] = fmaf(threadIdx.x & bit ? -1.f : 1.f, v[j][i], other);
            }
    }
#pragma unroll
    for (uint32_t bit = 1; 16 * bit < BLOCK; bit *= 2)
#pragma unroll
        for (int j = 0; j < D / 16; j++)
            if (!(j & bit))
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float a = v[j][i], b = v[j + bit][i];
                    v[j][i] = a + b;
                    v[j + bit][i] = a - b;
                }
}

/* Codes of direction `at` (of v, e), multiplied by times, to its half-bytes. */
template <int D>
__device__ __forceinline__ void write_basis(uint8_t *to, const float v[D / 16][4], int e,
                                            float times, bool wanted) {
    const uint32_t r = threadIdx.x % 32 / 4;
    /* A half-byte is the lowest bits of the sum: numbers there are whole. */
    auto code = [&](int j, int x) {
        return __float_as_uint(fmaf(v[j][2 * x + e], times, 12582912.f + 8.f)) & 15;
    };

    if constexpr (D % 32 == 0) {
#pragma unroll
        for (int t = 0; t < D / 32; t += 2) {
            uint32_t part[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < 2 && t + i < D / 32; i++) {
                const int j = 2 * (t + i);
                part[i] =
                    code(j, 0) | code(j + 1, 0) << 4 | code(j, 1) << 16 | code(j + 1, 1) << 20;
            }
            const uint32_t word = join(part[0], part[1], 8);
            if (wanted && t + r % 2 < D / 32)
                *(uint32_t *)(to + r / 2 * (D / 8) + 4 * (t + r % 2)) = word;
        }
    } else {
#pragma unroll
        for (int j = 0; j < D / 16; j += 2) {
            uint32_t part[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < 2 && j + i < D / 16; i++)
                part[i] = code(j + i, 0) | code(j + i, 1) << 8;
            const uint32_t word = join(part[0], part[1], 4);
            if (wanted && j + r % 2 < D / 16)
                *(uint16_t *)(to + 8 * (j + r % 2) + r / 2 * 2) = (uint16_t)word;
        }
    }
}

/* Coefficients of a direction, of unit length: of lane (r, c) direction r, tokens of the transposed
 * fragment. The largest is positive, the first of those if there are several. */
struct coeffs {
    float u[4], most;
    bool live;
};

__device__ __forceinline__ struct coeffs get_coeffs(struct batch_memory *m, uint32_t page,
                                                    uint32_t i, uint32_t tokens, uint32_t rank) {
    const uint32_t c = threadIdx.x % 4, column = m->order[page] >> 4 * i & 15;
    struct coeffs k = {{0, 0, 0, 0}, 0, false};
    uint32_t first = 64;

    if (i < rank && column) { /* of n tokens, n - 1 directions */
        const float2 a = *((const float2 *)at_column(m, column, c / 2, page) + c % 2);
        const float2 b = *((const float2 *)at_column(m, column, 2 + c / 2, page) + c % 2);
        k.u[0] = a.x + a.y + (b.x + b.y);
        k.u[1] = a.x - a.y + (b.x - b.y);
        k.u[2] = a.x + a.y - (b.x + b.y);
        k.u[3] = a.x - a.y - (b.x - b.y);
        k.live = m->live[page] >> i & 1;
    }
#pragma unroll
    for (int t = 0; t < 4; t++) {
#pragma unroll
        for (int bit = 1; bit < 4; bit *= 2) {
            const float other = __shfl_xor_sync(LK_FULL_WARP, k.u[t], bit);
            k.u[t] = c & bit ? other - k.u[t] : k.u[t] + other;
        }
        k.u[t] *= rsqrtf((float)tokens);
        k.most = fmaxf(k.most, fabsf(k.u[t]));
    }
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2)
        k.most = fmaxf(k.most, __shfl_xor_sync(LK_FULL_WARP, k.most, bit));
#pragma unroll
    for (int t = 3; t >= 0; t--)
        if (fabsf(k.u[t]) == k.most)
            first = 2 * (2 * c + t % 2 + t / 2 * 8) + (k.u[t] < 0);
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2)
        first = min(first, __shfl_xor_sync(LK_FULL_WARP, first, bit));
#pragma unroll
    for (int t = 0; t < 4; t++)
        k.u[t] = first & 1 ? -k.u[t] : k.u[t];
    return k;
}

/* Bytes and scale of direction i; `most` of its unit vector's channels, rotated. */
__device__ __forceinline__ void write_coeffs(const struct images &o, uint32_t i,
                                             const struct coeffs &k, float length, float most,
                                             bool wanted) {
    const uint32_t r = threadIdx.x % 32 / 4, c = threadIdx.x % 4, n = o.coarse_record.tokens;
    const float b = length > 0 ? most / 7.f : 0.f;
    const uint16_t bits = b > 0 ? bf16_up(k.most * length / 127.f * b) : 0;
    const float step = bits ? bf16_float(bits) / b : 0.f, unit = bits ? length / step : 0.f;
    uint32_t code[4];

#pragma unroll
    for (int t = 0; t < 4; t++)
        code[t] = 128 + max(-127, min(127, __float2int_rn(k.u[t] * unit)));
    const uint32_t word = join(code[0] | code[2] << 16, code[1] | code[3] << 16, 8);
    if (!wanted)
        return;
    if (n == TOKENS)
        *(uint32_t *)(coeffs_of(o, i) + 4 * (2 * c + r % 2)) = word;
    else
        *(uint16_t *)(coeffs_of(o, i) + 2 * (2 * c + r % 2)) = (uint16_t)word;
    if (c == 0)
        *(uint16_t *)scale_of(o, i) = bits;
}

/* x = the sum of three pairs of 16 bits. */
template <bool BF16> __device__ __forceinline__ void split(float x, float y, uint32_t ret[3]) {
#pragma unroll
    for (int i = 0; i < 3; i++) {
        ret[i] = pack_pair<BF16>(x, y);
        const float2 near = unpack_pair<BF16>(ret[i]);
        x -= near.x;
        y -= near.y;
    }
}

/* Eight directions of the page, not rotated: v, times `part`; and the mean. */
template <int D, bool BF16>
__device__ __forceinline__ void find_directions(const struct keys<D> &k, uint32_t tokens,
                                                const struct coeffs &u, float part, float *mean,
                                                float v[D / 16][4]) {
    const uint32_t share = pack_pair<BF16>(1.f / tokens, 1.f / tokens), r = threadIdx.x % 32 / 4;
    uint32_t low[3], high[3];

    split<BF16>(u.u[0] * part, u.u[1] * part, low);
    split<BF16>(tokens == TOKENS ? u.u[2] * part : 0.f, tokens == TOKENS ? u.u[3] * part : 0.f,
                high);
#pragma unroll
    for (int j = 0; j < D / 16; j++) {
        const uint32_t x0 = transpose_8x8(k.w[0][2 * j]), x1 = transpose_8x8(k.w[0][2 * j + 1]),
                       x2 = transpose_8x8(k.w[1][2 * j]), x3 = transpose_8x8(k.w[1][2 * j + 1]);
        float middle[4] = {0, 0, 0, 0};
        mma_k16<BF16>(middle, x0, x1, x2, x3, share, share);
        if (threadIdx.x % 4 == 0)
#pragma unroll
            for (int x = 0; x < 2; x++)
                mean[16 * j + 4 * (r / 2) + 2 * x + r % 2] = middle[2 * x];
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[j][i] = 0;
#pragma unroll
        for (int i = 2; i >= 0; i--)
            mma_k16<BF16>(v[j], x0, x1, x2, x3, low[i], high[i]);
    }
}

/* Squared length and largest magnitude of directions 2 c and 2 c + 1. */
template <int D>
__device__ __forceinline__ void measure(const float v[D / 16][4], float length[2], float most[2]) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
        length[e] = most[e] = 0;
#pragma unroll
        for (int j = 0; j < D / 16; j++)
#pragma unroll
            for (int x = 0; x < 2; x++) {
                const float y = v[j][2 * x + e];
                length[e] = fmaf(y, y, length[e]);
                most[e] = fmaxf(most[e], fabsf(y));
            }
#pragma unroll
        for (int bit = 4; bit < 32; bit *= 2) {
            length[e] += __shfl_xor_sync(LK_FULL_WARP, length[e], bit);
            most[e] = fmaxf(most[e], __shfl_xor_sync(LK_FULL_WARP, most[e], bit));
        }
    }
}

/* Eight directions from `first` on, to the records. dead: of the page, set by the first eight. */
template <int D, bool BF16>
__device__ __forceinline__ void summarise(struct batch_memory *m, const struct images &o,
                                          const struct keys<D> &k, uint32_t page, uint32_t first,
                                          uint32_t rank, bool *dead) {
    constexpr float PART = BF16 ? .25f : 1.f; /* no sum of products is beyond bf16's range */
    const uint32_t r = threadIdx.x % 32 / 4, c = threadIdx.x % 4, tokens = o.coarse_record.tokens;
    const float unit = m->unit[page], back = rsqrtf((float)(D & -D)) / PART / unit;
    const struct coeffs u = get_coeffs(m, page, first + r, tokens, rank);
    float v[D / 16][4], square[2], most[2];

    find_directions<D, BF16>(k, tokens, u, PART, o.mean, v);
    if (unit != 1.f)
#pragma unroll
        for (int j = 0; j < D / 16; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                v[j][i] *= unit;
    rotate<D>(v);
    measure<D>(v, square, most);
    if (first == 0)
        *dead = sqrtf(__shfl_sync(LK_FULL_WARP, square[0], 0)) * back <=
                1e-6f * m->largest[page] * sqrtf((float)D * tokens);
    const bool live = !*dead && u.live;
    const uint32_t lives = __ballot_sync(LK_FULL_WARP, live);
    const float even = __shfl_sync(LK_FULL_WARP, square[0], r / 2),
                odd = __shfl_sync(LK_FULL_WARP, square[1], r / 2),
                even_most = __shfl_sync(LK_FULL_WARP, most[0], r / 2),
                odd_most = __shfl_sync(LK_FULL_WARP, most[1], r / 2);
    const float length = sqrtf(r % 2 ? odd : even);
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const uint32_t i = first + 2 * c + e;
        write_basis<D>(basis_of(o, i), v, e, lives >> 4 * (2 * c + e) & 1 ? 7.f / most[e] : 0.f,
                       i < rank);
    }
    write_coeffs(o, first + r, u, live ? length * back : 0.f,
                 live ? (r % 2 ? odd_most : even_most) / length : 0.f, first + r < rank);
}

/* Images to the pool, padding as 0. */
__device__ __forceinline__ void write_record(uint8_t *to, uint8_t *from,
                                             const struct lk_record &r) {
    for (uint32_t i = threadIdx.x % 32 * 16; i < r.stride; i += 32 * 16)
        *(uint4 *)(to + i) = *(const uint4 *)(from + i);
}
__device__ __forceinline__ void clear_padding(uint8_t *image, const struct lk_record &r) {
    if (r.bytes + threadIdx.x % 32 < r.stride)
        image[r.bytes + threadIdx.x % 32] = 0;
}

/* Where a page's records go. */
__device__ __forceinline__ void write_records(const struct lk_cuda_build &a, const struct images &o,
                                              uint64_t task) {
    const uint32_t heads = a.pool.geometry.kv_heads;
    const uint64_t item = a.list[task / heads];
    const uint64_t at =
        ((item >> 48) * heads + task % heads) * a.pool.pages + (item & 0xffffffffffffull);

    write_record(a.pool.coarse + at * o.coarse_record.stride, o.coarse, o.coarse_record);
    write_record(a.pool.fine + at * o.fine_record.stride, o.fine, o.fine_record);
}

template <int D, bool BF16>
__global__ void __launch_bounds__(32 * WARPS, D <= 128 ? 3 : 2)
    build_pages_kernel(const __grid_constant__ struct lk_cuda_build a) {
    SHARED_BYTES(memory, 16);
    struct batch_memory *m = (struct batch_memory *)memory;
    const struct lk_geometry *g = &a.pool.geometry;
    const uint32_t tokens = g->page_tokens, warp = warp_index();
    uint8_t *image = m->image[warp];
    struct images o = {(float *)image, image + D * 4, NULL, lk_record_coarse(g), lk_record_fine(g)};
    struct keys<D> k, next;
    uint32_t turn[4];

    walsh<BF16>(tokens, turn);
    o.fine = o.coarse + o.coarse_record.stride;
    wait_for_previous();
    const uint64_t tasks = (uint64_t)a.count * g->kv_heads,
                   each = min((uint64_t)PAGES, (tasks + gridDim.x - 1) / gridDim.x);
    for (uint64_t base = blockIdx.x * each; base < tasks; base += gridDim.x * each) {
        const uint32_t count = (uint32_t)min(each, tasks - base);
        load_keys<D>(a, base + min(warp, count - 1), &next);
#pragma unroll 1
        for (uint32_t page = warp; page < count; page += WARPS) {
            k = next;
            load_keys<D>(a, base + min(page + WARPS, count - 1), &next);
            find_gram<D, BF16>(m, k, turn, tokens, page);
        }
        __syncthreads();
        diagonalise(m, tokens, count);
        __syncthreads();
        load_keys<D>(a, base + min(warp, count - 1), &next);
#pragma unroll 1
        for (uint32_t page = warp; page < count; page += WARPS) {
            bool dead = false;
            k = next;
            load_keys<D>(a, base + min(page + WARPS, count - 1), &next);
            clear_padding(o.coarse, o.coarse_record);
            clear_padding(o.fine, o.fine_record);
#pragma unroll 1
            for (uint32_t i = 0; i < g->rank; i += 8)
                summarise<D, BF16>(m, o, k, page, i, g->rank, &dead);
            __syncwarp();
            write_centroid<D>(o);
            __syncwarp();
            write_records(a, o, base + page);
            __syncwarp();
        }
        __syncthreads();
    }
}

/* ---- launcher ---- */

template <int D> static int launch_pages(const struct lk_cuda_build &a, void *stream) {
    const struct lk_geometry *g = &a.pool.geometry;
    const uint64_t tasks = (uint64_t)a.count * g->kv_heads, whole = (tasks + PAGES - 1) / PAGES,
                   least = tasks < BLOCKS ? tasks : BLOCKS;
    const uint32_t bytes = sizeof(struct batch_memory);
    void (*kernel)(struct lk_cuda_build) =
        g->dtype == LK_BF16 ? build_pages_kernel<D, true> : build_pages_kernel<D, false>;
    int error = take_bytes(kernel, bytes);

    return error ? error
                 : launch(kernel, dim3((uint32_t)(whole > least ? whole : least)), 32 * WARPS,
                          bytes, stream, a);
}

uint32_t lk_cuda_build_small_least(void) {
    return sizeof(struct batch_memory);
}

int lk_cuda_build_small(const struct lk_cuda_build *b, void *stream) {
    switch (b->pool.geometry.head_dim) {
    case 64:
        return launch_pages<64>(*b, stream);
    case 80:
        return launch_pages<80>(*b, stream);
    case 96:
        return launch_pages<96>(*b, stream);
    case 112:
        return launch_pages<112>(*b, stream);
    case 128:
        return launch_pages<128>(*b, stream);
    case 192:
        return launch_pages<192>(*b, stream);
    }
    return launch_pages<256>(*b, stream);
}
