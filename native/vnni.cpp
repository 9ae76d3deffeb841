// Kernels for products of quantized weights with AVX-512 VNNI; see products.cpp.
#include "kernels.h"
#include "tiles.h"

namespace ggpipe {

const Kernel * vnni_kernel([[maybe_unused]] ggml_type type) {
#ifdef __x86_64__
    static const bool can = __builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512vnni");
    switch (can ? type : GGML_TYPE_COUNT) {
#define GGPIPE_KERNEL(NAME) \
        case GGML_TYPE_##NAME: { \
            static constexpr Kernel kernel{NAME::From::kGroup > 1, kLanes, kChunk, quantize<NAME>, multiply<NAME>}; \
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
