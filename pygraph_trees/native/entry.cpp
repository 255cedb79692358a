/* A fast replay, from the call of a compiled graph to its return: pygraph_trees.native._fast_path.Entry.

   Entry(**arguments)(inputs) returns the outputs of a fast replay, which consumes the inputs, or None, and then the
   inputs are unchanged. trees/functions/fast_path.py makes it. */

#include "tree.h"

#include <optional>
#include <utility>

namespace {

using namespace pygraph;

struct {
    unsigned long long asked = 0, fast = 0, in_python = 0;
} counted; // calls that asked for a fast replay, those that got one, and those among them that Python made

thread_local bool uses_program_pool = false; // allocations go to a pool of the program, and Python makes the call

struct Entry {
    PyObject *function = nullptr;                         // a FunctionState
    PyObject *partitions = nullptr, *partition = nullptr; // of the code around the function, or NULL
    Counters counters;
    PyObject *execution = nullptr, *forward = nullptr, *backward = nullptr;
    std::vector<uint64_t> order;
    Results results;
    // Addresses that the last call read, and its first inputs: loaded ahead before the candidates are known.
    const void *near[9] = {};
    std::array<Known, 24> first;
    size_t firsts = 0;

    void take(const py::dict &given);
    void each(const auto &call) {
        for (PyObject **held : {&function, &partitions, &partition, &results.constants, &counters.steps,
                                &counters.generations, &execution, &forward, &backward})
            call(*held);
    }
    FunctionState *own() const { return &fields_of<FunctionState>(function); }
    /* NULL if the inputs are in the recording's order. */
    const std::vector<uint64_t> *reordered() const { return order.empty() ? nullptr : &order; }
};

void Entry::take(const py::dict &given) {
    if (in<FunctionState>(py::object(given["function"]).ptr()) == nullptr)
        throw py::type_error("expected a FunctionState");
    function = reference(given["function"]);
    if (const auto runner = given["runner"].cast<std::optional<std::pair<py::list, py::object>>>(); runner) {
        partitions = reference(runner->first);
        partition = reference(runner->second);
    }
    counters = {reference(given["steps"]), reference(given["generations"]), given["clones"].cast<bool>()};
    execution = reference(given["execution"]);
    forward = reference(given["forward"]);
    backward = reference(given["backward"]);
    results.take(given);
    if (const auto places = given["order"].cast<std::optional<std::vector<uint64_t>>>(); places) {
        std::vector<bool> is_taken(places->size());
        for (const uint64_t place : *places) {
            if (place >= places->size() || is_taken[place])
                throw py::value_error("expected each index of the inputs once");
            is_taken[place] = true;
        }
        order = *places;
    }
}

/* The inputs that are returned unchanged; NULL with an exception. */
Ref given_back(const Replay *replay, const Inputs &inputs) {
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
Ref replayed(Entry *state, Found &found, Replay *replay, const Inputs &inputs, const Ref &kept) {
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
Ref replayed_in_python(const Entry *state, Found &found, Replay *replay, Inputs &inputs,
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
Answer replay_for_values(const Entry *state, PyObject *list, Ref *result) {
    const FunctionState *function = state->own();
    const std::vector<uint64_t> *order = state->reordered();
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
    Ref held;
    OwnMemory *own = nullptr;

    ~GivenAway() {
        if (own != nullptr)
            own->drop();
    }
};

void count_slow(const FunctionState *function, Slow why) {
    const auto number = static_cast<Py_ssize_t>(why);
    if (function->slow == nullptr || !PyTuple_Check(function->slow) || PyTuple_GET_SIZE(function->slow) <= number)
        return;
    if (Counter *counter = declared<Counter>(PyTuple_GET_ITEM(function->slow, number)); counter != nullptr)
        counter->value++;
}

/* Makes a fast replay. With `no`, `why` is set unless another entry, or the same one again, counts the call. */
Answer replay_fast(Entry *state, PyObject *list, Ref *result, std::optional<Slow> *why) {
    FunctionState *function = state->own();
    *why = std::nullopt;
    if (uses_program_pool) // Python leaves the pool and asks again
        return Answer::no;
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
    if (in<TreeState>(found.manager.get()) == nullptr) // None: it is gone
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
    const std::vector<uint64_t> *order = state->reordered();
    Inputs inputs(list, order);
    given_away.held = Ref::dup(found.in_trees()->own);
    OwnMemory *own = given_away.own = declared<OwnMemory>(given_away.held.get());
    if (own != nullptr) {
        inputs.add(own);
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
    Replay *replay = in<Replay>(found.replay.get());
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
    const void *read[] = {found.manager.get(),
                          found.candidates.get(),
                          found.replay.get(),
                          reinterpret_cast<const char *>(replay) + 128,
                          replay->addresses.get(),
                          replay->replays.get(),
                          replay->graph,
                          state->function,
                          found.replayer.get()};
    std::copy(std::begin(read), std::end(read), state->near);
    state->firsts = std::min(state->first.size(), replay->fixed.size());
    for (size_t i = 0; i < state->firsts; i++)
        state->first[i] = replay->fixed[i].known;
    return Answer::yes;
}

PyObject *entry_fast_call(Entry *state, PyObject *list) {
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
    Entry *entry = in<Entry>(self);
    if (entry == nullptr) // collected, and called by other garbage
        Py_RETURN_NONE;
    Ref alive = Ref::dup(self);
    return translated([&] { return entry_fast_call(entry, inputs); });
}

} // namespace

void pygraph::add_entry(py::module_ &module) {
    add_class<Entry>(module, "pygraph_trees.native._fast_path.Entry", 0,
                     {{Py_tp_call, reinterpret_cast<void *>(entry_call)}});
    module.def("note_program_pool", [](bool is_used) { uses_program_pool = is_used; },
               "Whether a pool of the program takes this thread's allocations; then no replay is fast.");
}
