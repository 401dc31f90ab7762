/* SPDX-License-Identifier: MIT */
/*
 * channel.h - one client: its ring, its submissions on their way, what it holds and may hold.
 *
 * A submission's life. Entry and descriptor are copied out of the ring once, checked, and only the
 * copy is used:
 *
 *   ring --take--> QUEUED --head of the queue, all it needs is there--> STARTED --its last row in
 *   a batch--> out of the queue, RUNNING --its last row is FENCED--> completion, object free again
 *
 * Submissions of a channel start in order; what needs no batch, or is refused, completes when it
 * would start.
 *
 * Invariants
 *   - queued + running <= LK_QUEUE_SUBMISSIONS; what a client can make intake hold is that, its
 *     quotas and nothing else. If an object is lacking, the rest stays in the ring (`stalled`).
 *   - Every submission released from the ring is answered once, unless the client is gone.
 *   - Pages are charged where they are promised (lk_channel_charge), to connection and user; a quad
 *     belongs to one channel, however many of its sequences share it.
 *
 * Thread: intake. What it does not do: no look at what a submission means (step.c, object.c).
 */
#ifndef LK_CHANNEL_H
#define LK_CHANNEL_H

#include "../shm_protocol/ring.h"
#include "intake.h"
#include "limits.h"
#include "pool.h"

struct lk_channel;
struct lk_sequence;
struct lk_lease;

union lk_descriptor { /* a private copy */
    struct lk_step_desc step;
    struct lk_tables_desc tables;
    struct lk_object_desc object;
};

struct lk_submission {
    struct lk_submission *next;
    struct lk_channel *channel;
    union lk_descriptor *desc; /* inside, or one of the channel's large ones */
    uint64_t user_data;
    uint32_t desc_bytes;
    uint16_t op;
    bool started;  /* checked, promised: it will be done */
    bool waits;    /* rows remain to be placed: it is the head of its channel's queue */
    int32_t large; /* index of the large descriptor; -1: inside */
    uint32_t next_row;
    uint32_t next_token; /* of that row: those before it are placed */
    uint32_t checked;    /* rows found fit, before the first is placed */
    uint32_t placed;     /* rows in batches, not yet fenced */
    uint32_t done;       /* rows fenced */
    uint64_t need;       /* quads that rows checked so far will take */
    uint64_t promised;   /* quads */
    struct lk_pool *pool;
    struct lk_refusal refusal;
    uint64_t serial, batch_serial; /* its own number; the last batch it was timed with */
    uint64_t taken_ns;
    uint32_t wait_fence, signal_fence; /* number, 0: none; the first until it is reached */
    uint64_t wait_value, signal_value;
    uint64_t watched_ns;          /* since when its fence is waited for; 0: it is not */
    bool signalled;               /* its last batch raises its fence */
    struct lk_step_result result; /* summed up over its batches */
    _Alignas(LK_LINE) uint8_t inside[LK_INLINE_BYTES];
};

/* Who a connection belongs to; quotas by uid are counted here. */
struct lk_user {
    uid_t uid;
    uint32_t channels; /* 0: the entry is free */
    uint64_t quads[LK_POOLS_MAX];
};

enum lk_channel_state {
    LK_CHANNEL_FREE,
    LK_CHANNEL_OPEN,
    LK_CHANNEL_CUT,     /* its ring lied: nothing more is taken of it */
    LK_CHANNEL_LEAVING, /* removed: freed as soon as nothing of it is in flight */
};

struct lk_channel_limits {
    uint32_t max_sequences, max_leases;
    uint64_t max_pages, max_pages_per_uid; /* of each pool; 0: none */
};

struct lk_channel {
    struct lk_channel_open open;
    uint8_t *device; /* the device arena, by the device's address; NULL: none */
    uint64_t device_bytes;
    enum lk_channel_state state;
    struct lk_ring_daemon ring;
    struct lk_user *user;
    struct lk_channel_limits limits;
    struct lk_submission *head, **tail; /* queue */
    struct lk_submission *spare;        /* free objects */
    struct lk_submission *objects;      /* [LK_QUEUE_SUBMISSIONS], for the life of the daemon */
    uint8_t *large;                     /* [LK_QUEUE_LARGE][LK_DESCRIPTOR_BYTES_MAX], likewise */
    uint32_t large_used;                /* mask */
    uint32_t queued, running;
    uint32_t turn;                 /* rows placed in its present turn */
    uint32_t held;                 /* rows, writes and lists in batches not yet DONE */
    bool stalled;                  /* entries were left in the ring for want of an object */
    bool published;                /* since the bell was last thought of */
    bool hung_up;                  /* the bell is: not waited for any more */
    struct lk_sequence *sequences; /* its own, as a list */
    struct lk_lease *leases;
    uint32_t sequence_count, lease_count;
    uint64_t quads[LK_POOLS_MAX];
    uint64_t submissions, completions, refusals;
};

/* Gives the slot its memory, once. -> 0, -ENOMEM. */
int lk_channel_alloc(struct lk_channel *channel);
void lk_channel_unalloc(struct lk_channel *channel);
/* Attaches to a client's segments. */
void lk_channel_open(struct lk_channel *channel, const struct lk_channel_open *open,
                     struct lk_user *user, const struct lk_channel_limits *limits);

/* Counts a row that is about to be placed -> false: the others first. */
static inline bool lk_channel_has_turn(struct lk_channel *channel) {
    if (channel->turn == LK_ROWS_PER_TURN)
        return false;
    channel->turn++;
    return true;
}

/* A free object and room for its descriptor, or NULL: back-pressure. */
struct lk_submission *lk_channel_object(struct lk_channel *channel, uint32_t desc_bytes);
void lk_channel_enqueue(struct lk_channel *channel, struct lk_submission *submission);
/* The head leaves the queue and is running until lk_channel_finish(). */
void lk_channel_dequeue(struct lk_channel *channel);
/* Drops whatever is queued, unanswered; a head partly in batches is left to finish there. */
void lk_channel_drop_queue(struct lk_channel *channel);

/* Publishes a completion that an entry released from the ring is owed, and counts it. */
void lk_channel_publish(struct lk_channel *channel, const struct lk_cqe *cqe);
/* Publishes the completion of a running submission and frees the object. refusal.reason set: it
 * failed. value: of what made a handle. */
void lk_channel_finish(struct lk_channel *channel, struct lk_submission *submission, uint64_t value,
                       uint64_t now_ns);
/* Once after a series of completions. */
static inline void lk_channel_wake(struct lk_channel *channel) {
    channel->published = false;
    if (lk_ring_daemon_must_wake(&channel->ring))
        lk_bell_ring(channel->open.bell);
}

/* Charges quads of the pool (negative: gives back) to the connection and its user. */
void lk_channel_charge(struct lk_channel *channel, const struct lk_pool *pool, int64_t quads);
/* Charged in all pools. */
uint64_t lk_channel_quads(const struct lk_channel *channel);
/* Would `quads` more exceed a quota or what the pool has? Fills *ret. */
enum lk_reason lk_channel_over_quota(const struct lk_channel *channel, const struct lk_pool *pool,
                                     uint64_t quads, struct lk_refusal *ret);
/* Charges and promises for a submission; what is left over is given back by _release. */
void lk_channel_promise(struct lk_submission *submission, struct lk_pool *pool, uint64_t quads);
void lk_channel_release(struct lk_submission *submission);

#endif
