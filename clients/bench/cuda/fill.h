/* SPDX-License-Identifier: MIT */
/*
 * fill.h - the bench's own kernels: what pools and rows are filled with, and plain reading.
 *
 * Launchers of fill.cu; all pointers are to device memory. -> 0 or a cudaError_t as an int. They
 * neither wait nor allocate.
 */
#ifndef BENCH_FILL_H
#define BENCH_FILL_H

#include "../keys.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Keys and values of all layers as keys.h makes them, bf16. normal: [BENCH_NORMALS]. */
int bench_fill_pages(const struct lk_pool_view *pool, const float *normal, void *stream);
/* bf16 queries [count]. */
int bench_fill_queries(uint16_t *to, uint64_t count, const float *normal, void *stream);
/* list[i] = layer << 48 | unit, unit < units (pages or quads), layer by layer; [layers * units]. */
int bench_fill_list(uint64_t *list, uint32_t layers, uint64_t units, void *stream);
/* Reads `bytes` (a multiple of 16), by so many blocks; once: as bytes that leave the cache before
 * others. sum: one word, so that the reads are not left out. */
int bench_read_all(const void *from, uint64_t bytes, uint32_t blocks, bool once, uint32_t *sum,
                   void *stream);

#ifdef __cplusplus
}
#endif
#endif
