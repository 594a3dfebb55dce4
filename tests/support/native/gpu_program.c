/* A program that uses the fake GPU: gpu_program WAY [MODULE…].
 *
 * modules M…: has each module call every function. The others call themselves, and print what the driver was asked:
 * events, capture, group, other (a stream of another context), fork, reset, threads N, hang, forever, speed N.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "gpu_calls.h"

#define DECLARE(name, types, arguments) int name types;
RUNTIME_CALLS(DECLARE)
BLAS_CALLS(DECLARE)
int cublasLtMatmul(void *, void *, const void *, const void *, void *, const void *, void *, const void *, const void *,
                   void *, void *, void *, const void *, void *, size_t, void *);
int cudaDeviceReset(void);
void fake_counts(int counts[3]);
typedef struct {
    char internal[128];
} unique_id;
int ncclCommInitRank(void **, int, unique_id, int);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int ncclGroupStart(void);
int ncclGroupEnd(void);

#define STREAM ((void *)0x40)
static const struct dim3 ONE = {1, 1, 1};
static void *comm;

static void launch(void) { __cudaLaunchKernel(NULL, ONE, ONE, NULL, 0, STREAM); }
static void reduce(void *stream) { ncclAllReduce(NULL, NULL, 7, 7, 0, comm, stream); }
static void multiply(void *stream) {
    int k = 30;
    cublasSgemm_v2(stream, 0, 0, 10, 20, k, NULL, NULL, 1, NULL, 1, NULL, NULL, 1);
}
static void multiply_lt(void *stream) {
    uint64_t a[3] = {20, 10, 4}, d[3] = {20, 30, 4};
    cublasLtMatmul(NULL, NULL, NULL, NULL, a, NULL, d, NULL, NULL, d, NULL, d, NULL, NULL, 0, stream);
}
static void some(void *stream) { /* slower than one event in 20 ms */
    for (int turn = 0; turn < 8; turn++) {
        usleep(25000);
        reduce(stream);
        for (int gemm = 0; gemm < 16; gemm++) multiply(stream);
    }
}

static long count;
static void *launches(void *unused) {
    for (long call = 0; call < count; call++) launch();
    return unused;
}

static double nanoseconds(void (*call)(void)) {
    struct timespec began, ended;
    clock_gettime(CLOCK_MONOTONIC, &began);
    for (long number = 0; number < count; number++) call();
    clock_gettime(CLOCK_MONOTONIC, &ended);
    return ((double)(ended.tv_sec - began.tv_sec) * 1e9 + (double)(ended.tv_nsec - began.tv_nsec)) / (double)count;
}
static void wait_once(void) { cudaStreamSynchronize(STREAM); }
static void reduce_once(void) { reduce(STREAM); }
static void multiply_once(void) { multiply(STREAM); }
static void read_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
}
static void multiply_lt_once(void) { multiply_lt(STREAM); }

int main(int arguments, char **argument) {
    const char *way = arguments > 1 ? argument[1] : "";
    count = arguments > 2 ? atol(argument[2]) : 1;
    if (!strcmp(way, "modules")) {
        for (int one = 2; one < arguments; one++) {
            void *module = dlopen(argument[one], RTLD_NOW | RTLD_LOCAL);
            if (!module) {
                fprintf(stderr, "%s\n", dlerror());
                return 1;
            }
            ((void (*)(void))dlsym(module, "every_function"))();
        }
        return 0;
    }
    unique_id id = {{7}};
    ncclCommInitRank(&comm, 2, id, 0);
    if (!strcmp(way, "events")) {
        some(STREAM);
        cudaStreamSynchronize(STREAM);
        usleep(25000);
        reduce(STREAM); /* looks again */
        reduce(STREAM); /* too soon for an event */
    } else if (!strcmp(way, "capture")) {
        cudaStreamBeginCapture(STREAM, 0);
        some(STREAM);
        some((void *)0x50); /* another thread's could be captured by now */
        cudaStreamEndCapture(STREAM, NULL);
        some(STREAM);
    } else if (!strcmp(way, "group")) {
        for (int turn = 0; turn < 3; turn++) {
            usleep(25000);
            ncclGroupStart();
            ncclGroupStart();
            reduce(STREAM);
            reduce(STREAM);
            ncclGroupEnd();
            int counts[3];
            fake_counts(counts);
            printf("inside %d\n", counts[1]);
            ncclGroupEnd();
        }
    } else if (!strcmp(way, "other")) {
        some((void *)0x9000);
    } else if (!strcmp(way, "fork")) {
        some(STREAM);
        pid_t child = fork();
        if (child == 0) {
            if (argument[2]) setenv("RESILIO_CALLS", argument[2], 1);
            launch();
            some(STREAM);
            cudaStreamSynchronize((void *)0x41);
            _exit(0);
        }
        int status;
        waitpid(child, &status, 0);
        if (status) return 1;
    } else if (!strcmp(way, "reset")) {
        some(STREAM);
        cudaDeviceReset();
        some(STREAM);
    } else if (!strcmp(way, "threads")) {
        pthread_t threads[8];
        for (int round = 0; round < 20; round++) { /* more threads than lanes, one after the other */
            for (int one = 0; one < 8; one++) pthread_create(&threads[one], NULL, launches, NULL);
            for (int one = 0; one < 8; one++) pthread_join(threads[one], NULL);
        }
    } else if (!strcmp(way, "hang")) {
        launch();
        puts("hangs");
        fflush(stdout);
        cudaStreamSynchronize((void *)0xdead);
    } else if (!strcmp(way, "forever")) {
        puts("runs");
        fflush(stdout);
        for (;;) {
            launch();
            cudaGraphLaunch(NULL, STREAM);
            multiply(STREAM);
            reduce(STREAM);
            cudaStreamSynchronize(STREAM);
        }
    } else if (!strcmp(way, "speed")) {
        void (*calls[])(void) = {launch, multiply_once, multiply_lt_once, wait_once, reduce_once, read_clock};
        for (size_t one = 0; one < sizeof calls / sizeof *calls; one++) nanoseconds(calls[one]); /* warm */
        for (size_t one = 0; one < sizeof calls / sizeof *calls; one++) printf("%.2f ", nanoseconds(calls[one]));
        puts("");
        return 0;
    } else {
        return 2;
    }
    int counts[3];
    fake_counts(counts);
    printf("made %d recorded %d queried %d\n", counts[0], counts[1], counts[2]);
    return 0;
}
