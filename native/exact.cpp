// Exact graphs: each row's bits must not depend on the other rows of its run, nor on where its KV cells are (for that, see
// cell_order.cpp).
//
// ggml multiplies one row by dot products. From two rows on, its matrix kernels for floats and for IQ4_NL add in
// another order, with `use_ref` as well. So the products they would take are put in such that they decline:
//   floats  they take a number of outputs that is a multiple of 4: the last output is computed apart
//   IQ4_NL  they take two rows or more: each row is computed apart
// Attention without flash attention is such products, of F16 keys and values. MUL_MAT_ID never uses these kernels. ARM has more
// of them, for several types and by its features: there, each row of any product is computed apart.
//
// Our own products and attention give a row the same bits in any run by themselves (products.cpp, attention.cpp).
#include <cstring>

#include "compute.h"
#include "fast.h"
#include "stage.h"

namespace ggpipe {

namespace {
enum class Cut { None, LastOutput, Rows };

Cut cut_of(const ggml_tensor * node, bool fast) {
    if (node->op != GGML_OP_MUL_MAT || node->ne[1] < 2 || (fast && is_product(node))) return Cut::None;
#ifdef __x86_64__
    const ggml_tensor * weight = node->src[0];
    switch (weight->type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16: return weight->ne[1] % 4 == 0 ? Cut::LastOutput : Cut::None;
        case GGML_TYPE_IQ4_NL: return weight->extra ? Cut::None : Cut::Rows;  // repacked ones have kernels of their own
        default: return Cut::None;
    }
#else
    return Cut::Rows;
#endif
}

// Whether ggml computes this, in an order that depends on the number of rows but for its reference kernels.
bool needs_reference(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_MUL_MAT:
        case GGML_OP_MUL_MAT_ID: return !is_product(node);
        case GGML_OP_FLASH_ATTN_EXT: return !can_attend(node);
        default: return false;
    }
}

// n of a matrix's columns, from one on.
ggml_tensor * columns(ggml_context * ctx, ggml_tensor * t, int64_t from, int64_t n) {
    ggml_tensor * part =
        ggml_view_4d(ctx, t, t->ne[0], n, t->ne[2], t->ne[3], t->nb[1], t->nb[2], t->nb[3], from * t->nb[1]);
    part->buffer = t->buffer;
    return part;
}

// The same operation on the same sources. `to` is a view of its result.
ggml_tensor * again(const ggml_tensor * node, ggml_tensor * to) {
    to->op = node->op;
    to->flags = node->flags;
    memcpy(to->op_params, node->op_params, sizeof to->op_params);
    memcpy(to->src, node->src, sizeof to->src);
    to->buffer = node->buffer;
    return to;
}

void add_outputs(ggml_cgraph * graph, ggml_context * ctx, ggml_tensor * node, int64_t from, int64_t n) {
    ggml_tensor * to = again(node, ggml_view_4d(ctx, node, n, node->ne[1], node->ne[2], node->ne[3], node->nb[1],
                                                node->nb[2], node->nb[3], from * node->nb[0]));
    to->src[0] = columns(ctx, node->src[0], from, n);
    ggml_graph_add_node(graph, to);
}
}  // namespace

bool repacking_breaks(ggml_type type, bool fast) {
    if (fast && multiplies_repacked(type)) return false;
    return type >= GGML_TYPE_Q2_K && type <= GGML_TYPE_Q6_K;  // Q3_K, Q4_K and Q5_K are between the two
}

ggml_status compute_exact(ggml_backend_t backend, ggml_cgraph * graph, CellOrder & cell_order, bool fast, Threads & threads) {
    const auto compute = [&](ggml_cgraph * g) { return fast ? compute_fast(backend, g, threads, /*exact*/ true) : ggml_backend_graph_compute(backend, g); };
    const int n_nodes = ggml_graph_n_nodes(graph);
    cell_order.begin_graph();
    size_t n_parts = 0;
    bool by_reference = !fast;  // else RMS norms are computed together with their weights, with the same bits
    for (int i = 0; i < n_nodes; i++) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        const Cut cut = cut_of(node, fast);
        n_parts += cut == Cut::LastOutput ? 2 : cut == Cut::Rows ? node->ne[1] : 0;
        by_reference = by_reference || needs_reference(node);
        if (node->op == GGML_OP_SET_ROWS) cell_order.written(node);
        if (node->op == GGML_OP_FLASH_ATTN_EXT && cell_order.needed(node)) n_parts += 4;
        if (node->op == GGML_OP_SOFT_MAX && node->src[1]) cell_order.complete = false;  // masked: attention
    }
    static const auto set_use_ref = (void (*)(ggml_backend_t, bool)) cpu_function("ggml_backend_cpu_set_use_ref");
    set_use_ref(backend, by_reference);
    if (n_parts == 0) return compute(graph);
    const size_t size = n_nodes + n_parts;
    ggml_context * ctx = ggml_init(
        {ggml_graph_overhead_custom(size, false) + 3 * n_parts * ggml_tensor_overhead(), nullptr, /*no_alloc*/ true});
    ggml_cgraph * exact_graph = ggml_new_graph_custom(ctx, size, false);
    for (int i = 0; i < n_nodes; i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (node->op == GGML_OP_FLASH_ATTN_EXT && cell_order.needed(node)) {
            ggml_tensor * to = again(node, ggml_view_tensor(ctx, node));
            cell_order.use_copies(to, exact_graph, ctx);
            ggml_graph_add_node(exact_graph, to);
            continue;
        }
        switch (cut_of(node, fast)) {
            case Cut::None: ggml_graph_add_node(exact_graph, node); break;
            case Cut::LastOutput:
                add_outputs(exact_graph, ctx, node, 0, node->ne[0] - 1);
                add_outputs(exact_graph, ctx, node, node->ne[0] - 1, 1);
                break;
            case Cut::Rows:
                for (int64_t row = 0; row < node->ne[1]; row++) {
                    ggml_tensor * to = again(node, columns(ctx, node, row, 1));
                    to->src[1] = columns(ctx, node->src[1], row, 1);
                    ggml_graph_add_node(exact_graph, to);
                }
        }
    }
    const ggml_status status = compute(exact_graph);
    ggml_free(ctx);
    return status;
}

}  // namespace ggpipe
