// How formats of quantized weights are unpacked for products.cpp.
#pragma once

#ifdef __x86_64__
#include "lanes.h"

namespace ggpipe {

GGPIPE_TARGET GGPIPE_INLINE inline I byte_of(const U * words, int i) { return (I) (words[i / 4] >> i % 4 * 8 & 255); }
GGPIPE_TARGET GGPIPE_INLINE inline I signed_byte_of(const U * words, int i) { return (I) (words[i / 4] << (24 - i % 4 * 8)) >> 24; }
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
// kSuper are integers, and `unpack` returns that of the block; with kScaled, numbers are multiplied by the former already.

template <class Source> struct Small {  // a block is a unit
    using From = Source;
    using Scale = F;
    static constexpr int kUnit = 32, kBlock = 32;
    static constexpr bool kHasMinima = false, kSuper = false, kScaled = false;
};
template <class Source> struct Super {  // a block is a tile's columns
    using From = Source;
    using Scale = I;
    static constexpr int kUnit = 32, kBlock = kChunk;
    static constexpr bool kHasMinima = false, kSuper = true, kScaled = false;
};
struct SmallRows : Small<Rows> {  // `row` unpacks a block of one row
    GGPIPE_TARGET GGPIPE_INLINE static F scale(const Rows & rows, F &) { return rows.halves(0); }
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
GGPIPE_TARGET GGPIPE_INLINE inline void look_up(U table, U numbers[8]) {
    for (int i = 0; i < 8; i++) numbers[i] = looked_up(table, numbers[i]);
}

// The same in a row.
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

struct Q8_0 : SmallRows {
    static constexpr int kBytes = 34, kOffset = 128;
    GGPIPE_TARGET GGPIPE_INLINE static __m256i row(const uint8_t * block) {
        return _mm256_xor_si256(_mm256_loadu_si256((const __m256i *) (block + 2)), _mm256_set1_epi8(-128));
    }
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static void unpack(Rows rows, const Emit & emit) {
        GGPIPE_UNITS(8) {
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
        GGPIPE_UNITS(8) {
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
struct Q5_0 : SmallRows {
    static constexpr int kBytes = 22, kOffset = 16;
    GGPIPE_TARGET GGPIPE_INLINE static __m256i row(const uint8_t * block) {
        return fives_of(block + 2);
    }
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static void unpack(Rows rows, const Emit & emit) {
        GGPIPE_UNITS(8) {
            U numbers[8];
            unpack_five(rows, 2, numbers);
            emit(u, numbers, rows.halves(0), F{});
            rows += kBytes;
        }
    }
};
struct Q5_1 : SmallRows {
    static constexpr int kBytes = 24, kOffset = 0;
    static constexpr bool kHasMinima = true;
    GGPIPE_TARGET GGPIPE_INLINE static __m256i row(const uint8_t * block) {
        return fives_of(block + 4);
    }
    GGPIPE_TARGET GGPIPE_INLINE static F scale(const Rows & rows, F & minimum) { return scale_and_minimum(rows, minimum); }
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static void unpack(Rows rows, const Emit & emit) {
        GGPIPE_UNITS(8) {
            U numbers[8];
            unpack_five(rows, 4, numbers);
            F minimum;
            const F scale = scale_and_minimum(rows, minimum);
            emit(u, numbers, scale, minimum);
            rows += kBytes;
        }
    }
};
// Of eight units. Returns the scale of the block.
GGPIPE_TARGET GGPIPE_INLINE inline F unpack_scales(const Rows & rows, I * scales, F * minima) {
    U head[4];
    rows.words(0, head);
    const F minimum = -lower_half(head[0] >> 16);
    const U s[2] = {head[1] & 0x3f3f3f3f, (head[3] & k4) | (head[1] >> 6 & k2) << 4};
    const U m[2] = {head[2] & 0x3f3f3f3f, (head[3] >> 4 & k4) | (head[2] >> 6 & k2) << 4};
    for (int u = 0; u < 8; u++) {
        scales[u] = byte_of(s, u);
        minima[u] = minimum * floats(byte_of(m, u));
    }
    return lower_half(head[0]);
}
struct Q5_K : Super<Rows> {
    static constexpr int kBytes = 176, kOffset = 0;
    static constexpr bool kHasMinima = true;
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static F unpack(Rows rows, const Emit & emit) {
        I scales[8];
        F minima[8];
        U high[8];
        const F scale = unpack_scales(rows, scales, minima);
        for (int i = 0; i < 2; i++) rows.words(16 + 16 * i, high + 4 * i);
        rows += 48;
        GGPIPE_UNITS(4) {
            U both[8], numbers[8];
            for (int i = 0; i < 2; i++) rows.words(16 * i, both + 4 * i);
            for (int i = 0; i < 8; i++) numbers[i] = (both[i] & k4) | (high[i] >> 2 * u & k1) << 4;
            emit(2 * u, numbers, scales[2 * u], minima[2 * u]);
            for (int i = 0; i < 8; i++) numbers[i] = (both[i] >> 4 & k4) | (high[i] >> (2 * u + 1) & k1) << 4;
            emit(2 * u + 1, numbers, scales[2 * u + 1], minima[2 * u + 1]);
            rows += 32;
        }
        return scale;
    }
};
struct Q6_K : Super<Rows> {
    static constexpr int kBytes = 210, kOffset = 32, kUnit = 16;
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static F unpack(Rows rows, const Emit & emit) {
        U bytes[4];
        rows.words(192, bytes);
        const F scale = rows.halves(208);
        Rows upper = rows;
        upper += 128;
        GGPIPE_UNITS(2) {
            U low[16], high[8], numbers[4];
            for (int i = 0; i < 4; i++) rows.words(16 * i, low + 4 * i);
            for (int i = 0; i < 2; i++) upper.words(16 * i, high + 4 * i);
            for (int part = 0; part < 4; part++) {  // 32 columns
                for (int half = 0; half < 2; half++) {
                    for (int i = 0; i < 4; i++) {
                        const U four = low[part % 2 * 8 + half * 4 + i] >> part / 2 * 4 & k4;
                        numbers[i] = four | (high[half * 4 + i] >> 2 * part & k2) << 4;
                    }
                    emit(8 * u + 2 * part + half, numbers, signed_byte_of(bytes, 8 * u + 2 * part + half), F{});
                }
            }
            rows += 64;
            upper += 32;
        }
        return scale;
    }
};
struct Q3_K : Super<Rows> {
    static constexpr int kBytes = 110, kOffset = 4, kUnit = 16;
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static F unpack(Rows rows, const Emit & emit) {
        const U packed[3] = {rows.word(96), rows.word(100), rows.word(104)};
        U bytes[4], high[8];
        for (int i = 0; i < 4; i++) bytes[i] = (packed[i % 2] >> i / 2 * 4 & k4) | (packed[2] >> 2 * i & k2) << 4;
        const F scale = rows.halves(108);
        for (int i = 0; i < 2; i++) rows.words(16 * i, high + 4 * i);
        rows += 32;
        GGPIPE_UNITS(2) {
            U both[8], numbers[4];
            for (int i = 0; i < 2; i++) rows.words(16 * i, both + 4 * i);
            for (int part = 0; part < 8; part++) {
                for (int i = 0; i < 4; i++) {
                    const int word = part % 2 * 4 + i;
                    numbers[i] = (both[word] >> part / 2 * 2 & k2) | (high[word] >> (4 * u + part / 2) & k1) << 2;
                }
                emit(8 * u + part, numbers, byte_of(bytes, 8 * u + part) - 32, F{});
            }
            rows += 32;
        }
        return scale;
    }
};
struct IQ4_XS : Super<Rows> {
    static constexpr int kBytes = 136, kOffset = 128;
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static F unpack(Rows rows, const Emit & emit) {
        const U head = rows.word(0), low = rows.word(4), table = table_of(kNonLinear, kOffset);
        const F scale = lower_half(head);
        rows += 8;
        GGPIPE_UNITS(8) {
            U both[4], numbers[8];
            rows.words(0, both);
            unpack_nibbles(both, numbers);
            look_up(table, numbers);
            const U bits = (low >> 4 * u & 15) | (head >> (16 + 2 * u) & 3) << 4;
            emit(u, numbers, (I) bits - 32, F{});
            rows += 16;
        }
        return scale;
    }
};

GGPIPE_TARGET GGPIPE_INLINE inline void unpack_nibbles(const Eights & rows, int at, U numbers[8]) {
    U both[4];
    for (int i = 0; i < 2; i++) rows.words(at + 64 * i, both + 2 * i);
    unpack_nibbles(both, numbers);
}
struct Q4_0 : Small<Eights> {  // ggml has inverted the upper bit of each number
    static constexpr int kBytes = 18, kOffset = 8;
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static void unpack(Eights rows, const Emit & emit) {
        GGPIPE_UNITS(8) {
            U numbers[8];
            unpack_nibbles(rows, 16, numbers);
            for (U & four : numbers) four ^= 0x08080808;
            emit(u, numbers, rows.halves(0), F{});
            rows += 8 * kBytes;
        }
    }
};
struct IQ4_NL : Small<Eights> {
    static constexpr int kBytes = 18, kOffset = 128;
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static void unpack(Eights rows, const Emit & emit) {
        const U table = table_of(kNonLinear, kOffset);
        GGPIPE_UNITS(8) {
            U numbers[8];
            unpack_nibbles(rows, 16, numbers);
            look_up(table, numbers);
            emit(u, numbers, rows.halves(0), F{});
            rows += 8 * kBytes;
        }
    }
};
struct MXFP4 : Small<Eights> {
    static constexpr int kBytes = 17, kOffset = 12;
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static void unpack(Eights rows, const Emit & emit) {
        const U table = table_of(kFloat4, kOffset);
        GGPIPE_UNITS(8) {
            U numbers[8];
            unpack_nibbles(rows, 8, numbers);
            look_up(table, numbers);
            const U e = rows.bytes(0);  // the scale is half of 2 to the (e - 127)
            emit(u, numbers, (F) (e > 1 ? (e - 1) << 23 : e == 1 ? U{} + 0x400000 : U{} + 0x200000), F{});
            rows += 8 * kBytes;
        }
    }
};
struct Q4_K : Super<Eights> {
    static constexpr int kBytes = 144, kOffset = 0;
    static constexpr bool kHasMinima = true;
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static F unpack(Eights rows, const Emit & emit) {
        const F scale = rows.halves(0), minimum = -rows.halves(16);
        Eights scales = rows;
        scales += 32;
        rows += 128;
        GGPIPE_UNITS(4) {
            U both[8], numbers[8];
            I s;
            F m;
            for (int i = 0; i < 4; i++) rows.words(64 * i, both + 2 * i);
            for (int i = 0; i < 8; i++) numbers[i] = both[i] & k4;
            scales.scales(0, s, m);
            emit(2 * u, numbers, s, minimum * m);
            for (int i = 0; i < 8; i++) numbers[i] = both[i] >> 4 & k4;
            scales.scales(12, s, m);
            emit(2 * u + 1, numbers, s, minimum * m);
            scales += 24;
            rows += 256;
        }
        return scale;
    }
};
struct Q2_K : Super<Eights> {
    static constexpr int kBytes = 84, kOffset = 0, kUnit = 16;
    static constexpr bool kHasMinima = true, kScaled = true;
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static F unpack(Eights rows, const Emit & emit) {
        const F scale = rows.halves(0), minimum = -rows.halves(16);
        Eights scales = rows;
        scales += 32;
        rows += 160;
        GGPIPE_UNITS(2) {
            U both[8], numbers[4];
            for (int i = 0; i < 4; i++) rows.words(64 * i, both + 2 * i);
            for (int part = 0; part < 8; part++) {
                const U pair = scales.pairs_of_bytes(part / 2 * 16) >> part % 2 * 8;  // of this unit and the one beside it
                const __m512i times = (__m512i) ((pair & 15) * 0x10001);  // for two bytes at a time: 3 * 15 at most
                for (int i = 0; i < 4; i++) {
                    const U twos = both[part % 2 * 4 + i] >> part / 2 * 2 & k2;
                    numbers[i] = (U) _mm512_mullo_epi16((__m512i) twos, times);
                }
                emit(8 * u + part, numbers, I{}, minimum * floats((I) (pair >> 4 & 15)));
            }
            scales += 64;
            rows += 256;
        }
        return scale;
    }
};

}  // namespace ggpipe
#endif
