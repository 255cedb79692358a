/* The outputs of a steady replay, see steady_entry.cpp, and pygraph_trees._tensors.AsMade: whether somebody changed them.

   AsMade(tensors)   of a list of tensors and None, which may be filled later
       .note()       remembers what they are like: sizes, strides, address, type, and that they ask for no gradient
       .changed()    the number of the first that is like that no longer; None where there is none

   A recording gives the same tensors at each replay. Who had one may have seen it otherwise in place, or had it ask for a
   gradient. */

#include "steady.h"

using namespace pygraph;

struct AsMade {
    PyObject_HEAD
    struct Facts {
        const void *tensor = nullptr, *storage = nullptr, *data = nullptr; // NULL where there was none
        c10::DispatchKeySet keys;
        caffe2::TypeMeta dtype;
        int64_t offset = 0;
        size_t begin = 0, dims = 0; // of sizes, and behind them strides
    };
    struct State {
        PyObject *tensors = nullptr; // a list
        std::vector<Facts> facts;
        std::vector<int64_t> numbers;
    } *state;
};

namespace {

const void *data_of(const c10::StorageImpl *storage) {
    return storage == nullptr ? nullptr : const_cast<c10::StorageImpl *>(storage)->_mutable_data_ptr_no_checks().get();
}

void note(AsMade::State *state) {
    state->facts.clear();
    state->numbers.clear();
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(state->tensors); i++) {
        PyObject *object = PyList_GET_ITEM(state->tensors, i);
        AsMade::Facts facts;
        if (is_tensor(object)) {
            const c10::TensorImpl *impl = THPVariable_Unpack(object).unsafeGetTensorImpl();
            const c10::StorageImpl *storage = impl->unsafe_storage().unsafeGetStorageImpl();
            const size_t begin = state->numbers.size();
            state->numbers.insert(state->numbers.end(), impl->sizes().begin(), impl->sizes().end());
            state->numbers.insert(state->numbers.end(), impl->strides().begin(), impl->strides().end());
            facts = {impl, storage, data_of(storage), impl->key_set(), impl->dtype(), impl->storage_offset(), begin,
                     impl->sizes().size()};
        }
        state->facts.push_back(facts);
    }
}

bool is_unchanged(const AsMade::State *state, size_t i, PyObject *object) {
    const AsMade::Facts &facts = state->facts[i];
    const c10::TensorImpl *impl = THPVariable_Unpack(object).unsafeGetTensorImpl();
    const c10::StorageImpl *storage = impl->unsafe_storage().unsafeGetStorageImpl();
    const int64_t *sizes = state->numbers.data() + facts.begin, *strides = sizes + facts.dims;
    return impl->autograd_meta() == nullptr && storage == facts.storage && data_of(storage) == facts.data &&
           impl->key_set() == facts.keys && impl->dtype() == facts.dtype && impl->storage_offset() == facts.offset &&
           impl->sizes() == c10::IntArrayRef(sizes, facts.dims) &&
           impl->strides() == c10::IntArrayRef(strides, facts.dims); // names, conjugation and the like are keys
}

/* Loads what is read of a tensor. */
void load(const AsMade::Facts &facts) {
    for (size_t offset = 8; offset < sizeof(c10::TensorImpl); offset += 64)
        Known::ahead(facts.tensor, offset);
    Known::ahead(facts.tensor, sizeof(c10::TensorImpl) - 1);
    Known::ahead(facts.storage, 16);
}

AsMade::State *state_of(PyObject *self) { return reinterpret_cast<AsMade *>(self)->state; }

PyObject *as_made_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static const char *known[] = {"tensors", nullptr};
    PyObject *tensors;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O!", const_cast<char **>(known), &PyList_Type, &tensors))
        return nullptr;
    Ref made(type->tp_alloc(type, 0));
    if (made) {
        reinterpret_cast<AsMade *>(made.get())->state = new AsMade::State;
        state_of(made.get())->tensors = Py_NewRef(tensors);
        note(state_of(made.get()));
    }
    return made.release();
}

int as_made_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    if (state_of(self) != nullptr)
        Py_VISIT(state_of(self)->tensors);
    return 0;
}

int as_made_clear(PyObject *self) {
    if (state_of(self) != nullptr)
        Py_CLEAR(state_of(self)->tensors);
    return 0;
}

void as_made_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    as_made_clear(self);
    delete state_of(self);
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject *as_made_note(PyObject *self, PyObject *) {
    return translated([&]() -> PyObject * {
        if (state_of(self)->tensors != nullptr)
            note(state_of(self));
        Py_RETURN_NONE;
    });
}

PyObject *as_made_changed(PyObject *self, PyObject *) {
    return translated([&]() -> PyObject * {
        const AsMade::State *state = state_of(self);
        const Py_ssize_t count = state->tensors == nullptr ? 0 : PyList_GET_SIZE(state->tensors);
        for (Py_ssize_t i = 0; i < std::min(count, static_cast<Py_ssize_t>(state->facts.size())); i++) {
            PyObject *object = PyList_GET_ITEM(state->tensors, i);
            if (is_tensor(object) && !is_unchanged(state, static_cast<size_t>(i), object))
                return PyLong_FromSsize_t(i);
        }
        Py_RETURN_NONE;
    });
}

PyMethodDef methods[] = {
    {"note", as_made_note, METH_NOARGS, "Remembers what the tensors are like."},
    {"changed", as_made_changed, METH_NOARGS, "The number of the first that is like that no longer; None without one."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char *>("What tensors were like when they were made; see the source.")},
    {Py_tp_new, reinterpret_cast<void *>(translate<as_made_new>)},
    {Py_tp_dealloc, reinterpret_cast<void *>(as_made_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void *>(as_made_traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(as_made_clear)},
    {Py_tp_methods, methods},
    {0, nullptr},
};

} // namespace

PyType_Spec pygraph::as_made_spec = {
    "pygraph_trees._tensors.AsMade", sizeof(AsMade), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};

bool pygraph::is_as_made(PyObject *object) { return Py_TYPE(object)->tp_dealloc == as_made_dealloc; }

bool pygraph::at_hand(const Replay::State *replay, PyObject *returned, std::vector<PyObject *> *outputs) {
    const Py_ssize_t count = PyList_GET_SIZE(replay->others);
    if (count == 0 || PyList_GET_SIZE(replay->cached) != count)
        return false;
    const AsMade::State *made = replay->made == nullptr ? nullptr : state_of(replay->made);
    if (made != nullptr && made->facts.size() != static_cast<size_t>(count))
        return false;
    constexpr Py_ssize_t further = 16;
    outputs->resize(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i + further < count) {
            const PyObject *later = PyList_GET_ITEM(replay->cached, i + further);
            Known::ahead(later, 0), Known::ahead(later, 31);
            if (made != nullptr)
                load(made->facts[static_cast<size_t>(i + further)]);
        }
        PyObject *output = PyList_GET_ITEM(replay->cached, i);
        if (output == Py_None)
            output = PyList_GET_ITEM(replay->others, i);
        else if (!is_tensor(output) || reinterpret_cast<THPVariable *>(output)->backward_hooks != nullptr)
            return false; // torch takes hooks away
        else if (made != nullptr && !is_unchanged(made, static_cast<size_t>(i), output))
            return false;
        if (output == Py_NotImplemented)
            return false;
        (*outputs)[static_cast<size_t>(i)] = output;
    }
    for (size_t i = 0; i < replay->returned.size(); i++)
        if (replay->returned[i].output < outputs->size())
            (*outputs)[replay->returned[i].output] = PyTuple_GET_ITEM(returned, static_cast<Py_ssize_t>(i));
    return true;
}

Ref pygraph::outputs_of(PyObject *recording, const Replay::State *replay, PyObject *returned) {
    Ref outputs(PyObject_CallMethodNoArgs(recording, the.recording__own_outputs.name));
    for (size_t i = 0; outputs && i < replay->returned.size(); i++) {
        PyObject *input = PyTuple_GET_ITEM(returned, static_cast<Py_ssize_t>(i));
        if (PySequence_SetItem(outputs.get(), static_cast<Py_ssize_t>(replay->returned[i].output), input) < 0)
            return Ref();
    }
    return outputs;
}
