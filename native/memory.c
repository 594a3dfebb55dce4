/* What Python is too slow for: copying with a checksum in the same pass, for shared-memory arenas. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "checksum.h"

static PyObject *py_copy_crc32c(PyObject *module, PyObject *args) {
    Py_buffer target, source;
    if (!PyArg_ParseTuple(args, "w*y*:copy_crc32c", &target, &source)) return NULL;
    if (target.len != source.len) {
        PyErr_Format(PyExc_ValueError, "copy_crc32c: target has %zd bytes, source has %zd", target.len, source.len);
        PyBuffer_Release(&target);
        PyBuffer_Release(&source);
        return NULL;
    }
    uint32_t crc;
    Py_BEGIN_ALLOW_THREADS
    crc = ~copy_checksum(0xffffffffu, target.buf, source.buf, (size_t)source.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&target);
    PyBuffer_Release(&source);
    return PyLong_FromUnsignedLong(crc);
}

/* ---- many blocks in one call ----------------------------------------------------------------------------------- */

typedef struct {
    Py_buffer source;
    Py_ssize_t at, start, size;
    uint32_t crc;
} Block;

static int take_block(Block *block, PyObject *item, Py_ssize_t room) {
    PyObject *source;
    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "copy_blocks: a block is (at, source, start, size)");
        return 0;
    }
    if (!PyArg_ParseTuple(item, "nOnn:copy_blocks", &block->at, &source, &block->start, &block->size)) return 0;
    if (PyObject_GetBuffer(source, &block->source, PyBUF_SIMPLE) < 0) return 0;
    Py_ssize_t size = block->size, length = block->source.len;
    if (size < 0 || block->at < 0 || block->start < 0 || size > room || block->at > room - size || size > length ||
        block->start > length - size) {
        PyErr_Format(PyExc_ValueError, "copy_blocks: %zd bytes from %zd of %zd to %zd of %zd", size, block->start, length,
                     block->at, room);
        PyBuffer_Release(&block->source);
        return 0;
    }
    return 1;
}

static PyObject *py_copy_blocks(PyObject *module, PyObject *args) {
    Py_buffer target;
    PyObject *list, *crcs = NULL;
    if (!PyArg_ParseTuple(args, "w*O!:copy_blocks", &target, &PyList_Type, &list)) return NULL;
    PyObject *items = PyList_AsTuple(list); /* another thread may change the list meanwhile */
    Py_ssize_t count = items == NULL ? 0 : PyTuple_Size(items), taken = 0;
    Block *blocks = items == NULL ? NULL : PyMem_New(Block, count ? count : 1);
    if (blocks == NULL) {
        if (items != NULL) PyErr_NoMemory();
    } else {
        while (taken < count && take_block(&blocks[taken], PyTuple_GetItem(items, taken), target.len)) taken++;
    }
    if (blocks != NULL && taken == count) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < count; i++) {
            Block *block = &blocks[i];
            const uint8_t *source = (const uint8_t *)block->source.buf + block->start;
            block->crc = ~copy_checksum(0xffffffffu, (uint8_t *)target.buf + block->at, source, (size_t)block->size);
        }
        Py_END_ALLOW_THREADS
        crcs = PyList_New(count);
        for (Py_ssize_t i = 0; crcs != NULL && i < count; i++) {
            PyObject *crc = PyLong_FromUnsignedLong(blocks[i].crc);
            if (crc == NULL) Py_CLEAR(crcs);
            else if (PyList_SetItem(crcs, i, crc) < 0) Py_CLEAR(crcs);
        }
    }
    for (Py_ssize_t i = 0; i < taken; i++) PyBuffer_Release(&blocks[i].source);
    PyMem_Free(blocks);
    Py_XDECREF(items);
    PyBuffer_Release(&target);
    return crcs;
}

static PyObject *crc_with(PyObject *args, const char *format, uint32_t (*function)(uint32_t, const uint8_t *, size_t)) {
    Py_buffer source;
    unsigned int start = 0;
    if (!PyArg_ParseTuple(args, format, &source, &start)) return NULL;
    uint32_t crc;
    Py_BEGIN_ALLOW_THREADS
    crc = ~function(~(uint32_t)start, source.buf, (size_t)source.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&source);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *py_crc32c(PyObject *module, PyObject *args) { return crc_with(args, "y*|I:crc32c", checksum); }

static PyObject *py_crc32c_portable(PyObject *module, PyObject *args) {
    return crc_with(args, "y*|I:crc32c_portable", crc_portable);
}

static PyObject *py_use(PyObject *module, PyObject *args) {
    int wanted;
    if (!PyArg_ParseTuple(args, "i:use", &wanted)) return NULL;
    if (wanted < TABLES || wanted > (int)available) {
        PyErr_Format(PyExc_ValueError, "use: %d is not among the processor's 0 to %d", wanted, (int)available);
        return NULL;
    }
    used = (enum instructions)wanted;
    Py_RETURN_NONE;
}

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

#define PRESENT_PAGES 4096

/* Whether every page of anonymous memory is there; of a file mincore tells what is in the page cache instead. */
static int is_present(uintptr_t first, uintptr_t end) {
    unsigned char pages[PRESENT_PAGES];
    if (mincore((void *)first, end - first, pages) != 0) return 0;
    for (size_t i = 0; i < (end - first) >> 12; i++)
        if (!(pages[i] & 1)) return 0;
    return 1;
}

static int populate(uintptr_t first, uintptr_t end, int how) {
    if (madvise((void *)first, end - first, how) == 0) return 0;
    if (errno != EINVAL) return -1;
    for (volatile uint8_t *at = (volatile uint8_t *)first; at < (volatile uint8_t *)end; at += 4096) {
        uint8_t byte = *at; /* Linux before 5.14: fault the pages in one by one */
        /* compared and set in one go: another thread may be filling the same memory */
        if (how == MADV_POPULATE_WRITE)
            __atomic_compare_exchange_n(at, &byte, byte, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }
    return 0;
}

static PyObject *populate_with(PyObject *args, const char *format, int only_missing) {
    Py_buffer target;
    if (!PyArg_ParseTuple(args, format, &target)) return NULL;
    int failed = 0, how = target.readonly ? MADV_POPULATE_READ : MADV_POPULATE_WRITE;
    uintptr_t first = ((uintptr_t)target.buf + 4095) & ~(uintptr_t)4095; /* whole pages only: the rest faults by itself */
    uintptr_t end = ((uintptr_t)target.buf + (uintptr_t)target.len) & ~(uintptr_t)4095;
    Py_BEGIN_ALLOW_THREADS
    for (uintptr_t at = first, next; at < end && !failed; at = next) {
        next = only_missing && end - at > PRESENT_PAGES * 4096 ? at + PRESENT_PAGES * 4096 : end;
        if (!only_missing || !is_present(at, next)) failed = populate(at, next, how) != 0;
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&target);
    if (failed) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *py_populate(PyObject *module, PyObject *args) { return populate_with(args, "y*:populate", 0); }

static PyObject *py_populate_missing(PyObject *module, PyObject *args) {
    return populate_with(args, "w*:populate_missing", 1);
}

/* ---- a word of shared memory that processes wait at ------------------------------------------------------------ */

/* The word of 32 bits at `at` of the memory, or NULL with an exception set. */
static uint32_t *word_of(Py_buffer *memory, Py_ssize_t at) {
    if (at >= 0 && at <= memory->len - 4 && ((uintptr_t)memory->buf + (uintptr_t)at) % 4 == 0)
        return (uint32_t *)((char *)memory->buf + at);
    PyErr_Format(PyExc_ValueError, "there is no word at byte %zd of %zd", at, memory->len);
    return NULL;
}

static PyObject *py_await_word(PyObject *module, PyObject *args) {
    Py_buffer memory;
    Py_ssize_t at;
    unsigned int seen;
    double seconds;
    if (!PyArg_ParseTuple(args, "w*nId:await_word", &memory, &at, &seen, &seconds)) return NULL;
    uint32_t *word = word_of(&memory, at);
    if (word != NULL) {
        struct timespec limit = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
        Py_BEGIN_ALLOW_THREADS
        syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, NULL, 0); /* may return too early: the caller looks */
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&memory);
    if (word == NULL) return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_change_word(PyObject *module, PyObject *args) {
    Py_buffer memory;
    Py_ssize_t at;
    if (!PyArg_ParseTuple(args, "w*n:change_word", &memory, &at)) return NULL;
    uint32_t *word = word_of(&memory, at);
    if (word != NULL) {
        __atomic_add_fetch(word, 1, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
    }
    PyBuffer_Release(&memory);
    if (word == NULL) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"await_word", py_await_word, METH_VARARGS, "await_word(memory, at, seen, seconds) -> None"},
    {"change_word", py_change_word, METH_VARARGS, "change_word(memory, at) -> None"},
    {"copy_crc32c", py_copy_crc32c, METH_VARARGS, "copy_crc32c(target, source) -> int"},
    {"copy_blocks", py_copy_blocks, METH_VARARGS, "copy_blocks(target, [(at, source, start, size), ...]) -> [int, ...]"},
    {"crc32c", py_crc32c, METH_VARARGS, "crc32c(data, start=0) -> int"},
    {"crc32c_portable", py_crc32c_portable, METH_VARARGS, "crc32c_portable(data, start=0) -> int"},
    {"use", py_use, METH_VARARGS, "use(instructions) -> None"},
    {"populate", py_populate, METH_VARARGS, "populate(mapping) -> None"},
    {"populate_missing", py_populate_missing, METH_VARARGS, "populate_missing(memory) -> None"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_memory", "Copying and checksums without the GIL.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__memory(void) {
    build_tables();
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "available", (int)available) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
