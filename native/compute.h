// How graphs are computed where not by ggml alone: with attention of our own, or such that rows have equal bits anywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <tuple>
#include <vector>

#include "ggml-backend.h"
#include "ggml.h"

namespace ggpipe {

struct Threads {  // of a stage
    int n = 1;
    int64_t n_operations = 0, n_waits = 0;  // of the last run; how often they waited for each other
};

// As ggml_backend_graph_compute on a CPU backend with these threads, with operations of our own where they can; see fast.h.
// `exact`: only those with which a row has the same bits in any run.
ggml_status compute_fast(ggml_backend_t backend, ggml_cgraph * graph, Threads & threads, bool exact = false);

class CellOrder {  // KV cells in the order in which they were written; see cell_order.cpp
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

// As ggml_backend_graph_compute on a CPU backend, with products that depend on the number of rows cut into parts that
// do not, and with attention that reads KV cells in order. fast: also as `compute_fast`.
ggml_status compute_exact(ggml_backend_t backend, ggml_cgraph * graph, CellOrder & cell_order, bool fast, Threads & threads);

// Repacked weights of this type are multiplied in an order that depends on the number of rows. fast: with our own products.
bool repacking_breaks(ggml_type type, bool fast);

// What the last rank takes from a row of logits, so that it need not ship the row: ids and logits of the k largest, largest
// first, equal ones by id, and the log-sum-exp, which takes most of the time. It is not a number without `sums` and for
// k = 1. Banned tokens count as minus infinity. temperature: above 0, the log-sum-exp is that of the logits divided by it, and the
// last vector has for each id the share of the probability that smaller ids have. O(n) for small k.
using TopRow = std::tuple<std::vector<int32_t>, std::vector<float>, double, std::vector<double>>;
TopRow top(
    const float * logits, size_t n_vocab, size_t k, std::vector<int32_t> banned, bool sums, double temperature = 0);

// The token that llama.cpp draws from a row of logits with this random number from 0 to 1, if no sampler but a temperature comes before.
int32_t draw(const float * logits, size_t n_vocab, const std::vector<int32_t> & banned, float temperature, double number);

// Ids and logits of all tokens that are at least `min_p` times as probable as the best one, as llama.cpp selects them, by id.
std::pair<std::vector<int32_t>, std::vector<float>> likely(
    const float * logits, size_t n_vocab, const std::vector<int32_t> & banned, float min_p);

}  // namespace ggpipe
