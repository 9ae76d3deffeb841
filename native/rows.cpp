#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

#include "compute.h"

namespace ggpipe {

namespace {
constexpr size_t kBlock = 64;

// Written so that the compiler makes a few vector instructions of it: nearly all blocks hold nothing for the best k.
bool any_above(const float * block, float least) {
    int above = 0;
    for (size_t i = 0; i < kBlock; i++) above |= block[i] > least;
    return above != 0;
}

std::vector<float> without(const float * logits, size_t n_vocab, const std::vector<int32_t> & banned) {
    std::vector<float> row(logits, logits + n_vocab);
    for (const int32_t id : banned) row[id] = -INFINITY;
    return row;
}
}  // namespace

TopRow top(
        const float * logits, size_t n_vocab, size_t k, std::vector<int32_t> banned, bool sums, double temperature) {
    using Entry = std::pair<float, int32_t>;  // logit, minus id: the greater one is the better one
    std::sort(banned.begin(), banned.end());
    std::vector<Entry> best;  // the best k so far, and some that came since they were sorted out
    best.reserve(2 * std::min(k, n_vocab) + kBlock);
    const auto better_first = std::greater<Entry>();
    bool full = false;
    float least = 0;  // once full: of the best k, when they were sorted out
    for (size_t from = 0; k > 0 && from < n_vocab; from += kBlock) {
        const size_t to = std::min(from + kBlock, n_vocab);
        if (full && to - from == kBlock && !any_above(logits + from, least)) continue;
        for (size_t i = from; i < to; i++) {
            if (full && !(logits[i] > least)) continue;
            if (std::binary_search(banned.begin(), banned.end(), int32_t(i))) continue;
            best.emplace_back(std::isnan(logits[i]) ? -INFINITY : logits[i], -int32_t(i));
        }
        if (best.size() >= (full ? 2 * k : k)) {
            std::nth_element(best.begin(), best.begin() + k - 1, best.end(), better_first);
            best.resize(k);
            full = true;
            least = best.back().first;
        }
    }
    if (best.size() > k) std::nth_element(best.begin(), best.begin() + k - 1, best.end(), better_first);
    best.resize(std::min(best.size(), k));
    std::sort(best.begin(), best.end(), better_first);
    TopRow row{{}, {}, NAN, {}};
    auto & [ids, best_logits, log_sum_exp, below] = row;
    for (auto & [logit, minus_id] : best) {
        best_logits.push_back(logit);
        ids.push_back(-minus_id);
    }
    if (!sums || k <= 1 || best.empty()) return row;
    const float max = best[0].first;
    const float scale = temperature > 0 ? float(1 / temperature) : 1.0f;
    std::vector<size_t> order;  // of the best ones, by id
    if (temperature > 0) {
        order.resize(ids.size());
        std::iota(order.begin(), order.end(), size_t(0));
        std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return ids[a] < ids[b]; });
        below.resize(ids.size());
    }
    double sum = 0;
    auto next = banned.begin();
    auto reached = order.begin();
    for (size_t i = 0; i < n_vocab; i++) {
        while (next != banned.end() && *next < int32_t(i)) ++next;
        if (next != banned.end() && *next == int32_t(i)) continue;
        if (reached != order.end() && ids[*reached] == int32_t(i)) below[*reached++] = sum;
        sum += std::exp((logits[i] - max) * scale);
    }
    log_sum_exp = double(max) * scale + std::log(sum);
    for (double & share : below) share /= sum;
    return row;
}

int32_t draw(const float * logits, size_t n_vocab, const std::vector<int32_t> & banned, float temperature, double number) {
    std::vector<float> row = without(logits, n_vocab, banned);
    for (float & logit : row) logit /= temperature;
    const float max = *std::max_element(row.begin(), row.end());
    double sum = 0;
    for (float & x : row) {
        x = expf(x - max);
        sum += x;
    }
    const double wanted = sum * number;
    double reached = 0;
    for (size_t i = 0; i < n_vocab; i++) {
        reached += row[i];
        if (reached >= wanted) return i;
    }
    return n_vocab - 1;
}

std::pair<std::vector<int32_t>, std::vector<float>> likely(
        const float * logits, size_t n_vocab, const std::vector<int32_t> & banned, float min_p) {
    const std::vector<float> row = without(logits, n_vocab, banned);
    const float least = *std::max_element(row.begin(), row.end()) + logf(min_p);
    std::pair<std::vector<int32_t>, std::vector<float>> found;
    for (size_t i = 0; i < n_vocab; i++) {
        if (row[i] >= least) {
            found.first.push_back(i);
            found.second.push_back(row[i]);
        }
    }
    return found;
}

}  // namespace ggpipe
