/* SPDX-License-Identifier: MIT */
/*
 * report.c - the figures of a run: a table a layer for people, one JSON object for programs.
 */
#include "replay.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

#include "../common/measure.h"

static const char *const way_names[WAYS] = {"locksd", "nothing sampled", "centroid", "Quest"};
static const char *const way_keys[WAYS] = {"locksd", "nothing_sampled", "centroid", "quest"};

/* Means over steps (and KV heads), of one layer. */
struct figures {
    double kept, sampled, mass;
    double score_bytes, select_bytes, attend_bytes, dense_bytes;
    double p50, p99;                      /* of a step as the client waited, seconds */
    double append, score, select, attend; /* the daemon's, seconds */
    uint64_t rows, exact, estimated;
};

static struct figures figure(const struct replay_report *report, uint32_t layer) {
    const struct replay_trace *t = report->trace;
    const struct replay_result *result = &report->run->layers[layer];
    struct figures f = {.rows = t->steps * t->kv_heads};
    double rows = (double)f.rows, steps = (double)t->steps;
    for (uint64_t i = 0; i < f.rows; i++) {
        const struct lk_head_result *head = &result->heads[i];
        f.kept += head->kept / rows;
        f.sampled += head->sampled / rows;
        f.mass += (double)head->mass / rows;
        f.exact += (head->flags & LK_HEAD_EXACT) != 0;
        f.estimated += (head->flags & LK_HEAD_ESTIMATED) != 0;
    }
    for (uint64_t i = 0; i < t->steps; i++) {
        const struct lk_step_result *timing = &result->timing[i];
        f.score_bytes += (double)timing->score_bytes / steps;
        f.select_bytes += (double)timing->select_bytes / steps;
        f.attend_bytes += (double)timing->attend_bytes / steps;
        f.dense_bytes += (double)timing->dense_bytes / steps;
        f.append += (double)timing->append_ns * 1e-9 / steps;
        f.score += (double)timing->score_ns * 1e-9 / steps;
        f.select += (double)timing->select_ns * 1e-9 / steps;
        f.attend += (double)timing->attend_ns * 1e-9 / steps;
    }
    f.p50 = lk_percentile(result->seconds, t->steps, 50); /* sorts them: nobody asks for order */
    f.p99 = lk_percentile(result->seconds, t->steps, 99);
    return f;
}

static double read_bytes(const struct figures *f) {
    return f->score_bytes + f->select_bytes + f->attend_bytes;
}

/* ---- for people ---- */

static void print_way(const struct replay_comparison *comparison, enum replay_way way,
                      const char *name, const double *reported) {
    const struct replay_verdict *v = &comparison->way[way];
    char carriers[32] = "none", mass[16] = "";
    if (v->carriers)
        snprintf(carriers, sizeof(carriers), "%.1f %%",
                 100.0 * (double)v->carriers_read / (double)v->carriers);
    if (reported)
        snprintf(mass, sizeof(mass), "%.4f", *reported);
    /* Neither is negative, but for the sign of a NaN. */
    printf("  %-20s %8s %8.4f %14s %14.4f\n", name, mass, fabs(v->mass), carriers, fabs(v->error));
}

static void print_comparison(const struct replay_comparison *comparison, const struct figures *f) {
    printf("  %-20s %17s %14s %14s\n", "", "captured mass", "carrier pages", "output");
    printf("  %-20s %8s %8s %14s %14s\n", "pages chosen by", "reported", "true", "read", "error");
    print_way(comparison, WAY_DAEMON, way_names[WAY_DAEMON], &f->mass);
    if (comparison->way[WAY_KEPT].there)
        print_way(comparison, WAY_KEPT, "  nothing sampled", NULL);
    print_way(comparison, WAY_CENTROID, way_names[WAY_CENTROID], NULL);
    print_way(comparison, WAY_QUEST, way_names[WAY_QUEST], NULL);
    if (!comparison->way[WAY_KEPT].there)
        printf("  (nothing was sampled, so the output error without a sample is the same)\n");
}

static void print_cost(const struct figures *f) {
    char read[LK_WORD_BYTES], dense[LK_WORD_BYTES], score[LK_WORD_BYTES], select[LK_WORD_BYTES],
        attend[LK_WORD_BYTES], p50[LK_WORD_BYTES], p99[LK_WORD_BYTES];
    printf(
        "  read a step  %s, where dense attention reads %s: %.1f x as much (score %s, select %s, "
        "attend %s)\n",
        lk_bytes_word(read_bytes(f), read), lk_bytes_word(f->dense_bytes, dense),
        read_bytes(f) > 0 ? f->dense_bytes / read_bytes(f) : 0,
        lk_bytes_word(f->score_bytes, score), lk_bytes_word(f->select_bytes, select),
        lk_bytes_word(f->attend_bytes, attend));
    printf("  a step took  p50 %s, p99 %s as the client saw it", lk_time_word(f->p50, p50),
           lk_time_word(f->p99, p99));
    printf(" (means: append %s, score %s, ", lk_time_word(f->append, p50),
           lk_time_word(f->score, score));
    printf("select %s, attend %s)\n", lk_time_word(f->select, select),
           lk_time_word(f->attend, attend));
}

static void print_layer(const struct replay_report *report, uint32_t layer) {
    struct figures f = figure(report, layer);
    printf("\nlayer %" PRIu32 ": %.1f pages kept, %.1f sampled",
           report->trace->layers[layer].number, f.kept, f.sampled);
    if (f.exact == f.rows)
        printf(", all rows exact");
    else if (f.exact)
        printf(", %" PRIu64 " of %" PRIu64 " rows exact", f.exact, f.rows);
    if (report->comparison)
        printf("\n");
    else
        printf(", captured mass %.4f%s\n", f.mass, f.estimated ? " (estimated)" : "");
    if (report->comparison)
        print_comparison(&report->comparison[layer], &f);
    print_cost(&f);
}

void replay_report_text(const struct replay_report *report) {
    const struct replay_options *o = report->options;
    const struct replay_trace *t = report->trace;
    char tokens[LK_WORD_BYTES], append[LK_WORD_BYTES];
    printf("%s: %" PRIu32 " layer%s of %s token%s, %" PRIu64 " step%s, %" PRIu32
           " KV head%s x group %" PRIu32 ", d %" PRIu32 ", %s\n",
           o->trace, t->layer_count, lk_plural(t->layer_count), lk_count_word(t->tokens, tokens),
           lk_plural(t->tokens), t->steps, lk_plural(t->steps), t->kv_heads, lk_plural(t->kv_heads),
           t->group, t->head_dim, lk_tensor_type_name(t->type));
    if (o->dense)
        printf("dense: all pages attended");
    else
        printf("budget %" PRIu32 " tokens, %" PRIu32 " page%s of %" PRIu32, o->budget,
               o->budget / o->page_tokens, lk_plural(o->budget / o->page_tokens), o->page_tokens);
    if (o->mass > 0)
        printf(", mass target %g", o->mass);
    printf("; rank %" PRIu32 ", scan %s; the prompt was appended in %s\n", o->rank,
           replay_scan_name(o->scan), lk_time_word(report->run->append_seconds, append));
    for (uint32_t i = 0; i < t->layer_count; i++)
        print_layer(report, i);
}

/* ---- for programs ---- */

/* JSON has no NaN: what a trace's own NaN made of a figure is null. */
static void set_real(json_t *object, const char *key, double value) {
    json_object_set_new(object, key, isfinite(value) ? json_real(value) : json_null());
}

static void set_count(json_t *object, const char *key, uint64_t value) {
    json_object_set_new(object, key, json_integer((json_int_t)value));
}

static json_t *way_json(const struct replay_verdict *v) {
    json_t *way = json_object();
    set_real(way, "captured_mass_true", v->mass);
    set_real(way, "output_error", v->error);
    set_count(way, "carriers", v->carriers);
    set_count(way, "carriers_read", v->carriers_read);
    return way;
}

static json_t *bytes_json(const struct figures *f) {
    json_t *bytes = json_object();
    set_real(bytes, "score", f->score_bytes);
    set_real(bytes, "select", f->select_bytes);
    set_real(bytes, "attend", f->attend_bytes);
    set_real(bytes, "dense", f->dense_bytes);
    return bytes;
}

static json_t *seconds_json(const struct figures *f) {
    json_t *seconds = json_object();
    set_real(seconds, "p50", f->p50);
    set_real(seconds, "p99", f->p99);
    set_real(seconds, "append", f->append);
    set_real(seconds, "score", f->score);
    set_real(seconds, "select", f->select);
    set_real(seconds, "attend", f->attend);
    return seconds;
}

static json_t *layer_json(const struct replay_report *report, uint32_t layer) {
    struct figures f = figure(report, layer);
    json_t *object = json_object();
    set_count(object, "layer", report->trace->layers[layer].number);
    set_real(object, "pages_kept", f.kept);
    set_real(object, "pages_sampled", f.sampled);
    set_real(object, "captured_mass_reported", f.mass);
    set_count(object, "rows", f.rows);
    set_count(object, "rows_exact", f.exact);
    set_count(object, "rows_mass_estimated", f.estimated);
    json_object_set_new(object, "bytes_a_step", bytes_json(&f));
    json_object_set_new(object, "seconds_a_step", seconds_json(&f));
    if (!report->comparison)
        return object;
    json_t *ways = json_object();
    for (int way = 0; way < WAYS; way++)
        if (report->comparison[layer].way[way].there)
            json_object_set_new(ways, way_keys[way], way_json(&report->comparison[layer].way[way]));
    json_object_set_new(object, "compare", ways);
    return object;
}

int replay_report_json(const struct replay_report *report, char *why) {
    const struct replay_options *o = report->options;
    const struct replay_trace *t = report->trace;
    json_t *layers = json_array();
    for (uint32_t i = 0; i < t->layer_count; i++)
        json_array_append_new(layers, layer_json(report, i));
    json_t *object = json_pack(
        "{s:s, s:I, s:I, s:I, s:I, s:I, s:s, s:I, s:I, s:I, s:s, s:b, s:f, s:o}", "trace", o->trace,
        "tokens", (json_int_t)t->tokens, "steps", (json_int_t)t->steps, "kv_heads",
        (json_int_t)t->kv_heads, "group", (json_int_t)t->group, "head_dim", (json_int_t)t->head_dim,
        "dtype", lk_tensor_type_name(t->type), "budget", (json_int_t)o->budget, "page_tokens",
        (json_int_t)o->page_tokens, "rank", (json_int_t)o->rank, "scan", replay_scan_name(o->scan),
        "dense", (int)o->dense, "append_seconds", report->run->append_seconds, "layers", layers);
    if (object && o->mass > 0)
        set_real(object, "mass_target", o->mass);
    char *text = object ? json_dumps(object, JSON_INDENT(2) | JSON_REAL_PRECISION(9)) : NULL;
    json_decref(object);
    if (!text) {
        snprintf(why, REPLAY_WHY_BYTES, "no memory for the report (or a path that is no UTF-8)");
        return EX_OSERR;
    }
    printf("%s\n", text);
    free(text);
    return 0;
}
