/* SPDX-License-Identifier: MIT */
/*
 * rig.h - a private daemon for a test: its folder, configuration, socket, log, and what it tells
 * systemd.
 *
 * The binary is $LOCKSD, else the one of the build the test is of. The daemon dies with the test.
 * Everything fails the test by itself (Check's assertions). One thread.
 */
#ifndef RIG_H
#define RIG_H

/* What must happen is waited for so long, to catch a hang: a sanitizer build on a busy machine, or
 * one that stands still for seconds, is no fault. */
#define RIG_PATIENCE 30.0

#include <stdbool.h>
#include <sys/types.h>

struct rig {
    char folder[40], socket[64], config[64], log[64];
    pid_t pid;  /* 0: not running */
    int notify; /* stands for systemd's socket */
};

/* The device of all daemons: $LOCKSD_TEST_DEVICE, else cpu, whatever the machine has; and the same
 * as an option's value, "daemon.device=cpu". */
const char *rig_device(void);
const char *rig_device_set(void);

/* Makes the folder, and a configuration of one small pool; `extra` follows it. */
void rig_open(struct rig *rig, const char *extra);
void rig_close(struct rig *rig); /* kills what runs, removes the folder */
void rig_configure(const struct rig *rig, const char *extra);

/* Starts the daemon with --config, --foreground and `arguments` (NULL at the end; may be NULL). */
void rig_launch(struct rig *rig, const char *const *arguments);
/* What rig_launch() does in the child: becomes the daemon. */
void rig_execute(const struct rig *rig, const char *const *arguments);
/* The same, and waits for READY. */
void rig_start(struct rig *rig, const char *extra);
/* -> exit code; -signal; fails the test after `seconds`. */
int rig_wait(struct rig *rig, double seconds);
int rig_stop(struct rig *rig); /* SIGTERM, then rig_wait() */

/* Where a program of the build lies, as "locksctl"; locksd: the one that is tested. */
const char *rig_binary(const char *program, char path[4096]);

/* What liblocks' tools start as a private daemon: $LOCKSD, else the one of this build. */
void rig_own_daemon(void);

/* Runs a program of the build, as "locksctl", and waits. -> exit code; both its streams in text. */
int rig_run(const char *program, const char *const *arguments, char *text, size_t bytes);

/* Whether the daemon tells systemd the word within `seconds`, and before it ends; what came before
 * is dropped. */
bool rig_hears(struct rig *rig, const char *word, double seconds);
/* All that was logged so far; the next call's is the same memory. */
const char *rig_log(const struct rig *rig);
/* Whether the log has the words within `seconds`. */
bool rig_logs(const struct rig *rig, const char *words, double seconds);

double rig_now(void); /* seconds */
void rig_sleep(double seconds);
int rig_connect(const struct rig *rig); /* a raw connection */

#endif
