/* Finds where in the tree of recordings a call begins, see tree.h. */

#include "tree.h"

#include <utility>

namespace {

using namespace pygraph;

/* An attribute of a class that changes at each step, so the interpreter does not cache it; NULL with an exception. */
Ref of_class(PyObject *type, Attribute &attribute) {
    if (!PyType_Check(type)) // the counter of generations is an object since torch 2.15
        return attribute.of(type);
    PyObject *value = PyDict_GetItemWithError(reinterpret_cast<PyTypeObject *>(type)->tp_dict, attribute.name);
    return value == nullptr && !PyErr_Occurred() ? Ref(PyObject_GetAttr(type, attribute.name)) : Ref::dup(value);
}

/* Held by the current call, see trees/manager.py. No code waits for it, so it is no lock; the GIL protects it. */
struct Turn {
    PyObject_HEAD
    bool is_taken;
};

PyObject *make_turn(PyTypeObject *type, PyObject *, PyObject *) { return type->tp_alloc(type, 0); }

void turn_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject *turn_acquire(PyObject *self, PyObject *, PyObject *) {
    auto *turn = reinterpret_cast<Turn *>(self);
    return PyBool_FromLong(!std::exchange(turn->is_taken, true));
}

PyObject *turn_release(PyObject *self, PyObject *) {
    auto *turn = reinterpret_cast<Turn *>(self);
    if (!std::exchange(turn->is_taken, false))
        return PyErr_Format(PyExc_RuntimeError, "it is nobody's turn");
    Py_RETURN_NONE;
}

PyObject *turn_locked(PyObject *self, PyObject *) {
    return PyBool_FromLong(reinterpret_cast<Turn *>(self)->is_taken);
}

PyMethodDef turn_methods[] = {
    {"acquire", reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(turn_acquire)), METH_VARARGS | METH_KEYWORDS,
     "Whether it was nobody's; as a lock's, which does not block."},
    {"release", turn_release, METH_NOARGS, "It is nobody's any more."},
    {"locked", turn_locked, METH_NOARGS, "Whether it is somebody's."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot turn_slots[] = {
    {Py_tp_doc, const_cast<char *>("Whose turn it is among calls that go through the same trees; see the source.")},
    {Py_tp_new, reinterpret_cast<void *>(make_turn)},
    {Py_tp_dealloc, reinterpret_cast<void *>(turn_dealloc)},
    {Py_tp_methods, turn_methods},
    {0, nullptr},
};

} // namespace

PyType_Spec pygraph::turn_spec = {
    "pygraph_trees.native._fast_path.Turn", sizeof(Turn), 0, Py_TPFLAGS_DEFAULT, turn_slots,
};

pygraph::OwnTurn::~OwnTurn() {
    if (turn)
        reinterpret_cast<Turn *>(turn.get())->is_taken = false;
}

Answer pygraph::OwnTurn::take(PyObject *manager) {
    Ref found = the.manager_turn.of(manager);
    if (!found)
        return Answer::error;
    if (Py_TYPE(found.get())->tp_dealloc != turn_dealloc ||
        std::exchange(reinterpret_cast<Turn *>(found.get())->is_taken, true))
        return Answer::by_hand;
    turn = std::move(found);
    return Answer::yes;
}

Answer pygraph::find_candidates(PyObject *function, const Counters &counters, OwnTurn *turn, Found *found) {
    Ref reference = the.function_manager.of(function);
    if (!reference || !(found->manager = Ref(PyObject_CallNoArgs(reference.get()))))
        return Answer::error;
    PyObject *manager = found->manager.get();
    if (manager == Py_None)
        return Answer::by_hand;
    Ref thread = the.function_thread.of(function);
    if (!thread)
        return Answer::error;
    if (thread.get() != Py_None) {
        const uint64_t number = PyLong_AsUnsignedLongLong(thread.get());
        if (PyErr_Occurred())
            return Answer::error;
        if (number != PyThreadState_GetID(PyThreadState_Get()))
            return Answer::by_hand;
    }
    const Answer taken = turn->take(manager);
    if (taken != Answer::yes)
        return taken;
    Ref graph, node, current, places, steps, function_id, wanted;
    if (!(graph = the.manager_graph.of(manager)) || !(node = the.manager__current_node.of(manager)) ||
        !(current = the.manager_current_gen.of(manager)) || !(places = the.manager__candidates.of(manager)) ||
        !(steps = of_class(counters.steps, the.steps_mark_step_counter)) ||
        !(function_id = the.function_function_id.of(function)))
        return Answer::error;
    if (graph.get() == Py_None || !PyDict_Check(places.get()))
        return Answer::by_hand;
    places = Ref::dup(PyDict_GetItemWithError(places.get(), function_id.get()));
    if (!places || !PyDict_Check(places.get()))
        return PyErr_Occurred() ? Answer::error : Answer::by_hand;
    found->candidates = Ref::dup(PyDict_GetItemWithError(places.get(), node.get()));
    if (!found->candidates)
        return PyErr_Occurred() ? Answer::error : Answer::by_hand;

    const int marked = PyObject_IsTrue(steps.get());
    if (marked < 0)
        return Answer::error;
    found->generation = marked ? Ref::dup(steps.get()) : of_class(counters.generations, the.generations_generation);
    if (!found->generation)
        return Answer::error;
    int begins = PyObject_RichCompareBool(current.get(), found->generation.get(), Py_NE);
    if (begins > 0 && !marked) {
        const int pending = the.manager_running_forwards_with_pending_backwards.is_true(manager);
        begins = pending < 0 ? -1 : !pending;
    }
    if (begins < 0)
        return Answer::error;
    if (begins && counters.clones) {
        const int clones = the.manager_has_live_user_visible_output_cloning.is_true(manager);
        if (clones)
            return clones < 0 ? Answer::error : Answer::by_hand;
    }
    PyObject *candidates = found->candidates.get();
    if (!(wanted = the.candidates_begins.of(candidates)) || !(found->replay = the.candidates_replay.of(candidates)))
        return Answer::error;
    if (found->replay.get() == Py_None &&
        (!(found->candidate_filter = the.candidates_candidate_filter.of(candidates)) ||
         !(found->replays = the.candidates_replays.of(candidates))))
        return Answer::error;
    return wanted.get() == Py_None || wanted.get() == (begins ? Py_True : Py_False) ? Answer::yes : Answer::by_hand;
}

bool pygraph::find_next(Found *found, const CandidateFilter::State *candidate_filter, const Inputs &inputs, size_t *position) {
    PyObject *replays = found->replays.get();
    if (!PyTuple_Check(replays) || static_cast<size_t>(PyTuple_GET_SIZE(replays)) != candidate_filter->count ||
        !sift(candidate_filter, inputs, position) || *position >= candidate_filter->count)
        return false;
    found->replay = Ref(Py_NewRef(PyTuple_GET_ITEM(replays, static_cast<Py_ssize_t>(*position))));
    return true;
}

bool pygraph::go_on_from(Found &found, PyObject *mode, PyObject *execution) {
    PyObject *manager = found.manager.get();
    Ref compile_id = the.candidates_compile_id.of(found.candidates.get());
    return compile_id && the.manager_mode.set(manager, mode) &&
           the.manager_compile_id.set(manager, compile_id.get()) &&
           the.manager__current_node.set(manager, found.recording.get()) &&
           the.manager_path_state.set(manager, execution) &&
           the.manager_current_gen.set(manager, found.generation.get());
}
