/* SPDX-License-Identifier: MIT */
/*
 * geometry.c - which model geometries there are kernels for, and how a refusal is worded.
 *
 * Idea: one row a bounded value; a set of choices is a row too. A sentence names the value and what
 * it may be. Invariant: what passes here is all that any kernel may assume.
 * Pure, any thread. Does not decide what a device can hold.
 */
#include <stdio.h>

#include "kernels.h"

#define LAYERS_MAX 1024 /* deepest models have some 130; bounds layer * pages far from overflow */

static const uint32_t head_dims[] = {64, 80, 96, 112, 128, 192, 256};
static const uint32_t page_tokens[] = {8, 16, 32, 64};
static const uint32_t ranks[] = {2, 4, 8, 16};

static const char *refuse_bound(const char *name, uint32_t value, uint32_t max, char *text,
                                size_t bytes) {
    if (value >= 1 && value <= max)
        return NULL;
    snprintf(text, bytes, "%s is %u; it may be 1 to %u", name, value, max);
    return text;
}

static const char *refuse_choice(const char *name, uint32_t value, const uint32_t *set,
                                 size_t count, char *text, size_t bytes) {
    for (size_t i = 0; i < count; i++)
        if (set[i] == value)
            return NULL;
    int at = snprintf(text, bytes, "%s is %u; it may be %u", name, value, set[0]);
    for (size_t i = 1; i < count && at >= 0 && (size_t)at < bytes; i++)
        at +=
            snprintf(text + at, bytes - (size_t)at, "%s%u", i + 1 < count ? ", " : " or ", set[i]);
    return text;
}

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

const char *lk_geometry_invalid(const struct lk_geometry *geometry, char *text, size_t bytes) {
    const struct lk_geometry *g = geometry;
    const char *why;

    if ((why = refuse_bound("layers", g->layers, LAYERS_MAX, text, bytes)) ||
        (why = refuse_bound("kv_heads", g->kv_heads, LK_KV_HEADS_MAX, text, bytes)) ||
        (why = refuse_bound("group", g->group, LK_GROUP_MAX, text, bytes)) ||
        (why = refuse_choice("head_dim", g->head_dim, head_dims, COUNT(head_dims), text, bytes)) ||
        (why = refuse_choice("page_tokens", g->page_tokens, page_tokens, COUNT(page_tokens), text,
                             bytes)) ||
        (why = refuse_choice("rank", g->rank, ranks, COUNT(ranks), text, bytes)))
        return why;
    if (g->rank > g->page_tokens) {
        snprintf(text, bytes, "rank is %u; with page_tokens %u it may be 2, 4 or 8", g->rank,
                 g->page_tokens);
        return text;
    }
    if (g->dtype < LK_BF16 || g->dtype > LK_FP32) {
        snprintf(text, bytes, "dtype is %u; it may be %d (bf16), %d (fp16) or %d (fp32)", g->dtype,
                 LK_BF16, LK_FP16, LK_FP32);
        return text;
    }
    return NULL;
}
