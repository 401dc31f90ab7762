/* SPDX-License-Identifier: MIT */
/*
 * start.c - see start.h.
 */
#include "start.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sysexits.h>
#include <unistd.h>

#include "../graphs/engine.h"
#include "limits.h"
#include "log.h"
#include "memory.h"
#include "notify.h"
#include "signals.h"

#define PATIENCE_MS    2000 /* then it is said that it takes a while */
#define EXTEND_SECONDS 60   /* what systemd is asked for, again and again */

struct starter {
    const struct lk_config *config;
    struct lk_started *started;
    int done; /* eventfd */
    int code;
    char *why;
    size_t why_bytes;
};

static int open_engine(const struct lk_config *config, struct lk_started *started, char *why,
                       size_t bytes) {
    struct lk_engine_options options = {
        .device = config->resolved,
        .gpu = config->gpu,
        .threads = started->placement.threads,
        .cpus = started->placement.pinned ? started->placement.cpus : NULL,
        .spin_us = config->spin_us,
        .workspace_bytes = lk_workspace_bytes(config),
        .cpu_path = config->cpu_path,
    };
    return lk_engine_open(&options, &started->engine, why, bytes);
}

static int take_all(struct starter *starter) {
    const struct lk_config *config = starter->config;
    struct lk_started *started = starter->started;
    int rc = open_engine(config, started, starter->why, starter->why_bytes);
    if (!rc)
        rc = lk_intake_open(config, started->engine, &started->intake, starter->why,
                            starter->why_bytes);
    if (rc)
        return rc == -EINVAL || rc == -ENOTSUP ? EX_CONFIG : EX_OSERR;
    rc = lk_intake_start(started->intake);
    if (rc) {
        snprintf(starter->why, starter->why_bytes, "the intake thread cannot be started: %s",
                 strerror(-rc));
        return EX_OSERR;
    }
    lk_memory_settle(config, &started->placement, started->intake, &started->memory);
    return 0;
}

static void *run(void *context) {
    struct starter *starter = context;
    starter->code = take_all(starter);
    eventfd_write(starter->done, 1);
    return NULL;
}

static void tell_patience(const struct lk_config *config, bool first) {
    char words[64], size[16];
    snprintf(words, sizeof(words), "taking %s of memory",
             lk_memory_text(lk_memory_wanted(config), size));
    lk_notify_starting(words, EXTEND_SECONDS);
    if (first)
        lk_log(LK_LOG_INFO, "%s", words);
}

/* -> 0: the thread is done; LK_START_STOPPED. */
static int wait_for(const struct starter *starter, int signals) {
    struct pollfd wait[] = {{.fd = starter->done, .events = POLLIN},
                            {.fd = signals, .events = POLLIN}};
    bool first = true;
    for (;;) {
        int count = poll(wait, 2, first ? PATIENCE_MS : EXTEND_SECONDS * 1000 / 3);
        if (wait[0].revents)
            return 0;
        if (wait[1].revents)
            return LK_START_STOPPED;
        if (count == 0)
            tell_patience(starter->config, first);
        first = first && count != 0;
    }
}

/* Runs the thread and waits. -> 0 or LK_START_STOPPED; -errno: there is no thread. */
static int run_thread(struct starter *starter) {
    pthread_t thread = 0;
    int signals = lk_signals_open(false, SFD_CLOEXEC);
    int rc = signals < 0 ? -errno : -pthread_create(&thread, NULL, run, starter);
    if (!rc)
        rc = wait_for(starter, signals);
    if (!rc)
        pthread_join(thread, NULL);
    if (signals >= 0)
        close(signals);
    return rc;
}

/* ---- before anything is taken ---- */

/* A workspace may be smaller than the largest row that the limits allow: not wrong, but worth a
 * word. */
static void check_workspace(const struct lk_config *config, const struct lk_origins *origins) {
    struct lk_config automatic = *config;
    char set[16], largest[16], place[LK_PLACE_BYTES];
    automatic.workspace_bytes = 0;
    uint64_t bytes = lk_workspace_bytes(&automatic) / 2;
    if (config->workspace_bytes && config->workspace_bytes < bytes)
        lk_log(LK_LOG_WARNING,
               "%sdaemon.workspace is %s, the largest row takes %s: such rows will be refused",
               lk_config_place(config, origins, &config->workspace_bytes, place),
               lk_memory_text(config->workspace_bytes, set), lk_memory_text(bytes, largest));
}

/* The pool may have less room than its max_tokens, which is no error either. */
static void check_max_tokens(const struct lk_config *config, const struct lk_origins *origins,
                             const struct lk_pool_config *pool) {
    uint64_t tokens = lk_pool_fitting_pages(config->resolved, pool) * pool->geometry.page_tokens;
    char place[LK_PLACE_BYTES];
    if (pool->max_tokens > tokens)
        lk_log(LK_LOG_WARNING,
               "%s[pool %s] max_tokens: %llu tokens are more than the pool has room for, %llu: "
               "sequences end there",
               lk_config_place(config, origins, &pool->max_tokens, place), pool->name,
               (unsigned long long)pool->max_tokens, (unsigned long long)tokens);
}

/* Rows without a budget of their own have the pool's; those beyond it are sparse, and a GPU keeps
 * so many pages of one and no more. */
static void check_budget(const struct lk_config *config, const struct lk_origins *origins,
                         const struct lk_pool_config *pool) {
    uint64_t most = (uint64_t)lk_engine_budget_pages(config->resolved) * pool->geometry.page_tokens;
    char place[LK_PLACE_BYTES];
    if (pool->budget > most &&
        lk_pool_max_tokens(pool, lk_pool_fitting_pages(config->resolved, pool)) > pool->budget)
        lk_log(LK_LOG_WARNING,
               "%s[pool %s] budget: %u tokens are more than a row may keep on this device, %llu: "
               "longer rows that name no budget will be refused",
               lk_config_place(config, origins, &pool->budget, place), pool->name, pool->budget,
               (unsigned long long)most);
}

static int check_pools(const struct lk_config *config, const struct lk_origins *origins, char *why,
                       size_t bytes) {
    char reason[256], place[LK_PLACE_BYTES];
    for (uint32_t i = 0; i < config->pools; i++) {
        const struct lk_pool_config *pool = &config->pool[i];
        if (lk_pool_invalid(config->resolved, pool, reason, sizeof(reason))) {
            snprintf(why, bytes, "%s%s",
                     lk_config_place(config, origins, &pool->memory_bytes, place), reason);
            return EX_CONFIG;
        }
        check_max_tokens(config, origins, pool);
        check_budget(config, origins, pool);
    }
    return 0;
}

/* Decides what `auto` is; a device that was asked for must be there. */
static int check_device(struct lk_config *config, const struct lk_origins *origins, char *why,
                        size_t bytes) {
    struct lk_geometry geometries[LK_POOLS_MAX];
    char reason[256] = "", place[LK_PLACE_BYTES];
    for (uint32_t i = 0; i < config->pools; i++)
        geometries[i] = config->pool[i].geometry;
    config->resolved = lk_engine_choose(config->device, config->gpu, geometries, config->pools,
                                        reason, sizeof(reason));
    if (config->device == LK_DEVICE_AUTO && config->resolved == LK_DEVICE_CPU)
        lk_log(LK_LOG_DEBUG, "device auto is the CPU: %s", reason);
    if (config->device != LK_DEVICE_CUDA)
        return 0;
    int rc = lk_engine_gpu_serves(config->gpu, geometries, config->pools, reason, sizeof(reason));
    if (!rc)
        return 0;
    snprintf(why, bytes, "%s[daemon] device = cuda: %s; device = auto or cpu serves from the CPU",
             lk_config_place(config, origins, &config->device, place), reason);
    return rc == -ENOTSUP ? EX_CONFIG : EX_OSERR;
}

/* Instructions that were asked for must be there, too, if it is the CPU that serves. */
static int check_cpu_path(const struct lk_config *config, const struct lk_origins *origins,
                          char *why, size_t bytes) {
    char place[LK_PLACE_BYTES];
    if (config->resolved == LK_DEVICE_CUDA || lk_engine_cpu_serves(config->cpu_path))
        return 0;
    snprintf(why, bytes,
             "%s[daemon] cpu_path: this machine lacks its instructions; auto takes "
             "the best it has",
             lk_config_place(config, origins, &config->cpu_path, place));
    return EX_CONFIG;
}

int lk_start_check(struct lk_config *config, const struct lk_origins *origins, char *why,
                   size_t why_bytes) {
    int code = check_device(config, origins, why, why_bytes);
    if (!code)
        code = check_cpu_path(config, origins, why, why_bytes);
    if (code != EX_CONFIG) {
        int pools = check_pools(config, origins, why, why_bytes);
        code = pools ? pools : code;
    }
    if (code)
        return code;
    check_workspace(config, origins);
    return lk_memory_invalid(config, why, why_bytes) ? EX_OSERR : 0;
}

/* ---- start ---- */

int lk_start(struct lk_config *config, const struct lk_origins *origins, struct lk_started *ret,
             char *why, size_t why_bytes) {
    static struct starter starter; /* outlives this call where it is stopped */
    *ret = (struct lk_started){0};
    int code = lk_start_check(config, origins, why, why_bytes);
    if (code)
        return code;
    lk_numa_place(config, &ret->placement); /* the thread inherits it */
    starter = (struct starter){config, ret, eventfd(0, EFD_CLOEXEC), 0, why, why_bytes};
    int rc = starter.done < 0 ? -errno : run_thread(&starter);
    if (rc == LK_START_STOPPED)
        return rc;
    if (rc) {
        snprintf(why, why_bytes, "no thread to start with: %s", strerror(-rc));
        return EX_OSERR;
    }
    close(starter.done);
    return starter.code;
}
