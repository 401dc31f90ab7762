/* SPDX-License-Identifier: MIT */
/*
 * options.c - see options.h. Main thread; prints nothing.
 */
#include "options.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

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
    "  --version, --help\n"
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
    else if (strcmp(argument, "--help") == 0)
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
        snprintf(why, bytes, "unknown option '%s'; locksd --help lists the options", argument);
        return -EINVAL;
    }
    if (value)
        return 0;
    snprintf(why, bytes, "%s: its value is missing", argument);
    return -EINVAL;
}

int lk_options_parse(int argc, char **argv, struct lk_options *ret, char *why, size_t why_bytes) {
    struct lk_options options = {.action = LK_RUN, .config = LK_CONFIG_PATH};
    for (int at = 1; at < argc; at++) {
        int rc = parse_one(argc, argv, &at, &options, why, why_bytes);
        if (rc)
            return rc;
    }
    *ret = options;
    return 0;
}

int lk_options_config(const struct lk_options *options, struct lk_config *ret, char *why,
                      size_t why_bytes) {
    struct lk_config config;
    int rc = lk_config_load(options->config, &config, why, why_bytes);
    for (uint32_t i = 0; i < options->sets && !rc; i++)
        rc = lk_config_set(&config, options->set[i], why, why_bytes);
    if (rc)
        return rc;
    if (options->socket) {
        char assignment[4096];
        snprintf(assignment, sizeof(assignment), "daemon.socket=%s", options->socket);
        rc = lk_config_set(&config, assignment, why, why_bytes);
        if (rc)
            return rc;
    }
    char reason[512];
    if (lk_config_invalid(&config, reason, sizeof(reason))) {
        snprintf(why, why_bytes, "%s: %s", options->config, reason);
        return -EINVAL;
    }
    *ret = config;
    return 0;
}
