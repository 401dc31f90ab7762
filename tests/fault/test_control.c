/* SPDX-License-Identifier: MIT */
/*
 * test_control.c - the daemon's life: start and stop, sockets made, stale, live and passed, exit
 * codes, what systemd hears, reload, drain, idleness. A real daemon is run for each test.
 */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sysexits.h>
#include <unistd.h>

#include "../common/run.h"
#include "../common/rig.h"
#include "locks.h"

#define TEXT_BYTES 8192 /* of what a program says */

static void assert_has(const char *text, const char *words) {
    ck_assert_msg(strstr(text, words) != NULL, "'%s' lacks '%s'", text, words);
}

/* Asks a verb that must be answered. */
static json_t *ask(const struct rig *rig, const char *verb) {
    char why[512] = "", *text;
    int rc = locks_admin(rig->socket, verb, &text, why, sizeof(why));
    ck_assert_msg(rc == 0, "%s: %s", verb, why);
    json_t *reply = json_loads(text, 0, NULL);
    ck_assert_ptr_nonnull(reply);
    free(text);
    return reply;
}

static json_int_t ask_number(const struct rig *rig, const char *verb, const char *name) {
    json_t *reply = ask(rig, verb);
    json_int_t value = json_integer_value(json_object_get(reply, name));
    json_decref(reply);
    return value;
}

static struct locks *connect_client(const struct rig *rig) {
    struct locks_options options = {
        .size = sizeof(options), .socket = rig->socket, .arena_bytes = 1 << 20};
    struct locks *client;
    ck_assert_msg(locks_connect(&options, &client) == 0, "%s", locks_error(NULL));
    return client;
}

/* ---- start and stop ---- */

START_TEST(starts_says_what_it_is_and_stops) {
    struct rig rig;
    rig_start(&rig, NULL);
    const char *log = rig_log(&rig);
    assert_has(log, "locksd ");
    assert_has(log, "pool default: layers 2, kv_heads 1, group 2, head_dim 64, page_tokens 16, "
                    "rank 8, bf16");
    assert_has(log, "room for ");
    assert_has(log, "bytes a token");
    assert_has(log, rig.socket);
    assert_has(log, "may connect");
    assert_has(log, "ready after");
    kill(rig.pid, SIGTERM);
    ck_assert(rig_hears(&rig, "STOPPING=1", RIG_PATIENCE));
    ck_assert_int_eq(rig_wait(&rig, RIG_PATIENCE), EX_OK);
    assert_has(rig_log(&rig), "stopped after");
    ck_assert_int_eq(access(rig.socket, F_OK), -1);
    rig_close(&rig);
}
END_TEST

/* Its timers' signal (guard.c), sent by somebody else: before the first client as behind it. */
START_TEST(a_stray_signal_of_its_own_ends_nothing) {
    struct rig rig;
    rig_start(&rig, NULL);
    for (int i = 0; i < 2; i++) {
        kill(rig.pid, SIGUSR1);
        rig_sleep(0.1);
        json_decref(ask(&rig, "status"));
    }
    ck_assert_int_eq(rig_stop(&rig), EX_OK);
    rig_close(&rig);
}
END_TEST

/* What the daemon opens gets none of the numbers of its streams: it would be logged into. */
START_TEST(starts_without_streams) {
    struct rig rig;
    char path[64], file[64], program[4096];
    rig_open(&rig, NULL);
    const char *daemon = rig_binary("locksd", program);
    rig.pid = fork();
    ck_assert_int_ge(rig.pid, 0);
    if (rig.pid == 0) {
        snprintf(path, sizeof(path), "%s/notify", rig.folder);
        setenv("NOTIFY_SOCKET", path, 1);
        for (int fd = 0; fd < 3; fd++)
            close(fd);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        execl(daemon, "locksd", "--config", rig.config, "--foreground", NULL);
        _exit(127);
    }
    ck_assert(rig_hears(&rig, "READY=1", RIG_PATIENCE));
    locks_close(connect_client(&rig));
    for (int fd = 0; fd < 3; fd++) {
        snprintf(path, sizeof(path), "/proc/%d/fd/%d", rig.pid, fd);
        ssize_t length = readlink(path, file, sizeof(file) - 1);
        ck_assert_int_gt(length, 0);
        file[length] = 0;
        ck_assert_str_eq(file, "/dev/null");
    }
    ck_assert_int_eq(rig_stop(&rig), EX_OK);
    rig_close(&rig);
}
END_TEST

START_TEST(warns_of_a_workspace_too_small) {
    struct rig rig;
    rig_start(&rig, "[daemon]\nworkspace = 1K\n");
    assert_has(rig_log(&rig), "daemon.workspace is 1.0 KiB, the largest row takes ");
    ck_assert_int_eq(rig_stop(&rig), EX_OK);
    rig_close(&rig);
}
END_TEST

/* Taking memory must not make it deaf. A fast machine may be ready before the signal comes. */
START_TEST(stops_while_it_starts) {
    struct rig rig;
    const char *arguments[] = {"--set", "pool default.memory=2G", NULL};
    rig_open(&rig, NULL);
    rig_launch(&rig, arguments);
    for (double end = rig_now() + RIG_PATIENCE; access(rig.socket, F_OK) && rig_now() < end;)
        rig_sleep(0.005);
    kill(rig.pid, SIGTERM);
    ck_assert_int_eq(rig_wait(&rig, RIG_PATIENCE), EX_OK);
    ck_assert(strstr(rig_log(&rig), "stopped before it was ready") ||
              strstr(rig_log(&rig), "ready after"));
    ck_assert_int_eq(access(rig.socket, F_OK), -1);
    rig_close(&rig);
}
END_TEST

/* A daemon that reads its configuration from a pipe: as early as it can be met. -> the pipe. */
static int meet_early(struct rig *rig) {
    int pipe = -1;
    rig_open(rig, NULL);
    ck_assert_int_eq(unlink(rig->config), 0);
    ck_assert_int_eq(mkfifo(rig->config, 0600), 0);
    rig_launch(rig, NULL);
    for (double end = rig_now() + RIG_PATIENCE; pipe < 0 && rig_now() < end; rig_sleep(0.001))
        pipe = open(rig->config, O_WRONLY | O_NONBLOCK); /* fails until it is read */
    ck_assert_int_ge(pipe, 0);
    return pipe;
}

/* Each ends a process that has not said otherwise; SIGHUP is obeyed once there is something to
 * reload. */
START_TEST(no_signal_comes_too_early) {
    static const int early[] = {SIGHUP, SIGPIPE, SIGUSR1, SIGXFSZ};
    struct rig rig;
    int pipe = meet_early(&rig);
    for (size_t i = 0; i < sizeof(early) / sizeof(*early); i++)
        kill(rig.pid, early[i]);
    static const char pool[] = "[pool default]\nlayers = 2\nkv_heads = 1\ngroup = 2\n"
                               "head_dim = 64\nmemory = 4M\n[daemon]\n";
    ck_assert_int_eq(write(pipe, pool, sizeof(pool) - 1), sizeof(pool) - 1);
    dprintf(pipe, "socket = %s\ndevice = %s\nthreads = 1\n", rig.socket, rig_device());
    close(pipe);
    ck_assert_msg(rig_hears(&rig, "READY=1", RIG_PATIENCE), "not ready: %s", rig_log(&rig));
    ck_assert(rig_logs(&rig, "reload: all stays as it was: ", RIG_PATIENCE)); /* a pipe */
    json_decref(ask(&rig, "status"));
    ck_assert_int_eq(rig_stop(&rig), EX_OK);
    rig_close(&rig);
}
END_TEST

START_TEST(stops_before_it_knows_what_to_start) {
    static const int stops[] = {SIGTERM, SIGINT};
    struct rig rig;
    int pipe = meet_early(&rig);
    kill(rig.pid, stops[_i]);
    ck_assert_int_eq(rig_wait(&rig, RIG_PATIENCE), EX_OK);
    assert_has(rig_log(&rig), "stopped before it was ready");
    close(pipe);
    rig_close(&rig);
}
END_TEST

/* Arguments that end at once, the code and a word of the sentence. */
static const struct {
    const char *arguments[4];
    int code;
    const char *words;
} ends[] = {
    {{"--version"}, EX_OK, "locksd 0."},
    {{"--help"}, EX_OK, "usage: locksd"},
    {{"--check-config"}, EX_OK, "[pool default]\nlayers = 2\n"},
    {{"--threads", "2"}, EX_USAGE, "unknown option '--threads'"},
    {{"--set"}, EX_USAGE, "--set: its value is missing"},
    {{"--config", "/nowhere/x.conf"}, EX_NOINPUT, "/nowhere/x.conf: cannot be opened"},
    {{"--config"}, EX_USAGE, "--config: its value is missing; locksd --help lists the options"},
    {{"-h"}, EX_OK, "usage: locksd"},
    {{"--config", "/"}, EX_NOINPUT, "/: cannot be read: Is a directory"},
    {{"--set", "daemon.threads=1000"}, EX_USAGE, "1000 is not between 0 and 256"},
    {{"--set", "x=y", "--check-config"}, EX_USAGE, "--set 'x=y': not of the form SECTION.KEY"},
    {{"--set", "x.y=z", "--check-config"}, EX_USAGE, "--set 'x.y=z': there is no section [x]"},
    {{"--socket", "x.sock"}, EX_USAGE, "--socket 'x.sock': [daemon] socket: 'x.sock' is not an"},
    {{"--set", "pool default.head_dim=65"}, EX_CONFIG, "head_dim is 65; it may be 64, 80"},
    {{"--set", "pool default.memory=64T"}, EX_OSERR, "the pools want 64.0 TiB, but "},
    {{"--socket", "/nowhere/x.sock"},
     EX_CANTCREAT,
     "/nowhere: the folder of the socket cannot be opened"},
};

START_TEST(ends_with_a_code_and_a_sentence) {
    struct rig rig;
    char text[TEXT_BYTES];
    rig_open(&rig, NULL);
    const char *arguments[8] = {"--config", rig.config, "--foreground"};
    for (int i = 0; i < 4; i++)
        arguments[3 + i] = ends[_i].arguments[i];
    int code = rig_run("locksd", arguments, text, sizeof(text));
    ck_assert_msg(code == ends[_i].code, "code %d, not %d: %s", code, ends[_i].code, text);
    assert_has(text, ends[_i].words);
    rig_close(&rig);
}
END_TEST

/* What a start refuses as wrong, the check does, and warns of what it warns of. */
static const struct {
    const char *set;
    int code;
    const char *words;
} checks[] = {
    {"pool default.layers=1024", EX_CONFIG, "hold not even 4 pages, they take "},
    {"pool default.max_tokens=1M", EX_OK, "1048576 tokens are more than the pool has room for, "},
    {"daemon.workspace=1K", EX_OK, "daemon.workspace is 1.0 KiB, the largest row takes "},
    {"daemon.group=no-such-group", EX_OK, "daemon.group: there is no group no-such-group"},
    {"daemon.numa_node=1000", EX_OK, "bound to node 1000: the "},
    {"pool default.memory=64T", EX_OK, "it would not start: the pools want 64.0 TiB, but "},
    {"daemon.workspace=1T", EX_OK,
     "it would not start: the pools and 2 workspaces of 1.0 TiB want"},
    {"pool default.layers=1", EX_OK, "room for "},
};

START_TEST(the_check_sees_what_a_start_sees) {
    struct rig rig;
    char text[TEXT_BYTES];
    rig_open(&rig, NULL);
    const char *arguments[] = {"--config", rig.config,     "--check-config",
                               "--set",    checks[_i].set, NULL};
    int code = rig_run("locksd", arguments, text, sizeof(text));
    ck_assert_msg(code == checks[_i].code, "code %d, not %d: %s", code, checks[_i].code, text);
    assert_has(text, checks[_i].words);
    arguments[2] = "--foreground";
    if (code) {
        ck_assert_int_eq(rig_run("locksd", arguments, text, sizeof(text)), code);
        assert_has(text, checks[_i].words);
    } else if (!strstr(checks[_i].words, "it would not start")) {
        rig_launch(&rig, arguments + 3);
        ck_assert_msg(rig_hears(&rig, "READY=1", RIG_PATIENCE), "%s", rig_log(&rig));
        assert_has(rig_log(&rig), checks[_i].words);
        ck_assert_int_eq(rig_stop(&rig), EX_OK);
    }
    rig_close(&rig);
}
END_TEST

/* A start that ends at once, or the check of one. -> its code */
static int run_with(const struct rig *rig, bool start, const char *first, const char *second,
                    char text[TEXT_BYTES]) {
    const char *arguments[] = {"--config",
                               rig->config,
                               "--set",
                               first,
                               "--set",
                               second,
                               start ? "--foreground" : "--check-config",
                               NULL};
    return rig_run("locksd", arguments, text, TEXT_BYTES);
}

/* Instructions that the machine has not are asked for in vain. */
START_TEST(a_path_must_be_the_machines) {
    struct rig rig;
    char text[TEXT_BYTES];
    if (__builtin_cpu_supports("avx512vnni"))
        return; /* it has them all */
    rig_open(&rig, NULL);
    for (int i = 0; i < 2; i++) {
        int code = run_with(&rig, i, "daemon.cpu_path=avx512", "daemon.device=cpu", text);
        ck_assert_int_eq(code, EX_CONFIG);
        assert_has(text, "--set 'daemon.cpu_path=avx512': [daemon] cpu_path: this machine lacks");
    }
    rig_close(&rig);
}
END_TEST

/* A GPU keeps 4,096 pages of a row: warned of with a GPU or without, where rows may be longer. */
START_TEST(a_budget_may_be_too_much_for_a_gpu) {
    static const char words[] = "budget: 40960 tokens are more than a row may keep on this device, "
                                "32768: longer rows that name no budget will be refused";
    for (int large = 0; large < 2; large++) {
        struct rig rig;
        char text[TEXT_BYTES];
        rig_open(&rig, NULL);
        const char *tokens =
            large ? "pool default.max_tokens=40961" : "pool default.max_tokens=40960";
        const char *arguments[] = {"--config",
                                   rig.config,
                                   "--check-config",
                                   "--set",
                                   "daemon.device=cuda",
                                   "--set",
                                   "pool default.page_tokens=8",
                                   "--set",
                                   "pool default.memory=1G",
                                   "--set",
                                   "pool default.budget=40960",
                                   "--set",
                                   tokens,
                                   NULL};
        rig_run("locksd", arguments, text, sizeof(text));
        bool warns = large && !strstr(text, "built without CUDA");
        ck_assert_msg(!!strstr(text, words) == warns, "%s", text);
        rig_close(&rig);
    }
}
END_TEST

/* A build that has no CUDA says so, and what serves instead. */
START_TEST(cuda_must_be_in_the_build) {
    struct rig rig;
    char text[TEXT_BYTES];
    rig_open(&rig, NULL);
    for (int i = 0; i < 2; i++) {
        int code = run_with(&rig, i, "daemon.device=cuda", "daemon.gpu=63", text);
        if (strstr(text, "built without CUDA"))
            ck_assert_int_eq(code, EX_CONFIG);
        else
            ck_assert_int_eq(code, i ? EX_OSERR : EX_OK);
        assert_has(text, "--set 'daemon.device=cuda': [daemon] device = cuda: ");
        assert_has(text, "device = auto or cpu serves from the CPU");
    }
    rig_close(&rig);
}
END_TEST

/* ---- sockets ---- */

static int bind_at(const char *path, int type) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, type, 0);
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    return fd;
}

START_TEST(replaces_a_stale_socket) {
    struct rig rig;
    rig_open(&rig, NULL);
    close(bind_at(rig.socket, SOCK_SEQPACKET));
    ck_assert_int_eq(access(rig.socket, F_OK), 0);
    rig_launch(&rig, NULL);
    ck_assert_msg(rig_hears(&rig, "READY=1", RIG_PATIENCE), "%s", rig_log(&rig));
    locks_close(connect_client(&rig));
    ck_assert_int_eq(rig_stop(&rig), EX_OK);
    rig_close(&rig);
}
END_TEST

START_TEST(does_not_steal_a_live_socket) {
    struct rig rig;
    char text[4096];
    rig_start(&rig, NULL);
    const char *arguments[] = {"--config", rig.config, "--foreground", NULL};
    ck_assert_int_eq(rig_run("locksd", arguments, text, sizeof(text)), EX_CANTCREAT);
    assert_has(text, "somebody listens there already, a running locksd it seems; stop it");
    locks_close(connect_client(&rig));
    ck_assert_int_eq(rig_stop(&rig), EX_OK);
    rig_close(&rig);
}
END_TEST

START_TEST(leaves_a_file_alone) {
    struct rig rig;
    char text[4096];
    rig_open(&rig, NULL);
    close(open(rig.socket, O_CREAT | O_WRONLY, 0600));
    const char *arguments[] = {"--config", rig.config, NULL};
    ck_assert_int_eq(rig_run("locksd", arguments, text, sizeof(text)), EX_CANTCREAT);
    assert_has(text, "exists and is no socket: it is left alone");
    ck_assert_int_eq(access(rig.socket, F_OK), 0);
    rig_close(&rig);
}
END_TEST

/* After a stop, a socket that is no longer the daemon's own is not removed. */
START_TEST(does_not_remove_anothers_socket) {
    struct rig rig;
    rig_start(&rig, NULL);
    ck_assert_int_eq(unlink(rig.socket), 0);
    int other = bind_at(rig.socket, SOCK_SEQPACKET);
    ck_assert_int_eq(rig_stop(&rig), EX_OK);
    ck_assert_int_eq(access(rig.socket, F_OK), 0);
    close(other);
    rig_close(&rig);
}
END_TEST

/* As systemd does it: the listening socket is descriptor 3, and the environment says so. */
static void launch_with_socket(struct rig *rig, int fd) {
    char pid[16];
    pid_t child = fork();
    ck_assert_int_ge(child, 0);
    if (child == 0) {
        if (fd == 3)
            fcntl(fd, F_SETFD, 0);
        else
            dup2(fd, 3);
        snprintf(pid, sizeof(pid), "%d", getpid());
        setenv("LISTEN_PID", pid, 1);
        setenv("LISTEN_FDS", "1", 1);
        rig_execute(rig, NULL);
    }
    rig->pid = child;
}

START_TEST(takes_a_socket_passed_by_systemd) {
    struct rig rig;
    rig_open(&rig, "[daemon]\nsocket = /nowhere/unused.sock\n");
    int fd = bind_at(rig.socket, SOCK_SEQPACKET);
    ck_assert_int_eq(listen(fd, 8), 0);
    int early = rig_connect(&rig); /* before there is a daemon: served once there is */
    launch_with_socket(&rig, fd);
    ck_assert_msg(rig_hears(&rig, "READY=1", RIG_PATIENCE), "%s", rig_log(&rig));
    assert_has(rig_log(&rig), "(systemd's)");
    locks_close(connect_client(&rig));
    close(early);
    ck_assert_int_eq(rig_stop(&rig), EX_OK);
    ck_assert_int_eq(access(rig.socket, F_OK), 0); /* systemd's to remove */
    close(fd);
    rig_close(&rig);
}
END_TEST

START_TEST(refuses_a_wrong_passed_socket) {
    struct rig rig;
    rig_open(&rig, NULL);
    int fd = bind_at(rig.socket, SOCK_STREAM);
    ck_assert_int_eq(listen(fd, 8), 0);
    launch_with_socket(&rig, fd);
    ck_assert_int_eq(rig_wait(&rig, RIG_PATIENCE), EX_CANTCREAT);
    assert_has(rig_log(&rig), "use ListenSequentialPacket=");
    close(fd);
    rig_close(&rig);
}
END_TEST

/* Whoever waited on would make systemd start it again and again. */
START_TEST(turns_away_who_waits_where_it_cannot_start) {
    struct rig rig;
    struct lk_refused refused;
    rig_open(&rig, "[daemon]\nnonsense = 1\n");
    int fd = bind_at(rig.socket, SOCK_SEQPACKET);
    ck_assert_int_eq(listen(fd, 8), 0);
    int silent = rig_connect(&rig), eager = rig_connect(&rig);
    ck_assert_int_eq(send(eager, "hello", 5, 0), 5);
    launch_with_socket(&rig, fd);
    ck_assert_int_eq(rig_wait(&rig, RIG_PATIENCE), EX_CONFIG);
    int peers[] = {silent, eager};
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(recv(peers[i], &refused, sizeof(refused), MSG_DONTWAIT), sizeof(refused));
        ck_assert_uint_eq(refused.head.type, LK_MSG_REFUSED);
        ck_assert_int_eq(refused.error, -ECONNREFUSED);
        ck_assert_str_eq(refused.reason, "locksd cannot start: its log says why");
        close(peers[i]);
    }
    ck_assert_int_eq(accept4(fd, NULL, NULL, SOCK_NONBLOCK), -1);
    close(fd);
    rig_close(&rig);
}
END_TEST

/* ---- reload ---- */

START_TEST(reloads_a_good_file) {
    struct rig rig;
    rig_start(&rig, NULL);
    rig_configure(&rig,
                  "[limits]\nmax_channels = 3\nmax_channels_per_uid = 2\n[daemon]\nthreads = 2\n");
    kill(rig.pid, SIGHUP);
    ck_assert(rig_hears(&rig, "RELOADING=1", RIG_PATIENCE));
    ck_assert(rig_hears(&rig, "READY=1", RIG_PATIENCE));
    ck_assert(rig_logs(&rig, "reload: limits.max_channels is changed", RIG_PATIENCE));
    assert_has(rig_log(&rig),
               "reload: daemon.threads differs in the file, and is taken only by a restart");
    ck_assert_int_eq(ask_number(&rig, "status", "clients_max"), 3);
    json_t *reply = ask(&rig, "reload");
    ck_assert_uint_eq(json_array_size(json_object_get(reply, "taken")), 0);
    ck_assert_str_eq(json_string_value(json_array_get(json_object_get(reply, "restart_needed"), 0)),
                     "daemon.threads");
    json_decref(reply);
    ck_assert_int_eq(rig_stop(&rig), EX_OK);
    rig_close(&rig);
}
END_TEST

/* More notices than the receiver's queue holds, two a reload, and nobody reads them. */
START_TEST(a_deaf_receiver_of_notices_holds_nobody_up) {
    struct rig rig;
    rig_start(&rig, NULL);
    for (int i = 0; i < 6; i++)
        json_decref(ask(&rig, "reload"));
    ck_assert_int_eq(ask_number(&rig, "status", "clients"), 0);
    ck_assert_int_eq(rig_stop(&rig), EX_OK);
    rig_close(&rig);
}
END_TEST

START_TEST(keeps_all_when_the_file_is_bad) {
    struct rig rig;
    char why[512] = "", *text;
    rig_start(&rig, NULL);
    rig_configure(&rig, "[limits]\nmax_channels = 3\nmax_channel = 1\n");
    kill(rig.pid, SIGHUP);
    ck_assert(rig_logs(&rig, "reload: all stays as it was: ", RIG_PATIENCE));
    assert_has(rig_log(&rig), "has no key 'max_channel'");
    ck_assert_int_eq(ask_number(&rig, "status", "clients_max"), 4);
    ck_assert_int_eq(locks_admin(rig.socket, "reload", &text, why, sizeof(why)), -EINVAL);
    assert_has(why, "has no key 'max_channel'");
    const char *ctl[] = {"--socket", rig.socket, "reload", NULL};
    char out[1024];
    ck_assert_int_eq(rig_run("locksctl", ctl, out, sizeof(out)), EX_CONFIG);
    ck_assert_int_eq(unlink(rig.config), 0); /* one that cannot be opened is as bad */
    ck_assert_int_eq(locks_admin(rig.socket, "reload", &text, why, sizeof(why)), -EINVAL);
    assert_has(why, "cannot be opened");
    ck_assert_int_eq(rig_run("locksctl", ctl, out, sizeof(out)), EX_CONFIG);
    ck_assert_int_eq(rig_stop(&rig), EX_OK);
    rig_close(&rig);
}
END_TEST

/* Opened, it would wait for a writer, and everybody for the daemon. */
START_TEST(a_pipe_is_not_read_again) {
    struct rig rig;
    rig_start(&rig, NULL);
    ck_assert_int_eq(unlink(rig.config), 0);
    ck_assert_int_eq(mkfifo(rig.config, 0600), 0);
    kill(rig.pid, SIGHUP);
    ck_assert(rig_logs(&rig, "reload: all stays as it was: ", RIG_PATIENCE));
    assert_has(rig_log(&rig), "is no regular file: it is read at the start alone");
    ck_assert_int_eq(ask_number(&rig, "status", "clients_max"), 4);
    ck_assert_int_eq(rig_stop(&rig), EX_OK);
    rig_close(&rig);
}
END_TEST

/* ---- a log that nobody reads ---- */

/* A daemon whose log goes into a pipe. -> the pipe. */
static int start_piped(struct rig *rig, const char *extra) {
    rig_open(rig, extra);
    ck_assert_int_eq(mkfifo(rig->log, 0600), 0);
    int pipe = open(rig->log, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    ck_assert_int_ge(pipe, 0);
    rig_launch(rig, NULL);
    ck_assert(rig_hears(rig, "READY=1", RIG_PATIENCE));
    snprintf(rig->log, sizeof(rig->log), "/dev/null"); /* to read the pipe would wait */
    return pipe;
}

/* From now on the next line takes the daemon a second (log.c), then is lost. */
static void fill_pipe(int pipe) {
    const char bytes[4096] = {0};
    for (size_t count = sizeof(bytes); count; count /= 2)
        while (write(pipe, bytes, count) == (ssize_t)count)
            ;
    ck_assert_int_eq(errno, EAGAIN);
}

/* Who reads a line counts on what it says; so it has to have happened before. Here: whether a
 * sequence is refused with the error sooner than the line can be given up. Beside much other work
 * it may be late: some tries, none of which can succeed where the line comes first. */
static bool is_in_force_before_its_line(const char *extra, const char *reload, int signal,
                                        int error) {
    bool in_time = false;
    for (int i = 0; i < 10 && !in_time; i++) {
        struct rig rig;
        locks_handle kept, sequence;
        int rc, pipe = start_piped(&rig, extra);
        struct locks *client = connect_client(&rig);
        ck_assert_int_eq(locks_sequence_create(client, 0, &kept), 0);
        rig_configure(&rig, reload);
        fill_pipe(pipe);
        double begun = rig_now();
        kill(rig.pid, signal);
        while ((rc = locks_sequence_create(client, 0, &sequence)) == 0)
            ck_assert_int_eq(locks_sequence_free(client, sequence), 0);
        in_time = rig_now() - begun < 0.9;
        ck_assert_int_eq(rc, error);
        locks_close(client);
        close(pipe);
        rig_close(&rig);
    }
    return in_time;
}

START_TEST(what_the_log_says_has_happened) {
    const char *slow = "[daemon]\ndrain_seconds = 3600\n", *one = "[limits]\nmax_sequences = 1\n";
    ck_assert(is_in_force_before_its_line(slow, slow, SIGTERM, -ESHUTDOWN));
    ck_assert(is_in_force_before_its_line(NULL, one, SIGHUP, -EDQUOT));
}
END_TEST

/* ---- drain and stop with clients ---- */

START_TEST(an_idle_client_does_not_hold_up_a_stop) {
    struct rig rig;
    rig_start(&rig, "[daemon]\ndrain_seconds = 3600\n");
    struct locks *client = connect_client(&rig);
    ck_assert_int_eq(rig_stop(&rig), EX_OK);
    locks_close(client);
    rig_close(&rig);
}
END_TEST

START_TEST(a_stop_waits_for_sequences_as_long_as_it_may) {
    struct rig rig;
    locks_handle sequence, second;
    rig_start(&rig, "[daemon]\ndrain_seconds = 2\n");
    struct locks *client = connect_client(&rig);
    ck_assert_int_eq(locks_sequence_create(client, 0, &sequence), 0);
    double begun = rig_now();
    kill(rig.pid, SIGTERM);
    ck_assert_int_eq(rig_wait(&rig, RIG_PATIENCE), EX_OK);
    ck_assert(rig_now() - begun > 1.9);
    assert_has(rig_log(&rig), "SIGTERM: stopping; waiting up to 2 s for the work of 1 client");
    assert_has(rig_log(&rig), "clients cut off: 1");
    ck_assert_int_eq(locks_sequence_create(client, 0, &second), -ECONNRESET);
    locks_close(client);
    rig_close(&rig);
}
END_TEST

START_TEST(a_stop_ends_when_the_last_sequence_goes) {
    struct rig rig;
    locks_handle sequence, second;
    rig_start(&rig, "[daemon]\ndrain_seconds = 3600\n");
    struct locks *client = connect_client(&rig);
    ck_assert_int_eq(locks_sequence_create(client, 0, &sequence), 0);
    kill(rig.pid, SIGTERM);
    ck_assert(rig_logs(&rig, "SIGTERM: stopping; waiting up to 3600 s", RIG_PATIENCE));
    ck_assert_int_eq(locks_sequence_create(client, 0, &second), -ESHUTDOWN);
    struct locks_options options = {.size = sizeof(options), .socket = rig.socket};
    struct locks *late;
    ck_assert_int_eq(locks_connect(&options, &late), -ESHUTDOWN);
    assert_has(locks_error(NULL), "stopping");
    rig_sleep(0.3);
    ck_assert_int_eq(kill(rig.pid, 0), 0);
    ck_assert_int_eq(locks_sequence_free(client, sequence), 0);
    ck_assert_int_eq(rig_wait(&rig, RIG_PATIENCE), EX_OK);
    locks_close(client);
    rig_close(&rig);
}
END_TEST

START_TEST(a_second_signal_stops_at_once) {
    struct rig rig;
    locks_handle sequence;
    rig_start(&rig, "[daemon]\ndrain_seconds = 3600\n");
    struct locks *client = connect_client(&rig);
    ck_assert_int_eq(locks_sequence_create(client, 0, &sequence), 0);
    kill(rig.pid, SIGINT);
    ck_assert(rig_logs(&rig, "SIGINT: stopping", RIG_PATIENCE));
    kill(rig.pid, SIGTERM);
    ck_assert_int_eq(rig_wait(&rig, RIG_PATIENCE), EX_OK);
    assert_has(rig_log(&rig), "a second signal: stopping at once");
    locks_close(client);
    rig_close(&rig);
}
END_TEST

START_TEST(drains_and_resumes_by_verb) {
    struct rig rig;
    locks_handle sequence;
    rig_start(&rig, NULL);
    struct locks *client = connect_client(&rig);
    json_decref(ask(&rig, "drain"));
    ck_assert_int_eq(locks_sequence_create(client, 0, &sequence), -ESHUTDOWN);
    json_t *status = ask(&rig, "status");
    ck_assert(json_is_true(json_object_get(status, "draining")));
    json_decref(status);
    json_decref(ask(&rig, "resume"));
    ck_assert_int_eq(locks_sequence_create(client, 0, &sequence), 0);
    ck_assert_int_eq(ask_number(&rig, "status", "sequences"), 1);
    locks_close(client);
    ck_assert_int_eq(rig_stop(&rig), EX_OK);
    rig_close(&rig);
}
END_TEST

/* ---- watchdog and idleness ---- */

START_TEST(feeds_the_watchdog) {
    struct rig rig;
    setenv("WATCHDOG_USEC", "300000", 1);
    rig_start(&rig, NULL);
    for (int i = 0; i < 5; i++)
        ck_assert_msg(rig_hears(&rig, "WATCHDOG=1", RIG_PATIENCE), "feeding %d", i);
    ck_assert_int_eq(rig_stop(&rig), EX_OK);
    rig_close(&rig);
}
END_TEST

/* Hellos that wait for a daemon that is stopped: it finds them in one round. */
static void crowd_in(struct rig *rig, int *ret_fds, int count, uint64_t arena_bytes) {
    struct lk_hello hello = {.major = LK_ABI_MAJOR, .arena_bytes = arena_bytes, .name = "crowd"};
    int status;
    hello.head = (struct lk_message){LK_ABI_MAGIC, LK_MSG_HELLO, sizeof(hello)};
    for (int i = 0; i < count; i++)
        ret_fds[i] = rig_connect(rig);
    json_decref(ask(rig, "status")); /* they are accepted */
    kill(rig->pid, SIGSTOP);
    ck_assert_int_eq(waitpid(rig->pid, &status, WUNTRACED), rig->pid);
    for (int i = 0; i < count; i++)
        ck_assert_int_eq(send(ret_fds[i], &hello, sizeof(hello), 0), sizeof(hello));
    while (rig_hears(rig, "", 0.05)) /* what was said before */
        ;
    kill(rig->pid, SIGCONT);
}

/* -> how often it was fed until all have their welcome. */
static int feedings_until_welcome(const struct rig *rig, const int *fds, int count) {
    int feedings = 0, welcomed = 0;
    struct lk_welcome welcome;
    char notice[512];
    while (welcomed < count) {
        for (int i = 0; i < count; i++)
            welcomed += recv(fds[i], &welcome, sizeof(welcome), MSG_DONTWAIT) == sizeof(welcome) &&
                        welcome.head.type == LK_MSG_WELCOME;
        ssize_t length = recv(rig->notify, notice, sizeof(notice) - 1, MSG_DONTWAIT);
        notice[length > 0 ? length : 0] = 0;
        feedings += strstr(notice, "WATCHDOG=1") != NULL;
    }
    return feedings;
}

/* To make a client's memory takes a while, and all clients of a node may come at once. */
START_TEST(feeds_the_watchdog_in_a_crowd) {
    struct rig rig;
    int fds[32];
    setenv("WATCHDOG_USEC", "15000", 1); /* fed each 5 ms */
    rig_start(&rig, "[limits]\nmax_channels = 32\nmax_channels_per_uid = 32\n");
    crowd_in(&rig, fds, 32, 16 << 20);
    double begun = rig_now();
    int feedings = feedings_until_welcome(&rig, fds, 32);
    double took = rig_now() - begun;
    ck_assert_msg(feedings >= 5 || took < 0.05, "%d feedings in %.3f s", feedings, took);
    for (int i = 0; i < 32; i++)
        close(fds[i]);
    ck_assert_int_eq(rig_stop(&rig), EX_OK);
    rig_close(&rig);
}
END_TEST

/* And one client's may take as long as all of theirs. */
START_TEST(feeds_the_watchdog_beside_a_large_arena) {
    struct rig rig;
    int fd;
    setenv("WATCHDOG_USEC", "15000", 1);
    rig_start(&rig, "[limits]\nmax_arena = 512M\n");
    crowd_in(&rig, &fd, 1, 512 << 20);
    double begun = rig_now();
    int feedings = feedings_until_welcome(&rig, &fd, 1);
    double took = rig_now() - begun;
    ck_assert_msg(feedings >= 5 || took < 0.05, "%d feedings in %.3f s", feedings, took);
    close(fd);
    ck_assert_int_eq(rig_stop(&rig), EX_OK);
    rig_close(&rig);
}
END_TEST

/* Ticks of processor time used so far, user and system. */
static long ticks_used(pid_t pid) {
    char path[64], text[1024];
    unsigned long user, system;
    snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    ck_assert_ptr_nonnull(file);
    ck_assert_ptr_nonnull(fgets(text, sizeof(text), file));
    fclose(file);
    ck_assert_int_eq(sscanf(strrchr(text, ')'),
                            ") %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user,
                            &system),
                     2);
    return (long)(user + system);
}

START_TEST(is_idle_when_nobody_asks) {
    struct rig rig;
    rig_start(&rig, "[daemon]\nspin_us = 20\n");
    struct locks *client = connect_client(&rig);            /* connected and silent */
    long used = LONG_MAX, most = sysconf(_SC_CLK_TCK) / 25; /* 2 % */
    for (int i = 0; i < 10 && used > most; i++) {
        rig_sleep(0.5); /* what came before may still be under way, beside much other work */
        long before = ticks_used(rig.pid);
        rig_sleep(2);
        used = ticks_used(rig.pid) - before;
    }
    ck_assert_msg(used <= most, "%ld ticks of processor time in 2 s", used);
    locks_close(client);
    ck_assert_int_eq(rig_stop(&rig), EX_OK);
    rig_close(&rig);
}
END_TEST

/* ---- locksctl ---- */

static int ctl(const struct rig *rig, const char *verb, const char *option, char *text,
               size_t bytes) {
    const char *arguments[] = {"--socket", rig->socket, verb, option, NULL};
    return rig_run("locksctl", arguments, text, bytes);
}

START_TEST(locksctl_prints_and_exits) {
    struct rig rig;
    char text[TEXT_BYTES];
    const char *verbs[] = {"status", "clients", "pools", "drain", "resume", "reload"};
    rig_start(&rig, NULL);
    struct locks *client = connect_client(&rig);
    for (size_t i = 0; i < sizeof(verbs) / sizeof(*verbs); i++) {
        ck_assert_int_eq(ctl(&rig, verbs[i], "--json", text, sizeof(text)), EX_OK);
        json_t *reply = json_loads(text, 0, NULL);
        ck_assert_msg(json_is_object(reply), "%s: no JSON: %s", verbs[i], text);
        json_decref(reply);
        ck_assert_msg(ctl(&rig, verbs[i], NULL, text, sizeof(text)) == EX_OK, "%s: %s", verbs[i],
                      text);
    }
    ctl(&rig, "pools", NULL, text, sizeof(text));
    assert_has(text, "TOKENS");
    ctl(&rig, "clients", NULL, text, sizeof(text));
    assert_has(text, "test_control");
    ck_assert_int_eq(ctl(&rig, "pool", NULL, text, sizeof(text)), EX_USAGE);
    ck_assert_int_eq(ctl(&rig, "status", "--jason", text, sizeof(text)), EX_USAGE);
    ck_assert_int_eq(ctl(&rig, "--help", NULL, text, sizeof(text)), EX_OK);
    locks_close(client);
    ck_assert_int_eq(rig_stop(&rig), EX_OK);
    ck_assert_int_eq(ctl(&rig, "status", NULL, text, sizeof(text)), EX_UNAVAILABLE);
    assert_has(text, rig.socket);
    assert_has(text, "systemctl start locksd");
    rig_close(&rig);
}
END_TEST

/* Of a pool of 8M, what the wire, the daemon's JSON and the table say is free. */
static void assert_free(const struct rig *rig, struct locks *client, uint64_t used) {
    char text[TEXT_BYTES], token[32];
    struct locks_pool info;
    ck_assert_int_eq(locks_pool(client, NULL, &info), 0);
    ck_assert_uint_eq(info.pages_free, info.pages - used);
    json_t *reply = ask(rig, "pools");
    json_t *pool = json_array_get(json_object_get(reply, "pools"), 0);
    json_int_t pages = json_integer_value(json_object_get(pool, "pages_used"));
    ck_assert_int_eq(pages, (json_int_t)used);
    pages = json_integer_value(json_object_get(pool, "pages_free"));
    ck_assert_int_eq(pages, (json_int_t)info.pages_free);
    ck_assert_int_eq(json_integer_value(json_object_get(pool, "free_tokens")), 16 * pages);
    json_decref(reply);
    ck_assert_int_eq(ctl(rig, "pools", NULL, text, sizeof(text)), EX_OK);
    snprintf(token, sizeof(token), " %.1f %% ", 100.0 * (double)used / (double)info.pages);
    assert_has(text, token);
}

START_TEST(leased_pages_are_counted_once) {
    struct rig rig;
    locks_handle first, second;
    rig_start(&rig, NULL);
    struct locks *client = connect_client(&rig);
    struct locks_pool info;
    ck_assert_int_eq(locks_pool(client, NULL, &info), 0);
    assert_free(&rig, client, 0);
    ck_assert_int_eq(locks_lease_open(client, 0, 65, &first), 0);
    assert_free(&rig, client, 68);
    ck_assert_int_eq(locks_lease_open(client, 0, info.pages - 68, &second), 0);
    assert_free(&rig, client, info.pages);
    ck_assert_int_eq(locks_lease_close(client, second), 0);
    assert_free(&rig, client, 68);
    locks_close(client);
    ck_assert_int_eq(rig_stop(&rig), EX_OK);
    rig_close(&rig);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("control");
    TCase *life = tcase_create("life");
    tcase_set_timeout(life, 120);
    tcase_add_test(life, starts_says_what_it_is_and_stops);
    tcase_add_test(life, a_stray_signal_of_its_own_ends_nothing);
    tcase_add_test(life, starts_without_streams);
    tcase_add_test(life, warns_of_a_workspace_too_small);
    tcase_add_test(life, stops_while_it_starts);
    tcase_add_test(life, no_signal_comes_too_early);
    tcase_add_test(life, a_path_must_be_the_machines);
    tcase_add_loop_test(life, stops_before_it_knows_what_to_start, 0, 2);
    tcase_add_loop_test(life, ends_with_a_code_and_a_sentence, 0, sizeof(ends) / sizeof(*ends));
    tcase_add_loop_test(life, the_check_sees_what_a_start_sees, 0,
                        sizeof(checks) / sizeof(*checks));
    tcase_add_test(life, a_budget_may_be_too_much_for_a_gpu);
    tcase_add_test(life, cuda_must_be_in_the_build);
    tcase_add_test(life, replaces_a_stale_socket);
    tcase_add_test(life, does_not_steal_a_live_socket);
    tcase_add_test(life, leaves_a_file_alone);
    tcase_add_test(life, does_not_remove_anothers_socket);
    tcase_add_test(life, takes_a_socket_passed_by_systemd);
    tcase_add_test(life, refuses_a_wrong_passed_socket);
    tcase_add_test(life, turns_away_who_waits_where_it_cannot_start);
    tcase_add_test(life, reloads_a_good_file);
    tcase_add_test(life, a_deaf_receiver_of_notices_holds_nobody_up);
    tcase_add_test(life, keeps_all_when_the_file_is_bad);
    tcase_add_test(life, a_pipe_is_not_read_again);
    tcase_add_test(life, an_idle_client_does_not_hold_up_a_stop);
    tcase_add_test(life, a_stop_waits_for_sequences_as_long_as_it_may);
    tcase_add_test(life, a_stop_ends_when_the_last_sequence_goes);
    tcase_add_test(life, a_second_signal_stops_at_once);
    tcase_add_test(life, what_the_log_says_has_happened);
    tcase_add_test(life, drains_and_resumes_by_verb);
    tcase_add_test(life, feeds_the_watchdog);
    tcase_add_test(life, feeds_the_watchdog_in_a_crowd);
    tcase_add_test(life, feeds_the_watchdog_beside_a_large_arena);
    tcase_add_test(life, is_idle_when_nobody_asks);
    tcase_add_test(life, locksctl_prints_and_exits);
    tcase_add_test(life, leased_pages_are_counted_once);
    suite_add_tcase(suite, life);
    return run_suite(suite);
}
