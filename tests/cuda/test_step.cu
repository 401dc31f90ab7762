/* SPDX-License-Identifier: MIT */
/* Steps against float64 by geometry, scan mode and kind of row; edge cases of DESIGN section 1. */
#include <string>

#include "scene.h"

static int processors;

static request make(struct scene &s, sequence *q, uint32_t scan, uint32_t budget, uint32_t sampled,
                    float mass = 0) {
    request r = s.ask(q);
    r.scan = scan;
    r.budget_pages = budget;
    r.sampled = sampled;
    r.mass = mass;
    return r;
}

/* One geometry: all scan modes, with and without sample, exact rows, rows of several tokens, no
 * tokens. */
static void geometry(uint32_t d, uint32_t b, uint32_t rank, uint32_t group, uint32_t dtype,
                     uint32_t pages = 200) {
    lk_geometry g = {2, 2, group, d, b, rank, dtype};
    struct scene s;
    char what[120];
    int before = failures;

    snprintf(what, sizeof what, "d %u B %u r %u G %u %s", d, b, rank, group,
             dtype == LK_BF16 ? "bf16" : "fp16");
    if (skipped(g, processors))
        return;
    s.open(g, 3 * pages + 40, processors);
    sequence *quads = s.add(1, (uint64_t)pages * b - 3, 2),
             *singles = s.add(0, (uint64_t)pages * b, 0), *small = s.add(1, b + 1, 2);
    sequence *none = s.add(0, 0, 2),
             *large = s.add(0, (uint64_t)(pages / 2) * b + 1, 2, FILL_LARGE);
    none->table.push_back(0);
    none->d_table.put(none->table.data(), 1);
    s.ready();
    std::vector<request> rows;
    rows.push_back(make(s, quads, LK_FULL, 12, 0));
    rows.push_back(make(s, singles, LK_FULL, 24, 12));
    rows.push_back(make(s, small, LK_FULL, 8, 0));
    rows.push_back(s.ask(none, 1));
    rows.push_back(make(s, quads, LK_COARSE, 9, 4));
    rows.push_back(make(s, quads, LK_NESTED, 4, 1));
    rows.push_back(make(s, singles, LK_NESTED, 6, 0));
    rows.push_back(make(s, quads, LK_TREE, 5, 2));
    rows.push_back(make(s, singles, LK_FULL, 30, 0, .5f));
    rows.push_back(make(s, quads, LK_FULL, 40, 20, .9f));
    rows.push_back(s.ask(singles, 3));
    rows.push_back(s.ask(quads, 13));
    rows.push_back(make(s, large, LK_FULL, 10, 4));
    rows.push_back(make(s, large, LK_TREE, 3, 0));
    s.run(rows, 16);
    s.check_all(rows, what);
    printf("%s: %s\n", what, failures == before ? "ok" : "FAILED");
    s.p.close();
}

/* Small budgets, equal keys and scores, lengths at a page's edge, recent and sink pages. many: of
 * the sequence of equal keys. */
static void edges(uint32_t many_pages) {
    lk_geometry g = {1, 2, 4, 128, 16, 8, LK_BF16};
    struct scene s;
    std::vector<request> rows;

    if (skipped(g, processors))
        return;
    s.open(g, many_pages + 600, processors);
    sequence *equal = s.add(0, 16 * 60, 2, FILL_EQUAL),
             *many = s.add(0, 16ull * many_pages + 5, 2, FILL_EQUAL);
    sequence *edge = s.add(0, 16 * 128, 2), *over = s.add(0, 16 * 17, 2), *one = s.add(0, 1, 2),
             *exact = s.add(0, 16 * 16, 2);
    s.ready();
    rows.push_back(make(s, equal, LK_FULL, 20, 8));
    rows.push_back(make(s, equal, LK_NESTED, 5, 0));
    rows.push_back(make(s, equal, LK_TREE, 5, 1));
    rows.push_back(make(s, many, LK_FULL, 128, 64));
    rows.push_back(make(s, many, LK_TREE, 128, 64));
    rows.push_back(make(s, many, LK_NESTED, 64, 0));
    rows.push_back(make(s, edge, LK_FULL, 1, 0));
    rows.push_back(make(s, edge, LK_FULL, 2, 2));
    rows.push_back(make(s, edge, LK_FULL, 3, 3));
    rows.push_back(make(s, edge, LK_FULL, 127, 60));
    rows.push_back(make(s, over, LK_FULL, 16, 0));
    rows.push_back(make(s, over, LK_NESTED, 16, 8));
    rows.push_back(make(s, over, LK_TREE, 16, 14));
    rows.push_back(make(s, over, LK_FULL, 16, 14, .1f));
    rows.push_back(make(s, one, LK_FULL, 4, 0));
    rows.push_back(make(s, exact, LK_FULL, 16, 0));
    request r = make(s, edge, LK_FULL, 12, 3);
    r.sink = 4;
    r.recent = 5;
    rows.push_back(r);
    r.sink = 20;
    r.recent = 0;
    rows.push_back(r);
    r.append = 0; /* attend without append */
    r.sink = 0;
    rows.push_back(r);
    s.run(rows, 32);
    s.check_all(rows, "edges");
    s.p.close();
}

/* Each query head has one page, and those pages' shares are equal as floats: which of them are kept
 * what each head leaves to all others decides. */
static void peaked(uint32_t seed) {
    lk_geometry g = {1, 1, 4, 128, 16, 8, LK_BF16};
    const uint32_t pages = 160;
    struct scene s;
    std::vector<request> rows;

    if (skipped(g, processors))
        return;
    rng.seed(seed);
    s.open(g, pages + 8, processors);
    sequence *q = s.add(0, 16 * pages - 5, 2);
    s.ready();
    for (uint32_t i = 0; i < 18; i++) {
        request r = make(s, q, i % 3 ? LK_FULL : i % 2 ? LK_NESTED : LK_TREE, 4 + i % 2, 0);
        r.peaked = true;
        for (uint32_t h = 0; h < 4; h++) {
            const uint32_t at = 16 * (2 + (uint32_t)(rng() % (pages - 4))) + 8;
            const uint16_t *key = s.p.at(0, q->pages[at / 16], 0, false, at % 16);
            const float factor = 22 + 3 * normal();
            for (uint32_t c = 0; c < 128; c++)
                r.q[h * 128 + c] = encode(factor * decode(key[c], g.dtype), g.dtype);
        }
        rows.push_back(r);
    }
    s.run(rows);
    s.check_all(rows, "peaked");
    s.p.close();
}

/* A row of which each warp of a block of select has more groups of pages than lanes, since a head
 * gets one block; in shared memory, and where its words do not fit there. Nothing is summarised:
 * records of zeros, so that what is kept lies far apart, the first pages and the newest. */
static void long_spans(void) {
    for (uint32_t pages : {17400, 33000}) {
        lk_geometry g = {1, 1, 1, 64, 8, 2, LK_FP16};
        struct scene s;
        std::vector<request> rows;

        s.open(g, pages + 60, 1);
        sequence *q = s.add(0, pages * 8ull - 3, 2);
        s.p.upload();
        CUDA(cudaMemset(s.p.d_coarse.p, 0, s.p.d_coarse.n));
        rows.push_back(make(s, q, LK_FULL, 64, 30));
        s.run(rows);
        s.check_places(rows[0], 0, "long spans");
        s.p.close();
    }
}

/* A query that is no number: so are its output and its LSE, and its head reports no mass; other
 * heads have the same bits as without. */
static void no_number(uint32_t d) {
    lk_geometry g = {1, 2, 4, d, 16, 8, LK_BF16};
    const size_t half = 4 * d; /* values of a KV head's queries */
    struct scene s;
    std::vector<request> rows;

    s.open(g, 100, processors);
    sequence *q = s.add(0, 16 * 60 + 9, 2);
    s.ready();
    rows.push_back(make(s, q, LK_FULL, 12, 4));
    rows.push_back(make(s, q, LK_FULL, 12, 0));
    rows.push_back(make(s, q, LK_TREE, 4, 1));
    rows.push_back(s.ask(q));
    rows.back().exact = 1;
    rows.push_back(s.ask(q, 3));
    s.run(rows);
    std::vector<request> spoiled = rows;
    for (request &r : spoiled)
        r.q[7] = 0x7fc0;
    s.run(spoiled);
    for (size_t i = 0; i < rows.size(); i++) {
        const request &r = rows[i], &x = spoiled[i];
        const float mass = x.result[0].mass, expected = x.plan.scan ? 0.f : 1.f;
        CHECK(mass == expected, "row %zu: a mass of %g", i, mass);
        CHECK(std::isnan(x.lse[0]) && std::isnan(x.out[0]) && std::isnan(x.out[d - 1]),
              "row %zu: LSE %g, out %g", i, x.lse[0], x.out[0]);
        CHECK(!memcmp(&r.out[half], &x.out[half], half * 4) && !memcmp(&r.lse[4], &x.lse[4], 16) &&
                  r.result[1].mass == x.result[1].mass,
              "row %zu: another head has other bits", i);
    }
    s.p.close();
}

/* Rows of many queries, cut into fewer slices than they might; a budget that no scored row may
 * have, on a row that is not scored; no sync word more than needed. */
static void many_queries(uint32_t head_dim, uint32_t page_tokens, uint32_t dtype, uint32_t tokens) {
    lk_geometry g = {1, 2, 32, head_dim, page_tokens, 8, dtype};
    struct scene s;
    std::vector<request> rows;

    s.open(g, 16 * 80 / page_tokens, processors);
    sequence *one = s.add(0, 16 * 60 + 9, 2), *two = s.add(0, 70, 0);
    s.ready();
    rows.push_back(s.ask(one, tokens));
    rows.push_back(s.ask(two, tokens / 2 + 1));
    rows.push_back(make(s, two, LK_FULL, 2 * LK_CUDA_BUDGET_PAGES_MAX, 0));
    rows.back().exact = 1;
    s.fit_sync((uint32_t)rows.size(), tokens);
    s.run(rows);
    CHECK(rows[0].plan.slices > 1 && (tokens < 64 || rows[0].plan.slices == 2),
          "%u slices of %u tiles", rows[0].plan.slices, rows[0].plan.tiles);
    for (request &r : rows)
        s.check_output(r, "many queries", 2);
    s.p.close();
}

/* With heads and pages that lie in slots in each of their ways. */
static void many_queries(void) {
    many_queries(64, 16, LK_BF16, 64);
    many_queries(128, 8, LK_FP16, 3);
    many_queries(128, 32, LK_BF16, 2);
}

/* Rows of which several blocks merge bands, as many as there are: the bits do not tell. */
static void merged_by_several(uint32_t kv_heads, uint32_t d) {
    lk_geometry g = {1, kv_heads, 4, d, 16, 8, LK_BF16};
    struct scene s;

    if (skipped(g, processors))
        return;
    s.open(g, 420, processors);
    sequence *one = s.add(0, 16 * 200 - 5, 2), *two = s.add(0, 16 * 150 + 3, 2);
    s.ready();
    for (uint32_t tokens : {16, 5}) {
        const std::vector<request> asked = {s.ask(one, tokens), s.ask(two, tokens)};
        std::vector<request> first;
        for (int blocks : {processors, 5, 1}) {
            std::vector<request> rows = asked;
            s.processors = blocks;
            s.run(rows);
            if (first.empty())
                first = rows;
            for (size_t i = 0; i < rows.size(); i++) {
                CHECK(rows[i].plan.slices > 8 && rows[i].plan.bands > 2, "%u slices of %u bands",
                      rows[i].plan.slices, rows[i].plan.bands);
                CHECK(first[i].out == rows[i].out && first[i].lse == rows[i].lse,
                      "row %zu, %u tokens: other bits by %d blocks", i, tokens, blocks);
            }
        }
        for (request &r : first) {
            CHECK(r.out.size() == kv_heads * 4 * d * tokens, "%zu numbers", r.out.size());
            s.check_output(r, "merged by several", kv_heads);
        }
    }
    s.p.close();
}

static void merged_by_several(void) {
    merged_by_several(1, 128);
    merged_by_several(2, 64);
}

/* Exact rows so long that a block walks many times over what it holds of them at once. */
static void long_exact(void) {
    for (uint32_t page_tokens : {8, 64}) {
        lk_geometry g = {1, 1, 4, 64, page_tokens, 8, LK_BF16};
        const uint64_t length = 70001;
        struct scene s;
        std::vector<request> rows;

        s.open(g, (uint32_t)(length / page_tokens) + 80, processors);
        sequence *q = s.add(0, length, 2);
        s.ready();
        for (uint32_t tokens : {1, 3, 16})
            rows.push_back(s.ask(q, tokens));
        rows[0].exact = 1;
        s.run(rows);
        for (request &r : rows) {
            CHECK(r.plan.slice_tiles > 32, "%u tiles a slice", r.plan.slice_tiles);
            s.check_output(r, "long exact", 1);
        }
        s.p.close();
    }
}

/* Exact rows of several bands: a step that serves scored rows too has the same bits. */
static void beside_scored(void) {
    for (uint32_t group : {4, 12, 24}) {
        lk_geometry g = {1, 1, group, 128, 16, 8, LK_BF16};
        struct scene s;
        std::vector<request> rows;

        if (skipped(g, processors))
            continue;
        s.open(g, 80, processors);
        sequence *q = s.add(0, 16 * 60 + 9, 2);
        s.ready();
        for (uint32_t tokens : {1, 3, 5, 20})
            rows.push_back(s.ask(q, tokens));
        rows[0].exact = 1;
        s.run(rows);
        std::vector<request> alone = rows;
        s.stage(alone);
        lk_cuda_step step = s.step((uint32_t)rows.size(), 0);
        CUDA(lk_cuda_run(&step, NULL));
        s.collect(alone);
        for (size_t i = 0; i < rows.size(); i++)
            CHECK(rows[i].out == alone[i].out && rows[i].lse == alone[i].lse,
                  "G %u, %u tokens: other bits beside scored rows", group, rows[i].tokens);
        s.p.close();
    }
}

/* Emulated devices lend a block so much; the others what they have. */
static void lend(const std::string &kib) {
    setenv("LK_EMULATED_SHARED", kib.c_str(), 1);
}

/* With other shared memory a step has the same bits, but for rows of many queries, which then have
 * one tile to a softmax, not two, or where not even that fits are attended to by the plain kernel.
 * Where the least is there kernels run, and with a KiB less they are refused. */
static void other_shared(void) {
    const char *text = getenv("LK_EMULATED_SHARED");
    const std::string before = text ? text : "";
    lk_geometry g = {1, 1, 8, 64, 16, 16, LK_BF16};
    struct scene s;
    std::vector<request> rows;

    s.open(g, 200, processors);
    sequence *q = s.add(0, 16 * 150 + 9, 2);
    s.ready();
    for (uint32_t scan : {LK_FULL, LK_COARSE, LK_NESTED, LK_TREE})
        rows.push_back(make(s, q, scan, 10, 4));
    rows.push_back(s.ask(q, 9));
    s.run(rows);
    std::vector<request> again = rows;
    lend(before == "99" ? "227" : "99");
    s.run(again);
    s.check_output(again.back(), "with other shared memory", 2);
    for (size_t i = 0; i + 1 < rows.size(); i++)
        CHECK(rows[i].out == again[i].out && rows[i].lse == again[i].lse &&
                  rows[i].memory == again[i].memory,
              "row %zu: other bits with other shared memory", i);
    s.p.close();
    for (uint32_t d : {64, 80, 128, 192, 256})
        for (uint32_t b : {8, 16, 32, 64}) {
            g = {1, 1, 4, d, b, b / 2 < 16 ? b / 2 : 16, LK_BF16};
            const uint32_t kib = (lk_cuda_shared_least(&g) + 1023) / 1024;
            lend(std::to_string(kib));
            CHECK(!refused(g, 1), "d %u B %u: refused with %u KiB", d, b, kib);
            lend(std::to_string(kib - 1));
            CHECK(refused(g, 1) || lent_bytes() >= kib << 10, "d %u B %u: not refused with %u KiB",
                  d, b, kib - 1);
        }
    lend(before);
}

/* The appended token lies in its page, and nothing else of the pool has changed. */
static void append(void) {
    lk_geometry g = {2, 3, 2, 64, 16, 4, LK_FP16};
    struct scene s;

    s.open(g, 64, processors);
    sequence *a = s.add(1, 100, 2), *b = s.add(0, 41, 0);
    s.ready();
    request x = s.ask(a, 5), y = s.ask(b, 1);
    for (auto *v : {&x.k, &x.v, &y.k, &y.v})
        for (auto &e : *v)
            e = encode(normal(), g.dtype);
    std::vector<request> rows = {x, y};
    s.run(rows);
    for (request &r : rows)
        for (uint32_t t = 0; t < r.append; t++)
            for (uint32_t h = 0; h < g.kv_heads; h++) {
                uint64_t at = r.seq->length - r.append + t;
                memcpy(s.p.at(r.seq->layer, r.seq->pages[at / 16], h, false, at % 16),
                       &r.k[((size_t)t * 3 + h) * 64], 128);
                memcpy(s.p.at(r.seq->layer, r.seq->pages[at / 16], h, true, at % 16),
                       &r.v[((size_t)t * 3 + h) * 64], 128);
            }
    CHECK(s.p.d_kv.get() == s.p.kv, "append wrote something else");
    for (request &r : rows)
        s.check_output(r, "append", 3);
    /* by slot, and a copy */
    std::vector<uint64_t> slots = {5, UINT64_MAX, 16 * 9 + 15};
    std::vector<uint16_t> k(3 * 3 * 64), v(3 * 3 * 64);
    buffer<uint64_t> d_slots;
    buffer<uint16_t> d_k, d_v;
    for (size_t i = 0; i < k.size(); i++)
        k[i] = encode(normal(), g.dtype), v[i] = encode(normal(), g.dtype);
    d_slots.put(slots.data(), 3);
    d_k.put(k.data(), k.size());
    d_v.put(v.data(), v.size());
    lk_write w = {&s.p.view, 1, 3, d_k.p, d_v.p, d_slots.p};
    CUDA(lk_cuda_write(&w, NULL));
    buffer<lk_cuda_copy_item> d_copy;
    lk_cuda_copy_item copy = {4, 20, 1, 1};
    d_copy.put(&copy, 1);
    CUDA(lk_cuda_copy(&s.p.view, d_copy.p, 1, NULL));
    CUDA(cudaDeviceSynchronize());
    for (int i : {0, 2})
        for (uint32_t h = 0; h < 3; h++) {
            memcpy(s.p.at(1, slots[i] / 16, h, false, slots[i] % 16), &k[(i * 3 + h) * 64], 128);
            memcpy(s.p.at(1, slots[i] / 16, h, true, slots[i] % 16), &v[(i * 3 + h) * 64], 128);
        }
    for (uint32_t h = 0; h < 3; h++)
        memcpy(s.p.at(1, 20, h, false, 0), s.p.at(1, 4, h, false, 0), s.p.view.layout.head_bytes);
    CHECK(s.p.d_kv.get() == s.p.kv, "write or copy went astray");
    s.p.close();
}

/* What needs little, of any device. */
static void ways(void) {
    append();
    beside_scored();
    no_number(128);
    no_number(80);
}

/* Every way through the kernels at least once, with as little as possible: for where a device is
 * emulated. */
static void small(void) {
    ways();
    geometry(128, 16, 8, 4, LK_BF16, 64);
    geometry(64, 8, 2, 9, LK_FP16, 64);
    geometry(96, 16, 4, 3, LK_BF16, 48);
    geometry(256, 8, 8, 12, LK_FP16, 48);
    edges(200);
    peaked(1);
    peaked(18); /* of row 8 two pages differ by float64's noise alone */
    long_spans();
    many_queries();
    other_shared();
}

static void all(void) {
    for (uint32_t d : {64, 80, 96, 112, 192, 256})
        geometry(d, 16, 8, 4, d == 64 || d == 96 ? LK_FP16 : LK_BF16);
    for (uint32_t b : {8, 16, 32, 64})
        for (uint32_t r : {2, 4, 8, 16})
            if (r <= b)
                geometry(128, b, r, 4, LK_BF16, 90);
    for (uint32_t group : {1, 2, 3, 5, 7, 8, 12, 16, 32})
        geometry(group % 2 ? 64 : 128, 16, 8, group, LK_BF16, 90);
    geometry(64, 8, 4, 9, LK_FP16, 90);
    geometry(80, 32, 16, 8, LK_FP16, 90);
    geometry(256, 64, 8, 8, LK_FP16, 90);
}

/* [--quick | --small | --merged]; merged: where an emulator runs several blocks together */
int main(int argc, char **argv) {
    const char *how = argc > 1 ? argv[1] : "";

    processors = device_or_skip();
    if (!strcmp(how, "--merged")) {
        merged_by_several();
    } else if (!strcmp(how, "--small")) {
        small();
    } else {
        ways();
        geometry(128, 16, 8, 4, LK_BF16);
        if (strcmp(how, "--quick"))
            all();
        edges(16384);
        for (uint32_t seed = 0; seed < 40; seed++)
            peaked(seed);
        long_spans();
        long_exact();
        many_queries();
        merged_by_several();
        merged_by_several(1, 256);
    }
    printf("test_step: %s\n", failures ? "FAILED" : "ok");
    return failures != 0;
}
