// Attention of one task. Sources for one set of instructions define GGPIPE_TARGET and, in a namespace of their own, F (a vector
// of kWidth numbers) and the functions on it that are used here, and include this there.
//
// Vectors go along the width of heads. A few lanes and a few cells make sums that stay in registers: for scores products of
// queries with keys, for values parts of the results. Eight sums are enough for the latency of multiplications; kManySums of
// kManyLanes, as many as there are registers, take fewer loads. One lane is as good as any.
//
// A lane's bits depend on nothing but the cells that its row sees, in their order: neither on the other lanes, nor on cells
// between them, nor on where tiles end. For that, each cell's values are added in turn, and powers are of 2, relative to an
// integer: when a higher score comes, all sums are scaled by a power of 2, which does not round.

#include "vector_functions.h"

#include "attention_cells.h"

constexpr int kSums = 8;  // of other numbers of lanes than kManyLanes
constexpr int sums_of(int n_lanes) { return n_lanes == kManyLanes ? kManySums : kSums; }
constexpr float kLowest = -1e30f;  // below any score; unlike infinity, it may be subtracted from itself

GGPIPE_TARGET GGPIPE_INLINE inline float power_of_2(float exponent) {  // of an integer; 0 below the normal numbers
    const uint32_t bits = exponent < -126 ? 0 : uint32_t(int(exponent) + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

// Calls compute(L, lane) for all lanes, L at a time.
template <class Compute> GGPIPE_TARGET GGPIPE_INLINE inline void for_lanes(int64_t n_lanes, const Compute & compute) {
    int64_t lane = 0;
    const auto left = [&]() { return n_lanes - lane; };
    for (; left() > 4 || left() == kManyLanes; lane += kManyLanes) compute(std::integral_constant<int, kManyLanes>(), lane);
    for (; left() >= 4; lane += 4) compute(std::integral_constant<int, 4>(), lane);
    for (; left() >= 2; lane += 2) compute(std::integral_constant<int, 2>(), lane);
    for (; lane < n_lanes; lane++) compute(std::integral_constant<int, 1>(), lane);
}

// Scores of L lanes at cells `first` to `end`, a few at a time. Lanes are `n` vectors each.
template <int L, class Keys>
GGPIPE_TARGET GGPIPE_INLINE inline void score(const F * queries, int64_t n, const Keys & keys, int first, int end,
                                              float * scores) {
    constexpr int S = sums_of(L), C = S / L;
    for (int cell = first; cell < end; cell += C) {
        F sums[GGML_PAD(S, 8)] = {};
        for (int64_t d = 0; d < n; d++) {
            F query[L], key[C];  // the fewer of them stay in registers, while the others pass
            if (L < C) {
                for (int l = 0; l < L; l++) query[l] = queries[l * n + d];
                for (int c = 0; c < C; c++) {
                    key[0] = keys(cell + c, d);
                    for (int l = 0; l < L; l++) sums[l * C + c] = multiply_add(query[l], key[0], sums[l * C + c]);
                }
            } else {
                for (int c = 0; c < C; c++) key[c] = keys(cell + c, d);
                for (int l = 0; l < L; l++) {
                    query[0] = queries[l * n + d];
                    for (int c = 0; c < C; c++) sums[l * C + c] = multiply_add(query[0], key[c], sums[l * C + c]);
                }
            }
        }
        alignas(64) float each[GGML_PAD(S, 8)];
        if constexpr (kWidth == 16 && S == 16) add_up_16(sums, each);
        else for (int i = 0; i < S; i += 8) add_up(sums + i, each + i);
        for (int l = 0; l < L; l++) memcpy(scores + l * kTile + cell, each + l * C, C * sizeof(float));
    }
}

// Adds cells' values, weighted, to vectors d to d + D of L lanes' results; with `kCounts` the weights to `totals`. A lane's weights
// lie `stride` after those of the lane before.
template <int L, int D, bool kCounts, class Values, class AtCell>
GGPIPE_TARGET GGPIPE_INLINE inline void weigh(F * results, int64_t n, const float * weights, int64_t stride, F * totals, const Values & values,
                                              int64_t d, int n_cells, const AtCell & at_cell) {
    F sums[L * D], total[L];
    for (int l = 0; l < L; l++) {
        total[l] = totals[l];
        for (int i = 0; i < D; i++) sums[l * D + i] = results[l * n + d + i];
    }
    for (int c = 0; c < n_cells; c++) {
        if (kCounts) at_cell(c);
        F weight[L], value[D];
        if (L < D) {
            for (int l = 0; l < L; l++) weight[l] = all(weights[l * stride + c]);
            for (int i = 0; i < D; i++) {
                value[0] = values(c, d + i);
                for (int l = 0; l < L; l++) sums[l * D + i] = multiply_add(weight[l], value[0], sums[l * D + i]);
            }
            for (int l = 0; kCounts && l < L; l++) total[l] += weight[l];
        } else {
            for (int i = 0; i < D; i++) value[i] = values(c, d + i);
            for (int l = 0; l < L; l++) {
                weight[0] = all(weights[l * stride + c]);
                if (kCounts) total[l] += weight[0];
                for (int i = 0; i < D; i++) sums[l * D + i] = multiply_add(weight[0], value[i], sums[l * D + i]);
            }
        }
    }
    for (int l = 0; l < L; l++) {
        totals[l] = total[l];
        for (int i = 0; i < D; i++) results[l * n + d + i] = sums[l * D + i];
    }
}
// The same from vector d on, D at a time, then half as many.
template <int L, int D, bool kCounts, class Values, class AtCell>
GGPIPE_TARGET GGPIPE_INLINE inline void weigh_all(F * results, int64_t n, const float * weights, int64_t stride, F * totals,
                                                  const Values & values, int64_t d, int n_cells, const AtCell & at_cell) {
    if (n - d < D) {
        if constexpr (D > 1) weigh_all<L, D / 2, kCounts>(results, n, weights, stride, totals, values, d, n_cells, at_cell);
        return;
    }
    weigh<L, D, kCounts>(results, n, weights, stride, totals, values, d, n_cells, at_cell);
    for (d += D; d + D <= n; d += D) weigh<L, D, false>(results, n, weights, stride, totals, values, d, n_cells, at_cell);
    if constexpr (D > 1) weigh_all<L, D / 2, false>(results, n, weights, stride, totals, values, d, n_cells, at_cell);
}

class Attention {
   public:
    GGPIPE_TARGET Attention(const AttentionTask & t)
        : Attention(t, (key_columns(t.node->src[1]) + kWidth - 1) / kWidth, (t.node->src[2]->ne[0] + kWidth - 1) / kWidth, 0) {}
    GGPIPE_TARGET Attention(const AttentionTask & t, int64_t n_k, int64_t n_v, int64_t n_more)
        : t_(t), keys_(t.node->src[1]), values_(t.node->src[2]), n_k_(n_k), n_v_(n_v) {
        const int64_t n_lanes = t.n_heads * t.n_lanes, n_tile = kTile * std::max(n_k_, n_v_) + n_more;
        const size_t n_vectors = n_lanes * (n_k_ + n_v_ + 1) + n_tile;
        queries_ = (F *) t.scratch.of(sizeof(F) * n_vectors + sizeof(float) * (t.n_lanes * kTile + n_lanes));
        results_ = queries_ + n_lanes * n_k_;
        totals_ = results_ + n_lanes * n_v_;
        tile_ = totals_ + n_lanes;
        scores_ = (float *) (tile_ + n_tile);
        high_ = scores_ + t.n_lanes * kTile;
    }

    GGPIPE_TARGET void run() {
        begin();
        const bool in_place = t_.n_lanes <= kInPlace && keys_->type == GGML_TYPE_F16 && values_->type == GGML_TYPE_F16 &&
                              keys_->ne[0] % kWidth == 0 && values_->ne[0] % kWidth == 0;
        for (size_t at = 0; at < t_.cells.size(); at += kTile) {
            begin_tile(at);
            for (int64_t h = 0; h < t_.n_heads; h++) {
                for (int c = 0; c < kTile; c++) {  // the last tile's missing cells are its last one
                    const int64_t cell = cells_[std::min(c, n_cells_ - 1)];
                    key_rows_[c] = row_of(keys_, cell, h);
                    value_rows_[c] = row_of(values_, cell, h);
                }
                if (in_place) run_in_place(h, t_.cells.size() - at);
                else run_packed(h, t_.cells.size() - at);
            }
        }
        end(values_->ne[0]);
    }

   protected:
    static constexpr int64_t kInPlace = 8;  // most lanes for which F16 cells are not widened once for all

    GGPIPE_TARGET const uint8_t * row_of(const ggml_tensor * t, int64_t cell, int64_t head) const {
        return (const uint8_t *) t->data + cell * t->nb[1] + (t_.first_head + head) * t->nb[2];
    }
    // Brings cell c's keys for the next head into the cache, or those of the next tile for the first one.
    GGPIPE_TARGET GGPIPE_INLINE void fetch_next_key(int c, int64_t head, size_t n_left, size_t bytes) const {
        if (head + 1 < t_.n_heads) fetch(key_rows_[c] + keys_->nb[2], bytes);
        else if (size_t(c + kTile) < n_left) fetch(row_of(keys_, cells_[c + kTile], 0), bytes);
    }
    GGPIPE_TARGET GGPIPE_INLINE static void fetch(const uint8_t * row, size_t bytes) {
        for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
    }

    GGPIPE_TARGET void begin_tile(size_t first) {
        n_cells_ = std::min<size_t>(kTile, t_.cells.size() - first);
        cells_ = t_.cells.data() + first;
        all_see_ = true;
        for (int c = 0; c < n_cells_; c++) all_see_ &= t_.by_all[cells_[c]] != 0;
    }

    GGPIPE_TARGET void begin() {
        const ggml_tensor * q = t_.node->src[0], * sinks = t_.node->src[4];
        const float * params = (const float *) t_.node->op_params + kOwnParams, log2_e = 1.44269504f;
        max_bias_ = params[1];
        cap_ = params[2] * log2_e;
        const float scale = params[2] != 0 ? params[0] / params[2] : params[0] * log2_e;
        memset((void *) queries_, 0, (char *) tile_ - (char *) queries_);
        for (int64_t i = 0; i < t_.n_heads * t_.n_lanes; i++) {
            const int64_t head = t_.query_head(i / t_.n_lanes, i % t_.n_lanes), row = t_.row(i % t_.n_lanes);
            const float * from = (const float *) ((const char *) q->data + row * q->nb[1] + head * q->nb[2]);
            float * to = (float *) (queries_ + i * n_k_);
            memcpy(to, from, keys_->ne[0] * sizeof(float));
            round_for(keys_, queries_ + i * n_k_, n_k_);
            for (int64_t d = 0; d < n_k_; d++) queries_[i * n_k_ + d] *= all(scale);
            const float sink = sinks ? ((const float *) sinks->data)[head] * log2_e : 0;
            high_[i] = sinks ? std::nearbyint(sink) : kLowest;
            totals_[i] = all(sinks ? std::exp2(sink - high_[i]) : 0);
        }
    }

    // Stores results of this width.
    GGPIPE_TARGET void end(int64_t width) const {
        for (int64_t i = 0; i < t_.n_heads * t_.n_lanes; i++) {
            const int64_t head = t_.query_head(i / t_.n_lanes, i % t_.n_lanes), row = t_.row(i % t_.n_lanes);
            float * to = (float *) ((char *) t_.node->data + row * t_.node->nb[2] + head * t_.node->nb[1]);
            const float * from = (const float *) (results_ + i * n_v_), total = *(const float *) &totals_[i];
            for (int64_t d = 0; d < width; d++) to[d] = total > 0 ? from[d] / total : 0;
        }
    }

    // Makes weights of a lane's scores at this tile. i: its place among those of all heads.
    GGPIPE_TARGET GGPIPE_INLINE void make_weights(float * scores, int64_t lane, int64_t i) {
        F * x = (F *) scores;
        for (int c = 0; cap_ != 0 && c < kTile / kWidth; c++) x[c] = all(cap_) * tanh(x[c]);
        if (max_bias_ > 0) add_bias(lane, i, scores);
        const uint16_t * mask = all_see_ ? nullptr : t_.mask(lane);
        for (int c = 0; mask && c < n_cells_; c++) {
            if (mask[cells_[c]] == kHidden) scores[c] = -INFINITY;
        }
        for (int c = n_cells_; c < kTile; c++) scores[c] = -INFINITY;
        F highest = x[0];
        for (int c = 1; c < kTile / kWidth; c++) highest = x[c] > highest ? x[c] : highest;
        const float high = std::nearbyint(maximum(highest));
        if (high > high_[i]) {
            const F rescale = all(power_of_2(high_[i] - high));
            high_[i] = high;
            totals_[i] *= rescale;
            for (int64_t d = 0; d < n_v_; d++) results_[i * n_v_ + d] *= rescale;
        }
        for (int c = 0; c < kTile / kWidth; c++) x[c] = powers_of_2(x[c], all(high_[i]));
    }

    // ALiBi: the mask has distances, and each head a slope.
    GGPIPE_TARGET __attribute__((noinline)) void add_bias(int64_t lane, int64_t i, float * scores) const {
        const int64_t head = t_.query_head(i / t_.n_lanes, lane), n_heads = t_.node->src[0]->ne[2];
        int64_t n = 1;
        while (2 * n <= n_heads) n *= 2;
        const float exponent = head < n ? -max_bias_ / n * (head + 1) : -max_bias_ / 2 / n * (2 * (head - n) + 1);
        const float slope = std::exp2(exponent) * 1.44269504f;
        const uint16_t * mask = t_.mask(lane);
        for (int c = 0; c < n_cells_; c++) scores[c] += slope * _cvtsh_ss(mask[cells_[c]]);
    }

    // Calls ahead(c) for the share of a tile's cells that n of the lanes have.
    template <class Ahead> GGPIPE_TARGET GGPIPE_INLINE void share(int64_t lane, int n, const Ahead & ahead) const {
        for (int64_t c = kTile * lane / t_.n_lanes; c < kTile * (lane + n) / t_.n_lanes; c++) ahead(c);
    }
    template <class Keys, class Ahead>
    GGPIPE_TARGET GGPIPE_INLINE void add_scores(int64_t head, const Keys & keys, int first, int end, const Ahead & ahead) const {
        const F * queries = queries_ + head * t_.n_lanes * n_k_;
        for_lanes(t_.n_lanes, [&](auto n, int64_t lane) GGPIPE_TARGET GGPIPE_INLINE {
            constexpr int L = decltype(n)::value;
            share(lane, L, ahead);
            score<L>(queries + lane * n_k_, n_k_, keys, first, end, scores_ + lane * kTile);
        });
    }
    template <class Values, class AtCell, class Ahead>
    GGPIPE_TARGET GGPIPE_INLINE void add_values(int64_t head, const Values & values, const AtCell & at_cell, const Ahead & ahead) const {
        F * results = results_ + head * t_.n_lanes * n_v_, * totals = totals_ + head * t_.n_lanes;
        for_lanes(t_.n_lanes, [&](auto n, int64_t lane) GGPIPE_TARGET GGPIPE_INLINE {
            constexpr int L = decltype(n)::value;
            share(lane, L, ahead);
            const float * weights = scores_ + lane * kTile;
            weigh_all<L, sums_of(L) / L, true>(results + lane * n_v_, n_v_, weights, kTile, totals + lane, values, 0, n_cells_, at_cell);
        });
    }
    GGPIPE_TARGET GGPIPE_INLINE void make_weights(int64_t head) {
        for (int64_t lane = 0; lane < t_.n_lanes; lane++) make_weights(scores_ + lane * kTile, lane, head * t_.n_lanes + lane);
    }

    // Widens F16 cells as they are used. While keys are, the values come into the cache, and while these are, the next keys.
    GGPIPE_TARGET __attribute__((noinline)) void run_in_place(int64_t head, size_t n_left) {
        const auto keys = [&](int c, int64_t d) GGPIPE_TARGET GGPIPE_INLINE {
            return widened((const uint16_t *) key_rows_[c] + d * kWidth);
        };
        const auto values = [&](int c, int64_t d) GGPIPE_TARGET GGPIPE_INLINE {
            return widened((const uint16_t *) value_rows_[c] + d * kWidth);
        };
        const size_t key_bytes = keys_->ne[0] * sizeof(uint16_t), value_bytes = values_->ne[0] * sizeof(uint16_t);
        for (int c = 0; c < n_cells_; c += kSums) {  // few cells for all lanes: those of one head often evict each other
            for (int i = c; i < c + kSums; i++) fetch(value_rows_[i], value_bytes);
            add_scores(head, keys, c, c + kSums, [](int) {});
        }
        make_weights(head);
        add_values(head, values, [&](int c) GGPIPE_TARGET GGPIPE_INLINE { fetch_next_key(c, head, n_left, key_bytes); }, [](int) {});
    }

    // Widens cells first, for all lanes. Cells that are needed next come into the cache a few at a time, between computing:
    // requests for all at once would wait for each other.
    GGPIPE_TARGET __attribute__((noinline)) void run_packed(int64_t head, size_t n_left) {
        const F * tile = tile_;
        const int64_t n_k = n_k_, n_v = n_v_;
        const auto keys = [=](int c, int64_t d) GGPIPE_TARGET GGPIPE_INLINE { return tile[c * n_k + d]; };
        const auto values = [=](int c, int64_t d) GGPIPE_TARGET GGPIPE_INLINE { return tile[c * n_v + d]; };
        const size_t key_bytes = ggml_row_size(keys_->type, keys_->ne[0]), value_bytes = ggml_row_size(values_->type, values_->ne[0]);
        widen<true>(keys_, key_rows_, GGML_PAD(n_cells_, kSums), tile_, n_k);
        add_scores(head, keys, 0, n_cells_, [=](int c) GGPIPE_TARGET GGPIPE_INLINE { fetch(value_rows_[c], value_bytes); });
        make_weights(head);
        widen<false>(values_, value_rows_, n_cells_, tile_, n_v);
        add_values(head, values, [](int) {},
                   [=](int c) GGPIPE_TARGET GGPIPE_INLINE { fetch_next_key(c, head, n_left, key_bytes); });
    }

    const AttentionTask & t_;
    const ggml_tensor * keys_, * values_;
    int64_t n_k_, n_v_;               // vectors of a key, and of a value
    F * queries_, * results_;         // of each lane of each head
    F * totals_;                      // the sum of its weights, kWidth times
    F * tile_;                        // keys or values
    float * scores_;                  // of one head's lanes at a tile's cells, and their weights
    float * high_;                    // of each lane of each head: its highest score, rounded
    float max_bias_, cap_;            // of ALiBi, and of scores; 0: none
    const int32_t * cells_;           // of this tile
    int n_cells_;
    bool all_see_;
    const uint8_t * key_rows_[kTile], * value_rows_[kTile];
};
