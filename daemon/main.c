/* SPDX-License-Identifier: MIT */
/*
 * main.c - locksd from its command line to its exit code.
 *
 * Order matters: signals are blocked before any thread exists; the socket is taken before memory,
 * so that a second daemon is told at once; memory is asked for before it is taken; threads and
 * memory are placed before there are any; systemd hears READY when all of it is there. Exit codes
 * are those of sysexits.h, each with one sentence on stderr.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sysexits.h>
#include <unistd.h>

#include "../graphs/engine.h"
#include "limits.h"
#include "log.h"
#include "report.h"
#include "server.h"

#define FDS_PER_CHANNEL 8 /* socket, bell, and those on their way to the client */
#define FDS_SPARE       128

struct daemon {
    struct lk_options options;
    struct lk_config config;
    struct lk_placement placement;
    struct lk_memory_report memory;
    struct lk_engine *engine;
    struct lk_intake *intake;
    struct lk_server server;
    char why[1024];
};

/* Whether stderr is the journal, which reads the level of a line from its head. */
static bool writes_to_journal(const struct lk_options *options) {
    const char *stream = getenv("JOURNAL_STREAM");
    unsigned long long device, inode;
    struct stat file;
    return !options->foreground && stream && sscanf(stream, "%llu:%llu", &device, &inode) == 2 &&
           fstat(STDERR_FILENO, &file) == 0 && file.st_dev == device && file.st_ino == inode;
}

/* Every client takes descriptors: the soft limit is raised as far as it goes. */
static void raise_descriptor_limit(const struct lk_config *config) {
    rlim_t wanted = FDS_SPARE + (rlim_t)config->max_channels * FDS_PER_CHANNEL;
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit))
        return;
    if (limit.rlim_cur < wanted) {
        limit.rlim_cur = wanted < limit.rlim_max ? wanted : limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    if (limit.rlim_cur < wanted)
        lk_log(LK_LOG_WARNING,
               "open files are limited to %llu, limits.max_channels %u may take %llu "
               "(RLIMIT_NOFILE, LimitNOFILE= of "
               "systemd)",
               (unsigned long long)limit.rlim_cur, config->max_channels,
               (unsigned long long)wanted);
}

static int open_engine(struct daemon *daemon) {
    struct lk_engine_options options = {
        .threads = daemon->placement.threads,
        .cpus = daemon->placement.pinned ? daemon->placement.cpus : NULL,
        .spin_us = daemon->config.spin_us,
        .workspace_bytes = lk_workspace_bytes(&daemon->config),
        .cpu_path = daemon->config.cpu_path,
    };
    return lk_engine_open(&options, &daemon->engine, daemon->why, sizeof(daemon->why));
}

/* Everything between the socket and READY. -> 0 or an exit code, sentence in why. */
static int take_memory(struct daemon *daemon) {
    if (lk_memory_invalid(&daemon->config, daemon->why, sizeof(daemon->why)))
        return EX_OSERR;
    lk_numa_place(&daemon->config, &daemon->placement);
    int rc = open_engine(daemon);
    if (!rc)
        rc = lk_intake_open(&daemon->config, daemon->engine, &daemon->intake, daemon->why,
                            sizeof(daemon->why));
    if (rc)
        return rc == -EINVAL || rc == -ENOTSUP ? EX_CONFIG : EX_OSERR;
    rc = lk_intake_start(daemon->intake);
    if (rc) {
        snprintf(daemon->why, sizeof(daemon->why), "the intake thread cannot be started: %s",
                 strerror(-rc));
        return EX_OSERR;
    }
    lk_memory_settle(&daemon->config, &daemon->placement, daemon->intake, &daemon->memory);
    return 0;
}

/* Serves until a signal. -> exit code, sentence in why. */
static int serve(struct daemon *daemon, uint64_t begun_ns) {
    struct lk_server *server = &daemon->server;
    struct lk_intake_status status;
    server->options = &daemon->options;
    server->config = daemon->config;
    server->intake = daemon->intake;
    server->engine = lk_engine_describe(daemon->engine);
    server->placement = &daemon->placement;
    server->memory = &daemon->memory;
    int rc = lk_server_open(server, daemon->why, sizeof(daemon->why));
    if (!rc) {
        lk_report_start(server, lk_now_ns() - begun_ns);
        rc = lk_server_run(server);
        if (rc)
            snprintf(daemon->why, sizeof(daemon->why), "the control thread cannot wait: %s",
                     strerror(-rc));
    }
    lk_intake_status(daemon->intake, &status);
    lk_intake_stop(daemon->intake);
    lk_server_close(server);
    if (!rc)
        lk_report_end(server, &status);
    return rc ? EX_OSERR : EX_OK;
}

static int run(struct daemon *daemon) {
    uint64_t begun_ns = lk_now_ns();
    lk_server_block_signals();
    lk_log_level(daemon->config.log_level);
    int rc = lk_listener_open(daemon->config.socket, &daemon->server.listener, daemon->why,
                              sizeof(daemon->why));
    if (rc) {
        lk_log(LK_LOG_ERROR, "%s", daemon->why);
        return EX_CANTCREAT;
    }
    raise_descriptor_limit(&daemon->config);
    int code = take_memory(daemon);
    if (!code)
        code = serve(daemon, begun_ns);
    if (code)
        lk_log(LK_LOG_ERROR, "%s", daemon->why);
    lk_listener_close(&daemon->server.listener);
    if (daemon->intake)
        lk_intake_close(daemon->intake);
    if (daemon->engine)
        lk_engine_close(daemon->engine);
    return code;
}

static int print(const char *text) {
    return fputs(text, stdout) < 0 || fflush(stdout) ? EX_IOERR : EX_OK;
}

static int print_config(const struct lk_config *config) {
    static char text[LK_CONFIG_TEXT_BYTES];
    char why[256];
    lk_config_text(config, text);
    if (lk_memory_invalid(config, why, sizeof(why)))
        lk_log(LK_LOG_WARNING, "on this machine it would not start: %s", why);
    return print(text);
}

int main(int argc, char **argv) {
    static struct daemon daemon;
    struct lk_options *options = &daemon.options;
    int rc = lk_options_parse(argc, argv, options, daemon.why, sizeof(daemon.why));
    lk_log_open(writes_to_journal(options));
    if (rc) {
        lk_log(LK_LOG_ERROR, "%s", daemon.why);
        return EX_USAGE;
    }
    if (options->action == LK_PRINT_HELP)
        return print(lk_options_help);
    if (options->action == LK_PRINT_VERSION)
        return print("locksd " LK_VERSION "\n");
    rc = lk_options_config(options, &daemon.config, daemon.why, sizeof(daemon.why));
    if (rc) {
        lk_log(LK_LOG_ERROR, "%s", daemon.why);
        return rc == -ENOENT || rc == -EACCES ? EX_NOINPUT : EX_CONFIG;
    }
    return options->action == LK_CHECK_CONFIG ? print_config(&daemon.config) : run(&daemon);
}
