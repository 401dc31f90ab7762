/* SPDX-License-Identifier: MIT */
/*
 * rescan.cu - the second pass of nested and tree scans: pages that prune listed are scored again,
 * at the geometry's rank; scores of all others are summed.
 *
 * Listed pages lie anywhere, two records each, so there is no run of bytes for the copy engine,
 * which starts too few copies in a given time: here a scoring warp fetches for itself. All its
 * lanes start copies of 16 bytes, eight lanes a record, to a ring of tiles of its own in shared
 * memory. Four tiles are looked up together, a lane a record, while the four before are scored: the
 * list first, the block table a tile later, so that no read is waited for.
 *
 * A block takes a run of consecutive tiles, its scoring warps in turn; the queries are held as in
 * scan.cu. Its tasks of the rest are taken by whoever is free: a few warps from the start, the
 * scoring warps when their tiles are done. Which warp does what changes no bit: every tile and
 * every task of the rest has a slot of its own.
 *
 * Shared memory: the batch as held, the next task of the rest, queries of WINDOW heads, [warp]
 * notes of tiles, [warp][stage] tiles.
 */
#include "scan.cuh"

#define BLOCK_WARPS 16
#define REST_WARPS  4 /* that do not score */
#define STAGES      2
#define LOOKED      4    /* tiles looked up together: 32 records */
#define NOTES       8    /* tiles known to a warp */
#define FIXED_BYTES 2048 /* a multiple of 128 */
#define LINE        128  /* bytes that the second cache sends at once at most */

/* A tile that was looked up. */
struct listed {
    uint64_t record[TILE];
    uint32_t page[TILE];
    const struct lk_cuda_row *r;
    uint32_t set, slot, first; /* first: place in the list of its first page */
    uint32_t left;             /* its pages; 0: none, and nothing is fetched */
};

/* What a lane read of the list: place lane % 8 of tile lane / 8 of four. */
struct looking {
    uint32_t page, units;
};

/* Read the list for the tiles `task`, task + scanners, .. before `end`. Past its end it may hold
 * anything. */
__device__ __forceinline__ struct looking read_list(const struct scan_args &a, uint32_t task,
                                                    uint32_t end, struct listed *four) {
    const uint32_t lane = threadIdx.x % 32;
    struct listed *const to = &four[lane / TILE];
    struct looking ret = {0, 0};
    struct cursor c;

    c.task = task + lane / TILE * a.scanners;
    if (c.task >= end)
        return ret;
    const uint32_t chunk = split_held(a, &c);
    ret.units = __ldcg(&row_head(c.r, c.head)->listed);
    ret.page = __ldcg(&row_rescan(c.r, c.head)[chunk * TILE + lane % TILE]);
    to->r = c.r;
    to->set = c.set;
    to->slot = 1 + c.r->chunks + chunk;
    to->first = chunk * TILE;
    return ret;
}

/* Then the block table. Places past the list's end take its last page. */
__device__ __forceinline__ void read_table(const struct scan_args &a, const struct looking &l,
                                           struct listed *four) {
    const struct lk_geometry *g = &a.pool.geometry;
    const uint32_t lane = threadIdx.x % 32;
    struct listed *const to = &four[lane / TILE];

    __syncwarp(); /* what read_list() wrote */
    const uint32_t first = l.units ? to->first : 0,
                   left = l.units > first ? min(l.units - first, (uint32_t)TILE) : 0,
                   last = left ? min(lane % TILE, left - 1) : 0;
    const uint32_t page = __shfl_sync(LK_FULL_WARP, l.page, (lane & 24) + last);

    to->left = left;
    if (left) {
        const uint64_t plane = (uint64_t)to->r->layer * g->kv_heads + owner_of(a, to->set).head;
        to->page[lane % TILE] = page;
        to->record[lane % TILE] = plane * a.pool.pages + physical_page(to->r, page);
    }
    __syncwarp();
}

/* Start the copies of a record's bytes, by eight lanes, cut at lines of memory: a sector that two
 * instructions want a half of is sent twice. */
__device__ __forceinline__ void copy_record(uint32_t to, const uint8_t *from, int bytes) {
    const int at = (int)(threadIdx.x % 8 * 16) - (int)((uintptr_t)from % LINE);
    const uint8_t *const line = from + at;

    to += (uint32_t)at;
#pragma unroll
    for (int i = 0; i < bytes + LINE - 16; i += LINE) /* at: from 16 - LINE to LINE - 16 */
        copy_once((i > 0 || at >= 0) && (i + LINE - 16 < bytes || at + i < bytes), to + (uint32_t)i,
                  line + i);
}

/* Start the copies of a tile's records. */
__device__ __forceinline__ void copy_tile(const struct scan_args &a, const struct records &rec,
                                          const uint64_t *record, uint32_t to) {
    const uint32_t fine = to + TILE * rec.coarse_stride;

#pragma unroll
    for (uint32_t half = 0; half < TILE; half += 4) {
        const uint32_t at = half + threadIdx.x % 32 / 8;
        const uint64_t id = record[at];

        copy_record(to + at * rec.coarse_stride, a.pool.coarse + id * rec.coarse_stride,
                    (int)rec.coarse_stride);
        if (rec.fine_stride)
            copy_record(fine + at * rec.fine_stride, a.pool.fine + id * rec.fine_stride,
                        (int)rec.fine_stride);
    }
}

/* Start fetching a tile that was looked up. */
template <int D, int R>
__device__ __forceinline__ void fetch_listed(const struct scan_args &a, const struct records &rec,
                                             const struct listed *l, uint32_t to) {
    if (l->left == 0)
        return;
    if (rec.tokens == 16)
        copy_tile(a, fixed_records<D, R, 16>(), l->record, to);
    else
        copy_tile(a, rec, l->record, to);
}

/* Score the block's tiles begin .. end - 1, every scanners-th from begin + warp on. notes: of this
 * warp, NOTES of them. */
template <int D, int R, int NG>
__device__ __forceinline__ void score_lists(const struct scan_args &a, uint32_t begin, uint32_t end,
                                            uint32_t warp, const uint8_t *ring,
                                            struct listed *notes, struct four_queries<D> *queries) {
    const uint32_t lane = threadIdx.x % 32, to_ring = (uint32_t)__cvta_generic_to_shared(ring);
    const struct records rec = a.pages;
    const uint32_t count = begin + warp < end ? (end - begin - warp - 1) / a.scanners + 1 : 0;
    struct query<D> q[NG];
    struct place place = {};
    uint32_t set = UINT32_MAX, query = 0;
    struct looking looking = read_list(a, begin + warp, end, notes);
    struct window window = open_window(a, begin, end);
    const struct raw_query<D> first = load_first<D, NG>(a, window);

    read_table(a, looking, notes);
    for (uint32_t i = 0; i < STAGES; i++) {
        fetch_listed<D, R>(a, rec, &notes[i], to_ring + i * a.tile_bytes);
        copy_commit();
    }
    for (uint32_t n = 0;; n++) {
        const struct listed *const note = &notes[n % NOTES];
        const uint32_t to = n < count ? note->set : UINT32_MAX;
        if (!reach_set<D, NG>(a, to, &window, first, queries))
            return;
        if (n % LOOKED == 0)
            looking = read_list(a, begin + warp + (n + LOOKED) * a.scanners, end,
                                &notes[(n + LOOKED) % NOTES]);
        else if (n % LOOKED == 1)
            read_table(a, looking, &notes[(n - 1 + LOOKED) % NOTES]);
        if (to != set) {
            const struct owner o = owner_of(a, to);
            set = to;
            place = place_of(a, note->r, o.head);
            query = o.pass * 8 + (lane & 3);
#pragma unroll
            for (int j = 0; j < NG; j++)
                load_query<D>(&queries[(set - window.base) * NG + j], &q[j]);
        }
        const uint32_t tile = n % STAGES * a.tile_bytes, left = note->left, slot = note->slot;
        const uint32_t page = note->page[lane >> 2];
        const bool live = (lane >> 2) < left;
        float score[NG];
        copy_wait<STAGES - 1>();
        __syncwarp();
        if (left)
            score_records<D, R, NG>(rec, ring + tile, q, &queries[(set - window.base) * NG], score);
        __syncwarp();
        if (n + STAGES < count)
            fetch_listed<D, R>(a, rec, &notes[(n + STAGES) % NOTES], to_ring + tile);
        copy_commit();
#pragma unroll
        for (int j = 0; j < NG; j++) {
            float2 part = make_float2(-INFINITY, 0.f);
            score[j] = even_score(query + 4 * j, score[j]);
            if (left)
                store_scores(a, place, page, live, query + 4 * j, score[j]);
            if (live)
                part = merge_parts(part, make_float2(score[j], 1.f));
            store_part(a, place, slot, query + 4 * j, part);
        }
    }
}

/* The block's tasks of the rest, as long as there are any. */
__device__ __forceinline__ void sum_rests(const struct scan_args &a, uint32_t *taken) {
    uint32_t begin, end;

    find_tasks(a, a.batch->tasks[LK_CUDA_REST], &begin, &end);
    for (;;) {
        uint32_t task = threadIdx.x % 32 ? 0 : atomicAdd(taken, 1u);
        task = begin + __shfl_sync(LK_FULL_WARP, task, 0);
        if (task >= end)
            return;
        sum_rest(a, task);
    }
}

template <int D, int R, int NG>
__global__ void __launch_bounds__(32 * BLOCK_WARPS, 1)
    rescan_kernel(const __grid_constant__ struct scan_args given) {
    SHARED_BYTES(shared, 128);
    const uint32_t warp = warp_index();
    struct held_batch *const held = (struct held_batch *)shared;
    uint32_t *const taken = (uint32_t *)(held + 1);
    struct scan_args a = given;
    struct four_queries<D> *const queries = (struct four_queries<D> *)(shared + FIXED_BYTES);
    struct listed *const notes = (struct listed *)(queries + WINDOW);
    uint8_t *const rings = (uint8_t *)(notes + a.scanners * NOTES);

    let_next_start();
    static_assert(sizeof *held + sizeof *taken <= FIXED_BYTES, "beside each other");
    prefetch_batch(a.batch, LK_CUDA_RESCAN);
    a.held = held;
    if (threadIdx.x == 0)
        *taken = 0;
    wait_for_previous();
    hold_batch(a.batch, a.stage, held);
    note_time(a.clock, LK_CUDA_AT_RESCAN);
    uint32_t begin, end;
    find_tasks(a, held->tasks, &begin, &end);
    if (warp < a.scanners && begin < end)
        score_lists<D, R, NG>(a, begin, end, warp, rings + warp * STAGES * a.tile_bytes,
                              notes + warp * NOTES, queries);
    sum_rests(a, taken);
}

/* ---- launchers ---- */

static uint32_t tile_bytes(const struct lk_geometry &g) {
    return TILE * (lk_record_coarse(&g).stride + lk_record_fine(&g).stride);
}

/* A part: a warp that scores, its notes and its ring. */
template <int D> static struct lk_shared shared_of(const struct lk_geometry &g) {
    return {FIXED_BYTES + WINDOW * (uint32_t)sizeof(struct four_queries<D>),
            NOTES * (uint32_t)sizeof(struct listed) + STAGES * tile_bytes(g),
            BLOCK_WARPS - REST_WARPS};
}

template <int D, int R, int NG>
static int launch_fast(struct scan_args a, uint32_t processors, void *stream) {
    const struct lk_shared s = shared_of<D>(a.pool.geometry);
    auto *kernel = rescan_kernel<D, R, NG>;
    int error = take_shared(kernel, s, &a.scanners);

    a.tile_bytes = tile_bytes(a.pool.geometry);
    return error ? error
                 : launch(kernel, dim3(processors), 32 * (a.scanners + REST_WARPS),
                          s.fixed + a.scanners * s.each, stream, a);
}

int lk_cuda_rescan(const struct lk_cuda_step *step, void *stream) {
    const uint32_t rank = step->pool.geometry.rank;
    struct scan_args a = make_args(step, LK_CUDA_RESCAN, rank);

    a.clock = step->clock;
    return for_sizes(
        a.pool.geometry, rank,
        [&](auto d, auto r, auto ng) {
            return launch_fast<d.value, r.value, ng.value>(a, step->processors, stream);
        },
        [&] { return lk_cuda_launch_plain(a, rank, step->processors, stream); });
}

uint32_t lk_cuda_rescan_least(const struct lk_geometry *g) {
    return (uint32_t)for_sizes(
        *g, g->rank, [&](auto d, auto, auto) { return (int)shared_least(shared_of<d.value>(*g)); },
        [&] { return (int)lk_cuda_plain_least(g, g->rank); });
}
