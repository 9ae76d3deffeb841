// Tiles of weights times quantized activations, with AVX-512; see products.cpp. Each lane of a vector has its own row of
// weights.
#pragma once

#ifdef __x86_64__
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "superblocks.h"

namespace ggpipe::GGPIPE_TILES {

constexpr int kMaxRows = 8;  // of activations at a time

struct alignas(64) Line { float results[kLanes]; };
typedef int8_t Narrow __attribute__((vector_size(kLanes)));

// Quantize one row of `a`.
template <class Format> GGPIPE_TARGET void quantize(const float * x, int64_t row, const Activations & a) {
    for (int64_t chunk = 0; chunk < a.n_chunks; chunk++) {
        const int64_t at = chunk * a.n_rows + row;
        const int n = std::min<int64_t>(kChunk, a.n_columns - chunk * kChunk), step = Format::kSuper ? kChunk : 32;
        int8_t * numbers = a.numbers + at * kChunk;
        if (n < kChunk) {  // the rest adds nothing
            memset(numbers + n, 0, kChunk - n);
            const int64_t unit = at * kMaxUnits + n / Format::kUnit, units = (kChunk - n) / Format::kUnit;
            std::fill_n(&a.starts[unit], units, 0);
            std::fill_n(&a.scales[unit], units, 0.0f);
            std::fill_n(&a.sums[unit], units, 0.0f);
        }
        for (int from = 0; from < n; from += step) {
            F highest = {};
            for (int i = from; i < from + step; i += kLanes) {
                F values;
                memcpy(&values, x + chunk * kChunk + i, sizeof values);
                values = values < 0 ? -values : values;
                highest = values > highest ? values : highest;
            }
            float max = 0, scale;
            for (int lane = 0; lane < kLanes; lane++) max = std::max(max, ((const float *) &highest)[lane]);
            const float inverse = max > 0 ? 127 / max : 0;
            if (Format::kSuper) {
                scale = max > 0 ? 1 / inverse : 0;
            } else {
                scale = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtps_ph(_mm_set_ss(max / 127), _MM_FROUND_TO_NEAREST_INT)));
            }
            for (int begin = from; begin < from + step; begin += Format::kUnit) {
                I sums = {};
                int32_t sum = 0;
                for (int i = begin; i < begin + Format::kUnit; i += kLanes) {
                    F values;
                    memcpy(&values, x + chunk * kChunk + i, sizeof values);
                    values = values * inverse + 0x1.8p23f;  // rounds to an integer, in the lowest bits
                    const I integers = ((I) values & 0x7fffff) - 0x400000;
                    sums += integers;
                    const auto narrow = __builtin_convertvector(integers, Narrow);
                    memcpy(numbers + i, &narrow, sizeof narrow);
                }
                for (int lane = 0; lane < kLanes; lane++) sum += ((const int32_t *) &sums)[lane];
                const int64_t unit = at * kMaxUnits + begin / Format::kUnit;
                a.starts[unit] = -Format::kOffset * sum;
                a.scales[unit] = scale;
                a.sums[unit] = scale * sum;
            }
        }
    }
}

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

// Results of some rows of activations, while they are multiplied with a tile.
template <class Format, int R> struct Sums {
    using Scale = typename Format::Scale;
    static constexpr int kSteps = Format::kUnit / 4;
    // Whether minima come after all products: blocks of one unit have no other order, and many rows leave no registers.
    static constexpr bool kMinimaLast = Format::kHasMinima && (R == kMaxRows || !Format::kSuper);
    static constexpr bool kScalesNumbers = Format::kScalesAreSmall && R > 2;
    const Chunk x;
    Line * lines;
    F sums[R];
    I integers[R] = {};  // of a block, without its scale

    GGPIPE_TARGET GGPIPE_INLINE Sums(const Activations & a, int64_t chunk, int64_t row, Line * lines)
        : x(a, chunk * a.n_rows + row), lines(lines) {
        for (int r = 0; r < R; r++) memcpy(&sums[r], &lines[r], sizeof sums[r]);
    }
    GGPIPE_TARGET GGPIPE_INLINE void add(int u, const U * weights, Scale scale, F minimum) {
        __m512i products[R];
        GGPIPE_UNROLLED(r, R) {
            products[r] = kScalesNumbers ? (__m512i) integers[r] : _mm512_set1_epi32(x.starts[r * kMaxUnits + u]);
        }
        GGPIPE_UNROLLED(step, kSteps) {
            __m512i numbers = (__m512i) weights[step];
            if constexpr (kScalesNumbers) numbers = _mm512_mullo_epi16(numbers, (__m512i) (scale | scale << 16));
            GGPIPE_UNROLLED(r, R) products[r] = GGPIPE_DOT_BYTES(products[r], numbers, x.four(r, u * kSteps + step));
        }
        GGPIPE_UNROLLED(r, R) add(r, u, (I) products[r], scale);
        if (!kMinimaLast) add_minimum(u, minimum);
    }
    GGPIPE_TARGET GGPIPE_INLINE void add_minimum(int u, F minimum) {
        for (int r = 0; r < R && Format::kHasMinima; r++) sums[r] = multiply_add(minimum, F{} + x.sums[r * kMaxUnits + u], sums[r]);
    }
    GGPIPE_TARGET GGPIPE_INLINE void add(int r, int u, I product, Scale scale) {
        if constexpr (kScalesNumbers) integers[r] = product;
        else if constexpr (Format::kSuper) integers[r] += product * scale;
        else sums[r] = multiply_add(floats(product), scale * x.scales[r * kMaxUnits + u], sums[r]);
    }
    // After all units: their minima, and the block's scale.
    GGPIPE_TARGET GGPIPE_INLINE void end(const F * minima, F scale) {
        for (int u = 0; u < kChunk / Format::kUnit && kMinimaLast; u++) add_minimum(u, minima[u]);
        for (int r = 0; r < R; r++) {
            if constexpr (Format::kSuper) sums[r] = multiply_add(floats(integers[r]), scale * x.scales[r * kMaxUnits], sums[r]);
            memcpy(&lines[r], &sums[r], sizeof sums[r]);
        }
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
    F scale, minima[kBlocks * kUnits];
    _Pragma("GCC unroll 1") for (int block = 0; block < kBlocks; block++, from += Format::kBytes) {
        __m256i fours[R][4];
        for (int i = 0; i < 4; i++) {
            for (int r = 0; r < R; r++) {
                __m256i rows[4];
                for (int j = 0; j < 4; j++) {
                    rows[j] = Format::row(from[4 * i + j], sums.x.numbers + r * kChunk + block * Format::kBlock, sums.x.starts + r * kMaxUnits);
                }
                fours[r][i] = in_halves(rows);
            }
        }
        scale = Format::scale(from, minima[block]);
        for (int r = 0; r < R; r++) {
            if constexpr (Format::kSuper) sums.integers[r] = added_up(fours[r]);
            else sums.add(r, block, added_up(fours[r]) + sums.x.starts[r * kMaxUnits + block], scale);
        }
        for (int u = 0; u < kUnits; u++) prefetch(block * kUnits + u);
    }
    sums.end(minima, scale);
}

// The results of 16 rows of weights, from `first` on, for `n` rows of activations, from `row` on.
template <class Format> GGPIPE_TARGET void multiply(const Weights & weights, int64_t first, const Activations & a, int64_t row, size_t n,
                                                   float * const * to) {
    constexpr int kUnits = kChunk / Format::kUnit;
    static thread_local std::vector<Line> kept;
    kept.assign(n + kSpareRows, Line{});  // results of a spare row are dropped
    Line * const lines = kept.data();  // each access to a thread_local variable is a call
    using From = typename Format::From;
    constexpr int kPieces = kLanes / From::kGroup, kBytes = kChunk / Format::kBlock * Format::kBytes * From::kGroup;  // of a piece
    constexpr int kUnitBytes = kPieces * kBytes / kUnits;
    const size_t stride = weights.row_bytes * From::kGroup;
    uint8_t copies[kPieces][kBytes];  // where there are not enough rows or columns for a tile
    const int n_rows = std::min<int64_t>(kLanes, weights.n_rows - first);
    // Into the second cache, in the order of their addresses: a later tile. The CPU does not see the pattern of 16 rows.
    const size_t n_bytes = weights.n_rows * weights.row_bytes, at = first * weights.row_bytes + kPieces * stride + kAhead;
    const uint8_t * ahead = at < n_bytes ? weights.data + at : weights.next + (at - n_bytes);
    const auto prefetch = [&](int u) GGPIPE_TARGET GGPIPE_INLINE {
        for (int i = 0; i < kUnitBytes; i += 64) __builtin_prefetch(ahead + u * kUnitBytes + i, 0, 2);
    };
    for (int64_t chunk = 0; chunk < a.n_chunks; chunk++, ahead += kUnits * kUnitBytes) {
        const int n_columns = std::min<int64_t>(kChunk, a.n_columns - chunk * kChunk);
        const uint8_t * data = weights.data + first * weights.row_bytes + chunk * kBytes;
        From from(data, stride);
        if (n_columns < kChunk || n_rows < kLanes) {
            memset(copies, 0, sizeof copies);
            for (int i = 0; i < n_rows / From::kGroup; i++) memcpy(copies[i], data + i * stride, kBytes * n_columns / kChunk);
            from = From(copies[0], kBytes);
        }
        if constexpr (Format::kRowByRow > 0) {
            if (n <= Format::kRowByRow) {
                with_count<Format::kRowByRow>(n, [&](auto count) GGPIPE_TARGET GGPIPE_INLINE {
                    Sums<Format, count()> sums(a, chunk, row, lines);
                    add_row_by_row(sums, from, prefetch);
                });
                continue;
            }
        }
        F minima[kUnits];
        if (n <= kMaxRows) {
            with_count<kMaxRows>(n, [&](auto count) GGPIPE_TARGET GGPIPE_INLINE {
                Sums<Format, count()> sums(a, chunk, row, lines);
                const F scale = unpack<Format>(from, [&](int u, const U * numbers, auto scale, F minimum) GGPIPE_TARGET GGPIPE_INLINE {
                    sums.add(u, numbers, scale, minimum);
                    minima[u] = minimum;
                    prefetch(u);
                });
                sums.end(minima, scale);
            });
            continue;
        }
        U tile[kUnits][Format::kUnit / 4];
        typename Format::Scale scales[kUnits];
        const F scale = unpack<Format>(from, [&](int u, const U * numbers, auto scale, F minimum) GGPIPE_TARGET GGPIPE_INLINE {
            memcpy(tile[u], numbers, sizeof tile[u]);
            scales[u] = scale;
            minima[u] = minimum;
            prefetch(u);
        });
        for (size_t i = 0; i < n; i += kMaxRows) {
            with_count<kMaxRows>(n - i, [&](auto count) GGPIPE_TARGET GGPIPE_INLINE {
                Sums<Format, count()> sums(a, chunk, row + i, lines + i);
                for (int u = 0; u < kUnits; u++) sums.add(u, tile[u], scales[u], minima[u]);
                sums.end(minima, scale);
            });
        }
    }
    for (size_t i = 0; i < n; i++) {
        if (n_rows == kLanes) memcpy(to[i] + first, &lines[i], sizeof(Line));  // a store, not a call
        else memcpy(to[i] + first, &lines[i], n_rows * sizeof(float));
    }
}

template <class Format> const Kernel * kernel_with(const char * name) {
    static const Kernel kernel{name, Format::From::kGroup > 1, kLanes, kChunk, quantize<Format>, multiply<Format>};
    return &kernel;
}

}  // namespace ggpipe::GGPIPE_TILES
#endif
