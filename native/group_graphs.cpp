// Graphs of a group's stage that come again.
//
// libllama builds a graph whenever a run has another number of rows than the one before. ggml's meta device then finds out
// how each tensor is divided and makes every part's slices of it, which takes it about 5 us a tensor and part. But what it
// makes follows from the tensors alone, which lie at the same places when a graph comes again. So their placing waits until
// the graph is whole: slices of a known graph are put back where the meta device had made them, and their nodes are computed
// and summed here, in the same steps. Only new graphs reach the meta device.
#include "group_graphs.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "group.h"

namespace ggpipe {

namespace {
constexpr size_t kMostGraphs = 24;  // of about 700 bytes a tensor

// The meta device's own functions, the same for all groups.
decltype(ggml_backend_device_i::init_backend) meta_init;
decltype(ggml_backend_buffer_type_i::alloc_buffer) meta_alloc;
decltype(ggml_backend_i::graph_compute) meta_compute;
ggml_backend_buffer_i meta_buffer;

GroupGraphs & graphs_of(ggml_backend_dev_t meta) { return *((Device *) meta->reg->context)->stage->group->graphs; }
GroupGraphs & graphs_of(ggml_backend_buffer_t b) { return graphs_of(b->buft->device); }
bool same(const ggml_tensor & a, const ggml_tensor & b) { return !memcmp(&a, &b, offsetof(ggml_tensor, padding)); }
}  // namespace

void GroupGraphs::adopt(ggml_backend_dev_t meta) {
    reg_ = group_.stage.local.reg;
    reg_.iface.get_proc_address = nullptr;
    meta->reg = &reg_;
    ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(meta);  // now: ggml keeps it in a table without a lock
    if (meta->iface.init_backend == init) return;  // ggml has given us one that it made for an earlier group
    meta_init = meta->iface.init_backend;
    meta_alloc = type->iface.alloc_buffer;
    meta->iface.init_backend = init;
    type->iface.alloc_buffer = alloc;
}

void GroupGraphs::adopt(ggml_backend_buffer_t b) {
    if (b->iface.init_tensor == place) return;
    meta_buffer = b->iface;
    b->iface.init_tensor = place;
    b->iface.set_tensor = write;
    b->iface.get_tensor = read;
}

ggml_backend_t GroupGraphs::init(ggml_backend_dev_t meta, const char * params) {
    ggml_backend_t b = meta_init(meta, params);
    meta_compute = b->iface.graph_compute;
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

// The graph of the tensors that were placed last, its slices being where they belong.
GroupGraphs::Graph * GroupGraphs::current() {
    if (placed_.empty()) return graphs_.empty() ? nullptr : &graphs_.front();
    graphs_.remove_if([](const Graph & g) { return !g.complete; });
    const auto known = std::find_if(graphs_.begin(), graphs_.end(), [this](const Graph & g) {
        const auto as_before = [](const ggml_tensor * t, const ggml_tensor & before) { return same(*t, before); };
        return g.wholes == placed_ && std::equal(placed_.begin(), placed_.end(), g.whole_bytes.begin(), as_before);
    });
    if (known != graphs_.end()) {
        graphs_.splice(graphs_.begin(), graphs_, known);
        for (size_t i = 0; i < known->slices.size(); i++) *known->slices[i] = known->slice_bytes[i];
    } else {
        if (graphs_.size() == kMostGraphs) graphs_.pop_back();
        graphs_.emplace_front();
        make();
    }
    placed_.clear();
    return &graphs_.front();
}

void GroupGraphs::make() {
    n_new++;
    Graph & g = graphs_.front();
    g.wholes = placed_;
    g.slices.resize(placed_.size());
    g.columns.resize(placed_.size() * group_.asked.n_parts);
    for (making_ = 0; making_ < placed_.size(); making_++) {
        ggml_tensor * whole = placed_[making_];
        g.whole_bytes.push_back(*whole);
        g.index[whole] = making_;
        meta_buffer.init_tensor(whole->buffer, whole);
    }
    making_ = SIZE_MAX;
}

void GroupGraphs::made(int part, ggml_tensor * slice) {
    if (making_ == SIZE_MAX) return;
    Graph & g = graphs_.front();
    if (part == group_.part) g.slices[making_] = slice;
    g.columns[making_ * group_.asked.n_parts + part] = slice->ne[0];
}

void GroupGraphs::write(ggml_backend_buffer_t b, ggml_tensor * whole, const void * p, size_t at, size_t n) {
    GroupGraphs & g = graphs_of(b);
    Graph * graph = g.current();
    const auto found = graph ? graph->index.find(whole) : decltype(graph->index.end()){};
    if (!graph || found == graph->index.end()) return meta_buffer.set_tensor(b, whole, p, at, n);  // a weight, KV cells
    const ggml_tensor * slice = graph->slices[found->second];
    if (slice && ggml_nbytes(slice) == ggml_nbytes(whole)) memcpy((char *) slice->data + at, p, n);
    else g.group_.unsummable = whole->name;
}

// Of a result that is divided, as the logits are, each part gets its own columns.
void GroupGraphs::read(ggml_backend_buffer_t b, const ggml_tensor * whole, void * p, size_t at, size_t n) {
    GroupGraphs & g = graphs_of(b);
    Group & group = g.group_;
    Graph * graph = g.current();
    const auto found = graph ? graph->index.find(whole) : decltype(graph->index.end()){};
    if (!graph || found == graph->index.end()) return meta_buffer.get_tensor(b, whole, p, at, n);
    const ggml_tensor * slice = graph->slices[found->second];
    const bool divided = slice && !ggml_are_same_shape(slice, whole);
    if (!slice || (divided && (!ggml_is_contiguous(slice) || ggml_nrows(slice) != ggml_nrows(whole)))) {
        group.unsummable = whole->name;
        return memset(p, 0, n), void();
    }
    group.stage.passing = p;
    const int64_t * columns = &graph->columns[found->second * group.columns.size()];
    group.columns.assign(columns, columns + group.columns.size());
    if (!divided) {
        std::fill(group.columns.begin() + 1, group.columns.end(), 0);  // part 0 speaks for all
        return memcpy(p, (const char *) slice->data + at, n), void();
    }
    const size_t row_bytes = whole->nb[1], width = slice->nb[1];
    size_t before = 0;
    for (int part = 0; part < group.part; part++) before += columns[part] * whole->nb[0];
    for (size_t row = at / row_bytes; row < (at + n) / row_bytes; row++) {
        memcpy((char *) p + row * row_bytes - at + before, (const char *) slice->data + row * width, width);
    }
}

ggml_status GroupGraphs::compute(ggml_backend_t meta, ggml_cgraph * graph) {
    GroupGraphs & g = graphs_of(meta->device);
    Graph * current = g.current();
    if (!current || ggml_graph_n_nodes(graph) == 0) return meta_compute(meta, graph);
    const ggml_tensor * first = ggml_graph_node(graph, 0);
    for (Split & split : current->splits) {
        if (split.first == first && split.n_nodes == ggml_graph_n_nodes(graph)) return g.repeat(split);
    }
    g.recording_ = &current->splits.emplace_back();
    g.recording_->first = first;
    g.recording_->n_nodes = ggml_graph_n_nodes(graph);
    const ggml_status status = meta_compute(meta, graph);
    g.recording_ = nullptr;
    for (size_t i = 0; i < current->splits.back().nodes.size(); i++) {  // also views of what we have nothing of
        const auto whole = current->index.find(ggml_graph_node(graph, i));
        if (whole != current->index.end()) current->slices[whole->second] = current->splits.back().nodes[i];
    }
    const auto & slices = current->slices;
    current->complete = status == GGML_STATUS_SUCCESS && std::find(slices.begin(), slices.end(), nullptr) == slices.end();
    current->slice_bytes.clear();
    for (const ggml_tensor * slice : slices) current->slice_bytes.push_back(slice ? *slice : ggml_tensor{});
    if (!current->complete) current->splits.pop_back();
    return status;
}

void GroupGraphs::computes(ggml_backend_t ours, ggml_cgraph * graph) {
    if (!recording_) return;
    ours_ = ours;
    if (!recording_->uses) {
        const int size = ggml_graph_size(graph);  // at least the whole split's
        recording_->memory.reset(ggml_init({ggml_graph_overhead_custom(size, false), nullptr, true}), ggml_free);
        recording_->uses = ggml_new_graph_custom(recording_->memory.get(), size, false);
    }
    ggml_graph_cpy(graph, recording_->uses);  // its table of uses has those of all graphs that were copied there
    ggml_tensor ** nodes = ggml_graph_nodes(graph);
    recording_->nodes.insert(recording_->nodes.end(), nodes, nodes + ggml_graph_n_nodes(graph));
    recording_->steps.push_back({recording_->nodes.size(), nullptr});
}

void GroupGraphs::sums(ggml_tensor * slice) {
    if (recording_) recording_->steps.back().sum = slice;
}

ggml_status GroupGraphs::repeat(Split & split) {
    ggml_cgraph step = *split.uses;
    size_t at = 0;
    for (const Step & s : split.steps) {
        step.nodes = split.nodes.data() + at;
        step.n_nodes = s.end - at;
        at = s.end;
        const ggml_status status = ours_->iface.graph_compute(ours_, &step);
        if (status != GGML_STATUS_SUCCESS) return status;
        if (s.sum) group_.add_up(s.sum);
    }
    return GGML_STATUS_SUCCESS;
}

}  // namespace ggpipe
