/* SPDX-License-Identifier: MIT */
/*
 * rig.c - see rig.h.
 */
#include "rig.h"

#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define ARGUMENTS_MAX 32

double rig_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

void rig_sleep(double seconds) {
    poll(NULL, 0, (int)(seconds * 1000));
}

/* ---- folder and configuration ---- */

const char *rig_device(void) {
    const char *device = getenv("LOCKSD_TEST_DEVICE");
    return device ? device : "cpu";
}

const char *rig_device_set(void) {
    static char set[64];
    snprintf(set, sizeof(set), "daemon.device=%s", rig_device());
    return set;
}

void rig_configure(const struct rig *rig, const char *extra) {
    FILE *file = fopen(rig->config, "w");
    ck_assert_ptr_nonnull(file);
    fprintf(file,
            "[daemon]\nsocket = %s\ndevice = %s\nthreads = 1\ndrain_seconds = 1\nspin_us = "
            "1\n[limits]\nmax_channels = 4\n"
            "max_channels_per_uid = 4\nmax_arena = 16M\nmax_row_tokens = 64\n[pool "
            "default]\nlayers = 2\n"
            "kv_heads = 1\ngroup = 2\nhead_dim = 64\nmemory = 8M\n%s",
            rig->socket, rig_device(), extra ? extra : "");
    ck_assert_int_eq(fclose(file), 0);
}

static int listen_for_notices(const char *folder) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    snprintf(address.sun_path, sizeof(address.sun_path), "%s/notify", folder);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    return fd;
}

void rig_open(struct rig *rig, const char *extra) {
    *rig = (struct rig){.folder = "/tmp/locksd-rig-XXXXXX"};
    ck_assert_ptr_nonnull(mkdtemp(rig->folder));
    snprintf(rig->socket, sizeof(rig->socket), "%s/locksd.sock", rig->folder);
    snprintf(rig->config, sizeof(rig->config), "%s/locksd.conf", rig->folder);
    snprintf(rig->log, sizeof(rig->log), "%s/log", rig->folder);
    rig->notify = listen_for_notices(rig->folder);
    rig_configure(rig, extra);
}

void rig_close(struct rig *rig) {
    char command[80];
    if (rig->pid) {
        kill(rig->pid, SIGKILL);
        waitpid(rig->pid, NULL, 0);
    }
    close(rig->notify);
    snprintf(command, sizeof(command), "rm -rf %s", rig->folder);
    ck_assert_int_eq(system(command), 0);
}

/* ---- processes ---- */

const char *rig_binary(const char *program, char path[4096]) {
    const char *daemon = getenv("LOCKSD");
    if (daemon && strcmp(program, "locksd") == 0)
        return daemon;
    ssize_t length = readlink("/proc/self/exe", path, 4000);
    if (length <= 0) /* also asked for outside of any test, where Check has no assertions */
        abort();
    path[length] = 0;
    for (int i = 0; i < 3; i++) /* BUILD/tests/fault/test_x */
        *strrchr(path, '/') = 0;
    snprintf(path + strlen(path), 4096 - strlen(path), "/%s", program);
    return path;
}

void rig_own_daemon(void) {
    char path[4096];
    setenv("LOCKSD", rig_binary("locksd", path), 0);
}

static void execute(const char *path, const char *const *head, const char *const *tail) {
    const char *argv[ARGUMENTS_MAX] = {path};
    int count = 1;
    for (; head && *head && count < ARGUMENTS_MAX - 1; head++)
        argv[count++] = *head;
    for (; tail && *tail && count < ARGUMENTS_MAX - 1; tail++)
        argv[count++] = *tail;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    execv(path, (char *const *)argv);
    perror(path);
    _exit(127);
}

void rig_execute(const struct rig *rig, const char *const *arguments) {
    char path[4096], notify[64];
    const char *const head[] = {"--config", rig->config, "--foreground", NULL};
    const char *daemon = rig_binary("locksd", path);
    int log = open(rig->log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    dup2(log, STDERR_FILENO);
    close(log);
    snprintf(notify, sizeof(notify), "%s/notify", rig->folder);
    setenv("NOTIFY_SOCKET", notify, 1);
    execute(daemon, head, arguments);
}

void rig_launch(struct rig *rig, const char *const *arguments) {
    rig->pid = fork();
    ck_assert_int_ge(rig->pid, 0);
    if (rig->pid == 0)
        rig_execute(rig, arguments);
}

void rig_start(struct rig *rig, const char *extra) {
    rig_open(rig, extra);
    rig_launch(rig, NULL);
    ck_assert_msg(rig_hears(rig, "READY=1", RIG_PATIENCE), "not ready: %s", rig_log(rig));
}

/* As systemd does: what nobody reads the daemon waits for, if not for long. */
static void drop_notices(const struct rig *rig) {
    char text[512];
    while (recv(rig->notify, text, sizeof(text), MSG_DONTWAIT) > 0)
        ;
}

int rig_wait(struct rig *rig, double seconds) {
    double end = rig_now() + seconds;
    int status;
    for (bool late = false; waitpid(rig->pid, &status, WNOHANG) == 0; rig_sleep(0.01)) {
        drop_notices(rig);
        ck_assert_msg(!late, "the daemon still runs after %.1f s: %s", seconds, rig_log(rig));
        late = rig_now() >= end;
    }
    rig->pid = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

int rig_stop(struct rig *rig) {
    kill(rig->pid, SIGTERM);
    return rig_wait(rig, RIG_PATIENCE);
}

int rig_run(const char *program, const char *const *arguments, char *text, size_t bytes) {
    char path[4096];
    const char *file = rig_binary(program, path);
    int ends[2], status;
    ck_assert_int_eq(pipe(ends), 0);
    pid_t pid = fork();
    ck_assert_int_ge(pid, 0);
    if (pid == 0) {
        dup2(ends[1], STDOUT_FILENO);
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        execute(file, arguments, NULL);
    }
    close(ends[1]);
    size_t length = 0;
    for (ssize_t got = 1; got > 0 && length<bytes - 1; length += got> 0 ? (size_t)got : 0)
        got = read(ends[0], text + length, bytes - 1 - length);
    text[length] = 0;
    close(ends[0]);
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/* ---- what the daemon says ---- */

static bool has_ended(pid_t pid) {
    siginfo_t info = {.si_pid = 0};
    return waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) || info.si_pid == pid;
}

bool rig_hears(struct rig *rig, const char *word, double seconds) {
    double end = rig_now() + seconds;
    struct pollfd wait = {.fd = rig->notify, .events = POLLIN};
    char text[512];
    for (;;) { /* what was said before the end is there by then */
        bool last = rig_now() >= end || has_ended(rig->pid);
        ssize_t length;
        while ((length = recv(rig->notify, text, sizeof(text) - 1, MSG_DONTWAIT)) > 0) {
            text[length] = 0;
            if (strstr(text, word))
                return true;
        }
        if (last)
            return false;
        poll(&wait, 1, 20);
    }
}

const char *rig_log(const struct rig *rig) {
    static char text[65536];
    FILE *file = fopen(rig->log, "r");
    size_t length = file ? fread(text, 1, sizeof(text) - 1, file) : 0;
    if (file)
        fclose(file);
    text[length] = 0;
    return text;
}

bool rig_logs(const struct rig *rig, const char *words, double seconds) {
    double end = rig_now() + seconds;
    for (bool late = false; !strstr(rig_log(rig), words); rig_sleep(0.01)) {
        if (late)
            return false;
        drop_notices(rig);
        late = rig_now() >= end;
    }
    return true;
}

int rig_connect(const struct rig *rig) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval patience = {.tv_sec = (time_t)RIG_PATIENCE};
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", rig->socket);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    ck_assert_msg(connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0, "connect: %s",
                  strerror(errno));
    return fd;
}
