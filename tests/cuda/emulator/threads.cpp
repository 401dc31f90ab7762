/* SPDX-License-Identifier: MIT */
/*
 * threads.cpp - see threads.h.
 */
#include "threads.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <random>

#include <sys/mman.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define FORGET(at, bytes) ASAN_UNPOISON_MEMORY_REGION(at, bytes) /* a stack begins anew */
#else
#define FORGET(at, bytes)
#endif

#define STACK_BYTES (256 << 10)
#define POISON      0xaa
#define SHARED_FREE (48 << 10) /* what any kernel may have */

struct uint3 gridDim, blockDim;

namespace emulated {

struct fiber *running;

/* What runs together. */
static struct {
    std::vector<struct block> blocks;
    std::vector<struct fiber> fibers;
    std::vector<uint8_t *> stacks; /* one for each of `fibers`, kept for the next team */
    std::deque<struct fiber *> ready;
    std::vector<struct late_copy> sent;
    struct meeting meeting;
    uint64_t turn; /* the team's meetings so far */
    uint32_t live;
    const std::function<void()> *body;
    void *host_stack;
} team;

/* ---- switching ---- */

/* Keeps this stack's place in *keep and goes on with another. */
extern "C" void switch_stack(void **keep, void *to);
asm(".text\n"
    ".globl switch_stack\n"
    ".type switch_stack, @function\n"
    "switch_stack:\n"
    "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n"
    "    pushq %r13\n    pushq %r14\n    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n    popq %r14\n    popq %r13\n"
    "    popq %r12\n    popq %rbx\n    popq %rbp\n"
    "    ret\n"
    ".size switch_stack, .-switch_stack\n");

static std::mt19937 *draw(void) {
    static const char *seed = getenv("LK_EMULATED_SEED");
    static std::mt19937 generator(seed ? (unsigned)atoi(seed) : 0);
    return seed && *seed ? &generator : NULL;
}

int arch(void) {
    static const char *text = getenv("LK_EMULATED_ARCH");
    return text ? atoi(text) : 900;
}

uint32_t shared_most(void) {
    const char *text = getenv("LK_EMULATED_SHARED"); /* tests change it */
    return (text && *text ? (uint32_t)atoi(text) : arch() >= 900 ? 227 : 163) << 10;
}

static std::map<const void *, uint32_t> allowed;

bool allow_shared(const void *kernel, uint32_t bytes) {
    if (bytes > shared_most())
        return false;
    allowed[kernel] = bytes;
    return true;
}

bool may_share(const void *kernel, uint32_t bytes) {
    const auto found = allowed.find(kernel);
    return bytes <= (found == allowed.end() ? SHARED_FREE : found->second);
}

static struct fiber *next_fiber(void) {
    if (team.ready.empty()) {
        printf("emulator: %u threads wait and none can run (block %u %u of %u %u)\n", team.live,
               team.blocks[0].index.x, team.blocks[0].index.y, gridDim.x, gridDim.y);
        exit(1);
    }
    if (draw())
        std::swap(team.ready.front(), team.ready[(*draw())() % team.ready.size()]);
    struct fiber *f = team.ready.front();
    team.ready.pop_front();
    return f;
}

static void switch_away(void) {
    struct fiber *from = running;
    running = next_fiber();
    if (running != from)
        switch_stack(&from->stack_at, running->stack_at);
}

void let_others_run(void) {
    team.ready.push_back(running);
    switch_away();
}

static void wait_at(struct meeting *m) {
    m->waiting.push_back(running);
    switch_away();
}

/* All are there. */
static void end_meeting(struct meeting *m) {
    m->arrived = 0;
    for (struct fiber *f : m->waiting)
        team.ready.push_back(f);
    m->waiting.clear();
}

/* ---- meetings ---- */

const struct packet *meet_warp(const struct packet &mine) {
    struct warp *w = running->warp;
    w->in[running->index.x % 32] = mine;
    if (++w->meeting.arrived == 32) {
        memcpy(w->out, w->in, sizeof w->out);
        end_meeting(&w->meeting);
    } else {
        wait_at(&w->meeting);
    }
    return w->out; /* as it is until this lane, too, comes again */
}

void meet_block(void) {
    struct block *b = running->block;
    if (++b->all.arrived == b->live)
        end_meeting(&b->all);
    else
        wait_at(&b->all);
}

void meet_some(uint32_t threads) {
    struct block *b = running->block;
    if (++b->some.arrived == threads)
        end_meeting(&b->some);
    else
        wait_at(&b->some);
}

void arrive_team(void) {
    running->team_turn = team.turn + 1;
    if (++team.meeting.arrived == team.live) {
        team.turn++;
        end_meeting(&team.meeting);
    }
}

void wait_team(void) {
    if (team.turn < running->team_turn)
        wait_at(&team.meeting);
}

uint8_t *shared_of(uint32_t rank) {
    return running->block[(int)rank - (int)running->block->rank].shared;
}

/* ---- late copies ---- */

static void do_copy(const struct late_copy &c) {
    if (c.adds)
        *(uint32_t *)c.to += *(const uint32_t *)c.value;
    else
        memcpy(c.to, c.from ? c.from : c.value, c.bytes);
}

void copy_late(void *to, const void *from, uint32_t bytes) {
    memset(to, POISON, bytes);
    running->copies.push_back(
        {(uint8_t *)to, (const uint8_t *)from, bytes, running->group, NULL, {}, false});
}

void close_group(void) {
    running->group++;
}

void wait_groups(uint32_t most) {
    std::vector<struct late_copy> left;
    for (const struct late_copy &c : running->copies)
        if (c.group + most < running->group)
            do_copy(c);
        else
            left.push_back(c);
    running->copies.swap(left);
}

void send_late(uint8_t *to, const uint8_t *from, const void *value, uint32_t bytes,
               uint64_t *barrier) {
    struct late_copy c = {to, from, bytes, 0, barrier, {}, false};
    memset(to, POISON, bytes);
    if (!from)
        memcpy(c.value, value, bytes);
    team.sent.push_back(c);
}

void add_late(uint8_t *to, uint32_t x, uint64_t *barrier) {
    struct late_copy c = {to, NULL, 4, 0, barrier, {}, true};
    memcpy(c.value, &x, 4);
    team.sent.push_back(c);
}

/* ---- barriers ---- */

struct barrier {
    int32_t bytes; /* that are to come */
    uint8_t arrivals, missing, phase, unused;
};

static struct barrier load_barrier(const uint64_t *at) {
    struct barrier b;
    memcpy(&b, at, sizeof b);
    return b;
}

static void store_barrier(uint64_t *at, struct barrier b) {
    if (b.missing == 0 && b.bytes == 0) {
        b.phase ^= 1;
        b.missing = b.arrivals;
    }
    memcpy(at, &b, sizeof b);
}

void barrier_init(uint64_t *at, uint32_t arrivals) {
    store_barrier(at, {0, (uint8_t)arrivals, (uint8_t)arrivals, 0, 0});
}

void barrier_arrive(uint64_t *at) {
    struct barrier b = load_barrier(at);
    b.missing--;
    store_barrier(at, b);
}

void barrier_expect(uint64_t *at, uint32_t bytes) {
    struct barrier b = load_barrier(at);
    b.bytes += (int32_t)bytes;
    b.missing--;
    store_barrier(at, b);
}

/* Where an order is drawn, copies come in any. */
static void deliver(void) {
    std::vector<struct late_copy> sent;
    sent.swap(team.sent);
    for (const struct late_copy &c : sent) {
        if (draw() && (*draw())() % 4) {
            team.sent.push_back(c);
            continue;
        }
        do_copy(c);
        struct barrier b = load_barrier(c.barrier);
        b.bytes -= (int32_t)c.bytes;
        store_barrier(c.barrier, b);
    }
}

bool barrier_passed(uint64_t *at, uint32_t parity) {
    if (load_barrier(at).phase != parity)
        return true;
    deliver();
    let_others_run();
    return load_barrier(at).phase != parity;
}

/* ---- a grid ---- */

static void leave(void) {
    struct block *b = running->block;
    wait_groups(0);
    team.live--;
    b->live--;
    if (b->live && b->all.arrived == b->live)
        end_meeting(&b->all);
    if (team.live && team.meeting.arrived == team.live) {
        team.turn++;
        end_meeting(&team.meeting);
    }
}

static void fiber_main(void) {
    (*team.body)();
    leave();
    void *nowhere;
    if (team.live == 0)
        switch_stack(&nowhere, team.host_stack);
    running = next_fiber();
    switch_stack(&nowhere, running->stack_at);
}

static void open_block(struct block *b, const struct grid *grid, struct uint3 index,
                       uint32_t rank) {
    b->index = index;
    b->rank = rank;
    b->live = grid->threads.x;
    b->memory.assign(shared_most() + 1024, POISON);
    b->shared = (uint8_t *)(((uintptr_t)b->memory.data() + 1023) / 1024 * 1024);
    b->warps.assign((grid->threads.x + 31) / 32, {});
    b->all = b->some = {};
}

static void open_fiber(uint32_t number, struct block *b, uint32_t thread) {
    if (number == team.stacks.size())
        team.stacks.push_back((uint8_t *)mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE,
                                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    struct fiber *f = &team.fibers[number];
    FORGET(team.stacks[number], STACK_BYTES);
    void **top = (void **)(team.stacks[number] + STACK_BYTES);
    *--top = NULL; /* fiber_main() begins as if called */
    *--top = (void *)fiber_main;
    top -= 6; /* what switch_stack() takes back */
    memset(top, 0, 6 * sizeof *top);
    *f = {};
    f->stack_at = top;
    f->index = {thread, 0, 0};
    f->block = b;
    f->warp = &b->warps[thread / 32];
    team.ready.push_back(f);
}

static void run_team(const struct grid *grid, const struct uint3 *blocks, uint32_t count) {
    team.blocks.resize(count);
    team.fibers.resize((size_t)count * grid->threads.x);
    team.ready.clear();
    team.sent.clear();
    team.meeting = {};
    team.turn = 0;
    team.live = count * grid->threads.x;
    for (uint32_t i = 0; i < count; i++) {
        open_block(&team.blocks[i], grid, blocks[i], i % grid->team);
        for (uint32_t t = 0; t < grid->threads.x; t++)
            open_fiber(i * grid->threads.x + t, &team.blocks[i], t);
    }
    running = next_fiber();
    switch_stack(&team.host_stack, running->stack_at);
}

/* Blocks of teams, one team after the other. */
static std::vector<struct uint3> list_blocks(const struct grid *grid) {
    std::vector<struct uint3> firsts, ret;

    for (uint32_t z = 0; z < grid->blocks.z; z++)
        for (uint32_t y = 0; y < grid->blocks.y; y++)
            for (uint32_t x = 0; x < grid->blocks.x; x += grid->team)
                firsts.push_back({x, y, z});
    if (draw())
        std::shuffle(firsts.begin(), firsts.end(), *draw());
    for (const struct uint3 &first : firsts)
        for (uint32_t i = 0; i < grid->team; i++)
            ret.push_back({first.x + i, first.y, first.z});
    return ret;
}

void run_grid(const struct grid *grid, const std::function<void()> &body) {
    if (grid->threads.x > 1024 || grid->blocks.x % grid->team) {
        printf("emulator: no device runs blocks of %u threads, %u in a team\n", grid->threads.x,
               grid->team);
        exit(1);
    }
    const char *text = getenv("LK_EMULATED_TOGETHER");
    const uint32_t asked = text && *text ? (uint32_t)std::max(1, atoi(text)) : 1;
    const uint32_t most = grid->team > 1 ? grid->team : asked;
    const std::vector<struct uint3> blocks = list_blocks(grid);

    gridDim = grid->blocks;
    blockDim = grid->threads;
    team.body = &body;
    for (size_t i = 0; i < blocks.size(); i += most)
        run_team(grid, &blocks[i], (uint32_t)std::min(blocks.size() - i, (size_t)most));
}

} // namespace emulated
