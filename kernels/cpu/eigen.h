/* SPDX-License-Identifier: MIT */
/*
 * eigen.h - the largest eigenpairs of a small symmetric matrix, in double precision.
 *
 * Idea: Householder reflections make the matrix tridiagonal, implicit QL steps with Wilkinson's shift
 * make that diagonal, and the reflections are then applied to the wanted vectors only. Whole rows are
 * updated with vectors; the chain of QL rotations is scalar and its work on the vectors hides behind
 * it. Repeated eigenvalues need no care: vectors come out orthogonal whatever the gaps.
 *
 * Invariants
 *   - n is a multiple of 8, at most EIGEN_MAX. The matrix is positive semidefinite and finite.
 *   - Terminates: an eigenvalue that has not settled after EIGEN_STEPS steps is taken as it is.
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

struct eigen_tridiagonal {
    double diagonal[EIGEN_MAX], below[EIGEN_MAX]; /* below[i] couples i and i + 1 */
    double beta[EIGEN_MAX];                       /* of reflection k: I - beta v v^T */
};

/* Reflection k: v (in place over x, from k + 1 on) with (I - beta v v^T) x = alpha e. -> alpha. What is
 * below `least`, squared, is rounding noise: reflecting noise would breed smaller noise, until it
 * underflows. */
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
    double along = 0;

    for (uint32_t j = first; j < n; j += WIDE) {
        wide sum = {0};
        for (uint32_t i = k + 1; i < n; i++)
            sum = wide_fma(wide_load(a + i * n + j), wide_set(v[i]), sum);
        wide_store(w + j, sum * beta);
    }
    for (uint32_t i = k + 1; i < n; i++)
        along += w[i] * v[i];
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

/*
 * a [n][n], symmetric, destroyed; z [n][n] scratch. vectors [n][EIGEN_WANTED]: column i is the
 * eigenvector of the i-th largest eigenvalue, for i < wanted <= n; the other columns are zero.
 */
LK_INLINE void eigen_largest(double *a, double *z, uint32_t n, uint32_t wanted, double *vectors) {
    struct eigen_tridiagonal t;
    double *d = t.diagonal;

    eigen_reduce(a, n, &t);
    eigen_diagonalise(&t, z, n);
    memset(vectors, 0, (size_t)n * EIGEN_WANTED * sizeof(*vectors));
    for (uint32_t i = 0; i < wanted; i++) {
        uint32_t best = 0;
        for (uint32_t j = 1; j < n; j++)
            if (d[j] > d[best])
                best = j;
        d[best] = -INFINITY;
        for (uint32_t j = 0; j < n; j++)
            vectors[(size_t)j * EIGEN_WANTED + i] = z[(size_t)best * n + j];
    }
    for (uint32_t k = n; k-- > 0;) {
        const double *v = a + (size_t)k * n;
        if (t.beta[k] == 0)
            continue;
        for (uint32_t c = 0; c < wanted; c += WIDE) {
            wide along = {0};
            for (uint32_t i = k + 1; i < n; i++)
                along = wide_fma(wide_load(vectors + i * EIGEN_WANTED + c), wide_set(v[i]), along);
            along *= t.beta[k];
            for (uint32_t i = k + 1; i < n; i++) {
                double *y = vectors + i * EIGEN_WANTED + c;
                wide_store(y, wide_fma(along, wide_set(-v[i]), wide_load(y)));
            }
        }
    }
}

#endif
