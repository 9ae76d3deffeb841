// Kernels for products of quantized weights with AVX-VNNI, which adds up products of four bytes in one instruction where AVX2
// needs two or three; see products.cpp.
#include "kernels.h"

#if defined __x86_64__ && defined GGPIPE_AVX_VNNI
#define GGPIPE_QUADS avx_vnni
#define GGPIPE_AVX2 __attribute__((target("avx2,fma,f16c,avxvnni")))
#define GGPIPE_DOT_BYTES _mm256_dpbusd_avx_epi32
#define GGPIPE_DOT_PAIRS _mm256_dpwssd_avx_epi32
#include "quad_grids.h"
#include "quad_tiles.h"

namespace ggpipe {
const Kernel * avx_vnni_kernel(ggml_type type, bool is_repacked) {
    switch (type) {
#define GGPIPE_KERNEL(NAME) \
        case GGML_TYPE_##NAME: return avx_vnni::kernel_with<avx_vnni::NAME>();
        GGPIPE_FOR_GRID_FORMATS(GGPIPE_KERNEL)
#undef GGPIPE_KERNEL
        default: return avx_vnni::kernel_of(type, is_repacked);
    }
}
}  // namespace ggpipe
#else
const ggpipe::Kernel * ggpipe::avx_vnni_kernel(ggml_type, bool) { return nullptr; }
#endif
