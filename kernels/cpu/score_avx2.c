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
 *   weigh     exponents in base 2 without a maximum; a sum that left the safe range is redone with
 *             it.
 *   finish    eight logarithms at once.
 *
 * Any thread. Invariants: score.h.
 */
#include <immintrin.h>
#include <math.h>

#include "score.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

#define HEADS     LK_QUERY_BLOCK
#define PAIRS_MAX (LK_RANK_MAX / 2)
#define PART      128 /* channels whose products 16 bits hold */
#define LOG2_E    1.44269504f
#define LN_2      0.69314718f
#define SAFE_LOW  0x1p-100f /* of a sum of powers of two: nothing that matters was lost below */
#define SAFE_HIGH 0x1p120f

struct heads {
    const int8_t *pairs[HEADS][2];  /* high, middle */
    const int16_t *words[HEADS][2]; /* code, low */
    float factor[HEADS];
    __m256 pair_factor; /* [head][direction] */
    __m256i pair_bias;  /* what stored codes' bias adds; lanes alike */
};

/* A page's numbers between the stages. */
struct work {
    float project[PAIRS_MAX][HEADS][2];
    float mu[HEADS];
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

/* 2^x to 3e-6 of it, for x clipped to what a float's exponent holds. */
INLINE __m256 exp2_of(__m256 x) {
    const __m256 shift = _mm256_set1_ps(0x1.8p23f); /* leaves the nearest integer in the low bits */
    x = _mm256_max_ps(_mm256_min_ps(x, _mm256_set1_ps(126)), _mm256_set1_ps(-126));
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

/* Products of up to PART channels of a pair with each head's code, added to sum. */
INLINE void project_part(const int vectors, const uint8_t *pair, uint32_t channel,
                         const struct heads *q, __m256i *sum) {
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
        UNROLL
        for (int n = 0; n < 2; n++) {
            /* 32 stored bytes are half a chunk: low nibbles' digits, and 64 on the high ones'. */
            const int8_t *d = q->pairs[h][n] + 2 * channel;
            UNROLL
            for (int i = 0; i < vectors; i++) {
                const int8_t *at = d + i / 2 * 128 + i % 2 * 32;
                __m256i a = _mm256_maddubs_epi16(low[i], _mm256_loadu_si256((const __m256i *)at));
                __m256i b =
                    _mm256_maddubs_epi16(high[i], _mm256_loadu_si256((const __m256i *)(at + 64)));
                a = _mm256_add_epi16(a, b);
                digit[n] = i ? _mm256_add_epi16(digit[n], a) : a;
            }
        }
        __m256i wide = _mm256_add_epi32(_mm256_madd_epi16(digit[0], _mm256_set1_epi16(256)),
                                        _mm256_madd_epi16(digit[1], _mm256_set1_epi16(1)));
        sum[h] = _mm256_add_epi32(sum[h], wide);
    }
}

/* What is left of a pair after whole vectors: 16 bytes, padded with codes of zero. */
static void project_rest(const uint8_t *pair, uint32_t channel, const struct heads *q,
                         __m256i *sum) {
    uint8_t padded[32] = {0};
    memcpy(padded, pair + channel, 16);
    for (int h = 0; h < HEADS; h++) {
        __m256i x = _mm256_loadu_si256((const __m256i *)padded);
        __m256i low = _mm256_and_si256(x, _mm256_set1_epi8(15));
        __m256i high = _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15));
        for (int n = 0; n < 2; n++) {
            const int8_t *at = q->pairs[h][n] + channel / 64 * 128 + channel % 64;
            __m256i a = _mm256_maddubs_epi16(low, _mm256_loadu_si256((const __m256i *)at));
            __m256i b = _mm256_maddubs_epi16(high, _mm256_loadu_si256((const __m256i *)(at + 64)));
            a = _mm256_madd_epi16(_mm256_add_epi16(a, b), _mm256_set1_epi16(n ? 1 : 256));
            sum[h] = _mm256_add_epi32(sum[h], a);
        }
    }
}

INLINE void project_pair(uint32_t head_dim, const uint8_t *pair, const uint8_t *scales,
                         const struct heads *q, float (*ret)[2]) {
    __m256i sum[HEADS];
    uint32_t channel = 0;

    UNROLL
    for (int h = 0; h < HEADS; h++)
        sum[h] = _mm256_setzero_si256();
    for (; channel + PART <= head_dim; channel += PART)
        project_part(4, pair, channel, q, sum);
    if (channel + 64 <= head_dim) {
        project_part(2, pair, channel, q, sum);
        channel += 64;
    }
    for (; channel < head_dim; channel += 16)
        project_rest(pair, channel, q, sum);
    float two[2] = {lk_record_scale(scales, 0), lk_record_scale(scales, 1)};
    double both;
    memcpy(&both, two, 8);
    __m256 scale = _mm256_castpd_ps(_mm256_set1_pd(both));
    __m256 unit = _mm256_mul_ps(scale, q->pair_factor); /* lk_score_unit() */
    unit = _mm256_min_ps(_mm256_set1_ps(FLT_MAX), unit);
    __m256 p = _mm256_cvtepi32_ps(_mm256_sub_epi32(fold_pairs(sum), q->pair_bias));
    p = _mm256_mul_ps(_mm256_mul_ps(p, unit), _mm256_set1_ps(LOG2_E));
    _mm256_storeu_ps(&ret[0][0], clip(p));
}

INLINE void project(const struct lk_score_shape *shape, const uint8_t *first, const uint8_t *fine,
                    const struct heads *q, struct work *work) {
    const struct lk_record *a = &shape->first, *b = &shape->fine;
    project_pair(a->head_dim, first + lk_record_pairs(a), first + lk_record_scales(a) + 2, q,
                 work->project[0]);
    for (uint32_t i = 0; i < b->directions / 2; i++)
        project_pair(a->head_dim, fine + i * a->head_dim, fine + lk_record_scales(b) + 4 * i, q,
                     work->project[1 + i]);
}

/* ---- centre ---- */

/* words . centroid */
INLINE int32_t centroid_product(const uint8_t *centroid, const int16_t *words, uint32_t head_dim) {
    __m256i sum = _mm256_setzero_si256();
    for (uint32_t c = 0; c < head_dim; c += 16) {
        __m128i code = _mm_xor_si128(_mm_loadu_si128((const __m128i *)(centroid + c)),
                                     _mm_set1_epi8(LK_CENTROID_BIAS - 256));
        __m256i w = _mm256_loadu_si256((const __m256i *)(words + c));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_cvtepi8_epi16(code), w));
    }
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}

INLINE void centre(const struct lk_score_shape *shape, const uint8_t *first, const struct heads *q,
                   struct work *work) {
    uint32_t d = shape->first.head_dim;
    float scale = lk_record_scale(first + lk_record_scales(&shape->first), 0);

    for (int h = 0; h < HEADS; h++) {
        float unit = lk_score_unit(scale, q->factor[h]);
        float mu = (float)centroid_product(first, q->words[h][0], d);
        if (unit >= LK_SCORE_LOW_UNIT)
            mu += (float)centroid_product(first, q->words[h][1], d) / 256;
        mu *= unit;
        work->mu[h] = mu > LK_SCORE_MOST    ? LK_SCORE_MOST
                      : mu < -LK_SCORE_MOST ? -LK_SCORE_MOST
                                            : mu;
    }
}

/* ---- weigh ---- */

INLINE void add_pair(const int8_t *coeffs, uint32_t tokens, const float (*p)[2], __m256 *x) {
    __m256 a = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)coeffs)));
    __m256 b = _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(coeffs + tokens))));
    UNROLL
    for (int h = 0; h < HEADS; h++) {
        x[h] = _mm256_fmadd_ps(a, _mm256_broadcast_ss(&p[h][0]), x[h]);
        x[h] = _mm256_fmadd_ps(b, _mm256_broadcast_ss(&p[h][1]), x[h]);
    }
}

/* Exponents of eight tokens from t on. */
INLINE void exponents(const struct lk_score_shape *shape, const uint8_t *first, const uint8_t *fine,
                      const struct work *work, uint32_t t, __m256 *x) {
    uint32_t tokens = shape->first.tokens, pairs = shape->fine.directions / 2;
    const int8_t *a = (const int8_t *)first + lk_record_coeffs(&shape->first) + t;
    const int8_t *b = (const int8_t *)fine + lk_record_coeffs(&shape->fine) + t;

    UNROLL
    for (int h = 0; h < HEADS; h++)
        x[h] = _mm256_setzero_ps();
    add_pair(a, tokens, (const float(*)[2])work->project[0], x);
    for (uint32_t i = 0; i < pairs; i++)
        add_pair(b + 2 * i * tokens, tokens, (const float(*)[2])work->project[1 + i], x);
}

INLINE __m128 weigh(const struct lk_score_shape *shape, const uint8_t *first, const uint8_t *fine,
                    const struct work *work) {
    __m256 sum[HEADS], x[HEADS];

    UNROLL
    for (int h = 0; h < HEADS; h++)
        sum[h] = _mm256_setzero_ps();
    for (uint32_t t = 0; t < shape->first.tokens; t += 8) {
        exponents(shape, first, fine, work, t, x);
        UNROLL
        for (int h = 0; h < HEADS; h++)
            sum[h] = _mm256_add_ps(sum[h], exp2_of(x[h]));
    }
    return fold_sums(sum);
}

/* The mass again, for every head, relative to its largest term. -> sums; ret_peak: ln of what they
 * are
 * relative to */
static __attribute__((noinline)) __m128 weigh_again(const struct lk_score_shape *shape,
                                                    const uint8_t *first, const uint8_t *fine,
                                                    const struct work *work, float *ret_peak) {
    __m256 peak[HEADS], sum[HEADS], x[HEADS];

    for (int h = 0; h < HEADS; h++) {
        peak[h] = _mm256_set1_ps(-INFINITY);
        sum[h] = _mm256_setzero_ps();
    }
    for (uint32_t t = 0; t < shape->first.tokens; t += 8) {
        exponents(shape, first, fine, work, t, x);
        for (int h = 0; h < HEADS; h++)
            peak[h] = _mm256_max_ps(peak[h], x[h]);
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
        exponents(shape, first, fine, work, t, x);
        for (int h = 0; h < HEADS; h++)
            sum[h] = _mm256_add_ps(sum[h], exp2_of(_mm256_sub_ps(x[h], peak[h])));
    }
    return fold_sums(sum);
}

/* ---- a page, a batch ---- */

/* Sum and what its logarithm lacks, for each head of a page. */
INLINE void score_page(const struct lk_score_shape *shape, const uint8_t *first,
                       const uint8_t *fine, const struct heads *q, uint32_t page,
                       float (*sum)[LK_SCORE_BATCH], float (*rest)[LK_SCORE_BATCH]) {
    struct work work;
    float mass[HEADS], again[HEADS], peak[HEADS];
    bool safe = true;

    project(shape, first, fine, q, &work);
    centre(shape, first, q, &work);
    _mm_storeu_ps(mass, weigh(shape, first, fine, &work));
    for (int h = 0; h < HEADS; h++)
        safe &= mass[h] >= SAFE_LOW && mass[h] <= SAFE_HIGH;
    if (!safe)
        _mm_storeu_ps(again, weigh_again(shape, first, fine, &work, peak));
    for (int h = 0; h < HEADS; h++) {
        bool good = mass[h] >= SAFE_LOW && mass[h] <= SAFE_HIGH;
        sum[h][page] = good ? mass[h] : again[h];
        rest[h][page] = good ? work.mu[h] : work.mu[h] + peak[h];
    }
}

static void prefetch(const struct lk_score_shape *shape, const struct lk_score_batch *batch,
                     uint32_t page) {
    uint32_t first = lk_record_bytes(&shape->first), fine = lk_record_bytes(&shape->fine);
    for (uint32_t i = 0; i < first; i += 64)
        _mm_prefetch(batch->first[page] + i, _MM_HINT_T1);
    if (shape->fine.directions)
        for (uint32_t i = 0; i < fine; i += 64)
            _mm_prefetch(batch->fine[page] + i, _MM_HINT_T1);
}

static void name_heads(const struct lk_query *query, uint32_t first, struct heads *q) {
    const float *f = query->factor + first;
    const int32_t *s = query->code_sum + first;

    for (uint32_t h = 0; h < HEADS; h++) {
        for (uint32_t n = 0; n < 2; n++)
            q->pairs[h][n] = lk_query_pairs(query, first + h, n);
        q->words[h][0] = lk_query_words(query, first + h, LK_DIGIT_MIDDLE);
        q->words[h][1] = lk_query_words(query, first + h, LK_DIGIT_LOW);
        q->factor[h] = f[h];
    }
    q->pair_factor = _mm256_set_ps(f[3], f[3], f[2], f[2], f[1], f[1], f[0], f[0]);
    q->pair_bias =
        _mm256_mullo_epi32(_mm256_set_epi32(s[3], s[3], s[2], s[2], s[1], s[1], s[0], s[0]),
                           _mm256_set1_epi32(LK_BASIS_BIAS));
}

void lk_score_avx2(const struct lk_score_shape *shape, const struct lk_query *query,
                   const struct lk_score_batch *batch, const struct lk_score_batch *next,
                   uint32_t pages, float *ret) {
    for (uint32_t g = 0; g < shape->group; g += HEADS) {
        float sum[HEADS][LK_SCORE_BATCH], rest[HEADS][LK_SCORE_BATCH];
        struct heads q;

        name_heads(query, g, &q);
        for (uint32_t page = 0; page < pages; page++) {
            if (g == 0)
                prefetch(shape, next, page);
            score_page(shape, batch->first[page], batch->fine[page], &q, page, sum, rest);
        }
        for (uint32_t h = 0; h < HEADS; h++)
            for (uint32_t page = 0; page < pages; page += 8) {
                for (uint32_t i = pages; i < page + 8; i++)
                    sum[h][i] = rest[h][i] = 1; /* lanes past the last page */
                __m256 score = _mm256_add_ps(_mm256_loadu_ps(rest[h] + page),
                                             ln_of(_mm256_loadu_ps(sum[h] + page)));
                _mm256_storeu_ps(ret + (g + h) * LK_SCORE_BATCH + page, score);
            }
    }
}
