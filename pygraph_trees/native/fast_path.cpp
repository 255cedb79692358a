/* The module pygraph_trees.native._fast_path, and its only unit of compilation. It includes the other C++ files, since
   torch's headers take nearly all of the compiler's time and are then read only once.

   Must only be used with the torch for which it was compiled: see native/location.py. */

#include "addresses.cpp"
#include "call.cpp"
#include "candidates.cpp"
#include "deaths.cpp"
#include "entry.cpp"
#include "gradients.cpp"
#include "own_memory.cpp"
#include "own_outputs.cpp"
#include "replay.cpp"
#include "results.cpp"
#include "streams.cpp"
#include "staged_values.cpp"
#include "tree.cpp"

pygraph::Names pygraph::names;
pygraph::Types pygraph::types;

namespace {

using namespace pygraph;

PyObject *counts(PyObject *, PyObject *) {
    return Py_BuildValue("KKK", counted.asked, counted.fast, counted.in_python);
}

PyObject *note_stream(PyObject *, PyObject *object) {
    return translated([&]() -> PyObject * {
        const at::Tensor *tensor = tensor_of(object);
        if (tensor == nullptr)
            return nullptr;
        pygraph::note_stream(*tensor);
        Py_RETURN_NONE;
    });
}

PyObject *number_of_thread(PyObject *, PyObject *) {
    return PyLong_FromUnsignedLongLong(thread_of_trees());
}

/* The only item of the list tells whether its owner is counted among those that need the collector off. */
PyObject *switch_collector(PyObject *list, bool is_off) {
    if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) != 1)
        return PyErr_Format(PyExc_TypeError, "expected a list of one item");
    const int before = PyObject_IsTrue(PyList_GET_ITEM(list, 0));
    if (before < 0 || PyList_SetItem(list, 0, PyBool_FromLong(is_off)) < 0)
        return nullptr;
    if (is_off && before == 0)
        CollectorOff::enter();
    else if (!is_off && before == 1)
        CollectorOff::leave();
    Py_RETURN_NONE;
}

PyObject *collector_off(PyObject *, PyObject *list) { return switch_collector(list, true); }

PyObject *collector_on(PyObject *, PyObject *list) { return switch_collector(list, false); }

PyObject *collector_forked(PyObject *, PyObject *) {
    CollectorOff::forked();
    Py_RETURN_NONE;
}

PyObject *exchange_memory(PyObject *, PyObject *arguments) {
    PyObject *one, *other;
    if (!PyArg_ParseTuple(arguments, "OO", &one, &other))
        return nullptr;
    return translated([&]() -> PyObject * {
        const at::Tensor *first = tensor_of(one), *second = first == nullptr ? nullptr : tensor_of(other);
        if (second == nullptr)
            return nullptr;
        c10::StorageImpl *to = first->storage().unsafeGetStorageImpl(), *from = second->storage().unsafeGetStorageImpl();
        if (to->device() != from->device() || to->nbytes() != from->nbytes())
            return PyErr_Format(PyExc_ValueError, "expected storages of the same size on the same device");
        from->set_data_ptr_noswap(to->set_data_ptr(std::move(from->mutable_data_ptr())));
        Py_RETURN_NONE;
    });
}

PyObject *make_resizable(PyObject *, PyObject *object) {
    if (!THPStorage_Check(object))
        return PyErr_Format(PyExc_TypeError, "expected a storage, got %s", Py_TYPE(object)->tp_name);
    return translated([&]() -> PyObject * {
        c10::StorageImpl *storage = THPStorage_Unpack(object).unsafeGetStorageImpl();
        storage->set_allocator(c10::GetAllocator(storage->device_type()));
        storage->set_resizable(true);
        Py_RETURN_NONE;
    });
}

PyMethodDef methods[] = {
    {"collector_forked", collector_forked, METH_NOARGS, "Turns it on after a fork, if it was off for any."},
    {"collector_off", collector_off, METH_O, "Turns the collector off, and sets the list's only item."},
    {"collector_on", collector_on, METH_O, "Turns it on again, unless it is off for others, if the item was set."},
    {"counts", counts, METH_NOARGS, "How many calls asked for a fast replay, got one, and got one that Python made."},
    {"exchange_memory", exchange_memory, METH_VARARGS, "Exchanges the memory of the storages of two tensors."},
    {"make_resizable", make_resizable, METH_O, "Lets a storage that does not own its memory get other memory."},
    {"note_stream", note_stream, METH_O, "Notes that another stream uses a tensor's memory."},
    {"thread_of_trees", number_of_thread, METH_NOARGS, "The number of the thread whose trees a call uses."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "pygraph_trees.native._fast_path", "The fast path.", 0, methods, nullptr, nullptr, nullptr,
    nullptr,
};

/* Interns the names, and adds those of torch to the module as `NAMES`, with their owners; false with an exception. */
bool add_names(PyObject *module) {
    Ref list(PyList_New(0));
#define ADD(owner, name)                                                                                               \
    if (Ref full(list ? PyUnicode_FromString(#owner "." #name) : nullptr);                                             \
        !full || (names.name = PyUnicode_InternFromString(#name)) == nullptr ||                                        \
        PyList_Append(list.get(), full.get()) < 0)                                                                     \
        return false;
    TORCH_NAMES(ADD)
#undef ADD
    names.fast_call = PyUnicode_InternFromString("fast_call");
    names.native = PyUnicode_InternFromString("native");
    return names.fast_call != nullptr && names.native != nullptr && PyModule_AddObjectRef(module, "NAMES", list.get()) == 0;
}

bool add_types(PyObject *module) {
    PyTypeObject *other = nullptr;
    const std::pair<PyType_Spec *, PyTypeObject **> all[] = {
        {&replay_spec, &other},
        {&entry_spec, &other},
        {&call_spec, &other},
        {&addresses_spec, &other},
        {&counter_spec, &other},
        {&candidate_filter_spec, &other},
        {&own_memory_spec, &other},
        {&candidates_spec, &types.candidates},
        {&tree_state_spec, &types.tree_state},
        {&function_state_spec, &types.function_state},
        {&replayer_spec, &types.replayer},
    };
    for (const auto &[spec, type] : all) {
        *type = reinterpret_cast<PyTypeObject *>(PyType_FromSpec(spec)); // never freed, since the module is not either
        if (*type == nullptr || PyModule_AddType(module, *type) < 0)
            return false;
    }
    return true;
}

} // namespace

PyMODINIT_FUNC PyInit__fast_path(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module != nullptr && !(add_names(module) && add_types(module)))
        Py_CLEAR(module);
    return module;
}
