/* What the ranks of the driver put in, and what must come out. Included after node_kernel.c. */

enum { F16 = 8, BF16, F32, F64, C64, C128, TYPE_COUNT };
enum { SUM, MIN, MAX, PRODUCT };

static int is_whole(int type) { return type < F16; }
static int is_complex(int type) { return type >= C64; }
static int reals(int type) { return is_complex(type) ? 2 : 1; }

static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

static uint64_t number_at(uint64_t key, int rank, int64_t index) {
    return mix(mix(key + (uint64_t)rank) + (uint64_t)index);
}

/* A small whole number, of which no type rounds what comes out. */
static double exact(uint64_t bits, int type, int op) {
    if (op == PRODUCT && is_complex(type)) return (double)(bits % 3) - 1;
    if (op == PRODUCT) return 1 + (double)(bits % 2);
    return type < 4 ? (double)(bits % 7) : (double)(bits % 7) - 3;
}

static void store(char *at, int type, double x) {
    switch (type) {
    case 0: *(uint8_t *)at = (uint8_t)x; break;
    case 1: *(uint16_t *)at = (uint16_t)x; break;
    case 2: *(uint32_t *)at = (uint32_t)x; break;
    case 3: *(uint64_t *)at = (uint64_t)x; break;
    case 4: *(int8_t *)at = (int8_t)x; break;
    case 5: *(int16_t *)at = (int16_t)x; break;
    case 6: *(int32_t *)at = (int32_t)x; break;
    case 7: *(int64_t *)at = (int64_t)x; break;
    case F16: *(uint16_t *)at = to_f16((float)x); break;
    case BF16: *(uint16_t *)at = to_bf16((float)x); break;
    case F32: case C64: *(float *)at = (float)x; break;
    default: *(double *)at = x;
    }
}

/* Numbers that are rounded when they are added, some of them too small to be normal. Of whole
 * numbers any bits will do. */
static void store_rough(char *at, int type, uint64_t bits) {
    int tiny = bits >> 60 == 0;
    uint64_t sign = bits >> 59 & 1;
    switch (type) {
    case F16: *(uint16_t *)at = sign << 15 | (tiny ? 0 : (13 + (bits >> 52) % 4) << 10) | (bits & 0x3ff);
        break;
    case BF16: *(uint16_t *)at = sign << 15 | (tiny ? 0 : (125 + (bits >> 52) % 4) << 7) | (bits & 0x7f);
        break;
    case F32: case C64:
        *(uint32_t *)at = sign << 31 | (tiny ? 0 : (125 + (bits >> 52) % 4) << 23) | (bits & 0x7fffff);
        break;
    case F64: case C128:
        *(uint64_t *)at = sign << 63 | (tiny ? 0 : (1021 + (bits >> 52) % 4) << 52) |
                          (bits & 0xfffffffffffffull);
        break;
    default: memcpy(at, &bits, TYPES[type].itemsize);
    }
}

static void fill(char *data, int64_t count, int type, int op, int rough, uint64_t key, int rank) {
    int64_t size = TYPES[type].itemsize / reals(type);
    for (int64_t i = 0; i < count * reals(type); i++) {
        uint64_t bits = number_at(key, rank, i);
        if (rough) store_rough(data + i * size, type, bits);
        else store(data + i * size, type, exact(bits, type, op));
    }
}

static double fold(int op, double a, double b) {
    if (op == SUM) return a + b;
    if (op == PRODUCT) return a * b;
    return (op == MIN) == (b < a) ? b : a;
}

/* The element that must come out where exact numbers went in; its imaginary part, if any, in [1]. */
static void expect(double *out, int64_t index, int type, int op, uint64_t key, int size,
                   const double *prescales, double postscale) {
    for (int rank = 0; rank < size; rank++) {
        double part[2] = {0, 0};
        for (int k = 0; k < reals(type); k++) {
            uint64_t bits = number_at(key, rank, index * reals(type) + k);
            part[k] = exact(bits, type, op) * prescales[rank];
        }
        if (rank == 0) {
            memcpy(out, part, sizeof part);
        } else if (op == PRODUCT && is_complex(type)) {
            double real = out[0] * part[0] - out[1] * part[1];
            out[1] = out[0] * part[1] + out[1] * part[0];
            out[0] = real;
        } else {
            out[0] = fold(op, out[0], part[0]);
            out[1] = fold(op, out[1], part[1]);
        }
    }
    out[0] *= postscale;
    out[1] *= postscale;
}

/* How many elements differ from what must come out. */
static int64_t count_wrong(const char *data, int64_t count, int type, int op, uint64_t key,
                           int size, const double *prescales, double postscale) {
    int64_t wrong = 0, itemsize = TYPES[type].itemsize, each = itemsize / reals(type);
    for (int64_t i = 0; i < count; i++) {
        double want[2] = {0, 0};
        char bytes[16];
        expect(want, i, type, op, key, size, prescales, postscale);
        for (int k = 0; k < reals(type); k++) store(bytes + k * each, type, want[k]);
        wrong += memcmp(bytes, data + i * itemsize, itemsize) != 0;
    }
    return wrong;
}
