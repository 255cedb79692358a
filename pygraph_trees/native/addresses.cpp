/* The addresses of one instantiated graph: pygraph_trees.native._fast_path.Addresses, and Counter.

   The slow path reports which addresses fit (`accept`), and when the graph holds all that a call needs (`settle`). The
   fast path then gives the graph addresses that fit by itself, if only kernels hold them. native/DESIGN.md describes the
   arguments. */

#include "addresses.h"

#include <structmember.h>

using namespace pygraph;

namespace {

constexpr size_t MOST_ACCEPTED = 256; // addresses of one input: more than an allocator uses in turn

constexpr uint64_t MOST_ALIGNED = 512; // bytes: see indirection/routes.py

struct Holder {
    uint64_t position, node;
};

/* Takes the numbers of a list of `count` items; false with an exception. */
bool take_list(PyObject *list, size_t count, std::vector<uint64_t> *numbers) {
    Items items;
    if (!items.take(list))
        return false;
    if (static_cast<size_t>(items.count) != count) {
        PyErr_SetString(PyExc_ValueError, "expected an address for each input");
        return false;
    }
    std::vector<uint64_t> found;
    for (Py_ssize_t i = 0; i < items.count; i++)
        found.push_back(PyLong_AsUnsignedLongLong(items.at[i]));
    if (PyErr_Occurred())
        return false;
    *numbers = std::move(found);
    return true;
}

PyObject *as_list(const std::vector<uint64_t> &numbers) {
    Ref list(PyList_New(static_cast<Py_ssize_t>(numbers.size())));
    for (size_t i = 0; list && i < numbers.size(); i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(numbers[i]);
        if (number == nullptr)
            return nullptr;
        PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), number);
    }
    return list.release();
}

/* Counts the inputs whose addresses change, until the route is chosen. */
void count_changes(Addresses::State *state, const std::vector<uint64_t> &next) {
    if (state->countdown == 0 || next == state->held)
        return;
    if (state->countdown > 1)
        state->countdown--;
    for (size_t i = 0; i < next.size(); i++)
        state->changes[i] += next[i] != state->held[i];
}

/* Finds the next addresses in the graph, and the nodes to set; false if an input's address is not known to fit. */
bool find_given(Addresses::State *state, const std::vector<uint64_t> &seen) {
    std::fill(state->is_due.begin(), state->is_due.end(), 0);
    state->given = state->held;
    for (size_t i = seen.size(); i < state->held.size(); i++) // nodes that hold values have those of the last call
        for (const size_t node : state->holders[i])
            state->is_due[node] = 1;
    if (seen == state->seen)
        return true;
    for (size_t i = 0; i < seen.size(); i++) {
        if (seen[i] == state->seen[i]) // the graph is settled
            continue;
        const auto found = state->accepted[i].find(seen[i]);
        const bool is_known = found != state->accepted[i].end();
        if (!is_known && !(state->is_own[i] && seen[i] % MOST_ALIGNED == 0))
            return false;
        state->given[i] = is_known ? found->second : seen[i];
        if (state->given[i] != state->held[i])
            for (const size_t node : state->holders[i])
                state->is_due[node] = 1;
    }
    return true;
}

/* Writes addresses and sets the due nodes among the first ones; returns how many nodes it passed before a refusal. */
size_t set(const Addresses::State *state, const std::vector<uint64_t> &addresses, size_t first) {
    for (const Addresses::Word &word : state->words) {
        const uint64_t value = addresses[word.position] + word.addend;
        std::memcpy(reinterpret_cast<void *>(word.address), &value, sizeof value); // a parameter may be unaligned
    }
    for (size_t i = 0; i < first; i++) {
        const Addresses::Node &node = state->nodes[i];
        if (state->is_due[i] && state->set(state->exec, reinterpret_cast<void *>(node.handle),
                                           reinterpret_cast<const void *>(node.parameters)) != 0)
            return i;
    }
    return first;
}

/* Not tracked by the collector: what an Addresses holds is in no cycle. */
PyObject *make_addresses(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static const char *known[] = {"owner", "pool_changes", "sets", "held", "own", "words", "nodes", "holders",
                                  "exec", "set", "get_context", "context", "count", "values", nullptr};
    PyObject *owner, *pool_changes, *sets, *held, *own, *words, *nodes, *holders, *values = nullptr;
    unsigned long long exec, set, get_context, context, inputs = ~0ULL;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OOOOOOOOKKKK|KO", const_cast<char **>(known), &owner,
                                     &pool_changes, &sets, &held, &own, &words, &nodes, &holders, &exec, &set,
                                     &get_context, &context, &inputs, &values))
        return nullptr;
    Packed<uint64_t> addresses;
    std::vector<uint64_t> own_positions;
    Packed<Addresses::Word> written;
    Packed<Addresses::Node> all;
    Packed<Holder> held_by;
    if (!addresses.take(held) || !unpack(own, &own_positions) || !written.take(words) || !all.take(nodes) || !held_by.take(holders))
        return nullptr;
    if (counter_in(pool_changes) == nullptr || counter_in(sets) == nullptr) {
        PyErr_SetString(PyExc_TypeError, "expected two Counter objects");
        return nullptr;
    }
    Ref made(type->tp_alloc(type, 0));
    if (!made)
        return nullptr;
    auto *state = reinterpret_cast<Addresses *>(made.get())->state = new Addresses::State;
    state->owner = Py_NewRef(owner);
    state->pool_changes = Py_NewRef(pool_changes);
    state->sets = Py_NewRef(sets);
    state->pool_seen = counter_in(pool_changes)->value;
    state->exec = reinterpret_cast<void *>(exec);
    state->set = reinterpret_cast<int (*)(void *, void *, const void *)>(set);
    state->get_context = reinterpret_cast<int (*)(void **)>(get_context);
    state->context = reinterpret_cast<void *>(context);
    const auto count = static_cast<size_t>(addresses.count);
    for (Py_ssize_t i = 0; i < addresses.count; i++)
        state->held.push_back(addresses[i]);
    state->given.resize(count);
    state->changes.resize(count);
    state->is_own.resize(count);
    state->accepted.resize(std::min<size_t>(inputs, count));
    state->holders.resize(count);
    if (values != nullptr && !state->staged.take(values))
        return nullptr;
    for (Py_ssize_t i = 0; i < all.count; i++)
        state->nodes.push_back(all[i]);
    state->is_due.resize(state->nodes.size());
    for (const uint64_t position : own_positions)
        if (position < count)
            state->is_own[position] = 1;
    bool fits = state->nodes.empty() || (exec != 0 && set != 0 && get_context != 0 && context != 0);
    for (Py_ssize_t i = 0; i < written.count; i++) {
        state->words.push_back(written[i]);
        fits = fits && written[i].position < count && written[i].address != 0;
    }
    for (Py_ssize_t i = 0; i < held_by.count; i++) {
        fits = fits && held_by[i].position < count && held_by[i].node < state->nodes.size();
        if (fits)
            state->holders[held_by[i].position].push_back(held_by[i].node);
    }
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "expected numbers of inputs and nodes that there are, and addresses");
        return nullptr;
    }
    return made.release();
}

void addresses_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    const auto *state = reinterpret_cast<Addresses *>(self)->state;
    if (state != nullptr) {
        Py_XDECREF(state->owner);
        Py_XDECREF(state->pool_changes);
        Py_XDECREF(state->sets);
    }
    delete state;
    type->tp_free(self);
    Py_DECREF(type);
}

Addresses::State *state_of(PyObject *self) { return reinterpret_cast<Addresses *>(self)->state; }

PyObject *accept(PyObject *self, PyObject *arguments) {
    unsigned long long position, address, given;
    if (!PyArg_ParseTuple(arguments, "KKK", &position, &address, &given))
        return nullptr;
    Addresses::State *state = state_of(self);
    if (position >= state->accepted.size())
        return PyErr_Format(PyExc_IndexError, "there is no input %llu", position);
    auto &accepted = state->accepted[position];
    if (accepted.size() >= MOST_ACCEPTED)
        accepted.clear();
    accepted[address] = given;
    Py_RETURN_NONE;
}

PyObject *forget(PyObject *self, PyObject *) {
    Addresses::State *state = state_of(self);
    for (auto &accepted : state->accepted)
        accepted.clear();
    state->is_settled = false;
    state->pool_seen = reinterpret_cast<const Counter *>(state->pool_changes)->value;
    Py_RETURN_NONE;
}

PyObject *settle(PyObject *self, PyObject *list) {
    Addresses::State *state = state_of(self);
    if (!take_list(list, state->accepted.size(), &state->seen))
        return nullptr;
    state->is_settled = true;
    Py_RETURN_NONE;
}

PyObject *unsettle(PyObject *self, PyObject *) {
    state_of(self)->is_settled = false;
    Py_RETURN_NONE;
}

PyObject *note_held(PyObject *self, PyObject *list) {
    std::vector<uint64_t> next;
    Addresses::State *state = state_of(self);
    if (!take_list(list, state->held.size(), &next))
        return nullptr;
    count_changes(state, next);
    state->held = std::move(next);
    Py_RETURN_NONE;
}

PyObject *is_settled(PyObject *self, PyObject *list) {
    std::vector<uint64_t> seen;
    const Addresses::State *state = state_of(self);
    return take_list(list, state->accepted.size(), &seen) ? PyBool_FromLong(has_settled(state) && state->seen == seen) : nullptr;
}

PyObject *try_patch(PyObject *self, PyObject *list) {
    std::vector<uint64_t> seen;
    Addresses::State *state = state_of(self);
    return take_list(list, state->accepted.size(), &seen) ? PyBool_FromLong(pygraph::patch(state, seen)) : nullptr;
}

/* Calls a method and turns C++ exceptions into Python's. */
template <PyObject *(*method)(PyObject *, PyObject *)> PyObject *safely(PyObject *self, PyObject *argument) {
    return translated([&] { return method(self, argument); });
}

PyObject *get_held(PyObject *self, void *) { return as_list(state_of(self)->held); }

PyObject *get_seen(PyObject *self, void *) {
    return state_of(self)->is_settled ? as_list(state_of(self)->seen) : Py_NewRef(Py_None);
}

PyObject *get_is_stuck(PyObject *self, void *) { return PyBool_FromLong(state_of(self)->is_stuck); }

PyObject *get_changes(PyObject *self, void *) { return as_list(state_of(self)->changes); }

PyObject *get_countdown(PyObject *self, void *) { return PyLong_FromUnsignedLongLong(state_of(self)->countdown); }

int set_countdown(PyObject *self, PyObject *value, void *) {
    const unsigned long long number = value == nullptr ? 0 : PyLong_AsUnsignedLongLong(value);
    if (PyErr_Occurred())
        return -1;
    state_of(self)->countdown = number;
    return 0;
}

PyMethodDef addresses_methods[] = {
    {"accept", safely<accept>, METH_VARARGS, "The graph can be given `given` if an input is at an address."},
    {"forget", safely<forget>, METH_NOARGS, "No address is known to fit, until the pool changes again."},
    {"settle", safely<settle>, METH_O, "The graph holds all that it needs for inputs at these addresses."},
    {"unsettle", safely<unsettle>, METH_NOARGS, "Python changes what the graph holds."},
    {"hold", safely<note_held>, METH_O, "The graph holds these addresses."},
    {"is_settled", safely<is_settled>, METH_O, "Whether the graph needs no change for inputs at these addresses."},
    {"patch", safely<try_patch>, METH_O, "Gives the graph addresses as a fast replay does; false if Python must."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef addresses_fields[] = {
    {"held", get_held, nullptr, "The addresses that the graph holds.", nullptr},
    {"seen", get_seen, nullptr, "The addresses of the inputs of the latest call; None unless the graph is settled.", nullptr},
    {"is_stuck", get_is_stuck, nullptr, "Whether the graph must not be launched again.", nullptr},
    {"changes", get_changes, nullptr, "How often each input's address has changed since the countdown began.", nullptr},
    {"countdown", get_countdown, set_countdown, "Replays with new addresses until one is left to Python; 0 for never.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot addresses_slots[] = {
    {Py_tp_doc, const_cast<char *>("The addresses of one instantiated graph; see the source.")},
    {Py_tp_new, reinterpret_cast<void *>(+[](PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
         return translated([&] { return make_addresses(type, arguments, keywords); });
     })},
    {Py_tp_dealloc, reinterpret_cast<void *>(addresses_dealloc)},
    {Py_tp_methods, addresses_methods},
    {Py_tp_getset, addresses_fields},
    {0, nullptr},
};

PyMemberDef counter_members[] = {
    {"value", T_ULONGLONG, offsetof(Counter, value), 0, "The number."},
    {nullptr, 0, 0, 0, nullptr},
};

PyObject *make_counter(PyTypeObject *type, PyObject *, PyObject *) { return type->tp_alloc(type, 0); }

void counter_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

PyType_Slot counter_slots[] = {
    {Py_tp_doc, const_cast<char *>("A number that Python and C++ change.")},
    {Py_tp_new, reinterpret_cast<void *>(make_counter)},
    {Py_tp_dealloc, reinterpret_cast<void *>(counter_dealloc)},
    {Py_tp_members, counter_members},
    {0, nullptr},
};

} // namespace

PyType_Spec pygraph::addresses_spec = {
    "pygraph_trees.native._fast_path.Addresses", sizeof(Addresses), 0, Py_TPFLAGS_DEFAULT, addresses_slots,
};

PyType_Spec pygraph::counter_spec = {
    "pygraph_trees.native._fast_path.Counter", sizeof(Counter), 0, Py_TPFLAGS_DEFAULT, counter_slots,
};

Counter *pygraph::counter_in(PyObject *object) {
    return Py_TYPE(object)->tp_dealloc == counter_dealloc ? reinterpret_cast<Counter *>(object) : nullptr;
}

Addresses::State *pygraph::addresses_in(PyObject *object) {
    return Py_TYPE(object)->tp_dealloc == addresses_dealloc ? reinterpret_cast<Addresses *>(object)->state : nullptr;
}

bool pygraph::has_settled(const Addresses::State *state) {
    return state->is_settled && reinterpret_cast<const Counter *>(state->pool_changes)->value == state->pool_seen;
}

bool pygraph::patch(Addresses::State *state, const std::vector<uint64_t> &seen) {
    if (!has_settled(state) || state->nodes.empty() || seen.size() != state->accepted.size() ||
        (state->countdown == 1 && seen != state->seen))
        return false;
    void *context = nullptr; // may be another device's, or none in a thread that has not used the GPU yet
    if (state->get_context(&context) != 0 || context != state->context || !find_given(state, seen))
        return false;
    const size_t all = state->nodes.size(), done = set(state, state->given, all);
    if (done < all) {
        state->is_settled = false;
        state->is_stuck = set(state, state->held, done) != done;
        return false;
    }
    count_changes(state, state->given);
    state->held = state->given;
    state->seen = seen;
    counter_in(state->sets)->value += static_cast<unsigned long long>(std::count(state->is_due.begin(), state->is_due.end(), 1));
    return true;
}
