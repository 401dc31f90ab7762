/* SPDX-License-Identifier: MIT */
/*
 * parallel.c - see parallel.h.
 */
#include "parallel.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define THREADS_MAX 256

struct work {
    lk_parallel_task *task;
    void *context;
    uint64_t count;
    _Atomic uint64_t next;
};

struct worker {
    struct work *work;
    unsigned thread;
    pthread_t id;
};

static void *toil(void *argument) {
    const struct worker *worker = argument;
    struct work *work = worker->work;
    /* Relaxed: the counter only hands out numbers; pthread_join() publishes the results. */
    for (uint64_t i;
         (i = atomic_fetch_add_explicit(&work->next, 1, memory_order_relaxed)) < work->count;)
        work->task(work->context, i, worker->thread);
    return NULL;
}

unsigned lk_parallel_processors(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set))
        return 1;
    int count = CPU_COUNT(&set);
    return count < 1 ? 1 : count > THREADS_MAX ? THREADS_MAX : (unsigned)count;
}

void lk_parallel_run(unsigned threads, uint64_t count, lk_parallel_task *task, void *context) {
    struct work work = {.task = task, .context = context, .count = count};
    struct worker workers[THREADS_MAX];
    unsigned started = 1;
    workers[0] = (struct worker){.work = &work};
    for (; started < threads && started < THREADS_MAX; started++) {
        workers[started] = (struct worker){.work = &work, .thread = started};
        if (pthread_create(&workers[started].id, NULL, toil, &workers[started]))
            break;
    }
    toil(&workers[0]);
    for (unsigned i = 1; i < started; i++)
        pthread_join(workers[i].id, NULL);
}
