/* Pieces that lie anywhere, in memory of exactly their size, for sanitizers to watch. */

#define HVD_WITHOUT_PYTHON
#include "node_kernel.c"

#include <stdio.h>
#include <stdlib.h>

#include "driver_numbers.h"

enum { PIECES = 4, MOST_RANKS = 5, KEY = 7 };
static const int64_t COUNTS[PIECES] = {1, 0, 67, 5000};

typedef struct {
    char *sources[MOST_RANKS], *targets[MOST_RANKS];
} piece_memory_t;

/* Return how many elements are wrong; with `in_place` the first sources are the targets. */
static int64_t try_pieces(int type, int ranks, int targets, int in_place) {
    piece_memory_t memory[PIECES];
    uint64_t rows[PIECES * (1 + 2 * MOST_RANKS)], *row = rows;
    double prescales[MOST_RANKS], postscale = is_whole(type) ? 1 : 0.5;
    int64_t wrong = 0;
    for (int rank = 0; rank < ranks; rank++) prescales[rank] = is_whole(type) ? 1 : 1 + rank % 2;
    for (int n = 0; n < PIECES; n++) {
        size_t bytes = (size_t)(COUNTS[n] * TYPES[type].itemsize);
        *row++ = (uint64_t)COUNTS[n];
        for (int rank = 0; rank < ranks; rank++) {
            char *source = memory[n].sources[rank] = malloc(bytes);
            fill(source, COUNTS[n], type, SUM, 0, KEY + (uint64_t)n, rank);
            *row++ = (uintptr_t)source;
        }
        for (int k = 0; k < targets; k++) {
            char *target = memory[n].targets[k] = in_place ? memory[n].sources[k] : malloc(bytes);
            *row++ = (uintptr_t)target;
        }
    }
    hvd_add_placed(rows, PIECES, ranks, targets, type, prescales, postscale);
    for (int n = 0; n < PIECES; n++) {
        for (int k = 0; k < targets; k++) {
            wrong += count_wrong(memory[n].targets[k], COUNTS[n], type, SUM, KEY + (uint64_t)n,
                                 ranks, prescales, postscale);
            if (!in_place) free(memory[n].targets[k]);
        }
        for (int rank = 0; rank < ranks; rank++) free(memory[n].sources[rank]);
    }
    return wrong;
}

int main(void) {
    int64_t wrong = 0;
    for (int type = 0; type < TYPE_COUNT; type++)
        for (int ranks = 1; ranks <= MOST_RANKS; ranks++)
            for (int in_place = 0; in_place < 2; in_place++) {
                wrong += try_pieces(type, ranks, 1, in_place);
                wrong += try_pieces(type, ranks, ranks, in_place);
            }
    if (wrong) fprintf(stderr, "%lld wrong elements\n", (long long)wrong);
    return wrong != 0;
}
