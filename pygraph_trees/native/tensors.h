/* Types and functions that all C++ files share: lists of tensors, packed numbers, and whether a tensor is dead.

   "With an exception" in a comment: a function that returns this value has set a Python exception. */

#pragma once

#define PY_SSIZE_T_CLEAN
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <exception>

namespace pygraph {

/* The items of a list or a tuple. */
struct Items {
    PyObject **at = nullptr;
    Py_ssize_t count = 0;

    PyObject *get(uint64_t index) const {
        return index < static_cast<uint64_t>(count) ? at[index] : nullptr;
    }

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

/* Begins to load the fields of many tensors that are read next. Between two calls of a model they have left the caches.
   Each of three reads leads to the next, so reading one tensor after another would wait for memory three times each. */
template <typename ObjectAt> void load_ahead(Py_ssize_t count, ObjectAt object_at) {
    constexpr Py_ssize_t few = 8, at_once = 64;
    // Loads only the fields that are read, whatever the boundaries of cache lines: the start of each object, and the
    // last fields of a tensor. A wrong offset only costs time.
    const auto load = [](const void *begin, size_t offset) {
        __builtin_prefetch(static_cast<const char *>(begin) + offset);
    };
    PyObject *objects[at_once];
    const c10::TensorImpl *tensors[at_once];
    for (Py_ssize_t begin = 0; count >= few && begin < count; begin += at_once) {
        const Py_ssize_t end = std::min(count - begin, at_once);
        for (Py_ssize_t i = 0; i < end; i++) {
            objects[i] = object_at(begin + i);
            if (objects[i] != nullptr)
                load(objects[i], 0), load(objects[i], 31);
        }
        Py_ssize_t found = 0;
        for (Py_ssize_t i = 0; i < end; i++)
            if (objects[i] != nullptr && is_tensor(objects[i])) {
                tensors[found] = THPVariable_Unpack(objects[i]).unsafeGetTensorImpl();
                load(tensors[found], 8), load(tensors[found], 31);
                load(tensors[found], sizeof(c10::TensorImpl) - 32);
                load(tensors[found++], sizeof(c10::TensorImpl) - 1);
            }
        for (Py_ssize_t i = 0; i < found; i++) {
            const void *storage = tensors[i]->unsafe_storage().unsafeGetStorageImpl();
            load(storage, 8), load(storage, 31);
        }
    }
}

struct Place {
    uint64_t index, address;
};

/* Whether a tensor has only the given number of references in Python and none in C++, no autograd graph, and a storage
   that only the tensor and its Python object reference. */
inline bool is_dead(PyObject *object, Py_ssize_t references = 1) {
    if (Py_REFCNT(object) != references)
        return false;
    const at::Tensor *tensor = tensor_of(object);
    if (tensor == nullptr || tensor->use_count() != 1)
        return false;
    const c10::TensorImpl *impl = tensor->unsafeGetTensorImpl();
    if (impl->autograd_meta() != nullptr && tensor->grad_fn() != nullptr)
        return false;
    const c10::Storage &storage = impl->unsafe_storage(); // torch's other accessors are virtual functions
    return storage && storage.use_count() == 2;
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

/* The number of calls that asked for a fast replay in C++, and of those that were replayed so. */
PyObject *fast_path_counts();

/* Adds the types of all C++ files to the module; false with an exception. */
bool add_fast_path(PyObject *module);

} // namespace pygraph
