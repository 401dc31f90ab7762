/* SPDX-License-Identifier: MIT */
/*
 * test_safetensors.c - what is written reads back; every lie a header can tell is refused by a
 * sentence that names the tensor, and none of them leads outside of the file.
 */
#include <check.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../common/run.h"
#include "../../clients/common/output.h"
#include "../../clients/common/safetensors.h"

static char path[64];
static char why[512];

static void make_file(const void *bytes, size_t count) {
    FILE *file = fopen(path, "w");
    ck_assert_ptr_nonnull(file);
    ck_assert_uint_eq(fwrite(bytes, 1, count, file), count);
    ck_assert_int_eq(fclose(file), 0);
}

/* A header's text and `data` bytes of data behind it. */
static void make(const char *header, size_t data) {
    size_t length = strlen(header);
    uint8_t *bytes = calloc(1, 8 + length + data);
    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)((uint64_t)length >> (8 * i));
    memcpy(bytes + 8, header, length);
    make_file(bytes, 8 + length + data);
    free(bytes);
}

static void setup(void) {
    snprintf(path, sizeof(path), "/tmp/locksd-tensors.XXXXXX");
    int fd = mkstemp(path);
    ck_assert_int_ge(fd, 0);
    close(fd);
    why[0] = '\0';
}

static void teardown(void) {
    unlink(path);
}

/* Refused with -EINVAL; the sentence names the file and holds `word`. */
static void refused(const char *header, size_t data, const char *word) {
    struct lk_safetensors *file = NULL;
    make(header, data);
    ck_assert_int_eq(lk_safetensors_open(path, &file, why, sizeof(why)), -EINVAL);
    ck_assert_ptr_null(file);
    ck_assert_msg(strstr(why, path) && strstr(why, word), "'%s' without '%s'", why, word);
}

START_TEST(round_trip) {
    const float f[6] = {1, -2, 3.5F, 0, 1e30F, -1e-30F};
    const int32_t i[4] = {-1, 0, 7, INT32_MAX};
    const uint16_t h[3] = {0x3c00, 0xffff, 1};
    const struct lk_tensor tensors[] = {
        {"layers.5.out", LK_TENSOR_F32, 3, {1, 2, 3}, f, sizeof(f)},
        {"layers.5.pages", LK_TENSOR_I32, 2, {2, 2}, i, sizeof(i)},
        {"nothing", LK_TENSOR_F32, 2, {0, 4}, NULL, 0},
        {"layers.5.k", LK_TENSOR_BF16, 1, {3}, h, sizeof(h)},
    };
    struct lk_safetensors *file;
    char shape[64];
    FILE *out = fopen(path, "w");
    ck_assert_int_eq(lk_safetensors_write(out, path, tensors, 4, why, sizeof(why)), 0);
    fclose(out);
    ck_assert_msg(!lk_safetensors_open(path, &file, why, sizeof(why)), "%s", why);
    ck_assert_uint_eq(lk_safetensors_count(file), 4);
    ck_assert_str_eq(lk_safetensors_path(file), path);
    for (size_t k = 0; k < 4; k++) {
        const struct lk_tensor *t = lk_safetensors_find(file, tensors[k].name);
        ck_assert_ptr_nonnull(t);
        ck_assert_int_eq(t->type, tensors[k].type);
        ck_assert_uint_eq(t->dims, tensors[k].dims);
        ck_assert_mem_eq(t->shape, tensors[k].shape, sizeof(t->shape));
        ck_assert_uint_eq(t->bytes, tensors[k].bytes);
        if (t->bytes)
            ck_assert_mem_eq(t->data, tensors[k].data, t->bytes);
    }
    ck_assert_str_eq(lk_tensor_shape_text(lk_safetensors_find(file, "layers.5.out"), shape, 64),
                     "[1, 2, 3]");
    ck_assert_ptr_null(lk_safetensors_find(file, "layers.6.out"));
    lk_safetensors_close(file);
    lk_safetensors_close(NULL);
}
END_TEST

START_TEST(metadata_and_foreign_types_are_read) {
    struct lk_safetensors *file;
    make("{\"__metadata__\":{\"a\":\"b\"},"
         "\"x\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,8]}}  ",
         8);
    ck_assert_msg(!lk_safetensors_open(path, &file, why, sizeof(why)), "%s", why);
    ck_assert_uint_eq(lk_safetensors_count(file), 1);
    ck_assert_int_eq(lk_safetensors_at(file, 0)->type, LK_TENSOR_OTHER);
    lk_safetensors_close(file);
}
END_TEST

START_TEST(no_file) {
    struct lk_safetensors *file = NULL;
    ck_assert_int_eq(lk_safetensors_open("/nonexistent/x", &file, why, sizeof(why)), -ENOENT);
    ck_assert_msg(strstr(why, "/nonexistent/x"), "%s", why);
    ck_assert_int_eq(lk_safetensors_open("/tmp", &file, why, sizeof(why)), -EINVAL);
    ck_assert_msg(strstr(why, "regular file"), "%s", why);
    make_file("1", 1);
    ck_assert_int_eq(lk_safetensors_open(path, &file, why, sizeof(why)), -EINVAL);
    ck_assert_msg(strstr(why, "it has 1 byte, "), "%s", why);
    make_file("1234567", 7);
    ck_assert_int_eq(lk_safetensors_open(path, &file, why, sizeof(why)), -EINVAL);
    ck_assert_msg(strstr(why, "7 bytes"), "%s", why);
    struct lk_output out;
    ck_assert_int_eq(lk_output_open("/nonexistent/x", &out, why, sizeof(why)), -ENOENT);
    ck_assert_msg(strstr(why, "/nonexistent/x"), "%s", why);
    FILE *full = fopen("/dev/full", "w");
    ck_assert_int_eq(lk_safetensors_write(full, "name", NULL, 0, why, sizeof(why)), -ENOSPC);
    ck_assert_str_eq(why, "name: cannot be written: No space left on device");
    fclose(full);
}
END_TEST

/* What is there stays until its successor is complete; links are followed, modes kept. */
START_TEST(an_output_is_whole_or_not_there) {
    struct lk_output out = {0};
    struct stat status;
    char folder[] = "/tmp/locksd-output.XXXXXX", name[64], link[64], text[8];
    ck_assert_ptr_nonnull(mkdtemp(folder));
    umask(027);
    snprintf(name, sizeof(name), "%s/name", folder);
    snprintf(link, sizeof(link), "%s/link", folder);
    lk_output_abandon(&out);
    for (int i = 0; i < 3; i++) { /* new, through a link, over what is there */
        const char *asked = i == 1 ? link : name;
        ck_assert_msg(!lk_output_open(asked, &out, why, sizeof(why)), "%s", why);
        ck_assert_int_eq(access(name, F_OK), i ? 0 : -1);
        fprintf(out.file, "%d", i);
        ck_assert_msg(!lk_output_commit(&out, why, sizeof(why)), "%s", why);
        FILE *file = fopen(name, "r");
        ck_assert_ptr_nonnull(fgets(text, sizeof(text), file));
        fclose(file);
        ck_assert_int_eq(text[0], '0' + i);
        ck_assert_int_eq(stat(name, &status), 0);
        ck_assert_uint_eq(status.st_mode & 0777, i == 0 ? 0640 : 0604);
        ck_assert_int_eq(chmod(name, 0604), 0);
        ck_assert_int_eq(i ? 0 : symlink("name", link), 0);
    }
    ck_assert_int_eq(lstat(link, &status), 0);
    ck_assert(S_ISLNK(status.st_mode));
    ck_assert_int_eq(lk_output_open(name, &out, why, sizeof(why)), 0);
    lk_output_abandon(&out);
    ck_assert_int_eq(unlink(link) | unlink(name) | rmdir(folder), 0); /* nothing else was left */
}
END_TEST

START_TEST(headers_that_are_none) {
    struct lk_safetensors *file = NULL;
    make_file("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10); /* a length of 2^64 - 1 */
    ck_assert_int_eq(lk_safetensors_open(path, &file, why, sizeof(why)), -EINVAL);
    ck_assert_msg(strstr(why, "18446744073709551615"), "%s", why);
    make_file("\x03\0\0\0\0\0\0\0{}", 10); /* one byte more than there is */
    ck_assert_int_eq(lk_safetensors_open(path, &file, why, sizeof(why)), -EINVAL);
    ck_assert_msg(strstr(why, "cut short"), "%s", why);
    refused("", 0, "no JSON object");
    refused("[1, 2]", 0, "no JSON object");
    refused("{\"x\": ", 0, "no JSON object");
    refused("{\"x\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},"
            "\"x\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}",
            0, "no JSON object"); /* the same name twice */
    refused("{}", 5, "5 bytes of data belong to no tensor");
}
END_TEST

/* Nested far deeper than a stack holds. */
START_TEST(deep_headers) {
    enum { DEPTH = 1 << 20 };
    char *text = malloc(DEPTH + 1);
    memset(text, '[', DEPTH);
    text[DEPTH] = '\0';
    refused(text, 0, "no JSON object");
    free(text);
}
END_TEST

static const struct {
    const char *entry; /* of tensor x; 16 bytes of data follow */
    const char *word;
} lies[] = {
    {"7", "no JSON object"},
    {"{\"shape\":[4],\"data_offsets\":[0,16]}", "dtype"},
    {"{\"dtype\":7,\"shape\":[4],\"data_offsets\":[0,16]}", "dtype"},
    {"{\"dtype\":\"F33\",\"shape\":[4],\"data_offsets\":[0,16]}", "F33"},
    {"{\"dtype\":\"F32\",\"data_offsets\":[0,16]}", "shape"},
    {"{\"dtype\":\"F32\",\"shape\":4,\"data_offsets\":[0,16]}", "shape"},
    {"{\"dtype\":\"F32\",\"shape\":[-4],\"data_offsets\":[0,16]}", "dimension 0"},
    {"{\"dtype\":\"F32\",\"shape\":[2,2.0],\"data_offsets\":[0,16]}", "dimension 1"},
    {"{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,4],\"data_offsets\":[0,16]}", "9 dimensions"},
    {"{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,16]}", "overflow"},
    {"{\"dtype\":\"F32\",\"shape\":[4611686018427387905],\"data_offsets\":[0,16]}", "overflow"},
    {"{\"dtype\":\"F32\",\"shape\":[9223372036854775807,0],\"data_offsets\":[0,16]}", "overflow"},
    {"{\"dtype\":\"F32\",\"shape\":[4]}", "data_offsets"},
    {"{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[16]}", "data_offsets"},
    {"{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[16,0]}", "data_offsets"},
    {"{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[-16,0]}", "data_offsets"},
    {"{\"dtype\":\"F32\",\"shape\":[5],\"data_offsets\":[0,16]}", "20 by its dtype and shape"},
    {"{\"dtype\":\"F32\",\"shape\":[5],\"data_offsets\":[0,20]}", "cut short"},
    {"{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[16,32]}", "cut short"},
    {"{\"dtype\":\"U8\",\"shape\":[16],\"data_offsets\":[9223372036854775791,9223372036854775807]}",
     "cut short"},
    {"{\"dtype\":\"U8\",\"shape\":[15],\"data_offsets\":[1,16]}", "hole"},
    {"{\"dtype\":\"U8\",\"shape\":[15],\"data_offsets\":[0,15]}", "1 byte of data belongs to"},
};

START_TEST(entries_that_lie) {
    char header[512];
    snprintf(header, sizeof(header), "{\"x\":%s}", lies[_i].entry);
    refused(header, 16, lies[_i].word);
}
END_TEST

START_TEST(tensors_that_overlap) {
    refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[10],\"data_offsets\":[0,10]},"
            "\"b\":{\"dtype\":\"U8\",\"shape\":[10],\"data_offsets\":[6,16]}}",
            16, "tensor b begins at byte 6");
    refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[16],\"data_offsets\":[0,16]},"
            "\"b\":{\"dtype\":\"U8\",\"shape\":[16],\"data_offsets\":[0,16]}}",
            16, "overlap");
}
END_TEST

/* Every prefix of a good file is refused and read no further than it goes. */
START_TEST(every_cut) {
    const char header[] = "{\"layers.0.q\":{\"dtype\":\"F16\",\"shape\":[2,2,2],"
                          "\"data_offsets\":[0,16]}}";
    uint8_t bytes[8 + sizeof(header) - 1 + 16] = {sizeof(header) - 1};
    struct lk_safetensors *file = NULL;
    memcpy(bytes + 8, header, sizeof(header) - 1);
    for (size_t cut = 0; cut < sizeof(bytes); cut++) {
        make_file(bytes, cut);
        ck_assert_int_eq(lk_safetensors_open(path, &file, why, sizeof(why)), -EINVAL);
        ck_assert_ptr_null(file);
    }
    make_file(bytes, sizeof(bytes));
    ck_assert_int_eq(lk_safetensors_open(path, &file, why, sizeof(why)), 0);
    lk_safetensors_close(file);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("safetensors");
    TCase *tests = tcase_create("files");
    tcase_add_checked_fixture(tests, setup, teardown);
    tcase_add_test(tests, round_trip);
    tcase_add_test(tests, metadata_and_foreign_types_are_read);
    tcase_add_test(tests, no_file);
    tcase_add_test(tests, an_output_is_whole_or_not_there);
    tcase_add_test(tests, headers_that_are_none);
    tcase_add_test(tests, deep_headers);
    tcase_add_loop_test(tests, entries_that_lie, 0, (int)(sizeof(lies) / sizeof(*lies)));
    tcase_add_test(tests, tensors_that_overlap);
    tcase_add_test(tests, every_cut);
    suite_add_tcase(suite, tests);
    return run_suite(suite);
}
