/* SPDX-License-Identifier: MIT */
/*
 * cuda.h - the CUDA backend's kernels: launchers that a C program calls, in order, on one stream.
 *
 * Idea: a captured graph bakes in a pool (geometry and base addresses), the address of one
 * descriptor block and a rows bucket; everything a step decides (rows, lengths, tables, queries,
 * budgets) is read from that block in device memory when the graph is replayed. The host fills the
 * block with lk_cuda_fill(), a pure function, and copies it to the device. Grids are fixed; a
 * kernel finds its tasks in the block. How a row is cut into tasks depends on that row and the
 * geometry alone, and every sum has a fixed order, so a row's bits do not depend on batch, bucket
 * or run.
 *
 * A step is: scan (append, exact score of the newest page, summaries of all others) -> for nested
 * and tree: prune, rescan -> select (shares, kept pages, sample) -> attend (split, merged by the
 * last block of a head or, of many queries, by several). Kernels are chained by programmatic
 * dependent launch. Summaries of pages that a step closed are built after it, by
 * lk_cuda_build_pages().
 *
 * Invariants
 *   - Launchers never allocate, wait or log. They return 0 or a cudaError_t as an int:
 *     cudaErrorInvalidConfiguration where the device has less shared memory than they need.
 *   - All pointers are to device memory (or host memory the device can read), aligned to 16 bytes.
 *   - Tokens beyond a row's length never reach a result, whatever their bytes hold.
 *   - `sync` words are 0 before the first launch; every launch leaves a job's first so.
 *   - A batch's rows share one pool. Rows of more than one token, and rows marked exact, are
 *     attended over all their pages; other rows append at most one token.
 *   - Logits beyond +-8 million (base 2) are clamped in estimates: no model's are.
 *
 * Any thread, one at a time per stream. Does not own memory, graphs or completion.
 */
#ifndef LK_CUDA_H
#define LK_CUDA_H

#include "../kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LK_CUDA_ROWS_MAX         256
#define LK_CUDA_BUDGET_PAGES_MAX 4096      /* kept pages are held in shared memory */
#define LK_CUDA_PAGES_MAX        (1 << 24) /* of a row: sample weights fit 64 bits */
#define LK_CUDA_APPEND           2         /* tokens that a warp appends, one by one */
#define LK_CUDA_SYNC             2         /* words of a job */

/* Lists of tasks; `first` of the block below has one for each. */
enum lk_cuda_stage {
    LK_CUDA_HEADS,  /* append, newest page: row x KV head x LK_CUDA_APPEND tokens */
    LK_CUDA_RANK,   /* first pass at the geometry's rank */
    LK_CUDA_COARSE, /* first pass at rank 2: pages or superpages */
    LK_CUDA_RESCAN, /* second pass: listed pages */
    LK_CUDA_REST,   /* and sums over the others */
    LK_CUDA_ATTEND,
    LK_CUDA_STAGES
};

/* What select, and prune, want of a row, worked out here: their blocks begin when others wait. */
struct lk_cuda_cut {
    uint32_t units, step;  /* pages, or superpages; pages of one. step 0: nothing to do */
    uint32_t k, sampled;   /* to keep; to sample */
    uint32_t sink, tail;   /* kept whatever their share */
    uint32_t likely;       /* bits of a float that no k-th largest share is above */
    uint32_t parts;        /* {max, sum} that the last pass left */
    uint32_t skip;         /* from the newest page's to those */
    uint32_t after;        /* pages after the last superpage */
    uint32_t layer, shift; /* of the table */
    uint32_t listed_most;  /* pages that the client's list holds */
    uint32_t fetch_rows;   /* fetch pages to L2 if there are no more rows */
    float mass_target;
    uint32_t reserved;
};

#define LK_CUDA_OFFSETS 8 /* offsets of a row, one after the other from `scores` */

/* A row's values and plan. Offsets are bytes into `workspace`. */
struct lk_cuda_row {
    const void *q, *k, *v;
    float *out, *lse;
    struct lk_page_weight *list;
    struct lk_head_out *result;
    const uint32_t *table;
    uint8_t *workspace;
    uint64_t length;
    uint32_t layer, tokens, append, table_shift, list_pages;
    uint32_t budget_pages, sampled, sink_pages, recent_pages;
    uint32_t scan; /* enum lk_scan_mode; 0: exact, nothing is scored */
    float mass_target, sm_scale;
    /* plan */
    uint32_t pages, complete;
    uint32_t units, chunk_units, chunks;            /* first pass: pages or superpages */
    uint32_t prune_units, list_max;                 /* kept by prune; pages rescanned at most */
    uint32_t rescan_tiles, rest_chunks, rest_pages; /* second pass */
    uint32_t chunks_inverse, tiles_inverse, rest_inverse; /* to divide tasks: lk_cuda_inverse() */
    uint32_t segment_pages, segments;                     /* shares: their product a head */
    uint32_t bands, query_groups;        /* attend: of 8 queries that share keys; groups of those */
    uint32_t tiles, slice_tiles, slices; /* attend: 16 tokens a tile */
    uint32_t group_first;                /* of attend's jobs: LK_CUDA_SYNC words each */
    uint64_t scores, shares, parts, spill, counts, rescan, picks, partials;
    /* for select alone; no other kernel reads on */
    uint32_t head_bytes[LK_CUDA_OFFSETS]; /* at those offsets, from head to head */
    struct lk_cuda_cut cut[2];            /* select's, prune's */
};

struct lk_cuda_batch {
    uint32_t rows;
    uint32_t tasks[LK_CUDA_STAGES];
    uint32_t first[LK_CUDA_STAGES][LK_CUDA_ROWS_MAX]; /* first task of each row, ascending */
    struct lk_cuda_row row[LK_CUDA_ROWS_MAX];
};

/* Strides and sizes of this backend's records: bytes as DESIGN counts, strides padded to 16. */
void lk_cuda_layout(const struct lk_geometry *geometry, struct lk_layout *ret);
/* Bytes of shared memory that a block of the kernels for a geometry needs at least. What the device
 * lends beyond (cudaDevAttrMaxSharedMemoryPerBlockOptin) makes steps faster; it changes the bits of
 * rows of many queries alone. */
uint32_t lk_cuda_shared_least(const struct lk_geometry *geometry);
/* Bytes of workspace of a row; a function of the row alone. */
uint64_t lk_cuda_row_workspace_bytes(const struct lk_row *row);
/* Sync words a batch of rows needs at most, each up to `tokens` queries. */
uint32_t lk_cuda_sync_words(const struct lk_geometry *geometry, uint32_t rows, uint32_t tokens);
/* Fill the block from rows whose pointers are the device's. Host memory, no device call. -EINVAL: a
 * budget, length or row count above the limits, or a sparse row that has, or appends, several
 * tokens. */
int lk_cuda_fill(const struct lk_row *rows, uint32_t count, struct lk_cuda_batch *ret);

/* When the parts of a step began, in ns of the device's clock; 0: it did not run. Host memory that
 * the device writes, the host sets to 0 before. */
enum lk_cuda_moment {
    LK_CUDA_AT_FEED,
    LK_CUDA_AT_SCAN,
    LK_CUDA_AT_PRUNE,
    LK_CUDA_AT_RESCAN,
    LK_CUDA_AT_SELECT,
    LK_CUDA_AT_ATTEND,
    LK_CUDA_AT_FENCE, /* results are there */
    LK_CUDA_AT_DONE,  /* pages it closed are summarised */
    LK_CUDA_MOMENTS
};
struct lk_cuda_clock {
    uint64_t at[LK_CUDA_MOMENTS];
};

/* What a captured step bakes in. */
struct lk_cuda_step {
    struct lk_pool_view pool;          /* device pointers */
    const struct lk_cuda_batch *batch; /* device memory */
    uint32_t *sync;                    /* lk_cuda_sync_words() words */
    uint32_t bucket;                   /* rows the graph can hold */
    uint32_t scans;              /* bit 1 << enum lk_scan_mode: modes it serves; 0: exact only */
    uint32_t processors;         /* multiprocessors of the device */
    struct lk_cuda_clock *clock; /* NULL: nobody asks */
};

/* The whole step on a stream (a cudaStream_t), or its stages one by one. */
int lk_cuda_run(const struct lk_cuda_step *step, void *stream);
int lk_cuda_scan(const struct lk_cuda_step *step, void *stream);
int lk_cuda_prune(const struct lk_cuda_step *step, void *stream);
int lk_cuda_rescan(const struct lk_cuda_step *step, void *stream);
int lk_cuda_select(const struct lk_cuda_step *step, void *stream);
int lk_cuda_attend(const struct lk_cuda_step *step, void *stream);

/* k, v by slot. `write` is the host's; its pointers are the device's. */
int lk_cuda_write(const struct lk_write *write, void *stream);

/* As lk_copy, of one pool: no page is both read and written by a list. The list is in memory the
 * device can read. */
struct lk_cuda_copy_item {
    uint64_t from, to;
    uint32_t layer, quad;
};
int lk_cuda_copy(const struct lk_pool_view *pool, const struct lk_cuda_copy_item *items,
                 uint32_t count, void *stream);

/* Summarise the pages (or, superpages: quads) of a list, for all KV heads. The list is in memory
 * that the device can read. */
struct lk_cuda_build {
    struct lk_pool_view pool;
    const uint64_t *list; /* packed: layer << 48 | page or quad */
    uint32_t count;
};
int lk_cuda_build_pages(const struct lk_cuda_build *build, void *stream);
int lk_cuda_build_supers(const struct lk_cuda_build *build, void *stream);

#ifdef __cplusplus
}
#endif
#endif
