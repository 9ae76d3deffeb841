// Formats of one or two bits a weight, for quad_tiles.h; see quad_formats.h.
#pragma once

#ifdef __x86_64__
#include "quad_superblocks.h"

namespace ggpipe::GGPIPE_QUADS {

struct Q1_0 : Small<Rows, false> {  // a bit is -1 or 1, and the number 0 or 2
    static constexpr int kBytes = 18, kBlock = 128, kColumnsOfByte = 8, kOffset = 1, kHighest = 2;
    GGPIPE_UNPACK(Source rows, const Emit & emit) {
        GGPIPE_UNITS(rows.n_units / 4) {
            V words[4];
            rows.quads(2, words);
            const F scale = rows.halves(0);
            GGPIPE_UNROLLED(i, 4) {
                V numbers[8];
                GGPIPE_UNROLLED(j, 8) {  // in lanes, a bit of each column; in quads, two bits of each row
                    if constexpr (Source::kInLanes) {
                        numbers[j] = j ? _mm256_srli_epi32(words[i], j - 1) : _mm256_slli_epi32(words[i], 1);
                    } else {
                        const V two = words[i / 2 * 2 + j % 2], both = i % 2 ? _mm256_shuffle_epi32(two, 0xf5) : _mm256_shuffle_epi32(two, 0xa0);
                        const int64_t bit = j / 2 * 2, shifts = (bit - 1) | bit << 32;
                        numbers[j] = j < 2 ? _mm256_sllv_epi32(both, _mm256_set1_epi64x(1)) : _mm256_srlv_epi32(both, _mm256_set1_epi64x(shifts));
                    }
                    numbers[j] = _mm256_and_si256(numbers[j], all_bytes(2));
                }
                emit(4 * u + i, numbers, scale, F{});
            }
            rows += kBytes;
        }
    }
};
struct Q2_0 : Small<Rows, false> {
    static constexpr int kBytes = 18, kBlock = 64, kColumnsOfByte = 4, kOffset = 1, kHighest = 3;
    GGPIPE_UNPACK(Source rows, const Emit & emit) {
        GGPIPE_UNITS(rows.n_units / 2) {
            V both[4];
            rows.quads(2, both);
            const F scale = rows.halves(0);
            GGPIPE_UNROLLED(i, 2) {
                V numbers[8];
                GGPIPE_UNROLLED(j, 8) numbers[j] = two_bits(_mm256_srli_epi16(both[2 * i + j % 2], j / 2 * 2));
                emit(2 * u + i, numbers, scale, F{});
            }
            rows += kBytes;
        }
    }
};

// ---- one scale for 256 columns, whose numbers are 0, 1 or 2 -------------------------------------------------
template <int kBlockBytes> struct Ternary : Super<Rows, 32> {
    static constexpr int kBytes = kBlockBytes, kOffset = 1, kHighest = 2;
    GGPIPE_AVX2 GGPIPE_INLINE static void read(const Rows & rows, Block & block) {
        block.scale = rows.halves(kBytes - 2);
        for (int i = 0; i < 4; i++) block.scales[i] = _mm256_set1_epi16(1);
    }
};
struct TQ2_0 : Ternary<66> {
    GGPIPE_UNPACK(Source rows, const Emit & emit) {
        GGPIPE_UNITS(2) {
            V both[8], numbers[8];
            for (int i = 0; i < 2; i++) rows.quads(16 * i, both + 4 * i);
            GGPIPE_UNROLLED(part, 4) {
                for (int i = 0; i < 8; i++) numbers[i] = two_bits(_mm256_srli_epi16(both[i], 2 * part));
                emit(4 * u + part, numbers);
            }
            rows += 32;
        }
    }
};
// The first of a byte's five digits: the integer part of three times the byte, which is a fraction of 256. Then the byte has the others.
GGPIPE_AVX2 GGPIPE_INLINE inline V next_digit(V & bytes) {
    const V less = _mm256_subs_epu8(bytes, all_bytes(1));  // since averages are rounded up
    const V digit = _mm256_avg_epu8(less, _mm256_avg_epu8(less, _mm256_setzero_si256()));
    bytes = _mm256_add_epi8(bytes, _mm256_add_epi8(bytes, bytes));
    return two_bits(_mm256_srli_epi16(digit, 6));
}
struct TQ1_0 : Ternary<54> {
    GGPIPE_UNPACK(const Source & rows, const Emit & emit) {
        V bytes[8], numbers[8];
        for (int i = 0; i < 2; i++) rows.quads(16 * i, bytes + 4 * i);
        GGPIPE_UNITS(5) {
            for (int i = 0; i < 8; i++) numbers[i] = next_digit(bytes[i]);
            emit(u, numbers);
        }
        rows.quads(32, bytes);
        for (int unit : {5, 6}) {
            for (int i = 0; i < 8; i++) numbers[i] = next_digit(bytes[i % 4]);
            emit(unit, numbers);
        }
        for (int i = 0; i < 4; i++) numbers[i] = next_digit(bytes[i]);
        V last = rows.word(48), digits[4];
        for (V & digit : digits) digit = next_digit(last);
        for (int i = 0; i < 4; i += 2) {
            numbers[4 + i] = Source::kInLanes ? digits[i] : _mm256_unpacklo_epi32(digits[i], digits[i + 1]);
            numbers[5 + i] = Source::kInLanes ? digits[i + 1] : _mm256_unpackhi_epi32(digits[i], digits[i + 1]);
        }
        emit(7, numbers);
    }
};

}  // namespace ggpipe::GGPIPE_QUADS
#endif
