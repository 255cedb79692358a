/* Whether other code can see the gradients that a backward returns.

   are_only_accumulated answers yes if the backward runs the whole autograd graph and all of its gradients go to
   AccumulateGrad without a hook. Then a replay may return the recording's own tensors; otherwise it returns new ones.
   native/DESIGN.md gives the reason, and the one case that is not detected. */

#include "fast_path.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <typeinfo>

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

namespace {

constexpr size_t NODES_AHEAD = 16; // nodes

/* Whether a node accumulates a gradient without any hook. Hooks on a parameter are tensor hooks. */
bool is_unseen(Node &node) {
    return typeid(node) == typeid(AccumulateGrad) && node.pre_hooks().empty() && node.post_hooks().empty() &&
           node.retains_grad_hooks().empty() && node.tensor_pre_hooks().empty() &&
           node.tensor_post_acc_grad_hooks() == nullptr;
}

/* If the backward itself is differentiated, AOTAutograd returns the gradients from another function's forward, and they
   then require gradients. Torch turns off gradients of both modes there, and in a backward those of reverse mode. */
bool is_differentiated() {
    return c10::GradMode::is_enabled() || !c10::AutogradState::get_tls_state().get_fw_grad_mode();
}

/* Loads the fields that is_unseen reads: the node's type, its hooks, which are next to each other, and its parameter,
   which has the parameter's hooks. The offsets are those of torch 2.11 and 2.13; a wrong one only costs time. */
void load(const Node *node, const pygraph::Parameter &parameter) {
    using pygraph::Known;
    Known::ahead(node, 0);
    Known::ahead(node, 128), Known::ahead(node, 192), Known::ahead(node, 264);
    Known::ahead(node, sizeof(AccumulateGrad) - 1);
    Known::ahead(parameter.tensor, 24);
    Known::ahead(parameter.autograd, 80), Known::ahead(parameter.autograd, 143);
}

} // namespace

bool pygraph::are_only_accumulated(std::vector<Parameter> *parameters) {
    const auto node = torch::autograd::get_current_node();
    if (!node || is_differentiated() || !node->post_hooks().empty() || node->name() != "CompiledFunctionBackward")
        return false; // not a node of AOTAutograd, by its name
    const auto *captured = torch::autograd::get_current_graph_task_exec_info();
    if (captured == nullptr || !captured->empty())
        return false; // torch.autograd.grad, or a backward to some inputs
    const auto &edges = node->next_edges();
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
