/* SPDX-License-Identifier: MIT */
/*
 * build_lanes.h - summarises pages and superpages (DESIGN section 1, "Build"). One path a
 * compilation.
 *
 * Steps, X [n][d] the keys:
 *   load       as floats, times the power of two that brings max|K| into [1, 2); what is not finite
 *              counts as 0, so that a poisoned key spoils its own token's estimate only
 *   centre     X - first key, then - mean: in the original space, where a constant of 600 in a
 *              channel cancels without a rounding; the mean itself in float64
 *   eigen      the largest pairs of X X^T [n, n], or of X^T X [d, d] where that is smaller
 *   project    W_i = X^T u_i; s_i is its norm, which is far more exact than the root of the
 *              eigenvalue
 *   rotate     mean and W_i only: the rotation is orthogonal and leaves X X^T as it is
 *   encode     see record.h
 *
 * Products are float32, sums over the d channels too; the centroid, the eigenproblem and all scales
 * are float64, so that the power of two comes out again without over- or underflow. Keys, matrices
 * and the summary lie in the caller's scratch, 1.4 MiB: no thread's stack need hold them. Pure, any
 * thread.
 */
#ifndef LK_CPU_BUILD_LANES_H
#define LK_CPU_BUILD_LANES_H

#include <math.h>

#include "build.h"
#include "eigen.h"
#include "element.h"
#include "hadamard.h"
#include "record.h"

#define KEYS_MAX    (LK_QUAD_PAGES * LK_PAGE_TOKENS_MAX)
#define BASIS_MAX   7
#define CODE_MAX    127
#define DEAD_RATIO  1e-3 /* directions so much weaker than the first are none */
#define DEAD_SPREAD 1e-6 /* keys that differ by so little are equal */

/* What a summary is before it is encoded. Prescaled; centroid and directions in rotated space. */
struct summary {
    uint32_t head_dim, tokens, rank;
    double prescale; /* what the keys were multiplied by */
    double centroid[LK_HEAD_DIM_MAX];
    float direction[LK_RANK_MAX][LK_HEAD_DIM_MAX]; /* any length */
    double strength[LK_RANK_MAX];                  /* s_i; 0: dead */
    double length[LK_RANK_MAX];                    /* of direction[i] */
    float coeff[LK_RANK_MAX][KEYS_MAX];            /* u_i, unit length */
};

/* The same for all paths. Matrices are [n][n], n the smaller of tokens and head_dim. */
struct lk_scratch {
    _Alignas(64) float x[KEYS_MAX * LK_HEAD_DIM_MAX];
    double a[EIGEN_MAX * EIGEN_MAX], z[EIGEN_MAX * EIGEN_MAX];
    double vectors[EIGEN_MAX * EIGEN_WANTED];
    struct summary summary;
};

/* ---- keys ---- */

LK_INLINE float load_keys(uint32_t dtype, const uint8_t *from, uint32_t count, float *x) {
    lanes top = {0};
    for (uint32_t i = 0; i < count; i += LANES) {
        lanes v = element_load(dtype, from, i);
        v = (lanes)((ilanes)v & (((ilanes)v & 0x7f800000) != 0x7f800000));
        top = lanes_max(top, lanes_abs(v));
        lanes_store(x + i, v);
    }
    return lanes_largest(top);
}

/* The power of two that brings `largest` to [1, 2), or as near as one float can. */
LK_INLINE float prescale_of(float largest) {
    int exponent = largest > 0 ? -ilogbf(largest) : 0;
    return ldexpf(1, exponent > 126 ? 126 : exponent < -126 ? -126 : exponent);
}

/* x becomes the differences to the mean; ret_mean the mean, in float64 from the keys themselves: a
 * centroid's code on the wrong side of a tie moves all tokens of the page. */
LK_INLINE void centre(float *x, uint32_t tokens, uint32_t head_dim, float prescale,
                      double *ret_mean) {
    float share = 1 / (float)tokens;
    for (uint32_t c = 0; c < head_dim; c += LANES) {
        lanes first = lanes_load(x + c) * prescale, sum = {0};
        wide all[2] = {{0}};
        for (uint32_t t = 0; t < tokens; t++) {
            float *at = x + t * head_dim + c;
            all[0] += wide_of(at);
            all[1] += wide_of(at + WIDE);
            lanes v = lanes_load(at) * prescale - first;
            lanes_store(at, v);
            sum += v;
        }
        sum *= share;
        for (uint32_t t = 0; t < tokens; t++)
            lanes_store(x + t * head_dim + c, lanes_load(x + t * head_dim + c) - sum);
        wide_store(ret_mean + c, all[0] * ((double)prescale * share));
        wide_store(ret_mean + c + WIDE, all[1] * ((double)prescale * share));
    }
}

/* ---- the matrix: a [n][n] ---- */

#define TILE 4

LK_INLINE void gram_tile(const float *x, uint32_t n, uint32_t head_dim, uint32_t i, uint32_t j,
                         double *a) {
    lanes sum[TILE][TILE] = {{{0}}};
    for (uint32_t c = 0; c < head_dim; c += LANES)
        LK_UNROLL
    for (uint32_t p = 0; p < TILE; p++) {
        lanes row = lanes_load(x + (i + p) * head_dim + c);
        LK_UNROLL
        for (uint32_t q = 0; q < TILE; q++)
            sum[p][q] = lanes_fma(row, lanes_load(x + (j + q) * head_dim + c), sum[p][q]);
    }
    LK_UNROLL
    for (uint32_t p = 0; p < TILE; p++)
        LK_UNROLL
    for (uint32_t q = 0; q < TILE; q++)
        a[(i + p) * n + j + q] = a[(j + q) * n + i + p] = lanes_sum(sum[p][q]);
}

/* x x^T */
LK_INLINE void gram(const float *x, uint32_t tokens, uint32_t head_dim, double *a) {
    for (uint32_t i = 0; i < tokens; i += TILE)
        for (uint32_t j = 0; j <= i; j += TILE)
            gram_tile(x, tokens, head_dim, i, j, a);
}

/* x^T x */
LK_INLINE void covariance(const float *x, uint32_t tokens, uint32_t head_dim, double *a) {
    for (uint32_t i = 0; i < head_dim; i += TILE)
        for (uint32_t j = 0; j <= i; j += LANES) {
            lanes sum[TILE] = {{0}};
            for (uint32_t t = 0; t < tokens; t++) {
                const float *row = x + t * head_dim;
                lanes right = lanes_load(row + j);
                LK_UNROLL
                for (uint32_t p = 0; p < TILE; p++)
                    sum[p] = lanes_fma(right, lanes_set(row[i + p]), sum[p]);
            }
            LK_UNROLL
            for (uint32_t p = 0; p < TILE; p++)
                for (uint32_t q = 0; q < LANES; q++)
                    a[(i + p) * head_dim + j + q] = a[(j + q) * head_dim + i + p] = sum[p][q];
        }
}

/* ---- directions ---- */

/* ret_i [columns] = sum over rows t of u_i[t] * x[t]. Up to TILE - 1 rows more are written, as
 * zeros. */
LK_INLINE void project(const float *x, uint32_t rows, uint32_t columns, uint32_t wanted,
                       const double *vectors, float (*ret)[LK_HEAD_DIM_MAX]) {
    _Static_assert(LK_RANK_MAX % TILE == 0, "rows past the rank have a place");
    float u[EIGEN_MAX][TILE];
    for (uint32_t i = 0; i < wanted; i += TILE) {
        for (uint32_t t = 0; t < rows; t++)
            LK_UNROLL
        for (uint32_t p = 0; p < TILE; p++)
            u[t][p] = (float)vectors[t * EIGEN_WANTED + i + p];
        for (uint32_t c = 0; c < columns; c += LANES) {
            lanes sum[TILE] = {{0}};
            for (uint32_t t = 0; t < rows; t++) {
                lanes row = lanes_load(x + t * columns + c);
                LK_UNROLL
                for (uint32_t p = 0; p < TILE; p++)
                    sum[p] = lanes_fma(row, lanes_set(u[t][p]), sum[p]);
            }
            LK_UNROLL
            for (uint32_t p = 0; p < TILE; p++)
                lanes_store(ret[i + p] + c, sum[p]);
        }
    }
}

LK_INLINE double norm_of(const float *x, uint32_t count) {
    wide sum = {0};
    double all = 0;
    for (uint32_t i = 0; i < count; i += WIDE) {
        wide v = wide_of(x + i);
        sum = wide_fma(v, v, sum);
    }
    for (uint32_t l = 0; l < WIDE; l++)
        all += sum[l];
    return sqrt(all);
}

/* From eigenvectors of x x^T. */
LK_INLINE void directions_of_gram(const float *x, const double *vectors, struct summary *s) {
    project(x, s->tokens, s->head_dim, s->rank, vectors, s->direction);
    for (uint32_t i = 0; i < s->rank; i++) {
        s->length[i] = s->strength[i] = norm_of(s->direction[i], s->head_dim);
        memset(s->coeff[i], 0, LANES * sizeof(float)); /* a vector may be longer than a page */
        for (uint32_t t = 0; t < s->tokens; t++)
            s->coeff[i][t] = (float)vectors[t * EIGEN_WANTED + i];
    }
}

/* From eigenvectors of x^T x: the directions themselves. */
LK_INLINE void directions_of_covariance(const float *x, const double *vectors, struct summary *s) {
    for (uint32_t i = 0; i < s->rank; i++) {
        for (uint32_t c = 0; c < s->head_dim; c++)
            s->direction[i][c] = (float)vectors[c * EIGEN_WANTED + i];
        s->length[i] = 1;
        for (uint32_t t = 0; t < s->tokens; t++) {
            lanes sum = {0};
            for (uint32_t c = 0; c < s->head_dim; c += LANES)
                sum = lanes_fma(lanes_load(x + t * s->head_dim + c),
                                lanes_load(s->direction[i] + c), sum);
            s->coeff[i][t] = lanes_sum(sum);
        }
        s->strength[i] = norm_of(s->coeff[i], s->tokens);
        float unit = s->strength[i] > 0 ? (float)(1 / s->strength[i]) : 0;
        for (uint32_t t = 0; t < s->tokens; t++)
            s->coeff[i][t] *= unit;
    }
}

LK_INLINE float largest_of(const float *x, uint32_t count) {
    lanes top = {0};
    for (uint32_t i = 0; i < count; i += LANES)
        top = lanes_max(top, lanes_abs(lanes_load(x + i)));
    return lanes_largest(top);
}

/* max |K H|, from the differences and the (not yet rotated) mean. */
static float largest_rotated(const float *x, const struct summary *s) {
    float row[LK_HEAD_DIM_MAX], largest = 0;
    for (uint32_t t = 0; t < s->tokens; t++) {
        for (uint32_t c = 0; c < s->head_dim; c++)
            row[c] = (float)(x[t * s->head_dim + c] + s->centroid[c]);
        hadamard_rotate(row, s->head_dim);
        largest = fmaxf(largest, largest_of(row, s->head_dim));
    }
    return largest;
}

/* Whether the keys differ at all. The rotated maximum lies within a factor of the root of the block
 * of the plain one, and is computed only where that leaves a doubt. */
LK_INLINE bool differ(const float *x, float largest, const struct summary *s) {
    double unit = DEAD_SPREAD * sqrt((double)s->head_dim * s->tokens);
    double factor = sqrt(hadamard_block(s->head_dim));

    if (s->strength[0] > unit * largest * factor)
        return true;
    if (s->strength[0] <= unit * largest / factor)
        return false;
    return s->strength[0] > unit * largest_rotated(x, s);
}

/* Dead directions get strength 0. */
LK_INLINE void bury(const float *x, float largest, struct summary *s) {
    bool any = differ(x, largest, s);
    double least = DEAD_RATIO * s->strength[0];
    for (uint32_t i = 0; i < s->rank; i++)
        if (!any || !(s->strength[i] > least))
            s->strength[i] = 0;
}

/* x [tokens][head_dim], as loaded, becomes the differences -> everything of the summary but
 * head_dim, tokens and rank, which are given. */
LK_INLINE void summarise(struct lk_scratch *scratch, float largest) {
    float *x = scratch->x, prescale = prescale_of(largest);
    double *a = scratch->a, *z = scratch->z, *vectors = scratch->vectors;
    struct summary *s = &scratch->summary;

    s->prescale = prescale;
    centre(x, s->tokens, s->head_dim, prescale, s->centroid);
    if (s->tokens <= s->head_dim) {
        gram(x, s->tokens, s->head_dim, a);
        eigen_largest(a, z, s->tokens, s->rank, vectors);
        directions_of_gram(x, vectors, s);
    } else {
        covariance(x, s->tokens, s->head_dim, a);
        eigen_largest(a, z, s->head_dim, s->rank, vectors);
        directions_of_covariance(x, vectors, s);
    }
    bury(x, largest * prescale, s);
    hadamard_rotate_wide(s->centroid, s->head_dim);
    for (uint32_t i = 0; i < s->rank; i++)
        if (s->strength[i] > 0)
            hadamard_rotate(s->direction[i], s->head_dim);
}

/* ---- encoding ---- */

typedef int8_t codes __attribute__((vector_size(LANES)));

/* to[i] = round(x[i] * scale), clipped to +-most, plus bias */
LK_INLINE void encode(const float *x, uint32_t count, double scale, float most, float bias,
                      uint8_t *to) {
    for (uint32_t i = 0; i < count; i += LANES) {
        lanes v = lanes_round(lanes_load(x + i) * (float)scale);
        v = -lanes_max(-lanes_max(v, lanes_set(-most)), lanes_set(-most)) + bias;
        codes c = __builtin_convertvector(__builtin_convertvector(v, ilanes), codes);
        memcpy(to + i, &c, sizeof(c));
    }
}

/* Smallest bf16 >= x >= 0. */
LK_INLINE uint16_t bf16_up(double x) {
    float f = (float)x;
    uint32_t bits;

    if (f < x)
        f = nextafterf(f, INFINITY);
    memcpy(&bits, &f, 4);
    return (uint16_t)((bits + 0xffff) >> 16);
}

LK_INLINE double bf16_value(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

LK_INLINE void put_scale(uint8_t *scales, uint32_t i, uint16_t scale) {
    memcpy(scales + 2 * i, &scale, 2);
}

typedef int32_t wide_ints __attribute__((vector_size(4 * WIDE)));
typedef uint8_t wide_codes __attribute__((vector_size(WIDE)));

LK_INLINE void encode_centroid(const struct summary *s, uint8_t *to, uint8_t *scales) {
    double largest = 0;
    for (uint32_t c = 0; c < s->head_dim; c++)
        largest = fmax(largest, fabs(s->centroid[c]));
    uint16_t scale = bf16_up(largest / s->prescale / CODE_MAX);
    double unit = bf16_value(scale) * s->prescale, step = unit > 0 ? 1 / unit : 0;

    for (uint32_t c = 0; c < s->head_dim; c += WIDE) { /* none is beyond CODE_MAX: see bf16_up() */
        wide v = (wide_load(s->centroid + c) * step + 0x1.8p52) - 0x1.8p52;
        wide_ints whole = __builtin_convertvector(v + LK_CENTROID_BIAS, wide_ints);
        wide_codes code = __builtin_convertvector(whole, wide_codes);
        memcpy(to + c, &code, sizeof(code));
    }
    put_scale(scales, 0, scale);
}

/* Basis codes of directions i and i + 1, interleaved as record.h says. */
LK_INLINE void encode_pair(const struct summary *s, uint32_t i, const double *step, uint8_t *to) {
    uint8_t code[2][LK_HEAD_DIM_MAX];

    for (uint32_t n = 0; n < 2; n++)
        encode(s->direction[i + n], s->head_dim, step[n], BASIS_MAX, LK_BASIS_BIAS, code[n]);
    for (uint32_t k = 0; k < s->head_dim / 8; k++)
        for (uint32_t n = 0; n < 2; n++) {
            uint32_t half[2];
            memcpy(half, code[n] + 8 * k, 8);
            half[0] |= half[1] << 4;
            memcpy(to + (2 * k + n) * 4, half, 4);
        }
}

/* Coefficients and scale of direction i. -> what its basis is multiplied by to give codes */
LK_INLINE double encode_coeffs(const struct summary *s, uint32_t i, uint8_t *to, uint16_t *scale) {
    uint8_t code[KEYS_MAX + LANES];
    double basis = 0, step = 0, unit = 0;
    float highest = 0, sign = 1;

    *scale = 0;
    if (s->strength[i] > 0) {
        for (uint32_t t = 0; t < s->tokens; t++)
            if (fabsf(s->coeff[i][t]) > highest) {
                highest = fabsf(s->coeff[i][t]);
                sign = s->coeff[i][t] < 0 ? -1 : 1;
            }
        float most = largest_of(s->direction[i], s->head_dim);
        step = sign * (double)BASIS_MAX / most;
        basis = most / s->length[i] / BASIS_MAX;
        *scale = bf16_up(s->strength[i] * highest / CODE_MAX * basis / s->prescale);
        unit = sign * s->strength[i] * basis / (bf16_value(*scale) * s->prescale);
    }
    encode(s->coeff[i], s->tokens, unit, CODE_MAX, 0, code);
    memcpy(to, code, s->tokens);
    return step;
}

/* Directions first.. of s into the record at `to`. */
LK_INLINE void encode_record(const struct summary *s, const struct lk_record *r, uint32_t first,
                             uint8_t *to) {
    uint8_t *scales = to + lk_record_scales(r);

    if (r->centroid)
        encode_centroid(s, to, scales);
    for (uint32_t i = 0; i < r->directions; i += 2) {
        double step[2];
        for (uint32_t n = 0; n < 2; n++) {
            uint16_t scale;
            uint8_t *coeffs = to + lk_record_coeffs(r) + (i + n) * r->tokens;
            step[n] = encode_coeffs(s, first + i + n, coeffs, &scale);
            put_scale(scales, i + n + r->centroid, scale);
        }
        encode_pair(s, first + i, step, to + lk_record_pairs(r) + i / 2 * r->head_dim);
    }
}

/* ---- pages and superpages ---- */

static void build_page(const struct lk_pool_view *pool, uint32_t layer, uint64_t page,
                       uint32_t head, struct lk_scratch *scratch) {
    const struct lk_geometry *g = &pool->geometry;
    struct lk_record coarse = lk_record_coarse(g), fine = lk_record_fine(g);
    struct summary *s = &scratch->summary;

    s->head_dim = g->head_dim;
    s->tokens = g->page_tokens;
    s->rank = g->rank;
    float largest = load_keys(g->dtype, lk_page_keys(pool, layer, page, head),
                              g->page_tokens * g->head_dim, scratch->x);
    summarise(scratch, largest);
    encode_record(s, &coarse, 0, lk_page_coarse(pool, layer, page, head));
    encode_record(s, &fine, LK_COARSE_RANK, lk_page_fine(pool, layer, page, head));
}

static void build_super(const struct lk_pool_view *pool, uint32_t layer, uint64_t quad,
                        uint32_t head, struct lk_scratch *scratch) {
    const struct lk_geometry *g = &pool->geometry;
    struct lk_record record = lk_record_super(g);
    uint32_t count = g->page_tokens * g->head_dim;
    struct summary *s = &scratch->summary;
    float largest = 0;

    s->head_dim = g->head_dim;
    s->tokens = LK_QUAD_PAGES * g->page_tokens;
    s->rank = LK_COARSE_RANK;
    for (uint32_t i = 0; i < LK_QUAD_PAGES; i++) {
        const uint8_t *keys = lk_page_keys(pool, layer, quad * LK_QUAD_PAGES + i, head);
        largest = fmaxf(largest, load_keys(g->dtype, keys, count, scratch->x + i * count));
    }
    summarise(scratch, largest);
    encode_record(s, &record, 0, lk_quad_super(pool, layer, quad, head));
}

#endif
