/* How far the GPU has got: an event behind a call now and then, and a later look at whether the GPU has reached it.
 *
 * Only the driver's functions are used, of the libcuda that the program has loaded. They leave no trace: the "last error"
 * that cudaGetLastError returns and clears belongs to the runtime library, which the driver does not know. An error that
 * stays for good, such as an illegal address, is reported by every later call, so one that is seen here is not lost.
 *
 * Nothing waits. Nothing is done
 * - for a stream that is captured, nor while this process captures any: a query would end the capture. What other threads
 *   begin meanwhile is let be by the mode RELAXED of this thread;
 * - where the stream is of another context than the current one: an event belongs to one context;
 * - in a child that was forked after the first event, after a reset of the device, and after the first error.
 */
#ifndef RESILIO_GPU_EVENTS_H
#define RESILIO_GPU_EVENTS_H

#include "call_ring.h"

#define EVENTS 16u
#define EVERY_NS 20000000u /* between two events of a kind: a few microseconds each */
#define NOT_READY 600
#define WITHOUT_TIMING 2u
#define MODE_RELAXED 2

enum event_kind { OF_COLLECTIVE, OF_GEMM };

struct gpu_events {
    uint64_t last_ns[2], looked_ns; /* by kind */
    int32_t (*current_context)(void **), (*context_of)(void *, void **), (*capturing)(void *, int32_t *);
    int32_t (*exchange_mode)(int32_t *), (*create)(void **, uint32_t), (*record)(void *, void *), (*query)(void *);
    struct {
        void *event, *context; /* NULL: not made yet */
        uint64_t index;        /* of the record that it is behind; RING_NOWHERE: a gemm */
        int pending;
    } events[EVENTS];
};
RING_SHARED struct gpu_events resilio_events_2;
#define gpu_events resilio_events_2

static inline int events_usable(void) {
    if (call_ring.events != EVENTS_UNTRIED) return call_ring.events == EVENTS_USED;
    call_ring.events = EVENTS_OFF;
    int error = errno; /* the program's */
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    errno = error;
    if (!driver) return 0;
    struct {
        const char *name;
        void *place;
    } needed[] = {
        {"cuCtxGetCurrent", &gpu_events.current_context}, {"cuStreamGetCtx", &gpu_events.context_of},
        {"cuStreamIsCapturing", &gpu_events.capturing},   {"cuThreadExchangeStreamCaptureMode", &gpu_events.exchange_mode},
        {"cuEventCreate", &gpu_events.create},            {"cuEventRecord", &gpu_events.record},
        {"cuEventQuery", &gpu_events.query},
    };
    for (size_t one = 0; one < sizeof needed / sizeof *needed; one++) {
        void *found = dlsym(driver, needed[one].name);
        if (!found) return 0;
        memcpy(needed[one].place, &found, sizeof found);
    }
    call_ring.events = EVENTS_USED;
    return 1;
}

/* Look at each event that is pending. Return 0 after an error. */
static inline int events_look(struct ring *ring) {
    for (uint32_t one = 0; one < EVENTS; one++) {
        if (!gpu_events.events[one].pending) continue;
        int32_t said = gpu_events.query(gpu_events.events[one].event);
        if (said == NOT_READY) continue;
        if (said) return 0;
        gpu_events.events[one].pending = 0;
        ring_completed(ring, gpu_events.events[one].index);
        ring_count(&ring->gpu.reached);
        __atomic_store_n(&ring->gpu.reached_ns, ring_clock(), __ATOMIC_RELAXED);
    }
    return 1;
}

/* Record an event behind the last call on the stream. Return 0 after an error. */
static inline int events_record(struct ring *ring, void *stream, uint64_t index) {
    void *context = NULL, *of_stream = NULL;
    int32_t captured = 0;
    if (gpu_events.current_context(&context) || !context) return 1;
    if (gpu_events.capturing(stream, &captured) || captured) return 1; /* "implicit", beside a capture: no harm done */
    if (gpu_events.context_of(stream, &of_stream)) return 0;
    if (of_stream != context) return 1;
    for (uint32_t one = 0; one < EVENTS; one++) {
        if (gpu_events.events[one].pending) continue;
        if (gpu_events.events[one].event && gpu_events.events[one].context != context) continue;
        if (!gpu_events.events[one].event && gpu_events.create(&gpu_events.events[one].event, WITHOUT_TIMING)) return 0;
        gpu_events.events[one].context = context;
        gpu_events.events[one].index = index;
        if (gpu_events.record(gpu_events.events[one].event, stream)) return 0;
        gpu_events.events[one].pending = 1;
        ring_count(&ring->gpu.sampled);
        return 1;
    }
    return 1; /* all are pending: the GPU is far behind */
}

/* One thread at a time; another one does not wait for its turn. */
static inline int events_begin(int32_t *mode) {
    if (call_ring.events == EVENTS_OFF || __atomic_load_n(&call_ring.capturing, __ATOMIC_ACQUIRE)) return 0;
    if (__atomic_exchange_n(&call_ring.events_busy, 1, __ATOMIC_ACQUIRE)) return 0;
    *mode = MODE_RELAXED;
    if (events_usable()) {
        if (gpu_events.exchange_mode(mode) == 0) return 1;
        call_ring.events = EVENTS_OFF;
    }
    __atomic_store_n(&call_ring.events_busy, 0, __ATOMIC_RELEASE);
    return 0;
}

static inline void events_end(int32_t mode, int well) {
    if (gpu_events.exchange_mode(&mode) || !well) call_ring.events = EVENTS_OFF;
    __atomic_store_n(&call_ring.events_busy, 0, __ATOMIC_RELEASE);
}

/* A call on the stream has returned well. `index`: its record, RING_NOWHERE: a gemm; `now_ns`: about now. */
static inline void gpu_called(struct ring *ring, enum event_kind kind, void *stream, uint64_t index, uint64_t now_ns) {
    int32_t mode;
    if (now_ns - __atomic_load_n(&gpu_events.last_ns[kind], __ATOMIC_RELAXED) < EVERY_NS) return;
    if (!events_begin(&mode)) return;
    __atomic_store_n(&gpu_events.last_ns[kind], now_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&gpu_events.looked_ns, now_ns, __ATOMIC_RELAXED);
    events_end(mode, events_look(ring) && events_record(ring, stream, index));
}

/* The program has waited for the GPU: much is done by now. */
static inline void gpu_waited(struct ring *ring, uint64_t now_ns) {
    int32_t mode;
    if (call_ring.events != EVENTS_USED) return;
    if (now_ns - __atomic_load_n(&gpu_events.looked_ns, __ATOMIC_RELAXED) < EVERY_NS || !events_begin(&mode)) return;
    __atomic_store_n(&gpu_events.looked_ns, now_ns, __ATOMIC_RELAXED);
    events_end(mode, events_look(ring));
}

#endif
