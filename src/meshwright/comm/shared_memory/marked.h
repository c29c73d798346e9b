/* The elements of a tensor that a bit marks, for parallel/memory/gist_encodings.py: bit k % 8 of byte k / 8 is for element k.

   Torch and numpy go through 8 bytes of position for each marked element, and take ten times as long. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define WORD 64 /* elements whose bits are looked at together */

/* The next bits, of up to WORD elements; bytes after the last one are not read. */
static inline uint64_t next_bits(const uint8_t *bits, uint64_t count) {
    uint64_t word = 0, nbytes = count < WORD ? (count + 7) / 8 : WORD / 8;
    for (uint64_t k = 0; k < nbytes; k++) word |= (uint64_t)bits[k] << 8 * k;
    return count < WORD ? word & (((uint64_t)1 << count) - 1) : word;
}

#define FOR_EACH_MARKED(word, k) for (int k; (word) && ((k = __builtin_ctzll(word)), 1); (word) &= (word)-1)

#define DEFINE_MARKED(suffix, type)                                                                                            \
    static void take_##suffix(const type *from, const uint8_t *bits, uint64_t count, type *to) {                               \
        for (uint64_t begin = 0; begin < count; begin += WORD, bits += WORD / 8) {                                             \
            uint64_t word = next_bits(bits, count - begin);                                                                    \
            FOR_EACH_MARKED(word, k) *to++ = from[begin + k];                                                                  \
        }                                                                                                                      \
    }                                                                                                                          \
    static void put_##suffix(const type *from, const uint8_t *bits, uint64_t count, type *to) {                                \
        memset(to, 0, count * sizeof(type));                                                                                   \
        for (uint64_t begin = 0; begin < count; begin += WORD, bits += WORD / 8) {                                             \
            uint64_t word = next_bits(bits, count - begin);                                                                    \
            FOR_EACH_MARKED(word, k) to[begin + k] = *from++;                                                                  \
        }                                                                                                                      \
    }

DEFINE_MARKED(2, uint16_t)
DEFINE_MARKED(8, uint64_t)
#ifndef __AVX512F__
DEFINE_MARKED(4, uint32_t)
#else
#define LANES 16

static inline __mmask16 lanes_below(uint64_t number) { return (__mmask16)((1u << (number < LANES ? number : LANES)) - 1); }

static void take_4(const uint32_t *from, const uint8_t *bits, uint64_t count, uint32_t *to) {
    for (uint64_t begin = 0; begin < count; begin += LANES, bits += LANES / 8) {
        uint64_t left = count - begin;
        __mmask16 marked = (__mmask16)next_bits(bits, left < LANES ? left : LANES);
        uint64_t number = (uint64_t)__builtin_popcount(marked);
        __m512i found = _mm512_maskz_compress_epi32(marked, _mm512_maskz_loadu_epi32(lanes_below(left), from + begin));
        _mm512_mask_storeu_epi32(to, lanes_below(number), found);
        to += number;
    }
}

static void put_4(const uint32_t *from, const uint8_t *bits, uint64_t count, uint32_t *to) {
    for (uint64_t begin = 0; begin < count; begin += LANES, bits += LANES / 8) {
        uint64_t left = count - begin;
        __mmask16 marked = (__mmask16)next_bits(bits, left < LANES ? left : LANES);
        uint64_t number = (uint64_t)__builtin_popcount(marked);
        __m512i packed = _mm512_maskz_loadu_epi32(lanes_below(number), from);
        _mm512_mask_storeu_epi32(to + begin, lanes_below(left), _mm512_maskz_expand_epi32(marked, packed));
        from += number;
    }
}
#endif

/* Stores the marked of `count` elements of `itemsize` bytes one after the other in `to`, which has room for just these. */
void take_marked(const void *from, const uint8_t *bits, uint64_t count, int itemsize, void *to) {
    if (itemsize == 2) take_2(from, bits, count, to);
    if (itemsize == 4) take_4(from, bits, count, to);
    if (itemsize == 8) take_8(from, bits, count, to);
}

/* The inverse: `count` elements in `to`, of which those without a mark are 0. */
void put_marked(const void *from, const uint8_t *bits, uint64_t count, int itemsize, void *to) {
    if (itemsize == 2) put_2(from, bits, count, to);
    if (itemsize == 4) put_4(from, bits, count, to);
    if (itemsize == 8) put_8(from, bits, count, to);
}
