/* A fast replay in C++, see native/entry.cpp: what it is made of. */

#pragma once

#include "tensors.h"

#include <torch/csrc/utils/object_ptr.h>

#include <array>
#include <vector>

namespace pygraph {

using Ref = THPObjectPtr; // a reference that is given back

enum class Answer { no, yes, by_hand, error };

/* An attribute. Of our own classes the hot ones are slots: of the type that was asked last, where they are is known. */
class Attribute {
  public:
    PyObject *name = nullptr; // interned

    /* NULL with an exception. */
    Ref of(PyObject *object) {
        if (Py_TYPE(object) != type && Py_TYPE(object) != without)
            find(Py_TYPE(object));
        if (Py_TYPE(object) == type) {
            PyObject *value = *slot(object);
            if (value != nullptr)
                return Ref(Py_NewRef(value));
        }
        return Ref(PyObject_GetAttr(object, name));
    }

    /* False with an exception. */
    bool set(PyObject *object, PyObject *value) {
        if (Py_TYPE(object) != type && Py_TYPE(object) != without)
            find(Py_TYPE(object));
        if (Py_TYPE(object) != type)
            return PyObject_SetAttr(object, name, value) == 0;
        if (*slot(object) == value)
            return true;
        Ref before(*slot(object));
        *slot(object) = Py_NewRef(value);
        return true;
    }

    /* Whether it is true; -1 with an exception. */
    int is_true(PyObject *object) {
        Ref value = of(object);
        return value ? PyObject_IsTrue(value.get()) : -1;
    }

  private:
    PyTypeObject *type = nullptr, *without = nullptr; // held: the last one with such a slot, and the last one without
    Py_ssize_t offset = 0;

    PyObject **slot(PyObject *object) const {
        return reinterpret_cast<PyObject **>(reinterpret_cast<char *>(object) + offset);
    }

    void find(PyTypeObject *asked);
};

#define ATTRIBUTES(each)                                                                                              \
    each(function, manager) each(function, function_id) each(function, thread) each(function, was_asked)              \
    each(manager, graph) each(manager, _current_node) each(manager, current_gen) each(manager, _candidates)           \
    each(manager, running_forwards_with_pending_backwards) each(manager, has_live_user_visible_output_cloning)        \
    each(manager, mode) each(manager, compile_id) each(manager, path_state) each(manager, turn)                       \
    each(steps, mark_step_counter)                                                                                    \
    each(generations, generation) each(candidates, begins) each(candidates, replay) each(candidates, mode)            \
    each(candidates, replays) each(candidates, candidate_filter) each(candidates, compile_id)                         \
    each(live, _settled) each(live, _pool) each(live, _pool_seen) each(live, prepare)                                 \
    each(live, temporary) each(live, _patcher) each(live, _fitting) each(live, _seen) each(live, _addresses)          \
    each(patches, addresses) each(patches, broken) each(patches, is_stuck) each(patches, set_calls)                   \
    each(pool, changes) each(log, replays) each(recording, _check_what_died) each(recording, _own_outputs)            \
    each(recording, replay) each(graph, replay) each(compiled, current_callable) each(callable, fast_call)             \
    each(profiler, _is_profiler_enabled) each(debug, RECORD_GRAPH_EXECUTION)
#define DECLARE(owner, name) Attribute owner##_##name;
struct Attributes {
    ATTRIBUTES(DECLARE)
};
#undef DECLARE
extern Attributes the;

/* Where a tensor was found the last time. */
struct Known {
    const void *object = nullptr, *tensor = nullptr, *storage = nullptr;

    /* What find reads: of each object the first and the last byte, wherever the lines of the cache are cut. Always
       inlined: a function that does nothing else is taken for one that does nothing. */
    __attribute__((always_inline)) void load() const {
        load_references();
        ahead(tensor, sizeof(c10::TensorImpl) - 32), ahead(tensor, sizeof(c10::TensorImpl) - 1);
        ahead(storage, 31), ahead(storage, 60);
    }

    /* What is_dead reads. */
    __attribute__((always_inline)) void load_references() const {
        ahead(object, 0), ahead(object, 31);
        ahead(tensor, 8), ahead(tensor, 31);
        ahead(storage, 8);
    }

    void note(PyObject *found) {
        const c10::TensorImpl *impl = THPVariable_Unpack(found).unsafeGetTensorImpl();
        const void *held = impl->unsafe_storage().unsafeGetStorageImpl();
        if (object != found || tensor != impl || storage != held)
            *this = Known{found, impl, held};
    }

    __attribute__((always_inline)) static void ahead(const void *begin, size_t offset) {
        __builtin_prefetch(static_cast<const char *>(begin) + offset);
    }
};

struct Watched {
    uint64_t index, address;
    Known known;
    bool dies = false;      // an input that has to be dead once it is let go of
    bool dies_here = false; // and of this call that was seen when it was looked at
};

/* The inputs of a call: in the order of the caller, or in that of the recording. */
struct Inputs {
    PyObject *list;
    const std::vector<uint64_t> *order; // NULL where both are the same

    Py_ssize_t place(uint64_t index) const { return static_cast<Py_ssize_t>(order ? (*order)[index] : index); }

    /* NULL where there is none. */
    PyObject *at(uint64_t index) const {
        if (order != nullptr && index >= order->size())
            return nullptr;
        const Py_ssize_t found = place(index);
        return found >= 0 && found < PyList_GET_SIZE(list) ? PyList_GET_ITEM(list, found) : nullptr;
    }

    /* Puts them into the order of the recording; false where the list has another length by now. */
    bool arrange() {
        if (order == nullptr)
            return true;
        if (static_cast<size_t>(PyList_GET_SIZE(list)) != order->size())
            return false;
        std::vector<PyObject *> items;
        for (const uint64_t place : *order)
            items.push_back(PyList_GET_ITEM(list, static_cast<Py_ssize_t>(place)));
        for (size_t i = 0; i < items.size(); i++) // the list holds what it held, so no reference changes
            PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), items[i]);
        order = nullptr;
        return true;
    }

    /* Takes that back. */
    void arrange_back(const std::vector<uint64_t> *before) {
        if (order == before || static_cast<size_t>(PyList_GET_SIZE(list)) != before->size())
            return;
        std::vector<PyObject *> items(before->size());
        for (size_t i = 0; i < items.size(); i++)
            items[(*before)[i]] = PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i));
        for (size_t i = 0; i < items.size(); i++)
            PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), items[i]);
        order = before;
    }
};

/* False with an exception. */
inline bool is_tuple(PyObject *object) {
    if (!PyTuple_Check(object))
        PyErr_Format(PyExc_TypeError, "expected a tuple, got %s", Py_TYPE(object)->tp_name);
    return PyTuple_Check(object);
}

/* Numbers that are packed in bytes; false with an exception. */
bool unpack(PyObject *bytes, std::vector<uint64_t> *numbers);

/* Outputs that have to be dead. */
struct Mortal {
    struct Run {
        PyObject *list;
        std::vector<Watched> outputs;
    };
    PyObject *ask = nullptr; // in Python, of which more outputs can be asked; NULL where there are none
    std::vector<Run> runs;

    /* From None, or from pairs of lists and indices and what to ask; false with an exception. */
    bool take(PyObject *given);
    int visit(visitproc visit, void *arg) const;
    void clear();
    /* 1, 0, or -1 with an exception; `asked` becomes true where Python had to be asked, and so other code may have run. */
    int are_dead(bool *asked);
    /* Whether those of them that are inputs were seen to die; false where it is not known which are. */
    bool died_as(const std::vector<Watched> &inputs) const;
    /* Whether the others seem dead. */
    bool others_seem_dead() const;
    /* Finds out which are inputs, by where both were at the call that is done; whether any are, if it was not known. */
    bool find_among(std::vector<Watched> *inputs);

  private:
    struct Dying {
        size_t input; // its place among the inputs, or nowhere
        uint64_t index;
    };
    std::vector<Dying> places; // of each one; empty where that is not known
    bool seem_dead();
};

struct Replay {
    PyObject_HEAD
    struct Returned {
        uint64_t input, output;
    };
    struct State {
        PyObject *recording = nullptr; // a weak reference
        PyObject *live = nullptr;      // or NULL
        PyObject *log = nullptr, *graph = nullptr;
        PyObject *cached = nullptr, *others = nullptr; // what is returned, see outputs() in native/tensors.cpp
        std::vector<Watched> fixed, asked;
        std::vector<uint64_t> managed; // let go of
        std::vector<uint64_t> lasting; // of them those that need not be seen to die
        std::vector<Returned> returned; // inputs that are outputs as they are
        bool in_python = false;        // an output is something else of an input
        Mortal before, after;

        std::array<PyObject *, 6> held() const { return {recording, live, log, graph, cached, others}; }
    } *state;
};

/* What tells many choices apart, see native/candidates.cpp. */
struct CandidateFilter {
    PyObject_HEAD
    struct Output {
        PyObject *list;
        uint64_t index;
        size_t row; // where the row of choices begins
    };
    struct Input {
        uint64_t index;
        size_t row;
        std::vector<std::pair<uint64_t, size_t>> addresses; // sorted, each with a row
    };
    struct State {
        size_t count = 0, words = 0; // a row's
        std::vector<uint64_t> rows;
        std::vector<Output> held;
        std::vector<Input> places;
    } *state;
};

extern PyType_Spec replay_spec, call_spec, patcher_spec, candidate_filter_spec;

/* The state of a CandidateFilter; NULL for any other object. */
CandidateFilter::State *candidate_filter_in(PyObject *object);

/* The first choice from `position` on that may fit, or their number; false where an input is none or no tensor. */
bool sift(const CandidateFilter::State *state, const Inputs &inputs, size_t *position);

/* The state of a Replay; NULL for any other object. */
Replay::State *replay_in(PyObject *object);

/* Whether a Patcher made the graph of live inputs hold addresses, given as a list. */
Answer patch(PyObject *patcher, PyObject *live, PyObject *seen);

/* What Recording.accepts does. by_hand, and nothing was done, where Python has to do it; `is_copied` where it has to replay. */
Answer take(Replay::State *state, Inputs &inputs, bool *is_copied);

/* Launches the graph; false with an exception. */
bool launch(const Replay::State *replay);

/* Outputs of a recording that are at hand, for as long as no other code runs: those in its list, what stands for others,
   and inputs in the places of those that they are. False where they have to be made. */
bool at_hand(const Replay::State *replay, PyObject *returned, std::vector<PyObject *> *outputs);

/* The outputs of a recording as a list; NULL with an exception. */
Ref outputs_of(PyObject *recording, const Replay::State *replay, PyObject *returned);

/* Where a parameter was found the last time. */
struct Parameter {
    const void *tensor = nullptr, *autograd = nullptr;
};

/* Whether what the backward that is under way gives is accumulated, and seen by nobody; see native/gradients.cpp. What it
   read of parameters is noted, and loaded ahead the next time. */
bool are_only_accumulated(std::vector<Parameter> *parameters);

/* The function that makes an object, for a type. */
template <PyObject *(*make)(PyTypeObject *, PyObject *, PyObject *)>
PyObject *translate(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    return translated([&] { return make(type, arguments, keywords); });
}

} // namespace pygraph
