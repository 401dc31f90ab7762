/* SPDX-License-Identifier: MIT */
/*
 * memory.c - see memory.h. Main thread at start; lk_memory_available() on any thread.
 *
 * A pool is locked through a mapping of our own over the engine's memfd: what is locked are the
 * pages, whoever else maps them. The mapping stays until the process ends, and the lock with it.
 */
#include "memory.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "limits.h"
#include "sequence.h"

#define PROCESS_BYTES (UINT64_C(16) << 20) /* program, buffers and stacks: 12 MiB and more */

const char *lk_memory_text(uint64_t bytes, char text[16]) {
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    unsigned unit = 0;
    for (; value >= 1024 && unit < 4; unit++)
        value /= 1024;
    snprintf(text, 16, unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
    return text;
}

static uint64_t meminfo_available(void) {
    FILE *file = fopen("/proc/meminfo", "re");
    uint64_t kilobytes = 0;
    char line[128];
    bool found = false;
    while (file && !found && fgets(line, sizeof(line), file))
        found = sscanf(line, "MemAvailable: %" SCNu64, &kilobytes) == 1;
    if (file)
        fclose(file);
    return found ? kilobytes * 1024 : UINT64_MAX;
}

/* A control group's files, of the second version and of the first. What it keeps of files can be
 * taken from it; shared memory is not among that. */
struct group_files {
    const char *limit, *used, *inactive, *active; /* the latter two are lines of memory.stat */
};
static const struct group_files second_version = {"memory.max", "memory.current", "inactive_file",
                                                  "active_file"};
static const struct group_files first_version = {"memory.limit_in_bytes", "memory.usage_in_bytes",
                                                 "total_inactive_file", "total_active_file"};

/* The number in a file; of a file of many, that behind `name` (else NULL). -> whether there is one.
 */
static bool read_number(const char *folder, const char *file, const char *name, uint64_t *ret) {
    char path[4096], line[128];
    bool found = false;
    if (snprintf(path, sizeof(path), "%s/%s", folder, file) >= (int)sizeof(path))
        return false;
    FILE *from = fopen(path, "re");
    size_t length = name ? strlen(name) : 0;
    while (from && !found && fgets(line, sizeof(line), from))
        found = (!name || (strncmp(line, name, length) == 0 && line[length] == ' ')) &&
                sscanf(line + length, "%" SCNu64, ret) == 1;
    if (from)
        fclose(from);
    return found;
}

/* What one group may still take. */
static uint64_t group_left(const char *folder, const struct group_files *files) {
    uint64_t limit, used, inactive = 0, active = 0;
    if (!read_number(folder, files->limit, NULL, &limit))
        return UINT64_MAX; /* "max", or no such group */
    if (!read_number(folder, files->used, NULL, &used))
        return limit;
    read_number(folder, "memory.stat", files->inactive, &inactive);
    read_number(folder, "memory.stat", files->active, &active);
    used = used > inactive + active ? used - inactive - active : 0;
    return limit > used ? limit - used : 0;
}

/* The least that the group at `path` and those it lies in leave. path is spoiled. */
static uint64_t groups_left(const char *root, char *path, const struct group_files *files) {
    char folder[3584], *slash;
    uint64_t least = UINT64_MAX;
    do {
        snprintf(folder, sizeof(folder), "%s%s", root, path);
        uint64_t left = group_left(folder, files);
        least = left < least ? left : least;
        slash = strrchr(path, '/');
        if (slash)
            *slash = 0;
    } while (slash);
    return least;
}

uint64_t lk_memory_groups_left(const char *list, const char *root) {
    char line[3072], folder[512];
    uint64_t least = UINT64_MAX;
    FILE *file = fopen(list, "re");
    while (file && fgets(line, sizeof(line), file)) { /* "0::PATH", "4:memory:PATH" */
        line[strcspn(line, "\n")] = 0;
        char *names = strchr(line, ':'), *path = names ? strchr(names + 1, ':') : NULL;
        if (!path)
            continue;
        bool second = path == names + 1;
        *path++ = 0;
        if (!second && !strstr(names, "memory"))
            continue;
        snprintf(folder, sizeof(folder), "%s%s", root, second ? "" : "/memory");
        uint64_t left = groups_left(folder, path, second ? &second_version : &first_version);
        least = left < least ? left : least;
    }
    if (file)
        fclose(file);
    return least;
}

uint64_t lk_memory_available(void) {
    uint64_t available = meminfo_available();
    uint64_t left = lk_memory_groups_left("/proc/self/cgroup", "/sys/fs/cgroup");
    return available < left ? available : left;
}

static uint64_t add(uint64_t a, uint64_t b) {
    return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

static uint64_t pool_bytes(enum lk_device device, const struct lk_pool_config *pool) {
    (void)device;
    return pool->memory_bytes;
}

/* To keep account of a pool: the ledger's part and what intake has beside it (ledger.c, pool.c,
 * intake.c), but tables, which grow with what is held. */
static uint64_t account_bytes(enum lk_device device, const struct lk_pool_config *pool) {
    uint64_t pages = lk_pool_fitting_pages(device, pool), layers = pool->geometry.layers;
    uint64_t of_page = sizeof(struct lk_ledger_quad) / LK_QUAD_PAGES + 2 * sizeof(uint64_t) +
                       2 * layers + 2 * layers / LK_QUAD_PAGES;
    uint64_t of_sequence = sizeof(struct lk_ledger_sequence) + sizeof(struct lk_sequence) +
                           layers * (sizeof(uint64_t) + sizeof(struct lk_sequence_layer));
    return pages * of_page + pool->max_sequences * of_sequence;
}

/* What a pool takes of one thing; of all pools together, and the pool that takes most. */
typedef uint64_t bytes_of(enum lk_device device, const struct lk_pool_config *pool);

static uint64_t sum_of(const struct lk_config *config, bytes_of *of) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < config->pools; i++)
        sum = add(sum, of(config->resolved, &config->pool[i]));
    return sum;
}

static const struct lk_pool_config *largest_by(const struct lk_config *config, bytes_of *of) {
    const struct lk_pool_config *largest = &config->pool[0];
    for (uint32_t i = 1; i < config->pools; i++)
        if (of(config->resolved, &config->pool[i]) > of(config->resolved, largest))
            largest = &config->pool[i];
    return largest;
}

static uint64_t wanted_by_pools(const struct lk_config *config) {
    return sum_of(config, pool_bytes);
}

static uint64_t wanted_for_workspaces(const struct lk_config *config) {
    return LK_BATCHES_AHEAD * lk_workspace_bytes(config);
}

uint64_t lk_memory_wanted(const struct lk_config *config) {
    return add(add(wanted_by_pools(config), wanted_for_workspaces(config)),
               add(PROCESS_BYTES, sum_of(config, account_bytes)));
}

/* Pools have their room, but not with the workspaces, which are taken at the start as well. */
static const char *workspaces_invalid(const struct lk_config *config, uint64_t available,
                                      char *text, size_t bytes) {
    uint64_t wanted = add(wanted_by_pools(config), wanted_for_workspaces(config));
    char one[16], all[16], have[16];
    if (wanted <= available)
        return NULL;
    snprintf(text, bytes,
             "the pools and %d workspaces of %s want %s, but %s of memory are available: lower "
             "daemon.workspace or memory of a pool, or free some",
             LK_BATCHES_AHEAD, lk_memory_text(lk_workspace_bytes(config), one),
             lk_memory_text(wanted, all), lk_memory_text(available, have));
    return text;
}

/* Nor with what is kept of sequences and pages. */
static const char *accounts_invalid(const struct lk_config *config, uint64_t available, char *text,
                                    size_t bytes) {
    uint64_t wanted = lk_memory_wanted(config);
    char one[16], all[16], have[16];
    if (wanted <= available)
        return NULL;
    const struct lk_pool_config *pool = largest_by(config, account_bytes);
    snprintf(text, bytes,
             "the pools, workspaces and the account of sequences and pages want %s, but %s of "
             "memory are available: lower max_sequences of [pool %s], whose %" PRIu32
             " sequences of %" PRIu32 " layers and pages take %s to keep account of, or memory of "
             "a pool, or free some",
             lk_memory_text(wanted, all), lk_memory_text(available, have), pool->name,
             pool->max_sequences, pool->geometry.layers,
             lk_memory_text(account_bytes(config->resolved, pool), one));
    return text;
}

const char *lk_memory_invalid(const struct lk_config *config, char *text, size_t bytes) {
    uint64_t wanted = wanted_by_pools(config), available = lk_memory_available();
    char one[16], all[16], have[16];
    if (config->resolved == LK_DEVICE_CUDA) /* the GPU's: the engine asks for it */
        return NULL;
    if (wanted <= available) {
        const char *why = workspaces_invalid(config, available, text, bytes);
        return why ? why : accounts_invalid(config, available, text, bytes);
    }
    const struct lk_pool_config *pool = largest_by(config, pool_bytes);
    lk_memory_text(pool->memory_bytes, one);
    snprintf(text, bytes,
             "the pools want %s, but %s of memory are available: lower memory of [pool %s], which "
             "wants %s, or free "
             "some",
             lk_memory_text(wanted, all), lk_memory_text(available, have), pool->name, one);
    return text;
}

static void add_words(struct lk_memory_report *report, const char *words) {
    size_t length = strlen(report->words);
    snprintf(report->words + length, sizeof(report->words) - length, "%s%s", length ? "; " : "",
             words);
}

/* Why a pool could not be locked, with what to do. */
static void explain_lock(struct lk_memory_report *report, const char *pool, uint64_t bytes,
                         int error) {
    char words[200], have[16], want[16];
    struct rlimit limit;
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur < bytes)
        snprintf(words, sizeof(words),
                 "pool %s is not locked: the limit on locked memory (RLIMIT_MEMLOCK, LimitMEMLOCK= "
                 "of systemd) is %s, "
                 "the pool is %s",
                 pool, lk_memory_text(limit.rlim_cur, have), lk_memory_text(bytes, want));
    else
        snprintf(words, sizeof(words), "pool %s is not locked: %s", pool, strerror(error));
    report->locked = false;
    report->refused = true;
    add_words(report, words);
}

/* One pool's share on the node, by its size, into that of all looked at so far. */
static void count_share(struct lk_memory_report *report, int share, uint64_t bytes) {
    double before = report->on_node < 0 ? 0 : report->on_node, looked = (double)report->looked;
    if (share < 0)
        return;
    report->looked += bytes;
    report->on_node = (before * looked + share * (double)bytes) / (looked + (double)bytes);
}

/* Maps pool `index` and locks or samples it. */
static void settle_pool(const struct lk_config *config, const struct lk_placement *placement,
                        struct lk_intake *intake, uint32_t index, struct lk_memory_report *report) {
    struct lk_msg_pool pool;
    struct stat file;
    int fd;
    if (lk_intake_pool(intake, index, &pool, &fd) || fstat(fd, &file))
        return;
    uint64_t bytes = (uint64_t)file.st_size;
    void *memory = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
        if (config->memlock)
            explain_lock(report, pool.name, bytes, errno);
        return;
    }
    if (config->memlock && mlock(memory, bytes))
        explain_lock(report, pool.name, bytes, errno);
    if (placement->memory_bound)
        count_share(report, lk_numa_share(memory, bytes, placement->node), bytes);
    if (!config->memlock || !report->locked)
        munmap(memory, bytes);
}

/* Pools are shared memory: whether it gets huge pages is a setting of its own. */
static void look_for_huge_pages(struct lk_memory_report *report) {
    static const char path[] = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    char line[128] = "", words[200];
    FILE *file = fopen(path, "re");
    if (file && fgets(line, sizeof(line), file) &&
        (strstr(line, "[never]") || strstr(line, "[deny]"))) {
        snprintf(words, sizeof(words),
                 "pools lie on small pages: 'advise' in %s makes scans faster", path);
        add_words(report, words);
    }
    if (file)
        fclose(file);
}

void lk_memory_settle(const struct lk_config *config, const struct lk_placement *placement,
                      struct lk_intake *intake, struct lk_memory_report *ret) {
    bool host = config->resolved != LK_DEVICE_CUDA;
    *ret = (struct lk_memory_report){.locked = config->memlock && host, .on_node = -1, .words = ""};
    if (!host)
        return;
    if (config->memlock || placement->memory_bound)
        for (uint32_t i = 0; i < config->pools; i++)
            settle_pool(config, placement, intake, i, ret);
    look_for_huge_pages(ret);
}
