/* What the fakes of CUDA share: each function writes down its arguments, and returns a number of its own.
 *
 * With FAKE_RESULTS=0 in the environment all results are 0, as where nothing fails, and nothing is written.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FAKE __attribute__((visibility("default")))

static int quiet = -1;
static int calls;

static int fake_is_quiet(void) {
    if (quiet < 0) quiet = getenv("FAKE_RESULTS") && !strcmp(getenv("FAKE_RESULTS"), "0");
    return quiet;
}

#define SAY(name, ...)                                          \
    do {                                                        \
        if (fake_is_quiet()) return 0;                          \
        printf("%s%s ", name, FAKE_RELEASE);                    \
        printf(__VA_ARGS__);                                    \
        putchar('\n');                                          \
        fflush(stdout);                                         \
        return 1000 + __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED); \
    } while (0)

static inline void fake_fault(const char *what) {
    fprintf(stderr, "fake GPU: %s\n", what);
    _exit(70);
}
