/* SPDX-License-Identifier: MIT */
/*
 * submit.c - a submission on its way into the ring.
 */
#include "internal.h"

#include <errno.h>

static int full(struct locks *l, uint16_t op) {
    return lk_client_fail(l, -EAGAIN,
                          "%s: the ring is full, submissions to be taken or answered: %u",
                          lk_client_op_name(op), l->flight_count - l->free_count);
}

int lk_client_reserve(struct locks *locks, uint16_t op, uint32_t desc_bytes, uint64_t user_data,
                      bool wait, void **ret_desc, uint32_t *ret_flight) {
    struct lk_sqe *sqe;
    if (locks->dead)
        return lk_client_gone(locks);
    if (wait && locks->late != LK_CLIENT_NONE)
        return lk_client_fail(locks, -EBUSY, "%s: the %s before is late: locks_late() has its end",
                              lk_client_op_name(op),
                              lk_client_op_name(locks->flights[locks->late].op));
    if (!locks->free_count)
        return full(locks, op);
    int r;
    while ((r = lk_ring_client_reserve(&locks->ring, desc_bytes, &sqe, ret_desc)) == -EAGAIN) {
        if (!wait)
            return full(locks, op);
        r = lk_client_land(locks, op);
        if (r)
            return r;
    }
    if (r)
        return lk_client_fail(locks, r, "%s: a descriptor of %u bytes is larger than %u",
                              lk_client_op_name(op), desc_bytes, LK_DESCRIPTOR_BYTES_MAX);
    uint32_t flight = locks->free_flights[--locks->free_count];
    locks->flights[flight].user_data = user_data;
    locks->flights[flight].op = op;
    locks->flights[flight].flies = true;
    sqe->op = op;
    sqe->user_data = flight;
    *ret_flight = flight;
    locks->entry = sqe;
    return 0;
}

void lk_client_abandon(struct locks *locks, uint32_t flight) {
    locks->flights[flight].flies = false;
    locks->free_flights[locks->free_count++] = flight;
}

void lk_client_publish(struct locks *locks) {
    lk_ring_client_publish(&locks->ring);
    if (lk_ring_client_must_wake(&locks->ring))
        lk_bell_ring(locks->memory.bell);
}

int locks_submit_barrier(struct locks *locks, uint64_t user_data) {
    void *desc;
    uint32_t flight = 0;
    int r = lk_client_reserve(locks, LK_OP_BARRIER, 0, user_data, false, &desc, &flight);
    if (!r)
        lk_client_publish(locks);
    return r;
}
