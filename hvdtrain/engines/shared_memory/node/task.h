/* A reduction of a node's ranks, and where its elements are. */

#ifndef HVD_NODE_TASK_H
#define HVD_NODE_TASK_H

#include "combine.h"
#include "../../../compiled/kernel.h"
#include "ranks.h"

EMBED_TEXT;

/* Private elements of this rank, and memory for the result, which may be the same. */
typedef struct {
    const char *source;
    char *data;
    int64_t count;
} piece_t;

typedef struct {
    team_t *team;
    piece_t whole;         /* the only tensor, or the number of elements of all */
    const piece_t *pieces; /* tensors that are reduced together; 0 for one */
    char **copies;         /* data of every rank as mapped here, if shared */
    uint64_t location;     /* copies are valid if it is equal on all ranks; or 0 */
    int32_t type, op;      /* as in TYPES; 0 to 3 for sum, min, max, product */
    double prescale, postscale;
    int32_t owners;        /* number of ranks that own a slice */
    int32_t stage;         /* progress; initially 0, kept between calls */
    int64_t chunk;
    uint64_t ballot[6];    /* of a vote; after one that has done nothing else, the maxima */
} task_t;

enum { START, STAGED_SMALL, OFFERED, ADDED, PIPELINE, VOTED };
enum { AGAIN, DONE, AGREED, DIFFERENT };

/* Slices are whole cache lines, except the last owner's; ranks that own none get an empty one. */
static int64_t slice_start(const task_t *task, int64_t count, int32_t rank) {
    int64_t each = (count + task->owners - 1) / task->owners;
    each = (each + 63) / 64 * 64;
    int64_t start = each * rank;
    return start < count ? start : count;
}

static char *staged(const team_t *team, int32_t rank, uint32_t turn) {
    return team->staging[rank] + (turn & 1) * team->chunk_bytes;
}

static char *staged_result(const team_t *team, int32_t rank, uint32_t turn) {
    return team->staging[rank] + (2 + (turn & 1)) * team->chunk_bytes;
}

static int all_in_reach(const task_t *task) {
    const team_t *team = task->team;
    for (int32_t rank = 0; rank < team->size; rank++)
        if (team->slots[rank]->offer[team->turn & 1].location != task->location) return 0;
    return task->location != 0;
}

static void offer(const task_t *task) {
    team_t *team = task->team;
    team->slots[team->rank]->offer[team->turn & 1].location = task->location;
    team->slots[team->rank]->offer[team->turn & 1].prescale = task->prescale;
}

static void combine_into(const task_t *task, sources_t sources, const double *prescales,
                         targets_t targets, int64_t count) {
    combine(task->type, task->op, sources, prescales, targets, task->postscale, count);
}

#endif
