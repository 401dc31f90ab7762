/* SPDX-License-Identifier: MIT */
/*
 * origin.c - see origin.h. Main and control thread.
 */
#include "origin.h"

#include <stdio.h>
#include <string.h>

#include "assert.h"

void lk_origins_open(struct lk_origins *ret, const char *file) {
    ret->count = 0;
    ret->used = 0;
    ret->names[0] = 0;
    lk_origins_source(ret, file);
}

uint32_t lk_origins_source(struct lk_origins *origins, const char *name) {
    size_t at = origins->used, length = strlen(name);
    if (length >= sizeof(origins->names) - at)
        return 0;
    memcpy(origins->names + at, name, length + 1);
    origins->used += length + 1;
    return (uint32_t)at;
}

void lk_origins_note(struct lk_origins *origins, size_t field, uint32_t source, uint32_t line) {
    uint32_t at = 0;
    while (at < origins->count && origins->origin[at].field != field)
        at++;
    LK_ASSERT(at < LK_ORIGINS_MAX);
    origins->count += at == origins->count;
    origins->origin[at] = (struct lk_origin){field, source, line};
}

const struct lk_origin *lk_origins_find(const struct lk_origins *origins, size_t field) {
    for (uint32_t i = 0; i < origins->count; i++)
        if (origins->origin[i].field == field)
            return &origins->origin[i];
    return NULL;
}

const char *lk_origins_place(const struct lk_origins *origins, size_t field,
                             char text[LK_PLACE_BYTES]) {
    const struct lk_origin *origin = lk_origins_find(origins, field);
    const char *name = origins->names + (origin ? origin->source : 0);
    if (origin && origin->line)
        snprintf(text, LK_PLACE_BYTES, "%.300s:%u: ", name, origin->line);
    else
        snprintf(text, LK_PLACE_BYTES, "%.300s: ", name);
    return text;
}
