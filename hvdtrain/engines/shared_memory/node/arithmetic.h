/* Sums, minima, maxima and products of each element type. */

#ifndef HVD_NODE_ARITHMETIC_H
#define HVD_NODE_ARITHMETIC_H

#include <stdint.h>
#include <string.h>

#include "../../../compiled/kernel.h"

EMBED_TEXT;

/* begin: sum = x * factor; fold: sum = sum op x * factor; end: x = sum * factor. */
typedef void (*begin_t)(void *sum, const void *x, int64_t count, double factor);
typedef void (*fold_t)(void *sum, const void *x, int64_t count, double factor);
typedef void (*end_t)(void *x, const void *sum, int64_t count, double factor);

/* Fast path for two ranks, in one pass: x = y = (a * pa + b * pb) * factor. */
typedef void (*pair_t)(const void *a, double pa, const void *b, double pb, void *x, void *y,
                       int64_t count, double factor);

typedef struct {
    int64_t itemsize;
    begin_t begin;
    fold_t fold[4]; /* sum, min, max, product */
    end_t end;
    pair_t pair; /* sums; 0 if there is no fast path */
    fold_t join; /* sum = sum + other sum */
} type_t;

#define SAME(x) (x)
#define ADD(a, b) ((a) + (b))
#define MULTIPLY(a, b) ((a) * (b))
/* Small unsigned types would be promoted to int, whose overflow is undefined. */
#define MULTIPLY_WHOLE(a, b) ((uint64_t)(a) * (b))
#define LOWER(a, b) ((b) < (a) ? (b) : (a))
#define HIGHER(a, b) ((b) > (a) ? (b) : (a))
/* As in numpy, a NaN propagates. */
#define LOWER_REAL(a, b) ((b) < (a) || (b) != (b) ? (b) : (a))
#define HIGHER_REAL(a, b) ((b) > (a) || (b) != (b) ? (b) : (a))

#define BEGIN(NAME, T, S, LOAD, SCALE)                                                          \
    FAST void NAME##_begin(void *s, const void *x, int64_t count, double factor) {              \
        S *restrict sum = s;                                                                    \
        const T *restrict in = x;                                                               \
        (void)factor;                                                                           \
        for (int64_t i = 0; i < count; i++) sum[i] = LOAD(in[i]) SCALE;                         \
    }
#define FOLD(NAME, T, S, LOAD, SCALE, OP, COMBINE)                                              \
    FAST void NAME##_##OP(void *s, const void *x, int64_t count, double factor) {               \
        S *restrict sum = s;                                                                    \
        const T *restrict in = x;                                                               \
        (void)factor;                                                                           \
        for (int64_t i = 0; i < count; i++) {                                                   \
            S term = LOAD(in[i]) SCALE;                                                         \
            sum[i] = COMBINE(sum[i], term);                                                     \
        }                                                                                       \
    }
#define END(NAME, T, S, STORE, SCALE)                                                           \
    FAST void NAME##_end(void *x, const void *s, int64_t count, double factor) {                \
        T *restrict out = x;                                                                    \
        const S *restrict sum = s;                                                              \
        (void)factor;                                                                           \
        for (int64_t i = 0; i < count; i++) out[i] = STORE(sum[i] SCALE);                       \
    }
#define TYPE(NAME, T, S, LOAD, STORE, SCALE, MIN, MAX, TIMES)                                   \
    BEGIN(NAME, T, S, LOAD, SCALE)                                                              \
    FOLD(NAME, T, S, LOAD, SCALE, sum, ADD)                                                     \
    FOLD(NAME, T, S, LOAD, SCALE, min, MIN)                                                     \
    FOLD(NAME, T, S, LOAD, SCALE, max, MAX)                                                     \
    FOLD(NAME, T, S, LOAD, SCALE, product, TIMES)                                               \
    END(NAME, T, S, STORE, SCALE)
#define INTEGER(NAME, T) TYPE(NAME, T, T, SAME, SAME, , LOWER, HIGHER, MULTIPLY_WHOLE)

INTEGER(u8, uint8_t)
INTEGER(u16, uint16_t)
INTEGER(u32, uint32_t)
INTEGER(u64, uint64_t)
/* Signed sums wrap around like unsigned ones; in C their overflow is undefined. */
#define WRAPPED(NAME, T, U)                                                                     \
    BEGIN(NAME, T, T, SAME, )                                                                   \
    FOLD(NAME, U, U, SAME, , sum, ADD)                                                          \
    FOLD(NAME, T, T, SAME, , min, LOWER)                                                        \
    FOLD(NAME, T, T, SAME, , max, HIGHER)                                                       \
    FOLD(NAME, U, U, SAME, , product, MULTIPLY_WHOLE)                                           \
    END(NAME, T, T, SAME, )
WRAPPED(i8, int8_t, uint8_t)
WRAPPED(i16, int16_t, uint16_t)
WRAPPED(i32, int32_t, uint32_t)
WRAPPED(i64, int64_t, uint64_t)
TYPE(f32, float, float, SAME, SAME, *(float)factor, LOWER_REAL, HIGHER_REAL, MULTIPLY)
TYPE(f64, double, double, SAME, SAME, *factor, LOWER_REAL, HIGHER_REAL, MULTIPLY)

/* Half types are added in float. */
static inline float bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static inline uint32_t float_to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float from_bf16(uint16_t h) { return bits_to_float((uint32_t)h << 16); }
static inline uint16_t to_bf16(float x) {
    uint32_t bits = float_to_bits(x);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uint32_t nan = (bits >> 16) | 0x40;
    return (bits & 0x7fffffff) > 0x7f800000 ? nan : rounded;
}

/* One exact multiplication moves a half into the exponent range of float. */
static inline float from_f16(uint16_t h) {
    uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13;
    float x = bits_to_float(magnitude) * 0x1p112f;
    uint32_t special = (h & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
    return bits_to_float(float_to_bits(x) | special | (uint32_t)(h & 0x8000) << 16);
}
static inline uint16_t to_f16(float x) {
    uint32_t bits = float_to_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    /* A subnormal half: adding 1/2 puts its bits, rounded to even, into the lowest bits. */
    uint32_t tiny = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000;
    uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    uint32_t finite = magnitude < 0x38800000 ? tiny : normal;
    return sign | (magnitude >= 0x477ff000 ? special : finite);
}
TYPE(bf16, uint16_t, float, from_bf16, to_bf16, *(float)factor, LOWER_REAL, HIGHER_REAL, MULTIPLY)
TYPE(f16, uint16_t, float, from_f16, to_f16, *(float)factor, LOWER_REAL, HIGHER_REAL, MULTIPLY)

/* A target may be a source: no element is read after it was written. */
#define PAIR(NAME, T)                                                                           \
    FAST void NAME##_pair(const void *a, double pa, const void *b, double pb, void *x, void *y, \
                          int64_t count, double factor) {                                       \
        const T *first = a, *second = b, p = pa, q = pb, r = factor;                            \
        T *out = x, *other = y;                                                                 \
        _Pragma("GCC ivdep") for (int64_t i = 0; i < count; i++)                                \
            out[i] = other[i] = (first[i] * p + second[i] * q) * r;                             \
    }
PAIR(f32, float)
PAIR(f64, double)

/* Complex numbers are pairs of reals: everything except the product treats them as such. GCC 12
 * contracts the product to fused multiply-adds if the processor has them, even with
 * -ffp-contract=off, which gave ranks on different machines different bits; hence volatile. */
#define COMPLEX(NAME, R, REAL)                                                                  \
    static void NAME##_begin(void *s, const void *x, int64_t count, double factor) {            \
        REAL##_begin(s, x, 2 * count, factor);                                                  \
    }                                                                                           \
    static void NAME##_sum(void *s, const void *x, int64_t count, double factor) {              \
        REAL##_sum(s, x, 2 * count, factor);                                                    \
    }                                                                                           \
    static void NAME##_end(void *x, const void *s, int64_t count, double factor) {              \
        REAL##_end(x, s, 2 * count, factor);                                                    \
    }                                                                                           \
    static void NAME##_product(void *s, const void *x, int64_t count, double factor) {          \
        R *restrict sum = s;                                                                    \
        const R *restrict in = x;                                                               \
        for (int64_t i = 0; i < 2 * count; i += 2) {                                            \
            R re = in[i] * (R)factor, im = in[i + 1] * (R)factor;                               \
            volatile R straight[2] = {sum[i] * re, sum[i + 1] * im};                            \
            volatile R crossed[2] = {sum[i] * im, sum[i + 1] * re};                             \
            sum[i] = straight[0] - straight[1];                                                 \
            sum[i + 1] = crossed[0] + crossed[1];                                               \
        }                                                                                       \
    }
COMPLEX(c64, float, f32)
COMPLEX(c128, double, f64)

#define ROW_OF(NAME, BYTES, PAIR_OF, JOIN)                                                      \
    {BYTES,                                                                                     \
     NAME##_begin,                                                                              \
     {NAME##_sum, NAME##_min, NAME##_max, NAME##_product},                                      \
     NAME##_end,                                                                                \
     PAIR_OF,                                                                                   \
     JOIN}
#define ROW(NAME, BYTES) ROW_OF(NAME, BYTES, 0, NAME##_sum)
#define ROW_HALF(NAME) ROW_OF(NAME, 2, 0, f32_sum)
#define ROW_PAIR(NAME, BYTES) ROW_OF(NAME, BYTES, NAME##_pair, NAME##_sum)
#define ROW_COMPLEX(NAME, BYTES)                                                                \
    {BYTES, NAME##_begin, {NAME##_sum, 0, 0, NAME##_product}, NAME##_end, 0, NAME##_sum}

/* In the order of TYPES in kernel.py. */
static const type_t TYPES[] = {
    ROW(u8, 1),  ROW(u16, 2), ROW(u32, 4),  ROW(u64, 8), ROW(i8, 1),          ROW(i16, 2),
    ROW(i32, 4), ROW(i64, 8), ROW_HALF(f16), ROW_HALF(bf16), ROW_PAIR(f32, 4),   ROW_PAIR(f64, 8),
    ROW_COMPLEX(c64, 8), ROW_COMPLEX(c128, 16),
};

#endif
