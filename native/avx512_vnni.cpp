// Kernels for products of quantized weights with AVX-512 VNNI; see products.cpp.
#include "grid_blocks.h"
#include "kernels.h"
#include "tiles.h"

namespace ggpipe {

const Kernel * avx512_vnni_kernel([[maybe_unused]] ggml_type type, [[maybe_unused]] bool is_repacked) {
#ifdef __x86_64__
#define GGPIPE_KERNEL(NAME) \
        case GGML_TYPE_##NAME: return avx512_vnni::kernel_with<avx512_vnni::NAME, true>("AVX-512 VNNI");
#define GGPIPE_REPACKED_KERNEL(NAME) \
        case GGML_TYPE_##NAME: return avx512_vnni::kernel_with<avx512_vnni::Repacked##NAME, true>("AVX-512 VNNI");
    if (is_repacked) {
        switch (type) {
            GGPIPE_FOR_REPACKED_FORMATS(GGPIPE_REPACKED_KERNEL)
            default: return nullptr;
        }
    }
    switch (type) {
        GGPIPE_FOR_FORMATS(GGPIPE_KERNEL)
        GGPIPE_FOR_GRID_FORMATS(GGPIPE_KERNEL)
#undef GGPIPE_KERNEL
#undef GGPIPE_REPACKED_KERNEL
        default: return nullptr;
    }
#else
    return nullptr;
#endif
}

}  // namespace ggpipe
