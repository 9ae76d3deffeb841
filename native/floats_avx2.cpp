// Kernels for products of weights in floating point with AVX2; see float_singles.h.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"

#ifdef __x86_64__
#include <immintrin.h>

#include "vectors.h"

#define GGPIPE_TARGET __attribute__((target("avx2,fma,f16c")))

namespace ggpipe {

namespace {
using F = __m256;
constexpr int kLanes = 8, kMostRows = 3;
constexpr char kName[] = "AVX2";

GGPIPE_TARGET GGPIPE_INLINE inline __m128i load_16(const void * from) { return _mm_loadu_si128((const __m128i *) from); }
GGPIPE_TARGET GGPIPE_INLINE inline F load(const float * from) { return _mm256_loadu_ps(from); }
GGPIPE_TARGET GGPIPE_INLINE inline void store(float * to, F x) { _mm256_storeu_ps(to, x); }
GGPIPE_TARGET GGPIPE_INLINE inline F multiply_add(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
GGPIPE_TARGET GGPIPE_INLINE inline float sum_of_lanes(F x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

struct F16 {
    using Number = uint16_t;
    GGPIPE_TARGET GGPIPE_INLINE static F weights(const Number * from) { return _mm256_cvtph_ps(load_16(from)); }
    GGPIPE_TARGET GGPIPE_INLINE static F rounded(F x) { return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
};
struct BF16 {
    using Number = uint16_t;
    GGPIPE_TARGET GGPIPE_INLINE static F weights(const Number * from) {
        return (F) _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16(from)), 16);
    }
    GGPIPE_TARGET GGPIPE_INLINE static F rounded(F x) {  // to nearest, ties to even; what is not a number stays that
        const __m256i bits = (__m256i) x, odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i nearest = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        const F upper = (F) _mm256_and_si256(nearest, _mm256_set1_epi32(int(0xffff0000)));
        return _mm256_blendv_ps(upper, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    }
};

#include "float_singles.h"
}  // namespace

const Kernel * avx2_float_kernel(ggml_type type) { return kernel_in_singles(type); }

}  // namespace ggpipe
#else
const ggpipe::Kernel * ggpipe::avx2_float_kernel(ggml_type) { return nullptr; }
#endif
