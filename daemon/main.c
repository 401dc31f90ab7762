/* SPDX-License-Identifier: MIT */
/*
 * main.c - locksd from its command line to its exit code.
 *
 * Order matters: signals are held before all else; the socket is taken before memory,
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
#include "../shm_protocol/fill_streams.h"
#include "../shm_protocol/printable.h"
#include "log.h"
#include "report.h"
#include "server.h"
#include "signals.h"
#include "start.h"

/* The limit counts those on their way to clients that do not read; fewer are open. */
#define FDS_SPARE (128 + (LK_PEERS_ASKING + LK_PEERS_ADMIN) * LK_PEER_UNREAD)

struct daemon {
    struct lk_options options;
    struct lk_config config;
    struct lk_origins origins;
    struct lk_started started;
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
    rlim_t wanted = FDS_SPARE + (rlim_t)config->max_channels * LK_PEER_UNREAD;
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

/* Serves until a signal. -> exit code, sentence in why. */
static int serve(struct daemon *daemon, uint64_t begun_ns) {
    struct lk_server *server = &daemon->server;
    struct lk_intake_status status;
    server->options = &daemon->options;
    server->config = daemon->config;
    server->intake = daemon->started.intake;
    server->engine = lk_engine_describe(daemon->started.engine);
    server->placement = &daemon->started.placement;
    server->memory = &daemon->started.memory;
    int rc = lk_server_open(server, daemon->why, sizeof(daemon->why));
    if (!rc) {
        lk_report_start(server, lk_now_ns() - begun_ns);
        rc = lk_server_run(server);
        if (rc)
            snprintf(daemon->why, sizeof(daemon->why), "the control thread cannot wait: %s",
                     strerror(-rc));
    }
    lk_intake_status(daemon->started.intake, &status);
    lk_intake_stop(daemon->started.intake);
    lk_server_close(server);
    if (!rc)
        lk_report_end(server, &status);
    return rc ? EX_OSERR : EX_OK;
}

static int run(struct daemon *daemon) {
    uint64_t begun_ns = lk_now_ns();
    lk_fill_streams(O_RDWR);
    lk_log_level(daemon->config.log_level);
    int rc = lk_listener_open(daemon->config.socket, &daemon->server.listener, daemon->why,
                              sizeof(daemon->why));
    if (rc) {
        lk_log(LK_LOG_ERROR, "%s", daemon->why);
        return EX_CANTCREAT;
    }
    raise_descriptor_limit(&daemon->config);
    int code = lk_start(&daemon->config, &daemon->origins, &daemon->started, daemon->why,
                        sizeof(daemon->why));
    if (code == LK_START_STOPPED) {
        lk_log(LK_LOG_INFO, "stopped before it was ready");
        lk_listener_close(&daemon->server.listener);
        _exit(EX_OK); /* memory is still being taken on another thread */
    }
    if (!code)
        code = serve(daemon, begun_ns);
    if (code)
        lk_log(LK_LOG_ERROR, "%s", daemon->why);
    if (code == EX_CONFIG)
        lk_listener_turn_away(&daemon->server.listener);
    lk_listener_close(&daemon->server.listener);
    if (daemon->started.intake)
        lk_intake_close(daemon->started.intake);
    if (daemon->started.engine)
        lk_engine_close(daemon->started.engine);
    return code;
}

static int print(const char *text) {
    if (fputs(text, stdout) >= 0 && fflush(stdout) == 0)
        return EX_OK;
    lk_log(LK_LOG_ERROR, "standard output cannot be written: %s", strerror(errno));
    return EX_IOERR;
}

/* Checks what a start would, taking nothing, and prints the values in force. What this machine
 * lacks now is a warning: another one may run it. */
static int check_config(struct daemon *daemon) {
    static char text[LK_CONFIG_TEXT_BYTES];
    struct lk_config *config = &daemon->config;
    struct lk_placement placement;
    struct lk_access access;
    int code = lk_start_check(config, &daemon->origins, daemon->why, sizeof(daemon->why));
    if (code == EX_CONFIG) {
        lk_log(LK_LOG_ERROR, "%s", daemon->why);
        return code;
    }
    if (code)
        lk_log(LK_LOG_WARNING, "on this machine it would not start: %s", daemon->why);
    lk_numa_place(config, &placement);
    lk_access_open(config->group, &access);
    lk_report_missing(&access, &placement);
    lk_report_room(config);
    lk_config_text(config, text);
    return print(lk_printable(text, "\n"));
}

static int config_failed(int rc) {
    return rc == -EINVAL ? EX_CONFIG : rc == -ENOMEM ? EX_OSERR : EX_NOINPUT;
}

/* Reads the configuration. It may come from a pipe: a daemon that waits for it can be stopped. */
static int read_config(struct daemon *daemon) {
    bool serves = daemon->options.action == LK_RUN;
    if (serves)
        lk_signals_leaving();
    int rc = lk_options_config(&daemon->options, &daemon->config, &daemon->origins, daemon->why,
                               sizeof(daemon->why));
    if (serves)
        lk_signals_hold();
    return rc;
}

int main(int argc, char **argv) {
    static struct daemon daemon;
    struct lk_options *options = &daemon.options;
    lk_signals_hold();
    int rc = lk_options_parse(argc, argv, options, daemon.why, sizeof(daemon.why));
    lk_log_open(writes_to_journal(options));
    if (rc) {
        lk_log(LK_LOG_ERROR, "%s", daemon.why);
        lk_listener_turn_away(NULL);
        return EX_USAGE;
    }
    if (options->action != LK_RUN)
        lk_signals_let_go();
    if (options->action == LK_PRINT_HELP)
        return print(lk_options_help);
    if (options->action == LK_PRINT_VERSION)
        return print("locksd " LK_VERSION "\n");
    rc = read_config(&daemon);
    if (rc) {
        lk_log(LK_LOG_ERROR, "%s", daemon.why);
        lk_listener_turn_away(NULL);
        return config_failed(rc);
    }
    return options->action == LK_CHECK_CONFIG ? check_config(&daemon) : run(&daemon);
}
