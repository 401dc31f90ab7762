/* SPDX-License-Identifier: MIT */
/*
 * test_segment.c - the segments of a channel, and the messages that carry them: sizes, seals, the
 * read-only completion segment, what a client refuses, and that no descriptor leaks whatever
 * happens.
 */
#include <check.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../common/run.h"
#include "../../shm_protocol/ring.h"
#include "../../shm_protocol/segment.h"
#include "../../shm_protocol/validate.h"
#include "../../shm_protocol/wire.h"

static char why[LK_REASON_BYTES];

static int open_fds(void) {
    int count = 0;
    DIR *dir = opendir("/proc/self/fd");
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

START_TEST(sizes) {
    struct lk_segment_sizes s;
    ck_assert_int_eq(lk_segment_sizes(0, 0, &s, why, sizeof(why)), 0);
    ck_assert_uint_eq(s.sq_entries, LK_SQ_ENTRIES_DEFAULT);
    ck_assert_uint_eq(s.arena_bytes, LK_ARENA_BYTES_DEFAULT);
    for (uint32_t n = 1; n <= LK_SQ_ENTRIES_MAX; n *= 2) {
        ck_assert_int_eq(lk_segment_sizes(n, 1, &s, why, sizeof(why)), 0);
        ck_assert_uint_ge(s.cq_entries, s.sq_entries);
        ck_assert_uint_ge(s.descriptor_bytes, 2 * LK_DESCRIPTOR_BYTES_MAX);
        ck_assert_uint_eq(s.desc_offset % LK_LINE, 0);
        ck_assert_uint_eq(s.cq_offset % LK_LINE, 0);
        ck_assert_uint_eq(s.submission_bytes, s.desc_offset + s.descriptor_bytes);
        ck_assert_uint_eq(s.arena_bytes % 4096, 0);
    }
    ck_assert_int_eq(lk_segment_sizes(48, 0, &s, why, sizeof(why)), -EINVAL);
    ck_assert_msg(strstr(why, "48") && strstr(why, "1024"), "%s", why);
    ck_assert_int_eq(lk_segment_sizes(2048, 0, &s, why, sizeof(why)), -EINVAL);
    ck_assert_int_eq(lk_segment_sizes(8, LK_ARENA_BYTES_MAX + 1, &s, why, sizeof(why)), -EINVAL);
    ck_assert_int_eq(lk_segment_sizes(8, UINT64_MAX, &s, why, sizeof(why)), -EINVAL);
}
END_TEST

static struct lk_welcome welcome_of(const struct lk_channel_memory *m) {
    return (struct lk_welcome){.head = {LK_ABI_MAGIC, LK_MSG_WELCOME, sizeof(struct lk_welcome)},
                               .major = LK_ABI_MAJOR,
                               .sq_entries = m->sizes.sq_entries,
                               .cq_entries = m->sizes.cq_entries,
                               .descriptor_bytes = m->sizes.descriptor_bytes,
                               .submission_bytes = m->sizes.submission_bytes,
                               .completion_bytes = m->sizes.completion_bytes,
                               .arena_bytes = m->sizes.arena_bytes};
}

static void duplicate(const struct lk_channel_memory *m, int ret[LK_WELCOME_FDS]) {
    for (int i = 0; i < LK_WELCOME_FDS; i++)
        ret[i] = fcntl(m->client_fds[i], F_DUPFD_CLOEXEC, 0);
}

static void make(struct lk_channel_memory *m, uint64_t arena_bytes) {
    int r = lk_channel_memory_create(8, arena_bytes, 77, 5, NULL, m, why, sizeof(why));
    ck_assert_msg(r == 0, "%s", why);
}

START_TEST(both_sides_see_one_memory) {
    int before = open_fds(), fds[LK_WELCOME_FDS];
    struct lk_channel_memory daemon, client;
    make(&daemon, 8192);
    struct lk_welcome w = welcome_of(&daemon);
    duplicate(&daemon, fds);
    int r = lk_channel_memory_attach(&w, fds, &client, why, sizeof(why));
    ck_assert_msg(r == 0, "%s", why);
    lk_channel_memory_sent(&daemon);
    ck_assert_int_eq(open_fds(), before + 2); /* the two ends of the bell */
    daemon.arena[8191] = 42;
    ck_assert_uint_eq(client.arena[8191], 42);
    client.submission->sq_tail = 6;
    ck_assert_uint_eq(daemon.submission->sq_tail, 6);
    ck_assert_uint_eq(client.completion->sq_head, 5);
    ck_assert_uint_eq(client.completion->boot_epoch, 77);
    lk_bell_ring(client.bell);
    ck_assert(lk_bell_drain(daemon.bell));
    lk_channel_memory_destroy(&client);
    ck_assert(!lk_bell_drain(daemon.bell)); /* the client's end is seen to close */
    lk_channel_memory_destroy(&daemon);
    lk_channel_memory_destroy(&daemon);
    ck_assert_int_eq(open_fds(), before);
}
END_TEST

START_TEST(segments_are_sealed_and_allocated) {
    struct lk_channel_memory m;
    struct stat st;
    make(&m, 1 << 20);
    for (int i = 0; i <= LK_FD_ARENA; i++) {
        int fd = m.client_fds[i];
        ck_assert_int_eq(fcntl(fd, F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
        ck_assert_int_eq(fstat(fd, &st), 0);
        ck_assert_uint_eq(st.st_mode & 0777, 0600);
        ck_assert_int_ge(st.st_blocks * 512, st.st_size);
        ck_assert_int_eq(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
        ck_assert(ftruncate(fd, 0) != 0);
        ck_assert(ftruncate(fd, st.st_size * 2) != 0);
    }
    lk_channel_memory_destroy(&m);
}
END_TEST

START_TEST(completion_segment_is_read_only) {
    struct lk_channel_memory m;
    make(&m, 4096);
    int fd = m.client_fds[LK_FD_COMPLETION];
    ck_assert_int_eq(fcntl(fd, F_GETFL) & O_ACCMODE, O_RDONLY);
    ck_assert_ptr_eq(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
    void *map = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
    ck_assert_ptr_ne(map, MAP_FAILED);
    ck_assert_int_ne(mprotect(map, 4096, PROT_READ | PROT_WRITE), 0);
    ck_assert_int_lt(write(fd, "x", 1), 0);
    munmap(map, 4096);
    lk_channel_memory_destroy(&m);
}
END_TEST

/* Attaches after `spoil` and expects a refusal with `words`, without a leak. */
#define EXPECT_REFUSED(spoil, words)                                                               \
    do {                                                                                           \
        struct lk_channel_memory daemon, client;                                                   \
        int before = open_fds(), fds[LK_WELCOME_FDS];                                              \
        make(&daemon, 8192);                                                                       \
        struct lk_welcome w = welcome_of(&daemon);                                                 \
        duplicate(&daemon, fds);                                                                   \
        spoil;                                                                                     \
        ck_assert_int_eq(lk_channel_memory_attach(&w, fds, &client, why, sizeof(why)), -EPROTO);   \
        ck_assert_msg(strstr(why, words) != NULL, "%s", why);                                      \
        lk_channel_memory_destroy(&daemon);                                                        \
        ck_assert_int_eq(open_fds(), before);                                                      \
    } while (0)

static void replace(int *fd, uint64_t bytes) {
    close(*fd);
    *fd = memfd_create("other", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    ck_assert_int_eq(ftruncate(*fd, (off_t)bytes), 0);
}

START_TEST(clients_refuse_what_is_not_as_told) {
    EXPECT_REFUSED(w.cq_entries *= 2, "sizes");
    EXPECT_REFUSED(w.arena_bytes = 4096, "arena segment has 8192 bytes and should have 4096");
    EXPECT_REFUSED(replace(&fds[LK_FD_ARENA], 8192), "arena segment is not sealed");
    EXPECT_REFUSED((close(fds[LK_FD_SUBMISSION]), fds[LK_FD_SUBMISSION] = -1), "submission");
    EXPECT_REFUSED((close(fds[LK_FD_BELL]), fds[LK_FD_BELL] = -1), "bell");
    EXPECT_REFUSED(daemon.completion->magic = 1, "magic");
    EXPECT_REFUSED(daemon.completion->desc_offset = 0, "places its parts elsewhere");
    EXPECT_REFUSED(daemon.completion->cq_offset = 1u << 30, "places its parts elsewhere");
}
END_TEST

/* Out of descriptors at each stage of the making in turn: a sentence, and all that was made is
 * given back. */
START_TEST(failing_half_way_leaves_nothing) {
    struct lk_channel_memory m;
    struct rlimit limit, tight;
    int before = open_fds(), failures = 0;
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    int lowest = dup(0);
    close(lowest);
    for (int more = 0; more < 8; more++) {
        tight = limit;
        tight.rlim_cur = (rlim_t)lowest + (rlim_t)more;
        ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &tight), 0);
        int r = lk_channel_memory_create(8, 4096, 1, 0, NULL, &m, why, sizeof(why));
        ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
        if (r == 0)
            lk_channel_memory_destroy(&m);
        else
            ck_assert_msg(r == -EMFILE && strstr(why, "Too many open files"), "%d: %s", r, why);
        failures += r != 0;
        ck_assert_int_eq(open_fds(), before);
    }
    ck_assert_int_eq(failures, 6); /* three memfds, one opened again, two ends of the bell */
}
END_TEST

/* ---- messages ---- */

static int sockets[2];

static void connect_sockets(void) {
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, sockets), 0);
}

static void disconnect(void) {
    close(sockets[0]);
    close(sockets[1]);
}

START_TEST(messages_arrive_with_descriptors) {
    struct lk_hello sent = {.name = "somebody", .sq_entries = 4}, got;
    int fds[4] = {0, 1, 2, 0}, received[6];
    int before = open_fds();
    lk_wire_head(&sent.head, LK_MSG_HELLO, sizeof(sent));
    ck_assert_int_eq(lk_wire_send(sockets[0], &sent.head, fds, 4), 0);
    int r = lk_wire_receive(sockets[1], &got.head, sizeof(got), received, 6, why, sizeof(why));
    ck_assert_msg(r == 0, "%s", why);
    ck_assert_int_eq(memcmp(&sent, &got, sizeof(got)), 0);
    for (int i = 0; i < 4; i++) {
        ck_assert_int_eq(fcntl(received[i], F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
        close(received[i]);
    }
    ck_assert_int_eq(received[4], -1);
    ck_assert_int_eq(received[5], -1);
    r = lk_wire_receive(sockets[1], &got.head, sizeof(got), NULL, 0, why, sizeof(why));
    ck_assert_int_eq(r, -EAGAIN);
    ck_assert_int_eq(open_fds(), before);
}
END_TEST

static void expect_bad(const void *bytes, size_t count, const char *words) {
    struct lk_hello got;
    ck_assert_int_eq(send(sockets[0], bytes, count, 0), (int)count);
    int r = lk_wire_receive(sockets[1], &got.head, sizeof(got), NULL, 0, why, sizeof(why));
    ck_assert_int_eq(r, -EPROTO);
    ck_assert_msg(strstr(why, words) != NULL, "%s", why);
}

START_TEST(bad_messages_are_refused) {
    uint8_t bytes[sizeof(struct lk_hello) + 1] = {0};
    struct lk_message *head = (struct lk_message *)bytes;
    expect_bad("GET", 3, "3 bytes is shorter");
    expect_bad("GET / HTTP/1.1", 14, "first word is 0x20544547");
    lk_wire_head(head, LK_MSG_HELLO, 30);
    expect_bad(bytes, 31, "says that it has 30 bytes and has 31");
    expect_bad(bytes, sizeof(bytes), "more than 64 bytes");
}
END_TEST

START_TEST(surplus_descriptors_are_closed) {
    struct lk_message head;
    int fds[LK_WIRE_FDS_MAX] = {0}, received[2], before = open_fds();
    lk_wire_head(&head, LK_MSG_POOL_MAP, sizeof(head));
    for (int wanted = 0; wanted <= 2; wanted++) {
        ck_assert_int_eq(lk_wire_send(sockets[0], &head, fds, LK_WIRE_FDS_MAX), 0);
        int r = lk_wire_receive(sockets[1], &head, sizeof(head), received, (size_t)wanted, why,
                                sizeof(why));
        ck_assert_int_eq(r, -EPROTO);
        ck_assert_msg(strstr(why, "descriptors") != NULL, "%s", why);
        ck_assert_int_eq(open_fds(), before);
    }
}
END_TEST

/* The other side is not to blame for it, and nothing is lost. */
START_TEST(no_place_for_descriptors_is_said) {
    struct lk_message head;
    struct rlimit old, few;
    int fds[2] = {0}, received[2], before = open_fds();
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &old), 0);
    for (int places = 0; places < 2; places++) {
        int next = dup(0);
        close(next);
        few = (struct rlimit){.rlim_cur = (rlim_t)(next + places), .rlim_max = old.rlim_max};
        lk_wire_head(&head, LK_MSG_POOL_MAP, sizeof(head));
        ck_assert_int_eq(lk_wire_send(sockets[0], &head, fds, 2), 0);
        ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &few), 0);
        int r = lk_wire_receive(sockets[1], &head, sizeof(head), received, 2, why, sizeof(why));
        ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &old), 0);
        ck_assert_int_eq(r, -EMFILE);
        ck_assert_msg(strstr(why, "as many files open as it may") != NULL, "%s", why);
        ck_assert_int_eq(open_fds(), before);
        r = lk_wire_receive(sockets[1], &head, sizeof(head), received, 2, why, sizeof(why));
        ck_assert_int_eq(r, 0);
        ck_assert_int_eq(open_fds(), before + 2);
        close(received[0]);
        close(received[1]);
        r = lk_wire_receive(sockets[1], &head, sizeof(head), received, 2, why, sizeof(why));
        ck_assert_int_eq(r, -EAGAIN);
    }
}
END_TEST

START_TEST(hang_ups_are_seen) {
    struct lk_message head;
    lk_wire_head(&head, LK_MSG_ADMIN, sizeof(head));
    shutdown(sockets[0], SHUT_RDWR);
    int r = lk_wire_receive(sockets[1], &head, sizeof(head), NULL, 0, why, sizeof(why));
    ck_assert_int_eq(r, -ECONNRESET);
    lk_wire_head(&head, LK_MSG_ADMIN, sizeof(head));
    ck_assert_int_eq(lk_wire_send(sockets[1], &head, NULL, 0), -EPIPE); /* and no SIGPIPE */
}
END_TEST

int main(void) {
    Suite *suite = suite_create("segment");
    TCase *segments = tcase_create("segments"), *messages = tcase_create("messages");
    tcase_add_test(segments, sizes);
    tcase_add_test(segments, both_sides_see_one_memory);
    tcase_add_test(segments, segments_are_sealed_and_allocated);
    tcase_add_test(segments, completion_segment_is_read_only);
    tcase_add_test(segments, clients_refuse_what_is_not_as_told);
    tcase_add_test(segments, failing_half_way_leaves_nothing);
    tcase_add_checked_fixture(messages, connect_sockets, disconnect);
    tcase_add_test(messages, messages_arrive_with_descriptors);
    tcase_add_test(messages, bad_messages_are_refused);
    tcase_add_test(messages, surplus_descriptors_are_closed);
    tcase_add_test(messages, no_place_for_descriptors_is_said);
    tcase_add_test(messages, hang_ups_are_seen);
    suite_add_tcase(suite, segments);
    suite_add_tcase(suite, messages);
    return run_suite(suite);
}
