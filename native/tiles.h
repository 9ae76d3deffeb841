// Tiles of weights times quantized activations; see products.cpp.
#pragma once

#ifdef __x86_64__
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "weights.h"

namespace ggpipe {

constexpr int kMaxUnits = 16, kMaxStarts = 64;  // of a tile

struct alignas(64) Line { float results[kLanes]; };
struct Weights {
    const uint8_t * data;
    int64_t n_rows;
    size_t row_bytes;
};
struct Activations {  // quantized as a format of weights wants them: chunk by chunk, and in these row by row
    int64_t n_rows, n_columns, n_chunks;
    int8_t * numbers;        // kChunk of each row
    int32_t * starts;        // of each unit, or of each four columns: what makes up for the offset of the weights' numbers
    float * scales, * sums;  // of each unit; a sum is that of its values
};
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
            std::fill_n(&a.starts[at * kMaxStarts], kMaxStarts, 0);
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
                if (Format::kQuads) {
                    for (int i = begin; i < begin + Format::kUnit; i += 4) {
                        a.starts[at * kMaxStarts + i / 4] = -Format::kOffset * (numbers[i] + numbers[i + 1] + numbers[i + 2] + numbers[i + 3]);
                    }
                } else {
                    a.starts[at * kMaxStarts + begin / Format::kUnit] = -Format::kOffset * sum;
                }
                a.scales[unit] = scale;
                a.sums[unit] = scale * sum;
            }
        }
    }
}

// A chunk of some rows of activations.
template <int R> struct Chunk {
    const int8_t * numbers[R];
    const int32_t * starts[R];
    const float * scales[R], * sums[R];

    GGPIPE_TARGET GGPIPE_INLINE Chunk(const Activations & a, int64_t chunk, const int32_t * rows) {
        for (int r = 0; r < R; r++) {
            const int64_t at = chunk * a.n_rows + rows[r];
            numbers[r] = a.numbers + at * kChunk;
            starts[r] = a.starts + at * kMaxStarts;
            scales[r] = a.scales + at * kMaxUnits;
            sums[r] = a.sums + at * kMaxUnits;
        }
    }
    GGPIPE_TARGET GGPIPE_INLINE __m512i four(int r, int i) const {  // columns 4 * i to 4 * i + 3, for all lanes
        int32_t numbers_of_four;
        memcpy(&numbers_of_four, numbers[r] + 4 * i, 4);
        return _mm512_set1_epi32(numbers_of_four);
    }
};

// Results of some rows of activations, while they are multiplied with a tile.
template <int R, int kUnit, bool kHasMinima> struct Sums {
    static constexpr int kMaxRows = 8, kLines = 1;  // of each row
    const Chunk<R> x;
    Line * lines;
    F sums[R];

    GGPIPE_TARGET GGPIPE_INLINE Sums(const Activations & a, int64_t chunk, const int32_t * rows, Line * lines)
        : x(a, chunk, rows), lines(lines) {
        for (int r = 0; r < R; r++) memcpy(&sums[r], &lines[r], sizeof sums[r]);
    }
    GGPIPE_TARGET GGPIPE_INLINE void store() {
        for (int r = 0; r < R; r++) memcpy(&lines[r], &sums[r], sizeof sums[r]);
    }
    GGPIPE_TARGET GGPIPE_INLINE void add(int u, const U * weights, F scale, F minimum) {
        constexpr int kSteps = kUnit / 4;
        __m512i products[R];
        for (int r = 0; r < R; r++) products[r] = _mm512_set1_epi32(x.starts[r][u]);
        for (int step = 0; step < kSteps; step++) {
            for (int r = 0; r < R; r++) {
                products[r] = _mm512_dpbusd_epi32(products[r], (__m512i) weights[step], x.four(r, u * kSteps + step));
            }
        }
        for (int r = 0; r < R; r++) {
            sums[r] += __builtin_convertvector((I) products[r], F) * (scale * x.scales[r][u]);
            if (kHasMinima) sums[r] += minimum * x.sums[r][u];
        }
    }
};

// The same with the bits of ggml's kernel for one row.
template <int R> struct QuadSums {
    static constexpr int kMaxRows = 2, kLines = 8;
    const Chunk<R> x;
    Line * lines;
    __m512 sums[R][8];

    GGPIPE_TARGET GGPIPE_INLINE QuadSums(const Activations & a, int64_t chunk, const int32_t * rows, Line * lines)
        : x(a, chunk, rows), lines(lines) {
        memcpy(sums, lines, sizeof sums);
    }
    GGPIPE_TARGET GGPIPE_INLINE void store() { memcpy(lines, sums, sizeof sums); }
    GGPIPE_TARGET GGPIPE_INLINE void add(int u, const U * weights, F scale, F) {
        __m512 scales[R];
        for (int r = 0; r < R; r++) scales[r] = (__m512) (scale * x.scales[r][u]);
        for (int i = 0; i < 8; i++) {
            for (int r = 0; r < R; r++) {
                const __m512i start = _mm512_set1_epi32(x.starts[r][u * 8 + i]);
                const __m512i product = _mm512_dpbusd_epi32(start, (__m512i) weights[i], x.four(r, u * 8 + i));
                sums[r][i] = _mm512_fmadd_ps(scales[r], _mm512_cvtepi32_ps(product), sums[r][i]);
            }
        }
    }
    GGPIPE_TARGET static Line total(const Line * lines) {
        F s[8];
        memcpy(s, lines, sizeof s);
        const F all = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
        Line line;
        memcpy(&line, &all, sizeof line);
        return line;
    }
};

template <class Format, int R> using SumsOf =
    std::conditional_t<Format::kQuads, QuadSums<R>, Sums<R, Format::kUnit, Format::kHasMinima>>;

// Calls `function` with a number of rows that is a constant: at least n, or kMax.
template <int kMax, class Function> GGPIPE_TARGET GGPIPE_INLINE inline void with_count(size_t n, const Function & function) {
    if (n == 1) function(std::integral_constant<int, 1>());
    else if (n == 2 || kMax == 2) function(std::integral_constant<int, 2>());
    else if (n <= 4) function(std::integral_constant<int, std::min(4, kMax)>());
    else function(std::integral_constant<int, kMax>());
}

template <class Format> struct Tile {
    U numbers[kChunk / Format::kUnit][Format::kUnit / 4];
    F scales[kChunk / Format::kUnit], minima[kChunk / Format::kUnit];
};

// The results of 16 rows of weights, from `first` on, for some rows of activations.
template <class Format> GGPIPE_TARGET void multiply(const Weights & weights, int64_t first, const Activations & a,
                                                   const std::vector<int32_t> & rows, float * const * to) {
    constexpr int kMax = SumsOf<Format, 1>::kMaxRows, kLines = SumsOf<Format, 1>::kLines;
    // Padded: row 0 again, in place of those that a constant number of rows has too many.
    static thread_local std::vector<int32_t> padded;
    static thread_local std::vector<Line> lines;
    padded = rows;
    padded.resize(rows.size() + kMax - 1, rows[0]);
    lines.assign(padded.size() * kLines, Line{});
    using From = typename Format::From;
    constexpr int kPieces = kLanes / From::kGroup, kBytes = kChunk / Format::kBlock * Format::kBytes * From::kGroup;  // of a piece
    const size_t stride = weights.row_bytes * From::kGroup;
    uint8_t copies[kPieces][kBytes];  // where there are not enough rows or columns for a tile
    const int n_rows = std::min<int64_t>(kLanes, weights.n_rows - first);
    for (int64_t chunk = 0; chunk < a.n_chunks; chunk++) {
        const int n_columns = std::min<int64_t>(kChunk, a.n_columns - chunk * kChunk);
        const uint8_t * data = weights.data + first * weights.row_bytes + chunk * kBytes;
        From from(data, stride);
        if (n_columns < kChunk || n_rows < kLanes) {
            memset(copies, 0, sizeof copies);
            for (int i = 0; i < n_rows / From::kGroup; i++) memcpy(copies[i], data + i * stride, kBytes * n_columns / kChunk);
            from = From(copies[0], kBytes);
        } else {
            // Into the second cache: after a row's last chunk, the first ones of the same lane in the next tile.
            constexpr int kAhead = (864 * From::kGroup + kBytes - 1) / kBytes;
            const uint8_t * next = data + kAhead * kBytes;
            if (chunk + kAhead >= a.n_chunks) next += kPieces * stride - a.n_chunks * kBytes;
            for (int piece = 0; piece < kPieces; piece++, next += stride) {
                for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(next + i, 0, 2);
            }
        }
        if (rows.size() <= kMax) {
            with_count<kMax>(rows.size(), [&](auto count) GGPIPE_TARGET GGPIPE_INLINE {
                SumsOf<Format, count()> sums(a, chunk, padded.data(), lines.data());
                Format::unpack(from, [&](int u, const U * numbers, F scale, F minimum) GGPIPE_TARGET GGPIPE_INLINE {
                    sums.add(u, numbers, scale, minimum);
                });
                sums.store();
            });
            continue;
        }
        Tile<Format> tile;
        Format::unpack(from, [&](int u, const U * numbers, F scale, F minimum) GGPIPE_TARGET GGPIPE_INLINE {
            memcpy(tile.numbers[u], numbers, sizeof tile.numbers[u]);
            tile.scales[u] = scale;
            tile.minima[u] = minimum;
        });
        for (size_t row = 0; row < rows.size(); row += kMax) {
            with_count<kMax>(rows.size() - row, [&](auto count) GGPIPE_TARGET GGPIPE_INLINE {
                SumsOf<Format, count()> sums(a, chunk, padded.data() + row, lines.data() + row * kLines);
                for (int u = 0; u < kChunk / Format::kUnit; u++) sums.add(u, tile.numbers[u], tile.scales[u], tile.minima[u]);
                sums.store();
            });
        }
    }
    for (size_t i = 0; i < rows.size(); i++) {
        if constexpr (Format::kQuads) lines[i * kLines] = QuadSums<1>::total(&lines[i * kLines]);
        memcpy(to[i] + first, &lines[i * kLines], n_rows * sizeof(float));
    }
}

}  // namespace ggpipe
#endif
