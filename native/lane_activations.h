// Activations, quantized for the kernels in tiles.h.
#pragma once

#ifdef __x86_64__
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "few_bits.h"

namespace ggpipe::GGPIPE_TILES {

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
            const float max = _mm512_reduce_max_ps(highest), inverse = max > 0 ? 127 / max : 0;
            float scale;
            if (Format::kSuper) {
                scale = max > 0 ? 1 / inverse : 0;
            } else {
                scale = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtps_ph(_mm_set_ss(max / 127), _MM_FROUND_TO_NEAREST_INT)));
            }
            for (int begin = from; begin < from + step; begin += Format::kUnit) {
                I sums = {};
                for (int i = begin; i < begin + Format::kUnit; i += kLanes) {
                    F values;
                    memcpy(&values, x + chunk * kChunk + i, sizeof values);
                    values = values * inverse + 0x1.8p23f;  // rounds to an integer, in the lowest bits
                    const I integers = ((I) values & 0x7fffff) - 0x400000;
                    sums += integers;
                    const auto narrow = __builtin_convertvector(integers, Narrow);
                    memcpy(numbers + i, &narrow, sizeof narrow);
                }
                if constexpr (Format::kColumnsOfByte > 1) interleave<Format::kColumnsOfByte>(numbers + begin);
                const int32_t sum = _mm512_reduce_add_epi32((__m512i) sums);
                const int64_t unit = at * kMaxUnits + begin / Format::kUnit;
                a.starts[unit] = -Format::kOffset * sum;
                a.scales[unit] = scale;
                a.sums[unit] = scale * sum;
            }
        }
    }
}

}  // namespace ggpipe::GGPIPE_TILES
#endif
