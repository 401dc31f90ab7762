/* SPDX-License-Identifier: MIT */
/*
 * inlet.c - see inlet.h.
 */
#include "inlet.h"

#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../../shm_protocol/atomics.h"

#define SECONDS        60.0 /* until what must happen is said not to, see patience() */
#define TOLERANCE_CPU  1e-4
#define TOLERANCE_CUDA 1e-3 /* as scene.h has it */

static double now(void) {
    return (double)lk_intake_now_ns() * 1e-9;
}

/* A hang is what it must catch, not a slow machine: where a part of a long row takes 5 s, under
 * ThreadSanitizer, six of them on two processors take 20. Slow builds are told to Check. */
static double patience(void) {
    const char *multiplier = getenv("CK_TIMEOUT_MULTIPLIER");
    double by = multiplier ? atof(multiplier) : 1;
    return SECONDS * (by > 1 ? by : 1);
}

/* ---- forms ---- */

/* A variable of the environment -> whether it is `other`; unset or `usual`: it is not. */
static bool form(const char *name, const char *usual, const char *other) {
    const char *value = getenv(name);
    bool is_other = value && strcmp(value, other) == 0;
    ck_assert_msg(!value || is_other || strcmp(value, usual) == 0, "%s=%s: it may be %s or %s",
                  name, value, usual, other);
    return is_other;
}

static enum lk_device form_device(void) {
    return form("LOCKSD_TEST_DEVICE", "cpu", "cuda") ? LK_DEVICE_CUDA : LK_DEVICE_CPU;
}

static enum lk_element form_dtype(void) {
    bool bf16 = form("LOCKSD_TEST_DTYPE", "fp32", "bf16");
    return bf16 || form_device() == LK_DEVICE_CUDA ? LK_BF16 : LK_FP32;
}

bool inlet_skips(const struct inlet *inlet, const char *what, const char *why) {
    if (inlet->config.resolved != LK_DEVICE_CUDA)
        return false;
    printf("skipped on a GPU: %s: %s\n", what, why);
    fflush(stdout);
    return true;
}

/* ---- the daemon's side ---- */

void inlet_pool(struct lk_config *config, struct lk_geometry geometry, uint64_t pages) {
    struct lk_pool_config *pool = &config->pool[0];
    geometry.dtype = form_dtype();
    pool->geometry = geometry;
    pool->memory_bytes = lk_engine_pool_bytes(config->resolved, &geometry, pages);
}

void inlet_config(struct lk_config *config, uint64_t pages) {
    lk_config_defaults(config);
    config->device = config->resolved = form_device();
    config->gpu = 0;
    config->pools = 1;
    config->threads = 2;
    config->pool[0] = (struct lk_pool_config){
        .name = "default", .max_sequences = 64, .budget = 64, .scan = LK_SCAN_FULL};
    struct lk_geometry geometry = {
        .layers = 2, .kv_heads = 2, .group = 2, .head_dim = 64, .page_tokens = 16, .rank = 4};
    inlet_pool(config, geometry, pages);
}

void inlet_open(struct inlet *inlet, const struct lk_config *config) {
    char why[512] = "";
    *inlet = (struct inlet){.config = *config};
    struct lk_engine_options options = {.device = config->resolved,
                                        .gpu = config->gpu,
                                        .threads = config->threads,
                                        .spin_us = config->spin_us,
                                        .workspace_bytes = lk_workspace_bytes(config)};
    ck_assert_msg(lk_engine_open(&options, &inlet->engine, why, sizeof(why)) == 0, "%s", why);
    ck_assert_int_eq(lk_engine_device(inlet->engine), config->resolved);
    ck_assert_msg(lk_intake_open(config, inlet->engine, &inlet->intake, why, sizeof(why)) == 0,
                  "%s", why);
    ck_assert_int_eq(lk_intake_start(inlet->intake), 0);
}

void inlet_close(struct inlet *inlet) {
    lk_intake_stop(inlet->intake);
    lk_intake_close(inlet->intake);
    lk_engine_close(inlet->engine);
}

struct check_call {
    char why[512];
    int rc;
    bool idle;
};

static void check_call(struct lk_intake *intake, void *argument) {
    struct check_call *call = argument;
    call->idle = intake->in_flight == 0;
    call->rc = lk_intake_check(intake, call->why, sizeof(call->why));
}

void inlet_check(struct inlet *inlet) {
    struct check_call call = {.why = ""};
    lk_intake_call(inlet->intake, check_call, &call);
    ck_assert_msg(call.rc == 0, "%s", call.why);
}

void inlet_check_idle(struct inlet *inlet) {
    struct check_call call = {.why = ""};
    double end = now() + patience();
    do {
        lk_intake_call(inlet->intake, check_call, &call);
        ck_assert_msg(call.rc == 0, "%s", call.why);
    } while (!call.idle && now() < end);
    ck_assert(call.idle);
}

struct lk_intake_status inlet_status(struct inlet *inlet) {
    struct lk_intake_status status;
    lk_intake_status(inlet->intake, &status);
    return status;
}

/* ---- clients ---- */

static void on_released(void *owner, uint32_t id) {
    struct inlet *inlet = owner;
    (void)id;
    __atomic_add_fetch(&inlet->released, 1, __ATOMIC_RELEASE);
}

int inlet_connect(struct inlet *inlet, struct inlet_client *client, uid_t uid, uint32_t sq_entries,
                  uint64_t first_index) {
    char why[512] = "";
    *client = (struct inlet_client){.inlet = inlet};
    client->id = __atomic_add_fetch(&inlet->last_id, 1, __ATOMIC_RELAXED);
    struct lk_channel_memory *m = &client->memory;
    ck_assert_msg(lk_channel_memory_create(sq_entries, 16 << 20, 1, first_index, NULL, m, why,
                                           sizeof(why)) == 0,
                  "%s", why);
    struct lk_channel_open open = {.id = client->id,
                                   .uid = uid,
                                   .pid = getpid(),
                                   .name = "test",
                                   .sq_entries = m->sizes.sq_entries,
                                   .cq_entries = m->sizes.cq_entries,
                                   .submission = m->submission,
                                   .completion = m->completion,
                                   .arena = m->arena,
                                   .submission_bytes = m->sizes.submission_bytes,
                                   .arena_bytes = m->sizes.arena_bytes,
                                   .bell = m->bell,
                                   .released = on_released,
                                   .owner = inlet};
    lk_ring_client_init(&client->ring, m->submission, m->completion, &m->sizes);
    int rc = lk_intake_channel_add(inlet->intake, &open, why, sizeof(why));
    if (rc) {
        ck_assert(why[0]);
        lk_channel_memory_destroy(m);
    }
    return rc;
}

void inlet_disconnect(struct inlet_client *client) {
    uint32_t before = __atomic_load_n(&client->inlet->released, __ATOMIC_ACQUIRE);
    double end = now() + patience();
    lk_intake_channel_remove(client->inlet->intake, client->id);
    while (__atomic_load_n(&client->inlet->released, __ATOMIC_ACQUIRE) == before && now() < end)
        sched_yield();
    ck_assert_msg(__atomic_load_n(&client->inlet->released, __ATOMIC_ACQUIRE) != before,
                  "the channel is not released");
    lk_intake_channel_forget(client->inlet->intake, client->memory.arena);
    lk_channel_memory_destroy(&client->memory);
}

void *inlet_alloc(struct inlet_client *client, uint64_t bytes) {
    uint64_t at = client->used;
    client->used += (bytes + LK_LINE - 1) / LK_LINE * LK_LINE;
    ck_assert_msg(client->used <= client->memory.sizes.arena_bytes, "the test's arena is full");
    return client->memory.arena + at;
}

uint64_t inlet_offset(const struct inlet_client *client, const void *memory) {
    return (uint64_t)((const uint8_t *)memory - client->memory.arena);
}

bool inlet_submit(struct inlet_client *client, uint16_t op, const void *desc, uint32_t bytes,
                  uint64_t user_data) {
    struct lk_sqe *sqe;
    void *to;
    if (lk_ring_client_reserve(&client->ring, bytes, &sqe, &to))
        return false;
    sqe->op = op;
    sqe->user_data = user_data;
    if (bytes)
        memcpy(to, desc, bytes);
    lk_ring_client_publish(&client->ring);
    if (lk_ring_client_must_wake(&client->ring))
        lk_bell_ring(client->memory.client_fds[LK_FD_BELL]);
    return true;
}

bool inlet_poll(struct inlet_client *client, double seconds, struct lk_cqe *ret) {
    double end = now() + seconds;
    const struct lk_cqe *cqe;
    while (!(cqe = lk_ring_client_peek(&client->ring))) {
        if (now() >= end)
            return false;
        sched_yield();
    }
    *ret = *cqe;
    if (lk_ring_client_advance(&client->ring) && lk_ring_client_must_wake(&client->ring))
        lk_bell_ring(client->memory.client_fds[LK_FD_BELL]);
    return true;
}

struct lk_cqe inlet_wait(struct inlet_client *client) {
    struct lk_cqe cqe = {0};
    ck_assert_msg(inlet_poll(client, patience(), &cqe), "no completion comes");
    return cqe;
}

struct lk_cqe inlet_do(struct inlet_client *client, uint16_t op, const void *desc, uint32_t bytes) {
    ck_assert(inlet_submit(client, op, desc, bytes, op));
    struct lk_cqe cqe = inlet_wait(client);
    ck_assert_uint_eq(cqe.user_data, op);
    ck_assert_uint_eq(cqe.op, op);
    return cqe;
}

/* ---- shapes ---- */

void inlet_step(struct inlet_step *step) {
    step->step = (struct lk_step_desc){.sampled = -1,
                                       .sink_pages = LK_SINK_PAGES_DEFAULT,
                                       .recent_pages = LK_RECENT_PAGES_DEFAULT,
                                       .results = LK_NONE,
                                       .timing = LK_NONE};
}

struct lk_row_desc *inlet_row(struct inlet_step *step, uint64_t handle, uint32_t layer,
                              uint64_t position, uint32_t tokens) {
    struct lk_row_desc *row = &step->row[step->step.rows++];
    *row = (struct lk_row_desc){.handle = handle,
                                .position = position,
                                .layer = layer,
                                .tokens = tokens,
                                .lse = LK_NONE,
                                .list = LK_NONE};
    return row;
}

struct lk_cqe inlet_object(struct inlet_client *client, uint16_t op, uint64_t handle,
                           uint64_t length) {
    struct lk_object_desc desc = {.handle = handle, .length = length};
    return inlet_do(client, op, &desc, sizeof(desc));
}

static uint64_t must(struct lk_cqe cqe) {
    char text[LK_REASON_BYTES];
    ck_assert_msg(cqe.status == 0, "operation %u: %s", cqe.op,
                  lk_reason_text(cqe.reason, cqe.value, cqe.limit, cqe.row, text, sizeof(text)));
    return cqe.value;
}

void inlet_must(struct lk_cqe cqe) {
    must(cqe);
}

void inlet_refused(struct lk_cqe cqe, enum lk_reason reason, uint64_t value, uint64_t limit,
                   uint32_t row) {
    char text[LK_REASON_BYTES];
    lk_reason_text(cqe.reason, cqe.value, cqe.limit, cqe.row, text, sizeof(text));
    ck_assert_msg(cqe.reason == reason && cqe.value == value && cqe.limit == limit &&
                      cqe.row == row && cqe.status == lk_reason_errno((uint16_t)reason),
                  "operation %u, status %d: %s", cqe.op, cqe.status, text);
}

uint64_t inlet_create(struct inlet_client *client) {
    return must(inlet_object(client, LK_OP_SEQUENCE_CREATE, 0, 0));
}
uint64_t inlet_fork(struct inlet_client *client, uint64_t handle) {
    return must(inlet_object(client, LK_OP_SEQUENCE_FORK, handle, 0));
}
void inlet_truncate(struct inlet_client *client, uint64_t handle, uint64_t length) {
    must(inlet_object(client, LK_OP_SEQUENCE_TRUNCATE, handle, length));
}
void inlet_free(struct inlet_client *client, uint64_t handle) {
    must(inlet_object(client, LK_OP_SEQUENCE_FREE, handle, 0));
}
uint64_t inlet_lease(struct inlet_client *client, uint64_t pages) {
    return must(inlet_object(client, LK_OP_LEASE_OPEN, 0, pages));
}

bool inlet_same(const void *a, const void *b, size_t bytes) {
    return memcmp(a, b, bytes) == 0;
}

/* ---- tokens ---- */

uint64_t inlet_random(uint64_t *state) {
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

void inlet_fill(float *to, uint64_t id, int v, uint32_t layer, uint64_t count) {
    uint64_t state = id * 8 + (uint64_t)v + ((uint64_t)layer << 48);
    for (uint64_t i = 0; i < count; i++)
        to[i] = (float)((int)((inlet_random(&state) >> 40) % 255) - 127) / 128;
}

static float *floats(uint64_t count) {
    float *values = calloc(count, sizeof(*values));
    if (!values)
        ck_abort_msg("no memory");
    return values;
}

uint32_t inlet_element(const struct inlet *inlet) {
    return inlet->config.pool[0].geometry.dtype == LK_FP32 ? 4 : 2;
}

void inlet_store(const struct inlet *inlet, void *to, uint64_t id, int v, uint32_t layer,
                 uint64_t count) {
    uint32_t element = inlet_element(inlet), bits;
    float *values = floats(count);
    inlet_fill(values, id, v, layer, count);
    for (uint64_t i = 0; i < count; i++) {
        memcpy(&bits, &values[i], sizeof(bits));
        if (bits & 0xffff) /* bf16 is the upper half; an assertion writes to a file even if true */
            ck_abort_msg("%g is not exact in bf16", (double)values[i]);
        memcpy((uint8_t *)to + i * element, (uint8_t *)&bits + 4 - element, element);
    }
    free(values);
}

void inlet_count(uint64_t *ids, uint64_t count, uint64_t first) {
    for (uint64_t i = 0; i < count; i++)
        ids[i] = first + i;
}

static uint64_t fill_row(struct inlet_client *client, uint32_t layer, const uint64_t *ids,
                         uint32_t count, int v) {
    const struct lk_geometry *g = &client->inlet->config.pool[0].geometry;
    uint64_t width = (uint64_t)g->kv_heads * g->head_dim * (v == 2 ? g->group : 1);
    uint64_t bytes = width * inlet_element(client->inlet);
    uint8_t *to = inlet_alloc(client, count * bytes);
    for (uint64_t i = 0; i < count; i++)
        inlet_store(client->inlet, to + i * bytes, ids[i], v, layer, width);
    return inlet_offset(client, to);
}

void inlet_give_kv(struct inlet_client *client, struct lk_row_desc *row, const uint64_t *ids) {
    row->k = fill_row(client, row->layer, ids, row->tokens, 0);
    row->v = fill_row(client, row->layer, ids, row->tokens, 1);
}

float *inlet_give_q(struct inlet_client *client, struct lk_row_desc *row, uint64_t first_id) {
    const struct lk_geometry *g = &client->inlet->config.pool[0].geometry;
    uint64_t values = (uint64_t)row->tokens * g->kv_heads * g->group * g->head_dim;
    uint64_t *ids = malloc(row->tokens * sizeof(*ids));
    ck_assert(ids != NULL);
    inlet_count(ids, row->tokens, first_id);
    row->q = fill_row(client, row->layer, ids, row->tokens, 2);
    free(ids);
    float *out = inlet_alloc(client, values * sizeof(float));
    for (uint64_t i = 0; i < values; i++)
        out[i] = 1;
    row->out = inlet_offset(client, out);
    return out;
}

void inlet_append(struct inlet_client *client, uint64_t handle, uint32_t layer, uint64_t position,
                  const uint64_t *ids, uint32_t count) {
    static _Thread_local struct inlet_step step;
    inlet_step(&step);
    inlet_give_kv(client, inlet_row(&step, handle, layer, position, count), ids);
    must(inlet_do(client, LK_OP_APPEND, &step, inlet_step_bytes(&step)));
}

/* One query head over the tokens. */
static void attend(const float *q, const uint64_t *ids, uint64_t count, uint32_t layer,
                   uint32_t head, const struct lk_geometry *g, double *ret) {
    uint64_t width = (uint64_t)g->kv_heads * g->head_dim;
    float *k = floats(width), *v = floats(width);
    double peak = -INFINITY, sum = 0;
    memset(ret, 0, g->head_dim * sizeof(double));
    for (uint64_t i = 0; i < count; i++) {
        double z = 0;
        inlet_fill(k, ids[i], 0, layer, width);
        inlet_fill(v, ids[i], 1, layer, width);
        for (uint32_t c = 0; c < g->head_dim; c++)
            z += (double)q[c] * (double)k[head * g->head_dim + c];
        z /= sqrt((double)g->head_dim);
        double old = z > peak ? exp(peak - z) : 1, weight = z > peak ? 1 : exp(z - peak);
        peak = z > peak ? z : peak;
        sum = sum * old + weight;
        for (uint32_t c = 0; c < g->head_dim; c++)
            ret[c] = ret[c] * old + weight * (double)v[head * g->head_dim + c];
    }
    for (uint32_t c = 0; c < g->head_dim && sum > 0; c++)
        ret[c] /= sum;
    free(k);
    free(v);
}

double inlet_tolerance(const struct inlet *inlet) {
    return inlet->config.resolved == LK_DEVICE_CUDA ? TOLERANCE_CUDA : TOLERANCE_CPU;
}

double inlet_error(const struct inlet *inlet, uint64_t query, const float *out, const uint64_t *ids,
                   uint64_t count, uint32_t layer) {
    const struct lk_geometry *g = &inlet->config.pool[0].geometry;
    uint64_t heads = (uint64_t)g->kv_heads * g->group;
    float *q = floats(heads * g->head_dim);
    double exact[LK_HEAD_DIM_MAX], worst = 0;
    inlet_fill(q, query, 2, layer, heads * g->head_dim);
    for (uint32_t h = 0; h < heads; h++) {
        double peak = 0, square = 0, size = 0;
        attend(q + h * g->head_dim, ids, count, layer, h / g->group, g, exact);
        for (uint32_t c = 0; c < g->head_dim; c++) {
            double error = fabs((double)out[h * g->head_dim + c] - exact[c]);
            peak = error > peak || error != error ? error : peak;
            square += error * error;
            size += exact[c] * exact[c];
        }
        double error = peak;
        if (inlet->config.resolved == LK_DEVICE_CUDA)
            error = size > 0 ? sqrt(square / size) : sqrt(square);
        worst = error > worst || error != error ? error : worst;
    }
    free(q);
    return worst;
}
