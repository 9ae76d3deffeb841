// Products of floats in single precision, for float_tiles.h: sources define F, kLanes, load, store, multiply_add and the formats
// of weights F16 and BF16, which widen weights and round activations, and include this as well as what float_tiles.h wants.

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
