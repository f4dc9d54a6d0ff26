/* Private data, which pass through the staging areas. */

#ifndef HVD_NODE_PRIVATE_DATA_H
#define HVD_NODE_PRIVATE_DATA_H

#include "embed.h"
#include "task.h"

EMBED_TEXT;

/* Small data: each rank stages all of its elements, and adds those of all ranks. */
static int is_small(const task_t *task) {
    return task->count * TYPES[task->type].itemsize <= task->team->chunk_bytes / 4;
}

static void stage_small(const task_t *task) {
    const team_t *team = task->team;
    int64_t bytes = task->count * TYPES[task->type].itemsize;
    /* The source of 0 bytes may be null, which memcpy does not allow. */
    if (bytes) memcpy(staged(team, team->rank, team->turn), task->source, bytes);
}

static void add_small(const task_t *task) {
    const team_t *team = task->team;
    const char *sources[team->size];
    double prescales[team->size];
    for (int32_t rank = 0; rank < team->size; rank++) {
        sources[rank] = staged(team, rank, team->turn);
        prescales[rank] = team->slots[rank]->offer[team->turn & 1].prescale;
    }
    char *target = task->data;
    combine_into(task, (sources_t){sources, team->size}, prescales, (targets_t){&target, 1},
                 task->count);
}

/* Private data pass through the staging areas in chunks. In turn k a rank stages the other
 * ranks' slices of chunk k, adds its slice of chunk k - 1, and fetches the others' sums of chunk
 * k - 2. */
static int64_t chunk_count(const task_t *task) {
    int64_t bytes = task->count * TYPES[task->type].itemsize;
    return (bytes + task->team->chunk_bytes - 1) / task->team->chunk_bytes;
}

static chunk_t chunk_at(const task_t *task, int64_t number) {
    int64_t most = task->team->chunk_bytes / TYPES[task->type].itemsize, start = number * most;
    int64_t left = task->count - start;
    int64_t offset = start * TYPES[task->type].itemsize;
    return (chunk_t){task->source + offset, task->data + offset, left < most ? left : most};
}

static void show_chunk(const task_t *task, int64_t number) {
    const team_t *team = task->team;
    int64_t itemsize = TYPES[task->type].itemsize;
    chunk_t chunk = chunk_at(task, number);
    char *area = staged(team, team->rank, team->turn);
    int64_t start = slice_start(task, chunk.count, team->rank) * itemsize;
    int64_t end = slice_start(task, chunk.count, team->rank + 1) * itemsize;
    memcpy(area, chunk.source, start);
    memcpy(area + end, chunk.source + end, chunk.count * itemsize - end);
}

static void add_chunk(const task_t *task, int64_t number) {
    const team_t *team = task->team;
    int64_t itemsize = TYPES[task->type].itemsize;
    uint32_t turn = team->turn - 1;
    chunk_t chunk = chunk_at(task, number);
    int64_t start = slice_start(task, chunk.count, team->rank);
    int64_t count = slice_start(task, chunk.count, team->rank + 1) - start;
    const char *sources[team->size];
    char *targets[2];
    double prescales[team->size];
    for (int32_t rank = 0; rank < team->size; rank++) {
        sources[rank] = staged(team, rank, turn) + start * itemsize;
        prescales[rank] = team->slots[rank]->offer[turn & 1].prescale;
    }
    sources[team->rank] = chunk.source + start * itemsize;
    targets[0] = chunk.data + start * itemsize;
    targets[1] = staged_result(team, team->rank, turn);
    combine_into(task, (sources_t){sources, team->size}, prescales, (targets_t){targets, 2}, count);
}

static void fetch_chunk(const task_t *task, int64_t number) {
    const team_t *team = task->team;
    int64_t itemsize = TYPES[task->type].itemsize;
    chunk_t chunk = chunk_at(task, number);
    for (int32_t rank = 0; rank < team->size; rank++) {
        if (rank == team->rank) continue;
        int64_t start = slice_start(task, chunk.count, rank) * itemsize;
        int64_t end = slice_start(task, chunk.count, rank + 1) * itemsize;
        memcpy(chunk.data + start, staged_result(team, rank, team->turn - 2), end - start);
    }
}

static void start_chunk(task_t *task) {
    int64_t chunks = chunk_count(task), k = task->chunk;
    offer(task);
    if (k >= 2) fetch_chunk(task, k - 2);
    if (k >= 1 && k <= chunks) add_chunk(task, k - 1);
    if (k < chunks) show_chunk(task, k);
}

#endif
