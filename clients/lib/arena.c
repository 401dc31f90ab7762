/* SPDX-License-Identifier: MIT */
/*
 * arena.c - which bytes of the arena are in use. See arena.h for the contract.
 */
#include "arena.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "../../shm_protocol/locks_abi.h"

#define PIECES_FIRST 64

int lk_arena_init(struct lk_arena *arena, uint64_t bytes) {
    struct lk_arena_piece *pieces = calloc(PIECES_FIRST, sizeof(*pieces));
    if (!pieces)
        return -ENOMEM;
    pieces[0] = (struct lk_arena_piece){.bytes = bytes};
    *arena = (struct lk_arena){.pieces = pieces, .count = 1, .room = PIECES_FIRST, .bytes = bytes};
    return 0;
}

void lk_arena_destroy(struct lk_arena *arena) {
    free(arena->pieces);
    *arena = (struct lk_arena){0};
}

/* Room for one more piece: a piece that is taken leaves a rest. */
static int grow(struct lk_arena *arena) {
    if (arena->count < arena->room)
        return 0;
    struct lk_arena_piece *more =
        reallocarray(arena->pieces, arena->room * 2, sizeof(*arena->pieces));
    if (!more)
        return -ENOMEM;
    arena->pieces = more;
    arena->room *= 2;
    return 0;
}

static void split(struct lk_arena *arena, size_t i, uint64_t bytes) {
    struct lk_arena_piece *p = &arena->pieces[i];
    if (p->bytes > bytes) {
        memmove(p + 2, p + 1, (arena->count - i - 1) * sizeof(*p));
        p[1] = (struct lk_arena_piece){.offset = p->offset + bytes, .bytes = p->bytes - bytes};
        arena->count++;
    }
    p->bytes = bytes;
    p->used = true;
}

int lk_arena_take(struct lk_arena *arena, uint64_t bytes, uint64_t *ret_offset,
                  uint64_t *ret_largest) {
    uint64_t largest = 0;
    uint64_t lines =
        bytes > arena->bytes ? arena->bytes + LK_LINE : (bytes + LK_LINE - 1) / LK_LINE * LK_LINE;
    if (lines == 0)
        lines = LK_LINE;
    if (grow(arena))
        return -ENOMEM;
    for (size_t i = 0; i < arena->count; i++) {
        struct lk_arena_piece *p = &arena->pieces[i];
        if (p->used)
            continue;
        if (p->bytes >= lines) {
            split(arena, i, lines);
            *ret_offset = p->offset;
            return 0;
        }
        if (p->bytes > largest)
            largest = p->bytes;
    }
    *ret_largest = largest;
    return -ENOSPC;
}

/* Joins piece i with its right neighbour if both are free. */
static void join(struct lk_arena *arena, size_t i) {
    struct lk_arena_piece *p = &arena->pieces[i];
    if (i + 1 >= arena->count || p[0].used || p[1].used)
        return;
    p[0].bytes += p[1].bytes;
    memmove(p + 1, p + 2, (arena->count - i - 2) * sizeof(*p));
    arena->count--;
}

int lk_arena_give(struct lk_arena *arena, uint64_t offset) {
    for (size_t i = 0; i < arena->count; i++) {
        if (arena->pieces[i].offset != offset || !arena->pieces[i].used)
            continue;
        arena->pieces[i].used = false;
        join(arena, i);
        if (i > 0)
            join(arena, i - 1);
        return 0;
    }
    return -EINVAL;
}
