/* The state of the trees and of a function, which each replay reads. */

#include <c10/core/Event.h>

namespace {

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

} // namespace
