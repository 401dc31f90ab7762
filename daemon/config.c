/* SPDX-License-Identifier: MIT */
/*
 * config.c - reads, checks, compares and writes the configuration.
 *
 * Idea: one table says everything of a key - name, place, type, bounds, whether a reload may change
 * it. Reading, writing and reloading walk the table, so that a key is added in one line. libinih
 * splits lines; the reader around it counts them, takes indentation away (libinih would take an
 * indented line for a continuation) and sees sections that have no key.
 *
 * Runs at start and on the control thread. Does not touch the machine: that a pool fits in memory
 * is memory.c's matter, that the engine supports it the engine's.
 */
#include "config.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <ini.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define LINE_BYTES      200                 /* of libinih, terminator included */
#define FILE_BYTES_MAX  (UINT64_C(1) << 20) /* far more than any that is meant */
#define BYTE_ORDER_MARK "\xef\xbb\xbf"      /* of UTF-8: some editors begin a file with it */
#define GIB             (UINT64_C(1) << 30)
#define TIB             (UINT64_C(1) << 40)

enum type {
    TEXT,   /* char[high], at least low characters */
    PATH,   /* the same, absolute */
    U32,    /* low..high */
    I32,    /* low..high */
    SIZE,   /* uint64_t, low..high, with K, M, G or T */
    SWITCH, /* bool: yes or no */
    NAMED,  /* uint32_t: low + index in names */
};

struct key {
    const char *name;
    size_t offset;
    enum type type;
    bool reload;
    int64_t low, high;
    const char *const *names;
};

static const char *const device_names[] = {"auto", "cpu", "cuda", NULL};
static const char *const path_names[] = {"auto", "portable", "avx2", "avx512", NULL};
static const char *const level_names[] = {"error", "warning", "info", "debug", NULL};
static const char *const dtype_names[] = {"bf16", "fp16", "fp32", NULL};
static const char *const scan_names[] = {"auto", "full", "coarse", "nested", "tree", NULL};

#define AT(field) offsetof(struct lk_config, field)
static const struct key daemon_keys[] = {
    {"socket", AT(socket), PATH, false, 1, LK_PATH_BYTES, NULL},
    {"group", AT(group), TEXT, true, 0, LK_NAME_BYTES, NULL},
    {"device", AT(device), NAMED, false, 0, 2, device_names},
    {"gpu", AT(gpu), U32, false, 0, 63, NULL},
    {"threads", AT(threads), U32, false, 0, LK_CPUS_MAX, NULL},
    {"spin_us", AT(spin_us), U32, false, 0, 10000, NULL},
    {"workspace", AT(workspace_bytes), SIZE, false, 0, TIB, NULL},
    {"batch_rows", AT(batch_rows), U32, false, 1, LK_ROWS_MAX, NULL},
    {"numa_node", AT(numa_node), I32, false, -1, 1023, NULL},
    {"cpu_path", AT(cpu_path), NAMED, false, 0, 3, path_names},
    {"memlock", AT(memlock), SWITCH, false, 0, 1, NULL},
    {"log_level", AT(log_level), NAMED, true, 0, 3, level_names},
    {"drain_seconds", AT(drain_seconds), U32, true, 0, 3600, NULL},
    {0},
};
static const struct key limit_keys[] = {
    {"max_channels", AT(max_channels), U32, true, 1, LK_CHANNELS_MAX, NULL},
    {"max_channels_per_uid", AT(max_channels_per_uid), U32, true, 1, LK_CHANNELS_MAX, NULL},
    {"max_sequences", AT(max_sequences), U32, true, 1, 65536, NULL},
    {"max_leases", AT(max_leases), U32, true, 0, 1024, NULL},
    {"max_pages", AT(max_pages), SIZE, true, 0, UINT32_MAX, NULL},
    {"max_pages_per_uid", AT(max_pages_per_uid), SIZE, true, 0, UINT32_MAX, NULL},
    {"max_arena", AT(max_arena_bytes), SIZE, true, 65536, LK_ARENA_BYTES_MAX, NULL},
    {"max_device_arena", AT(max_device_arena_bytes), SIZE, true, 0, LK_ARENA_BYTES_MAX, NULL},
    {"fence_ms", AT(fence_ms), U32, true, 1, 60000, NULL},
    {"max_row_tokens", AT(max_row_tokens), U32, false, 1, LK_ROW_TOKENS_MAX, NULL},
    {0},
};
#undef AT
#define AT(field) offsetof(struct lk_pool_config, field)
static const struct key pool_keys[] = {
    {"layers", AT(geometry.layers), U32, false, 1, 1024, NULL},
    {"kv_heads", AT(geometry.kv_heads), U32, false, 1, 256, NULL},
    {"group", AT(geometry.group), U32, false, 1, LK_GROUP_MAX, NULL},
    {"head_dim", AT(geometry.head_dim), U32, false, 1, LK_HEAD_DIM_MAX, NULL},
    {"page_tokens", AT(geometry.page_tokens), U32, false, 1, LK_PAGE_TOKENS_MAX, NULL},
    {"rank", AT(geometry.rank), U32, false, 1, LK_RANK_MAX, NULL},
    {"dtype", AT(geometry.dtype), NAMED, false, LK_BF16, LK_FP32, dtype_names},
    {"memory", AT(memory_bytes), SIZE, false, 65536, 64 * TIB, NULL},
    {"max_tokens", AT(max_tokens), SIZE, false, 0, TIB, NULL},
    {"max_sequences", AT(max_sequences), U32, false, 1, 65536, NULL},
    {"budget", AT(budget), U32, false, 1, 1 << 30, NULL},
    {"scan", AT(scan), NAMED, false, LK_SCAN_AUTO, LK_SCAN_TREE, scan_names},
    {0},
};
#undef AT

__attribute__((format(printf, 4, 5))) static int refuse(int error, char *why, size_t bytes,
                                                        const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(why, bytes, format, list);
    va_end(list);
    return error;
}

void lk_config_defaults(struct lk_config *ret) {
    *ret = (struct lk_config){
        .socket = LK_SOCKET_PATH,
        .group = "locks",
        .spin_us = 20,
        .batch_rows = LK_ROWS_MAX,
        .numa_node = -1,
        .log_level = 2,
        .drain_seconds = 10,
        .max_channels = 64,
        .max_channels_per_uid = 64,
        .max_sequences = 1024,
        .max_leases = 16,
        .max_arena_bytes = GIB,
        .max_device_arena_bytes = GIB / 4,
        .fence_ms = 1000,
        .max_row_tokens = 8192,
    };
}

static void pool_defaults(struct lk_pool_config *ret, const char *name) {
    *ret = (struct lk_pool_config){
        .geometry = {.page_tokens = 16, .rank = 8, .dtype = LK_BF16},
        .max_sequences = 1024,
        .budget = 2048,
        .scan = LK_SCAN_AUTO,
    };
    snprintf(ret->name, sizeof(ret->name), "%s", name);
}

/* ---- sections ---- */

static bool pool_name_valid(const char *name) {
    size_t length = strlen(name);
    for (size_t i = 0; i < length; i++)
        if (!isalnum((unsigned char)name[i]) && !strchr("_.-", name[i]))
            return false;
    return length > 0 && length < LK_NAME_BYTES;
}

/* What says it: a line of a file, or an option. */
struct place {
    struct lk_origins *origins;
    uint32_t source, line;
    uint32_t heading; /* the line of the section's, where it is a file's */
};

static void note(const struct place *place, const struct lk_config *config, const void *field) {
    lk_origins_note(place->origins, (size_t)((const char *)field - (const char *)config),
                    place->source, place->line);
}

static struct lk_pool_config *find_pool(struct lk_config *config, const char *name) {
    for (uint32_t i = 0; i < config->pools; i++)
        if (strcmp(config->pool[i].name, name) == 0)
            return &config->pool[i];
    return NULL;
}

static const struct key *enter_pool(struct lk_config *config, const struct place *place,
                                    const char *name, void **ret_base, char *why, size_t bytes) {
    struct lk_pool_config *pool = find_pool(config, name);
    if (!pool && !pool_name_valid(name)) {
        snprintf(why, bytes, "pool name '%s': 1 to %d letters, digits, '_', '.' or '-'", name,
                 LK_NAME_BYTES - 1);
        return NULL;
    }
    if (!pool && config->pools == LK_POOLS_MAX) {
        snprintf(why, bytes, "[pool %s]: there are %d pools already, the most there may be", name,
                 LK_POOLS_MAX);
        return NULL;
    }
    if (!pool) {
        pool = &config->pool[config->pools++];
        pool_defaults(pool, name);
        note(place, config, pool->name);
    }
    *ret_base = pool;
    return pool_keys;
}

/* Of "pool NAME". */
static const char *pool_name(const char *section) {
    return section + 5 + strspn(section + 5, " ");
}

/* Opens the section, making a pool that is new. -> its keys and the struct they lie in; NULL with a
 * sentence in why. */
static const struct key *enter(struct lk_config *config, const struct place *place,
                               const char *section, void **ret_base, char *why, size_t bytes) {
    if (strncmp(section, "pool ", 5) == 0)
        return enter_pool(config, place, pool_name(section), ret_base, why, bytes);
    *ret_base = config;
    if (strcmp(section, "daemon") == 0)
        return daemon_keys;
    if (strcmp(section, "limits") == 0)
        return limit_keys;
    if (*section)
        snprintf(why, bytes,
                 "there is no section [%s]: sections are [daemon], [limits] and [pool NAME]",
                 section);
    else
        snprintf(why, bytes, "a key before the first section: [daemon], [limits] or [pool NAME]");
    return NULL;
}

/* ---- values ---- */

/* Digits and, if `suffix`, one of K, M, G, T. */
static bool parse_size(const char *text, bool suffix, uint64_t *ret) {
    char *end;
    if (!isdigit((unsigned char)*text))
        return false;
    errno = 0;
    uint64_t value = strtoull(text, &end, 10);
    if (errno)
        return false;
    static const char units[] = "KMGT";
    const char *unit = suffix && *end ? strchr(units, *end) : NULL;
    if (unit) {
        unsigned shift = 10 * (unsigned)(unit - units + 1);
        if (value > UINT64_MAX >> shift)
            return false;
        value <<= shift;
        end++;
    }
    *ret = value;
    return *end == 0;
}

/* The largest unit that divides it. */
static const char *size_text(uint64_t value, char text[32]) {
    static const char *const units[] = {"", "K", "M", "G", "T"};
    unsigned unit = 0;
    for (; unit < 4 && value && value % 1024 == 0; unit++)
        value /= 1024;
    snprintf(text, 32, "%" PRIu64 "%s", value, units[unit]);
    return text;
}

static int parse_number(const struct key *key, char *field, const char *text, char *why,
                        size_t bytes) {
    char low[32], high[32];
    bool minus = key->low < 0 && *text == '-', size = key->type == SIZE;
    uint64_t magnitude;
    snprintf(low, sizeof(low), "%" PRId64, key->low);
    snprintf(high, sizeof(high), "%" PRId64, key->high);
    if (size) {
        size_text((uint64_t)key->low, low);
        size_text((uint64_t)key->high, high);
    }
    if (!parse_size(text + minus, size, &magnitude))
        return refuse(-EINVAL, why, bytes, "'%s' is not a number%s between %s and %s", text,
                      size ? " that may end in K, M, G or T, as in 64G," : "", low, high);
    if (minus ? magnitude > (uint64_t)-key->low
              : magnitude > (uint64_t)key->high || (int64_t)magnitude < key->low)
        return refuse(-EINVAL, why, bytes, "%s is not between %s and %s", text, low, high);
    if (size)
        memcpy(field, &magnitude, sizeof(magnitude));
    else
        memcpy(field, &(int32_t){minus ? -(int32_t)magnitude : (int32_t)magnitude},
               sizeof(int32_t));
    return 0;
}

static int parse_text(const struct key *key, char *field, const char *text, char *why,
                      size_t bytes) {
    size_t length = strlen(text);
    if (length < (size_t)key->low || length >= (size_t)key->high)
        return refuse(-EINVAL, why, bytes,
                      "'%s' has %zu characters, not between %" PRId64 " and %" PRId64, text, length,
                      key->low, key->high - 1);
    if (key->type == PATH && *text != '/')
        return refuse(-EINVAL, why, bytes, "'%s' is not an absolute path", text);
    memset(field, 0, (size_t)key->high);
    snprintf(field, (size_t)key->high, "%s", text);
    return 0;
}

static int parse_named(const struct key *key, char *field, const char *text, char *why,
                       size_t bytes) {
    char list[64] = "";
    for (uint32_t i = 0; key->names[i]; i++) {
        if (strcmp(key->names[i], text) == 0) {
            memcpy(field, &(uint32_t){(uint32_t)key->low + i}, sizeof(uint32_t));
            return 0;
        }
        snprintf(list + strlen(list), sizeof(list) - strlen(list), "%s%s", i ? ", " : "",
                 key->names[i]);
    }
    return refuse(-EINVAL, why, bytes, "'%s' is none of %s", text, list);
}

static int parse_switch(char *field, const char *text, char *why, size_t bytes) {
    bool yes = strcmp(text, "yes") == 0;
    if (!yes && strcmp(text, "no") != 0)
        return refuse(-EINVAL, why, bytes, "'%s' is neither yes nor no", text);
    memcpy(field, &yes, sizeof(yes));
    return 0;
}

static int parse_value(const struct key *key, char *field, const char *text, char *why,
                       size_t bytes) {
    const char *hash = strchr(text, '#');
    if (hash && (hash == text || isblank((unsigned char)hash[-1])))
        return refuse(-EINVAL, why, bytes,
                      "'%s': behind a value a comment begins with ;, and with # only on a line of "
                      "its own",
                      text);
    switch (key->type) {
    case TEXT:
    case PATH:
        return parse_text(key, field, text, why, bytes);
    case NAMED:
        return parse_named(key, field, text, why, bytes);
    case SWITCH:
        return parse_switch(field, text, why, bytes);
    default:
        return parse_number(key, field, text, why, bytes);
    }
}

/* Of a key that is said twice under one heading: one of the two is a mistake. Where there is no
 * room for names (source 0) it cannot be told. */
static const struct lk_origin *said_before(const struct lk_config *config,
                                           const struct place *place, const void *field) {
    const struct lk_origin *origin =
        lk_origins_find(place->origins, (size_t)((const char *)field - (const char *)config));
    bool here = origin && place->line && place->source && origin->source == place->source;
    return here && origin->line > place->heading ? origin : NULL;
}

static int assign(struct lk_config *config, const struct place *place, const char *section,
                  const char *name, const char *value, char *why, size_t bytes) {
    char reason[256], list[256] = "";
    void *base;
    const struct key *key = enter(config, place, section, &base, why, bytes);
    if (!key)
        return -EINVAL;
    for (; key->name; key++) {
        if (strcmp(key->name, name) == 0) {
            char *field = (char *)base + key->offset;
            const struct lk_origin *first = said_before(config, place, field);
            if (first)
                return refuse(-EINVAL, why, bytes, "[%s] %s: said in line %u already", section,
                              name, first->line);
            int rc = parse_value(key, field, value, reason, sizeof(reason));
            if (rc)
                return refuse(rc, why, bytes, "[%s] %s: %s", section, name, reason);
            note(place, config, field);
            return 0;
        }
        snprintf(list + strlen(list), sizeof(list) - strlen(list), "%s%s", *list ? ", " : "",
                 key->name);
    }
    return refuse(-EINVAL, why, bytes, "[%s] has no key '%s': its keys are %s", section, name,
                  list);
}

/* ---- files ---- */

struct source {
    FILE *file;
    struct lk_config *config;
    size_t got;         /* bytes of the line, a NUL among them or not */
    uint64_t bytes;     /* of all lines so far */
    struct place place; /* its line: the one being read */
    int error;          /* the first, and its sentence */
    char why[512];
};

/* A pool's section may go on in another file; in one file it is rather a copy that was to become
 * another pool. */
static bool is_second(const struct source *source, const char *section, uint32_t *ret_line) {
    const struct lk_pool_config *pool =
        strncmp(section, "pool ", 5) == 0 ? find_pool(source->config, pool_name(section)) : NULL;
    if (!pool)
        return false;
    const struct lk_origin *origin = lk_origins_find(
        source->place.origins, (size_t)((const char *)pool - (const char *)source->config));
    *ret_line = origin ? origin->line : 0;
    return origin && origin->source && origin->source == source->place.source;
}

static void check_section(struct source *source, const char *line) {
    char section[LINE_BYTES];
    uint32_t first;
    void *base;
    const char *end = strchr(line, ']');
    if (!end) {
        source->error =
            refuse(-EINVAL, source->why, sizeof(source->why), "the section lacks its ']'");
        return;
    }
    const char *rest = end + 1 + strspn(end + 1, " \t\r\n");
    if (*rest && *rest != ';' && *rest != '#') { /* libinih would not look at it */
        source->error = refuse(-EINVAL, source->why, sizeof(source->why),
                               "behind a section's ']' there is more: a key has a line of its own");
        return;
    }
    snprintf(section, sizeof(section), "%.*s", (int)(end - line - 1), line + 1);
    source->place.heading = source->place.line;
    if (is_second(source, section, &first)) {
        source->error = refuse(-EINVAL, source->why, sizeof(source->why),
                               "a second [%s]: the first is in line %u", section, first);
        return;
    }
    if (!enter(source->config, &source->place, section, &base, source->why, sizeof(source->why)))
        source->error = -EINVAL;
    else if (base != source->config)
        note(&source->place, source->config, base);
}

/* fgets() that says how many bytes there were, NUL bytes among them. */
static char *get_line(struct source *source, char *text, size_t bytes) {
    int c = 0;
    size_t got = 0;
    while (got + 1 < bytes && c != '\n' && (c = getc(source->file)) != EOF)
        text[got++] = (char)c;
    text[got] = 0;
    source->got = got;
    source->bytes += got;
    return got ? text : NULL;
}

/* libinih's fgets(): the next line without its indentation; NULL at the end or after an error. */
static char *read_line(char *text, int bytes, void *context) {
    struct source *source = context;
    if (source->error)
        return NULL;
    if (!get_line(source, text, (size_t)bytes)) {
        if (ferror(source->file)) {
            source->error = refuse(-errno, source->why, sizeof(source->why),
                                   "cannot be read: %s; --config "
                                   "FILE names another",
                                   strerror(errno));
            source->place.line = 0;
        }
        return NULL;
    }
    source->place.line++;
    size_t length = strlen(text);
    if (length < source->got || source->bytes > FILE_BYTES_MAX) {
        source->error = refuse(-EINVAL, source->why, sizeof(source->why),
                               length < source->got ? "a NUL byte: this is no text"
                                                    : "the file is larger than 1 MiB");
        return NULL;
    }
    if (length == (size_t)bytes - 1 && text[length - 1] != '\n') {
        source->error = refuse(-EINVAL, source->why, sizeof(source->why),
                               "the line is longer than %d characters", LINE_BYTES - 2);
        return NULL;
    }
    size_t mark = source->place.line == 1 && strncmp(text, BYTE_ORDER_MARK, 3) == 0 ? 3 : 0;
    size_t indent = mark + strspn(text + mark, " \t\r\f\v");
    memmove(text, text + indent, length - indent + 1);
    if (*text == '[')
        check_section(source, text);
    return source->error ? NULL : text;
}

static int take_key(void *context, const char *section, const char *name, const char *value) {
    struct source *source = context;
    if (!source->error)
        source->error = assign(source->config, &source->place, section, name, value, source->why,
                               sizeof(source->why));
    return !source->error;
}

static int load_file(const char *path, struct lk_config *config, struct lk_origins *origins,
                     char *why, size_t bytes) {
    struct source source = {.config = config, .file = fopen(path, "re")};
    if (!source.file)
        return refuse(-errno, why, bytes, "%s: cannot be opened: %s; --config FILE names another",
                      path, strerror(errno));
    source.place = (struct place){origins, lk_origins_source(origins, path), 0, 0};
    int rc = ini_parse_stream(read_line, &source, take_key, &source);
    fclose(source.file);
    if (source.error && source.place.line)
        return refuse(source.error, why, bytes, "%s:%u: %s", path, source.place.line, source.why);
    if (source.error)
        return refuse(source.error, why, bytes, "%s: %s", path, source.why);
    if (rc > 0)
        return refuse(-EINVAL, why, bytes,
                      "%s:%d: neither a [section], nor KEY = VALUE, nor a comment (# or ;)", path,
                      rc);
    return rc ? refuse(-ENOMEM, why, bytes, "%s: no memory to read it", path) : 0;
}

static int is_overlay(const struct dirent *entry) {
    size_t length = strlen(entry->d_name);
    return entry->d_name[0] != '.' && length > 5 &&
           strcmp(entry->d_name + length - 5, ".conf") == 0;
}

/* To open a FIFO waits for who writes to it; what the folder holds was put there to be read. */
static int load_overlay(const char *path, struct lk_config *config, struct lk_origins *origins,
                        char *why, size_t bytes) {
    struct stat file;
    if (stat(path, &file) == 0 && !S_ISREG(file.st_mode))
        return refuse(-EINVAL, why, bytes, "%s: is no regular file", path);
    return load_file(path, config, origins, why, bytes);
}

static int load_overlays(const char *path, struct lk_config *config, struct lk_origins *origins,
                         char *why, size_t bytes) {
    char folder[4096], file[4096 + 256];
    struct dirent **entries;
    int rc = 0;
    snprintf(folder, sizeof(folder), "%s.d", path);
    int count = scandir(folder, &entries, is_overlay, alphasort);
    if (count < 0) /* ENOTDIR: the file's name plus .d is something else's */
        return errno == ENOENT || errno == ENOTDIR
                   ? 0
                   : refuse(-errno, why, bytes, "%s: cannot be read: %s", folder, strerror(errno));
    for (int i = 0; i < count; i++) {
        snprintf(file, sizeof(file), "%s/%s", folder, entries[i]->d_name);
        if (!rc)
            rc = load_overlay(file, config, origins, why, bytes);
        free(entries[i]);
    }
    free(entries);
    return rc;
}

int lk_config_load(const char *path, struct lk_config *ret, struct lk_origins *ret_origins,
                   char *why, size_t why_bytes) {
    struct lk_config config;
    lk_config_defaults(&config);
    lk_origins_open(ret_origins, path);
    int rc = load_file(path, &config, ret_origins, why, why_bytes);
    if (!rc)
        rc = load_overlays(path, &config, ret_origins, why, why_bytes);
    if (!rc)
        *ret = config;
    return rc;
}

int lk_config_set(struct lk_config *config, struct lk_origins *origins, const char *option,
                  const char *assignment, char *why, size_t why_bytes) {
    char text[LINE_BYTES], reason[512];
    const struct place place = {origins, lk_origins_source(origins, option), 0, 0};
    const char *equals = strchr(assignment, '=');
    size_t length = equals ? (size_t)(equals - assignment) : 0;
    if (!equals || length >= sizeof(text))
        return refuse(-EINVAL, why, why_bytes, "%s: not of the form SECTION.KEY=VALUE", option);
    memcpy(text, assignment, length);
    text[length] = 0;
    char *dot = strrchr(text, '.'); /* a pool's name may have dots, a key has none */
    if (!dot)
        return refuse(-EINVAL, why, why_bytes, "%s: not of the form SECTION.KEY=VALUE", option);
    *dot = 0;
    int rc = assign(config, &place, text, dot + 1, equals + 1, reason, sizeof(reason));
    return rc ? refuse(rc, why, why_bytes, "%s: %s", option, reason) : 0;
}

/* ---- what ties values together ---- */

static bool is_said(const struct lk_config *config, const struct lk_origins *origins,
                    const void *field) {
    return lk_origins_find(origins, (size_t)((const char *)field - (const char *)config));
}

const char *lk_config_place(const struct lk_config *config, const struct lk_origins *origins,
                            const void *field, char text[LK_PLACE_BYTES]) {
    return lk_origins_place(origins, (size_t)((const char *)field - (const char *)config), text);
}

void lk_config_settle(struct lk_config *config, const struct lk_origins *origins) {
    if (!is_said(config, origins, &config->max_channels_per_uid) &&
        config->max_channels_per_uid > config->max_channels)
        config->max_channels_per_uid = config->max_channels;
}

/* The key that a sentence of lk_geometry_invalid() begins with. */
static const void *named_field(const struct lk_pool_config *pool, const char *reason) {
    size_t length = strcspn(reason, " ");
    for (const struct key *key = pool_keys; key->name; key++)
        if (strlen(key->name) == length && strncmp(key->name, reason, length) == 0)
            return (const char *)pool + key->offset;
    return pool;
}

/* -> NULL, or the field that is wrong with a sentence in text. */
static const void *pool_wrong(const struct lk_config *config, const struct lk_origins *origins,
                              const struct lk_pool_config *pool, char *text, size_t bytes) {
    char reason[256];
    for (const struct key *key = pool_keys; key->name; key++) {
        uint64_t value = 0;
        memcpy(&value, (const char *)pool + key->offset, key->type == SIZE ? 8 : 4);
        if (key->low > 0 && !value) {
            snprintf(text, bytes, "[pool %s] does not say %s", pool->name, key->name);
            return pool;
        }
    }
    if (lk_geometry_invalid(&pool->geometry, reason, sizeof(reason))) {
        snprintf(text, bytes, "[pool %s] %s", pool->name, reason);
        return named_field(pool, reason);
    }
    if (pool->budget >= pool->geometry.page_tokens)
        return NULL;
    snprintf(text, bytes, "[pool %s] budget: %u token%s less than a page, page_tokens %u",
             pool->name, pool->budget, pool->budget == 1 ? " is" : "s are",
             pool->geometry.page_tokens);
    return is_said(config, origins, &pool->budget) ? &pool->budget : &pool->geometry.page_tokens;
}

/* The same of the whole. */
static const void *wrong(const struct lk_config *config, const struct lk_origins *origins,
                         char *text, size_t bytes) {
    const void *field = NULL;
    if (config->pools == 0) {
        snprintf(
            text, bytes,
            "there is no [pool NAME] section: it says which model's pages to hold, and how many");
        return &config->pools; /* said nowhere */
    }
    if (config->max_channels_per_uid > config->max_channels) {
        snprintf(text, bytes, "[limits] max_channels_per_uid: %u is more than max_channels, %u",
                 config->max_channels_per_uid, config->max_channels);
        return &config->max_channels_per_uid;
    }
    if (config->max_pages_per_uid && config->max_pages > config->max_pages_per_uid) {
        snprintf(text, bytes,
                 "[limits] max_pages: %" PRIu64 " is more than max_pages_per_uid, %" PRIu64,
                 config->max_pages, config->max_pages_per_uid);
        return &config->max_pages;
    }
    for (uint32_t i = 0; i < config->pools && !field; i++)
        field = pool_wrong(config, origins, &config->pool[i], text, bytes);
    return field;
}

const char *lk_config_dtype_name(uint32_t dtype) {
    return dtype_names[dtype - LK_BF16];
}

const char *lk_config_scan_name(uint32_t scan) {
    return scan_names[scan - LK_SCAN_AUTO];
}

const char *lk_config_invalid(const struct lk_config *config, const struct lk_origins *origins,
                              char *text, size_t bytes) {
    char place[LK_PLACE_BYTES], reason[512];
    const void *field = wrong(config, origins, reason, sizeof(reason));
    if (!field)
        return NULL;
    snprintf(text, bytes, "%s%s", lk_config_place(config, origins, field, place), reason);
    return text;
}

/* ---- writing and comparing ---- */

struct writer {
    char *text;
    size_t length, bytes;
};

__attribute__((format(printf, 2, 3))) static void put(struct writer *w, const char *format, ...) {
    va_list list;
    va_start(list, format);
    int count = vsnprintf(w->text + w->length, w->bytes - w->length, format, list);
    va_end(list);
    w->length += (size_t)count < w->bytes - w->length ? (size_t)count : w->bytes - w->length - 1;
}

static void write_section(struct writer *w, const struct key *keys, const char *base) {
    char text[32];
    for (const struct key *key = keys; key->name; key++) {
        const char *field = base + key->offset;
        bool is_number = key->type == U32 || key->type == I32 || key->type == NAMED;
        uint64_t size = 0;
        int32_t number = 0;
        memcpy(&size, field, key->type == SIZE ? sizeof(size) : 0);
        memcpy(&number, field, is_number ? sizeof(number) : 0);
        if (key->type == TEXT || key->type == PATH)
            put(w, "%s = %s\n", key->name, field);
        else if (key->type == SWITCH)
            put(w, "%s = %s\n", key->name, *field ? "yes" : "no");
        else if (key->type == NAMED)
            put(w, "%s = %s\n", key->name, key->names[number - key->low]);
        else if (key->type == SIZE)
            put(w, "%s = %s\n", key->name, size_text(size, text));
        else
            put(w, "%s = %" PRId32 "\n", key->name, number);
    }
}

void lk_config_text(const struct lk_config *config, char text[LK_CONFIG_TEXT_BYTES]) {
    struct writer w = {.text = text, .bytes = LK_CONFIG_TEXT_BYTES};
    put(&w, "[daemon]\n");
    write_section(&w, daemon_keys, (const char *)config);
    put(&w, "\n[limits]\n");
    write_section(&w, limit_keys, (const char *)config);
    for (uint32_t i = 0; i < config->pools; i++) {
        put(&w, "\n[pool %s]\n", config->pool[i].name);
        write_section(&w, pool_keys, (const char *)&config->pool[i]);
    }
}

static size_t field_bytes(const struct key *key) {
    return key->type == TEXT || key->type == PATH ? (size_t)key->high
           : key->type == SWITCH                  ? sizeof(bool)
           : key->type == SIZE                    ? 8
                                                  : 4;
}

static void reload_section(const char *section, const struct key *keys, void *running,
                           const void *fresh, lk_config_changed *changed, void *context) {
    char name[LK_NAME_BYTES + 64];
    for (const struct key *key = keys; key->name; key++) {
        char *old = (char *)running + key->offset;
        const char *new = (const char *)fresh + key->offset;
        if (memcmp(old, new, field_bytes(key)) == 0)
            continue;
        if (key->reload)
            memcpy(old, new, field_bytes(key));
        snprintf(name, sizeof(name), "%s.%s", section, key->name);
        changed(context, name, key->reload);
    }
}

void lk_config_reload(struct lk_config *running, const struct lk_config *fresh,
                      lk_config_changed *changed, void *context) {
    char section[LK_NAME_BYTES + 8];
    struct lk_config wanted = *fresh;
    reload_section("daemon", daemon_keys, running, fresh, changed, context);
    reload_section("limits", limit_keys, running, fresh, changed, context);
    for (uint32_t i = 0; i < running->pools; i++) {
        const struct lk_pool_config *pool = find_pool(&wanted, running->pool[i].name);
        snprintf(section, sizeof(section), "pool %s", running->pool[i].name);
        if (pool)
            reload_section(section, pool_keys, &running->pool[i], pool, changed, context);
        else
            changed(context, section, false);
    }
    for (uint32_t i = 0; i < wanted.pools; i++) {
        snprintf(section, sizeof(section), "pool %s", wanted.pool[i].name);
        if (!find_pool(running, wanted.pool[i].name))
            changed(context, section, false);
    }
}
