// Operations that are computed here in place of ggml where that is faster, in default numerics. While a graph is computed, they
// are custom operations of ggml's.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>

#include "ggml.h"

namespace ggpipe {

// What a node was is kept after the parameters of a custom operation.
constexpr int kOwnParams = GGML_MAX_OP_PARAMS / sizeof(int32_t) / 2;

// The functions that compute take one thread's part. `state` is the graph's.
struct FastGraph {
    int64_t number;                          // no other graph has it
    std::deque<std::atomic<int64_t>> taken;  // of each product: tiles that threads have taken
    static constexpr int kIndex = kOwnParams - 1;  // of a product's parameters: where it is in `taken`
};

// Flash attention for any number of rows; see attention.cpp.
bool attention_is_faster(const ggml_tensor * node, int n_threads);
void compute_attention(ggml_tensor * node, int thread, int n_threads, void * state);

// Products of quantized weights and several rows; see products.cpp.
bool is_product(const ggml_tensor * node);
void compute_product(ggml_tensor * node, int thread, int n_threads, void * state);

}  // namespace ggpipe
