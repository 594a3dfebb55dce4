/* What is read: ranges of bytes of a file, each with its checksum, and where they go: all of them into a target, or, run
 * by run, those that belong to a box of the tensor that they are a part of.
 */
#ifndef RESILIO_SEGMENTS_H
#define RESILIO_SEGMENTS_H

#include <Python.h>
#include <stdint.h>
#include <sys/types.h>

#include "checksum.h"
#include "scatter.h"

#define FAR (INT64_MAX / 4) /* sums of an offset, a size and a chunk do not overflow */

struct segment {
    off_t offset;
    size_t size;
    Py_buffer target;
    uint32_t crc;     /* as it should be */
    uint32_t running; /* inverted register */
    size_t at;        /* with a box: where in the tensor the segment begins */
    struct box *box;  /* NULL: all of it goes to the target */
};

/* The next bytes of a segment, which are at `data`: to their places, and into the checksum. */
static void take_bytes(struct segment *segment, size_t at, const uint8_t *data, size_t size) {
    uint8_t *target = segment->target.buf;
    if (segment->box == NULL) {
        segment->running = copy_checksum(segment->running, target + at, data, size);
        return;
    }
    while (size) { /* pieces that stay in the first-level cache between checksum and copy */
        size_t piece = size < PIECE ? size : PIECE;
        segment->running = checksum(segment->running, data, piece);
        scatter(segment->box, target, (int64_t)(segment->at + at), data, (int64_t)piece);
        at += piece;
        data += piece;
        size -= piece;
    }
}

/* The items of a sequence as a tuple, which no other thread changes; NULL with an exception set. */
static PyObject *get_items(PyObject *sequence, const char *expected) {
    PyObject *items = PySequence_Tuple(sequence);
    if (items == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) PyErr_SetString(PyExc_TypeError, expected);
    return items;
}

/* An item of a tuple that must be a tuple (borrowed), or NULL with an exception set. */
static PyObject *get_tuple(PyObject *items, Py_ssize_t index) {
    PyObject *item = PyTuple_GetItem(items, index);
    if (item == NULL) return NULL;
    if (PyTuple_Check(item)) return item;
    PyErr_Format(PyExc_TypeError, "item %zd is not a tuple", index);
    return NULL;
}

/* Does the box lie within `target_size` bytes, and does each of its steps go past all that it encloses? */
static int is_sound(const struct box *box, int64_t target_size) {
    int64_t source = box->run, target = box->run;
    if (box->first < 0 || box->target_first < 0 || box->run < 1) return 0;
    for (int i = box->level_count - 1; i >= 0; i--) {
        const struct level *level = &box->levels[i];
        int64_t more_source, more_target;
        if (level->count < 1 || level->source_step < source || level->target_step < 0 ||
            __builtin_mul_overflow(level->count - 1, level->source_step, &more_source) ||
            __builtin_mul_overflow(level->count - 1, level->target_step, &more_target) ||
            __builtin_add_overflow(source, more_source, &source) ||
            __builtin_add_overflow(target, more_target, &target))
            return 0;
    }
    return !__builtin_add_overflow(source, box->first, &source) && target <= target_size &&
           box->target_first <= target_size - target;
}

/* (first, target_first, run, ((count, source_step, target_step), ...)) as a box, which the caller frees. */
static struct box *get_box(PyObject *item, int64_t target_size) {
    long long first, target_first, run, count, source_step, target_step;
    PyObject *levels;
    if (!PyArg_ParseTuple(item, "LLLO!", &first, &target_first, &run, &PyTuple_Type, &levels)) return NULL;
    Py_ssize_t number = PyTuple_Size(levels);
    if (number < 1 || number > MAX_LEVELS) {
        PyErr_Format(PyExc_ValueError, "a box has 1 to %d levels, not %zd", MAX_LEVELS, number);
        return NULL;
    }
    struct box *box = PyMem_Malloc(sizeof *box + (size_t)number * sizeof(struct level));
    if (box == NULL) return (struct box *)PyErr_NoMemory();
    *box = (struct box){first, target_first, run, (int)number};
    for (Py_ssize_t i = 0; i < number; i++) {
        PyObject *level = get_tuple(levels, i);
        if (level == NULL || !PyArg_ParseTuple(level, "LLL", &count, &source_step, &target_step)) goto failed;
        box->levels[i] = (struct level){count, source_step, target_step};
    }
    if (is_sound(box, target_size)) return box;
    PyErr_SetString(PyExc_ValueError, "a box does not lie within its target, or its levels overlap");
failed:
    PyMem_Free(box);
    return NULL;
}

/* (offset, target, checksum), or with a box (offset, target, checksum, size, at, box). */
static int get_segment(PyObject *item, struct segment *segment) {
    long long offset, size = -1, at = 0;
    PyObject *box = NULL;
    if (!PyArg_ParseTuple(item, "Lw*I|LLO!", &offset, &segment->target, &segment->crc, &size, &at, &PyTuple_Type, &box))
        return 0;
    segment->offset = (off_t)offset;
    segment->size = (size_t)(box == NULL ? segment->target.len : size);
    segment->at = (size_t)at;
    segment->running = 0xffffffffu;
    if (segment->offset > FAR || segment->size > FAR)
        PyErr_SetString(PyExc_ValueError, "a segment lies further behind than any file reaches");
    else if (box != NULL && (at < 0 || at > FAR))
        PyErr_SetString(PyExc_ValueError, "a segment with a box has a place in its tensor");
    else if (box == NULL || (segment->box = get_box(box, (int64_t)segment->target.len)) != NULL)
        return 1;
    PyBuffer_Release(&segment->target);
    return 0;
}

static void release_segments(struct segment *segments, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        PyBuffer_Release(&segments[i].target);
        PyMem_Free(segments[i].box);
    }
    PyMem_Free(segments);
}

static struct segment *get_segments(PyObject *list, Py_ssize_t *count) {
    PyObject *items = get_items(list, "expected a sequence of (offset, target, checksum)");
    if (items == NULL) return NULL;
    *count = PyTuple_Size(items);
    struct segment *segments = PyMem_Calloc((size_t)*count + 1, sizeof *segments);
    if (segments == NULL) PyErr_NoMemory();
    off_t end = 0;
    for (Py_ssize_t i = 0; segments != NULL && i < *count; i++) {
        struct segment *segment = &segments[i];
        PyObject *item = get_tuple(items, i);
        int taken = item != NULL && get_segment(item, segment);
        if (taken && segment->offset < end)
            PyErr_Format(PyExc_ValueError, "segment %zd begins before the end of the one before", i);
        if (PyErr_Occurred()) {
            release_segments(segments, i + taken);
            segments = NULL;
            break;
        }
        end = segment->offset + (off_t)segment->size;
    }
    Py_DECREF(items);
    return segments;
}

#endif
