/* Where in the tree of recordings a call begins: the state of the trees and of a function, and the candidates. */

#pragma once

#include "fast_path.h"

#include <c10/core/Event.h>

#include <optional>

namespace pygraph {

/* A stream that uses memory of the pool. */
struct Use {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    c10::Stream stream;
    Ref step;                // the generation in which the program named the stream
    bool was_waited = false; // for a stream that the program may have destroyed since
};

/* The part of a manager's state that each replay reads and writes; trees/managers/manager.py derives the manager from it. Its
   attributes have upstream's names. */
struct TreeState {
    PyObject *graph = nullptr, *current_node = nullptr, *path_state = nullptr; // upstream's, like the next four
    PyObject *mode = nullptr, *compile_id = nullptr, *generation = nullptr, *pending = nullptr;
    PyObject *candidates = nullptr; // by function, then by the recording that was replayed before: Candidates
    PyObject *find = nullptr;       // a Python callable that finds unknown candidates; it does not hold the manager
    /* What the call that has the turn is known by, NULL if none has it. No code waits for the turn, so it is no lock; the
       GIL protects it. */
    const void *turn_of = nullptr;
    unsigned long long turns = 0; // how often a call asked for the turn
    char keeps_outputs = 0;       // whether outputs that are alive when a new step begins are moved
    // Of the last launch, see native/streams.cpp.
    char has_launched = 0;
    short device = -1;               // the device whose streams are put in order; negative: none are
    long long stream = 0;            // its number
    std::optional<c10::Event> event; // after the last launch, if torch did not make its stream
    std::vector<Use> uses;           // by streams that the program names, of memory of the pool

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

    void each(const auto &function) {
        for (PyObject **held : {&graph, &current_node, &path_state, &mode, &compile_id, &generation, &pending,
                                &candidates, &find})
            function(*held);
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

/* The streams that the program has named in this step for memory of the pool. */
std::vector<c10::Stream> streams_in_use(const TreeState &trees, const c10::StorageImpl *storage);

/* What replays a function in the trees of one thread. */
struct Replayer {
    PyObject *manager = nullptr;     // returns the manager, or None once it is gone
    PyObject *function_id = nullptr; // the function's id in the manager
    PyObject *own = nullptr;         // the OwnMemory of its outputs, or None
    unsigned long long thread = 0;   // see thread_of_trees

    void each(const auto &function) { function(manager), function(function_id), function(own); }
};

/* The part of a function's state that each replay reads; trees/functions/dispatch.py derives from it. */
struct FunctionState {
    PyObject *replayer = nullptr;  // the one used last, or None
    PyObject *replayers = nullptr; // all, by thread
    PyObject *integers = nullptr;  // the indices of its integers
    PyObject *by_values = nullptr; // the entry for each set of values of its integers; NULL without integers
    PyObject *slow = nullptr;      // a tuple of Counter objects: the calls that took the slow path, by Slow
    char is_replayed = 0;          // whether calls may be replayed now
    char was_asked = 0;            // whether this call's caller has tried a fast replay without success

    void each(const auto &function) {
        function(replayer), function(replayers), function(integers), function(by_values), function(slow);
    }
};

/* The number of the thread whose trees a call uses. A backward uses those of the thread that began it, although autograd
   runs it in a thread of its own. */
unsigned long long thread_of_trees();

/* The function's replayer in this thread; NULL if there is none. */
Ref replayer_here(FunctionState *function);

/* The recordings of one function at one place, in upstream's order. */
struct Candidates {
    PyObject *mode = nullptr, *compile_id = nullptr;
    PyObject *replays = nullptr;     // a tuple
    PyObject *filter = nullptr;      // a CandidateFilter, once several candidates have been asked often
    PyObject *make_filter = nullptr; // makes it
    PyObject *release = nullptr;     // releases unneeded outputs and returns whether there were any
    int begins = -1;                 // whether a new step must begin here; negative if it may or may not
    int asked = 0;

    void take(const py::dict &given);
    void each(const auto &function) {
        for (PyObject **held : {&mode, &compile_id, &replays, &filter, &make_filter, &release})
            function(*held);
    }
};

/* The turn of this call, which its destructor gives back. */
class OwnTurn {
  public:
    OwnTurn() = default;
    ~OwnTurn();
    OwnTurn(const OwnTurn &) = delete;
    OwnTurn &operator=(const OwnTurn &) = delete;

    /* Takes it from a manager; false if another call has it. */
    bool take(PyObject *manager);

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

    TreeState *trees() { return &fields_of<TreeState>(manager.get()); }
    Replayer *in_trees() { return &fields_of<Replayer>(replayer.get()); }
    Candidates *all() { return &fields_of<Candidates>(candidates.get()); }
};

/* Takes the turn and finds the candidates of a call whose replayer and manager were found; if there are none, sets `why`. */
bool find_candidates(const Counters &counters, OwnTurn *turn, Found *found, Slow *why);

/* Finds the first candidate that accepts the inputs; see `accept`. */
bool first_accepting(Found *found, Inputs &inputs, bool *is_copied, Slow *why);

/* Sets the state of the trees once the recording is chosen. */
void go_on_from(Found *found, PyObject *path_state);

} // namespace pygraph
