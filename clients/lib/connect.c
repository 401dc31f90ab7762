/* SPDX-License-Identifier: MIT */
/*
 * connect.c - the life of a connection: hello, welcome, segments, pools; and its end.
 */
#include "internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../../shm_protocol/wire.h"

#define SPIN_US_DEFAULT 20 /* about what a sleep and a wake-up cost */

static _Thread_local char connect_error[LK_CLIENT_ERROR_BYTES];

const char *locks_error(const struct locks *locks) {
    return locks ? locks->error : connect_error;
}

static int say_hello(struct locks *l, const struct locks_options *o) {
    struct lk_hello hello = {.major = LK_ABI_MAJOR,
                             .minor = LK_ABI_MINOR,
                             .min_minor = LK_ABI_MIN_MINOR,
                             .sq_entries = o->sq_entries,
                             .arena_bytes = o->arena_bytes};
    snprintf(hello.name, sizeof(hello.name), "%s",
             o->name ? o->name : program_invocation_short_name);
    lk_wire_head(&hello.head, LK_MSG_HELLO, sizeof(hello));
    int r = lk_wire_send(l->socket, &hello.head, NULL, 0);
    /* A daemon that refuses at sight has hung up already: its reason is still there to be read. */
    return r == -EPIPE || r == -ECONNRESET ? 0 : r;
}

static int read_welcome(struct locks *l) {
    struct lk_welcome welcome = {0};
    int fds[LK_WELCOME_FDS];
    int r = lk_client_answer(l->socket, l->limit_ns, LK_MSG_WELCOME, &welcome.head, sizeof(welcome),
                             fds, LK_WELCOME_FDS, l->error, sizeof(l->error));
    if (r)
        return r;
    r = lk_welcome_invalid(&welcome, l->error, sizeof(l->error));
    if (r) {
        for (int i = 0; i < LK_WELCOME_FDS; i++)
            if (fds[i] >= 0)
                close(fds[i]);
        return r;
    }
    l->pools = welcome.pools;
    l->minor = welcome.minor;
    return lk_channel_memory_attach(&welcome, fds, &l->memory, l->error, sizeof(l->error));
}

static int make_flights(struct locks *l) {
    l->flight_count = l->memory.sizes.sq_entries + l->memory.sizes.cq_entries;
    l->flights = calloc(l->flight_count, sizeof(*l->flights));
    l->free_flights = calloc(l->flight_count, sizeof(*l->free_flights));
    l->landed = calloc(l->flight_count, sizeof(*l->landed));
    if (!l->flights || !l->free_flights || !l->landed)
        return -ENOMEM;
    for (uint32_t i = 0; i < l->flight_count; i++)
        l->free_flights[l->free_count++] = i;
    return 0;
}

/* What submissions are checked against before the daemon sees them. */
static int learn_pools(struct locks *l) {
    l->shapes = calloc(l->pools, sizeof(*l->shapes));
    l->maps = calloc(l->pools, sizeof(*l->maps));
    if (l->pools && (!l->shapes || !l->maps))
        return lk_client_fail(l, -ENOMEM, "out of memory");
    for (uint32_t i = 0; i < l->pools; i++) {
        struct locks_pool pool;
        int r = locks_pool_at(l, i, &pool);
        if (r)
            return r;
        l->maps[i].page_count = pool.pages;
        l->shapes[i] = (struct lk_pool_shape){
            .layers = pool.layers,
            .kv_heads = pool.kv_heads,
            .group = pool.group,
            .head_dim = pool.head_dim,
            .page_tokens = pool.page_tokens,
            .element_bytes = pool.dtype == LK_DTYPE_FP32 ? 4 : 2,
        };
    }
    l->bounds = (struct lk_bounds){.pools = l->shapes,
                                   .pool_count = l->pools,
                                   .max_row_tokens = LK_ROW_TOKENS_MAX,
                                   .arena_bytes = l->memory.sizes.arena_bytes};
    return 0;
}

static int open_connection(struct locks *l, const struct locks_options *o) {
    int r = lk_client_dial(o->socket, l->limit_ns, l->error, sizeof(l->error));
    if (r < 0)
        return r;
    l->socket = r;
    r = say_hello(l, o);
    if (r)
        return lk_client_fail(l, r, "cannot greet the daemon: %s", strerror(-r));
    r = read_welcome(l);
    if (r)
        return r;
    if (make_flights(l) || lk_arena_init(&l->arena, l->memory.sizes.arena_bytes))
        return lk_client_fail(l, -ENOMEM, "out of memory");
    lk_ring_client_init(&l->ring, l->memory.submission, l->memory.completion, &l->memory.sizes);
    return learn_pools(l);
}

int locks_connect(const struct locks_options *options, struct locks **ret) {
    struct locks_options o = {0};
    if (options)
        memcpy(&o, options, options->size < sizeof(o) ? options->size : sizeof(o));
    if (options && options->size == 0) {
        snprintf(connect_error, sizeof(connect_error),
                 "locks_options.size is 0, set it to sizeof(struct locks_options)");
        return -EINVAL;
    }
    struct locks *l = aligned_alloc(LK_LINE, (sizeof(*l) + LK_LINE - 1) / LK_LINE * LK_LINE);
    if (!l) {
        snprintf(connect_error, sizeof(connect_error), "out of memory");
        return -ENOMEM;
    }
    memset(l, 0, sizeof(*l));
    l->socket = -1;
    l->memory.bell = -1;
    for (int i = 0; i < LK_WELCOME_FDS; i++)
        l->memory.client_fds[i] = -1;
    l->made_fd = -1;
    l->late = LK_CLIENT_NONE;
    l->spin_ns = UINT64_C(1000) * (o.spin_us ? o.spin_us : SPIN_US_DEFAULT);
    l->limit_ns = o.limit_ms == LOCKS_FOREVER
                      ? LK_CLIENT_FOREVER
                      : LK_CLIENT_NS_A_MS * (o.limit_ms ? o.limit_ms : LK_CLIENT_LIMIT_MS);
    int r = open_connection(l, &o);
    if (r) {
        memcpy(connect_error, l->error, sizeof(connect_error));
        locks_close(l);
        return r;
    }
    *ret = l;
    return 0;
}

void locks_close(struct locks *locks) {
    if (!locks)
        return;
    for (uint32_t i = 0; locks->maps && i < locks->pools; i++)
        if (locks->maps[i].pages)
            munmap((void *)locks->maps[i].pages, locks->maps[i].bytes);
    if (locks->socket >= 0)
        close(locks->socket);
    if (locks->made_fd >= 0)
        close(locks->made_fd);
    lk_channel_memory_destroy(&locks->memory);
    lk_arena_destroy(&locks->arena);
    free(locks->maps);
    free(locks->shapes);
    free(locks->flights);
    free(locks->free_flights);
    free(locks->landed);
    free(locks);
}
