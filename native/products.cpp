// Products of quantized weights, in default numerics, on CPUs with AVX-512 VNNI.
//
// ggml reads and unpacks a matrix again for each row or two of a run, so two rows take twice as long as one. Here a tile of
// weights, 16 rows by 256 columns, is unpacked such that each lane of a vector holds its own row, and all rows of activations
// are multiplied with it while it is in registers or in the first cache: rows of a small run take little more time than one.
//
// Activations are quantized as ggml does it, and sums over the columns that share a scale (all 256 where scales are integers)
// are exact, so results differ from ggml's only by the order in which blocks are added up. That order is always the same: the
// bits of a row depend neither on the number of rows nor on that of threads.
#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "abi.h"
#include "fast.h"
#include "tiles.h"

namespace ggpipe {

#ifdef __x86_64__
namespace {
Activations activations_of(const FastGraph::Quantized & quantized, QuantizedMemory & memory) {
    const ggml_tensor * source = quantized.source;
    return {source->ne[1] * source->ne[2], source->ne[0], (source->ne[0] + kChunk - 1) / kChunk, memory.numbers.data(),
            memory.starts.data(), memory.scales.data(), memory.sums.data()};
}

struct Kernel {
    bool is_repacked;  // what it takes
    void (*quantize)(const float *, int64_t, const Activations &);
    void (*multiply)(const Weights &, int64_t, const Activations &, const std::vector<int32_t> &, float * const *);
};
const Kernel * kernel_for(ggml_type type) {
    static const bool can = __builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512vnni");
    switch (can ? type : GGML_TYPE_COUNT) {
#define GGPIPE_KERNEL(NAME) \
        case GGML_TYPE_##NAME: { \
            static constexpr Kernel kernel{NAME::From::kGroup > 1, quantize<NAME>, multiply<NAME>}; \
            return &kernel; \
        }
        GGPIPE_KERNEL(Q8_0)
        GGPIPE_KERNEL(Q4_0)
        GGPIPE_KERNEL(Q4_1)
        GGPIPE_KERNEL(Q5_0)
        GGPIPE_KERNEL(Q5_1)
        GGPIPE_KERNEL(IQ4_NL)
        GGPIPE_KERNEL(MXFP4)
        GGPIPE_KERNEL(Q2_K)
        GGPIPE_KERNEL(Q3_K)
        GGPIPE_KERNEL(Q4_K)
        GGPIPE_KERNEL(Q5_K)
        GGPIPE_KERNEL(Q6_K)
        GGPIPE_KERNEL(IQ4_XS)
#undef GGPIPE_KERNEL
        default: return nullptr;
    }
}

const float * row_of(const ggml_tensor * t, int64_t row) {
    return (const float *) ((const char *) t->data + row % t->ne[1] * t->nb[1] + row / t->ne[1] * t->nb[2]);
}

// All threads quantize some rows, and wait for the others.
void quantize_rows(FastGraph::Quantized & quantized, const Activations & a) {
    const Kernel & kernel = *kernel_for(quantized.type);
    for (int64_t row; (row = quantized.taken.fetch_add(1, std::memory_order_relaxed)) < a.n_rows;) {
        kernel.quantize(row_of(quantized.source, row), row, a);
        quantized.done.fetch_add(1, std::memory_order_release);
    }
    for (int spins = 0; quantized.done.load(std::memory_order_acquire) < a.n_rows; spins++) {
        if (spins < 1000) _mm_pause();
        else std::this_thread::yield();  // whoever has the last row may have lost its core
    }
}
}  // namespace

bool is_product(const ggml_tensor * node) {
    if (node->op != GGML_OP_MUL_MAT && node->op != GGML_OP_MUL_MAT_ID) return false;
    if (!(node->flags & GGML_TENSOR_FLAG_COMPUTE)) return false;
    const ggml_tensor * weights = node->src[0], * source = node->src[1];
    const Kernel * kernel = kernel_for(weights->type);
    if (!kernel || weights->ne[3] != 1 || weights->nb[0] != ggml_type_size(weights->type)) return false;
    if (source->type != GGML_TYPE_F32 || source->nb[0] != sizeof(float) || source->ne[3] != 1 || node->nb[0] != sizeof(float)) return false;
    const bool is_repacked = weights->extra && !strcmp(ggml_backend_buft_name(weights->buffer->buft), "CPU_REPACK");
    if (kernel->is_repacked != is_repacked || (weights->extra && !is_repacked)) return false;
    return node->op == GGML_OP_MUL_MAT_ID || (weights->ne[2] == 1 && source->ne[2] == 1);
}

void FastGraph::add(ggml_tensor * product) {
    const ggml_tensor * source = product->src[1];
    const ggml_type type = product->src[0]->type;
    if (quantized.empty() || quantized.back().source != source || quantized.back().type != type) {
        quantized.emplace_back().source = source;
        quantized.back().type = type;
        const Activations a = activations_of(quantized.back(), memory);
        const size_t n = a.n_chunks * a.n_rows;
        if (memory.numbers.size() < n * kChunk) memory.numbers.resize(n * kChunk);
        if (memory.scales.size() < n * kMaxUnits) {
            memory.starts.resize(n * kMaxUnits);
            memory.scales.resize(n * kMaxUnits);
            memory.sums.resize(n * kMaxUnits);
        }
    }
    product->op_params[kIndex] = products.size();
    products.emplace_back(quantized.back(), product->src[0]);
}

void compute_product(ggml_tensor * node, int, int n_threads, void * state) {
    struct Use { int32_t expert; std::vector<int32_t> rows; std::vector<float *> to; };
    static thread_local std::vector<Use> uses;  // of a matrix
    static thread_local std::vector<int32_t> use_of;
    const ggml_tensor * weights = node->src[0], * ids = node->src[2];
    FastGraph & graph = *(FastGraph *) state;
    const size_t index = node->op_params[FastGraph::kIndex];
    FastGraph::Product & product = graph.products[index];
    const ggml_tensor * next = graph.products[std::min(index + 1, graph.products.size() - 1)].weights;
    const Activations activations = activations_of(product.quantized, graph.memory);
    quantize_rows(product.quantized, activations);
    const Kernel & kernel = *kernel_for(weights->type);
    size_t n_uses = 0;
    const auto add = [&](int32_t expert) -> Use & {
        if (uses.size() == n_uses) uses.emplace_back();
        Use & use = uses[n_uses++];
        use.expert = expert;
        use.rows.clear();
        use.to.clear();
        return use;
    };
    if (ids) {
        use_of.assign(weights->ne[2], -1);
        for (int64_t token = 0; token < ids->ne[1]; token++) {
            for (int64_t i = 0; i < ids->ne[0]; i++) {
                const int32_t expert = *(const int32_t *) ((const char *) ids->data + token * ids->nb[1] + i * ids->nb[0]);
                if (use_of[expert] < 0) {
                    use_of[expert] = n_uses;
                    add(expert);
                }
                Use & use = uses[use_of[expert]];
                use.rows.push_back(token * node->src[1]->ne[1] + i % node->src[1]->ne[1]);
                use.to.push_back((float *) ((char *) node->data + i * node->nb[1] + token * node->nb[2]));
            }
        }
    } else {
        Use & all = add(0);
        for (int64_t row = 0; row < activations.n_rows; row++) {
            all.rows.push_back(row);
            all.to.push_back((float *) ((char *) node->data + row * node->nb[1]));
        }
    }
    const int64_t n_tiles = (weights->ne[1] + kLanes - 1) / kLanes, n_items = n_tiles * n_uses;
    const int64_t step = std::max<int64_t>(1, n_items / (8 * n_threads));
    for (int64_t from; (from = product.taken.fetch_add(step, std::memory_order_relaxed)) < n_items;) {
        for (int64_t item = from; item < std::min(from + step, n_items); item++) {
            const size_t i = item / n_tiles;
            const Use & use = uses[i];
            const auto matrix_of = [&](int32_t expert) { return (const uint8_t *) weights->data + expert * weights->nb[2]; };
            const Weights matrix{matrix_of(use.expert), weights->ne[1], weights->nb[1],
                                 i + 1 < n_uses ? matrix_of(uses[i + 1].expert) : (const uint8_t *) next->data};
            kernel.multiply(matrix, item % n_tiles * kLanes, activations, use.rows, use.to.data());
        }
    }
}

#else
bool is_product(const ggml_tensor *) { return false; }
void FastGraph::add(ggml_tensor *) {}
void compute_product(ggml_tensor *, int, int, void *) {}
#endif

}  // namespace ggpipe
