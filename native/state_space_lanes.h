// Scans of state spaces (Mamba). Sources for one set of instructions include this where they include delta_net_lanes.h.
//
// A token scales each row of the state, adds its own vector to it, and multiplies it by another one: that is the result. ggml goes
// through the whole state for each token; here a few rows stay in the first-level cache for some tokens.

class StateSpace {
   public:
    GGPIPE_TARGET explicit StateSpace(const ScanTask & t)
        : t_(t), inputs_(t.node->src[1]), steps_(t.node->src[2]), decays_(t.node->src[3]), b_(t.node->src[4]), c_(t.node->src[5]) {
        width_ = b_->ne[0];
        from_ = t.from;
    }

    GGPIPE_TARGET void run() {
        const int64_t n_tokens = inputs_->ne[2];
        for (int64_t token = 0; token < n_tokens; token += kTokens) {
            const int64_t n = std::min(kTokens, n_tokens - token);
            int64_t known = -1;  // the first head of the rows before
            for (int64_t row = t_.first_row; row < t_.end_row; row += kScanRows) {
                const int64_t head = row / inputs_->ne[0];
                if (head != known) begin(known = head, token, n);
                if (decays_->ne[0] > 1) {
                    for (int64_t t = 0; t < n; t++) add_one(row, token, t);
                    continue;
                }
                int64_t t = 0;
                for (; t + 2 <= n; t += 2) add<2>(row, token, t);
                if (t < n) add<1>(row, token, t);
            }
            from_ = t_.to;
        }
    }

   private:
    GGPIPE_TARGET GGPIPE_INLINE const float * at(const ggml_tensor * x, int64_t token) const {
        return (const float *) ((const char *) x->data + t_.sequence * x->nb[3] + token * x->nb[2]);
    }
    // Rows have one head, or one head each.
    GGPIPE_TARGET GGPIPE_INLINE int64_t n_heads() const { return inputs_->ne[0] == 1 ? kScanRows : 1; }

    // The heads' steps for n tokens, and their decays if these have one number.
    GGPIPE_TARGET void begin(int64_t head, int64_t token, int64_t n) {
        for (int64_t t = 0; t < n; t++) {
            const float * step = (const float *) ((const char *) steps_->data + t_.sequence * steps_->nb[2] + (token + t) * steps_->nb[1]);
            for (int64_t r = 0; r < n_heads(); r++) {
                const float x = step[head + r];
                step_[t][r] = x > 20 ? x : std::log(1 + std::exp(x));
                if (decays_->ne[0] == 1) decay_[t][r] = std::exp(step_[t][r] * ((const float *) decays_->data)[head + r]);
            }
        }
    }

    GGPIPE_TARGET GGPIPE_INLINE const float * rows_before(int64_t row, int64_t t) const {
        return (t ? t_.to : from_) + row * width_;
    }
    GGPIPE_TARGET GGPIPE_INLINE const float * of_group(const ggml_tensor * x, int64_t token, int64_t row) const {
        return at(x, token) + row / inputs_->ne[0] / (inputs_->ne[1] / x->ne[1]) * width_;
    }
    GGPIPE_TARGET GGPIPE_INLINE float * result(int64_t token, int64_t row) const {
        const int64_t n_rows = inputs_->ne[0] * inputs_->ne[1];
        return (float *) t_.node->data + (t_.sequence * inputs_->ne[2] + token) * n_rows + row;
    }

    // Adds T tokens from `first` + t on to rows with a common decay, four of them at a time.
    template <int T> GGPIPE_TARGET __attribute__((noinline)) void add(int64_t first_row, int64_t first, int64_t t) const {
        constexpr int R = kScanRows / 2;
        for (int64_t row = first_row; row < first_row + kScanRows; row += R) {
            const float * from = rows_before(row, t), * b[T], * c[T];
            float * to = t_.to + row * width_;
            F decay[T], added[T][R], sums[kScanRows] = {};
            for (int i = 0; i < T; i++) {
                b[i] = of_group(b_, first + t + i, row);
                c[i] = of_group(c_, first + t + i, row);
                decay[i] = all(decay_[t + i][0]);
                for (int r = 0; r < R; r++) added[i][r] = all(at(inputs_, first + t + i)[row + r] * step_[t + i][0]);
            }
            const auto add_column = [&](int r, int64_t d) GGPIPE_TARGET GGPIPE_INLINE {
                F state = load(from + r * width_ + d);
                for (int i = 0; i < T; i++) {
                    state = multiply_add(state, decay[i], load(b[i] + d) * added[i][r]);
                    sums[i * R + r] = multiply_add(state, load(c[i] + d), sums[i * R + r]);
                }
                store(to + r * width_ + d, state);
            };
            if (T == 1) {  // in the order of addresses: the state may come from memory
                for (int r = 0; r < R; r++) {
                    for (int64_t d = 0; d < width_; d += kWidth) add_column(r, d);
                }
            } else {
                for (int64_t d = 0; d < width_; d += kWidth) {
                    for (int r = 0; r < R; r++) add_column(r, d);
                }
            }
            alignas(32) float results[kScanRows];
            add_up(sums, results);
            for (int i = 0; i < T; i++) memcpy(result(first + t + i, row), results + i * R, R * sizeof(float));
        }
    }

    // Adds one token to rows with decays for each column; rows may be heads of their own.
    GGPIPE_TARGET __attribute__((noinline)) void add_one(int64_t row, int64_t first, int64_t t) const {
        constexpr int R = kScanRows;
        const int64_t own = inputs_->ne[0] == 1;
        const float * decays = (const float *) decays_->data + row / inputs_->ne[0] * width_;
        const float * from = rows_before(row, t), * b = of_group(b_, first + t, row), * c = of_group(c_, first + t, row);
        float * to = t_.to + row * width_;
        F sums[R] = {};
        for (int64_t d = 0; d < width_; d += kWidth) {
            const F x = load(b + d), y = load(c + d);
            for (int r = 0; r < R; r++) {
                const float step = step_[t][own * r];
                const F decay = powers_of_2(all(step * 1.44269504f) * load(decays + own * r * width_ + d), all(0));
                const F state = multiply_add(load(from + r * width_ + d), decay, x * all(at(inputs_, first + t)[row + r] * step));
                store(to + r * width_ + d, state);
                sums[r] = multiply_add(state, y, sums[r]);
            }
        }
        alignas(32) float results[R];
        add_up(sums, results);
        memcpy(result(first + t, row), results, sizeof results);
    }

    const ScanTask & t_;
    const ggml_tensor * inputs_, * steps_, * decays_, * b_, * c_;
    int64_t width_;  // numbers of a row
    const float * from_;
    float step_[kTokens][kScanRows], decay_[kTokens][kScanRows];
};
