/* SPDX-License-Identifier: MIT */
/*
 * table.h - what `device` found, line by line on stdout as it is found, and as JSON.
 *
 * The JSON file is written anew after each geometry, so that a run that is stopped leaves what it
 * had. A figure that was not measured is absent from both, never 0. One thread.
 */
#ifndef BENCH_TABLE_H
#define BENCH_TABLE_H

#include <jansson.h>

#include "../anchor.h"
#include "rig.h"

#define TABLE_SEVERAL 4 /* rows of 2, 4, 8, 16 tokens */

struct table_tokens { /* microseconds */
    uint64_t context;
    double one_us, us[TABLE_SEVERAL];
};

struct table {
    const struct choice *choice;
    const struct anchor *anchor;
    double ceiling; /* bytes a second */
    json_t *root, *steps, *tokens, *builds, *left_out;
    struct table_tokens several[CHOICE_MAX]; /* of this geometry */
    unsigned several_count;
};

struct table_step { /* of one scan mode, or dense (scan 0) */
    struct rig_shape shape;
    uint32_t layers, scan;
    double us[RIG_PARTS], bytes[RIG_PARTS]; /* 0: there is no such part */
    double dense_us;                        /* our own, of the same rows */
};

/* EX_CANTCREAT: the JSON file cannot be written; the sentence is in gpu->why. */
int table_open(const struct choice *choice, const struct anchor *anchor, struct rig_gpu *gpu,
               struct table *ret);
int table_save(struct table *table, struct rig_gpu *gpu);
void table_close(struct table *table);

void table_geometry(struct table *table, const struct rig_shape *shape); /* a heading */
void table_step(struct table *table, const struct table_step *step);
/* why: how much it takes and how much there is */
void table_left_out(struct table *table, const struct rig_shape *shape, const char *why);
/* Rows of 2 << i queries against the dense row of one; printed by table_tokens_print(). */
void table_tokens(struct table *table, const struct rig_shape *shape,
                  const struct table_tokens *tokens);
void table_tokens_print(struct table *table);
/* Pages (of one KV head) summarised in pages_us, superpages in quads_us. */
void table_build(struct table *table, const struct rig_shape *shape, uint64_t pages,
                 double pages_us, uint64_t quads, double quads_us);

#endif
