/* SPDX-License-Identifier: MIT */
/*
 * test_crowd.c - what a client is answered does not depend on who else is there, nor on how fast it
 * asks.
 *
 * A client's submissions follow from its seed alone: rows of one token and of hundreds, exact and
 * sparse, of sequences and of a lease, forks, cuts, frees, tables that are replaced while rows read
 * them, and every so often one that must be refused. First many clients send theirs at once, in
 * bursts, with pages of 8 tokens, so that pages close all the time with several batches in flight;
 * others beside them come and go in the middle of their work. Then each client sends the same again
 * alone, a submission at a time. Completions and every byte of the arena must be the same.
 *
 * What it does not do: no look at whether results are right (test_sequences.c, test_tables.c).
 */
#include <check.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../common/run.h"
#include "../common/inlet.h"

#define LAYERS    3
#define DIM       64
#define B         8
#define CLIENTS   12
#define SEQUENCES 5
#define TOKENS    900 /* about the longest a sequence grows */
#define BLOCKS    64  /* of a lease */
#define SETS      3   /* of tables, that are used */
#define TABLES    6   /* of a set */
#define BURST     20

#ifndef STEPS
#define STEPS 60 /* bursts of a client */
#endif
#ifndef SEED
#define SEED 1
#endif
#define VISITS 4 /* of those who come and go, while the crowd is there */

struct script { /* of one client: what it believes to have, and what it saw */
    struct inlet_client client;
    uint64_t seed, next_id;
    bool alone;             /* it waits for each submission */
    const uint32_t *visits; /* of others so far, which it does not get ahead of; or NULL */
    uint64_t handle[SEQUENCES], length[SEQUENCES][LAYERS];
    uint32_t born[BURST]; /* by submission: 1 + the place whose handle it makes */
    uint64_t lease;
    uint8_t mark[LAYERS][BLOCKS];
    uint32_t submitted, answered, refused;
    struct lk_cqe cqe[BURST];
    uint64_t digest[STEPS];
};

static uint64_t pick(struct script *s, uint64_t bound) {
    return inlet_random(&s->seed) % bound;
}

/* ---- submissions ---- */

static void take_answer(struct script *s) {
    struct lk_cqe cqe = inlet_wait(&s->client);
    s->cqe[cqe.user_data] = cqe;
    s->answered++;
    s->refused += cqe.status != 0;
}

static void submit(struct script *s, uint16_t op, const void *desc, uint32_t bytes) {
    while (!inlet_submit(&s->client, op, desc, bytes, s->submitted))
        take_answer(s);
    s->submitted++;
    while (s->alone && s->answered < s->submitted)
        take_answer(s);
}

static void submit_object(struct script *s, uint16_t op, uint64_t handle, uint64_t length) {
    struct lk_object_desc desc = {.handle = handle, .length = length};
    submit(s, op, &desc, sizeof(desc));
}

/* ---- rows ---- */

static uint64_t payload(struct script *s, uint32_t tokens, uint32_t layer, int v) {
    uint64_t bytes = DIM * inlet_element(s->client.inlet);
    uint8_t *to = inlet_alloc(&s->client, tokens * bytes);
    for (uint32_t t = 0; t < tokens; t++)
        inlet_store(s->client.inlet, to + t * bytes, s->next_id++, v, layer, DIM);
    return inlet_offset(&s->client, to);
}

static uint64_t room(struct script *s, uint64_t bytes) {
    return inlet_offset(&s->client, inlet_alloc(&s->client, bytes));
}

static void give(struct script *s, uint16_t op, struct lk_row_desc *row) {
    if (op == LK_OP_APPEND || op == LK_OP_DECODE || op == LK_OP_WRITE) {
        row->k = payload(s, row->tokens, row->layer, 0);
        row->v = payload(s, row->tokens, row->layer, 1);
    }
    if (op == LK_OP_APPEND || op == LK_OP_WRITE)
        return;
    row->q = payload(s, row->tokens, row->layer, 2);
    row->out = room(s, (uint64_t)row->tokens * DIM * sizeof(float));
    row->lse = room(s, row->tokens * sizeof(float));
    if (pick(s, 2)) {
        row->list_pages = 1 + (uint32_t)pick(s, 40);
        row->list = room(s, row->list_pages * sizeof(struct lk_page_entry));
    }
}

static void choose(struct script *s, struct inlet_step *step) {
    inlet_step(step);
    step->step.budget = B * (4 + (uint32_t)pick(s, 12));
    step->step.sampled = (int32_t)pick(s, 3);
    step->step.scan = (uint16_t)(LK_SCAN_FULL + pick(s, 4));
    if (pick(s, 3) == 0)
        step->step.mass_target = 0.9f;
    if (pick(s, 4) == 0)
        step->step.dense_below = TOKENS;
    if (step->step.scan == LK_SCAN_TREE)
        step->step.recent_pages = 1 + (uint32_t)pick(s, 2);
}

static uint32_t row_tokens(struct script *s, uint16_t op) {
    static const uint32_t most[] = {1, 1, 1, 1, 1, 1, 20, 300};
    return op == LK_OP_ATTEND ? 1 : 1 + (uint32_t)pick(s, most[pick(s, 8)]);
}

static void submit_rows(struct script *s) {
    static const uint16_t ops[] = {LK_OP_APPEND, LK_OP_DECODE, LK_OP_DECODE, LK_OP_ATTEND};
    struct inlet_step step;
    uint16_t op = ops[pick(s, 4)];
    choose(s, &step);
    for (uint64_t rows = 1 + pick(s, 8); rows > 0; rows--) {
        uint32_t at = (uint32_t)pick(s, SEQUENCES), layer = (uint32_t)pick(s, LAYERS);
        uint32_t tokens = row_tokens(s, op);
        uint64_t *length = &s->length[at][layer];
        if (!s->handle[at] || *length + tokens > TOKENS)
            continue;
        give(s, op, inlet_row(&step, s->handle[at], layer, *length, tokens));
        *length += op == LK_OP_ATTEND ? 0 : tokens;
    }
    step.step.results = room(s, LK_ROWS_MAX * sizeof(struct lk_head_result));
    submit(s, op, &step, inlet_step_bytes(&step));
}

/* Right but for one thing. */
static void submit_wrong(struct script *s) {
    struct inlet_step step;
    uint32_t at = (uint32_t)pick(s, SEQUENCES);
    choose(s, &step);
    struct lk_row_desc *row = inlet_row(&step, s->handle[at], 1, s->length[at][1], 3);
    give(s, LK_OP_DECODE, row);
    switch (pick(s, 4)) {
    case 0:
        row->position++;
        break;
    case 1:
        row->handle ^= UINT64_C(1) << 40;
        break;
    case 2:
        row->out = UINT64_C(1) << 40;
        break;
    default:
        row->layer = LAYERS;
        break;
    }
    submit(s, LK_OP_DECODE, &step, inlet_step_bytes(&step));
}

/* ---- sequences ---- */

static void submit_birth(struct script *s) {
    uint32_t from = (uint32_t)pick(s, SEQUENCES), to = (uint32_t)pick(s, SEQUENCES);
    if (s->handle[to])
        return;
    for (uint32_t i = 0; i < s->submitted; i++)
        if (s->born[i] == to + 1)
            return;
    s->born[s->submitted] = to + 1;
    memset(s->length[to], 0, sizeof(s->length[to]));
    if (s->handle[from])
        memcpy(s->length[to], s->length[from], sizeof(s->length[to]));
    submit_object(s, s->handle[from] ? LK_OP_SEQUENCE_FORK : LK_OP_SEQUENCE_CREATE, s->handle[from],
                  0);
}

static void submit_cut(struct script *s) {
    uint32_t at = (uint32_t)pick(s, SEQUENCES);
    uint64_t longest = 0;
    for (uint32_t l = 0; l < LAYERS; l++)
        longest = s->length[at][l] > longest ? s->length[at][l] : longest;
    uint64_t length = pick(s, 3) ? longest - longest / (2 + pick(s, 30)) : pick(s, longest + 1);
    for (uint32_t l = 0; l < LAYERS; l++)
        s->length[at][l] = s->length[at][l] > length ? length : s->length[at][l];
    if (s->handle[at])
        submit_object(s, LK_OP_SEQUENCE_TRUNCATE, s->handle[at], length);
}

static void submit_free(struct script *s) {
    uint32_t at = (uint32_t)pick(s, SEQUENCES);
    if (s->handle[at])
        submit_object(s, LK_OP_SEQUENCE_FREE, s->handle[at], 0);
    s->handle[at] = 0;
}

/* ---- the lease ---- */

static void submit_write(struct script *s) {
    struct inlet_step step;
    choose(s, &step);
    for (uint64_t rows = 1 + pick(s, 4); rows > 0; rows--) {
        uint32_t layer = (uint32_t)pick(s, LAYERS), tokens = 1 + (uint32_t)pick(s, 60);
        uint32_t page = (uint32_t)pick(s, BLOCKS), offset = s->mark[layer][page];
        bool gap = pick(s, 40) == 0;
        struct lk_row_desc *row = inlet_row(&step, s->lease, layer, 0, tokens);
        give(s, LK_OP_WRITE, row);
        int64_t *slots = inlet_alloc(&s->client, tokens * sizeof(*slots));
        row->slots = inlet_offset(&s->client, slots);
        for (uint32_t t = 0; t < tokens; t++, offset++) {
            page = offset >= B ? (page + 1) % BLOCKS : page;
            offset = offset >= B ? 0 : offset;
            slots[t] = page * B + offset + (gap && t == tokens / 2);
            s->mark[layer][page] = (uint8_t)(offset + 1);
        }
    }
    submit(s, LK_OP_WRITE, &step, inlet_step_bytes(&step));
}

static void submit_tables(struct script *s) {
    struct {
        struct lk_tables_desc head;
        struct lk_table_desc table[TABLES];
    } desc = {.head = {.handle = s->lease, .set = (uint32_t)pick(s, SETS), .rows = TABLES}};
    for (uint32_t i = 0; i < TABLES; i++) {
        uint32_t first = (uint32_t)pick(s, BLOCKS), most = 1 + (uint32_t)pick(s, 24), pages = 0;
        uint32_t *ids = inlet_alloc(&s->client, most * sizeof(*ids));
        for (uint32_t j = 0; j < BLOCKS && pages < most; j++)
            if (s->mark[0][(first + j) % BLOCKS] == B)
                ids[pages++] = (first + j) % BLOCKS;
        uint64_t length = pages ? (uint64_t)pages * B - pick(s, B) : 0;
        desc.table[i] = (struct lk_table_desc){
            .table = inlet_offset(&s->client, ids), .length = length, .pages = pages};
    }
    submit(s, LK_OP_TABLES, &desc, sizeof(desc));
}

static void submit_attend_table(struct script *s) {
    struct inlet_step step;
    choose(s, &step);
    for (uint64_t rows = 1 + pick(s, 5); rows > 0; rows--) {
        uint32_t layer = pick(s, 3) ? 0 : (uint32_t)pick(s, LAYERS);
        struct lk_row_desc *row = inlet_row(&step, s->lease, layer, 0, 1 + (uint32_t)pick(s, 3));
        row->table_set = (uint16_t)pick(s, SETS);
        row->table_row = (uint16_t)pick(s, TABLES);
        give(s, LK_OP_ATTEND_TABLE, row);
    }
    step.step.results = room(s, LK_ROWS_MAX * sizeof(struct lk_head_result));
    submit(s, LK_OP_ATTEND_TABLE, &step, inlet_step_bytes(&step));
}

static void submit_list(struct script *s) {
    bool copies = pick(s, 3);
    uint32_t count = 1 + (uint32_t)pick(s, 4);
    uint32_t *list = inlet_alloc(&s->client, 2 * sizeof(*list) * count);
    uint32_t from = (uint32_t)pick(s, BLOCKS), to = (uint32_t)pick(s, BLOCKS);
    for (uint32_t i = 0; i < count; i++, from = (from + 1) % BLOCKS, to = (to + 5) % BLOCKS) {
        list[copies ? 2 * i : i] = from;
        if (copies)
            list[2 * i + 1] = to;
        for (uint32_t l = 0; l < LAYERS; l++)
            s->mark[l][copies ? to : from] = copies ? s->mark[l][from] : 0;
    }
    struct lk_object_desc desc = {
        .handle = s->lease, .list = inlet_offset(&s->client, list), .count = count};
    submit(s, copies ? LK_OP_COPY_PAGES : LK_OP_INVALIDATE, &desc, sizeof(desc));
}

static void submit_any(struct script *s) {
    static void (*const what[])(struct script *) = {
        submit_rows,         submit_rows,         submit_rows,   submit_rows,   submit_rows,
        submit_rows,         submit_rows,         submit_write,  submit_write,  submit_attend_table,
        submit_attend_table, submit_attend_table, submit_tables, submit_tables, submit_birth,
        submit_birth,        submit_cut,          submit_cut,    submit_list,   submit_wrong};
    if (pick(s, 40) == 0)
        submit_free(s);
    else
        what[pick(s, sizeof(what) / sizeof(what[0]))](s);
}

/* ---- a client ---- */

static void mix(uint64_t *digest, const void *data, uint64_t bytes) {
    const uint8_t *at = data;
    for (uint64_t i = 0; i < bytes; i++)
        *digest = (*digest ^ at[i]) * UINT64_C(0x100000001b3);
}

/* Handles are numbered in the order in which all clients' objects come: they alone may differ. */
static void mix_answer(uint64_t *digest, const struct lk_cqe *c) {
    bool handle = c->op == LK_OP_SEQUENCE_CREATE || c->op == LK_OP_SEQUENCE_FORK ||
                  c->reason == LK_REASON_HANDLE_STALE;
    uint64_t value = handle ? 0 : c->value, limit = handle ? 0 : c->limit;
    uint64_t seen[] = {
        (uint64_t)c->status, c->reason, c->op, c->row, c->rows, c->bytes, value, limit};
    mix(digest, seen, sizeof(seen));
}

static void collect(struct script *s, uint64_t *digest) {
    while (s->answered < s->submitted)
        take_answer(s);
    for (uint32_t i = 0; i < s->submitted; i++) {
        mix_answer(digest, &s->cqe[i]);
        if (s->born[i])
            s->handle[s->born[i] - 1] = s->cqe[i].value;
    }
    mix(digest, s->client.memory.arena, s->client.used);
    memset(s->client.memory.arena, 0, s->client.used);
    memset(s->born, 0, sizeof(s->born));
    s->submitted = s->answered = 0;
    inlet_reset(&s->client);
}

/* However little of the processors they get: those who come and go do so in the crowd's time. */
static void await_visits(const struct script *s, uint32_t step) {
    while (s->visits && __atomic_load_n(s->visits, __ATOMIC_ACQUIRE) < step * VISITS / STEPS)
        usleep(1000);
}

static void *run_script(void *argument) {
    struct script *s = argument;
    s->lease = inlet_lease(&s->client, BLOCKS);
    for (uint32_t step = 0; step < STEPS; step++) {
        await_visits(s, step);
        for (uint64_t burst = 1 + pick(s, BURST); burst > 0; burst--)
            submit_any(s);
        collect(s, &s->digest[step]);
    }
    return NULL;
}

static void open_script(struct script *s, struct inlet *inlet, uint32_t number, bool alone) {
    *s = (struct script){.seed = SEED * 1000 + number, .next_id = number, .alone = alone};
    ck_assert_int_eq(inlet_connect(inlet, &s->client, number, 64, 0), 0);
}

/* ---- those who come and go ---- */

struct guest {
    struct inlet *inlet;
    bool stop;       /* atomic */
    uint32_t visits; /* atomic */
};

/* Leaves with all it has in flight. */
static void *run_guest(void *argument) {
    static struct script s;
    struct guest *guest = argument;
    while (!__atomic_load_n(&guest->stop, __ATOMIC_ACQUIRE)) {
        open_script(&s, guest->inlet, 1000 + guest->visits % 50, false);
        s.lease = inlet_lease(&s.client, BLOCKS);
        for (uint32_t i = 0; i < SEQUENCES; i++)
            s.handle[i] = inlet_create(&s.client);
        for (uint32_t i = (uint32_t)pick(&s, BURST); i > 0; i--)
            submit_any(&s);
        inlet_disconnect(&s.client);
        __atomic_add_fetch(&guest->visits, 1, __ATOMIC_RELEASE);
    }
    return NULL;
}

/* ---- the crowd, and each alone ---- */

static void open_inlet(struct inlet *inlet, uint32_t spin_us) {
    struct lk_config config;
    inlet_config(&config, 32768);
    config.spin_us = spin_us;
    config.max_channels_per_uid = 64;
    config.pool[0].max_sequences = 256;
    struct lk_geometry geometry = {
        .layers = LAYERS, .kv_heads = 1, .group = 1, .head_dim = DIM, .page_tokens = B, .rank = 2};
    inlet_pool(&config, geometry, 32768);
    inlet_open(inlet, &config);
}

static void run_crowd(struct inlet *inlet, struct script *crowd) {
    struct guest guest = {.inlet = inlet};
    pthread_t thread[CLIENTS], other;
    for (uint32_t i = 0; i < CLIENTS; i++) {
        open_script(&crowd[i], inlet, i, false);
        crowd[i].visits = &guest.visits;
        ck_assert_int_eq(pthread_create(&thread[i], NULL, run_script, &crowd[i]), 0);
    }
    ck_assert_int_eq(pthread_create(&other, NULL, run_guest, &guest), 0);
    for (uint32_t i = 0; i < CLIENTS; i++) {
        inlet_check(inlet);
        pthread_join(thread[i], NULL);
    }
    __atomic_store_n(&guest.stop, true, __ATOMIC_RELEASE);
    pthread_join(other, NULL);
    ck_assert_uint_ge(guest.visits, VISITS - 1);
    inlet_check_idle(inlet);
    for (uint32_t i = 0; i < CLIENTS; i++)
        inlet_disconnect(&crowd[i].client);
}

static void compare(const struct script *crowd, const struct script *alone) {
    ck_assert_uint_gt(alone->refused, 0);
    ck_assert_uint_eq(crowd->refused, alone->refused);
    for (uint32_t step = 0; step < STEPS; step++)
        ck_assert_msg(crowd->digest[step] == alone->digest[step], "seed %lu: burst %u differs",
                      (unsigned long)SEED, step);
}

static void run(uint32_t spin_us) {
    static struct script crowd[CLIENTS], alone;
    struct inlet inlet;
    open_inlet(&inlet, spin_us);
    run_crowd(&inlet, crowd);
    ck_assert_uint_eq(inlet_status(&inlet).pool[0].pages_used, 0);
    for (uint32_t i = 0; i < CLIENTS; i++) {
        open_script(&alone, &inlet, i, true);
        run_script(&alone);
        inlet_check_idle(&inlet);
        inlet_disconnect(&alone.client);
        compare(&crowd[i], &alone);
    }
    inlet_close(&inlet);
}

START_TEST(a_crowd_changes_no_bit) {
    run(20);
}
END_TEST
START_TEST(a_crowd_changes_no_bit_asleep) {
    run(0);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("model of a crowd");
    TCase *tcase = tcase_create("random");
    tcase_set_timeout(tcase, 300);
    tcase_add_test(tcase, a_crowd_changes_no_bit);
    tcase_add_test(tcase, a_crowd_changes_no_bit_asleep);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
