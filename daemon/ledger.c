/* SPDX-License-Identifier: MIT */
/*
 * ledger.c - layout of the ledger. See ledger.h; its audit is in audit.c.
 */
#include "ledger.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PART_ALIGN 4096

static uint64_t place(uint64_t *bytes, uint64_t count, uint64_t size) {
    uint64_t at = *bytes;
    *bytes = (at + count * size + PART_ALIGN - 1) / PART_ALIGN * PART_ALIGN;
    return at;
}

/* Sparse parts come last, so that the rest is one range. */
static void place_section(struct lk_ledger_section *s, uint64_t *bytes) {
    const struct lk_ledger_shape *shape = &s->shape;
    uint64_t quads = shape->pages / LK_QUAD_PAGES;
    s->quads_at = place(bytes, quads, sizeof(struct lk_ledger_quad));
    s->sequences_at = place(bytes, shape->max_sequences, sizeof(struct lk_ledger_sequence));
    s->lengths_at = place(bytes, (uint64_t)shape->max_sequences * shape->layers, sizeof(uint64_t));
    s->leases_at = place(bytes, shape->max_leases, sizeof(struct lk_ledger_lease));
    s->marks_at = place(bytes, shape->layers * shape->pages, 1);
    s->supers_at = place(bytes, shape->layers * quads, 1);
}

static void place_tables(struct lk_ledger_section *s, uint64_t *bytes) {
    const struct lk_ledger_shape *shape = &s->shape;
    s->tables_at =
        place(bytes, (uint64_t)shape->max_sequences * shape->table_quads, sizeof(uint32_t));
    s->lease_tables_at =
        place(bytes, shape->max_leases * (shape->pages / LK_QUAD_PAGES), sizeof(uint32_t));
}

static int make_file(uint64_t bytes, uint64_t taken, int *ret_fd) {
    int fd = memfd_create("locksd-ledger", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return -errno;
    if (ftruncate(fd, (off_t)bytes) || fallocate(fd, 0, 0, (off_t)taken) ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
        int rc = -errno;
        close(fd);
        return rc;
    }
    *ret_fd = fd;
    return 0;
}

static void empty_pool(const struct lk_ledger_view *view) {
    for (uint64_t i = 0; i < view->quad_count; i++)
        view->quads[i].copy_from = LK_LEDGER_NONE;
    for (uint32_t i = 0; i < view->shape.max_sequences; i++)
        view->sequences[i].state = UINT64_C(1) << 32;
    for (uint32_t i = 0; i < view->shape.max_leases; i++)
        view->leases[i].state = UINT64_C(1) << 32;
}

int lk_ledger_open(const struct lk_ledger_shape *shapes, uint32_t pools, uint64_t boot_epoch,
                   struct lk_ledger *ret, char *why, size_t why_bytes) {
    struct lk_ledger_head head = {.magic = LK_LEDGER_MAGIC,
                                  .version = LK_LEDGER_VERSION,
                                  .pools = pools,
                                  .boot_epoch = boot_epoch};
    uint64_t bytes = 0, taken;
    int fd = -1;
    place(&bytes, 1, sizeof(head));
    for (uint32_t i = 0; i < pools; i++) {
        head.section[i].shape = shapes[i];
        place_section(&head.section[i], &bytes);
    }
    taken = bytes;
    for (uint32_t i = 0; i < pools; i++)
        place_tables(&head.section[i], &bytes);
    head.bytes = bytes;
    int rc = make_file(bytes, taken, &fd);
    void *at = rc ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (!rc && at == MAP_FAILED) {
        rc = -errno;
        close(fd);
    }
    if (rc) {
        snprintf(why, why_bytes, "the ledger of %llu bytes (%llu of them at once): %s",
                 (unsigned long long)bytes, (unsigned long long)taken, strerror(-rc));
        return rc;
    }
    memcpy(at, &head, sizeof(head));
    *ret = (struct lk_ledger){.head = at, .fd = fd};
    for (uint32_t i = 0; i < pools; i++) {
        struct lk_ledger_view view = lk_ledger_view(ret, i);
        empty_pool(&view);
    }
    return 0;
}

void lk_ledger_close(struct lk_ledger *ledger) {
    if (!ledger->head)
        return;
    munmap(ledger->head, ledger->head->bytes);
    close(ledger->fd);
    *ledger = (struct lk_ledger){.fd = -1};
}

struct lk_ledger_view lk_ledger_view(const struct lk_ledger *ledger, uint32_t pool) {
    const struct lk_ledger_section *s = &ledger->head->section[pool];
    uint8_t *base = (uint8_t *)ledger->head;
    return (struct lk_ledger_view){
        .shape = s->shape,
        .quad_count = s->shape.pages / LK_QUAD_PAGES,
        .quads = (struct lk_ledger_quad *)(base + s->quads_at),
        .sequences = (struct lk_ledger_sequence *)(base + s->sequences_at),
        .lengths = (uint64_t *)(base + s->lengths_at),
        .tables = (uint32_t *)(base + s->tables_at),
        .leases = (struct lk_ledger_lease *)(base + s->leases_at),
        .lease_tables = (uint32_t *)(base + s->lease_tables_at),
        .marks = base + s->marks_at,
        .supers = base + s->supers_at,
    };
}

/* The compiler must not move what was written before below the store: another process may map the
 * file after our death. */
static void store_state(uint64_t *state, uint64_t value) {
    __atomic_store_n(state, value, __ATOMIC_RELEASE);
}

void lk_ledger_set_live(uint64_t *state) {
    store_state(state, (*state & ~UINT64_C(0xffffffff)) | LK_LEDGER_LIVE);
}

/* Generation 0 is passed over: no handle is 0. */
void lk_ledger_set_free(uint64_t *state) {
    uint32_t generation = lk_ledger_generation(*state) + 1;
    store_state(state, (uint64_t)(generation ? generation : 1) << 32);
}
