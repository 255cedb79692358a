/* A recording's outputs: those that it has cached, as long as the program leaves them as they were made.

   Gradients are returned themselves if no other code can see them, and otherwise as new tensors; see native/DESIGN.md.
   What reads autograd's graph is also used by backward_edges.cpp. */

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/inductor/inductor_ops.h>

#include <functional>
#include <typeinfo>
#include <unordered_set>

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

namespace {

using NodePtr = decltype(torch::autograd::Edge::function); // another pointer since torch 2.13

/* The edges of the node that this thread evaluates, with those that backward_edges.cpp has taken out. */
const torch::autograd::edge_list &edges_of(const Node &node);

/* Where a parameter was at the last call. */
struct Parameter {
    const void *tensor = nullptr, *autograd = nullptr;
};

/* Whether there are attributes besides those that AOTAutograd sets at each call on outputs of symbolic size; the second
   name is that of torch 2.11 and 2.12. */
bool has_attributes(PyObject *dictionary) {
    PyObject *name, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(dictionary, &position, &name, &value))
        if (!PyUnicode_Check(name) ||
            (PyUnicode_CompareWithASCIIString(name, "_dynamo_propagated_dynamic_indices") != 0 &&
             PyUnicode_CompareWithASCIIString(name, "_dynamo_weak_dynamic_indices") != 0))
            return true;
    return false;
}

/* Whether the dimensions have names; torch 2.13 has none. */
bool has_names(const auto *impl) {
    if constexpr (requires { impl->has_named_tensor_meta(); })
        return impl->has_named_tensor_meta();
    return false;
}

/* Lets a dead tensor begin as a new one. A detached tensor that the program gave other memory may share its version. */
void reset_version(c10::TensorImpl *impl) {
    const c10::VariableVersion &version = impl->version_counter();
    if (!version.enabled())
        return;
    if (!version.unique())
        impl->set_version_counter(c10::VariableVersion(0));
    else if (version.current_version() != 0)
        c10::VariableVersion(version).set_version(0);
}

/* Whether a cached output is as it was made, and has nothing that its last user left: a gradient or its type, a
   tangent, a history that is not replaced, hooks, names, attributes, weak references. It must also be an inference
   tensor if `is_inference`. */
bool is_untouched(PyObject *output, const Replay::Made &made, const int64_t *shape, bool has_new_history,
                  bool is_inference) {
    if (output != made.known.object || Py_TYPE(output) != made.kind)
        return false;
    const at::Tensor &tensor = THPVariable_Unpack(output);
    const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    const c10::StorageImpl *storage = impl->unsafe_storage().unsafeGetStorageImpl();
    if (storage != made.known.storage || storage->data() != made.data || impl->storage_offset() != made.offset ||
        impl->dtype() != made.dtype || tensor.is_inference() != is_inference || tensor.is_conj() || tensor.is_neg() ||
        has_names(impl))
        return false;
    const at::IntArrayRef sizes = impl->sizes(), strides = impl->strides();
    if (sizes.size() != made.dimensions)
        return false;
    for (size_t i = 0; i < made.dimensions; i++)
        if (sizes[i] != shape[i] || strides[i] != shape[made.dimensions + i])
            return false;
    if (impl->autograd_meta() != nullptr) {
        const auto *known = static_cast<const torch::autograd::AutogradMeta *>(impl->autograd_meta());
        if (known->grad_.defined() || known->fw_grad_ != nullptr || known->requires_grad_ || known->retains_grad_ ||
            known->post_acc_grad_hooks_ != nullptr || known->grad_dtype_.has_value() ||
            known->allow_grad_dtype_mismatch_ || (!has_new_history && known->grad_fn_ != nullptr))
            return false;
    }
    return *made.references == nullptr &&
           (made.attributes == nullptr || *made.attributes == nullptr || !has_attributes(*made.attributes));
}

/* A new tensor like a cached one, in its storage. */
Ref renewed(PyObject *output) {
    const c10::TensorImpl *impl = THPVariable_Unpack(output).unsafeGetTensorImpl();
    return wrapped(alias(output, {impl->sizes().vec(), impl->strides().vec(), impl->storage_offset(), impl->dtype()}));
}

/* An output that is made for each call. */
Ref made_from(const Replay::Returned &output, PyObject *given, bool sees) {
    if (output.lends && !sees)
        reset_version(THPVariable_Unpack(given).unsafeGetTensorImpl());
    if (output.is_whole || (output.lends && !sees))
        return Ref::dup(given);
    const Strided &layout = output.layout;
    return wrapped(output.is_own ? alias(given, layout)
                                 : torch::inductor::_reinterpret_tensor(THPVariable_Unpack(given), layout.sizes,
                                                                        layout.strides, layout.offset));
}

/* The node of a Python function, to which it had a weak pointer before torch 2.13. */
NodePtr owned(const auto &node) {
    if constexpr (requires { node.lock(); })
        return node.lock();
    else
        return node;
}

constexpr size_t NODES_AHEAD = 16; // nodes

/* If the backward itself is differentiated, AOTAutograd returns the gradients from another function's forward, and they
   then require gradients. Torch turns off gradients of both modes there, and in a backward those of reverse mode. */
bool is_differentiated() {
    return c10::GradMode::is_enabled() || !c10::AutogradState::get_tls_state().get_fw_grad_mode();
}

/* Loads the fields that is_unseen reads: the node's type, its hooks, which are next to each other, and its parameter,
   which has the parameter's hooks. The offsets are those of torch 2.11 and 2.13; a wrong one only costs time. */
void load(const Node *node, const Parameter &parameter) {
    Known::ahead(node, 0);
    Known::ahead(node, 128), Known::ahead(node, 192), Known::ahead(node, 264);
    Known::ahead(node, sizeof(AccumulateGrad) - 1);
    Known::ahead(parameter.tensor, 24);
    Known::ahead(parameter.autograd, 80), Known::ahead(parameter.autograd, 143);
}

/* Notes the cached outputs, which Python has just made. */
void note_made(Replay *replay) {
    replay->made.clear();
    replay->shapes.clear();
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(replay->cached); i++) {
        PyObject *output = PyList_GET_ITEM(replay->cached, i);
        Replay::Made &made = replay->made.emplace_back();
        if (!is_tensor(output))
            continue;
        const c10::TensorImpl *impl = THPVariable_Unpack(output).unsafeGetTensorImpl();
        made.known.note(output);
        made.data = impl->unsafe_storage().unsafeGetStorageImpl()->data();
        made.kind = Py_TYPE(output);
        made.attributes = _PyObject_GetDictPtr(output);
        made.references = PyObject_GET_WEAKREFS_LISTPTR(output);
        made.offset = impl->storage_offset();
        made.dtype = impl->dtype();
        made.shape = replay->shapes.size();
        made.dimensions = impl->sizes().size();
        for (const at::IntArrayRef numbers : {impl->sizes(), impl->strides()})
            replay->shapes.insert(replay->shapes.end(), numbers.begin(), numbers.end());
    }
}

/* Whether the program left all cached outputs as they were made, in the same inference mode as this call's, so that
   they can be returned again. */
bool are_untouched(const Replay *replay) {
    constexpr size_t further = 8;
    const bool is_inference = c10::InferenceMode::is_enabled();
    const size_t count = static_cast<size_t>(PyList_GET_SIZE(replay->cached));
    if (count != replay->made.size())
        return count == 0;
    for (size_t i = 0; i < count; i++) {
        if (i + further < count)
            replay->made[i + further].load();
        PyObject *output = PyList_GET_ITEM(replay->cached, static_cast<Py_ssize_t>(i));
        const Replay::Made &made = replay->made[i];
        if (!is_tensor(output))
            continue;
        if (!is_untouched(output, made, replay->shapes.data() + made.shape, replay->has_new_history, is_inference))
            return false;
        reset_version(THPVariable_Unpack(output).unsafeGetTensorImpl());
    }
    return true;
}

/* Outputs of a recording, valid until other code runs: cached outputs, substitutes for others, and those that are made for
   each call. These are made once, and kept in `made`: outputs without elements, `returned` ones, from the tensors
   `given`, and gradients that are `picked` to be returned themselves. Code that only accumulates gradients does not `see`
   them, and gets cached ones. False if another output must be made. */
bool at_hand(const Replay *replay, PyObject *given, bool sees, const std::vector<bool> &picked,
                      std::vector<Ref> *made, std::vector<PyObject *> *outputs) {
    const auto is_renewed = [&](Py_ssize_t i) { // as long as the cached outputs do not change
        const auto number = static_cast<size_t>(i);
        return replay->is_backward && sees && (picked.empty() || (number < picked.size() && picked[number])) &&
               is_tensor(PyList_GET_ITEM(replay->cached, i));
    };
    if (made->empty()) { // first, since making a tensor may run other code
        for (const Replay::Empty &like : replay->empty)
            made->push_back(wrapped(at::empty_strided(like.sizes, like.strides, like.options)));
        for (size_t i = 0; i < replay->returned.size(); i++)
            made->push_back(made_from(replay->returned[i], PyTuple_GET_ITEM(given, static_cast<Py_ssize_t>(i)), sees));
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(replay->cached); i++)
            if (is_renewed(i))
                made->push_back(renewed(PyList_GET_ITEM(replay->cached, i)));
    }
    const Py_ssize_t count = PyList_GET_SIZE(replay->others);
    if (count == 0 || PyList_GET_SIZE(replay->cached) != count)
        return false;
    constexpr Py_ssize_t further = 32;
    outputs->resize(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i + further < count) {
            const PyObject *later = PyList_GET_ITEM(replay->cached, i + further);
            Known::ahead(later, 0), Known::ahead(later, 31);
        }
        PyObject *output = PyList_GET_ITEM(replay->cached, i);
        if (output == Py_None)
            output = PyList_GET_ITEM(replay->others, i);
        else if (!is_tensor(output) || reinterpret_cast<THPVariable *>(output)->backward_hooks != nullptr)
            return false; // upstream removes the hooks
        if (output == Py_NotImplemented)
            return false;
        (*outputs)[static_cast<size_t>(i)] = output;
    }
    auto next = made->begin();
    for (const Replay::Empty &like : replay->empty)
        (*outputs)[like.output] = (next++)->get();
    for (const Replay::Returned &output : replay->returned)
        (*outputs)[output.output] = (next++)->get();
    for (Py_ssize_t i = 0; i < count && next != made->end(); i++)
        if (is_renewed(i))
            (*outputs)[static_cast<size_t>(i)] = (next++)->get();
    return true;
}

/* The outputs of a recording as a list, made in Python. */
Ref outputs_of(PyObject *recording, const Replay *replay, PyObject *given) {
    Ref outputs = called(replay->make, recording);
    for (size_t i = 0; i < replay->returned.size(); i++) {
        Ref made = made_from(replay->returned[i], PyTuple_GET_ITEM(given, static_cast<Py_ssize_t>(i)), true);
        checked(PySequence_SetItem(outputs.get(), static_cast<Py_ssize_t>(replay->returned[i].output), made.get()));
    }
    return outputs;
}

/* Whether a node accumulates a gradient without any hook. Hooks on a parameter are tensor hooks. */
bool is_unseen(Node &node) {
    return typeid(node) == typeid(AccumulateGrad) && node.pre_hooks().empty() && node.post_hooks().empty() &&
           node.retains_grad_hooks().empty() && node.tensor_pre_hooks().empty() &&
           node.tensor_post_acc_grad_hooks() == nullptr;
}

/* Evaluates a node as the engine does, with hooks that were put on after the backward had begun. */
void evaluate(Node &node, std::vector<at::Tensor> gradient) {
    for (const auto &hook : node.tensor_pre_hooks())
        gradient = (*hook)(gradient);
    for (const auto &hook : node.retains_grad_hooks())
        gradient = (*hook.second)(gradient);
    for (const auto &hook : node.pre_hooks())
        gradient = (*hook)(gradient);
    const std::vector<at::Tensor> inputs = node.post_hooks().empty() ? std::vector<at::Tensor>() : gradient;
    std::vector<at::Tensor> outputs = node(std::move(gradient));
    for (const auto &hook : node.post_hooks())
        outputs = (*hook)(outputs, inputs);
}

/* The node at which a backward begins, given a tensor or a GradientEdge; an AccumulateGrad for a parameter. */
NodePtr node_of(PyObject *root) {
    if (THPVariable_Check(root))
        return torch::autograd::impl::gradient_edge(THPVariable_Unpack(root)).function;
    PyObject *node = PyTuple_Check(root) && PyTuple_GET_SIZE(root) > 0 ? PyTuple_GET_ITEM(root, 0) : Py_None;
    if (torch::autograd::THPCppFunction_Check(node))
        return reinterpret_cast<torch::autograd::THPCppFunction *>(node)->cdata;
    return THPFunction_Check(node) ? owned(reinterpret_cast<THPFunction *>(node)->cdata) : NodePtr();
}

/* Calls `visit` with the nodes that roots reach, the nearest first, but with no AccumulateGrad. */
void walk(std::vector<NodePtr> found, size_t most, const std::function<void(const NodePtr &)> &visit) {
    std::unordered_set<Node *> seen;
    for (size_t i = 0; i < found.size() && seen.size() < most; i++) {
        const NodePtr node = found[i];
        if (!seen.insert(node.get()).second)
            continue;
        for (const auto &edge : node->next_edges())
            if (edge.is_valid() && typeid(*edge.function) != typeid(AccumulateGrad))
                found.push_back(edge.function);
        visit(node);
    }
}

/* Whether this thread evaluates the node in a backward to all leaves. */
bool is_evaluated(const Node *node) {
    const auto *captured = torch::autograd::get_current_graph_task_exec_info();
    return captured != nullptr && captured->empty() && torch::autograd::get_current_node().get() == node;
}

/* Whether all gradients of the current backward are accumulated, and no other code sees them; see above.
   It notes the parameters' places, which are loaded ahead the next time. */
bool are_only_accumulated(std::vector<Parameter> *parameters) {
    const auto node = torch::autograd::get_current_node();
    if (!node || is_differentiated() || !node->post_hooks().empty() || node->name() != "CompiledFunctionBackward")
        return false; // not a node of AOTAutograd, by its name
    if (!is_evaluated(node.get()))
        return false; // torch.autograd.grad, or a backward to some inputs
    const auto &edges = edges_of(*node);
    parameters->resize(edges.size());
    for (size_t i = 0; i < edges.size(); i++) {
        for (size_t next = i == 0 ? 0 : i + NODES_AHEAD; next <= i + NODES_AHEAD && next < edges.size(); next++)
            load(edges[next].function.get(), (*parameters)[next]);
        if (!edges[i].is_valid())
            continue;
        if (!is_unseen(*edges[i].function))
            return false;
        const c10::TensorImpl *tensor =
            static_cast<const AccumulateGrad &>(*edges[i].function).variable.unsafeGetTensorImpl();
        (*parameters)[i] = {tensor, tensor->autograd_meta()};
    }
    return true;
}

} // namespace
