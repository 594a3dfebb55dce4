/* Reads of another node's memory through libfabric, which is loaded at run time: RDMA where the provider has it.
 *
 * Only five functions are looked up; all else are calls through tables in its objects, inline in its headers.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#if !__has_include(<rdma/fabric.h>)
PyMODINIT_FUNC PyInit__fabric(void) {
    PyErr_SetString(PyExc_ImportError, "it was built without libfabric's headers");
    return NULL;
}
#else
#include <dlfcn.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define VERSION FI_VERSION(1, 9)
#define MODES (FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY | FI_MR_ALLOCATED | FI_MR_ENDPOINT)
#define DEPTH 64 /* reads in flight, at most */
#define PAUSE_NS 50000
#define MAX_ADDRESS 256
#define MOST_REGIONS 4096

static struct {
    int (*getinfo)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **);
    void (*freeinfo)(struct fi_info *);
    struct fi_info *(*dupinfo)(const struct fi_info *);
    int (*fabric)(struct fi_fabric_attr *, struct fid_fabric **, void *);
    const char *(*strerror)(int);
} lib;

/* Memory that is registered: kept until it is not any more. */
typedef struct {
    struct fid_mr *mr;
    Py_buffer view;
} Region;

typedef struct {
    PyObject_HEAD
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_av *av;
    struct fid_cq *cq;
    struct fid_ep *ep;
    Region *regions[MOST_REGIONS]; /* by number; NULL: free */
    struct fi_context2 contexts[DEPTH]; /* of reads; some providers use them until the read is over */
    char used[DEPTH];
    int busy, closed; /* calls inside of libfabric; under the GIL, as all fields */
} Endpoint;

static PyObject *failed(int code, const char *what, const char *more) {
    code = code < 0 ? -code : code;
    PyObject *text = PyUnicode_FromFormat("%s: %s%s%s", what, lib.strerror(code), *more ? ": " : "", more);
    PyObject *words = text == NULL ? NULL : Py_BuildValue("(iN)", code, text);
    if (words != NULL) PyErr_SetObject(PyExc_OSError, words);
    Py_XDECREF(words);
    return NULL;
}

static int load(void) {
    if (lib.getinfo != NULL) return 0;
    void *opened;
    Py_BEGIN_ALLOW_THREADS
    opened = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
    Py_END_ALLOW_THREADS
    if (opened != NULL) {
        void *getinfo = dlsym(opened, "fi_getinfo");
        *(void **)&lib.freeinfo = dlsym(opened, "fi_freeinfo");
        *(void **)&lib.dupinfo = dlsym(opened, "fi_dupinfo");
        *(void **)&lib.fabric = dlsym(opened, "fi_fabric");
        *(void **)&lib.strerror = dlsym(opened, "fi_strerror");
        if (getinfo && lib.freeinfo && lib.dupinfo && lib.fabric && lib.strerror) {
            *(void **)&lib.getinfo = getinfo; /* last: now all are here */
            return 0;
        }
    }
    const char *why = dlerror();
    PyObject *words = Py_BuildValue("(is)", ENOSYS, why != NULL ? why : "libfabric.so.1 lacks a function");
    if (words != NULL) PyErr_SetObject(PyExc_OSError, words);
    Py_XDECREF(words);
    return -1;
}

/* Without the GIL. A libfabric error code, negative. */
static int look(const char *provider, const char *host, struct fi_info **found) {
    struct fi_info *hints = lib.dupinfo(NULL); /* as large as the library's own, whatever its version */
    if (hints == NULL) return -FI_ENOMEM;
    hints->caps = FI_RMA | FI_READ | FI_REMOTE_READ;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = MODES;
    hints->domain_attr->threading = FI_THREAD_SAFE;
    if (provider != NULL) hints->fabric_attr->prov_name = strdup(provider); /* freed with the hints */
    int code = lib.getinfo(VERSION, host, NULL, host != NULL ? FI_SOURCE : 0, hints, found);
    lib.freeinfo(hints);
    return code;
}

static PyObject *providers(PyObject *module, PyObject *unused) {
    if (load() != 0) return NULL;
    struct fi_info *found = NULL;
    int code;
    Py_BEGIN_ALLOW_THREADS
    code = look(NULL, NULL, &found);
    Py_END_ALLOW_THREADS
    if (code != 0 && code != -FI_ENODATA) return failed(code, "fi_getinfo", "");
    PyObject *listed = PyList_New(0);
    for (struct fi_info *at = found; at != NULL && listed != NULL; at = at->next) {
        PyObject *row = Py_BuildValue("(zzz)", at->fabric_attr->prov_name, at->fabric_attr->name, at->domain_attr->name);
        if (row == NULL || PyList_Append(listed, row) != 0) Py_CLEAR(listed);
        Py_XDECREF(row);
    }
    if (found != NULL) lib.freeinfo(found);
    return listed;
}

/* Without the GIL; NULL, or which call failed with ``code``. What was opened is the caller's to close. */
static const char *open_all(Endpoint *self, const char *provider, const char *host, int *code) {
    struct fi_av_attr av = {.type = FI_AV_TABLE};
    struct fi_cq_attr cq = {.format = FI_CQ_FORMAT_CONTEXT, .wait_obj = FI_WAIT_NONE, .size = 2 * DEPTH};
    if ((*code = look(provider, host, &self->info)) != 0) return "fi_getinfo";
    if ((*code = lib.fabric(self->info->fabric_attr, &self->fabric, NULL)) != 0) return "fi_fabric";
    if ((*code = fi_domain(self->fabric, self->info, &self->domain, NULL)) != 0) return "fi_domain";
    if ((*code = fi_av_open(self->domain, &av, &self->av, NULL)) != 0) return "fi_av_open";
    if ((*code = fi_cq_open(self->domain, &cq, &self->cq, NULL)) != 0) return "fi_cq_open";
    if ((*code = fi_endpoint(self->domain, self->info, &self->ep, NULL)) != 0) return "fi_endpoint";
    if ((*code = fi_ep_bind(self->ep, &self->av->fid, 0)) != 0) return "fi_ep_bind";
    if ((*code = fi_ep_bind(self->ep, &self->cq->fid, FI_TRANSMIT | FI_RECV)) != 0) return "fi_ep_bind";
    if ((*code = fi_enable(self->ep)) != 0) return "fi_enable";
    return NULL;
}

#define CLOSE(object)                                                     \
    do {                                                                  \
        int ended = (object) != NULL ? fi_close(&(object)->fid) : 0;      \
        if (ended != 0 && code == 0) code = ended;                        \
        (object) = NULL;                                                  \
    } while (0)

static void drop(Endpoint *self, Py_ssize_t at) {
    Region *region = self->regions[at];
    if (region == NULL) return;
    self->regions[at] = NULL;
    PyBuffer_Release(&region->view);
    free(region);
}

/* The first error, or 0. Reads in flight end with the endpoint, and only then their memory is let go. */
static int close_all(Endpoint *self) {
    int code = 0;
    PyThreadState *state = PyEval_SaveThread();
    int bound = self->info != NULL && self->info->domain_attr->mr_mode & FI_MR_ENDPOINT;
    if (!bound) CLOSE(self->ep);
    for (int at = 0; at < MOST_REGIONS; at++)
        if (self->regions[at] != NULL) CLOSE(self->regions[at]->mr);
    CLOSE(self->ep);
    CLOSE(self->cq);
    CLOSE(self->av);
    CLOSE(self->domain);
    CLOSE(self->fabric);
    if (self->info != NULL) lib.freeinfo(self->info);
    self->info = NULL;
    PyEval_RestoreThread(state);
    for (int at = 0; at < MOST_REGIONS; at++) drop(self, at);
    return code;
}

static PyObject *endpoint_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    const char *provider, *host;
    if (!PyArg_ParseTuple(args, "sz:Endpoint", &provider, &host)) return NULL;
    if (load() != 0) return NULL;
    Endpoint *self = (Endpoint *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    int code = 0;
    const char *what;
    Py_BEGIN_ALLOW_THREADS
    what = open_all(self, provider, host, &code);
    Py_END_ALLOW_THREADS
    if (what == NULL) return (PyObject *)self;
    failed(code, what, provider);
    self->closed = 1;
    close_all(self);
    Py_DECREF(self);
    return NULL;
}

static void dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    close_all((Endpoint *)object); /* no method runs: each holds a reference */
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* Begin a call that other threads' ``close`` waits for. */
static int enter(Endpoint *self) {
    if (self->closed) {
        failed(FI_ECANCELED, "the endpoint is closed", "");
        return -1;
    }
    self->busy++;
    return 0;
}

static PyObject *close_endpoint(PyObject *object, PyObject *unused) {
    Endpoint *self = (Endpoint *)object;
    if (self->closed) Py_RETURN_NONE;
    self->closed = 1; /* seen by what waits in ``progress`` */
    while (self->busy > 0) {
        struct timespec pause = {0, PAUSE_NS};
        Py_BEGIN_ALLOW_THREADS
        nanosleep(&pause, NULL);
        Py_END_ALLOW_THREADS
    }
    int code = close_all(self);
    if (code != 0) return failed(code, "fi_close", "");
    Py_RETURN_NONE;
}

static PyObject *register_memory(PyObject *object, PyObject *args) {
    Endpoint *self = (Endpoint *)object;
    Py_buffer view;
    int is_remote;
    unsigned long long key;
    if (!PyArg_ParseTuple(args, "y*pK:register", &view, &is_remote, &key)) return NULL;
    Region *region = calloc(1, sizeof *region);
    Py_ssize_t at = 0;
    while (at < MOST_REGIONS && self->regions[at] != NULL) at++;
    if (region == NULL || at == MOST_REGIONS || enter(self) != 0) {
        PyBuffer_Release(&view);
        free(region);
        return PyErr_Occurred() ? NULL : failed(FI_ENOMEM, "too many regions", "");
    }
    region->view = view;
    self->regions[at] = region;
    uint64_t access = is_remote ? FI_REMOTE_READ : FI_READ, mode = self->info->domain_attr->mr_mode;
    size_t digits = self->info->domain_attr->mr_key_size;
    if (digits > 0 && digits < 8) key &= ((uint64_t)1 << 8 * digits) - 1;
    const char *what = "fi_mr_reg";
    int code;
    Py_BEGIN_ALLOW_THREADS /* it pins all pages */
    code = fi_mr_reg(self->domain, view.buf, (size_t)view.len, access, 0, key, 0, &region->mr, NULL);
    if (code == 0 && mode & FI_MR_ENDPOINT) {
        what = "fi_mr_enable";
        code = fi_mr_bind(region->mr, &self->ep->fid, 0);
        if (code == 0) code = fi_mr_enable(region->mr);
    }
    Py_END_ALLOW_THREADS
    self->busy--;
    if (code != 0) {
        if (region->mr != NULL) fi_close(&region->mr->fid);
        drop(self, at);
        return failed(code, what, "");
    }
    unsigned long long base = mode & FI_MR_VIRT_ADDR ? (uintptr_t)view.buf : 0;
    return Py_BuildValue("(nKK)", at, (unsigned long long)fi_mr_key(region->mr), base);
}

static Region *region_of(Endpoint *self, Py_ssize_t at) {
    if (at >= 0 && at < MOST_REGIONS && self->regions[at] != NULL && self->regions[at]->mr != NULL)
        return self->regions[at];
    PyErr_SetString(PyExc_ValueError, "there is no such region");
    return NULL;
}

static PyObject *release(PyObject *object, PyObject *args) {
    Endpoint *self = (Endpoint *)object;
    Py_ssize_t at;
    if (!PyArg_ParseTuple(args, "n:release", &at)) return NULL;
    if (self->closed) Py_RETURN_NONE; /* all were, with it */
    Region *region = region_of(self, at);
    if (region == NULL) return NULL;
    struct fid_mr *mr = region->mr;
    region->mr = NULL;
    self->busy++;
    int code;
    Py_BEGIN_ALLOW_THREADS
    code = fi_close(&mr->fid);
    Py_END_ALLOW_THREADS
    self->busy--;
    drop(self, at);
    if (code != 0) return failed(code, "fi_close", "");
    Py_RETURN_NONE;
}

static PyObject *peer(PyObject *object, PyObject *args) {
    Endpoint *self = (Endpoint *)object;
    const char *theirs;
    Py_ssize_t size;
    fi_addr_t found = FI_ADDR_UNSPEC;
    if (!PyArg_ParseTuple(args, "y#:peer", &theirs, &size) || enter(self) != 0) return NULL;
    char own[MAX_ADDRESS]; /* libfabric reads as many bytes as its own address has */
    size_t length = sizeof own;
    int code = fi_getname(&self->ep->fid, own, &length), inserted = 0;
    if (code == 0 && length == (size_t)size) inserted = fi_av_insert(self->av, theirs, 1, &found, 0, NULL);
    self->busy--;
    if (inserted != 1) return failed(code != 0 ? code : inserted < 0 ? inserted : FI_EINVAL, "fi_av_insert", "");
    return PyLong_FromUnsignedLongLong(found);
}

static PyObject *read_remote(PyObject *object, PyObject *args) {
    Endpoint *self = (Endpoint *)object;
    unsigned long long to, at, key;
    Py_ssize_t number, offset, size;
    if (!PyArg_ParseTuple(args, "KnnnKK:read", &to, &number, &offset, &size, &at, &key)) return NULL;
    if (enter(self) != 0) return NULL;
    self->busy--;
    Region *region = region_of(self, number);
    if (region == NULL) return NULL;
    if (offset < 0 || size < 0 || offset > region->view.len - size || region->view.readonly) {
        PyErr_SetString(PyExc_ValueError, "the bytes to read do not fit into that region");
        return NULL;
    }
    int slot = 0;
    while (slot < DEPTH && self->used[slot]) slot++;
    if (slot == DEPTH) Py_RETURN_FALSE;
    self->used[slot] = 1;
    self->busy++;
    ssize_t code;
    Py_BEGIN_ALLOW_THREADS
    code = fi_read(self->ep, (char *)region->view.buf + offset, (size_t)size, fi_mr_desc(region->mr), to, at, key,
                   &self->contexts[slot]);
    Py_END_ALLOW_THREADS
    self->busy--;
    if (code != 0) self->used[slot] = 0;
    if (code == -FI_EAGAIN) Py_RETURN_FALSE;
    if (code != 0) return failed((int)code, "fi_read", "");
    Py_RETURN_TRUE;
}

static void forget(Endpoint *self, void *context) {
    struct fi_context2 *at = context;
    if (at >= self->contexts && at < self->contexts + DEPTH) self->used[at - self->contexts] = 0;
}

static PyObject *progress(PyObject *object, PyObject *args) {
    Endpoint *self = (Endpoint *)object;
    double seconds;
    if (!PyArg_ParseTuple(args, "d:progress", &seconds) || enter(self) != 0) return NULL;
    struct fi_cq_entry done[DEPTH];
    struct fi_cq_err_entry error;
    memset(&error, 0, sizeof error);
    char more[256] = "";
    struct timespec now, pause = {0, PAUSE_NS};
    ssize_t count;
    Py_BEGIN_ALLOW_THREADS
    clock_gettime(CLOCK_MONOTONIC, &now);
    double until = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec + seconds;
    while ((count = fi_cq_read(self->cq, done, DEPTH)) == -FI_EAGAIN && !*(volatile int *)&self->closed) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        if ((double)now.tv_sec + 1e-9 * (double)now.tv_nsec >= until) break;
        nanosleep(&pause, NULL);
    }
    if (count == -FI_EAVAIL && fi_cq_readerr(self->cq, &error, 0) == 1) {
        const char *words = fi_cq_strerror(self->cq, error.prov_errno, error.err_data, more, sizeof more);
        if (words != NULL && words != more) snprintf(more, sizeof more, "%s", words);
    }
    Py_END_ALLOW_THREADS
    self->busy--;
    for (ssize_t at = 0; at < count; at++) forget(self, done[at].op_context);
    forget(self, error.op_context);
    if (error.err != 0) return failed(error.err, "the read", more);
    if (count < 0 && count != -FI_EAGAIN) return failed((int)count, "fi_cq_read", "");
    return PyLong_FromSsize_t(count < 0 ? 0 : count);
}

static PyObject *address(PyObject *object, PyObject *unused) {
    Endpoint *self = (Endpoint *)object;
    char own[MAX_ADDRESS];
    size_t length = sizeof own;
    if (enter(self) != 0) return NULL;
    int code = fi_getname(&self->ep->fid, own, &length);
    self->busy--;
    return code != 0 ? failed(code, "fi_getname", "") : PyBytes_FromStringAndSize(own, (Py_ssize_t)length);
}

static PyMethodDef endpoint_methods[] = {
    {"address", address, METH_NOARGS, "address() -> bytes, for the other node's peer()"},
    {"close", close_endpoint, METH_NOARGS, "close(), once no other call is inside"},
    {"register", register_memory, METH_VARARGS, "register(memory, is_remote, key) -> (number, key, base)"},
    {"release", release, METH_VARARGS, "release(number)"},
    {"peer", peer, METH_VARARGS, "peer(address) -> number"},
    {"read", read_remote, METH_VARARGS, "read(peer, region, offset, size, address, key) -> bool: False: not now"},
    {"progress", progress, METH_VARARGS, "progress(seconds) -> number of reads that are done"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, endpoint_new},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, endpoint_methods},
    {0, NULL},
};

static PyType_Spec spec = {
    "resilio_hpc.native._fabric.Endpoint", sizeof(Endpoint), 0, Py_TPFLAGS_DEFAULT, slots,
};

static PyMethodDef methods[] = {
    {"providers", providers, METH_NOARGS, "providers() -> [(provider, fabric, domain)]"},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    return type == NULL ? -1 : PyModule_AddObject(module, "Endpoint", type);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_fabric", "Reads of other nodes' memory, by libfabric.", 0, methods, module_slots, NULL, NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__fabric(void) { return PyModuleDef_Init(&definition); }
#endif
