// Attention over KV cells in the order of their positions, wherever in the cache they are.
//
// With `use_ref`, flash attention adds up cell by cell and skips those that a row's mask hides. So a row's bits depend on
// the order of the cells that it sees, and not on other cells. They are in order of position until libllama takes a free
// cell below others of the same sequence. Rollbacks and ended sequences leave such cells.
//
// So each cell gets a growing stamp when it is written. Of two cells that a row sees, that of the later position has the
// later stamp: it came in a later run, or as a later row of the same run (copies of sequences share cells). Where a row
// does not see cells by growing stamps, the operation gets copies of all cells that rows see, by growing stamps, and of
// the mask's columns. A removed cell's stamp stays, and no row sees the cell, until it is written again. Restored cells
// get their stamps as they are put back: in the order in which they lay when they were saved.
#include <algorithm>
#include <cstring>

#include "compute.h"

namespace ggpipe {

namespace {
// The cache that these are cells of, or were converted from.
const ggml_tensor * cache_of(const ggml_tensor * t) {
    while (t->view_src || t->op == GGML_OP_CPY) t = t->view_src ? t->view_src : t->src[0];
    return t;
}

// A custom operation: columns of its source, in the order that `cells` says.
void copy_columns(ggml_tensor * to, int thread, int n_threads, void * cells) {
    const ggml_tensor * from = to->src[0];
    const size_t size = ggml_row_size(to->type, to->ne[0]);
    const int64_t first = to->ne[1] * thread / n_threads, end = to->ne[1] * (thread + 1) / n_threads;
    for (int64_t k = 0; k < to->ne[2]; k++) {
        for (int64_t i = first; i < end; i++) {
            memcpy((char *) to->data + i * to->nb[1] + k * to->nb[2],
                   (const char *) from->data + ((const int32_t *) cells)[i] * from->nb[1] + k * from->nb[2], size);
        }
    }
}

ggml_tensor * add_copy(ggml_cgraph * graph, ggml_context * ctx, ggml_tensor * from, std::vector<int32_t> & cells, void * to) {
    ggml_tensor * copy = ggml_custom_4d(ctx, from->type, from->ne[0], cells.size(), from->ne[2], 1, &from, 1, copy_columns,
                                        GGML_N_TASKS_MAX, cells.data());
    copy->flags |= GGML_TENSOR_FLAG_COMPUTE;
    copy->data = to;
    copy->buffer = from->buffer;
    ggml_graph_add_node(graph, copy);
    return copy;
}

size_t copy_bytes(const ggml_tensor * t, size_t n_cells) {
    return GGML_PAD(ggml_row_size(t->type, t->ne[0]) * n_cells * t->ne[2], 64);
}
}  // namespace

void CellOrder::written(const ggml_tensor * node) {
    const ggml_tensor * cache = cache_of(node);
    if (cache->op != GGML_OP_NONE || node->ne[0] == 1) return;  // no cache; values without flash attention
    Stamps & stamps = stamps_[cache->data];
    stamps.resize(node->ne[1]);
    const ggml_tensor * cells = node->src[1];
    for (int64_t row = 0; row < cells->ne[0]; row++) {
        const void * cell = (const char *) cells->data + row * cells->nb[0];
        stamps[cells->type == GGML_TYPE_I64 ? *(const int64_t *) cell : *(const int32_t *) cell] = ++last_stamp_;
    }
}

void CellOrder::restored(const ggml_tensor * tensor, size_t offset, size_t size) {
    const auto cache = stamps_.find(tensor->data);
    if (cache == stamps_.end()) return;
    const size_t end = std::min((offset + size) / tensor->nb[1], cache->second.size());
    for (size_t cell = offset / tensor->nb[1]; cell < end; cell++) cache->second[cell] = ++last_stamp_;
}

CellOrder::Order & CellOrder::order_of(const ggml_tensor * attention) {
    const ggml_tensor * mask = attention->src[3];
    for (Order & order : orders_) {
        if (order.mask == mask) return order;
    }
    Order & order = orders_.emplace_back(Order{mask, {}, {}, nullptr});
    const auto cache = stamps_.find(cache_of(attention->src[1])->data);
    if (!mask || cache == stamps_.end()) {
        complete = false;
        return order;
    }
    const Stamps & stamps = cache->second;
    constexpr uint16_t kHidden = 0xfc00;  // minus infinity
    // A mask that the graph itself makes is not known yet: then any cell may be seen.
    const auto * sees = mask->op == GGML_OP_NONE ? (const uint16_t *) mask->data : nullptr;
    const int64_t n_cells = mask->ne[0], n_rows = sees ? ggml_nrows(mask) : 1;
    std::vector<bool> seen(n_cells);
    bool in_order = true;
    for (int64_t row = 0; row < n_rows; row++) {
        int64_t last = 0;
        for (int64_t cell = 0; cell < n_cells; cell++) {
            if (sees && sees[row * n_cells + cell] == kHidden) continue;
            seen[cell] = true;
            in_order = in_order && last <= stamps[cell];
            last = stamps[cell];
        }
    }
    if (in_order) return order;
    for (int64_t cell = 0; cell < n_cells; cell++) {
        if (seen[cell]) order.cells.push_back(cell);
    }
    std::stable_sort(order.cells.begin(), order.cells.end(), [&](int a, int b) { return stamps[a] < stamps[b]; });
    order.memory.resize(ggml_type_size(mask->type) * order.cells.size() * ggml_nrows(mask));
    return order;
}

bool CellOrder::needed(const ggml_tensor * attention) {
    const size_t n = order_of(attention).cells.size();
    memory_.resize(std::max(memory_.size(), copy_bytes(attention->src[1], n) + copy_bytes(attention->src[2], n)));
    return n > 0;
}

void CellOrder::use_copies(ggml_tensor * attention, ggml_cgraph * graph, ggml_context * ctx) {
    Order & order = order_of(attention);
    ggml_tensor *& keys = attention->src[1], *& values = attention->src[2], *& mask = attention->src[3];
    if (!order.columns) {
        ggml_tensor * single = ggml_view_4d(ctx, mask, 1, mask->ne[0], ggml_nrows(mask), 1, mask->nb[0], mask->nb[1],
                                            ggml_nbytes(mask), 0);
        ggml_tensor * copy = add_copy(graph, ctx, single, order.cells, order.memory.data());
        order.columns = ggml_reshape_4d(ctx, copy, order.cells.size(), mask->ne[1], mask->ne[2], mask->ne[3]);
    }
    uint8_t * after_keys = memory_.data() + copy_bytes(keys, order.cells.size());
    keys = add_copy(graph, ctx, keys, order.cells, memory_.data());
    values = add_copy(graph, ctx, values, order.cells, after_keys);
    mask = order.columns;
}

}  // namespace ggpipe
