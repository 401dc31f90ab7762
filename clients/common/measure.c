/* SPDX-License-Identifier: MIT */
/*
 * measure.c - see measure.h.
 */
#include "measure.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

uint64_t lk_clock_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double lk_percentile(double *values, size_t count, double percent) {
    if (!count)
        return 0;
    qsort(values, count, sizeof(*values), ascending);
    size_t rank = (size_t)ceil(percent / 100 * (double)count);
    return values[rank ? (rank < count ? rank : count) - 1 : 0];
}

const char *lk_count_word(uint64_t value, char text[LK_WORD_BYTES]) {
    char digits[24];
    int length = snprintf(digits, sizeof(digits), "%" PRIu64, value), out = 0;
    for (int i = 0; i < length; i++) {
        if (i && (length - i) % 3 == 0)
            text[out++] = ',';
        text[out++] = digits[i];
    }
    text[out] = '\0';
    return text;
}

const char *lk_bytes_word(double bytes, char text[LK_WORD_BYTES]) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    unsigned unit = 0;
    for (; unit < 4 && bytes >= 1024; unit++)
        bytes /= 1024;
    snprintf(text, LK_WORD_BYTES, unit ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
    return text;
}

const char *lk_time_word(double seconds, char text[LK_WORD_BYTES]) {
    static const char *const units[] = {"s", "ms", "us", "ns"};
    unsigned unit = 0;
    if (seconds == 0) {
        snprintf(text, LK_WORD_BYTES, "0");
        return text;
    }
    for (; unit < 3 && seconds < 1; unit++)
        seconds *= 1000;
    snprintf(text, LK_WORD_BYTES,
             seconds < 10    ? "%.2f %s"
             : seconds < 100 ? "%.1f %s"
                             : "%.0f %s",
             seconds, units[unit]);
    return text;
}

const char *lk_plural(uint64_t count) {
    return count == 1 ? "" : "s";
}

const char *lk_number_read(const char *text, uint64_t low, uint64_t high, uint64_t *ret) {
    char *end = NULL;
    errno = 0;
    uint64_t value = strtoull(text, &end, 10);
    uint64_t factor = *end == 'K' ? 1024 : *end == 'M' ? UINT64_C(1024) * 1024 : 1;
    if (*text < '0' || *text > '9' || errno || value > high / factor || value * factor < low)
        return NULL;
    *ret = value * factor;
    return factor > 1 ? end + 1 : end;
}
