// Formats whose numbers come from grids (grids.h), for quad_tiles.h. Looking these up takes a single row most of its time; ggml
// does it again for each row of activations.
#pragma once

#ifdef __x86_64__
#include "grids.h"
#include "quad_superblocks.h"

namespace ggpipe::GGPIPE_QUADS {

// Two vectors with 8 columns of each row, which are one entry of a grid, `entry(row)`.
template <class From, class Entry> GGPIPE_AVX2 GGPIPE_INLINE inline void look_up_eights(const Entry & entry, V to[2]) {
    const V a = _mm256_setr_epi64x(entry(0), entry(1), entry(4), entry(5));
    const V b = _mm256_setr_epi64x(entry(2), entry(3), entry(6), entry(7));
    to[0] = From::kInLanes ? (V) _mm256_shuffle_ps((F) a, (F) b, 0x88) : a;
    to[1] = From::kInLanes ? (V) _mm256_shuffle_ps((F) a, (F) b, 0xdd) : b;
}
// The same where they are two entries, `entry(row, i)`.
template <class From, class Entry> GGPIPE_AVX2 GGPIPE_INLINE inline void look_up_fours(const Entry & entry, V to[2]) {
    const auto fours = [&](int i) GGPIPE_AVX2 GGPIPE_INLINE {
        return _mm256_setr_epi32(entry(0, i), entry(1, i), entry(2, i), entry(3, i), entry(4, i), entry(5, i), entry(6, i), entry(7, i));
    };
    const V a = fours(0), b = fours(1);
    to[0] = From::kInLanes ? a : _mm256_unpacklo_epi32(a, b);
    to[1] = From::kInLanes ? b : _mm256_unpackhi_epi32(a, b);
}
// Seven signs in each byte; the eighth makes the number of negative ones even.
GGPIPE_AVX2 GGPIPE_INLINE inline V eight_signs(V sevens) {
    const V of_odd = in_both(_mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0));
    const V folded = four_bits(_mm256_xor_si256(sevens, _mm256_srli_epi16(sevens, 4)));
    return _mm256_or_si256(sevens, _mm256_shuffle_epi8(of_odd, folded));
}
// The signs of 32 columns, seven bits after seven bits, as bytes.
GGPIPE_AVX2 GGPIPE_INLINE inline V packed_signs(V words) {
    V sevens = _mm256_and_si256(words, _mm256_set1_epi32(127));
    for (int i = 1; i < 4; i++) {
        sevens = _mm256_or_si256(sevens, _mm256_and_si256(_mm256_slli_epi32(words, i), _mm256_set1_epi32(127 << 8 * i)));
    }
    return eight_signs(sevens);
}
// Each lane's `n` bits from `at` on, and as many after them, as pairs of scales: 2 * number + 1.
GGPIPE_AVX2 GGPIPE_INLINE inline V pairs_of_bits(V lanes, int at, int n) {
    lanes = _mm256_srli_epi32(lanes, at);
    const V both = _mm256_blend_epi16(lanes, _mm256_slli_epi32(lanes, 16 - n), 0xaa);
    const V numbers = _mm256_and_si256(both, _mm256_set1_epi16((1 << n) - 1));
    return _mm256_add_epi16(_mm256_add_epi16(numbers, numbers), _mm256_set1_epi16(1));
}
// The same of four bits, twice.
GGPIPE_AVX2 GGPIPE_INLINE inline V twice_four_bits(V lanes, int at) {
    const V number = _mm256_and_si256(_mm256_srli_epi32(lanes, at), _mm256_set1_epi32(15));
    return pairs_of_bits(_mm256_or_si256(number, _mm256_slli_epi32(number, 4)), 0, 4);
}
GGPIPE_AVX2 GGPIPE_INLINE inline F times(F scale, float factor) { return _mm256_mul_ps(scale, _mm256_set1_ps(factor)); }

// Indices of more than 8 bits whose parts lie apart, put together in vectors.
struct Indices {
    uint16_t of_row[kLanes][64];

    // `n` of each row: the lower 8 bits are at `lower`; those above, `kUpper` of each index in their order, at `upper`.
    template <int n, int kUpper> GGPIPE_AVX2 GGPIPE_INLINE void read(const Rows & rows, int lower, int upper) {
        constexpr int kInByte = 8 / kUpper;
        const __m128i first = kUpper == 1 ? _mm_set_epi64x(0x0101010101010101, 0) : _mm_setr_epi32(0, 0x01010101, 0x02020202, 0x03030303);
        const V factors = kUpper == 1 ? in_both(_mm_setr_epi16(256, 128, 64, 32, 16, 8, 4, 2)) : _mm256_set1_epi64x(0x0004001000400100);
        for (int row = 0; row < kLanes; row++) {
            const uint8_t * data = rows.row(row);
            const __m128i bytes = _mm_loadl_epi64((const __m128i *) (data + upper));
            GGPIPE_UNROLLED(i, n / 16) {
                const __m128i each = _mm_shuffle_epi8(bytes, _mm_add_epi8(first, _mm_set1_epi8(16 / kInByte * i)));
                const V above = _mm256_mullo_epi16(_mm256_cvtepu8_epi16(each), factors);
                const V low = _mm256_cvtepu8_epi16(load_16(data + lower + 16 * i));
                const V indices = _mm256_or_si256(low, _mm256_and_si256(above, _mm256_set1_epi16(((1 << kUpper) - 1) << 8)));
                _mm256_storeu_si256((V *) (of_row[row] + 16 * i), indices);
            }
        }
    }
};

// A format tells the signs of 32 columns of each row, a byte for 8 of them, and looks up the numbers of 8 columns.
template <class Format, int kUnitColumns> struct OfGrid : Super<Rows, kUnitColumns> {
    static constexpr bool kHasWideIndices = false;
    GGPIPE_UNPACK(const Source & rows, const Emit & emit) {
        constexpr int kVectors = kUnitColumns / 4;
        const auto * grid = Format::grid();
        Indices indices;
        if constexpr (Format::kHasWideIndices) Format::read_indices(rows, indices);
        V all[8];
        Format::read_signs(rows, all);
        GGPIPE_UNITS(8) {
            V numbers[8], signs[8];
            GGPIPE_UNROLLED(eight, 4) {
                Format::eight(rows, grid, indices, u, eight, all[u], numbers + 2 * eight, signs + 2 * eight);
                const int n = 2 * eight + 2;
                if (n % kVectors) continue;
                const int unit = (8 * u + n) / kVectors - 1;
                if constexpr (Source::kInLanes || !Format::kSignsApart) emit(unit, numbers + n - kVectors);
                else emit(unit, numbers + n - kVectors, signs + n - kVectors);
            }
        }
    }
};
// Numbers that are stored without their signs. Units are of 16 columns, even where 32 have one scale: numbers and signs of more
// would not fit into registers.
template <class Format, int kHighestSize> struct SignsApart : OfGrid<Format, 16> {
    static constexpr int kOffset = kHighestSize, kHighest = 2 * kHighestSize;
    static constexpr bool kSignsApart = true;

   protected:
    template <class From> GGPIPE_AVX2 GGPIPE_INLINE static void add_signs(V bits, int eight, V numbers[2], V signs[2]) {
        for (int i = 0; i < 2; i++) {
            signs[i] = _mm256_or_si256(has_bit<From>(bits, 2 * eight + i), all_bytes(1));
            if (From::kInLanes) numbers[i] = _mm256_add_epi8(_mm256_sign_epi8(numbers[i], signs[i]), all_bytes(kOffset));
        }
    }
};

template <class Format> struct TwoBitGrid : SignsApart<Format, 43> {
    static const uint64_t * grid() { return eights_of_grid<Format::kGrid>(); }
    template <class Source>
    GGPIPE_AVX2 GGPIPE_INLINE static void eight(const Source & rows, const uint64_t * grid, const Indices & indices, int u, int eight,
                                                V bits, V numbers[2], V signs[2]) {
        const auto entry = [&](int row) GGPIPE_AVX2 GGPIPE_INLINE { return grid[Format::index(rows, indices, row, u, eight)]; };
        look_up_eights<Source>(entry, numbers);
        Format::template add_signs<Source>(bits, eight, numbers, signs);
    }
};
struct IQ2_XXS : TwoBitGrid<IQ2_XXS> {
    static constexpr ggml_type kGrid = GGML_TYPE_IQ2_XXS;
    static constexpr int kBytes = 66;
    GGPIPE_AVX2 GGPIPE_INLINE static void read(const Rows & rows, Block & block) {
        block.scale = times(rows.halves(0), 0.125f);
        for (int i = 0; i < 4; i++) {
            V words[4];
            rows.words(2 + 16 * i, words);
            for (int j = 0; j < 2; j++) block.scales[2 * i + j] = twice_four_bits(words[2 * j + 1], 28);
        }
    }
    GGPIPE_AVX2 GGPIPE_INLINE static void read_signs(const Rows & rows, V * signs) {
        for (int i = 0; i < 4; i++) {
            V words[4];
            rows.words(2 + 16 * i, words);
            for (int j = 0; j < 2; j++) signs[2 * i + j] = packed_signs(words[2 * j + 1]);
        }
    }
    GGPIPE_AVX2 GGPIPE_INLINE static size_t index(const Rows & rows, const Indices &, int row, int u, int eight) {
        return rows.read<uint8_t>(row, 2 + 8 * u + eight);
    }
};
struct IQ2_XS : TwoBitGrid<IQ2_XS> {
    static constexpr ggml_type kGrid = GGML_TYPE_IQ2_XS;
    static constexpr int kBytes = 74;
    GGPIPE_AVX2 GGPIPE_INLINE static void read(const Rows & rows, Block & block) {
        V words[4];  // the last two are scales
        rows.words(58, words);
        block.scale = times(rows.halves(0), 0.125f);
        for (int i = 0; i < 8; i++) block.scales[i] = pairs_of_bits(words[2 + i / 4], i % 4 * 8, 4);
    }
    GGPIPE_AVX2 GGPIPE_INLINE static void read_signs(const Rows & rows, V * signs) {
        const V order = in_both(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
        for (int i = 0; i < 4; i++) {
            V words[4];
            rows.words(2 + 16 * i, words);
            for (int j = 0; j < 2; j++) {
                const V even = _mm256_srli_epi16(words[2 * j], 9), odd = _mm256_srli_epi16(words[2 * j + 1], 9);
                signs[2 * i + j] = eight_signs(_mm256_shuffle_epi8(_mm256_or_si256(even, _mm256_slli_epi16(odd, 8)), order));
            }
        }
    }
    GGPIPE_AVX2 GGPIPE_INLINE static size_t index(const Rows & rows, const Indices &, int row, int u, int eight) {
        return rows.read<uint16_t>(row, 2 + 8 * u + 2 * eight) & 511;
    }
};
struct IQ2_S : TwoBitGrid<IQ2_S> {
    static constexpr ggml_type kGrid = GGML_TYPE_IQ2_S;
    static constexpr int kBytes = 82;
    GGPIPE_AVX2 GGPIPE_INLINE static void read(const Rows & rows, Block & block) {
        V words[4];  // the last two are scales
        rows.words(66, words);
        block.scale = times(rows.halves(0), 0.125f);
        for (int i = 0; i < 8; i++) block.scales[i] = pairs_of_bits(words[2 + i / 4], i % 4 * 8, 4);
    }
    GGPIPE_AVX2 GGPIPE_INLINE static void read_signs(const Rows & rows, V * signs) {
        for (int i = 0; i < 2; i++) rows.words(34 + 16 * i, signs + 4 * i);
    }
    static constexpr bool kHasWideIndices = true;
    GGPIPE_AVX2 GGPIPE_INLINE static void read_indices(const Rows & rows, Indices & indices) { indices.read<32, 2>(rows, 2, 66); }
    GGPIPE_AVX2 GGPIPE_INLINE static size_t index(const Rows &, const Indices & indices, int row, int u, int eight) {
        return indices.of_row[row][4 * u + eight];
    }
};

template <class Format, int kHighestSize> struct ThreeBitGrid : SignsApart<Format, kHighestSize> {
    static const uint32_t * grid() { return fours_of_grid<Format::kGrid>(); }
    template <class Source>
    GGPIPE_AVX2 GGPIPE_INLINE static void eight(const Source & rows, const uint32_t * grid, const Indices & indices, int u, int eight,
                                                V bits, V numbers[2], V signs[2]) {
        const auto entry = [&](int row, int i) GGPIPE_AVX2 GGPIPE_INLINE { return grid[Format::index(rows, indices, row, u, 2 * eight + i)]; };
        look_up_fours<Source>(entry, numbers);
        Format::template add_signs<Source>(bits, eight, numbers, signs);
    }
};
struct IQ3_XXS : ThreeBitGrid<IQ3_XXS, 31> {
    static constexpr ggml_type kGrid = GGML_TYPE_IQ3_XXS;
    static constexpr int kBytes = 98;
    GGPIPE_AVX2 GGPIPE_INLINE static void read(const Rows & rows, Block & block) {
        V words[8];
        for (int i = 0; i < 2; i++) rows.words(66 + 16 * i, words + 4 * i);
        block.scale = times(rows.halves(0), 0.5f);
        for (int i = 0; i < 8; i++) block.scales[i] = twice_four_bits(words[i], 28);
    }
    GGPIPE_AVX2 GGPIPE_INLINE static void read_signs(const Rows & rows, V * signs) {
        for (int i = 0; i < 2; i++) rows.words(66 + 16 * i, signs + 4 * i);
        for (int i = 0; i < 8; i++) signs[i] = packed_signs(signs[i]);
    }
    GGPIPE_AVX2 GGPIPE_INLINE static size_t index(const Rows & rows, const Indices &, int row, int u, int four) {
        return rows.read<uint8_t>(row, 2 + 8 * u + four);
    }
};
struct IQ3_S : ThreeBitGrid<IQ3_S, 15> {
    static constexpr ggml_type kGrid = GGML_TYPE_IQ3_S;
    static constexpr int kBytes = 110;
    GGPIPE_AVX2 GGPIPE_INLINE static void read(const Rows & rows, Block & block) {
        V words[4];  // the last one is scales
        rows.words(94, words);
        block.scale = rows.halves(0);
        for (int i = 0; i < 8; i++) block.scales[i] = twice_four_bits(words[3], 4 * i);
    }
    GGPIPE_AVX2 GGPIPE_INLINE static void read_signs(const Rows & rows, V * signs) {
        for (int i = 0; i < 2; i++) rows.words(74 + 16 * i, signs + 4 * i);
    }
    static constexpr bool kHasWideIndices = true;
    GGPIPE_AVX2 GGPIPE_INLINE static void read_indices(const Rows & rows, Indices & indices) { indices.read<64, 1>(rows, 2, 66); }
    GGPIPE_AVX2 GGPIPE_INLINE static size_t index(const Rows &, const Indices & indices, int row, int u, int four) {
        return indices.of_row[row][8 * u + four];
    }
};

// Eight times the numbers of the grid, and 1 more or, where a byte of signs is -1, 1 less. Entries have the offset already.
template <class Format, int kUnitColumns> struct OneBitGrid : OfGrid<Format, kUnitColumns> {
    static constexpr int kOffset = 9, kHighest = 18;
    static const uint64_t * grid() { return eights_of_grid<GGML_TYPE_IQ1_S>(); }
    template <class Source>
    GGPIPE_AVX2 GGPIPE_INLINE static void eight(const Source & rows, const uint64_t * grid, const Indices & indices, int u, int eight,
                                                V bits, V numbers[2], V *) {
        const auto entry = [&](int row) GGPIPE_AVX2 GGPIPE_INLINE { return grid[Format::index(rows, indices, row, u, eight)]; };
        look_up_eights<Source>(entry, numbers);
        for (int i = 0; i < 2; i++) {
            const V eighth = _mm256_or_si256(byte_of_each<Source>(bits, 2 * eight + i), all_bytes(1));
            numbers[i] = _mm256_add_epi8(numbers[i], eighth);
        }
    }
};
struct IQ1_S : OneBitGrid<IQ1_S, 32> {
    static constexpr int kBytes = 50;
    GGPIPE_AVX2 GGPIPE_INLINE static void read(const Rows & rows, Block & block) {
        V words[4];
        rows.words(34, words);
        block.scale = times(rows.halves(0), 0.125f);
        for (int i = 0; i < 4; i++) {
            const V numbers = _mm256_and_si256(_mm256_srli_epi16(words[i], 12), _mm256_set1_epi16(7));
            block.scales[i] = _mm256_add_epi16(_mm256_add_epi16(numbers, numbers), _mm256_set1_epi16(1));
        }
    }
    GGPIPE_AVX2 GGPIPE_INLINE static void read_signs(const Rows & rows, V * signs) {
        V words[4];
        rows.words(34, words);
        for (int i = 0; i < 8; i++) signs[i] = _mm256_srai_epi32(i % 2 ? words[i / 2] : _mm256_slli_epi32(words[i / 2], 16), 31);
    }
    GGPIPE_AVX2 GGPIPE_INLINE static size_t index(const Rows & rows, const Indices &, int row, int u, int eight) {
        return rows.read<uint8_t>(row, 2 + 4 * u + eight) | (rows.read<uint16_t>(row, 34 + 2 * u) >> 3 * eight & 7) << 8;
    }
};
struct IQ1_M : OneBitGrid<IQ1_M, 16> {
    static constexpr int kBytes = 56;
    GGPIPE_AVX2 GGPIPE_INLINE static void read(const Rows & rows, Block & block) {
        V words[4];  // the last two are scales: of four times 16 bits, the upper four are a quarter of the block's
        rows.words(40, words);
        const V halves[4] = {_mm256_slli_epi32(words[2], 16), words[2], _mm256_slli_epi32(words[3], 16), words[3]};
        V scale = _mm256_setzero_si256();
        for (int i = 0; i < 4; i++) {
            scale = _mm256_or_si256(scale, _mm256_slli_epi32(_mm256_srli_epi32(halves[i], 28), 4 * i));
            for (int j = 0; j < 2; j++) block.scales[2 * i + j] = pairs_of_bits(halves[i], 16 + 6 * j, 3);
        }
        const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(scale), _mm256_extracti128_si256(scale, 1));
        block.scale = times(_mm256_cvtph_ps(packed), 0.125f);
    }
    GGPIPE_AVX2 GGPIPE_INLINE static void read_signs(const Rows & rows, V * signs) {
        const V each = _mm256_set1_epi32(int(0x80088008));
        const __m128i twice = _mm_setr_epi8(0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13);
        V words[4];
        rows.words(32, words);
        for (int i = 0; i < 8; i++) {
            const V bytes = _mm256_shuffle_epi8(words[i / 2], in_both(_mm_add_epi8(twice, _mm_set1_epi8(i % 2 * 2))));
            signs[i] = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, each), each);
        }
    }
    GGPIPE_AVX2 GGPIPE_INLINE static size_t index(const Rows & rows, const Indices &, int row, int u, int eight) {
        return rows.read<uint8_t>(row, 4 * u + eight) | (rows.read<uint8_t>(row, 32 + 2 * u + eight / 2) << (eight % 2 ? 4 : 8) & 0x700);
    }
};

}  // namespace ggpipe::GGPIPE_QUADS
#endif
