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

    /* Takes (index, tensor, flag) triples; false with an exception. */
    bool take(PyObject *triples);

    /* Writes the inputs of a call to the memory. False if Python must do that: an input is not laid out like its memory,
       or must be waited for. */
    bool write(const Inputs &inputs) const;
};

} // namespace pygraph
