/* SPDX-License-Identifier: MIT */
/*
 * table.c - columns as wide as their widest cell.
 */
#include "ctl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

struct ctl_table {
    const struct ctl_column *columns;
    unsigned count, width[CTL_COLUMNS_MAX];
    size_t cells, room;
    char **cell;
};

static void *or_leave(void *memory) {
    if (memory)
        return memory;
    fprintf(stderr, "locksctl: out of memory\n");
    exit(EX_OSERR);
}

struct ctl_table *ctl_table_new(const struct ctl_column *columns, unsigned count) {
    struct ctl_table *table = or_leave(calloc(1, sizeof(*table)));
    table->columns = columns;
    table->count = count;
    for (unsigned i = 0; i < count; i++)
        table->width[i] = (unsigned)strlen(columns[i].head);
    return table;
}

void ctl_table_cell(struct ctl_table *table, const char *text) {
    unsigned column = (unsigned)(table->cells % table->count), length = (unsigned)strlen(text);
    if (table->cells == table->room) {
        table->room = table->room ? 2 * table->room : 64;
        table->cell = or_leave(realloc(table->cell, table->room * sizeof(*table->cell)));
    }
    table->cell[table->cells++] = or_leave(strdup(text));
    if (length > table->width[column])
        table->width[column] = length;
}

static void print_cell(const struct ctl_table *table, unsigned column, const char *text) {
    int width = (int)table->width[column];
    int last = column + 1 == table->count;
    if (table->columns[column].right)
        printf("%*s", width, text);
    else
        printf("%-*s", last ? 0 : width, text);
    fputs(last ? "\n" : "  ", stdout);
}

void ctl_table_print(struct ctl_table *table, const char *indent) {
    fputs(indent, stdout);
    for (unsigned i = 0; i < table->count; i++)
        print_cell(table, i, table->columns[i].head);
    for (size_t at = 0; at < table->cells;) {
        fputs(indent, stdout);
        for (unsigned i = 0; i < table->count && at < table->cells; i++) {
            print_cell(table, i, table->cell[at]);
            free(table->cell[at++]);
        }
    }
    free(table->cell);
    free(table);
}
