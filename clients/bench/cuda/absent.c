/* SPDX-License-Identifier: MIT */
/*
 * absent.c - what stands for `device` where locks-bench is built without CUDA: a refusal.
 */
#include <stdio.h>
#include <sysexits.h>

#include "../bench.h"

int bench_device(struct bench *bench) {
    snprintf(bench->why, sizeof(bench->why),
             "this locks-bench was built without CUDA (no nvcc was found)");
    return EX_UNAVAILABLE;
}
