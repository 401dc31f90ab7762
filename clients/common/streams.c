/* SPDX-License-Identifier: MIT */
/*
 * streams.c - see streams.h.
 */
#include "streams.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sysexits.h>

#include "../../shm_protocol/fill_streams.h"

void lk_begin(void) {
    lk_fill_streams(O_RDONLY);
}

int lk_finish(const char *tool, int code) {
    bool lost = ferror(stdout) != 0; /* some time ago: why is not known any more */
    errno = EIO;
    if (!fflush(stdout) && !lost)
        return code;
    fprintf(stderr, "%s: standard output cannot be written: %s\n", tool, strerror(errno));
    return code ? code : EX_IOERR;
}
