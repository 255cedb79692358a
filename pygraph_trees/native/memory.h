/* The memory that a recording's graph reads and writes: the addresses that it holds, and own memory of outputs. */

#pragma once

#include "objects.h"

#include <c10/core/Stream.h>

#include <unordered_map>

namespace pygraph {

struct Inputs;

/* A number that Python reads and writes as `value`. */
struct Counter {
    unsigned long long value = 0;

    /* An argument; None is none. */
    static std::shared_ptr<Counter> of(const py::object &given) {
        if (given.is_none())
            throw py::type_error("expected a Counter");
        return given.cast<std::shared_ptr<Counter>>();
    }
};

/* The addresses that one instantiated graph holds; see native/addresses.cpp. */
struct Addresses {
    struct Word {
        uint64_t address, position, addend;
    };
    struct Node {
        uint64_t handle, parameters;
    };
    /* An input on the CPU that nodes hold by value. */
    struct Value {
        uint64_t index;    // of the input
        at::Tensor memory; // from which the nodes take its bytes when they are set
        bool may_be_late;  // whether the GPU may still have to write it if it is pinned
    };
    py::object owner; // keeps the memory of nodes and words alive
    std::shared_ptr<Counter> pool_changes;
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
    std::vector<Value> values;
    std::shared_ptr<Counter> sets;    // nodes set so far
    unsigned long long countdown = 0; // replays with new addresses until one of them is left to Python; 0: never
    std::vector<uint64_t> changes;    // by position: how often the input's address changed since the countdown began

    explicit Addresses(const py::kwargs &given);
    void accept(size_t position, uint64_t address, uint64_t address_given);
    void forget();
    void settle(const std::vector<uint64_t> &addresses);
    void hold(const std::vector<uint64_t> &addresses);
    /* Whether the graph needs no change for inputs at the addresses `seen`. */
    bool has_settled() const { return is_settled && pool_changes->value == pool_seen; }
    /* Changes the graph for inputs at these addresses; false if Python must do that. Runs no Python code. */
    bool patch(const std::vector<uint64_t> &addresses);
    /* Writes the inputs that nodes hold by value to the memory from which the nodes take them. False if Python must do
       that: an input is not laid out like its memory, or must be waited for. */
    bool write_values(const Inputs &inputs) const;

  private:
    void count_changes(const std::vector<uint64_t> &next);
    bool find_given(const std::vector<uint64_t> &addresses);
    size_t set_nodes(const std::vector<uint64_t> &addresses, size_t first) const;
};

/* Sizes, strides, offset in elements, and type of a tensor in a storage. */
struct Strided {
    std::vector<int64_t> sizes, strides;
    int64_t offset = 0;
    caffe2::TypeMeta dtype;

    Strided() = default;
    Strided(std::vector<int64_t> sizes_, std::vector<int64_t> strides_, int64_t offset_, caffe2::TypeMeta dtype_)
        : sizes(std::move(sizes_)), strides(std::move(strides_)), offset(offset_), dtype(dtype_) {
        if (sizes.size() != strides.size())
            throw py::value_error("expected as many strides as sizes");
    }
    /* Takes (sizes, strides, offset, dtype). */
    static Strided of(const py::handle &given);

    bool operator==(const Strided &other) const {
        return sizes == other.sizes && strides == other.strides && offset == other.offset && dtype == other.dtype;
    }
};

/* Memory of a function's outputs outside of the graph pool, which replays write again while it is dead. */
struct OwnMemory {
    struct Block {
        size_t nbytes = 0;
        Strided layout;     // of its tensor, which begins where the storage does
        bool lends = false; // whether the tensor itself is returned to code that only accumulates gradients
        bool holds = true;  // whether the memory is kept for the next call
        PyObject *base = nullptr; // the tensor, which only the block references while it is free; NULL without memory
        Known known = {};         // of the tensor, for prefetching
        const void *address = nullptr;
        c10::DeleterFnPtr deleter = nullptr;
        c10::Stream stream{c10::Stream::DEFAULT, c10::Device(c10::kCPU)}; // on which it was allocated
        // Of a call that gave it away.
        c10::weak_intrusive_ptr<c10::StorageImpl> last{c10::intrusive_ptr<c10::StorageImpl>()};
        bool is_used = false; // whether another stream may use it: see record_stream
        bool is_new = false;  // whether no call that was launched has used the memory
        uint8_t alive = 0;    // consecutive calls at which the program still had the last output
        uint8_t dead = 0;     // consecutive calls at which it no longer had it, although the memory was not kept
    };
    c10::Device device;
    std::vector<Block> blocks;
    std::vector<Ref> dropped;                       // references to release once the call has no turn
    std::shared_ptr<Counter> allocated, given_away; // blocks so far
    unsigned long long used = 0;                    // the number of its latest call, among all calls
    bool may_hold = true;
    bool is_taking = false; // a finalizer may run meanwhile

    explicit OwnMemory(const py::kwargs &given);
    ~OwnMemory();
    OwnMemory(const OwnMemory &) = delete;
    OwnMemory &operator=(const OwnMemory &) = delete;

    /* Makes every block free for this call, on the current stream. False without memory; then `error` says why.
       Blocks that the program still uses are given to it, and others allocated. */
    bool take(std::string *error);
    /* Whether a block is still free, after other code may have run. */
    bool is_free(size_t number) const;
    /* Ends a call that was launched. */
    void launched();
    /* Releases what was given away. */
    void drop() { const auto released = std::exchange(dropped, {}); }
    /* Drops all memory; what the program uses stays alive. */
    void release();
    void hold(bool may);
    /* The bytes of all blocks, or of those that are kept from call to call. */
    size_t nbytes(bool only_held) const;

    PyObject *item(uint64_t number) const { return number < blocks.size() ? blocks[number].base : nullptr; }

  private:
    bool allocate(Block *block, const c10::Stream &stream, std::string *error);
    void give_away(Block *block);
};

/* A new tensor in the storage of another one. */
at::Tensor alias(PyObject *base, const Strided &layout);

/* Notes that another stream uses a tensor's memory: a block there is not used again. */
void note_stream(const at::Tensor &tensor);

void declare_addresses(py::module_ &module);
void declare_own_memory(py::module_ &module);

} // namespace pygraph
