// Operations on each number that ggml computes without vectors: products with one number for each row, tensors that are joined, and
// the hyper-connections of DeepSeek V4 and GLM-5, whose layers read a mixture of a few hidden states (streams) and write to all of them.
#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>

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
#ifdef __x86_64__
#define GGPIPE_TARGET __attribute__((target("avx2,fma")))
using F = Floats<8>;
constexpr int64_t kWidth = 8, kColumns = 512;  // of a vector, and of a task
constexpr int64_t kFewest = 32768;             // numbers of a product for which all threads are worth it
const bool has_vectors = cpu_features().avx2;

template <class T> GGPIPE_INLINE inline T * row_of(const ggml_tensor * t, int64_t i1, int64_t i2 = 0, int64_t i3 = 0) {
    return (T *) ((char *) t->data + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3]);
}
GGPIPE_INLINE inline float number(const ggml_tensor * t, int64_t i0, int64_t i1, int64_t i2 = 0) {
    return *(const float *) ((const char *) row_of<float>(t, i1, i2) + i0 * t->nb[0]);
}
GGPIPE_TARGET GGPIPE_INLINE inline F load(const float * from) { return _mm256_loadu_ps(from); }
GGPIPE_TARGET GGPIPE_INLINE inline F all(float x) { return _mm256_set1_ps(x); }

// Calls compute(row, first column, end) for this thread's share.
template <class Compute>
GGPIPE_TARGET GGPIPE_INLINE inline void for_columns(int64_t n_rows, int64_t n_columns, int thread, int n_threads, const Compute & compute) {
    const int64_t n_blocks = (n_columns + kColumns - 1) / kColumns, n = n_rows * n_blocks;
    for (int64_t i = n * thread / n_threads; i < n * (thread + 1) / n_threads; i++) {
        const int64_t first = i % n_blocks * kColumns;
        compute(i / n_blocks, first, std::min(first + kColumns, n_columns));
    }
}

// Numbers times one number for each row.
GGPIPE_TARGET void compute_row_product(ggml_tensor * node, int thread, int n_threads, void *) {
    const ggml_tensor * x = node->src[0], * factors = node->src[1];
    for_columns(ggml_nrows(node), node->ne[0], thread, n_threads, [&](int64_t row, int64_t first, int64_t end) GGPIPE_TARGET GGPIPE_INLINE {
        const int64_t i1 = row % node->ne[1], i2 = row / node->ne[1] % node->ne[2], i3 = row / node->ne[1] / node->ne[2];
        const float * from = row_of<float>(x, i1, i2, i3);
        const F factor = all(*row_of<float>(factors, i1 % factors->ne[1], i2 % factors->ne[2], i3 % factors->ne[3]));
        float * to = row_of<float>(node, i1, i2, i3);
        for (int64_t i = first; i < end; i += kWidth) _mm256_storeu_ps(to + i, load(from + i) * factor);
    });
}

// The mixture of streams (columns, streams, tokens), weighted by (streams, tokens), that a layer reads.
GGPIPE_TARGET void compute_streams_read(ggml_tensor * node, int thread, int n_threads, void *) {
    const ggml_tensor * streams = node->src[0], * weights = node->src[1];
    float scale;
    memcpy(&scale, (const int32_t *) node->op_params + kOwnParams, sizeof scale);
    for_columns(node->ne[1], node->ne[0], thread, n_threads, [&](int64_t token, int64_t first, int64_t end) GGPIPE_TARGET GGPIPE_INLINE {
        float * to = row_of<float>(node, token);
        for (int64_t i = first; i < end; i += kWidth) {
            F sum{};
            for (int64_t s = 0; s < streams->ne[1]; s++) {
                sum = _mm256_fmadd_ps(load(row_of<float>(streams, s, token) + i), all(number(weights, s, token)), sum);
            }
            _mm256_storeu_ps(to + i, all(scale) * sum);
        }
    });
}

// New streams: a layer's result times each one's factor, and a mixture of the streams before, or its own.
GGPIPE_TARGET void compute_streams_written(ggml_tensor * node, int thread, int n_threads, void *) {
    const ggml_tensor * x = node->src[0], * streams = node->src[1], * factors = node->src[2], * mixture = node->src[3];
    for_columns(node->ne[2], node->ne[0], thread, n_threads, [&](int64_t token, int64_t first, int64_t end) GGPIPE_TARGET GGPIPE_INLINE {
        const float * result = row_of<float>(x, token);
        for (int64_t s = 0; s < node->ne[1]; s++) {
            float * to = row_of<float>(node, s, token);
            const F factor = all(number(factors, s, token));
            for (int64_t i = first; i < end; i += kWidth) {
                F sum = load(result + i) * factor;
                if (!mixture) sum += load(row_of<float>(streams, s, token) + i);
                for (int64_t from = 0; mixture && from < streams->ne[1]; from++) {
                    sum = _mm256_fmadd_ps(load(row_of<float>(streams, from, token) + i), all(number(mixture, s, from, token)), sum);
                }
                _mm256_storeu_ps(to + i, sum);
            }
        }
    });
}

// Two tensors one after another: parts of rows (queries of latent attention) or whole rows (DeepSeek-V4's cells and states).
void compute_joined(ggml_tensor * node, int thread, int n_threads, void *) {
    const ggml_tensor * first = node->src[0], * second = node->src[1];
    const int dim = ((const int32_t *) node->op_params)[kOwnParams];
    const size_t first_bytes = ggml_row_size(first->type, first->ne[0]), second_bytes = ggml_row_size(second->type, second->ne[0]);
    const int64_t n = ggml_nrows(node);
    for (int64_t row = n * thread / n_threads; row < n * (thread + 1) / n_threads; row++) {
        int64_t at[] = {0, row % node->ne[1], row / node->ne[1] % node->ne[2], row / node->ne[1] / node->ne[2]};
        char * to = row_of<char>(node, at[1], at[2], at[3]);
        if (dim == 0) {
            memcpy(to, row_of<char>(first, at[1], at[2], at[3]), first_bytes);
            memcpy(to + first_bytes, row_of<char>(second, at[1], at[2], at[3]), second_bytes);
            continue;
        }
        const bool is_second = at[dim] >= first->ne[dim];
        if (is_second) at[dim] -= first->ne[dim];
        memcpy(to, row_of<char>(is_second ? second : first, at[1], at[2], at[3]), first_bytes);
    }
}

bool can_be_joined(const ggml_tensor * node) {
    const bool in_rows = node->op_params[0] == 0;
    for (const ggml_tensor * t : {node, (const ggml_tensor *) node->src[0], (const ggml_tensor *) node->src[1]}) {
        if (t->type != node->type || t->nb[0] != ggml_type_size(t->type) || (in_rows && ggml_blck_size(t->type) > 1)) return false;
    }
    return true;
}

bool is_of_floats(const ggml_tensor * t) { return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float); }
bool has_rows(const ggml_tensor * t) { return is_of_floats(t) && t->ne[0] % kWidth == 0; }
#endif
}  // namespace

ggml_custom_op_t elementwise_operation([[maybe_unused]] const ggml_tensor * node) {
#ifdef __x86_64__
    if (!has_vectors || !(node->flags & GGML_TENSOR_FLAG_COMPUTE)) return nullptr;
    switch (node->op) {
        case GGML_OP_MUL:
            return has_rows(node) && has_rows(node->src[0]) && node->src[1]->ne[0] == 1 && node->src[1]->type == GGML_TYPE_F32 &&
                   ggml_nelements(node) >= kFewest ? compute_row_product : nullptr;
        case GGML_OP_CONCAT: return can_be_joined(node) ? compute_joined : nullptr;
        case GGML_OP_DSV4_HC_PRE:  // other weights are gates of each column
            return has_rows(node) && has_rows(node->src[0]) && node->op_params[1] == 0 ? compute_streams_read : nullptr;
        case GGML_OP_DSV4_HC_POST:
            return has_rows(node) && has_rows(node->src[0]) && has_rows(node->src[1]) ? compute_streams_written : nullptr;
        default: break;
    }
#endif
    return nullptr;
}

std::string join(ggml_type type, const Block & first, const Block & second, int dim, int n_threads) {
    const std::unique_ptr<ggml_context, void (*)(ggml_context *)> ctx(ggml_init({1 << 20, nullptr, /*no_alloc*/ true}), ggml_free);
    const Block * const blocks[] = {&first, &second};
    ggml_tensor * parts[2];
    for (int i = 0; i < 2; i++) {
        if (blocks[i]->shape.size() != GGML_MAX_DIMS) throw std::runtime_error("a shape has four dimensions");
        parts[i] = ggml_new_tensor(ctx.get(), type, GGML_MAX_DIMS, blocks[i]->shape.data());
        if (ggml_nbytes(parts[i]) != blocks[i]->data.size()) throw std::runtime_error("data do not have this shape");
    }
    ggml_tensor * result = ggml_concat(ctx.get(), parts[0], parts[1], dim);
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, result);
    const std::unique_ptr<ggml_backend_buffer, void (*)(ggml_backend_buffer_t)> memory(
        ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(cpu_device())), ggml_backend_buffer_free);
    if (!memory) throw std::runtime_error("not enough memory");
    for (int i = 0; i < 2; i++) memcpy(parts[i]->data, blocks[i]->data.data(), blocks[i]->data.size());
    compute_alone(graph, n_threads, true);
    return {(const char *) result->data, ggml_nbytes(result)};
}

}  // namespace ggpipe
