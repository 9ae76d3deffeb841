// Vectors of numbers, and what compilers do not make of loops over them.
#pragma once

#include <cstdint>
#include <cstring>

#define GGPIPE_INLINE __attribute__((always_inline))

namespace ggpipe {

template <int W> using Floats __attribute__((vector_size(4 * W))) = float;
template <int W> using Ints __attribute__((vector_size(4 * W))) = int32_t;
template <int W> using Unsigned __attribute__((vector_size(4 * W))) = uint32_t;

// A finite F16 number. Compilers make vectors of this, and of conversions not yet.
GGPIPE_INLINE inline float widen(uint16_t half) {
    uint32_t bits = (half & 0x7fffu) << 13;
    float f;
    memcpy(&f, &bits, 4);
    f *= 0x1p112f;
    memcpy(&bits, &f, 4);
    bits |= (half & 0x8000u) << 16;
    memcpy(&f, &bits, 4);
    return f;
}

}  // namespace ggpipe
