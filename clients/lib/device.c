/* SPDX-License-Identifier: MIT */
/*
 * device.c - the device arena: asked for on the socket, mapped by the application. No CUDA here.
 */
#include "internal.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "../../shm_protocol/wire.h"

#define MINOR 1 /* of the protocol, that has device arenas */

int locks_device_arena(struct locks *locks, uint64_t bytes, struct locks_device_arena *ret) {
    struct lk_msg_device_arena ask = {.bytes = bytes};
    struct lk_msg_device_arena_made made;
    int fd = -1;
    if (locks->minor < MINOR)
        return lk_client_fail(locks, -EPROTO,
                              "the daemon speaks protocol version %d.%u, device arenas need %d.%d",
                              LK_ABI_MAJOR, locks->minor, LK_ABI_MAJOR, MINOR);
    lk_wire_head(&ask.head, LK_MSG_DEVICE_ARENA, sizeof(ask));
    int r =
        lk_client_ask(locks, &ask.head, LK_MSG_DEVICE_ARENA_MADE, &made.head, sizeof(made), &fd);
    if (r == -EBUSY && locks->made_fd >= 0 && locks->made.bytes >= bytes) {
        made = locks->made;
        fd = locks->made_fd;
        locks->made_fd = -1;
        r = 0;
    }
    if (r)
        return r;
    if (fd < 0 || made.fences != LK_DEVICE_FENCES || made.fence_stride != LK_DEVICE_FENCE_STRIDE) {
        if (fd >= 0)
            close(fd);
        return lk_client_fail(
            locks, -EPROTO, "the daemon's device arena has %u fences %u bytes apart and %s handle",
            made.fences, made.fence_stride, fd < 0 ? "no" : "a");
    }
    locks->bounds.device_bytes = made.bytes;
    *ret = (struct locks_device_arena){.bytes = made.bytes,
                                       .fd = fd,
                                       .gpu = made.gpu,
                                       .fences = made.fences,
                                       .fence_stride = made.fence_stride};
    memcpy(ret->uuid, made.uuid, sizeof(ret->uuid));
    return 0;
}

int locks_device_arena_mapped(struct locks *locks, const void *at) {
    if (!locks->bounds.device_bytes)
        return lk_client_fail(locks, -EINVAL, "the connection has no device arena to be mapped");
    if (!at || (uintptr_t)at % LK_LINE)
        return lk_client_fail(locks, -EINVAL, "a device arena mapped at %p: not a multiple of %d",
                              at, LK_LINE);
    locks->device = at;
    return 0;
}
