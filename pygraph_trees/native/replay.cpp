/* One recording's part in a fast replay: pygraph_trees.native._fast_path.Replay.

   It holds the required addresses of static inputs, the inputs whose addresses the graph is given, the outputs that must
   be dead, and what a call returns. Python decides about unknown addresses, and about outputs that do not seem dead.
   trees/functions/fast_path.py makes it. */

#include "fast_path.h"

#include <unordered_set>

using namespace pygraph;

namespace {

/* Takes (input, output, block or None, layout or None): see trees/functions/fast_path.py; false with an exception. */
bool take_returned(Replay::State *state, PyObject *returned, PyObject *others) {
    const OwnMemory::State *own = own_memory_in(state->own);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(returned); i++) {
        unsigned long long input = 0, output = 0;
        PyObject *number, *layout, *sizes, *strides, *dtype;
        long long offset = 0;
        Replay::Returned &made = state->returned.emplace_back();
        if (!is_tuple(PyTuple_GET_ITEM(returned, i)) ||
            !PyArg_ParseTuple(PyTuple_GET_ITEM(returned, i), "KKOO", &input, &output, &number, &layout))
            return false;
        const bool is_own = number != Py_None;
        const size_t block = is_own ? PyLong_AsSize_t(number) : 0;
        if (PyErr_Occurred())
            return false;
        if (output >= static_cast<uint64_t>(PyList_GET_SIZE(others)) || (is_own && (own == nullptr || block >= own->blocks.size()))) {
            PyErr_SetString(PyExc_ValueError, "expected an output and a block that exist");
            return false;
        }
        made.input = input;
        made.output = output;
        made.is_own = is_own;
        made.is_whole = !is_own && layout == Py_None;
        if (layout != Py_None && (!is_tuple(layout) || !PyArg_ParseTuple(layout, "OOLO", &sizes, &strides, &offset, &dtype) ||
                                  !take_strided(sizes, strides, offset, dtype, &made.layout)))
            return false;
        if (is_own) {
            const OwnMemory::Block &lent = own->blocks[block];
            if (layout == Py_None)
                made.layout = lent.layout;
            made.lends = lent.lends && made.layout.sizes == lent.layout.sizes && made.layout.strides == lent.layout.strides &&
                         made.layout.offset == 0 && made.layout.dtype == lent.layout.dtype;
            state->lends |= made.lends;
        }
    }
    return true;
}

PyObject *make_replay(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static const char *known[] = {"recording", "prepare", "addresses", "replays", "graph", "cached", "others",
                                  "places",    "patched", "managed", "returned", "before", "after", "outliving", "own",
                                  "borrow", "make", "run", "in_python", "python_checks", "has_new_history", "is_backward", nullptr};
    PyObject *recording, *prepare, *addresses, *replays, *graph, *cached, *others, *places, *patched, *managed, *returned,
        *before, *after, *outliving, *own, *borrow, *make, *run;
    int in_python = 0, python_checks = 0, has_new_history = 0, is_backward = 0;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OOOOOO!O!OOOO!OOOOOOOpppp", const_cast<char **>(known), &recording,
                                     &prepare, &addresses, &replays, &graph, &PyList_Type, &cached, &PyList_Type, &others,
                                     &places, &patched, &managed, &PyTuple_Type, &returned, &before, &after,
                                     &outliving, &own, &borrow, &make, &run, &in_python, &python_checks, &has_new_history,
                                     &is_backward))
        return nullptr;
    if ((addresses != Py_None && addresses_in(addresses) == nullptr) || counter_in(replays) == nullptr) {
        PyErr_SetString(PyExc_TypeError, "expected an Addresses or None, and a Counter");
        return nullptr;
    }
    Ref made(type->tp_alloc(type, 0));
    if (!made)
        return nullptr;
    auto *state = reinterpret_cast<Replay *>(made.get())->state = new Replay::State;
    state->recording = Py_NewRef(recording);
    state->prepare = prepare == Py_None ? nullptr : Py_NewRef(prepare);
    state->addresses = Py_NewRef(addresses);
    state->replays = Py_NewRef(replays);
    state->graph = Py_NewRef(graph);
    state->cached = Py_NewRef(cached);
    state->others = Py_NewRef(others);
    state->own = Py_NewRef(own);
    state->borrow = Py_NewRef(borrow);
    state->make = Py_NewRef(make);
    state->run = Py_NewRef(run);
    Packed<Place> fixed;
    std::vector<uint64_t> asked;
    if (!fixed.take(places) || !unpack(patched, &asked) || !unpack(managed, &state->managed) ||
        !take_returned(state, returned, others) || !state->before.take(before) || !state->after.take(after) || !state->outliving.take(outliving))
        return nullptr;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(others); i++) {
        PyObject *other = PyList_GET_ITEM(others, i);
        const at::Tensor *like = PyTuple_Check(other) && PyTuple_GET_SIZE(other) == 1 ? tensor_of(PyTuple_GET_ITEM(other, 0))
                                                                                     : nullptr;
        if (like != nullptr)
            state->empty.push_back(
                {static_cast<size_t>(i), like->sizes().vec(), like->strides().vec(), like->options()});
    }
    state->lasting = state->managed;
    for (Py_ssize_t i = 0; i < fixed.count; i++)
        state->fixed.push_back({fixed[i].index, fixed[i].address, {}});
    for (const uint64_t index : asked)
        state->asked.push_back({index, 0, {}});
    state->in_python = in_python != 0;
    state->python_checks = python_checks != 0;
    state->has_new_history = has_new_history != 0;
    state->is_backward = is_backward != 0;
    note_made(state);
    return made.release();
}

int replay_traverse(PyObject *self, visitproc visit, void *arg) {
    auto *state = reinterpret_cast<Replay *>(self)->state;
    Py_VISIT(Py_TYPE(self));
    if (state == nullptr)
        return 0;
    for (PyObject **held : state->held())
        Py_VISIT(*held);
    for (const Mortal *outputs : {&state->before, &state->after, &state->outliving})
        if (const int found = outputs->visit(visit, arg); found != 0)
            return found;
    return 0;
}

int replay_clear(PyObject *self) {
    auto *state = reinterpret_cast<Replay *>(self)->state;
    reinterpret_cast<Replay *>(self)->state = nullptr;
    if (state != nullptr) {
        for (Mortal *outputs : {&state->before, &state->after, &state->outliving})
            outputs->clear();
        for (PyObject **held : state->held())
            Py_CLEAR(*held);
    }
    delete state;
    return 0;
}

void replay_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    replay_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

/* Checks that the fixed inputs are where they should be, and notes the addresses of the others. */
Answer find(Replay::State *state, const Inputs &inputs) {
    for (std::vector<Watched> *all : {&state->fixed, &state->asked})
        for (size_t i = 0; i < all->size(); i++) {
            load_ahead<&Watched::load>(*all, i);
            Watched &input = (*all)[i];
            PyObject *object = inputs.at(input.index);
            if (object == nullptr || !is_tensor(object))
                return Answer::no; // the slow path raises the error
            const at::Tensor &tensor = THPVariable_Unpack(object);
            const uint64_t address = reinterpret_cast<uintptr_t>(tensor.data_ptr());
            if (is_lazy(tensor))
                return Answer::no; // as a tangent may be at one call and not at the next
            if (all == &state->asked)
                input.address = address;
            else if (address != input.address)
                return Answer::no;
            input.known.note(object);
            if (input.dies)
                input.dies_here = is_dead(object, 2); // the list of inputs has the other reference
        }
    return Answer::yes;
}

/* Whether the graph needs no change for inputs at the addresses that were found. */
bool is_settled(const Addresses::State *known, const std::vector<Watched> &inputs) {
    return has_settled(known) &&
           std::equal(inputs.begin(), inputs.end(), known->seen.begin(), known->seen.end(),
                      [](const Watched &input, uint64_t address) { return input.address == address; });
}

/* Makes the graph hold the addresses that were found, or asks Python to do so and sets `asked`. */
Answer prepare(Replay::State *state, Inputs &inputs, bool *is_copied, bool *asked) {
    Addresses::State *known = addresses_in(state->addresses);
    const bool has_values = known != nullptr && !known->staged.values.empty();
    if (known != nullptr && !has_values && is_settled(known, state->asked))
        return Answer::yes;
    std::vector<uint64_t> addresses; // of this call: making a list may collect garbage, which may call the same graph
    addresses.reserve(state->asked.size());
    for (const Watched &input : state->asked)
        addresses.push_back(input.address);
    if (known != nullptr && (!has_values || known->staged.write(inputs)) && patch(known, addresses))
        return Answer::yes;
    *asked = true;
    Ref seen(PyList_New(static_cast<Py_ssize_t>(addresses.size())));
    for (size_t i = 0; seen && i < addresses.size(); i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(addresses[i]);
        if (number == nullptr)
            return Answer::error;
        PyList_SET_ITEM(seen.get(), static_cast<Py_ssize_t>(i), number);
    }
    if (!seen)
        return Answer::error;
    if (!inputs.arrange()) {
        PyErr_SetString(PyExc_IndexError, "the inputs have changed");
        return Answer::error;
    }
    const AtTheEnd own(inputs);
    if (!own.appended)
        return Answer::error;
    Ref copies(PyObject_CallFunctionObjArgs(state->prepare, inputs.list, seen.get(), nullptr));
    if (!copies)
        return passed_over();
    *is_copied = copies.get() == Py_True;
    return copies.get() == Py_None ? Answer::no : Answer::yes;
}

PyObject *note_cached(PyObject *self, PyObject *) {
    return translated([&]() -> PyObject * {
        if (auto *state = reinterpret_cast<Replay *>(self)->state; state != nullptr)
            note_made(state);
        Py_RETURN_NONE;
    });
}

PyObject *is_untouched(PyObject *self, PyObject *) {
    const auto *state = reinterpret_cast<Replay *>(self)->state;
    return translated([&] { return PyBool_FromLong(state != nullptr && are_untouched(state)); });
}

PyObject *get_stream(PyObject *self, void *) {
    const auto *state = reinterpret_cast<Replay *>(self)->state;
    return PyLong_FromLongLong(state == nullptr ? 0 : state->stream);
}

int set_stream(PyObject *self, PyObject *value, void *) {
    const long long number = value == nullptr ? 0 : PyLong_AsLongLong(value);
    if (PyErr_Occurred())
        return -1;
    if (auto *state = reinterpret_cast<Replay *>(self)->state; state != nullptr)
        state->stream = number;
    return 0;
}

PyGetSetDef replay_fields[] = {
    {"stream", get_stream, set_stream, "The number of the stream of the last launch.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef replay_methods[] = {
    {"note_cached", note_cached, METH_NOARGS, "Notes the cached outputs, which were just made."},
    {"is_untouched", is_untouched, METH_NOARGS, "Whether the program left the cached outputs as they were made."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot replay_slots[] = {
    {Py_tp_methods, replay_methods},
    {Py_tp_getset, replay_fields},
    {Py_tp_doc, const_cast<char *>("One recording's part in a fast replay; see the source.")},
    {Py_tp_new, reinterpret_cast<void *>(translate<make_replay>)},
    {Py_tp_dealloc, reinterpret_cast<void *>(replay_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void *>(replay_traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(replay_clear)},
    {0, nullptr},
};

} // namespace

PyType_Spec pygraph::replay_spec = {
    "pygraph_trees.native._fast_path.Replay", sizeof(Replay), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, replay_slots,
};

Replay::State *pygraph::replay_in(PyObject *object) {
    return Py_TYPE(object)->tp_dealloc == replay_dealloc ? reinterpret_cast<Replay *>(object)->state : nullptr;
}

/* Whether the inputs that were not released are where `find` found them, and own memory is still free. */
static bool are_still_there(const Replay::State *state, const Inputs &inputs) {
    for (const std::vector<Watched> *all : {&state->fixed, &state->asked})
        for (const Watched &input : *all) {
            PyObject *object = inputs.at(input.index);
            if (object == Py_None)
                continue;
            if (object == nullptr || !is_tensor(object) ||
                reinterpret_cast<uintptr_t>(THPVariable_Unpack(object).data_ptr()) != input.address ||
                (inputs.is_own(input.index) && !own_memory_in(inputs.own)->is_free(input.index - inputs.own_from)))
                return false;
        }
    return true;
}

/* Releases some inputs; false with an exception. */
static bool release_unneeded(const Inputs &inputs, const std::vector<uint64_t> &indices) {
    for (const uint64_t index : indices) {
        PyObject *input = inputs.at(index); // read again each time, since a release may run other code
        if (input == nullptr) {
            PyErr_SetString(PyExc_IndexError, "the inputs have changed");
            return false;
        }
        PyList_SET_ITEM(inputs.list, inputs.place(index), Py_NewRef(Py_None));
        Py_DECREF(input);
    }
    return true;
}

/* Puts tensors with the same memory in the places of inputs that were released; false with an exception. */
static bool give_back(const Replay::State *state, const Inputs &inputs) {
    Ref recording(PyObject_CallNoArgs(state->recording));
    for (const uint64_t index : state->managed) {
        if (inputs.at(index) != Py_None)
            continue;
        Ref number(PyLong_FromUnsignedLongLong(index));
        Ref tensor(recording && number
                       ? PyObject_CallFunctionObjArgs(state->borrow, recording.get(), number.get(), nullptr)
                       : nullptr);
        if (!tensor)
            return false;
        if (inputs.at(index) == Py_None)
            PyList_SetItem(inputs.list, inputs.place(index), tensor.release());
    }
    return true;
}

Answer pygraph::accept(Replay::State *state, Inputs &inputs, bool *is_copied, Slow *why) {
    *is_copied = false;
    *why = Slow::not_ready;
    if ((state->own == Py_None ? nullptr : state->own) != inputs.own)
        return Answer::no; // it was recorded with own memory of other outputs
    *why = Slow::moved;
    const Answer found = find(state, inputs);
    if (found != Answer::yes)
        return found;
    *why = Slow::outputs_alive;
    bool has_run = false; // whether code ran that may have changed the inputs
    const int died = state->before.are_dead(&has_run);
    if (died <= 0)
        return died < 0 ? passed_over() : Answer::no;
    *why = Slow::not_given;
    if (state->prepare != nullptr) {
        const Answer prepared = prepare(state, inputs, is_copied, &has_run);
        if (prepared != Answer::yes)
            return prepared;
    }
    if (has_run && !are_still_there(state, inputs)) {
        *is_copied = false;
        return Answer::no;
    }
    if (state->python_checks && (*is_copied || state->in_python))
        return release_unneeded(inputs, state->managed) ? Answer::yes : Answer::error;
    if (!has_run && state->after.died_as(state->fixed)) {
        if (!release_unneeded(inputs, state->lasting))
            return Answer::error;
        if (state->after.others_seem_dead())
            return Answer::yes; // inputs that were seen to die are released with the others, after the launch
    }
    if (!release_unneeded(inputs, state->managed))
        return Answer::error;
    bool has_run_again = false;
    const int dead = state->after.are_dead(&has_run_again);
    if (dead < 0 && passed_over() == Answer::error)
        return Answer::error;
    if (dead <= 0) { // the slow path runs un-graphed
        *why = Slow::outputs_alive;
        return give_back(state, inputs) ? Answer::no : Answer::error;
    }
    if (has_run_again && !are_still_there(state, inputs)) // an input was given other memory meanwhile
        return give_back(state, inputs) ? Answer::no : Answer::error;
    if (dead == 1 && state->after.find_among(&state->fixed)) {
        std::unordered_set<uint64_t> dying;
        for (const Watched &input : state->fixed)
            if (input.dies)
                dying.insert(input.index);
        std::erase_if(state->lasting, [&](uint64_t index) { return dying.count(index) != 0; });
    }
    return Answer::yes;
}

bool pygraph::launch(const Replay::State *replay) {
    counter_in(replay->replays)->value++;
    return bool(Ref(PyObject_CallMethodNoArgs(replay->graph, names.replay)));
}
