/* Collectives of processes that share one piece of memory. shared_memory_group.py calls them.
 *
 * The memory holds, for each of DEPTH places, a counter of the ranks that `arrived` and one of those that `departed`; for each
 * rank and place what the rank `posted` (which collective, of what) and a slot; for each rank staging areas for long messages.
 * The collective with number k uses place k % DEPTH, once all have departed from it that had number k - DEPTH.
 *
 *     short    post: own operand -> own slot, arrive     finish: all have arrived; result from all slots; depart
 *     long     post: arrive                              finish: all have arrived; phases; depart
 *
 * How a long message goes through the staging areas in phases: chunks.h.
 */
#include <stdlib.h>
#include <sys/mman.h>

#include "chunks.h"

static uint32_t whole_rounds(const struct group *g, uint64_t rounds) { return (uint32_t)(rounds * (uint64_t)g->size); }

static struct posted *posted_by(const struct group *g, int rank, uint64_t number) { return &g->ranks[rank].posted[number % DEPTH]; }

static int has_posted(const struct group *g, int rank, uint64_t number) {
    return atomic_load(&posted_by(g, rank, number)->number) == (uint32_t)(number + 1);
}

/* Whether all that have come to `number` ask for the same. */
int shared_agree(const struct group *g, uint64_t number) {
    const struct posted *own = posted_by(g, g->index, number);
    for (int k = 0; k < g->size; k++) {
        const struct posted *other = posted_by(g, k, number);
        if (!has_posted(g, k, number)) continue;
        if (other->kind != own->kind || other->dtype != own->dtype || other->source != own->source || other->nbytes != own->nbytes)
            return 0;
    }
    return 1;
}

/* What `rank` asks for in `number`: kind, dtype, source, nbytes to `words`; 0 when it has not come. */
int shared_posted(const struct group *g, uint64_t number, int rank, uint64_t *words) {
    const struct posted *posted = posted_by(g, rank, number);
    if (!has_posted(g, rank, number)) return 0;
    words[0] = posted->kind, words[1] = posted->dtype, words[2] = posted->source, words[3] = posted->nbytes;
    return 1;
}

/* Whether operation `number` of this rank waits for `rank`; with `for_place`, whether its place does. */
int shared_awaits(const struct group *g, uint64_t number, int rank, int for_place) {
    if (for_place) return atomic_load(&posted_by(g, rank, number)->departed) != (uint32_t)(number - DEPTH + 1);
    if (!g->operations[number % DEPTH].met) return !has_posted(g, rank, number);
    return (int32_t)(atomic_load(&g->ranks[rank].phases) - atomic_load(&g->ranks[g->index].phases)) < 0;
}

int shared_has_left(const struct group *g, int rank) { return (int)atomic_load(&g->ranks[rank].left); }

/* Say that this rank comes to nothing more; whoever sleeps looks up. */
void shared_leave(struct group *g) {
    atomic_store(&g->ranks[g->index].left, 1);
    atomic_fetch_add(&g->head->num_left, 1);
    for (int k = 0; k < DEPTH; k++) wake(&g->head->arrived[k]), wake(&g->head->departed[k]);
    wake(&g->head->phase);
}

/* ---- an operation, from its post to its end ---- */

/* DONE when the place of `number` is free. */
int shared_wait_place(struct group *g, uint64_t number, int64_t wait_ns) {
    if (number < DEPTH) return DONE;
    struct wait_counter *departed = &g->head->departed[number % DEPTH];
    uint32_t target = whole_rounds(g, number / DEPTH);
    if (wait_ns == 0) return reached(departed, target) ? DONE : PENDING;
    return await(departed, target, g->spin_ns, now_ns() + wait_ns, &g->head->num_left);
}

/* Come to operation `number`, whose place is free. `in` and `out` stay until it is finished. */
int shared_post(struct group *g, uint64_t number, uint32_t kind, uint32_t dtype, uint32_t source, const char *in, char *out, uint64_t nbytes) {
    if (shared_wait_place(g, number, 0) != DONE) return PENDING;
    struct operation *o = &g->operations[number % DEPTH];
    *o = (struct operation){in, out, nbytes, kind, dtype, source, 0, 0, 0};
    struct posted *own = posted_by(g, g->index, number);
    own->kind = kind, own->dtype = dtype, own->source = source, own->nbytes = nbytes;
    if (nbytes && nbytes <= SLOT) put(g, o, (struct part){0, piece(g, o)}, slot(g, g->index, number));
    atomic_store_explicit(&own->number, (uint32_t)(number + 1), memory_order_release);
    arrive(&g->head->arrived[number % DEPTH], whole_rounds(g, number / DEPTH + 1));
    return DONE;
}

static int run(struct group *g, struct operation *o, int64_t deadline) {
    uint64_t num = (piece(g, o) + chunk_bytes(g, o) - 1) / chunk_bytes(g, o), last = num + (in_slices(o->kind) ? 1 : 0);
    _Atomic uint32_t *phases = &g->ranks[g->index].phases;
    for (; o->step <= last; o->step++) {
        if (!o->in_phase) {
            run_phase(g, o, num);
            if (o->step == last) break; /* the next operation writes elsewhere until all have come to its first phase */
            atomic_fetch_add(phases, 1);
            arrive(&g->head->phase, whole_rounds(g, atomic_load(phases)));
            o->in_phase = 1;
        }
        if (await(&g->head->phase, whole_rounds(g, atomic_load(phases)), g->spin_ns, deadline, &g->head->num_left)) return PENDING;
        o->in_phase = 0;
        if (now_ns() >= deadline && o->step < last) {
            o->step++;
            return PENDING; /* a signal may have come */
        }
    }
    g->chunks += num;
    return DONE;
}

/* Wait for the others and complete operation `number`; call it again when it returns PENDING. */
int shared_finish(struct group *g, uint64_t number, int64_t wait_ns) {
    struct operation *o = &g->operations[number % DEPTH];
    int64_t deadline = now_ns() + wait_ns;
    if (!o->met) {
        uint32_t target = whole_rounds(g, number / DEPTH + 1);
        if (await(&g->head->arrived[number % DEPTH], target, g->spin_ns, deadline, &g->head->num_left)) return PENDING;
        if (!shared_agree(g, number)) return MISMATCH;
        o->met = 1;
    }
    if (o->nbytes > SLOT) {
        if (run(g, o, deadline)) return PENDING;
    } else if (o->nbytes) {
        const char *from[MOST_RANKS];
        for (int k = 0; k < g->size; k++) from[k] = slot(g, k, number);
        take(g, o, (struct part){0, piece(g, o)}, from, 0);
    }
    atomic_store(&posted_by(g, g->index, number)->departed, (uint32_t)(number + 1));
    arrive(&g->head->departed[number % DEPTH], whole_rounds(g, number / DEPTH + 1));
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
