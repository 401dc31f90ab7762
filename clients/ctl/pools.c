/* SPDX-License-Identifier: MIT */
/*
 * pools.c - locksctl pools: each pool's geometry, and how many tokens it holds and has free.
 */
#include "ctl.h"

#include <inttypes.h>
#include <stdio.h>

static const struct ctl_column columns[] = {
    {"POOL", 0},      {"LAYERS", 1},  {"HEADS", 1},  {"DIM", 1},  {"PAGE", 1},
    {"RANK", 1},      {"DTYPE", 0},   {"TOKENS", 1}, {"FREE", 1}, {"USED", 1},
    {"SEQUENCES", 1}, {"B/TOKEN", 1}, {"MEMORY", 1},
};

static void add_number(struct ctl_table *table, const json_t *pool, const char *name) {
    char text[CTL_TEXT];
    ctl_table_cell(table, lk_count_word(ctl_number(pool, name), text));
}

static void add_pool(struct ctl_table *table, const json_t *pool) {
    char text[CTL_TEXT];
    uint64_t room = ctl_number(pool, "capacity_tokens"),
             free_tokens = ctl_number(pool, "free_tokens");
    ctl_table_cell(table, ctl_string(pool, "name"));
    add_number(table, pool, "layers");
    snprintf(text, sizeof(text), "%" PRIu64 "x%" PRIu64, ctl_number(pool, "kv_heads"),
             ctl_number(pool, "group"));
    ctl_table_cell(table, text);
    add_number(table, pool, "head_dim");
    add_number(table, pool, "page_tokens");
    add_number(table, pool, "rank");
    ctl_table_cell(table, ctl_string(pool, "dtype"));
    add_number(table, pool, "capacity_tokens");
    add_number(table, pool, "free_tokens");
    snprintf(text, sizeof(text), "%.1f %%",
             room ? 100.0 * (double)(room - free_tokens) / (double)room : 0.0);
    ctl_table_cell(table, text);
    add_number(table, pool, "sequences");
    add_number(table, pool, "bytes_per_token");
    ctl_table_cell(table, lk_bytes_word((double)ctl_number(pool, "memory_bytes"), text));
}

void ctl_pools(const json_t *reply) {
    struct ctl_table *table = ctl_table_new(columns, sizeof(columns) / sizeof(*columns));
    const json_t *pools = json_object_get(reply, "pools");
    for (size_t i = 0; i < json_array_size(pools); i++)
        add_pool(table, json_array_get(pools, i));
    ctl_table_print(table, "");
}
