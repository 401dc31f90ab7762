/* SPDX-License-Identifier: MIT */
/*
 * ring.h - both sides of a channel's two rings: submissions to the daemon, completions back.
 *
 * Idea: one producer and one consumer a ring, so each word has one writer and no instruction is
 * locked. Each side keeps its own indices, and its last look at the other side's, in private
 * memory: a submission moves three lines (entry, descriptor, tail), a completion just its own.
 * Heads are read only when the cached one says "full". A client with nothing in flight writes its
 * descriptor to the same bytes every time, and the daemon fetches entry and descriptor at once: it
 * guesses that the latter lies where the last one did.
 *
 * Invariants
 *   - Indices are 64-bit, start anywhere (lk_ring_start) and run freely; entry i is in slot i &
 *     (entries - 1). All four start equal, so sq_tail - cq_head is the number of submissions not
 *     answered for yet.
 *   - The daemon believes nothing: a client index that moves backwards or beyond the ring is
 *     -EPROTO, entry and descriptor are copied to private memory before anything looks at them.
 *   - A submission is taken only with room for its completion, so lk_ring_daemon_publish() cannot
 *     fail.
 *   - The bell is one end of a socket pair: a byte either way wakes the other side. Not an eventfd:
 *     both ends of that share one open file, and a hostile client could make it blocking and full
 *     under the daemon's write.
 *
 * Threads: each struct belongs to one thread. Memory orders and labels (S1, W2, ...) are in
 * atomics.h.
 * What it does not do: no validation of what entries say (validate.h), no waiting: who sleeps, and
 * on what else, is the caller's business.
 */
#ifndef LK_RING_H
#define LK_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "locks_abi.h"

/* All four indices of a channel, before either side attaches. Tests start them just below a
 * wrap. */
void lk_ring_start(struct lk_submission_head *submission, struct lk_completion_head *completion,
                   uint64_t index);

/* ---- the bell ---- */

/* A connected pair: ret[0] stays, ret[1] goes to the client. 0 or -errno. */
int lk_bell_create(int ret[2]);
/* Never blocks: a bell that is full is being heard already, one without a listener is nobody's
 * loss. */
void lk_bell_ring(int bell);
/* Takes what was rung, a bounded amount at a time; descriptors that came with it are dropped
 * unseen. -> false: the other side has hung up, or sent descriptors. Never waits for a ring. */
bool lk_bell_drain(int bell);

/* ---- the client's side ---- */

struct lk_ring_client {
    struct lk_submission_head *submission;
    const struct lk_completion_head *completion;
    struct lk_sqe *sq;
    const struct lk_cqe *cq;
    uint8_t *desc;
    uint32_t sq_entries, cq_entries, desc_bytes;
    uint64_t sq_tail;      /* own: what is published */
    uint64_t cq_head;      /* own */
    uint64_t sq_head_seen; /* the daemon's, at the last look */
    /* Descriptor bytes are a ring too: free-running offsets, reclaimed as sq_head passes their
     * entries. */
    uint64_t desc_tail, desc_next, desc_head;
    uint64_t desc_end[LK_SQ_ENTRIES_MAX]; /* by slot: desc_tail after that entry */
};

struct lk_segment_sizes;
/* Attaches to mapped segments. Where their parts lie follows from the sizes that were agreed on
 * (segment.h), never from the segments: the daemon may write there at any time. */
void lk_ring_client_init(struct lk_ring_client *ring, struct lk_submission_head *submission,
                         const struct lk_completion_head *completion,
                         const struct lk_segment_sizes *sizes);

/* Room for one submission with desc_bytes (at most LK_DESCRIPTOR_BYTES_MAX) of descriptor. The
 * entry is zeroed but for desc and desc_bytes; *ret_desc is NULL if desc_bytes is 0. Write both,
 * then publish; or reserve again, which gives the same place. -EAGAIN: the ring is full, -EMSGSIZE:
 * more than the area holds. */
int lk_ring_client_reserve(struct lk_ring_client *ring, uint32_t desc_bytes,
                           struct lk_sqe **ret_sqe, void **ret_desc);
/* S1: the daemon may see it from here on. */
void lk_ring_client_publish(struct lk_ring_client *ring);
/* W1: true if the daemon sleeps, then lk_bell_ring(). Call after a publish, or after an advance
 * that says so. */
bool lk_ring_client_must_wake(const struct lk_ring_client *ring);

/* The next completion, in place; NULL: none. It stays until advanced over. */
const struct lk_cqe *lk_ring_client_peek(const struct lk_ring_client *ring);
/* D1: done with what peek gave. true: the daemon may have been waiting for this room; then ask
 * lk_ring_client_must_wake(). */
bool lk_ring_client_advance(struct lk_ring_client *ring);
/* V2: says that the client is about to sleep. true: a completion is there already, and the client
 * is not marked as sleeping. */
bool lk_ring_client_arm(struct lk_ring_client *ring);
/* Awake again. */
void lk_ring_client_disarm(struct lk_ring_client *ring);
/* Submissions published and not yet answered. */
uint64_t lk_ring_client_in_flight(const struct lk_ring_client *ring);

/* ---- the daemon's side ---- */

struct lk_ring_daemon {
    const struct lk_submission_head *submission;
    struct lk_completion_head *completion;
    const struct lk_sqe *sq;
    struct lk_cqe *cq;
    const uint8_t *desc;
    uint32_t sq_entries, cq_entries, desc_bytes;
    uint64_t sq_head; /* own; also the number taken: each owes a completion */
    uint64_t cq_tail; /* own */
    uint64_t sq_tail_seen;
    uint64_t cq_head_seen; /* the client's, at the last look */
    uint64_t desc_last;    /* where the last descriptor was */
};

/* Sizes are the daemon's own (lk_channel_open), never read back from the submission segment. The
 * descriptor area is what follows the entries in submission_bytes. */
void lk_ring_daemon_init(struct lk_ring_daemon *ring, const struct lk_submission_head *submission,
                         struct lk_completion_head *completion, uint32_t sq_entries,
                         uint32_t cq_entries, uint64_t submission_bytes);

/* S2, D2: *ret: submissions that may be taken now: those in the ring, as far as there is room for
 * their completions. -EPROTO: the client's tail or cq_head lies; the channel is to be closed. */
int lk_ring_daemon_peek(struct lk_ring_daemon *ring, uint32_t *ret);
/* Copies entry number `ahead` (< what peek said) beyond the head. */
void lk_ring_daemon_copy_sqe(const struct lk_ring_daemon *ring, uint32_t ahead, struct lk_sqe *ret);
/* Copies the descriptor of a private, validated (lk_sqe_invalid) entry: sqe->desc_bytes bytes. */
void lk_ring_daemon_copy_desc(struct lk_ring_daemon *ring, const struct lk_sqe *sqe, void *ret);
/* H1: `count` entries have been copied out; slots and descriptor bytes are the client's again. Each
 * entry released owes one lk_ring_daemon_publish(). */
void lk_ring_daemon_release(struct lk_ring_daemon *ring, uint32_t count);
/* C1. At most as many as were released. cqe->fence is set here. */
void lk_ring_daemon_publish(struct lk_ring_daemon *ring, const struct lk_cqe *cqe);
/* V1: true if the client sleeps, then lk_bell_ring(). Once after a series of publishes. */
bool lk_ring_daemon_must_wake(const struct lk_ring_daemon *ring);
/* W2: says that the daemon is about to sleep. true: something to do is there (a lie included), do
 * not sleep. The mark stays until disarm. */
bool lk_ring_daemon_arm(struct lk_ring_daemon *ring);
void lk_ring_daemon_disarm(struct lk_ring_daemon *ring);

#endif
