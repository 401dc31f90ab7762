/* SPDX-License-Identifier: MIT */
/*
 * rig.c - see rig.h.
 */
#include "rig.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

#include "../../common/measure.h"
#include "fill.h"
#include "replay.h"

#define HEAD_DIM      128
#define RANK          8
#define EXTENT_QUADS  16     /* 64 pages, the daemon's unit of allocation */
#define CACHES        2.5    /* bytes between two uses of a layer, in caches */
#define CHAIN_US      1000.0 /* of a replay at least: its launch is then lost in it */
#define CEILING_BYTES (UINT64_C(4) << 30)
#define SPARE_BYTES   (UINT64_C(3) << 30) /* for workspaces and what the runtime takes itself */
#define ROW_ALIGN     256

static uint64_t align(uint64_t bytes) {
    return (bytes + ROW_ALIGN - 1) / ROW_ALIGN * ROW_ALIGN;
}

static int take(struct rig_gpu *gpu, uint64_t bytes, const char *what, void *ret) {
    void *at = NULL;
    int error = (int)cudaMalloc(&at, bytes + ROW_ALIGN);

    memcpy(ret, &at, sizeof(at)); /* a pointer of whatever type */
    return rig_refuse(gpu, error, what);
}

/* Host memory to the device, before anything that is launched after. A plain copy may return before
 * it has arrived, and gpu->stream does not wait for it. */
static int put(struct rig_gpu *gpu, void *to, const void *from, uint64_t bytes, const char *what) {
    int error = (int)cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, gpu->stream);

    if (!error)
        error = (int)cudaStreamSynchronize(gpu->stream);
    return rig_refuse(gpu, error, what);
}

/* Of the host. */
static int no_memory(struct rig_gpu *gpu) {
    snprintf(gpu->why, gpu->why_bytes, "no memory on the host");
    return EX_OSERR;
}

/* ---- the GPU ---- */

static int take_foreign(struct rig_gpu *gpu) {
    int rc = take(gpu, gpu->cache_bytes, "memory to fill the cache", &gpu->foreign);

    if (!rc)
        rc = take(gpu, sizeof(*gpu->sum), "a word", &gpu->sum);
    if (!rc)
        rc = rig_refuse(gpu, (int)cudaMemsetAsync(gpu->foreign, 0, gpu->cache_bytes, gpu->stream),
                        "clearing memory");
    return rc;
}

struct reading {
    void *at;
    uint32_t *sum, blocks;
};

static int launch_read(void *context, uint32_t i, cudaStream_t stream) {
    const struct reading *r = context;

    (void)i;
    return bench_read_all(r->at, CEILING_BYTES, r->blocks, true, r->sum, stream);
}

/* The best of a few grids. */
static int measure_ceiling(struct rig_gpu *gpu) {
    struct reading r = {NULL, gpu->sum, 0};
    double us = 0;
    int rc = take(gpu, CEILING_BYTES, "memory to read", &r.at);

    if (!rc)
        rc = rig_refuse(gpu, (int)cudaMemsetAsync(r.at, 0x5a, CEILING_BYTES, gpu->stream),
                        "clearing memory");
    for (uint32_t blocks = 2; blocks <= 8 && !rc; blocks *= 2) {
        r.blocks = blocks * gpu->processors;
        rc = replay_time(gpu, launch_read, &r, 2, false, &us);
        if (!rc && (double)CEILING_BYTES / us * 1e6 > gpu->ceiling)
            gpu->ceiling = (double)CEILING_BYTES / us * 1e6;
    }
    cudaFree(r.at);
    return rc;
}

static int put_normals(struct rig_gpu *gpu) {
    struct bench_keys *keys = malloc(sizeof(*keys));
    int rc = take(gpu, sizeof(keys->normal), "a table of numbers", &gpu->normal);

    if (!rc && keys) {
        bench_keys_make(keys);
        rc = put(gpu, gpu->normal, keys->normal, sizeof(keys->normal), "a table of numbers");
    }
    free(keys);
    return keys || rc ? rc : no_memory(gpu);
}

static int find_gpu(uint32_t number, struct rig_gpu *gpu) {
    struct cudaDeviceProp properties;
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);

    if (error || number >= (uint32_t)count) {
        cudaGetLastError(); /* it is told */
        if (error || !count)
            snprintf(gpu->why, gpu->why_bytes, "there is no GPU to measure here (%s)",
                     error ? cudaGetErrorString(error) : "the driver shows none");
        else
            snprintf(gpu->why, gpu->why_bytes, "there is no GPU %" PRIu32 " here, only 0 to %d",
                     number, count - 1);
        return EX_UNAVAILABLE;
    }
    error = cudaSetDevice((int)number);
    if (!error)
        error = cudaGetDeviceProperties(&properties, (int)number);
    if (error)
        return rig_refuse(gpu, (int)error, "the GPU cannot be opened") ? EX_UNAVAILABLE : 0;
    gpu->processors = (uint32_t)properties.multiProcessorCount;
    gpu->cache_bytes = (uint64_t)properties.l2CacheSize;
    gpu->memory_bytes = properties.totalGlobalMem;
    snprintf(gpu->name, sizeof(gpu->name), "%s", properties.name);
    return 0;
}

int rig_gpu_open(uint32_t number, uint32_t rounds, char *why, size_t why_bytes,
                 struct rig_gpu *ret) {
    *ret = (struct rig_gpu){.rounds = rounds, .why = why, .why_bytes = why_bytes};
    int rc = find_gpu(number, ret);

    if (!rc)
        rc = rig_refuse(ret, (int)cudaStreamCreateWithFlags(&ret->stream, cudaStreamNonBlocking),
                        "a stream");
    if (!rc)
        rc = rig_refuse(ret, (int)cudaEventCreate(&ret->begun), "an event");
    if (!rc)
        rc = rig_refuse(ret, (int)cudaEventCreate(&ret->ended), "an event");
    if (!rc)
        rc = put_normals(ret);
    if (!rc)
        rc = take_foreign(ret);
    return rc ? rc : measure_ceiling(ret);
}

void rig_gpu_close(struct rig_gpu *gpu) {
    if (gpu->stream)
        cudaStreamDestroy(gpu->stream);
    if (gpu->begun)
        cudaEventDestroy(gpu->begun);
    if (gpu->ended)
        cudaEventDestroy(gpu->ended);
    cudaFree(gpu->normal);
    cudaFree(gpu->foreign);
    cudaFree(gpu->sum);
    *gpu = (struct rig_gpu){.why = NULL};
}

/* ---- bytes ---- */

static uint64_t units(const struct rig *rig) { /* page x KV head of all rows */
    return rig->shape.rows * rig->row_pages * rig->shape.kv_heads;
}

static double scan_bytes(const struct rig *rig, uint32_t scan) {
    const struct lk_layout *l = &rig->pool.layout;
    double each = l->coarse_bytes;

    if (scan == LK_FULL)
        each += l->fine_bytes;
    if (scan == LK_TREE)
        each = l->super_bytes / (double)LK_QUAD_PAGES;
    return each * (double)units(rig);
}

static double kv_bytes(const struct rig *rig, uint64_t tokens) {
    uint64_t attended = tokens < rig->shape.tokens ? tokens : rig->shape.tokens;

    return (double)rig->shape.rows * (double)attended * rig->shape.kv_heads * HEAD_DIM * 4;
}

double rig_bytes(const struct rig *rig, enum rig_part part) {
    if (part == RIG_WHOLE)
        return rig->scan ? scan_bytes(rig, rig->scan) + kv_bytes(rig, RIG_BUDGET)
                         : kv_bytes(rig, rig->shape.tokens);
    if (part == RIG_SCAN)
        return scan_bytes(rig, rig->scan);
    return part == RIG_ATTEND ? kv_bytes(rig, RIG_BUDGET) : 0;
}

/* How many launches of so many bytes lie between two uses of a layer. */
static uint32_t cold_layers(const struct rig_gpu *gpu, double bytes) {
    double layers = ceil(CACHES * (double)gpu->cache_bytes / bytes);

    return layers > RIG_CHAIN_MAX ? RIG_CHAIN_MAX : layers > 1 ? (uint32_t)layers : 1;
}

/* ---- open ---- */

/* Layers that the shyest part asks for, as far as they fit. */
static uint32_t choose_layers(const struct rig *rig) {
    double least = kv_bytes(rig, RIG_BUDGET);
    uint64_t room = rig->needed_bytes ? rig->free_bytes / rig->needed_bytes : 0;

    for (uint32_t scan = LK_FULL; scan <= LK_TREE; scan++)
        if (rig->shape.scans >> scan & 1 && scan_bytes(rig, scan) < least)
            least = scan_bytes(rig, scan);
    uint32_t layers = cold_layers(rig->gpu, least);
    if (layers < rig->shape.layers || rig->shape.layers_are_exact)
        layers = rig->shape.layers;
    return layers < room ? layers : (uint32_t)room;
}

static int place(struct rig *rig) {
    const struct rig_shape *s = &rig->shape;
    const struct lk_layout *l = &rig->pool.layout;
    size_t left = 0, all = 0;

    rig->pool.geometry =
        (struct lk_geometry){1, s->kv_heads, s->group, HEAD_DIM, s->page_tokens, RANK, LK_BF16};
    lk_cuda_layout(&rig->pool.geometry, &rig->pool.layout);
    rig->row_pages = (s->tokens + s->page_tokens - 1) / s->page_tokens;
    rig->row_pages = (rig->row_pages + LK_QUAD_PAGES - 1) / LK_QUAD_PAGES * LK_QUAD_PAGES;
    rig->pool.pages = rig->row_pages * s->rows;
    rig->needed_bytes =
        rig->pool.pages * l->page_bytes +
        units(rig) * (l->coarse_stride + l->fine_stride + l->super_stride / LK_QUAD_PAGES + 16);
    int rc = rig_refuse(rig->gpu, (int)cudaMemGetInfo(&left, &all), "memory's size");
    rig->free_bytes = left > SPARE_BYTES ? left - SPARE_BYTES : 0;
    if (!rc && rig->needed_bytes > rig->free_bytes) {
        char needed[LK_WORD_BYTES], there[LK_WORD_BYTES];
        snprintf(rig->gpu->why, rig->gpu->why_bytes, "takes %s, %s are free",
                 lk_bytes_word((double)rig->needed_bytes, needed),
                 lk_bytes_word((double)rig->free_bytes, there));
        rc = EX_OSERR;
    }
    if (!rc)
        rig->pool.geometry.layers = choose_layers(rig);
    return rc;
}

static int take_pool(struct rig *rig) {
    const struct lk_layout *l = &rig->pool.layout;
    uint64_t layers = rig->pool.geometry.layers, pages = layers * rig->pool.pages,
             planes = layers * rig->shape.kv_heads * rig->pool.pages,
             words = lk_cuda_sync_words(&rig->pool.geometry, LK_CUDA_ROWS_MAX, RIG_TOKENS_MAX);
    int rc = take(rig->gpu, pages * l->page_bytes, "pages", &rig->pool.kv);

    if (!rc)
        rc = take(rig->gpu, planes * l->coarse_stride, "summaries", &rig->pool.coarse);
    if (!rc)
        rc = take(rig->gpu, planes * l->fine_stride, "summaries", &rig->pool.fine);
    if (!rc)
        rc =
            take(rig->gpu, planes / LK_QUAD_PAGES * l->super_stride, "summaries", &rig->pool.super);
    if (!rc)
        rc = take(rig->gpu, pages * sizeof(*rig->pages), "a list of pages", &rig->pages);
    if (!rc)
        rc = take(rig->gpu, pages / LK_QUAD_PAGES * sizeof(*rig->quads), "a list of superpages",
                  &rig->quads);
    if (!rc)
        rc = take(rig->gpu, words * sizeof(*rig->sync), "sync words", &rig->sync);
    if (!rc)
        rc = rig_refuse(
            rig->gpu,
            (int)cudaMemsetAsync(rig->sync, 0, words * sizeof(*rig->sync), rig->gpu->stream),
            "sync words");
    return rc;
}

/* Each row its own quads, extents in any order. */
static int put_tables(struct rig *rig) {
    uint64_t quads = rig->pool.pages / LK_QUAD_PAGES, each = rig->row_pages / LK_QUAD_PAGES,
             extents = each / EXTENT_QUADS;
    uint32_t *table = malloc(quads * sizeof(*table));
    int rc = take(rig->gpu, quads * sizeof(*table), "tables", &rig->tables);

    for (uint64_t i = 0; i < quads && table; i++) {
        uint64_t row = i / each, at = i % each, extent = at / EXTENT_QUADS;
        if (extent < extents) /* an odd multiplier permutes modulo a power of two; else in order */
            extent = extents & (extents - 1) ? extent : extent * 2654435761U % extents;
        table[i] = (uint32_t)(row * each + extent * EXTENT_QUADS + at % EXTENT_QUADS);
    }
    if (!rc && table)
        rc = put(rig->gpu, rig->tables, table, quads * sizeof(*table), "tables");
    free(table);
    return table || rc ? rc : no_memory(rig->gpu);
}

static struct lk_cuda_build building(const struct rig *rig, bool quads) {
    uint64_t pages = rig->pool.geometry.layers * rig->pool.pages;

    return (struct lk_cuda_build){.pool = rig->pool,
                                  .list = quads ? rig->quads : rig->pages,
                                  .count = (uint32_t)(quads ? pages / LK_QUAD_PAGES : pages)};
}

static int fill(struct rig *rig) {
    struct lk_cuda_build pages = building(rig, false), quads = building(rig, true);
    uint32_t layers = rig->pool.geometry.layers;
    cudaStream_t stream = rig->gpu->stream;
    int error = bench_fill_pages(&rig->pool, rig->gpu->normal, stream);

    if (!error)
        error = bench_fill_list(rig->pages, layers, rig->pool.pages, stream);
    if (!error)
        error = bench_fill_list(rig->quads, layers, rig->pool.pages / LK_QUAD_PAGES, stream);
    if (!error)
        error = lk_cuda_build_pages(&pages, stream);
    if (!error && rig->shape.scans >> LK_TREE & 1)
        error = lk_cuda_build_supers(&quads, stream);
    if (!error)
        error = (int)cudaStreamSynchronize(stream);
    return rig_refuse(rig->gpu, error, "filling pages");
}

int rig_open(struct rig_gpu *gpu, const struct rig_shape *shape, struct rig *ret) {
    *ret = (struct rig){.gpu = gpu, .shape = *shape};
    ret->host = malloc(sizeof(*ret->host));
    ret->rows = calloc(shape->rows, sizeof(*ret->rows));
    int rc = ret->host && ret->rows ? place(ret) : no_memory(gpu);

    if (!rc)
        rc = take_pool(ret);
    if (!rc)
        rc = put_tables(ret);
    if (!rc)
        rc = take(gpu, ret->pool.geometry.layers * sizeof(*ret->blocks), "blocks", &ret->blocks);
    return rc ? rc : fill(ret);
}

void rig_close(struct rig *rig) {
    void *const taken[] = {rig->pool.kv, rig->pool.coarse, rig->pool.fine, rig->pool.super,
                           rig->tables,  rig->sync,        rig->pages,     rig->quads,
                           rig->io,      rig->workspace,   rig->blocks};

    for (size_t i = 0; i < sizeof(taken) / sizeof(*taken); i++)
        cudaFree(taken[i]);
    free(rig->host);
    free(rig->rows);
}

/* ---- plan ---- */

/* Row r's values in its part of io; without a workspace yet. -> bytes of that part. */
static uint64_t place_row(struct rig *rig, uint32_t r) {
    const struct lk_geometry *g = &rig->pool.geometry;
    uint64_t heads = (uint64_t)g->kv_heads * g->group,
             q = align(rig->tokens * heads * g->head_dim * 2),
             kv = align((uint64_t)rig->tokens * g->kv_heads * g->head_dim * 2), out = 2 * q,
             lse = align(rig->tokens * heads * sizeof(float)),
             result = align(g->kv_heads * sizeof(struct lk_head_out)),
             each = q + 2 * kv + out + lse + result;
    uint8_t *at = rig->io ? rig->io + r * each : NULL;
    uint32_t budget = RIG_BUDGET / g->page_tokens;

    rig->rows[r] = (struct lk_row){.pool = &rig->pool,
                                   .tokens = rig->tokens,
                                   .append = rig->tokens,
                                   .length = rig->shape.tokens,
                                   .table = rig->tables + r * (rig->row_pages / LK_QUAD_PAGES),
                                   .table_shift = 2,
                                   .budget_pages = budget,
                                   .budget_tokens = RIG_BUDGET,
                                   .sampled = budget / 2,
                                   .sink_pages = 1,
                                   .recent_pages = 1,
                                   .scan = rig->scan,
                                   .exact = !rig->scan,
                                   .sm_scale = 1 / sqrtf((float)g->head_dim)};
    if (at) {
        struct lk_row *row = &rig->rows[r];
        row->q = at;
        row->k = at + q;
        row->v = at + q + kv;
        row->out = (float *)(void *)(at + q + 2 * kv);
        row->lse = (float *)(void *)(at + q + 2 * kv + out);
        row->result = (struct lk_head_out *)(void *)(at + q + 2 * kv + out + lse);
    }
    return each;
}

static int take_row_memory(struct rig *rig) {
    uint64_t io = 0, workspace = 0;

    cudaFree(rig->io);
    cudaFree(rig->workspace);
    rig->io = rig->workspace = NULL;
    for (uint32_t r = 0; r < rig->shape.rows; r++) {
        io += place_row(rig, r);
        workspace += align(lk_cuda_row_workspace_bytes(&rig->rows[r]));
    }
    int rc = take(rig->gpu, io, "queries", &rig->io);
    if (!rc)
        rc = take(rig->gpu, workspace, "workspaces", &rig->workspace);
    if (!rc)
        rc = rig_refuse(rig->gpu,
                        bench_fill_queries((uint16_t *)(void *)rig->io, io / 2, rig->gpu->normal,
                                           rig->gpu->stream),
                        "queries");
    workspace = 0;
    for (uint32_t r = 0; r < rig->shape.rows && !rc; r++) {
        place_row(rig, r);
        rig->rows[r].workspace = rig->workspace + workspace;
        workspace += align(lk_cuda_row_workspace_bytes(&rig->rows[r]));
    }
    return rc;
}

int rig_plan(struct rig *rig, uint32_t scan, uint32_t tokens) {
    rig->scan = scan;
    rig->tokens = tokens;
    int rc = take_row_memory(rig);

    for (uint32_t layer = 0; layer < rig->pool.geometry.layers && !rc; layer++) {
        for (uint32_t r = 0; r < rig->shape.rows; r++)
            rig->rows[r].layer = layer;
        if (lk_cuda_fill(rig->rows, rig->shape.rows, rig->host)) {
            snprintf(rig->gpu->why, rig->gpu->why_bytes, "the kernels refuse these rows");
            return EX_SOFTWARE;
        }
        rc =
            put(rig->gpu, &rig->blocks[layer], rig->host, sizeof(*rig->host), "a descriptor block");
    }
    return rc;
}

/* ---- time ---- */

struct timed {
    struct rig *rig;
    int (*stage)(const struct lk_cuda_step *step, void *stream);
};

static int launch_stage(void *context, uint32_t i, cudaStream_t stream) {
    const struct timed *timed = context;
    const struct rig *rig = timed->rig;
    struct lk_cuda_step step = {.pool = rig->pool,
                                .batch = &rig->blocks[i % rig->pool.geometry.layers],
                                .sync = rig->sync,
                                .bucket = 1,
                                .scans = rig->scan ? 1U << rig->scan : 0,
                                .processors = rig->gpu->processors};

    while (step.bucket < rig->shape.rows)
        step.bucket *= 2;
    return timed->stage(&step, stream);
}

/* A stage that is repeated leaves what no step would: pages listed twice, of equal scores. */
static int run_step(struct rig *rig) {
    struct timed whole = {rig, lk_cuda_run};
    int error = launch_stage(&whole, 0, rig->gpu->stream);

    if (!error)
        error = (int)cudaStreamSynchronize(rig->gpu->stream);
    return rig_refuse(rig->gpu, error, "a step");
}

int rig_time(struct rig *rig, enum rig_part part, double *ret_us) {
    static int (*const stages[RIG_PARTS])(const struct lk_cuda_step *, void *) = {
        [RIG_WHOLE] = lk_cuda_run,     [RIG_SCAN] = lk_cuda_scan,
        [RIG_PRUNE] = lk_cuda_prune,   [RIG_RESCAN] = lk_cuda_rescan,
        [RIG_SELECT] = lk_cuda_select, [RIG_ATTEND] = lk_cuda_attend};
    struct timed timed = {rig, stages[part]};
    double bytes = rig_bytes(rig, part), expected = 1e6 * bytes / rig->gpu->ceiling;
    uint32_t chain = bytes > 0 ? cold_layers(rig->gpu, bytes) : 1;

    if (expected < 10) /* nothing takes less, few bytes or none */
        expected = 10;
    if (chain < CHAIN_US / expected)
        chain = (uint32_t)ceil(CHAIN_US / expected);
    if (chain > RIG_CHAIN_MAX)
        chain = RIG_CHAIN_MAX;
    int rc = run_step(rig);
    return rc ? rc : replay_time(rig->gpu, launch_stage, &timed, chain, part == RIG_WHOLE, ret_us);
}

static int launch_build(void *context, uint32_t i, cudaStream_t stream) {
    (void)i;
    return lk_cuda_build_pages(context, stream);
}

static int launch_build_quads(void *context, uint32_t i, cudaStream_t stream) {
    (void)i;
    return lk_cuda_build_supers(context, stream);
}

int rig_time_build(struct rig *rig, bool quads, double *ret_us) {
    struct lk_cuda_build job = building(rig, quads);

    return replay_time(rig->gpu, quads ? launch_build_quads : launch_build, &job, 1, false, ret_us);
}
