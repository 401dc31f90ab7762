/* SPDX-License-Identifier: MIT */
/*
 * attend.cu - exact attention over picked pages, or over all of them; split over blocks, merged.
 *
 * Geometry: blocks of eight warps take runs of tasks (attend.cuh). Shared memory has slots, a
 * tile's keys and values each; copies run beside the arithmetic. Where a KV head has one band of
 * queries (eight), a warp has slots of its own and takes every eighth tile of a slice, slice after
 * slice: the next tiles are on their way while one slice is merged. Where it has more, a warp holds
 * two bands, and warps that hold different ones read the same slots: half of them, while the other
 * half is filled.
 *
 * A slot: rows of keys, then of values; the 16-byte chunks of row i are permuted by i % 8, so that
 * no eight rows that are read at once meet in a bank. Rows that are not there are filled with
 * zeros.
 *
 * A tile, on tensor cores: queries are A (16 x 16 channels), keys B (16 channels x 8 tokens); a
 * lane has two tokens of a query's logits in each octet, and what it makes of them is A of the
 * product with values, B [16 tokens][8 channels]. Weights are carried in two 16-bit parts. With one
 * band the lower eight rows of A are zeros.
 *
 * Merging: a lane keeps its out as float4 {channel, + 1, + 8, + 9} of a query, and so it stays in
 * shared memory and in partials: warps scale theirs to the highest peak of a query and are added in
 * order, slices by the last block to finish one of them, in order. The number of slices depends on
 * the row alone.
 *
 * Edge cases: tokens beyond a query's own position get weight 0 by selection, and beyond the length
 * nothing is read; no token: out 0, LSE -inf.
 */
#include "attend.cuh"

#define BATCH 16 /* partials of slices on their way together */

struct note { /* an octet in its slot */
    int position;
    float bias;
    uint32_t kept, reserved;
};

template <int D, int DEPTH> struct shared { /* DEPTH: slots of a warp */
    uint8_t slot[DEPTH * WARPS][64 * D];
    float4 out[WARPS][D / 16][32];     /* of one band a warp; two take the place of the slots */
    float peak[2][WARPS][2 * QUERIES]; /* by turns */
    struct lk_cuda_stat stat[WARPS][2 * QUERIES]; /* scaled, as out is */
    struct note notes[DEPTH * WARPS][2];
    struct job job;
    struct lk_cuda_row row;
    struct lk_cuda_head found;
    float mass[WARPS * QUERIES], inverse[WARPS * QUERIES]; /* of queries: captured; 1 / sum */
    uint32_t last;
};

/* A warp's queries and what it knows of them so far: lane 4 r + c has queries r and r + 8, of every
 * eight channels 2c and 2c + 1. */
template <int D, int BANDS> struct state {
    uint32_t q[D / 16][2 * BANDS];
    float o[D / 8][4]; /* two of query r, two of r + 8 */
    float peak[BANDS], mass[BANDS], kept[BANDS];
    int limit[BANDS];
};

/* The queries of a job from `first` on. */
template <int D, int BANDS>
__device__ __forceinline__ void load_queries(const struct attend_args &a, const struct job &j,
                                             uint32_t first, struct state<D, BANDS> *w) {
    const uint32_t lane = threadIdx.x % 32, r = lane >> 2, c = lane & 3;

#pragma unroll
    for (int h = 0; h < BANDS; h++) {
        const uint32_t query = first + QUERIES * h + r;
        const uint32_t *from = (const uint32_t *)(j.q + (uint64_t)query_index(a, j, query) * D) + c;
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            w->q[i][2 * h] = query < j.queries ? from[8 * i] : 0;
            w->q[i][2 * h + 1] = query < j.queries ? from[8 * i + 4] : 0;
        }
        w->limit[h] = query_limit(j, query);
    }
}

template <int D, int BANDS> __device__ __forceinline__ void clear_state(struct state<D, BANDS> *w) {
#pragma unroll
    for (int h = 0; h < BANDS; h++) {
        w->peak[h] = -INFINITY;
        w->mass[h] = w->kept[h] = 0;
    }
#pragma unroll
    for (int i = 0; i < D / 8; i++)
        w->o[i][0] = w->o[i][1] = w->o[i][2] = w->o[i][3] = 0;
}

/* ---- slots ---- */

/* Start the copies of a tile. `h`: the lane's octet, lane % 2 of the tile. CLEAR: zeros, too, where
 * there is no tile. */
template <bool CLEAR, int D, int DEPTH>
__device__ __forceinline__ void fill_slot(const struct attend_args &a, struct shared<D, DEPTH> *s,
                                          const struct octet &h, uint32_t slot) {
    constexpr int CHUNKS = D / 8, ROWS = 32 / CHUNKS;
    const uint32_t lane = threadIdx.x % 32, row = lane / CHUNKS, chunk = lane % CHUNKS;
    const int position = octet_position(s->job, h);
    const uint32_t own = position == NEVER ? 0 : s->job.length - position; /* tokens there */
    const uint32_t there[2] = {__shfl_sync(LK_FULL_WARP, own, 0),
                               __shfl_sync(LK_FULL_WARP, own, 1)};
    const uint64_t at = (uint64_t)(own ? octet_keys(a, s->job, h) : (const uint16_t *)s->job.base);
    const uint64_t keys[2] = {__shfl_sync(LK_FULL_WARP, at, 0), __shfl_sync(LK_FULL_WARP, at, 1)};
    const uint64_t values = (uint64_t)(2 * D) << s->job.token_shift;

    if (lane < 2)
        s->notes[slot][lane] = {position, h.bias, h.kept, 0};
    if (CLEAR || there[0] | there[1])
#pragma unroll
        for (int k = 0; k < 16 / ROWS; k++) {
            const uint32_t in = k * ROWS % 8 + row, y = k * ROWS / 8;
            const uint64_t from = keys[y] + in * (2 * D) + 16 * chunk;
            uint8_t *to = s->slot[slot] + (8 * y + in) * (2 * D) + 16 * (chunk ^ in);
            copy_or_clear(to, (const void *)from, in < there[y]);
            copy_or_clear(to + 32 * D, (const void *)(from + values), in < there[y]);
        }
    copy_commit();
}

/* ---- tiles ---- */

/* Logits z[tile][octet][query, token] -> weights 2^(logit - peak), out and sums scaled to the new
 * peak. */
template <int TILES, int D, int BANDS>
__device__ __forceinline__ void soften(const struct note n[TILES][2], float scale,
                                       float z[TILES][2][4], struct state<D, BANDS> *w) {
    const int c = 2 * (threadIdx.x % 4);
    float fade[2] = {1.f, 1.f};

#pragma unroll
    for (int h = 0; h < BANDS; h++) {
        float top = w->peak[h], base, all = 0, kept = 0;
#pragma unroll
        for (int i = 0; i < 4 * TILES; i++) {
            const struct note &octet = n[i / 4][i / 2 % 2];
            float *logit = &z[i / 4][i / 2 % 2][2 * h + i % 2];
            *logit = octet.position + c + i % 2 < w->limit[h] ? fmaf(*logit, scale, octet.bias)
                                                              : -INFINITY;
            top = fmaxf(top, *logit);
        }
        top = fmaxf(top, __shfl_xor_sync(LK_FULL_WARP, top, 1));
        top = fmaxf(top, __shfl_xor_sync(LK_FULL_WARP, top, 2));
        base = top == -INFINITY ? 0.f : top;
        fade[h] = shrink(w->peak[h], base);
        w->peak[h] = top;
#pragma unroll
        for (int y = 0; y < 2 * TILES; y++) {
            float *pair = &z[y / 2][y % 2][2 * h];
            pair[0] = exp2_fast(pair[0] - base);
            pair[1] = exp2_fast(pair[1] - base);
            all += pair[0] + pair[1];
            kept += n[y / 2][y % 2].kept ? pair[0] + pair[1] : 0.f;
        }
        w->mass[h] = fmaf(w->mass[h], fade[h], all);
        w->kept[h] = fmaf(w->kept[h], fade[h], kept);
    }
    if (!__any_sync(LK_FULL_WARP, fade[0] != 1.f || fade[1] != 1.f))
        return; /* most tiles change no peak */
#pragma unroll
    for (int i = 0; i < D / 8; i++)
#pragma unroll
        for (int x = 0; x < 2 * BANDS; x++)
            w->o[i][x] *= fade[x / 2];
}

/* z = queries x keys of a tile. */
template <bool BF16, int D, int BANDS>
__device__ __forceinline__ void multiply_keys(const uint8_t *slot, const struct state<D, BANDS> &w,
                                              float z[2][4]) {
    const uint32_t in = threadIdx.x % 8, m = threadIdx.x % 32 / 8; /* matrix [octet][channels] */
    const uint8_t *keys = slot + (8 * (m / 2) + in) * (2 * D);
    float more[2][4] = {};
    uint32_t b[4];

#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const uint32_t *q = w.q[i], q2 = BANDS > 1 ? q[2 * BANDS - 2] : 0,
                       q3 = BANDS > 1 ? q[2 * BANDS - 1] : 0;
        float(*to)[4] = i % 2 ? more : z;
        load_matrices(b, keys + 16 * ((2 * i + m % 2) ^ in));
        mma_k16<BF16>(to[0], q[0], q2, q[1], q3, b[0], b[1]);
        mma_k16<BF16>(to[1], q[0], q2, q[1], q3, b[2], b[3]);
    }
#pragma unroll
    for (int y = 0; y < 2; y++)
#pragma unroll
        for (int x = 0; x < 2 * BANDS; x++)
            z[y][x] += more[y][x];
}

/* out += weights x values of a tile. */
template <bool BF16, int D, int BANDS>
__device__ __forceinline__ void multiply_values(const uint8_t *slot, const float z[2][4],
                                                struct state<D, BANDS> *w) {
    const uint32_t in = threadIdx.x % 8, m = threadIdx.x % 32 / 8; /* matrix [channels][octet] */
    const uint8_t *values = slot + 32 * D + (8 * (m % 2) + in) * (2 * D);
    uint32_t high[4] = {}, low[4] = {}, b[4];

#pragma unroll
    for (int y = 0; y < 2; y++)
#pragma unroll
        for (int h = 0; h < BANDS; h++) {
            const float *pair = &z[y][2 * h];
            const uint32_t word = pack_pair<BF16>(pair[0], pair[1]);
            const float2 f = unpack_pair<BF16>(word);
            high[2 * y + h] = word;
            low[2 * y + h] = pack_pair<BF16>(pair[0] - f.x, pair[1] - f.y);
        }
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        load_transposed(b, values + 16 * ((2 * i + m / 2) ^ in));
#pragma unroll
        for (int x = 0; x < 2; x++) {
            float *o = w->o[2 * i + x];
            mma_k16<BF16>(o, high[0], high[1], high[2], high[3], b[2 * x], b[2 * x + 1]);
            mma_k16<BF16>(o, low[0], low[1], low[2], low[3], b[2 * x], b[2 * x + 1]);
        }
    }
}

/* The tiles in slots `slot`, `slot` + step, ..: one softmax for all. */
template <bool BF16, int TILES, int D, int DEPTH, int BANDS>
__device__ __forceinline__ void add_tiles(const struct shared<D, DEPTH> *s, uint32_t slot,
                                          uint32_t step, struct state<D, BANDS> *w) {
    struct note n[TILES][2];
    float z[TILES][2][4] = {};

#pragma unroll
    for (int t = 0; t < TILES; t++) {
        n[t][0] = s->notes[slot + t * step][0];
        n[t][1] = s->notes[slot + t * step][1];
    }
    if (n[0][0].position == NEVER && n[0][1].position == NEVER)
        return;
#pragma unroll
    for (int t = 0; t < TILES; t++)
        multiply_keys<BF16>(s->slot[slot + t * step], *w, z[t]);
    soften<TILES>(n, s->job.scale, z, w);
#pragma unroll
    for (int t = 0; t < TILES; t++)
        multiply_values<BF16>(s->slot[slot + t * step], z[t], w);
}

/* ---- merging ---- */

/* What a thread merges: float4 `index` of the job's, i.e. of band, two octets of channels, lane. */
struct piece {
    uint32_t band, tile, lane, query, channel;
};

template <int D> __device__ __forceinline__ struct piece make_piece(uint32_t index) {
    struct piece e;

    e.band = index / (2 * D);
    e.tile = index / 32 % (D / 16);
    e.lane = index % 32;
    e.query = e.band * QUERIES + e.lane / 4;
    e.channel = 16 * e.tile + 2 * (e.lane % 4);
    return e;
}

/* Where warps leave their out: [warp][band of the warp][D / 16][32]. */
template <int BANDS, int D, int DEPTH>
__device__ __forceinline__ float4 *warp_outs(struct shared<D, DEPTH> *s) {
    return BANDS > 1 ? (float4 *)s->slot : &s->out[0][0][0];
}

/* All of a query's tokens: its results but the output. */
template <int D, int DEPTH>
__device__ __forceinline__ void finish_state(const struct attend_args &a,
                                             struct shared<D, DEPTH> *s, uint32_t query,
                                             const struct lk_cuda_stat &all) {
    s->inverse[query] = all.mass > 0 ? 1.f / all.mass : 0.f;
    finish_query(a, s->job, &s->found, s->mass, query, all);
}

template <int D, int DEPTH>
__device__ __forceinline__ void store_out(const struct attend_args &a,
                                          const struct shared<D, DEPTH> *s, const struct piece &e,
                                          const float4 &v) {
    const float f = s->inverse[e.query];
    float *out = s->job.out + (uint64_t)query_index(a, s->job, e.query) * D + e.channel;

    *(float2 *)out = make_float2(v.x * f, v.y * f);
    *(float2 *)(out + 8) = make_float2(v.z * f, v.w * f);
}

/* The warps that held a piece's query, in order. */
template <int BANDS, int D, int DEPTH>
__device__ __forceinline__ float4 add_warps(struct shared<D, DEPTH> *s, const struct piece &e) {
    const uint32_t step = query_warps(s->job), first = e.band / BANDS;
    const float4 *outs = warp_outs<BANDS>(s) + (e.tile * 32 + e.lane);
    float4 sum = make_float4(0, 0, 0, 0);

#pragma unroll
    for (int i = 0; i < WARPS; i++)
        if (first + i * step < WARPS)
            add_scaled(&sum, outs[((first + i * step) * BANDS + e.band % BANDS) * (2 * D)], 1.f);
    return sum;
}

/* The same of a query's sums. */
template <int BANDS, int D, int DEPTH>
__device__ __forceinline__ struct lk_cuda_stat add_stats(const struct shared<D, DEPTH> *s,
                                                         uint32_t query) {
    const uint32_t step = query_warps(s->job), first = query / (BANDS * QUERIES);
    const uint32_t in = query % (BANDS * QUERIES);
    struct lk_cuda_stat all = {s->stat[first][in].peak, 0.f, 0.f, 0.f};

#pragma unroll
    for (int i = 0; i < WARPS; i++)
        if (first + i * step < WARPS) {
            all.mass += s->stat[first + i * step][in].mass;
            all.kept += s->stat[first + i * step][in].kept;
        }
    return all;
}

/* ---- slices ---- */

/* Factors of slices, [query][slice], where the slots were; a warp a query. */
template <int D, int DEPTH>
__device__ __forceinline__ void weigh_slices(const struct attend_args &a,
                                             struct shared<D, DEPTH> *s) {
    const uint32_t lane = threadIdx.x % 32, slices = s->job.slices;
    const uint64_t step = s->job.partial_bytes;
    float *factors = (float *)s->slot;

#pragma unroll 1
    for (uint32_t q = warp_index(); q < s->job.queries; q += WARPS) {
        const uint8_t *stat =
            s->job.partials + s->job.bands * QUERIES * D * 4 + q * sizeof(struct lk_cuda_stat);
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
            finish_state(a, s, q, all);
    }
}

/* All slices of a job, in order: to the output. */
template <int D, int DEPTH>
__device__ __forceinline__ void merge_slices(const struct attend_args &a,
                                             struct shared<D, DEPTH> *s) {
    const uint32_t slices = s->job.slices, pieces = s->job.bands * 2 * D;
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
    weigh_slices(a, s);
    __syncthreads();
#pragma unroll 1
    for (uint32_t index = threadIdx.x; index < pieces; index += THREADS) {
        const struct piece e = make_piece<D>(index);
        float4 sum = make_float4(0, 0, 0, 0);
        if (e.query >= s->job.queries)
            continue;
#pragma unroll 1
        for (uint32_t base = 0; base < slices; base += BATCH) {
            if (base || index >= THREADS)
                load(index, base);
#pragma unroll
            for (int i = 0; i < BATCH; i++)
                if (base + i < slices)
                    add_scaled(&sum, o[i], factors[e.query * slices + base + i]);
        }
        store_out(a, s, e, sum);
    }
}

/* ---- a slice's warps ---- */

/* Leave the warp's state in shared memory, scaled to the highest peaks. */
template <int D, int DEPTH, int BANDS>
__device__ __forceinline__ void publish_state(struct shared<D, DEPTH> *s,
                                              const struct state<D, BANDS> &w, uint32_t turn) {
    const uint32_t lane = threadIdx.x % 32, r = lane >> 2, c = lane & 3, warp = warp_index();
    const uint32_t step = query_warps(s->job), first = warp % step;
    float4 *out = warp_outs<BANDS>(s) + warp * BANDS * (2 * D) + lane;
    float(*peak)[2 * QUERIES] = s->peak[turn % 2];

#pragma unroll
    for (int h = 0; h < BANDS; h++)
        if (c == 0)
            peak[warp][QUERIES * h + r] = w.peak[h];
    __syncthreads(); /* and the slice before is added up, the slots are read */
#pragma unroll
    for (int h = 0; h < BANDS; h++) {
        float top = -INFINITY, mass = w.mass[h], kept = w.kept[h];
#pragma unroll
        for (int b = 1; b < 4; b <<= 1) {
            mass += __shfl_xor_sync(LK_FULL_WARP, mass, b);
            kept += __shfl_xor_sync(LK_FULL_WARP, kept, b);
        }
#pragma unroll
        for (int i = 0; i < WARPS; i++)
            if (first + i * step < WARPS)
                top = fmaxf(top, peak[first + i * step][QUERIES * h + r]);
        const float f = shrink(w.peak[h], top);
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            const float *x = &w.o[2 * i][2 * h], *y = &w.o[2 * i + 1][2 * h];
            out[h * (2 * D) + 32 * i] = make_float4(x[0] * f, x[1] * f, y[0] * f, y[1] * f);
        }
        if (c == 0)
            s->stat[warp][QUERIES * h + r] = {top, mass * f, kept * f, 0.f};
    }
    __syncthreads();
}

/* The block's warps have a slice: to its partial, or, if it is the only one, to the results. */
template <int D, int DEPTH, int BANDS>
__device__ __forceinline__ void finish_slice(const struct attend_args &a,
                                             struct shared<D, DEPTH> *s, uint32_t slice,
                                             struct state<D, BANDS> *w) {
    const uint32_t bands = s->job.bands, queries = s->job.queries;
    const bool only = s->job.slices == 1;
    uint8_t *partial = s->job.partials + slice * s->job.partial_bytes;
    float4 *stats = (float4 *)(partial + bands * QUERIES * D * 4);

    publish_state(s, *w, slice);
    if (threadIdx.x < queries) {
        const struct lk_cuda_stat all = add_stats<BANDS>(s, threadIdx.x);
        if (only)
            finish_state(a, s, threadIdx.x, all);
        else
            __stcg(&stats[threadIdx.x], make_float4(all.peak, all.mass, all.kept, 0.f));
    }
    if (only)
        __syncthreads();
#pragma unroll 1
    for (uint32_t index = threadIdx.x; index < bands * 2 * D; index += THREADS) {
        const struct piece e = make_piece<D>(index);
        if (e.query >= queries)
            continue;
        const float4 sum = add_warps<BANDS>(s, e);
        if (only)
            store_out(a, s, e, sum);
        else
            __stcg((float4 *)(partial + 16 * index), sum);
    }
    clear_state(w);
}

/* After the job's last slice of this block. */
template <int D, int DEPTH>
__device__ __forceinline__ void finish_job(const struct attend_args &a, struct shared<D, DEPTH> *s,
                                           uint32_t count) {
    if (!all_done(s->job, count, &s->last))
        return;
    if (s->job.slices > 1)
        merge_slices(a, s);
    if (threadIdx.x == 0)
        finish_head(a, s->job, &s->found, s->mass);
}

/* ---- kernel ---- */

/* Slices of a job of one band: warps hold the same queries. */
template <bool BF16, int D, int DEPTH>
__device__ __forceinline__ void run_alone(const struct attend_args &a, struct shared<D, DEPTH> *s,
                                          uint32_t slice, uint32_t last) {
    const uint32_t lane = threadIdx.x % 32, warp = warp_index(), each = s->job.slice_tiles;
    const uint32_t tiles = s->job.tiles;
    uint32_t at = slice, tile = slice * each, turn = 0; /* at, tile: of what is looked up next */
    struct octet next[DEPTH];
    struct state<D, 1> w;
    auto look = [&] {
        const uint32_t end = min(tiles, (at + 1) * each);
        const struct octet h = look_up(s->job, tile + warp, at < last ? end : 0, lane & 1);
        tile += WARPS;
        if (tile >= end)
            tile = ++at * each;
        return h;
    };

    load_queries(a, s->job, 0, &w);
    clear_state(&w);
#pragma unroll
    for (int i = 0; i < DEPTH; i++)
        next[i] = look();
#pragma unroll
    for (int i = 0; i < DEPTH; i++)
        fill_slot<false>(a, s, next[i], warp * DEPTH + i);
#pragma unroll 1
    for (; slice < last; slice++) {
        const uint32_t end = min(tiles, (slice + 1) * each);
        uint32_t step = slice * each;
#pragma unroll 1
        do { /* once even where there is no token */
            const uint32_t slot = warp * DEPTH + turn;
            next[0] = look();
            copy_wait<DEPTH - 1>();
            __syncwarp();
            add_tiles<BF16, 1>(s, slot, 0, &w);
            __syncwarp();
            fill_slot<false>(a, s, next[0], slot);
            turn = (turn + 1) % DEPTH;
            step += WARPS;
        } while (step < end);
        finish_slice(a, s, slice, &w);
    }
    copy_wait<0>();
}

/* Slices of a job of several bands. Each warp fills a slot, of one half in turn or of each, and all
 * read what the others filled. Of those that hold the same queries a warp takes every parts-th tile
 * of the slice, and the same ones together whatever DEPTH is. */
template <bool BF16, int D, int DEPTH>
__device__ __forceinline__ void run_together(const struct attend_args &a,
                                             struct shared<D, DEPTH> *s, uint32_t slice,
                                             uint32_t last) {
    constexpr uint32_t HALF = DEPTH * WARPS / 2;
    constexpr int TILES = D > 128 ? 1 : 2;                  /* at a time: what registers hold */
    constexpr uint32_t LEAST = D == 128 ? WARPS / 2 : HALF; /* HALF of the least DEPTH of a D */
    const uint32_t lane = threadIdx.x % 32, warp = warp_index(), mine = warp % HALF;
    const uint32_t depth = query_warps(s->job), parts = WARPS / depth, own = warp / depth;
    const uint32_t together = TILES * parts <= LEAST ? TILES : 1;
    const uint32_t query = warp % depth * 2 * QUERIES;
    struct state<D, 2> w;

    load_queries(a, s->job, query, &w);
    clear_state(&w);
#pragma unroll 1
    for (; slice < last; slice++) {
        const uint32_t first = slice * s->job.slice_tiles;
        const uint32_t end = min(s->job.tiles, first + s->job.slice_tiles);
        uint32_t tile = first + warp;
        struct octet next = look_up(s->job, tile, end, lane & 1);
        auto fill = [&](uint32_t half) {
            if (HALF < WARPS && warp / HALF != half % 2)
                return;
            fill_slot<true>(a, s, next, half % 2 * HALF + mine);
            tile += WARPS;
            next = look_up(s->job, tile, end, lane & 1);
        };

        fill(0);
#pragma unroll 1
        for (uint32_t half = 0; first + half * HALF < end; half++) {
            copy_wait<0>();
            __syncthreads(); /* this half is full, the other one is read */
            fill(half + 1);
#pragma unroll 1
            for (uint32_t i = (own - half * HALF) % parts; query < s->job.queries && i < HALF;
                 i += together * parts)
                if (together == TILES)
                    add_tiles<BF16, TILES>(s, half % 2 * HALF + i, parts, &w);
                else
                    add_tiles<BF16, 1>(s, half % 2 * HALF + i, parts, &w);
        }
        copy_wait<0>(); /* the half after the last: it takes what is added up */
        finish_slice(a, s, slice, &w);
        __syncthreads();
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

template <int D, bool BF16, int DEPTH>
__global__ void __launch_bounds__(THREADS, 1)
    attend_kernel(const __grid_constant__ struct attend_args a) {
    SHARED_BYTES(memory, 128);
    struct shared<D, DEPTH> *s = (struct shared<D, DEPTH> *)memory;
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
        if (warp_index() == 1)
            load_found(s->job, &s->found);
        if (s->job.bands > 1)
            run_together<BF16>(a, s, begin, end);
        else
            run_alone<BF16>(a, s, begin, end);
        finish_job(a, s, end - begin);
        task += end - begin;
        if (task < last) {
            __syncthreads();
            prepare_job(a, &s->row, &s->job, task);
            __syncthreads();
        }
    }
}

/* ---- launcher ---- */

template <int D, bool BF16, int DEPTH>
static int launch_fast(const struct lk_cuda_step *step, void *stream) {
    const struct attend_args a = {step->pool, step->batch, step->sync, step->clock};

    cudaFuncSetAttribute(attend_kernel<D, BF16, DEPTH>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         sizeof(struct shared<D, DEPTH>));
    return launch(attend_kernel<D, BF16, DEPTH>, dim3(step->processors), THREADS,
                  sizeof(struct shared<D, DEPTH>), stream, a);
}

template <int D, int DEPTH> static int launch_type(const struct lk_cuda_step *step, void *stream) {
    return step->pool.geometry.dtype == LK_BF16 ? launch_fast<D, true, DEPTH>(step, stream)
                                                : launch_fast<D, false, DEPTH>(step, stream);
}

int lk_cuda_attend(const struct lk_cuda_step *step, void *stream) {
    switch (step->pool.geometry.head_dim) {
    case 64:
        return launch_type<64, 2>(step, stream);
    case 128: /* of rows that read little one slot is faster, of long ones two are */
        return step->scans ? launch_type<128, 1>(step, stream) : launch_type<128, 2>(step, stream);
    case 256:
        return launch_type<256, 1>(step, stream);
    default:
        return lk_cuda_attend_plain(step, stream);
    }
}
