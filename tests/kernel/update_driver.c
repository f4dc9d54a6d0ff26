/* Steps on segments of all kinds, in memory of exactly their size, for sanitizers to watch. */

#include "update_kernel.c"

#include <stdlib.h>

enum { RANKS = 5, SEGMENTS = 4 };
static const int64_t COUNTS[SEGMENTS] = {1, 15, 513, 2600};

static uint64_t state = 1;

/* Return a number between -1 and 1. */
static double chance(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)state / 9223372036854775808.0;
}

static char *drawn(int64_t count, int is_double) {
    char *memory = malloc(count * (is_double ? 8 : 4));
    for (int64_t i = 0; i < count; i++) {
        if (is_double) ((double *)memory)[i] = chance();
        else ((float *)memory)[i] = (float)chance();
    }
    return memory;
}

static void try_rule(rule_t rule, int32_t ranks, int is_double, int contracts) {
    segment_t segments[SEGMENTS];
    char *gradients[SEGMENTS][RANKS], *weights[SEGMENTS][RANKS];
    float steps[SEGMENTS] = {0};
    double prescales[RANKS] = {1, 0.5, 2, 1, 0};
    for (int s = 0; s < SEGMENTS; s++) {
        segments[s] = (segment_t){.gradients = gradients[s], .weights = weights[s]};
        segments[s].steps = &steps[s], segments[s].count = COUNTS[s];
        segments[s].rest = COUNTS[s] % 8, segments[s].is_double = is_double;
        segments[s].skipped = s == 2, segments[s].begins = s == 3;
        for (int rank = 0; rank < ranks; rank++) {
            gradients[s][rank] = drawn(COUNTS[s], is_double);
            weights[s][rank] = drawn(COUNTS[s], is_double);
        }
        int arrays = rule.kind != SGD ? 2 + rule.amsgrad : rule.momentum != 0;
        for (int array = 0; array < arrays; array++)
            segments[s].state[array] = calloc(COUNTS[s], is_double ? 8 : 4);
    }
    update_t update = {segments, SEGMENTS, &rule, prescales, 0.25, 1, ranks, ranks, 0, contracts};
    hvd_update(&update);
    hvd_sum(&update);
    update.gradient_count = 1, update.factor = 0.5;
    hvd_update(&update);
    for (int s = 0; s < SEGMENTS; s++) {
        for (int rank = 0; rank < ranks; rank++) {
            free(gradients[s][rank]);
            free(weights[s][rank]);
        }
        for (int array = 0; array < 3; array++) free(segments[s].state[array]);
    }
}

int main(void) {
    const rule_t rules[] = {
        {.lr = 0.1, .kind = SGD},
        {.lr = 0.1, .kind = SGD, .momentum = 0.9, .weight_decay = 0.1, .nesterov = 1},
        {.lr = 0.1, .kind = SGD, .momentum = 0.9, .dampening = 0.1, .maximize = 1},
        {.lr = 0.1, .kind = ADAM, .beta1 = 0.9, .beta2 = 0.99, .epsilon = 1e-8},
        {.lr = 0.1, .kind = ADAMW, .beta1 = 0.4, .beta2 = 0.9, .weight_decay = 0.1, .amsgrad = 1},
    };
    for (int rule = 0; rule < 5; rule++)
        for (int32_t ranks = 1; ranks <= RANKS; ranks++)
            for (int mode = 0; mode < 4; mode++) try_rule(rules[rule], ranks, mode & 1, mode >> 1);
    return 0;
}
