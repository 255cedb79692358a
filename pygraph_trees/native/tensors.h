/* Types and functions that all C++ files share: lists of tensors, packed numbers, and whether a tensor is dead.

   "With an exception" in a comment: a function that returns this value has set a Python exception. */

#pragma once

#define PY_SSIZE_T_CLEAN
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <vector>

namespace pygraph {

/* The items of a list or a tuple. */
struct Items {
    PyObject **at = nullptr;
    Py_ssize_t count = 0;

    /* False with an exception. */
    bool take(PyObject *sequence) {
        if (!PyList_Check(sequence) && !PyTuple_Check(sequence)) {
            PyErr_Format(PyExc_TypeError, "expected a list or a tuple, got %s", Py_TYPE(sequence)->tp_name);
            return false;
        }
        at = PySequence_Fast_ITEMS(sequence);
        count = PySequence_Fast_GET_SIZE(sequence);
        return true;
    }
};

/* Records of numbers packed as bytes. */
template <typename Record> struct Packed {
    const char *bytes = nullptr;
    Py_ssize_t count = 0;

    /* False with an exception. */
    bool take(PyObject *object) {
        if (!PyBytes_Check(object) || PyBytes_GET_SIZE(object) % sizeof(Record) != 0) {
            PyErr_SetString(PyExc_TypeError, "expected numbers packed in bytes");
            return false;
        }
        bytes = PyBytes_AS_STRING(object);
        count = PyBytes_GET_SIZE(object) / static_cast<Py_ssize_t>(sizeof(Record));
        return true;
    }

    Record operator[](Py_ssize_t i) const {
        Record record;
        std::memcpy(&record, bytes + i * static_cast<Py_ssize_t>(sizeof record), sizeof record);
        return record;
    }
};

/* Appends numbers that are packed as bytes; false with an exception. */
inline bool unpack(PyObject *bytes, std::vector<uint64_t> *numbers) {
    Packed<uint64_t> packed;
    if (!packed.take(bytes))
        return false;
    for (Py_ssize_t i = 0; i < packed.count; i++)
        numbers->push_back(packed[i]);
    return true;
}

inline bool is_tensor(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object), *tensor = reinterpret_cast<PyTypeObject *>(THPVariableClass);
    return type == tensor || PyType_IsSubtype(type, tensor);
}

/* The tensor of a Python object; NULL with an exception. */
inline const at::Tensor *tensor_of(PyObject *object) {
    if (!is_tensor(object)) {
        PyErr_Format(PyExc_TypeError, "expected a tensor, got %s", Py_TYPE(object)->tp_name);
        return nullptr;
    }
    return &THPVariable_Unpack(object);
}

/* Whether a tensor reads otherwise than its memory: as a negated or conjugate view. Nothing guards tangents against it. */
inline bool is_lazy(const at::Tensor &tensor) { return tensor.is_neg() || tensor.is_conj(); }

/* Where a tensor's object, implementation and storage were at the last call, and the storage's Python object. */
struct Known {
    const void *object = nullptr, *tensor = nullptr, *storage = nullptr, *own = nullptr;

    /* Loads the fields that find reads: the first and last byte of each, whatever the boundaries of cache lines. It is
       always inlined, since the compiler takes a function that only prefetches for one that does nothing. */
    __attribute__((always_inline)) void load() const {
        ahead(object, 0), ahead(object, 31);
        ahead(tensor, 8), ahead(tensor, 31);
        ahead(storage, 8);
        ahead(tensor, sizeof(c10::TensorImpl) - 32), ahead(tensor, sizeof(c10::TensorImpl) - 1);
        ahead(storage, 31), ahead(storage, 60);
    }

    /* Loads the fields that is_dead reads. The last one of each Python object is the list of its weak references. */
    __attribute__((always_inline)) void load_references() const {
        ahead(object, 0), ahead(object, 47);
        ahead(tensor, 8), ahead(tensor, 31);
        ahead(storage, 8);
        load_own();
    }

    /* Loads what tells whether only its storage is held. */
    __attribute__((always_inline)) void load_own() const { ahead(storage, 71), ahead(own, 0), ahead(own, 31); }

    void note(PyObject *found) {
        const c10::TensorImpl *impl = THPVariable_Unpack(found).unsafeGetTensorImpl();
        c10::StorageImpl *held = impl->unsafe_storage().unsafeGetStorageImpl();
        if (object != found || tensor != impl || storage != held)
            *this = Known{found, impl, held, held == nullptr ? nullptr : held->pyobj_slot()->load_pyobj()};
    }

    __attribute__((always_inline)) static void ahead(const void *begin, size_t offset) {
        __builtin_prefetch(static_cast<const char *>(begin) + offset);
    }
};

struct Place {
    uint64_t index, address;
};

/* Whether the program has weak references to a tensor or a storage, through which it would get the object again. */
inline bool has_weak_references(PyObject *object) {
    return Py_TYPE(object)->tp_weaklistoffset != 0 && *PyObject_GET_WEAKREFS_LISTPTR(object) != nullptr;
}

/* Whether a tensor has only the given number of references in Python and none in C++, no autograd graph, and a storage
   that only the tensor and its Python object reference, which nothing else references. Weak references count, too. */
inline bool is_dead(PyObject *object, Py_ssize_t references = 1) {
    if (Py_REFCNT(object) != references || has_weak_references(object))
        return false;
    const at::Tensor *tensor = tensor_of(object);
    if (tensor == nullptr || tensor->use_count() != 1)
        return false;
    const c10::TensorImpl *impl = tensor->unsafeGetTensorImpl();
    if (impl->autograd_meta() != nullptr && tensor->grad_fn() != nullptr)
        return false;
    const c10::Storage &storage = impl->unsafe_storage(); // torch's other accessors are virtual functions
    if (!storage || storage.use_count() != 2)
        return false;
    PyObject *own = storage.unsafeGetStorageImpl()->pyobj_slot()->load_pyobj();
    return own != nullptr && Py_REFCNT(own) == 1 && !has_weak_references(own);
}

/* Calls a function and turns C++ exceptions into Python's. */
template <typename Function> PyObject *translated(const Function &function) {
    try {
        return function();
    } catch (const c10::Error &error) { // the text that torch's own methods give
        PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

} // namespace pygraph
