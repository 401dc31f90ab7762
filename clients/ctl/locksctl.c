/* SPDX-License-Identifier: MIT */
/*
 * locksctl.c - asks a running locksd. The verbs are a table; exit codes are those of sysexits.h.
 */
#include "ctl.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

#include "../../shm_protocol/printable.h"
#include "../common/streams.h"
#include "locks.h"

static const struct verb {
    const char *name;
    ctl_print *print;
    int changes; /* something */
    const char *what;
} verbs[] = {
    {"status", ctl_status, 0, "the daemon at a glance"},
    {"clients", ctl_clients, 0, "who is connected, what each has asked and holds"},
    {"pools", ctl_pools, 0, "geometry, room in tokens and what is free"},
    {"drain", ctl_drain, 1, "take no new sequences and leases (root and the daemon's user)"},
    {"resume", ctl_resume, 1, "take them again"},
    {"reload", ctl_reload, 1, "read the configuration again; says what needs a restart"},
};

struct request {
    const struct verb *verb;
    const char *socket;
    int json, help, version;
};

static void print_help(void) {
    printf("usage: locksctl [--socket PATH] [--json] VERB\n\nAsks a running locksd.\n\n");
    for (size_t i = 0; i < sizeof(verbs) / sizeof(*verbs); i++)
        printf("  %-9s  %s\n", verbs[i].name, verbs[i].what);
    printf("\n  --socket PATH  the daemon's socket ($LOCKSD_SOCKET, else %s)\n", LK_SOCKET_PATH);
    printf(
        "  --json         the daemon's answer as it is\n"
        "  --version, --help\n\n"
        "Exit codes: 0; 64 usage; 69 no daemon answers; 77 not allowed; 78 the configuration is\n"
        "wrong (reload); 76 versions; 74 stdout; 70 anything else. Manual: locksctl(1).\n");
}

static const struct verb *find_verb(const char *name) {
    for (size_t i = 0; i < sizeof(verbs) / sizeof(*verbs); i++)
        if (strcmp(verbs[i].name, name) == 0)
            return &verbs[i];
    return NULL;
}

static int usage(const char *problem, const char *what) {
    fprintf(stderr, "locksctl: %s%s; locksctl --help lists verbs and options\n", problem, what);
    return EX_USAGE;
}

/* -> 0 or EX_USAGE, said. */
static int parse(int argc, char **argv, struct request *request) {
    for (int i = 1; i < argc; i++) {
        const char *argument = argv[i];
        if (strcmp(argument, "--json") == 0)
            request->json = 1;
        else if (strcmp(argument, "--help") == 0 || strcmp(argument, "-h") == 0)
            request->help = 1;
        else if (strcmp(argument, "--version") == 0)
            request->version = 1;
        else if (strncmp(argument, "--socket=", 9) == 0)
            request->socket = argument + 9;
        else if (strcmp(argument, "--socket") == 0) {
            if (i + 1 == argc)
                return usage("--socket: its value is missing", "");
            request->socket = argv[++i];
        } else if (argument[0] == '-')
            return usage("unknown option ", argument);
        else if (request->verb)
            return usage("one verb at a time, not also ", argument);
        else if (!(request->verb = find_verb(argument)))
            return usage("unknown verb ", argument);
    }
    if (!request->verb && !request->help && !request->version)
        return usage("a verb is missing", "");
    return 0;
}

/* An error of locks_admin() as exit code, said. */
static int failed(const struct request *request, int error, const char *why) {
    fprintf(stderr, "locksctl: %s: %s\n", request->verb->name, why);
    switch (-error) {
    case ENOENT:
    case ECONNREFUSED:
        fprintf(stderr, "locksctl: start it with 'systemctl start locksd', or name its socket: "
                        "--socket PATH or "
                        "$LOCKSD_SOCKET\n");
        return EX_UNAVAILABLE;
    case ETIMEDOUT:
        if (request->verb->changes)
            fprintf(stderr, "locksctl: a daemon that goes on later will not carry it out\n");
        return EX_UNAVAILABLE;
    case ECONNRESET:
    case EAGAIN:
    case ESHUTDOWN:
        return EX_UNAVAILABLE;
    case EACCES:
    case EPERM:
        return EX_NOPERM;
    case EPROTO:
        return EX_PROTOCOL;
    case EINVAL:
        return request->verb->print == ctl_reload ? EX_CONFIG : EX_USAGE;
    default:
        return EX_SOFTWARE;
    }
}

static int print_answer(const struct request *request, char *text) {
    json_error_t error;
    json_t *reply = json_loads(text, 0, &error);
    if (!reply) {
        fprintf(stderr, "locksctl: the daemon's answer is no JSON: %s\n",
                lk_printable(error.text, ""));
        return EX_PROTOCOL;
    }
    if (request->json)
        printf("%s\n", lk_printable(text, "\n\t"));
    else
        request->verb->print(reply);
    json_decref(reply);
    return 0;
}

int main(int argc, char **argv) {
    struct request request = {0};
    char why[512], *text;

    lk_begin();
    int code = parse(argc, argv, &request);
    if (code)
        return code;
    if (request.help) {
        print_help();
    } else if (request.version) {
        printf("locksctl %s\n", LK_VERSION);
    } else {
        int rc = locks_admin(request.socket, request.verb->name, &text, why, sizeof(why));
        if (rc)
            return failed(&request, rc, why);
        code = print_answer(&request, text);
        free(text);
    }
    return lk_finish("locksctl", code);
}
