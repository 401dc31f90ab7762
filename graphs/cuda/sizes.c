/* SPDX-License-Identifier: MIT */
/*
 * sizes.c - see sizes.h. Built with and without nvcc.
 */
#include "sizes.h"

#include <errno.h>
#include <stdio.h>

#include "../../kernels/cuda/cuda.h"

static uint64_t reserve(uint64_t *bytes, uint64_t size) {
    uint64_t at = *bytes;

    *bytes += (size + LK_CUDA_ALIGN - 1) / LK_CUDA_ALIGN * LK_CUDA_ALIGN;
    return at;
}

struct lk_cuda_share lk_cuda_share_of(const struct lk_row *row) {
    const struct lk_geometry *g = &row->pool->geometry;
    uint64_t ids = UINT64_C(1) << row->table_shift; /* pages of an entry */
    uint64_t head = (uint64_t)g->head_dim * 2;      /* 16-bit elements */
    struct lk_cuda_share s = {0};

    s.entries = (lk_row_pages(row) + ids - 1) / ids;
    s.table_bytes = (s.entries * sizeof(uint32_t) + 15) / 16 * 16;
    s.q_bytes = row->tokens * (uint64_t)g->kv_heads * g->group * head;
    if (row->append <= LK_CUDA_FEED_TOKENS)
        s.kv_bytes = row->append * (uint64_t)g->kv_heads * head;
    s.table = reserve(&s.rest, s.table_bytes);
    s.q = reserve(&s.rest, s.q_bytes);
    s.k = reserve(&s.rest, s.kv_bytes);
    s.v = reserve(&s.rest, s.kv_bytes);
    return s;
}

uint64_t lk_cuda_engine_row_workspace(const struct lk_row *row) {
    uint64_t bytes = lk_cuda_share_of(row).rest;

    reserve(&bytes, lk_cuda_row_workspace_bytes(row));
    return bytes;
}

int lk_cuda_geometry_refused(const struct lk_geometry *g, const char *gpu, uint32_t least,
                             uint32_t lent, char *why, size_t why_bytes) {
    if (g->dtype == LK_FP32)
        snprintf(why, why_bytes,
                 "a pool of fp32 cannot lie on a GPU: bf16 or fp16, or device = cpu");
    else if (least > lent)
        snprintf(why, why_bytes,
                 "%s, lends a block %u KiB of shared memory, head_dim %u with page_tokens %u and "
                 "rank %u needs %u",
                 gpu, lent >> 10, g->head_dim, g->page_tokens, g->rank, (least + 1023) >> 10);
    else
        return 0;
    return -ENOTSUP;
}
