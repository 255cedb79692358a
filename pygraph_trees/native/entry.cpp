/* A fast replay, from the call of a compiled graph to its return: pygraph_trees.native._fast_path.Call and Entry.

   Entry(**arguments)(inputs), a `fast_call`, returns the outputs of a fast replay, which consumes the inputs, or None, and
   then the inputs are unchanged. trees/functions/fast_path.py makes it. native/DESIGN.md describes Call. */

#include <ATen/SavedTensorHooks.h>

namespace {

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
    std::array<const void *, 9> near{};
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

/* Launches the graph for inputs that the recording has accepted, and returns the call's result. The result is made before
   the launch, which fills the caches with other data: the outputs were just read to see whether they are dead. */
Ref replayed(Entry *state, Found &found, Replay *replay, const Inputs &inputs, const Ref &kept) {
    Ref result, given = tuple_of(replay->returned.size(), [&](size_t i) {
        return Py_NewRef(inputs.required(replay->returned[i].input));
    });
    if (are_untouched(replay))
        result = result_at_hand(&state->results, replay, kept, given.get());
    order_streams(found.trees());
    replay->stream = found.trees()->stream;
    launch(replay); // meanwhile, other threads run
    note_launch(found.trees());
    if (!result)
        result = of_list(&state->results, kept, outputs_of(found.recording.get(), replay, given.get()));
    return result;
}

/* Lets Python replay the recording, if inputs are copied. */
Ref replayed_in_python(const Entry *state, Found &found, Replay *replay, Inputs &inputs, const Ref &kept) {
    inputs.arrange();
    const AtTheEnd own(inputs);
    order_streams(found.trees());
    replay->stream = found.trees()->stream;
    Ref outputs(PyObject_CallFunctionObjArgs(replay->run, found.recording.get(), inputs.list, nullptr));
    note_launch(found.trees()); // even if Python raised, since it may have launched the graph
    if (!outputs)
        throw py::error_already_set();
    return of_list(&state->results, kept, std::move(outputs));
}

/* The result of the entry for the values that the function's integers have at this call; NULL if no replay is fast. */
Ref replayed_for_values(const Entry *state, PyObject *list) {
    const FunctionState *function = state->own();
    Inputs inputs(list, state->reordered());
    if (function->integers == nullptr || !PyDict_Check(function->by_values))
        return Ref();
    const Items integers(function->integers);
    Ref values = checked(PyTuple_New(integers.count));
    for (Py_ssize_t i = 0; i < integers.count; i++) {
        PyObject *value = inputs.at(PyLong_AsUnsignedLongLong(integers.at[i]));
        if (PyErr_Occurred())
            throw py::error_already_set();
        if (value == nullptr)
            return Ref();
        PyTuple_SET_ITEM(values.get(), i, Py_NewRef(value));
    }
    Ref entry = Ref::dup(value_of(function->by_values, values.get()));
    Ref kept = entry ? kept_inputs(&state->results, list) : Ref();
    if (!kept)
        return Ref();
    inputs.arrange();
    Ref outputs = called(entry.get(), list);
    return outputs.get() == Py_None ? Ref() : of_list(&state->results, kept, std::move(outputs));
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
    const Items counters = function->slow == nullptr ? Items() : Items(function->slow);
    const auto number = static_cast<Py_ssize_t>(why);
    if (Counter *counter = number < counters.count ? declared<Counter>(counters.at[number]) : nullptr; counter != nullptr)
        counter->value++;
}

/* The result of a fast replay; NULL if none is made. Then `why` is set, unless another entry, or the same one again,
   counts the call. */
Ref replayed_fast(Entry *state, PyObject *list, std::optional<Slow> *why) {
    FunctionState *function = state->own();
    if (uses_program_pool) // Python leaves the pool and asks again
        return Ref();
    if (function->is_replayed && function->by_values != nullptr)
        return replayed_for_values(state, list);
    GivenAway given_away;
    OwnTurn turn;
    Found found;
    Slow &reason = why->emplace(Slow::not_ready);
    if (!function->is_replayed || !(found.replayer = replayer_here(function)) || found.in_trees()->manager == nullptr)
        return Ref();
    found.manager = called(found.in_trees()->manager);
    if (in<TreeState>(found.manager.get()) == nullptr) // None: it is gone
        return Ref();
    if (is_captured(found.trees())) {
        reason = Slow::captured;
        return Ref();
    }
    collect_if_scheduled();
    const CollectorOff until_launched;
    counted.asked++;
    if (!find_candidates(state->counters, &turn, &found, &reason))
        return Ref();
    Ref kept = kept_inputs(&state->results, list);
    if (!kept)
        return Ref();
    Inputs inputs(list, state->reordered());
    given_away.held = Ref::dup(found.in_trees()->own);
    OwnMemory *own = given_away.own = declared<OwnMemory>(given_away.held.get());
    if (own != nullptr) {
        inputs.add(own);
        reason = Slow::no_memory;
        if (std::string error; !own->take(&error)) // Python frees some, or raises
            return Ref();
        reason = Slow::not_found;
    }
    bool is_copied = false;
    if (!first_accepting(&found, inputs, &is_copied, &reason))
        return Ref();
    counted.fast++;
    go_on_from(&found, state->execution);
    Replay *replay = in<Replay>(found.replay.get());
    const bool in_python = is_copied || replay->in_python;
    if (in_python) {
        counted.in_python++;
        count_slow(function, Slow::in_python);
    }
    Ref result = in_python ? replayed_in_python(state, found, replay, inputs, kept)
                           : replayed(state, found, replay, inputs, kept);
    if (own != nullptr)
        own->launched();
    PyObject *mode = found.all()->mode;
    if (mode == state->forward || mode == state->backward)
        assign(&found.trees()->pending, mode == state->forward ? Py_True : Py_False);
    const auto *further = reinterpret_cast<const char *>(replay) + 128;
    state->near = {found.manager.get(),     found.candidates.get(), found.replay.get(), further,
                   replay->addresses.get(), replay->replays.get(),  replay->graph,      state->function,
                   found.replayer.get()};
    state->firsts = std::min(state->first.size(), replay->fixed.size());
    for (size_t i = 0; i < state->firsts; i++)
        state->first[i] = replay->fixed[i].known;
    return result;
}

/* The result of a fast replay, which consumes the inputs, or None. */
PyObject *called_fast(Entry *state, PyObject *list) {
    for (const void *object : state->near)
        Known::ahead(object, 0), Known::ahead(object, 64);
    for (size_t i = 0; i < state->firsts; i++)
        state->first[i].load();
    if (!PyList_CheckExact(list) ||
        !(state->order.empty() || static_cast<size_t>(PyList_GET_SIZE(list)) == state->order.size()) ||
        !(state->partitions == nullptr || (PyList_GET_SIZE(state->partitions) == 1 &&
                                           PyList_GET_ITEM(state->partitions, 0) == state->partition)))
        Py_RETURN_NONE;
    std::optional<Slow> why;
    Ref result = replayed_fast(state, list, &why);
    if (result) { // the turn is free again, since releasing the inputs may run other code
        checked(PyList_SetSlice(list, 0, PyList_GET_SIZE(list), nullptr));
        return result.release();
    }
    if (why)
        count_slow(state->own(), *why);
    state->own()->was_asked = state->partitions != nullptr;
    Py_RETURN_NONE;
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
    return translated([&] { return called_fast(entry, inputs); });
}

struct Call {
    vectorcallfunc vectorcall = nullptr;
    PyObject *upstream = nullptr, *profiler = nullptr, *debug = nullptr, *conform_inputs = nullptr;

    void take(const py::dict &given);
    void each(const auto &function) {
        for (PyObject **held : {&upstream, &profiler, &debug, &conform_inputs})
            function(*held);
    }
};

/* Whether hooks on saved tensors are set in this thread, or were set at an earlier call. */
bool hooks_were_set() {
    static bool were_set = false; // protected by the GIL
    if (!were_set)
        were_set = !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
    return were_set;
}

bool is_any_lazy(PyObject *inputs) {
    const Items items = PyList_CheckExact(inputs) ? Items(inputs) : Items();
    return std::any_of(items.at, items.at + items.count,
                       [](PyObject *input) { return is_tensor(input) && is_lazy(THPVariable_Unpack(input)); });
}

/* Whether a variable of a module is true. */
bool is_set(PyObject *module, PyObject *variable) {
    PyObject *value = value_of(module, variable);
    return value != nullptr && checked(PyObject_IsTrue(value));
}

/* The callable that replays on the fast path for an object; NULL if there is none. */
Ref fast_call_of(const Call *call, PyObject *object) {
    Ref callable = checked(PyObject_GetAttr(object, names.current_callable));
    PyObject *attributes =
        PyFunction_Check(callable.get()) ? reinterpret_cast<PyFunctionObject *>(callable.get())->func_dict : nullptr;
    PyObject *found = attributes == nullptr ? nullptr : value_of(attributes, names.fast_call);
    const bool is_used = found != nullptr && found != Py_None && !is_set(call->profiler, names._is_profiler_enabled) &&
                         !is_set(call->debug, names.RECORD_GRAPH_EXECUTION);
    return is_used ? Ref::dup(found) : Ref();
}

PyObject *call_vectorcall(PyObject *self, PyObject *const *arguments, size_t flags, PyObject *keywords) {
    return translated([&] {
        const Call *call = &fields_of<Call>(self);
        if (PyVectorcall_NARGS(flags) == 2 && keywords == nullptr) {
            const auto conform = [&] { called(call->conform_inputs, arguments[0], arguments[1]); };
            const bool is_checked = hooks_were_set();
            if (is_checked)
                conform();
            if (Ref fast_call = fast_call_of(call, arguments[0]); fast_call)
                if (Ref outputs = called(fast_call.get(), arguments[1]); outputs.get() != Py_None)
                    return outputs.release();
            if (!is_checked && is_any_lazy(arguments[1]))
                conform();
        }
        return PyObject_Vectorcall(call->upstream, arguments, static_cast<size_t>(PyVectorcall_NARGS(flags)), keywords);
    });
}

void Call::take(const py::dict &given) {
    vectorcall = call_vectorcall;
    upstream = reference(given["upstream"]);
    profiler = reference(given["profiler"].cast<py::dict>());
    debug = reference(given["debug"].cast<py::dict>());
    conform_inputs = reference(given["conform_inputs"]);
}

/* Binds an object as functions do. */
PyObject *call_bind(PyObject *self, PyObject *object, PyObject *) {
    return object == nullptr || object == Py_None ? Py_NewRef(self) : PyMethod_New(self, object);
}

void add_entry(py::module_ &module) {
    add_class<Call>(
        module, "Call", Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
        {{Py_tp_call, reinterpret_cast<void *>(PyVectorcall_Call)},
         {Py_tp_descr_get, reinterpret_cast<void *>(call_bind)}},
        {{"__vectorcalloffset__", T_PYSSIZET, FIELD(Call, vectorcall), READONLY, nullptr},
         {"__wrapped__", T_OBJECT_EX, FIELD(Call, upstream), READONLY, "What is called if no fast replay is possible."}});
    add_class<Entry>(module, "Entry", 0, {{Py_tp_call, reinterpret_cast<void *>(entry_call)}});
    module.def("note_program_pool", [](bool is_used) { uses_program_pool = is_used; },
               "Whether a pool of the program takes this thread's allocations; then no replay is fast.");
}

} // namespace
