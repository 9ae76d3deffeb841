// Kernel for products of weights in BF16 with AVX-512 BF16; see float_tiles.h. A lane is the sum over pairs of columns.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"

#ifdef __x86_64__
#include <immintrin.h>

#include "vectors.h"

#define GGPIPE_TARGET __attribute__((target("arch=x86-64-v4,avx512bf16")))

namespace ggpipe {

namespace {
using F = __m512;
constexpr int kLanes = 16, kMostRows = 6;
constexpr char kName[] = "AVX-512 BF16";

GGPIPE_TARGET GGPIPE_INLINE inline float sum_of_lanes(F x) { return _mm512_reduce_add_ps(x); }

struct BF16 {
    using Number = uint16_t;
    using Rounded = uint16_t;
    static constexpr int kColumns = 2 * kLanes;
    GGPIPE_TARGET GGPIPE_INLINE static __m512i weights(const Number * from) { return _mm512_loadu_si512(from); }
    GGPIPE_TARGET GGPIPE_INLINE static __m512i activations(const Rounded * from) { return _mm512_loadu_si512(from); }
    GGPIPE_TARGET GGPIPE_INLINE static F add(__m512i w, __m512i x, F sum) {
        return _mm512_dpbf16_ps(sum, (__m512bh) w, (__m512bh) x);
    }
    GGPIPE_TARGET GGPIPE_INLINE static void round(const float * from, Rounded * to) {
        _mm512_storeu_si512(to, (__m512i) _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + kLanes), _mm512_loadu_ps(from)));
    }
};

#include "float_tiles.h"
}  // namespace

const Kernel * avx512_bf16_kernel(ggml_type type) { return type == GGML_TYPE_BF16 ? &kKernel<BF16> : nullptr; }

}  // namespace ggpipe
#else
const ggpipe::Kernel * ggpipe::avx512_bf16_kernel(ggml_type) { return nullptr; }
#endif
