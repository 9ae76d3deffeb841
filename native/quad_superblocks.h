// Formats of quantized weights with a scale for 256 columns and integer scales of units; see quad_formats.h.
#pragma once

#ifdef __x86_64__
#include "quad_formats.h"

namespace ggpipe::GGPIPE_QUADS {

struct Block {
    V scales[8], minima[8];  // pairs of those of consecutive units, in lanes
    F scale, minimum;        // what they are multiplied by; the minimum's is negative
};
template <class Source, int kUnitColumns> struct Super {
    using From = Source;
    static constexpr int kUnit = kUnitColumns, kBlock = 256, kStep = 256, kOffset = 0, kColumnsOfByte = 1;
    static constexpr bool kSigned = false, kSuper = true, kHasMinima = false, kSignsApart = false;
};

struct RepackedQ4_K : Super<Eights, 32> {
    static constexpr int kBytes = 144, kHighest = 15;
    static constexpr bool kHasMinima = true;
    GGPIPE_AVX2 GGPIPE_INLINE static void read(const Eights & rows, Block & block) {
        block.scale = rows.halves(0);
        block.minimum = negative(rows.halves(16));
        for (int i = 0; i < 4; i++) {
            uint64_t scales[2], minima[2];
            for (int j = 0; j < 2; j++) rows.scales(32 + 24 * i + 12 * j, scales[j], minima[j]);
            block.scales[i] = Eights::pairs(scales[0], scales[1]);
            block.minima[i] = Eights::pairs(minima[0], minima[1]);
        }
    }
    GGPIPE_UNPACK(Source rows, const Emit & emit) {
        rows += 128;
        GGPIPE_UNITS(4) {
            V both[8], numbers[8];
            for (int i = 0; i < 2; i++) rows.quads(128 * i, both + 4 * i);
            for (int i = 0; i < 8; i++) numbers[i] = four_bits(both[i]);
            emit(2 * u, numbers);
            for (int i = 0; i < 8; i++) numbers[i] = upper_four_bits(both[i]);
            emit(2 * u + 1, numbers);
            rows += 256;
        }
    }
};
struct WithSixBits : Super<Rows, 32> {  // scales and minima of Q4_K and Q5_K
    static constexpr bool kHasMinima = true;
    GGPIPE_AVX2 GGPIPE_INLINE static void read(const Rows & rows, Block & block) {
        const V k2 = all_bytes(3), k6 = all_bytes(63);
        V head[4];
        rows.words(0, head);
        block.scale = rows.halves(0);
        block.minimum = negative(rows.halves(2));
        const auto upper = [&](V lower, V packed) GGPIPE_AVX2 GGPIPE_INLINE {  // the upper two of six bits are with the first units
            return _mm256_or_si256(lower, _mm256_slli_epi16(_mm256_and_si256(_mm256_srli_epi16(packed, 6), k2), 4));
        };
        const V s[2] = {_mm256_and_si256(head[1], k6), upper(four_bits(head[3]), head[1])};
        const V m[2] = {_mm256_and_si256(head[2], k6), upper(upper_four_bits(head[3]), head[2])};
        for (int i = 0; i < 4; i++) {
            block.scales[i] = pair_of_bytes(s[i / 2], i % 2);
            block.minima[i] = pair_of_bytes(m[i / 2], i % 2);
        }
    }
};
struct Q4_K : WithSixBits {
    static constexpr int kBytes = 144, kHighest = 15;
    GGPIPE_UNPACK(Source rows, const Emit & emit) {
        rows += 16;
        GGPIPE_UNITS(4) {
            V both[8], numbers[8];
            for (int i = 0; i < 2; i++) rows.quads(16 * i, both + 4 * i);
            for (int i = 0; i < 8; i++) numbers[i] = four_bits(both[i]);
            emit(2 * u, numbers);
            for (int i = 0; i < 8; i++) numbers[i] = upper_four_bits(both[i]);
            emit(2 * u + 1, numbers);
            rows += 32;
        }
    }
};
struct Q5_K : WithSixBits {
    static constexpr int kBytes = 176, kHighest = 31;
    GGPIPE_UNPACK(Source rows, const Emit & emit) {
        const V k16 = all_bytes(16);
        V high[8];
        for (int i = 0; i < 2; i++) rows.quads(16 + 16 * i, high + 4 * i);
        rows += 48;
        GGPIPE_UNITS(4) {
            V both[8], numbers[8];
            for (int i = 0; i < 2; i++) rows.quads(16 * i, both + 4 * i);
            for (int i = 0; i < 8; i++) {
                numbers[i] = _mm256_or_si256(four_bits(both[i]), _mm256_and_si256(_mm256_slli_epi16(high[i], 4), k16));
            }
            emit(2 * u, numbers);
            for (int i = 0; i < 8; i++) {
                numbers[i] = _mm256_or_si256(upper_four_bits(both[i]), _mm256_and_si256(_mm256_slli_epi16(high[i], 3), k16));
                high[i] = _mm256_srli_epi16(high[i], 2);
            }
            emit(2 * u + 1, numbers);
            rows += 32;
        }
    }
};
struct Q6_K : Super<Rows, 16> {
    static constexpr int kBytes = 210, kHighest = 63, kOffset = 32;
    GGPIPE_AVX2 GGPIPE_INLINE static void read(const Rows & rows, Block & block) {
        V bytes[4];
        rows.words(192, bytes);
        block.scale = rows.halves(208);
        for (int i = 0; i < 8; i++) block.scales[i] = signed_pair_of_bytes(bytes[i / 2], i % 2);
    }
    GGPIPE_UNPACK(Source rows, const Emit & emit) {
        const V k48 = all_bytes(48);
        Source upper = rows;
        upper += 128;
        GGPIPE_UNITS(2) {
            for (int half = 0; half < 2; half++) {  // 16 of each 32 columns
                V high[4];
                upper.quads(16 * half, high);
                for (int part = 0; part < 2; part++) {
                    V both[4], numbers[4];
                    rows.quads(32 * part + 16 * half, both);
                    for (int i = 0; i < 4; i++) {
                        const V two = _mm256_and_si256(part ? _mm256_slli_epi16(high[i], 2) : _mm256_slli_epi16(high[i], 4), k48);
                        numbers[i] = _mm256_or_si256(four_bits(both[i]), two);
                    }
                    emit(8 * u + 2 * part + half, numbers);
                    for (int i = 0; i < 4; i++) {
                        const V two = _mm256_and_si256(part ? _mm256_srli_epi16(high[i], 2) : high[i], k48);
                        numbers[i] = _mm256_or_si256(upper_four_bits(both[i]), two);
                    }
                    emit(8 * u + 2 * part + half + 4, numbers);
                }
            }
            rows += 64;
            upper += 32;
        }
    }
};
GGPIPE_AVX2 GGPIPE_INLINE inline V two_bits(V bytes) { return _mm256_and_si256(bytes, all_bytes(3)); }
struct Q3_K : Super<Rows, 16> {
    static constexpr int kBytes = 110, kHighest = 7, kOffset = 4;
    GGPIPE_AVX2 GGPIPE_INLINE static void read(const Rows & rows, Block & block) {
        V packed[4];  // from the second on
        rows.words(92, packed);
        block.scale = rows.halves(108);
        for (int i = 0; i < 4; i++) {
            const V low = i < 2 ? four_bits(packed[1 + i]) : upper_four_bits(packed[i - 1]);
            const V high = _mm256_slli_epi16(two_bits(_mm256_srli_epi16(packed[3], 2 * i)), 4);
            const V bytes = _mm256_or_si256(low, high);
            for (int j = 0; j < 2; j++) block.scales[2 * i + j] = _mm256_sub_epi16(pair_of_bytes(bytes, j), _mm256_set1_epi16(32));
        }
    }
    GGPIPE_UNPACK(Source rows, const Emit & emit) {
        Source lower = rows;
        lower += 32;
        GGPIPE_UNROLLED(half, 2) {  // 16 of each 32 columns: what is shifted stays in registers
            V high[4];
            rows.quads(16 * half, high);
            Source from = lower;
            GGPIPE_UNITS(2) {
                V both[4], numbers[4];
                from.quads(16 * half, both);
                GGPIPE_UNROLLED(part, 4) {
                    for (int i = 0; i < 4; i++) {
                        const V third = _mm256_and_si256(_mm256_slli_epi16(high[i], 2), all_bytes(4));
                        numbers[i] = _mm256_or_si256(two_bits(both[i]), third);
                        both[i] = _mm256_srli_epi16(both[i], 2);
                        high[i] = _mm256_srli_epi16(high[i], 1);
                    }
                    emit(8 * u + 2 * part + half, numbers);
                }
                from += 32;
            }
        }
    }
};
template <class Source> struct TwoBits : Super<Source, 16> {
    static constexpr int kBytes = 84, kHighest = 3;
    static constexpr bool kHasMinima = true;
    template <class Quads, class Emit> GGPIPE_AVX2 GGPIPE_INLINE static void unpack_at(int at, Quads rows, const Emit & emit) {
        rows += at;
        GGPIPE_UNITS(2) {
            GGPIPE_UNROLLED(half, 2) {
                V both[4], numbers[4];
                rows.quads(16 * Source::kGroup * half, both);
                GGPIPE_UNROLLED(part, 4) {
                    for (int i = 0; i < 4; i++) {
                        numbers[i] = two_bits(both[i]);
                        both[i] = _mm256_srli_epi16(both[i], 2);
                    }
                    emit(8 * u + 2 * part + half, numbers);
                }
            }
            rows += 32 * Source::kGroup;
        }
    }
};
struct Q2_K : TwoBits<Rows> {
    GGPIPE_AVX2 GGPIPE_INLINE static void read(const Rows & rows, Block & block) {
        V bytes[4];
        rows.words(0, bytes);
        block.scale = rows.halves(80);
        block.minimum = negative(rows.halves(82));
        for (int i = 0; i < 8; i++) {
            block.scales[i] = pair_of_bytes(four_bits(bytes[i / 2]), i % 2);
            block.minima[i] = pair_of_bytes(upper_four_bits(bytes[i / 2]), i % 2);
        }
    }
    GGPIPE_UNPACK(const Source & rows, const Emit & emit) { unpack_at(16, rows, emit); }
};
struct RepackedQ2_K : TwoBits<Eights> {  // by ggml, where it is compiled for AVX-512
    GGPIPE_AVX2 GGPIPE_INLINE static void read(const Eights & rows, Block & block) {
        block.scale = rows.halves(0);
        block.minimum = negative(rows.halves(16));
        for (int i = 0; i < 8; i++) {
            const V pairs = rows.byte_pairs(32 + 16 * i);
            block.scales[i] = four_bits(pairs);
            block.minima[i] = upper_four_bits(pairs);
        }
    }
    GGPIPE_UNPACK(const Source & rows, const Emit & emit) { unpack_at(160, rows, emit); }
};

}  // namespace ggpipe::GGPIPE_QUADS
#endif
