/* SPDX-License-Identifier: MIT */
/*
 * report.h - what a person wants to see at the start and at the end, as log lines.
 */
#ifndef LK_REPORT_H
#define LK_REPORT_H

#include "server.h"

/* Warns of what the configuration names and the machine has not: group, NUMA node. */
void lk_report_missing(const struct lk_access *access, const struct lk_placement *placement);
/* What each pool will have room for. */
void lk_report_room(const struct lk_config *config);
/* Version, engine, each pool's geometry and room, socket, who may connect, what was not granted. */
void lk_report_start(const struct lk_server *server, uint64_t took_ns);
/* What was done, from intake's last word. */
void lk_report_end(const struct lk_server *server, const struct lk_intake_status *status);

#endif
