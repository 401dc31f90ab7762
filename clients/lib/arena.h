/* SPDX-License-Identifier: MIT */
/*
 * arena.h - which bytes of the arena are in use.
 *
 * Idea: first fit over a list of pieces sorted by offset, neighbours merged when they become free.
 * The list lies in private memory: nothing of the arena itself is read or written, so neither a
 * stray write of the application nor the daemon can confuse it.
 *
 * Invariants: pieces cover the arena without gap or overlap, in ascending order; no two free ones
 * are neighbours; every offset and size is a multiple of LK_LINE.
 * Threads: as the connection.
 * What it does not do: no pointers, only offsets. An application has tens of buffers, so linear
 * search is enough.
 */
#ifndef LK_ARENA_H
#define LK_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct lk_arena_piece {
    uint64_t offset, bytes;
    bool used;
};

struct lk_arena {
    struct lk_arena_piece *pieces;
    size_t count, room;
    uint64_t bytes;
};

/* bytes: of the arena, a multiple of LK_LINE. 0 or -ENOMEM. */
int lk_arena_init(struct lk_arena *arena, uint64_t bytes);
void lk_arena_destroy(struct lk_arena *arena);
/* 0; -ENOSPC: *ret_largest is the largest free piece (only then); -ENOMEM. */
int lk_arena_take(struct lk_arena *arena, uint64_t bytes, uint64_t *ret_offset,
                  uint64_t *ret_largest);
/* 0; -EINVAL: no piece in use starts there. */
int lk_arena_give(struct lk_arena *arena, uint64_t offset);

#endif
