/* SPDX-License-Identifier: MIT */
/*
 * latency.c - what the way through the daemon costs: an empty step, spinning, beside a bare
 * exchange of the same cache lines; a real step beside its own computing; and what a daemon costs
 * that has nothing to do.
 */
#include "bench.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>
#include <time.h>
#include <unistd.h>

#include "../common/measure.h"
#include "../common/private.h"
#include "decode.h"
#include "pingpong.h"

#define EXCHANGES     20000   /* of a round: tens of milliseconds */
#define SPIN_US       1000000 /* the client never sleeps while it measures */
#define READY_SECONDS 30
#define IDLE_SECONDS  2

/* Of the real step. */
#define DECODE_TOKENS     32768
#define DECODE_TOKENS_CPU 8192
#define DECODE_STEPS      200 /* of a round */
#define ROW_TOKENS        256 /* of appending; limits.max_row_tokens below */

/* Of an empty step; and of a real one, for which the rest is as a daemon comes. */
static const char *const empty_sets[] = {
    "pool bench.layers=1",    "pool bench.kv_heads=1", "pool bench.group=1",
    "pool bench.head_dim=64", "pool bench.memory=8M",  "limits.max_row_tokens=16",
    "daemon.threads=1",       "daemon.spin_us=10000",
};
static const char *const decode_sets[] = {
    "pool bench.layers=8",     "pool bench.kv_heads=8",     "pool bench.group=4",
    "pool bench.head_dim=128", "pool bench.page_tokens=16", "limits.max_row_tokens=256",
};
static const char decode_memory[] = "pool bench.memory=1280M"; /* DECODE_TOKENS in all layers */
static const char decode_memory_cpu[] = "pool bench.memory=384M";
#define SETS_MAX 16

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

/* What the daemon serves by, in its own words: "cuda ...", "cpu ...". -> false: it does not say. */
static bool find_engine(const struct lk_private *daemon, char *ret, size_t bytes) {
    char *text = NULL;
    if (locks_admin(daemon->socket, "status", &text, NULL, 0))
        return false;
    json_t *status = json_loads(text, 0, NULL);
    const char *engine = json_string_value(json_object_get(status, "engine"));
    snprintf(ret, bytes, "%s", engine ? engine : "");
    json_decref(status);
    free(text);
    return *ret != '\0';
}

static void note_side(struct bench_figure *figure, const struct lk_pingpong_side *side) {
    snprintf(figure->note, sizeof(figure->note), "p99 %.2f us, least %.2f us",
             (double)side->p99_ns * 1e-3, (double)side->min_ns * 1e-3);
}

/* ---- an empty step ---- */

static int connect_to(struct bench *bench, const struct lk_private *daemon, uint32_t spin_us,
                      struct locks **ret) {
    struct locks_options options = {.size = sizeof(options),
                                    .socket = daemon->socket,
                                    .name = "locks-bench",
                                    .spin_us = spin_us};
    if (!locks_connect(&options, ret))
        return 0;
    snprintf(bench->why, sizeof(bench->why), "%s", locks_error(NULL));
    return EX_UNAVAILABLE;
}

static int measure_empty(struct bench *bench, const struct lk_private *daemon) {
    struct lk_pingpong_result result;
    struct locks *locks;
    char engine[160];
    bench->cuda = find_engine(daemon, engine, sizeof(engine)) && strncmp(engine, "cuda", 4) == 0;
    int rc = connect_to(bench, daemon, SPIN_US, &locks);
    if (rc)
        return rc;
    if (lk_pingpong_measure(locks, 0, bench->rounds, EXCHANGES, &result, bench->why,
                            sizeof(bench->why))) {
        locks_close(locks);
        return EX_SOFTWARE;
    }
    note_side(bench_add(bench, "bare_us", "bare exchange, p50", (double)result.bare.p50_ns * 1e-3,
                        "us", NO_TARGET, 0),
              &result.bare);
    note_side(bench_add(bench, "step_us", "empty step, p50", (double)result.step.p50_ns * 1e-3,
                        "us", AT_MOST, 2),
              &result.step);
    bench_add(bench, "ratio", "empty step / bare exchange", result.ratio, "x", AT_MOST, 1.5);
    measure_idle(bench, daemon->pid);
    locks_close(locks);
    return 0;
}

/* ---- a real step ---- */

static void add_us(struct bench *bench, const char *key, const char *what, double us) {
    bench_add(bench, key, what, us, "us", NO_TARGET, 0);
}

static void add_decode(struct bench *bench, const struct decode_result *r) {
    add_us(bench, "decode_us", "real step, submit to done, p50", r->client_p50);
    add_us(bench, "decode_p99_us", "real step, submit to done, p99", r->client_p99);
    if (!r->timed)
        return;
    struct bench_figure *figure = bench_add(bench, "decode_device_us", "its phases together, p50",
                                            r->device_p50, "us", NO_TARGET, 0);
    snprintf(figure->note, sizeof(figure->note),
             "append %.2f, score %.2f, select %.2f, attend %.2f", r->phase_p50[DECODE_APPEND],
             r->phase_p50[DECODE_SCORE], r->phase_p50[DECODE_SELECT], r->phase_p50[DECODE_ATTEND]);
    add_us(bench, "decode_device_p99_us", "its phases together, p99", r->device_p99);
    add_us(bench, "decode_beyond_us", "beyond the device's time, p50", r->beyond_p50);
    add_us(bench, "decode_beyond_p99_us", "beyond the device's time, p99", r->beyond_p99);
}

/* Where the CPU computes, a client that spins through a step takes a processor from it. */
static int measure_decode(struct bench *bench, const struct lk_private *daemon) {
    struct decode_result result;
    struct locks_pool pool;
    struct locks *locks;
    char engine[160];
    if (!find_engine(daemon, engine, sizeof(engine)))
        snprintf(engine, sizeof(engine), "a device it does not name");
    uint64_t tokens = bench->cuda ? DECODE_TOKENS : DECODE_TOKENS_CPU;
    size_t used = strlen(bench->head);
    snprintf(bench->head + used, sizeof(bench->head) - used,
             ";\na real step: one row of %" PRIu64
             " tokens, 32/8 heads, d 128, layers in turn, %u round%s of %d, the client %s; %s",
             tokens, bench->rounds, lk_plural(bench->rounds), DECODE_STEPS,
             bench->cuda ? "spins" : "sleeps", engine);
    int rc = connect_to(bench, daemon, bench->cuda ? SPIN_US : 0, &locks);
    if (rc)
        return rc;
    if (locks_pool(locks, NULL, &pool) ||
        decode_measure(locks, &pool, tokens, ROW_TOKENS, bench->rounds, DECODE_STEPS, &result)) {
        snprintf(bench->why, sizeof(bench->why), "%s", locks_error(locks));
        rc = EX_SOFTWARE;
    } else {
        add_decode(bench, &result);
    }
    locks_close(locks);
    return rc;
}

/* ---- both ---- */

/* With a daemon of its own. */
static int measure_with(struct bench *bench, const char *const *sets, size_t count,
                        int (*measure)(struct bench *, const struct lk_private *)) {
    struct lk_private daemon;
    const char *all[SETS_MAX];
    char device[32], gpu[32];
    snprintf(device, sizeof(device), "daemon.device=%s", bench->device ? bench->device : "auto");
    snprintf(gpu, sizeof(gpu), "daemon.gpu=%" PRIu32, bench->choice.gpu);
    memcpy(all, sets, count * sizeof(*sets));
    all[count] = device;
    all[count + 1] = gpu;
    if (lk_private_start(all, count + 2, READY_SECONDS, &daemon, bench->why, sizeof(bench->why)))
        return EX_UNAVAILABLE;
    int rc = measure(bench, &daemon);
    lk_private_stop(&daemon);
    return rc;
}

int bench_latency(struct bench *bench) {
    enum { DECODE_SETS = sizeof(decode_sets) / sizeof(*decode_sets) };
    const char *sets[DECODE_SETS + 1];
    memcpy(sets, decode_sets, sizeof(decode_sets));
    snprintf(bench->head, sizeof(bench->head),
             "Round trip of an empty step between two processes that spin, %u round%s of %d",
             bench->rounds, lk_plural(bench->rounds), EXCHANGES);
    int rc =
        measure_with(bench, empty_sets, sizeof(empty_sets) / sizeof(*empty_sets), measure_empty);
    sets[DECODE_SETS] = bench->cuda ? decode_memory : decode_memory_cpu;
    return rc ? rc : measure_with(bench, sets, DECODE_SETS + 1, measure_decode);
}
