/* SPDX-License-Identifier: MIT */
/*
 * locks-bench.c - the command line. The verbs are a table; exit codes are those of sysexits.h.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

#include "../common/parallel.h"
#include "bench.h"

static const struct verb {
    const char *name;
    int (*run)(struct bench *bench);
    const char *what;
} verbs[] = {
    {"latency", bench_latency, "an empty step through a private daemon, beside a bare exchange"},
    {"cpu", bench_cpu,
     "kernels of this machine: bandwidth of score and dense, sparse steps, build"},
};
#define VERBS (sizeof(verbs) / sizeof(*verbs))

struct request {
    struct bench bench;
    const struct verb *verb;
    int help, version;
};

static void print_help(void) {
    printf("usage: locks-bench VERB [OPTION]...\n\nMeasures this machine.\n\n");
    for (size_t i = 0; i < VERBS; i++)
        printf("  %-14s  %s\n", verbs[i].name, verbs[i].what);
    printf("\n  --context N     tokens, of cpu (131072; 1048576 takes 5 GiB)\n"
           "  --kv-heads N    of cpu (8)\n"
           "  --group N       query heads of a KV head, of cpu (4)\n"
           "  --threads N     of cpu (the processors there are)\n"
           "  --rounds N      interleaved rounds, of which medians are taken (15)\n"
           "  --json          figures as JSON\n"
           "  --version, --help\n\n"
           "Exit codes: 0, whether targets are met or not; 64 usage; 69 no daemon; 71 no memory;\n"
           "70 anything else. Manual: locks-bench(1).\n");
}

static int usage(const char *problem, const char *what) {
    fprintf(stderr, "locks-bench: %s%s; locks-bench --help lists verbs and options\n", problem,
            what);
    return EX_USAGE;
}

/* -> 0 or EX_USAGE, said. */
static int take_number(struct bench *bench, const char *name, const char *text) {
    const struct {
        const char *name;
        uint64_t low, high;
        uint64_t *wide;
        uint32_t *narrow;
    } numbers[] = {
        {"--context", 1024, UINT64_C(1) << 30, &bench->context, NULL},
        {"--kv-heads", 1, 1024, NULL, &bench->kv_heads},
        {"--group", 1, 32, NULL, &bench->group},
        {"--threads", 1, 256, NULL, &bench->threads},
        {"--rounds", 1, BENCH_ROUNDS_MAX, NULL, &bench->rounds},
    };
    for (size_t i = 0; i < sizeof(numbers) / sizeof(*numbers); i++) {
        char *end = NULL;
        if (strcmp(numbers[i].name, name) != 0)
            continue;
        if (!text)
            return usage(name, ": its value is missing");
        errno = 0;
        uint64_t value = strtoull(text, &end, 10);
        if (*text < '0' || *text > '9' || *end || errno || value < numbers[i].low ||
            value > numbers[i].high) {
            fprintf(stderr,
                    "locks-bench: %s: '%s' is no whole number between %" PRIu64 " and %" PRIu64
                    "\n",
                    name, text, numbers[i].low, numbers[i].high);
            return EX_USAGE;
        }
        if (numbers[i].wide)
            *numbers[i].wide = value;
        else
            *numbers[i].narrow = (uint32_t)value;
        return 0;
    }
    return usage("unknown option ", name);
}

static int take_verb(struct request *request, const char *name) {
    if (request->verb)
        return usage("one verb at a time, not also ", name);
    for (size_t i = 0; i < VERBS && !request->verb; i++)
        if (strcmp(verbs[i].name, name) == 0)
            request->verb = &verbs[i];
    return request->verb ? 0 : usage("unknown verb ", name);
}

static int parse(int argc, char **argv, struct request *request) {
    for (int i = 1; i < argc; i++) {
        int rc = 0;
        char *equals = argv[i][0] == '-' ? strchr(argv[i], '=') : NULL;
        if (strcmp(argv[i], "--json") == 0)
            request->bench.json = true;
        else if (strcmp(argv[i], "--help") == 0)
            request->help = 1;
        else if (strcmp(argv[i], "--version") == 0)
            request->version = 1;
        else if (argv[i][0] != '-')
            rc = take_verb(request, argv[i]);
        else if (equals) {
            *equals = '\0';
            rc = take_number(&request->bench, argv[i], equals + 1);
        } else {
            rc = take_number(&request->bench, argv[i], i + 1 < argc ? argv[i + 1] : NULL);
            i++;
        }
        if (rc)
            return rc;
    }
    if (!request->verb && !request->help && !request->version)
        return usage("a verb is missing", "");
    return 0;
}

static int measure(struct request *request) {
    struct bench *bench = &request->bench;
    int rc = request->verb->run(bench);
    if (!rc && bench->json)
        rc = bench_print_json(bench);
    else if (!rc)
        bench_print(bench);
    if (rc)
        fprintf(stderr, "locks-bench: %s: %s\n", request->verb->name, bench->why);
    return rc;
}

int main(int argc, char **argv) {
    static struct request request;
    request.bench = (struct bench){.context = 131072,
                                   .kv_heads = 8,
                                   .group = 4,
                                   .threads = lk_parallel_processors(),
                                   .rounds = 15};
    int rc = parse(argc, argv, &request);
    if (!rc && request.help)
        print_help();
    else if (!rc && request.version)
        printf("locks-bench %s\n", LK_VERSION);
    else if (!rc)
        rc = measure(&request);
    if (fflush(stdout) && !rc)
        return EX_IOERR;
    return rc;
}
