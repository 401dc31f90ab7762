/* SPDX-License-Identifier: MIT */
/*
 * validate.c - what makes a submission wrong. See validate.h for the contract; the sentences are in
 * reason.c.
 *
 * How sizes stay inside 64 bits: a row's tokens are at most LK_ROW_TOKENS_MAX (2^16), heads at most
 * 2^16 (shapes come from the daemon), head_dim 2^8, elements 4 bytes: 2^42. A list is kv_heads *
 * 2^32 * 8 bytes at most, 2^51. Offsets are compared as `bytes > arena - offset`, never as a sum.
 */
#include "validate.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static enum lk_reason found(struct lk_refusal *ret, enum lk_reason reason, uint32_t row,
                            uint64_t value, uint64_t limit) {
    *ret =
        (struct lk_refusal){.reason = (uint16_t)reason, .row = row, .value = value, .limit = limit};
    return reason;
}

static uint64_t float_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    return bits;
}

/* ---- entry ---- */

/* Bytes of a descriptor: head + rows * row, rows 0..rows_max. BARRIER has none. */
struct desc_shape {
    uint32_t head, row, rows_max;
};

#define STEP                                                                                       \
    { sizeof(struct lk_step_desc), sizeof(struct lk_row_desc), LK_ROWS_MAX }
#define OBJECT                                                                                     \
    { sizeof(struct lk_object_desc), 1, 0 }
static const struct desc_shape desc_shapes[LK_OP_COUNT] = {
    [LK_OP_SEQUENCE_CREATE] = OBJECT,
    [LK_OP_SEQUENCE_FORK] = OBJECT,
    [LK_OP_SEQUENCE_TRUNCATE] = OBJECT,
    [LK_OP_SEQUENCE_FREE] = OBJECT,
    [LK_OP_APPEND] = STEP,
    [LK_OP_DECODE] = STEP,
    [LK_OP_ATTEND] = STEP,
    [LK_OP_LEASE_OPEN] = OBJECT,
    [LK_OP_LEASE_CLOSE] = OBJECT,
    [LK_OP_TABLES] = {sizeof(struct lk_tables_desc), sizeof(struct lk_table_desc), LK_ROWS_MAX},
    [LK_OP_WRITE] = STEP,
    [LK_OP_ATTEND_TABLE] = STEP,
    [LK_OP_COPY_PAGES] = OBJECT,
    [LK_OP_INVALIDATE] = OBJECT,
    [LK_OP_BARRIER] = {0, 1, 0},
};

/* The empty descriptor first: a division takes longer than all the rest. */
static enum lk_reason desc_bytes_invalid(const struct desc_shape *shape, uint32_t bytes,
                                         struct lk_refusal *ret) {
    if (bytes == shape->head)
        return LK_REASON_NONE;
    if (bytes < shape->head || shape->rows_max == 0)
        return lk_found(ret, LK_REASON_DESC_BYTES, bytes, shape->head);
    uint32_t rows = (bytes - shape->head) / shape->row, needed = shape->head + rows * shape->row;
    if (rows > shape->rows_max)
        return lk_found(ret, LK_REASON_ROWS, rows, shape->rows_max);
    return bytes == needed ? LK_REASON_NONE : lk_found(ret, LK_REASON_DESC_BYTES, bytes, needed);
}

enum lk_reason lk_sqe_invalid(const struct lk_sqe *sqe, uint64_t descriptor_area,
                              struct lk_refusal *ret) {
    if (sqe->op == 0 || sqe->op >= LK_OP_COUNT)
        return lk_found(ret, LK_REASON_OP, sqe->op, LK_OP_COUNT - 1);
    uint64_t reserved = sqe->reserved;
    reserved |= sqe->wait_fence ? 0 : sqe->wait_value;
    reserved |= sqe->signal_fence ? 0 : sqe->signal_value;
    for (size_t i = 0; i < sizeof(sqe->reserved2) / sizeof(sqe->reserved2[0]); i++)
        reserved |= sqe->reserved2[i];
    if (reserved)
        return lk_found(ret, LK_REASON_RESERVED, reserved, 0);
    uint32_t bytes = sqe->desc_bytes;
    enum lk_reason reason = desc_bytes_invalid(&desc_shapes[sqe->op], bytes, ret);
    if (reason)
        return reason;
    if (sqe->desc % 8 != 0)
        return lk_found(ret, LK_REASON_DESC_OFFSET, sqe->desc, 8);
    if (sqe->desc > descriptor_area || bytes > descriptor_area - sqe->desc)
        return lk_found(ret, LK_REASON_DESC_RANGE, sqe->desc, descriptor_area);
    return LK_REASON_NONE;
}

enum lk_reason lk_fences_invalid(const struct lk_sqe *sqe, const struct lk_bounds *bounds,
                                 struct lk_refusal *ret) {
    uint32_t fences = bounds->device_bytes ? LK_DEVICE_FENCES : 0;
    if (sqe->wait_fence > fences)
        return lk_found(ret, LK_REASON_FENCE_NONE, sqe->wait_fence, fences);
    if (sqe->signal_fence > fences)
        return lk_found(ret, LK_REASON_FENCE_NONE, sqe->signal_fence, fences);
    return LK_REASON_NONE;
}

/* ---- arena ---- */

/* An area that a row or step names. Reasons come in pairs: RANGE, then ALIGN. */
struct area {
    enum lk_reason range;
    uint64_t offset, bytes;
    enum lk_reason device; /* beyond the device arena; NONE: it may not lie there */
};

static enum lk_reason device_area_invalid(struct area area, uint64_t device_bytes, uint32_t row,
                                          struct lk_refusal *ret) {
    const uint64_t fences = LK_DEVICE_FENCES * LK_DEVICE_FENCE_STRIDE;
    uint64_t offset = area.offset - LK_DEVICE_BASE;
    if (offset > device_bytes || area.bytes > device_bytes - offset)
        return found(ret, area.device, row, offset, device_bytes);
    if (offset < fences)
        return found(ret, LK_REASON_DEVICE_PAYLOAD, row, offset, fences);
    if (offset % LK_LINE != 0)
        return found(ret, area.range + 1, row, area.offset, LK_LINE);
    return LK_REASON_NONE;
}

static enum lk_reason area_invalid(struct area area, uint64_t arena_bytes, uint32_t row,
                                   struct lk_refusal *ret) {
    if (area.offset > arena_bytes || area.bytes > arena_bytes - area.offset)
        return found(ret, area.range, row, area.offset, arena_bytes);
    if (area.offset % LK_LINE != 0)
        return found(ret, area.range + 1, row, area.offset, LK_LINE);
    return LK_REASON_NONE;
}

/* ---- step ---- */

enum uses { USES_Q = 1, USES_KV = 2, USES_SLOTS = 4, USES_TABLE = 8 };

static unsigned step_uses(uint16_t op) {
    switch (op) {
    case LK_OP_APPEND:
        return USES_KV;
    case LK_OP_DECODE:
        return USES_Q | USES_KV;
    case LK_OP_ATTEND:
        return USES_Q;
    case LK_OP_WRITE:
        return USES_KV | USES_SLOTS;
    default: /* ATTEND_TABLE */
        return USES_Q | USES_TABLE;
    }
}

static enum lk_reason selection_invalid(const struct lk_step_desc *s, uint32_t page_tokens,
                                        struct lk_refusal *ret) {
    if (s->budget && s->budget < page_tokens)
        return lk_found(ret, LK_REASON_BUDGET, s->budget, page_tokens);
    if (s->sampled < -1)
        return lk_found(ret, LK_REASON_SAMPLED, (uint64_t)(int64_t)s->sampled, 0);
    if (!(s->mass_target >= 0.0f && s->mass_target <= 1.0f)) /* NaN fails both */
        return lk_found(ret, LK_REASON_MASS_TARGET, float_bits(s->mass_target), 1);
    if (!isfinite(s->sm_scale))
        return lk_found(ret, LK_REASON_SM_SCALE, float_bits(s->sm_scale), 0);
    if (s->scan > LK_SCAN_TREE)
        return lk_found(ret, LK_REASON_SCAN, s->scan, LK_SCAN_TREE);
    if (s->sink_pages > LK_FIXED_PAGES_MAX)
        return lk_found(ret, LK_REASON_SINK_PAGES, s->sink_pages, LK_FIXED_PAGES_MAX);
    if (s->recent_pages < 1 || s->recent_pages > LK_FIXED_PAGES_MAX)
        return lk_found(ret, LK_REASON_RECENT_PAGES, s->recent_pages, LK_FIXED_PAGES_MAX);
    return LK_REASON_NONE;
}

static enum lk_reason step_head_invalid(uint16_t op, const struct lk_step_desc *s, uint32_t bytes,
                                        const struct lk_bounds *bounds, struct lk_refusal *ret) {
    if (s->rows > LK_ROWS_MAX)
        return lk_found(ret, LK_REASON_ROWS, s->rows, LK_ROWS_MAX);
    if (bytes != sizeof(*s) + s->rows * sizeof(struct lk_row_desc))
        return lk_found(ret, LK_REASON_DESC_BYTES, bytes,
                        sizeof(*s) + s->rows * sizeof(struct lk_row_desc));
    if (s->reserved || s->reserved2)
        return lk_found(ret, LK_REASON_RESERVED, s->reserved | s->reserved2, 0);
    if (s->pool >= bounds->pool_count)
        return lk_found(ret, LK_REASON_POOL, s->pool, bounds->pool_count);
    const struct lk_pool_shape *pool = &bounds->pools[s->pool];
    enum lk_reason reason = LK_REASON_NONE;
    if (step_uses(op) & USES_Q)
        reason = selection_invalid(s, pool->page_tokens, ret);
    if (!reason && s->results != LK_NONE)
        reason = area_invalid(
            (struct area){LK_REASON_RESULTS_RANGE, s->results,
                          (uint64_t)s->rows * pool->kv_heads * sizeof(struct lk_head_result),
                          LK_REASON_NONE},
            bounds->arena_bytes, LK_ROW_WHOLE, ret);
    if (!reason && s->timing != LK_NONE)
        reason = area_invalid((struct area){LK_REASON_TIMING_RANGE, s->timing,
                                            sizeof(struct lk_step_result), LK_REASON_NONE},
                              bounds->arena_bytes, LK_ROW_WHOLE, ret);
    return reason;
}

static enum lk_reason row_head_invalid(uint16_t op, const struct lk_row_desc *r, uint32_t row,
                                       const struct lk_pool_shape *pool,
                                       const struct lk_bounds *bounds, struct lk_refusal *ret) {
    unsigned uses = step_uses(op);
    if (r->reserved)
        return found(ret, LK_REASON_RESERVED, row, r->reserved, 0);
    if (r->handle == 0)
        return found(ret, LK_REASON_HANDLE_NONE, row, 0, 0);
    if (r->layer >= pool->layers)
        return found(ret, LK_REASON_LAYER, row, r->layer, pool->layers);
    if (r->tokens == 0)
        return found(ret, LK_REASON_TOKENS_ZERO, row, 0, 1);
    if (r->tokens > bounds->max_row_tokens)
        return found(ret, LK_REASON_TOKENS_MANY, row, r->tokens, bounds->max_row_tokens);
    if (op == LK_OP_ATTEND && r->tokens != 1)
        return found(ret, LK_REASON_TOKENS_ONE, row, r->tokens, 1);
    if ((uses & (USES_SLOTS | USES_TABLE)) && r->position != 0)
        return found(ret, LK_REASON_TABLE_POSITION, row, r->position, 0);
    if ((uses & USES_TABLE) && r->table_set >= LK_TABLE_SETS)
        return found(ret, LK_REASON_TABLE_SET, row, r->table_set, LK_TABLE_SETS);
    if ((uses & USES_Q) && r->list != LK_NONE && r->list_pages == 0)
        return found(ret, LK_REASON_LIST_PAGES, row, 0, 1);
    return LK_REASON_NONE;
}

static enum lk_reason row_areas_invalid(uint16_t op, const struct lk_row_desc *r, uint32_t row,
                                        const struct lk_pool_shape *pool,
                                        const struct lk_bounds *bounds, struct lk_refusal *ret) {
    uint64_t kv = (uint64_t)r->tokens * pool->kv_heads * pool->head_dim * pool->element_bytes;
    uint64_t heads = (uint64_t)r->tokens * pool->kv_heads * pool->group;
    struct area areas[8];
    size_t count = 0;
    unsigned uses = step_uses(op);
    if (uses & USES_KV) {
        areas[count++] = (struct area){LK_REASON_K_RANGE, r->k, kv, LK_REASON_K_DEVICE};
        areas[count++] = (struct area){LK_REASON_V_RANGE, r->v, kv, LK_REASON_V_DEVICE};
    }
    if (uses & USES_SLOTS)
        areas[count++] = (struct area){LK_REASON_SLOTS_RANGE, r->slots,
                                       (uint64_t)r->tokens * sizeof(int64_t), LK_REASON_NONE};
    if (uses & USES_Q) {
        areas[count++] =
            (struct area){LK_REASON_Q_RANGE, r->q, kv * pool->group, LK_REASON_Q_DEVICE};
        areas[count++] =
            (struct area){LK_REASON_OUT_RANGE, r->out, heads * pool->head_dim * sizeof(float),
                          LK_REASON_OUT_DEVICE};
        if (r->lse != LK_NONE)
            areas[count++] = (struct area){LK_REASON_LSE_RANGE, r->lse, heads * sizeof(float),
                                           LK_REASON_LSE_DEVICE};
        if (r->list != LK_NONE)
            areas[count++] = (struct area){LK_REASON_LIST_RANGE, r->list,
                                           (uint64_t)pool->kv_heads * r->list_pages *
                                               sizeof(struct lk_page_entry),
                                           LK_REASON_NONE};
    }
    enum lk_reason reason = LK_REASON_NONE;
    for (size_t i = 0; i < count && !reason; i++)
        if (areas[i].device && areas[i].offset >= LK_DEVICE_BASE)
            reason = device_area_invalid(areas[i], bounds->device_bytes, row, ret);
        else
            reason = area_invalid(areas[i], bounds->arena_bytes, row, ret);
    return reason;
}

enum lk_reason lk_step_invalid(uint16_t op, const struct lk_step_desc *step, uint32_t bytes,
                               const struct lk_bounds *bounds, struct lk_refusal *ret) {
    enum lk_reason reason = step_head_invalid(op, step, bytes, bounds, ret);
    if (reason)
        return reason;
    const struct lk_pool_shape *pool = &bounds->pools[step->pool];
    const struct lk_row_desc *rows = lk_step_rows(step);
    for (uint32_t i = 0; i < step->rows && !reason; i++) {
        reason = row_head_invalid(op, &rows[i], i, pool, bounds, ret);
        if (!reason)
            reason = row_areas_invalid(op, &rows[i], i, pool, bounds, ret);
    }
    return reason;
}

/* ---- objects and tables ---- */

enum lk_reason lk_object_invalid(uint16_t op, const struct lk_object_desc *object, uint32_t bytes,
                                 const struct lk_bounds *bounds, struct lk_refusal *ret) {
    bool makes = op == LK_OP_SEQUENCE_CREATE || op == LK_OP_LEASE_OPEN;
    bool lists = op == LK_OP_COPY_PAGES || op == LK_OP_INVALIDATE;
    if (bytes != sizeof(*object))
        return lk_found(ret, LK_REASON_DESC_BYTES, bytes, sizeof(*object));
    if (makes && object->pool >= bounds->pool_count)
        return lk_found(ret, LK_REASON_POOL, object->pool, bounds->pool_count);
    if (!makes && object->handle == 0)
        return lk_found(ret, LK_REASON_HANDLE_NONE, 0, 0);
    if (op == LK_OP_LEASE_OPEN && object->length == 0)
        return lk_found(ret, LK_REASON_LEASE_EMPTY, 0, 1);
    if (!lists)
        return LK_REASON_NONE;
    if (object->count > LK_LIST_MAX)
        return lk_found(ret, LK_REASON_COUNT, object->count, LK_LIST_MAX);
    uint64_t entry = op == LK_OP_COPY_PAGES ? 2 * sizeof(uint32_t) : sizeof(uint32_t);
    return area_invalid(
        (struct area){LK_REASON_LIST_RANGE, object->list, object->count * entry, LK_REASON_NONE},
        bounds->arena_bytes, LK_ROW_WHOLE, ret);
}

static enum lk_reason table_invalid(const struct lk_table_desc *t, uint32_t row,
                                    uint32_t page_tokens, uint64_t arena_bytes,
                                    struct lk_refusal *ret) {
    uint64_t pages = t->length / page_tokens + (t->length % page_tokens != 0);
    if (t->reserved)
        return found(ret, LK_REASON_RESERVED, row, t->reserved, 0);
    if (t->pages != pages)
        return found(ret, LK_REASON_TABLE_LENGTH, row, t->pages, pages);
    return area_invalid(
        (struct area){LK_REASON_TABLE_RANGE, t->table, t->pages * sizeof(uint32_t), LK_REASON_NONE},
        arena_bytes, row, ret);
}

enum lk_reason lk_tables_invalid(const struct lk_tables_desc *tables, uint32_t bytes,
                                 const struct lk_bounds *bounds, uint32_t page_tokens,
                                 struct lk_refusal *ret) {
    if (tables->rows > LK_ROWS_MAX)
        return lk_found(ret, LK_REASON_ROWS, tables->rows, LK_ROWS_MAX);
    uint64_t needed = sizeof(*tables) + tables->rows * sizeof(struct lk_table_desc);
    if (bytes != needed)
        return lk_found(ret, LK_REASON_DESC_BYTES, bytes, needed);
    if (tables->handle == 0)
        return lk_found(ret, LK_REASON_HANDLE_NONE, 0, 0);
    if (tables->set >= LK_TABLE_SETS)
        return lk_found(ret, LK_REASON_TABLE_SET, tables->set, LK_TABLE_SETS);
    enum lk_reason reason = LK_REASON_NONE;
    const struct lk_table_desc *rows = lk_tables_rows(tables);
    for (uint32_t i = 0; i < tables->rows && !reason; i++)
        reason = table_invalid(&rows[i], i, page_tokens, bounds->arena_bytes, ret);
    return reason;
}

/* ---- hand-shake ---- */

static int versions_invalid(uint16_t major, uint16_t minor, uint16_t min_minor, const char *other,
                            uint16_t *ret_minor, char *why, size_t why_bytes) {
    const unsigned ours = LK_ABI_MAJOR, our_minor = LK_ABI_MINOR, our_min = LK_ABI_MIN_MINOR;
    unsigned spoken = minor < our_minor ? minor : our_minor;
    if (major != ours) {
        snprintf(why, why_bytes,
                 "the %s speaks protocol version %u.%u, this side %u.%u: the first "
                 "numbers must be equal",
                 other, major, minor, ours, our_minor);
        return -EPROTO;
    }
    if (spoken < min_minor || spoken < our_min) {
        snprintf(why, why_bytes,
                 "the %s speaks protocol version %u.%u (at least %u.%u), this side %u.%u (at least "
                 "%u.%u): there is none in common",
                 other, major, minor, major, min_minor, ours, our_minor, ours, our_min);
        return -EPROTO;
    }
    *ret_minor = (uint16_t)spoken;
    return 0;
}

int lk_hello_invalid(const struct lk_hello *hello, uint64_t max_arena_bytes, uint16_t *ret_minor,
                     char *why, size_t why_bytes) {
    uint16_t minor;
    int r = versions_invalid(hello->major, hello->minor, hello->min_minor, "client", &minor, why,
                             why_bytes);
    if (r)
        return r;
    if (hello->head.bytes != sizeof(*hello)) {
        snprintf(why, why_bytes, "the hello has %u bytes, not %zu", hello->head.bytes,
                 sizeof(*hello));
        return -EPROTO;
    }
    if (hello->reserved || hello->reserved2) {
        snprintf(why, why_bytes, "a reserved field of the hello is %u, not 0",
                 hello->reserved ? hello->reserved : hello->reserved2);
        return -EINVAL;
    }
    if (!memchr(hello->name, 0, sizeof(hello->name))) {
        snprintf(why, why_bytes, "the client's name does not end within %zu bytes",
                 sizeof(hello->name));
        return -EINVAL;
    }
    if (hello->arena_bytes > max_arena_bytes) {
        snprintf(why, why_bytes,
                 "arena_bytes %" PRIu64 " is more than a connection may have, "
                 "%" PRIu64,
                 hello->arena_bytes, max_arena_bytes);
        return -EDQUOT;
    }
    *ret_minor = minor;
    return 0;
}

int lk_welcome_invalid(const struct lk_welcome *welcome, char *why, size_t why_bytes) {
    uint16_t minor;
    if (welcome->head.bytes != sizeof(*welcome)) {
        snprintf(why, why_bytes, "the welcome has %u bytes, not %zu", welcome->head.bytes,
                 sizeof(*welcome));
        return -EPROTO;
    }
    return versions_invalid(welcome->major, welcome->minor, welcome->min_minor, "daemon", &minor,
                            why, why_bytes);
}
