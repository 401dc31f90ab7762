/* SPDX-License-Identifier: MIT */
/*
 * safetensors.c - see safetensors.h.
 */
#include "safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "measure.h"

#define LENGTH_BYTES     8
#define HEADER_BYTES_MAX (UINT64_C(100) << 20) /* the format's own limit */
#define NAME_SHOWN       64                    /* characters of a hostile name in a sentence */

struct lk_safetensors {
    char *path;
    uint8_t *map;
    uint64_t bytes; /* of the file */
    struct lk_tensor *tensors;
    size_t count;
    json_t *header; /* owns the names */
};

static const struct {
    const char *name;
    enum lk_tensor_type type;
    uint64_t element_bytes;
} types[] = {
    {"F16", LK_TENSOR_F16, 2},       {"BF16", LK_TENSOR_BF16, 2},
    {"F32", LK_TENSOR_F32, 4},       {"I32", LK_TENSOR_I32, 4},
    {"BOOL", LK_TENSOR_OTHER, 1},    {"U8", LK_TENSOR_OTHER, 1},
    {"I8", LK_TENSOR_OTHER, 1},      {"F8_E5M2", LK_TENSOR_OTHER, 1},
    {"F8_E4M3", LK_TENSOR_OTHER, 1}, {"F8_E8M0", LK_TENSOR_OTHER, 1},
    {"I16", LK_TENSOR_OTHER, 2},     {"U16", LK_TENSOR_OTHER, 2},
    {"U32", LK_TENSOR_OTHER, 4},     {"I64", LK_TENSOR_OTHER, 8},
    {"U64", LK_TENSOR_OTHER, 8},     {"F64", LK_TENSOR_OTHER, 8},
    {"C64", LK_TENSOR_OTHER, 8},
};
#define TYPES (sizeof(types) / sizeof(*types))

__attribute__((format(printf, 4, 5))) static int refuse(int error, char *why, size_t bytes,
                                                        const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(why, bytes, format, list);
    va_end(list);
    return error;
}

const char *lk_tensor_type_name(enum lk_tensor_type type) {
    for (size_t i = 0; i < TYPES && type != LK_TENSOR_OTHER; i++)
        if (types[i].type == type)
            return types[i].name;
    return "another type";
}

uint64_t lk_tensor_element_bytes(enum lk_tensor_type type) {
    for (size_t i = 0; i < TYPES && type != LK_TENSOR_OTHER; i++)
        if (types[i].type == type)
            return types[i].element_bytes;
    return 0;
}

const char *lk_tensor_shape_text(const struct lk_tensor *tensor, char *text, size_t bytes) {
    size_t at = 0;
    text[0] = '\0';
    for (uint32_t i = 0; i < tensor->dims && at < bytes; i++)
        at +=
            (size_t)snprintf(text + at, bytes - at, "%s%" PRIu64, i ? ", " : "[", tensor->shape[i]);
    if (at < bytes)
        snprintf(text + at, bytes - at, "%s", tensor->dims ? "]" : "[]");
    return text;
}

/* ---- reading: one entry of the header ---- */

struct reader { /* what a sentence about an entry needs */
    const char *path;
    const char *name;
    uint64_t data_bytes; /* of the file, after the header */
    char *why;
    size_t why_bytes;
};

__attribute__((format(printf, 2, 3))) static int bad(const struct reader *r, const char *format,
                                                     ...) {
    char text[256];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof(text), format, list);
    va_end(list);
    return refuse(-EINVAL, r->why, r->why_bytes, "%s: tensor %.*s %s", r->path, NAME_SHOWN, r->name,
                  text);
}

static bool whole(const json_t *value, uint64_t *ret) {
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return false;
    *ret = (uint64_t)json_integer_value(value);
    return true;
}

static int read_type(const struct reader *r, const json_t *entry, struct lk_tensor *tensor,
                     uint64_t *ret_element_bytes) {
    const char *name = json_string_value(json_object_get(entry, "dtype"));
    if (!name)
        return bad(r, "has no \"dtype\" string");
    for (size_t i = 0; i < TYPES; i++)
        if (strcmp(types[i].name, name) == 0) {
            tensor->type = types[i].type;
            *ret_element_bytes = types[i].element_bytes;
            return 0;
        }
    return bad(r, "has dtype \"%.32s\", which is not known", name);
}

static int read_shape(const struct reader *r, const json_t *entry, struct lk_tensor *tensor,
                      uint64_t *bytes) {
    const json_t *shape = json_object_get(entry, "shape");
    if (!json_is_array(shape))
        return bad(r, "has no \"shape\" array");
    if (json_array_size(shape) > LK_TENSOR_DIMS_MAX)
        return bad(r, "has %zu dimensions, at most %d are read", json_array_size(shape),
                   LK_TENSOR_DIMS_MAX);
    tensor->dims = (uint32_t)json_array_size(shape);
    for (uint32_t i = 0; i < tensor->dims; i++) {
        if (!whole(json_array_get(shape, i), &tensor->shape[i]))
            return bad(r, "has a shape whose dimension %u is no whole number from 0", i);
        if (__builtin_mul_overflow(*bytes, tensor->shape[i], bytes))
            return bad(r, "has a shape whose size overflows 64 bits");
    }
    return 0;
}

/* *begin: its offset in the data. */
static int read_place(const struct reader *r, const json_t *entry, uint64_t bytes,
                      uint64_t *begin) {
    const json_t *offsets = json_object_get(entry, "data_offsets");
    uint64_t end;
    if (json_array_size(offsets) != 2 || !whole(json_array_get(offsets, 0), begin) ||
        !whole(json_array_get(offsets, 1), &end) || end < *begin)
        return bad(r, "has no \"data_offsets\" [begin, end] with 0 <= begin <= end");
    if (end - *begin != bytes)
        return bad(
            r, "takes %" PRIu64 " byte%s by its data_offsets, %" PRIu64 " by its dtype and shape",
            end - *begin, lk_plural(end - *begin), bytes);
    if (end > r->data_bytes)
        return bad(
            r, "ends at byte %" PRIu64 " of the data, the file has %" PRIu64 ": it is cut short",
            end, r->data_bytes);
    return 0;
}

static int read_entry(const struct reader *r, const json_t *entry, const uint8_t *data,
                      struct lk_tensor *tensor) {
    uint64_t bytes = 0, begin = 0;
    if (!json_is_object(entry))
        return bad(r, "is no JSON object in the header");
    int rc = read_type(r, entry, tensor, &bytes);
    if (!rc)
        rc = read_shape(r, entry, tensor, &bytes);
    if (!rc)
        rc = read_place(r, entry, bytes, &begin);
    tensor->name = r->name;
    tensor->bytes = bytes;
    tensor->data = data + begin;
    return rc;
}

/* ---- reading: the file ---- */

static int by_place(const void *a, const void *b) {
    const struct lk_tensor *x = a, *y = b;
    if (x->data != y->data)
        return (const uint8_t *)x->data < (const uint8_t *)y->data ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes; /* empty ones first */
}

/* The format's rule: the tensors tile the data, without overlap, hole or rest. */
static int check_tiles(const struct lk_safetensors *f, const uint8_t *data, uint64_t data_bytes,
                       char *why, size_t why_bytes) {
    uint64_t at = 0;
    for (size_t i = 0; i < f->count; i++) {
        const struct lk_tensor *t = &f->tensors[i];
        uint64_t begin = (uint64_t)((const uint8_t *)t->data - data);
        if (begin != at)
            return refuse(-EINVAL, why, why_bytes,
                          "%s: tensor %.*s begins at byte %" PRIu64 " of the data, the one before "
                          "it ends at %" PRIu64 ": they %s",
                          f->path, NAME_SHOWN, t->name, begin, at,
                          begin < at ? "overlap" : "leave a hole");
        at = begin + t->bytes;
    }
    return at == data_bytes ? 0
                            : refuse(-EINVAL, why, why_bytes,
                                     "%s: %" PRIu64 " byte%s of data belong%s to no tensor",
                                     f->path, data_bytes - at, lk_plural(data_bytes - at),
                                     data_bytes - at == 1 ? "s" : "");
}

static int read_entries(struct lk_safetensors *f, const uint8_t *data, uint64_t data_bytes,
                        char *why, size_t why_bytes) {
    struct reader r = {f->path, "", data_bytes, why, why_bytes};
    const char *name;
    json_t *entry;
    f->tensors = calloc(json_object_size(f->header) + 1, sizeof(*f->tensors));
    if (!f->tensors)
        return refuse(-ENOMEM, why, why_bytes, "%s: no memory for its header", f->path);
    json_object_foreach(f->header, name, entry) {
        if (strcmp(name, "__metadata__") == 0)
            continue;
        r.name = name;
        int rc = read_entry(&r, entry, data, &f->tensors[f->count]);
        if (rc)
            return rc;
        f->count++;
    }
    qsort(f->tensors, f->count, sizeof(*f->tensors), by_place);
    return check_tiles(f, data, data_bytes, why, why_bytes);
}

static int read_header(struct lk_safetensors *f, char *why, size_t why_bytes) {
    uint64_t length = 0;
    json_error_t error;
    for (int i = 0; i < LENGTH_BYTES; i++)
        length |= (uint64_t)f->map[i] << (8 * i);
    if (length > HEADER_BYTES_MAX || length > f->bytes - LENGTH_BYTES)
        return refuse(-EINVAL, why, why_bytes,
                      "%s: no safetensors file, or cut short: its header claims %" PRIu64
                      " bytes, the file has %" PRIu64 " (and headers at most %" PRIu64 ")",
                      f->path, length, f->bytes, HEADER_BYTES_MAX);
    const uint8_t *text = f->map + LENGTH_BYTES;
    f->header = json_loadb((const char *)text, length, JSON_REJECT_DUPLICATES, &error);
    if (!json_is_object(f->header))
        return refuse(-EINVAL, why, why_bytes, "%s: its header is no JSON object: %s", f->path,
                      f->header ? "it is something else" : error.text);
    return read_entries(f, text + length, f->bytes - LENGTH_BYTES - length, why, why_bytes);
}

/* -> the mapping, whose header length is there, or NULL with -errno in *ret_error. */
static uint8_t *map_file(struct lk_safetensors *f, int *ret_error, char *why, size_t why_bytes) {
    struct stat status;
    int fd = open(f->path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* a pipe must not be waited for */
    if (fd < 0 || fstat(fd, &status)) {
        snprintf(why, why_bytes, "%s: cannot be opened: %s", f->path, strerror(errno));
        goto fail;
    }
    errno = EINVAL;
    if (!S_ISREG(status.st_mode)) {
        snprintf(why, why_bytes, "%s: not a regular file", f->path);
        goto fail;
    }
    if (status.st_size < LENGTH_BYTES) {
        snprintf(why, why_bytes,
                 "%s: no safetensors file: it has %lld byte%s, its header length alone takes %d",
                 f->path, (long long)status.st_size, lk_plural((uint64_t)status.st_size),
                 LENGTH_BYTES);
        goto fail;
    }
    void *map = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (map == MAP_FAILED) {
        snprintf(why, why_bytes, "%s: cannot be mapped: %s", f->path, strerror(errno));
        goto fail;
    }
    f->bytes = (uint64_t)status.st_size;
    close(fd);
    return map;
fail:
    *ret_error = -errno;
    if (fd >= 0)
        close(fd);
    return NULL;
}

int lk_safetensors_open(const char *path, struct lk_safetensors **ret, char *why,
                        size_t why_bytes) {
    struct lk_safetensors *f = calloc(1, sizeof(*f));
    int rc = -ENOMEM;
    if (f)
        f->path = strdup(path);
    if (!f || !f->path) {
        refuse(rc, why, why_bytes, "%s: no memory to read it", path);
        goto fail;
    }
    f->map = map_file(f, &rc, why, why_bytes);
    if (f->map)
        rc = read_header(f, why, why_bytes);
    if (rc)
        goto fail;
    *ret = f;
    return 0;
fail:
    lk_safetensors_close(f);
    return rc;
}

void lk_safetensors_close(struct lk_safetensors *file) {
    if (!file)
        return;
    if (file->map)
        munmap(file->map, file->bytes);
    json_decref(file->header);
    free(file->tensors);
    free(file->path);
    free(file);
}

const char *lk_safetensors_path(const struct lk_safetensors *file) {
    return file->path;
}

const struct lk_tensor *lk_safetensors_find(const struct lk_safetensors *file, const char *name) {
    for (size_t i = 0; i < file->count; i++)
        if (strcmp(file->tensors[i].name, name) == 0)
            return &file->tensors[i];
    return NULL;
}

const struct lk_tensor *lk_safetensors_at(const struct lk_safetensors *file, size_t index) {
    return &file->tensors[index];
}

size_t lk_safetensors_count(const struct lk_safetensors *file) {
    return file->count;
}

/* ---- writing ---- */

/* The header as text padded with blanks to a multiple of 8, so that data are aligned. */
static char *header_text(const struct lk_tensor *tensors, size_t count, size_t *ret_bytes) {
    json_t *header = json_object();
    json_int_t begin = 0;
    for (size_t i = 0; i < count; i++) {
        const struct lk_tensor *t = &tensors[i];
        json_t *shape = json_array();
        for (uint32_t k = 0; k < t->dims; k++)
            json_array_append_new(shape, json_integer((json_int_t)t->shape[k]));
        json_object_set_new(header, t->name,
                            json_pack("{s:s, s:o, s:[I, I]}", "dtype", lk_tensor_type_name(t->type),
                                      "shape", shape, "data_offsets", begin,
                                      begin + (json_int_t)t->bytes));
        begin += (json_int_t)t->bytes;
    }
    char *text = json_dumps(header, JSON_COMPACT);
    bool complete = json_object_size(header) == count;
    json_decref(header);
    size_t bytes = text ? strlen(text) : 0, padded = (bytes + 7) & ~(size_t)7;
    char *grown = complete && text ? realloc(text, padded) : NULL;
    if (!grown) {
        free(text);
        return NULL;
    }
    memset(grown + bytes, ' ', padded - bytes);
    *ret_bytes = padded;
    return grown;
}

int lk_safetensors_write(FILE *file, const char *path, const struct lk_tensor *tensors,
                         size_t count, char *why, size_t why_bytes) {
    size_t header_bytes = 0;
    uint8_t length[LENGTH_BYTES];
    char *header = header_text(tensors, count, &header_bytes);
    if (!header)
        return refuse(-ENOMEM, why, why_bytes, "%s: no memory for its header", path);
    for (int i = 0; i < LENGTH_BYTES; i++)
        length[i] = (uint8_t)((uint64_t)header_bytes >> (8 * i));
    bool failed =
        fwrite(length, LENGTH_BYTES, 1, file) != 1 || fwrite(header, header_bytes, 1, file) != 1;
    for (size_t i = 0; i < count && !failed; i++)
        failed = tensors[i].bytes && fwrite(tensors[i].data, tensors[i].bytes, 1, file) != 1;
    if (!failed && fflush(file))
        failed = true;
    int error = failed ? errno : 0;
    free(header);
    return error
               ? refuse(-error, why, why_bytes, "%s: cannot be written: %s", path, strerror(error))
               : 0;
}
