// The results of a token's experts, weighted and added up.
//
// In libllama's graphs this is a product and an addition for each further expert: of eight experts, 37 rows are read or written.
// Here it is one operation, which reads eight and writes one, and rounds as they do.
#include <algorithm>
#include <map>
#include <memory>
#include <stdexcept>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "cpu.h"
#include "fast.h"
#include "ggml-alloc.h"
#include "stage.h"
#include "vectors.h"

namespace ggpipe {

namespace {
constexpr int64_t kColumns = 64;

void weigh_some(const float * experts, int64_t stride, const float * weights, int64_t n_used, int64_t n, float * to) {
    float sums[kColumns];
    for (int64_t i = 0; i < n; i++) sums[i] = experts[i] * weights[0];
    for (int64_t expert = 1; expert < n_used; expert++) {
        const float * x = experts + expert * stride;
        const float weight = weights[expert];
        for (int64_t i = 0; i < n; i++) sums[i] += x[i] * weight;
    }
    std::copy_n(sums, n, to);
}

#ifdef __x86_64__
__attribute__((target("avx2"))) void weigh_with_vectors(const float * experts, int64_t stride, const float * weights, int64_t n_used, float * to) {
    using F = Floats<8>;
    constexpr int kVectors = kColumns / 8;
    F sums[kVectors]{};
    for (int64_t expert = 0; expert < n_used; expert++) {
        const float * x = experts + expert * stride;
        const F weight = _mm256_set1_ps(weights[expert]);
        GGPIPE_UNROLLED(i, kVectors) {
            const F weighted = _mm256_loadu_ps(x + 8 * i) * weight;
            sums[i] = expert ? sums[i] + weighted : weighted;
        }
    }
    GGPIPE_UNROLLED(i, kVectors) _mm256_storeu_ps(to + 8 * i, sums[i]);
}
const bool has_vectors = cpu_features().avx2;
#endif

void weigh(const float * experts, int64_t stride, const float * weights, int64_t n_used, int64_t n, float * to) {
#ifdef __x86_64__
    if (has_vectors && n == kColumns) return weigh_with_vectors(experts, stride, weights, n_used, to);
#endif
    weigh_some(experts, stride, weights, n_used, n, to);
}

// (columns, experts, tokens) times (1, experts, tokens)
bool weighs_experts(const ggml_tensor * node) {
    if (node->op != GGML_OP_MUL || !(node->flags & GGML_TENSOR_FLAG_COMPUTE)) return false;
    const ggml_tensor * experts = node->src[0], * weights = node->src[1];
    return weights->ne[0] == 1 && weights->ne[1] == experts->ne[1] && weights->ne[2] == experts->ne[2] && experts->ne[0] > 1 &&
           experts->ne[1] > 1 && experts->ne[3] == 1 && experts->type == GGML_TYPE_F32 && weights->type == GGML_TYPE_F32 &&
           ggml_is_contiguous(experts) && ggml_is_contiguous(weights) && !(node->flags & GGML_TENSOR_FLAG_OUTPUT);
}

// Whether a tensor is one expert's results among weighted ones, as a matrix (columns, tokens).
bool is_expert_of(const ggml_tensor * view, const ggml_tensor * weighted, int64_t expert) {
    return view->view_src == weighted && view->data == (const char *) weighted->data + expert * weighted->nb[1] &&
           view->ne[0] == weighted->ne[0] && view->ne[1] == weighted->ne[2] && view->ne[2] * view->ne[3] == 1 &&
           view->nb[0] == sizeof(float) && (view->ne[1] == 1 || view->nb[1] == weighted->nb[2]);
}
}  // namespace

void compute_expert_sum(ggml_tensor * node, int thread, int n_threads, void * graph) {
    const FastGraph & g = *(FastGraph *) graph;
    const ggml_tensor * product = g.sums.at(node), * experts = product->src[0];
    const float * weights = g.copied_weights.count(product) ? g.weights.data() : (const float *) product->src[1]->data;
    const int64_t n_columns = experts->ne[0], n_used = experts->ne[1], n_tokens = experts->ne[2];
    const int64_t n_blocks = (n_columns + kColumns - 1) / kColumns, n = n_blocks * n_tokens;
    for (int64_t i = n * thread / n_threads; i < n * (thread + 1) / n_threads; i++) {
        const int64_t token = i / n_blocks, from = i % n_blocks * kColumns;
        weigh((const float *) experts->data + token * n_used * n_columns + from, n_columns, weights + token * n_used, n_used,
              std::min(kColumns, n_columns - from), (float *) ((char *) node->data + token * node->nb[1]) + from);
    }
}

void copy_expert_weights(ggml_tensor * product, int thread, int, void * graph) {
    const ggml_tensor * weights = product->src[1];
    if (thread == 0) std::copy_n((const float *) weights->data, ggml_nelements(weights), ((FastGraph *) graph)->weights.data());
}

// Products with experts' weights, each followed by nothing but additions of its results, in the experts' order. Nothing else reads
// what these write on the way.
void FastGraph::find_sums(ggml_cgraph * graph) {
    std::map<const ggml_tensor *, int64_t> n_reads = reads_in(graph);
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * product = ggml_graph_node(graph, i);
        if (!weighs_experts(product)) continue;
        const int64_t n_used = product->ne[1];
        const ggml_tensor * sum = nullptr;
        std::vector<const ggml_tensor *> parts{product};
        for (int j = i + 1; j < ggml_graph_n_nodes(graph) && (int64_t) parts.size() < n_used; j++) {
            const ggml_tensor * node = ggml_graph_node(graph, j);
            if (is_view(node)) continue;
            const ggml_tensor * before = node->src[0];
            const bool adds = node->op == GGML_OP_ADD && (sum ? before == sum : is_expert_of(before, product, 0)) &&
                              is_expert_of(node->src[1], product, parts.size());
            if (!adds) break;
            sum = node;
            parts.push_back(node);
        }
        const bool is_whole = sum && (int64_t) parts.size() == n_used && (sum->flags & GGML_TENSOR_FLAG_COMPUTE);
        if (!is_whole || overlap(sum, product->src[0])) continue;
        parts.pop_back();
        bool is_read = n_reads[product] != n_used;
        for (size_t j = 1; j < parts.size(); j++) is_read = is_read || n_reads[parts[j]] != 1;
        if (is_read) continue;
        sums[sum] = product;
        if (overlap(sum, product->src[1])) {  // ggml gave the sum memory that the weights need no longer after the product
            copied_weights.insert(product);
            weights.resize(std::max<size_t>(weights.size(), ggml_nelements(product->src[1])));
            parts.erase(parts.begin());
        }
        folded.insert(parts.begin(), parts.end());
    }
}

std::vector<float> sum_experts(
    const std::vector<float> & experts, const std::vector<float> & weights, int64_t n_used, int n_threads, bool fast) {
    const int64_t n_tokens = n_used > 0 ? weights.size() / n_used : 0, n_columns = n_tokens ? experts.size() / weights.size() : 0;
    if (n_columns == 0 || experts.size() != size_t(n_tokens * n_used * n_columns)) {
        throw std::runtime_error("experts do not have the size of their weights");
    }
    const std::unique_ptr<ggml_context, void (*)(ggml_context *)> ctx(ggml_init({1 << 20, nullptr, /*no_alloc*/ true}), ggml_free);
    ggml_tensor * x = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, n_columns, n_used, n_tokens);
    ggml_tensor * w = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, 1, n_used, n_tokens);
    ggml_tensor * product = ggml_mul(ctx.get(), x, w), * sum = nullptr;
    for (int64_t i = 0; i < n_used; i++) {
        ggml_tensor * expert = ggml_view_2d(ctx.get(), product, n_columns, n_tokens, product->nb[2], i * product->nb[1]);
        sum = sum ? ggml_add(ctx.get(), sum, expert) : expert;
    }
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, sum);
    const std::unique_ptr<ggml_backend_buffer, void (*)(ggml_backend_buffer_t)> memory(
        ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(cpu_device())), ggml_backend_buffer_free);
    if (!memory) throw std::runtime_error("not enough memory");
    std::copy(experts.begin(), experts.end(), (float *) x->data);
    std::copy(weights.begin(), weights.end(), (float *) w->data);
    if (compute_alone(graph, n_threads, fast) >= n_used && fast) throw std::runtime_error("this is no sum of experts");
    return {(float *) sum->data, (float *) sum->data + n_columns * n_tokens};
}

}  // namespace ggpipe
