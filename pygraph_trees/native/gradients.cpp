/* Whether anybody sees the gradients that a backward gives, see native/entry.cpp.

   A recording has its gradients as tensors of its own, and torch counts one reference to such a tensor for the recording.
   AccumulateGrad, which takes a gradient over where nobody else holds it, takes a hook's reference for that one: then the
   parameter's gradient and what the hook was given are one memory. So a gradient that anybody may see is another tensor at
   each call. Nobody does where the whole graph of autograd is run, and all that the backward gives goes to AccumulateGrad,
   with no hook on the way, nor one that could put others on before all is accumulated. What is not seen is a hook that
   code of another node, which runs before all is accumulated, puts on a parameter. */

#include "fast_path.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <typeinfo>

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

namespace {

constexpr size_t NODES_AHEAD = 16; // nodes

/* Hooks on a parameter are among those of tensors. */
bool is_unseen(Node &node) {
    return typeid(node) == typeid(AccumulateGrad) && node.pre_hooks().empty() && node.post_hooks().empty() &&
           node.retains_grad_hooks().empty() && node.tensor_pre_hooks().empty() &&
           node.tensor_post_acc_grad_hooks() == nullptr;
}

/* Where a graph of the backward is made, AOTAutograd has the gradients given by another function's forward, which then
   has them ask for a gradient: torch turns gradients of both modes off there, and in a backward those of reverse mode. */
bool is_differentiated() {
    return c10::GradMode::is_enabled() || !c10::AutogradState::get_tls_state().get_fw_grad_mode();
}

/* What is_unseen reads: of the node its type, its hooks, which lie together, and its parameter, whose hooks are its own.
   Where they lie is as in torch 2.11 and 2.13; elsewhere a wrong guess costs time alone. */
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
        return false; // of AOTAutograd's, by its name
    const auto *captured = torch::autograd::get_current_graph_task_exec_info();
    if (captured == nullptr || !captured->empty())
        return false; // of torch.autograd.grad, or a backward to some inputs
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
