// Graphs of a group's stage that come again.
//
// libllama builds a graph whenever a run has another number of rows than the one before. ggml's meta device then finds out
// how each tensor is divided and makes every part's slices of it, which takes it about 5 us a tensor and part. But what it
// makes follows from the tensors alone, which lie at the same places when a graph comes again. So their placing waits until
// the graph is whole: slices of a known graph are put back where the meta device had made them, and their nodes are computed
// and summed here, in the same steps. Only new graphs reach the meta device, which is asked for its steps before any is computed.
//
// Two contexts with the same KV cells, see pauses.cpp, have graphs of their own. But slices of views of these cells are in the
// cells' buffer, in the same places for both, so they are put back whenever the other context has computed.
#include "group_graphs.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <mutex>

#include "group.h"

namespace ggpipe {

namespace {
constexpr size_t kMostGraphs = 24;  // of about 700 bytes a tensor

// The meta device's own functions, the same for all groups. Several may load at a time.
std::once_flag knows_device, knows_backend, knows_buffer;
decltype(ggml_backend_device_i::init_backend) meta_init;
decltype(ggml_backend_buffer_type_i::alloc_buffer) meta_alloc;
decltype(ggml_backend_i::graph_compute) meta_compute;
ggml_backend_buffer_i meta_buffer;

GroupGraphs & graphs_of(ggml_backend_dev_t meta) { return *((Device *) meta->reg->context)->stage->group->graphs; }
GroupGraphs & graphs_of(ggml_backend_buffer_t b) { return graphs_of(b->buft->device); }
}  // namespace

void GroupGraphs::adopt(ggml_backend_dev_t meta) {
    reg_ = group_.stage.local.reg;
    reg_.iface.get_proc_address = nullptr;
    meta->reg = &reg_;
    ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(meta);  // now: ggml keeps it in a table without a lock
    if (meta->iface.init_backend == init) return;  // ggml has given us one that it made for an earlier group
    std::call_once(knows_device, [&] { meta_init = meta->iface.init_backend, meta_alloc = type->iface.alloc_buffer; });
    meta->iface.init_backend = init;
    type->iface.alloc_buffer = alloc;
}

void GroupGraphs::adopt(ggml_backend_buffer_t b) {
    if (b->iface.init_tensor == place) return;
    std::call_once(knows_buffer, [b] { meta_buffer = b->iface; });
    b->iface.init_tensor = place;
    b->iface.set_tensor = write;
    b->iface.get_tensor = read;
}

ggml_backend_t GroupGraphs::init(ggml_backend_dev_t meta, const char * params) {
    ggml_backend_t b = meta_init(meta, params);
    std::call_once(knows_backend, [b] { meta_compute = b->iface.graph_compute; });
    b->iface.graph_compute = compute;
    b->iface.async_copies[0] = b->iface.async_copies[1] = nullptr;  // ggml then asks the buffer
    return b;
}

ggml_backend_buffer_t GroupGraphs::alloc(ggml_backend_buffer_type_t type, size_t size) {
    GroupGraphs & g = graphs_of(type->device);
    ggml_backend_buffer_t b = meta_alloc(type, size);
    g.graphs_.clear();  // their slices were in a buffer that this one replaces
    g.adopt(b);
    return b;
}

ggml_status GroupGraphs::place(ggml_backend_buffer_t b, ggml_tensor * whole) {
    graphs_of(b).placed_.push_back(whole);
    return GGML_STATUS_SUCCESS;
}

GroupGraphs::Tensor * GroupGraphs::Graph::find(const ggml_tensor * whole) {
    const auto found = index.find(whole);
    return found == index.end() ? nullptr : &tensors[found->second];
}

bool GroupGraphs::Graph::is_of(const std::vector<ggml_tensor *> & placed) const {
    return std::equal(tensors.begin(), tensors.end(), placed.begin(), placed.end(), [](const Tensor & t, const ggml_tensor * whole) {
        return t.whole == whole && !memcmp(&t.whole_bytes, whole, offsetof(ggml_tensor, padding));
    });
}

// The graph of the tensors that were placed last, its slices being where they belong.
GroupGraphs::Graph * GroupGraphs::current() {
    if (placed_.empty()) return graphs_.empty() ? nullptr : &graphs_.front();
    graphs_.remove_if([](const Graph & g) { return !g.complete; });
    const auto known = std::find_if(graphs_.begin(), graphs_.end(), [this](const Graph & g) { return g.is_of(placed_); });
    if (known != graphs_.end()) {
        graphs_.splice(graphs_.begin(), graphs_, known);
        put_back();
    } else {
        if (graphs_.size() == kMostGraphs) graphs_.pop_back();
        graphs_.emplace_front();
        make();
    }
    placed_.clear();
    return &graphs_.front();
}

GroupGraphs::Tensor * GroupGraphs::find(const ggml_tensor * whole) {
    Graph * graph = current();
    return graph ? graph->find(whole) : nullptr;
}

void GroupGraphs::make() {
    n_new++;
    Graph & g = graphs_.front();
    g.tensors.reserve(placed_.size());
    for (ggml_tensor * whole : placed_) {
        g.index[whole] = g.tensors.size();
        making_ = &g.tensors.emplace_back(Tensor{whole, *whole, std::vector<int64_t>(group_.asked.n_parts), nullptr, {}});
        meta_buffer.init_tensor(whole->buffer, whole);
    }
    making_ = nullptr;
}

void GroupGraphs::made(int part, ggml_tensor * slice) {
    if (!making_) return;
    making_->columns[part] = slice->ne[0];
    if (part != group_.part) return;
    making_->slice = slice;
    // The meta device moves a view's start with the size of the slice, even where it is within one element of the divided
    // dimension, such as the rotated numbers of each head.
    const ggml_tensor * whole = making_->whole;
    const int axis = std::mismatch(whole->ne, whole->ne + GGML_MAX_DIMS, slice->ne).first - whole->ne;
    if (slice->view_src && axis < GGML_MAX_DIMS && whole->view_offs < whole->nb[axis]) {
        slice->view_offs = whole->view_offs;
        slice->data = (char *) slice->view_src->data + slice->view_offs;
    }
}

void GroupGraphs::write(ggml_backend_buffer_t b, ggml_tensor * whole, const void * p, size_t at, size_t n) {
    GroupGraphs & g = graphs_of(b);
    const Tensor * t = g.find(whole);
    if (!t) return meta_buffer.set_tensor(b, whole, p, at, n);  // a weight, KV cells
    if (t->slice && ggml_nbytes(t->slice) == ggml_nbytes(whole)) memcpy((char *) t->slice->data + at, p, n);
    else g.group_.unsummable = whole->name;
}

// Of a result that is divided, as the logits are, each part gets its own columns.
void GroupGraphs::read(ggml_backend_buffer_t b, const ggml_tensor * whole, void * p, size_t at, size_t n) {
    GroupGraphs & g = graphs_of(b);
    Group & group = g.group_;
    const Tensor * t = g.find(whole);
    if (!t) return meta_buffer.get_tensor(b, whole, p, at, n);
    const ggml_tensor * slice = t->slice;
    const bool divided = slice && !ggml_are_same_shape(slice, whole);
    if (!slice || (divided && (!ggml_is_contiguous(slice) || ggml_nrows(slice) != ggml_nrows(whole)))) {
        group.unsummable = whole->name;
        return memset(p, 0, n), void();
    }
    group.stage.passing = p;
    // Hidden states are read after the logits, which few architectures name otherwise.
    const bool are_unknown = std::all_of(group.columns.begin(), group.columns.end(), [](int64_t n) { return n == 0; });
    if (divided || are_unknown || !strcmp(whole->name, "result_output")) {
        group.columns = t->columns;
        if (!divided) std::fill(group.columns.begin() + 1, group.columns.end(), 0);  // part 0 has all
    }
    if (!divided) return memcpy(p, (const char *) slice->data + at, n), void();
    const size_t row_bytes = whole->nb[1], width = slice->nb[1];
    size_t before = 0;
    for (int part = 0; part < group.part; part++) before += t->columns[part] * whole->nb[0];
    for (size_t row = at / row_bytes; row < (at + n) / row_bytes; row++) {
        memcpy((char *) p + row * row_bytes - at + before, (const char *) slice->data + row * width, width);
    }
}

ggml_status GroupGraphs::compute(ggml_backend_t meta, ggml_cgraph * whole) {
    GroupGraphs & g = graphs_of(meta->device);
    // Views of other ranks' memory, which are nothing to compute. The meta device knows its own buffers only.
    const auto is_theirs = [&](const ggml_tensor * node) {
        return node->view_src && node->buffer && (node->buffer->buft == &g.group_.stage.up.buft || node->buffer->buft == &g.group_.stage.down.buft);
    };
    std::vector<ggml_tensor *> nodes;
    ggml_cgraph without = *whole, * graph = whole;
    if (std::any_of(whole->nodes, whole->nodes + whole->n_nodes, is_theirs)) {
        std::remove_copy_if(whole->nodes, whole->nodes + whole->n_nodes, std::back_inserter(nodes), is_theirs);
        without.nodes = nodes.data();
        without.n_nodes = nodes.size();
        graph = &without;
    }
    Graph * current = g.current();
    const int n_nodes = ggml_graph_n_nodes(graph);
    if (!current || n_nodes == 0) return meta_compute(meta, graph);
    const ggml_tensor * first = ggml_graph_node(graph, 0);
    auto split = std::find_if(current->splits.begin(), current->splits.end(), [&](const Split & s) {
        return s.first == first && s.n_nodes == n_nodes;
    });
    const bool is_new = split == current->splits.end();
    if (is_new) {
        split = current->splits.insert(split, Split{first, n_nodes, {}, nullptr, {}, {}});
        if (!g.record(*current, *split, meta, graph)) {
            current->splits.erase(split);
            return GGML_STATUS_FAILED;
        }
    }
    // In another context, the meta device forgets slices of views of KV cells. A graph of several splits would need them.
    const int n_results = std::count_if(current->tensors.begin(), current->tensors.end(), [](const Tensor & t) { return t.whole->op != GGML_OP_NONE; });
    g.may_pause_ = current->complete && n_results <= n_nodes;
    const ggml_status status = g.repeat(*split);
    g.may_pause_ = false;
    if (!current->complete) current->splits.erase(split);
    return status;
}

// Has the meta device say what it would compute, and in which steps. False: it can't.
bool GroupGraphs::record(Graph & graph, Split & split, ggml_backend_t meta, ggml_cgraph * nodes) {
    recording_ = &split;
    lacking_.clear();
    to_compute_.clear();
    for (int i = 0; i < split.n_nodes; i++) {
        const Tensor * t = graph.find(ggml_graph_node(nodes, i));
        if (t && (t->whole->flags & GGML_TENSOR_FLAG_COMPUTE)) to_compute_.insert(t->slice);
    }
    const bool done = meta_compute(meta, nodes) == GGML_STATUS_SUCCESS;
    recording_ = nullptr;
    for (size_t i = 0; i < split.nodes.size(); i++) {  // also views of what we have nothing of
        if (Tensor * t = graph.find(ggml_graph_node(nodes, i))) t->slice = split.nodes[i];
    }
    graph.complete = done;
    for (Tensor & t : graph.tensors) {
        if (t.slice) t.slice_bytes = *t.slice;
        else graph.complete = false;
    }
    return done;
}

void GroupGraphs::put_back() {
    if (graphs_.empty() || !graphs_.front().complete) return;
    for (const Tensor & t : graphs_.front().tensors) *t.slice = t.slice_bytes;
}

void GroupGraphs::computes(ggml_backend_t ours, ggml_cgraph * graph) {
    if (!recording_) return;
    ours_ = ours;
    keep_independent(graph);
    if (!recording_->uses) {
        const int size = ggml_graph_size(graph);  // at least the whole split's
        recording_->memory.reset(ggml_init({ggml_graph_overhead_custom(size, false), nullptr, true}), ggml_free);
        recording_->uses = ggml_new_graph_custom(recording_->memory.get(), size, false);
    }
    ggml_graph_cpy(graph, recording_->uses);  // its table of uses has those of all graphs that were copied there
    ggml_tensor ** nodes = ggml_graph_nodes(graph);
    recording_->nodes.insert(recording_->nodes.end(), nodes, nodes + ggml_graph_n_nodes(graph));
    static std::atomic<uint64_t> last_uid{kRepeatedUids};
    recording_->steps.push_back({recording_->nodes.size(), nullptr, ++last_uid});
}

// A part computes no node of which it has no source: it adds zeros. When the meta device delays a sum, it leaves out all
// nodes up to there, also those that need nothing of the sum.
void GroupGraphs::keep_independent(ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        const bool lacks = std::any_of(node->src, node->src + GGML_MAX_SRC, [this](const ggml_tensor * source) {
            return source && (ggml_nelements(source) == 0 || lacking_.count(source));
        });
        if (lacks) lacking_.insert(node);
        else if (to_compute_.count(node)) node->flags |= GGML_TENSOR_FLAG_COMPUTE;
    }
}

void GroupGraphs::sums(ggml_tensor * slice) {
    if (!recording_) return;
    recording_->steps.back().sum = slice;
    lacking_.erase(slice);
}

ggml_status GroupGraphs::repeat(Split & split) {
    ggml_cgraph step = *split.uses;
    size_t at = 0;
    for (const Step & s : split.steps) {
        step.nodes = split.nodes.data() + at;
        step.n_nodes = s.end - at;
        step.uid = s.uid;
        at = s.end;
        const ggml_status status = ours_->iface.graph_compute(ours_, &step);
        if (status != GGML_STATUS_SUCCESS) return status;
        if (s.sum) group_.add_up(s.sum);
    }
    return GGML_STATUS_SUCCESS;
}

}  // namespace ggpipe
