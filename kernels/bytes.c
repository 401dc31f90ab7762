/* SPDX-License-Identifier: MIT */
/*
 * bytes.c - the logical bytes of a row, one count for every backend. See kernels.h.
 */
#include "kernels.h"

void lk_row_count_bytes(struct lk_row *row, const struct lk_row_reads *reads) {
    const struct lk_geometry *g = &row->pool->geometry;
    const struct lk_layout *l = &row->pool->layout;
    uint64_t token = (uint64_t)g->head_dim * l->element_bytes; /* a key */
    uint64_t newest = row->length - lk_row_complete(row) * g->page_tokens;
    uint64_t fine = l->coarse_bytes + l->fine_bytes, first = fine;

    if (!reads->scan) {
        row->attend_bytes = row->length * g->kv_heads * 2 * token;
        return;
    }
    if (reads->scan != LK_FULL)
        first = reads->scan == LK_TREE ? l->super_bytes : l->coarse_bytes;
    row->score_bytes =
        g->kv_heads * (reads->units * first + reads->candidates * fine + newest * token);
    uint64_t scores = lk_row_pages(row); /* of the last softmax; before it one over the units */
    if (reads->scan == LK_TREE)
        scores = reads->units + 1 + reads->candidates;
    scores += reads->candidates ? reads->units + 1 : 0;
    row->select_bytes = g->kv_heads * g->group * scores * 4;
    uint64_t whole = (reads->attended - g->kv_heads) * g->page_tokens; /* the newest is kept */
    row->attend_bytes = (whole + g->kv_heads * newest) * 2 * token;
}
