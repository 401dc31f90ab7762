/* SPDX-License-Identifier: MIT */
/*
 * choice.h - which cases `device` measures: lists of the command line, or all.
 *
 * Values only; any thread. Nothing here knows what a GPU can hold.
 */
#ifndef BENCH_CHOICE_H
#define BENCH_CHOICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CHOICE_MAX 16 /* of a list */

struct choice_list {
    uint64_t at[CHOICE_MAX];
    unsigned count; /* 0: not chosen */
};

enum choice_part { CHOICE_ANCHOR, CHOICE_STEPS, CHOICE_TOKENS, CHOICE_BUILDS, CHOICE_PARTS };

struct choice_heads {
    uint32_t q, kv;
};

struct choice {
    struct choice_list context, batch, page_tokens;
    struct choice_list scan;  /* enum lk_scan_mode */
    struct choice_list heads; /* query heads << 32 | KV heads */
    struct choice_list parts; /* enum choice_part */
    uint32_t gpu;
    bool quick;
    const char *json; /* a file, or NULL */
};

/* option: "--context", "--batch", "--heads", "--page-tokens", "--scan" or "--parts"; text: values
 * between commas, K and M being 1024 and its square. false: neither, or a value out of range; the
 * sentence is in why. */
bool choice_take(struct choice *choice, const char *option, const char *text, char *why,
                 size_t why_bytes);
/* What was not chosen becomes all, or of --quick a few. */
void choice_complete(struct choice *choice);
bool choice_wants(const struct choice *choice, enum choice_part part);
static inline struct choice_heads choice_heads_at(const struct choice *choice, unsigned i) {
    return (struct choice_heads){(uint32_t)(choice->heads.at[i] >> 32),
                                 (uint32_t)choice->heads.at[i]};
}

#endif
