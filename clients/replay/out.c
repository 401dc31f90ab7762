/* SPDX-License-Identifier: MIT */
/*
 * out.c - what a run returned, as tensors:
 *
 *   layers.L.out      [steps, q_heads, d]     F32
 *   layers.L.pages    [steps, kv_heads, N]    I32   kept and sampled, ascending, padded by -1
 *   layers.L.weights  [steps, kv_heads, N]    F32   1 for kept
 *   layers.L.mass     [steps, kv_heads]       F32   captured mass as reported
 */
#include "replay.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sysexits.h>

enum part { OUT, PAGES, WEIGHTS, MASS, PARTS };

struct layer_out {
    char names[PARTS][40];
    int32_t *pages;
    float *weights, *mass;
};

static uint32_t longest(const struct replay_trace *t, const struct replay_result *result) {
    uint32_t most = 1; /* a row has a page */
    for (uint64_t i = 0; i < t->steps * t->kv_heads; i++) {
        uint32_t count = result->heads[i].kept + result->heads[i].sampled;
        most = count > most ? count : most;
    }
    return most;
}

static void fill(const struct replay_trace *t, const struct replay_run *run, uint32_t layer,
                 uint32_t width, struct layer_out *out) {
    const struct replay_result *result = &run->layers[layer];
    for (uint64_t i = 0; i < t->steps * t->kv_heads; i++) {
        const struct lk_page_entry *list = result->list + i * run->room;
        uint32_t count = result->heads[i].kept + result->heads[i].sampled;
        for (uint32_t j = 0; j < width; j++) {
            out->pages[i * width + j] = j < count ? (int32_t)list[j].page : -1;
            out->weights[i * width + j] = j < count ? list[j].weight : 0;
        }
        out->mass[i] = result->heads[i].mass;
    }
}

static int describe(const struct replay_trace *t, const struct replay_run *run, uint32_t layer,
                    struct layer_out *out, struct lk_tensor tensors[PARTS]) {
    static const char *const parts[PARTS] = {"out", "pages", "weights", "mass"};
    uint64_t rows = t->steps * t->kv_heads;
    uint32_t width = longest(t, &run->layers[layer]);
    out->pages = malloc(rows * width * sizeof(*out->pages));
    out->weights = malloc(rows * width * sizeof(*out->weights));
    out->mass = malloc(rows * sizeof(*out->mass));
    if (!out->pages || !out->weights || !out->mass)
        return EX_OSERR;
    fill(t, run, layer, width, out);
    const void *data[PARTS] = {run->layers[layer].out, out->pages, out->weights, out->mass};
    for (int i = 0; i < PARTS; i++) {
        snprintf(out->names[i], sizeof(out->names[i]), "layers.%" PRIu32 ".%s",
                 t->layers[layer].number, parts[i]);
        tensors[i] = (struct lk_tensor){.name = out->names[i],
                                        .type = i == PAGES ? LK_TENSOR_I32 : LK_TENSOR_F32,
                                        .dims = i == MASS ? 2 : 3,
                                        .shape = {t->steps, i == OUT ? t->q_heads : t->kv_heads,
                                                  i == OUT ? t->head_dim : width},
                                        .data = data[i],
                                        .bytes = i == OUT ? t->steps * t->q_heads * t->head_dim * 4
                                                 : i == MASS ? rows * 4
                                                             : rows * width * 4};
    }
    return 0;
}

/* By whatever name or link. */
static bool same_file(const char *a, const char *b) {
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

int replay_out_open(const struct replay_options *options, struct lk_output *ret, char *why) {
    if (same_file(options->out, options->trace)) {
        snprintf(why, REPLAY_WHY_BYTES, "--out: %s is the trace itself, it would be overwritten",
                 options->out);
        return EX_USAGE;
    }
    return lk_output_open(options->out, ret, why, REPLAY_WHY_BYTES) ? EX_CANTCREAT : 0;
}

int replay_out_write(const struct replay_options *options, const struct replay_trace *trace,
                     const struct replay_run *run, struct lk_output *output, char *why) {
    struct layer_out *outs = calloc(trace->layer_count, sizeof(*outs));
    struct lk_tensor *tensors = calloc((size_t)trace->layer_count * PARTS, sizeof(*tensors));
    int rc = outs && tensors ? 0 : EX_OSERR;
    for (uint32_t i = 0; i < trace->layer_count && !rc; i++)
        rc = describe(trace, run, i, &outs[i], tensors + (size_t)i * PARTS);
    if (rc)
        snprintf(why, REPLAY_WHY_BYTES, "%s: no memory to write it", options->out);
    else if (lk_safetensors_write(output->file, options->out, tensors,
                                  (size_t)trace->layer_count * PARTS, why, REPLAY_WHY_BYTES) ||
             lk_output_commit(output, why, REPLAY_WHY_BYTES))
        rc = EX_CANTCREAT;
    for (uint32_t i = 0; outs && i < trace->layer_count; i++) {
        free(outs[i].pages);
        free(outs[i].weights);
        free(outs[i].mass);
    }
    free(outs);
    free(tensors);
    return rc;
}
