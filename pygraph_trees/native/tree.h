/* Where in the tree of recordings a call begins: the state of the trees and of a function, and the candidates. */

#pragma once

#include "fast_path.h"

namespace pygraph {

/* The part of a manager's state that each replay reads and writes; trees/managers/manager.py derives the manager from it. Its
   attributes have upstream's names. */
struct TreeState {
    PyObject_HEAD
    PyObject *graph, *current_node, *path_state, *mode, *compile_id, *generation, *pending; // upstream's
    PyObject *candidates; // by function, then by the recording that was replayed before: Candidates
    PyObject *find;       // a Python callable that finds unknown candidates; it does not hold the manager
    /* What the call that has the turn is known by, NULL if none has it. No code waits for the turn, so it is no lock; the
       GIL protects it. */
    const void *turn_of;
    unsigned long long turns; // how often a call asked for the turn
    char keeps_outputs; // whether outputs that are alive when a new step begins are moved
    // Of the last launch, see native/streams.cpp.
    char has_launched;
    short device;     // the device whose streams are put in order; negative: none are
    long long stream; // its number
    void *event;      // after the last launch, if torch did not make its stream
    void *uses;       // by streams that the program names, of memory of the pool; NULL if there was none

    bool take_turn(const void *call) {
        turns++;
        if (turn_of == nullptr)
            turn_of = call;
        return turn_of == call;
    }

    void end_turn(const void *call) {
        if (turn_of == call)
            turn_of = nullptr;
    }

    std::array<PyObject **, 9> held() {
        return {&graph, &current_node, &path_state, &mode, &compile_id,
                &generation, &pending, &candidates, &find};
    }
};

/* Whether the program captures the current stream in a graph of its own. */
bool is_captured(const TreeState *trees);

/* Lets the current stream wait for the last launch, if that was on another one, and notes the current stream. */
void order_streams(TreeState *trees);

/* Notes that another stream uses a tensor's memory in the pool: launches wait for it until the next step has begun. */
void note_use(TreeState *trees, const at::Tensor &tensor, c10::DeviceIndex device, c10::StreamId id);

/* Must be called after a launch. */
void note_launch(TreeState *trees);

/* Frees what was noted. */
void forget_streams(TreeState *trees);

/* What replays a function in the trees of one thread. */
struct Replayer {
    PyObject_HEAD
    PyObject *manager;         // returns the manager, or None once it is gone
    PyObject *function_id;     // the function's id in the manager
    PyObject *own;             // the OwnMemory of its outputs, or None
    unsigned long long thread; // see thread_of_trees

    std::array<PyObject **, 3> held() { return {&manager, &function_id, &own}; }
};

/* The part of a function's state that each replay reads; trees/functions/dispatch.py derives from it. */
struct FunctionState {
    PyObject_HEAD
    PyObject *replayer;  // the one used last, or None
    PyObject *replayers; // all, by thread
    PyObject *integers;  // the indices of its integers
    PyObject *by_values; // the entry for each set of values of its integers; NULL for a function without integers
    PyObject *slow;      // a tuple of Counter objects: the calls that took the slow path, by Slow
    char is_replayed;    // whether calls may be replayed now
    char was_asked;      // whether this call's caller has tried a fast replay without success

    std::array<PyObject **, 5> held() { return {&replayer, &replayers, &integers, &by_values, &slow}; }
};

/* The number of the thread whose trees a call uses. A backward uses those of the thread that began it, although autograd
   runs it in a thread of its own. */
unsigned long long thread_of_trees();

/* The function's replayer in this thread; NULL if there is none, or with an exception. */
Ref replayer_here(FunctionState *function);

/* The recordings of one function at one place, in upstream's order. */
struct Candidates {
    PyObject_HEAD
    PyObject *mode, *compile_id;
    PyObject *replays;     // a tuple
    PyObject *filter;      // a CandidateFilter, once several candidates have been asked often
    PyObject *make_filter; // makes it
    PyObject *release;     // releases unneeded outputs and returns whether there were any
    int begins; // whether a new step must begin here; negative if it may or may not
    int asked;

    std::array<PyObject **, 6> held() {
        return {&mode, &compile_id, &replays, &filter, &make_filter, &release};
    }
};

extern PyType_Spec tree_state_spec, function_state_spec, replayer_spec, candidates_spec;

/* The Python types of these structs, set when the module is loaded. */
extern struct Types {
    PyTypeObject *tree_state = nullptr, *function_state = nullptr, *replayer = nullptr, *candidates = nullptr;
} types;

bool is_tree_state(PyObject *object);
bool is_function_state(PyObject *object);

/* The turn of this call, which its destructor gives back. */
class OwnTurn {
  public:
    OwnTurn() = default;
    ~OwnTurn();
    OwnTurn(const OwnTurn &) = delete;
    OwnTurn &operator=(const OwnTurn &) = delete;

    /* False if another call has it. */
    bool take(TreeState *trees);

  private:
    Ref owner;
};

/* The classes of torch that count steps, owned by the entry, and whether outputs may be cloned when a step begins. */
struct Counters {
    PyObject *steps = nullptr, *generations = nullptr;
    bool clones = false;
};

/* A function's fast replay, and the state of the trees in which it was found. */
struct Found {
    Ref replayer, manager, generation, candidates, replay, recording;

    TreeState *trees() { return reinterpret_cast<TreeState *>(manager.get()); }
    Replayer *in_trees() { return reinterpret_cast<Replayer *>(replayer.get()); }
    Candidates *all() { return reinterpret_cast<Candidates *>(candidates.get()); }
};

/* Takes the turn and finds the candidates of a call whose replayer and manager were found. Sets `why` with `no`. */
Answer find_candidates(const Counters &counters, OwnTurn *turn, Found *found, Slow *why);

/* Finds the first candidate that accepts the inputs; see `accept`. */
Answer first_accepting(Found *found, Inputs &inputs, bool *is_copied, Slow *why);

/* Sets the state of the trees once the recording is chosen. */
void go_on_from(Found *found, PyObject *path_state);

} // namespace pygraph
