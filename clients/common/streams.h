/* SPDX-License-Identifier: MIT */
/*
 * finish.h - the last line of a tool's main().
 */
#ifndef LK_FINISH_H
#define LK_FINISH_H

/* Writes out what stdout still holds. -> code, or EX_IOERR, said on stderr as `tool`, where code is
 * 0 and something did not get out. */
int lk_finish(const char *tool, int code);

#endif
