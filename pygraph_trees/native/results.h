/* What a call returns: the recording's outputs, or some of them with kept inputs, views of both, and constants. */

#pragma once

#include "fast_path.h"

namespace pygraph {

/* A view of a tensor: its number among outputs and kept inputs, and the arguments of Inductor's reinterpret_tensor. */
struct View {
    uint64_t number;
    std::vector<int64_t> sizes, strides;
    int64_t offset;
    bool is_own = false; // it equals the gradient that it is a view of, and replaces it only for code that may see it
};

struct Results {
    bool picks_some = false;                     // if not, all outputs are returned as a list
    bool has_own = false, views_are_own = false; // some views, or all
    std::vector<uint64_t> kept, picks;
    std::vector<bool> whole; // by number of an output, whether it is returned itself; empty: all are
    std::vector<View> views;
    PyObject *constants = nullptr;   // a tuple, owned by the entry
    std::vector<PyObject *> outputs; // borrowed, and valid until other code runs
    std::vector<Parameter> parameters; // by edge of the backward

    /* False with an exception; trees/functions/fast_path.py describes the arguments. */
    bool take(PyObject *kept_inputs, PyObject *picked, PyObject *tuple, PyObject *viewed_so, PyObject *own);
};

/* The inputs that are kept, as a tuple; NULL if the list is too short, or with an exception. */
Ref kept_inputs(const Results *state, PyObject *list);

/* The call's result, from a list of outputs; NULL with an exception. */
Ref of_list(const Results *state, const Ref &kept, Ref &outputs);

/* The call's result, from outputs at hand; NULL if they are not, possibly with an exception. */
Ref result_at_hand(Results *state, const Replay::State *replay, const Ref &kept, PyObject *given);

} // namespace pygraph
