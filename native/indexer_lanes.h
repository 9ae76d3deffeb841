// Scores of one task of an indexer. Sources for one set of instructions include this after attention_lanes.h.
//
// The lanes are the heads of a row. A score's bits depend on nothing but its row and its cell.

class Indexer {
   public:
    GGPIPE_TARGET Indexer(const IndexerTask & t) : t_(t), queries_(t.node->src[0]), keys_(t.node->src[1]) {
        n_vectors_ = (queries_->ne[0] + kWidth - 1) / kWidth;
        n_heads_ = queries_->ne[1];
        n_tiles_ = (t.end_cell - t.first_cell + kTile - 1) / kTile;
        const int64_t n_queries = n_heads_ * n_vectors_, n_keys = n_tiles_ * kTile * n_vectors_;
        query_ = (F *) t.scratch.of(sizeof(F) * (n_queries + n_keys) + sizeof(float) * n_heads_ * kTile);
        key_ = query_ + n_queries;
        scores_ = (float *) (key_ + n_keys);
    }

    GGPIPE_TARGET void run() {
        for (int64_t tile = 0; tile < n_tiles_; tile++) widen_tile(tile);
        for (int64_t row = t_.first_row; row < t_.end_row; row++) {
            copy_queries(row);
            for (int64_t tile = 0; tile < n_tiles_; tile++) score_tile(row, tile);
        }
    }

   private:
    GGPIPE_TARGET const uint16_t * mask(int64_t row, int64_t cell) const {
        return (const uint16_t *) ((const char *) t_.node->src[3]->data + row * t_.node->src[3]->nb[1]) + cell;
    }
    GGPIPE_TARGET int cells_of(int64_t tile) const { return std::min<int64_t>(kTile, t_.end_cell - t_.first_cell - tile * kTile); }
    GGPIPE_TARGET bool sees(int64_t row, int64_t tile) const {
        const uint16_t * cells = mask(row, t_.first_cell + tile * kTile);
        return std::any_of(cells, cells + cells_of(tile), [](uint16_t m) { return m != kHidden; });
    }

    // Unless no row sees it.
    GGPIPE_TARGET void widen_tile(int64_t tile) const {
        bool is_seen = false;
        for (int64_t row = t_.first_row; row < t_.end_row && !is_seen; row++) is_seen = sees(row, tile);
        if (!is_seen) return;
        const uint8_t * rows[kTile];
        for (int c = 0; c < kTile; c++) {  // missing cells are the last one
            rows[c] = (const uint8_t *) keys_->data + std::min(t_.first_cell + tile * kTile + c, t_.end_cell - 1) * keys_->nb[2];
        }
        widen<false>(keys_, rows, kTile, key_ + tile * kTile * n_vectors_, n_vectors_);
    }

    GGPIPE_TARGET void copy_queries(int64_t row) const {
        F * to = query_;
        for (int64_t h = 0; h < n_heads_; h++, to += n_vectors_) {
            const char * from = (const char *) queries_->data + h * queries_->nb[1] + row * queries_->nb[2];
            to[n_vectors_ - 1] = F{};
            memcpy((void *) to, from, queries_->ne[0] * sizeof(float));
        }
    }

    GGPIPE_TARGET void score_tile(int64_t row, int64_t tile) const {
        const ggml_tensor * weights = t_.node->src[2];
        const int64_t first = t_.first_cell + tile * kTile, n_vectors = n_vectors_;
        const int n_cells = cells_of(tile);
        alignas(64) float sums[kTile] = {};
        if (sees(row, tile)) {
            const F * queries = query_, * tile_keys = key_ + tile * kTile * n_vectors;
            const auto keys = [=](int c, int64_t d) GGPIPE_TARGET GGPIPE_INLINE { return tile_keys[c * n_vectors + d]; };
            for_lanes(n_heads_, [&](auto n, int64_t head) GGPIPE_TARGET GGPIPE_INLINE {
                score<decltype(n)::value>(queries + head * n_vectors, n_vectors, keys, 0, kTile, scores_ + head * kTile);
            });
            const float * weight = (const float *) ((const char *) weights->data + row * weights->nb[1]);
            F sum[kTile / kWidth] = {};
            for (int64_t h = 0; h < n_heads_; h++) {
                const F * scores = (const F *) (scores_ + h * kTile);
                for (int i = 0; i < kTile / kWidth; i++) {
                    sum[i] = multiply_add(all(weight[h]), scores[i] > 0 ? scores[i] : F{}, sum[i]);
                }
            }
            memcpy(sums, sum, sizeof sums);
        }
        const uint16_t * cells = mask(row, first);
        float * to = (float *) ((char *) t_.node->data + row * t_.node->nb[1]) + first;
        for (int c = 0; c < n_cells; c++) to[c] = sums[c] + _cvtsh_ss(cells[c]);
    }

    const IndexerTask & t_;
    const ggml_tensor * queries_, * keys_;
    int64_t n_vectors_, n_heads_, n_tiles_;  // vectors of a key
    F * query_, * key_;                      // of each head of a row; of each cell of each tile
    float * scores_;                         // of each head at a tile's cells
};
