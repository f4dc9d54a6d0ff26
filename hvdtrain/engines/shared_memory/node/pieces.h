/* Many tensors, which are reduced together. */

#ifndef HVD_NODE_PIECES_H
#define HVD_NODE_PIECES_H

#include "embed.h"
#include "task.h"

EMBED_TEXT;

/* Many tensors: each rank shows as many elements as fit into a half of the shared data, which are
 * used in turns, and adds those of all ranks straight into the results. */
static int64_t half_bytes(const task_t *task) { return task->count / 2 / LINE * LINE; }

static char *shown(const task_t *task, int32_t rank) {
    return task->copies[rank] + (task->team->turn & 1) * half_bytes(task);
}

static int64_t piece_part(const task_t *task, int64_t piece, int64_t offset, int64_t room) {
    int64_t left = task->pieces[piece].count - offset;
    return left < room ? left : room;
}

static void show_pieces(const task_t *task) {
    const team_t *team = task->team;
    int64_t itemsize = TYPES[task->type].itemsize, offset = task->offset;
    int64_t room = half_bytes(task) / itemsize;
    char *area = shown(task, team->rank);
    for (int64_t piece = task->piece; room && piece < task->piece_count; piece++, offset = 0) {
        int64_t count = piece_part(task, piece, offset, room);
        if (count) memcpy(area, task->pieces[piece].source + offset * itemsize, count * itemsize);
        area += count * itemsize, room -= count;
    }
}

static void add_pieces(task_t *task) {
    const team_t *team = task->team;
    int64_t itemsize = TYPES[task->type].itemsize, room = half_bytes(task) / itemsize;
    const char *sources[team->size];
    double prescales[team->size];
    for (int32_t rank = 0; rank < team->size; rank++) {
        sources[rank] = shown(task, rank);
        prescales[rank] = team->slots[rank]->offer[team->turn & 1].prescale;
    }
    while (room && task->piece < task->piece_count) {
        int64_t count = piece_part(task, task->piece, task->offset, room);
        char *target = task->pieces[task->piece].data + task->offset * itemsize;
        if (count)
            combine_into(task, (sources_t){sources, team->size}, prescales,
                         (targets_t){&target, 1}, count);
        for (int32_t rank = 0; rank < team->size; rank++) sources[rank] += count * itemsize;
        room -= count, task->offset += count;
        if (task->offset == task->pieces[task->piece].count) task->piece++, task->offset = 0;
    }
}

static int32_t reduce_pieces(task_t *task, int64_t timeout) {
    team_t *team = task->team;
    if (task->stage == SHOWN_PIECES) {
        if (!wait_all(team, timeout)) return 0;
        add_pieces(task);
        team->turn++;
    }
    while (task->stage == START || task->piece < task->piece_count) {
        offer(task);
        show_pieces(task);
        task->stage = SHOWN_PIECES;
        arrive(team);
        if (!wait_all(team, timeout)) return 0;
        add_pieces(task);
        team->turn++;
    }
    return 1;
}

#endif
