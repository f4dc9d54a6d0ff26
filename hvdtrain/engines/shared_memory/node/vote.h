/* Votes on a reduction, which is run at once. */

#ifndef HVD_NODE_VOTE_H
#define HVD_NODE_VOTE_H

#include "../../../compiled/kernel.h"
#include "reduce.h"

EMBED_TEXT;

/* Vote on a task. If all ranks vote in this way, and the last two numbers of their ballots are equal,
 * it is run, too (DONE): few elements lie beside the vote; with more, the vote takes the place of the
 * offer that precedes a reduction. Otherwise the vote is a maximum of values, as other ranks may see
 * it; if the first two numbers are equal, the task has yet to be run (AGREED). */
static void cast_vote(task_t *task) {
    team_t *team = task->team;
    slot_t *own = team->slots[team->rank];
    memcpy(own->offer[team->turn & 1].values, task->ballot, sizeof task->ballot);
    own->offer[team->turn & 1].carries = 1;
    offer(task);
    if (is_small(task)) stage_small(task);
    task->stage = VOTED;
    arrive(team);
}

static int32_t count_votes(task_t *task) {
    const team_t *team = task->team;
    int equal = 1, runs = 1;
    uint64_t most[6] = {0};
    for (int32_t rank = 0; rank < team->size; rank++) {
        slot_t *theirs = team->slots[rank];
        const uint64_t *values = theirs->offer[team->turn & 1].values;
        equal &= !memcmp(values, task->ballot, 16);
        runs &= !memcmp(values + 4, task->ballot + 4, 16);
        runs &= theirs->offer[team->turn & 1].carries == 1;
        for (int i = 0; i < 6; i++)
            if (values[i] > most[i]) most[i] = values[i];
    }
    if (runs) return DONE;
    memcpy(task->ballot, most, sizeof most);
    return equal ? AGREED : DIFFERENT;
}

static int32_t vote(task_t *task, int64_t timeout) {
    if (task->stage == START) cast_vote(task);
    if (task->stage == VOTED) {
        if (!wait_all(task->team, timeout)) return AGAIN;
        int32_t verdict = count_votes(task);
        if (verdict != DONE) {
            task->team->turn++;
            return verdict;
        }
        task->stage = is_small(task) ? STAGED_SMALL : OFFERED;
    }
    return reduce(task, timeout) ? DONE : AGAIN;
}

#endif
