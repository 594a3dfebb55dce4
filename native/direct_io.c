/* Large transfers between memory and a file, several at a time, verified on the way.
 *
 * Meant for files that are opened with O_DIRECT: the page cache spreads a large write over seconds and a large read over
 * one more copy. The caller sees to alignment when writing; reads go through aligned memory of our own, from which
 * they are copied to their places in the same pass that computes their checksums.
 */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include "checksum.h"
#include "ring.h"
#include "segments.h"

#define PAGE 4096
#define HUGE_PAGE (2 << 20)
#define GAP (128 * 1024) /* bytes between two segments that are read rather than skipped: a request costs as much */

static int get_depth(unsigned depth, size_t chunk) {
    if (depth >= 1 && depth <= MAX_DEPTH && chunk >= PAGE && chunk % PAGE == 0 && chunk <= (size_t)1 << 30) return 1;
    PyErr_Format(PyExc_ValueError, "depth must be 1 to %d, the chunk a multiple of %d up to 1 GiB", MAX_DEPTH, PAGE);
    return 0;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void sleep_until(double when) {
    double wait = when - seconds();
    if (wait <= 0) return;
    struct timespec pause = {(time_t)wait, (long)(1e9 * (wait - (double)(time_t)wait))};
    nanosleep(&pause, NULL);
}

/* ---- write ------------------------------------------------------------------------------------------------------ */

struct piece {
    size_t start; /* in memory */
    off_t offset; /* in the file */
    size_t size;
};

struct block {
    size_t start;
    size_t size;
    uint32_t crc;
};

struct write_job {
    uint8_t *memory;
    const struct piece *pieces;
    Py_ssize_t piece_count;
    const struct block *blocks;
    Py_ssize_t block_count;
    Py_ssize_t bad_block; /* -1: none */
};

/* Verify every block that begins before `end`. */
static int verify_until(struct write_job *job, Py_ssize_t *next, size_t end) {
    for (; *next < job->block_count && job->blocks[*next].start < end; ++*next) {
        const struct block *block = &job->blocks[*next];
        if (~checksum(0xffffffffu, job->memory + block->start, block->size) != block->crc) {
            job->bad_block = *next;
            return 0;
        }
    }
    return 1;
}

/* 0 or -errno; nothing is in flight afterwards. Blocks are verified while what was verified before is written. */
static ssize_t write_all(struct ring *ring, struct write_job *job, unsigned depth, size_t chunk, double bytes_per_s) {
    double due = seconds();
    Py_ssize_t verified = 0;
    unsigned long begun = 0, ended = 0;
    ssize_t error = 0;
    for (Py_ssize_t i = 0; i < job->piece_count && !error; i++) {
        const struct piece *piece = &job->pieces[i];
        for (size_t at = 0; at < piece->size && !error; at += chunk) {
            size_t size = piece->size - at < chunk ? piece->size - at : chunk;
            if (!verify_until(job, &verified, piece->start + at + size)) goto out;
            if (begun - ended == depth) {
                struct transfer *oldest = &ring->transfers[ended % depth];
                ssize_t done = ring_end(ring, (unsigned)(ended++ % depth), oldest->size);
                if (done < 0 || (size_t)done < oldest->size) error = done < 0 ? done : -EIO;
                if (error) break;
            }
            if (bytes_per_s > 0) {
                sleep_until(due);
                due = (due > seconds() - 0.1 ? due : seconds() - 0.1) + (double)size / bytes_per_s;
            }
            ring_begin(ring, (unsigned)(begun++ % depth), job->memory + piece->start + at, size,
                       piece->offset + (off_t)at);
        }
    }
    if (!error) verify_until(job, &verified, SIZE_MAX);
out:
    for (; ended < begun; ended++) {
        struct transfer *oldest = &ring->transfers[ended % depth];
        ssize_t done = ring_end(ring, (unsigned)(ended % depth), oldest->size);
        if (!error && (done < 0 || (size_t)done < oldest->size)) error = done < 0 ? done : -EIO;
    }
    if (bytes_per_s > 0 && !error) sleep_until(due); /* another call may follow at once */
    return error;
}

/* Items of a sequence of three numbers each; the caller frees. NULL with an exception set. */
static struct piece *get_pieces(PyObject *list, Py_ssize_t memory_size, Py_ssize_t *count) {
    PyObject *items = get_items(list, "expected a sequence of (start, offset, size)");
    if (items == NULL) return NULL;
    *count = PyTuple_Size(items);
    struct piece *pieces = PyMem_Calloc((size_t)*count + 1, sizeof *pieces);
    if (pieces == NULL) PyErr_NoMemory();
    for (Py_ssize_t i = 0; pieces != NULL && i < *count; i++) {
        Py_ssize_t start, size;
        long long offset;
        PyObject *item = get_tuple(items, i);
        if (item != NULL && PyArg_ParseTuple(item, "nLn", &start, &offset, &size) &&
            (start < 0 || size < 0 || offset < 0 || start > memory_size || size > memory_size - start))
            PyErr_Format(PyExc_ValueError, "item %zd does not lie within the memory", i);
        if (PyErr_Occurred()) {
            PyMem_Free(pieces);
            pieces = NULL;
            break;
        }
        pieces[i] = (struct piece){(size_t)start, (off_t)offset, (size_t)size};
    }
    Py_DECREF(items);
    return pieces;
}

/* Blocks come as (start, checksum, size): the same three kinds of numbers. */
static struct block *get_blocks(PyObject *list, Py_ssize_t memory_size, Py_ssize_t *count) {
    struct piece *numbers = get_pieces(list, memory_size, count);
    if (numbers == NULL) return NULL;
    struct block *blocks = PyMem_Calloc((size_t)*count + 1, sizeof *blocks);
    if (blocks == NULL) PyErr_NoMemory();
    for (Py_ssize_t i = 0; blocks != NULL && i < *count; i++)
        blocks[i] = (struct block){numbers[i].start, numbers[i].size, (uint32_t)numbers[i].offset};
    PyMem_Free(numbers);
    return blocks;
}

static PyObject *py_write(PyObject *module, PyObject *args) {
    Py_buffer memory;
    PyObject *piece_list, *block_list;
    int fd, concurrent;
    unsigned depth;
    Py_ssize_t chunk;
    double bytes_per_s, stalled_s = STALLED_S;
    if (!PyArg_ParseTuple(args, "iy*OOIndp|d:write", &fd, &memory, &piece_list, &block_list, &depth, &chunk,
                          &bytes_per_s, &concurrent, &stalled_s))
        return NULL;
    struct write_job job = {.memory = memory.buf, .bad_block = -1};
    ssize_t error = 0;
    struct piece *pieces = NULL;
    struct block *blocks = NULL;
    if (get_depth(depth, (size_t)chunk) && (pieces = get_pieces(piece_list, memory.len, &job.piece_count)) != NULL &&
        (blocks = get_blocks(block_list, memory.len, &job.block_count)) != NULL) {
        struct ring ring;
        job.pieces = pieces;
        job.blocks = blocks;
        Py_BEGIN_ALLOW_THREADS
        ring_open(&ring, fd, 1, depth, concurrent, stalled_s);
        error = write_all(&ring, &job, depth, (size_t)chunk, bytes_per_s);
        ring_close(&ring);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(pieces);
    PyMem_Free(blocks);
    PyBuffer_Release(&memory);
    if (PyErr_Occurred()) return NULL;
    if (error) {
        errno = (int)-error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromSsize_t(job.bad_block);
}

/* ---- read ------------------------------------------------------------------------------------------------------- */

struct window { /* one read: from `start` in the file, bytes of segments until `end`, beginning with `first` at `at` */
    off_t start, end;
    Py_ssize_t first;
    size_t at;
};

struct read_job {
    struct segment *segments;
    Py_ssize_t count;
    Py_ssize_t next; /* the first segment that is not planned completely, and how much of it is */
    size_t at;
};

/* The next read: neighbouring segments together, up to a chunk. 0: there is no more. */
static int plan_window(struct read_job *job, size_t chunk, struct window *window) {
    while (job->next < job->count && job->at == job->segments[job->next].size) {
        job->next++;
        job->at = 0;
    }
    if (job->next == job->count) return 0;
    off_t first = job->segments[job->next].offset + (off_t)job->at;
    *window = (struct window){first & ~(off_t)(PAGE - 1), first, job->next, job->at};
    off_t limit = window->start + (off_t)chunk;
    while (job->next < job->count) {
        struct segment *segment = &job->segments[job->next];
        off_t from = segment->offset + (off_t)job->at, to = segment->offset + (off_t)segment->size;
        if (from >= limit || from > window->end + GAP) break;
        window->end = to < limit ? to : limit;
        if (window->end < to) {
            job->at = (size_t)(window->end - segment->offset);
            break;
        }
        job->next++;
        job->at = 0;
    }
    return 1;
}

static void take_window(struct read_job *job, const struct window *window, const uint8_t *data) {
    size_t at = window->at;
    for (Py_ssize_t i = window->first; i < job->count; i++, at = 0) {
        struct segment *segment = &job->segments[i];
        off_t from = segment->offset + (off_t)at, to = segment->offset + (off_t)segment->size;
        if (from >= window->end && segment->size) break;
        if (to > window->end) to = window->end;
        if (to > from) take_bytes(segment, at, data + (from - window->start), (size_t)(to - from));
        if (to < segment->offset + (off_t)segment->size) break;
    }
}

/* 0, -errno, or -ENODATA for a file that ends too early; nothing is in flight afterwards. */
static ssize_t read_all(struct ring *ring, struct read_job *job, uint8_t *room, unsigned depth, size_t chunk) {
    struct window windows[MAX_DEPTH];
    unsigned long begun = 0, ended = 0;
    ssize_t error = 0;
    for (;;) {
        while (!error && begun - ended < depth && plan_window(job, chunk, &windows[begun % depth])) {
            struct window *window = &windows[begun % depth];
            size_t size = ((size_t)(window->end - window->start) + PAGE - 1) & ~(size_t)(PAGE - 1);
            ring_begin(ring, (unsigned)(begun % depth), room + (begun % depth) * chunk, size, window->start);
            begun++;
        }
        if (ended == begun) return error;
        struct window *oldest = &windows[ended % depth];
        size_t needed = (size_t)(oldest->end - oldest->start);
        ssize_t done = ring_end(ring, (unsigned)(ended % depth), needed);
        if (!error && done >= 0 && (size_t)done >= needed)
            take_window(job, oldest, room + (ended % depth) * chunk);
        else if (!error)
            error = done < 0 ? done : -ENODATA;
        ended++;
    }
}

/* Through the page cache, or from a file in memory: straight into the targets, or for boxes by way of a `room` of a
 * chunk; each piece is verified while it is in the processor's cache. 0, -errno, or -ENODATA for a file that ends early. */
static ssize_t read_cached(int fd, struct read_job *job, uint8_t *room, size_t chunk) {
    for (Py_ssize_t i = 0; i < job->count; i++) {
        struct segment *segment = &job->segments[i];
        for (size_t at = 0; at < segment->size;) {
            uint8_t *into = segment->box ? room : (uint8_t *)segment->target.buf + at;
            size_t wanted = segment->size - at < chunk ? segment->size - at : chunk;
            ssize_t done = pread(fd, into, wanted, segment->offset + (off_t)at);
            if (done < 0 && errno == EINTR) continue;
            if (done <= 0) return done < 0 ? -errno : -ENODATA;
            if (segment->box)
                take_bytes(segment, at, room, (size_t)done);
            else
                segment->running = checksum(segment->running, into, (size_t)done);
            at += (size_t)done;
        }
    }
    return 0;
}

/* The indices of segments that are not as they should be; lets the segments go. */
static PyObject *finish_read(struct read_job *job, ssize_t error) {
    PyObject *bad = error ? NULL : PyList_New(0);
    for (Py_ssize_t i = 0; bad != NULL && i < job->count; i++) {
        if (~job->segments[i].running == job->segments[i].crc) continue;
        PyObject *index = PyLong_FromSsize_t(i);
        if (index == NULL || PyList_Append(bad, index) < 0) Py_CLEAR(bad);
        Py_XDECREF(index);
    }
    release_segments(job->segments, job->count);
    if (error) {
        errno = (int)-error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return bad;
}

static PyObject *py_read_cached(PyObject *module, PyObject *args) {
    PyObject *segment_list;
    int fd;
    Py_ssize_t chunk;
    if (!PyArg_ParseTuple(args, "iOn:read_cached", &fd, &segment_list, &chunk)) return NULL;
    if (!get_depth(1, (size_t)chunk)) return NULL;
    struct read_job job = {0};
    if ((job.segments = get_segments(segment_list, &job.count)) == NULL) return NULL;
    ssize_t error = -ENOMEM;
    Py_BEGIN_ALLOW_THREADS
    uint8_t *room = malloc((size_t)chunk);
    if (room != NULL) error = read_cached(fd, &job, room, (size_t)chunk);
    free(room);
    Py_END_ALLOW_THREADS
    return finish_read(&job, error);
}

/* What belongs to segments out of a file that is mapped, and was verified by the process that put it there. */
static PyObject *py_copy_segments(PyObject *module, PyObject *args) {
    PyObject *segment_list;
    Py_buffer memory;
    if (!PyArg_ParseTuple(args, "y*O:copy_segments", &memory, &segment_list)) return NULL;
    Py_ssize_t count;
    struct segment *segments = get_segments(segment_list, &count);
    for (Py_ssize_t i = 0; segments != NULL && i < count; i++) {
        if (segments[i].offset + (off_t)segments[i].size <= (off_t)memory.len) continue;
        PyErr_Format(PyExc_ValueError, "segment %zd ends behind the memory", i);
        release_segments(segments, count);
        segments = NULL;
    }
    if (segments == NULL) {
        PyBuffer_Release(&memory);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++) {
        const uint8_t *data = (const uint8_t *)memory.buf + segments[i].offset;
        if (segments[i].box == NULL)
            copy_far(segments[i].target.buf, data, segments[i].size);
        else
            scatter(segments[i].box, segments[i].target.buf, (int64_t)segments[i].at, data, (int64_t)segments[i].size);
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* what the caller looks at next in shared memory was so after the copies */
    Py_END_ALLOW_THREADS
    release_segments(segments, count);
    PyBuffer_Release(&memory);
    Py_RETURN_NONE;
}

static PyObject *py_read(PyObject *module, PyObject *args) {
    PyObject *segment_list;
    int fd, concurrent;
    unsigned depth;
    Py_ssize_t chunk;
    double stalled_s = STALLED_S;
    if (!PyArg_ParseTuple(args, "iOInp|d:read", &fd, &segment_list, &depth, &chunk, &concurrent, &stalled_s))
        return NULL;
    if (!get_depth(depth, (size_t)chunk)) return NULL;
    struct read_job job = {0};
    if ((job.segments = get_segments(segment_list, &job.count)) == NULL) return NULL;
    ssize_t error = -ENOMEM;
    Py_BEGIN_ALLOW_THREADS
    size_t size = depth * (size_t)chunk + HUGE_PAGE;
    uint8_t *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map != MAP_FAILED) {
        uint8_t *room = (uint8_t *)(((uintptr_t)map + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
        madvise(room, size - HUGE_PAGE, MADV_HUGEPAGE); /* fewer pages for the kernel to hold while a device writes */
        struct ring ring;
        ring_open(&ring, fd, 0, depth, concurrent, stalled_s);
        error = read_all(&ring, &job, room, depth, (size_t)chunk);
        ring_close(&ring);
        munmap(map, size);
    }
    Py_END_ALLOW_THREADS
    return finish_read(&job, error);
}

/* ---- Python ----------------------------------------------------------------------------------------------------- */

static PyObject *py_concurrent(PyObject *module, PyObject *args) {
    struct ring ring;
    ring_open(&ring, -1, 0, 1, 1, STALLED_S);
    int found = ring.ring >= 0;
    ring_close(&ring);
    return PyBool_FromLong(found);
}

static PyMethodDef methods[] = {
    {"write", py_write, METH_VARARGS,
     "write(fd, memory, pieces, blocks, depth, chunk_bytes, bytes_per_s, concurrent, stalled_s=3) -> int"},
    {"read", py_read, METH_VARARGS,
     "read(fd, segments, depth, chunk_bytes, concurrent, stalled_s=3) -> list[int]"},
    {"read_cached", py_read_cached, METH_VARARGS, "read_cached(fd, segments, chunk_bytes) -> list[int]"},
    {"copy_segments", py_copy_segments, METH_VARARGS, "copy_segments(memory, segments) -> None"},
    {"is_concurrent", py_concurrent, METH_NOARGS, "is_concurrent() -> bool"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_direct_io", "Large transfers past the page cache.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__direct_io(void) {
    build_tables();
    return PyModule_Create(&definition);
}
