/* SPDX-License-Identifier: MIT */
/*
 * segment.c - the three memory segments of a channel and its bell. See segment.h for the contract.
 */
#include "segment.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ring.h"

/* Between the entries and the descriptors: a prefetcher that follows the entries runs on past their
 * end, and would take descriptor lines from the client just as it writes them (measured: 170
 * against 120 ns for a bare exchange over these lines). */
#define DESC_GAP_BYTES 1024

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

static int fail(int error, char *why, size_t why_bytes, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static int fail(int error, char *why, size_t why_bytes, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(why, why_bytes, format, args);
    va_end(args);
    return error;
}

static uint64_t whole_pages(uint64_t bytes) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

int lk_segment_sizes(uint32_t sq_entries, uint64_t arena_bytes, struct lk_segment_sizes *ret,
                     char *why, size_t why_bytes) {
    struct lk_segment_sizes s = {.sq_entries = sq_entries ? sq_entries : LK_SQ_ENTRIES_DEFAULT};
    if (s.sq_entries > LK_SQ_ENTRIES_MAX || (s.sq_entries & (s.sq_entries - 1)))
        return fail(-EINVAL, why, why_bytes, "sq_entries %u is not a power of two of at most %u",
                    sq_entries, LK_SQ_ENTRIES_MAX);
    if (arena_bytes > LK_ARENA_BYTES_MAX)
        return fail(-EINVAL, why, why_bytes, "arena_bytes %" PRIu64 " is more than %" PRIu64,
                    arena_bytes, LK_ARENA_BYTES_MAX);
    s.cq_entries = s.sq_entries * LK_CQ_PER_SQ;
    s.descriptor_bytes = s.sq_entries * LK_DESC_BYTES_PER_ENTRY;
    if (s.descriptor_bytes < 2 * LK_DESCRIPTOR_BYTES_MAX)
        s.descriptor_bytes = 2 * LK_DESCRIPTOR_BYTES_MAX;
    s.sq_offset = sizeof(struct lk_submission_head);
    s.desc_offset = s.sq_offset + s.sq_entries * sizeof(struct lk_sqe) + DESC_GAP_BYTES;
    s.submission_bytes = s.desc_offset + s.descriptor_bytes;
    s.cq_offset = sizeof(struct lk_completion_head);
    s.completion_bytes = s.cq_offset + s.cq_entries * sizeof(struct lk_cqe);
    s.arena_bytes = whole_pages(arena_bytes ? arena_bytes : LK_ARENA_BYTES_DEFAULT);
    *ret = s;
    return 0;
}

static void clear(struct lk_channel_memory *memory) {
    memset(memory, 0, sizeof(*memory));
    memory->bell = -1;
    for (int i = 0; i < LK_WELCOME_FDS; i++)
        memory->client_fds[i] = -1;
}

/* All of the memfd that is mapped at `map`; huge pages where the kernel lends them to shared memory
 * (they must be touched through the mapping, fallocate alone takes small ones). -> 0, -1: errno */
static int allocate(int fd, uint8_t *map, uint64_t bytes, bool huge, const struct lk_turn *turn) {
    huge = huge && !madvise(map, bytes, MADV_HUGEPAGE);
    for (uint64_t at = 0, piece; at < bytes; at += piece) {
        piece = bytes - at < LK_PIECE_BYTES ? bytes - at : LK_PIECE_BYTES;
        if (huge) /* fallocate finds out what is missing */
            (void)madvise(map + at, piece, MADV_POPULATE_WRITE);
        int r;
        do
            r = fallocate(fd, 0, (off_t)at, (off_t)piece);
        while (r && errno == EINTR); /* some kernels end it at any signal, a debugger's too */
        if (r)
            return -1;
        if (turn && !turn->take(turn->context)) {
            errno = ECANCELED;
            return -1;
        }
    }
    return 0;
}

/* A memfd of `bytes`, all of it allocated, mapped at *ret_map. -> fd or -errno. */
static int make(const char *name, uint64_t bytes, bool huge, const struct lk_turn *turn,
                void **ret_map, char *why, size_t why_bytes) {
    int r;
    void *map = MAP_FAILED;
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0 || fchmod(fd, 0600) || ftruncate(fd, (off_t)bytes))
        goto failed;
    map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        goto failed;
    if (allocate(fd, map, bytes, huge, turn) || fcntl(fd, F_ADD_SEALS, SEALS))
        goto failed;
    *ret_map = map;
    return fd;
failed:
    r = fail(errno > 0 ? -errno : -EIO, why, why_bytes,
             "cannot make a segment \"%s\" of %" PRIu64 " bytes: %s", name, bytes, strerror(errno));
    if (map != MAP_FAILED)
        munmap(map, bytes);
    if (fd >= 0)
        close(fd);
    return r;
}

/* The completion segment once more, read-only: a descriptor of its own, that cannot be mapped for
 * writing. */
static int open_read_only(int fd, char *why, size_t why_bytes) {
    char path[32];
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    int again = open(path, O_RDONLY | O_CLOEXEC);
    return again >= 0
               ? again
               : fail(-errno, why, why_bytes, "cannot open %s read-only: %s (is /proc mounted?)",
                      path, strerror(errno));
}

static void fill_heads(struct lk_channel_memory *memory, uint64_t boot_epoch,
                       uint64_t first_index) {
    struct lk_completion_head *head = memory->completion;
    head->magic = LK_ABI_MAGIC;
    head->major = LK_ABI_MAJOR;
    head->minor = LK_ABI_MINOR;
    head->sq_entries = memory->sizes.sq_entries;
    head->cq_entries = memory->sizes.cq_entries;
    head->sq_offset = memory->sizes.sq_offset;
    head->desc_offset = memory->sizes.desc_offset;
    head->cq_offset = memory->sizes.cq_offset;
    head->boot_epoch = boot_epoch;
    lk_ring_start(memory->submission, head, first_index);
}

int lk_channel_memory_create(uint32_t sq_entries, uint64_t arena_bytes, uint64_t boot_epoch,
                             uint64_t first_index, const struct lk_turn *turn,
                             struct lk_channel_memory *ret, char *why, size_t why_bytes) {
    struct lk_channel_memory m;
    void *map[3] = {NULL, NULL, NULL};
    int bell[2], writable = -1;
    clear(&m);
    int r = lk_segment_sizes(sq_entries, arena_bytes, &m.sizes, why, why_bytes);
    if (r)
        return r;
    int *fds = m.client_fds;
    fds[LK_FD_SUBMISSION] = r =
        make("locksd-submission", m.sizes.submission_bytes, false, NULL, &map[0], why, why_bytes);
    m.submission = map[0];
    if (!m.submission)
        goto failed;
    writable = r =
        make("locksd-completion", m.sizes.completion_bytes, false, NULL, &map[1], why, why_bytes);
    m.completion = map[1];
    if (!m.completion)
        goto failed;
    fds[LK_FD_COMPLETION] = r = open_read_only(writable, why, why_bytes);
    if (r < 0)
        goto failed;
    fds[LK_FD_ARENA] = r =
        make("locksd-arena", m.sizes.arena_bytes, true, turn, &map[2], why, why_bytes);
    m.arena = map[2];
    if (!m.arena)
        goto failed;
    r = lk_bell_create(bell);
    if (r) {
        fail(r, why, why_bytes, "cannot make a socket pair: %s", strerror(-r));
        goto failed;
    }
    m.bell = bell[0];
    fds[LK_FD_BELL] = bell[1];
    fill_heads(&m, boot_epoch, first_index);
    close(writable);
    *ret = m;
    return 0;
failed:
    if (writable >= 0)
        close(writable);
    lk_channel_memory_destroy(&m);
    return r;
}

void lk_channel_memory_sent(struct lk_channel_memory *memory) {
    for (int i = 0; i < LK_WELCOME_FDS; i++) {
        if (memory->client_fds[i] >= 0)
            close(memory->client_fds[i]);
        memory->client_fds[i] = -1;
    }
}

/* A descriptor as it should be: sealed, so that it cannot shrink under us, and of the size we were
 * told. */
static int check_segment(int fd, const char *name, uint64_t bytes, char *why, size_t why_bytes) {
    struct stat st;
    int seals = fd < 0 ? -1 : fcntl(fd, F_GET_SEALS);
    if (seals < 0 || fstat(fd, &st))
        return fail(-EPROTO, why, why_bytes, "the daemon sent no memory for the %s segment", name);
    if ((seals & SEALS) != SEALS)
        return fail(-EPROTO, why, why_bytes,
                    "the %s segment is not sealed: seals 0x%x, needed 0x%x", name, seals, SEALS);
    if ((uint64_t)st.st_size != bytes)
        return fail(-EPROTO, why, why_bytes,
                    "the %s segment has %jd bytes and should have %" PRIu64, name,
                    (intmax_t)st.st_size, bytes);
    return 0;
}

static int check_welcome(const struct lk_welcome *w, const struct lk_segment_sizes *s, char *why,
                         size_t why_bytes) {
    if (w->cq_entries != s->cq_entries || w->descriptor_bytes != s->descriptor_bytes ||
        w->submission_bytes != s->submission_bytes || w->completion_bytes != s->completion_bytes ||
        w->arena_bytes != s->arena_bytes)
        return fail(
            -EPROTO, why, why_bytes,
            "the daemon's segments do not have the sizes of a ring with sq_entries %u and an "
            "arena of %" PRIu64 " bytes",
            w->sq_entries, w->arena_bytes);
    return 0;
}

static int check_head(const struct lk_completion_head *head, const struct lk_segment_sizes *s,
                      char *why, size_t why_bytes) {
    if (head->magic != LK_ABI_MAGIC || head->major != LK_ABI_MAJOR)
        return fail(-EPROTO, why, why_bytes,
                    "the completion segment has magic 0x%08x and major %u, not 0x%08x and %u",
                    head->magic, head->major, LK_ABI_MAGIC, LK_ABI_MAJOR);
    if (head->sq_entries != s->sq_entries || head->cq_entries != s->cq_entries ||
        head->sq_offset != s->sq_offset || head->desc_offset != s->desc_offset ||
        head->cq_offset != s->cq_offset)
        return fail(
            -EPROTO, why, why_bytes,
            "the completion segment places its parts elsewhere than a ring with sq_entries %u",
            s->sq_entries);
    return 0;
}

static void *map_segment(int fd, uint64_t bytes, int protection, const char *name, char *why,
                         size_t why_bytes) {
    void *map = mmap(NULL, bytes, protection, MAP_SHARED, fd, 0);
    if (map != MAP_FAILED)
        return map;
    fail(-errno, why, why_bytes, "cannot map the %s segment of %" PRIu64 " bytes: %s", name, bytes,
         strerror(errno));
    return NULL;
}

static int map_all(struct lk_channel_memory *m, char *why, size_t why_bytes) {
    const struct lk_segment_sizes *s = &m->sizes;
    const int *fds = m->client_fds;
    m->submission = map_segment(fds[LK_FD_SUBMISSION], s->submission_bytes, PROT_READ | PROT_WRITE,
                                "submission", why, why_bytes);
    m->completion = map_segment(fds[LK_FD_COMPLETION], s->completion_bytes, PROT_READ, "completion",
                                why, why_bytes);
    m->arena = map_segment(fds[LK_FD_ARENA], s->arena_bytes, PROT_READ | PROT_WRITE, "arena", why,
                           why_bytes);
    if (!m->submission || !m->completion || !m->arena)
        return -ENOMEM;
    (void)madvise(m->arena, s->arena_bytes, MADV_HUGEPAGE); /* a wish: small pages do as well */
    return check_head(m->completion, s, why, why_bytes);
}

int lk_channel_memory_attach(const struct lk_welcome *welcome, const int fds[LK_WELCOME_FDS],
                             struct lk_channel_memory *ret, char *why, size_t why_bytes) {
    struct lk_channel_memory m;
    clear(&m);
    memcpy(m.client_fds, fds, sizeof(m.client_fds));
    int r = lk_segment_sizes(welcome->sq_entries, welcome->arena_bytes, &m.sizes, why, why_bytes);
    if (!r)
        r = check_welcome(welcome, &m.sizes, why, why_bytes);
    if (!r)
        r = check_segment(fds[LK_FD_SUBMISSION], "submission", m.sizes.submission_bytes, why,
                          why_bytes);
    if (!r)
        r = check_segment(fds[LK_FD_COMPLETION], "completion", m.sizes.completion_bytes, why,
                          why_bytes);
    if (!r)
        r = check_segment(fds[LK_FD_ARENA], "arena", m.sizes.arena_bytes, why, why_bytes);
    if (!r && fds[LK_FD_BELL] < 0)
        r = fail(-EPROTO, why, why_bytes, "the daemon sent no bell");
    if (!r)
        r = map_all(&m, why, why_bytes);
    if (r) {
        lk_channel_memory_destroy(&m);
        return r;
    }
    m.bell = m.client_fds[LK_FD_BELL];
    m.client_fds[LK_FD_BELL] = -1;
    lk_channel_memory_sent(&m);
    *ret = m;
    return 0;
}

void lk_channel_memory_destroy(struct lk_channel_memory *memory) {
    if (memory->submission)
        munmap(memory->submission, memory->sizes.submission_bytes);
    if (memory->completion)
        munmap(memory->completion, memory->sizes.completion_bytes);
    if (memory->arena)
        munmap(memory->arena, memory->sizes.arena_bytes);
    lk_channel_memory_sent(memory);
    if (memory->bell >= 0)
        close(memory->bell);
    clear(memory);
}
