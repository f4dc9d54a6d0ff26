/* All-reduce among the ranks of one node, in memory that all of them map.
 *
 * Why C: a rank waits for its peers and moves its data in one call without the GIL, and flags
 * shared between processes need memory fences, which Python lacks.
 *
 * Ranks synchronize through slots, one per rank. A rank arrives by incrementing its phase; peers
 * that wait longer than the spin time sleep on that word (futex). Data for other ranks are double
 * buffered: a rank that writes for turn t + 2 has seen all ranks arrive in turn t + 1, so no rank
 * still reads what was written in turn t.
 */

#define _GNU_SOURCE

#include "../../compiled/kernel.h"

EMBED_TEXT;

#include "node/arithmetic.h"
#include "node/combine.h"
#include "node/ranks.h"
#include "node/task.h"
#include "node/parts.h"
#include "node/private_data.h"
#include "node/shared_data.h"
#include "node/reduce.h"
#include "node/vote.h"
#include "node/placed.h"

/* Not inlined, so that the arithmetic stays between the two mode changes. */
static __attribute__((noinline)) int32_t in_default_mode(
    int32_t (*call)(task_t *, int64_t), task_t *task, int64_t timeout) {
    uint64_t kept = enter_default_mode();
    int32_t done = call(task, timeout);
    leave_default_mode(kept);
    return done;
}

/* Continue a task until it is done (1), or until a timeout or a signal (0). */
int32_t hvd_reduce(task_t *task, int64_t timeout) {
    return in_default_mode(reduce, task, timeout);
}

int32_t hvd_vote(task_t *task, int64_t timeout) { return in_default_mode(vote, task, timeout); }

/* The two phases of a hierarchical reduction of shared data. First this rank's slice of its own
 * copy becomes the sum over the node; */
int32_t hvd_add(task_t *task, int64_t timeout) { return in_default_mode(add, task, timeout); }

/* after the reduction between nodes, every copy of the slice becomes the result. */
int32_t hvd_spread(task_t *task, int64_t timeout) { return in_default_mode(spread, task, timeout); }

/* Add pieces of memory that all ranks have filled before, and that none uses meanwhile. */
void hvd_add_placed(const uint64_t *rows, int64_t count, int32_t sources, int32_t targets,
                    int32_t type, const double *prescales, double postscale) {
    uint64_t kept = enter_default_mode();
    add_placed(rows, count, sources, targets, type, prescales, postscale);
    leave_default_mode(kept);
}

/* Return the start of a rank's slice, in elements. */
int64_t hvd_slice_start(const task_t *task, int32_t rank) {
    return slice_start(task, task->whole.count, rank);
}

#include "node/calls.h"

EMBED_END;
