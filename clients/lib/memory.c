/* SPDX-License-Identifier: MIT */
/*
 * memory.c - locks_alloc() and locks_free(), and pointers as arena offsets.
 */
#include "internal.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

void *locks_alloc(struct locks *locks, size_t bytes) {
    uint64_t offset, largest;
    int r = lk_arena_take(&locks->arena, bytes, &offset, &largest);
    if (r == -ENOSPC)
        lk_client_fail(locks, r,
                       "%zu byte%s not fit the arena: its largest free piece has %" PRIu64
                       " of %" PRIu64 " bytes, missing: %" PRIu64 " (locks_options.arena_bytes)",
                       bytes, bytes == 1 ? " does" : "s do", largest, locks->arena.bytes,
                       bytes - largest);
    else if (r)
        lk_client_fail(locks, r, "out of memory");
    return r ? NULL : locks->memory.arena + offset;
}

void locks_free(struct locks *locks, void *memory) {
    if (!memory)
        return;
    uint64_t offset = (uint64_t)((uintptr_t)memory - (uintptr_t)locks->memory.arena);
    if (lk_arena_give(&locks->arena, offset))
        lk_client_fail(locks, -EINVAL,
                       "locks_free: %p is not what locks_alloc() gave, or was freed", memory);
}

static const char *in_row(uint32_t row, char text[24]) {
    text[0] = '\0';
    if (row != LK_ROW_WHOLE)
        snprintf(text, 24, "row %u: ", row);
    return text;
}

int lk_client_offset(struct locks *locks, const void *pointer, const char *what, uint32_t row,
                     uint64_t *ret) {
    char where[24];
    uintptr_t p = (uintptr_t)pointer, first = (uintptr_t)locks->memory.arena;
    uintptr_t end = first + locks->memory.sizes.arena_bytes;
    if (!pointer)
        return lk_client_fail(locks, -EINVAL, "%s%s is NULL", in_row(row, where), what);
    if (p < first)
        return lk_client_fail(locks, -EINVAL,
                              "%s%s is not in the arena, it lies %" PRIuPTR
                              " bytes before its start (use locks_alloc)",
                              in_row(row, where), what, first - p);
    if (p >= end)
        return lk_client_fail(locks, -EINVAL,
                              "%s%s is not in the arena, it lies %" PRIuPTR
                              " bytes behind its end (use locks_alloc)",
                              in_row(row, where), what, p - end);
    *ret = p - first;
    return 0;
}

int lk_client_payload(struct locks *locks, const void *pointer, const char *what, uint32_t row,
                      uint64_t *ret) {
    uintptr_t offset = (uintptr_t)pointer - (uintptr_t)locks->device;
    if (!locks->device || !pointer || offset >= locks->bounds.device_bytes)
        return lk_client_offset(locks, pointer, what, row, ret);
    *ret = LK_DEVICE_BASE + offset;
    return 0;
}
