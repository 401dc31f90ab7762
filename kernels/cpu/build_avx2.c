/* SPDX-License-Identifier: MIT */
/*
 * build_avx2.c - summary building compiled for AVX2.
 *
 * Any thread. Everything is in build_lanes.h.
 */
#include "build_lanes.h"

const struct lk_build_path lk_build_avx2 = {build_page, build_super};
