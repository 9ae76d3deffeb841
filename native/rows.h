// What the last rank takes from a row of logits, so that it need not ship the row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ggpipe {

struct TopRow { std::vector<int32_t> ids; std::vector<float> logits; double log_sum_exp; };

// The k largest logits, largest first, equal ones by token id; banned tokens count as minus infinity, also in
// the log-sum-exp, which is not a number for k = 1: the best token alone does not need it. O(n) for small k.
TopRow top(const float * logits, size_t n_vocab, size_t k, const std::vector<int32_t> & banned);

}  // namespace ggpipe
