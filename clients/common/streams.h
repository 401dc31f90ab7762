/* SPDX-License-Identifier: MIT */
/*
 * streams.h - the first and the last line of a tool's main().
 */
#ifndef LK_STREAMS_H
#define LK_STREAMS_H

/* A standard stream that is closed would give its number to the next file opened, and what is said
 * would go there: to the daemon, or into memory shared with it. It becomes one that cannot be
 * written. */
void lk_begin(void);
/* Writes out what stdout still holds. -> code, or EX_IOERR, said on stderr as `tool`, where code is
 * 0 and something did not get out. */
int lk_finish(const char *tool, int code);

#endif
