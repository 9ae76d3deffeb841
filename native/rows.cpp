#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

#include "compute.h"
#include "vectors.h"

namespace ggpipe {

namespace {
constexpr size_t kBlock = 64;

// Written so that the compiler makes a few vector instructions of it: nearly all blocks hold nothing for the best k.
bool any_above(const float * block, float least) {
    int above = 0;
    for (size_t i = 0; i < kBlock; i++) above |= block[i] > least;
    return above != 0;
}

// ---- vectors that every CPU has ------------------------------------------------------------------------------
constexpr int kLanes = 4;
using F = Floats<kLanes>;
using I = Ints<kLanes>;

GGPIPE_INLINE inline F loaded(const float * from) {
    F x;
    memcpy(&x, from, sizeof x);
    return x;
}

// e^x for x of at most 0, within 3e-7 of it.
GGPIPE_INLINE inline F exponential(F x) {
    constexpr float kRounds = 1.5f * (1 << 23), kLowest = -125;
    x *= 1.44269504f;
    x = x < kLowest - 1 ? kLowest - 1 + F{} : x;
    const F shifted = x + kRounds, exponent = shifted - kRounds, rest = x - exponent;
    F p = 1.54035304e-4f * rest + 1.33335581e-3f;
    p = p * rest + 9.61812911e-3f;
    p = p * rest + 5.55041087e-2f;
    p = p * rest + 2.40226507e-1f;
    p = p * rest + 6.93147181e-1f;
    p = p * rest + 1;
    return (F) (((I) p + ((I) shifted << 23)) & (exponent >= kLowest));
}

// Of e^((x - max) * scale) for n numbers, within 1e-6 of it.
double sum_of_exponentials(const float * x, size_t n, float max, float scale) {
    constexpr size_t kVectors = 64;
    double total = 0;
    while (n >= kLanes) {
        F sum{};
        for (size_t i = 0; i < kVectors && n >= kLanes; i++, x += kLanes, n -= kLanes) sum += exponential((loaded(x) - max) * scale);
        for (int lane = 0; lane < kLanes; lane++) total += sum[lane];
    }
    for (size_t i = 0; i < n; i++) total += std::exp((x[i] - max) * scale);
    return total;
}

float greatest(const std::vector<float> & row) {
    size_t i = 0;
    F most = -INFINITY + F{};
    for (; i + kLanes <= row.size(); i += kLanes) {
        const F x = loaded(&row[i]);
        most = x > most ? x : most;
    }
    float max = -INFINITY;
    for (int lane = 0; lane < kLanes; lane++) max = std::max(max, most[lane]);
    for (; i < row.size(); i++) max = std::max(max, row[i]);
    return max;
}

std::vector<float> without(const float * logits, size_t n_vocab, const std::vector<int32_t> & banned) {
    std::vector<float> row(logits, logits + n_vocab);
    for (const int32_t id : banned) {
        if (size_t(id) < n_vocab) row[id] = -INFINITY;
    }
    return row;
}

// The token that llama.cpp draws, with its arithmetic.
int32_t drawn_exactly(std::vector<float> row, float temperature, double number) {
    for (float & logit : row) logit /= temperature;
    const float max = greatest(row);
    double sum = 0;
    for (float & x : row) {
        x = expf(x - max);
        sum += x;
    }
    const double wanted = sum * number;
    double reached = 0;
    for (size_t i = 0; i < row.size(); i++) {
        reached += row[i];
        if (reached >= wanted) return i;
    }
    return row.size() - 1;
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
    double sum = 0;
    size_t from = 0;
    const auto add_up_to = [&](size_t to) {
        if (to > from) sum += sum_of_exponentials(logits + from, to - from, max, scale);
        from = std::max(from, to);
    };
    auto next = std::lower_bound(banned.begin(), banned.end(), 0);
    const auto add_allowed_up_to = [&](size_t to) {
        while (next != banned.end() && *next < int32_t(to)) {
            add_up_to(*next);
            from = std::max(from, size_t(*next++) + 1);
        }
        add_up_to(to);
    };
    if (temperature > 0) {
        std::vector<size_t> order(ids.size());  // of the best ones, by id
        std::iota(order.begin(), order.end(), size_t(0));
        std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return ids[a] < ids[b]; });
        below.resize(ids.size());
        for (const size_t i : order) {
            add_allowed_up_to(ids[i]);
            below[i] = sum;
        }
    }
    add_allowed_up_to(n_vocab);
    log_sum_exp = double(max) * scale + std::log(sum);
    for (double & share : below) share /= sum;
    return row;
}

int32_t draw(const float * logits, size_t n_vocab, const std::vector<int32_t> & banned, float temperature, double number) {
    constexpr size_t kPart = 1024;
    const std::vector<float> row = without(logits, n_vocab, banned);
    const float max = greatest(row), scale = 1 / temperature;
    std::vector<double> ends;  // of parts
    double sum = 0;
    for (size_t from = 0; from < n_vocab; from += kPart) {
        sum += sum_of_exponentials(&row[from], std::min(kPart, n_vocab - from), max, scale);
        ends.push_back(sum);
    }
    // how far a token's place may be from where llama.cpp's rounding has it: that of logits divided by the temperature weighs most
    const double tolerance = sum * (2e-6 + 4e-7 * (std::abs(max) * scale + 30)), wanted = sum * number;
    const size_t part = std::lower_bound(ends.begin(), ends.end(), wanted) - ends.begin();
    double reached = part ? ends[part - 1] : 0;
    for (size_t i = part * kPart; i < std::min((part + 1) * kPart, n_vocab); i++) {
        const double before = reached;
        reached += std::exp((row[i] - max) * scale);
        if (reached < wanted) continue;
        if (before + tolerance < wanted && wanted + tolerance < reached) return i;
        break;
    }
    return drawn_exactly(row, temperature, number);
}

std::pair<std::vector<int32_t>, std::vector<float>> likely(
        const float * logits, size_t n_vocab, const std::vector<int32_t> & banned, float min_p) {
    const std::vector<float> row = without(logits, n_vocab, banned);
    const float least = greatest(row) + logf(min_p);
    std::pair<std::vector<int32_t>, std::vector<float>> found;
    for (size_t from = 0; from < n_vocab; from += kBlock) {
        const size_t to = std::min(from + kBlock, n_vocab);
        if (to - from == kBlock && !any_above(&row[from], std::nextafter(least, -INFINITY))) continue;
        for (size_t i = from; i < to; i++) {
            if (row[i] >= least) {
                found.first.push_back(i);
                found.second.push_back(row[i]);
            }
        }
    }
    return found;
}

}  // namespace ggpipe
