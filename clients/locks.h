/* SPDX-License-Identifier: MIT */
/*
 * locks.h - liblocks, the C client of locksd.
 *
 * A connection (struct locks) has a ring to the daemon and an arena of shared memory. Queries,
 * keys, values and outputs live in the arena: allocate them with locks_alloc(), pass plain pointers
 * to them. A page of the KV cache belongs to the daemon; a sequence is named by a handle. A client
 * on the daemon's GPU may have them in memory of the GPU: see the end.
 *
 *   struct locks *l;
 *   locks_connect(NULL, &l);
 *   locks_pool(l, NULL, &pool);                  what geometry, how much room
 *   locks_sequence_create(l, pool.index, &seq);
 *   locks_append(l, &step, &row, 1);             prompt keys and values, layer by layer
 *   locks_decode(l, &step, &row, 1);             one token: append, then attention -> row.out
 *   locks_sequence_free(l, seq);
 *   locks_close(l);
 *
 * ERRORS. 0 or a negative errno; locks_error() then has a sentence that names what was wrong and
 * the limit it met. Outputs (ret_*) are untouched on failure.
 *
 *   -EINVAL      a wrong argument            -ESTALE      a handle that was freed
 *   -EDQUOT      over a quota                -ENOSPC      no free pages
 *   -ESRCH       no such pool                -EAGAIN      the ring is full
 *   -EALREADY    a row done before this submission: its position and tokens lie below the length
 *                (a replay); nothing was repeated
 *   -ESHUTDOWN   the daemon drains           -ECONNRESET  the daemon is gone
 *   -ETIMEDOUT   nothing came in time        -EPROTO      versions do not match
 *   -EACCES      not allowed to connect      -EBUSY       a blocking call before it is late
 *   -EUSERS      as many clients as may be   -EPERM       a verb for administrators
 *   -ENOMEM      memory is short, see why    -EMFILE      too many files are open
 *
 * THREADS. One connection, one thread at a time; different connections are independent. The library
 * starts no threads, installs no handlers, writes nothing to stderr.
 *
 * WAITING. locks_wait() spins for options.spin_us, then sleeps. locks_fd() can go into an event
 * loop: see there.
 *
 * LIMIT. A daemon may stay connected and never answer (stopped, or broken). A call that waits for
 * it then returns -ETIMEDOUT after options.limit_ms; locks_error() says what was waited for. The
 * time starts anew with each sign of life: a completion, or the heartbeat of a daemon that works,
 * for whomever (ten a second at most). So a call that takes long is not cut off, only one of which
 * nothing is heard. What holds then:
 *   - A blocking call of sequences, steps or leases has been submitted, unless the sentence says
 *     that the ring was full: it may be done at any time, and its pointers are in use as any
 *     submission's. It is *late*: locks_late() waits on for it. Until that has returned its end,
 *     other such calls are -EBUSY. locks_submit(), locks_wait() and the rest go on, and never hand
 *     out its completion.
 *   - A question (locks_pool(), locks_pool_map(), locks_device_arena()) may be asked again: asked
 *     with the same arguments it takes the answer that comes late; before another one that answer
 *     is dropped. A device arena is never lost so. The same holds where the answer's descriptor
 *     finds no place (-EMFILE, ulimit -n): ask again once there is one.
 *   - locks_connect() has left nothing behind.
 *   - locks_close() is right at any time, and never waits.
 */
#ifndef LOCKS_H
#define LOCKS_H

#include <stddef.h>
#include <stdint.h>

#include "locks_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* No pointer may be NULL but where that has a meaning of its own, which is then said. */
struct locks;
typedef uint64_t locks_handle; /* sequence or lease; 0 is none */

struct locks_options {
    uint32_t size; /* sizeof(struct locks_options): newer fields are then 0 for older callers */
    uint32_t sq_entries;  /* submissions the ring holds, a power of two up to 1024; 0: 64 */
    const char *socket;   /* NULL: $LOCKSD_SOCKET, else LK_SOCKET_PATH */
    const char *name;     /* shown by locksctl clients; NULL: the program's name */
    uint64_t arena_bytes; /* 0: 64 MiB, or the daemon's max_arena if that is less */
    uint32_t spin_us;     /* of waits; 0: 20 (use 1 for none to speak of) */
    uint32_t limit_ms;    /* of silence, see LIMIT; 0: 30000; LOCKS_FOREVER: no limit */
};
#define LOCKS_FOREVER UINT32_MAX

int locks_connect(const struct locks_options *options, struct locks **ret);
void locks_close(struct locks *locks); /* NULL is fine; frees sequences, leases and arena */
const char *locks_error(
    const struct locks *locks); /* of the last failed call; NULL: of the last failed connect here */
const char *locks_version(void);

/* ---- pools ---- */
struct locks_pool {
    uint32_t index, layers, kv_heads, group, head_dim, page_tokens, rank;
    uint32_t dtype;                          /* enum lk_dtype, of q, k and v */
    uint32_t budget, scan;                   /* defaults: tokens attended a row, enum lk_scan */
    uint64_t pages, pages_quota, pages_free; /* taken by fours: one token takes four pages */
    uint64_t max_tokens, memory_bytes;       /* of one sequence; of the pool, summaries included */
    char name[LK_NAME_BYTES];
};
int locks_pool_count(const struct locks *locks);
int locks_pool(struct locks *locks, const char *name, struct locks_pool *ret); /* NULL: the first */
int locks_pool_at(struct locks *locks, uint32_t index, struct locks_pool *ret);
/* Pages of a pool, read-only, valid until locks_close(): element (layer, page id, kv_head, 0 K / 1
 * V, token, channel); a layer is ret_layer_bytes from the next, a page id ret_page_bytes. -ENOTSUP:
 * they are memory of a GPU. */
int locks_pool_map(struct locks *locks, uint32_t index, const void **ret_pages,
                   uint64_t *ret_layer_bytes, uint64_t *ret_page_bytes);

/* ---- arena ---- */
void *locks_alloc(struct locks *locks,
                  size_t bytes); /* aligned to 64; NULL: full (locks_error says by how much) */
void locks_free(struct locks *locks,
                void *memory); /* not while a submission that names it is in flight */

/* ---- sequences ---- */
int locks_sequence_create(struct locks *locks, uint32_t pool, locks_handle *ret);
int locks_sequence_fork(struct locks *locks, locks_handle sequence, locks_handle *ret);
int locks_sequence_truncate(struct locks *locks, locks_handle sequence, uint64_t tokens);
int locks_sequence_free(struct locks *locks, locks_handle sequence);

/* ---- steps ---- */
struct locks_step { /* zero but for pool: the defaults */
    uint32_t pool;
    uint32_t budget; /* tokens attended a row; 0: the pool's */
    int32_t sampled; /* pages; LOCKS_SAMPLED_NONE: none; 0: the default (half from 128 pages on) */
    uint32_t scan;   /* enum lk_scan; 0: the pool's; its auto: full, nested above 32K (GPU 512K) */
    float mass_target;     /* stop keeping pages at this share; 0, 1: none, the budget is filled */
    float sm_scale;        /* logits are q.k * sm_scale; 0: 1/sqrt(head_dim) */
    uint32_t dense_below;  /* tokens: shorter rows are attended over all their pages */
    uint32_t sink_pages;   /* 0: 1; LOCKS_NO_SINK: none */
    uint32_t recent_pages; /* 0: 1, the newest */
    uint32_t reserved;
    struct lk_head_result *results; /* arena, [rows][kv_heads], or NULL */
    struct lk_step_result *timing;  /* arena, or NULL */
};
#define LOCKS_SAMPLED_NONE (-1) /* here; on the wire -1 is the default and 0 is none */
#define LOCKS_NO_SINK      UINT32_MAX

struct locks_row {         /* pointers into the arena; see lk_row_desc for shapes */
    locks_handle sequence; /* or lease */
    uint64_t position;     /* the layer's length before this row; WRITE, ATTEND_TABLE: 0 */
    uint32_t layer;
    uint32_t tokens;
    const void *q, *k, *v;
    float *out, *lse;           /* lse may be NULL */
    struct lk_page_entry *list; /* [kv_heads][list_pages] or NULL */
    uint32_t list_pages;
    uint16_t table_set, table_row;
    const int64_t *slots;
};

/* Blocking: submit and wait, see LIMIT. */
int locks_append(struct locks *locks, const struct locks_step *step, const struct locks_row *rows,
                 uint32_t count);
int locks_decode(struct locks *locks, const struct locks_step *step, const struct locks_row *rows,
                 uint32_t count);
int locks_attend(struct locks *locks, const struct locks_step *step, const struct locks_row *rows,
                 uint32_t count);

/* Not blocking: op is LK_OP_APPEND, DECODE, ATTEND, WRITE or ATTEND_TABLE. -EAGAIN: the ring is
 * full, wait for a completion first. Row pointers must stay valid and unchanged until the
 * completion. */
int locks_submit(struct locks *locks, uint16_t op, const struct locks_step *step,
                 const struct locks_row *rows, uint32_t count, uint64_t user_data);
int locks_submit_barrier(struct locks *locks, uint64_t user_data);

struct locks_completion {
    uint64_t user_data;
    int status; /* 0 or -errno; then locks_error() has the sentence */
    uint16_t op;
    uint32_t rows;     /* done */
    uint64_t fence;    /* its number among the connection's, from 1 */
    uint64_t total_ns; /* at the daemon, from the ring to the completion */
    uint64_t bytes;    /* read for it: score + select + attend */
};
/* The next completion. timeout_ms < 0: for ever. -ETIMEDOUT; -ECONNRESET: the daemon is gone. */
int locks_wait(struct locks *locks, int timeout_ms, struct locks_completion *ret);
/* -EAGAIN: none yet; -ECONNRESET, seen in one of a thousand calls at the latest. */
int locks_try(struct locks *locks, struct locks_completion *ret);
/* Waits on for the blocking call that ended with -ETIMEDOUT -> what that call would have returned.
 * timeout_ms as of locks_wait(), no other limit holds. ret (may be NULL) gets the handle of a call
 * that makes one. -ETIMEDOUT: not yet, it is still late, and may be asked for again (the daemon
 * itself answers so only to submissions with fences); -EINVAL: no call is late; -ECONNRESET: the
 * daemon is gone. Other completions that come meanwhile are kept for locks_wait(). */
int locks_late(struct locks *locks, int timeout_ms, locks_handle *ret);
/* For poll(): readable when a completion may be there. Before sleeping call locks_arm(): 1 means a
 * completion is there already, do not sleep. */
int locks_fd(const struct locks *locks);
int locks_arm(struct locks *locks);

/* ---- tables: the client allocates pages inside a lease ---- */
struct locks_table {
    const uint32_t *pages; /* arena, [count], page ids of the lease in token order */
    uint32_t count;
    uint64_t length; /* tokens; of the last page those up to it */
};
/* The lease has so many pages, but takes them by fours: one page costs four of the pool. */
int locks_lease_open(struct locks *locks, uint32_t pool, uint64_t pages, locks_handle *ret);
int locks_lease_close(struct locks *locks, locks_handle lease);
/* Replaces the set; refused, it stays as it was. */
int locks_tables(struct locks *locks, locks_handle lease, uint32_t set,
                 const struct locks_table *tables, uint32_t count);
/* All of its rows, or none: refused for any of them, nothing is written (unless its slots were
 * changed while it was in flight). The same holds of every other submission. */
int locks_write(struct locks *locks, const struct locks_step *step, const struct locks_row *rows,
                uint32_t count);
int locks_attend_table(struct locks *locks, const struct locks_step *step,
                       const struct locks_row *rows, uint32_t count);
int locks_copy_pages(struct locks *locks, locks_handle lease, const uint32_t (*pairs)[2],
                     uint32_t count);
int locks_invalidate(struct locks *locks, locks_handle lease, const uint32_t *pages,
                     uint32_t count);

/* ---- administration: verb "status", "clients", "pools", "drain", "resume", "reload" -> JSON text,
 * to be free()d. Needs no locks_connect(); socket as in locks_options. why (may be NULL) gets the
 * sentence of a failure. */
int locks_admin(const char *socket, const char *verb, char **ret_json, char *why, size_t why_bytes);

/* ---- clients on the GPU (protocol 1.1) ----
 *
 * A client that runs on the daemon's GPU asks once for a device arena: memory of that GPU, which it
 * imports (cuMemImportFromShareableHandle, fd; then it may close fd), maps as a whole, and tells
 * where. From then on q, k, v, out and lse of a row may be device pointers into it, multiples of
 * 64. They lie behind the fences: 64-bit words, zero at first, fence i at byte i * fence_stride.
 *
 * A submission with fences starts once the word of one has reached a value, and raises another when
 * it is over; so kernels of the client hand over to the daemon and back without the host. See
 * locks_device.cuh for the kernels' side, locks_submit_fenced() for the host's. A wait that takes
 * longer than the daemon's limits.fence_ms is ended there: the completion is -ETIMEDOUT.
 *
 * Without CUDA's MPS the GPU runs client and daemon by turns and each hand-over waits for one. */
struct locks_device_arena {
    uint64_t bytes; /* of the allocation: no less than asked for */
    int fd;         /* shareable handle; the caller closes it */
    uint32_t gpu;   /* as the daemon counts: choose the device by uuid */
    uint8_t uuid[16];
    uint32_t fences, fence_stride; /* payload begins at fences * fence_stride */
};
/* -ENOTSUP: the daemon runs on the CPU; -EDQUOT: more than limits.max_device_arena; -ENOMEM: the
 * GPU has not so much; -EBUSY: the connection has one; -EPROTO: an older daemon. */
int locks_device_arena(struct locks *locks, uint64_t bytes, struct locks_device_arena *ret);
/* Where the device arena is mapped here. It must stay so until locks_close(). */
int locks_device_arena_mapped(struct locks *locks, const void *at);

struct locks_fences { /* number of a fence: its index + 1; 0: none, and value 0 */
    uint32_t wait_fence, signal_fence;
    uint64_t wait_value, signal_value;
};
/* As locks_submit(). What the connection submits behind a submission that waits, waits too. Done
 * or refused, a submission raises its signal_fence; only its completion says which. */
int locks_submit_fenced(struct locks *locks, uint16_t op, const struct locks_step *step,
                        const struct locks_row *rows, uint32_t count,
                        const struct locks_fences *fences, uint64_t user_data);

#ifdef __cplusplus
}
#endif
#endif
