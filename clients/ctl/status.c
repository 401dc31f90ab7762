/* SPDX-License-Identifier: MIT */
/*
 * status.c - locksctl status: the daemon at a glance.
 */
#include "ctl.h"

#include <inttypes.h>
#include <stdio.h>

static void print_work(const json_t *work) {
    char a[CTL_TEXT], b[CTL_TEXT];
    uint64_t read = ctl_number(work, "score_bytes") + ctl_number(work, "select_bytes") +
                    ctl_number(work, "attend_bytes");
    uint64_t dense = ctl_number(work, "dense_bytes");
    uint64_t submissions = ctl_number(work, "submissions");
    printf("  work       %s submission%s, %s refused\n", lk_count_word(submissions, a),
           lk_plural(submissions), lk_count_word(ctl_number(work, "refusals"), b));
    printf("  rows       %s, %s of them exact\n", lk_count_word(ctl_number(work, "rows"), a),
           lk_count_word(ctl_number(work, "rows_exact"), b));
    if (!read)
        return;
    printf("  read       %s, dense attention would have read %s (%.1f x)\n",
           lk_bytes_word((double)read, a), lk_bytes_word((double)dense, b),
           (double)dense / (double)read);
}

static void print_placement(const json_t *placement) {
    printf("  threads    %u; %s\n", (unsigned)ctl_number(placement, "threads"),
           ctl_string(placement, "binding"));
    if (json_object_get(placement, "pool_percent_on_node"))
        printf("  on node    %u %% of pool memory\n",
               (unsigned)ctl_number(placement, "pool_percent_on_node"));
    if (ctl_true(placement, "memory_locked"))
        printf("  memory     locked\n");
    if (json_object_get(placement, "not_granted"))
        printf("  missing    %s\n", ctl_string(placement, "not_granted"));
}

static void print_device_arenas(const json_t *arenas) {
    char count[CTL_TEXT], bytes[CTL_TEXT];
    uint64_t clients = ctl_number(arenas, "arenas");
    printf("  on the GPU %s client%s, %s of device arenas\n", lk_count_word(clients, count),
           lk_plural(clients), lk_bytes_word((double)ctl_number(arenas, "bytes"), bytes));
    printf("  sharing    %s\n", ctl_string(arenas, "sharing"));
}

void ctl_status(const json_t *reply) {
    char up[CTL_TEXT], clients[CTL_TEXT], served[CTL_TEXT];
    const char *state = ctl_true(reply, "stopping")   ? "stopping"
                        : ctl_true(reply, "draining") ? "draining"
                                                      : "serving";
    printf("locksd %s, protocol %s: %s\n", ctl_string(reply, "version"),
           ctl_string(reply, "protocol"), state);
    printf("  up         %s, pid %u\n", ctl_time(ctl_number(reply, "uptime_seconds"), up),
           (unsigned)ctl_number(reply, "pid"));
    printf("  engine     %s\n", ctl_string(reply, "engine"));
    printf("  socket     %s%s\n", ctl_string(reply, "socket"),
           ctl_true(reply, "socket_by_systemd") ? " (systemd's)" : "");
    printf("  access     %s\n", ctl_string(reply, "may_connect"));
    printf("  config     %s\n", ctl_string(reply, "config"));
    printf("  clients    %s of %u, %s since the start\n",
           lk_count_word(ctl_number(reply, "clients"), clients),
           (unsigned)ctl_number(reply, "clients_max"),
           lk_count_word(ctl_number(reply, "clients_served"), served));
    uint64_t sequences = ctl_number(reply, "sequences"), leases = ctl_number(reply, "leases");
    printf("  holding    %" PRIu64 " sequence%s, %" PRIu64 " lease%s\n", sequences,
           lk_plural(sequences), leases, lk_plural(leases));
    print_work(json_object_get(reply, "work"));
    print_placement(json_object_get(reply, "placement"));
    if (json_object_get(reply, "device_arenas"))
        print_device_arenas(json_object_get(reply, "device_arenas"));
    printf("\n");
    ctl_pools(reply);
}
