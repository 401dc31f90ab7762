/* SPDX-License-Identifier: MIT */
/*
 * A client on the GPU, with a context of its own, and a private daemon: the device arena, q, k, v
 * written and out read by kernels, fences both ways, a fence that is never raised, and how long a
 * hand-over takes. The daemon is $LOCKSD, or found as clients/common/private.h says.
 */
#include <cuda.h>
#include <unistd.h>

#include <atomic>
#include <ctime>
#include <string>
#include <thread>

#include "../../clients/locks.h"
#include "../../clients/locks_device.cuh"
#include "common.h"

extern "C" {
#include "../../clients/common/private.h"
}

#define LAYERS   2
#define KV_HEADS 8
#define GROUP    4
#define DIM      128
#define Q        (KV_HEADS * GROUP * DIM) /* elements of a token's queries, and outputs */
#define KV       (KV_HEADS * DIM)
#define PROMPT   512
#define STEPS    40
#define FENCE_MS 400
#define LIMIT_NS 2000000000ull /* of a wait in a kernel */
#define THREADS  256

static struct lk_private daemon_;
static struct locks *client;
static struct locks_device_arena arena;
static uint8_t *mapped;
static bool mps;

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static double percentile(std::vector<double> x, double p) {
    std::sort(x.begin(), x.end());
    return x.empty() ? 0 : x[std::min(x.size() - 1, (size_t)(p * (double)x.size()))];
}

static void must(int rc, const char *what, const struct locks *l = client) {
    if (rc == 0)
        return;
    printf("FAIL %s: %d: %s\n", what, rc, locks_error(l));
    lk_private_stop(&daemon_);
    exit(1);
}

/* ---- tokens: the same numbers on host and device, exact in bf16 ---- */

__host__ __device__ static uint16_t number(uint64_t id, uint32_t what, uint32_t i) {
    uint64_t z = (id * 4 + what) * 0x9e3779b97f4a7c15ull + i * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    float f = (float)((int)((z >> 33) % 255) - 127) / 128;
#ifdef __CUDA_ARCH__
    return (uint16_t)(__float_as_uint(f) >> 16);
#else
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)(u >> 16);
#endif
}

enum { OF_Q, OF_K, OF_V };

__device__ static void write_token(uint64_t id, uint16_t *q, uint16_t *k, uint16_t *v) {
    for (uint32_t i = threadIdx.x; i < Q; i += blockDim.x)
        q[i] = number(id, OF_Q, i);
    for (uint32_t i = threadIdx.x; i < KV; i += blockDim.x) {
        k[i] = number(id, OF_K, i);
        v[i] = number(id, OF_V, i);
    }
}

__global__ void prompt_kernel(uint16_t *k, uint16_t *v) {
    uint64_t id = blockIdx.x;
    for (uint32_t i = threadIdx.x; i < KV; i += blockDim.x) {
        k[id * KV + i] = number(id, OF_K, i);
        v[id * KV + i] = number(id, OF_V, i);
    }
}

struct tensors { /* in the device arena */
    uint16_t *q, *k, *v;
    float *out, *lse;
};

/* A step from the client's side: token in, signal, wait, output away. */
__global__ void step_kernel(struct tensors t, uint64_t id, uint64_t *mine, uint64_t *theirs,
                            uint64_t value, float *ret_out, float *ret_lse, uint32_t *ret_reached) {
    write_token(id, t.q, t.k, t.v);
    __syncthreads();
    if (threadIdx.x == 0) {
        locks_fence_signal(mine, value);
        *ret_reached = locks_fence_wait(theirs, value, LIMIT_NS);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < Q; i += blockDim.x)
        ret_out[i] = t.out[i];
    for (uint32_t i = threadIdx.x; i < KV_HEADS * GROUP; i += blockDim.x)
        ret_lse[i] = t.lse[i];
}

/* ---- the arena ---- */

template <class F> static F *driver(const char *name) {
    enum cudaDriverEntryPointQueryResult found;
    void *function = NULL;
    CUDA(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found));
    return (F *)function;
}

static void import_arena(uint64_t bytes) {
    CUmemGenericAllocationHandle handle;
    CUmemAccessDesc access = {};
    CUdeviceptr at = 0;
    struct cudaDeviceProp p;

    must(locks_device_arena(client, bytes, &arena), "device arena");
    CHECK(arena.bytes >= bytes, "%lu bytes", (unsigned long)arena.bytes);
    CUDA(cudaGetDeviceProperties(&p, 0));
    CHECK(!memcmp(&p.uuid, arena.uuid, 16), "another GPU's arena");
    CUDA(driver<decltype(cuMemImportFromShareableHandle)>("cuMemImportFromShareableHandle")(
        &handle, (void *)(uintptr_t)arena.fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(arena.fd);
    CUDA(driver<decltype(cuMemAddressReserve)>("cuMemAddressReserve")(&at, arena.bytes, 0, 0, 0));
    CUDA(driver<decltype(cuMemMap)>("cuMemMap")(at, arena.bytes, 0, handle, 0));
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CUDA(driver<decltype(cuMemSetAccess)>("cuMemSetAccess")(at, arena.bytes, &access, 1));
    mapped = (uint8_t *)at;
    must(locks_device_arena_mapped(client, mapped), "mapped");
    std::vector<uint8_t> all(arena.bytes);
    CUDA(cudaMemcpy(all.data(), mapped, arena.bytes, cudaMemcpyDeviceToHost));
    CHECK(std::count(all.begin(), all.end(), 0) == (long)all.size(), "it is not clear");
    struct locks_device_arena second;
    CHECK(locks_device_arena(client, bytes, &second) == -EBUSY, "%s", locks_error(client));
}

static uint64_t *fence(uint32_t number) {
    return locks_fence(mapped, number, arena.fence_stride);
}

static uint64_t fence_value(uint32_t number) {
    uint64_t x;
    CUDA(cudaMemcpy(&x, fence(number), 8, cudaMemcpyDeviceToHost));
    return x;
}

static struct tensors place(uint64_t prompt) {
    uint8_t *at = mapped + arena.fences * arena.fence_stride;
    struct tensors t;
    t.q = (uint16_t *)at;
    t.k = (uint16_t *)(at + 2 * Q);
    t.v = t.k + prompt * KV;
    t.out = (float *)(t.v + prompt * KV);
    t.lse = t.out + Q;
    return t;
}

/* ---- steps through the host's arena ---- */

struct host { /* a connection's buffers */
    struct locks *l;
    uint16_t *q, *k, *v;
    float *out, *lse;
    locks_handle sequence;
    uint64_t position;

    void open(struct locks *connection) {
        l = connection;
        position = 0;
        q = (uint16_t *)locks_alloc(l, 2 * Q);
        k = (uint16_t *)locks_alloc(l, 2 * PROMPT * KV);
        v = (uint16_t *)locks_alloc(l, 2 * PROMPT * KV);
        out = (float *)locks_alloc(l, 4 * Q);
        lse = (float *)locks_alloc(l, 4 * KV_HEADS * GROUP);
        if (!q || !k || !v || !out || !lse)
            must(-ENOMEM, "arena", l);
        must(locks_sequence_create(l, 0, &sequence), "sequence", l);
    }
    void prompt(void) {
        for (uint64_t id = 0; id < PROMPT; id++)
            for (uint32_t i = 0; i < KV; i++) {
                k[id * KV + i] = number(id, OF_K, i);
                v[id * KV + i] = number(id, OF_V, i);
            }
        struct locks_step step = {};
        struct locks_row row = {};
        row.sequence = sequence;
        row.tokens = PROMPT;
        row.k = k;
        row.v = v;
        must(locks_append(l, &step, &row, 1), "append", l);
        position = PROMPT;
    }
    void decode(void) {
        for (uint32_t i = 0; i < Q; i++)
            q[i] = number(position, OF_Q, i);
        for (uint32_t i = 0; i < KV; i++) {
            k[i] = number(position, OF_K, i);
            v[i] = number(position, OF_V, i);
        }
        again();
    }
    void again(void) { /* another token of the same numbers */
        struct locks_step step = {};
        struct locks_row row = {};
        row.sequence = sequence;
        row.position = position++;
        row.tokens = 1;
        row.q = q, row.k = k, row.v = v, row.out = out, row.lse = lse;
        step.budget = 256;
        must(locks_decode(l, &step, &row, 1), "decode", l);
    }
};

/* ---- the same bits ---- */

static struct locks_row device_row(const struct tensors &t, locks_handle sequence,
                                   uint64_t position) {
    struct locks_row row = {};
    row.sequence = sequence;
    row.position = position;
    row.tokens = 1;
    row.q = t.q, row.k = t.k, row.v = t.v, row.out = t.out, row.lse = t.lse;
    return row;
}

static void test_bits(void) {
    struct tensors t = place(PROMPT);
    struct locks_completion done;
    struct locks_step step = {};
    locks_handle sequence;
    struct host host;
    float *out, *lse;
    uint32_t *reached;

    CUDA(cudaMalloc(&out, 4 * Q));
    CUDA(cudaMalloc(&lse, 4 * KV_HEADS * GROUP));
    CUDA(cudaMallocHost(&reached, 4));
    host.open(client);
    host.prompt();
    must(locks_sequence_create(client, 0, &sequence), "sequence");
    prompt_kernel<<<PROMPT, THREADS>>>(t.k, t.v);
    CUDA(cudaDeviceSynchronize());
    struct locks_row row = device_row(t, sequence, 0);
    row.tokens = PROMPT;
    must(locks_append(client, &step, &row, 1), "append from the device arena");
    step.budget = 256;
    for (uint64_t i = 0; i < STEPS; i++) {
        uint64_t position = PROMPT + i;
        struct locks_fences f = {1, 2, i + 1, i + 1};
        row = device_row(t, sequence, position);
        must(locks_submit_fenced(client, LK_OP_DECODE, &step, &row, 1, &f, i), "submit");
        step_kernel<<<1, THREADS>>>(t, position, fence(1), fence(2), i + 1, out, lse, reached);
        CUDA(cudaDeviceSynchronize());
        CHECK(*reached, "step %lu: the daemon raised no fence", (unsigned long)i);
        must(locks_wait(client, 5000, &done), "completion");
        CHECK(done.status == 0 && done.user_data == i, "step %lu: %d", (unsigned long)i,
              done.status);
        host.decode();
        std::vector<float> there(Q), there_lse(KV_HEADS * GROUP);
        CUDA(cudaMemcpy(there.data(), out, 4 * Q, cudaMemcpyDeviceToHost));
        CUDA(cudaMemcpy(there_lse.data(), lse, 4 * KV_HEADS * GROUP, cudaMemcpyDeviceToHost));
        CHECK(!memcmp(there.data(), host.out, 4 * Q), "step %lu: other bits", (unsigned long)i);
        CHECK(!memcmp(there_lse.data(), host.lse, 4 * KV_HEADS * GROUP), "step %lu: other lse",
              (unsigned long)i);
    }
    must(locks_sequence_free(client, sequence), "free");
    must(locks_sequence_free(client, host.sequence), "free");
    printf("%d steps by fences: the same bits as through the host's arena\n", STEPS);
}

/* ---- a fence that is never raised ---- */

/* us of decode steps of another client, for so long. */
static std::vector<double> others_steps(struct host &host, double ms) {
    std::vector<double> took;
    for (double end = now_us() + 1000 * ms; now_us() < end;) {
        double begun = now_us();
        host.again();
        took.push_back(now_us() - begun);
    }
    return took;
}

static void test_stuck(void) {
    struct locks_options o = {};
    struct locks *second;
    struct locks_completion done;
    struct locks_step step = {};
    struct tensors t = place(1);
    locks_handle sequence;
    struct host host;

    o.size = sizeof o;
    o.socket = daemon_.socket;
    must(locks_connect(&o, &second), "connect", NULL);
    host.open(second);
    host.prompt();
    host.decode();
    others_steps(host, 50);
    std::vector<double> before = others_steps(host, 200);
    must(locks_sequence_create(client, 0, &sequence), "sequence");
    struct locks_row row = device_row(t, sequence, 0);
    struct locks_fences f = {9, 10, 5, 77};
    double begun = now_us();
    must(locks_submit_fenced(client, LK_OP_DECODE, &step, &row, 1, &f, 1), "submit");
    std::vector<double> first = others_steps(host, 4), later = others_steps(host, 200);
    CHECK(locks_try(client, &done) == -EAGAIN, "it is over already");
    must(locks_wait(client, 5000, &done), "the end of the wait");
    double took = (now_us() - begun) / 1000;
    CHECK(done.status == -ETIMEDOUT, "%d: %s", done.status, locks_error(client));
    CHECK(took >= FENCE_MS && took < FENCE_MS + 200, "after %.0f ms", took);
    usleep(20000);
    CHECK(fence_value(10) == 77, "its own fence holds %lu", (unsigned long)fence_value(10));
    row = device_row(t, sequence, 0); /* and the connection goes on */
    must(locks_decode(client, &step, &row, 1), "decode after it");
    printf("a stuck fence: refused after %.0f ms (limit %d): %s\n", took, FENCE_MS,
           locks_error(client));
    printf("another client's steps, us p50 / p99 / most: before %.1f / %.1f / %.1f, its first 4 ms "
           "%.1f / %.1f / %.1f, later %.1f / %.1f / %.1f\n",
           percentile(before, .5), percentile(before, .99), percentile(before, 1),
           percentile(first, .5), percentile(first, .99), percentile(first, 1),
           percentile(later, .5), percentile(later, .99), percentile(later, 1));
    CHECK(percentile(later, 1) < 1000.0 * FENCE_MS / 2, "another client waited along");
    locks_close(second);
    must(locks_sequence_free(client, sequence), "free");
}

/* ---- how long a hand-over takes ---- */

/* count times there and back, in ns. Ends at the first that is not answered. */
__global__ void pingpong_kernel(uint64_t *mine, uint64_t *theirs, uint64_t first, uint32_t count,
                                uint64_t pause_ns, uint32_t *ret_ns) {
    uint64_t begun, now;
    for (uint32_t i = 0; i < count; i++) {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
        locks_fence_signal(mine, first + i);
        bool reached = locks_fence_wait(theirs, first + i, LIMIT_NS);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        ret_ns[i] = reached ? (uint32_t)(now - begun) : 0;
        if (!reached)
            return;
        while (pause_ns && now - begun < pause_ns)
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    }
}

/* rows: 0: empty steps; 1: decode steps of a sequence. pause: the kernel works between two steps,
 * so that the submission is there, and waited with, before its fence. */
static void test_handover(const char *name, uint32_t rows, uint32_t count, uint64_t pause_ns) {
    static uint64_t next = 1;
    struct tensors t = place(1);
    struct locks_step step = {};
    struct locks_completion done;
    locks_handle sequence = 0;
    uint32_t *ns, sent = 0, back = 0;
    uint64_t first = next;

    next += count;
    CUDA(cudaMallocHost(&ns, 4 * count));
    memset(ns, 0, 4 * count);
    step.budget = 256;
    if (rows)
        must(locks_sequence_create(client, 0, &sequence), "sequence");
    for (bool begun = false; back < count; begun = true) {
        for (; sent < count && sent - back < 16; sent++) {
            struct locks_row row = device_row(t, sequence, sent);
            struct locks_fences f = {11, 12, first + sent, first + sent};
            must(locks_submit_fenced(client, LK_OP_DECODE, &step, &row, rows, &f, sent), "submit");
        }
        if (!begun)
            pingpong_kernel<<<1, 1>>>(fence(11), fence(12), first, count, pause_ns, ns);
        must(locks_wait(client, 5000, &done), "completion");
        if (done.status)
            must(done.status, "a step");
        back++;
    }
    CUDA(cudaDeviceSynchronize());
    std::vector<double> us;
    for (uint32_t i = count / 10; i < count; i++) {
        CHECK(ns[i], "%s %u: not answered", name, i);
        us.push_back(ns[i] * 1e-3);
    }
    printf("%s, there and back, us: p50 %.1f, p99 %.1f, least %.1f, most %.1f (%u times, %s MPS)\n",
           name, percentile(us, .5), percentile(us, .99), percentile(us, 0), percentile(us, 1),
           count, mps ? "with" : "without");
    if (rows)
        must(locks_sequence_free(client, sequence), "free");
    CUDA(cudaFreeHost(ns));
}

/* ---- all of it ---- */

static void ask_status(void) {
    char *json = NULL, why[256] = "";
    must(locks_admin(daemon_.socket, "status", &json, why, sizeof why), "status");
    std::string text(json);
    size_t at = text.find("\"sharing\"");
    mps = text.find("\"mps\": true") != std::string::npos;
    CHECK(at != std::string::npos, "status says nothing of device arenas: %s", json);
    int ours = 0;
    CUDA(cudaDeviceGetAttribute(&ours, cudaDevAttrMpsEnabled, 0));
    CHECK(mps == (ours != 0), "status says MPS %d, this client has %d", mps, ours);
    printf("status: %s\n", text.substr(at, text.find('\n', at) - at).c_str());
    free(json);
}

int main(void) {
    const char *sets[] = {
        "daemon.device=cuda",  "pool gpu.layers=2",         "pool gpu.kv_heads=8",
        "pool gpu.group=4",    "pool gpu.head_dim=128",     "pool gpu.memory=1G",
        "limits.fence_ms=400", "pool gpu.max_tokens=65536", "limits.max_row_tokens=1024"};
    struct locks_options o = {};
    char why[2048] = "";
    int count = 0;

    if (cudaGetDeviceCount(&count) != cudaSuccess || !count) {
        printf("no CUDA device: skipped\n");
        return 77;
    }
    if (lk_private_start(sets, sizeof sets / sizeof *sets, 60, &daemon_, why, sizeof why)) {
        printf("FAIL %s\n", why);
        return 1;
    }
    o.size = sizeof o;
    o.socket = daemon_.socket;
    must(locks_connect(&o, &client), "connect", NULL);
    import_arena(16 << 20);
    ask_status();
    test_bits();
    test_handover("an empty step", 0, mps ? 5000 : 300, 0);
    test_handover("an empty step after 50 us", 0, mps ? 2000 : 300, 50000);
    test_handover("a decode step", 1, mps ? 3000 : 300, 0);
    test_stuck();
    locks_close(client);
    lk_private_stop(&daemon_);
    printf("test_client: %s\n", failures ? "FAILED" : "ok");
    return failures != 0;
}
