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

static bool same(const request &a, const request &b, uint32_t heads) {
    return a.out == b.out && !memcmp(a.lse.data(), b.lse.data(), 4 * a.lse.size()) &&
           !memcmp(a.result.data(), b.result.data(), 16 * heads) &&
           (!a.plan.scan ||
            !memcmp(a.list.data(), b.list.data(), 8 * (a.result[0].kept + a.result[0].sampled)));
}

static const uint32_t every_mode =
    1u << LK_FULL | 1u << LK_COARSE | 1u << LK_NESTED | 1u << LK_TREE;

/* Row i of any, each of another plan. */
static request ask(scene &s, const std::vector<sequence *> &q, size_t i) {
    request r = s.ask(q[i]);
    r.budget_pages = 8 + i % 20;
    r.sampled = i % 3 ? r.budget_pages / 2 : 0;
    r.scan = 1 + i % 4;
    if (r.scan == LK_TREE && q[i]->shift == 0)
        r.scan = LK_NESTED;
    return r;
}

static void replay(scene &s, cudaGraphExec_t graph, std::vector<request> &rows, bool memory) {
    s.stage(rows);
    CUDA(cudaGraphLaunch(graph, NULL));
    s.collect(rows, memory);
}

/* Captured at length 100, replayed at 5,000 and at 3. */
static void replay_elsewhere(scene &s, const std::vector<sequence *> &q) {
    std::vector<request> rows = {ask(s, q, 0)};
    s.stage(rows);
    cudaGraphExec_t graph = capture(s.step(1, every_mode), 3);
    for (size_t i : {0, 1, 2, 5}) {
        rows = {ask(s, q, i)};
        replay(s, graph, rows, true);
        s.check(rows[0], i ? "replay elsewhere" : "replay at 100");
    }
    CUDA(cudaGraphExecDestroy(graph));
}

/* `count` rows of any order in a bucket, twice, against each of them alone. */
static void replay_bucket(scene &s, const std::vector<sequence *> &q,
                          const std::vector<request> &alone, uint32_t bucket, size_t count) {
    cudaGraphExec_t graph = capture(s.step(bucket, every_mode));
    std::vector<request> rows;
    std::vector<size_t> order(q.size());

    for (size_t i = 0; i < order.size(); i++)
        order[i] = i;
    std::shuffle(order.begin(), order.end(), rng);
    order.resize(std::min(order.size(), count));
    for (size_t i : order)
        rows.push_back(alone[i]);
    for (int run = 0; run < 2; run++) {
        replay(s, graph, rows, false);
        for (size_t i = 0; i < order.size(); i++)
            CHECK(same(rows[i], alone[order[i]], s.p.view.geometry.kv_heads),
                  "bucket %u row %zu (length %lu, scan %u): other bits than alone", bucket, i,
                  (unsigned long)q[order[i]]->length, rows[i].scan);
    }
    CUDA(cudaGraphExecDestroy(graph));
}

int main(void) {
    lk_geometry g = {2, 4, 4, 128, 16, 8, LK_BF16};
    struct scene s;
    std::vector<sequence *> q;
    std::vector<request> alone;

    processors = device_or_skip();
    s.open(g, 12000, processors);
    for (uint64_t n : {100, 5000, 3, 1024, 2049, 20000})
        q.push_back(s.add(q.size() % 2, n, q.size() % 3 ? 2 : 0));
    for (int i = 0; i < 100; i++)
        q.push_back(s.add(i % 2, 1 + rng() % 1500, 2));
    s.ready();

    replay_elsewhere(s, q);
    for (size_t i = 0; i < q.size(); i++) {
        std::vector<request> one = {ask(s, q, i)};
        s.run(one, 1);
        alone.push_back(one[0]);
    }
    for (uint32_t bucket : {256, 128, 112, 64, 32, 16, 8, 4, 2, 1})
        replay_bucket(s, q, alone, bucket, bucket == 112 ? 100 : bucket);
    printf("test_graph: %s\n", failures ? "FAILED" : "ok");
    return failures != 0;
}
