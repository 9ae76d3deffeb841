// Operations that are computed here in place of ggml where that is faster. While a graph is computed, they
// are custom operations of ggml's.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ggml.h"

namespace ggpipe {

// What a node was is kept after the parameters of a custom operation.
constexpr int kOwnParams = GGML_MAX_OP_PARAMS / sizeof(int32_t) / 2;

struct Params { int32_t numbers[GGML_MAX_OP_PARAMS / sizeof(int32_t)]; };
Params params_of(ggml_custom_op_t compute, void * state);  // of a custom operation
void become_custom(ggml_tensor * node, const Params & params);

// Memory for quantized activations; see products.cpp.
struct QuantizedMemory {
    std::vector<int8_t> numbers;
    std::vector<int32_t> starts;
    std::vector<float> scales, sums;
};

struct Kernel;

// Of a graph while it is computed. The functions that compute take one thread's part, and this as `state`.
struct FastGraph {
    struct Quantized {  // activations that products share
        Quantized(const ggml_tensor * s, const Kernel * k, QuantizedMemory & m) : source(s), kernel(k), memory(m) {}
        const ggml_tensor * source;
        const Kernel * kernel;
        QuantizedMemory & memory;
        std::atomic<int64_t> taken{0}, done{0};  // rows
    };
    struct Product {
        Product(ggml_tensor * n, Quantized & q, const Kernel * k) : node(n), quantized(q), weights(n->src[0]), kernel(k) {}
        ggml_tensor * node;
        Quantized & quantized;
        const ggml_tensor * weights;
        const Kernel * kernel;
        std::atomic<int64_t> taken{0};  // tiles
    };
    struct State {  // of a delta net: read from cells, changed, and written back
        const ggml_tensor * rows, * net, * copy;
        bool stays() const;  // each sequence's state goes to the cell from which it came: neither read nor written apart
    };
    static constexpr int kIndex = kOwnParams - 1;  // of a product's parameters: its place in `products`
    explicit FastGraph(std::deque<QuantizedMemory> & m) : memories(m) {}
    std::deque<QuantizedMemory> & memories;
    std::vector<Quantized *> kept;  // in each of the memories, until the step that needs it for another one
    std::deque<Quantized> quantized;
    std::deque<Product> products;
    std::map<const ggml_tensor *, State> states;  // by each of their nodes
    struct Latent {  // attention of a run with many rows, and the products before and after it with its heads' matrices
        const ggml_tensor * queries, * attention, * results;
    };
    std::map<const ggml_tensor *, Latent> latent;  // by each of their nodes
    std::map<const ggml_tensor *, const ggml_tensor *> sums;  // of experts: the last addition, and the product with their weights
    std::set<const ggml_tensor *> copied_weights;             // products whose weights go to `weights`
    std::vector<float> weights;
    std::set<const ggml_tensor *> weighted_norms;  // products of a norm with weights, which compute the norm as well
    std::set<const ggml_tensor *> folded;          // what other nodes compute along with themselves

    void add(const std::vector<ggml_tensor *> & products_of_step);
    void begin();  // before each time that the graph is computed
    void find_states(ggml_cgraph * graph);
    void find_sums(ggml_cgraph * graph);   // see experts.cpp
    void find_norms(ggml_cgraph * graph);  // see norms.cpp
    void find_latent(ggml_cgraph * graph);  // see latent.cpp
    bool latent_pays() const;               // if there are any
    ggml_custom_op_t latent_operation(const ggml_tensor * node) const;
};

// Flash attention for any number of rows; see attention.cpp.
bool can_attend(const ggml_tensor * node);
void compute_attention(ggml_tensor * node, int thread, int n_threads, void * state);

// The function that computes a node of a recurrent layer; see recurrent.cpp. nullptr: ggml does.
ggml_custom_op_t recurrent_operation(const ggml_tensor * node, const FastGraph & graph);

// The function that computes a part of an indexer; see indexer.cpp. nullptr: ggml does.
ggml_custom_op_t indexer_operation(const ggml_tensor * node);

// The function that computes an operation on each number; see elementwise.cpp. nullptr: ggml does.
ggml_custom_op_t elementwise_operation(const ggml_tensor * node);

// Whether a node computes nothing. Operations in place are views as well, but they do.
bool is_view(const ggml_tensor * node);

// The function of ours that computes a node; nullptr: ggml does.
ggml_custom_op_t own_operation(const ggml_tensor * node, const FastGraph & graph);

// A token's experts, weighted and added up; see experts.cpp.
void compute_expert_sum(ggml_tensor * node, int thread, int n_threads, void * state);
void copy_expert_weights(ggml_tensor * product, int thread, int n_threads, void * state);

// The function that computes the norm of each row; see norms.cpp. nullptr: ggml does.
ggml_custom_op_t norm_operation(const ggml_tensor * node, const FastGraph & graph);

// How often nodes read the memory of each tensor.
std::map<const ggml_tensor *, int64_t> reads_in(ggml_cgraph * graph);

// Whether two tensors have memory in common.
bool overlap(const ggml_tensor * a, const ggml_tensor * b);

// Products with quantized weights; see products.cpp.
bool is_product(const ggml_tensor * node);
bool multiplies_repacked(ggml_type type);  // of weights that ggml has repacked
void compute_product(ggml_tensor * node, int thread, int n_threads, void * state);

// The names of our own kernels that a CPU with these features takes for products with weights of a type, and for
// attention; empty: ggml's. Throws std::runtime_error.
std::pair<std::string, std::string> kernel_names(ggml_type type, bool is_repacked, const std::vector<std::string> & features);

// A graph that is no stage's, on a backend of its own; returns how often its threads waited. Throws std::runtime_error.
int64_t compute_alone(ggml_cgraph * graph, int n_threads, bool fast);

// One product alone, as a stage computes it, for tests and measurements.
struct Product {
    ggml_type type;
    int64_t n_columns, n_rows, n_matrices;  // of the weights; 0: a single one
    std::vector<uint8_t> weights;          // as in a file
    std::vector<float> activations;        // n_columns for each token
    std::vector<int32_t> experts;          // as many for each token; which of them is used
};
// Row by row for each token, and for each of its experts. Throws std::runtime_error.
std::vector<float> multiply(const Product & product, int n_threads, bool repack, bool fast);

// (tokens, columns): results of experts (tokens, experts, columns), weighted by (tokens, experts) and added up, as a stage computes it,
// for tests. Throws std::runtime_error.
std::vector<float> sum_experts(
    const std::vector<float> & experts, const std::vector<float> & weights, int64_t n_used, int n_threads, bool fast);

// Two tensors one after another along a dimension, as a stage joins them, for tests. Throws std::runtime_error.
struct Block { std::vector<int64_t> shape; std::string data; };
std::string join(ggml_type type, const Block & first, const Block & second, int dim, int n_threads);

// The norms of the first `width` of each `stride` numbers, times weights if there are any, as a stage computes them, for tests. Throws
// std::runtime_error.
std::vector<float> normalize(const std::vector<float> & rows, int64_t width, int64_t stride, const std::vector<float> & weights, bool is_l2,
                             int n_threads, bool fast);

// One indexer alone, as a stage computes it, for tests.
struct IndexerShape { int64_t width, n_heads, n_rows, n_cells, n_selected; ggml_type key_type; };
struct IndexerInputs {
    const float * queries;   // (rows, heads, width)
    const uint8_t * keys;    // (cells, bytes)
    const float * weights;   // (rows, heads)
    const uint16_t * mask;   // F16; (rows, cells)
};
// Scores (rows, cells), and the selected cells of each row. Throws std::runtime_error.
std::pair<std::vector<float>, std::vector<int32_t>> index_cells(
    const IndexerShape & shape, const IndexerInputs & inputs, int n_threads, bool fast);

// One attention alone, as a stage computes it, for tests and measurements.
struct AttentionShape {
    int64_t key_width, value_width, n_heads, n_kv_heads, n_rows, n_cells;
    ggml_type key_type, value_type;
    bool has_sinks;
    float max_bias, softcap;  // 0: none
};
struct AttentionInputs {
    const float * queries;           // (rows, heads, width)
    const uint8_t * keys, * values;  // (cells, KV heads, bytes)
    const uint16_t * mask;           // F16; (rows, cells)
    const float * sinks;             // of each head; nullptr: none
};
// Returns (rows, heads, width). Both throw std::runtime_error.
std::vector<float> attend(const AttentionShape & shape, const AttentionInputs & inputs, int n_threads, bool fast);
// Seconds of each round, with ggml's kernel and then with our own. Each row sees all cells but those of the rows after it.
std::vector<std::pair<double, double>> time_attention(const AttentionShape & shape, int n_threads, int n_rounds);

}  // namespace ggpipe
