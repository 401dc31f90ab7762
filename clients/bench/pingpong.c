/* SPDX-License-Identifier: MIT */
/*
 * pingpong.c - the cost of an empty step beside that of a bare exchange. See pingpong.h.
 */
#include "pingpong.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../../shm_protocol/atomics.h"
#include "../../shm_protocol/segment.h"

#define SAMPLES_MAX (UINT64_C(100000) * 1000)

/* The lines of a bare exchange, as many and as far apart as those an empty step moves: entries and
 * completions take turns, the descriptor of a lone client is always the same. A completion is there
 * once its fence is. */
struct court {
    uint64_t tail __attribute__((aligned(LK_LINE)));
    struct lk_sqe entries[LK_SQ_ENTRIES_DEFAULT] __attribute__((aligned(256)));
    struct lk_step_desc descriptor __attribute__((aligned(1024)));
    struct lk_cqe completions[LK_CQ_PER_SQ * LK_SQ_ENTRIES_DEFAULT] __attribute__((aligned(4096)));
};

struct bench {
    struct locks *locks;
    struct locks_step step;
    struct court *court;
    uint64_t served; /* exchanges of the court so far */
    int whistle[2];  /* a pipe: so many exchanges come now */
    pid_t partner;
    uint64_t *bare, *through; /* samples, ns */
};

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

/* ---- the bare exchange ---- */

static struct lk_cqe *completion_of(struct court *court, uint64_t number) {
    return &court->completions[number % (LK_CQ_PER_SQ * LK_SQ_ENTRIES_DEFAULT)];
}

static void serve_one(struct court *court, uint64_t number) {
    struct lk_sqe entry;
    struct lk_step_desc descriptor;
    while (lk_load_acquire64(&court->tail) != number)
        lk_pause();
    entry = court->entries[number % LK_SQ_ENTRIES_DEFAULT];
    descriptor = court->descriptor;
    struct lk_cqe *c = completion_of(court, number);
    c->user_data = entry.user_data;
    c->value = entry.desc + descriptor.rows;
    c->op = entry.op;
    c->total_ns = c->bytes = c->limit = number;
    lk_store_release64(&c->fence, number);
}

/* The partner: asleep until the whistle says how many come; ends with the pipe. */
static void partner_main(struct court *court, int whistle) {
    uint64_t number = 0, count;
    while (read(whistle, &count, sizeof(count)) == sizeof(count))
        while (count-- > 0)
            serve_one(court, ++number);
    _exit(0);
}

static void bare_one(struct court *court, uint64_t number) {
    struct lk_cqe *c = completion_of(court, number);
    volatile struct lk_cqe copy;
    court->entries[number % LK_SQ_ENTRIES_DEFAULT] =
        (struct lk_sqe){.user_data = number, .op = LK_OP_DECODE, .desc_bytes = LK_LINE};
    court->descriptor = (struct lk_step_desc){.recent_pages = 1, .results = LK_NONE};
    lk_store_release64(&court->tail, number);
    while (lk_load_acquire64(&c->fence) != number)
        lk_pause();
    copy = *c;
    (void)copy;
}

static int bare_round(struct bench *b, uint32_t exchanges, uint64_t *samples) {
    uint64_t count = exchanges;
    if (write(b->whistle[1], &count, sizeof(count)) != sizeof(count))
        return -errno;
    for (uint32_t i = 0; i < exchanges; i++) {
        uint64_t start = now_ns();
        bare_one(b->court, ++b->served);
        samples[i] = now_ns() - start;
    }
    return 0;
}

/* ---- the empty step ---- */

static int step_round(struct bench *b, uint32_t exchanges, uint64_t *samples) {
    for (uint32_t i = 0; i < exchanges; i++) {
        uint64_t start = now_ns();
        int r = locks_decode(b->locks, &b->step, NULL, 0);
        samples[i] = now_ns() - start;
        if (r)
            return r;
    }
    return 0;
}

/* ---- both ---- */

/* The n-th processor of a set; false: there are not so many. */
static bool nth_processor(const cpu_set_t *set, int n, cpu_set_t *ret) {
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, set) || n-- > 0)
            continue;
        CPU_ZERO(ret);
        CPU_SET(cpu, ret);
        return true;
    }
    return false;
}

static int open_bench(struct bench *b, const cpu_set_t *all) {
    cpu_set_t ours, theirs;
    if (!nth_processor(all, 0, &ours) || !nth_processor(all, 1, &theirs))
        return -ENOTSUP;
    b->court =
        mmap(NULL, sizeof(*b->court), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (b->court == MAP_FAILED || pipe(b->whistle))
        return -errno;
    b->partner = fork();
    if (b->partner < 0)
        return -errno;
    if (b->partner == 0) {
        close(b->whistle[1]);
        sched_setaffinity(0, sizeof(theirs), &theirs);
        partner_main(b->court, b->whistle[0]);
    }
    return sched_setaffinity(0, sizeof(ours), &ours) ? -errno : 0;
}

static void close_bench(struct bench *b, const cpu_set_t *all) {
    sched_setaffinity(0, sizeof(*all), all);
    if (b->partner > 0) {
        kill(b->partner, SIGKILL);
        waitpid(b->partner, NULL, 0);
    }
    for (int i = 0; i < 2; i++)
        if (b->whistle[i] >= 0)
            close(b->whistle[i]);
    if (b->court != MAP_FAILED)
        munmap(b->court, sizeof(*b->court));
    free(b->bare);
    free(b->through);
}

/* Round 0 warms up: its samples are written over by round 1. */
static int play(struct bench *b, uint32_t rounds, uint32_t exchanges) {
    for (uint32_t i = 0; i <= rounds; i++) {
        size_t at = (size_t)(i ? i - 1 : 0) * exchanges;
        int r = bare_round(b, exchanges, b->bare + at);
        if (!r)
            r = step_round(b, exchanges, b->through + at);
        if (r)
            return r;
    }
    return 0;
}

static int ascending(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static struct lk_pingpong_side summary(uint64_t *samples, uint64_t count) {
    qsort(samples, count, sizeof(*samples), ascending);
    return (struct lk_pingpong_side){.p50_ns = samples[count / 2],
                                     .p99_ns = samples[count - 1 - count / 100],
                                     .min_ns = samples[0]};
}

int lk_pingpong_measure(struct locks *locks, uint32_t pool, uint32_t rounds, uint32_t exchanges,
                        struct lk_pingpong_result *ret, char *why, size_t why_bytes) {
    struct bench b = {
        .locks = locks, .step = {.pool = pool}, .court = MAP_FAILED, .whistle = {-1, -1}};
    uint64_t samples = (uint64_t)rounds * exchanges;
    cpu_set_t all;
    if (samples == 0 || samples > SAMPLES_MAX || sched_getaffinity(0, sizeof(all), &all)) {
        snprintf(why, why_bytes, "%u rounds of %u exchanges cannot be measured", rounds, exchanges);
        return -EINVAL;
    }
    b.bare = calloc(samples, sizeof(*b.bare));
    b.through = calloc(samples, sizeof(*b.through));
    int r = b.bare && b.through ? open_bench(&b, &all) : -ENOMEM;
    if (r)
        snprintf(why, why_bytes, "cannot set up two processes on two processors: %s", strerror(-r));
    else if ((r = play(&b, rounds, exchanges)))
        snprintf(why, why_bytes, "%s", locks_error(locks));
    if (!r) {
        *ret = (struct lk_pingpong_result){.bare = summary(b.bare, samples),
                                           .step = summary(b.through, samples)};
        ret->ratio = (double)ret->step.p50_ns / (double)ret->bare.p50_ns;
    }
    close_bench(&b, &all);
    return r;
}
