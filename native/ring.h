/* Several reads or writes of files at a time: through io_uring, or one after the other where there is none.
 *
 * The kernel may lack it, or forbid it (containers often do); its rings are used by their system calls alone, so nothing
 * has to be installed. One thread at a time.
 */
#ifndef RESILIO_RING_H
#define RESILIO_RING_H

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__has_include) && defined(__NR_io_uring_setup)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#define HAS_IO_URING 1
#endif
#endif

#define MAX_DEPTH 64
#define STALLED_S 3.0

/* One read or write. `result`: bytes moved, or -errno; valid once it is no longer `in_flight`. */
struct transfer {
    uint8_t *memory;
    size_t size;
    off_t offset;
    ssize_t result;
    int in_flight;
};

struct ring {
    int file;
    int writes;
    int ring; /* -1: one after the other */
    double stalled_s;
    struct transfer transfers[MAX_DEPTH];
#ifdef HAS_IO_URING
    struct io_uring_params params;
    void *map;
    size_t map_size;
    struct io_uring_sqe *entries;
#endif
};

#ifdef HAS_IO_URING
static uint32_t *ring_word(struct ring *ring, uint32_t offset) { return (uint32_t *)((uint8_t *)ring->map + offset); }

static int ring_submit(struct ring *ring, const struct io_uring_sqe *entry) {
    uint32_t *tail = ring_word(ring, ring->params.sq_off.tail);
    uint32_t index = *tail & *ring_word(ring, ring->params.sq_off.ring_mask);
    ring->entries[index] = *entry;
    ring_word(ring, ring->params.sq_off.array)[index] = index;
    __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
    int taken;
    do taken = (int)syscall(__NR_io_uring_enter, ring->ring, 1, 0, 0, NULL, 0);
    while (taken < 0 && errno == EINTR);
    if (taken == 1) return 1;
    __atomic_store_n(tail, *tail - 1, __ATOMIC_RELEASE); /* the kernel has not seen it: out of resources, for now */
    return 0;
}

/* For a completion, or until nothing has come for `stalled_s`: ETIME (from Linux 5.11 on). */
static int ring_wait(struct ring *ring) {
    unsigned flags = IORING_ENTER_GETEVENTS;
#ifdef IORING_FEAT_EXT_ARG
    if (ring->params.features & IORING_FEAT_EXT_ARG) {
        long long whole = (long long)ring->stalled_s;
        struct __kernel_timespec patience = {whole, (long long)(1e9 * (ring->stalled_s - (double)whole))};
        struct io_uring_getevents_arg until = {.ts = (uint64_t)(uintptr_t)&patience};
        flags |= IORING_ENTER_EXT_ARG;
        return (int)syscall(__NR_io_uring_enter, ring->ring, 0, 1, flags, &until, sizeof until);
    }
#endif
    return (int)syscall(__NR_io_uring_enter, ring->ring, 0, 1, flags, NULL, 0);
}

#define CANCELS UINT64_MAX

/* Linux has left transfers with its own threads that none of them ever took up (seen with 6.18). Such a one can be
 * taken back, and is done by hand then. What a device has is not: that comes when it comes. */
static void ring_take_back(struct ring *ring) {
    for (unsigned slot = 0; slot < MAX_DEPTH; slot++) {
        if (!ring->transfers[slot].in_flight) continue;
        struct io_uring_sqe entry = {.opcode = IORING_OP_ASYNC_CANCEL, .fd = -1, .addr = slot, .user_data = CANCELS};
        ring_submit(ring, &entry); /* if not, the next time */
    }
}
#endif

static void ring_close(struct ring *ring) {
#ifdef HAS_IO_URING
    if (ring->ring < 0) return;
    munmap(ring->entries, ring->params.sq_entries * sizeof(struct io_uring_sqe));
    munmap(ring->map, ring->map_size);
    close(ring->ring);
#endif
    ring->ring = -1;
}

/* Never fails: without io_uring, or not `concurrent`, transfers are made one after the other. */
static void ring_open(struct ring *ring, int file, int writes, unsigned depth, int concurrent, double stalled_s) {
    memset(ring, 0, sizeof *ring);
    ring->file = file;
    ring->writes = writes;
    ring->ring = -1;
    ring->stalled_s = stalled_s;
#ifdef HAS_IO_URING
    if (!concurrent) return;
    int made = (int)syscall(__NR_io_uring_setup, depth, &ring->params);
    if (made < 0) return;
    struct io_uring_params *params = &ring->params;
    size_t submissions = params->sq_off.array + params->sq_entries * sizeof(uint32_t);
    size_t completions = params->cq_off.cqes + params->cq_entries * sizeof(struct io_uring_cqe);
    ring->map_size = submissions > completions ? submissions : completions;
    size_t entries_size = params->sq_entries * sizeof(struct io_uring_sqe);
    const int protection = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;
    ring->map = ring->entries = MAP_FAILED;
    if (params->features & IORING_FEAT_SINGLE_MMAP) {
        ring->map = mmap(NULL, ring->map_size, protection, flags, made, IORING_OFF_SQ_RING);
        ring->entries = mmap(NULL, entries_size, protection, flags, made, IORING_OFF_SQES);
    }
    if (ring->map == MAP_FAILED || (void *)ring->entries == MAP_FAILED) {
        if (ring->map != MAP_FAILED) munmap(ring->map, ring->map_size);
        if ((void *)ring->entries != MAP_FAILED) munmap(ring->entries, entries_size);
        close(made);
        return;
    }
    ring->ring = made;
#else
    (void)depth;
    (void)concurrent;
#endif
}

static ssize_t transfer_now(struct ring *ring, uint8_t *memory, size_t size, off_t offset) {
    ssize_t done;
    do done = ring->writes ? pwrite(ring->file, memory, size, offset) : pread(ring->file, memory, size, offset);
    while (done < 0 && errno == EINTR);
    return done < 0 ? -errno : done;
}

static void ring_begin(struct ring *ring, unsigned slot, uint8_t *memory, size_t size, off_t offset) {
    struct transfer *transfer = &ring->transfers[slot];
    *transfer = (struct transfer){memory, size, offset, 0, 0};
#ifdef HAS_IO_URING
    if (ring->ring >= 0) {
        struct io_uring_sqe entry = {
            .opcode = ring->writes ? IORING_OP_WRITE : IORING_OP_READ,
            .fd = ring->file,
            .addr = (uint64_t)(uintptr_t)memory,
            .len = (uint32_t)size,
            .off = (uint64_t)offset,
            .user_data = slot,
        };
        if (ring_submit(ring, &entry)) {
            transfer->in_flight = 1;
            return;
        }
    }
#endif
    transfer->result = transfer_now(ring, memory, size, offset);
}

/* Wait for a transfer and do the rest of it where the kernel did a part. `needed` bytes are enough (end of a file). */
static ssize_t ring_end(struct ring *ring, unsigned slot, size_t needed) {
    struct transfer *transfer = &ring->transfers[slot];
#ifdef HAS_IO_URING
    while (transfer->in_flight) {
        uint32_t *head = ring_word(ring, ring->params.cq_off.head);
        uint32_t tail = __atomic_load_n(ring_word(ring, ring->params.cq_off.tail), __ATOMIC_ACQUIRE);
        if (*head == tail) {
            if (ring_wait(ring) >= 0 || errno == EINTR) continue;
            if (errno == ETIME) ring_take_back(ring);
            else usleep(100); /* its memory is the kernel's until it is done */
            continue;
        }
        uint32_t index = *head & *ring_word(ring, ring->params.cq_off.ring_mask);
        struct io_uring_cqe *done = (struct io_uring_cqe *)ring_word(ring, ring->params.cq_off.cqes) + index;
        if (done->user_data < MAX_DEPTH) {
            ring->transfers[done->user_data].result = done->res;
            ring->transfers[done->user_data].in_flight = 0;
        }
        __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
    }
#endif
    ssize_t result = transfer->result;
    if (result == -EAGAIN || result == -EINTR || result == -ECANCELED) result = 0;
    while (result >= 0 && (size_t)result < needed) {
        ssize_t more = transfer_now(ring, transfer->memory + result, transfer->size - (size_t)result,
                                    transfer->offset + result);
        if (more == 0) return result; /* a file that ends too early */
        if (more < 0) return more;
        result += more;
    }
    return result;
}

#endif
