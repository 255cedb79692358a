/* A fast replay, from the call of a compiled graph to its return: pygraph_trees.native._fast_path.Entry.

   Entry(**arguments)(inputs) returns the outputs of a fast replay, which consumes the inputs, or None, and then the
   inputs are unchanged. It does what the Python callable `by_hand` does, and calls that if anything is unusual: no
   candidates are known, none of them fits, or outputs of a step may have to be cloned. trees/fast_path.py makes it. */

#include "results.h"
#include "tree.h"

#include <utility>

namespace {

using namespace pygraph;

struct {
    unsigned long long asked = 0, fast = 0;
} counted; // calls that were not left to Python

struct Entry {
    PyObject_HEAD
    struct State {
        PyObject *by_hand = nullptr, *function = nullptr;
        PyObject *partitions = nullptr, *partition = nullptr; // of the code around the function, or NULL
        Counters counters;
        PyObject *execution = nullptr, *forward = nullptr, *backward = nullptr;
        std::vector<uint64_t> order;
        Results results;
        // Addresses that the last call read, and its first inputs: loaded ahead, as Known is, before the candidates are known.
        const void *near[8] = {};
        std::array<Known, 24> first;
        size_t firsts = 0;

        std::vector<PyObject **> held() {
            return {&by_hand,        &function,             &partitions, &partition, &results.constants,
                    &counters.steps, &counters.generations, &execution,  &forward,   &backward};
        }
    } *state;
};

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

/* Launches the graph for inputs that the recording has taken, and returns the call's result. The result is made before
   the launch, which fills the caches with other data: the outputs were just read to see whether they are dead. */
Ref replayed(Entry::State *state, Found &found, Replay::State *replay, const Inputs &inputs, const Ref &kept) {
    Ref given, result;
    {
        Uncollected until_launched;
        given = given_back(replay, inputs);
        result = given ? result_at_hand(&state->results, replay, kept, given.get()) : Ref();
        if (PyErr_Occurred() || !launch(replay))
            return Ref();
    }
    if (!result) {
        Ref outputs = outputs_of(found.recording.get(), replay, given.get());
        result = outputs ? of_list(&state->results, kept, outputs) : Ref();
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
    return outputs ? of_list(&state->results, kept, outputs) : Ref();
}

PyObject *by_hand(const Entry::State *state, PyObject *inputs) { return PyObject_CallOneArg(state->by_hand, inputs); }

/* Makes a fast replay. With no (there is none) or by_hand (Python must look), nothing has happened. */
Answer replay_fast(Entry::State *state, PyObject *list, Ref *result) {
    OwnTurn turn;
    Found found;
    if (const Answer answer = find_candidates(state->function, state->counters, &turn, &found); answer != Answer::yes)
        return answer;
    const CandidateFilter::State *candidate_filter = found.candidate_filter ? candidate_filter_in(found.candidate_filter.get()) : nullptr;
    Replay::State *replay = replay_in(found.replay.get());
    if (replay == nullptr && candidate_filter == nullptr)
        return Answer::by_hand;
    Ref kept = kept_inputs(&state->results, list);
    if (!kept)
        return PyErr_Occurred() ? Answer::error : Answer::by_hand;
    Ref mode = the.candidates_mode.of(found.candidates.get());
    if (!mode)
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
    if (!go_on_from(found, mode.get(), state->execution))
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
