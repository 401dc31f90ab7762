/* SPDX-License-Identifier: MIT */
/*
 * bench.cu - what the kernels reach on this device, beside its measured read ceiling.
 *
 * Method: steps are captured in a graph, `chain` of them in a row over several sets of pool layers
 * so that nothing stays in the cache from step to step, replayed, and timed by events; medians. A
 * stage alone is a graph of that stage only, over the state its predecessors left. Bytes are
 * logical: records of every page scored, keys and values of every page attended.
 *
 *     bench [--json FILE] [--only score|step|build|dense|tokens]
 *
 * The anchor, dense attention through torch, is bench_dense.py beside this.
 */
#include "common.h"

static FILE *json;
static int processors;
static double ceiling; /* bytes a second */
static const char *only;

static bool wanted(const char *what) {
    return !only || !strcmp(only, what);
}

__global__ void read_all(const uint4 *p, size_t n, uint32_t *out) {
    uint32_t x = 0;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
         i + 7 * (size_t)gridDim.x * blockDim.x < n; i += 8 * (size_t)gridDim.x * blockDim.x) {
        uint4 v[8];
#pragma unroll
        for (int k = 0; k < 8; k++)
            v[k] = __ldcs(p + i + k * (size_t)gridDim.x * blockDim.x);
#pragma unroll
        for (int k = 0; k < 8; k++)
            x ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (x == 0x12345678)
        *out = x;
}

__global__ void randomise(uint16_t *p, size_t n, uint32_t seed, float scale) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        uint32_t x = (uint32_t)i * 2654435761u + seed;
        x ^= x >> 16, x *= 0x85ebca6b, x ^= x >> 13, x *= 0xc2b2ae35, x ^= x >> 16;
        float u = ((x & 0xffff) + (x >> 16)) * (1.f / 65536) - 1.f;
        __nv_bfloat16 h = __float2bfloat16(u * scale);
        p[i] = *(uint16_t *)&h;
    }
}

template <class F> static double median_us(F launch, int chain) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t a, b;
    std::vector<float> t;

    CUDA(cudaStreamCreate(&stream));
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < chain; i++)
        launch(i, stream);
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaEventCreate(&a));
    CUDA(cudaEventCreate(&b));
    for (int i = 0; i < 3; i++)
        CUDA(cudaGraphLaunch(exec, stream));
    for (int i = 0; i < 15; i++) {
        float ms;
        CUDA(cudaEventRecord(a, stream));
        CUDA(cudaGraphLaunch(exec, stream));
        CUDA(cudaEventRecord(b, stream));
        CUDA(cudaStreamSynchronize(stream));
        CUDA(cudaEventElapsedTime(&ms, a, b));
        t.push_back(ms * 1000 / chain);
    }
    std::sort(t.begin(), t.end());
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaStreamDestroy(stream));
    return t[t.size() / 2];
}

static void measure_ceiling(void) {
    buffer<uint8_t> b;
    buffer<uint32_t> out;
    size_t bytes = (size_t)4 << 30;

    b.make(bytes);
    out.make(1);
    for (int blocks : {2, 4, 8}) {
        double us = median_us(
            [&](int, cudaStream_t s) {
                read_all<<<processors * blocks, 512, 0, s>>>((uint4 *)b.p, bytes / 16, out.p);
            },
            2);
        ceiling = std::max(ceiling, bytes / us * 1e6);
    }
    printf("read ceiling %.2f TB/s (4 GiB, median of 15)\n", ceiling / 1e12);
    if (json)
        fprintf(json, "{\"kind\":\"ceiling\",\"bytes_per_s\":%.4g}\n", ceiling);
    cudaFree(b.p);
    cudaFree(out.p);
}

/* Rows of `length` tokens in a pool of `sets` layers; step i runs on layer i. */
struct rig {
    struct pool p;
    lk_geometry g;
    uint64_t length, pages;
    uint32_t rows, sets;
    buffer<uint32_t> tables, sync;
    buffer<uint8_t> io, memory;
    std::vector<lk_cuda_batch *> batches;
    std::vector<lk_row> row;
    double build_ms, super_ms;

    void open(lk_geometry geometry, uint64_t tokens, uint32_t row_count, uint32_t most_sets) {
        g = geometry;
        rows = row_count;
        length = tokens;
        pages = (tokens + g.page_tokens - 1) / g.page_tokens;
        lk_layout l;
        lk_cuda_layout(&g, &l);
        double bytes =
            (double)rows * pages *
            (l.page_bytes + g.kv_heads * (l.coarse_stride + l.fine_stride + l.super_stride / 4.));
        double summary = (double)rows * pages * g.kv_heads * l.coarse_stride / 4;
        sets = std::max(
            1u, (uint32_t)std::min<double>(most_sets, std::min(90e9 / bytes, 1 + 400e6 / summary)));
        g.layers = sets;
        memset(&p.view, 0, sizeof p.view);
        p.view.geometry = g;
        p.view.pages = (rows * pages + 3) / 4 * 4;
        p.view.layout = l;
        uint64_t planes = (uint64_t)sets * g.kv_heads;
        CUDA(cudaMalloc(&p.view.kv, sets * p.view.pages * l.page_bytes));
        CUDA(cudaMalloc(&p.view.coarse, planes * p.view.pages * l.coarse_stride));
        CUDA(cudaMalloc(&p.view.fine, planes * p.view.pages * l.fine_stride + 16));
        CUDA(cudaMalloc(&p.view.super, planes * (p.view.pages / 4) * l.super_stride));
        randomise<<<4096, 256>>>((uint16_t *)p.view.kv, sets * p.view.pages * l.page_bytes / 2, 7,
                                 1.5f);
        build();
        std::vector<uint32_t> t;
        for (uint32_t r = 0; r < rows; r++) {
            std::vector<uint32_t> quads;
            for (uint64_t q = 0; q < pages / 4; q++)
                quads.push_back((uint32_t)(r * (pages / 4) + q));
            for (size_t e = 0; e + 16 <= quads.size();
                 e += 16) { /* extents of 64 pages, in any order */
                size_t o = rng() % (quads.size() / 16) * 16;
                std::swap_ranges(quads.begin() + e, quads.begin() + e + 16, quads.begin() + o);
            }
            t.insert(t.end(), quads.begin(), quads.end());
        }
        tables.put(t.data(), t.size());
        sync.make(lk_cuda_sync_words(&g, 256, 64));
        CUDA(cudaMemset(sync.p, 0, sync.n * 4));
    }
    void build(void) {
        std::vector<uint64_t> list(sets * p.view.pages);
        buffer<uint64_t> d;
        cudaEvent_t a, b, c;
        float ms;
        for (uint64_t i = 0; i < list.size(); i++)
            list[i] = i / p.view.pages << 48 | i % p.view.pages;
        d.put(list.data(), list.size());
        lk_cuda_build job = {p.view, d.p, NULL, (uint32_t)list.size()};
        CUDA(cudaEventCreate(&a));
        CUDA(cudaEventCreate(&b));
        CUDA(cudaEventCreate(&c));
        CUDA(cudaEventRecord(a));
        CUDA(lk_cuda_build_pages(&job, NULL));
        CUDA(cudaEventRecord(b));
        for (uint64_t i = 0; i < list.size() / 4; i++)
            list[i] = i / (p.view.pages / 4) << 48 | i % (p.view.pages / 4);
        buffer<uint64_t> d2;
        d2.put(list.data(), list.size() / 4);
        job.list = d2.p;
        job.most = (uint32_t)(list.size() / 4);
        CUDA(cudaEventRecord(c));
        CUDA(lk_cuda_build_supers(&job, NULL));
        cudaEvent_t e;
        CUDA(cudaEventCreate(&e));
        CUDA(cudaEventRecord(e));
        CUDA(cudaDeviceSynchronize());
        CUDA(cudaEventElapsedTime(&ms, a, b));
        build_ms = ms;
        CUDA(cudaEventElapsedTime(&ms, c, e));
        super_ms = ms;
        cudaFree(d.p);
        cudaFree(d2.p);
    }
    void close(void) {
        for (void *x :
             {(void *)p.view.kv, (void *)p.view.coarse, (void *)p.view.fine, (void *)p.view.super,
              (void *)tables.p, (void *)sync.p, (void *)io.p, (void *)memory.p})
            cudaFree(x);
        for (auto b : batches)
            cudaFree(b);
    }

    /* Descriptor blocks, one a set, for a scan mode (0: exact). */
    void plan(uint32_t scan, uint32_t budget, uint32_t sampled, uint32_t tokens = 1) {
        size_t q = (size_t)tokens * g.kv_heads * g.group * g.head_dim,
               kv = (size_t)tokens * g.kv_heads * g.head_dim,
               each = 2 * q + 4 * kv + 4 * q + 4096 + q / g.head_dim * 4;
        static lk_cuda_batch host;
        each = (each + 255) / 256 * 256;
        cudaFree(io.p);
        cudaFree(memory.p);
        io.make(each * rows);
        randomise<<<1024, 256>>>((uint16_t *)io.p, each * rows / 2, 3, 8.f);
        row.assign(rows, lk_row{});
        uint64_t bytes = 0;
        for (uint32_t r = 0; r < rows; r++) {
            lk_row &y = row[r];
            uint8_t *at = io.p + r * each;
            y.pool = &p.view;
            y.tokens = tokens;
            y.append = tokens;
            y.length = length;
            y.table = tables.p + r * (pages / 4);
            y.table_shift = 2;
            y.q = at;
            y.k = at + 2 * q;
            y.v = at + 2 * q + 2 * kv;
            y.out = (float *)(at + 2 * q + 4 * kv);
            y.lse = y.out + q;
            y.result = (lk_head_out *)(at + each - 2048);
            y.budget_pages = budget;
            y.budget_tokens = (uint64_t)budget * g.page_tokens;
            y.sampled = sampled;
            y.sink_pages = y.recent_pages = 1;
            y.scan = scan;
            y.exact = !scan;
            y.sm_scale = 1 / sqrtf((float)g.head_dim);
            bytes += (lk_cuda_row_workspace_bytes(&y) + 255) / 256 * 256;
        }
        memory.make(bytes);
        bytes = 0;
        for (auto b : batches)
            cudaFree(b);
        batches.clear();
        for (uint32_t r = 0; r < rows; r++) {
            row[r].workspace = memory.p + bytes;
            bytes += (lk_cuda_row_workspace_bytes(&row[r]) + 255) / 256 * 256;
        }
        for (uint32_t s = 0; s < sets; s++) {
            lk_cuda_batch *d;
            for (auto &y : row)
                y.layer = s;
            if (lk_cuda_fill(row.data(), rows, &host))
                printf("fill refused\n");
            CUDA(cudaMalloc(&d, sizeof host));
            CUDA(cudaMemcpy(d, &host, sizeof host, cudaMemcpyHostToDevice));
            batches.push_back(d);
        }
    }
    lk_cuda_step step(int i, uint32_t scan) {
        return {p.view, batches[i % sets],     sync.p,
                rows,   scan ? 1u << scan : 0, (uint32_t)processors};
    }
    double time(int (*stage)(const lk_cuda_step *, void *), uint32_t scan) {
        int chain = std::max(4, (int)sets) > 32 ? 32 : std::max(8, (int)sets);
        return median_us(
            [&](int i, cudaStream_t s) {
                lk_cuda_step x = step(i, scan);
                CUDA(stage(&x, s));
            },
            chain);
    }
};

static void bench_step(lk_geometry g, uint64_t length, uint32_t rows, std::vector<uint32_t> scans,
                       bool dense) {
    struct rig r;
    const char *names[] = {"dense", "full", "coarse", "nested", "tree"};
    uint32_t budget = 2048 / g.page_tokens;
    double scale = (double)rows * g.kv_heads * (length / g.page_tokens);

    r.open(g, length, rows, 16);
    const lk_layout &l = r.p.view.layout;
    if (dense) {
        r.plan(0, budget, 0);
        double us = r.time(lk_cuda_run, 0),
               bytes = (double)rows * length * g.kv_heads * g.head_dim * 4;
        printf("%2u/%u B %2u %7lu x %3u dense  %37s whole %8.1f us  (%.0f%% of ceiling)\n",
               g.kv_heads * g.group, g.kv_heads, g.page_tokens, (unsigned long)length, rows, "", us,
               bytes / us * 1e8 / ceiling);
        if (json)
            fprintf(json,
                    "{\"kind\":\"dense\",\"q_heads\":%u,\"kv_heads\":%u,\"page_tokens\":%u,"
                    "\"tokens\":%lu,\"rows\":%u,\"us\":%.2f}\n",
                    g.kv_heads * g.group, g.kv_heads, g.page_tokens, (unsigned long)length, rows,
                    us);
    }
    for (uint32_t scan : scans) {
        r.plan(scan, budget, budget >= 128 ? budget / 2 : 0);
        double whole = r.time(lk_cuda_run, scan), scan_us = r.time(lk_cuda_scan, scan), prune = 0,
               rescan = 0;
        if (scan >= LK_NESTED) {
            prune = r.time(lk_cuda_prune, scan);
            rescan = r.time(lk_cuda_rescan, scan);
        }
        double select = r.time(lk_cuda_select, scan), attend = r.time(lk_cuda_attend, scan);
        double bytes = scale * (scan == LK_FULL   ? l.coarse_bytes + l.fine_bytes
                                : scan == LK_TREE ? l.super_bytes / 4.
                                                  : l.coarse_bytes);
        double kv = (double)rows * 2048 * g.kv_heads * g.head_dim * 4;
        printf("%2u/%u B %2u %7lu x %3u %-6s scan %7.1f (%2.0f%%) prune %4.1f rescan %4.1f select "
               "%5.1f attend %5.1f (%2.0f%%) whole %8.1f us\n",
               g.kv_heads * g.group, g.kv_heads, g.page_tokens, (unsigned long)length, rows,
               names[scan], scan_us, bytes / scan_us * 1e8 / ceiling, prune, rescan, select, attend,
               kv / attend * 1e8 / ceiling, whole);
        if (json)
            fprintf(
                json,
                "{\"kind\":\"step\",\"q_heads\":%u,\"kv_heads\":%u,\"page_tokens\":%u,\"tokens\":%"
                "lu,\"rows\":%u,\"scan\":\"%s\",\"scan_us\":%.2f,\"scan_share\":%.4f,\"prune_us\":%"
                ".2f,\"rescan_us\":%.2f,\"select_us\":%.2f,\"attend_us\":%.2f,\"whole_us\":%.2f}\n",
                g.kv_heads * g.group, g.kv_heads, g.page_tokens, (unsigned long)length, rows,
                names[scan], scan_us, bytes / scan_us * 1e6 / ceiling, prune, rescan, select,
                attend, whole);
    }
    fflush(stdout);
    r.close();
}

static void bench_build(void) {
    struct rig r;
    lk_geometry g = {1, 8, 4, 128, 16, 8, LK_BF16};
    r.open(g, 1 << 20, 1, 4);
    r.build(); /* warm */
    double pages = (double)r.sets * r.p.view.pages * 8;
    printf("build: %.0f pages in %.1f ms, 16.7 M in %.3f s; superpages: 4.2 M in %.3f s\n", pages,
           r.build_ms, 16777216 / pages * r.build_ms / 1e3, 16777216 / pages * r.super_ms / 1e3);
    if (json)
        fprintf(json, "{\"kind\":\"build\",\"pages\":%.0f,\"ms\":%.3f,\"super_ms\":%.3f}\n", pages,
                r.build_ms, r.super_ms);
    r.close();
}

static void bench_tokens(void) {
    struct rig r;
    lk_geometry g = {1, 8, 4, 128, 16, 8, LK_BF16};
    r.open(g, 32768, 1, 16);
    for (uint32_t n : {1, 2, 4, 8, 16}) {
        r.plan(0, 128, 0, n);
        double us = r.time(lk_cuda_run, 0);
        printf("row of %2u tokens at 32768, exact: %.1f us\n", n, us);
        if (json)
            fprintf(json, "{\"kind\":\"tokens\",\"tokens\":%u,\"length\":32768,\"us\":%.2f}\n", n,
                    us);
    }
    r.close();
}

int main(int argc, char **argv) {
    lk_geometry g = {1, 8, 4, 128, 16, 8, LK_BF16};

    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--json"))
            json = fopen(argv[i + 1], "w");
        else if (!strcmp(argv[i], "--only"))
            only = argv[i + 1];
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    processors = device_or_skip();
    measure_ceiling();
    if (wanted("build"))
        bench_build();
    if (wanted("step") || wanted("score")) {
        bench_step(g, 32768, 1, {LK_FULL, LK_NESTED}, true);
        bench_step(g, 131072, 1, {LK_FULL, LK_COARSE, LK_NESTED, LK_TREE}, true);
        bench_step(g, 1 << 20, 1, {LK_FULL, LK_COARSE, LK_NESTED, LK_TREE}, true);
    }
    if (wanted("step")) {
        bench_step(g, 8192, 1, {LK_FULL}, true);
        bench_step(g, 32768, 8, {LK_FULL, LK_NESTED}, true);
        bench_step(g, 131072, 8, {LK_FULL, LK_NESTED, LK_TREE}, true);
        bench_step(g, 32768, 32, {LK_FULL, LK_NESTED}, true);
        bench_step(g, 32768, 64, {LK_FULL}, false);
    }
    if (!only) {
        g.kv_heads = 2, g.group = 16;
        bench_step(g, 131072, 1, {LK_FULL, LK_NESTED}, true);
        bench_step(g, 1 << 20, 1, {LK_FULL, LK_NESTED, LK_TREE}, true);
        g.kv_heads = 4, g.group = 8;
        bench_step(g, 131072, 1, {LK_FULL, LK_NESTED}, true);
        bench_step(g, 1 << 20, 1, {LK_FULL, LK_NESTED, LK_TREE}, true);
        g.kv_heads = 8, g.group = 4, g.page_tokens = 8;
        bench_step(g, 131072, 1, {LK_FULL, LK_NESTED}, false);
    }
    if (wanted("tokens"))
        bench_tokens();
    if (json)
        fclose(json);
    return 0;
}
