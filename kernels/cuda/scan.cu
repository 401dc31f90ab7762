/* SPDX-License-Identifier: MIT */
/*
 * scan.cu - scores: every page, or superpage, from its summary; the newest page from its keys.
 *
 * Formula: s = log2 sum over tokens of 2^(sm_scale log2e (q.mu + sum_i c_ti q.v_i)), for each query
 * head.
 *
 * Geometry: one block a multiprocessor. A block takes a run of consecutive tasks (row, KV head,
 * eight queries, chunk), most often of one head, and its scoring warps take them in turn. A chunk
 * is every sixteenth tile of eight pages, so that neighbours stream neighbouring records. Fetching
 * warps, a lane a scoring warp, look tiles up and have the copy engine bring their records to a
 * ring of that warp's own in shared memory, which runs on from task to task; the block's queries
 * are rotated and quantised once, while the first records are on their way. The other warps append
 * and score newest pages. Pages that prune listed are scored again by rescan.cu.
 *
 * The scoring loop reads nothing but shared memory: with the memory saturated a single read of a
 * table or a spilled register takes as long as a tile.
 *
 * A graph bakes in nothing but the batch's address. Shared memory: the batch as held, barriers,
 * notes of tiles, queries of WINDOW heads, [warp][stage] tiles.
 */
#include "scan.cuh"

#include <limits.h>

/* Warps of a block in all, and stages of a ring: at rank 2 records are short and it takes more
 * warps to score as fast as they come. */
#define BLOCK_WARPS(R) ((R) == 2 ? 20 : 16)
#define STAGES_OF(R)   ((R) == 2 ? 3 : 2)
#define HELD_BYTES     1536 /* a multiple of 128 */
#define BARRIER_BYTES  1024
#define FETCHERS       3
#define IDLE_MOST      64 /* looks of a fetching warp at its barriers */
#define NOTES          8  /* tiles told to a warp at most */
#define PLAIN_WARPS    8

/* ---- append, and the newest page ---- */

__device__ void append_tokens(const struct scan_args &a, const struct lk_cuda_row *r, uint32_t head,
                              uint32_t piece) {
    const struct lk_geometry *g = &a.pool.geometry;
    const uint32_t lane = threadIdx.x % 32, vectors = g->head_dim * 2 / 16;
    const uint32_t last = min(r->append, (piece + 1) * LK_CUDA_APPEND);

#pragma unroll 1
    for (uint32_t i = piece * LK_CUDA_APPEND; i < last; i++) {
        uint64_t at = r->length - r->append + i;
        uint32_t page = physical_page(r, (uint32_t)(at / g->page_tokens));
        uint64_t from = ((uint64_t)i * g->kv_heads + head) * vectors;
        uint64_t to = at % g->page_tokens * vectors;
        uint4 *keys = (uint4 *)lk_page_keys_device(a.pool, r->layer, page, head);
        uint4 *values = keys + (uint64_t)g->page_tokens * vectors;

        for (uint32_t x = lane; x < 2 * vectors; x += 32) {
            bool value = x >= vectors;
            uint32_t e = value ? x - vectors : x;
            (value ? values : keys)[to + e] = ((const uint4 *)(value ? r->v : r->k))[from + e];
        }
    }
    __syncwarp();
}

/* Exact, on tensor cores: 16 tokens x 8 queries. k is permuted alike in keys and queries, so that a
 * lane reads four channels at once. */
__device__ void score_newest(const struct scan_args &a, const struct lk_cuda_row *r,
                             uint32_t head) {
    const struct lk_geometry *g = &a.pool.geometry;
    const uint32_t lane = threadIdx.x % 32, d = g->head_dim, stride = group_stride(g->group);
    const uint32_t page = r->pages - 1, row = lane >> 2, c = lane & 3;
    const uint32_t tokens = (uint32_t)(r->length - (uint64_t)page * g->page_tokens);
    const uint16_t *keys =
        (const uint16_t *)lk_page_keys_device(a.pool, r->layer, physical_page(r, page), head);
    const uint16_t *queries = (const uint16_t *)r->q + (uint64_t)head * g->group * d;
    const float scale = r->sm_scale * LK_LOG2E;

    for (uint32_t first = 0; first < g->group; first += 8) {
        const uint16_t *q = queries + min(first + row, g->group - 1) * d + 4 * c;
        float2 part[2] = {make_float2(-INFINITY, 0.f), make_float2(-INFINITY, 0.f)};

        for (uint32_t base = 0; base < tokens; base += 16) {
            const uint16_t *k = keys + min(base + row, tokens - 1) * d + 4 * c,
                           *k8 = keys + min(base + row + 8, tokens - 1) * d + 4 * c;
            float z[4] = {0, 0, 0, 0};
#pragma unroll 8
            for (uint32_t t = 0; t < d; t += 16) {
                const uint2 x = *(const uint2 *)(k + t), y = *(const uint2 *)(k8 + t),
                            v = *(const uint2 *)(q + t);
                if (g->dtype == LK_BF16)
                    mma_k16<true>(z, x.x, y.x, x.y, y.y, v.x, v.y);
                else
                    mma_k16<false>(z, x.x, y.x, x.y, y.y, v.x, v.y);
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (base + row + i / 2 * 8 < tokens)
                    part[i % 2] = merge_parts(part[i % 2], make_float2(z[i] * scale, 1.f));
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t query = first + 2 * c + i;
#pragma unroll
            for (int o = 4; o < 32; o <<= 1)
                part[i] =
                    merge_parts(part[i], make_float2(__shfl_xor_sync(LK_FULL_WARP, part[i].x, o),
                                                     __shfl_xor_sync(LK_FULL_WARP, part[i].y, o)));
            if (row == 0 && query < g->group) {
                uint32_t bits = __float_as_uint(part[i].x + log2_fast(part[i].y));
                bits |= query == 0 ? 1 : 0;
                row_scores(r, head, stride)[(uint64_t)page * stride + query] =
                    __uint_as_float(bits);
                row_parts(r, head, stride)[query] = part[i];
            }
        }
    }
}

/* What score_newest() reads, on its way to L2. */
__device__ __forceinline__ void prefetch_newest(const struct scan_args &a,
                                                const struct lk_cuda_row *r, uint32_t head) {
    const struct lk_geometry *g = &a.pool.geometry;
    const uint32_t queries = g->group * g->head_dim * 2;

    if (threadIdx.x % 32)
        return;
    prefetch_bytes((const uint8_t *)r->q + head * queries, queries);
    prefetch_bytes(lk_page_keys_device(a.pool, r->layer, physical_page(r, r->pages - 1), head),
                   g->page_tokens * g->head_dim * 2);
}

/* Tasks of heads for one warp of `warps`. */
__device__ __forceinline__ void run_heads(const struct scan_args &a, uint32_t warp,
                                          uint32_t warps) {
    const uint32_t heads = a.pool.geometry.kv_heads;
    struct row_starts starts = {1, 0};

    if (a.held->rows > 1 && warp < a.held->heads)
        starts = load_starts(a.batch, LK_CUDA_HEADS);
    for (uint32_t task = warp; task < a.held->heads; task += warps) {
        uint32_t first;
        const struct lk_cuda_row *r =
            row_at(a, find_row(a.batch, LK_CUDA_HEADS, starts, task, &first));
        const uint32_t t = task - first;

        if (r->scan && t / heads == 0)
            prefetch_newest(a, r, t % heads);
        append_tokens(a, r, t % heads, t / heads);
        if (r->scan && t / heads == 0)
            score_newest(a, r, t % heads);
    }
}

/* ---- the warps that fetch ---- */

/* A tile, told to the warp that scores it. The block table is read several tiles before records are
 * asked for, since under load a read takes as long as a tile. */
struct tile_note {
    uint32_t entry[TILE]; /* of the block table: of quads two, else one a record */
    struct alignas(16) {
        uint32_t set, tile, units, slot;
        const struct lk_cuda_row *r;
        uint16_t head, pass;
        uint8_t super, shift, last;   /* last: of its task */
        const uint8_t *coarse, *fine; /* records of the KV head's first page, or superpage */
    } about;
};

/* Start the copies of `count` records from index `id` on, to places `at` .. of the tile. */
__device__ __forceinline__ void copy_records(const struct records &rec, const struct tile_note *n,
                                             uint32_t id, uint32_t at, uint32_t count, uint32_t to,
                                             uint32_t bar) {
    start_copy(to + at * rec.coarse_stride, n->about.coarse + (uint64_t)id * rec.coarse_stride,
               count * rec.coarse_stride, bar);
    if (rec.fine_stride)
        start_copy(to + TILE * rec.coarse_stride + at * rec.fine_stride,
                   n->about.fine + (uint64_t)id * rec.fine_stride, count * rec.fine_stride, bar);
}

/* Start the copies of the tile's records: those that follow each other in one. */
__device__ __forceinline__ void fetch_tile(const struct tile_note *n, const struct records &rec,
                                           uint32_t to, uint32_t bar) {
    bar_expect(bar, TILE * (rec.coarse_stride + rec.fine_stride));
    if (!n->about.super && n->about.shift == 2) {
        const uint32_t x = n->entry[0], y = n->entry[1];
        copy_records(rec, n, 4 * x, 0, y == x + 1 ? 8 : 4, to, bar);
        if (y != x + 1)
            copy_records(rec, n, 4 * y, 4, 4, to, bar);
    } else {
        for (uint32_t i = 0, run; i < TILE; i += run) {
            auto record = [&](uint32_t k) {
                return n->about.super ? n->entry[k] >> (2 - n->about.shift) : n->entry[k];
            };
            const uint32_t id = record(i);
            for (run = 1; i + run < TILE && record(i + run) == id + run; run++)
                ;
            copy_records(rec, n, id, i, run, to, bar);
        }
    }
    bar_copies_started(bar);
}

/* A lane's way through its tiles: notes first, then records. */
struct fetching {
    struct cursor c;
    const uint8_t *coarse, *fine; /* of the cursor's KV head */
    struct records rec;
    struct tile_note *notes;
    uint32_t ring, full, empty; /* the scoring warp's */
    uint32_t stage, parity;
    int n;          /* next tile to ask for; INT_MAX: there is none */
    uint32_t noted; /* tiles */
};

/* Fill the way from c.task, if it is before `end`. */
__device__ __forceinline__ void enter_task(const struct scan_args &a, uint32_t end,
                                           struct fetching *f) {
    find_task(a, end, &f->c);
    if (f->c.task >= end)
        return;
    const uint32_t plane = f->c.r->layer * a.pool.geometry.kv_heads + f->c.head;
    const uint64_t first = (uint64_t)plane * (uint32_t)a.pool.pages;

    f->coarse = f->c.super ? a.pool.super + first / 4 * a.super_stride
                           : a.pool.coarse + first * a.pages.coarse_stride;
    f->fine = a.pool.fine + first * a.pages.fine_stride;
}

__device__ __forceinline__ void next_tile(const struct scan_args &a, uint32_t end,
                                          struct fetching *f) {
    struct cursor *const c = &f->c;

    if (c->task >= end)
        return;
    c->tile += c->step;
    if (c->tile >= c->end) {
        c->task += a.scanners;
        enter_task(a, end, f);
    }
}

/* Note the cursor's tile; starts reading its entries. By lane, as all that follows. */
__device__ __forceinline__ void note_tile(const struct fetching &f, struct tile_note *to) {
    const struct cursor &c = f.c;
    const uint32_t shift = c.r->table_shift, most = c.units - 1, first = c.tile * TILE;

    to->about = {c.set,
                 c.tile,
                 c.units,
                 c.slot,
                 c.r,
                 (uint16_t)c.head,
                 (uint16_t)c.pass,
                 c.super,
                 (uint8_t)shift,
                 c.tile + c.step >= c.end,
                 f.coarse,
                 f.fine};
    if (!c.super && shift == 2) {
        copy_word(&to->entry[0], &c.r->table[min(first, most) >> 2]);
        copy_word(&to->entry[1], &c.r->table[min(first + 4, most) >> 2]);
        return;
    }
    const uint32_t times = c.super && shift == 0 ? 4 : 1;
#pragma unroll
    for (uint32_t i = 0; i < TILE; i++)
        copy_word(&to->entry[i], &c.r->table[times * min(first + i, most)]);
}

/* Note the next tile, or that there is none. */
__device__ __forceinline__ void note_next(const struct scan_args &a, uint32_t end,
                                          struct fetching *f) {
    struct tile_note *note = &f->notes[f->noted++ % NOTES];

    if (f->c.task < end)
        note_tile(*f, note);
    else
        note->about.set = UINT32_MAX;
    next_tile(a, end, f);
}

/* Ask for the records of the next tile, or say that there is none. */
template <int R, int STAGES>
__device__ __forceinline__ void ask_next(const struct scan_args &a, struct fetching *f) {
    const struct tile_note *note = &f->notes[f->n % NOTES];
    const uint32_t full = f->full + f->stage * 8;

    if (note->about.set == UINT32_MAX) {
        bar_arrive(full);
        f->n = INT_MAX;
        return;
    }
    if (R == LK_COARSE_RANK)
        f->rec = records_of(a, note->about.super);
    fetch_tile(note, f->rec, f->ring + f->stage * a.tile_bytes, full);
    if (++f->stage == STAGES) {
        f->stage = 0;
        f->parity ^= 1;
    }
    f->n++;
}

/* The rings of a block, and where its tasks begin and end. */
struct rings {
    uint32_t begin, end;
    uint32_t ring, bars; /* of the first scoring warp */
    struct tile_note *notes;
};

/* The way through a scoring warp's tiles, from the first. */
template <int R, int STAGES>
__device__ __forceinline__ struct fetching open_way(const struct scan_args &a,
                                                    const struct rings &x, uint32_t warp) {
    struct fetching f = {};

    f.n = INT_MAX;
    if (warp >= a.scanners)
        return f;
    f.rec = a.pages;
    f.notes = x.notes + warp * NOTES;
    f.ring = x.ring + warp * STAGES * a.tile_bytes;
    f.full = x.bars + warp * 2 * STAGES * 8;
    f.empty = f.full + STAGES * 8;
    f.parity = 1; /* the phase before the first counts as ended: a stage is empty at first */
    f.n = 0;
    f.c.task = x.begin + warp;
    enter_task(a, x.end, &f);
    return f;
}

/* Lane i of fetching warp w fetches for scanning warp w + FETCHERS x i: of the block's tasks every
 * scanners-th. It fills the ring at once; after that notes are AHEAD tiles before records. None is
 * let run ahead of the slowest by more than two tiles, so that all end together; but where nothing
 * moves (a warp waits for the others to need other queries) whoever can does. */
template <int R, int STAGES>
__device__ __forceinline__ void fetch_tasks(const struct scan_args &a, const struct rings &x,
                                            uint32_t fetcher) {
    constexpr int AHEAD = NOTES - STAGES;
    struct fetching f = open_way<R, STAGES>(a, x, fetcher + threadIdx.x % 32 * FETCHERS);
    uint32_t idle = 0;

#pragma unroll 1
    for (int turn = 0;; turn += turn < NOTES) {
        bool ask;

        if (turn == STAGES)
            copy_wait<0>();
        if (turn < NOTES) {
            ask = f.n != INT_MAX && turn >= STAGES && turn < 2 * STAGES;
        } else {
            const int slowest = __reduce_min_sync(LK_FULL_WARP, f.n);
            if (slowest == INT_MAX)
                return;
            const bool ready = f.n != INT_MAX && bar_test(f.empty + f.stage * 8, f.parity);
            ask = ready && (f.n <= slowest + 2 || idle > IDLE_MOST);
            idle = __any_sync(LK_FULL_WARP, ask) ? 0 : idle + 1;
            if (!ask)
                continue;
            copy_wait<AHEAD - 1>();
        }
        if (ask)
            ask_next<R, STAGES>(a, &f);
        if (f.n != INT_MAX)
            note_next(a, x.end, &f);
        copy_commit();
    }
}

/* ---- the warps that score ---- */

/* Score the block's tasks as they come through the ring. */
template <int D, int R, int NG, int STAGES>
__device__ __forceinline__ void score_tasks(const struct scan_args &a, const struct rings &x,
                                            const uint8_t *ring, struct four_queries<D> *queries) {
    const uint32_t lane = threadIdx.x % 32, full = x.bars + warp_index() * 2 * STAGES * 8;
    const struct tile_note *const notes = x.notes + warp_index() * NOTES;
    struct window window = open_window(a, x.begin, x.end);
    const struct raw_query<D> first = load_first<D, NG>(a, window);
    struct records rec = a.pages;
    struct query<D> q[NG];
    struct place place = {};
    float2 part[NG];
    uint32_t set = UINT32_MAX, n = 0, stage = 0, parity = 0;

    for (uint32_t to = window.base;;) {
        if (!reach_set<D, NG>(a, to, &window, first, queries))
            return;
        bar_wait(full + stage * 8, parity);
        __syncwarp();
        const struct tile_note *note = &notes[n % NOTES];
        to = note->about.set;
        if (!in_window(window, to))
            continue;
        if (to != set) {
            set = to;
            place = place_of(a, note->about.r, note->about.head);
#pragma unroll
            for (int j = 0; j < NG; j++) {
                load_query<D>(&queries[(set - window.base) * NG + j], &q[j]);
                part[j] = make_float2(-INFINITY, 0.f);
            }
        }
        const uint32_t at = note->about.tile * TILE + (lane >> 2), slot = note->about.slot;
        const bool live = at < note->about.units, last = note->about.last;
        const uint32_t query = note->about.pass * 8 + (lane & 3);
        float score[NG];

        if (R == LK_COARSE_RANK)
            rec = records_of(a, place.super);
        score_records<D, R, NG>(rec, ring + stage * a.tile_bytes, q,
                                &queries[(set - window.base) * NG], score);
        __syncwarp();
        if (lane == 0)
            bar_arrive(full + (STAGES + stage) * 8);
        n++;
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
#pragma unroll
        for (int j = 0; j < NG; j++) {
            score[j] = even_score(query + 4 * j, score[j]);
            store_scores(a, place, at, live, query + 4 * j, score[j]);
            if (live)
                part[j] = merge_parts(part[j], make_float2(score[j], 1.f));
            if (last) {
                store_part(a, place, slot, query + 4 * j, part[j]);
                part[j] = make_float2(-INFINITY, 0.f);
            }
        }
    }
}

/* Warps: those that score, those that fetch, then the others. */
template <int D, int R, int NG, int STAGES>
__global__ void __launch_bounds__(32 * BLOCK_WARPS(R), 1)
    scan_kernel(const __grid_constant__ struct scan_args given) {
    SHARED_BYTES(shared, 128);
    struct scan_args a = given;
    const uint32_t warp = warp_index(), workers = a.scanners + FETCHERS,
                   others = blockDim.x / 32 - workers;
    struct held_batch *const held = (struct held_batch *)shared;
    uint8_t *const barriers = shared + HELD_BYTES;
    struct tile_note *const notes = (struct tile_note *)(barriers + BARRIER_BYTES);
    struct four_queries<D> *const queries = (struct four_queries<D> *)(notes + a.scanners * NOTES);
    uint8_t *const ring = (uint8_t *)(queries + WINDOW);
    struct rings x = {0, 0, (uint32_t)__cvta_generic_to_shared(ring),
                      (uint32_t)__cvta_generic_to_shared(barriers), notes};

    static_assert(sizeof *held <= HELD_BYTES, "a place of its own");
    let_next_start();
    prefetch_batch(a.batch, a.stage);
    a.held = held;
    if (warp == a.scanners) {
        for (uint32_t i = threadIdx.x % 32; i < a.scanners * 2 * STAGES; i += 32)
            bar_init(x.bars + i * 8, 1);
        bar_inits_done();
    }
    wait_for_previous();
    hold_batch(a.batch, a.stage, held);
    note_time(a.clock, LK_CUDA_AT_SCAN);
    if (warp >= workers) { /* consecutive tasks on different processors */
        const uint32_t i = warp - workers;
        if (a.heads)
            run_heads(a, blockIdx.x + i * gridDim.x, others * gridDim.x);
        return;
    }
    find_tasks(a, held->tasks, &x.begin, &x.end);
    if (x.begin == x.end)
        return;
    if (warp >= a.scanners)
        fetch_tasks<R, STAGES>(a, x, warp - a.scanners);
    else
        score_tasks<D, R, NG, STAGES>(a, x, ring + warp * STAGES * a.tile_bytes, queries);
}

/* ---- any head dimension: a warp a page, from the record's bytes ---- */

/* find_task() of the second pass, where a task is a tile of a list; one past its end sums to
 * nothing. */
__device__ void find_listed(const struct scan_args &a, uint32_t last, struct cursor *c) {
    const uint32_t stride = group_stride(a.pool.geometry.group);

    for (; c->task < last; c->task += a.scanners) {
        const uint32_t chunk = split_held(a, c);

        c->units = __ldcg(&row_head(c->r, c->head)->listed);
        c->slot = 1 + c->r->chunks + chunk;
        c->step = 1;
        c->tile = chunk;
        c->end = chunk + 1;
        if (chunk * TILE < c->units)
            return;
        for (uint32_t q = c->pass * 8; q < min(c->pass * 8 + 8, stride); q++)
            row_parts(c->r, c->head, stride)[c->slot * stride + q] = make_float2(-INFINITY, 0.f);
    }
}

/* Up to eight queries of the cursor's set, rotated, to q [8][d] in shared memory. Each is
 * 2^exponent times what lies there, so that no sum of products with codes overflows. */
__device__ void rotate_queries(const struct scan_args &a, const struct cursor &c, uint32_t queries,
                               float *q, int *exponent) {
    const struct lk_geometry *g = &a.pool.geometry;
    const uint32_t lane = threadIdx.x % 32, d = g->head_dim, block = d & -d;
    const uint16_t *from =
        (const uint16_t *)c.r->q + ((uint64_t)c.head * g->group + c.pass * 8) * d;

    __syncwarp();
#pragma unroll
    for (uint32_t x = 0; x < 8; x++) {
        float peak = 0;
        for (uint32_t i = x * d + lane; x < queries && i < x * d + d; i += 32)
            peak = fmaxf(peak, fabsf(element(from[i], g->dtype == LK_BF16)));
        exponent[x] = (int)(__float_as_uint(warp_max(peak)) >> 23) - 127;
        for (uint32_t i = x * d + lane; i < x * d + d; i += 32) {
            const float value = x < queries ? element(from[i], g->dtype == LK_BF16) : 0.f;
            q[i] = ldexpf(value, -exponent[x]) * rsqrtf((float)block);
        }
    }
    __syncwarp();
    for (uint32_t o = 1; o < block; o <<= 1) {
        for (uint32_t i = lane; i < 4 * d; i += 32) {
            uint32_t x = i / o * 2 * o + i % o;
            float u = q[x], v = q[x + o];
            q[x] = u + v;
            q[x + o] = u - v;
        }
        __syncwarp();
    }
}

/* The queries on a record's directions, and on its centroid behind them: [rank + 1][8]. */
__device__ void project_queries(const struct records &rec, const uint8_t *coarse,
                                const uint8_t *fine, uint32_t d, uint32_t rank, float unit_scale,
                                const float *q, const int *exponent, float *projection) {
    const uint32_t lane = threadIdx.x % 32;

    for (uint32_t dir = 0; dir <= rank; dir++) {
        float dot[8] = {0, 0, 0, 0, 0, 0, 0, 0}, scale;
        const uint8_t *at = dir < 2 ? coarse + dir * d / 2 : fine + (dir - 2) * d / 2;
        if (dir == rank)
            scale = bf16_float(*(const uint16_t *)(coarse + rec.coarse_scales));
        else
            scale =
                bf16_float(*(const uint16_t *)(dir < 2 ? coarse + rec.coarse_scales + 2 + 2 * dir
                                                       : fine + rec.fine_scales + 2 * (dir - 2)));
        for (uint32_t ch = lane; ch < d; ch += 32) {
            uint32_t place = lk_basis_place(d, ch);
            float v = dir == rank ? (float)(int8_t)coarse[rec.centroid + lk_centroid_place(d, ch)]
                                  : (float)(at[place / 2] >> (place % 2 * 4) & 15) - 8.f;
            for (int x = 0; x < 8; x++)
                dot[x] = fmaf(v, q[x * d + ch], dot[x]);
        }
#pragma unroll
        for (int x = 0; x < 8; x++) {
            float s = warp_sum(dot[x]) * (ldexpf(scale, exponent[x]) * unit_scale);
            if (lane == x)
                projection[dir * 8 + x] = s;
        }
    }
    __syncwarp();
}

/* Score of query lane % 8. */
__device__ float score_projected(const struct records &rec, const uint8_t *coarse,
                                 const uint8_t *fine, uint32_t rank, const float *projection) {
    const uint32_t lane = threadIdx.x % 32, x = lane % 8;
    float2 own = make_float2(-INFINITY, 0.f);

    for (uint32_t t = lane / 8; t < rec.tokens; t += 4) {
        float z = projection[rank * 8 + x];
        for (uint32_t dir = 0; dir < rank; dir++) {
            const uint8_t *at =
                dir < 2 ? coarse + rec.coarse_coeffs + lk_coeff_place(rec.tokens, dir, t)
                        : fine + rec.fine_coeffs + lk_coeff_place(rec.tokens, dir - 2, t);
            z = fmaf((float)*at - 128.f, projection[dir * 8 + x], z);
        }
        own = merge_parts(own, make_float2(z, 1.f));
    }
    for (int o = 8; o < 32; o <<= 1)
        own = merge_parts(own, make_float2(__shfl_xor_sync(LK_FULL_WARP, own.x, o),
                                           __shfl_xor_sync(LK_FULL_WARP, own.y, o)));
    return own.x + log2_fast(own.y);
}

/* The cursor's task. listed: of the second pass. q: [8][d] in shared memory, then projections. */
__device__ void score_plainly(const struct scan_args &a, struct cursor c, uint32_t rank,
                              bool listed, float *q) {
    const struct lk_geometry *g = &a.pool.geometry;
    const uint32_t lane = threadIdx.x % 32, d = g->head_dim, stride = group_stride(g->group);
    const uint32_t queries = min(8u, g->group - c.pass * 8);
    const struct records rec = records_of(a, c.super);
    const uint64_t plane = (uint64_t)c.r->layer * g->kv_heads + c.head;
    const struct place place = place_of(a, c.r, c.head);
    float2 part = make_float2(-INFINITY, 0.f); /* of query lane % 8 */
    int exponent[8];

    rotate_queries(a, c, queries, q, exponent);
    for (uint32_t n = 0;; n++) {
        const uint32_t i = n % TILE;
        c.tile += n && i == 0 ? c.step : 0;
        if (c.tile >= c.end || c.tile * TILE + i >= c.units)
            break;
        const uint32_t at = c.tile * TILE + i;
        const uint32_t unit = listed ? __ldcg(&row_rescan(c.r, c.head)[at]) : at;
        const uint32_t id = !c.super                ? physical_page(c.r, unit)
                            : c.r->table_shift == 2 ? c.r->table[unit]
                                                    : c.r->table[4 * unit] / LK_QUAD_PAGES;
        const uint8_t *coarse =
            c.super ? a.pool.super + (plane * (a.pool.pages / 4) + id) * rec.coarse_stride
                    : a.pool.coarse + (plane * a.pool.pages + id) * rec.coarse_stride;
        const uint8_t *fine = a.pool.fine + (plane * a.pool.pages + id) * rec.fine_stride;

        project_queries(rec, coarse, fine, d, rank, c.r->sm_scale * LK_LOG2E, q, exponent,
                        q + 8 * d);
        const float score = even_score(c.pass * 8 + lane % 8,
                                       score_projected(rec, coarse, fine, rank, q + 8 * d));
        for (uint32_t x = 0; lane < queries && x < (c.super ? 4 : 1); x++)
            place.scores[(uint64_t)(c.super ? 4 * unit + x : unit) * stride + c.pass * 8 + lane] =
                score_bits(place, c.pass * 8 + lane, score);
        part = merge_parts(part, make_float2(score, 1.f));
        __syncwarp();
    }
    if (lane < 8 && c.pass * 8 + lane < stride)
        row_parts(c.r, c.head, stride)[c.slot * stride + c.pass * 8 + lane] = part;
}

/* Of either pass; and the rest. */
__global__ void __launch_bounds__(32 * PLAIN_WARPS)
    scan_plain(const __grid_constant__ struct scan_args given, uint32_t rank, uint32_t warp_bytes) {
    SHARED_BYTES(shared, 128);
    struct held_batch *const held = (struct held_batch *)shared;
    struct scan_args a = given;
    const uint32_t warps = gridDim.x * (blockDim.x / 32);
    const uint32_t warp = warp_index() * gridDim.x + blockIdx.x;
    float *q = (float *)(shared + HELD_BYTES + threadIdx.x / 32 * warp_bytes);
    struct cursor c = {};

    let_next_start();
    wait_for_previous();
    a.held = held;
    hold_batch(a.batch, a.stage, held);
    note_time(a.clock, a.stage == LK_CUDA_RESCAN ? LK_CUDA_AT_RESCAN : LK_CUDA_AT_SCAN);
    const uint32_t last = held->tasks;
    const bool listed = a.stage == LK_CUDA_RESCAN;
    auto find = [&] { listed ? find_listed(a, last, &c) : find_task(a, last, &c); };
    for (c.task = warp, find(); c.task < last; c.task += warps, find())
        score_plainly(a, c, rank, listed, q);
    if (a.heads) /* from the far end: the last warps have the fewest chunks */
        run_heads(a, warps - 1 - warp, warps);
    if (listed)
        for (uint32_t task = warps - 1 - warp; task < a.batch->tasks[LK_CUDA_REST]; task += warps)
            sum_rest(a, task);
}

/* ---- launchers ---- */

template <int R> static uint32_t tile_bytes(const struct lk_geometry &g) {
    const struct lk_record coarse = lk_record_coarse(&g), fine = lk_record_fine(&g),
                           super = lk_record_super(&g);

    return TILE *
           (R == LK_COARSE_RANK ? max(super.stride, coarse.stride) : coarse.stride + fine.stride);
}

/* A part: a warp that scores, its ring and its notes. */
template <int D, int R> static struct lk_shared shared_of(const struct lk_geometry &g) {
    return {HELD_BYTES + BARRIER_BYTES + WINDOW * (uint32_t)sizeof(struct four_queries<D>),
            STAGES_OF(R) * tile_bytes<R>(g) + NOTES * (uint32_t)sizeof(struct tile_note),
            BLOCK_WARPS(R) - FETCHERS - 1};
}

static uint32_t plain_warp_bytes(const struct lk_geometry &g, uint32_t rank) {
    return (8 * g.head_dim + 8 * (rank + 1)) * 4;
}

template <int D, int R, int NG>
static int launch_fast(struct scan_args a, uint32_t processors, void *stream) {
    const struct lk_shared s = shared_of<D, R>(a.pool.geometry);
    auto *kernel = scan_kernel<D, R, NG, STAGES_OF(R)>;
    int error = take_shared(kernel, s, &a.scanners);

    a.tile_bytes = tile_bytes<R>(a.pool.geometry);
    return error ? error
                 : launch(kernel, dim3(processors), 32 * (a.scanners + FETCHERS + 1),
                          s.fixed + a.scanners * s.each, stream, a);
}

int lk_cuda_launch_plain(struct scan_args a, uint32_t rank, uint32_t processors, void *stream) {
    const uint32_t bytes = lk_cuda_plain_least(&a.pool.geometry, rank);
    int error = take_bytes(scan_plain, bytes);

    a.scanners = 2 * processors * PLAIN_WARPS;
    return error ? error
                 : launch(scan_plain, dim3(2 * processors), 32 * PLAIN_WARPS, bytes, stream, a,
                          rank, plain_warp_bytes(a.pool.geometry, rank));
}

uint32_t lk_cuda_plain_least(const struct lk_geometry *g, uint32_t rank) {
    return HELD_BYTES + PLAIN_WARPS * plain_warp_bytes(*g, rank);
}

/* first: of the step's scans: it appends, scores newest pages and notes the time. */
static int launch_scan(const struct lk_cuda_step *step, int stage, bool first, void *stream) {
    const uint32_t rank = stage == LK_CUDA_COARSE ? LK_COARSE_RANK : step->pool.geometry.rank;
    struct scan_args a = make_args(step, stage, rank);

    a.heads = first;
    a.clock = first ? step->clock : NULL;
    return for_sizes(
        a.pool.geometry, rank,
        [&](auto d, auto r, auto ng) {
            return launch_fast<d.value, r.value, ng.value>(a, step->processors, stream);
        },
        [&] { return lk_cuda_launch_plain(a, rank, step->processors, stream); });
}

static uint32_t least_at(const struct lk_geometry *g, uint32_t rank) {
    return (uint32_t)for_sizes(
        *g, rank,
        [&](auto d, auto r, auto) { return (int)shared_least(shared_of<d.value, r.value>(*g)); },
        [&] { return (int)lk_cuda_plain_least(g, rank); });
}

uint32_t lk_cuda_scan_least(const struct lk_geometry *g) {
    return max(least_at(g, g->rank), least_at(g, LK_COARSE_RANK));
}

int lk_cuda_scan(const struct lk_cuda_step *step, void *stream) {
    bool rank = step->scans >> LK_FULL & 1 || !step->scans;
    int error = 0;

    if (rank)
        error = launch_scan(step, LK_CUDA_RANK, true, stream);
    if (!error && step->scans & (1u << LK_COARSE | 1u << LK_NESTED | 1u << LK_TREE))
        error = launch_scan(step, LK_CUDA_COARSE, !rank, stream);
    return error;
}
