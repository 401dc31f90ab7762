/* SPDX-License-Identifier: MIT */
/*
 * decode.c - see decode.h.
 */
#include "decode.h"

#include <errno.h>
#include <stdlib.h>

#include "../common/measure.h"
#include "keys.h"

struct run {
    struct locks *locks;
    const struct locks_pool *pool;
    struct bench_keys keys;
    struct locks_step step;
    struct locks_row row;
    uint16_t *q, *k, *v;
    float *out;
    uint64_t tokens;
    uint32_t row_tokens;
    double *client, *device, *beyond, *phase[DECODE_PHASES]; /* samples, microseconds */
};

/* ---- the sequence ---- */

/* Tokens from..from + count of keys as uneven as a model's; values beside them. */
static void write_tokens(struct run *run, uint64_t from, uint32_t count) {
    const struct locks_pool *pool = run->pool;
    for (uint32_t t = 0; t < count; t++)
        for (uint32_t h = 0; h < pool->kv_heads; h++) {
            uint64_t token = from + t, at = ((uint64_t)t * pool->kv_heads + h) * pool->head_dim;
            struct bench_page page =
                bench_page_of(run->keys.normal, token / pool->page_tokens * pool->kv_heads + h);
            uint32_t i = (uint32_t)(token % pool->page_tokens);
            bench_keys_token(&run->keys, &page, i, pool->head_dim, true, run->k + at);
            bench_keys_token(&run->keys, &page, pool->page_tokens + i, pool->head_dim, false,
                             run->v + at);
        }
}

static int append_all(struct run *run) {
    struct locks_row row = run->row;
    int r = 0;
    for (uint64_t at = 0; at < run->tokens && !r; at += row.tokens) {
        uint64_t left = run->tokens - at;
        row.position = at;
        row.tokens = left < run->row_tokens ? (uint32_t)left : run->row_tokens;
        write_tokens(run, at, row.tokens);
        for (row.layer = 0; row.layer < run->pool->layers && !r; row.layer++)
            r = locks_append(run->locks, &run->step, &row, 1);
    }
    return r;
}

/* ---- steps ---- */

/* Step `number` of a round: the layers in turn, as a model takes them. */
static int step_once(struct run *run, uint32_t number, size_t sample) {
    const struct lk_step_result *t = run->step.timing;
    run->row.layer = number % run->pool->layers;
    run->row.position = run->tokens + number / run->pool->layers;
    uint64_t begun = lk_clock_ns();
    int r = locks_decode(run->locks, &run->step, &run->row, 1);
    run->client[sample] = (double)(lk_clock_ns() - begun) * 1e-3;
    const uint64_t phases[DECODE_PHASES] = {t->append_ns, t->score_ns, t->select_ns, t->attend_ns};
    run->device[sample] = 0;
    for (int i = 0; i < DECODE_PHASES; i++) {
        run->phase[i][sample] = (double)phases[i] * 1e-3;
        run->device[sample] += run->phase[i][sample];
    }
    run->beyond[sample] = run->client[sample] - run->device[sample];
    return r;
}

/* Round 0 warms up: its samples are written over by round 1. */
static int play(struct run *run, uint32_t rounds, uint32_t steps) {
    run->row.tokens = 1;
    for (uint32_t round = 0; round <= rounds; round++) {
        size_t first = (size_t)(round ? round - 1 : 0) * steps;
        int r = 0;
        for (uint32_t i = 0; i < steps && !r; i++)
            r = step_once(run, i, first + i);
        if (!r)
            r = locks_sequence_truncate(run->locks, run->row.sequence, run->tokens);
        if (r)
            return r;
    }
    return 0;
}

static struct decode_result summary(struct run *run, size_t count) {
    struct decode_result result = {
        .client_p50 = lk_percentile(run->client, count, 50),
        .client_p99 = lk_percentile(run->client, count, 99),
        .device_p50 = lk_percentile(run->device, count, 50),
        .device_p99 = lk_percentile(run->device, count, 99),
        .beyond_p50 = lk_percentile(run->beyond, count, 50),
        .beyond_p99 = lk_percentile(run->beyond, count, 99),
    };
    for (int i = 0; i < DECODE_PHASES; i++)
        result.phase_p50[i] = lk_percentile(run->phase[i], count, 50);
    result.timed = result.device_p50 > 0;
    return result;
}

/* ---- memory ---- */

static int take_memory(struct run *run, size_t samples) {
    const struct locks_pool *pool = run->pool;
    size_t kv = (size_t)pool->kv_heads * pool->head_dim, q = kv * pool->group;
    double **const lists[] = {&run->client,   &run->device,   &run->beyond,  &run->phase[0],
                              &run->phase[1], &run->phase[2], &run->phase[3]};
    for (size_t i = 0; i < sizeof(lists) / sizeof(*lists); i++)
        if (!(*lists[i] = calloc(samples, sizeof(**lists[i]))))
            return -ENOMEM;
    run->q = locks_alloc(run->locks, q * sizeof(*run->q));
    run->k = locks_alloc(run->locks, run->row_tokens * kv * sizeof(*run->k));
    run->v = locks_alloc(run->locks, run->row_tokens * kv * sizeof(*run->v));
    run->out = locks_alloc(run->locks, q * sizeof(*run->out));
    run->step.timing = locks_alloc(run->locks, sizeof(*run->step.timing));
    if (!run->q || !run->k || !run->v || !run->out || !run->step.timing)
        return -ENOMEM;
    bench_keys_make(&run->keys);
    bench_keys_query(&run->keys, run->q, (uint32_t)q);
    run->row.q = run->q;
    run->row.k = run->k;
    run->row.v = run->v;
    run->row.out = run->out;
    return 0;
}

static void give_memory(struct run *run) { /* the arena goes with its connection */
    free(run->client);
    free(run->device);
    free(run->beyond);
    for (int i = 0; i < DECODE_PHASES; i++)
        free(run->phase[i]);
    free(run);
}

int decode_measure(struct locks *locks, const struct locks_pool *pool, uint64_t tokens,
                   uint32_t row_tokens, uint32_t rounds, uint32_t steps,
                   struct decode_result *ret) {
    size_t samples = (size_t)rounds * steps;
    struct run *run = calloc(1, sizeof(*run));
    if (!run)
        return -ENOMEM;
    run->locks = locks;
    run->pool = pool;
    run->step.pool = pool->index;
    run->tokens = tokens;
    run->row_tokens = row_tokens;
    int r = take_memory(run, samples);
    if (!r)
        r = locks_sequence_create(locks, pool->index, &run->row.sequence);
    if (!r)
        r = append_all(run);
    if (!r)
        r = play(run, rounds, steps);
    if (!r)
        *ret = summary(run, samples);
    if (run->row.sequence)
        locks_sequence_free(locks, run->row.sequence);
    give_memory(run);
    return r;
}
