/* SPDX-License-Identifier: MIT */
/*
 * wait.c - completions: spin for a while, then sleep on the bell; never longer than the daemon
 * lives.
 */
#include "internal.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <time.h>

#include "../../shm_protocol/atomics.h"

#define LOOKS_PER_CLOCK 16 /* pauses between two readings of the clock: half a microsecond */
#define FOREVER         UINT64_MAX

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

static bool take(struct locks *l, struct lk_cqe *ret) {
    bool blocked;
    if (!lk_ring_client_consume(&l->ring, ret, &blocked))
        return false;
    if (blocked && lk_ring_client_must_wake(&l->ring))
        lk_bell_ring(l->memory.bell);
    return true;
}

static void wake_up(struct locks *l) {
    l->armed = false;
    lk_ring_client_disarm(&l->ring);
    if (!lk_bell_drain(l->memory.bell))
        l->dead = true;
}

static bool look(struct locks *l, struct lk_cqe *ret) {
    for (int i = 0; i < LOOKS_PER_CLOCK; i++) {
        if (take(l, ret))
            return true;
        lk_pause();
    }
    return false;
}

/* The clock is read only when the quickest answers have not come: reading it takes as long as a
 * look. */
static bool spin(struct locks *l, uint64_t deadline, struct lk_cqe *ret) {
    if (look(l, ret))
        return true;
    for (uint64_t now = now_ns(), until = now + l->spin_ns; now < until && now < deadline;
         now = now_ns())
        if (look(l, ret))
            return true;
    return false;
}

/* Until the bell rings, the daemon hangs up, or it is time. */
static void doze(struct locks *l, uint64_t deadline) {
    struct pollfd fds[2] = {{.fd = l->memory.bell, .events = POLLIN},
                            {.fd = l->socket, .events = POLLRDHUP}};
    uint64_t now = now_ns();
    uint64_t left = deadline > now ? deadline - now : 0;
    struct timespec span = {.tv_sec = (time_t)(left / UINT64_C(1000000000)),
                            .tv_nsec = (long)(left % UINT64_C(1000000000))};
    if (ppoll(fds, 2, deadline == FOREVER ? NULL : &span, NULL) > 0 && fds[1].revents)
        l->dead = true;
}

/* The next completion in the ring. A daemon that dies leaves what it had completed to be read. */
static int next(struct locks *l, uint64_t deadline, struct lk_cqe *ret) {
    if (l->armed)
        wake_up(l);
    if (spin(l, deadline, ret))
        return 0;
    while (!l->dead) {
        if (!lk_ring_client_arm(&l->ring)) {
            doze(l, deadline);
            wake_up(l);
        }
        if (take(l, ret))
            return 0;
        if (!l->dead && now_ns() >= deadline)
            return lk_client_fail(l, -ETIMEDOUT, "no completion came in time");
    }
    return take(l, ret) ? 0 : lk_client_gone(l);
}

/* The flight a completion belongs to, which holds it from now on. */
static int arrive(struct locks *l, uint64_t deadline, uint32_t *ret) {
    struct lk_cqe cqe;
    int r = next(l, deadline, &cqe);
    if (r)
        return r;
    if (cqe.user_data >= l->flight_count) {
        l->dead = true;
        return lk_client_fail(l, -EPROTO, "the daemon completed submission %llu of %u",
                              (unsigned long long)cqe.user_data, l->flight_count);
    }
    *ret = (uint32_t)cqe.user_data;
    l->flights[*ret].cqe = cqe;
    return 0;
}

static void keep(struct locks *l, uint32_t flight) {
    l->landed[(l->landed_first + l->landed_count++) % l->flight_count] = flight;
}

int lk_client_land(struct locks *locks) {
    uint32_t flight = 0;
    int r = arrive(locks, FOREVER, &flight);
    if (!r)
        keep(locks, flight);
    return r;
}

/* Status of a completion, its sentence left behind. */
static int status(struct locks *l, const struct lk_cqe *cqe) {
    struct lk_refusal refusal = {
        .reason = cqe->reason, .row = cqe->row, .value = cqe->value, .limit = cqe->limit};
    if (cqe->status && cqe->reason)
        lk_client_refused(l, cqe->op, &refusal);
    else if (cqe->status)
        lk_client_fail(l, cqe->status, "%s: %s", lk_client_op_name(cqe->op),
                       strerror(-cqe->status));
    return cqe->status;
}

int lk_client_complete(struct locks *locks, uint32_t flight, struct lk_cqe *ret) {
    for (;;) {
        uint32_t arrived = 0;
        int r = arrive(locks, FOREVER, &arrived);
        if (r)
            return r;
        if (arrived != flight) {
            keep(locks, arrived);
            continue;
        }
        struct lk_cqe *cqe = &locks->flights[flight].cqe;
        locks->free_flights[locks->free_count++] = flight;
        *ret = *cqe;
        return status(locks, cqe);
    }
}

static void hand_out(struct locks *l, uint32_t flight, struct locks_completion *ret) {
    const struct lk_flight *f = &l->flights[flight];
    *ret = (struct locks_completion){.user_data = f->user_data,
                                     .status = status(l, &f->cqe),
                                     .op = f->cqe.op,
                                     .rows = f->cqe.rows,
                                     .fence = f->cqe.fence,
                                     .total_ns = f->cqe.total_ns,
                                     .bytes = f->cqe.bytes};
    l->free_flights[l->free_count++] = flight;
}

static bool hand_out_kept(struct locks *l, struct locks_completion *ret) {
    if (!l->landed_count)
        return false;
    uint32_t flight = l->landed[l->landed_first];
    l->landed_first = (l->landed_first + 1) % l->flight_count;
    l->landed_count--;
    hand_out(l, flight, ret);
    return true;
}

int locks_wait(struct locks *locks, int timeout_ms, struct locks_completion *ret) {
    uint32_t flight = 0;
    if (hand_out_kept(locks, ret))
        return 0;
    if (!lk_ring_client_in_flight(&locks->ring))
        return lk_client_fail(locks, -EINVAL, "nothing is in flight: there is nothing to wait for");
    uint64_t deadline =
        timeout_ms < 0 ? FOREVER : now_ns() + (uint64_t)timeout_ms * UINT64_C(1000000);
    int r = arrive(locks, deadline, &flight);
    if (!r)
        hand_out(locks, flight, ret);
    return r;
}

int locks_try(struct locks *locks, struct locks_completion *ret) {
    struct lk_cqe cqe;
    if (hand_out_kept(locks, ret))
        return 0;
    if (locks->armed)
        wake_up(locks);
    if (take(locks, &cqe) && cqe.user_data < locks->flight_count) {
        locks->flights[cqe.user_data].cqe = cqe;
        hand_out(locks, (uint32_t)cqe.user_data, ret);
        return 0;
    }
    return locks->dead ? lk_client_gone(locks)
                       : lk_client_fail(locks, -EAGAIN, "no completion is there yet");
}

int locks_fd(const struct locks *locks) {
    return locks->memory.bell;
}

int locks_arm(struct locks *locks) {
    if (locks->landed_count || locks->dead || lk_ring_client_arm(&locks->ring))
        return 1;
    locks->armed = true;
    return 0;
}
