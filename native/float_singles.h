// Products of floats in single precision. Sources for one set of instructions define all that float_tiles.h needs but types,
// and also load, store, multiply_add, and the formats F16 and BF16, which widen weights and round activations; then they
// include this instead of float_tiles.h.

struct F32 {
    using Number = float;
    GGPIPE_TARGET GGPIPE_INLINE static F weights(const Number * from) { return load(from); }
    GGPIPE_TARGET GGPIPE_INLINE static F rounded(F x) { return x; }
};
template <class Format> struct Singles : Format {
    using Rounded = float;
    static constexpr int kColumns = kLanes;
    GGPIPE_TARGET GGPIPE_INLINE static F activations(const float * from) { return load(from); }
    GGPIPE_TARGET GGPIPE_INLINE static F add(F w, F x, F sum) { return multiply_add(w, x, sum); }
    GGPIPE_TARGET GGPIPE_INLINE static void round(const float * from, float * to) { store(to, Format::rounded(load(from))); }
};

#include "float_tiles.h"

const Kernel * kernel_in_singles(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32: return &kKernel<Singles<F32>>;
        case GGML_TYPE_F16: return &kKernel<Singles<F16>>;
        case GGML_TYPE_BF16: return &kKernel<Singles<BF16>>;
        default: return nullptr;
    }
}
