// Vectors of floats with AVX2. Sources include this in a namespace of their own.

constexpr int kWidth = 8;
using F = Floats<kWidth>;

GGPIPE_TARGET GGPIPE_INLINE inline F all(float x) { return _mm256_set1_ps(x); }
GGPIPE_TARGET GGPIPE_INLINE inline F widened(const uint16_t * halves) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) halves));
}
GGPIPE_TARGET GGPIPE_INLINE inline F integers(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }
GGPIPE_TARGET GGPIPE_INLINE inline F multiply_add(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
GGPIPE_TARGET GGPIPE_INLINE inline F rounded(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
GGPIPE_TARGET GGPIPE_INLINE inline float maximum(F x) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
// x times 2 to an integer of at most 0; 0 below the normal numbers.
GGPIPE_TARGET GGPIPE_INLINE inline F scaled(F x, F exponent) {
    const __m256i bits = _mm256_add_epi32((__m256i) x, _mm256_slli_epi32(_mm256_cvtps_epi32(exponent), 23));
    return _mm256_and_ps((__m256) bits, _mm256_cmp_ps(exponent, all(-125), _CMP_GE_OQ));
}
// The sums of eight vectors.
GGPIPE_TARGET GGPIPE_INLINE inline void add_up(const F * v, float * to) {
    const auto pairs = [](F a, F b) GGPIPE_TARGET GGPIPE_INLINE -> F {
        return _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b);
    };
    const auto fours = [](F a, F b) GGPIPE_TARGET GGPIPE_INLINE -> F {
        return _mm256_shuffle_ps(a, b, 0x44) + _mm256_shuffle_ps(a, b, 0xee);
    };
    const F low = fours(pairs(v[0], v[1]), pairs(v[2], v[3])), high = fours(pairs(v[4], v[5]), pairs(v[6], v[7]));
    _mm256_store_ps(to, _mm256_permute2f128_ps(low, high, 0x20) + _mm256_permute2f128_ps(low, high, 0x31));
}
