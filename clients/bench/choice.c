/* SPDX-License-Identifier: MIT */
/*
 * choice.c - see choice.h.
 */
#include "choice.h"

#include <stdio.h>
#include <string.h>

#include "../../kernels/kernels.h"
#include "../common/measure.h"

#define KIB UINT64_C(1024)
#define MIB (KIB * KIB)

#define HEADS(q, kv) ((uint64_t)(q) << 32 | (kv))

static const char *take_context(const char *text, uint64_t *ret) {
    return lk_number_read(text, KIB, UINT64_C(1) << 26, ret);
}

static const char *take_batch(const char *text, uint64_t *ret) {
    return lk_number_read(text, 1, 256, ret);
}

static const char *take_page_tokens(const char *text, uint64_t *ret) {
    const char *rest = lk_number_read(text, 8, 16, ret);
    return rest && (*ret == 8 || *ret == 16) ? rest : NULL;
}

static const char *take_heads(const char *text, uint64_t *ret) {
    uint64_t q, kv;
    const char *rest = lk_number_read(text, 1, LK_KV_HEADS_MAX * LK_GROUP_MAX, &q);
    if (!rest || *rest != '/')
        return NULL;
    rest = lk_number_read(rest + 1, 1, LK_KV_HEADS_MAX, &kv);
    if (!rest || q % kv || q / kv > LK_GROUP_MAX)
        return NULL;
    *ret = HEADS(q, kv);
    return rest;
}

/* One of so many words, as its number. */
static const char *take_word(const char *text, const char *const *words, uint64_t count,
                             uint64_t *ret) {
    for (uint64_t i = 0; i < count; i++)
        if (words[i] && strncmp(text, words[i], strlen(words[i])) == 0) {
            *ret = i;
            return text + strlen(words[i]);
        }
    return NULL;
}

static const char *take_scan(const char *text, uint64_t *ret) {
    static const char *const words[] = {
        [LK_FULL] = "full", [LK_COARSE] = "coarse", [LK_NESTED] = "nested", [LK_TREE] = "tree"};
    return take_word(text, words, sizeof(words) / sizeof(*words), ret);
}

static const char *take_part(const char *text, uint64_t *ret) {
    static const char *const words[CHOICE_PARTS] = {[CHOICE_ANCHOR] = "anchor",
                                                    [CHOICE_STEPS] = "steps",
                                                    [CHOICE_TOKENS] = "tokens",
                                                    [CHOICE_BUILDS] = "builds"};
    return take_word(text, words, CHOICE_PARTS, ret);
}

static const struct option {
    const char *name;
    size_t list; /* in struct choice */
    const char *(*take)(const char *text, uint64_t *ret);
    const char *what;
} options[] = {
    {"--context", offsetof(struct choice, context), take_context, "tokens, 1K to 64M"},
    {"--batch", offsetof(struct choice, batch), take_batch, "rows, 1 to 256"},
    {"--heads", offsetof(struct choice, heads), take_heads,
     "query/KV heads, at most 32 query heads of a KV head"},
    {"--page-tokens", offsetof(struct choice, page_tokens), take_page_tokens, "8 or 16"},
    {"--scan", offsetof(struct choice, scan), take_scan, "full, coarse, nested or tree"},
    {"--parts", offsetof(struct choice, parts), take_part, "anchor, steps, tokens or builds"},
};
#define OPTIONS (sizeof(options) / sizeof(*options))

static const struct option *find(const char *name) {
    for (size_t i = 0; i < OPTIONS; i++)
        if (strcmp(options[i].name, name) == 0)
            return &options[i];
    return NULL;
}

bool choice_take(struct choice *choice, const char *name, const char *text, char *why,
                 size_t why_bytes) {
    const struct option *option = find(name);
    if (!option)
        return false;
    struct choice_list list = {.count = 0};
    const char *at = text;
    while (at && list.count < CHOICE_MAX) {
        at = option->take(at, &list.at[list.count]);
        if (!at)
            break;
        list.count++;
        if (*at == '\0') {
            memcpy((char *)choice + option->list, &list, sizeof(list));
            return true;
        }
        at = *at == ',' ? at + 1 : NULL;
    }
    snprintf(why, why_bytes, "%s: '%s' is not a list of at most %d of: %s", name, text, CHOICE_MAX,
             option->what);
    return false;
}

bool choice_wants(const struct choice *choice, enum choice_part part) {
    for (unsigned i = 0; i < choice->parts.count; i++)
        if (choice->parts.at[i] == (uint64_t)part)
            return true;
    return false;
}

static void otherwise(struct choice_list *list, const struct choice_list *values) {
    if (!list->count)
        *list = *values;
}

void choice_complete(struct choice *choice) {
    static const struct choice_list contexts = {{8 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, MIB}, 5},
                                    batches = {{1, 8, 32, 64}, 4},
                                    heads = {{HEADS(32, 8), HEADS(32, 2), HEADS(32, 4)}, 3},
                                    pages = {{16, 8}, 2},
                                    scans = {{LK_FULL, LK_NESTED, LK_TREE}, 3},
                                    parts = {{CHOICE_ANCHOR, CHOICE_STEPS, CHOICE_TOKENS,
                                              CHOICE_BUILDS},
                                             CHOICE_PARTS},
                                    quick_contexts = {{32 * KIB, 128 * KIB, MIB}, 3},
                                    quick_batches = {{1, 8}, 2}, quick_heads = {{HEADS(32, 8)}, 1},
                                    quick_pages = {{16}, 1};
    otherwise(&choice->context, choice->quick ? &quick_contexts : &contexts);
    otherwise(&choice->batch, choice->quick ? &quick_batches : &batches);
    otherwise(&choice->heads, choice->quick ? &quick_heads : &heads);
    otherwise(&choice->page_tokens, choice->quick ? &quick_pages : &pages);
    otherwise(&choice->scan, &scans);
    otherwise(&choice->parts, &parts);
}
