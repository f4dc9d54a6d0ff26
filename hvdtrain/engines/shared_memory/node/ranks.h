/* The ranks of a node: how they wait for one another, and maxima of a few numbers. */

#ifndef HVD_NODE_RANKS_H
#define HVD_NODE_RANKS_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../../../compiled/kernel.h"

EMBED_TEXT;

#define LINE 128 /* two cache lines, which processors prefetch in pairs */
#define VALUES 8

typedef struct {
    _Atomic uint32_t phase;     /* number of arrivals of this rank */
    _Atomic uint32_t sleepers;  /* number of peers that sleep until the next */
    char pad[LINE - 8];
    struct {
        uint64_t values[VALUES]; /* input of a maximum over ranks */
        uint64_t location;       /* of this rank's data; 0 if it is private */
        double prescale;
        uint64_t carries;        /* whether the values are a vote with this rank's elements */
        char pad[LINE - 8 * VALUES - 24];
    } offer[2];
} slot_t;

typedef struct {
    slot_t **slots;           /* of each rank, as mapped by this process */
    int32_t rank, size;
    uint32_t phase;           /* number of arrivals of this rank */
    uint32_t turn;            /* its lowest bit selects the buffer */
    int64_t spin_nanoseconds; /* time to spin on a flag before sleeping */
    char **staging;           /* of each rank, as mapped by this process */
    int64_t chunk_bytes;      /* size of a chunk staged in one turn */
    const int64_t *due;       /* when to look whether all peers are alive, in nanoseconds */
} team_t;

int64_t hvd_slot_bytes(void) { return sizeof(slot_t); }

/* For each of two turns the staged elements of a rank, and its slice of the result. */
int64_t hvd_staging_bytes(int64_t chunk_bytes) { return 4 * chunk_bytes; }

static void arrive(team_t *team) {
    slot_t *own = team->slots[team->rank];
    team->phase++;
    /* Sequentially consistent with sleep_for(): either the sleeper sees the phase, or this rank
     * sees the sleeper. */
    atomic_store(&own->phase, team->phase);
    if (atomic_load(&own->sleepers))
        syscall(SYS_futex, &own->phase, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int is_behind(uint32_t phase, uint32_t target) { return (int32_t)(phase - target) < 0; }

/* Sleep until a peer arrives; return 0 after a timeout or a signal. */
static int sleep_for(slot_t *peer, uint32_t target, int64_t deadline) {
    int awake = 1;
    atomic_fetch_add(&peer->sleepers, 1);
    for (;;) {
        uint32_t phase = atomic_load(&peer->phase);
        if (!is_behind(phase, target)) break;
        int64_t left = deadline - now();
        if (left <= 0) { awake = 0; break; }
        struct timespec time = {left / 1000000000LL, left % 1000000000LL};
        if (syscall(SYS_futex, &peer->phase, FUTEX_WAIT, phase, &time, NULL, 0) == -1 &&
            errno == EINTR) {
            awake = !is_behind(atomic_load(&peer->phase), target);
            break;
        }
    }
    atomic_fetch_sub(&peer->sleepers, 1);
    return awake;
}

/* Spin on a peer's phase: it usually arrives soon, before a sleeper could wake up. */
static int spin_for(slot_t *peer, uint32_t target, int64_t until) {
    do {
        for (int looks = 0; looks < 64; looks++) {
            if (!is_behind(atomic_load_explicit(&peer->phase, memory_order_acquire), target))
                return 1;
            relax();
        }
    } while (now() < until);
    return 0;
}

/* Wait until every rank has arrived as often as this one; return 0 after a timeout. */
static int wait_all(team_t *team, int64_t timeout) {
    int64_t began = 0;
    for (int32_t rank = 0; rank < team->size; rank++) {
        slot_t *peer = team->slots[rank];
        if (!is_behind(atomic_load_explicit(&peer->phase, memory_order_acquire), team->phase))
            continue;
        if (!began) began = now();
        if (!spin_for(peer, team->phase, began + team->spin_nanoseconds) &&
            !sleep_for(peer, team->phase, began + timeout))
            return 0;
    }
    return 1;
}

void hvd_start_max(team_t *team, const uint64_t *values, int32_t count) {
    slot_t *own = team->slots[team->rank];
    memcpy(own->offer[team->turn & 1].values, values, 8 * count);
    own->offer[team->turn & 1].carries = 0;
    arrive(team);
}

int32_t hvd_finish_max(team_t *team, uint64_t *values, int32_t count, int64_t timeout) {
    if (!wait_all(team, timeout)) return 0;
    for (int32_t rank = 0; rank < team->size; rank++) {
        const uint64_t *theirs = team->slots[rank]->offer[team->turn & 1].values;
        for (int32_t i = 0; i < count; i++)
            if (theirs[i] > values[i]) values[i] = theirs[i];
    }
    team->turn++;
    return 1;
}

#endif
