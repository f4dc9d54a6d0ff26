/* Ranks that reduce at random, for sanitizers to watch: driver threads|processes RANKS SEED COUNT
 *
 * Exact numbers are compared with a formula. Of all results each rank makes one checksum, which
 * must be equal on all ranks, and is printed: it must not depend on the instruction set either.
 */

#define HVD_WITHOUT_PYTHON
#include "node_kernel.c"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>

#include "driver_numbers.h"

enum { MOST_RANKS = 8, CHUNK = 4096, MOST = 6 * CHUNK, PIECE_COUNT = 64 };
enum { PRIVATE, FROM_SOURCE, PIECES, IN_REACH, HALVES, WAYS };

typedef struct {
    slot_t slot;
    char staging[4 * CHUNK], data[MOST];
    uint64_t checksum, wrong;
} place_t;

static place_t *places; /* of each rank, shared */
static int size, operations;
static uint64_t seed;

/* What all ranks do next. */
typedef struct {
    int type, op, way, rough, owners;
    int64_t count;
    uint64_t key, luck;
    double prescales[MOST_RANKS], postscale;
} turn_t;

static turn_t turn_at(int number) {
    turn_t turn = {.type = number % TYPE_COUNT, .op = number / TYPE_COUNT % 4};
    turn.key = mix(seed + (uint64_t)number * 1000003);
    turn.luck = mix(turn.key);
    if (is_complex(turn.type)) turn.op = turn.op % 2 ? PRODUCT : SUM;
    turn.way = turn.luck % WAYS;
    turn.rough = turn.luck >> 8 & 1;
    int64_t most = MOST / TYPES[turn.type].itemsize;
    /* Often none, or few enough to be shown whole. */
    turn.count = (int64_t)((turn.luck >> 16) % 1000) * most / 999 >> (turn.luck >> 32) % 6 * 2;
    turn.owners = turn.way == HALVES ? 1 + (int)((turn.luck >> 40) % (uint64_t)size) : size;
    turn.postscale = is_whole(turn.type) ? 1.0 : turn.rough ? 1 / 3.0 : 0.5;
    for (int rank = 0; rank < size; rank++) {
        double factor = turn.rough ? 0.3 + rank : turn.op == PRODUCT ? 1 : 1 + rank % 2;
        turn.prescales[rank] = is_whole(turn.type) ? 1.0 : factor;
    }
    return turn;
}

/* Threads of some ranks flush small numbers to zero. */
static uint64_t swap_mode(int flush) {
    uint64_t before = 0;
#if defined(__x86_64__)
    before = _mm_getcsr() & 0xffc0;
    _mm_setcsr(flush ? 0x9fc0 : 0x1f80);
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)flush << 24));
#endif
    return before;
}

static int32_t finish(int32_t (*call)(task_t *, int64_t), task_t *task, uint64_t luck) {
    static const int64_t timeouts[] = {0, 1000, 100000, 1000000000};
    uint64_t others = swap_mode(luck & 1), own = swap_mode(luck & 1);
    int32_t result;
    while (!(result = call(task, timeouts[luck >> 1 & 3]))) sched_yield();
    if (swap_mode(0) != own) {
        fprintf(stderr, "the caller's floating-point mode was changed\n");
        abort();
    }
    (void)others;
    return result;
}

static void add_checksum(place_t *own, const char *data, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i++)
        own->checksum = (own->checksum ^ (uint8_t)data[i]) * 0x100000001b3ull;
}

/* Vote on a task, in one call with its reduction or without; return whether it is done. */
static int vote_on(task_t *task, const turn_t *turn, uint64_t luck) {
    int differ = size > 1 && (turn->luck >> 48 & 3) == 0, carry = turn->luck >> 50 & 1 || luck & 1;
    uint64_t own = turn->key + (differ && task->team->rank == size - 1), values[6];
    /* What ranks vote on may come in another order on each. */
    uint64_t other = turn->luck >> 56 & 1 ? (uint64_t)task->team->rank : 0;
    int32_t verdict;
    int wrong = 0;
    if (carry) {
        for (int i = 0; i < 6; i++) task->ballot[i] = (i & 1 ? ~own : own) + (i < 4 ? other : 0);
        verdict = finish(hvd_vote, task, luck);
        task->stage = START;
        wrong = verdict != DONE && !differ && task->ballot[4] != own;
    } else {
        for (int i = 0; i < 6; i++) values[i] = i & 1 ? ~own : own;
        hvd_start_max(task->team, values, 6);
        while (!hvd_finish_max(task->team, values, 6, 1000000)) sched_yield();
        verdict = values[0] == own && values[1] == ~own ? AGREED : DIFFERENT;
    }
    int all_carry = turn->luck >> 50 & 1;
    int expected = differ ? DIFFERENT : DONE;
    int in_vain = verdict == AGREED || (verdict == DIFFERENT && turn->luck >> 56 & 1);
    wrong |= verdict != expected && (!in_vain || differ || all_carry);
    places[task->team->rank].wrong += (uint64_t)wrong;
    return verdict == DONE;
}

/* Divide a task into pieces of odd sizes, some of them empty. */
static void divide(task_t *task, piece_t *pieces, uint64_t luck) {
    int64_t done = 0, itemsize = TYPES[task->type].itemsize;
    for (int number = 0; number < PIECE_COUNT; number++) {
        int64_t size = (int64_t)(mix(luck + (uint64_t)number) % 700);
        int64_t left = task->whole.count - done;
        int64_t count = number == PIECE_COUNT - 1 || size > left ? left : size;
        pieces[number] = (piece_t){task->whole.source + done * itemsize,
                                   task->whole.data + done * itemsize, count};
        done += count;
    }
    task->pieces = pieces;
}

static void take_turn(team_t *team, const turn_t *turn, uint64_t luck) {
    place_t *own = &places[team->rank];
    char private[MOST], source[MOST], *copies[MOST_RANKS];
    int reached = turn->way >= IN_REACH;
    int64_t bytes = turn->count * TYPES[turn->type].itemsize;
    char *data = reached ? own->data : turn->count ? private : NULL;
    int from_source = turn->way == FROM_SOURCE || (turn->way == PIECES && luck & 32);
    char *from = from_source && turn->count ? source : data;
    for (int rank = 0; rank < size; rank++) copies[rank] = places[rank].data;
    if (turn->count)
        fill(from, turn->count, turn->type, turn->op, turn->rough, turn->key, team->rank);
    task_t task = {.team = team, .whole = {from, data, turn->count}, .copies = copies,
                   .location = reached ? 1 : 0, .type = turn->type, .op = turn->op,
                   .prescale = turn->prescales[team->rank], .postscale = turn->postscale,
                   .owners = turn->owners};
    team->spin_nanoseconds = luck & 16 ? 20000 : 0;
    if (turn->way == HALVES) {
        int scale_first = turn->luck >> 52 & 1;
        task.postscale = scale_first ? turn->postscale : 1.0;
        finish(hvd_add, &task, luck);
        task.stage = 0, task.op = SUM, task.prescale = 1.0;
        task.postscale = scale_first ? 1.0 : turn->postscale;
        finish(hvd_spread, &task, luck >> 8);
    } else {
        piece_t pieces[PIECE_COUNT];
        if (turn->way == PIECES && turn->count) divide(&task, pieces, turn->luck);
        int votes = turn->count && turn->luck >> 54 & 1;
        if (!votes || !vote_on(&task, turn, luck >> 4)) finish(hvd_reduce, &task, luck);
    }
    if (turn->count) add_checksum(own, data, bytes);
    if (!turn->rough)
        own->wrong += (uint64_t)count_wrong(data, turn->count, turn->type, turn->op, turn->key,
                                            size, turn->prescales, turn->postscale);
}

static void find_maximum(team_t *team, uint64_t key, uint64_t luck) {
    uint64_t values[VALUES], theirs[VALUES], most[VALUES] = {0};
    for (int i = 0; i < VALUES; i++) values[i] = number_at(key, team->rank, i);
    for (int rank = 0; rank < size; rank++)
        for (int i = 0; i < VALUES; i++) {
            theirs[i] = number_at(key, rank, i);
            if (theirs[i] > most[i]) most[i] = theirs[i];
        }
    hvd_start_max(team, values, VALUES);
    while (!hvd_finish_max(team, values, VALUES, luck & 1 ? 0 : 1000000)) sched_yield();
    places[team->rank].wrong += memcmp(values, most, sizeof most) != 0;
}

static void copy_past_caches(place_t *own, uint64_t luck) {
    static _Thread_local char source[600], target[600];
    int64_t bytes = (int64_t)(luck % 300), shift = (int64_t)(luck >> 16) % 128;
    for (int i = 0; i < 600; i++) source[i] = (char)mix(luck + (uint64_t)i);
    if (bytes == 0) hvd_copy(NULL, NULL, 0);
    hvd_copy(target + shift, source + 7, bytes);
    own->wrong += memcmp(target + shift, source + 7, (size_t)bytes) != 0;
}

static void *take_part(void *number) {
    int rank = (int)(intptr_t)number;
    slot_t *slots[MOST_RANKS];
    char *staging[MOST_RANKS];
    for (int other = 0; other < size; other++) {
        slots[other] = &places[other].slot;
        staging[other] = places[other].staging;
    }
    team_t team = {.slots = slots, .rank = rank, .size = size, .staging = staging,
                   .phase = places[rank].slot.phase, .turn = 0xfffffffau, .chunk_bytes = CHUNK};
    for (int n = 0; n < operations; n++) {
        turn_t turn = turn_at(n);
        uint64_t luck = number_at(turn.key, rank, -1);
        if (luck >> 20 & 1 && luck >> 24 & 1) usleep((luck >> 28) % 100);
        if (n % 5 == 0) find_maximum(&team, turn.key, luck >> 32);
        copy_past_caches(&places[rank], luck);
        take_turn(&team, &turn, luck >> 40);
    }
    return NULL;
}

static void ignore(int number) { (void)number; }

/* A process whose waits are interrupted by signals now and then. */
static pid_t start_process(int rank) {
    pid_t process = fork();
    if (process == 0) {
        struct sigaction action = {.sa_handler = ignore};
        struct itimerval often = {{0, 700}, {0, 700}};
        sigaction(SIGALRM, &action, NULL);
        setitimer(ITIMER_REAL, &often, NULL);
        take_part((void *)(intptr_t)rank);
        exit(0);
    }
    return process;
}

static int run_threads(void) {
    pthread_t threads[MOST_RANKS];
    for (int rank = 0; rank < size; rank++)
        pthread_create(&threads[rank], NULL, take_part, (void *)(intptr_t)rank);
    for (int rank = 0; rank < size; rank++) pthread_join(threads[rank], NULL);
    return 0;
}

static int run_processes(void) {
    pid_t processes[MOST_RANKS];
    int failed = 0, status;
    for (int rank = 0; rank < size; rank++) processes[rank] = start_process(rank);
    for (int ended = 0; ended < size; ended++) {
        if (wait(&status) > 0 && status == 0) continue;
        /* The others wait for the one that failed. */
        for (int rank = 0; rank < size && !failed; rank++) kill(processes[rank], SIGKILL);
        failed = 1;
    }
    return failed;
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    size = atoi(argv[2]), seed = strtoull(argv[3], NULL, 10), operations = atoi(argv[4]);
    places = mmap(NULL, sizeof(place_t) * MOST_RANKS, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    /* Soon after the start the number of arrivals wraps around, or changes its sign. */
    for (int rank = 0; rank < size; rank++)
        places[rank].slot.phase = seed & 1 ? 0x7ffffff0u : 0xfffffff0u;
    int failed = strcmp(argv[1], "threads") == 0 ? run_threads() : run_processes();
    for (int rank = 0; rank < size; rank++) {
        place_t *place = &places[rank];
        if (place->wrong || place->checksum != places[0].checksum) {
            fprintf(stderr, "rank %d: %llu wrong results, checksum %016llx\n", rank,
                    (unsigned long long)place->wrong, (unsigned long long)place->checksum);
            failed = 1;
        }
    }
    printf("%016llx\n", (unsigned long long)places[0].checksum);
    return failed;
}
