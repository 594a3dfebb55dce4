/* Calls of torch's gloo backend, noted in the call ring: `enqueue` begins a collective, `Work::finish` completes it.
 *
 * These are C++ functions of libtorch_cpu that are called through its symbol table, from Python and from C++ (DDP's
 * reducer) alike. A torch that lacks one of these names, or has it with other parameters and so with another name, is
 * not touched. Parameters of class types are passed by address (Itanium C++ ABI), so plain C can pass them on.
 */
#include "call_ring.h"

#define GLOO "_ZN4c10d16ProcessGroupGloo"
#define MAKE                                                                                                         \
    GLOO "C1ERKN3c1013intrusive_ptrINS_5StoreENS1_6detail34intrusive_target_default_null_typeIS3_EEEEii"               \
         "NS2_INS0_7OptionsENS5_ISA_EEEE"
#define DESTROY GLOO "D1Ev"
#define ENQUEUE GLOO "7enqueueEN3c1013intrusive_ptrINS0_9AsyncWorkENS1_6detail34intrusive_target_default_null_typeIS3_EEEE"
#define FINISH "_ZN4c10d4Work6finishENSt15__exception_ptr13exception_ptrE"
#define MONITORED_BARRIER GLOO "16monitoredBarrierERKNS_14BarrierOptionsEb"
#define SEND GLOO "4sendERSt6vectorIN2at6TensorESaIS3_EEii"
#define RECV GLOO "4recvERSt6vectorIN2at6TensorESaIS3_EEii"
#define WAIT "4waitENSt6chrono8durationIlSt5ratioILl1ELl1000EEEE"
#define OP_TYPE "_ZNK4c10d4Work14retrieveOpTypeEv"
#define GLOBAL_RANKS "_ZNK4c10d16ProcessGroupGloo10groupRanksEv"

/* c10d::OpType; these numbers are stable, since they are written into traces. */
static const uint8_t OPS[] = {
    OP_BROADCAST,  OP_ALL_REDUCE,     OP_ALL_REDUCE, OP_REDUCE,     OP_ALL_GATHER,
    OP_ALL_GATHER, OP_ALL_GATHER,     OP_GATHER,     OP_SCATTER,    OP_REDUCE_SCATTER,
    OP_ALL_TO_ALL, OP_ALL_TO_ALL,     OP_SEND,       OP_RECV,       OP_RECV,
    OP_BARRIER,    OP_REDUCE_SCATTER, OP_OTHER,      OP_ALL_REDUCE, OP_REDUCE_SCATTER,
};

struct numbers { /* std::vector<uint64_t> */
    const uint64_t *begin, *end;
};

struct made {
    int32_t rank, size;
};

static void describe(struct ring_group *group, void *with) {
    struct made *made = with;
    memcpy(group->family, "gloo", 5);
    group->rank = made->rank;
    group->size = made->size;
}

static int group_of(struct ring *ring, void *process_group, int32_t rank, int32_t size) {
    struct made made = {rank, size};
    return ring_group_of(ring, (uint64_t)(uintptr_t)process_group, describe, &made);
}

/* Give ids to all groups that were made so far: a group's global ranks, and how many groups of the same ranks were made
 * before it. All members agree on both, whichever group each of them uses first. torch tells a group its global ranks
 * soon after it has made it. */
static void identify(struct ring *ring, const void *caller) {
    static void *kept;
    const struct numbers *(*global_ranks)(void *) = ring_next(&kept, GLOBAL_RANKS, caller);
    pthread_mutex_lock(&call_ring.lock);
    for (uint32_t index = 0; index < ring->header.groups_used; index++) {
        struct ring_group *group = &ring->groups[index];
        if (group->id || !group->handle) continue;
        const struct numbers *ranks = global_ranks ? global_ranks((void *)(uintptr_t)group->handle) : NULL;
        group->members = ranks ? ring_hash(ranks->begin, (size_t)((char *)ranks->end - (char *)ranks->begin), 0) : 1;
        uint64_t before = 0;
        for (uint32_t other = 0; other < index; other++) before += ring->groups[other].members == group->members;
        __atomic_store_n(&group->id, ring_hash(&before, sizeof before, group->members), __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&call_ring.lock);
}

/* Note a call in its group; RING_NOWHERE where nothing is noted. */
static uint64_t entered(struct ring *ring, void *process_group, struct ring_call call, const void *caller) {
    if (!ring) return RING_NOWHERE;
    int group = group_of(ring, process_group, -1, -1);
    if (group != RING_NONE && !__atomic_load_n(&ring->groups[group].id, __ATOMIC_ACQUIRE)) identify(ring, caller);
    return ring_entered(ring, group, call);
}

RING_PUBLIC void make(void *process_group, const void *store, int32_t rank, int32_t size, void *options) __asm__(MAKE);
void make(void *process_group, const void *store, int32_t rank, int32_t size, void *options) {
    static void *next;
    void (*real)(void *, const void *, int32_t, int32_t, void *) = ring_next(&next, MAKE, RING_CALLER);
    struct ring *ring = ring_of_process();
    if (ring) group_of(ring, process_group, rank, size); /* first: the order counts, and it may be long until it returns */
    real(process_group, store, rank, size, options);
}

RING_PUBLIC void destroy(void *process_group) __asm__(DESTROY);
void destroy(void *process_group) {
    static void *next;
    void (*real)(void *) = ring_next(&next, DESTROY, RING_CALLER);
    struct ring *ring = ring_of_process();
    if (ring) ring_group_ended(ring, (uint64_t)(uintptr_t)process_group);
    real(process_group);
}

RING_PUBLIC void enqueue(void *process_group, void **work) __asm__(ENQUEUE);
void enqueue(void *process_group, void **work) {
    static void *next, *kept;
    void (*real)(void *, void **) = ring_next(&next, ENQUEUE, RING_CALLER);
    uint8_t (*type_of)(void *) = ring_next(&kept, OP_TYPE, RING_CALLER);
    uint8_t type = type_of ? type_of(*work) : UINT8_MAX;
    struct ring_call call = {.op = type < sizeof OPS ? OPS[type] : OP_OTHER, .state = CALL_IN_FLIGHT, .peer = -1};
    uint64_t index = entered(ring_of_process(), process_group, call, RING_CALLER);
    ring_await((uintptr_t)*work, index); /* first: another thread may finish it before `real` returns */
    real(process_group, work);
}

RING_PUBLIC void finish(void *work, void *error) __asm__(FINISH);
void finish(void *work, void *error) {
    static void *next;
    void (*real)(void *, void *) = ring_next(&next, FINISH, RING_CALLER);
    ring_arrived(ring_of_process(), (uintptr_t)work);
    real(work, error);
}

RING_PUBLIC uint8_t wait_for(void *work, int64_t timeout_ms) __asm__("_ZN4c10d4Work" WAIT);
uint8_t wait_for(void *work, int64_t timeout_ms) {
    static void *next;
    uint8_t (*real)(void *, int64_t) = ring_next(&next, "_ZN4c10d4Work" WAIT, RING_CALLER);
    ring_waited_for(ring_of_process(), (uintptr_t)work);
    return real(work, timeout_ms);
}

RING_PUBLIC void monitored_barrier(void *process_group, const void *options, uint8_t all) __asm__(MONITORED_BARRIER);
void monitored_barrier(void *process_group, const void *options, uint8_t all) {
    static void *next;
    void (*real)(void *, const void *, uint8_t) = ring_next(&next, MONITORED_BARRIER, RING_CALLER);
    struct ring *ring = ring_of_process();
    struct ring_call call = {.op = OP_BARRIER, .peer = -1};
    uint64_t index = entered(ring, process_group, call, RING_CALLER);
    real(process_group, options, all);
    ring_completed(ring, index);
}

#ifdef __x86_64__
/* Here alone a returned object's address comes as the first parameter. */
#define PEER_CALL(name, symbol, which)                                                                   \
    RING_PUBLIC void *name(void **result, void *process_group, void *tensors, int32_t peer, int32_t tag) \
        __asm__(symbol);                                                                                 \
    void *name(void **result, void *process_group, void *tensors, int32_t peer, int32_t tag) {           \
        static void *next;                                                                               \
        void *(*real)(void **, void *, void *, int32_t, int32_t) = ring_next(&next, symbol, RING_CALLER); \
        struct ring_call call = {.op = which, .state = CALL_IN_FLIGHT, .peer = peer};                    \
        uint64_t index = entered(ring_of_process(), process_group, call, RING_CALLER);                   \
        void *returned = real(result, process_group, tensors, peer, tag);                                \
        ring_await((uintptr_t)*result, index);                                                           \
        return returned;                                                                                 \
    }
PEER_CALL(send_to, SEND, OP_SEND)
PEER_CALL(receive_from, RECV, OP_RECV)

/* A send or receive is completed when the program has waited for it. */
#define PEER_WAIT(name, symbol)                                                     \
    RING_PUBLIC uint8_t name(void *work, int64_t timeout_ms) __asm__(symbol);       \
    uint8_t name(void *work, int64_t timeout_ms) {                                  \
        static void *next;                                                          \
        uint8_t (*real)(void *, int64_t) = ring_next(&next, symbol, RING_CALLER);   \
        ring_waited_for(ring_of_process(), (uintptr_t)work);                        \
        uint8_t done = real(work, timeout_ms);                                      \
        ring_arrived(ring_of_process(), (uintptr_t)work);                           \
        return done;                                                                \
    }
PEER_WAIT(wait_for_send, GLOO "8SendWork" WAIT)
PEER_WAIT(wait_for_receive, GLOO "8RecvWork" WAIT)
#endif
