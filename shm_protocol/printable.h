/* SPDX-License-Identifier: MIT */
/*
 * printable.h - words of the other side, made fit for a terminal or a log.
 *
 * Whoever is spoken to may lie: an escape sequence in a name moves the cursor, renames the window
 * or hides a line. Pure, any thread.
 */
#ifndef LK_PRINTABLE_H
#define LK_PRINTABLE_H

/* Puts a '?' for every byte of a control character (C0 and DEL; C1, alone or in UTF-8) but those
 * that `kept` names (may be ""). Other UTF-8 stays. -> text. */
char *lk_printable(char *text, const char *kept);

#endif
