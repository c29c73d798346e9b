/* Elements of a tensor that a bit marks, for parallel/memory/gist_encodings.py: bit k % 8 of byte k / 8 is for element k.

   Elements are looked at as integers of their width. One pass each; torch goes through a bool, and 8 bytes of position for each
   marked element, and takes ten times as long. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

enum { OF_BYTE = 8 };
typedef uint16_t word_2;
typedef uint32_t word_4;
typedef uint64_t word_8;

static inline int least(uint64_t number, int limit) { return number < (uint64_t)limit ? (int)number : limit; }

/* What is anything but +0; or with the bits of `infinity`, what is not <= 0: above it, or no number. */
#define IS_MARKED(word, x) (infinity ? (word)(x - 1) < (word)(sign - 1) || x > (word)(sign + infinity) : x != 0)

#define DEFINE_MARKED(size, word)                                                                                              \
    static uint64_t mark_##size(const word *from, uint64_t count, word infinity, uint8_t *bits) {                              \
        const word sign = (word)1 << (8 * size - 1);                                                                           \
        uint64_t number = 0;                                                                                                   \
        for (uint64_t begin = 0; begin < count; begin += OF_BYTE) {                                                            \
            unsigned byte = 0;                                                                                                 \
            for (int k = least(count - begin, OF_BYTE); k--;) {                                                                \
                word x = from[begin + k];                                                                                      \
                byte = byte << 1 | (unsigned)(IS_MARKED(word, x));                                                   \
            }                                                                                                                  \
            *bits++ = (uint8_t)byte;                                                                                           \
            number += (uint64_t)__builtin_popcount(byte);                                                                      \
        }                                                                                                                      \
        return number;                                                                                                         \
    }                                                                                                                          \
    static void take_##size(const word *from, const uint8_t *bits, uint64_t count, word *to) {                                 \
        for (uint64_t begin = 0; begin < count; begin += OF_BYTE)                                                              \
            for (unsigned byte = *bits++; byte; byte &= byte - 1) *to++ = from[begin + (uint64_t)__builtin_ctz(byte)];         \
    }                                                                                                                          \
    static void put_##size(const word *from, word one, const uint8_t *bits, uint64_t count, word *to) {                        \
        for (uint64_t begin = 0; begin < count; begin += OF_BYTE, bits++)                                                      \
            for (int k = 0; k < least(count - begin, OF_BYTE); k++) {                                                          \
                int marked = *bits >> k & 1;                                                                                   \
                to[begin + (uint64_t)k] = !marked ? 0 : from ? *from++ : one;                                                  \
            }                                                                                                                  \
    }

DEFINE_MARKED(2, word_2)
DEFINE_MARKED(8, word_8)
#ifndef __AVX512F__
DEFINE_MARKED(4, word_4)
#else
enum { LANES = 16 };

static inline __mmask16 lanes(int number) { return (__mmask16)((1u << number) - 1); }

static inline __mmask16 next_bits(const uint8_t *bits, int number) {
    unsigned found = bits[0] | (number > OF_BYTE ? (unsigned)bits[1] << OF_BYTE : 0);
    return (__mmask16)found;
}

static uint64_t mark_4(const word_4 *from, uint64_t count, word_4 infinity, uint8_t *bits) {
    const __m512i one = _mm512_set1_epi32(1), sign = _mm512_set1_epi32((int)0x80000000u), below = _mm512_sub_epi32(sign, one);
    const __m512i negative_infinity = _mm512_set1_epi32((int)(0x80000000u + infinity));
    uint64_t number = 0;
    for (uint64_t begin = 0; begin < count; begin += LANES) {
        int left = least(count - begin, LANES);
        __m512i x = _mm512_maskz_loadu_epi32(lanes(left), from + begin);
        __mmask16 marked = infinity ? _mm512_cmplt_epu32_mask(_mm512_sub_epi32(x, one), below) | _mm512_cmpgt_epu32_mask(x, negative_infinity)
                                    : _mm512_test_epi32_mask(x, x);
        *bits++ = (uint8_t)marked;
        if (left > OF_BYTE) *bits++ = (uint8_t)(marked >> OF_BYTE);
        number += (uint64_t)__builtin_popcount(marked);
    }
    return number;
}

static void take_4(const word_4 *from, const uint8_t *bits, uint64_t count, word_4 *to) {
    for (uint64_t begin = 0; begin < count; begin += LANES, bits += LANES / OF_BYTE) {
        int left = least(count - begin, LANES);
        __mmask16 marked = next_bits(bits, left);
        int number = __builtin_popcount(marked);
        __m512i found = _mm512_maskz_compress_epi32(marked, _mm512_maskz_loadu_epi32(lanes(left), from + begin));
        _mm512_mask_storeu_epi32(to, lanes(number), found);
        to += number;
    }
}

static void put_4(const word_4 *from, word_4 one, const uint8_t *bits, uint64_t count, word_4 *to) {
    const __m512i ones = _mm512_set1_epi32((int)one);
    for (uint64_t begin = 0; begin < count; begin += LANES, bits += LANES / OF_BYTE) {
        int left = least(count - begin, LANES);
        __mmask16 marked = next_bits(bits, left);
        int number = __builtin_popcount(marked);
        __m512i packed = from ? _mm512_maskz_loadu_epi32(lanes(number), from) : ones;
        _mm512_mask_storeu_epi32(to + begin, lanes(left), _mm512_maskz_expand_epi32(marked, packed));
        from = from ? from + number : from;
    }
}
#endif

/* Marks what of `count` elements is anything but +0, or with the bits of `infinity` what is not <= 0; returns how many are. */
uint64_t mark_elements(const void *from, uint64_t count, int itemsize, uint64_t infinity, uint8_t *bits) {
    if (itemsize == 2) return mark_2(from, count, (word_2)infinity, bits);
    if (itemsize == 4) return mark_4(from, count, (word_4)infinity, bits);
    return mark_8(from, count, infinity, bits);
}

/* Stores the marked of `count` elements one after the other in `to`, which has room for just these. */
void take_marked(const void *from, const uint8_t *bits, uint64_t count, int itemsize, void *to) {
    if (itemsize == 2) take_2(from, bits, count, to);
    if (itemsize == 4) take_4(from, bits, count, to);
    if (itemsize == 8) take_8(from, bits, count, to);
}

/* The inverse: `count` elements in `to`, of which those without a mark are 0; where there is no `from`, the others are `one`. */
void put_marked(const void *from, uint64_t one, const uint8_t *bits, uint64_t count, int itemsize, void *to) {
    if (itemsize == 2) put_2(from, (word_2)one, bits, count, to);
    if (itemsize == 4) put_4(from, (word_4)one, bits, count, to);
    if (itemsize == 8) put_8(from, one, bits, count, to);
}
