// Rows of quantized weights as the lanes of vectors, for weights.h: 16 rows at a time.
//
// ggml has the weights of some types repacked, eight rows side by side, 8 bytes of each in turn; others are as in the file.
#pragma once

#ifdef __x86_64__
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "vectors.h"

#ifndef GGPIPE_TILES
#define GGPIPE_TILES avx512_vnni
#define GGPIPE_TARGET __attribute__((target("arch=x86-64-v4,avx512vnni")))
#define GGPIPE_DOT_BYTES _mm512_dpbusd_epi32
#endif

namespace ggpipe::GGPIPE_TILES {

constexpr int kLanes = 16;  // rows that are unpacked at a time
using F = Floats<kLanes>;
using I = Ints<kLanes>;
using U = Unsigned<kLanes>;  // often four bytes of each lane

constexpr uint32_t k1 = 0x01010101, k2 = 0x03030303, k4 = 0x0f0f0f0f;  // the lower bits of each byte

GGPIPE_TARGET GGPIPE_INLINE inline F widened(__m256i halves) { return (F) _mm512_cvtph_ps(halves); }
GGPIPE_TARGET GGPIPE_INLINE inline F floats(I integers) { return (F) _mm512_cvtepi32_ps((__m512i) integers); }
GGPIPE_TARGET GGPIPE_INLINE inline F multiply_add(F a, F b, F c) { return (F) _mm512_fmadd_ps((__m512) a, (__m512) b, (__m512) c); }
GGPIPE_TARGET GGPIPE_INLINE inline F lower_half(U words) { return widened(_mm512_cvtepi32_epi16((__m512i) words)); }

// ---- rows one after another ---------------------------------------------------------------------------------
class Rows {
   public:
    static constexpr int kGroup = 1;  // rows that lie side by side
    int n_units;                      // of 32 columns in a chunk; fewer than 8 at the end of rows
    GGPIPE_TARGET GGPIPE_INLINE Rows(const uint8_t * first, size_t stride, int n_units) : n_units(n_units), stride_(stride), strides_(3 * stride) {
        for (int i = 0; i < 4; i++) fourths_[i] = first + 4 * i * stride;
    }
    GGPIPE_TARGET GGPIPE_INLINE void operator+=(int bytes) {
        for (auto & fourth : fourths_) fourth += bytes;
    }
    GGPIPE_TARGET GGPIPE_INLINE const uint8_t * operator[](int lane) const {
        return fourths_[lane / 4] + (lane % 4 == 3 ? strides_ : lane % 4 * stride_);
    }
    // 16 bytes of each lane, as four vectors.
    GGPIPE_TARGET GGPIPE_INLINE void words(int at, U * to) const {
        const __m512i v0 = load(0, at), v1 = load(1, at), v2 = load(2, at), v3 = load(3, at);
        const __m512i a = _mm512_unpacklo_epi32(v0, v1), b = _mm512_unpackhi_epi32(v0, v1);
        const __m512i c = _mm512_unpacklo_epi32(v2, v3), d = _mm512_unpackhi_epi32(v2, v3);
        to[0] = (U) _mm512_unpacklo_epi64(a, c);
        to[1] = (U) _mm512_unpackhi_epi64(a, c);
        to[2] = (U) _mm512_unpacklo_epi64(b, d);
        to[3] = (U) _mm512_unpackhi_epi64(b, d);
    }
    GGPIPE_TARGET GGPIPE_INLINE U word(int at) const {
        const auto word = [&](int lane) GGPIPE_TARGET GGPIPE_INLINE {
            int32_t w;
            memcpy(&w, (*this)[lane] + at, 4);
            return w;
        };
        return (U) _mm512_setr_epi32(word(0), word(1), word(2), word(3), word(4), word(5), word(6), word(7), word(8), word(9),
                                     word(10), word(11), word(12), word(13), word(14), word(15));
    }
    GGPIPE_TARGET GGPIPE_INLINE U bytes(int at) const { return word(at) & 255; }
    GGPIPE_TARGET GGPIPE_INLINE F halves(int at) const {
        const auto half = [&](int lane) GGPIPE_TARGET GGPIPE_INLINE {
            int16_t h;
            memcpy(&h, (*this)[lane] + at, 2);
            return h;
        };
        return widened(_mm256_setr_epi16(half(0), half(1), half(2), half(3), half(4), half(5), half(6), half(7), half(8),
                                         half(9), half(10), half(11), half(12), half(13), half(14), half(15)));
    }

   private:
    GGPIPE_TARGET GGPIPE_INLINE __m512i load(int first, int at) const {  // 16 bytes of each fourth lane
        const auto from = [&](int lane) GGPIPE_TARGET GGPIPE_INLINE {
            return _mm_loadu_si128((const __m128i *) ((*this)[first + lane] + at));
        };
        __m512i v = _mm512_castsi128_si512(from(0));  // the rest by loads, which need no shuffles
        v = _mm512_mask_broadcast_i32x4(v, 0x00f0, from(4));
        v = _mm512_mask_broadcast_i32x4(v, 0x0f00, from(8));
        return _mm512_mask_broadcast_i32x4(v, 0xf000, from(12));
    }
    const uint8_t * fourths_[4];  // such that few registers hold all addresses
    size_t stride_, strides_;     // one, and three
};

// ---- eight rows side by side --------------------------------------------------------------------------------
class Eights {
   public:
    static constexpr int kGroup = 8;
    int n_units;
    GGPIPE_TARGET GGPIPE_INLINE Eights(const uint8_t * first, size_t stride, int n_units) : n_units(n_units), a_(first), b_(first + stride) {}
    GGPIPE_TARGET GGPIPE_INLINE void operator+=(int bytes) {
        a_ += bytes;
        b_ += bytes;
    }
    // 8 bytes of each lane, as two vectors.
    GGPIPE_TARGET GGPIPE_INLINE void words(int at, U * to) const {
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i a = _mm512_loadu_si512(a_ + at), b = _mm512_loadu_si512(b_ + at);
        to[0] = (U) _mm512_permutex2var_epi32(a, even, b);
        to[1] = (U) _mm512_permutex2var_epi32(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
    }
    GGPIPE_TARGET GGPIPE_INLINE F halves(int at) const {
        return widened(_mm256_inserti128_si256(_mm256_castsi128_si256(load(a_ + at)), load(b_ + at), 1));
    }
    GGPIPE_TARGET GGPIPE_INLINE U bytes(int at) const {
        return (U) _mm512_cvtepu8_epi32(_mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *) (a_ + at)), _mm_loadl_epi64((const __m128i *) (b_ + at))));
    }
    GGPIPE_TARGET GGPIPE_INLINE U pairs_of_bytes(int at) const {
        return (U) _mm512_cvtepu16_epi32(_mm256_inserti128_si256(_mm256_castsi128_si256(load(a_ + at)), load(b_ + at), 1));
    }
    // 6-bit scales and minima, packed as in one block of Q4_K, but of eight rows.
    GGPIPE_TARGET GGPIPE_INLINE void scales(int at, I & scales, F & minima) const {
        uint32_t s[4], m[4];
        for (int i = 0; i < 2; i++) {
            uint32_t packed[3];
            memcpy(packed, (i ? b_ : a_) + at, sizeof packed);
            s[2 * i] = packed[0] & 0x3f3f3f3f;
            s[2 * i + 1] = (packed[2] & k4) | (packed[0] >> 6 & k2) << 4;
            m[2 * i] = packed[1] & 0x3f3f3f3f;
            m[2 * i + 1] = (packed[2] >> 4 & k4) | (packed[1] >> 6 & k2) << 4;
        }
        scales = (I) _mm512_cvtepu8_epi32(_mm_setr_epi32(s[0], s[1], s[2], s[3]));
        minima = floats((I) _mm512_cvtepu8_epi32(_mm_setr_epi32(m[0], m[1], m[2], m[3])));
    }

   private:
    GGPIPE_TARGET GGPIPE_INLINE static __m128i load(const uint8_t * from) { return _mm_loadu_si128((const __m128i *) from); }
    const uint8_t * a_, * b_;  // lanes 0 to 7, and 8 to 15
};

}  // namespace ggpipe::GGPIPE_TILES
#endif
