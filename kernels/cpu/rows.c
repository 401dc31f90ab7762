/* SPDX-License-Identifier: MIT */
/*
 * rows.c - the stages of a row: what each task does, and where its intermediate state lies.
 *
 * Idea: a row's plan (how it is scanned, how work is split, where things lie in its workspace) is a
 * function of the row's own values, recomputed by every task in some fifty instructions, so nothing
 * is kept between stages but the workspace. Splits:
 *
 *   prepare, prune, select, merge   a KV head
 *   scan                            a KV head and SCAN_UNITS pages or superpages
 *   rescan                          a KV head and RESCAN_PAGES listed pages
 *   attend                          a tile of tokens and KV heads, and a span of pages. A sparse
 *                                   row's tile is one head; its kept and sampled pages lie in spans
 *                                   of their own, so that the mass of the kept is known by itself
 *
 * A tree whose superpages would all be expanded, and a nested scan whose pages would all be scored
 * again, is a full scan: the last scores are the same, the first pass is saved.
 *
 * Invariants: see kernels.h; a stage reads what earlier stages wrote, its own tasks share nothing.
 * Any thread. Does not order stages.
 */
#include <math.h>
#include <string.h>

#include "attend.h"
#include "select.h"

#define SCAN_UNITS    512 /* 400 KB of summaries at d 128: far above the cost of a task */
#define RESCAN_PAGES  256
#define SPARSE_TOKENS 512  /* of a span of kept or sampled pages */
#define DENSE_TOKENS  1024 /* of a span of an exact row */
#define SPANS_MAX     64   /* of one query: bounds the partial results of long rows */
#define TILE_SPANS    16   /* rows of several tokens: tiles * spans, where tiles alone are fewer */

struct plan {
    uint64_t pages, complete; /* P; those scored from summaries */
    bool sparse;
    enum lk_scan_mode scan;
    uint32_t keep, sample;      /* N - m; m */
    uint64_t units, candidates; /* scored in the first pass; scored again */
    uint64_t mixed;             /* tree: superpages, the newest page, candidates: one softmax */
    uint32_t tile_tokens, tile_heads, tile_queries;
    uint32_t tiles, head_tiles; /* along tokens, along heads */
    uint64_t span_pages;
    uint32_t kept_spans, spans; /* of all spans, the first so many hold kept pages */
    bool direct;                /* one span: attend writes the output itself */
    /* Workspace: offsets in bytes; of `head` ones from the head's own part. */
    uint64_t stride, mixed_stride; /* of scores, in floats */
    size_t query_bytes, head, head_bytes, partial, values, bytes;
    size_t at_scores, at_mixed, at_share, at_mixed_share, at_powers, at_scratch, at_sums, at_list,
        at_kept, at_sampled, at_weight;
};

struct head { /* what select leaves for attend and merge */
    uint32_t kept, sampled;
    float rest[LK_GROUP_MAX]; /* nothing sampled: ln of the estimated mass of what is not kept */
};

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}
static uint64_t most(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}
static uint64_t quotient_up(uint64_t a, uint64_t b) {
    return (a + b - 1) / b;
}
/* How many parts of `size` it takes; at least 1. */
static uint32_t parts(uint64_t whole, uint64_t size) {
    return (uint32_t)most(quotient_up(whole, size), 1);
}

static void plan_scan(const struct lk_row *row, struct plan *p) {
    uint64_t N = row->budget_pages, quads = p->complete / LK_QUAD_PAGES;
    uint64_t expanded = LK_TREE_BUDGETS * N / LK_QUAD_PAGES;

    p->sample = (uint32_t)least(row->sampled, N > 2 ? N - 2 : 0);
    p->keep = (uint32_t)N - p->sample;
    p->scan = (enum lk_scan_mode)row->scan;
    if ((p->scan == LK_TREE && quads <= expanded) ||
        (p->scan == LK_NESTED && p->complete <= LK_NESTED_BUDGETS * N))
        p->scan = LK_FULL;
    p->units = p->complete;
    if (p->scan == LK_NESTED)
        p->candidates = LK_NESTED_BUDGETS * N;
    if (p->scan == LK_TREE) {
        p->units = quads;
        p->candidates = expanded * LK_QUAD_PAGES + p->complete % LK_QUAD_PAGES;
        p->mixed = quads + 1 + p->candidates;
    }
}

static void plan_spans(const struct lk_row *row, struct plan *p) {
    const struct lk_geometry *g = &row->pool->geometry;

    if (p->sparse) {
        p->tile_tokens = p->tile_heads = 1;
        p->span_pages =
            most(SPARSE_TOKENS / g->page_tokens, parts(most(p->keep, p->sample), SPANS_MAX));
        p->kept_spans = (uint32_t)quotient_up(p->keep, p->span_pages);
        p->spans = p->kept_spans + (uint32_t)quotient_up(p->sample, p->span_pages);
    } else {
        uint64_t queries = LK_TILE_QUERIES / g->group;
        p->tile_tokens = (uint32_t)most(least(queries, row->tokens), 1);
        p->tile_heads = (uint32_t)most(least(queries / p->tile_tokens, g->kv_heads), 1);
        uint64_t spans = most(TILE_SPANS / parts(row->tokens, p->tile_tokens), 1);
        spans = row->tokens == 1 ? SPANS_MAX : spans;
        p->span_pages = most(DENSE_TOKENS / g->page_tokens, parts(p->pages, spans));
        p->kept_spans = p->spans = (uint32_t)quotient_up(p->pages, p->span_pages);
        p->direct = p->spans == 1;
    }
    p->tiles = parts(row->tokens, p->tile_tokens);
    p->head_tiles = parts(g->kv_heads, p->tile_heads);
    p->tile_queries = p->tile_tokens * p->tile_heads * g->group;
}

static size_t reserve(size_t *bytes, uint64_t count, size_t size) {
    size_t at = *bytes;

    *bytes += (count * size + 63) & ~(size_t)63;
    return at;
}

static void plan_workspace(const struct lk_row *row, struct plan *p) {
    const struct lk_geometry *g = &row->pool->geometry;
    size_t head = 0;

    if (p->sparse) {
        uint64_t blocks = p->pages / LK_SAMPLE_BLOCK + 1;
        p->stride = (p->pages + 15) & ~UINT64_C(15);
        p->mixed_stride = (p->mixed + 15) & ~UINT64_C(15);
        uint64_t powers = p->scan == LK_TREE ? p->mixed_stride : p->stride;
        reserve(&head, 1, sizeof(struct head));
        p->at_scores = reserve(&head, g->group * p->stride, 4);
        p->at_mixed = reserve(&head, g->group * p->mixed_stride, 4);
        p->at_share = reserve(&head, p->pages, sizeof(double));
        p->at_mixed_share = reserve(&head, p->mixed, sizeof(double));
        p->at_powers = reserve(&head, most(g->group, 2) * powers, 4);
        p->at_scratch = p->at_powers + 4 * powers;
        p->at_sums = reserve(&head, most(blocks * 8, p->keep * sizeof(struct lk_rank)), 1);
        p->at_list = reserve(&head, p->candidates, 4);
        p->at_kept = reserve(&head, p->keep, 4);
        p->at_sampled = reserve(&head, p->sample, 4);
        p->at_weight = reserve(&head, p->sample, 4);
        p->query_bytes = lk_cpu_query_bytes(g);
        p->head = p->query_bytes * g->kv_heads;
        p->head_bytes = head;
        p->bytes = p->head + head * g->kv_heads;
    }
    if (!p->direct) {
        uint64_t states = (uint64_t)p->tiles * p->head_tiles * p->spans * p->tile_queries;
        p->partial = reserve(&p->bytes, states, sizeof(struct lk_partial));
        p->values = reserve(&p->bytes, states, g->head_dim * sizeof(float));
    }
}

/* -> false: the row only appends, no stage here has work for it. */
static bool plan_make(const struct lk_row *row, struct plan *p) {
    memset(p, 0, sizeof *p);
    if (row->tokens == 0)
        return false;
    p->pages = lk_row_pages(row);
    p->complete = lk_row_complete(row);
    p->sparse = !row->exact && row->tokens == 1 && row->length > row->budget_tokens &&
                p->pages > row->budget_pages;
    if (p->sparse)
        plan_scan(row, p);
    plan_spans(row, p);
    plan_workspace(row, p);
    return true;
}

/* ---- where things lie ---- */

struct view { /* one KV head's part of the workspace */
    struct lk_query *query;
    struct head *head;
    float *scores, *mixed, *weight;
    double *share, *mixed_share; /* of pages; of what stands in mixed */
    float *powers;  /* [group] rows as of scores or mixed; the first also: shares as floats */
    float *scratch; /* the second of these rows, or one row more where the group is one */
    uint64_t *sums;
    uint32_t *list, *kept, *sampled;
};

static void *place(const struct lk_row *row, size_t at) {
    return row->workspace + at;
}

static struct view view_of(const struct lk_row *row, const struct plan *p, uint32_t head) {
    size_t at = p->head + head * p->head_bytes;

    return (struct view){
        .query = place(row, head * p->query_bytes),
        .head = place(row, at),
        .scores = place(row, at + p->at_scores),
        .mixed = place(row, at + p->at_mixed),
        .share = place(row, at + p->at_share),
        .mixed_share = place(row, at + p->at_mixed_share),
        .powers = place(row, at + p->at_powers),
        .scratch = place(row, at + p->at_scratch),
        .weight = place(row, at + p->at_weight),
        .sums = place(row, at + p->at_sums),
        .list = place(row, at + p->at_list),
        .kept = place(row, at + p->at_kept),
        .sampled = place(row, at + p->at_sampled),
    };
}

/* A query's place in its tile, and its state after the tile's first span; the next is tile_queries
 * on. */
static uint64_t state_of(const struct lk_row *row, const struct plan *p, uint32_t head,
                         uint32_t token, uint32_t g) {
    uint32_t group = row->pool->geometry.group, first = token - token % p->tile_tokens;
    uint64_t tile = (uint64_t)token / p->tile_tokens * p->head_tiles + head / p->tile_heads;
    uint64_t tokens = least(p->tile_tokens, row->tokens - first);

    return tile * p->spans * p->tile_queries +
           (head % p->tile_heads * tokens + token - first) * group + g;
}
static struct lk_partial *partial_of(const struct lk_row *row, const struct plan *p) {
    return place(row, p->partial);
}
static float *values_of(const struct lk_row *row, const struct plan *p) {
    return place(row, p->values);
}

/* ---- prepare, scan ---- */

static uint32_t sparse_heads(const struct lk_row *row) {
    struct plan p;

    return plan_make(row, &p) && p.sparse ? row->pool->geometry.kv_heads : 0;
}

uint32_t lk_cpu_prepare_tasks(const struct lk_row *row) {
    return sparse_heads(row);
}

void lk_cpu_prepare_task(struct lk_row *row, uint32_t task) {
    struct plan p;

    plan_make(row, &p);
    lk_cpu_prepare(row, task, view_of(row, &p, task).query);
}

uint32_t lk_cpu_scan_tasks(const struct lk_row *row) {
    struct plan p;

    if (!plan_make(row, &p) || !p.sparse)
        return 0;
    return row->pool->geometry.kv_heads * parts(p.units, SCAN_UNITS);
}

void lk_cpu_scan_task(struct lk_row *row, uint32_t task) {
    struct plan p;

    plan_make(row, &p);
    uint32_t chunks = parts(p.units, SCAN_UNITS), head = task / chunks;
    uint64_t first = (uint64_t)(task % chunks) * SCAN_UNITS;
    uint64_t count = least(SCAN_UNITS, p.units - first);
    struct view v = view_of(row, &p, head);
    if (p.scan == LK_TREE)
        lk_cpu_score_super(row, head, v.query, first, count, v.mixed, p.mixed_stride);
    else
        lk_cpu_score(row, head, v.query,
                     p.scan == LK_FULL ? row->pool->geometry.rank : LK_COARSE_RANK, first, count,
                     v.scores, p.stride);
    if (first == 0 && p.scan == LK_TREE)
        lk_attend_score(row, head, p.complete, v.mixed + p.units, p.mixed_stride);
    else if (first == 0)
        lk_attend_score(row, head, p.complete, v.scores + p.complete, p.stride);
}

/* ---- prune, rescan ---- */

uint32_t lk_cpu_prune_tasks(const struct lk_row *row) {
    struct plan p;

    return plan_make(row, &p) && p.candidates ? row->pool->geometry.kv_heads : 0;
}

/* The first `quads` of list are superpages: make them pages, and add those after the last
 * superpage. */
static void expand(uint32_t *list, uint64_t quads, uint64_t tail, uint64_t tail_count) {
    for (uint64_t i = quads; i-- > 0;) { /* backwards: a quad's four overwrite only later quads */
        uint32_t first = list[i] * LK_QUAD_PAGES;
        for (uint32_t x = 0; x < LK_QUAD_PAGES; x++)
            list[i * LK_QUAD_PAGES + x] = first + x;
    }
    for (uint64_t i = 0; i < tail_count; i++)
        list[quads * LK_QUAD_PAGES + i] = (uint32_t)(tail + i);
}

void lk_cpu_prune_task(struct lk_row *row, uint32_t task) {
    uint32_t group = row->pool->geometry.group;
    struct plan p;

    plan_make(row, &p);
    struct view v = view_of(row, &p, task);
    if (p.scan == LK_NESTED) {
        lk_share(v.scores, p.stride, group, p.pages, LK_SHARE_FLOOR, v.share, v.powers);
        lk_select_best(&(struct lk_field){v.share, v.powers, NULL, 0, p.complete, v.scratch},
                       p.candidates, v.list);
        return;
    }
    uint64_t quads = p.candidates / LK_QUAD_PAGES, tail = p.units * LK_QUAD_PAGES;
    lk_share(v.mixed, p.mixed_stride, group, p.units + 1, LK_QUAD_PAGES * LK_SHARE_FLOOR,
             v.mixed_share, v.powers);
    lk_select_best(&(struct lk_field){v.mixed_share, v.powers, NULL, 0, p.units, v.scratch}, quads,
                   v.list);
    expand(v.list, quads, tail, p.complete - tail);
}

uint32_t lk_cpu_rescan_tasks(const struct lk_row *row) {
    struct plan p;

    if (!plan_make(row, &p) || !p.candidates)
        return 0;
    return row->pool->geometry.kv_heads * parts(p.candidates, RESCAN_PAGES);
}

void lk_cpu_rescan_task(struct lk_row *row, uint32_t task) {
    struct plan p;

    plan_make(row, &p);
    uint32_t chunks = parts(p.candidates, RESCAN_PAGES), head = task / chunks;
    uint64_t first = (uint64_t)(task % chunks) * RESCAN_PAGES;
    struct view v = view_of(row, &p, head);
    lk_cpu_score_list(row, head, v.query, row->pool->geometry.rank, v.list + first,
                      least(RESCAN_PAGES, p.candidates - first), v.scores, p.stride);
}

/* ---- select ---- */

uint32_t lk_cpu_select_tasks(const struct lk_row *row) {
    return sparse_heads(row);
}

/* Tree: put what each page was last scored by into one softmax, and spread it over the pages. */
static void share_tree(const struct lk_row *row, const struct plan *p, const struct view *v) {
    uint32_t group = row->pool->geometry.group;
    uint64_t quads = p->candidates / LK_QUAD_PAGES, fresh = p->units + 1;

    for (uint32_t g = 0; g < group; g++) {
        float *mixed = v->mixed + g * p->mixed_stride;
        for (uint64_t i = 0; i < quads; i++)
            mixed[v->list[i * LK_QUAD_PAGES] / LK_QUAD_PAGES] = -INFINITY;
        for (uint64_t i = 0; i < p->candidates; i++)
            mixed[fresh + i] = v->scores[g * p->stride + v->list[i]];
    }
    lk_share(v->mixed, p->mixed_stride, group, p->mixed, LK_SHARE_FLOOR, v->mixed_share, v->powers);
    lk_vector_get()->spread(v->share, v->mixed_share, p->units, LK_SHARE_FLOOR);
    v->share[p->complete] = v->mixed_share[p->units];
    for (uint64_t i = 0; i < p->candidates; i++)
        v->share[v->list[i]] = v->mixed_share[fresh + i];
}

/* Pages sink..pages-tail-1 compete, of them those scored last. */
static struct lk_field field_of(const struct plan *p, const struct view *v,
                                struct lk_forced forced) {
    uint64_t from = forced.sink, to = p->pages - forced.tail, a = 0, b = p->candidates;

    if (!p->candidates)
        return (struct lk_field){v->share, v->powers + from, NULL, from, to - from, v->scratch};
    while (a < b && v->list[a] < from)
        a++;
    while (b > a && v->list[b - 1] >= to)
        b--;
    for (uint64_t i = a; i < b; i++)
        v->powers[i] = (float)v->share[v->list[i]];
    return (struct lk_field){v->share, v->powers + a, v->list + a, 0, b - a, v->scratch};
}

static double share_sum(const struct view *v, uint64_t from, uint64_t to) {
    double sum = 0;
    for (uint64_t j = from; j < to; j++)
        sum += v->share[j];
    return sum;
}

/* -> pages kept, ascending in v->kept. A mass target is a part of what the shares sum to, which
 * rounding leaves beside 1. */
static uint32_t keep(const struct lk_row *row, const struct plan *p, const struct view *v) {
    struct lk_forced forced = lk_select_forced(p->keep, row->sink_pages, row->recent_pages);
    struct lk_field field = field_of(p, v, forced);
    uint64_t always = forced.sink + forced.tail, tail = p->pages - forced.tail;
    uint32_t *best = v->kept + forced.sink;
    uint64_t count = lk_select_best(&field, p->keep - always, best);

    if (row->mass_target > 0) {
        double sum = share_sum(v, 0, forced.sink) + share_sum(v, tail, p->pages);
        double target = (double)row->mass_target * share_sum(v, 0, p->pages);
        count = lk_select_mass(&field, best, count, sum, target,
                               always < LK_MASS_PAGES_MIN ? LK_MASS_PAGES_MIN - always : 0,
                               (struct lk_rank *)(void *)v->sums);
    }
    for (uint64_t i = 0; i < count; i++)
        best[i] = field.page ? field.page[best[i]] : (uint32_t)(field.first + best[i]);
    for (uint64_t j = 0; j < forced.sink; j++)
        v->kept[j] = (uint32_t)j;
    for (uint64_t i = 0; i < forced.tail; i++)
        best[count + i] = (uint32_t)(tail + i);
    return (uint32_t)(always + count);
}

/* Take the kept pages out of one head's scores of pages. */
static void take_pages(const struct view *v, float *scores) {
    for (uint32_t i = 0; i < v->head->kept; i++)
        scores[v->kept[i]] = -INFINITY;
}

/* Of scores in share_tree's order: a page that was not scored by itself takes its quarter. */
static void take_mixed(const struct plan *p, const struct view *v, float *scores) {
    uint64_t c = 0, in_quad = 0;

    for (uint32_t i = 0; i < v->head->kept; i++) {
        uint32_t page = v->kept[i];
        while (c < p->candidates && v->list[c] < page)
            c++;
        in_quad = i && v->kept[i - 1] / LK_QUAD_PAGES == page / LK_QUAD_PAGES ? in_quad + 1 : 0;
        if (page == p->complete)
            scores[p->units] = -INFINITY;
        else if (c < p->candidates && v->list[c] == page)
            scores[p->units + 1 + c] = -INFINITY;
        else
            scores[page / LK_QUAD_PAGES] +=
                logf((float)(LK_QUAD_PAGES - 1 - in_quad) / (float)(LK_QUAD_PAGES - in_quad));
    }
}

/* Relative to the best of what is not kept: a kept page may be estimated so much too high that the
 * others vanish beside it, and have all of the mass once it is attended. Scores are lost. */
static void rest(const struct lk_row *row, const struct plan *p, const struct view *v) {
    const struct lk_vector *vector = lk_vector_get();
    bool tree = p->scan == LK_TREE;
    uint64_t count = tree ? p->mixed : p->pages;

    for (uint32_t g = 0; g < row->pool->geometry.group; g++) {
        float *scores = tree ? v->mixed + g * p->mixed_stride : v->scores + g * p->stride;
        if (tree)
            take_mixed(p, v, scores);
        else
            take_pages(v, scores);
        float top = vector->largest(scores, count);
        v->head->rest[g] = top + (float)log(vector->exp_sum(scores, scores, count, top));
    }
}

void lk_cpu_select_task(struct lk_row *row, uint32_t task) {
    struct plan p;

    plan_make(row, &p);
    struct view v = view_of(row, &p, task);
    if (p.scan == LK_TREE)
        share_tree(row, &p, &v);
    else
        lk_share(v.scores, p.stride, row->pool->geometry.group, p.pages, LK_SHARE_FLOOR, v.share,
                 v.powers);
    v.head->kept = keep(row, &p, &v);
    v.head->sampled = 0;
    if (p.sample)
        v.head->sampled = (uint32_t)lk_sample(v.share, p.pages, v.kept, v.head->kept, p.sample,
                                              v.sums, v.sampled, v.weight);
    else
        rest(row, &p, &v);
}

/* ---- attend ---- */

uint32_t lk_cpu_attend_tasks(const struct lk_row *row) {
    struct plan p;

    return plan_make(row, &p) ? p.tiles * p.spans * p.head_tiles : 0;
}

static struct lk_span span_of(const struct lk_row *row, const struct plan *p, uint32_t head,
                              uint32_t span) {
    uint64_t first = span * p->span_pages;

    if (!p->sparse)
        return (struct lk_span){.first = first, .count = least(p->span_pages, p->pages - first)};
    struct view v = view_of(row, p, head);
    bool kept = span < p->kept_spans;
    uint64_t count = kept ? v.head->kept : v.head->sampled;
    first -= kept ? 0 : p->kept_spans * p->span_pages;
    return (struct lk_span){.list = kept ? v.kept : v.sampled,
                            .weight = kept ? NULL : v.weight,
                            .first = first,
                            .count = first < count ? least(p->span_pages, count - first) : 0};
}

/* Write a query's output from its states. */
static void finish(const struct lk_row *row, const struct plan *p, uint32_t head, uint32_t token,
                   uint32_t g, const struct lk_partial *partial, const float *values) {
    const struct lk_geometry *geometry = &row->pool->geometry;
    size_t at = ((size_t)token * geometry->kv_heads + head) * geometry->group + g;
    float lse = lk_attend_merge(partial, values, p->spans, p->tile_queries, geometry->head_dim,
                                row->out + at * geometry->head_dim);

    if (row->lse)
        row->lse[at] = lse;
}

static void attend_direct(const struct lk_row *row, const struct plan *p,
                          const struct lk_tile *tile, const struct lk_span *span) {
    struct lk_partial partial[LK_TILE_QUERIES];
    float values[LK_TILE_QUERIES * LK_HEAD_DIM_MAX];
    uint32_t group = row->pool->geometry.group, head_dim = row->pool->geometry.head_dim;
    uint32_t queries = tile->tokens * group;

    lk_attend(row, tile, span, partial, values);
    for (uint32_t i = 0; i < tile->heads * queries; i++)
        finish(row, p, tile->head + i / queries, tile->token + i % queries / group, i % group,
               partial + i, values + (size_t)i * head_dim);
}

void lk_cpu_attend_task(struct lk_row *row, uint32_t task) {
    const struct lk_geometry *g = &row->pool->geometry;
    struct plan p;

    if (!plan_make(row, &p) || p.spans == 0)
        return;
    /* Tasks side by side in time read side by side in memory. */
    uint32_t span = task / p.head_tiles % p.spans;
    struct lk_tile tile = {.head = task % p.head_tiles * p.tile_heads,
                           .token = task / p.head_tiles / p.spans * p.tile_tokens};
    tile.heads = (uint32_t)least(p.tile_heads, g->kv_heads - tile.head);
    tile.tokens = (uint32_t)least(p.tile_tokens, row->tokens - tile.token);
    struct lk_span of = span_of(row, &p, tile.head, span);
    if (p.direct) {
        attend_direct(row, &p, &tile, &of);
        return;
    }
    uint64_t state = state_of(row, &p, tile.head, tile.token, 0) + (uint64_t)span * p.tile_queries;
    lk_attend(row, &tile, &of, partial_of(row, &p) + state,
              values_of(row, &p) + state * g->head_dim);
}

/* ---- merge ---- */

uint32_t lk_cpu_merge_tasks(const struct lk_row *row) {
    return row->tokens ? row->pool->geometry.kv_heads : 0;
}

/* A row that is spoiled by what is no number reports no mass. */
static float captured(const struct lk_row *row, const struct plan *p, uint32_t head) {
    struct view v = view_of(row, p, head);
    uint32_t group = row->pool->geometry.group;
    float sum = 0;

    for (uint32_t g = 0; g < group; g++) {
        const struct lk_partial *partial = partial_of(row, p) + state_of(row, p, head, 0, g);
        float kept = lk_attend_lse(partial, p->kept_spans, p->tile_queries);
        if (p->sample)
            sum += expf(kept - lk_attend_lse(partial, p->spans, p->tile_queries));
        else
            sum += 1 / (1 + expf(v.head->rest[g] - kept));
    }
    return sum >= 0 ? sum / (float)group : 0;
}

static void list_exact(const struct lk_row *row, const struct plan *p, uint32_t head) {
    struct lk_page_weight *to = row->list + (size_t)head * row->list_pages;

    for (uint64_t j = 0; j < least(p->pages, row->list_pages); j++)
        to[j] = (struct lk_page_weight){(uint32_t)j, 1};
}

static void list_sparse(const struct lk_row *row, const struct plan *p, uint32_t head) {
    struct lk_page_weight *to = row->list + (size_t)head * row->list_pages;
    struct view v = view_of(row, p, head);
    uint32_t k = 0, s = 0, room = row->list_pages;

    for (; room && k + s < v.head->kept + v.head->sampled; room--)
        if (s == v.head->sampled || (k < v.head->kept && v.kept[k] < v.sampled[s]))
            *to++ = (struct lk_page_weight){v.kept[k++], 1};
        else {
            *to++ = (struct lk_page_weight){v.sampled[s], v.weight[s]};
            s++;
        }
}

static void report(const struct lk_row *row, const struct plan *p, uint32_t head) {
    struct lk_head_out out = {.kept = (uint32_t)p->pages, .mass = 1, .flags = LK_OUT_EXACT};

    if (p->sparse) {
        struct view v = view_of(row, p, head);
        out.kept = v.head->kept;
        out.sampled = v.head->sampled;
        out.mass = captured(row, p, head);
        out.flags = p->sample ? 0 : LK_OUT_ESTIMATED;
    }
    if (row->result)
        row->result[head] = out;
    if (row->list && p->sparse)
        list_sparse(row, p, head);
    else if (row->list)
        list_exact(row, p, head);
}

static void count_bytes(struct lk_row *row, const struct plan *p) {
    struct lk_row_reads reads = {0};

    if (p->sparse) {
        reads =
            (struct lk_row_reads){.scan = p->scan, .units = p->units, .candidates = p->candidates};
        for (uint32_t h = 0; h < row->pool->geometry.kv_heads; h++) {
            struct view v = view_of(row, p, h);
            reads.attended += (uint64_t)v.head->kept + v.head->sampled;
        }
    }
    lk_row_count_bytes(row, &reads);
}

void lk_cpu_merge_task(struct lk_row *row, uint32_t task) {
    uint32_t group = row->pool->geometry.group;
    struct plan p;

    plan_make(row, &p);
    for (uint32_t token = 0; !p.direct && token < row->tokens; token++)
        for (uint32_t g = 0; g < group; g++) {
            uint64_t state = state_of(row, &p, task, token, g);
            finish(row, &p, task, token, g, partial_of(row, &p) + state,
                   values_of(row, &p) + state * row->pool->geometry.head_dim);
        }
    report(row, &p, task);
    if (task == 0)
        count_bytes(row, &p);
}

size_t lk_cpu_row_workspace_bytes(const struct lk_row *row) {
    struct plan p;

    return plan_make(row, &p) ? p.bytes : 0;
}
