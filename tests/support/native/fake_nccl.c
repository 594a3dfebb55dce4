/* A fake of libnccl for machines without a GPU: each function writes down its arguments and returns a number of its own.
 *
 * It has the functions of NCCL 2.21; a call of any other one does not link. With FAKE_RESULTS=0 all results are 0, and
 * nothing is written.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    char internal[128];
} unique_id;

static int calls, quiet = -1;

static int is_quiet(void) {
    if (quiet < 0) quiet = getenv("FAKE_RESULTS") && !strcmp(getenv("FAKE_RESULTS"), "0");
    return quiet;
}

static int said(const char *name, const char *facts) {
    printf("%s %s\n", name, facts);
    fflush(stdout);
    return 100 + calls++;
}

#define SAY(name, ...)                                       \
    char facts[400];                                         \
    if (is_quiet()) return 0;                                \
    snprintf(facts, sizeof facts, __VA_ARGS__);              \
    return said(#name, facts)

int ncclCommInitRank(void **comm, int size, unique_id id, int rank) {
    *comm = (void *)(uintptr_t)(0x1000 + (unsigned char)id.internal[0] * 16);
    SAY(ncclCommInitRank, "%d %d %d %d", size, id.internal[0], id.internal[127], rank);
}
int ncclCommSplit(void *comm, int color, int key, void **newcomm, void *config) {
    *newcomm = (char *)comm + 1 + color;
    SAY(ncclCommSplit, "%p %d %d %p", comm, color, key, config);
}
int ncclCommDestroy(void *comm) { SAY(ncclCommDestroy, "%p", comm); }
int ncclCommAbort(void *comm) { SAY(ncclCommAbort, "%p", comm); }
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, void *comm, void *stream) {
    SAY(ncclAllReduce, "%p %p %zu %d %d %p %p", from, to, count, type, op, comm, stream);
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, void *comm, void *stream) {
    SAY(ncclBroadcast, "%p %p %zu %d %d %p %p", from, to, count, type, root, comm, stream);
}
int ncclBcast(void *buffer, size_t count, int type, int root, void *comm, void *stream) {
    printf("ncclBcast\n");
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream); /* as the real one does */
}
int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, void *comm, void *stream) {
    SAY(ncclReduce, "%p %p %zu %d %d %d %p %p", from, to, count, type, op, root, comm, stream);
}
int ncclAllGather(const void *from, void *to, size_t count, int type, void *comm, void *stream) {
    SAY(ncclAllGather, "%p %p %zu %d %p %p", from, to, count, type, comm, stream);
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, void *comm, void *stream) {
    SAY(ncclReduceScatter, "%p %p %zu %d %d %p %p", from, to, count, type, op, comm, stream);
}
int ncclSend(const void *buffer, size_t count, int type, int peer, void *comm, void *stream) {
    SAY(ncclSend, "%p %zu %d %d %p %p", buffer, count, type, peer, comm, stream);
}
int ncclRecv(void *buffer, size_t count, int type, int peer, void *comm, void *stream) {
    SAY(ncclRecv, "%p %zu %d %d %p %p", buffer, count, type, peer, comm, stream);
}
int ncclGroupStart(void) { SAY(ncclGroupStart, "-"); }
int ncclGroupEnd(void) { SAY(ncclGroupEnd, "-"); }
