/* SPDX-License-Identifier: MIT */
/*
 * pool.c - what the daemon's pools are, and their pages read-only.
 */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../../shm_protocol/printable.h"
#include "../../shm_protocol/wire.h"

int locks_pool_count(const struct locks *locks) {
    return locks->pools;
}

static int ask_pool(struct locks *l, uint32_t index, const char *name, struct locks_pool *ret) {
    struct lk_msg_pool_get get = {.index = index};
    struct lk_msg_pool m;
    if (name && strlen(name) >= sizeof(get.name))
        return lk_client_fail(l, -EINVAL, "a pool's name has at most %zu bytes, this has %zu",
                              sizeof(get.name) - 1, strlen(name));
    if (name)
        memcpy(get.name, name, strlen(name));
    lk_wire_head(&get.head, LK_MSG_POOL_GET, sizeof(get));
    int r = lk_client_ask(l, &get.head, LK_MSG_POOL, &m.head, sizeof(m), NULL);
    if (r)
        return r;
    if (m.index >= l->pools || (!name && m.index != index))
        return lk_client_fail(l, -EPROTO, "the daemon answers with pool %u of %u", m.index,
                              l->pools);
    *ret = (struct locks_pool){.index = m.index,
                               .layers = m.layers,
                               .kv_heads = m.kv_heads,
                               .group = m.group,
                               .head_dim = m.head_dim,
                               .page_tokens = m.page_tokens,
                               .rank = m.rank,
                               .dtype = m.dtype,
                               .budget = m.budget,
                               .scan = m.scan,
                               .pages = m.pages,
                               .pages_quota = m.pages_quota,
                               .pages_free = m.pages_free,
                               .max_tokens = m.max_tokens,
                               .memory_bytes = m.memory_bytes};
    memcpy(ret->name, m.name, sizeof(ret->name));
    ret->name[sizeof(ret->name) - 1] = '\0';
    lk_printable(ret->name, "");
    return 0;
}

int locks_pool(struct locks *locks, const char *name, struct locks_pool *ret) {
    return name ? ask_pool(locks, LK_POOL_BY_NAME, name, ret) : locks_pool_at(locks, 0, ret);
}

int locks_pool_at(struct locks *locks, uint32_t index, struct locks_pool *ret) {
    if (index >= locks->pools)
        return lk_client_fail(locks, -ESRCH, "pool %u does not exist, there are %u", index,
                              locks->pools);
    return ask_pool(locks, index, NULL, ret);
}

/* That nothing of it lies outside of the memory, now or later. */
static int check_map(struct locks *l, uint32_t index, int fd, const struct lk_msg_pool_mapped *m) {
    const struct lk_client_map *map = &l->maps[index];
    uint64_t layers, pages;
    struct stat file;
    int seals = fd < 0 ? -1 : fcntl(fd, F_GET_SEALS);
    if (seals < 0 || fstat(fd, &file))
        return lk_client_fail(l, -EPROTO, "the daemon sent no memory for the pages of pool %u",
                              index);
    if (!(seals & F_SEAL_SHRINK))
        return lk_client_fail(l, -EPROTO, "the pages of pool %u are not sealed: they may shrink",
                              index);
    if ((uint64_t)file.st_size < m->bytes)
        return lk_client_fail(l, -EPROTO, "the pages of pool %u have %lld bytes, not %llu", index,
                              (long long)file.st_size, (unsigned long long)m->bytes);
    if (__builtin_mul_overflow(m->page_bytes, map->page_count, &pages) || pages > m->layer_bytes ||
        __builtin_mul_overflow(m->layer_bytes, l->shapes[index].layers, &layers) ||
        layers > m->bytes)
        return lk_client_fail(l, -EPROTO, "the pages of pool %u go beyond its %llu bytes", index,
                              (unsigned long long)m->bytes);
    return 0;
}

static int map_pool(struct locks *l, uint32_t index, struct lk_client_map *ret) {
    struct lk_msg_pool_map ask = {.index = index};
    struct lk_msg_pool_mapped m = {0};
    int fd = -1;
    lk_wire_head(&ask.head, LK_MSG_POOL_MAP, sizeof(ask));
    int r = lk_client_ask(l, &ask.head, LK_MSG_POOL_MAPPED, &m.head, sizeof(m), &fd);
    if (r)
        return r;
    r = check_map(l, index, fd, &m);
    if (r) {
        if (fd >= 0)
            close(fd);
        return r;
    }
    void *pages = mmap(NULL, m.bytes, PROT_READ, MAP_SHARED, fd, 0);
    r = pages == MAP_FAILED ? -errno : 0;
    close(fd);
    if (r)
        return lk_client_fail(l, r, "cannot map the %llu bytes of pool %u: %s",
                              (unsigned long long)m.bytes, index, strerror(-r));
    ret->pages = pages;
    ret->bytes = m.bytes;
    ret->layer_bytes = m.layer_bytes;
    ret->page_bytes = m.page_bytes;
    return 0;
}

int locks_pool_map(struct locks *locks, uint32_t index, const void **ret_pages,
                   uint64_t *ret_layer_bytes, uint64_t *ret_page_bytes) {
    if (index >= locks->pools)
        return lk_client_fail(locks, -ESRCH, "pool %u does not exist, there are %u", index,
                              locks->pools);
    struct lk_client_map *map = &locks->maps[index];
    int r = map->pages ? 0 : map_pool(locks, index, map);
    if (r)
        return r;
    *ret_pages = map->pages;
    *ret_layer_bytes = map->layer_bytes;
    *ret_page_bytes = map->page_bytes;
    return 0;
}
