/* The calls of one process to its communication libraries, in a file of shared memory that others read, alive or dead.
 *
 * A library of native/intercept is loaded before the program's own (LD_PRELOAD). It notes each call here and passes it
 * on. The process that writes takes no lock and waits for no reader: a record is whole once its stamp says so, also after
 * SIGKILL at any instant. `diagnose/hangs/call_ring.py` reads the file and knows this layout by VERSION.
 *
 * Layout: one header, a block of the GPU's, LANES lanes (threads that use a GPU), GROUPS groups (communicators), CAPACITY
 * records that are overwritten in turn. Calls that are too many for a record each, such as kernel launches, are counted
 * in their thread's lane: plain stores, since no other thread writes there.
 *
 * All libraries of a process write into one ring: its state is a weak symbol, so the first library that is loaded has it.
 */
#ifndef RESILIO_CALL_RING_H
#define RESILIO_CALL_RING_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define RING_VARIABLE "RESILIO_CALLS" /* the file's path: the first process that calls creates it, others stay silent */
#define RING_MAGIC "RSLCALLS"
#define RING_VERSION 2
#define RING_GROUPS 256u
#define RING_CAPACITY 2048u /* a power of two */
#define RING_LANES 64u /* of more threads that use a GPU at once, nothing is noted */
#define RING_NONE (-1)
#define RING_NOWHERE UINT64_MAX
#define RING_PUBLIC __attribute__((visibility("default")))
#define RING_SHARED __attribute__((visibility("default"), weak)) /* one for all libraries; its name has the version */
#define RING_CALLER __builtin_return_address(0)

/* The same numbers as in `call_ring.py`. */
enum ring_op {
    OP_OTHER, OP_ALL_REDUCE, OP_BROADCAST, OP_REDUCE, OP_ALL_GATHER, OP_REDUCE_SCATTER, OP_ALL_TO_ALL, OP_GATHER,
    OP_SCATTER, OP_BARRIER, OP_SEND, OP_RECV, OP_SCAN, OP_COMMUNICATOR
};

enum ring_dtype {
    DTYPE_UNKNOWN, DTYPE_INT8, DTYPE_UINT8, DTYPE_INT32, DTYPE_UINT32, DTYPE_INT64, DTYPE_UINT64, DTYPE_FLOAT16,
    DTYPE_FLOAT32, DTYPE_FLOAT64, DTYPE_BFLOAT16, DTYPE_FLOAT8_E4M3, DTYPE_FLOAT8_E5M2
};

/* A call that keeps its caller, one that goes on beside it, and such a one that is waited for by now: by the program's
 * main thread, or by another one, such as a listener, beside which the program may go on. */
enum ring_state { CALL_BLOCKS, CALL_IN_FLIGHT, CALL_WAITED_FOR, CALL_WAITED_BESIDE };

/* What a thread waits for while it is inside a call that ends when the GPU has got somewhere. */
enum ring_wait { WAIT_NONE, WAIT_STREAM, WAIT_DEVICE, WAIT_EVENT, WAIT_COPY, WAIT_FREE };

struct ring_header { /* 64 bytes */
    char magic[8];
    uint32_t version, record_size, capacity, groups;
    uint64_t process;
    uint64_t next;      /* records begun */
    uint64_t completed; /* records completed: grows while anything goes on */
    uint32_t groups_used, unused;
    uint64_t unlisted; /* calls of groups beyond RING_GROUPS, which have no record */
};

struct ring_gpu { /* 64 bytes; see gpu_events.h */
    uint64_t sampled; /* calls behind which an event was recorded */
    uint64_t reached; /* of them, those that the GPU is known to have reached */
    uint64_t reached_ns; /* when the last one was seen to be; CLOCK_MONOTONIC */
    uint64_t captures, captured; /* of streams, begun and ended */
    uint64_t unused[3];
};

struct ring_lane { /* 128 bytes; read by others while its thread writes */
    uint32_t thread;   /* the kernel's number of it; 0: free, and its counts stay */
    uint32_t waits_in; /* enum ring_wait */
    uint64_t since_ns; /* when that wait began */
    uint64_t launches, launched; /* of kernels and graphs: entered, returned */
    uint64_t graphs;
    uint64_t gemms;
    double flops; /* of these, where their sizes are known */
    uint64_t waits, waited;
    uint64_t unused[7];
};

struct ring_group { /* 64 bytes */
    uint64_t id;       /* the same on all members; 0 until the rest is whole */
    int32_t rank, size; /* of this process in the group; -1 where that is not known */
    uint64_t entered;  /* collective calls; sends and receives do not count */
    uint64_t handle;   /* the library's own */
    char family[8];
    uint64_t members; /* a number of its member list, where the library tells it */
    uint64_t unused[2];
};

struct ring_record { /* 64 bytes */
    uint64_t stamp; /* its index + 1 once it is whole */
    uint64_t entered_ns;
    uint64_t completed_ns; /* 0: not completed; CLOCK_MONOTONIC */
    uint64_t sequence;     /* collective calls of a group are counted from 1; 0 for a send or receive */
    uint64_t count;        /* elements; 0 where that is not known */
    uint64_t stream;
    uint32_t group;
    uint8_t op, dtype, state, unused;
    int32_t peer; /* rank in the group that a call names: of a send or receive, or the root; -1 without one */
    uint32_t captured; /* into a graph: nothing waits for it */
};

_Static_assert(sizeof(struct ring_lane) == 128, "two cache lines, and no other thread's");

struct ring {
    struct ring_header header;
    struct ring_gpu gpu;
    struct ring_lane lanes[RING_LANES];
    struct ring_group groups[RING_GROUPS];
    struct ring_record records[RING_CAPACITY];
};

enum { RING_UNOPENED, RING_OPEN, RING_SILENT };

/* Which record belongs to an object that completes later, such as torch's Work. Not in shared memory. */
#define PENDING 4096u
struct ring_pending {
    uintptr_t object;
    uint64_t index;
};

enum { EVENTS_UNTRIED, EVENTS_USED, EVENTS_OFF };

struct ring_process {
    int state;
    struct ring *ring;
    pthread_mutex_t lock; /* for opening it, and for new groups */
    int watched;          /* forks; the child's copy is set, too */
    pthread_key_t ends;   /* tells when a thread with a lane ends */
    int events, events_busy, capturing; /* see gpu_events.h */
    struct ring_pending pending[PENDING];
};
RING_SHARED struct ring_process resilio_ring_2 = {.lock = PTHREAD_MUTEX_INITIALIZER};
#define call_ring resilio_ring_2

/* This thread's lane, NULL before its first use. Preloaded libraries may use the fast model. */
RING_SHARED __attribute__((tls_model("initial-exec"))) __thread struct ring_lane *resilio_lane_2;

static inline uint64_t ring_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* A forked child is another process: the zygote's children get a file each, a rank's own children find theirs taken. */
static inline void ring_forked(void) {
    pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    if (call_ring.ring) munmap(call_ring.ring, sizeof(struct ring));
    call_ring.ring = NULL;
    call_ring.state = RING_UNOPENED;
    call_ring.lock = fresh;
    memset(call_ring.pending, 0, sizeof call_ring.pending);
    if (resilio_lane_2) pthread_setspecific(call_ring.ends, NULL); /* a parent's lane is not there any more */
    resilio_lane_2 = NULL;
    if (call_ring.events == EVENTS_USED) call_ring.events = EVENTS_OFF; /* a GPU does not survive a fork */
    call_ring.events_busy = call_ring.capturing = 0;
}

static inline void ring_thread_ended(void *with) {
    struct ring_lane *lane = with;
    resilio_lane_2 = NULL;
    __atomic_store_n(&lane->thread, 0, __ATOMIC_RELEASE);
}

static inline struct ring *ring_create(const char *path) {
    int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file < 0) return NULL;
    struct ring *ring = NULL;
    /* Storage is reserved now: a full /dev/shm must not become a SIGBUS in the middle of training. */
    if (posix_fallocate(file, 0, sizeof(struct ring)) == 0) {
        void *map = mmap(NULL, sizeof(struct ring), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        ring = map == MAP_FAILED ? NULL : map;
    }
    close(file);
    if (!ring) {
        unlink(path);
        return NULL;
    }
    ring->header.version = RING_VERSION;
    ring->header.record_size = sizeof(struct ring_record);
    ring->header.capacity = RING_CAPACITY;
    ring->header.groups = RING_GROUPS;
    ring->header.process = (uint64_t)getpid();
    __atomic_thread_fence(__ATOMIC_RELEASE);
    memcpy(ring->header.magic, RING_MAGIC, sizeof ring->header.magic);
    return ring;
}

static inline void ring_open(void) {
    int error = errno; /* the program's */
    pthread_mutex_lock(&call_ring.lock);
    if (call_ring.state == RING_UNOPENED) {
        if (!call_ring.watched)
            call_ring.watched = pthread_atfork(NULL, NULL, ring_forked) == 0 &&
                                pthread_key_create(&call_ring.ends, ring_thread_ended) == 0;
        const char *path = getenv(RING_VARIABLE);
        call_ring.ring = call_ring.watched && path && *path ? ring_create(path) : NULL;
        __atomic_store_n(&call_ring.state, call_ring.ring ? RING_OPEN : RING_SILENT, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&call_ring.lock);
    errno = error;
}

/* Forget the groups and calls so far: this process has left them, and enters another round. `begun` and `completed` go
 * on. No other thread of it is in a call. */
RING_SHARED void resilio_begin_round_2(void);
RING_SHARED void resilio_begin_round_2(void) {
    pthread_mutex_lock(&call_ring.lock);
    struct ring *ring = call_ring.state == RING_OPEN ? call_ring.ring : NULL;
    if (ring) {
        __atomic_store_n(&ring->header.groups_used, 0, __ATOMIC_RELEASE);
        for (uint32_t index = 0; index < RING_CAPACITY; index++)
            __atomic_store_n(&ring->records[index].stamp, 0, __ATOMIC_RELEASE);
        memset(ring->groups, 0, sizeof ring->groups);
        memset(call_ring.pending, 0, sizeof call_ring.pending);
    }
    pthread_mutex_unlock(&call_ring.lock);
}

/* The ring of this process; NULL where none is wanted, or it cannot be had. */
static inline struct ring *ring_of_process(void) {
    int state = __atomic_load_n(&call_ring.state, __ATOMIC_ACQUIRE);
    if (state == RING_OPEN) return call_ring.ring;
    if (state == RING_SILENT) return NULL;
    ring_open();
    return call_ring.ring;
}

/* Take a free lane. A thread that gets none writes where no reader looks. */
static inline struct ring_lane *ring_take_lane(void) {
    static struct ring_lane unseen;
    struct ring *ring = ring_of_process();
    struct ring_lane *lane = &unseen;
    uint32_t thread = (uint32_t)syscall(SYS_gettid);
    for (uint32_t index = 0; ring && index < RING_LANES; index++) {
        uint32_t free = 0;
        if (__atomic_load_n(&ring->lanes[index].thread, __ATOMIC_RELAXED)) continue;
        if (!__atomic_compare_exchange_n(&ring->lanes[index].thread, &free, thread, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            continue;
        lane = &ring->lanes[index];
        pthread_setspecific(call_ring.ends, lane);
        break;
    }
    resilio_lane_2 = lane;
    return lane;
}

static inline struct ring_lane *ring_lane(void) {
    struct ring_lane *lane = resilio_lane_2;
    return __builtin_expect(lane != NULL, 1) ? lane : ring_take_lane();
}

static inline void ring_count(uint64_t *counter) { __atomic_store_n(counter, *counter + 1, __ATOMIC_RELAXED); }

/* The index of the group with this handle, made with `describe` when it is new; RING_NONE when the table is full. */
static inline int ring_group_of(struct ring *ring, uint64_t handle, void (*describe)(struct ring_group *, void *), void *with) {
    uint32_t used = __atomic_load_n(&ring->header.groups_used, __ATOMIC_ACQUIRE);
    for (uint32_t index = used; index-- > 0;) /* the newest first: a handle may be used again */
        if (ring->groups[index].handle == handle) return (int)index;
    pthread_mutex_lock(&call_ring.lock);
    used = ring->header.groups_used;
    int found = RING_NONE;
    for (uint32_t index = used; index-- > 0 && found == RING_NONE;)
        if (ring->groups[index].handle == handle) found = (int)index;
    if (found == RING_NONE && used < RING_GROUPS) {
        struct ring_group *group = &ring->groups[used];
        group->handle = handle;
        group->rank = group->size = -1;
        describe(group, with);
        found = (int)used;
        __atomic_store_n(&ring->header.groups_used, used + 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&call_ring.lock);
    return found;
}

/* Forget a handle whose group was destroyed: another group may get the same one. */
static inline void ring_group_ended(struct ring *ring, uint64_t handle) {
    uint32_t used = __atomic_load_n(&ring->header.groups_used, __ATOMIC_ACQUIRE);
    for (uint32_t index = used; index-- > 0;)
        if (ring->groups[index].handle == handle) __atomic_store_n(&ring->groups[index].handle, 0, __ATOMIC_RELEASE);
}

static inline int ring_in_main_thread(void) { return syscall(SYS_gettid) == getpid(); }

struct ring_call {
    uint8_t op, dtype, state;
    int32_t peer;
    uint64_t count, stream;
};

/* Note that a call is entered. Return its record's index, which `ring_completed` takes. */
static inline uint64_t ring_entered(struct ring *ring, int group, struct ring_call call) {
    if (group == RING_NONE) {
        __atomic_add_fetch(&ring->header.unlisted, 1, __ATOMIC_RELAXED);
        return RING_NOWHERE;
    }
    if (call.state == CALL_BLOCKS && !ring_in_main_thread()) call.state = CALL_WAITED_BESIDE;
    int is_collective = call.op != OP_SEND && call.op != OP_RECV;
    uint64_t sequence =
        is_collective ? __atomic_add_fetch(&ring->groups[group].entered, 1, __ATOMIC_RELAXED) : 0;
    uint64_t index = __atomic_fetch_add(&ring->header.next, 1, __ATOMIC_RELAXED);
    struct ring_record *record = &ring->records[index % RING_CAPACITY];
    __atomic_store_n(&record->stamp, 0, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    record->completed_ns = 0;
    record->captured = 0;
    record->sequence = sequence;
    record->count = call.count;
    record->stream = call.stream;
    record->group = (uint32_t)group;
    record->op = call.op;
    record->dtype = call.dtype;
    record->state = call.state;
    record->peer = call.peer;
    record->entered_ns = ring_clock();
    __atomic_store_n(&record->stamp, index + 1, __ATOMIC_RELEASE);
    return index;
}

/* Note that a call is completed, unless its record was overwritten meanwhile. */
static inline void ring_completed(struct ring *ring, uint64_t index) {
    if (!ring || index == RING_NOWHERE) return;
    struct ring_record *record = &ring->records[index % RING_CAPACITY];
    if (__atomic_load_n(&record->stamp, __ATOMIC_ACQUIRE) == index + 1)
        __atomic_store_n(&record->completed_ns, ring_clock(), __ATOMIC_RELEASE);
    __atomic_add_fetch(&ring->header.completed, 1, __ATOMIC_RELAXED);
}

/* The place of an object that is awaited; NULL without one. */
static inline struct ring_pending *ring_find(uintptr_t object) {
    for (uint32_t probe = 0; probe < 16; probe++) {
        uint32_t slot = (uint32_t)((object >> 4) * 2654435761u + probe) % PENDING;
        if (__atomic_load_n(&call_ring.pending[slot].object, __ATOMIC_ACQUIRE) == object) return &call_ring.pending[slot];
    }
    return NULL;
}

static inline void ring_await(uintptr_t object, uint64_t index) {
    if (index == RING_NOWHERE) return;
    struct ring_pending *dropped = ring_find(object); /* of an object that was freed before its end was noted */
    if (dropped) {
        dropped->index = index;
        return;
    }
    for (uint32_t probe = 0; probe < 16; probe++) {
        uint32_t slot = (uint32_t)((object >> 4) * 2654435761u + probe) % PENDING;
        uintptr_t empty = 0;
        if (__atomic_load_n(&call_ring.pending[slot].object, __ATOMIC_RELAXED)) continue;
        /* 1 is no object's address: the slot is taken, and its index is not there yet */
        if (!__atomic_compare_exchange_n(&call_ring.pending[slot].object, &empty, 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
            continue;
        call_ring.pending[slot].index = index;
        __atomic_store_n(&call_ring.pending[slot].object, object, __ATOMIC_RELEASE);
        return;
    }
}

/* Note that the program waits for the object from here on. */
static inline void ring_waited_for(struct ring *ring, uintptr_t object) {
    struct ring_pending *pending = ring ? ring_find(object) : NULL;
    if (!pending) return;
    struct ring_record *record = &ring->records[pending->index % RING_CAPACITY];
    if (__atomic_load_n(&record->stamp, __ATOMIC_ACQUIRE) == pending->index + 1)
        __atomic_store_n(&record->state, ring_in_main_thread() ? CALL_WAITED_FOR : CALL_WAITED_BESIDE, __ATOMIC_RELAXED);
}

static inline void ring_arrived(struct ring *ring, uintptr_t object) {
    struct ring_pending *pending = ring ? ring_find(object) : NULL;
    if (!pending) return;
    uint64_t index = pending->index;
    __atomic_store_n(&pending->object, 0, __ATOMIC_RELEASE);
    ring_completed(ring, index);
}

/* Whether a file is some release of the library whose version this is, such as libcudart-1a2b.so.12 of libcudart.so.13. */
static inline int ring_is_of(const char *path, const char *version) {
    const char *name = path ? strrchr(path, '/') : NULL;
    name = name ? name + 1 : path;
    return name && strncmp(name, version, strcspn(version, ".")) == 0;
}

/* The function that a wrapper stands before; `caller`: the wrapper's return address.
 *
 * RTLD_NEXT does not see a library that was loaded for one user alone, as Python loads its modules. The caller's library
 * and those that it needs do have the function, or they could not call it. `version`: of the function; NULL without one.
 */
static inline void *ring_next_version(void **kept, const char *name, const char *version, const void *caller) {
    void *found = __atomic_load_n(kept, __ATOMIC_ACQUIRE);
    if (__builtin_expect(found != NULL, 1)) return found;
    int error = errno; /* the program's */
    Dl_info info;
    found = dlsym(RTLD_NEXT, name); /* of another tool, perhaps, which knows no versions; never another release's */
    if (version && (!found || !dladdr(found, &info) || ring_is_of(info.dli_fname, version)))
        found = dlvsym(RTLD_NEXT, name, version);
    if (!found && dladdr(caller, &info) && info.dli_fname) {
        void *library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
        if (library) {
            found = version ? dlvsym(library, name, version) : dlsym(library, name);
            dlclose(library); /* it stays: its code is running */
        }
    }
    __atomic_store_n(kept, found, __ATOMIC_RELEASE);
    errno = error;
    return found;
}

static inline void *ring_next(void **kept, const char *name, const void *caller) {
    return ring_next_version(kept, name, NULL, caller);
}

/* A number from bytes that all members of a group know; never 0. */
static inline uint64_t ring_hash(const void *bytes, size_t size, uint64_t seed) {
    const unsigned char *byte = bytes;
    uint64_t hash = 14695981039346656037u ^ seed;
    for (size_t index = 0; index < size; index++) hash = (hash ^ byte[index]) * 1099511628211u;
    return hash ? hash : 1;
}

#endif
