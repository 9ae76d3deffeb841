// Kernels for products of weights with grids, with AVX2; see products.cpp.
#include "kernels.h"
#include "quad_grids.h"
#include "quad_tiles.h"

namespace ggpipe {

const Kernel * avx2_grid_kernel([[maybe_unused]] ggml_type type) {
#ifdef __x86_64__
    switch (type) {
#define GGPIPE_KERNEL(NAME) \
        case GGML_TYPE_##NAME: return avx2::kernel_with<avx2::NAME>();
        GGPIPE_FOR_GRID_FORMATS(GGPIPE_KERNEL)
#undef GGPIPE_KERNEL
        default: return nullptr;
    }
#else
    return nullptr;
#endif
}

}  // namespace ggpipe
