/* SPDX-License-Identifier: MIT */
/*
 * clients.c - locksctl clients: who is connected, what each has asked and holds.
 */
#include "ctl.h"

#include <stdio.h>

static const struct ctl_column columns[] = {
    {"ID", 1},        {"CLIENT", 0},  {"PID", 1},    {"UID", 1},     {"SINCE", 1},
    {"SUBMITTED", 1}, {"REFUSED", 1}, {"QUEUED", 1}, {"RUNNING", 1}, {"SEQUENCES", 1},
    {"LEASES", 1},    {"PAGES", 1},   {"ARENA", 1},
};

static void add_client(struct ctl_table *table, const json_t *client) {
    static const char *const work[] = {"submissions", "refusals", "queued", "in_flight",
                                       "sequences",   "leases",   "pages"};
    char text[CTL_TEXT], name[64];
    snprintf(text, sizeof(text), "%u", (unsigned)ctl_number(client, "id"));
    ctl_table_cell(table, text);
    snprintf(name, sizeof(name), "%s%s", ctl_string(client, "name"),
             ctl_true(client, "leaving") ? " (leaving)" : "");
    ctl_table_cell(table, name);
    snprintf(text, sizeof(text), "%u", (unsigned)ctl_number(client, "pid"));
    ctl_table_cell(table, text);
    snprintf(text, sizeof(text), "%u", (unsigned)ctl_number(client, "uid"));
    ctl_table_cell(table, text);
    ctl_table_cell(table, ctl_time(ctl_number(client, "connected_seconds"), text));
    for (size_t i = 0; i < sizeof(work) / sizeof(*work); i++)
        ctl_table_cell(table, lk_count_word(ctl_number(client, work[i]), text));
    ctl_table_cell(table, lk_bytes_word((double)ctl_number(client, "arena_bytes"), text));
}

void ctl_clients(const json_t *reply) {
    const json_t *clients = json_object_get(reply, "clients");
    if (json_array_size(clients) == 0) {
        printf("no clients\n");
        return;
    }
    struct ctl_table *table = ctl_table_new(columns, sizeof(columns) / sizeof(*columns));
    for (size_t i = 0; i < json_array_size(clients); i++)
        add_client(table, json_array_get(clients, i));
    ctl_table_print(table, "");
}
