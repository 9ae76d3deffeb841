#include "fast.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "attention.h"
#include "compute.h"
#include "ggml-alloc.h"
#include "kernels.h"
#include "stage.h"
#include "steps.h"

namespace ggpipe {

Params params_of(ggml_custom_op_t compute, void * state) {
    alignas(16) char memory[1024];  // of a tensor without data
    ggml_context * ctx = ggml_init({sizeof memory, memory, /*no_alloc*/ true});
    const ggml_tensor * custom = ggml_custom_4d(ctx, GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0, compute, GGML_N_TASKS_MAX, state);
    Params params;
    memcpy(&params, custom->op_params, sizeof params);
    ggml_free(ctx);
    return params;
}

void become_custom(ggml_tensor * node, const Params & params) {
    memcpy(node->op_params + kOwnParams, node->op_params, kOwnParams * sizeof(int32_t));
    memcpy(node->op_params, &params, kOwnParams * sizeof(int32_t));
    node->op = GGML_OP_CUSTOM;
}

std::map<const ggml_tensor *, int64_t> reads_in(ggml_cgraph * graph) {
    std::map<const ggml_tensor *, int64_t> n_reads;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        for (const ggml_tensor * source : node->src) {
            if (source && !is_view(node)) n_reads[source->view_src ? source->view_src : source]++;
        }
    }
    return n_reads;
}

bool overlap(const ggml_tensor * a, const ggml_tensor * b) {
    const char * const x = (const char *) a->data, * const y = (const char *) b->data;
    return x < y + ggml_nbytes(b) && y < x + ggml_nbytes(a);
}

namespace {
// How a graph is computed. Nodes become custom operations, or none, only as long as that takes.
class Computation {
   public:
    // `with_latent`: where it can, with operations for latent attention.
    Computation(ggml_cgraph * graph, int n_threads, bool with_latent, std::deque<QuantizedMemory> & memories) : fast_(memories) {
        fast_.find_states(graph);
        fast_.find_sums(graph);
        fast_.find_norms(graph);
        if (with_latent) fast_.find_latent(graph);
        steps_ = steps_of(graph, n_threads, fast_);
        for (const Step & step : steps_) {
            std::vector<ggml_tensor *> products;
            for (const Step::Own & own : step.own) {
                add(own.node);
                if (own.compute == compute_product) products.push_back(own.node);
            }
            for (const Step::Own & small : step.small) add(small.node);
            fast_.add(products);
        }
        for (const ggml_tensor * node : fast_.folded) add(const_cast<ggml_tensor *>(node));
        for (int i = 0; i < ggml_graph_n_nodes(graph); i++) n_operations += computes(ggml_graph_node(graph, i));
        n_waits = n_operations - before_.size() + steps_.size();
    }
    ggml_status compute(ggml_backend_t backend, ggml_cgraph * graph) {
        for (const Before & b : before_) {
            b.node->op = GGML_OP_NONE;
            memcpy(b.node->op_params + kOwnParams, &b.params, kOwnParams * sizeof(int32_t));
        }
        const Params params = params_of(compute_place, this);
        for (size_t i = 0; i < steps_.size(); i++) {
            ggml_tensor * place = steps_[i].place;
            place->op = GGML_OP_CUSTOM;
            memcpy(place->op_params, &params, kOwnParams * sizeof(int32_t));
            place->op_params[kStepIndex] = i;
        }
        fast_.begin();
        const ggml_status status = ggml_backend_graph_compute(backend, graph);
        for (const Before & b : before_) {
            b.node->op = b.op;
            memcpy(b.node->op_params, &b.params, sizeof(Params));
        }
        return status;
    }
    bool pays() const { return fast_.latent.empty() || fast_.latent_pays(); }
    int64_t n_operations = 0, n_waits;

   private:
    // A custom operation's parameters, as ggml writes them, leave room for the number of its step.
    static constexpr int kStepIndex = kOwnParams - 2;
    struct Before {
        ggml_tensor * node;
        ggml_op op;
        Params params;
    };
    void add(ggml_tensor * node) {
        before_.push_back({node, node->op, {}});
        memcpy(&before_.back().params, node->op_params, sizeof(Params));
    }
    static void compute_place(ggml_tensor * place, int thread, int n_threads, void * computation) {
        Computation & c = *(Computation *) computation;
        compute_step(c.steps_[place->op_params[kStepIndex]], thread, n_threads, c.fast_);
    }
    FastGraph fast_;
    std::vector<Step> steps_;
    std::vector<Before> before_;
};

// Computations of graphs that ggml computes again, by their ids and numbers of threads, with latent attention or without.
class Kept {
   public:
    Kept() { OnOneThread::prepare(); }
    Computation & of(ggml_cgraph * graph, int n_threads, bool with_latent) {
        const std::tuple<uint64_t, int, bool> key{graph->uid, n_threads, with_latent};
        std::unique_ptr<Computation> & kept = kept_[key];
        if (kept && graph->uid) return *kept;
        n_nodes_ += ggml_graph_n_nodes(graph);
        if (n_nodes_ > kMostNodes) {
            kept_.clear();
            n_nodes_ = ggml_graph_n_nodes(graph);
        }
        return *(kept_[key] = std::make_unique<Computation>(graph, n_threads, with_latent, memories_));
    }

   private:
    static constexpr int kMostNodes = 40000;  // some 500 bytes each
    std::deque<QuantizedMemory> memories_;
    std::map<std::tuple<uint64_t, int, bool>, std::unique_ptr<Computation>> kept_;
    int n_nodes_ = 0;
};
}  // namespace

ggml_custom_op_t own_operation(const ggml_tensor * node, const FastGraph & graph) {
    if (graph.sums.count(node)) return compute_expert_sum;
    if (graph.copied_weights.count(node)) return copy_expert_weights;
    if (ggml_custom_op_t latent = graph.latent_operation(node)) return latent;
    if (is_product(node)) return compute_product;
    if (can_attend(node)) return compute_attention;
    for (ggml_custom_op_t own : {norm_operation(node, graph), indexer_operation(node), elementwise_operation(node)}) {
        if (own) return own;
    }
    return recurrent_operation(node, graph);
}

ggml_status compute_fast(ggml_backend_t backend, ggml_cgraph * graph, Threads & threads, bool exact) {
    static thread_local Kept kept;
    Computation * const first = &kept.of(graph, threads.n, !exact);
    Computation & computation = first->pays() ? *first : kept.of(graph, threads.n, false);
    threads.n_operations += computation.n_operations;
    threads.n_waits += computation.n_waits;
    return computation.compute(backend, graph);
}

namespace {
class OneAttention {  // a graph of one attention, with its memory
   public:
    OneAttention(const AttentionShape & s, int n_threads) : threads_{n_threads} {
        ggml_context * ctx = ctx_.get();
        q = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, s.key_width, s.n_rows, s.n_heads);
        k = ggml_new_tensor_3d(ctx, s.key_type, s.key_width, s.n_kv_heads, s.n_cells);  // as in libllama's cache
        v = ggml_new_tensor_3d(ctx, s.value_type, s.value_width, s.n_kv_heads, s.n_cells);
        mask = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, s.n_cells, s.n_rows);
        sinks = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, s.n_heads);
        result = ggml_flash_attn_ext(ctx, q, ggml_permute(ctx, k, 0, 2, 1, 3), ggml_permute(ctx, v, 0, 2, 1, 3), mask,
                                     1 / std::sqrt(float(s.key_width)), s.max_bias, s.softcap);
        ggml_prec_set_acc(result, GGML_PREC_F32);  // as libllama does
        if (s.has_sinks) ggml_flash_attn_ext_add_sinks(result, sinks);
        buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_dev_buffer_type(cpu_device())));
        if (!buffer_) throw std::runtime_error("not enough memory");
        ((ggml_backend_set_n_threads_t) cpu_function("ggml_backend_set_n_threads"))(cpu_.get(), n_threads);
        graph_ = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph_, result);
    }
    void compute(bool fast) {
        if ((fast ? compute_fast(cpu_.get(), graph_, threads_) : ggml_backend_graph_compute(cpu_.get(), graph_)) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error("ggml cannot compute this");
        }
    }
    ggml_tensor * q, * k, * v, * mask, * sinks, * result;

   private:
    Threads threads_;
    std::unique_ptr<ggml_context, void (*)(ggml_context *)> ctx_{ggml_init({1 << 20, nullptr, /*no_alloc*/ true}), ggml_free};
    std::unique_ptr<ggml_backend_buffer, void (*)(ggml_backend_buffer_t)> buffer_{nullptr, ggml_backend_buffer_free};
    std::unique_ptr<ggml_backend, void (*)(ggml_backend_t)> cpu_{ggml_backend_dev_init(cpu_device(), nullptr), ggml_backend_free};
    ggml_cgraph * graph_;
};
}  // namespace

std::vector<float> attend(const AttentionShape & shape, const AttentionInputs & inputs, int n_threads, bool fast) {
    OneAttention attention(shape, n_threads);
    for (int64_t row = 0; row < shape.n_rows; row++) {
        for (int64_t head = 0; head < shape.n_heads; head++) {
            memcpy((char *) attention.q->data + row * attention.q->nb[1] + head * attention.q->nb[2],
                   inputs.queries + (row * shape.n_heads + head) * shape.key_width, shape.key_width * sizeof(float));
        }
    }
    memcpy(attention.k->data, inputs.keys, ggml_nbytes(attention.k));
    memcpy(attention.v->data, inputs.values, ggml_nbytes(attention.v));
    memcpy(attention.mask->data, inputs.mask, ggml_nbytes(attention.mask));
    if (inputs.sinks) memcpy(attention.sinks->data, inputs.sinks, ggml_nbytes(attention.sinks));
    attention.compute(fast);
    const float * results = (const float *) attention.result->data;
    return {results, results + ggml_nelements(attention.result)};
}

std::vector<std::pair<double, double>> time_attention(const AttentionShape & shape, int n_threads, int n_rounds) {
    OneAttention attention(shape, n_threads);
    std::minstd_rand random(1);
    std::uniform_real_distribution<float> numbers(-1, 1);
    for (int64_t i = 0; i < ggml_nelements(attention.q); i++) ((float *) attention.q->data)[i] = numbers(random);
    for (ggml_tensor * t : {attention.k, attention.v}) {
        std::vector<float> row(ggml_nelements(t));
        for (float & number : row) number = numbers(random);
        ggml_quantize_chunk(t->type, row.data(), t->data, 0, row.size() / t->ne[0], t->ne[0], nullptr);
    }
    for (int64_t row = 0; row < shape.n_rows; row++) {
        for (int64_t c = 0; c < shape.n_cells; c++) {
            ((ggml_fp16_t *) attention.mask->data)[row * shape.n_cells + c] =
                ggml_fp32_to_fp16(c <= shape.n_cells - shape.n_rows + row ? 0 : -INFINITY);
        }
    }
    std::vector<std::pair<double, double>> times;
    for (int round = -1; round < n_rounds; round++) {  // the first one warms up
        double seconds[2];
        for (int fast = 0; fast < 2; fast++) {
            const auto start = std::chrono::steady_clock::now();
            attention.compute(fast);
            seconds[fast] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        }
        if (round >= 0) times.emplace_back(seconds[0], seconds[1]);
    }
    return times;
}

int64_t compute_alone(ggml_cgraph * graph, int n_threads, bool fast) {
    const std::unique_ptr<ggml_backend, void (*)(ggml_backend_t)> cpu(ggml_backend_dev_init(cpu_device(), nullptr), ggml_backend_free);
    ((ggml_backend_set_n_threads_t) cpu_function("ggml_backend_set_n_threads"))(cpu.get(), n_threads);
    Threads threads{n_threads};
    if ((fast ? compute_fast(cpu.get(), graph, threads) : ggml_backend_graph_compute(cpu.get(), graph)) != GGML_STATUS_SUCCESS) {
        throw std::runtime_error("ggml cannot compute this");
    }
    return threads.n_waits;
}

std::vector<float> multiply(const Product & p, int n_threads, bool repack, bool fast) {
    const auto require = [](bool holds, const char * what) {
        if (!holds) throw std::runtime_error(what);
    };
    require(p.n_columns > 0 && !p.activations.empty() && p.activations.size() % p.n_columns == 0, "activations are no whole rows");
    const int64_t n_tokens = p.activations.size() / p.n_columns, n_used = p.experts.size() / n_tokens;
    const int64_t n_matrices = std::max<int64_t>(1, p.n_matrices), n_parts = n_used ? n_tokens : n_matrices;
    require(n_tokens % n_parts == 0, "activations cannot be divided among the matrices");
    const std::unique_ptr<ggml_context, void (*)(ggml_context *)> ctx(ggml_init({1 << 20, nullptr, /*no_alloc*/ true}), ggml_free);
    ggml_tensor * weights = ggml_new_tensor_3d(ctx.get(), p.type, p.n_columns, p.n_rows, n_matrices);
    require(ggml_nbytes(weights) == p.weights.size(), "weights do not have the size of their shape");
    ggml_tensor * activations = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, p.n_columns, n_tokens / n_parts, n_parts);
    ggml_tensor * experts = n_used ? ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, n_used, n_tokens) : nullptr;
    ggml_tensor * result = n_used ? ggml_mul_mat_id(ctx.get(), weights, activations, experts)
                                  : ggml_mul_mat(ctx.get(), weights, activations);
    const Stage stage(true, repack, false, fast, false);
    using Buffer = std::unique_ptr<ggml_backend_buffer, void (*)(ggml_backend_buffer_t)>;
    Buffer repacked(nullptr, ggml_backend_buffer_free);
    if (ggml_backend_buffer_type_t type = repacking_type(stage, weights, result)) {
        repacked.reset(ggml_backend_buft_alloc_buffer(type, p.weights.size()));
        ggml_backend_tensor_alloc(repacked.get(), weights, ggml_backend_buffer_get_base(repacked.get()));
    }
    const Buffer others(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(cpu_device())),
                        ggml_backend_buffer_free);
    ggml_backend_buffer_set_usage(others.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_tensor_set(weights, p.weights.data(), 0, p.weights.size());
    ggml_backend_tensor_set(activations, p.activations.data(), 0, ggml_nbytes(activations));
    if (experts) ggml_backend_tensor_set(experts, p.experts.data(), 0, ggml_nbytes(experts));
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, result);
    compute_alone(graph, n_threads, fast);
    std::vector<float> results(ggml_nelements(result));
    ggml_backend_tensor_get(result, results.data(), 0, ggml_nbytes(result));
    return results;
}

std::pair<std::string, std::string> kernel_names(ggml_type type, bool is_repacked, const std::vector<std::string> & features) {
    CpuFeatures cpu{};
    for (const std::string & name : features) {
        bool * const has = name == "avx2" ? &cpu.avx2 : name == "avx_vnni" ? &cpu.avx_vnni : name == "avx512" ? &cpu.avx512
                         : name == "avx512_vnni" ? &cpu.avx512_vnni : name == "avx512_bf16" ? &cpu.avx512_bf16 : nullptr;
        if (!has) throw std::runtime_error("unknown CPU feature: " + name);
        *has = true;
    }
    const Kernel * product = kernel_for(type, is_repacked, cpu);
    const AttentionKernel attention = attention_for(cpu);
    return {product ? product->name : "", attention == avx512_attention ? "AVX-512" : attention ? "AVX2" : ""};
}

}  // namespace ggpipe
