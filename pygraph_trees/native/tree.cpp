/* Finds where in the tree of recordings a call begins, see tree.h. */

#include "tree.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <torch/csrc/autograd/graph_task.h>

#include <structmember.h>

#include <string>
#include <utility>

namespace {

using namespace pygraph;

constexpr int ASKED_BEFORE = 8; // calls before a filter is made: making one takes longer than many calls without it

/* An attribute of a class that changes at each step, so the interpreter does not cache it; NULL with an exception. */
Ref of_class(PyObject *type, PyObject *name) {
    if (!PyType_Check(type)) // the counter of generations is an object since torch 2.15
        return Ref(PyObject_GetAttr(type, name));
    PyObject *value = PyDict_GetItemWithError(reinterpret_cast<PyTypeObject *>(type)->tp_dict, name);
    return value == nullptr && !PyErr_Occurred() ? Ref(PyObject_GetAttr(type, name)) : Ref::dup(value);
}

PyObject *take_turn(PyObject *self, PyObject *inputs) {
    return PyBool_FromLong(reinterpret_cast<TreeState *>(self)->take_turn(inputs));
}

PyObject *has_turn(PyObject *self, PyObject *inputs) {
    return PyBool_FromLong(reinterpret_cast<TreeState *>(self)->turn_of == inputs);
}

PyObject *end_turn(PyObject *self, PyObject *inputs) {
    reinterpret_cast<TreeState *>(self)->end_turn(inputs);
    Py_RETURN_NONE;
}

PyObject *is_taken(PyObject *self, void *) {
    return PyBool_FromLong(reinterpret_cast<TreeState *>(self)->turn_of != nullptr);
}

PyObject *order_current_stream(PyObject *self, PyObject *) {
    return translated([&]() -> PyObject * {
        pygraph::order_streams(reinterpret_cast<TreeState *>(self));
        Py_RETURN_NONE;
    });
}

PyObject *note_last_launch(PyObject *self, PyObject *) {
    return translated([&]() -> PyObject * {
        pygraph::note_launch(reinterpret_cast<TreeState *>(self));
        Py_RETURN_NONE;
    });
}

void tree_state_dealloc(PyObject *self) {
    pygraph::forget_streams(reinterpret_cast<TreeState *>(self));
    held_dealloc<TreeState>(self);
}

PyObject *note_stream_use(PyObject *self, PyObject *arguments) {
    return translated([&]() -> PyObject * {
        PyObject *tensor;
        int device = 0;
        long long stream = 0;
        if (!PyArg_ParseTuple(arguments, "OiL", &tensor, &device, &stream) || tensor_of(tensor) == nullptr)
            return nullptr;
        pygraph::note_use(reinterpret_cast<TreeState *>(self), *tensor_of(tensor),
                          static_cast<c10::DeviceIndex>(device), stream);
        Py_RETURN_NONE;
    });
}

PyMethodDef tree_state_methods[] = {
    {"note_use", note_stream_use, METH_VARARGS, "Notes that a stream, given by device and number, uses a tensor."},
    {"order_streams", order_current_stream, METH_NOARGS, "Lets the current stream wait for the last launch on another."},
    {"note_launch", note_last_launch, METH_NOARGS, "Must be called after a launch."},
    {"take_turn", take_turn, METH_O, "Takes the turn for the call with this list, and returns whether the call has it."},
    {"has_turn", has_turn, METH_O, "Whether the call with this list has the turn."},
    {"end_turn", end_turn, METH_O, "Gives the turn back if the call with this list has it."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef tree_state_properties[] = {
    {"is_taken", is_taken, nullptr, "Whether a call has the turn.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

#define ATTRIBUTE(owner, name, field) {name, T_OBJECT_EX, offsetof(owner, field), 0, nullptr}
/* The slots of a type whose objects have a method `held`. */
#define OBJECT_SLOTS(owner)                                                                                            \
    {Py_tp_dealloc, reinterpret_cast<void *>(held_dealloc<owner>)},                                                    \
        {Py_tp_traverse, reinterpret_cast<void *>(held_traverse<owner>)},                                              \
        {Py_tp_clear, reinterpret_cast<void *>(held_clear<owner>)}

PyMemberDef tree_state_members[] = {
    ATTRIBUTE(TreeState, "graph", graph),
    ATTRIBUTE(TreeState, "_current_node", current_node),
    ATTRIBUTE(TreeState, "path_state", path_state),
    ATTRIBUTE(TreeState, "mode", mode),
    ATTRIBUTE(TreeState, "compile_id", compile_id),
    ATTRIBUTE(TreeState, "current_gen", generation),
    ATTRIBUTE(TreeState, "running_forwards_with_pending_backwards", pending),
    ATTRIBUTE(TreeState, "_candidates", candidates),
    ATTRIBUTE(TreeState, "_find", find),
    {"ordered_device", T_SHORT, offsetof(TreeState, device), 0, "The device whose streams are ordered; negative: none."},
    {"turns", T_ULONGLONG, offsetof(TreeState, turns), READONLY, "How often a call asked for the turn."},
    {"last_stream", T_LONGLONG, offsetof(TreeState, stream), READONLY, "The number of the last launch's stream."},
    {"keeps_outputs", T_BOOL, offsetof(TreeState, keeps_outputs), 0, "Whether outputs may have to be moved."},
    {nullptr, 0, 0, 0, nullptr},
};

PyObject *make_tree_state(PyTypeObject *type, PyObject *, PyObject *) {
    PyObject *made = type->tp_alloc(type, 0);
    if (made != nullptr)
        reinterpret_cast<TreeState *>(made)->device = -1;
    return made;
}

PyType_Slot tree_state_slots[] = {
    {Py_tp_doc, const_cast<char *>("The part of a manager's state that each replay reads and writes.")},
    {Py_tp_new, reinterpret_cast<void *>(make_tree_state)},
    {Py_tp_methods, tree_state_methods},
    {Py_tp_members, tree_state_members},
    {Py_tp_getset, tree_state_properties},
    {Py_tp_dealloc, reinterpret_cast<void *>(tree_state_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void *>(held_traverse<TreeState>)},
    {Py_tp_clear, reinterpret_cast<void *>(held_clear<TreeState>)},
    {0, nullptr},
};

PyMemberDef function_state_members[] = {
    ATTRIBUTE(FunctionState, "replayer", replayer),
    ATTRIBUTE(FunctionState, "replayers", replayers),
    ATTRIBUTE(FunctionState, "integers", integers),
    ATTRIBUTE(FunctionState, "by_values", by_values),
    ATTRIBUTE(FunctionState, "slow", slow),
    {"is_replayed", T_BOOL, offsetof(FunctionState, is_replayed), 0, nullptr},
    {"was_asked", T_BOOL, offsetof(FunctionState, was_asked), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot function_state_slots[] = {
    {Py_tp_doc, const_cast<char *>("The part of a function's state that each replay reads.")},
    {Py_tp_new, reinterpret_cast<void *>(PyType_GenericNew)},
    {Py_tp_members, function_state_members},
    OBJECT_SLOTS(FunctionState),
    {0, nullptr},
};

PyMemberDef replayer_members[] = {
    ATTRIBUTE(Replayer, "manager", manager),
    ATTRIBUTE(Replayer, "function_id", function_id),
    ATTRIBUTE(Replayer, "own", own),
    {"thread", T_ULONGLONG, offsetof(Replayer, thread), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot replayer_slots[] = {
    {Py_tp_doc, const_cast<char *>("What replays a function in the trees of one thread.")},
    {Py_tp_new, reinterpret_cast<void *>(PyType_GenericNew)},
    {Py_tp_members, replayer_members},
    OBJECT_SLOTS(Replayer),
    {0, nullptr},
};

PyObject *make_candidates(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static const char *known[] = {"begins", "mode", "compile_id", "replays", "make_filter", "release", nullptr};
    PyObject *begins, *mode, *compile_id, *replays, *make_filter, *release;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OOOO!OO", const_cast<char **>(known), &begins, &mode,
                                     &compile_id, &PyTuple_Type, &replays, &make_filter, &release))
        return nullptr;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(replays); i++)
        if (replay_in(PyTuple_GET_ITEM(replays, i)) == nullptr)
            return PyErr_Format(PyExc_TypeError, "expected a tuple of Replay objects");
    PyObject *made = type->tp_alloc(type, 0);
    if (made != nullptr) {
        auto *candidates = reinterpret_cast<Candidates *>(made);
        candidates->begins = begins == Py_None ? -1 : begins == Py_True;
        candidates->mode = Py_NewRef(mode);
        candidates->compile_id = Py_NewRef(compile_id);
        candidates->replays = Py_NewRef(replays);
        candidates->make_filter = Py_NewRef(make_filter);
        candidates->release = Py_NewRef(release);
    }
    return made;
}

PyType_Slot candidates_slots[] = {
    {Py_tp_doc, const_cast<char *>("The recordings of one function at one place; see the source.")},
    {Py_tp_new, reinterpret_cast<void *>(translate<make_candidates>)},
    OBJECT_SLOTS(Candidates),
    {0, nullptr},
};

#undef ATTRIBUTE
#undef OBJECT_SLOTS

/* NULL for any other object, and for NULL. */
Candidates *candidates_in(PyObject *object) {
    return object != nullptr && Py_IS_TYPE(object, types.candidates) ? reinterpret_cast<Candidates *>(object) : nullptr;
}

/* Whether a new step begins with this call; -1 with an exception. Finds the number of its step. */
int begins_step(const TreeState *trees, const Counters &counters, Ref *generation) {
    Ref steps = of_class(counters.steps, names.mark_step_counter);
    const int marked = steps ? PyObject_IsTrue(steps.get()) : -1;
    if (marked < 0)
        return -1;
    *generation = marked ? std::move(steps) : of_class(counters.generations, names.generation);
    if (!*generation)
        return -1;
    const int differs = PyObject_RichCompareBool(trees->generation, generation->get(), Py_NE);
    if (differs <= 0 || marked)
        return differs;
    const int pending = PyObject_IsTrue(trees->pending);
    return pending < 0 ? -1 : !pending;
}

/* Lets Python end the last step's path, and move its outputs if one seems alive. */
Answer keep_outputs(Found *found) {
    const TreeState *trees = found->trees();
    if (trees->current_node == Py_None)
        return Answer::yes;
    Ref native(PyObject_GetAttr(trees->current_node, names.native));
    if (!native)
        PyErr_Clear(); // upstream's own recording, or a warm-up
    if (Replay::State *last = native ? replay_in(native.get()) : nullptr; last != nullptr) {
        bool asked = false;
        const int dead = last->outliving.are_dead(&asked);
        if (dead != 0)
            return dead < 0 ? passed_over() : Answer::yes;
    }
    return Ref(PyObject_CallMethodNoArgs(found->manager.get(), names.try_end_curr_execution)) ? Answer::yes : passed_over();
}

} // namespace

PyType_Spec pygraph::tree_state_spec = {
    "pygraph_trees.native._fast_path.TreeState", sizeof(TreeState), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, tree_state_slots,
};

PyType_Spec pygraph::function_state_spec = {
    "pygraph_trees.native._fast_path.FunctionState", sizeof(FunctionState), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, function_state_slots,
};

PyType_Spec pygraph::replayer_spec = {
    "pygraph_trees.native._fast_path.Replayer", sizeof(Replayer), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    replayer_slots,
};

PyType_Spec pygraph::candidates_spec = {
    "pygraph_trees.native._fast_path.Candidates", sizeof(Candidates), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    candidates_slots,
};

Answer pygraph::passed_over() {
    if (!PyErr_ExceptionMatches(PyExc_AssertionError) && !PyErr_ExceptionMatches(PyExc_RuntimeError))
        return Answer::error;
    PyErr_Clear();
    return Answer::no;
}

bool pygraph::is_tree_state(PyObject *object) { return PyObject_TypeCheck(object, types.tree_state); }

bool pygraph::is_function_state(PyObject *object) { return PyObject_TypeCheck(object, types.function_state); }

unsigned long long pygraph::thread_of_trees() {
    static const std::string name = "pygraph_trees"; // trees/functions/threads.py puts an object there
    using Objects = at::impl::ThreadLocalPythonObjects;
    if (torch::autograd::get_current_graph_task_id() >= 0 && Objects::contains(name))
        return reinterpret_cast<uintptr_t>(Objects::get(name).get());
    return PyThreadState_GetID(PyThreadState_Get());
}

Ref pygraph::replayer_here(FunctionState *function) {
    const auto as_replayer = [](PyObject *object) {
        return object != nullptr && Py_IS_TYPE(object, types.replayer) ? reinterpret_cast<Replayer *>(object) : nullptr;
    };
    const Replayer *last = as_replayer(function->replayer);
    if (last == nullptr)
        return Ref();
    const unsigned long long here = thread_of_trees();
    if (last->thread == here)
        return Ref::dup(function->replayer);
    Ref number(PyLong_FromUnsignedLongLong(here));
    if (!number || function->replayers == nullptr || !PyDict_Check(function->replayers))
        return Ref();
    PyObject *found = PyDict_GetItemWithError(function->replayers, number.get());
    if (as_replayer(found) == nullptr)
        return Ref();
    assign(&function->replayer, found);
    return Ref::dup(found);
}

pygraph::OwnTurn::~OwnTurn() {
    if (owner)
        reinterpret_cast<TreeState *>(owner.get())->end_turn(this);
}

bool pygraph::OwnTurn::take(TreeState *trees) {
    if (!trees->take_turn(this))
        return false;
    owner = Ref::dup(reinterpret_cast<PyObject *>(trees));
    return true;
}

Answer pygraph::find_candidates(const Counters &counters, OwnTurn *turn, Found *found, Slow *why) {
    *why = Slow::another_call;
    PyObject *function_id = found->in_trees()->function_id;
    TreeState *trees = found->trees();
    if (!turn->take(trees))
        return Answer::no;
    *why = Slow::not_found;
    for (PyObject **held : trees->held()) // unset, if upstream names its state otherwise
        if (*held == nullptr && held != &trees->mode && held != &trees->compile_id)
            return Answer::no;
    if (trees->graph == Py_None || !PyDict_Check(trees->candidates) || function_id == nullptr)
        return Answer::no;
    const int begins = begins_step(trees, counters, &found->generation);
    if (begins < 0)
        return Answer::error;
    PyObject *places = PyDict_GetItemWithError(trees->candidates, function_id);
    PyObject *known = places != nullptr && PyDict_Check(places)
                          ? PyDict_GetItemWithError(places, trees->current_node)
                          : nullptr;
    if (PyErr_Occurred())
        return Answer::error;
    const Candidates *candidates = candidates_in(known);
    if (candidates == nullptr || (candidates->begins >= 0 && candidates->begins != begins)) {
        found->candidates = Ref(PyObject_CallFunctionObjArgs(trees->find, found->manager.get(), function_id,
                                                             begins ? Py_True : Py_False, nullptr));
        if (!found->candidates)
            return Answer::error;
        return candidates_in(found->candidates.get()) != nullptr ? Answer::yes : Answer::no;
    }
    found->candidates = Ref::dup(known);
    if (begins && trees->keeps_outputs)
        if (const Answer kept = keep_outputs(found); kept != Answer::yes)
            return kept;
    if (!begins || !counters.clones)
        return Answer::yes;
    Ref clones(PyObject_GetAttr(found->manager.get(), names.has_live_user_visible_output_cloning));
    const int clones_now = clones ? PyObject_IsTrue(clones.get()) : -1;
    if (clones_now > 0 && !Ref(PyObject_CallMethodNoArgs(found->manager.get(), names.try_end_curr_execution)))
        return Answer::error;
    return clones_now < 0 ? Answer::error : Answer::yes;
}

Answer pygraph::first_accepting(Found *found, Inputs &inputs, bool *is_copied, Slow *why) {
    Candidates *candidates = found->all();
    const auto count = static_cast<size_t>(PyTuple_GET_SIZE(candidates->replays));
    if (count > 1 && candidates->filter == nullptr && ++candidates->asked > ASKED_BEFORE) {
        PyObject *made = PyObject_CallNoArgs(candidates->make_filter);
        if (made == nullptr)
            return Answer::error;
        Py_XSETREF(candidates->filter, made);
    }
    const CandidateFilter::State *filter =
        candidates->filter == nullptr ? nullptr : candidate_filter_in(candidates->filter);
    if (filter != nullptr && filter->count != count)
        filter = nullptr;
    for (bool is_last = count <= 1;; is_last = true) {
        for (size_t position = 0; position < count; position++) {
            if (filter != nullptr && (!sift(filter, inputs, &position) || position >= count))
                break;
            found->replay = Ref::dup(PyTuple_GET_ITEM(candidates->replays, static_cast<Py_ssize_t>(position)));
            Replay::State *replay = replay_in(found->replay.get());
            if (replay == nullptr)
                continue;
            found->recording = Ref(PyObject_CallNoArgs(replay->recording));
            if (!found->recording)
                return Answer::error;
            const Answer accepted = found->recording.get() == Py_None ? Answer::no : accept(replay, inputs, is_copied, why);
            if (accepted != Answer::no)
                return accepted;
        }
        if (is_last)
            return Answer::no;
        Ref released(PyObject_CallNoArgs(candidates->release)); // one may fit once unneeded outputs are dead
        const int any = released ? PyObject_IsTrue(released.get()) : -1;
        if (any <= 0)
            return any < 0 ? Answer::error : Answer::no;
    }
}

void pygraph::go_on_from(Found *found, PyObject *path_state) {
    TreeState *trees = found->trees();
    const Candidates *candidates = found->all();
    assign(&trees->mode, candidates->mode);
    assign(&trees->compile_id, candidates->compile_id);
    assign(&trees->current_node, found->recording.get());
    assign(&trees->path_state, path_state);
    assign(&trees->generation, found->generation.get());
}
