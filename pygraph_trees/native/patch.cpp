/* New addresses for an instantiated graph: pygraph_trees.native._fast_path.Patcher.

   It serves graphs in which only kernel parameters are patched. Called with live inputs and their addresses, it does
   what LiveInputs.prepare does and returns True if each address fitted before. Otherwise, or if the driver refuses, it
   restores what it set and returns False: Python does it. If restoring fails, the patches are stuck. native/DESIGN.md
   describes the arguments. */

#include "fast_path.h"

using namespace pygraph;

namespace {

struct Word {
    uint64_t address, position, addend;
};

struct Node {
    uint64_t handle, parameters;
};

struct Holder {
    uint64_t position, node;
};

struct Patcher {
    PyObject_HEAD
    struct State {
        PyObject *patches = nullptr; // keeps the nodes and the words' memory alive
        std::vector<Word> words;
        std::vector<Node> nodes;
        std::vector<std::vector<size_t>> holders; // by position of the input: its nodes
        void *exec = nullptr;
        int (*set)(void *exec, void *node, const void *parameters) = nullptr;
        int (*get_context)(void **context) = nullptr;
        void *context = nullptr; // in which nodes are set
        std::vector<uint64_t> addresses, before; // of this call, and those that the graph holds
        std::vector<char> is_due;                // by node
        uint64_t ask_every = 0, calls = 0;       // calls since the last one that was left to Python
    } *state;
};

/* The items of a list or tuple of `count` items; NULL if it is something else. */
PyObject **items_of(const Ref &object, size_t count) {
    if (!object || (!PyList_Check(object.get()) && !PyTuple_Check(object.get())) ||
        static_cast<size_t>(PySequence_Fast_GET_SIZE(object.get())) != count)
        return nullptr;
    return PySequence_Fast_ITEMS(object.get());
}

/* Whether the graph holds the addresses that Python has noted, and addresses that fitted still fit. */
Answer is_known(const Patcher::State *state, PyObject *live, size_t count) {
    Ref settled = the.live__settled.of(live);
    Ref broken = settled ? the.patches_broken.of(state->patches) : Ref();
    if (!broken)
        return Answer::error;
    if (items_of(settled, count) == nullptr || broken.get() != Py_False)
        return Answer::no;
    Ref pool = the.live__pool.of(live);
    Ref seen = pool ? the.live__pool_seen.of(live) : Ref();
    Ref changes = seen ? the.pool_changes.of(pool.get()) : Ref();
    const int same = changes ? PyObject_RichCompareBool(changes.get(), seen.get(), Py_EQ) : -1;
    const int temporary = same > 0 ? the.live_temporary.is_true(live) : 0;
    if (same < 0 || temporary < 0)
        return Answer::error;
    return same && !temporary ? Answer::yes : Answer::no;
}

/* Fills the list `given`, and `addresses`, with the addresses for the graph if the inputs are at `seen`. Nodes that
   hold a changed address become due. */
Answer find(Patcher::State *state, PyObject *live, PyObject *seen, const Ref &given) {
    const auto count = static_cast<size_t>(PyList_GET_SIZE(seen));
    Ref held = the.patches_addresses.of(state->patches);
    Ref fitting = held ? the.live__fitting.of(live) : Ref();
    if (!fitting)
        return Answer::error;
    PyObject **before = items_of(held, count), **fits = items_of(fitting, count);
    if (before == nullptr || fits == nullptr)
        return Answer::no;
    std::fill(state->is_due.begin(), state->is_due.end(), 0);
    for (size_t i = 0; i < count; i++) {
        const auto position = static_cast<Py_ssize_t>(i);
        PyObject *found = PyDict_Check(fits[i]) ? PyDict_GetItemWithError(fits[i], PyList_GET_ITEM(seen, position)) : nullptr;
        if (found == nullptr)
            return PyErr_Occurred() ? Answer::error : Answer::no;
        PyList_SET_ITEM(given.get(), position, Py_NewRef(found));
        state->addresses[i] = PyLong_AsUnsignedLongLong(found);
        state->before[i] = PyLong_AsUnsignedLongLong(before[i]);
        if (state->addresses[i] != state->before[i])
            for (const size_t node : state->holders[i])
                state->is_due[node] = 1;
        if (PyErr_Occurred())
            return Answer::error;
    }
    return Answer::yes;
}

/* Writes addresses and sets the due nodes among the first ones; returns how many nodes it passed before a refusal. */
size_t set(const Patcher::State *state, const std::vector<uint64_t> &addresses, size_t first) {
    for (const Word &word : state->words) {
        const uint64_t value = addresses[word.position] + word.addend;
        std::memcpy(reinterpret_cast<void *>(word.address), &value, sizeof value); // a parameter may be unaligned
    }
    for (size_t i = 0; i < first; i++) {
        const Node &node = state->nodes[i];
        if (state->is_due[i] && state->set(state->exec, reinterpret_cast<void *>(node.handle),
                                           reinterpret_cast<const void *>(node.parameters)) != 0)
            return i;
    }
    return first;
}

/* Gives the graph new addresses. While `broken` is set, Python does not launch the graph, whatever fails. Lists are
   made first, since making one may collect garbage, which may call the same graph; later steps do not. */
Answer apply(Patcher::State *state, PyObject *live, PyObject *seen) {
    const auto count = static_cast<size_t>(PyList_GET_SIZE(seen));
    if (count != state->holders.size())
        return Answer::no;
    if (state->ask_every != 0 && ++state->calls >= state->ask_every) {
        state->calls = 0;
        return Answer::no;
    }
    void *context = nullptr; // may be another device's, or none in a thread that has not used the GPU yet
    if (state->get_context(&context) != 0 || context != state->context)
        return Answer::no;
    Ref given(PyList_New(static_cast<Py_ssize_t>(count))), nothing(PyList_New(0));
    if (!given || !nothing)
        return Answer::error;
    const Answer known = is_known(state, live, count);
    const Answer found = known == Answer::yes ? find(state, live, seen, given) : known;
    if (found != Answer::yes)
        return found;
    Ref held = the.patches_addresses.of(state->patches);
    if (!held || !the.live__settled.set(live, Py_None) || !the.live__seen.set(live, nothing.get()) ||
        !the.patches_broken.set(state->patches, Py_True))
        return Answer::error;
    const size_t all = state->nodes.size(), done = set(state, state->addresses, all);
    if (done < all) {
        const bool is_back = set(state, state->before, done) == done;
        const bool is_said = is_back ? the.patches_broken.set(state->patches, Py_False)
                                     : the.patches_is_stuck.set(state->patches, Py_True);
        return is_said ? Answer::no : Answer::error;
    }
    for (size_t i = 0; i < count; i++) {
        PyObject *item = PyList_GET_ITEM(given.get(), static_cast<Py_ssize_t>(i));
        if (PyList_SetItem(held.get(), static_cast<Py_ssize_t>(i), Py_NewRef(item)) < 0)
            return Answer::error;
    }
    Ref before = the.patches_set_calls.of(state->patches), more(PyLong_FromSsize_t(std::count(state->is_due.begin(), state->is_due.end(), 1)));
    Ref calls(before && more ? PyNumber_Add(before.get(), more.get()) : nullptr);
    if (!calls || !the.patches_set_calls.set(state->patches, calls.get()) ||
        !the.live__addresses.set(live, given.get()) || !the.patches_broken.set(state->patches, Py_False) ||
        !the.live__seen.set(live, seen) || !the.live__settled.set(live, seen))
        return Answer::error;
    return Answer::yes;
}

PyObject *make_patcher(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static const char *known[] = {"patches", "words", "nodes", "holders", "inputs", "exec", "set", "get_context", "context", "ask_every",
                                  nullptr};
    PyObject *patches, *words, *nodes, *holders;
    unsigned long long exec, set, get_context, context, ask_every;
    Py_ssize_t inputs;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OOOOnKKKKK", const_cast<char **>(known), &patches, &words, &nodes,
                                     &holders, &inputs, &exec, &set, &get_context, &context, &ask_every))
        return nullptr;
    Packed<Word> written;
    Packed<Node> all;
    Packed<Holder> held;
    if (!written.take(words) || !all.take(nodes) || !held.take(holders))
        return nullptr;
    Ref made(type->tp_alloc(type, 0));
    if (!made)
        return nullptr;
    auto *state = reinterpret_cast<Patcher *>(made.get())->state = new Patcher::State;
    state->patches = Py_NewRef(patches);
    state->exec = reinterpret_cast<void *>(exec);
    state->set = reinterpret_cast<int (*)(void *, void *, const void *)>(set);
    state->get_context = reinterpret_cast<int (*)(void **)>(get_context);
    state->context = reinterpret_cast<void *>(context);
    state->ask_every = ask_every;
    const auto count = static_cast<size_t>(std::max<Py_ssize_t>(inputs, 0));
    state->addresses.resize(count);
    state->before.resize(count);
    state->holders.resize(count);
    for (Py_ssize_t i = 0; i < all.count; i++)
        state->nodes.push_back(all[i]);
    state->is_due.resize(state->nodes.size());
    bool fits = exec != 0 && set != 0 && get_context != 0 && context != 0;
    for (Py_ssize_t i = 0; i < written.count; i++) {
        state->words.push_back(written[i]);
        fits = fits && written[i].position < count && written[i].address != 0;
    }
    for (Py_ssize_t i = 0; i < held.count; i++) {
        fits = fits && held[i].position < count && held[i].node < state->nodes.size();
        if (fits)
            state->holders[held[i].position].push_back(held[i].node);
    }
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "expected numbers of inputs and nodes that there are, and addresses");
        return nullptr;
    }
    return made.release();
}

PyObject *call_patcher(PyObject *self, PyObject *arguments, PyObject *keywords) {
    static const char *known[] = {"live", "seen", nullptr};
    PyObject *live, *seen;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO!", const_cast<char **>(known), &live, &PyList_Type, &seen))
        return nullptr;
    const Answer answer = patch(self, live, seen);
    return answer == Answer::error ? nullptr : PyBool_FromLong(answer == Answer::yes);
}

int patcher_traverse(PyObject *self, visitproc visit, void *arg) {
    const auto *state = reinterpret_cast<Patcher *>(self)->state;
    Py_VISIT(Py_TYPE(self));
    if (state != nullptr)
        Py_VISIT(state->patches);
    return 0;
}

int patcher_clear(PyObject *self) {
    auto *state = reinterpret_cast<Patcher *>(self)->state;
    reinterpret_cast<Patcher *>(self)->state = nullptr;
    if (state != nullptr)
        Py_XDECREF(state->patches);
    delete state;
    return 0;
}

void patcher_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    patcher_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

PyType_Slot patcher_slots[] = {
    {Py_tp_doc, const_cast<char *>("Other addresses for an instantiated graph; see the source.")},
    {Py_tp_new, reinterpret_cast<void *>(translate<make_patcher>)},
    {Py_tp_call, reinterpret_cast<void *>(call_patcher)},
    {Py_tp_dealloc, reinterpret_cast<void *>(patcher_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void *>(patcher_traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(patcher_clear)},
    {0, nullptr},
};

} // namespace

PyType_Spec pygraph::patcher_spec = {
    "pygraph_trees.native._fast_path.Patcher", sizeof(Patcher), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, patcher_slots,
};

Answer pygraph::patch(PyObject *patcher, PyObject *live, PyObject *seen) {
    if (Py_TYPE(patcher)->tp_dealloc != patcher_dealloc)
        return Answer::no;
    Patcher::State *state = reinterpret_cast<Patcher *>(patcher)->state;
    return state == nullptr ? Answer::no : apply(state, live, seen);
}
