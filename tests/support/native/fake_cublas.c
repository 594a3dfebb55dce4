/* A fake of libcublas and libcublasLt for machines without a GPU; -DFAKE_RELEASE is the release.
 *
 * As the real one does, cublasGemmEx calls cublasLtMatmul by its name. A layout of Lt is here {rows, columns, batch}.
 */
#include "fake_gpu.h"

#ifdef LT
FAKE int cublasLtMatrixLayoutGetAttribute(const void *layout, int which, void *to, size_t size, size_t *written) {
    const uint64_t *facts = layout;
    if (which == 5 && size == 4) memcpy(to, &facts[2], 4);
    else if ((which == 2 || which == 3) && size == 8) memcpy(to, &facts[which - 2], 8);
    else fake_fault("an attribute that is not known");
    *written = size;
    return 0;
}
FAKE int cublasLtMatmul(void *handle, void *product, const void *alpha, const void *a, void *la, const void *b, void *lb,
                        const void *beta, const void *c, void *lc, void *d, void *ld, const void *algorithm,
                        void *workspace, size_t size, void *stream) {
    SAY("cublasLtMatmul", "%p %p %p %p %d %p %d %p %p %d %p %d %p %p %zu %p", handle, product, alpha, a, la != NULL, b,
        lb != NULL, beta, c, lc != NULL, d, ld != NULL, algorithm, workspace, size, stream);
}
#else
int cublasLtMatmul(void *, void *, const void *, const void *, void *, const void *, void *, const void *, const void *,
                   void *, void *, void *, const void *, void *, size_t, void *);
FAKE int cublasGetStream_v2(void *handle, void **stream) {
    *stream = handle; /* of this fake */
    return 0;
}

#define BOTH(make, name) make(name, int) make(name##_64, int64_t)
#define SIZES(whole) void *handle, int ta, int tb, whole m, whole n, whole k, const void *alpha
#define BEGIN "%p %d %d %lld %lld %lld %p "
#define BEGIN_GIVEN handle, ta, tb, (long long)m, (long long)n, (long long)k, alpha
#define L(number) ((long long)(number))
#define PLAIN(name, whole)                                                                                           \
    FAKE int name(SIZES(whole), const void *a, whole lda, const void *b, whole ldb, const void *beta, void *c, whole ldc) { \
        SAY(#name, BEGIN "%p %lld %p %lld %p %p %lld", BEGIN_GIVEN, a, L(lda), b, L(ldb), beta, c, L(ldc));          \
    }
#define TYPED(name, whole)                                                                                           \
    FAKE int name(SIZES(whole), const void *a, int at, whole lda, const void *b, int bt, whole ldb, const void *beta, \
                  void *c, int ct, whole ldc) {                                                                      \
        SAY(#name, BEGIN "%p %d %lld %p %d %lld %p %p %d %lld", BEGIN_GIVEN, a, at, L(lda), b, bt, L(ldb), beta, c,  \
            ct, L(ldc));                                                                                             \
    }
#define EX(name, whole)                                                                                              \
    FAKE int name(SIZES(whole), const void *a, int at, whole lda, const void *b, int bt, whole ldb, const void *beta, \
                  void *c, int ct, whole ldc, int compute, int algo) {                                               \
        cublasLtMatmul(handle, NULL, alpha, a, NULL, b, NULL, beta, c, NULL, c, NULL, NULL, NULL, 0, handle);        \
        SAY(#name, BEGIN "%p %d %lld %p %d %lld %p %p %d %lld %d %d", BEGIN_GIVEN, a, at, L(lda), b, bt, L(ldb),     \
            beta, c, ct, L(ldc), compute, algo);                                                                     \
    }
#define BATCHED(name, whole)                                                                                         \
    FAKE int name(SIZES(whole), const void *a, whole lda, const void *b, whole ldb, const void *beta, void *c,       \
                  whole ldc, whole batch) {                                                                          \
        SAY(#name, BEGIN "%p %lld %p %lld %p %p %lld %lld", BEGIN_GIVEN, a, L(lda), b, L(ldb), beta, c, L(ldc),      \
            L(batch));                                                                                               \
    }
#define STRIDED(name, whole)                                                                                         \
    FAKE int name(SIZES(whole), const void *a, whole lda, long long sa, const void *b, whole ldb, long long sb,      \
                  const void *beta, void *c, whole ldc, long long sc, whole batch) {                                 \
        SAY(#name, BEGIN "%p %lld %lld %p %lld %lld %p %p %lld %lld %lld", BEGIN_GIVEN, a, L(lda), sa, b, L(ldb),    \
            sb, beta, c, L(ldc), sc, L(batch));                                                                      \
    }
#define BATCHED_EX(name, whole)                                                                                      \
    FAKE int name(SIZES(whole), const void *a, int at, whole lda, const void *b, int bt, whole ldb, const void *beta, \
                  void *c, int ct, whole ldc, whole batch, int compute, int algo) {                                  \
        SAY(#name, BEGIN "%p %d %lld %p %d %lld %p %p %d %lld %lld %d %d", BEGIN_GIVEN, a, at, L(lda), b, bt,        \
            L(ldb), beta, c, ct, L(ldc), L(batch), compute, algo);                                                   \
    }
#define STRIDED_EX(name, whole)                                                                                      \
    FAKE int name(SIZES(whole), const void *a, int at, whole lda, long long sa, const void *b, int bt, whole ldb,    \
                  long long sb, const void *beta, void *c, int ct, whole ldc, long long sc, whole batch, int compute, \
                  int algo) {                                                                                        \
        SAY(#name, BEGIN "%p %d %lld %lld %p %d %lld %lld %p %p %d %lld %lld %lld %d %d", BEGIN_GIVEN, a, at,        \
            L(lda), sa, b, bt, L(ldb), sb, beta, c, ct, L(ldc), sc, L(batch), compute, algo);                        \
    }
BOTH(PLAIN, cublasSgemm_v2)
BOTH(PLAIN, cublasDgemm_v2)
BOTH(PLAIN, cublasCgemm_v2)
BOTH(PLAIN, cublasZgemm_v2)
BOTH(PLAIN, cublasHgemm)
BOTH(TYPED, cublasSgemmEx)
BOTH(EX, cublasGemmEx)
BOTH(BATCHED_EX, cublasGemmBatchedEx)
BOTH(STRIDED_EX, cublasGemmStridedBatchedEx)
BOTH(STRIDED, cublasSgemmStridedBatched)
BOTH(STRIDED, cublasDgemmStridedBatched)
BOTH(STRIDED, cublasCgemmStridedBatched)
BOTH(STRIDED, cublasZgemmStridedBatched)
BOTH(STRIDED, cublasHgemmStridedBatched)
BOTH(BATCHED, cublasSgemmBatched)
BOTH(BATCHED, cublasDgemmBatched)
BOTH(BATCHED, cublasCgemmBatched)
BOTH(BATCHED, cublasZgemmBatched)
BOTH(BATCHED, cublasHgemmBatched)
#endif
