/* Counters that processes wait for.
 *
 * Counters only grow (modulo 2^32). The last to come stores after all others did (release), who waits reads after (acquire).
 * Who waits spins a moment, notes that it sleeps, looks again, and sleeps (futex); the last to come wakes if anybody sleeps.
 */
#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { DONE, PENDING, MISMATCH }; /* as in segment.py */

struct wait_counter {
    _Alignas(64) _Atomic uint32_t count;
    _Atomic uint32_t sleepers;
};

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static inline void cpu_relax(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void wake(struct wait_counter *counter) { syscall(SYS_futex, &counter->count, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0); }

static void arrive(struct wait_counter *counter, uint32_t target) {
    if (atomic_fetch_add(&counter->count, 1) + 1 == target && atomic_load(&counter->sleepers)) wake(counter);
}

static inline int reached(struct wait_counter *counter, uint32_t target) {
    return (int32_t)(atomic_load_explicit(&counter->count, memory_order_acquire) - target) >= 0;
}

/* DONE when the counter has counted to `target`; PENDING at `deadline`, after a signal, and when `stir` changes. */
static int await(struct wait_counter *counter, uint32_t target, int64_t spin_ns, int64_t deadline, _Atomic uint32_t *stir) {
    if (reached(counter, target)) return DONE;
    for (int64_t spin_until = now_ns() + spin_ns; now_ns() < spin_until;)
        for (int i = 0; i < 16; i++) {
            if (reached(counter, target)) return DONE;
            cpu_relax();
        }
    uint32_t stirred = atomic_load(stir);
    int found = PENDING;
    atomic_fetch_add(&counter->sleepers, 1);
    for (;;) {
        uint32_t count = atomic_load(&counter->count);
        int64_t rest = deadline - now_ns();
        if ((int32_t)(count - target) >= 0) {
            found = DONE;
            break;
        }
        if (rest <= 0 || atomic_load(stir) != stirred) break;
        struct timespec time = {rest / 1000000000, rest % 1000000000};
        if (syscall(SYS_futex, &counter->count, FUTEX_WAIT, count, &time, NULL, 0) && errno == EINTR) break;
    }
    atomic_fetch_sub(&counter->sleepers, 1);
    return found;
}
