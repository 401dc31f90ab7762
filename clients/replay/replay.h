/* SPDX-License-Identifier: MIT */
/*
 * replay.h - locks-replay: recorded queries, keys and values, sent through a daemon as a real
 * client would.
 *
 *     options -> trace -> bed (daemon, connection, pool) -> run -> [compare] -> out, report
 *
 * A trace holds `tokens` keys and values a layer and `steps` queries, of which query i belongs to
 * token tokens - steps + i. The tokens before the first query are appended in chunks; then every
 * step is one DECODE a layer, layers inside a step, as a model's are. Everything that a row
 * returned is kept: judging comes afterwards, outside of the measured time.
 *
 * Layers of the trace, whatever their numbers, take the pool's layers 0, 1, .. in order. One
 * thread, but for compare.c. Functions -> 0 or an exit code of sysexits.h with a sentence in
 * `why`.
 */
#ifndef REPLAY_H
#define REPLAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../common/output.h"
#include "../common/private.h"
#include "../common/safetensors.h"
#include "locks.h"

#define REPLAY_LAYERS_MAX 1024 /* of a pool */
#define REPLAY_WHY_BYTES  4096

/* ---- options.c ---- */

struct replay_options { /* strings are argv's */
    const char *trace, *socket, *out;
    const char *device;                              /* of a private daemon: auto, cpu, cuda */
    uint32_t layers[REPLAY_LAYERS_MAX], layer_count; /* 0: all there are */
    uint32_t budget;
    int64_t sampled; /* -1: the daemon's default */
    double mass;     /* 0: no target */
    uint32_t scan;   /* enum lk_scan */
    uint32_t rank, page_tokens, threads;
    bool dense, compare, json, help, version;
};

int replay_options_parse(int argc, char **argv, struct replay_options *ret, char *why);
void replay_options_help(void);
const char *replay_scan_name(uint32_t scan);

/* ---- trace.c ---- */

struct replay_layer {
    uint32_t number;          /* in the trace */
    const uint8_t *q, *k, *v; /* perhaps unaligned */
};

struct replay_trace {
    struct lk_safetensors *file;
    struct replay_layer *layers;
    uint32_t layer_count;
    uint64_t tokens, steps;
    uint32_t q_heads, kv_heads, group, head_dim;
    enum lk_tensor_type type;
    uint32_t dtype;             /* the same as enum lk_dtype */
    uint64_t q_bytes, kv_bytes; /* of one token */
};

int replay_trace_open(const struct replay_options *options, struct replay_trace *ret, char *why);
/* Reads all of it, and says how far it is. NaN and infinity are a warning: such values are replayed
 * as they are, but what they reach means nothing. */
void replay_trace_check(const struct replay_trace *trace);
void replay_trace_close(struct replay_trace *trace);

/* ---- bed.c: a daemon, a connection, a pool that fits the trace ---- */

#define REPLAY_CHUNK_TOKENS 512 /* of an append */

struct replay_bed {
    struct lk_private daemon; /* pid 0: somebody else's */
    struct locks *locks;
    struct locks_pool pool;
};

int replay_bed_open(const struct replay_options *options, const struct replay_trace *trace,
                    struct replay_bed *ret, char *why);
void replay_bed_close(struct replay_bed *bed);

/* ---- run.c ---- */

struct replay_result {             /* of one layer */
    float *out;                    /* [steps][q_heads][head_dim] */
    struct lk_head_result *heads;  /* [steps][kv_heads] */
    struct lk_page_entry *list;    /* [steps][kv_heads][room] */
    struct lk_step_result *timing; /* [steps] */
    double *seconds;               /* [steps], as the client waited */
};

struct replay_run {
    struct replay_result *layers;
    uint32_t layer_count;
    uint32_t room;         /* pages of a list */
    bool sampled;          /* some row did */
    double append_seconds; /* all layers */
};

/* The run as asked for; with --compare, and if something was sampled, ret_kept is the same with
 * nothing sampled, from a fork of the same sequence. Else ret_kept->layers is NULL. */
int replay_run(const struct replay_options *options, const struct replay_trace *trace,
               struct replay_bed *bed, struct replay_run *ret, struct replay_run *ret_kept,
               char *why);
void replay_run_free(struct replay_run *run);
static inline const struct lk_page_entry *replay_list(const struct replay_trace *trace,
                                                      const struct replay_run *run, uint32_t layer,
                                                      uint64_t step, uint32_t head) {
    return run->layers[layer].list + (step * trace->kv_heads + head) * run->room;
}

/* ---- out.c ---- */

/* Before anything is run: that it cannot be made is said at once. */
int replay_out_open(const struct replay_options *options, struct lk_output *ret, char *why);
/* Complete under its name, or not there at all. */
int replay_out_write(const struct replay_options *options, const struct replay_trace *trace,
                     const struct replay_run *run, struct lk_output *output, char *why);

/* ---- compare.c: exact attention, and what each way of choosing pages kept of it ---- */

enum replay_way { WAY_DAEMON, WAY_KEPT, WAY_CENTROID, WAY_QUEST, WAYS };

struct replay_verdict { /* of one way at one layer, means over steps and KV heads */
    bool there;
    double mass;  /* captured mass, true */
    double error; /* of the output: |out - exact| / |exact| over a group */
    uint64_t carriers, carriers_read;
};

struct replay_comparison { /* of one layer */
    struct replay_verdict way[WAYS];
};

/* kept->layers may be NULL. ret [layer_count]. */
int replay_compare(const struct replay_options *options, const struct replay_trace *trace,
                   const struct replay_run *run, const struct replay_run *kept,
                   struct replay_comparison *ret, char *why);

/* ---- report.c: what a person or a program reads ---- */

struct replay_report {
    const struct replay_options *options;
    const struct replay_trace *trace;
    const struct replay_bed *bed;
    const struct replay_run *run;
    const struct replay_comparison *comparison; /* [layer_count] or NULL */
};

void replay_report_text(const struct replay_report *report);
int replay_report_json(const struct replay_report *report, char *why);

#endif
