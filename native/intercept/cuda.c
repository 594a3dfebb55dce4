/* Calls of CUDA's runtime and driver, counted in their thread's lane: launches, waits for the GPU, captures of streams.
 *
 * The runtime's functions have versions (libcudart.so.12), and a process may hold two releases. Each wrapper is one
 * release's, and passes on to the same; a release that is not named here keeps its functions for itself. What comes
 * through `cuGetProcAddress`, `dlsym` of one library, or a runtime that was linked statically is not seen.
 */
#include "device_calls.h"

#define NOT_FOUND_RUNTIME 302 /* "shared object symbol not found" */
#define NOT_FOUND_DRIVER 500

#define OF_RELEASE(body, name, release, parameters, arguments, extra)                                              \
    RING_PUBLIC result name##_of_##release parameters;                                                             \
    __asm__(".symver " #name "_of_" #release "," #name "@libcudart.so." #release);                                 \
    result name##_of_##release parameters                                                                          \
    body(ring_next_version(&next, #name, "libcudart.so." #release, RING_CALLER), parameters, arguments,            \
         NOT_FOUND_RUNTIME, extra)
#define RUNTIME(body, name, parameters, arguments, extra)     \
    OF_RELEASE(body, name, 12, parameters, arguments, extra) \
    OF_RELEASE(body, name, 13, parameters, arguments, extra)
#define DRIVER(body, name, parameters, arguments, extra) \
    RING_PUBLIC result name parameters;                  \
    result name parameters                               \
    body(ring_next(&next, #name, RING_CALLER), parameters, arguments, NOT_FOUND_DRIVER, extra)
/* Also the name for programs whose default stream is a thread's own. */
#define BOTH(which, body, name, own, parameters, arguments, extra) \
    which(body, name, parameters, arguments, extra)                \
    which(body, name##own, parameters, arguments, extra)

#define GRID const void *function, struct dim3 grid, struct dim3 block, void **given, size_t shared, void *stream
#define GRID_GIVEN function, grid, block, given, shared, stream

BOTH(RUNTIME, LAUNCHES, cudaLaunchKernel, _ptsz, (GRID), (GRID_GIVEN), 0)
BOTH(RUNTIME, LAUNCHES, __cudaLaunchKernel, _ptsz, (GRID), (GRID_GIVEN), 0) /* what nvcc 13 makes of <<<>>> */
BOTH(RUNTIME, LAUNCHES, cudaLaunchCooperativeKernel, _ptsz, (GRID), (GRID_GIVEN), 0)
BOTH(RUNTIME, LAUNCHES, cudaLaunchKernelExC, _ptsz, (const void *config, const void *function, void **given),
     (config, function, given), 0)
BOTH(RUNTIME, LAUNCHES, cudaGraphLaunch, _ptsz, (void *graph, void *stream), (graph, stream), 1)
BOTH(RUNTIME, WAITS, cudaStreamSynchronize, _ptsz, (void *stream), (stream), WAIT_STREAM)
RUNTIME(WAITS, cudaDeviceSynchronize, (void), (), WAIT_DEVICE)
RUNTIME(WAITS, cudaEventSynchronize, (void *event), (event), WAIT_EVENT)
RUNTIME(WAITS, cudaFree, (void *memory), (memory), WAIT_FREE)
BOTH(RUNTIME, WAITS, cudaMemcpy, _ptds, (void *to, const void *from, size_t size, int32_t kind), (to, from, size, kind),
     WAIT_COPY)
BOTH(RUNTIME, WAITS, cudaMemcpy2D, _ptds,
     (void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int32_t kind),
     (to, to_pitch, from, from_pitch, width, height, kind), WAIT_COPY)
BOTH(RUNTIME, BEGINS_CAPTURE, cudaStreamBeginCapture, _ptsz, (void *stream, int32_t mode), (stream, mode), 0)
BOTH(RUNTIME, BEGINS_CAPTURE, cudaStreamBeginCaptureToGraph, _ptsz,
     (void *stream, void *graph, const void *nodes, const void *edges, size_t count, int32_t mode),
     (stream, graph, nodes, edges, count, mode), 0)
BOTH(RUNTIME, ENDS_CAPTURE, cudaStreamEndCapture, _ptsz, (void *stream, void **graph), (stream, graph), 0)
RUNTIME(RESETS, cudaDeviceReset, (void), (), 0)

#define SIZES uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz, uint32_t shared, void *stream
#define SIZES_GIVEN gx, gy, gz, bx, by, bz, shared, stream

BOTH(DRIVER, LAUNCHES, cuLaunchKernel, _ptsz, (void *function, SIZES, void **given, void **extra),
     (function, SIZES_GIVEN, given, extra), 0)
BOTH(DRIVER, LAUNCHES, cuLaunchCooperativeKernel, _ptsz, (void *function, SIZES, void **given),
     (function, SIZES_GIVEN, given), 0)
BOTH(DRIVER, LAUNCHES, cuLaunchKernelEx, _ptsz, (const void *config, void *function, void **given, void **extra),
     (config, function, given, extra), 0)
BOTH(DRIVER, LAUNCHES, cuGraphLaunch, _ptsz, (void *graph, void *stream), (graph, stream), 1)
BOTH(DRIVER, WAITS, cuStreamSynchronize, _ptsz, (void *stream), (stream), WAIT_STREAM)
DRIVER(WAITS, cuCtxSynchronize, (void), (), WAIT_DEVICE)
DRIVER(WAITS, cuEventSynchronize, (void *event), (event), WAIT_EVENT)
DRIVER(WAITS, cuMemFree_v2, (uint64_t memory), (memory), WAIT_FREE)
BOTH(DRIVER, WAITS, cuMemcpy, _ptds, (uint64_t to, uint64_t from, size_t size), (to, from, size), WAIT_COPY)
BOTH(DRIVER, WAITS, cuMemcpyHtoD_v2, _ptds, (uint64_t to, const void *from, size_t size), (to, from, size), WAIT_COPY)
BOTH(DRIVER, WAITS, cuMemcpyDtoH_v2, _ptds, (void *to, uint64_t from, size_t size), (to, from, size), WAIT_COPY)
BOTH(DRIVER, WAITS, cuMemcpyDtoD_v2, _ptds, (uint64_t to, uint64_t from, size_t size), (to, from, size), WAIT_COPY)
BOTH(DRIVER, BEGINS_CAPTURE, cuStreamBeginCapture_v2, _ptsz, (void *stream, int32_t mode), (stream, mode), 0)
BOTH(DRIVER, BEGINS_CAPTURE, cuStreamBeginCaptureToGraph, _ptsz,
     (void *stream, void *graph, const void *nodes, const void *edges, size_t count, int32_t mode),
     (stream, graph, nodes, edges, count, mode), 0)
BOTH(DRIVER, ENDS_CAPTURE, cuStreamEndCapture, _ptsz, (void *stream, void **graph), (stream, graph), 0)
DRIVER(RESETS, cuCtxDestroy_v2, (void *context), (context), 0)
DRIVER(RESETS, cuDevicePrimaryCtxReset_v2, (int32_t device), (device), 0)
