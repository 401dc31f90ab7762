/* SPDX-License-Identifier: MIT */
/*
 * build_avx512.c - summary building compiled for AVX-512.
 *
 * Any thread. Everything is in build_lanes.h.
 */
#include "build_lanes.h"

const struct lk_build_path lk_build_avx512 = {build_page, build_super};
