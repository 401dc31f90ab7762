/* SPDX-License-Identifier: MIT */
/*
 * absent.c - what stands for the CUDA backend where the binary is built without it: refusals.
 */
#include <errno.h>
#include <stdio.h>

#include "../backend.h"

static int refuse(char *why, size_t why_bytes) {
    snprintf(why, why_bytes,
             "this binary was built without CUDA (no nvcc of CUDA 13 or later was there)");
    return -ENOTSUP;
}

int lk_cuda_engine_usable(uint32_t gpu, char *why, size_t why_bytes) {
    (void)gpu;
    return refuse(why, why_bytes);
}

int lk_cuda_engine_holds(uint32_t gpu, const struct lk_geometry *geometry, char *why,
                         size_t why_bytes) {
    (void)gpu;
    (void)geometry;
    return refuse(why, why_bytes);
}

int lk_cuda_engine_open(const struct lk_engine_options *options, struct lk_engine **ret, char *why,
                        size_t why_bytes) {
    (void)options;
    *ret = NULL;
    return refuse(why, why_bytes);
}
