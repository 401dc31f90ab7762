/* SPDX-License-Identifier: MIT */
/*
 * common.h - a small pool on the device with its mirror on the host, and the float64 reference that
 * the tests of the CUDA kernels compare with.
 *
 * Everything the device reads is first filled with 0xff bytes, which are NaN in both 16-bit
 * formats: a token, page or summary that must not be read shows in the result.
 *
 * Exit codes: 0 passed, 1 failed, 77 no device.
 */
#ifndef LK_TEST_CUDA_COMMON_H
#define LK_TEST_CUDA_COMMON_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "../../kernels/cuda/cuda.h"
#include "../../kernels/cuda/record.h"
#include "../../kernels/cuda/state.h"

static int failures;

#define CUDA(x)                                                                                    \
    do {                                                                                           \
        int error_ = (int)(x);                                                                     \
        if (error_) {                                                                              \
            printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #x,                                      \
                   cudaGetErrorString((cudaError_t)error_));                                       \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)
#define CHECK(c, ...)                                                                              \
    do {                                                                                           \
        if (!(c)) {                                                                                \
            failures++;                                                                            \
            printf("FAIL %s:%d: %s: ", __FILE__, __LINE__, #c);                                    \
            printf(__VA_ARGS__);                                                                   \
            printf("\n");                                                                          \
        }                                                                                          \
    } while (0)

static inline int device_or_skip(void) {
    int count = 0;
    cudaDeviceProp p;

    setvbuf(stdout, NULL, _IOLBF, 0); /* what ends by a signal has said all it said */
    if (cudaGetDeviceCount(&count) != cudaSuccess || !count) {
        printf("no CUDA device: skipped\n");
        exit(77);
    }
    CUDA(cudaGetDeviceProperties(&p, 0));
    return p.multiProcessorCount;
}

static std::mt19937 rng(1);
static inline float normal(void) {
    static std::normal_distribution<float> n;
    return n(rng);
}

static inline uint16_t encode(float x, uint32_t dtype) {
    if (dtype == LK_BF16) {
        __nv_bfloat16 h = __float2bfloat16(x);
        return *(uint16_t *)&h;
    }
    __half h = __float2half(x);
    return *(uint16_t *)&h;
}
static inline double decode(uint16_t x, uint32_t dtype) {
    if (dtype == LK_BF16) {
        uint32_t u = (uint32_t)x << 16;
        float f;
        memcpy(&f, &u, 4);
        return f;
    }
    return __half2float(*(__half *)&x);
}

template <class T> struct buffer { /* device memory, freed at the end of the process */
    T *p = NULL;
    size_t n = 0;
    void make(size_t count) {
        n = count;
        CUDA(cudaMalloc(&p, count * sizeof(T) + 256));
        CUDA(cudaMemset(p, 0xff, count * sizeof(T) + 256));
    }
    void put(const T *from, size_t count) {
        if (count > n) {
            if (p)
                cudaFree(p);
            make(count);
        }
        CUDA(cudaMemcpy(p, from, count * sizeof(T), cudaMemcpyHostToDevice));
    }
    std::vector<T> get(void) const {
        std::vector<T> v(n);
        CUDA(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
};

/* ---- pool ---- */

struct pool {
    lk_pool_view view; /* device pointers */
    std::vector<uint8_t> kv;
    buffer<uint8_t> d_kv, d_coarse, d_fine, d_super;

    void open(lk_geometry g, uint64_t pages) {
        uint64_t planes = (uint64_t)g.layers * g.kv_heads;
        memset(&view, 0, sizeof view);
        view.geometry = g;
        view.pages = pages;
        lk_cuda_layout(&g, &view.layout);
        kv.assign(g.layers * pages * view.layout.page_bytes, 0xff);
        d_kv.make(kv.size());
        d_coarse.make(planes * pages * view.layout.coarse_stride);
        d_fine.make(planes * pages * view.layout.fine_stride);
        d_super.make(planes * (pages / 4) * view.layout.super_stride);
        view.kv = d_kv.p;
        view.coarse = d_coarse.p;
        view.fine = d_fine.p;
        view.super = d_super.p;
    }
    void close(void) {
        cudaFree(d_kv.p);
        cudaFree(d_coarse.p);
        cudaFree(d_fine.p);
        cudaFree(d_super.p);
    }
    uint16_t *at(uint32_t layer, uint64_t page, uint32_t head, bool value, uint32_t token) {
        lk_pool_view host = view;
        host.kv = kv.data();
        uint8_t *p = value ? lk_page_values(&host, layer, page, head)
                           : lk_page_keys(&host, layer, page, head);
        return (uint16_t *)p + (uint64_t)token * view.geometry.head_dim;
    }
    void upload(void) {
        CUDA(cudaMemcpy(d_kv.p, kv.data(), kv.size(), cudaMemcpyHostToDevice));
    }
    void download(void) {
        CUDA(cudaMemcpy(kv.data(), d_kv.p, kv.size(), cudaMemcpyDeviceToHost));
    }
};

/* ---- what does not fit ---- */

/* The shared memory that the device lends a block. */
static inline uint32_t lent_bytes(void) {
    int bytes = 0;

    CUDA(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    return (uint32_t)bytes;
}

/* Is the device's shared memory too small for the kernels of a geometry? Then a launcher says so,
 * and else none does. */
static inline bool refused(const lk_geometry &g, int processors) {
    const int error = (int)cudaErrorInvalidConfiguration;
    buffer<lk_cuda_batch> batch;
    buffer<uint32_t> sync;
    buffer<uint64_t> list;
    struct pool p;
    const uint32_t lent = lent_bytes();
    const bool ret = lk_cuda_shared_least(&g) > lent;
    p.open(g, 4);
    batch.make(1);
    sync.make(lk_cuda_sync_words(&g, 1, 1));
    list.make(1);
    CUDA(cudaMemset(batch.p, 0, sizeof *batch.p));
    CUDA(cudaMemset(sync.p, 0, sync.n * sizeof *sync.p));
    CUDA(cudaMemset(list.p, 0, sizeof *list.p));
    const lk_cuda_build job = {p.view, list.p, 1};
    const lk_cuda_step step = {p.view, batch.p, sync.p, 1, UINT32_MAX, (uint32_t)processors, NULL};
    const int pages = lk_cuda_build_pages(&job, NULL), supers = lk_cuda_build_supers(&job, NULL),
              run = lk_cuda_run(&step, NULL);
    for (int x : {pages, supers, run})
        CHECK(x == 0 || x == error, "launch: %s", cudaGetErrorString((cudaError_t)x));
    CHECK(ret == (pages || supers || run),
          "d %u B %u r %u: %u bytes of shared memory are needed of %u, but builds say %d and %d, a "
          "step %d",
          g.head_dim, g.page_tokens, g.rank, lk_cuda_shared_least(&g), lent, pages, supers, run);
    CUDA(cudaDeviceSynchronize());
    cudaFree(batch.p);
    cudaFree(sync.p);
    cudaFree(list.p);
    p.close();
    return ret;
}

static inline bool skipped(const lk_geometry &g, int processors) {
    const bool ret = refused(g, processors);
    if (ret)
        printf("d %u B %u r %u: skipped, the device has too little shared memory\n", g.head_dim,
               g.page_tokens, g.rank);
    return ret;
}

/* ---- reference: rotation, summaries ---- */

static inline void rotate_ref(double *x, uint32_t d) {
    uint32_t block = d & -d;
    for (uint32_t o = 1; o < block; o *= 2)
        for (uint32_t i = 0; i < d / 2; i++) {
            uint32_t a = i / o * 2 * o + i % o;
            double u = x[a], v = x[a + o];
            x[a] = u + v;
            x[a + o] = u - v;
        }
    for (uint32_t i = 0; i < d; i++)
        x[i] /= sqrt((double)block);
}

struct summary {                           /* decoded: rotated keys as the record holds them */
    std::vector<double> mean;              /* [d] */
    std::vector<std::vector<double>> v, c; /* [r][d], [r][tokens]; scale in c */
};

static inline double bf16_at(const uint8_t *p) {
    uint32_t u = (uint32_t)(p[0] | p[1] << 8) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline void decode_record(const uint8_t *p, const lk_record &r, summary *s) {
    uint32_t d = r.head_dim, extra = r.centroid ? 1 : 0;
    if (r.centroid) {
        s->mean.resize(d);
        for (uint32_t c = 0; c < d; c++)
            s->mean[c] = (int8_t)p[r.centroid + lk_centroid_place(d, c)] * bf16_at(p + r.scales);
    }
    for (uint32_t i = 0; i < r.directions; i++) {
        std::vector<double> v(d), c(r.tokens);
        for (uint32_t x = 0; x < d; x++) {
            uint32_t place = lk_basis_place(d, x);
            v[x] = (double)(p[i * d / 2 + place / 2] >> (place % 2 * 4) & 15) - 8;
        }
        for (uint32_t t = 0; t < r.tokens; t++)
            c[t] = ((double)p[r.coeffs + lk_coeff_place(r.tokens, i, t)] - 128) *
                   bf16_at(p + r.scales + 2 * (i + extra));
        s->v.push_back(v);
        s->c.push_back(c);
    }
}

/* Eigenpairs of a symmetric matrix by cyclic Jacobi, descending: columns of v. */
static inline void eigen_ref(std::vector<std::vector<double>> a, std::vector<double> *w,
                             std::vector<std::vector<double>> *v) {
    size_t n = a.size();
    std::vector<std::vector<double>> q(n, std::vector<double>(n, 0));
    for (size_t i = 0; i < n; i++)
        q[i][i] = 1;
    for (int sweep = 0; sweep < 60; sweep++) {
        double off = 0, all = 0;
        for (size_t i = 0; i < n; i++)
            for (size_t j = 0; j < n; j++) {
                all += a[i][j] * a[i][j];
                off += i == j ? 0 : a[i][j] * a[i][j];
            }
        if (off <= 1e-30 * all)
            break;
        for (size_t p = 0; p < n; p++)
            for (size_t r = p + 1; r < n; r++) {
                if (a[p][r] == 0)
                    continue;
                double z = (a[r][r] - a[p][p]) / (2 * a[p][r]);
                double t = (z >= 0 ? 1 : -1) / (fabs(z) + sqrt(z * z + 1)), c = 1 / sqrt(t * t + 1),
                       s = t * c;
                for (size_t k = 0; k < n; k++) {
                    double x = a[k][p], y = a[k][r];
                    a[k][p] = c * x - s * y;
                    a[k][r] = s * x + c * y;
                }
                for (size_t k = 0; k < n; k++) {
                    double x = a[p][k], y = a[r][k];
                    a[p][k] = c * x - s * y;
                    a[r][k] = s * x + c * y;
                    x = q[k][p], y = q[k][r];
                    q[k][p] = c * x - s * y;
                    q[k][r] = s * x + c * y;
                }
            }
    }
    std::vector<size_t> order(n);
    for (size_t i = 0; i < n; i++)
        order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t x, size_t y) { return a[x][x] > a[y][y]; });
    w->resize(n);
    v->assign(n, std::vector<double>(n));
    for (size_t i = 0; i < n; i++) {
        (*w)[i] = a[order[i]][order[i]];
        for (size_t k = 0; k < n; k++)
            (*v)[i][k] = q[k][order[i]];
    }
}

static inline double bf16_up_ref(double x) {
    float f = (float)x;
    if ((double)f < x)
        f = nextafterf(f, INFINITY);
    uint32_t u;
    memcpy(&u, &f, 4);
    u = (u + 0xffff) & 0xffff0000u;
    memcpy(&f, &u, 4);
    return f;
}

/* DESIGN's build of keys [n][d] at rank r, quantised. */
static inline summary build_ref(const std::vector<std::vector<double>> &keys, uint32_t rank) {
    size_t n = keys.size(), d = keys[0].size();
    std::vector<std::vector<double>> k = keys, gram(n, std::vector<double>(n)), vec;
    std::vector<double> mu(d, 0), w;
    double most = 0;
    summary s;

    for (auto &x : k)
        rotate_ref(x.data(), (uint32_t)d);
    for (auto &x : k)
        for (size_t c = 0; c < d; c++) {
            mu[c] += x[c] / n;
            most = std::max(most, fabs(x[c]));
        }
    double peak = 0, scale;
    for (double x : mu)
        peak = std::max(peak, fabs(x));
    scale = bf16_up_ref(peak / 127);
    s.mean.resize(d);
    for (size_t c = 0; c < d; c++)
        s.mean[c] = scale > 0 ? std::clamp(nearbyint(mu[c] / scale), -127., 127.) * scale : 0;
    for (auto &x : k)
        for (size_t c = 0; c < d; c++)
            x[c] -= mu[c];
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < n; j++) {
            gram[i][j] = 0;
            for (size_t c = 0; c < d; c++)
                gram[i][j] += k[i][c] * k[j][c];
        }
    eigen_ref(gram, &w, &vec);
    double s1 = sqrt(std::max(w[0], 0.));
    for (uint32_t i = 0; i < rank; i++) {
        double len = sqrt(std::max(w[i], 0.)), top = 0, b = 0, cm = 0;
        bool live = len > 1e-3 * s1 && s1 > 1e-6 * most * sqrt((double)n * d);
        std::vector<double> v(d, 0), c(n, 0), u = vec[i];
        for (double x : u)
            if (fabs(x) > fabs(top) + 1e-12)
                top = x;
        for (size_t t = 0; t < n; t++)
            u[t] *= top < 0 ? -1 : 1;
        if (live) {
            for (size_t t = 0; t < n; t++)
                for (size_t x = 0; x < d; x++)
                    v[x] += k[t][x] * u[t] / len;
            for (double x : v)
                b = std::max(b, fabs(x) / 7);
            for (size_t t = 0; t < n; t++)
                cm = std::max(cm, fabs(u[t]) * len);
            double q = bf16_up_ref(cm / 127 * b);
            for (double &x : v)
                x = nearbyint(x / b);
            for (size_t t = 0; t < n; t++)
                c[t] = q > 0 ? std::clamp(nearbyint(u[t] * len / (q / b)), -127., 127.) * q : 0;
        }
        s.v.push_back(v);
        s.c.push_back(c);
    }
    return s;
}

static inline double lse_ref(const std::vector<double> &x) {
    double m = -INFINITY, z = 0;
    for (double v : x)
        m = std::max(m, v);
    if (m == -INFINITY)
        return m;
    for (double v : x)
        z += exp(v - m);
    return m + log(z);
}

/* ln mass of a page for a rotated query. */
static inline double score_ref(const summary &s, const std::vector<double> &q, double sm,
                               uint32_t rank) {
    size_t d = q.size(), n = s.c[0].size();
    double base = 0;
    std::vector<double> p(rank, 0), z(n);
    for (size_t x = 0; x < d; x++)
        base += q[x] * s.mean[x];
    for (uint32_t i = 0; i < rank; i++)
        for (size_t x = 0; x < d; x++)
            p[i] += q[x] * s.v[i][x];
    for (size_t t = 0; t < n; t++) {
        z[t] = base;
        for (uint32_t i = 0; i < rank; i++)
            z[t] += p[i] * s.c[i][t];
        z[t] *= sm;
    }
    return lse_ref(z);
}

#endif
