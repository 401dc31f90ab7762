/* SPDX-License-Identifier: MIT */
/*
 * fence.cu - see fence.h. One warp for everything: it must find room beside kernels that fill a
 * multiprocessor. A lane has every 32nd place.
 */
#include "clock.cuh"
#include "device.cuh"
#include "fence.cuh"

#define LANES  32
#define PLACES (LK_CUDA_PLACES / LANES) /* of a lane */
#define BURST  32                       /* signals of a launch */

struct signals {
    uint32_t count;
    struct lk_cuda_signal signal[BURST];
};

__global__ void signal_kernel(const struct signals signals) {
    wait_for_previous();
    if (threadIdx.x < signals.count)
        raise_fence(signals.signal[threadIdx.x]);
}

int lk_cuda_signal(const struct lk_cuda_signal *signals, uint32_t count, void *stream) {
    int error = 0;

    for (uint32_t i = 0; i < count && !error; i += BURST) {
        struct signals burst = {count - i < BURST ? count - i : BURST, {}};
        for (uint32_t j = 0; j < burst.count; j++)
            burst.signal[j] = signals[i + j];
        error = launch(signal_kernel, dim3(1), BURST, 0, stream, burst);
    }
    return error;
}

/* ---- watch ---- */

__device__ __forceinline__ uint64_t load_host(const uint64_t *at) {
    uint64_t x;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(at));
    return x;
}
__device__ __forceinline__ uint64_t load_word(const uint64_t *at) {
    uint64_t x;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(at));
    return x;
}
__device__ __forceinline__ void store_host(uint64_t *at, uint64_t x) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(x) : "memory");
}

struct place {
    uint64_t ticket, value, seen;
    const uint64_t *word;
};

/* Takes over what has changed in the table. */
__device__ void read_places(struct lk_cuda_watch *watch, struct place place[PLACES]) {
    __threadfence_system(); /* as it was when its version was written, or newer */
#pragma unroll
    for (uint32_t k = 0; k < PLACES; k++) {
        uint32_t i = k * LANES + threadIdx.x;
        uint64_t ticket = load_host(&watch->ticket[i]);
        if (ticket == place[k].ticket)
            continue;
        place[k].ticket = ticket;
        place[k].word = NULL;
        if (ticket == 0)
            continue;
        __threadfence_system();
        place[k].word = (const uint64_t *)load_host((const uint64_t *)&watch->word[i]);
        place[k].value = load_host(&watch->value[i]);
        if (!place[k].word)
            continue; /* forgotten meanwhile: the version tells */
        place[k].seen = load_word(place[k].word);
        store_host(&watch->held[i], place[k].seen);
    }
}

/* The word holds x. */
__device__ void look(struct lk_cuda_watch *watch, struct place &place, uint64_t x, uint32_t i) {
    if (x != place.seen)
        store_host(&watch->held[i], x);
    place.seen = x;
    if (x < place.value)
        return;
    __threadfence_system();
    store_host(&watch->reached[i], place.ticket);
    place.word = NULL; /* the ticket stays: it is not taken over again */
}

__global__ void watch_kernel(struct lk_cuda_watch *watch, uint64_t number, uint64_t life_ns) {
    struct place place[PLACES] = {};
    uint64_t begun = device_ns(), version = load_host(&watch->version);
    bool waits = false; /* now, or before: the next word to come finds the watch here */

    read_places(watch, place);
    do {
        uint64_t x[PLACES], now = load_host(&watch->version);
#pragma unroll
        for (uint32_t k = 0; k < PLACES; k++) /* all on their way at once */
            x[k] = place[k].word ? load_word(place[k].word) : 0;
#pragma unroll
        for (uint32_t k = 0; k < PLACES; k++)
            if (place[k].word) {
                look(watch, place[k], x[k], k * LANES + threadIdx.x);
                waits = true;
            }
        if (now != version) {
            read_places(watch, place);
            version = now;
            waits = true;
        }
    } while (__any_sync(LK_FULL_WARP, waits && device_ns() - begun < life_ns));
    __threadfence_system();
    __syncwarp();
    if (threadIdx.x == 0)
        store_host(&watch->ended, number);
}

int lk_cuda_watch(struct lk_cuda_watch *watch, uint64_t number, uint64_t life_ns, void *stream) {
    /* The carveout that a step's kernels ask for: no multiprocessor is changed over for it. */
    static int error =
        (int)cudaFuncSetAttribute(watch_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared);

    watch_kernel<<<1, LANES, 0, (cudaStream_t)stream>>>(watch, number, life_ns);
    return error ? error : (int)cudaGetLastError();
}
