/* SPDX-License-Identifier: MIT */
/*
 * memory.h - what the machine can give, asked before it is taken and told in numbers.
 */
#ifndef LK_MEMORY_H
#define LK_MEMORY_H

#include "config.h"
#include "intake.h"
#include "numa.h"

/* "5.0 GiB" -> text */
const char *lk_memory_text(uint64_t bytes, char text[16]);
/* Bytes that can be taken without swapping: MemAvailable, less where a control group has less left.
 * UINT64_MAX: the kernel does not say. */
uint64_t lk_memory_available(void);
/* What the control groups named in `list` (as /proc/self/cgroup), mounted under `root`, leave: the
 * limit of each less what it uses. UINT64_MAX: there is no limit. */
uint64_t lk_memory_groups_left(const char *list, const char *root);

/* Bytes that a start takes: pools, workspaces, the account of sequences and pages, the process
 * itself. UINT64_MAX: more than that. */
uint64_t lk_memory_wanted(const struct lk_config *config);
/* Before anything is touched: do they fit? NULL, or a sentence with both numbers. */
const char *lk_memory_invalid(const struct lk_config *config, char *text, size_t bytes);

struct lk_memory_report {
    bool locked;     /* every pool, by daemon.memlock */
    bool refused;    /* something the configuration asks for was not granted */
    double on_node;  /* percent of pool memory on the placement's node; -1: not asked or unknown */
    uint64_t looked; /* bytes that on_node is about */
    char words[256]; /* what was not granted; empty: all was */
};

/* After the pools are taken and intake runs: locks them if asked, looks where they lie. Never
 * fails: words tell. */
void lk_memory_settle(const struct lk_config *config, const struct lk_placement *placement,
                      struct lk_intake *intake, struct lk_memory_report *ret);

#endif
