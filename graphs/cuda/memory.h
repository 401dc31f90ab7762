/* SPDX-License-Identifier: MIT */
/*
 * memory.h - memory of the device that others may map, and memory of the host that the device
 * reads.
 *
 * Idea: a pool is one physical allocation of the driver's virtual memory management, exportable as
 * a descriptor; any process that is given it maps the same bytes. The rest is plain device memory
 * and pinned host memory. The driver's functions are asked for by name at run time, so the binary
 * does not link to libcuda. Everything is taken before it is used, and a shortage is an error that
 * names both sizes.
 *
 * Any thread whose current device is set. Does not decide what lies where.
 */
#ifndef LK_CUDA_MEMORY_H
#define LK_CUDA_MEMORY_H

#include <stddef.h>
#include <stdint.h>

struct lk_cuda_memory { /* of the device */
    uint8_t *at;
    uint64_t bytes;  /* taken: a multiple of the allocation's granularity */
    uint64_t handle; /* of the physical allocation */
    int fd;          /* shareable handle; -1: none */
};

/* Takes, maps and clears `bytes` on device `gpu`; all are clear when it returns. -> 0, -ENOMEM with
 * both sizes in why, -ENOTSUP with what the driver lacks, -EIO with the driver's words. */
int lk_cuda_memory_open(int gpu, uint64_t bytes, struct lk_cuda_memory *ret, char *why,
                        size_t why_bytes);
void lk_cuda_memory_close(struct lk_cuda_memory *memory); /* of a zeroed struct: nothing */

/* Plain device memory, cleared; pinned host memory, cleared, at the same address on the device.
 * -> NULL with a sentence in why. */
void *lk_cuda_device_alloc(uint64_t bytes, char *why, size_t why_bytes);
void *lk_cuda_host_alloc(uint64_t bytes, char *why, size_t why_bytes);
void lk_cuda_device_free(void *at);
void lk_cuda_host_free(void *at);

#endif
