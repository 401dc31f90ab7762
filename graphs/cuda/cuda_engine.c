/* SPDX-License-Identifier: MIT */
/*
 * cuda_engine.c - batches in flight on a GPU: their order, their marks, their memory.
 *
 * Idea: batches run on one stream. A batch is copies, writes and builds of what writes sealed;
 * then one graph for each pool that has rows in it (lane.h); then builds of the pages it closed.
 * Words of host memory say how far the device is: the graph's last kernel stores the batch's number
 * into the first once results can be seen (FENCED), a kernel after the builds into another (DONE).
 * Polling is looking at those words.
 *
 *     host: place rows, write feed and block, launch ... poll ... hand out results, count bytes
 *     device: [copy][write][build] [feed append scan .. attend mark]
 *                                                                   [build mark] on another stream
 *
 * The next batches start beside those last builds, unless they touch one of their layers: a model's
 * next step there is a whole round of layers away. The layers of a token all close their pages in
 * the same round, so several batches' builds run beside each other.
 *
 * A client on the GPU waits for a fence of its own: the mark raises it before the first word.
 *
 * Outputs, LSE and page lists go straight to the client's memory. What the daemon itself needs to
 * know, pages kept and sampled, goes to memory of the engine first.
 *
 * A kernel that faults, or a batch that does not end, breaks the engine for good: streams are asked
 * every millisecond while something is in flight for longer than that.
 *
 * A sleeper is woken by a thread that looks at the words for it; engines are `hot` for the first
 * milliseconds of a batch, while looking costs less than being woken.
 *
 * Invariants: a slot's list of builds is not touched between launch and DONE; a desk and a lane's
 * feed, block and results not between launch and FENCED.
 */
#include "cuda_engine.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "sizes.h"

#define HOT_NS   UINT64_C(5000000)     /* of a batch: longer than most steps */
#define CHECK_NS UINT64_C(1000000)     /* between two looks at the stream's health */
#define STUCK_NS UINT64_C(60000000000) /* a batch that takes longer will not end */
#define WAIT_NS  50000                 /* between two looks of the thread that wakes sleepers */
#define RING_NS  UINT64_C(1000000000)  /* a sleeper is woken at least so often, in flight */

/* Notes what broke; the first stands. -> -EIO. */
int lk_cuda_broken(struct cuda_engine *engine, const char *step, const char *words) {
    if (!engine->broken)
        snprintf(engine->trouble, sizeof engine->trouble, "%s: %s", step, words);
    engine->broken = true;
    return -EIO;
}

int lk_cuda_check(struct cuda_engine *engine, int error, const char *step) {
    return error ? lk_cuda_broken(engine, step, cudaGetErrorString((cudaError_t)error)) : 0;
}

/* Remembered for each thread: the runtime takes longer to find out that nothing changes. */
int lk_cuda_choose(const struct cuda_engine *engine) {
    static _Thread_local int chosen = -1;
    int error = chosen == engine->gpu ? 0 : (int)cudaSetDevice(engine->gpu);

    if (!error)
        chosen = engine->gpu;
    return error;
}

/* ---- launch ---- */

/* The desk and lanes of a batch. */
static uint32_t desk_of(uint64_t serial) {
    return serial % LK_BATCHES_AHEAD;
}

static struct cuda_pool *pool_of(struct cuda_engine *engine, const struct lk_pool_view *view) {
    struct cuda_pool *pool = engine->pool;

    while (pool->view.kv != view->kv)
        pool++;
    return pool;
}

static int run_copies(struct cuda_engine *engine, const struct cuda_desk *desk,
                      const struct lk_batch *batch) {
    struct lk_cuda_copy_item *items = desk->copies;

    for (uint32_t i = 0; i < batch->copy_count;) {
        const struct lk_pool_view *view = batch->copies[i].pool;
        uint32_t count = 0;
        for (; i < batch->copy_count && batch->copies[i].pool == view; i++, count++)
            items[count] =
                (struct lk_cuda_copy_item){batch->copies[i].from, batch->copies[i].to,
                                           batch->copies[i].layer, batch->copies[i].quad};
        int error = lk_cuda_copy(&pool_of(engine, view)->view, items, count, engine->stream);
        if (error)
            return lk_cuda_check(engine, error, "copying pages");
        items += count;
    }
    return 0;
}

static int run_writes(struct cuda_engine *engine, const struct cuda_desk *desk,
                      const struct lk_batch *batch) {
    uint64_t *slots = desk->slots;

    for (uint32_t i = 0; i < batch->write_count; i++) {
        struct lk_write write = batch->writes[i];
        memcpy(slots, write.slots, write.tokens * sizeof *slots);
        write.pool = &pool_of(engine, write.pool)->view;
        write.slots = slots;
        slots += write.tokens;
        int error = lk_cuda_write(&write, engine->stream);
        if (error)
            return lk_cuda_check(engine, error, "writing tokens");
    }
    return 0;
}

/* Pages or, of those that complete one, superpages of a pool into a list -> how many. */
static uint32_t list_builds(const struct lk_build *builds, uint32_t count,
                            const struct lk_pool_view *pool, bool supers, uint64_t *ret) {
    uint32_t listed = 0;

    for (uint32_t i = 0; i < count; i++)
        if (builds[i].pool->kv == pool->kv && (builds[i].quad || !supers))
            ret[listed++] = (uint64_t)builds[i].layer << 48 |
                            (supers ? builds[i].page / LK_QUAD_PAGES : builds[i].page);
    return listed;
}

static int run_builds(struct cuda_engine *engine, cudaStream_t stream, uint64_t **list,
                      const struct lk_build *builds, uint32_t count) {
    for (uint32_t p = 0; p < engine->pools && count; p++)
        for (int supers = 0; supers < 2; supers++) {
            struct lk_cuda_build job = {.pool = engine->pool[p].view, .list = *list};
            job.count = list_builds(builds, count, &job.pool, supers, *list);
            *list += job.count;
            int error =
                supers ? lk_cuda_build_supers(&job, stream) : lk_cuda_build_pages(&job, stream);
            if (error)
                return lk_cuda_check(engine, error, "summarising pages");
        }
    return 0;
}

/* The row as its kernels see it, its inputs on their way to its part of the workspace. */
static void feed_row(struct cuda_desk *desk, struct lk_cuda_lane *lane, const struct lk_row *row,
                     struct lk_row *ret) {
    struct lk_cuda_share s = lk_cuda_share_of(row);
    uint8_t *at = row->workspace, *table = desk->tables + desk->tables_used;

    *ret = *row;
    ret->workspace = at + s.rest;
    ret->result = lane->results + (size_t)lane->count * row->pool->geometry.kv_heads;
    if (s.table_bytes) {
        memcpy(table, row->table, s.entries * sizeof *row->table);
        desk->tables_used += s.table_bytes;
        ret->table = (const uint32_t *)(at + s.table);
        lk_cuda_lane_feed(lane, table, at + s.table, s.table_bytes);
    }
    if (s.q_bytes) {
        ret->q = at + s.q;
        lk_cuda_lane_feed(lane, row->q, at + s.q, s.q_bytes);
    }
    if (s.kv_bytes) {
        ret->k = at + s.k;
        ret->v = at + s.v;
        lk_cuda_lane_feed(lane, row->k, at + s.k, s.kv_bytes);
        lk_cuda_lane_feed(lane, row->v, at + s.v, s.kv_bytes);
    }
}

/* Collects the batch's rows of a pool in its lane. */
static void collect_rows(const struct cuda_pool *pool, struct lk_cuda_lane *lane,
                         const struct lk_batch *batch) {
    lane->count = 0;
    lane->row_bytes = 0;
    for (uint32_t i = 0; i < batch->row_count; i++)
        if (batch->rows[i].pool->kv == pool->view.kv) {
            lane->row_bytes += lk_cuda_share_of(&batch->rows[i]).rest;
            lane->index[lane->count++] = i;
        }
}

/* The rows of one pool. serial: what its mark stores, and then it raises the batch's fences; 0:
 * more pools follow. */
static int run_pool(struct cuda_engine *engine, struct cuda_desk *desk, struct lk_cuda_lane *lane,
                    const struct lk_batch *batch, uint64_t serial) {
    uint32_t count = lane->count;

    lk_cuda_lane_feed_begin(lane, serial, lane->row_bytes);
    if (serial)
        lk_cuda_lane_signals(lane, batch->signals, batch->signal_count);
    for (lane->count = 0; lane->count < count; lane->count++)
        feed_row(desk, lane, &batch->rows[lane->index[lane->count]], &lane->rows[lane->count]);
    if (lk_cuda_fill(lane->rows, count, lane->block))
        return lk_cuda_broken(engine, "a row", "it exceeds what the kernels take");
    return lk_cuda_check(engine, cudaGraphLaunch(lk_cuda_lane_graph(lane), engine->stream),
                         "launching a step");
}

static int run_rows(struct cuda_engine *engine, uint64_t serial, const struct lk_batch *batch) {
    uint32_t place = desk_of(serial);
    struct cuda_desk *desk = &engine->desk[place];
    uint32_t last = 0;
    int error = 0;

    for (uint32_t p = 0; p < engine->pools; p++) {
        collect_rows(&engine->pool[p], &engine->pool[p].lane[place], batch);
        last = engine->pool[p].lane[place].count ? p : last;
    }
    desk->tables_used = 0;
    desk->clock = batch->row_count ? engine->pool[last].lane[place].clock : NULL;
    for (uint32_t p = 0; p < engine->pools && !error; p++)
        if (engine->pool[p].lane[place].count)
            error =
                run_pool(engine, desk, &engine->pool[p].lane[place], batch, p == last ? serial : 0);
    if (!batch->row_count && !error)
        error = lk_cuda_raise_in_turn(engine, batch->signals, batch->signal_count);
    if (!batch->row_count && !error)
        error = lk_cuda_check(
            engine, lk_cuda_mark_now(serial, &engine->words->fenced, NULL, engine->stream),
            "marking a batch");
    return error;
}

#ifdef LK_TEST_HOOKS
static void break_if_asked(struct cuda_engine *engine, const struct lk_batch *batch) {
    for (uint32_t i = 0; i < batch->row_count; i++)
        if (batch->rows[i].sm_scale == LK_TEST_BREAK)
            lk_cuda_fault(engine->stream);
}
#else
static void break_if_asked(const struct cuda_engine *engine, const struct lk_batch *batch) {
    (void)engine;
    (void)batch;
}
#endif

/* Does the batch touch what another's builds write or read? By layer, whatever the pool. */
static bool needs_builds(const struct cuda_slot *other, const struct lk_batch *batch) {
    if (batch->copy_count || batch->write_count || batch->build_before_count)
        return true;
    for (uint32_t i = 0; i < batch->row_count; i++)
        if (other->building[batch->rows[i].layer / 64] >> batch->rows[i].layer % 64 & 1)
            return true;
    return false;
}

/* Builds of pages that other batches closed run beside this one, unless it needs them. */
static int wait_for_builds(struct cuda_engine *engine, const struct lk_batch *batch) {
    int error = 0;

    for (uint64_t i = engine->finished; i < engine->launched && !error; i++) {
        const struct cuda_slot *other = &engine->slot[i % LK_BATCHES_IN_FLIGHT];
        if (other->builds_after && needs_builds(other, batch))
            error = lk_cuda_check(engine, cudaStreamWaitEvent(engine->stream, other->built, 0),
                                  "waiting for summaries");
    }
    return error;
}

/* Summarises the pages that the batch closed, on a stream of their own after its results. */
static int run_builds_after(struct cuda_engine *engine, struct cuda_slot *slot, uint64_t *list,
                            const struct lk_batch *batch) {
    const uint64_t place = (uint64_t)(slot - engine->slot);
    int error =
        lk_cuda_check(engine, cudaEventRecord(slot->fence, engine->stream), "marking results");

    memset(slot->building, 0, sizeof slot->building);
    for (uint32_t i = 0; i < batch->build_after_count; i++)
        slot->building[batch->builds_after[i].layer / 64] |= UINT64_C(1)
                                                             << batch->builds_after[i].layer % 64;
    if (!error)
        error = lk_cuda_check(engine, cudaStreamWaitEvent(slot->builder, slot->fence, 0),
                              "waiting for results");
    if (!error)
        error =
            run_builds(engine, slot->builder, &list, batch->builds_after, batch->build_after_count);
    if (!error)
        error = lk_cuda_check(engine,
                              lk_cuda_mark_now(slot->serial, &engine->words->done[place],
                                               &engine->words->clock[place], slot->builder),
                              "marking a batch");
    return error ? error
                 : lk_cuda_check(engine, cudaEventRecord(slot->built, slot->builder),
                                 "marking summaries");
}

static int run_batch(struct cuda_engine *engine, struct cuda_slot *slot,
                     const struct lk_batch *batch) {
    const struct cuda_desk *desk = &engine->desk[desk_of(slot->serial)];
    uint64_t *list = slot->builds;
    int error = wait_for_builds(engine, batch);

    if (!error)
        error = run_copies(engine, desk, batch);
    if (!error)
        error = run_writes(engine, desk, batch);
    if (!error)
        error = run_builds(engine, engine->stream, &list, batch->builds_before,
                           batch->build_before_count);
    break_if_asked(engine, batch);
    if (!error)
        error = run_rows(engine, slot->serial, batch);
    slot->builds_after = batch->build_after_count != 0;
    return error || !slot->builds_after ? error : run_builds_after(engine, slot, list, batch);
}

int lk_cuda_launch(struct lk_engine *base, struct lk_batch *batch) {
    struct cuda_engine *engine = lk_cuda_engine_of(base);
    struct cuda_slot *slot = &engine->slot[engine->launched % LK_BATCHES_IN_FLIGHT];
    uint64_t serial = engine->launched + 1;

    if (engine->broken)
        return -EIO;
    if (engine->launched - engine->finished >= LK_BATCHES_IN_FLIGHT ||
        engine->launched - engine->fenced >= LK_BATCHES_AHEAD)
        return -EAGAIN;
    int error = lk_batch_admit(LK_DEVICE_CUDA, engine->desk[desk_of(serial)].workspace,
                               engine->workspace_bytes, batch);
    if (error)
        return error;
    error = lk_cuda_check(engine, lk_cuda_choose(engine), "choosing the GPU");
    slot->batch = batch;
    slot->serial = serial;
    slot->launched_ns = lk_engine_now_ns();
    if (!error)
        error = run_batch(engine, slot, batch);
    engine->launched += !error;
    return error;
}

/* ---- poll ---- */

/* From the host's copy of the row's plan. */
static void count_bytes(const struct lk_cuda_row *plan, const struct lk_head_out *out,
                        struct lk_row *row) {
    struct lk_row_reads reads = {
        .scan = plan->scan, .units = plan->units, .candidates = plan->list_max};

    for (uint32_t h = 0; h < row->pool->geometry.kv_heads; h++)
        reads.attended += (uint64_t)out[h].kept + out[h].sampled;
    lk_row_count_bytes(row, &reads);
}

/* Adds what the parts of a lane's step took on the device; nothing where kernels keep no time. */
static void add_times(const struct lk_cuda_lane *lane, uint64_t phase_ns[LK_PHASES]) {
    static const enum lk_phase phase_of[LK_CUDA_AT_FENCE] = {
        [LK_CUDA_AT_FEED] = LK_PHASE_APPEND,   [LK_CUDA_AT_SCAN] = LK_PHASE_SCORE,
        [LK_CUDA_AT_PRUNE] = LK_PHASE_SELECT,  [LK_CUDA_AT_RESCAN] = LK_PHASE_SCORE,
        [LK_CUDA_AT_SELECT] = LK_PHASE_SELECT, [LK_CUDA_AT_ATTEND] = LK_PHASE_ATTEND,
    };
    const uint64_t *at = lane->clock->at;

    if (!at[LK_CUDA_AT_SCAN] || !at[LK_CUDA_AT_ATTEND])
        return;
    for (int i = LK_CUDA_AT_FEED, next; i < LK_CUDA_AT_FENCE; i = next) {
        for (next = i + 1; !at[next];)
            next++;
        /* Where nothing is scored, the scan appends. */
        bool appends = i == LK_CUDA_AT_SCAN && next == LK_CUDA_AT_ATTEND;
        phase_ns[appends ? LK_PHASE_APPEND : phase_of[i]] += at[next] - at[i];
    }
}

/* Results of a fenced batch, to where clients and the daemon look for them. */
static void hand_out(struct cuda_engine *engine, struct cuda_slot *slot) {
    uint32_t place = desk_of(slot->serial);
    const struct lk_cuda_clock *clock = engine->desk[place].clock;
    struct lk_batch *batch = slot->batch;

    batch->fenced_ns = lk_engine_now_ns();
    slot->fence_ns = clock ? clock->at[LK_CUDA_AT_FENCE] : 0;
    for (uint32_t p = 0; p < engine->pools; p++) {
        const struct lk_cuda_lane *lane = &engine->pool[p].lane[place];
        uint32_t heads = engine->pool[p].view.geometry.kv_heads;
        if (lane->count)
            add_times(lane, batch->phase_ns);
        for (uint32_t i = 0; i < lane->count; i++) {
            struct lk_row *row = &batch->rows[lane->index[i]];
            const struct lk_head_out *out = lane->results + (size_t)i * heads;
            if (!row->tokens)
                continue;
            count_bytes(&lane->block->row[i], out, row);
            if (row->result)
                memcpy(row->result, out, heads * sizeof *out);
        }
    }
}

static uint64_t load_word(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

/* -> the engine is broken. */
static bool look_for_trouble(struct cuda_engine *engine, const struct cuda_slot *slot) {
    uint64_t now = lk_engine_now_ns();

    if (engine->broken || now - slot->launched_ns < CHECK_NS || now - engine->checked_ns < CHECK_NS)
        return engine->broken;
    engine->checked_ns = now;
    cudaError_t error = cudaStreamQuery(engine->stream);
    for (uint32_t i = 0; i < LK_BATCHES_IN_FLIGHT && !error; i++)
        error = cudaStreamQuery(engine->slot[i].builder);
    if (error && error != cudaErrorNotReady)
        lk_cuda_check(engine, error, "a kernel");
    else if (now - slot->launched_ns > STUCK_NS)
        lk_cuda_broken(engine, "a batch", "it did not end within 60 seconds");
    return engine->broken;
}

static void finish(struct cuda_engine *engine, const struct cuda_slot *slot) {
    uint64_t done_ns = engine->words->clock[slot - engine->slot].at[LK_CUDA_AT_DONE];

    engine->finished++;
    if (slot->builds_after && slot->fence_ns)
        slot->batch->phase_ns[LK_PHASE_BUILD] = done_ns - slot->fence_ns;
}

/* Builds were asked for and are not there. */
static bool builds(const struct cuda_engine *engine, const struct cuda_slot *slot) {
    return slot->builds_after &&
           load_word(&engine->words->done[slot - engine->slot]) < slot->serial;
}

enum lk_mark lk_cuda_poll(struct lk_engine *base, struct lk_batch **ret) {
    struct cuda_engine *engine = lk_cuda_engine_of(base);
    struct cuda_slot *slot = &engine->slot[engine->finished % LK_BATCHES_IN_FLIGHT];

    if (engine->finished == engine->launched)
        return engine->broken ? LK_MARK_BROKEN : LK_MARK_NONE;
    if (engine->fenced < engine->launched && load_word(&engine->words->fenced) > engine->fenced) {
        struct cuda_slot *next = &engine->slot[engine->fenced++ % LK_BATCHES_IN_FLIGHT];
        hand_out(engine, next);
        *ret = next->batch;
        return LK_MARK_FENCED;
    }
    if (engine->finished < engine->fenced && !builds(engine, slot)) {
        finish(engine, slot);
        *ret = slot->batch;
        return LK_MARK_DONE;
    }
    return look_for_trouble(engine, slot) ? LK_MARK_BROKEN : LK_MARK_NONE;
}

const char *lk_cuda_trouble(const struct lk_engine *base) {
    return ((const struct cuda_engine *)base)->trouble;
}

bool lk_cuda_hot(const struct lk_engine *base) {
    const struct cuda_engine *engine = (const struct cuda_engine *)base;
    const struct cuda_slot *slot = &engine->slot[engine->finished % LK_BATCHES_IN_FLIGHT];

    if (engine->finished != engine->launched && lk_engine_now_ns() - slot->launched_ns < HOT_NS)
        return true;
    return lk_cuda_sentry_hot(&engine->sentry);
}

/* ---- sleep ---- */

static void ring(struct cuda_engine *engine) {
    uint64_t one = 1;

    if (write(engine->event, &one, sizeof one) < 0)
        return; /* EAGAIN: the counter is full, so the descriptor is readable already */
}

/* A number that grows with every mark. */
static uint64_t marks_of(const struct cuda_engine *engine) {
    uint64_t marks = load_word(&engine->words->fenced);

    for (uint32_t i = 0; i < LK_BATCHES_IN_FLIGHT; i++)
        marks += load_word(&engine->words->done[i]);
    return marks;
}

/* Looks at the words until they move on from what the sleeper has seen. A second without that rings
 * as well: the sleeper then looks for trouble. */
static void watch(struct cuda_engine *engine) {
    const struct timespec pause = {.tv_nsec = WAIT_NS};
    uint64_t begun = lk_engine_now_ns();

    while (__atomic_load_n(&engine->sleeping, __ATOMIC_ACQUIRE) &&
           marks_of(engine) == load_word(&engine->seen_marks) &&
           lk_engine_now_ns() - begun < RING_NS)
        nanosleep(&pause, NULL);
    if (__atomic_load_n(&engine->sleeping, __ATOMIC_ACQUIRE))
        ring(engine);
}

void *lk_cuda_run_waker(void *context) {
    struct cuda_engine *engine = context;

    for (;;) {
        while (sem_wait(&engine->wake))
            ;
        if (__atomic_load_n(&engine->stop, __ATOMIC_ACQUIRE))
            return NULL;
        watch(engine);
    }
}

int lk_cuda_fd(const struct lk_engine *base) {
    return ((const struct cuda_engine *)base)->event;
}

void lk_cuda_sleep(struct lk_engine *base, bool sleeping) {
    struct cuda_engine *engine = lk_cuda_engine_of(base);
    uint64_t drained;

    if (sleeping && engine->finished != engine->launched) {
        __atomic_store_n(&engine->seen_marks, marks_of(engine), __ATOMIC_RELEASE);
        __atomic_store_n(&engine->sleeping, true, __ATOMIC_RELEASE);
        sem_post(&engine->wake);
    }
    if (sleeping)
        return;
    __atomic_store_n(&engine->sleeping, false, __ATOMIC_RELEASE);
    if (read(engine->event, &drained, sizeof drained) < 0)
        return; /* EAGAIN: nothing to drain */
}
