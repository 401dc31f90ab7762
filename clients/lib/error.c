/* SPDX-License-Identifier: MIT */
/*
 * error.c - what went wrong, in words.
 */
#include "internal.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>

#define ERRNO_MAX 4095 /* the kernel's */

int lk_client_fail(struct locks *locks, int error, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(locks->error, sizeof(locks->error), format, args);
    va_end(args);
    return error;
}

const char *lk_client_op_name(uint16_t op) {
    static const char *const names[LK_OP_COUNT] = {
        [LK_OP_SEQUENCE_CREATE] = "sequence create",
        [LK_OP_SEQUENCE_FORK] = "sequence fork",
        [LK_OP_SEQUENCE_TRUNCATE] = "sequence truncate",
        [LK_OP_SEQUENCE_FREE] = "sequence free",
        [LK_OP_APPEND] = "append",
        [LK_OP_DECODE] = "decode",
        [LK_OP_ATTEND] = "attend",
        [LK_OP_LEASE_OPEN] = "lease open",
        [LK_OP_LEASE_CLOSE] = "lease close",
        [LK_OP_TABLES] = "tables",
        [LK_OP_WRITE] = "write",
        [LK_OP_ATTEND_TABLE] = "attend table",
        [LK_OP_COPY_PAGES] = "copy pages",
        [LK_OP_INVALIDATE] = "invalidate",
        [LK_OP_BARRIER] = "barrier",
    };
    return op < LK_OP_COUNT && names[op] ? names[op] : "operation";
}

int lk_client_refused(struct locks *locks, uint16_t op, const struct lk_refusal *refusal) {
    char text[LK_REASON_BYTES];
    lk_reason_text(refusal->reason, refusal->value, refusal->limit, refusal->row, text,
                   sizeof(text));
    return lk_client_fail(locks, lk_reason_errno(refusal->reason), "%s: %s", lk_client_op_name(op),
                          text);
}

int lk_client_error(int32_t said) {
    return said < 0 && said >= -ERRNO_MAX ? said : -EPROTO;
}

int lk_client_gone(struct locks *locks) {
    locks->dead = true;
    return lk_client_fail(locks, -ECONNRESET, "the daemon is gone: it closed the connection");
}

const char *locks_version(void) {
    return LK_VERSION;
}
