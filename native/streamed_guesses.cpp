// Experts of the next layer, guessed while a layer is computed, so that reading them takes no time of its own.
//
// A layer adds little to what passes through it. So the next layer's router mostly chooses the same experts for what this layer's
// router reads, as for what it will read itself. A guess costs reading at worst: how often it is right is counted, and nothing
// is guessed where it is not worth it.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "streamed.h"

namespace ggpipe {

namespace {
constexpr double kWorthIt = 0.7, kMemory = 2000;  // share of guessed experts that are used; guesses that count in it
constexpr int kTryAgain = 64;                      // runs

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

std::vector<int32_t> StreamedWeights::Guess::experts() const {
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

// Have a reader guess the experts of the layer after the one whose experts this node reads.
void StreamedWeights::guess(const ggml_cgraph * graph, int node) {
    const ggml_tensor * op = graph->nodes[node], * next = nullptr;
    if (op->op != GGML_OP_MUL_MAT_ID || !find(op->src[0])) return;
    if (n_right_ < kWorthIt * n_guessed_ && n_guessed_ > kMemory / 10 && int64_t(clock_) % kTryAgain) return;
    Guess guess;
    for (int i = node + 1; i < graph->n_nodes; i++) {
        const ggml_tensor * other = graph->nodes[i];
        if (other->op != GGML_OP_MUL_MAT_ID || other->src[2] == op->src[2]) continue;
        if (!next) next = other;
        if (other->src[2] != next->src[2]) break;
        if (const Tensor * tensor = find(other->src[0])) guess.tensors.push_back(tensor);
    }
    if (guess.tensors.empty()) return;
    const ggml_tensor * router = router_of(op->src[2]), * next_router = router_of(next->src[2]);
    if (!router || !next_router) return;
    const ggml_tensor * rows = router->src[1], * weights = next_router->src[0];
    const ggml_tensor * read = op->src[1]->view_src ? op->src[1]->view_src : op->src[1];  // which is still in memory
    const Tensor * streamed = find(weights);
    if ((read != rows && read != rows->view_src) || rows->type != GGML_TYPE_F32 || !ggml_is_contiguous(rows) || weights->type != GGML_TYPE_F32 ||
        !ggml_is_contiguous(weights) || weights->ne[0] != rows->ne[0] || (streamed && !streamed->units[0]->is_kept)) return;
    guess.run = clock_;
    guess.router = (const float *) weights->data;
    guess.n_columns = rows->ne[0];
    guess.n_experts = weights->ne[1];
    guess.n_used = next->src[2]->ne[0];
    const int64_t n_rows = std::min(ggml_nrows(rows), (guess.n_experts + guess.n_used - 1) / guess.n_used);  // enough to need all experts
    guess.rows.assign((const float *) rows->data, (const float *) rows->data + n_rows * guess.n_columns);
    const float * norm = norm_of(router), * next_norm = norm_of(next_router);
    for (size_t i = 0; norm && next_norm && i < guess.rows.size(); i++) {
        const int64_t column = i % guess.n_columns;
        guess.rows[i] *= norm[column] != 0 ? next_norm[column] / norm[column] : 0;
    }
    guesses_.push_back(std::move(guess));
    work_.notify_all();
}

void StreamedWeights::read_guessed(Lock & lock) {
    const Guess guess = std::move(guesses_.front());
    guesses_.pop_front();
    lock.unlock();
    const std::vector<int32_t> experts = guess.experts();
    lock.lock();
    if (guess.run != clock_) return;  // too late
    Units units;
    for (const int32_t expert : experts) {
        for (const Tensor * tensor : guess.tensors) units.push_back(tensor->units.at(expert));
    }
    for (Unit * unit : units) touch(unit);  // none of them gives way to another
    for (Unit * unit : units) {
        if (unit->state != State::Absent || unit->held_in == clock_ || !make_room(unit)) continue;
        request(unit, ahead_);
        unit->guessed_in = clock_;
        n_guessed_++, times_.n_guessed++;
    }
    if (n_guessed_ > kMemory) n_guessed_ /= 2, n_right_ /= 2;
}

}  // namespace ggpipe
