/* SPDX-License-Identifier: MIT */
/*
 * output.c - see output.h.
 */
#include "output.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "deadly.h"

/* For the signal handler. */
static char temporary[PATH_MAX]; /* empty: none */
static struct lk_deadly_link chain;

static int refuse(const char *path, int error, char *why, size_t why_bytes) {
    snprintf(why, why_bytes, "%s: cannot be written: %s", path, strerror(error));
    return -error;
}

static void remove_temporary(void) { /* async-signal-safe */
    if (temporary[0])
        unlink(temporary);
}

static void die(int signal) { /* handler */
    remove_temporary();
    lk_deadly_pass_on(&chain, signal);
}

/* What a file made by open() would have. */
static mode_t mode_of_new(void) {
    mode_t mask = umask(0);
    umask(mask);
    return 0666 & ~mask;
}

/* -> a descriptor, or -1 with errno. */
static int make_temporary(const char *name, mode_t mode) {
    const char *slash = strrchr(name, '/');
    int folder = slash ? (int)(slash + 1 - name) : 0;
    if (snprintf(temporary, sizeof(temporary), "%.*s.locks-XXXXXX", folder, name) >=
        (int)sizeof(temporary)) {
        temporary[0] = '\0';
        errno = ENAMETOOLONG;
        return -1;
    }
    int fd = mkostemp(temporary, O_CLOEXEC);
    if (fd < 0)
        temporary[0] = '\0';
    else
        fchmod(fd, mode); /* not every file system can */
    return fd;
}

int lk_output_open(const char *path, struct lk_output *ret, char *why, size_t why_bytes) {
    struct lk_output output = {.path = strdup(path)};
    struct stat status;
    bool there = stat(path, &status) == 0;
    if (there && !S_ISREG(status.st_mode)) {
        output.file = fopen(path, "we");
    } else if (!there || access(path, W_OK) == 0) {
        lk_deadly_install(&chain, die);
        output.name = there ? realpath(path, NULL) : strdup(path);
        int fd = output.name
                     ? make_temporary(output.name, there ? status.st_mode & 0777 : mode_of_new())
                     : -1;
        output.file = fd < 0 ? NULL : fdopen(fd, "w");
    }
    int error = errno;
    if (!output.file || !output.path) {
        lk_output_abandon(&output);
        return refuse(path, error, why, why_bytes);
    }
    *ret = output;
    return 0;
}

int lk_output_commit(struct lk_output *output, char *why, size_t why_bytes) {
    int rc = 0;
    bool failed = fclose(output->file);
    output->file = NULL;
    if (failed || (output->name && rename(temporary, output->name)))
        rc = refuse(output->path, errno, why, why_bytes);
    else
        temporary[0] = '\0';
    lk_output_abandon(output);
    return rc;
}

void lk_output_abandon(struct lk_output *output) {
    remove_temporary();
    temporary[0] = '\0';
    if (output->file)
        fclose(output->file);
    free(output->path);
    free(output->name);
    *output = (struct lk_output){0};
}
