/* SPDX-License-Identifier: MIT */
/*
 * eigen.h - the largest eigenpairs of a small symmetric matrix, in double precision.
 *
 * Idea: Householder reflections make the matrix tridiagonal, its wanted pairs are found, and the
 * reflections are applied to those vectors alone. The pairs are found in one of two ways:
 *
 *   isolate      All wanted pairs at once, one a lane. Sturm counts at many points bracket each
 *                eigenvalue to float precision; then a twisted factorisation gives its vector and,
 *                by the Rayleigh quotient, a far better eigenvalue, three times. What came out is
 *                checked: residual, bracket, neighbours orthogonal.
 *   diagonalise  Implicit QL steps with Wilkinson's shift: whatever the gaps, vectors come out
 *                orthogonal. A chain of scalar rotations, four times as slow. Taken where isolate's
 *                checks fail: repeated eigenvalues.
 *
 * Invariants
 *   - n is a multiple of 8, at most EIGEN_MAX. The matrix is positive semidefinite and finite.
 *   - Vectors of eigenvalues below EIGEN_DEAD times the norm may be zero: no caller takes them for
 *     directions, and rounding makes many alike.
 *   - Terminates: every loop has a bound; an eigenvalue that has not settled after EIGEN_STEPS QL
 *     steps is taken as it is.
 * Pure, any thread; compiled for the path of the including file.
 */
#ifndef LK_CPU_EIGEN_H
#define LK_CPU_EIGEN_H

#include <math.h>

#include "lanes.h"

#define EIGEN_MAX     256
#define EIGEN_WANTED  LK_RANK_MAX
#define EIGEN_STEPS   40
#define EIGEN_NOISE   1e-15 /* of the largest entry */
#define EIGEN_SETTLED 1e-13 /* an off-diagonal so small beside the norm moves no stored code */
#define EIGEN_DEAD    4e-7  /* beside the norm, which is at most twice the largest eigenvalue */

#define EIGEN_CHAINS (32 / LANES) /* vectors of Sturm points: their divisions overlap */
#define EIGEN_PARTS  (1U << 22)   /* of the norm: a bracket is as narrow as floats can tell */
#define EIGEN_PASSES 3            /* each squares the error, divided by the gap */
#define EIGEN_PIVOT  1e-30        /* takes the place of smaller ones */
#define EIGEN_CLOSE  1e-9         /* residual beside the norm, at the end */
#define EIGEN_STRAY  4e-6         /* an eigenvalue further from its bracket is another one */
#define EIGEN_SKEW   1e-5         /* product of neighbouring vectors: what codes would show */

struct eigen_tridiagonal {
    double diagonal[EIGEN_MAX], below[EIGEN_MAX]; /* below[i] couples i and i + 1 */
    double beta[EIGEN_MAX];                       /* of reflection k: I - beta v v^T */
};

/* Reflection k: v (in place over x, from k + 1 on) with (I - beta v v^T) x = alpha e. -> alpha.
 * What is below `least`, squared, is rounding noise: reflecting noise would breed smaller noise,
 * until it underflows. */
LK_INLINE double eigen_reflect(double *x, uint32_t k, uint32_t n, double least, double *ret_beta) {
    double square = 0, tail = 0;

    for (uint32_t i = k + 2; i < n; i++)
        tail += x[i] * x[i];
    *ret_beta = 0;
    if (tail <= least)
        return x[k + 1];
    square = tail + x[k + 1] * x[k + 1];
    double alpha = x[k + 1] > 0 ? -sqrt(square) : sqrt(square);
    x[k + 1] -= alpha;
    *ret_beta = 2 / (tail + x[k + 1] * x[k + 1]);
    return alpha;
}

/* a <- (I - beta v v^T) a (I - beta v v^T) on rows and columns from k + 1 on. */
LK_INLINE void eigen_two_sided(double *a, const double *v, double beta, uint32_t k, uint32_t n) {
    double w[EIGEN_MAX];
    uint32_t first = (k + 1) / WIDE * WIDE;
    wide products = {0};
    double along = 0;

    for (uint32_t j = first; j < n; j += WIDE) {
        wide sum = {0};
        for (uint32_t i = k + 1; i < n; i++)
            sum = wide_fma(wide_load(a + i * n + j), wide_set(v[i]), sum);
        sum *= beta;
        wide_store(w + j, sum);
        products = wide_fma(sum, wide_load(v + j), products);
    }
    for (uint32_t l = 0; l < WIDE; l++)
        along += products[l];
    along *= beta / 2;
    for (uint32_t j = first; j < n; j += WIDE)
        wide_store(w + j, wide_load(w + j) - wide_load(v + j) * along);
    for (uint32_t i = k + 1; i < n; i++)
        for (uint32_t j = first; j < n; j += WIDE) {
            wide x = wide_load(a + i * n + j);
            x = wide_fma(wide_load(w + j), wide_set(-v[i]), x);
            x = wide_fma(wide_load(v + j), wide_set(-w[i]), x);
            wide_store(a + i * n + j, x);
        }
}

/* Row k of a becomes reflection k's vector, zero up to k. */
LK_INLINE void eigen_reduce(double *a, uint32_t n, struct eigen_tridiagonal *ret) {
    double largest = 0;
    for (uint32_t k = 0; k < n; k++)
        largest = fmax(largest, fabs(a[(size_t)k * n + k]));
    double least = EIGEN_NOISE * largest * EIGEN_NOISE * largest;

    for (uint32_t k = 0; k < n; k++) {
        double *v = a + (size_t)k * n;
        ret->diagonal[k] = v[k];
        ret->below[k] = k + 1 < n ? v[k + 1] : 0;
        ret->beta[k] = 0;
        if (k + 2 >= n)
            continue;
        memset(v, 0, (k + 1) * sizeof(*v));
        ret->below[k] = eigen_reflect(v, k, n, least, &ret->beta[k]);
        if (ret->beta[k] != 0)
            eigen_two_sided(a, v, ret->beta[k], k, n);
    }
}

/* The first m >= l whose coupling to m + 1 has vanished. */
LK_INLINE uint32_t eigen_split(const struct eigen_tridiagonal *t, uint32_t l, uint32_t n,
                               double least) {
    uint32_t m = l;
    while (m + 1 < n && fabs(t->below[m]) > least)
        m++;
    return m;
}

LK_INLINE void eigen_rotate(double *z, uint32_t n, uint32_t i, double c, double s) {
    double *low = z + (size_t)i * n, *high = low + n;
    for (uint32_t j = 0; j < n; j += WIDE) {
        wide x = wide_load(low + j), y = wide_load(high + j);
        wide_store(high + j, wide_fma(x, wide_set(s), y * c));
        wide_store(low + j, wide_fma(x, wide_set(c), y * -s));
    }
}

/* One implicit QL step on the block l..m, applied to the rows of z. */
LK_INLINE void eigen_step(struct eigen_tridiagonal *t, double *z, uint32_t l, uint32_t m,
                          uint32_t n) {
    double *d = t->diagonal, *e = t->below;
    double g = (d[l + 1] - d[l]) / (2 * e[l]), r = sqrt(g * g + 1), s = 1, c = 1, p = 0;

    g = d[m] - d[l] + e[l] / (g + copysign(r, g));
    for (uint32_t i = m; i-- > l;) {
        double f = s * e[i], b = c * e[i];
        r = sqrt(f * f + g * g);
        e[i + 1] = r;
        if (r == 0) { /* the block falls apart here */
            d[i + 1] -= p;
            e[m] = 0;
            return;
        }
        double inverse = 1 / r;
        s = f * inverse;
        c = g * inverse;
        g = d[i + 1] - p;
        r = (d[i] - g) * s + 2 * c * b;
        p = s * r;
        d[i + 1] = g + p;
        g = c * r - b;
        eigen_rotate(z, n, i, c, s);
    }
    d[l] -= p;
    e[l] = g;
    e[m] = 0;
}

/* z [n][n]: row i becomes the eigenvector of diagonal[i], in the tridiagonal's basis. */
LK_INLINE void eigen_diagonalise(struct eigen_tridiagonal *t, double *z, uint32_t n) {
    double norm = 0;

    memset(z, 0, (size_t)n * n * sizeof(*z));
    for (uint32_t i = 0; i < n; i++) {
        z[(size_t)i * n + i] = 1;
        norm = fmax(norm, fabs(t->diagonal[i]) + fabs(t->below[i]));
    }
    for (uint32_t l = 0; l < n; l++)
        for (uint32_t step = 0; step < EIGEN_STEPS; step++) {
            uint32_t m = eigen_split(t, l, n, EIGEN_SETTLED * norm);
            if (m == l)
                break;
            eigen_step(t, z, l, m, n);
        }
}

#if LANES > 4

LK_INLINE wide wide_choose(iwide where, wide yes, wide no) {
    return (wide)(((iwide)yes & where) | ((iwide)no & ~where));
}
LK_INLINE wide wide_abs(wide x) {
    return (wide)((iwide)x & INT64_MAX);
}
LK_INLINE lanes lanes_choose(ilanes where, lanes yes, lanes no) {
    return (lanes)(((ilanes)yes & where) | ((ilanes)no & ~where));
}

/* The tridiagonal over its norm. */
struct eigen_scaled {
    float diagonal[EIGEN_MAX], square[EIGEN_MAX]; /* square[i] = below[i]^2, never zero */
    double norm;
    uint32_t n;
};

LK_INLINE void eigen_scale(const struct eigen_tridiagonal *t, uint32_t n,
                           struct eigen_scaled *ret) {
    double norm = 0, before = 0;
    for (uint32_t i = 0; i < n; i++) {
        norm = fmax(norm, fabs(t->diagonal[i]) + fabs(t->below[i]) + before);
        before = fabs(t->below[i]);
    }
    ret->norm = norm;
    ret->n = n;
    double over = norm > 0 ? 1 / norm : 0;
    for (uint32_t i = 0; i < n; i++) {
        float e = (float)(t->below[i] * over);
        ret->diagonal[i] = (float)(t->diagonal[i] * over);
        ret->square[i] = fmaxf(e * e, 1e-30f);
    }
}

/* How many eigenvalues are less than each point: the negative pivots of T - x. */
LK_INLINE void eigen_counts(const struct eigen_scaled *t, const lanes *x, ilanes *ret) {
    lanes pivot[EIGEN_CHAINS];
    LK_UNROLL
    for (int c = 0; c < EIGEN_CHAINS; c++) {
        pivot[c] = t->diagonal[0] - x[c];
        ret[c] = -(pivot[c] < 0);
    }
    for (uint32_t i = 1; i < t->n; i++) {
        LK_UNROLL
        for (int c = 0; c < EIGEN_CHAINS; c++) {
            pivot[c] = (t->diagonal[i] - x[c]) - t->square[i - 1] / pivot[c];
            ret[c] -= pivot[c] < 0;
        }
    }
}

/*
 * Eigenvalues first..first + count - 1, largest first, over the norm. Lane l of a vector of points
 * looks for number first + l % slots, slots the power of two no less than count, at most LANES.
 */
LK_INLINE lanes eigen_bracket(const struct eigen_scaled *t, uint32_t first, uint32_t slots) {
    const int points = 32 / (int)slots; /* of each eigenvalue in a round */
    lanes low = lanes_set(-1e-6f), high = lanes_set(1 + 1e-6f), share[EIGEN_CHAINS];
    ilanes most; /* an eigenvalue is at least x if no more than this many are less than x */

    for (int l = 0; l < LANES; l++)
        most[l] = (int32_t)(t->n - 1 - first) - l % (int)slots;
    for (int c = 0; c < EIGEN_CHAINS; c++)
        for (int l = 0; l < LANES; l++) {
            int nth = (c * LANES + l) / (int)slots;
            share[c][l] = (float)(nth + 1) / (float)(points + 1);
        }
    for (uint64_t parts = 1; parts < EIGEN_PARTS; parts *= (uint64_t)points + 1) {
        lanes x[EIGEN_CHAINS], next_low = low, next_high = high;
        ilanes less[EIGEN_CHAINS];
        LK_UNROLL
        for (int c = 0; c < EIGEN_CHAINS; c++)
            x[c] = low + (high - low) * share[c];
        eigen_counts(t, x, less);
        LK_UNROLL
        for (int c = 0; c < EIGEN_CHAINS; c++) {
            ilanes above = less[c] <= most;
            next_low = lanes_max(next_low, lanes_choose(above, x[c], low));
            next_high = -lanes_max(-next_high, -lanes_choose(above, high, x[c]));
        }
        for (int distance = (int)slots; distance < LANES; distance *= 2) {
            next_low = lanes_max(next_low, lanes_swap(next_low, distance));
            next_high = -lanes_max(-next_high, -lanes_swap(next_high, distance));
        }
        low = next_low;
        high = next_high;
    }
    return (low + high) * 0.5f;
}

/* A factorisation of T - value from both ends, one eigenvalue a lane. */
struct eigen_twist {
    wide down[EIGEN_MAX], up[EIGEN_MAX]; /* what the vector is multiplied by, going away from at */
    wide gap; /* the smallest |pivot| where both ends meet, with its sign */
    wide at;  /* and where */
};

LK_INLINE wide eigen_pivot(wide x) {
    return wide_choose(wide_abs(x) < EIGEN_PIVOT, wide_set(EIGEN_PIVOT), x);
}

LK_INLINE void eigen_factor(const double *d, const double *e, uint32_t n, wide value,
                            struct eigen_twist *ret) {
    wide pivot[EIGEN_MAX];
    wide top = eigen_pivot(d[0] - value), bottom = eigen_pivot(d[n - 1] - value);

    pivot[0] = top;
    for (uint32_t i = 0; i + 1 < n; i++) { /* both chains at once: their divisions overlap */
        uint32_t j = n - 1 - i;
        ret->up[i] = e[i] / top;
        top = eigen_pivot((d[i + 1] - value) - e[i] * ret->up[i]);
        pivot[i + 1] = top;
        ret->down[j] = e[j - 1] / bottom;
        bottom = eigen_pivot((d[j - 1] - value) - e[j - 1] * ret->down[j]);
    }
    ret->gap = pivot[n - 1];
    ret->at = wide_set(n - 1);
    for (uint32_t i = 0; i + 1 < n; i++) {
        wide gap = pivot[i] - e[i] * ret->down[i + 1];
        iwide better = wide_abs(gap) < wide_abs(ret->gap);
        ret->gap = wide_choose(better, gap, ret->gap);
        ret->at = wide_choose(better, wide_set(i), ret->at);
    }
}

/* The vectors: 1 where the ends meet. -> their squared lengths */
LK_INLINE wide eigen_untwist(const struct eigen_twist *t, uint32_t n, wide *z) {
    wide v = {0}, square = {0};
    for (uint32_t i = n; i-- > 0;) {
        wide here = wide_set(i);
        v = wide_choose(t->at == here, wide_set(1), v * -t->up[i]);
        z[i] = v;
    }
    v = (wide){0};
    for (uint32_t i = 0; i < n; i++) {
        wide here = wide_set(i);
        iwide past = here > t->at;
        v = wide_choose(past, v * -t->down[i], wide_choose(t->at == here, wide_set(1), v));
        z[i] = wide_choose(past, v, z[i]);
        square = wide_fma(z[i], z[i], square);
    }
    return square;
}

/* Column i of vectors [n][EIGEN_WANTED] is a unit vector, or zero if it is not live -> whether
 * neighbours do not lean on each other. */
LK_INLINE bool eigen_orthogonal(const double *vectors, uint32_t n, uint32_t wanted) {
    for (uint32_t i = 1; i < wanted; i++) {
        double product = 0;
        for (uint32_t j = 0; j < n; j++)
            product += vectors[j * EIGEN_WANTED + i - 1] * vectors[j * EIGEN_WANTED + i];
        if (!(fabs(product) <= EIGEN_SKEW))
            return false;
    }
    return true;
}

/* Vectors first..first + WIDE - 1 from their bracketed eigenvalues. -> whether all live ones are
 * good */
LK_INLINE bool eigen_refine(const struct eigen_tridiagonal *t, const struct eigen_scaled *scaled,
                            const float *guess, uint32_t first, uint32_t wanted, double *vectors) {
    struct eigen_twist twist;
    wide z[EIGEN_MAX], value, start, square;
    const uint32_t n = scaled->n;
    bool good = true;

    for (uint32_t l = 0; l < WIDE; l++)
        value[l] = (double)guess[l] * scaled->norm;
    start = value;
    for (int pass = 0; pass < EIGEN_PASSES; pass++) {
        eigen_factor(t->diagonal, t->below, n, value, &twist);
        square = eigen_untwist(&twist, n, z);
        value += twist.gap / square;
    }
    for (uint32_t l = 0; l < WIDE; l++) {
        bool live = first + l < wanted && guess[l] > EIGEN_DEAD;
        double length = sqrt(square[l]), unit = live ? 1 / length : 0;
        good &= !live || (fabs(twist.gap[l]) / length <= EIGEN_CLOSE * scaled->norm &&
                          fabs(value[l] - start[l]) <= EIGEN_STRAY * scaled->norm);
        for (uint32_t i = 0; i < n; i++)
            vectors[i * EIGEN_WANTED + first + l] = live ? z[i][l] * unit : 0;
    }
    return good;
}

/* The wanted vectors in the tridiagonal's basis; false: some are not to be trusted. */
LK_INLINE bool eigen_isolate(const struct eigen_tridiagonal *t, uint32_t n, uint32_t wanted,
                             double *vectors) {
    struct eigen_scaled scaled;
    bool good = true;

    eigen_scale(t, n, &scaled);
    for (uint32_t first = 0; first < wanted; first += LANES) {
        uint32_t slots = wanted - first < LANES ? wanted - first : LANES;
        float guess[LANES];
        lanes_store(guess, eigen_bracket(&scaled, first, slots));
        for (uint32_t l = 0; l < slots; l += WIDE)
            good &= eigen_refine(t, &scaled, guess + l, first + l, wanted, vectors);
    }
    return good && eigen_orthogonal(vectors, n, wanted);
}

#endif

/* The same, by QL; z [n][n] scratch. */
LK_INLINE void eigen_diagonal_vectors(struct eigen_tridiagonal *t, double *z, uint32_t n,
                                      uint32_t wanted, double *vectors) {
    double *d = t->diagonal;

    eigen_diagonalise(t, z, n);
    for (uint32_t i = 0; i < wanted; i++) {
        uint32_t best = 0;
        for (uint32_t j = 1; j < n; j++)
            if (d[j] > d[best])
                best = j;
        d[best] = -INFINITY;
        for (uint32_t j = 0; j < n; j++)
            vectors[(size_t)j * EIGEN_WANTED + i] = z[(size_t)best * n + j];
    }
}

/* vectors <- the reflections, last first. */
LK_INLINE void eigen_reflect_back(const double *a, const struct eigen_tridiagonal *t, uint32_t n,
                                  uint32_t wanted, double *vectors) {
    for (uint32_t k = n; k-- > 0;) {
        const double *v = a + (size_t)k * n;
        if (t->beta[k] == 0)
            continue;
        for (uint32_t c = 0; c < wanted; c += WIDE) {
            wide along = {0};
            for (uint32_t i = k + 1; i < n; i++)
                along = wide_fma(wide_load(vectors + i * EIGEN_WANTED + c), wide_set(v[i]), along);
            along *= t->beta[k];
            for (uint32_t i = k + 1; i < n; i++) {
                double *y = vectors + i * EIGEN_WANTED + c;
                wide_store(y, wide_fma(along, wide_set(-v[i]), wide_load(y)));
            }
        }
    }
}

/*
 * a [n][n], symmetric, destroyed; z [n][n] scratch. vectors [n][EIGEN_WANTED]: column i is the
 * eigenvector of the i-th largest eigenvalue, for i < wanted <= n, wanted a power of two; the other
 * columns are zero.
 */
LK_INLINE void eigen_largest(double *a, double *z, uint32_t n, uint32_t wanted, double *vectors) {
    struct eigen_tridiagonal t;
    bool found = false;

    eigen_reduce(a, n, &t);
    memset(vectors, 0, (size_t)n * EIGEN_WANTED * sizeof(*vectors));
#if LANES > 4
    found = eigen_isolate(&t, n, wanted, vectors);
#endif
    if (!found)
        eigen_diagonal_vectors(&t, z, n, wanted, vectors);
    eigen_reflect_back(a, &t, n, wanted, vectors);
}

#endif
