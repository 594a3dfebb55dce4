/* What Python is too slow for: copying with a checksum in the same pass, for shared-memory arenas. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>

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

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static PyObject *py_populate(PyObject *module, PyObject *args) {
    Py_buffer target;
    if (!PyArg_ParseTuple(args, "w*:populate", &target)) return NULL;
    int failed = 0;
    uintptr_t first = ((uintptr_t)target.buf + 4095) & ~(uintptr_t)4095; /* whole pages only: the rest faults by itself */
    uintptr_t end = ((uintptr_t)target.buf + (uintptr_t)target.len) & ~(uintptr_t)4095;
    Py_BEGIN_ALLOW_THREADS
    if (end > first) failed = madvise((void *)first, end - first, MADV_POPULATE_WRITE) != 0;
    if (failed && errno == EINVAL) { /* Linux before 5.14: fault the pages in one by one */
        volatile uint8_t *bytes = target.buf;
        for (Py_ssize_t i = 0; i < target.len; i += 4096) bytes[i] = bytes[i];
        failed = 0;
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&target);
    if (failed) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy_crc32c", py_copy_crc32c, METH_VARARGS, "copy_crc32c(target, source) -> int"},
    {"crc32c", py_crc32c, METH_VARARGS, "crc32c(data, start=0) -> int"},
    {"crc32c_portable", py_crc32c_portable, METH_VARARGS, "crc32c_portable(data, start=0) -> int"},
    {"populate", py_populate, METH_VARARGS, "populate(mapping) -> None"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_memory", "Copying and checksums without the GIL.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__memory(void) {
    build_tables();
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "has_hardware", has_hardware) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
