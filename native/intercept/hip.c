/* Calls of HIP's runtime (AMD's GPUs), counted as those of CUDA are. No event is recorded here: HIP has its "last error"
 * in the same library, and an event's error would be taken for the program's. */
#include "device_calls.h"

#define NOT_FOUND 302
#define HIP(body, name, parameters, arguments, extra) \
    RING_PUBLIC result name parameters;               \
    result name parameters                            \
    body(ring_next(&next, #name, RING_CALLER), parameters, arguments, NOT_FOUND, extra)
#define SIZES uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz, uint32_t shared, void *stream
#define SIZES_GIVEN gx, gy, gz, bx, by, bz, shared, stream

HIP(LAUNCHES, hipLaunchKernel,
    (const void *function, struct dim3 grid, struct dim3 block, void **given, size_t shared, void *stream),
    (function, grid, block, given, shared, stream), 0)
HIP(LAUNCHES, hipLaunchCooperativeKernel,
    (const void *function, struct dim3 grid, struct dim3 block, void **given, uint32_t shared, void *stream),
    (function, grid, block, given, shared, stream), 0)
HIP(LAUNCHES, hipModuleLaunchKernel, (void *function, SIZES, void **given, void **extra),
    (function, SIZES_GIVEN, given, extra), 0)
HIP(LAUNCHES, hipGraphLaunch, (void *graph, void *stream), (graph, stream), 1)
HIP(WAITS, hipStreamSynchronize, (void *stream), (stream), WAIT_STREAM)
HIP(WAITS, hipDeviceSynchronize, (void), (), WAIT_DEVICE)
HIP(WAITS, hipEventSynchronize, (void *event), (event), WAIT_EVENT)
HIP(WAITS, hipFree, (void *memory), (memory), WAIT_FREE)
HIP(WAITS, hipMemcpy, (void *to, const void *from, size_t size, int32_t kind), (to, from, size, kind), WAIT_COPY)
HIP(BEGINS_CAPTURE, hipStreamBeginCapture, (void *stream, int32_t mode), (stream, mode), 0)
HIP(ENDS_CAPTURE, hipStreamEndCapture, (void *stream, void **graph), (stream, graph), 0)
