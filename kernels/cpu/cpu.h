/* SPDX-License-Identifier: MIT */
/*
 * cpu.h - the CPU backend's kernels, one call a task. See ../kernels.h for the contract of the
 * data.
 *
 * Every function is pure on its arguments, may run on any thread, never blocks, allocates or logs.
 * None takes more than 256 KiB of stack with all it calls.
 * Paths (portable C, AVX2, AVX-512 with VNNI) are chosen once by lk_cpu_open(); storage is the same
 * for all.
 */
#ifndef LK_CPU_H
#define LK_CPU_H

#include "../kernels.h"

enum lk_cpu_path { LK_CPU_BEST = 0, LK_CPU_PORTABLE, LK_CPU_AVX2, LK_CPU_AVX512 };

/* Choose the path (BEST: the machine's). -ENOTSUP: this machine lacks it; nothing changes. Before
 * any other call. */
int lk_cpu_open(enum lk_cpu_path path);
bool lk_cpu_has(enum lk_cpu_path path); /* whether this machine can take it; any time */
/* The one chosen: PORTABLE, AVX2 or AVX512. Any thread, like the next. */
enum lk_cpu_path lk_cpu_path(void);
const char *lk_cpu_path_name(enum lk_cpu_path path);

/* Sizes and strides of the records of a valid geometry. */
void lk_cpu_layout(const struct lk_geometry *geometry, struct lk_layout *ret);

/* ---- store ---- */
void lk_cpu_append(const struct lk_row *row,
                   uint32_t head); /* all appended tokens of one KV head */
void lk_cpu_write(const struct lk_write *write, uint32_t head);
void lk_cpu_copy(const struct lk_copy *copy, uint32_t head);

/* ---- build (DESIGN section 1, "Build") ---- */

/* Keys that are not finite count as 0: they spoil the estimate of their own token only, and every
 * scale stored is finite. Paths may differ in a code by one. scratch: one for each thread, aligned
 * to 64 bytes, whatever it holds. */
struct lk_scratch;
size_t lk_cpu_scratch_bytes(void); /* 1.4 MiB, a multiple of 64 */
void lk_cpu_build(const struct lk_pool_view *pool, uint32_t layer, uint64_t page, uint32_t head,
                  struct lk_scratch *scratch);
void lk_cpu_build_super(const struct lk_pool_view *pool, uint32_t layer, uint64_t quad,
                        uint32_t head, struct lk_scratch *scratch);

/* ---- query ---- */

/* A group's queries, rotated by the Hadamard matrix and quantised to 16 bits (24 where they meet
 * centroids). Private layout. */
struct lk_query;
size_t lk_cpu_query_bytes(const struct lk_geometry *geometry); /* multiple of 64 */
/* q of KV head `head` of the row's first token: only rows of one token are scored. */
void lk_cpu_prepare(const struct lk_row *row, uint32_t head, struct lk_query *ret);

/* ---- score: scores[g * stride + j] = estimated ln of the mass of page j for query head g of the
 * group ----
 *
 * Finite whatever the record and the query hold, but NaN for a head whose query is not finite. Bits
 * depend on path, record and the head's query alone. Paths differ by 1e-4 + 2e-6 * the page's
 * largest logit. No other place in scores is written. */
/* Pages first..first+count-1 of the row at `rank` directions (LK_COARSE_RANK or the geometry's). */
void lk_cpu_score(const struct lk_row *row, uint32_t head, const struct lk_query *query,
                  uint32_t rank, uint64_t first, uint64_t count, float *scores, uint64_t stride);
/* The listed pages (ascending indices of the row), each result at its page's place. */
void lk_cpu_score_list(const struct lk_row *row, uint32_t head, const struct lk_query *query,
                       uint32_t rank, const uint32_t *pages, uint64_t count, float *scores,
                       uint64_t stride);
/* Superpages first..: scores[g * stride + u] = estimated ln mass of the whole quad u of the row. */
void lk_cpu_score_super(const struct lk_row *row, uint32_t head, const struct lk_query *query,
                        uint64_t first, uint64_t count, float *scores, uint64_t stride);

/* ---- the row's stages; all intermediate state is in row->workspace ---- */

size_t lk_cpu_row_workspace_bytes(
    const struct lk_row *row); /* from geometry, length, tokens, budget, scan */
/* Tasks a stage has for a row: a function of the row alone. Task t of a stage is independent of its
 * others. */
uint32_t lk_cpu_prepare_tasks(const struct lk_row *row);
uint32_t lk_cpu_scan_tasks(const struct lk_row *row); /* first pass over all pages or superpages */
uint32_t
lk_cpu_prune_tasks(const struct lk_row *row); /* nested, tree: which pages are scored again */
uint32_t lk_cpu_rescan_tasks(const struct lk_row *row); /* nested, tree: at rank r */
uint32_t lk_cpu_select_tasks(const struct lk_row *row); /* shares, kept pages, sample */
uint32_t lk_cpu_attend_tasks(const struct lk_row *row); /* split-KV partials */
uint32_t lk_cpu_merge_tasks(const struct lk_row *row);  /* out, lse, mass, list, byte counts */
void lk_cpu_prepare_task(struct lk_row *row, uint32_t task);
void lk_cpu_scan_task(struct lk_row *row, uint32_t task);
void lk_cpu_prune_task(struct lk_row *row, uint32_t task);
void lk_cpu_rescan_task(struct lk_row *row, uint32_t task);
void lk_cpu_select_task(struct lk_row *row, uint32_t task);
void lk_cpu_attend_task(struct lk_row *row, uint32_t task);
void lk_cpu_merge_task(struct lk_row *row, uint32_t task);

#endif
