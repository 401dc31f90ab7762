/* SPDX-License-Identifier: MIT */
/*
 * mps.c - see mps.h. The service is there where somebody holds the other end of its control pipe: a
 * service that has ended leaves the file behind.
 */
#include "mps.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define PIPES "/tmp/nvidia-mps" /* where $CUDA_MPS_PIPE_DIRECTORY does not say */
#define COST                                                                                       \
    "clients and daemon take turns on the GPU, and a step that kernels wait for takes "            \
    "milliseconds there and back, with MPS some 6 us"

/* A datagram socket cannot talk to it, so that asking does not disturb it: the error tells. */
static bool listens(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof(address.sun_path))
        return false;
    memcpy(address.sun_path, path, strlen(path));
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool there = fd >= 0 && (connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0 ||
                             errno == EPROTOTYPE);
    if (fd >= 0)
        close(fd);
    return there;
}

static bool has_reader(const char *path) {
    int fd = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd >= 0)
        close(fd);
    return fd >= 0;
}

static bool runs(void) {
    const char *folder = getenv("CUDA_MPS_PIPE_DIRECTORY");
    char control[4096];
    struct stat status;
    snprintf(control, sizeof(control), "%s/control", folder && *folder ? folder : PIPES);
    if (stat(control, &status))
        return false;
    return S_ISSOCK(status.st_mode)   ? listens(control)
           : S_ISFIFO(status.st_mode) ? has_reader(control)
                                      : false;
}

const char *lk_mps_words(bool active, char text[LK_MPS_WORDS]) {
    snprintf(text, LK_MPS_WORDS, "%s",
             active   ? "clients and daemon run on the GPU side by side (MPS)"
             : runs() ? "MPS runs but locksd is older, restart it: until then " COST
                      : "there is no MPS: " COST);
    return text;
}
