/* SPDX-License-Identifier: MIT */
/*
 * table.c - see table.h.
 */
#include "table.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sysexits.h>

#include "../../common/measure.h"

#define CELL        24
#define BUILT_PAGES 16777216 /* 32 layers of 8 KV heads and 1M tokens in pages of 16 */
#define BUILT_QUADS (BUILT_PAGES / LK_QUAD_PAGES)

static const char *const modes[] = {"dense", [LK_FULL] = "full", [LK_COARSE] = "coarse",
                                    [LK_NESTED] = "nested", [LK_TREE] = "tree"};

/* ---- words ---- */

static const char *tokens_word(uint64_t tokens, char text[CELL]) {
    if (tokens % (1 << 20) == 0)
        snprintf(text, CELL, "%" PRIu64 "M", tokens >> 20);
    else if (tokens % 1024 == 0)
        snprintf(text, CELL, "%" PRIu64 "K", tokens >> 10);
    else
        snprintf(text, CELL, "%" PRIu64, tokens);
    return text;
}

/* Microseconds, or an empty cell. */
static const char *us_word(double us, char text[CELL]) {
    snprintf(text, CELL, "%.1f", us);
    return us > 0 ? text : "";
}

static const char *share_word(double bytes, double us, double ceiling, char text[CELL]) {
    snprintf(text, CELL, "%.0f", 100 * bytes / us * 1e6 / ceiling);
    return bytes > 0 && us > 0 ? text : "";
}

static const char *times_word(double above, double below, char text[CELL]) {
    double x = above / below;
    snprintf(text, CELL, x < 10 ? "%.2f" : "%.1f", x);
    return above > 0 && below > 0 ? text : "";
}

/* ---- JSON ---- */

static void set_real(json_t *object, const char *key, double value) {
    if (value > 0)
        json_object_set_new(object, key, json_real(value));
}

static json_t *shape_json(const struct rig_shape *shape) {
    return json_pack("{s:i, s:i, s:i, s:I, s:i}", "q_heads", (int)(shape->kv_heads * shape->group),
                     "kv_heads", (int)shape->kv_heads, "page_tokens", (int)shape->page_tokens,
                     "context", (json_int_t)shape->tokens, "batch", (int)shape->rows);
}

static json_t *list_in(json_t *object, const char *key) {
    json_t *list = json_array();
    json_object_set_new(object, key, list);
    return list;
}

int table_save(struct table *table, struct rig_gpu *gpu) {
    const char *path = table->choice->json;
    if (!path || !json_dump_file(table->root, path, JSON_INDENT(1) | JSON_REAL_PRECISION(7)))
        return 0;
    snprintf(gpu->why, gpu->why_bytes, "%s cannot be written", path);
    return EX_CANTCREAT;
}

/* ---- open ---- */

int table_open(const struct choice *choice, const struct anchor *anchor, struct rig_gpu *gpu,
               struct table *ret) {
    char memory[LK_WORD_BYTES];
    *ret = (struct table){
        .choice = choice, .anchor = anchor, .ceiling = gpu->ceiling, .root = json_object()};
    json_object_set_new(ret->root, "device", json_string(gpu->name));
    json_object_set_new(ret->root, "memory_bytes", json_integer((json_int_t)gpu->memory_bytes));
    json_object_set_new(ret->root, "rounds", json_integer(gpu->rounds));
    set_real(ret->root, "read_ceiling_bytes_per_s", gpu->ceiling);
    if (anchor->version[0])
        json_object_set_new(ret->root, "anchor", json_string(anchor->version));
    ret->steps = list_in(ret->root, "steps");
    ret->tokens = list_in(ret->root, "rows_of_several_tokens");
    ret->builds = list_in(ret->root, "builds");
    ret->left_out = list_in(ret->root, "left_out");
    printf("%s, %s, %" PRIu32 " multiprocessors\n", gpu->name,
           lk_bytes_word((double)gpu->memory_bytes, memory), gpu->processors);
    printf("read ceiling %.2f TB/s\n", gpu->ceiling * 1e-12);
    printf("anchor: %s\n", anchor->version[0] ? anchor->version
                           : choice_wants(choice, CHOICE_ANCHOR)
                               ? "none (python3 has no torch that sees a GPU)"
                               : "not asked for");
    printf(
        "d 128, rank 8, bf16, budget %d tokens, half of them sampled; GPU time of replayed graphs "
        "over cold layers,\nmicroseconds, median of %" PRIu32
        "; %% of the read ceiling in logical bytes; x: how many times faster the step is\n",
        RIG_BUDGET, gpu->rounds);
    return table_save(ret, gpu);
}

void table_close(struct table *table) {
    json_decref(table->root);
}

/* ---- steps ---- */

void table_geometry(struct table *table, const struct rig_shape *shape) {
    printf("\n%" PRIu32 "/%" PRIu32 " heads, pages of %" PRIu32 " tokens\n",
           shape->kv_heads * shape->group, shape->kv_heads, shape->page_tokens);
    printf("%7s %5s %-6s %8s %5s %7s %7s %7s %8s %6s %9s %7s", "context", "batch", "step", "scan",
           "%", "prune", "rescan", "select", "attend", "%", "whole", "x dense");
    if (table->anchor->version[0])
        printf(" %9s %7s %9s", "cuDNN", "x cuDNN", "flash");
    printf("\n");
}

static void print_step(const struct table *table, const struct table_step *step,
                       const struct anchor_case *anchor) {
    char a[CELL], b[CELL], c[CELL], d[CELL], e[CELL], f[CELL], g[CELL], h[CELL], i[CELL], j[CELL];
    const double *us = step->us, *bytes = step->bytes;
    bool dense = !step->scan; /* of which the whole step has a share of the ceiling */
    printf("%7s %5" PRIu32 " %-6s %8s %5s %7s %7s %7s %8s %6s %9s %7s",
           tokens_word(step->shape.tokens, a), step->shape.rows, modes[step->scan],
           us_word(us[RIG_SCAN], b), share_word(bytes[RIG_SCAN], us[RIG_SCAN], table->ceiling, c),
           us_word(us[RIG_PRUNE], d), us_word(us[RIG_RESCAN], e), us_word(us[RIG_SELECT], f),
           us_word(us[RIG_ATTEND], g),
           dense ? share_word(bytes[RIG_WHOLE], us[RIG_WHOLE], table->ceiling, h)
                 : share_word(bytes[RIG_ATTEND], us[RIG_ATTEND], table->ceiling, h),
           us_word(us[RIG_WHOLE], i), dense ? "" : times_word(step->dense_us, us[RIG_WHOLE], j));
    if (anchor)
        printf(" %9s %7s %9s", us_word(anchor->cudnn_us, a),
               times_word(anchor->cudnn_us, us[RIG_WHOLE], b), us_word(anchor->flash_us, c));
    printf("\n");
    fflush(stdout);
}

void table_step(struct table *table, const struct table_step *step) {
    static const char *const parts[RIG_PARTS] = {
        [RIG_WHOLE] = "whole_us",   [RIG_SCAN] = "scan_us",     [RIG_PRUNE] = "prune_us",
        [RIG_RESCAN] = "rescan_us", [RIG_SELECT] = "select_us", [RIG_ATTEND] = "attend_us"};
    static const char *const shares[RIG_PARTS] = {[RIG_WHOLE] = "whole_of_ceiling",
                                                  [RIG_SCAN] = "scan_of_ceiling",
                                                  [RIG_ATTEND] = "attend_of_ceiling"};
    struct choice_heads heads = {step->shape.kv_heads * step->shape.group, step->shape.kv_heads};
    const struct anchor_case *anchor =
        anchor_find(table->anchor, heads, step->shape.tokens, step->shape.rows);
    json_t *object = shape_json(&step->shape);
    json_object_set_new(object, "step", json_string(modes[step->scan]));
    json_object_set_new(object, "layers", json_integer(step->layers));
    for (int i = 0; i < RIG_PARTS; i++) {
        set_real(object, parts[i], step->us[i]);
        if (shares[i] && step->us[i] > 0)
            set_real(object, shares[i], step->bytes[i] / step->us[i] * 1e6 / table->ceiling);
    }
    if (step->scan)
        set_real(object, "x_dense", step->dense_us / step->us[RIG_WHOLE]);
    if (anchor) {
        set_real(object, "cudnn_us", anchor->cudnn_us);
        set_real(object, "flash_us", anchor->flash_us);
        set_real(object, "x_cudnn", anchor->cudnn_us / step->us[RIG_WHOLE]);
    }
    json_array_append_new(table->steps, object);
    print_step(table, step, anchor);
}

void table_left_out(struct table *table, const struct rig_shape *shape, const char *why) {
    char tokens[CELL];
    json_t *object = shape_json(shape);
    json_object_set_new(object, "why", json_string(why));
    json_array_append_new(table->left_out, object);
    printf("%7s %5" PRIu32 " left out: %s\n", tokens_word(shape->tokens, tokens), shape->rows, why);
}

/* ---- rows of several tokens, builds ---- */

void table_tokens(struct table *table, const struct rig_shape *shape,
                  const struct table_tokens *tokens) {
    if (table->several_count < CHOICE_MAX) /* one a context, unless a list names a batch twice */
        table->several[table->several_count++] = *tokens;
    for (unsigned i = 0; i < TABLE_SEVERAL; i++) {
        json_t *object = shape_json(shape);
        json_object_set_new(object, "tokens", json_integer(2 << i));
        set_real(object, "us", tokens->us[i]);
        set_real(object, "one_token_us", tokens->one_us);
        json_array_append_new(table->tokens, object);
    }
}

void table_tokens_print(struct table *table) {
    char context[CELL];
    if (table->several_count)
        printf("\na row of several tokens, exact, and times a dense row of one\n"
               "%7s %9s %16s %16s %16s %16s\n",
               "context", "1", "2", "4", "8", "16");
    for (unsigned i = 0; i < table->several_count; i++) {
        const struct table_tokens *row = &table->several[i];
        printf("%7s %9.1f", tokens_word(row->context, context), row->one_us);
        for (unsigned j = 0; j < TABLE_SEVERAL; j++)
            printf(" %8.1f %5.2f x", row->us[j], row->us[j] / row->one_us);
        printf("\n");
    }
    table->several_count = 0;
    fflush(stdout);
}

static double seconds_of(uint64_t many, uint64_t count, double us) {
    return us * 1e-6 * (double)many / (double)count;
}

static void print_built(const char *what, uint64_t count, double us, uint64_t many) {
    char built[LK_WORD_BYTES], wanted[LK_WORD_BYTES];
    printf("%s: %s in %.1f ms; extrapolated from that, %s would take %.3f s\n", what,
           lk_count_word(count, built), us * 1e-3, lk_count_word(many, wanted),
           seconds_of(many, count, us));
}

void table_build(struct table *table, const struct rig_shape *shape, uint64_t pages,
                 double pages_us, uint64_t quads, double quads_us) {
    json_t *object = shape_json(shape);
    json_object_set_new(object, "pages", json_integer((json_int_t)pages));
    set_real(object, "pages_us", pages_us);
    json_object_set_new(object, "superpages", json_integer((json_int_t)quads));
    set_real(object, "superpages_us", quads_us);
    json_object_set_new(object, "extrapolated",
                        json_pack("{s:I, s:f, s:I, s:f}", "pages", (json_int_t)BUILT_PAGES,
                                  "pages_s", seconds_of(BUILT_PAGES, pages, pages_us), "superpages",
                                  (json_int_t)BUILT_QUADS, "superpages_s",
                                  seconds_of(BUILT_QUADS, quads, quads_us)));
    json_array_append_new(table->builds, object);
    printf("\n%" PRIu32 " KV heads, pages of %" PRIu32 " tokens, counted by page and head\n",
           shape->kv_heads, shape->page_tokens);
    print_built("build of pages", pages, pages_us, BUILT_PAGES);
    print_built("build of superpages", quads, quads_us, BUILT_QUADS);
    fflush(stdout);
}
