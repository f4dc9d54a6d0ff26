/* Private data, which pass through the staging areas. */

#ifndef HVD_NODE_PRIVATE_DATA_H
#define HVD_NODE_PRIVATE_DATA_H

#include "../../../compiled/kernel.h"
#include "parts.h"

EMBED_TEXT;

static int64_t bytes_of(const task_t *task) {
    return task->whole.count * TYPES[task->type].itemsize;
}

/* Small data: each rank stages all of its elements, and adds those of all ranks. */
static int is_small(const task_t *task) {
    return bytes_of(task) <= task->team->chunk_bytes / 4;
}

/* Few bytes are staged beside the slot, so that ranks map one page of each other. */
enum { FEW_AT = 512, FEW = 1536 };
_Static_assert(sizeof(slot_t) <= FEW_AT, "they would be in the slot");

static char *small_staged(const team_t *team, int32_t rank, int64_t bytes) {
    if (bytes > FEW) return staged(team, rank, team->turn);
    return (char *)team->slots[rank] + FEW_AT + (team->turn & 1) * FEW;
}

static void stage_small(const task_t *task) {
    const team_t *team = task->team;
    copy_from_sources(task, 0, task->whole.count, small_staged(team, team->rank, bytes_of(task)));
}

static void add_small(const task_t *task) {
    const team_t *team = task->team;
    int64_t itemsize = TYPES[task->type].itemsize;
    const char *sources[team->size];
    double prescales[team->size];
    for (int32_t rank = 0; rank < team->size; rank++) {
        sources[rank] = small_staged(team, rank, bytes_of(task));
        prescales[rank] = team->slots[rank]->offer[team->turn & 1].prescale;
    }
    piece_t part;
    for (parts_t parts = parts_from(task, 0, task->whole.count); next_part(&parts, &part);) {
        combine_into(task, (sources_t){sources, team->size}, prescales, (targets_t){&part.data, 1},
                     part.count);
        for (int32_t rank = 0; rank < team->size; rank++) sources[rank] += part.count * itemsize;
    }
}

/* Each rank stages its bytes, and copies those of all ranks, one after the other. */
int32_t hvd_gather(task_t *task, const int64_t *sizes, int64_t timeout) {
    team_t *team = task->team;
    int64_t most = 0;
    for (int32_t rank = 0; rank < team->size; rank++)
        if (sizes[rank] > most) most = sizes[rank];
    if (task->stage == START) {
        memcpy(small_staged(team, team->rank, most), task->whole.source, sizes[team->rank]);
        task->stage = STAGED_SMALL;
        arrive(team);
    }
    if (!wait_all(team, timeout)) return 0;
    char *target = task->whole.data;
    for (int32_t rank = 0; rank < team->size; target += sizes[rank++])
        memcpy(target, small_staged(team, rank, most), sizes[rank]);
    team->turn++;
    return 1;
}

/* More data pass through the staging areas in chunks. In turn k a rank stages the other ranks'
 * slices of chunk k, adds its slice of chunk k - 1, and fetches the others' sums of chunk k - 2. */
typedef struct {
    int64_t start, end; /* elements of the task */
} chunk_t;

static int64_t chunk_count(const task_t *task) {
    return (bytes_of(task) + task->team->chunk_bytes - 1) / task->team->chunk_bytes;
}

static chunk_t chunk_at(const task_t *task, int64_t number) {
    int64_t most = task->team->chunk_bytes / TYPES[task->type].itemsize, start = number * most;
    int64_t end = start + most;
    return (chunk_t){start, end < task->whole.count ? end : task->whole.count};
}

static int64_t chunk_slice(const task_t *task, chunk_t chunk, int32_t rank) {
    return chunk.start + slice_start(task, chunk.end - chunk.start, rank);
}

static void show_chunk(const task_t *task, int64_t number) {
    const team_t *team = task->team;
    chunk_t chunk = chunk_at(task, number);
    char *area = staged(team, team->rank, team->turn);
    int64_t start = chunk_slice(task, chunk, team->rank);
    int64_t end = chunk_slice(task, chunk, team->rank + 1);
    copy_from_sources(task, chunk.start, start, area);
    area += (end - chunk.start) * TYPES[task->type].itemsize;
    copy_from_sources(task, end, chunk.end, area);
}

static void add_chunk(const task_t *task, int64_t number) {
    const team_t *team = task->team;
    int64_t itemsize = TYPES[task->type].itemsize;
    uint32_t turn = team->turn - 1;
    chunk_t chunk = chunk_at(task, number);
    int64_t start = chunk_slice(task, chunk, team->rank);
    int64_t end = chunk_slice(task, chunk, team->rank + 1);
    const char *sources[team->size];
    double prescales[team->size];
    for (int32_t rank = 0; rank < team->size; rank++) {
        sources[rank] = staged(team, rank, turn) + (start - chunk.start) * itemsize;
        prescales[rank] = team->slots[rank]->offer[turn & 1].prescale;
    }
    char *result = staged_result(team, team->rank, turn);
    piece_t part;
    for (parts_t parts = parts_from(task, start, end); next_part(&parts, &part);) {
        char *targets[2] = {part.data, result};
        sources[team->rank] = part.source;
        combine_into(task, (sources_t){sources, team->size}, prescales, (targets_t){targets, 2},
                     part.count);
        for (int32_t rank = 0; rank < team->size; rank++) sources[rank] += part.count * itemsize;
        result += part.count * itemsize;
    }
}

static void fetch_chunk(const task_t *task, int64_t number) {
    const team_t *team = task->team;
    chunk_t chunk = chunk_at(task, number);
    for (int32_t rank = 0; rank < team->size; rank++) {
        if (rank == team->rank) continue;
        int64_t start = chunk_slice(task, chunk, rank), end = chunk_slice(task, chunk, rank + 1);
        copy_to_results(task, start, end, staged_result(team, rank, team->turn - 2));
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
