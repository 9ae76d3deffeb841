// Flash attention for any number of rows, in default numerics.
//
// Below 64 rows ggml goes through the KV cells once for each row and query head. Here the rows of a run, times the query
// heads that share a KV head, are lanes of vectors: a cell is read and widened once for up to 64 lanes, and nothing is added
// up across a vector. A block is consecutive rows that see about the same cells; cells that none of them sees are skipped.
// A lane's bits do not depend on the other lanes, so threads may share lanes in any way.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "fast.h"
#include "vectors.h"

namespace ggpipe {

namespace {
constexpr int kTile = 32, kUnroll = 8;
constexpr int64_t kMaxWidth = 576, kMaxLanes = 64;
constexpr float kLowest = -1e30f;     // below any score; unlike infinity, it may be subtracted from itself
constexpr uint16_t kHidden = 0xfc00;  // minus infinity; what a row sees is 0

// e to the x <= 0, with Cephes' polynomial; 0 from -87 down.
template <int W> GGPIPE_INLINE inline Floats<W> exp_of(Floats<W> x) {
    const Ints<W> counts = x > -87.0f;
    x = counts ? x : Floats<W>{};
    Floats<W> n = x * 1.44269504f + 0x1.8p23f;  // rounds to an integer, in the lowest bits
    const Ints<W> exponent = (Ints<W>) n << 23;
    n -= 0x1.8p23f;
    const Floats<W> r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats<W> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return counts ? (Floats<W>) ((Ints<W>) p + exponent) : Floats<W>{};
}

const uint16_t * mask_of(const ggml_tensor * node, int64_t row) {
    return (const uint16_t *) ((const char *) node->src[3]->data + row * node->src[3]->nb[1]);
}
int64_t group_of(const ggml_tensor * node) { return node->src[0]->ne[2] / node->src[1]->ne[2]; }

// The row after the block that begins with this one.
int64_t end_of_block(const ggml_tensor * node, int64_t row) {
    const int64_t n_cells = node->src[3]->ne[0], most = std::max<int64_t>(1, kMaxLanes / group_of(node));
    int64_t end = row + 1;
    for (; end < std::min(node->src[0]->ne[1], row + most); end++) {
        const uint16_t * mask = mask_of(node, end), * before = mask_of(node, end - 1);
        int64_t n_seen = 0, n_other = 0;
        for (int64_t c = 0; c < n_cells; c++) {
            n_seen += mask[c] != kHidden;
            n_other += mask[c] != before[c];
        }
        if (n_other > n_seen / 4 + kTile) break;
    }
    return end;
}

// A thread's memory for one task. On the heap, since threads may have small stacks.
class Scratch {
   public:
    char * of(size_t bytes) {
        if (bytes > size_) {
            memory_.reset((char *) std::aligned_alloc(64, bytes));
            size_ = bytes;
            if (!memory_) throw std::bad_alloc();
        }
        return memory_.get();
    }

   private:
    struct Free { void operator()(char * memory) const { std::free(memory); } };
    std::unique_ptr<char, Free> memory_;
    size_t size_ = 0;
};

struct Task {  // some lanes of a block at one KV head
    const ggml_tensor * node;
    const std::vector<int32_t> & cells;   // that some rows of the block see
    const std::vector<uint8_t> & by_all;  // of each cell of the cache: whether all of them do
    int64_t first_row, kv_head, first_lane, n_lanes;
    Scratch & scratch;

    int64_t row(int64_t lane) const { return first_row + (first_lane + lane) / group_of(node); }
    int64_t head(int64_t lane) const { return kv_head * group_of(node) + (first_lane + lane) % group_of(node); }
    template <int W, int N> void run() const;  // as N vectors of W lanes
};

template <int W, int N> GGPIPE_INLINE inline void Task::run() const {
    using F = Floats<W>;
    const ggml_tensor * q = node->src[0], * k = node->src[1], * v = node->src[2], * sinks = node->src[4];
    const int64_t dk = k->ne[0], dv = v->ne[0];
    const float scale = ((const float *) node->op_params)[kOwnParams];
    const size_t n_cell = GGML_PAD(kTile * std::max(dk, dv), 16);
    char * memory = scratch.of(sizeof(F) * N * GGML_PAD(dk + dv, 64 / W) + sizeof(float) * n_cell);
    F * __restrict queries = (F *) memory, * __restrict values = queries + N * dk;
    float * __restrict cell = (float *) (queries + N * GGML_PAD(dk + dv, 64 / W));
    F scores[N][kTile];
    F high[N], sum[N];  // of each lane's scores the highest, and the sum of their powers
    const uint16_t * lane_mask[N * W];
    memset(queries, 0, sizeof(F) * N * dk);
    memset(values, 0, sizeof(F) * N * dv);
    for (int64_t l = 0; l < N * W; l++) {
        const int64_t used = std::min(l, n_lanes - 1);
        const float * from = (const float *) ((const char *) q->data + row(used) * q->nb[1] + head(used) * q->nb[2]);
        for (int64_t d = 0; d < dk; d++) ((float *) queries)[(l / W * dk + d) * W + l % W] = from[d] * scale;
        lane_mask[l] = mask_of(node, row(used));
        ((float *) high)[l] = sinks ? ((const float *) sinks->data)[head(used)] : kLowest;
        ((float *) sum)[l] = sinks ? 1 : 0;
    }
    for (size_t at = 0; at < cells.size(); at += kTile) {
        const int n_cells = std::min<size_t>(kTile, cells.size() - at), n_padded = GGML_PAD(n_cells, kUnroll);
        const auto load = [&](const ggml_tensor * t, int64_t width) GGPIPE_INLINE {
            for (int c = 0; c < n_cells; c++) {
                const auto * from = (const uint16_t *) ((const char *) t->data + cells[at + c] * t->nb[1] + kv_head * t->nb[2]);
                for (int64_t d = 0; d < width; d++) cell[c * width + d] = widen(from[d]);
            }
            memset(cell + n_cells * width, 0, (n_padded - n_cells) * width * sizeof(float));
        };
        load(k, dk);
        for (int n = 0; n < N; n++) {
            for (int c = 0; c < n_padded; c += kUnroll) {
                F dot[kUnroll] = {};
                for (int64_t d = 0; d < dk; d++) {
                    for (int i = 0; i < kUnroll; i++) dot[i] += queries[n * dk + d] * cell[(c + i) * dk + d];
                }
                for (int i = 0; i < kUnroll; i++) scores[n][c + i] = dot[i];
            }
            for (int c = 0; c < n_cells; c++) {
                for (int l = 0; !by_all[cells[at + c]] && l < W; l++) {
                    if (lane_mask[n * W + l][cells[at + c]] == kHidden) ((float *) &scores[n][c])[l] = -INFINITY;
                }
            }
            F higher = high[n];
            for (int c = 0; c < n_cells; c++) higher = scores[n][c] > higher ? scores[n][c] : higher;
            const F rescale = exp_of<W>(high[n] - higher);
            high[n] = higher;
            sum[n] *= rescale;
            for (int64_t d = 0; d < dv; d++) values[n * dv + d] *= rescale;
            for (int c = 0; c < n_cells; c++) sum[n] += scores[n][c] = exp_of<W>(scores[n][c] - higher);
        }
        load(v, dv);
        for (int n = 0; n < N; n++) {
            for (int64_t d = 0; d < dv; d += kUnroll) {
                F part[kUnroll];
                for (int i = 0; i < kUnroll; i++) part[i] = values[n * dv + d + i];
                for (int c = 0; c < n_cells; c++) {
                    for (int i = 0; i < kUnroll; i++) part[i] += scores[n][c] * cell[c * dv + d + i];
                }
                for (int i = 0; i < kUnroll; i++) values[n * dv + d + i] = part[i];
            }
        }
    }
    for (int64_t l = 0; l < n_lanes; l++) {
        float * to = (float *) ((char *) node->data + row(l) * node->nb[2] + head(l) * node->nb[1]);
        const float total = ((const float *) sum)[l];
        for (int64_t d = 0; d < dv; d++) to[d] = total > 0 ? ((const float *) values)[(l / W * dv + d) * W + l % W] / total : 0;
    }
}

// Elsewhere attention stays ggml's.
#ifdef __x86_64__
__attribute__((target("arch=x86-64-v4"))) void run_avx512(const Task & task) {
    if (task.n_lanes <= 8) task.run<8, 1>();
    else if (task.n_lanes <= 16) task.run<16, 1>();
    else if (task.n_lanes <= 32) task.run<16, 2>();
    else task.run<16, 4>();
}
__attribute__((target("arch=x86-64-v3"))) void run_avx2(const Task & task) {
    if (task.n_lanes <= 8) task.run<8, 1>();
    else if (task.n_lanes <= 16) task.run<8, 2>();
    else if (task.n_lanes <= 32) task.run<8, 4>();
    else task.run<8, 8>();
}
void (*const run)(const Task &) =
    __builtin_cpu_supports("x86-64-v4") ? run_avx512 : __builtin_cpu_supports("x86-64-v3") ? run_avx2 : nullptr;
#else
void (*const run)(const Task &) = nullptr;
#endif

}  // namespace

void compute_attention(ggml_tensor * node, int thread, int n_threads, void *) {
    thread_local std::vector<int32_t> cells;
    thread_local std::vector<uint8_t> by_some, by_all;
    thread_local Scratch scratch;
    const int64_t n_rows = node->src[0]->ne[1], kv_heads = node->src[1]->ne[2], n_cells = node->src[3]->ne[0];
    const int64_t group = group_of(node);
    int64_t size = kMaxLanes, n_tasks = 0;  // lanes of a task
    while (size > 1 && n_rows * group * kv_heads < size * n_threads * (size > 8 ? 2 : 1)) size /= 2;
    for (int64_t row = 0, end = 0; row < n_rows; row = end) {
        by_some.assign(n_cells, false);
        by_all.assign(n_cells, true);
        end = end_of_block(node, row);
        for (int64_t own = row; own < end; own++) {
            const uint16_t * mask = mask_of(node, own);
            for (int64_t c = 0; c < n_cells; c++) {
                by_some[c] |= mask[c] != kHidden;
                by_all[c] &= mask[c] != kHidden;
            }
        }
        cells.clear();
        for (int64_t c = 0; c < n_cells; c++) {
            if (by_some[c]) cells.push_back(c);
        }
        for (int64_t head = 0; head < kv_heads; head++) {
            for (int64_t lane = 0, n_lanes = (end - row) * group; lane < n_lanes; lane += size) {
                if (n_tasks++ % n_threads != thread) continue;
                run(Task{node, cells, by_all, row, head, lane, std::min(size, n_lanes - lane), scratch});
            }
        }
    }
}

bool can_attend(const ggml_tensor * node) {
    if (!run || node->op != GGML_OP_FLASH_ATTN_EXT || !(node->flags & GGML_TENSOR_FLAG_COMPUTE)) return false;
    const ggml_tensor * q = node->src[0], * k = node->src[1], * v = node->src[2], * mask = node->src[3];
    const float * params = (const float *) node->op_params;  // scale, ALiBi's slope, softcap
    return q->type == GGML_TYPE_F32 && k->type == GGML_TYPE_F16 && v->type == GGML_TYPE_F16 && mask && mask->ne[2] == 1 &&
           q->ne[3] == 1 && k->ne[2] == v->ne[2] && k->nb[0] == 2 && v->nb[0] == 2 && v->ne[0] % kUnroll == 0 &&
           std::max(k->ne[0], v->ne[0]) <= kMaxWidth && params[1] == 0 && params[2] == 0;
}

// As measured: ggml's kernel is good at few heads of width 64, and at one or two lanes (single rows of models without grouped
// heads). The latter does not count: with ggml's for one row and ours for several, draft tokens would decide near-ties. ggml's
// also splits one row's cells between threads, which is better than idle threads.
bool attention_is_faster(const ggml_tensor * node, int n_threads) {
    if (!can_attend(node)) return false;
    const int64_t n_rows = node->src[0]->ne[1], group = group_of(node), kv_heads = node->src[1]->ne[2];
    if (node->src[1]->ne[0] == 64 && n_rows < (group >= 4 ? 2 : 16)) return false;
    return n_rows > 1 || n_threads <= kv_heads * ((group + 7) / 8) * 3 / 2;
}

}  // namespace ggpipe
