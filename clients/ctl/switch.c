/* SPDX-License-Identifier: MIT */
/*
 * switch.c - locksctl drain, resume, reload: what the daemon did, in a sentence.
 */
#include "ctl.h"

#include <stdio.h>

void ctl_drain(const json_t *reply) {
    printf("draining: no new sequences and leases. Clients: %u, sequences: %u, leases: %u\n",
           (unsigned)ctl_number(reply, "clients"), (unsigned)ctl_number(reply, "sequences"),
           (unsigned)ctl_number(reply, "leases"));
}

void ctl_resume(const json_t *reply) {
    printf("%s\n", ctl_true(reply, "draining") ? "still draining" : "serving");
}

static void print_keys(const char *what, const json_t *keys) {
    if (json_array_size(keys) == 0)
        return;
    printf("%s", what);
    for (size_t i = 0; i < json_array_size(keys); i++)
        printf("%s%s", i ? ", " : " ", ctl_text(json_array_get(keys, i)));
    printf("\n");
}

void ctl_reload(const json_t *reply) {
    const json_t *taken = json_object_get(reply, "taken"),
                 *restart = json_object_get(reply, "restart_needed");
    if (json_array_size(taken) + json_array_size(restart) == 0)
        printf("nothing has changed\n");
    print_keys("now in force:", taken);
    print_keys("taken only by a restart:", restart);
}
