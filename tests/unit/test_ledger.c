/* SPDX-License-Identifier: MIT */
/*
 * test_ledger.c - layout and audit of the ledger: each thing that may be wrong is found.
 */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

#include "../common/run.h"
#include "../../daemon/ledger.h"

static struct lk_ledger ledger;
static struct lk_ledger_view view;
static char why[512];

static void open_ledger(void) {
    static const struct lk_ledger_shape shapes[2] = {{.layers = 1,
                                                      .page_tokens = 8,
                                                      .pages = 4,
                                                      .max_sequences = 1,
                                                      .table_quads = 1,
                                                      .max_leases = 1},
                                                     {.layers = 2,
                                                      .page_tokens = 16,
                                                      .pages = 256,
                                                      .max_sequences = 5,
                                                      .table_quads = 20,
                                                      .max_leases = 3}};
    ck_assert_int_eq(lk_ledger_open(shapes, 2, 77, &ledger, why, sizeof(why)), 0);
    view = lk_ledger_view(&ledger, 1);
}

static void close_ledger(void) {
    lk_ledger_close(&ledger);
}

/* Sequence 0 with quads 3, 4, 5 and lengths 130, 64; the second layer's pages are summarised. */
static void put_sequence(uint32_t index, uint32_t first) {
    uint32_t *table = view.tables + index * 20;
    for (uint32_t i = 0; i < 3; i++) {
        table[i] = first + i;
        view.quads[first + i].references++;
    }
    view.lengths[index * 2] = 130;
    view.lengths[index * 2 + 1] = 64;
    view.sequences[index].quads = 3;
    lk_ledger_set_live(&view.sequences[index].state);
}

static void put_summaries(uint32_t first) {
    for (uint32_t i = 0; i < 8; i++)
        view.marks[first * 4 + i] = 16;
    memset(view.marks + 256 + first * 4, 16, 4);
    view.supers[first] = view.supers[first + 1] = view.supers[64 + first] = 1;
}

static void put_lease(uint32_t index, uint32_t quad) {
    view.lease_tables[index * 64] = quad;
    view.quads[quad].references++;
    view.leases[index].pages = 3;
    view.leases[index].quads = 1;
    lk_ledger_set_live(&view.leases[index].state);
}

static void right(bool idle) {
    ck_assert_msg(lk_ledger_check(&ledger, idle, why, sizeof(why)) == 0, "%s", why);
}

static void wrong(bool idle, const char *words) {
    ck_assert_int_eq(lk_ledger_check(&ledger, idle, why, sizeof(why)), -EINVAL);
    ck_assert_msg(strstr(why, words), "%s", why);
}

START_TEST(fresh_is_right) {
    right(true);
    ck_assert_uint_eq(ledger.head->boot_epoch, 77);
    ck_assert(!lk_ledger_live(view.sequences[0].state));
    ck_assert_uint_eq(lk_ledger_generation(view.sequences[0].state), 1);
}
END_TEST

START_TEST(maps_again_from_its_descriptor) {
    put_sequence(0, 3);
    struct lk_ledger other = {
        .head = mmap(NULL, ledger.head->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ledger.fd, 0),
        .fd = ledger.fd};
    ck_assert_ptr_ne(other.head, MAP_FAILED);
    struct lk_ledger_view again = lk_ledger_view(&other, 1);
    ck_assert_uint_eq(again.tables[2], 5);
    ck_assert_int_eq(lk_ledger_check(&other, false, why, sizeof(why)), 0);
    munmap(other.head, ledger.head->bytes);
    int seals = fcntl(ledger.fd, F_GET_SEALS);
    ck_assert_int_eq(seals, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
}
END_TEST

START_TEST(states_count_generations) {
    uint64_t state = UINT64_C(0xffffffff) << 32 | LK_LEDGER_LIVE;
    lk_ledger_set_free(&state);
    ck_assert_uint_eq(lk_ledger_generation(state), 1); /* 0 is passed over */
    ck_assert(!lk_ledger_live(state));
    lk_ledger_set_live(&state);
    lk_ledger_set_free(&state);
    ck_assert_uint_eq(lk_ledger_generation(state), 2);
}
END_TEST

START_TEST(sequences_are_looked_at) {
    put_sequence(0, 3);
    right(false);
    wrong(true, "complete page 0 is not summarised");
    put_summaries(3);
    right(true);
    view.supers[4] = 0;
    wrong(true, "complete superpage 1 is not summarised");
    view.supers[4] = 1;
    view.lengths[0] = 193;
    wrong(false, "193 tokens in 3 quads");
    view.lengths[0] = 128;
    wrong(true, "holds 3 quads for 128 tokens");
    view.lengths[0] = 130;
    view.tables[1] = 64;
    wrong(false, "names quad 64 of 64");
    view.tables[1] = 3;
    wrong(false, "names quad 3 twice");
    view.tables[1] = 4;
    view.sequences[0].quads = 21;
    wrong(false, "has 21 quads, its table 20");
}
END_TEST

START_TEST(references_are_counted) {
    put_sequence(0, 3);
    put_sequence(1, 5); /* shares quad 5 */
    right(false);
    view.quads[5].references = 1;
    wrong(false, "quad 5 counts 1 references, there are 2");
    view.quads[5].references = 3;
    wrong(false, "quad 5 counts 3 references, there are 2");
    view.quads[5].references = 2;
    view.quads[40].references = 1;
    wrong(false, "quad 40 counts 1 references, there are 0");
}
END_TEST

START_TEST(copies_on_their_way_hold_their_source) {
    put_sequence(0, 3);
    view.quads[4].copy_from = 20;
    wrong(false, "quad 4 is to be entry 0 of sequence 0, which does not name it");
    view.quads[4].copy_index = 1;
    wrong(false, "quad 20 counts 0 references, there are 1");
    view.quads[20].references = 1;
    right(false);
    wrong(true, "not summarised");
    put_summaries(3);
    wrong(true, "quad 4 still waits for its copy of 20");
    view.quads[4].copy_sequence = 5;
    wrong(false, "has a note of quad 20, sequence 5");
}
END_TEST

START_TEST(leases_are_looked_at) {
    put_lease(0, 9);
    right(true);
    put_lease(1, 9);
    wrong(true, "quad 9 is leased twice");
    lk_ledger_set_free(&view.leases[1].state);
    wrong(true, "quad 9 counts 2 references, there are 1");
    view.quads[9].references = 1;
    view.marks[9 * 4 + 1] = 17;
    wrong(true, "a page is marked 17");
    memset(view.marks + 9 * 4, 16, 3);
    view.supers[9] = 1;
    wrong(true, "summarised with 3 full pages");
    view.marks[9 * 4 + 3] = 16;
    right(true);
    view.leases[0].pages = 5;
    wrong(true, "has 5 pages in 1 quads");
    view.leases[0].pages = 3;
    put_sequence(0, 9);
    wrong(false, "quad 9 is leased and has 2 references");
}
END_TEST

START_TEST(another_version_is_none) {
    ledger.head->version++;
    wrong(true, "not a ledger of version");
}
END_TEST

int main(void) {
    Suite *suite = suite_create("ledger");
    TCase *tcase = tcase_create("all");
    tcase_add_checked_fixture(tcase, open_ledger, close_ledger);
    tcase_add_test(tcase, fresh_is_right);
    tcase_add_test(tcase, maps_again_from_its_descriptor);
    tcase_add_test(tcase, states_count_generations);
    tcase_add_test(tcase, sequences_are_looked_at);
    tcase_add_test(tcase, references_are_counted);
    tcase_add_test(tcase, copies_on_their_way_hold_their_source);
    tcase_add_test(tcase, leases_are_looked_at);
    tcase_add_test(tcase, another_version_is_none);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
