/* SPDX-License-Identifier: MIT */
/*
 * mps.h - how processes share the GPU, in words.
 *
 * Without NVIDIA's Multi-Process Service the GPU runs one process at a time: what a client hands to
 * the daemon waits for the daemon's turn, and back. With it both run side by side. A process joins
 * the service when it first uses the GPU, so one that runs now may not have been asked. Any thread.
 */
#ifndef LK_MPS_H
#define LK_MPS_H

#include <stdbool.h>

#define LK_MPS_WORDS 256

/* active: this process shares the GPU by the service. -> text */
const char *lk_mps_words(bool active, char text[LK_MPS_WORDS]);

#endif
