/* SPDX-License-Identifier: MIT */
/*
 * atomics.h - every memory order of the shared-memory protocol, and nothing else.
 *
 * Idea: shared fields are plain uint64_t and uint32_t in the segments, so that the ABI header needs
 * no atomic types. They are only ever touched through the helpers here. Each use site in ring.c
 * carries a label, and each label names its partner on the other side:
 *
 *   S1 client  release sq_tail   after writing entry and descriptor
 *   S2 daemon  acquire sq_tail   before reading them                                       S1 -> S2
 *   H1 daemon  release sq_head   after copying entry and descriptor out
 *   H2 client  acquire sq_head   before writing over them                                  H1 -> H2
 *   C1 daemon  release fence     of the completion, after the rest of it and the results it is for
 *   C2 client  acquire fence     before reading them                                       C1 -> C2
 *   D1 client  release cq_head   after reading the completion
 *   D2 daemon  acquire cq_head   before writing over it                                    D1 -> D2
 *
 * Sleeping is a store-then-load on both sides (Dekker): each side stores its own word, then loads
 * the other's. Without a full barrier in between, both loads may run ahead of both stores, both
 * sides see the old value, and the sleeper is never woken. So:
 *
 *   W1 client  S1 or D1, full barrier, load the daemon's `sleeping`: set -> ring the bell
 *   W2 daemon  store `sleeping`, full barrier, S2 and D2: work there -> do not sleep      W1 <-> W2
 *   V1 daemon  C1, full barrier, load the client's `sleeping`: set -> ring the bell
 *   V2 client  store `sleeping`, full barrier, C2: completion there -> do not sleep       V1 <-> V2
 *
 * What it does not do: no compare-and-swap, no locks. Each word has exactly one writer.
 */
#ifndef LK_ATOMICS_H
#define LK_ATOMICS_H

#include <stdint.h>

static inline uint64_t lk_load_acquire64(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline void lk_store_release64(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static inline uint64_t lk_load_relaxed64(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

static inline void lk_store_relaxed64(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

static inline uint32_t lk_load_relaxed32(const uint32_t *word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

static inline void lk_store_relaxed32(uint32_t *word, uint32_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

/* Earlier stores are seen by all before later loads are made. The __sync form, since
 * ThreadSanitizer builds warn of __atomic_thread_fence; the machine code is the same. */
static inline void lk_full_barrier(void) {
    __sync_synchronize();
}

/* What was copied out of memory that others write is the copy from here on: else a compiler short
 * of registers may read there again. No instruction. */
static inline void lk_copied(void) {
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

/* Tells the core that this is a spin loop: the other hyper-thread gets the pipeline, and leaving
 * the loop costs no mis-speculation. */
static inline void lk_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#else
    __asm__ __volatile__("" ::: "memory");
#endif
}

#endif
