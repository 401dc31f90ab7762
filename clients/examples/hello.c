/* SPDX-License-Identifier: MIT */
/*
 * hello.c - a first client of locksd: 300 tokens of made-up keys and values into one layer, then
 * one token decoded.
 *
 *     cc hello.c $(pkg-config --cflags --libs liblocks) -lm -o hello && ./hello [SOCKET]
 */
#include <locks.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TOKENS 300

static void check(int result, struct locks *l) {
    if (result < 0) {
        fprintf(stderr, "hello: %s\n", locks_error(l));
        exit(1);
    }
}

/* Room for `count` numbers in the arena, filled with made-up ones of the pool's type. */
static void *numbers(struct locks *l, const struct locks_pool *pool, size_t count) {
    size_t bytes = pool->dtype == LK_DTYPE_FP32 ? 4 : 2;
    char *memory = locks_alloc(l, count * bytes);
    check(memory ? 0 : -1, l);
    for (size_t i = 0; i < count; i++) {
        float x = 2 * (float)rand() / (float)RAND_MAX - 1;
        uint16_t half = (uint16_t)((rand() & 0x83ff) | 0x3800); /* fp16 of 0.5 to 1, either sign */
        if (pool->dtype == LK_DTYPE_FP16)
            memcpy(memory + i * bytes, &half, 2);
        else /* bf16 is the upper half of a float */
            memcpy(memory + i * bytes, (char *)&x + 4 - bytes, bytes);
    }
    return memory;
}

int main(int argc, char **argv) {
    struct locks_options options = {.size = sizeof(options), .socket = argc > 1 ? argv[1] : NULL};
    struct locks *l = NULL;
    struct locks_pool pool;
    locks_handle sequence;
    check(locks_connect(&options, &l), NULL);
    check(locks_pool(l, NULL, &pool), l);
    check(locks_sequence_create(l, pool.index, &sequence), l);

    /* The prompt: keys and values of one layer (a model does this for each). */
    size_t kv = (size_t)pool.kv_heads * pool.head_dim, heads = (size_t)pool.kv_heads * pool.group;
    struct locks_step step = {.pool = pool.index, .budget = 8 * pool.page_tokens};
    struct locks_row row = {.sequence = sequence, .tokens = TOKENS};
    row.k = numbers(l, &pool, TOKENS * kv);
    row.v = numbers(l, &pool, TOKENS * kv);
    check(locks_append(l, &step, &row, 1), l);

    /* One token: its key and value are appended, then its query attends the best pages. */
    row = (struct locks_row){.sequence = sequence, .position = TOKENS, .tokens = 1};
    row.q = numbers(l, &pool, heads * pool.head_dim);
    row.k = numbers(l, &pool, kv);
    row.v = numbers(l, &pool, kv);
    row.out = locks_alloc(l, heads * pool.head_dim * sizeof(float));
    step.results = locks_alloc(l, pool.kv_heads * sizeof(struct lk_head_result));
    step.timing = locks_alloc(l, sizeof(struct lk_step_result));
    check(row.out && step.results && step.timing ? 0 : -1, l);
    check(locks_decode(l, &step, &row, 1), l);

    double square = 0, mass = 0;
    for (size_t i = 0; i < heads * pool.head_dim; i++)
        square += row.out[i] * row.out[i];
    for (uint32_t h = 0; h < pool.kv_heads; h++)
        mass += step.results[h].mass / pool.kv_heads;
    const struct lk_step_result *t = step.timing;
    printf("output norm %.4f, captured mass %.4f, %llu bytes read (dense attention: %llu)\n",
           sqrt(square), mass, 0ULL + t->score_bytes + t->select_bytes + t->attend_bytes,
           0ULL + t->dense_bytes);
    locks_close(l);
    return 0;
}
