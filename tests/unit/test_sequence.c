/* SPDX-License-Identifier: MIT */
/*
 * test_sequence.c - tables, forks, copies and cuts of sequences, down to the bytes of their pages.
 */
#include <check.h>
#include <string.h>

#include "../common/run.h"
#include "../common/inlet.h"

#define TOKENS 1000
#define WIDTH  256 /* values of a token's queries, and outputs */

static struct inlet inlet;
static struct inlet_client client;
static uint64_t ids[TOKENS];

static void open_pages(uint64_t pages) {
    struct lk_config config;
    inlet_config(&config, pages);
    inlet_open(&inlet, &config);
    ck_assert_int_eq(inlet_connect(&inlet, &client, 1, 64, 0), 0);
    inlet_count(ids, TOKENS, 1);
}
static void setup(void) {
    open_pages(512);
}
static void teardown(void) {
    inlet_check_idle(&inlet);
    inlet_disconnect(&client);
    ck_assert_uint_eq(inlet_status(&inlet).pool[0].pages_used, 0);
    inlet_close(&inlet);
}

static struct lk_sequence *sequence(uint64_t handle) {
    return &inlet.intake->sequence[(uint32_t)handle - 1];
}

/* What can be told on a GPU too, where nobody looks into the pool: forks cut to `tokens` attend the
 * same to the bit, all of it and by a scan of all summaries. */
static void attend_same(uint64_t a, uint64_t b, uint32_t layer, uint64_t tokens) {
    static struct inlet_step step;
    uint64_t handle[2] = {inlet_fork(&client, a), inlet_fork(&client, b)};
    for (uint32_t budget = 32; budget <= 2 * TOKENS; budget += 2 * TOKENS - 32) {
        struct lk_page_entry *list[2];
        float *out[2];
        for (uint32_t i = 0; i < 2; i++) {
            inlet_truncate(&client, handle[i], tokens);
            inlet_step(&step);
            struct lk_row_desc *row = inlet_row(&step, handle[i], layer, tokens, 1);
            out[i] = inlet_give_q(&client, row, 3000);
            list[i] = inlet_alloc(&client, 2 * 2 * sizeof(*list[i]));
            memset(list[i], 0, 2 * 2 * sizeof(*list[i]));
            row->list = inlet_offset(&client, list[i]);
            row->list_pages = 2;
            step.step.budget = budget;
            inlet_must(inlet_do(&client, LK_OP_ATTEND, &step, inlet_step_bytes(&step)));
        }
        ck_assert_mem_eq(out[0], out[1], WIDTH * sizeof(float));
        ck_assert_mem_eq(list[0], list[1], 2 * 2 * sizeof(*list[0]));
    }
    inlet_free(&client, handle[0]);
    inlet_free(&client, handle[1]);
}

/* Nothing is in flight: two tables hold the same at a layer, bytes of summaries included. */
static void same_bytes(uint64_t a, uint64_t b, uint32_t layer, uint64_t tokens) {
    const struct lk_pool_view *v = &inlet.intake->pool[0].view;
    uint32_t page_tokens = v->geometry.page_tokens;
    uint64_t token_bytes = (uint64_t)v->geometry.head_dim * v->layout.element_bytes;
    inlet_check_idle(&inlet);
    attend_same(a, b, layer, tokens);
    if (inlet_skips(&inlet, "bytes of pages", "its pool cannot be read; it attended the same"))
        return;
    for (uint64_t j = 0; j * page_tokens < tokens; j++) {
        uint32_t qa = sequence(a)->table[j / 4], qb = sequence(b)->table[j / 4];
        uint64_t pa = qa * UINT64_C(4) + j % 4, pb = qb * UINT64_C(4) + j % 4;
        uint64_t left = tokens - j * page_tokens;
        uint64_t bytes = (left < page_tokens ? left : page_tokens) * token_bytes;
        for (uint32_t h = 0; h < v->geometry.kv_heads; h++) {
            ck_assert_mem_eq(lk_page_keys(v, layer, pa, h), lk_page_keys(v, layer, pb, h), bytes);
            ck_assert_mem_eq(lk_page_values(v, layer, pa, h), lk_page_values(v, layer, pb, h),
                             bytes);
            if (left < page_tokens)
                continue;
            ck_assert_mem_eq(lk_page_coarse(v, layer, pa, h), lk_page_coarse(v, layer, pb, h),
                             v->layout.coarse_bytes);
            ck_assert_mem_eq(lk_page_fine(v, layer, pa, h), lk_page_fine(v, layer, pb, h),
                             v->layout.fine_bytes);
            if (j % 4 == 3)
                ck_assert_mem_eq(lk_quad_super(v, layer, qa, h), lk_quad_super(v, layer, qb, h),
                                 v->layout.super_bytes);
        }
    }
}

/* Query `query` of a row has attended the first `count` of ids. */
static bool agrees(uint64_t query, const float *out, uint64_t count, uint32_t layer) {
    return inlet_error(&inlet, query, out, ids, count, layer) < inlet_tolerance(&inlet);
}

/* DECODE of tokens from..to-1 in one row; attention is compared where it is cheap to. */
static void decode(uint64_t handle, uint32_t layer, uint64_t from, uint64_t to) {
    static struct inlet_step step;
    inlet_step(&step);
    struct lk_row_desc *row = inlet_row(&step, handle, layer, from, (uint32_t)(to - from));
    step.step.dense_below = UINT32_MAX;
    inlet_give_kv(&client, row, ids + from);
    float *out = inlet_give_q(&client, row, 5000);
    inlet_must(inlet_do(&client, LK_OP_DECODE, &step, inlet_step_bytes(&step)));
    for (uint64_t t = from; t < to; t += 37)
        ck_assert(agrees(5000 + t - from, out + (t - from) * WIDTH, t + 1, layer));
}

START_TEST(at_once_by_chunks_by_tokens) {
    uint64_t once = inlet_create(&client), chunks = inlet_create(&client);
    uint64_t single = inlet_create(&client), seed = 5;
    inlet_append(&client, once, 1, 0, ids, TOKENS);
    for (uint64_t at = 0, n; at < TOKENS; at += n) {
        inlet_reset(&client);
        n = 1 + inlet_random(&seed) % 300;
        n = n < TOKENS - at ? n : TOKENS - at;
        decode(chunks, 1, at, at + n);
    }
    for (uint64_t at = 0; at < TOKENS; at++) {
        inlet_reset(&client);
        decode(single, 1, at, at + 1);
    }
    same_bytes(once, chunks, 1, TOKENS);
    same_bytes(once, single, 1, TOKENS);
}
END_TEST

START_TEST(forks_part_inside_a_page) {
    uint64_t parent = inlet_create(&client), others[TOKENS];
    inlet_append(&client, parent, 0, 0, ids, 13);
    inlet_append(&client, parent, 1, 0, ids, 13);
    uint64_t child = inlet_fork(&client, parent);
    ck_assert_uint_eq(sequence(child)->table[0], sequence(parent)->table[0]);
    inlet_count(others, TOKENS, 100000);
    memcpy(others, ids, 13 * sizeof(*ids));
    inlet_append(&client, child, 0, 13, others + 13, 60);
    inlet_append(&client, parent, 0, 13, ids + 13, 60);
    ck_assert_uint_ne(sequence(child)->table[0], sequence(parent)->table[0]);
    uint64_t a = inlet_create(&client), b = inlet_create(&client);
    inlet_append(&client, a, 0, 0, ids, 73);
    inlet_append(&client, b, 0, 0, others, 73);
    inlet_append(&client, a, 1, 0, ids, 13);
    same_bytes(parent, a, 0, 73);
    same_bytes(child, b, 0, 73);
    same_bytes(parent, a, 1, 13);
    same_bytes(child, a, 1, 13);
}
END_TEST

START_TEST(the_last_sharer_appends_in_place) {
    uint64_t parent = inlet_create(&client);
    inlet_append(&client, parent, 0, 0, ids, 20);
    uint64_t child = inlet_fork(&client, parent);
    uint32_t quad = sequence(parent)->table[0];
    inlet_free(&client, parent);
    inlet_append(&client, child, 0, 20, ids + 20, 10);
    ck_assert_uint_eq(sequence(child)->table[0], quad);
}
END_TEST

/* A layer that lags behind appends into many shared quads, which others have complete. */
START_TEST(a_lagging_layer_copies_all_it_touches) {
    uint64_t parent = inlet_create(&client), fresh = inlet_create(&client);
    inlet_append(&client, parent, 0, 0, ids, 700);
    inlet_append(&client, parent, 1, 0, ids, 5);
    uint64_t child = inlet_fork(&client, parent);
    inlet_append(&client, child, 1, 5, ids + 5, 600);
    inlet_append(&client, fresh, 0, 0, ids, 700);
    inlet_append(&client, fresh, 1, 0, ids, 605);
    for (uint32_t i = 0; i < 11; i++) {
        bool copied = i * 64 < 605;
        ck_assert_int_eq(sequence(child)->table[i] != sequence(parent)->table[i], copied);
    }
    same_bytes(child, fresh, 0, 700);
    same_bytes(child, fresh, 1, 605);
    same_bytes(parent, fresh, 0, 700);
}
END_TEST

START_TEST(cut_into_a_summarised_page) {
    uint64_t cut = inlet_create(&client), fresh = inlet_create(&client), others[TOKENS];
    inlet_append(&client, cut, 0, 0, ids, 200);
    inlet_append(&client, cut, 1, 0, ids, 70);
    inlet_truncate(&client, cut, 130);
    ck_assert_uint_eq(sequence(cut)->slot->quads, 3);
    ck_assert_uint_eq(sequence(cut)->lengths[0], 130);
    ck_assert_uint_eq(sequence(cut)->lengths[1], 70);
    inlet_count(others, TOKENS, 200000);
    memcpy(others, ids, 130 * sizeof(*ids));
    inlet_append(&client, cut, 0, 130, others + 130, 170);
    inlet_append(&client, fresh, 0, 0, others, 300);
    same_bytes(cut, fresh, 0, 300);
    inlet_truncate(&client, cut, 0);
    ck_assert_uint_eq(sequence(cut)->slot->quads, 0);
}
END_TEST

START_TEST(cut_into_a_shared_page) {
    uint64_t parent = inlet_create(&client), fresh = inlet_create(&client);
    inlet_append(&client, parent, 0, 0, ids, 128);
    uint64_t child = inlet_fork(&client, parent);
    inlet_truncate(&client, child, 100);
    inlet_append(&client, child, 0, 100, ids + 500, 50);
    inlet_append(&client, fresh, 0, 0, ids, 128);
    same_bytes(parent, fresh, 0, 128);
    same_bytes(child, parent, 0, 96);
}
END_TEST

/* Freed and taken again while rows of the old owner run: nobody sees the other's tokens. */
START_TEST(free_and_reallocate_in_flight) {
    static struct inlet_step step;
    for (uint32_t round = 0; round < 30; round++) {
        inlet_reset(&client);
        uint64_t old = inlet_create(&client), young = inlet_create(&client);
        inlet_append(&client, old, 0, 0, ids, 400);
        inlet_step(&step);
        struct lk_row_desc *row = inlet_row(&step, old, 0, 400, 50);
        inlet_give_kv(&client, row, ids + 400);
        const float *out = inlet_give_q(&client, row, 7000);
        ck_assert(inlet_submit(&client, LK_OP_DECODE, &step, inlet_step_bytes(&step), 1));
        struct lk_object_desc desc = {.handle = old};
        ck_assert(inlet_submit(&client, LK_OP_SEQUENCE_FREE, &desc, sizeof(desc), 2));
        inlet_step(&step);
        inlet_give_kv(&client, inlet_row(&step, young, 0, 0, 400), ids + 500);
        ck_assert(inlet_submit(&client, LK_OP_APPEND, &step, inlet_step_bytes(&step), 3));
        for (uint32_t i = 0; i < 3; i++)
            inlet_must(inlet_wait(&client));
        for (uint32_t t = 0; t < 50; t += 49)
            ck_assert(agrees(7000 + t, out + t * WIDTH, 401 + t, 0));
        inlet_free(&client, young);
    }
}
END_TEST

START_TEST(a_long_append_is_contiguous) {
    uint64_t a = inlet_create(&client);
    inlet_append(&client, a, 0, 0, ids, TOKENS);
    for (uint32_t i = 1; i < sequence(a)->slot->quads; i++)
        ck_assert_uint_eq(sequence(a)->table[i], sequence(a)->table[i - 1] + 1);
}
END_TEST

START_TEST(a_full_pool_refuses_and_keeps_all) {
    static struct inlet_step step;
    teardown();
    open_pages(64); /* 16 quads, 1024 tokens */
    uint64_t a = inlet_create(&client), b = inlet_create(&client);
    inlet_append(&client, a, 0, 0, ids, 900);
    inlet_step(&step);
    inlet_give_kv(&client, inlet_row(&step, b, 0, 0, 10), ids);
    inlet_give_kv(&client, inlet_row(&step, b, 1, 0, 65), ids);
    struct lk_cqe cqe = inlet_do(&client, LK_OP_APPEND, &step, inlet_step_bytes(&step));
    inlet_refused(cqe, LK_REASON_PAGES_FREE, 8, 4, LK_ROW_WHOLE);
    ck_assert_uint_eq(cqe.rows, 0);
    ck_assert_uint_eq(sequence(b)->slot->quads, 0);
    inlet_append(&client, b, 1, 0, ids, 64); /* what is free can be had */
    uint64_t c = inlet_fork(&client, b);     /* a fork takes nothing */
    inlet_truncate(&client, c, 60);
    inlet_step(&step); /* but to part does */
    inlet_give_kv(&client, inlet_row(&step, c, 1, 60, 1), ids);
    inlet_refused(inlet_do(&client, LK_OP_APPEND, &step, inlet_step_bytes(&step)),
                  LK_REASON_PAGES_FREE, 4, 0, LK_ROW_WHOLE);
    inlet_free(&client, a);
    inlet_must(inlet_do(&client, LK_OP_APPEND, &step, inlet_step_bytes(&step)));
}
END_TEST

int main(void) {
    Suite *suite = suite_create("sequence");
    TCase *tcase = tcase_create("all");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, at_once_by_chunks_by_tokens);
    tcase_add_test(tcase, forks_part_inside_a_page);
    tcase_add_test(tcase, the_last_sharer_appends_in_place);
    tcase_add_test(tcase, a_lagging_layer_copies_all_it_touches);
    tcase_add_test(tcase, cut_into_a_summarised_page);
    tcase_add_test(tcase, cut_into_a_shared_page);
    tcase_add_test(tcase, free_and_reallocate_in_flight);
    tcase_add_test(tcase, a_long_append_is_contiguous);
    tcase_add_test(tcase, a_full_pool_refuses_and_keeps_all);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
