/* SPDX-License-Identifier: MIT */
/*
 * attend.cu - exact attention over picked pages, or over all of them; split over blocks, merged.
 *
 * Geometry: a block takes a run of tasks (attend.cuh). Four warps of it fetch tiles, keys and
 * values each, into a ring of slots (attend_ring.cuh), job after job; eight attend. Where a KV head
 * has one band of queries (eight), each takes every eighth tile of a slice. Where it has more, a
 * warp holds two bands, and warps that hold different ones read the same slots. With more than 32
 * queries, where the device has such products, four warps multiply theirs together (WIDE).
 *
 * A tile, on tensor cores: queries are A (16 x 16 channels), keys B (16 channels x 8 tokens); a
 * lane has two tokens of a query's logits in each octet, and what it makes of them is A of the
 * product with values, B [16 tokens][8 channels]. Weights are carried in two 16-bit parts. With one
 * band the lower eight rows of A are zeros, or the weights' low parts. Values of tokens that are
 * not there are cleared where they are read: their weight is 0, but they may hold anything.
 *
 * Merging: a lane keeps its out as float4 {channel, + 1, + 8, + 9} of a query, and so it stays in
 * shared memory and in partials. Warps of a slice, then slices, are added in order, each scaled to
 * the highest peak of a query; slices by the last block to finish one of them, or by several, a
 * band each. The number of slices depends on the row alone, and so do the bits.
 *
 * Code runs once where a row has few tiles, and what lies far off comes late: branches are ordered
 * so that in memory the fetching warps' code comes first, then that of one band. CUDA 13.0 places
 * an else before its if; what it is worth is in RESULTS.md.
 *
 * Edge cases: tokens beyond a query's own position get weight 0 by selection, and beyond the length
 * nothing counts; no token: out 0, LSE -inf.
 */
#include "attend_ring.cuh"

#define PARTIALS 16  /* of slices on their way together */
#define ROOM     256 /* float4 that a warp leaves for merging at a time */

/* Bands of a job that a block merges: every step-th. */
struct part {
    uint32_t band, step; /* band: UINT32_MAX: none */
};

/* Beside the ring. */
struct shared {
    struct ring ring;
    float4 out[WARPS][ROOM];
    struct lk_cuda_stat stat[WARPS][2 * QUERIES];
    alignas(16) struct lk_cuda_head found[JOBS];
    alignas(16) float mass[WARPS * QUERIES]; /* captured, of queries */
    uint32_t last;
    struct part part;
};

/* A job in hand. */
struct work {
    const struct attend_args &a;
    struct shared *s;
    const struct job &j;
    struct lk_cuda_head *found;
    const uint8_t *slots;
    uint32_t count; /* of slots */
};

/* A warp's queries and what it knows of them so far: lane 4 r + c has queries r and r + 8, of every
 * eight channels 2c and 2c + 1. */
template <int D, int BANDS> struct state {
    uint32_t q[D / 16][2 * BANDS];
    float o[D / 8][4]; /* two of query r, two of r + 8; of one band: what low weights add */
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

/* ---- tiles ---- */

/* Logits z[tile][octet][query, token], base 2; -inf of those that a query does not see. */
template <int TILES, int D, int BANDS>
__device__ __forceinline__ void mask_logits(const struct job &j, const struct note n[TILES][2],
                                            const struct state<D, BANDS> &w, float z[TILES][2][4]) {
    const int c = 2 * (threadIdx.x % 4), least = (int)(j.length - j.tokens) + 1;
    bool seen = true; /* all, by all queries, as of most tiles */

#pragma unroll
    for (int y = 0; y < 2 * TILES; y++) {
        const struct note &octet = n[y / 2][y % 2];
        seen = seen && octet.position + 8 <= least;
#pragma unroll
        for (int x = 0; x < 2 * BANDS; x++)
            z[y / 2][y % 2][x] = fmaf(z[y / 2][y % 2][x], j.scale, octet.bias);
    }
    if (seen)
        return;
#pragma unroll
    for (int y = 0; y < 2 * TILES; y++)
#pragma unroll
        for (int x = 0; x < 2 * BANDS; x++)
            if (n[y / 2][y % 2].position + c + x % 2 >= w.limit[x / 2])
                z[y / 2][y % 2][x] = -INFINITY;
}

/* Logits -> weights 2^(logit - peak), out and sums scaled to the new peak. */
template <int TILES, int D, int BANDS>
__device__ __forceinline__ void soften(const struct job &j, const struct note n[TILES][2],
                                       float z[TILES][2][4], struct state<D, BANDS> *w) {
    float fade[2] = {1.f, 1.f};

#pragma unroll
    for (int h = 0; h < BANDS; h++) {
        float top = w->peak[h], base, all = 0, kept = 0;
#pragma unroll
        for (int i = 0; i < 4 * TILES; i++)
            top = fmaxf(top, z[i / 4][i / 2 % 2][2 * h + i % 2]);
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
            kept += j.picks && n[y / 2][y % 2].kept ? pair[0] + pair[1] : 0.f;
        }
        w->mass[h] = fmaf(w->mass[h], fade[h], all);
        w->kept[h] = fmaf(w->kept[h], fade[h], kept);
    }
    if (!__any_sync(LK_FULL_WARP, fade[0] != 1.f || fade[1] != 1.f))
        return; /* most tiles change no peak */
#pragma unroll
    for (int i = 0; i < D / 8; i++)
#pragma unroll
        for (int x = 0; x < 4; x++)
            w->o[i][x] *= fade[BANDS > 1 ? x / 2 : 0];
}

/* z = queries x keys of a tile. */
template <bool BF16, int D, int BANDS>
__device__ __forceinline__ void multiply_keys(const struct job &j, const uint8_t *slot,
                                              const struct state<D, BANDS> &w, float z[2][4]) {
    const uint32_t in = threadIdx.x % 8, m = threadIdx.x % 32 / 8; /* matrix [octet][channels] */
    const uint8_t *keys = slot + m / 2 * octet_step<D>(j) + in * BOX_ROW;
    float more[2][4] = {};
    uint32_t b[4];

#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const uint32_t *q = w.q[i], q2 = BANDS > 1 ? q[2 * BANDS - 2] : 0,
                       q3 = BANDS > 1 ? q[2 * BANDS - 1] : 0;
        float(*to)[4] = i % 2 ? more : z;
        load_matrices(b, keys + i / 4 * column_step(j) + 16 * (2 * (i % 4) ^ m % 2 ^ in));
        mma_k16<BF16>(to[0], q[0], q2, q[1], q3, b[0], b[1]);
        mma_k16<BF16>(to[1], q[0], q2, q[1], q3, b[2], b[3]);
    }
#pragma unroll
    for (int y = 0; y < 2; y++)
#pragma unroll
        for (int x = 0; x < 2 * BANDS; x++)
            z[y][x] += more[y][x];
}

/* The same of several tiles by four warps together, of their 64 queries. */
template <bool BF16, int TILES, int D>
__device__ __forceinline__ void
multiply_keys_wide(const struct work &t, const struct place p[TILES], const struct state<D, 2> &w,
                   float z[TILES][2][4]) {
    uint64_t b[TILES];

#pragma unroll
    for (int i = 0; i < TILES; i++)
        b[i] = wide_matrix((uint32_t)__cvta_generic_to_shared(t.slots + p[i].slot * (64 * D)),
                           octet_step<D>(t.j));
    wide_begin();
#pragma unroll
    for (int x = 0; x < D / 16; x++)
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            const uint32_t a[4] = {w.q[x][0], w.q[x][2], w.q[x][1], w.q[x][3]};
            wide_rows<BF16>(z[i], a, wide_offset(b[i], x / 4 * column_step(t.j) + 32 * (x % 4)));
        }
    wide_end();
}

/* Bits of the lane's two tokens of an octet, of which so many are there. */
__device__ __forceinline__ uint32_t there_mask(uint32_t there) {
    const uint32_t own = 2 * (threadIdx.x % 4);

    return own + 1 < there ? 0xffffffffu : own < there ? 0xffffu : 0;
}

/* A tile's weights, as A of the product with values: in two parts, `low` what `high` lacks. */
struct weights {
    uint32_t high[4], low[4];
};

template <bool BF16, int BANDS>
__device__ __forceinline__ struct weights pack_weights(const float z[2][4]) {
    struct weights ret = {};

#pragma unroll
    for (int y = 0; y < 2; y++)
#pragma unroll
        for (int h = 0; h < BANDS; h++) {
            const float *pair = &z[y][2 * h];
            const uint32_t word = pack_pair<BF16>(pair[0], pair[1]);
            const float2 f = unpack_pair<BF16>(word);
            ret.high[2 * y + h] = word;
            ret.low[2 * y + h] = pack_pair<BF16>(pair[0] - f.x, pair[1] - f.y);
        }
    return ret;
}

/* out += weights x values of a tile. WHOLE: all of its tokens are there. */
template <bool BF16, bool WHOLE, int D, int BANDS>
__device__ __forceinline__ void multiply_values(const struct job &j, const uint8_t *slot,
                                                const struct note n[2], const float z[2][4],
                                                struct state<D, BANDS> *w) {
    const uint32_t in = threadIdx.x % 8, m = threadIdx.x % 32 / 8; /* matrix [channels][octet] */
    const uint8_t *values = slot + values_step<D>(j) + m % 2 * octet_step<D>(j) + in * BOX_ROW;
    const uint32_t mask[2] = {there_mask(n[0].there), there_mask(n[1].there)};
    const struct weights a = pack_weights<BF16, BANDS>(z);
    uint32_t b[4];

#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        load_transposed(b, values + i / 4 * column_step(j) + 16 * (2 * (i % 4) ^ m / 2 ^ in));
#pragma unroll
        for (int x = 0; x < 4 && !WHOLE; x++)
            b[x] &= mask[x % 2];
#pragma unroll
        for (int x = 0; x < 2; x++) {
            float *o = w->o[2 * i + x];
            const uint32_t *h = a.high, *l = a.low, b0 = b[2 * x], b1 = b[2 * x + 1];
            mma_k16<BF16>(o, h[0], BANDS > 1 ? h[1] : l[0], h[2], BANDS > 1 ? h[3] : l[2], b0, b1);
            if (BANDS > 1)
                mma_k16<BF16>(o, l[0], l[1], l[2], l[3], b0, b1);
        }
    }
}

/* The same by four warps together, of a whole tile; between wide_begin() and wide_end(). */
template <bool BF16, int D>
__device__ __forceinline__ void multiply_values_wide(const struct job &j, const uint8_t *slot,
                                                     const struct weights &a,
                                                     struct state<D, 2> *w) {
    const uint32_t values = (uint32_t)__cvta_generic_to_shared(slot) + values_step<D>(j);

#pragma unroll
    for (int i = 0; i < D / BOX_CHANNELS; i++) {
        const uint64_t b = wide_matrix(values + i * column_step(j), octet_step<D>(j));
        wide_columns<BF16>(&w->o[8 * i], a.high, b);
        wide_columns<BF16>(&w->o[8 * i], a.low, b);
    }
}

/* Weights x values of the tiles; of four warps that work together where WIDE. */
template <bool BF16, bool WIDE, int TILES, int D, int BANDS>
__device__ __forceinline__ void add_values(const struct work &t, const struct place p[TILES],
                                           const struct note n[TILES][2],
                                           const float z[TILES][2][4], struct state<D, BANDS> *w) {
    uint32_t there = 0;

#pragma unroll
    for (int i = 0; i < TILES; i++)
        there += n[i][0].there + n[i][1].there;
    if constexpr (WIDE)
        if (there == 16 * TILES) {
            struct weights a[TILES];
#pragma unroll
            for (int i = 0; i < TILES; i++)
                a[i] = pack_weights<BF16, BANDS>(z[i]);
            wide_begin();
#pragma unroll
            for (int i = 0; i < TILES; i++)
                multiply_values_wide<BF16>(t.j, t.slots + p[i].slot * (64 * D), a[i], w);
            wide_end();
            return;
        }
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const uint8_t *slot = t.slots + p[i].slot * (64 * D);
        if (!WIDE && n[i][0].there + n[i][1].there == 16)
            multiply_values<BF16, true>(t.j, slot, n[i], z[i], w);
        else
            multiply_values<BF16, false>(t.j, slot, n[i], z[i], w);
    }
}

/* The tiles in these slots: one softmax for all. */
template <bool BF16, bool WIDE, int TILES, int D, int BANDS>
__device__ __forceinline__ void add_tiles(const struct work &t, const struct place p[TILES],
                                          struct state<D, BANDS> *w) {
    struct note n[TILES][2];
    float z[TILES][2][4] = {};

#pragma unroll
    for (int i = 0; i < TILES; i++) {
        n[i][0] = t.s->ring.notes[p[i].slot][0];
        n[i][1] = t.s->ring.notes[p[i].slot][1];
    }
    if (n[0][0].position == NEVER && n[0][1].position == NEVER)
        return;
    if constexpr (WIDE)
        multiply_keys_wide<BF16, TILES>(t, p, *w, z);
    else
#pragma unroll
        for (int i = 0; i < TILES; i++)
            multiply_keys<BF16>(t.j, t.slots + p[i].slot * (64 * D), *w, z[i]);
    mask_logits<TILES>(t.j, n, *w, z);
    soften<TILES>(t.j, n, z, w);
    add_values<BF16, WIDE, TILES>(t, p, n, z, w);
}

/* ---- merging ---- */

/* Whose is float4 `index` of a job, i.e. of [band][D / 16][lane]: channels + 0, 1, 8, 9. */
struct piece {
    uint32_t query, channel;
};

template <int D> __device__ __forceinline__ struct piece make_piece(uint32_t index) {
    const uint32_t band = index / (2 * D), tile = index / 32 % (D / 16), lane = index % 32;

    return {band * QUERIES + lane / 4, 16 * tile + 2 * (lane % 4)};
}

/* Of a query and some of its channels: the sums of all parts so far, scaled to their peak. */
template <int PIECES> struct sums {
    struct lk_cuda_stat stat;
    float4 out[PIECES];
};

template <int PIECES> __device__ __forceinline__ struct sums<PIECES> no_sums() {
    struct sums<PIECES> ret = {};

    ret.stat.peak = -INFINITY;
    return ret;
}

/* Add parts in order. */
template <int PARTS, int PIECES>
__device__ __forceinline__ void add_parts(const float4 stat[PARTS], const float4 out[PIECES][PARTS],
                                          struct sums<PIECES> *all) {
    float top = all->stat.peak;

#pragma unroll
    for (int i = 0; i < PARTS; i++)
        top = fmaxf(top, stat[i].x);
    const float fade = shrink(all->stat.peak, top);
    struct sums<PIECES> ret = no_sums<PIECES>();

    ret.stat = {top, all->stat.mass * fade, all->stat.kept * fade, 0.f};
#pragma unroll
    for (int x = 0; x < PIECES; x++)
        add_scaled(&ret.out[x], all->out[x], fade);
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const float f = shrink(stat[i].x, top);
        ret.stat.mass = fmaf(stat[i].y, f, ret.stat.mass);
        ret.stat.kept = fmaf(stat[i].z, f, ret.stat.kept);
#pragma unroll
        for (int x = 0; x < PIECES; x++)
            add_scaled(&ret.out[x], out[x][i], f);
    }
    *all = ret;
}

/* A thread's channels of a query of the job. */
struct owned {
    uint32_t query, channel, index; /* index: query_index() */
    float *out;                     /* of the query */
};

template <int D>
__device__ __forceinline__ struct owned own_query(const struct work &t, uint32_t query,
                                                  uint32_t channel) {
    const uint32_t index = query_index(t.a, t.j, query);
    return {query, channel, index, t.j.out + (uint64_t)index * D};
}

/* All of a query's tokens are in `all`: to its output; who has the first channels sees to its other
 * results. */
__device__ __forceinline__ void store_out(const struct work &t, const struct owned &e,
                                          const struct lk_cuda_stat &all, const float4 &v) {
    const float f = all.mass > 0 ? __fdividef(1.f, all.mass) : 0.f;

    *(float2 *)(e.out + e.channel) = make_float2(v.x * f, v.y * f);
    *(float2 *)(e.out + e.channel + 8) = make_float2(v.z * f, v.w * f);
    if (e.channel == 0)
        t.s->mass[e.query] = finish_query(t.j, t.found, e.query, e.index, all);
}

/* Bytes of the outputs of a job's bands in a partial; its stats follow. */
__device__ __forceinline__ uint32_t partial_outs(uint32_t bands, uint32_t d) {
    return bands * QUERIES * d * 4;
}

/* What a thread merges of a job, if its block does. */
struct merge {
    const uint8_t *stats, *outs; /* of slice 0, first tile */
    uint64_t step;               /* from slice to slice */
    uint32_t slices;             /* 0: no such query */
    uint32_t tile, sharing;
    struct owned own;
};

/* Of a band every sharing-th 16 channels, from `tile` on. ALONE: one band, so addresses are
 * constant steps. */
template <bool ALONE, int D>
__device__ __forceinline__ struct merge find_merge(const struct work &t, uint32_t band,
                                                   uint32_t tile, uint32_t sharing) {
    const uint32_t lane = threadIdx.x % 32, query = band * QUERIES + lane / 4;
    const uint8_t *partials = t.j.partials;

    return {partials + partial_outs(ALONE ? 1 : t.j.bands, D) + 16 * query,
            partials + ((band * (D / 16) + tile) * 32 + lane) * 16,
            ALONE ? QUERIES * (4 * D + sizeof(struct lk_cuda_stat)) : t.j.partial_bytes,
            query < t.j.queries ? t.j.slices : 0,
            tile,
            sharing,
            own_query<D>(t, query, 16 * tile + 2 * (lane % 4))};
}

/* All slices of a job, in order: to the output. PIECES float4 of a thread at a time, PARTS slices.
 */
template <int D, int PARTS, int PIECES>
__device__ __forceinline__ void merge_slices(const struct work &t, struct merge m) {
#pragma unroll 1
    for (; m.tile < D / 16 && m.slices; m.tile += PIECES * m.sharing) {
        const uint8_t *stats = m.stats, *outs = m.outs;
        struct sums<PIECES> all = no_sums<PIECES>();
#pragma unroll 1
        for (uint32_t base = 0; base < m.slices; base += PARTS) {
            float4 stat[PARTS], out[PIECES][PARTS];
#pragma unroll
            for (uint32_t i = 0; i < PARTS; i++) {
                const bool there = base + i < m.slices;
                stat[i] = there ? __ldcg((const float4 *)(stats + i * m.step))
                                : make_float4(-INFINITY, 0.f, 0.f, 0.f);
#pragma unroll
                for (uint32_t x = 0; x < PIECES; x++)
                    out[x][i] =
                        there && m.tile + x * m.sharing < D / 16
                            ? __ldcg((const float4 *)(outs + i * m.step + x * m.sharing * 512))
                            : make_float4(0, 0, 0, 0);
            }
            add_parts<PARTS>(stat, out, &all);
            stats += PARTS * m.step;
            outs += PARTS * m.step;
        }
#pragma unroll
        for (uint32_t x = 0; x < PIECES; x++) {
            if (m.tile + x * m.sharing < D / 16)
                store_out(t, m.own, all.stat, all.out[x]);
            m.own.channel += 16 * m.sharing;
        }
        m.outs += PIECES * m.sharing * 512;
    }
}

/* ---- a slice's warps ---- */

/* What the warp has of its queries' sums, for the others. */
template <int D, int BANDS>
__device__ __forceinline__ void leave_stats(const struct work &t, const struct state<D, BANDS> &w) {
    const uint32_t lane = threadIdx.x % 32, warp = warp_index();

#pragma unroll
    for (int h = 0; h < BANDS; h++) {
        float mass = w.mass[h], kept = w.kept[h];
#pragma unroll
        for (int b = 1; b < 4; b <<= 1) {
            mass += __shfl_xor_sync(LK_FULL_WARP, mass, b);
            kept += __shfl_xor_sync(LK_FULL_WARP, kept, b);
        }
        if (lane % 4 == 0)
            t.s->stat[warp][QUERIES * h + lane / 4] = {w.peak[h], mass, kept, 0.f};
    }
}

/* What the warps that hold query `in` of warp `first` have left of it at `at`, in order: each
 * step-th warp. */
__device__ __forceinline__ struct sums<1> add_warps(const struct work &t, uint32_t first,
                                                    uint32_t step, uint32_t in, uint32_t at) {
    struct sums<1> all = no_sums<1>();
    float4 stat[WARPS], out[1][WARPS];

#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        const bool there = first + i * step < WARPS;
        const uint32_t warp = there ? first + i * step : 0;
        stat[i] =
            there ? *(const float4 *)&t.s->stat[warp][in] : make_float4(-INFINITY, 0.f, 0.f, 0.f);
        out[0][i] = t.s->out[warp][at];
    }
    add_parts<WARPS>(stat, out, &all);
    return all;
}

/* What a lane has of a query's 16 channels, [band][D / 16] number `i`. */
template <int D, int BANDS>
__device__ __forceinline__ float4 own_piece(const struct state<D, BANDS> &w, int i) {
    const float(*o)[4] = &w.o[i % (D / 16) * 2];
    const int h = i / (D / 16) * 2;

    return BANDS > 1 ? make_float4(o[0][h], o[0][h + 1], o[1][h], o[1][h + 1])
                     : make_float4(o[0][0] + o[0][2], o[0][1] + o[0][3], o[1][0] + o[1][2],
                                   o[1][1] + o[1][3]);
}

/* The block's warps have a slice: to its partial, or, if it is the only one, to the results. What a
 * warp has goes through shared memory by ROOM float4 of [band][D / 16][32]. `again`: after another
 * slice of the job. */
template <int D, int BANDS>
__device__ __forceinline__ void finish_slice(const struct work &t, uint32_t slice, bool again,
                                             const struct state<D, BANDS> &w) {
    constexpr int OWN = BANDS * 2 * D;
    const uint32_t lane = threadIdx.x % 32, step = BANDS == 1 ? 1 : query_warps(t.j);
    const uint32_t queries = t.j.queries, slices = t.j.slices;
    uint8_t *partial = t.j.partials + slice * t.j.partial_bytes;
    uint8_t *stats = partial + partial_outs(t.j.bands, D);
    float4 *out = t.s->out[warp_index()];

    copy_wait<0>(); /* load_found(), by whom it was called */
#pragma unroll
    for (int base = 0; base < OWN; base += ROOM) {
        if (base || again)
            meet(); /* what is there is added up */
        if (base == 0)
            leave_stats(t, w);
#pragma unroll
        for (int x = base; x < OWN && x < base + ROOM; x += 32)
            out[x - base + lane] = own_piece(w, x / 32);
        meet();
#pragma unroll 1
        for (uint32_t first = 0; first < step; first++) {
            const uint32_t index = first * OWN + base + threadIdx.x;
            const struct piece e = make_piece<D>(index);
            if (base + threadIdx.x >= OWN || e.query >= queries)
                break;
            const struct sums<1> all =
                add_warps(t, first, step, e.query % (BANDS * QUERIES), threadIdx.x);
            if (slices == 1) {
                store_out(t, own_query<D>(t, e.query, e.channel), all.stat, all.out[0]);
                continue;
            }
            __stcg((float4 *)partial + index, all.out[0]);
            if (e.channel == 0)
                __stcg((float4 *)stats + e.query,
                       make_float4(all.stat.peak, all.stat.mass, all.stat.kept, 0.f));
        }
    }
}

/* The same where four warps work together, of a slice that is not the only one: warps w and w + 4
 * have the same queries, two bands, and each adds up one of them, of which the other leaves what it
 * has. Partials of queries that do not exist are written too, and never read. */
template <int D>
__device__ __forceinline__ void finish_slice_wide(const struct work &t, uint32_t slice, bool again,
                                                  const struct state<D, 2> &w) {
    const uint32_t lane = threadIdx.x % 32, warp = warp_index(), other = warp ^ WARPS / 2;
    const uint32_t high = warp / (WARPS / 2), band = warp % (WARPS / 2) * 2 + high;
    const uint32_t in = high * QUERIES + lane / 4;
    uint8_t *partial = t.j.partials + slice * t.j.partial_bytes;
    float4 *to = (float4 *)partial + band * 2 * D + lane;
    static_assert(2 * D <= ROOM, "room for a band");
    static_assert(LK_GROUP_MAX <= 4 * QUERIES, "not scored: load_found() copies nothing");

    if (again)
        meet(); /* what is there is added up */
    leave_stats(t, w);
#pragma unroll
    for (int i = 0; i < D / 16; i++)
        t.s->out[warp][32 * i + lane] = high ? own_piece(w, i) : own_piece(w, D / 16 + i);
    meet();
    const struct lk_cuda_stat mine = t.s->stat[warp][in], theirs = t.s->stat[other][in];
    const float top = fmaxf(mine.peak, theirs.peak);
    const float fade[2] = {shrink(mine.peak, top), shrink(theirs.peak, top)};
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const float4 own = high ? own_piece(w, D / 16 + i) : own_piece(w, i);
        float4 sum = {};
        add_scaled(&sum, own, fade[0]);
        add_scaled(&sum, t.s->out[other][32 * i + lane], fade[1]);
        __stcg(to + 32 * i, sum);
    }
    if (lane % 4 == 0)
        __stcg((float4 *)(partial + partial_outs(t.j.bands, D)) + band * QUERIES + lane / 4,
               make_float4(top, fmaf(theirs.mass, fade[1], mine.mass * fade[0]),
                           fmaf(theirs.kept, fade[1], mine.kept * fade[0]), 0.f));
}

/* After the block's last slice of the job; `m`: what a thread has to merge, found before the others
 * are waited for. */
template <bool ALONE, int D>
__device__ __forceinline__ void merge_job(const struct work &t, uint32_t count,
                                          const struct merge &m) {
    const uint32_t slices = t.j.slices;

    if (!all_done(t.j, count, &t.s->last))
        return;
    if (ALONE && slices > PARTIALS / 2)
        merge_slices<D, PARTIALS, 1>(t, m);
    else if (ALONE && slices > 1)
        merge_slices<D, PARTIALS / 2, 1>(t, m);
    else if (slices > 1)
        merge_slices<D, PARTIALS / 2, 2>(t, m);
    if (ALONE)
        __syncwarp(); /* the first warp made all of mass[] */
    else
        meet();
    if (threadIdx.x == 0)
        finish_head(t.a, t.j, t.found, t.s->mass);
    meet(); /* or the compiler would hold warps for divided, in all the loop around this */
}

/* ---- merging by several blocks ---- */

/* An exact job of many bands in many slices would keep its last block merging for long. Blocks
 * that have nothing else to do wait a little for that one, and then all of them merge: of n blocks
 * each every n-th band. A job's first word counts slices that are done, and above them blocks that
 * wait and blocks that gave it up. Once all slices are there the second word becomes another than
 * it was, with n in its low bits: 1, the last block alone, if any gave up. */
#define ONE_WAITS   (1u << 16)
#define ONE_GAVE_UP (1u << 24)
#define ONE_STEP    (1u << 8) /* of the second word, each time all slices are there */
#define LOOKS       16        /* some half a microsecond each */

/* The block gives up waiting. -> false: too late, all slices are counted, and the last block is
 * about to say so. */
__device__ __forceinline__ bool give_up(const struct job &j) {
    for (;;) {
        const uint32_t now = load_in_order(j.words);
        if (now == 0 || now % ONE_WAITS == j.slices)
            return false;
        if (atomicCAS(j.words, now, now + ONE_GAVE_UP) == now)
            return true;
    }
}

/* The block's slices are stored. By one thread. `idle`: the block has nothing else to do. */
__device__ __forceinline__ struct part take_part(const struct job &j, uint32_t count, bool idle) {
    const uint32_t earlier = load_in_order(j.words + 1);
    const uint32_t before = add_in_order(j.words, count + (idle ? ONE_WAITS : 0));
    const uint32_t own = before / ONE_WAITS % (ONE_GAVE_UP / ONE_WAITS) + 1;
    uint32_t now;

    if (before % ONE_WAITS + count == j.slices) {
        const uint32_t step = before < ONE_GAVE_UP ? own : 1;
        atomicExch(j.words, 0u); /* others may look at it */
        store_after(j.words + 1, (earlier / ONE_STEP + 1) * ONE_STEP + step);
        return {0, step};
    }
    if (!idle)
        return {UINT32_MAX, 1};
    for (uint32_t i = 0; (now = load_in_order(j.words + 1)) == earlier; i++)
        if (i >= LOOKS && give_up(j))
            return {UINT32_MAX, 1};
    return {now % ONE_STEP > 1 ? own : UINT32_MAX, now % ONE_STEP};
}

/* After the block's last slice of a job that other blocks have slices of. As many at a time as
 * merge_job() merges of several bands: the bits do not tell who did. No pages were picked, so the
 * head's result takes nothing of what the other bands' queries captured. */
template <int D>
__device__ __forceinline__ void merge_bands(const struct work &t, uint32_t count, bool idle) {
    meet();
    if (threadIdx.x == 0)
        t.s->part = take_part(t.j, count, idle);
    meet();
    const struct part own = t.s->part;
#pragma unroll 1
    for (uint32_t band = own.band; band < t.j.bands; band += own.step)
        merge_slices<D, PARTIALS / 2, 1>(t, find_merge<false, D>(t, band, warp_index(), WARPS));
    if (threadIdx.x == 0 && own.band == 0)
        finish_head(t.a, t.j, t.found, t.s->mass);
    meet(); /* or the compiler would hold warps for divided, in all the loop around this */
}

/* After the block's last slice of the job. `idle`: it has nothing else to do. */
template <int D>
__device__ __forceinline__ void finish_many(const struct work &t, uint32_t count, bool idle) {
    const uint32_t warp = warp_index(), bands = t.j.bands, log = 31 - __clz(bands);

    if (bands > 2 && !t.j.picks && t.j.slices > PARTIALS / 2 && count < t.j.slices)
        merge_bands<D>(t, count, idle);
    else
        merge_job<false, D>(t, count,
                            find_merge<false, D>(t, warp & (bands - 1), warp >> log, WARPS >> log));
}

/* ---- jobs ---- */

/* Slices of a job of one band: warps hold the same queries. `at`: the first tile. */
template <bool BF16, int D>
__device__ __forceinline__ void run_alone(const struct work &t, uint32_t slice, uint32_t last,
                                          struct place *at) {
    struct state<D, 1> w;

    load_queries(t.a, t.j, 0, &w);
#pragma unroll 1
    for (const uint32_t begun = slice; slice < last; slice++) {
        const uint32_t tiles = slice_end(t.j, slice + 1) - slice_end(t.j, slice),
                       warp = warp_index();
        struct place p = next_place(*at, warp, t.count);

        clear_state(&w);
#pragma unroll 1
        for (uint32_t i = warp; i < tiles; i += WARPS) {
            wait_full(&t.s->ring, p);
            add_tiles<BF16, false, 1>(t, &p, &w);
            leave_slot(&t.s->ring, p, WARPS);
            p = next_place(p, WARPS, t.count);
        }
        *at = next_place(*at, tiles, t.count);
        finish_slice(t, slice, slice > begun, w);
    }
}

/* Slices of a job of several bands. Of the warps that hold the same queries one takes every
 * parts-th tile of the slice, two to a softmax where registers and slots hold them. */
template <bool BF16, bool WIDE, int D>
__device__ __forceinline__ void run_together(const struct work &t, uint32_t slice, uint32_t last,
                                             struct place *at) {
    constexpr int TILES = D > 128 ? 1 : 2;
    const uint32_t warp = warp_index(), depth = query_warps(t.j), parts = WARPS / depth;
    const uint32_t query = warp % depth * 2 * QUERIES;
    const bool wanted = WIDE || query < t.j.queries;
    const uint32_t step = TILES == 2 && t.count == 2 * WARPS ? 2 * parts : parts;
    struct state<D, 2> w;

    load_queries(t.a, t.j, query, &w);
    clear_state(&w);
#pragma unroll 1
    for (const uint32_t begun = slice; slice < last; slice++) {
        const uint32_t tiles = slice_end(t.j, slice + 1) - slice_end(t.j, slice);
        struct place p[2] = {next_place(*at, warp / depth, t.count)};

#pragma unroll 1
        for (uint32_t i = warp / depth; i < tiles; i += step) {
            const bool two = step > parts && i + parts < tiles;
            p[1] = next_place(p[0], parts, t.count);
            wait_full(&t.s->ring, p[0]);
            if (two)
                wait_full(&t.s->ring, p[1]);
            if (wanted && two)
                add_tiles<BF16, WIDE, TILES>(t, p, &w);
            else if (wanted)
                add_tiles<BF16, WIDE, 1>(t, p, &w);
            leave_slot(&t.s->ring, p[0], parts);
            if (two)
                leave_slot(&t.s->ring, p[1], parts);
            p[0] = next_place(p[0], step, t.count);
        }
        *at = next_place(*at, tiles, t.count);
        if constexpr (WIDE)
            if (t.j.slices > 1)
                finish_slice_wide(t, slice, slice > begun, w);
        if (!WIDE || t.j.slices == 1)
            finish_slice(t, slice, slice > begun, w);
        clear_state(&w);
    }
}

/* At D = 256 registers do not hold what a wide product wants. */
template <bool BF16, int D>
__device__ __forceinline__ void run_many(const struct work &t, uint32_t slice, uint32_t last,
                                         struct place *at) {
    constexpr bool WIDE = D <= 128;

    if (WIDE && wide_products() && t.j.bands == WARPS)
        run_together<BF16, WIDE, D>(t, slice, last, at);
    else
        run_together<BF16, false, D>(t, slice, last, at);
}

/* By the warps that attend: tasks `task` to `last`; nothing before the first was waited for. */
template <bool BF16, int D>
__device__ __forceinline__ void run_tasks(const struct ring_args &a, struct shared *s,
                                          const uint8_t *slots, uint32_t task, uint32_t last) {
    struct place at = {0, 0};

#pragma unroll 1
    for (uint32_t turn = 0; task < last; turn++) {
        const uint32_t own = turn % JOBS;
        bar_wait(bar_address(&s->ring.job_full[own]), turn / JOBS % 2);
        const struct work t = {a.attend, s, s->ring.job[own], &s->found[own], slots, a.slots};
        const uint32_t begin = task - t.j.first, end = min(last - t.j.first, t.j.slices);

        if (turn == 0) {
            wait_for_previous();
            note_time(a.attend.clock, LK_CUDA_AT_ATTEND);
        }
        if (begin == 0)
            list_all(t.j);
        if (warp_index() == 1)
            load_found(t.j, t.found);
        task += end - begin;
        if (t.j.bands > 1) {
            run_many<BF16, D>(t, begin, end, &at);
            finish_many<D>(t, end - begin, task == last);
        } else {
            run_alone<BF16, D>(t, begin, end, &at);
            merge_job<true, D>(t, end - begin, find_merge<true, D>(t, 0, warp_index(), WARPS));
        }
        __syncwarp();
        bar_arrive_times(bar_address(&s->ring.job_empty[own]), 1);
    }
}

/* ---- kernel ---- */

template <int D, bool BF16>
__global__ void __launch_bounds__(THREADS + 32 * FETCHERS, 1)
    attend_kernel(const __grid_constant__ struct ring_args a) {
    SHARED_BYTES(memory, BOX_ALIGN);
    struct shared *s = (struct shared *)(memory + a.slots * (64 * D));
    uint32_t task, last;

    let_next_start();
    const struct row_starts starts = load_starts(a.attend.batch, LK_CUDA_ATTEND);
    find_tasks(a.attend, &task, &last);
    if (task == last) {
        wait_for_previous(); /* or who waits for this kernel would not wait for that one */
        note_time(a.attend.clock, LK_CUDA_AT_ATTEND);
        return;
    }
    if (threadIdx.x == 0) {
        prefetch_boxes(a.boxes);
        init_ring(&s->ring, a.slots);
    }
    if (warp_index() == WARPS)
        prepare_job(a.attend, starts, &s->ring, 0, task);
    __syncthreads();
    if (warp_index() < WARPS) {
        raise_registers<224>();
        run_tasks<BF16, D>(a, s, memory, task, last);
    } else {
        lower_registers<56>(); /* x 4 + 224 x 8: a multiprocessor's registers, of 168 a thread */
        fetch_run<D>(a, starts, &s->ring, (uint32_t)__cvta_generic_to_shared(memory), task, last);
    }
}

/* ---- launcher ---- */

/* A part: a slot for each warp, of which a slice's tiles come round to the same ones. */
template <int D, bool BF16> static int launch_fast(const struct lk_cuda_step *step, void *stream) {
    const struct lk_geometry *g = &step->pool.geometry;
    const struct lk_shared s = {sizeof(struct shared), WARPS * 64 * D, SLOTS / WARPS};
    struct ring_args a = {{step->pool, step->batch, step->sync, step->clock}, {}, 0};
    uint32_t parts;
    int error = take_shared(attend_kernel<D, BF16>, s, &parts);

    if (error == (int)cudaErrorInvalidConfiguration)
        return lk_cuda_attend_plain(step, stream);
    if (!error)
        error = make_boxes(step->pool.kv, D, 2 * g->page_tokens,
                           step->pool.pages * g->layers * g->kv_heads,
                           box_rows(31 - __builtin_clz(g->page_tokens)), &a.boxes);
    if (error)
        return error;
    a.slots = WARPS * parts;
    return launch(attend_kernel<D, BF16>, dim3(step->processors), THREADS + 32 * FETCHERS,
                  s.fixed + parts * s.each, stream, a);
}

template <int D> static int launch_type(const struct lk_cuda_step *step, void *stream) {
    return step->pool.geometry.dtype == LK_BF16 ? launch_fast<D, true>(step, stream)
                                                : launch_fast<D, false>(step, stream);
}

/* Where not even a slot a warp has room, the plain kernel serves. */
int lk_cuda_attend(const struct lk_cuda_step *step, void *stream) {
    switch (step->pool.geometry.head_dim) {
    case 64:
        return launch_type<64>(step, stream);
    case 128:
        return launch_type<128>(step, stream);
    case 256:
        return launch_type<256>(step, stream);
    default:
        return lk_cuda_attend_plain(step, stream);
    }
}
