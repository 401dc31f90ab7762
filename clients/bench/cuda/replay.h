/* SPDX-License-Identifier: MIT */
/*
 * replay.h - launches captured in a graph, replayed and timed. See rig.h.
 */
#ifndef BENCH_REPLAY_H
#define BENCH_REPLAY_H

#include "rig.h"

/* Launch number i on a stream. -> 0 or a cudaError_t as an int. */
typedef int replay_launch(void *context, uint32_t i, cudaStream_t stream);

/* Median over the rounds of microseconds a launch, `chain` launches (up to RIG_CHAIN_MAX) in one
 * graph. apart: a launch starts only when the one before has ended, whatever the launcher asks. */
int replay_time(struct rig_gpu *gpu, replay_launch *launch, void *context, uint32_t chain,
                bool apart, double *ret_us);

/* error, if any, in words -> 0 or an exit code. */
int rig_refuse(struct rig_gpu *gpu, int error, const char *what);

#endif
