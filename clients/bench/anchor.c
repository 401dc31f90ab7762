/* SPDX-License-Identifier: MIT */
/*
 * anchor.c - see anchor.h. The script is anchor.py, linked in as bytes.
 */
#include "anchor.h"

#include <fcntl.h>
#include <inttypes.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../common/progress.h"

#define CASE_BYTES 64
#define FIRST_ARGS 6 /* python3 -c SCRIPT GPU ROUNDS CACHE */

extern char **environ;
extern const char _binary_clients_bench_anchor_py_start[], _binary_clients_bench_anchor_py_end[];

struct command {
    char gpu[16], rounds[16], cache[24];
    char cases[ANCHOR_CASES_MAX][CASE_BYTES];
    char *argv[FIRST_ARGS + ANCHOR_CASES_MAX + 1];
    unsigned count;
};

static void write_command(const struct choice *choice, uint32_t rounds, uint64_t cache_bytes,
                          char *script, struct command *ret) {
    snprintf(ret->gpu, sizeof(ret->gpu), "%" PRIu32, choice->gpu);
    snprintf(ret->rounds, sizeof(ret->rounds), "%" PRIu32, rounds);
    snprintf(ret->cache, sizeof(ret->cache), "%" PRIu64, cache_bytes);
    char *const first[FIRST_ARGS] = {"python3", "-c", script, ret->gpu, ret->rounds, ret->cache};
    memcpy(ret->argv, first, sizeof(first));
    for (unsigned h = 0; h < choice->heads.count; h++)
        for (unsigned c = 0; c < choice->context.count; c++)
            for (unsigned b = 0; b < choice->batch.count; b++) {
                struct choice_heads heads = choice_heads_at(choice, h);
                snprintf(ret->cases[ret->count], CASE_BYTES,
                         "%" PRIu32 "/%" PRIu32 ":%" PRIu64 ":%" PRIu64, heads.q, heads.kv,
                         choice->context.at[c], choice->batch.at[b]);
                ret->argv[FIRST_ARGS + ret->count] = ret->cases[ret->count];
                ret->count++;
            }
}

/* Its stdout into a pipe, its stderr nowhere. -> the reading end, or NULL. */
static FILE *start(struct command *command, pid_t *ret_pid) {
    posix_spawn_file_actions_t actions;
    int ends[2];
    if (pipe2(ends, O_CLOEXEC))
        return NULL;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    int error = posix_spawnp(ret_pid, "python3", &actions, NULL, command->argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    FILE *out = error ? NULL : fdopen(ends[0], "r");
    if (!out)
        close(ends[0]);
    return out;
}

static struct anchor_case *place_for(struct anchor *anchor, const struct anchor_case *like) {
    for (unsigned i = 0; i < anchor->count; i++) {
        struct anchor_case *at = &anchor->at[i];
        if (at->q_heads == like->q_heads && at->kv_heads == like->kv_heads &&
            at->rows == like->rows && at->tokens == like->tokens)
            return at;
    }
    if (anchor->count == ANCHOR_CASES_MAX)
        return NULL;
    anchor->at[anchor->count] = *like;
    return &anchor->at[anchor->count++];
}

static void take_line(struct anchor *anchor, const char *line) {
    struct anchor_case read = {.rows = 0};
    char backend[8];
    double us;
    if (strncmp(line, "torch ", 6) == 0) {
        snprintf(anchor->version, sizeof(anchor->version), "%.*s", (int)strcspn(line, "\n"), line);
        return;
    }
    if (sscanf(line, "%" SCNu32 " %" SCNu32 " %" SCNu64 " %" SCNu32 " %7s %lf", &read.q_heads,
               &read.kv_heads, &read.tokens, &read.rows, backend, &us) != 6 ||
        !(us > 0))
        return;
    struct anchor_case *at = place_for(anchor, &read);
    if (at && strcmp(backend, "cudnn") == 0)
        at->cudnn_us = us;
    else if (at)
        at->flash_us = us;
}

void anchor_measure(const struct choice *choice, uint32_t rounds, uint64_t cache_bytes,
                    struct anchor *ret) {
    size_t bytes = (uintptr_t)_binary_clients_bench_anchor_py_end -
                   (uintptr_t)_binary_clients_bench_anchor_py_start;
    char *script = strndup(_binary_clients_bench_anchor_py_start, bytes), line[256];
    struct command *command = calloc(1, sizeof(*command));
    struct lk_progress progress;
    pid_t pid;
    ret->version[0] = '\0';
    ret->count = 0;
    FILE *out = NULL;
    if (script && command) {
        write_command(choice, rounds, cache_bytes, script, command);
        out = start(command, &pid);
    }
    if (out) {
        lk_progress_begin(&progress, "dense attention through torch", command->count);
        while (fgets(line, sizeof(line), out)) {
            take_line(ret, line);
            lk_progress_at(&progress, ret->count);
        }
        fclose(out);
        waitpid(pid, NULL, 0);
        lk_progress_end(&progress, true);
    }
    free(command);
    free(script);
}

const struct anchor_case *anchor_find(const struct anchor *anchor, struct choice_heads heads,
                                      uint64_t tokens, uint32_t rows) {
    for (unsigned i = 0; i < anchor->count; i++) {
        const struct anchor_case *at = &anchor->at[i];
        if (at->q_heads == heads.q && at->kv_heads == heads.kv && at->tokens == tokens &&
            at->rows == rows)
            return at;
    }
    return NULL;
}
