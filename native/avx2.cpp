// Kernels for products of quantized weights with AVX2; see products.cpp.
#include "kernels.h"
#include "quad_tiles.h"

namespace ggpipe {

const Kernel * avx2_kernel([[maybe_unused]] ggml_type type) {
#ifdef __x86_64__
    static const bool can = __builtin_cpu_supports("x86-64-v3");
    switch (can ? type : GGML_TYPE_COUNT) {
#define GGPIPE_KERNEL(NAME) \
        case GGML_TYPE_##NAME: { \
            using Format = avx2::NAME; \
            static constexpr Kernel kernel{Format::From::kGroup > 1, avx2::kLanes, avx2::kNumberBytes<Format>, \
                                           avx2::quantize<Format>, avx2::multiply<Format>}; \
            return &kernel; \
        }
        GGPIPE_KERNEL(Q8_0)
        GGPIPE_KERNEL(Q4_0)
        GGPIPE_KERNEL(Q4_1)
        GGPIPE_KERNEL(Q5_0)
        GGPIPE_KERNEL(Q5_1)
        GGPIPE_KERNEL(IQ4_NL)
        GGPIPE_KERNEL(MXFP4)
        GGPIPE_KERNEL(Q2_K)
        GGPIPE_KERNEL(Q3_K)
        GGPIPE_KERNEL(Q4_K)
        GGPIPE_KERNEL(Q5_K)
        GGPIPE_KERNEL(Q6_K)
        GGPIPE_KERNEL(IQ4_XS)
#undef GGPIPE_KERNEL
        default: return nullptr;
    }
#else
    return nullptr;
#endif
}

}  // namespace ggpipe
