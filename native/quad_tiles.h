// Tiles of weights, as quads, times quantized activations, with AVX2; see products.cpp.
#pragma once

#ifdef __x86_64__
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "quad_formats.h"

namespace ggpipe::avx2 {

// Numbers of a chunk of activations. If wide, of each 8 columns the even ones come before the odd ones, as quads have them.
template <class Format> using Number = std::conditional_t<Format::kWide, int16_t, int8_t>;
template <class Format> constexpr int kNumberBytes = kChunk * sizeof(Number<Format>);

GGPIPE_AVX2 GGPIPE_INLINE inline float highest_of(const float * x, int n) {
    F highest = _mm256_setzero_ps();
    const F sign = _mm256_set1_ps(-0.0f);
    for (int i = 0; i < n; i += kLanes) highest = _mm256_max_ps(highest, _mm256_andnot_ps(sign, _mm256_loadu_ps(x + i)));
    float lanes[kLanes];
    memcpy(lanes, &highest, sizeof lanes);
    return *std::max_element(lanes, lanes + kLanes);
}
// Rounds numbers of a unit, and returns their sum.
template <class Format> GGPIPE_AVX2 GGPIPE_INLINE inline int32_t round_unit(const float * x, float inverse, Number<Format> * to) {
    V sums = _mm256_setzero_si256();
    for (int i = 0; i < Format::kUnit; i += kLanes) {
        const V integers = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(inverse)));
        sums = sum_of(sums, integers);
        const __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(integers), _mm256_extracti128_si256(integers, 1));
        if constexpr (Format::kWide) {
            const __m128i even_first = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
            _mm_storeu_si128((__m128i *) (to + i), _mm_shuffle_epi8(narrow, even_first));
        } else {
            _mm_storel_epi64((__m128i *) (to + i), _mm_packs_epi16(narrow, narrow));
        }
    }
    int32_t lanes[kLanes];
    memcpy(lanes, &sums, sizeof lanes);
    return std::accumulate(lanes, lanes + kLanes, 0);
}

// Quantize one row of `a`. If kSuper, `starts` has sums of units, 16 bits each.
template <class Format> GGPIPE_AVX2 void quantize(const float * x, int64_t row, const Activations & a) {
    for (int64_t chunk = 0; chunk < a.n_chunks; chunk++, x += kChunk) {
        const int64_t at = chunk * a.n_rows + row;
        const int n = std::min<int64_t>(kChunk, a.n_columns - chunk * kChunk);
        auto * numbers = (Number<Format> *) (a.numbers + at * kNumberBytes<Format>);
        int32_t * starts = a.starts + at * kMaxUnits;
        float * scales = a.scales + at * kMaxUnits, * sums = a.sums + at * kMaxUnits;
        if (n < kChunk) {  // the rest adds nothing
            memset(numbers + n, 0, (kChunk - n) * sizeof *numbers);
            std::fill_n(starts, kMaxUnits, 0);
            std::fill_n(scales, kMaxUnits, 0.0f);
            std::fill_n(sums, kMaxUnits, 0.0f);
        }
        for (int from = 0; from < n; from += Format::kStep) {
            const float max = highest_of(x + from, Format::kStep), inverse = max > 0 ? 127 / max : 0;
            const float scale = Format::kStep == kChunk ? (max > 0 ? 1 / inverse : 0)
                                                        : _cvtsh_ss(_cvtss_sh(max / 127, _MM_FROUND_TO_NEAREST_INT));
            for (int begin = from; begin < from + Format::kStep; begin += Format::kUnit) {
                const int unit = begin / Format::kUnit;
                const int32_t sum = round_unit<Format>(x + begin, inverse, numbers + begin);
                if constexpr (Format::kSuper) {
                    const int16_t narrow = sum;
                    memcpy((char *) starts + 2 * unit, &narrow, sizeof narrow);
                } else {
                    starts[unit] = -Format::kOffset * sum;
                }
                scales[unit] = Format::kWide ? scale / 256 : scale;  // for the factor that widening leaves
                sums[unit] = scale * sum;
            }
        }
    }
}

// Results of R rows of activations, while a chunk of them is multiplied with a tile.
template <class Format, int R> struct Sums {
    static constexpr int kGroups = Format::kUnit / 8;
    const int8_t * numbers[R];
    const int32_t * starts[R];
    const float * scales[R], * minima[R];
    F * results;       // of each row
    V a[R], b[R];      // kSuper: integers of the chunk so far
    F sums[R];         // otherwise

    GGPIPE_AVX2 GGPIPE_INLINE Sums(const Activations & x, int64_t chunk, const int32_t * rows, F * results) : results(results) {
        for (int r = 0; r < R; r++) {
            const int64_t at = chunk * x.n_rows + rows[r];
            numbers[r] = x.numbers + at * kNumberBytes<Format>;
            starts[r] = x.starts + at * kMaxUnits;
            scales[r] = x.scales + at * kMaxUnits;
            minima[r] = x.sums + at * kMaxUnits;
            a[r] = b[r] = _mm256_setzero_si256();
            sums[r] = results[r];
        }
    }
    GGPIPE_AVX2 GGPIPE_INLINE V eight(int r, int at) const {  // bytes, in all quarters
        int64_t bytes;
        memcpy(&bytes, numbers[r] + at, sizeof bytes);
        return _mm256_set1_epi64x(bytes);
    }
    // Products with a unit, in pairs of 16-bit numbers; wide: in 32 bits.
    GGPIPE_AVX2 GGPIPE_INLINE void multiply(int u, const V * quads, V * to_a, V * to_b) const {
        if constexpr (Format::kWide) {
            for (int i = 0; i < 2 * kGroups; i++) {
                for (int r = 0; r < R; r++) {
                    const V x = eight(r, u * Format::kUnit * 2 + 8 * i);
                    const V one = _mm256_madd_epi16(quads[2 * i], x), two = _mm256_madd_epi16(quads[2 * i + 1], x);
                    to_a[r] = i ? sum_of(to_a[r], one) : one;
                    to_b[r] = i ? sum_of(to_b[r], two) : two;
                }
            }
        } else {
            for (int i = 0; i < kGroups; i++) {
                for (int r = 0; r < R; r++) {
                    const V x = eight(r, u * Format::kUnit + 8 * i);
                    const V one = _mm256_maddubs_epi16(quads[2 * i], x), two = _mm256_maddubs_epi16(quads[2 * i + 1], x);
                    to_a[r] = i ? _mm256_add_epi16(to_a[r], one) : one;
                    to_b[r] = i ? _mm256_add_epi16(to_b[r], two) : two;
                }
            }
        }
    }
    GGPIPE_AVX2 GGPIPE_INLINE void add(int u, const V * quads, F scale, F minimum) {
        V to_a[R], to_b[R];
        multiply(u, quads, to_a, to_b);
        for (int r = 0; r < R; r++) {
            if constexpr (!Format::kWide) {
                to_a[r] = _mm256_madd_epi16(to_a[r], _mm256_set1_epi16(1));
                to_b[r] = _mm256_madd_epi16(to_b[r], _mm256_set1_epi16(1));
            }
            V products = in_lanes(to_a[r], to_b[r]);
            if constexpr (Format::kOffset != 0) products = sum_of(products, _mm256_set1_epi32(starts[r][u]));
            sums[r] = _mm256_fmadd_ps(floats(products), _mm256_mul_ps(scale, _mm256_broadcast_ss(&scales[r][u])), sums[r]);
            if constexpr (Format::kHasMinima) sums[r] = _mm256_fmadd_ps(minimum, _mm256_broadcast_ss(&minima[r][u]), sums[r]);
        }
    }
    template <int kSecond> GGPIPE_AVX2 GGPIPE_INLINE void add(int u, const V * quads, V pair) {
        V to_a[R], to_b[R], scale_a, scale_b;
        multiply(u, quads, to_a, to_b);
        in_quads<kSecond>(pair, scale_a, scale_b);
        for (int r = 0; r < R; r++) {
            a[r] = sum_of(a[r], _mm256_madd_epi16(to_a[r], scale_a));
            b[r] = sum_of(b[r], _mm256_madd_epi16(to_b[r], scale_b));
        }
    }
    GGPIPE_AVX2 GGPIPE_INLINE V with_sums(int r, const V * pairs) const {  // of units
        V total = _mm256_setzero_si256();
        for (int i = 0; i < kChunk / Format::kUnit / 2; i++) {
            total = sum_of(total, _mm256_madd_epi16(pairs[i], _mm256_set1_epi32(starts[r][i])));
        }
        return total;
    }
    GGPIPE_AVX2 GGPIPE_INLINE void end(const Block & block) {
        for (int r = 0; r < R; r++) {
            if constexpr (Format::kSuper) {
                V products = in_lanes(a[r], b[r]);
                if constexpr (Format::kOffset != 0) {
                    const V offset = _mm256_mullo_epi32(with_sums(r, block.scales), _mm256_set1_epi32(Format::kOffset));
                    products = _mm256_sub_epi32(products, offset);
                }
                const F scale = _mm256_broadcast_ss(&scales[r][0]);
                sums[r] = _mm256_fmadd_ps(floats(products), _mm256_mul_ps(block.scale, scale), sums[r]);
                if constexpr (Format::kHasMinima) {
                    sums[r] = _mm256_fmadd_ps(floats(with_sums(r, block.minima)), _mm256_mul_ps(block.minimum, scale), sums[r]);
                }
            }
            results[r] = sums[r];
        }
    }
};

// Calls `emit` for each unit of a chunk of weights with its quads, widened if they are to be.
template <class Format, class Emit>
GGPIPE_AVX2 GGPIPE_INLINE inline void unpack(const typename Format::From & from, const Emit & emit) {
    if constexpr (Format::kWide) {
        Format::unpack(from, [&](int u, const V * quads, F scale, F minimum) GGPIPE_AVX2 GGPIPE_INLINE {
            V wide[16];
            for (int i = 0; i < 8; i++) {  // times 256
                V * to = wide + i / 2 * 4 + i % 2;
                to[0] = _mm256_slli_epi16(quads[i], 8);
                to[2] = _mm256_and_si256(quads[i], _mm256_set1_epi16(-256));
            }
            emit(u, wide, scale, minimum);
        });
    } else {
        Format::unpack(from, emit);
    }
}

// A chunk of eight rows of weights, unpacked.
template <class Format> struct Tile {
    static constexpr int kUnits = kChunk / Format::kUnit, kQuads = Format::kUnit / 4 * (Format::kWide ? 2 : 1);
    V quads[kUnits][kQuads];
    F scales[kUnits], minima[kUnits];

    template <class Prefetch> GGPIPE_AVX2 GGPIPE_INLINE void fill(const typename Format::From & from, const Prefetch & prefetch) {
        if constexpr (Format::kSuper) {
            unpack<Format>(from, [&](int u, const V * numbers) GGPIPE_AVX2 GGPIPE_INLINE {
                memcpy(quads[u], numbers, sizeof quads[u]);
                prefetch(u);
            });
        } else {
            unpack<Format>(from, [&](int u, const V * numbers, F scale, F minimum) GGPIPE_AVX2 GGPIPE_INLINE {
                memcpy(quads[u], numbers, sizeof quads[u]);
                scales[u] = scale;
                minima[u] = minimum;
                prefetch(u);
            });
        }
    }
    template <int R> GGPIPE_AVX2 GGPIPE_INLINE void multiply(Sums<Format, R> & sums, const Block & block) const {
        _Pragma("GCC unroll 1") for (int u = 0; u < kUnits; u += 2) {
            if constexpr (Format::kSuper) {
                sums.template add<0>(u, quads[u], block.scales[u / 2]);
                sums.template add<1>(u + 1, quads[u + 1], block.scales[u / 2]);
            } else {
                for (int i = u; i < u + 2; i++) sums.add(i, quads[i], scales[i], minima[i]);
            }
        }
        sums.end(block);
    }
};

// Multiplies units as they are unpacked.
template <class Format, int R, class Prefetch>
GGPIPE_AVX2 GGPIPE_INLINE inline void multiply_units(const typename Format::From & from, Sums<Format, R> & sums, const Block & block,
                                                    const Prefetch & prefetch) {
    if constexpr (Format::kSuper) {
        unpack<Format>(from, [&](int u, const V * quads) GGPIPE_AVX2 GGPIPE_INLINE {
            if (u % 2) sums.template add<1>(u, quads, block.scales[u / 2]);
            else sums.template add<0>(u, quads, block.scales[u / 2]);
            prefetch(u);
        });
    } else {
        unpack<Format>(from, [&](int u, const V * quads, F scale, F minimum) GGPIPE_AVX2 GGPIPE_INLINE {
            sums.add(u, quads, scale, minimum);
            prefetch(u);
        });
    }
    sums.end(block);
}

template <class Format> GGPIPE_AVX2 void multiply(const Weights & weights, int64_t first, const Activations & a,
                                                 const std::vector<int32_t> & rows, float * const * to) {
    using From = typename Format::From;
    struct alignas(32) Line { float results[kLanes]; };
    static thread_local std::vector<Line> lines;
    lines.assign(rows.size(), Line{});
    F * results = (F *) lines.data();
    constexpr int kUnits = kChunk / Format::kUnit;
    constexpr int kPieces = kLanes / From::kGroup, kBytes = kChunk / Format::kBlock * Format::kBytes * From::kGroup;  // of a piece
    constexpr int kUnitBytes = kPieces * kBytes / kUnits;
    const size_t stride = weights.row_bytes * From::kGroup;
    uint8_t copies[kPieces][kBytes];  // where there are not enough rows or columns for a tile
    const int n_rows = std::min<int64_t>(kLanes, weights.n_rows - first);
    // Into the second cache, in the order of their addresses: a later tile. The CPU does not see the pattern of eight rows.
    const size_t n_bytes = weights.n_rows * weights.row_bytes, at = first * weights.row_bytes + kPieces * stride + kAhead;
    const uint8_t * ahead = at < n_bytes ? weights.data + at : weights.next + (at - n_bytes);
    const auto prefetch = [&](int u) GGPIPE_AVX2 GGPIPE_INLINE {
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
        Block block;
        if constexpr (Format::kSuper) Format::read(from, block);
        if (rows.size() == 1) {
            Sums<Format, 1> sums(a, chunk, rows.data(), results);
            multiply_units(from, sums, block, prefetch);
        } else if (rows.size() == 2) {
            Sums<Format, 2> sums(a, chunk, rows.data(), results);
            multiply_units(from, sums, block, prefetch);
        } else {
            Tile<Format> tile;
            tile.fill(from, prefetch);
            size_t row = 0;
            const auto multiply_with = [&](auto count) GGPIPE_AVX2 GGPIPE_INLINE {
                for (; row + count() <= rows.size(); row += count()) {
                    Sums<Format, count()> sums(a, chunk, rows.data() + row, results + row);
                    tile.multiply(sums, block);
                }
            };
            multiply_with(std::integral_constant<int, 4>());
            multiply_with(std::integral_constant<int, 2>());
            multiply_with(std::integral_constant<int, 1>());
        }
    }
    for (size_t i = 0; i < rows.size(); i++) {
        const F ordered = From::in_order(results[i]);
        memcpy(to[i] + first, &ordered, n_rows * sizeof(float));
    }
}

}  // namespace ggpipe::avx2
#endif
