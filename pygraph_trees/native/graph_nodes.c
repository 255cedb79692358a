/* Many driver calls at once: pygraph_trees.native._graph_nodes, an optional part of pygraph_trees.cuda.driver.

   search finds words in a range among the parameters of all kernels of a graph; set_kernels sets kernel nodes of an
   instantiated graph; address_of gives the address of a call. Errors raise RuntimeError("call", code) or OSError.
   No CUDA header is needed, and only Python's stable C API is used.
   native/DESIGN.md describes arguments and results. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { KERNEL = 0, INVALID_VALUE = 1, MOST_PARAMETERS = 4096, MOST_BYTES = 1 << 16 };

typedef struct {
    void *function;
    unsigned int grid[3], block[3], shared;
    void **parameters;
    void **extra;
    void *kernel;
    void *context;
} Parameters;

typedef struct {
    int (*nodes)(void *graph, void **nodes, size_t *count);
    int (*type)(void *node, int *type);
    int (*parameters)(void *node, Parameters *parameters);
    int (*of_function)(void *function, size_t index, size_t *offset, size_t *nbytes);
    int (*of_kernel)(void *kernel, size_t index, size_t *offset, size_t *nbytes);
} Calls;

/* A kernel, with the layout of its parameters. */
typedef struct {
    void *function, *kernel;
    int asked, readable, needed;
    size_t count, nbytes;
    size_t *offsets, *sizes;
} Kernel;

typedef struct {
    Calls calls;
    Kernel *kernels;
    size_t count, room;
    unsigned char block[MOST_BYTES + 8];
} Reader;

/* Sets the exception for a call that returned an error code; -1 if the library lacks the call. */
static void refuse(const char *call, int code) {
    PyObject *arguments = Py_BuildValue("(si)", call, code);
    if (arguments != NULL)
        PyErr_SetObject(PyExc_RuntimeError, arguments);
    Py_XDECREF(arguments);
}

static void *find(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (found == NULL)
        refuse(name, -1);
    return found;
}

static int open_calls(Calls *calls, const char *name) {
    void *library = dlopen(name, RTLD_NOW);
    if (library == NULL) {
        PyErr_Format(PyExc_OSError, "%s cannot be opened", name);
        return -1;
    }
    /* It stays open: the process uses it anyway. */
    if ((*(void **)&calls->nodes = find(library, "cuGraphGetNodes")) == NULL ||
        (*(void **)&calls->type = find(library, "cuGraphNodeGetType")) == NULL ||
        (*(void **)&calls->parameters = find(library, "cuGraphKernelNodeGetParams_v2")) == NULL ||
        (*(void **)&calls->of_function = find(library, "cuFuncGetParamInfo")) == NULL ||
        (*(void **)&calls->of_kernel = find(library, "cuKernelGetParamInfo")) == NULL)
        return -1;
    return 0;
}

/* Asks until the driver refuses: the call that counts parameters needs CUDA 13.2. */
static int ask_layout(const Calls *calls, Kernel *kernel) {
    size_t room = 0, offset, nbytes;
    int code;
    for (;;) {
        code = kernel->function != NULL ? calls->of_function(kernel->function, kernel->count, &offset, &nbytes)
                                        : calls->of_kernel(kernel->kernel, kernel->count, &offset, &nbytes);
        if (code != 0)
            break;
        if (kernel->count == room) {
            room = room ? 2 * room : 32;
            size_t *offsets = realloc(kernel->offsets, room * sizeof(size_t));
            if (offsets != NULL)
                kernel->offsets = offsets;
            size_t *sizes = realloc(kernel->sizes, room * sizeof(size_t));
            if (sizes != NULL)
                kernel->sizes = sizes;
            if (offsets == NULL || sizes == NULL)
                return -1;
        }
        kernel->offsets[kernel->count] = offset;
        kernel->sizes[kernel->count] = nbytes;
        kernel->count++;
        if (offset > MOST_BYTES || nbytes > MOST_BYTES || offset + nbytes > MOST_BYTES ||
            kernel->count > MOST_PARAMETERS)
            return 0; /* the layout cannot be read */
        if (offset + nbytes > kernel->nbytes)
            kernel->nbytes = offset + nbytes;
    }
    kernel->readable = code == INVALID_VALUE;
    return 0;
}

/* The record of a kernel, made at its first node; NULL without memory. It is valid until the next call. */
static Kernel *kernel_of(Reader *reader, const Parameters *parameters) {
    for (size_t i = 0; i < reader->count; i++)
        if (reader->kernels[i].function == parameters->function && reader->kernels[i].kernel == parameters->kernel)
            return &reader->kernels[i];
    if (reader->count == reader->room) {
        size_t room = reader->room ? 2 * reader->room : 64;
        Kernel *kernels = realloc(reader->kernels, room * sizeof(Kernel));
        if (kernels == NULL)
            return NULL;
        reader->kernels = kernels;
        reader->room = room;
    }
    Kernel *kernel = &reader->kernels[reader->count];
    memset(kernel, 0, sizeof(Kernel));
    kernel->function = parameters->function;
    kernel->kernel = parameters->kernel;
    reader->count++;
    return kernel;
}

/* Copies a node's parameters to the block; returns their size, -1 if they cannot be read, -2 without memory. */
static Py_ssize_t read_block(Reader *reader, void *node, Kernel **kernel, Parameters *launch) {
    memset(launch, 0, sizeof(*launch));
    *kernel = NULL;
    if (reader->calls.parameters(node, launch) != 0)
        return -1;
    Kernel *found = *kernel = kernel_of(reader, launch);
    if (found == NULL)
        return -2;
    if (launch->extra != NULL) {
        /* Two pairs in either order: key 1 has the address of the parameters, key 2 the address of their size. */
        void *at = NULL;
        size_t nbytes = 0;
        for (int i = 0; i < 4; i += 2) {
            if (launch->extra[i] == (void *)1)
                at = launch->extra[i + 1];
            else if (launch->extra[i] == (void *)2)
                nbytes = *(size_t *)launch->extra[i + 1];
            else
                return -1;
        }
        if (at == NULL || nbytes > MOST_BYTES)
            return -1;
        memset(reader->block + nbytes, 0, 8);
        memcpy(reader->block, at, nbytes);
        return (Py_ssize_t)nbytes;
    }
    if (!found->asked && ask_layout(&reader->calls, found) < 0)
        return -2;
    found->asked = 1;
    /* For a handle that the driver does not know, there seem to be no parameters. */
    if (!found->readable || (launch->parameters != NULL) != (found->count != 0))
        return -1;
    memset(reader->block, 0, found->nbytes + 8);
    for (size_t i = 0; i < found->count; i++)
        memcpy(reader->block + found->offsets[i], launch->parameters[i], found->sizes[i]);
    return (Py_ssize_t)found->nbytes;
}

/* A list of (offset, word), NULL with an exception. */
static PyObject *hits(const unsigned char *block, Py_ssize_t nbytes, uint64_t low, uint64_t high) {
    PyObject *list = PyList_New(0);
    for (Py_ssize_t offset = 0; list != NULL && offset < nbytes; offset += 4) {
        uint64_t word;
        memcpy(&word, block + offset, 8);
        if (word < low || word >= high)
            continue;
        PyObject *hit = Py_BuildValue("(nK)", offset, (unsigned long long)word);
        if (hit == NULL || PyList_Append(list, hit) < 0)
            Py_CLEAR(list);
        Py_XDECREF(hit);
    }
    return list;
}

static int append(PyObject *list, PyObject *item) {
    int result = item == NULL ? -1 : PyList_Append(list, item);
    Py_XDECREF(item);
    return result;
}

static unsigned long long number(const void *handle) { return (unsigned long long)(uintptr_t)handle; }

static int search_node(Reader *reader, void *node, Py_ssize_t position, uint64_t low, uint64_t high, PyObject *nodes,
                       PyObject *found) {
    int type, code = reader->calls.type(node, &type);
    if (code != 0) {
        refuse("cuGraphNodeGetType", code);
        return -1;
    }
    if (append(nodes, Py_BuildValue("(Ki)", number(node), type)) < 0)
        return -1;
    if (type != KERNEL)
        return 0;
    Kernel *kernel;
    Parameters launch;
    Py_ssize_t nbytes = read_block(reader, node, &kernel, &launch);
    if (nbytes == -2) {
        PyErr_NoMemory();
        return -1;
    }
    unsigned long long function = kernel == NULL ? 0 : number(kernel->function);
    unsigned long long handle = kernel == NULL ? 0 : number(kernel->kernel);
    if (nbytes == -1)
        return append(found, Py_BuildValue("(nKKOOO)", position, function, handle, Py_None, Py_None, Py_None));
    PyObject *words = hits(reader->block, nbytes, low, high);
    if (words == NULL)
        return -1;
    if (PyList_Size(words) == 0) {
        Py_DECREF(words);
        return 0;
    }
    kernel->needed = 1;
    return append(found, Py_BuildValue("(nKKy#Ny#)", position, function, handle, reader->block, nbytes, words, &launch,
                                       (Py_ssize_t)sizeof launch));
}

/* A list of (offset, bytes), None if the layout is not known; NULL with an exception. */
static PyObject *layout_of(const Kernel *kernel) {
    if (!kernel->readable || !kernel->needed) {
        Py_INCREF(Py_None);
        return Py_None;
    }
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < kernel->count; i++)
        if (append(list, Py_BuildValue("(nn)", (Py_ssize_t)kernel->offsets[i], (Py_ssize_t)kernel->sizes[i])) < 0)
            Py_CLEAR(list);
    return list;
}

static PyObject *search(PyObject *self, PyObject *arguments) {
    const char *library;
    unsigned long long graph, low, high;
    if (!PyArg_ParseTuple(arguments, "sKKK", &library, &graph, &low, &high))
        return NULL;
    Reader *reader = calloc(1, sizeof(Reader));
    PyObject *nodes = PyList_New(0), *kernels = PyList_New(0), *found = PyList_New(0), *result = NULL;
    void **handles = NULL;
    size_t count = 0;
    int code;
    if (reader == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    if (nodes == NULL || kernels == NULL || found == NULL || open_calls(&reader->calls, library) < 0)
        goto done;
    code = reader->calls.nodes((void *)(uintptr_t)graph, NULL, &count);
    if (code == 0 && count != 0) {
        handles = malloc(count * sizeof(void *));
        if (handles == NULL) {
            PyErr_NoMemory();
            goto done;
        }
        code = reader->calls.nodes((void *)(uintptr_t)graph, handles, &count);
    }
    if (code != 0) {
        refuse("cuGraphGetNodes", code);
        goto done;
    }
    for (size_t i = 0; i < count; i++)
        if (search_node(reader, handles[i], (Py_ssize_t)i, low, high, nodes, found) < 0)
            goto done;
    for (size_t i = 0; i < reader->count; i++) {
        Kernel *kernel = &reader->kernels[i];
        PyObject *layout = layout_of(kernel);
        if (layout == NULL)
            goto done;
        if (append(kernels, Py_BuildValue("(KKN)", number(kernel->function), number(kernel->kernel), layout)) < 0)
            goto done;
    }
    result = Py_BuildValue("(OOO)", nodes, kernels, found);
done:
    Py_XDECREF(nodes);
    Py_XDECREF(kernels);
    Py_XDECREF(found);
    free(handles);
    if (reader != NULL) {
        for (size_t i = 0; i < reader->count; i++) {
            free(reader->kernels[i].offsets);
            free(reader->kernels[i].sizes);
        }
        free(reader->kernels);
        free(reader);
    }
    return result;
}

typedef int (*Setter)(void *exec, void *node, const void *parameters);

/* The driver's setter, remembered for a library: a process has one driver, tests have another. NULL with an exception. */
static Setter setter_of(const char *library) {
    static char found_in[4096];
    static Setter set;
    if (set != NULL && strcmp(found_in, library) == 0)
        return set;
    void *opened = dlopen(library, RTLD_NOW);
    set = NULL;
    if (opened == NULL)
        PyErr_Format(PyExc_OSError, "%s cannot be opened", library);
    else if (strlen(library) >= sizeof found_in)
        PyErr_SetString(PyExc_ValueError, "the library's name is too long");
    else if ((*(void **)&set = find(opened, "cuGraphExecKernelNodeSetParams_v2")) != NULL)
        strcpy(found_in, library);
    return set;
}

static PyObject *address_of(PyObject *self, PyObject *arguments) {
    const char *library, *name;
    if (!PyArg_ParseTuple(arguments, "ss", &library, &name))
        return NULL;
    void *opened = dlopen(library, RTLD_NOW);
    if (opened == NULL)
        return PyErr_Format(PyExc_OSError, "%s cannot be opened", library);
    void *found = find(opened, name);
    return found == NULL ? NULL : PyLong_FromUnsignedLongLong((unsigned long long)(uintptr_t)found);
}

static PyObject *set_kernels(PyObject *self, PyObject *arguments) {
    const char *library, *nodes;
    unsigned long long exec;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(arguments, "sKy#", &library, &exec, &nodes, &nbytes))
        return NULL;
    if (nbytes % (2 * sizeof(uint64_t)) != 0) {
        PyErr_SetString(PyExc_ValueError, "expected pairs of uint64");
        return NULL;
    }
    Setter set = setter_of(library);
    if (set == NULL)
        return NULL;
    for (Py_ssize_t position = 0; position < nbytes / (Py_ssize_t)(2 * sizeof(uint64_t)); position++) {
        uint64_t pair[2];
        memcpy(pair, nodes + position * (Py_ssize_t)sizeof pair, sizeof pair);
        int code = set((void *)(uintptr_t)exec, (void *)(uintptr_t)pair[0], (const void *)(uintptr_t)pair[1]);
        if (code != 0)
            return Py_BuildValue("(ni)", position, code);
    }
    Py_INCREF(Py_None);
    return Py_None;
}

static PyMethodDef methods[] = {
    {"set_kernels", set_kernels, METH_VARARGS, "Other parameters for kernels of an instantiated graph; see the source."},
    {"address_of", address_of, METH_VARARGS, "Where a call of the driver is; see the source."},
    {"search", search, METH_VARARGS, "Words in a range among the parameters of a graph's kernels; see the source."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "pygraph_trees.native._graph_nodes", "Many driver calls at once.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__graph_nodes(void) { return PyModule_Create(&definition); }
