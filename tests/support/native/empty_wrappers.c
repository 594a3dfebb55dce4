/* Wrappers that do nothing but pass a call on, to compare with those that count: see benchmarks/overhead.py. */
#define _GNU_SOURCE
#include <dlfcn.h>

#include "gpu_calls.h"

#define WRAP(name, parameters, arguments)                                           \
    __attribute__((visibility("default"))) int name parameters {                    \
        static int(*real) parameters;                                               \
        if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);                       \
        return real arguments;                                                      \
    }

WRAP(__cudaLaunchKernel, (const void *f, struct dim3 g, struct dim3 b, void **a, size_t s, void *q), (f, g, b, a, s, q))
WRAP(cudaStreamSynchronize, (void *stream), (stream))
WRAP(cublasSgemm_v2,
     (void *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int lda, const void *b, int ldb,
      const void *beta, void *c, int ldc),
     (h, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc))
WRAP(cublasLtMatmul,
     (void *h, void *p, const void *alpha, const void *a, void *la, const void *b, void *lb, const void *beta, const void *c,
      void *lc, void *d, void *ld, const void *algo, void *w, size_t size, void *stream),
     (h, p, alpha, a, la, b, lb, beta, c, lc, d, ld, algo, w, size, stream))
WRAP(ncclAllReduce, (const void *from, void *to, size_t count, int type, int op, void *comm, void *stream),
     (from, to, count, type, op, comm, stream))
