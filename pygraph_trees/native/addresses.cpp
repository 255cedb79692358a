/* The addresses of one instantiated graph: pygraph_trees.native._fast_path.Addresses, and Counter.

   The slow path reports which addresses fit (`accept`), and when the graph holds all that a call needs (`settle`). The
   fast path then gives the graph addresses that fit by itself, if only kernels hold them. native/DESIGN.md describes the
   arguments and the members. */

#include <ATen/Context.h>

namespace {

constexpr size_t MOST_ACCEPTED = 256; // addresses of one input: more than an allocator uses in turn

constexpr uint64_t MOST_ALIGNED = 512; // bytes: see indirection/routes.py

void check_count(const std::vector<uint64_t> &addresses, size_t count) {
    if (addresses.size() != count)
        throw py::value_error("expected an address for each input");
}

/* Whether copying the bytes of a tensor to dense memory copies the tensor. */
bool is_like(const at::Tensor &tensor, const at::Tensor &memory) {
    return tensor.is_cpu() && tensor.layout() == at::kStrided && !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
           tensor.dtype() == memory.dtype() && tensor.sizes() == memory.sizes() &&
           tensor.strides() == memory.strides() && !is_lazy(tensor) && !tensor._is_zerotensor();
}

/* The addresses that one instantiated graph holds. */
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

    explicit Addresses(const py::kwargs &all)
        : owner(all["owner"]), pool_changes(Counter::of(all["pool_changes"])),
          exec(reinterpret_cast<void *>(all["exec"].cast<uint64_t>())),
          set(reinterpret_cast<decltype(set)>(all["set"].cast<uint64_t>())),
          get_context(reinterpret_cast<decltype(get_context)>(all["get_context"].cast<uint64_t>())),
          context(reinterpret_cast<void *>(all["context"].cast<uint64_t>())),
          held(all["held"].cast<std::vector<uint64_t>>()), sets(Counter::of(all["sets"])) {
        pool_seen = pool_changes->value;
        const size_t count = held.size();
        holders.resize(count);
        accepted.resize(std::min(all["count"].cast<size_t>(), count));
        is_own.resize(count);
        given.resize(count);
        changes.resize(count);
        using Values = std::vector<std::tuple<uint64_t, at::Tensor, bool>>;
        for (const auto &[index, memory, may_be_late] : all["values"].cast<Values>())
            values.push_back({index, memory, may_be_late});
        for (const size_t position : all["own"].cast<std::vector<size_t>>())
            if (position < count)
                is_own[position] = 1;
        for (const auto &[handle, parameters] : all["nodes"].cast<std::vector<std::pair<uint64_t, uint64_t>>>())
            nodes.push_back({handle, parameters});
        is_due.resize(nodes.size());
        bool fits = nodes.empty() || (exec && set && get_context && context);
        using Words = std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>;
        for (const auto &[address, position, addend] : all["words"].cast<Words>()) {
            words.push_back({address, position, addend});
            fits = fits && position < count && address != 0;
        }
        for (const auto &[position, node] : all["holders"].cast<std::vector<std::pair<size_t, size_t>>>()) {
            fits = fits && position < count && node < nodes.size();
            if (fits)
                holders[position].push_back(node);
        }
        if (!fits)
            throw py::value_error("expected numbers of inputs and nodes that there are, and addresses");
    }

    void accept(size_t position, uint64_t address, uint64_t address_given) {
        if (position >= accepted.size())
            throw py::index_error("there is no such input");
        if (accepted[position].size() >= MOST_ACCEPTED && !accepted[position].contains(address))
            accepted[position].clear();
        accepted[position][address] = address_given;
    }

    void forget() {
        for (auto &fitting : accepted)
            fitting.clear();
        is_settled = false;
        pool_seen = pool_changes->value;
    }

    void settle(const std::vector<uint64_t> &addresses) {
        check_count(addresses, accepted.size());
        seen = addresses;
        is_settled = true;
    }

    void hold(const std::vector<uint64_t> &addresses) {
        check_count(addresses, held.size());
        count_changes(addresses);
        held = addresses;
    }

    /* Whether the graph needs no change for inputs at the addresses `seen`. */
    bool has_settled() const { return is_settled && pool_changes->value == pool_seen; }

    /* Changes the graph for inputs at these addresses; false if Python must do that. Runs no Python code. */
    bool patch(const std::vector<uint64_t> &addresses) {
        if (!has_settled() || nodes.empty() || addresses.size() != accepted.size())
            return false;
        if (countdown == 1 && addresses != seen)
            return false;
        void *current = nullptr; // may be another device's, or none in a thread that has not used the GPU yet
        if (get_context(&current) != 0 || current != context || !find_given(addresses))
            return false;
        const size_t done = set_nodes(given, nodes.size());
        if (done < nodes.size()) {
            is_settled = false;
            is_stuck = set_nodes(held, done) != done;
            return false;
        }
        count_changes(given);
        held = given;
        seen = addresses;
        sets->value += static_cast<unsigned long long>(std::count(is_due.begin(), is_due.end(), 1));
        return true;
    }

    /* Writes the inputs that nodes hold by value to the memory from which the nodes take them. False if Python must do
       that: an input is not laid out like its memory, or must be waited for. */
    bool write_values(const Inputs &inputs) const {
        for (const Value &value : values) {
            PyObject *object = inputs.at(value.index);
            if (!is_tensor(object))
                return false;
            const at::Tensor &tensor = THPVariable_Unpack(object);
            if (!is_like(tensor, value.memory))
                return false;
            const void *bytes = tensor.const_data_ptr();
            if (value.may_be_late && at::globalContext().isPinnedPtr(bytes))
                return false;
            std::memcpy(value.memory.data_ptr(), bytes, value.memory.nbytes());
        }
        return true;
    }

  private:
    /* Counts the inputs whose addresses change, until the route is chosen. */
    void count_changes(const std::vector<uint64_t> &next) {
        if (countdown == 0 || next == held)
            return;
        if (countdown > 1)
            countdown--;
        for (size_t i = 0; i < next.size(); i++)
            changes[i] += next[i] != held[i];
    }

    /* Finds the next addresses in the graph, and the nodes to set; false if an input's address is not known to fit. */
    bool find_given(const std::vector<uint64_t> &addresses) {
        const auto set_later = [&](size_t position) {
            for (const size_t node : holders[position])
                is_due[node] = 1;
        };
        std::fill(is_due.begin(), is_due.end(), 0);
        given = held;
        for (size_t i = addresses.size(); i < held.size(); i++) // nodes that hold values have those of the last call
            set_later(i);
        if (addresses == seen)
            return true;
        for (size_t i = 0; i < addresses.size(); i++) {
            if (addresses[i] == seen[i]) // the graph is settled
                continue;
            const auto found = accepted[i].find(addresses[i]);
            const bool is_known = found != accepted[i].end();
            if (!is_known && !(is_own[i] && addresses[i] % MOST_ALIGNED == 0))
                return false;
            given[i] = is_known ? found->second : addresses[i];
            if (given[i] != held[i])
                set_later(i);
        }
        return true;
    }

    /* Writes addresses and sets the due nodes among the first ones; returns how many it passed before a refusal. */
    size_t set_nodes(const std::vector<uint64_t> &addresses, size_t first) const {
        for (const Word &word : words) {
            const uint64_t value = addresses[word.position] + word.addend;
            std::memcpy(reinterpret_cast<void *>(word.address), &value, sizeof value); // a parameter may be unaligned
        }
        for (size_t i = 0; i < first; i++)
            if (is_due[i] && set(exec, reinterpret_cast<void *>(nodes[i].handle),
                                 reinterpret_cast<const void *>(nodes[i].parameters)) != 0)
                return i;
        return first;
    }
};

void declare_addresses(py::module_ &module) {
    declare<Counter>(module, "Counter").def(py::init<>()).def_readwrite("value", &Counter::value);
    declare<Addresses>(module, "Addresses")
        .def(py::init<const py::kwargs &>())
        .def("accept", &Addresses::accept)
        .def("forget", &Addresses::forget)
        .def("settle", &Addresses::settle)
        .def("unsettle", [](Addresses &self) { self.is_settled = false; })
        .def("hold", &Addresses::hold)
        .def("rebind", // the graph was instantiated again, and Python has to set its nodes
             [](Addresses &self, uint64_t exec) {
                 self.exec = reinterpret_cast<void *>(exec);
                 self.is_settled = false;
             })
        .def("is_settled",
             [](const Addresses &self, const std::vector<uint64_t> &addresses) {
                 check_count(addresses, self.accepted.size());
                 return self.has_settled() && self.seen == addresses;
             })
        .def("patch",
             [](Addresses &self, const std::vector<uint64_t> &addresses) {
                 check_count(addresses, self.accepted.size());
                 return self.patch(addresses);
             })
        .def_readonly("held", &Addresses::held)
        .def_property_readonly(
            "seen", [](const Addresses &self) { return self.is_settled ? std::optional(self.seen) : std::nullopt; })
        .def_readonly("is_stuck", &Addresses::is_stuck)
        .def_readonly("changes", &Addresses::changes)
        .def_readwrite("countdown", &Addresses::countdown);
}

} // namespace
