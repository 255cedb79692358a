/* The inputs of a call, a recording's part in a fast replay, and TORCH_NAMES, the attributes of torch read by name.

   trees/functions/native_names.py checks at import that each of these attributes exists. */

#include <array>
#include <optional>

namespace {

struct Addresses;

#define TORCH_NAMES(each)                                                                                             \
    each(steps, mark_step_counter) each(generations, generation) each(graph, replay)                                  \
    each(manager, has_live_user_visible_output_cloning) each(manager, try_end_curr_execution)                         \
    each(compiled, current_callable) each(profiler, _is_profiler_enabled) each(debug, RECORD_GRAPH_EXECUTION)
#define DECLARE(owner, name) PyObject *name = nullptr;
struct Names {
    TORCH_NAMES(DECLARE)
    PyObject *fast_call = nullptr; // of ours, on the functions that torch calls
    PyObject *native = nullptr;    // of ours: a recording's Replay
};
#undef DECLARE
Names names; // interned

struct Watched {
    uint64_t index, address;
    Known known;
    bool dies = false;      // an input that must be dead once the call has released it
    bool dies_here = false; // whether that was seen at this call

    __attribute__((always_inline)) void load() const {
        known.load();
        if (dies)
            known.load_own();
    }

    __attribute__((always_inline)) void load_references() const { known.load_references(); }
};

constexpr size_t TENSORS_AHEAD = 24; // tensors

/* Loads the tensor TENSORS_AHEAD places later; at the first tensor, all tensors up to that one. */
template <void (Watched::*what)() const>
__attribute__((always_inline)) inline void load_ahead(const std::vector<Watched> &watched, size_t i) {
    for (size_t next = i == 0 ? 0 : i + TENSORS_AHEAD; next <= i + TENSORS_AHEAD && next < watched.size(); next++)
        (watched[next].*what)();
}

/* The inputs of a call, in the order of the caller or in that of the recording, then the tensors of own memory. The list
   is back in the caller's order once this object goes, unless its length has changed. */
struct Inputs {
    PyObject *list;
    const std::vector<uint64_t> *order, *before; // NULL if the orders are the same; the caller's
    const OwnMemory *own = nullptr;              // NULL without own memory
    uint64_t own_from = 0;                       // the index of its first tensor

    Inputs(PyObject *list, const std::vector<uint64_t> *order) : list(list), order(order), before(order) {}
    Inputs(const Inputs &) = delete;
    Inputs &operator=(const Inputs &) = delete;
    ~Inputs() {
        if (order == before || !has_length(before))
            return;
        std::vector<PyObject *> items(before->size());
        for (size_t i = 0; i < items.size(); i++)
            items[(*before)[i]] = PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i));
        put(items);
    }

    void add(const OwnMemory *memory) {
        own = memory;
        own_from = static_cast<uint64_t>(PyList_GET_SIZE(list));
    }

    bool is_own(uint64_t index) const { return own != nullptr && index >= own_from; }

    Py_ssize_t place(uint64_t index) const {
        return static_cast<Py_ssize_t>(order != nullptr && index < order->size() ? (*order)[index] : index);
    }

    /* NULL if there is no such input. */
    PyObject *at(uint64_t index) const {
        return is_own(index) ? own->item(index - own_from) : item_of(list, static_cast<uint64_t>(place(index)));
    }

    /* As `at`, but throws if there is no such input any more. */
    PyObject *required(uint64_t index) const {
        PyObject *found = at(index);
        if (found == nullptr)
            throw py::index_error("the inputs have changed");
        return found;
    }

    /* Puts the list into the order of the recording. */
    void arrange() {
        if (order == nullptr)
            return;
        if (!has_length(order))
            throw py::index_error("the inputs have changed");
        std::vector<PyObject *> items;
        for (const uint64_t place : *order)
            items.push_back(PyList_GET_ITEM(list, static_cast<Py_ssize_t>(place)));
        put(items);
        order = nullptr;
    }

  private:
    /* Whether the list still has all inputs. */
    bool has_length(const std::vector<uint64_t> *inputs) const {
        return PyList_GET_SIZE(list) == static_cast<Py_ssize_t>(inputs->size());
    }

    /* The list holds the same items, so no reference changes. */
    void put(const std::vector<PyObject *> &items) {
        for (size_t i = 0; i < items.size(); i++)
            PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), items[i]);
    }
};

/* Own memory at the end of the list of inputs, for a call to Python. It is there until this object goes. */
class AtTheEnd {
  public:
    explicit AtTheEnd(const Inputs &inputs) : list(inputs.list), count(PyList_GET_SIZE(inputs.list)) {
        for (uint64_t index = inputs.own_from; inputs.own != nullptr && inputs.at(index) != nullptr; index++)
            if (PyList_Append(list, inputs.at(index)) < 0) {
                const py::error_already_set error;
                cut();
                throw error;
            }
    }
    ~AtTheEnd() { cut(); }
    AtTheEnd(const AtTheEnd &) = delete;
    AtTheEnd &operator=(const AtTheEnd &) = delete;

  private:
    PyObject *list;
    Py_ssize_t count;

    void cut() {
        if (PyList_GET_SIZE(list) > count) // else they were consumed
            PyList_SetSlice(list, count, PyList_GET_SIZE(list), nullptr);
    }
};

/* Outputs that must be dead, or are expected to be; see native/replay.cpp. */
struct Mortal {
    struct Run {
        PyObject *list;
        std::vector<Watched> outputs;
    };
    PyObject *ask = nullptr; // the question in Python, which recognizes more dead outputs; NULL without outputs
    std::vector<Run> runs;

    /* Takes None, or groups of outputs with the question to ask. A group has a list, and the index of each output with
       the address of the storage that it was made with. */
    void take(const py::object &given);
    /* Calls a function with each reference. */
    void each(const auto &function) {
        function(ask);
        for (Run &run : runs)
            function(run.list);
    }

    /* Sets `asked` if Python had to be asked, so that other code may have run. */
    bool are_dead(bool *asked);
    /* Whether the outputs that are inputs too were seen to die; false if it is not known which are. */
    bool died_as(const std::vector<Watched> &inputs) const;
    /* Whether the other outputs seem dead. */
    bool others_seem_dead() const;
    /* Finds out which outputs are inputs, by their places at this call; false if that is known, or without outputs. */
    bool find_among(std::vector<Watched> *inputs);

  private:
    struct Dying {
        size_t input; // position among the inputs, or NOWHERE
        PyObject *list;
        uint64_t index, address;
    };
    std::vector<Dying> places; // of each output; empty if not known
    bool seem_dead();
};

/* One recording's part in a fast replay; trees/recordings/replaying.py describes the arguments. */
struct Replay {
    /* An output that is an input of the call, or a view of one or of own memory. */
    struct Returned {
        uint64_t input = 0;
        size_t output = 0;
        bool is_whole = false; // whether it is the input itself
        bool is_own = false;   // whether the input is own memory
        bool lends = false;    // whether the tensor of own memory is an output if only autograd uses that
        Strided layout;         // of a view; its offset counts from the first element of the input
    };
    /* What a cached output was when it was made; `known` is of NULLs for another output. */
    struct Made {
        Known known;
        const void *data = nullptr, *kind = nullptr;
        PyObject **attributes = nullptr, **references = nullptr; // where its dictionary and its weak references are
        int64_t offset = 0;
        size_t shape = 0, dimensions = 0; // where its sizes begin among the shapes; its strides follow
        caffe2::TypeMeta dtype;

        /* Loads what is_untouched reads. */
        __attribute__((always_inline)) void load() const {
            Known::ahead(known.object, 0), Known::ahead(attributes, 0), Known::ahead(references, 0);
            for (size_t offset = 0; offset < sizeof(c10::TensorImpl); offset += 64)
                Known::ahead(known.tensor, offset);
            Known::ahead(known.storage, 8), Known::ahead(known.storage, 31);
        }
    };
    /* An output without elements, which is a new tensor at each call. */
    struct Empty {
        size_t output;
        std::vector<int64_t> sizes, strides;
        at::TensorOptions options;
    };
    PyObject *recording = nullptr; // a weak reference
    PyObject *prepare = nullptr;   // makes the graph hold other addresses, in Python; NULL without live inputs
    PyObject *graph = nullptr;
    PyObject *cached = nullptr, *others = nullptr; // the cached outputs, and the values of the others
    // Functions of the recording: make a released input again, make all outputs, replay with inputs.
    PyObject *borrow = nullptr, *make = nullptr, *run = nullptr;
    std::shared_ptr<Addresses> addresses; // NULL if only Python knows them
    std::shared_ptr<Counter> replays;
    std::shared_ptr<OwnMemory> own; // NULL without
    std::vector<Watched> fixed, asked;
    std::vector<uint64_t> managed; // inputs that are released before the launch
    std::vector<uint64_t> lasting; // managed inputs that need not be seen to die
    std::vector<Returned> returned;
    long long stream = 0;         // the number of the stream of its last launch
    bool lends = false;           // whether own memory is returned itself to code that only accumulates gradients
    bool in_python = false;       // inputs are copied at each call
    bool python_checks = false;   // if Python replays, it also checks which tensors have died
    bool has_new_history = false; // whether autograd gives the outputs a new history at each call
    bool is_backward = false;     // whether the outputs are gradients
    Mortal before, after;
    Mortal outliving; // outputs that are moved if they are alive when the next step begins
    std::vector<Empty> empty;
    std::vector<Made> made;      // the cached outputs as they were made; empty if not known
    std::vector<int64_t> shapes; // the sizes and strides of each

    void take(const py::dict &given);
    void each(const auto &function) {
        for (PyObject **held : {&recording, &prepare, &graph, &cached, &others, &borrow, &make, &run})
            function(*held);
        for (Mortal *outputs : {&before, &after, &outliving})
            outputs->each(function);
    }
};

/* Why a call takes the slow path; `native/binding.py` has the names. */
enum class Slow : size_t {
    not_ready,      // no recording of this thread replays the function yet, or it is measured
    another_call,   // another call has the turn
    not_found,      // no recording follows here
    moved,          // a static input moved
    outputs_alive,  // other outputs are alive than when it was recorded
    not_given,      // the graph cannot be given the inputs
    no_memory,      // for outputs
    in_python,      // a fast replay that Python makes
    captured,       // the program captures the call
};

/* What Python code of the trees answers; false if it raises, since the slow path meets the exception again and contains
   it. Exceptions of other kinds, which handlers of signals raise, pass. */
bool holds(const auto &question) {
    try {
        return question();
    } catch (py::error_already_set &error) {
        if (!error.matches(PyExc_AssertionError) && !error.matches(PyExc_RuntimeError))
            throw;
        return false;
    }
}

} // namespace
