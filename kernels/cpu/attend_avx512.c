/* SPDX-License-Identifier: MIT */
/*
 * attend_avx512.c - the loops of attend.h for AVX-512; see attend_loops.h, whose text this
 * compiles. Any thread.
 */
#define LK_VECTOR lk_vector_avx512
#include "attend_loops.h"
