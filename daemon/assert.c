/* SPDX-License-Identifier: MIT */
/*
 * assert.c - see assert.h: the last words of a daemon that found a bug of its own.
 */
#include "assert.h"

#include <stdlib.h>

#include "log.h"

void lk_assert_failed(const char *expression, const char *file, int line) {
    lk_log(LK_LOG_ERROR, "%s:%d: a bug of the daemon: (%s) does not hold", file, line, expression);
    abort();
}
