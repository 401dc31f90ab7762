/* SPDX-License-Identifier: MIT */
/*
 * build.h - the variants of summary building, one a path; build.c chooses.
 *
 * All variants are build_lanes.h compiled for another instruction set. They may differ in a code by
 * one, where a value lies on the edge between two.
 */
#ifndef LK_CPU_BUILD_H
#define LK_CPU_BUILD_H

#include "cpu.h"

struct lk_build_path {
    void (*page)(const struct lk_pool_view *pool, uint32_t layer, uint64_t page, uint32_t head,
                 struct lk_scratch *scratch);
    void (*super)(const struct lk_pool_view *pool, uint32_t layer, uint64_t quad, uint32_t head,
                  struct lk_scratch *scratch);
};

extern const struct lk_build_path lk_build_portable, lk_build_avx2, lk_build_avx512;

#endif
