#include "rows.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

namespace ggpipe {

namespace {
constexpr size_t kBlock = 64;

// Written so that the compiler makes a few vector instructions of it: nearly all blocks hold nothing for the best k.
bool any_above(const float * block, float least) {
    int above = 0;
    for (size_t i = 0; i < kBlock; i++) above |= block[i] > least;
    return above != 0;
}
}  // namespace

TopRow top(const float * logits, size_t n_vocab, size_t k, const std::vector<int32_t> & banned) {
    using Entry = std::pair<float, int32_t>;  // logit, minus id: the greater one is the better one
    std::vector<int32_t> skip(banned);
    std::sort(skip.begin(), skip.end());
    std::vector<Entry> best;
    best.reserve(k + 1);
    const auto worse_first = std::greater<Entry>();
    for (size_t from = 0; k > 0 && from < n_vocab; from += kBlock) {
        const size_t to = std::min(from + kBlock, n_vocab);
        if (best.size() == k && to - from == kBlock && !any_above(logits + from, best.front().first)) continue;
        for (size_t i = from; i < to; i++) {
            if (best.size() == k && !(logits[i] > best.front().first)) continue;
            if (std::binary_search(skip.begin(), skip.end(), int32_t(i))) continue;
            best.emplace_back(logits[i], -int32_t(i));
            std::push_heap(best.begin(), best.end(), worse_first);
            if (best.size() > k) {
                std::pop_heap(best.begin(), best.end(), worse_first);
                best.pop_back();
            }
        }
    }
    std::sort_heap(best.begin(), best.end(), worse_first);
    TopRow row{{}, {}, NAN};
    for (auto & [logit, minus_id] : best) {
        row.logits.push_back(logit);
        row.ids.push_back(-minus_id);
    }
    if (k <= 1 || best.empty()) return row;
    const float max = row.logits[0];
    double sum = 0;
    auto next_skip = skip.begin();
    for (size_t i = 0; i < n_vocab; i++) {
        if (next_skip != skip.end() && *next_skip == int32_t(i)) {
            while (next_skip != skip.end() && *next_skip == int32_t(i)) ++next_skip;
            continue;
        }
        sum += std::exp(logits[i] - max);
    }
    row.log_sum_exp = double(max) + std::log(sum);
    return row;
}

}  // namespace ggpipe
