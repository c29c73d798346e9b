/* Collectives of processes that share one piece of memory. shared_memory_group.py calls them.
 *
 * The memory holds, for each of DEPTH places, a counter of the ranks that `came` and one of those that are `gone`; for each
 * rank and place what the rank `said` (which collective, of what) and a slot; for each rank staging areas for long messages.
 * The collective with number k uses place k % DEPTH, once all are gone from it that had number k - DEPTH.
 *
 *     short    post: own operand -> own slot, come       finish: all have come; result from all slots; go
 *     long     post: come                                finish: all have come; beats; go
 *
 * How a long message goes through the staging areas in beats: chunks.h.
 */
#include <stdlib.h>
#include <sys/mman.h>

#include "chunks.h"

static uint32_t whole_rounds(const struct group *g, uint64_t rounds) { return (uint32_t)(rounds * (uint64_t)g->size); }

static struct said *said_by(const struct group *g, int rank, uint64_t number) { return &g->ranks[rank].said[number % DEPTH]; }

static int has_said(const struct group *g, int rank, uint64_t number) {
    return atomic_load(&said_by(g, rank, number)->number) == (uint32_t)(number + 1);
}

/* Whether all that have come to `number` ask for the same. */
int shared_agree(const struct group *g, uint64_t number) {
    const struct said *own = said_by(g, g->index, number);
    for (int k = 0; k < g->size; k++) {
        const struct said *other = said_by(g, k, number);
        if (!has_said(g, k, number)) continue;
        if (other->kind != own->kind || other->dtype != own->dtype || other->source != own->source || other->nbytes != own->nbytes)
            return 0;
    }
    return 1;
}

/* What `rank` asks for in `number`: kind, dtype, source, nbytes to `words`; 0 when it has not come. */
int shared_said(const struct group *g, uint64_t number, int rank, uint64_t *words) {
    const struct said *said = said_by(g, rank, number);
    if (!has_said(g, rank, number)) return 0;
    words[0] = said->kind, words[1] = said->dtype, words[2] = said->source, words[3] = said->nbytes;
    return 1;
}

/* Whether operation `number` of this rank waits for `rank`; with `room`, whether its place does. */
int shared_awaits(const struct group *g, uint64_t number, int rank, int room) {
    if (room) return atomic_load(&said_by(g, rank, number)->gone) != (uint32_t)(number - DEPTH + 1);
    if (!g->operations[number % DEPTH].met) return !has_said(g, rank, number);
    return (int32_t)(atomic_load(&g->ranks[rank].beats) - atomic_load(&g->ranks[g->index].beats)) < 0;
}

int shared_has_left(const struct group *g, int rank) { return (int)atomic_load(&g->ranks[rank].left); }

/* Say that this rank comes to nothing more; whoever sleeps looks up. */
void shared_leave(struct group *g) {
    atomic_store(&g->ranks[g->index].left, 1);
    atomic_fetch_add(&g->head->num_left, 1);
    for (int k = 0; k < DEPTH; k++) wake(&g->head->came[k]), wake(&g->head->gone[k]);
    wake(&g->head->beat);
}

/* ---- an operation, from its post to its end ---- */

/* DONE when the place of `number` is free. */
int shared_room(struct group *g, uint64_t number, int64_t wait_ns) {
    if (number < DEPTH) return DONE;
    struct bell *gone = &g->head->gone[number % DEPTH];
    uint32_t target = whole_rounds(g, number / DEPTH);
    if (wait_ns == 0) return reached(gone, target) ? DONE : NOT_YET;
    return await(gone, target, g->spin_ns, now_ns() + wait_ns, &g->head->num_left);
}

/* Come to operation `number`, whose place is free. `in` and `out` stay until it is finished. */
int shared_post(struct group *g, uint64_t number, uint32_t kind, uint32_t dtype, uint32_t source, const char *in, char *out, uint64_t nbytes) {
    if (shared_room(g, number, 0) != DONE) return NOT_YET;
    struct operation *o = &g->operations[number % DEPTH];
    *o = (struct operation){in, out, nbytes, kind, dtype, source, 0, 0, 0};
    struct said *own = said_by(g, g->index, number);
    own->kind = kind, own->dtype = dtype, own->source = source, own->nbytes = nbytes;
    if (nbytes && nbytes <= SLOT) put(g, o, (struct part){0, piece(g, o)}, slot(g, g->index, number));
    atomic_store_explicit(&own->number, (uint32_t)(number + 1), memory_order_release);
    come(&g->head->came[number % DEPTH], whole_rounds(g, number / DEPTH + 1));
    return DONE;
}

static int play(struct group *g, struct operation *o, int64_t deadline) {
    uint64_t num = (piece(g, o) + chunk_bytes(g, o) - 1) / chunk_bytes(g, o), last = num + (in_slices(o->kind) ? 1 : 0);
    _Atomic uint32_t *beats = &g->ranks[g->index].beats;
    for (; o->step <= last; o->step++) {
        if (!o->beating) {
            beat(g, o, num);
            if (o->step == last) break; /* the next operation writes elsewhere until all have come to its first beat */
            atomic_fetch_add(beats, 1);
            come(&g->head->beat, whole_rounds(g, atomic_load(beats)));
            o->beating = 1;
        }
        if (await(&g->head->beat, whole_rounds(g, atomic_load(beats)), g->spin_ns, deadline, &g->head->num_left)) return NOT_YET;
        o->beating = 0;
        if (now_ns() >= deadline && o->step < last) {
            o->step++;
            return NOT_YET; /* a signal may have come */
        }
    }
    g->chunks += num;
    return DONE;
}

/* Wait for the others and complete operation `number`; call it again when it returns NOT_YET. */
int shared_finish(struct group *g, uint64_t number, int64_t wait_ns) {
    struct operation *o = &g->operations[number % DEPTH];
    int64_t deadline = now_ns() + wait_ns;
    if (!o->met) {
        uint32_t target = whole_rounds(g, number / DEPTH + 1);
        if (await(&g->head->came[number % DEPTH], target, g->spin_ns, deadline, &g->head->num_left)) return NOT_YET;
        if (!shared_agree(g, number)) return DISAGREE;
        o->met = 1;
    }
    if (o->nbytes > SLOT) {
        if (play(g, o, deadline)) return NOT_YET;
    } else if (o->nbytes) {
        const char *from[MOST_RANKS];
        for (int k = 0; k < g->size; k++) from[k] = slot(g, k, number);
        take(g, o, (struct part){0, piece(g, o)}, from, 0);
    }
    atomic_store(&said_by(g, g->index, number)->gone, (uint32_t)(number + 1));
    come(&g->head->gone[number % DEPTH], whole_rounds(g, number / DEPTH + 1));
    return DONE;
}

/* ---- the memory itself ---- */

size_t shared_bytes(int size) { return heads(size) + (size_t)size * OF_A_RANK; }

/* The group of `size` ranks in the memory behind `fd`, seen from `index`; NULL when it cannot be mapped. */
struct group *shared_map(int fd, int size, int index, int64_t spin_ns) {
    struct group *g = calloc(1, sizeof *g);
    if (!g) return NULL;
    void *base = mmap(NULL, shared_bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        free(g);
        return NULL;
    }
    g->head = base;
    g->ranks = (struct rank *)(g->head + 1);
    g->areas = (char *)base + heads(size);
    g->mapped = shared_bytes(size);
    g->size = size, g->index = index, g->spin_ns = spin_ns;
    return g;
}

void shared_unmap(struct group *g) {
    munmap(g->head, g->mapped);
    free(g);
}
