/* SPDX-License-Identifier: MIT */
/*
 * progress.h - how far a long task is, on stderr: a bar that moves on a terminal, one line at the
 * end of each task elsewhere. One thread; stdout is left to results.
 */
#ifndef LK_PROGRESS_H
#define LK_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

struct lk_progress { /* opaque */
    const char *label;
    uint64_t total, done, begun_ns, drawn_ns;
    bool terminal;
};

/* label must live until the end. */
void lk_progress_begin(struct lk_progress *progress, const char *label, uint64_t total);
void lk_progress_at(struct lk_progress *progress,
                    uint64_t done); /* cheap: draws 20 times a second */
/* whole: done to its end; else the bar is left as far as it came, and words can follow. */
void lk_progress_end(struct lk_progress *progress, bool whole);

#endif
