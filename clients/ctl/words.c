/* SPDX-License-Identifier: MIT */
/*
 * words.c - fields of the daemon's answers, and numbers as people read them.
 */
#include "ctl.h"

#include <inttypes.h>
#include <stdio.h>

#include "../../shm_protocol/printable.h"

uint64_t ctl_number(const json_t *object, const char *name) {
    return (uint64_t)json_integer_value(json_object_get(object, name));
}

const char *ctl_string(const json_t *object, const char *name) {
    return ctl_text(json_object_get(object, name));
}

/* The answer is ours, strings and all: they are made fit where they lie. */
const char *ctl_text(const json_t *string) {
    char *text = (char *)json_string_value(string);
    return text ? lk_printable(text, "") : "-";
}

int ctl_true(const json_t *object, const char *name) {
    return json_is_true(json_object_get(object, name));
}

const char *ctl_time(uint64_t seconds, char text[CTL_TEXT]) {
    uint64_t minutes = seconds / 60, hours = minutes / 60, days = hours / 24;
    if (days)
        snprintf(text, CTL_TEXT, "%" PRIu64 " d %" PRIu64 " h", days, hours % 24);
    else if (hours)
        snprintf(text, CTL_TEXT, "%" PRIu64 " h %" PRIu64 " min", hours, minutes % 60);
    else if (minutes)
        snprintf(text, CTL_TEXT, "%" PRIu64 " min %" PRIu64 " s", minutes, seconds % 60);
    else
        snprintf(text, CTL_TEXT, "%" PRIu64 " s", seconds);
    return text;
}
