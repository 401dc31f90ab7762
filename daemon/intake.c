/* SPDX-License-Identifier: MIT */
/*
 * intake.c - intake's memory, and what other threads ask of it. See intake.h, state.h.
 *
 * Everything is allocated in lk_intake_open(). Functions named *_call run on the intake thread.
 */
#include "intake.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "../shm_protocol/atomics.h"
#include "assert.h"
#include "state.h"

#define TABLE_BYTES_A_LOOK (UINT64_C(16) << 20) /* a look takes some 50 us, so many bytes 3 ms */

/* What open_buffers() asks for, about. */
#define BUFFERS_MIB                                                                                \
    ((int)((LK_BATCHES_IN_FLIGHT *                                                                 \
                (2 * LK_BATCH_BUILDS * sizeof(struct lk_build) +                                   \
                 LK_BATCH_COPIES * (sizeof(struct lk_copy) + sizeof(struct lk_batch_copy)) +       \
                 LK_BATCH_SLOTS * sizeof(uint64_t)) +                                              \
            LK_CHANNELS_MAX * (LK_QUEUE_SUBMISSIONS * sizeof(struct lk_submission) +               \
                               LK_QUEUE_LARGE * LK_DESCRIPTOR_BYTES_MAX)) >>                       \
           20) +                                                                                   \
     1)

/* ---- open ---- */

static struct lk_ledger_shape ledger_shape(const struct lk_pool *pool) {
    uint64_t tokens = lk_pool_quad_tokens(pool);
    return (struct lk_ledger_shape){
        .layers = pool->view.geometry.layers,
        .page_tokens = pool->view.geometry.page_tokens,
        .pages = pool->view.pages,
        .max_sequences = pool->config->max_sequences,
        .table_quads = (uint32_t)((pool->max_tokens + tokens - 1) / tokens),
        .max_leases = LK_LEASES_MAX,
    };
}

static int open_memory(struct lk_intake *intake, uint32_t index, char *why, size_t why_bytes) {
    const struct lk_pool_config *config = &intake->config.pool[index];
    struct lk_pool *pool = &intake->pool[index];
    char text[LK_REASON_BYTES];
    if (lk_geometry_invalid(&config->geometry, text, sizeof(text))) {
        snprintf(why, why_bytes, "[pool %s]: %s", config->name, text);
        return -EINVAL;
    }
    if (lk_pool_invalid(intake->device, config, why, why_bytes))
        return -EINVAL;
    uint64_t pages = lk_pool_fitting_pages(intake->device, config);
    pool->config = config;
    pool->index = index;
    pool->max_tokens = lk_pool_max_tokens(config, pages);
    pool->nested_above =
        intake->device == LK_DEVICE_CUDA ? LK_AUTO_NESTED_TOKENS_GPU : LK_AUTO_NESTED_TOKENS;
    pool->memory_bytes = lk_engine_pool_bytes(intake->device, &config->geometry, pages);
    int rc = lk_engine_pool_open(intake->engine, &config->geometry, pages, &pool->view, &pool->fd,
                                 why, why_bytes);
    if (rc)
        return rc;
    intake->shape[index] = (struct lk_pool_shape){
        .layers = config->geometry.layers,
        .kv_heads = config->geometry.kv_heads,
        .group = config->geometry.group,
        .head_dim = config->geometry.head_dim,
        .page_tokens = config->geometry.page_tokens,
        .element_bytes = pool->view.layout.element_bytes,
    };
    return 0;
}

static int open_pools(struct lk_intake *intake, char *why, size_t why_bytes) {
    struct lk_ledger_shape shapes[LK_POOLS_MAX];
    int rc = 0;
    for (uint32_t i = 0; i < intake->pools && !rc; i++)
        rc = open_memory(intake, i, why, why_bytes);
    if (rc)
        return rc;
    for (uint32_t i = 0; i < intake->pools; i++)
        shapes[i] = ledger_shape(&intake->pool[i]);
    rc = lk_ledger_open(shapes, intake->pools, intake->boot_epoch, &intake->ledger, why, why_bytes);
    for (uint32_t i = 0; i < intake->pools && !rc; i++) {
        intake->pool[i].ledger = lk_ledger_view(&intake->ledger, i);
        rc = lk_pool_open(&intake->pool[i]);
        if (rc)
            snprintf(why, why_bytes, "[pool %s]: no memory to keep account of %llu pages: %s",
                     intake->config.pool[i].name, (unsigned long long)intake->pool[i].view.pages,
                     strerror(-rc));
    }
    return rc;
}

/* The pool's part of the sequences, from `first` on; layers from `layer` on. */
static void place_sequences(struct lk_intake *intake, struct lk_pool *pool, uint32_t first,
                            struct lk_sequence_layer *layer) {
    const struct lk_ledger_shape *shape = &pool->ledger.shape;
    for (uint32_t i = shape->max_sequences; i-- > 0;) {
        struct lk_sequence *s = &intake->sequence[first + i];
        s->pool = pool;
        s->index = i;
        s->handle = first + i + 1;
        s->slot = &pool->ledger.sequences[i];
        s->lengths = pool->ledger.lengths + (uint64_t)i * shape->layers;
        s->table = pool->ledger.tables + (uint64_t)i * shape->table_quads;
        s->layer = layer + (uint64_t)i * shape->layers;
        s->next = intake->spare_sequence[pool->index];
        intake->spare_sequence[pool->index] = s;
    }
}

static void place_leases(struct lk_intake *intake, struct lk_pool *pool, uint32_t first,
                         uint64_t *written) {
    for (uint32_t i = LK_LEASES_MAX; i-- > 0;) {
        struct lk_lease *l = &intake->lease[first + i];
        l->pool = pool;
        l->index = i;
        l->handle = intake->sequence_count + first + i + 1;
        l->slot = &pool->ledger.leases[i];
        l->table = pool->ledger.lease_tables + i * pool->quads;
        l->written = written + (uint64_t)i * pool->ledger.shape.layers;
        l->spare = intake->spare_lease[pool->index];
        intake->spare_lease[pool->index] = l;
    }
}

static int open_objects(struct lk_intake *intake, char *why, size_t why_bytes) {
    uint64_t layers = 0, written = 0;
    for (uint32_t i = 0; i < intake->pools; i++) {
        const struct lk_ledger_shape *shape = &intake->pool[i].ledger.shape;
        intake->sequence_count += shape->max_sequences;
        intake->lease_count += LK_LEASES_MAX;
        layers += (uint64_t)shape->max_sequences * shape->layers;
        written += (uint64_t)LK_LEASES_MAX * shape->layers;
    }
    LK_ASSERT(intake->sequence_count > 0 && layers > 0 && written > 0); /* config.c's bounds */
    intake->sequence = calloc(intake->sequence_count, sizeof(*intake->sequence));
    intake->layer = calloc(layers, sizeof(*intake->layer));
    intake->lease = calloc(intake->lease_count, sizeof(*intake->lease));
    intake->written = calloc(written, sizeof(*intake->written));
    if (!intake->sequence || !intake->layer || !intake->lease || !intake->written) {
        snprintf(why, why_bytes,
                 "no memory for sequences (%u, the pools' max_sequences) and leases (%u), %llu KiB",
                 intake->sequence_count, intake->lease_count,
                 (unsigned long long)(intake->sequence_count * sizeof(*intake->sequence) +
                                      layers * sizeof(*intake->layer) +
                                      intake->lease_count * sizeof(*intake->lease) +
                                      written * sizeof(*intake->written)) /
                     1024);
        return -ENOMEM;
    }
    uint32_t sequence = 0;
    layers = written = 0;
    for (uint32_t i = 0; i < intake->pools; i++) {
        const struct lk_ledger_shape *shape = &intake->pool[i].ledger.shape;
        place_sequences(intake, &intake->pool[i], sequence, intake->layer + layers);
        place_leases(intake, &intake->pool[i], i * LK_LEASES_MAX, intake->written + written);
        sequence += shape->max_sequences;
        layers += (uint64_t)shape->max_sequences * shape->layers;
        written += (uint64_t)LK_LEASES_MAX * shape->layers;
    }
    return 0;
}

static int open_buffers(struct lk_intake *intake, char *why, size_t why_bytes) {
    int rc = 0;
    for (uint32_t i = 0; i < LK_BATCHES_IN_FLIGHT && !rc; i++)
        rc = lk_work_alloc(&intake->work[i]);
    for (uint32_t i = 0; i < LK_CHANNELS_MAX && !rc; i++)
        rc = lk_channel_alloc(&intake->channel[i]);
    intake->undo = calloc(LK_ROW_TOKENS_MAX, sizeof(*intake->undo));
    intake->signals = calloc(LK_SIGNALS_MAX, sizeof(*intake->signals));
    if (!rc && (!intake->undo || !intake->signals))
        rc = -ENOMEM;
    if (rc) {
        snprintf(why, why_bytes,
                 "no memory for the buffers of %d batches and the queues of %d clients, which take "
                 "some %d MiB: %s",
                 LK_BATCHES_IN_FLIGHT, LK_CHANNELS_MAX, BUFFERS_MIB, strerror(-rc));
        return rc;
    }
    intake->command = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    intake->epoll = intake->command < 0 ? -1 : epoll_create1(EPOLL_CLOEXEC);
    if (intake->epoll < 0) {
        rc = -errno;
        snprintf(why, why_bytes, "no descriptors for intake to wait with: %s", strerror(-rc));
    }
    return rc;
}

int lk_intake_open(const struct lk_config *config, struct lk_engine *engine, struct lk_intake **ret,
                   char *why, size_t why_bytes) {
    struct lk_intake *intake = calloc(1, sizeof(*intake));
    if (!intake) {
        snprintf(why, why_bytes, "no memory for intake's state, %zu KiB", sizeof(*intake) / 1024);
        return -ENOMEM;
    }
    intake->config = *config;
    intake->engine = engine;
    intake->device = lk_engine_device(engine);
    intake->pools = config->pools;
    intake->workspace_bytes = lk_workspace_bytes(config);
    intake->tables.every = TABLE_BYTES_A_LOOK;
    intake->tables.spare = 4 * TABLE_BYTES_A_LOOK;
    intake->boot_epoch = intake->now_ns = intake->alive_ns = lk_intake_now_ns();
    intake->ledger.fd = intake->command = intake->epoll = -1;
    pthread_mutex_init(&intake->call_lock, NULL);
    pthread_cond_init(&intake->called, NULL);
    int rc = open_pools(intake, why, why_bytes);
    if (!rc)
        rc = open_objects(intake, why, why_bytes);
    if (!rc)
        rc = open_buffers(intake, why, why_bytes);
    if (rc) {
        lk_intake_close(intake);
        return rc;
    }
    *ret = intake;
    return 0;
}

void lk_intake_close(struct lk_intake *intake) {
    for (uint32_t i = 0; i < intake->pools; i++)
        lk_pool_close(&intake->pool[i]);
    for (uint32_t i = 0; intake->lease && i < intake->lease_count; i++)
        lk_lease_unmap(&intake->lease[i]);
    for (uint32_t i = 0; i < LK_BATCHES_IN_FLIGHT; i++)
        lk_work_unalloc(&intake->work[i]);
    for (uint32_t i = 0; i < LK_CHANNELS_MAX; i++)
        lk_channel_unalloc(&intake->channel[i]);
    lk_ledger_close(&intake->ledger);
    free(intake->sequence);
    free(intake->layer);
    free(intake->lease);
    free(intake->written);
    free(intake->undo);
    free(intake->signals);
    if (intake->command >= 0)
        close(intake->command);
    if (intake->epoll >= 0)
        close(intake->epoll);
    pthread_cond_destroy(&intake->called);
    pthread_mutex_destroy(&intake->call_lock);
    free(intake);
}

/* ---- handles ---- */

static struct lk_sequence *sequence_at(struct lk_intake *intake, uint64_t handle) {
    uint32_t low = (uint32_t)handle;
    return low && low <= intake->sequence_count ? &intake->sequence[low - 1] : NULL;
}

static struct lk_lease *lease_at(struct lk_intake *intake, uint64_t handle) {
    uint32_t low = (uint32_t)handle;
    return low > intake->sequence_count && low - intake->sequence_count <= intake->lease_count
               ? &intake->lease[low - intake->sequence_count - 1]
               : NULL;
}

enum lk_reason lk_find_sequence(struct lk_intake *intake, const struct lk_channel *channel,
                                uint64_t handle, uint32_t pool, struct lk_sequence **ret,
                                struct lk_refusal *ret_refusal) {
    struct lk_sequence *s = sequence_at(intake, handle);
    const struct lk_lease *other = lease_at(intake, handle);
    bool foreign = !s || (s->channel && s->channel != channel); /* its handle is not told */
    if (other && other->channel == channel && lk_lease_handle(other) == handle)
        return lk_found(ret_refusal, LK_REASON_HANDLE_KIND, handle, 0);
    if (!s || s->channel != channel || lk_sequence_handle(s) != handle)
        return lk_found(ret_refusal, LK_REASON_HANDLE_STALE, handle,
                        foreign ? 0 : lk_sequence_handle(s));
    if (pool != UINT32_MAX && s->pool->index != pool)
        return lk_found(ret_refusal, LK_REASON_HANDLE_POOL, s->pool->index, pool);
    *ret = s;
    return LK_REASON_NONE;
}

enum lk_reason lk_find_lease(struct lk_intake *intake, const struct lk_channel *channel,
                             uint64_t handle, uint32_t pool, struct lk_lease **ret,
                             struct lk_refusal *ret_refusal) {
    struct lk_lease *l = lease_at(intake, handle);
    const struct lk_sequence *other = sequence_at(intake, handle);
    bool foreign = !l || (l->channel && l->channel != channel);
    if (other && other->channel == channel && lk_sequence_handle(other) == handle)
        return lk_found(ret_refusal, LK_REASON_HANDLE_KIND, handle, 0);
    if (!l || l->channel != channel || lk_lease_handle(l) != handle)
        return lk_found(ret_refusal, LK_REASON_HANDLE_STALE, handle,
                        foreign ? 0 : lk_lease_handle(l));
    if (pool != UINT32_MAX && l->pool->index != pool)
        return lk_found(ret_refusal, LK_REASON_HANDLE_POOL, l->pool->index, pool);
    *ret = l;
    return LK_REASON_NONE;
}

void lk_release_sequence(struct lk_intake *intake, struct lk_sequence *sequence) {
    lk_sequence_free(sequence);
    sequence->next = intake->spare_sequence[sequence->pool->index];
    intake->spare_sequence[sequence->pool->index] = sequence;
}

bool lk_release_lease(struct lk_intake *intake, struct lk_lease *lease) {
    do {
        if (!lk_chore(intake, lease->mapped > LK_LEASE_PIECE_BYTES ? LK_LEASE_PIECE_CHORES : 0))
            return false;
    } while (!lk_lease_unmap_piece(lease));
    if (!lk_chore(intake, lease->slot->quads))
        return false;
    lk_lease_close(lease);
    lease->spare = intake->spare_lease[lease->pool->index];
    intake->spare_lease[lease->pool->index] = lease;
    return true;
}

/* ---- channels ---- */

struct add_call {
    const struct lk_channel_open *open;
    char *why;
    size_t why_bytes;
    int rc;
};

/* The uid's entry, or a free one. */
static struct lk_user *user_of(struct lk_intake *intake, uid_t uid) {
    struct lk_user *free_entry = NULL;
    for (uint32_t i = 0; i < LK_CHANNELS_MAX; i++) {
        struct lk_user *user = &intake->user[i];
        if (user->channels && user->uid == uid)
            return user;
        if (!user->channels && !free_entry)
            free_entry = user;
    }
    if (free_entry)
        *free_entry = (struct lk_user){.uid = uid};
    return free_entry;
}

static struct lk_channel *free_channel(struct lk_intake *intake) {
    for (uint32_t i = 0; i < LK_CHANNELS_MAX; i++)
        if (intake->channel[i].state == LK_CHANNEL_FREE)
            return &intake->channel[i];
    return NULL;
}

static int channel_refused(const struct lk_intake *intake, const struct lk_user *user,
                           struct add_call *call) {
    if (intake->channels >= intake->config.max_channels || intake->channels >= LK_CHANNELS_MAX) {
        snprintf(call->why, call->why_bytes, "connections open: %u, limits.max_channels: %u",
                 intake->channels, intake->config.max_channels);
        return -EDQUOT;
    }
    if (user && user->channels >= intake->config.max_channels_per_uid) {
        snprintf(call->why, call->why_bytes,
                 "connections open of uid %u: %u, limits.max_channels_per_uid: %u", user->uid,
                 user->channels, intake->config.max_channels_per_uid);
        return -EDQUOT;
    }
    return 0;
}

static struct lk_channel_limits limits_of(const struct lk_config *config) {
    return (struct lk_channel_limits){config->max_sequences, config->max_leases, config->max_pages,
                                      config->max_pages_per_uid};
}

static void add_channel_call(struct lk_intake *intake, void *argument) {
    struct add_call *call = argument;
    struct lk_channel_limits limits = limits_of(&intake->config);
    struct lk_user *user = user_of(intake, call->open->uid);
    call->rc = channel_refused(intake, user, call);
    if (call->rc)
        return;
    struct lk_channel *channel = free_channel(intake);
    LK_ASSERT(channel && user); /* there is one for each that may be open */
    lk_channel_open(channel, call->open, user, &limits);
    lk_store_relaxed64(&call->open->completion->heartbeat_ns, intake->now_ns);
    call->rc = lk_watch_bell(intake, channel);
    if (call->rc) {
        snprintf(call->why, call->why_bytes, "the bell cannot be waited for: %s",
                 strerror(-call->rc));
        channel->state = LK_CHANNEL_FREE;
        return;
    }
    user->channels++;
    intake->active[intake->channels++] = (uint32_t)(channel - intake->channel);
}

int lk_intake_channel_add(struct lk_intake *intake, const struct lk_channel_open *open, char *why,
                          size_t why_bytes) {
    struct add_call call = {open, why, why_bytes, 0};
    int rc = lk_engine_map(intake->engine, open->arena, open->arena_bytes, why, why_bytes);
    if (rc)
        return rc;
    lk_intake_call(intake, add_channel_call, &call);
    if (call.rc)
        lk_engine_unmap(intake->engine, open->arena);
    return call.rc;
}

void lk_intake_channel_forget(struct lk_intake *intake, uint8_t *arena) {
    lk_engine_unmap(intake->engine, arena);
}

/* ---- clients on the GPU ---- */

struct device_call {
    uint32_t id;
    const struct lk_engine_arena *arena;
    int rc;
};

static void device_arena_call(struct lk_intake *intake, void *argument) {
    struct device_call *call = argument;
    call->rc = -ESRCH;
    for (uint32_t i = 0; i < intake->channels; i++) {
        struct lk_channel *channel = &intake->channel[intake->active[i]];
        if (channel->open.id != call->id || channel->state == LK_CHANNEL_LEAVING)
            continue;
        channel->device = call->arena->at;
        channel->device_bytes = call->arena->bytes;
        call->rc = 0;
    }
}

int lk_intake_device_arena_open(struct lk_intake *intake, uint32_t id, uint64_t bytes,
                                struct lk_engine_arena *ret, char *why, size_t why_bytes) {
    struct lk_engine_arena arena;
    struct device_call call = {id, &arena, 0};
    int rc = lk_engine_arena_open(intake->engine, bytes, &arena, why, why_bytes);
    if (rc)
        return rc;
    lk_intake_call(intake, device_arena_call, &call);
    if (call.rc) {
        lk_engine_arena_close(intake->engine, &arena);
        snprintf(why, why_bytes, "client %u is leaving", id);
        return call.rc;
    }
    *ret = arena;
    return 0;
}

void lk_intake_device_arena_close(struct lk_intake *intake, struct lk_engine_arena *arena) {
    lk_engine_arena_close(intake->engine, arena);
}

bool lk_intake_mps(const struct lk_intake *intake) {
    return lk_engine_mps(intake->engine);
}

/* ---- channels that go ---- */

static void remove_channel_call(struct lk_intake *intake, void *argument) {
    uint32_t id = *(uint32_t *)argument;
    for (uint32_t i = 0; i < intake->channels; i++) {
        struct lk_channel *channel = &intake->channel[intake->active[i]];
        if (channel->open.id != id || channel->state == LK_CHANNEL_LEAVING)
            continue;
        channel->state = LK_CHANNEL_LEAVING;
        channel->published = false;
        lk_unwatch_bell(intake, channel);
        lk_fence_forget(intake, channel);
        lk_channel_drop_queue(channel);
    }
}

void lk_intake_channel_remove(struct lk_intake *intake, uint32_t id) {
    lk_intake_call(intake, remove_channel_call, &id);
}

/* ---- what is asked ---- */

static void drain_call(struct lk_intake *intake, void *argument) {
    intake->draining = *(bool *)argument;
}

void lk_intake_drain(struct lk_intake *intake, bool drain) {
    lk_intake_call(intake, drain_call, &drain);
}

static void limits_call(struct lk_intake *intake, void *argument) {
    const struct lk_config *fresh = argument;
    intake->config.max_channels = fresh->max_channels;
    intake->config.max_channels_per_uid = fresh->max_channels_per_uid;
    intake->config.max_sequences = fresh->max_sequences;
    intake->config.max_leases = fresh->max_leases;
    intake->config.max_pages = fresh->max_pages;
    intake->config.max_pages_per_uid = fresh->max_pages_per_uid;
    intake->config.fence_ms = fresh->fence_ms;
    for (uint32_t i = 0; i < intake->channels; i++)
        intake->channel[intake->active[i]].limits = limits_of(fresh);
}

void lk_intake_limits(struct lk_intake *intake, const struct lk_config *config) {
    struct lk_config fresh = *config;
    lk_intake_call(intake, limits_call, &fresh);
}

static void pool_status(const struct lk_pool *pool, struct lk_pool_status *ret) {
    const struct lk_geometry *g = &pool->view.geometry;
    uint64_t pages = pool->view.pages, free_pages = lk_pool_available(pool) * LK_QUAD_PAGES;
    *ret = (struct lk_pool_status){
        .geometry = *g,
        .pages = pages,
        .pages_free = free_pages,
        .pages_used = pages - free_pages,
        .pages_leased = pool->leased_pages,
        .memory_bytes = pool->memory_bytes,
        .bytes_per_token = pool->memory_bytes / (pages * g->page_tokens),
        .sequences = pool->sequences,
        .capacity_tokens = pages * g->page_tokens,
        .max_tokens = pool->max_tokens,
    };
    memcpy(ret->name, pool->config->name, sizeof(ret->name));
}

static void status_call(struct lk_intake *intake, void *argument) {
    struct lk_intake_status *ret = argument;
    *ret = (struct lk_intake_status){
        .boot_epoch = intake->boot_epoch,
        .ticks = intake->ticks,
        .batches = intake->batches,
        .rows = intake->rows,
        .rows_exact = intake->rows_exact,
        .rows_sparse = intake->rows_sparse,
        .refusals = intake->refusals,
        .submissions = intake->submissions,
        .score_bytes = intake->score_bytes,
        .select_bytes = intake->select_bytes,
        .attend_bytes = intake->attend_bytes,
        .dense_bytes = intake->dense_bytes,
        .channels = intake->channels,
        .batches_in_flight = intake->in_flight,
        .draining = intake->draining,
        .pools = intake->pools,
    };
    for (uint32_t i = 0; i < intake->pools; i++) {
        ret->sequences += intake->pool[i].sequences;
        ret->leases += intake->pool[i].leases;
        pool_status(&intake->pool[i], &ret->pool[i]);
    }
}

void lk_intake_status(struct lk_intake *intake, struct lk_intake_status *ret) {
    lk_intake_call(intake, status_call, ret);
}

struct channels_call {
    struct lk_channel_status *ret;
    uint32_t room, count;
};

static void channels_call(struct lk_intake *intake, void *argument) {
    struct channels_call *call = argument;
    call->count = intake->channels;
    for (uint32_t i = 0; i < intake->channels && i < call->room; i++) {
        const struct lk_channel *c = &intake->channel[intake->active[i]];
        struct lk_channel_status *ret = &call->ret[i];
        *ret = (struct lk_channel_status){
            .id = c->open.id,
            .pid = c->open.pid,
            .uid = c->open.uid,
            .submissions = c->submissions,
            .completions = c->completions,
            .refusals = c->refusals,
            .queued = c->queued,
            .in_flight = c->running,
            .sequences = c->sequence_count,
            .leases = c->lease_count,
            .pages = lk_channel_quads(c) * LK_QUAD_PAGES,
            .cut = c->state == LK_CHANNEL_CUT,
        };
        memcpy(ret->name, c->open.name, sizeof(ret->name));
    }
}

uint32_t lk_intake_channels(struct lk_intake *intake, struct lk_channel_status *ret,
                            uint32_t count) {
    struct channels_call call = {ret, count, 0};
    lk_intake_call(intake, channels_call, &call);
    return call.count;
}

struct pool_call {
    uint32_t index;
    struct lk_msg_pool *ret;
    int *ret_fd;
    int rc;
};

/* Of limits of which 0 is none. */
static uint64_t lower(uint64_t a, uint64_t b) {
    return !a || (b && b < a) ? b : a;
}

static void pool_call(struct lk_intake *intake, void *argument) {
    struct pool_call *call = argument;
    call->rc = call->index < intake->pools ? 0 : -ENOENT;
    if (call->rc)
        return;
    const struct lk_pool *pool = &intake->pool[call->index];
    const struct lk_geometry *g = &pool->view.geometry;
    *call->ret = (struct lk_msg_pool){
        .index = call->index,
        .layers = g->layers,
        .kv_heads = g->kv_heads,
        .group = g->group,
        .head_dim = g->head_dim,
        .page_tokens = g->page_tokens,
        .rank = g->rank,
        .dtype = g->dtype,
        .budget = pool->config->budget,
        .scan = pool->config->scan,
        .pages = pool->view.pages,
        .pages_quota = lower(pool->view.pages,
                             lower(intake->config.max_pages, intake->config.max_pages_per_uid)),
        .pages_free = lk_pool_available(pool) * LK_QUAD_PAGES,
        .max_tokens = pool->max_tokens,
        .memory_bytes = pool->memory_bytes,
    };
    memcpy(call->ret->name, pool->config->name, sizeof(call->ret->name));
    if (call->ret_fd)
        *call->ret_fd = pool->fd;
}

int lk_intake_pool(struct lk_intake *intake, uint32_t index, struct lk_msg_pool *ret, int *ret_fd) {
    struct pool_call call = {index, ret, ret_fd, 0};
    lk_intake_call(intake, pool_call, &call);
    return call.rc;
}

/* ---- check ---- */

/* What a channel is charged: the quads of a pool that its tables and copies name, each once, and
 * promises. */
static int check_charges(const struct lk_intake *intake, char *why, size_t why_bytes) {
    for (uint32_t p = 0; p < intake->pools; p++) {
        const struct lk_pool *pool = &intake->pool[p];
        uint64_t charged = 0, held = pool->quads - pool->free + pool->promised;
        for (uint32_t i = 0; i < intake->channels; i++)
            charged += intake->channel[intake->active[i]].quads[p];
        if (charged == held)
            continue;
        snprintf(why, why_bytes,
                 "[pool %s]: channels are charged %llu quads, %llu are taken or promised",
                 pool->config->name, (unsigned long long)charged, (unsigned long long)held);
        return -EINVAL;
    }
    return 0;
}

int lk_intake_check(struct lk_intake *intake, char *why, size_t why_bytes) {
    int rc = lk_ledger_check(&intake->ledger, intake->in_flight == 0, why, why_bytes);
    for (uint32_t i = 0; i < intake->pools && !rc; i++)
        rc = lk_pool_check(&intake->pool[i], why, why_bytes);
    return rc ? rc : check_charges(intake, why, why_bytes);
}
