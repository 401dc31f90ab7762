/* SPDX-License-Identifier: MIT */
/*
 * object.c - sequences and leases: small blocking operations on a handle.
 */
#include "internal.h"

#include <errno.h>
#include <string.h>

static int run(struct locks *l, uint16_t op, const struct lk_object_desc *object,
               locks_handle *ret) {
    struct lk_refusal refusal;
    void *desc;
    uint32_t flight = 0;
    if (lk_object_invalid(op, object, sizeof(*object), &l->bounds, &refusal))
        return lk_client_refused(l, op, &refusal);
    int r = lk_client_reserve(l, op, sizeof(*object), 0, true, &desc, &flight);
    if (r)
        return r;
    memcpy(desc, object, sizeof(*object));
    lk_client_publish(l);
    return lk_client_complete(l, flight, ret);
}

/* The same of what makes something, which nobody could free without its handle. */
static int make(struct locks *l, uint16_t op, const struct lk_object_desc *object,
                locks_handle *ret) {
    if (!ret)
        return lk_client_fail(l, -EINVAL, "there is no place for the handle: it is NULL");
    return run(l, op, object, ret);
}

int locks_sequence_create(struct locks *locks, uint32_t pool, locks_handle *ret) {
    return make(locks, LK_OP_SEQUENCE_CREATE, &(struct lk_object_desc){.pool = pool}, ret);
}

int locks_sequence_fork(struct locks *locks, locks_handle sequence, locks_handle *ret) {
    return make(locks, LK_OP_SEQUENCE_FORK, &(struct lk_object_desc){.handle = sequence}, ret);
}

int locks_sequence_truncate(struct locks *locks, locks_handle sequence, uint64_t tokens) {
    return run(locks, LK_OP_SEQUENCE_TRUNCATE,
               &(struct lk_object_desc){.handle = sequence, .length = tokens}, NULL);
}

int locks_sequence_free(struct locks *locks, locks_handle sequence) {
    return run(locks, LK_OP_SEQUENCE_FREE, &(struct lk_object_desc){.handle = sequence}, NULL);
}

int locks_lease_open(struct locks *locks, uint32_t pool, uint64_t pages, locks_handle *ret) {
    return make(locks, LK_OP_LEASE_OPEN, &(struct lk_object_desc){.pool = pool, .length = pages},
                ret);
}

int locks_lease_close(struct locks *locks, locks_handle lease) {
    return run(locks, LK_OP_LEASE_CLOSE, &(struct lk_object_desc){.handle = lease}, NULL);
}

/* The list goes by way of the arena, until the daemon has answered. */
static int run_list(struct locks *l, uint16_t op, locks_handle lease, const void *list,
                    uint32_t count, size_t entry_bytes) {
    struct lk_object_desc object = {.handle = lease, .count = count};
    if (count && !list)
        return lk_client_fail(l, -EINVAL, "%s: the list is NULL and its count %u",
                              lk_client_op_name(op), count);
    if (count > LK_LIST_MAX)
        return lk_client_refused(
            l, op, &(struct lk_refusal){LK_REASON_COUNT, LK_ROW_WHOLE, count, LK_LIST_MAX});
    void *copy = locks_alloc(l, count * entry_bytes);
    if (!copy)
        return -ENOSPC;
    if (count)
        memcpy(copy, list, count * entry_bytes);
    object.list = (uint64_t)((uint8_t *)copy - l->memory.arena);
    int r = run(l, op, &object, NULL);
    if (r == -ETIMEDOUT && l->late != LK_CLIENT_NONE) /* the daemon has not read it, perhaps */
        l->late_list = copy;
    else
        locks_free(l, copy);
    return r;
}

int locks_copy_pages(struct locks *locks, locks_handle lease, const uint32_t (*pairs)[2],
                     uint32_t count) {
    return run_list(locks, LK_OP_COPY_PAGES, lease, pairs, count, sizeof(*pairs));
}

int locks_invalidate(struct locks *locks, locks_handle lease, const uint32_t *pages,
                     uint32_t count) {
    return run_list(locks, LK_OP_INVALIDATE, lease, pages, count, sizeof(*pages));
}

static int fill_tables(struct locks *l, const struct locks_table *tables, uint32_t count,
                       struct lk_table_desc *ret) {
    for (uint32_t i = 0; i < count; i++) {
        ret[i] = (struct lk_table_desc){.length = tables[i].length, .pages = tables[i].count};
        int r =
            tables[i].count ? lk_client_offset(l, tables[i].pages, "pages", i, &ret[i].table) : 0;
        if (r)
            return r;
    }
    return 0;
}

/* Page tokens of the lease's pool are the daemon's to know: lengths are checked there. */
int locks_tables(struct locks *locks, locks_handle lease, uint32_t set,
                 const struct locks_table *tables, uint32_t count) {
    struct lk_tables_desc *desc;
    uint32_t flight = 0;
    if (count && !tables)
        return lk_client_fail(locks, -EINVAL, "tables: the tables are NULL and their count %u",
                              count);
    if (count > LK_ROWS_MAX)
        return lk_client_refused(
            locks, LK_OP_TABLES,
            &(struct lk_refusal){LK_REASON_ROWS, LK_ROW_WHOLE, count, LK_ROWS_MAX});
    uint32_t bytes = (uint32_t)(sizeof(*desc) + count * sizeof(struct lk_table_desc));
    int r = lk_client_reserve(locks, LK_OP_TABLES, bytes, 0, true, (void **)&desc, &flight);
    if (r)
        return r;
    *desc = (struct lk_tables_desc){.handle = lease, .set = set, .rows = count};
    r = fill_tables(locks, tables, count, (struct lk_table_desc *)(desc + 1));
    if (r) {
        lk_client_abandon(locks, flight);
        return r;
    }
    lk_client_publish(locks);
    return lk_client_complete(locks, flight, NULL);
}
