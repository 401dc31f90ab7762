/* SPDX-License-Identifier: MIT */
/*
 * measure.h - time, percentiles, and numbers as people write them. Any thread.
 */
#ifndef LK_MEASURE_H
#define LK_MEASURE_H

#include <stddef.h>
#include <stdint.h>

uint64_t lk_clock_ns(void); /* CLOCK_MONOTONIC */

/* The value that `percent` of them do not exceed (nearest rank); sorts the values. 0 of none. */
double lk_percentile(double *values, size_t count, double percent);

#define LK_WORD_BYTES 32
const char *lk_count_word(uint64_t value, char text[LK_WORD_BYTES]); /* 1,234,567 */
const char *lk_bytes_word(double bytes, char text[LK_WORD_BYTES]);   /* 5.0 GiB */
const char *lk_time_word(double seconds, char text[LK_WORD_BYTES]);  /* 12.3 us, 0 */
const char *lk_plural(uint64_t count);                               /* what follows "page" */

/* A whole number, K or M behind it being 1,024 and its square. -> what follows it, or NULL: it is
 * none, or not between low and high. */
const char *lk_number_read(const char *text, uint64_t low, uint64_t high, uint64_t *ret);

#endif
