/* SPDX-License-Identifier: MIT */
/*
 * dispatch.h - which of a kernel's variants this machine runs.
 *
 * Every kernel with vector variants asks lk_cpu_path() (cpu.h) which of them to run, by a table or
 * a switch; the path is chosen once, by lk_cpu_open(), before any other call. A program that never
 * opens runs the portable path.
 */
#ifndef LK_CPU_DISPATCH_H
#define LK_CPU_DISPATCH_H

#include "cpu.h"

#define LK_CPU_PATHS (LK_CPU_AVX512 + 1) /* tables by path; LK_CPU_BEST's place is unused */

#endif
