/* SPDX-License-Identifier: MIT */
/*
 * deadly.c - see deadly.h.
 */
#include "deadly.h"

/* Besides what people and service managers send: a reader that is gone, limits of the shell, and a
 * mapped file that was cut short. */
const int lk_deadly[LK_DEADLY] = {SIGHUP,  SIGINT, SIGQUIT, SIGTERM,
                                  SIGPIPE, SIGBUS, SIGXCPU, SIGXFSZ};

void lk_deadly_install(struct lk_deadly_link *link, void (*handler)(int)) {
    struct sigaction action = {.sa_handler = handler}, there;
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < LK_DEADLY; i++) {
        sigaction(lk_deadly[i], NULL, &there);
        if (there.sa_handler == handler)
            continue;
        link->before[i] = there;
        if (there.sa_handler != SIG_IGN)
            sigaction(lk_deadly[i], &action, NULL);
    }
}

void lk_deadly_remove(const struct lk_deadly_link *link) {
    for (int i = 0; i < LK_DEADLY; i++)
        sigaction(lk_deadly[i], &link->before[i], NULL);
}

void lk_deadly_pass_on(const struct lk_deadly_link *link, int signal) {
    for (int i = 0; i < LK_DEADLY; i++)
        if (lk_deadly[i] == signal)
            sigaction(signal, &link->before[i], NULL);
    raise(signal);
}
