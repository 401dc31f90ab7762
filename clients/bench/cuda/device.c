/* SPDX-License-Identifier: MIT */
/*
 * device.c - what the CUDA kernels reach on this GPU, in one run: its read ceiling, the anchor, our
 * dense and sparse steps stage by stage, rows of several tokens, builds.
 */
#include <sysexits.h>

#include "../bench.h"
#include "table.h"

#define BUILD_TOKENS (UINT64_C(1) << 20)
#define BUILD_ROUNDS 3 /* they take a tenth of a second each and vary little */

struct sweep {
    struct rig_gpu gpu;
    struct table table;
    struct choice choice;
};

static int time_parts(struct rig *rig, struct table_step *step) {
    bool second = rig->scan == LK_NESTED || rig->scan == LK_TREE;
    int rc = 0;

    for (int part = RIG_WHOLE; part < RIG_PARTS && !rc; part++) {
        if (part != RIG_WHOLE && !rig->scan)
            break; /* dense is one */
        if ((part == RIG_PRUNE || part == RIG_RESCAN) && !second)
            continue;
        step->bytes[part] = rig_bytes(rig, (enum rig_part)part);
        rc = rig_time(rig, (enum rig_part)part, &step->us[part]);
    }
    return rc;
}

static int measure_tokens(struct sweep *sweep, struct rig *rig, double one_us) {
    struct table_tokens tokens = {.context = rig->shape.tokens, .one_us = one_us};
    int rc = 0;

    for (uint32_t i = 0; i < TABLE_SEVERAL && !rc; i++) {
        rc = rig_plan(rig, 0, 2U << i);
        if (!rc)
            rc = rig_time(rig, RIG_WHOLE, &tokens.us[i]);
    }
    if (!rc)
        table_tokens(&sweep->table, &rig->shape, &tokens);
    return rc;
}

static int measure_step(struct sweep *sweep, struct rig *rig, uint32_t scan, double *dense_us) {
    struct table_step step = {
        .shape = rig->shape, .layers = rig->pool.geometry.layers, .scan = scan};
    int rc = rig_plan(rig, scan, 1);

    if (!rc)
        rc = time_parts(rig, &step);
    if (rc)
        return rc;
    if (!scan)
        *dense_us = step.us[RIG_WHOLE];
    step.dense_us = *dense_us;
    table_step(&sweep->table, &step);
    return 0;
}

/* Dense, every scan mode, and with one row also rows of several tokens. */
static int measure_rows(struct sweep *sweep, struct rig *rig) {
    const struct choice *choice = &sweep->choice;
    double dense_us = 0;
    int rc = measure_step(sweep, rig, 0, &dense_us);

    for (unsigned i = 0; i < choice->scan.count && !rc && choice_wants(choice, CHOICE_STEPS); i++)
        rc = measure_step(sweep, rig, (uint32_t)choice->scan.at[i], &dense_us);
    if (!rc && rig->shape.rows == 1 && choice_wants(choice, CHOICE_TOKENS))
        rc = measure_tokens(sweep, rig, dense_us);
    return rc;
}

static int measure_shape(struct sweep *sweep, const struct rig_shape *shape) {
    struct rig rig;
    int rc = rig_open(&sweep->gpu, shape, &rig);

    if (rc == EX_OSERR && rig.needed_bytes > rig.free_bytes) {
        table_left_out(&sweep->table, shape, sweep->gpu.why);
        rc = 0;
    } else if (!rc) {
        rc = measure_rows(sweep, &rig);
    }
    rig_close(&rig);
    return rc;
}

static int measure_build(struct sweep *sweep, const struct rig_shape *geometry) {
    struct rig_shape shape = *geometry;
    struct rig rig;
    double pages_us = 0, quads_us = 0;
    uint32_t rounds = sweep->gpu.rounds;

    shape.rows = 1;
    shape.tokens = BUILD_TOKENS;
    shape.scans = 0;
    shape.layers_are_exact = true; /* 2 GB of keys: far above any cache */
    int rc = rig_open(&sweep->gpu, &shape, &rig);
    uint64_t pages = rig.pool.geometry.layers * rig.pool.pages * shape.kv_heads;
    if (rc == EX_OSERR && rig.needed_bytes > rig.free_bytes) {
        table_left_out(&sweep->table, &shape, sweep->gpu.why);
        rig_close(&rig);
        return 0;
    }
    sweep->gpu.rounds = BUILD_ROUNDS;
    if (!rc)
        rc = rig_time_build(&rig, false, &pages_us);
    if (!rc)
        rc = rig_time_build(&rig, true, &quads_us);
    sweep->gpu.rounds = rounds;
    if (!rc)
        table_build(&sweep->table, &shape, pages, pages_us, pages / LK_QUAD_PAGES, quads_us);
    rig_close(&rig);
    return rc;
}

static int measure_shapes(struct sweep *sweep, const struct rig_shape *geometry) {
    const struct choice *choice = &sweep->choice;
    struct rig_shape shape = *geometry;
    int rc = 0;

    table_geometry(&sweep->table, &shape);
    for (unsigned c = 0; c < choice->context.count && !rc; c++)
        for (unsigned b = 0; b < choice->batch.count && !rc; b++) {
            shape.tokens = choice->context.at[c];
            shape.rows = (uint32_t)choice->batch.at[b];
            rc = measure_shape(sweep, &shape);
        }
    table_tokens_print(&sweep->table);
    return rc;
}

static int measure_geometry(struct sweep *sweep, struct choice_heads heads, uint32_t page_tokens) {
    const struct choice *choice = &sweep->choice;
    struct rig_shape shape = {
        .kv_heads = heads.kv, .group = heads.q / heads.kv, .page_tokens = page_tokens, .layers = 1};
    int rc = 0;

    for (unsigned i = 0; i < choice->scan.count && choice_wants(choice, CHOICE_STEPS); i++)
        shape.scans |= 1U << choice->scan.at[i];
    if (choice_wants(choice, CHOICE_STEPS) || choice_wants(choice, CHOICE_TOKENS))
        rc = measure_shapes(sweep, &shape);
    if (!rc && choice_wants(choice, CHOICE_BUILDS))
        rc = measure_build(sweep, &shape);
    return rc ? rc : table_save(&sweep->table, &sweep->gpu);
}

static int measure_all(struct sweep *sweep) {
    const struct choice *choice = &sweep->choice;
    int rc = 0;

    for (unsigned h = 0; h < choice->heads.count && !rc; h++)
        for (unsigned p = 0; p < choice->page_tokens.count && !rc; p++)
            rc = measure_geometry(sweep, choice_heads_at(choice, h),
                                  (uint32_t)choice->page_tokens.at[p]);
    return rc;
}

int bench_device(struct bench *bench) {
    static struct anchor anchor;
    static struct sweep sweep;
    sweep.choice = bench->choice;
    choice_complete(&sweep.choice);
    int rc =
        rig_gpu_open(sweep.choice.gpu, bench->rounds, bench->why, sizeof(bench->why), &sweep.gpu);
    if (!rc) {
        if (choice_wants(&sweep.choice, CHOICE_ANCHOR))
            anchor_measure(&sweep.choice, bench->rounds, sweep.gpu.cache_bytes, &anchor);
        rc = table_open(&sweep.choice, &anchor, &sweep.gpu, &sweep.table);
        if (!rc)
            rc = measure_all(&sweep);
        table_close(&sweep.table);
    }
    rig_gpu_close(&sweep.gpu);
    return rc;
}
