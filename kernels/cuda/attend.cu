/* SPDX-License-Identifier: MIT */
/*
 * attend.cu - exact attention over picked pages, or over all of them; split over blocks, merged.
 *
 * Geometry: blocks of eight warps take runs of tasks (attend.cuh). Shared memory has eight slots, a
 * tile's keys and values each; copies run beside the arithmetic. Where a KV head has eight queries
 * or fewer, a warp has a slot of its own and takes every eighth tile of a slice, slice after slice:
 * the next tile is on its way while one slice is merged. Where it has more, warps that hold
 * different queries read the same slots: four, while the other four are filled.
 *
 * A slot: rows of keys, then of values; the 16-byte chunks of row i are permuted by i % 8, so that
 * no read below meets its neighbours in a bank.
 *
 * A tile, on tensor cores: keys are A (16 tokens x 16 channels, channels permuted alike in keys and
 * queries), queries B: logits [16 tokens][8 queries]; softmax over the tokens of a column; weights,
 * transposed 8 x 8, are B and values, tokens paired by byte permutes, A of out [channels][8
 * queries]. Weights are carried in two 16-bit parts.
 *
 * Merging: a lane keeps its out as float4 {channel, channel + 1} x {query, query + 1}, and so it
 * stays in shared memory and in partials: warps scale theirs to the highest peak of a query and are
 * added in order, slices by the last block to
 * finish one of them, in order. The number of slices depends on the row alone.
 *
 * Edge cases: tokens beyond the length (or a query's own position) get weight 0 by selection, and
 * their values are replaced by 0; no token: out 0, LSE -inf.
 */
#include "attend.cuh"

#define BATCH 16 /* partials of slices on their way together */

struct note { /* an octet in its slot */
    int position;
    float bias;
    uint32_t kept, reserved;
};

template <int D> struct shared {
    uint8_t slot[WARPS][64 * D];
    float4 out[WARPS][D / 16][32];
    float peak[2][WARPS][QUERIES];            /* by turns */
    struct lk_cuda_stat stat[WARPS][QUERIES]; /* scaled, as out is */
    struct note notes[WARPS][2];
    struct job job;
    struct lk_cuda_row row;
    struct lk_cuda_head found;
    float mass[WARPS * QUERIES], inverse[WARPS * QUERIES]; /* of queries: captured; 1 / sum */
    uint32_t last;
};

/* A warp's queries and what it knows of them so far. */
template <int D> struct state {
    uint4 q[D / 32];
    float o[D / 16][4], peak[2], mass[2], kept[2]; /* [2]: queries 2c and 2c + 1 */
    int limit[2];
};

/* The queries of a job from `first` on. */
template <int D>
__device__ __forceinline__ void load_queries(const struct attend_args &a, const struct job &j,
                                             uint32_t first, struct state<D> *w) {
    const uint32_t lane = threadIdx.x % 32, r = lane >> 2, c = lane & 3;
    const uint4 *from = (const uint4 *)(j.q + (uint64_t)query_index(a, j, first + r) * D) + 2 * c;

#pragma unroll
    for (int i = 0; i < D / 32; i++)
        w->q[i] = first + r < j.queries ? from[8 * (i / 2) + i % 2] : make_uint4(0, 0, 0, 0);
    w->limit[0] = query_limit(j, first + 2 * c);
    w->limit[1] = query_limit(j, first + 2 * c + 1);
}

template <int D> __device__ __forceinline__ void clear_state(struct state<D> *w) {
#pragma unroll
    for (int x = 0; x < 2; x++) {
        w->peak[x] = -INFINITY;
        w->mass[x] = w->kept[x] = 0;
    }
#pragma unroll
    for (int i = 0; i < D / 16; i++)
        w->o[i][0] = w->o[i][1] = w->o[i][2] = w->o[i][3] = 0;
}

/* ---- slots ---- */

/* Start the copies of a tile. `h`: the lane's octet, lane % 2 of the tile. */
template <int D>
__device__ __forceinline__ void fill_slot(const struct attend_args &a, struct shared<D> *s,
                                          const struct octet &h, uint32_t slot) {
    constexpr int CHUNKS = D / 8, ROWS = 32 / CHUNKS;
    const uint32_t lane = threadIdx.x % 32, row = lane / CHUNKS, chunk = lane % CHUNKS;
    const int position = octet_position(s->job, h);
    const uint64_t own = position == NEVER ? 0 : (uint64_t)octet_keys(a, s->job, h);
    const uint64_t keys[2] = {__shfl_sync(LK_FULL_WARP, own, 0), __shfl_sync(LK_FULL_WARP, own, 1)};
    const uint64_t values = (uint64_t)(2 * D) << s->job.token_shift;

    if (lane < 2)
        s->notes[slot][lane] = {position, h.bias, h.kept, 0};
#pragma unroll
    for (int k = 0; k < 16 / ROWS; k++) {
        const uint32_t in = k * ROWS % 8 + row, y = k * ROWS / 8;
        const uint64_t from = keys[y] + in * (2 * D) + 16 * chunk;
        uint8_t *to = s->slot[slot] + (8 * y + in) * (2 * D) + 16 * (chunk ^ in);
        if (keys[y]) {
            copy_async(to, (const void *)from);
            copy_async(to + 32 * D, (const void *)(from + values));
        }
    }
    copy_commit();
}

/* Zeros for the values of tokens that are not there. */
template <int D>
static __device__ __noinline__ void clear_values(struct shared<D> *s, uint32_t slot,
                                                 uint32_t length) {
    for (uint32_t i = threadIdx.x % 32; i < 2 * D; i += 32) {
        const uint32_t row = i / (D / 8);
        const int position = s->notes[slot][row / 8].position;
        if (position == NEVER || position + row % 8 >= length)
            ((uint4 *)(s->slot[slot] + 32 * D))[i] = make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
}

/* ---- a tile ---- */

/* Logits -> weights 2^(logit - peak), out and sums scaled to the new peak. */
template <int D>
__device__ __forceinline__ void soften(const struct note n[2], float scale, float z[4],
                                       struct state<D> *w) {
    const int r = threadIdx.x % 32 / 4;

#pragma unroll
    for (int x = 0; x < 2; x++) { /* queries 2c + x; tokens r of each half */
        float top, base, fade;
#pragma unroll
        for (int y = 0; y < 2; y++) {
            bool in = n[y].position != NEVER && n[y].position + r < w->limit[x];
            z[2 * y + x] = in ? z[2 * y + x] * scale + n[y].bias : -INFINITY;
        }
        top = fmaxf(z[x], z[2 + x]);
        top = fmaxf(top, __shfl_xor_sync(LK_FULL_WARP, top, 4));
        top = fmaxf(top, __shfl_xor_sync(LK_FULL_WARP, top, 8));
        top = fmaxf(top, __shfl_xor_sync(LK_FULL_WARP, top, 16));
        top = fmaxf(top, w->peak[x]);
        base = top == -INFINITY ? 0.f : top;
        fade = shrink(w->peak[x], base);
        w->peak[x] = top;
#pragma unroll
        for (int y = 0; y < 2; y++)
            z[2 * y + x] = exp2_fast(z[2 * y + x] - base);
        w->mass[x] = w->mass[x] * fade + z[x] + z[2 + x];
        w->kept[x] = w->kept[x] * fade + (n[0].kept ? z[x] : 0.f) + (n[1].kept ? z[2 + x] : 0.f);
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            w->o[i][x] *= fade;
            w->o[i][2 + x] *= fade;
        }
    }
}

template <int D, bool BF16>
__device__ __forceinline__ void add_tile(struct shared<D> *s, uint32_t slot, struct state<D> *w) {
    const uint32_t lane = threadIdx.x % 32, r = lane >> 2, c = lane & 3;
    const uint8_t *keys = s->slot[slot], *values = keys + 32 * D;
    const uint32_t length = s->job.length;
    const struct note n[2] = {s->notes[slot][0], s->notes[slot][1]};
    float z[4] = {0, 0, 0, 0}, more[4] = {0, 0, 0, 0};
    uint32_t p[2][2]; /* [half][high, low] */

    if (n[0].position == NEVER && n[1].position == NEVER)
        return;
    if (n[0].position + 8u > length || n[1].position + 8u > length)
        clear_values<D>(s, slot, length);
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        const uint8_t *at = keys + r * (2 * D) + 16 * ((8 * (i / 2) + 2 * c + i % 2) ^ r);
        const uint4 k0 = *(const uint4 *)at, k1 = *(const uint4 *)(at + 16 * D);
        mma_k16<BF16>(z, k0.x, k1.x, k0.y, k1.y, w->q[i].x, w->q[i].y);
        mma_k16<BF16>(more, k0.z, k1.z, k0.w, k1.w, w->q[i].z, w->q[i].w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        z[i] += more[i];
    soften<D>(n, s->job.scale, z, w);
#pragma unroll
    for (int y = 0; y < 2; y++) {
        uint32_t high = pack_pair<BF16>(z[2 * y], z[2 * y + 1]);
        float2 f = unpack_pair<BF16>(high);
        p[y][0] = transpose_8x8(high);
        p[y][1] = transpose_8x8(pack_pair<BF16>(z[2 * y] - f.x, z[2 * y + 1] - f.y));
    }
#pragma unroll
    for (int i = 0; i < D / 64; i++) {
        uint4 v[2][2];
#pragma unroll
        for (int y = 0; y < 2; y++)
#pragma unroll
            for (int x = 0; x < 2; x++) {
                const int in = 2 * c + x;
                v[y][x] =
                    *(const uint4 *)(values + (8 * y + in) * (2 * D) + 16 * ((8 * i + r) ^ in));
            }
        const uint32_t *w00 = (const uint32_t *)&v[0][0], *w01 = (const uint32_t *)&v[0][1];
        const uint32_t *w10 = (const uint32_t *)&v[1][0], *w11 = (const uint32_t *)&v[1][1];
#pragma unroll
        for (int x = 0; x < 4; x++) {
            uint32_t a0 = __byte_perm(w00[x], w01[x], 0x5410);
            uint32_t a1 = __byte_perm(w00[x], w01[x], 0x7632);
            uint32_t a2 = __byte_perm(w10[x], w11[x], 0x5410);
            uint32_t a3 = __byte_perm(w10[x], w11[x], 0x7632);
            mma_k16<BF16>(w->o[4 * i + x], a0, a1, a2, a3, p[0][0], p[1][0]);
            mma_k16<BF16>(w->o[4 * i + x], a0, a1, a2, a3, p[0][1], p[1][1]);
        }
    }
}

/* ---- merging ---- */

/* What a thread merges: float4 `index` of a group's, i.e. of warp, m-tile and lane. */
struct piece {
    uint32_t warp, tile, lane, query; /* query: its first */
};

template <int D> __device__ __forceinline__ struct piece make_piece(uint32_t index) {
    struct piece e;

    e.warp = index / (2 * D);
    e.tile = index / 32 % (D / 16);
    e.lane = index % 32;
    e.query = e.warp * QUERIES + 2 * (e.lane & 3);
    return e;
}

__device__ __forceinline__ void add_out(float4 *sum, const float4 &x, float f0, float f1) {
    sum->x = fmaf(x.x, f0, sum->x);
    sum->y = fmaf(x.y, f1, sum->y);
    sum->z = fmaf(x.z, f0, sum->z);
    sum->w = fmaf(x.w, f1, sum->w);
}

/* All of a query's tokens: its results but the output. */
template <int D>
__device__ __forceinline__ void finish_state(const struct attend_args &a, struct shared<D> *s,
                                             uint32_t query, const struct lk_cuda_stat &all) {
    s->inverse[query] = all.mass > 0 ? 1.f / all.mass : 0.f;
    finish_query(a, s->job, &s->found, s->mass, query, all);
}

template <int D>
__device__ __forceinline__ void store_out(const struct attend_args &a, const struct shared<D> *s,
                                          const struct piece &e, const float4 &v) {
    const uint32_t channel = 64 * (e.tile / 4) + 8 * (e.lane / 4) + 2 * (e.tile % 4);
    const float f0 = s->inverse[e.query], f1 = s->inverse[e.query + 1];
    float *out = s->job.out + channel;

    *(float2 *)&out[(uint64_t)query_index(a, s->job, e.query) * D] =
        make_float2(v.x * f0, v.z * f0);
    if (e.query + 1 < s->job.queries)
        *(float2 *)&out[(uint64_t)query_index(a, s->job, e.query + 1) * D] =
            make_float2(v.y * f1, v.w * f1);
}

/* The warps that held a piece's queries, in order. */
template <int D>
__device__ __forceinline__ float4 add_warps(const struct shared<D> *s, const struct piece &e) {
    const uint32_t step = s->job.query_warps;
    float4 sum = make_float4(0, 0, 0, 0);

#pragma unroll
    for (int i = 0; i < WARPS; i++)
        if (e.warp + i * step < WARPS)
            add_out(&sum, s->out[e.warp + i * step][e.tile][e.lane], 1.f, 1.f);
    return sum;
}

/* The same of a query's sums. */
template <int D>
__device__ __forceinline__ struct lk_cuda_stat add_stats(const struct shared<D> *s,
                                                         uint32_t query) {
    const uint32_t step = s->job.query_warps, first = query / QUERIES;
    struct lk_cuda_stat all = {s->stat[first][query % QUERIES].peak, 0.f, 0.f, 0.f};

#pragma unroll
    for (int i = 0; i < WARPS; i++)
        if (first + i * step < WARPS) {
            all.mass += s->stat[first + i * step][query % QUERIES].mass;
            all.kept += s->stat[first + i * step][query % QUERIES].kept;
        }
    return all;
}

/* ---- slices ---- */

/* Factors of slices, [query][slice], where the slots were; a warp a query. */
template <int D>
__device__ __forceinline__ void weigh_slices(const struct attend_args &a, struct shared<D> *s) {
    const uint32_t lane = threadIdx.x % 32, slices = s->job.slices;
    const uint64_t step = s->job.partial_bytes;
    float *factors = (float *)s->slot;

#pragma unroll 1
    for (uint32_t q = warp_index(); q < s->job.queries; q += WARPS) {
        const uint8_t *stat = s->job.partials + s->job.query_warps * QUERIES * D * 4 +
                              q * sizeof(struct lk_cuda_stat);
        struct lk_cuda_stat all = {-INFINITY, 0.f, 0.f, 0.f};
        auto load = [&](uint32_t i) {
            return i < slices ? __ldcg((const float4 *)(stat + i * step))
                              : make_float4(-INFINITY, 0.f, 0.f, 0.f);
        };
        float4 v = load(lane);

        all.peak = v.x;
#pragma unroll 1
        for (uint32_t i = lane + 32; i < slices; i += 32)
            all.peak = fmaxf(all.peak, load(i).x);
        all.peak = warp_max(all.peak);
#pragma unroll 1
        for (uint32_t i = lane; i < slices; i += 32) {
            if (i > lane)
                v = load(i);
            const float f = shrink(v.x, all.peak);
            factors[q * slices + i] = f;
            all.mass = fmaf(v.y, f, all.mass);
            all.kept = fmaf(v.z, f, all.kept);
        }
        all.mass = warp_sum(all.mass);
        all.kept = warp_sum(all.kept);
        if (lane == 0)
            finish_state<D>(a, s, q, all);
    }
}

/* All slices of a job, in order: to the output. */
template <int D>
__device__ __forceinline__ void merge_slices(const struct attend_args &a, struct shared<D> *s) {
    const uint32_t slices = s->job.slices, pieces = s->job.query_warps * 2 * D;
    const uint64_t step = s->job.partial_bytes;
    const float *factors = (const float *)s->slot;
    float4 o[BATCH];
    auto load = [&](uint32_t index, uint32_t base) {
        const uint8_t *from = s->job.partials + base * step + 16 * index;
        const bool wanted = make_piece<D>(index).query < s->job.queries;
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            o[i] = wanted && base + i < slices ? __ldcg((const float4 *)(from + i * step))
                                               : make_float4(0, 0, 0, 0);
    };

    load(threadIdx.x, 0);
    weigh_slices<D>(a, s);
    __syncthreads();
#pragma unroll 1
    for (uint32_t index = threadIdx.x; index < pieces; index += THREADS) {
        const struct piece e = make_piece<D>(index);
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
        for (uint32_t base = 0; base < slices; base += BATCH) {
            const float *f0 = factors + e.query * slices + base, *f1 = f0 + slices;
            if (base || index >= THREADS)
                load(index, base);
            if (e.query < s->job.queries)
#pragma unroll
                for (int i = 0; i < BATCH; i++)
                    if (base + i < slices)
                        add_out(&sum, o[i], f0[i], e.query + 1 < s->job.queries ? f1[i] : 0.f);
        }
        if (e.query < s->job.queries)
            store_out<D>(a, s, e, sum);
    }
}

/* ---- a slice's warps ---- */

/* Leave the warp's state in shared memory, scaled to the highest peaks. */
template <int D>
__device__ __forceinline__ void publish_state(struct shared<D> *s, const struct state<D> &w,
                                              uint32_t turn) {
    const uint32_t lane = threadIdx.x % 32, warp = warp_index(), c = lane & 3;
    const uint32_t step = s->job.query_warps, first = warp % step;
    float(*peak)[QUERIES] = s->peak[turn % 2];
    float2 top = make_float2(-INFINITY, -INFINITY);
    float mass[2] = {w.mass[0], w.mass[1]}, kept[2] = {w.kept[0], w.kept[1]};

    if (lane < 4)
        *(float2 *)&peak[warp][2 * c] = make_float2(w.peak[0], w.peak[1]);
#pragma unroll
    for (int x = 0; x < 2; x++)
#pragma unroll
        for (int b = 4; b < 32; b <<= 1) {
            mass[x] += __shfl_xor_sync(LK_FULL_WARP, mass[x], b);
            kept[x] += __shfl_xor_sync(LK_FULL_WARP, kept[x], b);
        }
    __syncthreads(); /* and the slice before is added up */
#pragma unroll
    for (int i = 0; i < WARPS; i++)
        if (first + i * step < WARPS) {
            const float2 y = *(const float2 *)&peak[first + i * step][2 * c];
            top = make_float2(fmaxf(top.x, y.x), fmaxf(top.y, y.y));
        }
    const float f0 = shrink(w.peak[0], top.x), f1 = shrink(w.peak[1], top.y);
#pragma unroll
    for (int i = 0; i < D / 16; i++)
        s->out[warp][i][lane] =
            make_float4(w.o[i][0] * f0, w.o[i][1] * f1, w.o[i][2] * f0, w.o[i][3] * f1);
    if (lane < 4) {
        s->stat[warp][2 * c] = {top.x, mass[0] * f0, kept[0] * f0, 0.f};
        s->stat[warp][2 * c + 1] = {top.y, mass[1] * f1, kept[1] * f1, 0.f};
    }
    __syncthreads();
}

/* The block's warps have a slice: to its partial, or, if it is the only one, to the results. */
template <int D>
__device__ __forceinline__ void finish_slice(const struct attend_args &a, struct shared<D> *s,
                                             uint32_t slice, struct state<D> *w) {
    const uint32_t warps = s->job.query_warps, queries = s->job.queries;
    const bool only = s->job.slices == 1;
    uint8_t *partial = s->job.partials + slice * s->job.partial_bytes;
    float4 *stats = (float4 *)(partial + warps * QUERIES * D * 4);

    publish_state<D>(s, *w, slice);
    if (threadIdx.x < queries) {
        const struct lk_cuda_stat all = add_stats<D>(s, threadIdx.x);
        if (only)
            finish_state<D>(a, s, threadIdx.x, all);
        else
            __stcg(&stats[threadIdx.x], make_float4(all.peak, all.mass, all.kept, 0.f));
    }
    if (only)
        __syncthreads();
#pragma unroll 1
    for (uint32_t index = threadIdx.x; index < warps * 2 * D; index += THREADS) {
        const struct piece e = make_piece<D>(index);
        if (e.query >= queries)
            continue;
        const float4 sum = add_warps<D>(s, e);
        if (only)
            store_out<D>(a, s, e, sum);
        else
            __stcg((float4 *)(partial + 16 * index), sum);
    }
    clear_state<D>(w);
}

/* After the job's last slice of this block. */
template <int D>
__device__ __forceinline__ void finish_job(const struct attend_args &a, struct shared<D> *s,
                                           uint32_t count) {
    if (!all_done(s->job, count, &s->last))
        return;
    if (s->job.slices > 1)
        merge_slices<D>(a, s);
    if (threadIdx.x == 0)
        finish_head(a, s->job, &s->found, s->mass);
}

/* ---- kernel ---- */

__device__ __forceinline__ uint32_t count_picked(const struct job &j) {
    const uint2 x = j.picks ? __ldcg((const uint2 *)j.found) : make_uint2(0, 0);
    return x.x + x.y; /* kept, sampled */
}

/* Slices of a job whose warps hold the same queries. */
template <int D, bool BF16>
__device__ __forceinline__ void run_alone(const struct attend_args &a, struct shared<D> *s,
                                          uint32_t slice, uint32_t last, struct state<D> *w) {
    const uint32_t lane = threadIdx.x % 32, warp = warp_index(), each = s->job.slice_tiles;
    const uint32_t picked = count_picked(s->job), tiles = s->job.tiles;
    uint32_t at = slice, tile = slice * each; /* of what is looked up next */
    auto look = [&] {
        const uint32_t end = min(tiles, (at + 1) * each);
        const struct octet h = look_up(s->job, tile + warp, at < last ? end : 0, lane & 1, picked);
        tile += WARPS;
        if (tile >= end)
            tile = ++at * each;
        return h;
    };

    fill_slot<D>(a, s, look(), warp);
#pragma unroll 1
    for (; slice < last; slice++) {
        const uint32_t end = min(tiles, (slice + 1) * each);
        uint32_t step = slice * each;
#pragma unroll 1
        do { /* once even where there is no token */
            const struct octet next = look();
            copy_wait<0>();
            __syncwarp();
            add_tile<D, BF16>(s, warp, w);
            __syncwarp();
            fill_slot<D>(a, s, next, warp);
            step += WARPS;
        } while (step < end);
        finish_slice<D>(a, s, slice, w);
    }
    copy_wait<0>();
}

/* Slices of a job whose warps hold different queries. A warp fills its own slot; all read four
 * slots while the other four are filled. */
template <int D, bool BF16>
__device__ __forceinline__ void run_together(const struct attend_args &a, struct shared<D> *s,
                                             uint32_t slice, uint32_t last, struct state<D> *w) {
    constexpr uint32_t HALF = WARPS / 2;
    const uint32_t lane = threadIdx.x % 32, warp = warp_index();
    const uint32_t depth = s->job.query_warps, parts = WARPS / depth, own = warp / depth;
    const uint32_t picked = count_picked(s->job);
    const bool busy = warp % depth * QUERIES < s->job.queries;

#pragma unroll 1
    for (; slice < last; slice++) {
        const uint32_t first = slice * s->job.slice_tiles;
        const uint32_t end = min(s->job.tiles, first + s->job.slice_tiles);
        uint32_t tile = first + warp;
        struct octet next = look_up(s->job, tile, end, lane & 1, picked);

        fill_slot<D>(a, s, next, warp);
        tile += WARPS;
        next = look_up(s->job, tile, end, lane & 1, picked);
#pragma unroll 1
        for (uint32_t half = 0; first + half * HALF < end; half++) {
            const uint32_t turn = half % 2;
            if (warp / HALF == turn)
                copy_wait<0>();
            __syncthreads(); /* these four are full, the others read */
            if (half && warp / HALF != turn) {
                fill_slot<D>(a, s, next, warp);
                tile += WARPS;
                next = look_up(s->job, tile, end, lane & 1, picked);
            }
#pragma unroll 1
            for (uint32_t i = own; busy && i < HALF; i += parts)
                add_tile<D, BF16>(s, turn * HALF + i, w);
        }
        copy_wait<0>();
        finish_slice<D>(a, s, slice, w);
    }
}

/* The first warp finds a job for all. */
static __device__ __noinline__ void
prepare_job(const struct attend_args &a, struct lk_cuda_row *row, struct job *ret, uint32_t task) {
    if (threadIdx.x < 32) {
        const struct job j = find_job(a, row, task);
        if (threadIdx.x == 0)
            *ret = j;
    }
}

/* BLOCKS: of a multiprocessor. With two a thread has 128 registers, not quite enough at d 128: one
 * is faster for rows that read little. */
template <int D, bool BF16, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    attend_kernel(const __grid_constant__ struct attend_args a) {
    SHARED_BYTES(memory, 128);
    struct shared<D> *s = (struct shared<D> *)memory;
    const uint32_t warp = warp_index();
    struct state<D> w;
    uint32_t task, last;

    let_next_start();
    find_run(__ldcg(&a.batch->tasks[LK_CUDA_ATTEND]), &task, &last);
    if (task < last)
        prepare_job(a, &s->row, &s->job, task);
    __syncthreads();
    wait_for_previous();
    note_time(a.clock, LK_CUDA_AT_ATTEND);
#pragma unroll 1
    while (task < last) {
        const uint32_t begin = task - s->job.first;
        const uint32_t end = min(last - s->job.first, s->job.slices);

        if (begin == 0)
            list_all(s->job);
        if (warp == 1)
            load_found(s->job, &s->found);
        load_queries<D>(a, s->job, warp % s->job.query_warps * QUERIES, &w);
        clear_state<D>(&w);
        if (s->job.query_warps > 1)
            run_together<D, BF16>(a, s, begin, end, &w);
        else
            run_alone<D, BF16>(a, s, begin, end, &w);
        finish_job<D>(a, s, end - begin);
        task += end - begin;
        if (task < last) {
            __syncthreads();
            prepare_job(a, &s->row, &s->job, task);
            __syncthreads();
        }
    }
}

/* ---- launcher ---- */

template <int D, bool BF16, int BLOCKS>
static int launch_fast(const struct lk_cuda_step *step, void *stream) {
    const struct attend_args a = {step->pool, step->batch, step->sync, step->clock};

    cudaFuncSetAttribute(attend_kernel<D, BF16, BLOCKS>,
                         cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(struct shared<D>));
    return launch(attend_kernel<D, BF16, BLOCKS>, dim3(step->processors * BLOCKS), THREADS,
                  sizeof(struct shared<D>), stream, a);
}

template <int D, int BLOCKS> static int launch_type(const struct lk_cuda_step *step, void *stream) {
    return step->pool.geometry.dtype == LK_BF16 ? launch_fast<D, true, BLOCKS>(step, stream)
                                                : launch_fast<D, false, BLOCKS>(step, stream);
}

int lk_cuda_attend(const struct lk_cuda_step *step, void *stream) {
    switch (step->pool.geometry.head_dim) {
    case 64:
        return launch_type<64, 2>(step, stream);
    case 128: /* exact rows, of several tokens at that, keep two blocks busy */
        return step->scans ? launch_type<128, 1>(step, stream) : launch_type<128, 2>(step, stream);
    case 256:
        return launch_type<256, 1>(step, stream);
    default:
        return lk_cuda_attend_plain(step, stream);
    }
}
