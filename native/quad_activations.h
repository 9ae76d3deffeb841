// Activations, quantized for the kernels in quad_tiles.h.
#pragma once

#ifdef __x86_64__
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "quads.h"

namespace ggpipe::GGPIPE_QUADS {

// A chunk of a row of activations: all that a product with a tile reads of it is in one place.
template <class Format, bool kSuper = Format::kSuper> struct Numbers {
    static constexpr int kUnits = kChunk / Format::kUnit;
    int8_t numbers[kChunk];
    int32_t starts[kUnits];                // what makes up for the offset of the weights' numbers
    float scales[kUnits], sums[kUnits];    // a sum is that of the unit's values
};
template <class Format> struct Numbers<Format, true> {
    int8_t numbers[kChunk];
    int16_t sums[kChunk / Format::kUnit];  // of numbers
    float scale, unused;
};

GGPIPE_AVX2 GGPIPE_INLINE inline float highest_of(const float * x, int n) {
    F highest = _mm256_setzero_ps();
    const F sign = _mm256_set1_ps(-0.0f);
    for (int i = 0; i < n; i += kLanes) highest = _mm256_max_ps(highest, _mm256_andnot_ps(sign, _mm256_loadu_ps(x + i)));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(highest), _mm256_extractf128_ps(highest, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
// Rounds numbers of a unit, and returns their sum.
GGPIPE_AVX2 GGPIPE_INLINE inline int32_t round_unit(const float * x, int n, float inverse, int8_t * to) {
    V sums = _mm256_setzero_si256();
    for (int i = 0; i < n; i += kLanes) {
        const V integers = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(inverse)));
        sums = sum_of(sums, integers);
        const __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(integers), _mm256_extracti128_si256(integers, 1));
        _mm_storel_epi64((__m128i *) (to + i), _mm_packs_epi16(narrow, narrow));
    }
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}

// Quantize one row of `a`.
template <class Format> GGPIPE_AVX2 void quantize(const float * x, int64_t row, const Activations & a) {
    for (int64_t chunk = 0; chunk < a.n_chunks; chunk++, x += kChunk) {
        auto & to = ((Numbers<Format> *) a.numbers)[chunk * a.n_rows + row];
        const int n = std::min<int64_t>(kChunk, a.n_columns - chunk * kChunk);
        if (n < kChunk) memset(&to, 0, sizeof to);  // the rest adds nothing
        for (int from = 0; from < n; from += Format::kStep) {
            const float max = highest_of(x + from, Format::kStep), inverse = max > 0 ? 127 / max : 0;
            const float scale = Format::kStep == kChunk ? (max > 0 ? 1 / inverse : 0)
                                                        : _cvtsh_ss(_cvtss_sh(max / 127, _MM_FROUND_TO_NEAREST_INT));
            for (int begin = from; begin < from + Format::kStep; begin += Format::kUnit) {
                const int unit = begin / Format::kUnit;
                const int32_t sum = round_unit(x + begin, Format::kUnit, inverse, to.numbers + begin);
                if constexpr (Format::kColumnsOfByte > 1) interleave<Format::kColumnsOfByte>(to.numbers + begin);
                if constexpr (Format::kSuper) {
                    to.sums[unit] = sum;
                } else {
                    to.starts[unit] = -Format::kOffset * sum;
                    to.scales[unit] = scale;
                    to.sums[unit] = scale * sum;
                }
            }
            if constexpr (Format::kSuper) to.scale = scale;
        }
    }
}

}  // namespace ggpipe::GGPIPE_QUADS
#endif
