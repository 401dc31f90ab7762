/* SPDX-License-Identifier: MIT */
/*
 * ctl.h - locksctl: a table of verbs. A verb asks the daemon one question and prints its answer.
 *
 * The daemon answers in JSON (daemon/admin.c says what is in it); --json passes that through. The
 * functions here turn it into words and columns for people. A field the daemon does not know, as an
 * older one may not, prints as "-" or 0. One thread.
 */
#ifndef CTL_H
#define CTL_H

#include <jansson.h>
#include <stdint.h>

#include "../common/measure.h"

typedef void ctl_print(const json_t *reply);

ctl_print ctl_status, ctl_clients, ctl_pools, ctl_drain, ctl_resume, ctl_reload;

/* ---- fields of a JSON object ---- */
uint64_t ctl_number(const json_t *object, const char *name);    /* 0 if absent */
const char *ctl_string(const json_t *object, const char *name); /* "-" if absent */
const char *ctl_text(const json_t *string);                     /* fit for a terminal, or "-" */
int ctl_true(const json_t *object, const char *name);

#define CTL_TEXT LK_WORD_BYTES                               /* of a number in words */
const char *ctl_time(uint64_t seconds, char text[CTL_TEXT]); /* 2 h 3 min; returns text */

/* ---- columns: a table of strings, numbers right, text left ---- */
#define CTL_COLUMNS_MAX 16
struct ctl_column {
    const char *head;
    int right; /* align to the right */
};
struct ctl_table;
struct ctl_table *ctl_table_new(const struct ctl_column *columns, unsigned count);
void ctl_table_cell(struct ctl_table *table,
                    const char *text); /* the next one, copied; rows fill up by themselves */
void ctl_table_print(struct ctl_table *table, const char *indent); /* and frees it */

#endif
