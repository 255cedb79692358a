/* What the parts in C++ share: lists of tensors, packed numbers, and what is read of a tensor. */

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

/* Records of numbers that are packed in bytes. */
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

/* The tensor in a Python object; NULL with an exception. */
inline const at::Tensor *tensor_of(PyObject *object) {
    if (!is_tensor(object)) {
        PyErr_Format(PyExc_TypeError, "expected a tensor, got %s", Py_TYPE(object)->tp_name);
        return nullptr;
    }
    return &THPVariable_Unpack(object);
}

/* Begins to load what is read of many tensors. Between two calls of a model they have left the caches, and what is read
   of one leads to what is read next: done for one after another, each of three steps would wait for memory. */
template <typename ObjectAt> void load_ahead(Py_ssize_t count, ObjectAt object_at) {
    constexpr Py_ssize_t few = 8, at_once = 64;
    // Of each only what is read, wherever the lines of the cache are cut: the start, and of a tensor's fields the last
    // ones. A wrong guess would cost time alone.
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

/* Whether one reference of the list (or so many as are given) is all there is: no other in Python or C++, no graph of
   autograd, and of its storage the two that the tensor and its Python object hold. */
inline bool is_dead(PyObject *object, Py_ssize_t references = 1) {
    if (Py_REFCNT(object) != references)
        return false;
    const at::Tensor *tensor = tensor_of(object);
    if (tensor == nullptr || tensor->use_count() != 1)
        return false;
    const c10::TensorImpl *impl = tensor->unsafeGetTensorImpl();
    if (impl->autograd_meta() != nullptr && tensor->grad_fn() != nullptr)
        return false;
    const c10::Storage &storage = impl->unsafe_storage(); // those that torch has are virtual functions
    return storage && storage.use_count() == 2;
}

/* What a function gives, with exceptions of C++ turned into Python's. */
template <typename Function> PyObject *translated(const Function &function) {
    try {
        return function();
    } catch (const c10::Error &error) { // as torch's own methods put it
        PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

/* How many calls were asked to be replayed on the fast path in C++, and how many were. */
PyObject *fast_path_counts();

/* Adds the types of the files *.cpp to the module; false with an exception. */
bool add_fast_path(PyObject *module);

} // namespace pygraph
