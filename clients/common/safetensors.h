/* SPDX-License-Identifier: MIT */
/*
 * safetensors.h - read and write tensor files: 8 bytes of header length, a JSON header, raw data.
 *
 * Idea: the file is mapped read-only and a tensor is a view into it. Everything a header claims is
 * checked once at opening (shapes, sizes, offsets that overflow, overlap, leave holes or point past
 * the end), so that a view can be used without another thought. Elements may lie unaligned: read
 * them by memcpy().
 *
 * Every failure is a sentence that names file, tensor, and what was expected. Any thread; a file is
 * immutable once open. Types outside enum lk_tensor_type are kept as LK_TENSOR_OTHER. Nothing is
 * converted here.
 */
#ifndef LK_SAFETENSORS_H
#define LK_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define LK_TENSOR_DIMS_MAX 8

enum lk_tensor_type {
    LK_TENSOR_OTHER,
    LK_TENSOR_F16,
    LK_TENSOR_BF16,
    LK_TENSOR_F32,
    LK_TENSOR_I32
};

struct lk_tensor {
    const char *name;
    enum lk_tensor_type type;
    uint32_t dims;
    uint64_t shape[LK_TENSOR_DIMS_MAX];
    const void *data; /* row-major, `bytes` of them, perhaps unaligned */
    uint64_t bytes;
};

struct lk_safetensors;

/* -> 0, or -errno with a sentence in why: -EINVAL a malformed file. */
int lk_safetensors_open(const char *path, struct lk_safetensors **ret, char *why, size_t why_bytes);
void lk_safetensors_close(struct lk_safetensors *file); /* NULL is fine; views end */
const char *lk_safetensors_path(const struct lk_safetensors *file);
/* By name, or NULL; by place in the data, below lk_safetensors_count(). Valid until closed. */
const struct lk_tensor *lk_safetensors_find(const struct lk_safetensors *file, const char *name);
const struct lk_tensor *lk_safetensors_at(const struct lk_safetensors *file, size_t index);
size_t lk_safetensors_count(const struct lk_safetensors *file);

/* Writes the tensors in the given order; type must be one of the named ones, bytes as the shape
 * says. -> 0 and flushed, or -errno with a sentence in why that names path; the file is then
 * incomplete. */
int lk_safetensors_write(FILE *file, const char *path, const struct lk_tensor *tensors,
                         size_t count, char *why, size_t why_bytes);

const char *lk_tensor_type_name(enum lk_tensor_type type); /* "F16" */
uint64_t lk_tensor_element_bytes(enum lk_tensor_type type);
/* "[256, 9, 64]" */
const char *lk_tensor_shape_text(const struct lk_tensor *tensor, char *text, size_t bytes);

#endif
