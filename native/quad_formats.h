// How formats of quantized weights are unpacked into quads or lanes, for quad_tiles.h.
#pragma once

#ifdef __x86_64__
#include "quads.h"

namespace ggpipe::GGPIPE_QUADS {

constexpr int8_t kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kFloat4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Each has a number of columns and bytes a block (of a row), columns a unit (which share a scale), and columns a step, of which
// activations share a scale. `unpack` calls `emit` for each unit of a tile, in order unless kSuper, with its number, its columns
// as the source has them (quads, or lanes), and what else follows.
//
// kSigned: numbers have 8 bits with a sign. Products of two columns fit into 16 bits, sums of those do not.
// Otherwise they have no sign, kOffset was added to them, and kHighest is the highest.
// kSuper: scales are integers, pairs of units of them in `Block`. Otherwise a scale and a minimum are given to `emit`.
// kSignsApart: quads are sizes of numbers, without an offset, and their signs are given to `emit`.

template <class Source, bool kIsSigned> struct Small {
    using From = Source;
    static constexpr int kUnit = 32, kBlock = 32, kStep = 32, kOffset = 0, kHighest = 128;
    static constexpr bool kSigned = kIsSigned, kSuper = false, kHasMinima = false, kSignsApart = false;
};
#define GGPIPE_UNITS(N) _Pragma("GCC unroll 1") for (int u = 0; u < N; u++)
#define GGPIPE_UNPACK template <class Source, class Emit> GGPIPE_AVX2 GGPIPE_INLINE static void unpack

// 16 bytes of each row: the lower halves of all, then the upper ones. `inverted`: those bits of each byte.
template <class From> GGPIPE_AVX2 GGPIPE_INLINE inline void nibbles(const From & rows, int at, V numbers[8], int inverted = 0) {
    V both[4];
    rows.quads(at, both);
    for (int i = 0; i < 4; i++) {
        if (inverted) both[i] = _mm256_xor_si256(both[i], all_bytes(inverted));
        numbers[i] = four_bits(both[i]);
        numbers[4 + i] = upper_four_bits(both[i]);
    }
}
GGPIPE_AVX2 GGPIPE_INLINE inline void look_up(const int8_t * table, int offset, V numbers[8]) {
    const V values = _mm256_add_epi8(in_both(load_16(table)), all_bytes(offset));
    for (int i = 0; i < 8; i++) numbers[i] = _mm256_shuffle_epi8(values, numbers[i]);
}
// Of each row's four bytes in `words`, the one of the `i`-th of eight vectors, once for each column of the row.
template <class From> GGPIPE_AVX2 GGPIPE_INLINE inline V byte_of_each(V words, int i) {
    const int64_t ones = 0x0101010101010101, first = i % 2 * 8 + i / 2;
    const int at = i / 2 * 0x01010101, next = 0x04040404;
    const V quarters = _mm256_setr_epi64x(first * ones, (first + 4) * ones, first * ones, (first + 4) * ones);
    const V lanes = _mm256_setr_epi32(at, at + next, at + 2 * next, at + 3 * next, at, at + next, at + 2 * next, at + 3 * next);
    return _mm256_shuffle_epi8(words, From::kInLanes ? lanes : quarters);
}
// All bits of the columns of the `i`-th of eight vectors whose bit is 1: of each row's four bytes, in the order of its columns.
template <class From> GGPIPE_AVX2 GGPIPE_INLINE inline V has_bit(V words, int i) {
    const V each = !From::kInLanes ? _mm256_set1_epi64x(0x8040201008040201) : _mm256_set1_epi32(i % 2 ? 0x80402010 : 0x08040201);
    return _mm256_cmpeq_epi8(_mm256_and_si256(byte_of_each<From>(words, i), each), each);
}
// Fifth bits at `at`, nibbles after them.
template <class From> GGPIPE_AVX2 GGPIPE_INLINE inline void fives(const From & rows, int at, V numbers[8]) {
    nibbles(rows, at + 4, numbers);
    const V bits = rows.word(at);
    for (int i = 0; i < 8; i++) numbers[i] = _mm256_or_si256(numbers[i], _mm256_and_si256(has_bit<From>(bits, i), all_bytes(16)));
}

struct Q8_0 : Small<Rows, true> {
    static constexpr int kBytes = 34;
    GGPIPE_UNPACK(Source rows, const Emit & emit) {
        GGPIPE_UNITS(rows.n_units) {
            V numbers[8];
            for (int i = 0; i < 2; i++) rows.quads(2 + 16 * i, numbers + 4 * i);
            emit(u, numbers, rows.halves(0), F{});
            rows += kBytes;
        }
    }
};
struct Q4_1 : Small<Rows, false> {
    static constexpr int kBytes = 20, kHighest = 15;
    static constexpr bool kHasMinima = true;
    GGPIPE_UNPACK(Source rows, const Emit & emit) {
        GGPIPE_UNITS(rows.n_units) {
            V numbers[8];
            nibbles(rows, 4, numbers);
            emit(u, numbers, rows.halves(0), rows.halves(2));
            rows += kBytes;
        }
    }
};
struct Q5_0 : Small<Rows, false> {
    static constexpr int kBytes = 22, kHighest = 31, kOffset = 16;
    GGPIPE_UNPACK(Source rows, const Emit & emit) {
        GGPIPE_UNITS(rows.n_units) {
            V numbers[8];
            fives(rows, 2, numbers);
            emit(u, numbers, rows.halves(0), F{});
            rows += kBytes;
        }
    }
};
struct Q5_1 : Small<Rows, false> {
    static constexpr int kBytes = 24, kHighest = 31;
    static constexpr bool kHasMinima = true;
    GGPIPE_UNPACK(Source rows, const Emit & emit) {
        GGPIPE_UNITS(rows.n_units) {
            V numbers[8];
            fives(rows, 4, numbers);
            emit(u, numbers, rows.halves(0), rows.halves(2));
            rows += kBytes;
        }
    }
};
template <class Layout> struct AnyQ4_0 : Small<Layout, false> {
    static constexpr int kGroup = Layout::kGroup, kBytes = 18, kHighest = 15, kOffset = 8;
    static constexpr int kInverted = kGroup > 1 ? 0x88 : 0;  // the upper bit of each number, by ggml
    GGPIPE_UNPACK(Source rows, const Emit & emit) {
        GGPIPE_UNITS(rows.n_units) {
            V numbers[8];
            nibbles(rows, 2 * kGroup, numbers, kInverted);
            emit(u, numbers, rows.halves(0), F{});
            rows += kGroup * kBytes;
        }
    }
};
template <class Layout> struct AnyIQ4_NL : Small<Layout, true> {
    static constexpr int kGroup = Layout::kGroup, kBytes = 18;
    GGPIPE_UNPACK(Source rows, const Emit & emit) {
        GGPIPE_UNITS(rows.n_units) {
            V numbers[8];
            nibbles(rows, 2 * kGroup, numbers);
            look_up(kNonLinear, 0, numbers);
            emit(u, numbers, rows.halves(0), F{});
            rows += kGroup * kBytes;
        }
    }
};
template <class Layout> struct AnyMXFP4 : Small<Layout, false> {
    static constexpr int kGroup = Layout::kGroup, kBytes = 17, kHighest = 24, kOffset = 12;
    GGPIPE_UNPACK(Source rows, const Emit & emit) {
        GGPIPE_UNITS(rows.n_units) {
            V numbers[8];
            nibbles(rows, kGroup, numbers);
            look_up(kFloat4, kOffset, numbers);
            // The scale is half of 2 to the (e - 127). Of the smallest two, numbers are not normal.
            const V e = rows.bytes(0), small = _mm256_sllv_epi32(_mm256_set1_epi32(0x200000), e);
            const V normal = _mm256_slli_epi32(sum_of(e, _mm256_set1_epi32(-1)), 23);
            emit(u, numbers, (F) _mm256_blendv_epi8(small, normal, _mm256_cmpgt_epi32(e, _mm256_set1_epi32(1))), F{});
            rows += kGroup * kBytes;
        }
    }
};
GGPIPE_LAYOUTS(Q4_0)
GGPIPE_LAYOUTS(IQ4_NL)
GGPIPE_LAYOUTS(MXFP4)
struct IQ4_XS : Small<Rows, true> {
    static constexpr int kBytes = 136, kBlock = 256, kStep = 256;
    GGPIPE_UNPACK(Source rows, const Emit & emit) {
        V head[4];
        rows.words(0, head);
        const F scale = rows.halves(0);
        rows += 8;
        GGPIPE_UNITS(8) {
            V numbers[8];
            nibbles(rows, 0, numbers);
            look_up(kNonLinear, 0, numbers);
            const V low = _mm256_and_si256(_mm256_srl_epi32(head[1], _mm_cvtsi32_si128(4 * u)), _mm256_set1_epi32(15));
            const V high = _mm256_and_si256(_mm256_srl_epi32(head[0], _mm_cvtsi32_si128(16 + 2 * u)), _mm256_set1_epi32(3));
            const V bits = _mm256_or_si256(low, _mm256_slli_epi32(high, 4));
            emit(u, numbers, _mm256_mul_ps(scale, floats(sum_of(bits, _mm256_set1_epi32(-32)))), F{});
            rows += 16;
        }
    }
};

// ---- with a scale for 256 columns, and integer scales of units ----------------------------------------------
struct Block {
    V scales[8], minima[8];  // pairs of those of consecutive units, in lanes
    F scale, minimum;        // what they are multiplied by; the minimum's is negative
};
template <class Source, int kUnitColumns> struct Super {
    using From = Source;
    static constexpr int kUnit = kUnitColumns, kBlock = 256, kStep = 256, kOffset = 0;
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
