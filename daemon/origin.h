/* SPDX-License-Identifier: MIT */
/*
 * origin.h - where each value of a configuration was said: a line of a file, or an option.
 *
 * A value is known by its field's offset in struct lk_config, a pool by the offset of its name. The
 * last place where something was said counts, as its value does. Lives while a configuration is
 * read and checked; whoever reads owns it.
 */
#ifndef LK_ORIGIN_H
#define LK_ORIGIN_H

#include <stddef.h>
#include <stdint.h>

#define LK_ORIGINS_MAX       256  /* all keys of all sections there may be */
#define LK_ORIGIN_NAME_BYTES 8192 /* files and options; where there is no room, places are vague */
#define LK_PLACE_BYTES       320  /* of a place as text; longer ones are cut */

struct lk_origin {
    size_t field;
    uint32_t source; /* offset in names */
    uint32_t line;   /* 0: an option */
};

struct lk_origins {
    uint32_t count;
    struct lk_origin origin[LK_ORIGINS_MAX];
    size_t used;
    char names[LK_ORIGIN_NAME_BYTES]; /* terminated, one after the other; the first is the file */
};

/* Nothing is said yet; `file` is what is blamed for what nobody said. */
void lk_origins_open(struct lk_origins *ret, const char *file);
/* A file or option that things will be said by. */
uint32_t lk_origins_source(struct lk_origins *origins, const char *name);
void lk_origins_note(struct lk_origins *origins, size_t field, uint32_t source, uint32_t line);
/* NULL: it was not said. */
const struct lk_origin *lk_origins_find(const struct lk_origins *origins, size_t field);
/* "FILE:12: ", "--set 'X': ", or "FILE: " where it was not said -> text */
const char *lk_origins_place(const struct lk_origins *origins, size_t field,
                             char text[LK_PLACE_BYTES]);

#endif
