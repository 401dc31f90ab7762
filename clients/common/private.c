/* SPDX-License-Identifier: MIT */
/*
 * private.c - see private.h.
 *
 * What a signal handler touches lies in `running` and is complete before the handlers are
 * installed.
 */
#include "private.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "deadly.h"
#include "measure.h"

#define PATH_BYTES     4096
#define LOG_BYTES      2048 /* of its last words, shown if it fails */
#define STOP_SECONDS   10
#define POLL_MS        20
#define NS_A_MS        UINT64_C(1000000)
#define EXIT_NO_BINARY 127

/* For the signal handlers; names are relative to folder. */
static struct {
    volatile sig_atomic_t pid;
    char folder[64], socket[80], beside[80], notify[80], log[80];
    struct lk_deadly_link chain;
} running;

__attribute__((format(printf, 4, 5))) static int refuse(int error, char *why, size_t bytes,
                                                        const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(why, bytes, format, list);
    va_end(list);
    return error;
}

/* ---- the binary ---- */

/* Folder of the running program. */
static bool own_folder(char path[PATH_BYTES]) {
    ssize_t length = readlink("/proc/self/exe", path, PATH_BYTES - 1);
    if (length <= 0)
        return false;
    path[length] = '\0';
    char *slash = strrchr(path, '/');
    if (slash)
        *slash = '\0';
    return slash != NULL;
}

/* A name for execvp(): absolute, or "locksd" to be looked for in $PATH. */
static void find_binary(char binary[PATH_BYTES]) {
    static const char *const beside[] = {"locksd", "../sbin/locksd"};
    const char *named = getenv("LOCKSD");
    char folder[PATH_BYTES];
    if (named && *named) {
        snprintf(binary, PATH_BYTES, "%s", named);
        return;
    }
    if (own_folder(folder))
        for (size_t i = 0; i < sizeof(beside) / sizeof(*beside); i++)
            if (snprintf(binary, PATH_BYTES, "%s/%s", folder, beside[i]) < PATH_BYTES &&
                access(binary, X_OK) == 0)
                return;
    snprintf(binary, PATH_BYTES, "locksd");
}

/* ---- the folder and what lies in it ---- */

static int make_folder(char *why, size_t why_bytes) {
    const char *base = getenv("XDG_RUNTIME_DIR");
    /* A socket's path is short: a long base would not fit. */
    if (!base || base[0] != '/' || strlen(base) > sizeof(running.folder) - 32 ||
        access(base, W_OK | X_OK))
        base = "/tmp";
    snprintf(running.folder, sizeof(running.folder), "%s/locksd-private.XXXXXX", base);
    if (!mkdtemp(running.folder))
        return refuse(-errno, why, why_bytes, "a private daemon's folder %s cannot be made: %s",
                      running.folder, strerror(errno));
    snprintf(running.socket, sizeof(running.socket), "%s/socket", running.folder);
    /* Its name until it listens: a daemon killed before that leaves it. */
    snprintf(running.beside, sizeof(running.beside), "%s/socke~", running.folder);
    snprintf(running.notify, sizeof(running.notify), "%s/notify", running.folder);
    snprintf(running.log, sizeof(running.log), "%s/log", running.folder);
    return 0;
}

static void remove_folder(void) { /* async-signal-safe */
    unlink(running.socket);
    unlink(running.beside);
    unlink(running.notify);
    unlink(running.log);
    rmdir(running.folder);
}

static int make_notify_socket(int *ret, char *why, size_t why_bytes) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, running.notify, strlen(running.notify));
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof(address))) {
        int error = -errno;
        if (fd >= 0)
            close(fd);
        return refuse(error, why, why_bytes, "%s cannot be made: %s", running.notify,
                      strerror(-error));
    }
    *ret = fd;
    return 0;
}

/* ---- dying together ---- */

static void die_together(int signal) { /* handler: a tool's death takes its daemon along */
    if (running.pid > 0) {
        kill(running.pid, SIGKILL);
        waitpid(running.pid, NULL, 0); /* or it might still put a socket into the folder */
    }
    remove_folder();
    lk_deadly_pass_on(&running.chain, signal);
}

/* ---- the child ---- */

static void become_daemon(const char *binary, char **argv, int log, const sigset_t *mask,
                          pid_t parent) {
    struct sigaction plain = {.sa_handler = SIG_DFL};
    for (size_t i = 0; i < LK_DEADLY; i++)
        sigaction(lk_deadly[i], &plain, NULL);
    sigprocmask(SIG_SETMASK, mask, NULL);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent)
        _exit(EXIT_NO_BINARY); /* the tool died meanwhile */
    setpgid(0, 0);             /* a terminal's ^C is the tool's, which then ends the daemon */
    dup2(log, STDOUT_FILENO);
    dup2(log, STDERR_FILENO);
    execvp(binary, argv);
    dprintf(STDERR_FILENO, "%s cannot be run: %s", binary, strerror(errno));
    _exit(EXIT_NO_BINARY);
}

/* No signal may find a folder and no handlers, or handlers and no pid. */
static void block_signals(sigset_t *ret_before) {
    sigset_t mask;
    sigemptyset(&mask);
    for (size_t i = 0; i < LK_DEADLY; i++)
        sigaddset(&mask, lk_deadly[i]);
    sigprocmask(SIG_BLOCK, &mask, ret_before);
}

/* Signals are blocked; `before` is the mask without that. */
static int spawn(const char *binary, char **argv, const sigset_t *before, char *why,
                 size_t why_bytes) {
    int log = open(running.log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log < 0)
        return refuse(-errno, why, why_bytes, "%s cannot be made: %s", running.log,
                      strerror(errno));
    setenv("NOTIFY_SOCKET", running.notify, 1);
    unsetenv("LISTEN_FDS"); /* not ours to pass on */
    unsetenv("WATCHDOG_USEC");
    pid_t parent = getpid(), pid = fork();
    if (pid == 0)
        become_daemon(binary, argv, log, before, parent);
    int rc = pid < 0 ? -errno : 0;
    if (pid > 0) {
        running.pid = pid;
        lk_deadly_install(&running.chain, die_together);
    }
    close(log);
    unsetenv("NOTIFY_SOCKET");
    return rc ? refuse(rc, why, why_bytes, "no process for a private daemon: %s", strerror(-rc))
              : 0;
}

/* ---- readiness ---- */

/* The daemon's last words on one line. */
static const char *last_words(char text[LOG_BYTES]) {
    int fd = open(running.log, O_RDONLY | O_CLOEXEC);
    off_t end = fd < 0 ? 0 : lseek(fd, 0, SEEK_END);
    off_t from = end > LOG_BYTES - 1 ? end - (LOG_BYTES - 1) : 0;
    ssize_t got = fd < 0 ? 0 : pread(fd, text, LOG_BYTES - 1, from);
    if (fd >= 0)
        close(fd);
    while (got > 0 && text[got - 1] == '\n')
        got--;
    text[got > 0 ? got : 0] = '\0';
    return *text ? text : "it said nothing";
}

static bool heard_ready(int notify) {
    char text[1024];
    ssize_t got;
    while ((got = recv(notify, text, sizeof(text) - 1, 0)) > 0) {
        text[got] = '\0';
        if (strncmp(text, "READY=1", 7) == 0 || strstr(text, "\nREADY=1"))
            return true;
    }
    return false;
}

static int await_ready(const struct lk_private *daemon, int notify, const char *binary,
                       unsigned timeout_s, char *why, size_t why_bytes) {
    char words[LOG_BYTES];
    struct pollfd fd = {.fd = notify, .events = POLLIN};
    uint64_t deadline = lk_clock_ns() + timeout_s * 1000 * NS_A_MS;
    int status;
    while (lk_clock_ns() < deadline) {
        if (poll(&fd, 1, POLL_MS) > 0 && heard_ready(notify))
            return 0;
        if (waitpid(daemon->pid, &status, WNOHANG) == daemon->pid) {
            running.pid = 0;
            return refuse(-ECHILD, why, why_bytes, "the private daemon (%s) did not start: %s",
                          binary, last_words(words));
        }
    }
    return refuse(-ETIMEDOUT, why, why_bytes,
                  "the private daemon (%s) was not ready within %u s; its last words: %s", binary,
                  timeout_s, last_words(words));
}

/* ---- public ---- */

static void kill_and_reap(pid_t pid) {
    uint64_t deadline = lk_clock_ns() + STOP_SECONDS * 1000 * NS_A_MS;
    kill(pid, SIGTERM);
    while (waitpid(pid, NULL, WNOHANG) == 0) {
        if (lk_clock_ns() > deadline)
            kill(pid, SIGKILL);
        nanosleep(&(struct timespec){.tv_nsec = NS_A_MS}, NULL);
    }
}

void lk_private_stop(struct lk_private *daemon) {
    if (running.pid > 0)
        kill_and_reap(running.pid);
    if (daemon->pid > 0)
        lk_deadly_remove(&running.chain);
    running.pid = 0;
    daemon->pid = 0;
    remove_folder();
}

int lk_private_start(const char *const *sets, size_t count, unsigned timeout_s,
                     struct lk_private *ret, char *why, size_t why_bytes) {
    static const char *const own[] = {"daemon.group=", "daemon.drain_seconds=0"};
    char binary[PATH_BYTES];
    char *argv[2 * (LK_PRIVATE_SETS_MAX + sizeof(own) / sizeof(*own)) + 8];
    struct lk_private daemon = {0};
    sigset_t before;
    size_t at = 0;
    int notify = -1;
    if (count > LK_PRIVATE_SETS_MAX)
        return refuse(-E2BIG, why, why_bytes, "%zu settings for a private daemon, at most %d",
                      count, LK_PRIVATE_SETS_MAX);
    block_signals(&before);
    int rc = make_folder(why, why_bytes);
    if (rc) {
        sigprocmask(SIG_SETMASK, &before, NULL);
        return rc;
    }
    find_binary(binary);
    argv[at++] = binary;
    argv[at++] = "--foreground";
    argv[at++] = "--config=/dev/null"; /* the machine's own does not concern it */
    argv[at++] = "--socket";
    argv[at++] = running.socket;
    for (size_t i = 0; i < sizeof(own) / sizeof(*own); i++) {
        argv[at++] = "--set";
        argv[at++] = (char *)own[i];
    }
    for (size_t i = 0; i < count; i++) {
        argv[at++] = "--set";
        argv[at++] = (char *)sets[i];
    }
    argv[at] = NULL;
    rc = make_notify_socket(&notify, why, why_bytes);
    if (!rc)
        rc = spawn(binary, argv, &before, why, why_bytes);
    sigprocmask(SIG_SETMASK, &before, NULL);
    daemon.pid = running.pid;
    if (!rc)
        rc = await_ready(&daemon, notify, binary, timeout_s, why, why_bytes);
    if (notify >= 0)
        close(notify);
    if (rc) {
        lk_private_stop(&daemon);
        return rc;
    }
    memcpy(daemon.folder, running.folder, sizeof(daemon.folder));
    memcpy(daemon.socket, running.socket, sizeof(running.socket));
    *ret = daemon;
    return 0;
}
