/* SPDX-License-Identifier: MIT */
/*
 * parallel.h - independent tasks on a few threads, for computations of the tools themselves.
 *
 * Tasks are handed out one at a time, so they may differ in size. Each writes what is its own;
 * results are then the same for any number of threads.
 */
#ifndef LK_PARALLEL_H
#define LK_PARALLEL_H

#include <stdint.h>

typedef void lk_parallel_task(void *context, uint64_t task, unsigned thread);

/* Processors this process may use. */
unsigned lk_parallel_processors(void);
/* Runs tasks 0..count-1; thread is below `threads`, for scratch memory. Returns when all are done.
 * The caller's thread works too, and alone where no thread can be had. */
void lk_parallel_run(unsigned threads, uint64_t count, lk_parallel_task *task, void *context);

#endif
