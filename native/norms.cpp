// Root mean square and L2 norms of rows, with the product with weights that follows most of them.
//
// ggml adds up squares one after another, in doubles, and each waits for the one before: some 3 % of a prompt's time. Here there are
// 16 such sums at a time. What is then rounded to a float almost never differs.
#include <algorithm>
#include <cmath>
#include <cstring>
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

#ifdef __x86_64__
namespace {
#define GGPIPE_TARGET __attribute__((target("avx2,fma")))
using F = Floats<8>;
constexpr int64_t kWidth = 8;
const bool has_vectors = cpu_features().avx2;

GGPIPE_TARGET GGPIPE_INLINE inline F load(const float * from) { return _mm256_loadu_ps(from); }

GGPIPE_TARGET GGPIPE_INLINE inline double sum_of_squares(const float * x, int64_t n) {
    using D = __m256d;
    D sums[4] = {};
    const auto add = [&](int64_t at, D & low, D & high) GGPIPE_TARGET GGPIPE_INLINE {
        const F squares = load(x + at) * load(x + at);
        low += _mm256_cvtps_pd(_mm256_castps256_ps128(squares));
        high += _mm256_cvtps_pd(_mm256_extractf128_ps(squares, 1));
    };
    int64_t i = 0;
    for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
        add(i, sums[0], sums[1]);
        add(i + kWidth, sums[2], sums[3]);
    }
    if (i < n) add(i, sums[0], sums[1]);
    const D sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Rows of `norm`, times those of `weights` if there are any, to `node`.
GGPIPE_TARGET void compute_rows(const ggml_tensor * norm, float epsilon, bool is_l2, const ggml_tensor * weights, ggml_tensor * node,
                                int thread, int n_threads) {
    const ggml_tensor * x = norm->src[0];
    const int64_t n = x->ne[0], n_rows = ggml_nrows(x);
    for (int64_t row = n_rows * thread / n_threads; row < n_rows * (thread + 1) / n_threads; row++) {
        const int64_t at[] = {row % x->ne[1], row / x->ne[1] % x->ne[2], row / x->ne[1] / x->ne[2]};
        const auto row_of = [&](const ggml_tensor * t) {
            return (float *) ((char *) t->data + at[0] % t->ne[1] * t->nb[1] + at[1] % t->ne[2] * t->nb[2] + at[2] % t->ne[3] * t->nb[3]);
        };
        const float * from = row_of(x);
        float * to = row_of(node);
        const double sum = sum_of_squares(from, n);
        const float scale = is_l2 ? 1 / std::fmax(std::sqrt(float(sum)), epsilon) : 1 / std::sqrt(float(sum / n) + epsilon);
        const F all = _mm256_set1_ps(scale);
        if (weights) {
            const float * factors = row_of(weights);
            for (int64_t i = 0; i < n; i += kWidth) _mm256_storeu_ps(to + i, load(from + i) * all * load(factors + i));
        } else {
            for (int64_t i = 0; i < n; i += kWidth) _mm256_storeu_ps(to + i, load(from + i) * all);
        }
    }
}

float epsilon_at(const int32_t * params) {
    float epsilon;
    memcpy(&epsilon, params, sizeof epsilon);
    return epsilon;
}
template <bool kIsL2> void compute_norm(ggml_tensor * node, int thread, int n_threads, void *) {
    compute_rows(node, epsilon_at(node->op_params + kOwnParams), kIsL2, nullptr, node, thread, n_threads);
}
void compute_weighted_norm(ggml_tensor * node, int thread, int n_threads, void *) {
    const ggml_tensor * norm = node->src[0];
    compute_rows(norm, epsilon_at(norm->op_params), false, node->src[1], node, thread, n_threads);
}

bool has_rows(const ggml_tensor * t) { return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float) && t->ne[0] % kWidth == 0; }
bool is_norm(const ggml_tensor * node, ggml_op op) {
    return has_vectors && node->op == op && (node->flags & GGML_TENSOR_FLAG_COMPUTE) && has_rows(node) && has_rows(node->src[0]);
}
}  // namespace

ggml_custom_op_t norm_operation(const ggml_tensor * node, const FastGraph & graph) {
    if (graph.weighted_norms.count(node)) return compute_weighted_norm;
    return is_norm(node, GGML_OP_RMS_NORM) ? compute_norm<false> : is_norm(node, GGML_OP_L2_NORM) ? compute_norm<true> : nullptr;
}

// Norms that nothing reads but a product with weights, which comes next. Between them, nothing can take the memory of what is normed.
void FastGraph::find_norms(ggml_cgraph * graph) {
    const std::map<const ggml_tensor *, int64_t> n_reads = reads_in(graph);
    const ggml_tensor * norm = nullptr;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (is_view(node) || ggml_is_empty(node)) continue;
        const bool follows = norm && node->op == GGML_OP_MUL && node->src[0] == norm && ggml_are_same_shape(node, norm) && has_rows(node) &&
                             has_rows(node->src[1]) && node->src[1]->ne[0] == node->ne[0] && (node->flags & GGML_TENSOR_FLAG_COMPUTE);
        if (follows) {
            const ggml_tensor * x = norm->src[0];
            const bool in_place = node->data == x->data && ggml_are_same_stride(node, x);
            if ((in_place || !overlap(node, x)) && !overlap(node, node->src[1])) {
                weighted_norms.insert(node);
                folded.insert(norm);
            }
        }
        const bool can_fold = is_norm(node, GGML_OP_RMS_NORM) && !node->view_src && !(node->flags & GGML_TENSOR_FLAG_OUTPUT);
        norm = can_fold && n_reads.count(node) && n_reads.at(node) == 1 ? node : nullptr;
    }
}
#else
ggml_custom_op_t norm_operation(const ggml_tensor *, const FastGraph &) { return nullptr; }
void FastGraph::find_norms(ggml_cgraph *) {}
#endif

std::vector<float> normalize(const std::vector<float> & rows, int64_t width, int64_t stride, const std::vector<float> & weights, bool is_l2,
                             int n_threads, bool fast) {
    const int64_t n_rows = stride > 0 ? rows.size() / stride : 0;
    const bool fits = width > 0 && width <= stride && rows.size() == size_t(n_rows * stride) && (weights.empty() || weights.size() == size_t(width));
    if (!fits) throw std::runtime_error("rows and weights do not have these sizes");
    const std::unique_ptr<ggml_context, void (*)(ggml_context *)> ctx(ggml_init({1 << 20, nullptr, /*no_alloc*/ true}), ggml_free);
    ggml_tensor * x = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, stride, n_rows);
    ggml_tensor * w = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, width);
    ggml_tensor * some = ggml_view_2d(ctx.get(), x, width, n_rows, x->nb[1], 0);
    constexpr float kEpsilon = 1e-5f;
    ggml_tensor * result = is_l2 ? ggml_l2_norm(ctx.get(), some, kEpsilon) : ggml_rms_norm(ctx.get(), some, kEpsilon);
    if (!weights.empty()) result = ggml_mul(ctx.get(), result, w);
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, result);
    const std::unique_ptr<ggml_backend_buffer, void (*)(ggml_backend_buffer_t)> memory(
        ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(cpu_device())), ggml_backend_buffer_free);
    if (!memory) throw std::runtime_error("not enough memory");
    std::copy(rows.begin(), rows.end(), (float *) x->data);
    std::copy(weights.begin(), weights.end(), (float *) w->data);
    compute_alone(graph, n_threads, fast);
    return {(float *) result->data, (float *) result->data + width * n_rows};
}

}  // namespace ggpipe
