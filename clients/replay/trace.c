/* SPDX-License-Identifier: MIT */
/*
 * trace.c - finds a trace's tensors and checks that they fit together.
 *
 * The first layer says what shape all layers have; every sentence names file, tensor and what was
 * expected.
 */
#include "replay.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>
#include <unistd.h>

#include "../../kernels/kernels.h"
#include "../../shm_protocol/printable.h"
#include "../common/progress.h"

#define NAMES_SHOWN 4         /* of a file that is no trace */
#define PIECE_BYTES (4 << 20) /* looked through between two words of progress */

/* Leaves a sentence that names the file, -> EX_DATAERR. */
#define bad(trace, why, format, ...)                                                               \
    (snprintf(why, REPLAY_WHY_BYTES, "%s: " format, lk_safetensors_path((trace)->file),            \
              ##__VA_ARGS__),                                                                      \
     EX_DATAERR)

/* ---- which layers there are ---- */

static int ascending(const void *a, const void *b) {
    const struct replay_layer *x = a, *y = b;
    return (x->number > y->number) - (x->number < y->number);
}

static bool has_layer(const struct replay_trace *trace, uint32_t number) {
    for (uint32_t i = 0; i < trace->layer_count; i++)
        if (trace->layers[i].number == number)
            return true;
    return false;
}

/* "layers.L.q", "layers.L.k" or "layers.L.v". */
static bool layer_of(const char *name, uint32_t *ret) {
    char part, again[32];
    if (sscanf(name, "layers.%" SCNu32 ".%c", ret, &part) != 2 || !strchr("qkv", part))
        return false;
    snprintf(again, sizeof(again), "layers.%" PRIu32 ".%c", *ret, part);
    return strcmp(name, again) == 0; /* sscanf also takes signs, and what overflows */
}

static int no_layers(const struct replay_trace *trace, char *why) {
    char found[512] = "no tensor";
    size_t count = lk_safetensors_count(trace->file), at = 0;
    for (size_t i = 0; i < count && i < NAMES_SHOWN; i++)
        at += (size_t)snprintf(found + at, sizeof(found) - at, "%s%.80s", i ? ", " : "",
                               lk_safetensors_at(trace->file, i)->name);
    if (count > NAMES_SHOWN)
        snprintf(found + at, sizeof(found) - at, " and %zu more", count - NAMES_SHOWN);
    return bad(trace, why,
               "no tensor layers.L.q [steps, q_heads, d], layers.L.k or layers.L.v "
               "[tokens, kv_heads, d]: not a trace; it has %s",
               found);
}

static int find_layers(const struct replay_options *options, struct replay_trace *trace,
                       char *why) {
    size_t count = lk_safetensors_count(trace->file);
    uint32_t number;
    trace->layers = calloc(REPLAY_LAYERS_MAX, sizeof(*trace->layers));
    if (!trace->layers) {
        snprintf(why, REPLAY_WHY_BYTES, "no memory for the trace's layers");
        return EX_OSERR;
    }
    for (; trace->layer_count < options->layer_count; trace->layer_count++)
        trace->layers[trace->layer_count].number = options->layers[trace->layer_count];
    for (size_t i = 0; i < count && !options->layer_count; i++) {
        if (!layer_of(lk_safetensors_at(trace->file, i)->name, &number) || has_layer(trace, number))
            continue;
        if (trace->layer_count == REPLAY_LAYERS_MAX)
            return bad(trace, why, "more than %d layers; choose some by --layers",
                       REPLAY_LAYERS_MAX);
        trace->layers[trace->layer_count++].number = number;
    }
    if (!trace->layer_count)
        return no_layers(trace, why);
    qsort(trace->layers, trace->layer_count, sizeof(*trace->layers), ascending);
    return 0;
}

/* ---- one tensor ---- */

static int need(const struct replay_trace *trace, uint32_t number, char part,
                const struct lk_tensor **ret, char *why) {
    char name[32], shape[128];
    const char *wanted = part == 'q' ? "[steps, q_heads, d]" : "[tokens, kv_heads, d]";
    snprintf(name, sizeof(name), "layers.%" PRIu32 ".%c", number, part);
    const struct lk_tensor *t = lk_safetensors_find(trace->file, name);
    if (!t)
        return bad(trace, why, "no tensor %s %s", name, wanted);
    if (t->type != LK_TENSOR_F16 && t->type != LK_TENSOR_BF16 && t->type != LK_TENSOR_F32)
        return bad(trace, why, "tensor %s is of %s, expected F16, BF16 or F32", name,
                   lk_tensor_type_name(t->type));
    lk_tensor_shape_text(t, shape, sizeof(shape));
    if (t->dims != 3)
        return bad(trace, why, "tensor %s has shape %s, expected three dimensions %s", name, shape,
                   wanted);
    for (uint32_t i = 0; i < 3; i++)
        if (!t->shape[i] || t->shape[i] > UINT32_MAX)
            return bad(trace, why, "tensor %s has shape %s, dimension %u must be between 1 and %u",
                       name, shape, i, UINT32_MAX);
    *ret = t;
    return 0;
}

/* Before a daemon is asked, which would refuse its pool and not the trace. */
static int check_served(const struct replay_trace *trace, const struct lk_tensor *q,
                        const struct lk_tensor *k, char *why) {
    const struct lk_geometry of = {1, trace->kv_heads, trace->group, trace->head_dim, 16,
                                   8, LK_BF16};
    char shape[128], text[128];
    if (!lk_geometry_invalid(&of, text, sizeof(text)))
        return 0;
    const struct lk_tensor *wrong = strncmp(text, "kv_heads", 8) == 0 ? k : q;
    return bad(trace, why, "tensor %s has shape %s: %s", wrong->name,
               lk_tensor_shape_text(wrong, shape, sizeof(shape)), text);
}

/* The shape of all, from the first layer's q and k. */
static int take_shape(struct replay_trace *trace, const struct lk_tensor *q,
                      const struct lk_tensor *k, char *why) {
    char shape[128], of_k[128];
    lk_tensor_shape_text(q, shape, sizeof(shape));
    lk_tensor_shape_text(k, of_k, sizeof(of_k));
    if (q->shape[0] > k->shape[0])
        return bad(trace, why, "tensor %s has shape %s, more steps than %s has tokens, %s", q->name,
                   shape, k->name, of_k);
    if (q->shape[1] % k->shape[1])
        return bad(trace, why,
                   "tensor %s has shape %s: its %" PRIu64
                   " query heads are no multiple of the %" PRIu64 " KV heads of %s",
                   q->name, shape, q->shape[1], k->shape[1], k->name);
    trace->steps = q->shape[0];
    trace->q_heads = (uint32_t)q->shape[1];
    trace->head_dim = (uint32_t)q->shape[2];
    trace->tokens = k->shape[0];
    trace->kv_heads = (uint32_t)k->shape[1];
    trace->group = trace->q_heads / trace->kv_heads;
    trace->type = q->type;
    trace->dtype = q->type == LK_TENSOR_F16    ? LK_DTYPE_FP16
                   : q->type == LK_TENSOR_BF16 ? LK_DTYPE_BF16
                                               : LK_DTYPE_FP32;
    int rc = check_served(trace, q, k, why);
    if (rc)
        return rc;
    uint64_t row = trace->head_dim * lk_tensor_element_bytes(q->type);
    trace->q_bytes = row * trace->q_heads;
    trace->kv_bytes = row * trace->kv_heads;
    return 0;
}

static int check_shape(const struct replay_trace *trace, const struct lk_tensor *t, bool is_q,
                       char *why) {
    char shape[128];
    const uint64_t wanted[3] = {is_q ? trace->steps : trace->tokens,
                                is_q ? trace->q_heads : trace->kv_heads, trace->head_dim};
    if (t->type != trace->type)
        return bad(trace, why, "tensor %s is of %s, expected %s as layers.%" PRIu32 ".q", t->name,
                   lk_tensor_type_name(t->type), lk_tensor_type_name(trace->type),
                   trace->layers[0].number);
    if (memcmp(t->shape, wanted, sizeof(wanted)) != 0)
        return bad(trace, why,
                   "tensor %s has shape %s, expected [%" PRIu64 ", %" PRIu64 ", %" PRIu64
                   "] to go with layers.%" PRIu32,
                   t->name, lk_tensor_shape_text(t, shape, sizeof(shape)), wanted[0], wanted[1],
                   wanted[2], trace->layers[0].number);
    return 0;
}

static int take_layer(struct replay_trace *trace, uint32_t index, char *why) {
    static const char parts[] = "qkv";
    struct replay_layer *layer = &trace->layers[index];
    const struct lk_tensor *t[3];
    int rc = 0;
    for (int i = 0; i < 3 && !rc; i++)
        rc = need(trace, layer->number, parts[i], &t[i], why);
    if (!rc && index == 0)
        rc = take_shape(trace, t[0], t[1], why);
    for (int i = 0; i < 3 && !rc; i++)
        rc = check_shape(trace, t[i], i == 0, why);
    if (rc)
        return rc;
    layer->q = t[0]->data;
    layer->k = t[1]->data;
    layer->v = t[2]->data;
    return 0;
}

/* ---- values ---- */

/* Elements whose exponent is all ones: NaN and infinity. */
static uint64_t not_finite(const struct replay_trace *trace, const uint8_t *data, uint64_t bytes) {
    uint64_t count = 0;
    if (trace->type == LK_TENSOR_F32) {
        for (uint64_t i = 0; i < bytes; i += 4) {
            uint32_t bits;
            memcpy(&bits, data + i, sizeof(bits));
            count += (bits & 0x7f800000) == 0x7f800000;
        }
        return count;
    }
    uint16_t mask = trace->type == LK_TENSOR_F16 ? 0x7c00 : 0x7f80;
    for (uint64_t i = 0; i < bytes; i += 2) {
        uint16_t bits;
        memcpy(&bits, data + i, sizeof(bits));
        count += (bits & mask) == mask;
    }
    return count;
}

/* *done: bytes of the trace that were looked at. */
static uint64_t count_in_tensor(const struct replay_trace *trace, const uint8_t *data,
                                uint64_t bytes, struct lk_progress *progress, uint64_t *done) {
    uint64_t count = 0;
    for (uint64_t at = 0, piece; at < bytes; at += piece) {
        piece = bytes - at < PIECE_BYTES ? bytes - at : PIECE_BYTES;
        count += not_finite(trace, data + at, piece);
        lk_progress_at(progress, *done += piece);
    }
    return count;
}

void replay_trace_check(const struct replay_trace *trace) {
    const uint64_t q_bytes = trace->steps * trace->q_bytes;
    const uint64_t kv_bytes = trace->tokens * trace->kv_bytes;
    struct lk_progress progress;
    uint64_t done = 0;
    char first[128];
    uint32_t tensors = 0;
    lk_progress_begin(&progress, "looking through the trace",
                      trace->layer_count * (q_bytes + 2 * kv_bytes));
    for (uint32_t i = 0; i < trace->layer_count; i++)
        for (int part = 0; part < 3; part++) {
            const struct replay_layer *layer = &trace->layers[i];
            const uint8_t *data = part == 0 ? layer->q : part == 1 ? layer->k : layer->v;
            uint64_t bytes = part == 0 ? q_bytes : kv_bytes;
            uint64_t count = count_in_tensor(trace, data, bytes, &progress, &done);
            if (count && !tensors++)
                snprintf(first, sizeof(first), "layers.%" PRIu32 ".%c (%" PRIu64 " of %" PRIu64 ")",
                         layer->number, "qkv"[part], count,
                         bytes / lk_tensor_element_bytes(trace->type));
        }
    lk_progress_end(&progress, true);
    if (tensors)
        fprintf(stderr,
                "locks-replay: warning: %s: values of tensor %s are NaN or infinite; tensors with "
                "such values: %" PRIu32 ". Figures of steps that they reach mean nothing\n",
                lk_safetensors_path(trace->file), first, tensors);
}

/* ---- a file that is cut short while it is mapped ---- */

static char cut_words[REPLAY_WHY_BYTES];

static void say_cut(int signal) { /* handler, the last of the chain: see common/deadly.h */
    (void)signal;
    _exit(write(STDERR_FILENO, cut_words, strlen(cut_words)) < 0 ? EX_IOERR : EX_DATAERR);
}

static void watch_file(const char *path) {
    struct sigaction action = {.sa_handler = say_cut};
    char shown[REPLAY_WHY_BYTES / 2];
    sigemptyset(&action.sa_mask);
    snprintf(shown, sizeof(shown), "%s", path);
    snprintf(cut_words, sizeof(cut_words),
             "locks-replay: %s: was cut short while it was read, or cannot be read any more\n",
             lk_printable(shown, ""));
    sigaction(SIGBUS, &action, NULL);
}

int replay_trace_open(const struct replay_options *options, struct replay_trace *ret, char *why) {
    struct replay_trace trace = {0};
    watch_file(options->trace);
    int rc = lk_safetensors_open(options->trace, &trace.file, why, REPLAY_WHY_BYTES);
    if (rc)
        return rc == -EINVAL ? EX_DATAERR : rc == -ENOMEM ? EX_OSERR : EX_NOINPUT;
    rc = find_layers(options, &trace, why);
    for (uint32_t i = 0; i < trace.layer_count && !rc; i++)
        rc = take_layer(&trace, i, why);
    if (rc) {
        replay_trace_close(&trace);
        return rc;
    }
    *ret = trace;
    return 0;
}

void replay_trace_close(struct replay_trace *trace) {
    lk_safetensors_close(trace->file);
    free(trace->layers);
    *trace = (struct replay_trace){0};
}
