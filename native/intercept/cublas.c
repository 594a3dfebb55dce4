/* Matrix products of cuBLAS and cuBLASLt, counted in their thread's lane with their floating-point operations.
 *
 * Each wrapper is one release's, as in cuda.c. cuBLAS calls cuBLASLt by these names, too: the outermost call counts.
 */
#include "gpu_events.h"

typedef int32_t result;
#define NOT_SUPPORTED 15
#define STRIDE_OF_SAMPLES 16u /* the clock is read at each so many */
#define LAYOUT_ROWS 2
#define LAYOUT_COLS 3
#define LAYOUT_BATCH 5

static __thread __attribute__((tls_model("initial-exec"))) int depth;

static void count(struct ring_lane *lane, double flops) {
    ring_count(&lane->gemms);
    double sum = lane->flops + flops;
    __atomic_store(&lane->flops, &sum, __ATOMIC_RELAXED);
}

/* Note that a product was queued; `stream_of`: how its stream is found, with `with`. */
static inline void queued(struct ring_lane *lane, void *with, void *stream, result (*stream_of)(void *, void **)) {
    if (lane->gemms % STRIDE_OF_SAMPLES || call_ring.events == EVENTS_OFF) return;
    struct ring *ring = ring_of_process();
    uint64_t now_ns = ring_clock();
    if (!ring || now_ns - __atomic_load_n(&gpu_events.last_ns[OF_GEMM], __ATOMIC_RELAXED) < EVERY_NS) return;
    if (stream_of && stream_of(with, &stream)) return;
    gpu_called(ring, OF_GEMM, stream, RING_NOWHERE, now_ns);
}

#define OF_RELEASE(name, library, release, parameters, arguments, flops, queue)                          \
    RING_PUBLIC result name##_of_##release parameters;                                                   \
    __asm__(".symver " #name "_of_" #release "," #name "@" library "." #release);                        \
    result name##_of_##release parameters {                                                              \
        static void *next;                                                                               \
        result(*real) parameters = ring_next_version(&next, #name, library "." #release, RING_CALLER);   \
        if (!real) return NOT_SUPPORTED;                                                                 \
        if (depth) return real arguments;                                                                \
        struct ring_lane *lane = ring_lane();                                                            \
        count(lane, flops);                                                                              \
        depth++;                                                                                         \
        result said = real arguments;                                                                    \
        depth--;                                                                                         \
        if (!said) queue(#release, lane);                                                                \
        return said;                                                                                     \
    }

#define BLAS "libcublas.so"
#define BY_HANDLE(release, lane)                                                                                 \
    do {                                                                                                         \
        static void *kept;                                                                                       \
        queued(lane, handle, NULL, (result(*)(void *, void **))ring_next_version(                                \
                                       &kept, "cublasGetStream_v2", BLAS "." release, RING_CALLER));             \
    } while (0)
#define GEMM(name, parameters, arguments, batch, each)                                                           \
    OF_RELEASE(name, BLAS, 12, parameters, arguments, each * (double)m * (double)n * (double)k * (double)(batch), BY_HANDLE) \
    OF_RELEASE(name, BLAS, 13, parameters, arguments, each * (double)m * (double)n * (double)k * (double)(batch), BY_HANDLE)
/* With sizes of 32 bits, and of 64. */
#define BOTH(kind, name, each) \
    kind(name, int32_t, each)  \
    kind(name##_64, int64_t, each)
#define SIZES(whole) void *handle, int32_t transa, int32_t transb, whole m, whole n, whole k
#define SIZES_GIVEN handle, transa, transb, m, n, k

#define PLAIN(name, whole, each)                                                                                     \
    GEMM(name, (SIZES(whole), const void *alpha, const void *a, whole lda, const void *b, whole ldb, const void *beta, \
                void *c, whole ldc),                                                                                 \
         (SIZES_GIVEN, alpha, a, lda, b, ldb, beta, c, ldc), 1, each)
#define STRIDED(name, whole, each)                                                                                   \
    GEMM(name, (SIZES(whole), const void *alpha, const void *a, whole lda, int64_t stride_a, const void *b, whole ldb, \
                int64_t stride_b, const void *beta, void *c, whole ldc, int64_t stride_c, whole batch),              \
         (SIZES_GIVEN, alpha, a, lda, stride_a, b, ldb, stride_b, beta, c, ldc, stride_c, batch), batch, each)
#define BATCHED(name, whole, each)                                                                                   \
    GEMM(name, (SIZES(whole), const void *alpha, const void *a, whole lda, const void *b, whole ldb, const void *beta, \
                void *c, whole ldc, whole batch),                                                                    \
         (SIZES_GIVEN, alpha, a, lda, b, ldb, beta, c, ldc, batch), batch, each)
#define TYPED(name, whole, each)                                                                                     \
    GEMM(name, (SIZES(whole), const void *alpha, const void *a, int32_t type_a, whole lda, const void *b,            \
                int32_t type_b, whole ldb, const void *beta, void *c, int32_t type_c, whole ldc),                    \
         (SIZES_GIVEN, alpha, a, type_a, lda, b, type_b, ldb, beta, c, type_c, ldc), 1, each)
#define EX(name, whole, each)                                                                                        \
    GEMM(name, (SIZES(whole), const void *alpha, const void *a, int32_t type_a, whole lda, const void *b,            \
                int32_t type_b, whole ldb, const void *beta, void *c, int32_t type_c, whole ldc, int32_t compute,    \
                int32_t algorithm),                                                                                  \
         (SIZES_GIVEN, alpha, a, type_a, lda, b, type_b, ldb, beta, c, type_c, ldc, compute, algorithm), 1, each)
#define BATCHED_EX(name, whole, each)                                                                                \
    GEMM(name, (SIZES(whole), const void *alpha, const void *a, int32_t type_a, whole lda, const void *b,            \
                int32_t type_b, whole ldb, const void *beta, void *c, int32_t type_c, whole ldc, whole batch,        \
                int32_t compute, int32_t algorithm),                                                                 \
         (SIZES_GIVEN, alpha, a, type_a, lda, b, type_b, ldb, beta, c, type_c, ldc, batch, compute, algorithm), batch, \
         each)
#define STRIDED_EX(name, whole, each)                                                                                \
    GEMM(name, (SIZES(whole), const void *alpha, const void *a, int32_t type_a, whole lda, int64_t stride_a,         \
                const void *b, int32_t type_b, whole ldb, int64_t stride_b, const void *beta, void *c, int32_t type_c, \
                whole ldc, int64_t stride_c, whole batch, int32_t compute, int32_t algorithm),                       \
         (SIZES_GIVEN, alpha, a, type_a, lda, stride_a, b, type_b, ldb, stride_b, beta, c, type_c, ldc, stride_c,    \
          batch, compute, algorithm), batch, each)

#define REAL_ONES 2.0
#define COMPLEX 8.0

BOTH(PLAIN, cublasSgemm_v2, REAL_ONES)
BOTH(PLAIN, cublasDgemm_v2, REAL_ONES)
BOTH(PLAIN, cublasCgemm_v2, COMPLEX)
BOTH(PLAIN, cublasZgemm_v2, COMPLEX)
BOTH(PLAIN, cublasHgemm, REAL_ONES)
BOTH(TYPED, cublasSgemmEx, REAL_ONES)
BOTH(EX, cublasGemmEx, REAL_ONES)
BOTH(BATCHED_EX, cublasGemmBatchedEx, REAL_ONES)
BOTH(STRIDED_EX, cublasGemmStridedBatchedEx, REAL_ONES)
BOTH(STRIDED, cublasSgemmStridedBatched, REAL_ONES)
BOTH(STRIDED, cublasDgemmStridedBatched, REAL_ONES)
BOTH(STRIDED, cublasCgemmStridedBatched, COMPLEX)
BOTH(STRIDED, cublasZgemmStridedBatched, COMPLEX)
BOTH(STRIDED, cublasHgemmStridedBatched, REAL_ONES)
BOTH(BATCHED, cublasSgemmBatched, REAL_ONES)
BOTH(BATCHED, cublasDgemmBatched, REAL_ONES)
BOTH(BATCHED, cublasCgemmBatched, COMPLEX)
BOTH(BATCHED, cublasZgemmBatched, COMPLEX)
BOTH(BATCHED, cublasHgemmBatched, REAL_ONES)

/* Operations of D = A x B, from the sizes of A and D: k is what A has beside m, however it is laid. */
typedef result (*attribute)(const void *, int32_t, void *, size_t, size_t *);
static double flops_of(attribute get, const void *a, const void *d) {
    uint64_t a_rows = 0, a_cols = 0, m = 0, n = 0;
    int32_t batch = 1;
    size_t written;
    if (!get || !a || !d || get(a, LAYOUT_ROWS, &a_rows, sizeof a_rows, &written) ||
        get(a, LAYOUT_COLS, &a_cols, sizeof a_cols, &written) || get(d, LAYOUT_ROWS, &m, sizeof m, &written) ||
        get(d, LAYOUT_COLS, &n, sizeof n, &written) || get(d, LAYOUT_BATCH, &batch, sizeof batch, &written) || !m)
        return 0.0;
    return REAL_ONES * ((double)a_rows * (double)a_cols) * (double)n * (double)batch;
}

#define LT "libcublasLt.so"
#define BY_STREAM(release, lane) queued(lane, NULL, stream, NULL)
#define MATMUL(release)                                                                                             \
    static void *get_##release;                                                                                     \
    OF_RELEASE(cublasLtMatmul, LT, release,                                                                         \
               (void *handle, void *product, const void *alpha, const void *a, void *layout_a, const void *b,       \
                void *layout_b, const void *beta, const void *c, void *layout_c, void *d, void *layout_d,           \
                const void *algorithm, void *workspace, size_t size, void *stream),                                 \
               (handle, product, alpha, a, layout_a, b, layout_b, beta, c, layout_c, d, layout_d, algorithm,        \
                workspace, size, stream),                                                                           \
               flops_of((attribute)ring_next_version(&get_##release, "cublasLtMatrixLayoutGetAttribute",            \
                                                     LT "." #release, RING_CALLER), layout_a, layout_d),            \
               BY_STREAM)
MATMUL(12)
MATMUL(13)
