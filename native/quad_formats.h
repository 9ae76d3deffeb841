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
// kColumnsOfByte: if more than one, bytes with that many columns each are shifted as a whole, so columns are not in order. Of each
// 32, the first column of each byte comes first, then the second of each.
// kSignsApart: quads are sizes of numbers, without an offset, and their signs are given to `emit`.

template <class Source, bool kIsSigned> struct Small {
    using From = Source;
    static constexpr int kUnit = 32, kBlock = 32, kStep = 32, kOffset = 0, kHighest = 128, kColumnsOfByte = 1;
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
template <int n = 8> GGPIPE_AVX2 GGPIPE_INLINE inline void look_up(const int8_t * table, int offset, V numbers[n]) {
    const V values = _mm256_add_epi8(in_both(load_16(table)), all_bytes(offset));
    for (int i = 0; i < n; i++) numbers[i] = _mm256_shuffle_epi8(values, numbers[i]);
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
struct NVFP4 : Small<Rows, false> {  // four units of 16 columns, each with a scale of 8 bits
    static constexpr int kBytes = 36, kBlock = 64, kUnit = 16, kHighest = 24, kOffset = 12;
    GGPIPE_UNPACK(Source rows, const Emit & emit) {
        GGPIPE_UNITS(rows.n_units / 2) {
            const V bytes = rows.word(0), lower = _mm256_and_si256(bytes, all_bytes(127));
            const V scales = _mm256_andnot_si256(_mm256_cmpeq_epi8(bytes, all_bytes(127)), lower);  // 127 is no number
            V both[8];
            for (int i = 0; i < 2; i++) rows.quads(4 + 16 * i, both + 4 * i);
            GGPIPE_UNROLLED(unit, 4) {
                V numbers[4];
                for (int i = 0; i < 2; i++) {
                    numbers[i] = four_bits(both[2 * unit + i]);
                    numbers[2 + i] = upper_four_bits(both[2 * unit + i]);
                }
                look_up<4>(kFloat4, kOffset, numbers);
                // As halves with the same bits, scales are 2 to the -8 of what they are, and half of that is wanted.
                const V halves = _mm256_and_si256(_mm256_slli_epi32(_mm256_srli_epi32(scales, 8 * unit), 7), _mm256_set1_epi32(0x3f80));
                const __m128i narrow = _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
                emit(4 * u + unit, numbers, _mm256_mul_ps(_mm256_cvtph_ps(narrow), _mm256_set1_ps(128)), F{});
            }
            rows += kBytes;
        }
    }
};
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

}  // namespace ggpipe::GGPIPE_QUADS
#endif
