/* SPDX-License-Identifier: MIT */
/*
 * memory.c - see memory.h.
 */
#include "memory.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define DRIVER_VERSION 12000 /* of the interface asked for by name */

struct driver { /* libcuda's, by name */
    CUresult (*granularity)(size_t *, const CUmemAllocationProp *,
                            CUmemAllocationGranularity_flags);
    CUresult (*create)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
                       unsigned long long);
    CUresult (*release)(CUmemGenericAllocationHandle);
    CUresult (*reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
    CUresult (*unreserve)(CUdeviceptr, size_t);
    CUresult (*map)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
    CUresult (*unmap)(CUdeviceptr, size_t);
    CUresult (*access)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
    CUresult (*export)(void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                       unsigned long long);
    CUresult (*words)(CUresult, const char **);
};

static int find(const char *name, void *ret, char *why, size_t why_bytes) {
    enum cudaDriverEntryPointQueryResult found;
    void *function = NULL;
    cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, DRIVER_VERSION,
                                                         cudaEnableDefault, &found);
    if (error || found != cudaDriverEntryPointSuccess || !function) {
        snprintf(why, why_bytes, "the driver lacks %s: CUDA 12 or later is needed", name);
        return -ENOTSUP;
    }
    memcpy(ret, &function, sizeof function);
    return 0;
}

/* -> 0, -ENOTSUP with the first function that is missing. */
static int open_driver(struct driver *ret, char *why, size_t why_bytes) {
    const struct {
        const char *name;
        void *to;
    } functions[] = {
        {"cuMemGetAllocationGranularity", &ret->granularity},
        {"cuMemCreate", &ret->create},
        {"cuMemRelease", &ret->release},
        {"cuMemAddressReserve", &ret->reserve},
        {"cuMemAddressFree", &ret->unreserve},
        {"cuMemMap", &ret->map},
        {"cuMemUnmap", &ret->unmap},
        {"cuMemSetAccess", &ret->access},
        {"cuMemExportToShareableHandle", &ret->export},
        {"cuGetErrorString", &ret->words},
    };
    int error = 0;

    for (size_t i = 0; i < sizeof functions / sizeof *functions && !error; i++)
        error = find(functions[i].name, functions[i].to, why, why_bytes);
    return error;
}

static int refuse(const struct driver *driver, CUresult result, const char *step, uint64_t bytes,
                  char *why, size_t why_bytes) {
    const char *words = "unknown error";
    size_t free_bytes = 0, all = 0;

    driver->words(result, &words);
    cudaMemGetInfo(&free_bytes, &all);
    snprintf(why, why_bytes, "%s of %llu MiB of GPU memory: %s (%zu MiB of %zu are free)", step,
             (unsigned long long)(bytes >> 20), words, free_bytes >> 20, all >> 20);
    return result == CUDA_ERROR_OUT_OF_MEMORY ? -ENOMEM : -EIO;
}

/* Before it returns: the engine's streams do not wait for the default one. */
static cudaError_t clear(void *at, uint64_t bytes) {
    cudaError_t error = cudaMemset(at, 0, bytes);

    return error ? error : cudaStreamSynchronize(NULL);
}

/* Address space, mapping, access, clearing, export; whatever fails, close() undoes the rest. */
static int place(const struct driver *driver, const CUmemAllocationProp *prop,
                 struct lk_cuda_memory *m, char *why, size_t why_bytes) {
    CUmemAccessDesc access = {.location = prop->location,
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr at = 0;
    CUresult result = driver->reserve(&at, m->bytes, 0, 0, 0);

    if (result)
        return refuse(driver, result, "address space", m->bytes, why, why_bytes);
    result = driver->map(at, m->bytes, 0, m->handle, 0);
    if (result) {
        driver->unreserve(at, m->bytes);
        return refuse(driver, result, "mapping", m->bytes, why, why_bytes);
    }
    m->at = (uint8_t *)(uintptr_t)at;
    result = driver->access(at, m->bytes, &access, 1);
    if (result)
        return refuse(driver, result, "access to", m->bytes, why, why_bytes);
    if (clear(m->at, m->bytes)) {
        snprintf(why, why_bytes, "GPU memory cannot be cleared: %s",
                 cudaGetErrorString(cudaGetLastError()));
        return -EIO;
    }
    result = driver->export(&m->fd, m->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (result) {
        m->fd = -1;
        return refuse(driver, result, "a shareable handle", m->bytes, why, why_bytes);
    }
    return 0;
}

int lk_cuda_memory_open(int gpu, uint64_t bytes, struct lk_cuda_memory *ret, char *why,
                        size_t why_bytes) {
    CUmemAllocationProp prop = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gpu},
    };
    CUmemGenericAllocationHandle handle;
    struct driver driver;
    size_t unit = 0;
    int error = open_driver(&driver, why, why_bytes);

    *ret = (struct lk_cuda_memory){.fd = -1};
    if (error)
        return error;
    CUresult result = driver.granularity(&unit, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    if (!result) {
        ret->bytes = (bytes + unit - 1) / unit * unit;
        result = driver.create(&handle, ret->bytes, &prop, 0);
    }
    if (result)
        return refuse(&driver, result, "an allocation", bytes, why, why_bytes);
    ret->handle = handle;
    error = place(&driver, &prop, ret, why, why_bytes);
    if (error)
        lk_cuda_memory_close(ret);
    return error;
}

void lk_cuda_memory_close(struct lk_cuda_memory *m) {
    struct driver driver;
    char why[128];

    if (!m->handle || open_driver(&driver, why, sizeof why))
        return;
    if (m->fd >= 0)
        close(m->fd);
    if (m->at) {
        driver.unmap((CUdeviceptr)(uintptr_t)m->at, m->bytes);
        driver.unreserve((CUdeviceptr)(uintptr_t)m->at, m->bytes);
    }
    driver.release(m->handle);
    *m = (struct lk_cuda_memory){.fd = -1};
}

/* ---- plain ---- */

static void *taken(cudaError_t error, void *at, uint64_t bytes, const char *what, char *why,
                   size_t why_bytes) {
    if (!error)
        return at;
    snprintf(why, why_bytes, "%llu MiB of %s memory: %s", (unsigned long long)(bytes >> 20), what,
             cudaGetErrorString(error));
    cudaGetLastError(); /* it is told; nothing later shall find it */
    return NULL;
}

void *lk_cuda_device_alloc(uint64_t bytes, char *why, size_t why_bytes) {
    void *at = NULL;
    cudaError_t error = cudaMalloc(&at, bytes);

    if (!error)
        error = clear(at, bytes);
    if (error)
        cudaFree(at);
    return taken(error, at, bytes, "GPU", why, why_bytes);
}

void *lk_cuda_host_alloc(uint64_t bytes, char *why, size_t why_bytes) {
    void *at = NULL;
    cudaError_t error = cudaHostAlloc(&at, bytes, cudaHostAllocPortable | cudaHostAllocMapped);

    if (!error)
        memset(at, 0, bytes);
    return taken(error, at, bytes, "pinned host", why, why_bytes);
}

void lk_cuda_device_free(void *at) {
    if (at)
        cudaFree(at);
}

void lk_cuda_host_free(void *at) {
    if (at)
        cudaFreeHost(at);
}
