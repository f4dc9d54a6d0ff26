/* The private elements of a task, in one tensor or in many, as if they followed one another. */

#ifndef HVD_NODE_PARTS_H
#define HVD_NODE_PARTS_H

#include "../../../compiled/kernel.h"
#include "task.h"

EMBED_TEXT;

/* A walk over elements, in parts that are contiguous in memory. */
typedef struct {
    int64_t itemsize, left;
    const piece_t *piece;
    int64_t offset; /* in the piece */
} parts_t;

static parts_t parts_from(const task_t *task, int64_t start, int64_t end) {
    parts_t parts = {TYPES[task->type].itemsize, end - start, &task->whole, start};
    if (!task->pieces || start == end) return parts;
    parts.piece = task->pieces;
    while (parts.offset >= parts.piece->count) parts.offset -= parts.piece++->count;
    return parts;
}

static int next_part(parts_t *parts, piece_t *part) {
    if (!parts->left) return 0;
    while (parts->offset == parts->piece->count) parts->piece++, parts->offset = 0;
    int64_t count = parts->piece->count - parts->offset, skipped = parts->offset * parts->itemsize;
    if (count > parts->left) count = parts->left;
    *part = (piece_t){parts->piece->source + skipped, parts->piece->data + skipped, count};
    parts->left -= count, parts->offset += count;
    return 1;
}

static void copy_from_sources(const task_t *task, int64_t start, int64_t end, char *target) {
    piece_t part;
    for (parts_t parts = parts_from(task, start, end); next_part(&parts, &part);) {
        memcpy(target, part.source, part.count * parts.itemsize);
        target += part.count * parts.itemsize;
    }
}

static void copy_to_results(const task_t *task, int64_t start, int64_t end, const char *source) {
    piece_t part;
    for (parts_t parts = parts_from(task, start, end); next_part(&parts, &part);) {
        memcpy(part.data, source, part.count * parts.itemsize);
        source += part.count * parts.itemsize;
    }
}

#endif
