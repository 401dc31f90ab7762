/* SPDX-License-Identifier: MIT */
/*
 * kernels.h - the one contract between the pipeline (graphs/) and the mathematics of a device.
 *
 * Idea: a batch is an array of rows. A row is one sequence (or table) at one layer with `tokens`
 * queries, and carries every per-step value itself, so that a prepared pipeline is replayed with
 * nothing baked in. Stages run over (row, KV head, split) tasks; tasks of a stage are independent,
 * stages are ordered:
 *
 *   copy -> append -> build (of what bulk writes sealed)
 *        -> prepare -> scan -> prune -> rescan -> select -> attend -> merge
 *        -> [fence: results are complete] -> build (of pages this step closed)
 *
 * Invariants
 *   - A row's bits depend on that row alone: every split is a function of its own length, never of
 *     the number of threads or of its neighbours.
 *   - Nothing beyond a row's length is read into a result: stale bytes (NaN, inf) are skipped, not
 *     masked by a product.
 *   - Kernels never allocate, wait or log. Workspace is given, sized by the
 *     backend's lk_*_row_workspace_bytes().
 *   - Client memory (q, k, v, slots) may change under the reader: each value is read once where a
 *     decision hangs on it; no index is ever read from it here. out, lse, list and result are
 *     written, never read.
 *   - Logits are q.k * sm_scale, natural logarithm everywhere. Non-finite keys or queries spoil
 *     their own row only; every loop ends all the same.
 *
 * Memory of a pool, one view for all layers (page ids are shared by the layers):
 *   kv      [layer][page][kv_head][K, V][page_tokens][head_dim]         element type `dtype`
 *   coarse  [layer][kv_head][page]      centroid, its scale, directions 1-2 and their scales
 *   fine    [layer][kv_head][page]      directions 3..rank and their scales
 *   super   [layer][kv_head][page / 4]  rank-2 summary of four aligned pages' 4*page_tokens keys
 * The inside of a summary record is the backend's own; only its bytes are in lk_layout. A quad is
 * four aligned pages (page id divisible by four), the unit of allocation.
 */
#ifndef LK_KERNELS_H
#define LK_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LK_KV_HEADS_MAX    256
#define LK_GROUP_MAX       32  /* query heads of a KV head */
#define LK_HEAD_DIM_MAX    256 /* largest head dimension of the models served */
#define LK_PAGE_TOKENS_MAX 64  /* Gram matrix of a page stays 64 x 64 */
#define LK_RANK_MAX        16
#define LK_COARSE_RANK     2  /* directions of the coarse plane and of superpages */
#define LK_QUAD_PAGES      4  /* pages of a superpage and of an allocation */
#define LK_NESTED_BUDGETS  8  /* pages rescored by `nested`, in budgets */
#define LK_TREE_BUDGETS    16 /* pages rescored by `tree`, in budgets */
#define LK_MASS_PAGES_MIN  4  /* a mass target keeps at least so many */

enum lk_element { LK_BF16 = 1, LK_FP16 = 2, LK_FP32 = 3 };
enum lk_scan_mode { LK_FULL = 1, LK_COARSE = 2, LK_NESTED = 3, LK_TREE = 4 };

struct lk_geometry {
    uint32_t layers, kv_heads, group, head_dim, page_tokens, rank;
    uint32_t dtype; /* enum lk_element */
};

/* NULL if supported, else a sentence in text that begins with the field's name and says its value
 * and what it may be. */
const char *lk_geometry_invalid(const struct lk_geometry *geometry, char *text, size_t bytes);

/* Bytes of the parts. *_bytes are what a scan reads (DESIGN's accounting: d 128, B 16, r 8: 294 and
 * 492), *_stride what lies between records, a multiple of the backend's alignment. */
struct lk_layout {
    uint32_t element_bytes;
    uint32_t coarse_bytes, fine_bytes, super_bytes;
    uint32_t coarse_stride, fine_stride, super_stride;
    uint64_t head_bytes; /* K and V of one KV head and page: 2 * page_tokens * head_dim *
                            element_bytes */
    uint64_t page_bytes; /* kv_heads * head_bytes */
};

struct lk_pool_view {
    struct lk_geometry geometry;
    struct lk_layout layout;
    uint64_t pages; /* multiple of LK_QUAD_PAGES */
    uint8_t *kv, *coarse, *fine, *super;
};

/* The only address arithmetic on a pool. */
static inline uint8_t *lk_page_keys(const struct lk_pool_view *p, uint32_t layer, uint64_t page,
                                    uint32_t head) {
    return p->kv + ((uint64_t)layer * p->pages + page) * p->layout.page_bytes +
           head * p->layout.head_bytes;
}
static inline uint8_t *lk_page_values(const struct lk_pool_view *p, uint32_t layer, uint64_t page,
                                      uint32_t head) {
    return lk_page_keys(p, layer, page, head) + p->layout.head_bytes / 2;
}
static inline uint8_t *lk_page_coarse(const struct lk_pool_view *p, uint32_t layer, uint64_t page,
                                      uint32_t head) {
    return p->coarse + (((uint64_t)layer * p->geometry.kv_heads + head) * p->pages + page) *
                           p->layout.coarse_stride;
}
static inline uint8_t *lk_page_fine(const struct lk_pool_view *p, uint32_t layer, uint64_t page,
                                    uint32_t head) {
    return p->fine + (((uint64_t)layer * p->geometry.kv_heads + head) * p->pages + page) *
                         p->layout.fine_stride;
}
static inline uint8_t *lk_quad_super(const struct lk_pool_view *p, uint32_t layer, uint64_t quad,
                                     uint32_t head) {
    return p->super +
           (((uint64_t)layer * p->geometry.kv_heads + head) * (p->pages / LK_QUAD_PAGES) + quad) *
               p->layout.super_stride;
}

enum lk_head_out_flag { LK_OUT_EXACT = 1, LK_OUT_ESTIMATED = 2 };

struct lk_head_out { /* laid out as the wire's lk_head_result */
    uint32_t kept, sampled;
    float mass;
    uint32_t flags; /* enum lk_head_out_flag */
};

struct lk_page_weight { /* laid out as the wire's lk_page_entry */
    uint32_t page;
    float weight;
};

/* One row of a batch. Plain values and pointers the daemon has already checked. */
struct lk_row {
    const struct lk_pool_view *pool;
    uint32_t layer;
    uint32_t tokens; /* queries; more than one: attended exactly and causally. 0: append only */
    uint64_t length; /* tokens the last query attends, those appended by this row included; 0: out
                        0, LSE -inf */
    const uint32_t *table; /* physical ids: page j of the row is lk_row_page(row, j) */
    uint32_t table_shift;  /* 2: table of quads (sequences); 0: table of pages */
    uint32_t append;       /* tokens of k, v to append at length - append; 0: none */
    const void *q;         /* [tokens][kv_heads * group][head_dim], pool dtype */
    const void *k, *v;     /* [append][kv_heads][head_dim], pool dtype */
    float *out;            /* [tokens][kv_heads * group][head_dim] */
    float *lse;            /* [tokens][kv_heads * group] or NULL */
    struct lk_page_weight
        *list; /* [kv_heads][list_pages] or NULL; ascending, at most list_pages written */
    uint32_t list_pages;
    struct lk_head_out *result; /* [kv_heads] or NULL */
    uint32_t budget_pages;      /* N >= 1 */
    uint64_t budget_tokens;     /* a row no longer than this is exact */
    uint32_t
        sampled; /* m, already defaulted; the kernel lowers it so that sink and newest page fit */
    uint32_t sink_pages, recent_pages;
    uint32_t scan;      /* enum lk_scan_mode; tree only if every complete quad has a summary */
    uint32_t exact;     /* length fits the budget or is below dense_below: attend all */
    float mass_target;  /* below 1; 0: none */
    float sm_scale;     /* already defaulted */
    uint8_t *workspace; /* the backend's lk_*_row_workspace_bytes(row), aligned to 64 */
    /* Written by the row's stages: logical bytes read. */
    uint64_t score_bytes, select_bytes, attend_bytes;
};

static inline uint64_t lk_row_page(const struct lk_row *row, uint64_t j) {
    uint64_t mask = (UINT64_C(1) << row->table_shift) - 1;
    return ((uint64_t)row->table[j >> row->table_shift] << row->table_shift) + (j & mask);
}
static inline uint64_t lk_row_pages(const struct lk_row *row) { /* P */
    return (row->length + row->pool->geometry.page_tokens - 1) / row->pool->geometry.page_tokens;
}
static inline uint64_t
lk_row_complete(const struct lk_row *row) { /* pages that are scored from summaries */
    return row->length ? (row->length - 1) / row->pool->geometry.page_tokens : 0;
}

/* What a row's stages read, as far as its bytes follow from it. */
struct lk_row_reads {
    uint32_t scan;       /* enum lk_scan_mode; 0: nothing was scored, all is attended */
    uint64_t units;      /* of the first pass: pages or superpages */
    uint64_t candidates; /* pages of the second */
    uint64_t attended;   /* pages kept and sampled, all KV heads together */
};
/* Sets the row's logical bytes: score - records read in every pass, and the newest page's keys;
 * select - scores read, 4 bytes a query head and page (or superpage), in prune and in select;
 * attend - keys and values of the tokens attended, once a row. Those it has none of stay. */
void lk_row_count_bytes(struct lk_row *row, const struct lk_row_reads *reads);

/* k, v by slot, for tables: token i goes to page slot[i] / page_tokens at slot[i] % page_tokens. */
struct lk_write {
    const struct lk_pool_view *pool;
    uint32_t layer, tokens;
    const void *k, *v;     /* [tokens][kv_heads][head_dim] */
    const uint64_t *slots; /* physical, private copy; UINT64_MAX: skipped */
};

/* Copy one page of one layer, keys, values and summaries (super too if `quad`, for the quad that
 * holds it). */
struct lk_copy {
    const struct lk_pool_view *pool;
    uint32_t layer;
    uint32_t quad; /* 1: also the superpage summary; from and to are then first pages of quads */
    uint64_t from, to;
};

/* Summarise a complete page of one layer for all KV heads; quad: and then the superpage that holds
 * it. */
struct lk_build {
    const struct lk_pool_view *pool;
    uint32_t layer;
    uint32_t quad;
    uint64_t page;
};

#ifdef __cplusplus
}
#endif
#endif
