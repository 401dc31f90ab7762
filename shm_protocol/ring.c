/* SPDX-License-Identifier: MIT */
/*
 * ring.c - both sides of a channel's two rings. See ring.h for the contract, atomics.h for the
 * labels.
 */
#include "ring.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>

#include "atomics.h"
#include "segment.h"

#define BELL_DRAIN_BYTES                                                                           \
    256 /* at a time: a client that rings without end gets one turn like all                       \
         */

void lk_ring_start(struct lk_submission_head *submission, struct lk_completion_head *completion,
                   uint64_t index) {
    lk_store_relaxed64(&submission->sq_tail, index);
    lk_store_relaxed64(&submission->cq_head, index);
    lk_store_relaxed64(&completion->sq_head, index);
    lk_store_relaxed64(&completion->cq_tail, index);
}

/* ---- the bell ---- */

int lk_bell_create(int ret[2]) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair))
        return -errno;
    ret[0] = pair[0];
    ret[1] = pair[1];
    return 0;
}

void lk_bell_ring(int bell) {
    ssize_t sent;
    do
        sent = send(bell, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
}

bool lk_bell_drain(int bell) {
    uint8_t bytes[BELL_DRAIN_BYTES];
    struct iovec part = {.iov_base = bytes, .iov_len = sizeof(bytes)};
    struct msghdr rung = {.msg_iov = &part, .msg_iovlen = 1}; /* no room for descriptors */
    ssize_t got;
    do
        got = recvmsg(bell, &rung, MSG_DONTWAIT);
    while (got < 0 && errno == EINTR);
    if (got > 0)
        return !(rung.msg_flags & MSG_CTRUNC);
    return got < 0 && errno == EAGAIN;
}

/* ---- the client's side ---- */

void lk_ring_client_init(struct lk_ring_client *ring, struct lk_submission_head *submission,
                         const struct lk_completion_head *completion,
                         const struct lk_segment_sizes *sizes) {
    uint8_t *base = (uint8_t *)submission;
    memset(ring, 0, sizeof(*ring));
    ring->submission = submission;
    ring->completion = completion;
    ring->sq = (struct lk_sqe *)(base + sizes->sq_offset);
    ring->cq = (const struct lk_cqe *)((const uint8_t *)completion + sizes->cq_offset);
    ring->desc = base + sizes->desc_offset;
    ring->sq_entries = sizes->sq_entries;
    ring->cq_entries = sizes->cq_entries;
    ring->desc_bytes = sizes->descriptor_bytes;
    ring->sq_tail = lk_load_relaxed64(&submission->sq_tail);
    ring->cq_head = lk_load_relaxed64(&submission->cq_head);
    ring->sq_head_seen = ring->sq_tail;
}

/* The daemon's head moves, and with it the descriptor bytes it has copied out. */
static void reclaim(struct lk_ring_client *ring) {
    uint64_t head = lk_load_acquire64(&ring->completion->sq_head); /* H2 */
    if (head == ring->sq_head_seen)
        return;
    ring->sq_head_seen = head;
    ring->desc_head = ring->desc_end[(head - 1) & (ring->sq_entries - 1)];
}

/* Where a descriptor of `bytes` starts, as a free-running offset: no descriptor wraps around the
 * area's end. */
static uint64_t desc_start(const struct lk_ring_client *ring, uint32_t bytes) {
    uint64_t at = ring->desc_tail & (ring->desc_bytes - 1);
    return at + bytes > ring->desc_bytes ? ring->desc_tail + (ring->desc_bytes - at)
                                         : ring->desc_tail;
}

static bool has_room(const struct lk_ring_client *ring, uint64_t desc_next) {
    return ring->sq_tail - ring->sq_head_seen < ring->sq_entries &&
           desc_next - ring->desc_head <= ring->desc_bytes;
}

/* Nothing in flight: every descriptor has been copied out, and the area is free from its start,
 * which is still in the caches. */
static void rewind_descriptors(struct lk_ring_client *ring) {
    if (ring->sq_tail != ring->cq_head)
        return;
    ring->sq_head_seen = ring->sq_tail;
    ring->desc_tail = ring->desc_head = 0;
}

int lk_ring_client_reserve(struct lk_ring_client *ring, uint32_t desc_bytes,
                           struct lk_sqe **ret_sqe, void **ret_desc) {
    uint32_t lines = (desc_bytes + LK_LINE - 1) / LK_LINE * LK_LINE;
    if (desc_bytes > LK_DESCRIPTOR_BYTES_MAX || lines > ring->desc_bytes)
        return -EMSGSIZE;
    rewind_descriptors(ring);
    uint64_t start = desc_start(ring, lines);
    if (!has_room(ring, start + lines)) {
        reclaim(ring);
        if (!has_room(ring, start + lines))
            return -EAGAIN;
    }
    struct lk_sqe *sqe = &ring->sq[ring->sq_tail & (ring->sq_entries - 1)];
    uint64_t at = desc_bytes ? start & (ring->desc_bytes - 1) : 0; /* not read back: it is shared */
    memset(sqe, 0, sizeof(*sqe));
    sqe->desc_bytes = desc_bytes;
    sqe->desc = at;
    ring->desc_next = start + lines;
    *ret_sqe = sqe;
    *ret_desc = desc_bytes ? ring->desc + at : NULL;
    return 0;
}

void lk_ring_client_publish(struct lk_ring_client *ring) {
    ring->desc_end[ring->sq_tail & (ring->sq_entries - 1)] = ring->desc_next;
    ring->desc_tail = ring->desc_next;
    ring->sq_tail++;
    lk_store_release64(&ring->submission->sq_tail, ring->sq_tail); /* S1 */
}

bool lk_ring_client_must_wake(const struct lk_ring_client *ring) {
    lk_full_barrier(); /* W1: sq_tail or cq_head is seen before `sleeping` is read; partner W2 */
    return lk_load_relaxed32(&ring->completion->sleeping) != 0;
}

const struct lk_cqe *lk_ring_client_peek(const struct lk_ring_client *ring) {
    const struct lk_cqe *cqe = &ring->cq[ring->cq_head & (ring->cq_entries - 1)];
    return lk_load_acquire64(&cqe->fence) == ring->cq_head + 1 ? cqe : NULL; /* C2 */
}

bool lk_ring_client_advance(struct lk_ring_client *ring) {
    bool blocked = ring->sq_tail - ring->cq_head > ring->cq_entries;
    ring->cq_head++;
    lk_store_release64(&ring->submission->cq_head, ring->cq_head); /* D1 */
    return blocked;
}

bool lk_ring_client_arm(struct lk_ring_client *ring) {
    lk_store_relaxed32(&ring->submission->sleeping, 1);
    lk_full_barrier(); /* V2: `sleeping` is seen before the fence is read; partner V1 */
    if (!lk_ring_client_peek(ring))
        return false;
    lk_ring_client_disarm(ring);
    return true;
}

void lk_ring_client_disarm(struct lk_ring_client *ring) {
    lk_store_relaxed32(&ring->submission->sleeping, 0);
}

uint64_t lk_ring_client_in_flight(const struct lk_ring_client *ring) {
    return ring->sq_tail - ring->cq_head;
}

/* ---- the daemon's side ---- */

void lk_ring_daemon_init(struct lk_ring_daemon *ring, const struct lk_submission_head *submission,
                         struct lk_completion_head *completion, uint32_t sq_entries,
                         uint32_t cq_entries, uint64_t submission_bytes) {
    const uint8_t *base = (const uint8_t *)submission;
    memset(ring, 0, sizeof(*ring));
    ring->submission = submission;
    ring->completion = completion;
    ring->sq = (const struct lk_sqe *)(base + completion->sq_offset);
    ring->cq = (struct lk_cqe *)((uint8_t *)completion + completion->cq_offset);
    ring->desc = base + completion->desc_offset;
    ring->sq_entries = sq_entries;
    ring->cq_entries = cq_entries;
    ring->desc_bytes = (uint32_t)(submission_bytes - completion->desc_offset);
    ring->sq_head = lk_load_relaxed64(&completion->sq_head);
    ring->cq_tail = lk_load_relaxed64(&completion->cq_tail);
    ring->sq_tail_seen = ring->sq_head;
    ring->cq_head_seen = ring->cq_tail;
}

/* Completions that may still be promised: every taken submission, answered or not, holds a slot
 * until the client's cq_head has passed it. */
static uint64_t room(const struct lk_ring_daemon *ring) {
    return ring->cq_entries - (ring->sq_head - ring->cq_head_seen);
}

/* A client index may move forward from where it was seen, up to `most` beyond the daemon's own. */
static int look(const uint64_t *word, uint64_t most, uint64_t *seen) {
    uint64_t now = lk_load_acquire64(word);
    if (now - *seen > most - *seen)
        return -EPROTO;
    *seen = now;
    return 0;
}

int lk_ring_daemon_peek(struct lk_ring_daemon *ring, uint32_t *ret) {
    int r = look(&ring->submission->sq_tail, ring->sq_head + ring->sq_entries, /* S2 */
                 &ring->sq_tail_seen);
    if (r)
        return r;
    uint64_t there = ring->sq_tail_seen - ring->sq_head;
    if (there == 0) {
        *ret = 0;
        return 0;
    }
    /* Both lines at once: to find the second by the first would take as long again. */
    __builtin_prefetch(&ring->sq[ring->sq_head & (ring->sq_entries - 1)]);
    __builtin_prefetch(ring->desc + ring->desc_last);
    if (there > room(ring)) {
        r = look(&ring->submission->cq_head, ring->cq_tail, &ring->cq_head_seen); /* D2 */
        if (r)
            return r;
        if (there > room(ring))
            there = room(ring);
    }
    *ret = (uint32_t)there;
    return 0;
}

void lk_ring_daemon_copy_sqe(const struct lk_ring_daemon *ring, uint32_t ahead,
                             struct lk_sqe *ret) {
    memcpy(ret, &ring->sq[(ring->sq_head + ahead) & (ring->sq_entries - 1)], sizeof(*ret));
    lk_copied();
}

void lk_ring_daemon_copy_desc(struct lk_ring_daemon *ring, const struct lk_sqe *sqe, void *ret) {
    memcpy(ret, ring->desc + sqe->desc, sqe->desc_bytes);
    lk_copied();
    ring->desc_last = sqe->desc;
}

void lk_ring_daemon_release(struct lk_ring_daemon *ring, uint32_t count) {
    ring->sq_head += count;
    lk_store_release64(&ring->completion->sq_head, ring->sq_head); /* H1 */
}

void lk_ring_daemon_publish(struct lk_ring_daemon *ring, const struct lk_cqe *cqe) {
    struct lk_cqe *slot = &ring->cq[ring->cq_tail & (ring->cq_entries - 1)];
    slot->user_data = cqe->user_data;
    memcpy(&slot->value, &cqe->value, sizeof(*slot) - offsetof(struct lk_cqe, value));
    ring->cq_tail++;
    lk_store_release64(&slot->fence, ring->cq_tail); /* C1 */
    lk_store_relaxed64(&ring->completion->cq_tail, ring->cq_tail);
}

bool lk_ring_daemon_must_wake(const struct lk_ring_daemon *ring) {
    lk_full_barrier(); /* V1: the fence is seen before `sleeping` is read; partner V2 */
    return lk_load_relaxed32(&ring->submission->sleeping) != 0;
}

bool lk_ring_daemon_arm(struct lk_ring_daemon *ring) {
    uint32_t count;
    lk_store_relaxed32(&ring->completion->sleeping, 1);
    lk_full_barrier(); /* W2: `sleeping` is seen before sq_tail and cq_head are read; partner W1 */
    return lk_ring_daemon_peek(ring, &count) != 0 || count > 0;
}

void lk_ring_daemon_disarm(struct lk_ring_daemon *ring) {
    lk_store_relaxed32(&ring->completion->sleeping, 0);
}
