/* SPDX-License-Identifier: MIT */
/*
 * score_avx512.c - scoring with 512-bit vectors and VNNI's products of bytes.
 *
 * A batch passes four stages, each a short loop over its pages; what passes between them stays in
 * L1.
 *
 *   project   Four pairs of directions at a time, of one page or of several. A pair's dwords hold
 *             four channels of one direction, so one vpdpbusd makes 64 products for two directions,
 *             and a load of query digits serves all four pairs. Lanes 2k + n hold direction n.
 *   centre    q . centroid for four pages at a time.
 *   weigh     Coefficients to floats, once for four heads; exp without a maximum: coefficients have
 *             mean zero, so exponents straddle 0 and a plain sum is safe unless they are huge.
 *   finish    Logarithms of 16 sums at once. What is loud - a page and head whose projections allow
 *             exponents beyond QUIET - was added up in vain and is redone with its maximum (redo).
 *
 * The next batch's records are asked for page by page, and by `project` and `weigh` in turn: a core
 * has few requests in flight, and what it needs from its second cache waits behind them. At rank 2
 * only by `weigh` (a pass over pages takes 0.91 of the time so, one over superpages 0.87).
 *
 * Sums over lanes are made by trees that fold several vectors into one. Exponents are in base 2, in
 * units of 2^-23: as integers they are floats' bits.
 * Any thread. Invariants: score.h; whether a page is loud depends on its record and the head alone.
 */
#include <immintrin.h>
#include <math.h>

#include "score.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 64")

#define SLOTS     4 /* pairs projected together */
#define ABREAST   2 /* heads whose products are made in turn: one's are too long a chain */
#define HEADS     LK_QUERY_BLOCK
#define GROUP     4 /* pages finished together: HEADS x GROUP lanes */
#define PAIRS_MAX (LK_RANK_MAX / 2)
#define EXPONENT  0x1p23f /* the unit of a float's exponent */
#define BIAS      (127 * EXPONENT)
#define QUIET     (100 * EXPONENT) /* the sum of a superpage's powers is finite */
#define LN_2      0.69314718f
#define LOG2_E    1.44269504f

/* What one block of heads needs of the query. */
struct heads {
    const struct lk_query *query;
    uint32_t first;
    __m512i basis_bias[HEADS / 2]; /* what stored codes' bias adds; lanes as pair_factor */
    __m512i centroid_bias;         /* lanes [page][head] */
    __m512 pair_factor[HEADS / 2]; /* lanes [4 slots][head][direction] */
    __m512 page_factor;            /* lanes [head][4 pages] */
    const int8_t *pairs[HEADS][2]; /* high, middle */
    const int8_t *plain[HEADS][2]; /* high, middle */
};

/* What passes between the stages, for a batch. */
struct work {
    /* p of [four slots][heads 0-1, 2-3][slot][head][direction]; slot = page * pairs + pair */
    float project[LK_SCORE_BATCH * PAIRS_MAX / SLOTS][HEADS / 2][SLOTS][2][2];
    float centre[LK_SCORE_BATCH / GROUP][GROUP][HEADS]; /* q . centroid, without low digits */
    __m512 sum[LK_SCORE_BATCH];                         /* [head][4 parts] of the page's mass */
    uint16_t loud[LK_SCORE_BATCH * PAIRS_MAX / SLOTS];  /* bits [slot][head], by four slots */
    uint32_t any_loud;
};

/* ---- folds: each adds halves of two vectors, side by side ---- */

/* -> [x low half + high half | y likewise] */
INLINE __m512i fold256(__m512i x, __m512i y) {
    return _mm512_add_epi32(_mm512_shuffle_i64x2(x, y, 0x44), _mm512_shuffle_i64x2(x, y, 0xee));
}
/* x = [a a' b b'], y = [c c' d d'] in quarters -> [a + a', b + b', c + c', d + d'] */
INLINE __m512i fold128(__m512i x, __m512i y) {
    return _mm512_add_epi32(_mm512_shuffle_i64x2(x, y, 0x88), _mm512_shuffle_i64x2(x, y, 0xdd));
}
INLINE __m512i fold64(__m512i x, __m512i y) {
    return _mm512_add_epi32(_mm512_unpacklo_epi64(x, y), _mm512_unpackhi_epi64(x, y));
}
/* Four vectors -> quarter i is the sum of the quarters of vector i. */
INLINE __m512 fold_four(const __m512 *x) {
    __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(x[0], x[1], 0x44),
                             _mm512_shuffle_f32x4(x[0], x[1], 0xee));
    __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(x[2], x[3], 0x44),
                             _mm512_shuffle_f32x4(x[2], x[3], 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
/* Within quarters: lane i is the sum of the quarter of vector i. */
INLINE __m512i fold_quarters(const __m512i *x) {
    __m512i a =
        _mm512_add_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    __m512i b =
        _mm512_add_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    return fold64(a, b);
}
/* The same of floats. */
INLINE __m512 fold_quarters_ps(const __m512 *x) {
    __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}

/* ---- functions: coefficients are minimax fits ---- */

/* 2^(i/32), mantissas */
static const uint32_t roots[32] __attribute__((aligned(64))) = {
    0x000000, 0x02cd87, 0x05aac3, 0x08980f, 0x0b95c2, 0x0ea43a, 0x11c3d3, 0x14f4f0,
    0x1837f0, 0x1b8d3a, 0x1ef532, 0x227043, 0x25fed7, 0x29a15b, 0x2d583f, 0x3123f6,
    0x3504f3, 0x38fbaf, 0x3d08a4, 0x412c4d, 0x45672a, 0x49b9be, 0x4e248c, 0x52a81e,
    0x5744fd, 0x5bfbb8, 0x60ccdf, 0x65b907, 0x6ac0c7, 0x6fe4ba, 0x75257d, 0x7a83b3,
};

/* sum + 2^(x / EXPONENT - 127) in the lanes of `live`, to 3e-5 of the power, for x of a float's
 * range of exponents. x as an integer is the power's bits, but that its mantissa is linear: of it,
 * the upper five bits choose a root, and what is left is a factor so near 1 that it is linear
 * indeed. */
INLINE __m512 add_power(__m512 sum, __m512 x, __mmask16 live) {
    const int exponent = (int)0xff800000, below = 0x3ffff, one = 0x3f800000;
    __m512i i = _mm512_cvtps_epi32(x);
    __m512i root = _mm512_permutex2var_epi32(_mm512_load_si512(roots), _mm512_srli_epi32(i, 18),
                                             _mm512_load_si512(roots + 16));
    __m512i m =
        _mm512_ternarylogic_epi32(i, _mm512_set1_epi32(below), _mm512_set1_epi32(one), 0xea);
    __m512i power = _mm512_ternarylogic_epi32(i, _mm512_set1_epi32(exponent), root, 0xea);
    __m512 factor = _mm512_fmadd_ps(_mm512_castsi512_ps(m), _mm512_set1_ps(0.70068821f),
                                    _mm512_set1_ps(0.29928247f));
    return _mm512_mask3_fmadd_ps(_mm512_castsi512_ps(power), factor, sum, live);
}

/* ln x to 1e-7, of normal numbers: ln(1 + t) for t in [-1/4, 1/2), plus the exponent's share. */
INLINE __m512 ln_of(__m512 x) {
    static const float c[] = {
        0.14019633f, -0.17385983f, 0.20121771f, -0.24976501f, 0.33329569f, -0.50000235f, 1};
    __m512 m = _mm512_getmant_ps(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
    __m512 e = _mm512_getexp_ps(x), t = _mm512_sub_ps(m, _mm512_set1_ps(1));
    __mmask16 below = _mm512_cmp_ps_mask(t, _mm512_setzero_ps(), _CMP_LT_OQ);
    __m512 y = _mm512_set1_ps(-0.06471022f);

    e = _mm512_mask_add_ps(e, below, e, _mm512_set1_ps(1)); /* the mantissa was halved */
    UNROLL
    for (int i = 0; i < 7; i++)
        y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(c[i]));
    return _mm512_fmadd_ps(y, t, _mm512_mul_ps(e, _mm512_set1_ps(LN_2)));
}

/* |x| at most `most`; a NaN stays one. */
INLINE __m512 clip(__m512 x, float most) {
    x = _mm512_min_ps(_mm512_set1_ps(most), x);
    return _mm512_max_ps(_mm512_set1_ps(-most), x);
}

/* lk_score_unit() */
INLINE __m512 units_of(__m512 scale, __m512 factor) {
    return _mm512_min_ps(_mm512_set1_ps(FLT_MAX), _mm512_mul_ps(scale, factor));
}

/* ---- project ---- */

INLINE uint32_t pairs_of(const struct lk_score_shape *shape) {
    return 1 + shape->fine.directions / 2; /* 1, 2, 4 or 8 */
}

/* The pairs of a batch, page by page: where the codes lie, and the two scales. */
struct slots {
    const uint8_t *pair[LK_SCORE_BATCH * PAIRS_MAX];
    int32_t scales[LK_SCORE_BATCH * PAIRS_MAX]; /* two bf16 */
};

INLINE void name_slots_of(const uint32_t pairs, const struct lk_score_shape *shape,
                          const struct lk_score_batch *batch, uint32_t pages, struct slots *ret) {
    const size_t step = shape->first.head_dim;
    const size_t first_scales = lk_record_scales(&shape->first) + 2;
    const size_t fine_scales = lk_record_scales(&shape->fine);
    const uint8_t **to = ret->pair;
    int32_t *scales = ret->scales;

    for (uint32_t page = 0; page < pages; page++, to += pairs, scales += pairs) {
        const uint8_t *first = batch->first[page], *fine = batch->fine[page];
        to[0] = first + step;
        memcpy(scales, first + first_scales, 4);
        UNROLL
        for (uint32_t i = 1; i < pairs; i++)
            to[i] = fine + (i - 1) * step;
        if (pairs > 1)
            memcpy(scales + 1, fine + fine_scales, 4 * (pairs - 1));
    }
}

INLINE void name_slots(const struct lk_score_shape *shape, const struct lk_score_batch *batch,
                       uint32_t pages, struct slots *ret) {
    switch (pairs_of(shape)) {
    case 1:
        name_slots_of(1, shape, batch, pages, ret);
        break;
    case 2:
        name_slots_of(2, shape, batch, pages, ret);
        break;
    case 4:
        name_slots_of(4, shape, batch, pages, ret);
        break;
    default:
        name_slots_of(8, shape, batch, pages, ret);
    }
}

/* -> lanes [slot][scale 0, scale 1, scale 0, scale 1] */
INLINE __m512 scales_of(const int32_t *two) {
    const __m512i spread = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    __m512i all = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)two));
    all = _mm512_permutexvar_epi32(spread, all);
    all = _mm512_sllv_epi32(all, _mm512_set1_epi64(16));
    return _mm512_castsi512_ps(_mm512_and_si512(all, _mm512_set1_epi32((int)0xffff0000)));
}

/* The dwords of the last chunk that there are. */
INLINE __mmask16 last_of(const struct lk_score_shape *shape) {
    uint32_t rest = shape->first.head_dim % 64;
    return (__mmask16)(rest ? (1 << rest / 4) - 1 : 0xffff);
}

/* A mask that is known to be full costs nothing. */
INLINE __m512i load_codes(const uint8_t *from, __mmask16 mask) {
    return mask == 0xffff && __builtin_constant_p(mask) ? _mm512_loadu_si512(from)
                                                        : _mm512_maskz_loadu_epi32(mask, from);
}

/*
 * Products of `slots` slots' pairs with each head's code, summed down to quarters: of four slots,
 * or of two, two quarters each. The codes stay in registers while the heads pass.
 */
INLINE void project_codes(const int chunks, const bool whole, const int heads, const int slots,
                          const uint8_t *const *pair, __mmask16 last, const struct heads *q,
                          __m512i *ret) {
    __m512i code[SLOTS][4][2]; /* slot, chunk, low and high nibbles */
    const __m512i nibble = _mm512_set1_epi8(15);

    UNROLL
    for (int i = 0; i < slots * chunks; i++) {
        int s = i / chunks, c = i % chunks;
        __mmask16 mask = whole || c < chunks - 1 ? 0xffff : last;
        __m512i x = load_codes(pair[s] + 64 * c, mask);
        code[s][c][0] = _mm512_and_si512(x, nibble);
        code[s][c][1] = _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble);
    }
    UNROLL
    for (int h = 0; h < heads; h += ABREAST) {
        __m512i sum[ABREAST][SLOTS];
        UNROLL
        for (int i = 0; i < 4 * chunks * ABREAST; i++) {
            int k = i % ABREAST, digit = i / ABREAST / (2 * chunks), c = i / ABREAST % (2 * chunks);
            if (h + k >= heads)
                continue;
            __m512i digits = _mm512_loadu_si512(q->pairs[h + k][digit] + 64 * c);
            UNROLL
            for (int s = 0; s < slots; s++) {
                if (digit == 0 && c == 0)
                    sum[k][s] = _mm512_setzero_si512();
                if (digit == 1 && c == 0)
                    sum[k][s] = _mm512_slli_epi32(sum[k][s], 8);
                sum[k][s] = _mm512_dpbusd_epi32(sum[k][s], code[s][c / 2][c % 2], digits);
            }
        }
        UNROLL
        for (int k = 0; k < (heads - h < ABREAST ? heads - h : ABREAST); k++) {
            ret[h + k] = fold256(sum[k][0], sum[k][1]);
            if (slots == SLOTS)
                ret[h + k] = fold128(ret[h + k], fold256(sum[k][2], sum[k][3]));
        }
    }
}

/* Which slots' pages may have exponents beyond QUIET: a bound is 127 times the sum of |p|. Of eight
 * pairs each half has half of it. p: [slot][head][direction] of heads 0-1 and 2-3.
 * -> [slot][head] */
INLINE __mmask16 loud_of(const uint32_t pairs, __m512 p01, __m512 p23) {
    __m512 a = _mm512_abs_ps(p01), b = _mm512_abs_ps(p23);
    __m512 sum = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
    if (pairs > 1)
        sum = _mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0xb1));
    if (pairs > 2)
        sum = _mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0x4e));
    return _mm512_cmp_ps_mask(sum, _mm512_set1_ps(QUIET / 127 / (pairs > 4 ? 2 : 1)), _CMP_NLE_UQ);
}

INLINE __mmask16 project_slots(const int chunks, const bool whole, const int heads,
                               const uint32_t pairs, const uint8_t *const *pair, __m512 scale,
                               __mmask16 last, const struct heads *q, float *ret) {
    __m512i all[HEADS], back[HEADS];
    __m512 p[HEADS / 2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};

    if (chunks <= 2) {
        project_codes(chunks, whole, heads, SLOTS, pair, last, q, all);
    } else { /* the codes of four slots would not fit */
        project_codes(chunks, whole, heads, 2, pair, last, q, all);
        project_codes(chunks, whole, heads, 2, pair + 2, last, q, back);
        UNROLL
        for (int h = 0; h < heads; h++)
            all[h] = fold128(all[h], back[h]);
    }
    UNROLL
    for (int h = 0; h < heads; h += 2) { /* lanes [slot][head][direction] */
        __m512i sum = fold64(all[h], h + 1 < heads ? all[h + 1] : _mm512_setzero_si512());
        __m512 unit = units_of(scale, q->pair_factor[h / 2]);
        p[h / 2] = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, q->basis_bias[h / 2]));
        p[h / 2] = _mm512_mul_ps(p[h / 2], unit);
        p[h / 2] = _mm512_mul_ps(p[h / 2], _mm512_set1_ps(LOG2_E * EXPONENT));
        _mm512_storeu_ps(ret + h / 2 * 16, p[h / 2]);
    }
    return loud_of(pairs, p[0], p[1]);
}

INLINE void prefetch(const uint8_t *from, uint32_t bytes) {
    for (uint32_t i = 0; i < bytes; i += 64)
        _mm_prefetch(from + i, _MM_HINT_T1);
}

/* What `project` asks for of a page to come, and what `weigh` does. */
INLINE void ask_early(const struct lk_score_shape *shape, const struct lk_score_batch *next,
                      uint32_t page) {
    if (pairs_of(shape) == 1)
        return;
    prefetch(next->first[page], lk_record_bytes(&shape->first));
    prefetch(next->fine[page], lk_record_bytes(&shape->fine) / 2);
}
INLINE void ask_late(const uint32_t pairs, const struct lk_score_shape *shape,
                     const struct lk_score_batch *next, uint32_t page) {
    uint32_t half = lk_record_bytes(&shape->fine) / 2;
    if (pairs == 1)
        prefetch(next->first[page], lk_record_bytes(&shape->first));
    else
        prefetch(next->fine[page] + half, half);
}

INLINE void project(const int chunks, const bool whole, const int heads,
                    const struct lk_score_shape *shape, const struct heads *q,
                    const struct lk_score_batch *batch, const struct lk_score_batch *next,
                    uint32_t pages, struct work *work) {
    uint32_t pairs = pairs_of(shape), any_loud = 0;
    __mmask16 last = last_of(shape);
    struct slots slots;

    name_slots(shape, batch, pages, &slots);
    for (uint32_t i = 0, page = 0; i < pages * pairs; i += SLOTS) {
        for (; page * pairs < i + SLOTS && page < pages; page++)
            ask_early(shape, next, page);
        __m512 scale = scales_of(slots.scales + i);
        __mmask16 loud = project_slots(chunks, whole, heads, pairs, slots.pair + i, scale, last, q,
                                       &work->project[i / SLOTS][0][0][0][0]);
        work->loud[i / SLOTS] = loud;
        any_loud |= loud;
    }
    work->any_loud = any_loud;
}

/* ---- centre ---- */

INLINE void centre_group(const int chunks, const bool whole, const int heads,
                         const uint8_t *const *page, __mmask16 last, const struct heads *q,
                         float *ret) {
    __m512i code[GROUP][4], sum[HEADS];

    UNROLL
    for (int i = 0; i < GROUP * chunks; i++) {
        int c = i % chunks;
        __mmask16 mask = whole || c < chunks - 1 ? 0xffff : last;
        code[i / chunks][c] = load_codes(page[i / chunks] + 64 * c, mask);
    }
    UNROLL
    for (int h = 0; h < HEADS; h++) {
        __m512i part[GROUP];
        if (h >= heads) {
            sum[h] = _mm512_setzero_si512();
            continue;
        }
        UNROLL
        for (int p = 0; p < GROUP; p++) {
            part[p] = _mm512_setzero_si512();
            UNROLL
            for (int n = 0; n < 2; n++) {
                UNROLL
                for (int c = 0; c < chunks; c++)
                    part[p] = _mm512_dpbusd_epi32(part[p], code[p][c],
                                                  _mm512_loadu_si512(q->plain[h][n] + 64 * c));
                if (n == 0)
                    part[p] = _mm512_slli_epi32(part[p], 8);
            }
        }
        sum[h] =
            fold128(fold256(part[0], part[1]), fold256(part[2], part[3])); /* quarters: pages */
    }
    __m512i all = _mm512_sub_epi32(fold_quarters(sum), q->centroid_bias);
    _mm512_storeu_ps(ret, _mm512_cvtepi32_ps(all));
}

INLINE void centre(const int chunks, const bool whole, const int heads,
                   const struct lk_score_shape *shape, const struct heads *q,
                   const struct lk_score_batch *batch, uint32_t pages, struct work *work) {
    __mmask16 last = last_of(shape);
    for (uint32_t page = 0; page < pages; page += GROUP)
        centre_group(chunks, whole, heads, batch->first + page, last, q,
                     &work->centre[page / GROUP][0][0]);
}

/* ---- weigh ---- */

/* Where the project stage left slot `slot`: + head / 2 * 16 + head % 2 * 2 + direction. */
INLINE const float *projected(const struct work *work, uint32_t slot) {
    return &work->project[slot / SLOTS][0][slot % SLOTS][0][0];
}

/* Sixteen coefficients, or the eight that there are. */
INLINE __m512 coeffs_of(const int8_t *from, const bool eight) {
    __m128i c =
        eight ? _mm_loadl_epi64((const __m128i *)from) : _mm_loadu_si128((const __m128i *)from);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(c));
}

INLINE void add_pair(const int heads, const bool eight, const int8_t *coeffs, uint32_t tokens,
                     const float *p, __m512 *x) {
    __m512 a = coeffs_of(coeffs, eight), b = coeffs_of(coeffs + tokens, eight);
    UNROLL
    for (int h = 0; h < heads; h++) {
        const float *at = p + h / 2 * 16 + h % 2 * 2;
        x[h] = _mm512_fmadd_ps(a, _mm512_set1_ps(at[0]), x[h]);
        x[h] = _mm512_fmadd_ps(b, _mm512_set1_ps(at[1]), x[h]);
    }
}

/* Where a shape's coefficients lie. */
struct coeffs {
    uint32_t first, fine, tokens;
};

INLINE struct coeffs coeffs_at(const struct lk_score_shape *shape) {
    return (struct coeffs){lk_record_coeffs(&shape->first), lk_record_coeffs(&shape->fine),
                           shape->first.tokens};
}

/* Exponents x of sixteen tokens from t on, above `base`. */
INLINE void exponents(const int heads, const bool eight, const uint32_t pairs,
                      const struct coeffs at, const struct lk_score_batch *batch,
                      const struct work *work, uint32_t page, uint32_t t, const float base,
                      __m512 *x) {
    const int8_t *first = (const int8_t *)batch->first[page] + at.first + t;
    const int8_t *fine = (const int8_t *)batch->fine[page] + at.fine + t;

    UNROLL
    for (int h = 0; h < heads; h++)
        x[h] = _mm512_set1_ps(base);
    UNROLL
    for (uint32_t i = 0; i < pairs; i++)
        add_pair(heads, eight, i ? fine + 2 * (i - 1) * at.tokens : first, at.tokens,
                 projected(work, page * pairs + i), x);
}

INLINE void tally(const int heads, const bool eight, const __m512 *x, __m512 *sum) {
    UNROLL
    for (int h = 0; h < heads; h++)
        sum[h] = add_power(sum[h], x[h], eight ? 0xff : 0xffff);
}

INLINE void clear(__m512 *sum) {
    UNROLL
    for (int h = 0; h < HEADS; h++)
        sum[h] = _mm512_setzero_ps();
}

/* The powers of one vector of tokens are taken while the exponents of the next are made: both in a
 * row are a chain too long for the processor to look past. */
INLINE void weigh(const int heads, const bool eight, const uint32_t pairs,
                  const struct lk_score_shape *shape, const struct lk_score_batch *batch,
                  const struct lk_score_batch *next, uint32_t pages, struct work *work) {
    const struct coeffs at = coeffs_at(shape);
    __m512 sum[HEADS], x[HEADS], before[HEADS];
    uint32_t done = 0, t = 0;

    clear(sum);
    ask_late(pairs, shape, next, 0);
    exponents(heads, eight, pairs, at, batch, work, 0, 0, BIAS, before);
    for (;;) {
        const uint32_t page = done;
        t += 16;
        if (t >= at.tokens) {
            t = 0;
            done++;
        }
        if (done == pages)
            break;
        /* Keeps broadcasts of p where they are used: hoisted, they do not fit the registers. */
        __asm__ volatile("" ::: "memory");
        exponents(heads, eight, pairs, at, batch, work, done, t, BIAS, x);
        tally(heads, eight, before, sum);
        if (done != page) {
            work->sum[page] = fold_four(sum);
            clear(sum);
            ask_late(pairs, shape, next, done);
        }
        UNROLL
        for (int h = 0; h < heads; h++)
            before[h] = x[h];
    }
    tally(heads, eight, before, sum);
    work->sum[pages - 1] = fold_four(sum);
}

typedef void weigh_fn(const struct lk_score_shape *shape, const struct lk_score_batch *batch,
                      const struct lk_score_batch *next, uint32_t pages, struct work *work);

#define WEIGH(SIZE, EIGHT, PAIRS)                                                                  \
    static void weigh_##SIZE##_##EIGHT##_##PAIRS(                                                  \
        const struct lk_score_shape *shape, const struct lk_score_batch *batch,                    \
        const struct lk_score_batch *next, uint32_t pages, struct work *work) {                    \
        weigh(SIZE, EIGHT, PAIRS, shape, batch, next, pages, work);                                \
    }
#define WEIGHS(SIZE)                                                                               \
    WEIGH(SIZE, 0, 1)                                                                              \
    WEIGH(SIZE, 0, 2)                                                                              \
    WEIGH(SIZE, 0, 4)                                                                              \
    WEIGH(SIZE, 0, 8)                                                                              \
    WEIGH(SIZE, 1, 1)                                                                              \
    WEIGH(SIZE, 1, 2)                                                                              \
    WEIGH(SIZE, 1, 4)                                                                              \
    static weigh_fn *const weighs_##SIZE[2][4] = {                                                 \
        {weigh_##SIZE##_0_1, weigh_##SIZE##_0_2, weigh_##SIZE##_0_4, weigh_##SIZE##_0_8},          \
        {weigh_##SIZE##_1_1, weigh_##SIZE##_1_2, weigh_##SIZE##_1_4, NULL},                        \
    };
WEIGHS(1)
WEIGHS(2)
WEIGHS(4)

INLINE weigh_fn *weigh_of(const int heads, const struct lk_score_shape *shape) {
    weigh_fn *const(*table)[4] = heads == 1 ? weighs_1 : heads == 2 ? weighs_2 : weighs_4;
    return table[shape->first.tokens < 16][__builtin_ctz(pairs_of(shape))];
}

/* ---- finish ---- */

/* What the low digits add to q . centroid, for the heads and pages [head][page] of `wanted`. */
static __attribute__((noinline)) __m512 low_products(const struct lk_score_shape *shape,
                                                     const struct lk_query *query, uint32_t first,
                                                     const uint8_t *const *page, __mmask16 wanted) {
    float ret[HEADS][GROUP] = {{0}};
    for (uint32_t i = 0; i < HEADS * GROUP; i++) {
        uint32_t h = i / GROUP, p = i % GROUP;
        if (!(wanted & 1 << i))
            continue;
        const int8_t *digits = lk_query_plain(query, first + h, LK_DIGIT_LOW);
        __m512i sum = _mm512_setzero_si512();
        for (uint32_t c = 0; c < shape->first.head_dim; c += 16) {
            __m128i codes = _mm_loadu_si128((const __m128i *)(page[p] + c));
            __m128i low = _mm_loadu_si128((const __m128i *)(digits + c));
            sum = _mm512_add_epi32(
                sum, _mm512_mullo_epi32(_mm512_cvtepu8_epi32(codes), _mm512_cvtepi8_epi32(low)));
        }
        int32_t all = _mm512_reduce_add_epi32(sum);
        ret[h][p] = (float)(all - LK_CENTROID_BIAS * query->low_sum[first + h]) / 256;
    }
    return _mm512_loadu_ps(ret);
}

/* What of a page's projections no float holds, as large as LK_SCORE_MOST. */
static void clip_page(const uint32_t pairs, uint32_t page, struct work *work) {
    for (uint32_t slot = page * pairs; slot < (page + 1) * pairs; slot++)
        for (uint32_t i = 0; i < HEADS / 2; i++) {
            float *p = &work->project[slot / SLOTS][i][slot % SLOTS][0][0];
            __m512 all = _mm512_maskz_loadu_ps(0xf, p);
            _mm512_mask_storeu_ps(p, 0xf, clip(all, LK_SCORE_MOST * EXPONENT));
        }
}

/* The mass of one page again, for every head, relative to its largest term. */
static __attribute__((noinline)) void redo(const struct lk_score_shape *shape,
                                           const struct lk_score_batch *batch, struct work *work,
                                           uint32_t page, float *ret_sum, float *ret_peak) {
    const struct coeffs at = coeffs_at(shape);
    const uint32_t tokens = at.tokens, pairs = pairs_of(shape);
    const bool eight = tokens < 16;
    const __mmask16 live = eight ? 0xff : 0xffff;
    __m512 peak[HEADS], sum[HEADS], x[HEADS];

    clip_page(pairs, page, work);
    for (int h = 0; h < HEADS; h++) {
        peak[h] = _mm512_set1_ps(-INFINITY);
        sum[h] = _mm512_setzero_ps();
    }
    for (uint32_t t = 0; t < tokens; t += 16) {
        exponents(HEADS, eight, pairs, at, batch, work, page, t, 0, x);
        for (int h = 0; h < HEADS; h++)
            peak[h] = _mm512_mask_max_ps(peak[h], live, peak[h], x[h]);
    }
    for (int h = 0; h < HEADS; h++) {
        float most = _mm512_reduce_max_ps(peak[h]);
        peak[h] = _mm512_set1_ps(most);
        ret_peak[h] = most / EXPONENT * LN_2;
    }
    for (uint32_t t = 0; t < tokens; t += 16) {
        exponents(HEADS, eight, pairs, at, batch, work, page, t, 0, x);
        for (int h = 0; h < HEADS; h++) {
            __m512 below = _mm512_sub_ps(x[h], peak[h]);
            below = _mm512_max_ps(_mm512_set1_ps(-126 * EXPONENT), below);
            sum[h] = add_power(sum[h], _mm512_add_ps(below, _mm512_set1_ps(BIAS)), live);
        }
    }
    for (int h = 0; h < HEADS; h++)
        ret_sum[h] = _mm512_reduce_add_ps(sum[h]);
}

/* Of the pages page..page + 3, the loud ones: [head][page] */
static __mmask16 loud_pages(const struct lk_score_shape *shape, const struct work *work,
                            uint32_t page) {
    uint32_t pairs = pairs_of(shape), loud = 0;

    for (uint32_t slot = page * pairs; slot < (page + GROUP) * pairs; slot++) {
        uint32_t heads = work->loud[slot / SLOTS] >> slot % SLOTS * HEADS;
        for (uint32_t h = 0; h < HEADS; h++)
            loud |= (heads >> h & 1) << (h * GROUP + slot / pairs - page);
    }
    return (__mmask16)loud;
}

/* ln of sums [head][page], the loud ones made again. */
static __attribute__((noinline)) __m512 mend(const struct lk_score_shape *shape,
                                             const struct lk_score_batch *batch, struct work *work,
                                             uint32_t page, __m512 sum) {
    float all[HEADS][GROUP], more[HEADS][GROUP] = {{0}}, page_sum[HEADS], peak[HEADS];
    __mmask16 loud = loud_pages(shape, work, page);

    _mm512_storeu_ps(all, sum);
    for (uint32_t p = 0; p < GROUP; p++) {
        if (!(loud & 0x1111 << p))
            continue;
        redo(shape, batch, work, page + p, page_sum, peak);
        for (uint32_t h = 0; h < HEADS; h++)
            if (loud & 1 << (h * GROUP + p)) {
                all[h][p] = page_sum[h];
                more[h][p] = peak[h];
            }
    }
    return _mm512_add_ps(_mm512_loadu_ps(more), ln_of(_mm512_loadu_ps(all)));
}

/* -> [head][page]: the scales of four pages' centroids, four times */
INLINE __m512 centroid_scales(const uint8_t *const *page, uint32_t at) {
    uint32_t bits[GROUP];
    UNROLL
    for (int p = 0; p < GROUP; p++) {
        uint16_t half;
        memcpy(&half, page[p] + at, 2);
        bits[p] = (uint32_t)half << 16;
    }
    __m128i all = _mm_set_epi32((int)bits[3], (int)bits[2], (int)bits[1], (int)bits[0]);
    return _mm512_castsi512_ps(_mm512_broadcast_i32x4(all));
}

INLINE void finish(const int heads, const struct lk_score_shape *shape, const struct heads *q,
                   const struct lk_score_batch *batch, uint32_t pages, struct work *work,
                   float *ret) {
    const __m512i transpose =
        _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    uint32_t scales = lk_record_scales(&shape->first);
    __mmask16 wanted = (__mmask16)((1 << heads * GROUP) - 1);

    for (uint32_t page = 0; page < pages; page += GROUP) {
        __m512 unit = units_of(centroid_scales(batch->first + page, scales), q->page_factor);
        __m512 mu = _mm512_loadu_ps(work->centre[page / GROUP]);
        mu = _mm512_permutexvar_ps(transpose, mu);
        __mmask16 fine =
            wanted & _mm512_cmp_ps_mask(unit, _mm512_set1_ps(LK_SCORE_LOW_UNIT), _CMP_GE_OQ);
        if (fine)
            mu = _mm512_add_ps(mu,
                               low_products(shape, q->query, q->first, batch->first + page, fine));
        mu = clip(_mm512_mul_ps(mu, unit), LK_SCORE_MOST);
        __m512 sum = fold_quarters_ps(work->sum + page);
        __m512 mass = work->any_loud ? mend(shape, batch, work, page, sum) : ln_of(sum);
        __m512 score = _mm512_add_ps(mu, mass);
        _mm_storeu_ps(ret + page, _mm512_castps512_ps128(score));
        if (heads > 1)
            _mm_storeu_ps(ret + LK_SCORE_BATCH + page, _mm512_extractf32x4_ps(score, 1));
        if (heads > 2) {
            _mm_storeu_ps(ret + 2 * LK_SCORE_BATCH + page, _mm512_extractf32x4_ps(score, 2));
            _mm_storeu_ps(ret + 3 * LK_SCORE_BATCH + page, _mm512_extractf32x4_ps(score, 3));
        }
    }
}

/* ---- a batch, for one block of heads ---- */

typedef void block_fn(const struct lk_score_shape *shape, const struct heads *q,
                      const struct lk_score_batch *batch, const struct lk_score_batch *next,
                      uint32_t pages, float *ret);

#define BLOCK(CHUNKS, WHOLE, SIZE)                                                                 \
    static void block_##CHUNKS##_##WHOLE##_##SIZE(                                                 \
        const struct lk_score_shape *shape, const struct heads *q,                                 \
        const struct lk_score_batch *batch, const struct lk_score_batch *next, uint32_t pages,     \
        float *ret) {                                                                              \
        struct work work;                                                                          \
        project(CHUNKS, WHOLE, SIZE, shape, q, batch, next, pages, &work);                         \
        centre(CHUNKS, WHOLE, SIZE, shape, q, batch, pages, &work);                                \
        weigh_of(SIZE, shape)(shape, batch, next, pages, &work);                                   \
        finish(SIZE, shape, q, batch, pages, &work, ret);                                          \
    }
#define BLOCKS(CHUNKS, WHOLE)                                                                      \
    BLOCK(CHUNKS, WHOLE, 1)                                                                        \
    BLOCK(CHUNKS, WHOLE, 2)                                                                        \
    BLOCK(CHUNKS, WHOLE, 4)                                                                        \
    static block_fn *const blocks_##CHUNKS##_##WHOLE[3] = {                                        \
        block_##CHUNKS##_##WHOLE##_1, block_##CHUNKS##_##WHOLE##_2, block_##CHUNKS##_##WHOLE##_4};
BLOCKS(1, 1)
BLOCKS(2, 0)
BLOCKS(2, 1)
BLOCKS(3, 1)
BLOCKS(4, 1)

/* For up to 4 heads. */
static block_fn *block_of(uint32_t head_dim, uint32_t heads) {
    uint32_t size = heads == 1 ? 0 : heads == 2 ? 1 : 2;
    switch (head_dim) {
    case 64:
        return blocks_1_1[size];
    case 128:
        return blocks_2_1[size];
    case 192:
        return blocks_3_1[size];
    case 256:
        return blocks_4_1[size];
    default: /* 80, 96, 112 */
        return blocks_2_0[size];
    }
}

static void name_heads(const struct lk_query *query, uint32_t first, struct heads *q) {
    const float *f = query->factor + first;

    q->query = query;
    q->first = first;
    for (uint32_t h = 0; h < HEADS; h++) {
        uint32_t g = first + h;
        for (uint32_t n = 0; n < 2; n++) {
            q->plain[h][n] = lk_query_plain(query, g, n);
            q->pairs[h][n] = lk_query_pairs(query, g, n);
        }
    }
    for (uint32_t h = 0; h < HEADS; h += 2) {
        const int32_t *sum = query->code_sum + first + h;
        const __mmask16 second = 0xcccc;
        q->pair_factor[h / 2] =
            _mm512_mask_blend_ps(second, _mm512_set1_ps(f[h]), _mm512_set1_ps(f[h + 1]));
        q->basis_bias[h / 2] =
            _mm512_mask_blend_epi32(second, _mm512_set1_epi32(LK_BASIS_BIAS * sum[0]),
                                    _mm512_set1_epi32(LK_BASIS_BIAS * sum[1]));
    }
    __m128i sums = _mm_loadu_si128((const __m128i *)(query->code_sum + first));
    q->centroid_bias =
        _mm512_broadcast_i32x4(_mm_mullo_epi32(sums, _mm_set1_epi32(LK_CENTROID_BIAS)));
    q->page_factor = _mm512_set_ps(f[3], f[3], f[3], f[3], f[2], f[2], f[2], f[2], f[1], f[1], f[1],
                                   f[1], f[0], f[0], f[0], f[0]);
}

void lk_score_avx512(const struct lk_score_shape *shape, const struct lk_query *query,
                     const struct lk_score_batch *batch, const struct lk_score_batch *next,
                     uint32_t pages, float *ret) {
    uint32_t padded = (pages + GROUP - 1) / GROUP * GROUP;
    for (uint32_t g = 0; g < shape->group; g += HEADS) {
        struct heads q;
        name_heads(query, g, &q);
        block_of(shape->first.head_dim, shape->group - g)(shape, &q, batch, next, padded,
                                                          ret + g * LK_SCORE_BATCH);
    }
}
