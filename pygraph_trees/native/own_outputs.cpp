/* A recording's outputs: those that it has cached, as long as the program leaves them as they were made. */

#include "fast_path.h"

namespace {

using namespace pygraph;

/* Whether a cached output has the memory and the layout with which it was made, and nothing that its last user left: a
   gradient, hooks, attributes, weak references. */
bool is_untouched(PyObject *output, const Replay::Made &made) {
    if (output != made.object)
        return false;
    const c10::TensorImpl *impl = THPVariable_Unpack(output).unsafeGetTensorImpl();
    if (impl->unsafe_storage().unsafeGetStorageImpl() != made.storage || impl->storage_offset() != made.offset ||
        impl->sizes() != at::IntArrayRef(made.sizes) || impl->strides() != at::IntArrayRef(made.strides))
        return false;
    if (impl->autograd_meta() != nullptr) {
        const auto *known = static_cast<const torch::autograd::AutogradMeta *>(impl->autograd_meta());
        if (known->grad_.defined() || known->requires_grad_ || known->retains_grad_ ||
            known->post_acc_grad_hooks_ != nullptr)
            return false;
    }
    PyObject **references = PyObject_GET_WEAKREFS_LISTPTR(output), **attributes = _PyObject_GetDictPtr(output);
    return *references == nullptr &&
           (attributes == nullptr || *attributes == nullptr || PyDict_GET_SIZE(*attributes) == 0);
}

} // namespace

void pygraph::note_made(Replay::State *replay) {
    replay->made.clear();
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(replay->cached); i++) {
        PyObject *output = PyList_GET_ITEM(replay->cached, i);
        Replay::Made &made = replay->made.emplace_back();
        if (!is_tensor(output))
            continue;
        const c10::TensorImpl *impl = THPVariable_Unpack(output).unsafeGetTensorImpl();
        made = {output, impl->unsafe_storage().unsafeGetStorageImpl(), impl->storage_offset(),
                at::DimVector(impl->sizes()), at::DimVector(impl->strides())};
    }
}

bool pygraph::are_untouched(const Replay::State *replay) {
    const Py_ssize_t count = PyList_GET_SIZE(replay->cached);
    if (static_cast<size_t>(count) != replay->made.size())
        return false;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *output = PyList_GET_ITEM(replay->cached, i);
        if (is_tensor(output) && !is_untouched(output, replay->made[static_cast<size_t>(i)]))
            return false;
    }
    return true;
}

bool pygraph::at_hand(const Replay::State *replay, PyObject *returned, std::vector<PyObject *> *outputs) {
    const Py_ssize_t count = PyList_GET_SIZE(replay->others);
    if (count == 0 || PyList_GET_SIZE(replay->cached) != count)
        return false;
    constexpr Py_ssize_t further = 32;
    outputs->resize(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i + further < count) {
            const PyObject *later = PyList_GET_ITEM(replay->cached, i + further);
            Known::ahead(later, 0), Known::ahead(later, 31);
        }
        PyObject *output = PyList_GET_ITEM(replay->cached, i);
        if (output == Py_None)
            output = PyList_GET_ITEM(replay->others, i);
        else if (!is_tensor(output) || reinterpret_cast<THPVariable *>(output)->backward_hooks != nullptr)
            return false; // upstream removes the hooks
        if (output == Py_NotImplemented)
            return false;
        (*outputs)[static_cast<size_t>(i)] = output;
    }
    for (size_t i = 0; i < replay->returned.size(); i++)
        if (replay->returned[i].output < outputs->size())
            (*outputs)[replay->returned[i].output] = PyTuple_GET_ITEM(returned, static_cast<Py_ssize_t>(i));
    return true;
}

Ref pygraph::outputs_of(PyObject *recording, Replay::State *replay, PyObject *returned) {
    Ref outputs(PyObject_CallOneArg(replay->make, recording));
    if (outputs)
        note_made(replay);
    for (size_t i = 0; outputs && i < replay->returned.size(); i++) {
        PyObject *input = PyTuple_GET_ITEM(returned, static_cast<Py_ssize_t>(i));
        if (PySequence_SetItem(outputs.get(), static_cast<Py_ssize_t>(replay->returned[i].output), input) < 0)
            return Ref();
    }
    return outputs;
}
