/* SPDX-License-Identifier: MIT */
/*
 * admin.c - see admin.h. A verb is a function that fills a JSON object or says why not.
 *
 * Numbers are plain integers in the unit their name ends in; what is not known is absent.
 */
#include "admin.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../shm_protocol/wire.h"
#include "log.h"
#include "mps.h"

struct verb {
    const char *name;
    bool changes; /* for administrators only */
    int (*run)(struct lk_server *server, json_t *reply, char *why, size_t bytes);
};

static void set_u64(json_t *object, const char *name, uint64_t value) {
    json_object_set_new(object, name, json_integer((json_int_t)value));
}

/* ---- pools ---- */

static json_t *pool_json(const struct lk_pool_status *pool, const struct lk_pool_config *config) {
    const struct lk_geometry *g = &pool->geometry;
    json_t *object = json_object();
    json_object_set_new(object, "name", json_string(pool->name));
    set_u64(object, "layers", g->layers);
    set_u64(object, "kv_heads", g->kv_heads);
    set_u64(object, "group", g->group);
    set_u64(object, "head_dim", g->head_dim);
    set_u64(object, "page_tokens", g->page_tokens);
    set_u64(object, "rank", g->rank);
    json_object_set_new(object, "dtype", json_string(lk_config_dtype_name(g->dtype)));
    json_object_set_new(object, "scan", json_string(lk_config_scan_name(config->scan)));
    set_u64(object, "budget_tokens", config->budget);
    set_u64(object, "capacity_tokens", pool->capacity_tokens);
    set_u64(object, "free_tokens", pool->pages_free * g->page_tokens);
    set_u64(object, "max_tokens", pool->max_tokens);
    set_u64(object, "pages", pool->pages);
    set_u64(object, "pages_free", pool->pages_free);
    set_u64(object, "pages_used", pool->pages_used);
    set_u64(object, "pages_leased", pool->pages_leased);
    set_u64(object, "sequences", pool->sequences);
    set_u64(object, "memory_bytes", pool->memory_bytes);
    set_u64(object, "bytes_per_token", pool->bytes_per_token);
    return object;
}

static int run_pools(struct lk_server *server, json_t *reply, char *why, size_t bytes) {
    struct lk_intake_status status;
    json_t *pools = json_array();
    (void)why, (void)bytes;
    lk_intake_status(server->intake, &status);
    for (uint32_t i = 0; i < status.pools; i++)
        json_array_append_new(pools, pool_json(&status.pool[i], &server->config.pool[i]));
    json_object_set_new(reply, "pools", pools);
    return 0;
}

/* ---- status ---- */

static json_t *work_json(const struct lk_intake_status *status) {
    json_t *object = json_object();
    set_u64(object, "submissions", status->submissions);
    set_u64(object, "refusals", status->refusals);
    set_u64(object, "batches", status->batches);
    set_u64(object, "batches_in_flight", status->batches_in_flight);
    set_u64(object, "ticks", status->ticks);
    set_u64(object, "rows", status->rows);
    set_u64(object, "rows_exact", status->rows_exact);
    set_u64(object, "rows_sparse", status->rows_sparse);
    set_u64(object, "score_bytes", status->score_bytes);
    set_u64(object, "select_bytes", status->select_bytes);
    set_u64(object, "attend_bytes", status->attend_bytes);
    set_u64(object, "dense_bytes", status->dense_bytes);
    return object;
}

static json_t *placement_json(const struct lk_server *server) {
    json_t *object = json_object();
    set_u64(object, "threads", server->placement->threads);
    if (server->placement->node >= 0) {
        set_u64(object, "numa_node", (uint64_t)server->placement->node);
        json_object_set_new(object, "threads_bound",
                            json_boolean(server->placement->threads_bound));
        json_object_set_new(object, "memory_bound", json_boolean(server->placement->memory_bound));
    }
    if (server->memory->on_node >= 0)
        set_u64(object, "pool_percent_on_node", (uint64_t)server->memory->on_node);
    json_object_set_new(object, "memory_locked", json_boolean(server->memory->locked));
    json_object_set_new(object, "binding", json_string(server->placement->words));
    if (*server->memory->words)
        json_object_set_new(object, "not_granted", json_string(server->memory->words));
    return object;
}

/* Clients on the GPU; absent where there are none. */
static void set_device_arenas(const struct lk_server *server, json_t *reply) {
    uint64_t count = 0, bytes = 0;
    char words[LK_MPS_WORDS];
    for (uint32_t i = 0; i < LK_PEERS_MAX; i++) {
        count += server->peer[i].device.at != NULL;
        bytes += server->peer[i].device.at ? server->peer[i].device.bytes : 0;
    }
    if (!count)
        return;
    bool mps = lk_intake_mps(server->intake);
    json_t *object = json_object();
    set_u64(object, "arenas", count);
    set_u64(object, "bytes", bytes);
    json_object_set_new(object, "mps", json_boolean(mps));
    json_object_set_new(object, "sharing", json_string(lk_mps_words(mps, words)));
    json_object_set_new(reply, "device_arenas", object);
}

static int run_status(struct lk_server *server, json_t *reply, char *why, size_t bytes) {
    struct lk_intake_status status;
    char protocol[16], who[128];
    lk_intake_status(server->intake, &status);
    snprintf(protocol, sizeof(protocol), "%d.%d", LK_ABI_MAJOR, LK_ABI_MINOR);
    lk_access_describe(&server->access, who, sizeof(who));
    json_object_set_new(reply, "version", json_string(LK_VERSION));
    json_object_set_new(reply, "protocol", json_string(protocol));
    json_object_set_new(reply, "engine", json_string(server->engine));
    set_u64(reply, "pid", (uint64_t)getpid());
    set_u64(reply, "uptime_seconds", (lk_now_ns() - server->started_ns) / 1000000000);
    set_u64(reply, "boot_epoch", status.boot_epoch);
    json_object_set_new(reply, "socket", json_string(server->listener.path));
    json_object_set_new(reply, "socket_by_systemd", json_boolean(server->listener.passed));
    json_object_set_new(reply, "may_connect", json_string(who));
    json_object_set_new(reply, "config", json_string(server->options->config));
    json_object_set_new(reply, "draining", json_boolean(server->draining));
    json_object_set_new(reply, "stopping", json_boolean(server->stopping));
    set_u64(reply, "clients", lk_server_channels(server));
    set_u64(reply, "clients_max", server->config.max_channels);
    set_u64(reply, "clients_served", server->served);
    set_u64(reply, "sequences", status.sequences);
    set_u64(reply, "leases", status.leases);
    json_object_set_new(reply, "work", work_json(&status));
    json_object_set_new(reply, "placement", placement_json(server));
    set_device_arenas(server, reply);
    return run_pools(server, reply, why, bytes);
}

/* ---- clients ---- */

static json_t *client_json(const struct lk_server *server,
                           const struct lk_channel_status *channel) {
    json_t *object = json_object();
    set_u64(object, "id", channel->id);
    json_object_set_new(object, "name", json_string(channel->name));
    set_u64(object, "pid", (uint64_t)channel->pid);
    set_u64(object, "uid", channel->uid);
    for (uint32_t i = 0; i < LK_PEERS_MAX; i++) {
        const struct lk_peer *peer = &server->peer[i];
        if ((peer->state != LK_PEER_OPEN && peer->state != LK_PEER_LEAVING) ||
            peer->channel != channel->id)
            continue;
        json_object_set_new(object, "leaving", json_boolean(peer->state == LK_PEER_LEAVING));
        set_u64(object, "connected_seconds", (lk_now_ns() - peer->since_ns) / 1000000000);
        set_u64(object, "arena_bytes", peer->memory.sizes.arena_bytes);
        if (peer->device.at)
            set_u64(object, "device_arena_bytes", peer->device.bytes);
    }
    set_u64(object, "submissions", channel->submissions);
    set_u64(object, "completions", channel->completions);
    set_u64(object, "refusals", channel->refusals);
    set_u64(object, "queued", channel->queued);
    set_u64(object, "in_flight", channel->in_flight);
    set_u64(object, "sequences", channel->sequences);
    set_u64(object, "leases", channel->leases);
    set_u64(object, "pages", channel->pages);
    return object;
}

static int run_clients(struct lk_server *server, json_t *reply, char *why, size_t bytes) {
    struct lk_channel_status *channels = calloc(LK_CHANNELS_MAX, sizeof(*channels));
    json_t *clients = json_array();
    if (!channels) {
        json_decref(clients);
        snprintf(why, bytes, "no memory for the list");
        return -ENOMEM;
    }
    uint32_t count = lk_intake_channels(server->intake, channels, LK_CHANNELS_MAX);
    for (uint32_t i = 0; i < count && i < LK_CHANNELS_MAX; i++)
        json_array_append_new(clients, client_json(server, &channels[i]));
    free(channels);
    json_object_set_new(reply, "clients", clients);
    return 0;
}

/* ---- verbs that change ---- */

static int run_drain(struct lk_server *server, json_t *reply, char *why, size_t bytes) {
    struct lk_intake_status status;
    (void)why, (void)bytes;
    lk_server_drain(server, true);
    lk_intake_status(server->intake, &status);
    json_object_set_new(reply, "draining", json_true());
    set_u64(reply, "clients", lk_server_channels(server));
    set_u64(reply, "sequences", status.sequences);
    set_u64(reply, "leases", status.leases);
    return 0;
}

static int run_resume(struct lk_server *server, json_t *reply, char *why, size_t bytes) {
    if (server->stopping) {
        snprintf(why, bytes, "the daemon is stopping: it cannot be resumed");
        return -ESHUTDOWN;
    }
    lk_server_drain(server, false);
    json_object_set_new(reply, "draining", json_false());
    return 0;
}

static int run_reload(struct lk_server *server, json_t *reply, char *why, size_t bytes) {
    json_t *taken = json_array(), *restart = json_array();
    json_object_set_new(reply, "taken", taken);
    json_object_set_new(reply, "restart_needed", restart);
    return lk_server_reload(server, taken, restart, why, bytes);
}

static const struct verb verbs[] = {
    {"status", false, run_status}, {"clients", false, run_clients}, {"pools", false, run_pools},
    {"drain", true, run_drain},    {"resume", true, run_resume},    {"reload", true, run_reload},
};

static const struct verb *find_verb(const char *name, char *why, size_t bytes) {
    for (size_t i = 0; i < sizeof(verbs) / sizeof(*verbs); i++)
        if (strcmp(verbs[i].name, name) == 0)
            return &verbs[i];
    snprintf(why, bytes,
             "there is no verb '%s': there are status, clients, pools, drain, resume and reload",
             name);
    return NULL;
}

/* ---- the answer ---- */

static int run_verb(struct lk_server *server, const struct lk_identity *who, const char *name,
                    json_t *reply, char *why, size_t bytes) {
    const struct verb *verb = find_verb(name, why, bytes);
    if (!verb)
        return -EINVAL;
    if (verb->changes && !lk_access_admin(&server->access, who->uid)) {
        snprintf(why, bytes, "%s is for root and uid %u: uid %u may not", name,
                 server->access.owner, who->uid);
        return -EPERM;
    }
    if (verb->changes)
        lk_log(LK_LOG_INFO, "%s, asked by pid %d, uid %u", name, who->pid, who->uid);
    return verb->run(server, reply, why, bytes);
}

/* The text in a sealed memfd -> descriptor or -errno. */
static int to_memfd(const json_t *reply, uint64_t *ret_bytes) {
    char *text = json_dumps(reply, JSON_INDENT(2));
    if (!text)
        return -ENOMEM;
    size_t bytes = strlen(text);
    int fd = memfd_create("locksd-reply", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    int rc = fd < 0 ? -errno : 0;
    if (!rc && write(fd, text, bytes) != (ssize_t)bytes)
        rc = -ENOSPC;
    if (!rc && fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL))
        rc = -errno;
    free(text);
    if (rc && fd >= 0)
        close(fd);
    *ret_bytes = bytes;
    return rc ? rc : fd;
}

void lk_admin_answer(struct lk_server *server, const struct lk_identity *who,
                     const struct lk_msg_admin *ask, struct lk_msg_admin_reply *ret, int *ret_fd) {
    char verb[LK_NAME_BYTES];
    json_t *reply = json_object();
    *ret = (struct lk_msg_admin_reply){0};
    *ret_fd = -1;
    lk_wire_head(&ret->head, LK_MSG_ADMIN_REPLY, sizeof(*ret));
    snprintf(verb, sizeof(verb), "%.*s", LK_NAME_BYTES - 1, ask->verb);
    ret->error = run_verb(server, who, verb, reply, ret->reason, sizeof(ret->reason));
    if (!ret->error) {
        int fd = to_memfd(reply, &ret->bytes);
        *ret_fd = fd < 0 ? -1 : fd;
        ret->error = fd < 0 ? fd : 0;
        if (fd < 0)
            snprintf(ret->reason, sizeof(ret->reason), "no memory for the answer: %s",
                     strerror(-fd));
    }
    json_decref(reply);
}
