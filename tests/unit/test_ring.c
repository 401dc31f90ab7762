/* SPDX-License-Identifier: MIT */
/*
 * test_ring.c - the rings: wrap-around, back-pressure, lies, and the wake-up that must not be lost.
 *
 * The last part compiles ring.c a second time with its full barriers taken out (names bare_*), to
 * show that the test of the hand-shake can fail: without the barrier a wake-up is lost within
 * milliseconds.
 */
#include <check.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../common/run.h"
#include "../../shm_protocol/atomics.h"
#include "../../shm_protocol/ring.h"
#include "../../shm_protocol/segment.h"

#define lk_ring_start            bare_start
#define lk_bell_create           bare_bell_create
#define lk_bell_ring             bare_bell_ring
#define lk_bell_drain            bare_bell_drain
#define lk_ring_client_init      bare_client_init
#define lk_ring_client_reserve   bare_client_reserve
#define lk_ring_client_publish   bare_client_publish
#define lk_ring_client_must_wake bare_client_must_wake
#define lk_ring_client_peek      bare_client_peek
#define lk_ring_client_advance   bare_client_advance
#define lk_ring_client_arm       bare_client_arm
#define lk_ring_client_disarm    bare_client_disarm
#define lk_ring_client_in_flight bare_client_in_flight
#define lk_ring_daemon_init      bare_daemon_init
#define lk_ring_daemon_peek      bare_daemon_peek
#define lk_ring_daemon_copy_sqe  bare_daemon_copy_sqe
#define lk_ring_daemon_copy_desc bare_daemon_copy_desc
#define lk_ring_daemon_release   bare_daemon_release
#define lk_ring_daemon_publish   bare_daemon_publish
#define lk_ring_daemon_must_wake bare_daemon_must_wake
#define lk_ring_daemon_arm       bare_daemon_arm
#define lk_ring_daemon_disarm    bare_daemon_disarm
#define lk_full_barrier()        __asm__ __volatile__("" ::: "memory")
void bare_client_disarm(struct lk_ring_client *ring); /* used before it is defined */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-prototypes"
#include "../../shm_protocol/ring.c" /* NOLINT(bugprone-suspicious-include): a second one */
#pragma GCC diagnostic pop
#undef lk_ring_start
#undef lk_bell_create
#undef lk_bell_ring
#undef lk_bell_drain
#undef lk_ring_client_init
#undef lk_ring_client_reserve
#undef lk_ring_client_publish
#undef lk_ring_client_must_wake
#undef lk_ring_client_peek
#undef lk_ring_client_advance
#undef lk_ring_client_arm
#undef lk_ring_client_disarm
#undef lk_ring_client_in_flight
#undef lk_ring_daemon_init
#undef lk_ring_daemon_peek
#undef lk_ring_daemon_copy_sqe
#undef lk_ring_daemon_copy_desc
#undef lk_ring_daemon_release
#undef lk_ring_daemon_publish
#undef lk_ring_daemon_must_wake
#undef lk_ring_daemon_arm
#undef lk_ring_daemon_disarm
#undef lk_full_barrier

#define ENTRIES 8

static const uint64_t starts[] = {0, (UINT64_C(1) << 32) - 3, (UINT64_C(1) << 63) - 3};
#define STARTS (int)(sizeof(starts) / sizeof(starts[0]))

/* Both sides over one mapping, as two processes would have them. */
struct pair {
    struct lk_channel_memory memory;
    struct lk_ring_client client;
    struct lk_ring_daemon daemon;
};

static void open_pair(struct pair *p, uint64_t start) {
    char why[LK_REASON_BYTES] = "";
    int r = lk_channel_memory_create(ENTRIES, 4096, 1, start, NULL, &p->memory, why, sizeof(why));
    ck_assert_msg(r == 0, "%s", why);
    lk_ring_client_init(&p->client, p->memory.submission, p->memory.completion, &p->memory.sizes);
    lk_ring_daemon_init(&p->daemon, p->memory.submission, p->memory.completion, ENTRIES,
                        p->memory.sizes.cq_entries, p->memory.sizes.submission_bytes);
}

static void close_pair(struct pair *p) {
    lk_channel_memory_destroy(&p->memory);
}

static int submit(struct pair *p, uint64_t number, uint32_t bytes) {
    struct lk_sqe *sqe;
    uint8_t *desc;
    int r = lk_ring_client_reserve(&p->client, bytes, &sqe, (void **)&desc);
    if (r)
        return r;
    sqe->op = LK_OP_BARRIER;
    sqe->user_data = number;
    if (bytes)
        memset(desc, (int)(number & 0xff), bytes);
    lk_ring_client_publish(&p->client);
    return 0;
}

/* Check writes a mark for every assertion it passes; in the loops below only failures may cost
 * anything. */
#define must(condition)                                                                            \
    do {                                                                                           \
        if (!(condition))                                                                          \
            ck_abort_msg("%s", #condition);                                                        \
    } while (0)

/* Takes one, checks number, size and every byte of the descriptor, answers. -> false: none to
 * take. */
static bool serve(struct pair *p, uint64_t number, uint32_t bytes) {
    uint8_t desc[LK_DESCRIPTOR_BYTES_MAX], expected[LK_DESCRIPTOR_BYTES_MAX];
    uint32_t count;
    struct lk_sqe sqe;
    must(lk_ring_daemon_peek(&p->daemon, &count) == 0);
    if (!count)
        return false;
    lk_ring_daemon_copy_sqe(&p->daemon, 0, &sqe);
    must(sqe.user_data == number);
    must(sqe.desc_bytes == bytes);
    lk_ring_daemon_copy_desc(&p->daemon, &sqe, desc);
    memset(expected, (int)(number & 0xff), bytes);
    must(memcmp(desc, expected, bytes) == 0);
    lk_ring_daemon_release(&p->daemon, 1);
    lk_ring_daemon_publish(&p->daemon, &(struct lk_cqe){.user_data = number});
    return true;
}

static bool collect(struct pair *p, uint64_t number) {
    const struct lk_cqe *cqe = lk_ring_client_peek(&p->client);
    if (!cqe)
        return false;
    must(cqe->user_data == number);
    must(lk_ring_client_peek(&p->client) == cqe);
    if (lk_ring_client_advance(&p->client) && lk_ring_client_must_wake(&p->client))
        lk_bell_ring(p->memory.client_fds[LK_FD_BELL]);
    return true;
}

START_TEST(indices_wrap) {
    struct pair p;
    open_pair(&p, starts[_i]);
    for (uint64_t n = 0; n < 5 * ENTRIES; n++) {
        ck_assert_int_eq(submit(&p, n, 64), 0);
        ck_assert_uint_eq(lk_ring_client_in_flight(&p.client), 1);
        ck_assert(serve(&p, n, 64));
        ck_assert(!serve(&p, n, 64));
        ck_assert(collect(&p, n));
        ck_assert(!collect(&p, n));
    }
    ck_assert_uint_eq(p.memory.submission->sq_tail, starts[_i] + 5 * ENTRIES);
    ck_assert_uint_eq(p.memory.completion->cq_tail, starts[_i] + 5 * ENTRIES);
    close_pair(&p);
}
END_TEST

/* Where a client writes follows from what was agreed on, whatever the daemon's memory says then. */
START_TEST(heads_that_change) {
    struct pair p;
    open_pair(&p, 0);
    struct lk_completion_head *head = p.memory.completion;
    head->sq_offset = head->desc_offset = head->cq_offset = UINT64_C(1) << 40;
    head->sq_entries = head->cq_entries = UINT32_C(1) << 31;
    lk_ring_client_init(&p.client, p.memory.submission, p.memory.completion, &p.memory.sizes);
    for (uint64_t n = 0; n < 5 * ENTRIES; n++) {
        ck_assert_int_eq(submit(&p, n, 64), 0);
        ck_assert(serve(&p, n, 64));
        ck_assert(collect(&p, n));
    }
    close_pair(&p);
}
END_TEST

START_TEST(full_ring_is_back_pressure) {
    struct pair p;
    open_pair(&p, starts[_i]);
    for (uint64_t n = 0; n < ENTRIES; n++)
        ck_assert_int_eq(submit(&p, n, 0), 0);
    ck_assert_int_eq(submit(&p, ENTRIES, 0), -EAGAIN);
    ck_assert_int_eq(submit(&p, ENTRIES, 0), -EAGAIN);
    ck_assert(serve(&p, 0, 0));
    ck_assert_int_eq(submit(&p, ENTRIES, 0), 0);
    ck_assert_int_eq(submit(&p, ENTRIES + 1, 0), -EAGAIN);
    for (uint64_t n = 1; n <= ENTRIES; n++)
        ck_assert(serve(&p, n, 0));
    for (uint64_t n = 0; n <= ENTRIES; n++)
        ck_assert(collect(&p, n));
    close_pair(&p);
}
END_TEST

START_TEST(full_descriptor_area_is_back_pressure) {
    struct pair p;
    open_pair(&p, starts[_i]);
    struct lk_sqe *sqe;
    void *desc;
    ck_assert_int_eq(lk_ring_client_reserve(&p.client, LK_DESCRIPTOR_BYTES_MAX + 1, &sqe, &desc),
                     -EMSGSIZE);
    ck_assert_int_eq(submit(&p, 0, LK_DESCRIPTOR_BYTES_MAX), 0);
    ck_assert_int_eq(submit(&p, 1, LK_DESCRIPTOR_BYTES_MAX), 0);
    ck_assert_int_eq(submit(&p, 2, 8), -EAGAIN);
    ck_assert(serve(&p, 0, LK_DESCRIPTOR_BYTES_MAX));
    ck_assert_int_eq(submit(&p, 2, 8), 0);
    ck_assert_int_eq(submit(&p, 3, LK_DESCRIPTOR_BYTES_MAX), -EAGAIN);
    ck_assert(serve(&p, 1, LK_DESCRIPTOR_BYTES_MAX));
    ck_assert(serve(&p, 2, 8));
    ck_assert_int_eq(submit(&p, 3, LK_DESCRIPTOR_BYTES_MAX), 0);
    ck_assert(serve(&p, 3, LK_DESCRIPTOR_BYTES_MAX));
    close_pair(&p);
}
END_TEST

/* Random sizes and turns against a plain queue: bytes of a waiting descriptor are never written
 * over. */
START_TEST(random_turns) {
    struct pair p;
    uint32_t sizes[1024] = {0}, seed = 7 + (uint32_t)_i;
    uint64_t sent = 0, served = 0, collected = 0;
    open_pair(&p, starts[_i]);
    while (collected < 20000) {
        seed = seed * 1664525 + 1013904223;
        uint32_t turn = seed >> 30, bytes = (seed >> 8) % (seed & 64 ? 20000 : 300);
        if (turn <= 1) {
            sizes[sent % 1024] = bytes;
            sent += submit(&p, sent, bytes) == 0;
        } else if (turn == 2) {
            served += serve(&p, served, sizes[served % 1024]);
        } else {
            collected += collect(&p, collected);
        }
        must(sent - served <= ENTRIES);
        must(served - collected <= p.memory.sizes.cq_entries);
    }
    close_pair(&p);
}
END_TEST

/* A client that submits and never reads: taken up to the room for completions, none is lost. */
START_TEST(completions_are_never_dropped) {
    struct pair p;
    open_pair(&p, starts[_i]);
    uint32_t room = p.memory.sizes.cq_entries, count;
    uint64_t sent = 0, served = 0;
    for (int turn = 0; turn < 100; turn++) {
        while (submit(&p, sent, 16) == 0)
            sent++;
        while (serve(&p, served, 16))
            served++;
    }
    ck_assert_uint_eq(served, room);
    ck_assert_uint_eq(sent, room + ENTRIES);
    ck_assert(!lk_ring_daemon_arm(&p.daemon)); /* nothing it could do: it may sleep */
    ck_assert_ptr_nonnull(lk_ring_client_peek(&p.client));
    ck_assert(lk_ring_client_advance(&p.client)); /* it may wait for this room */
    ck_assert(lk_ring_client_must_wake(&p.client));
    lk_ring_daemon_disarm(&p.daemon);
    ck_assert(!lk_ring_client_must_wake(&p.client));
    ck_assert_int_eq(lk_ring_daemon_peek(&p.daemon, &count), 0);
    ck_assert_uint_eq(count, 1);
    for (uint64_t n = 1; n < sent; n++) {
        if (served < sent && serve(&p, served, 16))
            served++;
        ck_assert(collect(&p, n));
    }
    ck_assert_uint_eq(served, sent);
    close_pair(&p);
}
END_TEST

START_TEST(lies_are_found) {
    struct pair p;
    uint32_t count;
    uint64_t s = starts[_i];
    open_pair(&p, s);
    struct lk_submission_head *head = p.memory.submission;
    head->sq_tail = s + ENTRIES + 1; /* more than the ring holds */
    ck_assert_int_eq(lk_ring_daemon_peek(&p.daemon, &count), -EPROTO);
    ck_assert(lk_ring_daemon_arm(&p.daemon)); /* a lie is something to do */
    head->sq_tail = s - 1;
    ck_assert_int_eq(lk_ring_daemon_peek(&p.daemon, &count), -EPROTO);
    head->sq_tail = s + 3;
    ck_assert_int_eq(lk_ring_daemon_peek(&p.daemon, &count), 0);
    ck_assert_uint_eq(count, 3);
    head->sq_tail = s + 2; /* backwards */
    ck_assert_int_eq(lk_ring_daemon_peek(&p.daemon, &count), -EPROTO);
    close_pair(&p);

    open_pair(&p, s);
    for (uint64_t n = 0; n < p.memory.sizes.cq_entries; n++) {
        ck_assert_int_eq(submit(&p, n, 0), 0);
        ck_assert(serve(&p, n, 0));
    }
    head = p.memory.submission;
    ck_assert_int_eq(submit(&p, 99, 0), 0);
    head->cq_head = s + p.memory.sizes.cq_entries + 1; /* read what was never written */
    ck_assert_int_eq(lk_ring_daemon_peek(&p.daemon, &count), -EPROTO);
    head->cq_head = s - 1;
    ck_assert_int_eq(lk_ring_daemon_peek(&p.daemon, &count), -EPROTO);
    head->cq_head = s + 2;
    ck_assert_int_eq(lk_ring_daemon_peek(&p.daemon, &count), 0);
    ck_assert_uint_eq(count, 1);
    close_pair(&p);
}
END_TEST

START_TEST(bell_never_blocks) {
    int bell[2];
    ck_assert_int_eq(lk_bell_create(bell), 0);
    for (int i = 0; i < 100000; i++) /* far more than the socket holds */
        lk_bell_ring(bell[0]);
    int drained = 0;
    struct pollfd fd = {.fd = bell[1], .events = POLLIN};
    while (poll(&fd, 1, 0) == 1 && drained++ < 100000)
        ck_assert(lk_bell_drain(bell[1]));
    ck_assert_int_gt(drained, 0);
    ck_assert(lk_bell_drain(bell[1])); /* empty is not hung up */
    close(bell[0]);
    ck_assert(!lk_bell_drain(bell[1]));
    lk_bell_ring(bell[1]); /* nobody there: no signal */
    close(bell[1]);
}
END_TEST

/* ---- two threads ---- */

#define TRAFFIC 100000

static bool look_again(struct pair *p) {
    struct pollfd fd = {.fd = p->memory.bell, .events = POLLIN};
    bool slept_long = poll(&fd, 1, 30000) == 0;
    lk_bell_drain(p->memory.bell);
    return !slept_long;
}

/* Sleeps whenever it can, so that every wake-up matters. */
static void *traffic_daemon(void *arg) {
    struct pair *p = arg;
    uint64_t served = 0;
    while (served < TRAFFIC) {
        if (serve(p, served, 24)) {
            served++;
            if (lk_ring_daemon_must_wake(&p->daemon))
                lk_bell_ring(p->memory.bell);
            continue;
        }
        if (!lk_ring_daemon_arm(&p->daemon) && !look_again(p))
            return "a wake-up of the daemon was lost";
        lk_ring_daemon_disarm(&p->daemon);
    }
    return NULL;
}

START_TEST(traffic_between_threads) {
    struct pair p;
    struct pollfd fd;
    pthread_t thread;
    uint64_t sent = 0, collected = 0;
    void *complaint;
    open_pair(&p, starts[_i]);
    int bell = p.memory.client_fds[LK_FD_BELL];
    ck_assert_int_eq(pthread_create(&thread, NULL, traffic_daemon, &p), 0);
    while (collected < TRAFFIC) {
        while (sent < TRAFFIC && submit(&p, sent, 24) == 0) {
            sent++;
            if (lk_ring_client_must_wake(&p.client))
                lk_bell_ring(bell);
        }
        while (collect(&p, collected))
            collected++;
        if (collected == sent || lk_ring_client_arm(&p.client))
            continue;
        fd = (struct pollfd){.fd = bell, .events = POLLIN};
        ck_assert_msg(poll(&fd, 1, 30000) == 1, "a wake-up of the client was lost");
        lk_bell_drain(bell);
        lk_ring_client_disarm(&p.client);
    }
    pthread_join(thread, &complaint);
    ck_assert_msg(!complaint, "%s", (const char *)complaint);
    close_pair(&p);
}
END_TEST

/* ---- the barrier ----
 *
 * Client publishes and asks whether the daemon sleeps, while the daemon says that it sleeps and
 * looks for work, over and over at the same moment. If neither sees the other, the daemon would
 * sleep with work in the ring.
 */

struct handshake {
    void (*publish)(struct lk_ring_client *);
    bool (*must_wake)(const struct lk_ring_client *);
    bool (*arm)(struct lk_ring_daemon *);
};

static const struct handshake with_barrier = {lk_ring_client_publish, lk_ring_client_must_wake,
                                              lk_ring_daemon_arm};

struct duel {
    struct pair pair;
    const struct handshake *shake;
    uint64_t client_at __attribute__((aligned(64)));
    uint64_t daemon_at __attribute__((aligned(64)));
    uint32_t stop, armed;
    uint64_t rounds, lost;
};

/* Both arrive, both go. */
static bool meet(uint64_t *mine, const uint64_t *theirs, const uint32_t *stop) {
    uint64_t now = lk_load_relaxed64(mine) + 1;
    lk_store_release64(mine, now);
    while (lk_load_acquire64(theirs) < now) {
        if (lk_load_relaxed32(stop))
            return false;
        lk_pause();
    }
    return true;
}

static void *duel_daemon(void *arg) {
    struct duel *d = arg;
    for (uint64_t n = 0; meet(&d->daemon_at, &d->client_at, &d->stop); n++) {
        d->armed = d->shake->arm(&d->pair.daemon);
        if (!meet(&d->daemon_at, &d->client_at, &d->stop))
            break;
        lk_ring_daemon_disarm(&d->pair.daemon);
        serve(&d->pair, n, 0);
    }
    return NULL;
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void duel_client(struct duel *d, double span, bool until_lost) {
    struct lk_sqe *sqe;
    void *desc;
    double end = seconds() + span;
    while (seconds() < end && !(until_lost && d->lost)) {
        must(lk_ring_client_reserve(&d->pair.client, 0, &sqe, &desc) == 0);
        sqe->user_data = d->rounds;
        meet(&d->client_at, &d->daemon_at, &d->stop);
        d->shake->publish(&d->pair.client);
        bool woken = d->shake->must_wake(&d->pair.client);
        meet(&d->client_at, &d->daemon_at, &d->stop);
        d->lost += !woken && !d->armed;
        while (!collect(&d->pair, d->rounds))
            lk_pause();
        d->rounds++;
    }
}

/* Pins the thread to the n-th processor this process may use. false: there is none. */
static bool pin(pthread_t thread, int n) {
    cpu_set_t all, one;
    sched_getaffinity(0, sizeof(all), &all);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &all) || n-- > 0)
            continue;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        return pthread_setaffinity_np(thread, sizeof(one), &one) == 0;
    }
    return false;
}

/* -> false: there are no two processors to race on. */
static bool duel(const struct handshake *shake, double span, bool until_lost, uint64_t *ret_rounds,
                 uint64_t *ret_lost) {
    struct duel d = {.shake = shake};
    pthread_t thread;
    cpu_set_t before;
    sched_getaffinity(0, sizeof(before), &before);
    open_pair(&d.pair, 0);
    ck_assert_int_eq(pthread_create(&thread, NULL, duel_daemon, &d), 0);
    bool two = pin(thread, 1) && pin(pthread_self(), 0);
    if (two)
        duel_client(&d, span, until_lost);
    lk_store_relaxed32(&d.stop, 1);
    pthread_join(thread, NULL);
    sched_setaffinity(0, sizeof(before), &before);
    close_pair(&d.pair);
    *ret_rounds = d.rounds;
    *ret_lost = d.lost;
    return two;
}

START_TEST(with_the_barrier_no_wake_up_is_lost) {
    uint64_t rounds, lost;
    if (duel(&with_barrier, 2.0, false, &rounds, &lost))
        ck_assert_msg(lost == 0, "%ju of %ju wake-ups were lost", (uintmax_t)lost,
                      (uintmax_t)rounds);
}
END_TEST

#ifndef __SANITIZE_THREAD__ /* its instrumentation fences by itself */
static const struct handshake without_barrier = {bare_client_publish, bare_client_must_wake,
                                                 bare_daemon_arm};

START_TEST(without_the_barrier_a_wake_up_is_lost) {
    uint64_t rounds, lost;
    if (duel(&without_barrier, 60.0, true, &rounds, &lost))
        ck_assert_msg(lost > 0, "no wake-up was lost in %ju rounds: this test shows nothing",
                      (uintmax_t)rounds);
}
END_TEST
#endif

int main(void) {
    Suite *suite = suite_create("ring");
    TCase *one = tcase_create("one thread"), *two = tcase_create("two threads");
    tcase_add_loop_test(one, indices_wrap, 0, STARTS);
    tcase_add_test(one, heads_that_change);
    tcase_add_loop_test(one, full_ring_is_back_pressure, 0, STARTS);
    tcase_add_loop_test(one, full_descriptor_area_is_back_pressure, 0, STARTS);
    tcase_add_loop_test(one, random_turns, 0, STARTS);
    tcase_add_loop_test(one, completions_are_never_dropped, 0, STARTS);
    tcase_add_loop_test(one, lies_are_found, 0, STARTS);
    tcase_add_test(one, bell_never_blocks);
    tcase_set_timeout(two, 120);
    tcase_add_loop_test(two, traffic_between_threads, 0, STARTS);
    tcase_add_test(two, with_the_barrier_no_wake_up_is_lost);
#ifndef __SANITIZE_THREAD__
    tcase_add_test(two, without_the_barrier_a_wake_up_is_lost);
#endif
    suite_add_tcase(suite, one);
    suite_add_tcase(suite, two);
    return run_suite(suite);
}
