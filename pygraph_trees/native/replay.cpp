/* One recording's part in a fast replay: pygraph_trees.native._fast_path.Replay.

   It holds the required addresses of static inputs, the inputs whose addresses the graph is given, the outputs that must
   be dead, and what a call returns. Python decides about unknown addresses, and about outputs that do not seem dead.
   Outputs that are inputs of the call too die when the call releases them: that is seen before the launch, without
   releasing them. trees/recordings/replaying.py makes it. */

#include "fast_path.h"

#include <optional>
#include <unordered_map>
#include <unordered_set>

using namespace pygraph;

namespace {

constexpr size_t NOWHERE = ~size_t{0};

/* NULL if the list has become shorter. */
PyObject *item_of(PyObject *list, uint64_t index) {
    return index < static_cast<uint64_t>(PyList_GET_SIZE(list)) ? PyList_GET_ITEM(list, static_cast<Py_ssize_t>(index))
                                                                : nullptr;
}

/* Whether an output seems dead. If the program gave it other memory, somebody may hold the storage that it had. */
bool seems_dead(PyObject *list, uint64_t index, uint64_t address) {
    PyObject *object = item_of(list, index);
    return object != nullptr && object != Py_None && is_dead(object) &&
           reinterpret_cast<uintptr_t>(THPVariable_Unpack(object).unsafeGetTensorImpl()->unsafe_storage().data()) ==
               address;
}

/* Takes (input, output, block or None, layout or None): see trees/recordings/replaying.py. */
Replay::Returned returned_of(const py::handle &given, const Replay &replay) {
    using Given = std::tuple<uint64_t, size_t, std::optional<size_t>, py::object>;
    const auto [input, output, block, layout] = given.cast<Given>();
    const OwnMemory *own = replay.own.get();
    if (output >= py::len(replay.others) || (block && (own == nullptr || *block >= own->blocks.size())))
        throw py::value_error("expected an output and a block that exist");
    Replay::Returned made{.input = input, .output = output, .is_own = block.has_value()};
    made.is_whole = !block && layout.is_none();
    if (!layout.is_none())
        made.layout = Strided::of(layout);
    if (block) {
        const OwnMemory::Block &lent = own->blocks[*block];
        if (layout.is_none())
            made.layout = lent.layout;
        made.lends = lent.lends && made.layout == lent.layout;
    }
    return made;
}

/* Checks that the fixed inputs are where they should be, and notes the addresses of the others. */
Answer find(Replay *state, const Inputs &inputs) {
    for (std::vector<Watched> *all : {&state->fixed, &state->asked})
        for (size_t i = 0; i < all->size(); i++) {
            load_ahead<&Watched::load>(*all, i);
            Watched &input = (*all)[i];
            PyObject *object = inputs.at(input.index);
            if (object == nullptr || !is_tensor(object))
                return Answer::no; // the slow path raises the error
            const at::Tensor &tensor = THPVariable_Unpack(object);
            const uint64_t address = reinterpret_cast<uintptr_t>(tensor.data_ptr());
            if (is_lazy(tensor))
                return Answer::no; // as a tangent may be at one call and not at the next
            if (all == &state->asked)
                input.address = address;
            else if (address != input.address)
                return Answer::no;
            input.known.note(object);
            if (input.dies)
                input.dies_here = is_dead(object, 2); // the list of inputs has the other reference
        }
    return Answer::yes;
}

/* Whether the graph needs no change for inputs at the addresses that were found. */
bool is_settled(const Addresses *known, const std::vector<Watched> &inputs) {
    return known->has_settled() &&
           std::equal(inputs.begin(), inputs.end(), known->seen.begin(), known->seen.end(),
                      [](const Watched &input, uint64_t address) { return input.address == address; });
}

/* Makes the graph hold the addresses that were found, or asks Python to do so and sets `asked`. */
Answer prepare(Replay *state, Inputs &inputs, bool *is_copied, bool *asked) {
    Addresses *known = state->addresses.get();
    const bool has_values = known != nullptr && !known->values.empty();
    if (known != nullptr && !has_values && is_settled(known, state->asked))
        return Answer::yes;
    std::vector<uint64_t> addresses; // of this call: making a list may collect garbage, which may call the same graph
    addresses.reserve(state->asked.size());
    for (const Watched &input : state->asked)
        addresses.push_back(input.address);
    if (known != nullptr && (!has_values || known->write_values(inputs)) && known->patch(addresses))
        return Answer::yes;
    *asked = true;
    Ref seen(PyList_New(static_cast<Py_ssize_t>(addresses.size())));
    for (size_t i = 0; seen && i < addresses.size(); i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(addresses[i]);
        if (number == nullptr)
            return Answer::error;
        PyList_SET_ITEM(seen.get(), static_cast<Py_ssize_t>(i), number);
    }
    if (!seen)
        return Answer::error;
    if (!inputs.arrange()) {
        PyErr_SetString(PyExc_IndexError, "the inputs have changed");
        return Answer::error;
    }
    const AtTheEnd own(inputs);
    if (!own.appended)
        return Answer::error;
    Ref copies(PyObject_CallFunctionObjArgs(state->prepare, inputs.list, seen.get(), nullptr));
    if (!copies)
        return passed_over();
    *is_copied = copies.get() == Py_True;
    return copies.get() == Py_None ? Answer::no : Answer::yes;
}

PyObject *note_cached(PyObject *self, PyObject *) {
    return translated([&] {
        if (Replay *replay = in<Replay>(self); replay != nullptr)
            note_made(replay);
        return Py_NewRef(Py_None);
    });
}

PyObject *is_untouched(PyObject *self, PyObject *) {
    const Replay *replay = in<Replay>(self);
    return translated([&] { return PyBool_FromLong(replay != nullptr && are_untouched(replay)); });
}

PyMethodDef replay_methods[] = {
    {"note_cached", note_cached, METH_NOARGS, "Notes the cached outputs, which were just made."},
    {"is_untouched", is_untouched, METH_NOARGS, "Whether the program left the cached outputs as they were made."},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef replay_members[] = {
    {"stream", T_LONGLONG, FIELD(Replay, stream), 0, "The number of the stream of the last launch."},
    {nullptr, 0, 0, 0, nullptr},
};

} // namespace

void pygraph::add_replay(py::module_ &module) {
    add_class<Replay>(module, "pygraph_trees.native._fast_path.Replay", 0,
                      {{Py_tp_methods, replay_methods}, {Py_tp_members, replay_members}});
}

void Replay::take(const py::dict &given) {
    const auto flag = [&](const char *name) { return given[name].cast<bool>(); };
    recording = reference(given["recording"]);
    prepare = py::object(given["prepare"]).is_none() ? nullptr : reference(given["prepare"]);
    graph = reference(given["graph"]);
    cached = reference(given["cached"].cast<py::list>());
    others = reference(given["others"].cast<py::list>());
    borrow = reference(given["borrow"]);
    make = reference(given["make"]);
    run = reference(given["run"]);
    addresses = given["addresses"].cast<std::shared_ptr<Addresses>>();
    replays = Counter::of(given["replays"]);
    own = given["own"].cast<std::shared_ptr<OwnMemory>>();
    in_python = flag("in_python");
    python_checks = flag("python_checks");
    has_new_history = flag("has_new_history");
    is_backward = flag("is_backward");
    for (const auto &[index, address] : given["places"].cast<std::vector<std::pair<uint64_t, uint64_t>>>())
        fixed.push_back({index, address, {}});
    for (const uint64_t index : given["patched"].cast<std::vector<uint64_t>>())
        asked.push_back({index, 0, {}});
    lasting = managed = given["managed"].cast<std::vector<uint64_t>>();
    for (const py::handle item : given["returned"].cast<py::tuple>()) {
        returned.push_back(returned_of(item, *this));
        lends |= returned.back().lends;
    }
    before.take(given["before"]);
    after.take(given["after"]);
    outliving.take(given["outliving"]);
    size_t number = 0;
    for (const py::handle other : py::list(given["others"])) {
        if (py::isinstance<py::tuple>(other)) {
            const auto [like] = other.cast<std::tuple<at::Tensor>>();
            empty.push_back({number, like.sizes().vec(), like.strides().vec(), like.options()});
        }
        number++;
    }
    note_made(this);
}

bool Mortal::died_as(const std::vector<Watched> &inputs) const {
    if (places.empty())
        return false;
    const Dying *place = places.data();
    for (const Run &run : runs)
        for (const Dying *end = place + run.outputs.size(); place < end; place++) {
            if (place->input == NOWHERE)
                continue;
            const Watched &input = inputs[place->input];
            if (!input.dies_here || input.known.object != item_of(run.list, place->index))
                return false;
        }
    return true;
}

bool Mortal::others_seem_dead() const {
    const Dying *place = places.data();
    for (const Run &run : runs)
        for (const Dying *end = place + run.outputs.size(); place < end; place++)
            if (place->input == NOWHERE && !seems_dead(run.list, place->index, place->address))
                return false;
    return true;
}

bool Mortal::find_among(std::vector<Watched> *inputs) {
    if (runs.empty() || !places.empty())
        return false;
    std::unordered_map<const void *, size_t> by_object;
    for (size_t i = 0; i < inputs->size(); i++)
        by_object.emplace((*inputs)[i].known.object, i);
    for (const Run &run : runs)
        for (const Watched &output : run.outputs) {
            const auto place = by_object.find(output.known.object);
            places.push_back({place == by_object.end() ? NOWHERE : place->second, output.index, output.address});
            if (place != by_object.end())
                (*inputs)[place->second].dies = true;
        }
    return true;
}

void Mortal::take(const py::object &given) {
    if (given.is_none())
        return;
    using Places = std::vector<std::pair<uint64_t, uint64_t>>;
    const auto [groups, question] = given.cast<std::pair<std::vector<std::pair<py::list, Places>>, py::object>>();
    ask = reference(question);
    for (const auto &[list, places_in_list] : groups) {
        Run &run = runs.emplace_back(Run{reference(list), {}});
        for (const auto &[index, address] : places_in_list)
            run.outputs.push_back({index, address, {}});
    }
}

int Mortal::are_dead(bool *asked) {
    if (ask == nullptr || seem_dead())
        return 1;
    if (PyErr_Occurred())
        return -1;
    *asked = true;
    Ref answer(PyObject_CallNoArgs(ask));
    return answer ? PyObject_IsTrue(answer.get()) : -1;
}

bool Mortal::seem_dead() {
    for (Run &run : runs)
        for (size_t i = 0; i < run.outputs.size(); i++) {
            load_ahead<&Watched::load_references>(run.outputs, i);
            Watched &output = run.outputs[i];
            if (!seems_dead(run.list, output.index, output.address))
                return false;
            output.known.note(item_of(run.list, output.index));
        }
    return true;
}

/* Whether the inputs that were not released are where `find` found them, and own memory is still free. */
static bool are_still_there(const Replay *state, const Inputs &inputs) {
    for (const std::vector<Watched> *all : {&state->fixed, &state->asked})
        for (const Watched &input : *all) {
            PyObject *object = inputs.at(input.index);
            if (object == Py_None)
                continue;
            if (object == nullptr || !is_tensor(object) ||
                reinterpret_cast<uintptr_t>(THPVariable_Unpack(object).data_ptr()) != input.address ||
                (inputs.is_own(input.index) && !inputs.own->is_free(input.index - inputs.own_from)))
                return false;
        }
    return true;
}

/* Releases some inputs; false with an exception. */
static bool release_unneeded(const Inputs &inputs, const std::vector<uint64_t> &indices) {
    for (const uint64_t index : indices) {
        PyObject *input = inputs.at(index); // read again each time, since a release may run other code
        if (input == nullptr) {
            PyErr_SetString(PyExc_IndexError, "the inputs have changed");
            return false;
        }
        PyList_SET_ITEM(inputs.list, inputs.place(index), Py_NewRef(Py_None));
        Py_DECREF(input);
    }
    return true;
}

/* Puts tensors with the same memory in the places of inputs that were released; false with an exception. */
static bool give_back(const Replay *state, const Inputs &inputs) {
    Ref recording(PyObject_CallNoArgs(state->recording));
    for (const uint64_t index : state->managed) {
        if (inputs.at(index) != Py_None)
            continue;
        Ref number(PyLong_FromUnsignedLongLong(index));
        Ref tensor(recording && number
                       ? PyObject_CallFunctionObjArgs(state->borrow, recording.get(), number.get(), nullptr)
                       : nullptr);
        if (!tensor)
            return false;
        if (inputs.at(index) == Py_None)
            PyList_SetItem(inputs.list, inputs.place(index), tensor.release());
    }
    return true;
}

Answer pygraph::accept(Replay *state, Inputs &inputs, bool *is_copied, Slow *why) {
    *is_copied = false;
    *why = Slow::not_ready;
    if (state->own.get() != inputs.own)
        return Answer::no; // it was recorded with own memory of other outputs
    *why = Slow::moved;
    const Answer found = find(state, inputs);
    if (found != Answer::yes)
        return found;
    *why = Slow::outputs_alive;
    bool has_run = false; // whether code ran that may have changed the inputs
    const int died = state->before.are_dead(&has_run);
    if (died <= 0)
        return died < 0 ? passed_over() : Answer::no;
    *why = Slow::not_given;
    if (state->prepare != nullptr) {
        const Answer prepared = prepare(state, inputs, is_copied, &has_run);
        if (prepared != Answer::yes)
            return prepared;
    }
    if (has_run && !are_still_there(state, inputs)) {
        *is_copied = false;
        return Answer::no;
    }
    if (state->python_checks && (*is_copied || state->in_python))
        return release_unneeded(inputs, state->managed) ? Answer::yes : Answer::error;
    if (!has_run && state->after.died_as(state->fixed)) {
        if (!release_unneeded(inputs, state->lasting))
            return Answer::error;
        if (state->after.others_seem_dead())
            return Answer::yes; // inputs that were seen to die are released with the others, after the launch
    }
    if (!release_unneeded(inputs, state->managed))
        return Answer::error;
    bool has_run_again = false;
    const int dead = state->after.are_dead(&has_run_again);
    if (dead < 0 && passed_over() == Answer::error)
        return Answer::error;
    if (dead <= 0) { // the slow path runs un-graphed
        *why = Slow::outputs_alive;
        return give_back(state, inputs) ? Answer::no : Answer::error;
    }
    if (has_run_again && !are_still_there(state, inputs)) // an input was given other memory meanwhile
        return give_back(state, inputs) ? Answer::no : Answer::error;
    if (dead == 1 && state->after.find_among(&state->fixed)) {
        std::unordered_set<uint64_t> dying;
        for (const Watched &input : state->fixed)
            if (input.dies)
                dying.insert(input.index);
        std::erase_if(state->lasting, [&](uint64_t index) { return dying.count(index) != 0; });
    }
    return Answer::yes;
}

bool pygraph::launch(const Replay *replay) {
    replay->replays->value++;
    return bool(Ref(PyObject_CallMethodNoArgs(replay->graph, names.replay)));
}
