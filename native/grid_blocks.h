// Formats whose numbers come from grids (grids.h), for tiles.h.
//
// An entry is packed in 16 bits, and one instruction looks 32 indices up in 64 entries.
#pragma once

#ifdef __x86_64__
#include "grids.h"
#include "superblocks.h"

namespace ggpipe::GGPIPE_TILES {

// The entries of two indices in each lane.
template <int n> GGPIPE_TARGET GGPIPE_INLINE inline __m512i entries_of(const uint16_t * entries, __m512i indices) {
    if constexpr (n == 64) {
        return _mm512_permutex2var_epi16(_mm512_load_si512(entries), indices, _mm512_load_si512(entries + 32));
    } else {
        const __m512i lower = entries_of<n / 2>(entries, indices), upper = entries_of<n / 2>(entries + n / 2, indices);
        return _mm512_mask_mov_epi16(lower, _mm512_test_epi16_mask(indices, _mm512_set1_epi16(n / 2)), upper);
    }
}
// The numbers of the entry of each lane's first (0) or second (1) index, loaded one after another: faster with 2048 entries.
GGPIPE_TARGET GGPIPE_INLINE inline void eights_of(const uint64_t * grid, const U & pairs, int which, U numbers[2]) {
    typedef uint16_t __attribute__((may_alias)) Index;
    const Index * indices = (const Index *) &pairs + which;
    const auto four = [&](int i) GGPIPE_TARGET GGPIPE_INLINE {
        const auto entry = [&](int lane) GGPIPE_TARGET GGPIPE_INLINE { return grid[indices[2 * (4 * i + lane)]]; };
        return _mm256_setr_epi64x(entry(0), entry(1), entry(2), entry(3));
    };
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i a = _mm512_inserti64x4(_mm512_castsi256_si512(four(0)), four(1), 1);
    const __m512i b = _mm512_inserti64x4(_mm512_castsi256_si512(four(2)), four(3), 1);
    numbers[0] = (U) _mm512_permutex2var_epi32(a, even, b);
    numbers[1] = (U) _mm512_permutex2var_epi32(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
}
// Four of each lane's bytes, by their numbers.
GGPIPE_TARGET GGPIPE_INLINE inline U bytes_of(U lanes, int a, int b, int c, int d) {
    const int first = a | b << 8 | c << 16 | d << 24, next = 0x04040404;
    const __m128i order = _mm_setr_epi32(first, first + next, first + 2 * next, first + 3 * next);
    return (U) _mm512_shuffle_epi8((__m512i) lanes, _mm512_broadcast_i32x4(order));
}
// Bits of `a` where those of `mask` are 1, else of `b`.
GGPIPE_TARGET GGPIPE_INLINE inline U chosen(uint32_t mask, U a, U b) {
    return (U) _mm512_ternarylogic_epi32((__m512i) a, (__m512i) b, (__m512i) (U{} + mask), 0xe4);
}
// `n` bits of each lane from `at` on, moved to `to`.
GGPIPE_TARGET GGPIPE_INLINE inline U moved(U lanes, int n, int at, int to) {
    return (at > to ? lanes >> (at - to) : lanes << (to - at)) & ((1 << n) - 1) << to;
}
// Seven signs in each byte; the eighth makes the number of negative ones even.
GGPIPE_TARGET GGPIPE_INLINE inline U eight_signs(U sevens) {
    const __m128i of_odd = _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0);
    return sevens | looked_up((U) _mm512_broadcast_i32x4(of_odd), (sevens ^ sevens >> 4) & k4);
}
// The signs of 32 columns, seven bits after seven bits, as bytes.
GGPIPE_TARGET GGPIPE_INLINE inline U packed_signs(U words) {
    return eight_signs(moved(words, 7, 0, 0) | moved(words, 7, 7, 8) | moved(words, 7, 14, 16) | moved(words, 7, 21, 24));
}
GGPIPE_TARGET GGPIPE_INLINE inline I scale_of(U lanes, int n, int at) { return (I) (2 * moved(lanes, n, at, 0) + 1); }

// What is read of a block, for each 32 columns.
template <int kWords> struct Parts {
    U even[8][kWords], odd[8][kWords];  // of each word's four indices, the first and third, and the others
    U signs[8];                         // a bit each
    I scales[kMaxUnits];                // of each unit
    F scale;

    // Indices with a byte each, and `n` upper bits each, from `at` on, a `step` apart.
    GGPIPE_TARGET GGPIPE_INLINE void set(int u, int word, U bytes, U upper = U{}, int n = 0, int at = 0, int step = 0) {
        even[u][word] = (bytes & 0x00ff00ff) | moved(upper, n, at, 8) | moved(upper, n, at + 2 * step, 24);
        odd[u][word] = (bytes >> 8 & 0x00ff00ff) | moved(upper, n, at + step, 8) | moved(upper, n, at + 3 * step, 24);
    }
};

// Entries have 8 numbers of 2 bits (kWords 1) or 4 of 4 bits (2).
template <class Format, int kEntries, int kWords, int kUnitColumns> struct OfGrid : Super<Rows> {
    static constexpr int kUnit = kUnitColumns;
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static F unpack(const Rows & rows, const Emit & emit) {
        const PackedGrid & grid = packed_grid<Format::kGrid>();
        const __m128i stored = _mm_add_epi8(_mm_load_si128((const __m128i *) grid.values), _mm_set1_epi8(Format::kAdded));
        const U values = (U) _mm512_broadcast_i32x4(stored);
        Parts<kWords> parts;
        Format::read(rows, parts);
        GGPIPE_UNITS(8) {
            U numbers[8];
            if constexpr (kEntries == 2048) {
                const uint64_t * eights = eights_of_grid<Format::kGrid>();
                GGPIPE_UNROLLED(i, 4) eights_of(eights, (i % 2 ? parts.odd : parts.even)[u][0], i / 2, numbers + 2 * i);
            } else GGPIPE_UNROLLED(word, kWords) {
                const U entries[2] = {(U) entries_of<kEntries>(grid.entries, (__m512i) parts.even[u][word]),
                                      (U) entries_of<kEntries>(grid.entries, (__m512i) parts.odd[u][word])};
                GGPIPE_UNROLLED(i, 8 / kWords) {
                    if constexpr (kWords == 1) {
                        const int byte = i / 4 * 2 + i % 2;
                        const U four = bytes_of(entries[i / 2 % 2], byte, byte, byte, byte);
                        numbers[i] = looked_up(values, chosen(0x0000ffff, four, four >> 4) & 0x0c030c03);
                    } else {
                        const int byte = i / 2 * 2;
                        const U four = bytes_of(entries[i % 2], byte, byte, byte + 1, byte + 1);
                        numbers[4 * word + i] = looked_up(values, chosen(0x00ff00ff, four, four >> 4));  // bits 4 to 6 do not count
                    }
                }
            }
            Format::finish(parts, u, numbers);
            GGPIPE_UNROLLED(i, 32 / kUnit) {
                constexpr int kUnits = 32 / kUnit;
                emit(kUnits * u + i, numbers + i * kUnit / 4, parts.scales[kUnits * u + i], F{});
            }
        }
        return parts.scale;
    }
};
// Numbers that are stored without their signs.
template <class Format, int kEntries, int kWords, int kHighest, int kUnitColumns>
struct SignsApart : OfGrid<Format, kEntries, kWords, kUnitColumns> {
    static constexpr int kOffset = kHighest, kAdded = kOffset;
    GGPIPE_TARGET GGPIPE_INLINE static void finish(const Parts<kWords> & parts, int u, U numbers[8]) {
        GGPIPE_UNROLLED(i, 8) {
            const U eight = bytes_of(parts.signs[u], i / 2, i / 2, i / 2, i / 2), bits = U{} + (i % 2 ? 0x80402010 : 0x08040201);
            const __mmask64 is_negative = _mm512_test_epi8_mask((__m512i) eight, (__m512i) bits);
            const auto number = (__m512i) numbers[i];
            numbers[i] = (U) _mm512_mask_sub_epi8(number, is_negative, _mm512_set1_epi8(2 * kOffset), number);
        }
    }
};
struct IQ2_XXS : SignsApart<IQ2_XXS, 256, 1, 43, 32> {
    static constexpr ggml_type kGrid = GGML_TYPE_IQ2_XXS;
    static constexpr int kBytes = 66;
    GGPIPE_TARGET GGPIPE_INLINE static void read(const Rows & rows, Parts<1> & parts) {
        parts.scale = rows.halves(0) * 0.125f;
        for (int i = 0; i < 4; i++) {
            U words[4];
            rows.words(2 + 16 * i, words);
            for (int u = 2 * i; u < 2 * i + 2; u++) {
                const U signs = words[u % 2 * 2 + 1];
                parts.set(u, 0, words[u % 2 * 2]);
                parts.signs[u] = packed_signs(signs);
                parts.scales[u] = scale_of(signs, 4, 28);
            }
        }
    }
};
struct IQ2_XS : SignsApart<IQ2_XS, 512, 1, 43, 16> {
    static constexpr ggml_type kGrid = GGML_TYPE_IQ2_XS;
    static constexpr int kBytes = 74;
    GGPIPE_TARGET GGPIPE_INLINE static void read(const Rows & rows, Parts<1> & parts) {
        U words[4];
        rows.words(58, words);  // the last two are scales
        parts.scale = rows.halves(0) * 0.125f;
        for (int i = 0; i < 16; i++) parts.scales[i] = scale_of(words[2 + i / 8], 4, i % 8 * 4);
        for (int i = 0; i < 4; i++) {
            rows.words(2 + 16 * i, words);
            for (int u = 2 * i; u < 2 * i + 2; u++) {
                const U a = words[u % 2 * 2], b = words[u % 2 * 2 + 1];
                const U even = chosen(0xffff, a, b << 16), odd = chosen(0xffff, a >> 16, b);
                parts.even[u][0] = even & 0x01ff01ff;
                parts.odd[u][0] = odd & 0x01ff01ff;
                parts.signs[u] = eight_signs((even >> 9 & 0x007f007f) | (odd >> 1 & 0x7f007f00));
            }
        }
    }
};
struct IQ2_S : SignsApart<IQ2_S, 1024, 1, 43, 16> {
    static constexpr ggml_type kGrid = GGML_TYPE_IQ2_S;
    static constexpr int kBytes = 82;
    GGPIPE_TARGET GGPIPE_INLINE static void read(const Rows & rows, Parts<1> & parts) {
        U words[4], indices[8];
        rows.words(66, words);  // the upper bits of indices, and scales
        parts.scale = rows.halves(0) * 0.125f;
        for (int i = 0; i < 16; i++) parts.scales[i] = scale_of(words[2 + i / 8], 4, i % 8 * 4);
        for (int i = 0; i < 2; i++) {
            rows.words(2 + 16 * i, indices + 4 * i);
            rows.words(34 + 16 * i, parts.signs + 4 * i);
        }
        for (int u = 0; u < 8; u++) parts.set(u, 0, indices[u], words[u / 4], 2, u % 4 * 8, 2);
    }
};
struct IQ3_XXS : SignsApart<IQ3_XXS, 256, 2, 31, 32> {
    static constexpr ggml_type kGrid = GGML_TYPE_IQ3_XXS;
    static constexpr int kBytes = 98;
    GGPIPE_TARGET GGPIPE_INLINE static void read(const Rows & rows, Parts<2> & parts) {
        parts.scale = rows.halves(0) * 0.5f;
        for (int i = 0; i < 4; i++) {
            U words[4];
            rows.words(2 + 16 * i, words);
            for (int j = 0; j < 4; j++) parts.set(2 * i + j / 2, j % 2, words[j]);
        }
        for (int i = 0; i < 2; i++) rows.words(66 + 16 * i, parts.signs + 4 * i);
        for (int u = 0; u < 8; u++) {
            parts.scales[u] = scale_of(parts.signs[u], 4, 28);
            parts.signs[u] = packed_signs(parts.signs[u]);
        }
    }
};
struct IQ3_S : SignsApart<IQ3_S, 512, 2, 15, 32> {
    static constexpr ggml_type kGrid = GGML_TYPE_IQ3_S;
    static constexpr int kBytes = 110;
    GGPIPE_TARGET GGPIPE_INLINE static void read(const Rows & rows, Parts<2> & parts) {
        U upper[4];
        rows.words(66, upper);  // only the first two
        parts.scale = rows.halves(0);
        for (int i = 0; i < 4; i++) {
            U words[4];
            rows.words(2 + 16 * i, words);
            for (int j = 0; j < 4; j++) parts.set(2 * i + j / 2, j % 2, words[j], upper[i / 2], 1, i % 2 * 16 + 4 * j, 1);
        }
        for (int i = 0; i < 2; i++) rows.words(74 + 16 * i, parts.signs + 4 * i);
        const U scales = rows.word(106);
        for (int u = 0; u < 8; u++) parts.scales[u] = scale_of(scales, 4, 4 * u);
    }
};

// Eight times the numbers of the grid, and 1 more or, where a bit of `signs` is 1, 1 less. Entries have the offset already.
template <class Format, int kUnitColumns> struct OneBitGrid : OfGrid<Format, 2048, 1, kUnitColumns> {
    static constexpr ggml_type kGrid = GGML_TYPE_IQ1_S;
    static constexpr int kOffset = 9, kAdded = 0;
    GGPIPE_TARGET GGPIPE_INLINE static void finish(const Parts<1> & parts, int u, U numbers[8]) {
        GGPIPE_UNROLLED(i, 8) {
            const U eighth = (U) ((I) (parts.signs[u] << (31 - Format::sign_of(i / 2))) >> 31) | k1;
            numbers[i] = (U) _mm512_add_epi8((__m512i) numbers[i], (__m512i) eighth);
        }
    }
};
struct IQ1_S : OneBitGrid<IQ1_S, 32> {
    static constexpr int kBytes = 50;
    static constexpr int sign_of(int) { return 15; }
    GGPIPE_TARGET GGPIPE_INLINE static void read(const Rows & rows, Parts<1> & parts) {
        U words[4], indices[8];
        rows.words(34, words);
        parts.scale = rows.halves(0) * 0.125f;
        for (int i = 0; i < 2; i++) rows.words(2 + 16 * i, indices + 4 * i);
        for (int u = 0; u < 8; u++) {
            parts.signs[u] = u % 2 ? words[u / 2] >> 16 : words[u / 2];
            parts.scales[u] = scale_of(parts.signs[u], 3, 12);
            parts.set(u, 0, indices[u], parts.signs[u], 3, 0, 3);
        }
    }
};
struct IQ1_M : OneBitGrid<IQ1_M, 16> {
    static constexpr int kBytes = 56;
    static constexpr int sign_of(int eight) { return 4 * eight + 3; }
    GGPIPE_TARGET GGPIPE_INLINE static void read(const Rows & rows, Parts<1> & parts) {
        U words[4], indices[8], scale = {};
        rows.words(40, words);  // the last two are scales: of four times 16 bits, the upper four are a quarter of the block's
        for (int i = 0; i < 4; i++) {
            scale |= moved(words[2 + i / 2], 4, i % 2 * 16 + 12, 4 * i);
            for (int j = 0; j < 4; j++) parts.scales[4 * i + j] = scale_of(words[2 + i / 2], 3, i % 2 * 16 + 3 * j);
        }
        parts.scale = lower_half(scale) * 0.125f;
        rows.words(32, words);
        for (int i = 0; i < 2; i++) rows.words(16 * i, indices + 4 * i);
        for (int u = 0; u < 8; u++) {
            parts.signs[u] = u % 2 ? words[u / 2] >> 16 : words[u / 2];
            parts.set(u, 0, indices[u], parts.signs[u], 3, 0, 4);
        }
    }
};

}  // namespace ggpipe::GGPIPE_TILES
#endif
