/* Calls the fake NCCL with arguments that are all different, and prints what came back: nccl_program [LIBRARY MODE].
 *
 * With a LIBRARY this program is a small module's loader: the calls come from a library that is opened with dlopen, in
 * the MODE local, global or deep (RTLD_DEEPBIND). Built with -DMODULE it is that library.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    char internal[128];
} unique_id;

int ncclCommInitRank(void **, int, unique_id, int);
int ncclCommSplit(void *, int, int, void **, void *);
int ncclCommDestroy(void *);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int ncclBcast(void *, size_t, int, int, void *, void *);
int ncclReduce(const void *, void *, size_t, int, int, int, void *, void *);
int ncclAllGather(const void *, void *, size_t, int, void *, void *);
int ncclReduceScatter(const void *, void *, size_t, int, int, void *, void *);
int ncclSend(const void *, size_t, int, int, void *, void *);
int ncclRecv(void *, size_t, int, int, void *, void *);

#ifdef MODULE
#define AT(number) ((void *)(uintptr_t)(number))
__attribute__((visibility("default"))) void make_calls(void) {
    unique_id id;
    memset(&id, 0, sizeof id);
    id.internal[0] = 7;
    id.internal[127] = 9;
    void *comm, *child;
    int came[10], count = 0;
    came[count++] = ncclCommInitRank(&comm, 4, id, 2);
    came[count++] = ncclAllReduce(AT(0x11), AT(0x12), (size_t)1 << 40, 7, 3, comm, AT(0x13));
    came[count++] = ncclBcast(AT(0x21), 5, 9, 1, comm, AT(0x22));
    came[count++] = ncclReduce(AT(0x31), AT(0x32), 6, 0, 2, 3, comm, AT(0x33));
    came[count++] = ncclCommSplit(comm, 5, 6, &child, AT(0x99));
    came[count++] = ncclAllGather(AT(0x41), AT(0x42), 8, 4, child, AT(0x43));
    came[count++] = ncclReduceScatter(AT(0x51), AT(0x52), 9, 11, 1, child, AT(0x53));
    came[count++] = ncclSend(AT(0x61), 10, 2, 3, comm, AT(0x62));
    came[count++] = ncclRecv(AT(0x71), 11, 99, 0, comm, AT(0x72));
    came[count++] = ncclCommDestroy(child);
    printf("came");
    for (int number = 0; number < count; number++) printf(" %d", came[number]);
    printf(" %p %p\n", comm, child);
    fflush(stdout);
}
#else
int main(int arguments, char **argument) {
    if (arguments < 3) return 2;
    int mode = !strcmp(argument[2], "deep") ? RTLD_LOCAL | RTLD_DEEPBIND : !strcmp(argument[2], "global") ? RTLD_GLOBAL : RTLD_LOCAL;
    void *module = dlopen(argument[1], RTLD_NOW | mode);
    if (!module) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    void (*make_calls)(void) = (void (*)(void))dlsym(module, "make_calls");
    make_calls();
    return 0;
}
#endif
