/* SPDX-License-Identifier: MIT */
/*
 * wait.c - completions: spin for a while, then sleep on the bell; never longer than the daemon
 * lives.
 */
#include "internal.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <string.h>
#include <time.h>

#include "../../shm_protocol/atomics.h"

#define LOOKS_PER_CLOCK 16   /* pauses between two readings of the clock: half a microsecond */
#define TRIES_PER_LOOK  1024 /* of locks_try(), whether the daemon lives: a look costs 0.3 us */
#define FOREVER         LK_CLIENT_FOREVER

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

static uint64_t after(uint64_t now, uint64_t span_ns) {
    return span_ns > FOREVER - now ? FOREVER : now + span_ns;
}

uint64_t lk_client_deadline(uint64_t span_ns) {
    return after(now_ns(), span_ns);
}

int lk_client_poll(struct pollfd *fds, uint32_t count, uint64_t deadline) {
    uint64_t now = now_ns(), left = deadline > now ? deadline - now : 0;
    struct timespec span = {.tv_sec = (time_t)(left / UINT64_C(1000000000)),
                            .tv_nsec = (long)(left % UINT64_C(1000000000))};
    int found = ppoll(fds, count, deadline == FOREVER ? NULL : &span, NULL);
    return found > 0 ? found : 0;
}

/* Done with the completion at the head of the ring. */
static void advance(struct locks *l) {
    if (lk_ring_client_advance(&l->ring) && lk_ring_client_must_wake(&l->ring))
        lk_bell_ring(l->memory.bell);
}

static void wake_up(struct locks *l) {
    l->armed = false;
    lk_ring_client_disarm(&l->ring);
    if (!lk_bell_drain(l->memory.bell))
        l->dead = true;
}

static const struct lk_cqe *look(const struct locks *l) {
    const struct lk_cqe *cqe = lk_ring_client_peek(&l->ring);
    for (int i = 0; !cqe && i < LOOKS_PER_CLOCK; i++) {
        lk_pause();
        cqe = lk_ring_client_peek(&l->ring);
    }
    return cqe;
}

/* The clock is read only when the quickest answers have not come: reading it takes as long as a
 * look. *deadline: 0 is set to span_ns from then. */
static const struct lk_cqe *spin(const struct locks *l, uint64_t span_ns, uint64_t *deadline) {
    const struct lk_cqe *cqe = look(l);
    if (cqe)
        return cqe;
    uint64_t now = now_ns(), until = now + l->spin_ns;
    if (!*deadline)
        *deadline = after(now, span_ns);
    for (; !cqe && now < until && now < *deadline; now = now_ns())
        cqe = look(l);
    return cqe;
}

/* Until the bell rings, the daemon hangs up, or it is time. */
static void doze(struct locks *l, uint64_t deadline) {
    struct pollfd fds[2] = {{.fd = l->memory.bell, .events = POLLIN},
                            {.fd = l->socket, .events = POLLRDHUP}};
    if (lk_client_poll(fds, 2, deadline) > 0 && fds[1].revents)
        l->dead = true;
}

static const struct lk_cqe *sleep_for_it(struct locks *l, uint64_t deadline) {
    const struct lk_cqe *cqe = NULL;
    while (!cqe && !l->dead) {
        if (!lk_ring_client_arm(&l->ring)) {
            doze(l, deadline);
            wake_up(l);
        }
        cqe = lk_ring_client_peek(&l->ring);
        if (!cqe && !l->dead && now_ns() >= deadline)
            return NULL;
    }
    /* A daemon that dies leaves what it had completed to be read. */
    return cqe ? cqe : lk_ring_client_peek(&l->ring);
}

/* A copy of the next completion (zeros if none), which is still in the ring; its user_data is the
 * number of a flight that flies. The ring is the daemon's to write: nothing is read there twice.
 * Waits until *deadline; 0: span_ns, and the deadline is left there. -ETIMEDOUT: no sentence. */
static int next(struct locks *l, uint64_t span_ns, uint64_t *deadline, struct lk_cqe *ret) {
    *ret = (struct lk_cqe){0};
    if (l->armed)
        wake_up(l);
    const struct lk_cqe *cqe = spin(l, span_ns, deadline);
    if (!cqe)
        cqe = sleep_for_it(l, *deadline);
    if (!cqe)
        return l->dead ? lk_client_gone(l) : -ETIMEDOUT;
    *ret = *cqe;
    lk_copied();
    if (ret->user_data >= l->flight_count || !l->flights[ret->user_data].flies) {
        l->dead = true;
        return lk_client_fail(l, -EPROTO, "the daemon completed submission %llu of %u, %s",
                              (unsigned long long)ret->user_data, l->flight_count,
                              ret->user_data < l->flight_count ? "which is none" : "beyond them");
    }
    l->flights[ret->user_data].flies = false;
    return 0;
}

/* The next completion within the connection's limit. The heartbeat is looked at only when time is
 * over. */
static int next_in_limit(struct locks *l, struct lk_cqe *ret) {
    const uint64_t *heartbeat = &l->memory.completion->heartbeat_ns;
    uint64_t before, now = lk_load_relaxed64(heartbeat);
    int r;
    do {
        uint64_t deadline = 0;
        before = now;
        r = next(l, l->limit_ns, &deadline, ret);
        now = lk_load_relaxed64(heartbeat);
    } while (r == -ETIMEDOUT && now != before);
    return r;
}

/* Out of the ring, into its flight, to be handed out later. */
static void keep(struct locks *l, const struct lk_cqe *cqe) {
    uint32_t flight = (uint32_t)cqe->user_data;
    l->flights[flight].cqe = *cqe;
    l->landed[(l->landed_first + l->landed_count++) % l->flight_count] = flight;
    advance(l);
}

static uint64_t limit_ms(const struct locks *l) {
    return l->limit_ns / LK_CLIENT_NS_A_MS;
}

int lk_client_land(struct locks *locks, uint16_t op) {
    struct lk_cqe cqe;
    int r = next_in_limit(locks, &cqe);
    if (!r)
        keep(locks, &cqe);
    if (r == -ETIMEDOUT)
        lk_client_fail(locks, r,
                       "%s: not submitted: the ring is full, and nothing was heard of the daemon "
                       "for %" PRIu64 " ms (locks_options.limit_ms)",
                       lk_client_op_name(op), limit_ms(locks));
    return r;
}

/* Status of a completion, its sentence left behind. */
static int status(struct locks *l, const struct lk_cqe *cqe) {
    struct lk_refusal refusal = {
        .reason = cqe->reason, .row = cqe->row, .value = cqe->value, .limit = cqe->limit};
    int r = lk_client_error(cqe->status);
    if (cqe->reason)
        lk_client_refused(l, cqe->op, &refusal);
    else
        lk_client_fail(l, r, "%s: %s", lk_client_op_name(cqe->op), strerror(-r));
    return r;
}

/* The end of a blocking call. */
static int finish(struct locks *l, uint32_t flight, const struct lk_cqe *cqe, uint64_t *ret_value) {
    int r = cqe->status ? status(l, cqe) : 0;
    if (!r && ret_value)
        *ret_value = cqe->value;
    l->free_flights[l->free_count++] = flight;
    return r;
}

int lk_client_complete(struct locks *locks, uint32_t flight, uint64_t *ret_value) {
    struct lk_cqe cqe;
    int r;
    while (!(r = next_in_limit(locks, &cqe)) && cqe.user_data != flight)
        keep(locks, &cqe);
    if (r == -ETIMEDOUT) {
        locks->late = flight;
        return lk_client_fail(locks, r,
                              "%s: no answer: nothing was heard of the daemon for %" PRIu64
                              " ms (locks_options.limit_ms), it is stopped or hangs; locks_late() "
                              "waits on",
                              lk_client_op_name(locks->flights[flight].op), limit_ms(locks));
    }
    if (r)
        return r;
    r = finish(locks, flight, &cqe, ret_value);
    advance(locks);
    return r;
}

/* ---- the late one ---- */

/* Puts it aside until locks_late() -> whether it was the late one's. */
static bool put_aside(struct locks *l, const struct lk_cqe *cqe) {
    if (cqe->user_data != l->late)
        return false;
    l->flights[l->late].cqe = *cqe;
    advance(l);
    return true;
}

static bool is_flying(const struct locks *l, uint32_t flight) {
    return flight != LK_CLIENT_NONE && l->flights[flight].flies;
}

int locks_late(struct locks *locks, int timeout_ms, locks_handle *ret) {
    uint64_t deadline = 0,
             span = timeout_ms < 0 ? FOREVER : (uint64_t)timeout_ms * LK_CLIENT_NS_A_MS;
    uint32_t flight = locks->late;
    struct lk_cqe cqe;
    if (flight == LK_CLIENT_NONE)
        return lk_client_fail(locks, -EINVAL, "no call is late: there is nothing to wait for");
    while (is_flying(locks, flight)) {
        int r = next(locks, span, &deadline, &cqe);
        if (r == -ETIMEDOUT)
            return lk_client_fail(locks, r, "%s: late, and still not answered after %d ms more",
                                  lk_client_op_name(locks->flights[flight].op), timeout_ms);
        if (r)
            return r;
        if (!put_aside(locks, &cqe))
            keep(locks, &cqe);
    }
    locks_free(locks, locks->late_list);
    locks->late_list = NULL;
    locks->late = LK_CLIENT_NONE;
    return finish(locks, flight, &locks->flights[flight].cqe, ret);
}

/* ---- completions of submissions ---- */

static void hand_out(struct locks *l, uint32_t flight, const struct lk_cqe *cqe,
                     struct locks_completion *ret) {
    *ret = (struct locks_completion){.user_data = l->flights[flight].user_data,
                                     .status = cqe->status ? status(l, cqe) : 0,
                                     .op = cqe->op,
                                     .rows = cqe->rows,
                                     .fence = cqe->fence,
                                     .total_ns = cqe->total_ns,
                                     .bytes = cqe->bytes};
    l->free_flights[l->free_count++] = flight;
}

static bool hand_out_kept(struct locks *l, struct locks_completion *ret) {
    if (!l->landed_count)
        return false;
    uint32_t flight = l->landed[l->landed_first];
    l->landed_first = (l->landed_first + 1) % l->flight_count;
    l->landed_count--;
    hand_out(l, flight, &l->flights[flight].cqe, ret);
    return true;
}

static int wait_for_one(struct locks *l, uint64_t span_ns, struct locks_completion *ret) {
    struct lk_cqe cqe;
    uint64_t deadline = 0;
    int r;
    while (!(r = next(l, span_ns, &deadline, &cqe)) && put_aside(l, &cqe)) {
    }
    if (r)
        return r;
    hand_out(l, (uint32_t)cqe.user_data, &cqe, ret);
    advance(l);
    return 0;
}

int locks_wait(struct locks *locks, int timeout_ms, struct locks_completion *ret) {
    if (hand_out_kept(locks, ret))
        return 0;
    bool late = is_flying(locks, locks->late);
    if (lk_ring_client_in_flight(&locks->ring) == late)
        return lk_client_fail(locks, -EINVAL,
                              "nothing is in flight%s: there is nothing to wait for",
                              late ? " but a call that is late" : "");
    int r = wait_for_one(locks, timeout_ms < 0 ? FOREVER : (uint64_t)timeout_ms * LK_CLIENT_NS_A_MS,
                         ret);
    return r == -ETIMEDOUT ? lk_client_fail(locks, r, "no completion came within %d ms", timeout_ms)
                           : r;
}

int locks_try(struct locks *locks, struct locks_completion *ret) {
    if (hand_out_kept(locks, ret))
        return 0;
    if (locks->armed || ++locks->tries % TRIES_PER_LOOK == 0)
        wake_up(locks);
    int r = lk_ring_client_peek(&locks->ring) ? wait_for_one(locks, 0, ret) : -ETIMEDOUT;
    if (r != -ETIMEDOUT) /* else there is none, or only that of a late call */
        return r;
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
