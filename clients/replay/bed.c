/* SPDX-License-Identifier: MIT */
/*
 * bed.c - where a trace is replayed: a private daemon with one pool that fits, or somebody's daemon
 * that has such a pool.
 */
#include "replay.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

#include "../common/measure.h"
#include "../common/progress.h"

#define READY_SECONDS 120                  /* memory is populated before a daemon is ready */
#define EXTENT_PAGES  64                   /* a pool's unit of growth */
#define SLACK_BYTES   (UINT64_C(16) << 20) /* alignment of the pool's parts */
#define RECORD_SLACK  256                  /* alignment of a page's records */

static const char *dtype_name(uint32_t dtype) {
    return dtype == LK_DTYPE_BF16 ? "bf16" : dtype == LK_DTYPE_FP16 ? "fp16" : "fp32";
}

/* ---- a private daemon ---- */

/* Room for the trace, a fork's own tail, and extents that are only begun. */
static uint64_t pool_pages(const struct replay_options *o, const struct replay_trace *t) {
    uint64_t pages = (t->tokens + o->page_tokens - 1) / o->page_tokens;
    uint64_t tail = (t->steps + o->page_tokens - 1) / o->page_tokens;
    return pages + tail + UINT64_C(4) * EXTENT_PAGES;
}

/* No less than the daemon takes for so many pages: keys and values, the page's summary, a quarter
 * of a superpage's. */
static uint64_t pool_bytes(const struct replay_options *o, const struct replay_trace *t) {
    uint64_t d = t->head_dim, b = o->page_tokens, element = t->kv_bytes / t->kv_heads / d;
    uint64_t head =
        2 * b * d * element + (d + 2) + o->rank * (d / 2 + b + 2) + d + 2 * b + RECORD_SLACK;
    return pool_pages(o, t) * t->layer_count * t->kv_heads * head + SLACK_BYTES;
}

static int start_daemon(const struct replay_options *o, const struct replay_trace *t,
                        struct replay_bed *bed, char *why) {
    char text[13][64], size[LK_WORD_BYTES], said[REPLAY_WHY_BYTES - 128];
    const char *sets[13];
    struct lk_progress progress;
    uint64_t values[] = {t->layer_count,
                         t->kv_heads,
                         t->group,
                         t->head_dim,
                         o->page_tokens,
                         o->rank,
                         (pool_bytes(o, t) + (UINT64_C(1) << 20) - 1) >> 20};
    static const char *const names[] = {"layers",      "kv_heads", "group", "head_dim",
                                        "page_tokens", "rank",     "memory"};
    size_t count = 0;
    for (; count < 7; count++)
        snprintf(text[count], sizeof(text[count]), "pool trace.%s=%" PRIu64 "%s", names[count],
                 values[count], count == 6 ? "M" : "");
    snprintf(text[count++], sizeof(text[0]), "pool trace.dtype=%s", dtype_name(t->dtype));
    snprintf(text[count++], sizeof(text[0]), "pool trace.max_tokens=%" PRIu64, t->tokens);
    snprintf(text[count++], sizeof(text[0]), "pool trace.budget=%" PRIu32, o->page_tokens);
    snprintf(text[count++], sizeof(text[0]), "limits.max_row_tokens=%d", REPLAY_CHUNK_TOKENS);
    snprintf(text[count++], sizeof(text[0]), "daemon.threads=%" PRIu32, o->threads);
    snprintf(text[count++], sizeof(text[0]), "daemon.device=%s", o->device);
    for (size_t i = 0; i < count; i++)
        sets[i] = text[i];
    lk_progress_begin(&progress, "starting a daemon", 1); /* it takes the pool's memory */
    int rc = lk_private_start(sets, count, READY_SECONDS, &bed->daemon, said, sizeof(said));
    lk_progress_end(&progress, !rc);
    if (!rc)
        return 0;
    snprintf(why, REPLAY_WHY_BYTES, "a daemon of its own, with %s for the trace: %s",
             lk_bytes_word((double)pool_bytes(o, t), size), said);
    return EX_UNAVAILABLE;
}

/* ---- the connection ---- */

/* An append takes k and v of a chunk; a step q, k, v, out, and what it reports. */
static uint64_t arena_bytes(const struct replay_options *o, const struct replay_trace *t) {
    uint64_t pages = (t->tokens + o->page_tokens - 1) / o->page_tokens;
    return 2 * REPLAY_CHUNK_TOKENS * t->kv_bytes + t->q_bytes +
           UINT64_C(4) * t->q_heads * t->head_dim +
           t->kv_heads * (sizeof(struct lk_head_result) + pages * sizeof(struct lk_page_entry)) +
           sizeof(struct lk_step_result) + (UINT64_C(1) << 16);
}

static int connect_daemon(const struct replay_options *o, const struct replay_trace *t,
                          struct replay_bed *bed, char *why) {
    struct locks_options options = {.size = sizeof(options),
                                    .socket = bed->daemon.pid ? bed->daemon.socket : o->socket,
                                    .name = "locks-replay",
                                    .arena_bytes = arena_bytes(o, t)};
    int rc = locks_connect(&options, &bed->locks);
    if (!rc)
        return 0;
    snprintf(why, REPLAY_WHY_BYTES, "%s", locks_error(NULL));
    return rc == -EACCES ? EX_NOPERM : rc == -EPROTO ? EX_PROTOCOL : EX_UNAVAILABLE;
}

/* ---- the pool ---- */

static bool fits(const struct replay_options *o, const struct replay_trace *t,
                 const struct locks_pool *p) {
    return p->layers >= t->layer_count && p->kv_heads == t->kv_heads && p->group == t->group &&
           p->head_dim == t->head_dim && p->page_tokens == o->page_tokens && p->rank == o->rank &&
           p->dtype == t->dtype && p->max_tokens >= t->tokens;
}

static size_t describe(char *text, size_t bytes, const char *head, const struct locks_pool *p) {
    int length = snprintf(
        text, bytes,
        "%s%" PRIu32 " layer%s, kv_heads %" PRIu32 ", group %" PRIu32 ", head_dim %" PRIu32
        ", page_tokens %" PRIu32 ", rank %" PRIu32 ", dtype %s, %" PRIu64 " token%s a sequence",
        head, p->layers, lk_plural(p->layers), p->kv_heads, p->group, p->head_dim, p->page_tokens,
        p->rank, dtype_name(p->dtype), p->max_tokens, lk_plural(p->max_tokens));
    return (size_t)length < bytes ? (size_t)length : bytes - 1;
}

static int no_pool(const struct replay_options *o, const struct replay_trace *t,
                   struct replay_bed *bed, char *why) {
    struct locks_pool pool = {.layers = t->layer_count,
                              .kv_heads = t->kv_heads,
                              .group = t->group,
                              .head_dim = t->head_dim,
                              .page_tokens = o->page_tokens,
                              .rank = o->rank,
                              .dtype = t->dtype,
                              .max_tokens = t->tokens};
    char head[LK_NAME_BYTES + 16];
    int pools = locks_pool_count(bed->locks);
    size_t at = describe(why, REPLAY_WHY_BYTES,
                         "the daemon has no pool for this trace, which needs at least ", &pool);
    for (int i = 0; i < pools && !locks_pool_at(bed->locks, (uint32_t)i, &pool); i++) {
        snprintf(head, sizeof(head), "; pool %s has ", pool.name);
        at += describe(why + at, REPLAY_WHY_BYTES - at, head, &pool);
    }
    return EX_UNAVAILABLE;
}

static int choose_pool(const struct replay_options *o, const struct replay_trace *t,
                       struct replay_bed *bed, char *why) {
    int pools = locks_pool_count(bed->locks);
    for (int i = 0; i < pools; i++) {
        if (locks_pool_at(bed->locks, (uint32_t)i, &bed->pool)) {
            snprintf(why, REPLAY_WHY_BYTES, "%s", locks_error(bed->locks));
            return EX_UNAVAILABLE;
        }
        if (fits(o, t, &bed->pool))
            return 0;
    }
    return no_pool(o, t, bed, why);
}

int replay_bed_open(const struct replay_options *options, const struct replay_trace *trace,
                    struct replay_bed *ret, char *why) {
    struct replay_bed bed = {0};
    int rc = options->socket ? 0 : start_daemon(options, trace, &bed, why);
    if (rc)
        return rc;
    rc = connect_daemon(options, trace, &bed, why);
    if (!rc)
        rc = choose_pool(options, trace, &bed, why);
    if (rc)
        replay_bed_close(&bed);
    else
        *ret = bed;
    return rc;
}

void replay_bed_close(struct replay_bed *bed) {
    locks_close(bed->locks);
    bed->locks = NULL;
    if (bed->daemon.pid)
        lk_private_stop(&bed->daemon);
}
