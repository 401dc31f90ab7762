/* SPDX-License-Identifier: MIT */
/*
 * validate.h - what makes a submission wrong, and how to say so.
 *
 * Idea: copy, then check the copy, then use the copy. Functions here are pure: they look at private
 * copies and at what the daemon tells them of its pools, and return the reason or LK_REASON_NONE.
 * What depends on the daemon's state (handles, lengths, quotas) is found by the daemon and refused
 * with the same reasons, so that there is one sentence for each, the same in client and daemon.
 *
 * Invariants
 *   - No arithmetic on client values overflows: sizes are computed in 64 bits from factors whose
 *     products are bounded, or by checked multiplication.
 *   - A descriptor found valid names only bytes inside the arena or, where it may, inside the
 *     device arena behind its fences, aligned to LK_LINE.
 *   - Fields an operation does not use are not looked at; reserved fields are zero.
 *
 * Threads: no state.
 * What it does not do: no look into the arena, none at shared memory.
 */
#ifndef LK_VALIDATE_H
#define LK_VALIDATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "locks_abi.h"

#define LK_LIST_MAX 65536 /* entries of COPY_PAGES and INVALIDATE */
#define LK_FIXED_PAGES_MAX                                                                         \
    (UINT32_C(1) << 24)         /* sink_pages, recent_pages: their sum stays in 32 bits */
#define LK_ROW_WHOLE UINT32_MAX /* the submission itself is at fault, not one of its rows */

/* Each has a sentence and an errno in reason.c. Codes are stable within a major; new ones go to
 * the end. */
enum lk_reason {
    LK_REASON_NONE = 0,
    /* of the entry */
    LK_REASON_OP,          /* unknown operation */
    LK_REASON_RESERVED,    /* reserved field not zero */
    LK_REASON_DESC_OFFSET, /* descriptor misaligned */
    LK_REASON_DESC_RANGE,  /* descriptor outside the area */
    LK_REASON_DESC_BYTES,  /* not the size this operation and row count need */
    /* of the step */
    LK_REASON_POOL,   /* no such pool */
    LK_REASON_ROWS,   /* too many rows */
    LK_REASON_BUDGET, /* smaller than a page */
    LK_REASON_SAMPLED,
    LK_REASON_MASS_TARGET,
    LK_REASON_SM_SCALE,
    LK_REASON_SCAN,
    LK_REASON_SINK_PAGES,
    LK_REASON_RECENT_PAGES,
    /* of a row */
    LK_REASON_LAYER,
    LK_REASON_TOKENS_ZERO,
    LK_REASON_TOKENS_MANY,
    LK_REASON_TOKENS_ONE,     /* ATTEND: exactly one */
    LK_REASON_TABLE_POSITION, /* WRITE, ATTEND_TABLE: position must be 0 */
    LK_REASON_TABLE_SET,
    LK_REASON_LIST_PAGES,  /* a list of no pages */
    LK_REASON_HANDLE_NONE, /* handle 0 */
    /* of arena offsets; value: the offset, limit: bytes of the arena, or the alignment */
    LK_REASON_Q_RANGE,
    LK_REASON_Q_ALIGN,
    LK_REASON_K_RANGE,
    LK_REASON_K_ALIGN,
    LK_REASON_V_RANGE,
    LK_REASON_V_ALIGN,
    LK_REASON_OUT_RANGE,
    LK_REASON_OUT_ALIGN,
    LK_REASON_LSE_RANGE,
    LK_REASON_LSE_ALIGN,
    LK_REASON_LIST_RANGE,
    LK_REASON_LIST_ALIGN,
    LK_REASON_SLOTS_RANGE,
    LK_REASON_SLOTS_ALIGN,
    LK_REASON_RESULTS_RANGE,
    LK_REASON_RESULTS_ALIGN,
    LK_REASON_TIMING_RANGE,
    LK_REASON_TIMING_ALIGN,
    LK_REASON_TABLE_RANGE,
    LK_REASON_TABLE_ALIGN,
    /* of objects and tables */
    LK_REASON_LEASE_EMPTY,    /* lease of no pages */
    LK_REASON_COUNT,          /* list longer than LK_LIST_MAX */
    LK_REASON_TABLE_LENGTH,   /* pages do not fit the length: value pages, limit ceil(length /
                                 page_tokens) */
    LK_REASON_TABLE_PAGE,     /* page id outside the lease: value id, limit pages of the lease */
    LK_REASON_TABLE_ROW,      /* table_row beyond the set: value, limit rows of the set */
    LK_REASON_TABLE_TOKENS,   /* more queries than tokens: value tokens, limit length */
    LK_REASON_TABLE_UNSEALED, /* a page before the newest is not full: value id, limit its fill */
    LK_REASON_TABLE_GAP, /* newest page holds fewer tokens than the length says: value id, limit its
                            fill */
    LK_REASON_SLOT,      /* slot outside the lease: value slot, limit pages * page_tokens */
    LK_REASON_SLOT_GAP,  /* slot beyond the page's fill mark: value offset, limit fill */
    LK_REASON_COPY_SELF, /* COPY_PAGES within one page, or a page written twice: value id */
    /* of the daemon's state */
    LK_REASON_HANDLE_STALE, /* value: handle. Freed, never made, or another connection's */
    LK_REASON_HANDLE_KIND,  /* a lease where a sequence is needed, or the reverse */
    LK_REASON_HANDLE_POOL,  /* of another pool: value its pool, limit the step's */
    LK_REASON_POSITION,     /* value: position, limit: the layer's length */
    LK_REASON_REPLAYED, /* position + tokens is no more than the length before the submission: done
                             before. value, limit alike */
    LK_REASON_LENGTH_MAX, /* value: tokens there would be, limit: the pool's max_tokens, or what a
                             lease holds, which bounds its tables */
    LK_REASON_TRUNCATE,   /* value: length asked for, limit: the longest layer's */
    LK_REASON_SEQUENCES_QUOTA, /* value: how many there would be, limit: the quota */
    LK_REASON_SEQUENCES_POOL,  /* of all clients of the pool */
    LK_REASON_LEASES_QUOTA,    /* value: how many there would be, limit: the quota */
    LK_REASON_PAGES_QUOTA,     /* value: pages there would be, limit: max_pages */
    LK_REASON_PAGES_UID,       /* the same by user */
    LK_REASON_PAGES_FREE,      /* value: pages needed, limit: pages free */
    LK_REASON_WORKSPACE,       /* a row that can never run: value bytes, limit bytes */
    LK_REASON_DRAINING,
    LK_REASON_CLOSING,       /* the channel goes; not given in this version */
    LK_REASON_MEMORY,        /* a lease's own, beside its pages; value: bytes */
    LK_REASON_BUDGET_DEVICE, /* value: budget in tokens, limit: the most the device selects */
    LK_REASON_LENGTH_DEVICE, /* value: tokens, limit: the longest row the device scores */
    /* of the device arena; value: the offset in it, limit: its bytes, 0 where there is none */
    LK_REASON_Q_DEVICE,
    LK_REASON_K_DEVICE,
    LK_REASON_V_DEVICE,
    LK_REASON_OUT_DEVICE,
    LK_REASON_LSE_DEVICE,
    LK_REASON_DEVICE_PAYLOAD, /* value: the offset, limit: where the fences end */
    LK_REASON_FENCE_NONE,     /* value: number of the fence, limit: how many there are */
    LK_REASON_FENCE, /* not reached in time. value: what it held, limit: what was waited for */
    LK_REASON_ROW_REPEATS,  /* an earlier row of the same submission appends there: value position,
                              limit that row */
    LK_REASON_LEASES_POOL,  /* of all clients of the pool */
    LK_REASON_TABLE_MEMORY, /* value: bytes of the table that the machine has no memory for */
    LK_REASONS,
};

/* What was found. row: LK_ROW_WHOLE if the submission itself is at fault. */
struct lk_refusal {
    uint16_t reason; /* enum lk_reason */
    uint32_t row;
    uint64_t value, limit;
};

/* The submission itself is at fault. -> reason. */
static inline enum lk_reason lk_found(struct lk_refusal *ret, enum lk_reason reason, uint64_t value,
                                      uint64_t limit) {
    *ret = (struct lk_refusal){
        .reason = (uint16_t)reason, .row = LK_ROW_WHOLE, .value = value, .limit = limit};
    return reason;
}

static inline bool lk_op_is_step(uint16_t op) { /* its descriptor is a lk_step_desc */
    return op == LK_OP_APPEND || op == LK_OP_DECODE || op == LK_OP_ATTEND || op == LK_OP_WRITE ||
           op == LK_OP_ATTEND_TABLE;
}

/* -errno of a reason (0 of NONE): the status of its completion. */
int lk_reason_errno(uint16_t reason);
/* One word for counters and logs: "position", "pages_quota". Of an unknown code "unknown". */
const char *lk_reason_name(uint16_t reason);
/* The sentence, e.g. "row 3: position 17 is not the layer's length, 16". -> text. Never fails: that
 * of an unknown code (a newer daemon's) has value and limit alone. */
char *lk_reason_text(uint16_t reason, uint64_t value, uint64_t limit, uint32_t row, char *text,
                     size_t bytes);

/* What the functions below must know of a pool and of the daemon. */
struct lk_pool_shape {
    uint32_t layers, kv_heads, group, head_dim, page_tokens, element_bytes;
};
struct lk_bounds {
    const struct lk_pool_shape *pools;
    uint32_t pool_count;
    uint32_t max_row_tokens; /* at most LK_ROW_TOKENS_MAX */
    uint64_t arena_bytes;
    uint64_t device_bytes; /* of the device arena; 0: there is none */
};

/* All return the reason (LK_REASON_NONE: fine) and fill *ret if there is one. */

/* Entry: operation, reserved fields, descriptor inside the area, aligned, of a size the operation
 * may have. */
enum lk_reason lk_sqe_invalid(const struct lk_sqe *sqe, uint64_t descriptor_area,
                              struct lk_refusal *ret);
/* Fences of an entry found valid. */
enum lk_reason lk_fences_invalid(const struct lk_sqe *sqe, const struct lk_bounds *bounds,
                                 struct lk_refusal *ret);
/* APPEND, DECODE, ATTEND, WRITE, ATTEND_TABLE: the whole descriptor of `bytes` bytes, rows
 * included. */
enum lk_reason lk_step_invalid(uint16_t op, const struct lk_step_desc *step, uint32_t bytes,
                               const struct lk_bounds *bounds, struct lk_refusal *ret);
/* SEQUENCE_*, LEASE_*, COPY_PAGES, INVALIDATE. */
enum lk_reason lk_object_invalid(uint16_t op, const struct lk_object_desc *object, uint32_t bytes,
                                 const struct lk_bounds *bounds, struct lk_refusal *ret);
/* TABLES: header and table descriptors; page_tokens is the lease's pool's. The page ids are the
 * daemon's to check. */
enum lk_reason lk_tables_invalid(const struct lk_tables_desc *tables, uint32_t bytes,
                                 const struct lk_bounds *bounds, uint32_t page_tokens,
                                 struct lk_refusal *ret);

/* Rows of a step or tables descriptor. */
static inline const struct lk_row_desc *lk_step_rows(const struct lk_step_desc *step) {
    return (const struct lk_row_desc *)(step + 1);
}
static inline const struct lk_table_desc *lk_tables_rows(const struct lk_tables_desc *tables) {
    return (const struct lk_table_desc *)(tables + 1);
}

/* The hand-shake. 0, or -errno with a sentence in why that names both sides' versions, or value and
 * limit. *ret_minor: the minor to speak. */
int lk_hello_invalid(const struct lk_hello *hello, uint64_t max_arena_bytes, uint16_t *ret_minor,
                     char *why, size_t why_bytes);
int lk_welcome_invalid(const struct lk_welcome *welcome, char *why, size_t why_bytes);

#endif
