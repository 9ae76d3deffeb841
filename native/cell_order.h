// KV cells in the order in which they were written; see cell_order.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <vector>

#include "ggml.h"

namespace ggpipe {

class CellOrder {
   public:
    // A graph is about to be computed. Its nodes go through the next two in their order.
    void begin_graph() { orders_.clear(); }
    // For each operation that writes rows of a tensor.
    void written(const ggml_tensor * set_rows);
    // Whether this flash attention's cells lie in another order than they were written in.
    bool needed(const ggml_tensor * attention);
    // Lets `attention`, for which that holds, read copies in order. They are made by operations that this adds: three at
    // most, six tensors at most. They live until the next graph.
    void use_copies(ggml_tensor * attention, ggml_cgraph * graph, ggml_context * ctx);

    // Bytes came into a tensor without a graph, as they do when libllama restores a sequence.
    void restored(const ggml_tensor * tensor, size_t offset, size_t size);

    // False once there was attention whose cells cannot be ordered: without flash attention, or not over a cache.
    bool complete = true;

   private:
    struct Order {  // for all attention with the same mask
        const ggml_tensor * mask;
        std::vector<int32_t> cells;  // none: all rows see them in order as they lie
        std::vector<uint8_t> memory;
        ggml_tensor * columns;  // the mask's, in order; in `memory`
    };
    Order & order_of(const ggml_tensor * attention);

    using Stamps = std::vector<int64_t>;
    std::map<const void *, Stamps> stamps_;  // of each cache's cells, by its first byte
    int64_t last_stamp_ = 0;
    std::list<Order> orders_;     // of this graph
    std::vector<uint8_t> memory_;  // for keys and values of one layer
};

}  // namespace ggpipe
