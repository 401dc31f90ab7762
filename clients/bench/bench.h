/* SPDX-License-Identifier: MIT */
/*
 * bench.h - locks-bench: what this machine does, beside what it ought to do.
 *
 * A verb measures and leaves figures; a figure has a value, perhaps a target, and words. They print
 * as a table or as JSON. Figures that are compared come from interleaved rounds of one run: the
 * machine's other work then meets all alike, and ratios hold where times do not. One thread, but
 * for the measured work. Functions -> 0 or an exit code of sysexits.h with a sentence in `why`.
 */
#ifndef BENCH_H
#define BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "choice.h"

#define BENCH_WHY_BYTES   4096
#define BENCH_FIGURES_MAX 24
#define BENCH_ROUNDS_MAX  1000

enum bench_sense { NO_TARGET, AT_LEAST, AT_MOST };

struct bench_figure {
    const char *key;  /* of JSON */
    const char *what; /* of the table */
    double value;
    const char *unit;
    enum bench_sense sense;
    double target;
    char note[128];
};

struct bench {
    /* options */
    uint64_t context;
    uint32_t kv_heads, group, threads, rounds;
    bool json;
    const char *device;   /* of latency's daemon: "auto", "cpu" or "cuda" */
    struct choice choice; /* of device */
    /* results */
    char head[512]; /* what was measured */
    bool cuda;      /* latency's daemon serves from a GPU: it says so */
    struct bench_figure figures[BENCH_FIGURES_MAX];
    unsigned count;
    char why[BENCH_WHY_BYTES];
};

/* The next figure, to which the caller may add a note. */
struct bench_figure *bench_add(struct bench *bench, const char *key, const char *what, double value,
                               const char *unit, enum bench_sense sense, double target);

int bench_latency(struct bench *bench); /* latency.c */
int bench_cpu(struct bench *bench);     /* cpu.c */
/* cuda/device.c, or cuda/absent.c where the binary is built without CUDA: EX_UNAVAILABLE there, and
 * where there is no GPU. Prints its own table as it goes. */
int bench_device(struct bench *bench);

/* build.c: pages a second and core on every path of kernels this machine has. Before an engine is
 * opened: it chooses paths. */
int bench_build(struct bench *bench);

/* report.c */
void bench_print(const struct bench *bench);
int bench_print_json(struct bench *bench);

#endif
