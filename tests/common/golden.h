/* SPDX-License-Identifier: MIT */
/*
 * golden.h - a case of tests/golden (tests/tools/golden.py writes them), a pool that holds its
 * keys, and records read back by the words of record.h alone.
 *
 * A pool has one layer and one KV head; its memory beyond the keys is poisoned. Single thread.
 */
#ifndef GOLDEN_H
#define GOLDEN_H

#include "../../kernels/cpu/cpu.h"

struct golden_summary { /* of `count` pages; all but scales are codes */
    uint32_t count, tokens, rank;
    int8_t *centroid;      /* [count][d] */
    float *centroid_scale; /* [count] */
    int8_t *basis;         /* [count][rank][d] */
    int8_t *coeffs;        /* [count][rank][tokens] */
    float *scales;         /* [count][rank] */
};

struct golden {
    const char *name;
    struct lk_geometry geometry;
    uint32_t pages;
    uint8_t *data;           /* the file; keys and queries point into it */
    const uint8_t *keys, *q; /* [pages][B][d], [group][d] in dtype */
    struct golden_summary page, super;
    float *score, *coarse_score; /* [group][pages] */
    float *super_score;          /* [group][pages / 4] */
};

extern const char *const golden_names[]; /* NULL at the end */

struct golden *golden_open(const char *name); /* fails the test if it cannot */
void golden_close(struct golden *golden);

/* A pool of `pages` pages of a geometry, poisoned; golden_fill() puts keys [pages][B][d] into
 * it. */
struct lk_pool_view golden_pool(const struct lk_geometry *geometry, uint32_t pages);
void golden_pool_free(struct lk_pool_view *pool);
struct lk_scratch *golden_scratch(void); /* for who builds; one thread */
void golden_fill(struct lk_pool_view *pool, const uint8_t *keys, uint32_t pages);

/* Records of all pages (all ranks), or of all quads. */
struct golden_summary golden_read(const struct lk_pool_view *pool, bool super);
void golden_summary_free(struct golden_summary *summary);

/* Queries [group][d] rotated, as doubles, by the plain matrix. */
void golden_rotate(const struct lk_geometry *geometry, const uint8_t *q, double *ret);
/* The score of page j by its definition, in double precision; ret_range: the largest |mu| +
 * |x_t|. */
double golden_score(const struct golden_summary *summary, uint32_t head_dim, uint32_t j,
                    uint32_t rank, const double *q, double sm_scale, double *ret_range);

#endif
