/* Sums of up to BLOCK bytes in rank order, and copies that go past the cache.
 *
 * Every sum is from first to last, integers modulo their range, half types in float and rounded once: the bits of
 * comm/sums.py. `from` holds n >= 2 operands of `count` elements; `to` overlaps none of them.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { BLOCK = 8192 };

static inline float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static inline uint16_t to_bf16(float value) { /* to nearest, ties to even */
    uint32_t wide;
    memcpy(&wide, &value, 4);
    uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    return (wide & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)rounded;
}

#if defined(__FLT16_MANT_DIG__)
typedef _Float16 half;
static inline float from_half(half value) { return (float)value; }
static inline half to_half(float value) { return (half)value; }
#else /* gcc before 12 knows no half type */
typedef uint16_t half;

static inline float from_half(half bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff, wide;
    if (rest >= 0x7c00) {
        wide = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    } else if (rest >= 0x400) {
        wide = sign | ((rest << 13) + 0x38000000);
    } else { /* below the normal numbers: a count of 2^-24 */
        float tiny = (float)rest * 0x1p-24f;
        return sign ? -tiny : tiny;
    }
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static inline half to_half(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    uint32_t sign = wide >> 16 & 0x8000, rest = wide & 0x7fffffff;
    if (rest > 0x7f800000) return (half)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (half)(sign | 0x7c00); /* rounds beyond the largest half */
    if (rest >= 0x38800000) return (half)(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
    float magnitude; /* adding 0.5 leaves the count of 2^-24 in the last bits, rounded by the processor */
    memcpy(&magnitude, &rest, 4);
    magnitude += 0.5f;
    memcpy(&wide, &magnitude, 4);
    return (half)(sign | (wide - 0x3f000000));
}
#endif

#define AS_IS(x) (x)
#define SUM(NAME, T, TOTAL, IN, OUT)                                                                               \
    static void NAME(const char *const *from, int n, size_t count, char *to) {                                     \
        const T *a = (const T *)from[0], *b = (const T *)from[1];                                                  \
        T *restrict out = (T *)to;                                                                                 \
        if (n == 2) {                                                                                              \
            for (size_t i = 0; i < count; i++) out[i] = OUT((TOTAL)(IN(a[i]) + IN(b[i])));                         \
        } else if (n == 3) {                                                                                       \
            const T *c = (const T *)from[2];                                                                       \
            for (size_t i = 0; i < count; i++) out[i] = OUT((TOTAL)(IN(a[i]) + IN(b[i]) + IN(c[i])));              \
        } else if (n == 4) {                                                                                       \
            const T *c = (const T *)from[2], *d = (const T *)from[3];                                              \
            for (size_t i = 0; i < count; i++) out[i] = OUT((TOTAL)(IN(a[i]) + IN(b[i]) + IN(c[i]) + IN(d[i])));   \
        } else {                                                                                                   \
            TOTAL total[BLOCK / sizeof(T)];                                                                        \
            for (size_t i = 0; i < count; i++) total[i] = (TOTAL)(IN(a[i]) + IN(b[i]));                            \
            for (int k = 2; k < n; k++) {                                                                          \
                const T *next = (const T *)from[k];                                                                \
                for (size_t i = 0; i < count; i++) total[i] = (TOTAL)(total[i] + IN(next[i]));                     \
            }                                                                                                      \
            for (size_t i = 0; i < count; i++) out[i] = OUT(total[i]);                                             \
        }                                                                                                          \
    }

SUM(sum_double, double, double, AS_IS, AS_IS)
SUM(sum_float, float, float, AS_IS, AS_IS)
SUM(sum_bf16, uint16_t, float, from_bf16, to_bf16)
SUM(sum_half, half, float, from_half, to_half)
SUM(sum_64, uint64_t, uint64_t, AS_IS, AS_IS) /* signed or not, the bits of a sum are the same */
SUM(sum_32, uint32_t, uint32_t, AS_IS, AS_IS)
SUM(sum_8, uint8_t, uint8_t, AS_IS, AS_IS)

/* In the order of SUMMABLE in comm/sums.py. */
static const struct {
    void (*sum)(const char *const *from, int n, size_t count, char *to);
    size_t width;
} TYPES[] = {{sum_double, 8}, {sum_float, 4}, {sum_bf16, 2}, {sum_half, 2}, {sum_64, 8}, {sum_32, 4}, {sum_8, 1}, {sum_8, 1}};

/* A copy to memory that will not be read soon: it does not fetch what it overwrites, nor push out the staging areas. */
static void stream(char *to, const char *from, size_t nbytes) {
#if defined(__x86_64__)
    size_t ragged = -(uintptr_t)to & 63;
    if (nbytes >= 256) {
        memcpy(to, from, ragged);
        to += ragged, from += ragged, nbytes -= ragged;
        for (; nbytes >= 64; nbytes -= 64, to += 64, from += 64) {
#if defined(__AVX512F__)
            _mm512_stream_si512((void *)to, _mm512_loadu_si512(from));
#elif defined(__AVX__)
            _mm256_stream_si256((__m256i *)to, _mm256_loadu_si256((const __m256i *)from));
            _mm256_stream_si256((__m256i *)to + 1, _mm256_loadu_si256((const __m256i *)from + 1));
#else
            for (int k = 0; k < 4; k++) _mm_stream_si128((__m128i *)to + k, _mm_loadu_si128((const __m128i *)from + k));
#endif
        }
        _mm_sfence(); /* these stores wait for no ordinary fence */
    }
#endif
    memcpy(to, from, nbytes);
}
