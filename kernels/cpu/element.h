/* SPDX-License-Identifier: MIT */
/*
 * element.h - keys and queries of any dtype as floats, LANES at a time.
 *
 * Pure; compiled for the path of the including file.
 */
#ifndef LK_CPU_ELEMENT_H
#define LK_CPU_ELEMENT_H

#include "lanes.h"

typedef uint16_t element_half __attribute__((vector_size(2 * LANES)));

LK_INLINE ilanes element_widen(const uint8_t *from) {
    element_half h;
    memcpy(&h, from, sizeof(h));
    return __builtin_convertvector(h, ilanes);
}

LK_INLINE lanes element_from_fp16(const uint8_t *from) {
#if defined(__AVX512F__)
    __m256i h;
    memcpy(&h, from, sizeof(h));
    return (lanes)_mm512_cvtph_ps(h);
#elif defined(__F16C__)
    __m128i h;
    memcpy(&h, from, sizeof(h));
    return (lanes)_mm256_cvtph_ps(h);
#else
    ilanes h = element_widen(from), body = h & 0x7fff;
    /* Shifted into a float's place, the exponent is 112 too small; a product mends denormals
     * too. */
    ilanes number = (ilanes)((lanes)(body << 13) * 0x1p112f);
    ilanes special = body >= 0x7c00;
    number = (number & ~special) | (((body << 13) | 0x7f800000) & special);
    return (lanes)(number | (h << 16 & INT32_MIN));
#endif
}

/* Elements i .. i + LANES - 1 of an array that begins at from. */
LK_INLINE lanes element_load(uint32_t dtype, const uint8_t *from, uint32_t i) {
    switch (dtype) {
    case LK_BF16:
        return (lanes)(element_widen(from + 2 * (size_t)i) << 16);
    case LK_FP16:
        return element_from_fp16(from + 2 * (size_t)i);
    default: {
        lanes x;
        memcpy(&x, from + 4 * (size_t)i, sizeof(x));
        return x;
    }
    }
}

#endif
