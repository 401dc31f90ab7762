/* SPDX-License-Identifier: MIT */
/*
 * locks_abi.h - the wire between locksd and its clients. This text is the protocol.
 *
 * CONNECTING. A client connects a SOCK_SEQPACKET Unix socket and sends one lk_hello. The daemon
 * looks at SO_PEERCRED and at the versions and answers lk_welcome, with four descriptors in this
 * order: submission memfd (read-write), completion memfd (read-only), arena memfd (read-write), the
 * bell (one end of a stream socket pair: a byte either way wakes the other side) - or lk_refused,
 * and hangs up. Every message on the socket starts with an lk_message. The connection stays open;
 * closing it, or dying, ends the channel: its sequences and leases are freed once the device has
 * finished with them. After the welcome a client may ask, one question at a time: LK_MSG_POOL_GET
 * -> lk_msg_pool, LK_MSG_POOL_MAP -> lk_msg_pool_mapped with the pool's page memory as a read-only
 * descriptor, LK_MSG_DEVICE_ARENA -> lk_msg_device_arena_made (below), LK_MSG_ADMIN (a verb) ->
 * lk_msg_admin_reply with a read-only memfd that holds JSON text. LK_MSG_ADMIN needs no
 * hello; verbs that change the daemon are an administrator's. What a client asked for before it
 * closed the connection is not done after that.
 *
 * VERSIONS. Majors must be equal. Each side states the lowest minor it can speak; the smaller of
 * the two minors is spoken if it is no lower than either minimum. Reserved fields are zero, and are
 * refused otherwise.
 *
 * SEGMENTS, split by who writes them:
 *   submission  lk_submission_head | SQ entries | descriptor bytes       written by the client
 *   completion  lk_completion_head | CQ entries                          written by the daemon
 *   arena       payload: q, k, v, out, lse, lists, results, tables       by both, trusted by none
 * Offsets of the parts are in lk_completion_head, sizes in lk_welcome.
 *
 * RING. One producer, one consumer, in each direction. Indices are 64-bit, run freely and are
 * masked on access; entry i lies in slot i & (entries - 1). The client writes entry and descriptor,
 * then releases sq_tail; the daemon acquires it, copies both into private memory, then releases
 * sq_head, after which slot and descriptor bytes may be reused. Completion i is there once its
 * `fence` is i + 1: the daemon writes that last, and a client that polls it moves no other line. A
 * submission is taken only while there is room for its completion (taken - cq_head < cq_entries),
 * so a completion is never dropped and a full ring is back-pressure, not an error.
 *
 * WAKING. The sleeper stores its `sleeping` flag, passes a full barrier, looks at the ring once
 * more, then sleeps on the bell. The other side stores sq_tail or a fence, passes a full barrier,
 * then reads the flag and rings the bell if it is set. A client that frees room (cq_head) while it
 * has more than cq_entries submissions unanswered does so too: the daemon may be waiting for that
 * room. See atomics.h for the labels of the pairs.
 *
 * SUBMISSIONS. lk_sqe names an operation and its descriptor. Submissions of one channel that touch
 * the same pages run in order; others may overlap. Completions may come in another order than
 * submissions. A refused submission has changed nothing, unless its client changed what it names
 * while it was in flight: then `rows` says how many of its rows were done.
 *
 * THE DEVICE ARENA (minor 1). A client on the daemon's GPU may ask, once, for memory of that GPU
 * beside its arena: the answer carries one descriptor, a shareable handle of CUDA's virtual memory
 * management, that the client imports and maps. q, k, v, out and lse of a row may lie there: their
 * offset is then LK_DEVICE_BASE + the offset in the device arena. All else stays in the arena.
 *
 * FENCES (minor 1). The device arena begins with LK_DEVICE_FENCES 64-bit words, zero at first,
 * LK_DEVICE_FENCE_STRIDE bytes apart; payload follows them. A submission may name one to wait for
 * and one to signal. It starts once the first has reached wait_value, and what comes behind it in
 * its channel waits with it; other channels do not. A wait that takes too long is ended by the
 * daemon: the submission is refused. When it is over, done or refused, the second is raised to
 * signal_value (never lowered), in the order of the channel's submissions: outputs are in memory
 * then, results and timing come with the completion, which alone says whether it was done.
 *
 * NAMES OF PAGES. Sequences: the daemon allocates. Every row states its `position`, which must
 * equal the layer's length in that sequence. Tables: the client opens a lease of pages, ids
 * 0..pages-1, and does its own allocation inside it; slot = page * page_tokens + offset.
 *
 * All integers are little endian. No pointers, no padding the compiler chose. Compiles as C17,
 * C++17, CUDA.
 */
#ifndef LOCKS_ABI_H
#define LOCKS_ABI_H

#include <stddef.h>
#include <stdint.h>

#define LK_ABI_MAGIC     UINT32_C(0x534b434c) /* "LCKS" */
#define LK_ABI_MAJOR     1
#define LK_ABI_MINOR     1
#define LK_ABI_MIN_MINOR 0

#define LK_SOCKET_PATH "/run/locksd/locksd.sock"

/* Limits of the wire; where one bounds another it is asserted at the end. */
#define LK_SQ_ENTRIES_MAX       1024  /* submissions in the ring of a channel */
#define LK_SQ_ENTRIES_DEFAULT   64    /* two steps of a 32-layer model */
#define LK_ROWS_MAX             256   /* rows of a submission: the largest rows bucket */
#define LK_ROW_TOKENS_MAX       65536 /* tokens of a row: a prefill chunk */
#define LK_NAME_BYTES           32    /* names of pools and clients, with the NUL */
#define LK_REASON_BYTES         240   /* a refusal's sentence, with the NUL */
#define LK_DESCRIPTOR_BYTES_MAX 32768 /* one descriptor: header and LK_ROWS_MAX rows */
#define LK_ARENA_BYTES_MAX      (UINT64_C(1) << 40) /* offsets stay far from overflow */
#define LK_TABLE_SETS           8                   /* table sets a lease may hold at once */
#define LK_FENCES               8          /* words of a channel; 0: completions so far, others 0 */
#define LK_LINE                 64         /* cache line; writer-owned fields never share one */
#define LK_NONE                 UINT64_MAX /* an arena offset that names nothing */
#define LK_DEVICE_BASE          (UINT64_C(1) << 41) /* offsets from here on: the device arena */
#define LK_DEVICE_FENCES        64                  /* words at its beginning */
#define LK_DEVICE_FENCE_STRIDE  128                 /* bytes: each in a line of the GPU's own */

enum lk_dtype { LK_DTYPE_BF16 = 1, LK_DTYPE_FP16 = 2, LK_DTYPE_FP32 = 3 };
enum lk_scan {
    LK_SCAN_AUTO = 0,
    LK_SCAN_FULL = 1,
    LK_SCAN_COARSE = 2,
    LK_SCAN_NESTED = 3,
    LK_SCAN_TREE = 4
};

/* ---- socket messages ---- */

enum lk_message_type {
    LK_MSG_HELLO = 1,
    LK_MSG_WELCOME,
    LK_MSG_REFUSED,
    LK_MSG_POOL_GET,
    LK_MSG_POOL,
    LK_MSG_POOL_MAP,
    LK_MSG_POOL_MAPPED,
    LK_MSG_ADMIN,
    LK_MSG_ADMIN_REPLY,
    LK_MSG_DEVICE_ARENA,
    LK_MSG_DEVICE_ARENA_MADE,
};

struct lk_message {
    uint32_t magic; /* LK_ABI_MAGIC */
    uint16_t type;  /* enum lk_message_type */
    uint16_t bytes; /* of the whole message */
};

struct lk_hello {
    struct lk_message head;
    uint16_t major, minor, min_minor;
    uint16_t reserved;
    uint32_t sq_entries; /* power of two, 0: the default */
    uint32_t reserved2;
    uint64_t arena_bytes; /* wanted; 0: the daemon's default */
    char name[LK_NAME_BYTES];
};

struct lk_welcome {
    struct lk_message head;
    uint16_t major, minor, min_minor;
    uint16_t pools; /* number of pools, asked for by index 0..pools-1 */
    uint32_t channel;
    uint32_t sq_entries, cq_entries; /* powers of two; cq_entries >= sq_entries */
    uint32_t descriptor_bytes;       /* of the descriptor area */
    uint64_t submission_bytes, completion_bytes, arena_bytes;
    uint64_t boot_epoch;
};

struct lk_refused {
    struct lk_message head;
    int32_t error;         /* -errno */
    uint16_t major, minor; /* the daemon's */
    char reason[LK_REASON_BYTES];
};

struct lk_msg_pool_get {
    struct lk_message head;
    uint32_t index; /* or LK_POOL_BY_NAME: by name */
    uint32_t reserved;
    char name[LK_NAME_BYTES];
};
#define LK_POOL_BY_NAME UINT32_MAX

/* What a client needs to know of a pool. Pages lie
 * [layer][page][kv_head][K,V][page_tokens][head_dim]. */
struct lk_msg_pool {
    struct lk_message head;
    uint32_t index;
    uint32_t layers, kv_heads, group, head_dim, page_tokens, rank, dtype;
    uint32_t budget;       /* default, tokens */
    uint32_t scan;         /* default, enum lk_scan */
    uint64_t pages;        /* of the pool, all layers under one id */
    uint64_t pages_quota;  /* this connection may hold so many */
    uint64_t pages_free;   /* at the time of asking */
    uint64_t max_tokens;   /* of one sequence */
    uint64_t memory_bytes; /* pages and summaries */
    char name[LK_NAME_BYTES];
};

struct lk_msg_pool_map {
    struct lk_message head;
    uint32_t index;
    uint32_t reserved;
};

struct lk_msg_pool_mapped { /* with one descriptor, read-only */
    struct lk_message head;
    uint32_t index;
    uint32_t reserved;
    uint64_t bytes;       /* of the mapping */
    uint64_t page_bytes;  /* one page of one layer, all KV heads: the stride of a page id */
    uint64_t layer_bytes; /* one layer of all pages: the stride of a layer */
};

struct lk_msg_admin {
    struct lk_message head;
    char verb[LK_NAME_BYTES];
};

struct lk_msg_admin_reply { /* with one descriptor, read-only, if error is 0 */
    struct lk_message head;
    int32_t error; /* -errno */
    uint32_t reserved;
    uint64_t bytes; /* of JSON text in the memfd */
    char reason[LK_REASON_BYTES];
};

struct lk_msg_device_arena {
    struct lk_message head;
    uint64_t bytes; /* wanted, fences included */
};

struct lk_msg_device_arena_made { /* with one descriptor, a shareable handle */
    struct lk_message head;
    uint64_t bytes; /* of the allocation: no less than was wanted; all of it is to be mapped */
    uint32_t gpu;   /* its number as the daemon counts; the client's may differ */
    uint32_t fences, fence_stride; /* LK_DEVICE_FENCES, LK_DEVICE_FENCE_STRIDE */
    uint32_t reserved;
    uint8_t uuid[16]; /* of the GPU */
};

/* ---- submission ---- */

enum lk_op {
    LK_OP_SEQUENCE_CREATE = 1, /* lk_object_desc: pool. Completion value: the handle */
    LK_OP_SEQUENCE_FORK,       /* handle. Completion value: the child's handle */
    LK_OP_SEQUENCE_TRUNCATE,   /* handle, length: every layer is cut to at most length tokens */
    LK_OP_SEQUENCE_FREE,       /* handle */
    LK_OP_APPEND,              /* lk_step_desc: rows of k, v */
    LK_OP_DECODE,              /* rows of q, k, v: append tokens >= 1, attend for each, causally */
    LK_OP_ATTEND,      /* rows of q: attend at position = length, nothing appended; tokens = 1 */
    LK_OP_LEASE_OPEN,  /* pool, length = pages. Completion value: the lease's handle */
    LK_OP_LEASE_CLOSE, /* handle */
    LK_OP_TABLES, /* lk_tables_desc: block tables and lengths for a step, named by all layers */
    LK_OP_WRITE,  /* rows of k, v with slots */
    LK_OP_ATTEND_TABLE, /* rows of q that name a table of a set */
    LK_OP_COPY_PAGES,   /* handle, count, list: count pairs of u32 (from, to) */
    LK_OP_INVALIDATE,   /* handle, count, list: count page ids, u32 */
    LK_OP_BARRIER,      /* completes when all earlier submissions of the channel have */
    LK_OP_COUNT,
};

struct lk_sqe {
    uint64_t user_data; /* returned in the completion */
    uint16_t op;        /* enum lk_op */
    uint16_t reserved;
    uint32_t desc_bytes; /* of the descriptor; 0 for BARRIER */
    uint64_t desc;       /* offset in the descriptor area, a multiple of 8 */
    /* Words of the device arena: index + 1, or 0 and value 0: none. */
    uint32_t wait_fence, signal_fence;
    uint64_t wait_value, signal_value;
    uint64_t reserved2[2];
};

/* Head of the descriptor of APPEND, DECODE, ATTEND, WRITE, ATTEND_TABLE; lk_row_desc[rows] follow.
 * One line: a step of no rows moves tail, entry, this and its completion. */
struct lk_step_desc {
    uint32_t pool;
    uint32_t rows;
    uint32_t budget;   /* tokens a row attends; 0: the pool's default */
    int32_t sampled;   /* pages of the budget that are sampled; -1: half of it from
                          LK_AUTO_SAMPLED_PAGES on, else 0 */
    float mass_target; /* stop keeping pages at this share, below 1; 0 and 1: none, so that all the
                          budget holds is kept */
    float sm_scale;    /* logits are q.k * sm_scale; 0: 1/sqrt(head_dim) */
    uint16_t scan;     /* enum lk_scan; AUTO: the pool's */
    uint16_t reserved;
    uint32_t dense_below; /* rows shorter than this are attended over all their pages */
    uint32_t sink_pages;
    uint32_t recent_pages; /* the newest included: at least 1 */
    uint64_t results;      /* arena offset of lk_head_result [rows][kv_heads], or LK_NONE */
    uint64_t timing;       /* arena offset of one lk_step_result, or LK_NONE */
    uint64_t reserved2;
};
#define LK_SINK_PAGES_DEFAULT   1
#define LK_RECENT_PAGES_DEFAULT 1
#define LK_AUTO_SAMPLED_PAGES   128 /* from so many pages of budget on `sampled` -1 is half of it */

/* One row: tokens of one sequence (or table) at one layer. Arena offsets are multiples of LK_LINE;
 * q, k, v, out and lse may name the device arena. */
struct lk_row_desc {
    uint64_t handle;   /* sequence; WRITE, ATTEND_TABLE: lease */
    uint64_t position; /* tokens of the layer before this row: equals its length. Tables: 0 */
    uint32_t layer;
    uint32_t tokens;     /* of q, k and v in this row */
    uint64_t q;          /* [tokens, kv_heads * group, head_dim], pool dtype */
    uint64_t k, v;       /* [tokens, kv_heads, head_dim], pool dtype */
    uint64_t out;        /* [tokens, kv_heads * group, head_dim], float32 */
    uint64_t lse;        /* [tokens, kv_heads * group], float32, natural log; LK_NONE: not wanted */
    uint64_t list;       /* lk_page_entry [kv_heads][list_pages]; LK_NONE: not wanted */
    uint32_t list_pages; /* room; the true count is in lk_head_result */
    uint16_t table_set;  /* ATTEND_TABLE */
    uint16_t table_row;
    uint64_t slots; /* WRITE: int64 [tokens], page * page_tokens + offset; negative: skipped */
    uint64_t reserved;
};

struct lk_tables_desc { /* lk_table_desc[rows] follow */
    uint64_t handle;    /* lease */
    uint32_t set;       /* 0..LK_TABLE_SETS-1, replaced */
    uint32_t rows;
};

struct lk_table_desc {
    uint64_t table;  /* arena offset of u32 page ids [pages], in token order */
    uint64_t length; /* tokens; pages = ceil(length / page_tokens) */
    uint32_t pages;
    uint32_t reserved;
};

struct lk_object_desc {
    uint64_t handle;
    uint64_t length;
    uint64_t list; /* arena offset */
    uint32_t pool;
    uint32_t count;
};

/* ---- results ---- */

enum lk_head_flag {
    LK_HEAD_EXACT = 1 << 0,     /* attended over all its pages */
    LK_HEAD_ESTIMATED = 1 << 1, /* mass comes from summaries alone: too high where they are poor */
};

struct lk_head_result {     /* of one row and KV head */
    uint32_t kept, sampled; /* pages */
    float mass;             /* captured mass, mean over the group */
    uint32_t flags;         /* enum lk_head_flag */
};

struct lk_page_entry {
    uint32_t page; /* index in the sequence or table, ascending */
    float weight;  /* 1: kept; otherwise the sample's weight */
};

/* Of one submission. Bytes are logical: planned reads. Times are the daemon's, of the batch it ran
 * in. */
struct lk_step_result {
    uint64_t score_bytes, select_bytes, attend_bytes;
    uint64_t dense_bytes; /* what dense attention would have read */
    uint64_t queue_ns;    /* taken from the ring until launched */
    uint64_t append_ns, score_ns, select_ns, attend_ns;
    uint32_t batch_rows; /* rows of the batch, other clients' included */
    uint32_t batch_bucket;
    uint64_t reserved[6];
};

/* A completion. Of a refusal: reason, value and limit, of which lk_reason_text() (validate.h) makes
 * the sentence, the same in client and daemon. New reasons may appear in a new minor. */
struct lk_cqe {
    uint64_t user_data;
    uint64_t fence;    /* its number in the channel, from 1; written last */
    uint64_t value;    /* handle made; or, of a refusal, the value that was wrong */
    uint64_t limit;    /* of a refusal: what it had to meet */
    int32_t status;    /* 0 or -errno */
    uint16_t reason;   /* enum lk_reason, 0: none */
    uint16_t op;       /* enum lk_op */
    uint32_t row;      /* of a refusal: the row at fault, UINT32_MAX: the whole */
    uint32_t rows;     /* done */
    uint64_t total_ns; /* from its taking out of the ring to this */
    uint64_t bytes;    /* score + select + attend */
};

/* ---- heads of the segments ---- */

struct lk_submission_head {
    uint64_t sq_tail;
    uint8_t pad0[LK_LINE - 8];
    uint64_t cq_head;
    uint8_t pad1[LK_LINE - 8];
    uint32_t sleeping; /* client sleeps on the bell */
    uint8_t pad2[LK_LINE - 4];
};

struct lk_completion_head {
    uint32_t magic;
    uint16_t major, minor;
    uint32_t sq_entries, cq_entries;
    uint64_t sq_offset;   /* in the submission segment */
    uint64_t desc_offset; /* in the submission segment */
    uint64_t cq_offset;   /* in this segment */
    uint64_t boot_epoch;
    uint8_t pad0[LK_LINE - 48];
    uint64_t sq_head;
    uint8_t pad1[LK_LINE - 8];
    uint64_t cq_tail; /* the daemon's own record; clients poll the completions */
    uint8_t pad2[LK_LINE - 8];
    uint32_t sleeping; /* daemon sleeps on the bell */
    uint8_t pad3[LK_LINE - 4];
    uint64_t heartbeat_ns; /* CLOCK_MONOTONIC of the daemon's last work for any client, to 100 ms */
    uint8_t pad4[LK_LINE - 8];
    uint64_t fence[LK_FENCES];
};

#ifdef __cplusplus
#define LK_STATIC_ASSERT(e) static_assert(e, #e)
#else
#define LK_STATIC_ASSERT(e) _Static_assert(e, #e)
#endif
#define LK_AT(type, field, at) LK_STATIC_ASSERT(offsetof(struct type, field) == (at))
#define LK_SIZE(type, size)    LK_STATIC_ASSERT(sizeof(struct type) == (size))

LK_SIZE(lk_message, 8);
LK_SIZE(lk_hello, 64);
LK_AT(lk_hello, major, 8);
LK_AT(lk_hello, sq_entries, 16);
LK_AT(lk_hello, arena_bytes, 24);
LK_AT(lk_hello, name, 32);
LK_SIZE(lk_welcome, 64);
LK_AT(lk_welcome, pools, 14);
LK_AT(lk_welcome, channel, 16);
LK_AT(lk_welcome, sq_entries, 20);
LK_AT(lk_welcome, descriptor_bytes, 28);
LK_AT(lk_welcome, submission_bytes, 32);
LK_AT(lk_welcome, boot_epoch, 56);
LK_SIZE(lk_refused, 256);
LK_AT(lk_refused, reason, 16);
LK_SIZE(lk_msg_pool_get, 48);
LK_SIZE(lk_msg_pool, 120);
LK_AT(lk_msg_pool, pages, 48);
LK_AT(lk_msg_pool, name, 88);
LK_SIZE(lk_msg_pool_map, 16);
LK_SIZE(lk_msg_pool_mapped, 40);
LK_SIZE(lk_msg_admin, 40);
LK_SIZE(lk_msg_admin_reply, 264);
LK_SIZE(lk_msg_device_arena, 16);
LK_SIZE(lk_msg_device_arena_made, 48);
LK_AT(lk_msg_device_arena_made, gpu, 16);
LK_AT(lk_msg_device_arena_made, fences, 20);
LK_AT(lk_msg_device_arena_made, uuid, 32);
LK_SIZE(lk_sqe, 64);
LK_AT(lk_sqe, op, 8);
LK_AT(lk_sqe, desc_bytes, 12);
LK_AT(lk_sqe, desc, 16);
LK_AT(lk_sqe, wait_fence, 24);
LK_AT(lk_sqe, signal_fence, 28);
LK_AT(lk_sqe, wait_value, 32);
LK_AT(lk_sqe, signal_value, 40);
LK_SIZE(lk_step_desc, 64);
LK_AT(lk_step_desc, scan, 24);
LK_AT(lk_step_desc, results, 40);
LK_SIZE(lk_row_desc, 96);
LK_AT(lk_row_desc, layer, 16);
LK_AT(lk_row_desc, q, 24);
LK_AT(lk_row_desc, list_pages, 72);
LK_AT(lk_row_desc, slots, 80);
LK_SIZE(lk_tables_desc, 16);
LK_SIZE(lk_table_desc, 24);
LK_SIZE(lk_object_desc, 32);
LK_SIZE(lk_head_result, 16);
LK_SIZE(lk_page_entry, 8);
LK_SIZE(lk_step_result, 128);
LK_SIZE(lk_cqe, 64);
LK_AT(lk_cqe, status, 32);
LK_AT(lk_cqe, row, 40);
LK_AT(lk_cqe, total_ns, 48);
LK_SIZE(lk_submission_head, 192);
LK_AT(lk_submission_head, cq_head, 64);
LK_AT(lk_submission_head, sleeping, 128);
LK_SIZE(lk_completion_head, 384);
LK_AT(lk_completion_head, sq_head, 64);
LK_AT(lk_completion_head, cq_tail, 128);
LK_AT(lk_completion_head, sleeping, 192);
LK_AT(lk_completion_head, heartbeat_ns, 256);
LK_AT(lk_completion_head, fence, 320);
LK_STATIC_ASSERT(sizeof(struct lk_step_desc) + LK_ROWS_MAX * sizeof(struct lk_row_desc) <=
                 LK_DESCRIPTOR_BYTES_MAX);
LK_STATIC_ASSERT(LK_SQ_ENTRIES_DEFAULT <= LK_SQ_ENTRIES_MAX);
LK_STATIC_ASSERT(LK_DEVICE_BASE > LK_ARENA_BYTES_MAX);
LK_STATIC_ASSERT(LK_DEVICE_FENCES *LK_DEVICE_FENCE_STRIDE % LK_LINE == 0);

#endif
