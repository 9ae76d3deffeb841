// Tiles of weights times quantized activations, with AVX-512; see products.cpp. Each lane of a vector has its own row of
// weights.
#pragma once

#ifdef __x86_64__
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "lane_activations.h"

namespace ggpipe::GGPIPE_TILES {

constexpr int kMaxRows = 8;  // of activations at a time

struct alignas(64) Line { float results[kLanes]; };

// A chunk of some rows of activations, one after another.
struct Chunk {
    const int8_t * numbers;
    const int32_t * starts;
    const float * scales, * sums;

    GGPIPE_TARGET GGPIPE_INLINE Chunk(const Activations & a, int64_t at)
        : numbers(a.numbers + at * kChunk),
          starts(a.starts + at * kMaxUnits),
          scales(a.scales + at * kMaxUnits),
          sums(a.sums + at * kMaxUnits) {}
    GGPIPE_TARGET GGPIPE_INLINE __m512i four(int r, int i) const {  // columns 4 * i to 4 * i + 3, for all lanes
        int32_t numbers_of_four;
        memcpy(&numbers_of_four, numbers + r * kChunk + 4 * i, 4);
        return _mm512_set1_epi32(numbers_of_four);
    }
};

// Results of R rows of activations, while they are multiplied with T tiles.
template <class Format, int R, int T = 1> struct Sums {
    using Scale = typename Format::Scale;
    static constexpr int kSteps = Format::kUnit / 4;
    // Whether minima come after all products: blocks of one unit have no other order, and many rows leave no registers.
    static constexpr bool kMinimaLast = Format::kHasMinima && (R == kMaxRows || !Format::kSuper);
    static constexpr bool kScalesNumbers = Format::kScalesAreSmall && R > 2;
    const Chunk x;
    Line (*lines)[T];
    F sums[R][T];
    I integers[R][T] = {};  // of a block, without its scale

    GGPIPE_TARGET GGPIPE_INLINE Sums(const Activations & a, int64_t chunk, int64_t row, Line (*lines)[T])
        : x(a, chunk * a.n_rows + row), lines(lines) {
        memcpy(sums, lines, sizeof sums);
    }
    GGPIPE_TARGET GGPIPE_INLINE void add(int u, const U (*weights)[T], const Scale (&scale)[T], const F (&minimum)[T]) {
        __m512i products[R][T];
        GGPIPE_UNROLLED(r, R) {
            const __m512i start = _mm512_set1_epi32(x.starts[r * kMaxUnits + u]);
            GGPIPE_UNROLLED(t, T) products[r][t] = kScalesNumbers ? (__m512i) integers[r][t] : start;
        }
        GGPIPE_UNROLLED(step, kSteps) {
            __m512i numbers[T];
            GGPIPE_UNROLLED(t, T) {
                numbers[t] = (__m512i) weights[step][t];
                if constexpr (kScalesNumbers) numbers[t] = _mm512_mullo_epi16(numbers[t], (__m512i) (scale[t] | scale[t] << 16));
            }
            GGPIPE_UNROLLED(r, R) {
                const __m512i four = x.four(r, u * kSteps + step);
                GGPIPE_UNROLLED(t, T) products[r][t] = GGPIPE_DOT_BYTES(products[r][t], numbers[t], four);
            }
        }
        GGPIPE_UNROLLED(r, R) {
            GGPIPE_UNROLLED(t, T) add(r, u, (I) products[r][t], scale[t], t);
        }
        if (!kMinimaLast) add_minimum(u, minimum);
    }
    GGPIPE_TARGET GGPIPE_INLINE void add_minimum(int u, const F (&minimum)[T]) {
        for (int r = 0; r < R && Format::kHasMinima; r++) {
            for (int t = 0; t < T; t++) sums[r][t] = multiply_add(minimum[t], F{} + x.sums[r * kMaxUnits + u], sums[r][t]);
        }
    }
    GGPIPE_TARGET GGPIPE_INLINE void add(int r, int u, I product, Scale scale, int t = 0) {
        if constexpr (kScalesNumbers) integers[r][t] = product;
        else if constexpr (Format::kUnscaled) integers[r][t] += product;
        else if constexpr (Format::kSuper) integers[r][t] += product * scale;
        else sums[r][t] = multiply_add(floats(product), scale * x.scales[r * kMaxUnits + u], sums[r][t]);
    }
    // After all units: their minima, and the block's scale.
    GGPIPE_TARGET GGPIPE_INLINE void end(int n_units, const F (*minima)[T], const F (&scale)[T]) {
        for (int u = 0; u < n_units && kMinimaLast; u++) add_minimum(u, minima[u]);
        for (int r = 0; r < R && Format::kSuper; r++) {
            for (int t = 0; t < T; t++) sums[r][t] = multiply_add(floats(integers[r][t]), scale[t] * x.scales[r * kMaxUnits], sums[r][t]);
        }
        memcpy(lines, sums, sizeof sums);
    }
};

// Calls `function` with a number of rows that is a constant: n or, where that is odd, one more (a spare row), but kMax at most.
template <int kMax, class Function> GGPIPE_TARGET GGPIPE_INLINE inline void with_count(size_t n, const Function & function) {
    if (n == 1) function(std::integral_constant<int, 1>());
    else if (n == 2 || kMax <= 2) function(std::integral_constant<int, std::min(2, kMax)>());
    else if (n <= 4) function(std::integral_constant<int, std::min(4, kMax)>());
    else if (n <= 6) function(std::integral_constant<int, std::min(6, kMax)>());
    else function(std::integral_constant<int, kMax>());
}

template <class Format, class Emit> GGPIPE_TARGET GGPIPE_INLINE inline F unpack(typename Format::From from, const Emit & emit) {
    if constexpr (Format::kSuper) {
        return Format::unpack(from, emit);
    } else {
        Format::unpack(from, emit);
        return F{};
    }
}
GGPIPE_TARGET GGPIPE_INLINE inline __m256i in_pairs(__m256i a, __m256i b) {
    return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
}
// Four rows' eight numbers each, added up to two each: one in each half.
GGPIPE_TARGET GGPIPE_INLINE inline __m256i in_halves(const __m256i rows[4]) {
    const __m256i a = in_pairs(rows[0], rows[1]), b = in_pairs(rows[2], rows[3]);
    return _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}
GGPIPE_TARGET GGPIPE_INLINE inline I added_up(const __m256i fours[4]) {  // of 16 rows
    const auto two = [&](int i) GGPIPE_TARGET GGPIPE_INLINE {
        return _mm512_inserti64x4(_mm512_castsi256_si512(fours[i]), fours[i + 1], 1);
    };
    const __m512i a = two(0), b = two(2);
    return (I) _mm512_shuffle_i64x2(a, b, 0x88) + (I) _mm512_shuffle_i64x2(a, b, 0xdd);
}

// The same sums as with rows as lanes, but without shuffles of weights: faster for a few rows of activations.
template <class Format, int R, class Prefetch>
GGPIPE_TARGET GGPIPE_INLINE inline void add_row_by_row(Sums<Format, R> & sums, Rows from, const Prefetch & prefetch) {
    constexpr int kBlocks = kChunk / Format::kBlock, kUnits = Format::kBlock / Format::kUnit;
    const int n_blocks = Format::kSuper ? kBlocks : from.n_units;
    F scale[1], minima[kBlocks * kUnits][1];
    _Pragma("GCC unroll 1") for (int block = 0; block < n_blocks; block++, from += Format::kBytes) {
        __m256i fours[R][4];
        const auto four = [&](int i, int r) GGPIPE_TARGET GGPIPE_INLINE {
            __m256i rows[4];
            GGPIPE_UNROLLED(j, 4) {
                rows[j] = Format::row(from[4 * i + j], sums.x.numbers + r * kChunk + block * Format::kBlock, sums.x.starts + r * kMaxUnits);
            }
            fours[r][i] = in_halves(rows);
        };
        if constexpr (Format::kSuper) {  // too long to be unrolled; all that is fetched at a time would have to wait
            _Pragma("GCC unroll 1") for (int i = 0; i < 4; i++) {
                for (int r = 0; r < R; r++) four(i, r);
                for (int u = i * kUnits / 4; u < (i + 1) * kUnits / 4; u++) prefetch(block * kUnits + u);
            }
        } else {
            GGPIPE_UNROLLED(i, 4) {
                for (int r = 0; r < R; r++) four(i, r);
            }
            prefetch(block);
        }
        *scale = Format::scale(from, minima + block * kUnits);
        for (int u = 0; u < kUnits && Format::kSuper; u++) sums.add_minimum(u, minima[u]);
        for (int r = 0; r < R; r++) {
            if constexpr (Format::kSuper) *sums.integers[r] = added_up(fours[r]);
            else sums.add(r, block, added_up(fours[r]) + sums.x.starts[r * kMaxUnits + block], *scale);
        }
    }
    sums.end(n_blocks * kUnits, minima, scale);
}

// Weights that are read in the order of their addresses, and what is fetched meanwhile.
class Ahead {
   public:
    GGPIPE_TARGET GGPIPE_INLINE Ahead(const Weights & weights, int64_t row) {
        constexpr size_t kDistance = 16 << 10;  // a part of the first cache
        const size_t n_bytes = weights.n_rows * weights.row_bytes, at = row * weights.row_bytes + kDistance;
        end_ = line_ = at < n_bytes ? weights.data + at : weights.next + (at - n_bytes);
    }
    GGPIPE_TARGET GGPIPE_INLINE void fetch(size_t n_bytes) {  // for as many bytes that are read
        end_ += n_bytes;
        for (; line_ < end_; line_ += 64) __builtin_prefetch(line_, 0, 3);
    }

   private:
    const uint8_t * end_, * line_;
};

// 16 rows of weights, chunk by chunk.
template <class Format> class Sixteen {
   public:
    using From = typename Format::From;
    // `later`: how many rows after these to fetch meanwhile.
    GGPIPE_TARGET GGPIPE_INLINE Sixteen(const Weights & weights, int64_t first, int later)
        : n_rows_(std::clamp<int64_t>(weights.n_rows - first, 0, kLanes)), stride_(weights.row_bytes * From::kGroup) {
        data_ = weights.data + (n_rows_ ? first : 0) * weights.row_bytes;
        // In the order of their addresses: the CPU does not see the pattern of 16 rows.
        const size_t n_bytes = weights.n_rows * weights.row_bytes, at = (first + later) * weights.row_bytes + kAhead;
        ahead_ = at < n_bytes ? weights.data + at : weights.next + (at - n_bytes);
    }
    GGPIPE_TARGET GGPIPE_INLINE From chunk(int64_t chunk, int64_t n_columns) {
        const int n = std::min<int64_t>(kChunk, n_columns - chunk * kChunk);
        const uint8_t * data = data_ + chunk * kBytes;
        if (n_rows_ == kLanes) return From(data, stride_, n / 32);
        memset(copies_, 0, sizeof copies_);
        for (int i = 0; i < n_rows_ / From::kGroup; i++) memcpy(copies_[i], data + i * stride_, kBytes * n / kChunk);
        return From(copies_[0], kBytes, n / 32);
    }
    GGPIPE_TARGET GGPIPE_INLINE void prefetch(int64_t chunk, int u) const {
        constexpr int kUnits = kChunk / Format::kUnit, kUnitBytes = kPieces * kBytes / kUnits;
        for (int i = 0; i < kUnitBytes; i += 64) __builtin_prefetch(ahead_ + (chunk * kUnits + u) * kUnitBytes + i, 0, 3);
    }
    GGPIPE_TARGET GGPIPE_INLINE void store(const Line & results, float * to) const {
        if (n_rows_ == kLanes) memcpy(to, &results, sizeof results);  // a store, not a call
        else memcpy(to, &results, n_rows_ * sizeof(float));
    }

   private:
    static constexpr int kPieces = kLanes / From::kGroup, kBytes = kChunk / Format::kBlock * Format::kBytes * From::kGroup;  // of a piece
    const int n_rows_;
    const size_t stride_;
    const uint8_t * data_, * ahead_;
    uint8_t copies_[kPieces][kBytes];  // where there are not enough rows for a tile
};

// A tile times one row of activations. Four rows of weights are multiplied from end to end, so memory is read nearly in order.
template <class Format> GGPIPE_TARGET void multiply_one(const Weights & weights, int64_t first, const Activations & a, int64_t row, float * to) {
    Ahead ahead(weights, first);
    for (int64_t four = first; four < first + kLanes; four += 4) {
        const uint8_t * rows[4];
        for (int j = 0; j < 4; j++) rows[j] = weights.data + (four + j) * weights.row_bytes;
        __m128 sums = _mm_setzero_ps();
        for (int64_t chunk = 0; chunk < a.n_chunks; chunk++) {
            const Chunk x(a, chunk * a.n_rows + row);
            const int n_blocks = std::min<int64_t>(kChunk, a.n_columns - chunk * kChunk) / Format::kBlock;
            _Pragma("GCC unroll 1") for (int block = 0; block < n_blocks; block++) {
                __m256i products[4];
                __m128i halves = _mm_setzero_si128();
                GGPIPE_UNROLLED(j, 4) {
                    products[j] = Format::row(rows[j], x.numbers + block * Format::kBlock, x.starts);
                    int16_t half;
                    memcpy(&half, rows[j] + Format::kScaleAt, sizeof half);
                    halves = _mm_insert_epi16(halves, half, j);
                    rows[j] += Format::kBytes;
                    if (Format::kSuper) ahead.fetch(Format::kBytes);
                }
                if (!Format::kSuper) ahead.fetch(4 * Format::kBytes);
                const __m256i both = in_halves(products);
                __m128i product = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
                if (!Format::kSuper) product = _mm_add_epi32(product, _mm_set1_epi32(x.starts[block]));
                const __m128 scale = _mm_mul_ps(_mm_cvtph_ps(halves), _mm_set1_ps(x.scales[block]));
                sums = _mm_fmadd_ps(_mm_cvtepi32_ps(product), scale, sums);
            }
        }
        _mm_storeu_ps(to + four, sums);
    }
}

// For up to kMaxRows rows of activations: tiles are used as they are unpacked.
template <class Format> GGPIPE_TARGET void multiply_few(const Weights & weights, int64_t first, const Activations & a, int64_t row, size_t n,
                                                       float * const * to) {
    if constexpr (Format::kEndToEnd) {
        if (n == 1 && first + kLanes <= weights.n_rows) return multiply_one<Format>(weights, first, a, row, *to);
    }
    constexpr int kUnits = kChunk / Format::kUnit;
    Line lines[kMaxRows + kSpareRows][1] = {};  // results of a spare row are dropped
    Sixteen<Format> rows(weights, first, kLanes);
    for (int64_t chunk = 0; chunk < a.n_chunks; chunk++) {
        const auto from = rows.chunk(chunk, a.n_columns);
        const auto prefetch = [&](int u) GGPIPE_TARGET GGPIPE_INLINE { rows.prefetch(chunk, u); };
        if constexpr (Format::kRowByRow > 0) {
            if (n <= Format::kRowByRow) {
                with_count<Format::kRowByRow>(n, [&](auto count) GGPIPE_TARGET GGPIPE_INLINE {
                    Sums<Format, count()> sums(a, chunk, row, lines);
                    add_row_by_row(sums, from, prefetch);
                });
                continue;
            }
        }
        with_count<kMaxRows>(n, [&](auto count) GGPIPE_TARGET GGPIPE_INLINE {
            F minima[kUnits][1];
            Sums<Format, count()> sums(a, chunk, row, lines);
            const F scale[1] = {unpack<Format>(from, [&](int u, const U * numbers, auto scale, F minimum) GGPIPE_TARGET GGPIPE_INLINE {
                *minima[u] = minimum;
                sums.add(u, (const U (*)[1]) numbers, {scale}, {minimum});
                prefetch(u);
            })};
            sums.end(Format::kSuper ? kUnits : from.n_units, minima, scale);
        });
    }
    for (size_t i = 0; i < n; i++) rows.store(*lines[i], to[i] + first);
}

// For more rows, with T tiles at a time: activations are loaded once for all of them. kFull: all chunks are whole.
template <class Format, int T, bool kFull>
GGPIPE_TARGET void multiply_many(const Weights & weights, int64_t first, const Activations & a, int64_t row, size_t n, float * const * to) {
    constexpr int kUnits = kChunk / Format::kUnit;
    struct Lines { Line tiles[T]; };
    static thread_local std::vector<Lines> kept;
    kept.assign(n + kSpareRows, Lines{});
    auto * const lines = (Line (*)[T]) kept.data();  // each access to a thread_local variable is a call
    const auto later = [&](int t) GGPIPE_TARGET GGPIPE_INLINE { return Sixteen<Format>(weights, first + t * kLanes, T * kLanes); };
    Sixteen<Format> rows[] = {later(0), later(T - 1)};
    for (int64_t chunk = 0; chunk < a.n_chunks; chunk++) {
        U tiles[kUnits][Format::kUnit / 4][T];
        typename Format::Scale scales[kUnits][T];
        F minima[kUnits][T], scale[T];
        const int n_units = kFull ? kUnits : std::min<int64_t>(kChunk, a.n_columns - chunk * kChunk) / Format::kUnit;
        for (int t = 0; t < T; t++) {
            auto from = rows[t].chunk(chunk, a.n_columns);
            if (kFull) from.n_units = kChunk / 32;
            scale[t] = unpack<Format>(from, [&](int u, const U * numbers, auto scale, F minimum) GGPIPE_TARGET GGPIPE_INLINE {
                for (int i = 0; i < Format::kUnit / 4; i++) tiles[u][i][t] = numbers[i];
                scales[u][t] = scale;
                minima[u][t] = minimum;
                rows[t].prefetch(chunk, u);
            });
        }
        for (size_t i = 0; i < n; i += kMaxRows) {
            with_count<kMaxRows>(n - i, [&](auto count) GGPIPE_TARGET GGPIPE_INLINE {
                Sums<Format, count(), T> sums(a, chunk, row + i, lines + i);
                for (int u = 0; u < n_units; u++) sums.add(u, tiles[u], scales[u], minima[u]);
                sums.end(n_units, minima, scale);
            });
        }
    }
    for (size_t i = 0; i < n; i++) {
        for (int t = 0; t < T; t++) rows[t].store(lines[i][t], to[i] + first + t * kLanes);
    }
}

template <class Format, int T> GGPIPE_TARGET void multiply_many(const Weights & weights, int64_t first, const Activations & a, int64_t row,
                                                               size_t n, float * const * to) {
    if constexpr (!Format::kSuper) {
        if (a.n_columns % kChunk) return multiply_many<Format, T, false>(weights, first, a, row, n, to);
    }
    multiply_many<Format, T, true>(weights, first, a, row, n, to);
}

template <class Format> GGPIPE_TARGET void multiply(const Weights & weights, int64_t first, const Activations & a, int64_t row, size_t n,
                                                   float * const * to) {
    if (n > kMaxRows) multiply_many<Format, 1>(weights, first, a, row, n, to);
    else multiply_few<Format>(weights, first, a, row, n, to);
}

// kHasTwo: two tiles at a time are faster.
template <class Format, bool kHasTwo> const Kernel * kernel_with(const char * name) {
    static const Kernel kernel = [name] {
        Kernel made{name, Format::From::kGroup > 1, kLanes, kChunk, quantize<Format>, multiply<Format>, nullptr};
        if constexpr (kHasTwo) made.multiply_two = multiply_many<Format, 2>;
        return made;
    }();
    return &kernel;
}

}  // namespace ggpipe::GGPIPE_TILES
#endif
