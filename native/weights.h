// How formats of quantized weights are unpacked for tiles.h. Those with blocks of 256 columns are in superblocks.h.
#pragma once

#ifdef __x86_64__
#include "lanes.h"

namespace ggpipe::GGPIPE_TILES {

// Bits 0 to 3 of each lane, as the fifth bits of four bytes.
GGPIPE_TARGET GGPIPE_INLINE inline U fifth_bits(U bits) { return ((bits & 15) * 0x204081 & k1) << 4; }
GGPIPE_TARGET GGPIPE_INLINE inline U table_of(const int8_t * values, int offset) {
    const __m128i table = _mm_add_epi8(_mm_loadu_si128((const __m128i *) values), _mm_set1_epi8(offset));
    return (U) _mm512_broadcast_i32x4(table);
}
GGPIPE_TARGET GGPIPE_INLINE inline U looked_up(U table, U bytes) {
    return (U) _mm512_shuffle_epi8((__m512i) table, (__m512i) bytes);
}
constexpr int8_t kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kFloat4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// ---- formats ------------------------------------------------------------------------------------------------
// Each has a number of columns and bytes a block (of a row), columns a unit (which share a scale), what is added to each number
// so that it is not negative, and whether units have a minimum. Activations are quantized by 32, or by 256 (kSuper).
// `unpack` calls `emit` for each unit of a tile, in order, with its number, its numbers, its scale and its minimum. Scales of
// kSuper are integers, and `unpack` returns that of the block; with kScalesAreSmall, a number times its scale is one byte, and with
// kUnscaled all scales are 1.
//
// kColumnsOfByte: if more than one, bytes with that many columns each are shifted as a whole, so columns are not in order. Of each
// 32, the first column of each byte comes first, then the second of each.
//
// Up to kRowByRow rows of activations are multiplied with one row of weights after another: `row` gives eight numbers whose sum
// is the product of a block (with scales and offsets where kSuper), `scale` what it is multiplied by, and its units' minima.
// kEndToEnd: rows of weights are multiplied with a single row of activations from end to end. The half at kScaleAt is their scale.

template <class Source> struct Small {  // a block is a unit
    using From = Source;
    using Scale = F;
    static constexpr int kUnit = 32, kBlock = 32, kColumnsOfByte = 1;
    static constexpr bool kHasMinima = false, kSuper = false, kScalesAreSmall = false, kUnscaled = false;
    static constexpr size_t kRowByRow = 0, kScaleAt = 0;
    static constexpr bool kEndToEnd = false;
};
GGPIPE_TARGET GGPIPE_INLINE inline F scale_and_minimum(const Rows & rows, F & minimum) {
    const U both = rows.word(0);
    minimum = lower_half(both >> 16);
    return lower_half(both);
}
#define GGPIPE_UNITS(N) _Pragma("GCC unroll 1") for (int u = 0; u < N; u++)

// 16 bytes: the lower halves of all, then the upper ones.
GGPIPE_TARGET GGPIPE_INLINE inline void unpack_nibbles(const U both[4], U numbers[8]) {
    for (int i = 0; i < 4; i++) {
        numbers[i] = both[i] & k4;
        numbers[4 + i] = both[i] >> 4 & k4;
    }
}
template <int n = 8> GGPIPE_TARGET GGPIPE_INLINE inline void look_up(U table, U numbers[n]) {
    for (int i = 0; i < n; i++) numbers[i] = looked_up(table, numbers[i]);
}

// The same in a row.
GGPIPE_TARGET GGPIPE_INLINE inline __m256i load_32(const void * from) { return _mm256_loadu_si256((const __m256i *) from); }
GGPIPE_TARGET GGPIPE_INLINE inline __m256i products(__m256i numbers, const int8_t * x) {
    return _mm256_dpbusd_epi32(__m256i{}, numbers, load_32(x));
}
GGPIPE_TARGET GGPIPE_INLINE inline __m256i nibbles_of(const uint8_t * from) {
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) from));
    return _mm256_and_si256(_mm256_srlv_epi64(both, _mm256_setr_epi64x(0, 0, 4, 4)), _mm256_set1_epi8(15));
}
GGPIPE_TARGET GGPIPE_INLINE inline __m256i fives_of(const uint8_t * from) {  // the fifth bits are before the nibbles
    uint32_t fifths;
    memcpy(&fifths, from, 4);
    const __m256i four = nibbles_of(from + 4);
    return _mm256_mask_add_epi8(four, fifths, four, _mm256_set1_epi8(16));
}

struct Q8_0 : Small<Rows> {
    static constexpr int kBytes = 34, kOffset = 128;
    static constexpr size_t kRowByRow = 2;
    static constexpr bool kEndToEnd = true;
    GGPIPE_TARGET GGPIPE_INLINE static __m256i row(const uint8_t * block, const int8_t * x, const int32_t *) {
        return products(_mm256_xor_si256(load_32(block + 2), _mm256_set1_epi8(-128)), x);
    }
    GGPIPE_TARGET GGPIPE_INLINE static F scale(const Rows & rows, F (*)[1]) { return rows.halves(0); }
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static void unpack(Rows rows, const Emit & emit) {
        GGPIPE_UNITS(rows.n_units) {
            U words[8], numbers[8];
            for (int i = 0; i < 2; i++) rows.words(2 + 16 * i, words + 4 * i);
            for (int i = 0; i < 8; i++) numbers[i] = words[i] ^ 0x80808080;
            emit(u, numbers, rows.halves(0), F{});
            rows += kBytes;
        }
    }
};
struct Q4_1 : Small<Rows> {
    static constexpr int kBytes = 20, kOffset = 0;
    static constexpr bool kHasMinima = true;
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static void unpack(Rows rows, const Emit & emit) {
        GGPIPE_UNITS(rows.n_units) {
            U both[4], numbers[8];
            rows.words(4, both);
            unpack_nibbles(both, numbers);
            F minimum;
            const F scale = scale_and_minimum(rows, minimum);
            emit(u, numbers, scale, minimum);
            rows += kBytes;
        }
    }
};
GGPIPE_TARGET GGPIPE_INLINE inline void unpack_five(const Rows & rows, int at, U numbers[8]) {
    U both[4];
    const U bits = rows.word(at);
    rows.words(at + 4, both);
    for (int i = 0; i < 4; i++) {
        numbers[i] = (both[i] & k4) | fifth_bits(bits >> 4 * i);
        numbers[4 + i] = (both[i] >> 4 & k4) | fifth_bits(bits >> (16 + 4 * i));
    }
}
struct Q5_0 : Small<Rows> {
    static constexpr int kBytes = 22, kOffset = 16;
    static constexpr size_t kRowByRow = 2;
    GGPIPE_TARGET GGPIPE_INLINE static __m256i row(const uint8_t * block, const int8_t * x, const int32_t *) {
        return products(fives_of(block + 2), x);
    }
    GGPIPE_TARGET GGPIPE_INLINE static F scale(const Rows & rows, F (*)[1]) { return rows.halves(0); }
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static void unpack(Rows rows, const Emit & emit) {
        GGPIPE_UNITS(rows.n_units) {
            U numbers[8];
            unpack_five(rows, 2, numbers);
            emit(u, numbers, rows.halves(0), F{});
            rows += kBytes;
        }
    }
};
struct Q5_1 : Small<Rows> {
    static constexpr int kBytes = 24, kOffset = 0;
    static constexpr bool kHasMinima = true;
    static constexpr size_t kRowByRow = 2;
    GGPIPE_TARGET GGPIPE_INLINE static __m256i row(const uint8_t * block, const int8_t * x, const int32_t *) {
        return products(fives_of(block + 4), x);
    }
    GGPIPE_TARGET GGPIPE_INLINE static F scale(const Rows & rows, F (*minima)[1]) { return scale_and_minimum(rows, **minima); }
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static void unpack(Rows rows, const Emit & emit) {
        GGPIPE_UNITS(rows.n_units) {
            U numbers[8];
            unpack_five(rows, 4, numbers);
            F minimum;
            const F scale = scale_and_minimum(rows, minimum);
            emit(u, numbers, scale, minimum);
            rows += kBytes;
        }
    }
};

struct NVFP4 : Small<Rows> {  // four units of 16 columns, each with a scale of 8 bits
    static constexpr int kBytes = 36, kBlock = 64, kUnit = 16, kOffset = 12;
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static void unpack(Rows rows, const Emit & emit) {
        const U table = table_of(kFloat4, kOffset);
        GGPIPE_UNITS(rows.n_units / 2) {
            U both[8];
            const U scales = rows.word(0);
            for (int i = 0; i < 2; i++) rows.words(4 + 16 * i, both + 4 * i);
            GGPIPE_UNROLLED(unit, 4) {
                U numbers[4];
                for (int i = 0; i < 2; i++) {
                    numbers[i] = both[2 * unit + i] & k4;
                    numbers[2 + i] = both[2 * unit + i] >> 4 & k4;
                }
                look_up<4>(table, numbers);
                // As a half with the same bits, a scale is 2 to the -8 of what it is, and half of that is wanted. 127 is no number.
                const U byte = scales >> 8 * unit & 255, bits = byte == 127 ? U{} : byte & 127;
                emit(4 * u + unit, numbers, lower_half(bits << 7) * 128, F{});
            }
            rows += kBytes;
        }
    }
};

// ---- formats that ggml may have repacked --------------------------------------------------------------------
GGPIPE_TARGET GGPIPE_INLINE inline void unpack_nibbles(const Rows & rows, int at, U numbers[8]) {
    U both[4];
    rows.words(at, both);
    unpack_nibbles(both, numbers);
}
GGPIPE_TARGET GGPIPE_INLINE inline void unpack_nibbles(const Eights & rows, int at, U numbers[8]) {
    U both[4];
    for (int i = 0; i < 2; i++) rows.words(at + 64 * i, both + 2 * i);
    unpack_nibbles(both, numbers);
}
template <class Source> struct AnyQ4_0 : Small<Source> {
    static constexpr int kGroup = Source::kGroup, kBytes = 18, kOffset = 8;
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static void unpack(Source rows, const Emit & emit) {
        GGPIPE_UNITS(rows.n_units) {
            U numbers[8];
            unpack_nibbles(rows, 2 * kGroup, numbers);
            if (kGroup > 1) {  // ggml has inverted the upper bit of each number
                for (U & four : numbers) four ^= 0x08080808;
            }
            emit(u, numbers, rows.halves(0), F{});
            rows += kGroup * kBytes;
        }
    }
};
template <class Source> struct AnyIQ4_NL : Small<Source> {
    static constexpr int kGroup = Source::kGroup, kBytes = 18, kOffset = 128;
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static void unpack(Source rows, const Emit & emit) {
        const U table = table_of(kNonLinear, kOffset);
        GGPIPE_UNITS(rows.n_units) {
            U numbers[8];
            unpack_nibbles(rows, 2 * kGroup, numbers);
            look_up(table, numbers);
            emit(u, numbers, rows.halves(0), F{});
            rows += kGroup * kBytes;
        }
    }
};
template <class Source> struct AnyMXFP4 : Small<Source> {
    static constexpr int kGroup = Source::kGroup, kBytes = 17, kOffset = 12;
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static void unpack(Source rows, const Emit & emit) {
        const U table = table_of(kFloat4, kOffset);
        GGPIPE_UNITS(rows.n_units) {
            U numbers[8];
            unpack_nibbles(rows, kGroup, numbers);
            look_up(table, numbers);
            const U e = rows.bytes(0);  // the scale is half of 2 to the (e - 127)
            emit(u, numbers, (F) (e > 1 ? (e - 1) << 23 : e == 1 ? U{} + 0x400000 : U{} + 0x200000), F{});
            rows += kGroup * kBytes;
        }
    }
};
GGPIPE_LAYOUTS(Q4_0)
GGPIPE_LAYOUTS(IQ4_NL)
GGPIPE_LAYOUTS(MXFP4)

}  // namespace ggpipe::GGPIPE_TILES
#endif
