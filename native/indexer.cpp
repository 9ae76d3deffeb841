// Indexers of sparse attention (DeepSeek V3.2 and V4, GLM-5): a score for each row and cell, from small heads of their own, and the
// highest scores of each row, whose cells it then sees.
//
// ggml widens a key again for each row, and multiplies it with one head at a time; for the highest scores, it keeps a heap. Here
// heads are the lanes of attention_lanes.h, and cells that a row does not see are skipped.
#include "indexer.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "compute.h"
#include "cpu.h"
#include "fast.h"
#include "ggml-alloc.h"
#include "stage.h"

namespace ggpipe {

namespace {
using IndexerKernel = void (*)(const IndexerTask &);
const CpuFeatures cpu = cpu_features();
const IndexerKernel kernel = cpu.avx512 ? avx512_indexer : cpu.avx2 ? avx2_indexer : nullptr;

void compute_indexer(ggml_tensor * node, int thread, int n_threads, void *) {
    thread_local Scratch scratch;
    const int64_t n_cells = node->ne[0], n_rows = node->ne[1], n_blocks = (n_rows + kIndexerRows - 1) / kIndexerRows;
    const auto chunks = [=](int64_t size) { return (n_cells + size - 1) / size; };
    int64_t size = 4 * kTile;  // cells of a task
    while (size > kTile && n_blocks * chunks(size) < 4 * n_threads) size /= 2;
    for (int64_t task = thread; task < n_blocks * chunks(size); task += n_threads) {
        const int64_t row = task / chunks(size) * kIndexerRows, cell = task % chunks(size) * size;
        kernel({node, row, std::min(row + kIndexerRows, n_rows), cell, std::min(cell + size, n_cells), scratch});
    }
}

// An integer that is higher if the number is.
uint32_t rank_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}

// The places of the k highest of n numbers, in their order; of equal ones, the first.
void select(const float * numbers, int64_t n, int64_t k, int32_t * to) {
    constexpr int kBits[] = {12, 10, 10};  // of a rank, decided in turn
    int32_t * const end = to + k;
    uint32_t lowest = 0;  // of the ranks that are not too low, as far as decided
    int shift = 32;
    for (int bits : kBits) {
        uint32_t counts[1 << kBits[0]] = {};
        const uint32_t above = shift < 32 ? lowest >> shift : 0;
        const int before = shift;
        shift -= bits;
        for (int64_t i = 0; i < n; i++) {
            const uint32_t rank = rank_of(numbers[i]);
            counts[rank >> shift & ((1 << bits) - 1)] += before == 32 || rank >> before == above;
        }
        int64_t left = k;
        uint32_t part = (1 << bits) - 1;
        for (; counts[part] < left; part--) left -= counts[part];
        lowest |= part << shift;
        k = left;  // those among the ranks that begin like this
    }
    // k numbers of this very rank
    for (int64_t i = 0; to < end; i++) {
        const uint32_t rank = rank_of(numbers[i]);
        *to = i;
        if (rank > lowest) to++;
        else if (rank == lowest && k > 0) to++, k--;
    }
}

void compute_selection(ggml_tensor * node, int thread, int n_threads, void *) {
    const ggml_tensor * numbers = node->src[0];
    const int64_t n_rows = ggml_nrows(node);
    for (int64_t row = n_rows * thread / n_threads; row < n_rows * (thread + 1) / n_threads; row++) {
        select((const float *) numbers->data + row * numbers->ne[0], numbers->ne[0], node->ne[0], (int32_t *) node->data + row * node->ne[0]);
    }
}

bool can_index(const ggml_tensor * node) {
    const ggml_tensor * q = node->src[0], * k = node->src[1], * w = node->src[2], * mask = node->src[3];
    return kernel && q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) && has_cells(k) && w->type == GGML_TYPE_F32 &&
           w->nb[0] == sizeof(float) && mask->type == GGML_TYPE_F16 && mask->nb[0] == sizeof(uint16_t) && node->ne[3] == 1;
}
}  // namespace

std::pair<std::vector<float>, std::vector<int32_t>> index_cells(const IndexerShape & s, const IndexerInputs & inputs, int n_threads, bool fast) {
    const std::unique_ptr<ggml_context, void (*)(ggml_context *)> ctx(ggml_init({1 << 20, nullptr, /*no_alloc*/ true}), ggml_free);
    ggml_tensor * q = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, s.width, s.n_heads, s.n_rows);
    ggml_tensor * k = ggml_new_tensor_3d(ctx.get(), s.key_type, s.width, 1, s.n_cells);
    ggml_tensor * weights = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, s.n_heads, s.n_rows);
    ggml_tensor * mask = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, s.n_cells, s.n_rows);
    ggml_tensor * scores = ggml_lightning_indexer(ctx.get(), q, k, weights, mask);
    ggml_tensor * selected = ggml_top_k(ctx.get(), scores, s.n_selected);
    const std::unique_ptr<ggml_backend_buffer, void (*)(ggml_backend_buffer_t)> buffer(
        ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(cpu_device())), ggml_backend_buffer_free);
    if (!buffer) throw std::runtime_error("not enough memory");
    memcpy(q->data, inputs.queries, ggml_nbytes(q));
    memcpy(k->data, inputs.keys, ggml_nbytes(k));
    memcpy(weights->data, inputs.weights, ggml_nbytes(weights));
    memcpy(mask->data, inputs.mask, ggml_nbytes(mask));
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, selected);
    compute_alone(graph, n_threads, fast);
    const float * all = (const float *) scores->data;
    const int32_t * places = (const int32_t *) selected->data;
    return {{all, all + ggml_nelements(scores)}, {places, places + ggml_nelements(selected)}};
}

ggml_custom_op_t indexer_operation(const ggml_tensor * node) {
    if (!(node->flags & GGML_TENSOR_FLAG_COMPUTE)) return nullptr;
    switch (node->op) {
        case GGML_OP_LIGHTNING_INDEXER: return can_index(node) ? compute_indexer : nullptr;
        case GGML_OP_TOP_K: return ggml_is_contiguous(node->src[0]) && ggml_is_contiguous(node) ? compute_selection : nullptr;
        default: return nullptr;
    }
}

}  // namespace ggpipe
