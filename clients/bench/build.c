/* SPDX-License-Identifier: MIT */
/*
 * build.c - how fast one core summarises pages, on each path of kernels.
 *
 * A few pages over and over: what is measured is arithmetic, memory is not in the way. Time is this
 * thread's on a processor, so that others' work on the machine does not count.
 */
#include "bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <sysexits.h>
#include <time.h>

#include "../../kernels/cpu/cpu.h"
#include "../common/measure.h"
#include "keys.h"

#define PAGES   256
#define PASSES  9 /* of which the median is taken */
#define PASS_NS UINT64_C(30000000)
#define PARTS   4
#define ALIGN   4096

struct path {
    enum lk_cpu_path path;
    const char *key, *what;
    double target; /* pages a second; 0: none */
};

static const struct path paths[] = {
    {LK_CPU_PORTABLE, "build_portable", "build, portable", 0},
    {LK_CPU_AVX2, "build_avx2", "build, AVX2", 40000},
    {LK_CPU_AVX512, "build_avx512", "build, AVX-512", 100000},
};

static uint64_t part_bytes(const struct lk_pool_view *pool, int part) {
    const struct lk_layout *layout = &pool->layout;
    const uint64_t bytes[PARTS] = {
        pool->pages * layout->page_bytes, pool->pages * layout->coarse_stride,
        pool->pages * layout->fine_stride, pool->pages / LK_QUAD_PAGES * layout->super_stride};
    return (bytes[part] + ALIGN - 1) / ALIGN * ALIGN;
}

/* A small pool of one KV head in plain memory, which is returned. */
static void *make_pool(struct lk_pool_view *ret) {
    uint64_t bytes = 0;
    ret->geometry = (struct lk_geometry){.layers = 1,
                                         .kv_heads = 1,
                                         .group = 1,
                                         .head_dim = 128,
                                         .page_tokens = 16,
                                         .rank = 8,
                                         .dtype = LK_BF16};
    ret->pages = PAGES;
    lk_cpu_layout(&ret->geometry, &ret->layout);
    for (int part = 0; part < PARTS; part++)
        bytes += part_bytes(ret, part);
    uint8_t *memory = aligned_alloc(ALIGN, bytes);
    if (!memory)
        return NULL;
    ret->kv = memory;
    ret->coarse = ret->kv + part_bytes(ret, 0);
    ret->fine = ret->coarse + part_bytes(ret, 1);
    ret->super = ret->fine + part_bytes(ret, 2);
    return memory;
}

static uint64_t processor_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

static double pages_a_second(const struct lk_pool_view *pool, struct lk_scratch *scratch) {
    uint64_t begun = processor_ns(), built = 0, now = begun;
    while (now - begun < PASS_NS) {
        for (uint64_t page = 0; page < PAGES; page++)
            lk_cpu_build(pool, 0, page, 0, scratch);
        built += PAGES;
        now = processor_ns();
    }
    return (double)built / ((double)(now - begun) * 1e-9);
}

static double supers_a_second(const struct lk_pool_view *pool, struct lk_scratch *scratch) {
    uint64_t begun = processor_ns(), built = 0, now = begun;
    while (now - begun < PASS_NS) {
        for (uint64_t quad = 0; quad < PAGES / LK_QUAD_PAGES; quad++)
            lk_cpu_build_super(pool, 0, quad, 0, scratch);
        built += PAGES / LK_QUAD_PAGES;
        now = processor_ns();
    }
    return (double)built / ((double)(now - begun) * 1e-9);
}

static void measure_path(struct bench *bench, const struct path *path,
                         const struct lk_pool_view *pool, struct lk_scratch *scratch) {
    double pages[PASSES], supers[PASSES];
    for (int i = 0; i < PASSES; i++) {
        pages[i] = pages_a_second(pool, scratch);
        supers[i] = supers_a_second(pool, scratch);
    }
    struct bench_figure *figure =
        bench_add(bench, path->key, path->what, lk_percentile(pages, PASSES, 50), "pages/s/core",
                  path->target > 0 ? AT_LEAST : NO_TARGET, path->target);
    snprintf(figure->note, sizeof(figure->note), "d 128, B 16, r 8; superpages %.0f/s/core",
             lk_percentile(supers, PASSES, 50));
}

int bench_build(struct bench *bench) {
    struct lk_pool_view pool;
    struct bench_keys *keys = malloc(sizeof(*keys));
    struct lk_scratch *scratch = aligned_alloc(64, lk_cpu_scratch_bytes());
    void *memory = make_pool(&pool);
    if (!keys || !scratch || !memory) {
        free(keys);
        free(scratch);
        free(memory);
        snprintf(bench->why, sizeof(bench->why), "no memory for %d pages", PAGES);
        return EX_OSERR;
    }
    bench_keys_make(keys);
    for (uint64_t page = 0; page < PAGES; page++)
        bench_keys_page(keys, &pool, page, 0);
    for (size_t i = 0; i < sizeof(paths) / sizeof(*paths); i++)
        if (lk_cpu_open(paths[i].path) == 0)
            measure_path(bench, &paths[i], &pool, scratch);
    free(keys);
    free(scratch);
    free(memory);
    return 0;
}
