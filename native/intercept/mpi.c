/* Calls of MPI, noted in the call ring, through MPI's profiling interface: each function here calls its PMPI_ twin.
 *
 * It serves Open MPI, whose handles are pointers, and MPICH and its derivatives, whose handles are ints; so no mpi.h is
 * used. Each parameter is a word: an int in the upper half of whose word anything may stand. Programs in C, C++ and
 * Python are seen; Open MPI's functions for Fortran call PMPI_ themselves, and are not.
 */
#include "call_ring.h"

typedef uintptr_t word;
typedef int32_t number; /* a word's int */

#define PARAMETERS(...) __VA_ARGS__
#define FIND(name) (mpi_caller = RING_CALLER, ring_next(&next, "PMPI_" #name, RING_CALLER))

static const void *mpi_caller; /* code that calls MPI, and so needs its library */
static int has_pointers = -1;  /* Open MPI's handles */

static void *function(void **kept, const char *name) { return ring_next(kept, name, mpi_caller); }

static int is_open_mpi(void) {
    static void *kept;
    if (has_pointers < 0) has_pointers = function(&kept, "ompi_mpi_comm_world") != NULL;
    return has_pointers;
}

static uint64_t handle(word value) { return is_open_mpi() ? value : (uint32_t)value; }

static word world(void) {
    static void *kept;
    return is_open_mpi() ? (word)function(&kept, "ompi_mpi_comm_world") : 0x44000000u;
}

static word nothing(void) { /* MPI_COMM_NULL */
    static void *kept;
    return is_open_mpi() ? (word)function(&kept, "ompi_mpi_comm_null") : 0x04000000u;
}

/* The world ranks of a communicator make its id, with the number of communicators of the same ranks that were made before
 * it: all members make them in one order. All calls here are local. */
static void describe(struct ring_group *group, void *with) {
    static void *kept[7];
    int (*size_of)(word, number *) = function(&kept[0], "PMPI_Comm_size");
    int (*rank_in)(word, number *) = function(&kept[1], "PMPI_Comm_rank");
    int (*group_of_comm)(word, word *) = function(&kept[2], "PMPI_Comm_group");
    int (*translate)(word, number, const number *, word, number *) = function(&kept[3], "PMPI_Group_translate_ranks");
    int (*release)(word *) = function(&kept[4], "PMPI_Group_free");
    word comm = *(word *)with, of_comm = 0, of_world = 0;
    uint64_t before = 0;
    memcpy(group->family, "MPI", 4);
    group->members = 1;
    if (!size_of || !rank_in || !group_of_comm || !translate || !release) return;
    number size = 0;
    size_of(comm, &size);
    rank_in(comm, &group->rank);
    group->size = size;
    number *ranks = malloc(2 * sizeof(number) * (size_t)(size + 1));
    if (ranks && group_of_comm(comm, &of_comm) == 0 && group_of_comm(world(), &of_world) == 0) {
        for (number rank = 0; rank < size; rank++) ranks[rank] = rank;
        translate(of_comm, size, ranks, of_world, ranks + size);
        group->members = ring_hash(ranks + size, sizeof(number) * (size_t)size, 0);
    }
    if (of_comm) release(&of_comm);
    if (of_world) release(&of_world);
    free(ranks);
    for (struct ring_group *other = call_ring.ring->groups; other < group; other++)
        before += other->members == group->members;
    __atomic_store_n(&group->id, ring_hash(&before, sizeof before, group->members), __ATOMIC_RELEASE);
}

static int group_of(struct ring *ring, word comm) { return ring_group_of(ring, handle(comm), describe, &comm); }

static uint64_t entered(struct ring *ring, word comm, struct ring_call call) {
    if (!ring) return RING_NOWHERE;
    if (!ring->header.groups_used) group_of(ring, world()); /* the first, whatever is used first */
    return ring_entered(ring, group_of(ring, comm), call);
}

/* A call that returns when it is completed. `amount`: elements, where all ranks must give the same number. */
#define BLOCKING(name, which, parameters, arguments, comm, amount, other)                                   \
    RING_PUBLIC int MPI_##name(parameters);                                                                 \
    int MPI_##name(parameters) {                                                                            \
        static void *next;                                                                                  \
        int (*real)(parameters) = FIND(name);                                                               \
        struct ring *ring = ring_of_process();                                                              \
        struct ring_call call = {.op = which, .peer = (number)(other), .count = (uint32_t)(amount)};        \
        uint64_t index = entered(ring, comm, call);                                                         \
        int result = real(arguments);                                                                       \
        ring_completed(ring, index);                                                                        \
        return result;                                                                                      \
    }

#define NO_PEER ((word)-1)
#define A6 PARAMETERS(word a, word b, word c, word d, word e, word f)
#define V6 PARAMETERS(a, b, c, d, e, f)
#define A7 PARAMETERS(word a, word b, word c, word d, word e, word f, word g)
#define V7 PARAMETERS(a, b, c, d, e, f, g)
#define A8 PARAMETERS(word a, word b, word c, word d, word e, word f, word g, word h)
#define V8 PARAMETERS(a, b, c, d, e, f, g, h)
#define A9 PARAMETERS(word a, word b, word c, word d, word e, word f, word g, word h, word i)
#define V9 PARAMETERS(a, b, c, d, e, f, g, h, i)
#define A12 PARAMETERS(word a, word b, word c, word d, word e, word f, word g, word h, word i, word j, word k, word l)
#define V12 PARAMETERS(a, b, c, d, e, f, g, h, i, j, k, l)

BLOCKING(Barrier, OP_BARRIER, word a, a, a, 0, NO_PEER)
BLOCKING(Bcast, OP_BROADCAST, PARAMETERS(word a, word b, word c, word d, word e), PARAMETERS(a, b, c, d, e), e, 0, d)
BLOCKING(Allreduce, OP_ALL_REDUCE, A6, V6, f, c, NO_PEER)
BLOCKING(Reduce, OP_REDUCE, A7, V7, g, c, f)
BLOCKING(Allgather, OP_ALL_GATHER, A7, V7, g, 0, NO_PEER)
BLOCKING(Allgatherv, OP_ALL_GATHER, A8, V8, h, 0, NO_PEER)
BLOCKING(Reduce_scatter, OP_REDUCE_SCATTER, A6, V6, f, 0, NO_PEER)
BLOCKING(Reduce_scatter_block, OP_REDUCE_SCATTER, A6, V6, f, c, NO_PEER)
BLOCKING(Alltoall, OP_ALL_TO_ALL, A7, V7, g, 0, NO_PEER)
BLOCKING(Alltoallv, OP_ALL_TO_ALL, A9, V9, i, 0, NO_PEER)
BLOCKING(Alltoallw, OP_ALL_TO_ALL, A9, V9, i, 0, NO_PEER)
BLOCKING(Gather, OP_GATHER, A8, V8, h, 0, g)
BLOCKING(Gatherv, OP_GATHER, A9, V9, i, 0, h)
BLOCKING(Scatter, OP_SCATTER, A8, V8, h, 0, g)
BLOCKING(Scatterv, OP_SCATTER, A9, V9, i, 0, h)
BLOCKING(Scan, OP_SCAN, A6, V6, f, c, NO_PEER)
BLOCKING(Exscan, OP_SCAN, A6, V6, f, c, NO_PEER)
BLOCKING(Send, OP_SEND, A6, V6, f, b, d)
BLOCKING(Ssend, OP_SEND, A6, V6, f, b, d)
BLOCKING(Rsend, OP_SEND, A6, V6, f, b, d)
BLOCKING(Recv, OP_RECV, A7, V7, f, b, d)

RING_PUBLIC int MPI_Sendrecv(A12);
int MPI_Sendrecv(A12) {
    static void *next;
    int (*real)(A12) = FIND(Sendrecv);
    struct ring *ring = ring_of_process();
    struct ring_call send = {.op = OP_SEND, .peer = (number)d, .count = (uint32_t)b};
    struct ring_call receive = {.op = OP_RECV, .peer = (number)i, .count = (uint32_t)g};
    uint64_t sent = entered(ring, k, send), received = entered(ring, k, receive);
    int result = real(V12);
    ring_completed(ring, sent);
    ring_completed(ring, received);
    return result;
}

/* A call that gives a request, which a function below completes. Requests are words in Open MPI, else ints. */
static uint64_t request(word place) {
    return is_open_mpi() ? *(uint64_t *)place : *(uint32_t *)place;
}

#define REQUESTED(name, which, parameters, arguments, comm, amount, other, place)                           \
    RING_PUBLIC int MPI_##name(parameters);                                                                 \
    int MPI_##name(parameters) {                                                                            \
        static void *next;                                                                                  \
        int (*real)(parameters) = FIND(name);                                                               \
        struct ring_call call = {                                                                           \
            .op = which, .state = CALL_IN_FLIGHT, .peer = (number)(other), .count = (uint32_t)(amount)};    \
        uint64_t index = entered(ring_of_process(), comm, call);                                            \
        int result = real(arguments);                                                                       \
        ring_await(request(place), index);                                                                  \
        return result;                                                                                      \
    }

REQUESTED(Isend, OP_SEND, A7, V7, f, b, d, g)
REQUESTED(Issend, OP_SEND, A7, V7, f, b, d, g)
REQUESTED(Irecv, OP_RECV, A7, V7, f, b, d, g)
REQUESTED(Ibarrier, OP_BARRIER, PARAMETERS(word a, word b), PARAMETERS(a, b), a, 0, NO_PEER, b)
REQUESTED(Ibcast, OP_BROADCAST, A6, V6, e, 0, d, f)
REQUESTED(Iallreduce, OP_ALL_REDUCE, A7, V7, f, c, NO_PEER, g)
REQUESTED(Iallgather, OP_ALL_GATHER, A8, V8, g, 0, NO_PEER, h)
REQUESTED(Ireduce, OP_REDUCE, A8, V8, g, c, f, h)

/* A completed request's handle becomes MPI_REQUEST_NULL, so those that changed are completed. */
#define MOST_REQUESTS 64
static void note_requests(number count, word places, uint64_t *before, int waits) {
    size_t step = is_open_mpi() ? sizeof(uint64_t) : sizeof(uint32_t);
    struct ring *ring = waits ? ring_of_process() : NULL;
    for (number at = 0; at < count && at < MOST_REQUESTS; at++) {
        before[at] = request(places + (size_t)at * step);
        ring_waited_for(ring, before[at]);
    }
}

static void note_arrivals(number count, word places, const uint64_t *before) {
    size_t step = is_open_mpi() ? sizeof(uint64_t) : sizeof(uint32_t);
    struct ring *ring = ring_of_process();
    for (number at = 0; at < count && at < MOST_REQUESTS; at++)
        if (request(places + (size_t)at * step) != before[at]) ring_arrived(ring, before[at]);
}

#define COMPLETES(name, parameters, arguments, count, places, waits)                                        \
    RING_PUBLIC int MPI_##name(parameters);                                                                 \
    int MPI_##name(parameters) {                                                                            \
        static void *next;                                                                                  \
        int (*real)(parameters) = FIND(name);                                                               \
        uint64_t before[MOST_REQUESTS];                                                                     \
        note_requests((number)(count), places, before, waits);                                              \
        int result = real(arguments);                                                                       \
        note_arrivals((number)(count), places, before);                                                     \
        return result;                                                                                      \
    }

#define A3 PARAMETERS(word a, word b, word c)
#define V3 PARAMETERS(a, b, c)
#define A4 PARAMETERS(word a, word b, word c, word d)
#define V4 PARAMETERS(a, b, c, d)
#define A5 PARAMETERS(word a, word b, word c, word d, word e)
#define V5 PARAMETERS(a, b, c, d, e)
COMPLETES(Wait, PARAMETERS(word a, word b), PARAMETERS(a, b), 1, a, 1)
COMPLETES(Waitall, A3, V3, a, b, 1)
COMPLETES(Waitany, A4, V4, a, b, 0)
COMPLETES(Waitsome, A5, V5, a, b, 0)
COMPLETES(Test, A3, V3, 1, a, 0)
COMPLETES(Testall, A4, V4, a, b, 0)
COMPLETES(Testany, A5, V5, a, b, 0)
COMPLETES(Testsome, A5, V5, a, b, 0)

/* A new communicator is known from its making on, so that all members count it in one order. */
#define MAKES(name, parameters, arguments, comm, place)                                                     \
    RING_PUBLIC int MPI_##name(parameters);                                                                 \
    int MPI_##name(parameters) {                                                                            \
        static void *next;                                                                                  \
        int (*real)(parameters) = FIND(name);                                                               \
        struct ring *ring = ring_of_process();                                                              \
        struct ring_call call = {.op = OP_COMMUNICATOR, .peer = -1};                                        \
        uint64_t index = entered(ring, comm, call);                                                         \
        int result = real(arguments);                                                                       \
        ring_completed(ring, index);                                                                        \
        word made = is_open_mpi() ? *(word *)place : *(uint32_t *)place;                                    \
        if (ring && made != nothing()) group_of(ring, made);                                                \
        return result;                                                                                      \
    }
MAKES(Comm_dup, PARAMETERS(word a, word b), PARAMETERS(a, b), a, b)
MAKES(Comm_split, A4, V4, a, d)
MAKES(Comm_create, A3, V3, a, c)
MAKES(Comm_split_type, A5, V5, a, e)
MAKES(Comm_dup_with_info, A3, V3, a, c)

RING_PUBLIC int MPI_Comm_free(word place);
int MPI_Comm_free(word place) {
    static void *next;
    int (*real)(word) = FIND(Comm_free);
    struct ring *ring = ring_of_process();
    if (ring) ring_group_ended(ring, is_open_mpi() ? *(uint64_t *)place : *(uint32_t *)place);
    return real(place);
}
