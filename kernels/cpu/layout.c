/* SPDX-License-Identifier: MIT */
/*
 * layout.c - bytes and strides of a geometry's pages and summary records.
 *
 * Pure, any thread. The inside of a record is record.h's.
 */
#include "record.h"

static uint32_t stride_of(uint32_t bytes) {
    return (bytes + LK_RECORD_ALIGN - 1) / LK_RECORD_ALIGN * LK_RECORD_ALIGN;
}

static uint32_t bytes_of(struct lk_record record) {
    return lk_record_bytes(&record);
}

void lk_cpu_layout(const struct lk_geometry *geometry, struct lk_layout *ret) {
    uint32_t element = geometry->dtype == LK_FP32 ? 4 : 2;
    uint32_t coarse = bytes_of(lk_record_coarse(geometry));
    uint32_t fine = bytes_of(lk_record_fine(geometry));
    uint32_t super = bytes_of(lk_record_super(geometry));
    uint64_t head = UINT64_C(2) * geometry->page_tokens * geometry->head_dim * element;

    *ret = (struct lk_layout){
        .element_bytes = element,
        .coarse_bytes = coarse,
        .fine_bytes = fine,
        .super_bytes = super,
        .coarse_stride = stride_of(coarse),
        .fine_stride = stride_of(fine),
        .super_stride = stride_of(super),
        .head_bytes = head,
        .page_bytes = geometry->kv_heads * head,
    };
}
