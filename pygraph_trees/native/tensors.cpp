/* Questions about many tensors at once, and the module pygraph_trees.native._fast_path itself.

   native/tensors.py calls addresses, first_fit, count_dead, release, permute and outputs; native/DESIGN.md describes
   them. Tensors are in a list or a tuple, and indices and addresses are packed as uint64. An index out of range raises
   IndexError, an item that is no tensor TypeError. Must only be used with the torch for which it was compiled: see
   native/location.py. */

#include "tensors.h"

#include <bitset>
#include <vector>

namespace {

using namespace pygraph;

/* The address of the tensor at an index; false with an exception. */
bool address_at(const Items &tensors, uint64_t index, uint64_t *address) {
    if (index >= static_cast<uint64_t>(tensors.count)) {
        PyErr_SetString(PyExc_IndexError, "index out of range");
        return false;
    }
    const at::Tensor *tensor = tensor_of(tensors.at[index]);
    if (tensor == nullptr)
        return false;
    *address = reinterpret_cast<uintptr_t>(tensor->data_ptr());
    return true;
}

/* Whether the tensors are at these addresses; -1 with an exception. */
int lie_at(const Packed<Place> &places, const Items &tensors) {
    load_ahead(places.count, [&](Py_ssize_t i) { return tensors.get(places[i].index); });
    for (Py_ssize_t i = 0; i < places.count; i++) {
        uint64_t address = 0;
        if (!address_at(tensors, places[i].index, &address))
            return -1;
        if (address != places[i].address)
            return 0;
    }
    return 1;
}

PyObject *addresses(PyObject *const *arguments) {
    Packed<Place> places;
    Packed<uint64_t> indices;
    Items tensors;
    if (!places.take(arguments[0]) || !indices.take(arguments[1]) || !tensors.take(arguments[2]))
        return nullptr;
    const int stayed = lie_at(places, tensors);
    if (stayed < 0)
        return nullptr;
    if (!stayed)
        Py_RETURN_NONE;
    std::vector<uint64_t> found(static_cast<size_t>(indices.count)); // reading addresses may throw
    for (Py_ssize_t i = 0; i < indices.count; i++)
        if (!address_at(tensors, indices[i], &found[static_cast<size_t>(i)]))
            return nullptr;
    PyObject *list = PyList_New(indices.count);
    for (Py_ssize_t i = 0; list != nullptr && i < indices.count; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(found[static_cast<size_t>(i)]);
        if (number == nullptr)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, number);
    }
    return list;
}

/* Outputs, by their indices in a list that may have become shorter. */
struct Group {
    PyObject *list = nullptr;
    Packed<uint64_t> indices;

    /* False with an exception. */
    bool take(PyObject *group) {
        if (!PyTuple_Check(group) || PyTuple_GET_SIZE(group) != 2 || !PyList_Check(PyTuple_GET_ITEM(group, 0))) {
            PyErr_SetString(PyExc_TypeError, "expected pairs of a list and indices");
            return false;
        }
        list = PyTuple_GET_ITEM(group, 0);
        return indices.take(PyTuple_GET_ITEM(group, 1));
    }

    /* NULL if the output is gone. */
    PyObject *get(Py_ssize_t number) const {
        const uint64_t index = indices[number];
        PyObject *output = index < static_cast<uint64_t>(PyList_GET_SIZE(list))
                               ? PyList_GET_ITEM(list, static_cast<Py_ssize_t>(index))
                               : Py_None;
        return output == Py_None ? nullptr : output;
    }
};

PyObject *count_dead(PyObject *const *arguments) {
    Items groups;
    Py_ssize_t begin = PyLong_AsSsize_t(arguments[1]);
    if (PyErr_Occurred() || !groups.take(arguments[0]))
        return nullptr;
    Py_ssize_t before = 0; // outputs of earlier groups
    for (Py_ssize_t g = 0; g < groups.count; g++) {
        Group group;
        if (!group.take(groups.at[g]))
            return nullptr;
        const Py_ssize_t first = std::max<Py_ssize_t>(begin - before, 0);
        load_ahead(group.indices.count - first, [&](Py_ssize_t i) { return group.get(first + i); });
        for (Py_ssize_t i = first; i < group.indices.count; i++) {
            PyObject *output = group.get(i);
            if (output == nullptr || !is_dead(output))
                return PyErr_Occurred() ? nullptr : PyLong_FromSsize_t(before + i);
        }
        before += group.indices.count;
    }
    return PyLong_FromSsize_t(std::max(before, begin));
}

/* Whether a choice may fit; -1 with an exception. */
int may_fit(PyObject *choice, const Items &tensors) {
    if (!PyTuple_Check(choice) || PyTuple_GET_SIZE(choice) != 2) {
        PyErr_SetString(PyExc_TypeError, "expected pairs of places and groups");
        return -1;
    }
    Packed<Place> places;
    Items groups;
    if (!places.take(PyTuple_GET_ITEM(choice, 0)) || !groups.take(PyTuple_GET_ITEM(choice, 1)))
        return -1;
    for (Py_ssize_t g = 0; g < groups.count; g++) {
        Group group;
        if (!group.take(groups.at[g]))
            return -1;
        for (Py_ssize_t i = 0; i < group.indices.count; i++) {
            PyObject *output = group.get(i);
            if (output != nullptr && Py_REFCNT(output) != 1)
                return 0;
        }
    }
    return lie_at(places, tensors);
}

PyObject *first_fit(PyObject *const *arguments) {
    Items choices, tensors;
    Py_ssize_t position = PyLong_AsSsize_t(arguments[1]);
    if (PyErr_Occurred() || !choices.take(arguments[0]) || !tensors.take(arguments[2]))
        return nullptr;
    for (position = position < 0 ? 0 : position; position < choices.count; position++) {
        const int fits = may_fit(choices.at[position], tensors);
        if (fits < 0)
            return nullptr;
        if (fits)
            break;
    }
    return PyLong_FromSsize_t(position);
}

PyObject *release(PyObject *const *arguments) {
    Packed<uint64_t> indices;
    if (!indices.take(arguments[0]))
        return nullptr;
    if (!PyList_Check(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "expected a list");
        return nullptr;
    }
    for (Py_ssize_t i = 0; i < indices.count; i++) {
        // Releasing an item may run other code, so the list is read again each time.
        Py_INCREF(Py_None);
        if (PyList_SetItem(arguments[1], static_cast<Py_ssize_t>(indices[i]), Py_None) < 0)
            return nullptr;
    }
    Py_RETURN_NONE;
}

PyObject *permute(PyObject *const *arguments) {
    Packed<uint64_t> order;
    if (!order.take(arguments[0]))
        return nullptr;
    PyObject *list = arguments[1];
    if (!PyList_Check(list) || PyList_GET_SIZE(list) != order.count) {
        PyErr_SetString(PyExc_ValueError, "expected a list with an item for each index");
        return nullptr;
    }
    const size_t count = static_cast<size_t>(order.count);
    constexpr size_t most = 512;
    PyObject *few[most];
    std::bitset<most> taken_of_few;
    std::vector<PyObject *> many(count > most ? count : 0);
    std::vector<bool> taken_of_many(many.size());
    PyObject **items = count > most ? many.data() : few;
    const auto is_taken = [&](uint64_t i) { return count > most ? bool(taken_of_many[i]) : bool(taken_of_few[i]); };
    for (size_t k = 0; k < count; k++) {
        const uint64_t i = order[static_cast<Py_ssize_t>(k)];
        if (i >= count || is_taken(i)) {
            PyErr_SetString(PyExc_ValueError, "expected each index of the list once");
            return nullptr;
        }
        if (count > most)
            taken_of_many[i] = true;
        else
            taken_of_few[i] = true;
        items[k] = PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i));
    }
    for (size_t k = 0; k < count; k++) // the list holds the same items, so no reference changes
        PyList_SET_ITEM(list, static_cast<Py_ssize_t>(k), items[k]);
    Py_RETURN_NONE;
}

PyObject *outputs(PyObject *const *arguments) {
    Items cached, others;
    if (!cached.take(arguments[0]) || !others.take(arguments[1]))
        return nullptr;
    PyObject *found = PyList_New(others.count); // may collect garbage, cached outputs included
    if (found == nullptr)
        return nullptr;
    if (!cached.take(arguments[0]) || !others.take(arguments[1]) || cached.count != PyList_GET_SIZE(found) ||
        others.count != cached.count) {
        Py_DECREF(found);
        if (PyErr_Occurred())
            return nullptr;
        Py_RETURN_NONE;
    }
    constexpr Py_ssize_t ahead = 16;
    for (Py_ssize_t i = 0; i < cached.count; i++) {
        if (i + ahead < cached.count) // loads the reference count, as load_ahead does
            __builtin_prefetch(cached.at[i + ahead]);
        PyObject *item = cached.at[i];
        if (item == Py_None) {
            item = others.at[i];
        } else {
            if (tensor_of(item) == nullptr) {
                Py_DECREF(found);
                return nullptr;
            }
            if (reinterpret_cast<THPVariable *>(item)->backward_hooks != nullptr)
                item = Py_NotImplemented;
        }
        if (item == Py_NotImplemented) {
            Py_DECREF(found);
            Py_RETURN_NONE;
        }
        Py_INCREF(item);
        PyList_SET_ITEM(found, i, item);
    }
    return found;
}

PyObject *counts(PyObject *const *) { return fast_path_counts(); }

PyObject *thread_id(PyObject *const *) { return PyLong_FromUnsignedLongLong(PyThreadState_GetID(PyThreadState_Get())); }

/* Calls one of the functions above with exactly `count` arguments. */
template <PyObject *(*function)(PyObject *const *), Py_ssize_t count>
PyObject *call(PyObject *, PyObject *const *arguments, Py_ssize_t given) {
    if (given != count) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", count, given);
        return nullptr;
    }
    return translated([&] { return function(arguments); });
}

#define METHOD(name, count, doc)                                                                                       \
    {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(call<name, count>)), METH_FASTCALL, doc}

PyMethodDef methods[] = {
    METHOD(addresses, 3, "Where tensors lie, if others lie where they are expected; see the source."),
    METHOD(first_fit, 3, "The first of several choices that may fit; see the source."),
    METHOD(count_dead, 2, "The first tensor that may be held by somebody else; see the source."),
    METHOD(release, 2, "Puts None in some places of a list; see the source."),
    METHOD(permute, 2, "Puts the items of a list into another order; see the source."),
    METHOD(counts, 0, "How many calls were asked to be replayed on the fast path, and how many were."),
    METHOD(thread_id, 0, "Tells this thread from all others, also from those that have ended."),
    METHOD(outputs, 2, "Cached tensors and what stands in for the others; see the source."),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "pygraph_trees.native._fast_path", "Questions about many tensors at once.", 0, methods,
    nullptr, nullptr, nullptr, nullptr,
};

} // namespace

PyMODINIT_FUNC PyInit__fast_path(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module != nullptr && !pygraph::add_fast_path(module))
        Py_CLEAR(module);
    return module;
}
