/* SPDX-License-Identifier: MIT */
/*
 * test_kill.c - clients that die, stop, do not read, lie or talk nonsense, against the real daemon.
 *
 * A *witness* computes the same step over and over: its results must stay equal bit for bit, and in
 * time. Beside it *victims* live random lives (connect, append, decode, fork, lease, write, submit
 * without waiting, random descriptors) and are killed at random moments. After each lot of kills
 * the daemon must hold what it held at the beginning: pages, sequences, leases, clients,
 * descriptors and mappings of segments.
 *
 * $LOCKSD is the daemon (default: ../../locksd from here), $LOCKSD_KILLS the
 * number of kills (1000). All in one process: a failed assertion ends the program, the private
 * daemon dies with it.
 */
#include <check.h>
#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../../clients/common/private.h"
#include "../../clients/lib/internal.h"
#include "../common/rig.h"

#define PROMPT     200 /* tokens of the witness */
#define VICTIMS    2
#define LOT        100 /* kills between two looks at the baseline */
#define SETTLE_MS  30000
#define HELD_MS    30000 /* of the witness: a machine may stand still for seconds */
#define REST_LOOKS 20    /* that find nothing less, before it counts as at rest */
#define LAYERS     2
#define KV_HEADS   2
#define HEADS      4
#define HEAD_DIM   64
#define MAX_TOKENS 64 /* of a victim's row */

static struct lk_private daemon_;

/* ---- what the daemon holds ---- */

struct holdings {
    json_int_t clients, sequences, leases, pages, leased;
    int fds, maps;
};

static void sleep_us(unsigned us) {
    nanosleep(&(struct timespec){.tv_nsec = (long)us * 1000}, NULL);
}

static int count_fds(void) {
    char path[64];
    int count = 0;
    snprintf(path, sizeof(path), "/proc/%d/fd", daemon_.pid);
    DIR *dir = opendir(path);
    ck_assert_msg(dir != NULL, "the daemon is gone");
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

static int count_maps(void) {
    char path[64], line[512];
    int count = 0;
    snprintf(path, sizeof(path), "/proc/%d/maps", daemon_.pid);
    FILE *file = fopen(path, "r");
    ck_assert_msg(file != NULL, "the daemon is gone");
    while (fgets(line, sizeof(line), file))
        count += strstr(line, "memfd:locksd-") != NULL;
    fclose(file);
    return count;
}

static json_int_t number(const json_t *object, const char *name) {
    const json_t *value = json_object_get(object, name);
    ck_assert_msg(json_is_integer(value), "the status has no number \"%s\"", name);
    return json_integer_value(value);
}

static json_t *ask_status(void) {
    char *text, why[512];
    int r = locks_admin(daemon_.socket, "status", &text, why, sizeof(why));
    ck_assert_msg(r == 0, "%s", why);
    json_t *status = json_loads(text, 0, NULL);
    free(text);
    return status;
}

static struct holdings look(void) {
    json_t *status = ask_status();
    const json_t *pool = json_array_get(json_object_get(status, "pools"), 0);
    struct holdings h = {.clients = number(status, "clients"),
                         .sequences = number(status, "sequences"),
                         .leases = number(status, "leases"),
                         .pages = number(pool, "pages_used"),
                         .leased = number(pool, "pages_leased"),
                         .fds = count_fds(),
                         .maps = count_maps()};
    json_decref(status);
    return h;
}

/* What the daemon holds when it is at rest: the least of some looks, as the daemon closes its end
 * of an earlier look's connection, or of a client that just left, a moment after that is gone. */
static struct holdings look_at_rest(void) {
    struct holdings least = look();
    for (int quiet = 0; quiet < REST_LOOKS; quiet++, sleep_us(1000)) {
        struct holdings h = look();
        if (h.fds < least.fds || h.maps < least.maps || h.clients < least.clients) {
            least = h;
            quiet = 0;
        }
    }
    return least;
}

static json_int_t work_done(const char *name) {
    json_t *status = ask_status();
    json_int_t done = number(json_object_get(status, "work"), name);
    json_decref(status);
    return done;
}

static uint64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* On a GPU the driver keeps descriptors and mappings of its own, and may close some. */
static bool holds_no_more(const struct holdings *h, const struct holdings *want) {
    struct holdings settled = *h;
    const char *device = getenv("LOCKSD_TEST_DEVICE");
    if (device && strcmp(device, "cuda") == 0) {
        settled.fds = h->fds < want->fds ? want->fds : h->fds;
        settled.maps = h->maps < want->maps ? want->maps : h->maps;
    }
    return !memcmp(&settled, want, sizeof(settled));
}

/* What is given back takes a moment: the device finishes first. */
static void expect_holdings(const struct holdings *want) {
    struct holdings h;
    uint64_t deadline = now_ms() + SETTLE_MS;
    do {
        h = look();
        if (holds_no_more(&h, want))
            return;
        sleep_us(2000);
    } while (now_ms() < deadline);
    ck_abort_msg("clients %d (%d at first), sequences %d (%d), leases %d (%d), pages %d (%d), "
                 "leased pages %d (%d), descriptors %d (%d), mappings %d (%d)",
                 (int)h.clients, (int)want->clients, (int)h.sequences, (int)want->sequences,
                 (int)h.leases, (int)want->leases, (int)h.pages, (int)want->pages, (int)h.leased,
                 (int)want->leased, h.fds, want->fds, h.maps, want->maps);
}

/* ---- payload ---- */

static void random_bf16(uint16_t *values, size_t count, unsigned *seed) {
    for (size_t i = 0; i < count; i++)
        values[i] = (uint16_t)(0x3f00 + rand_r(seed) % 0x90 + (rand_r(seed) % 2 ? 0x8000 : 0));
}

/* Room for one row of `tokens`. */
struct payload {
    struct locks *l;
    uint16_t *q, *k, *v;
    float *out, *lse;
    struct lk_head_result *results;
    struct lk_page_entry *list;
    int64_t *slots;
    uint32_t *table;
};

#define LIST_PAGES 16

static bool make_payload(struct payload *p, struct locks *l, uint32_t tokens, unsigned *seed) {
    p->l = l;
    p->q = locks_alloc(l, tokens * HEADS * HEAD_DIM * 2);
    p->k = locks_alloc(l, tokens * KV_HEADS * HEAD_DIM * 2);
    p->v = locks_alloc(l, tokens * KV_HEADS * HEAD_DIM * 2);
    p->out = locks_alloc(l, tokens * HEADS * HEAD_DIM * 4);
    p->lse = locks_alloc(l, tokens * HEADS * 4);
    p->results = locks_alloc(l, KV_HEADS * sizeof(*p->results));
    p->list = locks_alloc(l, KV_HEADS * LIST_PAGES * sizeof(*p->list));
    p->slots = locks_alloc(l, tokens * sizeof(*p->slots));
    p->table = locks_alloc(l, 64 * sizeof(*p->table));
    if (!p->q || !p->k || !p->v || !p->out || !p->lse || !p->results || !p->list || !p->slots ||
        !p->table)
        return false;
    random_bf16(p->q, tokens * HEADS * HEAD_DIM, seed);
    random_bf16(p->k, tokens * KV_HEADS * HEAD_DIM, seed);
    random_bf16(p->v, tokens * KV_HEADS * HEAD_DIM, seed);
    return true;
}

static struct locks_row row_of(const struct payload *p, locks_handle handle, uint32_t layer,
                               uint64_t position, uint32_t tokens) {
    return (struct locks_row){.sequence = handle,
                              .position = position,
                              .layer = layer,
                              .tokens = tokens,
                              .q = p->q,
                              .k = p->k,
                              .v = p->v,
                              .out = p->out,
                              .lse = p->lse,
                              .list = p->list,
                              .list_pages = LIST_PAGES,
                              .slots = p->slots};
}

/* ---- the witness ---- */

struct outcome {
    float out[HEADS * HEAD_DIM], lse[HEADS];
    struct lk_head_result results[KV_HEADS];
    struct lk_page_entry list[KV_HEADS * LIST_PAGES];
};

struct witness {
    struct payload payload;
    locks_handle sequence;
    struct outcome expected;
};

static struct witness witness;

#define NEED(call)                                                                                 \
    do {                                                                                           \
        int need_ = (call);                                                                        \
        ck_assert_msg(need_ == 0, "%s: %d, %s", #call, need_, locks_error(witness.payload.l));     \
    } while (0)

/* One sparse decode step behind the prompt, which is then taken back. */
static void witness_step(struct outcome *ret) {
    struct payload *p = &witness.payload;
    struct locks_step step = {.budget = 96, .sampled = 2, .results = p->results};
    struct locks_row row = row_of(p, witness.sequence, 1, PROMPT, 1);
    memset(p->out, 0xff, sizeof(ret->out));
    memset(p->list, 0, sizeof(ret->list));
    NEED(locks_decode(p->l, &step, &row, 1));
    memcpy(ret->out, p->out, sizeof(ret->out));
    memcpy(ret->lse, p->lse, sizeof(ret->lse));
    memcpy(ret->results, p->results, sizeof(ret->results));
    memcpy(ret->list, p->list, sizeof(ret->list));
    NEED(locks_sequence_truncate(p->l, witness.sequence, PROMPT));
}

static void open_witness(void) {
    struct locks_options o = {
        .size = sizeof(o), .socket = daemon_.socket, .name = "witness", .arena_bytes = 1 << 20};
    unsigned seed = 1;
    struct locks *l;
    ck_assert_msg(locks_connect(&o, &l) == 0, "%s", locks_error(NULL));
    ck_assert(make_payload(&witness.payload, l, PROMPT, &seed));
    NEED(locks_sequence_create(l, 0, &witness.sequence));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        struct locks_row row = row_of(&witness.payload, witness.sequence, layer, 0, PROMPT);
        NEED(locks_append(l, &(struct locks_step){0}, &row, 1));
    }
    witness_step(&witness.expected);
    ck_assert_uint_eq(witness.expected.results[0].kept + witness.expected.results[0].sampled, 6);
}

static bool same_bits(const void *a, const void *b, size_t bytes) {
    return memcmp(a, b, bytes) == 0;
}

static void expect_same(void) {
    struct outcome now;
    witness_step(&now);
    const struct outcome *then = &witness.expected;
    ck_assert_msg(same_bits(now.out, then->out, sizeof(now.out)) &&
                      same_bits(now.lse, then->lse, sizeof(now.lse)) &&
                      same_bits(now.results, then->results, sizeof(now.results)) &&
                      same_bits(now.list, then->list, sizeof(now.list)),
                  "another client's results have changed");
}

/* `steps` of the witness, none of them held up. */
static void expect_progress(int steps) {
    uint64_t start = now_ms();
    for (int i = 0; i < steps; i++)
        expect_same();
    ck_assert_msg(now_ms() - start < HELD_MS + 20 * (uint64_t)steps, "%d steps took %d ms", steps,
                  (int)(now_ms() - start));
}

/* ---- a victim ---- */

struct life {
    struct payload p;
    unsigned seed;
    locks_handle sequences[4];
    uint64_t length[4][LAYERS];
    locks_handle lease;
};

static uint32_t draw(struct life *v, uint32_t below) {
    return (uint32_t)rand_r(&v->seed) % below;
}

static void live_sequences(struct life *v, uint32_t i) {
    struct locks *l = v->p.l;
    uint32_t other = draw(v, 4);
    switch (draw(v, 4)) {
    case 0:
        if (!v->sequences[i] && !locks_sequence_create(l, 0, &v->sequences[i]))
            memset(v->length[i], 0, sizeof(v->length[i]));
        break;
    case 1:
        if (v->sequences[i] && !v->sequences[other] &&
            !locks_sequence_fork(l, v->sequences[i], &v->sequences[other]))
            memcpy(v->length[other], v->length[i], sizeof(v->length[i]));
        break;
    case 2: {
        uint64_t cut = draw(v, 100);
        if (v->sequences[i] && !locks_sequence_truncate(l, v->sequences[i], cut))
            for (int layer = 0; layer < LAYERS; layer++)
                v->length[i][layer] = v->length[i][layer] < cut ? v->length[i][layer] : cut;
        break;
    }
    default:
        if (v->sequences[i] && draw(v, 3) == 0 && !locks_sequence_free(l, v->sequences[i]))
            v->sequences[i] = 0;
    }
}

static void live_steps(struct life *v, uint32_t i) {
    struct locks_completion done;
    uint32_t layer = draw(v, LAYERS), tokens = 1 + draw(v, MAX_TOKENS);
    struct locks_step step = {.budget = 64, .scan = draw(v, 5)};
    if (!v->sequences[i])
        return;
    struct locks_row row = row_of(&v->p, v->sequences[i], layer, v->length[i][layer], tokens);
    if (draw(v, 2)) {
        uint16_t op = draw(v, 2) ? LK_OP_APPEND : LK_OP_DECODE;
        row.tokens = op == LK_OP_DECODE ? 1 + draw(v, 3) : tokens;
        if (!locks_submit(v->p.l, op, &step, &row, 1, 0))
            v->length[i][layer] += row.tokens;
        return; /* answered while something else waits, or never */
    }
    row.tokens = 1;
    if (!locks_decode(v->p.l, &step, &row, 1))
        v->length[i][layer]++;
    while (!locks_try(v->p.l, &done))
        ;
}

static void live_tables(struct life *v) {
    struct locks *l = v->p.l;
    struct locks_row row = row_of(&v->p, v->lease, draw(v, LAYERS), 0, 1 + draw(v, 32));
    struct locks_table table = {v->p.table, 1 + draw(v, 2), 0};
    switch (draw(v, 5)) {
    case 0:
        if (!v->lease)
            (void)!locks_lease_open(l, 0, 1 + draw(v, 32), &v->lease);
        else if (draw(v, 4) == 0 && !locks_lease_close(l, v->lease))
            v->lease = 0;
        break;
    case 1:
        for (uint32_t t = 0; t < row.tokens; t++)
            v->p.slots[t] = t;
        locks_write(l, &(struct locks_step){0}, &row, 1);
        break;
    case 2:
        v->p.table[0] = 0;
        v->p.table[1] = 1;
        table.length = 16 * (table.count - 1) + 1 + draw(v, 16);
        locks_tables(l, v->lease, draw(v, 8), &table, 1);
        break;
    case 3:
        row.tokens = 1;
        row.table_set = (uint16_t)draw(v, 8);
        locks_attend_table(l, &(struct locks_step){0}, &row, 1);
        break;
    default:
        locks_copy_pages(l, v->lease, &(uint32_t[2]){draw(v, 4), 4 + draw(v, 4)}, 1);
        locks_invalidate(l, v->lease, &(uint32_t){draw(v, 8)}, 1);
    }
}

/* A descriptor of random words past the library's checks; now and then with a good handle. */
static void live_nonsense(struct life *v) {
    uint32_t words[64 + 96], flight, bytes = draw(v, 2) ? 160 : 8 * (1 + draw(v, 20));
    void *desc;
    for (size_t i = 0; i < sizeof(words) / 4; i++)
        words[i] = draw(v, 3) ? draw(v, 3) : draw(v, 1u << 20) * 64;
    if (draw(v, 2)) {
        memcpy(words, &v->sequences[0], 8);
        memcpy(words + 16, &v->sequences[0], 8);
    }
    if (lk_client_reserve(v->p.l, (uint16_t)draw(v, LK_OP_COUNT + 1), bytes, 0, true, &desc,
                          &flight))
        return;
    memcpy(desc, words, bytes);
    lk_client_publish(v->p.l);
    lk_client_complete(v->p.l, flight, NULL);
}

static void one_life(struct life *v) {
    struct locks_options o = {.size = sizeof(o),
                              .socket = daemon_.socket,
                              .name = "victim",
                              .sq_entries = draw(v, 2) ? 8 : 64,
                              .arena_bytes = 1 << 18,
                              .spin_us = 1 + draw(v, 50)};
    struct locks *l;
    if (locks_connect(&o, &l)) {
        sleep_us(500);
        return;
    }
    memset(v->sequences, 0, sizeof(v->sequences));
    v->lease = 0;
    if (make_payload(&v->p, l, MAX_TOKENS, &v->seed))
        for (uint32_t turns = draw(v, 300); turns > 0 && !l->dead; turns--) {
            uint32_t kind = draw(v, 10), i = draw(v, 4);
            if (kind < 3)
                live_sequences(v, i);
            else if (kind < 7)
                live_steps(v, i);
            else if (kind < 9)
                live_tables(v);
            else
                live_nonsense(v);
        }
    locks_close(l);
}

/* Forks; the child does `life` and never returns. */
static pid_t spawn(void (*life)(void *), void *argument) {
    pid_t parent = getpid(), pid = fork();
    ck_assert_int_ge(pid, 0);
    if (pid)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() == parent)
        life(argument);
    _exit(0);
}

static void end(pid_t pid) {
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

static void live_on(void *argument) {
    struct life v = {.seed = *(unsigned *)argument};
    for (;;)
        one_life(&v);
}

/* ---- the tests ---- */

static void kill_clients(int kills, unsigned *seed, const struct holdings *before) {
    pid_t victims[VICTIMS] = {0};
    unsigned life;
    for (int n = 0; n < kills; n++) {
        pid_t *victim = &victims[n % VICTIMS];
        life = *seed + (unsigned)n;
        if (!*victim)
            *victim = spawn(live_on, &life);
        sleep_us(rand_r(seed) % 4 ? (unsigned)rand_r(seed) % 6000 : (unsigned)rand_r(seed) % 400);
        if (n % VICTIMS == VICTIMS - 1)
            for (int i = 0; i < VICTIMS; i++) {
                end(victims[(i + n) % VICTIMS]);
                victims[(i + n) % VICTIMS] = 0;
            }
        expect_same();
        if (n % LOT == LOT - 1)
            expect_holdings(before);
    }
    for (int i = 0; i < VICTIMS; i++)
        if (victims[i])
            end(victims[i]);
    expect_holdings(before);
}

/* Beside much other work a victim may be killed before it has begun: then there are more. */
START_TEST(killed_clients_leave_nothing) {
    const char *text = getenv("LOCKSD_KILLS");
    int kills = text ? atoi(text) : 1000;
    struct holdings before = look_at_rest();
    json_int_t rows_before = work_done("rows"), refusals_before = work_done("refusals");
    json_int_t rows = 0, refusals = 0;
    unsigned seed = 12345;
    for (int lots = 1; lots <= 10 && (rows <= kills || refusals <= kills); lots++) {
        kill_clients(kills, &seed, &before);
        rows = work_done("rows") - rows_before - (json_int_t)kills * lots; /* the witness's */
        refusals = work_done("refusals") - refusals_before;
    }
    expect_progress(100);
    ck_assert_msg(rows > kills && refusals > kills,
                  "the victims did not live: %d rows, %d refusals", (int)rows, (int)refusals);
}
END_TEST

START_TEST(a_stopped_client_holds_nobody_up) {
    struct holdings before = look_at_rest();
    unsigned seed = 777;
    for (int n = 0; n < 20; n++) {
        unsigned life = seed + (unsigned)n;
        pid_t pid = spawn(live_on, &life);
        sleep_us(2000 + (unsigned)rand_r(&seed) % 8000);
        kill(pid, SIGSTOP);
        expect_progress(20);
        if (n % 2) { /* it may go on where it was */
            kill(pid, SIGCONT);
            expect_progress(5);
        }
        end(pid);
    }
    expect_holdings(&before);
}
END_TEST

static int talk[2]; /* a socket pair with a child */

/* Submits until told that the ring is full, reads nothing until asked to, then everything. */
static void never_read(void *argument) {
    struct locks_options o = {.size = sizeof(o),
                              .socket = daemon_.socket,
                              .name = "deaf",
                              .sq_entries = 16,
                              .arena_bytes = 1 << 16};
    struct locks_completion done;
    struct locks *l;
    uint64_t sent = 0;
    char byte = 0;
    (void)argument;
    if (locks_connect(&o, &l))
        _exit(2);
    for (int i = 0, quiet = 0; quiet < 100 && i < 300000; i++, sleep_us(100))
        if (locks_submit(l, LK_OP_DECODE, &(struct locks_step){0}, NULL, 0, sent) == 0)
            sent++, quiet = 0;
        else
            quiet += sent >= 3 * 16;
    if (write(talk[1], &byte, 1) != 1 || read(talk[1], &byte, 1) != 1)
        _exit(3);
    for (uint64_t n = 0; n < sent; n++)
        if (locks_wait(l, 30000, &done) || done.user_data != n || done.status)
            _exit(4);
    _exit(sent == 3 * 16 ? 0 : 5); /* the ring, and twice as many completions */
}

START_TEST(a_client_that_never_reads_holds_nobody_up) {
    struct holdings before = look_at_rest();
    char byte;
    int status;
    for (int n = 0; n < 2; n++) {
        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, talk), 0);
        pid_t pid = spawn(never_read, NULL);
        ck_assert_int_eq(read(talk[0], &byte, 1), 1);
        expect_progress(200);
        if (n == 0) { /* nothing was dropped */
            ck_assert_int_eq(write(talk[0], &byte, 1), 1);
            ck_assert_int_eq(waitpid(pid, &status, 0), pid);
            ck_assert_int_eq(status, 0);
        } else {
            end(pid);
        }
        close(talk[0]);
        close(talk[1]);
    }
    expect_holdings(&before);
}
END_TEST

/* *argument: which word it lies in. */
static void lie(void *argument) {
    struct locks_options o = {
        .size = sizeof(o), .socket = daemon_.socket, .name = "liar", .arena_bytes = 1 << 16};
    struct locks *l;
    char byte = 0;
    if (locks_connect(&o, &l))
        _exit(2);
    struct lk_submission_head *head = l->memory.submission;
    for (int n = 0; n < 200; n++) {
        (void)!locks_submit_barrier(l, 0);
        lk_bell_ring(l->memory.bell);
    }
    if (*(int *)argument == 0)
        head->sq_tail += 100000;
    else if (*(int *)argument == 1)
        head->sq_tail -= 1000;
    else
        head->cq_head += 1u << 30;
    for (int n = 0; n < 100000; n++)
        lk_bell_ring(l->memory.bell);
    if (write(talk[1], &byte, 1) == 1)
        pause();
}

START_TEST(a_liar_is_alone) {
    struct holdings before = look_at_rest();
    char byte;
    for (int word = 0; word < 3; word++) {
        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, talk), 0);
        pid_t pid = spawn(lie, &word);
        ck_assert_int_eq(read(talk[0], &byte, 1), 1);
        expect_progress(100);
        end(pid);
        close(talk[0]);
        close(talk[1]);
    }
    expect_holdings(&before);
}
END_TEST

/* Messages of random bytes, half of them with a good head, some with descriptors. */
static void babble(void *argument) {
    unsigned seed = *(unsigned *)argument;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, daemon_.socket, strlen(daemon_.socket));
    for (int n = 0; n < 200; n++) {
        union {
            struct lk_message head;
            uint8_t bytes[600];
        } m;
        int s = socket(AF_UNIX, SOCK_SEQPACKET, 0);
        if (connect(s, (struct sockaddr *)&address, sizeof(address)) == 0)
            for (int packets = rand_r(&seed) % 4; packets > 0; packets--) {
                size_t bytes = 1 + (size_t)rand_r(&seed) % sizeof(m);
                for (size_t i = 0; i < sizeof(m); i++)
                    m.bytes[i] = rand_r(&seed) % 3 ? 0 : (uint8_t)rand_r(&seed);
                if (rand_r(&seed) % 2)
                    m.head = (struct lk_message){LK_ABI_MAGIC, (uint16_t)(rand_r(&seed) % 10),
                                                 (uint16_t)bytes};
                send(s, &m, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
            }
        close(s);
    }
}

START_TEST(nonsense_on_the_socket_leaves_nothing) {
    struct holdings before = look_at_rest();
    for (unsigned seed = 1; seed <= 3; seed++) {
        pid_t pid = spawn(babble, &seed);
        expect_progress(50);
        waitpid(pid, NULL, 0);
    }
    expect_holdings(&before);
}
END_TEST

static long cpu_ticks(void) {
    char path[64], line[1024];
    long user = 0, system_ = 0;
    snprintf(path, sizeof(path), "/proc/%d/stat", daemon_.pid);
    FILE *file = fopen(path, "r");
    ck_assert(file && fgets(line, sizeof(line), file));
    fclose(file);
    sscanf(strrchr(line, ')') + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %ld %ld", &user,
           &system_);
    return user + system_;
}

START_TEST(an_idle_daemon_sleeps) {
    long used = LONG_MAX;
    expect_progress(10);
    for (int tries = 0; tries < 10 && used > sysconf(_SC_CLK_TCK) / 20; tries++) {
        sleep_us(200000); /* what came before may still be under way, beside much other work */
        long before = cpu_ticks();
        for (int i = 0; i < 20; i++)
            sleep_us(100000);
        used = cpu_ticks() - before;
    }
    ck_assert_msg(used <= sysconf(_SC_CLK_TCK) / 20, "%ld ticks of CPU in 2 s of idling", used);
    expect_same();
}
END_TEST

/* The first is the device. */
static const char *sets[] = {
    NULL,
    "pool kill.layers=2",
    "pool kill.kv_heads=2",
    "pool kill.group=2",
    "pool kill.head_dim=64",
    "pool kill.rank=4",
    "pool kill.memory=8M",
    "daemon.threads=2",
    "limits.max_arena=4M",
};

static Suite *make_suite(void) {
    Suite *suite = suite_create("kill");
    TCase *tc = tcase_create("all");
    tcase_add_unchecked_fixture(tc, open_witness, NULL);
    tcase_add_test(tc, killed_clients_leave_nothing);
    tcase_add_test(tc, a_stopped_client_holds_nobody_up);
    tcase_add_test(tc, a_client_that_never_reads_holds_nobody_up);
    tcase_add_test(tc, a_liar_is_alone);
    tcase_add_test(tc, nonsense_on_the_socket_leaves_nothing);
    tcase_add_test(tc, an_idle_daemon_sleeps);
    suite_add_tcase(suite, tc);
    return suite;
}

int main(void) {
    char why[4096];
    rig_own_daemon();
    sets[0] = rig_device_set();
    if (lk_private_start(sets, sizeof(sets) / sizeof(sets[0]), 60, &daemon_, why, sizeof(why))) {
        fprintf(stderr, "%s\n", why);
        return 1;
    }
    SRunner *runner = srunner_create(make_suite());
    srunner_set_fork_status(runner, CK_NOFORK); /* one daemon and one witness for all */
    alarm(600); /* a hang ends the program, and with it the daemon */
    srunner_run_all(runner, CK_ENV);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    locks_close(witness.payload.l);
    lk_private_stop(&daemon_);
    return failed != 0;
}
