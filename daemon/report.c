/* SPDX-License-Identifier: MIT */
/*
 * report.c - see report.h. Main thread.
 */
#include "report.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "limits.h"
#include "log.h"

/* 1234567 -> "1,234,567" */
static const char *count_text(uint64_t value, char text[32]) {
    char digits[24];
    int length = snprintf(digits, sizeof(digits), "%" PRIu64, value), out = 0;
    for (int i = 0; i < length; i++) {
        if (i && (length - i) % 3 == 0)
            text[out++] = ',';
        text[out++] = digits[i];
    }
    text[out] = 0;
    return text;
}

static void report_pool(const struct lk_pool_status *pool, const struct lk_pool_config *config) {
    const struct lk_geometry *g = &pool->geometry;
    char capacity[32], pages[32], token[32], budget[32], memory[16];
    lk_log(LK_LOG_INFO,
           "pool %s: layers %u, kv_heads %u, group %u, head_dim %u, page_tokens %u, rank %u, %s",
           pool->name, g->layers, g->kv_heads, g->group, g->head_dim, g->page_tokens, g->rank,
           lk_config_dtype_name(g->dtype));
    lk_log(LK_LOG_INFO, "    room for %s tokens (%s pages), %s bytes a token, %s in all",
           count_text(pool->capacity_tokens, capacity), count_text(pool->pages, pages),
           count_text(pool->bytes_per_token, token), lk_memory_text(pool->memory_bytes, memory));
    lk_log(LK_LOG_INFO, "    by default a row attends %s tokens, scan %s",
           count_text(config->budget, budget), lk_config_scan_name(config->scan));
}

void lk_report_room(const struct lk_config *config) {
    char capacity[32], count[32];
    for (uint32_t i = 0; i < config->pools; i++) {
        const struct lk_pool_config *pool = &config->pool[i];
        uint64_t pages = lk_pool_fitting_pages(config->resolved, pool);
        lk_log(LK_LOG_INFO, "pool %s: room for %s tokens (%s pages)", pool->name,
               count_text(pages * pool->geometry.page_tokens, capacity), count_text(pages, count));
    }
}

void lk_report_missing(const struct lk_access *access, const struct lk_placement *placement) {
    if (*access->group_name && !access->has_group)
        lk_log(
            LK_LOG_WARNING,
            "daemon.group: there is no group %s on this machine: create it (systemd-sysusers, or "
            "groupadd %s), then reload (locksctl reload)",
            access->group_name, access->group_name);
    if (placement->node >= 0) {
        bool bound = placement->threads_bound && placement->memory_bound;
        lk_log(bound ? LK_LOG_INFO : LK_LOG_WARNING, "%s", placement->words);
    }
}

void lk_report_start(const struct lk_server *server, uint64_t took_ns) {
    const struct lk_config *config = &server->config;
    struct lk_intake_status status;
    char who[128], arena[16];
    lk_intake_status(server->intake, &status);
    lk_log(LK_LOG_INFO, "locksd %s, protocol %d.%d, %s", LK_VERSION, LK_ABI_MAJOR, LK_ABI_MINOR,
           server->engine);
    for (uint32_t i = 0; i < status.pools; i++)
        report_pool(&status.pool[i], &config->pool[i]);
    lk_log(LK_LOG_INFO, "socket %s%s", server->listener.path,
           server->listener.passed ? " (systemd's)" : "");
    lk_log(LK_LOG_INFO, "    %s may connect",
           lk_access_describe(&server->access, who, sizeof(who)));
    lk_log(LK_LOG_INFO, "    max_channels %u, %u a user, each with up to %s of arena",
           config->max_channels, config->max_channels_per_uid,
           lk_memory_text(config->max_arena_bytes, arena));
    lk_report_missing(&server->access, server->placement);
    int on_node = (int)server->memory->on_node;
    if (on_node >= 0)
        lk_log(on_node < 100 ? LK_LOG_WARNING : LK_LOG_INFO,
               "    %d %% of pool memory lies on node %d%s", on_node, server->placement->node,
               on_node < 100 ? ", which had no more: lower memory of a pool" : "");
    if (server->memory->locked)
        lk_log(LK_LOG_INFO, "pool memory is locked");
    if (*server->memory->words)
        lk_log(server->memory->refused ? LK_LOG_WARNING : LK_LOG_INFO, "%s", server->memory->words);
    lk_log(LK_LOG_INFO, "ready after %.1f s", (double)took_ns * 1e-9);
}

void lk_report_end(const struct lk_server *server, const struct lk_intake_status *status) {
    char served[32], submissions[32], rows[32], exact[32], refusals[32], read[16], dense[16];
    uint64_t bytes = status->score_bytes + status->select_bytes + status->attend_bytes;
    uint64_t seconds = (lk_now_ns() - server->started_ns) / 1000000000;
    lk_log(LK_LOG_INFO,
           "stopped after %" PRIu64 " s; clients served: %s, submissions: %s, refused: %s", seconds,
           count_text(server->served, served), count_text(status->submissions, submissions),
           count_text(status->refusals, refusals));
    if (status->rows)
        lk_log(LK_LOG_INFO, "    %s rows (%s exact) read %s, dense attention would have read %s",
               count_text(status->rows, rows), count_text(status->rows_exact, exact),
               lk_memory_text(bytes, read), lk_memory_text(status->dense_bytes, dense));
}
