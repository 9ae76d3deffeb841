// Products of weights: quantized ones on CPUs with AVX2 or AVX-VNNI (quad_tiles.h) or AVX-512 (tiles.h; without VNNI only some), floats
// on CPUs with AVX2 or AVX-512 (float_tiles.h).
//
// ggml reads and unpacks a matrix again for each row or two of a run, so two rows take twice as long as one. Here a tile of
// weights, 8 or 16 rows by 256 columns, is unpacked once, and all rows of activations are multiplied with it while it is in
// registers or in the first cache: rows of a small run take little more time than one.
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
#include "kernels.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace ggpipe {

const Kernel * kernel_for(ggml_type type, bool is_repacked, const CpuFeatures & cpu) {
    const auto fitting = [&](bool can, const Kernel * kernel) { return can && kernel && kernel->is_repacked == is_repacked ? kernel : nullptr; };
    // But for grids, AVX-512 without VNNI takes AVX2's tiles. 512 bits would need three instructions for what is one with VNNI, and
    // would not do for numbers of 8 bits.
    if (const Kernel * kernel = fitting(cpu.avx512_vnni, avx512_vnni_kernel(type, is_repacked))) return kernel;
    if (const Kernel * kernel = fitting(cpu.avx_vnni, avx_vnni_kernel(type, is_repacked))) return kernel;
    if (const Kernel * kernel = fitting(cpu.avx512, avx512_grid_kernel(type))) return kernel;
    if (const Kernel * kernel = fitting(cpu.avx2, avx2_kernel(type, is_repacked))) return kernel;
    if (const Kernel * kernel = fitting(cpu.avx2, avx2_grid_kernel(type))) return kernel;
    if (const Kernel * kernel = fitting(cpu.avx512_bf16, avx512_bf16_kernel(type))) return kernel;
    if (const Kernel * kernel = fitting(cpu.avx512, avx512_float_kernel(type))) return kernel;
    return fitting(cpu.avx2, avx2_float_kernel(type));
}

#ifdef __x86_64__
namespace {
Activations activations_of(const FastGraph::Quantized & quantized) {
    const ggml_tensor * source = quantized.source;
    QuantizedMemory & memory = quantized.memory;
    return {source->ne[1] * source->ne[2], source->ne[0], (source->ne[0] + kChunk - 1) / kChunk, memory.numbers.data(),
            memory.starts.data(), memory.scales.data(), memory.sums.data()};
}

const Kernel * kernel_for(ggml_type type, bool is_repacked) {
    static const CpuFeatures cpu = cpu_features();
    return kernel_for(type, is_repacked, cpu);
}
bool has_repacked(const ggml_tensor * weights) {
    return weights->extra && !strcmp(ggml_backend_buft_name(weights->buffer->buft), "CPU_REPACK");
}

const float * row_of(const ggml_tensor * t, int64_t row) {
    return (const float *) ((const char *) t->data + row % t->ne[1] * t->nb[1] + row / t->ne[1] * t->nb[2]);
}

// Room for `n` chunks of rows, and spare rows.
void make_room(QuantizedMemory & memory, size_t n, int chunk_bytes) {
    n += kSpareRows;
    if (memory.numbers.size() < n * chunk_bytes) memory.numbers.resize(n * chunk_bytes);
    if (memory.scales.size() >= n * kMaxUnits) return;
    memory.starts.resize(n * kMaxUnits);
    memory.scales.resize(n * kMaxUnits);
    memory.sums.resize(n * kMaxUnits);
}

// Some rows of `a`, copied to `memory` one after another.
Activations gathered(const Activations & a, const std::vector<int32_t> & rows, int chunk_bytes, QuantizedMemory & memory) {
    const int64_t n = rows.size();
    make_room(memory, a.n_chunks * n, chunk_bytes);
    for (int64_t chunk = 0; chunk < a.n_chunks; chunk++) {
        for (int64_t i = 0; i < n; i++) {
            const int64_t from = chunk * a.n_rows + rows[i], to = chunk * n + i;
            memcpy(memory.numbers.data() + to * chunk_bytes, a.numbers + from * chunk_bytes, chunk_bytes);
            std::copy_n(a.starts + from * kMaxUnits, kMaxUnits, memory.starts.data() + to * kMaxUnits);
            std::copy_n(a.scales + from * kMaxUnits, kMaxUnits, memory.scales.data() + to * kMaxUnits);
            std::copy_n(a.sums + from * kMaxUnits, kMaxUnits, memory.sums.data() + to * kMaxUnits);
        }
    }
    return {n, a.n_columns, a.n_chunks, memory.numbers.data(), memory.starts.data(), memory.scales.data(), memory.sums.data()};
}

// All threads quantize some rows, and wait for the others.
void quantize_rows(FastGraph::Quantized & quantized, const Activations & a) {
    const Kernel & kernel = *quantized.kernel;
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

bool multiplies_repacked(ggml_type type) {
    return kernel_for(type, true);
}

bool is_product(const ggml_tensor * node) {
    if (node->op != GGML_OP_MUL_MAT && node->op != GGML_OP_MUL_MAT_ID) return false;
    if (!(node->flags & GGML_TENSOR_FLAG_COMPUTE)) return false;
    const ggml_tensor * weights = node->src[0], * source = node->src[1];
    const bool is_repacked = has_repacked(weights);
    if (!kernel_for(weights->type, is_repacked) || weights->ne[3] != 1 || weights->nb[0] != ggml_type_size(weights->type)) return false;
    if (source->type != GGML_TYPE_F32 || source->nb[0] != sizeof(float) || source->ne[3] != 1 || node->nb[0] != sizeof(float)) return false;
    if (weights->extra && !is_repacked) return false;
    if (node->op == GGML_OP_MUL_MAT_ID) return true;
    // Of a model: neither KV cells, which attention without flash attention multiplies, nor the rotation of quantized ones.
    const bool is_weight = weights->op == GGML_OP_NONE && weights->buffer &&
                           ggml_backend_buffer_get_usage(weights->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
    return is_weight ? weights->ne[2] == 1 || weights->ne[2] == source->ne[2] : weights->ne[2] == 1 && source->ne[2] == 1 && ggml_is_quantized(weights->type);
}

// Activations that are quantized already are taken as they are; others get memory whose activations this step does not need.
void FastGraph::add(const std::vector<ggml_tensor *> & products_of_step) {
    std::vector<bool> needed(kept.size());
    for (ggml_tensor * product : products_of_step) {
        const ggml_tensor * source = product->src[1];
        const Kernel * kernel = kernel_for(product->src[0]->type, has_repacked(product->src[0]));
        const auto fits = [&](const Quantized * q) {
            return q->source == source && q->kernel->quantize == kernel->quantize && q->kernel->chunk_bytes == kernel->chunk_bytes;
        };
        size_t i = std::find_if(kept.begin(), kept.end(), fits) - kept.begin();
        if (i == kept.size()) {
            i = std::find(needed.begin(), needed.end(), false) - needed.begin();
            if (i == memories.size()) memories.emplace_back();
            if (i == kept.size()) {
                kept.push_back(nullptr);
                needed.push_back(false);
            }
            kept[i] = &quantized.emplace_back(source, kernel, memories[i]);
        }
        needed[i] = true;
        products.emplace_back(product, *kept[i], kernel);
    }
}

void FastGraph::begin() {
    for (Quantized & q : quantized) {
        make_room(q.memory, activations_of(q).n_chunks * activations_of(q).n_rows, q.kernel->chunk_bytes);
        q.taken = q.done = 0;
    }
    for (size_t i = 0; i < products.size(); i++) {
        products[i].taken = 0;
        products[i].node->op_params[kIndex] = i;
    }
}

void compute_product(ggml_tensor * node, int, int n_threads, void * state) {
    struct Use { int32_t matrix; std::vector<int32_t> rows; std::vector<float *> to; };
    static thread_local std::vector<Use> uses;  // of matrices
    static thread_local std::vector<int32_t> use_of;
    const ggml_tensor * weights = node->src[0], * ids = node->src[2];
    FastGraph & graph = *(FastGraph *) state;
    const size_t index = node->op_params[FastGraph::kIndex];
    FastGraph::Product & product = graph.products[index];
    const ggml_tensor * next = graph.products[std::min(index + 1, graph.products.size() - 1)].weights;
    const Activations activations = activations_of(product.quantized);
    quantize_rows(product.quantized, activations);
    const Kernel & kernel = *product.kernel;
    size_t n_uses = 0;
    const auto add = [&](int32_t matrix) -> Use & {
        if (uses.size() == n_uses) uses.emplace_back();
        Use & use = uses[n_uses++];
        use.matrix = matrix;
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
        for (int64_t slice = 0, row = 0; slice < node->ne[2]; slice++) {  // heads, which may have matrices of their own, or sequences
            Use & use = slice < weights->ne[2] ? add(slice) : uses[0];
            for (int64_t i = 0; i < node->ne[1]; i++, row++) {
                use.rows.push_back(row);
                use.to.push_back((float *) ((char *) node->data + i * node->nb[1] + slice * node->nb[2]));
            }
        }
    }
    const size_t n_rows = ids ? ids->ne[0] * ids->ne[1] : node->ne[1] * node->ne[2];
    const bool by_two = kernel.multiply_two && n_rows >= kFewestForTwo * n_uses;
    const auto multiply = by_two ? kernel.multiply_two : kernel.multiply;
    const int n_lanes = kernel.n_lanes * (by_two ? 2 : 1);
    const int64_t n_tiles = (weights->ne[1] + n_lanes - 1) / n_lanes, n_items = n_tiles * n_uses;
    const int64_t step = std::max<int64_t>(1, n_items / (8 * n_threads));
    static thread_local QuantizedMemory memory;  // for the rows of an expert, which lie apart
    size_t gathered_for = n_uses;
    Activations in_a_row;
    for (int64_t from; (from = product.taken.fetch_add(step, std::memory_order_relaxed)) < n_items;) {
        for (int64_t item = from; item < std::min(from + step, n_items); item++) {
            const size_t i = item / n_tiles;
            const Use & use = uses[i];
            const int32_t row = use.rows[0];
            const bool is_gathered = use.rows.back() != row + (int32_t) use.rows.size() - 1;
            if (is_gathered && gathered_for != i) {
                in_a_row = gathered(activations, use.rows, kernel.chunk_bytes, memory);
                gathered_for = i;
            }
            const auto matrix_of = [&](int32_t i) { return (const uint8_t *) weights->data + i * weights->nb[2]; };
            const Weights matrix{matrix_of(use.matrix), weights->ne[1], weights->nb[1],
                                 i + 1 < n_uses ? matrix_of(uses[i + 1].matrix) : (const uint8_t *) next->data};
            multiply(matrix, item % n_tiles * n_lanes, is_gathered ? in_a_row : activations, is_gathered ? 0 : row, use.rows.size(),
                     use.to.data());
        }
    }
}

#else
bool multiplies_repacked(ggml_type) { return false; }
bool is_product(const ggml_tensor *) { return false; }
void FastGraph::add(const std::vector<ggml_tensor *> &) {}
void FastGraph::begin() {}
void compute_product(ggml_tensor *, int, int, void *) {}
#endif

}  // namespace ggpipe
