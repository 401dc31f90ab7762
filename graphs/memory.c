/* SPDX-License-Identifier: MIT */
/*
 * memory.c - see memory.h.
 *
 * The mapping is placed in a larger reservation, so that its address is aligned; the rest of the
 * reservation is given back at once.
 */
#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define HUGE_PAGE  (UINT64_C(2) << 20)
#define SMALL_PAGE 4096

#ifndef MADV_POPULATE_WRITE /* Linux 5.14; older headers do not name it */
#define MADV_POPULATE_WRITE 23
#endif

/* Bytes the system can give without swapping; UINT64_MAX where it does not say. */
static uint64_t available(void) {
    FILE *file = fopen("/proc/meminfo", "re");
    uint64_t kib = 0;
    char line[128];

    if (!file)
        return UINT64_MAX;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %" SCNu64, &kib) == 1)
            break;
    fclose(file);
    return kib ? kib * 1024 : UINT64_MAX;
}

static int refuse(int error, const char *what, uint64_t bytes, char *why, size_t why_bytes) {
    uint64_t most = available();
    int at =
        snprintf(why, why_bytes, "%s of %" PRIu64 " MiB: %s", what, bytes >> 20, strerror(error));

    if (most != UINT64_MAX && at >= 0 && (size_t)at < why_bytes)
        snprintf(why + at, why_bytes - (size_t)at, " (%" PRIu64 " MiB available)", most >> 20);
    return -error;
}

static int make_memfd(const char *name, uint64_t bytes) {
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);

    if (fd < 0)
        return -errno;
    if (ftruncate(fd, (off_t)bytes) < 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0) {
        int error = errno;
        close(fd);
        return -error;
    }
    return fd;
}

/* -> an aligned address, or MAP_FAILED. */
static uint8_t *map(int fd, uint64_t bytes) {
    uint8_t *all = mmap(NULL, bytes + HUGE_PAGE, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED)
        return MAP_FAILED;
    size_t skip = (HUGE_PAGE - (uintptr_t)all % HUGE_PAGE) % HUGE_PAGE;
    int flags = MAP_FIXED | (fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
    uint8_t *at = mmap(all + skip, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (at == MAP_FAILED) {
        int error = errno;
        munmap(all, bytes + HUGE_PAGE);
        errno = error;
        return MAP_FAILED;
    }
    if (skip)
        munmap(all, skip);
    if (HUGE_PAGE - skip)
        munmap(at + bytes, HUGE_PAGE - skip);
    return at;
}

static int populate(uint8_t *at, uint64_t bytes) {
    madvise(at, bytes, MADV_HUGEPAGE); /* where the kernel lends them */
    if (madvise(at, bytes, MADV_POPULATE_WRITE) == 0)
        return 0;
    if (errno != EINVAL)
        return -errno;
    for (uint64_t i = 0; i < bytes; i += SMALL_PAGE)
        ((volatile uint8_t *)at)[i] = 0;
    return 0;
}

int lk_memory_open(const char *name, uint64_t bytes, struct lk_memory *ret, char *why,
                   size_t why_bytes) {
    struct lk_memory memory = {.fd = -1};
    int error = 0;

    memory.bytes = (bytes + SMALL_PAGE - 1) / SMALL_PAGE * SMALL_PAGE;
    if (memory.bytes > available() || memory.bytes == 0)
        return refuse(memory.bytes ? ENOMEM : EINVAL, name ? name : "workspace", bytes, why,
                      why_bytes);
    if (name) {
        memory.fd = make_memfd(name, memory.bytes);
        if (memory.fd < 0)
            return refuse(-memory.fd, name, bytes, why, why_bytes);
    }
    memory.at = map(memory.fd, memory.bytes);
    error = memory.at == MAP_FAILED ? -errno : populate(memory.at, memory.bytes);
    if (error) {
        memory.bytes = memory.at == MAP_FAILED ? 0 : memory.bytes;
        lk_memory_close(&memory);
        return refuse(-error, name ? name : "workspace", bytes, why, why_bytes);
    }
    *ret = memory;
    return 0;
}

void lk_memory_close(struct lk_memory *memory) {
    if (memory->bytes)
        munmap(memory->at, memory->bytes);
    if (memory->bytes && memory->fd >= 0)
        close(memory->fd);
    *memory = (struct lk_memory){.fd = -1};
}
