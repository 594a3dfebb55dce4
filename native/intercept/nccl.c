/* Calls of NCCL (and of RCCL, which has the same names), noted in the call ring when the program makes them.
 *
 * A call returns when it is queued. Now and then an event is recorded behind one (gpu_events.h); once the GPU has reached
 * it, that call is completed, and so are all earlier ones of its communicator on its stream, which the reader concludes.
 * Inside ncclGroupStart and ncclGroupEnd nothing is queued yet: the event comes after the group.
 *
 * A communicator's id is made from what all its ranks give: the unique id, or its parent's id, how many came of that
 * parent before, and the color.
 */
#include "gpu_events.h"

#define NCCL_UNIQUE_ID_BYTES 128
typedef struct {
    char internal[NCCL_UNIQUE_ID_BYTES];
} unique_id;
typedef int32_t result;
#define INTERNAL_ERROR 3
#define FIND(name) ring_next(&next, #name, RING_CALLER)

static const uint8_t DTYPES[] = {
    DTYPE_INT8,    DTYPE_UINT8,   DTYPE_INT32,   DTYPE_UINT32,   DTYPE_INT64,       DTYPE_UINT64,
    DTYPE_FLOAT16, DTYPE_FLOAT32, DTYPE_FLOAT64, DTYPE_BFLOAT16, DTYPE_FLOAT8_E4M3, DTYPE_FLOAT8_E5M2,
};

#define THREAD static __thread __attribute__((tls_model("initial-exec")))
THREAD int depth; /* NCCL's own functions may call each other through these names */
THREAD int groups; /* of calls, that were begun and not ended */
THREAD struct {
    uint64_t index;
    void *stream;
} last_of_group = {RING_NOWHERE, NULL};

struct made {
    uint64_t id;
    int32_t rank, size;
};

static void describe(struct ring_group *group, void *with) {
    struct made *made = with;
    memcpy(group->family, "nccl", 5);
    group->rank = made->rank;
    group->size = made->size;
    __atomic_store_n(&group->id, made->id, __ATOMIC_RELEASE);
}

/* One that was made before this library looked gets an id of its own. */
static void describe_unknown(struct ring_group *group, void *comm) {
    struct made unknown = {ring_hash(&comm, sizeof comm, (uint64_t)getpid()), -1, -1};
    describe(group, &unknown);
}

static int group_of(struct ring *ring, void *comm) {
    return ring_group_of(ring, (uint64_t)(uintptr_t)comm, describe_unknown, comm);
}

static uint64_t entered(void *comm, struct ring_call call) {
    struct ring *ring = depth == 1 ? ring_of_process() : NULL;
    return ring ? ring_entered(ring, group_of(ring, comm), call) : RING_NOWHERE;
}

/* A call has returned well: it is queued, unless a group holds it back, or it went into a graph. */
static void returned(uint64_t index, void *stream) {
    if (index == RING_NOWHERE) return;
    struct ring *ring = ring_of_process();
    struct ring_record *record = &ring->records[index % RING_CAPACITY];
    if (__atomic_load_n(&call_ring.capturing, __ATOMIC_ACQUIRE)) {
        if (__atomic_load_n(&record->stamp, __ATOMIC_ACQUIRE) == index + 1) record->captured = 1;
        return;
    }
    if (groups) {
        last_of_group.index = index;
        last_of_group.stream = stream;
        return;
    }
    gpu_called(ring, OF_COLLECTIVE, stream, index, record->entered_ns);
}

static uint8_t dtype_of(int32_t number) {
    return number >= 0 && number < (int32_t)sizeof DTYPES ? DTYPES[number] : DTYPE_UNKNOWN;
}

/* Wrap a call that takes these parameters, with comm and stream among them. */
#define CALL(name, which, parameters, arguments, type, elements, other)                              \
    RING_PUBLIC result name parameters;                                                              \
    result name parameters {                                                                         \
        static void *next;                                                                           \
        result(*real) parameters = FIND(name);                                                       \
        if (!real) return INTERNAL_ERROR; /* an older NCCL, asked for a function by our name */      \
        depth++;                                                                                     \
        uint64_t index = entered(comm, (struct ring_call){                                           \
                          .op = which, .dtype = dtype_of(type), .state = CALL_IN_FLIGHT, .peer = other, \
                          .count = elements, .stream = (uint64_t)(uintptr_t)stream});                \
        result said = real arguments;                                                                \
        depth--;                                                                                     \
        if (!said) returned(index, stream);                                                          \
        return said;                                                                                 \
    }

#define TWO const void *from, void *to, size_t count, int32_t type
#define END void *comm, void *stream
/* NCCL 2.31 has each collective a second time, with a last parameter more. */
#define COLLECTIVE(name, which, parameters, arguments, other)                                                   \
    CALL(name, which, (TWO parameters, END), (from, to, count, type arguments, comm, stream), type, count, other) \
    CALL(name##Config, which, (TWO parameters, END, const void *config),                                        \
         (from, to, count, type arguments, comm, stream, config), type, count, other)
#define COMMA ,
#define NOTHING

COLLECTIVE(ncclAllReduce, OP_ALL_REDUCE, COMMA int32_t op, COMMA op, -1)
COLLECTIVE(ncclBroadcast, OP_BROADCAST, COMMA int32_t root, COMMA root, root)
COLLECTIVE(ncclReduce, OP_REDUCE, COMMA int32_t op COMMA int32_t root, COMMA op COMMA root, root)
COLLECTIVE(ncclAllGather, OP_ALL_GATHER, NOTHING, NOTHING, -1)
COLLECTIVE(ncclReduceScatter, OP_REDUCE_SCATTER, COMMA int32_t op, COMMA op, -1)
COLLECTIVE(ncclAlltoAll, OP_ALL_TO_ALL, NOTHING, NOTHING, -1)
COLLECTIVE(ncclGather, OP_GATHER, COMMA int32_t root, COMMA root, root)
COLLECTIVE(ncclScatter, OP_SCATTER, COMMA int32_t root, COMMA root, root)
CALL(ncclBcast, OP_BROADCAST, (void *buffer, size_t count, int32_t type, int32_t root, END),
     (buffer, count, type, root, comm, stream), type, count, root)
CALL(ncclSend, OP_SEND, (const void *buffer, size_t count, int32_t type, int32_t peer, END),
     (buffer, count, type, peer, comm, stream), type, count, peer)
CALL(ncclRecv, OP_RECV, (void *buffer, size_t count, int32_t type, int32_t peer, END),
     (buffer, count, type, peer, comm, stream), type, count, peer)

RING_PUBLIC result ncclGroupStart(void);
result ncclGroupStart(void) {
    static void *next;
    result (*real)(void) = FIND(ncclGroupStart);
    if (!real) return INTERNAL_ERROR;
    result said = real();
    if (!said && !depth) groups++;
    return said;
}

RING_PUBLIC result ncclGroupEnd(void);
result ncclGroupEnd(void) {
    static void *next;
    result (*real)(void) = FIND(ncclGroupEnd);
    if (!real) return INTERNAL_ERROR;
    depth++;
    result said = real();
    depth--;
    if (depth || (groups && --groups)) return said;
    uint64_t index = last_of_group.index;
    last_of_group.index = RING_NOWHERE;
    if (!said) returned(index, last_of_group.stream);
    return said;
}

/* -- communicators: their making may hang, too, and is noted as a call of the new one ------------------------------ */

struct making {
    struct ring *ring;
    int group;
    uint64_t index;
};

/* Note the beginning, under the id until there is a handle. */
static struct making begin(struct made made) {
    struct making making = {depth == 1 ? ring_of_process() : NULL, RING_NONE, RING_NOWHERE};
    if (!making.ring || !made.id) return making;
    making.group = ring_group_of(making.ring, made.id, describe, &made);
    struct ring_call call = {.op = OP_COMMUNICATOR, .peer = -1};
    if (making.group != RING_NONE) making.index = ring_entered(making.ring, making.group, call);
    return making;
}

static void end(struct making making, void *comm) {
    if (making.group == RING_NONE) return;
    ring_completed(making.ring, making.index);
    struct ring_group *group = &making.ring->groups[making.group];
    __atomic_store_n(&group->handle, (uint64_t)(uintptr_t)comm, __ATOMIC_RELEASE);
}

/* What comes of a parent: its id from the parent's, how many came of it before, and the color. */
static struct made child_of(void *comm, int32_t color) {
    struct made made = {0, -1, -1};
    struct ring *ring = depth == 1 ? ring_of_process() : NULL;
    int parent = ring ? group_of(ring, comm) : RING_NONE;
    if (parent == RING_NONE) return made;
    struct ring_group *group = &ring->groups[parent];
    uint64_t facts[3] = {group->id, __atomic_fetch_add(&group->unused[0], 1, __ATOMIC_RELAXED), (uint64_t)(uint32_t)color};
    made.id = ring_hash(facts, sizeof facts, 0);
    return made;
}

#define MAKE(name, parameters, arguments, made, place)                                               \
    RING_PUBLIC result name parameters;                                                              \
    result name parameters {                                                                         \
        static void *next;                                                                           \
        result(*real) parameters = FIND(name);                                                       \
        if (!real) return INTERNAL_ERROR;                                                            \
        depth++;                                                                                     \
        struct making making = begin(made);                                                          \
        result said = real arguments;                                                                \
        end(making, *place);                                                                         \
        depth--;                                                                                     \
        return said;                                                                                 \
    }
#define BY_ID(pointer, bytes) ((struct made){ring_hash(pointer, bytes, 0), rank, size})

MAKE(ncclCommInitRank, (void **comm, int32_t size, unique_id id, int32_t rank), (comm, size, id, rank),
     BY_ID(&id, sizeof id), comm)
MAKE(ncclCommInitRankConfig, (void **comm, int32_t size, unique_id id, int32_t rank, void *config),
     (comm, size, id, rank, config), BY_ID(&id, sizeof id), comm)
MAKE(ncclCommInitRankScalable,
     (void **comm, int32_t size, int32_t rank, int32_t ids, unique_id *id, void *config),
     (comm, size, rank, ids, id, config), BY_ID(id, (size_t)ids * sizeof *id), comm)
MAKE(ncclCommSplit, (void *comm, int32_t color, int32_t key, void **newcomm, void *config),
     (comm, color, key, newcomm, config), child_of(comm, color), newcomm)
MAKE(ncclCommShrink, (void *comm, int32_t *excluded, int32_t count, void **newcomm, void *config, int32_t flags),
     (comm, excluded, count, newcomm, config, flags), child_of(comm, -2), newcomm)

/* New members know the unique id alone, and of the others only the one that drew it does: two groups to the reader. */
MAKE(ncclCommGrow, (void *comm, int32_t size, const unique_id *id, int32_t rank, void **newcomm, void *config),
     (comm, size, id, rank, newcomm, config), id ? BY_ID(id, sizeof *id) : child_of(comm, -3), newcomm)

/* A communicator that ends: its handle may be given to another one. A revoked one still has its handle. */
#define DESTROY(name)                                                                                \
    RING_PUBLIC result name(void *comm);                                                             \
    result name(void *comm) {                                                                        \
        static void *next;                                                                           \
        result (*real)(void *) = FIND(name);                                                         \
        if (!real) return INTERNAL_ERROR;                                                            \
        struct ring *ring = ring_of_process();                                                       \
        if (ring && comm) ring_group_ended(ring, (uint64_t)(uintptr_t)comm);                         \
        return real(comm);                                                                           \
    }
DESTROY(ncclCommDestroy)
DESTROY(ncclCommAbort)
