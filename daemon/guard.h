/* SPDX-License-Identifier: MIT */
/*
 * guard.h - what a client sends does not keep a thread of the daemon in the kernel.
 *
 * A message may carry descriptors, wanted or not, and whoever drops the last reference to one
 * closes it: a TCP socket that lingers (SO_LINGER) over bytes nobody reads keeps that thread for as
 * long as its maker said. Nothing refuses such a message before it is received, nor before the
 * socket it waits in is closed. So both are done under guard: a timer of the thread's own
 * interrupts, every millisecond, what waits in there.
 *
 * What may stand between begin and end: calls that do without waiting, and do not mind a signal.
 * A descriptor that is not wanted is never installed: to close one may wait for its maker's file
 * system, which no signal ends (wire.h, ring.h: received without room for any).
 */
#ifndef LK_GUARD_H
#define LK_GUARD_H

/* Around what may drop descriptors of a client's. Not nested. Any thread. */
void lk_guard_begin(void);
void lk_guard_end(void);
/* Closes a socket that a client sends to. */
void lk_guard_close(int fd);

#endif
