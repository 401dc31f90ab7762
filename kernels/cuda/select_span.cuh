/* SPDX-License-Identifier: MIT */
/*
 * select_span.cuh - what a block of select works on: its span of a row's pages, and what it shares
 * with its team. See select.cu.
 */
#ifndef LK_CUDA_SELECT_SPAN_CUH
#define LK_CUDA_SELECT_SPAN_CUH

#include "clock.cuh"
#include "device.cuh"
#include "team.cuh"

#define THREADS     512
#define WARPS       (THREADS / 32)
#define BINS        128
#define ROUNDS      6     /* ranges of words: the first, or all others; then 7 bits less each */
#define FIRST_SHIFT 20    /* the first range's bins: an eighth of a power of two */
#define CUTS        2     /* found by a block at most: again for a mass target */
#define FEW         32    /* words that are sent to all: one a lane */
#define SPAN_LONG   32768 /* units held by a block alone on a multiprocessor, not by two */
#define FOURS_BITS  2u /* a warp's lanes have four words each in runs of so many groups or more */
#define HITS_SHARED LK_CUDA_SPAN_HITS
#define SHARE       0x3fffffff /* the bits of a word that are the share */
#define SURE        0x40000000
#define NEVER       ((int32_t)0x80000000)
#define SHARE_FLOOR 1e-30f
#define MARK        0x80000000u
#define NO_PAGE     0xffffffffu
#define TIE_MIDDLE  30
#define REST_LEAST  1e-3f /* what 1 less the kept is known of to a part in 2,000 */

struct select_args {
    struct lk_pool_view pool;
    const struct lk_cuda_batch *batch;
    struct lk_cuda_clock *clock; /* may be NULL */
    uint32_t team_inverse;       /* lk_cuda_inverse() of its size */
};

struct hit {
    uint32_t page; /* NO_PAGE: that of the hit before */
    float bias;
};

/* Where a span's values are: shared memory, or the row's workspace. */
struct view {
    int32_t *words;
    uint32_t *kept, *taken; /* masks of a group; taken: kept or hit */
    uint64_t *weight;       /* of a group's pages that are not kept */
    struct hit *hits;       /* by stratum; a warp keeps its first itself */
};

/* The pages (or, pruning superpages: units of four pages) of a block, and whatever is needed of its
 * row: the way to a row's descriptor is long and would be gone at every turn. In shared memory. */
struct span : lk_cuda_cut {
    uint32_t head, group, stride;
    uint32_t base, count;      /* first of its units, and their number */
    uint32_t groups, run_bits; /* groups of 32 units; log2 of those in a run */
    bool live, spills, fetch;  /* something to do; `spill` has the words; fetch pages to L2 */
    union {                    /* of the head, in the order of the row's offsets */
        uint8_t *place[LK_CUDA_OFFSETS];
        struct {
            float *scores;
            uint32_t *shares;
            const float2 *newest; /* and the parts behind it */
            uint8_t *spilled;
            struct lk_cuda_head *found;
            uint32_t *rescan;
            struct lk_cuda_pick *picks;
            void *partials;
        };
    };
    struct lk_page_weight *list;
    const uint32_t *table;
    struct view spill;
};

struct cut {
    int32_t word;  /* words above are kept */
    uint32_t ties; /* and so many that equal it */
};

/* Words above `high` are kept, those below `low` are not; of the `inside` ones between, `need`. */
struct bracket {
    int32_t high, low;
    uint32_t need, inside;
};

struct tally {
    uint64_t weight;
    uint32_t left, kept;
};
struct sums {                      /* of pages not kept; pages kept */
    struct tally before, own, all; /* in lower spans, in this, in the row */
    uint32_t most;                 /* no share of the row's pages that are not kept is larger */
};

struct shared {
    alignas(16) uint32_t bins[ROUNDS][BINS], all_bins[ROUNDS][BINS]; /* zero at first, with */
    uint32_t run_hits[WARPS];                                        /* pages hit, by run */
    uint4 peers[LK_TEAM_MOST];           /* of each block: weight, kept and few, most */
    uint32_t few[LK_TEAM_MOST][FEW + 4]; /* the blocks' words inside the bracket */
    alignas(16) uint32_t inside[FEW];    /* this block's */
    uint2 inside_at[FEW];                /* the page in the span, and its run */
    int32_t all_few[FEW + 4];            /* of the team, read by fours */
    uint32_t few_rank[FEW];              /* and from which block */
    uint32_t equal[LK_TEAM_MOST];
    alignas(16) uint32_t taken_by[LK_TEAM_MOST][WARPS]; /* pages hit */
    union {
        struct hit hits[HITS_SHARED];
        int32_t list[LK_CUDA_BUDGET_PAGES_MAX];
    };
    uint64_t run_weight[WARPS]; /* of the pages not kept; how many are kept; the largest share */
    uint32_t run_kept[WARPS], run_most[WARPS];
    uint64_t warp_weight[WARPS];
    /* Where words are equal: */
    double warp_sum[WARPS], part_sum[LK_TEAM_MOST][LK_GROUP_MAX], exact[LK_GROUP_MAX];
    uint32_t ones, zeros; /* bits that are so in what is left over of any of them */
    uint32_t warp_count[WARPS];
    alignas(16) float2 heads[WARPS][LK_GROUP_MAX + 4]; /* a warp's own; read by fours */
    float2 part[LK_GROUP_MAX];
    uint32_t listed, few_own[2 * CUTS];
    uint32_t agreed; /* pages to keep for the mass target */
    /* barriers: all_bins are here; peers and few, again where words are equal; taken_by */
    alignas(8) uint64_t bins_here[CUTS][ROUNDS], sums_here[2 * CUTS], places_here;
    struct sums sums; /* after a mass target */
    struct span span;
};
/* Behind it: so many units' words, their groups' sums and marks. */
template <uint32_t UNITS> struct held {
    alignas(16) int32_t words[UNITS];
    uint64_t weight[UNITS / 32];
    uint32_t kept[UNITS / 32], taken[UNITS / 32];
};
static_assert(LK_GROUP_MAX <= 32 && FEW <= 32, "a query head, and a word, a lane");
static_assert(WARPS == 16, "two runs for each of eight lanes");
static_assert(LK_CUDA_WARP_PAGES == 4 * 32, "four words a lane");

/* ---- the span ---- */

/* Words and the like of a span that shared memory cannot hold. */
__device__ __forceinline__ struct view use_workspace(const struct span &p) {
    const uint32_t pages = lk_cuda_spill_pages(p.units), first = p.base / 32;
    const uint32_t groups = pages / 32;
    uint8_t *at = p.spilled;
    struct view v;

    v.words = (int32_t *)at + p.base;
    at += pages * 4ull;
    v.weight = (uint64_t *)at + first;
    at += groups * 8ull;
    v.hits = (struct hit *)at;
    at += p.sampled * 8ull;
    v.kept = (uint32_t *)at + first;
    v.taken = v.kept + groups;
    return v;
}

/* HELD: units that shared memory has room for; 0: the span spills. */
template <uint32_t HELD> __device__ __forceinline__ struct view view_of(struct shared *s) {
    if constexpr (HELD == 0) {
        return s->span.spill;
    } else {
        struct held<HELD> *const h = (struct held<HELD> *)(s + 1);
        return {h->words, h->kept, h->taken, h->weight, s->hits};
    }
}

/* By one warp: all that it needs is on its way at once, a word or a pointer a lane. */
template <bool PRUNE, uint32_t HELD>
__device__ __forceinline__ void make_span(const struct select_args &a, struct span *p) {
    constexpr uint32_t words = sizeof(struct lk_cuda_cut) / 4;
    const uint32_t lane = threadIdx.x % 32, head = blockIdx.y;
    const struct lk_cuda_row *r = &a.batch->row[blockIdx.z];
    const struct lk_cuda_cut *cut = &r->cut[PRUNE];
    static_assert(words + LK_CUDA_OFFSETS + 2 <= 32, "a lane each");
    const bool is_word = lane < words, is_place = lane - words < LK_CUDA_OFFSETS;
    const uint32_t i = is_place ? lane - words : 0;

    const uint32_t rows = __ldcg(&a.batch->rows), units = __ldcg(&cut->units);
    const uint32_t fetch_rows = __ldcg(&cut->fetch_rows), sampled = __ldcg(&cut->sampled);
    const uint32_t step = __ldcg(&cut->step), listed_most = __ldcg(&cut->listed_most);
    const uint32_t word = __ldcg((const uint32_t *)cut + (is_word ? lane : 0));
    const uint32_t each = __ldcg(&r->head_bytes[i]);
    const uint64_t offset = __ldcg((const uint64_t *)&r->scores + i);
    uint8_t *const workspace = (uint8_t *)__ldcg((const uint64_t *)&r->workspace);
    const uint64_t list = __ldcg((const uint64_t *)&r->list);
    const uint64_t table = __ldcg((const uint64_t *)&r->table);

    const uint32_t size = team_size();
    const uint32_t even = lk_cuda_divide(units + size - 1, size, a.team_inverse);
    const bool spills = even > HELD || sampled > LK_CUDA_SPAN_HITS;
    const uint32_t most = spills ? lk_cuda_spill_pages(even) : (even + 31) / 32 * 32;
    const uint32_t base = min(most * team_rank(), units), count = min(most, units - base);
    const uint32_t groups = (count + 31) / 32;
    uint32_t run_bits = groups > WARPS ? 32 - __clz((groups - 1) / WARPS) : 0;

    if (PRUNE)
        run_bits = max(run_bits, FOURS_BITS);
    if (is_word)
        ((uint32_t *)p)[lane] = word;
    if (is_place)
        p->place[i] = workspace + offset + (uint64_t)head * each;
    if (lane == words + LK_CUDA_OFFSETS) {
        p->list = list ? (struct lk_page_weight *)list + (uint64_t)head * listed_most : NULL;
        p->table = (const uint32_t *)table;
    }
    if (lane == 31) {
        p->head = head;
        p->group = a.pool.geometry.group;
        p->stride = group_stride(p->group);
        p->base = base;
        p->count = count;
        p->groups = groups;
        p->run_bits = run_bits;
        p->live = blockIdx.z < rows && step;
        p->spills = spills;
        p->fetch = rows <= fetch_rows;
    }
    __syncwarp();
    if (spills && lane == 0)
        p->spill = use_workspace(*p);
}

/* floor(2^32 share) + 1. Multiplying by a power of two is exact. */
__device__ __forceinline__ uint64_t weight_of(int32_t word) {
    return (uint64_t)(__uint_as_float((uint32_t)word & SHARE) * 4294967296.f) + 1;
}

/* Whatever is read of the table later lies in L2 by then. */
__device__ __forceinline__ void fetch_table(const struct span &p) {
    const uint32_t entries = p.count * p.step >> p.shift;
    const uint32_t *from = p.table + (p.base * p.step >> p.shift);

#pragma unroll 1
    for (uint32_t i = 32 * threadIdx.x; i < entries; i += 32 * THREADS)
        prefetch_line(from + i);
}

__device__ __forceinline__ void fetch_page(const struct select_args &a, const struct span &p,
                                           uint32_t physical) {
    if (p.fetch)
        prefetch_bytes(lk_page_keys_device(a.pool, p.layer, physical, p.head),
                       (uint32_t)a.pool.layout.head_bytes);
}

#endif
