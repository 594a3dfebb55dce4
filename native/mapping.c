/* Files in shared memory, mapped where huge pages can be, and given huge pages. Python's mmap takes no address. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define HUGE_PAGE ((size_t)2 << 20)

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1; EINVAL before */
#endif

typedef struct {
    PyObject_HEAD
    void *memory;
    size_t size;
    int readonly;
} Mapping;

static int get_buffer(PyObject *self, Py_buffer *view, int flags) {
    Mapping *mapping = (Mapping *)self;
    return PyBuffer_FillInfo(view, self, mapping->memory, (Py_ssize_t)mapping->size, mapping->readonly, flags);
}

static void dealloc(PyObject *self) {
    Mapping *mapping = (Mapping *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (mapping->memory != NULL) {
        Py_BEGIN_ALLOW_THREADS /* to unmap gigabytes takes a while */
        munmap(mapping->memory, mapping->size);
        Py_END_ALLOW_THREADS
    }
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyType_Slot slots[] = {
    {Py_tp_dealloc, dealloc},
    {Py_bf_getbuffer, get_buffer},
    {0, NULL},
};

static PyType_Spec spec = {
    "resilio_hpc.native._mapping.Mapping", sizeof(Mapping), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots,
};

/* At an address that is a multiple of a huge page, as the file's first byte is. NULL with errno. */
static void *map_aligned(int fd, size_t size, int protection) {
    uint8_t *room = mmap(NULL, size + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return NULL;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (size + page - 1) & ~(page - 1);
    size_t before = -(uintptr_t)room & (HUGE_PAGE - 1);
    void *memory = mmap(room + before, size, protection, MAP_SHARED | MAP_FIXED, fd, 0);
    int failed = memory == MAP_FAILED ? errno : 0;
    if (failed) munmap(room, size + HUGE_PAGE);
    else {
        if (before) munmap(room, before);
        if (before + whole < size + HUGE_PAGE) munmap(room + before + whole, size + HUGE_PAGE - before - whole);
    }
    errno = failed;
    return failed ? NULL : memory;
}

static PyObject *map_shared(PyObject *module, PyObject *args) {
    int fd, writable;
    Py_ssize_t size;
    struct stat found;
    if (!PyArg_ParseTuple(args, "inp:map_shared", &fd, &size, &writable)) return NULL;
    if (fstat(fd, &found) != 0) return PyErr_SetFromErrno(PyExc_OSError);
    if (size <= 0 || size > found.st_size)
        return PyErr_Format(PyExc_ValueError, "map_shared: %zd bytes of a file of %lld", size, (long long)found.st_size);
    Mapping *mapping = PyObject_New(Mapping, *(PyTypeObject **)PyModule_GetState(module));
    if (mapping == NULL) return NULL;
    mapping->size = (size_t)size;
    mapping->readonly = !writable;
    mapping->memory = map_aligned(fd, (size_t)size, PROT_READ | (writable ? PROT_WRITE : 0));
    PyObject *view = NULL;
    if (mapping->memory == NULL) PyErr_SetFromErrno(PyExc_OSError);
    else view = PyMemoryView_FromObject((PyObject *)mapping);
    Py_DECREF(mapping); /* the view keeps it, and each part of the view */
    return view;
}

static PyObject *make_huge(PyObject *module, PyObject *args) {
    Py_buffer target;
    if (!PyArg_ParseTuple(args, "y*:make_huge", &target)) return NULL;
    uintptr_t first = ((uintptr_t)target.buf + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1);
    uintptr_t end = ((uintptr_t)target.buf + (uintptr_t)target.len) & ~(uintptr_t)(HUGE_PAGE - 1);
    int failed;
    Py_BEGIN_ALLOW_THREADS /* other page sizes have other huge pages */
    failed = first < end && (sysconf(_SC_PAGESIZE) != 4096 || madvise((void *)first, end - first, MADV_COLLAPSE) != 0);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&target);
    return PyBool_FromLong(!failed);
}

static PyMethodDef methods[] = {
    {"map_shared", map_shared, METH_VARARGS, "map_shared(fd, size, writable) -> memoryview"},
    {"make_huge", make_huge, METH_VARARGS, "make_huge(mapping) -> bool"},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module) {
    PyObject **type = PyModule_GetState(module);
    *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    return *type == NULL ? -1 : 0;
}

static int traverse(PyObject *module, visitproc visit, void *arg) {
    Py_VISIT(*(PyObject **)PyModule_GetState(module));
    return 0;
}

static int clear(PyObject *module) {
    Py_CLEAR(*(PyObject **)PyModule_GetState(module));
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_mapping", "Shared memory in huge pages.", sizeof(PyObject *), methods, module_slots, traverse,
    clear, NULL,
};

PyMODINIT_FUNC PyInit__mapping(void) { return PyModuleDef_Init(&definition); }
