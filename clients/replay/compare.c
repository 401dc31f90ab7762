/* SPDX-License-Identifier: MIT */
/*
 * compare.c - exact attention, and what each way of choosing pages kept of it.
 *
 * Idea: a row (a step at a KV head) is a task. It computes the logits of all its tokens once, and
 * from them the exact output, the exact weight of every page, and each way's verdict:
 *
 *   the daemon's         its own pages and its own output
 *   the same unsampled   the same of the second run, where there was one
 *   centroid             pages by softmax of q . mean(keys), mean over the group
 *   Quest                pages by softmax of sum over channels of max(q * min, q * max)
 *
 * The last two are taken without quantisation, at as many pages as the budget has, sink and newest
 * always kept. Logits and products are float32, sums over tokens float64. Rows write their own
 * verdict and are summed in order: the figures do not depend on threads.
 */
#include "replay.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

#include "../../kernels/kernels.h"
#include "../common/measure.h"
#include "../common/parallel.h"
#include "../common/progress.h"

#define CARRIER 0.01 /* a carrier page has so much of the weight */
#define LANES   4

typedef float vec __attribute__((vector_size(16), aligned(4)));

struct row_verdict {
    double mass[WAYS], error[WAYS];
    uint32_t carriers, read[WAYS];
};

/* A layer in float32, by head: a head's keys are contiguous. */
struct scene {
    const struct replay_options *options;
    const struct replay_trace *trace;
    const struct replay_run *run[2]; /* of WAY_DAEMON, WAY_KEPT (NULL: none) */
    uint32_t layer;
    uint64_t pages;           /* complete ones */
    float *q;                 /* [steps][q_heads][d] */
    float *k, *v;             /* [kv_heads][tokens][d] */
    float *mean, *low, *high; /* [kv_heads][pages][d] */
    struct row_verdict *rows; /* [steps][kv_heads] */
    struct scratch *scratch;  /* [threads] */
    struct lk_progress *progress;
};

/* Of one thread. */
struct scratch {
    float *logit;               /* [group][tokens] */
    double *mass;               /* [group][pages]: exact shares, then a selector's scores */
    double *share, *rank;       /* [pages]: exact, and a selector's; means over the group */
    float *chosen;              /* [pages]: 0 not read, 1 kept, else the sample's weight */
    uint32_t *order;            /* [pages] */
    double *exact, *out;        /* [group][d] */
    double total[LK_GROUP_MAX]; /* none is larger: the daemon has served the trace */
};

/* ---- a layer's planes ---- */

static float from_half(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
    uint32_t bits = sign | (exponent + 112) << 23 | fraction << 13;
    float value;
    if (exponent == 31)
        bits = sign | 0x7f800000 | fraction << 13;
    memcpy(&value, &bits, sizeof(value));
    if (exponent == 0)
        value = copysignf((float)fraction * 0x1p-24F, sign ? -1.0F : 1.0F);
    return value;
}

static float element(const struct replay_trace *t, const uint8_t *data, uint64_t index) {
    uint16_t half;
    uint32_t bits;
    float value;
    if (t->type == LK_TENSOR_F32) {
        memcpy(&value, data + 4 * index, sizeof(value));
        return value;
    }
    memcpy(&half, data + 2 * index, sizeof(half));
    if (t->type == LK_TENSOR_F16)
        return from_half(half);
    bits = (uint32_t)half << 16;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* [tokens][kv_heads][d] -> [kv_heads][tokens][d] */
static void spread(const struct replay_trace *t, const uint8_t *data, float *plane) {
    for (uint64_t i = 0; i < t->tokens; i++)
        for (uint32_t g = 0; g < t->kv_heads; g++)
            for (uint32_t c = 0; c < t->head_dim; c++)
                plane[(g * t->tokens + i) * t->head_dim + c] =
                    element(t, data, (i * t->kv_heads + g) * t->head_dim + c);
}

/* Mean and envelope of `count` keys. */
static void summarise(const float *keys, uint64_t count, uint32_t d, float *mean, float *low,
                      float *high) {
    for (uint32_t c = 0; c < d; c++) {
        double sum = 0;
        low[c] = high[c] = keys[c];
        for (uint64_t i = 0; i < count; i++) {
            float x = keys[i * d + c];
            sum += x;
            low[c] = x < low[c] ? x : low[c];
            high[c] = x > high[c] ? x : high[c];
        }
        mean[c] = (float)(sum / (double)count);
    }
}

static void fill_planes(struct scene *s) {
    const struct replay_trace *t = s->trace;
    const struct replay_layer *layer = &t->layers[s->layer];
    uint32_t d = t->head_dim, b = s->options->page_tokens;
    spread(t, layer->k, s->k);
    spread(t, layer->v, s->v);
    for (uint64_t i = 0; i < t->steps * t->q_heads * d; i++)
        s->q[i] = element(t, layer->q, i);
    for (uint32_t g = 0; g < t->kv_heads; g++)
        for (uint64_t j = 0; j < s->pages; j++) {
            uint64_t at = (g * s->pages + j) * d;
            summarise(s->k + (g * t->tokens + j * b) * d, b, d, s->mean + at, s->low + at,
                      s->high + at);
        }
}

/* ---- loops over channels; head dimensions are multiples of 16 ---- */

static float dot(const float *a, const float *b, uint32_t d) {
    vec sum[4] = {{0}};
    for (uint32_t c = 0; c < d; c += 4 * LANES)
        for (int i = 0; i < 4; i++)
            sum[i] += *(const vec *)(a + c + i * LANES) * *(const vec *)(b + c + i * LANES);
    vec all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    return (all[0] + all[1]) + (all[2] + all[3]);
}

/* Sum over channels of max(q * low, q * high). */
static float envelope(const float *q, const float *low, const float *high, uint32_t d) {
    float sum = 0;
    for (uint32_t c = 0; c < d; c++)
        sum += q[c] > 0 ? q[c] * high[c] : q[c] * low[c];
    return sum;
}

/* out[d] += sum of weight[i] * values[i] over `count` tokens, times scale. */
static void gather(const float *values, const float *weight, uint64_t count, uint32_t d,
                   double scale, double *out) {
    float part[LK_HEAD_DIM_MAX] = {0};
    for (uint64_t i = 0; i < count; i++)
        for (uint32_t c = 0; c < d; c += LANES)
            *(vec *)(part + c) += weight[i] * *(const vec *)(values + i * d + c);
    for (uint32_t c = 0; c < d; c++)
        out[c] += scale * part[c];
}

/* ---- one row ---- */

struct row { /* a task */
    const struct scene *scene;
    struct scratch *scratch;
    uint64_t step, tokens, pages;
    uint32_t head;
    const float *q, *k, *v; /* of its group and KV head */
    struct row_verdict *verdict;
};

static uint64_t page_count(const struct row *r, uint64_t page) {
    uint64_t b = r->scene->options->page_tokens, left = r->tokens - page * b;
    return left < b ? left : b;
}

/* Logits, and shares of pages. */
static void weigh(const struct row *r) {
    const struct replay_trace *t = r->scene->trace;
    struct scratch *x = r->scratch;
    uint32_t d = t->head_dim, b = r->scene->options->page_tokens;
    double scale = 1 / sqrt(d);
    memset(x->share, 0, r->pages * sizeof(*x->share));
    for (uint32_t g = 0; g < t->group; g++) {
        float *z = x->logit + g * t->tokens, largest = -FLT_MAX;
        double *mass = x->mass + g * (r->scene->pages + 1);
        for (uint64_t i = 0; i < r->tokens; i++) {
            z[i] = (float)(scale * dot(r->q + (uint64_t)g * d, r->k + i * d, d));
            largest = z[i] > largest ? z[i] : largest;
        }
        x->total[g] = 0;
        for (uint64_t j = 0; j < r->pages; j++) {
            mass[j] = 0;
            for (uint64_t i = j * b; i < j * b + page_count(r, j); i++)
                mass[j] += expf(z[i] - largest);
            x->total[g] += mass[j];
        }
        for (uint64_t j = 0; j < r->pages; j++)
            x->share[j] += mass[j] / x->total[g] / t->group;
    }
}

/* Of the chosen pages alone: beside a page that was missed all of theirs may be nothing. */
static float largest_chosen(const struct row *r, const float *logit, const float *chosen) {
    uint32_t b = r->scene->options->page_tokens;
    float largest = -FLT_MAX;
    for (uint64_t j = 0; j < r->pages; j++)
        for (uint64_t i = 0; (!chosen || chosen[j] != 0) && i < page_count(r, j); i++)
            largest = logit[j * b + i] > largest ? logit[j * b + i] : largest;
    return largest;
}

/* Attention over the chosen pages with their weights -> out. */
static void attend(const struct row *r, const float *chosen, double *out) {
    const struct replay_trace *t = r->scene->trace;
    struct scratch *x = r->scratch;
    uint32_t d = t->head_dim, b = r->scene->options->page_tokens;
    float weight[LK_PAGE_TOKENS_MAX];
    memset(out, 0, (size_t)t->group * d * sizeof(*out));
    for (uint32_t g = 0; g < t->group; g++) {
        const float *z = x->logit + g * t->tokens;
        float largest = largest_chosen(r, z, chosen);
        double total = 0;
        for (uint64_t j = 0; j < r->pages; j++) {
            if (chosen && chosen[j] == 0)
                continue;
            double factor = chosen ? (double)chosen[j] : 1;
            uint64_t count = page_count(r, j);
            for (uint64_t i = 0; i < count; i++) {
                weight[i] = expf(z[j * b + i] - largest);
                total += factor * (double)weight[i];
            }
            gather(r->v + j * b * d, weight, count, d, factor, out + (uint64_t)g * d);
        }
        for (uint32_t c = 0; c < d; c++)
            out[(uint64_t)g * d + c] /= total;
    }
}

static bool sink_or_newest(const struct row *r, uint64_t page) {
    return page == 0 || page + 1 == r->pages;
}

/* Everything but the error, from `chosen`. */
static void judge(const struct row *r, enum replay_way way) {
    const struct scratch *x = r->scratch;
    struct row_verdict *verdict = r->verdict;
    double mass = 0;
    verdict->read[way] = 0;
    for (uint64_t j = 0; j < r->pages; j++) {
        if (x->chosen[j] == 1)
            mass += x->share[j];
        if (x->chosen[j] != 0 && x->share[j] >= CARRIER && !sink_or_newest(r, j))
            verdict->read[way]++;
    }
    verdict->mass[way] = mass;
}

static double distance(const struct replay_trace *t, const double *exact, const double *out) {
    double difference = 0, norm = 0;
    for (uint64_t c = 0; c < (uint64_t)t->group * t->head_dim; c++) {
        difference += (out[c] - exact[c]) * (out[c] - exact[c]);
        norm += exact[c] * exact[c];
    }
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

static void judge_run(const struct row *r, enum replay_way way) {
    const struct scene *s = r->scene;
    const struct replay_trace *t = s->trace;
    const struct replay_run *run = s->run[way];
    const struct replay_result *result = &run->layers[s->layer];
    const struct lk_head_result *head = &result->heads[r->step * t->kv_heads + r->head];
    const struct lk_page_entry *list = replay_list(t, run, s->layer, r->step, r->head);
    uint64_t values = (uint64_t)t->group * t->head_dim;
    const float *out = result->out + (r->step * t->kv_heads + r->head) * values;
    memset(r->scratch->chosen, 0, r->pages * sizeof(*r->scratch->chosen));
    for (uint32_t j = 0; j < head->kept + head->sampled; j++)
        r->scratch->chosen[list[j].page] = list[j].weight;
    judge(r, way);
    for (uint64_t c = 0; c < values; c++)
        r->scratch->out[c] = (double)out[c];
    r->verdict->error[way] = distance(t, r->scratch->exact, r->scratch->out);
}

/* ---- the two selectors ---- */

/* Scores of a head's pages -> softmax, added to rank. */
static void add_softmax(const struct row *r, const double *score) {
    double largest = -DBL_MAX, total = 0;
    for (uint64_t j = 0; j < r->pages; j++)
        largest = score[j] > largest ? score[j] : largest;
    for (uint64_t j = 0; j < r->pages; j++)
        total += exp(score[j] - largest);
    for (uint64_t j = 0; j < r->pages; j++)
        r->scratch->rank[j] += exp(score[j] - largest) / total;
}

static void rank_pages(const struct row *r, enum replay_way way) {
    const struct scene *s = r->scene;
    const struct replay_trace *t = s->trace;
    struct scratch *x = r->scratch;
    uint32_t d = t->head_dim, b = s->options->page_tokens;
    uint64_t last = r->pages - 1; /* perhaps incomplete, so summarised here */
    float mean[LK_HEAD_DIM_MAX], low[LK_HEAD_DIM_MAX], high[LK_HEAD_DIM_MAX];
    double scale = 1 / sqrt(d);
    summarise(r->k + last * b * d, page_count(r, last), d, mean, low, high);
    memset(x->rank, 0, r->pages * sizeof(*x->rank));
    for (uint32_t g = 0; g < t->group; g++) {
        const float *q = r->q + (uint64_t)g * d;
        for (uint64_t j = 0; j < r->pages; j++) {
            uint64_t at = (r->head * s->pages + j) * d;
            if (way == WAY_CENTROID)
                x->mass[j] = scale * dot(q, j < last ? s->mean + at : mean, d);
            else
                x->mass[j] = scale * envelope(q, j < last ? s->low + at : low,
                                              j < last ? s->high + at : high, d);
        }
        add_softmax(r, x->mass);
    }
}

static int by_rank(const void *a, const void *b, void *context) {
    const double *rank = context;
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    if (rank[x] != rank[y])
        return rank[x] > rank[y] ? -1 : 1;
    return x < y ? -1 : 1; /* equal: the lower page */
}

/* As many pages as the budget has; with a mass target, as many as the daemon read of this row. */
static uint64_t page_budget(const struct row *r) {
    const struct scene *s = r->scene;
    const struct lk_head_result *head =
        &s->run[WAY_DAEMON]->layers[s->layer].heads[r->step * s->trace->kv_heads + r->head];
    uint64_t pages = s->options->budget / s->options->page_tokens;
    if (r->tokens <= s->options->budget)
        return r->pages;
    return s->options->mass > 0 ? head->kept + head->sampled : pages;
}

static void judge_selector(const struct row *r, enum replay_way way) {
    struct scratch *x = r->scratch;
    uint64_t budget = page_budget(r), count = 0;
    rank_pages(r, way);
    for (uint64_t j = 0; j < r->pages; j++) {
        x->chosen[j] = 0;
        if (!sink_or_newest(r, j))
            x->order[count++] = (uint32_t)j;
    }
    qsort_r(x->order, count, sizeof(*x->order), by_rank, x->rank);
    x->chosen[r->pages - 1] = 1;
    if (budget > 1)
        x->chosen[0] = 1;
    for (uint64_t j = 0; j < count && j + 2 < budget; j++)
        x->chosen[x->order[j]] = 1;
    judge(r, way);
    attend(r, x->chosen, x->out);
    r->verdict->error[way] = distance(r->scene->trace, x->exact, x->out);
}

static void compare_row(void *context, uint64_t task, unsigned thread) {
    struct scene *s = context;
    const struct replay_trace *t = s->trace;
    uint32_t d = t->head_dim;
    struct row r = {.scene = s, .scratch = &s->scratch[thread], .verdict = &s->rows[task]};
    r.step = task / t->kv_heads;
    r.head = (uint32_t)(task % t->kv_heads);
    r.tokens = t->tokens - t->steps + r.step + 1;
    r.pages = (r.tokens - 1) / s->options->page_tokens + 1;
    r.q = s->q + (r.step * t->q_heads + (uint64_t)r.head * t->group) * d;
    r.k = s->k + r.head * t->tokens * d;
    r.v = s->v + r.head * t->tokens * d;
    weigh(&r);
    attend(&r, NULL, r.scratch->exact);
    for (uint64_t j = 0; j < r.pages; j++)
        r.verdict->carriers += r.scratch->share[j] >= CARRIER && !sink_or_newest(&r, j);
    judge_run(&r, WAY_DAEMON);
    if (s->run[WAY_KEPT])
        judge_run(&r, WAY_KEPT);
    judge_selector(&r, WAY_CENTROID);
    judge_selector(&r, WAY_QUEST);
    if (thread == 0)
        lk_progress_at(s->progress, s->layer * t->steps * t->kv_heads + task);
}

/* ---- a layer ---- */

static bool make_scratch(const struct scene *s, struct scratch *ret) {
    const struct replay_trace *t = s->trace;
    uint64_t pages = s->pages + 1, values = (uint64_t)t->group * t->head_dim;
    ret->logit = malloc(t->group * t->tokens * sizeof(*ret->logit));
    ret->mass = malloc(t->group * pages * sizeof(*ret->mass));
    ret->share = malloc(pages * sizeof(*ret->share));
    ret->rank = malloc(pages * sizeof(*ret->rank));
    ret->chosen = malloc(pages * sizeof(*ret->chosen));
    ret->order = malloc(pages * sizeof(*ret->order));
    ret->exact = malloc(values * sizeof(*ret->exact));
    ret->out = malloc(values * sizeof(*ret->out));
    return ret->logit && ret->mass && ret->share && ret->rank && ret->chosen && ret->order &&
           ret->exact && ret->out;
}

static void free_scratch(struct scratch *x) {
    free(x->logit);
    free(x->mass);
    free(x->share);
    free(x->rank);
    free(x->chosen);
    free(x->order);
    free(x->exact);
    free(x->out);
}

static bool make_scene(struct scene *s) {
    const struct replay_trace *t = s->trace;
    uint64_t plane = t->kv_heads * t->tokens * t->head_dim;
    uint64_t summary = t->kv_heads * s->pages * t->head_dim + 1;
    s->q = malloc(t->steps * t->q_heads * t->head_dim * sizeof(*s->q));
    s->k = malloc(plane * sizeof(*s->k));
    s->v = malloc(plane * sizeof(*s->v));
    s->mean = malloc(summary * sizeof(*s->mean));
    s->low = malloc(summary * sizeof(*s->low));
    s->high = malloc(summary * sizeof(*s->high));
    s->rows = calloc(t->steps * t->kv_heads, sizeof(*s->rows));
    s->scratch = calloc(s->options->threads, sizeof(*s->scratch));
    bool made = s->q && s->k && s->v && s->mean && s->low && s->high && s->rows && s->scratch;
    for (uint32_t i = 0; made && i < s->options->threads; i++)
        made = make_scratch(s, &s->scratch[i]);
    return made;
}

static void free_scene(struct scene *s) {
    for (uint32_t i = 0; s->scratch && i < s->options->threads; i++)
        free_scratch(&s->scratch[i]);
    free(s->scratch);
    free(s->q);
    free(s->k);
    free(s->v);
    free(s->mean);
    free(s->low);
    free(s->high);
    free(s->rows);
}

static void sum_up(const struct scene *s, struct replay_comparison *ret) {
    uint64_t rows = s->trace->steps * s->trace->kv_heads;
    for (int way = 0; way < WAYS; way++) {
        struct replay_verdict *sum = &ret->way[way];
        *sum = (struct replay_verdict){.there = way != WAY_KEPT || s->run[WAY_KEPT]};
        for (uint64_t i = 0; i < rows; i++) {
            sum->mass += s->rows[i].mass[way] / (double)rows;
            sum->error += s->rows[i].error[way] / (double)rows;
            sum->carriers += s->rows[i].carriers;
            sum->carriers_read += s->rows[i].read[way];
        }
    }
}

int replay_compare(const struct replay_options *options, const struct replay_trace *trace,
                   const struct replay_run *run, const struct replay_run *kept,
                   struct replay_comparison *ret, char *why) {
    struct lk_progress progress;
    struct scene scene = {.options = options,
                          .trace = trace,
                          .run = {run, kept->layers ? kept : NULL},
                          .pages = trace->tokens / options->page_tokens,
                          .progress = &progress};
    uint64_t rows = trace->steps * trace->kv_heads;
    int rc = make_scene(&scene) ? 0 : EX_OSERR;
    if (rc)
        snprintf(why, REPLAY_WHY_BYTES,
                 "no memory to compute exact attention over %" PRIu64 " token%s", trace->tokens,
                 lk_plural(trace->tokens));
    lk_progress_begin(&progress, "computing exact attention", rows * trace->layer_count);
    for (; scene.layer < trace->layer_count && !rc; scene.layer++) {
        memset(scene.rows, 0, rows * sizeof(*scene.rows));
        fill_planes(&scene);
        lk_parallel_run(options->threads, rows, compare_row, &scene);
        sum_up(&scene, &ret[scene.layer]);
    }
    lk_progress_end(&progress, !rc);
    free_scene(&scene);
    return rc;
}
