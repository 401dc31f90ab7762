/* SPDX-License-Identifier: MIT */
/*
 * finish.c - see finish.h.
 */
#include "finish.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sysexits.h>

int lk_finish(const char *tool, int code) {
    bool lost = ferror(stdout) != 0; /* some time ago: why is not known any more */
    errno = EIO;
    if (!fflush(stdout) && !lost)
        return code;
    fprintf(stderr, "%s: standard output cannot be written: %s\n", tool, strerror(errno));
    return code ? code : EX_IOERR;
}
