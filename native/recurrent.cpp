// Operations of recurrent layers: gated delta nets (delta_net_lanes.h), state spaces (state_space_lanes.h), convolutions, and what
// moves their states.
//
// ggml has one thread concatenate a convolution's state and its new inputs, and one copy a sequence's state, while all others
// wait. It computes convolutions token by token, and so reads a cache line for each number. Here all threads do all of that,
// and delta nets change their states where libllama keeps them, without copies.
#include "recurrent.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "cpu.h"
#include "fast.h"
#include "vectors.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace ggpipe {

namespace {
using DeltaNetKernel = void (*)(const DeltaNetTask &);
const CpuFeatures cpu = cpu_features();
using ScanKernel = void (*)(const ScanTask &);
const DeltaNetKernel delta_net = cpu.avx512 ? avx512_delta_net : avx2_delta_net;
const ScanKernel scan = cpu.avx512 ? avx512_scan : avx2_scan;

const ggml_tensor * whole(const ggml_tensor * t) { return t->view_src ? t->view_src : t; }

// Where a delta net writes its states: after its results.
void * states_after(const ggml_tensor * net) { return (float *) net->data + ggml_nelements(net->src[2]); }

// One thread's part of n things, in whole blocks.
struct Part {
    int64_t begin, end;
    Part(int64_t n, int64_t block, int thread, int n_threads) {
        const int64_t n_blocks = (n + block - 1) / block;
        begin = std::min(n, n_blocks * thread / n_threads * block);
        end = std::min(n, n_blocks * (thread + 1) / n_threads * block);
    }
};

// The state of which a node is a part, if it is changed where it is kept.
const FastGraph::State * kept_state(const ggml_tensor * node, const void * graph) {
    const auto & states = ((const FastGraph *) graph)->states;
    const auto found = states.find(node);
    return found != states.end() && found->second.stays() ? &found->second : nullptr;
}

void compute_delta_net(ggml_tensor * node, int thread, int n_threads, void * graph) {
    thread_local Scratch scratch;
    const ggml_tensor * values = node->src[2], * states = node->src[5];
    const int64_t n_rows = values->ne[0], n_heads = values->ne[1], size = n_rows * n_rows * n_heads;
    const FastGraph::State * kept = kept_state(node, graph);
    const auto from = [&](int64_t sequence) {
        return kept ? (const float *) kept->copy->data + sequence * size : (const float *) states->data + sequence * (states->nb[3] / sizeof(float));
    };
    const auto to = [&](int64_t sequence) { return (float *) (kept ? kept->copy->data : states_after(node)) + sequence * size; };
    const Part part(n_heads * values->ne[3] * n_rows, kStateRows, thread, n_threads);
    for (int64_t row = part.begin; row < part.end;) {
        const int64_t head = row / n_rows, end = std::min(part.end, (head + 1) * n_rows);
        const int64_t sequence = head / n_heads;
        delta_net({node, from(sequence), to(sequence), head % n_heads, sequence, row - head * n_rows, end - head * n_rows, scratch});
        row = end;
    }
}

void compute_scan(ggml_tensor * node, int thread, int n_threads, void *) {
    const ggml_tensor * states = node->src[0], * inputs = node->src[1], * ids = node->src[6];
    const int64_t n_rows = inputs->ne[0] * inputs->ne[1];
    const Part part(n_rows, kScanRows, thread, n_threads);
    for (int64_t sequence = 0; sequence < inputs->ne[3]; sequence++) {
        const int32_t id = ((const int32_t *) ids->data)[sequence];
        const float * from = (const float *) ((const char *) states->data + id * states->nb[3]);
        float * to = (float *) ((char *) node->data + ggml_nelements(inputs) * sizeof(float) + sequence * states->nb[3]);
        if (part.begin < part.end) scan({node, from, to, sequence, part.begin, part.end});
    }
}

#ifdef __x86_64__
#define GGPIPE_TARGET __attribute__((target("avx2,fma")))
constexpr int64_t kSquare = 8;

// Eight vectors of eight numbers become the first numbers of all, the second ones, and so on.
GGPIPE_TARGET GGPIPE_INLINE inline void transpose(__m256 * v) {
    __m256 pairs[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
            fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xee);
        }
    }
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
        v[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
    }
}

// inputs (tokens and those before them, channels), results (channels, tokens)
GGPIPE_TARGET void compute_convolution(ggml_tensor * node, int thread, int n_threads, void *) {
    const ggml_tensor * inputs = node->src[0], * kernels = node->src[1];
    const int64_t width = kernels->ne[0], n_inputs = inputs->ne[0], n_channels = inputs->ne[1], n_tokens = node->ne[1];
    const Part part(n_channels, 2 * kSquare, thread, n_threads);
    for (int64_t sequence = 0; sequence < node->ne[2]; sequence++) {
        const float * all = (const float *) ((const char *) inputs->data + sequence * inputs->nb[2]);
        float * results = (float *) ((char *) node->data + sequence * node->nb[2]);
        const auto result = [&](int64_t token, int64_t channel) { return results + token * (node->nb[1] / sizeof(float)) + channel; };
        for (int64_t channel = part.begin; channel < part.end; channel += kSquare) {
            const float * kernel = (const float *) ((const char *) kernels->data + channel * kernels->nb[1]);
            const float * input = all + channel * n_inputs;
            const int64_t n = std::min(kSquare, part.end - channel);
            int64_t token = 0;
            for (; n == kSquare && token + kSquare <= n_tokens; token += kSquare) {
                __m256 sums[kSquare];
                for (int c = 0; c < kSquare; c++) {
                    sums[c] = _mm256_setzero_ps();
                    for (int64_t i = 0; i < width; i++) {
                        const __m256 x = _mm256_loadu_ps(input + c * n_inputs + token + i);
                        sums[c] = _mm256_fmadd_ps(x, _mm256_set1_ps(kernel[c * width + i]), sums[c]);
                    }
                }
                transpose(sums);
                for (int i = 0; i < kSquare; i++) _mm256_storeu_ps(result(token + i, channel), sums[i]);
            }
            for (; token < n_tokens; token++) {
                for (int64_t c = 0; c < n; c++) {
                    float sum = 0;
                    for (int64_t i = 0; i < width; i++) {
                        sum = __builtin_fmaf(input[c * n_inputs + token + i], kernel[c * width + i], sum);
                    }
                    *result(token, channel + c) = sum;
                }
            }
        }
    }
}

// Rows of the first source, each followed by a column of the second one.
GGPIPE_TARGET void compute_concatenation(ggml_tensor * node, int thread, int n_threads, void *) {
    const ggml_tensor * a = node->src[0], * b = node->src[1];
    const int64_t n_rows = node->ne[1], n_first = a->ne[0], n_second = b->ne[0];
    const Part part(n_rows, 2 * kSquare, thread, n_threads);
    for (int64_t i = 0; i < node->ne[2]; i++) {
        const auto from = [&](const ggml_tensor * t, int64_t column, int64_t row) {
            return (const float *) ((const char *) t->data + column * t->nb[0] + row * t->nb[1] + i * t->nb[2]);
        };
        for (int64_t row = part.begin; row < part.end; row += kSquare) {
            const int64_t n = std::min(kSquare, part.end - row);
            float * to = (float *) ((char *) node->data + row * node->nb[1] + i * node->nb[2]);
            const int64_t stride = node->nb[1] / sizeof(float);
            for (int64_t r = 0; r < n; r++) memcpy(to + r * stride, from(a, 0, row + r), n_first * sizeof(float));
            to += n_first;
            int64_t column = 0;
            for (; n == kSquare && column + kSquare <= n_second; column += kSquare) {
                __m256 v[kSquare];
                for (int c = 0; c < kSquare; c++) v[c] = _mm256_loadu_ps(from(b, column + c, row));
                transpose(v);
                for (int r = 0; r < kSquare; r++) _mm256_storeu_ps(to + r * stride + column, v[r]);
            }
            for (; column < n_second; column++) {
                for (int64_t r = 0; r < n; r++) to[r * stride + column] = *from(b, column, row + r);
            }
        }
    }
}
#endif

// Few long rows, such as the states of sequences.
void compute_rows(ggml_tensor * node, int thread, int n_threads, void * graph) {
    if (kept_state(node, graph)) return;
    const ggml_tensor * rows = node->src[0], * ids = node->src[1];
    const Part part(node->ne[0], 16, thread, n_threads);
    for (int64_t i = 0; i < ids->ne[0]; i++) {
        const int32_t id = ((const int32_t *) ids->data)[i];
        GGML_ASSERT(id >= 0 && id < rows->ne[1]);
        memcpy((float *) ((char *) node->data + i * node->nb[1]) + part.begin,
               (const float *) ((const char *) rows->data + id * rows->nb[1]) + part.begin, (part.end - part.begin) * sizeof(float));
    }
}

void copy_states(ggml_tensor * node, int thread, int n_threads, void * graph) {
    if (kept_state(node, graph)) return;
    const Part part(ggml_nelements(node), 16, thread, n_threads);
    memcpy((float *) node->data + part.begin, (const float *) node->src[0]->data + part.begin, (part.end - part.begin) * sizeof(float));
}

bool are_floats(const ggml_tensor * t, int n_sources) {
    bool are = t->type == GGML_TYPE_F32;
    for (int i = 0; i < n_sources; i++) are = are && t->src[i]->type == GGML_TYPE_F32;
    return are;
}
}  // namespace

// Whether a node computes nothing. Operations in place are views as well, but they do.
bool is_view(const ggml_tensor * node) {
    return node->op == GGML_OP_NONE || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_VIEW || node->op == GGML_OP_PERMUTE ||
           node->op == GGML_OP_TRANSPOSE;
}

bool FastGraph::State::stays() const {
    const ggml_tensor * cells = rows->src[0], * ids = rows->src[1];
    for (int64_t i = 0; i < ids->ne[0]; i++) {
        const char * from = (const char *) cells->data + ((const int32_t *) ids->data)[i] * cells->nb[1];
        if (from != (const char *) copy->data + i * rows->nb[1]) return false;
    }
    return true;
}

// States of delta nets which nothing else reads, neither before nor after they change.
void FastGraph::find_states(ggml_cgraph * graph) {
    std::map<const ggml_tensor *, State> nets;
    std::map<const ggml_tensor *, const ggml_tensor *> net_of;  // by what is read
    const auto node_at = [&](int i) { return ggml_graph_node(graph, i); };
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * net = node_at(i);
        if (net->op != GGML_OP_GATED_DELTA_NET || recurrent_operation(net, *this) != compute_delta_net) continue;
        const ggml_tensor * state = net->src[5], * rows = whole(state);
        if (recurrent_operation(rows, *this) != compute_rows || state->data != rows->data || ggml_nbytes(state) != ggml_nbytes(rows)) continue;
        nets[net] = {rows, net, nullptr};
        net_of[rows] = net;
    }
    for (int i = 0; i < ggml_graph_n_nodes(graph) && !nets.empty(); i++) {
        const ggml_tensor * node = node_at(i);
        if (is_view(node)) continue;
        for (const ggml_tensor * source : node->src) {
            if (!source) continue;
            const ggml_tensor * from = whole(source);
            if (const auto read = net_of.find(from); read != net_of.end() && node != read->second) nets.erase(read->second);
            const auto net = nets.find(from);
            const char * const after = net == nets.end() ? nullptr : (const char *) states_after(from);
            if (!after || (const char *) source->data + ggml_nbytes(source) <= after) continue;
            const bool is_copy = node->op == GGML_OP_CPY && node->type == GGML_TYPE_F32 && ggml_is_contiguous(node) && ggml_is_contiguous(source) &&
                                 source->data == after && ggml_nbytes(source) == ggml_nbytes(net->second.rows);
            if (is_copy && !net->second.copy) net->second.copy = node;
            else nets.erase(net);
        }
    }
    for (const auto & [net, state] : nets) {
        if (!state.copy) continue;
        for (const ggml_tensor * node : {state.rows, net, state.copy}) states[node] = state;
    }
}

ggml_custom_op_t recurrent_operation(const ggml_tensor * node, const FastGraph & graph) {
    constexpr int64_t kLong = 4096;
    if (!cpu.avx2 || !(node->flags & GGML_TENSOR_FLAG_COMPUTE)) return nullptr;
    switch (node->op) {
        case GGML_OP_GATED_DELTA_NET: {  // of which libllama may ask for more than the last state
            const bool has_rows = node->src[0]->nb[0] == sizeof(float) && node->src[1]->nb[0] == sizeof(float) && node->src[2]->nb[0] == sizeof(float);
            return are_floats(node, 6) && has_rows && node->src[2]->ne[0] % 16 == 0 && node->op_params[0] == 1 ? compute_delta_net : nullptr;
        }
        case GGML_OP_SSM_SCAN: {  // eight rows have one head, or one each, whose decays differ by column; and the same group
            const ggml_tensor * inputs = node->src[1], * decays = node->src[3], * b = node->src[4];
            const bool fits = inputs->ne[0] == 1 ? decays->ne[0] > 1 && inputs->ne[1] / b->ne[1] % kScanRows == 0
                                                 : inputs->ne[0] % kScanRows == 0;
            return are_floats(node, 6) && fits && b->ne[0] % 16 == 0 && node->op_params[0] == 1 ? compute_scan : nullptr;
        }
#ifdef __x86_64__
        case GGML_OP_SSM_CONV: return are_floats(node, 2) ? compute_convolution : nullptr;
        case GGML_OP_CONCAT: {
            const ggml_tensor * a = node->src[0], * b = node->src[1];
            const bool has_columns = a->nb[0] == sizeof(float) && b->nb[1] == sizeof(float);
            return are_floats(node, 2) && node->op_params[0] == 0 && has_columns && node->ne[3] == 1 ? compute_concatenation : nullptr;
        }
#endif
        case GGML_OP_GET_ROWS: {
            const bool is_plain = node->src[1]->type == GGML_TYPE_I32 && node->ne[2] * node->ne[3] == 1 && node->src[0]->nb[0] == sizeof(float);
            return are_floats(node, 1) && is_plain && node->ne[0] >= kLong ? compute_rows : nullptr;
        }
        case GGML_OP_CPY: return graph.states.count(node) ? copy_states : nullptr;
        default: return nullptr;
    }
}

}  // namespace ggpipe
