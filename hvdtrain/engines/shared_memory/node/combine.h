/* Reduction of memory of several ranks into memory of several ranks, and copies. */

#ifndef HVD_NODE_COMBINE_H
#define HVD_NODE_COMBINE_H

#include "arithmetic.h"
#include "../../../compiled/kernel.h"

EMBED_TEXT;

#define BLOCK 2048 /* elements that fit into the L1 cache while they are added */

typedef struct {
    const char *const *pointers;
    int32_t count;
} sources_t;

typedef struct {
    char *const *pointers;
    int32_t count;
} targets_t;

/* sum = sources[0] * prescales[0] + sources[1] * prescales[1] + ..., along a binary tree,
 * neighbours first. Rounding errors grow with the logarithm of the number of ranks, and the sum
 * over N ranks, each with the sum of V / N shards, is bitwise equal to the sum of V shards (powers
 * of two). */
static void add_tree(const type_t *type, double *sum, const char *const *sources,
                     const double *prescales, int32_t count, int64_t offset, int64_t length) {
    if (count == 1) {
        type->begin(sum, sources[0] + offset, length, prescales[0]);
        return;
    }
    int32_t half = 1;
    while (2 * half < count) half *= 2;
    add_tree(type, sum, sources, prescales, half, offset, length);
    if (count - half == 1) {
        type->fold[0](sum, sources[half] + offset, length, prescales[half]);
        return;
    }
    double other[2 * BLOCK];
    add_tree(type, other, sources + half, prescales + half, count - half, offset, length);
    type->join(sum, other, length, 1.0);
}

/* The type is a place in TYPES, the op 0 to 3 for sum, min, max, product:
 * targets[k] = postscale * (sources[0] * prescales[0] op sources[1] * prescales[1] op ...) */
static void combine(int32_t type_number, int32_t op, sources_t sources, const double *prescales,
                    targets_t targets, double postscale, int64_t count) {
    const type_t *type = &TYPES[type_number];
    fold_t fold = type->fold[op];
    if (type->pair && op == 0 && sources.count == 2 && targets.count <= 2) {
        type->pair(sources.pointers[0], prescales[0], sources.pointers[1], prescales[1],
                   targets.pointers[0], targets.pointers[targets.count - 1], count, postscale);
        return;
    }
    double sum[2 * BLOCK]; /* room for complex128 */
    for (int64_t start = 0; start < count; start += BLOCK) {
        int64_t length = count - start < BLOCK ? count - start : BLOCK;
        int64_t offset = start * type->itemsize;
        if (op == 0) {
            add_tree(type, sum, sources.pointers, prescales, sources.count, offset, length);
        } else {
            type->begin(sum, sources.pointers[0] + offset, length, prescales[0]);
            for (int32_t k = 1; k < sources.count; k++)
                fold(sum, sources.pointers[k] + offset, length, prescales[k]);
        }
        for (int32_t k = 0; k < targets.count; k++)
            type->end(targets.pointers[k] + offset, sum, length, postscale);
    }
}

/* Copy around the caches, because another rank is the next to read the target. */
void hvd_copy(char *target, const char *source, int64_t bytes) {
    copy_around_caches(target, source, bytes);
    fence_copies();
}

#endif
