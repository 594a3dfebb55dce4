/* What a GPU's runtime and driver have in common: how calls of CUDA and of HIP are counted in their thread's lane.
 *
 * A macro below is the body of a wrapper. `find`: the real function; `arguments`: what the wrapper was given, passed on
 * by the compiler's own rules (also structures by value); `absent`: the result where there is no real function.
 */
#ifndef RESILIO_DEVICE_CALLS_H
#define RESILIO_DEVICE_CALLS_H

#include "gpu_events.h"

typedef int32_t result;

struct dim3 {
    uint32_t x, y, z;
};

/* Begin a wait, unless this thread is inside one. */
static inline struct ring_lane *wait_begins(enum ring_wait kind) {
    struct ring_lane *lane = ring_lane();
    if (lane->waits_in) return NULL;
    ring_count(&lane->waits);
    __atomic_store_n(&lane->since_ns, ring_clock(), __ATOMIC_RELAXED);
    __atomic_store_n(&lane->waits_in, (uint32_t)kind, __ATOMIC_RELEASE);
    return lane;
}

static inline void wait_ends(struct ring_lane *lane, int well) {
    if (!lane) return;
    __atomic_store_n(&lane->waits_in, WAIT_NONE, __ATOMIC_RELAXED);
    ring_count(&lane->waited);
    struct ring *ring = ring_of_process();
    if (ring && well && call_ring.events == EVENTS_USED) gpu_waited(ring, ring_clock());
}

static inline void capture_begins(void) {
    struct ring *ring = ring_of_process();
    __atomic_add_fetch(&call_ring.capturing, 1, __ATOMIC_ACQ_REL);
    if (ring) __atomic_add_fetch(&ring->gpu.captures, 1, __ATOMIC_RELAXED);
}

static inline void capture_ends(void) {
    struct ring *ring = ring_of_process();
    if (__atomic_sub_fetch(&call_ring.capturing, 1, __ATOMIC_ACQ_REL) < 0)
        __atomic_store_n(&call_ring.capturing, 0, __ATOMIC_RELEASE); /* an end without a beginning */
    if (ring) __atomic_add_fetch(&ring->gpu.captured, 1, __ATOMIC_RELAXED);
}

/* Events do not outlive their context. */
static inline void device_reset(void) { call_ring.events = EVENTS_OFF; }

#define REAL(find, parameters, absent) \
    static void *next;                 \
    result(*real) parameters = find;   \
    if (!real) return absent;

#define LAUNCHES(find, parameters, arguments, absent, is_graph) \
    {                                                           \
        REAL(find, parameters, absent)                          \
        struct ring_lane *lane = ring_lane();                   \
        ring_count(&lane->launches);                            \
        if (is_graph) ring_count(&lane->graphs);                \
        result said = real arguments;                           \
        ring_count(&lane->launched);                            \
        return said;                                            \
    }

#define WAITS(find, parameters, arguments, absent, kind) \
    {                                                    \
        REAL(find, parameters, absent)                   \
        struct ring_lane *lane = wait_begins(kind);      \
        result said = real arguments;                    \
        wait_ends(lane, said == 0);                      \
        return said;                                     \
    }

#define BEGINS_CAPTURE(find, parameters, arguments, absent, unused) \
    {                                                               \
        REAL(find, parameters, absent)                              \
        capture_begins(); /* first: another thread may query */     \
        result said = real arguments;                               \
        if (said) capture_ends();                                   \
        return said;                                                \
    }

#define ENDS_CAPTURE(find, parameters, arguments, absent, unused) \
    {                                                             \
        REAL(find, parameters, absent)                            \
        result said = real arguments;                             \
        capture_ends();                                           \
        return said;                                              \
    }

#define RESETS(find, parameters, arguments, absent, unused) \
    {                                                       \
        REAL(find, parameters, absent)                      \
        device_reset();                                     \
        return real arguments;                              \
    }

#endif
