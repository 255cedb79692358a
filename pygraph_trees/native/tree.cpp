/* Finds where in the tree of recordings a call begins, see tree.h. */

#include <ATen/ThreadLocalPythonObjects.h>

namespace {

constexpr int ASKED_BEFORE = 8; // calls before a filter is made: making one takes longer than many calls without it

/* An attribute of a class that changes at each step, so the interpreter does not cache it. */
Ref of_class(PyObject *type, PyObject *name) {
    // The counter of generations is an object since torch 2.15.
    PyObject *found = PyType_Check(type) ? value_of(reinterpret_cast<PyTypeObject *>(type)->tp_dict, name) : nullptr;
    return found != nullptr ? Ref::dup(found) : checked(PyObject_GetAttr(type, name));
}

/* The turn of this call, which its destructor gives back. */
class OwnTurn {
  public:
    OwnTurn() = default;
    ~OwnTurn() {
        if (owner)
            fields_of<TreeState>(owner.get()).end_turn(this);
    }
    OwnTurn(const OwnTurn &) = delete;
    OwnTurn &operator=(const OwnTurn &) = delete;

    /* Takes it from a manager; false if another call has it. */
    bool take(PyObject *manager) {
        if (!fields_of<TreeState>(manager).take_turn(this))
            return false;
        owner = Ref::dup(manager);
        return true;
    }

  private:
    Ref owner;
};

/* The classes of torch that count steps, owned by the entry, and whether outputs may be cloned when a step begins. */
struct Counters {
    PyObject *steps = nullptr, *generations = nullptr;
    bool clones = false;
};

/* A function's fast replay, and the state of the trees in which it was found. */
struct Found {
    Ref replayer, manager, generation, candidates, replay, recording;

    TreeState *trees() { return &fields_of<TreeState>(manager.get()); }
    Replayer *in_trees() { return &fields_of<Replayer>(replayer.get()); }
    Candidates *all() { return &fields_of<Candidates>(candidates.get()); }
};

/* A method of the state of the trees. */
template <auto function> PyObject *method(PyObject *self, PyObject *argument) {
    return translated([&] {
        TreeState &trees = fields_of<TreeState>(self);
        if constexpr (std::is_void_v<decltype(function(trees, argument))>)
            return function(trees, argument), Py_NewRef(Py_None);
        else
            return py::cast(function(trees, argument)).release().ptr();
    });
}

PyGetSetDef tree_state_properties[] = {
    {"is_taken", [](PyObject *self, void *) { return PyBool_FromLong(fields_of<TreeState>(self).turn_of != nullptr); },
     nullptr, "Whether a call has the turn.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

/* Whether a new step begins with this call. Finds the number of its step. */
bool begins_step(const TreeState *trees, const Counters &counters, Ref *generation) {
    Ref steps = of_class(counters.steps, names.mark_step_counter);
    const bool marked = is_true(steps);
    *generation = marked ? std::move(steps) : of_class(counters.generations, names.generation);
    return checked(PyObject_RichCompareBool(trees->generation, generation->get(), Py_NE)) &&
           (marked || !checked(PyObject_IsTrue(trees->pending)));
}

/* Lets Python end the last step's path, and move its outputs if one seems alive. */
void keep_outputs(Found *found) {
    const TreeState *trees = found->trees();
    if (trees->current_node == Py_None)
        return;
    Ref native(PyObject_GetAttr(trees->current_node, names.native));
    PyErr_Clear(); // upstream's own recording, or a warm-up
    Replay *last = in<Replay>(native.get());
    if (bool asked = false; last == nullptr || !last->outliving.are_dead(&asked))
        checked(PyObject_CallMethodNoArgs(found->manager.get(), names.try_end_curr_execution));
}

#define ATTRIBUTE(owner, name, field) {name, T_OBJECT_EX, FIELD(owner, field), 0, nullptr}

void add_tree(py::module_ &module) {
    add_class<TreeState>(
        module, "TreeState", Py_TPFLAGS_BASETYPE, {{Py_tp_getset, tree_state_properties}},
        {
            ATTRIBUTE(TreeState, "graph", graph), ATTRIBUTE(TreeState, "_current_node", current_node),
            ATTRIBUTE(TreeState, "path_state", path_state), ATTRIBUTE(TreeState, "mode", mode),
            ATTRIBUTE(TreeState, "compile_id", compile_id), ATTRIBUTE(TreeState, "current_gen", generation),
            ATTRIBUTE(TreeState, "running_forwards_with_pending_backwards", pending),
            ATTRIBUTE(TreeState, "_candidates", candidates), ATTRIBUTE(TreeState, "_find", find),
            {"ordered_device", T_SHORT, FIELD(TreeState, device), 0, "The device whose streams are ordered, or negative."},
            {"turns", T_ULONGLONG, FIELD(TreeState, turns), READONLY, "How often a call asked for the turn."},
            {"last_stream", T_LONGLONG, FIELD(TreeState, stream), READONLY, "The number of the last launch's stream."},
            {"keeps_outputs", T_BOOL, FIELD(TreeState, keeps_outputs), 0, "Whether outputs may have to be moved."},
        },
        {
            {"order_streams", method<[](TreeState &trees, PyObject *) { order_streams(&trees); }>, METH_NOARGS,
             "Lets the current stream wait for the last launch on another."},
            {"note_launch", method<[](TreeState &trees, PyObject *) { note_launch(&trees); }>, METH_NOARGS,
             "Must be called after a launch."},
            {"take_turn", method<[](TreeState &trees, PyObject *inputs) { return trees.take_turn(inputs); }>, METH_O,
             "Takes the turn for the call with this list, and returns whether the call has it."},
            {"has_turn", method<[](TreeState &trees, PyObject *inputs) { return trees.turn_of == inputs; }>, METH_O,
             "Whether the call with this list has the turn."},
            {"end_turn", method<[](TreeState &trees, PyObject *inputs) { trees.end_turn(inputs); }>, METH_O,
             "Gives the turn back if the call with this list has it."},
            {"note_use",
             method<[](TreeState &trees, PyObject *given) {
                 using Given = std::tuple<at::Tensor, short, c10::StreamId>;
                 const auto [tensor, device, id] = py::handle(given).cast<Given>();
                 note_use(&trees, tensor, static_cast<c10::DeviceIndex>(device), id);
             }>,
             METH_VARARGS, "Notes that a stream, given by device and number, uses a tensor."},
            {"streams_in_use",
             method<[](TreeState &trees, PyObject *storage) {
                 return streams_in_use(trees, py::handle(storage).cast<at::Storage>().unsafeGetStorageImpl());
             }>,
             METH_O, "The streams that the program has named in this step for a storage."},
        });
    add_class<FunctionState>(
        module, "FunctionState", Py_TPFLAGS_BASETYPE, {},
        {ATTRIBUTE(FunctionState, "replayer", replayer), ATTRIBUTE(FunctionState, "replayers", replayers),
         ATTRIBUTE(FunctionState, "integers", integers), ATTRIBUTE(FunctionState, "by_values", by_values),
         ATTRIBUTE(FunctionState, "slow", slow), {"is_replayed", T_BOOL, FIELD(FunctionState, is_replayed), 0, nullptr},
         {"was_asked", T_BOOL, FIELD(FunctionState, was_asked), 0, nullptr}});
    add_class<Replayer>(
        module, "Replayer", 0, {},
        {ATTRIBUTE(Replayer, "manager", manager), ATTRIBUTE(Replayer, "function_id", function_id),
         ATTRIBUTE(Replayer, "own", own), {"thread", T_ULONGLONG, FIELD(Replayer, thread), 0, nullptr}});
    add_class<Candidates>(module, "Candidates", 0, {});
    add_class<CandidateFilter>(module, "CandidateFilter", 0, {{Py_tp_call, reinterpret_cast<void *>(call_filter)}});
}

#undef ATTRIBUTE

/* The number of the thread whose trees a call uses. A backward uses those of the thread that began it, although autograd
   runs it in a thread of its own. */
unsigned long long thread_of_trees() {
    static const std::string name = "pygraph_trees"; // trees/functions/threads.py puts an object there
    using Objects = at::impl::ThreadLocalPythonObjects;
    if (torch::autograd::get_current_graph_task_id() >= 0 && Objects::contains(name))
        return reinterpret_cast<uintptr_t>(Objects::get(name).get());
    return PyThreadState_GetID(PyThreadState_Get());
}

/* The function's replayer in this thread; NULL if there is none. */
Ref replayer_here(FunctionState *function) {
    const Replayer *last = in<Replayer>(function->replayer);
    if (last == nullptr)
        return Ref();
    const unsigned long long here = thread_of_trees();
    if (last->thread == here)
        return Ref::dup(function->replayer);
    Ref number = checked(PyLong_FromUnsignedLongLong(here));
    if (function->replayers == nullptr || !PyDict_Check(function->replayers))
        return Ref();
    Ref found = Ref::dup(value_of(function->replayers, number.get()));
    if (in<Replayer>(found.get()) == nullptr)
        return Ref();
    assign(&function->replayer, found.get()); // may run other code, in which the one before ends
    return found;
}

/* Takes the turn and finds the candidates of a call whose replayer and manager were found; else sets `why`. */
bool find_candidates(const Counters &counters, OwnTurn *turn, Found *found, Slow *why) {
    *why = Slow::another_call;
    PyObject *function_id = found->in_trees()->function_id;
    TreeState *trees = found->trees();
    if (!turn->take(found->manager.get()))
        return false;
    *why = Slow::not_found;
    bool is_set = true; // unless upstream names its state otherwise
    trees->each([&](PyObject *&held) {
        is_set &= held != nullptr || &held == &trees->mode || &held == &trees->compile_id;
    });
    if (!is_set || trees->graph == Py_None || !PyDict_Check(trees->candidates) || function_id == nullptr)
        return false;
    const bool begins = begins_step(trees, counters, &found->generation);
    PyObject *places = value_of(trees->candidates, function_id);
    PyObject *known = places != nullptr && PyDict_Check(places) ? value_of(places, trees->current_node) : nullptr;
    const Candidates *candidates = in<Candidates>(known);
    if (candidates == nullptr || (candidates->begins >= 0 && candidates->begins != begins)) {
        found->candidates = called(trees->find, found->manager.get(), function_id, begins ? Py_True : Py_False);
        return in<Candidates>(found->candidates.get()) != nullptr;
    }
    found->candidates = Ref::dup(known);
    if (begins && trees->keeps_outputs && !holds([&] { return keep_outputs(found), true; }))
        return false;
    if (begins && counters.clones &&
        is_true(checked(PyObject_GetAttr(found->manager.get(), names.has_live_user_visible_output_cloning))))
        checked(PyObject_CallMethodNoArgs(found->manager.get(), names.try_end_curr_execution));
    return true;
}

/* Finds the first candidate that accepts the inputs; see `accept`. */
bool first_accepting(Found *found, Inputs &inputs, bool *is_copied, Slow *why) {
    Candidates *candidates = found->all();
    const auto count = static_cast<size_t>(PyTuple_GET_SIZE(candidates->replays));
    if (count > 1 && candidates->filter == nullptr && ++candidates->asked > ASKED_BEFORE) {
        PyObject *made = called(candidates->make_filter).release();
        Py_XSETREF(candidates->filter, made);
    }
    const CandidateFilter *filter = in<CandidateFilter>(candidates->filter);
    if (filter != nullptr && filter->count != count)
        filter = nullptr;
    for (bool is_last = count <= 1;; is_last = true) {
        for (size_t position = 0; position < count; position++) {
            if (filter != nullptr && (!filter->sift(inputs, &position) || position >= count))
                break;
            found->replay = Ref::dup(PyTuple_GET_ITEM(candidates->replays, static_cast<Py_ssize_t>(position)));
            Replay *replay = in<Replay>(found->replay.get());
            if (replay == nullptr)
                continue;
            found->recording = called(replay->recording);
            if (found->recording.get() != Py_None && accept(replay, inputs, is_copied, why))
                return true;
        }
        if (is_last || !is_true(called(candidates->release))) // one may fit once unneeded outputs are dead
            return false;
    }
}

/* Sets the state of the trees once the recording is chosen. */
void go_on_from(Found *found, PyObject *path_state) {
    TreeState *trees = found->trees();
    const Candidates *candidates = found->all();
    assign(&trees->mode, candidates->mode);
    assign(&trees->compile_id, candidates->compile_id);
    assign(&trees->current_node, found->recording.get());
    assign(&trees->path_state, path_state);
    assign(&trees->generation, found->generation.get());
}

} // namespace
