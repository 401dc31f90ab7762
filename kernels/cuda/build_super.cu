/* SPDX-License-Identifier: MIT */
/*
 * build_super.cu - summaries of superpages of more than 64 tokens (DESIGN section 1, "Build"),
 * those of four pages of 32 or 64.
 *
 * Idea: two directions are wanted of 128 or 256 tokens; no matrix of that size is made.
 * Orthogonal iteration turns VECTORS vectors towards the largest until the two kept rest: their
 * products with the tokens' differences, back with the tokens, orthonormal again. Each round first
 * turns them among themselves, by the eigenvectors of the small matrix of their products, so that
 * close eigenvalues do not slow each other.
 *
 * Geometry: a superpage and KV head is the work of a block. Its keys lie in shared memory as the 16
 * bits they are; a difference from the mean is made where it is used.
 *
 * Invariants: as build.cu. Nothing here is on a step's critical path.
 */
#include "build_warp.cuh"

#define THREADS     256
#define VECTORS     8
#define ROUNDS_MOST 48
#define RESTS       1e-5f  /* largest change of a kept vector's component by a round */
#define NEGLIGIBLE  1e-14f /* squared eigenvalue of the small matrix, relative to the largest */
#define DEPENDENT   1e-6f  /* squared length that others leave of a vector, relative */
#define NOTHING     1e-30f /* the same, relative to the first vector */

struct super_memory {
    float shift[LK_HEAD_DIM_MAX];             /* the mean */
    float x[LK_HEAD_DIM_MAX][VECTORS];        /* orthonormal */
    float t[4 * LK_PAGE_TOKENS_MAX][VECTORS]; /* differences x vectors */
    float y[LK_HEAD_DIM_MAX][VECTORS];
    float small[VECTORS][VECTORS], turn[VECTORS][VECTORS];
    float v[LK_COARSE_RANK + 1][LK_HEAD_DIM_MAX], u[LK_COARSE_RANK][4 * LK_PAGE_TOKENS_MAX];
    float warp[THREADS / 32];
    uint32_t code[(LK_HEAD_DIM_MAX * 2 + 8 * LK_PAGE_TOKENS_MAX * 2 + 16) / 4];
    uint16_t keys[1]; /* [n][d + 2] */
};

/* One superpage's differences: [n][d], scaled by a power of two where they are far from 1. */
struct differences {
    struct super_memory *m;
    uint32_t n, d;
    bool bf16;
    float unit;

    __device__ __forceinline__ uint16_t *key(uint32_t t, uint32_t c) const {
        return &m->keys[t * (d + 2) + c];
    }
    __device__ __forceinline__ float raw(uint32_t t, uint32_t c) const {
        return element(*key(t, c), bf16);
    }
    __device__ __forceinline__ float at(uint32_t t, uint32_t c) const {
        return (raw(t, c) - m->shift[c]) * unit;
    }
};

__device__ float block_max(struct super_memory *m, float x) {
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        m->warp[threadIdx.x / 32] = x;
    __syncthreads();
    for (int i = 0; i < THREADS / 32; i++)
        x = fmaxf(x, m->warp[i]);
    return x;
}

/* ---- what a superpage is ---- */

/* -> max |K| */
__device__ float load_keys(const struct build_args &a, const struct build_job &job,
                           const struct differences &k) {
    const uint32_t page_tokens = a.pool.geometry.page_tokens;
    float largest = 0;

    for (uint32_t i = threadIdx.x; i < k.n * k.d; i += THREADS) {
        const uint32_t t = i / k.d, c = i % k.d;
        const uint16_t *keys = (const uint16_t *)lk_page_keys_device(
            a.pool, job.layer, LK_QUAD_PAGES * job.id + t / page_tokens, job.head);
        *k.key(t, c) = keys[t % page_tokens * k.d + c];
        largest = fmaxf(largest, fabsf(k.raw(t, c)));
    }
    return block_max(k.m, largest);
}

/* The mean, from the first key on, so that a constant offset does not cost its digits.
 * -> the largest difference from that key */
__device__ float find_mean(const struct differences &k) {
    float spread = 0;

    for (uint32_t c = threadIdx.x; c < k.d; c += THREADS) {
        const float origin = k.raw(0, c);
        float sum = 0;
        for (uint32_t t = 1; t < k.n; t++) {
            const float x = k.raw(t, c) - origin;
            sum += x / k.n;
            spread = fmaxf(spread, fabsf(x));
        }
        k.m->shift[c] = origin + sum;
    }
    return block_max(k.m, spread);
}

/* ---- the iteration ---- */

/* Signs of no pattern. */
__device__ void seed_vectors(const struct differences &k) {
    for (uint32_t i = threadIdx.x; i < k.d * VECTORS; i += THREADS) {
        const uint32_t hash = (i + 1) * 2654435761u;
        k.m->x[i / VECTORS][i % VECTORS] = (hash ^ hash >> 15) * 2246822519u >> 31 ? 1.f : -1.f;
    }
}

/* to [rows] = at [rows][inner] x from [inner], where at(row, i) is an element. */
template <class At>
__device__ __forceinline__ void multiply(const At &at, uint32_t rows, uint32_t inner,
                                         const float from[][VECTORS], float to[][VECTORS]) {
    __syncthreads();
    for (uint32_t o = threadIdx.x; o < rows * VECTORS; o += THREADS) {
        const uint32_t row = o / VECTORS, v = o % VECTORS;
        float sum = 0;
        for (uint32_t i = 0; i < inner; i++)
            sum = fmaf(at(row, i), from[i][v], sum);
        to[row][v] = sum;
    }
    __syncthreads();
}

/* t = differences x. */
__device__ void to_tokens(const struct differences &k) {
    multiply([&](uint32_t t, uint32_t c) { return k.at(t, c); }, k.n, k.d, k.m->x, k.m->t);
}

/* y = differences^T t. */
__device__ void to_channels(const struct differences &k) {
    multiply([&](uint32_t c, uint32_t t) { return k.at(t, c); }, k.d, k.n, k.m->t, k.m->y);
}

/* small = rows^T rows, of `count` rows. */
__device__ void find_products(struct super_memory *m, const float rows[][VECTORS], uint32_t count) {
    if (threadIdx.x < VECTORS * VECTORS) {
        const uint32_t i = threadIdx.x / VECTORS, j = threadIdx.x % VECTORS;
        float sum = 0;
        for (uint32_t r = 0; r < count; r++)
            sum = fmaf(rows[r][i], rows[r][j], sum);
        m->small[i][j] = sum;
    }
    __syncthreads();
}

/* Of VECTORS lanes beside each other. */
__device__ __forceinline__ float group_max(float x) {
#pragma unroll
    for (int o = VECTORS / 2; o; o >>= 1)
        x = fmaxf(x, __shfl_xor_sync(LK_FULL_WARP, x, o));
    return x;
}

/* One-sided Jacobi on a symmetric matrix, column l of each group's lane l, by one warp. */
__device__ void turn_group(uint32_t l, float col[VECTORS]) {
    float floor = 0;

    for (int sweep = 0; sweep < SWEEPS_MOST; sweep++) {
        bool moved = false;
        for (uint32_t to = 1; to < VECTORS; to++) {
            const bool first = !(l & 1u << (31 - __clz(to))); /* the lower lane of the pair */
            float other[VECTORS], own = 0, product = 0, c, s;
#pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                other[i] = __shfl_xor_sync(LK_FULL_WARP, col[i], to);
                own = fmaf(col[i], col[i], own);
                product = fmaf(col[i], other[i], product);
            }
            floor = fmaxf(floor, own);
            const float theirs = __shfl_xor_sync(LK_FULL_WARP, own, to);
            moved |= find_rotation(first ? own : theirs, first ? theirs : own, product,
                                   group_max(floor) * NEGLIGIBLE, &c, &s);
            s = first ? -s : s;
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
                col[i] = fmaf(c, col[i], s * other[i]);
        }
        if (!__any_sync(LK_FULL_WARP, moved))
            break;
    }
}

/* Columns of turn: eigenvalue x eigenvector of small, descending. */
__device__ void find_turn(struct super_memory *m) {
    if (threadIdx.x < 32) {
        const uint32_t l = threadIdx.x % VECTORS;
        float col[VECTORS], norm = 0;
        uint32_t place = 0;
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            col[i] = m->small[i][l];
        turn_group(l, col);
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            norm = fmaf(col[i], col[i], norm);
        for (uint32_t o = 0; o < VECTORS; o++) {
            const float other = __shfl_sync(LK_FULL_WARP, norm, o);
            place += other > norm || (other == norm && o < l);
        }
        if (threadIdx.x < VECTORS)
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
                m->turn[i][place] = col[i];
    }
    __syncthreads();
}

/* Rows of t and x by the eigenvectors: what stands for the largest comes first. */
__device__ void turn_rows(const struct differences &k) {
    struct super_memory *m = k.m;

    for (uint32_t i = threadIdx.x; i < k.n + k.d; i += THREADS) {
        float *row = i < k.n ? m->t[i] : m->x[i - k.n], old[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            old[v] = row[v];
        for (int v = 0; v < VECTORS; v++) {
            float sum = 0, norm = 0;
            for (int j = 0; j < VECTORS; j++) {
                sum = fmaf(old[j], m->turn[j][v], sum);
                norm = fmaf(m->turn[j][v], m->turn[j][v], norm);
            }
            row[v] = norm > 0 ? sum * rsqrtf(norm) : 0.f;
        }
    }
}

/* turn = the lower factor of small; a vector that depends on those before has a diagonal of 0. */
__device__ void find_factor(struct super_memory *m) {
    if (threadIdx.x == 0) {
        float l[VECTORS][VECTORS] = {};
        for (int i = 0; i < VECTORS; i++)
            for (int j = 0; j <= i; j++) {
                float s = m->small[i][j];
                for (int v = 0; v < j; v++)
                    s -= l[i][v] * l[j][v];
                if (i > j)
                    l[i][j] = l[j][j] > 0 ? s / l[j][j] : 0.f;
                else if (s > DEPENDENT * m->small[i][i] && s > NOTHING * m->small[0][0])
                    l[i][i] = sqrtf(s);
            }
        for (int i = 0; i < VECTORS; i++)
            for (int j = 0; j < VECTORS; j++)
                m->turn[i][j] = l[i][j];
    }
    __syncthreads();
}

/* x = y made orthonormal by Gram-Schmidt, largest first: rows by the factor's inverse.
 * -> the largest change of a kept vector's component */
__device__ float next_vectors(const struct differences &k) {
    struct super_memory *m = k.m;
    float change = 0;

    for (uint32_t c = threadIdx.x; c < k.d; c += THREADS) {
        float next[VECTORS];
        for (int i = 0; i < VECTORS; i++) {
            float s = m->y[c][i];
            for (int v = 0; v < i; v++)
                s -= m->turn[i][v] * next[v];
            next[i] = m->turn[i][i] > 0 ? s / m->turn[i][i] : 0.f;
        }
        for (int i = 0; i < LK_COARSE_RANK; i++)
            change = fmaxf(change, fabsf(next[i] - m->x[c][i]));
        for (int i = 0; i < VECTORS; i++)
            m->x[c][i] = next[i];
    }
    return block_max(m, change);
}

__device__ void iterate(const struct differences &k) {
    seed_vectors(k);
    for (int round = 0; round < ROUNDS_MOST; round++) {
        to_tokens(k);
        find_products(k.m, k.m->t, k.n);
        find_turn(k.m);
        turn_rows(k);
        to_channels(k);
        find_products(k.m, k.m->y, k.d);
        find_factor(k.m);
        if (next_vectors(k) < RESTS)
            break;
    }
    __syncthreads();
}

/* ---- the record ---- */

/* The two directions, their coefficients, and the mean; a record of zeros. */
__device__ void keep_directions(const struct differences &k, const struct lk_record &record) {
    struct super_memory *m = k.m;

    for (uint32_t o = threadIdx.x; o < k.n * LK_COARSE_RANK; o += THREADS) {
        const uint32_t t = o / LK_COARSE_RANK, i = o % LK_COARSE_RANK;
        float sum = 0;
        for (uint32_t c = 0; c < k.d; c++)
            sum = fmaf(k.at(t, c), m->x[c][i], sum);
        m->u[i][t] = sum;
    }
    for (uint32_t i = threadIdx.x; i < record.stride / 4; i += THREADS)
        m->code[i] = 0;
    for (uint32_t c = threadIdx.x; c < k.d; c += THREADS) {
        for (int i = 0; i < LK_COARSE_RANK; i++)
            m->v[i][c] = m->x[c][i];
        m->v[LK_COARSE_RANK][c] = m->shift[c];
    }
    __syncthreads();
}

/* Length of u [n]; *ret_sign: of its largest element. */
__device__ float measure(const float *u, uint32_t n, uint32_t l, float *ret_sign) {
    float sum = 0, top = 0;

    for (uint32_t t = l; t < n; t += 32) {
        sum = fmaf(u[t], u[t], sum);
        top = fabsf(u[t]) > fabsf(top) ? u[t] : top;
    }
    for (int o = 16; o; o >>= 1) {
        const float other = __shfl_xor_sync(LK_FULL_WARP, top, o);
        const bool later = fabsf(other) == fabsf(top) && l & o;
        top = fabsf(other) > fabsf(top) || later ? other : top;
    }
    *ret_sign = copysignf(1.f, __shfl_sync(LK_FULL_WARP, top, 0));
    return sqrtf(warp_sum(sum));
}

/* By one warp. largest: max |K|. */
__device__ void write_codes(const struct differences &k, const struct lk_record &record,
                            float largest, uint32_t l) {
    struct super_memory *m = k.m;
    uint8_t *code = (uint8_t *)m->code;
    float length[LK_COARSE_RANK], sign[LK_COARSE_RANK];

    for (int i = 0; i < LK_COARSE_RANK; i++)
        length[i] = measure(m->u[i], k.n, l, &sign[i]);
    for (int i = 0; i <= LK_COARSE_RANK; i++)
        rotate(m->v[i], k.d, l);
    write_centroid(code, record, m->v[LK_COARSE_RANK], l);
    const bool dead = length[0] / k.unit <= 1e-6f * largest * sqrtf((float)k.d * k.n);
    for (int i = 0; i < LK_COARSE_RANK; i++) {
        const bool live = !dead && length[i] > 1e-3f * length[0];
        const float whole = live ? sign[i] / length[i] : 0.f;
        for (uint32_t c = l; c < k.d; c += 32)
            m->v[i][c] = live ? m->v[i][c] * sign[i] : 0.f;
        for (uint32_t t = l; t < k.n; t += 32)
            m->u[i][t] *= whole;
        __syncwarp();
        write_direction(code, record, i, m->v[i], m->u[i], live ? length[i] / k.unit : 0.f, l);
    }
}

__global__ void __launch_bounds__(THREADS)
    build_super(const __grid_constant__ struct build_args a) {
    SHARED_BYTES(memory, 16);
    const struct lk_geometry *g = &a.pool.geometry;
    const struct lk_record record = lk_record_super(g);
    struct differences k = {(struct super_memory *)memory, LK_QUAD_PAGES * g->page_tokens,
                            g->head_dim, g->dtype == LK_BF16, 1.f};

    wait_for_previous();
    for (uint64_t task = blockIdx.x; task < (uint64_t)a.count * g->kv_heads; task += gridDim.x) {
        const struct build_job job = job_of(a, task);
        __syncthreads();
        const float largest = load_keys(a, job, k), spread = find_mean(k);
        const bool far = spread > 0 && (spread > 1024.f || spread < 1.f / 1024.f);
        k.unit = far ? exp2f(-(float)max(-126, min(126, ilogbf(spread)))) : 1.f;
        iterate(k);
        keep_directions(k, record);
        if (threadIdx.x < 32)
            write_codes(k, record, largest, threadIdx.x);
        __syncthreads();
        uint32_t *to = (uint32_t *)super_of(a, job, record);
        for (uint32_t i = threadIdx.x; i < record.stride / 4; i += THREADS)
            to[i] = k.m->code[i];
    }
}

/* ---- launcher ---- */

uint32_t lk_cuda_build_super_least(const struct lk_geometry *g) {
    return sizeof(struct super_memory) + LK_QUAD_PAGES * g->page_tokens * (g->head_dim + 2) * 2;
}

int lk_cuda_build_super(const struct lk_cuda_build *b, void *stream) {
    const struct build_args a = {b->pool, b->list, b->count, 1};
    const uint32_t tasks = a.count * a.pool.geometry.kv_heads,
                   bytes = lk_cuda_build_super_least(&a.pool.geometry);
    int error = take_bytes(build_super, bytes);

    return error
               ? error
               : launch(build_super, dim3(tasks < 1056 ? tasks : 1056), THREADS, bytes, stream, a);
}
