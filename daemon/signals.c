/* SPDX-License-Identifier: MIT */
/*
 * signals.c - see signals.h.
 */
#include "signals.h"

#include <signal.h>
#include <stddef.h>
#include <sys/signalfd.h>
#include <sysexits.h>
#include <unistd.h>

#define LEAVES "stopped before it was ready\n"

/* SIGUSR1 is guard.c's once there was a client, and no more harm before. Memory beyond ulimit -f is
 * refused, as any other. */
static const int ignored[] = {SIGPIPE, SIGUSR1, SIGXFSZ};
#define IGNORED (sizeof(ignored) / sizeof(*ignored))

static struct { /* as the process was started */
    bool known;
    sigset_t mask;
    struct sigaction of[IGNORED];
} before;

static void stops(sigset_t *ret) {
    sigemptyset(ret);
    sigaddset(ret, SIGTERM);
    sigaddset(ret, SIGINT);
}

void lk_signals_hold(void) {
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    sigset_t set;
    stops(&set);
    sigaddset(&set, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &set, before.known ? NULL : &before.mask);
    for (size_t i = 0; i < IGNORED; i++)
        sigaction(ignored[i], &ignore, before.known ? NULL : &before.of[i]);
    before.known = true;
}

void lk_signals_let_go(void) {
    for (size_t i = 0; i < IGNORED; i++)
        sigaction(ignored[i], &before.of[i], NULL);
    pthread_sigmask(SIG_SETMASK, &before.mask, NULL);
}

static void leave(int signal) { /* handler */
    (void)signal;
    if (write(STDERR_FILENO, LEAVES, sizeof(LEAVES) - 1) < 0) {
        /* nobody reads: there is nobody to tell */
    }
    _exit(EX_OK);
}

void lk_signals_leaving(void) {
    struct sigaction action = {.sa_handler = leave};
    sigset_t set;
    stops(&set);
    sigemptyset(&action.sa_mask);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
}

int lk_signals_open(bool reload, int flags) {
    sigset_t set;
    stops(&set);
    if (reload)
        sigaddset(&set, SIGHUP);
    return signalfd(-1, &set, flags);
}

void lk_signals_take(struct lk_signals *to) {
    const struct timespec now = {0};
    sigset_t set;
    int signal;
    stops(&set);
    for (int i = 0; i < 2 && (signal = sigtimedwait(&set, NULL, &now)) > 0; i++) {
        to->stops++;
        to->stop = signal;
    }
    sigemptyset(&set);
    sigaddset(&set, SIGHUP);
    to->reload |= sigtimedwait(&set, NULL, &now) > 0;
}
