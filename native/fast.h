// Operations that are computed here in place of ggml where that is faster, in default numerics. While a graph is computed, they
// are custom operations of ggml's.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <vector>

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

// One product alone, as a stage computes it, for tests and measurements.
struct Product {
    ggml_type type;
    int64_t n_columns, n_rows, n_experts;  // of the weights; no experts: one matrix
    std::vector<uint8_t> weights;          // as in a file
    std::vector<float> activations;        // n_columns for each token
    std::vector<int32_t> experts;          // as many for each token; which of them is used
};
// Row by row for each token, and for each of its experts. Throws std::runtime_error.
std::vector<float> multiply(const Product & product, int n_threads, bool repack, bool fast);

}  // namespace ggpipe
