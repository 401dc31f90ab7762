/* SPDX-License-Identifier: MIT */
/*
 * limits.c - sizes that follow from the configuration. See limits.h. Pure functions; any thread.
 */
#include "limits.h"

#include <stdio.h>

#define EXTENT_PAGES ((uint64_t)LK_EXTENT_QUADS * LK_QUAD_PAGES)
#define PAGES_MAX    (UINT64_C(1) << 31) /* page ids have 32 bits */

static uint64_t most(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}
static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

uint64_t lk_pool_max_tokens(const struct lk_pool_config *config, uint64_t pages) {
    uint64_t capacity = pages * config->geometry.page_tokens;
    return config->max_tokens ? least(config->max_tokens, capacity) : capacity;
}

uint64_t lk_pool_fitting_pages(enum lk_device device, const struct lk_pool_config *config) {
    const struct lk_geometry *g = &config->geometry;
    uint64_t page_bytes = UINT64_C(4) * g->layers * g->kv_heads * g->page_tokens * g->head_dim;
    /* In quads: low fits, high does not. No size beyond it is computed: it might overflow. */
    uint64_t low = 0,
             high = least(PAGES_MAX, config->memory_bytes / most(page_bytes, 1) + LK_QUAD_PAGES) /
                    LK_QUAD_PAGES;
    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;
        if (lk_engine_pool_bytes(device, &config->geometry, middle * LK_QUAD_PAGES) <=
            config->memory_bytes)
            low = middle;
        else
            high = middle;
    }
    uint64_t pages = low * LK_QUAD_PAGES;
    return pages > EXTENT_PAGES ? pages / EXTENT_PAGES * EXTENT_PAGES : pages;
}

const char *lk_pool_invalid(enum lk_device device, const struct lk_pool_config *config, char *text,
                            size_t bytes) {
    if (lk_pool_fitting_pages(device, config))
        return NULL;
    snprintf(text, bytes, "[pool %s] memory: %llu bytes hold not even %u pages, they take %llu",
             config->name, (unsigned long long)config->memory_bytes, LK_QUAD_PAGES,
             (unsigned long long)lk_engine_pool_bytes(device, &config->geometry, LK_QUAD_PAGES));
    return text;
}

/* Largest over the rows of one query, by sample, scan and budget: workspace has a peak where a
 * scan's second pass covers nearly all pages, so budgets are tried in small steps. */
static uint64_t sparse_row_bytes(enum lk_device device, struct lk_row *row) {
    uint64_t largest = 0, pages = lk_row_pages(row);
    row->exact = 0;
    row->tokens = 1;
    uint64_t most_pages = least(pages, lk_engine_budget_pages(device));
    for (uint64_t budget = 1; budget <= 2 * most_pages; budget += 1 + budget / 16)
        for (uint32_t scan = LK_FULL; scan <= LK_TREE; scan++)
            for (uint32_t sampled = 0; sampled < 2; sampled++) {
                row->budget_pages = (uint32_t)least(budget, most_pages);
                row->budget_tokens = row->budget_pages * row->pool->geometry.page_tokens;
                row->scan = scan;
                row->sampled = sampled * (row->budget_pages / 2);
                largest = most(largest, lk_engine_row_workspace(device, row));
            }
    return largest;
}

static uint64_t exact_row_bytes(enum lk_device device, struct lk_row *row, uint64_t tokens_max) {
    uint64_t largest = 0;
    row->exact = 1;
    for (uint64_t tokens = 1; tokens < 2 * tokens_max; tokens *= 2) {
        row->tokens = (uint32_t)least(tokens, tokens_max);
        largest = most(largest, lk_engine_row_workspace(device, row));
    }
    return largest;
}

static uint64_t largest_row_bytes(const struct lk_config *config,
                                  const struct lk_pool_config *pool) {
    struct lk_pool_view view = {.geometry = pool->geometry};
    view.pages = lk_pool_fitting_pages(config->resolved, pool);
    struct lk_row row = {.pool = &view,
                         .length = lk_pool_max_tokens(pool, view.pages),
                         .recent_pages = 1}; /* and a table of pages, the larger kind */
    if (row.length == 0)
        return 0;
    uint64_t sparse = sparse_row_bytes(config->resolved, &row);
    return most(sparse,
                exact_row_bytes(config->resolved, &row, least(config->max_row_tokens, row.length)));
}

uint64_t lk_workspace_bytes(const struct lk_config *config) {
    uint64_t largest = 1 << 20; /* more than any small row takes: 16 or so may share a batch */
    if (config->workspace_bytes)
        return config->workspace_bytes;
    for (uint32_t i = 0; i < config->pools; i++)
        largest = most(largest, largest_row_bytes(config, &config->pool[i]));
    return 2 * largest;
}
