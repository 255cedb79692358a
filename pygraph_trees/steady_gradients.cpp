/* Whether anybody sees the gradients that a backward gives, see steady_entry.cpp.

   A recording has its gradients as tensors of its own, and torch counts one reference to such a tensor for the recording.
   AccumulateGrad, which takes a gradient over where nobody else holds it, takes a hook's reference for that one: then the
   parameter's gradient and what the hook was given are one memory. So a gradient that anybody may see is another tensor at
   each call. Nobody does where the whole graph of autograd is run, and all that the backward gives goes to AccumulateGrad,
   with no hook on the way, nor one that could put others on before all is accumulated. What is not seen is a hook that
   code of another node, which runs before all is accumulated, puts on a parameter. */

#include "steady.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <typeinfo>

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

namespace {

constexpr size_t AHEAD = 8; // nodes

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

void load(const Node *node) {
    for (size_t offset = 0; offset < sizeof(AccumulateGrad); offset += 64)
        pygraph::Known::ahead(node, offset);
}

} // namespace

bool pygraph::are_only_accumulated() {
    const auto node = torch::autograd::get_current_node();
    if (!node || is_differentiated() || !node->post_hooks().empty() || node->name() != "CompiledFunctionBackward")
        return false; // of AOTAutograd's, by its name
    const auto *captured = torch::autograd::get_current_graph_task_exec_info();
    if (captured == nullptr || !captured->empty())
        return false; // of torch.autograd.grad, or a backward to some inputs
    const auto &edges = node->next_edges();
    for (size_t i = 0; i < edges.size(); i++) {
        for (size_t next = i == 0 ? 0 : i + AHEAD; next <= i + AHEAD && next < edges.size(); next++)
            load(edges[next].function.get());
        if (edges[i].is_valid() && !is_unseen(*edges[i].function))
            return false;
    }
    return true;
}
