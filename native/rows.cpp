#include "rows.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

namespace ggpipe {

TopRow top(const float * logits, size_t n_vocab, size_t k, const std::vector<int32_t> & banned) {
    using Entry = std::pair<float, int32_t>;  // logit, minus id: the greater one is the better one
    std::vector<int32_t> skip(banned);
    std::sort(skip.begin(), skip.end());
    std::vector<Entry> best;
    best.reserve(k + 1);
    const auto worse_first = std::greater<Entry>();
    float max = -INFINITY;
    auto next_skip = skip.begin();
    for (size_t i = 0; i < n_vocab; i++) {
        if (next_skip != skip.end() && *next_skip == int32_t(i)) {
            while (next_skip != skip.end() && *next_skip == int32_t(i)) ++next_skip;
            continue;
        }
        max = std::max(max, logits[i]);
        if (best.size() == k && (k == 0 || !(logits[i] > best.front().first))) continue;
        best.emplace_back(logits[i], -int32_t(i));
        std::push_heap(best.begin(), best.end(), worse_first);
        if (best.size() > k) {
            std::pop_heap(best.begin(), best.end(), worse_first);
            best.pop_back();
        }
    }
    std::sort_heap(best.begin(), best.end(), worse_first);
    TopRow row{{}, {}, NAN};
    for (auto & [logit, minus_id] : best) {
        row.logits.push_back(logit);
        row.ids.push_back(-minus_id);
    }
    if (k <= 1) return row;
    double sum = 0;
    next_skip = skip.begin();
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
