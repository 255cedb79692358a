/* A fast replay, from the call of a compiled graph to its return: pygraph_trees.native._fast_path.Entry.

   Entry(**arguments)(inputs) returns the outputs of a fast replay, which consumes the inputs, or None, and then the
   inputs are unchanged. trees/functions/fast_path.py makes it. */

#include "collector.h"
#include "results.h"
#include "tree.h"

#include <optional>
#include <utility>

namespace {

using namespace pygraph;

struct {
    unsigned long long asked = 0, fast = 0, in_python = 0;
} counted; // calls that asked for a fast replay, those that got one, and those among them that Python made

struct Entry {
    PyObject_HEAD
    struct State {
        PyObject *function = nullptr; // a FunctionState
        PyObject *partitions = nullptr, *partition = nullptr; // of the code around the function, or NULL
        Counters counters;
        PyObject *execution = nullptr, *forward = nullptr, *backward = nullptr;
        std::vector<uint64_t> order;
        Results results;
        // Addresses that the last call read, and its first inputs: loaded ahead, as Known is, before the candidates are known.
        const void *near[9] = {};
        std::array<Known, 24> first;
        size_t firsts = 0;

        std::vector<PyObject **> held() {
            return {&function,       &partitions,           &partition, &results.constants, &counters.steps,
                    &counters.generations, &execution, &forward,   &backward};
        }

        FunctionState *own() const { return reinterpret_cast<FunctionState *>(function); }
    } *state;
};

PyObject *make_entry(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static const char *known[] = {"function", "runner", "order", "kept", "picks", "constants", "views", "steps",
                                  "generations", "execution", "forward", "backward", "clones", "own", nullptr};
    PyObject *function, *runner, *order, *kept, *picks, *constants, *views, *steps, *generations, *execution,
        *forward, *backward, *own, *partitions = nullptr, *partition = nullptr;
    int clones = 0;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OOOOOO!OO!OOOOpO", const_cast<char **>(known), &function,
                                     &runner, &order, &kept, &picks, &PyTuple_Type, &constants, &views,
                                     &PyType_Type, &steps, &generations, &execution, &forward, &backward, &clones,
                                     &own) ||
        (runner != Py_None && !is_tuple(runner)) ||
        (runner != Py_None && !PyArg_ParseTuple(runner, "O!O", &PyList_Type, &partitions, &partition)))
        return nullptr;
    if (!is_function_state(function))
        return PyErr_Format(PyExc_TypeError, "expected a FunctionState");
    Ref made(type->tp_alloc(type, 0));
    if (!made)
        return nullptr;
    auto *state = reinterpret_cast<Entry *>(made.get())->state = new Entry::State;
    state->function = Py_NewRef(function);
    state->partitions = Py_XNewRef(partitions);
    state->partition = Py_XNewRef(partition);
    state->counters = Counters{Py_NewRef(steps), Py_NewRef(generations), clones != 0};
    state->execution = Py_NewRef(execution);
    state->forward = Py_NewRef(forward);
    state->backward = Py_NewRef(backward);
    if ((order != Py_None && !unpack(order, &state->order)) || !state->results.take(kept, picks, constants, views, own))
        return nullptr;
    std::vector<bool> is_taken(state->order.size());
    for (const uint64_t place : state->order) {
        if (place >= state->order.size() || is_taken[place]) {
            PyErr_SetString(PyExc_ValueError, "expected each index of the inputs once");
            return nullptr;
        }
        is_taken[place] = true;
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

/* The inputs that are returned unchanged; NULL with an exception. */
Ref given_back(const Replay::State *replay, const Inputs &inputs) {
    Ref given(PyTuple_New(static_cast<Py_ssize_t>(replay->returned.size())));
    for (size_t i = 0; given && i < replay->returned.size(); i++) {
        PyObject *input = inputs.at(replay->returned[i].input);
        if (input == nullptr) {
            PyErr_SetString(PyExc_IndexError, "the inputs have changed");
            return Ref();
        }
        PyTuple_SET_ITEM(given.get(), static_cast<Py_ssize_t>(i), Py_NewRef(input));
    }
    return given;
}

/* Launches the graph for inputs that the recording has accepted, and returns the call's result. The result is made before
   the launch, which fills the caches with other data: the outputs were just read to see whether they are dead. */
Ref replayed(Entry::State *state, Found &found, Replay::State *replay, const Inputs &inputs, const Ref &kept) {
    Ref given, result;
    {
        CollectorOff until_launched; // during the launch, other threads run
        given = given_back(replay, inputs);
        result = given && are_untouched(replay) ? result_at_hand(&state->results, replay, kept, given.get()) : Ref();
        if (PyErr_Occurred())
            return Ref();
        order_streams(found.trees());
        replay->stream = found.trees()->stream;
        if (!launch(replay))
            return Ref();
        note_launch(found.trees());
    }
    if (!result) {
        Ref outputs = outputs_of(found.recording.get(), replay, given.get());
        result = outputs ? of_list(&state->results, kept, outputs) : Ref();
    }
    return result;
}

/* Lets Python replay the recording, if inputs are copied. */
Ref replayed_in_python(const Entry::State *state, Found &found, Replay::State *replay, Inputs &inputs,
                       const Ref &kept) {
    if (!inputs.arrange()) {
        PyErr_SetString(PyExc_IndexError, "the inputs have changed");
        return Ref();
    }
    const AtTheEnd own(inputs);
    order_streams(found.trees());
    replay->stream = found.trees()->stream;
    Ref outputs(own.appended ? PyObject_CallFunctionObjArgs(replay->run, found.recording.get(), inputs.list, nullptr)
                             : nullptr);
    note_launch(found.trees());
    return outputs ? of_list(&state->results, kept, outputs) : Ref();
}

/* Calls the entry for the values that the function's integers have at this call. */
Answer replay_for_values(const Entry::State *state, PyObject *list, Ref *result) {
    const FunctionState *function = state->own();
    const std::vector<uint64_t> *order = state->order.empty() ? nullptr : &state->order;
    Inputs inputs(list, order);
    Items integers;
    if (function->integers == nullptr || !integers.take(function->integers))
        return PyErr_Occurred() ? Answer::error : Answer::no;
    Ref values(PyTuple_New(integers.count));
    for (Py_ssize_t i = 0; values && i < integers.count; i++) {
        PyObject *value = inputs.at(PyLong_AsUnsignedLongLong(integers.at[i]));
        if (PyErr_Occurred())
            return Answer::error;
        if (value == nullptr)
            return Answer::no;
        PyTuple_SET_ITEM(values.get(), i, Py_NewRef(value));
    }
    if (!values || !PyDict_Check(function->by_values))
        return PyErr_Occurred() ? Answer::error : Answer::no;
    Ref entry = Ref::dup(PyDict_GetItemWithError(function->by_values, values.get()));
    if (!entry)
        return PyErr_Occurred() ? Answer::error : Answer::no;
    Ref kept = kept_inputs(&state->results, list);
    if (!kept || !inputs.arrange())
        return PyErr_Occurred() ? Answer::error : Answer::no;
    Ref outputs(PyObject_CallOneArg(entry.get(), list));
    if (outputs.get() == Py_None) {
        if (order != nullptr)
            inputs.arrange_back(order);
        return Answer::no;
    }
    *result = outputs ? of_list(&state->results, kept, outputs) : Ref();
    return *result ? Answer::yes : Answer::error;
}

/* Releases the own memory that was given away at a call, once the call has no turn. */
struct GivenAway {
    Ref own;

    ~GivenAway() {
        if (OwnMemory::State *state = own_memory_in(own.get()); state != nullptr)
            const auto released = std::exchange(state->dropped, {});
    }
};

void count_slow(const FunctionState *function, Slow why) {
    const auto number = static_cast<Py_ssize_t>(why);
    if (function->slow == nullptr || !PyTuple_Check(function->slow) || PyTuple_GET_SIZE(function->slow) <= number)
        return;
    if (Counter *counter = counter_in(PyTuple_GET_ITEM(function->slow, number)); counter != nullptr)
        counter->value++;
}

/* Makes a fast replay. With `no`, `why` is set unless the entry for these integers has counted the call. */
Answer replay_fast(Entry::State *state, PyObject *list, Ref *result, std::optional<Slow> *why) {
    FunctionState *function = state->own();
    *why = Slow::not_ready;
    if (!function->is_replayed)
        return Answer::no;
    if (function->by_values != nullptr) {
        *why = std::nullopt;
        return replay_for_values(state, list, result);
    }
    GivenAway given_away;
    OwnTurn turn;
    Found found;
    if (!(found.replayer = replayer_here(function)) || found.in_trees()->manager == nullptr)
        return PyErr_Occurred() ? Answer::error : Answer::no;
    if (!(found.manager = Ref(PyObject_CallNoArgs(found.in_trees()->manager))))
        return Answer::error;
    if (!is_tree_state(found.manager.get())) // None: it is gone
        return Answer::no;
    if (is_captured(found.trees())) {
        *why = Slow::captured;
        return Answer::no;
    }
    counted.asked++;
    Slow reason = Slow::not_ready;
    const auto no = [&](Answer answer) {
        *why = reason;
        return answer;
    };
    if (const Answer answer = find_candidates(state->counters, &turn, &found, &reason); answer != Answer::yes)
        return no(answer);
    Ref kept = kept_inputs(&state->results, list);
    if (!kept)
        return PyErr_Occurred() ? Answer::error : Answer::no;
    const std::vector<uint64_t> *order = state->order.empty() ? nullptr : &state->order;
    Inputs inputs(list, order);
    given_away.own = Ref::dup(found.in_trees()->own);
    OwnMemory::State *own = own_memory_in(given_away.own.get());
    if (own != nullptr) {
        inputs.add(given_away.own.get());
        reason = Slow::no_memory;
        if (std::string error; !own->take(&error)) // Python frees some, or raises
            return no(Answer::no);
        reason = Slow::not_found;
    }
    bool is_copied = false;
    if (const Answer accepted = first_accepting(&found, inputs, &is_copied, &reason); accepted != Answer::yes) {
        if (order != nullptr)
            inputs.arrange_back(order);
        return no(accepted);
    }
    counted.fast++;
    go_on_from(&found, state->execution);
    Replay::State *replay = replay_in(found.replay.get());
    const bool in_python = is_copied || replay->in_python;
    if (in_python) {
        counted.in_python++;
        count_slow(function, Slow::in_python);
    }
    *result = in_python ? replayed_in_python(state, found, replay, inputs, kept)
                        : replayed(state, found, replay, inputs, kept);
    if (!*result)
        return Answer::error;
    if (own != nullptr)
        own->launched();
    PyObject *mode = found.all()->mode;
    if (mode == state->forward || mode == state->backward)
        assign(&found.trees()->pending, mode == state->forward ? Py_True : Py_False);
    const void *read[] = {found.manager.get(), found.candidates.get(), found.replay.get(), replay,
                          replay->addresses,   replay->replays,        replay->graph,      state->function,
                          found.in_trees()};
    std::copy(std::begin(read), std::end(read), state->near);
    state->firsts = std::min(state->first.size(), replay->fixed.size());
    for (size_t i = 0; i < state->firsts; i++)
        state->first[i] = replay->fixed[i].known;
    return Answer::yes;
}

PyObject *entry_fast_call(Entry::State *state, PyObject *list) {
    for (const void *object : state->near)
        Known::ahead(object, 0), Known::ahead(object, 64);
    for (size_t i = 0; i < state->firsts; i++)
        state->first[i].load();
    if (!PyList_CheckExact(list) ||
        !(state->order.empty() || static_cast<size_t>(PyList_GET_SIZE(list)) == state->order.size()) ||
        !(state->partitions == nullptr || (PyList_GET_SIZE(state->partitions) == 1 &&
                                           PyList_GET_ITEM(state->partitions, 0) == state->partition)))
        Py_RETURN_NONE;
    Ref result;
    std::optional<Slow> why;
    switch (replay_fast(state, list, &result, &why)) {
    case Answer::no:
        if (why)
            count_slow(state->own(), *why);
        state->own()->was_asked = state->partitions != nullptr;
        Py_RETURN_NONE;
    case Answer::yes: // the turn is free again, since releasing the inputs may run other code
        return PyList_SetSlice(list, 0, PyList_GET_SIZE(list), nullptr) < 0 ? nullptr : result.release();
    case Answer::error:
        break;
    }
    return nullptr;
}

PyObject *entry_call(PyObject *self, PyObject *arguments, PyObject *keywords) {
    PyObject *inputs = nullptr;
    if (!PyArg_ParseTuple(arguments, "O", &inputs))
        return nullptr;
    if (keywords != nullptr && PyDict_GET_SIZE(keywords) > 0) {
        PyErr_SetString(PyExc_TypeError, "expected the inputs and nothing else");
        return nullptr;
    }
    if (reinterpret_cast<Entry *>(self)->state == nullptr) // collected, and called by other garbage
        Py_RETURN_NONE;
    Ref alive = Ref::dup(self);
    return translated([&] { return entry_fast_call(reinterpret_cast<Entry *>(self)->state, inputs); });
}

PyType_Slot entry_slots[] = {
    {Py_tp_doc, const_cast<char *>("The outputs of a fast replay for a list of inputs; see the source.")},
    {Py_tp_new, reinterpret_cast<void *>(translate<make_entry>)},
    {Py_tp_dealloc, reinterpret_cast<void *>(entry_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void *>(entry_traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(entry_clear)},
    {Py_tp_call, reinterpret_cast<void *>(entry_call)},
    {0, nullptr},
};

} // namespace

PyType_Spec pygraph::entry_spec = {
    "pygraph_trees.native._fast_path.Entry", sizeof(Entry), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, entry_slots,
};
