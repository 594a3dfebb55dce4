/* All functions that native/intercept stands before in CUDA and cuBLAS: X(name, types of parameters, arguments).
 *
 * P, I, S, L, D make an argument that no other call has: a pointer, int, size, 64-bit number, dim3.
 */
#include <stddef.h>
#include <stdint.h>

struct dim3 {
    unsigned x, y, z;
};

#define OWN(X, name, own, types, given) X(name, types, given) X(name##own, types, given)
#define GRID_TYPES (const void *, struct dim3, struct dim3, void **, size_t, void *)
#define GRID_GIVEN (P, D, D, P, S, P)
#define RUNTIME_CALLS(X)                                                                                         \
    OWN(X, cudaLaunchKernel, _ptsz, GRID_TYPES, GRID_GIVEN)                                                      \
    OWN(X, __cudaLaunchKernel, _ptsz, GRID_TYPES, GRID_GIVEN)                                                    \
    OWN(X, cudaLaunchCooperativeKernel, _ptsz, GRID_TYPES, GRID_GIVEN)                                           \
    OWN(X, cudaLaunchKernelExC, _ptsz, (const void *, const void *, void **), (P, P, P))                         \
    OWN(X, cudaGraphLaunch, _ptsz, (void *, void *), (P, P))                                                     \
    OWN(X, cudaStreamSynchronize, _ptsz, (void *), (P))                                                          \
    X(cudaDeviceSynchronize, (void), ())                                                                         \
    X(cudaEventSynchronize, (void *), (P))                                                                       \
    X(cudaFree, (void *), (P))                                                                                   \
    OWN(X, cudaMemcpy, _ptds, (void *, const void *, size_t, int), (P, P, S, I))                                 \
    OWN(X, cudaMemcpy2D, _ptds, (void *, size_t, const void *, size_t, size_t, size_t, int), (P, S, P, S, S, S, I)) \
    X(cudaStreamBeginCapture, (void *, int), ((void *)0x77, I))                                                  \
    X(cudaStreamEndCapture, (void *, void **), ((void *)0x77, P))                                                \
    X(cudaStreamBeginCapture_ptsz, (void *, int), ((void *)0x77, I))                                             \
    X(cudaStreamEndCapture_ptsz, (void *, void **), ((void *)0x77, P))                                           \
    OWN(X, cudaStreamBeginCaptureToGraph, _ptsz, (void *, void *, const void *, const void *, size_t, int),      \
        (P, P, P, P, S, I))

#define LAUNCH_TYPES void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **
#define LAUNCH_GIVEN P, I, I, I, I, I, I, I, P, P
#define DRIVER_CALLS(X)                                                                                          \
    OWN(X, cuLaunchKernel, _ptsz, (LAUNCH_TYPES, void **), (LAUNCH_GIVEN, P))                                    \
    OWN(X, cuLaunchCooperativeKernel, _ptsz, (LAUNCH_TYPES), (LAUNCH_GIVEN))                                     \
    OWN(X, cuLaunchKernelEx, _ptsz, (const void *, void *, void **, void **), (P, P, P, P))                      \
    OWN(X, cuGraphLaunch, _ptsz, (void *, void *), (P, P))                                                       \
    OWN(X, cuStreamSynchronize, _ptsz, (void *), (P))                                                            \
    X(cuCtxSynchronize, (void), ())                                                                              \
    X(cuEventSynchronize, (void *), (P))                                                                         \
    X(cuMemFree_v2, (uint64_t), (L))                                                                             \
    OWN(X, cuMemcpy, _ptds, (uint64_t, uint64_t, size_t), (L, L, S))                                             \
    OWN(X, cuMemcpyHtoD_v2, _ptds, (uint64_t, const void *, size_t), (L, P, S))                                  \
    OWN(X, cuMemcpyDtoH_v2, _ptds, (void *, uint64_t, size_t), (P, L, S))                                        \
    OWN(X, cuMemcpyDtoD_v2, _ptds, (uint64_t, uint64_t, size_t), (L, L, S))                                      \
    OWN(X, cuStreamBeginCapture_v2, _ptsz, (void *, int), (P, I))                                                \
    OWN(X, cuStreamEndCapture, _ptsz, (void *, void **), (P, P))                                                 \
    OWN(X, cuStreamBeginCaptureToGraph, _ptsz, (void *, void *, const void *, const void *, size_t, int),        \
        (P, P, P, P, S, I))                                                                                      \
    X(cuCtxDestroy_v2, (void *), (P))                                                                            \
    X(cuDevicePrimaryCtxReset_v2, (int), (I))

#define WIDTHS(make, X, name) make(X, name, int, I) make(X, name##_64, int64_t, L)
#define SIZES(whole) void *, int, int, whole, whole, whole, const void *
#define SIZES_GIVEN(W) P, I, I, W, W, W, P
#define PLAIN(X, name, whole, W)                                                                          \
    X(name, (SIZES(whole), const void *, whole, const void *, whole, const void *, void *, whole),        \
      (SIZES_GIVEN(W), P, W, P, W, P, P, W))
#define TYPED(X, name, whole, W)                                                                          \
    X(name, (SIZES(whole), const void *, int, whole, const void *, int, whole, const void *, void *, int, whole), \
      (SIZES_GIVEN(W), P, I, W, P, I, W, P, P, I, W))
#define EX(X, name, whole, W)                                                                             \
    X(name, (SIZES(whole), const void *, int, whole, const void *, int, whole, const void *, void *, int, whole, int, int), \
      (SIZES_GIVEN(W), P, I, W, P, I, W, P, P, I, W, I, I))
#define BATCHED(X, name, whole, W)                                                                        \
    X(name, (SIZES(whole), const void *, whole, const void *, whole, const void *, void *, whole, whole), \
      (SIZES_GIVEN(W), P, W, P, W, P, P, W, W))
#define STRIDED(X, name, whole, W)                                                                        \
    X(name, (SIZES(whole), const void *, whole, int64_t, const void *, whole, int64_t, const void *, void *, whole, int64_t, whole), \
      (SIZES_GIVEN(W), P, W, L, P, W, L, P, P, W, L, W))
#define BATCHED_EX(X, name, whole, W)                                                                     \
    X(name, (SIZES(whole), const void *, int, whole, const void *, int, whole, const void *, void *, int, whole, whole, int, int), \
      (SIZES_GIVEN(W), P, I, W, P, I, W, P, P, I, W, W, I, I))
#define STRIDED_EX(X, name, whole, W)                                                                     \
    X(name, (SIZES(whole), const void *, int, whole, int64_t, const void *, int, whole, int64_t, const void *, void *, int, \
             whole, int64_t, whole, int, int),                                                            \
      (SIZES_GIVEN(W), P, I, W, L, P, I, W, L, P, P, I, W, L, W, I, I))
#define BLAS_CALLS(X)                            \
    WIDTHS(PLAIN, X, cublasSgemm_v2)             \
    WIDTHS(PLAIN, X, cublasDgemm_v2)             \
    WIDTHS(PLAIN, X, cublasCgemm_v2)             \
    WIDTHS(PLAIN, X, cublasZgemm_v2)             \
    WIDTHS(PLAIN, X, cublasHgemm)                \
    WIDTHS(TYPED, X, cublasSgemmEx)              \
    WIDTHS(EX, X, cublasGemmEx)                  \
    WIDTHS(BATCHED_EX, X, cublasGemmBatchedEx)   \
    WIDTHS(STRIDED_EX, X, cublasGemmStridedBatchedEx) \
    WIDTHS(STRIDED, X, cublasSgemmStridedBatched) \
    WIDTHS(STRIDED, X, cublasDgemmStridedBatched) \
    WIDTHS(STRIDED, X, cublasCgemmStridedBatched) \
    WIDTHS(STRIDED, X, cublasZgemmStridedBatched) \
    WIDTHS(STRIDED, X, cublasHgemmStridedBatched) \
    WIDTHS(BATCHED, X, cublasSgemmBatched)       \
    WIDTHS(BATCHED, X, cublasDgemmBatched)       \
    WIDTHS(BATCHED, X, cublasCgemmBatched)       \
    WIDTHS(BATCHED, X, cublasZgemmBatched)       \
    WIDTHS(BATCHED, X, cublasHgemmBatched)

#define HIP_CALLS(X)                                                                                             \
    X(hipLaunchKernel, GRID_TYPES, GRID_GIVEN)                                                                   \
    X(hipLaunchCooperativeKernel, (const void *, struct dim3, struct dim3, void **, unsigned, void *), (P, D, D, P, I, P)) \
    X(hipModuleLaunchKernel, (LAUNCH_TYPES, void **), (LAUNCH_GIVEN, P))                                         \
    X(hipGraphLaunch, (void *, void *), (P, P))                                                                  \
    X(hipStreamSynchronize, (void *), (P))                                                                       \
    X(hipDeviceSynchronize, (void), ())                                                                          \
    X(hipEventSynchronize, (void *), (P))                                                                        \
    X(hipFree, (void *), (P))                                                                                    \
    X(hipMemcpy, (void *, const void *, size_t, int), (P, P, S, I))                                              \
    X(hipStreamBeginCapture, (void *, int), (P, I))                                                              \
    X(hipStreamEndCapture, (void *, void **), (P, P))
