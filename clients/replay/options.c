/* SPDX-License-Identifier: MIT */
/*
 * options.c - the command line of locks-replay.
 */
#include "replay.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

#include "../../kernels/kernels.h"
#include "../common/measure.h"
#include "../common/parallel.h"

static const char *const scan_names[] = {"auto", "full", "coarse", "nested", "tree"};
#define SCANS (sizeof(scan_names) / sizeof(*scan_names))

const char *replay_scan_name(uint32_t scan) {
    return scan < SCANS ? scan_names[scan] : "another";
}

void replay_options_help(void) {
    printf(
        "usage: locks-replay --trace FILE.safetensors [OPTION]...\n\n"
        "Replays recorded queries, keys and values through locksd as a client would: appends all\n"
        "tokens before the first query, then one DECODE a token and layer.\n\n"
        "  --trace FILE         layers.L.q [steps, q_heads, d], layers.L.k and layers.L.v\n"
        "                       [tokens, kv_heads, d], F16, BF16 or F32; query i belongs to token\n"
        "                       tokens - steps + i\n"
        "  --layers 5,20        only these layers\n"
        "  --socket PATH        a running daemon; else a private one is started\n"
        "  --budget TOKENS      attended by a row, sink and newest page included (512); 2K is "
        "2048\n"
        "  --sampled PAGES      of the budget that stand for all pages left out (half of the "
        "budget\n"
        "                       from 128 pages on, else 0)\n"
        "  --mass P             stop keeping pages at this share, above 0 and at most 1\n"
        "  --scan MODE          full, coarse, nested, tree or auto (full)\n"
        "  --rank R             directions of a page's summary: 2, 4, 8 or 16 (8)\n"
        "  --page-tokens B      8, 16, 32 or 64 (16)\n"
        "  --dense              attend all pages: exact\n"
        "  --compare            compute exact attention too and judge the daemon, the centroid "
        "and\n"
        "                       the Quest selector by it\n"
        "  --out FILE           write outputs, pages, weights and masses (safetensors)\n"
        "  --json               the report as JSON\n"
        "  --device WHICH       of a private daemon: cpu, cuda or auto (auto)\n"
        "  --threads N          of a private daemon and of --compare (the processors there are)\n"
        "  --version, --help\n\n"
        "Words of the report\n"
        "  captured mass   share of the exact attention weight on the kept pages, mean over steps\n"
        "                  and heads: as the daemon reports it, and true\n"
        "  carrier page    other than the sink and the newest, with 1 %% or more of its group's\n"
        "                  weight; carriers read: the share of them that were kept or sampled\n"
        "  output error    |output - exact| / |exact| over a group's heads, mean\n"
        "  centroid, Quest pages chosen by the mean of their keys, or by Quest's envelope, as "
        "many\n"
        "                  as the budget has, sink and newest always kept\n\n"
        "Exit codes: 0; 64 usage; 65 the trace; 66 no trace; 69 no daemon; 70 a step was\n"
        "refused; 71 no memory; 73, 74 the output; 76 versions differ; 77 not allowed to connect.\n"
        "Manual: locks-replay(1).\n");
}

/* Leaves a sentence, -> EX_USAGE. */
#define usage(why, ...) (snprintf(why, REPLAY_WHY_BYTES, __VA_ARGS__), EX_USAGE)

/* ---- values ---- */

static int whole(const char *option, const char *text, uint64_t low, uint64_t high, uint64_t *ret,
                 char *why) {
    uint64_t value;
    const char *rest = lk_number_read(text, low, high, &value);
    if (!rest || *rest)
        return usage(why, "%s: '%s' is no whole number between %" PRIu64 " and %" PRIu64, option,
                     text, low, high);
    *ret = value;
    return 0;
}

static int take_u32(const char *option, const char *text, uint32_t low, uint32_t high,
                    uint32_t *ret, char *why) {
    uint64_t value;
    int rc = whole(option, text, low, high, &value, why);
    if (!rc)
        *ret = (uint32_t)value;
    return rc;
}

static int take_layers(struct replay_options *o, const char *text, char *why) {
    char *copy = strdup(text), *rest = copy, *word;
    int rc = copy ? 0 : usage(why, "--layers: no memory");
    o->layer_count = 0;
    while (!rc && (word = strsep(&rest, ","))) {
        if (o->layer_count == REPLAY_LAYERS_MAX)
            rc = usage(why, "--layers: more than %d", REPLAY_LAYERS_MAX);
        else
            rc = take_u32("--layers", word, 0, UINT32_MAX, &o->layers[o->layer_count], why);
        for (uint32_t i = 0; !rc && i < o->layer_count; i++)
            if (o->layers[i] == o->layers[o->layer_count])
                rc = usage(why, "--layers: layer %s twice", word);
        o->layer_count++;
    }
    free(copy);
    return rc;
}

static int take_mass(struct replay_options *o, const char *text, char *why) {
    char *end = NULL;
    double mass = strtod(text, &end);
    if (end == text || *end || !(mass > 0 && mass <= 1))
        return usage(why, "--mass: '%s' is no number above 0 and at most 1", text);
    o->mass = mass;
    return 0;
}

static int take_scan(struct replay_options *o, const char *text, char *why) {
    for (uint32_t i = 0; i < SCANS; i++)
        if (strcmp(scan_names[i], text) == 0) {
            o->scan = i;
            return 0;
        }
    return usage(why, "--scan: '%s' is none of full, coarse, nested, tree, auto", text);
}

static int take_device(struct replay_options *o, const char *text, char *why) {
    if (strcmp(text, "auto") != 0 && strcmp(text, "cpu") != 0 && strcmp(text, "cuda") != 0)
        return usage(why, "--device: '%s' is none of auto, cpu, cuda", text);
    o->device = text;
    return 0;
}

static int take_sampled(struct replay_options *o, const char *text, char *why) {
    uint64_t value;
    int rc = whole("--sampled", text, 0, INT32_MAX, &value, why);
    if (!rc)
        o->sampled = (int64_t)value;
    return rc;
}

/* ---- the line ---- */

static bool *flag(struct replay_options *o, const char *name) {
    const struct {
        const char *name;
        bool *flag;
    } flags[] = {{"--dense", &o->dense}, {"--compare", &o->compare}, {"--json", &o->json},
                 {"--help", &o->help},   {"-h", &o->help},           {"--version", &o->version}};
    for (size_t i = 0; i < sizeof(flags) / sizeof(*flags); i++)
        if (strcmp(flags[i].name, name) == 0)
            return flags[i].flag;
    return NULL;
}

/* An option with a value; name is without it. -> EX_USAGE, or 0. */
static int option(struct replay_options *o, const char *name, const char *value, char *why) {
    const struct {
        const char *name;
        const char **text;
        uint32_t *number;
        uint32_t low, high;
        int (*take)(struct replay_options *o, const char *text, char *why);
    } options[] = {
        {"--trace", &o->trace, NULL, 0, 0, NULL},
        {"--socket", &o->socket, NULL, 0, 0, NULL},
        {"--out", &o->out, NULL, 0, 0, NULL},
        {"--budget", NULL, &o->budget, 1, 1U << 30, NULL},
        {"--rank", NULL, &o->rank, 1, UINT32_MAX, NULL},
        {"--page-tokens", NULL, &o->page_tokens, 1, UINT32_MAX, NULL},
        {"--threads", NULL, &o->threads, 1, 256, NULL},
        {"--layers", NULL, NULL, 0, 0, take_layers},
        {"--mass", NULL, NULL, 0, 0, take_mass},
        {"--scan", NULL, NULL, 0, 0, take_scan},
        {"--device", NULL, NULL, 0, 0, take_device},
        {"--sampled", NULL, NULL, 0, 0, take_sampled},
    };
    for (size_t i = 0; i < sizeof(options) / sizeof(*options); i++) {
        if (strcmp(options[i].name, name) != 0)
            continue;
        if (!value)
            return usage(why, "%s: its value is missing", name);
        if (options[i].text && !*value)
            return usage(why, "%s: its value is empty", name);
        if (options[i].text)
            *options[i].text = value;
        else if (options[i].number)
            return take_u32(name, value, options[i].low, options[i].high, options[i].number, why);
        else
            return options[i].take(o, value, why);
        return 0;
    }
    return usage(why, "unknown option '%s'; locks-replay --help lists the options", name);
}

static int parse_one(int argc, char **argv, int *at, struct replay_options *o, char *why) {
    char *argument = argv[*at];
    bool *on = flag(o, argument);
    if (on) {
        *on = true;
        return 0;
    }
    char *equals = argument[0] == '-' ? strchr(argument, '=') : NULL;
    if (equals) {
        char name[32];
        snprintf(name, sizeof(name), "%.*s", (int)(equals - argument), argument);
        return flag(o, name) ? usage(why, "%s takes no value", name)
                             : option(o, name, equals + 1, why);
    }
    const char *value = *at + 1 < argc ? argv[*at + 1] : NULL;
    int rc = option(o, argument, value, why);
    *at += 1;
    return rc;
}

/* What no daemon has, and what would leave nothing to attend. */
static int check(const struct replay_options *o, char *why) {
    const struct lk_geometry of = {1, 1, 1, 64, o->page_tokens, o->rank, LK_BF16};
    char text[128];
    if (lk_geometry_invalid(&of, text, sizeof(text)))
        return usage(why, "--page-tokens %" PRIu32 " --rank %" PRIu32 ": %s", o->page_tokens,
                     o->rank, text);
    if (o->budget < o->page_tokens)
        return usage(why, "--budget: %" PRIu32 " token%s less than a page, %" PRIu32, o->budget,
                     o->budget == 1 ? " is" : "s are", o->page_tokens);
    return 0;
}

int replay_options_parse(int argc, char **argv, struct replay_options *ret, char *why) {
    *ret = (struct replay_options){.budget = 512,
                                   .sampled = -1,
                                   .scan = LK_SCAN_FULL,
                                   .rank = 8,
                                   .page_tokens = 16,
                                   .device = "auto",
                                   .threads = lk_parallel_processors()};
    for (int at = 1; at < argc; at++) {
        int rc = parse_one(argc, argv, &at, ret, why);
        if (rc)
            return rc;
    }
    if (!ret->trace && !ret->help && !ret->version)
        return usage(why, "--trace FILE is missing; locks-replay --help lists the options");
    return check(ret, why);
}
