#include "steps.h"

#include <algorithm>
#include <deque>
#include <memory>

#include "abi.h"
#include "stage.h"

namespace ggpipe {

namespace {
constexpr double kWaitNs = 200;  // for each thread; a barrier of two takes 450 on an AMD EPYC of 2017

struct Memory {
    const char * begin, * end;
    explicit Memory(const ggml_tensor * t) : begin((const char *) t->data), end(begin + ggml_nbytes(t)) {}
    bool overlaps(const Memory & other) const { return begin < other.end && other.begin < end; }
};

bool is_constant(const ggml_tensor * t) {
    return t->op == GGML_OP_NONE && t->buffer && ggml_backend_buffer_get_usage(t->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

class Uses {  // of memory, by some operations
   public:
    void add(const ggml_tensor * node) {
        written_.emplace_back(node);
        for (const ggml_tensor * source : node->src) {
            if (source && !is_constant(source)) read_.emplace_back(source);
        }
    }
    // Whether these operations and others have to keep their order.
    bool conflict(const Uses & others) const {
        return meet(written_, others.written_) || meet(written_, others.read_) || meet(read_, others.written_);
    }

   private:
    using List = std::vector<Memory>;
    static bool meet(const List & a, const List & b) {
        return std::any_of(a.begin(), a.end(), [&](const Memory & m) {
            return std::any_of(b.begin(), b.end(), [&](const Memory & other) { return m.overlaps(other); });
        });
    }
    List written_, read_;
};

// About how long ggml's kernel takes for a number of this operation's, in ns. 0: it is not among the small ones.
double ns_of(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_ADD:
        case GGML_OP_ADD_ID:
        case GGML_OP_SUB:
        case GGML_OP_MUL:
        case GGML_OP_DIV:
        case GGML_OP_SCALE:
        case GGML_OP_CLAMP:
        case GGML_OP_SQR:
        case GGML_OP_SQRT:
        case GGML_OP_REPEAT:
        case GGML_OP_CONCAT:
        case GGML_OP_SUM_ROWS:
        case GGML_OP_NORM:
        case GGML_OP_RMS_NORM:
        case GGML_OP_L2_NORM: return 0.5;
        case GGML_OP_CPY:
        case GGML_OP_CONT:
        case GGML_OP_DUP:
        case GGML_OP_GET_ROWS:
        case GGML_OP_SET_ROWS: return ggml_is_quantized(node->type) || ggml_is_quantized(node->src[0]->type) ? 3 : 1;
        case GGML_OP_UNARY:
        case GGML_OP_GLU:
        case GGML_OP_SOFT_MAX:
        case GGML_OP_ROPE: return 2;
        case GGML_OP_ARGSORT:
        case GGML_OP_TOP_K: return 20;
        default: return 0;
    }
}

// Whether one thread computes this in little more time than all of them, who would have to wait for each other.
bool is_small(const ggml_tensor * node, int n_threads) {
    const double each = ns_of(node);
    const ggml_tensor * source = node->src[0];
    if (each == 0 || !source) return false;
    const bool writes_rows = node->op == GGML_OP_SET_ROWS;  // into a larger tensor
    const int64_t n = std::max(writes_rows ? 0 : ggml_nelements(node), node->op == GGML_OP_GET_ROWS ? 0 : ggml_nelements(source));
    const int64_t n_rows = ggml_nrows(writes_rows || node->op == GGML_OP_SUM_ROWS ? source : node);  // which ggml divides among the threads
    return each * n * (1 - 1.0 / std::min<int64_t>(n_threads, n_rows)) <= kWaitNs * n_threads;
}

class Plan {  // of steps, in their order
   public:
    void add(ggml_tensor * node, ggml_custom_op_t own, int n_threads, bool is_fence) {
        const bool is_small_one = !own && !is_fence && is_small(node, n_threads);
        const bool can_join = is_small_one || (own == compute_product && !is_fence);
        Uses uses;
        uses.add(node);
        Entry & entry = can_join ? entry_for(uses, is_small_one) : entries_.emplace_back();
        if (!entry.step.place) entry.step.place = node;
        entry.is_open = can_join;
        if (own) entry.step.own.push_back({node, own});
        if (is_small_one) entry.step.small.push_back(node);
        (is_small_one ? entry.small : entry.others).add(node);
        if (is_fence) begin_ = entries_.size();
    }
    std::vector<Step> steps() {
        std::vector<Step> steps;
        for (Entry & entry : entries_) {
            if (entry.step.own.size() || entry.step.small.size() > 1) steps.push_back(std::move(entry.step));
        }
        return steps;
    }

   private:
    struct Entry {
        Step step;
        Uses others, small;
        bool is_open;
    };

    // The first step that can take this operation, which may have to wait for earlier ones; products prefer those with products.
    Entry & entry_for(const Uses & uses, bool is_small_one) {
        constexpr size_t kFarthest = 16;
        Entry * found = nullptr;
        bool has_products = false;
        for (size_t i = entries_.size(), end = std::max(begin_, i - std::min(i, kFarthest)); i-- > end;) {
            Entry & entry = entries_[i];
            const bool after_small = uses.conflict(entry.small);
            if (uses.conflict(entry.others) || (after_small && !(is_small_one && entry.is_open))) break;
            const bool products_here = !entry.step.own.empty();
            if (entry.is_open && (is_small_one || products_here || !has_products)) {
                found = &entry;
                has_products = products_here;
            }
            if (after_small) break;
        }
        return found ? *found : entries_.emplace_back();
    }

    std::deque<Entry> entries_;
    size_t begin_ = 0;  // no operation goes before this step
};

ggml_backend_t one_thread() {
    static thread_local const std::unique_ptr<ggml_backend, void (*)(ggml_backend_t)> cpu = [] {
        ggml_backend_t b = ggml_backend_dev_init(cpu_device(), nullptr);
        ((ggml_backend_set_n_threads_t) cpu_function("ggml_backend_set_n_threads"))(b, 1);
        // ggml looks for operations that it can fuse in a table that only its own graphs have, but not so with its reference kernels
        ((void (*)(ggml_backend_t, bool)) cpu_function("ggml_backend_cpu_set_use_ref"))(b, true);
        return std::unique_ptr<ggml_backend, void (*)(ggml_backend_t)>(b, ggml_backend_free);
    }();
    return cpu.get();
}
}  // namespace

std::vector<Step> steps_of(ggml_cgraph * graph, int n_threads, const FastGraph & fast) {
    Plan plan;
    std::vector<Step> apart;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (is_view(node) || ggml_is_empty(node) || !(node->flags & GGML_TENSOR_FLAG_COMPUTE)) continue;
        const ggml_custom_op_t own = own_operation(node, fast);
        if (n_threads > 1) plan.add(node, own, n_threads, fast.states.count(node) || node->op == GGML_OP_CUSTOM);
        else if (own) apart.push_back({node, {{node, own}}, {}});
    }
    return n_threads > 1 ? plan.steps() : apart;
}

void compute_step(const Step & step, int thread, int n_threads, FastGraph & fast) {
    if (thread == 0 && !step.small.empty()) {
        ggml_cgraph graph{};
        graph.size = graph.n_nodes = step.small.size();
        graph.nodes = const_cast<ggml_tensor **>(step.small.data());
        ggml_backend_graph_compute(one_thread(), &graph);
    }
    for (const Step::Own & own : step.own) own.compute(own.node, thread, n_threads, &fast);
}

}  // namespace ggpipe
