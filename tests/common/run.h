/* SPDX-License-Identifier: MIT */
/*
 * run.h - how a test program ends: its suite is run, a child a test, as Check's environment says.
 */
#ifndef TESTS_RUN_H
#define TESTS_RUN_H

#include <check.h>

/* Takes the suite. -> what main() returns. */
static inline int run_suite(Suite *suite) {
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_ENV);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed != 0;
}

#endif
