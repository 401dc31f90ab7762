/* SPDX-License-Identifier: MIT */
/*
 * log.h - the daemon's words to its operator. Nothing else in the daemon writes to stderr.
 *
 * Two styles: for people ("locksd: warning: ..."; plain sentences without a prefix are info), and
 * for systemd's journal ("<4>..."), which takes the level from the prefix. One line is one write(),
 * so that lines of several threads do not mix. Of what is quoted, a file's or a command line's,
 * control characters come out as '?'. What a client can cause at will goes through lk_log_peer(),
 * which lets a few through a second and counts the rest. Any thread. A reader
 * that does not read is waited for a second, once, and lines are lost until it does: so not from
 * the intake's tick.
 */
#ifndef LK_LOG_H
#define LK_LOG_H

#include <stdbool.h>
#include <stdint.h>

#define LK_LOG_BYTES           1024 /* of a line; longer ones are cut */
#define LK_LOG_PEER_PER_SECOND 10u  /* lines that clients may cause */

enum lk_log_level { LK_LOG_ERROR, LK_LOG_WARNING, LK_LOG_INFO, LK_LOG_DEBUG };

/* Before the first line: journal says for which reader. Level: LK_LOG_INFO until lk_log_level(). */
void lk_log_open(bool journal);
void lk_log_level(uint32_t level);

__attribute__((format(printf, 2, 3))) void lk_log(enum lk_log_level level, const char *format, ...);
/* The same for what a client can cause at will. */
__attribute__((format(printf, 2, 3))) void lk_log_peer(enum lk_log_level level, const char *format,
                                                       ...);

#endif
