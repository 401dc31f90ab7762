/* SPDX-License-Identifier: MIT */
/*
 * attend_avx2.c - the loops of attend.h for AVX2; see attend_loops.h, whose text this compiles.
 * Any thread.
 */
#define LK_VECTOR lk_vector_avx2
#include "attend_loops.h"
