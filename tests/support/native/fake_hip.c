/* A fake of libamdhip64 for machines without a GPU. */
#define FAKE_RELEASE ""
#include "fake_gpu.h"

struct dim3 {
    unsigned x, y, z;
};
#define GRID_SAID "%p %u %u %u %u %u %u %p "
#define GRID_GIVEN function, grid.x, grid.y, grid.z, block.x, block.y, block.z, (void *)args
FAKE int hipLaunchKernel(const void *function, struct dim3 grid, struct dim3 block, void **args, size_t shared, void *stream) {
    SAY("hipLaunchKernel", GRID_SAID "%zu %p", GRID_GIVEN, shared, stream);
}
FAKE int hipLaunchCooperativeKernel(const void *function, struct dim3 grid, struct dim3 block, void **args, unsigned shared,
                                    void *stream) {
    SAY("hipLaunchCooperativeKernel", GRID_SAID "%u %p", GRID_GIVEN, shared, stream);
}
FAKE int hipModuleLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                               unsigned shared, void *stream, void **args, void **extra) {
    SAY("hipModuleLaunchKernel", "%p %u %u %u %u %u %u %u %p %p %p", function, gx, gy, gz, bx, by, bz, shared, stream,
        (void *)args, (void *)extra);
}
FAKE int hipGraphLaunch(void *graph, void *stream) { SAY("hipGraphLaunch", "%p %p", graph, stream); }
FAKE int hipStreamSynchronize(void *stream) { SAY("hipStreamSynchronize", "%p", stream); }
FAKE int hipDeviceSynchronize(void) { SAY("hipDeviceSynchronize", "-"); }
FAKE int hipEventSynchronize(void *event) { SAY("hipEventSynchronize", "%p", event); }
FAKE int hipFree(void *memory) { SAY("hipFree", "%p", memory); }
FAKE int hipMemcpy(void *to, const void *from, size_t size, int kind) { SAY("hipMemcpy", "%p %p %zu %d", to, from, size, kind); }
FAKE int hipStreamBeginCapture(void *stream, int mode) { SAY("hipStreamBeginCapture", "%p %d", stream, mode); }
FAKE int hipStreamEndCapture(void *stream, void **graph) { SAY("hipStreamEndCapture", "%p %p", stream, (void *)graph); }
