/* SPDX-License-Identifier: MIT */
/*
 * test_hostile.c - a client that writes the segments itself and lies wherever it can.
 *
 * An attack runs in a child process, straight on the ring, past the library's checks. Meanwhile a
 * *witness* in this process computes one step over and over: its bits must not change, and hardly a
 * step may be slow; the p99 is printed at the end. Every submission of an attack is answered, once.
 * After each attack the daemon must hold what it held before.
 *
 * $LOCKSD is the daemon (default: ../../locksd from here); $LOCKSD_KILLS,
 * 1000 by default, scales how long attacks last. What it does not do: clients that die at random
 * (test_kill.c).
 */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../../clients/common/private.h"
#include "../../clients/lib/internal.h"
#include "../../shm_protocol/atomics.h"
#include "../common/rig.h"

#define LAYERS     2
#define KV_HEADS   2
#define HEADS      4
#define HEAD_DIM   64
#define PAGE       16
#define ROW_TOKENS 512 /* limits.max_row_tokens */
#define PROMPT     200 /* of the witness */
#define LENGTH     100 /* of an attacker's sequence */
#define LEASE      16  /* pages of an attacker's lease */
#define SEQUENCES  48  /* limits.max_sequences */
#define ARENA      (UINT64_C(1) << 20)
#define SLOW_MS    250 /* of the witness: far above a step, far below a client that holds it up */
#define SLOW_FEW   3   /* steps that may be, whoever is to blame: a machine stands still at times */

static struct lk_private daemon_;

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

/* n of a whole run, fewer where the run is short. */
static unsigned scaled(unsigned n) {
    const char *text = getenv("LOCKSD_KILLS");
    unsigned kills = text ? (unsigned)atoi(text) : 1000;
    return kills < 1000 ? n * (kills < 100 ? 100 : kills) / 1000 : n;
}

/* ---- what the daemon holds ---- */

struct holdings {
    json_int_t clients, sequences, leases, pages[2], leased[2];
};

static json_int_t number(const json_t *object, const char *name) {
    const json_t *value = json_object_get(object, name);
    ck_assert_msg(json_is_integer(value), "the status has no number \"%s\"", name);
    return json_integer_value(value);
}

static struct holdings look(void) {
    char *text, why[512];
    struct holdings h;
    ck_assert_msg(locks_admin(daemon_.socket, "status", &text, why, sizeof(why)) == 0, "%s", why);
    json_t *status = json_loads(text, 0, NULL);
    memset(&h, 0, sizeof(h));
    h.clients = number(status, "clients");
    h.sequences = number(status, "sequences");
    h.leases = number(status, "leases");
    for (size_t i = 0; i < 2; i++) {
        const json_t *pool = json_array_get(json_object_get(status, "pools"), i);
        h.pages[i] = number(pool, "pages_used");
        h.leased[i] = number(pool, "pages_leased");
    }
    free(text);
    json_decref(status);
    return h;
}

static void expect_holdings(const struct holdings *want) {
    struct holdings h;
    for (int i = 0; i < 15000; i++) {
        h = look();
        if (!memcmp(&h, want, sizeof(h)))
            return;
        usleep(2000);
    }
    ck_abort_msg("clients %d (%d before), sequences %d (%d), leases %d (%d), pages %d (%d)",
                 (int)h.clients, (int)want->clients, (int)h.sequences, (int)want->sequences,
                 (int)h.leases, (int)want->leases, (int)h.pages[0], (int)want->pages[0]);
}

/* ---- the witness ---- */

#define TIMES_MAX 200000

static struct {
    struct locks *l;
    locks_handle sequence;
    uint16_t *q, *k, *v;
    float *out, expected[HEADS * HEAD_DIM];
    uint32_t times[TIMES_MAX], count; /* of steps, us */
} witness;

#define NEED(call)                                                                                 \
    do {                                                                                           \
        int need_ = (call);                                                                        \
        ck_assert_msg(need_ == 0, "%s: %d, %s", #call, need_, locks_error(witness.l));             \
    } while (0)

static void witness_step(void) {
    struct locks_step step = {.budget = 96, .sampled = 2};
    struct locks_row row = {.sequence = witness.sequence,
                            .position = PROMPT,
                            .layer = 1,
                            .tokens = 1,
                            .q = witness.q,
                            .k = witness.k,
                            .v = witness.v,
                            .out = witness.out};
    memset(witness.out, 0xff, sizeof(witness.expected));
    uint64_t start = now_us();
    NEED(locks_decode(witness.l, &step, &row, 1));
    if (witness.count < TIMES_MAX)
        witness.times[witness.count++] = (uint32_t)(now_us() - start);
    NEED(locks_sequence_truncate(witness.l, witness.sequence, PROMPT));
}

static void expect_same(void) {
    witness_step();
    ck_assert_msg(!memcmp(witness.out, witness.expected, sizeof(witness.expected)),
                  "another client's results have changed");
}

static int compare(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

struct pace {
    uint32_t steps, slow, p99_us;
};

/* Of the steps since the last call. */
static struct pace take_pace(void) {
    struct pace pace = {.steps = witness.count};
    witness.count = 0;
    qsort(witness.times, pace.steps, sizeof(*witness.times), compare);
    for (uint32_t i = 0; i < pace.steps; i++)
        pace.slow += witness.times[i] > SLOW_MS * 1000;
    if (pace.steps)
        pace.p99_us = witness.times[(uint64_t)pace.steps * 99 / 100];
    return pace;
}

static void fill_bf16(uint16_t *values, size_t count, unsigned *seed) {
    for (size_t i = 0; i < count; i++)
        values[i] = (uint16_t)(0x3f00 + rand_r(seed) % 0x90 + (rand_r(seed) % 2 ? 0x8000 : 0));
}

static void open_witness(void) {
    struct locks_options o = {
        .size = sizeof(o), .socket = daemon_.socket, .name = "witness", .arena_bytes = ARENA};
    size_t values = PROMPT * KV_HEADS * HEAD_DIM;
    unsigned seed = 1;
    ck_assert_msg(locks_connect(&o, &witness.l) == 0, "%s", locks_error(NULL));
    witness.q = locks_alloc(witness.l, 2 * values * sizeof(uint16_t));
    witness.k = locks_alloc(witness.l, values * sizeof(uint16_t));
    witness.v = locks_alloc(witness.l, values * sizeof(uint16_t));
    witness.out = locks_alloc(witness.l, sizeof(witness.expected));
    ck_assert(witness.q && witness.k && witness.v && witness.out);
    fill_bf16(witness.q, values, &seed);
    fill_bf16(witness.k, values, &seed);
    fill_bf16(witness.v, values, &seed);
    NEED(locks_sequence_create(witness.l, 0, &witness.sequence));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        struct locks_row row = {.sequence = witness.sequence,
                                .layer = layer,
                                .tokens = PROMPT,
                                .k = witness.k,
                                .v = witness.v};
        NEED(locks_append(witness.l, &(struct locks_step){0}, &row, 1));
    }
    witness_step();
    memcpy(witness.expected, witness.out, sizeof(witness.expected));
    for (int i = 0; i < 200; i++)
        expect_same();
    printf("witness: p99 %u us alone\n", take_pace().p99_us);
}

/* ---- a raw client, in a child ---- */

/* Where payload lies in the arena. */
enum {
    AT_Q = 0,
    AT_K = 256 << 10,
    AT_V = 384 << 10,
    AT_OUT = 512 << 10,
    AT_LSE = 768 << 10,
    AT_LIST = 800 << 10,
    AT_SLOTS = 832 << 10,
    AT_TABLE = 840 << 10,
    AT_PAIRS = 844 << 10,
    AT_RESULTS = 1000 << 10,
    AT_TIMING = 1016 << 10,
};

struct raw {
    struct locks *l;
    uint8_t *arena;
    uint64_t sent, sequence, lease, tables;
    unsigned seed;
};

__attribute__((format(printf, 1, 2), noreturn)) static void bad(const char *format, ...) {
    va_list list;
    va_start(list, format);
    vfprintf(stderr, format, list);
    va_end(list);
    fputc('\n', stderr);
    _exit(1);
}

static void raw_open(struct raw *r, uint32_t sq_entries) {
    struct locks_options o = {.size = sizeof(o),
                              .socket = daemon_.socket,
                              .name = "hostile",
                              .sq_entries = sq_entries,
                              .arena_bytes = ARENA};
    *r = (struct raw){.seed = 7};
    if (locks_connect(&o, &r->l))
        bad("connect: %s", locks_error(NULL));
    r->arena = r->l->memory.arena;
    for (uint32_t i = 0; i < ARENA / 2; i += 8192)
        fill_bf16((uint16_t *)r->arena + i, 8192, &r->seed);
}

static uint32_t draw(struct raw *r, uint32_t below) {
    return (uint32_t)rand_r(&r->seed) % below;
}

static void ring_bell(struct raw *r) {
    if (lk_ring_client_must_wake(&r->l->ring))
        lk_bell_ring(r->l->memory.bell);
}

/* -> false: the ring is full. */
static bool submit(struct raw *r, uint16_t op, const void *desc, uint32_t bytes) {
    struct lk_sqe *sqe;
    void *to;
    if (lk_ring_client_reserve(&r->l->ring, bytes, &sqe, &to))
        return false;
    sqe->op = op;
    sqe->user_data = r->sent++;
    if (bytes)
        memcpy(to, desc, bytes);
    lk_ring_client_publish(&r->l->ring);
    ring_bell(r);
    return true;
}

/* -> false: none there. */
static bool consume(struct raw *r, struct lk_cqe *ret) {
    const struct lk_cqe *cqe = lk_ring_client_peek(&r->l->ring);
    if (!cqe)
        return false;
    *ret = *cqe;
    if (lk_ring_client_advance(&r->l->ring))
        ring_bell(r);
    return true;
}

static struct lk_cqe await(struct raw *r) {
    struct lk_cqe cqe;
    uint64_t end = now_us() + 60000000;
    while (!consume(r, &cqe)) {
        if (now_us() > end)
            bad("no completion within 60 s");
        sched_yield();
    }
    return cqe;
}

static void await_all(struct raw *r) {
    while (lk_ring_client_in_flight(&r->l->ring))
        await(r);
}

/* Nothing else is in flight. */
static struct lk_cqe call(struct raw *r, uint16_t op, const void *desc, uint32_t bytes) {
    if (!submit(r, op, desc, bytes))
        bad("the ring is full");
    struct lk_cqe cqe = await(r);
    if (cqe.user_data != r->sent - 1)
        bad("completion %d, not %d", (int)cqe.user_data, (int)r->sent - 1);
    return cqe;
}

static struct lk_cqe object(struct raw *r, uint16_t op, uint64_t handle, uint64_t length) {
    struct lk_object_desc desc = {.handle = handle, .length = length};
    return call(r, op, &desc, sizeof(desc));
}

static struct lk_cqe expect_reason(struct lk_cqe cqe, enum lk_reason reason) {
    char text[LK_REASON_BYTES];
    if (cqe.reason != reason)
        bad("op %u: not reason %d but %s", cqe.op, (int)reason,
            lk_reason_text(cqe.reason, cqe.value, cqe.limit, cqe.row, text, sizeof(text)));
    return cqe;
}

/* ---- descriptors as they should be ---- */

struct step {
    struct lk_step_desc head;
    struct lk_row_desc row[LK_ROWS_MAX];
};

static uint32_t step_bytes(const struct step *s) {
    return (uint32_t)(sizeof(s->head) + s->head.rows * sizeof(s->row[0]));
}

static void make_step(struct step *s) {
    s->head = (struct lk_step_desc){.budget = 48,
                                    .sampled = -1,
                                    .sink_pages = 1,
                                    .recent_pages = 1,
                                    .results = LK_NONE,
                                    .timing = LK_NONE};
}

static struct lk_row_desc *add_row(struct step *s, uint64_t handle, uint32_t layer,
                                   uint64_t position, uint32_t tokens) {
    struct lk_row_desc *row = &s->row[s->head.rows++];
    *row = (struct lk_row_desc){.handle = handle,
                                .position = position,
                                .layer = layer,
                                .tokens = tokens,
                                .q = AT_Q,
                                .k = AT_K,
                                .v = AT_V,
                                .out = AT_OUT,
                                .lse = AT_LSE,
                                .list = AT_LIST,
                                .list_pages = 8,
                                .slots = AT_SLOTS};
    return row;
}

static struct lk_cqe one_row(struct raw *r, uint16_t op, uint64_t handle, uint32_t layer,
                             uint64_t position, uint32_t tokens) {
    struct step s;
    make_step(&s);
    add_row(&s, handle, layer, position, tokens);
    return call(r, op, &s, step_bytes(&s));
}

/* A sequence of LENGTH tokens; a lease with as many written, in table 0 of set 0. */
static void restore(struct raw *r) {
    struct {
        struct lk_tables_desc head;
        struct lk_table_desc table;
    } tables = {
        .head = {.rows = 1},
        .table = {.table = AT_TABLE, .length = LENGTH, .pages = (LENGTH + PAGE - 1) / PAGE}};
    object(r, LK_OP_SEQUENCE_FREE, r->sequence, 0);
    object(r, LK_OP_LEASE_CLOSE, r->lease, 0);
    r->sequence = expect_reason(object(r, LK_OP_SEQUENCE_CREATE, 0, 0), LK_REASON_NONE).value;
    r->lease = expect_reason(object(r, LK_OP_LEASE_OPEN, 0, LEASE), LK_REASON_NONE).value;
    for (uint32_t i = 0; i < LENGTH; i++)
        ((int64_t *)(r->arena + AT_SLOTS))[i] = i;
    for (uint32_t i = 0; i < LEASE; i++)
        ((uint32_t *)(r->arena + AT_TABLE))[i] = i;
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        expect_reason(one_row(r, LK_OP_APPEND, r->sequence, layer, 0, LENGTH), LK_REASON_NONE);
        expect_reason(one_row(r, LK_OP_WRITE, r->lease, layer, 0, LENGTH), LK_REASON_NONE);
    }
    tables.head.handle = r->lease;
    expect_reason(call(r, LK_OP_TABLES, &tables, sizeof(tables)), LK_REASON_NONE);
}

/* What would succeed -> bytes. */
static uint32_t template(struct raw *r, uint16_t op, void *ret) {
    bool leases = op >= LK_OP_LEASE_OPEN;
    struct step *s = ret;
    switch (op) {
    case LK_OP_APPEND:
    case LK_OP_DECODE:
    case LK_OP_ATTEND:
    case LK_OP_WRITE:
    case LK_OP_ATTEND_TABLE:
        make_step(s);
        s->head.results = AT_RESULTS;
        s->head.timing = AT_TIMING;
        add_row(s, leases ? r->lease : r->sequence, 1, leases ? 0 : LENGTH, 1);
        return step_bytes(s);
    case LK_OP_TABLES: {
        struct lk_tables_desc tables = {.handle = r->lease, .set = 1, .rows = 1};
        struct lk_table_desc table = {.table = AT_TABLE, .length = 20, .pages = 2};
        memcpy(ret, &tables, sizeof(tables));
        memcpy((uint8_t *)ret + sizeof(tables), &table, sizeof(table));
        return sizeof(tables) + sizeof(table);
    }
    case LK_OP_BARRIER:
        return 0;
    default: {
        struct lk_object_desc o = {
            .handle = leases ? r->lease : r->sequence, .length = 10, .list = AT_PAIRS, .count = 2};
        memcpy(ret, &o, sizeof(o));
        return sizeof(o);
    }
    }
}

/* ---- attacks ---- */

/* The next submission of the template can succeed again. */
static void undo(struct raw *r, uint16_t op, uint64_t value) {
    if (op == LK_OP_SEQUENCE_FORK || op == LK_OP_SEQUENCE_CREATE)
        object(r, LK_OP_SEQUENCE_FREE, value, 0);
    else if (op == LK_OP_LEASE_OPEN)
        object(r, LK_OP_LEASE_CLOSE, value, 0);
    else if (op == LK_OP_APPEND || op == LK_OP_DECODE)
        object(r, LK_OP_SEQUENCE_TRUNCATE, r->sequence, LENGTH);
    else if (op == LK_OP_SEQUENCE_FREE || op == LK_OP_SEQUENCE_TRUNCATE || op == LK_OP_LEASE_CLOSE)
        restore(r);
}

/* Every word of every descriptor at every edge. */
static void at_the_edges(void) {
    static const uint64_t edges[] = {
        0,          1,          2,          15,         16,          17,          63,
        64,         128,        255,        256,        257,         511,         512,
        513,        0xffff,     0x10000,    0x10001,    ARENA - 128, ARENA - 64,  ARENA,
        ARENA + 64, 0x3f800000, 0x7f7fffff, 0x7f800000, 0x7fc00000,  0x80000000,  0xff800000,
        0xffffffff, 0x7fffffff, 0xffffffc0, 1ull << 32, 1ull << 40,  -1ull << 63, -64ull};
    struct raw r;
    raw_open(&r, 8);
    for (uint16_t op = 1; op < LK_OP_COUNT; op++) {
        struct step s;
        restore(&r);
        for (uint32_t width = 4; width <= 8; width += 4)
            for (uint32_t at = 0; at < template(&r, op, &s); at += width)
                for (size_t e = 0; e < sizeof(edges) / sizeof(edges[0]); e++) {
                    uint32_t bytes = template(&r, op, &s);
                    memcpy((uint8_t *)&s + at, &edges[e], at + width > bytes ? 4 : width);
                    struct lk_cqe cqe = call(&r, op, &s, bytes);
                    if (!cqe.status)
                        undo(&r, op, cqe.value);
                }
    }
    locks_close(r.l);
}

/* The same for entries; they lie in the segment until they are taken. */
static void entries(void) {
    struct step s;
    struct raw r;
    raw_open(&r, 8);
    for (unsigned n = 0; n < scaled(20000); n++) {
        struct lk_sqe *sqe;
        void *to;
        uint32_t bytes = template(&r, (uint16_t)(1 + draw(&r, LK_OP_COUNT - 1)), &s);
        if (lk_ring_client_reserve(&r.l->ring, bytes, &sqe, &to))
            bad("the ring is full");
        if (bytes)
            memcpy(to, &s, bytes);
        sqe->op = (uint16_t)draw(&r, LK_OP_COUNT + 2);
        uint32_t word = 2 + draw(&r, 14);
        ((uint32_t *)sqe)[word] = draw(&r, 2) ? draw(&r, 4096) * 8 : draw(&r, 1u << 31) * 2u + 1;
        sqe->user_data = r.sent++;
        lk_ring_client_publish(&r.l->ring);
        ring_bell(&r);
        if (await(&r).user_data != r.sent - 1)
            bad("another's completion");
    }
    locks_close(r.l);
}

static volatile bool flipping;

/* Spoils descriptors, entries, lists, slots, tables and payload while the daemon reads them. */
static void *flip(void *argument) {
    struct raw *r = argument;
    struct lk_ring_client *ring = &r->l->ring;
    unsigned seed = 99;
    while (flipping)
        for (int i = 0; i < 64; i++) {
            uint32_t value = rand_r(&seed) % 2 ? (uint32_t)rand_r(&seed) % 64 : ~0u;
            uint32_t *words = (uint32_t *)ring->desc;
            uint32_t at = (uint32_t)rand_r(&seed) % (ring->desc_bytes / 4);
            if (rand_r(&seed) % 3 == 0)
                words = (uint32_t *)(r->arena + AT_SLOTS), at %= (16 << 10) / 4;
            else if (rand_r(&seed) % 3 == 0) /* all but user_data, which tells answers apart */
                words = (uint32_t *)ring->sq, at = at % ring->sq_entries * 16 + 2 + at % 14;
            else if (rand_r(&seed) % 3 == 0)
                words = (uint32_t *)r->arena, at %= AT_OUT / 4;
            uint32_t before = words[at];
            __atomic_store_n(&words[at], value, __ATOMIC_RELAXED);
            if (rand_r(&seed) % 4)
                __atomic_store_n(&words[at], before, __ATOMIC_RELAXED);
        }
    return NULL;
}

static void changing_hands(void) {
    pthread_t thread;
    struct step s;
    struct raw r;
    raw_open(&r, 16);
    restore(&r);
    flipping = true;
    pthread_create(&thread, NULL, flip, &r);
    for (unsigned n = 0; n < scaled(40000); n++) {
        uint16_t op = (uint16_t)(1 + draw(&r, LK_OP_COUNT - 1));
        uint32_t bytes = template(&r, op, &s);
        while (!submit(&r, op, &s, bytes))
            await(&r);
        if (draw(&r, 64) == 0) { /* a new pair, whatever became of the old */
            await_all(&r);
            r.sequence = object(&r, LK_OP_SEQUENCE_CREATE, 0, 0).value;
            r.lease = object(&r, LK_OP_LEASE_OPEN, 0, LEASE).value;
        }
    }
    flipping = false;
    pthread_join(thread, NULL);
    await_all(&r);
    locks_close(r.l);
}

/* Another's handles, another pool's, those that were, those of the other kind. */
static void handles(void) {
    struct raw a, b;
    raw_open(&a, 8);
    raw_open(&b, 8);
    restore(&a);
    restore(&b);
    for (uint16_t op = 1; op < LK_OP_COUNT; op++) {
        struct step s;
        uint64_t sequence = b.sequence, lease = b.lease;
        if (op == LK_OP_SEQUENCE_CREATE || op == LK_OP_LEASE_OPEN || op == LK_OP_BARRIER)
            continue;
        b.sequence = a.sequence;
        b.lease = a.lease;
        uint32_t bytes = template(&b, op, &s);
        b.sequence = sequence;
        b.lease = lease;
        expect_reason(call(&b, op, &s, bytes), LK_REASON_HANDLE_STALE);
        bytes = template(&(struct raw){.sequence = lease, .lease = sequence}, op, &s);
        expect_reason(call(&b, op, &s, bytes), LK_REASON_HANDLE_KIND);
    }
    for (uint32_t n = 0; n < 4096; n++) /* guessed: all indices, some generations */
        for (uint64_t generation = 1; generation < 3; generation++) {
            uint64_t handle = generation << 32 | n;
            if (handle != b.sequence && handle != b.lease)
                if (!object(&b, LK_OP_SEQUENCE_TRUNCATE, handle, 0).status)
                    bad("handle %#lx is another's", (unsigned long)handle);
        }
    expect_reason(one_row(&a, LK_OP_ATTEND, a.sequence, 1, LENGTH, 1), LK_REASON_NONE);
    uint64_t old = a.sequence;
    restore(&a);
    expect_reason(one_row(&a, LK_OP_ATTEND, old, 1, LENGTH, 1), LK_REASON_HANDLE_STALE);
    struct lk_object_desc other = {.pool = 1};
    uint64_t foreign = call(&a, LK_OP_SEQUENCE_CREATE, &other, sizeof(other)).value;
    expect_reason(one_row(&a, LK_OP_APPEND, foreign, 0, 0, 1), LK_REASON_HANDLE_POOL);
    locks_close(a.l);
    locks_close(b.l);
}

/* A refusal carries its sentence and nothing from behind it. */
static void questions(void) {
    struct raw r;
    raw_open(&r, 8);
    for (uint32_t n = 0; n < 2; n++) {
        struct lk_msg_pool_get ask = {.head = {LK_ABI_MAGIC, LK_MSG_POOL_GET, sizeof(ask)},
                                      .index = n ? LK_POOL_BY_NAME : 99,
                                      .name = "nowhere"};
        struct lk_refused no;
        if (send(r.l->socket, &ask, sizeof(ask), 0) != sizeof(ask) ||
            recv(r.l->socket, &no, sizeof(no), 0) != sizeof(no) || no.error != -ESRCH)
            bad("no refusal of a pool that is not there");
        for (size_t i = strnlen(no.reason, sizeof(no.reason)); i < sizeof(no.reason); i++)
            if (no.reason[i])
                bad("byte %zu behind the sentence is %#x", i, no.reason[i]);
    }
    locks_close(r.l);
}

/* Lists, slots and tables at their limits. */
static void lists(void) {
    struct raw r;
    raw_open(&r, 8);
    restore(&r);
    uint32_t *pairs = (uint32_t *)(r.arena + AT_Q); /* there is room for 65536 of them */
    int64_t *slots = (int64_t *)(r.arena + AT_SLOTS);
    struct lk_object_desc o = {.handle = r.lease, .list = AT_Q, .count = 65536};
    memset(pairs, 0, 65536 * 8);
    expect_reason(call(&r, LK_OP_COPY_PAGES, &o, sizeof(o)), LK_REASON_COPY_SELF);
    expect_reason(call(&r, LK_OP_INVALIDATE, &o, sizeof(o)), LK_REASON_NONE);
    o.count = 65537;
    expect_reason(call(&r, LK_OP_INVALIDATE, &o, sizeof(o)), LK_REASON_COUNT);
    pairs[65535] = LEASE;
    o.count = 65536;
    expect_reason(call(&r, LK_OP_INVALIDATE, &o, sizeof(o)), LK_REASON_TABLE_PAGE);
    restore(&r);
    for (uint32_t i = 0; i + 1 < LEASE; i++) /* a chain: each copies what the last one made */
        pairs[2 * i] = i, pairs[2 * i + 1] = i + 1;
    o.handle = r.lease;
    o.count = LEASE - 1;
    expect_reason(call(&r, LK_OP_COPY_PAGES, &o, sizeof(o)), LK_REASON_NONE);
    for (uint32_t i = 0; i < ROW_TOKENS; i++) /* one slot again and again */
        slots[i] = i % 2 ? 0 : -1 - (int64_t)i;
    expect_reason(one_row(&r, LK_OP_WRITE, r.lease, 0, 0, ROW_TOKENS), LK_REASON_NONE);
    static const int64_t wrong[] = {LEASE * PAGE, INT64_MAX, 1ll << 32, 1ll << 62};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        slots[3] = wrong[i];
        expect_reason(one_row(&r, LK_OP_WRITE, r.lease, 0, 0, 5), LK_REASON_SLOT);
    }
    slots[3] = INT64_MIN;
    expect_reason(one_row(&r, LK_OP_WRITE, r.lease, 0, 0, 5), LK_REASON_NONE);
    locks_close(r.l);
}

/* 256 rows of one sequence, forks, cuts and frees behind them, all at once. */
static void storms(void) {
    struct step s;
    struct raw r;
    raw_open(&r, 64);
    for (unsigned n = 0; n < scaled(60); n++) {
        restore(&r);
        struct lk_object_desc o = {.handle = r.sequence, .length = draw(&r, LENGTH)};
        make_step(&s);
        for (uint32_t i = 0; i < LK_ROWS_MAX; i++)
            add_row(&s, r.sequence, i % LAYERS, LENGTH + i / LAYERS, 1);
        submit(&r, LK_OP_DECODE, &s, step_bytes(&s));
        submit(&r, LK_OP_SEQUENCE_FORK, &o, sizeof(o));
        submit(&r, LK_OP_SEQUENCE_TRUNCATE, &o, sizeof(o));
        for (int i = 0; i < 20; i++)
            submit(&r, LK_OP_BARRIER, NULL, 0);
        submit(&r, LK_OP_SEQUENCE_FREE, &o, sizeof(o));
        submit(&r, LK_OP_SEQUENCE_FREE, &o, sizeof(o));
        struct lk_cqe cqe = expect_reason(await(&r), LK_REASON_NONE);
        if (cqe.op != LK_OP_DECODE || cqe.rows != LK_ROWS_MAX)
            bad("%u rows of op %u", cqe.rows, cqe.op);
        uint64_t child = expect_reason(await(&r), LK_REASON_NONE).value;
        for (int i = 0; i < 22; i++)
            expect_reason(await(&r), LK_REASON_NONE);
        expect_reason(await(&r), LK_REASON_HANDLE_STALE);
        expect_reason(one_row(&r, LK_OP_DECODE, child, 1, LENGTH + LK_ROWS_MAX / LAYERS, 1),
                      LK_REASON_NONE);
        expect_reason(object(&r, LK_OP_SEQUENCE_FREE, child, 0), LK_REASON_NONE);
    }
    locks_close(r.l);
}

/* What is no number, or hardly one, as key, value, query and scale; every mode of scanning. */
static void no_numbers(void) {
    static const uint16_t odd[] = {0x7fc0, 0x7f80, 0xff80, 0x7f7f, 0xff7f, 0x0001, 0x8000, 0x3f80};
    static const float scales[] = {0, 1e-45f, 3e38f, -3e38f, -1};
    struct step s;
    struct raw r;
    raw_open(&r, 8);
    for (unsigned n = 0; n < scaled(120); n++) {
        for (uint32_t i = 0; i < AT_OUT / 2; i++)
            if (draw(&r, 1u << n % 12) == 0)
                ((uint16_t *)r.arena)[i] = odd[draw(&r, 8)];
        object(&r, LK_OP_SEQUENCE_FREE, r.sequence, 0);
        r.sequence = object(&r, LK_OP_SEQUENCE_CREATE, 0, 0).value;
        for (uint64_t at = 0; at < 1024; at += ROW_TOKENS)
            expect_reason(one_row(&r, LK_OP_APPEND, r.sequence, 0, at, ROW_TOKENS), LK_REASON_NONE);
        for (uint16_t scan = LK_SCAN_FULL; scan <= LK_SCAN_TREE; scan++)
            for (uint32_t budget = 16; budget <= 128; budget *= 2) {
                make_step(&s);
                struct lk_row_desc *row = add_row(&s, r.sequence, 0, 1024, 1);
                row->list_pages = 64;
                s.head.budget = budget;
                s.head.scan = scan;
                s.head.sampled = (int32_t)draw(&r, 2) * (int32_t)(budget / 32);
                s.head.sm_scale = scales[draw(&r, 5)];
                s.head.mass_target = draw(&r, 3) ? 0 : 0.5f;
                s.head.results = AT_RESULTS;
                memset(r.arena + AT_LIST, 0, KV_HEADS * 64 * sizeof(struct lk_page_entry));
                expect_reason(call(&r, LK_OP_ATTEND, &s, step_bytes(&s)), LK_REASON_NONE);
                struct lk_head_result *result = (struct lk_head_result *)(r.arena + AT_RESULTS);
                struct lk_page_entry *entry = (struct lk_page_entry *)(r.arena + AT_LIST);
                for (uint32_t h = 0; h < KV_HEADS; h++, entry += 64)
                    for (uint32_t i = 0; i < result[h].kept + result[h].sampled; i++)
                        if (entry[i].page >= 64 || (i && entry[i].page <= entry[i - 1].page) ||
                            result[h].kept + result[h].sampled > budget / PAGE)
                            bad("page %u at %u of %u + %u, budget %u, scan %u", entry[i].page, i,
                                result[h].kept, result[h].sampled, budget, scan);
            }
    }
    locks_close(r.l);
}

/* Sequences, forks, leases and pages until each quota says no. */
static void quotas(void) {
    uint64_t handles_[SEQUENCES];
    struct lk_cqe cqe;
    struct raw r;
    raw_open(&r, 8);
    for (uint32_t i = 0; i < SEQUENCES; i++)
        handles_[i] = expect_reason(object(&r, LK_OP_SEQUENCE_CREATE, 0, 0), 0).value;
    expect_reason(object(&r, LK_OP_SEQUENCE_CREATE, 0, 0), LK_REASON_SEQUENCES_QUOTA);
    expect_reason(object(&r, LK_OP_SEQUENCE_FORK, handles_[0], 0), LK_REASON_SEQUENCES_QUOTA);
    uint64_t length = 0; /* grow by odd amounts up to the quota, then token by token */
    for (uint32_t tokens = 333; tokens > 0; tokens /= 2)
        while (!(cqe = one_row(&r, LK_OP_APPEND, handles_[0], 0, length, tokens)).status)
            length += tokens;
    expect_reason(cqe, LK_REASON_PAGES_QUOTA);
    expect_reason(one_row(&r, LK_OP_APPEND, handles_[1], 0, 0, 1), LK_REASON_PAGES_QUOTA);
    expect_reason(object(&r, LK_OP_LEASE_OPEN, 0, 1), LK_REASON_PAGES_QUOTA);
    expect_reason(one_row(&r, LK_OP_APPEND, handles_[0], 1, 0, 100), LK_REASON_NONE);
    expect_reason(object(&r, LK_OP_SEQUENCE_FREE, handles_[1], 0), LK_REASON_NONE);
    uint64_t fork_ = expect_reason(object(&r, LK_OP_SEQUENCE_FORK, handles_[0], 0), 0).value;
    /* Both share all pages: neither can be written any more, and nothing is lost by trying. */
    expect_reason(one_row(&r, LK_OP_APPEND, fork_, 1, 100, 1), LK_REASON_PAGES_QUOTA);
    expect_reason(one_row(&r, LK_OP_ATTEND, fork_, 0, length, 1), LK_REASON_NONE);
    expect_reason(object(&r, LK_OP_SEQUENCE_FREE, handles_[0], 0), LK_REASON_NONE);
    expect_reason(one_row(&r, LK_OP_APPEND, fork_, 1, 100, 1), LK_REASON_NONE);
    expect_reason(object(&r, LK_OP_SEQUENCE_FREE, fork_, 0), LK_REASON_NONE);
    for (uint32_t i = 0; i < 4; i++)
        expect_reason(object(&r, LK_OP_LEASE_OPEN, 0, 1), LK_REASON_NONE);
    expect_reason(object(&r, LK_OP_LEASE_OPEN, 0, 1), LK_REASON_LEASES_QUOTA);
    locks_close(r.l);
}

/* The quota to its last quad, freed in any order, forks and cuts between, again and again. */
static void to_the_last_quad(void) {
    uint64_t handle[SEQUENCES] = {0}, length[SEQUENCES] = {0};
    uint32_t refused = 0;
    struct raw r;
    raw_open(&r, 8);
    for (unsigned n = 0; n < scaled(8000); n++) {
        uint32_t i = draw(&r, SEQUENCES), j = draw(&r, SEQUENCES);
        if (!handle[i]) {
            handle[i] = expect_reason(object(&r, LK_OP_SEQUENCE_CREATE, 0, 0), 0).value;
            length[i] = 0;
        }
        uint32_t tokens = 1 + draw(&r, 400);
        struct lk_cqe cqe = one_row(&r, LK_OP_APPEND, handle[i], 0, length[i], tokens);
        if (cqe.status == 0)
            length[i] += tokens;
        else
            expect_reason(cqe, LK_REASON_PAGES_QUOTA);
        if (cqe.status == 0 && draw(&r, 3))
            continue;
        refused += cqe.status != 0;
        if (!handle[j] && draw(&r, 2)) {
            handle[j] = expect_reason(object(&r, LK_OP_SEQUENCE_FORK, handle[i], 0), 0).value;
            length[j] = length[i];
        } else if (handle[j] && draw(&r, 2)) {
            length[j] = draw(&r, (uint32_t)length[j] + 1);
            expect_reason(object(&r, LK_OP_SEQUENCE_TRUNCATE, handle[j], length[j]), 0);
        } else if (handle[j]) {
            expect_reason(object(&r, LK_OP_SEQUENCE_FREE, handle[j], 0), 0);
            handle[j] = 0;
        }
    }
    if (refused < 20)
        bad("the quota was met %u times", refused);
    for (uint32_t i = 0; i < SEQUENCES; i++)
        if (handle[i])
            expect_reason(object(&r, LK_OP_SEQUENCE_FREE, handle[i], 0), 0);
    uint64_t lease = expect_reason(object(&r, LK_OP_LEASE_OPEN, 0, 384), LK_REASON_NONE).value;
    expect_reason(object(&r, LK_OP_LEASE_CLOSE, lease, 0), LK_REASON_NONE);
    locks_close(r.l);
}

/* Work without end, nothing read; then the bell is shut and the segments are pulled at. */
static void deaf(void) {
    struct step s;
    struct raw r;
    raw_open(&r, 64);
    restore(&r);
    uint32_t bytes = template(&r, LK_OP_ATTEND, &s);
    for (unsigned n = 0; n < scaled(20000); n++) {
        submit(&r, n % 2 ? LK_OP_ATTEND : LK_OP_BARRIER, &s, n % 2 ? bytes : 0);
        lk_bell_ring(r.l->memory.bell);
        lk_store_relaxed32(&r.l->memory.submission->sleeping, 1);
    }
    shutdown(r.l->memory.bell, SHUT_RDWR);
    usleep(20000);
    madvise(r.arena, ARENA, MADV_REMOVE); /* holes; sealed against shrinking */
    if (mprotect(r.l->memory.completion, 4096, PROT_READ | PROT_WRITE) == 0)
        bad("completions can be written through a descriptor for reading");
    usleep(20000);
    lk_store_relaxed64(&r.l->memory.submission->cq_head, 1);
    lk_store_relaxed64(&r.l->memory.submission->cq_head, 0);
    usleep(20000);
    close(r.l->socket);
    _exit(0);
}

/* ---- the tests ---- */

static const struct attack {
    const char *name;
    void (*run)(void);
} attacks[] = {
    {"at_the_edges", at_the_edges},
    {"entries", entries},
    {"changing_hands", changing_hands},
    {"handles", handles},
    {"questions", questions},
    {"lists", lists},
    {"storms", storms},
    {"no_numbers", no_numbers},
    {"quotas", quotas},
    {"to_the_last_quad", to_the_last_quad},
    {"deaf", deaf},
};
#define ATTACKS (sizeof(attacks) / sizeof(attacks[0]))

START_TEST(an_attack_is_the_attackers_loss) {
    const struct attack *attack = &attacks[_i];
    struct holdings before = look();
    pid_t pid = fork();
    int status;
    ck_assert_int_ge(pid, 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        attack->run();
        _exit(0);
    }
    uint64_t start = now_us();
    while (waitpid(pid, &status, WNOHANG) == 0) {
        expect_same();
        ck_assert_msg(now_us() - start < 400000000, "%s does not end", attack->name);
    }
    ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: status %#x", attack->name,
                  status);
    struct pace pace = take_pace();
    printf("witness: p99 %u us under %s, %.1f s\n", pace.p99_us, attack->name,
           (double)(now_us() - start) * 1e-6);
    ck_assert_msg(pace.slow <= SLOW_FEW + pace.steps / 100,
                  "%u of %u steps took more than %d ms under %s, p99 is %u us", pace.slow,
                  pace.steps, SLOW_MS, attack->name, pace.p99_us);
    expect_holdings(&before);
    expect_same();
}
END_TEST

/* The first is the device. */
static const char *sets[] = {NULL,
                             "pool main.layers=2",
                             "pool main.kv_heads=2",
                             "pool main.group=2",
                             "pool main.head_dim=64",
                             "pool main.rank=4",
                             "pool main.memory=8M",
                             "pool other.layers=1",
                             "pool other.kv_heads=1",
                             "pool other.group=1",
                             "pool other.head_dim=64",
                             "pool other.memory=1M",
                             "daemon.threads=2",
                             "limits.max_arena=4M",
                             "limits.max_sequences=48",
                             "limits.max_leases=4",
                             "limits.max_pages=384",
                             "limits.max_row_tokens=512"};

int main(void) {
    char why[4096];
    setvbuf(stdout, NULL, _IOLBF, 0);
    rig_own_daemon();
    sets[0] = rig_device_set();
    if (lk_private_start(sets, sizeof(sets) / sizeof(sets[0]), 60, &daemon_, why, sizeof(why))) {
        fprintf(stderr, "%s\n", why);
        return 1;
    }
    Suite *suite = suite_create("hostile");
    TCase *tc = tcase_create("all");
    tcase_add_unchecked_fixture(tc, open_witness, NULL);
    tcase_set_timeout(tc, 240);
    tcase_add_loop_test(tc, an_attack_is_the_attackers_loss, 0, (int)ATTACKS);
    suite_add_tcase(suite, tc);
    SRunner *runner = srunner_create(suite);
    srunner_set_fork_status(runner, CK_NOFORK); /* one daemon and one witness for all */
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    locks_close(witness.l);
    lk_private_stop(&daemon_);
    return failed ? 1 : 0;
}
