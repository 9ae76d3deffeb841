// Vectors of numbers.
#pragma once

#include <cstdint>

#define GGPIPE_INLINE __attribute__((always_inline))
#define GGPIPE_UNROLLED(INDEX, N) _Pragma("GCC unroll 8") for (int INDEX = 0; INDEX < (N); INDEX++)

namespace ggpipe {

template <int W> using Floats __attribute__((vector_size(4 * W))) = float;
template <int W> using Ints __attribute__((vector_size(4 * W))) = int32_t;
template <int W> using Unsigned __attribute__((vector_size(4 * W))) = uint32_t;

}  // namespace ggpipe
