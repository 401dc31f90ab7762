/* SPDX-License-Identifier: MIT */
/*
 * streams.c - see streams.h.
 */
#include "streams.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sysexits.h>
#include <unistd.h>

void lk_begin(void) {
    int fd;
    do
        fd = open("/dev/null", O_RDONLY);
    while (fd >= 0 && fd < STDERR_FILENO);
    if (fd > STDERR_FILENO)
        close(fd);
}

int lk_finish(const char *tool, int code) {
    bool lost = ferror(stdout) != 0; /* some time ago: why is not known any more */
    errno = EIO;
    if (!fflush(stdout) && !lost)
        return code;
    fprintf(stderr, "%s: standard output cannot be written: %s\n", tool, strerror(errno));
    return code ? code : EX_IOERR;
}
