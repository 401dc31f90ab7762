/* SPDX-License-Identifier: MIT */
/*
 * test_lease.c - marks, tables and order of leased pages.
 */
#include <check.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "../common/run.h"
#include "../common/inlet.h"

#define B     16
#define PAGES 64

static struct inlet inlet;
static struct inlet_client client;
static uint64_t lease, ids[4096];
static struct inlet_step step;

static void setup(void) {
    struct lk_config config;
    inlet_config(&config, 512);
    inlet_open(&inlet, &config);
    ck_assert_int_eq(inlet_connect(&inlet, &client, 1, 64, 0), 0);
    lease = inlet_lease(&client, PAGES);
    inlet_count(ids, 4096, 1);
}
static void teardown(void) {
    inlet_check_idle(&inlet);
    inlet_disconnect(&client);
    ck_assert_uint_eq(inlet_status(&inlet).pool[0].pages_used, 0);
    inlet_close(&inlet);
}

/* ---- shapes ---- */

/* Adds a row of a WRITE: tokens go to slot, slot + 1, ... */
static void add_write(uint32_t layer, int64_t slot, const uint64_t *tokens, uint32_t count) {
    struct lk_row_desc *row = inlet_row(&step, lease, layer, 0, count);
    int64_t *slots = inlet_alloc(&client, count * sizeof(*slots));
    for (uint32_t i = 0; i < count; i++)
        slots[i] = slot + i;
    inlet_give_kv(&client, row, tokens);
    row->slots = inlet_offset(&client, slots);
}

static struct lk_cqe put(uint32_t layer, int64_t slot, const uint64_t *tokens, uint32_t count) {
    inlet_step(&step);
    add_write(layer, slot, tokens, count);
    return inlet_do(&client, LK_OP_WRITE, &step, inlet_step_bytes(&step));
}

static uint32_t tables_desc(void *at, uint32_t set, const uint32_t *pages, uint32_t count,
                            uint64_t length) {
    struct lk_tables_desc *head = at;
    struct lk_table_desc *table = (struct lk_table_desc *)(head + 1);
    uint32_t *copy = inlet_alloc(&client, count * sizeof(*copy) + 1);
    memcpy(copy, pages, count * sizeof(*copy));
    *head = (struct lk_tables_desc){.handle = lease, .set = set, .rows = 1};
    *table = (struct lk_table_desc){
        .table = inlet_offset(&client, copy), .length = length, .pages = count};
    return sizeof(*head) + sizeof(*table);
}

static struct lk_cqe set_table(uint32_t set, const uint32_t *pages, uint32_t count,
                               uint64_t length) {
    _Alignas(8) uint8_t desc[64];
    uint32_t bytes = tables_desc(desc, set, pages, count, length);
    return inlet_do(&client, LK_OP_TABLES, desc, bytes);
}

#define QUERY 9000 /* number of the first query of a row */

static float *add_attend(uint32_t layer, uint32_t set, uint32_t tokens) {
    struct lk_row_desc *row = inlet_row(&step, lease, layer, 0, tokens);
    row->table_set = (uint16_t)set;
    return inlet_give_q(&client, row, QUERY);
}

/* Query `at` of such a row has attended `tokens`. */
static bool agrees(uint32_t layer, uint32_t at, const float *out, const uint64_t *tokens,
                   uint64_t count) {
    return inlet_error(&inlet, QUERY + at, out + at * 256, tokens, count, layer) <
           inlet_tolerance(&inlet);
}

/* Exact attention of one query over `tokens`. */
static void attends(uint32_t layer, uint32_t set, const uint64_t *tokens, uint64_t count) {
    inlet_step(&step);
    step.step.dense_below = UINT32_MAX;
    float *out = add_attend(layer, set, 1);
    inlet_must(inlet_do(&client, LK_OP_ATTEND_TABLE, &step, inlet_step_bytes(&step)));
    ck_assert(agrees(layer, 0, out, tokens, count));
}

static struct lk_cqe try_attend(uint32_t layer, uint32_t set) {
    inlet_step(&step);
    add_attend(layer, set, 1);
    return inlet_do(&client, LK_OP_ATTEND_TABLE, &step, inlet_step_bytes(&step));
}

static struct lk_cqe list(uint16_t op, const uint32_t *words, uint32_t count, uint32_t each) {
    uint32_t *copy = inlet_alloc(&client, (uint64_t)count * each * sizeof(*copy) + 1);
    memcpy(copy, words, (uint64_t)count * each * sizeof(*copy));
    struct lk_object_desc desc = {
        .handle = lease, .list = inlet_offset(&client, copy), .count = count};
    return inlet_do(&client, op, &desc, sizeof(desc));
}

/* ---- marks ---- */

/* A lease needs some address space: without, it is refused and nothing is taken. */
START_TEST(no_address_space_is_said) {
    struct lk_object_desc desc = {.length = PAGES};
    struct rlimit old, tight;
    struct lk_cqe cqe;
    char text[LK_REASON_BYTES];
    unsigned long pages;
    ck_assert_int_eq(getrlimit(RLIMIT_AS, &old), 0);
    FILE *file = fopen("/proc/self/statm", "r");
    ck_assert_int_eq(fscanf(file, "%lu", &pages), 1);
    fclose(file);
    tight = old;
    tight.rlim_cur = pages * (rlim_t)sysconf(_SC_PAGESIZE) + (256 << 10);
    ck_assert_int_eq(setrlimit(RLIMIT_AS, &tight), 0);
    cqe = inlet_do(&client, LK_OP_LEASE_OPEN, &desc, sizeof(desc));
    ck_assert_int_eq(setrlimit(RLIMIT_AS, &old), 0);
    uint64_t wanted = PAGES * 9 * 256 * 4 + 2 * PAGES * 8; /* sets; trials of two layers */
    inlet_refused(cqe, LK_REASON_MEMORY, wanted, 0, LK_ROW_WHOLE);
    ck_assert_int_eq(cqe.status, -ENOMEM);
    lk_reason_text(cqe.reason, cqe.value, cqe.limit, cqe.row, text, sizeof(text));
    ck_assert_ptr_nonnull(strstr(text, " bytes of address space"));
    ck_assert_uint_eq(inlet_status(&inlet).leases, 1);
    inlet_lease(&client, PAGES);
}
END_TEST

/* Whoever had its pages before, wherever they lie: a lease begins empty. */
START_TEST(a_lease_of_scattered_pages_is_empty) {
    uint64_t first = lease, some[8];
    for (int i = 0; i < 8; i++) {
        lease = some[i] = inlet_lease(&client, 8 + 4 * (uint64_t)i);
        for (uint32_t layer = 0; layer < 2; layer++)
            inlet_must(put(layer, 0, ids, (8 + 4 * (uint32_t)i) * B));
    }
    for (int i = 0; i < 8; i += 2)
        inlet_object(&client, LK_OP_LEASE_CLOSE, some[i], 0);
    lease = inlet_lease(&client, 512 - PAGES - 12 - 20 - 28 - 36);
    for (uint32_t page = 0; page < 512 - PAGES - 12 - 20 - 28 - 36; page++)
        for (uint32_t layer = 0; layer < 2; layer++)
            inlet_refused(put(layer, page * B + 1, ids, 1), LK_REASON_SLOT_GAP, 1, 0, 0);
    inlet_check(&inlet);
    lease = first;
}
END_TEST

START_TEST(writes_leave_no_gap) {
    inlet_refused(put(0, 1, ids, 1), LK_REASON_SLOT_GAP, 1, 0, 0);
    inlet_must(put(0, 0, ids, 5));
    inlet_refused(put(0, 6, ids, 1), LK_REASON_SLOT_GAP, 6, 5, 0);
    inlet_must(put(0, 5, ids, 1));
    inlet_refused(put(1, 5, ids, 1), LK_REASON_SLOT_GAP, 5, 0, 0); /* marks are of a layer */
    inlet_must(put(0, 2, ids, 1));                                 /* tokens 3.. are gone */
    inlet_refused(put(0, 4, ids, 1), LK_REASON_SLOT_GAP, 4, 3, 0);
    inlet_refused(put(0, PAGES * B - 1, ids, 2), LK_REASON_SLOT, PAGES * B, PAGES * B, 0);
}
END_TEST

/* Whatever a WRITE is refused for, and wherever in it, nothing of it is written. */
START_TEST(a_refused_write_changes_nothing) {
    static const struct {
        int64_t slot;
        enum lk_reason reason;
        uint64_t value, limit;
    } bad[] = {
        {2 * B + 1, LK_REASON_SLOT_GAP, 1, 0},
        {B + 9, LK_REASON_SLOT_GAP, 9, 8}, /* the second row opened the page anew */
        {PAGES * B, LK_REASON_SLOT, PAGES * B, PAGES * B},
        {INT64_MAX, LK_REASON_SLOT, INT64_MAX, PAGES * B},
    };
    inlet_must(put(0, 0, ids, 10));
    inlet_must(put(0, B, ids, B));
    inlet_must(set_table(0, (uint32_t[]){1, 0}, 2, B + 10));
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        uint64_t now[B + 10];
        inlet_step(&step);
        add_write(0, 10, ids + 100, 6);
        add_write(0, B, ids + 200, 8);
        add_write(1, 0, ids + 300, B); /* another layer */
        add_write(0, B + 8, ids + 400, 2);
        ((int64_t *)(client.memory.arena + step.row[3].slots))[0] = bad[i].slot;
        struct lk_cqe cqe = inlet_do(&client, LK_OP_WRITE, &step, inlet_step_bytes(&step));
        inlet_refused(cqe, bad[i].reason, bad[i].value, bad[i].limit, 3);
        ck_assert_uint_eq(cqe.rows, 0);
        memcpy(now, ids, B * sizeof(*now));
        memcpy(now + B, ids, 10 * sizeof(*now));
        attends(0, 0, now, B + 10);
        inlet_refused(put(0, 11, ids, 1), LK_REASON_SLOT_GAP, 11, 10, 0);
        inlet_refused(put(1, 1, ids, 1), LK_REASON_SLOT_GAP, 1, 0, 0);
    }
}
END_TEST

/* Rows of one submission may build on each other: the check goes by what those before leave. */
START_TEST(rows_of_a_write_follow_each_other) {
    uint64_t now[2 * B];
    inlet_step(&step);
    for (uint32_t i = 0; i < 4; i++)
        add_write(0, 4 * i, ids + 4 * i, 4);
    add_write(0, 2, ids + 100, 1);     /* back to 3 */
    add_write(0, 3, ids + 103, B - 3); /* and on */
    add_write(0, B, ids + 200, B);
    inlet_must(inlet_do(&client, LK_OP_WRITE, &step, inlet_step_bytes(&step)));
    memcpy(now, ids, 2 * sizeof(*now));
    now[2] = ids[100];
    memcpy(now + 3, ids + 103, (B - 3) * sizeof(*now));
    memcpy(now + B, ids + 200, B * sizeof(*now));
    inlet_must(set_table(0, (uint32_t[]){0, 1}, 2, 2 * B));
    attends(0, 0, now, 2 * B);
    /* Refused, then the same again: a trial leaves no trace in the next one. */
    for (uint32_t i = 0; i < 2; i++) {
        inlet_step(&step);
        add_write(1, 0, ids, 3);
        add_write(1, 3 + i, ids, 1);
        add_write(1, 3 * B + 1, ids, 1);
        struct lk_cqe cqe = inlet_do(&client, LK_OP_WRITE, &step, inlet_step_bytes(&step));
        inlet_refused(cqe, LK_REASON_SLOT_GAP, i ? 4 : 1, i ? 3 : 0, i ? 1 : 2);
        ck_assert_uint_eq(cqe.rows, 0);
    }
}
END_TEST

START_TEST(padding_is_skipped) {
    inlet_step(&step);
    add_write(0, 0, ids, 6);
    int64_t *slots = (int64_t *)(client.memory.arena + step.row[0].slots);
    slots[0] = -1;
    slots[3] = INT64_MIN;
    for (uint32_t i = 0, at = 0; i < 6; i++)
        slots[i] = slots[i] < 0 ? slots[i] : (int64_t)at++;
    inlet_must(inlet_do(&client, LK_OP_WRITE, &step, inlet_step_bytes(&step)));
    inlet_must(set_table(0, (uint32_t[]){0}, 1, 4));
    attends(0, 0, (uint64_t[]){2, 3, 5, 6}, 4);
}
END_TEST

START_TEST(tables_need_full_pages) {
    inlet_must(put(0, 0, ids, B));
    inlet_must(put(0, 7 * B, ids + B, 9));
    inlet_must(set_table(2, (uint32_t[]){0, 7}, 2, B + 10));
    inlet_refused(try_attend(0, 2), LK_REASON_TABLE_GAP, 7, 9, 0);
    inlet_must(set_table(2, (uint32_t[]){0, 7}, 2, B + 9));
    attends(0, 2, ids, B + 9);
    inlet_refused(try_attend(1, 2), LK_REASON_TABLE_UNSEALED, 0, 0, 0);
    inlet_must(put(0, 3, ids, 1)); /* rewritten: not sealed any more */
    inlet_refused(try_attend(0, 2), LK_REASON_TABLE_UNSEALED, 0, 4, 0);
    inlet_must(put(0, 4, ids + 4, B - 4));
    uint64_t now[2 * B];
    memcpy(now, ids, sizeof(now));
    now[3] = ids[0];
    attends(0, 2, now, B + 9);
    inlet_must(put(0, 0, ids, 1)); /* opened anew */
    inlet_refused(try_attend(0, 2), LK_REASON_TABLE_UNSEALED, 0, 1, 0);
}
END_TEST

START_TEST(tables_are_checked) {
    inlet_refused(set_table(0, (uint32_t[]){0, PAGES}, 2, B + 1), LK_REASON_TABLE_PAGE, PAGES,
                  PAGES, 0);
    inlet_refused(set_table(0, (uint32_t[]){0}, 1, B + 1), LK_REASON_TABLE_LENGTH, 1, 2, 0);
    inlet_refused(set_table(LK_TABLE_SETS, (uint32_t[]){0}, 1, B), LK_REASON_TABLE_SET,
                  LK_TABLE_SETS, LK_TABLE_SETS, LK_ROW_WHOLE);
    uint32_t many[PAGES + 1] = {0};
    inlet_refused(set_table(0, many, PAGES + 1, PAGES * B + 1), LK_REASON_LENGTH_MAX, PAGES * B + 1,
                  PAGES * B, 0);
    inlet_refused(try_attend(0, 0), LK_REASON_TABLE_ROW, 0, 0, 0); /* the set is empty */
    inlet_must(put(0, 0, ids, 5));
    inlet_must(set_table(0, (uint32_t[]){0}, 1, 5));
    inlet_step(&step);
    add_attend(0, 0, 6);
    inlet_refused(inlet_do(&client, LK_OP_ATTEND_TABLE, &step, inlet_step_bytes(&step)),
                  LK_REASON_TABLE_TOKENS, 6, 5, 0);
    inlet_step(&step);
    add_attend(0, 0, 5); /* several tokens are causal */
    float *out = (float *)(client.memory.arena + step.row[0].out);
    inlet_must(inlet_do(&client, LK_OP_ATTEND_TABLE, &step, inlet_step_bytes(&step)));
    for (uint32_t t = 0; t < 5; t++)
        ck_assert(agrees(0, t, out, ids, t + 1));
    inlet_must(set_table(0, (uint32_t[]){0}, 0, 0)); /* no tokens: zeros */
    attends(0, 0, ids, 0);
    inlet_step(&step);
    add_attend(0, 0, 486);
    inlet_refused(inlet_do(&client, LK_OP_ATTEND_TABLE, &step, inlet_step_bytes(&step)),
                  LK_REASON_TABLE_TOKENS, 486, 0, 0);
}
END_TEST

/* Whatever a TABLES is refused for, and wherever in it, its set stays. */
START_TEST(a_refused_set_leaves_the_old_one) {
    static const struct {
        uint32_t pages[2], count;
        uint64_t length;
        enum lk_reason reason;
        uint64_t value, limit;
    } bad[] = {
        {{0, PAGES}, 2, B + 1, LK_REASON_TABLE_PAGE, PAGES, PAGES},
        {{0}, 1, B + 1, LK_REASON_TABLE_LENGTH, 1, 2},
        {{0}, UINT32_MAX, 0, LK_REASON_TABLE_LENGTH, UINT32_MAX, 0},
    };
    _Alignas(8) uint8_t desc[sizeof(struct lk_tables_desc) + 2 * sizeof(struct lk_table_desc)];
    struct lk_tables_desc *head = (struct lk_tables_desc *)desc;
    struct lk_table_desc *table = (struct lk_table_desc *)(head + 1);
    inlet_must(put(0, 0, ids, 2 * B));
    inlet_must(set_table(1, (uint32_t[]){1, 0}, 2, B + 3));
    uint64_t swapped[2 * B];
    memcpy(swapped, ids + B, B * sizeof(*ids));
    memcpy(swapped + B, ids, B * sizeof(*ids));
    attends(0, 1, swapped, B + 3);
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        tables_desc(desc, 1, (uint32_t[]){0}, 1, 5);
        uint32_t *copy = inlet_alloc(&client, sizeof(bad[i].pages));
        memcpy(copy, bad[i].pages, sizeof(bad[i].pages));
        head->rows = 2;
        table[1] = (struct lk_table_desc){
            .table = inlet_offset(&client, copy), .length = bad[i].length, .pages = bad[i].count};
        inlet_refused(inlet_do(&client, LK_OP_TABLES, desc, sizeof(desc)), bad[i].reason,
                      bad[i].value, bad[i].limit, 1);
        attends(0, 1, swapped, B + 3);
    }
    inlet_must(set_table(1, (uint32_t[]){0}, 1, 5));
    attends(0, 1, ids, 5);
}
END_TEST

/* Tables are filled only while memory is left for all else. */
START_TEST(a_table_that_memory_lacks_is_refused) {
    inlet_must(put(0, 0, ids, 2 * B));
    inlet_must(set_table(1, (uint32_t[]){0}, 1, B));
    inlet.intake->tables.every = 0;
    inlet.intake->tables.spare = UINT64_MAX;
    for (int i = 0; i < 2; i++)
        inlet_refused(set_table(1, (uint32_t[]){1, 0}, 2, 2 * B), LK_REASON_TABLE_MEMORY, 8, 0, 0);
    attends(0, 1, ids, B);
    inlet.intake->tables.spare = 0;
    inlet_must(set_table(1, (uint32_t[]){0, 1}, 2, 2 * B));
    attends(0, 1, ids, 2 * B);
}
END_TEST

/* ---- order ---- */

/* Written, attended, written again, attended, all without waiting. */
START_TEST(pipelined_writes_do_not_overtake) {
    _Alignas(8) uint8_t desc[64];
    for (uint32_t round = 0; round < 50; round++) {
        const float *out[4];
        inlet_reset(&client);
        ck_assert(inlet_submit(&client, LK_OP_TABLES, desc,
                               tables_desc(desc, 1, (uint32_t[]){5, 6}, 2, B + 4), 0));
        for (uint32_t i = 0; i < 4; i++) {
            inlet_step(&step);
            add_write(0, 5 * B, ids + 100 * i, 2 * B);
            ck_assert(inlet_submit(&client, LK_OP_WRITE, &step, inlet_step_bytes(&step), 0));
            inlet_step(&step);
            step.step.dense_below = UINT32_MAX;
            out[i] = add_attend(0, 1, 1);
            ck_assert(inlet_submit(&client, LK_OP_ATTEND_TABLE, &step, inlet_step_bytes(&step), 0));
        }
        for (uint32_t i = 0; i < 9; i++)
            inlet_must(inlet_wait(&client));
        for (uint32_t i = 0; i < 4; i++)
            ck_assert(agrees(0, 0, out[i], ids + 100 * i, B + 4));
    }
}
END_TEST

/* A set is replaced while rows that use it are queued. */
START_TEST(a_table_in_use_stays) {
    _Alignas(8) uint8_t desc[64];
    const float *out[6];
    inlet_must(put(0, 0, ids, 4 * B));
    for (uint32_t i = 0; i < 6; i++) {
        uint32_t page = i % 4;
        ck_assert(inlet_submit(&client, LK_OP_TABLES, desc, tables_desc(desc, 0, &page, 1, 9), 0));
        inlet_step(&step);
        out[i] = add_attend(0, 0, 1);
        ck_assert(inlet_submit(&client, LK_OP_ATTEND_TABLE, &step, inlet_step_bytes(&step), 0));
    }
    for (uint32_t i = 0; i < 12; i++)
        inlet_must(inlet_wait(&client));
    for (uint32_t i = 0; i < 6; i++)
        ck_assert(agrees(0, 0, out[i], ids + i % 4 * B, 9));
}
END_TEST

/* ---- lists ---- */

START_TEST(copies_run_in_order) {
    inlet_must(put(0, 0, ids, 2 * B));
    inlet_must(put(1, 0, ids + 500, 7));
    /* 1 -> 9, 9 -> 10, then 0 over 9: as if one after the other. */
    inlet_must(list(LK_OP_COPY_PAGES, (uint32_t[]){1, 9, 9, 10, 0, 11}, 3, 2));
    inlet_must(list(LK_OP_COPY_PAGES, (uint32_t[]){0, 9}, 1, 2));
    inlet_must(set_table(0, (uint32_t[]){9, 10}, 2, 2 * B));
    attends(0, 0, ids, 2 * B);
    inlet_must(set_table(0, (uint32_t[]){11}, 1, 7));
    attends(1, 0, ids + 500, 7); /* a part of a page, at the other layer */
    inlet_refused(list(LK_OP_COPY_PAGES, (uint32_t[]){1, 20, 3, 3}, 2, 2), LK_REASON_COPY_SELF, 3,
                  0, LK_ROW_WHOLE);
    inlet_refused(list(LK_OP_COPY_PAGES, (uint32_t[]){1, 20, 0, 20}, 2, 2), LK_REASON_COPY_SELF, 20,
                  0, LK_ROW_WHOLE);
    inlet_refused(list(LK_OP_COPY_PAGES, (uint32_t[]){1, PAGES}, 1, 2), LK_REASON_TABLE_PAGE, PAGES,
                  PAGES, LK_ROW_WHOLE);
    inlet_must(set_table(0, (uint32_t[]){20}, 1, 1));
    inlet_refused(try_attend(0, 0), LK_REASON_TABLE_GAP, 20, 0,
                  0); /* refused ones copied nothing */
}
END_TEST

START_TEST(invalidated_pages_are_empty) {
    inlet_must(put(0, 0, ids, 2 * B));
    inlet_must(set_table(0, (uint32_t[]){0, 1}, 2, B + 1));
    inlet_must(list(LK_OP_INVALIDATE, (uint32_t[]){0}, 1, 1));
    inlet_refused(try_attend(0, 0), LK_REASON_TABLE_UNSEALED, 0, 0, 0);
    inlet_refused(put(0, 3, ids, 1), LK_REASON_SLOT_GAP, 3, 0, 0);
    inlet_refused(list(LK_OP_INVALIDATE, (uint32_t[]){2, PAGES}, 2, 1), LK_REASON_TABLE_PAGE, PAGES,
                  PAGES, LK_ROW_WHOLE);
    inlet_must(put(0, 0, ids, B));
    attends(0, 0, ids, B + 1);
}
END_TEST

/* ---- superpages ---- */

/* A tree scan of one query, as bytes to compare. */
struct tree {
    float out[4 * 64];
    struct lk_page_entry list[2][64];
};
static struct tree tree_scan(uint16_t op, struct lk_row_desc *row) {
    struct tree ret = {0};
    float *out = inlet_give_q(&client, row, QUERY);
    struct lk_page_entry *at = inlet_alloc(&client, sizeof(ret.list));
    memset(at, 0, sizeof(ret.list));
    row->list = inlet_offset(&client, at);
    row->list_pages = 64;
    step.step.budget = 3 * B; /* expands 12 superpages of 14 */
    step.step.scan = LK_SCAN_TREE;
    inlet_must(inlet_do(&client, op, &step, inlet_step_bytes(&step)));
    memcpy(ret.out, out, sizeof(ret.out));
    memcpy(ret.list, at, sizeof(ret.list));
    return ret;
}

static struct tree tree_of_table(void) {
    inlet_step(&step);
    return tree_scan(LK_OP_ATTEND_TABLE, inlet_row(&step, lease, 0, 0, 1));
}

/* Whether the lease's page 17 and its superpage have the bytes that they have in a sequence. */
static void summarised_as(uint64_t sequence, bool expected) {
    const struct lk_pool_view *v = &inlet.intake->pool[0].view;
    uint32_t a = inlet.intake->lease[0].table[4];
    uint32_t b = inlet.intake->sequence[(uint32_t)sequence - 1].table[4];
    bool same = true;
    inlet_check_idle(&inlet);
    if (inlet_skips(&inlet, "bytes of summaries", "its pool cannot be read"))
        return;
    for (uint32_t h = 0; h < v->geometry.kv_heads; h++) {
        same &=
            !memcmp(lk_quad_super(v, 0, a, h), lk_quad_super(v, 0, b, h), v->layout.super_bytes);
        same &= !memcmp(lk_page_coarse(v, 0, a * 4 + 1, h), lk_page_coarse(v, 0, b * 4 + 1, h),
                        v->layout.coarse_bytes);
    }
    ck_assert_int_eq(same, expected);
}

START_TEST(aligned_fours_have_superpages) {
    uint32_t length = 14 * 4 * B + 5, pages[PAGES];
    uint64_t sequence = inlet_create(&client);
    inlet_append(&client, sequence, 0, 0, ids, length);
    inlet_step(&step);
    struct tree other = tree_scan(LK_OP_ATTEND, inlet_row(&step, sequence, 0, length, 1));
    inlet_must(put(0, 0, ids, length));
    for (uint32_t i = 0; i < PAGES; i++)
        pages[i] = i;
    inlet_must(set_table(0, pages, length / B + 1, length));
    struct tree mine = tree_of_table();
    ck_assert_mem_eq(&mine, &other, sizeof(mine));
    summarised_as(sequence, true);

    /* A page rewritten, then copied back from elsewhere: its superpage is new, and right. */
    inlet_reset(&client);
    inlet_must(list(LK_OP_COPY_PAGES, (uint32_t[]){17, 60}, 1, 2));
    inlet_must(put(0, 17 * B, ids + 3000, B));
    summarised_as(sequence, false);
    inlet_must(list(LK_OP_COPY_PAGES, (uint32_t[]){60, 17}, 1, 2));
    summarised_as(sequence, true);

    /* Reopened with other tokens, and sealed with the right ones in two writes. */
    inlet_must(put(0, 17 * B, ids + 3000, 3));
    inlet_must(put(0, 17 * B, ids + 17 * B, 3));
    inlet_must(put(0, 17 * B + 3, ids + 17 * B + 3, B - 3));
    summarised_as(sequence, true);
    mine = tree_of_table();
    ck_assert_mem_eq(&mine, &other, sizeof(mine));
}
END_TEST

START_TEST(leases_come_and_go) {
    struct lk_object_desc desc = {.handle = lease};
    uint64_t other = inlet_lease(&client, 5);
    ck_assert_uint_eq(inlet_status(&inlet).pool[0].pages_leased, PAGES + 5);
    ck_assert_uint_eq(inlet_status(&inlet).pool[0].pages_used, PAGES + 8);
    ck_assert_uint_eq(inlet_status(&inlet).pool[0].pages_free, 512 - PAGES - 8);
    inlet_must(put(0, 0, ids, B));
    inlet_must(inlet_do(&client, LK_OP_LEASE_CLOSE, &desc, sizeof(desc)));
    inlet_refused(put(0, 0, ids, 1), LK_REASON_HANDLE_STALE, lease, lease + (UINT64_C(1) << 32), 0);
    lease = inlet_lease(&client, PAGES); /* the same pages: empty again */
    inlet_refused(put(0, 1, ids, 1), LK_REASON_SLOT_GAP, 1, 0, 0);
    desc.handle = other;
    inlet_must(inlet_do(&client, LK_OP_LEASE_CLOSE, &desc, sizeof(desc)));
    inlet_refused(inlet_object(&client, LK_OP_LEASE_OPEN, 0, 1000), LK_REASON_PAGES_FREE, 1000,
                  512 - PAGES, LK_ROW_WHOLE);
    inlet_refused(inlet_object(&client, LK_OP_LEASE_OPEN, 0, UINT64_MAX), LK_REASON_PAGES_FREE,
                  UINT64_MAX, 512 - PAGES, LK_ROW_WHOLE);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("lease");
    TCase *tcase = tcase_create("all");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, no_address_space_is_said);
    tcase_add_test(tcase, a_lease_of_scattered_pages_is_empty);
    tcase_add_test(tcase, writes_leave_no_gap);
    tcase_add_test(tcase, a_refused_write_changes_nothing);
    tcase_add_test(tcase, rows_of_a_write_follow_each_other);
    tcase_add_test(tcase, padding_is_skipped);
    tcase_add_test(tcase, tables_need_full_pages);
    tcase_add_test(tcase, tables_are_checked);
    tcase_add_test(tcase, a_refused_set_leaves_the_old_one);
    tcase_add_test(tcase, a_table_that_memory_lacks_is_refused);
    tcase_add_test(tcase, pipelined_writes_do_not_overtake);
    tcase_add_test(tcase, a_table_in_use_stays);
    tcase_add_test(tcase, copies_run_in_order);
    tcase_add_test(tcase, invalidated_pages_are_empty);
    tcase_add_test(tcase, aligned_fours_have_superpages);
    tcase_add_test(tcase, leases_come_and_go);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
