/* Where in the tree of recordings a call begins: the turn, the step, and the recordings that the call may replay. */

#pragma once

#include "fast_path.h"

namespace pygraph {

extern PyType_Spec turn_spec;

/* The turn of this call, which its destructor gives back. */
class OwnTurn {
  public:
    OwnTurn() = default;
    ~OwnTurn();
    OwnTurn(const OwnTurn &) = delete;
    OwnTurn &operator=(const OwnTurn &) = delete;

    /* by_hand if another call has the turn. */
    Answer take(PyObject *manager);

  private:
    Ref turn;
};

/* The classes of torch that count steps, owned by the entry, and whether outputs may be cloned when a step begins. */
struct Counters {
    PyObject *steps = nullptr, *generations = nullptr;
    bool clones = false;
};

/* A function's fast replay, and the state of the trees in which it was found. */
struct Found {
    Ref manager, candidates, recording, generation;
    Ref replay, candidate_filter, replays; // of the recording, or a filter and the replays of several
};

/* Takes the turn and checks what Manager.replay_fast checks; by_hand if Python must. */
Answer find_candidates(PyObject *function, const Counters &counters, OwnTurn *turn, Found *found);

/* Finds the first of several recordings, from `position` on, that may fit; false if Python must look. */
bool find_next(Found *found, const CandidateFilter::State *candidate_filter, const Inputs &inputs, size_t *position);

/* Sets the state of the trees once the recording is chosen; false with an exception. */
bool go_on_from(Found &found, PyObject *mode, PyObject *execution);

} // namespace pygraph
