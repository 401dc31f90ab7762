/* SPDX-License-Identifier: MIT */
/*
 * thread.c - the intake thread: tick, spin, sleep. See state.h.
 *
 * A tick takes the marks that batches passed, looks into every ring, lets the heads of the queues
 * run in turn, launches the batch that came of it and rings the bells of clients that sleep. The
 * channel that is served first changes every tick. An idle thread spins for config.spin_us, then
 * says in every channel that it sleeps, looks once more, and waits for bells, marks and commands.
 *
 * The clock is looked at where a batch is launched and fenced, and every so many ticks: a
 * submission that needs no batch is answered without a look. Times of a submission are exact to a
 * microsecond.
 *
 * Fences of clients on the GPU wake nobody: while one is waited for, the thread spins as long as
 * the engine says, then sleeps a millisecond at a time.
 *
 * A channel whose entries wait for an object of its own is not looked at when falling asleep: what
 * frees the object is a mark. A client that hung up or lied is not listened to.
 */
#include "state.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "../shm_protocol/atomics.h"
#include "assert.h"
#include "guard.h"

#define EVENTS      64
#define CLOCK_TICKS 64 /* between two looks at the clock: a microsecond of idle ticks */

enum { OF_COMMAND = LK_CHANNELS_MAX, OF_ENGINE }; /* in the epoll beside the channels' slots */

uint64_t lk_intake_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* ---- the head of a queue ---- */

struct lk_work *lk_filling(struct lk_intake *intake) {
    if (intake->unfenced == LK_BATCHES_AHEAD)
        return NULL;
    for (uint32_t i = 0; i < LK_BATCHES_IN_FLIGHT && !intake->filling; i++)
        if (!intake->work[i].in_flight) {
            intake->filling = &intake->work[i];
            lk_work_reset(intake->filling, ++intake->batch_serial);
        }
    return intake->filling;
}

struct lk_item *lk_work_item(struct lk_work *work, struct lk_submission *s) {
    struct lk_item *item = &work->items[work->item_count++];
    *item = (struct lk_item){.submission = s, .channel = s->channel};
    s->placed++;
    s->channel->held++;
    return item;
}

static void leave_queue(struct lk_submission *s) {
    lk_channel_dequeue(s->channel);
    s->waits = false;
}

void lk_submission_over(struct lk_intake *intake, struct lk_submission *s, uint64_t value) {
    if (s->signal_fence)
        lk_fence_signal(intake, s);
    lk_channel_finish(s->channel, s, value, intake->now_ns);
}

enum lk_run lk_refuse(struct lk_intake *intake, struct lk_submission *s,
                      const struct lk_refusal *refusal) {
    s->refusal = *refusal;
    intake->refusals++;
    leave_queue(s);
    if (s->placed == 0)
        lk_submission_over(intake, s, 0);
    return LK_RUN_STARTED;
}

enum lk_run lk_answer(struct lk_intake *intake, struct lk_submission *s, uint64_t value) {
    leave_queue(s);
    lk_submission_over(intake, s, value);
    return LK_RUN_STARTED;
}

enum lk_run lk_started(struct lk_intake *intake, struct lk_submission *s) {
    leave_queue(s);
    if (s->signal_fence)
        lk_fence_with_batch(intake, s);
    return LK_RUN_STARTED;
}

static enum lk_run run_head(struct lk_intake *intake, struct lk_submission *s) {
    if (s->refusal.reason)
        return lk_refuse(intake, s, &s->refusal);
    if (s->wait_fence && !lk_fence_passed(intake, s))
        return LK_RUN_WAIT;
    switch (s->op) {
    case LK_OP_APPEND:
    case LK_OP_DECODE:
    case LK_OP_ATTEND:
        return lk_run_rows(intake, s);
    case LK_OP_WRITE:
        return lk_run_write(intake, s);
    case LK_OP_ATTEND_TABLE:
        return lk_run_attend_table(intake, s);
    case LK_OP_TABLES:
        return lk_run_tables(intake, s);
    case LK_OP_COPY_PAGES:
        return lk_run_copy_pages(intake, s);
    case LK_OP_INVALIDATE:
        return lk_run_invalidate(intake, s);
    default:
        return lk_run_object(intake, s);
    }
}

/* ---- tick ---- */

static struct lk_channel *served(struct lk_intake *intake, uint32_t turn) {
    uint32_t at = intake->first + turn;
    return &intake->channel[intake->active[at < intake->channels ? at : at - intake->channels]];
}

/* One turn of a channel -> whether more can be done for it. */
static bool run_turn(struct lk_intake *intake, struct lk_channel *channel) {
    channel->turn = 0;
    for (uint32_t i = 0; i < LK_TAKE_PER_TURN && channel->head; i++) {
        enum lk_run run = run_head(intake, channel->head);
        if (run != LK_RUN_STARTED)
            return run == LK_RUN_TURN;
    }
    return channel->head != NULL;
}

static void run_queues(struct lk_intake *intake) {
    bool more = true;
    intake->chores = 0;
    intake->unfinished = false;
    while (more) {
        more = false;
        for (uint32_t i = 0; i < intake->channels; i++)
            more |= run_turn(intake, served(intake, i));
    }
}

static void launch(struct lk_intake *intake) {
    struct lk_work *work = intake->filling;
    intake->filling = NULL;
    if (!work || lk_work_empty(work))
        return;
    work->launched_ns = intake->now_ns = lk_intake_now_ns();
    work->in_flight = true;
    intake->in_flight++;
    intake->unfenced++;
    intake->batches++;
    int rc = lk_engine_launch(intake->engine, &work->batch);
    if (rc == -EIO)
        lk_device_broken(intake);
    LK_ASSERT(rc == 0);
}

/* Of channels that go: no more in a tick than is done for those that stay. */
static void reap(struct lk_intake *intake) {
    intake->chores = 0;
    for (uint32_t i = 0; i < intake->channels;) {
        struct lk_channel *channel = &intake->channel[intake->active[i]];
        if (!lk_reap(intake, channel)) {
            i++;
            continue;
        }
        intake->active[i] = intake->active[--intake->channels];
        intake->first = 0;
        channel->open.released(channel->open.owner, channel->open.id);
    }
}

/* For the watchdog: the thread goes round. */
static void live(struct lk_intake *intake) {
    __atomic_store_n(&intake->alive_ns, intake->now_ns, __ATOMIC_RELAXED);
}

/* For clients: it does their work. A question of the control thread is none. */
static void beat(struct lk_intake *intake) {
    live(intake);
    if (intake->now_ns - intake->heartbeat_ns < LK_HEARTBEAT_NS)
        return;
    intake->heartbeat_ns = intake->now_ns;
    for (uint32_t i = 0; i < intake->channels; i++)
        lk_store_relaxed64(&served(intake, i)->open.completion->heartbeat_ns, intake->now_ns);
}

/* again: something happened that may let waiting submissions go on. -> was anything done? */
static bool tick(struct lk_intake *intake, bool again) {
    bool finished = lk_finish_batches(intake) || again, taken = false;
    if (intake->fences_waited)
        finished |= lk_fences_look(intake);
    for (uint32_t i = 0; i < intake->channels; i++)
        taken |= lk_take(intake, served(intake, i));
    if (!finished && !taken)
        return false;
    run_queues(intake);
    launch(intake);
    lk_fences_raise(intake);
    for (uint32_t i = 0; i < intake->channels; i++)
        if (served(intake, i)->published)
            lk_channel_wake(served(intake, i));
    if (finished)
        reap(intake);
    if (intake->channels)
        intake->first = (intake->first + 1) % intake->channels;
    intake->ticks++;
    beat(intake);
    return true;
}

/* ---- commands ---- */

static bool run_call(struct lk_intake *intake) {
    struct lk_call *call = __atomic_load_n(&intake->call, __ATOMIC_ACQUIRE);
    if (!call)
        return false;
    intake->now_ns = lk_intake_now_ns();
    call->run(intake, call->argument);
    reap(intake);
    live(intake);
    pthread_mutex_lock(&intake->call_lock);
    __atomic_store_n(&intake->call, NULL, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&intake->called);
    pthread_mutex_unlock(&intake->call_lock);
    return true;
}

/* Callers take turns: the lock is held until `call` is free, and then until it is ours. */
void lk_intake_call(struct lk_intake *intake, void (*run)(struct lk_intake *, void *),
                    void *argument) {
    struct lk_call call = {run, argument};
    pthread_mutex_lock(&intake->call_lock);
    while (intake->call)
        pthread_cond_wait(&intake->called, &intake->call_lock);
    if (!intake->running) {
        run(intake, argument);
        do {
            intake->unfinished = false;
            reap(intake);
        } while (intake->unfinished);
    } else {
        __atomic_store_n(&intake->call, &call, __ATOMIC_RELEASE);
        eventfd_write(intake->command, 1);
        while (intake->call == &call)
            pthread_cond_wait(&intake->called, &intake->call_lock);
    }
    pthread_mutex_unlock(&intake->call_lock);
}

/* ---- sleep ---- */

static int watch(struct lk_intake *intake, int fd, uint32_t index) {
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = index};
    return epoll_ctl(intake->epoll, EPOLL_CTL_ADD, fd, &event) ? -errno : 0;
}

int lk_watch_bell(struct lk_intake *intake, struct lk_channel *channel) {
    return watch(intake, channel->open.bell, (uint32_t)(channel - intake->channel));
}

void lk_unwatch_bell(struct lk_intake *intake, struct lk_channel *channel) {
    if (!channel->hung_up)
        epoll_ctl(intake->epoll, EPOLL_CTL_DEL, channel->open.bell, NULL);
    channel->hung_up = true;
}

/* -> there is something to do already. */
static bool arm(struct lk_intake *intake) {
    bool work = false;
    for (uint32_t i = 0; i < intake->channels; i++) {
        struct lk_channel *channel = served(intake, i);
        if (channel->state == LK_CHANNEL_OPEN)
            work |= lk_ring_daemon_arm(&channel->ring) && !channel->stalled;
    }
    return work;
}

static void disarm(struct lk_intake *intake) {
    for (uint32_t i = 0; i < intake->channels; i++)
        lk_ring_daemon_disarm(&served(intake, i)->ring);
}

static void take_bell(struct lk_intake *intake, struct lk_channel *channel) {
    lk_guard_begin();
    bool rung = lk_bell_drain(channel->open.bell);
    lk_guard_end();
    if (!rung)
        lk_unwatch_bell(intake, channel);
}

static void take_event(struct lk_intake *intake, uint32_t index) {
    eventfd_t ignored;
    if (index == OF_COMMAND)
        eventfd_read(intake->command, &ignored);
    else if (index < LK_CHANNELS_MAX)
        take_bell(intake, &intake->channel[index]);
}

/* -> false: nothing came, it is time to look at fences. */
static bool wait_for_events(struct lk_intake *intake) {
    struct epoll_event events[EVENTS];
    int count =
        epoll_wait(intake->epoll, events, EVENTS, intake->fences_waited ? LK_FENCE_LOOK_MS : -1);
    for (int i = 0; i < count; i++)
        take_event(intake, events[i].data.u32);
    return count != 0;
}

/* -> marks were taken. busy_ns: set to now, unless nothing came. */
static bool nap(struct lk_intake *intake, uint64_t *busy_ns) {
    bool work = arm(intake), came = true;
    lk_engine_sleep(intake->engine, true);
    bool finished = lk_finish_batches(intake);
    if (!work && !finished && !__atomic_load_n(&intake->call, __ATOMIC_ACQUIRE) &&
        !__atomic_load_n(&intake->stop, __ATOMIC_ACQUIRE))
        came = wait_for_events(intake);
    lk_engine_sleep(intake->engine, false);
    disarm(intake);
    intake->now_ns = lk_intake_now_ns();
    if (came)
        *busy_ns = intake->now_ns;
    live(intake);
    return finished;
}

/* ---- the thread ---- */

static bool stopping(const struct lk_intake *intake) {
    return __atomic_load_n(&intake->stop, __ATOMIC_ACQUIRE);
}

static void finish_in_flight(struct lk_intake *intake) {
    while (intake->in_flight)
        if (!lk_finish_batches(intake))
            lk_pause();
    lk_fences_raise(intake);
    for (uint32_t i = 0; i < intake->channels; i++)
        if (served(intake, i)->published)
            lk_channel_wake(served(intake, i));
}

static void *run_thread(void *argument) {
    struct lk_intake *intake = argument;
    uint64_t spin_ns = (uint64_t)intake->config.spin_us * 1000, busy_ns = 0;
    bool again = false;
    for (uint32_t ticks = 1; !stopping(intake); ticks++) {
        bool busy = tick(intake, again);
        again = run_call(intake) | intake->unfinished;
        if (ticks % CLOCK_TICKS == 0 || spin_ns == 0)
            intake->now_ns = lk_intake_now_ns();
        if (busy || again) {
            busy_ns = intake->now_ns;
        } else if (intake->now_ns - busy_ns >= spin_ns && !lk_engine_hot(intake->engine)) {
            again = nap(intake, &busy_ns);
        } else {
            lk_pause();
        }
    }
    finish_in_flight(intake);
    return NULL;
}

int lk_intake_start(struct lk_intake *intake) {
    int rc = watch(intake, intake->command, OF_COMMAND);
    if (!rc)
        rc = watch(intake, lk_engine_fd(intake->engine), OF_ENGINE);
    if (!rc)
        rc = -pthread_create(&intake->thread, NULL, run_thread, intake);
    intake->running = rc == 0;
    return rc;
}

void lk_intake_stop(struct lk_intake *intake) {
    if (!intake->running)
        return;
    __atomic_store_n(&intake->stop, true, __ATOMIC_RELEASE);
    eventfd_write(intake->command, 1);
    pthread_join(intake->thread, NULL);
    pthread_mutex_lock(&intake->call_lock);
    intake->running = false;
    pthread_mutex_unlock(&intake->call_lock);
    run_call(intake); /* that came too late for the thread */
}

uint64_t lk_intake_heartbeat(const struct lk_intake *intake) {
    return __atomic_load_n(&intake->alive_ns, __ATOMIC_RELAXED);
}
