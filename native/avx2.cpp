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
            static constexpr Kernel kernel{Format::From::kGroup > 1, avx2::kTileRows, sizeof(avx2::Numbers<Format>), \
                                           avx2::quantize<Format>, avx2::multiply<Format>}; \
            return &kernel; \
        }
        GGPIPE_FOR_FORMATS(GGPIPE_KERNEL)
#undef GGPIPE_KERNEL
        default: return nullptr;
    }
#else
    return nullptr;
#endif
}

}  // namespace ggpipe
