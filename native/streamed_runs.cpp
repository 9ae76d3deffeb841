// How a graph is computed while its weights are read: in parts, each up to the next weight that has to be waited for.
#include <algorithm>
#include <chrono>
#include <cmath>

#include "fast.h"
#include "streamed.h"

namespace ggpipe {

constexpr double kHalfLife = 64;  // runs after which a use counts half

const StreamedWeights::Tensor * StreamedWeights::find(const ggml_tensor * tensor) const {
    const auto found = tensors_.find(tensor->view_src ? tensor->view_src : tensor);
    return found != tensors_.end() ? &found->second : nullptr;
}

std::optional<StreamedWeights::Units> StreamedWeights::needs_of(const ggml_cgraph * graph, int from, int node) const {
    const ggml_tensor * op = graph->nodes[node];
    Units units;
    if (is_view(op)) return units;
    for (int i = 0; i < GGML_MAX_SRC && op->src[i]; i++) {
        const Tensor * tensor = find(op->src[i]);
        if (!tensor) continue;
        if (!tensor->is_experts || op->op != GGML_OP_MUL_MAT_ID) {
            units.insert(units.end(), tensor->units.begin(), tensor->units.end());
            continue;
        }
        const ggml_tensor * ids = op->src[2];
        for (int j = from; j < node; j++) {
            if (graph->nodes[j] == ids || graph->nodes[j] == ids->view_src) return std::nullopt;
        }
        std::set<int32_t> routed;
        for (int64_t row = 0; row < ids->ne[1]; row++) {
            for (int64_t k = 0; k < ids->ne[0]; k++) routed.insert(*(const int32_t *) ((const char *) ids->data + row * ids->nb[1] + k * ids->nb[0]));
        }
        for (const int32_t expert : routed) units.push_back(tensor->units.at(expert));
    }
    units.erase(std::remove_if(units.begin(), units.end(), [](const Unit * unit) { return unit->is_kept; }), units.end());
    return units;
}

void StreamedWeights::touch(Unit * unit) {
    if (!unit->is_expert || unit->used_in == clock_) return;
    const bool is_idle = idle_.erase(unit);
    const double now = clock_ / kHalfLife;
    unit->use = unit->used_in ? now + std::log2(1 + std::exp2(unit->use - now)) : now;
    unit->used_in = clock_;
    if (is_idle) idle_.insert(unit);
}

void StreamedWeights::hold(Unit * unit) {
    touch(unit);
    unit->held_in = clock_;
    if (unit->predicted_in == clock_) n_right_++, times_.n_right++, unit->predicted_in = 0;
    if (unit->n_holds++ == 0) idle_.erase(unit);
    if (!unit->is_expert) next_ = (at_.at(unit) + 1) % ring_.size();
}

void StreamedWeights::release(Units & units) {
    for (Unit * unit : units) {
        if (--unit->n_holds == 0 && unit->is_expert && unit->state == State::Present) idle_.insert(unit);
    }
    units.clear();
    work_.notify_all();
}

// Wait until units are in memory, and hold them there. `later`: experts that are needed soon.
bool StreamedWeights::wait_for(Lock & lock, const Units & units, const Units & later, const std::function<bool()> & stops) {
    const auto start = std::chrono::steady_clock::now();
    for (Unit * unit : units) hold(unit);
    bool is_first = true, is_there = false;
    while (!error_ && !stops()) {
        is_there = true;
        for (Unit * unit : units) {
            if (unit->state == State::Present) continue;
            is_there = false;
            if (unit->state != State::Absent) continue;
            if (!unit->is_expert) next_ = at_.at(unit), work_.notify_all();
            else if (make_room(unit)) request(unit, now_);
        }
        if (is_there) break;
        for (Unit * unit : later) {
            if (!is_first || unit->state != State::Absent) continue;
            touch(unit);
            if (make_room(unit)) request(unit, now_);
        }
        is_first = false;
        done_.wait(lock);
    }
    times_.waited_s += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return is_there;
}

ggml_status StreamedWeights::compute(ggml_cgraph * graph, const Compute & compute, const std::function<bool()> & stops) {
    const int n = graph->n_nodes;
    Lock lock(mutex_);
    clock_++;
    sort_ring(graph);
    Units held;
    ggml_status status = GGML_STATUS_SUCCESS;
    for (int from = 0; from < n && status == GGML_STATUS_SUCCESS;) {
        int to = from;
        predict(graph, from);
        for (size_t bytes = 0; to < n; to++) {
            const std::optional<Units> needs = needs_of(graph, from, to);
            if (!needs || !std::all_of(needs->begin(), needs->end(), [](const Unit * u) { return u->state == State::Present; })) break;
            for (const Unit * unit : *needs) bytes += unit->is_expert ? 0 : unit->size;
            if (bytes > window_ / 3 && to > from && !needs->empty()) break;  // leave room for others to be read
            for (Unit * unit : *needs) hold(unit), held.push_back(unit);
        }
        if (to == from) {
            const Units needs = *needs_of(graph, from, from);
            held.insert(held.end(), needs.begin(), needs.end());
            if (!wait_for(lock, needs, soon(graph, from), stops)) status = error_ ? GGML_STATUS_FAILED : GGML_STATUS_ABORTED;
            continue;
        }
        ggml_cgraph part = *graph;
        part.nodes += from;
        part.n_nodes = to - from;
        if (part.n_nodes < n) part.uid = 0;  // a graph of its own
        lock.unlock();
        status = compute(&part);
        lock.lock();
        release(held);
        from = to;
    }
    release(held);
    return status;
}

// The same experts' matrices in later operations.
StreamedWeights::Units StreamedWeights::soon(const ggml_cgraph * graph, int node) const {
    constexpr int kFarthest = 64;
    Units units;
    const ggml_tensor * op = graph->nodes[node];
    for (int i = node + 1; op->op == GGML_OP_MUL_MAT_ID && i < std::min(graph->n_nodes, node + kFarthest); i++) {
        if (graph->nodes[i]->op != GGML_OP_MUL_MAT_ID || graph->nodes[i]->src[2] != op->src[2]) continue;
        const std::optional<Units> needs = needs_of(graph, node, i);
        if (needs) units.insert(units.end(), needs->begin(), needs->end());
    }
    return units;
}

// Put this graph's matrices into the order of their use.
void StreamedWeights::sort_ring(const ggml_cgraph * graph) {
    if (ring_.empty()) return;
    Units used;
    std::vector<size_t> places;
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * op = graph->nodes[i];
        for (int j = 0; !is_view(op) && j < GGML_MAX_SRC && op->src[j]; j++) {
            const Tensor * tensor = find(op->src[j]);
            const auto at = tensor ? at_.find(tensor->units[0]) : at_.end();
            if (at == at_.end() || std::find(places.begin(), places.end(), at->second) != places.end()) continue;
            used.push_back(tensor->units[0]);
            places.push_back(at->second);
        }
    }
    if (std::is_sorted(places.begin(), places.end())) return;
    std::sort(places.begin(), places.end());
    for (size_t i = 0; i < used.size(); i++) ring_[at_[used[i]] = places[i]] = used[i];
}

}  // namespace ggpipe
