/* An optimizer's step on segments of parameters in one pass over memory: sum the gradients of a
 * node's ranks, update weights and state, and write the weights into every rank's copy.
 *
 * Why C: a sum, a step and a copy by themselves read and write memory three times, and torch's
 * default optimizers once for each term. Sums have the bits of node_kernel.c, and updates those of
 * torch's optimizers, which multiply and add in one operation in some places and not in others, the
 * fused ones otherwise in the last elements of a tensor.
 *
 * There is no synchronization here: gradients and weights belong to the caller meanwhile. The
 * second half of the file is the same for both types of elements: the first half includes it.
 */

#if !defined(T)

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../compiled/kernel.h"

EMBED_TEXT;

#define LINE 64
#define BLOCK 512 /* elements that stay in the L1 cache from their sum to the copies */
#define ROOM (BLOCK + LINE)

enum { SGD, ADAM, ADAMW };

/* The settings of a parameter group. */
typedef struct {
    double lr, weight_decay;
    double momentum, dampening;  /* of SGD */
    double beta1, beta2, epsilon; /* of Adam and AdamW */
    int32_t kind, maximize;
    int32_t nesterov, amsgrad;
} rule_t;

/* Elements of a parameter that this rank updates. */
typedef struct {
    char *const *gradients; /* of each rank; that of this rank may be the sum */
    char *const *weights;   /* copies, that of this rank first */
    char *state[3];         /* momentum; or both means, and the largest mean with amsgrad */
    float *steps;           /* number of steps so far, which Adam counts */
    double squares;         /* result of hvd_sum: sum of the squares of the summed gradient */
    int64_t count;
    int64_t rest;           /* elements at the end that torch updates one by one */
    int32_t rule;           /* number of its rule */
    int32_t is_double;
    int32_t skipped;        /* whether no rank has a gradient */
    int32_t begins;         /* whether there is no state yet */
} segment_t;

/* vmsSqrt and vmdSqrt of MKL, which do not round as the processor's instruction does. */
typedef void (*root_t)(int64_t count, const void *from, void *to, int64_t mode);
#define ROOT_MODE 0x140102 /* as torch calls it: accurate, subnormal numbers kept, no errors */

typedef struct {
    segment_t *segments;
    int64_t segment_count;
    const rule_t *rules;
    const double *prescales; /* factor of each gradient before the sum */
    double postscale;        /* of the sum */
    double factor;           /* of the scaled sum, which clipping sets */
    int32_t gradient_count;  /* of each segment; 1 if that of this rank is the sum */
    int32_t copies;          /* of the weights of each segment */
    int32_t own;             /* number of this rank's gradient */
    int32_t contracts;       /* whether torch multiplies and adds in one operation */
    int32_t counted;         /* whether hvd_count() has counted this step */
    int32_t powers;          /* whether torch takes roots of numbers as powers, as Python does */
    root_t roots[2];         /* torch's own square roots of floats and doubles, or null */
} update_t;

/* What a step needs to know about its elements. */
typedef struct {
    const rule_t *rule;
    double step_size, correction; /* of Adam: lr / (1 - beta1^t), sqrt(1 - beta2^t) */
    int32_t begins, contracts;
    root_t root;
} moment_t;

/* ---- parts that do not depend on the type of elements --------------------------------------- */

/* Return the number of elements of the next block, after which lines of the copies begin. */
static int64_t block_length(const char *weights, int64_t itemsize, int64_t start, int64_t end) {
    int64_t head = (int64_t)(-(uintptr_t)(weights + start * itemsize) % LINE) / itemsize;
    int64_t left = end - start;
    return left < BLOCK + head ? left : BLOCK + head;
}

/* Return what depends on the number of steps, after counting this one. */
static moment_t begin_step(const update_t *update, const segment_t *segment) {
    const rule_t *rule = &update->rules[segment->rule];
    moment_t moment = {.rule = rule, .begins = segment->begins, .contracts = update->contracts,
                       .root = update->roots[segment->is_double]};
    if (rule->kind != SGD) {
        if (!update->counted) *segment->steps += 1;
        moment.step_size = rule->lr / (1 - pow(rule->beta1, *segment->steps));
        double square = 1 - pow(rule->beta2, *segment->steps);
        moment.correction = update->powers ? pow(square, 0.5) : sqrt(square);
    }
    return moment;
}

#define T float
#define X(name) name##_float
#define FUSED __builtin_fmaf
#define ROOT __builtin_sqrtf
#include "update_kernel.c"
#undef T
#undef X
#undef FUSED
#undef ROOT
#define T double
#define X(name) name##_double
#define FUSED __builtin_fma
#define ROOT __builtin_sqrt
#include "update_kernel.c"

/* ---- calls ------------------------------------------------------------------------------------ */

/* Not inlined, so that the arithmetic stays between the two mode changes. */
static __attribute__((noinline)) void update_all(const update_t *update) {
    for (int64_t i = 0; i < update->segment_count; i++) {
        const segment_t *segment = &update->segments[i];
        if (segment->skipped) continue;
        moment_t moment = begin_step(update, segment);
        if (segment->is_double) update_double(update, segment, &moment);
        else update_float(update, segment, &moment);
    }
    fence_copies();
}

static __attribute__((noinline)) void sum_all(const update_t *update) {
    for (int64_t i = 0; i < update->segment_count; i++) {
        segment_t *segment = &update->segments[i];
        segment->squares = 0;
        if (segment->skipped) continue;
        if (segment->is_double) segment->squares = sum_double(update, segment);
        else segment->squares = sum_float(update, segment);
    }
}

/* Take the step on all segments that are not skipped. */
void hvd_update(const update_t *update) {
    uint64_t kept = enter_default_mode();
    update_all(update);
    leave_default_mode(kept);
}

/* Count a step of all segments that are not skipped, before threads take it on parts of them. */
void hvd_count(const update_t *update) {
    for (int64_t i = 0; i < update->segment_count; i++) {
        const segment_t *segment = &update->segments[i];
        if (!segment->skipped && update->rules[segment->rule].kind != SGD) *segment->steps += 1;
    }
}

/* Overwrite this rank's gradients with the scaled sums, unless there is one already, and set
 * `squares` of each segment. */
void hvd_sum(const update_t *update) {
    uint64_t kept = enter_default_mode();
    sum_all(update);
    leave_default_mode(kept);
}

EMBED_END;

#else /* ---- for each type of elements ------------------------------------------------------- */

/* In place, and added up. */
FAST void X(scale)(T *x, T factor, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] *= factor;
}

FAST void X(add)(T *restrict sum, const T *restrict x, T factor, int64_t count) {
    for (int64_t i = 0; i < count; i++) sum[i] += x[i] * factor;
}

FAST void X(pair)(T *restrict sum, const T *restrict x, T p, const T *restrict y, T q, T factor,
                  int64_t count) {
    for (int64_t i = 0; i < count; i++) sum[i] = (x[i] * p + y[i] * q) * factor;
}

/* sum = x[0] * prescales[0] + x[1] * prescales[1] + ..., along a binary tree as in node_kernel.c. */
static void X(add_tree)(T *sum, char *const *gradients, const double *prescales, int32_t ranks,
                        int64_t start, int64_t count) {
    if (ranks == 1) {
        memcpy(sum, (const T *)gradients[0] + start, count * sizeof(T));
        X(scale)(sum, prescales[0], count);
        return;
    }
    int32_t half = 1;
    while (2 * half < ranks) half *= 2;
    X(add_tree)(sum, gradients, prescales, half, start, count);
    if (ranks - half == 1) {
        X(add)(sum, (const T *)gradients[half] + start, prescales[half], count);
        return;
    }
    T other[ROOM];
    X(add_tree)(other, gradients + half, prescales + half, ranks - half, start, count);
    X(add)(sum, other, 1, count);
}

/* Set the gradient of a block: the scaled sum over the ranks, or the only one as it is. */
static void X(combine)(const update_t *update, const segment_t *segment, T *sum, int64_t start,
                       int64_t count) {
    char *const *from = segment->gradients;
    const double *scales = update->prescales;
    if (update->gradient_count == 1) {
        memcpy(sum, (const T *)from[update->own] + start, count * sizeof(T));
    } else if (update->gradient_count == 2) {
        X(pair)(sum, (const T *)from[0] + start, scales[0], (const T *)from[1] + start, scales[1],
                update->postscale, count);
    } else {
        X(add_tree)(sum, from, scales, update->gradient_count, start, count);
        X(scale)(sum, update->postscale, count);
    }
}

/* a * b + c, in one operation where torch's compiler has contracted it. */
INLINE T X(fold)(T a, T b, T c, int contracts) { return contracts ? FUSED(a, b, c) : a * b + c; }

/* g += decay * p, of the gradient that is minimized. */
INLINE void X(decay)(const rule_t *rule, T *restrict g, const T *restrict p, int64_t count,
                     int contracts) {
    T decay = rule->kind == ADAMW ? 0 : rule->weight_decay;
    if (rule->maximize)
        for (int64_t i = 0; i < count; i++) g[i] = -g[i];
    if (decay != 0)
        for (int64_t i = 0; i < count; i++) g[i] = X(fold)(p[i], decay, g[i], contracts);
}

/* Where a block's gradients are: their sum, or those of two ranks, which are added meanwhile. */
typedef struct {
    const T *sum, *first, *second;
    T p, q, factor;
} X(source_t);

INLINE T X(gradient)(const X(source_t) *from, int64_t i, int two) {
    if (two) return (from->first[i] * from->p + from->second[i] * from->q) * from->factor;
    return from->sum[i];
}

/* `alone` is set for elements that torch updates one by one. */
INLINE void X(sgd)(const moment_t *moment, const X(source_t) *source, T *restrict p, T *restrict m,
                   int64_t count, int alone, int contracts, int two) {
    const X(source_t) from = *source;
    const rule_t *rule = moment->rule;
    T momentum = rule->momentum, kept = 1 - rule->dampening, rate = -rule->lr;
    int begins = moment->begins, nesterov = rule->nesterov;
    if (rule->momentum == 0) {
        for (int64_t i = 0; i < count; i++)
            p[i] = X(fold)(X(gradient)(&from, i, two), rate, p[i], contracts);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        T g = X(gradient)(&from, i, two), mean;
        if (begins) mean = g;
        else if (alone) mean = X(fold)(m[i], momentum, g * kept, contracts);
        else mean = X(fold)(g, kept, m[i] * momentum, contracts);
        m[i] = mean;
        T direction = nesterov ? X(fold)(mean, momentum, g, contracts) : mean;
        p[i] = X(fold)(direction, rate, p[i], contracts);
    }
}

/* MKL's roots take five times as long for zeros, which units that are never active leave. */
INLINE void X(roots)(root_t root, const T *restrict x, T *restrict roots, int64_t count,
                     int64_t zeros) {
    if (zeros == 0) {
        root(count, x, roots, ROOT_MODE);
        return;
    }
    for (int64_t i = 0; i < count; i++) roots[i] = x[i] == 0 ? 1 : x[i];
    if (zeros < count) root(count, roots, roots, ROOT_MODE);
    for (int64_t i = 0; i < count; i++) roots[i] = x[i] == 0 ? x[i] : roots[i];
}

INLINE void X(adam)(const moment_t *moment, const X(source_t) *source, T *restrict p, T *restrict m,
                    T *restrict v, T *restrict largest, int64_t count, int alone, int amsgrad,
                    int contracts, int two, int own_root) {
    const X(source_t) from = *source;
    const rule_t *rule = moment->rule;
    T weight = 1 - rule->beta1, share = 1 - rule->beta2, beta2 = rule->beta2;
    T correction = moment->correction, epsilon = rule->epsilon, rate = -moment->step_size;
    T kept = rule->kind == ADAMW ? 1 - rule->lr * rule->weight_decay : 1;
    int small = weight < (T)0.5;
    T part = small ? weight : weight - 1;
    T roots[ROOM];
    int32_t zeros = 0;
    for (int64_t i = 0; i < count; i++) {
        T g = X(gradient)(&from, i, two), square;
        m[i] = X(fold)(part, g - m[i], small ? m[i] : g, contracts);
        if (alone) square = X(fold)(v[i], beta2, share * g * g, contracts);
        else square = X(fold)(share * g, g, v[i] * beta2, contracts);
        v[i] = square;
        if (amsgrad) {
            square = square > largest[i] || square != square ? square : largest[i];
            largest[i] = square;
        }
        if (own_root) zeros += square == 0;
        else p[i] = p[i] * kept + rate * m[i] / (ROOT(square) / correction + epsilon);
    }
    if (!own_root) return;
    X(roots)(moment->root, amsgrad ? largest : v, roots, count, zeros);
    for (int64_t i = 0; i < count; i++)
        p[i] = p[i] * kept + rate * m[i] / (roots[i] / correction + epsilon);
}

static T *X(part)(char *state, int64_t start) { return state ? (T *)state + start : 0; }

/* Update a block, of which `from` is the gradient. */
INLINE void X(step)(const moment_t *moment, const X(source_t) *from, T *p, char *const *state,
                    int64_t start, int64_t count, int alone, int contracts, int two) {
    T *m = X(part)(state[0], start), *v = X(part)(state[1], start);
    T *largest = X(part)(state[2], start);
    if (moment->rule->kind == SGD) X(sgd)(moment, from, p, m, count, alone, contracts, two);
    else if (moment->root) {
        if (moment->rule->amsgrad)
            X(adam)(moment, from, p, m, v, largest, count, 0, 1, contracts, 0, 1);
        else X(adam)(moment, from, p, m, v, 0, count, 0, 0, contracts, 0, 1);
    } else if (moment->rule->amsgrad)
        X(adam)(moment, from, p, m, v, largest, count, alone, 1, contracts, two, 0);
    else X(adam)(moment, from, p, m, v, 0, count, alone, 0, contracts, two, 0);
}

FAST void X(step_on_sum)(const moment_t *moment, const X(source_t) *from, T *p, char *const *state,
                         int64_t start, int64_t count, int alone) {
    if (moment->contracts) X(step)(moment, from, p, state, start, count, alone, 1, 0);
    else X(step)(moment, from, p, state, start, count, alone, 0, 0);
}

FAST void X(step_on_two)(const moment_t *moment, const X(source_t) *from, T *p, char *const *state,
                         int64_t start, int64_t count, int alone) {
    if (moment->contracts) X(step)(moment, from, p, state, start, count, alone, 1, 1);
    else X(step)(moment, from, p, state, start, count, alone, 0, 1);
}

/* Set the gradient that is minimized of a block: the sum with the decay of the weights. */
FAST void X(prepare)(const update_t *update, const rule_t *rule, T *g, const T *p, int64_t count) {
    if (update->factor != 1)
        for (int64_t i = 0; i < count; i++) g[i] *= (T)update->factor;
    if (update->contracts) X(decay)(rule, g, p, count, 1);
    else X(decay)(rule, g, p, count, 0);
}

static void X(update)(const update_t *update, const segment_t *segment, const moment_t *moment) {
    T g[ROOM], *own = (T *)segment->weights[0];
    const rule_t *rule = moment->rule;
    int decays = rule->weight_decay != 0 && rule->kind != ADAMW;
    int plain = update->factor == 1 && !decays && !rule->maximize;
    int two = update->gradient_count == 2 && plain && !moment->root;
    int one = update->gradient_count == 1 && plain;
    int64_t together = segment->count - segment->rest, count;
    for (int64_t start = 0; start < segment->count; start += count) {
        int alone = start >= together;
        count = block_length((char *)own, sizeof(T), start, alone ? segment->count : together);
        if (two) {
            X(source_t) from = {0, (const T *)segment->gradients[0] + start,
                                (const T *)segment->gradients[1] + start, update->prescales[0],
                                update->prescales[1], update->postscale};
            X(step_on_two)(moment, &from, own + start, segment->state, start, count, alone);
        } else if (one) {
            X(source_t) from = {.sum = (const T *)segment->gradients[update->own] + start};
            X(step_on_sum)(moment, &from, own + start, segment->state, start, count, alone);
        } else {
            X(source_t) from = {.sum = g};
            X(combine)(update, segment, g, start, count);
            X(prepare)(update, rule, g, own + start, count);
            X(step_on_sum)(moment, &from, own + start, segment->state, start, count, alone);
        }
        for (int32_t copy = 1; copy < update->copies; copy++)
            copy_around_caches(segment->weights[copy] + start * sizeof(T), (char *)(own + start),
                               count * sizeof(T));
    }
}

/* The order of these additions does not depend on the instruction set. */
FAST double X(squares)(const T *x, int64_t count) {
    double sums[16] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (int lane = 0; lane < 16; lane++) sums[lane] += (double)x[i + lane] * x[i + lane];
    for (; i < count; i++) sums[0] += (double)x[i] * x[i];
    for (int lane = 0; lane < 16; lane++) sum += sums[lane];
    return sum;
}

static double X(sum)(const update_t *update, const segment_t *segment) {
    T g[ROOM];
    double squares = 0;
    for (int64_t start = 0, count; start < segment->count; start += count) {
        count = segment->count - start < BLOCK ? segment->count - start : BLOCK;
        X(combine)(update, segment, g, start, count);
        if (update->gradient_count > 1)
            memcpy((T *)segment->gradients[update->own] + start, g, count * sizeof(T));
        squares += X(squares)(g, count);
    }
    return squares;
}
#endif
