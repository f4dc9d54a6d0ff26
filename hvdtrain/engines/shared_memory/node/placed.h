/* Data that lie elsewhere on each rank: pieces are added where they are. */

#ifndef HVD_NODE_PLACED_H
#define HVD_NODE_PLACED_H

#include "combine.h"
#include "../../../compiled/kernel.h"

EMBED_TEXT;

/* Each row is a piece: its number of elements, the address of each source and of each target, with
 * targets[k] = postscale * (sources[0] * prescales[0] + sources[1] * prescales[1] + ...) */
static __attribute__((noinline)) void add_placed(const uint64_t *rows, int64_t count,
                                                 int32_t sources, int32_t targets, int32_t type,
                                                 const double *prescales, double postscale) {
    for (int64_t piece = 0; piece < count; piece++, rows += 1 + sources + targets) {
        const char *from[sources];
        char *to[targets];
        for (int32_t k = 0; k < sources; k++) from[k] = (const char *)(uintptr_t)rows[1 + k];
        for (int32_t k = 0; k < targets; k++) to[k] = (char *)(uintptr_t)rows[1 + sources + k];
        combine(type, 0, (sources_t){from, sources}, prescales, (targets_t){to, targets}, postscale,
                (int64_t)rows[0]);
    }
}

#endif
