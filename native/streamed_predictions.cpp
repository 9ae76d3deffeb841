// Experts of the next layer are predicted and prefetched while a layer is computed.
//
// A layer changes the hidden state only a little. The next layer's router, applied to the input of this layer's router, therefore
// selects mostly the experts that it will select later. A wrong prediction costs a read, but never changes a result. The share of
// prefetched experts that are used is measured, and prediction pauses while it is low.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "streamed.h"

namespace ggpipe {

namespace {
constexpr double kLeastPrecision = 0.7, kHistory = 2000;  // used / prefetched matrices; the number of recent ones that count
constexpr int kTryAgain = 64;                              // runs

// The product with a router's weights that led to these experts; nullptr: not found.
const ggml_tensor * router_of(const ggml_tensor * ids) {
    const ggml_tensor * node = ids->view_src ? ids->view_src : ids;
    for (int i = 0; node && i < 16; i++) {
        if (node->op == GGML_OP_MUL_MAT) return node;
        node = node->src[0] ? node->src[0] : node->view_src;
    }
    return nullptr;
}

// The weights of the norm that a router reads; nullptr: not found.
const float * norm_of(const ggml_tensor * router) {
    const ggml_tensor * rows = router->src[1];
    const ggml_tensor * weights = rows->op == GGML_OP_MUL ? rows->src[1] : nullptr;
    const bool fits = weights && weights->op == GGML_OP_NONE && weights->type == GGML_TYPE_F32 && ggml_nelements(weights) == rows->ne[0];
    return fits ? (const float *) weights->data : nullptr;
}

float dot(const float * a, const float * b, int64_t n) {
    float sums[8] = {};
    for (int64_t i = 0; i + 8 <= n; i += 8) {
        for (int k = 0; k < 8; k++) sums[k] += a[i + k] * b[i + k];
    }
    return std::accumulate(sums, sums + 8, 0.0f);
}
}  // namespace

std::vector<int32_t> StreamedWeights::Prediction::experts() const {
    std::set<int32_t> found;
    std::vector<float> logits(n_experts);
    std::vector<int32_t> order(n_experts);
    for (size_t row = 0; row * n_columns < rows.size(); row++) {
        for (int64_t e = 0; e < n_experts; e++) logits[e] = dot(router + e * n_columns, rows.data() + row * n_columns, n_columns);
        std::iota(order.begin(), order.end(), 0);
        const auto last = order.begin() + std::min(n_used, n_experts);
        std::partial_sort(order.begin(), last, order.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
        found.insert(order.begin(), last);
    }
    return {found.begin(), found.end()};
}

// Have a reader predict the experts of the next layer; this node reads the experts of the current one.
void StreamedWeights::predict(const ggml_cgraph * graph, int node) {
    const ggml_tensor * op = graph->nodes[node], * next = nullptr;
    if (op->op != GGML_OP_MUL_MAT_ID || !find(op->src[0])) return;
    if (n_right_ < kLeastPrecision * n_predicted_ && n_predicted_ > kHistory / 10 && int64_t(clock_) % kTryAgain) return;
    Prediction prediction;
    for (int i = node + 1; i < graph->n_nodes; i++) {
        const ggml_tensor * other = graph->nodes[i];
        if (other->op != GGML_OP_MUL_MAT_ID || other->src[2] == op->src[2]) continue;
        if (!next) next = other;
        if (other->src[2] != next->src[2]) break;
        if (const Tensor * tensor = find(other->src[0])) prediction.tensors.push_back(tensor);
    }
    if (prediction.tensors.empty()) return;
    const ggml_tensor * router = router_of(op->src[2]), * next_router = router_of(next->src[2]);
    if (!router || !next_router) return;
    const ggml_tensor * rows = router->src[1], * weights = next_router->src[0];
    const ggml_tensor * read = op->src[1]->view_src ? op->src[1]->view_src : op->src[1];  // whose memory is not reused yet
    const Tensor * streamed = find(weights);
    if ((read != rows && read != rows->view_src) || rows->type != GGML_TYPE_F32 || !ggml_is_contiguous(rows) || weights->type != GGML_TYPE_F32 ||
        !ggml_is_contiguous(weights) || weights->ne[0] != rows->ne[0] || (streamed && !streamed->units[0]->is_kept)) return;
    prediction.run = clock_;
    prediction.router = (const float *) weights->data;
    prediction.n_columns = rows->ne[0];
    prediction.n_experts = weights->ne[1];
    prediction.n_used = next->src[2]->ne[0];
    const int64_t n_rows = std::min(ggml_nrows(rows), (prediction.n_experts + prediction.n_used - 1) / prediction.n_used);  // enough to need all experts
    prediction.rows.assign((const float *) rows->data, (const float *) rows->data + n_rows * prediction.n_columns);
    const float * norm = norm_of(router), * next_norm = norm_of(next_router);
    for (size_t i = 0; norm && next_norm && i < prediction.rows.size(); i++) {
        const int64_t column = i % prediction.n_columns;
        prediction.rows[i] *= norm[column] != 0 ? next_norm[column] / norm[column] : 0;
    }
    predictions_.push_back(std::move(prediction));
    work_.notify_all();
}

void StreamedWeights::read_predicted(Lock & lock) {
    const Prediction prediction = std::move(predictions_.front());
    predictions_.pop_front();
    lock.unlock();
    const std::vector<int32_t> experts = prediction.experts();
    lock.lock();
    if (prediction.run != clock_) return;  // too late: that run has ended
    Units units;
    for (const int32_t expert : experts) {
        for (const Tensor * tensor : prediction.tensors) units.push_back(tensor->units.at(expert));
    }
    for (Unit * unit : units) touch(unit);  // so that none of them evicts another
    for (Unit * unit : units) {
        if (unit->state != State::Absent || unit->held_in == clock_ || !make_room(unit)) continue;
        request(unit, ahead_);
        unit->predicted_in = clock_;
        n_predicted_++, times_.n_predicted++;
    }
    if (n_predicted_ > kHistory) n_predicted_ /= 2, n_right_ /= 2;
}

}  // namespace ggpipe
