/* SPDX-License-Identifier: MIT */
/*
 * workers.c - see workers.h.
 *
 * Pairs of the memory order:
 *   W1 ticket stored by publish  -> W2 ticket loaded by a claim: the stage's data and its total
 *   D1 `finished` added to       -> D2 the same, by the last one: what all tasks wrote
 *   S1 sleepers added to, then ticket loaded (by who sleeps), against S2 ticket stored, then
 *      sleepers loaded (by who publishes): in one total order, so one of the two sees the other.
 * The totals of two epochs are kept, so that a slow worker that read an old ticket compares it with
 * that ticket's own total; its exchange then fails, because the epoch has moved on.
 */
#include "workers.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "clock.h"

#define LINE          64
#define SPINS_A_CLOCK 64        /* pauses between two looks at the clock: some 3 us */
#define STACK_BYTES   (1 << 20) /* a task takes 256 KiB at most, whatever `ulimit -s` says */

struct lk_workers {
    _Alignas(LINE) _Atomic uint64_t ticket; /* epoch << 32 | next task */
    _Atomic uint32_t total[2];              /* tasks, by the epoch's lowest bit */
    _Alignas(LINE) _Atomic uint32_t finished;
    _Alignas(LINE) _Atomic uint32_t sleepers;
    _Atomic uint32_t bell; /* the futex: counts wake-ups */
    _Atomic bool stopping;
    struct lk_workers_options options;
    uint32_t started;
    _Atomic uint32_t numbered; /* workers that know which they are */
    pthread_t thread[];
};

static void relax(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

static bool has_task(struct lk_workers *w, uint64_t ticket) {
    return (uint32_t)ticket < atomic_load(&w->total[ticket >> 32 & 1]);
}

static bool claim(struct lk_workers *w, uint32_t *ret_task) {
    uint64_t ticket = atomic_load(&w->ticket); /* W2 */

    while (has_task(w, ticket)) {
        *ret_task = (uint32_t)ticket;
        if (atomic_compare_exchange_weak(&w->ticket, &ticket, ticket + 1))
            return true;
    }
    return false;
}

static void work(struct lk_workers *w, uint32_t self, uint32_t task) {
    /* Both stay until this task is finished, and may be those of a later stage right after. */
    uint64_t epoch = atomic_load(&w->ticket) >> 32;
    uint32_t total = atomic_load(&w->total[epoch & 1]);

    w->options.run(w->options.context, self, task);
    if (atomic_fetch_add(&w->finished, 1) + 1 == total) /* D1, D2 */
        w->options.done(w->options.context);
}

void lk_workers_publish(struct lk_workers *w, uint32_t tasks) {
    uint64_t epoch = (atomic_load(&w->ticket) >> 32) + 1;

    atomic_store(&w->finished, 0);
    atomic_store(&w->total[epoch & 1], tasks);
    atomic_store(&w->ticket, epoch << 32); /* W1, S2 */
    uint32_t sleepers = atomic_load(&w->sleepers);
    uint32_t awake = w->options.threads > sleepers ? w->options.threads - sleepers : 0;
    if (sleepers == 0 || tasks <= awake)
        return;
    atomic_fetch_add(&w->bell, 1);
    syscall(SYS_futex, &w->bell, FUTEX_WAKE_PRIVATE, tasks - awake, NULL, NULL, 0);
}

/* -> there is a task, or the end has come. */
static bool spin(struct lk_workers *w) {
    uint64_t until = lk_engine_now_ns() + (uint64_t)w->options.spin_us * 1000;

    do {
        for (uint32_t i = 0; i < SPINS_A_CLOCK; i++) {
            if (has_task(w, atomic_load(&w->ticket)) || atomic_load(&w->stopping))
                return true;
            relax();
        }
    } while (lk_engine_now_ns() < until);
    return false;
}

static void doze(struct lk_workers *w) {
    uint32_t bell = atomic_load(&w->bell);

    atomic_fetch_add(&w->sleepers, 1); /* S1 */
    if (!has_task(w, atomic_load(&w->ticket)) && !atomic_load(&w->stopping))
        syscall(SYS_futex, &w->bell, FUTEX_WAIT_PRIVATE, bell, NULL, NULL, 0);
    atomic_fetch_sub(&w->sleepers, 1);
}

static void *worker(void *argument) {
    struct lk_workers *w = argument;
    uint32_t self = atomic_fetch_add(&w->numbered, 1), task;

    for (;;) {
        if (claim(w, &task))
            work(w, self, task);
        else if (atomic_load(&w->stopping))
            return NULL; /* who works on finds what follows: it asked for it itself */
        else if (!spin(w))
            doze(w);
    }
}

static void pin(pthread_t thread, int cpu) {
    cpu_set_t set;

    CPU_ZERO(&set);
    CPU_SET((size_t)cpu, &set);
    pthread_setaffinity_np(thread, sizeof set, &set); /* a wish: a narrower cpuset may refuse it */
}

static int start(struct lk_workers *w) {
    pthread_attr_t attributes;
    int error = pthread_attr_init(&attributes);

    if (error)
        return error;
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    error = pthread_create(&w->thread[w->started], &attributes, worker, w);
    pthread_attr_destroy(&attributes);
    return error;
}

int lk_workers_open(const struct lk_workers_options *options, struct lk_workers **ret) {
    int error = 0;

    if (options->threads == 0)
        return -EINVAL;
    size_t bytes = sizeof(struct lk_workers) + options->threads * sizeof(pthread_t);
    struct lk_workers *w = aligned_alloc(LINE, (bytes + LINE - 1) / LINE * LINE);
    if (!w)
        return -ENOMEM;
    *w = (struct lk_workers){.options = *options};
    for (; w->started < options->threads; w->started++) {
        error = start(w);
        if (error)
            goto fail;
        pthread_setname_np(w->thread[w->started], "locksd-worker");
        if (options->cpus)
            pin(w->thread[w->started], options->cpus[w->started]);
    }
    w->options.cpus = NULL; /* the caller's */
    *ret = w;
    return 0;
fail:
    lk_workers_close(w);
    return -error;
}

void lk_workers_close(struct lk_workers *w) {
    if (!w)
        return;
    atomic_store(&w->stopping, true);
    atomic_fetch_add(&w->bell, 1);
    syscall(SYS_futex, &w->bell, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
    for (uint32_t i = 0; i < w->started; i++)
        pthread_join(w->thread[i], NULL);
    free(w);
}
