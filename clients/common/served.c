/* SPDX-License-Identifier: MIT */
/*
 * served.c - see served.h.
 */
#include "served.h"

#include <stddef.h>

static const struct {
    uint32_t max;    /* 0: one of those */
    uint32_t one[8]; /* up to a 0 */
    const char *text;
} parts[LK_SERVED_PARTS] = {
    [LK_SERVED_KV_HEADS] = {256, {0}, "1 to 256"},
    [LK_SERVED_GROUP] = {32, {0}, "1 to 32"},
    [LK_SERVED_HEAD_DIM] = {0,
                            {64, 80, 96, 112, 128, 192, 256},
                            "64, 80, 96, 112, 128, 192 or 256"},
    [LK_SERVED_PAGE_TOKENS] = {0, {8, 16, 32, 64}, "8, 16, 32 or 64"},
    [LK_SERVED_RANK] = {0, {2, 4, 8, 16}, "2, 4, 8 or 16"},
};

const char *lk_not_served(enum lk_served_part part, uint64_t value) {
    if (value >= 1 && value <= parts[part].max)
        return NULL;
    for (const uint32_t *one = parts[part].one; *one; one++)
        if (value == *one)
            return NULL;
    return parts[part].text;
}
