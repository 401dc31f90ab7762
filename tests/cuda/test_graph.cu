/* SPDX-License-Identifier: MIT */
/* Captured steps: nothing baked in, buckets, and a row's bits wherever it runs. */
#include "scene.h"

static int processors;

static cudaGraphExec_t capture(const lk_cuda_step &step, int times = 1) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;

    CUDA(cudaStreamCreate(&stream));
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < times; i++)
        CUDA(lk_cuda_run(&step, stream));
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaStreamDestroy(stream));
    return exec;
}

static bool same(const request &a, const request &b, uint32_t d, uint32_t heads) {
    (void)d;
    return a.out == b.out && !memcmp(a.lse.data(), b.lse.data(), 4 * a.lse.size()) &&
           !memcmp(a.result.data(), b.result.data(), 16 * heads) &&
           (!a.plan.scan ||
            !memcmp(a.list.data(), b.list.data(), 8 * (a.result[0].kept + a.result[0].sampled)));
}

int main(void) {
    const uint32_t all = 1u << LK_FULL | 1u << LK_COARSE | 1u << LK_NESTED | 1u << LK_TREE;
    lk_geometry g = {2, 4, 4, 128, 16, 8, LK_BF16};
    struct scene s;
    std::vector<sequence *> q;

    processors = device_or_skip();
    s.open(g, 12000, processors);
    for (uint64_t n : {100, 5000, 3, 1024, 2049, 20000})
        q.push_back(s.add(q.size() % 2, n, q.size() % 3 ? 2 : 0));
    for (int i = 0; i < 100; i++)
        q.push_back(s.add(i % 2, 1 + rng() % 1500, 2));
    s.ready();

    auto ask = [&](size_t i) {
        request r = s.ask(q[i]);
        r.budget_pages = 8 + i % 20;
        r.sampled = i % 3 ? r.budget_pages / 2 : 0;
        r.scan = 1 + i % 4;
        if (r.scan == LK_TREE && q[i]->shift == 0)
            r.scan = LK_NESTED;
        return r;
    };
    /* captured at length 100, replayed at 5,000 and at 3 */
    {
        std::vector<request> rows = {ask(0)};
        s.stage(rows);
        cudaGraphExec_t exec = capture(s.step(1, all), 3);
        CUDA(cudaGraphLaunch(exec, NULL));
        s.collect(rows);
        s.check(rows[0], "replay at 100");
        for (size_t i : {1, 2, 5}) {
            rows = {ask(i)};
            s.stage(rows);
            CUDA(cudaGraphLaunch(exec, NULL));
            s.collect(rows);
            s.check(rows[0], "replay elsewhere");
        }
        CUDA(cudaGraphExecDestroy(exec));
    }
    /* all rows alone; then 100 of them in a bucket of 112, in another order, and in other
     * buckets */
    std::vector<request> alone;
    for (size_t i = 0; i < q.size(); i++) {
        std::vector<request> one = {ask(i)};
        s.run(one, 1);
        alone.push_back(one[0]);
    }
    std::vector<cudaGraphExec_t> graphs;
    std::vector<uint32_t> buckets = {1, 2, 4, 8, 16, 32, 64, 112, 128, 256};
    for (uint32_t b : buckets)
        graphs.push_back(capture(s.step(b, all)));
    for (size_t b = buckets.size(); b-- > 0;) {
        std::vector<request> rows;
        std::vector<size_t> order(q.size());
        for (size_t i = 0; i < order.size(); i++)
            order[i] = i;
        std::shuffle(order.begin(), order.end(), rng);
        order.resize(std::min<size_t>(order.size(), buckets[b] == 112 ? 100 : buckets[b]));
        for (size_t i : order)
            rows.push_back(alone[i]);
        for (int run = 0; run < 2; run++) {
            s.stage(rows);
            CUDA(cudaGraphLaunch(graphs[b], NULL));
            s.collect(rows, false);
            for (size_t i = 0; i < order.size(); i++)
                CHECK(same(rows[i], alone[order[i]], 128, 4),
                      "bucket %u row %zu (length %lu, scan %u): other bits than alone", buckets[b],
                      i, (unsigned long)q[order[i]]->length, rows[i].scan);
        }
    }
    for (auto e : graphs)
        CUDA(cudaGraphExecDestroy(e));
    printf("test_graph: %s\n", failures ? "FAILED" : "ok");
    return failures != 0;
}
