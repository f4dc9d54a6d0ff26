/* Data in memory that all ranks map: every rank adds a slice. */

#ifndef HVD_NODE_SHARED_DATA_H
#define HVD_NODE_SHARED_DATA_H

#include "../../../compiled/kernel.h"
#include "task.h"

EMBED_TEXT;

/* Set the pointers to this rank's slice of every copy; return its number of elements. */
static int64_t slice_of_copies(const task_t *task, char **slices) {
    const team_t *team = task->team;
    int64_t start = slice_start(task, task->whole.count, team->rank);
    for (int32_t rank = 0; rank < team->size; rank++)
        slices[rank] = task->copies[rank] + start * TYPES[task->type].itemsize;
    return slice_start(task, task->whole.count, team->rank + 1) - start;
}

/* Shared data: every rank adds its slice and writes the sum into all copies, or only into its
 * own. */
static void add_slice(const task_t *task, int everywhere) {
    const team_t *team = task->team;
    char *slices[team->size];
    double prescales[team->size];
    int64_t count = slice_of_copies(task, slices);
    for (int32_t rank = 0; rank < team->size; rank++)
        prescales[rank] = team->slots[rank]->offer[team->turn & 1].prescale;
    sources_t all = {(const char *const *)slices, team->size};
    if (everywhere)
        combine_into(task, all, prescales, (targets_t){slices, team->size}, count);
    else
        combine_into(task, all, prescales, (targets_t){&slices[team->rank], 1}, count);
}

static void spread_slice(const task_t *task) {
    const team_t *team = task->team;
    char *slices[team->size];
    double one = 1.0;
    int64_t count = slice_of_copies(task, slices);
    const char *own = slices[team->rank];
    if (task->postscale == 1.0) {
        for (int32_t rank = 0; rank < team->size; rank++)
            if (rank != team->rank) hvd_copy(slices[rank], own, count * TYPES[task->type].itemsize);
        return;
    }
    combine_into(task, (sources_t){&own, 1}, &one, (targets_t){slices, team->size}, count);
}

static int32_t add(task_t *task, int64_t timeout) {
    team_t *team = task->team;
    if (task->stage == START) {
        offer(task);
        arrive(team);
        task->stage = OFFERED;
    }
    if (!wait_all(team, timeout)) return 0;
    add_slice(task, 0);
    team->turn++;
    return 1;
}

static int32_t spread(task_t *task, int64_t timeout) {
    team_t *team = task->team;
    if (task->stage == START) {
        spread_slice(task);
        arrive(team);
        task->stage = ADDED;
    }
    if (!wait_all(team, timeout)) return 0;
    team->turn++;
    return 1;
}

#endif
