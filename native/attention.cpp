// Flash attention for any number of rows, in default numerics.
//
// Below 64 rows ggml goes through the KV cells once for each row and query head. Here the rows of a run, times the query
// heads that share a KV head, are lanes: a cell is read once for up to 64 of them. A block is consecutive rows that see about
// the same cells; cells that none of them sees are skipped. A lane's bits do not depend on the other lanes
// (attention_lanes.h), so threads may share lanes in any way.
#include <algorithm>
#include <cstring>
#include <vector>

#include "attention.h"
#include "fast.h"

namespace ggpipe {

AttentionKernel attention_for(const CpuFeatures & cpu) {  // which needs no VNNI
    return cpu.avx512 ? avx512_attention : cpu.avx2 ? avx2_attention : nullptr;
}

namespace {
constexpr int64_t kMaxWidth = 576;
const AttentionKernel kernel = attention_for(cpu_features());

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
        int32_t n_seen = 0, n_other = 0;  // 64 bits halve the lanes of a vector
        for (int64_t c = 0; c < n_cells; c++) {
            n_seen += mask[c] != kHidden;
            n_other += (mask[c] == kHidden) != (before[c] == kHidden);
        }
        if (n_other > n_seen / 4 + kTile) break;
    }
    return end;
}

// For each cell, 0 or 1: whether any row of a block sees it, and whether all do.
void read_mask(const ggml_tensor * node, int64_t row, int64_t end, uint8_t * __restrict by_some, uint8_t * __restrict by_all) {
    const int64_t n_cells = node->src[3]->ne[0];
    memset(by_some, 0, n_cells);
    memset(by_all, 1, n_cells);
    for (; row < end; row++) {
        const uint16_t * mask = mask_of(node, row);
        for (int64_t c = 0; c < n_cells; c++) {
            const uint8_t is_seen = mask[c] != kHidden;
            by_some[c] |= is_seen;
            by_all[c] &= is_seen;
        }
    }
}

// The numbers of the cells whose flag is 1.
void list(const std::vector<uint8_t> & is_in, std::vector<int32_t> & cells) {
    cells.resize(is_in.size());
    int32_t * to = cells.data();
    for (size_t c = 0; c < is_in.size(); c++) {
        *to = c;
        to += is_in[c];
    }
    cells.resize(to - cells.data());
}

}  // namespace

void list_cells(const ggml_tensor * node, int64_t row, int64_t end, std::vector<int32_t> & cells, std::vector<uint8_t> & by_all) {
    thread_local std::vector<uint8_t> by_some;
    by_some.resize(node->src[3]->ne[0]);
    by_all.resize(node->src[3]->ne[0]);
    read_mask(node, row, end, by_some.data(), by_all.data());
    list(by_some, cells);
}

bool has_cells(const ggml_tensor * t) {
    switch (t->type) {
#define GGPIPE_CASE(TYPE) case GGML_TYPE_##TYPE:
        GGPIPE_CELLS(GGPIPE_CASE)
#undef GGPIPE_CASE
            return t->nb[0] == ggml_type_size(t->type);
        default: return false;
    }
}

namespace {
// A node that computes one stream of another one: an index into the last dimension (MiniMax M3: a KV head, with a mask of its
// own). Streams may share keys, values and masks.
class Stream {
   public:
    Stream(const ggml_tensor * node, int64_t i) : node_(part(*node, i, node->ne[3])) {
        for (int s = 0; s < GGML_MAX_SRC && node->src[s]; s++) {
            sources_[s] = part(*node->src[s], i, node->ne[3]);
            node_.src[s] = &sources_[s];
        }
    }
    Stream(const Stream &) = delete;
    const ggml_tensor * node() const { return &node_; }

   private:
    static ggml_tensor part(ggml_tensor t, int64_t i, int64_t n) {
        t.data = (char *) t.data + i / (n / t.ne[3]) * t.nb[3];
        t.ne[3] = 1;
        return t;
    }
    ggml_tensor node_, sources_[GGML_MAX_SRC];
};

// This thread's tasks of a stream. `n_tasks`: of those before it.
void compute_stream(const ggml_tensor * node, int thread, int n_threads, int64_t & n_tasks) {
    thread_local std::vector<int32_t> cells;
    thread_local std::vector<uint8_t> by_all;
    thread_local Scratch scratch;
    const int64_t n_rows = node->src[0]->ne[1], kv_heads = node->src[1]->ne[2], group = group_of(node);
    int64_t size = kMaxLanes;  // lanes of a task
    while (size > 1 && n_rows * group * kv_heads < size * n_threads * (size > 8 ? 2 : 1)) size /= 2;
    for (int64_t row = 0, end = 0; row < n_rows; row = end) {
        end = end_of_block(node, row);
        const int64_t n_lanes = (end - row) * group, n_chunks = (n_lanes + size - 1) / size;
        int64_t n_parts = kv_heads;  // of the KV heads; few, so that their cells, which are neighbors, are read together
        if (n_chunks == 1) {
            const int64_t fewest = (kv_heads * n_lanes + kMaxLanes - 1) / kMaxLanes;
            n_parts = std::min((fewest + n_threads - 1) / n_threads * n_threads, kv_heads);
        }
        const int64_t first = n_tasks, own = first + (n_threads - first % n_threads + thread) % n_threads;
        n_tasks += n_parts * n_chunks;
        if (own >= n_tasks) continue;  // other threads have this block
        list_cells(node, row, end, cells, by_all);
        for (int64_t task = own; task < n_tasks; task += n_threads) {
            const int64_t part = (task - first) / n_chunks, lane = (task - first) % n_chunks * size;
            const int64_t head = kv_heads * part / n_parts, n_heads = kv_heads * (part + 1) / n_parts - head;
            kernel({node, cells, by_all, group, row, head, n_heads, lane, std::min(size, n_lanes - lane), scratch});
        }
    }
}

}  // namespace

void compute_attention(ggml_tensor * node, int thread, int n_threads, void *) {
    int64_t n_tasks = 0;
    if (node->ne[3] == 1) return compute_stream(node, thread, n_threads, n_tasks);
    for (int64_t i = 0; i < node->ne[3]; i++) compute_stream(Stream(node, i).node(), thread, n_threads, n_tasks);
}

bool can_attend(const ggml_tensor * node) {
    if (!kernel || node->op != GGML_OP_FLASH_ATTN_EXT || !(node->flags & GGML_TENSOR_FLAG_COMPUTE)) return false;
    const ggml_tensor * q = node->src[0], * k = node->src[1], * v = node->src[2], * mask = node->src[3];
    return q->type == GGML_TYPE_F32 && has_cells(k) && has_cells(v) && mask && mask->ne[2] == 1 &&
           (mask->ne[3] == 1 || mask->ne[3] == q->ne[3]) && k->ne[2] == v->ne[2] && std::max(k->ne[0], v->ne[0]) <= kMaxWidth;
}

}  // namespace ggpipe
