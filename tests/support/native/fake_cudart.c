/* A fake of libcudart for machines without a GPU; -DFAKE_RELEASE="\"13\"" is the release.
 *
 * Like the real one it opens the driver by itself. A wait on the stream 0xdead does not end. Nothing but the program may
 * ask for its last error.
 */
#include "fake_gpu.h"

struct dim3 {
    unsigned x, y, z;
};

typedef void (*told)(void *, int);
static told find(const char *name) {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
    if (!driver) fake_fault(dlerror());
    return (told)dlsym(driver, name);
}
#define tell_driver(name, stream, number) \
    do {                                  \
        static told tell;                 \
        if (!tell) tell = find(name);     \
        tell(stream, number);             \
    } while (0)

#define LAUNCH(name)                                                                                                \
    FAKE int name(const void *function, struct dim3 grid, struct dim3 block, void **args, size_t shared, void *stream) { \
        SAY(#name, "%p %u %u %u %u %u %u %p %zu %p", function, grid.x, grid.y, grid.z, block.x, block.y, block.z,   \
            (void *)args, shared, stream);                                                                          \
    }
#define BOTH(make, name, own) make(name) make(name##own)
#define LAUNCH_EX(name) \
    FAKE int name(const void *config, const void *function, void **args) { SAY(#name, "%p %p %p", config, function, (void *)args); }
#define STREAM_CALL(name) FAKE int name(void *graph, void *stream) { SAY(#name, "%p %p", graph, stream); }
#define WAIT(name)                                                       \
    FAKE int name(void *stream) {                                        \
        while (stream == (void *)0xdead) pause();                        \
        tell_driver("fake_all_reached", stream, 0);                      \
        SAY(#name, "%p", stream);                                        \
    }
#define COPY(name) \
    FAKE int name(void *to, const void *from, size_t size, int kind) { SAY(#name, "%p %p %zu %d", to, from, size, kind); }
#define COPY_2D(name)                                                                                               \
    FAKE int name(void *to, size_t tp, const void *from, size_t fp, size_t width, size_t height, int kind) {        \
        SAY(#name, "%p %zu %p %zu %zu %zu %d", to, tp, from, fp, width, height, kind);                              \
    }
#define BEGIN(name)                                 \
    FAKE int name(void *stream, int mode) {         \
        tell_driver("fake_capture", stream, 1);     \
        SAY(#name, "%p %d", stream, mode);          \
    }
#define BEGIN_IN(name)                                                                                        \
    FAKE int name(void *stream, void *graph, const void *nodes, const void *edges, size_t count, int mode) { \
        SAY(#name, "%p %p %p %p %zu %d", stream, graph, nodes, edges, count, mode);                           \
    }
#define END(name)                                    \
    FAKE int name(void *stream, void **graph) {      \
        tell_driver("fake_capture", stream, 0);      \
        SAY(#name, "%p %p", stream, (void *)graph);  \
    }

BOTH(LAUNCH, cudaLaunchKernel, _ptsz)
BOTH(LAUNCH, __cudaLaunchKernel, _ptsz)
BOTH(LAUNCH, cudaLaunchCooperativeKernel, _ptsz)
BOTH(LAUNCH_EX, cudaLaunchKernelExC, _ptsz)
BOTH(STREAM_CALL, cudaGraphLaunch, _ptsz)
BOTH(WAIT, cudaStreamSynchronize, _ptsz)
FAKE int cudaDeviceSynchronize(void) { SAY("cudaDeviceSynchronize", "-"); }
FAKE int cudaEventSynchronize(void *event) { SAY("cudaEventSynchronize", "%p", event); }
FAKE int cudaFree(void *memory) { SAY("cudaFree", "%p", memory); }
BOTH(COPY, cudaMemcpy, _ptds)
BOTH(COPY_2D, cudaMemcpy2D, _ptds)
BOTH(BEGIN, cudaStreamBeginCapture, _ptsz)
BOTH(BEGIN_IN, cudaStreamBeginCaptureToGraph, _ptsz)
BOTH(END, cudaStreamEndCapture, _ptsz)
FAKE int cudaDeviceReset(void) {
    tell_driver("fake_reset", NULL, 0);
    SAY("cudaDeviceReset", "-");
}
FAKE int cudaGetLastError(void) { fake_fault("the last error was taken"); return 0; }
FAKE int cudaPeekAtLastError(void) { fake_fault("the last error was looked at"); return 0; }
