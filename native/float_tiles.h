// Products of weights in floating point; see products.cpp. Sources for one set of instructions define GGPIPE_TARGET and, in a
// namespace of their own, include this after:
//
// F, kLanes     a vector of sums, and how many it has
// kMostRows     rows of activations whose sums stay in registers
// sum_of_lanes  adds up a vector
// types         of weights. `Number`: in memory. `round` makes `kColumns` activations `Rounded`; `activations` loads as many of
//               these, `weights` as many weights, and `add` adds their products to sums
//
// ggml adds in one order for a single row and in another for several, so near-ties, such as those of a router between experts,
// may be decided differently in runs with draft tokens. Here each lane is the sum over some columns, in their order, and the
// lanes are added up at the end. Activations are rounded to the weights' type, as in ggml.

constexpr int kTile = 8;  // rows of weights
template <class Type> constexpr int kNumberBytes = kChunk * sizeof(typename Type::Rounded);  // of a chunk of activations

template <class Type> GGPIPE_TARGET void round_row(const float * x, int64_t row, const Activations & a) {
    alignas(sizeof(F)) float numbers[kChunk];
    for (int64_t chunk = 0; chunk < a.n_chunks; chunk++, x += kChunk) {
        auto * to = (typename Type::Rounded *) (a.numbers + (chunk * a.n_rows + row) * kNumberBytes<Type>);
        const int n = std::min<int64_t>(kChunk, a.n_columns - chunk * kChunk);
        memcpy(numbers, x, n * sizeof *x);
        std::fill(numbers + n, numbers + kChunk, 0.0f);  // the rest adds nothing
        for (int i = 0; i < kChunk; i += Type::kColumns) Type::round(numbers + i, to + i);
    }
}

// Some chunks of a tile.
template <class Number> struct Piece {
    const uint8_t * data;
    size_t stride;
    int64_t chunk;  // the first
    int n_chunks;
    const uint8_t * ahead;  // what to fetch meanwhile
};

// Adds products with a piece to the sums of `kOutputs` of its rows by `kRows` rows of activations, which have `kTile` sums each.
template <class Type, int kOutputs, int kRows, bool kFetches>
GGPIPE_TARGET GGPIPE_INLINE inline void add(const Piece<typename Type::Number> & piece, int first, const Activations & a,
                                            int64_t row, F * sums) {
    using Number = typename Type::Number;
    using Rounded = typename Type::Rounded;
    constexpr int kColumns = Type::kColumns, kStep = kOutputs * kColumns * sizeof(Number);  // bytes of these rows' columns
    F total[kOutputs][kRows];
    for (int o = 0; o < kOutputs; o++) {
        for (int r = 0; r < kRows; r++) total[o][r] = sums[r * kTile + first + o];
    }
    const Number * weights = (const Number *) (piece.data + first * piece.stride);
    const uint8_t * ahead = piece.ahead + first / kOutputs * piece.n_chunks * kChunk / kColumns * kStep;
    for (int chunk = 0; chunk < piece.n_chunks; chunk++) {
        const Rounded * x[kRows];
        for (int r = 0; r < kRows; r++) {
            x[r] = (const Rounded *) (a.numbers + ((piece.chunk + chunk) * a.n_rows + row + r) * kNumberBytes<Type>);
        }
        _Pragma("GCC unroll 1") for (int i = 0; i < kChunk; i += kColumns, weights += kColumns) {
            decltype(Type::activations(x[0])) numbers[kRows];
            for (int r = 0; r < kRows; r++) numbers[r] = Type::activations(x[r] + i);
            if constexpr (kFetches) {
                for (int at = 0; at < kStep; at += 64) __builtin_prefetch(ahead + at, 0, 2);
                ahead += kStep;
            }
            for (int o = 0; o < kOutputs; o++) {
                const auto w = Type::weights((const Number *) ((const uint8_t *) weights + o * piece.stride));
                for (int r = 0; r < kRows; r++) total[o][r] = Type::add(w, numbers[r], total[o][r]);
            }
        }
    }
    for (int o = 0; o < kOutputs; o++) {
        for (int r = 0; r < kRows; r++) sums[r * kTile + first + o] = total[o][r];
    }
}
template <class Type, int kRows, bool kFetches>
GGPIPE_TARGET GGPIPE_INLINE inline void add_rows(const Piece<typename Type::Number> & piece, const Activations & a, int64_t row, F * sums) {
    if constexpr (kRows == 1) {
        add<Type, kTile, 1, kFetches>(piece, 0, a, row, sums);
    } else {
        add<Type, kTile / 2, kRows, kFetches>(piece, 0, a, row, sums);
        add<Type, kTile / 2, kRows, kFetches>(piece, kTile / 2, a, row, sums);
    }
}
// `n` rows of activations from `row` on without the first `done`: `kRows` at a time, then those that are left. What comes next
// is fetched with the first ones.
template <class Type, int kRows>
GGPIPE_TARGET GGPIPE_INLINE inline void add_all(const Piece<typename Type::Number> & piece, const Activations & a, int64_t row, size_t n, size_t done,
                                                F * sums) {
    for (; done + kRows <= n; done += kRows) {
        if (done == 0) add_rows<Type, kRows, true>(piece, a, row, sums);
        else add_rows<Type, kRows, false>(piece, a, row + done, sums + done * kTile);
    }
    if constexpr (kRows > 1) add_all<Type, kRows - 1>(piece, a, row, n, done, sums);
}

template <class Type>
GGPIPE_TARGET void multiply(const Weights & weights, int64_t first, const Activations & a, int64_t row, size_t n, float * const * to) {
    using Number = typename Type::Number;
    struct alignas(sizeof(F)) Line { float sums[kTile][kLanes]; };  // of a row of activations: for each row of weights
    static thread_local std::vector<Line> lines;
    lines.assign(n, Line{});
    F * sums = (F *) lines.data();
    constexpr int kBytes = kChunk * sizeof(Number), kChunks = 4;
    alignas(sizeof(F)) Number copies[kTile][kChunk];  // where there are not enough rows or columns
    const int n_rows = std::min<int64_t>(kTile, weights.n_rows - first);
    // Into the second cache, in the order of their addresses: a later tile.
    const size_t n_bytes = weights.n_rows * weights.row_bytes, at = (first + kTile) * weights.row_bytes + kAhead;
    const uint8_t * ahead = at < n_bytes ? weights.data + at : weights.next + (at - n_bytes);
    for (int64_t chunk = 0, n_chunks; chunk < a.n_chunks; chunk += n_chunks) {
        const int64_t n_whole = n_rows == kTile ? a.n_columns / kChunk - chunk : 0;
        n_chunks = std::clamp<int64_t>(n_whole, 1, kChunks);
        const uint8_t * data = weights.data + first * weights.row_bytes + chunk * kBytes;
        Piece<Number> piece{data, weights.row_bytes, chunk, int(n_chunks), ahead + chunk * kTile * kBytes};
        if (n_whole <= 0) {
            memset(copies, 0, sizeof copies);
            const size_t n_copied = std::min<int64_t>(kChunk, a.n_columns - chunk * kChunk) * sizeof(Number);
            for (int i = 0; i < n_rows; i++) memcpy(copies[i], data + i * weights.row_bytes, n_copied);
            piece.data = (const uint8_t *) copies;
            piece.stride = kBytes;
        }
        add_all<Type, kMostRows>(piece, a, row, n, 0, sums);
    }
    for (size_t i = 0; i < n; i++) {
        for (int o = 0; o < n_rows; o++) to[i][first + o] = sum_of_lanes(sums[i * kTile + o]);
    }
}

template <class Type> constexpr Kernel kKernel{kName, false, kTile, kNumberBytes<Type>, round_row<Type>, multiply<Type>, nullptr};
