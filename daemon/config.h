/* SPDX-License-Identifier: MIT */
/*
 * config.h - what an operator may say, read once and then constant but for the keys marked
 * (reload).
 *
 * lk_config_load() reads one INI file and then every *.conf of the folder "<file>.d" in name order;
 * later values win. Every key has a bound; an unknown key, section or value is an error with file
 * and line. Belongs to the control thread; the intake thread gets a copy.
 */
#ifndef LK_CONFIG_H
#define LK_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../kernels/kernels.h"
#include "../shm_protocol/locks_abi.h"
#include "origin.h"

#define LK_POOLS_MAX         16    /* pools of a daemon: one a model geometry */
#define LK_CHANNELS_MAX      256   /* client connections */
#define LK_PATH_BYTES        108   /* sun_path */
#define LK_CPUS_MAX          256   /* worker threads */
#define LK_CONFIG_TEXT_BYTES 16384 /* of lk_config_text(): 16 pools fit twice over */

struct lk_pool_config { /* [pool NAME] */
    char name[LK_NAME_BYTES];
    struct lk_geometry geometry;
    uint64_t memory_bytes;  /* pages and summaries: the capacity follows from it */
    uint64_t max_tokens;    /* of one sequence; 0: as the pool's capacity */
    uint32_t max_sequences; /* all clients' together */
    uint32_t budget;        /* default, tokens */
    uint32_t scan;          /* default, enum lk_scan; auto: see limits.h */
};

struct lk_config {
    /* [daemon] */
    char socket[LK_PATH_BYTES];
    char group[LK_NAME_BYTES]; /* Unix group that may connect beside the owner and root (reload) */
    uint32_t device;           /* enum lk_device of graphs/engine.h: auto, cpu, cuda */
    uint32_t gpu;              /* its number, where the device is CUDA */
    uint32_t resolved;         /* no key: the device once the start has decided; auto before */
    uint32_t threads;          /* CPU workers; 0: one a core the process may use */
    uint32_t spin_us;          /* intake and workers spin so long before they sleep */
    uint64_t workspace_bytes;  /* of each batch ahead; 0: two of the largest rows */
    uint32_t batch_rows;       /* at most, 1..256 */
    int32_t numa_node;         /* -1: no binding */
    uint32_t cpu_path;         /* auto, portable, avx2, avx512 */
    bool memlock;              /* lock pool memory */
    uint32_t log_level;        /* 0 error .. 3 debug (reload) */
    uint32_t drain_seconds;    /* SIGTERM waits so long for clients that hold sequences or leases or
                                  have work in flight (reload) */
    /* [limits], each of a connection unless it says otherwise (reload, at once for those connected,
     * but for max_row_tokens) */
    uint32_t max_channels;         /* of the daemon */
    uint32_t max_channels_per_uid; /* of the daemon */
    uint32_t max_sequences;
    uint32_t max_leases;
    uint64_t max_pages;              /* 0: the whole pool */
    uint64_t max_pages_per_uid;      /* 0: the whole pool */
    uint64_t max_arena_bytes;        /* (reload: of arenas to come) */
    uint64_t max_device_arena_bytes; /* 0: none may be had */
    uint32_t fence_ms;               /* a submission waits so long for a fence */
    uint32_t max_row_tokens;
    /* [pool NAME] */
    uint32_t pools;
    struct lk_pool_config pool[LK_POOLS_MAX];
};

void lk_config_defaults(struct lk_config *ret);
/* -> 0; -EINVAL: something wrong in a file; another -errno: a file cannot be read; with
 * "FILE:LINE: ..." in why. ret is untouched on failure; ret_origins: where each value is said. */
int lk_config_load(const char *path, struct lk_config *ret, struct lk_origins *ret_origins,
                   char *why, size_t why_bytes);
/* One "SECTION.KEY=VALUE", as "daemon.threads=2" or "pool default.head_dim=64", which `option` of
 * the command line says. -> 0, or -EINVAL with "OPTION: ..." in why. */
int lk_config_set(struct lk_config *config, struct lk_origins *origins, const char *option,
                  const char *assignment, char *why, size_t why_bytes);
/* The words of the keys dtype and scan, for a pool's valid values. */
const char *lk_config_dtype_name(uint32_t dtype);
const char *lk_config_scan_name(uint32_t scan);
/* Once all is said: a default that follows another value does so. */
void lk_config_settle(struct lk_config *config, const struct lk_origins *origins);
/* NULL if consistent (pools present, bounds tied together), else the reason, its place first. */
const char *lk_config_invalid(const struct lk_config *config, const struct lk_origins *origins,
                              char *text, size_t bytes);
/* Where the field of *config was said: "FILE:12: " and the like -> text */
const char *lk_config_place(const struct lk_config *config, const struct lk_origins *origins,
                            const void *field, char text[LK_PLACE_BYTES]);
/* As a file that lk_config_load() reads back to the same, every key said. */
void lk_config_text(const struct lk_config *config, char text[LK_CONFIG_TEXT_BYTES]);

/* Called for each key whose value differs, as "daemon.threads"; taken: it is reloadable and now in
 * force. A pool that came or went is named "pool NAME". */
typedef void lk_config_changed(void *context, const char *key, bool taken);
/* Takes the reloadable keys of `fresh` over into `running`. */
void lk_config_reload(struct lk_config *running, const struct lk_config *fresh,
                      lk_config_changed *changed, void *context);

#endif
