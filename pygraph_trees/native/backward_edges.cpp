/* Backwards in which compiled functions accumulate the gradients themselves: `taking` of the module.

   While a backward runs, edges to AccumulateGrads are taken out of a node, and a method of the node is shadowed, which
   accumulates in their place. All is restored when the backward ends, in whatever way. native/DESIGN.md has the
   conditions, and what happens if other backwards begin meanwhile. The GIL protects all of this. */

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>

using torch::autograd::edge_list;
using torch::autograd::variable_list;

namespace {

using Question = std::function<bool(const NodePtr &)>;

constexpr size_t MOST_NODES = 64, MOST_COUNTED = 1024; // that are searched for compiled functions, and for parameters
constexpr size_t LEAST_EDGES = 8, EDGES_AHEAD = 16;

/* Why edges stay, in the order in which trees/hooks/backward_edges.py reports it. */
enum class Why { TAKEN, GRAPH_KEPT, SOME_INPUTS, COMPILED_AUTOGRAD, WATCHED, OTHER_BACKWARD, NODE_HOOKED,
                 PARAMETER_HOOKED, PARAMETER_SHARED, PARAMETER_ELSEWHERE, PARAMETER_SUBCLASS, FEW_GRADIENTS,
                 ENGINE_DIFFERS, COUNT };

std::array<uint64_t, static_cast<size_t>(Why::COUNT)> counts; // of nodes that backwards reached
PyObject *mark_name = nullptr;

/* A node, and its edges as they were. */
struct Taken {
    NodePtr node;
    Ref self;                   // the node's Python object
    const char *method;         // that the engine calls
    edge_list edges, others;    // as they were, and what the node does not have at the moment
    std::vector<bool> is_taken; // by edge
    bool is_out = false;
    int users = 0; // running backwards that reach the node

    void swap() {
        node->next_edges().swap(others);
        is_out = !is_out;
    }

    void restore() {
        swap();
        if (PyObject_DelAttrString(self.get(), method) < 0)
            PyErr_Clear();
    }

    bool has_taken(const Node *leaf) const {
        const auto edge = std::ranges::find_if(edges, [&](const auto &other) { return other.function.get() == leaf; });
        return edge != edges.end() && is_taken[static_cast<size_t>(edge - edges.begin())];
    }

    Ref call(PyObject *arguments);
    void accumulate(variable_list &gradients);
};

thread_local const Taken *current = nullptr; // the node whose method runs in this thread

/* Checks and accumulates the gradients whose edges are out. */
void Taken::accumulate(variable_list &gradients) {
    torch::autograd::validate_outputs(edges, gradients, [&](const std::string &message) {
        return "Function " + node->name() + " returned an " + message;
    });
    variable_list one;
    for (size_t i = 0; i < edges.size(); i++) {
        if (!is_taken[i])
            continue;
        auto &to = static_cast<AccumulateGrad &>(*edges[i].function);
        const bool is_plain = is_unseen(to);
        if (is_plain && !gradients[i].defined())
            continue;
        one.clear();
        one.push_back(std::move(gradients[i])); // no other reference, so that it can be taken over
        if (is_plain)
            to(std::move(one));
        else
            evaluate(to, std::move(one));
    }
}

/* The class's method. If the engine evaluates the node, it then accumulates, and puts None in place of gradients. */
Ref Taken::call(PyObject *arguments) {
    Ref found = checked(PyObject_GetAttrString(reinterpret_cast<PyObject *>(Py_TYPE(self.get())), method));
    std::vector<PyObject *> given{self.get()};
    PyObject **first = PySequence_Fast_ITEMS(arguments);
    given.insert(given.end(), first, first + PyTuple_GET_SIZE(arguments));
    const Taken *outer = std::exchange(current, this);
    Ref result(PyObject_Vectorcall(found.get(), given.data(), given.size(), nullptr));
    current = outer;
    if (!result)
        throw py::error_already_set();
    if (!is_out || !is_evaluated(node.get()))
        return result; // for a backward that found the edges in place, or a call by other code
    TORCH_CHECK(node->post_hooks().empty(), "pygraph_trees: a hook was put on a compiled function's node during its "
                                            "backward; put it on before, or set pygraph_entry to 'off'");
    const std::vector<bool> &is_tensor_input = reinterpret_cast<THPFunction *>(self.get())->is_variable_input;
    if (!PyTuple_Check(result.get()) || static_cast<size_t>(PyTuple_GET_SIZE(result.get())) < is_tensor_input.size())
        return result; // the engine raises
    for (size_t i = 0; i < is_tensor_input.size(); i++)
        if (PyObject *item = PyTuple_GET_ITEM(result.get(), static_cast<Py_ssize_t>(i));
            item != Py_None && !(is_tensor_input[i] && is_tensor(item)))
            return result; // the engine raises
    Ref items = checked(PySequence_List(result.get()));
    result = Ref();
    variable_list gradients; // by edge; those whose edges stay are the engine's
    gradients.reserve(edges.size());
    for (size_t i = 0; i < is_tensor_input.size(); i++) {
        PyObject *item = PyList_GET_ITEM(items.get(), static_cast<Py_ssize_t>(i));
        if (!is_tensor_input[i])
            continue;
        const bool is_ours = is_taken[gradients.size()] && item != Py_None;
        gradients.push_back(is_ours ? THPVariable_Unpack(item) : at::Tensor());
        if (is_ours) // the Python object dies, so that use counts are as in the engine
            PyList_SetItem(items.get(), static_cast<Py_ssize_t>(i), Py_NewRef(Py_None));
    }
    if (!torch::autograd::get_current_graph_task_keep_graph())
        node->release_variables(); // the engine does so between the node and its AccumulateGrads
    {
        py::gil_scoped_release no_gil;
        accumulate(gradients);
    }
    return Ref(PyList_AsTuple(items.get()));
}

PyObject *call_taken(PyObject *capsule, PyObject *arguments) {
    return translated([&] {
        const auto taken = *static_cast<std::shared_ptr<Taken> *>(PyCapsule_GetPointer(capsule, nullptr));
        return taken->call(arguments).release();
    });
}

PyMethodDef call_definition{"accumulate", call_taken, METH_VARARGS, "Calls the class's method, and accumulates."};

/* The name of the method that the engine calls; torch 2.12 has only one. */
const char *method_of(const auto *function) {
    if constexpr (requires { function->boxed_grads_call; })
        return function->boxed_grads_call ? "apply_boxed" : "apply";
    return "apply";
}

/* Which edges are taken out, or why they stay. */
Why choose(Node &node, const Question &is_shared, std::vector<bool> *is_taken) {
    const edge_list &edges = node.next_edges();
    const auto stream = node.stream();
    const c10::Device device = stream ? stream->device() : c10::Device(c10::kCPU);
    is_taken->assign(edges.size(), false);
    size_t count = 0;
    Why why = Why::FEW_GRADIENTS;
    for (size_t i = 0; i < edges.size(); i++) {
        if (i + EDGES_AHEAD < edges.size())
            for (const size_t offset : {0, 128, 192, 264}) // what is_unseen reads
                Known::ahead(edges[i + EDGES_AHEAD].function.get(), offset);
        if (!edges[i].is_valid() || typeid(*edges[i].function) != typeid(AccumulateGrad))
            continue;
        auto &to = static_cast<AccumulateGrad &>(*edges[i].function);
        if (!is_unseen(to))
            return Why::PARAMETER_HOOKED; // the engine would run hooks in another order if only some edges were left
        if (is_shared(edges[i].function))
            why = Why::PARAMETER_SHARED;
        else if (to.variable.unsafeGetTensorImpl()->is_python_dispatch())
            why = Why::PARAMETER_SUBCLASS;
        else if (to.stream() != stream || to.variable.device() != device)
            why = Why::PARAMETER_ELSEWHERE;
        else if (count++ > 0)
            (*is_taken)[i] = true;
    }
    return count > LEAST_EDGES ? Why::TAKEN : why;
}

/* What a backward is given, besides its roots. */
struct Surroundings {
    py::object upstream;        // torch's function that runs the engine
    py::dict compiled_autograd; // the module's variables
    py::object log, check;      // of autograd; of torch's engine, None in the check itself
    bool is_checked = false, is_known = true;
};

bool is_set(const py::dict &variables, const char *name) {
    PyObject *value = PyDict_GetItemString(variables.ptr(), name);
    return value != nullptr && PyObject_IsTrue(value) == 1;
}

/* Why no edge is taken out in this backward. */
Why why_none(const Surroundings &around, const py::args &args, const py::kwargs &keywords) {
    if (args.size() != 5 || !is_set(keywords, "accumulate_grad") || PyObject_IsTrue(args[4].ptr()) != 0)
        return Why::SOME_INPUTS;
    if (PyObject_IsTrue(args[2].ptr()) != 0 || PyObject_IsTrue(args[3].ptr()) != 0)
        return Why::GRAPH_KEPT;
    if (is_set(around.compiled_autograd, "compiled_autograd_enabled") ||
        is_set(around.compiled_autograd, "in_compiled_autograd_region"))
        return Why::COMPILED_AUTOGRAD;
    if (torch::autograd::AnomalyMode::is_enabled() || around.log.attr("getEffectiveLevel")().cast<int>() <= 10) // DEBUG
        return Why::WATCHED;
    return Why::TAKEN;
}

/* A backward. Restores everything when it is destroyed. */
class Run {
  public:
    Run() { running++, outermost += !is_inside; }
    ~Run() {
        for (const auto &taken : back)
            taken->swap();
        for (const auto &taken : used)
            if (--taken->users == 0) {
                std::erase(out, taken);
                taken->restore();
            }
        running--, outermost -= !is_inside;
    }
    static bool is_any() { return running > 0; }

    /* Notes which nodes without edges the backward reaches: all, if it also begins at others than `roots`. */
    void use(const std::vector<NodePtr> &roots, bool are_all, PyObject *inputs) {
        if (out.empty())
            return;
        std::unordered_set<const Node *> reached;
        walk(roots, SIZE_MAX, [&](const NodePtr &node) { reached.insert(node.get()); });
        std::vector<NodePtr> wanted;
        for (Py_ssize_t i = 0; PyTuple_Check(inputs) && i < PyTuple_GET_SIZE(inputs); i++)
            wanted.push_back(node_of(PyTuple_GET_ITEM(inputs, i)));
        for (const auto &taken : out) {
            if (are_all && !reached.contains(taken->node.get()))
                continue;
            used.push_back(taken);
            taken->users++;
            const auto lacks = [&](const NodePtr &leaf) { return taken->has_taken(leaf.get()); };
            if (taken->is_out ? std::ranges::none_of(wanted, lacks) : is_inside)
                continue;
            TORCH_CHECK(taken->is_out && is_inside && outermost == 1,
                        "pygraph_trees: a gradient is asked for that another thread accumulates at the same time; wait "
                        "until its backward has ended, or set pygraph_entry to 'off'");
            taken->swap();
            back.push_back(taken);
        }
    }

    void take(const NodePtr &node, Ref self, std::vector<bool> is_taken) {
        auto taken = std::make_shared<Taken>();
        taken->node = node;
        taken->method = method_of(reinterpret_cast<THPFunction *>(self.get()));
        taken->self = std::move(self);
        taken->is_taken = std::move(is_taken);
        taken->edges = taken->others = node->next_edges();
        for (size_t i = 0; i < taken->others.size(); i++)
            if (taken->is_taken[i])
                taken->others[i] = torch::autograd::Edge();
        const py::capsule capsule(new std::shared_ptr<Taken>(taken),
                                  [](void *held) { delete static_cast<std::shared_ptr<Taken> *>(held); });
        Ref callable = checked(PyCFunction_New(&call_definition, capsule.ptr()));
        checked(PyObject_SetAttrString(taken->self.get(), taken->method, callable.get()));
        taken->swap();
        taken->users = 1;
        used.push_back(taken);
        out.push_back(std::move(taken));
    }

  private:
    const bool is_inside = torch::autograd::get_current_graph_task_id() != -1; // inside of another backward
    static inline int running = 0, outermost = 0;          // in all threads
    static inline std::vector<std::shared_ptr<Taken>> out; // of all backwards
    std::vector<std::shared_ptr<Taken>> used, back;        // back: with all edges while this backward runs
};

/* The nodes of functions that were compiled with "short", and whether hooks may run before they have accumulated. */
std::vector<std::pair<NodePtr, Ref>> marked_nodes(const std::vector<NodePtr> &roots, bool *are_hooked) {
    std::vector<std::pair<NodePtr, Ref>> found;
    std::unordered_set<const Node *> hooked;
    walk(roots, MOST_NODES, [&](const NodePtr &node) {
        if (!(node->pre_hooks().empty() && node->tensor_pre_hooks().empty() && node->post_hooks().empty()))
            hooked.insert(node.get());
        if (!node->is_aot_backward())
            return;
        Ref self(torch::autograd::functionToPyObject(node));
        if (self && PyObject_HasAttr(reinterpret_cast<PyObject *>(Py_TYPE(self.get())), mark_name))
            found.emplace_back(node, std::move(self));
    });
    std::vector<NodePtr> later; // are evaluated after one of them
    for (size_t i = 0; i < found.size() && !hooked.empty(); i++)
        for (const auto &edge : found[i].first->next_edges())
            if (edge.is_valid() && typeid(*edge.function) != typeid(AccumulateGrad))
                later.push_back(edge.function);
    walk(later, MOST_NODES, [&](const NodePtr &node) { hooked.erase(node.get()); });
    *are_hooked = !hooked.empty();
    return found;
}

/* Why edges of a node stay, and in `chosen` those that need not. */
Why why_not(Surroundings &around, Why none, Node &node, const Question &is_shared, std::vector<bool> *chosen) {
    if (none != Why::TAKEN)
        return none;
    if (!around.check.is_none() && !around.is_checked) // the check runs backwards in another thread
        around.is_known = around.check().cast<bool>(), around.is_checked = true;
    if (!around.is_known)
        return Why::ENGINE_DIFFERS;
    return Run::is_any() && !around.check.is_none() ? Why::OTHER_BACKWARD : choose(node, is_shared, chosen);
}

/* torch.autograd's function that runs the engine, for a backward in which edges may be taken out. */
PyObject *run_backward(Surroundings &around, const py::args &args, const py::kwargs &keywords) {
    std::vector<NodePtr> roots;
    bool are_all = !args.empty(), is_leaf = false;
    for (py::handle root : are_all ? py::object(args[0]) : py::tuple()) {
        if (NodePtr node = node_of(root.ptr()); !node)
            are_all = false;
        else if (typeid(*node) == typeid(AccumulateGrad))
            is_leaf = true;
        else
            roots.push_back(std::move(node));
    }
    // Other graphs may hold it: the last one of another size, one whose loss is kept, or whose backward comes later.
    const Question is_shared = [&, nodes = size_t(0),
                                edges = std::unordered_map<const Node *, size_t>()](const NodePtr &to) mutable {
        if (!are_all || is_leaf || to.use_count() == 1)
            return !are_all || is_leaf;
        if (nodes == 0)
            walk(roots, MOST_COUNTED, [&](const NodePtr &node) {
                nodes++;
                for (const auto &edge : node->next_edges())
                    edges[edge.function.get()]++;
            });
        return nodes == MOST_COUNTED || edges[to.get()] != 1;
    };
    bool are_hooked = false;
    auto nodes = marked_nodes(roots, &are_hooked);
    Why none = nodes.empty() ? Why::TAKEN : why_none(around, args, keywords);
    if (none == Why::TAKEN && are_hooked)
        none = Why::NODE_HOOKED; // a hook may do anything: put others on, begin a backward, read the graph
    std::vector<std::vector<bool>> chosen(nodes.size());
    std::vector<Why> whys;
    for (size_t i = 0; i < nodes.size(); i++)
        whys.push_back(why_not(around, none, *nodes[i].first, is_shared, &chosen[i]));
    Run run;
    run.use(roots, are_all, args.size() > 4 ? args[4].ptr() : Py_None);
    for (size_t i = 0; i < nodes.size(); i++) {
        if (whys[i] == Why::TAKEN)
            run.take(nodes[i].first, std::move(nodes[i].second), std::move(chosen[i]));
        if (!around.check.is_none())
            counts[static_cast<size_t>(whys[i])]++;
    }
    nodes.clear(), roots.clear(); // a node is held only by whoever holds its graph
    // What restores the edges must not see an exception of Python's.
    return checked(PyObject_Call(around.upstream.ptr(), args.ptr(), keywords.ptr())).release();
}

PyObject *call_run_backward(PyObject *capsule, PyObject *args, PyObject *keywords) {
    return translated([&] {
        auto &around = *static_cast<Surroundings *>(PyCapsule_GetPointer(capsule, nullptr));
        return run_backward(around, py::reinterpret_borrow<py::args>(args),
                            keywords == nullptr ? py::kwargs() : py::reinterpret_borrow<py::kwargs>(keywords));
    });
}

PyMethodDef run_definition{"_engine_run_backward", (PyCFunction)(void (*)())call_run_backward,
                           METH_VARARGS | METH_KEYWORDS, "Runs torch's engine, with edges taken out."};

/* Each eager backward goes through it, too, so it is no function of pybind11's, which would take longer. */
py::object taking(const py::object &upstream, const py::dict &compiled_autograd, const py::object &log,
                  const py::object &check) {
    const py::capsule around(new Surroundings{upstream, compiled_autograd, log, check},
                             [](void *held) { delete static_cast<Surroundings *>(held); });
    return py::reinterpret_steal<py::object>(PyCFunction_New(&run_definition, around.ptr()));
}

const edge_list &edges_of(const Node &node) {
    return current != nullptr && current->node.get() == &node ? current->edges : node.next_edges();
}

void add_backward_edges(py::module_ &module) {
    mark_name = PyUnicode_InternFromString("pygraph_entry_is_short");
    module.attr("LEAST_EDGES") = LEAST_EDGES;
    module.def("taking", taking, "A torch.autograd._engine_run_backward that takes edges out, given torch's.");
    module.def("counted_backwards", [] { return counts; }, "For each Why, of how many nodes' edges it held.");
}

} // namespace
