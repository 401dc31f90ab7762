/* SPDX-License-Identifier: MIT */
/*
 * segment.h - the three memory segments of a channel and its bell: made by the daemon, mapped by
 * both.
 *
 * Idea: the daemon makes every segment, sized and allocated in full, and seals it against
 * shrinking, growing and further seals before anyone sees it: no client can make an access of the
 * daemon run past the end. The completion segment belongs to the daemon: its inode is of mode 0600
 * and the client's descriptor is a second opening, read-only. (A FUTURE_WRITE seal would stop a
 * restarted daemon too.)
 *
 * Invariants
 *   - Sizes are functions of sq_entries and arena_bytes alone (lk_segment_sizes), so that both
 *     sides compute them; the client compares with what it was told and with what the descriptors
 *     really are.
 *   - A descriptor is in exactly one field or -1. lk_channel_memory_destroy() may be called at any
 *     state.
 *
 * Threads: a struct belongs to whoever made it. Making one takes milliseconds: not on the intake
 * thread.
 * What it does not do: no socket (wire.h), no ring (ring.h).
 */
#ifndef LK_SEGMENT_H
#define LK_SEGMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "locks_abi.h"

#define LK_ARENA_BYTES_DEFAULT (UINT64_C(64) << 20) /* hello with arena_bytes 0 */
/* The client may submit a whole ring before it reads what the last one gave. */
#define LK_CQ_PER_SQ 2
/* 42 rows a submission on average; no less than two of the largest in all. */
#define LK_DESC_BYTES_PER_ENTRY 4096

struct lk_segment_sizes {
    uint32_t sq_entries, cq_entries, descriptor_bytes; /* powers of two */
    uint64_t sq_offset, desc_offset, cq_offset;
    uint64_t submission_bytes, completion_bytes, arena_bytes;
};

/* 0 stands for the defaults; arena_bytes is rounded up to pages. -EINVAL with a sentence in why:
 * sq_entries is no power of two or above LK_SQ_ENTRIES_MAX, arena_bytes above its maximum. */
int lk_segment_sizes(uint32_t sq_entries, uint64_t arena_bytes, struct lk_segment_sizes *ret,
                     char *why, size_t why_bytes);

/* Descriptors that go with lk_welcome, in this order. */
enum lk_welcome_fd {
    LK_FD_SUBMISSION, /* read-write */
    LK_FD_COMPLETION, /* read-only */
    LK_FD_ARENA,      /* read-write */
    LK_FD_BELL,       /* socket: a byte either way wakes the other side */
    LK_WELCOME_FDS,
};

struct lk_channel_memory {
    struct lk_segment_sizes sizes;
    struct lk_submission_head *submission;
    struct lk_completion_head *completion; /* of a client: mapped read-only */
    uint8_t *arena;
    int bell;                       /* this side's end */
    int client_fds[LK_WELCOME_FDS]; /* daemon, until lk_channel_memory_sent(): what the client is to
                                       get */
};

#define LK_PIECE_BYTES (UINT64_C(16) << 20) /* 5 to 20 ms; whole huge pages */

/* What has its turn between two pieces of a long work. take() -> false: the work is not wanted any
 * more. */
struct lk_turn {
    bool (*take)(void *context);
    void *context;
};

/* The daemon's: makes, allocates, maps, seals; fills the completion head; all indices start at
 * first_index (0 but in tests). turn (may be NULL) is called for each LK_PIECE_BYTES of the arena.
 * -> 0 or -errno, sentence in why; -ECANCELED: it had its turn and said no. */
int lk_channel_memory_create(uint32_t sq_entries, uint64_t arena_bytes, uint64_t boot_epoch,
                             uint64_t first_index, const struct lk_turn *turn,
                             struct lk_channel_memory *ret, char *why, size_t why_bytes);
/* Closes client_fds; mappings and bell stay. The client's death is seen as a hang-up only after
 * this. */
void lk_channel_memory_sent(struct lk_channel_memory *memory);

/* The client's: checks seals, sizes, magic and offsets against the welcome, and maps. Takes fds
 * over: closed or kept, on failure too. -> 0, -EPROTO or -errno with a sentence in why. */
int lk_channel_memory_attach(const struct lk_welcome *welcome, const int fds[LK_WELCOME_FDS],
                             struct lk_channel_memory *ret, char *why, size_t why_bytes);

/* Unmaps and closes whatever is open. */
void lk_channel_memory_destroy(struct lk_channel_memory *memory);

#endif
