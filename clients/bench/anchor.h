/* SPDX-License-Identifier: MIT */
/*
 * anchor.h - what others' dense attention takes on the same GPU: cuDNN and flash through torch.
 *
 * Idea: a script of Python, part of this program, is run by the python3 of the path and its lines
 * are read. Where python3, torch or torch's GPU is missing there is no anchor, which is no error
 * and never a zero. The GPU's memory must be free meanwhile. One thread; blocks until it has ended.
 */
#ifndef BENCH_ANCHOR_H
#define BENCH_ANCHOR_H

#include "choice.h"

#define ANCHOR_CASES_MAX (CHOICE_MAX * CHOICE_MAX * CHOICE_MAX)

struct anchor_case {
    uint32_t q_heads, kv_heads, rows;
    uint64_t tokens;
    double cudnn_us, flash_us; /* 0: not measured */
};

struct anchor {
    char version[64]; /* "": there is none */
    struct anchor_case at[ANCHOR_CASES_MAX];
    unsigned count;
};

/* Measures every case of a complete choice. */
void anchor_measure(const struct choice *choice, uint32_t rounds, uint64_t cache_bytes,
                    struct anchor *ret);
/* NULL: not measured. */
const struct anchor_case *anchor_find(const struct anchor *anchor, struct choice_heads heads,
                                      uint64_t tokens, uint32_t rows);

#endif
