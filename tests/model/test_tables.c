/* SPDX-License-Identifier: MIT */
/*
 * test_tables.c - a block manager as vLLM's over a lease, against a store that keeps everything.
 *
 * Requests share the full blocks of equal prefixes by hash; a block without users keeps its hash
 * until it is handed out again; requests are preempted and come back, draft tokens are written and
 * rejected, so that their slots are written again; partial blocks are copied for beams, cached
 * blocks forgotten. Each step sends its tables once, then for each layer a WRITE and an
 * ATTEND_TABLE, all without waiting. Exact rows are compared with attention computed in double;
 * sparse rows bit by bit with a sequence that holds the same tokens.
 */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "../common/run.h"
#include "../common/inlet.h"

#define LAYERS     2
#define BLOCKS     120
#define B          8
#define DIM        64
#define REQUESTS   6
#define TOKENS_MAX 320
#define STEP_MAX   40 /* tokens of a request in a step */
#define PREFIXES   3
#define DRAFTS     5

#ifndef STEPS
#define STEPS 10000
#endif

struct block {
    uint32_t users;
    uint64_t hash;  /* of all tokens up to its end; 0: not full of confirmed tokens */
    uint64_t freed; /* when, for reuse of the oldest */
};

struct request {
    bool alive, running;
    uint64_t id[TOKENS_MAX]; /* all it knows */
    uint32_t known;          /* tokens that are to be computed */
    uint32_t computed;       /* tokens in blocks, confirmed */
    uint32_t block[TOKENS_MAX / B + 1], blocks;
    uint32_t now;   /* tokens written in this step */
    uint64_t query; /* number of the first query of this step */
};

struct world {
    struct inlet inlet;
    struct inlet_client client;
    uint64_t lease, seed, next_id, clock;
    struct block block[BLOCKS];
    struct request request[REQUESTS];
    uint64_t shared, preempted, rejected, reused, copied, forgotten; /* that things happened */
};

static uint64_t pick(struct world *w, uint64_t bound) {
    return inlet_random(&w->seed) % bound;
}

/* ---- blocks ---- */

static uint64_t hash_of(const uint64_t *ids, uint32_t count) {
    uint64_t state = 1;
    for (uint32_t i = 0; i < count; i++) {
        state ^= ids[i];
        state = inlet_random(&state);
    }
    return state | 1;
}

static int32_t find_block(const struct world *w, uint64_t hash) {
    for (int32_t i = 0; i < BLOCKS; i++)
        if (w->block[i].hash == hash)
            return i;
    return -1;
}

/* The free block that was let go longest ago. -1: none. */
static int32_t take_block(struct world *w) {
    int32_t best = -1;
    for (int32_t i = 0; i < BLOCKS; i++)
        if (!w->block[i].users && (best < 0 || w->block[i].freed < w->block[best].freed))
            best = i;
    if (best >= 0) {
        w->reused += w->block[best].hash != 0;
        w->block[best] = (struct block){.users = 1};
    }
    return best;
}

static void let_go(struct world *w, struct request *r) {
    while (r->blocks) {
        struct block *block = &w->block[r->block[--r->blocks]];
        if (--block->users == 0)
            block->freed = ++w->clock;
    }
    r->computed = 0;
    r->running = false;
}

/* Full blocks whose tokens are confirmed can be found from now on. */
static void publish_blocks(struct world *w, const struct request *r) {
    for (uint32_t i = 0; i < r->computed / B; i++) {
        uint64_t hash = hash_of(r->id, (i + 1) * B);
        if (find_block(w, hash) < 0)
            w->block[r->block[i]].hash = hash;
    }
}

/* ---- requests ---- */

static void make_request(struct world *w, struct request *r) {
    uint64_t prefix = pick(w, PREFIXES);
    uint32_t common = (uint32_t)pick(w, 120), own = 1 + (uint32_t)pick(w, 60);
    memset(r, 0, sizeof(*r));
    r->alive = true;
    for (uint32_t i = 0; i < common; i++)
        r->id[r->known++] = (prefix + 1) * 1000000 + i;
    for (uint32_t i = 0; i < own; i++)
        r->id[r->known++] = w->next_id++;
}

/* Blocks of its prefix that are cached; at least one token stays to be computed. */
static void resume(struct world *w, struct request *r) {
    r->running = true;
    while ((r->blocks + 1) * B < r->known) {
        int32_t at = find_block(w, hash_of(r->id, (r->blocks + 1) * B));
        if (at < 0)
            break;
        w->shared += w->block[at].users > 0;
        w->block[at].users++;
        r->block[r->blocks++] = (uint32_t)at;
        r->computed += B;
    }
}

/* Room for `tokens` more -> false: there is none. */
static bool reserve(struct world *w, struct request *r, uint32_t tokens) {
    while (r->blocks * B < r->computed + tokens) {
        int32_t at = take_block(w);
        if (at < 0)
            return false;
        r->block[r->blocks++] = (uint32_t)at;
    }
    return true;
}

/* What a request does in this step: a chunk of its prompt, a token, or drafts. */
static void plan(struct world *w, struct request *r) {
    uint32_t left = r->known - r->computed;
    if (left == 0) { /* the last step's token and its drafts */
        uint32_t drafts = pick(w, 3) ? 0 : 1 + (uint32_t)pick(w, DRAFTS);
        for (uint32_t i = 0; i <= drafts && r->known < TOKENS_MAX; i++)
            r->id[r->known++] = w->next_id++;
        left = r->known - r->computed;
    }
    r->now = left < STEP_MAX ? left : 1 + (uint32_t)pick(w, STEP_MAX);
    if (!reserve(w, r, r->now)) {
        let_go(w, r);
        w->preempted++;
    }
}

/* Some of the drafts are rejected: their slots will be written again. */
static void confirm(struct world *w, struct request *r) {
    bool drafted = r->computed + r->now == r->known && r->now > 1 && r->now <= DRAFTS + 1;
    uint32_t accepted = r->now;
    if (drafted && pick(w, 2)) {
        accepted = 1 + (uint32_t)pick(w, r->now);
        w->rejected += accepted < r->now;
        r->known = r->computed + accepted;
    }
    r->computed += accepted;
    while ((r->blocks - 1) * B >= r->computed) { /* as vLLM: a block that became empty goes */
        struct block *block = &w->block[r->block[--r->blocks]];
        block->users--;
        block->freed = ++w->clock;
    }
    publish_blocks(w, r);
}

static void schedule(struct world *w) {
    for (uint32_t i = 0; i < REQUESTS; i++) {
        struct request *r = &w->request[i];
        r->now = 0;
        if (r->alive && (r->known + DRAFTS + 1 >= TOKENS_MAX || pick(w, 60) == 0)) {
            let_go(w, r);
            r->alive = false;
        }
        if (!r->alive && pick(w, 4) == 0)
            make_request(w, r);
        if (r->running && pick(w, 50) == 0) {
            let_go(w, r);
            w->preempted++;
        }
        if (r->alive && !r->running && pick(w, 3) == 0)
            resume(w, r);
        if (r->running)
            plan(w, r);
        if (!r->running)
            r->now = 0;
    }
}

/* ---- a step ---- */

static void *arena(struct world *w, uint64_t bytes) {
    return inlet_alloc(&w->client, bytes);
}

static void submit(struct world *w, uint16_t op, const void *desc, uint32_t bytes) {
    ck_assert(inlet_submit(&w->client, op, desc, bytes, op));
}

static void submit_tables(struct world *w, uint32_t set) {
    struct {
        struct lk_tables_desc head;
        struct lk_table_desc table[REQUESTS];
    } desc = {.head = {.handle = w->lease, .set = set}};
    for (uint32_t i = 0; i < REQUESTS; i++) {
        const struct request *r = &w->request[i];
        uint32_t length = r->computed + r->now, pages = (length + B - 1) / B;
        if (!r->now)
            continue;
        uint32_t *ids = arena(w, pages * sizeof(*ids));
        memcpy(ids, r->block, pages * sizeof(*ids));
        desc.table[desc.head.rows++] = (struct lk_table_desc){
            .table = inlet_offset(&w->client, ids), .length = length, .pages = pages};
    }
    submit(w, LK_OP_TABLES, &desc,
           (uint32_t)(sizeof(desc.head) + desc.head.rows * sizeof(desc.table[0])));
}

/* All new tokens of all requests in one row, with padding between. */
static void submit_write(struct world *w, uint32_t layer) {
    static struct inlet_step step;
    uint32_t count = 0;
    inlet_step(&step);
    for (uint32_t i = 0; i < REQUESTS; i++)
        count += w->request[i].now + 1;
    struct lk_row_desc *row = inlet_row(&step, w->lease, layer, 0, count);
    uint64_t bytes = DIM * inlet_element(&w->inlet);
    uint8_t *k = arena(w, count * bytes), *v = arena(w, count * bytes);
    int64_t *slots = arena(w, count * sizeof(*slots));
    uint32_t at = 0;
    for (uint32_t i = 0; i < REQUESTS; i++) {
        const struct request *r = &w->request[i];
        for (uint32_t t = r->computed; t < r->computed + r->now; t++, at++) {
            inlet_store(&w->inlet, k + at * bytes, r->id[t], 0, layer, DIM);
            inlet_store(&w->inlet, v + at * bytes, r->id[t], 1, layer, DIM);
            slots[at] = (int64_t)r->block[t / B] * B + t % B;
        }
        slots[at++] = -1;
    }
    row->k = inlet_offset(&w->client, k);
    row->v = inlet_offset(&w->client, v);
    row->slots = inlet_offset(&w->client, slots);
    submit(w, LK_OP_WRITE, &step, inlet_step_bytes(&step));
}

static void give_q(struct world *w, struct lk_row_desc *row, uint64_t id) {
    uint64_t bytes = DIM * inlet_element(&w->inlet);
    uint8_t *q = arena(w, row->tokens * bytes);
    for (uint32_t t = 0; t < row->tokens; t++)
        inlet_store(&w->inlet, q + t * bytes, id + t, 2, row->layer, DIM);
    row->q = inlet_offset(&w->client, q);
    row->out = inlet_offset(&w->client, arena(w, (uint64_t)row->tokens * DIM * 4));
}

static void submit_attend(struct world *w, uint32_t layer, uint32_t set, struct inlet_step *step) {
    inlet_step(step);
    step->step.budget = B * BLOCKS;
    uint16_t table = 0;
    for (uint32_t i = 0; i < REQUESTS; i++) {
        if (!w->request[i].now)
            continue;
        struct lk_row_desc *row = inlet_row(step, w->lease, layer, 0, w->request[i].now);
        row->table_set = (uint16_t)set;
        row->table_row = table++;
        w->request[i].query = w->next_id + i;
        give_q(w, row, w->request[i].query);
    }
    submit(w, LK_OP_ATTEND_TABLE, step, inlet_step_bytes(step));
}

static void collect(struct world *w, uint32_t count) {
    while (count--) {
        char text[LK_REASON_BYTES];
        struct lk_cqe cqe = inlet_wait(&w->client);
        ck_assert_msg(
            cqe.status == 0, "operation %u: %s", cqe.op,
            lk_reason_text(cqe.reason, cqe.value, cqe.limit, cqe.row, text, sizeof(text)));
    }
}

/* Some tokens of some rows. */
static void compare_exact(struct world *w, const struct inlet_step *step) {
    uint32_t row = 0, chosen = (uint32_t)pick(w, REQUESTS);
    for (uint32_t i = 0; i < REQUESTS; i++) {
        const struct request *r = &w->request[i];
        if (!r->now)
            continue;
        const struct lk_row_desc *desc = &step->row[row++];
        uint32_t t = (uint32_t)pick(w, r->now);
        if (i != chosen)
            continue;
        const float *out = (const float *)(w->client.memory.arena + desc->out) + t * DIM;
        double error =
            inlet_error(&w->inlet, r->query + t, out, r->id, r->computed + t + 1, desc->layer);
        ck_assert_msg(error < inlet_tolerance(&w->inlet),
                      "request %u, token %u of %u + %u: off by %g", i, t, r->computed, r->now,
                      error);
    }
}

/* ---- sparse rows ---- */

struct sparse {
    float out[DIM];
    struct lk_head_result result;
    struct lk_page_entry list[TOKENS_MAX / B + 1];
};

static void attend_sparse(struct world *w, uint16_t op, struct lk_row_desc *row,
                          struct inlet_step *step, uint64_t q, struct sparse *ret) {
    struct lk_head_result *result = arena(w, sizeof(*result));
    struct lk_page_entry *list = arena(w, sizeof(ret->list));
    memset(ret, 0, sizeof(*ret));
    memset(list, 0, sizeof(ret->list));
    give_q(w, row, q);
    row->list = inlet_offset(&w->client, list);
    row->list_pages = TOKENS_MAX / B + 1;
    step->step.results = inlet_offset(&w->client, result);
    step->step.budget = 2 * B;
    submit(w, op, step, inlet_step_bytes(step));
    collect(w, 1);
    memcpy(ret->out, w->client.memory.arena + row->out, sizeof(ret->out));
    memcpy(ret->list, list, sizeof(ret->list));
    ret->result = *result;
}

/* Fours of blocks that lie as the pool's superpages do: else tree is nested. */
static uint16_t scan_in_effect(const struct request *r, uint32_t length, uint16_t scan) {
    for (uint32_t j = 0; scan == LK_SCAN_TREE && j + 4 <= (length - 1) / B; j += 4)
        for (uint32_t i = 0; i < 4; i++)
            if (r->block[j] % 4 || r->block[j + i] != r->block[j] + i)
                return LK_SCAN_NESTED;
    return scan;
}

static void compare_sparse(struct world *w, uint32_t set) {
    static struct inlet_step step;
    uint32_t layer = (uint32_t)pick(w, LAYERS), table = 0;
    const struct request *r = NULL;
    struct sparse mine, other;
    for (uint32_t i = 0; i < REQUESTS && !r; i++)
        if (w->request[i].now)
            r = &w->request[i];
    if (!r)
        return;
    uint32_t length = r->computed + r->now;
    uint16_t scan = (uint16_t)(LK_SCAN_FULL + pick(w, 4));
    uint64_t sequence = inlet_create(&w->client);
    inlet_step(&step);
    struct lk_row_desc *row = inlet_row(&step, sequence, layer, 0, length);
    uint64_t bytes = DIM * inlet_element(&w->inlet);
    uint8_t *k = arena(w, length * bytes), *v = arena(w, length * bytes);
    for (uint32_t t = 0; t < length; t++) {
        inlet_store(&w->inlet, k + t * bytes, r->id[t], 0, layer, DIM);
        inlet_store(&w->inlet, v + t * bytes, r->id[t], 1, layer, DIM);
    }
    row->k = inlet_offset(&w->client, k);
    row->v = inlet_offset(&w->client, v);
    submit(w, LK_OP_APPEND, &step, inlet_step_bytes(&step));
    collect(w, 1);
    inlet_step(&step);
    step.step.scan = scan_in_effect(r, length, scan);
    attend_sparse(w, LK_OP_ATTEND, inlet_row(&step, sequence, layer, length, 1), &step, w->next_id,
                  &other);
    inlet_step(&step);
    step.step.scan = scan;
    row = inlet_row(&step, w->lease, layer, 0, 1);
    row->table_set = (uint16_t)set;
    row->table_row = (uint16_t)table;
    attend_sparse(w, LK_OP_ATTEND_TABLE, row, &step, w->next_id, &mine);
    ck_assert_msg(inlet_same(&mine, &other, sizeof(mine)), "scan %u at %u tokens", scan, length);
    inlet_free(&w->client, sequence);
}

/* ---- lists ---- */

static void list_operation(struct world *w, uint16_t op, const uint32_t *ids, uint32_t count) {
    uint32_t words = op == LK_OP_COPY_PAGES ? 2 * count : count;
    uint32_t *list = arena(w, words * sizeof(*list) + 1);
    memcpy(list, ids, words * sizeof(*list));
    struct lk_object_desc desc = {
        .handle = w->lease, .list = inlet_offset(&w->client, list), .count = count};
    submit(w, op, &desc, sizeof(desc));
    collect(w, 1);
}

/* A request's last block moves, as when beams part, along with a shared one. */
static void copy_blocks(struct world *w) {
    struct request *r = &w->request[pick(w, REQUESTS)];
    uint32_t pairs[4], count = 0;
    if (!r->running || r->blocks < 2)
        return;
    for (uint32_t i = r->blocks - 2; i < r->blocks; i++) {
        int32_t to = take_block(w);
        if (to < 0)
            break;
        struct block *old = &w->block[r->block[i]];
        pairs[2 * count] = r->block[i];
        pairs[2 * count++ + 1] = (uint32_t)to;
        r->block[i] = (uint32_t)to;
        if (--old->users == 0)
            old->freed = ++w->clock;
    }
    list_operation(w, LK_OP_COPY_PAGES, pairs, count);
    w->copied += count;
}

static void forget_blocks(struct world *w) {
    uint32_t ids[BLOCKS], count = 0;
    for (uint32_t i = 0; i < BLOCKS; i++)
        if (!w->block[i].users && pick(w, 4) == 0) {
            w->forgotten += w->block[i].hash != 0;
            w->block[i].hash = 0;
            ids[count++] = i;
        }
    list_operation(w, LK_OP_INVALIDATE, ids, count);
}

static void run_step(struct world *w, uint32_t number) {
    static struct inlet_step attends[LAYERS];
    uint32_t set = number % LK_TABLE_SETS;
    inlet_reset(&w->client);
    if (pick(w, 20) == 0)
        copy_blocks(w);
    if (pick(w, 50) == 0)
        forget_blocks(w);
    schedule(w);
    submit_tables(w, set);
    for (uint32_t l = 0; l < LAYERS; l++) {
        submit_write(w, l);
        submit_attend(w, l, set, &attends[l]);
    }
    collect(w, 1 + 2 * LAYERS);
    compare_exact(w, &attends[pick(w, LAYERS)]);
    if (number % 4 == 0)
        compare_sparse(w, set);
    for (uint32_t i = 0; i < REQUESTS; i++)
        if (w->request[i].now)
            confirm(w, &w->request[i]);
}

START_TEST(tables_agree_with_everything) {
    static struct world w;
    struct lk_config config;
    w = (struct world){.seed = 3, .next_id = UINT64_C(1) << 32};
    inlet_config(&config, 256);
    inlet_pool(&config,
               (struct lk_geometry){.layers = LAYERS,
                                    .kv_heads = 1,
                                    .group = 1,
                                    .head_dim = DIM,
                                    .page_tokens = B,
                                    .rank = 2},
               256);
    inlet_open(&w.inlet, &config);
    ck_assert_int_eq(inlet_connect(&w.inlet, &w.client, 1, 64, 0), 0);
    w.lease = inlet_lease(&w.client, BLOCKS);
    for (uint32_t i = 0; i < STEPS; i++) {
        run_step(&w, i);
        if (i % 8 == 0)
            inlet_check_idle(&w.inlet);
    }
    ck_assert(w.shared && w.preempted && w.rejected && w.reused && w.copied && w.forgotten);
    inlet_disconnect(&w.client);
    ck_assert_uint_eq(inlet_status(&w.inlet).pool[0].pages_used, 0);
    inlet_close(&w.inlet);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("model of tables");
    TCase *tcase = tcase_create("random");
    tcase_set_timeout(tcase, 300);
    tcase_add_test(tcase, tables_agree_with_everything);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
