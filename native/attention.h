// One thread's part of flash attention; see attention.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "cpu.h"
#include "ggml.h"

namespace ggpipe {

constexpr int kTile = 32;             // cells at a time
constexpr int64_t kMaxLanes = 64;     // of a task
constexpr uint16_t kHidden = 0xfc00;  // in a mask: minus infinity

// Types of KV cells.
#define GGPIPE_CELLS(DO) DO(F32) DO(F16) DO(BF16) DO(Q8_0) DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(IQ4_NL)

bool has_cells(const ggml_tensor * t);  // whether its rows can be read

// A thread's memory for one task. On the heap, since threads may have small stacks.
class Scratch {
   public:
    char * of(size_t bytes) {
        if (bytes > size_) {
            memory_.reset((char *) std::aligned_alloc(64, GGML_PAD(bytes, 64)));
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

struct AttentionTask {  // some lanes of a block at some KV heads
    const ggml_tensor * node;
    const std::vector<int32_t> & cells;   // that some rows of the block see
    const std::vector<uint8_t> & by_all;  // of each cell of the cache: whether all of them do
    int64_t group;  // query heads that share a KV head
    int64_t first_row, first_head, n_heads, first_lane, n_lanes;  // of all heads about kMaxLanes at most
    Scratch & scratch;

    int64_t row(int64_t lane) const { return first_row + (first_lane + lane) / group; }
    int64_t query_head(int64_t head, int64_t lane) const { return (first_head + head) * group + (first_lane + lane) % group; }
    const uint16_t * mask(int64_t lane) const {
        return (const uint16_t *) ((const char *) node->src[3]->data + row(lane) * node->src[3]->nb[1]);
    }
};
// One head's matrices for latent cells; see latent.cpp.
struct LatentHead {
    const float * keys, * values;   // (latent numbers, numbers of a key, or of a value)
    int64_t key_width, value_width;
};
void avx512_latent_attention(const AttentionTask & task, const LatentHead & head);
void avx2_latent_attention(const AttentionTask & task, const LatentHead & head);

// The cells that some of these rows see; and for each cell of the cache, whether all do.
void list_cells(const ggml_tensor * node, int64_t row, int64_t end, std::vector<int32_t> & cells, std::vector<uint8_t> & by_all);

using AttentionKernel = void (*)(const AttentionTask &);
void avx512_attention(const AttentionTask & task);
void avx2_attention(const AttentionTask & task);
// The one for a CPU with these features; nullptr: attention stays ggml's.
AttentionKernel attention_for(const CpuFeatures & cpu);

}  // namespace ggpipe
