/* SPDX-License-Identifier: MIT */
/*
 * bed.h - a pool filled with known tokens and rows upon it, for tests of kernels and engine.
 *
 * The pool's memory is poisoned (all ones: NaN in every dtype) before tokens are appended by the
 * store under test, and its pages are scattered over the pool. Tokens are kept as doubles, rounded
 * to the dtype, so that references are computed from them without any code of the kernels. Single
 * thread.
 */
#ifndef BED_H
#define BED_H

#include <stdint.h>

#include "../../kernels/cpu/cpu.h"

struct bed {
    struct lk_pool_view pool;
    uint8_t *memory;
    uint64_t tokens, pages;
    uint32_t *table;             /* of quads */
    uint8_t *k, *v, *q;          /* as a client gives them; q [tokens][heads] */
    double *dk, *dv, *dq;        /* the same as doubles */
    float *out, *lse;            /* [tokens_of_row][heads] */
    struct lk_head_out *result;  /* [kv_heads] */
    struct lk_page_weight *list; /* [kv_heads][pages] */
    struct lk_row row;           /* attends all tokens exactly, one query; change at will */
};

/* A reproducible normal deviate. */
double bed_normal(uint64_t *state);
double bed_round(uint32_t dtype, double x);             /* to what the dtype can hold */
void bed_store(uint32_t dtype, void *at, double value); /* a value that it can hold */

/* scale: of keys. Appends `tokens` at layer 1 of 2 and summarises what is complete. */
struct bed *bed_open(const struct lk_geometry *geometry, uint64_t tokens, double scale);
void bed_close(struct bed *bed);
/* Set a token's key or value (k: 0, v: 1), in the page and in the double copy. */
void bed_set(struct bed *bed, int v, uint64_t token, uint32_t head, uint32_t channel, double x);
void bed_build(struct bed *bed); /* summarise all complete pages and quads */

/* All stages of a row, task after task, with a workspace of its own filled with `fill` beforehand.
 * */
void bed_run(struct lk_row *row, uint8_t fill);

/* Reference: output and log mass of query `token` (of the row), query head h, over its first
 * `sight` tokens; weight [pages] or NULL: of each page, 0: not attended. */
double bed_attend(const struct bed *bed, uint32_t token, uint32_t h, uint64_t sight,
                  const double *weight, double *ret_out);

#endif
