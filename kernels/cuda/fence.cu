/* SPDX-License-Identifier: MIT */
/*
 * fence.cu - see fence.h. Two warps for everything: they must find room beside kernels that fill a
 * multiprocessor. One looks at words of device memory, a lane at every 32nd place; the other
 * listens to the host, whose memory is several times as far.
 */
#include "clock.cuh"
#include "device.cuh"
#include "fence.cuh"

#define LANES  32
#define PLACES (LK_CUDA_PLACES / LANES) /* of a lane */
#define BURST  32                       /* signals of a launch */
#define ROOM   8                        /* blocks that fit: registers beside a scan */

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

/* An entry of a table or queue. By a warp and in one request: the host's memory serves requests for
 * the same bytes one after the other. */
struct part {
    uint64_t x; /* of lane % 4 */
};

__device__ __forceinline__ struct part ask_entry(const struct lk_cuda_entry *at) {
    return {load_host((const uint64_t *)at + threadIdx.x % 4)};
}

/* -> whether it is whole. */
__device__ __forceinline__ bool get_entry(const struct part &part, struct lk_cuda_entry *ret) {
    ret->number = __shfl_sync(LK_FULL_WARP, part.x, 0);
    ret->word = __shfl_sync(LK_FULL_WARP, part.x, 1);
    ret->value = __shfl_sync(LK_FULL_WARP, part.x, 2);
    ret->check = __shfl_sync(LK_FULL_WARP, part.x, 3);
    return ret->check == lk_cuda_entry_check(ret->number, ret->word, ret->value);
}

/* Takes places of the lanes in `mask` over. What is not whole changes still: the version tells. */
__device__ __forceinline__ void take_places(struct lk_cuda_watch *watch, uint32_t first,
                                            uint32_t mask, struct place &place) {
    struct lk_cuda_entry entry;

    for (; mask; mask &= mask - 1) {
        const uint32_t lane = __ffs(mask) - 1;
        bool whole = get_entry(ask_entry(&watch->place[first + lane]), &entry);
        if (!whole || threadIdx.x != lane || entry.number == place.ticket)
            continue;
        place.ticket = entry.number;
        place.value = entry.value;
        place.word = (const uint64_t *)entry.word;
        if (!place.word)
            continue;
        place.seen = load_word(place.word);
        store_host(&watch->held[first + lane], place.seen);
    }
    __syncwarp();
}

/* Takes over what has changed in the table: all that may have, or place `only` if it is one. */
__device__ void read_places(struct lk_cuda_watch *watch, uint32_t only,
                            struct place place[PLACES]) {
    uint64_t ticket[PLACES];

#pragma unroll
    for (uint32_t k = 0; k < PLACES; k++) /* all on their way at once */
        ticket[k] = only < LK_CUDA_PLACES ? 0 : load_host(&watch->ticket[k * LANES + threadIdx.x]);
#pragma unroll
    for (uint32_t k = 0; k < PLACES; k++) {
        uint32_t mask = __ballot_sync(LK_FULL_WARP, ticket[k] != place[k].ticket);
        if (only < LK_CUDA_PLACES)
            mask = k == only / LANES ? 1u << only % LANES : 0;
        take_places(watch, k * LANES, mask, place[k]);
    }
}

/* The one place that may have changed between two versions; LK_CUDA_PLACES: there may be more. */
__device__ __forceinline__ uint32_t changed(uint64_t from, uint64_t to) {
    return to / LK_CUDA_PLACES <= from / LK_CUDA_PLACES + 1 ? (uint32_t)(to % LK_CUDA_PLACES)
                                                            : LK_CUDA_PLACES;
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

/* Between the two warps. */
struct shared {
    uint64_t version; /* of the table, as the listener saw it last */
    uint32_t over;    /* the other has ended */
};

/* After a fence: what the host had seen when it asked is seen by whoever sees the word. */
__device__ void raise_entry(struct lk_cuda_watch *watch, const struct lk_cuda_entry &entry) {
    if (threadIdx.x % LANES)
        return;
    if (entry.word)
        raise_fence({(uint64_t *)entry.word, entry.value});
    store_host(&watch->raised, entry.number);
}

__device__ __forceinline__ const struct lk_cuda_entry *queued(const struct lk_cuda_watch *watch,
                                                              uint64_t number) {
    return &watch->raise[number % LK_CUDA_RAISES];
}

__device__ void listen(struct lk_cuda_watch *watch, uint64_t version, uint64_t number,
                       volatile struct shared *s) {
    uint64_t raised = load_host(&watch->raised);
    struct lk_cuda_entry entry;

    do { /* both on their way at once */
        const struct part part = ask_entry(queued(watch, raised + 1));
        const uint64_t answer = load_host(&watch->version);
        const bool asked = get_entry(part, &entry) && entry.number == raised + 1;
        const uint64_t now = __shfl_sync(LK_FULL_WARP, answer, 0);
        if (!asked && now == version)
            continue;
        __threadfence_system();
        __syncwarp();
        if (asked)
            raise_entry(watch, entry);
        raised += asked;
        if (threadIdx.x % LANES == 0)
            s->version = now;
        version = now;
    } while (!__shfl_sync(LK_FULL_WARP, s->over, 0));
    if (threadIdx.x % LANES == 0)
        store_host(&watch->ending, number);
    __threadfence_system();
    __syncwarp();
    while (get_entry(ask_entry(queued(watch, raised + 1)), &entry) && entry.number == raised + 1) {
        __threadfence_system();
        __syncwarp();
        raise_entry(watch, entry);
        raised++;
    }
}

__device__ void look_on(struct lk_cuda_watch *watch, uint64_t version, uint64_t life_ns,
                        volatile struct shared *s) {
    struct place place[PLACES] = {};
    uint64_t begun = device_ns(), now = version;
    uint32_t only = LK_CUDA_PLACES;
    bool waits = false; /* now, or before: the next word to come finds the watch here */

    do {
        if (only == LK_CUDA_PLACES || now != version) {
            __threadfence_block();
            read_places(watch, only, place);
            waits |= now != version;
            version = now;
        }
        uint64_t x[PLACES];
#pragma unroll
        for (uint32_t k = 0; k < PLACES; k++) /* all on their way at once */
            x[k] = place[k].word ? load_word(place[k].word) : 0;
#pragma unroll
        for (uint32_t k = 0; k < PLACES; k++)
            if (place[k].word) {
                look(watch, place[k], x[k], k * LANES + threadIdx.x);
                waits = true;
            }
        now = __shfl_sync(LK_FULL_WARP, s->version, 0);
        only = changed(version, now);
    } while (__any_sync(LK_FULL_WARP, waits && device_ns() - begun < life_ns));
    __threadfence_system();
    s->over = 1;
}

__global__ void __launch_bounds__(2 * LANES, ROOM)
    watch_kernel(struct lk_cuda_watch *watch, uint64_t number, uint64_t life_ns) {
    __shared__ struct shared s;

    if (threadIdx.x == 0)
        s = {load_host(&watch->version), 0};
    __threadfence_system();
    __syncthreads();
    const uint64_t version = s.version;
    __syncthreads();
    if (threadIdx.x < LANES)
        look_on(watch, version, life_ns, &s);
    else
        listen(watch, version, number, &s);
    __syncthreads();
    if (threadIdx.x == 0)
        store_host(&watch->ended, number);
}

int lk_cuda_watch(struct lk_cuda_watch *watch, uint64_t number, uint64_t life_ns, void *stream) {
    /* The carveout that a step's kernels ask for: no multiprocessor is changed over for it. */
    static int error =
        (int)cudaFuncSetAttribute(watch_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared);

    watch_kernel<<<1, 2 * LANES, 0, (cudaStream_t)stream>>>(watch, number, life_ns);
    return error ? error : (int)cudaGetLastError();
}
