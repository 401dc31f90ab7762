/* SPDX-License-Identifier: MIT */
/*
 * served.h - which model geometries locksd serves, for a tool that asks before it starts one.
 *
 * The daemon's own rule is kernels/geometry.c, which clients do not link: tests/unit/test_served.c
 * holds the two together. Pure, any thread.
 */
#ifndef LK_SERVED_H
#define LK_SERVED_H

#include <stdint.h>

enum lk_served_part {
    LK_SERVED_KV_HEADS,
    LK_SERVED_GROUP,
    LK_SERVED_HEAD_DIM,
    LK_SERVED_PAGE_TOKENS,
    LK_SERVED_RANK, /* which may not exceed the page's tokens either */
    LK_SERVED_PARTS
};

/* NULL: it may be this; else what it may be, "8, 16, 32 or 64". */
const char *lk_not_served(enum lk_served_part part, uint64_t value);

#endif
