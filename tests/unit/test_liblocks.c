/* SPDX-License-Identifier: MIT */
/*
 * test_liblocks.c - the client library against a daemon made of one thread: it speaks the real
 * protocol, checks what it is sent with the daemon's own functions, and does as each test tells it
 * (answer late, out of order, with a refusal, not at all, or die).
 */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "../common/run.h"
#include "../../clients/lib/internal.h"
#include "../../shm_protocol/ring.h"
#include "../../shm_protocol/segment.h"
#include "../../shm_protocol/validate.h"
#include "../../shm_protocol/wire.h"

#define ENTRIES  8
#define PATIENCE 30000 /* ms, until what must happen is said not to: a hang, not a slow machine */
#define HANDLE   UINT64_C(0x700000003)

enum manner {
    ANSWER,    /* each at once, in order */
    REFUSE,    /* each with a reason */
    BACKWARDS, /* wait for four, answer the last first */
    SILENT,    /* take and never answer */
    DEAF,      /* do not even take */
    DIE,       /* hang up at the first submission */
    TWICE,     /* complete each submission a second time, at once */
    MISSAY,    /* each with an error that is none */
    HOLD,      /* take, and answer when it is another manner's turn */
};

struct fake {
    char folder[64], path[96];
    int listener, socket;
    pthread_t thread;
    _Atomic enum manner manner;
    const char *refuse; /* instead of a welcome */
    uint16_t major, minor;
    uint32_t fences; /* of its device arenas */
    off_t map_bytes; /* that there are of the 4096 of a pool */
    int map_seals;
    struct lk_msg_pool_mapped mapped;
    uint32_t pool_index; /* that it answers with */
    int32_t error;       /* of refusals */
    const char *reason;
    atomic_bool stop;
    bool served;             /* the ring is up */
    _Atomic bool mute;       /* on the socket, and at the door */
    _Atomic bool beats;      /* its heart does */
    _Atomic int held_ms;     /* HOLD turns into ANSWER so long after the first */
    _Atomic int asked;       /* questions on the socket */
    _Atomic unsigned rounds; /* begun; each reads what is above anew */
    bool has_arena;          /* the device's: there is one for a connection */
    struct lk_channel_memory memory;
    struct lk_ring_daemon ring;
    struct lk_sqe held[64]; /* BACKWARDS, HOLD */
    uint32_t held_count;
    pthread_mutex_t lock; /* of the two below: what was taken last */
    uint8_t last_desc[LK_DESCRIPTOR_BYTES_MAX];
    struct lk_sqe last;
};

static struct fake fake;
static struct locks *l;
static uint32_t limit_ms; /* of the next connections; 0: the default. See set_limit() */
static struct locks_pool pool;
static const struct lk_pool_shape shape = {
    .layers = 2, .kv_heads = 2, .group = 2, .head_dim = 64, .page_tokens = 16, .element_bytes = 2};

static void answer_hello(struct fake *f, const struct lk_hello *hello) {
    char why[LK_REASON_BYTES];
    if (f->refuse) {
        struct lk_refused no = {.error = f->error};
        snprintf(no.reason, sizeof(no.reason), "%s", f->refuse);
        lk_wire_head(&no.head, LK_MSG_REFUSED, sizeof(no));
        lk_wire_send(f->socket, &no.head, NULL, 0);
        close(f->socket);
        f->socket = -1;
        return;
    }
    int r = lk_channel_memory_create(hello->sq_entries, hello->arena_bytes, 9, UINT32_MAX - 2, NULL,
                                     &f->memory, why, sizeof(why));
    ck_assert_msg(r == 0, "%s", why);
    const struct lk_segment_sizes *s = &f->memory.sizes;
    struct lk_welcome w = {.major = f->major,
                           .minor = f->minor,
                           .pools = 1,
                           .sq_entries = s->sq_entries,
                           .cq_entries = s->cq_entries,
                           .descriptor_bytes = s->descriptor_bytes,
                           .submission_bytes = s->submission_bytes,
                           .completion_bytes = s->completion_bytes,
                           .arena_bytes = s->arena_bytes,
                           .boot_epoch = 9};
    lk_wire_head(&w.head, LK_MSG_WELCOME, sizeof(w));
    lk_wire_send(f->socket, &w.head, f->memory.client_fds, LK_WELCOME_FDS);
    lk_channel_memory_sent(&f->memory);
    lk_ring_daemon_init(&f->ring, f->memory.submission, f->memory.completion, s->sq_entries,
                        s->cq_entries, s->submission_bytes);
    f->served = true;
    f->has_arena = false;
}

static void answer_pool(struct fake *f, const struct lk_msg_pool_get *get) {
    struct lk_refused no = {.error = -ESRCH, .reason = "there is no pool of this name"};
    struct lk_msg_pool m = {.index = f->pool_index,
                            .layers = shape.layers,
                            .kv_heads = shape.kv_heads,
                            .group = shape.group,
                            .head_dim = shape.head_dim,
                            .page_tokens = shape.page_tokens,
                            .rank = 8,
                            .dtype = LK_DTYPE_BF16,
                            .budget = 512,
                            .pages = 8,
                            .name = "on\033ly"};
    lk_wire_head(&no.head, LK_MSG_REFUSED, sizeof(no));
    lk_wire_head(&m.head, LK_MSG_POOL, sizeof(m));
    bool found = get->index == 0 || (get->index == LK_POOL_BY_NAME && !strcmp(get->name, "only"));
    lk_wire_send(f->socket, found ? &m.head : &no.head, NULL, 0);
}

static int text_file(const char *text) {
    int fd = memfd_create("text", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    ck_assert_int_eq(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    return fd;
}

static void answer_map(struct fake *f) {
    struct lk_msg_pool_mapped m = f->mapped;
    int fd = text_file("pages");
    ck_assert_int_eq(ftruncate(fd, f->map_bytes), 0);
    ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, f->map_seals), 0);
    lk_wire_head(&m.head, LK_MSG_POOL_MAPPED, sizeof(m));
    lk_wire_send(f->socket, &m.head, &fd, 1);
    close(fd);
}

static void answer_device_arena(struct fake *f, const struct lk_msg_device_arena *ask) {
    struct lk_msg_device_arena_made m = {.bytes = 2 * ask->bytes,
                                         .gpu = 3,
                                         .fences = f->fences,
                                         .fence_stride = LK_DEVICE_FENCE_STRIDE,
                                         .uuid = "sixteen bytes, 0"};
    struct lk_refused no = {.error = -EBUSY, .reason = "the connection has a device arena"};
    lk_wire_head(&no.head, LK_MSG_REFUSED, sizeof(no));
    if (f->has_arena) {
        lk_wire_send(f->socket, &no.head, NULL, 0);
        return;
    }
    f->has_arena = true;
    int fd = text_file("memory of a GPU");
    lk_wire_head(&m.head, LK_MSG_DEVICE_ARENA_MADE, sizeof(m));
    lk_wire_send(f->socket, &m.head, &fd, 1);
    close(fd);
}

static void answer_admin(struct fake *f, const struct lk_msg_admin *ask) {
    struct lk_msg_admin_reply m = {.bytes = 2};
    int fd = text_file("{}");
    bool known = !strcmp(ask->verb, "status");
    if (!known) {
        m.error = f->error;
        snprintf(m.reason, sizeof(m.reason), "verb \"%s\" is \033[2Junknown", ask->verb);
    }
    lk_wire_head(&m.head, LK_MSG_ADMIN_REPLY, sizeof(m));
    lk_wire_send(f->socket, &m.head, &fd, known ? 1 : 0);
    close(fd);
}

static void serve_socket(struct fake *f) {
    union {
        struct lk_message head;
        struct lk_hello hello;
        struct lk_msg_pool_get get;
        struct lk_msg_admin admin;
        struct lk_msg_device_arena device_arena;
        uint8_t bytes[LK_WIRE_BYTES_MAX];
    } m;
    char why[LK_REASON_BYTES];
    f->asked++;
    if (lk_wire_receive(f->socket, &m.head, sizeof(m), NULL, 0, why, sizeof(why))) {
        close(f->socket);
        f->socket = -1;
    } else if (m.head.type == LK_MSG_HELLO) {
        answer_hello(f, &m.hello);
    } else if (m.head.type == LK_MSG_POOL_GET) {
        answer_pool(f, &m.get);
    } else if (m.head.type == LK_MSG_POOL_MAP) {
        answer_map(f);
    } else if (m.head.type == LK_MSG_DEVICE_ARENA) {
        answer_device_arena(f, &m.device_arena);
    } else {
        answer_admin(f, &m.admin);
    }
}

static void answer_entry(struct fake *f, const struct lk_sqe *sqe) {
    struct lk_cqe cqe = {.user_data = sqe->user_data,
                         .op = sqe->op,
                         .value = HANDLE,
                         .rows = 1,
                         .bytes = sqe->desc_bytes,
                         .row = LK_ROW_WHOLE};
    if (f->manner == REFUSE)
        cqe = (struct lk_cqe){.user_data = sqe->user_data,
                              .op = sqe->op,
                              .row = 1,
                              .value = 17,
                              .limit = 16,
                              .reason = LK_REASON_POSITION,
                              .status = -EINVAL};
    if (f->manner == MISSAY)
        cqe.status = f->error;
    lk_ring_daemon_publish(&f->ring, &cqe);
    if (lk_ring_daemon_must_wake(&f->ring))
        lk_bell_ring(f->memory.bell);
}

static void answer_held(struct fake *f) {
    for (uint32_t i = 0; i < f->held_count; i++)
        answer_entry(f, &f->held[i]);
    f->held_count = 0;
}

static void take_entry(struct fake *f) {
    struct lk_refusal refusal;
    struct lk_sqe sqe;
    lk_ring_daemon_copy_sqe(&f->ring, 0, &sqe);
    if (lk_sqe_invalid(&sqe, f->memory.sizes.descriptor_bytes, &refusal))
        ck_abort_msg("the library sent a bad entry: reason %u", refusal.reason);
    pthread_mutex_lock(&f->lock);
    f->last = sqe;
    lk_ring_daemon_copy_desc(&f->ring, &sqe, f->last_desc);
    pthread_mutex_unlock(&f->lock);
    lk_ring_daemon_release(&f->ring, 1);
    if (f->manner == DIE) {
        lk_channel_memory_destroy(&f->memory);
        close(f->socket);
        f->socket = -1;
        f->served = false;
    } else if (f->manner == HOLD) {
        f->held[f->held_count++] = sqe;
    } else if (f->manner == BACKWARDS) {
        f->held[f->held_count++] = sqe;
        for (uint32_t i = f->held_count; f->held_count == 4 && i > 0; i--)
            answer_entry(f, &f->held[i - 1]);
        f->held_count %= 4;
    } else if (f->manner != SILENT) {
        answer_held(f); /* that it was another manner's turn may have been said just now */
        answer_entry(f, &sqe);
        if (f->manner == TWICE)
            answer_entry(f, &sqe);
    }
}

/* The descriptor taken last -> its operation. */
static uint16_t last_taken(void *desc, size_t bytes) {
    pthread_mutex_lock(&fake.lock);
    if (bytes)
        memcpy(desc, fake.last_desc, bytes);
    uint16_t op = fake.last.op;
    pthread_mutex_unlock(&fake.lock);
    return op;
}

static void release_held(struct fake *f) {
    if (f->manner == HOLD && f->held_ms && f->held_count && (f->held_ms -= 10) <= 0)
        f->manner = ANSWER;
    if (f->manner == ANSWER)
        answer_held(f);
    if (f->beats)
        f->memory.completion->heartbeat_ns++;
}

static void *fake_main(void *arg) {
    struct fake *f = arg;
    uint32_t count;
    while (!f->stop) {
        f->rounds++;
        bool mute = f->mute;
        struct pollfd fds[3] = {{.fd = mute ? -1 : f->listener, .events = POLLIN},
                                {.fd = mute ? -1 : f->socket, .events = POLLIN},
                                {.fd = f->served ? f->memory.bell : -1, .events = POLLIN}};
        bool ready = f->served && f->manner != DEAF && lk_ring_daemon_arm(&f->ring);
        poll(fds, 3, ready ? 0 : 10);
        if (fds[0].revents)
            f->socket = accept(f->listener, NULL, NULL);
        if (f->socket >= 0 && fds[1].revents)
            serve_socket(f);
        if (!f->served || f->manner == DEAF)
            continue;
        lk_ring_daemon_disarm(&f->ring);
        release_held(f);
        if (fds[2].revents)
            lk_bell_drain(f->memory.bell);
        while (f->served && lk_ring_daemon_peek(&f->ring, &count) == 0 && count)
            take_entry(f);
    }
    return NULL;
}

static void start(void) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memset(&fake, 0, sizeof(fake));
    limit_ms = 0;
    fake.socket = -1;
    fake.major = LK_ABI_MAJOR;
    fake.minor = LK_ABI_MINOR;
    fake.fences = LK_DEVICE_FENCES;
    fake.map_bytes = 4096;
    fake.map_seals = F_SEAL_SHRINK;
    fake.mapped =
        (struct lk_msg_pool_mapped){.bytes = 4096, .page_bytes = 256, .layer_bytes = 2048};
    fake.error = -EACCES;
    fake.memory.bell = -1;
    pthread_mutex_init(&fake.lock, NULL);
    snprintf(fake.folder, sizeof(fake.folder), "/tmp/liblocks-test-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(fake.folder));
    snprintf(fake.path, sizeof(fake.path), "%s/socket", fake.folder);
    memcpy(address.sun_path, fake.path, strlen(fake.path));
    fake.listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(bind(fake.listener, (struct sockaddr *)&address, sizeof(address)), 0);
    ck_assert_int_eq(listen(fake.listener, 4), 0);
    ck_assert_int_eq(pthread_create(&fake.thread, NULL, fake_main, &fake), 0);
}

static void stop(void) {
    locks_close(l);
    l = NULL;
    fake.stop = true;
    pthread_join(fake.thread, NULL);
    if (fake.served)
        lk_channel_memory_destroy(&fake.memory);
    close(fake.listener);
    unlink(fake.path);
    rmdir(fake.folder);
}

static void open_as(enum manner manner, uint32_t spin_us) {
    struct locks_options o = {.size = sizeof(o),
                              .socket = fake.path,
                              .sq_entries = ENTRIES,
                              .arena_bytes = 1 << 20,
                              .spin_us = spin_us,
                              .limit_ms = limit_ms};
    fake.manner = manner;
    int r = locks_connect(&o, &l);
    ck_assert_msg(r == 0, "%s", locks_error(NULL));
    ck_assert_int_eq(locks_pool(l, NULL, &pool), 0);
}

/* Of the calls from now on: short where the daemon is silent on purpose, long where it has to
 * answer, which beside much other work takes its time. */
static void set_limit(uint32_t ms) {
    l->limit_ns = ms * LK_CLIENT_NS_A_MS;
}

/* Until all is over that the daemon was at. */
static void await_round(void) {
    unsigned round = fake.rounds;
    for (int ms = 0; fake.rounds == round && ms < PATIENCE; ms++)
        usleep(1000);
    ck_assert_uint_ne(fake.rounds, round);
}

/* Until the submission taken last is of the operation. */
static void await_taken(uint16_t op) {
    for (int ms = 0; last_taken(NULL, 0) != op && ms < PATIENCE; ms++)
        usleep(1000);
    ck_assert_uint_eq(last_taken(NULL, 0), op);
}

static void expect_error(const char *words) {
    ck_assert_msg(strstr(locks_error(l), words) != NULL, "%s", locks_error(l));
}

/* ---- connecting ---- */

/* Errors that are none: no caller could tell them from success, or turn their sign. */
static const int32_t no_errors[] = {1, INT32_MAX, -4096, INT32_MIN};

START_TEST(refusals_of_connect) {
    struct locks_options o = {.size = sizeof(o), .socket = "/tmp/no/such/socket"};
    struct locks *untouched = (struct locks *)&fake;
    ck_assert_int_eq(locks_connect(&o, &untouched), -ENOENT);
    ck_assert_ptr_eq(untouched, &fake);
    expect_error("/tmp/no/such/socket");
    char long_path[200] = {0};
    memset(long_path, 'a', sizeof(long_path) - 1);
    o.socket = long_path;
    ck_assert_int_eq(locks_connect(&o, &untouched), -EINVAL);
    expect_error("199 bytes, it may have 1 to 107");
    o.socket = "";
    ck_assert_int_eq(locks_connect(&o, &untouched), -EINVAL);
    expect_error("0 bytes, it may have 1 to 107");
    o.socket = NULL;
    ck_assert_int_eq(setenv("LOCKSD_SOCKET", "", 1), 0); /* as good as unset */
    if (locks_connect(&o, &untouched))
        expect_error("cannot connect to " LK_SOCKET_PATH);
    ck_assert_int_eq(setenv("LOCKSD_SOCKET", "/tmp/no/such/variable", 1), 0);
    ck_assert_int_eq(locks_connect(&o, &untouched), -ENOENT);
    expect_error("/tmp/no/such/variable");
    ck_assert_int_eq(unsetenv("LOCKSD_SOCKET"), 0);
    o.socket = fake.path;
    o.size = 0;
    ck_assert_int_eq(locks_connect(&o, &untouched), -EINVAL);
    expect_error("size");
    o.size = sizeof(o);
    fake.refuse = "user 1000 is not in group locks";
    ck_assert_int_eq(locks_connect(&o, &untouched), -EACCES);
    expect_error("user 1000 is not in group locks");
    for (size_t i = 0; i < sizeof(no_errors) / sizeof(*no_errors); i++) {
        fake.error = no_errors[i];
        fake.refuse = "\033]0;title\007 \xc2\x9b\x31m \x9b \x7f \xc3\xa9\n";
        ck_assert_int_eq(locks_connect(&o, &untouched), -EPROTO);
        ck_assert_str_eq(locks_error(NULL), "?]0;title? ??1m ? ? \xc3\xa9?");
    }
}
END_TEST

/* Who is refused at the door is hung up on with its greeting unread. The kernel says so before it
 * hands out the refusal, which was there before. */
START_TEST(a_refusal_is_read_though_the_greeting_was_not) {
    struct lk_refused no = {.error = -EACCES, .reason = "user 1000 is not in group locks"};
    struct lk_welcome welcome;
    int pair[2], fds[LK_WELCOME_FDS];
    char why[LK_REASON_BYTES] = "";
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    ck_assert_int_eq(send(pair[0], "hello", 5, 0), 5);
    lk_wire_head(&no.head, LK_MSG_REFUSED, sizeof(no));
    ck_assert_int_eq(lk_wire_send(pair[1], &no.head, NULL, 0), 0);
    close(pair[1]);
    for (int i = 0; i < 2; i++) {
        int r = lk_client_answer(pair[0], LK_CLIENT_FOREVER, LK_MSG_WELCOME, &welcome.head,
                                 sizeof(welcome), fds, LK_WELCOME_FDS, why, sizeof(why));
        ck_assert_msg(r == (i ? -ECONNRESET : -EACCES), "%d: %s", r, why);
        ck_assert_str_eq(why, i ? "the daemon is gone: it closed the connection" : no.reason);
    }
    close(pair[0]);
}
END_TEST

START_TEST(another_version_is_refused_by_both_names) {
    struct locks_options o = {.size = sizeof(o), .socket = fake.path};
    fake.major = 3;
    ck_assert_int_eq(locks_connect(&o, &l), -EPROTO);
    expect_error("3.1");
    expect_error("1.1");
}
END_TEST

START_TEST(pools) {
    const void *pages;
    uint64_t layer_bytes, page_bytes;
    open_as(ANSWER, 0);
    ck_assert_int_eq(locks_pool_count(l), 1);
    ck_assert_uint_eq(pool.head_dim, 64);
    ck_assert_str_eq(pool.name, "on?ly");
    ck_assert_int_eq(locks_pool(l, "only", &pool), 0);
    ck_assert_int_eq(locks_pool(l, "other", &pool), -ESRCH);
    expect_error("no pool of this name");
    ck_assert_int_eq(locks_pool_at(l, 1, &pool), -ESRCH);
    expect_error("pool 1 does not exist, there are 1");
    ck_assert_int_eq(locks_pool_map(l, 0, &pages, &layer_bytes, &page_bytes), 0);
    ck_assert_str_eq(pages, "pages");
    ck_assert_uint_eq(layer_bytes, 2048);
    ck_assert_int_eq(locks_pool_map(l, 5, &pages, &layer_bytes, &page_bytes), -ESRCH);
}
END_TEST

START_TEST(a_pool_shorter_than_it_is_said_to_be) {
    const void *pages;
    uint64_t layer_bytes, page_bytes;
    fake.map_bytes = 4095;
    open_as(ANSWER, 0);
    ck_assert_int_eq(locks_pool_map(l, 0, &pages, &layer_bytes, &page_bytes), -EPROTO);
    expect_error("the pages of pool 0 have 4095 bytes, not 4096");
}
END_TEST

/* Where a pool's pages would be read outside of its memory, at once or once it has shrunk. */
START_TEST(pools_that_lie) {
    static const struct lk_msg_pool_mapped lies[] = {
        {.bytes = 4096, .page_bytes = 257, .layer_bytes = 2048},
        {.bytes = 4096, .page_bytes = 256, .layer_bytes = 2049},
        {.bytes = 4096, .page_bytes = UINT64_C(1) << 61, .layer_bytes = 2048},
        {.bytes = 4096, .page_bytes = 256, .layer_bytes = UINT64_C(1) << 63},
        {.bytes = 0, .page_bytes = 256, .layer_bytes = 2048},
    };
    const void *pages;
    uint64_t layer_bytes, page_bytes;
    open_as(ANSWER, 0);
    for (size_t i = 0; i < sizeof(lies) / sizeof(*lies); i++) {
        fake.mapped = lies[i];
        ck_assert_int_eq(locks_pool_map(l, 0, &pages, &layer_bytes, &page_bytes), -EPROTO);
        expect_error("the pages of pool 0 go beyond its");
    }
    fake.map_seals = F_SEAL_GROW;
    ck_assert_int_eq(locks_pool_map(l, 0, &pages, &layer_bytes, &page_bytes), -EPROTO);
    expect_error("the pages of pool 0 are not sealed");
    fake.pool_index = 1;
    ck_assert_int_eq(locks_pool(l, "only", &pool), -EPROTO);
    expect_error("the daemon answers with pool 1 of 1");
}
END_TEST

/* A flight that is free does not become free again: the stack of free ones has room for each
 * once. */
START_TEST(a_completion_too_many) {
    struct locks_completion done;
    locks_handle handle;
    int r = -EAGAIN;
    open_as(TWICE, 0);
    ck_assert_int_eq(locks_sequence_create(l, 0, &handle), 0);
    for (int ms = 0; ms < PATIENCE && r == -EAGAIN; ms++) {
        r = locks_try(l, &done);
        usleep(1000);
    }
    ck_assert_int_eq(r, -EPROTO);
    expect_error("the daemon completed submission");
    ck_assert_int_eq(locks_sequence_create(l, 0, &handle), -ECONNRESET);
}
END_TEST

START_TEST(completions_with_errors_that_are_none) {
    locks_handle handle;
    open_as(MISSAY, 0);
    for (size_t i = 0; i < sizeof(no_errors) / sizeof(*no_errors); i++) {
        fake.error = no_errors[i];
        ck_assert_int_eq(locks_sequence_create(l, 0, &handle), -EPROTO);
        expect_error("sequence create: Protocol error");
    }
}
END_TEST

START_TEST(administration) {
    char *json = NULL, why[200] = "";
    ck_assert_int_eq(locks_admin(fake.path, "status", &json, why, sizeof(why)), 0);
    ck_assert_str_eq(json, "{}");
    free(json);
    json = NULL;
    ck_assert_int_eq(locks_admin(fake.path, "dance", &json, why, sizeof(why)), -EACCES);
    ck_assert_str_eq(why, "verb \"dance\" is ?[2Junknown");
    for (size_t i = 0; i < sizeof(no_errors) / sizeof(*no_errors); i++) {
        fake.error = no_errors[i];
        ck_assert_int_eq(locks_admin(fake.path, "dance", &json, why, sizeof(why)), -EPROTO);
    }
    fake.error = 0;
    ck_assert_int_eq(locks_admin(fake.path, "dance", &json, why, sizeof(why)), -EPROTO);
    ck_assert_str_eq(why, "the daemon's answer comes without its text");
    ck_assert_ptr_null(json);
    ck_assert_int_eq(locks_admin("/tmp/no/such", "status", &json, NULL, 0), -ENOENT);
}
END_TEST

/* ---- arena ---- */

START_TEST(arena_pieces) {
    open_as(ANSWER, 0);
    uint8_t *whole = locks_alloc(l, 1 << 20);
    ck_assert_ptr_nonnull(whole);
    ck_assert_uint_eq((uintptr_t)whole % 64, 0);
    ck_assert_ptr_null(locks_alloc(l, 1));
    locks_free(l, whole);
    uint8_t *a = locks_alloc(l, 1), *b = locks_alloc(l, 0), *c = locks_alloc(l, 65);
    ck_assert_int_eq(b - a, 64);
    ck_assert_int_eq(c - b, 64);
    locks_free(l, b);
    locks_free(l, b); /* twice: said, not done */
    expect_error("or was freed");
    ck_assert_ptr_eq(locks_alloc(l, 64), b); /* first fit */
    ck_assert_ptr_null(locks_alloc(l, 1 << 20));
    expect_error("missing: 256");
    ck_assert_ptr_null(locks_alloc(l, SIZE_MAX));
    locks_free(l, a + 64 * 100);
    locks_free(l, NULL);
    locks_free(l, a);
    locks_free(l, c);
    locks_free(l, b); /* all merge */
    ck_assert_ptr_eq(locks_alloc(l, 1 << 20), whole);
}
END_TEST

/* Random turns against a map of lines. */
START_TEST(arena_random) {
    static uint8_t owner[1 << 14];
    uint8_t *held[200] = {0}, *base;
    size_t sizes[200];
    open_as(ANSWER, 0);
    base = locks_alloc(l, 64);
    locks_free(l, base);
    srand(3);
    for (int n = 0; n < 20000; n++) {
        int i = rand() % 200;
        if (held[i]) {
            memset(owner + (held[i] - base) / 64, 0, sizes[i]);
            locks_free(l, held[i]);
            held[i] = NULL;
            continue;
        }
        sizes[i] = 1 + (size_t)rand() % 200;
        held[i] = locks_alloc(l, sizes[i] * 64 - (size_t)rand() % 64);
        for (size_t k = 0; held[i] && k < sizes[i]; k++)
            if (owner[(held[i] - base) / 64 + (ptrdiff_t)k]++)
                ck_abort_msg("two pieces overlap");
    }
    for (int i = 0; i < 200; i++)
        locks_free(l, held[i]);
    ck_assert_ptr_eq(locks_alloc(l, 1 << 20), base);
}
END_TEST

/* ---- steps ---- */

static struct locks_row good_row(void) {
    return (struct locks_row){.sequence = HANDLE,
                              .position = 3,
                              .layer = 1,
                              .tokens = 1,
                              .q = locks_alloc(l, 512),
                              .k = locks_alloc(l, 256),
                              .v = locks_alloc(l, 256),
                              .out = locks_alloc(l, 1024)};
}

START_TEST(defaults_of_a_step) {
    open_as(ANSWER, 0);
    struct locks_step step = {0};
    struct locks_row row = good_row();
    struct {
        struct lk_step_desc head;
        struct lk_row_desc row;
    } d;
    ck_assert_int_eq(locks_decode(l, &step, &row, 1), 0);
    ck_assert_uint_eq(last_taken(&d, sizeof(d)), LK_OP_DECODE);
    ck_assert_int_eq(d.head.sampled, -1);
    ck_assert_uint_eq(d.head.sink_pages, 1);
    ck_assert_uint_eq(d.head.recent_pages, 1);
    ck_assert_uint_eq(d.head.results, LK_NONE);
    ck_assert_uint_eq(d.row.handle, HANDLE);
    ck_assert_uint_eq(d.row.position, 3);
    ck_assert_uint_eq(d.row.lse, LK_NONE);
    ck_assert_uint_eq(d.row.k - d.row.q, 512);
    step.sampled = LOCKS_SAMPLED_NONE;
    step.sink_pages = LOCKS_NO_SINK;
    step.timing = locks_alloc(l, sizeof(*step.timing));
    ck_assert_int_eq(locks_append(l, &step, &row, 1), 0);
    ck_assert_uint_eq(last_taken(&d, sizeof(d)), LK_OP_APPEND);
    ck_assert_int_eq(d.head.sampled, 0);
    ck_assert_uint_eq(d.head.sink_pages, 0);
    ck_assert_uint_ne(d.head.timing, LK_NONE);
    ck_assert_int_eq(locks_decode(l, &step, NULL, 0), 0); /* the empty step */
    last_taken(&d, sizeof(d.head));
    ck_assert_uint_eq(d.head.rows, 0);
}
END_TEST

START_TEST(each_call_submits_its_operation) {
    open_as(ANSWER, 0);
    struct locks_step step = {0};
    struct locks_row row = good_row();
    struct lk_step_desc head;
    ck_assert_int_eq(locks_append(l, &step, &row, 1), 0);
    ck_assert_uint_eq(last_taken(&head, sizeof(head)), LK_OP_APPEND);
    ck_assert_int_eq(locks_decode(l, &step, &row, 1), 0);
    ck_assert_uint_eq(last_taken(&head, sizeof(head)), LK_OP_DECODE);
    ck_assert_int_eq(locks_attend(l, &step, &row, 1), 0);
    ck_assert_uint_eq(last_taken(&head, sizeof(head)), LK_OP_ATTEND);
    row.position = 0;
    row.slots = locks_alloc(l, sizeof(*row.slots));
    ck_assert_int_eq(locks_write(l, &step, &row, 1), 0);
    ck_assert_uint_eq(last_taken(&head, sizeof(head)), LK_OP_WRITE);
    ck_assert_int_eq(locks_attend_table(l, &step, &row, 1), 0);
    ck_assert_uint_eq(last_taken(&head, sizeof(head)), LK_OP_ATTEND_TABLE);
}
END_TEST

#define EXPECT_WRONG(change, words)                                                                \
    do {                                                                                           \
        struct locks_step step = {0};                                                              \
        struct locks_row rows[2] = {good, good};                                                   \
        change;                                                                                    \
        ck_assert_int_eq(locks_decode(l, &step, rows, 2), -EINVAL);                                \
        expect_error(words);                                                                       \
    } while (0)

/* ---- clients on the GPU ---- */

static int submit_fenced(const struct locks_row *row, struct locks_fences f) {
    struct locks_step step = {0};
    return locks_submit_fenced(l, LK_OP_DECODE, &step, row, 1, &f, 77);
}

START_TEST(a_device_arena_and_its_fences) {
    static _Alignas(64) uint8_t mapped[1 << 16]; /* stands for the device's addresses */
    struct {
        struct lk_step_desc head;
        struct lk_row_desc row;
    } d;
    struct locks_completion done;
    struct locks_device_arena a;
    char text[32] = "";
    open_as(ANSWER, 0);
    struct locks_row row = good_row();
    ck_assert_int_eq(locks_device_arena_mapped(l, mapped), -EINVAL);
    ck_assert_int_eq(submit_fenced(&row, (struct locks_fences){1, 0, 1, 0}), -EINVAL);
    expect_error("fence number 1 does not exist, the connection has 0");
    ck_assert_int_eq(locks_device_arena(l, sizeof(mapped) / 2, &a), 0);
    ck_assert_uint_eq(a.bytes, sizeof(mapped));
    ck_assert_uint_eq(a.gpu, 3);
    ck_assert_int_eq(memcmp(a.uuid, "sixteen bytes, 0", 16), 0);
    ck_assert_int_eq(pread(a.fd, text, sizeof(text), 0), 15);
    close(a.fd);
    row.q = mapped + 8192;
    ck_assert_int_eq(submit_fenced(&row, (struct locks_fences){0}), -EINVAL); /* not mapped yet */
    expect_error("q is not in the arena");
    ck_assert_int_eq(locks_device_arena_mapped(l, mapped + 1), -EINVAL);
    ck_assert_int_eq(locks_device_arena_mapped(l, mapped), 0);
    row.out = (float *)(mapped + 16384);
    row.lse = (float *)(mapped + 32768);
    ck_assert_int_eq(submit_fenced(&row, (struct locks_fences){3, 64, 5, 6}), 0);
    ck_assert_int_eq(locks_wait(l, -1, &done), 0);
    ck_assert_uint_eq(done.user_data, 77);
    last_taken(&d, sizeof(d));
    ck_assert_uint_eq(d.row.q, LK_DEVICE_BASE + 8192);
    ck_assert_uint_eq(d.row.out, LK_DEVICE_BASE + 16384);
    ck_assert_uint_eq(d.row.lse, LK_DEVICE_BASE + 32768);
    ck_assert_uint_lt(d.row.k, 1 << 20);
    ck_assert_uint_eq(fake.last.wait_fence, 3);
    ck_assert_uint_eq(fake.last.signal_fence, 64);
    ck_assert_uint_eq(fake.last.wait_value, 5);
    ck_assert_uint_eq(fake.last.signal_value, 6);
    row.q = mapped + 8192 - 64;
    ck_assert_int_eq(submit_fenced(&row, (struct locks_fences){0}), -EINVAL);
    expect_error("row 0: payload at device arena offset 8128 lies among the fences");
    row.q = mapped + sizeof(mapped) - 64;
    ck_assert_int_eq(submit_fenced(&row, (struct locks_fences){0}), -EINVAL);
    expect_error("queries at device arena offset 65472 reach beyond the device arena of 65536");
    row = good_row();
    ck_assert_int_eq(submit_fenced(&row, (struct locks_fences){0, 65, 0, 0}), -EINVAL);
    expect_error("fence number 65 does not exist, the connection has 64");
    ck_assert_int_eq(submit_fenced(&row, (struct locks_fences){0, 1, 9, 1}), -EINVAL);
    expect_error("a fence has a value, 9, and no number");
}
END_TEST

START_TEST(an_older_daemon_has_no_device_arena) {
    struct locks_device_arena a = {.fd = 12345};
    fake.minor = 0;
    open_as(ANSWER, 0);
    ck_assert_int_eq(locks_device_arena(l, 1 << 20, &a), -EPROTO);
    expect_error("the daemon speaks protocol version 1.0, device arenas need 1.1");
    locks_close(l);
    fake.minor = LK_ABI_MINOR;
    fake.fences = 7;
    open_as(ANSWER, 0);
    ck_assert_int_eq(locks_device_arena(l, 1 << 20, &a), -EPROTO);
    expect_error("7 fences");
    ck_assert_int_eq(a.fd, 12345);
}
END_TEST

START_TEST(wrong_arguments_never_reach_the_daemon) {
    open_as(DEAF, 0);
    struct locks_row good = good_row();
    static float elsewhere[64];
    EXPECT_WRONG(rows[1].q = NULL, "row 1: q is NULL");
    EXPECT_WRONG(rows[0].out = elsewhere, "row 0: out is not in the arena, it lies ");
    EXPECT_WRONG(rows[1].k = fake.memory.arena, "row 1: k is not in the arena");
    EXPECT_WRONG(rows[0].v = (const uint8_t *)good.v + 32, "not aligned to 64");
    EXPECT_WRONG(rows[1].tokens = 5000, "row 1: ");
    EXPECT_WRONG(rows[0].layer = 2, "row 0: layer 2 does not exist, the pool has 2");
    EXPECT_WRONG(rows[0].sequence = 0, "row 0: handle 0");
    EXPECT_WRONG(step.budget = 8, "a budget of 8 tokens is smaller than a page, 16 tokens");
    EXPECT_WRONG(step.mass_target = NAN, "mass_target nan");
    EXPECT_WRONG(step.scan = 65536 + 1, "scan mode 65537 is unknown, modes are 0 to 4");
    EXPECT_WRONG(step.scan = 5, "scan mode 5 is unknown, modes are 0 to 4");
    EXPECT_WRONG(step.sampled = -5, "sampled is -5; it may be a number of pages, 0 (the default) "
                                    "or LOCKS_SAMPLED_NONE, -1");
    EXPECT_WRONG(step.sampled = INT32_MIN, "sampled is -2147483648");
    EXPECT_WRONG(step.sink_pages = LOCKS_NO_SINK - 1, "4294967294 sink pages are more than ");
    EXPECT_WRONG(step.recent_pages = UINT32_MAX, "4294967295 recent pages are not between 1");
    EXPECT_WRONG(step.reserved = 1, "reserved");
    EXPECT_WRONG(step.results = (void *)elsewhere, "results is not in the arena");
    struct locks_step step = {.pool = 4};
    ck_assert_int_eq(locks_decode(l, &step, &good, 1), -ESRCH);
    expect_error("pool 4 does not exist, there are 1");
    step.pool = 0;
    ck_assert_int_eq(locks_decode(l, &step, &good, 257), -EINVAL);
    expect_error("257 rows");
    ck_assert_int_eq(locks_decode(l, NULL, &good, 1), -EINVAL);
    ck_assert_int_eq(locks_decode(l, &step, NULL, 1), -EINVAL);
    ck_assert_int_eq(locks_submit(l, LK_OP_TABLES, &step, &good, 1, 0), -EINVAL);
    ck_assert_int_eq(locks_lease_open(l, 0, 0, &good.sequence), -EINVAL);
    ck_assert_int_eq(locks_sequence_free(l, 0), -EINVAL);
    ck_assert_int_eq(locks_wait(l, -1, &(struct locks_completion){0}), -EINVAL);
    expect_error("nothing is in flight");
    ck_assert_int_eq(locks_sequence_create(l, 0, NULL), -EINVAL); /* nobody could free them */
    ck_assert_int_eq(locks_sequence_fork(l, 1, NULL), -EINVAL);
    ck_assert_int_eq(locks_lease_open(l, 0, 4, NULL), -EINVAL);
    expect_error("there is no place for the handle: it is NULL");
    ck_assert_uint_eq(fake.memory.submission->sq_tail, UINT32_MAX - 2); /* nothing was published */
}
END_TEST

START_TEST(refusals_of_the_daemon) {
    open_as(REFUSE, 0);
    struct locks_step step = {0};
    struct locks_row rows[2] = {good_row(), good_row()};
    struct locks_completion done;
    locks_handle handle = 5;
    ck_assert_int_eq(locks_decode(l, &step, rows, 2), -EINVAL);
    expect_error("decode: row 1: position 17 is not the layer's length, 16");
    ck_assert_int_eq(locks_sequence_create(l, 0, &handle), -EINVAL);
    ck_assert_uint_eq(handle, 5);
    ck_assert_int_eq(locks_submit(l, LK_OP_APPEND, &step, rows, 1, 44), 0);
    ck_assert_int_eq(locks_wait(l, -1, &done), 0);
    ck_assert_int_eq(done.status, -EINVAL);
    ck_assert_uint_eq(done.user_data, 44);
    expect_error("append: row 1: position 17");
}
END_TEST

START_TEST(objects_and_lists) {
    open_as(ANSWER, 0);
    struct lk_object_desc d;
    locks_handle handle = 0;
    ck_assert_int_eq(locks_sequence_create(l, 0, &handle), 0);
    ck_assert_uint_eq(handle, HANDLE);
    ck_assert_int_eq(locks_sequence_truncate(l, handle, 77), 0);
    last_taken(&d, sizeof(d));
    ck_assert_uint_eq(d.length, 77);
    uint32_t pairs[3][2] = {{1, 2}, {3, 4}, {5, 6}};
    ck_assert_int_eq(locks_copy_pages(l, handle, pairs, 3), 0);
    last_taken(&d, sizeof(d));
    ck_assert_uint_eq(d.count, 3);
    ck_assert_int_eq(memcmp(fake.memory.arena + d.list, pairs, sizeof(pairs)), 0);
    ck_assert_int_eq(locks_invalidate(l, handle, NULL, 2), -EINVAL);
    uint32_t *pages = locks_alloc(l, 64);
    struct locks_table tables[2] = {{pages, 3, 40}, {NULL, 0, 0}};
    ck_assert_int_eq(locks_tables(l, handle, 2, tables, 2), 0);
    struct {
        struct lk_tables_desc head;
        struct lk_table_desc first;
    } t;
    last_taken(&t, sizeof(t));
    ck_assert_uint_eq(t.head.set, 2);
    ck_assert_uint_eq(t.first.length, 40);
    tables[1] = (struct locks_table){pairs[0], 1, 1};
    ck_assert_int_eq(locks_tables(l, handle, 2, tables, 2), -EINVAL);
    expect_error("row 1: pages is not in the arena");
    ck_assert_int_eq(locks_tables(l, handle, 2, NULL, 2), -EINVAL);
    expect_error("tables: the tables are NULL and their count 2");
    ck_assert_int_eq(locks_tables(l, handle, 2, NULL, 0), 0);
    ck_assert_int_eq(locks_tables(l, handle, 2, tables, UINT32_MAX), -EINVAL);
    expect_error("4294967295 rows");
    ck_assert_int_eq(locks_copy_pages(l, handle, pairs, UINT32_MAX), -EINVAL); /* and not read */
    expect_error("a list of 4294967295 entries is longer than 65536");
    ck_assert_int_eq(locks_invalidate(l, handle, pages, LK_LIST_MAX + 1), -EINVAL);
}
END_TEST

/* ---- completions ---- */

START_TEST(blocking_and_waiting_mix) {
    struct locks_completion done;
    struct locks_step step = {0};
    open_as(BACKWARDS, 0);
    for (uint64_t n = 0; n < 3; n++)
        ck_assert_int_eq(locks_submit_barrier(l, 100 + n), 0);
    ck_assert_int_eq(locks_try(l, &done), -EAGAIN);
    ck_assert_int_eq(locks_decode(l, &step, NULL, 0), 0); /* the fourth, answered first */
    for (uint64_t n = 3; n-- > 0;) {
        ck_assert_int_eq(locks_wait(l, -1, &done), 0);
        ck_assert_uint_eq(done.user_data, 100 + n);
        ck_assert_uint_eq(done.op, LK_OP_BARRIER);
    }
    ck_assert_int_eq(locks_wait(l, 0, &done), -EINVAL);
}
END_TEST

START_TEST(a_full_ring_is_said) {
    struct locks_completion done;
    uint64_t n = 0;
    open_as(DEAF, 0);
    while (locks_submit_barrier(l, n) == 0)
        n++;
    ck_assert_uint_eq(n, ENTRIES);
    expect_error("the ring is full");
    ck_assert_int_eq(locks_wait(l, 20, &done), -ETIMEDOUT);
    fake.manner = ANSWER;
    for (uint64_t i = 0; i < n; i++) {
        ck_assert_int_eq(locks_wait(l, -1, &done), 0);
        ck_assert_uint_eq(done.user_data, i);
    }
    ck_assert_int_eq(locks_submit_barrier(l, n), 0);
    ck_assert_int_eq(locks_wait(l, -1, &done), 0);
}
END_TEST

/* An application that submits and never reads: at some point it is told, and then loses nothing. */
START_TEST(unread_completions_are_kept) {
    struct locks_completion done;
    uint64_t n = 0;
    open_as(ANSWER, 0);
    for (int ms = 0; n < 3 * ENTRIES && ms < PATIENCE; ms++, usleep(1000))
        n += locks_submit_barrier(l, n) == 0;
    for (int quiet = 0; quiet < 50; quiet++, usleep(2000))
        n += locks_submit_barrier(l, n) == 0;
    ck_assert_uint_eq(n, 3 * ENTRIES);
    for (uint64_t i = 0; i < n; i++) {
        ck_assert_int_eq(locks_wait(l, -1, &done), 0);
        ck_assert_uint_eq(done.user_data, i);
    }
}
END_TEST

START_TEST(event_loops) {
    struct locks_completion done;
    open_as(ANSWER, 0);
    struct pollfd fd = {.fd = locks_fd(l), .events = POLLIN};
    for (uint64_t n = 0; n < 500; n++) {
        ck_assert_int_eq(locks_submit_barrier(l, n), 0);
        int r;
        while ((r = locks_try(l, &done)) == -EAGAIN)
            if (!locks_arm(l))
                ck_assert_int_eq(poll(&fd, 1, PATIENCE), 1);
        ck_assert_int_eq(r, 0);
        ck_assert_uint_eq(done.user_data, n);
    }
    ck_assert_int_eq(locks_submit_barrier(l, 7), 0);
    ck_assert_int_eq(locks_wait(l, -1, &done), 0);
    ck_assert_int_eq(locks_submit_barrier(l, 8), 0);
    ck_assert_int_eq(locks_submit_barrier(l, 9), 0);
    ck_assert_int_eq(locks_sequence_free(l, HANDLE), 0); /* keeps 8 and 9 */
    ck_assert_int_eq(locks_arm(l), 1);
}
END_TEST

/* _i: spins for a second, or sleeps at once. */
START_TEST(a_dead_daemon_is_seen) {
    struct locks_completion done;
    locks_handle handle;
    open_as(DIE, _i ? 1 : 1000000);
    ck_assert_int_eq(locks_submit_barrier(l, 0), 0);
    ck_assert_int_eq(locks_wait(l, -1, &done), -ECONNRESET);
    expect_error("the daemon is gone");
    ck_assert_int_eq(locks_sequence_create(l, 0, &handle), -ECONNRESET);
    ck_assert_int_eq(locks_try(l, &done), -ECONNRESET);
    ck_assert_int_eq(locks_pool(l, NULL, &pool), -ECONNRESET);
    ck_assert_int_eq(locks_arm(l), 1);
}
END_TEST

/* By who tries and tries, too; what had been completed comes first. */
START_TEST(a_dead_daemon_is_seen_by_trying) {
    struct locks_completion done;
    int r = -EAGAIN;
    open_as(ANSWER, 0);
    ck_assert_int_eq(locks_submit_barrier(l, 7), 0);
    for (int ms = 0; !lk_ring_client_peek(&l->ring) && ms < PATIENCE; ms++)
        usleep(1000);
    fake.manner = DIE;
    ck_assert_int_eq(locks_submit_barrier(l, 8), 0);
    for (int ms = 0; fake.socket >= 0 && ms < PATIENCE; ms += 10)
        usleep(10000);
    ck_assert_int_eq(locks_try(l, &done), 0);
    ck_assert_uint_eq(done.user_data, 7);
    for (int i = 0; i < 1024 && r == -EAGAIN; i++)
        r = locks_try(l, &done);
    ck_assert_int_eq(r, -ECONNRESET);
    expect_error("the daemon is gone");
}
END_TEST

START_TEST(time_runs_out) {
    struct locks_completion done;
    struct timespec a, b;
    open_as(SILENT, 0);
    ck_assert_int_eq(locks_submit_barrier(l, 0), 0);
    clock_gettime(CLOCK_MONOTONIC, &a);
    ck_assert_int_eq(locks_wait(l, 50, &done), -ETIMEDOUT);
    ck_assert_int_eq(locks_wait(l, 0, &done), -ETIMEDOUT);
    clock_gettime(CLOCK_MONOTONIC, &b);
    double ms = 1e3 * (double)(b.tv_sec - a.tv_sec) + 1e-6 * (double)(b.tv_nsec - a.tv_nsec);
    ck_assert_double_ge(ms, 50);
    ck_assert_double_le(ms, PATIENCE);
}
END_TEST

/* ---- a daemon that stays and says nothing ---- */

START_TEST(the_limit_is_as_asked_for) {
    static const struct {
        uint32_t ms;
        uint64_t ns;
    } limits[] = {{0, UINT64_C(30000000000)},
                  {45678, UINT64_C(45678000000)},
                  {LOCKS_FOREVER, LK_CLIENT_FOREVER}};
    for (size_t i = 0; i < sizeof(limits) / sizeof(*limits); i++) {
        limit_ms = limits[i].ms;
        open_as(ANSWER, 0);
        ck_assert_uint_eq(l->limit_ns, limits[i].ns);
        locks_close(l);
        l = NULL;
    }
}
END_TEST

START_TEST(a_call_that_is_late) {
    struct locks_completion done;
    struct locks_step step = {0};
    locks_handle handle = 5;
    open_as(HOLD, _i ? 1 : 200000);
    set_limit(60);
    ck_assert_int_eq(locks_late(l, 0, &handle), -EINVAL);
    expect_error("no call is late");
    ck_assert_int_eq(locks_sequence_create(l, 0, &handle), -ETIMEDOUT);
    expect_error("sequence create: no answer: nothing was heard of the daemon for 60 ms "
                 "(locks_options.limit_ms), it is stopped or hangs; locks_late() waits on");
    ck_assert_int_eq(locks_wait(l, -1, &done), -EINVAL); /* it is nobody else's */
    expect_error("nothing is in flight but a call that is late");
    ck_assert_int_eq(locks_decode(l, &step, NULL, 0), -EBUSY);
    expect_error("decode: the sequence create before is late");
    ck_assert_int_eq(locks_submit_barrier(l, 44), 0);
    ck_assert_int_eq(locks_wait(l, 20, &done), -ETIMEDOUT);
    expect_error("no completion came within 20 ms");
    ck_assert_int_eq(locks_late(l, 20, &handle), -ETIMEDOUT);
    expect_error("sequence create: late, and still not answered after 20 ms more");
    ck_assert_uint_eq(handle, 5);
    fake.manner = ANSWER;
    ck_assert_int_eq(locks_wait(l, -1, &done), 0);
    ck_assert_uint_eq(done.user_data, 44);
    ck_assert_uint_eq(done.op, LK_OP_BARRIER);
    ck_assert_int_eq(locks_wait(l, -1, &done), -EINVAL);
    ck_assert_int_eq(locks_decode(l, &step, NULL, 0), -EBUSY); /* here, and not yet asked for */
    ck_assert_int_eq(locks_late(l, 0, &handle), 0);
    ck_assert_uint_eq(handle, HANDLE);
    ck_assert_int_eq(locks_late(l, 0, NULL), -EINVAL);
    set_limit(PATIENCE);
    ck_assert_int_eq(locks_decode(l, &step, NULL, 0), 0);
}
END_TEST

/* Other completions that come while it is waited for are kept, and an event loop is not misled. */
START_TEST(beside_a_late_call) {
    struct locks_completion done;
    struct locks_step step = {0};
    int r;
    open_as(HOLD, 0);
    set_limit(30);
    struct pollfd fd = {.fd = locks_fd(l), .events = POLLIN};
    for (uint64_t round = 0; round < 20; round++) {
        ck_assert_int_eq(locks_submit_barrier(l, 1), 0);
        ck_assert_int_eq(locks_decode(l, &step, NULL, 0), -ETIMEDOUT);
        ck_assert_int_eq(locks_submit_barrier(l, 2), 0);
        fake.manner = ANSWER;
        if (round % 2)
            ck_assert_int_eq(locks_late(l, -1, NULL), 0);
        for (uint64_t n = 1; n <= 2; n++) {
            while ((r = locks_try(l, &done)) == -EAGAIN)
                if (!locks_arm(l))
                    ck_assert_int_eq(poll(&fd, 1, PATIENCE), 1);
            ck_assert_int_eq(r, 0);
            ck_assert_uint_eq(done.user_data, n);
        }
        if (round % 2 == 0)
            ck_assert_int_eq(locks_late(l, -1, NULL), 0);
        ck_assert_int_eq(locks_try(l, &done), -EAGAIN);
        fake.manner = HOLD;
    }
}
END_TEST

START_TEST(a_late_end) {
    struct locks_step step = {0};
    struct locks_completion done;
    open_as(HOLD, 0);
    set_limit(30);
    struct locks_row row = good_row();
    ck_assert_int_eq(locks_decode(l, &step, &row, 1), -ETIMEDOUT);
    ck_assert_int_eq(locks_submit_barrier(l, 3), 0);
    await_taken(LK_OP_BARRIER);
    fake.manner = DIE;
    ck_assert_int_eq(locks_submit_barrier(l, 4), 0);
    ck_assert_int_eq(locks_late(l, -1, NULL), -ECONNRESET);
    ck_assert_int_eq(locks_wait(l, -1, &done), -ECONNRESET);
}
END_TEST

/* The daemon reads the list when it runs: it may not be anybody else's memory before. */
START_TEST(the_list_of_a_late_call) {
    uint32_t pairs[3][2] = {{1, 2}, {3, 4}, {5, 6}};
    struct lk_object_desc d;
    open_as(HOLD, 0);
    set_limit(30);
    ck_assert_int_eq(locks_copy_pages(l, HANDLE, pairs, 3), -ETIMEDOUT);
    await_taken(LK_OP_COPY_PAGES);
    last_taken(&d, sizeof(d));
    uint8_t *other = locks_alloc(l, 64);
    ck_assert_ptr_nonnull(other);
    memset(other, 0xff, 64);
    ck_assert_int_eq(memcmp(fake.memory.arena + d.list, pairs, sizeof(pairs)), 0);
    fake.manner = ANSWER;
    ck_assert_int_eq(locks_late(l, -1, NULL), 0);
    locks_free(l, other);
    ck_assert_ptr_nonnull(locks_alloc(l, 1 << 20)); /* all was given back */
}
END_TEST

START_TEST(no_room_within_the_limit) {
    struct locks_completion done;
    struct locks_step step = {0};
    open_as(DEAF, 0);
    set_limit(30);
    for (uint64_t n = 0; n < ENTRIES; n++)
        ck_assert_int_eq(locks_submit_barrier(l, n), 0);
    ck_assert_int_eq(locks_decode(l, &step, NULL, 0), -ETIMEDOUT);
    expect_error("decode: not submitted: the ring is full, and nothing was heard of the daemon "
                 "for 30 ms");
    ck_assert_int_eq(locks_late(l, 0, NULL), -EINVAL);
    fake.manner = ANSWER;
    set_limit(PATIENCE);
    ck_assert_int_eq(locks_decode(l, &step, NULL, 0), 0);
    for (uint64_t n = 0; n < ENTRIES; n++) {
        ck_assert_int_eq(locks_wait(l, -1, &done), 0);
        ck_assert_uint_eq(done.user_data, n);
    }
}
END_TEST

/* One that works for longer than the limit is not given up; one whose heart stops is. Within the
 * limit the heart has to beat once, however slow the machine. */
START_TEST(a_daemon_at_work_is_waited_for) {
    struct locks_step step = {0};
    fake.beats = true;
    fake.held_ms = 1500;
    open_as(HOLD, 0);
    set_limit(1000);
    ck_assert_int_eq(locks_decode(l, &step, NULL, 0), 0);
    fake.beats = false;
    fake.held_ms = 0;
    fake.manner = HOLD;
    ck_assert_int_eq(locks_decode(l, &step, NULL, 0), -ETIMEDOUT);
    locks_close(l);
    l = NULL;
    limit_ms = LOCKS_FOREVER;
    fake.held_ms = 300;
    open_as(HOLD, 0);
    ck_assert_int_eq(locks_decode(l, &step, NULL, 0), 0);
}
END_TEST

static void go_mute(void) {
    fake.mute = true;
    await_round(); /* no longer in its poll() */
    if (l)
        set_limit(50);
}

static void go_on(void) {
    fake.mute = false;
    set_limit(PATIENCE);
}

/* One is there, and the daemon has closed what it made for it. */
static void await_answer(void) {
    struct pollfd fd = {.fd = l->socket, .events = POLLIN};
    ck_assert_int_eq(poll(&fd, 1, PATIENCE), 1);
    await_round();
}

START_TEST(a_late_answer_is_no_other_ones) {
    struct locks_device_arena arena;
    open_as(ANSWER, 0);
    go_mute();
    ck_assert_int_eq(locks_pool(l, "only", &pool), -ETIMEDOUT);
    expect_error("the daemon did not answer the question for a pool within 50 ms");
    ck_assert_int_eq(locks_pool(l, "other", &pool), -ETIMEDOUT);
    go_on();
    ck_assert_int_eq(locks_pool(l, "other", &pool), -ESRCH);
    go_mute();
    int asked = fake.asked;
    ck_assert_int_eq(locks_pool(l, "only", &pool), -ETIMEDOUT);
    ck_assert_int_eq(locks_pool(l, "only", &pool), -ETIMEDOUT);
    go_on();
    ck_assert_int_eq(locks_pool(l, "only", &pool), 0);
    ck_assert_int_eq(fake.asked, asked + 1); /* it was not asked twice */
    go_mute();
    ck_assert_int_eq(locks_device_arena(l, 1 << 20, &arena), -ETIMEDOUT);
    go_on();
    ck_assert_int_eq(locks_pool(l, "only", &pool), 0);
    ck_assert_int_eq(locks_device_arena(l, 1 << 20, &arena), 0);
    ck_assert_uint_eq(arena.bytes, 2 << 20);
    close(arena.fd);
    ck_assert_int_eq(locks_device_arena(l, 1 << 20, &arena), -EBUSY);
}
END_TEST

/* As many files open as there may be. */
static void fill_descriptors(bool full) {
    static struct rlimit old;
    if (!full) {
        ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &old), 0);
        return;
    }
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &old), 0);
    int next = dup(0);
    close(next);
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &(struct rlimit){(rlim_t)next, old.rlim_max}), 0);
}

/* The daemon makes its files beside us: it is asked before there is no room. _i: others are asked
 * for meanwhile. */
START_TEST(an_answer_without_room_is_not_lost) {
    struct locks_device_arena arena;
    const void *pages;
    uint64_t layer, page;
    open_as(ANSWER, 0);
    go_mute();
    ck_assert_int_eq(locks_pool_map(l, 0, &pages, &layer, &page), -ETIMEDOUT);
    go_on();
    await_answer();
    fill_descriptors(true);
    ck_assert_int_eq(locks_pool_map(l, 0, &pages, &layer, &page), -EMFILE);
    expect_error("as many files open as it may");
    ck_assert_int_eq(locks_pool(l, "only", &pool), 0); /* drops it */
    fill_descriptors(false);
    ck_assert_int_eq(locks_pool_map(l, 0, &pages, &layer, &page), 0);
    go_mute();
    ck_assert_int_eq(locks_device_arena(l, 1 << 20, &arena), -ETIMEDOUT);
    go_on();
    await_answer();
    fill_descriptors(true);
    ck_assert_int_eq(locks_device_arena(l, 1 << 20, &arena), -EMFILE);
    expect_error("as many files open as it may");
    if (_i) {
        ck_assert_int_eq(locks_pool(l, "only", &pool), -EMFILE);
        expect_error("as many files open as it may");
    }
    fill_descriptors(false);
    if (_i)
        ck_assert_int_eq(locks_pool(l, "only", &pool), 0);
    ck_assert_int_eq(locks_device_arena(l, 1 << 20, &arena), 0);
    ck_assert_uint_eq(arena.bytes, 2 << 20);
    close(arena.fd);
}
END_TEST

START_TEST(nobody_at_the_door) {
    struct locks_options o = {.size = sizeof(o), .socket = fake.path, .limit_ms = 30};
    int r = 0;
    go_mute();
    ck_assert_int_eq(locks_connect(&o, &l), -ETIMEDOUT);
    expect_error("the daemon did not answer the greeting within 30 ms");
    for (int i = 0; i < 20 && !strstr(locks_error(NULL), "took none of them"); i++)
        r = locks_connect(&o, &l);
    ck_assert_int_eq(r, -ETIMEDOUT);
    expect_error("the daemon took none of them for 30 ms");
}
END_TEST

static void tick(int signal) {
    (void)signal;
}

/* A handler that runs again and again (a profiler's) ends no wait, and prolongs none. */
START_TEST(signals_do_not_prolong_the_limit) {
    struct itimerval often = {{0, 5000}, {0, 5000}}, never = {{0, 0}, {0, 0}};
    struct sigaction act = {.sa_handler = tick, .sa_flags = SA_RESTART};
    struct locks_step step = {0};
    open_as(HOLD, 0);
    go_mute();
    sigaction(SIGALRM, &act, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    ck_assert_int_eq(locks_pool(l, "only", &pool), -ETIMEDOUT);
    ck_assert_int_eq(locks_decode(l, &step, NULL, 0), -ETIMEDOUT);
    setitimer(ITIMER_REAL, &never, NULL);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("liblocks");
    TCase *tc = tcase_create("all");
    tcase_add_checked_fixture(tc, start, stop);
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, refusals_of_connect);
    tcase_add_test(tc, a_refusal_is_read_though_the_greeting_was_not);
    tcase_add_test(tc, another_version_is_refused_by_both_names);
    tcase_add_test(tc, pools);
    tcase_add_test(tc, administration);
    tcase_add_test(tc, arena_pieces);
    tcase_add_test(tc, arena_random);
    tcase_add_test(tc, defaults_of_a_step);
    tcase_add_test(tc, each_call_submits_its_operation);
    tcase_add_test(tc, a_device_arena_and_its_fences);
    tcase_add_test(tc, an_older_daemon_has_no_device_arena);
    tcase_add_test(tc, wrong_arguments_never_reach_the_daemon);
    tcase_add_test(tc, refusals_of_the_daemon);
    tcase_add_test(tc, objects_and_lists);
    tcase_add_test(tc, blocking_and_waiting_mix);
    tcase_add_test(tc, a_pool_shorter_than_it_is_said_to_be);
    tcase_add_test(tc, a_completion_too_many);
    tcase_add_test(tc, pools_that_lie);
    tcase_add_test(tc, completions_with_errors_that_are_none);
    tcase_add_test(tc, a_full_ring_is_said);
    tcase_add_test(tc, unread_completions_are_kept);
    tcase_add_test(tc, event_loops);
    tcase_add_loop_test(tc, a_dead_daemon_is_seen, 0, 2);
    tcase_add_test(tc, a_dead_daemon_is_seen_by_trying);
    tcase_add_test(tc, time_runs_out);
    tcase_add_test(tc, the_limit_is_as_asked_for);
    tcase_add_loop_test(tc, a_call_that_is_late, 0, 2);
    tcase_add_test(tc, beside_a_late_call);
    tcase_add_test(tc, a_late_end);
    tcase_add_test(tc, the_list_of_a_late_call);
    tcase_add_test(tc, no_room_within_the_limit);
    tcase_add_test(tc, a_daemon_at_work_is_waited_for);
    tcase_add_test(tc, a_late_answer_is_no_other_ones);
    tcase_add_loop_test(tc, an_answer_without_room_is_not_lost, 0, 2);
    tcase_add_test(tc, nobody_at_the_door);
    tcase_add_test(tc, signals_do_not_prolong_the_limit);
    suite_add_tcase(suite, tc);
    return run_suite(suite);
}
