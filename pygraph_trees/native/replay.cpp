/* One recording's part in a fast replay: pygraph_trees.native._fast_path.Replay.

   It holds the required addresses of static inputs, the inputs whose addresses the graph is given, the outputs that must
   be dead, and what a call returns. Python decides about unknown addresses, and about outputs that do not seem dead.
   Outputs that are inputs of the call too die when the call releases them: that is seen before the launch, without
   releasing them. trees/recordings/replaying.py makes it. */

namespace {

constexpr size_t NOWHERE = ~size_t{0};

/* Whether an output seems dead. If the program gave it other memory, somebody may hold the storage that it had. */
bool seems_dead(PyObject *list, uint64_t index, uint64_t address) {
    PyObject *object = item_of(list, index);
    return is_tensor(object) && is_dead(object) &&
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
        const Block &lent = own->blocks[*block];
        if (layout.is_none())
            made.layout = lent.layout;
        made.lends = lent.lends && made.layout == lent.layout;
    }
    return made;
}

/* Whether the fixed inputs are where they should be. Notes the addresses of the others. */
bool find(Replay *state, const Inputs &inputs) {
    for (std::vector<Watched> *all : {&state->fixed, &state->asked})
        for (size_t i = 0; i < all->size(); i++) {
            load_ahead<&Watched::load>(*all, i);
            Watched &input = (*all)[i];
            PyObject *object = inputs.at(input.index);
            if (!is_tensor(object))
                return false; // the slow path raises the error
            const at::Tensor &tensor = THPVariable_Unpack(object);
            const uint64_t address = address_of(tensor);
            if (is_lazy(tensor))
                return false; // as a tangent may be at one call and not at the next
            if (all == &state->asked)
                input.address = address;
            else if (address != input.address)
                return false;
            input.known.note(object);
            if (input.dies)
                input.dies_here = is_dead(object, 2); // the list of inputs has the other reference
        }
    return true;
}

/* Whether the graph needs no change for inputs at the addresses that were found. */
bool is_settled(const Addresses *known, const std::vector<Watched> &inputs) {
    return known->has_settled() &&
           std::equal(inputs.begin(), inputs.end(), known->seen.begin(), known->seen.end(),
                      [](const Watched &input, uint64_t address) { return input.address == address; });
}

/* Makes the graph hold the addresses that were found, or asks Python to do so and sets `asked`; false if it cannot. */
bool prepare(Replay *state, Inputs &inputs, bool *is_copied, bool *asked) {
    Addresses *known = state->addresses.get();
    const bool has_values = known != nullptr && !known->values.empty();
    if (known != nullptr && !has_values && is_settled(known, state->asked))
        return true;
    std::vector<uint64_t> addresses; // of this call: making a list may collect garbage, which may call the same graph
    addresses.reserve(state->asked.size());
    for (const Watched &input : state->asked)
        addresses.push_back(input.address);
    if (known != nullptr && (!has_values || known->write_values(inputs)) && known->patch(addresses))
        return true;
    *asked = true;
    const py::object seen = py::cast(addresses);
    inputs.arrange();
    const AtTheEnd own(inputs);
    return holds([&] {
        Ref copies = called(state->prepare, inputs.list, seen.ptr());
        *is_copied = copies.get() == Py_True;
        return copies.get() != Py_None;
    });
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

void add_replay(py::module_ &module) {
    add_class<Replay>(
        module, "Replay", 0, {},
        {{"stream", T_LONGLONG, FIELD(Replay, stream), 0, "The number of the stream of the last launch."}},
        {{"note_cached", note_cached, METH_NOARGS, "Notes the cached outputs, which were just made."},
         {"is_untouched", is_untouched, METH_NOARGS, "Whether the program left the cached outputs as they were made."}});
}

void Replay::take(const py::dict &given) {
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
    for (const auto &[flag, name] : {std::pair(&in_python, "in_python"), {&python_checks, "python_checks"},
                                     {&has_new_history, "has_new_history"}, {&is_backward, "is_backward"}})
        *flag = given[name].cast<bool>();
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
    for (size_t number = 0; PyObject *other = item_of(others, number); number++)
        if (PyTuple_Check(other)) {
            const auto [like] = py::handle(other).cast<std::tuple<at::Tensor>>();
            empty.push_back({number, like.sizes().vec(), like.strides().vec(), like.options()});
        }
    note_made(this);
}

bool Mortal::died_as(const std::vector<Watched> &inputs) const {
    return !places.empty() && std::ranges::all_of(places, [&](const Dying &place) {
        const Watched *input = place.input == NOWHERE ? nullptr : &inputs[place.input];
        return input == nullptr || (input->dies_here && input->known.object == item_of(place.list, place.index));
    });
}

bool Mortal::others_seem_dead() const {
    return std::ranges::all_of(places, [](const Dying &place) {
        return place.input != NOWHERE || seems_dead(place.list, place.index, place.address);
    });
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
            const size_t input = place == by_object.end() ? NOWHERE : place->second;
            places.push_back({input, run.list, output.index, output.address});
            if (input != NOWHERE)
                (*inputs)[input].dies = true;
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

bool Mortal::are_dead(bool *asked) {
    if (ask == nullptr || seem_dead())
        return true;
    *asked = true;
    return is_true(called(ask));
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
bool are_still_there(const Replay *state, const Inputs &inputs) {
    for (const std::vector<Watched> *all : {&state->fixed, &state->asked})
        for (const Watched &input : *all) {
            PyObject *object = inputs.at(input.index);
            if (object == Py_None)
                continue;
            if (!is_tensor(object) || address_of(THPVariable_Unpack(object)) != input.address ||
                (inputs.is_own(input.index) && !inputs.own->is_free(input.index - inputs.own_from)))
                return false;
        }
    return true;
}

void release_unneeded(const Inputs &inputs, const std::vector<uint64_t> &indices) {
    for (const uint64_t index : indices) {
        PyObject *input = inputs.required(index); // read again each time, since a release may run other code
        PyList_SET_ITEM(inputs.list, inputs.place(index), Py_NewRef(Py_None));
        Py_DECREF(input);
    }
}

/* Puts tensors with the same memory in the places of inputs that were released. */
void give_back(const Replay *state, const Inputs &inputs) {
    Ref recording = called(state->recording);
    for (const uint64_t index : state->managed) {
        if (inputs.at(index) != Py_None)
            continue;
        Ref number = checked(PyLong_FromUnsignedLongLong(index));
        Ref tensor = called(state->borrow, recording.get(), number.get());
        if (inputs.at(index) == Py_None)
            PyList_SetItem(inputs.list, inputs.place(index), tensor.release());
    }
}

/* Whether a recording accepts the inputs of a call. If so, its graph holds their addresses, and inputs that must be dead
   are released. Sets `is_copied` if inputs were copied for this call, so that Python must replay, and else `why`. */
bool accept(Replay *state, Inputs &inputs, bool *is_copied, Slow *why) {
    *is_copied = false;
    *why = Slow::not_ready;
    if (state->own.get() != inputs.own)
        return false; // it was recorded with own memory of other outputs
    *why = Slow::moved;
    if (!find(state, inputs))
        return false;
    *why = Slow::outputs_alive;
    bool has_run = false; // whether code ran that may have changed the inputs
    if (!holds([&] { return state->before.are_dead(&has_run); }))
        return false;
    *why = Slow::not_given;
    if (state->prepare != nullptr && !prepare(state, inputs, is_copied, &has_run))
        return false;
    if (has_run && !are_still_there(state, inputs)) {
        *is_copied = false;
        return false;
    }
    if (state->python_checks && (*is_copied || state->in_python)) {
        release_unneeded(inputs, state->managed);
        return true;
    }
    if (!has_run && state->after.died_as(state->fixed)) {
        release_unneeded(inputs, state->lasting);
        if (state->after.others_seem_dead())
            return true; // inputs that were seen to die are released with the others, after the launch
    }
    release_unneeded(inputs, state->managed);
    bool has_run_again = false;
    const bool are_dead = holds([&] { return state->after.are_dead(&has_run_again); });
    if (!are_dead) // the slow path runs un-graphed
        *why = Slow::outputs_alive;
    if (!are_dead || (has_run_again && !are_still_there(state, inputs))) { // an input may have other memory
        give_back(state, inputs);
        return false;
    }
    if (state->after.find_among(&state->fixed)) {
        std::unordered_set<uint64_t> dying;
        for (const Watched &input : state->fixed)
            if (input.dies)
                dying.insert(input.index);
        std::erase_if(state->lasting, [&](uint64_t index) { return dying.count(index) != 0; });
    }
    return true;
}

/* Counts the replay and launches the graph. */
void launch(const Replay *replay) {
    replay->replays->value++;
    const CollectorOff::Launching other_threads_run;
    checked(PyObject_CallMethodNoArgs(replay->graph, names.replay));
}

} // namespace
