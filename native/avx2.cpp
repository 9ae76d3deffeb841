// Kernels for products of quantized weights with AVX2; see products.cpp.
#include "kernels.h"
#include "quad_tiles.h"

namespace ggpipe {

const Kernel * avx2_kernel([[maybe_unused]] ggml_type type, [[maybe_unused]] bool is_repacked) {
#ifdef __x86_64__
    return avx2::kernel_of(type, is_repacked);
#else
    return nullptr;
#endif
}

}  // namespace ggpipe
