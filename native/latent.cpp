// Latent attention (MLA) of long prompts.
//
// A cell holds a latent vector of 512 numbers, from which each head can compute its own key and value of 128 numbers. libllama
// applies the heads' matrices to queries and results instead, so that all heads attend to the latent vectors. That is best for a
// few rows, but a row then multiplies 1088 numbers for each head and cell instead of 320.
//
// Here, if a run has many rows, keys and values are computed for each head once for all rows, a tile of cells at a time, and never
// stored. The graph remains the same: the product that would apply the keys' matrix to the queries copies these, and the product
// with the values' matrix copies attention's results.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "attention.h"
#include "cpu.h"
#include "fast.h"
#include "ggml-backend.h"

namespace ggpipe {

namespace {
using LatentKernel = void (*)(const AttentionTask &, const LatentHead &);
const CpuFeatures cpu = cpu_features();
const LatentKernel kernel = cpu.avx512 ? avx512_latent_attention : cpu.avx2 ? avx2_latent_attention : nullptr;
constexpr int64_t kFewestRows = 256, kFewestCells = 1024;
constexpr int64_t kLeastOfTask = 128, kMostOfTask = 2048;  // rows; queries and results of more would leave the caches
constexpr int64_t kColumns = 16;  // all vectors are whole ones

const ggml_tensor * source_of(const ggml_tensor * t) {  // of a view
    while (t->op == GGML_OP_VIEW || t->op == GGML_OP_PERMUTE || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_TRANSPOSE) t = t->src[0];
    return t;
}

// Products for each head, about: of a row and a cell, and once for a cell, with DeepSeek's widths; and if heads attend to latent
// vectors, of a row and a cell.
constexpr double kOfRow = 320, kOfCell = 131072, kOfLatentRow = 1088;

// Rows of a task. Tasks of one head expand the same cells, so there are no more than the threads need.
int64_t rows_of_task(const ggml_tensor * attention, int n_threads) {
    const int64_t n_rows = attention->src[0]->ne[1], n_heads = attention->src[0]->ne[2];
    int64_t best = 0;
    double least = INFINITY;
    for (int64_t n = (n_rows + kMostOfTask - 1) / kMostOfTask; best == 0 || n_rows / n >= kLeastOfTask; n++) {
        const int64_t rows = (n_rows + n - 1) / n, rounds = (n_heads * n + n_threads - 1) / n_threads;
        const double cost = rounds * (rows * kOfRow + kOfCell);
        if (cost < least) {
            least = cost;
            best = rows;
        }
    }
    return best;
}

// A product of heads' matrices that ggml has not repacked, as many as there are heads.
bool is_of_heads(const ggml_tensor * node, int64_t n_heads) {
    if (node->op != GGML_OP_MUL_MAT || !(node->flags & GGML_TENSOR_FLAG_COMPUTE) || node->nb[0] != sizeof(float)) return false;
    const ggml_tensor * weights = node->src[0], * source = node->src[1];
    const bool is_weight = weights->op == GGML_OP_NONE && weights->buffer && !weights->extra &&
                           ggml_backend_buffer_get_usage(weights->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
    return is_weight && weights->ne[2] == n_heads && weights->ne[3] == 1 && weights->ne[0] % kColumns == 0 &&
           weights->nb[0] == ggml_type_size(weights->type) &&
           (weights->type == GGML_TYPE_F32 || ggml_get_type_traits(weights->type)->to_float) && source->type == GGML_TYPE_F32 &&
           source->nb[0] == sizeof(float) && source->ne[2] == n_heads && source->ne[3] == 1;
}

// The product that applies the keys' matrices to an attention's queries; nullptr: the attention is of another kind, or has too few rows.
const ggml_tensor * queries_of(const ggml_tensor * node) {
    if (!kernel || !can_attend(node) || node->src[4]) return nullptr;
    const ggml_tensor * q = node->src[0], * k = node->src[1], * v = node->src[2], * mask = node->src[3];
    if (q->ne[1] < kFewestRows || mask->ne[0] < kFewestCells || mask->op != GGML_OP_NONE || q->ne[3] != 1) return nullptr;
    const float * params = (const float *) node->op_params;
    const bool is_latent = k->ne[2] == 1 && v->data == k->data && v->type == k->type && v->nb[1] == k->nb[1] && v->ne[0] < k->ne[0] &&
                           k->ne[0] % kColumns == 0 && v->ne[0] % kColumns == 0 && params[1] == 0 && params[2] == 0;
    const ggml_tensor * all = source_of(q);
    if (!is_latent || all->op != GGML_OP_CONCAT || all->op_params[0] != 0 || all->data != q->data) return nullptr;
    const ggml_tensor * product = source_of(all->src[0]);
    const bool fits = is_of_heads(product, q->ne[2]) && product->ne[0] == v->ne[0] && product->data == all->src[0]->data &&
                      all->ne[0] == k->ne[0] && product->src[0]->ne[0] <= v->ne[0] && all->src[1]->ne[0] == k->ne[0] - v->ne[0];
    return fits ? product : nullptr;
}

// Copies rows of n numbers: (rows, heads) by these strides.
struct Rows { char * data; size_t row, head; };
void copy_rows(Rows to, Rows from, int64_t n_rows, int64_t n_heads, size_t bytes, int thread, int n_threads) {
    for (int64_t i = n_rows * thread / n_threads; i < n_rows * (thread + 1) / n_threads; i++) {
        for (int64_t h = 0; h < n_heads; h++) {
            memcpy(to.data + i * to.row + h * to.head, from.data + i * from.row + h * from.head, bytes);
        }
    }
}
void copy_queries(ggml_tensor * product, int thread, int n_threads, void *) {
    const ggml_tensor * q = product->src[1];
    copy_rows({(char *) product->data, product->nb[1], product->nb[2]}, {(char *) q->data, q->nb[1], q->nb[2]}, q->ne[1], q->ne[2],
              q->ne[0] * sizeof(float), thread, n_threads);
}
void copy_results(ggml_tensor * product, int thread, int n_threads, void *) {
    const ggml_tensor * results = product->src[1];  // (numbers, rows, heads); each attention's are the first of its row
    copy_rows({(char *) product->data, product->nb[1], product->nb[2]}, {(char *) results->data, results->nb[1], results->nb[2]},
              product->ne[1], product->ne[2], product->ne[0] * sizeof(float), thread, n_threads);
}

// A head's matrix as floats (rows, columns), or turned (columns, rows).
void widen(const ggml_tensor * weights, int64_t head, bool turn, std::vector<float> & to) {
    const int64_t n = weights->ne[0], n_rows = weights->ne[1];
    const ggml_to_float_t to_float = ggml_get_type_traits(weights->type)->to_float;
    std::vector<float> row(n);
    to.resize(n * n_rows);
    for (int64_t r = 0; r < n_rows; r++) {
        const char * from = (const char *) weights->data + r * weights->nb[1] + head * weights->nb[2];
        float * numbers = turn ? row.data() : to.data() + r * n;
        if (weights->type == GGML_TYPE_F32) memcpy(numbers, from, n * sizeof(float));
        else to_float(from, numbers, n);
        for (int64_t i = 0; turn && i < n; i++) to[i * n_rows + r] = numbers[i];
    }
}

void compute_latent_attention(ggml_tensor * node, int thread, int n_threads, void * graph) {
    thread_local std::vector<int32_t> cells;
    thread_local std::vector<uint8_t> by_all;
    thread_local std::vector<float> keys, values;
    thread_local Scratch scratch;
    const FastGraph::Latent & latent = ((const FastGraph *) graph)->latent.at(node);
    const ggml_tensor * of_keys = latent.queries->src[0], * of_values = latent.results->src[0];
    const int64_t n_rows = node->src[0]->ne[1], size = rows_of_task(node, n_threads), n_parts = (n_rows + size - 1) / size;
    int64_t read = -1;  // part whose cells are listed
    for (int64_t task = thread; task < node->src[0]->ne[2] * n_parts; task += n_threads) {
        const int64_t head = task / n_parts, part = task % n_parts, first = part * size, n = std::min(size, n_rows - first);
        if (read != part) list_cells(node, first, first + n, cells, by_all);
        read = part;
        widen(of_keys, head, false, keys);
        widen(of_values, head, true, values);
        kernel({node, cells, by_all, 1, first, head, 1, 0, n, scratch}, {keys.data(), values.data(), of_keys->ne[0], of_values->ne[1]});
    }
}
}  // namespace

void FastGraph::find_latent(ggml_cgraph * graph) {
    std::vector<std::pair<const ggml_tensor *, const ggml_tensor *>> found;  // attention, and the product before it
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (const ggml_tensor * product = node->op == GGML_OP_FLASH_ATTN_EXT ? queries_of(node) : nullptr) found.emplace_back(node, product);
    }
    if (found.empty()) return;
    std::map<const ggml_tensor *, int> uses;  // as a source, but for views
    std::map<const ggml_tensor *, const ggml_tensor *> users;
    std::set<const ggml_tensor *> nodes;  // all of an attention's have to be in this graph, which may be a part of one
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (is_view(node)) continue;
        nodes.insert(node);
        for (const ggml_tensor * source : node->src) {
            if (!source) continue;
            uses[source_of(source)]++;
            users[source_of(source)] = node;
        }
    }
    for (const auto & [attention, product] : found) {
        const ggml_tensor * results = users[attention], * all = source_of(attention->src[0]);
        const bool is_private = uses[attention] == 1 && uses[all] == 1 && uses[product] == 1 && nodes.count(product);
        const bool fits = is_private && results && is_of_heads(results, attention->src[0]->ne[2]) && results->src[0]->ne[0] == attention->ne[0] &&
                          results->src[0]->ne[1] % kColumns == 0 && results->src[0]->ne[1] <= attention->ne[0] &&
                          results->src[1]->data == attention->data && results->src[1]->nb[1] == attention->nb[2] &&
                          results->src[1]->nb[2] == attention->nb[1] && results->ne[1] == attention->src[0]->ne[1];
        if (!fits) continue;
        for (const ggml_tensor * node : {attention, product, results}) latent[node] = {product, attention, results};
    }
}

// Whether rows share enough cells for it to take less time: not if they belong to many sequences, or see a window each.
bool FastGraph::latent_pays() const {
    std::set<const ggml_tensor *> masks;
    for (const auto & [node, l] : latent) masks.insert(l.attention->src[3]);
    return std::all_of(masks.begin(), masks.end(), [&](const ggml_tensor * mask) {
        std::vector<uint8_t> is_seen(mask->ne[0]);
        int64_t n_pairs = 0;  // of a row and a cell
        for (int64_t row = 0; row < mask->ne[1]; row++) {
            const uint16_t * cells = (const uint16_t *) ((const char *) mask->data + row * mask->nb[1]);
            uint32_t n = 0;
            for (int64_t c = 0; c < mask->ne[0]; c++) {
                const uint8_t sees = cells[c] != kHidden;
                is_seen[c] |= sees;
                n += sees;
            }
            n_pairs += n;
        }
        const int64_t n_cells = std::count(is_seen.begin(), is_seen.end(), 1);
        return n_cells * kOfCell + n_pairs * kOfRow < n_pairs * kOfLatentRow;
    });
}

ggml_custom_op_t FastGraph::latent_operation(const ggml_tensor * node) const {
    const auto found = latent.find(node);
    if (found == latent.end()) return nullptr;
    return node == found->second.queries ? copy_queries : node == found->second.results ? copy_results : compute_latent_attention;
}

}  // namespace ggpipe
