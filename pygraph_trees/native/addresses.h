/* The addresses that one instantiated graph holds, and counters that Python and C++ share. */

#pragma once

#include "staged_values.h"

#include <torch/csrc/utils/object_ptr.h>

#include <unordered_map>
#include <vector>

namespace pygraph {

using Ref = THPObjectPtr; // an owned reference

/* A number that Python reads and writes as `value`. */
struct Counter {
    PyObject_HEAD
    unsigned long long value;
};

/* NULL for any other object. */
Counter *counter_in(PyObject *object);

struct Addresses {
    PyObject_HEAD
    struct Word {
        uint64_t address, position, addend;
    };
    struct Node {
        uint64_t handle, parameters;
    };
    struct State {
        PyObject *owner = nullptr; // keeps the memory of nodes and words alive
        PyObject *pool_changes = nullptr;
        unsigned long long pool_seen = 0;
        std::vector<Word> words;
        std::vector<Node> nodes;
        std::vector<std::vector<size_t>> holders; // by position of the input: its nodes
        void *exec = nullptr;
        int (*set)(void *exec, void *node, const void *parameters) = nullptr;
        int (*get_context)(void **context) = nullptr;
        void *context = nullptr; // in which nodes are set
        // By position: each address of the input that fits, with the address that the graph then gets.
        std::vector<std::unordered_map<uint64_t, uint64_t>> accepted;
        std::vector<char> is_own;    // by position: whether it is own memory, which fits if it is aligned
        std::vector<uint64_t> held;  // the addresses in the graph: of inputs, then those from which nodes take values
        std::vector<uint64_t> seen;  // the inputs' addresses for which the graph holds these, if it is settled
        std::vector<uint64_t> given; // the next addresses in the graph, during one call
        std::vector<char> is_due;    // by node: whether this call sets it
        bool is_settled = false, is_stuck = false;
        StagedValues staged;
        PyObject *sets = nullptr;         // a Counter: nodes set so far
        unsigned long long countdown = 0; // replays with new addresses until one of them is left to Python; 0: never
        std::vector<uint64_t> changes;    // by position: how often the input's address changed since the countdown began
    } *state;
};

/* The state of an Addresses; NULL for any other object. */
Addresses::State *addresses_in(PyObject *object);

/* Whether the graph needs no change for inputs at the addresses `seen` of the state. */
bool has_settled(const Addresses::State *state);

/* Changes the graph for inputs at these addresses; false if Python must do that. Runs no Python code. */
bool patch(Addresses::State *state, const std::vector<uint64_t> &seen);

extern PyType_Spec addresses_spec, counter_spec;

} // namespace pygraph
