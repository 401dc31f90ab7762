/* SPDX-License-Identifier: MIT */
/*
 * guard.c - see guard.h. A thread's timer is made at its first guard and stays for its life; if it
 * cannot be made, the thread goes unguarded.
 */
#include "guard.h"

#include <signal.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SIGNAL    SIGUSR1
#define PERIOD_NS 1000000

static _Thread_local struct {
    bool tried, made;
    timer_t id;
} timer;

static void interrupt(int signal) { /* handler: that it ran is all */
    (void)signal;
}

static void make_timer(void) {
    struct sigaction action = {.sa_handler = interrupt}; /* no SA_RESTART; the same for all */
    struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGNAL};
    event._sigev_un._tid = (pid_t)syscall(SYS_gettid);
    sigemptyset(&action.sa_mask);
    sigaction(SIGNAL, &action, NULL);
    timer.made = timer_create(CLOCK_MONOTONIC, &event, &timer.id) == 0;
    timer.tried = true;
}

static void set_timer(long ns) {
    struct timespec span = {.tv_nsec = ns};
    if (timer.made)
        timer_settime(timer.id, 0, &(struct itimerspec){span, span}, NULL);
}

void lk_guard_begin(void) {
    if (!timer.tried)
        make_timer();
    set_timer(PERIOD_NS);
}

void lk_guard_end(void) {
    set_timer(0);
}

void lk_guard_close(int fd) {
    lk_guard_begin();
    close(fd);
    lk_guard_end();
}
