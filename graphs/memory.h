/* SPDX-License-Identifier: MIT */
/*
 * memory.h - memory taken once: populated, aligned for huge pages, given back whole.
 *
 * Idea: the address is aligned to 2 MiB and the kernel is asked for huge pages before the first
 * touch; every page is touched before the call returns, so nothing faults later and a shortage
 * shows here, as an error, not as a signal in the middle of a step. What is asked for is first
 * compared with what the system says it has, because a populated mapping that exceeds it would be
 * ended, not refused. Any thread. Does not lock memory nor bind it to a node.
 */
#ifndef LK_GRAPHS_MEMORY_H
#define LK_GRAPHS_MEMORY_H

#include <stddef.h>
#include <stdint.h>

struct lk_memory {
    uint8_t *at;
    uint64_t bytes;
    int fd; /* memfd, or -1: anonymous */
};

/* name: of a memfd, sealed against any change of size, which others may map; NULL: anonymous.
 * -> 0 or -errno with a sentence in why; -ENOMEM names both sizes. */
int lk_memory_open(const char *name, uint64_t bytes, struct lk_memory *ret, char *why,
                   size_t why_bytes);
void lk_memory_close(struct lk_memory *memory); /* of a zeroed struct: nothing */

#endif
