/* What the memory holds, and how operands go through it: at once through the slots, or in chunks through the staging areas.
 *
 *     phase      0       1       2       3               of an all-reduce in chunks 0, 1; all ranks leave a phase together
 *     put        0       1                               own chunk, without the own slice -> own staging
 *     reduce             0       1                       own slice of all stagings -> own tensor and own results
 *     collect                    0       1               the others' results -> own tensor
 *
 * What only moves, or is summed into slices that stay apart, is put, and taken one phase later. Two areas in turn suffice:
 * when chunk k + 2 is put, a phase has ended after the one in which chunk k was read.
 */
#include "counter.h"
#include "codes.h"
#include "marked.h"
#include "sums.h"

enum { DEPTH = 16, SLOT = 1 << 16, AREA = 1 << 20, FAR = 1 << 20 };
enum { MOST_RANKS = 256 }; /* as in segment.py */
enum { ALL_REDUCE, REDUCE, ALL_GATHER, GATHER, BROADCAST, REDUCE_SCATTER, ALL_TO_ALL, SCATTER, BARRIER, SHIFT }; /* as in shared_memory_group.py */

struct posted {
    _Alignas(64) _Atomic uint32_t number; /* plus 1: 0 is nothing */
    _Atomic uint32_t departed;
    uint32_t kind, dtype, source;
    uint64_t nbytes;
};

struct rank {
    _Alignas(64) _Atomic uint32_t phases; /* that it has come to */
    _Atomic uint32_t left;
    struct posted posted[DEPTH];
};

struct head {
    char word[64]; /* by which a rank knows that this is the memory it was told of */
    struct wait_counter arrived[DEPTH], departed[DEPTH], phase;
    _Alignas(64) _Atomic uint32_t num_left;
};

/* What this process keeps of an operation. `nbytes` is the operand; `met`: all have come to it; `in_phase`: come to a phase. */
struct operation {
    const char *in;
    char *out;
    size_t nbytes;
    uint32_t kind, dtype, source;
    int met, in_phase;
    uint64_t step;
};

struct group {
    struct head *head;
    struct rank *ranks;
    char *areas;
    size_t mapped;
    int size, index;
    int64_t spin_ns;
    uint64_t chunks; /* of all long operations so far: their parity says which area is next */
    struct operation operations[DEPTH];
};

static size_t pages(size_t nbytes) { return (nbytes + 4095) & ~(size_t)4095; }
static size_t heads(int size) { return pages(sizeof(struct head) + (size_t)size * sizeof(struct rank)); }
enum { OF_A_RANK = DEPTH * SLOT + 4 * AREA };

static char *slot(const struct group *g, int rank, uint64_t number) {
    return g->areas + (size_t)rank * OF_A_RANK + number % DEPTH * SLOT;
}
static char *staging(const struct group *g, int rank, uint64_t chunk) {
    return g->areas + (size_t)rank * OF_A_RANK + DEPTH * SLOT + chunk % 2 * AREA;
}
static char *results(const struct group *g, int rank, uint64_t chunk) { return staging(g, rank, chunk) + 2 * AREA; }

/* ---- what an operand and a result consist of ---- */

struct part { size_t at, nbytes; };

static int in_pieces(uint32_t kind) { return kind == REDUCE_SCATTER || kind == ALL_TO_ALL || kind == SCATTER; }
static int in_slices(uint32_t kind) { return kind == ALL_REDUCE || kind == REDUCE; }
static int from_one(uint32_t kind) { return kind == BROADCAST || kind == SCATTER; }
static int to_one(uint32_t kind) { return kind == REDUCE || kind == GATHER; }

/* The bytes of one piece: what one rank puts for one other. */
static size_t piece(const struct group *g, const struct operation *o) {
    return in_pieces(o->kind) ? o->nbytes / (size_t)g->size : o->nbytes;
}
static size_t chunk_bytes(const struct group *g, const struct operation *o) {
    return in_pieces(o->kind) ? AREA / (size_t)g->size & ~(size_t)63 : AREA;
}
static struct part chunk_of(const struct group *g, const struct operation *o, uint64_t chunk) {
    size_t at = chunk * chunk_bytes(g, o), rest = piece(g, o) - at;
    return (struct part){at, rest < chunk_bytes(g, o) ? rest : chunk_bytes(g, o)};
}
static struct part slice_of(const struct group *g, size_t nbytes, int rank) { /* they begin at cache lines */
    size_t lines = (nbytes + 63) / 64, size = (size_t)g->size;
    size_t begin = lines * (size_t)rank / size * 64, end = lines * ((size_t)rank + 1) / size * 64;
    begin = begin < nbytes ? begin : nbytes;
    return (struct part){begin, (end < nbytes ? end : nbytes) - begin};
}

/* ---- the three things that are done to a chunk ---- */

static void move(char *to, const char *from, size_t nbytes, int far) {
    if (to == from) return;
    if (far) stream(to, from, nbytes);
    else memmove(to, from, nbytes);
}

/* The sum of `from`, to `to` and to `also`; either may be NULL. */
static void add(const struct group *g, uint32_t dtype, const char **from, size_t nbytes, char *to, char *also, int far) {
    _Alignas(64) char block[BLOCK];
    for (size_t at = 0; at < nbytes; at += BLOCK) {
        size_t part = nbytes - at < BLOCK ? nbytes - at : BLOCK;
        TYPES[dtype].sum(from, g->size, part / TYPES[dtype].width, block);
        if (to) move(to + at, block, part, far);
        if (also) memcpy(also + at, block, part);
        for (int k = 0; k < g->size; k++) from[k] += part;
    }
}

/* What the others need of this `part` of each own piece, to `to`; put_around: all but the own slice of it. */
static void put(const struct group *g, const struct operation *o, struct part part, char *to) {
    if (from_one(o->kind) && (int)o->source != g->index) return;
    for (int k = 0; k < g->size; k++) {
        if (!in_pieces(o->kind)) {
            memcpy(to, o->in + part.at, part.nbytes);
            return;
        }
        if (k != g->index) memcpy(to + (size_t)k * part.nbytes, o->in + (size_t)k * piece(g, o) + part.at, part.nbytes);
    }
}

static void put_around(const struct group *g, const struct operation *o, struct part part, char *to) {
    struct part own = slice_of(g, part.nbytes, g->index);
    size_t end = own.at + own.nbytes;
    memcpy(to, o->in + part.at, own.at);
    memcpy(to + end, o->in + part.at + end, part.nbytes - end);
}

/* This `part` of the result, from what each rank has put at `from`; the own operand is read where it is. */
static void take(const struct group *g, const struct operation *o, struct part part, const char **from, int far) {
    size_t whole = piece(g, o), mine = in_pieces(o->kind) ? (size_t)g->index : 0;
    if (to_one(o->kind) && (int)o->source != g->index) return;
    for (int k = 0; k < g->size; k++) from[k] += mine * part.nbytes;
    from[g->index] = o->in + mine * whole + part.at;
    switch (o->kind) {
    case ALL_REDUCE: case REDUCE: case REDUCE_SCATTER:
        add(g, o->dtype, from, part.nbytes, o->out + part.at, NULL, far);
        break;
    case BROADCAST: case SCATTER:
        move(o->out + part.at, from[o->source], part.nbytes, far);
        break;
    case SHIFT: /* `source` says by how many places */
        move(o->out + part.at, from[(g->index + g->size - (int)o->source) % g->size], part.nbytes, far);
        break;
    default:
        for (int k = 0; k < g->size; k++) move(o->out + (size_t)k * whole + part.at, from[k], part.nbytes, far);
    }
}

static void reduce(const struct group *g, const struct operation *o, uint64_t chunk, uint64_t area, int far) {
    struct part part = chunk_of(g, o, chunk), own = slice_of(g, part.nbytes, g->index);
    const char *from[MOST_RANKS];
    for (int k = 0; k < g->size; k++) from[k] = staging(g, k, area) + own.at;
    from[g->index] = o->in + part.at + own.at;
    char *to = to_one(o->kind) && (int)o->source != g->index ? NULL : o->out + part.at + own.at;
    add(g, o->dtype, from, own.nbytes, to, results(g, g->index, area) + own.at, far);
}

static void collect(const struct group *g, const struct operation *o, uint64_t chunk, uint64_t area, int far) {
    struct part part = chunk_of(g, o, chunk);
    if (to_one(o->kind) && (int)o->source != g->index) return;
    for (int k = 0; k < g->size; k++) {
        struct part slice = slice_of(g, part.nbytes, k);
        if (k != g->index) move(o->out + part.at + slice.at, results(g, k, area) + slice.at, slice.nbytes, far);
    }
}

static void run_phase(const struct group *g, const struct operation *o, uint64_t num) {
    const char *from[MOST_RANKS];
    uint64_t step = o->step, area = g->chunks + step;
    int far = piece(g, o) * (o->kind == ALL_GATHER || o->kind == ALL_TO_ALL ? (size_t)g->size : 1) >= FAR;
    if (step < num) (in_slices(o->kind) ? put_around : put)(g, o, chunk_of(g, o, step), staging(g, g->index, area));
    if (step >= 1 && step - 1 < num) {
        for (int k = 0; k < g->size; k++) from[k] = staging(g, k, area - 1);
        if (in_slices(o->kind)) reduce(g, o, step - 1, area - 1, far);
        else take(g, o, chunk_of(g, o, step - 1), from, far);
    }
    if (step >= 2 && in_slices(o->kind)) collect(g, o, step - 2, area - 2, far);
}
