// Formats of one or two bits a weight, for tiles.h; see weights.h.
#pragma once

#ifdef __x86_64__
#include "superblocks.h"

namespace ggpipe::GGPIPE_TILES {

struct Q1_0 : Small<Rows> {  // a bit is -1 or 1, and the number 0 or 2
    static constexpr int kBytes = 18, kBlock = 128, kColumnsOfByte = 8, kOffset = 1;
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static void unpack(Rows rows, const Emit & emit) {
        GGPIPE_UNITS(rows.n_units / 4) {
            U words[4];
            rows.words(2, words);
            const F scale = rows.halves(0);
            GGPIPE_UNROLLED(i, 4) {
                U numbers[8];
                for (int bit = 0; bit < 8; bit++) numbers[bit] = (bit ? words[i] >> (bit - 1) : words[i] << 1) & (k1 << 1);
                emit(4 * u + i, numbers, scale, F{});
            }
            rows += kBytes;
        }
    }
};
struct Q2_0 : Small<Rows> {
    static constexpr int kBytes = 18, kBlock = 64, kColumnsOfByte = 4, kOffset = 1;
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static void unpack(Rows rows, const Emit & emit) {
        GGPIPE_UNITS(rows.n_units / 2) {
            U words[4];
            rows.words(2, words);
            const F scale = rows.halves(0);
            GGPIPE_UNROLLED(i, 2) {
                U numbers[8];
                for (int j = 0; j < 8; j++) numbers[j] = words[2 * i + j % 2] >> j / 2 * 2 & k2;
                emit(2 * u + i, numbers, scale, F{});
            }
            rows += kBytes;
        }
    }
};

// ---- one scale for 256 columns, whose numbers are 0, 1 or 2 -------------------------------------------------
struct Ternary : Super<Rows> {
    static constexpr int kOffset = 1;
    static constexpr bool kUnscaled = true;
};
struct TQ2_0 : Ternary {
    static constexpr int kBytes = 66;
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static F unpack(Rows rows, const Emit & emit) {
        const F scale = rows.halves(64);
        GGPIPE_UNITS(2) {
            U both[8], numbers[8];
            for (int i = 0; i < 2; i++) rows.words(16 * i, both + 4 * i);
            GGPIPE_UNROLLED(part, 4) {
                for (int i = 0; i < 8; i++) numbers[i] = both[i] >> 2 * part & k2;
                emit(4 * u + part, numbers, I{} + 1, F{});
            }
            rows += 32;
        }
        return scale;
    }
};
// The first of a byte's five digits, times 64: the integer part of three times the byte, which is a fraction of 256. Then the byte has
// the others.
GGPIPE_TARGET GGPIPE_INLINE inline U next_digit(U & bytes) {
    const __m512i b = (__m512i) bytes, less = _mm512_subs_epu8(b, _mm512_set1_epi8(1));  // since averages are rounded up
    const U digit = (U) _mm512_avg_epu8(less, _mm512_avg_epu8(less, _mm512_setzero_si512())) & (k2 << 6);
    bytes = (U) _mm512_add_epi8(b, _mm512_add_epi8(b, b));
    return digit;
}
struct TQ1_0 : Ternary {
    static constexpr int kBytes = 54, kOffset = 64;
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static F unpack(Rows rows, const Emit & emit) {
        const F scale = rows.halves(52) * 0x1p-6f;
        U bytes[8], numbers[8];
        for (int i = 0; i < 2; i++) rows.words(16 * i, bytes + 4 * i);
        GGPIPE_UNITS(5) {
            for (int i = 0; i < 8; i++) numbers[i] = next_digit(bytes[i]);
            emit(u, numbers, I{} + 1, F{});
        }
        rows.words(32, bytes);
        bytes[4] = rows.word(48);
        GGPIPE_UNROLLED(u, 3) {
            for (int i = 0; i < 8; i++) numbers[i] = next_digit(bytes[i < 4 || u < 2 ? i % 4 : 4]);
            emit(5 + u, numbers, I{} + 1, F{});
        }
        return scale;
    }
};

}  // namespace ggpipe::GGPIPE_TILES
#endif
