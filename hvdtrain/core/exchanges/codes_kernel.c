/* The arithmetic of codes.py, in two passes over each row while it is in the cache of a core.
 *
 * Why C: numpy passes a dozen times over the rows and over memory of its own, which costs more than
 * what the codes save on a network. Finite results have the same bits as with numpy: sums are added
 * in its order.
 *
 * The second half of the file is the same for both types of elements: the first half includes it.
 */

#if !defined(T)

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../../compiled/kernel.h"

EMBED_TEXT;

/* Rows of one length, and their codes. */
typedef struct {
    void *rows;     /* [count, length] */
    void *factors;  /* bases and steps, [count, 2], of the type of the rows */
    uint8_t *codes; /* [count, row_bytes()] */
    int64_t count, length;
    int32_t bits;
    int32_t is_double;
} table_t;

/* ---- layout ------------------------------------------------------------------------------- */

/* The codes of a byte lie as far from each other as a row has bytes, so that those of neighbouring
 * elements are made and read together. */
INLINE int64_t row_bytes(int64_t length, int bits) { return (length * bits + 7) / 8; }

/* Number of elements whose codes are the n-th in their bytes. */
INLINE int64_t width_of(int64_t length, int64_t bytes, int64_t n) {
    int64_t left = length - n * bytes;
    return left < 0 ? 0 : left < bytes ? left : bytes;
}

/* ---- arithmetic --------------------------------------------------------------------------- */

enum {
    LANES = 8,    /* sums that numpy adds side by side, */
    MOST = 128,   /* up to this many elements; it divides more into halves, */
    DEPTH = 64    /* at most this often */
};

#define T float
#define BITS int32_t
#define MAGNITUDE INT32_MAX
#define NAMED(name) name##_f32
#define ABSOLUTE fabsf
#define ROOT sqrtf
#define SHIFT 0x1.8p23f
#include "codes_kernel.c"
#undef T
#undef BITS
#undef MAGNITUDE
#undef NAMED
#undef ABSOLUTE
#undef ROOT
#undef SHIFT
#define T double
#define BITS int64_t
#define MAGNITUDE INT64_MAX
#define NAMED(name) name##_f64
#define ABSOLUTE fabs
#define ROOT sqrt
#define SHIFT 0x1.8p52
#include "codes_kernel.c"

/* Not inlined, so that the arithmetic stays between the two mode changes. */
static __attribute__((noinline)) void in_default_mode(void (*call)(const table_t *),
                                                      const table_t *table) {
    uint64_t kept = enter_default_mode();
    call(table);
    leave_default_mode(kept);
}

/* Replace rows by what their codes lose. */
void hvd_encode(const table_t *table) {
    in_default_mode(table->is_double ? encode_f64 : encode_f32, table);
}

/* Replace rows by the values of codes. */
void hvd_decode(const table_t *table) {
    in_default_mode(table->is_double ? decode_f64 : decode_f32, table);
}

/* Add the values of codes to rows. */
void hvd_add_decoded(const table_t *table) {
    in_default_mode(table->is_double ? add_decoded_f64 : add_decoded_f32, table);
}

EMBED_END;

#else /* with T, NAMED(), ABSOLUTE(), ROOT() and SHIFT: x + SHIFT - SHIFT is x rounded */

typedef struct {
    T total;        /* of x; of x * x for levels */
    T magnitude;    /* of |x| */
    int64_t upper;  /* number of x that are not negative */
} NAMED(sums_t);

typedef T NAMED(lanes_t) __attribute__((vector_size(LANES * sizeof(T))));
typedef BITS NAMED(masks_t) __attribute__((vector_size(LANES * sizeof(T))));

/* Add at most MOST elements. */
INLINE NAMED(sums_t) NAMED(add_few)(const T *x, int64_t count, int squares) {
    NAMED(lanes_t) totals = {0}, magnitudes = {0};
    NAMED(masks_t) uppers = {0};
    int64_t whole = count - count % LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        NAMED(lanes_t) elements;
        memcpy(&elements, x + i, sizeof elements);
        totals += squares ? elements * elements : elements;
        magnitudes += (NAMED(lanes_t))((NAMED(masks_t))elements & MAGNITUDE);
        uppers -= elements >= 0;
    }
#define TOGETHER(s) (((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7])))
    NAMED(sums_t) sums = {TOGETHER(totals), TOGETHER(magnitudes), TOGETHER(uppers)};
#undef TOGETHER
    for (int64_t i = whole; i < count; i++) {
        sums.total += squares ? x[i] * x[i] : x[i];
        sums.magnitude += ABSOLUTE(x[i]);
        sums.upper += x[i] >= 0;
    }
    return sums;
}

/* Add the elements of a row in halves of halves. */
INLINE NAMED(sums_t) NAMED(add)(const T *x, int64_t count, int squares) {
    NAMED(sums_t) lefts[DEPTH];
    int64_t rights[DEPTH]; /* lengths of right halves; 0 if the left one is added */
    for (int depth = 0;;) {
        for (; count > MOST; depth++) {
            int64_t left = count / 2 / LANES * LANES;
            rights[depth] = count - left;
            count = left;
        }
        NAMED(sums_t) sums = NAMED(add_few)(x, count, squares);
        x += count;
        for (; depth && !rights[depth - 1]; depth--) {
            const NAMED(sums_t) *left = &lefts[depth - 1];
            sums.total = left->total + sums.total;
            sums.magnitude = left->magnitude + sums.magnitude;
            sums.upper += left->upper;
        }
        if (!depth) return sums;
        lefts[depth - 1] = sums;
        count = rights[depth - 1];
        rights[depth - 1] = 0;
    }
}

/* One bit: the means of the negative and of the other elements. */
INLINE void NAMED(encode_signs)(T *x, int64_t length, T *factors, uint8_t *restrict codes) {
    NAMED(sums_t) sums = NAMED(add)(x, length, 0);
    T total = sums.total + 0, upper = sums.upper, lower = (T)length - upper;
    T high = (sums.magnitude + total) / 2 / (upper > 1 ? upper : 1);
    T base = (total - sums.magnitude) / 2 / (lower > 1 ? lower : 1), step = high - base;
    T values[2] = {0 * step + base, step + base};
    factors[0] = base, factors[1] = step;
    int64_t bytes = row_bytes(length, 1);
    for (int n = 0; n < 8; n++) {
        T *restrict part = x + n * bytes;
        int64_t width = width_of(length, bytes, n);
        for (int64_t i = 0; i < width; i++) {
            codes[i] |= (uint8_t)((part[i] >= 0) << n);
            part[i] -= part[i] >= 0 ? values[1] : values[0];
        }
    }
}

/* Return the largest magnitude; as integers, what is not a number is larger than all others. */
INLINE T NAMED(largest)(const T *x, int64_t length) {
    BITS largest = 0;
    for (int64_t i = 0; i < length; i++) {
        BITS bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= MAGNITUDE;
        largest = bits > largest ? bits : largest;
    }
    T value;
    memcpy(&value, &largest, sizeof value);
    return value;
}

INLINE void NAMED(encode_levels)(T *restrict x, int64_t length, int bits, T *factors,
                                 uint8_t *restrict codes) {
    T outermost = (1 << (bits - 1)) - 1;
    T step = bits == 2 ? ROOT((NAMED(add)(x, length, 1).total + 0) / (T)length) * (T)(4.0 / 3)
                       : NAMED(largest)(x, length) / outermost;
    T base = -outermost * step, divisor = step > 0 ? step : 1; /* an inverse may be infinite */
    factors[0] = base, factors[1] = step;
    int64_t bytes = row_bytes(length, bits);
    for (int n = 0; n < 8 / bits; n++) {
        T *restrict part = x + n * bytes;
        int64_t width = width_of(length, bytes, n);
        for (int64_t i = 0; i < width; i++) {
            T level = part[i] / divisor;
            level = level > -outermost ? level : -outermost; /* also if it is not a number */
            level = level < outermost ? level : outermost;
            T code = level + SHIFT - SHIFT + outermost;
            codes[i] |= (uint8_t)((int32_t)code << n * bits);
            part[i] -= code * step + base;
        }
    }
}

INLINE void NAMED(decode_row)(T *restrict x, int64_t length, int bits, const T *factors,
                              const uint8_t *restrict codes, int add) {
    T base = factors[0], step = factors[1];
    int64_t bytes = row_bytes(length, bits);
    for (int n = 0; n < 8 / bits; n++) {
        T *restrict part = x + n * bytes;
        int64_t width = width_of(length, bytes, n);
        for (int64_t i = 0; i < width; i++) {
            T value = (T)(codes[i] >> n * bits & ((1 << bits) - 1)) * step + base;
            part[i] = add ? part[i] + value : value;
        }
    }
}

FAST void NAMED(encode)(const table_t *table) {
    int64_t length = table->length, bytes = row_bytes(length, table->bits);
    for (int64_t row = 0; row < table->count; row++) {
        T *x = (T *)table->rows + row * length, *factors = (T *)table->factors + 2 * row;
        uint8_t *codes = table->codes + row * bytes;
        memset(codes, 0, bytes);
        switch (table->bits) { /* known to the compiler in each call */
        case 1: NAMED(encode_signs)(x, length, factors, codes); break;
        case 2: NAMED(encode_levels)(x, length, 2, factors, codes); break;
        case 4: NAMED(encode_levels)(x, length, 4, factors, codes); break;
        case 8: NAMED(encode_levels)(x, length, 8, factors, codes); break;
        }
    }
}

INLINE void NAMED(decode_rows)(const table_t *table, int add) {
    int64_t length = table->length, bytes = row_bytes(length, table->bits);
    for (int64_t row = 0; row < table->count; row++) {
        T *x = (T *)table->rows + row * length, *factors = (T *)table->factors + 2 * row;
        const uint8_t *codes = table->codes + row * bytes;
        switch (table->bits) {
        case 1: NAMED(decode_row)(x, length, 1, factors, codes, add); break;
        case 2: NAMED(decode_row)(x, length, 2, factors, codes, add); break;
        case 4: NAMED(decode_row)(x, length, 4, factors, codes, add); break;
        case 8: NAMED(decode_row)(x, length, 8, factors, codes, add); break;
        }
    }
}

FAST void NAMED(decode)(const table_t *table) { NAMED(decode_rows)(table, 0); }
FAST void NAMED(add_decoded)(const table_t *table) { NAMED(decode_rows)(table, 1); }

#endif
