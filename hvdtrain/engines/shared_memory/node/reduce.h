/* The reduction of one tensor, small or large, private or shared. */

#ifndef HVD_NODE_REDUCE_H
#define HVD_NODE_REDUCE_H

#include "../../../compiled/kernel.h"
#include "private_data.h"
#include "shared_data.h"

EMBED_TEXT;

static int32_t reduce(task_t *task, int64_t timeout) {
    team_t *team = task->team;
    if (task->stage == START) {
        offer(task);
        if (is_small(task)) stage_small(task);
        task->stage = is_small(task) ? STAGED_SMALL : OFFERED;
        arrive(team);
    }
    for (;;) {
        if (!wait_all(team, timeout)) return 0;
        switch (task->stage) {
        case STAGED_SMALL:
            add_small(task);
            team->turn++;
            return 1;
        case OFFERED:
            if (all_in_reach(task)) {
                add_slice(task, 1);
                task->stage = ADDED;
            } else {
                team->turn++;
                start_chunk(task);
                task->stage = PIPELINE;
            }
            arrive(team);
            break;
        case ADDED:
            team->turn++;
            return 1;
        case PIPELINE:
            team->turn++;
            task->chunk++;
            start_chunk(task);
            if (task->chunk == chunk_count(task) + 1) return 1;
            arrive(team);
            break;
        }
    }
}

#endif
