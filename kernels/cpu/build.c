/* SPDX-License-Identifier: MIT */
/*
 * build.c - builds a page's or superpage's summary on the chosen path; holds the portable one.
 *
 * Any thread; tasks write disjoint records. Does not know when a page is complete.
 */
#include "build_lanes.h"
#include "dispatch.h"

const struct lk_build_path lk_build_portable = {build_page, build_super};

static const struct lk_build_path *path(void) {
#ifdef __x86_64__
    switch (lk_cpu_path()) {
    case LK_CPU_AVX512:
        return &lk_build_avx512;
    case LK_CPU_AVX2:
        return &lk_build_avx2;
    default:
        break;
    }
#endif
    return &lk_build_portable;
}

size_t lk_cpu_scratch_bytes(void) {
    return sizeof(struct lk_scratch);
}

void lk_cpu_build(const struct lk_pool_view *pool, uint32_t layer, uint64_t page, uint32_t head,
                  struct lk_scratch *scratch) {
    path()->page(pool, layer, page, head, scratch);
}

void lk_cpu_build_super(const struct lk_pool_view *pool, uint32_t layer, uint64_t quad,
                        uint32_t head, struct lk_scratch *scratch) {
    path()->super(pool, layer, quad, head, scratch);
}
