// Formats of quantized weights with a scale for 256 columns and integer scales of units; see weights.h.
#pragma once

#ifdef __x86_64__
#include "weights.h"

namespace ggpipe::GGPIPE_TILES {

GGPIPE_TARGET GGPIPE_INLINE inline I byte_of(const U * words, int i) { return (I) (words[i / 4] >> i % 4 * 8 & 255); }
GGPIPE_TARGET GGPIPE_INLINE inline I signed_byte_of(const U * words, int i) { return (I) (words[i / 4] << (24 - i % 4 * 8)) >> 24; }

template <class Source> struct Super {  // a block is a tile's columns
    using From = Source;
    using Scale = I;
    static constexpr int kUnit = 32, kBlock = kChunk, kColumnsOfByte = 1;
    static constexpr bool kHasMinima = false, kSuper = true, kScalesAreSmall = false, kUnscaled = false;
    static constexpr size_t kRowByRow = 0;
    static constexpr bool kEndToEnd = false;
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
struct Q4_K : Super<Rows> {
    static constexpr int kBytes = 144, kOffset = 0;
    static constexpr bool kHasMinima = true;
    static constexpr size_t kRowByRow = 1;
    GGPIPE_TARGET GGPIPE_INLINE static __m256i row(const uint8_t * block, const int8_t * x, const int32_t *) {
        uint32_t packed[3];
        memcpy(packed, block + 4, sizeof packed);
        const uint64_t upper = (packed[2] & k4) | (packed[0] >> 6 & k2) << 4;
        const __m512i scales = _mm512_set1_epi64((packed[0] & 0x3f3f3f3f) | upper << 32), shifts = _mm512_setr_epi64(0, 0, 0, 0, 4, 4, 4, 4);
        const __m512i first = (__m512i) (U{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1} | 0x80808000);  // as 32 bits
        __m512i sum{};
        GGPIPE_UNROLLED(u, 4) {  // 64 columns: of a unit the lower four bits, of the next one the upper ones
            const __m512i both = _mm512_broadcast_i64x4(load_32(block + 16 + 32 * u));
            const __m512i numbers = (__m512i) ((U) _mm512_srlv_epi64(both, shifts) & k4);
            const __m512i parts = _mm512_dpbusd_epi32(__m512i{}, numbers, _mm512_loadu_si512(x + 64 * u));  // 4 * 15 * 127 at most
            sum = _mm512_dpwssd_epi32(sum, parts, _mm512_shuffle_epi8(scales, (__m512i) ((U) first + 2 * u)));
        }
        return _mm256_add_epi32(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1));
    }
    GGPIPE_TARGET GGPIPE_INLINE static F scale(const Rows & rows, F (*minima)[1]) {
        I scales[8];
        return unpack_scales(rows, scales, *minima);
    }
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static F unpack(Rows rows, const Emit & emit) {
        I scales[8];
        F minima[8];
        const F scale = unpack_scales(rows, scales, minima);
        rows += 16;
        GGPIPE_UNITS(4) {
            U both[8], numbers[8];
            for (int i = 0; i < 2; i++) rows.words(16 * i, both + 4 * i);
            for (int i = 0; i < 8; i++) numbers[i] = both[i] & k4;
            emit(2 * u, numbers, scales[2 * u], minima[2 * u]);
            for (int i = 0; i < 8; i++) numbers[i] = both[i] >> 4 & k4;
            emit(2 * u + 1, numbers, scales[2 * u + 1], minima[2 * u + 1]);
            rows += 32;
        }
        return scale;
    }
};
struct Q6_K : Super<Rows> {
    static constexpr int kBytes = 210, kOffset = 32, kUnit = 16;
    static constexpr size_t kRowByRow = 1, kScaleAt = 208;
    static constexpr bool kEndToEnd = true;
    GGPIPE_TARGET GGPIPE_INLINE static __m256i row(const uint8_t * block, const int8_t * x, const int32_t * starts) {
        Ints<8> sum = {};
        GGPIPE_UNITS(2) {  // 128 columns
            const auto part = [&](int i, Unsigned<8> low, Unsigned<8> high) GGPIPE_TARGET GGPIPE_INLINE {
                return products((__m256i) ((low & k4) | (high & 0x30303030)), x + 128 * u + 32 * i);
            };
            const auto a = (Unsigned<8>) load_32(block + 64 * u), b = (Unsigned<8>) load_32(block + 64 * u + 32);
            const auto high = (Unsigned<8>) load_32(block + 128 + 32 * u);
            const __m256i scales = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) (block + 192 + 8 * u)));
            const __m256i parts[4] = {part(0, a, high << 4), part(1, b, high << 2), part(2, a >> 4, high), part(3, b >> 4, high >> 2)};
            sum += (Ints<8>) scales * (Ints<8>) load_32(starts + 8 * u);
            const auto narrow = (__m256i) ((Ints<8>) scales & 0xffff);  // as products of four columns are: 4 * 63 * 127 at most
            for (int i = 0; i < 4; i++) {
                const __m256i both = _mm256_setr_epi32(2 * i, 2 * i, 2 * i, 2 * i, 2 * i + 1, 2 * i + 1, 2 * i + 1, 2 * i + 1);
                sum = (Ints<8>) _mm256_dpwssd_epi32((__m256i) sum, parts[i], _mm256_permutevar8x32_epi32(narrow, both));
            }
        }
        return (__m256i) sum;
    }
    GGPIPE_TARGET GGPIPE_INLINE static F scale(const Rows & rows, F (*)[1]) { return rows.halves(208); }
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
struct Q2_K : Super<Rows> {
    static constexpr int kBytes = 84, kOffset = 0, kUnit = 16;
    static constexpr bool kHasMinima = true, kScalesAreSmall = true;
    template <class Emit> GGPIPE_TARGET GGPIPE_INLINE static F unpack(Rows rows, const Emit & emit) {
        U bytes[4];
        rows.words(0, bytes);
        const U both_scales = rows.word(80);
        const F scale = lower_half(both_scales), minimum = -lower_half(both_scales >> 16);
        rows += 16;
        GGPIPE_UNITS(2) {
            U both[8], numbers[4];
            for (int i = 0; i < 2; i++) rows.words(16 * i, both + 4 * i);
            for (int part = 0; part < 8; part++) {
                const I pair = byte_of(bytes, 8 * u + part);
                for (int i = 0; i < 4; i++) numbers[i] = both[part % 2 * 4 + i] >> part / 2 * 2 & k2;
                emit(8 * u + part, numbers, pair & 15, minimum * floats(pair >> 4));
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

struct RepackedQ4_K : Super<Eights> {
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
struct RepackedQ2_K : Super<Eights> {
    static constexpr int kBytes = 84, kOffset = 0, kUnit = 16;
    static constexpr bool kHasMinima = true, kScalesAreSmall = true;
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
                for (int i = 0; i < 4; i++) numbers[i] = both[part % 2 * 4 + i] >> part / 2 * 2 & k2;
                emit(8 * u + part, numbers, (I) (pair & 15), minimum * floats((I) (pair >> 4 & 15)));
            }
            scales += 64;
            rows += 256;
        }
        return scale;
    }
};

}  // namespace ggpipe::GGPIPE_TILES
#endif
