/* SPDX-License-Identifier: MIT */
/*
 * attend_loops.h - the vector loops of attend.h, written once and compiled once a path.
 *
 * The including file defines LK_VECTOR, the name of the path's table, and nothing else.
 *
 * Idea: a register tile. `dot` holds LANES sums, of four queries and LANES / 4 tokens: every vector
 * of keys is converted once and meets four queries, every vector of a query meets LANES / 4 tokens;
 * at the end a tree of additions turns LANES vectors into one vector of LANES products. `gather`
 * holds four queries and a piece of the head dimension in registers over all tokens of the page, so
 * that an accumulator is loaded and stored once a page. With AVX-512 both tiles are 16 of 32
 * registers.
 *
 * Measured (d 128, bf16, four queries, one Zen 4 core): a token takes 64 products of 512 bits and
 * some 30 other instructions. Lines of what is read next are asked for one by one beside the loads
 * of this: a page's values while its keys are read, then the next keys.
 *
 * Order of sums: over pairs of vectors within a token, over tokens in order; lanes are added last.
 */
#ifndef LK_VECTOR
#error "define LK_VECTOR and include this once"
#endif

#include <math.h>
#include <string.h>

#include "attend.h"
#include "element.h"

#define PAIR    (2 * LANES)
#define STEP    (LANES / 4) /* tokens of a tile of dot */
#define LINE    64
#define ABREAST 4 /* vectors of shares made together */
#if LANES == 16
#define PIECE 4 /* vectors of a tile of gather */
#else
#define PIECE 2
#endif

LK_INLINE size_t bytes_of(uint32_t dtype) {
    return dtype == LK_FP32 ? 4 : 2;
}

/* Elements i..i + 2 * LANES - 1 in paired order (attend.h). */
LK_INLINE void load_pair(uint32_t dtype, const uint8_t *from, uint32_t i, lanes *ret) {
    if (dtype == LK_BF16) {
        ilanes both;
        memcpy(&both, from + 2 * (size_t)i, sizeof both);
        ret[0] = (lanes)(both << 16);
        ret[1] = (lanes)(both & (int32_t)0xffff0000);
    } else {
        ret[0] = element_load(dtype, from, i);
        ret[1] = element_load(dtype, from, i + LANES);
    }
}

/* Ask for the bytes of a pair of what is read next, where the path's machines gain from it. */
LK_INLINE void ask(uint32_t dtype, const uint8_t *from, uint32_t i) {
#if LANES > 4
    for (size_t at = 0; at < PAIR * bytes_of(dtype); at += LINE)
        __builtin_prefetch(from + i * bytes_of(dtype) + at, 0, 2);
#else
    (void)dtype, (void)from, (void)i;
#endif
}

/* Lane i of a where bit `distance` of i is clear, of b where it is set. */
LK_INLINE lanes mix(lanes a, lanes b, int distance) {
#if LANES == 16
    const __mmask16 set = distance == 1   ? 0xaaaa
                          : distance == 2 ? 0xcccc
                          : distance == 4 ? 0xf0f0
                                          : 0xff00;
    return (lanes)_mm512_mask_blend_ps(set, (__m512)a, (__m512)b);
#else
    ilanes set = {0};
    for (int i = 0; i < LANES; i++)
        set[i] = i & distance ? -1 : 0;
    return (lanes)(((ilanes)a & ~set) | ((ilanes)b & set));
#endif
}

/* Of 2 * count vectors, count: neighbours added across `distance`, theirs side by side. */
LK_INLINE void fold(lanes *sums, int count, int distance) {
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
        lanes a = sums[2 * i], b = sums[2 * i + 1];
        sums[i] = mix(a, b, distance) + lanes_swap(mix(b, a, distance), distance);
    }
}

/* sums[0..LANES) -> lane i: the sum of all lanes of sums[i]. */
LK_INLINE lanes add_across(lanes *sums) {
    fold(sums, LANES / 2, 1);
    fold(sums, LANES / 4, 2);
#if LANES > 4
    fold(sums, LANES / 8, 4);
#endif
#if LANES > 8
    fold(sums, LANES / 16, 8);
#endif
    return sums[0];
}

/* STEP tokens whose keys begin at key[..]; logits of query i at to[i * LK_LOGITS_STRIDE]. */
LK_INLINE void dot_step(uint32_t dtype, const uint8_t *const *key, size_t ahead, const float *q,
                        uint32_t queries, uint32_t head_dim, float *to) {
    lanes sum[LANES];
    uint32_t x = 0;

#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        sum[i] = (lanes){0};
    for (; x + PAIR <= head_dim; x += PAIR) {
        lanes k[STEP][2];
#pragma GCC unroll 4
        for (uint32_t t = 0; t < STEP; t++) {
            load_pair(dtype, key[t], x, k[t]);
            ask(dtype, key[t] + ahead, x);
        }
#pragma GCC unroll 4
        for (uint32_t i = 0; i < queries; i++) {
            lanes even = lanes_load(q + i * head_dim + x);
            lanes odd = lanes_load(q + i * head_dim + x + LANES);
#pragma GCC unroll 4
            for (uint32_t t = 0; t < STEP; t++) {
                sum[i * STEP + t] = lanes_fma(even, k[t][0], sum[i * STEP + t]);
                sum[i * STEP + t] = lanes_fma(odd, k[t][1], sum[i * STEP + t]);
            }
        }
    }
    if (x < head_dim) /* half a pair, in natural order */
#pragma GCC unroll 4
        for (uint32_t i = 0; i < queries; i++) {
            lanes part = lanes_load(q + i * head_dim + x);
#pragma GCC unroll 4
            for (uint32_t t = 0; t < STEP; t++)
                sum[i * STEP + t] =
                    lanes_fma(part, element_load(dtype, key[t], x), sum[i * STEP + t]);
        }
    lanes all = add_across(sum);
#pragma GCC unroll 4
    for (uint32_t i = 0; i < queries; i++)
        memcpy(to + i * LK_LOGITS_STRIDE, (float *)&all + i * STEP, STEP * sizeof(float));
}

LK_INLINE void dot_queries(uint32_t dtype, const struct lk_block *block, const float *q,
                           uint32_t queries, uint32_t head_dim, float *to) {
    size_t token = head_dim * bytes_of(dtype), ahead = (size_t)(block->value - block->key);

    for (uint32_t t = 0; t < block->tokens; t += STEP) {
        const uint8_t *key[STEP];
#pragma GCC unroll 4
        for (uint32_t i = 0; i < STEP; i++) /* a last step repeats the last token; what it says of
                                               it is ignored */
            key[i] = block->key + (t + i < block->tokens ? t + i : block->tokens - 1) * token;
        dot_step(dtype, key, ahead, q, queries, head_dim, to + t);
    }
}

LK_INLINE void dot(uint32_t dtype, const struct lk_block *block, const float *q, uint32_t queries,
                   uint32_t head_dim, float *logits) {
    if (queries == 4)
        dot_queries(dtype, block, q, 4, head_dim, logits);
    else if (queries == 3)
        dot_queries(dtype, block, q, 3, head_dim, logits);
    else if (queries == 2)
        dot_queries(dtype, block, q, 2, head_dim, logits);
    else
        dot_queries(dtype, block, q, 1, head_dim, logits);
}

/* Channels x..x + vectors * LANES - 1 of the accumulators. */
LK_INLINE void gather_piece(uint32_t dtype, const struct lk_block *block, const float *weights,
                            uint32_t queries, uint32_t head_dim, const float *decay, float *acc,
                            uint32_t x, uint32_t vectors) {
    const uint8_t *value = block->value, *next = block->next;
    size_t token = head_dim * bytes_of(dtype);
    lanes sum[4][PIECE];

#pragma GCC unroll 4
    for (uint32_t i = 0; i < queries; i++)
#pragma GCC unroll 4
        for (uint32_t v = 0; v < vectors; v++)
            sum[i][v] = lanes_load(acc + i * head_dim + x + v * LANES) * lanes_set(decay[i]);
    for (uint32_t t = 0; t < block->tokens; t++, value += token, next += token) {
        lanes v[PIECE];
        if (vectors == 1)
            v[0] = element_load(dtype, value, x);
#pragma GCC unroll 2
        for (uint32_t y = 0; y + 1 < vectors; y += 2) {
            load_pair(dtype, value, x + y * LANES, v + y);
            ask(dtype, next, x + y * LANES);
        }
#pragma GCC unroll 4
        for (uint32_t i = 0; i < queries; i++) {
            lanes weight = lanes_set(weights[i * LK_LOGITS_STRIDE + t]);
#pragma GCC unroll 4
            for (uint32_t y = 0; y < vectors; y++)
                sum[i][y] = lanes_fma(weight, v[y], sum[i][y]);
        }
    }
#pragma GCC unroll 4
    for (uint32_t i = 0; i < queries; i++)
#pragma GCC unroll 4
        for (uint32_t v = 0; v < vectors; v++)
            lanes_store(acc + i * head_dim + x + v * LANES, sum[i][v]);
}

LK_INLINE void gather_pieces(uint32_t dtype, const struct lk_block *block, const float *weights,
                             uint32_t queries, uint32_t head_dim, const float *decay, float *acc) {
    uint32_t x = 0;

    for (; x + PIECE * LANES <= head_dim; x += PIECE * LANES)
        gather_piece(dtype, block, weights, queries, head_dim, decay, acc, x, PIECE);
    for (; x + PAIR <= head_dim; x += PAIR)
        gather_piece(dtype, block, weights, queries, head_dim, decay, acc, x, 2);
    if (x < head_dim)
        gather_piece(dtype, block, weights, queries, head_dim, decay, acc, x, 1);
}

LK_INLINE void gather(uint32_t dtype, const struct lk_block *block, const float *weights,
                      uint32_t queries, uint32_t head_dim, const float *decay, float *acc) {
    if (queries == 4)
        gather_pieces(dtype, block, weights, 4, head_dim, decay, acc);
    else if (queries == 3)
        gather_pieces(dtype, block, weights, 3, head_dim, decay, acc);
    else if (queries == 2)
        gather_pieces(dtype, block, weights, 2, head_dim, decay, acc);
    else
        gather_pieces(dtype, block, weights, 1, head_dim, decay, acc);
}

#define OF_DTYPE(name, dtype)                                                                      \
    static void dot_##name(const struct lk_block *block, const float *q, uint32_t queries,         \
                           uint32_t head_dim, float *logits) {                                     \
        dot(dtype, block, q, queries, head_dim, logits);                                           \
    }                                                                                              \
    static void gather_##name(const struct lk_block *block, const float *weights,                  \
                              uint32_t queries, uint32_t head_dim, const float *decay,             \
                              float *acc) {                                                        \
        gather(dtype, block, weights, queries, head_dim, decay, acc);                              \
    }
OF_DTYPE(bf16, LK_BF16)
OF_DTYPE(fp16, LK_FP16)
OF_DTYPE(fp32, LK_FP32)

/* A client's vector, each element read once. */
static void load(uint32_t dtype, const uint8_t *from, uint32_t head_dim, float scale, float *to) {
    uint32_t x = 0;

    for (; x + PAIR <= head_dim; x += PAIR) {
        lanes pair[2];
        load_pair(dtype, from, x, pair);
        lanes_store(to + x, pair[0] * scale);
        lanes_store(to + x + LANES, pair[1] * scale);
    }
    if (x < head_dim)
        lanes_store(to + x, element_load(dtype, from, x) * scale);
}

static void restore(uint32_t dtype, uint32_t head_dim, float *values) {
    float natural[PAIR];

    for (uint32_t x = 0; dtype == LK_BF16 && x + PAIR <= head_dim; x += PAIR) {
        for (uint32_t l = 0; l < LANES; l++) {
            natural[2 * l] = values[x + l];
            natural[2 * l + 1] = values[x + LANES + l];
        }
        memcpy(values + x, natural, sizeof natural);
    }
}

/* ---- exponentials ---- */

/* 2^f for f in [-.5, .5], relative error 1e-7. */
LK_INLINE lanes exp2_near(lanes f) {
    lanes y = lanes_set(0x1.5bba14p-10f);

    y = lanes_fma(y, f, lanes_set(0x1.3cea88p-7f));
    y = lanes_fma(y, f, lanes_set(0x1.c6b752p-5f));
    y = lanes_fma(y, f, lanes_set(0x1.ebf9bcp-3f));
    y = lanes_fma(y, f, lanes_set(0x1.62e42ap-1f));
    return lanes_fma(y, f, lanes_set(1.f));
}

/* 2^x for x <= 0; 0 far below, NaN of NaN. */
LK_INLINE lanes exp2_lanes(lanes x) {
#if LANES == 16
    __m512 bound = _mm512_max_ps(_mm512_set1_ps(-200.f), (__m512)x); /* a NaN stays */
    __m512 whole = _mm512_roundscale_ps(bound, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (lanes)_mm512_scalef_ps((__m512)exp2_near((lanes)(bound - whole)), whole);
#else
    ilanes gone = x < lanes_set(-126.f);
    lanes bound = lanes_max(lanes_set(-126.f), x); /* a NaN stays */
    lanes shifted = bound + 0x1.8p23f;             /* its low bits: the nearest integer */
    lanes y = exp2_near(bound - (shifted - 0x1.8p23f));
    y *= (lanes)(((ulanes)shifted << 23) + 0x3f800000); /* of a NaN any bits: the product is one */
    return (lanes)((ilanes)y & ~gone);
#endif
}

/* Of `count` floats the vector at i, filled up with -inf. */
LK_INLINE lanes load_some(const float *from, uint64_t i, uint64_t count) {
    float some[LANES];

    if (i + LANES <= count)
        return lanes_load(from + i);
    for (uint32_t l = 0; l < LANES; l++)
        some[l] = i + l < count ? from[i + l] : -INFINITY;
    return lanes_load(some);
}
LK_INLINE void store_some(float *to, uint64_t i, uint64_t count, lanes x) {
    if (i + LANES <= count)
        lanes_store(to + i, x);
    else
        memcpy(to + i, &x, (count - i) * sizeof(float));
}

/* Lane i: of sums[i % 4] the sum of all lanes, or the largest. */
LK_INLINE lanes add_four(lanes *sums) {
    fold(sums, 2, 1);
    fold(sums, 1, 2);
    for (int distance = 4; distance < LANES; distance *= 2)
        sums[0] += lanes_swap(sums[0], distance);
    return sums[0];
}
LK_INLINE lanes largest_four(lanes *x) {
    lanes low = lanes_max(mix(x[0], x[1], 1), lanes_swap(mix(x[1], x[0], 1), 1));
    lanes high = lanes_max(mix(x[2], x[3], 1), lanes_swap(mix(x[3], x[2], 1), 1));
    lanes all = lanes_max(mix(low, high, 2), lanes_swap(mix(high, low, 2), 2));

    for (int distance = 4; distance < LANES; distance *= 2)
        all = lanes_max(all, lanes_swap(all, distance));
    return all;
}

/* Lane i: from[i % 4]. */
LK_INLINE lanes load_four(const float *from) {
#if LANES == 16
    return (lanes)_mm512_broadcast_f32x4(_mm_loadu_ps(from));
#elif LANES == 8
    return (lanes)_mm256_broadcast_ps((const __m128 *)from);
#else
    return lanes_load(from);
#endif
}

/* The four states are one vector: one exponential makes all decays. */
static void soften(const struct lk_block *block, uint32_t queries, float *logits, float *peak,
                   float *mass, float *decay) {
    lanes part[4] = {{0}}, nothing = lanes_set(-INFINITY), old = load_four(peak),
          weights[4] = {{0}};

    for (uint32_t i = 0; i < queries; i++) {
        float *x = logits + i * LK_LOGITS_STRIDE;
        lanes_store(x + block->tokens, nothing);
        part[i] = nothing;
        for (uint32_t t = 0; t < block->tokens; t += LANES)
            part[i] = lanes_max(lanes_load(x + t), part[i]);
    }
    lanes top = lanes_max(largest_four(part) + block->bias, old);
    ilanes none = top == nothing; /* nothing finite yet: -inf - base must stay -inf */
    lanes base = (lanes)((ilanes)top & ~none);
    float shift[LANES];
    lanes_store(shift, block->bias - base);
    for (uint32_t i = 0; i < queries; i++) {
        float *x = logits + i * LK_LOGITS_STRIDE;
        for (uint32_t t = 0; t < block->tokens; t += LANES) {
            lanes w = exp2_lanes(lanes_load(x + t) + lanes_set(shift[i]));
            lanes_store(x + t, w);
            weights[i] += w;
        }
    }
    lanes fall = exp2_lanes(old - base);
    lanes sums = lanes_fma(load_four(mass), fall, add_four(weights));
    memcpy(peak, &top, 4 * sizeof *peak);
    memcpy(mass, &sums, 4 * sizeof *mass);
    memcpy(decay, &fall, 4 * sizeof *decay);
}

static float largest(const float *x, uint64_t count) {
    lanes high[4];
    uint64_t i = 0;

    for (uint32_t a = 0; a < 4; a++)
        high[a] = lanes_set(-INFINITY);
    for (; i + 4 * LANES <= count; i += 4 * LANES)
#pragma GCC unroll 4
        for (uint32_t a = 0; a < 4; a++)
            high[a] = lanes_max(lanes_load(x + i + a * LANES), high[a]);
    for (; i < count; i += LANES)
        high[0] = lanes_max(load_some(x, i, count), high[0]);
    return lanes_largest(lanes_max(lanes_max(high[0], high[1]), lanes_max(high[2], high[3])));
}

/* Its halves added to two sums. */
LK_INLINE void add_halves(wide *sums, lanes x) {
    half_lanes half[2];

    memcpy(half, &x, sizeof half);
    sums[0] += wide_widen(half[0]);
    sums[1] += wide_widen(half[1]);
}

static double exp_sum(float *to, const float *from, uint64_t count, float peak) {
    const float log2e = 1.44269504088896341f;
    lanes scale = lanes_set(log2e);
    wide sums[2] = {{0}};
    uint64_t i = 0;
    double total = 0;

    for (; i + LANES <= count; i += LANES) {
        lanes e = exp2_lanes((lanes_load(from + i) - peak) * scale);
        lanes_store(to + i, e);
        add_halves(sums, e);
    }
    if (i < count) {
        lanes e = exp2_lanes((load_some(from, i, count) - peak) * scale);
        store_some(to, i, count, e);
        add_halves(sums, e);
    }
    sums[0] += sums[1];
    for (int l = 0; l < WIDE; l++)
        total += sums[0][l];
    return total;
}

static void add_scaled(float *to, const float *from, uint64_t count, float scale) {
    uint64_t i = 0;

    for (; i + LANES <= count; i += LANES)
        lanes_store(to + i, lanes_fma(lanes_load(from + i), lanes_set(scale), lanes_load(to + i)));
    for (; i < count; i++)
        to[i] += scale * from[i];
}

/* `vectors` of shares at i. */
LK_INLINE void shares_some(const struct lk_powers *p, uint64_t i, const int vectors, double *to,
                           float *ret) {
    wide sum[ABREAST];

#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
        sum[v] = (wide){0};
    for (uint32_t g = 0; g < p->group; g++) {
        const float *from = p->from + g * p->stride + i;
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sum[v] = wide_fma(wide_of(from + v * WIDE), wide_set(p->scale[g]), sum[v]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        wide s = (wide)((iwide)sum[v] & (sum[v] >= wide_set(p->floor)));
        iwide above = s > wide_set(1);
        s = (wide)(((iwide)s & ~above) | ((iwide)wide_set(1) & above));
        half_lanes rounded = wide_round(s);
        wide_store(to + v * WIDE, s);
        memcpy(ret + v * WIDE, &rounded, sizeof rounded);
    }
}

/* What is left of a vector is a vector too: rounded otherwise, the last pages' shares would differ
 * from equal ones before them, and win. */
static void shares(const struct lk_powers *p, double *to, float *ret) {
    float some[LK_GROUP_MAX][WIDE] = {{0}}, rounded[WIDE];
    double shares[WIDE];
    uint64_t i = 0;

    for (; i + ABREAST * WIDE <= p->count; i += ABREAST * WIDE)
        shares_some(p, i, ABREAST, to + i, ret + i);
    for (; i + WIDE <= p->count; i += WIDE)
        shares_some(p, i, 1, to + i, ret + i);
    if (i == p->count)
        return;
    for (uint32_t g = 0; g < p->group; g++)
        memcpy(some[g], p->from + g * p->stride + i, (p->count - i) * sizeof(float));
    const struct lk_powers last = {some[0], WIDE, WIDE, p->group, p->scale, p->floor};
    shares_some(&last, 0, 1, shares, rounded);
    memcpy(to + i, shares, (p->count - i) * sizeof(double));
    memcpy(ret + i, rounded, (p->count - i) * sizeof(float));
}

static void spread(double *to, const double *from, uint64_t count, double floor) {
    typedef double four __attribute__((vector_size(32)));

    for (uint64_t i = 0; i < count; i++) {
        double each = from[i] / 4 >= floor ? from[i] / 4 : 0;
        four same = each - (four){0};
        memcpy(to + 4 * i, &same, sizeof same);
    }
}

/* ---- selection ---- */

static void columns(const float *x, uint64_t count, uint32_t width, float *ret) {
    for (uint32_t w = 0; w < width; w += LANES) {
        lanes high = lanes_set(-INFINITY);
        for (uint64_t i = w; i < count; i += width)
            high = lanes_max(load_some(x, i, count), high);
        lanes_store(ret + w, high);
    }
}

#if LANES > 4
/* Bit i: lane i of a is at or above that of b. */
LK_INLINE unsigned above(lanes a, lanes b) {
#if LANES == 16
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#else
    return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GE_OQ));
#endif
}
/* The lanes of `in`, side by side from lane 0 on; those behind them hold anything. */
LK_INLINE lanes squeeze(lanes x, unsigned in) {
#if LANES == 16
    return (lanes)_mm512_maskz_compress_ps((__mmask16)in, (__m512)x);
#else
    uint64_t bytes = _pdep_u64(in, 0x0101010101010101) * 0xff;
    __m128i order = _mm_cvtsi64_si128((int64_t)_pext_u64(0x0706050403020100, bytes));
    return (lanes)_mm256_permutevar8x32_ps((__m256)x, _mm256_cvtepu8_epi32(order));
#endif
}
#endif

static uint64_t pick(const float *x, uint64_t count, float bound, float *to, uint64_t room) {
    uint64_t found = 0, i = 0;

#if LANES > 4
    for (; i + LANES <= count && found + LANES <= room; i += LANES) {
        lanes some = lanes_load(x + i);
        unsigned in = above(some, lanes_set(bound));
        lanes_store(to + found, squeeze(some, in));
        found += (uint64_t)__builtin_popcount(in);
    }
#endif
    for (; i < count && found < room; i++) {
        to[found] = x[i];
        found += x[i] >= bound;
    }
    return i < count ? UINT64_MAX : found;
}

/* Pages are numbered by 32 bits: no lane counts beyond 2^30. */
static uint64_t at_least(const float *x, uint64_t count, float bound) {
    ilanes found[4] = {{0}};
    uint64_t i = 0, sum = 0;

    for (; i + 4 * LANES <= count; i += 4 * LANES)
#pragma GCC unroll 4
        for (uint32_t a = 0; a < 4; a++)
            found[a] -= lanes_load(x + i + a * LANES) >= lanes_set(bound);
    found[0] += found[1] + found[2] + found[3];
    for (int l = 0; l < LANES; l++)
        sum += (uint64_t)found[0][l];
    for (; i < count; i++)
        sum += x[i] >= bound;
    return sum;
}

/* Elements at..end-1, one by one. */
LK_INLINE uint32_t *emit_some(const float *x, uint64_t at, uint64_t end, float cut, uint64_t *ties,
                              uint32_t *to) {
    for (; at < end; at++) {
        bool tie = x[at] == cut && *ties > 0;
        *ties -= tie;
        if (tie || x[at] > cut)
            *to++ = (uint32_t)at;
    }
    return to;
}

static uint64_t emit(const float *x, uint64_t count, float cut, uint64_t ties, uint32_t *ret,
                     uint64_t room) {
    uint32_t *to = ret;
    uint64_t i = 0;

#if LANES > 4
    const lanes edge = lanes_set(cut);
    ilanes step;
    for (int l = 0; l < LANES; l++)
        step[l] = l;
    for (; i + LANES <= count; i += LANES) {
        lanes some = lanes_load(x + i);
        unsigned in = above(some, edge);
        if (!in)
            continue;
        if (in & above(edge, some) || to + LANES > ret + room) { /* one equals the cut */
            to = emit_some(x, i, i + LANES, cut, &ties, to);
        } else {
            lanes index = squeeze((lanes)(step + (int32_t)(uint32_t)i), in);
            memcpy(to, &index, sizeof index);
            to += __builtin_popcount(in);
        }
    }
#else
    (void)room;
#endif
    to = emit_some(x, i, count, cut, &ties, to);
    return (uint64_t)(to - ret);
}

/* The nearest whole number, less one where that is above. Sums stay below 2^53. */
static uint64_t fractions(const double *x, uint64_t count) {
    wide total = {0};
    uint64_t i = 0, sum = 0;

    for (; i + WIDE <= count; i += WIDE) {
        wide s = wide_load(x + i) * 0x1p32, whole = (s + 0x1p52) - 0x1p52;
        total += whole - (wide)((iwide)wide_set(1) & (whole > s));
    }
    for (; i < count; i++)
        sum += (uint64_t)(x[i] * 0x1p32);
    for (int l = 0; l < WIDE; l++)
        sum += (uint64_t)total[l];
    return sum;
}

const struct lk_vector LK_VECTOR = {
    .load = load,
    .restore = restore,
    .dot = {[LK_BF16] = dot_bf16, [LK_FP16] = dot_fp16, [LK_FP32] = dot_fp32},
    .soften = soften,
    .gather = {[LK_BF16] = gather_bf16, [LK_FP16] = gather_fp16, [LK_FP32] = gather_fp32},
    .largest = largest,
    .exp_sum = exp_sum,
    .add_scaled = add_scaled,
    .shares = shares,
    .spread = spread,
    .fractions = fractions,
    .columns = columns,
    .pick = pick,
    .at_least = at_least,
    .emit = emit,
};
