/* A steady replay, from the call of a compiled graph to its return: pygraph_trees._tensors.Entry and .Replay.

   Entry(**what trees/steady.py says)(inputs)
       the outputs of a steady replay, for which the inputs are consumed; None where there is none, and then the inputs
       are as they were. It does what the Python callable `by_hand` does, and calls that one wherever anything is not as
       usual: no way is known, a way has several recordings, a step's outputs may have to be cloned.
   Replay(**what trees/steady.py says)
       one recording's part in it: which inputs have to lie where, whose addresses the graph is given, what has to be
       dead, and what is returned. Python is asked where addresses are new, and where outputs are not to be had from the
       recording's list.

   Between two calls of a model all of this has left the caches. What is read of a tensor lies in three places, each of
   which leads to the next; where they were at the last call is remembered and loaded ahead, several at once. Only ever
   loaded: what is believed is read from the objects themselves. */

#include "steady.h"

namespace {

using namespace pygraph;

struct {
    unsigned long long asked = 0, steady = 0;
} counts; // of calls that Python was not asked for

struct Entry {
    PyObject_HEAD
    struct State {
        PyObject *by_hand = nullptr, *function = nullptr;
        PyObject *partitions = nullptr, *partition = nullptr; // of the code around it, or NULL
        PyObject *finish = nullptr;                           // in Python, or NULL
        PyObject *constants = nullptr;
        PyObject *steps = nullptr, *generations = nullptr; // classes of torch
        PyObject *execution = nullptr, *forward = nullptr, *backward = nullptr;
        bool picks_some = false, clones = false;
        std::vector<uint64_t> order, kept, picks;
        const void *near[8] = {}; // what the last call read: loaded ahead, as Known is

        std::vector<PyObject **> held() {
            return {&by_hand, &function, &partitions, &partition, &finish, &constants,
                    &steps, &generations, &execution, &forward, &backward};
        }
    } *state;
};

PyObject *make_entry(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static const char *known[] = {"by_hand",   "function", "runner",      "order",     "kept",    "picks",    "constants",
                                  "finish",    "steps",    "generations", "execution", "forward", "backward", "clones",
                                  nullptr};
    PyObject *by_hand, *function, *runner, *order, *kept, *picks, *constants, *finish, *steps, *generations, *execution,
        *forward, *backward, *partitions = nullptr, *partition = nullptr;
    int clones = 0;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OOOOOOO!OOOOOOp", const_cast<char **>(known), &by_hand,
                                     &function, &runner, &order, &kept, &picks, &PyTuple_Type, &constants, &finish,
                                     &steps, &generations, &execution, &forward, &backward, &clones) ||
        (runner != Py_None && !PyArg_ParseTuple(runner, "O!O", &PyList_Type, &partitions, &partition)))
        return nullptr;
    Ref made(type->tp_alloc(type, 0));
    if (!made)
        return nullptr;
    auto *state = reinterpret_cast<Entry *>(made.get())->state = new Entry::State;
    state->by_hand = Py_NewRef(by_hand);
    state->function = Py_NewRef(function);
    state->partitions = Py_XNewRef(partitions);
    state->partition = Py_XNewRef(partition);
    state->finish = finish == Py_None ? nullptr : Py_NewRef(finish);
    state->constants = Py_NewRef(constants);
    state->steps = Py_NewRef(steps);
    state->generations = Py_NewRef(generations);
    state->execution = Py_NewRef(execution);
    state->forward = Py_NewRef(forward);
    state->backward = Py_NewRef(backward);
    state->clones = clones != 0;
    state->picks_some = picks != Py_None;
    if ((order != Py_None && !unpack(order, &state->order)) || !unpack(kept, &state->kept) ||
        (picks != Py_None && !unpack(picks, &state->picks)))
        return nullptr;
    for (const uint64_t place : state->order)
        if (place >= state->order.size()) {
            PyErr_SetString(PyExc_ValueError, "expected each index of the inputs once");
            return nullptr;
        }
    return made.release();
}

int entry_traverse(PyObject *self, visitproc visit, void *arg) {
    auto *state = reinterpret_cast<Entry *>(self)->state;
    Py_VISIT(Py_TYPE(self));
    if (state != nullptr)
        for (PyObject **held : state->held())
            Py_VISIT(*held);
    return 0;
}

int entry_clear(PyObject *self) {
    auto *state = reinterpret_cast<Entry *>(self)->state;
    reinterpret_cast<Entry *>(self)->state = nullptr;
    if (state != nullptr)
        for (PyObject **held : state->held())
            Py_CLEAR(*held);
    delete state;
    return 0;
}

void entry_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    entry_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

/* Where a function's steady replay is found, and the state of the trees that it is found in. */
struct Found {
    Ref manager, way, recording, generation;
    Ref replay;
};

/* What Manager.replay_steadily looks at; by_hand where Python has to, also to say what is missing. */
Answer find_way(const Entry::State *state, Found *found) {
    Ref reference = the.function_manager.of(state->function);
    if (!reference || !(found->manager = Ref(PyObject_CallNoArgs(reference.get()))))
        return Answer::error;
    PyObject *manager = found->manager.get();
    if (manager == Py_None)
        return Answer::by_hand;
    Ref graph, node, current, ways, steps, function_id, behind, wanted;
    if (!(graph = the.manager_graph.of(manager)) || !(node = the.manager__current_node.of(manager)) ||
        !(current = the.manager_current_gen.of(manager)) || !(ways = the.manager__ways.of(manager)) ||
        !(steps = the.steps_mark_step_counter.of(state->steps)) ||
        !(function_id = the.function_function_id.of(state->function)))
        return Answer::error;
    if (graph.get() == Py_None || !PyDict_Check(ways.get()))
        return Answer::by_hand;
    found->way = Ref::dup(PyDict_GetItemWithError(ways.get(), function_id.get()));
    if (!found->way)
        return PyErr_Occurred() ? Answer::error : Answer::by_hand;

    const int marked = PyObject_IsTrue(steps.get());
    if (marked < 0)
        return Answer::error;
    found->generation = marked ? Ref::dup(steps.get()) : the.generations_generation.of(state->generations);
    if (!found->generation)
        return Answer::error;
    int begins = PyObject_RichCompareBool(current.get(), found->generation.get(), Py_NE);
    if (begins > 0 && !marked) {
        const int pending = the.manager_running_forwards_with_pending_backwards.is_true(manager);
        begins = pending < 0 ? -1 : !pending;
    }
    if (begins < 0)
        return Answer::error;
    if (begins && state->clones) {
        const int clones = the.manager_has_live_user_visible_output_cloning.is_true(manager);
        if (clones)
            return clones < 0 ? Answer::error : Answer::by_hand;
    }
    if (!(behind = the.way_node.of(found->way.get())) || !(wanted = the.way_begins.of(found->way.get())) ||
        !(found->replay = the.way_replay.of(found->way.get())))
        return Answer::error;
    const bool fits = wanted.get() == Py_None || wanted.get() == (begins ? Py_True : Py_False);
    return fits && behind.get() == node.get() ? Answer::yes : Answer::by_hand;
}

/* The state of the trees once a recording is the one. */
bool go_on_from(const Entry::State *state, Found &found, PyObject *mode) {
    PyObject *manager = found.manager.get();
    Ref compile_id = the.way_compile_id.of(found.way.get());
    return compile_id && the.manager_mode.set(manager, mode) &&
           the.manager_compile_id.set(manager, compile_id.get()) &&
           the.manager__current_node.set(manager, found.recording.get()) &&
           the.manager_path_state.set(manager, state->execution) &&
           the.manager_current_gen.set(manager, found.generation.get());
}

/* What is returned of these, of inputs that are kept and of constants. */
Ref returned(const Entry::State *state, Ref &outputs, Ref &kept) {
    if (!outputs)
        return Ref();
    if (state->finish != nullptr)
        return Ref(PyObject_CallFunctionObjArgs(state->finish, outputs.get(), kept.get(), nullptr));
    if (!state->picks_some)
        return Ref::dup(outputs.get());
    Items rows[3];
    if (!rows[0].take(outputs.get()) || !rows[1].take(kept.get()) || !rows[2].take(state->constants))
        return Ref();
    Ref tuple(PyTuple_New(static_cast<Py_ssize_t>(state->picks.size())));
    for (size_t i = 0; tuple && i < state->picks.size(); i++) {
        uint64_t place = state->picks[i];
        const Items *row = rows;
        while (row < rows + 2 && place >= static_cast<uint64_t>(row->count))
            place -= static_cast<uint64_t>((row++)->count);
        PyObject *item = row->get(place);
        if (item == nullptr) {
            PyErr_SetString(PyExc_IndexError, "a graph returns an output that it has not");
            return Ref();
        }
        PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), Py_NewRef(item));
    }
    return tuple;
}

/* The outputs of a recording, as a list, for the inputs that it has taken, which are consumed. */
Ref replayed(Found &found, Replay::State *replay, const Inputs &inputs) {
    Ref returned(PyTuple_New(static_cast<Py_ssize_t>(replay->returned.size())));
    for (size_t i = 0; returned && i < replay->returned.size(); i++) {
        PyObject *input = inputs.at(replay->returned[i].input);
        if (input == nullptr) {
            PyErr_SetString(PyExc_IndexError, "the inputs have changed");
            return Ref();
        }
        PyTuple_SET_ITEM(returned.get(), static_cast<Py_ssize_t>(i), Py_NewRef(input));
    }
    if (!returned || !launch(replay))
        return Ref();
    Ref outputs = outputs_of(found.recording.get(), replay);
    for (size_t i = 0; outputs && i < replay->returned.size(); i++) {
        PyObject *input = PyTuple_GET_ITEM(returned.get(), static_cast<Py_ssize_t>(i));
        if (PySequence_SetItem(outputs.get(), static_cast<Py_ssize_t>(replay->returned[i].output), input) < 0)
            return Ref();
    }
    if (outputs && PyList_SetSlice(inputs.list, 0, PyList_GET_SIZE(inputs.list), nullptr) < 0)
        return Ref();
    return outputs;
}

/* The same where inputs are copied for this call, or outputs are views of them. */
Ref replayed_in_python(Found &found, Inputs &inputs) {
    inputs.arrange();
    return Ref(PyObject_CallMethodObjArgs(found.recording.get(), the.recording_replay.name, inputs.list, nullptr));
}

PyObject *by_hand(const Entry::State *state, PyObject *inputs) { return PyObject_CallOneArg(state->by_hand, inputs); }

PyObject *entry_steadily(Entry::State *state, PyObject *list) {
    for (const void *object : state->near)
        Known::ahead(object, 0), Known::ahead(object, 64);
    const bool arranges = !state->order.empty();
    if (!PyList_CheckExact(list) ||
        (arranges && static_cast<size_t>(PyList_GET_SIZE(list)) != state->order.size()) ||
        (state->partitions != nullptr && (PyList_GET_SIZE(state->partitions) != 1 ||
                                          PyList_GET_ITEM(state->partitions, 0) != state->partition)))
        return by_hand(state, list);
    Found found;
    const Answer way = find_way(state, &found);
    if (way == Answer::error) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return nullptr;
        PyErr_Clear();
    }
    Replay::State *replay = way == Answer::yes ? replay_in(found.replay.get()) : nullptr;
    if (replay == nullptr)
        return by_hand(state, list);
    found.recording = Ref(PyObject_CallNoArgs(replay->recording));
    if (!found.recording)
        return nullptr;
    Ref kept(PyTuple_New(static_cast<Py_ssize_t>(state->kept.size())));
    for (size_t i = 0; kept && i < state->kept.size(); i++) {
        if (state->kept[i] >= static_cast<uint64_t>(PyList_GET_SIZE(list)))
            return by_hand(state, list);
        PyObject *item = PyList_GET_ITEM(list, static_cast<Py_ssize_t>(state->kept[i]));
        PyTuple_SET_ITEM(kept.get(), static_cast<Py_ssize_t>(i), Py_NewRef(item));
    }
    Ref mode = the.way_mode.of(found.way.get());
    if (!kept || !mode || found.recording.get() == Py_None)
        return PyErr_Occurred() ? nullptr : by_hand(state, list);

    const std::vector<uint64_t> *order = arranges ? &state->order : nullptr;
    Inputs inputs{list, order};
    bool is_copied = false;
    const Answer taken = take(replay, inputs, &is_copied);
    counts.asked += taken == Answer::yes || taken == Answer::no;
    counts.steady += taken == Answer::yes;
    if (taken != Answer::yes) {
        if (order != nullptr)
            inputs.arrange_back(order);
        if (taken == Answer::error)
            return nullptr;
        if (taken == Answer::by_hand)
            return by_hand(state, list);
        if (state->partitions != nullptr && !the.function_was_asked.set(state->function, Py_True))
            return nullptr;
        Py_RETURN_NONE;
    }
    if (!go_on_from(state, found, mode.get()))
        return nullptr;
    Ref outputs = is_copied || replay->in_python ? replayed_in_python(found, inputs) : replayed(found, replay, inputs);
    if (!outputs)
        return nullptr;
    if (mode.get() == state->forward || mode.get() == state->backward) {
        PyObject *pending = mode.get() == state->forward ? Py_True : Py_False;
        if (!the.manager_running_forwards_with_pending_backwards.set(found.manager.get(), pending))
            return nullptr;
    }
    const void *read[] = {found.manager.get(), found.way.get(), found.replay.get(), replay,
                          replay->live,        replay->log,     replay->graph,      state->function};
    std::copy(std::begin(read), std::end(read), state->near);
    return returned(state, outputs, kept).release();
}

PyObject *entry_call(PyObject *self, PyObject *arguments, PyObject *keywords) {
    PyObject *inputs = nullptr;
    if (!PyArg_ParseTuple(arguments, "O", &inputs))
        return nullptr;
    if (keywords != nullptr && PyDict_GET_SIZE(keywords) > 0) {
        PyErr_SetString(PyExc_TypeError, "expected the inputs and nothing else");
        return nullptr;
    }
    Ref alive = Ref::dup(self);
    return translated([&] { return entry_steadily(reinterpret_cast<Entry *>(self)->state, inputs); });
}

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char *>("The outputs of a steady replay for a list of inputs; see the source.")},
    {Py_tp_new, reinterpret_cast<void *>(translate<make_entry>)},
    {Py_tp_dealloc, reinterpret_cast<void *>(entry_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void *>(entry_traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(entry_clear)},
    {Py_tp_call, reinterpret_cast<void *>(entry_call)},
    {0, nullptr},
};

PyType_Spec entry_spec = {
    "pygraph_trees._tensors.Entry", sizeof(Entry), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};

} // namespace

PyObject *pygraph::steady_counts() { return Py_BuildValue("KK", counts.asked, counts.steady); }

bool pygraph::add_steady(PyObject *module) {
#define INTERN(owner, attribute)                                                                                       \
    if ((the.owner##_##attribute.name = PyUnicode_InternFromString(#attribute)) == nullptr)                            \
        return false;
    ATTRIBUTES(INTERN)
#undef INTERN
    for (PyType_Spec *spec : {&replay_spec, &entry_spec}) {
        Ref type(PyType_FromSpec(spec));
        if (!type || PyModule_AddType(module, reinterpret_cast<PyTypeObject *>(type.get())) < 0)
            return false;
    }
    return true;
}
