/* SPDX-License-Identifier: MIT */
/*
 * locks-replay.c - from the command line to the exit code.
 */
#include "replay.h"

#include <stdio.h>
#include <stdlib.h>
#include <sysexits.h>

#include "../../shm_protocol/printable.h"
#include "../common/streams.h"

struct work {
    struct replay_options options;
    struct replay_trace trace;
    struct lk_output output;
    struct replay_bed bed;
    struct replay_run run, kept;
    struct replay_comparison *comparison;
    char why[REPLAY_WHY_BYTES];
};

static int compare(struct work *w) {
    w->comparison = calloc(w->trace.layer_count, sizeof(*w->comparison));
    if (w->comparison)
        return replay_compare(&w->options, &w->trace, &w->run, &w->kept, w->comparison, w->why);
    snprintf(w->why, sizeof(w->why), "no memory to compare");
    return EX_OSERR;
}

static int report(struct work *w) {
    struct replay_report report = {&w->options, &w->trace, &w->bed, &w->run, w->comparison};
    if (w->options.json)
        return replay_report_json(&report, w->why);
    replay_report_text(&report);
    return 0;
}

static int replay(struct work *w) {
    int rc = replay_trace_open(&w->options, &w->trace, w->why);
    if (!rc && w->options.out)
        rc = replay_out_open(&w->options, &w->output, w->why);
    if (!rc)
        rc = replay_bed_open(&w->options, &w->trace, &w->bed, w->why);
    if (!rc)
        replay_trace_check(&w->trace); /* may take minutes: mistakes are said before */
    if (!rc)
        rc = replay_run(&w->options, &w->trace, &w->bed, &w->run, &w->kept, w->why);
    if (!rc && w->options.out)
        rc = replay_out_write(&w->options, &w->trace, &w->run, &w->output, w->why);
    if (!rc && w->options.compare)
        rc = compare(w);
    if (!rc)
        rc = report(w);
    lk_output_abandon(&w->output);
    replay_bed_close(&w->bed);
    free(w->comparison);
    replay_run_free(&w->run);
    replay_run_free(&w->kept);
    replay_trace_close(&w->trace);
    return rc;
}

int main(int argc, char **argv) {
    static struct work work;

    lk_begin();
    int rc = replay_options_parse(argc, argv, &work.options, work.why);
    if (!rc && work.options.help)
        replay_options_help();
    else if (!rc && work.options.version)
        printf("locks-replay %s\n", LK_VERSION);
    else if (!rc)
        rc = replay(&work);
    if (rc)
        fprintf(stderr, "locks-replay: %s\n", lk_printable(work.why, "\n"));
    return lk_finish("locks-replay", rc);
}
