/* SPDX-License-Identifier: MIT */
/*
 * internal.h - a connection, as liblocks sees it. The public contract is ../locks.h.
 *
 * Idea: a submission takes a *flight*, whose number travels as the ring's user_data; the flight
 * remembers the caller's. So blocking calls and submit/wait mix freely: a blocking call that meets
 * somebody else's completion keeps it in its flight, and locks_wait() hands it out later. There are
 * as many flights as the two rings hold entries; without a free one a submission is -EAGAIN, so
 * nothing ever grows.
 *
 *     free --submit--> flying --completion--> landed (kept, in order) --locks_wait()--> free
 *                             --completion of a blocking call----------------------> free
 *
 * A blocking call that gave up is *late*: its flight flies on, and so does the copy of its list.
 * There is one at most, since other blocking calls are refused until locks_late() has its end; its
 * completion is put aside in its flight and is handed out by locks_late() alone. A question on the
 * socket that gave up is *owed* its answer: the next call takes it off the socket first, so that
 * none is taken for another's. So is one whose answer's descriptors found no place.
 *
 *     flying --limit--> late --completion, put aside--> late, here --locks_late()--> free
 *
 * Invariants: errors go through lk_client_fail(), which leaves the sentence for locks_error(). Once
 * the daemon is gone (`dead`), every call says so without touching the socket again.
 * Threads: one at a time, as the connection.
 */
#ifndef LK_CLIENT_INTERNAL_H
#define LK_CLIENT_INTERNAL_H

/* The public functions are the only symbols seen from outside. */
#pragma GCC visibility push(default)
#include "../locks.h"
#pragma GCC visibility pop

#include <poll.h>
#include <stdbool.h>

#include "../../shm_protocol/ring.h"
#include "../../shm_protocol/segment.h"
#include "../../shm_protocol/validate.h"
#include "arena.h"

#define LK_CLIENT_LIMIT_MS    30000 /* the daemon may be opening its pools */
#define LK_CLIENT_ERROR_BYTES 512
#define LK_CLIENT_FOREVER     UINT64_MAX
#define LK_CLIENT_NONE        UINT32_MAX
#define LK_CLIENT_NS_A_MS     UINT64_C(1000000)

struct lk_flight {
    uint64_t user_data;
    uint16_t op;
    bool flies;        /* submitted, not completed yet */
    struct lk_cqe cqe; /* of a landed one, or of the late one */
};

union lk_question { /* on the socket, once connected */
    struct lk_message head;
    struct lk_msg_pool_get pool_get;
    struct lk_msg_pool_map pool_map;
    struct lk_msg_device_arena device_arena;
};

struct lk_owed {                /* an answer, to the question that gave up */
    union lk_question question; /* head.bytes 0: none */
    uint16_t type;              /* of the answer, and its size */
    size_t bytes;
};

struct lk_client_map {   /* a pool's pages */
    const void *pages;   /* NULL: not mapped yet */
    uint64_t page_count; /* known from the start */
    uint64_t bytes, layer_bytes, page_bytes;
};

struct locks {
    struct lk_ring_client ring;
    struct lk_channel_memory memory;
    struct lk_arena arena;
    struct lk_bounds bounds;      /* what submissions are checked against; shapes are ours */
    struct lk_pool_shape *shapes; /* [pools] */
    struct lk_client_map *maps;   /* [pools] */
    const uint8_t *device;        /* where the device arena is mapped; NULL: nowhere yet */
    int socket;
    uint16_t pools, minor; /* minor: that is spoken */
    bool armed;            /* locks_arm() said: sleep */
    bool dead;
    uint32_t tries; /* of locks_try() */
    uint64_t spin_ns, limit_ns;
    uint32_t late;   /* flight of the blocking call that gave up, or LK_CLIENT_NONE */
    void *late_list; /* arena memory it still names, or NULL */
    struct lk_owed owed;
    struct lk_msg_device_arena_made made; /* came late and was not asked for again */
    int made_fd;                          /* its handle; -1: there is none */
    struct lk_sqe *entry;                 /* that was reserved last */
    struct lk_flight *flights;            /* [flight_count] */
    uint32_t *free_flights;               /* stack */
    uint32_t *landed;                     /* queue */
    uint32_t flight_count, free_count, landed_first, landed_count;
    char error[LK_CLIENT_ERROR_BYTES];
};

/* Leaves the sentence, -> error. */
int lk_client_fail(struct locks *locks, int error, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
int lk_client_refused(struct locks *locks, uint16_t op, const struct lk_refusal *refusal);
int lk_client_gone(struct locks *locks);
/* An error as the daemon says it, -EPROTO if it is none. */
int lk_client_error(int32_t said);
const char *lk_client_op_name(uint16_t op);

/* socket.c: a connected socket, or -errno with a sentence in why. */
int lk_client_dial(const char *path, uint64_t limit_ns, char *why, size_t why_bytes);
/* Sends a question and receives its answer of the given type; ret_fd may be NULL. The question that
 * is owed an answer is not sent again. */
int lk_client_ask(struct locks *locks, const struct lk_message *question, uint16_t type,
                  struct lk_message *ret, size_t bytes, int *ret_fd);
/* One packet of `type` and exactly `bytes`, or the refusal that came instead. */
int lk_client_answer(int socket, uint64_t limit_ns, uint16_t type, struct lk_message *ret,
                     size_t bytes, int *ret_fds, size_t fds, char *why, size_t why_bytes);

/* submit.c: a flight and room in the ring; entry and descriptor are to be filled, then
 * lk_client_publish(). -EAGAIN: full. wait: for a blocking call; instead of -EAGAIN make room by
 * landing completions; -EBUSY: another is late. */
int lk_client_reserve(struct locks *locks, uint16_t op, uint32_t desc_bytes, uint64_t user_data,
                      bool wait, void **ret_desc, uint32_t *ret_flight);
/* Gives the flight back: what was reserved is not wanted after all. */
void lk_client_abandon(struct locks *locks, uint32_t flight);
void lk_client_publish(struct locks *locks);
/* Checks a pointer into the arena and turns it into an offset; NULL is LK_NONE where it may be. */
int lk_client_offset(struct locks *locks, const void *pointer, const char *what, uint32_t row,
                     uint64_t *ret);

/* The same for what may lie in the device arena. */
int lk_client_payload(struct locks *locks, const void *pointer, const char *what, uint32_t row,
                      uint64_t *ret);

/* wait.c: lands completions until that of `flight` comes; frees it. ret_value (may be NULL) gets
 * its value. -> its status. -ETIMEDOUT: the flight is late, if locks->late says so. */
int lk_client_complete(struct locks *locks, uint32_t flight, uint64_t *ret_value);
/* Lands one completion, to make room for `op`. */
int lk_client_land(struct locks *locks, uint16_t op);
/* CLOCK_MONOTONIC in so many nanoseconds, or LK_CLIENT_FOREVER. */
uint64_t lk_client_deadline(uint64_t span_ns);
/* poll() until then; returns early for a signal's handler. -> descriptors with events; 0: none. */
int lk_client_poll(struct pollfd *fds, uint32_t count, uint64_t deadline);

#endif
