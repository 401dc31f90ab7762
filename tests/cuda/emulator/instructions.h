/* SPDX-License-Identifier: MIT */
/*
 * instructions.h - ptx.cuh and team.cuh for the emulator: what each instruction does, by the words
 * of the PTX manual. The compiler is told to read it first: the names of the originals' guards are
 * taken here, so that they are skipped.
 */
#ifndef LK_CUDA_PTX_CUH
#define LK_CUDA_PTX_CUH
#define LK_CUDA_TEAM_CUH
#define LK_CUDA_BOXES_CUH

#include <cstdio>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"

#define SHARED_BYTES(name, alignment)                                                              \
    uint8_t *const name = emulated::shared_of(emulated::running->block->rank)

static inline uint8_t *at_address(uint32_t address) {
    return emulated::shared_of(address >> EMULATED_RANK_SHIFT) +
           (address & ((1u << EMULATED_RANK_SHIFT) - 1));
}
static inline uint64_t *barrier_at(uint32_t address) {
    return (uint64_t *)at_address(address);
}

/* ---- grids follow each other completely here ---- */

static inline void wait_for_previous(void) {
}
static inline void let_next_start(void) {
}

template <int N> static inline void lower_registers(void) {
}
template <int N> static inline void raise_registers(void) {
}

/* ---- copies ---- */

/* A device faults where an address, or a number of bytes, is no multiple. */
static inline void must_be_multiple(uint64_t x, uint32_t of) {
    if (x % of == 0)
        return;
    printf("emulator: %#llx is no multiple of %u\n", (unsigned long long)x, of);
    abort();
}
static inline void must_be_vectors(uint32_t to, const void *from, uint32_t bytes) {
    must_be_multiple(to, 16);
    must_be_multiple((uint64_t)from, 16);
    must_be_multiple(bytes, 16);
}
static inline void copy_async(uint32_t to, const void *from) {
    must_be_vectors(to, from, 16);
    emulated::copy_late(at_address(to), from, 16);
}
#define LK_EVICT_FIRST 0ull /* a hint */
#define LK_EVICT_USUAL 0ull
static inline void copy_once(bool wanted, uint32_t to, const void *from) {
    if (wanted)
        copy_async(to, from);
}
static inline void copy_word(uint32_t *to, const uint32_t *from) {
    emulated::copy_late(to, from, 4);
}
static inline void copy_commit(void) {
    emulated::close_group();
}
template <int N> static inline void copy_wait(void) {
    emulated::wait_groups(N);
}
static inline void prefetch_line(const void *) {
}
static inline void prefetch_bytes(const void *from, uint32_t bytes) {
    must_be_vectors(0, from, bytes);
}

/* ---- tensor cores ---- */

/* D += A B for rows of A in four registers and columns of B in two: lane 4 r + c holds rows r and
 * r + 8 of A, column r of B, of each the c-th word of a half of the elements. take(a, b, i): the
 * product of elements i of two words, each of `each`. */
template <class T, class Take>
static inline void multiply(T d[4], const struct emulated::packet &mine, int each, Take take) {
    const struct emulated::packet *lane = emulated::meet_warp(mine);
    const uint32_t r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;

    for (int i = 0; i < 4; i++) {
        const uint32_t high = i / 2, column = 2 * c + i % 2;
        for (int half = 0; half < 2; half++)
            for (int word = 0; word < 4; word++) {
                const uint32_t a = lane[4 * r + word].w[2 * half + high],
                               b = lane[4 * column + word].w[4 + half];
                for (int e = 0; e < each; e++)
                    d[i] += take(a, b, e);
            }
    }
}
static inline void mma_u8s8(int d[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                            uint32_t b0, uint32_t b1) {
    multiply(d, {{a0, a1, a2, a3, b0, b1}}, 4, [](uint32_t a, uint32_t b, int e) {
        return (int)(uint8_t)(a >> 8 * e) * (int8_t)(b >> 8 * e);
    });
}
static inline void mma_s8s8(int d[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                            uint32_t b0, uint32_t b1) {
    multiply(d, {{a0, a1, a2, a3, b0, b1}}, 4, [](uint32_t a, uint32_t b, int e) {
        return (int)(int8_t)(a >> 8 * e) * (int8_t)(b >> 8 * e);
    });
}
template <bool BF16> static inline float element_of(uint32_t word, int e) {
    const uint16_t bits = (uint16_t)(word >> 16 * e);
    return BF16 ? __uint_as_float((uint32_t)bits << 16) : __half2float(__ushort_as_half(bits));
}
template <bool BF16>
static inline void mma_k16(float d[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                           uint32_t b0, uint32_t b1) {
    multiply(d, {{a0, a1, a2, a3, b0, b1}}, 2, [](uint32_t a, uint32_t b, int e) {
        return element_of<BF16>(a, e) * element_of<BF16>(b, e);
    });
}
static inline void mma_f16_k8(float d[4], uint32_t a0, uint32_t a1, uint32_t b0) {
    mma_k16<false>(d, a0, a1, 0, 0, b0, 0);
}
static inline void mma_f64(double d[2], double a, double b) {
    struct emulated::packet mine = {};
    memcpy(&mine.w[0], &a, sizeof a);
    memcpy(&mine.w[2], &b, sizeof b);
    const struct emulated::packet *lane = emulated::meet_warp(mine);
    const uint32_t r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;

    for (uint32_t i = 0; i < 2; i++)
        for (uint32_t k = 0; k < 4; k++) {
            memcpy(&a, &lane[4 * r + k].w[0], sizeof a);
            memcpy(&b, &lane[4 * (2 * c + i) + k].w[2], sizeof b);
            d[i] = fma(a, b, d[i]);
        }
}
static inline uint32_t transpose_8x8(uint32_t x) {
    const struct emulated::packet *lane = emulated::meet_warp({{x}});
    const uint32_t r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    uint32_t y = 0;

    for (uint32_t i = 0; i < 2; i++)
        y |= (lane[4 * (2 * c + i) + r / 2].w[0] >> 16 * (r % 2) & 0xffff) << 16 * i;
    return y;
}

/* Word `i` of lane 4 r + c: of matrix i row r, columns 2c and 2c + 1, or transposed. */
static inline void take_matrices(uint32_t x[4], const void *row, bool transposed) {
    const uint64_t at = (uint64_t)row;
    must_be_multiple(at, 16);
    const struct emulated::packet *lane =
        emulated::meet_warp({{(uint32_t)at, (uint32_t)(at >> 32)}});
    const uint32_t r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;

    for (uint32_t i = 0; i < 4; i++) {
        x[i] = 0;
        for (uint32_t half = 0; half < 2; half++) {
            const uint32_t from = transposed ? 2 * c + half : r;
            const uint32_t column = transposed ? r : 2 * c + half;
            const uint32_t *word = lane[8 * i + from].w;
            const uint16_t *cells = (const uint16_t *)((uint64_t)word[1] << 32 | word[0]);
            x[i] |= (uint32_t)cells[column] << 16 * half;
        }
    }
}
static inline void load_matrices(uint32_t x[4], const void *row) {
    take_matrices(x, row, false);
}
static inline void load_transposed(uint32_t x[4], const void *row) {
    take_matrices(x, row, true);
}

/* Four warps' products: each has its own rows of A, so that none needs another's. */
static inline bool wide_products(void) {
    return emulated::arch() >= 900;
}
static inline uint64_t wide_matrix(uint32_t address, uint32_t step) {
    return (uint64_t)step << 32 | address;
}
static inline uint64_t wide_offset(uint64_t b, uint32_t bytes) {
    return b + bytes;
}
static inline void wide_begin(void) {
}
static inline void wide_end(void) {
}
/* D += A B, `octets` of eight columns; of B element (row, column) or its transposed. */
template <bool BF16>
static inline void multiply_wide(float (*d)[4], int octets, const uint32_t a[4], uint64_t b,
                                 bool transposed) {
    const struct emulated::packet *lane = emulated::meet_warp({{a[0], a[1], a[2], a[3]}});
    const uint32_t r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    const auto cell = [b](uint32_t row, uint32_t column) {
        const uint32_t at =
            (uint32_t)b + row / 8 * (uint32_t)(b >> 32) + row % 8 * 128 + 2 * column;
        return element_of<BF16>(*(uint16_t *)at_address(at ^ (at >> 7 & 7) << 4), 0);
    };

    for (int i = 0; i < 4 * octets; i++) {
        const uint32_t column = i / 4 * 8 + 2 * c + i % 2;
        for (uint32_t k = 0; k < 16; k++)
            d[i / 4][i % 4] +=
                element_of<BF16>(lane[4 * r + k % 8 / 2].w[k / 8 * 2 + i % 4 / 2], k % 2) *
                (transposed ? cell(column, k) : cell(k, column));
    }
}
template <bool BF16> static inline void wide_rows(float d[2][4], const uint32_t a[4], uint64_t b) {
    multiply_wide<BF16>(d, 2, a, b, true);
}
template <bool BF16>
static inline void wide_columns(float d[8][4], const uint32_t a[4], uint64_t b) {
    multiply_wide<BF16>(d, 8, a, b, false);
}

/* ---- numbers, clock ---- */

static inline float exp2_fast(float x) {
    const float exact = exp2f(x);
    return std::isnormal(exact) ? (x == rintf(x) ? exact : nearly(exact, x)) : x < 0 ? 0.f : exact;
}
/* About 1 it is an absolute error that is bounded. */
static inline float log2_fast(float x) {
    const float exact = log2f(x), beside = nearly(1.f, x) - 1.f;
    return is_power(x) ? exact : fabsf(exact) < 1 ? exact + beside : nearly(exact, x);
}
static inline uint64_t device_ns(void) {
    static uint64_t ticks;
    return ++ticks;
}
static inline uint32_t add_in_order(uint32_t *word, uint32_t x) {
    emulated::let_others_run();
    return atomicAdd(word, x);
}
static inline void store_after(uint32_t *word, uint32_t x) {
    *word = x;
}
static inline uint32_t load_in_order(const uint32_t *word) { /* half a microsecond: much happens */
    for (int i = 0; i < 1000; i++)
        emulated::let_others_run();
    return *word;
}

/* ---- barriers ---- */

static inline void bar_init(uint32_t bar, uint32_t arrivals) {
    must_be_multiple(bar, 8);
    emulated::barrier_init(barrier_at(bar), arrivals);
}
static inline void bar_arrive(uint32_t bar) {
    emulated::barrier_arrive(barrier_at(bar));
}
static inline bool bar_test(uint32_t bar, uint32_t parity) {
    return emulated::barrier_passed(barrier_at(bar), parity);
}
static inline void bar_wait(uint32_t bar, uint32_t parity) {
    while (!bar_test(bar, parity))
        ;
}
static inline void bar_expect(uint32_t bar, uint32_t bytes) {
    if (emulated::arch() >= 900)
        emulated::barrier_expect(barrier_at(bar), bytes);
}
static inline void bar_copies_started(uint32_t bar) {
    if (emulated::arch() >= 900)
        return;
    copy_commit();
    copy_wait<0>();
    bar_arrive(bar);
}
static inline void bar_inits_done(void) {
}
static inline void bar_some(uint32_t threads) {
    emulated::meet_some(threads);
}
static inline void start_copy(uint32_t to, const uint8_t *from, uint32_t bytes, uint32_t bar) {
    must_be_vectors(to, from, bytes);
    if (emulated::arch() >= 900)
        emulated::send_late(at_address(to), from, NULL, bytes, barrier_at(bar));
    else
        emulated::copy_late(at_address(to), from, bytes);
}

/* ---- boxes ---- */

#define BOX_CHANNELS 64
#define BOX_ROW      128
#define BOX_ALIGN    1024

struct boxes {
    const uint8_t *base;
    uint32_t row_bytes, block_rows, box_rows;
};

static inline int make_boxes(const void *base, uint32_t channels, uint32_t rows, uint64_t,
                             uint32_t box_rows, struct boxes *ret) {
    *ret = {(const uint8_t *)base, 2 * channels, rows, box_rows};
    return 0;
}
static inline void prefetch_boxes(const struct boxes &) {
}
static inline void expect_boxes(uint32_t bar, uint32_t bytes) {
    emulated::barrier_expect(barrier_at(bar), bytes);
}
/* The place of a chunk follows from its address: bits 4 to 6 are crossed with bits 7 to 9. */
static inline void start_box(const struct boxes &b, uint32_t to, uint32_t row, uint32_t block,
                             uint32_t bar, uint64_t) {
    const uint8_t *from = b.base + ((uint64_t)block * b.block_rows + row) * b.row_bytes;

    must_be_multiple(to, BOX_ALIGN);
    for (uint32_t i = 0; i < b.box_rows * b.row_bytes / 16; i++) {
        const uint32_t at = to + 16 * i, column = i / 8 / b.box_rows, in = i / 8 % b.box_rows;
        emulated::send_late(at_address(at ^ (at >> 7 & 7) << 4),
                            from + (uint64_t)in * b.row_bytes + column * BOX_ROW + 16 * (i % 8),
                            NULL, 16, barrier_at(bar));
    }
}
static inline void boxes_started(uint32_t) {
}

/* ---- teams ---- */

#define LK_TEAM_MOST 16

static inline uint32_t team_size(void) {
    return gridDim.x;
}
static inline uint32_t team_rank(void) {
    return blockIdx.x;
}
static inline void team_arrive(void) {
    if (team_size() > 1)
        emulated::arrive_team();
}
static inline void team_arrive_synced(void) {
    team_arrive();
}
static inline void team_wait(void) {
    if (team_size() > 1)
        emulated::wait_team();
    else
        emulated::meet_block();
}
static inline void team_barrier(void) {
    team_arrive();
    team_wait();
}
static inline uint32_t team_address(const void *own, uint32_t rank) {
    return shared_address(own, rank);
}
static inline void team_put(uint32_t address, uint32_t x) {
    *(uint32_t *)at_address(address) = x;
}
static inline uint32_t team_add(uint32_t address, uint32_t x) {
    return atomicAdd((uint32_t *)at_address(address), x);
}
static inline void team_or(uint32_t address, uint32_t x) {
    *(uint32_t *)at_address(address) |= x;
}
static inline void team_open(uint64_t *here) {
    emulated::barrier_init(here, 1);
}
static inline void team_expect(uint64_t *here, uint32_t bytes) {
    emulated::barrier_expect(here, bytes);
}
static inline void team_send(void *to, uint4 x, uint64_t *arrived, uint32_t rank) {
    if (team_size() == 1)
        *(uint4 *)to = x;
    else
        emulated::send_late(at_address(team_address(to, rank)), NULL, &x, sizeof x,
                            barrier_at(team_address(arrived, rank)));
}
static inline void team_send_word(void *to, uint32_t x, uint64_t *arrived, uint32_t rank) {
    if (team_size() == 1)
        *(uint32_t *)to = x;
    else
        emulated::send_late(at_address(team_address(to, rank)), NULL, &x, sizeof x,
                            barrier_at(team_address(arrived, rank)));
}
static inline void team_send_sum(uint32_t *to, uint32_t x, uint64_t *arrived, uint32_t rank) {
    emulated::add_late(at_address(team_address(to, rank)), x,
                       barrier_at(team_address(arrived, rank)));
}
static inline void team_receive(uint64_t *here) {
    while (team_size() > 1 && !emulated::barrier_passed(here, 0))
        ;
    if (team_size() == 1)
        emulated::meet_block();
}

#endif
