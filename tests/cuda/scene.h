/* SPDX-License-Identifier: MIT */
/*
 * scene.h - sequences on the test pool, steps run on the device, and the check of a step stage by
 * stage.
 *
 * A stage is checked given what the stage before it left on the device, so that a difference in the
 * last bit of a score never hides an error of selection: scores against the decoded records, shares
 * against the scores, kept pages and sample exactly (they are integers) from the shares, the output
 * and its LSE from the pages picked.
 */
#ifndef LK_TEST_CUDA_SCENE_H
#define LK_TEST_CUDA_SCENE_H

#include <string>

#include "common.h"

struct sequence {
    uint32_t layer;
    uint64_t length;
    std::vector<uint32_t> pages; /* physical */
    std::vector<uint32_t> table; /* quads or pages */
    uint32_t shift;
    buffer<uint32_t> d_table;
};

struct request {
    sequence *seq;
    uint32_t tokens = 1, append = 1, budget_pages = 16, sampled = 0, scan = LK_FULL, exact = 0;
    uint32_t sink = 1, recent = 1;
    float mass = 0;
    bool peaked = false; /* each query head looks at one page, of a score that is its largest */
    std::vector<uint16_t> q, k, v;
    /* results */
    std::vector<float> out, lse;
    std::vector<lk_page_weight> list;
    std::vector<lk_head_out> result;
    std::vector<uint8_t> memory;
    lk_cuda_row plan;
};

enum fill_kind { FILL_TOPICS, FILL_EQUAL, FILL_LARGE };

struct scene {
    struct pool p;
    uint32_t next_page = 0, processors;
    std::vector<sequence *> sequences;
    buffer<lk_cuda_batch> d_batch;
    buffer<uint32_t> d_sync;
    buffer<uint8_t> d_memory, d_io;
    lk_cuda_batch host;

    void open(lk_geometry g, uint32_t pages, uint32_t sms) {
        processors = sms;
        p.open(g, (pages + 3) / 4 * 4);
        d_batch.make(1);
        d_sync.make(lk_cuda_sync_words(&g, 256, 64));
        CUDA(cudaMemset(d_sync.p, 0, d_sync.n * 4));
    }

    /* No more sync words than a batch of such rows needs. */
    void fit_sync(uint32_t rows, uint32_t tokens) {
        cudaFree(d_sync.p);
        d_sync.make(lk_cuda_sync_words(&p.view.geometry, rows, tokens));
        CUDA(cudaMemset(d_sync.p, 0, d_sync.n * 4));
    }

    /* A sequence of `length` tokens, keys and values written; quads in a scrambled order. */
    sequence *add(uint32_t layer, uint64_t length, uint32_t shift, int kind = FILL_TOPICS) {
        const lk_geometry &g = p.view.geometry;
        sequence *s = new sequence;
        uint32_t pages = (uint32_t)((length + g.page_tokens - 1) / g.page_tokens),
                 quads = (pages + 3) / 4;
        s->layer = layer;
        s->length = length;
        s->shift = shift;
        for (uint32_t i = 0; i < quads; i++)
            s->table.push_back(next_page / 4 + i);
        std::shuffle(s->table.begin(), s->table.end(), rng);
        for (uint32_t i = 0; i < pages; i++)
            s->pages.push_back(4 * s->table[i / 4] + i % 4);
        if (!shift)
            s->table = s->pages;
        next_page += 4 * quads;
        s->d_table.put(s->table.data(), s->table.size());
        std::vector<float> topic(g.head_dim), common(g.head_dim);
        for (auto &x : common)
            x = normal();
        for (uint32_t h = 0; h < g.kv_heads; h++)
            for (uint64_t t = 0; t < length; t++) {
                if (t % 37 == 0)
                    for (auto &x : topic)
                        x = normal();
                uint16_t *k = p.at(layer, s->pages[t / g.page_tokens], h, false, t % g.page_tokens);
                uint16_t *v = p.at(layer, s->pages[t / g.page_tokens], h, true, t % g.page_tokens);
                for (uint32_t c = 0; c < g.head_dim; c++) {
                    float x = kind == FILL_EQUAL ? common[c] : topic[c] + .5f * normal();
                    k[c] = encode(kind == FILL_LARGE ? 40 * x : x, g.dtype);
                    v[c] = encode(normal(), g.dtype);
                }
            }
        sequences.push_back(s);
        return s;
    }

    /* After all sequences are there: memory and summaries to the device. */
    void ready(void) {
        const lk_geometry &g = p.view.geometry;
        std::vector<uint64_t> pages, quads;
        buffer<uint64_t> d_pages, d_quads;
        p.upload();
        for (sequence *s : sequences) {
            uint32_t complete = s->length ? (uint32_t)((s->length - 1) / g.page_tokens) : 0;
            for (uint32_t i = 0; i < complete; i++)
                pages.push_back((uint64_t)s->layer << 48 | s->pages[i]);
            for (uint32_t i = 0; i < complete / 4; i++)
                quads.push_back((uint64_t)s->layer << 48 | s->pages[4 * i] / 4);
        }
        if (pages.empty())
            return;
        d_pages.put(pages.data(), pages.size());
        lk_cuda_build job = {p.view, d_pages.p, (uint32_t)pages.size()};
        CUDA(lk_cuda_build_pages(&job, NULL));
        if (!quads.empty()) {
            d_quads.put(quads.data(), quads.size());
            job.list = d_quads.p;
            job.count = (uint32_t)quads.size();
            CUDA(lk_cuda_build_supers(&job, NULL));
        }
        CUDA(cudaDeviceSynchronize());
        cudaFree(d_pages.p);
        cudaFree(d_quads.p);
    }

    /* Random queries and the last tokens' keys and values (as they lie in the pool already). */
    request ask(sequence *s, uint32_t tokens = 1) {
        const lk_geometry &g = p.view.geometry;
        request r;
        r.seq = s;
        r.tokens = tokens;
        r.append = (uint32_t)std::min<uint64_t>(tokens, s->length);
        r.q.resize((size_t)tokens * g.kv_heads * g.group * g.head_dim);
        for (auto &x : r.q)
            x = encode(1.5f * normal(), g.dtype);
        for (uint32_t t = 0; t < r.append; t++)
            for (uint32_t h = 0; h < g.kv_heads; h++) {
                uint64_t at = s->length - r.append + t;
                uint16_t *k =
                    p.at(s->layer, s->pages[at / g.page_tokens], h, false, at % g.page_tokens);
                uint16_t *v =
                    p.at(s->layer, s->pages[at / g.page_tokens], h, true, at % g.page_tokens);
                r.k.insert(r.k.end(), k, k + g.head_dim);
                r.v.insert(r.v.end(), v, v + g.head_dim);
            }
        return r;
    }

    size_t align(size_t x) {
        return (x + 255) / 256 * 256;
    }

    /* Lay a batch out, fill the block, copy both. -> bit mask of scan modes. */
    uint32_t stage(std::vector<request> &rows) {
        const lk_geometry &g = p.view.geometry;
        std::vector<lk_row> r(rows.size());
        size_t io = 0, memory = 0;
        uint32_t scans = 0;
        for (auto &x : rows) {
            size_t nq = (size_t)x.tokens * g.kv_heads * g.group;
            x.out.resize(nq * g.head_dim);
            x.lse.resize(nq);
            x.list.resize((size_t)g.kv_heads * x.budget_pages);
            x.result.resize(g.kv_heads);
            io += align(x.q.size() * 2) + align(x.k.size() * 2) * 2 + align(x.out.size() * 4) +
                  align(x.lse.size() * 4) + align(x.list.size() * 8) + align(x.result.size() * 16);
        }
        if (io > d_io.n) {
            cudaFree(d_io.p);
            d_io.make(io);
        }
        CUDA(cudaMemset(d_io.p, 0xff, io));
        io = 0;
        for (size_t i = 0; i < rows.size(); i++) {
            request &x = rows[i];
            lk_row &y = r[i];
            memset((void *)&y, 0, sizeof y);
            auto put = [&](const void *from, size_t bytes) {
                uint8_t *at = d_io.p + io;
                if (from && bytes)
                    CUDA(cudaMemcpy(at, from, bytes, cudaMemcpyHostToDevice));
                io += align(bytes);
                return at;
            };
            y.pool = &p.view;
            y.layer = x.seq->layer;
            y.tokens = x.tokens;
            y.length = x.seq->length;
            y.table = x.seq->d_table.p;
            y.table_shift = x.seq->shift;
            y.append = x.append;
            y.q = put(x.q.data(), x.q.size() * 2);
            y.k = put(x.k.data(), x.k.size() * 2);
            y.v = put(x.v.data(), x.v.size() * 2);
            y.out = (float *)put(NULL, x.out.size() * 4);
            y.lse = (float *)put(NULL, x.lse.size() * 4);
            y.list = (lk_page_weight *)put(NULL, x.list.size() * 8);
            y.list_pages = x.budget_pages;
            y.result = (lk_head_out *)put(NULL, x.result.size() * 16);
            y.budget_pages = x.budget_pages;
            y.budget_tokens = (uint64_t)x.budget_pages * g.page_tokens;
            y.sampled = x.sampled;
            y.sink_pages = x.sink;
            y.recent_pages = x.recent;
            y.scan = x.scan;
            y.exact = x.exact || x.seq->length <= y.budget_tokens || x.tokens != 1;
            y.mass_target = x.mass;
            y.sm_scale = 1.f / sqrtf((float)g.head_dim);
            scans |= 1u << x.scan;
            memory += align(lk_cuda_row_workspace_bytes(&y));
        }
        if (memory > d_memory.n) {
            cudaFree(d_memory.p);
            d_memory.make(memory);
        }
        CUDA(cudaMemset(d_memory.p, 0xff, memory));
        memory = 0;
        for (size_t i = 0; i < rows.size(); i++) {
            r[i].workspace = d_memory.p + memory;
            memory += align(lk_cuda_row_workspace_bytes(&r[i]));
        }
        int error = lk_cuda_fill(r.data(), (uint32_t)r.size(), &host);
        CHECK(error == 0, "fill says %d", error);
        for (size_t i = 0; i < rows.size(); i++) {
            rows[i].plan = host.row[i];
            if (host.row[i].scan) /* picks of an earlier step: the first page, again and again */
                CUDA(cudaMemset(r[i].workspace + host.row[i].picks, 0,
                                g.kv_heads * (size_t)r[i].budget_pages * sizeof(lk_cuda_pick)));
        }
        CUDA(cudaMemcpy(d_batch.p, &host, sizeof host, cudaMemcpyHostToDevice));
        return scans;
    }

    lk_cuda_step step(uint32_t bucket, uint32_t scans) {
        return {p.view, d_batch.p, d_sync.p, bucket, scans, processors};
    }

    void collect(std::vector<request> &rows, bool memory = true) {
        CUDA(cudaDeviceSynchronize());
        for (auto &x : rows) {
            CUDA(cudaMemcpy(x.out.data(), x.plan.out, x.out.size() * 4, cudaMemcpyDeviceToHost));
            CUDA(cudaMemcpy(x.lse.data(), x.plan.lse, x.lse.size() * 4, cudaMemcpyDeviceToHost));
            CUDA(cudaMemcpy(x.list.data(), x.plan.list, x.list.size() * 8, cudaMemcpyDeviceToHost));
            CUDA(cudaMemcpy(x.result.data(), x.plan.result, x.result.size() * 16,
                            cudaMemcpyDeviceToHost));
            if (memory && x.plan.scan) {
                size_t picks = (size_t)p.view.geometry.kv_heads * x.plan.budget_pages;
                x.memory.resize(x.plan.picks + picks * sizeof(lk_cuda_pick));
                CUDA(cudaMemcpy(x.memory.data(), x.plan.workspace, x.memory.size(),
                                cudaMemcpyDeviceToHost));
            }
        }
        std::vector<uint32_t> sync(d_sync.n + 64); /* and what was made behind them, untouched */
        CUDA(cudaMemcpy(sync.data(), d_sync.p, sync.size() * 4, cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < sync.size(); i++)
            if (i < d_sync.n ? i % LK_CUDA_SYNC == 0 && sync[i] : sync[i] != UINT32_MAX) {
                CHECK(false, "sync word %zu of %zu is %u after the step", i, d_sync.n, sync[i]);
                break;
            }
    }

    void run(std::vector<request> &rows, uint32_t bucket = 0) {
        uint32_t scans = stage(rows);
        lk_cuda_step s = step(bucket ? bucket : (uint32_t)rows.size(), scans);
        CUDA(lk_cuda_run(&s, NULL));
        collect(rows);
    }

    /* ---- checks ---- */

    double at(sequence *s, uint64_t t, uint32_t h, bool value, uint32_t c) {
        const lk_geometry &g = p.view.geometry;
        return decode(p.at(s->layer, s->pages[t / g.page_tokens], h, value, t % g.page_tokens)[c],
                      g.dtype);
    }

    /* Attention of query (token, head, g) over tokens below limit, weighted by page. */
    void attend_ref(request &x, uint32_t token, uint32_t h, uint32_t gq,
                    const std::vector<std::pair<uint32_t, double>> &pages, std::vector<double> *out,
                    double *lse) {
        const lk_geometry &g = p.view.geometry;
        uint32_t d = g.head_dim;
        uint64_t limit = x.seq->length - x.tokens + 1 + token;
        const uint16_t *q = &x.q[(((size_t)token * g.kv_heads + h) * g.group + gq) * d];
        std::vector<double> z;
        std::vector<uint64_t> who;
        for (auto &pw : pages)
            for (uint64_t t = (uint64_t)pw.first * g.page_tokens;
                 t < std::min<uint64_t>(limit, (uint64_t)(pw.first + 1) * g.page_tokens); t++) {
                double s = 0;
                for (uint32_t c = 0; c < d; c++)
                    s += decode(q[c], g.dtype) * at(x.seq, t, h, false, c);
                z.push_back(s / sqrt((double)d) + log(pw.second));
                who.push_back(t);
            }
        *lse = lse_ref(z);
        out->assign(d, 0);
        for (size_t i = 0; i < z.size(); i++)
            for (uint32_t c = 0; c < d; c++)
                (*out)[c] += exp(z[i] - *lse) * at(x.seq, who[i], h, true, c);
    }

    /* Head 0's scores without the bit that says whether the page competes. */
    static float untagged(float score, uint32_t head) {
        uint32_t bits;
        memcpy(&bits, &score, 4);
        bits &= head ? ~0u : ~1u;
        memcpy(&score, &bits, 4);
        return score;
    }
    std::vector<std::vector<double>> scores_of(request &x, uint32_t h) {
        const lk_geometry &g = p.view.geometry;
        uint32_t stride = lk_cuda_group_stride(g.group);
        const float *s =
            (const float *)&x.memory[x.plan.scores] + (size_t)h * x.plan.pages * stride;
        std::vector<std::vector<double>> r(g.group, std::vector<double>(x.plan.pages));
        const uint32_t slots = 1 + x.plan.chunks + x.plan.rescan_tiles + x.plan.rest_chunks;
        const float2 *newest = (const float2 *)&x.memory[x.plan.parts] + (size_t)h * slots * stride;
        for (uint32_t i = 0; i < g.group; i++) {
            for (uint32_t j = 0; j < x.plan.pages; j++)
                r[i][j] = untagged(s[(size_t)j * stride + i], i) * log(2.0);
            r[i].back() = newest[i].x * log(2.0) + log(newest[i].y); /* not rounded together */
        }
        return r;
    }
    bool competes(request &x, uint32_t h, uint32_t j) {
        uint32_t stride = lk_cuda_group_stride(p.view.geometry.group);
        return ((const uint32_t *)&x
                    .memory[x.plan.scores])[((size_t)h * x.plan.pages + j) * stride] &
               1;
    }

    /* Length of a query times that of the summary's largest key. */
    static double size_of(const summary &s, const std::vector<double> &q) {
        double key = 0, query = 0;
        for (size_t x = 0; x < q.size(); x++) {
            query += q[x] * q[x];
            key += s.mean[x] * s.mean[x];
        }
        for (size_t i = 0; i < s.v.size(); i++) {
            double top = 0, v = 0;
            for (double c : s.c[i])
                top = std::max(top, c * c);
            for (double y : s.v[i])
                v += y * y;
            key += top * v;
        }
        return sqrt(key * query);
    }

    void check_scores(request &x, uint32_t h, const char *what) {
        const lk_geometry &g = p.view.geometry;
        std::vector<std::vector<double>> got = scores_of(x, h);
        static std::vector<uint8_t> coarse, fine, super;
        lk_record rc = lk_record_coarse(&g), rf = lk_record_fine(&g), rs = lk_record_super(&g);
        double worst = 0, top = -INFINITY;
        uint32_t bad = 0, seen = 0, again = 0,
                 step = x.plan.complete > 600 ? x.plan.complete / 300 : 1;
        std::vector<std::vector<double>> q(g.group, std::vector<double>(g.head_dim)),
            first(g.group);
        auto read = [&](const buffer<uint8_t> &b, uint64_t at, uint32_t bytes) {
            std::vector<uint8_t> v(bytes);
            CUDA(cudaMemcpy(v.data(), b.p + at * bytes, bytes, cudaMemcpyDeviceToHost));
            return v;
        };
        for (uint32_t i = 0; i < g.group; i++) {
            for (uint32_t c = 0; c < g.head_dim; c++)
                q[i][c] = decode(x.q[((size_t)h * g.group + i) * g.head_dim + c], g.dtype);
            rotate_ref(q[i].data(), g.head_dim);
        }
        uint64_t plane = (uint64_t)x.seq->layer * g.kv_heads + h;
        double sm = 1 / sqrt((double)g.head_dim);
        for (uint32_t j = 0; j < x.plan.complete; j++)
            again += competes(x, h, j);
        for (uint32_t j = 0; j < x.plan.complete; j += step, seen++) {
            summary s;
            bool last = competes(x, h, j), listed = x.plan.list_max && last;
            uint32_t rank = x.scan == LK_FULL || listed ? g.rank : 2;
            if (x.scan == LK_TREE && !listed)
                decode_record(
                    read(p.d_super, plane * (p.view.pages / 4) + x.seq->pages[j] / 4, rs.stride)
                        .data(),
                    rs, &s);
            else {
                decode_record(
                    read(p.d_coarse, plane * p.view.pages + x.seq->pages[j], rc.stride).data(), rc,
                    &s);
                if (rank > 2)
                    decode_record(
                        read(p.d_fine, plane * p.view.pages + x.seq->pages[j], rf.stride).data(),
                        rf, &s);
            }
            for (uint32_t i = 0; i < g.group; i++) {
                double want =
                    score_ref(s, q[i], sm, rank) - (x.scan == LK_TREE && !listed ? log(4.0) : 0);
                double error = fabs(got[i][j] - want);
                bad += !(error <= 1e-3 + 2e-5 * size_of(s, q[i]) * sm); /* a query has 16 bits */
                if (!(error <= worst))
                    worst = error;
                top = std::max(top, want);
            }
        }
        CHECK(!bad, "%s head %u: %u of %u scores off, worst %g (largest %g)", what, h, bad,
              seen * g.group, worst, top);
        uint32_t expect =
            x.scan == LK_NESTED ? std::min(x.plan.complete, 8 * x.budget_pages)
            : x.scan == LK_TREE
                ? 4 * std::min(x.plan.complete / 4, 4 * x.budget_pages) + x.plan.complete % 4
                : x.plan.complete;
        CHECK(again == expect, "%s head %u: %u pages scored last, not %u", what, h, again, expect);
        check_prune(x, h, q, what);
        /* newest page, exact */
        for (uint32_t i = 0; i < g.group; i++) {
            std::vector<double> out;
            double want;
            attend_ref(x, 0, h, i, {{x.plan.pages - 1, 1.0}}, &out, &want);
            CHECK(fabs(got[i][x.plan.pages - 1] - want) <= 1e-3 + 1e-5 * fabs(want),
                  "%s: newest page scored %g, not %g", what, got[i][x.plan.pages - 1], want);
        }
    }

    /* No page left out of the second pass may have a first-pass share above one that was taken. */
    void check_prune(request &x, uint32_t h, const std::vector<std::vector<double>> &q,
                     const char *what) {
        const lk_geometry &g = p.view.geometry;
        uint32_t step = x.scan == LK_TREE ? 4 : 1, units = x.plan.complete / step;
        if (!x.plan.list_max || units * g.group > 40000)
            return;
        lk_record rc = x.scan == LK_TREE ? lk_record_super(&g) : lk_record_coarse(&g);
        uint64_t plane = (uint64_t)x.seq->layer * g.kv_heads + h;
        std::vector<std::vector<double>> s(g.group, std::vector<double>(units + 1));
        for (uint32_t u = 0; u < units; u++) {
            std::vector<uint8_t> v(rc.stride);
            uint64_t at = step == 4 ? plane * (p.view.pages / 4) + x.seq->pages[4 * u] / 4
                                    : plane * p.view.pages + x.seq->pages[u];
            CUDA(cudaMemcpy(v.data(), (step == 4 ? p.d_super.p : p.d_coarse.p) + at * rc.stride,
                            rc.stride, cudaMemcpyDeviceToHost));
            summary y;
            decode_record(v.data(), rc, &y);
            for (uint32_t i = 0; i < g.group; i++)
                s[i][u] = score_ref(y, q[i], 1 / sqrt((double)g.head_dim), 2);
        }
        std::vector<double> m(units + 1, 0);
        for (uint32_t i = 0; i < g.group; i++) {
            std::vector<double> out;
            attend_ref(x, 0, h, i, {{x.plan.pages - 1, 1.0}}, &out, &s[i][units]);
            double l = lse_ref(s[i]);
            for (uint32_t u = 0; u < units; u++)
                m[u] += exp(s[i][u] - l) / g.group;
        }
        double taken = INFINITY, left = 0;
        for (uint32_t u = 0; u < units; u++) {
            if (competes(x, h, u * step))
                taken = std::min(taken, m[u]);
            else
                left = std::max(left, m[u]);
        }
        CHECK(left <= taken * 1.003 + 1e-29,
              "%s head %u: prune left a share of %g and took one of %g", what, h, left, taken);
    }

    /* Pages of the list are those whose keys and values attend was told to read. */
    void check_places(request &x, uint32_t h, const char *what) {
        const uint32_t N = x.budget_pages, count = x.result[h].kept + x.result[h].sampled;
        const lk_cuda_pick *pick = (const lk_cuda_pick *)&x.memory[x.plan.picks] + (size_t)h * N;

        for (uint32_t i = 0; i < count && i < N; i++) {
            const uint32_t page = x.list[(size_t)h * N + i].page;
            if (pick[i].page == page && pick[i].physical == x.seq->pages[page])
                continue;
            CHECK(false, "%s head %u: pick %u is page %u at %u, not %u at %u", what, h, i,
                  pick[i].page, pick[i].physical, page, x.seq->pages[page]);
            break;
        }
    }

    void check_selection(request &x, uint32_t h, const char *what) {
        const lk_geometry &g = p.view.geometry;
        uint32_t P = x.plan.pages, N = x.budget_pages;
        std::vector<std::vector<double>> s = scores_of(x, h);
        const uint32_t *bits = (const uint32_t *)&x.memory[x.plan.shares] +
                               (size_t)h * x.plan.segments * x.plan.segment_pages;
        std::vector<float> share(P);
        std::vector<double> want(P, 0);
        for (uint32_t i = 0; i < g.group; i++) {
            const double peak = *std::max_element(s[i].begin(), s[i].end());
            double sum = 0; /* not its logarithm, whose rounding would outweigh what others have */
            for (double y : s[i])
                sum += exp(y - peak);
            for (uint32_t j = 0; j < P; j++)
                want[j] += exp(s[i][j] - peak) / (sum * g.group);
        }
        uint32_t bad = 0;
        for (uint32_t j = 0; j < P; j++) {
            uint32_t b = bits[j] & 0x7fffffff;
            memcpy(&share[j], &b, 4);
            bad += !(fabs(share[j] - want[j]) <=
                     (x.peaked && want[j] > 1e-3 && j + 1 < P ? 2e-6 : 1e-4) * want[j] + 1e-29);
        }
        CHECK(!bad, "%s head %u: %u of %u shares off", what, h, bad, P);
        /* kept: exactly */
        uint32_t m = std::min(x.sampled, N > 2 ? N - 2 : 0), k = N - m;
        std::vector<uint32_t> keep, order;
        auto add = [&](int64_t j) {
            if (keep.size() < k && j >= 0 && j < P &&
                std::find(keep.begin(), keep.end(), (uint32_t)j) == keep.end())
                keep.push_back((uint32_t)j);
        };
        add(P - 1);
        for (uint32_t j = 0; j < x.sink; j++)
            add(j);
        for (uint32_t j = 1; j < x.recent; j++)
            add((int64_t)P - 1 - j);
        std::set<uint32_t> forced(keep.begin(), keep.end());
        for (uint32_t j = 0; j < P; j++)
            if (!forced.count(j) && competes(x, h, j))
                order.push_back(j);
        /* Equal ones by what rounding left over, to 2^-50. Where that is the approximate
         * exponentials' own error, or float64's, either may be taken. */
        std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
            const double apart = fabs(want[a] - want[b]) / want[a];
            if (share[a] != share[b] || !share[a] || apart < 2e-16)
                return share[a] > share[b];
            if (apart > (x.peaked ? 4e-15 : 1e-6))
                return want[a] > want[b];
            return bits[a] > bits[b];
        });
        double sum = 0;
        for (uint32_t j : keep)
            sum += share[j];
        for (uint32_t j : order) {
            if (keep.size() >= k || (x.mass > 0 && keep.size() >= 4 && sum >= x.mass))
                break;
            keep.push_back(j);
            sum += share[j];
        }
        std::sort(keep.begin(), keep.end());
        /* sample: exactly */
        std::vector<std::pair<uint32_t, double>> sample;
        std::set<uint32_t> in(keep.begin(), keep.end());
        std::vector<uint32_t> rest;
        for (uint32_t j = 0; j < P; j++)
            if (!in.count(j))
                rest.push_back(j);
        if (m && rest.size() <= m)
            for (uint32_t j : rest)
                sample.push_back({j, 1.0});
        else if (m) {
            unsigned __int128 F = 0, run = 0, L = rest.size(), T;
            std::vector<unsigned __int128> f, W;
            for (uint32_t j : rest)
                f.push_back((uint64_t)floor(4294967296.0 * share[j]) + 1);
            for (auto y : f)
                F += y;
            T = 20 * L * F;
            size_t at = 0;
            for (auto y : f)
                W.push_back(19 * L * y + F);
            run = W[0];
            for (uint32_t i = 0; i < m; i++) {
                unsigned __int128 point = i * (T / m) + T / (2 * m);
                while (run <= point)
                    run += W[++at];
                if (sample.empty() || sample.back().first != rest[at])
                    sample.push_back({rest[at], 0});
                sample.back().second += (double)T / ((double)m * (double)W[at]);
            }
        }
        std::vector<std::pair<uint32_t, double>> all;
        for (uint32_t j : keep)
            all.push_back({j, 1.0});
        all.insert(all.end(), sample.begin(), sample.end());
        std::sort(all.begin(), all.end());
        CHECK(x.result[h].kept == keep.size() && x.result[h].sampled == sample.size(),
              "%s head %u: kept %u sampled %u, not %zu and %zu", what, h, x.result[h].kept,
              x.result[h].sampled, keep.size(), sample.size());
        for (size_t i = 0; i < all.size() && i < N; i++) {
            lk_page_weight w = x.list[(size_t)h * N + i];
            if (w.page != all[i].first || fabs(w.weight - all[i].second) > 1e-5 * all[i].second) {
                CHECK(false, "%s head %u: pick %zu is page %u weight %g, not %u and %g", what, h, i,
                      w.page, w.weight, all[i].first, all[i].second);
                break;
            }
        }
        check_places(x, h, what);
    }

    void check_output(request &x, const char *what, uint32_t heads) {
        const lk_geometry &g = p.view.geometry;
        uint32_t d = g.head_dim;
        double worst = 0, worst_lse = 0;
        for (uint32_t h = 0; h < g.kv_heads; h += (g.kv_heads > heads ? g.kv_heads / heads : 1)) {
            std::vector<std::pair<uint32_t, double>> pages, kept;
            std::vector<std::vector<double>> s;
            double mass = 0;
            if (x.plan.scan) {
                for (uint32_t i = 0;
                     i < x.result[h].kept + x.result[h].sampled && i < x.budget_pages; i++)
                    pages.push_back({x.list[(size_t)h * x.budget_pages + i].page,
                                     x.list[(size_t)h * x.budget_pages + i].weight});
                s = scores_of(x, h);
            } else
                for (uint32_t j = 0; j < x.plan.pages; j++)
                    pages.push_back({j, 1.0});
            for (uint32_t token = 0; token<x.tokens; token += x.tokens> 5 ? 3 : 1)
                for (uint32_t i = 0; i < g.group; i++) {
                    std::vector<double> want;
                    double lse, lse_kept, error = 0, size = 0;
                    size_t at = ((size_t)token * g.kv_heads + h) * g.group + i;
                    attend_ref(x, token, h, i, pages, &want, &lse);
                    for (uint32_t c = 0; c < d; c++) {
                        double e = x.out[at * d + c] - want[c];
                        error += e * e;
                        size += want[c] * want[c];
                    }
                    error = size > 0 ? sqrt(error / size) : sqrt(error);
                    if (!(error <= worst))
                        worst = error;
                    if (lse == -INFINITY)
                        CHECK(x.lse[at] == -INFINITY, "%s: LSE %g of no tokens", what, x.lse[at]);
                    else if (!(fabs(x.lse[at] - lse) <= worst_lse))
                        worst_lse = fabs(x.lse[at] - lse);
                    if (!x.plan.scan)
                        continue;
                    if (x.result[h].sampled) {
                        kept.clear();
                        std::set<uint32_t> drawn = sampled_of(x, h);
                        for (auto &y : pages)
                            if (!drawn.count(y.first))
                                kept.push_back(y);
                        std::vector<double> unused;
                        attend_ref(x, token, h, i, kept, &unused, &lse_kept);
                        mass += exp(lse_kept - lse) / g.group;
                    } else {
                        std::vector<double> rest;
                        std::set<uint32_t> in;
                        for (auto &y : pages)
                            in.insert(y.first);
                        for (uint32_t j = 0; j < x.plan.pages; j++)
                            if (!in.count(j))
                                rest.push_back(s[i][j]);
                        mass += 1 / (1 + exp(lse_ref(rest) - lse)) / g.group;
                    }
                }
            if (x.plan.scan)
                CHECK(fabs(x.result[h].mass - mass) <= 1e-3, "%s head %u: mass %g, not %g", what, h,
                      x.result[h].mass, mass);
            else
                CHECK(x.result[h].mass == 1 && x.result[h].flags == LK_OUT_EXACT &&
                          x.result[h].kept == x.plan.pages,
                      "%s: result of an exact row", what);
        }
        CHECK(worst <= 1e-3, "%s: output error %g", what, worst);
        CHECK(worst_lse <= 2e-3, "%s: LSE error %g", what, worst_lse);
    }
    /* Pages of the sample: those marked in the shares are kept. */
    std::set<uint32_t> sampled_of(request &x, uint32_t h) {
        const uint32_t *bits = (const uint32_t *)&x.memory[x.plan.shares] +
                               (size_t)h * x.plan.segments * x.plan.segment_pages;
        std::set<uint32_t> r;
        for (uint32_t i = 0; i < x.result[h].kept + x.result[h].sampled && i < x.budget_pages; i++)
            if (!(bits[x.list[(size_t)h * x.budget_pages + i].page] >> 31))
                r.insert(x.list[(size_t)h * x.budget_pages + i].page);
        return r;
    }

    void check(request &x, const char *what) {
        const lk_geometry &g = p.view.geometry;
        if (x.plan.scan)
            for (uint32_t h = 0; h < g.kv_heads; h++) {
                check_scores(x, h, what);
                check_selection(x, h, what);
            }
        check_output(x, what, 2);
    }

    void check_all(std::vector<request> &rows, const std::string &what) {
        for (size_t i = 0; i < rows.size(); i++)
            check(rows[i], (what + " row " + std::to_string(i)).c_str());
    }
};

#endif
