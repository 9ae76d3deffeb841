// Kernels for products of weights in floating point with AVX-512; see float_singles.h.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"

#ifdef __x86_64__
#include <immintrin.h>

#include "vectors.h"

#define GGPIPE_TARGET __attribute__((target("arch=x86-64-v4")))

namespace ggpipe {

namespace {
using F = __m512;
constexpr int kLanes = 16, kMostRows = 6;
constexpr char kName[] = "AVX-512";

GGPIPE_TARGET GGPIPE_INLINE inline __m256i load_32(const void * from) { return _mm256_loadu_si256((const __m256i *) from); }
GGPIPE_TARGET GGPIPE_INLINE inline F load(const float * from) { return _mm512_loadu_ps(from); }
GGPIPE_TARGET GGPIPE_INLINE inline void store(float * to, F x) { _mm512_storeu_ps(to, x); }
GGPIPE_TARGET GGPIPE_INLINE inline F multiply_add(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
GGPIPE_TARGET GGPIPE_INLINE inline float sum_of_lanes(F x) { return _mm512_reduce_add_ps(x); }

struct F16 {
    using Number = uint16_t;
    GGPIPE_TARGET GGPIPE_INLINE static F weights(const Number * from) { return _mm512_cvtph_ps(load_32(from)); }
    GGPIPE_TARGET GGPIPE_INLINE static F rounded(F x) { return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
};
struct BF16 {
    using Number = uint16_t;
    GGPIPE_TARGET GGPIPE_INLINE static F weights(const Number * from) {
        return (F) _mm512_slli_epi32(_mm512_cvtepu16_epi32(load_32(from)), 16);
    }
    GGPIPE_TARGET GGPIPE_INLINE static F rounded(F x) {  // to nearest, ties to even; what is not a number stays that
        const __m512i bits = (__m512i) x, odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        const __m512i upper = _mm512_and_si512(nearest, _mm512_set1_epi32(int(0xffff0000)));
        return (F) _mm512_mask_mov_epi32(upper, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits);
    }
};

#include "float_singles.h"
}  // namespace

const Kernel * avx512_float_kernel(ggml_type type) { return kernel_in_singles(type); }

}  // namespace ggpipe
#else
const ggpipe::Kernel * ggpipe::avx512_float_kernel(ggml_type) { return nullptr; }
#endif
