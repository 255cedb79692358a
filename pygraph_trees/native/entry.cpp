/* A fast replay, from the call of a compiled graph to its return: pygraph_trees.native._fast_path.Entry.

   Entry(**arguments)(inputs) returns the outputs of a fast replay, which consumes the inputs, or None, and then the
   inputs are unchanged. It does what the Python callable `by_hand` does, and calls that if anything is unusual: no
   candidates are known, none of them fits, or outputs of a step may have to be cloned. trees/fast_path.py makes it. */

#include "fast_path.h"

#include <torch/csrc/inductor/inductor_ops.h>

#include <utility>

namespace {

using namespace pygraph;

struct {
    unsigned long long asked = 0, fast = 0;
} counted; // calls that were not left to Python

/* A view of a tensor: its number among outputs and kept inputs, and the arguments of Inductor's reinterpret_tensor. */
struct View {
    uint64_t number;
    std::vector<int64_t> sizes, strides;
    int64_t offset;
    bool is_own = false; // it equals the gradient that it is a view of, and replaces it only for code that may see it
};

struct Entry {
    PyObject_HEAD
    struct State {
        PyObject *by_hand = nullptr, *function = nullptr;
        PyObject *partitions = nullptr, *partition = nullptr; // of the code around the function, or NULL
        PyObject *constants = nullptr;
        PyObject *steps = nullptr, *generations = nullptr; // classes of torch
        PyObject *execution = nullptr, *forward = nullptr, *backward = nullptr;
        bool picks_some = false, clones = false;
        bool has_own = false, views_are_own = false; // some views, or all
        std::vector<uint64_t> order, kept, picks;
        std::vector<View> views;
        std::vector<PyObject *> outputs; // borrowed, and valid until other code runs
        // Addresses that the last call read, and its first inputs: loaded ahead, as Known is, before the candidates are known.
        const void *near[8] = {};
        std::array<Known, 24> first;
        size_t firsts = 0;
        std::vector<Parameter> parameters; // by edge of the backward

        std::vector<PyObject **> held() {
            return {&by_hand, &function, &partitions, &partition, &constants,
                    &steps, &generations, &execution, &forward, &backward};
        }
    } *state;
};

bool take_numbers(PyObject *tuple, std::vector<int64_t> *numbers) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++)
        numbers->push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)));
    return PyErr_Occurred() == nullptr;
}

bool take_views(PyObject *sequence, std::vector<View> *views) {
    Items given;
    if (!given.take(sequence))
        return false;
    for (Py_ssize_t i = 0; i < given.count; i++) {
        PyObject *sizes, *strides;
        unsigned long long number = 0;
        long long offset = 0;
        View view;
        if (!is_tuple(given.at[i]) ||
            !PyArg_ParseTuple(given.at[i], "KO!O!L", &number, &PyTuple_Type, &sizes, &PyTuple_Type, &strides, &offset) ||
            !take_numbers(sizes, &view.sizes) || !take_numbers(strides, &view.strides))
            return false;
        view.number = number;
        view.offset = offset;
        views->push_back(std::move(view));
    }
    return true;
}

PyObject *make_entry(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static const char *known[] = {"by_hand",   "function", "runner",      "order",     "kept",    "picks",    "constants",
                                  "views", "steps", "generations", "execution", "forward", "backward",
                                  "clones", "own", nullptr};
    PyObject *by_hand, *function, *runner, *order, *kept, *picks, *constants, *views, *steps, *generations, *execution,
        *forward, *backward, *own, *partitions = nullptr, *partition = nullptr;
    int clones = 0;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OOOOOOO!OO!OOOOpO", const_cast<char **>(known), &by_hand,
                                     &function, &runner, &order, &kept, &picks, &PyTuple_Type, &constants, &views,
                                     &PyType_Type, &steps, &generations, &execution, &forward, &backward, &clones,
                                     &own) ||
        (runner != Py_None && !is_tuple(runner)) ||
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
    state->constants = Py_NewRef(constants);
    state->steps = Py_NewRef(steps);
    state->generations = Py_NewRef(generations);
    state->execution = Py_NewRef(execution);
    state->forward = Py_NewRef(forward);
    state->backward = Py_NewRef(backward);
    state->clones = clones != 0;
    state->picks_some = picks != Py_None;
    if ((order != Py_None && !unpack(order, &state->order)) || !unpack(kept, &state->kept) || !take_views(views, &state->views) ||
        (picks != Py_None && !unpack(picks, &state->picks)))
        return nullptr;
    std::vector<uint64_t> own_views;
    if (!unpack(own, &own_views))
        return nullptr;
    for (const uint64_t number : own_views) {
        if (number >= state->views.size()) {
            PyErr_SetString(PyExc_ValueError, "expected numbers of views");
            return nullptr;
        }
        state->views[number].is_own = true;
    }
    const auto is_own = [](const View &view) { return view.is_own; };
    state->views_are_own = std::all_of(state->views.begin(), state->views.end(), is_own);
    state->has_own = !own_views.empty();
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

/* A function's fast replay, and the state of the trees in which it was found. */
struct Found {
    Ref manager, candidates, recording, generation;
    Ref replay, candidate_filter, replays; // of the recording, or a filter and the replays of several
};

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

PyType_Spec turn_spec = {"pygraph_trees.native._fast_path.Turn", sizeof(Turn), 0, Py_TPFLAGS_DEFAULT, turn_slots};

/* The turn of this call, which its destructor gives back. */
class OwnTurn {
  public:
    OwnTurn() = default;
    ~OwnTurn() {
        if (turn)
            reinterpret_cast<Turn *>(turn.get())->is_taken = false;
    }
    OwnTurn(const OwnTurn &) = delete;
    OwnTurn &operator=(const OwnTurn &) = delete;

    /* by_hand if another call has the turn. */
    Answer take(PyObject *manager) {
        Ref found = the.manager_turn.of(manager);
        if (!found)
            return Answer::error;
        if (Py_TYPE(found.get())->tp_dealloc != turn_dealloc ||
            std::exchange(reinterpret_cast<Turn *>(found.get())->is_taken, true))
            return Answer::by_hand;
        turn = std::move(found);
        return Answer::yes;
    }

  private:
    Ref turn;
};

/* Takes the turn and checks what Manager.replay_fast checks; by_hand if Python must. */
Answer find_candidates(const Entry::State *state, OwnTurn *turn, Found *found) {
    Ref reference = the.function_manager.of(state->function);
    if (!reference || !(found->manager = Ref(PyObject_CallNoArgs(reference.get()))))
        return Answer::error;
    PyObject *manager = found->manager.get();
    if (manager == Py_None)
        return Answer::by_hand;
    Ref thread = the.function_thread.of(state->function);
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
        !(steps = of_class(state->steps, the.steps_mark_step_counter)) ||
        !(function_id = the.function_function_id.of(state->function)))
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
    found->generation = marked ? Ref::dup(steps.get()) : of_class(state->generations, the.generations_generation);
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
    PyObject *candidates = found->candidates.get();
    if (!(wanted = the.candidates_begins.of(candidates)) || !(found->replay = the.candidates_replay.of(candidates)))
        return Answer::error;
    if (found->replay.get() == Py_None &&
        (!(found->candidate_filter = the.candidates_candidate_filter.of(candidates)) ||
         !(found->replays = the.candidates_replays.of(candidates))))
        return Answer::error;
    return wanted.get() == Py_None || wanted.get() == (begins ? Py_True : Py_False) ? Answer::yes : Answer::by_hand;
}

/* Finds the first of several recordings, from `position` on, that may fit; false if Python must look. */
bool find_next(Found *found, const CandidateFilter::State *candidate_filter, const Inputs &inputs, size_t *position) {
    PyObject *replays = found->replays.get();
    if (!PyTuple_Check(replays) || static_cast<size_t>(PyTuple_GET_SIZE(replays)) != candidate_filter->count ||
        !sift(candidate_filter, inputs, position) || *position >= candidate_filter->count)
        return false;
    found->replay = Ref(Py_NewRef(PyTuple_GET_ITEM(replays, static_cast<Py_ssize_t>(*position))));
    return true;
}

/* Sets the state of the trees once the recording is chosen. */
bool go_on_from(const Entry::State *state, Found &found, PyObject *mode) {
    PyObject *manager = found.manager.get();
    Ref compile_id = the.candidates_compile_id.of(found.candidates.get());
    return compile_id && the.manager_mode.set(manager, mode) &&
           the.manager_compile_id.set(manager, compile_id.get()) &&
           the.manager__current_node.set(manager, found.recording.get()) &&
           the.manager_path_state.set(manager, state->execution) &&
           the.manager_current_gen.set(manager, found.generation.get());
}

/* An object by its number, counted through consecutive rows; NULL with an exception. */
PyObject *item_at(const Items *rows, size_t count, uint64_t number) {
    for (const Items *row = rows; row < rows + count; row++) {
        if (number < static_cast<uint64_t>(row->count))
            return row->at[number];
        number -= static_cast<uint64_t>(row->count);
    }
    PyErr_SetString(PyExc_IndexError, "a graph returns what it has not");
    return nullptr;
}

/* The views as a tuple, or for own views that other code does not see, their bases; NULL with an exception. */
Ref viewed(const std::vector<View> &views, bool sees, const Items *rows) {
    std::vector<Ref> items; // owned, since making a view may collect garbage
    for (const View &view : views) {
        PyObject *item = item_at(rows, 2, view.number);
        if (item == nullptr || tensor_of(item) == nullptr)
            return Ref();
        items.push_back(Ref::dup(item));
    }
    Ref tuple(PyTuple_New(static_cast<Py_ssize_t>(views.size())));
    for (size_t i = 0; tuple && i < views.size(); i++) {
        const View &view = views[i];
        const auto make_view = [&] {
            const at::Tensor &tensor = THPVariable_Unpack(items[i].get());
            return THPVariable_Wrap(
                torch::inductor::_reinterpret_tensor(tensor, view.sizes, view.strides, view.offset));
        };
        PyObject *wrapped = view.is_own && !sees ? items[i].release() : make_view();
        if (wrapped == nullptr)
            return Ref();
        PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), wrapped);
    }
    return tuple;
}

/* The tuple that the call returns: outputs, as `take_outputs` gives them, kept inputs, views of both, and constants.
   Unless other code `sees` the gradients, own views are replaced by their bases. If `take_outputs` returns false, the
   result is NULL without an exception. */
template <typename TakeOutputs>
Ref returned(const Entry::State *state, const Ref &kept, bool sees, const TakeOutputs &take_outputs) {
    Items rows[4]; // taken again after any step that may run other code: a new tuple may collect garbage
    if (!rows[1].take(const_cast<PyObject *>(kept.get())) || !rows[3].take(state->constants))
        return Ref();
    const bool views_some = !state->views.empty(), makes_views = views_some && (sees || !state->views_are_own);
    Ref views;
    if (makes_views &&
        (!take_outputs(&rows[0]) || !(views = viewed(state->views, sees, rows)) || !rows[2].take(views.get())))
        return Ref();
    Ref tuple(PyTuple_New(static_cast<Py_ssize_t>(state->picks.size())));
    if (!tuple || !take_outputs(&rows[0]))
        return Ref();
    const uint64_t first_view = static_cast<uint64_t>(rows[0].count) + static_cast<uint64_t>(rows[1].count);
    const uint64_t behind_views = first_view + state->views.size();
    for (size_t i = 0; i < state->picks.size(); i++) {
        uint64_t number = state->picks[i];
        if (views_some && !makes_views && number >= first_view) // the row of views is empty
            number = number < behind_views ? state->views[number - first_view].number : number - state->views.size();
        PyObject *item = item_at(rows, 4, number);
        if (item == nullptr)
            return Ref();
        PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), Py_NewRef(item));
    }
    return tuple;
}

/* The outputs as a list; NULL if they are not at hand, possibly with an exception. */
Ref list_at_hand(Entry::State *state, const Replay::State *replay, PyObject *given) {
    Ref list(PyList_New(PyList_GET_SIZE(replay->others)));
    if (!list || !at_hand(replay, given, &state->outputs) ||
        static_cast<size_t>(PyList_GET_SIZE(list.get())) != state->outputs.size())
        return Ref();
    for (size_t i = 0; i < state->outputs.size(); i++)
        PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), Py_NewRef(state->outputs[i]));
    return list;
}

/* The call's result, from a list of outputs. */
Ref of_list(const Entry::State *state, const Ref &kept, Ref &outputs) {
    if (!state->picks_some)
        return std::move(outputs);
    return returned(state, kept, true, [&](Items *row) { return row->take(outputs.get()); });
}

/* Keeps the garbage collector off while it exists. */
class Uncollected {
  public:
    Uncollected() : was_on(PyGC_Disable() != 0) {}
    ~Uncollected() {
        if (was_on)
            PyGC_Enable();
    }
    Uncollected(const Uncollected &) = delete;
    Uncollected &operator=(const Uncollected &) = delete;

  private:
    bool was_on;
};

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

/* The call's result, from outputs at hand; NULL if they are not, possibly with an exception. */
Ref result_at_hand(Entry::State *state, const Replay::State *replay, const Ref &kept, PyObject *given) {
    if (!state->picks_some)
        return list_at_hand(state, replay, given);
    const bool sees = !state->has_own || !are_only_accumulated(&state->parameters);
    return returned(state, kept, sees, [&](Items *row) {
        const bool found = at_hand(replay, given, &state->outputs);
        *row = Items{state->outputs.data(), static_cast<Py_ssize_t>(state->outputs.size())};
        return found;
    });
}

/* Launches the graph for inputs that the recording has taken, and returns the call's result. The result is made before
   the launch, which fills the caches with other data: the outputs were just read to see whether they are dead. */
Ref replayed(Entry::State *state, Found &found, Replay::State *replay, const Inputs &inputs, const Ref &kept) {
    Ref given, result;
    {
        Uncollected until_launched;
        given = given_back(replay, inputs);
        result = given ? result_at_hand(state, replay, kept, given.get()) : Ref();
        if (PyErr_Occurred() || !launch(replay))
            return Ref();
    }
    if (!result) {
        Ref outputs = outputs_of(found.recording.get(), replay, given.get());
        result = outputs ? of_list(state, kept, outputs) : Ref();
    }
    return result;
}

/* Lets Python replay the recording, if inputs are copied for this call or outputs are views of inputs. */
Ref replayed_in_python(const Entry::State *state, Found &found, Inputs &inputs, const Ref &kept) {
    if (!inputs.arrange()) {
        PyErr_SetString(PyExc_IndexError, "the inputs have changed");
        return Ref();
    }
    Ref outputs(
        PyObject_CallMethodObjArgs(found.recording.get(), the.recording_replay.name, inputs.list, nullptr));
    return outputs ? of_list(state, kept, outputs) : Ref();
}

PyObject *by_hand(const Entry::State *state, PyObject *inputs) { return PyObject_CallOneArg(state->by_hand, inputs); }

/* Makes a fast replay. With no (there is none) or by_hand (Python must look), nothing has happened. */
Answer replay_fast(Entry::State *state, PyObject *list, Ref *result) {
    OwnTurn turn;
    Found found;
    if (const Answer answer = find_candidates(state, &turn, &found); answer != Answer::yes)
        return answer;
    const CandidateFilter::State *candidate_filter = found.candidate_filter ? candidate_filter_in(found.candidate_filter.get()) : nullptr;
    Replay::State *replay = replay_in(found.replay.get());
    if (replay == nullptr && candidate_filter == nullptr)
        return Answer::by_hand;
    Ref kept(PyTuple_New(static_cast<Py_ssize_t>(state->kept.size())));
    for (size_t i = 0; kept && i < state->kept.size(); i++) {
        if (state->kept[i] >= static_cast<uint64_t>(PyList_GET_SIZE(list)))
            return Answer::by_hand;
        PyObject *item = PyList_GET_ITEM(list, static_cast<Py_ssize_t>(state->kept[i]));
        PyTuple_SET_ITEM(kept.get(), static_cast<Py_ssize_t>(i), Py_NewRef(item));
    }
    Ref mode = the.candidates_mode.of(found.candidates.get());
    if (!kept || !mode)
        return Answer::error;

    const std::vector<uint64_t> *order = state->order.empty() ? nullptr : &state->order;
    Inputs inputs{list, order};
    bool is_copied = false;
    Answer taken = Answer::no;
    for (size_t position = 0; taken == Answer::no; position++) {
        if (candidate_filter != nullptr)
            replay = find_next(&found, candidate_filter, inputs, &position) ? replay_in(found.replay.get()) : nullptr;
        found.recording = replay == nullptr ? Ref() : Ref(PyObject_CallNoArgs(replay->recording));
        if (replay != nullptr && !found.recording)
            return Answer::error;
        taken = found.recording && found.recording.get() != Py_None ? take(replay, inputs, &is_copied) : Answer::by_hand;
        if (candidate_filter == nullptr)
            break;
    }
    counted.asked += taken == Answer::yes || taken == Answer::no;
    counted.fast += taken == Answer::yes;
    if (taken != Answer::yes) {
        if (order != nullptr)
            inputs.arrange_back(order);
        return taken;
    }
    if (!go_on_from(state, found, mode.get()))
        return Answer::error;
    *result = is_copied || replay->in_python ? replayed_in_python(state, found, inputs, kept)
                                             : replayed(state, found, replay, inputs, kept);
    if (!*result)
        return Answer::error;
    if (mode.get() == state->forward || mode.get() == state->backward) {
        PyObject *pending = mode.get() == state->forward ? Py_True : Py_False;
        if (!the.manager_running_forwards_with_pending_backwards.set(found.manager.get(), pending))
            return Answer::error;
    }
    const void *read[] = {found.manager.get(), found.candidates.get(), found.replay.get(), replay,
                          replay->addresses,   replay->replays,        replay->graph,      state->function};
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
    Answer answer = Answer::by_hand;
    Ref result;
    if (PyList_CheckExact(list) &&
        (state->order.empty() || static_cast<size_t>(PyList_GET_SIZE(list)) == state->order.size()) &&
        (state->partitions == nullptr || (PyList_GET_SIZE(state->partitions) == 1 &&
                                          PyList_GET_ITEM(state->partitions, 0) == state->partition)))
        answer = replay_fast(state, list, &result);
    switch (answer) {
    case Answer::by_hand:
        return by_hand(state, list);
    case Answer::no:
        if (state->partitions != nullptr && !the.function_was_asked.set(state->function, Py_True))
            return nullptr;
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

PyType_Spec entry_spec = {
    "pygraph_trees.native._fast_path.Entry", sizeof(Entry), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, entry_slots,
};

} // namespace

PyObject *pygraph::fast_path_counts() { return Py_BuildValue("KK", counted.asked, counted.fast); }

bool pygraph::add_fast_path(PyObject *module) {
#define INTERN(owner, attribute)                                                                                       \
    if ((the.owner##_##attribute.name = PyUnicode_InternFromString(#attribute)) == nullptr)                            \
        return false;
    ATTRIBUTES(INTERN)
#undef INTERN
    Ref names(PyList_New(0));
#define NOTE(owner, attribute)                                                                                         \
    if (Ref name(names ? PyUnicode_FromString(#owner "." #attribute) : nullptr);                                      \
        !name || PyList_Append(names.get(), name.get()) < 0)                                                           \
        return false;
    ATTRIBUTES(NOTE)
#undef NOTE
    if (PyModule_AddObjectRef(module, "NAMES", names.get()) < 0)
        return false;
    for (PyType_Spec *spec : {&replay_spec, &entry_spec, &call_spec, &addresses_spec, &counter_spec, &candidate_filter_spec, &turn_spec}) {
        Ref type(PyType_FromSpec(spec));
        if (!type || PyModule_AddType(module, reinterpret_cast<PyTypeObject *>(type.get())) < 0)
            return false;
    }
    return true;
}
