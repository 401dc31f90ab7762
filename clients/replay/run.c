/* SPDX-License-Identifier: MIT */
/*
 * run.c - the replay itself: appends, then decodes, keeping all that comes back.
 */
#include "replay.h"

#include <float.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

#include "../common/measure.h"
#include "../common/progress.h"

struct player {
    const struct replay_options *options;
    const struct replay_trace *trace;
    struct replay_bed *bed;
    struct locks_step step;
    struct locks_row row; /* its pointers are the arena's */
    char *why;
};

static int failed(struct player *p) {
    snprintf(p->why, REPLAY_WHY_BYTES, "%s", locks_error(p->bed->locks));
    return EX_SOFTWARE;
}

/* ---- memory ---- */

/* Pages of the longest list: rows that fit the budget, or --dense, list all of theirs. */
static uint32_t list_room(const struct replay_options *o, const struct replay_trace *t) {
    uint64_t pages = (t->tokens + o->page_tokens - 1) / o->page_tokens;
    uint64_t budget = ((uint64_t)o->budget + o->page_tokens - 1) / o->page_tokens;
    return (uint32_t)(o->dense || budget > pages ? pages : budget);
}

static int make_result(const struct replay_trace *t, uint32_t room, struct replay_result *ret) {
    uint64_t heads = t->steps * t->kv_heads;
    ret->out = calloc(t->steps * t->q_heads * t->head_dim, sizeof(*ret->out));
    ret->heads = calloc(heads, sizeof(*ret->heads));
    ret->list = calloc(heads, room * sizeof(*ret->list)); /* heads * room may be too large */
    ret->timing = calloc(t->steps, sizeof(*ret->timing));
    ret->seconds = calloc(t->steps, sizeof(*ret->seconds));
    return ret->out && ret->heads && ret->list && ret->timing && ret->seconds ? 0 : EX_OSERR;
}

static int make_run(const struct player *p, struct replay_run *ret) {
    ret->room = list_room(p->options, p->trace);
    ret->layer_count = p->trace->layer_count;
    ret->layers = calloc(ret->layer_count, sizeof(*ret->layers));
    int rc = ret->layers ? 0 : EX_OSERR;
    for (uint32_t i = 0; i < ret->layer_count && !rc; i++)
        rc = make_result(p->trace, ret->room, &ret->layers[i]);
    if (rc)
        snprintf(p->why, REPLAY_WHY_BYTES, "no memory for the results of %" PRIu64 " step%s",
                 p->trace->steps, lk_plural(p->trace->steps));
    return rc;
}

void replay_run_free(struct replay_run *run) {
    for (uint32_t i = 0; run->layers && i < run->layer_count; i++) {
        free(run->layers[i].out);
        free(run->layers[i].heads);
        free(run->layers[i].list);
        free(run->layers[i].timing);
        free(run->layers[i].seconds);
    }
    free(run->layers);
    *run = (struct replay_run){0};
}

/* A target so small that it would round to 0, which is none, stays one. */
static float mass_target(double mass) {
    return mass > 0 && mass < (double)FLT_MIN ? FLT_MIN : (float)mass;
}

static void make_step(struct player *p) {
    const struct replay_options *o = p->options;
    p->step = (struct locks_step){.pool = p->bed->pool.index,
                                  .budget = o->budget,
                                  .sampled = o->sampled < 0    ? 0
                                             : o->sampled == 0 ? LOCKS_SAMPLED_NONE
                                                               : (int32_t)o->sampled,
                                  .scan = o->scan,
                                  .mass_target = mass_target(o->mass),
                                  .dense_below = o->dense ? UINT32_MAX : 0};
}

static int make_row(struct player *p, uint32_t room) {
    const struct replay_trace *t = p->trace;
    struct locks *l = p->bed->locks;
    uint64_t chunk = t->tokens < REPLAY_CHUNK_TOKENS ? t->tokens : REPLAY_CHUNK_TOKENS;
    p->row.q = locks_alloc(l, t->q_bytes);
    p->row.k = locks_alloc(l, chunk * t->kv_bytes);
    p->row.v = locks_alloc(l, chunk * t->kv_bytes);
    p->row.out = locks_alloc(l, sizeof(float) * t->q_heads * t->head_dim);
    p->row.list = locks_alloc(l, sizeof(struct lk_page_entry) * t->kv_heads * room);
    p->row.list_pages = room;
    p->step.results = locks_alloc(l, sizeof(struct lk_head_result) * t->kv_heads);
    p->step.timing = locks_alloc(l, sizeof(struct lk_step_result));
    return p->row.q && p->row.k && p->row.v && p->row.out && p->row.list && p->step.results &&
                   p->step.timing
               ? 0
               : failed(p);
}

/* ---- appends ---- */

static int append_layer(struct player *p, uint32_t layer, struct lk_progress *progress) {
    const struct replay_trace *t = p->trace;
    struct locks_row row = p->row;
    uint64_t prompt = t->tokens - t->steps;
    row.q = NULL;
    row.out = NULL;
    row.list = NULL;
    row.list_pages = 0;
    row.layer = layer;
    for (row.position = 0; row.position < prompt; row.position += row.tokens) {
        uint64_t left = prompt - row.position;
        row.tokens = (uint32_t)(left < REPLAY_CHUNK_TOKENS ? left : REPLAY_CHUNK_TOKENS);
        memcpy((void *)row.k, t->layers[layer].k + row.position * t->kv_bytes,
               row.tokens * t->kv_bytes);
        memcpy((void *)row.v, t->layers[layer].v + row.position * t->kv_bytes,
               row.tokens * t->kv_bytes);
        struct locks_step step = {.pool = p->step.pool};
        if (locks_append(p->bed->locks, &step, &row, 1))
            return failed(p);
        lk_progress_at(progress, layer * prompt + row.position + row.tokens);
    }
    return 0;
}

static int append_all(struct player *p, double *ret_seconds) {
    struct lk_progress progress;
    uint64_t begun = lk_clock_ns();
    int rc = 0;
    lk_progress_begin(&progress, "appending the prompt",
                      p->trace->layer_count * (p->trace->tokens - p->trace->steps));
    for (uint32_t layer = 0; layer < p->trace->layer_count && !rc; layer++)
        rc = append_layer(p, layer, &progress);
    lk_progress_end(&progress, !rc);
    *ret_seconds = (double)(lk_clock_ns() - begun) * 1e-9;
    return rc;
}

/* ---- decodes ---- */

static void keep(const struct player *p, uint64_t i, uint64_t took_ns, struct replay_run *run,
                 struct replay_result *result) {
    const struct replay_trace *t = p->trace;
    uint64_t outs = (uint64_t)t->q_heads * t->head_dim, lists = (uint64_t)t->kv_heads * run->room;
    memcpy(result->out + i * outs, p->row.out, outs * sizeof(*result->out));
    memcpy(result->heads + i * t->kv_heads, p->step.results, t->kv_heads * sizeof(*result->heads));
    memcpy(result->list + i * lists, p->row.list, lists * sizeof(*result->list));
    result->timing[i] = *p->step.timing;
    result->seconds[i] = (double)took_ns * 1e-9;
    for (uint32_t g = 0; g < t->kv_heads; g++)
        run->sampled |= result->heads[i * t->kv_heads + g].sampled > 0;
}

/* A list that claims more than it may would lead everything after it astray. */
static int check(const struct player *p, const struct replay_run *run, uint32_t layer, uint64_t i) {
    const struct replay_trace *t = p->trace;
    for (uint32_t g = 0; g < t->kv_heads; g++) {
        const struct lk_head_result *head = &run->layers[layer].heads[i * t->kv_heads + g];
        const struct lk_page_entry *list = replay_list(t, run, layer, i, g);
        uint64_t pages = (t->tokens - t->steps + i) / p->options->page_tokens + 1;
        uint64_t count = (uint64_t)head->kept + head->sampled;
        bool right = count >= 1 && count <= run->room;
        for (uint64_t j = 0; j < count && right; j++)
            right = list[j].page < pages && (j == 0 || list[j].page > list[j - 1].page);
        if (right)
            continue;
        snprintf(p->why, REPLAY_WHY_BYTES,
                 "the daemon's list of pages is wrong: layer %" PRIu32 ", step %" PRIu64
                 ", KV head %" PRIu32 ": %" PRIu32 " kept and %" PRIu32 " sampled, of %" PRIu64
                 " pages, must ascend within room for %" PRIu32,
                 t->layers[layer].number, i, g, head->kept, head->sampled, pages, run->room);
        return EX_SOFTWARE;
    }
    return 0;
}

static int decode(struct player *p, uint32_t layer, uint64_t i, struct replay_run *run) {
    const struct replay_trace *t = p->trace;
    const struct replay_layer *from = &t->layers[layer];
    p->row.layer = layer;
    p->row.tokens = 1;
    p->row.position = t->tokens - t->steps + i;
    memcpy((void *)p->row.q, from->q + i * t->q_bytes, t->q_bytes);
    memcpy((void *)p->row.k, from->k + p->row.position * t->kv_bytes, t->kv_bytes);
    memcpy((void *)p->row.v, from->v + p->row.position * t->kv_bytes, t->kv_bytes);
    uint64_t begun = lk_clock_ns();
    if (locks_decode(p->bed->locks, &p->step, &p->row, 1))
        return failed(p);
    keep(p, i, lk_clock_ns() - begun, run, &run->layers[layer]);
    return check(p, run, layer, i);
}

static int decode_all(struct player *p, locks_handle sequence, const char *label,
                      struct replay_run *run) {
    const struct replay_trace *t = p->trace;
    struct lk_progress progress;
    int rc = make_run(p, run);
    if (rc)
        return rc;
    lk_progress_begin(&progress, label, t->steps * t->layer_count);
    p->row.sequence = sequence;
    for (uint64_t i = 0; i < t->steps && !rc; i++)
        for (uint32_t layer = 0; layer < run->layer_count && !rc; layer++) {
            rc = decode(p, layer, i, run);
            lk_progress_at(&progress, i * t->layer_count + layer + 1);
        }
    lk_progress_end(&progress, !rc);
    return rc;
}

/* Whether some row may be sampled, so that --compare wants the same without. */
static bool may_sample(const struct replay_options *o) {
    if (o->dense || !o->compare)
        return false;
    return o->sampled > 0 ||
           (o->sampled < 0 && o->budget / o->page_tokens >= LK_AUTO_SAMPLED_PAGES);
}

static int play(struct player *p, locks_handle sequence, struct replay_run *run,
                struct replay_run *kept) {
    struct locks *l = p->bed->locks;
    locks_handle fork = 0;
    int rc;
    p->row.sequence = sequence;
    rc = append_all(p, &run->append_seconds);
    if (!rc && may_sample(p->options) && locks_sequence_fork(l, sequence, &fork))
        rc = failed(p);
    if (!rc)
        rc = decode_all(p, sequence, "decoding", run);
    if (!rc && fork && run->sampled) {
        p->step.sampled = LOCKS_SAMPLED_NONE;
        rc = decode_all(p, fork, "the same, nothing sampled", kept);
    }
    return rc;
}

int replay_run(const struct replay_options *options, const struct replay_trace *trace,
               struct replay_bed *bed, struct replay_run *ret, struct replay_run *ret_kept,
               char *why) {
    struct player player = {.options = options, .trace = trace, .bed = bed, .why = why};
    struct replay_run run = {0}, kept = {0};
    locks_handle sequence;
    make_step(&player);
    int rc = make_row(&player, list_room(options, trace));
    if (!rc && locks_sequence_create(bed->locks, bed->pool.index, &sequence))
        rc = failed(&player);
    if (!rc)
        rc = play(&player, sequence, &run, &kept);
    if (rc) {
        replay_run_free(&run);
        replay_run_free(&kept);
        return rc;
    }
    *ret = run;
    *ret_kept = kept;
    return 0;
}
