/* SPDX-License-Identifier: MIT */
/*
 * latency.c - what the way through the daemon costs: an empty step, spinning, beside a bare
 * exchange of the same cache lines; and what a daemon costs that has nothing to do.
 */
#include "bench.h"

#include <stdio.h>
#include <string.h>
#include <sysexits.h>
#include <time.h>
#include <unistd.h>

#include "../common/measure.h"
#include "../common/private.h"
#include "pingpong.h"

#define EXCHANGES     20000   /* of a round: tens of milliseconds */
#define SPIN_US       1000000 /* the client never sleeps while it measures */
#define READY_SECONDS 30
#define IDLE_SECONDS  2

static const char *const sets[] = {
    "pool bench.layers=1",    "pool bench.kv_heads=1", "pool bench.group=1",
    "pool bench.head_dim=64", "pool bench.memory=8M",  "limits.max_row_tokens=16",
    "daemon.threads=1",       "daemon.spin_us=10000",
};

/* Processor time of a process in seconds, or -1. */
static double processor_seconds(pid_t pid) {
    char path[64], text[1024];
    unsigned long long user = 0, system = 0;
    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "re");
    size_t got = file ? fread(text, 1, sizeof(text) - 1, file) : 0;
    if (file)
        fclose(file);
    text[got] = '\0';
    const char *fields = strrchr(text, ')'); /* the name before it may hold anything */
    if (!fields || sscanf(fields, ") %*c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu %llu", &user,
                          &system) != 2)
        return -1;
    return (double)(user + system) / (double)sysconf(_SC_CLK_TCK);
}

static void measure_idle(struct bench *bench, pid_t pid) {
    nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL); /* past its last spin */
    double before = processor_seconds(pid);
    uint64_t begun = lk_clock_ns();
    nanosleep(&(struct timespec){.tv_sec = IDLE_SECONDS}, NULL);
    double after = processor_seconds(pid), passed = (double)(lk_clock_ns() - begun) * 1e-9;
    if (before >= 0 && after >= 0)
        bench_add(bench, "idle_percent", "idle daemon with a client",
                  100 * (after - before) / passed, "% of a core", AT_MOST, 1);
}

static void note_side(struct bench_figure *figure, const struct lk_pingpong_side *side) {
    snprintf(figure->note, sizeof(figure->note), "p99 %.2f us, least %.2f us",
             (double)side->p99_ns * 1e-3, (double)side->min_ns * 1e-3);
}

static int measure(struct bench *bench, const struct lk_private *daemon) {
    struct locks_options options = {.size = sizeof(options),
                                    .socket = daemon->socket,
                                    .name = "locks-bench",
                                    .spin_us = SPIN_US};
    struct lk_pingpong_result result;
    struct locks *locks;
    if (locks_connect(&options, &locks)) {
        snprintf(bench->why, sizeof(bench->why), "%s", locks_error(NULL));
        return EX_UNAVAILABLE;
    }
    int rc = lk_pingpong_measure(locks, 0, bench->rounds, EXCHANGES, &result, bench->why,
                                 sizeof(bench->why));
    if (!rc) {
        note_side(bench_add(bench, "bare_us", "bare exchange, p50",
                            (double)result.bare.p50_ns * 1e-3, "us", NO_TARGET, 0),
                  &result.bare);
        note_side(bench_add(bench, "step_us", "empty step, p50", (double)result.step.p50_ns * 1e-3,
                            "us", AT_MOST, 2),
                  &result.step);
        bench_add(bench, "ratio", "empty step / bare exchange", result.ratio, "x", AT_MOST, 1.5);
        measure_idle(bench, daemon->pid);
    }
    locks_close(locks);
    return rc ? EX_SOFTWARE : 0;
}

int bench_latency(struct bench *bench) {
    struct lk_private daemon;
    snprintf(bench->head, sizeof(bench->head),
             "Round trip of an empty step between two processes that spin, %u rounds of %d",
             bench->rounds, EXCHANGES);
    if (lk_private_start(sets, sizeof(sets) / sizeof(*sets), READY_SECONDS, &daemon, bench->why,
                         sizeof(bench->why)))
        return EX_UNAVAILABLE;
    int rc = measure(bench, &daemon);
    lk_private_stop(&daemon);
    return rc;
}
