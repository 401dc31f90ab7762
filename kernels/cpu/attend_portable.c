/* SPDX-License-Identifier: MIT */
/*
 * attend_portable.c - the loops of attend.h for plain C's vector types; see attend_loops.h, whose
 * text this compiles. Any thread.
 */
#define LK_VECTOR lk_vector_portable
#include "attend_loops.h"
