/* SPDX-License-Identifier: MIT */
/*
 * output.h - a file that appears whole or not at all.
 *
 * Idea: bytes go to a temporary file beside the one asked for, which takes its name at the end. So
 * that it cannot be made is known before any work, and what is there stays until its successor is
 * complete. Symbolic links are followed. What is no regular file (a device, a pipe) is written as
 * it is.
 *
 *     open -> write to ->file -> commit | abandon
 *
 * SIGHUP, SIGINT and SIGTERM remove the temporary before they end the tool, through handlers that
 * stay; SIGKILL leaves it, as `.locks-XXXXXX`. One output at a time in a process, one thread.
 */
#ifndef LK_OUTPUT_H
#define LK_OUTPUT_H

#include <stddef.h>
#include <stdio.h>

struct lk_output {
    FILE *file;
    char *path; /* as asked for */
    char *name; /* what the temporary becomes; NULL: there is none */
};

/* -> 0, or -errno with a sentence in why that names path. */
int lk_output_open(const char *path, struct lk_output *ret, char *why, size_t why_bytes);
/* The output is closed and gone, whatever is returned. */
int lk_output_commit(struct lk_output *output, char *why, size_t why_bytes);
void lk_output_abandon(struct lk_output *output); /* a zeroed one is fine */

#endif
