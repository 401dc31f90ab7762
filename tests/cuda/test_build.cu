/* SPDX-License-Identifier: MIT */
/* Summaries built on the device against float64, by geometry and kind of page. */
#include "common.h"

enum kind { RANDOM, LOW_RANK, OFFSET, HUGE_KEYS, TINY_KEYS, EQUAL, TWO, REPEATED, OUTLIER, KINDS };
static const char *names[] = {"random", "low rank",     "offset",   "huge",   "tiny",
                              "equal",  "two distinct", "repeated", "outlier"};

static void fill(std::vector<std::vector<double>> &k, int kind, uint32_t dtype) {
    size_t n = k.size(), d = k[0].size();
    std::vector<std::vector<double>> basis(3, std::vector<double>(d));
    for (auto &b : basis)
        for (auto &x : b)
            x = normal();
    double size = dtype == LK_BF16 ? 1e18 : 800, tiny = dtype == LK_BF16 ? 1e-30 : 2e-6;
    for (size_t t = 0; t < n; t++) {
        double a[3] = {3 * normal(), normal(), .3 * normal()};
        for (size_t c = 0; c < d; c++) {
            double x = normal(),
                   low = a[0] * basis[0][c] + a[1] * basis[1][c] + a[2] * basis[2][c] + .1 * x;
            switch (kind) {
            case RANDOM:
                k[t][c] = x;
                break;
            case LOW_RANK:
                k[t][c] = low;
                break;
            case OFFSET:
                k[t][c] = low + (c == 3 || c == d - 7 ? 600 : 0);
                break;
            case HUGE_KEYS:
                k[t][c] = low * size;
                break;
            case TINY_KEYS:
                k[t][c] = low * tiny;
                break;
            case EQUAL:
                k[t][c] = basis[0][c];
                break;
            case TWO:
                k[t][c] = basis[t % 2][c];
                break;
            case REPEATED:
                k[t][c] = c == t % d ? 4 : 0;
                break;
            default:
                k[t][c] = t == 2 ? 30 * x : .5 * x;
            }
            k[t][c] = decode(encode((float)k[t][c], dtype), dtype);
        }
    }
}

static void compare(const summary &got, const summary &want,
                    const std::vector<std::vector<double>> &keys, uint32_t rank, int kind,
                    const char *what) {
    size_t n = keys.size(), d = keys[0].size();
    double mine = 0, theirs = 0, size = 0, worst = 0, moved = 0, far = 0, codes = 0;
    for (size_t t = 0; t < n; t++) {
        std::vector<double> k = keys[t];
        rotate_ref(k.data(), (uint32_t)d);
        for (size_t c = 0; c < d; c++) {
            double a = got.mean[c], b = want.mean[c];
            for (uint32_t i = 0; i < rank; i++) {
                a += got.c[i][t] * got.v[i][c];
                b += want.c[i][t] * want.v[i][c];
            }
            mine += (a - k[c]) * (a - k[c]);
            theirs += (b - k[c]) * (b - k[c]);
            size += k[c] * k[c];
        }
    }
    CHECK(sqrt(mine) <= 1.002 * sqrt(theirs) + 1e-6 * sqrt(size),
          "%s %s: error of reconstruction %g, reference %g, size %g", what, names[kind], sqrt(mine),
          sqrt(theirs), sqrt(size));
    if (kind == RANDOM || kind == LOW_RANK || kind == OFFSET || kind == OUTLIER)
        for (uint32_t i = 0; i < rank; i++)
            for (size_t c = 0; c < d; c++, codes++) {
                moved += got.v[i][c] != want.v[i][c];
                far += fabs(got.v[i][c] - want.v[i][c]) > 1;
            }
    double norm = sqrt(size / n);
    for (int x = 0; x < 4; x++) {
        std::vector<double> q(d);
        double sm = 1;
        for (auto &y : q)
            y = normal();
        sm = norm > 0 ? 6 / norm : 1;
        rotate_ref(q.data(), (uint32_t)d);
        worst = std::max(worst, fabs(score_ref(got, q, sm, rank) - score_ref(want, q, sm, rank)));
    }
    if (kind != REPEATED && far == 0) /* which of equal directions are kept is anyone's choice */
        CHECK(worst <= 0.05, "%s %s: a score differs by %g (codes moved %g of %g)", what,
              names[kind], worst, moved, codes);
    CHECK(far <= .02 * codes, "%s %s: %g of %g basis codes differ by more than one", what,
          names[kind], far, codes);
    if (moved > .01 * codes && codes > 0)
        printf("  note %s %s: %.2f%% of basis codes differ by one\n", what, names[kind],
               100 * moved / codes);
}

/* Every third page again, backwards: bytes are the same whatever is built beside. */
static void compare_rebuilt(struct pool &p, const std::vector<uint64_t> &list, const char *what) {
    const std::vector<uint8_t> coarse = p.d_coarse.get(), fine = p.d_fine.get();
    const lk_record rc = lk_record_coarse(&p.view.geometry), rf = lk_record_fine(&p.view.geometry);
    std::vector<uint64_t> some;
    buffer<uint64_t> d_some;
    for (size_t i = list.size(); i-- > 0;)
        if (i % 3 == 0)
            some.push_back(list[i]);
    d_some.put(some.data(), some.size());
    CUDA(cudaMemset(p.d_coarse.p, 0xff, p.d_coarse.n));
    CUDA(cudaMemset(p.d_fine.p, 0xff, p.d_fine.n));
    lk_cuda_build job = {p.view, d_some.p, (uint32_t)some.size()};
    CUDA(lk_cuda_build_pages(&job, NULL));
    CUDA(cudaDeviceSynchronize());
    const std::vector<uint8_t> again = p.d_coarse.get(), fine_again = p.d_fine.get();
    for (uint64_t item : some)
        for (uint32_t head = 0; head < p.view.geometry.kv_heads; head++) {
            const uint64_t plane = (item >> 48) * p.view.geometry.kv_heads + head,
                           at = plane * p.view.pages + (item & 0xffffffffffffull);
            CHECK(!memcmp(&coarse[at * rc.stride], &again[at * rc.stride], rc.stride) &&
                      (!rf.stride ||
                       !memcmp(&fine[at * rf.stride], &fine_again[at * rf.stride], rf.stride)),
                  "%s: page %d of head %u", what, (int)item, head);
        }
    cudaFree(d_some.p);
}

static int processors;

static void run(uint32_t d, uint32_t b, uint32_t r, uint32_t dtype, bool wide) {
    lk_geometry g = {2, 3, 4, d, b, r, dtype};
    struct pool p;
    const uint32_t quads = KINDS;
    std::vector<std::vector<std::vector<double>>> all;
    char what[80];

    if (skipped(g, processors))
        return;
    p.open(g, 4 * quads);
    snprintf(what, sizeof what, "d %u B %u r %u %s", d, b, r, dtype == LK_BF16 ? "bf16" : "fp16");
    for (uint32_t page = 0; page < 4 * quads; page++)
        for (uint32_t head = 0; head < 3; head++) {
            std::vector<std::vector<double>> k(b, std::vector<double>(d));
            fill(k, page % KINDS, dtype);
            for (uint32_t t = 0; t < b; t++)
                for (uint32_t c = 0; c < d; c++)
                    p.at(1, page, head, false, t)[c] = encode((float)k[t][c], dtype);
            all.push_back(k);
        }
    p.upload();
    std::vector<uint64_t> list(4 * quads);
    for (size_t i = 0; i < list.size(); i++)
        list[i] = 1ull << 48 | i;
    buffer<uint64_t> d_list;
    d_list.put(list.data(), list.size());
    lk_cuda_build job = {p.view, d_list.p, 4 * quads};
    CUDA(lk_cuda_build_pages(&job, NULL));
    job.count = quads;
    CUDA(lk_cuda_build_supers(&job, NULL));
    CUDA(cudaDeviceSynchronize());
    std::vector<uint8_t> coarse = p.d_coarse.get(), fine = p.d_fine.get(), super = p.d_super.get();
    lk_record rc = lk_record_coarse(&g), rf = lk_record_fine(&g), rs = lk_record_super(&g);
    for (uint32_t page = 0; page < (wide ? 4 * quads : 2 * quads); page++)
        for (uint32_t head = 0; head < 3; head += 2) {
            uint64_t at = (uint64_t)(1 * 3 + head) * 4 * quads + page;
            summary got;
            decode_record(&coarse[at * rc.stride], rc, &got);
            if (r > 2)
                decode_record(&fine[at * rf.stride], rf, &got);
            compare(got, build_ref(all[page * 3 + head], r), all[page * 3 + head], r, page % KINDS,
                    what);
        }
    compare_rebuilt(p, list, what);
    strcat(what, " super");
    for (uint32_t quad = 0; quad < (b >= 32 ? 2 : 5); quad++) {
        std::vector<std::vector<double>> k;
        for (int x = 0; x < 4; x++)
            for (auto &t : all[(4 * quad + x) * 3 + 1])
                k.push_back(t);
        summary got;
        decode_record(&super[((uint64_t)(1 * 3 + 1) * quads + quad) * rs.stride], rs, &got);
        double most = 0;
        for (auto &t : k)
            for (double x : t)
                most = std::max(most, fabs(x));
        compare(got, build_ref(k, 2), k, 2, REPEATED, what);
    }
    p.close();
}

static void all(void) {
    for (uint32_t d : {64, 80, 96, 112, 128, 192, 256})
        run(d, 16, 8, LK_BF16, false);
    for (uint32_t b : {8, 16, 32, 64})
        for (uint32_t r : {2, 4, 8, 16})
            if (r <= b)
                run(128, b, r, r == 4 ? LK_FP16 : LK_BF16, false);
    run(64, 16, 8, LK_FP16, true);
    run(256, 32, 8, LK_FP16, false);
    run(256, 64, 8, LK_BF16, false);
}

/* --small: for where a device is emulated. */
int main(int argc, char **argv) {
    processors = device_or_skip();
    if (argc > 1 && !strcmp(argv[1], "--small")) {
        run(128, 16, 8, LK_BF16, false);
        run(80, 8, 4, LK_FP16, false);
        run(64, 32, 16, LK_BF16, false);
    } else {
        all();
    }
    printf("test_build: %s\n", failures ? "FAILED" : "ok");
    return failures != 0;
}
