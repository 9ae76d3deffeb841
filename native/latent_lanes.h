// Latent attention of many rows at one head; see latent.cpp. Sources for one set of instructions include this after
// attention_lanes.h.
//
// The lanes are rows. Keys and values of a tile of cells are made of its latent vectors by the head's matrices; the last columns of
// a cell are a part of the key as they are.

class LatentAttention : Attention {
   public:
    GGPIPE_TARGET LatentAttention(const AttentionTask & t, const LatentHead & h)
        : Attention(t, (h.key_width + t.node->src[1]->ne[0] - t.node->src[2]->ne[0]) / kWidth, h.value_width / kWidth,
                    kTile * (t.node->src[1]->ne[0] + h.key_width + h.value_width) / kWidth),
          head_(h) {
        n_cell_ = keys_->ne[0] / kWidth;
        n_own_ = h.key_width / kWidth;
        latent_ = tile_ + kTile * std::max(n_k_, n_v_);
        own_keys_ = latent_ + kTile * n_cell_;
        made_values_ = own_keys_ + kTile * n_own_;
    }

    GGPIPE_TARGET void run() {
        begin();
        for (size_t at = 0; at < t_.cells.size(); at += kTile) {
            begin_tile(at);
            // all heads share the cells: there is no row of the task's own head
            for (int c = 0; c < kTile; c++) key_rows_[c] = row_of(keys_, cells_[std::min(c, n_cells_ - 1)], -t_.first_head);
            make_tile();
            for (int64_t lane = 0; lane < t_.n_lanes; lane += kMaxLanes) {
                const int64_t n = std::min(kMaxLanes, t_.n_lanes - lane);
                if (all_see_ || any_sees(lane, n)) attend(lane, n);
            }
        }
        end(head_.value_width);
    }

   private:
    GGPIPE_TARGET void begin() {
        const ggml_tensor * q = t_.node->src[0];
        const float * params = (const float *) t_.node->op_params + kOwnParams;
        max_bias_ = cap_ = 0;
        memset((void *) queries_, 0, (char *) tile_ - (char *) queries_);
        for (int64_t i = 0; i < t_.n_lanes; i++) {
            const float * from = (const float *) ((const char *) q->data + t_.row(i) * q->nb[1] + t_.first_head * q->nb[2]);
            float * to = (float *) (queries_ + i * n_k_);
            memcpy(to, from, head_.key_width * sizeof(float));
            memcpy(to + head_.key_width, from + values_->ne[0], (keys_->ne[0] - values_->ne[0]) * sizeof(float));
            for (int64_t d = 0; d < n_k_; d++) queries_[i * n_k_ + d] *= all(params[0] * 1.44269504f);
            high_[i] = kLowest;
        }
    }

    // Latent vectors times a matrix of n vectors a row: (cells, n).
    GGPIPE_TARGET __attribute__((noinline)) void multiply(const float * matrix, int64_t n, F * to) const {
        const auto rows = [=](int row, int64_t d) GGPIPE_TARGET GGPIPE_INLINE { return load(matrix + (row * n + d) * kWidth); };
        std::fill_n(to, kTile * n, F{});
        F totals[std::max(kManyLanes, 4)] = {};
        for_lanes(kTile, [&](auto lanes, int64_t cell) GGPIPE_TARGET GGPIPE_INLINE {
            constexpr int L = decltype(lanes)::value;
            weigh_all<L, sums_of(L) / L, false>(to + cell * n, n, (const float *) (latent_ + cell * n_cell_), n_cell_ * kWidth, totals,
                                                rows, 0, values_->ne[0], [](int) {});
        });
    }
    GGPIPE_TARGET void make_tile() const {
        widen<false>(keys_, key_rows_, kTile, latent_, n_cell_);
        multiply(head_.keys, n_own_, own_keys_);
        multiply(head_.values, n_v_, made_values_);
        const int64_t n_shared = n_k_ - n_own_;
        for (int c = 0; c < kTile; c++) {
            std::copy_n(own_keys_ + c * n_own_, n_own_, tile_ + c * n_k_);
            std::copy_n(latent_ + (c + 1) * n_cell_ - n_shared, n_shared, tile_ + c * n_k_ + n_own_);
        }
    }

    GGPIPE_TARGET bool any_sees(int64_t lane, int64_t n) const {
        for (int64_t i = lane; i < lane + n; i++) {
            const uint16_t * mask = t_.mask(i);
            for (int c = 0; c < n_cells_; c++) {
                if (mask[cells_[c]] != kHidden) return true;
            }
        }
        return false;
    }

    GGPIPE_TARGET void attend(int64_t first, int64_t n) {
        const F * tile = tile_, * made_values = made_values_, * queries = queries_ + first * n_k_;
        const int64_t n_k = n_k_, n_v = n_v_;
        const auto keys = [=](int c, int64_t d) GGPIPE_TARGET GGPIPE_INLINE { return tile[c * n_k + d]; };
        const auto values = [=](int c, int64_t d) GGPIPE_TARGET GGPIPE_INLINE { return made_values[c * n_v + d]; };
        for_lanes(n, [&](auto lanes, int64_t lane) GGPIPE_TARGET GGPIPE_INLINE {
            score<decltype(lanes)::value>(queries + lane * n_k, n_k, keys, 0, n_cells_, scores_ + lane * kTile);
        });
        for (int64_t lane = 0; lane < n; lane++) make_weights(scores_ + lane * kTile, first + lane, first + lane);
        for_lanes(n, [&](auto lanes, int64_t lane) GGPIPE_TARGET GGPIPE_INLINE {
            constexpr int L = decltype(lanes)::value;
            weigh_all<L, sums_of(L) / L, true>(results_ + (first + lane) * n_v, n_v, scores_ + lane * kTile, kTile,
                                               totals_ + first + lane, values, 0, n_cells_, [](int) {});
        });
    }

    const LatentHead & head_;
    int64_t n_cell_, n_own_;  // vectors of a cell, and of a key's part that is made
    F * latent_, * own_keys_, * made_values_;  // of a tile
};
