/* SPDX-License-Identifier: MIT */
/*
 * attend.cuh - what the two kernels of attention share: jobs, tokens, and a head's results.
 *
 * Words: a job is (row, KV head, up to eight bands of eight queries); its tokens come in tiles of
 * 16 and its tiles in slices, a task each; an octet is half a tile, eight tokens of one page.
 *
 * Invariants: what a job and its slices are depends on the row and the geometry alone. A slice
 * leaves its partial result in the row's workspace; the block that finishes a job's last slice
 * merges them in order, or, of many bands, several blocks, each a band. A job holds whatever is
 * needed of its row, since the way to a row's descriptor is long and would be gone at every turn.
 */
#ifndef LK_CUDA_ATTEND_CUH
#define LK_CUDA_ATTEND_CUH

#include "clock.cuh"
#include "device.cuh"

#define WARPS   8
#define THREADS (32 * WARPS) /* that attend */
#define QUERIES 8            /* of a band */
#define NEVER   0x7fffff00   /* a position after all; what is added to it within a tile fits */

struct attend_args {
    struct lk_pool_view pool;
    const struct lk_cuda_batch *batch;
    uint32_t *sync;
    struct lk_cuda_clock *clock; /* may be NULL */
};

struct job {
    const uint16_t *q; /* of the row, like out and lse */
    float *out, *lse;
    const struct lk_cuda_pick *picks; /* NULL: all pages in order */
    const struct lk_cuda_head *found; /* what select says of the head */
    uint64_t base; /* block of keys and values of the KV head in page 0 of the layer */
    const uint32_t *table;
    uint8_t *partials;           /* of slice 0 */
    uint64_t partial_bytes;      /* of a slice */
    uint32_t *words;             /* slices done; who merges (attend.cu) */
    struct lk_head_out *result;  /* of the head; NULL: not wanted of this job */
    struct lk_page_weight *list; /* likewise: all pages of an exact row */
    uint32_t first, slices;      /* its first task; its tasks */
    uint32_t tiles, slice_tiles;
    uint32_t head, bands; /* the number of bands is a power of two */
    uint32_t query_first, queries;
    uint32_t tokens, length, pages, listed, budget_pages;
    uint32_t table_shift, token_shift; /* pages of a table's entry, tokens of a page */
    uint32_t inverse;                  /* 2^31 / group, rounded up: divides numbers below 2^26 */
    float scale;                       /* of logits, base 2 */
    bool once; /* no other job is known to read the same keys and values at this time */
};

/* Page of an octet, as read; what follows from it is left until it has come. */
struct octet {
    uint32_t page, physical; /* LK_CUDA_NO_PAGE: none; in a table without picks: its entry */
    float bias;
    uint32_t kept, in; /* first token within the page */
};

/* A row in hand, in shared memory, and its tasks: those of several jobs. */
struct held_row {
    uint32_t first, end;
    struct lk_cuda_row row;
};

/* By a warp. `heads`: of KV. */
__device__ __forceinline__ void hold_row(const struct lk_cuda_batch *b, uint32_t heads,
                                         const struct row_starts &starts, uint32_t task,
                                         struct held_row *ret) {
    uint32_t first;

    load_row(b, find_row(b, LK_CUDA_ATTEND, starts, task, &first), &ret->row);
    ret->first = first;
    ret->end = first + heads * ret->row.query_groups * ret->row.slices;
    __syncwarp();
}

/* The job of a task, by the warp that found the one before (`any`), which most often is of the same
 * row. Reads nothing that an earlier kernel of the step leaves. */
__device__ __forceinline__ struct job find_job(const struct attend_args &a,
                                               const struct row_starts &starts,
                                               struct held_row *held, bool any, uint32_t task) {
    const struct lk_geometry *g = &a.pool.geometry;

    if (__any_sync(LK_FULL_WARP, !any || task >= held->end)) /* all have looked before one writes */
        hold_row(a.batch, g->kv_heads, starts, task, held);
    const struct lk_cuda_row *r = &held->row;
    const uint32_t first = held->first, number = (task - first) / r->slices;
    const uint32_t group = number % r->query_groups, head = number / r->query_groups;
    const uint32_t most = r->bands * QUERIES;
    struct job j;

    j.q = (const uint16_t *)r->q;
    j.out = r->out;
    j.lse = r->lse;
    j.picks = r->scan ? row_picks(r, head) : NULL;
    j.found = row_head(r, head);
    j.base = (uint64_t)r->layer * a.pool.pages * g->kv_heads + head;
    j.table = r->table;
    j.partial_bytes = (uint64_t)most * (g->head_dim * 4 + sizeof(struct lk_cuda_stat));
    j.partials = r->workspace + r->partials + (uint64_t)number * r->slices * j.partial_bytes;
    j.words = a.sync + LK_CUDA_SYNC * (r->group_first + number);
    j.result = r->result && group == 0 ? r->result + head : NULL;
    j.list = r->list && group == 0 && !r->scan ? r->list + (uint64_t)head * r->list_pages : NULL;
    j.first = first + number * r->slices;
    j.slices = r->slices;
    j.tiles = r->tiles;
    j.slice_tiles = r->slice_tiles;
    j.head = head;
    j.bands = r->bands;
    j.query_first = group * most;
    j.queries = min(most, r->tokens * g->group - j.query_first);
    j.tokens = r->tokens;
    j.length = (uint32_t)r->length;
    j.pages = r->pages;
    j.listed = min(r->pages, r->list_pages);
    j.budget_pages = r->budget_pages;
    j.table_shift = r->table_shift;
    j.token_shift = 31 - __clz(g->page_tokens);
    j.inverse = (0x80000000u + g->group - 1) / g->group;
    j.scale = r->sm_scale * LK_LOG2E;
    j.once = r->scan || (starts.rows == 1 && r->query_groups == 1); /* exact rows may share pages */
    return j;
}

/* Warps that hold different queries, in attend.cu: two bands each. */
__device__ __forceinline__ uint32_t query_warps(const struct job &j) {
    return j.bands > 1 ? j.bands / 2 : 1;
}

/* Octet `half` of a tile below `last`. */
__device__ __forceinline__ struct octet look_up(const struct job &j, uint32_t tile, uint32_t last,
                                                uint32_t half) {
    const uint32_t token = 16 * tile + 8 * half, entry = token >> j.token_shift;
    struct octet h = {LK_CUDA_NO_PAGE, 0, 0.f, 1, token & ((1u << j.token_shift) - 1)};

    if (tile >= last)
        return h;
    if (j.picks) {
        if (entry < j.budget_pages) {
            const uint4 v = __ldcg((const uint4 *)&j.picks[entry]);
            h.page = v.x;
            h.physical = v.y;
            h.bias = __uint_as_float(v.z);
            h.kept = v.w;
        }
    } else if (token < j.length) {
        h.page = entry;
        h.physical = j.table[entry >> j.table_shift];
    }
    return h;
}

/* Its first token; NEVER: none. */
__device__ __forceinline__ int octet_position(const struct job &j, const struct octet &h) {
    const uint32_t position = (h.page << j.token_shift) + h.in;
    return h.page == LK_CUDA_NO_PAGE || position >= j.length ? NEVER : (int)position;
}

/* Number of its block of the pool: a page's keys of a KV head, then the values. */
__device__ __forceinline__ uint64_t octet_block(const struct attend_args &a, const struct job &j,
                                                const struct octet &h) {
    const uint32_t mask = (1u << j.table_shift) - 1;
    const uint32_t physical =
        j.picks ? h.physical : (h.physical << j.table_shift) + (h.page & mask);

    return j.base + (uint64_t)physical * a.pool.geometry.kv_heads;
}

/* ---- queries ---- */

/* Query x of a KV head's is query head x % group of token x / group. */
__device__ __forceinline__ uint32_t query_token(const struct job &j, uint32_t x) {
    return (uint32_t)((uint64_t)x * j.inverse >> 31);
}

/* Number of query head and token, for query x of the job. */
__device__ __forceinline__ uint32_t query_index(const struct attend_args &a, const struct job &j,
                                                uint32_t x) {
    const uint32_t group = a.pool.geometry.group, token = query_token(j, j.query_first + x);
    return (token * a.pool.geometry.kv_heads + j.head) * group + j.query_first + x - token * group;
}

/* How many tokens a query sees. */
__device__ __forceinline__ int query_limit(const struct job &j, uint32_t x) {
    return (int)(j.length - j.tokens + 1 + query_token(j, j.query_first + x));
}

/* ---- results ---- */

__device__ __forceinline__ float shrink(float from, float to) { /* 2^(from - to), empty: 0 */
    return from == -INFINITY ? 0.f : exp2_fast(from - to);
}

__device__ __forceinline__ void add_scaled(float4 *sum, const float4 &x, float f) {
    sum->x = fmaf(x.x, f, sum->x);
    sum->y = fmaf(x.y, f, sum->y);
    sum->z = fmaf(x.z, f, sum->z);
    sum->w = fmaf(x.w, f, sum->w);
}

/* What select says of the head, on its way to shared memory: by a warp, which waits for it before
 * others read it. */
__device__ __forceinline__ void load_found(const struct job &j, struct lk_cuda_head *ret) {
    const uint32_t at = 16 * (threadIdx.x % 32);

    if (j.picks && at < sizeof *ret)
        copy_async((uint32_t)__cvta_generic_to_shared(ret) + at, (const uint8_t *)j.found + at);
    copy_commit();
}

/* A query's LSE -> its captured mass; no number stays one. `index`: query_index(); `state`: all its
 * tokens. */
__device__ __forceinline__ float finish_query(const struct job &j, const struct lk_cuda_head *found,
                                              uint32_t x, uint32_t index,
                                              const struct lk_cuda_stat &state) {
    const float lse = state.mass == 0 ? -INFINITY : state.peak + log2_fast(state.mass);

    if (j.lse)
        j.lse[index] = lse * LK_LN2;
    if (!j.picks)
        return 1.f;
    return found->sampled /* a scored row has one token, so x is a query head of the group */
               ? __fdividef(state.kept, state.mass)
               : __fdividef(1.f, 1.f + exp2_fast(found->rest[x] - lse));
}

/* The head's result, by one thread, after mass[] (at 16 bytes) is complete. */
__device__ __forceinline__ void finish_head(const struct attend_args &a, const struct job &j,
                                            const struct lk_cuda_head *found, const float *mass) {
    const uint32_t group = a.pool.geometry.group;
    struct lk_head_out out = {j.pages, 0, 1.f, LK_OUT_EXACT};

    if (!j.result)
        return;
    if (j.picks) {
        float sum = 0;
#pragma unroll 1
        for (uint32_t i = 0; i < group; i += 4) {
            const float4 v = *(const float4 *)&mass[i];
            sum += v.x + (i + 1 < group ? v.y : 0.f) + (i + 2 < group ? v.z : 0.f) +
                   (i + 3 < group ? v.w : 0.f);
        }
        sum = __fdividef(sum, (float)group);    /* of ones it may be a little more than one */
        sum = sum >= 0 ? fminf(1.f, sum) : 0.f; /* a row with what is no number reports no mass */
        out = {found->kept, found->sampled, sum, found->sampled ? 0 : (uint32_t)LK_OUT_ESTIMATED};
    }
    *j.result = out;
}

/* An exact row lists all its pages. */
__device__ __forceinline__ void list_all(const struct job &j) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; j.list && i < j.listed; i += THREADS)
        j.list[i] = {i, 1.f};
}

/* The warps that attend. */
__device__ __forceinline__ void meet() {
    bar_some(THREADS);
}

/* The block has stored the partials of `count` slices -> whether all of the job's are there. */
__device__ __forceinline__ bool all_done(const struct job &j, uint32_t count, uint32_t *last) {
    const uint32_t slices = j.slices;
    uint32_t *word = j.words;

    meet();
    if (count == slices)
        return true;
    if (threadIdx.x == 0) {
        const uint32_t done = count + add_in_order(word, count);
        *last = done == slices;
        if (done == slices)
            *word = 0;
    }
    meet();
    return *last;
}

/* The block's run of tasks, `task` up to `last`. */
__device__ __forceinline__ void find_tasks(const struct attend_args &a, uint32_t *task,
                                           uint32_t *last) {
    const uint32_t total = __ldcg(&a.batch->tasks[LK_CUDA_ATTEND]);

    find_run(total, total / gridDim.x, task, last);
}

int lk_cuda_attend_plain(const struct lk_cuda_step *step, void *stream);

#endif
