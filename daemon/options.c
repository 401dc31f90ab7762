/* SPDX-License-Identifier: MIT */
/*
 * options.c - see options.h. Main thread; prints nothing.
 */
#include "options.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define SEE_HELP "; locksd --help lists the options"

const char lk_options_help[] =
    "usage: locksd [--config FILE] [--foreground] [--socket PATH] [--set SECTION.KEY=VALUE]...\n"
    "       locksd [--config FILE] [--set SECTION.KEY=VALUE]... --check-config\n"
    "\n"
    "Owns the pages of a KV cache and attends to them for its clients.\n"
    "\n"
    "  --config FILE        configuration, with overlays FILE.d/*.conf (" LK_CONFIG_PATH ")\n"
    "  --check-config       check it, print every key's value and stop\n"
    "  --set SECTION.KEY=VALUE\n"
    "                       set a key after the files, as --set \"pool default.head_dim=64\"\n"
    "  --socket PATH        socket to listen at, over the configuration's\n"
    "  --foreground         write for people instead of the journal\n"
    "  --version, --help, -h\n"
    "\n"
    "SIGTERM and SIGINT drain and stop, a second one stops at once; SIGHUP reloads.\n"
    "Manual: locksd(8), locksd.conf(5); ask a running daemon with locksctl(1).\n";

/* Takes "--name VALUE" or "--name=VALUE" at argv[*at]. -> whether it is that option; *ret NULL:
 * value missing. */
static bool takes(const char *name, int argc, char **argv, int *at, const char **ret) {
    size_t length = strlen(name);
    if (strncmp(argv[*at], name, length) != 0 || (argv[*at][length] && argv[*at][length] != '='))
        return false;
    if (argv[*at][length])
        *ret = argv[*at] + length + 1;
    else
        *ret = *at + 1 < argc ? argv[++*at] : NULL;
    return true;
}

static int parse_one(int argc, char **argv, int *at, struct lk_options *options, char *why,
                     size_t bytes) {
    const char *argument = argv[*at], *value = "";
    if (strcmp(argument, "--check-config") == 0)
        options->action = LK_CHECK_CONFIG;
    else if (strcmp(argument, "--version") == 0)
        options->action = LK_PRINT_VERSION;
    else if (strcmp(argument, "--help") == 0 || strcmp(argument, "-h") == 0)
        options->action = LK_PRINT_HELP;
    else if (strcmp(argument, "--foreground") == 0)
        options->foreground = true;
    else if (takes("--config", argc, argv, at, &value))
        options->config = value;
    else if (takes("--socket", argc, argv, at, &value))
        options->socket = value;
    else if (takes("--set", argc, argv, at, &value)) {
        if (options->sets == LK_SETS_MAX) {
            snprintf(why, bytes, "--set: more than %d of them; use a file", LK_SETS_MAX);
            return -EINVAL;
        }
        options->set[options->sets++] = value;
    } else {
        snprintf(why, bytes, "unknown option '%s'" SEE_HELP, argument);
        return -EINVAL;
    }
    if (value)
        return 0;
    snprintf(why, bytes, "%s: its value is missing" SEE_HELP, argument);
    return -EINVAL;
}

/* What the command line says of the configuration. */
static int apply(const struct lk_options *options, struct lk_config *config,
                 struct lk_origins *origins, char *why, size_t bytes) {
    char option[512], assignment[512];
    int rc = 0;
    for (uint32_t i = 0; i < options->sets && !rc; i++) {
        snprintf(option, sizeof(option), "--set '%s'", options->set[i]);
        rc = lk_config_set(config, origins, option, options->set[i], why, bytes);
    }
    if (rc || !options->socket)
        return rc;
    snprintf(option, sizeof(option), "--socket '%s'", options->socket);
    snprintf(assignment, sizeof(assignment), "daemon.socket=%s", options->socket);
    return lk_config_set(config, origins, option, assignment, why, bytes);
}

int lk_options_parse(int argc, char **argv, struct lk_options *ret, char *why, size_t why_bytes) {
    struct lk_options options = {.action = LK_RUN, .config = LK_CONFIG_PATH};
    struct lk_config alone;
    struct lk_origins origins;
    int rc = 0;
    for (int at = 1; at < argc && !rc; at++)
        rc = parse_one(argc, argv, &at, &options, why, why_bytes);
    if (rc)
        return rc;
    lk_config_defaults(&alone);
    lk_origins_open(&origins, options.config);
    rc = apply(&options, &alone, &origins, why, why_bytes);
    if (!rc)
        *ret = options;
    return rc;
}

int lk_options_config(const struct lk_options *options, struct lk_config *ret,
                      struct lk_origins *ret_origins, char *why, size_t why_bytes) {
    struct lk_config config;
    int rc = lk_config_load(options->config, &config, ret_origins, why, why_bytes);
    if (!rc)
        rc = apply(options, &config, ret_origins, why, why_bytes);
    if (rc)
        return rc;
    lk_config_settle(&config, ret_origins);
    if (lk_config_invalid(&config, ret_origins, why, why_bytes))
        return -EINVAL;
    *ret = config;
    return 0;
}
