// Vectors of floats with AVX-512. Sources include this in a namespace of their own.

constexpr int kWidth = 16;
using F = Floats<kWidth>;

GGPIPE_TARGET GGPIPE_INLINE inline F all(float x) { return _mm512_set1_ps(x); }
GGPIPE_TARGET GGPIPE_INLINE inline F widened(const uint16_t * halves) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) halves));
}
GGPIPE_TARGET GGPIPE_INLINE inline F integers(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
GGPIPE_TARGET GGPIPE_INLINE inline F multiply_add(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
GGPIPE_TARGET GGPIPE_INLINE inline F rounded(F x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
GGPIPE_TARGET GGPIPE_INLINE inline float maximum(F x) { return _mm512_reduce_max_ps(x); }
// x times 2 to an integer of at most 0; 0 below the normal numbers.
GGPIPE_TARGET GGPIPE_INLINE inline F scaled(F x, F exponent) {
    const __m512i bits = _mm512_add_epi32((__m512i) x, _mm512_slli_epi32(_mm512_cvtps_epi32(exponent), 23));
    return (F) _mm512_maskz_mov_epi32(_mm512_cmp_ps_mask(exponent, all(-125), _CMP_GE_OQ), bits);
}
// The sums of eight vectors.
GGPIPE_TARGET GGPIPE_INLINE inline void add_up(const F * v, float * to) {
    using Half = Floats<8>;
    const auto half = [](F x) GGPIPE_TARGET GGPIPE_INLINE -> Half {
        return _mm512_castps512_ps256(x) + _mm512_extractf32x8_ps(x, 1);
    };
    const auto pairs = [&](F x, F y) GGPIPE_TARGET GGPIPE_INLINE -> Half {
        const Half a = half(x), b = half(y);
        return _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b);
    };
    const auto fours = [](Half a, Half b) GGPIPE_TARGET GGPIPE_INLINE -> Half {
        return _mm256_shuffle_ps(a, b, 0x44) + _mm256_shuffle_ps(a, b, 0xee);
    };
    const Half low = fours(pairs(v[0], v[1]), pairs(v[2], v[3])), high = fours(pairs(v[4], v[5]), pairs(v[6], v[7]));
    _mm256_store_ps(to, _mm256_permute2f128_ps(low, high, 0x20) + _mm256_permute2f128_ps(low, high, 0x31));
}
// The sums of 16 vectors.
GGPIPE_TARGET GGPIPE_INLINE inline void add_up_16(const F * v, float * to) {
    const auto halves = [](F x, F y) GGPIPE_TARGET GGPIPE_INLINE -> F {
        return (F) _mm512_shuffle_f32x4(x, y, 0x44) + (F) _mm512_shuffle_f32x4(x, y, 0xee);
    };
    const auto pairs = [](F a, F b) GGPIPE_TARGET GGPIPE_INLINE -> F {
        return (F) _mm512_unpacklo_ps(a, b) + (F) _mm512_unpackhi_ps(a, b);
    };
    const auto fours = [](F a, F b) GGPIPE_TARGET GGPIPE_INLINE -> F {
        return (F) _mm512_shuffle_ps(a, b, 0x44) + (F) _mm512_shuffle_ps(a, b, 0xee);
    };
    const auto half = [&](int i) GGPIPE_TARGET GGPIPE_INLINE -> F { return halves(v[i], v[i + 8]); };
    const F low = fours(pairs(half(0), half(1)), pairs(half(2), half(3)));
    const F high = fours(pairs(half(4), half(5)), pairs(half(6), half(7)));
    // 128-bit parts: low: [0-3 a, 0-3 b, 8-11 a, 8-11 b], high: [4-7 a, 4-7 b, 12-15 a, 12-15 b]
    const F sums = (F) _mm512_shuffle_f32x4(low, high, 0x88) + (F) _mm512_shuffle_f32x4(low, high, 0xdd);
    _mm512_store_ps(to, _mm512_shuffle_f32x4(sums, sums, 0xd8));
}
