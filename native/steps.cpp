#include "steps.h"

#include <algorithm>
#include <deque>
#include <memory>

#include "abi.h"
#include "ggml-cpu.h"
#include "stage.h"

namespace ggpipe {

namespace {
constexpr double kWaitNs = 200;  // of a wait, for each thread, we assume: two take 450 on an AMD EPYC of 2017

struct Memory {
    const char * begin, * end;
    explicit Memory(const ggml_tensor * t) : begin((const char *) t->data), end(begin + ggml_nbytes(t)) {}
    explicit Memory(const std::vector<float> & v) : begin((const char *) v.data()), end((const char *) (v.data() + v.size())) {}
    bool overlaps(const Memory & other) const { return begin < other.end && other.begin < end; }
};

bool is_constant(const ggml_tensor * t) {
    return t->op == GGML_OP_NONE && t->buffer && ggml_backend_buffer_get_usage(t->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

class Uses {  // of memory, by some operations
   public:
    Uses() = default;
    Uses(const ggml_tensor * node, const FastGraph & fast) {
        const auto sum = fast.sums.find(node);
        const bool copies = fast.copied_weights.count(node), is_sum = sum != fast.sums.end();
        if (copies) written_.emplace_back(fast.weights);
        else written_.emplace_back(node);
        if (is_sum && fast.copied_weights.count(sum->second)) read_.emplace_back(fast.weights);
        for (const ggml_tensor * source : (is_sum ? sum->second : node)->src) {
            if (source && !is_constant(source)) read_.emplace_back(source);
        }
        if (fast.weighted_norms.count(node)) read_.emplace_back(node->src[0]->src[0]);
    }
    void add(const Uses & others) {
        written_.insert(written_.end(), others.written_.begin(), others.written_.end());
        read_.insert(read_.end(), others.read_.begin(), others.read_.end());
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
        case GGML_OP_FILL:
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
        case GGML_OP_ROPE:
        case GGML_OP_ROPE_BACK: return 2;
        case GGML_OP_DSV4_HC_COMB: return 40;  // mostly exponentials and divisions
        case GGML_OP_ARGSORT:
        case GGML_OP_TOP_K: return 20;
        default: return 0;
    }
}

// Whether one thread computes this in little more time than all of them, which would then have to wait for each other. has_vectors:
// we do, where ggml would not use vectors.
bool is_small(const ggml_tensor * node, bool has_vectors, int n_threads) {
    constexpr double kNsWithVectors = 0.15;
    static const auto is_numa = (decltype(&ggml_is_numa)) cpu_function("ggml_backend_cpu_is_numa");
    if (is_numa()) return false;  // after each graph, ggml lets its first thread run on all nodes again
    const double each = has_vectors ? kNsWithVectors : ns_of(node);
    const ggml_tensor * source = node->src[0];
    if (each == 0 || !source) return false;
    const bool writes_rows = node->op == GGML_OP_SET_ROWS;  // into a larger tensor
    const int64_t n = std::max(writes_rows ? 0 : ggml_nelements(node), node->op == GGML_OP_GET_ROWS ? 0 : ggml_nelements(source));
    const int64_t n_rows = ggml_nrows(writes_rows || node->op == GGML_OP_SUM_ROWS ? source : node);  // which ggml divides among the threads
    return each * n * (1 - 1.0 / std::min<int64_t>(n_threads, n_rows)) <= kWaitNs * n_threads;
}

class Plan {  // of steps, in their order
   public:
    void add(ggml_tensor * node, ggml_custom_op_t own, int n_threads, const FastGraph & fast) {
        // which use memory that their sources do not tell
        const bool is_fence = fast.states.count(node) || node->op == GGML_OP_CUSTOM;
        const bool is_norm = own && own == norm_operation(node, fast), is_elementwise = own && own == elementwise_operation(node);
        const bool may_be_small = (!own || is_norm || is_elementwise) && !is_fence;
        const bool is_small_one = may_be_small && is_small(node, is_elementwise, n_threads);
        const bool can_join = is_small_one || ((own == compute_product || own == copy_expert_weights) && !is_fence);
        const Uses uses(node, fast);
        Entry & entry = can_join ? entry_for(uses, is_small_one) : entries_.emplace_back();
        if (!entry.step.place) entry.step.place = node;
        entry.is_open = can_join;
        if (is_small_one) entry.step.small.push_back({node, own});
        else if (own) entry.step.own.push_back({node, own});
        (is_small_one ? entry.small : entry.others).add(uses);
        if (is_fence) begin_ = entries_.size();
    }
    std::vector<Step> steps() {
        std::vector<Step> steps;
        for (Entry & entry : entries_) {
            Step & step = entry.step;
            const bool ours = !step.own.empty() || step.small.size() > 1 || (step.small.size() == 1 && step.small[0].compute);
            if (!ours) continue;
            if (!step.small.empty()) step.one_thread = std::make_unique<OnOneThread>(step.small);
            steps.push_back(std::move(step));
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

// A CPU backend with one thread.
class OneThread {
   public:
    OneThread() {
        const ggml_threadpool_params params = ggml_threadpool_params_default(1);
        pool_ = ((decltype(&ggml_threadpool_new)) cpu_function("ggml_threadpool_new"))(const_cast<ggml_threadpool_params *>(&params));
        ((decltype(&ggml_backend_cpu_set_threadpool)) cpu_function("ggml_backend_cpu_set_threadpool"))(cpu, pool_);
        ((ggml_backend_set_n_threads_t) cpu_function("ggml_backend_set_n_threads"))(cpu, 1);
        // ggml finds operations to fuse by a table that only its own graphs have, but not so with its reference kernels
        ((decltype(&ggml_backend_cpu_set_use_ref)) cpu_function("ggml_backend_cpu_set_use_ref"))(cpu, true);
    }
    ~OneThread() {
        ggml_backend_free(cpu);
        ((decltype(&ggml_threadpool_free)) cpu_function("ggml_threadpool_free"))(pool_);
    }
    const ggml_backend_t cpu = ggml_backend_dev_init(cpu_device(), nullptr);

   private:
    ggml_threadpool * pool_;
};
ggml_backend_t one_thread() {
    static thread_local const OneThread thread;
    return thread.cpu;
}
}  // namespace

OnOneThread::OnOneThread(const std::vector<Step::Own> & operations)
    : plan_(nullptr, [](void * p) { ggml_backend_graph_plan_free(one_thread(), p); }) {
    copies_.reserve(operations.size());
    for (const Step::Own & operation : operations) {
        ggml_tensor & copy = copies_.emplace_back(*operation.node);
        nodes_.push_back(&copy);
        if (operation.compute) become_custom(&copy, params_of(operation.compute, nullptr));
    }
    ggml_cgraph graph{};
    graph.size = graph.n_nodes = nodes_.size();
    graph.nodes = nodes_.data();
    plan_.reset(ggml_backend_graph_plan_create(one_thread(), &graph));
}

bool computes(const ggml_tensor * node) {
    return !is_view(node) && !ggml_is_empty(node) && (node->flags & GGML_TENSOR_FLAG_COMPUTE);
}

void OnOneThread::prepare() { one_thread(); }

void OnOneThread::compute() const { ggml_backend_graph_plan_compute(one_thread(), plan_.get()); }

std::vector<Step> steps_of(ggml_cgraph * graph, int n_threads, const FastGraph & fast) {
    Plan plan;
    std::vector<Step> steps;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (!computes(node) || fast.folded.count(node)) continue;
        const ggml_custom_op_t own = own_operation(node, fast);
        if (n_threads > 1) plan.add(node, own, n_threads, fast);
        else if (own) steps.push_back({node, {{node, own}}, {}});
    }
    if (n_threads > 1) steps = plan.steps();
    return steps;
}

void compute_step(const Step & step, int thread, int n_threads, FastGraph & fast) {
    if (thread == 0 && step.one_thread) step.one_thread->compute();
    for (const Step::Own & own : step.own) own.compute(own.node, thread, n_threads, &fast);
}

}  // namespace ggpipe
