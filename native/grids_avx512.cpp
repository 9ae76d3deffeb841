// Kernels for products of weights with grids, with AVX-512 but without VNNI; see products.cpp. Numbers have at most 7 bits, so sums of
// two products fit into 16. Two tiles at a time would take 14 % longer.
#ifdef __x86_64__
#include <immintrin.h>

#define GGPIPE_TILES avx512
#define GGPIPE_TARGET __attribute__((target("arch=x86-64-v4")))
#define GGPIPE_DOT_BYTES bytes_dot

namespace ggpipe::GGPIPE_TILES {
GGPIPE_TARGET inline __m512i bytes_dot(__m512i sum, __m512i a, __m512i b) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(a, b), _mm512_set1_epi16(1)));
}
}  // namespace ggpipe::GGPIPE_TILES
#endif
#include "grid_blocks.h"
#include "kernels.h"
#include "tiles.h"

namespace ggpipe {

const Kernel * avx512_grid_kernel([[maybe_unused]] ggml_type type) {
#ifdef __x86_64__
    switch (type) {
#define GGPIPE_KERNEL(NAME) \
        case GGML_TYPE_##NAME: return avx512::kernel_with<avx512::NAME, false>("AVX-512");
        GGPIPE_FOR_GRID_FORMATS(GGPIPE_KERNEL)
#undef GGPIPE_KERNEL
        default: return nullptr;
    }
#else
    return nullptr;
#endif
}

}  // namespace ggpipe
