/* SPDX-License-Identifier: MIT */
/*
 * score_avx2.c - scoring with 256-bit vectors.
 *
 * As score_avx512.c, page by page, for four heads at a time:
 *
 *   project   A pair's codes stay in registers while the heads pass. vpmaddubsw adds two products
 *             of bytes in 16 bits; eight of its results still fit (8 * 2 * 15 * 128 < 2^15), then
 *             vpmaddwd widens and weighs the digits.
 *   centre    centroid codes as 16-bit integers by 16-bit query codes.
 *   weigh     exponents in base 2 without a maximum, of two vectors of tokens together: they share
 *             what is read of p. A page and head whose projections allow exponents beyond QUIET is
 *             added up again with its maximum.
 *   finish    eight logarithms at once.
 *
 * Sixteen registers are few: what the compiler would keep for later, or add up in another order, it
 * would have to store.
 *
 * Any thread. Invariants: score.h.
 */
#include <immintrin.h>
#include <math.h>

#include "score.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
/* What was read is read again; and sums are made one after the other. */
#define KEEP_ORDER()  __asm__ volatile("" ::: "memory")
#define KEEP_CHAIN(x) __asm__("" : "+x"(x))

#define HEADS     LK_QUERY_BLOCK
#define PAIRS_MAX (LK_RANK_MAX / 2)
#define PART      128 /* channels whose products 16 bits hold */
#define LOG2_E    1.44269504f
#define LN_2      0.69314718f
#define QUIET     100.f /* exponents up to it need no maximum: their powers' sum is finite */

struct heads {
    const uint8_t *digits; /* of the first; lk_query_pairs_at() and the like */
    __m128 factor;
    __m256 pair_factor; /* [head][direction] */
    __m256i pair_bias;  /* what stored codes' bias adds; lanes alike */
};

/* A page's p, between the stages. */
struct work {
    float project[PAIRS_MAX][HEADS][2];
};

/* ---- folds ---- */

/* Lanes 2k + n of four vectors summed over k: [vector][n] */
INLINE __m256i fold_pairs(const __m256i *x) {
    __m256i a =
        _mm256_add_epi32(_mm256_unpacklo_epi64(x[0], x[1]), _mm256_unpackhi_epi64(x[0], x[1]));
    __m256i b =
        _mm256_add_epi32(_mm256_unpacklo_epi64(x[2], x[3]), _mm256_unpackhi_epi64(x[2], x[3]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20),
                            _mm256_permute2x128_si256(a, b, 0x31));
}

/* The sums of four vectors. */
INLINE __m128 fold_sums(const __m256 *x) {
    __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    return _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
}

/* ---- functions: coefficients are minimax fits ---- */

/* 2^x to 3e-6 of it, for x that a float's exponent holds. */
INLINE __m256 exp2_of(__m256 x) {
    const __m256 shift = _mm256_set1_ps(0x1.8p23f); /* leaves the nearest integer in the low bits */
    __m256 n = _mm256_add_ps(x, shift);
    __m256 f = _mm256_sub_ps(x, _mm256_sub_ps(n, shift)), y = _mm256_set1_ps(0.00958285f);
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(0.05590642f));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(0.24024099f));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(0.69312419f));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(1));
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(y), _mm256_slli_epi32(_mm256_castps_si256(n), 23)));
}

/* ln x to 1e-7, of normal numbers: ln(1 + t) for t in [-1/4, 1/2), plus the exponent's share. */
INLINE __m256 ln_of(__m256 x) {
    static const float c[] = {
        0.14019633f, -0.17385983f, 0.20121771f, -0.24976501f, 0.33329569f, -0.50000235f, 1};
    const __m256i bits = _mm256_castps_si256(x), quarter = _mm256_set1_epi32(0x3f400000); /* 0.75 */
    __m256i e = _mm256_srai_epi32(_mm256_sub_epi32(bits, quarter), 23);
    __m256 m = _mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32(e, 23)));
    __m256 t = _mm256_sub_ps(m, _mm256_set1_ps(1)), y = _mm256_set1_ps(-0.06471022f);

    UNROLL
    for (int i = 0; i < 7; i++)
        y = _mm256_fmadd_ps(y, t, _mm256_set1_ps(c[i]));
    return _mm256_fmadd_ps(y, t, _mm256_mul_ps(_mm256_cvtepi32_ps(e), _mm256_set1_ps(LN_2)));
}

/* |x| at most LK_SCORE_MOST; a NaN stays one. */
INLINE __m256 clip(__m256 x) {
    x = _mm256_min_ps(_mm256_set1_ps(LK_SCORE_MOST), x);
    return _mm256_max_ps(_mm256_set1_ps(-LK_SCORE_MOST), x);
}

/* ---- project ---- */

/* Products of up to PART channels of a pair with each head's code: the sum, or added to it. */
INLINE void project_part(const int vectors, uint32_t head_dim, const uint8_t *pair,
                         uint32_t channel, const uint8_t *digits, bool add, __m256i *sum) {
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256i low[4], high[4];

    UNROLL
    for (int i = 0; i < vectors; i++) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(pair + channel + 32 * i));
        low[i] = _mm256_and_si256(x, nibble);
        high[i] = _mm256_and_si256(_mm256_srli_epi16(x, 4), nibble);
    }
    UNROLL
    for (int h = 0; h < HEADS; h++) {
        __m256i digit[2];
        KEEP_ORDER();
        UNROLL
        for (int n = 0; n < 2; n++) {
            /* 32 stored bytes are half a chunk: low nibbles' digits, and 64 on the high ones'. */
            const int8_t *d =
                lk_query_pairs_at(digits, lk_query_padded(head_dim), h, n) + 2 * channel;
            UNROLL
            for (int i = 0; i < 2 * vectors; i++) {
                const int8_t *at = d + i / 4 * 128 + i / 2 % 2 * 32 + i % 2 * 64;
                __m256i x = _mm256_maddubs_epi16(i % 2 ? high[i / 2] : low[i / 2],
                                                 _mm256_loadu_si256((const __m256i *)at));
                digit[n] = i ? _mm256_add_epi16(digit[n], x) : x;
                KEEP_CHAIN(digit[n]);
            }
        }
        __m256i wide = _mm256_add_epi32(_mm256_madd_epi16(digit[0], _mm256_set1_epi16(256)),
                                        _mm256_madd_epi16(digit[1], _mm256_set1_epi16(1)));
        sum[h] = add ? _mm256_add_epi32(sum[h], wide) : wide;
    }
}

/* What is left of a pair after whole vectors: 16 bytes, padded with codes of zero. */
static void project_rest(uint32_t head_dim, const uint8_t *pair, uint32_t channel,
                         const struct heads *q, __m256i *sum) {
    uint8_t padded[32] = {0};
    memcpy(padded, pair + channel, 16);
    for (int h = 0; h < HEADS; h++) {
        __m256i x = _mm256_loadu_si256((const __m256i *)padded);
        __m256i low = _mm256_and_si256(x, _mm256_set1_epi8(15));
        __m256i high = _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15));
        for (int n = 0; n < 2; n++) {
            const int8_t *at = lk_query_pairs_at(q->digits, lk_query_padded(head_dim), h, n) +
                               channel / 64 * 128 + channel % 64;
            __m256i a = _mm256_maddubs_epi16(low, _mm256_loadu_si256((const __m256i *)at));
            __m256i b = _mm256_maddubs_epi16(high, _mm256_loadu_si256((const __m256i *)(at + 64)));
            a = _mm256_madd_epi16(_mm256_add_epi16(a, b), _mm256_set1_epi16(n ? 1 : 256));
            sum[h] = _mm256_add_epi32(sum[h], a);
        }
    }
}

/* -> sums of products with the heads' codes */
INLINE void project_pair(uint32_t head_dim, const uint8_t *pair, const struct heads *q,
                         __m256i *sum) {
    const uint8_t *const digits = q->digits;

    if (head_dim == PART) { /* most often; a loop of one turn would stay a loop */
        project_part(4, head_dim, pair, 0, digits, false, sum);
    } else {
        uint32_t channel = 0;
        for (int h = 0; h < HEADS; h++)
            sum[h] = _mm256_setzero_si256();
        for (; channel + PART <= head_dim; channel += PART)
            project_part(4, head_dim, pair, channel, digits, true, sum);
        if (channel + 64 <= head_dim) {
            project_part(2, head_dim, pair, channel, digits, true, sum);
            channel += 64;
        }
        for (; channel < head_dim; channel += 16)
            project_rest(head_dim, pair, channel, q, sum);
    }
}

/* -> p [head][direction] */
INLINE __m256 scale_pair(const __m256i *sum, const uint8_t *scales, const struct heads *q) {
    float two[2] = {lk_record_scale(scales, 0), lk_record_scale(scales, 1)};
    double both;
    memcpy(&both, two, 8);
    __m256 scale = _mm256_castpd_ps(_mm256_set1_pd(both));
    __m256 unit = _mm256_mul_ps(scale, q->pair_factor); /* lk_score_unit() */
    unit = _mm256_min_ps(_mm256_set1_ps(FLT_MAX), unit);
    __m256 p = _mm256_cvtepi32_ps(_mm256_sub_epi32(fold_pairs(sum), q->pair_bias));
    p = _mm256_mul_ps(_mm256_mul_ps(p, unit), _mm256_set1_ps(LOG2_E));
    return clip(p);
}

/* -> mask of the heads whose exponents may be beyond QUIET: a bound is 127 times the sum of |p| */
INLINE __m128 project(const struct lk_score_shape *shape, const uint8_t *first, const uint8_t *fine,
                      const struct heads *q, struct work *work) {
    const struct lk_record *a = &shape->first, *b = &shape->fine;
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MAX));
    const uint32_t pairs = b->directions / 2;
    __m256i sum[PAIRS_MAX][HEADS];

    project_pair(a->head_dim, first + lk_record_pairs(a), q, sum[0]);
    for (uint32_t i = 0; i < pairs; i++)
        project_pair(a->head_dim, fine + i * a->head_dim, q, sum[1 + i]);
    __m256 p = scale_pair(sum[0], first + lk_record_scales(a) + 2, q);
    __m256 all = _mm256_and_ps(p, magnitude);

    _mm256_storeu_ps(work->project[0][0], p);
    for (uint32_t i = 0; i < pairs; i++) {
        p = scale_pair(sum[1 + i], fine + lk_record_scales(b) + 4 * i, q);
        _mm256_storeu_ps(work->project[1 + i][0], p);
        all = _mm256_add_ps(all, _mm256_and_ps(p, magnitude));
    }
    all = _mm256_add_ps(all, _mm256_permute_ps(all, 0xb1));
    return _mm_cmpnle_ps(
        _mm_shuffle_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1), 0x88),
        _mm_set1_ps(QUIET / 127));
}

/* ---- centre ---- */

/* centroid . query of each head: its code (digit MIDDLE), or its low digits */
INLINE __m128 centroid_products(const struct lk_score_shape *shape, const uint8_t *centroid,
                                const struct heads *q, enum lk_query_digit digit) {
    __m256i sum[HEADS];

    UNROLL
    for (int h = 0; h < HEADS; h++)
        sum[h] = _mm256_setzero_si256();
    for (uint32_t c = 0; c < shape->first.head_dim; c += 16) {
        __m128i bytes = _mm_xor_si128(_mm_loadu_si128((const __m128i *)(centroid + c)),
                                      _mm_set1_epi8(LK_CENTROID_BIAS - 256));
        __m256i code = _mm256_cvtepi8_epi16(bytes);
        UNROLL
        for (int h = 0; h < HEADS; h++) {
            const int16_t *words =
                lk_query_words_at(q->digits, lk_query_padded(shape->first.head_dim), h, digit);
            __m256i w = _mm256_loadu_si256((const __m256i *)(words + c));
            sum[h] = _mm256_add_epi32(sum[h], _mm256_madd_epi16(code, w));
        }
    }
    __m256i all =
        _mm256_hadd_epi32(_mm256_hadd_epi32(sum[0], sum[1]), _mm256_hadd_epi32(sum[2], sum[3]));
    return _mm_cvtepi32_ps(
        _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
}

/* mu of each head */
INLINE __m128 centre(const struct lk_score_shape *shape, const uint8_t *first,
                     const struct heads *q) {
    __m128 scale = _mm_set1_ps(lk_record_scale(first + lk_record_scales(&shape->first), 0));
    __m128 unit = _mm_min_ps(_mm_set1_ps(FLT_MAX), _mm_mul_ps(scale, q->factor));
    __m128 mu = centroid_products(shape, first, q, LK_DIGIT_MIDDLE);
    __m128 fine = _mm_cmpge_ps(unit, _mm_set1_ps(LK_SCORE_LOW_UNIT));

    if (_mm_movemask_ps(fine)) {
        __m128 low = centroid_products(shape, first, q, LK_DIGIT_LOW);
        mu = _mm_add_ps(mu, _mm_and_ps(fine, _mm_mul_ps(low, _mm_set1_ps(1.F / 256))));
    }
    mu = _mm_min_ps(_mm_set1_ps(LK_SCORE_MOST), _mm_mul_ps(mu, unit)); /* a NaN stays one */
    return _mm_max_ps(_mm_set1_ps(-LK_SCORE_MOST), mu);
}

/* ---- weigh ---- */

/* Eight coefficients of a direction, as floats. */
INLINE __m256 coeffs_of(const int8_t *from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
}

/* Of `octets` of eight tokens, which share what is read of p. */
INLINE void add_pair(const int octets, const int8_t *coeffs, uint32_t tokens, const float (*p)[2],
                     __m256 (*x)[HEADS]) {
    UNROLL
    for (int i = 0; i < 2; i++) {
        __m256 c[2];
        UNROLL
        for (int o = 0; o < octets; o++)
            c[o] = coeffs_of(coeffs + i * tokens + 8 * o);
        UNROLL
        for (int h = 0; h < HEADS; h++) {
            __m256 all = _mm256_broadcast_ss(&p[h][i]);
            UNROLL
            for (int o = 0; o < octets; o++)
                x[o][h] = _mm256_fmadd_ps(c[o], all, x[o][h]);
        }
    }
}

/* Exponents of tokens from t on, by eights. */
INLINE void exponents(const int octets, const struct lk_score_shape *shape, const uint8_t *first,
                      const uint8_t *fine, const struct work *work, uint32_t t,
                      __m256 (*x)[HEADS]) {
    uint32_t tokens = shape->first.tokens, pairs = shape->fine.directions / 2;
    const int8_t *a = (const int8_t *)first + lk_record_coeffs(&shape->first) + t;
    const int8_t *b = (const int8_t *)fine + lk_record_coeffs(&shape->fine) + t;

    UNROLL
    for (int i = 0; i < octets * HEADS; i++)
        x[i / HEADS][i % HEADS] = _mm256_setzero_ps();
    add_pair(octets, a, tokens, (const float(*)[2])work->project[0], x);
    for (uint32_t i = 0; i < pairs; i++)
        add_pair(octets, b + 2 * i * tokens, tokens, (const float(*)[2])work->project[1 + i], x);
}

INLINE __m128 weigh(const struct lk_score_shape *shape, const uint8_t *first, const uint8_t *fine,
                    const struct work *work) {
    __m256 sum[HEADS], x[2][HEADS];

    UNROLL
    for (int h = 0; h < HEADS; h++)
        sum[h] = _mm256_setzero_ps();
    if (shape->first.tokens == 8) {
        exponents(1, shape, first, fine, work, 0, x);
        UNROLL
        for (int h = 0; h < HEADS; h++)
            sum[h] = exp2_of(x[0][h]);
        return fold_sums(sum);
    }
    for (uint32_t t = 0; t < shape->first.tokens; t += 16) {
        exponents(2, shape, first, fine, work, t, x);
        UNROLL
        for (int h = 0; h < HEADS; h++)
            sum[h] = _mm256_add_ps(_mm256_add_ps(sum[h], exp2_of(x[0][h])), exp2_of(x[1][h]));
    }
    return fold_sums(sum);
}

/* The mass again, for every head, relative to its largest term. -> sums; ret_peak: ln of what they
 * are relative to. The shape by value: its address would make it unknown to the compiler. */
static __attribute__((noinline)) __m128 weigh_again(struct lk_score_shape given,
                                                    const uint8_t *first, const uint8_t *fine,
                                                    const struct work *work, float *ret_peak) {
    const struct lk_score_shape *shape = &given;
    __m256 peak[HEADS], sum[HEADS], x[1][HEADS];

    for (int h = 0; h < HEADS; h++) {
        peak[h] = _mm256_set1_ps(-INFINITY);
        sum[h] = _mm256_setzero_ps();
    }
    for (uint32_t t = 0; t < shape->first.tokens; t += 8) {
        exponents(1, shape, first, fine, work, t, x);
        for (int h = 0; h < HEADS; h++)
            peak[h] = _mm256_max_ps(peak[h], x[0][h]);
    }
    for (int h = 0; h < HEADS; h++) {
        float lane[8], most = -INFINITY;
        _mm256_storeu_ps(lane, peak[h]);
        for (int l = 0; l < 8; l++)
            most = lane[l] > most ? lane[l] : most;
        peak[h] = _mm256_set1_ps(most);
        ret_peak[h] = most * LN_2;
    }
    for (uint32_t t = 0; t < shape->first.tokens; t += 8) {
        exponents(1, shape, first, fine, work, t, x);
        for (int h = 0; h < HEADS; h++)
            sum[h] = _mm256_add_ps(sum[h], exp2_of(_mm256_max_ps(_mm256_set1_ps(-126),
                                                                 _mm256_sub_ps(x[0][h], peak[h]))));
    }
    return fold_sums(sum);
}

/* ---- a page, a batch ---- */

/* Of a batch's pages, for each head: sums, and what their logarithms lack. */
struct tally {
    float sum[LK_SCORE_BATCH][HEADS], rest[LK_SCORE_BATCH][HEADS];
};

INLINE void score_page(const struct lk_score_shape *shape, const uint8_t *first,
                       const uint8_t *fine, const struct heads *q, float *ret_sum,
                       float *ret_rest) {
    struct work work;
    __m128 loud = project(shape, first, fine, q, &work);
    __m128 rest = centre(shape, first, q);
    __m128 sum = weigh(shape, first, fine, &work);

    if (_mm_movemask_ps(loud)) { /* added up in vain */
        float peak[HEADS];
        sum = _mm_blendv_ps(sum, weigh_again(*shape, first, fine, &work, peak), loud);
        rest = _mm_add_ps(rest, _mm_and_ps(loud, _mm_loadu_ps(peak)));
    }
    _mm_storeu_ps(ret_sum, sum);
    _mm_storeu_ps(ret_rest, rest);
}

INLINE void prefetch(const struct lk_score_shape *shape, const struct lk_score_batch *batch,
                     uint32_t page) {
    uint32_t first = lk_record_bytes(&shape->first), fine = lk_record_bytes(&shape->fine);
    for (uint32_t i = 0; i < first; i += 64)
        _mm_prefetch(batch->first[page] + i, _MM_HINT_T1);
    if (shape->fine.directions)
        for (uint32_t i = 0; i < fine; i += 64)
            _mm_prefetch(batch->fine[page] + i, _MM_HINT_T1);
}

/* Logarithms of the pages' sums, to ret [head][LK_SCORE_BATCH]. */
static void finish(struct tally *all, uint32_t pages, float *ret) {
    float *sum = all->sum[0], *rest = all->rest[0];

    for (uint32_t i = HEADS * pages; i < HEADS * LK_SCORE_BATCH; i++)
        sum[i] = rest[i] = 1; /* places past the last page */
    for (uint32_t i = 0; i < HEADS * LK_SCORE_BATCH; i += 16) {
        __m256 a = _mm256_add_ps(_mm256_loadu_ps(rest + i), ln_of(_mm256_loadu_ps(sum + i)));
        __m256 b =
            _mm256_add_ps(_mm256_loadu_ps(rest + i + 8), ln_of(_mm256_loadu_ps(sum + i + 8)));
        __m128 page[4] = {_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1),
                          _mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1)};
        _MM_TRANSPOSE4_PS(page[0], page[1], page[2], page[3]);
        for (uint32_t h = 0; h < HEADS; h++)
            _mm_storeu_ps(ret + h * LK_SCORE_BATCH + i / HEADS, page[h]);
    }
}

/* Of a head dimension and tokens that the compiler knows, most often. */
INLINE void score_batch(uint32_t head_dim, uint32_t tokens, const struct lk_score_shape *shape,
                        const struct heads *q, const struct lk_score_batch *batch,
                        const struct lk_score_batch *next, uint32_t pages, float *ret) {
    const struct lk_score_shape known = {
        .first = {head_dim, tokens, LK_COARSE_RANK, true},
        .fine = {head_dim, tokens, shape->fine.directions, false}}; /* a superpage has none */
    struct tally all;

    for (uint32_t page = 0; page < pages; page++) {
        if (next)
            prefetch(&known, next, page);
        score_page(&known, batch->first[page], batch->fine[page], q, all.sum[page], all.rest[page]);
    }
    finish(&all, pages, ret);
}

static struct heads name_heads(const struct lk_query *query, uint32_t first) {
    const float *f = query->factor + first;
    const int32_t *s = query->code_sum + first;

    return (struct heads){
        .digits = lk_query_head(query, first),
        .factor = _mm_loadu_ps(f),
        .pair_factor = _mm256_set_ps(f[3], f[3], f[2], f[2], f[1], f[1], f[0], f[0]),
        .pair_bias =
            _mm256_mullo_epi32(_mm256_set_epi32(s[3], s[3], s[2], s[2], s[1], s[1], s[0], s[0]),
                               _mm256_set1_epi32(LK_BASIS_BIAS))};
}

void lk_score_avx2(const struct lk_score_shape *shape, const struct lk_query *query,
                   const struct lk_score_batch *batch, const struct lk_score_batch *next,
                   uint32_t pages, float *ret) {
    uint32_t head_dim = shape->first.head_dim, tokens = shape->first.tokens;

    for (uint32_t g = 0; g < shape->group; g += HEADS, next = NULL, ret += HEADS * LK_SCORE_BATCH) {
        struct heads q = name_heads(query, g);
        if (head_dim == 128 && tokens == 16)
            score_batch(128, 16, shape, &q, batch, next, pages, ret);
        else if (head_dim == 64 && tokens == 16)
            score_batch(64, 16, shape, &q, batch, next, pages, ret);
        else if (head_dim == 128)
            score_batch(128, tokens, shape, &q, batch, next, pages, ret);
        else
            score_batch(head_dim, tokens, shape, &q, batch, next, pages, ret);
    }
}
