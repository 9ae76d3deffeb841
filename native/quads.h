// Vectors of AVX2 for the kernels in quad_tiles.h: eight rows of weights at a time. avx_vnni.cpp compiles all of them once more,
// with dot products of its own.
//
// A quad is a vector with 8 columns of four rows, a byte each. The eight rows are the quads A and B. Products with the same 8
// columns of a row of activations are added up in each row's quarter of both, and only sums of many columns come into lanes, a
// row each. ggml repacks the weights of some types as quads; those of others become quads with one shuffle each.
//
// With one more shuffle, vectors have 4 columns of all eight rows as lanes. That pays for several rows of activations: products
// are in lanes at once, and 16 bits hold the sums of more columns.
#pragma once

#ifdef __x86_64__
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "vectors.h"

#ifndef GGPIPE_QUADS
#define GGPIPE_QUADS avx2
#define GGPIPE_AVX2 __attribute__((target("avx2,fma,f16c")))
#endif

namespace ggpipe::GGPIPE_QUADS {

constexpr int kLanes = 8;
constexpr int kTileRows = 2 * kLanes;
using F = __m256;
using V = __m256i;

GGPIPE_AVX2 GGPIPE_INLINE inline V load(const void * from) { return _mm256_loadu_si256((const V *) from); }
GGPIPE_AVX2 GGPIPE_INLINE inline __m128i load_16(const void * from) { return _mm_loadu_si128((const __m128i *) from); }
GGPIPE_AVX2 GGPIPE_INLINE inline V all_bytes(int value) { return _mm256_set1_epi8(value); }
GGPIPE_AVX2 GGPIPE_INLINE inline V four_bits(V bytes) { return _mm256_and_si256(bytes, all_bytes(15)); }
GGPIPE_AVX2 GGPIPE_INLINE inline V upper_four_bits(V bytes) { return four_bits(_mm256_srli_epi16(bytes, 4)); }
GGPIPE_AVX2 GGPIPE_INLINE inline V sum_of(V a, V b) { return _mm256_add_epi32(a, b); }
GGPIPE_AVX2 GGPIPE_INLINE inline F floats(V integers) { return _mm256_cvtepi32_ps(integers); }
GGPIPE_AVX2 GGPIPE_INLINE inline F negative(F x) { return _mm256_xor_ps(x, _mm256_set1_ps(-0.0f)); }
GGPIPE_AVX2 GGPIPE_INLINE inline V in_both(__m128i x) { return _mm256_broadcastsi128_si256(x); }

// Sums of pairs of A's and B's numbers, as lanes.
GGPIPE_AVX2 GGPIPE_INLINE inline V in_lanes(V a, V b) {
    const F even = _mm256_shuffle_ps((F) a, (F) b, 0x88), odd = _mm256_shuffle_ps((F) a, (F) b, 0xdd);
    return sum_of((V) even, (V) odd);
}
// Products of bytes, the first without signs, are added up by twos in 16 bits, or with kByFours in 32 bits.
#ifdef GGPIPE_DOT_BYTES
constexpr bool kDots = true;
GGPIPE_AVX2 GGPIPE_INLINE inline V with_pairs(V sum, V pairs, V factors) { return GGPIPE_DOT_PAIRS(sum, pairs, factors); }
#else
constexpr bool kDots = false;
GGPIPE_AVX2 GGPIPE_INLINE inline V with_pairs(V sum, V pairs, V factors) { return sum_of(sum, _mm256_madd_epi16(pairs, factors)); }
#endif
template <bool kByFours> GGPIPE_AVX2 GGPIPE_INLINE inline void add_products(V numbers, V others, bool is_first, V & to) {
#ifdef GGPIPE_DOT_BYTES
    if constexpr (kByFours) {
        to = GGPIPE_DOT_BYTES(is_first ? _mm256_setzero_si256() : to, numbers, others);
        return;
    }
#endif
    const V products = _mm256_maddubs_epi16(numbers, others);
    to = is_first ? products : _mm256_add_epi16(to, products);
}
// Numbers with signs, and their sizes, times those of a row of activations: sums of four columns.
GGPIPE_AVX2 GGPIPE_INLINE inline V signed_products(V numbers, V sizes, V others) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(sizes, _mm256_sign_epi8(others, numbers)), _mm256_set1_epi16(1));
}
constexpr int8_t kZero = -128;  // for a shuffle, also after adding a few
// Of pairs of 16-bit numbers in lanes: the first (0) or second (1) one, twice; with kByFours, and 0.
template <bool kByFours> GGPIPE_AVX2 GGPIPE_INLINE inline V one_of_pairs(V pairs, int which) {
    const __m128i first = kByFours ? _mm_setr_epi8(0, 1, kZero, kZero, 4, 5, kZero, kZero, 8, 9, kZero, kZero, 12, 13, kZero, kZero)
                                   : _mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13);
    return _mm256_shuffle_epi8(pairs, in_both(_mm_add_epi8(first, _mm_set1_epi8(2 * which))));
}
// Of pairs of 16-bit numbers in lanes: the first (0) or second (1) one as A or B has it, four times; with kByFours, and 0, twice.
template <int kSecond, bool kByFours> GGPIPE_AVX2 GGPIPE_INLINE inline void in_quads(V pairs, V & a, V & b) {
    constexpr uint64_t kOnes = 0x0101010101010101, kFirst = (kByFours ? 0x8080010080800100 : 0x0100010001000100) + 2 * kSecond * kOnes;
    const auto from = [&](int at) GGPIPE_AVX2 GGPIPE_INLINE {  // whose constants need no instructions
        const uint64_t first = kFirst + at * kOnes, second = first + 4 * kOnes;
        return _mm256_shuffle_epi8(pairs, _mm256_setr_epi64x(first, second, first, second));
    };
    a = from(0);
    b = from(8);
}
// Bytes 0 and 1, or 2 and 3, of each lane as two numbers.
GGPIPE_AVX2 GGPIPE_INLINE inline V pair_of_bytes(V lanes, int which) {
    return which ? _mm256_shuffle_epi8(lanes, in_both(_mm_setr_epi8(2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1)))
                 : _mm256_shuffle_epi8(lanes, in_both(_mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1)));
}
GGPIPE_AVX2 GGPIPE_INLINE inline V signed_pair_of_bytes(V lanes, int which) {
    return _mm256_srai_epi16(_mm256_slli_epi16(pair_of_bytes(lanes, which), 8), 8);
}

// ---- rows one after another: lanes have them in order, A rows 0, 1, 4 and 5 ---------------------------------
class Rows {
   public:
    static constexpr bool kInLanes = false;
    static constexpr int kGroup = 1;  // rows that lie side by side
    int n_units;                      // of 32 columns in a chunk; fewer than 8 at the end of rows
    GGPIPE_AVX2 GGPIPE_INLINE Rows(const uint8_t * first, size_t stride, int n_units)
        : n_units(n_units), lower_(first), upper_(first + 4 * stride), stride_(stride) {}
    GGPIPE_AVX2 GGPIPE_INLINE void operator+=(int bytes) {
        lower_ += bytes;
        upper_ += bytes;
    }
    GGPIPE_AVX2 GGPIPE_INLINE const uint8_t * row(int i) const { return (i < 4 ? lower_ : upper_) + i % 4 * stride_; }
    template <class T> GGPIPE_AVX2 GGPIPE_INLINE T read(int i, int at) const {
        T value;
        memcpy(&value, row(i) + at, sizeof value);
        return value;
    }
    // 16 bytes of each row: A and B of the first 8, and of the others.
    GGPIPE_AVX2 GGPIPE_INLINE void quads(int at, V * to) const {
        for (int i = 0; i < 2; i++) {
            const V x = both(2 * i, at), y = both(2 * i + 1, at);
            to[i] = _mm256_unpacklo_epi64(x, y);
            to[2 + i] = _mm256_unpackhi_epi64(x, y);
        }
    }
    // 16 bytes of each row, as lanes of four vectors.
    GGPIPE_AVX2 GGPIPE_INLINE void words(int at, V * to) const {
        const V v0 = both(0, at), v1 = both(1, at), v2 = both(2, at), v3 = both(3, at);
        const V a = _mm256_unpacklo_epi32(v0, v1), b = _mm256_unpackhi_epi32(v0, v1);
        const V c = _mm256_unpacklo_epi32(v2, v3), d = _mm256_unpackhi_epi32(v2, v3);
        to[0] = _mm256_unpacklo_epi64(a, c);
        to[1] = _mm256_unpackhi_epi64(a, c);
        to[2] = _mm256_unpacklo_epi64(b, d);
        to[3] = _mm256_unpackhi_epi64(b, d);
    }
    GGPIPE_AVX2 GGPIPE_INLINE V word(int at) const {
        const auto word = [&](int row) GGPIPE_AVX2 GGPIPE_INLINE { return read<int32_t>(row, at); };
        return _mm256_setr_epi32(word(0), word(1), word(2), word(3), word(4), word(5), word(6), word(7));
    }
    GGPIPE_AVX2 GGPIPE_INLINE V bytes(int at) const { return _mm256_and_si256(word(at), _mm256_set1_epi32(255)); }
    GGPIPE_AVX2 GGPIPE_INLINE F halves(int at) const {
        const auto half = [&](int row) GGPIPE_AVX2 GGPIPE_INLINE { return read<int16_t>(row, at); };
        return _mm256_cvtph_ps(_mm_setr_epi16(half(0), half(1), half(2), half(3), half(4), half(5), half(6), half(7)));
    }
    // Results of eight rows from lanes.
    GGPIPE_AVX2 GGPIPE_INLINE static F in_order(F lanes) { return lanes; }

   private:
    GGPIPE_AVX2 GGPIPE_INLINE V both(int i, int at) const {  // 16 bytes of this row and the fourth after it
        return _mm256_inserti128_si256(_mm256_castsi128_si256(load_16(row(i) + at)), load_16(row(i + 4) + at), 1);
    }
    const uint8_t * lower_, * upper_;
    size_t stride_;
};

// ---- eight rows side by side, 8 bytes of each in turn: lanes are rows 0, 1, 4, 5, 2, 3, 6 and 7 --------------
class Eights {
   public:
    static constexpr bool kInLanes = false;
    static constexpr int kGroup = 8;
    int n_units;
    GGPIPE_AVX2 GGPIPE_INLINE Eights(const uint8_t * first, size_t, int n_units) : n_units(n_units), first_(first) {}
    GGPIPE_AVX2 GGPIPE_INLINE void operator+=(int bytes) { first_ += bytes; }
    // 16 bytes of each row: A and B of the first 8, and of the others.
    GGPIPE_AVX2 GGPIPE_INLINE void quads(int at, V * to) const {
        for (int i = 0; i < 4; i++) to[i] = load(first_ + at + 32 * i);
    }
    GGPIPE_AVX2 GGPIPE_INLINE F halves(int at) const { return _mm256_cvtph_ps(_mm_shuffle_epi32(load_16(first_ + at), 0xd8)); }
    GGPIPE_AVX2 GGPIPE_INLINE V bytes(int at) const {
        const V in_order = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) (first_ + at)));
        return _mm256_permute4x64_epi64(in_order, 0xd8);
    }
    // Pairs of unsigned bytes, from eight of each.
    GGPIPE_AVX2 GGPIPE_INLINE static V pairs(uint64_t first, uint64_t second) {
        const __m128i both = _mm_unpacklo_epi8(_mm_cvtsi64_si128(first), _mm_cvtsi64_si128(second));
        return _mm256_cvtepu8_epi16(_mm_shuffle_epi32(both, 0xd8));
    }
    // Pairs of bytes of each row, as numbers.
    GGPIPE_AVX2 GGPIPE_INLINE V byte_pairs(int at) const { return _mm256_cvtepu8_epi16(_mm_shuffle_epi32(load_16(first_ + at), 0xd8)); }
    // 6-bit scales and minima, packed as in one block of Q4_K, but of eight rows.
    GGPIPE_AVX2 GGPIPE_INLINE void scales(int at, uint64_t & scales, uint64_t & minima) const {
        constexpr uint32_t k2 = 0x03030303, k4 = 0x0f0f0f0f;
        uint32_t packed[3];
        memcpy(packed, first_ + at, sizeof packed);
        const uint32_t s = (packed[2] & k4) | (packed[0] >> 6 & k2) << 4, m = (packed[2] >> 4 & k4) | (packed[1] >> 6 & k2) << 4;
        scales = (packed[0] & 0x3f3f3f3f) | (uint64_t) s << 32;
        minima = (packed[1] & 0x3f3f3f3f) | (uint64_t) m << 32;
    }
    GGPIPE_AVX2 GGPIPE_INLINE static F in_order(F lanes) {
        return (F) _mm256_permute4x64_epi64((V) lanes, 0xd8);
    }

   private:
    const uint8_t * first_;
};

// The same rows, but `quads` brings 4 columns of all eight into lanes, and then the next 4.
template <class From> class InLanes : public From {
   public:
    static constexpr bool kInLanes = true;
    GGPIPE_AVX2 GGPIPE_INLINE InLanes(const From & from) : From(from) {}
    GGPIPE_AVX2 GGPIPE_INLINE void quads(int at, V * to) const {
        V quads[4];
        From::quads(at, quads);
        for (int i = 0; i < 4; i += 2) {
            to[i] = (V) _mm256_shuffle_ps((F) quads[i], (F) quads[i + 1], 0x88);
            to[i + 1] = (V) _mm256_shuffle_ps((F) quads[i], (F) quads[i + 1], 0xdd);
        }
    }
};

}  // namespace ggpipe::GGPIPE_QUADS
#endif
