/* Inputs on the CPU that kernel nodes of a graph hold by value. */

#pragma once

#include "tensors.h"

#include <vector>

namespace pygraph {

struct Inputs;

struct StagedValues {
    struct Value {
        uint64_t index;    // of the input
        at::Tensor memory; // from which the nodes take its bytes when they are set
        bool may_be_late;  // whether the GPU may still have to write it if it is pinned
    };
    std::vector<Value> values;
    PyObject *is_capturing = nullptr; // torch's question in C, which runs no Python code; NULL without values

    /* Takes (index, tensor, flag) triples and the question; false with an exception. */
    bool take(PyObject *triples, PyObject *question);

    /* Writes the inputs of a call to the memory. False if Python must do that: an input is not laid out like its memory,
       must be waited for, or the program captures the call. */
    bool write(const Inputs &inputs) const;
};

} // namespace pygraph
