/* Rows of all kinds, in memory of exactly their size, for sanitizers to watch. */

#include "codes_kernel.c"

#include <float.h>
#include <stdlib.h>

static const int BITS_OF_CODES[] = {1, 2, 4, 8};
static const int64_t LENGTHS[] = {1, 2, 7, 8, 9, 65, 128, 129, 512, 1001, 20011};
enum { ROWS = 9, COUNT_OF_BITS = 4, COUNT_OF_LENGTHS = 11 };

static uint64_t state = 1;

/* Return a number between -1 and 1. */
static double chance(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)state / 9223372036854775808.0;
}

/* Return an element of a row of one kind. */
static double element(int64_t row, int64_t at, double largest, double smallest) {
    switch (row) {
    case 0: return chance();
    case 1: return chance() * smallest * 100;
    case 2: return chance() * largest;
    case 3: return 0;
    case 4: return -1;
    case 5: return at == 0 ? NAN : chance();
    case 6: return at == 0 ? INFINITY : chance();
    case 7: return at % 2 ? INFINITY : -INFINITY;
    default: return at == 0 ? largest : NAN;
    }
}

static void try_rows(int64_t length, int bits, int is_double) {
    size_t size = is_double ? sizeof(double) : sizeof(float), elements = ROWS * length;
    table_t table = {.count = ROWS, .length = length, .bits = bits, .is_double = is_double};
    table.rows = malloc(elements * size);
    table.factors = malloc(2 * ROWS * size);
    table.codes = malloc(ROWS * row_bytes(length, bits));
    for (size_t i = 0; i < elements; i++) {
        int64_t row = i / length, at = i % length;
        if (is_double)
            ((double *)table.rows)[i] = element(row, at, DBL_MAX, DBL_TRUE_MIN);
        else
            ((float *)table.rows)[i] = (float)element(row, at, FLT_MAX, FLT_TRUE_MIN);
    }
    hvd_encode(&table);
    hvd_add_decoded(&table);
    hvd_decode(&table);
    free(table.rows);
    free(table.factors);
    free(table.codes);
}

int main(void) {
    for (int length = 0; length < COUNT_OF_LENGTHS; length++)
        for (int bits = 0; bits < COUNT_OF_BITS; bits++)
            for (int is_double = 0; is_double < 2; is_double++)
                try_rows(LENGTHS[length], BITS_OF_CODES[bits], is_double);
    return 0;
}
