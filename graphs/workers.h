/* SPDX-License-Identifier: MIT */
/*
 * workers.h - threads that carry out the tasks of one stage at a time.
 *
 * Problem: a decode step is a dozen stages of tens of microseconds; starting a stage must cost a
 * cache line, and idle workers must cost nothing. Idea: a stage is published in one 64-bit ticket,
 * epoch in the upper half and next task in the lower; a worker takes a task by adding one to it.
 * Who finishes a stage's last task is alone then, and is asked what comes next (`done`), so there
 * is no coordinator to hand over to. A worker that finds no task spins for a set time, then sleeps
 * on a futex; publishing wakes as many sleepers as there are tasks that nobody awake could take.
 *
 * Invariants: at most one stage is open; what a task wrote is seen by `done` and by every task of
 * later stages; `run` and `done` are called on workers only. Publishing is done by `done`, or by
 * any thread while no stage is open and no `done` runs.
 */
#ifndef LK_WORKERS_H
#define LK_WORKERS_H

#include <stdint.h>

struct lk_workers;

struct lk_workers_options {
    uint32_t threads, spin_us;
    const int *cpus; /* [threads] to pin worker i to, or NULL */
    void (*run)(void *context, uint32_t worker, uint32_t task); /* worker below threads */
    void (*done)(void *context); /* the stage's tasks are all finished */
    void *context;
};

/* -> 0 or -errno: EINVAL no thread, ENOMEM, EAGAIN the system's limit on threads. */
int lk_workers_open(const struct lk_workers_options *options, struct lk_workers **ret);
/* Workers end when no stage is open any more. Blocks until they have. NULL: nothing. */
void lk_workers_close(struct lk_workers *workers);

/* Open a stage of tasks 0..tasks-1, at least 1. Wakes, never blocks. */
void lk_workers_publish(struct lk_workers *workers, uint32_t tasks);

#endif
