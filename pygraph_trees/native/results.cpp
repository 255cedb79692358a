/* Makes what a call returns from a recording's outputs. */

namespace {

/* A view of a tensor: its number among outputs and kept inputs, and the arguments of Inductor's reinterpret_tensor. */
struct View {
    uint64_t number;
    std::vector<int64_t> sizes, strides;
    int64_t offset;
    bool is_own = false; // it equals the gradient that it is a view of, and replaces it only for code that may see it
};

/* What a call returns: the recording's outputs, or some of them with kept inputs, views of both, and constants;
   trees/functions/fast_path.py describes the arguments. */
struct Results {
    bool picks_some = false;                     // if not, all outputs are returned as a list
    bool has_own = false, views_are_own = false; // some views, or all
    std::vector<uint64_t> kept, picks;
    std::vector<bool> whole; // by number of an output, whether it is returned itself; empty: all are
    std::vector<View> views;
    PyObject *constants = nullptr;   // a tuple
    std::vector<PyObject *> outputs; // borrowed, and valid until other code runs
    std::vector<Parameter> parameters; // by edge of the backward

    void take(const py::dict &given) {
        using Numbers = std::vector<int64_t>;
        constants = reference(given["constants"].cast<py::tuple>());
        kept = given["kept"].cast<std::vector<uint64_t>>();
        for (const auto &[number, sizes, strides, offset] :
             given["views"].cast<std::vector<std::tuple<uint64_t, Numbers, Numbers, int64_t>>>())
            views.push_back({number, sizes, strides, offset});
        const auto own = given["own"].cast<std::vector<size_t>>();
        for (const size_t number : own) {
            if (number >= views.size())
                throw py::value_error("expected numbers of views");
            views[number].is_own = true;
        }
        const auto picked = given["picks"].cast<std::optional<std::vector<uint64_t>>>();
        picks_some = picked.has_value();
        picks = picked.value_or(std::vector<uint64_t>());
        for (const uint64_t number : picks) {
            whole.resize(std::max<size_t>(whole.size(), number + 1));
            whole[number] = true;
        }
        views_are_own = std::all_of(views.begin(), views.end(), [](const View &view) { return view.is_own; });
        has_own = !own.empty();
    }
};

/* An object by its number, counted through consecutive rows. */
PyObject *item_at(const Items *rows, size_t count, uint64_t number) {
    for (const Items *row = rows; row < rows + count; row++) {
        if (number < static_cast<uint64_t>(row->count))
            return row->at[number];
        number -= static_cast<uint64_t>(row->count);
    }
    throw py::index_error("a graph returns what it has not");
}

/* The views as a tuple, or for own views that other code does not see, their bases. */
Ref viewed(const std::vector<View> &views, bool sees, const Items *rows) {
    std::vector<Ref> items; // owned, since making a view may collect garbage
    for (const View &view : views) {
        items.push_back(Ref::dup(item_at(rows, 2, view.number)));
        if (!is_tensor(items.back().get()))
            throw py::type_error("expected a tensor");
    }
    return tuple_of(views.size(), [&](size_t i) {
        const View &view = views[i];
        if (view.is_own && !sees)
            return items[i].release();
        const at::Tensor &tensor = THPVariable_Unpack(items[i].get());
        return wrapped(torch::inductor::_reinterpret_tensor(tensor, view.sizes, view.strides, view.offset)).release();
    });
}

/* The tuple that the call returns: outputs, as `take_outputs` gives them, kept inputs, views of both, and constants.
   Unless other code `sees` the gradients, own views are replaced by their bases. NULL if `take_outputs` returns false. */
template <typename TakeOutputs>
Ref returned(const Results *state, const Ref &kept, bool sees, const TakeOutputs &take_outputs) {
    Items rows[4]; // outputs are taken again after any step that may run other code: a new tuple may collect garbage
    rows[1] = Items(const_cast<PyObject *>(kept.get())), rows[3] = Items(state->constants);
    const bool views_some = !state->views.empty(), makes_views = views_some && (sees || !state->views_are_own);
    Ref views;
    if (makes_views) {
        if (!take_outputs(&rows[0]))
            return Ref();
        views = viewed(state->views, sees, rows);
        rows[2] = Items(views.get());
    }
    Ref tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(state->picks.size())));
    if (!take_outputs(&rows[0]))
        return Ref();
    const uint64_t first_view = static_cast<uint64_t>(rows[0].count) + static_cast<uint64_t>(rows[1].count);
    const uint64_t after_views = first_view + state->views.size();
    for (size_t i = 0; i < state->picks.size(); i++) {
        uint64_t number = state->picks[i];
        if (views_some && !makes_views && number >= first_view) // the row of views is empty
            number = number < after_views ? state->views[number - first_view].number : number - state->views.size();
        PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), Py_NewRef(item_at(rows, 4, number)));
    }
    return tuple;
}

/* The outputs as a list; NULL if they are not at hand. */
Ref list_at_hand(Results *state, const Replay *replay, PyObject *given) {
    Ref list = checked(PyList_New(PyList_GET_SIZE(replay->others)));
    std::vector<Ref> made;
    const bool sees = !(replay->lends || replay->is_backward) || !are_only_accumulated(&state->parameters);
    if (!at_hand(replay, given, sees, state->whole, &made, &state->outputs) ||
        static_cast<size_t>(PyList_GET_SIZE(list.get())) != state->outputs.size())
        return Ref();
    for (size_t i = 0; i < state->outputs.size(); i++)
        PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), Py_NewRef(state->outputs[i]));
    return list;
}

/* The inputs that are kept, as a tuple; NULL if the list is too short. */
Ref kept_inputs(const Results *state, PyObject *list) {
    Ref kept = checked(PyTuple_New(static_cast<Py_ssize_t>(state->kept.size())));
    for (size_t i = 0; i < state->kept.size(); i++) {
        PyObject *item = item_of(list, state->kept[i]);
        if (item == nullptr)
            return Ref();
        PyTuple_SET_ITEM(kept.get(), static_cast<Py_ssize_t>(i), Py_NewRef(item));
    }
    return kept;
}

/* The call's result, from a list of outputs. */
Ref of_list(const Results *state, const Ref &kept, Ref outputs) {
    if (!state->picks_some)
        return outputs;
    return returned(state, kept, true, [&](Items *row) { return *row = Items(outputs.get()), true; });
}

/* The call's result, from outputs at hand; NULL if they are not. */
Ref result_at_hand(Results *state, const Replay *replay, const Ref &kept, PyObject *given) {
    if (!state->picks_some)
        return list_at_hand(state, replay, given);
    const bool asks = state->has_own || replay->lends || replay->is_backward;
    const bool sees = !asks || !are_only_accumulated(&state->parameters);
    std::vector<Ref> made;
    return returned(state, kept, sees, [&](Items *row) {
        const bool found = at_hand(replay, given, sees, state->whole, &made, &state->outputs);
        *row = Items(state->outputs);
        return found;
    });
}

} // namespace
