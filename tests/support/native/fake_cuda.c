/* A fake of libcuda, the driver, for machines without a GPU. It ends the process at what would break a real one.
 *
 * Streams from 0x9000 on are of another context than the current one. An event is reached when the program waits for a
 * stream (fake_all_reached), or at once with FAKE_FAST=1. The errors of FAKE_ERROR=NAME come from the function of that name.
 */
#define FAKE_RELEASE ""
#include "fake_gpu.h"

#define CONTEXT ((void *)0x100)
#define OTHER_CONTEXT ((void *)0x200)
#define MOST 64

static struct {
    void *captured[MOST];
    int events, recorded, queries, captures, dead;
    struct {
        int used, recorded, reached;
    } event[MOST];
} gpu;
static __thread int mode;
static pid_t owner;

static void check(const char *name) {
    if (!owner) owner = getpid();
    if (owner != getpid()) fake_fault("used in a forked child");
    if (gpu.dead) fake_fault("used after a reset");
    (void)name;
}
static int fails(const char *name) { return getenv("FAKE_ERROR") && !strcmp(getenv("FAKE_ERROR"), name) ? 719 : 0; }

static int captured(void *stream) {
    for (int one = 0; one < MOST; one++)
        if (gpu.captured[one] && gpu.captured[one] == stream) return 1;
    return 0;
}
FAKE void fake_capture(void *stream, int begins) {
    if (captured(stream) != !begins) fake_fault("captures do not match");
    for (int one = 0; one < MOST; one++)
        if (gpu.captured[one] == (begins ? NULL : stream)) {
            gpu.captured[one] = begins ? stream : NULL;
            gpu.captures += begins ? 1 : -1;
            return;
        }
}
FAKE void fake_all_reached(void *stream, int unused) {
    (void)stream, (void)unused;
    for (int one = 0; one < MOST; one++) gpu.event[one].reached = gpu.event[one].recorded;
}
FAKE void fake_reset(void *stream, int unused) {
    (void)stream, (void)unused;
    gpu.dead = 1;
}
FAKE void fake_counts(int counts[3]) {
    counts[0] = gpu.events;
    counts[1] = gpu.recorded;
    counts[2] = gpu.queries;
}

FAKE int cuCtxGetCurrent(void **context) {
    check("cuCtxGetCurrent");
    *context = CONTEXT;
    return fails("cuCtxGetCurrent");
}
FAKE int cuStreamGetCtx(void *stream, void **context) {
    check("cuStreamGetCtx");
    if (captured(stream)) fake_fault("a captured stream was asked for its context");
    *context = (uintptr_t)stream >= 0x9000 ? OTHER_CONTEXT : CONTEXT;
    return fails("cuStreamGetCtx");
}
FAKE int cuStreamIsCapturing(void *stream, int *status) {
    check("cuStreamIsCapturing");
    *status = captured(stream);
    return fails("cuStreamIsCapturing");
}
FAKE int cuThreadExchangeStreamCaptureMode(int *given) {
    check("cuThreadExchangeStreamCaptureMode");
    int before = mode;
    mode = *given;
    *given = before;
    return 0;
}
FAKE int cuEventCreate(void **event, unsigned flags) {
    check("cuEventCreate");
    if (flags != 2) fake_fault("an event with timing");
    for (uintptr_t one = 0; one < MOST; one++) {
        if (gpu.event[one].used) continue;
        gpu.event[one].used = 1;
        gpu.events++;
        *event = (void *)(one + 1);
        return fails("cuEventCreate");
    }
    return 2;
}
FAKE int cuEventRecord(void *event, void *stream) {
    check("cuEventRecord");
    if (captured(stream)) fake_fault("an event was recorded on a captured stream");
    if ((uintptr_t)stream >= 0x9000) fake_fault("an event of another context");
    gpu.event[(uintptr_t)event - 1].recorded = 1;
    gpu.event[(uintptr_t)event - 1].reached = getenv("FAKE_FAST") != NULL;
    gpu.recorded++;
    return fails("cuEventRecord");
}
FAKE int cuEventQuery(void *event) {
    check("cuEventQuery");
    if (!gpu.event[(uintptr_t)event - 1].recorded) fake_fault("an event that was not recorded");
    if (gpu.captures) fake_fault("a query while a stream is captured");
    if (mode != 2) fake_fault("a query in a mode that ends captures");
    gpu.queries++;
    int error = fails("cuEventQuery");
    return error ? error : gpu.event[(uintptr_t)event - 1].reached ? 0 : 600;
}

#define GRID unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream
#define GRID_SAID "%u %u %u %u %u %u %u %p "
#define GRID_GIVEN gx, gy, gz, bx, by, bz, shared, stream
#define BOTH(make, name, own) make(name) make(name##own)
#define LAUNCH(name)                                                                            \
    FAKE int name(void *function, GRID, void **args, void **extra) {                            \
        SAY(#name, "%p " GRID_SAID "%p %p", function, GRID_GIVEN, (void *)args, (void *)extra); \
    }
#define COOPERATIVE(name) \
    FAKE int name(void *function, GRID, void **args) { SAY(#name, "%p " GRID_SAID "%p", function, GRID_GIVEN, (void *)args); }
#define LAUNCH_EX(name)                                                                       \
    FAKE int name(const void *config, void *function, void **args, void **extra) {            \
        SAY(#name, "%p %p %p %p", config, function, (void *)args, (void *)extra);             \
    }
#define PAIR(name) FAKE int name(void *one, void *two) { SAY(#name, "%p %p", one, two); }
#define SINGLE(name) FAKE int name(void *one) { SAY(#name, "%p", one); }
#define COPY(name) FAKE int name(uint64_t to, uint64_t from, size_t size) { SAY(#name, "%llx %llx %zu", (long long)to, (long long)from, size); }
#define BEGIN(name) FAKE int name(void *stream, int which) { SAY(#name, "%p %d", stream, which); }
#define BEGIN_IN(name)                                                                                         \
    FAKE int name(void *stream, void *graph, const void *nodes, const void *edges, size_t count, int which) { \
        SAY(#name, "%p %p %p %p %zu %d", stream, graph, nodes, edges, count, which);                           \
    }
BOTH(LAUNCH, cuLaunchKernel, _ptsz)
BOTH(COOPERATIVE, cuLaunchCooperativeKernel, _ptsz)
BOTH(LAUNCH_EX, cuLaunchKernelEx, _ptsz)
BOTH(PAIR, cuGraphLaunch, _ptsz)
BOTH(SINGLE, cuStreamSynchronize, _ptsz)
FAKE int cuCtxSynchronize(void) { SAY("cuCtxSynchronize", "-"); }
SINGLE(cuEventSynchronize)
SINGLE(cuMemFree_v2)
BOTH(COPY, cuMemcpy, _ptds)
BOTH(COPY, cuMemcpyHtoD_v2, _ptds)
BOTH(COPY, cuMemcpyDtoH_v2, _ptds)
BOTH(COPY, cuMemcpyDtoD_v2, _ptds)
BOTH(BEGIN, cuStreamBeginCapture_v2, _ptsz)
BOTH(BEGIN_IN, cuStreamBeginCaptureToGraph, _ptsz)
BOTH(PAIR, cuStreamEndCapture, _ptsz)
SINGLE(cuCtxDestroy_v2)
FAKE int cuDevicePrimaryCtxReset_v2(int device) { SAY("cuDevicePrimaryCtxReset_v2", "%d", device); }
