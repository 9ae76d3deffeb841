// Kernels for products of weights in floating point with AVX2; see float_tiles.h.
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
GGPIPE_TARGET GGPIPE_INLINE inline float sum_of_lanes(F x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Products in single precision; a Format widens weights, and rounds.
template <class Format> struct Singles : Format {
    using Rounded = float;
    static constexpr int kColumns = kLanes;
    GGPIPE_TARGET GGPIPE_INLINE static F activations(const float * from) { return _mm256_loadu_ps(from); }
    GGPIPE_TARGET GGPIPE_INLINE static F add(F w, F x, F sum) { return _mm256_fmadd_ps(w, x, sum); }
    GGPIPE_TARGET GGPIPE_INLINE static void round(const float * from, float * to) {
        _mm256_storeu_ps(to, Format::rounded(_mm256_loadu_ps(from)));
    }
};
struct F32 {
    using Number = float;
    GGPIPE_TARGET GGPIPE_INLINE static F weights(const Number * from) { return _mm256_loadu_ps(from); }
    GGPIPE_TARGET GGPIPE_INLINE static F rounded(F x) { return x; }
};
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

#include "float_tiles.h"
}  // namespace

const Kernel * avx2_float_kernel(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32: return &kKernel<Singles<F32>>;
        case GGML_TYPE_F16: return &kKernel<Singles<F16>>;
        case GGML_TYPE_BF16: return &kKernel<Singles<BF16>>;
        default: return nullptr;
    }
}

}  // namespace ggpipe
#else
const ggpipe::Kernel * ggpipe::avx2_float_kernel(ggml_type) { return nullptr; }
#endif
