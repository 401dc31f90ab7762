/* SPDX-License-Identifier: MIT */
/*
 * options.h - the command line of locksd, and the configuration it leads to.
 */
#ifndef LK_OPTIONS_H
#define LK_OPTIONS_H

#include "config.h"

#define LK_CONFIG_PATH "/etc/locksd/locksd.conf"
#define LK_SETS_MAX    64 /* --set on one command line */

enum lk_options_action { LK_RUN, LK_CHECK_CONFIG, LK_PRINT_VERSION, LK_PRINT_HELP };

struct lk_options { /* strings are argv's */
    enum lk_options_action action;
    const char *config;
    const char *socket; /* NULL: the configuration's */
    bool foreground;
    uint32_t sets;
    const char *set[LK_SETS_MAX];
};

/* Every --set and --socket is looked at by itself, too. -> 0, or -EINVAL with a sentence in why. */
int lk_options_parse(int argc, char **argv, struct lk_options *ret, char *why, size_t why_bytes);
/* The file, its overlays, then --set and --socket, checked as a whole. Called again by a reload.
 * -> 0, -EINVAL: the configuration is wrong, another -errno: it cannot be read; with a sentence in
 * why. ret_origins: where each value is said. */
int lk_options_config(const struct lk_options *options, struct lk_config *ret,
                      struct lk_origins *ret_origins, char *why, size_t why_bytes);
extern const char lk_options_help[];

#endif
