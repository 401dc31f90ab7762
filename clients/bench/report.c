/* SPDX-License-Identifier: MIT */
/*
 * report.c - figures as a table or as JSON.
 */
#include "bench.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <sysexits.h>

#include "../common/measure.h"

struct bench_figure *bench_add(struct bench *bench, const char *key, const char *what, double value,
                               const char *unit, enum bench_sense sense, double target) {
    struct bench_figure *figure = &bench->figures[bench->count];
    if (bench->count + 1 < BENCH_FIGURES_MAX) /* the last place is overwritten, never passed */
        bench->count++;
    *figure = (struct bench_figure){
        .key = key, .what = what, .value = value, .unit = unit, .sense = sense, .target = target};
    return figure;
}

static bool met(const struct bench_figure *figure) {
    return figure->sense == AT_LEAST ? figure->value >= figure->target
                                     : figure->value <= figure->target;
}

static const char *number(double value, char text[LK_WORD_BYTES]) {
    if (value >= 1000)
        return lk_count_word((uint64_t)(value + 0.5), text);
    snprintf(text, LK_WORD_BYTES, "%.*f", value < 10 ? 2 : 1, value);
    return text;
}

static void print_figure(const struct bench_figure *figure) {
    static const char *const senses[] = {"", "at least", "at most"};
    char value[LK_WORD_BYTES], target[LK_WORD_BYTES], text[2 * LK_WORD_BYTES] = "";
    if (figure->sense != NO_TARGET)
        snprintf(text, sizeof(text), "%s %s", senses[figure->sense],
                 number(figure->target, target));
    printf("%-34s %12s %-14s %-18s %-8s %s\n", figure->what, number(figure->value, value),
           figure->unit, text,
           figure->sense == NO_TARGET ? ""
           : met(figure)              ? "met"
                                      : "NOT MET",
           figure->note);
}

void bench_print(const struct bench *bench) {
    printf("%s\n\n%-34s %12s %-14s %-18s\n", bench->head, "", "measured", "", "target");
    for (unsigned i = 0; i < bench->count; i++)
        print_figure(&bench->figures[i]);
}

static json_t *figure_json(const struct bench_figure *figure) {
    json_t *object = json_pack("{s:f, s:s}", "value", figure->value, "unit", figure->unit);
    if (figure->note[0])
        json_object_set_new(object, "note", json_string(figure->note));
    if (figure->sense == NO_TARGET)
        return object;
    json_object_set_new(object, figure->sense == AT_LEAST ? "at_least" : "at_most",
                        json_real(figure->target));
    json_object_set_new(object, "met", json_boolean(met(figure)));
    return object;
}

int bench_print_json(struct bench *bench) {
    json_t *object = json_object();
    json_object_set_new(object, "measured", json_string(bench->head));
    for (unsigned i = 0; i < bench->count; i++)
        json_object_set_new(object, bench->figures[i].key, figure_json(&bench->figures[i]));
    char *text = json_dumps(object, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
    json_decref(object);
    if (!text) {
        snprintf(bench->why, sizeof(bench->why), "no memory for the report");
        return EX_OSERR;
    }
    printf("%s\n", text);
    free(text);
    return 0;
}
