/* SPDX-License-Identifier: MIT */
/*
 * replay.cu - locks-replay by the kernels alone: no daemon, no engine, and where they are emulated
 * no device. For check-oracle.sh, so that what they choose is held against the reference anywhere.
 *
 * Options are those of locks-replay; of them --trace, --out, --layers, --budget, --sampled, --mass,
 * --scan, --rank and --page-tokens count. $LK_REPLAY_STEPS: every so many-th step alone (default
 * 1); of the others --out says nothing.
 */
#include "scene.h"

extern "C" {
#include "../../clients/replay/replay.h"
}

#define BATCH 4 /* rows of a step, of as many lengths */

struct player {
    const replay_options *options;
    const replay_trace *trace;
    uint32_t steps, pages, sampled; /* each so many-th; of the budget */
};

/* The trace's tokens, as far as they are in pages. */
static sequence *load(scene *s, const replay_trace &t, const replay_layer &layer) {
    const lk_geometry &g = s->p.view.geometry;
    sequence *q = s->add(0, t.tokens, 2, FILL_EQUAL);

    for (uint64_t i = 0; i < t.tokens; i++)
        for (uint32_t h = 0; h < g.kv_heads; h++)
            for (int v = 0; v < 2; v++)
                memcpy(s->p.at(0, q->pages[i / g.page_tokens], h, v, i % g.page_tokens),
                       (v ? layer.v : layer.k) + i * t.kv_bytes + h * g.head_dim * 2,
                       g.head_dim * 2);
    s->ready();
    return q;
}

static void keep(const player &p, const std::vector<request> &rows, uint64_t first,
                 const struct replay_run &run, replay_result *to) {
    const replay_trace &t = *p.trace;
    for (size_t i = 0; i < rows.size(); i++)
        for (uint32_t h = 0; h < t.kv_heads; h++) {
            const request &r = rows[i];
            const uint64_t at = (first + i * p.steps) * t.kv_heads + h;
            const size_t values = (size_t)t.group * t.head_dim;
            memcpy(to->out + at * values, &r.out[h * values], values * sizeof(float));
            to->heads[at].kept = r.result[h].kept;
            to->heads[at].sampled = r.result[h].sampled;
            to->heads[at].mass = r.result[h].mass;
            for (uint32_t j = 0; j < p.pages; j++) {
                const lk_page_weight &w = r.list[(size_t)h * p.pages + j];
                to->list[at * run.room + j] = {w.page, w.weight};
            }
        }
}

static void play(const player &p, const replay_layer &layer, const struct replay_run &run,
                 replay_result *to) {
    const replay_trace &t = *p.trace;
    lk_geometry g = {
        1, t.kv_heads, t.group, t.head_dim, p.options->page_tokens, p.options->rank, t.dtype};
    scene s;
    std::vector<request> rows;

    s.open(g, (uint32_t)(t.tokens / g.page_tokens) + 8, device_or_skip());
    sequence *all = load(&s, t, layer);
    std::vector<sequence> then(BATCH, *all);
    for (uint64_t i = 0; i < t.steps; i += p.steps) {
        sequence *q = &then[rows.size()];
        q->length = t.tokens - t.steps + i + 1;
        request r = s.ask(q);
        memcpy(r.q.data(), layer.q + i * t.q_bytes, t.q_bytes);
        r.budget_pages = p.pages;
        r.sampled = p.sampled;
        r.scan = p.options->scan;
        r.mass = (float)p.options->mass;
        rows.push_back(r);
        if (rows.size() < BATCH && i + p.steps < t.steps)
            continue;
        s.run(rows);
        keep(p, rows, i - (rows.size() - 1) * p.steps, run, to);
        rows.clear();
    }
    s.p.close();
}

/* By default half of it from LK_AUTO_SAMPLED_PAGES on, else none; with room for the sink and the
 * newest page. */
static uint32_t sampled_of(const replay_options &o, uint32_t pages) {
    const int64_t automatic = pages >= LK_AUTO_SAMPLED_PAGES ? pages / 2 : 0;
    const int64_t asked = o.sampled >= 0 ? o.sampled : automatic;
    return (uint32_t)std::max<int64_t>(0, std::min<int64_t>(asked, (int64_t)pages - 2));
}

int main(int argc, char **argv) {
    static char why[REPLAY_WHY_BYTES];
    static replay_options options;
    replay_trace trace = {};
    lk_output output = {};
    int rc = replay_options_parse(argc, argv, &options, why);

    if (!rc)
        rc = replay_trace_open(&options, &trace, why);
    if (!rc)
        rc = replay_out_open(&options, &output, why);
    if (rc) {
        fprintf(stderr, "replay: %s\n", why);
        return rc;
    }
    const char *each = getenv("LK_REPLAY_STEPS");
    const uint32_t pages = options.budget / options.page_tokens;
    player p = {&options, &trace, each ? (uint32_t)atoi(each) : 1, pages,
                sampled_of(options, pages)};
    std::vector<replay_result> layers(trace.layer_count);
    struct replay_run run = {layers.data(), trace.layer_count, pages, p.sampled != 0, 0};
    const uint64_t heads = trace.steps * trace.kv_heads;
    for (uint32_t i = 0; i < trace.layer_count; i++) {
        layers[i].out = (float *)calloc(heads * trace.group * trace.head_dim, sizeof(float));
        layers[i].heads = (lk_head_result *)calloc(heads, sizeof(lk_head_result));
        layers[i].list = (lk_page_entry *)calloc(heads * pages, sizeof(lk_page_entry));
        play(p, trace.layers[i], run, &layers[i]);
    }
    rc = replay_out_write(&options, &trace, &run, &output, why);
    if (rc)
        fprintf(stderr, "replay: %s\n", why);
    return rc ? rc : failures != 0;
}
