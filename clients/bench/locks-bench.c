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

#include "../common/finish.h"
#include "../common/parallel.h"
#include "bench.h"

#define ROUNDS       15
#define ROUNDS_QUICK 5

static const struct verb {
    const char *name;
    int (*run)(struct bench *bench);
    bool prints; /* its table itself, as it goes */
    const char *what;
} verbs[] = {
    {"latency", bench_latency, false, "a step through a private daemon, empty and real"},
    {"cpu", bench_cpu, false,
     "kernels of this machine: bandwidth of score and dense, sparse steps, build"},
    {"device", bench_device, true,
     "kernels of a GPU: read ceiling, dense, every stage, whole steps, builds"},
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
        printf("  %-16s  %s\n", verbs[i].name, verbs[i].what);
    printf(
        "\nlatency, cpu:\n"
        "  --device NAME     of latency's daemon: cuda, cpu or auto (auto)\n"
        "  --gpu N           of latency's daemon (0)\n"
        "  --context N       tokens, of cpu (131072; 1048576 takes 5 GiB)\n"
        "  --kv-heads N      of cpu (8)\n"
        "  --group N         query heads of a KV head, of cpu (4)\n"
        "  --threads N       of cpu (the processors there are)\n"
        "  --rounds N        interleaved rounds, of which medians are taken (%d)\n"
        "  --json            figures as JSON\n\n"
        "device (also spelled --device; LIST: values between commas, K and M are 2^10 and 2^20):\n"
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
        "  --version, --help\n\n"
        "Exit codes: 0, whether targets are met or not; 64 usage; 69 no daemon, no GPU or no\n"
        "CUDA; 71 no memory; 73 FILE, 74 stdout cannot be written; 70 anything else. Manual:\n"
        "locks-bench(1).\n",
        ROUNDS, ROUNDS, ROUNDS_QUICK);
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
        {"--gpu", 0, 63, NULL, &bench->choice.gpu},
    };
    for (size_t i = 0; i < sizeof(numbers) / sizeof(*numbers); i++) {
        char *end = NULL;
        if (strcmp(numbers[i].name, name) != 0)
            continue;
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

static int take_device_name(struct bench *bench, const char *text) {
    static const char *const names[] = {"auto", "cpu", "cuda"};
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
        if (strcmp(text, names[i]) == 0)
            bench->device = names[i];
    return bench->device ? 0 : usage("--device is auto, cpu or cuda, not ", text);
}

static bool is_device(const struct request *request) {
    return request->verb && request->verb->run == bench_device;
}

static int take_value(struct request *request, const char *name, const char *text) {
    struct bench *bench = &request->bench;
    if (!text)
        return usage(name, ": its value is missing");
    if (is_device(request) && strcmp(name, "--json") == 0) {
        bench->choice.json = text;
        return 0;
    }
    if (is_device(request) && choice_knows(name)) {
        if (choice_take(&bench->choice, name, text, bench->why, sizeof(bench->why)))
            return 0;
        fprintf(stderr, "locks-bench: %s\n", bench->why);
        return EX_USAGE;
    }
    if (!is_device(request) && strcmp(name, "--device") == 0)
        return take_device_name(bench, text);
    return take_number(bench, name, text);
}

static int take_verb(struct request *request, const char *name) {
    if (request->verb)
        return usage("one verb at a time, not also ", name);
    for (size_t i = 0; i < VERBS && !request->verb; i++)
        if (strcmp(verbs[i].name, name) == 0)
            request->verb = &verbs[i];
    return request->verb ? 0 : usage("unknown verb ", name);
}

/* An option without a value, or the verb. -> false: something else. */
static bool take_word(struct request *request, const char *word, int *ret) {
    *ret = 0;
    if (strcmp(word, "--json") == 0 && !is_device(request))
        request->bench.json = true;
    else if (strcmp(word, "--quick") == 0 && is_device(request))
        request->bench.choice.quick = true;
    else if (strcmp(word, "--help") == 0)
        request->help = 1;
    else if (strcmp(word, "--version") == 0)
        request->version = 1;
    else if (strcmp(word, "--device") == 0 && !request->verb)
        *ret = take_verb(request, word + 2);
    else if (word[0] != '-')
        *ret = take_verb(request, word);
    else
        return false;
    return true;
}

static int parse(int argc, char **argv, struct request *request) {
    for (int i = 1; i < argc; i++) {
        int rc = 0;
        char *equals = argv[i][0] == '-' ? strchr(argv[i], '=') : NULL;
        if (equals) {
            *equals = '\0';
            rc = take_value(request, argv[i], equals + 1);
        } else if (!take_word(request, argv[i], &rc)) {
            rc = take_value(request, argv[i], i + 1 < argc ? argv[i + 1] : NULL);
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
