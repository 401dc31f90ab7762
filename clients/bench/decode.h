/* SPDX-License-Identifier: MIT */
/*
 * decode.h - what a real step through a daemon takes its client, and what of that is the daemon's
 * own computing.
 *
 * Idea: a sequence of made-up keys; DECODE of one row again and again, layer after layer, so that
 * pages are summarised beside the steps of other layers, as in a model. Each step is timed here
 * from submission to completion, beside the sum of the phases the daemon reports for it
 * (lk_step_result: append, score, select, attend). The difference, step by step, is all the rest:
 * ring, intake, launch, completion. One thread spins.
 */
#ifndef BENCH_DECODE_H
#define BENCH_DECODE_H

#include <stdbool.h>

#include "../locks.h"

enum decode_phase { DECODE_APPEND, DECODE_SCORE, DECODE_SELECT, DECODE_ATTEND, DECODE_PHASES };

struct decode_result { /* microseconds */
    double client_p50, client_p99, device_p50, device_p99, beyond_p50, beyond_p99;
    double phase_p50[DECODE_PHASES];
    bool timed; /* the daemon told phases: else device and beyond are nothing */
};

/* pool: with room for `tokens` and `steps` more. Appends in rows of row_tokens; the sequence
 * is cut back to `tokens` after each of the rounds (1..1000) of steps. -> 0 or -errno; the sentence
 * is locks_error()'s. */
int decode_measure(struct locks *locks, const struct locks_pool *pool, uint64_t tokens,
                   uint32_t row_tokens, uint32_t rounds, uint32_t steps, struct decode_result *ret);

#endif
