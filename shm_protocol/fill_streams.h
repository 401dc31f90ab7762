/* SPDX-License-Identifier: MIT */
/*
 * fill_streams.h - standard streams that were closed, for either side: first of all in main().
 *
 * Before there are threads.
 */
#ifndef LK_FILL_STREAMS_H
#define LK_FILL_STREAMS_H

#include <fcntl.h>
#include <unistd.h>

/* A stream that is closed would give its number to the next file opened, and what is said would go
 * there: into memory that is shared, or to the other side. It becomes /dev/null, opened with
 * `flags`: O_RDWR, and what is said is lost; O_RDONLY, and saying it fails. */
static inline void lk_fill_streams(int flags) {
    int fd;
    do
        fd = open("/dev/null", flags);
    while (fd >= 0 && fd < STDERR_FILENO);
    if (fd > STDERR_FILENO)
        close(fd);
}

#endif
