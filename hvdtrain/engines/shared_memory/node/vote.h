/* Votes on a reduction, which is run at once. */

#ifndef HVD_NODE_VOTE_H
#define HVD_NODE_VOTE_H

#include "../../../compiled.h"
#include "reduce.h"

EMBED_TEXT;

/* Vote on a task. If all ranks vote in this way for the same, it is run, too (DONE): few elements
 * lie beside the vote; with more, the vote takes the place of the offer that precedes a reduction.
 * Ranks that vote by a maximum of values see the ballot three times, as they send it; if they
 * agree, the task has yet to be run (AGREED). */
static void cast_vote(task_t *task) {
    team_t *team = task->team;
    slot_t *own = team->slots[team->rank];
    for (int i = 0; i < 6; i++) own->offer[team->turn & 1].values[i] = task->ballot[i & 1];
    own->offer[team->turn & 1].carries = 1;
    offer(task);
    if (is_small(task)) stage_small(task);
    task->stage = VOTED;
    arrive(team);
}

static int32_t count_votes(const task_t *task) {
    const team_t *team = task->team;
    int equal = 1, carried = 1;
    for (int32_t rank = 0; rank < team->size; rank++) {
        slot_t *theirs = team->slots[rank];
        equal &= !memcmp(theirs->offer[team->turn & 1].values, task->ballot, sizeof task->ballot);
        carried &= theirs->offer[team->turn & 1].carries == 1;
    }
    return !equal ? DIFFERENT : carried ? DONE : AGREED;
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
