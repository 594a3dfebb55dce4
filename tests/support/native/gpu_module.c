/* A module that calls every function of gpu_calls.h with arguments that are all different, and prints what came back.
 *
 * It is linked against the fakes of one release, as an extension of Python is against the vendor's. -DHIP: HIP's.
 */
#include <errno.h>
#include <stdio.h>

#include "gpu_calls.h"

static uint64_t given;
static void *pointer(void) { return (void *)(uintptr_t)(0x5500000000 + 16 * ++given); }
static int number(void) { return (int)++given; }
static size_t size(void) { return ((size_t)3 << 40) + ++given; }
static struct dim3 sizes(void) {
    struct dim3 made = {(unsigned)++given, 0x80000000u + (unsigned)++given, (unsigned)++given};
    return made;
}
#define P pointer()
#define I number()
#define S size()
#define L (int64_t)size()
#define D sizes()

#define DECLARE(name, types, arguments) int name types;
RUNTIME_CALLS(DECLARE)
DRIVER_CALLS(DECLARE)
BLAS_CALLS(DECLARE)
int cublasLtMatmul(void *, void *, const void *, const void *, void *, const void *, void *, const void *, const void *,
                   void *, void *, void *, const void *, void *, size_t, void *);

#define CALL(name, types, arguments) came(#name, name arguments);
static void came(const char *name, int result) {
    printf("%s returned %d%s\n", name, result, errno == 4321 ? "" : " and changed errno");
    fflush(stdout);
    errno = 4321;
}

#ifdef HIP
HIP_CALLS(DECLARE)
__attribute__((visibility("default"))) void every_function(void) {
    errno = 4321;
    HIP_CALLS(CALL)
}
#else
__attribute__((visibility("default"))) void every_function(void) {
    uint64_t a[3] = {20, 10, 4}, d[3] = {20, 30, 4}; /* m 20, k 10, n 30, batch 4 */
    errno = 4321;
    RUNTIME_CALLS(CALL)
    DRIVER_CALLS(CALL)
    BLAS_CALLS(CALL)
    came("cublasLtMatmul", cublasLtMatmul(P, P, P, P, a, P, d, P, P, d, P, d, P, P, S, P));
}
#endif
