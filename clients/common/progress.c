/* SPDX-License-Identifier: MIT */
/*
 * progress.c - see progress.h.
 */
#include "progress.h"

#include <stdio.h>
#include <unistd.h>

#include "measure.h"

#define BAR_CELLS   32
#define REDRAWN_NS  UINT64_C(50000000) /* 20 times a second: smooth, and no work to speak of */
#define LABEL_CELLS 26

static void draw(const struct lk_progress *p, uint64_t now) {
    unsigned filled = p->total ? (unsigned)(p->done * BAR_CELLS / p->total) : BAR_CELLS;
    unsigned percent = p->total ? (unsigned)(p->done * 100 / p->total) : 100;
    fprintf(stderr, "\r%-*s [", LABEL_CELLS, p->label);
    for (unsigned i = 0; i < BAR_CELLS; i++)
        fputc(i < filled ? '#' : '.', stderr);
    fprintf(stderr, "] %3u %%  %.1f s ", percent, (double)(now - p->begun_ns) * 1e-9);
    fflush(stderr);
}

void lk_progress_begin(struct lk_progress *progress, const char *label, uint64_t total) {
    uint64_t now = lk_clock_ns();
    *progress = (struct lk_progress){
        .label = label, .total = total, .begun_ns = now, .terminal = isatty(STDERR_FILENO) != 0};
    if (progress->terminal)
        draw(progress, now);
}

void lk_progress_at(struct lk_progress *progress, uint64_t done) {
    progress->done = done;
    if (!progress->terminal)
        return;
    uint64_t now = lk_clock_ns();
    if (now - progress->drawn_ns < REDRAWN_NS)
        return;
    progress->drawn_ns = now;
    draw(progress, now);
}

void lk_progress_end(struct lk_progress *progress, bool whole) {
    uint64_t now = lk_clock_ns();
    if (whole)
        progress->done = progress->total;
    if (progress->terminal) {
        draw(progress, now);
        fputc('\n', stderr);
    } else if (whole) {
        fprintf(stderr, "%s: done in %.1f s\n", progress->label,
                (double)(now - progress->begun_ns) * 1e-9);
    }
}
