/* SPDX-License-Identifier: MIT */
/*
 * locks-bench.c - the command line. The verbs are a table; exit codes are those of sysexits.h.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

#include "../../kernels/kernels.h"
#include "../common/measure.h"
#include "../common/parallel.h"
#include "../common/streams.h"
#include "bench.h"

#define ROUNDS       15
#define ROUNDS_QUICK 5

enum verb_bit { LATENCY = 1, CPU = 2, DEVICE = 4 };

static const struct verb {
    const char *name;
    enum verb_bit bit;
    int (*run)(struct bench *bench);
    bool prints; /* its table itself, as it goes */
    const char *what;
} verbs[] = {
    {"latency", LATENCY, bench_latency, false, "a step through a private daemon, empty and real"},
    {"cpu", CPU, bench_cpu, false,
     "kernels of this machine: bandwidth of score and dense, sparse steps, build"},
    {"device", DEVICE, bench_device, true,
     "kernels of a GPU: read ceiling, dense, every stage, whole steps, builds"},
};
#define VERBS (sizeof(verbs) / sizeof(*verbs))

struct request {
    struct bench bench;
    const struct verb *verb;
    bool help, version;
};

static void print_help(void) {
    printf("usage: locks-bench VERB [OPTION]...\n\nMeasures this machine.\n\n");
    for (size_t i = 0; i < VERBS; i++)
        printf("  %-16s  %s\n", verbs[i].name, verbs[i].what);
    printf("\nlatency, cpu:\n"
           "  --device NAME     of latency's daemon: cuda, cpu or auto (auto)\n"
           "  --gpu N           of latency's daemon (0)\n"
           "  --context N       tokens, of cpu (128K; 1M takes 5 GiB)\n"
           "  --kv-heads N      of cpu (8)\n"
           "  --group N         query heads of a KV head, of cpu (4)\n"
           "  --threads N       of cpu (the processors there are)\n"
           "  --rounds N        interleaved rounds, of which medians are taken (%d)\n"
           "  --json            figures as JSON\n\n"
           "device (also spelled --device; LIST: values between commas):\n"
           "  --context LIST    tokens of a row (8K,32K,128K,512K,1M)\n"
           "  --batch LIST      rows (1,8,32,64, as far as memory allows)\n"
           "  --heads LIST      query/KV heads (32/8,32/2,32/4)\n"
           "  --page-tokens LIST  8 or 16 (16,8)\n"
           "  --scan LIST       of full, coarse, nested, tree (full,nested,tree)\n"
           "  --parts LIST      of anchor, steps, tokens, builds (all)\n"
           "  --rounds N        replays, of which medians are taken (%d)\n"
           "  --gpu N           (0)\n"
           "  --quick           32K,128K,1M x 1,8 rows, 32/8 heads, pages of 16, %d rounds, unless "
           "chosen\n"
           "  --json FILE       all figures as JSON, beside the table\n\n"
           "K and M behind a number are 2^10 and 2^20. --version, --help\n\n"
           "Exit codes: 0, whether targets are met or not; 64 usage; 69 no daemon, no GPU or no\n"
           "CUDA; 71 no memory; 73 FILE, 74 stdout cannot be written; 70 anything else. Manual:\n"
           "locks-bench(1).\n",
           ROUNDS, ROUNDS, ROUNDS_QUICK);
}

/* Says the three in a row, -> EX_USAGE. */
static int usage(const char *a, const char *b, const char *c) {
    fprintf(stderr, "locks-bench: %s%s%s; locks-bench --help lists verbs and options\n", a, b, c);
    return EX_USAGE;
}

/* ---- options ---- */

static int take_number(struct bench *bench, const char *name, const char *text) {
    const struct {
        const char *name;
        uint64_t low, high;
        uint64_t *wide;
        uint32_t *narrow;
    } numbers[] = {
        {"--context", 1024, UINT64_C(1) << 30, &bench->context, NULL},
        {"--kv-heads", 1, LK_KV_HEADS_MAX, NULL, &bench->kv_heads},
        {"--group", 1, LK_GROUP_MAX, NULL, &bench->group},
        {"--threads", 1, 256, NULL, &bench->threads},
        {"--rounds", 1, BENCH_ROUNDS_MAX, NULL, &bench->rounds},
        {"--gpu", 0, 63, NULL, &bench->choice.gpu},
    };
    size_t i = 0;
    while (strcmp(numbers[i].name, name) != 0)
        i++;
    uint64_t value;
    const char *rest = lk_number_read(text, numbers[i].low, numbers[i].high, &value);
    if (!rest || *rest) {
        fprintf(stderr,
                "locks-bench: %s: '%s' is no whole number between %" PRIu64 " and %" PRIu64 "\n",
                name, text, numbers[i].low, numbers[i].high);
        return EX_USAGE;
    }
    if (numbers[i].wide)
        *numbers[i].wide = value;
    else if (numbers[i].narrow)
        *numbers[i].narrow = (uint32_t)value;
    return 0;
}

static int take_list(struct bench *bench, const char *name, const char *text) {
    if (choice_take(&bench->choice, name, text, bench->why, sizeof(bench->why)))
        return 0;
    fprintf(stderr, "locks-bench: %s\n", bench->why);
    return EX_USAGE;
}

static int take_device_name(struct bench *bench, const char *name, const char *text) {
    static const char *const names[] = {"auto", "cpu", "cuda"};
    bench->device = NULL;
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
        if (strcmp(text, names[i]) == 0)
            bench->device = names[i];
    return bench->device ? 0 : usage(name, " is auto, cpu or cuda, not ", text);
}

static int take_file(struct bench *bench, const char *name, const char *text) {
    (void)name;
    bench->choice.json = text;
    return 0;
}

static int set_json(struct bench *bench, const char *name, const char *text) {
    (void)name, (void)text;
    bench->json = true;
    return 0;
}

static int set_quick(struct bench *bench, const char *name, const char *text) {
    (void)name, (void)text;
    bench->choice.quick = true;
    return 0;
}

static const struct option {
    const char *name;
    unsigned verbs; /* that take it: enum verb_bit */
    bool bare;      /* without a value */
    int (*take)(struct bench *bench, const char *name, const char *text);
} options[] = {
    {"--device", LATENCY, false, take_device_name},
    {"--gpu", LATENCY | DEVICE, false, take_number},
    {"--context", CPU, false, take_number},
    {"--context", DEVICE, false, take_list},
    {"--kv-heads", CPU, false, take_number},
    {"--group", CPU, false, take_number},
    {"--threads", CPU, false, take_number},
    {"--batch", DEVICE, false, take_list},
    {"--heads", DEVICE, false, take_list},
    {"--page-tokens", DEVICE, false, take_list},
    {"--scan", DEVICE, false, take_list},
    {"--parts", DEVICE, false, take_list},
    {"--rounds", LATENCY | CPU | DEVICE, false, take_number},
    {"--quick", DEVICE, true, set_quick},
    {"--json", LATENCY | CPU, true, set_json},
    {"--json", DEVICE, false, take_file},
};
#define OPTIONS (sizeof(options) / sizeof(*options))

/* Of this verb, else of another one, else NULL. */
static const struct option *find_option(const char *name, unsigned verb) {
    const struct option *other = NULL;
    for (size_t i = 0; i < OPTIONS; i++) {
        if (strcmp(options[i].name, name) != 0)
            continue;
        if (options[i].verbs & verb)
            return &options[i];
        other = &options[i];
    }
    return other;
}

static int not_taken(const struct verb *verb, const char *name) {
    fprintf(stderr, "locks-bench: %s does not take %s, it is of", verb->name, name);
    for (size_t i = 0; i < VERBS; i++)
        if (find_option(name, verbs[i].bit)->verbs & verbs[i].bit)
            fprintf(stderr, " %s", verbs[i].name);
    fprintf(stderr, "; locks-bench --help lists verbs and options\n");
    return EX_USAGE;
}

/* ---- the line ---- */

/* The verb's place, which decides what the options mean: the first word that is one; `--device`
 * before any is another spelling of `device`. 0: none. */
static int find_verb(int argc, char **argv, const struct verb **ret) {
    for (int at = 1; at < argc; at++)
        for (size_t i = 0; i < VERBS; i++)
            if (strcmp(argv[at], verbs[i].name) == 0 ||
                (verbs[i].bit == DEVICE && strcmp(argv[at], "--device") == 0)) {
                *ret = &verbs[i];
                return at;
            }
    return 0;
}

/* *text: the value behind a '=', or what may be one; *ret_bare: it was not used. */
static int take_option(struct request *request, const char *name, const char *text, bool joined,
                       bool *ret_bare) {
    const struct option *option = find_option(name, request->verb ? request->verb->bit : 0);
    *ret_bare = true;
    if (!option)
        return usage("unknown option ", name, "");
    if (!request->verb)
        return usage("a verb is missing", "", "");
    if (!(option->verbs & request->verb->bit))
        return not_taken(request->verb, name);
    if (option->bare)
        return joined ? usage(name, " takes no value", "")
                      : option->take(&request->bench, name, NULL);
    *ret_bare = false;
    return text ? option->take(&request->bench, name, text)
                : usage(name, ": its value is missing", "");
}

/* -> 0 or EX_USAGE, said; *at is moved to the last word that was taken. */
static int parse_one(struct request *request, char **argv, int *at) {
    char *word = argv[*at], *equals = word[0] == '-' ? strchr(word, '=') : NULL;
    bool bare;
    if (word[0] != '-')
        return request->verb ? usage("one verb at a time, not also ", word, "")
                             : usage("unknown verb ", word, "");
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
        request->help = true;
        return 0;
    }
    if (strcmp(word, "--version") == 0) {
        request->version = true;
        return 0;
    }
    if (equals)
        *equals = '\0';
    int rc = take_option(request, word, equals ? equals + 1 : argv[*at + 1], equals, &bare);
    *at += !equals && !bare;
    return rc;
}

static int parse(int argc, char **argv, struct request *request) {
    int verb = find_verb(argc, argv, &request->verb);
    for (int at = 1; at < argc; at++) {
        int rc = at == verb ? 0 : parse_one(request, argv, &at);
        if (rc)
            return rc;
    }
    if (!request->verb && !request->help && !request->version)
        return usage("a verb is missing", "", "");
    return 0;
}

static int measure(struct request *request) {
    struct bench *bench = &request->bench;
    if (!bench->rounds)
        bench->rounds = bench->choice.quick ? ROUNDS_QUICK : ROUNDS;
    int rc = request->verb->run(bench);
    if (!rc && bench->json)
        rc = bench_print_json(bench);
    else if (!rc && !request->verb->prints)
        bench_print(bench);
    if (rc)
        fprintf(stderr, "locks-bench: %s: %s\n", request->verb->name, bench->why);
    return rc;
}

int main(int argc, char **argv) {
    static struct request request;

    lk_begin();
    request.bench = (struct bench){
        .context = 131072, .kv_heads = 8, .group = 4, .threads = lk_parallel_processors()};
    int rc = parse(argc, argv, &request);
    if (!rc && request.help)
        print_help();
    else if (!rc && request.version)
        printf("locks-bench %s\n", LK_VERSION);
    else if (!rc)
        rc = measure(&request);
    return lk_finish("locks-bench", rc);
}
