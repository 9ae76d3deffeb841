// Gated delta nets. Sources for one set of instructions define GGPIPE_TARGET and include this after vectors_avx2.h or
// vectors_avx512.h, and vector_functions.h, in the same namespace.
//
// A token's gate scales a head's state S, which has a row for each number of a value; the error of what a row gives for the
// token's key is added to it along the key; and what it gives then for the query is the result. A row depends on no other row.
// ggml goes through the whole state four times for each token. Here a few rows stay in the first-level cache for some tokens,
// and are read and written once for each of these: the second half of a token's work is done together with the first half of the next.

constexpr int64_t kTokens = 16;  // at a time: their keys and queries stay in the first-level cache as well

// Brings the next numbers into the cache, and the place for their results.
GGPIPE_TARGET GGPIPE_INLINE inline void fetch(const float * from, const float * to) {
    __builtin_prefetch(from, 0);
    if (from != to) __builtin_prefetch(to, 1);
}

class DeltaNet {
   public:
    GGPIPE_TARGET explicit DeltaNet(const DeltaNetTask & t) : t_(t), values_(t.node->src[2]), gates_(t.node->src[3]) {
        width_ = values_->ne[0];
        n_ = width_ / kWidth;
        n_tokens_ = values_->ne[2];
        const int64_t n_heads = values_->ne[1];
        from_ = t.from + t.head * width_ * width_;
        to_ = t.to + t.head * width_ * width_;
        results_ = (float *) t.node->data + (t.sequence * n_tokens_ * n_heads + t.head) * width_;
        result_stride_ = n_heads * width_;
        decays_ = (F *) t.scratch.of(sizeof(F) * n_ * kTokens);
    }

    GGPIPE_TARGET void run() {
        for (int64_t token = 0; token < n_tokens_; token += kTokens) {
            const int64_t n = std::min(kTokens, n_tokens_ - token);
            begin(token, n);
            for (int64_t row = t_.first_row; row < t_.end_row; row += kStateRows) {
                if (gates_->ne[0] == 1) add<false>(row, token, n);
                else add<true>(row, token, n);
            }
            from_ = to_;
        }
    }

   private:
    // A token's numbers for this head. Heads of keys and queries may be fewer, and so may their sequences.
    GGPIPE_TARGET GGPIPE_INLINE const float * at(const ggml_tensor * x, int64_t token) const {
        const int64_t sequence = t_.sequence / (values_->ne[3] / x->ne[3]);
        return (const float *) ((const char *) x->data + sequence * x->nb[3] + token * x->nb[2] + t_.head % x->ne[1] * x->nb[1]);
    }

    GGPIPE_TARGET void begin(int64_t token, int64_t n) {
        for (int64_t t = 0; t < n; t++) {
            queries_[t] = at(t_.node->src[0], token + t);
            keys_[t] = at(t_.node->src[1], token + t);
            const float * gate = at(gates_, token + t);
            if (gates_->ne[0] == 1) decay_[t] = std::exp(*gate);
            for (int64_t d = 0; gates_->ne[0] > 1 && d < n_; d++) {
                decays_[t * n_ + d] = powers_of_2(load(gate + d * kWidth) * all(1.44269504f), all(0));
            }
        }
    }
    template <bool kEach> GGPIPE_TARGET GGPIPE_INLINE F decay(int64_t token, int64_t d) const {
        return kEach ? decays_[token * n_ + d] : all(decay_[token]);
    }

    // Adds n tokens to some rows of the state. `kEach`: gates have a number for each column.
    template <bool kEach> GGPIPE_TARGET __attribute__((noinline)) void add(int64_t row, int64_t token, int64_t n) const {
        const float scale = 1 / std::sqrt(float(width_));
        const float * from = from_ + row * width_;
        float * to = to_ + row * width_;
        constexpr int R = kStateRows;
        alignas(32) float products[2 * R];  // with the query, and with the next key
        F sums[2 * R] = {};
        for (int64_t d = 0; d < n_; d++) {
            const F key = load(keys_[0] + d * kWidth), gate = decay<kEach>(0, d);
            for (int r = 0; r < R; r++) {
                fetch(from + (R + r) * width_ + d * kWidth, to + (R + r) * width_ + d * kWidth);
                const F x = load(from + r * width_ + d * kWidth) * gate;
                store(to + r * width_ + d * kWidth, x);
                sums[R + r] = multiply_add(x, key, sums[R + r]);
            }
        }
        add_up(sums, products);
        for (int64_t t = 0; t < n; t++) {
            const float * value = at(values_, token + t) + row, beta = *at(t_.node->src[4], token + t);
            F errors[R];
            for (int r = 0; r < R; r++) {
                errors[r] = all((value[r] - products[R + r]) * beta);
                sums[r] = sums[R + r] = F{};
            }
            const bool is_last = t + 1 == n;
            const float * next_key = keys_[is_last ? t : t + 1];
            for (int64_t d = 0; d < n_; d++) {
                const F key = load(keys_[t] + d * kWidth), query = load(queries_[t] + d * kWidth);
                const F next = load(next_key + d * kWidth), gate = is_last ? all(1) : decay<kEach>(t + 1, d);
                for (int r = 0; r < R; r++) {
                    float * at = to + r * width_ + d * kWidth;
                    F x = multiply_add(errors[r], key, load(at));
                    sums[r] = multiply_add(x, query, sums[r]);
                    x *= gate;
                    store(at, x);
                    sums[R + r] = multiply_add(x, next, sums[R + r]);
                }
            }
            add_up(sums, products);
            float * result = results_ + (token + t) * result_stride_ + row;
            for (int r = 0; r < R; r++) result[r] = products[r] * scale;
        }
    }

    const DeltaNetTask & t_;
    const ggml_tensor * values_, * gates_;
    int64_t width_, n_, n_tokens_;        // numbers of a row, and its vectors
    const float * from_;                  // the state, (width, width)
    float * to_, * results_;              // the new one; of the first token
    int64_t result_stride_;
    const float * queries_[kTokens], * keys_[kTokens];
    float decay_[kTokens];
    F * decays_;                          // (tokens, n)
};
