/* SPDX-License-Identifier: MIT */
/*
 * test_sequences.c - sequences against a store that keeps everything.
 *
 * The store is a list of token numbers for each sequence and layer; keys, values and queries follow
 * from the number. Submissions go out in bursts without waiting, so that work of a sequence is in
 * flight when it is forked, cut or freed. After each burst ledger, pools and accounts must agree.
 * Exact rows are compared with attention computed in double; sparse rows bit by bit with a sequence
 * that was given the same tokens at once.
 */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "../common/run.h"
#include "../common/inlet.h"

#define LAYERS     2
#define SEQUENCES  12
#define TOKENS_MAX 600
#define BURST      6
#define ROWS       5
#define DIM        64

#ifndef STEPS
#define STEPS 1500
#endif

struct model { /* of one sequence */
    uint64_t handle;
    uint64_t length[LAYERS];
    uint64_t id[LAYERS][TOKENS_MAX];
};

struct expected { /* of one row, by the number of its submission */
    const float *out;
    uint64_t query; /* the first one's number */
    uint64_t *ids;  /* copy of what it attends, or NULL: not looked at */
    uint64_t length;
    uint32_t tokens, layer;
};

struct world {
    struct inlet inlet;
    struct inlet_client client;
    struct model *model[SEQUENCES]; /* NULL: none */
    uint64_t seed, next_id;
    struct expected expected[BURST * ROWS];
    uint32_t expected_count, submitted;
    struct model *born[BURST]; /* by submission: whose handle it makes */
};

static uint64_t pick(struct world *w, uint64_t bound) {
    return inlet_random(&w->seed) % bound;
}

static void open_world(struct world *w, uint32_t spin_us, uint64_t seed) {
    struct lk_config config;
    *w = (struct world){.seed = seed, .next_id = 1};
    inlet_config(&config, 2048);
    config.spin_us = spin_us;
    inlet_pool(&config,
               (struct lk_geometry){.layers = LAYERS,
                                    .kv_heads = 1,
                                    .group = 1,
                                    .head_dim = DIM,
                                    .page_tokens = 8,
                                    .rank = 2},
               2048);
    inlet_open(&w->inlet, &config);
    ck_assert_int_eq(inlet_connect(&w->inlet, &w->client, 1, 64, 0), 0);
}

static void close_world(struct world *w) {
    for (uint32_t i = 0; i < SEQUENCES; i++)
        free(w->model[i]);
    inlet_disconnect(&w->client);
    ck_assert_uint_eq(inlet_status(&w->inlet).pool[0].pages_used, 0);
    inlet_close(&w->inlet);
}

/* ---- rows ---- */

static uint64_t tokens_at(struct world *w, const uint64_t *ids, uint64_t count, int v,
                          uint32_t layer) {
    uint64_t bytes = DIM * inlet_element(&w->inlet);
    uint8_t *to = inlet_alloc(&w->client, count * bytes);
    for (uint64_t i = 0; i < count; i++)
        inlet_store(&w->inlet, to + i * bytes, ids[i], v, layer, DIM);
    return inlet_offset(&w->client, to);
}

static void give_kv(struct world *w, struct lk_row_desc *row, const uint64_t *ids) {
    row->k = tokens_at(w, ids, row->tokens, 0, row->layer);
    row->v = tokens_at(w, ids, row->tokens, 1, row->layer);
}

static float *give_q(struct world *w, struct lk_row_desc *row) {
    uint64_t first = w->next_id, ids[TOKENS_MAX];
    for (uint32_t i = 0; i < row->tokens; i++)
        ids[i] = first + i;
    row->q = tokens_at(w, ids, row->tokens, 2, row->layer);
    float *out = inlet_alloc(&w->client, (uint64_t)row->tokens * DIM * sizeof(float));
    row->out = inlet_offset(&w->client, out);
    return out;
}

static void expect(struct world *w, const struct model *m, const struct lk_row_desc *row,
                   const float *out) {
    struct expected *e = &w->expected[w->expected_count++];
    uint64_t length = m->length[row->layer];
    *e = (struct expected){.out = out,
                           .query = w->next_id,
                           .length = length,
                           .tokens = row->tokens,
                           .layer = row->layer};
    e->ids = malloc((length + 1) * sizeof(*e->ids));
    memcpy(e->ids, m->id[row->layer], length * sizeof(*e->ids));
}

static void add_row(struct world *w, struct inlet_step *step, uint16_t op, struct model *m) {
    uint32_t layer = (uint32_t)pick(w, LAYERS), tokens = 1;
    uint64_t length = m->length[layer];
    if (op != LK_OP_ATTEND && pick(w, 2))
        tokens = 1 + (uint32_t)pick(w, pick(w, 6) ? 20 : 200);
    if (op != LK_OP_ATTEND && length + tokens > TOKENS_MAX)
        return;
    struct lk_row_desc *row = inlet_row(step, m->handle, layer, length, tokens);
    if (op != LK_OP_ATTEND) {
        for (uint32_t i = 0; i < tokens; i++)
            m->id[layer][length + i] = w->next_id++;
        m->length[layer] += tokens;
        give_kv(w, row, m->id[layer] + length);
    }
    if (op != LK_OP_APPEND) {
        float *out = give_q(w, row);
        expect(w, m, row, out);
    }
}

static struct model *any_model(struct world *w) {
    uint32_t at = (uint32_t)pick(w, SEQUENCES);
    for (uint32_t i = 0; i < SEQUENCES; i++)
        if (w->model[(at + i) % SEQUENCES] && w->model[(at + i) % SEQUENCES]->handle)
            return w->model[(at + i) % SEQUENCES];
    return NULL;
}

static void submit(struct world *w, uint16_t op, const void *desc, uint32_t bytes) {
    ck_assert(inlet_submit(&w->client, op, desc, bytes, w->submitted++));
}

static void submit_rows(struct world *w) {
    static const uint16_t ops[] = {LK_OP_APPEND, LK_OP_DECODE, LK_OP_DECODE, LK_OP_ATTEND};
    static struct inlet_step step;
    uint16_t op = ops[pick(w, 4)];
    inlet_step(&step);
    step.step.budget = 8 * TOKENS_MAX; /* exact */
    for (uint64_t rows = 1 + pick(w, ROWS); rows > 0; rows--) {
        struct model *m = any_model(w);
        if (m)
            add_row(w, &step, op, m);
    }
    submit(w, op, &step, inlet_step_bytes(&step));
}

/* ---- sequences ---- */

static void submit_object(struct world *w, uint16_t op, uint64_t handle, uint64_t length) {
    struct lk_object_desc desc = {.handle = handle, .length = length};
    submit(w, op, &desc, sizeof(desc));
}

static struct model **free_place(struct world *w) {
    for (uint32_t i = 0; i < SEQUENCES; i++)
        if (!w->model[i])
            return &w->model[i];
    return NULL;
}

static void submit_birth(struct world *w) {
    struct model **place = free_place(w), *parent = any_model(w);
    if (!place)
        return;
    *place = calloc(1, sizeof(**place));
    w->born[w->submitted] = *place;
    if (parent && pick(w, 3)) {
        memcpy(*place, parent, sizeof(*parent));
        (*place)->handle = 0;
        submit_object(w, LK_OP_SEQUENCE_FORK, parent->handle, 0);
    } else {
        submit_object(w, LK_OP_SEQUENCE_CREATE, 0, 0);
    }
}

static void submit_truncate(struct world *w) {
    struct model *m = any_model(w);
    if (!m)
        return;
    uint64_t longest = m->length[0] > m->length[1] ? m->length[0] : m->length[1];
    uint64_t cut = pick(w, 4) ? pick(w, 20) : pick(w, longest + 1);
    uint64_t length = longest > cut ? longest - cut : 0;
    for (uint32_t l = 0; l < LAYERS; l++)
        m->length[l] = m->length[l] > length ? length : m->length[l];
    submit_object(w, LK_OP_SEQUENCE_TRUNCATE, m->handle, length);
}

static void submit_free(struct world *w) {
    struct model *m = any_model(w);
    if (!m)
        return;
    submit_object(w, LK_OP_SEQUENCE_FREE, m->handle, 0);
    for (uint32_t i = 0; i < SEQUENCES; i++)
        if (w->model[i] == m)
            w->model[i] = NULL;
    free(m);
}

static void submit_any(struct world *w) {
    uint64_t what = pick(w, 20);
    if (what < 13)
        submit_rows(w);
    else if (what < 16)
        submit_birth(w);
    else if (what < 19)
        submit_truncate(w);
    else
        submit_free(w);
}

/* ---- what came of it ---- */

static void collect(struct world *w) {
    for (uint32_t i = 0; i < w->submitted; i++) {
        char text[LK_REASON_BYTES];
        struct lk_cqe cqe = inlet_wait(&w->client);
        ck_assert_msg(
            cqe.status == 0, "operation %u: %s", cqe.op,
            lk_reason_text(cqe.reason, cqe.value, cqe.limit, cqe.row, text, sizeof(text)));
        if (w->born[cqe.user_data])
            w->born[cqe.user_data]->handle = cqe.value;
    }
    memset(w->born, 0, sizeof(w->born));
    w->submitted = 0;
}

static void compare_exact(struct world *w) {
    for (uint32_t i = 0; i < w->expected_count; i++) {
        struct expected *e = &w->expected[i];
        for (uint32_t t = 0; t < e->tokens; t += 1 + (e->tokens > 8) * 7) {
            uint64_t sight = e->length - e->tokens + t + 1;
            if (e->length == 0)
                sight = 0;
            double error =
                inlet_error(&w->inlet, e->query + t, e->out + t * DIM, e->ids, sight, e->layer);
            ck_assert_msg(error < inlet_tolerance(&w->inlet),
                          "row %u, token %u of %u at %lu: off by %g", i, t, e->tokens,
                          (unsigned long)e->length, error);
        }
        free(e->ids);
    }
    w->expected_count = 0;
}

struct sparse {
    float out[DIM];
    struct lk_head_result result;
    struct lk_page_entry list[80];
};

/* One sparse query at the end of a layer; what is not written is zero. */
static void attend_sparse(struct world *w, uint64_t handle, uint32_t layer, uint64_t length,
                          uint16_t scan, struct sparse *ret) {
    static struct inlet_step step;
    inlet_step(&step);
    struct lk_row_desc *row = inlet_row(&step, handle, layer, length, 1);
    struct sparse *at = inlet_alloc(&w->client, sizeof(*at));
    memset(at, 0, sizeof(*at));
    give_q(w, row);
    struct lk_head_result *result = inlet_alloc(&w->client, sizeof(*result));
    struct lk_page_entry *list = inlet_alloc(&w->client, sizeof(at->list));
    memset(list, 0, sizeof(at->list));
    row->list = inlet_offset(&w->client, list);
    row->list_pages = 80;
    step.step.results = inlet_offset(&w->client, result);
    step.step.budget = scan == LK_SCAN_TREE ? 2 * 8 : 3 * 8;
    step.step.scan = scan;
    step.step.sampled = 1;
    ck_assert_int_eq(inlet_do(&w->client, LK_OP_ATTEND, &step, inlet_step_bytes(&step)).status, 0);
    memcpy(ret->out, w->client.memory.arena + row->out, sizeof(ret->out));
    memcpy(ret->list, list, sizeof(ret->list));
    ret->result = *result;
}

/* A sequence that is given the same tokens at once attends the same, bit by bit. */
static void compare_sparse(struct world *w) {
    static struct inlet_step step;
    struct model *m = any_model(w);
    uint32_t layer = (uint32_t)pick(w, LAYERS);
    uint16_t scan = (uint16_t)(LK_SCAN_FULL + pick(w, 4));
    struct sparse mine, fresh;
    if (!m || m->length[layer] == 0)
        return;
    uint64_t handle = inlet_create(&w->client);
    inlet_step(&step);
    give_kv(w, inlet_row(&step, handle, layer, 0, (uint32_t)m->length[layer]), m->id[layer]);
    ck_assert_int_eq(inlet_do(&w->client, LK_OP_APPEND, &step, inlet_step_bytes(&step)).status, 0);
    attend_sparse(w, m->handle, layer, m->length[layer], scan, &mine);
    attend_sparse(w, handle, layer, m->length[layer], scan, &fresh);
    ck_assert_msg(inlet_same(&mine, &fresh, sizeof(mine)), "scan %u at %lu tokens", scan,
                  (unsigned long)m->length[layer]);
    inlet_free(&w->client, handle);
}

static void run(uint32_t spin_us, uint64_t seed, uint32_t steps) {
    static struct world w;
    open_world(&w, spin_us, seed);
    for (uint32_t i = 0; i < steps; i++) {
        inlet_reset(&w.client);
        for (uint64_t burst = 1 + pick(&w, BURST); burst > 0; burst--)
            submit_any(&w);
        inlet_check(&w.inlet);
        collect(&w);
        compare_exact(&w);
        inlet_check_idle(&w.inlet);
        if (i % 4 == 0)
            compare_sparse(&w);
    }
    close_world(&w);
}

START_TEST(sequences_keep_everything) {
    run(20, 1, STEPS);
}
END_TEST
START_TEST(sequences_keep_everything_asleep) {
    run(0, 2, STEPS / 3);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("model of sequences");
    TCase *tcase = tcase_create("random");
    tcase_set_timeout(tcase, 300);
    tcase_add_test(tcase, sequences_keep_everything);
    tcase_add_test(tcase, sequences_keep_everything_asleep);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
