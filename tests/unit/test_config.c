/* SPDX-License-Identifier: MIT */
/*
 * test_config.c - the configuration: what is read, every refusal's sentence, overlays, reload, and
 * that the example file speaks of every key the parser has.
 *
 * Run from the repository's root. Files lie in a folder under /tmp that the test removes.
 */
#include <check.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../common/run.h"
#include "../../daemon/config.h"
#include "../../daemon/options.h"

#define POOL "[pool p]\nlayers=4\nkv_heads=2\ngroup=3\nhead_dim=64\nmemory=16M\n"

static char folder[64], path[128], overlays[160];
static struct lk_origins origins; /* of what was loaded last */

static void make_folder(void) {
    snprintf(folder, sizeof(folder), "/tmp/locksd-config-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(folder));
    snprintf(path, sizeof(path), "%s/locksd.conf", folder);
    snprintf(overlays, sizeof(overlays), "%s.d", path);
}

static void remove_folder(void) {
    char command[128];
    snprintf(command, sizeof(command), "rm -rf %s", folder);
    ck_assert_int_eq(system(command), 0);
}

static void write_file(const char *where, const char *text) {
    FILE *file = fopen(where, "w");
    ck_assert_ptr_nonnull(file);
    ck_assert_int_ge(fputs(text, file), 0);
    ck_assert_int_eq(fclose(file), 0);
}

static void write_overlay(const char *name, const char *text) {
    char where[256];
    mkdir(overlays, 0700);
    snprintf(where, sizeof(where), "%s/%s", overlays, name);
    write_file(where, text);
}

static int load_again(struct lk_config *ret, char why[1024]) {
    return lk_config_load(path, ret, &origins, why, 1024);
}

static int load(const char *text, struct lk_config *ret, char why[1024]) {
    write_file(path, text);
    return load_again(ret, why);
}

static void load_good(const char *text, struct lk_config *ret) {
    char why[1024] = "";
    int rc = load(text, ret, why);
    ck_assert_msg(rc == 0, "refused: %s", why);
}

/* Compared as text: padding is nobody's. */
static void assert_same(const struct lk_config *a, const struct lk_config *b) {
    static char one[LK_CONFIG_TEXT_BYTES], two[LK_CONFIG_TEXT_BYTES];
    lk_config_text(a, one);
    lk_config_text(b, two);
    ck_assert_str_eq(one, two);
}

START_TEST(defaults_and_values) {
    struct lk_config config;
    load_good(
        "# comment\n; another\n[daemon] ; heading\r\n  threads = 3 ; said "
        "late\n\tsocket=/tmp/x.sock\ngroup =\n"
        "numa_node = -1\nmemlock=yes\ncpu_path=avx2\nlog_level = debug\n[limits]\nmax_arena = 2M\n"
        "max_pages=4K\n" POOL "dtype=fp32\nscan=tree\n",
        &config);
    ck_assert_uint_eq(config.threads, 3);
    ck_assert_str_eq(config.socket, "/tmp/x.sock");
    ck_assert_str_eq(config.group, "");
    ck_assert_int_eq(config.numa_node, -1);
    ck_assert(config.memlock);
    ck_assert_uint_eq(config.cpu_path, 2);
    ck_assert_uint_eq(config.log_level, 3);
    ck_assert_uint_eq(config.max_arena_bytes, 2 << 20);
    ck_assert_uint_eq(config.max_pages, 4096);
    ck_assert_uint_eq(config.pools, 1);
    ck_assert_str_eq(config.pool[0].name, "p");
    ck_assert_uint_eq(config.pool[0].geometry.dtype, LK_FP32);
    ck_assert_uint_eq(config.pool[0].scan, LK_SCAN_TREE);
    ck_assert_uint_eq(config.pool[0].geometry.page_tokens, 16);
    ck_assert_uint_eq(config.pool[0].memory_bytes, 16 << 20);
    ck_assert_uint_eq(config.drain_seconds, 10);
    ck_assert_ptr_null(lk_config_invalid(&config, &origins, (char[512]){0}, 512));
}
END_TEST

/* What is written in the file, the line the sentence must name, and words it must hold. */
static const struct {
    const char *text;
    int line;
    const char *words;
} wrong[] = {
    {"[daemon]\nthread = 2\n", 2,
     "[daemon] has no key 'thread': its keys are socket, group, device, gpu, threads"},
    {"[limits]\n\nlayers = 2\n", 3, "[limits] has no key 'layers': its keys are max_channels"},
    {"[pool p]\nsocket=/x\n", 2, "[pool p] has no key 'socket': its keys are layers, kv_heads"},
    {"[demon]\n", 1,
     "there is no section [demon]: sections are [daemon], [limits] and [pool NAME]"},
    {"threads = 2\n", 1, "a key before the first section"},
    {"[daemon]\nthreads\n", 2, "neither a [section], nor KEY = VALUE, nor a comment"},
    {"[daemon\nthreads = 1\n", 1, "the section lacks its ']'"},
    {"[daemon]\nthreads = many\n", 2, "[daemon] threads: 'many' is not a number"},
    {"[daemon]\nthreads =\n", 2, "[daemon] threads: '' is not a number"},
    {"[daemon]\nthreads = 2x\n", 2, "'2x' is not a number"},
    {"[daemon]\nthreads = -1\n", 2, "'-1' is not a number"},
    {"[daemon]\nthreads = 2K\n", 2, "'2K' is not a number"},
    {"[daemon]\nthreads = 257\n", 2, "[daemon] threads: 257 is not between 0 and 256"},
    {"[daemon]\nthreads = 99999999999999999999\n", 2, "is not a number"},
    {"[daemon]\nthreads = 4294967297\n", 2, "4294967297 is not between 0 and 256"},
    {"[daemon]\nspin_us = 10001\n", 2, "10001 is not between 0 and 10000"},
    {"[daemon]\nnuma_node = -2\n", 2, "[daemon] numa_node: -2 is not between -1 and 1023"},
    {"[daemon]\nnuma_node = 1024\n", 2, "1024 is not between -1 and 1023"},
    {"[daemon]\nmemlock = true\n", 2, "[daemon] memlock: 'true' is neither yes nor no"},
    {"[daemon]\ncpu_path = sse\n", 2, "'sse' is none of auto, portable, avx2, avx512"},
    {"[daemon]\nlog_level = 3\n", 2, "'3' is none of error, warning, info, debug"},
    {"[daemon]\nsocket =\n", 2, "[daemon] socket: '' has 0 characters, not between 1 and 107"},
    {"[daemon]\ngroup = abcdefghijklmnopqrstuvwxyzabcdef\n", 2,
     "has 32 characters, not between 0 and 31"},
    {"[daemon]\nbatch_rows = 0\n", 2, "0 is not between 1 and 256"},
    {"[daemon]\ndrain_seconds = 3601\n", 2, "3601 is not between 0 and 3600"},
    {"[limits]\nmax_channels = 0\n", 2, "[limits] max_channels: 0 is not between 1 and 256"},
    {"[limits]\nmax_arena = 2T\n", 2, "[limits] max_arena: 2T is not between 64K and 1T"},
    {"[limits]\nmax_arena = 20000000T\n", 2,
     "'20000000T' is not a number that may end in K, M, G or T, as in 64G"},
    {"[limits]\nmax_arena = 1GB\n", 2,
     "'1GB' is not a number that may end in K, M, G or T, as in 64G"},
    {"[limits]\nmax_arena = 1.5G\n", 2, "'1.5G' is not a number"},
    {"[limits]\nmax_row_tokens = 65537\n", 2, "65537 is not between 1 and 65536"},
    {"[pool p]\ngroup = 33\n", 2, "[pool p] group: 33 is not between 1 and 32"},
    {"[pool p]\ndtype = int8\n", 2, "'int8' is none of bf16, fp16, fp32"},
    {"[pool p]\nscan = quest\n", 2, "'quest' is none of auto, full, coarse, nested, tree"},
    {"[pool p]\nmemory = 1\n", 2, "[pool p] memory: 1 is not between 64K and 64T"},
    {"[daemon]\nsocket=here\n", 2, "[daemon] socket: 'here' is not an absolute path"},
    {"[daemon]\nthreads = 4 # note\n", 2,
     "[daemon] threads: '4 # note': behind a value a comment begins with ;"},
    {"[daemon]\nsocket = /x\t# note\n", 2, "behind a value a comment begins with ;"},
    {"[daemon]\nthreads = -1\n", 2, "'-1' is not a number between 0 and 256"},
    {"[daemon]\ngpu = 99999999999999999999\n", 2, "is not a number between 0 and 63"},
    {"[limits]\nmax_arena = no\n", 2,
     "'no' is not a number that may end in K, M, G or T, as in 64G, between 64K and 1T"},
    {"[pool p]\nlayers = 2\n\n[pool  p]\n", 4, "a second [pool  p]: the first is in line 1"},
    {"\xef\xbb\xbf[pool p]\n[pool p]\n", 2, "a second [pool p]: the first is in line 1"},
    {"[daemon]\ngpu = 0\n\rthreads = x\n", 3, "[daemon] threads: 'x' is not a number"},
    {"[daemon] threads = 4\n", 1, "behind a section's ']' there is more"},
    {"[pool p]x\nlayers = 2\n", 1, "a key has a line of its own"},
    {"[daemon]\nthreads = 4\ngpu = 1\nthreads = 4\n", 4,
     "[daemon] threads: said in line 2 already"},
    {"[daemon]\ngpu = 0\n[pool p]\nrank = 4\n rank = 8\n", 5,
     "[pool p] rank: said in line 4 already"},
    {"[pool ]\n", 1, "pool name '': 1 to 31 letters, digits, '_', '.' or '-'"},
    {"[pool a/b]\n", 1, "pool name 'a/b'"},
    {"[pool abcdefghijklmnopqrstuvwxyzabcdef]\n", 1, "1 to 31 letters"},
};

START_TEST(every_error_has_its_sentence) {
    struct lk_config config;
    char why[1024] = "", at[160];
    memset(&config, 0x5a, sizeof(config));
    struct lk_config before = config;
    ck_assert_int_eq(load(wrong[_i].text, &config, why), -EINVAL);
    snprintf(at, sizeof(at), "%s:%d: ", path, wrong[_i].line);
    ck_assert_msg(strncmp(why, at, strlen(at)) == 0, "'%s' does not begin with '%s'", why, at);
    ck_assert_msg(strstr(why, wrong[_i].words) != NULL, "'%s' lacks '%s'", why, wrong[_i].words);
    ck_assert_mem_eq(&config, &before, sizeof(config));
}
END_TEST

START_TEST(a_line_too_long) {
    struct lk_config config;
    char text[512], why[1024] = "";
    snprintf(text, sizeof(text), "[daemon]\ngroup = %0250d\n", 7);
    ck_assert_int_eq(load(text, &config, why), -EINVAL);
    ck_assert_ptr_nonnull(strstr(why, ":2: the line is longer than 198 characters"));
}
END_TEST

START_TEST(what_is_no_text) {
    static const char nul[] = "[limits]\nmax_channels = 3\0x\n" POOL;
    struct lk_config config;
    char why[1024];
    FILE *file = fopen(path, "w");
    ck_assert_ptr_nonnull(file);
    ck_assert_uint_eq(fwrite(nul, sizeof(nul) - 1, 1, file), 1);
    ck_assert_int_eq(fclose(file), 0);
    ck_assert_int_eq(load_again(&config, why), -EINVAL);
    ck_assert_ptr_nonnull(strstr(why, "locksd.conf:2: a NUL byte"));

    ck_assert_int_eq(unlink(path), 0);
    ck_assert_int_eq(symlink("/dev/zero", path), 0); /* has no end */
    ck_assert_int_eq(load_again(&config, why), -EINVAL);
    ck_assert_ptr_nonnull(strstr(why, "locksd.conf:1: a NUL byte"));

    ck_assert_int_eq(unlink(path), 0);
    file = fopen(path, "w");
    ck_assert_ptr_nonnull(file);
    for (int i = 0; i < (1 << 20) / 8; i++)
        ck_assert_int_ge(fputs("#######\n", file), 0);
    ck_assert_int_ge(fputs("\n" POOL, file), 0);
    ck_assert_int_eq(fclose(file), 0);
    ck_assert_int_eq(load_again(&config, why), -EINVAL);
    ck_assert_ptr_nonnull(strstr(why, "locksd.conf:131073: the file is larger than 1 MiB"));
}
END_TEST

START_TEST(too_many_pools) {
    struct lk_config config;
    char text[1024] = "", why[1024] = "";
    for (int i = 0; i <= LK_POOLS_MAX; i++)
        sprintf(text + strlen(text), "[pool p%d]\n", i);
    ck_assert_int_eq(load(text, &config, why), -EINVAL);
    ck_assert_ptr_nonnull(strstr(why, ":17: [pool p16]: there are 16 pools already"));
}
END_TEST

START_TEST(a_missing_file) {
    struct lk_config config;
    char why[1024] = "";
    ck_assert_int_eq(lk_config_load("/nowhere/locksd.conf", &config, &origins, why, sizeof(why)),
                     -ENOENT);
    ck_assert_str_eq(why, "/nowhere/locksd.conf: cannot be opened: No such file or "
                          "directory; --config FILE names another");
}
END_TEST

START_TEST(overlays_in_name_order) {
    struct lk_config config;
    char why[1024] = "";
    write_overlay("20-b.conf", "[daemon]\nthreads = 20\n");
    write_overlay("10-a.conf", "[daemon]\nthreads = 10\nspin_us = 7\n[pool p]\nrank=4\n");
    write_overlay("30-c.conf.off", "[daemon]\nthreads = 30\n");
    write_overlay(".40.conf", "nonsense");
    load_good("[daemon]\nthreads = 1\n" POOL, &config);
    ck_assert_uint_eq(config.threads, 20);
    ck_assert_uint_eq(config.spin_us, 7);
    ck_assert_uint_eq(config.pools, 1);
    ck_assert_uint_eq(config.pool[0].geometry.rank, 4);
    ck_assert_uint_eq(config.pool[0].geometry.layers, 4);
    write_overlay("20-b.conf", "[daemon]\n\nthreads = no\n");
    ck_assert_int_eq(load(POOL, &config, why), -EINVAL);
    ck_assert_msg(strstr(why, ".conf.d/20-b.conf:3: [daemon] threads: 'no' is not a number") !=
                      NULL,
                  "%s", why);
}
END_TEST

static int set(struct lk_config *config, const char *assignment, char why[1024]) {
    char option[256];
    snprintf(option, sizeof(option), "--set '%s'", assignment);
    return lk_config_set(config, &origins, option, assignment, why, 1024);
}

START_TEST(overlays_that_are_no_files) {
    struct lk_config config;
    char where[256], why[1024];
    ck_assert_int_eq(mkdir(overlays, 0700), 0);
    snprintf(where, sizeof(where), "%s/x.conf", overlays);
    ck_assert_int_eq(mkfifo(where, 0600), 0); /* opened, it would wait for a writer */
    ck_assert_int_eq(load(POOL, &config, why), -EINVAL);
    ck_assert_ptr_nonnull(strstr(why, "x.conf: is no regular file"));
    ck_assert_int_eq(unlink(where), 0);
    ck_assert_int_eq(mkdir(where, 0700), 0);
    ck_assert_int_eq(load(POOL, &config, why), -EINVAL);
    ck_assert_ptr_nonnull(strstr(why, "x.conf: is no regular file"));
    ck_assert_int_eq(rmdir(where), 0);
    ck_assert_int_eq(symlink("x.conf", where), 0);
    ck_assert_int_eq(load(POOL, &config, why), -ELOOP);
}
END_TEST

START_TEST(set_on_the_command_line) {
    struct lk_config config;
    char why[1024] = "";
    lk_config_defaults(&config);
    lk_origins_open(&origins, "none");
    ck_assert_int_eq(set(&config, "pool a.b.head_dim=80", why), 0);
    ck_assert_str_eq(config.pool[0].name, "a.b");
    ck_assert_uint_eq(config.pool[0].geometry.head_dim, 80);
    ck_assert_int_eq(set(&config, "daemon.socket=/tmp/a.b=c", why), 0);
    ck_assert_str_eq(config.socket, "/tmp/a.b=c");
    ck_assert_int_eq(set(&config, "daemon.threads=x", why), -EINVAL);
    ck_assert_str_eq(why, "--set 'daemon.threads=x': [daemon] threads: 'x' is not a number between "
                          "0 and 256");
    ck_assert_int_eq(set(&config, "threads=1", why), -EINVAL);
    ck_assert_str_eq(why, "--set 'threads=1': not of the form SECTION.KEY=VALUE");
    ck_assert_int_eq(set(&config, "daemon.threads", why), -EINVAL);
}
END_TEST

static const struct {
    const char *text;
    int line; /* 0: the file as a whole */
    const char *words;
} untied[] = {
    {"", 0, "there is no [pool NAME] section"},
    {"[limits]\nmax_channels=2\nmax_channels_per_uid=3\n" POOL, 3,
     "[limits] max_channels_per_uid: 3 is more than max_channels, 2"},
    {"[limits]\nmax_pages=20\nmax_pages_per_uid=10\n" POOL, 2,
     "[limits] max_pages: 20 is more than max_pages_per_uid, 10"},
    {POOL "\n[pool q]\n", 8, "[pool q] does not say layers"},
    {"[pool q]\nlayers=1\nkv_heads=1\ngroup=1\nhead_dim=64\n", 1, "[pool q] does not say memory"},
    {"[pool p]\nlayers=4\nkv_heads=2\ngroup=3\nmemory=16M\nhead_dim=65\n", 6,
     "[pool p] head_dim is 65"},
    {POOL "page_tokens=12\n", 7, "[pool p] page_tokens is 12"},
    {POOL "\nrank=3\n", 8, "[pool p] rank is 3"},
    {POOL "budget=1\n", 7, "[pool p] budget: 1 token is less than a page, page_tokens 16"},
    {POOL "budget=15\n", 7, "[pool p] budget: 15 tokens are less than a page, page_tokens 16"},
};

START_TEST(values_are_tied_together) {
    struct lk_config config;
    char text[512] = "", at[160];
    load_good(untied[_i].text, &config);
    ck_assert_ptr_nonnull(lk_config_invalid(&config, &origins, text, sizeof(text)));
    if (untied[_i].line)
        snprintf(at, sizeof(at), "%s:%d: %s", path, untied[_i].line, untied[_i].words);
    else
        snprintf(at, sizeof(at), "%s: %s", path, untied[_i].words);
    ck_assert_msg(strncmp(text, at, strlen(at)) == 0, "'%s' does not begin with '%s'", text, at);
}
END_TEST

/* ---- options and files together ---- */

static int read_with(int argc, char **argv, struct lk_config *ret, char why[1024]) {
    struct lk_options options;
    int rc = lk_options_parse(argc, argv, &options, why, 1024);
    ck_assert_msg(rc == 0, "%s", why);
    options.config = path;
    return lk_options_config(&options, ret, &origins, why, 1024);
}

/* Whoever said a thing last is named for it: an overlay, an option. */
START_TEST(errors_name_who_said_it) {
    struct lk_config config;
    char why[1024] = "", at[256];
    char *plain[] = {"locksd"}, *more[] = {"locksd", "--set", "pool p.head_dim=65"},
         *other[] = {"locksd", "--set=pool x.layers=2"};
    write_file(path, POOL);
    write_overlay("20.conf", "[pool b]\nlayers=2\n");
    ck_assert_int_eq(read_with(1, plain, &config, why), -EINVAL);
    snprintf(at, sizeof(at), "%s/20.conf:1: [pool b] does not say kv_heads", overlays);
    ck_assert_str_eq(why, at);
    write_overlay("20.conf", "\n[pool p]\n\nrank=3\n");
    ck_assert_int_eq(read_with(1, plain, &config, why), -EINVAL);
    snprintf(at, sizeof(at), "%s/20.conf:4: [pool p] rank is 3", overlays);
    ck_assert_msg(strncmp(why, at, strlen(at)) == 0, "%s", why);
    write_overlay("20.conf", "");
    ck_assert_int_eq(read_with(3, more, &config, why), -EINVAL);
    ck_assert_ptr_eq(strstr(why, "--set 'pool p.head_dim=65': [pool p] head_dim is 65"), why);
    ck_assert_int_eq(read_with(2, other, &config, why), -EINVAL);
    ck_assert_str_eq(why, "--set 'pool x.layers=2': [pool x] does not say kv_heads");
    ck_assert_int_eq(read_with(1, plain, &config, why), 0);
}
END_TEST

/* A limit by user that nobody has said is no reason to refuse a smaller one of all. */
START_TEST(a_default_follows_the_limit_above_it) {
    struct lk_config config;
    char why[1024] = "";
    char *plain[] = {"locksd"}, *said[] = {"locksd", "--set", "limits.max_channels_per_uid=33"};
    write_file(path, "[limits]\nmax_channels=32\n" POOL);
    ck_assert_msg(read_with(1, plain, &config, why) == 0, "%s", why);
    ck_assert_uint_eq(config.max_channels_per_uid, 32);
    ck_assert_int_eq(read_with(3, said, &config, why), -EINVAL);
    ck_assert_str_eq(why, "--set 'limits.max_channels_per_uid=33': [limits] max_channels_per_uid: "
                          "33 is more than max_channels, 32");
    write_file(path, "[limits]\nmax_channels=128\n" POOL);
    ck_assert_int_eq(read_with(1, plain, &config, why), 0);
    ck_assert_uint_eq(config.max_channels_per_uid, 64);
}
END_TEST

/* More overlays than there is room for names: places become vague, nothing else. */
START_TEST(many_overlays) {
    struct lk_config config;
    char why[1024] = "", name[32];
    char *plain[] = {"locksd"};
    write_file(path, POOL);
    for (int i = 100; i < 400; i++) {
        snprintf(name, sizeof(name), "%d.conf", i);
        write_overlay(name, i < 398 ? "[daemon]\nspin_us=5\n" : "[pool p]\nrank=3\n");
    }
    ck_assert_int_eq(read_with(1, plain, &config, why), -EINVAL);
    ck_assert_ptr_nonnull(strstr(why, ": [pool p] rank is 3"));
}
END_TEST

START_TEST(written_and_read_back) {
    struct lk_config config, again;
    char text[LK_CONFIG_TEXT_BYTES];
    load_good("[daemon]\nmemlock=yes\nnuma_node=3\n[limits]\nmax_arena=3G\nmax_pages=1000\n" POOL
              "dtype=fp16\n[pool q]\nlayers=1\nkv_heads=1\ngroup=1\nhead_dim=80\nmemory=1000000\n",
              &config);
    lk_config_text(&config, text);
    load_good(text, &again);
    assert_same(&config, &again);
    ck_assert_ptr_nonnull(strstr(text, "memory = 1000000\n"));
    ck_assert_ptr_nonnull(strstr(text, "max_arena = 3G\n"));
}
END_TEST

struct seen {
    char taken[512], restart[512];
};

static void note(void *context, const char *key, bool taken) {
    struct seen *seen = context;
    char *list = taken ? seen->taken : seen->restart;
    snprintf(list + strlen(list), sizeof(seen->taken) - strlen(list), "%s ", key);
}

START_TEST(reload_takes_what_it_may) {
    struct lk_config running, fresh;
    struct seen seen = {"", ""};
    load_good(POOL "[pool old]\nlayers=1\n", &running);
    load_good("[daemon]\nthreads=7\nlog_level=debug\ndrain_seconds=3\nsocket=/"
              "new\n[limits]\nmax_sequences=5\n"
              "max_row_tokens=9\n" POOL "rank=4\n[pool new]\nlayers=1\n",
              &fresh);
    lk_config_reload(&running, &fresh, note, &seen);
    ck_assert_str_eq(seen.taken, "daemon.log_level daemon.drain_seconds limits.max_sequences ");
    ck_assert_str_eq(
        seen.restart,
        "daemon.socket daemon.threads limits.max_row_tokens pool p.rank pool old pool new ");
    ck_assert_uint_eq(running.log_level, 3);
    ck_assert_uint_eq(running.drain_seconds, 3);
    ck_assert_uint_eq(running.max_sequences, 5);
    ck_assert_uint_eq(running.threads, 0);
    ck_assert_uint_eq(running.pool[0].geometry.rank, 8);
    ck_assert_str_eq(running.socket, LK_SOCKET_PATH);
    seen = (struct seen){"", ""};
    lk_config_reload(&running, &running, note, &seen);
    ck_assert_str_eq(seen.taken, "");
    ck_assert_str_eq(seen.restart, "");
}
END_TEST

/* Whether the file has the key, said or commented out, after the line [section]. */
static bool speaks_of(const char *file_path, const char *section, const char *key) {
    FILE *file = fopen(file_path, "r");
    char line[256], here[64] = "", name[64];
    bool found = false;
    ck_assert_msg(file != NULL, "%s: %s", file_path, strerror(errno));
    while (fgets(line, sizeof(line), file)) {
        const char *text = line + (line[0] == '#');
        if (sscanf(text, "[%63[^]]]", name) == 1)
            memcpy(here, name, sizeof(here));
        else if (sscanf(text, "%63[a-z_] =", name) == 1 &&
                 strchr(text, '=') == text + strlen(name) + 1)
            found |= strcmp(here, section) == 0 && strcmp(name, key) == 0;
    }
    fclose(file);
    return found;
}

START_TEST(the_example_has_every_key_and_loads) {
    const char *example = "packaging/locksd.conf";
    struct lk_config config;
    char why[1024] = "", all[LK_CONFIG_TEXT_BYTES], section[64] = "", key[64];
    int keys = 0, rc = lk_config_load(example, &config, &origins, why, sizeof(why));
    ck_assert_msg(rc == 0, "%s", why);
    ck_assert_ptr_null(lk_config_invalid(&config, &origins, why, sizeof(why)));
    lk_config_text(&config, all);
    for (char *line = strtok(all, "\n"); line; line = strtok(NULL, "\n")) {
        if (sscanf(line, "[%63[^]]]", section) == 1 || sscanf(line, "%63[a-z_] =", key) != 1)
            continue;
        ck_assert_msg(speaks_of(example, section, key), "%s does not speak of [%s] %s", example,
                      section, key);
        keys++;
    }
    ck_assert_int_gt(keys, 25);
}
END_TEST

/* Commented-out values of the example are the defaults: with all of them said, nothing changes. */
START_TEST(the_example_states_the_defaults) {
    struct lk_config example, said;
    char why[1024] = "", line[256], key[64];
    ck_assert_int_eq(lk_config_load("packaging/locksd.conf", &example, &origins, why, sizeof(why)),
                     0);
    FILE *in = fopen("packaging/locksd.conf", "r"), *out = fopen(path, "w");
    ck_assert(in && out);
    while (fgets(line, sizeof(line), in)) {
        bool assignment =
            sscanf(line, "#%63[a-z_] =", key) == 1 && strchr(line, '=') == line + strlen(key) + 2;
        fputs(line + assignment, out);
    }
    fclose(in);
    fclose(out);
    int rc = lk_config_load(path, &said, &origins, why, sizeof(why));
    ck_assert_msg(rc == 0, "%s", why);
    assert_same(&example, &said);
}
END_TEST

START_TEST(the_command_line) {
    struct lk_options options;
    char why[1024] = "";
    char *good[] = {"locksd", "--config=/a",      "--socket",    "/s",
                    "--set",  "daemon.threads=1", "--foreground"};
    ck_assert_int_eq(lk_options_parse(7, good, &options, why, sizeof(why)), 0);
    ck_assert_str_eq(options.config, "/a");
    ck_assert_str_eq(options.socket, "/s");
    ck_assert_uint_eq(options.sets, 1);
    ck_assert(options.foreground);
    char *unknown[] = {"locksd", "--threads"}, *missing[] = {"locksd", "--set"},
         *prefix[] = {"locksd", "--sett=1"};
    ck_assert_int_eq(lk_options_parse(2, unknown, &options, why, sizeof(why)), -EINVAL);
    ck_assert_str_eq(why, "unknown option '--threads'; locksd --help lists the options");
    ck_assert_int_eq(lk_options_parse(2, missing, &options, why, sizeof(why)), -EINVAL);
    ck_assert_str_eq(why, "--set: its value is missing; locksd --help lists the options");
    missing[1] = "--config";
    ck_assert_int_eq(lk_options_parse(2, missing, &options, why, sizeof(why)), -EINVAL);
    ck_assert_str_eq(why, "--config: its value is missing; locksd --help lists the options");
    ck_assert_int_eq(lk_options_parse(2, prefix, &options, why, sizeof(why)), -EINVAL);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("config");
    TCase *files = tcase_create("files");
    tcase_add_checked_fixture(files, make_folder, remove_folder);
    tcase_add_test(files, defaults_and_values);
    tcase_add_loop_test(files, every_error_has_its_sentence, 0, sizeof(wrong) / sizeof(*wrong));
    tcase_add_test(files, a_line_too_long);
    tcase_add_test(files, what_is_no_text);
    tcase_add_test(files, too_many_pools);
    tcase_add_test(files, a_missing_file);
    tcase_add_test(files, overlays_in_name_order);
    tcase_add_test(files, overlays_that_are_no_files);
    tcase_add_test(files, set_on_the_command_line);
    tcase_add_loop_test(files, values_are_tied_together, 0, sizeof(untied) / sizeof(*untied));
    tcase_add_test(files, errors_name_who_said_it);
    tcase_add_test(files, a_default_follows_the_limit_above_it);
    tcase_add_test(files, many_overlays);
    tcase_add_test(files, written_and_read_back);
    tcase_add_test(files, reload_takes_what_it_may);
    tcase_add_test(files, the_example_has_every_key_and_loads);
    tcase_add_test(files, the_example_states_the_defaults);
    tcase_add_test(files, the_command_line);
    suite_add_tcase(suite, files);
    return run_suite(suite);
}
