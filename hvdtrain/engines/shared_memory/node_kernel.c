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
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define LINE 128      /* two cache lines, which processors prefetch in pairs */
#define VALUES 8
#define BLOCK 2048    /* elements that fit into the L1 cache while they are added */

/* The source text, by which a library compiled from a different version is detected. */
__asm__(".section .rodata\n"
        ".global hvd_source, hvd_source_end\n"
        "hvd_source: .incbin \"" __FILE__ "\"\n"
        "hvd_source_end:\n"
        ".byte 0\n"
        ".text\n");

/* ---- synchronization -------------------------------------------------------------------- */

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

/* ---- maximum of a few numbers ----------------------------------------------------------- */

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

/* ---- floating-point mode ------------------------------------------------------------------ */

/* A thread may flush subnormal numbers to zero or round differently, but all ranks must get the
 * same bits. Set the default mode and return the previous one. */
static uint64_t enter_default_mode(void) {
    uint64_t kept = 0;
#if defined(__x86_64__)
    kept = _mm_getcsr();
    _mm_setcsr(0x1f80); /* all exceptions masked, no flags set */
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(kept));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0) : "memory");
#endif
    return kept;
}

static void leave_default_mode(uint64_t kept) {
#if defined(__x86_64__)
    _mm_setcsr(kept);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(kept) : "memory");
#else
    (void)kept;
#endif
}

/* ---- arithmetic --------------------------------------------------------------------------- */

/* begin: sum = x * factor; fold: sum = sum op x * factor; end: x = sum * factor. */
typedef void (*begin_t)(void *sum, const void *x, int64_t count, double factor);
typedef void (*fold_t)(void *sum, const void *x, int64_t count, double factor);
typedef void (*end_t)(void *x, const void *sum, int64_t count, double factor);

/* Fast path for two ranks, in one pass: x = y = (a * pa + b * pb) * factor. */
typedef void (*pair_t)(const void *a, double pa, const void *b, double pb, void *x, void *y,
                       int64_t count, double factor);

typedef struct {
    int64_t itemsize;
    begin_t begin;
    fold_t fold[4]; /* sum, min, max, product */
    end_t end;
    pair_t pair; /* sums; 0 if there is no fast path */
    fold_t join; /* sum = sum + other sum */
} type_t;

/* Compiled for several processor generations if the compiler and loader support it; tests set it
 * on the command line. */
#if defined(FAST)
#elif defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define FAST static __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAST static
#endif

#define SAME(x) (x)
#define ADD(a, b) ((a) + (b))
#define MULTIPLY(a, b) ((a) * (b))
/* Small unsigned types would be promoted to int, whose overflow is undefined. */
#define MULTIPLY_WHOLE(a, b) ((uint64_t)(a) * (b))
#define LOWER(a, b) ((b) < (a) ? (b) : (a))
#define HIGHER(a, b) ((b) > (a) ? (b) : (a))
/* As in numpy, a NaN propagates. */
#define LOWER_REAL(a, b) ((b) < (a) || (b) != (b) ? (b) : (a))
#define HIGHER_REAL(a, b) ((b) > (a) || (b) != (b) ? (b) : (a))

#define BEGIN(NAME, T, S, LOAD, SCALE)                                                          \
    FAST void NAME##_begin(void *s, const void *x, int64_t count, double factor) {              \
        S *restrict sum = s;                                                                    \
        const T *restrict in = x;                                                               \
        (void)factor;                                                                           \
        for (int64_t i = 0; i < count; i++) sum[i] = LOAD(in[i]) SCALE;                         \
    }
#define FOLD(NAME, T, S, LOAD, SCALE, OP, COMBINE)                                              \
    FAST void NAME##_##OP(void *s, const void *x, int64_t count, double factor) {               \
        S *restrict sum = s;                                                                    \
        const T *restrict in = x;                                                               \
        (void)factor;                                                                           \
        for (int64_t i = 0; i < count; i++) {                                                   \
            S term = LOAD(in[i]) SCALE;                                                         \
            sum[i] = COMBINE(sum[i], term);                                                     \
        }                                                                                       \
    }
#define END(NAME, T, S, STORE, SCALE)                                                           \
    FAST void NAME##_end(void *x, const void *s, int64_t count, double factor) {                \
        T *restrict out = x;                                                                    \
        const S *restrict sum = s;                                                              \
        (void)factor;                                                                           \
        for (int64_t i = 0; i < count; i++) out[i] = STORE(sum[i] SCALE);                       \
    }
#define TYPE(NAME, T, S, LOAD, STORE, SCALE, MIN, MAX, TIMES)                                   \
    BEGIN(NAME, T, S, LOAD, SCALE)                                                              \
    FOLD(NAME, T, S, LOAD, SCALE, sum, ADD)                                                     \
    FOLD(NAME, T, S, LOAD, SCALE, min, MIN)                                                     \
    FOLD(NAME, T, S, LOAD, SCALE, max, MAX)                                                     \
    FOLD(NAME, T, S, LOAD, SCALE, product, TIMES)                                               \
    END(NAME, T, S, STORE, SCALE)
#define INTEGER(NAME, T) TYPE(NAME, T, T, SAME, SAME, , LOWER, HIGHER, MULTIPLY_WHOLE)

INTEGER(u8, uint8_t)
INTEGER(u16, uint16_t)
INTEGER(u32, uint32_t)
INTEGER(u64, uint64_t)
/* Signed sums wrap around like unsigned ones; in C their overflow is undefined. */
#define WRAPPED(NAME, T, U)                                                                     \
    BEGIN(NAME, T, T, SAME, )                                                                   \
    FOLD(NAME, U, U, SAME, , sum, ADD)                                                          \
    FOLD(NAME, T, T, SAME, , min, LOWER)                                                        \
    FOLD(NAME, T, T, SAME, , max, HIGHER)                                                       \
    FOLD(NAME, U, U, SAME, , product, MULTIPLY_WHOLE)                                           \
    END(NAME, T, T, SAME, )
WRAPPED(i8, int8_t, uint8_t)
WRAPPED(i16, int16_t, uint16_t)
WRAPPED(i32, int32_t, uint32_t)
WRAPPED(i64, int64_t, uint64_t)
TYPE(f32, float, float, SAME, SAME, *(float)factor, LOWER_REAL, HIGHER_REAL, MULTIPLY)
TYPE(f64, double, double, SAME, SAME, *factor, LOWER_REAL, HIGHER_REAL, MULTIPLY)

/* Half types are added in float. */
static inline float bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static inline uint32_t float_to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float from_bf16(uint16_t h) { return bits_to_float((uint32_t)h << 16); }
static inline uint16_t to_bf16(float x) {
    uint32_t bits = float_to_bits(x);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uint32_t nan = (bits >> 16) | 0x40;
    return (bits & 0x7fffffff) > 0x7f800000 ? nan : rounded;
}

/* One exact multiplication moves a half into the exponent range of float. */
static inline float from_f16(uint16_t h) {
    uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13;
    float x = bits_to_float(magnitude) * 0x1p112f;
    uint32_t special = (h & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
    return bits_to_float(float_to_bits(x) | special | (uint32_t)(h & 0x8000) << 16);
}
static inline uint16_t to_f16(float x) {
    uint32_t bits = float_to_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    /* A subnormal half: adding 1/2 puts its bits, rounded to even, into the lowest bits. */
    uint32_t tiny = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000;
    uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    uint32_t finite = magnitude < 0x38800000 ? tiny : normal;
    return sign | (magnitude >= 0x477ff000 ? special : finite);
}
TYPE(bf16, uint16_t, float, from_bf16, to_bf16, *(float)factor, LOWER_REAL, HIGHER_REAL, MULTIPLY)
TYPE(f16, uint16_t, float, from_f16, to_f16, *(float)factor, LOWER_REAL, HIGHER_REAL, MULTIPLY)

/* A target may be a source: no element is read after it was written. */
#define PAIR(NAME, T)                                                                           \
    FAST void NAME##_pair(const void *a, double pa, const void *b, double pb, void *x, void *y, \
                          int64_t count, double factor) {                                       \
        const T *first = a, *second = b, p = pa, q = pb, r = factor;                            \
        T *out = x, *other = y;                                                                 \
        _Pragma("GCC ivdep") for (int64_t i = 0; i < count; i++)                                \
            out[i] = other[i] = (first[i] * p + second[i] * q) * r;                             \
    }
PAIR(f32, float)
PAIR(f64, double)

/* Complex numbers are pairs of reals: everything except the product treats them as such. GCC 12
 * contracts the product to fused multiply-adds if the processor has them, even with
 * -ffp-contract=off, which gave ranks on different machines different bits; hence volatile. */
#define COMPLEX(NAME, R, REAL)                                                                  \
    static void NAME##_begin(void *s, const void *x, int64_t count, double factor) {            \
        REAL##_begin(s, x, 2 * count, factor);                                                  \
    }                                                                                           \
    static void NAME##_sum(void *s, const void *x, int64_t count, double factor) {              \
        REAL##_sum(s, x, 2 * count, factor);                                                    \
    }                                                                                           \
    static void NAME##_end(void *x, const void *s, int64_t count, double factor) {              \
        REAL##_end(x, s, 2 * count, factor);                                                    \
    }                                                                                           \
    static void NAME##_product(void *s, const void *x, int64_t count, double factor) {          \
        R *restrict sum = s;                                                                    \
        const R *restrict in = x;                                                               \
        for (int64_t i = 0; i < 2 * count; i += 2) {                                            \
            R re = in[i] * (R)factor, im = in[i + 1] * (R)factor;                               \
            volatile R straight[2] = {sum[i] * re, sum[i + 1] * im};                            \
            volatile R crossed[2] = {sum[i] * im, sum[i + 1] * re};                             \
            sum[i] = straight[0] - straight[1];                                                 \
            sum[i + 1] = crossed[0] + crossed[1];                                               \
        }                                                                                       \
    }
COMPLEX(c64, float, f32)
COMPLEX(c128, double, f64)

#define ROW_OF(NAME, BYTES, PAIR_OF, JOIN)                                                      \
    {BYTES,                                                                                     \
     NAME##_begin,                                                                              \
     {NAME##_sum, NAME##_min, NAME##_max, NAME##_product},                                      \
     NAME##_end,                                                                                \
     PAIR_OF,                                                                                   \
     JOIN}
#define ROW(NAME, BYTES) ROW_OF(NAME, BYTES, 0, NAME##_sum)
#define ROW_HALF(NAME) ROW_OF(NAME, 2, 0, f32_sum)
#define ROW_PAIR(NAME, BYTES) ROW_OF(NAME, BYTES, NAME##_pair, NAME##_sum)
#define ROW_COMPLEX(NAME, BYTES)                                                                \
    {BYTES, NAME##_begin, {NAME##_sum, 0, 0, NAME##_product}, NAME##_end, 0, NAME##_sum}

/* In the order of TYPES in kernel.py. */
static const type_t TYPES[] = {
    ROW(u8, 1),  ROW(u16, 2), ROW(u32, 4),  ROW(u64, 8), ROW(i8, 1),          ROW(i16, 2),
    ROW(i32, 4), ROW(i64, 8), ROW_HALF(f16), ROW_HALF(bf16), ROW_PAIR(f32, 4),   ROW_PAIR(f64, 8),
    ROW_COMPLEX(c64, 8), ROW_COMPLEX(c128, 16),
};

/* ---- copies ---------------------------------------------------------------------------------- */

/* Copy with non-temporal stores: overwritten lines need not be read first, and another rank is the
 * next to read them. */
void hvd_copy(char *target, const char *source, int64_t bytes) {
    if (bytes == 0) return; /* memcpy does not allow null pointers */
#if defined(__x86_64__)
    int64_t head = -(uintptr_t)target % 64;
    if (bytes > head + 64) {
        memcpy(target, source, head);
        int64_t end = bytes - (bytes - head) % 64;
        for (int64_t at = head; at < end; at += 64)
            for (int64_t part = at; part < at + 64; part += 16)
                _mm_stream_si128((__m128i *)(target + part),
                                 _mm_loadu_si128((const __m128i *)(source + part)));
        _mm_sfence();
        target += end, source += end, bytes -= end;
    }
#endif
    memcpy(target, source, bytes);
}

/* ---- reduction ------------------------------------------------------------------------------ */

typedef struct {
    const char *source;
    char *data;
    int64_t count;
} chunk_t;

typedef struct {
    team_t *team;
    const char *source; /* elements of this rank */
    char *data;         /* memory for the result; may equal source */
    char **copies;      /* data of every rank as mapped here, if shared */
    uint64_t location;  /* copies are valid if it is equal on all ranks; or 0 */
    int64_t count;      /* with pieces the size of the shared data in bytes */
    int32_t type, op;   /* as in TYPES; 0 to 3 for sum, min, max, product */
    double prescale, postscale;
    int32_t owners;     /* number of ranks that own a slice */
    int32_t stage;      /* progress; initially 0, kept between calls */
    int64_t chunk;
    uint64_t ballot[2]; /* of a vote */
    const chunk_t *pieces; /* tensors that are reduced together */
    int64_t piece_count;
    int64_t piece, offset; /* progress: elements before these are reduced */
} task_t;

enum { START, STAGED_SMALL, OFFERED, ADDED, PIPELINE, VOTED, SHOWN_PIECES };
enum { AGAIN, DONE, AGREED, DIFFERENT };

typedef struct {
    const char *const *pointers;
    int32_t count;
} sources_t;

typedef struct {
    char *const *pointers;
    int32_t count;
} targets_t;

/* sum = sources[0] * prescales[0] + sources[1] * prescales[1] + ..., along a binary tree,
 * neighbours first. Rounding errors grow with the logarithm of the number of ranks, and the sum
 * over N ranks, each with the sum of V / N shards, is bitwise equal to the sum of V shards (powers
 * of two). */
static void add_tree(const type_t *type, double *sum, const char *const *sources,
                     const double *prescales, int32_t count, int64_t offset, int64_t length) {
    if (count == 1) {
        type->begin(sum, sources[0] + offset, length, prescales[0]);
        return;
    }
    int32_t half = 1;
    while (2 * half < count) half *= 2;
    add_tree(type, sum, sources, prescales, half, offset, length);
    if (count - half == 1) {
        type->fold[0](sum, sources[half] + offset, length, prescales[half]);
        return;
    }
    double other[2 * BLOCK];
    add_tree(type, other, sources + half, prescales + half, count - half, offset, length);
    type->join(sum, other, length, 1.0);
}

/* targets[k] = postscale * (sources[0] * prescales[0] op sources[1] * prescales[1] op ...) */
static void combine(const task_t *task, sources_t sources, const double *prescales,
                    targets_t targets, double postscale, int64_t count) {
    const type_t *type = &TYPES[task->type];
    fold_t fold = type->fold[task->op];
    if (type->pair && task->op == 0 && sources.count == 2 && targets.count <= 2) {
        type->pair(sources.pointers[0], prescales[0], sources.pointers[1], prescales[1],
                   targets.pointers[0], targets.pointers[targets.count - 1], count, postscale);
        return;
    }
    double sum[2 * BLOCK]; /* room for complex128 */
    for (int64_t start = 0; start < count; start += BLOCK) {
        int64_t length = count - start < BLOCK ? count - start : BLOCK;
        int64_t offset = start * type->itemsize;
        if (task->op == 0) {
            add_tree(type, sum, sources.pointers, prescales, sources.count, offset, length);
        } else {
            type->begin(sum, sources.pointers[0] + offset, length, prescales[0]);
            for (int32_t k = 1; k < sources.count; k++)
                fold(sum, sources.pointers[k] + offset, length, prescales[k]);
        }
        for (int32_t k = 0; k < targets.count; k++)
            type->end(targets.pointers[k] + offset, sum, length, postscale);
    }
}

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

/* Small data: each rank stages all of its elements, and adds those of all ranks. */
static void add_small(const task_t *task) {
    const team_t *team = task->team;
    const char *sources[team->size];
    double prescales[team->size];
    for (int32_t rank = 0; rank < team->size; rank++) {
        sources[rank] = staged(team, rank, team->turn);
        prescales[rank] = team->slots[rank]->offer[team->turn & 1].prescale;
    }
    char *target = task->data;
    combine(task, (sources_t){sources, team->size}, prescales, (targets_t){&target, 1},
            task->postscale, task->count);
}

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
            combine(task, (sources_t){sources, team->size}, prescales, (targets_t){&target, 1},
                    task->postscale, count);
        for (int32_t rank = 0; rank < team->size; rank++) sources[rank] += count * itemsize;
        room -= count, task->offset += count;
        if (task->offset == task->pieces[task->piece].count) task->piece++, task->offset = 0;
    }
}

/* Set the pointers to this rank's slice of every copy; return its number of elements. */
static int64_t slice_of_copies(const task_t *task, char **slices) {
    const team_t *team = task->team;
    int64_t start = slice_start(task, task->count, team->rank);
    for (int32_t rank = 0; rank < team->size; rank++)
        slices[rank] = task->copies[rank] + start * TYPES[task->type].itemsize;
    return slice_start(task, task->count, team->rank + 1) - start;
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
        combine(task, all, prescales, (targets_t){slices, team->size}, task->postscale, count);
    else
        combine(task, all, prescales, (targets_t){&slices[team->rank], 1}, task->postscale, count);
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
    combine(task, (sources_t){&own, 1}, &one, (targets_t){slices, team->size}, task->postscale,
            count);
}

static int all_in_reach(const task_t *task) {
    const team_t *team = task->team;
    for (int32_t rank = 0; rank < team->size; rank++)
        if (team->slots[rank]->offer[team->turn & 1].location != task->location) return 0;
    return task->location != 0;
}

/* Private data pass through the staging areas in chunks. In turn k a rank stages the other
 * ranks' slices of chunk k, adds its slice of chunk k - 1, and fetches the others' sums of chunk
 * k - 2. */
static int64_t chunk_count(const task_t *task) {
    int64_t bytes = task->count * TYPES[task->type].itemsize;
    return (bytes + task->team->chunk_bytes - 1) / task->team->chunk_bytes;
}

static chunk_t chunk_at(const task_t *task, int64_t number) {
    int64_t most = task->team->chunk_bytes / TYPES[task->type].itemsize, start = number * most;
    int64_t left = task->count - start;
    int64_t offset = start * TYPES[task->type].itemsize;
    return (chunk_t){task->source + offset, task->data + offset, left < most ? left : most};
}

static void show_chunk(const task_t *task, int64_t number) {
    const team_t *team = task->team;
    int64_t itemsize = TYPES[task->type].itemsize;
    chunk_t chunk = chunk_at(task, number);
    char *area = staged(team, team->rank, team->turn);
    int64_t start = slice_start(task, chunk.count, team->rank) * itemsize;
    int64_t end = slice_start(task, chunk.count, team->rank + 1) * itemsize;
    memcpy(area, chunk.source, start);
    memcpy(area + end, chunk.source + end, chunk.count * itemsize - end);
}

static void add_chunk(const task_t *task, int64_t number) {
    const team_t *team = task->team;
    int64_t itemsize = TYPES[task->type].itemsize;
    uint32_t turn = team->turn - 1;
    chunk_t chunk = chunk_at(task, number);
    int64_t start = slice_start(task, chunk.count, team->rank);
    int64_t count = slice_start(task, chunk.count, team->rank + 1) - start;
    const char *sources[team->size];
    char *targets[2];
    double prescales[team->size];
    for (int32_t rank = 0; rank < team->size; rank++) {
        sources[rank] = staged(team, rank, turn) + start * itemsize;
        prescales[rank] = team->slots[rank]->offer[turn & 1].prescale;
    }
    sources[team->rank] = chunk.source + start * itemsize;
    targets[0] = chunk.data + start * itemsize;
    targets[1] = staged_result(team, team->rank, turn);
    combine(task, (sources_t){sources, team->size}, prescales, (targets_t){targets, 2},
            task->postscale, count);
}

static void fetch_chunk(const task_t *task, int64_t number) {
    const team_t *team = task->team;
    int64_t itemsize = TYPES[task->type].itemsize;
    chunk_t chunk = chunk_at(task, number);
    for (int32_t rank = 0; rank < team->size; rank++) {
        if (rank == team->rank) continue;
        int64_t start = slice_start(task, chunk.count, rank) * itemsize;
        int64_t end = slice_start(task, chunk.count, rank + 1) * itemsize;
        memcpy(chunk.data + start, staged_result(team, rank, team->turn - 2), end - start);
    }
}

static void offer(const task_t *task) {
    team_t *team = task->team;
    team->slots[team->rank]->offer[team->turn & 1].location = task->location;
    team->slots[team->rank]->offer[team->turn & 1].prescale = task->prescale;
}

static void start_chunk(task_t *task) {
    int64_t chunks = chunk_count(task), k = task->chunk;
    offer(task);
    if (k >= 2) fetch_chunk(task, k - 2);
    if (k >= 1 && k <= chunks) add_chunk(task, k - 1);
    if (k < chunks) show_chunk(task, k);
}

static int32_t reduce(task_t *task, int64_t timeout) {
    team_t *team = task->team;
    int64_t bytes = task->count * TYPES[task->type].itemsize;
    if (task->stage == START) {
        int small = bytes <= team->chunk_bytes / 4;
        offer(task);
        /* The source of 0 bytes may be null, which memcpy does not allow. */
        if (small && bytes) memcpy(staged(team, team->rank, team->turn), task->source, bytes);
        task->stage = small ? STAGED_SMALL : OFFERED;
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

/* Vote on a task of at most a quarter of a chunk, with this rank's elements beside the vote. If all
 * ranks do the same, it is DONE after one meeting. Ranks that vote by a maximum of values see the
 * ballot three times, as they send it; if they agree, the task has yet to be run (AGREED). */
static void cast_vote(task_t *task) {
    team_t *team = task->team;
    slot_t *own = team->slots[team->rank];
    for (int i = 0; i < 6; i++) own->offer[team->turn & 1].values[i] = task->ballot[i & 1];
    own->offer[team->turn & 1].carries = 1;
    offer(task);
    memcpy(staged(team, team->rank, team->turn), task->source,
           task->count * TYPES[task->type].itemsize);
    task->stage = VOTED;
    arrive(team);
}

static int32_t vote(task_t *task, int64_t timeout) {
    team_t *team = task->team;
    if (task->stage == START) cast_vote(task);
    if (!wait_all(team, timeout)) return AGAIN;
    int equal = 1, carried = 1;
    for (int32_t rank = 0; rank < team->size; rank++) {
        slot_t *theirs = team->slots[rank];
        equal &= !memcmp(theirs->offer[team->turn & 1].values, task->ballot, sizeof task->ballot);
        carried &= theirs->offer[team->turn & 1].carries == 1;
    }
    if (equal && carried) add_small(task);
    team->turn++;
    return !equal ? DIFFERENT : carried ? DONE : AGREED;
}

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

/* Reduce pieces, whose sizes are equal on all ranks, by way of shared data. */
int32_t hvd_reduce_pieces(task_t *task, int64_t timeout) {
    return in_default_mode(reduce_pieces, task, timeout);
}

int32_t hvd_vote(task_t *task, int64_t timeout) { return in_default_mode(vote, task, timeout); }

/* The two phases of a hierarchical reduction of shared data. First this rank's slice of its own
 * copy becomes the sum over the node; */
int32_t hvd_add(task_t *task, int64_t timeout) { return in_default_mode(add, task, timeout); }

/* after the reduction between nodes, every copy of the slice becomes the result. */
int32_t hvd_spread(task_t *task, int64_t timeout) { return in_default_mode(spread, task, timeout); }

/* Return the start of a rank's slice, in elements. */
int64_t hvd_slice_start(const task_t *task, int32_t rank) {
    return slice_start(task, task->count, rank);
}


/* ---- calls from Python, without the cost of ctypes ---------------------------------------- */

#if !defined(HVD_WITHOUT_PYTHON) && __has_include(<Python.h>)
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Peers usually arrive within so many looks. To release the GIL first would take longer, if other
 * threads wait for it. */
enum { LOOKS = 128 };

static int find_all(const team_t *team) {
    for (int looks = 0; looks < LOOKS && team->spin_nanoseconds; looks++) {
        int32_t rank = 0;
        while (rank < team->size &&
               !is_behind(atomic_load_explicit(&team->slots[rank]->phase, memory_order_relaxed),
                          team->phase))
            rank++;
        if (rank == team->size) return 1;
        relax();
    }
    return 0;
}

static PyObject *wait_for_verdict(task_t *task, int64_t timeout) {
    int32_t verdict;
    Py_BEGIN_ALLOW_THREADS
    verdict = hvd_vote(task, timeout);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(verdict);
}

static PyObject *call_vote(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 5 || !PyBytes_Check(args[1]) || PyBytes_GET_SIZE(args[1]) != 16) {
        PyErr_SetString(PyExc_TypeError, "vote(task, ballot of 16 bytes, source, data, timeout)");
        return NULL;
    }
    task_t *task = PyLong_AsVoidPtr(args[0]);
    const char *source = PyLong_AsVoidPtr(args[2]);
    char *data = PyLong_AsVoidPtr(args[3]);
    int64_t timeout = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred()) return NULL;
    memcpy(task->ballot, PyBytes_AS_STRING(args[1]), sizeof task->ballot);
    task->source = source, task->data = data;
    cast_vote(task);
    return find_all(task->team) ? PyLong_FromLong(hvd_vote(task, 0))
                                : wait_for_verdict(task, timeout);
}

static PyObject *call_resume(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "resume(task, timeout)");
        return NULL;
    }
    task_t *task = PyLong_AsVoidPtr(args[0]);
    int64_t timeout = PyLong_AsLongLong(args[1]);
    return PyErr_Occurred() ? NULL : wait_for_verdict(task, timeout);
}

static PyMethodDef CALLS[] = {
    {"vote", (PyCFunction)(void (*)(void))call_vote, METH_FASTCALL, "Vote on a task."},
    {"resume", (PyCFunction)(void (*)(void))call_resume, METH_FASTCALL, "Wait for a vote again."},
    {0},
};

static PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "_node_kernel", .m_size = -1, .m_methods = CALLS};

PyMODINIT_FUNC PyInit__node_kernel(void) { return PyModule_Create(&MODULE); }
#endif
