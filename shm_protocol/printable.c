/* SPDX-License-Identifier: MIT */
/*
 * printable.c - see printable.h.
 */
#include "printable.h"

#include <stdbool.h>
#include <string.h>

/* Bytes that follow the first one of a character in UTF-8. */
static unsigned followers(unsigned char first) {
    return first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : first >= 0xc2 ? 1 : 0;
}

static bool is_c1(unsigned char byte) {
    return byte >= 0x80 && byte <= 0x9f;
}

char *lk_printable(char *text, const char *kept) {
    unsigned left = 0; /* of the character that has begun */
    for (char *at = text; *at; at++) {
        unsigned char byte = (unsigned char)*at;
        if (left && (byte & 0xc0) == 0x80) {
            left--;
            continue;
        }
        left = followers(byte);
        if (byte == 0xc2 && is_c1((unsigned char)at[1]))
            *at++ = '?';
        if (byte == 0x7f || is_c1((unsigned char)*at) || (byte < ' ' && !strchr(kept, byte)))
            *at = '?';
    }
    return text;
}
