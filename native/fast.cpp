#include "fast.h"

#include <cstring>
#include <utility>
#include <vector>

#include "compute.h"

namespace ggpipe {

namespace {
// A custom operation's parameters, as ggml writes them.
struct Params { int32_t bytes[kOwnParams]; };
Params params_of(ggml_custom_op_t compute, void * state) {
    alignas(16) char memory[1024];  // of a tensor without data
    ggml_context * ctx = ggml_init({sizeof memory, memory, /*no_alloc*/ true});
    const ggml_tensor * custom = ggml_custom_4d(ctx, GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0, compute, GGML_N_TASKS_MAX, state);
    Params params;
    memcpy(params.bytes, custom->op_params, sizeof params.bytes);
    ggml_free(ctx);
    return params;
}
}  // namespace

ggml_status compute_fast(ggml_backend_t backend, ggml_cgraph * graph, int n_threads) {
    static std::atomic<int64_t> n_graphs{0};
    FastGraph state{n_graphs++, {}};
    const Params attention = params_of(compute_attention, &state), product = params_of(compute_product, &state);
    std::vector<std::pair<ggml_tensor *, ggml_op>> nodes;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        const bool multiplies = is_product(node);
        if (!multiplies && !attention_is_faster(node, n_threads)) continue;
        memcpy(node->op_params + kOwnParams, node->op_params, sizeof(Params));
        memcpy(node->op_params, (multiplies ? product : attention).bytes, sizeof(Params));
        if (multiplies) {
            node->op_params[FastGraph::kIndex] = state.taken.size();
            state.taken.emplace_back(0);
        }
        nodes.emplace_back(node, node->op);
        node->op = GGML_OP_CUSTOM;
    }
    const ggml_status status = ggml_backend_graph_compute(backend, graph);
    for (auto & [node, op] : nodes) {
        memcpy(node->op_params, node->op_params + kOwnParams, sizeof(Params));
        memset(node->op_params + kOwnParams, 0, sizeof(Params));
        node->op = op;
    }
    return status;
}

}  // namespace ggpipe
