/* SPDX-License-Identifier: MIT */
/*
 * assert.h - checks for our own bugs, on in release. Never for what a client says.
 *
 * The expression has no side effects. A failure is told to the operator and ends the process: state
 * that is wrong is not served from. Any thread.
 */
#ifndef LK_ASSERT_H
#define LK_ASSERT_H

__attribute__((noreturn, cold)) void lk_assert_failed(const char *expression, const char *file,
                                                      int line);

#define LK_ASSERT(expression)                                                                      \
    ((expression) ? (void)0 : lk_assert_failed(#expression, __FILE__, __LINE__))

#endif
